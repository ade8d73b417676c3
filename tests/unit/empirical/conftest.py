"""Pairs of small fake kernels, and contracts about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.terms import (
    Abs,
    Budget,
    Clause,
    Compare,
    Constants,
    Escalation,
    EvidenceKind,
    Family,
    Formula,
    KernelRef,
    Level,
    Metric,
    ModelRef,
    Number,
    Program,
    Slice,
    Statistic,
    Term,
)
from kcdsl_backends.empirical.collection.context import KernelContext
from kcdsl_backends.empirical.table.evidence import SamplingUnit, SliceData
from kcdsl_backends.requests import Request, RequestFile
from tests.support.evaluation import Evaluation, evaluate

VOCABULARY = 16
WIDTH = 4

Function = Callable[[tuple[int, ...]], Tensor]


def base_logits(tokens: tuple[int, ...]) -> Tensor:
    """Return logits [T, V] that depend only on the tokens."""
    generator = torch.Generator().manual_seed(sum((i + 1) * t for i, t in enumerate(tokens)))
    return 3 * torch.randn(len(tokens), VOCABULARY, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class FakeKernel:
    """A kernel whose outputs are one function of the tokens."""

    function: Function = base_logits
    scale: float = 1.0
    name: str = "fake"

    def tokens(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(list(ids))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.function(tuple(tokens.tolist()))

    def logits(self, ids: Sequence[int]) -> Tensor:
        return self.function(tuple(ids))

    def hidden(self, ids: Sequence[int]) -> Tensor:
        return self.function(tuple(ids))[:, :WIDTH]

    def block(self, name: str, x: Tensor) -> Tensor:
        return self.scale * x.to(torch.float64)

    def fingerprint(self) -> dict[str, Any]:
        return {"schema": "test", "run": self.name, "numerics": {"compute": "float64"}}


@dataclass(frozen=True)
class Bound:
    """A certified bound that is equal everywhere."""

    bound_inf: float
    drift_bound: np.ndarray


def drifting(size: float, seed: int = 1) -> Function:
    """Return the base function with noise of the given size."""

    def function(tokens: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(seed + sum(tokens))
        noise = torch.randn(len(tokens), VOCABULARY, generator=generator, dtype=torch.float64)
        return base_logits(tokens) + size * noise

    return function


def statistic(kind: str, name: str, q: str | None = None, magnitude: bool = False) -> Term:
    inner: Term = Metric(name)
    return Statistic(kind, Abs(inner) if magnitude else inner, None if q is None else Fraction(q))


def clause(
    left: Term | Formula,
    op: str = "<=",
    limit: str = "1",
    *,
    id: str = "N-1",
    slices: tuple[str, ...] = ("all",),
    family: Family = Family.NUMERICAL,
    level: Level = Level.L2,
    budget: tuple[str, str] | None = None,
    evidence: EvidenceKind | None = None,
    action: str | None = None,
) -> Clause:
    """Return `left op limit`, or a clause whose requirement is the formula `left`."""
    formula = left if isinstance(left, Formula) else Compare(op, left, Number(Fraction(limit)))
    return Clause(
        id,
        family,
        formula,
        level,
        slices,
        None if budget is None else Budget(Fraction(budget[0]), budget[1]),
        evidence,
        action,
        "text",
    )


def escalation() -> Escalation:
    from kcdsl.ir.escalation import build_escalation

    return build_escalation({}, {})


def program(*clauses: Clause, constants: Constants | None = None) -> Program:
    kernel = KernelRef("torch.eager", ())
    return Program(
        "test",
        "1.0.0",
        ModelRef("model.safetensors", architecture="llama"),
        kernel,
        kernel,
        "rows.jsonl",
        (Slice("all"), Slice("few")),
        clauses,
        escalation(),
        constants or Constants(),
    )


def requests(n: int = 20, length: int = 6) -> tuple[Request, ...]:
    return tuple(
        Request(
            f"rows.jsonl:{i}",
            str(i),
            tuple((3 * i + 5 * j + i * j) % VOCABULARY for j in range(length)),
            {},
            i + 1,
        )
        for i in range(n)
    )


def setting(
    *clauses: Clause,
    train: FakeKernel | None = None,
    infer: FakeKernel | None = None,
    rows: tuple[Request, ...] | None = None,
    certified: float | None = None,
    **changes: Any,
) -> KernelContext:
    """Return an evaluation of fake kernels, equal by default."""
    chosen = requests() if rows is None else rows
    certify = None
    if certified is not None:
        limit = certified
        certify = lambda block, x: Bound(limit, np.full(tuple(x.shape), limit))  # noqa: E731
    found = KernelContext(
        program=program(*clauses),
        train=train or FakeKernel(name="train"),
        infer=infer or FakeKernel(name="infer"),
        block_input=lambda request, block: torch.ones(request.length, WIDTH),
        files={"rows.jsonl": RequestFile("rows.jsonl", "0" * 64, chosen, SourceFile("r", ""))},
        slices={"all": chosen, "few": chosen[:3]},
        encoder=False,
        blocks=frozenset({"attn_0", "model"}),
        weights={"loaded": "a" * 64, "file": "a" * 64},
        digests={"train": "1" * 64, "infer": "2" * 64},
        contract={"name": "test", "version": "1.0.0", "digest": "sha256:" + "3" * 64},
        model={
            "checkpoint": "model.safetensors",
            "sha256": "a" * 64,
            "architecture": "llama",
            "encoder": False,
        },
        environment={
            "kcdsl": "0",
            "python": "3",
            "torch": "2",
            "device": "cpu",
            "hardware": "test",
        },
        device=torch.device("cpu"),
        certify=certify,
        seconds=1.0,
    )
    return replace(found, **changes)


def slice_data(values: Mapping[str, Sequence[Sequence[float]]], **more: Any) -> SliceData:
    """Return a slice whose requests have the given values, one list per request."""
    count = len(next(iter(values.values())))
    units = tuple(
        SamplingUnit(
            f"r{i}",
            max(len(column[i]) for column in values.values()),
            {name: np.array(column[i], dtype=np.float64) for name, column in values.items()},
        )
        for i in range(count)
    )
    return SliceData("all", units, **more)


@dataclass(frozen=True)
class Lab:
    """The helpers above, for tests."""

    kernel: type[FakeKernel] = FakeKernel
    bound: type[Bound] = Bound
    base = staticmethod(base_logits)
    drifting = staticmethod(drifting)
    statistic = staticmethod(statistic)
    clause = staticmethod(clause)
    program = staticmethod(program)
    requests = staticmethod(requests)
    setting = staticmethod(setting)
    slice_data = staticmethod(slice_data)

    def evaluate(self, *clauses: Clause, **changes: Any) -> Evaluation:
        return evaluate(setting(*clauses, **changes))


@pytest.fixture
def lab() -> Lab:
    return Lab()
