"""Order, norm and span by affine forms: attacks, both programs, and underivable claims."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kcdsl.model.architecture import Model
from kcdsl.model.presets import resolve
from kcdsl_backends.attack.simulation import Simulator
from kcdsl_backends.certifier.statements.problems import BlockProblem, ProblemFactory, claim_margin
from kcdsl_backends.certifier.statements.proof import Proof, ProofBuilder, box_region, token_region
from kcdsl_backends.drift.affine_forms import AffineForms
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.functionals import contrasts, drift_bound, functional_bound, order_margins
from kcdsl_certs.recheck import recheck
from tests.support.random_models import random_model

TOKENS = (1, 5, 9, 2, 30)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 48, "max_position_embeddings": 32, "tie_word_embeddings": True,
    },
    "bert": {
        "model_type": "bert", "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 48,
        "max_position_embeddings": 32,
    },
}  # fmt: skip
EAGER: dict[str, object] = {"preset": "torch-eager"}
PAIRS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "the same": (EAGER, EAGER),
    "float32": (EAGER, {"preset": "torch-sdpa-flash", "compute": "float32"}),
    "float16": (EAGER, {"preset": "torch-sdpa-flash", "compute": "float16"}),
    "bfloat16 nearest": (EAGER, {**EAGER, "compute": "bfloat16", "casts": "nearest"}),
    "float64": (EAGER, {**EAGER, "compute": "float64", "accumulate": "float64"}),
    "fp8 weights": (EAGER, {"preset": "fp8-weights"}),
}
CASES = [
    ("llama", "model", 0.0), ("llama", "head", 2.0**-10), ("llama", "attn_0", 0.0),
    ("bert", "layer_0", 0.0), ("bert", "mlp_0", 2.0**-9),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the weights of this module."""
    return tmp_path_factory.mktemp("orders")


@cache
def model(kind: str, folder: Path) -> Model:
    return random_model(CONFIGS[kind], folder, 23)


