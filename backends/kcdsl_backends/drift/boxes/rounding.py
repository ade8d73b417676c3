"""Roundings of a kernel: casts of results (section 2), and results that have several readings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node
from kcdsl.model.numerics import Numerics
from kcdsl.model.numerics.formats import FORMATS, Casts, Format
from kcdsl_backends.drift.boxes import (
    Box,
    NoBound,
    down,
    refuse_overflow,
    refuse_unbounded_sums,
    up,
)

ONCE = frozenset({"linear", "matmul"})
"""Operations that are computed once, from stored operands."""
STATISTICS = frozenset({"softmax", "rms_norm", "layer_norm"})
"""Operations that read their first operand for sums over rows, and again for the result."""
_GIVEN = frozenset({"input", "param", "constant", "embedding"})
Apart = Tensor | None
"""The largest distance of a reading from the common value of all readings; None: zero."""


def reads_twice(node: Node) -> bool:
    """Return whether an operation reads its first operand twice: for sums over rows and for the
    result, or for the sigmoid and the product of a silu that is written out."""
    return node.op in STATISTICS or _written(node)


def _written(node: Node) -> bool:
    return node.attrs.get("form", "fused") == "written" and node.op != "rope"


def several(graph: BlockGraph, *, followed: bool = False) -> frozenset[str]:
    """Return the nodes that are read more than once, or computed again for several readings; with
    `followed` the output is one of them.

    A result that is computed once is read unrounded only by operations fused with it, element by
    element before any sum over a row: all readings by one norm or softmax are equal.
    """
    stored = {graph.output}
    for node in graph.nodes:
        if node.op in ONCE:
            stored.update(node.inputs)
    every, direct = dict.fromkeys(stored, 1), dict.fromkeys(stored, 1)
    if followed:
        every[graph.output] = direct[graph.output] = 2
    for node in reversed(graph.nodes):
        if node.op in ONCE:
            continue
        rows = node.op in STATISTICS
        again, times = min(2, every.get(node.name, 0)), min(2, direct.get(node.name, 0))
        for position, name in enumerate(node.inputs):
            first = position == 0
            every[name] = every.get(name, 0) + max(1, again) + (first and reads_twice(node))
            direct[name] = direct.get(name, 0) + (1 if rows else max(1, times))
            direct[name] += first and _written(node)
    return frozenset(
        node.name
        for node in graph.nodes
        if node.op not in _GIVEN and (direct if node.op in ONCE else every).get(node.name, 0) > 1
    )


def added(*parts: Apart) -> Apart:
    """Return an upper bound of the sum of the parts; None where all are None."""
    found: Apart = None
    for part in parts:
        if part is not None:
            found = part if found is None else (found + part) * (1.0 + 2.0**-50)
    return found


def times(part: Apart, factor: Tensor | float) -> Apart:
    """Return the distance of readings of a multiple, whose factor is at most `factor`."""
    return None if part is None else part * factor * (1.0 + 2.0**-50) + 2.0**-1000


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent exactly, for integer exponents of normal float64 numbers."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A stored result: boxes of its value and of its error against the exact operation.

    `apart` bounds the distance of its readings from their common value.
    """

    value: Box
    error: Box
    apart: Apart = None


