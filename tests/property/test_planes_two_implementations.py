"""Two implementations of linear bounds: every entry of both tapes agrees, rule by rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.certifier.statements.proof import plain
from kcdsl_backends.drift.affine.adjoint import Adjoint as ProverAdjoint
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.drift.linear import LinearRun
from kcdsl_backends.drift.linear.tape import Functional as ProverFunctional
from kcdsl_backends.drift.linear.tape import LinearEntry as ProverEntry
from kcdsl_backends.drift.linear_bounds import hints_of, linear_bounds
from kcdsl_backends.drift.linear_bounds import linear_walk as prove
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.bounds_walk import walk as derive
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.linear_bounds.context import Context
from kcdsl_certs.recheck.linear_bounds.tape import BoundsEntry, FunctionalBatch
from tests.support import proofs
from tests.support.grids import by_turns
from tests.support.plane_blocks import RULES, feed_forward
from tests.support.prover import block, parameters

N = proofs.numerics
KERNELS: dict[str, Any] = {
    "float32 any": N("float32", "any"),
    "float32 fused": N("float32", "any", style="fused"),
    "float32 nearest": N("float32", "nearest"),
    "bfloat16 any": N("bfloat16", "any"),
    "bfloat16 nearest": N("bfloat16", "nearest", scores="float32"),
    "float16 nearest, fused": N("float16", "nearest", style="fused", scores="float32"),
    "fp8 weights": N("float32", "any", weights=("fp8_e4m3", "per_channel")),
    "fp8, per token": N(
        "bfloat16",
        "nearest",
        weights=("fp8_e4m3", "per_channel"),
        activations=("fp8_e4m3", "per_token"),
    ),
    "int8, uint8": N(
        "float32", "any", weights=("int8", "per_channel"), activations=("uint8", "per_tensor")
    ),
    "linears of their own": N(
        "bfloat16",
        "any",
        weights=("fp8_e4m3", "per_channel"),
        activations=("fp8_e4m3", "per_token"),
        overrides={
            "*": proofs.override(("bfloat16", "none")),
            "down": proofs.override(("int8", "per_channel"), ("int8", "per_token")),
            "up": proofs.override(("int8", "per_channel"), ("uint8", "per_token")),
        },
    ),
    "float64": N("float64", "any", accumulate="float64"),
    "bfloat16 toward zero": N("bfloat16", "toward_zero", scores="float32"),
    "float16 any toward zero": N("float16", "any_toward_zero"),
    "float16 any direction": N("float16", "any_direction", style="fused", scores="float32"),
}
PAIRS = [
    ("float32 any", "float32 fused"),
    ("float32 nearest", "bfloat16 nearest"),
    ("bfloat16 nearest", "float64"),
    ("float32 fused", "int8, uint8"),
    ("float16 nearest, fused", "fp8, per token"),
    ("float64", "float64"),
    ("float16 any toward zero", "bfloat16 toward zero"),
    ("float16 any direction", "float32 any"),
    ("float32 fused", "linears of their own"),
]
BENT = {"relu", "relu of a linear", "relu twice", "piecewise"}
Floats = np.ndarray
# The programs round differently; nothing else may make either bound tighter.
AGREE = 2.0**-20


def prover(graph: Any, pair: tuple[Any, Any], centre: Floats | None, radius: float) -> LinearRun:
    train, infer = (parameters(graph, record) for record in pair)
    problem = BlockProblem(block(graph), train, infer)
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    where = None if centre is None else torch.from_numpy(centre)
    return prove(problem.graph, problem.kernels(), where, spread)


def checker(
    folder: Path,
    graph: Any,
    pair: tuple[Any, Any],
    centre: Floats | None,
    radius: float,
    hints: Any = None,
) -> Context:
    """Derive with the hints of the prover, as stored in a proof."""
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    ids = None if centre is not None else [int(k) for k in _ids(graph)]
    document = proofs.document(
        graph, *pair, sha256, np.zeros(1) if centre is None else centre, radius, ids=ids
    )
    document["cases"][0]["domain"] = "planes"
    if hints is not None:
        document["cases"][0]["planes"] = json.loads(json.dumps(plain(hints)))
    proof = parse(proofs.dump(document))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    with np.errstate(all="ignore"):
        return derive(scene, proof.cases[0].planes)


def _ids(graph: Any) -> Any:
    return next(node["attrs"]["ids"] for node in graph.nodes if node["op"] == "embedding")


@pytest.mark.sample(12)
@by_turns(rule=RULES, pair=PAIRS, radius=[0.0, 2.0**-5])
def test_entries_of_linear_bounds_agree(
    tmp_path: Path, rule: str, pair: tuple[str, str], radius: float
) -> None:
    seed = [list(RULES).index(rule), PAIRS.index(pair), int(radius * 1024)]
    rng = np.random.default_rng(seed)
    graph = RULES[rule](rng)
    records = KERNELS[pair[0]], KERNELS[pair[1]]
    centre = None
    if graph.input_shape is not None:
        centre = np.rint(rng.standard_normal(graph.input_shape) * 2**10) / 2**10
    try:
        first = prover(graph, records, centre, radius)
    except NoBound:
        with pytest.raises(Rejected, match="bound/"):
            checker(tmp_path, graph, records, centre, radius)
        return
    second = checker(tmp_path, graph, records, centre, radius, hints_of(first, ()))
    compared = 0
    for node in graph.nodes:
        name = node["name"]
        if node["op"] in ("param", "constant"):
            continue
        mine = first.tape.entries[first.index[name]]
        other = second.tape.entries[second.places[name]]
        noise = 2.0**-42 * float(1 + mine.reference.abs().max() + mine.deviation.mag().max())
        compare(mine, other, noise, name)
        functionals(first, second, name, rng, noise)
        compared += 1
    assert compared > 0


def compare(mine: ProverEntry, other: BoundsEntry, noise: float, name: str) -> None:
    """Compare reference, boxes, centres and radii of one node."""
    assert (np.abs(mine.reference.numpy() - other.reference) <= noise).all(), name
    for found, derived in ((mine.deviation, other.e), (mine.drift, other.d)):
        wide = (found.hi - found.lo).numpy() * AGREE + noise
        assert (np.abs(derived.lo - found.lo.numpy()) <= wide).all(), name
        assert (np.abs(derived.hi - found.hi.numpy()) <= wide).all(), name
    if mine.noise is None:
        assert other.relu is not None
        return
    added = mine.noise
    zero = torch.zeros_like(mine.reference)
    pairs = (
        (mine.deviation, added.deviation, added.deviation_centre, other.radius[0], other.centre[0]),
        (mine.drift, added.drift, added.drift_centre, other.radius[1], other.centre[1]),
    )
    for box, radius, centre, its_radius, its_centre in pairs:
        # bounds as narrow as the programs' own roundings may be boxes in one of them alone
        some = (box.hi - box.lo).numpy() > noise
        wide = radius.numpy() * AGREE + noise
        assert (np.abs(radius.numpy() - its_radius) <= wide)[some].all(), name
        known = (zero if centre is None else centre).expand(box.lo.shape).numpy()
        assert (np.abs(known - its_centre) <= wide)[some].all(), name


def functionals(
    first: LinearRun, second: Context, name: str, rng: np.random.Generator, noise: float
) -> None:
    """Compare random functionals of both unknowns of a node, of one row and of all."""
    index, place = first.index[name], second.places[name]
    shape = first.tape.entries[index].shape
    row = tuple(int(rng.integers(n)) for n in shape[:-1])
    for whole in (True, False):
        extent = shape if whole else (*(1 for _ in row), shape[-1])
        start = tuple(0 for _ in shape) if whole else (*row, 0)
        window = tuple((s, s + e) for s, e in zip(start, extent, strict=True))
        values = [rng.standard_normal((4, *extent)) for _ in range(2)]
        parts = (ProverAdjoint(torch.from_numpy(v), window, shape) for v in values)
        ours = ProverFunctional(*parts)
        theirs = FunctionalBatch(*(Adjoint(v, start) for v in values))
        low, high = (end.numpy() for end in first.tape.bound(index, ours))
        found = second.tape.between(place, theirs)
        slack = (high - low) * AGREE + noise * sum(float(np.abs(v).sum()) for v in values)
        assert (np.abs(found[0] - low) <= slack).all(), name
        assert (np.abs(found[1] - high) <= slack).all(), name


@pytest.mark.sample(9)
@pytest.mark.parametrize("rule", sorted(set(RULES) - BENT))
def test_hints_are_needed_only_for_slopes_of_relus(tmp_path: Path, rule: str) -> None:
    """Without hints every functional is computed; only slopes of ReLUs are worse."""
    rng = np.random.default_rng(5)
    graph = RULES[rule](rng)
    records = KERNELS["float32 any"], KERNELS["bfloat16 any"]
    centre = None if graph.input_shape is None else rng.standard_normal(graph.input_shape)
    first = prover(graph, records, centre, 2.0**-5)
    second = checker(tmp_path, graph, records, centre, 2.0**-5)
    box = first.tape.entries[first.index[graph.output]].drift
    derived = second.tape.entries[second.places[graph.output]].d
    wide = (box.hi - box.lo).numpy() * AGREE + 2.0**-40
    assert (derived.lo >= box.lo.numpy() - wide).all()
    assert (derived.hi <= box.hi.numpy() + wide).all()


@pytest.mark.full
def test_slopes_of_single_elements_agree(tmp_path: Path) -> None:
    """Each element with its own slopes is as tight as in the prover; no other changes."""
    rng = np.random.default_rng(1)
    graph = feed_forward(rng, width=12, inner=24)
    records = KERNELS["float32 any"], KERNELS["fp8 weights"]
    centre = rng.standard_normal(graph.input_shape)
    train, infer = (parameters(graph, record) for record in records)
    problem = BlockProblem(block(graph), train, infer)
    spread = torch.full((1, 1), 2.0**-3, dtype=torch.float64)
    found = linear_bounds(problem.graph, problem.kernels(), torch.from_numpy(centre), spread)
    assert len(found.hints["searched"]) > 8
    box = found.box
    full, plain = (
        checker(tmp_path, graph, records, centre, 2.0**-3, hints).state(graph.output).d
        for hints in (found.hints, {**found.hints, "searched": []})
    )
    wide = (box.hi - box.lo).numpy() * AGREE
    assert (np.abs(full.hi - box.hi.numpy()) <= wide).all()
    assert (np.abs(full.lo - box.lo.numpy()) <= wide).all()
    above, below = (
        {one["element"] for one in found.hints["searched"] if one["side"] == side}
        for side in ("above", "below")
    )
    assert above
    assert below
    assert set(np.flatnonzero(full.hi < plain.hi)) == above
    assert set(np.flatnonzero(full.lo > plain.lo)) == below
    assert (full.hi <= plain.hi).all()
    assert (full.lo >= plain.lo).all()
