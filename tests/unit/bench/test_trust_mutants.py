"""The campaign of mutants: each is carried out, and a hole that is planted is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from bench import trust_mutants
from bench.trust_mutants import GENERATORS, Scene
from kcdsl_certs.verification import verify as checker


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("trust") / "scene")


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", GENERATORS)
def test_no_mutant_is_accepted_for_no_reason(kind: str, scene: Scene) -> None:
    assert scene.check(scene.bundle).accepted
    found = [run() for run in islice(GENERATORS[kind](scene, random.Random(7)), 25)]
    assert [one for one in found if one.wrong] == []
    assert {one.kind for one in found} == {kind}
    scene.restore()
    assert scene.check(scene.bundle).accepted


def _nothing(*given: Any, **named: Any) -> str:
    return ""


HOLES: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "statement": lambda patch: patch.setattr(checker, "_clauses", _nothing),
    "envelope": lambda patch: patch.setattr(
        "kcdsl_certs.verification.authentication._signed_by",
        lambda envelope, trusted, *_: trusted.keys,
    ),
    "trace": lambda patch: [
        patch.setattr(checker, step, _nothing) for step in ("check_evidence", "check_recount")
    ],
    "journal": lambda patch: patch.setattr(
        "kcdsl_backends.empirical.table.checkpoint.hmac.compare_digest", lambda one, other: True
    ),
}


@pytest.mark.parametrize("kind", HOLES)
def test_a_planted_hole_is_found(kind: str, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checker that leaves one step out accepts what it must not."""
    HOLES[kind](monkeypatch)
    found = (run() for run in islice(GENERATORS[kind](scene, random.Random(3)), 3000))
    assert any(one.wrong for one in found)
    scene.restore()


def test_the_shares_are_of_every_kind() -> None:
    assert trust_mutants.SHARES.keys() == GENERATORS.keys() == set(trust_mutants.KINDS)
    assert sum(trust_mutants.SHARES.values()) == pytest.approx(1)


def test_a_scene_has_what_it_checks(scene: Scene) -> None:
    files = {path.name for path in Path(scene.folder).iterdir()}
    assert {"N.proof.json", "rows.jsonl", "trace.jsonl", "report.json", "kernels.json"} <= files
