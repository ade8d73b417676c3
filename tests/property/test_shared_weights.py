"""Errors of equally stored weights cancel (docs/proofs/weights-region.md, section 2).

With all but one rounding exact, the largest drift over all weights of a ball is known in closed
form; elsewhere weights are searched that maximise the drift of two kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.affine_forms import AffineForms
from kcdsl_backends.drift.boxes.weight_ball import WeightBall
from kcdsl_certs.encoding.reals import real_text
from kcdsl_certs.recheck.affine_walk import Pair, pair
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.graphs.graph import array_digest
from kcdsl_certs.recheck.interval.parameters import Parameters
from kcdsl_certs.recheck.interval.tensors import read
from tests.support import kernels, proofs, prover
from tests.support.grids import by_turns

Floats = np.ndarray
Program = Callable[[Any, tuple[Any, Any], Floats | None, Fraction, Path], tuple[Floats, Floats]]


def forms(
    graph: Any, records: tuple[Any, Any], centre: Floats | None, rho: Fraction
) -> AffineForms:
    """Return the prover's forms for all weights within ρ of those of a graph."""
    one, two = (prover.parameters(graph, record) for record in records)
    problem = BlockProblem(prover.block(graph), one, one.under(two.numerics))
    around = WeightBall(rho, one.tensors, one.numerics, two.numerics, one.device)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    return replace(problem, weight_ball=around).forms(
        None if centre is None else torch.from_numpy(centre), zero
    )


def walks(
    graph: Any, records: tuple[Any, Any], centre: Floats | None, rho: Fraction, folder: Path
) -> Pair:
    """Return the checker's forms for the same weights."""
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    ids = [1, 2] if centre is None else None
    known = np.zeros(()) if centre is None else centre
    document = proofs.document(graph, *records, sha256, known, 0.0, ids=ids)
    document["cases"][0]["region"]["weights"] = real_text(rho)
    proof = parse(proofs.dump(document))
    with np.errstate(all="ignore"):
        return pair(Derivation(proof, read(path).tensors).problem(proof.cases[0]))


def by_prover(
    graph: Any, records: tuple[Any, Any], centre: Floats | None, rho: Fraction, folder: Path
) -> tuple[Floats, Floats]:
    box = forms(graph, records, centre, rho).box()
    return box.lo.numpy(), box.hi.numpy()


def by_checker(
    graph: Any, records: tuple[Any, Any], centre: Floats | None, rho: Fraction, folder: Path
) -> tuple[Floats, Floats]:
    with np.errstate(all="ignore"):
        box = walks(graph, records, centre, rho, folder).output()
    return box.lo, box.hi


PROGRAMS = [by_prover, by_checker]
RHO = Fraction(1, 2**10)


def exact(casts: str = "any", **results: str) -> Any:
    """Return a kernel that computes in float64 and stores some results in other formats."""
    found = proofs.numerics("float64", casts, accumulate="float64", weights=("float64", "none"))
    return {**found, "results": results} if results else found


