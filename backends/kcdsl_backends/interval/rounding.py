"""Formats on float64 tensors: rounding to nearest, and storing a result (section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.model.formats import FORMATS, Format
from kcdsl.model.numerics import Numerics
from kcdsl_backends.interval.box import Box, up
from kcdsl_backends.interval.errors import NoBound


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent exactly, for integer exponents of normal float64 numbers."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def nearest(x: Tensor, format: Format) -> Tensor:
    """Round float64 values to the nearest number of a format, ties to even.

    The exponent range is unbounded above: values beyond the largest finite number are rounded on
    the grid of their binade, and the caller tests for overflow.
    """
    if format.precision >= 53:
        return x
    _, exponent = torch.frexp(x)
    leading = (exponent - 1).clamp_min(format.min_exponent)
    quantum = power_of_two(leading - (format.precision - 1))
    return torch.round(x / quantum) * quantum


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored result: where it lies, and where its error against the exact operation lies."""

    value: Box
    error: Box


@dataclass(frozen=True, slots=True)
class Rounding:
    """The rounding constants of one kernel."""

    numerics: Numerics

    @property
    def compute(self) -> Format:
        """Return the format of operation results."""
        return FORMATS[self.numerics.compute]

    @property
    def u_accumulate(self) -> float:
        """Return the unit roundoff of dot-product accumulators."""
        return FORMATS[self.numerics.accumulate].unit_roundoff

    @property
    def eta_accumulate(self) -> float:
        """Return the underflow error of dot-product accumulators."""
        return FORMATS[self.numerics.accumulate].underflow

    @property
    def u_function(self) -> float:
        """Return the unit roundoff inside softmax, norms, activations and elementwise maps."""
        return 2.0**-53 if self.numerics.compute == "float64" else 2.0**-24

    @property
    def eta_function(self) -> float:
        """Return the absolute error allowed for a product that underflows."""
        return 2.0**-1074 if self.numerics.compute == "float64" else 2.0**-149

    @property
    def coarse(self) -> bool:
        """Say whether results are stored in a format coarser than float32."""
        return self.compute.precision < 24

    @property
    def free(self) -> bool:
        """Say whether casts are free (`any`) rather than to nearest."""
        return self.numerics.casts == "any"

    def format_for(self, role: str, op: str) -> Format:
        """Return the format in which an operation with this attention role stores its result."""
        return FORMATS[self.numerics.stored_format(op, role)]

    def inner(self, accumulates: bool) -> Format:
        """Return the format of an operation's arithmetic: the accumulator, or float32 (float64)."""
        if accumulates:
            return FORMATS[self.numerics.accumulate]
        return FORMATS["float64" if self.numerics.compute == "float64" else "float32"]

    def store(
        self, exact: Box, internal: Tensor, format: Format, node: str, inner: Format
    ) -> Stored:
        """Store v = exact + e, |e| <= internal, in a format.

        `inner` is the format in which v was formed; storing it in one at least as precise as that
        and as float32 takes no further rounding where casts are to nearest.

        Raises:
            NoBound: the stored value may exceed the largest finite number of the format.
        """
        before = exact.reaching(internal)
        if self.free:
            magnitude = before.mag()
            cast = up(format.unit_roundoff * magnitude + format.underflow, 2)
            value = before.widen(cast)
            error = Box.around(up(internal + cast))
        elif format.precision >= max(24, inner.precision):
            value, error = before, Box.around(internal)
        else:
            value, error = self._to_nearest(before, internal, format)
        self._refuse_overflow(value, format, node)
        return Stored(value, error)

    def _to_nearest(self, before: Box, internal: Tensor, format: Format) -> tuple[Box, Box]:
        value = Box(nearest(before.lo, format), nearest(before.hi, format))
        anywhere = torch.maximum(
            up(format.unit_roundoff * before.mag()),
            torch.full_like(before.lo, format.underflow),
        )
        constant = Box(value.lo - before.hi, value.lo - before.lo)
        known = value.lo == value.hi
        cast = Box(
            torch.where(known, torch.maximum(constant.lo, -anywhere), -anywhere),
            torch.where(known, torch.minimum(constant.hi, anywhere), anywhere),
        )
        return value, Box(cast.lo, cast.hi).widen(internal)

    @staticmethod
    def _refuse_overflow(value: Box, format: Format, node: str) -> None:
        magnitude = value.mag()
        if bool((magnitude <= format.largest).all()):
            return
        flat = int(torch.nan_to_num(magnitude, nan=torch.inf).argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), magnitude.shape))
        limit = f"{format.largest:g} ({format.name})"
        raise NoBound(node, f"overflow reachable: element {list(index)} may exceed {limit}")