@dataclass(frozen=True, slots=True)
class Rounding:
    """The rounding constants of one kernel."""

    numerics: Numerics
    base: Numerics | None = None
    """The kernel's own numerics, if `numerics` are those of a node with a pinned format."""

    @property
    def own(self) -> Numerics:
        return self.base or self.numerics

    def scalar(self, value: float, form: Format, node: str) -> tuple[float, float]:
        """Return the least and the greatest value that a kernel may use for a Python scalar.

        A kernel may use it exactly, or round it to the format of the result first; if that is as
        precise as the arithmetic inside, the rounding is counted there.

        Raises:
            NoBound: the rounded scalar may be infinite.
        """
        if form.precision >= self.inner(False).precision:
            return value, value
        exact = torch.tensor(value, dtype=torch.float64)
        ends = [exact, form.nearest(exact)]
        if self.casts.units != 1:  # to either side
            low = form.toward_zero(exact)
            ends += [low, low + torch.copysign(form.spacing(low), exact)] * bool(low != exact)
        refuse_overflow(node, torch.stack(ends).abs(), form, ", a rounded scalar,")
        return min(float(end) for end in ends), max(float(end) for end in ends)

    def cast(self, x: Box, held: Collection[str], form: Format, node: str) -> StoredResult | None:
        """Return numbers of the formats `held` after storing them in `form`; None if unchanged.

        Raises:
            NoBound: they may exceed the largest number of the format.
        """
        formats = [FORMATS[name] for name in held]
        if all(form.holds(other) for other in formats):
            return None
        widest = max(formats, key=lambda other: other.precision)
        return self.store(x, torch.zeros_like(x.lo), form, node, widest)

    def at(self, node: Node, weight: str = "") -> Self:
        """Return the constants of a node: those of its pinned format, or of the override of a
        linear by the name of its weight, if there are such.

        Raises:
            NoBound: it is part of a fused attention, whose formats the pinned one does not hold.
        """
        numerics = self.numerics.pinned(node.format, node.role)
        if numerics is None:
            raise NoBound(
                node.name, f"a fused attention has no rule for {node.role} pinned to {node.format}"
            )
        if node.op == "softmax" and not node.format:  # one of no attention is stored as any result
            stored = numerics.stored_format(node.op, node.role)
            if stored != numerics.attention.probabilities:
                inside = replace(numerics.attention, probabilities=stored)
                numerics = replace(numerics, attention=inside)
        numerics = numerics.serving(weight) if weight else numerics
        same = numerics is self.numerics
        return self if same else replace(self, numerics=numerics, base=self.own)

    @property
    def compute(self) -> Format:
        """Return the format of operation results."""
        return FORMATS[self.numerics.compute]

    @property
    def accumulator(self) -> Format:
        """Return the format of dot-product accumulators."""
        return FORMATS[self.numerics.accumulate]

    @property
    def u_accumulate(self) -> float:
        """Return the unit roundoff of dot-product accumulators."""
        return self.accumulator.unit_roundoff

    @property
    def eta_accumulate(self) -> float:
        """Return the underflow error of dot-product accumulators."""
        return self.accumulator.underflow

    @property
    def u_function(self) -> float:
        """Return the unit roundoff inside softmax, norms, activations and elementwise maps."""
        return self.numerics.function_format.unit_roundoff

    @property
    def eta_function(self) -> float:
        """Return the absolute error allowed for a product that underflows."""
        return self.numerics.function_format.smallest_subnormal

    @property
    def coarse(self) -> bool:
        """Return whether results are stored in a format coarser than float32."""
        return self.compute.coarse

    @property
    def casts(self) -> Casts:
        """Return the casts that the kernel may make."""
        return self.numerics.cast

    @property
    def free(self) -> bool:
        """Return whether casts are free rather than step functions."""
        return self.casts.free

    def unit(self, format: Format) -> float:
        """Return the relative error of one cast into a format: u, or 2u where it is directed."""
        return self.casts.unit(format)

    def faint(self, format: Format) -> float:
        """Return the absolute error of one cast near zero: half the smallest subnormal, or all."""
        return self.casts.faint(format)

    def format_for(self, role: str, op: str) -> Format:
        """Return the format in which an operation with this attention role stores its result."""
        return FORMATS[self.numerics.stored_format(op, role)]

    def inner(self, accumulates: bool) -> Format:
        """Return the format of an operation's arithmetic: the accumulator, or float32 (float64)."""
        return self.accumulator if accumulates else self.numerics.function_format

    def store(
        self,
        exact: Box,
        internal: Tensor,
        format: Format,
        node: str,
        inner: Format,
        moved: Box | None = None,
        apart: Apart = None,
    ) -> StoredResult:
        """Store v = exact + m + e, |e| <= internal, m in `moved`, in a format.

        `inner` is the format in which v was computed; storing it in one at least as precise as that
        and as float32 adds no rounding if casts are to nearest. The error is relative to `exact`.
        `apart` bounds the distance of readings of v from their common value before the cast.

        Raises:
            NoBound: the stored value may exceed the largest finite number of the format.
        """
        refuse_unbounded_sums(node, internal, inner)
        before = (exact if moved is None else exact + moved).reaching(internal)
        if self.free:
            value, error = self._freely(before, internal, format)
        elif format.precision >= max(24, inner.precision):
            value, error = before, Box.around(internal)
        else:
            value, error = self._step(before, internal, format)
            if self.casts.toward_zero:  # an infinite value stays infinite
                refuse_overflow(node, before.mag(), inner)
        refuse_overflow(node, value.mag(), format)
        found = error if moved is None else error + moved
        if self.free:
            return StoredResult(value, found, added(apart, self.lost(before.mag(), format)))
        return StoredResult(value, found)

    def _freely(self, before: Box, internal: Tensor, format: Format) -> tuple[Box, Box]:
        if self.casts.toward_zero:
            value = self.cut_freely(before, format)
            return value, self._cut(before, self.lost(before.mag(), format)).widen(internal)
        cast = self.lost(before.mag(), format)
        return before.widen(cast), Box.around(up(internal + cast))

    def lost(self, size: Tensor, format: Format) -> Tensor:
        """Return the error of a free cast of numbers of at most this size."""
        return up(self.unit(format) * size + self.faint(format), 2)

    def cut_freely(self, before: Box, format: Format) -> Box:
        """Return a box after free casts toward zero: no sign changes, no magnitude grows.

        The error is v·δ + η, at most v; the result is monotone in v, so the ends are extreme.
        """
        zero = torch.zeros_like(before.lo)
        low = down(before.lo - self.lost(before.lo.abs(), format)).clamp_min(0.0)
        high = up(before.hi + self.lost(before.hi.abs(), format)).clamp_max(0.0)
        return Box(
            torch.where(before.lo > 0, low, torch.minimum(before.lo, zero)),
            torch.where(before.hi < 0, high, torch.maximum(before.hi, zero)),
        )

    def _step(self, before: Box, internal: Tensor, format: Format) -> tuple[Box, Box]:
        value = Box(*(self.casts.step(end, format) for end in (before.lo, before.hi)))
        anywhere = torch.maximum(
            up(self.unit(format) * before.mag()), torch.full_like(before.lo, self.faint(format))
        )
        constant = Box(value.lo - before.hi, value.lo - before.lo)
        known = value.lo == value.hi
        wide = self._cut(before, anywhere) if self.casts.toward_zero else Box.around(anywhere)
        cast = Box(
            torch.where(known, torch.maximum(constant.lo, wide.lo), wide.lo),
            torch.where(known, torch.minimum(constant.hi, wide.hi), wide.hi),
        )
        return value, Box(cast.lo, cast.hi).widen(internal)

    @staticmethod
    def _cut(before: Box, most: Tensor) -> Box:
        """Return the error of casts toward zero, at most `most`; a number moves toward zero."""
        zero = torch.zeros_like(most)
        low, high = torch.where(before.hi > 0, -most, zero), torch.where(before.lo < 0, most, zero)
        return Box(low, high)
