"""Decide a problem by attack, by bounds on input boxes that are split, and by z3."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kcdsl_backends.vnnlib.bounds import (
    Boxes,
    down,
    enclosed,
    linear_lower,
    nearest,
    rounded,
    sum_ends,
    up,
)
from kcdsl_backends.vnnlib.evaluation import Point
from kcdsl_backends.vnnlib.problem import InputRegion, QueryProblem
from kcdsl_backends.vnnlib.program import Affine, Array
from kcdsl_backends.vnnlib.query import decimal

Decision = Literal["sat", "unsat", "unknown", "timed-out"]
_LARGEST_ARRAY = 1 << 22
"""Limit of the elements of the largest array of a batch."""
_WIDEST = 256
_STARTS = 32
_STEPS = 24
_WIDEST_LAYERS = 2**100
"""Largest input magnitude for splitting boxes of networks of layers."""
_FIRST = 64
"""Number of boxes that are bounded before z3 is asked."""


@dataclass(frozen=True, slots=True)
class QueryDecision:
    """An answer with its reason, and the point that satisfies the query."""

    answer: Decision
    reason: str
    point: Point | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    """An inequality: sign times a sum is at most 0, or below 0 if strict."""

    row: int
    sign: float
    strict: bool


def decide(problem: QueryProblem, seconds: float) -> QueryDecision:
    """Decide whether some input satisfies the query, within about `seconds`."""
    end, answers = time.monotonic() + seconds, list[QueryDecision]()
    if problem.contradictory:
        return QueryDecision("unsat", "the assertions about the inputs contradict each other")
    for region in problem.regions:
        answers.append(_Search(problem, region, end).decided())
        if answers[-1].answer in ("sat", "timed-out"):
            return answers[-1]
    open_ = [a for a in answers if a.answer != "unsat"]
    return open_[0] if open_ else answers[-1]


class _Search:
    """The search in one region."""

    def __init__(self, problem: QueryProblem, region: InputRegion, end: float) -> None:
        self.problem, self.region, self.end = problem, region, end
        self.program, self.sums = problem.program, problem.sums
        self.rows, self.parts = _inequalities(region)
        self.visited = 0

    def late(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() >= self.end

    def decided(self) -> QueryDecision:
        """Return the answer for the region."""
        if not self.region.bounded:
            return self._complete(0.9, "an input has no bound")
        lo, hi = self._box()
        if not (np.isfinite(lo).all() and np.isfinite(hi).all()):
            return self._complete(0.9, "an input has a bound that float64 does not have")
        if self.late():
            return QueryDecision("timed-out", "no box was searched")
        if not all(self.parts):
            return self._from_samples(lo, hi)
        found = (
            self._split(lo, hi, 1)
            or self._by_layers(0.5)
            or self._split(lo, hi, _FIRST)
            or self._attacked(lo, hi)
        )
        if found is None:
            solved = self._complete(0.4, "the boxes became too small")
            found = solved if solved.answer != "unknown" else self._split(lo, hi, None)
            found = solved if found is None else found
        return found

    # --- points -----------------------------------------------------------------------------------

    def _box(self) -> tuple[Array, Array]:
        pairs = list(zip(self.region.lo, self.region.hi, strict=True))
        lo = [float("-inf") if a is None else rounded(a, down) for a, _ in pairs]
        hi = [float("inf") if b is None else rounded(b, up) for _, b in pairs]
        return np.asarray([lo]), np.asarray([hi])

    def _from_samples(self, lo: Array, hi: Array) -> QueryDecision:
        """Try points of the box, if a conjunction has no inequality that bounds could refute."""
        shares = np.random.default_rng(0).random((_STARTS, lo.shape[1]))
        shares[0] = 0.5
        for share in shares:
            found = self._point((lo + (hi - lo) * share)[0])
            if found is not None:
                return QueryDecision("sat", "a point of the box", found)
        return self._complete(0.9, "only the inputs are bounded")

    def _point(self, x: Array) -> Point | None:
        """Return a point near x if it is proved to satisfy the query."""
        exact = [self._number(float(v), i) for i, v in enumerate(x)]
        return (
            None
            if None in exact
            else _admitted_in(self.problem, self.region, [v for v in exact if v is not None])
        )

    def _number(self, value: float, place: int) -> Fraction | None:
        """Return a decimal near a number, of the declared type if that lies in the box."""
        lo, hi = self.region.lo[place], self.region.hi[place]
        if not np.isfinite(value):
            return None
        if self.problem.whole[place]:
            return Fraction(round(value))
        texts = [repr(value)]
        if self.problem.narrow[place]:
            with np.errstate(over="ignore"):
                texts.insert(0, repr(float(np.float32(value))))
        for text in texts:
            if text in ("inf", "-inf"):
                continue
            found = Fraction(text)
            if (lo is None or found >= lo) and (hi is None or found <= hi):
                return found
        return lo if lo is not None and Fraction(value) <= lo else hi

    # --- attack -----------------------------------------------------------------------------------

    def _attacked(self, lo: Array, hi: Array) -> QueryDecision | None:
        """Search by gradient descent on the worst inequality, from random points of the box."""
        generator = np.random.default_rng(0)
        for part in self.parts:
            x = lo + (hi - lo) * generator.random((_STARTS, lo.shape[1]))
            x[0] = ((lo + hi) / 2)[0]
            target = self._targets(part)
            for step in range(_STEPS):
                if self.late():
                    return None
                boxes = enclosed(self.program, x, x)
                values, slopes = linear_lower(boxes, target, scores=True)
                worst = values.argmax(1)
                best = int(values.max(1).argmin())
                if values[best].max() <= _CLOSE * (1 + np.abs(values[best]).max()):
                    found = self._point(x[best])
                    if found is not None:
                        return QueryDecision("sat", "a search along gradients", found)
                rate = 0.25 * (1 - step / _STEPS) ** 2
                along = slopes[np.arange(len(x)), worst]
                x = np.clip(x - rate * (hi - lo) * np.sign(along), lo, hi)
        return None

    def _targets(self, part: Sequence[_Row]) -> Affine:
        """Return the sums of a conjunction times their signs, so that each must be at most 0."""
        a = self.sums.rows(np.asarray([one.row for one in part], dtype=np.int64))
        signs = np.asarray([one.sign for one in part])
        return Affine(
            a.constant * signs,
            {b: m.multiply(signs[:, None]).tocsr() for b, m in a.terms.items()},
        )

    # --- boxes ------------------------------------------------------------------------------------

    def _split(self, lo: Array, hi: Array, most: int | None) -> QueryDecision | None:
        """Bound the sums on boxes, and halve those on which some conjunction may hold.

        Return None if `most` boxes did not suffice or a box cannot be halved any more.
        """
        whole = self._targets(self.rows)
        alive = np.ones((1, len(self.parts)), dtype=bool)
        waiting = [(lo, hi, alive)]
        count = self._batch(whole)
        started = self.visited
        while waiting:
            if self.late():
                return QueryDecision("timed-out", f"{self.visited} boxes were searched")
            if most is not None and self.visited - started >= most:
                return None
            low, high, alive = _taken(waiting, count if most is None else min(count, 8))
            self.visited += len(low)
            boxes = enclosed(self.program, low, high)
            least, slopes = linear_lower(boxes, whole, scores=True)
            ends = sum_ends(boxes, whole)
            least = np.fmax(least, ends.lo)
            alive = alive & self._possible(least)
            left = np.flatnonzero(alive.any(1))
            if not len(left):
                continue
            found = self._from_boxes(boxes, low, high, alive, left, slopes)
            if found is not None:
                return found
            pieces = _halved(
                low[left], high[left], alive[left], slopes[left], self._uses(alive[left])
            )
            if pieces is None:
                return None
            waiting.append(pieces)
        return QueryDecision("unsat", f"linear bounds on {self.visited} boxes")

    def _by_layers(self, share: float) -> QueryDecision | None:
        """Split boxes of networks of layers in a share of the time; the checker takes as long."""
        if self.problem.layers is None:
            return None
        relations = [
            list(zip(one.rows, one.relations, strict=True)) for one in self.region.conjunctions
        ]
        lo, hi = ([v for v in ends if v is not None] for ends in (self.region.lo, self.region.hi))
        if max(map(abs, (*lo, *hi))) > _WIDEST_LAYERS:
            return None
        left = self.end - time.monotonic()
        found = self.problem.layers.decided(lo, hi, relations, left * share)
        if found is None:
            return None
        if found.tree is not None:
            leaves = found.tree.leaves
            return QueryDecision("unsat", f"linear bounds on {leaves} boxes, derived again")
        point = (
            None if found.point is None else _admitted_in(self.problem, self.region, found.point)
        )
        if point is None:
            return None
        return QueryDecision("sat", f"a point of {found.boxes} boxes", point)

    def _batch(self, whole: Affine) -> int:
        widest = max(b.size for b in self.program.blocks)
        rows = max(widest, whole.size)
        return int(max(1, min(_WIDEST, _LARGEST_ARRAY // (rows * widest))))

    def _possible(self, least: Array) -> NDArray[np.bool_]:
        """Return which conjunctions are not refuted by lower bounds [B, rows]."""
        strict = np.asarray([one.strict for one in self.rows])
        refuted = np.where(strict, least >= 0, least > 0)
        columns = [~refuted[:, part].any(1) for part in self._columns()]
        return np.stack(columns, 1)

    def _columns(self) -> list[list[int]]:
        index = {row: i for i, row in enumerate(self.rows)}
        return [[index[row] for row in part] for part in self.parts]

    def _uses(self, alive: NDArray[np.bool_]) -> Array:
        """Return the rows that the remaining conjunctions use, [B, rows]."""
        used = np.zeros((len(alive), len(self.rows)))
        for i, part in enumerate(self._columns()):
            used[:, part] = np.maximum(used[:, part], alive[:, i, None])
        return used

    def _from_boxes(
        self,
        boxes: Boxes,
        low: Array,
        high: Array,
        alive: NDArray[np.bool_],
        left: NDArray[np.int64],
        slopes: Array,
    ) -> QueryDecision | None:
        """Evaluate midpoints of the remaining boxes, and corners that the gradients select."""
        row = self._uses(alive)[left].argmax(1)
        corners = np.where(slopes[left, row] > 0, low[left], high[left])
        points = np.concatenate([low[left] / 2 + high[left] / 2, corners])
        near = enclosed(self.program, points, points, linear=False)
        for part in self.parts:
            target = self._targets(part)
            ends = sum_ends(near, target)
            with np.errstate(all="ignore"):
                middle = ends.lo / 2 + ends.hi / 2
            worst = middle.max(1) if target.size else np.zeros(len(points))
            for i in np.argsort(worst)[:2]:
                if worst[i] <= _CLOSE * (1 + float(ends.mag[i].max(initial=0))):
                    found = self._point(points[i])
                    if found is not None:
                        return QueryDecision("sat", f"a point of {self.visited} boxes", found)
        return None

    # --- z3 ---------------------------------------------------------------------------------------

    def _complete(self, share: float, otherwise: str) -> QueryDecision:
        """Ask z3 within a share of the remaining time."""
        from kcdsl_backends.vnnlib.complete import solved

        left = self.end - time.monotonic()
        lo, hi = self._box()
        ends = enclosed(self.program, lo, hi).ends if self.region.bounded else None
        answer, values = solved(self.problem, self.region, ends, left * share)
        if answer == "unsat":
            return QueryDecision("unsat", "z3 on the whole network")
        if values is not None:
            point = _admitted_in(self.problem, self.region, values) or self._point(
                np.asarray([nearest(v) for v in values])
            )
            if point is not None:
                return QueryDecision("sat", "z3 on the whole network", point)
            otherwise = "z3 found a point with numbers that are no decimals"
        if self.late():
            return QueryDecision("timed-out", otherwise)
        return QueryDecision("unknown", otherwise)


def admitted(problem: QueryProblem, x: Sequence[Fraction]) -> Point | None:
    """Return the point if it is proved to satisfy the query, by exact or interval arithmetic."""
    found = (_admitted_in(problem, region, x) for region in problem.regions)
    return next((point for point in found if point is not None), None)


def _admitted_in(problem: QueryProblem, region: InputRegion, x: Sequence[Fraction]) -> Point | None:
    for value, lo, hi, whole in zip(x, region.lo, region.hi, problem.whole, strict=True):
        if (lo is not None and value < lo) or (hi is not None and value > hi):
            return None
        if (whole and value.denominator != 1) or decimal(value) is None:
            return None
    point = Point.at(problem.program, x)
    for one in region.conjunctions:
        ids = np.asarray(one.rows, dtype=np.int64)
        if point.satisfies(problem.sums.rows(ids), one.relations):
            return point
    return None


_CLOSE = 1e-9
"""Relative violation below which a point is evaluated exactly."""


def _inequalities(region: InputRegion) -> tuple[list[_Row], list[list[_Row]]]:
    """Return the inequalities of a region, each once, and those of each conjunction.

    An equation is two inequalities; `!=` is left out, since bounds cannot refute it.
    """
    rows: dict[_Row, None] = {}
    parts = []
    for one in region.conjunctions:
        part = []
        for row, relation in zip(one.rows, one.relations, strict=True):
            if relation == "!=":
                continue
            part.append(_Row(row, 1.0, relation == "<"))
            if relation == "==":
                part.append(_Row(row, -1.0, False))
        rows.update(dict.fromkeys(part))
        parts.append(part)
    return list(rows), parts


Pieces = tuple[Array, Array, NDArray[np.bool_]]


def _taken(waiting: list[Pieces], count: int) -> Pieces:
    """Remove up to `count` boxes from the end of the list."""
    low, high, alive = waiting.pop()
    while waiting and len(low) < count:
        more = waiting.pop()
        low, high, alive = (
            np.concatenate(pair) for pair in zip((low, high, alive), more, strict=True)
        )
    if len(low) > count:
        waiting.append((low[count:], high[count:], alive[count:]))
    return low[:count], high[:count], alive[:count]


def _halved(
    low: Array, high: Array, alive: NDArray[np.bool_], slopes: Array, used: Array
) -> Pieces | None:
    """Halve boxes along the input that influences the bounds most; None if one is a point.

    The score includes a share of the width, so that every dimension is split eventually.
    """
    width = high - low
    middle = low / 2 + high / 2
    open_ = (middle > low) & (middle < high)
    if not open_.any(1).all():
        return None
    weight = (np.abs(slopes) * used[:, :, None]).sum(1)
    weight = np.where(np.isfinite(weight), weight, 0.0)
    mean = weight.mean(1, keepdims=True)
    score = np.where(open_, width * (weight + 0.05 * mean + 1e-12), -1.0)
    split = score.argmax(1)
    rows = np.arange(len(low))
    first, second = high.copy(), low.copy()
    first[rows, split] = second[rows, split] = middle[rows, split]
    return (
        np.concatenate([low, second]),
        np.concatenate([first, high]),
        np.concatenate([alive, alive]),
    )
