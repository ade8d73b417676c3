"""Number formats and the constants of their rounding (docs/relational-interval.md, section 2)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """A floating-point format.

    `precision` counts the significand bits, the hidden one included; unit roundoff is
    `2**-precision`, the exponent of the smallest normal number is `min_exponent`.
    """

    name: str
    precision: int
    min_exponent: int
    largest: float

    def holds(self, other: Format) -> bool:
        """Say whether every number of another format is one of this."""
        return (
            self.precision >= other.precision
            and self.smallest_subnormal <= other.smallest_subnormal
            and self.largest >= other.largest
        )

    @property
    def unit_roundoff(self) -> float:
        """Return u = 2^-precision, the relative error of rounding to nearest."""
        return 2.0**-self.precision

    @property
    def smallest_subnormal(self) -> float:
        """Return the distance of two neighbours below the smallest normal number."""
        return 2.0 ** (self.min_exponent - self.precision + 1)

    @property
    def underflow(self) -> float:
        """Return η = half the smallest subnormal number, the absolute error near zero."""
        return self.smallest_subnormal / 2


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("float64", 53, -1022, 1.7976931348623157e308),
        Format("float32", 24, -126, 3.4028234663852886e38),
        Format("tfloat32", 11, -126, 3.4011621342146535e38),
        Format("float16", 11, -14, 65504.0),
        Format("bfloat16", 8, -126, 3.3895313892515355e38),
        Format("fp8_e4m3", 4, -6, 448.0),
        Format("fp8_e5m2", 3, -14, 57344.0),
    )
}
