"""Passes before free casts (Rule 2.12), norms (Rule 3.8) and weighted squares (Rule 3.9) of errors.

Runs stay inside, and both programs agree. A residual whose worst cases exceed it is followed by a
norm: bounded box by box its casts would exceed those of any run, and the norm would have no bound.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.affine import before_casts, row_ellipsoids
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine_forms import AffineForms, affine_forms
from kcdsl_backends.drift.ops import arithmetic
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine import before_casts as checked
from kcdsl_certs.recheck.affine.form import Form
from kcdsl_certs.recheck.affine_walk import Pair, pair
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.tensors import read
from tests.support import proofs
from tests.support.prover import block, parameters
from tests.support.runs import mistaken, simulated

Floats = np.ndarray
N = proofs.numerics
KERNELS = {
    "any": N("bfloat16", "any"),
    "any, float16": N("float16", "any"),
    "toward zero": N("bfloat16", "any_toward_zero"),
    "any direction": N("bfloat16", "any_direction"),
}
TRAIN = N("float32", "any")
ROWS, WIDTH, INNER = 2, 32, 128
RADII = {"point": 0.0, "ball": 2.0**-4}
MODES = ("random", "signs", "up", "down")


def drawn(radius: float, *, gates: int = 0) -> tuple[Any, Floats, str]:
    """Return a block that multiplies twice, adds, normalises and multiplies; a centre; and a name.

    With `gates` 2 it is the feed-forward half of a layer; with 1, both factors of its product read
    one linear. The name is that of the second product, whose value is tiny compared with the
    earlier roundings.
    """
    rng = np.random.default_rng(3)
    x = np.rint(rng.standard_normal((ROWS, WIDTH)) * 2**6) / 2**6
    one = rng.standard_normal((INNER, WIDTH)) / WIDTH**0.5
    two = rng.standard_normal((WIDTH, INNER)) / INNER**0.5
    known, share = x @ one.T, 0.9 if radius else 0.999
    two = two - share * (two @ np.linalg.pinv(known)) @ known
    graph = proofs.Graph((ROWS, WIDTH))
    state = graph.add("input", [], (ROWS, WIDTH))
    inner = graph.add("linear", [state, graph.param("one", one)], (ROWS, INNER))
    outer = graph.add("linear", [inner, graph.param("two", two)], (ROWS, WIDTH))
    total = graph.add("add", [state, outer], (ROWS, WIDTH))
    gain = graph.param("gain", 1 + 0.1 * rng.standard_normal(WIDTH))
    norm = graph.add("rms_norm", [total, gain], (ROWS, WIDTH), eps=1e-5)
    if gates:
        third = gated_by_silu(graph, norm, rng, gates)
    else:
        last = rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5
        third = graph.add("linear", [norm, graph.param("three", last)], (ROWS, WIDTH))
    graph.add("add", [total, third], (ROWS, WIDTH))
    return graph, x, outer


def gated_by_silu(graph: Any, x: str, rng: np.random.Generator, gates: int) -> str:
    """Add silu(x A)·(x B), or silu(x A)·(x A), times a matrix; return its name."""
    both = []
    for name in ("gate", "up")[:gates]:
        weight = graph.param(name, rng.standard_normal((INNER, WIDTH)) / WIDTH**0.5)
        both.append(graph.add("linear", [x, weight], (ROWS, INNER)))
    gate = graph.add("silu", [both[0]], (ROWS, INNER))
    product = graph.add("mul", [gate, both[-1]], (ROWS, INNER))
    last = graph.param("down", rng.standard_normal((WIDTH, INNER)) / INNER**0.5)
    return str(graph.add("linear", [product, last], (ROWS, WIDTH)))


def forms_of(graph: Any, record: Any, x: Floats, radius: float) -> AffineForms:
    """Return the prover's forms."""
    sides = parameters(graph, TRAIN), parameters(graph, record)
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    return affine_forms(block(graph), *sides, torch.from_numpy(x), spread)


