"""Ball arithmetic on arrays: each number is a midpoint of 200 bits and a radius of its error.

Arrays are numpy arrays of `flint.arb`. A comparison returns True only where it is certain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flint import arb as arb
from flint import ctx

PRECISION = 200
ctx.prec = PRECISION

Balls = np.ndarray
ZERO, ONE, TWO = arb(0), arb(1), arb(2)


def each(function: Callable[..., Any], *arrays: Any) -> Balls:
    """Return the elementwise version of a function, on arrays of objects."""
    found = np.frompyfunc(function, len(arrays), 1)(*arrays)
    return np.asarray(found, dtype=object)


def balls(values: Any) -> Balls:
    """Return the exact balls of doubles; balls are returned unchanged."""
    return each(lambda v: v if isinstance(v, arb) else arb(float(v)), np.asarray(values))


def size(values: Balls) -> Balls:
    """Return absolute values."""
    return each(abs, values)


def larger(a: Any, b: Any) -> Balls:
    """Return the larger of two numbers, element by element."""
    return each(lambda x, y: arb(x).max(arb(y)), a, b)


def smaller(a: Any, b: Any) -> Balls:
    """Return the smaller of two numbers, element by element."""
    return each(lambda x, y: arb(x).min(arb(y)), a, b)


def total(values: Balls, axis: int = -1) -> Balls:
    """Return sums along an axis, which is kept as one of size 1."""
    return np.asarray(np.sum(values, axis=axis, keepdims=True), dtype=object)


def most(values: Balls, axis: int = -1) -> Balls:
    """Return maxima along an axis, which is kept as one of size 1."""
    return np.expand_dims(
        np.asarray(
            np.frompyfunc(lambda x, y: x.max(y), 2, 1).reduce(values, axis=axis), dtype=object
        ),
        axis,
    )


def least(values: Balls, axis: int = -1) -> Balls:
    """Return minima along an axis, which is kept as one of size 1."""
    return -most(-values, axis)


def gelu(x: arb) -> arb:
    """Return x·Φ(x); by erfc, which keeps its relative precision far below zero."""
    return x * (-x / TWO.sqrt()).erfc() / 2


def cubic(x: arb) -> arb:
    """Return 2√(2/π)(x + 0.044715 x³), with the constant rounded to float64."""
    return 2 * (TWO / arb.pi()).sqrt() * (x + arb(0.044715) * x**3)


def gelu_tanh(x: arb) -> arb:
    """Return the approximation of GELU by tanh."""
    return x / (1 + (-cubic(x)).exp())


def silu(x: arb) -> arb:
    """Return x·σ(x)."""
    return x / (1 + (-x).exp())


def tanh(x: arb) -> arb:
    """Return tanh(x)."""
    return x.tanh()


def power(exponent: int) -> arb:
    """Return 2^exponent."""
    return TWO**exponent


def nearest(value: arb, precision: int, least_exponent: int) -> arb:
    """Return the number of a format nearest to a ball's midpoint, ties to even."""
    mantissa, exponent = (int(part) for part in value.mid().man_exp())
    if not mantissa:
        return ZERO
    top = abs(mantissa).bit_length() + exponent - 1
    quantum = max(top, least_exponent) - (precision - 1)
    shift = quantum - exponent
    if shift <= 0:
        return arb(value.mid())
    whole, rest = divmod(abs(mantissa), 1 << shift)
    half = 1 << (shift - 1)
    if rest > half or (rest == half and whole % 2):
        whole += 1
    return arb(whole if mantissa > 0 else -whole) * power(quantum)


def cut(value: arb, precision: int, least_exponent: int) -> arb:
    """Return the neighbour in a format of a ball's midpoint, toward zero."""
    return beside(value, precision, least_exponent)[0]


def beside(value: arb, precision: int, least_exponent: int) -> tuple[arb, arb]:
    """Return the two neighbours in a format of a ball's midpoint, the one toward zero first.

    Both are the midpoint where the format represents it.
    """
    mantissa, exponent = (int(part) for part in value.mid().man_exp())
    if not mantissa:
        return ZERO, ZERO
    top = abs(mantissa).bit_length() + exponent - 1
    quantum = max(top, least_exponent) - (precision - 1)
    if quantum <= exponent:
        return arb(value.mid()), arb(value.mid())
    whole, rest = divmod(abs(mantissa), 1 << (quantum - exponent))
    unit = power(quantum) if mantissa > 0 else -power(quantum)
    return whole * unit, (whole + bool(rest)) * unit


def outside(values: Balls, lo: Any, hi: Any) -> str:
    """Return the place where a number lies outside [lo, hi] for certain, or ""."""
    low, high = np.broadcast_arrays(np.asarray(lo), np.asarray(hi))
    for index in np.ndindex(*values.shape):
        value: arb = values.item(index)
        if value < arb(float(low[index])) or value > arb(float(high[index])):
            return f"{index}: {value.str(20)} not in [{low[index]!r}, {high[index]!r}]"
    return ""
