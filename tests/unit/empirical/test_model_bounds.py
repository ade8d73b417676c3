"""Bounds of a whole model: above all admitted runs at every effort."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch

from kcdsl.ir.terms import KernelRef
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import ProblemFactory
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.empirical.bounds import model as model_bounds
from kcdsl_backends.empirical.bounds.model import EFFORTS, AffineBound, PassEffort
from kcdsl_backends.requests import Request
from tests.support.attributions import fixed_requests, pair_of, ref, small_model

EFFORT_NUMBERS = range(len(EFFORTS))


def bound_of(train: KernelRef, infer: KernelRef) -> AffineBound:
    factory = ProblemFactory(small_model(), resolve(train), resolve(infer), torch.device("cpu"))
    return AffineBound(factory, train.run, infer.run)


def signs(generator: torch.Generator) -> Iterator[Callable[[tuple[int, ...]], torch.Tensor]]:
    yield torch.ones
    yield lambda shape: -torch.ones(shape)
    for _ in range(3):
        yield lambda shape: torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0


def admitted(model: AffineBound, request: Request, seed: int) -> Iterator[torch.Tensor]:
    """Yield drifts of runs whose roundings are as large as the claims admit."""
    generator = torch.Generator().manual_seed(seed)
    train, infer = model.factory.problem("model", request.tokens).simulators()
    for one in signs(generator):
        symbols = {n: one(s).double() for n, s in train.symbol_shapes().items()}
        for two in signs(generator):
            other = {n: two(s).double() for n, s in infer.symbol_shapes().items()}
            none = torch.zeros(1, 1, dtype=torch.float64)
            yield infer.run(none, other) - train.run(none, symbols)


PAIRS = {
    "other attention": (ref(), ref("torch.sdpa.flash")),
    "the same numerics": (ref(), ref()),
    "exact training": (ref(compute="float64", accumulate="float64"), ref()),
    "exact inference": (ref(), ref(compute="float64", accumulate="float64")),
    "one coarse side": (ref(), ref(compute="bfloat16")),
    "coarse weights": (ref(), ref(weights={"format": "fp8_e4m3", "scale": "per_channel"})),
}


@pytest.mark.full
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("effort", EFFORT_NUMBERS)
def test_admitted_runs_are_within_the_bound(name: str, effort: int) -> None:
    model = bound_of(*PAIRS[name])
    request = fixed_requests(1)[0]
    box = model.bound(request, effort)
    if box.reason is not None:
        assert name == "one coarse side"
        return
    largest = 0.0
    for drift in admitted(model, request, effort):
        found = drift.numpy()
        assert ((box.low <= found) & (found <= box.high)).all()
        largest = max(largest, float(np.abs(found).max()))
    assert largest > 1e-4 * float(np.maximum(-box.low, box.high).max())


@pytest.mark.full
@pytest.mark.parametrize("effort", EFFORT_NUMBERS)
def test_real_kernels_are_within_the_bound(effort: int) -> None:
    pair = pair_of(small_model(), *PAIRS["other attention"])
    model = bound_of(*PAIRS["other attention"])
    for request in fixed_requests(2, longest=9):
        box = model.bound(request, effort)
        with torch.no_grad():
            drift = pair.infer.logits(request.tokens) - pair.train.logits(request.tokens)
        found = drift.double().numpy()
        assert box.reason is None
        assert ((box.low <= found) & (found <= box.high)).all()


@pytest.mark.full
def test_more_effort_gives_more_passes_and_tighter_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    original, made = KernelRun.passing, [0]

    def counting(self: KernelRun, *rest: object) -> bool:
        found = original(self, *rest)  # type: ignore[arg-type]
        made[0] += found
        return found

    monkeypatch.setattr(KernelRun, "passing", counting)
    model, request = bound_of(*PAIRS["other attention"]), fixed_requests(2)[1]
    widths, passes = [], []
    for effort in EFFORT_NUMBERS:
        made[0] = 0
        box = model.bound(request, effort)
        widths.append(float((box.high - box.low).max()))
        passes.append(made[0])
    assert passes[0] < passes[-1]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < widths[0]


@pytest.mark.full
def test_largest_effort_equals_the_affine_bound() -> None:
    model, request = bound_of(*PAIRS["other attention"]), fixed_requests(1)[0]
    problem = model.factory.problem("model", request.tokens)
    whole = problem.forms(None, torch.zeros(1, 1, dtype=torch.float64)).box()
    box = model.bound(request, EFFORT_NUMBERS[-1])
    assert torch.equal(torch.from_numpy(box.low) <= whole.lo, torch.ones_like(whole.lo).bool())
    assert (box.high - whole.hi.numpy() <= 2.0**-9 * whole.mag().numpy()).all()


@pytest.mark.full
def test_missing_bound_names_its_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bound_of(ref(), ref(compute="float16"))
    few = PassEffort("none at all", 2.0**20, 0.1)
    monkeypatch.setattr(model_bounds, "EFFORTS", (few,))
    assert model.domains == ("none at all",)
    box = model.bound(fixed_requests(3)[2], 0)
    assert box.reason is not None
    assert ":" in box.reason


def test_larger_efforts_have_larger_time_estimates() -> None:
    model, requests = bound_of(ref(), ref("torch.sdpa.flash")), fixed_requests(2)
    costs = [[model.cost(r, effort) for r in requests] for effort in EFFORT_NUMBERS]
    assert all(few < more for few, more in pairwise(costs))
    assert costs[0][0] < costs[0][1]
