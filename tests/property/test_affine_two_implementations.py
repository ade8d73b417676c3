"""Two implementations of the affine domain: every entry of both tapes agrees, rule by rule."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl.model.numerics.preset_table import TENSOR_CORES
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.affine.adjoint import Adjoint as ProverAdjoint
from kcdsl_backends.drift.affine.independent import Chance
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine.tape import TapeEntry as ProverEntry
from kcdsl_backends.drift.affine_forms import affine_forms
from kcdsl_backends.drift.affine_run import affine_run
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.form import Form, Walk
from kcdsl_certs.recheck.affine.independent import Budget
from kcdsl_certs.recheck.affine.tape import TapeEntry
from kcdsl_certs.recheck.affine_walk import pair as derive
from kcdsl_certs.recheck.affine_walk import walk
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.box import Box
from kcdsl_certs.recheck.interval.tensors import read
from tests.support import proofs
from tests.support.affine_rules import BEYOND, ROWS, RULES, WIDTH, heads, scores, source
from tests.support.grids import by_turns
from tests.support.prover import block, parameters

N = proofs.numerics
Floats = np.ndarray

HOPPER = TENSOR_CORES["hopper_fp8"].to_json()
KERNELS: dict[str, Any] = {
    "float32 any": N("float32", "any"),
    "float32 fused": N("float32", "any", style="fused"),
    "float32 nearest": N("float32", "nearest"),
    "bfloat16 any": N("bfloat16", "any"),
    "bfloat16 nearest": N("bfloat16", "nearest", scores="float32"),
    "float16 nearest, fused": N("float16", "nearest", style="fused", scores="float32"),
    "float16 accumulation": N("float16", "any", accumulate="float16"),
    "fp8 probabilities": N(
        "float16", "nearest", style="fused", scores="float32", probabilities="fp8_e4m3"
    ),
    "fp8 weights and activations": N(
        "bfloat16", "any", weights=("fp8_e4m3", "block_128"), activations=("fp8_e4m3", "per_token")
    ),
    "mx": N("float32", "nearest", weights=("fp8_e4m3", "mx"), activations=("fp8_e4m3", "mx")),
    "fp8 nearest, per token": N(
        "bfloat16",
        "nearest",
        weights=("fp8_e4m3", "per_channel"),
        activations=("fp8_e4m3", "per_token"),
    ),
    "int8 nearest, per tensor": N("float32", "nearest", activations=("int8", "per_tensor")),
    "own results": N(
        "float64",
        "any",
        accumulate="float64",
        results={"input": "bfloat16", "context": "bfloat16", "linear": "float16"},
    ),
    "matrix unit": N(
        "bfloat16",
        "any",
        weights=("fp8_e4m3", "per_channel"),
        activations=("fp8_e4m3", "per_token"),
        tensor_core=HOPPER,
    ),
    "matrix unit, promoted": N(
        "float16",
        "any",
        style="fused",
        scores="float32",
        activations=("fp8_e5m2", "per_tensor"),
        tensor_core={
            "linears": {**HOPPER["linears"], "chunk": 2, "promote": 4},
            "others": HOPPER["others"],
        },
    ),
    "int8, uint8": N(
        "float32", "any", weights=("int8", "per_channel"), activations=("uint8", "per_tensor")
    ),
    "float64": N("float64", "any", accumulate="float64"),
    "int8 full nearest, per token": N(
        "float32",
        "nearest",
        weights=("int8_full", "per_channel"),
        activations=("int8_full", "per_token"),
    ),
    "int8 full nearest, per tensor": N(
        "float32", "nearest", activations=("int8_full", "per_tensor")
    ),
    "uint8 nearest, per tensor": N("float32", "nearest", activations=("uint8", "per_tensor")),
    "uint8 nearest, per token": N("bfloat16", "nearest", activations=("uint8", "per_token")),
    "fp8 static nearest": N("bfloat16", "nearest", activations=proofs.static("fp8_e4m3", 2.0**-3)),
    "int8 static nearest": N("float32", "nearest", activations=proofs.static("int8", 0.37)),
    "uint8 static nearest": N("bfloat16", "nearest", activations=proofs.static("uint8", 0.41, 130)),
    "uint8 static any": N("float32", "any", activations=proofs.static("uint8", 0.41, 130)),
    "matrix unit, static": N(
        "bfloat16",
        "any",
        weights=("fp8_e4m3", "per_channel"),
        activations=proofs.static("fp8_e4m3", 0.13),
        tensor_core=HOPPER,
    ),
    "bfloat16 toward zero": N("bfloat16", "toward_zero", scores="float32"),
    "float16 toward zero, fused": N(
        "float16", "toward_zero", style="fused", weights=("float16", "none", "toward_zero")
    ),
    "bfloat16 any toward zero": N(
        "bfloat16", "any_toward_zero", weights=("fp8_e4m3", "none", "toward_zero")
    ),
    "fp8 probabilities toward zero": N(
        "float16", "toward_zero", style="fused", scores="float32", probabilities="fp8_e4m3"
    ),
    "float16 any direction": N("float16", "any_direction", style="fused"),
    "float64 any direction": N("float64", "any_direction", accumulate="float64"),
}


@pytest.fixture(autouse=True)
def passes_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the prover run passes wherever a rule may, as the checker does without hints."""
    monkeypatch.setattr("kcdsl_backends.drift.affine_forms.coarsest", lambda *_: 0.0)


