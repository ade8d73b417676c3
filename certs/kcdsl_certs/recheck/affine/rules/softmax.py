"""Softmax (section 4)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.affine import cases, reaches
from kcdsl_certs.recheck.affine.adjoint import Adjoint, embedded
from kcdsl_certs.recheck.affine.form import UNIT, Form, Operand, Steps, Walk, numeric, raised
from kcdsl_certs.recheck.affine.storing import Formed, settle
from kcdsl_certs.recheck.affine.tape import FAINT, Entry, Pull
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Bools, Box, Floats
from kcdsl_certs.recheck.rules.attention import (
    ZETA,
    allowed_columns,
    probabilities,
    relative_rounding,
    softmax_rounding,
)
from kcdsl_certs.recheck.rules.state import gamma
from kcdsl_certs.rejected import Rejected

_FARTHEST = 30.0  # a larger drift of the centred scores counts as unbounded


def softmax(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return softmax over the last dimension, over the columns that the mask allows.

    With t = e - p·e and y = p(e^t - 1), the drift is Π(y/Z), Πy = y - pΣy, Z = Σ p e^t ≥ 1.
    """
    node.attrs.exactly()
    scores = numeric(inputs[0])
    allowed = allowed_columns(list(inputs[1:]), scores.shape)
    p, wrong = _reference(scores.reference, allowed)
    n = p.shape[-1]
    usual = _row(p * scores.reach)
    c = _centred(walk, node, p, wrong, allowed)
    if not bool((c < _FARTHEST).all()):
        raise Rejected("bound/not-finite", "the scores of a softmax drift too far")
    g = _second_order(c)
    moved = _row(p * (c + g) * (1 + 2 * wrong))
    grown = _row(p * g * (1 + 2 * wrong))  # Z ≤ 1 + Σ p g
    kappa = raised(grown / (1 + grown))  # ≥ 1 - 1/Z
    # the numerator, up to multiples of p, which Π removes
    half = p * g / 2
    radius = raised(half * (1 + 8 * wrong) + kappa * p * (c + g) * (1 + 4 * wrong))
    radius = raised(radius + gamma(2, UNIT) * p * scores.reach) + FAINT
    numerator_reach = raised(p * scores.reach + half + radius)
    operands: tuple[tuple[int, Pull], ...] = ()
    if scores.place is not None:
        operands = ((scores.place, _times(p)),)
    numerator = walk.tape.add(Entry(numerator_reach, operands, radius, half))
    # the map Π, with everything that the float64 p is off by
    carried = raised(numerator_reach + p * _row(numerator_reach))
    own = p * wrong * (1 + 4 * (scores.reach + usual) + 2 * moved)
    own = raised(own + gamma(n + 3, UNIT) * carried)
    own = np.where(allowed, own + FAINT, 0.0)
    # 1 - e^{-c}/Z̄, formed without cancellation
    low = raised(box.up(-np.expm1(-c), 16) + box.up(np.exp(-c), 16) * kappa)
    factor = np.maximum(box.up(np.expm1(c), 16), low)
    reach = np.minimum(1.0, raised(p * factor * (1 + 2 * wrong) + own))
    high = np.minimum(1.0, raised(p * (1 + wrong) + reach))
    error = _error(walk, scores, high, allowed, walk.own(node, 0))
    formed = Formed(
        p,
        carried,
        ((numerator, _project(p)),),
        raised(own + error),
        within=raised(reach + error) + FAINT,
        sure=~allowed,
    )
    fused = walk.kernel.fused
    kernel = walk.kernel
    form = settle(walk, node, formed, kernel.probabilities, kernel.inner, rounds=not fused)
    if node.name in walk.versions:
        return replace(form, allowed=allowed)
    steps = None if form.steps is None else _chosen(scores, form, form.steps, allowed, error)
    # the map Π leaves Σ num·(1 - Σp) of a row, where p sums up to 1 but for what is wrong with it
    lost = 2 * wrong[..., :1] * _row(numerator_reach)
    balance = _balance(walk, form, lost)
    return replace(form, allowed=allowed, steps=steps, balance=balance)


def _balance(walk: Walk, form: Form, lost: Floats) -> Floats | None:
    """Return how far the sums of rows may be from those of the reference; None where a cast forgot
    which errors belong together."""
    entry = None if form.place is None else walk.tape.entries[form.place]
    if entry is None or entry.kept is not None or not entry.operands or entry.centre is not None:
        return None
    own = np.zeros(form.shape) if entry.radius is None else entry.radius
    return raised(_row(own) + lost) + FAINT