def derived(
    folder: Path, graph: Any, record: Any, x: Floats, radius: float, passes: Any = None
) -> Pair:
    """Return what the checker derives with the passes that are named."""
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    document = proofs.document(graph, TRAIN, record, sha256, x, radius)
    if passes is not None:
        document["cases"][0].update(domain="affine", passes=passes)
    proof = parse(proofs.dump(document))
    with np.errstate(all="ignore"):
        scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
        return pair(scene, proof.cases[0].passes)


def asked_of_itself(run: KernelRun) -> set[tuple[str, str]]:
    """Return the nodes that ran a pass before their own cast."""
    return {(at, kind) for at, of, kind, _ in run.passes.rows if at == of and kind != "norm"}


def asked_of_operands(run: KernelRun, kind: str) -> set[str]:
    """Return the nodes that ran such a pass for another one's error."""
    return {at for at, of, asked, _ in run.passes.rows if at != of and asked == kind}


def asks(run: KernelRun, kind: str, *operations: str) -> bool:
    """Return whether all these operations ran such a pass for another one's error."""
    found = {at.rsplit("_", 1)[-1] for at in asked_of_operands(run, kind)}
    return found >= set(operations)


@pytest.mark.sample(1)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", RADII)
@pytest.mark.parametrize("name", KERNELS)
def test_runs_stay_within_the_bounds_of_both_programs(
    tmp_path: Path, name: str, kind: str, gated: bool
) -> None:
    record, radius = KERNELS[name], RADII[kind]
    graph, centre, outer = drawn(radius, gates=2 * gated)
    forms = forms_of(graph, record, centre, radius)
    assert (outer, "ellipsoid") in asked_of_itself(forms.infer)
    kinds = [kind for kind in ("norm", "ellipsoid") if asks(forms.infer, kind, "mul")]
    assert len(kinds) == gated
    assert not (gated and radius) or asks(forms.infer, "ellipsoid", "silu", "mul")
    both = derived(tmp_path, graph, record, centre, radius, forms.passes)
    found, most = both.output(), forms.box().mag().numpy()
    assert (np.maximum(-found.lo, found.hi) <= most * (1 + 2.0**-10)).all()
    for name_of, index in forms.infer.computed.items():
        mine, other = forms.infer.tape.entries[index], both.infer.forms[name_of]
        assert isinstance(other, Form)
        if name_of != graph.output:
            rough = mine.error_bound.numpy()
            np.testing.assert_allclose(other.error_bound, rough, rtol=2.0**-6, atol=1e-12)
    rng = np.random.default_rng(5)
    farthest = np.zeros(most.shape)
    slopes = np.sign(graph.tensors["two"] @ graph.tensors["one"])
    for trial in range(24):
        x = centre + radius * rng.choice([-1.0, 1.0], centre.shape)
        if trial < 12:  # an element of the second product with its largest error
            x = centre + radius * slopes[trial]
        rounded = rng, MODES[trial % 4]
        train = simulated(both.train, TRAIN, graph, x, rounded)
        infer = simulated(both.infer, record, graph, x, rounded)
        assert not mistaken(forms.infer, both.infer, infer)
        farthest = np.maximum(farthest, np.abs(infer[graph.output] - train[graph.output]))
    assert (farthest <= most).all()
    share = 2.0**-13 if gated else 2.0**-8  # the bounds are of the size of what runs meet
    assert (farthest > share * most).any(), (farthest / most).max()


@pytest.mark.parametrize("kind", RADII)
def test_own_errors_of_a_linear_count_in_each_of_its_readings(tmp_path: Path, kind: str) -> None:
    radius, record = RADII[kind], N("bfloat16", "any", accumulate="float16")
    graph, centre, _ = drawn(radius, gates=1)
    forms = forms_of(graph, record, centre, radius)
    assert asks(forms.infer, "ellipsoid", "silu", "mul")
    found = derived(tmp_path, graph, record, centre, radius, forms.passes).output()
    most = forms.box().mag().numpy()
    assert (np.maximum(-found.lo, found.hi) <= most * (1 + 2.0**-10)).all()


