"""Functionals that reach a node on two paths are added; linear bounds cover the rounding."""

from __future__ import annotations

import numpy as np
import torch

from kcdsl_backends.drift.affine.adjoint import Adjoint as ProverAdjoint
from kcdsl_backends.drift.boxes import Box as ProverBox
from kcdsl_backends.drift.linear import tape as prover
from kcdsl_backends.drift.linear import tape as prover_functional
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.interval.box import Box
from kcdsl_certs.recheck.linear_bounds import tape as checker
from kcdsl_certs.recheck.linear_bounds import tape as checker_functional

ONE, SMALL = np.array([[1.0, -1.0]]), np.array([[2.0**-54, 0.0]])
"""SMALL is less than half a unit in the last place of ONE, so their float64 sum is ONE. On equal
numbers ONE gives zero, and the exact sum gives 2^-54 of them."""


def test_checker_covers_the_rounding_of_added_functionals() -> None:
    unit, none = Box(np.full(2, -1.0), np.full(2, 1.0)), Box(np.zeros(2), np.zeros(2))
    zero = np.zeros(2), np.zeros(2)
    tape = checker.BoundsTape()

    def part(values: np.ndarray) -> checker_functional.FunctionalBatch:
        return checker_functional.FunctionalBatch(Adjoint(values, (0,)), None)

    def copied(
        f: checker_functional.FunctionalBatch,
    ) -> list[tuple[int, checker_functional.FunctionalBatch]]:
        assert f.e is not None
        return [(0, part(f.e.values.sum(axis=-1, keepdims=True)))]

    one = Box(unit.lo[:1], unit.hi[:1])
    alone = np.zeros(1), np.zeros(1)
    still = Box(np.zeros(1), np.zeros(1))
    radius = np.ones(1), np.zeros(1)
    tape.add(checker.BoundsEntry(np.zeros(1), one, still, lambda _: [], alone, radius))
    tape.add(checker.BoundsEntry(np.zeros(2), unit, none, copied, zero, zero))
    tape.add(
        checker.BoundsEntry(
            np.zeros(1), one, still, lambda _: [(1, part(ONE)), (1, part(SMALL))], alone, alone
        )
    )
    low, high = tape.between(2, part(np.ones((1, 1))))
    assert low[0] <= -(2.0**-54)
    assert high[0] >= 2.0**-54
    assert high[0] <= 2.0**-48


def test_prover_covers_the_rounding_of_added_functionals() -> None:
    tape = prover.LinearTape()

    def part(values: np.ndarray) -> prover_functional.Functional:
        return prover_functional.Functional(ProverAdjoint.full(torch.from_numpy(values)), None)

    def copied(f: prover_functional.Functional) -> list[tuple[int, prover_functional.Functional]]:
        assert f.deviation is not None
        return [(0, part(f.deviation.dense().values.sum(-1, keepdim=True).numpy()))]

    def entry(size: int, pull: prover.LinearVJP, noise: prover.Noise | None = None) -> None:
        zero = torch.zeros(size, dtype=torch.float64)
        unit = ProverBox(zero - 1, zero + 1)
        tape.add(prover.LinearEntry("", zero, unit, ProverBox(zero, zero), pull, noise))

    single = torch.ones(1, dtype=torch.float64)
    entry(1, lambda _: [], prover.Noise(single, 0 * single))
    entry(2, copied)
    entry(1, lambda _: [(1, part(ONE)), (1, part(SMALL))])
    low, high = tape.bound(2, part(np.ones((1, 1))))
    assert float(low[0]) <= -(2.0**-54)
    assert float(high[0]) >= 2.0**-54
    assert float(high[0]) <= 2.0**-48