def chain(*weights: float, bias: float | None = None) -> Any:
    """Return linears of one number each, in sequence."""
    g = proofs.Graph((1, 1))
    x = g.add("input", [], (1, 1))
    for k, weight in enumerate(weights):
        inputs = [x, g.param(f"w{k}", np.array([[weight]]))]
        inputs += [] if bias is None else [g.param(f"b{k}", np.array([bias]))]
        x = g.add("linear", inputs, (1, 1))
    return g


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("weights", [(1.5,), (1.5, -1.25), (1.5, -1.25, 0.75)])
@pytest.mark.parametrize("bias", [None, 0.5])
def test_rounded_input_is_multiplied_by_the_same_weights(
    tmp_path: Path,
    program: Program,
    bias: float | None,
    weights: tuple[float, ...],
    turned: bool,
) -> None:
    """w'·x(1 + a) - w'·x: the effect of the weights alone is equal on both sides."""
    graph, x = chain(*weights, bias=bias), 0.75
    records = (exact(), exact(input="bfloat16"))
    if turned:
        records = records[::-1]
    lo, hi = program(graph, records, np.array([[x]]), RHO, tmp_path)
    size = abs(float(np.prod(weights))) * x
    largest = size * 2.0**-8 * (1 + float(RHO)) ** len(weights)
    assert max(hi.max(), -lo.min()) >= largest * (1 - 2.0**-45)
    # products of two errors are not shared, and there is one for every pair of weights
    values = size if bias is None else size + 3 * abs(bias)
    pairs = len(weights) * (len(weights) - 1)
    assert max(hi.max(), -lo.min()) <= largest + 1.1 * pairs * values * float(RHO) ** 2 + 2.0**-40


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("turned", [False, True])
def test_weights_multiply_inputs_with_a_known_difference(
    tmp_path: Path, program: Program, turned: bool
) -> None:
    """w'·x in one kernel and w' times x rounded to bfloat16 in the other."""
    graph, away = chain(1.5), 2.0**-10
    records = (exact("nearest"), exact("nearest", input="bfloat16"))
    if turned:
        records = records[::-1]
    lo, hi = program(graph, records, np.array([[0.75 + away]]), RHO, tmp_path)
    least, most = (1.5 * away * (1 + sign * float(RHO)) for sign in (-1, 1))
    ends = (-hi.max(), -lo.min()) if not turned else (lo.min(), hi.max())
    assert ends[0] <= least <= most <= ends[1]
    assert ends[1] <= most * (1 + 2.0**-30)
    assert ends[0] >= least * (1 - 2.0**-30)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("shape", [(1, 1), (1,)])
def test_added_parameter_is_the_same_in_both_kernels(
    tmp_path: Path, program: Program, shape: tuple[int, ...]
) -> None:
    graph, x = chain(1.5), 0.75
    found, added = graph.output, graph.param("p", np.full(shape, 2.0))
    added = graph.reshape(added, (1, 1))
    graph.add("add", [found, added], (1, 1))
    lo, hi = program(graph, (exact(), exact(input="bfloat16")), np.array([[x]]), RHO, tmp_path)
    largest = 1.5 * x * 2.0**-8 * (1 + float(RHO))
    for end in (hi.max(), -lo.min()):
        assert largest * (1 - 2.0**-45) <= end <= largest * (1 + 2.0**-30)


@pytest.mark.parametrize("program", PROGRAMS)
def test_rows_of_a_table_are_the_same_in_both_kernels(tmp_path: Path, program: Program) -> None:
    """w'·v' in one kernel, and w'·v'(1 + a) in the other."""
    graph = proofs.Graph(None)
    table = graph.param("table", np.array([[0.5], [-0.75], [3.0]]))
    rows = graph.add("embedding", [table], (2, 1), ids=[1, 2])
    graph.add("linear", [rows, graph.param("w", np.array([[1.5]]))], (2, 1))
    lo, hi = program(graph, (exact(), exact(linear="bfloat16")), None, RHO, tmp_path)
    for row, value in enumerate((-0.75, 3.0)):
        size = 1.5 * abs(value)
        largest = size * 2.0**-8 * (1 + float(RHO)) ** 2
        for end in (hi[row, 0], -lo[row, 0]):
            assert end >= largest * (1 - 2.0**-45)
            assert end <= largest + 2.2 * size * float(RHO) ** 2


@pytest.mark.parametrize("program", PROGRAMS)
def test_exact_kernels_agree_on_other_weights(tmp_path: Path, program: Program) -> None:
    graph = chain(1.5, bias=0.25)
    lo, hi = program(graph, (exact(), exact()), np.array([[0.75]]), RHO, tmp_path)
    assert max(hi.max(), -lo.min()) <= 2.0**-45


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("rho", [Fraction(1, 2**20), Fraction(1, 2**6)])
def test_cast_before_the_bias_counts_once_per_reading(
    tmp_path: Path, program: Program, rho: Fraction
) -> None:
    """One kernel rounds x, the product and the result up, the other one down."""
    graph, x, w, b = chain(1.5, bias=0.5), 0.75, 1.5, 0.5
    y = graph.output
    graph.add("concat", [y, y], (1, 2), dim=1)
    record = proofs.numerics("bfloat16")
    lo, hi = program(graph, (record, record), np.array([[x]]), rho, tmp_path)
    if rho > 2.0**-8:  # otherwise they are rounded to the former number
        w, b = w * (1 + float(rho)), b * (1 + float(rho))
    least, most = ((w * x * (1 + u) ** 2 + b) * (1 + u) for u in (-(2.0**-8), 2.0**-8))
    largest = most - least
    for end in (hi, -lo):
        assert (end >= largest).all()
        assert (end <= largest * (1 + 2.0**-5)).all()


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("turned", [False, True])
def test_constant_quantised_result_hides_the_weights(
    tmp_path: Path, program: Program, turned: bool
) -> None:
    """One kernel stores 1.125 for any weights, the other one w'·0.75."""
    graph, rho = chain(1.5), Fraction(1, 2**12)
    records = (exact("nearest", linear="bfloat16"), exact("nearest"))
    if turned:
        records = records[::-1]
    lo, hi = program(graph, records, np.array([[0.75]]), rho, tmp_path)
    away = 1.125 * float(rho)
    for end in (hi.max(), -lo.min()):
        assert away <= end <= away * (1 + 2.0**-20)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("turned", [False, True])