def prover(
    graph: Any, record: Any, centre: Floats, radius: float, chance: Chance | None = None
) -> KernelRun:
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    built, side = block(graph), parameters(graph, record)
    x = torch.from_numpy(centre)
    return affine_run(built, side, x, spread, 0.0, chance=chance)  # passes everywhere


def drifts(
    folder: Path,
    graph: Any,
    pair: tuple[Any, Any],
    centre: Floats,
    radius: float,
    alpha: Fraction | None = None,
) -> tuple[Box, Box]:
    """Return the boxes of the output's drift that the prover and the checker derive."""
    built = block(graph)
    train = parameters(graph, pair[0])
    infer = train if pair[0] == pair[1] else parameters(graph, pair[1])
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    forms = affine_forms(built, train, infer, torch.from_numpy(centre), spread, alpha=alpha)
    found, chance = forms.box(), forms.chance
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    proof = parse(proofs.dump(proofs.document(graph, *pair, sha256, centre, radius)))
    with np.errstate(all="ignore"):
        scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
        likely = None if chance is None else (chance.alpha, chance.functionals)
        derived = derive(scene, chance=likely).output()
    return Box(found.lo.numpy(), found.hi.numpy()), derived


def checker(
    folder: Path,
    graph: Any,
    record: Any,
    centre: Floats,
    radius: float,
    budget: Budget | None = None,
) -> Walk:
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    proof = parse(proofs.dump(proofs.document(graph, record, record, sha256, centre, radius)))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    with np.errstate(all="ignore"):
        return walk(scene, scene.train, budget=budget)


def confirmed(found: Floats, derived: Floats, noise: Floats | float, looser: float) -> None:
    """Fail unless the checker's bound equals the prover's, or is slightly smaller."""
    assert (derived <= found * (1 + AGREE) + noise).all(), (found, derived)
    assert (derived >= found * (1 - looser) - noise).all(), (found, derived)


# The programs round differently, and the checker forms more sums of rows in float32 (Rule 4.5);
# nothing else may make its bound larger than the prover's.
AGREE = 2.0**-18
# How much smaller it may be: products of small terms are collected differently. Eigenvalues
# have tighter bounds than in the prover, and where one row of a node is bounded by reverse
# passes, all are.
LOOSER = 2.0**-10
LOOSER_OF = dict.fromkeys((rule for rule in RULES if "norm" in rule), 1.0)
LOOSER_OF["context of shared heads"] = 2.0**-8  # in probabilistic bounds