def test_passes_are_tighter_than_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, centre, outer = drawn(0.0)
    record = KERNELS["any"]
    forms = forms_of(graph, record, centre, 0.0)
    named = derived(tmp_path, graph, record, centre, 0.0, forms.passes)
    unnamed = {side: [p for p in made if p["at"] != p["of"]] for side, made in forms.passes.items()}
    plain = derived(tmp_path, graph, record, centre, 0.0, unnamed)
    monkeypatch.setattr(before_casts, "LARGEST", 0)
    other = forms_of(graph, record, centre, 0.0)
    assert (outer, "ellipsoid") not in asked_of_itself(other.infer)
    for at, small, large in (
        ("prover", private(forms.infer, outer), private(other.infer, outer)),
        ("checker", named.infer.versions[outer].own, plain.infer.versions[outer].own),
    ):
        assert (small < 0.9 * large).all(), at


@pytest.mark.full
@pytest.mark.parametrize("rule", ["3.8", "3.9"])
def test_norms_and_squares_tighten_products_of_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    radius = RADII["ball"]
    graph, centre, _ = drawn(radius, gates=2)
    record = KERNELS["any"]
    if rule == "3.8":
        monkeypatch.setattr(row_ellipsoids, "LARGEST", 0)
    forms = forms_of(graph, record, centre, radius)
    assert asks(forms.infer, *("norm", "mul") if rule == "3.8" else ("ellipsoid", "silu", "mul"))
    named = derived(tmp_path, graph, record, centre, radius, forms.passes)
    asking = ("_mul",) if rule == "3.8" else ("_mul", "_silu")
    unnamed = {
        side: [p for p in made if not p["at"].endswith(asking) or p["kind"] == "elements"]
        for side, made in forms.passes.items()
    }
    plain = derived(tmp_path, graph, record, centre, radius, unnamed)
    monkeypatch.setattr(row_ellipsoids, "LARGEST", 0)
    monkeypatch.setattr(arithmetic, "_sums", lambda run, node: None)
    other = forms_of(graph, record, centre, radius)
    for at, small, large in (
        ("prover", forms.box(), other.box()),
        ("checker", named.output(), plain.output()),
    ):
        found, elements = (np.maximum(-np.asarray(b.lo), np.asarray(b.hi)) for b in (small, large))
        assert (found < 0.97 * elements).all(), at


def private(run: KernelRun, name: str) -> Floats:
    """Return the separate error of each reading."""
    return run.private[name].error_bound.numpy()


def test_inadmissible_pass_is_not_run(tmp_path: Path) -> None:
    graph, centre, _ = drawn(0.0)
    record = KERNELS["any"]
    norm = next(node["name"] for node in graph.nodes if node["op"] == "rms_norm")
    rows = {"stop": "input", "rows": [0, ROWS]}
    asked = [
        {"at": name, "of": name, "kind": kind, **rows}
        for name in (norm, graph.output)
        for kind in ("elements", "ellipsoid")
    ]
    walk = derived(tmp_path, graph, record, centre, 0.0, {"train": [], "infer": asked}).infer
    assert walk.tape.settled == 0
    assert not any(entry.ellipsoids for entry in walk.tape.entries)


def test_oversized_ellipsoids_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, centre, _ = drawn(0.0)
    record = KERNELS["any"]
    forms = forms_of(graph, record, centre, 0.0)
    monkeypatch.setattr(checked, "LARGEST", ROWS * WIDTH**2 - 1)
    with pytest.raises(Rejected, match="too large"):
        derived(tmp_path, graph, record, centre, 0.0, forms.passes)