def test_constant_and_variable_quantised_results(
    tmp_path: Path, program: Program, turned: bool
) -> None:
    """The first result is 1.125 for any weights, the second one may be many numbers."""
    g, rho = proofs.Graph((1, 2)), Fraction(1, 2**12)
    weights = np.array([[1.5, 0.0], [1.5, -1.5 + 2.0**-6]])
    g.add("linear", [g.add("input", [], (1, 2)), g.param("w", weights)], (1, 2))
    records = (exact("nearest", linear="bfloat16"), exact("nearest"))
    if turned:
        records = records[::-1]
    lo, hi = program(g, records, np.array([[0.75, 0.75]]), rho, tmp_path)
    away = 1.125 * float(rho)
    for end in (hi[0, 0], -lo[0, 0]):
        assert away <= end <= away * (1 + 2.0**-20)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("turned", [False, True])
def test_differently_stored_bias_beside_equal_weights(
    tmp_path: Path, program: Program, turned: bool
) -> None:
    """Both kernels store codes of weights; one rounds the bias to 1.5 in bfloat16."""
    g, rho = proofs.Graph((1, 2)), Fraction(1, 2**12)
    inputs = [g.add("input", [], (1, 2)), g.param("w", np.zeros((1, 2)))]
    g.add("linear", [*inputs, g.param("b", np.array([1.5]))], (1, 1))
    codes: dict[str, Any] = {
        "weights": ("int8", "per_channel"),
        "activations": ("int8", "per_token"),
    }
    one = proofs.numerics("float32", "nearest", **codes)
    two = {**proofs.numerics("bfloat16", "nearest", **codes), "results": {"linear": "float32"}}
    records = (two, one) if turned else (one, two)
    lo, hi = program(g, records, np.array([[0.75, -0.5]]), rho, tmp_path)
    away = 1.5 * float(rho)
    for end in (hi.max(), -lo.min()):
        assert away * (1 - 2.0**-10) <= end <= away * (1 + 2.0**-8)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("casts", ["any", "nearest"])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_gains_and_biases_are_the_same_in_both_kernels(
    tmp_path: Path, program: Program, op: str, casts: str
) -> None:
    rng = np.random.default_rng(3)
    g = proofs.Graph((2, 6))
    inputs = [g.add("input", [], (2, 6)), g.param("gain", 1 + 0.1 * rng.standard_normal(6))]
    inputs += [g.param("bias", rng.standard_normal(6))] if op == "layer_norm" else []
    g.add(op, inputs, (2, 6), eps=1e-6)
    # no number is a midpoint of two bfloat16 numbers
    centre = np.rint(rng.standard_normal((2, 6)) * 2**10) / 2**10 + 2.0**-13
    records = (exact(casts), exact(casts, input="bfloat16"))
    lo, hi = program(g, records, centre, RHO, tmp_path)
    least, most = program(g, records, centre, Fraction(1, 2**40), tmp_path)
    # at the checkpoint, up to ρ times that
    near = np.maximum(most, -least) * (1 + 8 * float(RHO)) + 2.0**-40
    assert (np.maximum(hi, -lo) <= near).all()

    def normal(x: Floats) -> Floats:
        x = x - x.mean(-1, keepdims=True) if op == "layer_norm" else x
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6))

    gain, found = np.abs(g.tensors["gain"].astype(np.float64)), np.zeros((2, 6))
    for signs in product([-1.0, 1.0], repeat=6):
        stored = centre * (1 + 2.0**-8 * np.array(signs))
        if casts == "nearest":
            stored = torch.from_numpy(centre).to(torch.bfloat16).double().numpy()
        moved = normal(stored) - normal(centre)
        found = np.maximum(found, np.abs(moved) * gain * (1 + float(RHO) * (1 - 2.0**-12)))
    assert (found <= np.maximum(hi, -lo)).all()


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_shared_part_of_a_norm_covers_every_gain_and_bias(tmp_path: Path, op: str) -> None:
    """(g' - g)·n + b' - b at the corner of the region where no two terms cancel."""
    rng, x = np.random.default_rng(8), np.array([[0.75, -1.5, 0.25], [2.0, 0.5, -0.25]])
    gain, bias = rng.standard_normal(3), rng.standard_normal(3)
    g = proofs.Graph(x.shape)
    inputs = [g.add("input", [], x.shape), g.param("gain", gain)]
    inputs += [g.param("bias", bias)] if op == "layer_norm" else []
    name = g.add(op, inputs, x.shape, eps=1e-6)
    found = walks(g, (exact(), exact()), x, RHO, tmp_path)
    c = x - x.mean(-1, keepdims=True) if op == "layer_norm" else x
    normal = c / np.sqrt((c**2).mean(-1, keepdims=True) + 1e-6)
    held = {key: np.abs(tensor.astype(np.float64)) for key, tensor in g.tensors.items()}
    most = float(RHO) * (np.abs(normal) * held["gain"] + held.get("bias", 0.0))
    for walk in (found.train, found.infer):
        (size,) = (
            entry.shared.size
            for entry in walk.tape.entries
            if entry.shared is not None and entry.shared.name == name
        )
        assert (size >= most * (1 - 2.0**-12)).all()
        assert (size <= most * (1 + 2.0**-20)).all()