# Whatever is compared loosely is compared everywhere.
@pytest.mark.sample(15)
@by_turns(whole=LOOSER_OF, rule=RULES, name=KERNELS, radius=[0.0, 2.0**-10, 2.0**-5])
def test_entries_of_affine_forms_agree(tmp_path: Path, rule: str, name: str, radius: float) -> None:
    seed = [list(RULES).index(rule), list(KERNELS).index(name), int(radius * 1024)]
    rng = np.random.default_rng(seed)
    graph, record = RULES[rule](rng), KERNELS[name]
    centre = np.rint(rng.standard_normal(graph.input_shape) * 2**10) / 2**10
    try:
        first = prover(graph, record, centre, radius)
    except NoBound:
        with pytest.raises(Rejected, match="bound/"):
            checker(tmp_path, graph, record, centre, radius)
        return
    second = checker(tmp_path, graph, record, centre, radius)
    looser = LOOSER_OF.get(rule, LOOSER)
    compared = 0
    for node in graph.nodes:
        found = second.forms[node["name"]]
        if node["name"] not in first.computed:
            assert not isinstance(found, Form) or found.place is None
            continue
        assert isinstance(found, Form)
        assert found.place is not None
        index = first.computed[node["name"]]
        mine, other = first.tape.entries[index], second.tape.entries[found.place]
        noise = 2.0**-42 * float(mine.size.max())
        apart = np.abs(mine.reference.numpy() - found.reference)
        # Where casts go toward zero the reference is the midpoint of the error interval.
        inward = record["casts"] in ("toward_zero", "any_toward_zero")
        assert (
            apart <= noise + inward * np.abs(mine.error_bound.numpy() - found.error_bound)
        ).all()
        known = found.reference == 0  # masked columns, which the prover stores like any number
        reach = np.where(known, found.error_bound, mine.error_bound.numpy())
        confirmed(reach, found.error_bound, noise, looser)
        compare(mine, other, noise, looser, known)
        if node["op"] == "softmax":
            mine, other = first.tape.entries[index - 1], second.tape.entries[found.place - 1]
            compare(mine, other, noise, looser, known)
        functionals(first, second, node["name"], rng, noise, looser)
        compared += 1
    assert compared > 0


@pytest.mark.sample(15)
@by_turns(whole=LOOSER_OF, rule=RULES, name=KERNELS, radius=[0.0, 2.0**-7])
def test_independent_roundings_agree(tmp_path: Path, rule: str, name: str, radius: float) -> None:
    seed = [list(RULES).index(rule), list(KERNELS).index(name), int(radius * 1024), 1]
    rng = np.random.default_rng(seed)
    graph, record = RULES[rule](rng), KERNELS[name]
    centre = np.rint(rng.standard_normal(graph.input_shape) * 2**10) / 2**10
    alpha, functionals_ = Fraction(1, 10**6), 2**20
    try:
        first = prover(graph, record, centre, radius, Chance(alpha, functionals_))
    except NoBound:
        with pytest.raises(Rejected, match="bound/"):
            checker(tmp_path, graph, record, centre, radius)
        return
    second = checker(tmp_path, graph, record, centre, radius, Budget(alpha, functionals_))
    looser = LOOSER_OF.get(rule, LOOSER)
    compared = 0
    for node in graph.nodes:
        found = second.forms[node["name"]]
        if node["name"] not in first.computed or not isinstance(found, Form):
            continue
        assert found.place is not None
        mine = first.tape.entries[first.computed[node["name"]]]
        other = second.tape.entries[found.place]
        noise, known = 2.0**-42 * float(mine.size.max()), found.reference == 0
        if mine.roundings is None:  # the whole radius is certain, which the checker may write out
            assert other.split is None or not other.split.most.any()
        elif other.split is not None:
            centres = 0.0 if other.centre is None else 2.0**-30 * np.abs(other.centre)
            for a, b in (
                (mine.roundings.sure.numpy(), other.split.sure),
                (mine.roundings.most.numpy(), other.split.most),
                (mine.roundings.deviation.numpy(), other.split.root),
            ):
                confirmed(np.where(known, b, a), b, noise + centres, max(looser, 2.0**-7))
        functionals(first, second, node["name"], rng, noise, looser)
        compared += 1
    assert compared > 0
    assert first.tape.chance is not None
    assert first.tape.chance.asked >= 8 * compared


