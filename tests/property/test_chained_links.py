"""Chains are sound: no run through several links leaves the claims of any link.

Random small models of two layers, with and without known input, in many pairs of formats. Runs are
simulated through the whole block with explicit roundings; the values of both kernels behind every
link must lie in the boxes of that link, element by element, and the last in the bound.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kcdsl_backends.attack import attack
from kcdsl_backends.attack.runs import functional
from kcdsl_backends.certifier import stages
from kcdsl_backends.certifier.stages import prefix
from kcdsl_backends.certifier.statements.problems import LEAST_CLAIM, BlockProblem
from kcdsl_backends.drift import affine_run as affine
from kcdsl_backends.drift import interval
from kcdsl_backends.drift.affine_forms import output_ellipsoids
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.chain_document import parse_chain
from kcdsl_certs.recheck.documents.document import load, numbers_of
from kcdsl_certs.recheck.interval.tensors import read
from tests.support.chains import CLAUSES, PAIRS, Chained, chained, small
from tests.support.grids import LATER
from tests.support.mutation.changes import array_of
from tests.support.proofs import array
from tests.support.rationals.exact import recheck_exactly

CANCELLING = 99
BOTH = recheck, recheck_exactly
"""Seed of a model whose weights the test writes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the models of this module."""
    return tmp_path_factory.mktemp("chains")


def outputs(found: Chained) -> list[dict[str, Any]]:
    """Return the claimed output of every link but the last."""
    (case,) = json.loads(found.document)["cases"]
    return [link["output"] for link in case["links"][:-1]]


def leaving(found: Chained, count: int, seed: int = 3) -> list[str]:
    """Return where simulated runs exceed the claims of a chain."""
    boxes = [
        [array_of(box[part][end]) for part in ("train", "drift") for end in ("low", "high")]
        for box in outputs(found)
    ]
    left: list[str] = []
    for run in found.runs(count, seed):
        for link, (t, i), box in zip(found.links, run, boxes, strict=False):
            value, drift = t.numpy(), (i - t).numpy()
            slip = 2.0**-52 * (np.abs(value) + np.abs(i.numpy()))  # of the subtraction here
            if not ((box[0] <= value) & (value <= box[1])).all():
                left.append(f"{link.block}: value")
            if not ((box[2] - slip <= drift) & (drift <= box[3] + slip)).all():
                left.append(f"{link.block}: drift")
        train, infer = run[-1]
        if found.goal.functional != "no_flip":
            reached = float(functional(infer - train, found.goal.functional).amax())
            if reached * (1 - 2.0**-40) > found.found.bounded.outcome.bound:
                left.append("bound")
    return left


# A model by turns, the other one is slow; an encoder has no top choice.
STATED = [
    pytest.param(
        kind,
        pair,
        clause,
        marks=() if "no_flip" in text or (place + clause + turn) % 2 else LATER,
    )
    for turn, kind in enumerate(("llama", "bert"))
    for place, pair in enumerate(PAIRS)
    for clause, text in enumerate(CLAUSES)
    if kind == "llama" or "no_flip" not in text
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "pair", "clause"), STATED)
def test_runs_stay_within_every_link(kind: str, pair: str, clause: int, folder: Path) -> None:
    assert leaving(chained(folder, kind, pair, clause), 24) == []


HANDED = [
    ("llama", "float32 fused", None),
    ("llama", "bfloat16 nearest", None),
    ("bert", "float32 fused", None),
    ("bert", "float16 any", 2),
    ("bert", "fp8 weights", None),
]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "pair", "count"), HANDED)
def test_ellipsoids_contain_the_outputs_of_links(
    kind: str, pair: str, count: int | None, folder: Path
) -> None:
    """Rows of the drift behind each link lie in the ellipsoids of the checker.

    The prover has the same ellipsoids, and runs lie in all claims that use them. They are not far
    too large.
    """
    found = chained(folder, kind, pair, count=count, ellipsoids=True)
    assert leaving(found, 24) == []
    outcome = recheck(found.document, found.checkpoint)
    assert outcome.ok, outcome
    chain = parse_chain(load(found.document))
    doubles, held = Derivation(chain.inner, read(found.checkpoint).tensors), None
    links = chain.cases[0].links
    runs, largest = list(found.runs(24, 5)), 0.0
    for place, (link, behind) in enumerate(pairwise(links)):
        *_, held = doubles.interface(link.case, held, wanted=behind.ellipsoids)
        assert (held is not None) == behind.ellipsoids == (link.case.domain == "affine")
        if held is None:
            continue
        for run in runs:
            train, infer = (side.numpy() for side in run[place])
            largest = max(largest, *farthest(held, infer - train))
        assert largest <= 1
    assert largest > 1e-4


def farthest(held: Any, drift: np.ndarray) -> list[float]:
    """Return (d - m)ᵀ P⁻¹ (d - m) of every row: at most 1 in an ellipsoid."""
    return [
        float((d - m) @ np.linalg.solve(shape, d - m))
        for m, shape, d in zip(*held, drift, strict=True)
    ]


@pytest.mark.full
def test_too_small_ellipsoids_are_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker computes its own, and confirms nothing that rests on smaller ones."""

    def smaller(forms: Any) -> Any:
        whole = output_ellipsoids(forms)
        return None if whole is None else replace(whole, shapes=whole.shapes / 64)

    monkeypatch.setattr(stages, "output_ellipsoids", smaller)
    found = chained(folder, "bert", "float16 any", ellipsoids=True)
    outcome = recheck(found.document, found.checkpoint)
    assert outcome.reason in ("claim/too-small", "witness/too-small", "chain/output")


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "pair"),
    [
        ("llama", "float32 fused"),
        ("bert", "float16 any"),
        pytest.param("llama", "float16 any", marks=LATER),
        pytest.param("bert", "float32 fused", marks=LATER),
    ],
)
def test_attacks_stay_below_the_claim_of_every_link(kind: str, pair: str, folder: Path) -> None:
    """The drift that an attack finds at the end of each link is below the claim of the link."""
    found = chained(folder, kind, pair)
    for link, outcome in zip(found.links, found.found.bounded.outcome.links, strict=True):
        train, infer = found.context.factory.problem_of_graph(
            prefix(found.whole, link.output)
        ).simulators()
        best = attack(train, infer, "inf", None, found.case.radius, seed=1, rounds=6)
        assert best.value <= outcome.bound, link.block


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "pair"),
    [
        ("llama", "identical"),
        ("llama", "bfloat16 twice"),
        ("llama", "fp8 weights"),
        ("llama", "float64"),
        ("bert", "float32 fused"),
        ("bert", "float32 nearest"),
        ("bert", "bfloat16 nearest"),
    ],
)
def test_both_programs_agree_on_chains(kind: str, pair: str, folder: Path) -> None:
    """The checker's boxes lie in the claimed ones, which are wider by the margin of claims at most.

    Against float64 kernels the programs' own roundings count, and their size may differ.
    """
    found = chained(folder, kind, pair)
    outcome = recheck(found.document, found.checkpoint)
    assert outcome.ok, outcome
    chain = parse_chain(load(found.document))
    derive = Derivation(chain.inner, read(found.checkpoint).tensors).link
    for link in chain.cases[0].links[:-1]:
        assert link.output is not None
        _, _, ends = derive(link.case)
        for first in (0, 2):
            low, high = (np.array(end) for end in ends[first : first + 2])
            least, most = (np.array(end) for end in link.output[first : first + 2])
            assert (least <= low).all()
            assert (high <= most).all()
            size = np.maximum(np.abs(least), np.abs(most))
            if pair != "float64":
                assert (
                    most - least <= (high - low) * 1.01 + 2.0**-48 * size + 4 * LEAST_CLAIM
                ).all()