def one_more(op: str) -> tuple[Any, Floats | None, Callable[[dict[str, Any]], Floats]]:
    """Return a block with parameters of one kind, its input, and the computed value."""
    g, x = proofs.Graph((1, 2)), np.array([[0.75, -0.5]])
    weight, bias = np.array([[1.5, -2.0]]), np.array([0.5])
    if op == "embedding":
        g = proofs.Graph(None)
        g.add(op, [g.param("table", np.array([[0.5], [-0.75], [3.0]]))], (2, 1), ids=[1, 2])
        return g, None, lambda held: np.asarray(held["table"][1:])
    node = g.add("input", [], (1, 2))
    if op == "add":
        g.add(op, [node, g.param("p", np.array([[1.5, 3.0]]))], (1, 2))
        return g, x, lambda held: np.asarray(x + held["p"])
    if op == "layer_norm":
        gain, shift = g.param("g", np.array([1.5, -2.0])), g.param("b", np.array([0.5, 0.25]))
        g.add(op, [node, gain, shift], (1, 2), eps=1e-5)
        y = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
        return g, x, lambda held: np.asarray(y * held["g"] + held["b"])
    inputs = [node, g.param("w", weight)] + ([g.param("b", bias)] if op == "biased" else [])
    g.add("linear", inputs, (1, 1))
    return g, x, lambda held: np.asarray(x @ held["w"].T + held.get("b", 0.0))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rho", [Fraction(1, 2**12), Fraction(1, 2**7)])
@pytest.mark.parametrize("op", ["linear", "biased", "layer_norm", "add", "embedding"])
def test_differently_stored_parameters_drift(
    tmp_path: Path, program: Program, op: str, rho: Fraction, turned: bool
) -> None:
    """One kernel stores θ' unrounded, the other one in bfloat16, which is θ up to 2^-9."""
    graph, centre, value = one_more(op)
    results = dict.fromkeys(("input", "linear", "layer_norm", "add"), "float64")
    coarse = proofs.numerics("bfloat16", "nearest", accumulate="float64")
    records = (exact("nearest"), {**coarse, "results": results})
    if turned:
        records = records[::-1]
    lo, hi = program(graph, records, centre, rho, tmp_path)
    held = {key: w.astype(np.float64) for key, w in graph.tensors.items()}
    count = sum(w.size for w in held.values())
    for signs in product([-1.0, 1.0], repeat=count):
        by = iter(signs)
        moved = {
            key: w * (1 + float(rho) * np.array([next(by) for _ in range(w.size)]).reshape(w.shape))
            for key, w in held.items()
        }
        other = {
            key: torch.from_numpy(w).to(torch.bfloat16).double().numpy() for key, w in moved.items()
        }
        drift = value(other) - value(moved)
        drift = -drift if turned else drift
        drift = drift * (1 - 2.0**-8)
        assert ((lo <= drift) & (drift <= hi)).all()