@pytest.mark.parametrize("name", ["float32 any", "bfloat16 nearest"])
@pytest.mark.parametrize("rule", BEYOND)
def test_eps_beyond_float32_has_no_bound(tmp_path: Path, rule: str, name: str) -> None:
    """In both domains of the prover, and in the checker."""
    rng = np.random.default_rng(3)
    graph, record = BEYOND[rule](rng), KERNELS[name]
    centre = rng.standard_normal(graph.input_shape) * 1e18  # with squares that fit float32
    with pytest.raises(NoBound, match="sum of squares"):
        prover(graph, record, centre, 0.0)
    stored = parameters(graph, record)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    with pytest.raises(NoBound, match="sum of squares"):
        BlockProblem(block(graph), stored, stored).bound(torch.from_numpy(centre), zero)
    with pytest.raises(Rejected, match="bound/"):
        checker(tmp_path, graph, record, centre, 0.0)


def test_layer_norm_of_a_single_element_is_refused(tmp_path: Path) -> None:
    """Its variance consists of roundings: both programs refuse it, in both domains."""
    graph, record = proofs.Graph((3, 1)), KERNELS["float32 any"]
    graph.add("layer_norm", [graph.add("input", [], (3, 1))], (3, 1), eps=1e-5)
    centre, zero = np.ones((3, 1)), torch.zeros(1, 1, dtype=torch.float64)
    with pytest.raises(NoBound, match="single element"):
        prover(graph, record, centre, 0.0)
    stored = parameters(graph, record)
    with pytest.raises(NoBound, match="single element"):
        BlockProblem(block(graph), stored, stored).bound(torch.from_numpy(centre), zero)
    with pytest.raises(Rejected, match="two elements"):
        checker(tmp_path, graph, record, centre, 0.0)


def compare(
    mine: ProverEntry, other: TapeEntry, noise: float, looser: float, known: Floats
) -> None:
    """Compare centre and radius of an entry, where the reference is not a known zero."""
    none = np.zeros(other.error_bound.shape)
    a = none if mine.centre is None else mine.centre.numpy()
    b = none if other.centre is None else other.centre
    assert (np.abs(a - b) <= np.abs(a) * looser + noise).all()
    centre = np.abs(b)
    a = none if mine.radius is None else mine.radius.numpy()
    b = none if other.radius is None else other.radius
    # one program adds the error of sums of centres here, the other one where it forms them
    confirmed(np.where(known, b, a), b, noise + 2.0**-30 * centre, looser)


def functionals(
    first: KernelRun,
    second: Walk,
    name: str,
    rng: np.random.Generator,
    noise: float,
    looser: float,
) -> None:
    """Compare random functionals of a node, of one row and of all: one reverse pass per program."""
    form = second.forms[name]
    assert isinstance(form, Form)
    assert form.place is not None
    shape = form.shape
    row = tuple(int(rng.integers(n)) for n in shape[:-1])
    for whole in (True, False):
        extent = shape if whole else (*(1 for _ in row), shape[-1])
        start = tuple(0 for _ in shape) if whole else (*row, 0)
        values = rng.standard_normal((4, *extent))
        window = tuple((s, s + e) for s, e in zip(start, extent, strict=True))
        a = first.tape.bound(
            first.computed[name], ProverAdjoint(torch.from_numpy(values), window, shape)
        )
        b = second.tape.bound(form.place, Adjoint(values, start))
        slack = noise * float(np.abs(values).sum())
        low, high = a.with_region(first.tape.radius)
        assert second.tape.region is not None
        moved = 0.0 if b.input is None else b.input.sizes(second.tape.region)
        middle, half = ((high + low) / 2).numpy(), ((high - low) / 2).numpy()
        apart = np.abs(middle - b.centre)
        assert (apart <= half * max(2.0**-16, looser - LOOSER) + slack).all()
        inside = apart if looser > LOOSER else 0.0  # an interval in an interval
        confirmed(half, b.wide() + moved + inside, slack, looser)


PAIRS = [
    ("float32 any", "bfloat16 nearest"),
    ("bfloat16 nearest", "float64"),
    ("float32 fused", "int8, uint8"),
    ("float32 any", "bfloat16 any toward zero"),
    ("float16 any direction", "bfloat16 toward zero"),
]


