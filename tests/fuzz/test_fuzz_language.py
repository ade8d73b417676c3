"""Mutants of every kind keep every property; `make fuzz-language` examines many more."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.common import report
from bench.fuzz_language import figures_of
from tests.fuzz.campaign import reduced, run
from tests.fuzz.examination import Examined, Failure
from tests.fuzz.mutants import KINDS, Mutant, mutant
from tests.fuzz.seeds import generated_seed, good_seeds, readable_seeds, seeds


@pytest.mark.full
@pytest.mark.parametrize("count", [120, pytest.param(3_000, marks=pytest.mark.slow)])
def test_mutants_keep_every_property(count: int) -> None:
    tally = run(0, range(count))
    shown = [(f.number, f.failure.stage, f.failure.detail[-2000:]) for f in tally.findings]
    assert not shown, shown[:3]
    assert tally.examined == count
    assert len(tally.texts) > 0.95 * count
    assert {tally.kind(kind) for kind in KINDS} == {count // len(KINDS)}
    for kind in KINDS:
        assert tally.outcome("accepted", kind) >= count // 20, kind
        assert tally.outcome("rejected", kind) >= count // 50, kind
    assert tally.changed >= count // 10
    assert len(tally.codes) >= 20
    stages = {"lint", "format", "fix", "edit", "meaning", "program", "sarif", "server", "solver"}
    assert stages <= set(tally.slowest)


@pytest.mark.full
def test_mutant_is_determined_by_its_numbers() -> None:
    assert [mutant(3, n).data for n in range(60)] == [mutant(3, n).data for n in range(60)]
    assert len({mutant(3, n).data for n in range(60)}) > 50
    assert mutant(3, 1).data != mutant(4, 1).data
    assert all(made.data != made.seed.data for made in (mutant(3, n) for n in range(60)))
    assert [mutant(3, n).kind for n in range(6)] == ["bytes", "tokens", "trees"] * 2


def test_seeds_are_those_of_the_repository(repository: Path) -> None:
    names = {seed.name for seed in seeds()}
    assert "examples/tiny_lm/contract.yaml" in names
    assert sum(name.startswith("grammar/corpus/rejected/") for name in names) > 50
    assert sum(name.startswith("KC") for name in names) > 50
    assert set(good_seeds()) < set(seeds())
    assert set(readable_seeds()) < set(seeds())
    assert generated_seed(5) == generated_seed(5)


# --- campaigns ------------------------------------------------------------------------------------


def fails_at_seven(made: Mutant) -> Examined:
    failure = Failure("lint", "seven", "seven") if made.number == 7 else None
    return Examined("rejected", failure, {"lint": made.number / 1000})


def ends_at_seven(made: Mutant) -> Examined:
    if made.number == 7:
        os._exit(1)
    return fails_at_seven(made)


def sleeps_at_seven(made: Mutant) -> Examined:
    if made.number == 7:
        time.sleep(60)
    return fails_at_seven(made)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_campaign_counts_every_mutant_once(workers: int) -> None:
    counts: list[int] = []
    tally = run(
        1,
        range(12),
        workers=workers,
        examining=fails_at_seven,
        progress=lambda so_far: counts.append(so_far.examined),
    )
    assert counts == list(range(1, 13))
    assert [f.number for f in tally.findings] == [7]
    assert tally.slowest == {"lint": (0.011, 11)}
    assert sum(tally.outcomes.values()) == 12


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("examining", "key"), [(ends_at_seven, "ended"), (sleeps_at_seven, "hang")]
)
def test_lost_worker_is_a_finding(examining: Callable[[Mutant], Examined], key: str) -> None:
    tally = run(1, range(12), workers=2, examining=examining, silence=2.0)
    assert [(f.number, f.failure.key) for f in tally.findings] == [(7, key)]
    assert tally.examined == 12
    ((finding, data),) = reduced(1, tally.findings)
    assert data == mutant(1, finding.number).data


def test_findings_are_counted_in_figures(tmp_path: Path, follows: Callable[..., None]) -> None:
    def examining(made: Mutant) -> Examined:
        failure = {
            1: Failure("lint", "KeyError in terms.py:read", "Traceback", raised=True),
            2: Failure("text", "hang", "more than 2 s"),
            3: Failure("meaning", "formatted means something else", "…"),
            4: Failure("format", "a comment moved", "…"),
        }.get(made.number)
        return Examined("accepted", failure, {"lint": 0.5})

    figures = {f.name: f for f in figures_of(run(1, range(9), examining=examining), 1)}
    for name in (
        "tracebacks", "stages over 2 s", "other meanings after fmt", "other broken promises",
    ):  # fmt: skip
        assert figures[name].value == 1, name
        assert not figures[name].within
    assert figures["accepted"].value == 9
    assert report("fuzz-language", figures.values(), tmp_path) == 1
    follows(json.loads((tmp_path / "fuzz-language.json").read_text(encoding="utf-8")))