BLOCKS = ("attention", "gelu", "silu", "piecewise", "norms", "a norm read twice")
ALIKE = {
    "float32": (proofs.numerics("float32"), proofs.numerics("float32", style="fused")),
    "float32 twice": (proofs.numerics("float32"), proofs.numerics("float32")),
    "bfloat16 freely": (proofs.numerics("bfloat16"), proofs.numerics("bfloat16", style="fused")),
    "bfloat16 nearest": (
        proofs.numerics("bfloat16", "nearest"),
        proofs.numerics("bfloat16", "nearest", style="fused", scores="float32"),
    ),
    "float16, toward zero": (
        proofs.numerics("float16", "any_direction"),
        proofs.numerics("float16", "any_toward_zero"),
    ),
    "fp8 weights": (
        proofs.numerics("bfloat16", "nearest", weights=("fp8_e4m3", "per_channel")),
        proofs.numerics("bfloat16", weights=("fp8_e4m3", "per_channel"), style="fused"),
    ),
    "quantised activations": (
        proofs.numerics("float32", "nearest"),
        proofs.numerics(
            "float32", "nearest", weights=("float32", "none"), activations=("int8", "per_token")
        ),
    ),
    "weights of linears alone": (
        proofs.numerics(
            "float32", weights=("int8", "per_channel"), activations=("int8", "per_token")
        ),
        proofs.numerics(
            "bfloat16", weights=("int8", "per_channel"), activations=("int8", "per_token")
        ),
    ),
    "float64 and float32": (
        proofs.numerics("float64", "nearest", weights=("float32", "none", "toward_zero")),
        proofs.numerics("float32", weights=("float64", "none")),
    ),
    "weights in bfloat16": (
        proofs.numerics("float32", weights=("bfloat16", "none")),
        proofs.numerics("bfloat16", "nearest", weights=("float32", "none")),
    ),
    "input alone": (
        proofs.numerics("float32"),
        proofs.numerics("float32", results={"input": "bfloat16"}),
    ),
}
RHOS = (Fraction(1, 2**20), Fraction("0.0001"), Fraction(1, 2**8))


def norms(rng: np.random.Generator) -> Any:
    """Return linears with a norm behind each of them."""
    g = proofs.Graph((2, 6))
    x = g.add("input", [], (2, 6))
    for k, op in enumerate(("layer_norm", "rms_norm")):
        w = g.param(f"{k}.weight", rng.standard_normal((6, 6)) / 6**0.5)
        x = g.add("linear", [x, w], (2, 6))
        gain = g.param(f"{k}.gain", 1 + 0.1 * rng.standard_normal(6))
        x = g.add(op, [x, gain], (2, 6), eps=1e-5)
    return g


def read_twice(rng: np.random.Generator) -> Any:
    """Return a norm that a linear reads, and a sum beside it."""
    g = proofs.Graph((2, 6))
    w, gain = rng.standard_normal((2, 6, 6)) / 6**0.5, 1 + 0.1 * rng.standard_normal(6)
    x = g.add("linear", [g.add("input", [], (2, 6)), g.param("a.weight", w[0])], (2, 6))
    scaled = [g.param("norm.weight", gain), g.param("norm.bias", 0.1 * rng.standard_normal(6))]
    x = g.add("layer_norm", [x, *scaled], (2, 6), eps=1e-5)
    g.add("add", [x, g.add("linear", [x, g.param("b.weight", w[1])], (2, 6))], (2, 6))
    return g


MAKERS: dict[str, Callable[[np.random.Generator], Any]] = {
    "attention": proofs.attention,
    "piecewise": proofs.piecewise,
    "norms": norms,
    "a norm read twice": read_twice,
}


