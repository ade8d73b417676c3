"""Units and dimensions: a quantity is an exact fraction in base units and a dimension.

Base units: second, byte, token, nat, and the two dimensionless kinds `1` (a plain number) and
`ratio` (a share of one, written with `%`). A bare number takes the kind of what it is compared
with, as long as that is dimensionless or a number of nats; a time, a size or a rate always needs
its unit.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple


class Dimension(NamedTuple):
    """Exponents of the base units, sorted by name; `share` marks the dimensionless ratio."""

    exponents: tuple[tuple[str, int], ...] = ()
    share: bool = False

    def __str__(self) -> str:
        if not self.exponents:
            return "ratio" if self.share else "1"
        above = [_power(base, e) for base, e in self.exponents if e > 0]
        below = [_power(base, -e) for base, e in self.exponents if e < 0]
        return "*".join(above or ["1"]) + "".join(f"/{part}" for part in below)

    def times(self, other: Dimension, sign: int = 1) -> Dimension:
        """Return the dimension of a product, or of a quotient with `sign` -1."""
        total = dict(self.exponents)
        for base, exponent in other.exponents:
            total[base] = total.get(base, 0) + sign * exponent
        left = tuple(sorted((base, e) for base, e in total.items() if e != 0))
        share = not left and (self.share or other.share or bool(self.exponents))
        return Dimension(left, share)


def _power(base: str, exponent: int) -> str:
    return base if exponent == 1 else f"{base}^{exponent}"


ONE = Dimension()
RATIO = Dimension(share=True)
TIME = Dimension((("s", 1),))
BYTES = Dimension((("B", 1),))
NATS = Dimension((("nat", 1),))
THROUGHPUT = Dimension((("s", -1), ("tok", 1)))
TOKENS = Dimension((("tok", 1),))

NAMED = {str(d): d for d in (ONE, RATIO, TIME, BYTES, NATS, THROUGHPUT, TOKENS)}
"""The dimensions that metrics have, by the name used in the IR."""

_WORDS = {
    ONE: "a plain number",
    RATIO: "a ratio",
    TIME: "a time",
    BYTES: "a size in bytes",
    NATS: "a number of nats",
    THROUGHPUT: "a rate in tokens per second",
    TOKENS: "a number of tokens",
}
_ALL_EXAMPLES = {ONE: "0.05", RATIO: "1%", NATS: "0.02 nats"}
_EXAMPLES = {TIME: "250 ms", BYTES: "80 GiB", THROUGHPUT: "4000 tok/s", TOKENS: "128 tok"}


class Unit(NamedTuple):
    """A unit: its name, its size in base units, and its dimension."""

    name: str
    factor: Fraction
    dimension: Dimension


UNITS: dict[str, Unit] = {
    unit.name: unit
    for unit in (
        Unit("ns", Fraction(1, 10**9), TIME),
        Unit("us", Fraction(1, 10**6), TIME),
        Unit("ms", Fraction(1, 10**3), TIME),
        Unit("s", Fraction(1), TIME),
        Unit("min", Fraction(60), TIME),
        Unit("h", Fraction(3600), TIME),
        Unit("B", Fraction(1), BYTES),
        Unit("KB", Fraction(10**3), BYTES),
        Unit("MB", Fraction(10**6), BYTES),
        Unit("GB", Fraction(10**9), BYTES),
        Unit("TB", Fraction(10**12), BYTES),
        Unit("KiB", Fraction(2**10), BYTES),
        Unit("MiB", Fraction(2**20), BYTES),
        Unit("GiB", Fraction(2**30), BYTES),
        Unit("TiB", Fraction(2**40), BYTES),
        Unit("tok", Fraction(1), TOKENS),
        Unit("tok/s", Fraction(1), THROUGHPUT),
        Unit("nats", Fraction(1), NATS),
        Unit("%", Fraction(1, 100), RATIO),
        Unit("ratio", Fraction(1), RATIO),
        Unit("1", Fraction(1), ONE),
    )
}


_BITS = "1 bit is ln 2 nats, which is no fraction; state the bound in nats"
_ULPS = "a unit in the last place depends on format and value; state the bound as a number"
NO_UNITS = {"bit": _BITS, "bits": _BITS, "ulp": _ULPS, "ulps": _ULPS}
"""Texts that are used as units but are not, with the reason."""

SPELLINGS: dict[str, str] = {
    other: unit
    for unit, others in {
        "ns": "nsec nanosecond nanoseconds",
        "us": "usec microsecond microseconds",
        "ms": "msec millis millisecond milliseconds",
        "s": "sec secs second seconds",
        "min": "mins minute minutes",
        "h": "hr hrs hour hours",
        "B": "byte bytes",
        "tok": "toks token tokens",
        "tok/s": "tps tok/sec token/s tokens/s tokens/sec tokens/second",
        "nats": "nat",
        "%": "percent pct",
    }.items()
    for other in others.split()
}
"""Other spellings of units."""


def describe(dimension: Dimension) -> str:
    """Return the dimension in words."""
    return _WORDS.get(dimension, f"a quantity in {dimension}")


def example(dimension: Dimension) -> str | None:
    """Return an example of a quantity, for dimensions that require a unit."""
    return _EXAMPLES.get(dimension)


def sample(dimension: Dimension) -> str | None:
    """Return an example of a quantity; None for a dimension without a unit."""
    return _EXAMPLES.get(dimension) or _ALL_EXAMPLES.get(dimension)


def takes_bare_numbers(dimension: Dimension) -> bool:
    """Return whether a number without a unit is allowed for this dimension."""
    return all(base == "nat" for base, _ in dimension.exponents)
