"""Recordings of any shape survive a round trip, in every format and file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcdsl.diagnostics.model import Refusal
from kcdsl_backends.empirical.sources.rollouts.layouts import mapped
from kcdsl_backends.empirical.sources.rollouts.prompts import groups_of, run_of
from kcdsl_backends.empirical.sources.rollouts.reader import RecordedRollouts, assemble
from kcdsl_backends.empirical.sources.rollouts.record import Rollout, Semantics, Side
from kcdsl_backends.empirical.sources.rollouts.rows import read_rows
from tests.support import recordings

RAW = Semantics("raw")
FORMATS = ["rows", "verl", "trl"]
LOGS = st.floats(-60, 0, allow_nan=False)


@st.composite
def rollouts(draw: st.DrawFn) -> list[Rollout]:
    """Return rollouts whose prompts are not at the beginning of their tokens."""
    found = []
    for i in range(draw(st.integers(1, 5))):
        prompt = draw(st.lists(st.integers(100, 199), min_size=1, max_size=4))
        tokens = draw(st.lists(st.integers(0, 99), min_size=1, max_size=7))
        size = len(tokens)
        train, infer = (draw(st.lists(LOGS, min_size=size, max_size=size)) for _ in range(2))
        mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        found.append(
            Rollout(
                f"r{i}",
                tuple(prompt),
                tuple(tokens),
                np.array(mask),
                Side(np.array(train), RAW),
                Side(np.array(infer), RAW),
            )
        )
    return found


def read(path: Path, format: str) -> RecordedRollouts:
    return assemble(read_rows(path, path.name), mapped(format, {}), format, RAW, RAW, 200)


def table(found: list[Rollout], format: str) -> dict[str, list[object]]:
    if format == "rows":
        return recordings.columns(found)
    return recordings.trainer_columns(found, format)


@given(
    rollouts(), st.sampled_from(["rows", "verl", "trl"]), st.sampled_from([".jsonl", ".parquet"])
)
def test_rollouts_survive_a_round_trip(given_: list[Rollout], format: str, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"dump{suffix}"
        recordings.write(path, table(given_, format))
        found = read(path, format).rollouts
    assert [(r.prompt, r.tokens, r.mask.tolist()) for r in found] == [
        (r.prompt, r.tokens, r.mask.tolist()) for r in given_
    ]
    for a, b in zip(given_, found, strict=True):
        for one, two in ((a.train, b.train), (a.infer, b.infer)):
            assert one is not None
            assert two is not None
            assert one.logs.tobytes() == two.logs.tobytes()


@given(rollouts(), st.sampled_from(FORMATS), st.data())
def test_invalid_log_probabilities_are_refused(
    given_: list[Rollout], format: str, data: st.DataObject
) -> None:
    """At unmasked tokens, NaN and probabilities above 1 are refused."""
    counted = [(i, t) for i, r in enumerate(given_) for t in np.flatnonzero(r.mask).tolist()]
    if not counted:
        return
    row, at = data.draw(st.sampled_from(counted))
    side = data.draw(st.sampled_from(["train", "infer"]))
    bad = data.draw(st.sampled_from([float("nan"), float("inf"), 0.5, 1e-3]))
    own = given_[row].train if side == "train" else given_[row].infer
    assert own is not None
    logs = own.logs.copy()
    logs[at] = bad
    given_[row] = recordings.with_logs(given_[row], side, logs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dump.parquet"
        recordings.write(path, table(given_, format))
        with pytest.raises(Refusal, match=f"row {row + 1}, column"):
            read(path, format)


@pytest.mark.full
@given(rollouts(), st.randoms(use_true_random=False))
def test_order_of_rows_does_not_change_values(given_: list[Rollout], random: Random) -> None:
    """Each unit has equal numbers in any order of its rows."""

    def values(rows: list[Rollout]) -> dict[tuple[int, ...], list[float]]:
        found = {}
        for group in groups_of("f", rows, rows):
            drift = run_of(group, {"k3"}, 0).unit.values["log_ratio"]
            found[group.members[0].prompt] = sorted(drift.tolist())
        return found

    turned = list(given_)
    random.shuffle(turned)
    assert values(given_) == values(turned)