def built(block: str, seed: int) -> tuple[Any, Floats]:
    rng = np.random.default_rng(seed)
    graph = MAKERS[block](rng) if block in MAKERS else proofs.mlp(rng, block)
    return graph, np.rint(rng.standard_normal(graph.input_shape) * 2**14) / 2**14


@pytest.mark.sample(3)
@by_turns(block=BLOCKS, kernel_pair=ALIKE, rho=RHOS)
def test_both_programs_agree_on_shared_weights(
    tmp_path: Path, block: str, kernel_pair: str, rho: Fraction
) -> None:
    graph, centre = built(block, 11)
    mine, theirs = (
        np.maximum(hi, -lo)
        for lo, hi in (
            program(graph, ALIKE[kernel_pair], centre, rho, tmp_path) for program in PROGRAMS
        )
    )
    # the checker bounds a product of errors more tightly
    assert (mine <= theirs * (1 + (0.5 if block == "piecewise" else 2.0**-3)) + 2.0**-60).all()
    assert (theirs <= mine * (1 + 2.0**-6) + 2.0**-60).all()


@pytest.mark.full
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("block", BLOCKS)
def test_drift_of_shared_weights_is_of_second_order(
    tmp_path: Path, program: Program, block: str
) -> None:
    """Twice the radius costs four times as much, not twice."""
    graph, centre = built(block, 12)
    records, widths = ALIKE["float32"], []
    for rho in (Fraction(1, 2**40), Fraction(1, 2**11), Fraction(1, 2**10)):
        lo, hi = program(graph, records, centre, rho, tmp_path)
        widths.append(np.maximum(hi, -lo).max())
    assert widths[2] - widths[0] >= 3 * (widths[1] - widths[0])


@pytest.mark.full
@pytest.mark.parametrize("kernel_pair", ALIKE)
@pytest.mark.parametrize("block", BLOCKS)
def test_searched_weights_stay_within_the_bound(
    tmp_path: Path, block: str, kernel_pair: str
) -> None:
    graph, centre = built(block, 13)
    records, rng = ALIKE[kernel_pair], np.random.default_rng(14)
    rho = Fraction(1, 2**8) if "float32" in kernel_pair else Fraction(1, 2**6)
    boxes = [program(graph, records, centre, rho, tmp_path) for program in PROGRAMS]
    file = tmp_path / "model.safetensors"
    specs = parse(proofs.dump(proofs.document(graph, *records, "0" * 64, centre, 0.0)))
    step = float(rho) * (1 - 2.0**-10)  # float32 rounds θ' to within ρ

    def apart(signs: dict[str, Floats], modes: tuple[str, str]) -> Floats:
        moved = {
            k: (w * (1 + step * signs[k])).astype(np.float32) for k, w in graph.tensors.items()
        }
        proofs.write_safetensors(file, moved)
        digests = {
            key: array_digest("float32", w.shape, w.astype("<f4").tobytes())
            for key, w in moved.items()
        }
        held = Parameters(read(file).tensors, digests)
        found = []
        for record, kernel, mode in zip(records, (specs.train, specs.infer), modes, strict=True):
            run = kernels.Run(record, np.random.default_rng(5), mode)
            get = (
                (lambda key, k=kernel: held.plain(key, k)),
                (lambda key, k=kernel: held.linear(key, k)),
            )
            found.append(kernels.simulate(graph, run, centre, *get)[graph.output])
        return np.asarray(found[1] - found[0])

    for turn, modes in enumerate([("up", "down"), ("signs", "signs"), ("random", "random")]):
        signs = {k: rng.choice([-1.0, 1.0], w.shape) for k, w in graph.tensors.items()}
        best = apart(signs, modes)
        place = np.unravel_index(int(np.abs(best).argmax()), best.shape)
        for _ in range(24):
            tried = {k: np.where(rng.random(s.shape) < 0.15, -s, s) for k, s in signs.items()}
            found = apart(tried, modes)
            for lo, hi in boxes:
                slack = 2.0**-46 * np.abs(found).max()
                assert ((lo - slack <= found) & (found <= hi + slack)).all(), (turn, modes)
            if abs(found[place]) > abs(best[place]):
                signs, best = tried, found