def _chosen(scores: Form, form: Form, steps: Steps, allowed: Bools, error: Floats) -> Steps:
    """Return what is stored as well in every case of the scores, where these are steps."""
    one = scores.box
    around = Box(one.lo[None], one.hi[None])
    if scores.steps is not None:
        most = min(cases.SCORES, cases.room(form.shape))
        found = cases.chosen(scores.steps.ends.in_one_case(), form.reference, most)
        around = Box(found.lo, found.hi)
    formed = box.widen(probabilities(around, allowed), error)
    return replace(steps, choices=steps.ends.within(formed))


def _reference(scores: Floats, allowed: Bools) -> tuple[Floats, Floats]:
    """Return float64 probabilities and their relative error, up to 2^-990 absolutely."""
    top = np.where(allowed, scores, -np.inf).max(axis=-1, keepdims=True)
    distance = np.where(allowed, top - scores, 0.0)
    terms = np.where(allowed, np.exp(-distance), 0.0)
    p = terms / terms.sum(axis=-1, keepdims=True)
    farthest = np.minimum(distance, 800.0).max(axis=-1, keepdims=True)
    wrong = 2.0**-48 + 4 * UNIT * (farthest + scores.shape[-1])
    return p, np.broadcast_to(wrong, p.shape)


def _centred(walk: Walk, node: Node, p: Floats, wrong: Floats, allowed: Bools) -> Floats:
    """Return c ≥ |e - p·e| over the allowed columns, 0 elsewhere."""
    scores = numeric(walk.forms[node.inputs[0]])
    usual = _row(p * scores.reach)
    plain = raised(scores.reach + usual)
    if scores.place is None or not scores.reach.any():
        return np.where(allowed, plain, 0.0)
    found = plain.copy()
    for floor in walk.tape.floors:
        for row in reaches.rows(walk.chosen(node, node.inputs[0], "deviations", floor)):
            columns = np.flatnonzero(allowed[row])
            some: tuple[int | NDArray[np.intp], ...] = (*row, columns)
            functionals = np.zeros((columns.size, p.shape[-1]))
            functionals[np.arange(columns.size), columns] = 1.0
            bounds = reaches.along(walk, scores, row, functionals - p[row], floor)
            found[some] = np.minimum(found[some], bounds)
    found = raised(found + 4 * wrong * (scores.reach + usual) + FAINT)
    single = allowed.sum(axis=-1, keepdims=True) == 1
    return np.where(allowed & ~single, np.minimum(found, plain), 0.0)


def _second_order(c: Floats) -> Floats:
    """Return an upper bound of e^c - 1 - c, without cancellation for small c."""
    tail = 1 + c  # more than 1 + c/13·(1 + c/14·(…)) for c < 0.5
    for k in range(12, 2, -1):
        tail = 1 + c / k * tail
    series = c**2 / 2 * tail
    large = np.expm1(c) - c
    return np.asarray(np.where(c < 0.5, series, large * (1 + 2.0**-44)) * (1 + 2.0**-44))


def _row(values: Floats) -> Floats:
    """Return the sums of non-negative rows, raised."""
    return raised(values.sum(axis=-1, keepdims=True) * (1 + values.shape[-1] * 2 * UNIT))


def _error(walk: Walk, scores: Form, high: Floats, allowed: Bools, own: Floats | None) -> Floats:
    """Return the error of the kernel's softmax; fused, with the cast of the probabilities.

    A score may be read by itself, and so may those of the sum of its row: `own`.
    """
    kernel, around = walk.kernel, scores.box
    if own is not None:
        around = replace(scores, reach=raised(scores.reach + own)).box
    if kernel.fused:
        return softmax_rounding(kernel, around, high, allowed, own)
    theta = relative_rounding(kernel, around, allowed)
    if own is not None:
        most = np.where(allowed, own, 0.0).max(axis=-1, keepdims=True)
        theta = raised(theta + np.expm1(own + most) * (1 + theta) * (1 + 2.0**-40))
    return np.where(allowed, raised(theta * box.lifted(high) + ZETA), 0.0)


def _times(p: Floats) -> Pull:
    return lambda a: a.times(p)


def _project(p: Floats) -> Pull:
    """Return the pullback of Πy = y - pΣy: α - (α·p)."""

    def pull(adjoint: Adjoint) -> Adjoint:
        whole = embedded(adjoint, (*adjoint.start[:-1], 0), (*adjoint.extent[:-1], p.shape[-1]))
        along = (whole.values * p[whole.window]).sum(axis=-1, keepdims=True)
        return Adjoint(whole.values - along, whole.start)

    return pull