@pytest.mark.full
def test_chains_are_confirmed_in_rational_arithmetic(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rational arithmetic confirms a chain of supported operations, with no larger bound."""

    def none(self: BlockProblem, centre: Any, radius: Any, *_: Any) -> Any:
        raise NoBound("test", "intervals alone")

    with_forms = chained(folder, "plain", "float32 nearest")
    refused = recheck_exactly(with_forms.document, with_forms.checkpoint)
    assert refused.reason == "document/domain"
    monkeypatch.setattr(BlockProblem, "forms", none)
    found = chained(folder, "plain", "float32 nearest")
    assert [link.block for link in found.links] == ["model[0]", "model[1]", "model[2]"]
    assert leaving(found, 24) == []
    doubles, exact = (check(found.document, found.checkpoint) for check in BOTH)
    assert doubles.ok, doubles
    assert exact.ok, exact
    assert float.fromhex(exact.bound) <= float.fromhex(doubles.bound)
    document = json.loads(found.document)
    drift = document["cases"][0]["links"][1]["output"]["drift"]
    drift["high"] = array(array_of(drift["high"]) * 0.9)
    narrower = json.dumps(document).encode()
    for check in BOTH:
        outcome = check(narrower, found.checkpoint)
        assert outcome.reason == "chain/output"


@pytest.mark.full
def test_ellipsoids_are_never_worse_than_boxes(folder: Path) -> None:
    """They are used beside boxes; where drifts are sums of many roundings they are far tighter."""
    pairs = (
        ("llama", "float32 fused", 17),
        ("bert", "float16 any", 17),
        ("llama", "float16 any", 17),
        ("llama", "bfloat16 nearest", 18),
    )
    for kind, pair, seed in pairs:
        plain, more = (chained(folder, kind, pair, seed=seed, ellipsoids=e) for e in (False, True))
        bounds = [found.found.bounded.outcome.bound for found in (plain, more)]
        assert bounds[1] <= bounds[0] * (1 + 2.0**-20) < math.inf
    assert bounds[1] < 0.5 * bounds[0]


@pytest.mark.full
def test_readings_of_a_state_between_links_may_differ(folder: Path) -> None:
    """r - relu(r) for a state r > 0: with equal readings only the next link's rounding is left."""
    small(folder, "plain", seed=CANCELLING)
    path = folder / f"plain-{CANCELLING}" / "own.safetensors"
    weights = load_file(path)
    weights["embed.weight"] = weights["embed.weight"].abs() + 1
    for name, factor in (("one", 1.0), ("two", 0.5), ("three", 1.0), ("four", -1.0)):
        weights[f"{name}.weight"] = factor * torch.eye(3)
    weights["head.weight"] = torch.eye(5, 3)
    save_file(weights, path)
    u = 2.0**-11 * (1 - 2.0**-20)
    for ellipsoids in (False, True):
        found = chained(
            folder, "plain", "float16 any", seed=CANCELLING, tokens=(1, 5), ellipsoids=ellipsoids
        )
        outcome = recheck(found.document, found.checkpoint)
        assert outcome.ok, outcome
        state = 1.5 * weights["embed.weight"][[1, 5]].double()  # without roundings
        summed, stored = state * (1 - u), state * (1 + u)
        drift = (summed - stored * (1 + u) ** 2) * (1 + u) ** 2
        assert float(drift.abs().amax()) <= float.fromhex(outcome.bound)
        assert leaving(found, 24) == []


def without_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant the defect that a drift is treated as zero."""

    def none(node: Any, centre: Any, radius: Any, drift: Box, apart: Any) -> Any:
        zero = torch.zeros_like(drift.lo)
        return drifting(node, centre, radius, Box(zero, zero), apart)

    def stored(run: Any, node: Any, centre: Any, drift: Box, handed: Any) -> None:
        zero = torch.zeros_like(drift.lo)
        stored_before(run, node, centre, Box(zero, zero), handed)

    drifting, stored_before = interval.stage_input, affine._stored_before
    monkeypatch.setattr(interval, "stage_input", none)
    monkeypatch.setattr(affine, "_stored_before", stored)


@pytest.mark.full
def test_ignored_drift_is_detected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: runs leave such a chain, and the checker rejects it."""
    without_drift(monkeypatch)
    found = chained(folder, "llama", "bfloat16 nearest")
    assert any(name.startswith("layer_1") for name in leaving(found, 96))
    outcome = recheck(found.document, found.checkpoint)
    assert not outcome.ok
    assert outcome.reason in ("claim/too-small", "witness/too-small", "chain/output")


@pytest.mark.full
def test_input_of_a_link_is_not_cast_again(folder: Path) -> None:
    """The previous link stored the input, here in float32 by a kernel with bfloat16 results.

    Storing it again would add an error that no run has.
    """
    found = chained(folder, "llama", "bfloat16 twice")
    chain = parse_chain(load(found.document))
    doubles = Derivation(chain.inner, read(found.checkpoint).tensors)
    link = chain.cases[0].links[1].case
    scene = doubles.problem(link)
    assert scene.drift is not None
    region = link.region.drift
    assert region is not None
    low = np.array(numbers_of(region[0]))
    assert (scene.drift.lo.ravel() == low).all()
