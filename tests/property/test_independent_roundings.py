"""Probabilistic bounds compared with random runs and exact probabilities; assumptions of proofs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kcdsl.model.numerics.formats import CASTS
from kcdsl_backends.attack.simulation import Simulator
from kcdsl_backends.drift.affine.adjoint import Adjoint as ProverAdjoint
from kcdsl_backends.drift.affine.independent import Chance, Parts, Roundings
from kcdsl_backends.drift.affine.tape import Amplified
from kcdsl_backends.drift.affine.tape import Tape as ProverTape
from kcdsl_backends.drift.affine.tape import TapeEntry as ProverEntry
from kcdsl_backends.drift.affine_forms import affine_forms
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.independent import Budget, Likely, Split
from kcdsl_certs.recheck.affine.tape import Share, Tape, TapeEntry
from tests.support import proofs
from tests.support.affine_rules import RULES
from tests.support.mutation.bases import made
from tests.support.mutation.blocks import decoder, encoder, gated
from tests.support.prover import block, parameters

N = proofs.numerics
Document = dict[str, Any]
ALPHA = Fraction(1, 10**6)
BLOCKS: dict[str, Any] = {**RULES, "decoder": decoder, "encoder": encoder, "gated": gated}
KERNELS = {
    "float32": N("float32", "any"),
    "bfloat16": N("bfloat16", "any"),
    "bfloat16 nearest": N("bfloat16", "nearest"),
    "fused": N("bfloat16", "any", style="fused"),
    "fp8": N(
        "bfloat16", "any", weights=("fp8_e4m3", "per_channel"), activations=("int8", "per_token")
    ),
    "half sums": N("float16", "any", accumulate="float16"),
    "toward zero": N("bfloat16", "toward_zero"),
    "any toward zero": N("bfloat16", "any_toward_zero"),
    "any direction": N("bfloat16", "any_direction", style="fused"),
}


def symbols(sides: tuple[Simulator, Simulator], rng: np.random.Generator, terms: int) -> Any:
    """Return independent signs for every rounding; a sum has one for each of its terms."""

    def signs(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        drawn = rng.integers(0, 2, (terms, *shape)) * 2.0 - 1.0
        return torch.from_numpy(drawn.mean(0) if name.startswith("sum") else drawn[0])

    return [{name: signs(name, s) for name, s in one.symbol_shapes().items()} for one in sides]


@pytest.mark.sample(19)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", BLOCKS)
def test_random_runs_stay_within_the_bounds(name: str, kernel: str) -> None:
    rng = np.random.default_rng([list(BLOCKS).index(name), list(KERNELS).index(kernel)])
    radius = float(rng.choice([0.0, 2.0**-8]))
    graph = BLOCKS[name](rng)
    records = KERNELS["float32"], KERNELS[kernel]
    built, (one, two) = block(graph), [parameters(graph, record) for record in records]
    x = torch.from_numpy(rng.standard_normal(graph.input_shape))
    wide = torch.full((1, 1), radius, dtype=torch.float64)
    pair = affine_forms(built, one, two, x, wide, alpha=ALPHA)
    box = pair.box()
    assert pair.chance is not None
    train, infer = (Simulator(built, side.numerics, side) for side in (one, two))
    for _ in range(8):
        inside = x + radius * torch.from_numpy(rng.uniform(-1, 1, graph.input_shape))
        a, b = symbols((train, infer), rng, terms=4)
        drift = infer.run(inside, b) - train.run(inside, a)
        assert bool(((drift >= box.lo) & (drift <= box.hi)).all())


def test_few_roundings_may_all_have_one_sign() -> None:
    """Two roundings of one element are separate: all four combinations of signs are probable."""
    rng = np.random.default_rng(3)
    g = proofs.Graph((1, 1))
    x = g.add("input", [], (1, 1))
    weight, bias = g.param("w", np.array([[1.5]])), g.param("b", rng.standard_normal(1))
    g.add("linear", [x, weight, bias], (1, 1))
    record = N("bfloat16", "any")
    side = parameters(g, record)
    centre, zero = torch.tensor([[0.7]], dtype=torch.float64), torch.zeros(1, 1).double()
    built, exact = block(g), parameters(g, N("float64", "any", accumulate="float64"))
    box = affine_forms(built, exact, side, centre, zero, alpha=ALPHA).box()
    run, train = (Simulator(built, one.numerics, one) for one in (side, exact))
    reference = train.run(centre, {})
    shapes = run.symbol_shapes()
    assert len(shapes) == 4  # of the input, the sum, the product before the bias, the result
    for signs in itertools.product((-1.0, 1.0), repeat=len(shapes)):
        chosen = dict(zip(shapes, (torch.full((1, 1), s).double() for s in signs), strict=True))
        drift = run.run(centre, chosen) - reference
        assert float(box.lo) <= float(drift) <= float(box.hi)


@given(
    st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=40),
    st.integers(0, 2**31),
    st.sampled_from([Fraction(1, 20), Fraction(1, 100), ALPHA]),
)
def test_probable_bound_fails_with_probability_at_most_alpha(
    sizes: list[float], seed: int, alpha: Fraction
) -> None:
    """Random signs times sizes exceed the bound at most with frequency alpha, up to test noise."""
    values = np.array(sizes)
    found = _likely(values, values, alpha)
    assert found <= values.sum() * (1 + 2.0**-30)
    drawn = np.random.default_rng(seed).integers(0, 2, (4000, len(values))) * 2.0 - 1.0
    frequency = float((np.abs(drawn @ values) > found).mean())
    assert frequency <= float(alpha) + 5 * float(alpha / 4000) ** 0.5 + 1e-12


def _likely(most: np.ndarray, deviation: np.ndarray, alpha: Fraction) -> float:
    """Return the prover's bound, after a comparison with the checker's."""
    sizes, roots = (torch.from_numpy(v)[None] for v in (most, deviation))
    one = Parts(sizes, roots, torch.zeros(1).double())
    two = Likely(most[None], deviation[None], np.zeros(1))
    found = float(one.likely(Chance(alpha, 1)))
    assert float(two.bound(Budget(alpha, 1))[0]) == pytest.approx(found, rel=2.0**-30)
    return found


def test_two_roundings_of_an_element_are_separate() -> None:
    one = torch.ones(1).double()
    parts = Roundings.one(0 * one, 3 * one).cast(4 * one, 0.0, CASTS["any"])
    assert float(parts.most) == pytest.approx(7)
    assert float(parts.deviation) == pytest.approx(5)
    assert float(parts.most) >= 7
    assert float(parts.deviation) >= 5
    assert _likely(np.array([7.0]), np.array([5.0]), ALPHA) == pytest.approx(7)


def test_amplified_errors_include_their_roundings() -> None:
    """One rounding of 3 below a rule of factor 1/4, which adds 2 of its own: 3 + 3/4 + 2."""
    one = torch.full((1, 1), 1.0).double()
    chance, budget = Chance(ALPHA, 8), Budget(ALPHA, 8)
    mine = ProverTape(0 * one, chance=chance)
    mine.add(ProverEntry("region", 0 * one, 0 * one, lambda a: []))
    below = Roundings.one(0 * one, 3 * one)
    mine.add(ProverEntry("x", one, 3 * one, lambda a: [], radius=3 * one, roundings=below))
    top = ProverEntry("y", one, 6 * one, lambda a: [(1, a)], radius=2 * one)
    own = Roundings.one(0 * one, 2 * one)
    mine.add(replace(top, amplified=Amplified(one / 4, one), roundings=own))
    found = mine.bound(2, ProverAdjoint.full(one[None])).magnitude(0 * one)
    assert chance.asked == 2
    ones = np.ones((1, 1))
    other = Tape(None, budget=budget)
    other.add(TapeEntry(0 * ones))
    other.add(TapeEntry(3 * ones, radius=3 * ones, split=Split(0 * ones, 3 * ones, 3 * ones)))
    split = Split(0 * ones, 2 * ones, 2 * ones)
    share = Share(ones / 4, ones)
    other.add(TapeEntry(6 * ones, ((1, lambda a: a),), 2 * ones, share=share, split=split))
    derived = other.bound(2, Adjoint(ones[None], (0, 0))).magnitude(None)
    assert budget.used == 2
    assert float(found) == pytest.approx(5.75, rel=2.0**-30)
    assert derived.item() == pytest.approx(5.75, rel=2.0**-30)
    assert min(float(found), derived.item()) >= 5.75


def test_number_of_bounded_functionals_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A form that serves both kernels covers two runs, so each of its bounds counts twice."""
    rng = np.random.default_rng(1)
    graph = RULES["add"](rng)
    side = parameters(graph, KERNELS["bfloat16"])
    x, zero = torch.from_numpy(rng.standard_normal(graph.input_shape)), torch.zeros(1, 1).double()

    def bounded(count: int) -> int:
        monkeypatch.setattr(
            "kcdsl_backends.drift.affine_forms.functionals_allowed", lambda graph: count
        )
        forms = affine_forms(block(graph), side, side, x, zero, alpha=ALPHA)
        forms.box()
        assert forms.chance is not None
        return forms.chance.asked

    asked = bounded(2**20)
    assert asked == 2 * x.numel()
    assert bounded(asked) == asked
    with pytest.raises(NoBound, match="bounds by chance"):
        bounded(asked - 1)


