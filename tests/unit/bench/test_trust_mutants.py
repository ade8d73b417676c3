"""The campaign of trust mutants carries out each mutant and finds a planted vulnerability."""

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
def test_accepted_mutants_have_a_documented_reason(kind: str, scene: Scene) -> None:
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
    "run-checkpoint": lambda patch: patch.setattr(
        "kcdsl_backends.empirical.table.checkpoint.hmac.compare_digest", lambda one, other: True
    ),
}


@pytest.mark.parametrize("kind", HOLES)
def test_planted_vulnerability_is_found(
    kind: str, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checker that omits one step accepts a mutant."""
    HOLES[kind](monkeypatch)
    found = (run() for run in islice(GENERATORS[kind](scene, random.Random(3)), 3000))
    assert any(one.wrong for one in found)
    scene.restore()


def test_every_kind_of_mutant_has_a_share() -> None:
    assert trust_mutants.SHARES.keys() == GENERATORS.keys() == set(trust_mutants.KINDS)
    assert sum(trust_mutants.SHARES.values()) == pytest.approx(1)


def test_scene_contains_the_files_that_it_checks(scene: Scene) -> None:
    files = {path.name for path in Path(scene.folder).iterdir()}
    assert {"N.proof.json", "rows.jsonl", "trace.jsonl", "report.json", "kernels.json"} <= files
