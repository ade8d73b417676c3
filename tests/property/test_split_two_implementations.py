"""Split boxes of ReLU blocks: layers in both programs, trees, and runs of kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kcdsl_backends.certifier.statements.problems import Claims
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.split_walk import derive_splits, walk
from tests.support import proofs
from tests.support.grids import by_turns
from tests.support.mutation.trials import exceeded
from tests.support.plane_blocks import CHAINS
from tests.support.split_blocks import LEAF, Floats, problem, prover, scene_of, stated

N = proofs.numerics
FP8 = ("fp8_e4m3", "per_channel")
INT8 = ("int8", "per_channel")
PAIRS: dict[str, Any] = {
    "float32 / bfloat16": (N("float32", "any"), N("bfloat16", "any")),
    "bfloat16 nearest / fp8 per token": (
        N("bfloat16", "nearest", scores="float32"),
        N("float32", weights=FP8, activations=("fp8_e4m3", "per_token")),
    ),
    "float32 / int8, uint8": (
        N("float32", "nearest"),
        N("float32", "any", weights=INT8, activations=("uint8", "per_tensor")),
    ),
    "float64 / float64": (
        N("float64", "any", accumulate="float64"),
        N("float64", "any", accumulate="float64"),
    ),
    "float16 toward zero / float32": (N("float16", "any_toward_zero"), N("float32", weights=INT8)),
    "bfloat16 sums / float32": (N("bfloat16", accumulate="bfloat16"), N("float32", weights=FP8)),
}
RUN = [rule for rule in CHAINS if rule != "with casts"]
"""The options of the runs of `exceeded`."""


def drawn(rule: str, pair: str) -> tuple[Any, Floats]:
    rng = np.random.default_rng([list(CHAINS).index(rule), list(PAIRS).index(pair)])
    graph = CHAINS[rule](rng)
    return graph, rng.standard_normal(graph.input_shape).astype(np.float32).astype(np.float64)


@pytest.mark.sample(9)
@by_turns(rule=CHAINS, pair=PAIRS, radius=[0.0, 0.5])
def test_layers_of_both_programs_agree(tmp_path: Path, rule: str, pair: str, radius: float) -> None:
    graph, centre = drawn(rule, pair)
    mine = prover(graph, PAIRS[pair], centre, radius)
    document, path = stated(tmp_path, graph, PAIRS[pair], centre, radius, 1.0, [LEAF] * len(centre))
    other, sizes = walk(scene_of(document, path))
    assert len(mine.layers) == len(other.train) == len(other.offs)
    for layer, train, infer, off in zip(
        mine.layers, other.train, other.infer, other.offs, strict=True
    ):
        for ours, theirs in zip((*layer.train, *layer.infer), (*train, *infer), strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs)
        scale = float(off.loose.max()) + 2.0**-40
        for part, derived in (
            (layer.roundings.loose, off.loose),
            (layer.roundings.apart, off.apart),
        ):
            np.testing.assert_allclose(part.numpy(), derived, rtol=2.0**-12, atol=scale * 2.0**-12)
    for name, (value, moved) in mine.witness.items():
        assert value == pytest.approx(sizes[name][0], rel=1e-6)
        assert moved == pytest.approx(sizes[name][1], rel=1e-3, abs=1e-12)


def follows(scene: Any, rows: int, claim: float) -> bool:
    """Return whether a claim is derivable by trees without cuts."""
    try:
        with np.errstate(all="ignore"):
            derive_splits(scene, [LEAF] * rows, claim)
    except Rejected as rejected:
        if rejected.reason != "claim/too-small":
            raise
        return False
    return True


def least(scene: Any, rows: int, most: float) -> float:
    """Return approximately the smallest derivable claim, from a derivable one."""
    low = 0.0
    while not follows(scene, rows, most):
        low, most = most, 2 * most
    for _ in range(6):
        middle = (low + most) / 2
        low, most = (low, middle) if follows(scene, rows, middle) else (middle, most)
    return most


@pytest.mark.sample(6)
@by_turns(rule=RUN, pair=PAIRS, radius=[2.0**-10, 0.25])
def test_runs_are_within_the_derived_claims(
    tmp_path: Path, rule: str, pair: str, radius: float
) -> None:
    """Claims as small as the checker derives them, compared with runs of both kernels."""
    graph, centre = drawn(rule, pair)
    document, path = stated(tmp_path, graph, PAIRS[pair], centre, radius, 1.0, [LEAF] * len(centre))
    drift = float.fromhex(document["cases"][0]["witness"][-1]["drift"])
    claim = least(scene_of(document, path), len(centre), max(drift, 2.0**-36))
    document["cases"][0]["claim"] = document["claim"] = claim.hex()
    found = recheck(proofs.dump(document), path)
    assert found.ok, found
    assert exceeded(document, path, runs=40) == ""


@pytest.mark.full
@pytest.mark.parametrize("pair", PAIRS)
def test_trees_of_a_search_are_rechecked(tmp_path: Path, pair: str) -> None:
    """Trees of the prover for a limit that needs cuts; no limit below attained drifts is proved."""
    graph, centre = drawn("relu twice", pair)
    network = prover(graph, PAIRS[pair], centre, 0.25)
    asked = problem(graph, PAIRS[pair])
    factor = Claims.of(asked.train.numerics, asked.infer.numerics).factor
    root = 2.0**-20
    while any(d.verdict != "proved" for d in network.split(root, factor, len(centre))):
        root *= 1.5
    found = None
    for share in (0.5, 0.6, 0.7, 0.8, 0.9):
        found = network.split(share * root, factor, 4000)
        if found[-1].verdict == "proved":
            break
    assert found is not None
    assert len(found) == len(centre)
    trees = [one.tree.data for one in found if one.tree is not None]
    document, path = stated(tmp_path, graph, PAIRS[pair], centre, 0.25, share * root, trees)
    outcome = recheck(proofs.dump(document), path)
    assert outcome.ok, outcome
    assert exceeded(document, path, runs=40) == ""
    assert outcome.bound == (share * root).hex()