class Case:
    """A block with its region and the affine forms of both kernels."""

    def __init__(self, kind: str, block: str, radius: float, pair: str, folder: Path) -> None:
        train, infer = (resolve(settings) for settings in PAIRS[pair])
        self.factory = ProblemFactory(model(kind, folder), train, infer, torch.device("cpu"))
        self.block = block
        self.problem: BlockProblem = self.factory.problem(block, TOKENS)
        self.centre = self.factory.centre(block, TOKENS)
        self.radius = torch.full((1, 1), radius, dtype=torch.float64)
        self.forms: AffineForms = self.problem.forms(self.centre, self.radius)
        self.margin = claim_margin(train, infer)

    def box(self) -> Box:
        """Return the box of the drift, intersected with that of the interval domain."""
        box = self.forms.box()
        try:
            return box.meet(self.problem.bound(self.centre, self.radius).output.drift)
        except NoBound:
            return box

    def proof(self, functional: str, claim: float, k: int = 1) -> bytes:
        """Return a proof with this claim, derivable or not."""
        factory = self.factory
        builder = ProofBuilder(
            factory.model, self.block, factory.train, factory.infer, functional, k
        )
        where = (
            token_region(TOKENS)
            if self.centre is None
            else box_region(
                "ball" if bool(self.radius.any()) else "points", self.centre, self.radius
            )
        )
        forms = self.forms
        builder.add(
            "a", self.problem.graph, where, claim, Proof(forms.witness(), "affine", forms.passes)
        )
        return builder.document()

    def checked(self, functional: str, claim: float, k: int = 1) -> str:
        """Return the independent checker's answer for a claim."""
        outcome = recheck(self.proof(functional, claim, k), self.factory.model.checkpoint.path)
        return outcome.reason

    def runs(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return outputs of admitted runs of both kernels on one input each."""
        generator, found = torch.Generator().manual_seed(7), []
        for _ in range(count):
            x = self.inside(torch.rand(1, generator=generator))
            found.append(tuple(
                kernel.run(x, {
                    name: torch.randint(0, 2, shape, generator=generator).double() * 2 - 1
                    for name, shape in kernel.symbol_shapes().items()
                })
                for kernel in self.problem.simulators()
            ))  # fmt: skip
        return [(one, two) for one, two in found]

    def inside(self, sign: Tensor) -> Tensor | None:
        """Return an input of the region in float32, near one of its corners."""
        if self.centre is None:
            return None
        moved = (self.centre + self.radius * 0.99 * (2 * sign - 1)).float().double()
        return moved if bool(self.radius.any()) else self.centre


@cache
def cases(kind: str, block: str, radius: float, pair: str, folder: Path) -> Case | None:
    """Return a case, or None where a coarse kernel has no bound."""
    try:
        return Case(kind, block, radius, pair, folder)
    except NoBound:
        assert pair not in ("the same", "float32", "float64")
        return None


def push(kernel: Simulator, x: Tensor | None, row: int, first: int, second: int) -> Tensor:
    """Return the output of a run that minimises z_first - z_second in a row."""
    symbols = {
        name: torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        for name, shape in kernel.symbol_shapes().items()
    }
    for _ in range(3):
        if not symbols:
            break
        output = kernel.run(x, symbols)
        slopes = torch.autograd.grad(
            output[row, second] - output[row, first],
            list(symbols.values()),
            allow_unused=True,
            materialize_grads=True,
        )
        symbols = {
            name: slope.sign().requires_grad_(True)
            for name, slope in zip(symbols, slopes, strict=True)
        }
    return kernel.run(x, symbols).detach()


@pytest.mark.full
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("kind", "block", "radius"), CASES)
def test_attacks_do_not_change_a_proved_order(
    kind: str, block: str, radius: float, pair: str, folder: Path
) -> None:
    case = cases(kind, block, radius, pair, folder)
    if case is None:
        return
    simulators = case.problem.simulators()
    reference = simulators[0].run(case.centre, {})
    for k in (1, 3):
        found = order_margins(case.forms, k)
        for row in range(len(TOKENS)):
            order = reference[row].argsort(descending=True)
            kept = set(order[:k].tolist())
            for kernel in simulators:
                least = float("inf")
                for second in order[k : k + 2].tolist():
                    output = push(kernel, case.centre, row, int(order[k - 1]), second)[row]
                    others = [j for j in range(len(output)) if j not in kept]
                    apart = output[sorted(kept)].amin() - output[others].amax()
                    least = min(least, float(apart))
                assert float(found[row]) <= least + 1e-12


@pytest.mark.sample(1)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("kind", "block", "radius"), CASES)
def test_both_programs_decide_equal_orders(
    kind: str, block: str, radius: float, pair: str, folder: Path
) -> None:
    case = cases(kind, block, radius, pair, folder)
    if case is None:
        return
    for k in (1, 2, 5):
        shown = float(order_margins(case.forms, k, factor=case.margin).amin())
        reason = case.checked("no_flip", 0.0, k)
        if shown > 0:
            assert reason == "ok"
        elif float(order_margins(case.forms, k).amin()) < -1e-9:
            assert reason == "claim/too-small"


@pytest.mark.full
def test_some_orders_are_proved_and_some_are_not(folder: Path) -> None:
    """Otherwise the tests above would be vacuous."""
    seen = set()
    for pair in PAIRS:
        case = cases("llama", "head", 0.0, pair, folder)
        if case is not None:
            seen |= {bool(value > 0) for k in (1, 2, 5) for value in order_margins(case.forms, k)}
    assert seen == {True, False}


@pytest.mark.full
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("kind", "block", "radius"), CASES)
def test_norm_and_span_hold_and_are_confirmed(
    kind: str, block: str, radius: float, pair: str, folder: Path
) -> None:
    case = cases(kind, block, radius, pair, folder)
    if case is None:
        return
    box = case.box()
    drifts = [two - one for one, two in case.runs(12)]
    for functional in ("2", "span"):
        found = functional_bound(case.forms, box, functional, lambda bound: False)
        assert found <= drift_bound(box, functional)
        for drift in drifts:
            seen = (
                drift.square().sum(-1).sqrt()
                if functional == "2"
                else drift.amax(-1) - drift.amin(-1)
            )
            assert float(seen.amax()) <= found * (1 + 1e-12) + 1e-13
        assert case.checked(functional, found * case.margin) == "ok"
        if pair in ("the same", "float32"):  # elsewhere the checker may find a smaller bound
            assert case.checked(functional, found * 0.9) == "claim/too-small"


@pytest.mark.full
def test_norm_and_span_are_tighter_than_the_box(folder: Path) -> None:
    case = Case("llama", "model", 0.0, "float32", folder)
    box = case.forms.box()
    for functional, share in (("2", 0.95), ("span", 0.95)):
        found = functional_bound(case.forms, box, functional, lambda bound: False)
        assert found < share * drift_bound(box, functional)
    enough = drift_bound(box, "span")
    assert functional_bound(case.forms, box, "span", lambda bound: bound <= enough) == enough


def test_span_covers_every_pair(folder: Path) -> None:
    """Compared with all pairs, bounded one by one: skipped pairs are not larger."""
    case = Case("bert", "mlp_0", 2.0**-9, "bfloat16 nearest", folder)
    box = case.forms.box()
    every = torch.arange(case.forms.shape[-1])
    first, second = torch.cartesian_prod(every, every).unbind(-1)
    for row in range(len(TOKENS)):
        exact = contrasts(case.forms, (row,), first, second).hi
        boxed = box.hi[row][first] - box.lo[row][second]
        found = functional_bound(case.forms, box, "span", lambda bound: False)
        assert float(torch.minimum(exact, boxed).amax()) <= found * (1 + 1e-12)


@pytest.mark.parametrize("k", [-1, 0, 16, 17])
def test_order_needs_other_columns(k: int, folder: Path) -> None:
    case = Case("llama", "attn_0", 0.0, "float32", folder)
    assert not bool((order_margins(case.forms, k) > -torch.inf).any())
    assert case.checked("no_flip", 0.0, k) == "document/field"


def test_nan_reference_shows_nothing(folder: Path) -> None:
    case = Case("llama", "head", 0.0, "float32", folder)
    entry = case.forms.ends[0]
    entry.reference[2, 7] = torch.nan
    found = order_margins(case.forms, 1)
    assert float(found[2]) == -torch.inf
    assert float(functional_bound(case.forms, case.forms.known, "span", lambda b: False)) == float(
        "inf"
    )
