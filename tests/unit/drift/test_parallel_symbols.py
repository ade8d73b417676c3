"""Parallel columns of symbols are merged (Rule 1.4), in both programs, without loss.

Deviations from parallelism are counted as error.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.affine.adjoint import diagonal, parallel
from kcdsl_certs.recheck.affine.adjoint import Adjoint, gathered, reads_one_each
from kcdsl_certs.recheck.affine.reverse_passes import surrounded
from kcdsl_certs.recheck.affine.tape import Tape, TapeEntry

Floats = np.ndarray
COUNT, WAYS, EACH = 12, 9, 40


def _joined(program: str, columns: Floats) -> tuple[Floats, Floats]:
    if program == "checker":
        return gathered(columns)
    found, lost = parallel(torch.from_numpy(columns))
    return found.numpy(), np.zeros(len(columns)) if lost is None else lost.numpy()


def _columns(seed: int, away: float = 0.0) -> Floats:
    """Return columns of which many are parallel, up to relative errors of this size."""
    rng = np.random.default_rng(seed)
    ways = rng.standard_normal((COUNT, WAYS))
    sizes = rng.standard_normal((WAYS, EACH)) * np.exp2(rng.uniform(-20, 20, (WAYS, EACH)))
    whole = (ways[:, :, None] * sizes).reshape(COUNT, -1)
    whole = whole * (1 + away * rng.uniform(-1, 1, whole.shape))
    return np.ascontiguousarray(whole[:, rng.permutation(whole.shape[1])])


@pytest.mark.parametrize("program", ["prover", "checker"])
@pytest.mark.parametrize("away", [0.0, 2.0**-52, 2.0**-44, 2.0**-38, 2.0**-30])
def test_sums_of_symbols_are_within_their_bound(program: str, away: float) -> None:
    for seed in range(8):
        columns = _columns(seed, away)
        found, lost = _joined(program, columns)
        rng = np.random.default_rng(seed)
        functionals = [*rng.standard_normal((20, COUNT)), *np.eye(COUNT)]
        for a in functionals:  # the largest value over all symbols, exactly
            most = np.abs(a @ columns).sum()
            bound = np.abs(a @ found).sum() + np.abs(a) @ lost
            assert most <= bound * (1 + 2.0**-48)
            assert bound <= most * (1 + 2.0**-20) + 2.0**-30 * np.abs(a) @ np.abs(columns).sum(1)


@pytest.mark.parametrize("program", ["prover", "checker"])
def test_one_column_remains_per_direction(program: str) -> None:
    found, _ = _joined(program, _columns(1))
    assert found.shape[1] == WAYS


@pytest.mark.parametrize("program", ["prover", "checker"])
def test_columns_in_other_directions_are_kept(program: str) -> None:
    columns = np.random.default_rng(2).standard_normal((COUNT, WAYS * EACH))
    found, lost = _joined(program, columns)
    assert np.array_equal(found, columns)
    assert not lost.any()


@pytest.mark.parametrize("away", [2.0**-30, 2.0**-20])
@pytest.mark.parametrize("program", ["prover", "checker"])
def test_nearly_parallel_columns_are_not_merged(program: str, away: float) -> None:
    found, _ = _joined(program, _columns(3, away))
    assert found.shape[1] > WAYS * EACH // 2


def test_diagonal_functionals_are_recognised() -> None:
    once = np.diag([1.0, 0.0, -2.0])
    twice = once.copy()
    twice[0, 2] = 2.0**-1000
    alone = diagonal(torch.from_numpy(once))
    assert alone is not None
    assert alone.tolist() == [1.0, 0.0, -2.0]
    assert diagonal(torch.from_numpy(twice)) is None
    assert diagonal(torch.from_numpy(once[:2])) is None
    assert reads_one_each(once)
    assert not reads_one_each(twice)
    assert not reads_one_each(once[:2])


def test_sum_of_many_tiny_columns_is_counted() -> None:
    many, faint = 2**13, 2.0**-460  # the square of a column underflows
    tape = Tape(None)
    tape.add(TapeEntry(np.zeros(1)))
    place = tape.add(TapeEntry(np.full(many, faint), radius=np.full(many, faint)))
    found = surrounded(tape, place, Adjoint(np.ones((3, many)), (0,)), 0)
    assert (found.each >= many * faint).all()
    assert found.norm >= np.sqrt(3.0) * many * faint
