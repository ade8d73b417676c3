"""Rows divided among forked processes: the same bounds, whatever becomes of a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.first_hour_verify import OPTIONS, Row, write_case
from kcdsl_backends import forked
from kcdsl_backends.drift.affine import error_bounds
from kcdsl_backends.drift.affine.independent import Chance
from kcdsl_backends.drift.affine.tape import Tape, TapeEntry
from kcdsl_backends.forked import Arrays, over_rows
from kcdsl_certs.recheck.affine import form

FORKED = sys.platform.startswith("linux")
ROWS = [(head, token) for token in range(40) for head in range(2)]


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of all processes that are forked from now on."""
    found, fork = list[int](), os.fork

    def counted() -> int:
        found.append(fork())
        return found[-1]

    monkeypatch.setattr(os, "fork", counted)
    return found


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _written(rows: Sequence[tuple[int, ...]], results: Arrays) -> None:
    for head, token in rows:
        results[0][head, token] += 100 * head + token
        results[1][head, token] = os.getpid()


def test_every_row_is_done_once_by_one_of_the_processes(threads: int, forks: list[int]) -> None:
    known = np.ones((2, 40)), np.zeros((2, 40))
    found, by = over_rows(ROWS, known, _written)
    assert np.array_equal(found, 1 + 100 * np.arange(2)[:, None] + np.arange(40))
    assert (known[0] == 1).all()
    assert (known[1] == 0).all()
    shares = np.unique(by, return_counts=True)[1]
    assert len(shares) == len(forks) + 1 == forked.processes()
    assert (by[0] == by[1]).all()  # all heads of a row
    assert (by[:, ::8] == by[:, 7::8]).all()  # eight rows that follow one another
    assert _ended(forks)


@pytest.mark.parametrize("end", ["exception", "killed", "exit"])
def test_a_share_that_a_process_did_not_finish_is_done_again(
    threads: int, forks: list[int], end: str
) -> None:
    parent = os.getpid()

    def work(rows: Sequence[tuple[int, ...]], results: Arrays) -> None:
        for k, row in enumerate(rows):
            if k == 3 and os.getpid() != parent:
                if end == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError if end == "exception" else SystemExit(0)
            results[0][row] = 1.0

    (found,) = over_rows(ROWS, (np.zeros((2, 40)),), work)
    assert (found == 1).all()
    assert _ended(forks)


def test_the_one_row_of_a_vector_is_done(threads: int) -> None:
    def work(rows: Sequence[tuple[int, ...]], results: Arrays) -> None:
        for row in rows:
            results[0][row] = 1.0

    (found,) = over_rows([()], (np.zeros(5),), work)
    assert (found == 1).all()


def test_shares_are_done_here_if_no_process_starts(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    def refused() -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", refused)
    found, by = over_rows(ROWS, (np.zeros((2, 40)), np.zeros((2, 40))), _written)
    assert np.array_equal(found, 100 * np.arange(2)[:, None] + np.arange(40))
    assert (by == os.getpid()).all()


def test_an_interrupt_right_after_a_fork_stays_in_that_process(
    monkeypatch: pytest.MonkeyPatch, threads: int, forks: list[int]
) -> None:
    fork = os.fork

    def interrupted() -> int:
        child = fork()
        if not child:
            raise KeyboardInterrupt
        return child

    monkeypatch.setattr(os, "fork", interrupted)
    found, by = over_rows(ROWS, (np.zeros((2, 40)), np.zeros((2, 40))), _written)
    assert (by == os.getpid()).all()
    assert np.array_equal(found, 100 * np.arange(2)[:, None] + np.arange(40))
    assert _ended(forks)


def test_an_exception_here_ends_all_processes(threads: int, forks: list[int]) -> None:
    parent, started = os.getpid(), time.monotonic()

    def work(rows: Sequence[tuple[int, ...]], results: Arrays) -> None:
        if os.getpid() == parent:
            raise KeyboardInterrupt
        time.sleep(600)

    with pytest.raises(KeyboardInterrupt):
        over_rows(ROWS, (np.zeros((2, 40)),), work)
    assert _ended(forks)
    assert time.monotonic() - started < 300
    assert torch.get_num_threads() == threads


_ORPHAN = """
import os, sys, time
import numpy as np, torch
from kcdsl_backends.forked import over_rows
torch.set_num_threads(2)
parent = os.getpid()

def work(rows, results):
    if os.getpid() == parent:
        time.sleep(600)
    print(os.getpid(), flush=True)
    time.sleep(600)

over_rows([(0,), (8,)], (np.zeros(16),), work)
"""


@pytest.mark.full
def test_processes_end_with_the_one_that_started_them() -> None:
    command = [sys.executable, "-c", _ORPHAN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        child = int(started.stdout.readline())
        started.kill()
        started.wait()
        deadline = time.monotonic() + 120
        while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
    assert not Path(f"/proc/{child}").exists()


def test_bounds_by_chance_and_of_few_functionals_stay_in_this_process(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    ones = torch.ones(16, 4, dtype=torch.float64)
    used = set[int]()

    def work(rows: Sequence[tuple[int, ...]], results: tuple[Tensor, ...]) -> None:
        for row in rows:
            results[0][row] = os.getpid()

    rows = [(row,) for row in range(16)]
    for least, chance, alone in (
        (2**40, None, True),
        (1, Chance(Fraction(1, 2), 1), True),
        (1, None, threads == 1 or forked.processes() == 1),
    ):
        monkeypatch.setattr(error_bounds, "DIVIDED", least)
        tape = Tape(ones, chance=chance)
        tape.add(TapeEntry("region", 0 * ones, ones, lambda a: []))
        (found,) = error_bounds.over_rows(tape, rows, (0 * ones,), 64, work)
        used = set(found.flatten().tolist())
        assert (used == {os.getpid()}) == alone


@pytest.mark.full
@pytest.mark.parametrize(("block", "tokens"), [("attn_0", 24), ("layer_0", 9)])
def test_the_bounds_and_proofs_are_those_of_one_process(
    tmp_path: Path,
    cli: Any,
    monkeypatch: pytest.MonkeyPatch,
    forks: list[int],
    block: str,
    tokens: int,
) -> None:
    write_case(tmp_path, Row(block, 64, tokens))
    bounds = list[float]()
    for least in (2**60, 1):
        monkeypatch.setattr(error_bounds, "DIVIDED", least)
        monkeypatch.setattr(form, "DIVIDED", least)
        command = "verify", tmp_path / "contract.yaml", "--format", "json", *OPTIONS
        ran = cli(*command, "--threads", "2")
        assert ran.code == 0, ran.stderr
        (goal,) = json.loads(ran.stdout)["goals"]
        assert goal["evidence"]["confirmed"]
        bounds.append(goal["bound"])
        assert bool(forks) == (least == 1 and FORKED)
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-12)


def _ended(forks: list[int]) -> bool:
    """Return whether no forked process is left, not even as one that nobody waited for."""
    return not any(Path(f"/proc/{child}").exists() for child in forks)
