"""Interface ellipsoids between links, compared with exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.drift import affine_forms as outgoing
from kcdsl_backends.drift import affine_run as prover
from kcdsl_backends.drift.affine.adjoint import Adjoint as Functionals
from kcdsl_backends.drift.affine.tape import Tape as Pages
from kcdsl_backends.drift.boxes import Box as Boxes
from kcdsl_backends.drift.boxes.state import InterfaceEllipsoids
from kcdsl_certs.recheck import output
from kcdsl_certs.recheck.affine import remainders
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.tape import Tape
from kcdsl_certs.recheck.interval.box import Box


class Walk:
    """The state of a kernel that a symbol needs."""

    def __init__(self, tape: Any) -> None:
        self.tape = tape


def rows(seed: int, n: int = 7) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.asarray(np.abs(rng.standard_normal(n)) * 10.0 ** rng.integers(-3, 3))


def square(shape: Any, functional: Any) -> Fraction:
    """Return aᵀ P a."""
    n = len(functional)
    entries = [[Fraction(float(x)) for x in row] for row in shape]
    return sum(
        (entries[i][j] * functional[i] * functional[j] for i in range(n) for j in range(n)),
        Fraction(0),
    )


@pytest.mark.parametrize("seed", range(12))
def test_ellipsoid_of_a_box_contains_its_corners(seed: int) -> None:
    """|a·e| ≤ Σ |a_k| r_k for every |e| ≤ r; attained for a = 1 and for single elements."""
    reach = rows(seed, 4)
    shapes = [drifting_box(reach), outgoing._box(torch.tensor(reach)).numpy()]
    for shape in shapes:
        for signs in product((-1, 0, 1), repeat=4):
            functional = [Fraction(s) for s in signs]
            most = sum(
                (abs(a) * Fraction(r) for a, r in zip(functional, reach, strict=True)), Fraction(0)
            )
            assert square(shape, functional) >= most**2
    ones = [Fraction(1)] * 4
    whole = sum((Fraction(r) for r in reach), Fraction(0))
    assert all(square(shape, ones) <= whole**2 * (1 + Fraction(1, 2**20)) for shape in shapes)


def drifting_box(reach: np.ndarray) -> np.ndarray:
    return np.asarray(output._around_box(reach))


@pytest.mark.parametrize("seed", range(12))
def test_ball_of_a_box_has_the_length_of_its_diagonal(seed: int) -> None:
    radius = rows(seed)
    shape = remainders.ball(radius)
    length = sum((Fraction(r) ** 2 for r in radius), Fraction(0))
    for k in range(len(radius)):
        unit = [Fraction(int(i == k)) for i in range(len(radius))]
        assert length <= square(shape, unit) <= length * (1 + Fraction(1, 2**20))


def entered(middle: Any, shapes: Any, box: Any, half: Any, reference: Any) -> list[Any]:
    """Return the symbols that both programs create for a drift."""
    first, second = Tape(np.zeros((1, len(half)))), Pages(torch.zeros(1, len(half)))
    walk: Any = Walk(first)
    place = remainders.symbol(walk, (middle, shapes), box, half, reference)
    run: Any = Walk(second)
    tensors = (torch.tensor(x) for x in (middle, shapes, box, half, reference))
    centre, around, mid, own, ref = tensors
    index = prover.drift_entry(run, InterfaceEllipsoids(centre, around), mid, own, ref)
    return [first.entries[place], second.entries[index]]


def test_symbol_covers_the_rounding_of_its_reference() -> None:
    """Without drift, the state differs from its reference by the rounding of the reference."""
    centre, middle = np.array([[3.0, 1e8 + 0.3, -7e6]]), np.array([[2.0**-60, 1e-9, 3e-11]])
    reference = centre + middle
    off = [
        Fraction(c) + Fraction(m) - Fraction(r)
        for c, m, r in zip(centre[0], middle[0], reference[0], strict=True)
    ]
    assert sum(o != 0 for o in off) == 3
    half = np.abs(reference) * 2.0**-51
    for entry in entered(middle, np.zeros((1, 3, 3)), middle, half, reference):
        shape = np.asarray(entry.ellipsoids[(0,)])
        length = sum((o**2 for o in off), Fraction(0))
        assert length > 0
        # every functional of the rounding, the one along it first
        assert square(shape, off) >= length**2
        assert square(shape, [Fraction(1)] * 3) >= sum(off, Fraction(0)) ** 2


def test_symbol_covers_the_distance_of_centre_and_midpoint() -> None:
    rng = np.random.default_rng(5)
    middle, box = rng.standard_normal((1, 5)), rng.standard_normal((1, 5))
    root = rng.standard_normal((5, 5)) * 0.01
    half, reference = np.full((1, 5), 9.0), rng.standard_normal((1, 5))
    shift = (middle - box)[0]
    for entry in entered(middle, (root @ root.T)[None], box, half, reference):
        shape = np.asarray(entry.ellipsoids[(0,)])
        for a in rng.standard_normal((64, 5)):
            most = abs(a @ shift) + np.linalg.norm(root.T @ a)
            assert np.sqrt(a @ shape @ a) >= most * (1 - 1e-12)
        assert np.sqrt(shift @ shape @ shift) <= (shift @ shift) * 1.2


def test_symbol_uses_the_smaller_of_box_and_ellipsoid() -> None:
    """For single functionals and for the norm of all."""
    n, small = 6, 1e-3
    middle, reference = np.zeros((1, n)), np.ones((1, n))
    thin = np.eye(n)[None] * small**2
    values = np.random.default_rng(3).standard_normal((4, 1, n))
    sizes = np.abs(values).sum(axis=(1, 2))
    norms = np.linalg.norm(values, axis=(1, 2))
    for half, found in ((1.0, small * norms), (small / 10, small / 10 * sizes)):
        one, two = entered(middle, thin, middle, np.full((1, n), half), reference)
        (curve,) = one.nonlinear
        low, high = curve.between(Adjoint(values, (0, 0)))
        functionals = Functionals(torch.tensor(values), ((0, 1), (0, n)), (1, n))
        below, above = two.nonlinear.between(functionals)
        for least, most in ((low, high), (below.numpy(), above.numpy())):
            assert (most == -least).all()
            assert (most >= found).all()
            assert (most <= found * 1.01).all()
        together = float(np.linalg.norm(found))
        for norm in (curve.together(Adjoint(values, (0, 0))), two.nonlinear.together(functionals)):
            assert norm <= together * 1.01
        longest = small * float(np.linalg.svd(values[:, 0])[1][0])
        if half == 1.0:
            assert curve.together(Adjoint(values, (0, 0))) >= longest
            assert two.nonlinear.together(functionals) >= longest


@pytest.mark.parametrize("seed", range(4))
def test_ellipsoid_covers_the_box_of_the_drift(seed: int) -> None:
    """Any drift in the box of h̃_i - h̃_t, and errors in their own boxes beside it."""
    rng = np.random.default_rng(seed)
    middle, wide = rng.standard_normal((2, 4)), np.abs(rng.standard_normal((2, 4)))
    low, high = middle - wide, middle + wide
    reaches = [np.abs(rng.standard_normal((2, 4))) * scale for scale in (0.5, 1e-9)]
    t, i = (SimpleNamespace(error_bound=reach, place=None) for reach in reaches)
    pair: Any = SimpleNamespace(
        shape=(2, 4), apart=Box(low, high), train=None, infer=None, t=t, i=i
    )
    found = output.interface_ellipsoids(pair)
    assert found is not None
    ends = [SimpleNamespace(error_bound=torch.tensor(r), ellipsoids={}) for r in reaches]
    known = Boxes(torch.tensor(low), torch.tensor(high))
    forms: Any = SimpleNamespace(shape=(2, 4), known=known, ends=ends, output="y")
    forms.train, forms.infer = ends

    def error(run: Any, output: str, row: int) -> torch.Tensor:
        return outgoing._box(run.error_bound[row])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outgoing, "_error", error)
        around = outgoing.output_ellipsoids(forms)
    assert around is not None
    for centre, shapes in (found, (around.middle.numpy(), around.shapes.numpy())):
        for row, signs in product(range(2), product((-1, 1), repeat=4)):
            a = np.array(signs) * rng.random(4)
            corner = np.where(a > 0, high[row], low[row]) + np.sign(a) * (
                reaches[0][row] + reaches[1][row]
            )
            assert a @ (corner - centre[row]) <= np.sqrt(a @ shapes[row] @ a) * (1 + 1e-12)


def test_norm_of_functionals_includes_every_row() -> None:
    """Drifts of two rows may have the same direction."""
    n, small = 5, 1e-3
    nothing, half = np.zeros((2, n)), np.full((2, n), 1.0)
    values = np.random.default_rng(7).standard_normal((1, 2, n))
    one, two = entered(nothing, np.stack([np.eye(n)] * 2) * small**2, nothing, half, nothing + 1)
    together = small * np.linalg.norm(values[0], axis=-1).sum()
    (curve,) = one.nonlinear
    functionals = Functionals(torch.tensor(values), ((0, 2), (0, n)), (2, n))
    for found in (curve.together(Adjoint(values, (0, 0))), two.nonlinear.together(functionals)):
        assert together <= found <= together * 1.01
