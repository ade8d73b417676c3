"""Affine forms are nowhere wider than the interval domain, node by node, in both programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.affine_forms import AffineForms, affine_forms
from kcdsl_backends.drift.affine_run import affine_run
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.boxes.state import Kernels
from kcdsl_backends.drift.interval import kernel_boxes
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.form import Form
from kcdsl_certs.recheck.affine_walk import Pair, pair
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.state import DriftProblem
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.interval_walk import Enclosed, enclosed
from tests.support import proofs
from tests.support.affine_rules import RULES
from tests.support.grids import by_turns
from tests.support.prover import block, parameters

N = proofs.numerics
FULL = N("float32", "any")
KERNELS: dict[str, Any] = {
    "bfloat16 any": N("bfloat16", "any"),
    "bfloat16 nearest": N("bfloat16", "nearest", scores="float32"),
    "float16 toward zero": N("float16", "toward_zero", style="fused"),
    "fp8 per token": N(
        "bfloat16",
        "nearest",
        weights=("fp8_e4m3", "per_channel"),
        activations=("fp8_e4m3", "per_token"),
    ),
    "int8 per tensor": N("float32", "nearest", activations=("int8", "per_tensor")),
}
RADII = [0.0, 2.0**-10, 2.0**-4]
AGREE = 2.0**-12
"""Shared scales have a float32 rounding error, a large share of small error bounds."""


@pytest.fixture(autouse=True)
def passes_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the prover run passes wherever a rule may, as the checker does without hints."""
    monkeypatch.setattr("kcdsl_backends.drift.affine_forms.coarsest", lambda *_: 0.0)


@pytest.mark.sample(21)
@by_turns(rule=RULES, name=KERNELS, radius=RADII)
def test_affine_error_bounds_are_within_the_boxes(
    tmp_path: Path, rule: str, name: str, radius: float
) -> None:
    case = (list(RULES).index(rule), list(KERNELS).index(name), RADII.index(radius))
    graph, centre = _drawn(rule, case)
    try:
        forms = _proved(graph, KERNELS[name], centre, radius)
    except NoBound:
        with pytest.raises(Rejected, match="bound/"):
            _derived(_scene(tmp_path, graph, KERNELS[name], centre, radius))
        return
    scene = _scene(tmp_path, graph, KERNELS[name], centre, radius)
    derived, within = _derived(scene), _enclosed(scene)
    found = _boxes(graph, KERNELS[name], centre, radius)
    compared = 0
    for side in range(2):
        run, walked = (forms.train, forms.infer)[side], (derived.train, derived.infer)[side]
        for node, index in run.computed.items():
            entry, form = run.tape.entries[index], walked.forms[node]
            assert isinstance(form, Form)
            reach = entry.error_bound.numpy()
            noise = 2.0**-40 * float(entry.size.max())
            known = form.reference == 0  # masked columns, which the prover stores like any number
            most = np.where(known, form.error_bound, reach) * (1 + AGREE) + noise
            assert (form.error_bound <= most).all()
            if node not in found[side]:
                continue
            compared += 1
            assert (reach <= _farthest(found[side][node], entry.reference) + noise).all()
            box = (within.train, within.infer)[side][node]
            ends = Box(torch.tensor(box.lo), torch.tensor(box.hi))
            farthest = _farthest(ends, torch.from_numpy(np.array(form.reference)))
            assert (form.error_bound <= farthest + noise).all()
    assert compared > 0


def test_boxes_tighten_affine_error_bounds(tmp_path: Path) -> None:
    """Attention on a ball with nearest quantisers: boxes are tighter there."""
    graph, centre = _drawn("context straight from a linear", (1, 2, 3))
    kernel = KERNELS["fp8 per token"]
    built, radius = block(graph), torch.full((1, 1), 2.0**-6, dtype=torch.float64)
    met = _proved(graph, kernel, centre, 2.0**-6)
    x, infer = torch.from_numpy(centre), parameters(graph, kernel)
    alone = affine_run(built, infer, x, radius, 2.0**-8)
    lowered = [
        node
        for node, index in alone.computed.items()
        if bool(
            (
                met.infer.tape.entries[index].error_bound
                < 0.9 * alone.tape.entries[index].error_bound
            ).any()
        )
    ]
    assert lowered
    derived = _derived(_scene(tmp_path, graph, kernel, centre, 2.0**-6))
    apart = AffineForms(met.output, met.train, alone).box()
    for lo, hi in ((met.box().lo, met.box().hi), map(torch.from_numpy, _output(derived))):
        assert float((hi - lo).max()) < float((apart.hi - apart.lo).max())


def test_nodes_before_an_overflow_are_intersected(tmp_path: Path) -> None:
    """Squares overflow float16 in the last operation: all before it have boxes."""
    g = proofs.Graph((2, 3))
    x = g.add("input", [], (2, 3))
    y = g.add("linear", [x, g.param("w", np.eye(3))], (2, 3))
    g.add("mul", [y, y], (2, 3))
    centre, coarse = np.full((2, 3), 300.0), N("float16", "nearest")
    stored = parameters(g, FULL), parameters(g, coarse)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    found = kernel_boxes(block(g), Kernels.of(*stored), torch.from_numpy(centre), zero)
    within = _enclosed(_scene(tmp_path, g, coarse, centre, 0.0))
    last = g.nodes[-1]["name"]
    for ours, theirs in zip(found, (within.train, within.infer), strict=True):
        computed = {n["name"] for n in g.nodes if n["op"] not in ("param", "constant")}
        assert set(ours) == computed - {last}
        assert computed - set(theirs) == {last}
    assert within.output is None


def _drawn(rule: str, case: tuple[int, ...]) -> tuple[Any, np.ndarray]:
    rng = np.random.default_rng([17, *case])
    graph = RULES[rule](rng)
    return graph, np.rint(rng.standard_normal(graph.input_shape) * 2**10) / 2**10


def _proved(graph: Any, kernel: Any, centre: np.ndarray, radius: float) -> AffineForms:
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    sides = parameters(graph, FULL), parameters(graph, kernel)
    return affine_forms(block(graph), *sides, torch.from_numpy(centre), spread)


def _boxes(
    graph: Any, kernel: Any, centre: np.ndarray, radius: float
) -> tuple[dict[str, Box], dict[str, Box]]:
    kernels = Kernels.of(parameters(graph, FULL), parameters(graph, kernel))
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    return kernel_boxes(block(graph), kernels, torch.from_numpy(centre), spread)


def _scene(
    folder: Path, graph: Any, kernel: Any, centre: np.ndarray, radius: float
) -> DriftProblem:
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    proof = parse(proofs.dump(proofs.document(graph, FULL, kernel, sha256, centre, radius)))
    return Derivation(proof, read(path).tensors).problem(proof.cases[0])


def _derived(scene: DriftProblem) -> Pair:
    with np.errstate(all="ignore"):
        return pair(scene)


def _enclosed(scene: DriftProblem) -> Enclosed:
    with np.errstate(all="ignore"):
        return enclosed(scene)


def _output(derived: Pair) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(all="ignore"):
        found = derived.output()
    return found.lo, found.hi


def _farthest(box: Box, reference: torch.Tensor) -> np.ndarray:
    return torch.maximum(box.hi - reference, reference - box.lo).numpy()