# For drifts, whose error bounds were intersected with boxes: terms collected differently are a
# larger share of the rest.
LESS = 2.0**-6
# References of results cast toward zero depend on error bounds, which eigenvalues lower.
NORMS_AGREE = 2.0**-14


@pytest.mark.sample(11)
@by_turns(
    whole=LOOSER_OF,
    rule=RULES,
    pair=PAIRS,
    alpha=[None, Fraction(1, 10**6)],
    radius=[0.0, 2.0**-10, 2.0**-7],
)
def test_boxes_of_drifts_agree(
    tmp_path: Path, rule: str, pair: tuple[str, str], radius: float, alpha: Fraction | None
) -> None:
    """Compare both ends, so that centres and the common region count."""
    rng = np.random.default_rng([list(RULES).index(rule), PAIRS.index(pair), int(radius * 1024)])
    graph = RULES[rule](rng)
    centre = np.rint(rng.standard_normal(graph.input_shape) * 2**10) / 2**10
    records = KERNELS[pair[0]], KERNELS[pair[1]]
    found, derived = drifts(tmp_path, graph, records, centre, radius, alpha)
    wide = found.hi - found.lo
    noise = 2.0**-42 * float(1 + np.abs(found.lo).max() + np.abs(found.hi).max())
    least = wide * (NORMS_AGREE if "norm" in rule else AGREE) + noise
    assert (derived.lo >= found.lo - least).all()
    assert (derived.hi <= found.hi + least).all()
    some, looser = wide > 2.0**-20, wide * max(LESS, LOOSER_OF.get(rule, LOOSER)) + noise
    assert (derived.lo <= found.lo + looser)[some].all()
    assert (derived.hi >= found.hi - looser)[some].all()


@pytest.mark.parametrize("alpha", [None, Fraction(1, 10**6)])
def test_drifts_of_equal_kernels_agree_where_small_terms_are_left(
    tmp_path: Path, alpha: Fraction | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal kernels have one box, and no terms that are small beside it."""
    monkeypatch.setattr("kcdsl_backends.drift.affine.tape.MANY_PRODUCTS", 1)
    monkeypatch.setattr("kcdsl_certs.recheck.affine.tape._MANY", 1)
    rng = np.random.default_rng(5)
    graph, records = RULES["context of shared heads"](rng), (KERNELS["float32 any"],) * 2
    centre = np.rint(rng.standard_normal(graph.input_shape) * 2**10) / 2**10
    found, derived = drifts(tmp_path, graph, records, centre, 0.0, alpha)
    assert (np.maximum(-derived.lo, derived.hi) <= found.hi * (1 + AGREE)).all()


def test_first_row_of_causal_attention_agrees(tmp_path: Path) -> None:
    """It reads itself alone, so that one row of the norm below is read, whose ratio is its own."""
    rng, shape = np.random.default_rng(1), (2, ROWS, ROWS)
    graph, x = source()
    gain = graph.param("gain", 1 + 0.3 * rng.standard_normal(WIDTH))
    x = graph.add("rms_norm", [x, gain], (ROWS, WIDTH), eps=1e-5)
    mask = graph.constant("mask", np.tril(np.ones((ROWS, ROWS), dtype=bool)))
    p = graph.add("softmax", [scores(graph, x, rng), mask], shape, role="probabilities")
    y = graph.add("matmul", [p, heads(graph, x, rng, "v")], (2, ROWS, 3), role="context")
    y = graph.reshape(graph.permute(y, [1, 0, 2]), (ROWS, WIDTH))
    weight = graph.param("o", rng.standard_normal((WIDTH, WIDTH)) / 2)
    graph.add("linear", [y, weight], (ROWS, WIDTH))
    records = KERNELS["float32 any"], KERNELS["bfloat16 any"]
    found, derived = drifts(tmp_path, graph, records, rng.standard_normal((ROWS, WIDTH)), 2.0**-4)
    for mine, other in ((found.lo, derived.lo), (found.hi, derived.hi)):
        assert (np.abs(other[0]) <= np.abs(mine[0]) * (1 + 2.0**-10)).all()
