"""Quantised tensors: simulated runs inside the bounds of both programs, beyond last codes too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl.model.lowering.quantisers import with_quantisers
from kcdsl.model.numerics import StaticQuantiser
from kcdsl_backends.attack.quantised_inputs import quantised_tensor
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.functionals import drift_bound
from kcdsl_backends.drift.ops.quantised.tensors import quantised_box
from kcdsl_backends.real_arithmetic.allowances import allowances
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.affine_walk import pair as derive
from kcdsl_certs.recheck.affine_walk import walk
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.box import Box as CheckedBox
from kcdsl_certs.recheck.interval.state import Mask, numeric
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.interval_walk import propagate
from kcdsl_certs.recheck.numerics.kernel import TensorCodes
from kcdsl_certs.recheck.ops.linear.quantised_tensors import read_back
from tests.property.test_kv_caches import document_of, runs
from tests.support import proofs
from tests.support.grids import by_turns
from tests.support.prover import block, numerics, parameters

N = proofs.numerics
codes = proofs.tensor_codes
QUANTISERS: dict[str, dict[str, Any]] = {
    "fine": codes(0.04, 128),
    "coarse": codes(0.3, 100),
    "cut off above": codes(0.004, 90),
    "cut off below": codes(0.02, 0),
    "cut off everywhere": codes(0.0005, 17),
}
TENSORS = ("x", "h", "r", "p")
KERNELS: dict[str, tuple[dict[str, Any], str]] = {
    "any": ({"casts": "nearest"}, "any"),
    "nearest": ({"casts": "nearest"}, "nearest"),
    "both free": ({"casts": "any"}, "any"),
    "bfloat16": ({"compute": "bfloat16", "casts": "any"}, "nearest"),
}
"""The training kernel, and the casts of the other kernel."""


def residual(rng: np.random.Generator) -> Any:
    """Return a block in which a product, a sum and a norm read one quantised tensor."""
    g = proofs.Graph((4, 6))
    x = g.add("input", [], (4, 6))
    x = g.add("quantise", [x], (4, 6), tensor="x")
    w = g.param("up.weight", rng.standard_normal((8, 6)) / 6**0.5)
    h = g.add("linear", [x, w], (4, 8))
    h = g.add("relu", [g.add("quantise", [h], (4, 8), tensor="h")], (4, 8))
    w = g.param("down.weight", rng.standard_normal((6, 8)) / 8**0.5)
    y = g.add("add", [x, g.add("linear", [h, w], (4, 6))], (4, 6))
    r = g.add("quantise", [y], (4, 6), tensor="r")
    gain, shift = g.param("gain", rng.standard_normal(6)), g.param("shift", rng.standard_normal(6))
    n = g.add("layer_norm", [r, gain, shift], (4, 6), eps=1e-5)
    g.add("add", [r, g.add("add", [n, y], (4, 6))], (4, 6))
    return g


def attention(rng: np.random.Generator) -> Any:
    """Return an attention that reads quantised states and probabilities."""
    g = proofs.Graph((4, 6))
    x = g.add("input", [], (4, 6))
    r = g.add("quantise", [x], (4, 6), tensor="x")
    proofs.unmasked_attention(g, r, rng, 4, 2, 3)
    nodes: list[dict[str, Any]] = []
    named: dict[str, str] = {}
    for node in g.nodes:
        inputs = [named.get(name, name) for name in node["inputs"]]
        nodes.append({**node, "inputs": inputs, "role": ""})
        if node["op"] in ("softmax", "matmul"):
            tensor = "p" if node["op"] == "softmax" else "h"
            name = f"{node['name']}_q"
            nodes.append({**node, "name": name, "op": "quantise", "inputs": [node["name"]],
                          "attrs": {"tensor": tensor}, "role": ""})  # fmt: skip
            named[node["name"]] = name
    g.nodes = nodes
    return g


BLOCKS: dict[str, Callable[[np.random.Generator], Any]] = {
    "residual": residual, "attention": attention,
}  # fmt: skip


def pair_of(kernels: str, kind: str, *, both: bool = False) -> tuple[Any, Any]:
    """Return a kernel without quantisers, or with some, and one with them."""
    train, casts = KERNELS[kernels]
    by = dict.fromkeys(TENSORS, QUANTISERS[kind]) | {"p": codes(1 / 255, 0)}
    own = {"quantisers": {"r": by["r"], "x": by["x"]}} if both else {}
    return {**own, **N(**train)}, N(casts=casts, quantisers=by)


def test_errors_of_quantised_tensors_are_not_followed_in_real_arithmetic() -> None:
    built, pair = residual(np.random.default_rng(0)), pair_of("any", "fine")
    problem = BlockProblem(block(built), *(parameters(built, record) for record in pair))
    x = torch.zeros(4, 6, dtype=torch.float64)
    with pytest.raises(NoBound, match="errors of quantised tensors are not followed"):
        allowances(problem, x, torch.zeros(1, 1, dtype=torch.float64))


@pytest.mark.sample(4)
@by_turns(kind=QUANTISERS, kernels=KERNELS, graph=BLOCKS, radius=[0.0, 2.0**-9, 2.0**-4])
def test_runs_with_quantisers_are_within_every_domain(
    tmp_path: Path, kind: str, kernels: str, graph: str, radius: float
) -> None:
    rng = np.random.default_rng([list(QUANTISERS).index(kind), list(KERNELS).index(kernels)])
    built, pair = BLOCKS[graph](rng), pair_of(kernels, kind)
    centre = rng.standard_normal(built.input_shape).astype(np.float32).astype(float)
    path = tmp_path / "model.safetensors"
    proof = parse(proofs.dump(document_of(built, pair, centre, radius, path)))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    problem = BlockProblem(block(built), *(parameters(built, record) for record in pair))
    spread, x = torch.full((1, 1), radius, dtype=torch.float64), torch.from_numpy(centre)
    boxes = [problem.bound(x, spread).output.drift]
    with np.errstate(all="ignore"):
        states = {node.name: value for node, value in propagate(scene)}
    forms = None
    try:
        boxes.append(problem.forms(x, spread).box())
        with np.errstate(all="ignore"):
            forms = walk(scene, scene.infer)
    except (NoBound, Rejected):  # of a norm
        if radius < 2.0**-4:
            raise
    for seed in range(8):
        inside = rng.uniform(-1, 1, centre.shape)
        inside = inside if seed % 3 else np.sign(inside)
        entering = np.asarray(centre + radius * inside, dtype=np.float32)
        entering = np.clip(entering.astype(float), centre - radius, centre + radius)
        entering = np.where(entering.astype(np.float32) == entering, entering, centre)
        ran, infer = runs(built, pair, scene, entering, seed)
        drift = torch.from_numpy(infer[built.output] - ran[built.output])
        for box in boxes:
            assert bool((box.lo <= drift).all() & (drift <= box.hi).all())
        for node in scene.block.nodes:
            state = states[node.name]
            if isinstance(state, Mask):
                continue
            state, a, b = numeric(state), ran[node.name], infer[node.name]
            for within, value in ((state.t, a), (state.i, b), (state.d, b - a)):
                assert (within.lo <= value).all(), node.name
                assert (value <= within.hi).all(), node.name
            if forms is None:
                continue
            form: Any = forms.forms[node.name]
            own = forms.versions.get(node.name)
            off = np.abs(infer[node.name] - form.reference)
            reach = form.error_bound + (0 if own is None else own.own)
            assert (off <= reach + 2.0**-60).all(), node.name


@pytest.mark.sample(4)
@by_turns(kind=QUANTISERS, kernels=KERNELS, graph=BLOCKS, radius=[0.0, 2.0**-9, 2.0**-4])
def test_both_programs_agree_on_quantised_tensors(
    tmp_path: Path, kind: str, kernels: str, graph: str, radius: float
) -> None:
    rng = np.random.default_rng([list(QUANTISERS).index(kind), list(KERNELS).index(kernels), 1])
    built, pair = BLOCKS[graph](rng), pair_of(kernels, kind, both=kernels == "any")
    centre = rng.standard_normal(built.input_shape).astype(np.float32).astype(float)
    path = tmp_path / "model.safetensors"
    stated = document_of(built, pair, centre, radius, path)
    problem = BlockProblem(block(built), *(parameters(built, record) for record in pair))
    spread, x = torch.full((1, 1), radius, dtype=torch.float64), torch.from_numpy(centre)
    found = drift_bound(problem.bound(x, spread).output.drift, "inf")
    for case in (stated, stated["cases"][0]):
        case["claim"] = (found * (1 + 2.0**-10)).hex()
    outcome = recheck(proofs.dump(stated), path)
    assert outcome.ok, (outcome.reason, outcome.detail)
    assert float.fromhex(outcome.bound) == pytest.approx(found, rel=2.0**-12)
    for case in (stated, stated["cases"][0]):
        case["claim"] = (found * (1 - 2.0**-10)).hex()
    assert recheck(proofs.dump(stated), path).reason == "claim/too-small"
    forms = problem.forms(x, spread)
    mine = forms.box()
    stated["cases"][0].update(domain="affine", passes=forms.passes)
    proof = parse(proofs.dump(stated))
    with np.errstate(all="ignore"):
        scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
        output = derive(scene, proof.cases[0].passes).output()
    least = (mine.hi - mine.lo).numpy() * 2.0**-10 + 2.0**-42
    for theirs, end, outward in ((output.lo, mine.lo, -1), (output.hi, mine.hi, 1)):
        beyond = outward * (theirs - end.numpy())
        # by Rule 5.4 of affine forms the checker uses ellipsoids from a smaller ratio on
        assert ((-4 * least <= beyond) & (beyond <= least)).all()


@pytest.mark.parametrize("scale", [2.0**-100, 0.0078125, 0.01, 0.37, 2.0**24])
@pytest.mark.parametrize("zero", [0, 1, 128, 254, 255])
def test_steps_of_both_programs_cover_every_edge(scale: float, zero: int) -> None:
    step = float(np.float32(scale))
    edges = (np.arange(-3, 260) - 0.5 - zero) * step
    near = np.concatenate([edges, edges + 0.25 * step, [(255 - zero) * step * 4, -zero * step * 4]])
    singles = near.astype(np.float32)
    around = [singles]
    for way in (-np.inf, np.inf):
        one = np.nextafter(singles, np.float32(way))
        around += [one, np.nextafter(one, np.float32(way))]
    v = np.unique(np.concatenate(around)).astype(np.float32)
    for ratio in (v / np.float32(step), v * (np.float32(1) / np.float32(step))):
        code = np.clip(np.rint(ratio) + np.float32(zero), 0, 255)
        value = ((code - np.float32(zero)) * np.float32(step)).astype(np.float64)
        x = v.astype(np.float64)
        mine = quantised_box(Box.point(torch.from_numpy(x)), StaticQuantiser(step, zero))
        theirs, off = read_back(CheckedBox(x, x), TensorCodes(step, zero))
        for low, high, found in (
            (mine.value.lo.numpy(), mine.value.hi.numpy(), value),
            (mine.error.lo.numpy(), mine.error.hi.numpy(), value - x),
            (theirs.lo, theirs.hi, value),
            (off.lo, off.hi, value - x),
        ):
            assert (low <= found).all()
            assert (found <= high).all()
        wide = (theirs.hi - theirs.lo) / step
        assert (wide <= 1.001).all()
        assert (wide == 0).mean() > 0.3  # exact except at edges
    run = quantised_tensor(torch.from_numpy(v.astype(np.float64)), StaticQuantiser(step, zero))
    code = np.clip(np.rint(v / np.float32(step)) + np.float32(zero), 0, 255)
    assert (run.numpy() == ((code - zero) * np.float64(step)).astype(np.float32)).all()


@pytest.mark.full
def test_runs_exceed_the_bounds_of_other_quantisers(tmp_path: Path) -> None:
    """Without quantisers, or with a finer or unsaturated one, the bounds do not hold.

    So a proof that omits a quantiser is about another kernel.
    """
    outside = dict.fromkeys(("left out", "finer", "moved"), 0)
    for kind in QUANTISERS:
        rng = np.random.default_rng(list(QUANTISERS).index(kind))
        built, pair = residual(rng), pair_of("any", kind)
        centre = rng.standard_normal(built.input_shape).astype(np.float32).astype(float)
        path = tmp_path / "model.safetensors"
        proof = parse(proofs.dump(document_of(built, pair, centre, 0.0, path)))
        scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
        ran, infer = runs(built, pair, scene, centre, 1)
        drift = torch.from_numpy(infer[built.output] - ran[built.output])
        by = pair[1]["quantisers"]
        scale = float.fromhex(by["r"]["scale"])
        others = {
            "left out": {name: one for name, one in by.items() if name != "r"},
            "finer": by | {"r": codes(scale / 3, by["r"]["zero_point"])},
            "moved": by | {"r": codes(scale, (by["r"]["zero_point"] + 60) % 256)},
        }
        for name, quantisers in others.items():
            sides = [
                parameters(built, one) for one in (pair[0], {**pair[1], "quantisers": quantisers})
            ]
            box = BlockProblem(block(built), *sides).bound(
                torch.from_numpy(centre), torch.zeros(1, 1, dtype=torch.float64)
            ).output.drift  # fmt: skip
            outside[name] += bool(((drift < box.lo) | (drift > box.hi)).any())
    assert outside["left out"] == outside["finer"] == len(QUANTISERS)
    assert outside["moved"] >= 3


def test_changed_proof_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    built, pair = residual(rng), pair_of("any", "coarse")
    centre = rng.standard_normal(built.input_shape).astype(np.float32).astype(float)
    path = tmp_path / "model.safetensors"
    stated = document_of(built, pair, centre, 0.0, path)
    problem = BlockProblem(block(built), *(parameters(built, record) for record in pair))
    x = torch.from_numpy(centre)
    bounds = problem.bound(x, torch.zeros(1, 1, dtype=torch.float64))
    found = (drift_bound(bounds.output.drift, "inf") * (1 + 2.0**-10)).hex()
    stated["claim"] = stated["cases"][0]["claim"] = found
    assert recheck(proofs.dump(stated), path).ok

    def reason(**quantisers: Any) -> str:
        changed = {**stated, "numerics": {**stated["numerics"]}}
        infer = {**changed["numerics"]["infer"], "quantisers": quantisers}
        if not quantisers:
            del infer["quantisers"]
        changed["numerics"]["infer"] = infer
        return str(recheck(proofs.dump(changed), path).reason)

    by = dict(pair[1]["quantisers"])
    assert reason(**by) == "ok"
    assert reason(**(by | {"r": codes(0.6, 100)})) == "claim/too-small"
    assert reason(**(by | {"r": codes(0.3, 250)})) == "claim/too-small"
    assert reason(**{name: one for name, one in by.items() if name != "r"}) == "rule/quantise"
    assert reason() == "rule/quantise"
    for wrong in ({**by["r"], "zero_point": 256}, {**by["r"], "zero_point": -1},
                  {"zero_point": 3}, {**by["r"], "scale": (0.1).hex()},
                  {**by["r"], "scale": "nan"}, {**by["r"], "more": 1}):  # fmt: skip
        assert reason(**(by | {"r": wrong})) == "document/numerics"
    for field, value in (("compute", "bfloat16"), ("casts", "any_direction")):
        changed = {**stated, "numerics": {**stated["numerics"]}}
        changed["numerics"]["infer"] = {**pair[1], field: value}
        assert recheck(proofs.dump(changed), path).reason == "document/numerics"


def test_nodes_without_effect_are_removed() -> None:
    graph = block(residual(np.random.default_rng(0)))
    plain, infer = numerics(N()), numerics(pair_of("any", "fine")[1])
    assert "quantise" not in {n.op for n in with_quantisers(graph, (plain, plain)).nodes}
    assert with_quantisers(graph, (plain, infer)) is graph
    one = numerics(N(quantisers={"r": QUANTISERS["fine"]}))
    left = with_quantisers(graph, (plain, one)).nodes
    assert [n.attrs["tensor"] for n in left if n.op == "quantise"] == ["r"]


def test_moved_tensor_is_not_quantised_again() -> None:
    g = proofs.Graph((4, 6))
    x = g.add("quantise", [g.add("input", [], (4, 6))], (4, 6), tensor="x")
    y = g.add("quantise", [g.permute(g.add("relu", [x], (4, 6)), [1, 0])], (6, 4), tensor="h")
    g.add("quantise", [g.add("neg", [y], (6, 4))], (6, 4), tensor="r")
    graph, plain = block(g), numerics(N())
    fine, coarse = QUANTISERS["fine"], QUANTISERS["coarse"]

    def left(**by: Any) -> list[Any]:
        kept = with_quantisers(graph, (plain, numerics(N(quantisers=by))))
        return [node.attrs["tensor"] for node in kept.nodes if node.op == "quantise"]

    assert left(x=fine, h=fine, r=fine) == ["x", "r"]
    assert left(x=fine, h=coarse, r=coarse) == ["x", "h", "r"]
    assert left(h=fine) == ["h"]