# --- proofs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> tuple[Document, Path]:
    """Return a probabilistic proof and its checkpoint."""
    document, path, _ = made("encoder, affine, by chance", tmp_path_factory.mktemp("chance"))
    return document, path


def _of_chance(**fields: Any) -> Callable[[Document], object]:
    return lambda d: d["cases"][0]["chance"].update(fields)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda d: None, "ok"),
        (lambda d: d["cases"][0].pop("chance"), "witness/too-small"),
        (_of_chance(alpha="0.0000001"), "claim/too-small"),
        (_of_chance(functionals=8192), "claim/too-small"),
        (_of_chance(alpha="0.001"), "ok"),  # a weaker claim, bound to a clause by its alpha
        (_of_chance(functionals=200), "bound/chance"),  # fewer than there are
        (_of_chance(functionals=2**40 + 1), "document/field"),
        (_of_chance(alpha="0"), "document/field"),
        (_of_chance(alpha="-0.001"), "document/field"),
        (_of_chance(alpha="0.0010"), "document/field"),
        (_of_chance(alpha="1/10"), "document/field"),
        (lambda d: d["cases"][0].update(domain="interval"), "document/field"),
        (lambda d: d["cases"][0].pop("domain"), "document/field"),
    ],
)
def test_proof_states_its_error_probability(
    proof: tuple[Document, Path], edit: Callable[[Document], object], reason: str
) -> None:
    document, path = proof
    changed = json.loads(json.dumps(document))
    edit(changed)
    assert recheck(json.dumps(changed).encode(), path).reason == reason
