"""Relations of measured quantities that hold for all kernels, as data.

Every translation of contracts into logic uses exactly these assumptions. A *small* quantity is at
most a factor times a *large* one, value by value; an order of values also holds for every mean,
minimum, maximum and quantile of the same values. Sources: norms of one row of logits, and
`docs/proofs/bound-chain.md`, sections 1 and 2. The inequalities between metrics are in
`kcdsl.logic.orders`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple, Protocol

from kcdsl.ir.formulas import subterms
from kcdsl.ir.terms import Abs, Arith, Metric, Norm, Number, Statistic, TableValue, Term
from kcdsl.logic.orders import MAGNITUDE_OF_LOG_RATIO, SQRT2_UP, curves, least_factor
from kcdsl.metrics import find_metric

NORMS: tuple[tuple[str, Fraction, str], ...] = (
    ("inf", Fraction(1), "2"),
    ("span", Fraction(2), "inf"),
    ("span", SQRT2_UP, "2"),
)
"""(small, factor, large) for the norms of one drift."""

MONOTONE = frozenset({"mean", "min", "max", "quantile"})
"""Statistics that are monotone in the values."""


def canonical(name: str) -> str:
    """Return the registered name of a metric, or the name itself if it is not registered."""
    definition = find_metric(name)
    return name if definition is None else definition.name


# --- orders --------------------------------------------------------------------------------------


def domination(small: Term, large: Term, temperature: Fraction | None) -> Fraction | None:
    """Return c if small <= c large holds for every value, else None.

    `temperature` relates the span of the logits to the distributions; None: no relation.
    """
    if isinstance(large, Abs) and large.of == small:
        return Fraction(1)
    names = metric_node(small), metric_node(large)
    if names[0] is None or names[1] is None:
        return None
    path = least_factor(names[0], names[1], temperature)
    return None if path is None else path.factor


def metric_node(term: Term) -> str | None:
    """Return the node of a term of one token in `kcdsl.logic.orders`, or None."""
    match term:
        case Metric(name):
            return name
        case Abs(Metric("log_ratio")):
            return MAGNITUDE_OF_LOG_RATIO
        case _:
            return None


class Ranked(Protocol):
    """A statistic, by its kind and level."""

    @property
    def kind(self) -> str: ...

    @property
    def q(self) -> Fraction | None: ...


class Placed(Ranked, Protocol):
    """A statistic of a term on a slice. `side` is "largest" or "smallest" where a request has
    several values and is represented by one of them, else ""."""

    @property
    def of(self) -> Term: ...

    @property
    def slice(self) -> str: ...

    @property
    def side(self) -> str: ...


def ordered(a: Ranked, b: Ranked) -> bool:
    """Return whether a <= b holds for two statistics of the same values."""
    return (a.kind, b.kind) in ORDERS and (a.kind != b.kind or _below(a.q, b.q))


def _below(a: Fraction | None, b: Fraction | None) -> bool:
    return a is not None and b is not None and a < b


ORDERS = {
    ("min", "mean"): "a mean is no less than the minimum",
    ("min", "max"): "no minimum is above the maximum",
    ("min", "quantile"): "no percentile is below the minimum",
    ("mean", "max"): "a mean is no more than the maximum",
    ("quantile", "max"): "no percentile is above the maximum",
    ("mean", "rate"): "a rate is the mean of values 0 and 1",
    ("rate", "mean"): "a rate is the mean of values 0 and 1",
    ("min", "rate"): "a rate is the mean of values 0 and 1",
    ("rate", "max"): "a rate is the mean of values 0 and 1",
    ("quantile", "quantile"): "percentiles of the same values, in the order of their levels",
}
"""(kind, kind): the reason why the first is at most the second."""


def rises(a: Placed, b: Placed, inside: Callable[[str, str], bool]) -> tuple[str, ...] | None:
    """Return the reasons for a <= b as statistics of any common term, or None.

    `inside(x, y)`: every request of the slice x is in y.
    """
    if a.side and b.side and a.side != b.side and b.side != "largest":
        return None
    same = (a.kind, a.q) == (b.kind, b.q)
    if not (same or ordered(a, b)):
        return None
    why = () if same else (ORDERS[a.kind, b.kind],)
    if a.slice == b.slice:
        return why
    if b.kind == "max" and inside(a.slice, b.slice):
        return (*why, f"every request of {a.slice} is one of {b.slice}")
    if a.kind == "min" and inside(b.slice, a.slice):
        return (*why, f"every request of {b.slice} is one of {a.slice}")
    return None


def at_most(
    a: Placed, b: Placed, temperature: Fraction | None, inside: Callable[[str, str], bool]
) -> tuple[Fraction, tuple[str, ...]] | None:
    """Return c and the reasons if a <= c b holds for two measured quantities of any kernels."""
    if a.of != b.of and a.kind not in MONOTONE and a.kind != "value":
        return None
    factor = Fraction(1) if a.of == b.of else domination(a.of, b.of, temperature)
    if factor is None:
        return None
    why = rises(a, b, inside)
    return None if why is None else (factor, (*domination_reasons(a.of, b.of, temperature), *why))


def domination_reasons(small: Term, large: Term, temperature: Fraction | None) -> tuple[str, ...]:
    """Return the reasons of `domination`."""
    names = metric_node(small), metric_node(large)
    if small == large:
        return ()
    if names[0] is not None and names[1] is not None:
        path = least_factor(names[0], names[1], temperature)
        if path is not None:
            return tuple(dict.fromkeys(path.reasons))
    return ("x <= |x|",)


def conditional_bounds(
    a: Placed,
    b: Placed,
    bound: Fraction,
    temperature: Fraction | None,
    inside: Callable[[str, str], bool],
) -> Iterator[tuple[Fraction, tuple[str, ...]]]:
    """Yield t and the reasons where b <= bound implies a <= t by a nonlinear relation."""
    names = metric_node(a.of), metric_node(b.of)
    if names[0] is None or names[1] is None or bound < 0:
        return
    if a.kind not in MONOTONE and a.kind != "value":
        return
    found = curves(names[0], names[1], temperature)
    why = rises(a, b, inside) if found else None
    if why is None:
        return
    for curve in found:
        if a.kind == "mean" and b.kind != "max" and not curve.concave:
            continue
        limit = curve.at(bound, temperature or Fraction(1))
        if limit is not None:
            yield limit, (curve.why, *why)


# --- ranges --------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """A closed interval of exact reals; None is an infinite end."""

    low: Fraction | None = None
    high: Fraction | None = None

    def meet(self, other: Interval) -> Interval:
        """Return the intersection (which may be empty: low above high)."""
        lows = [end for end in (self.low, other.low) if end is not None]
        highs = [end for end in (self.high, other.high) if end is not None]
        return Interval(max(lows, default=None), min(highs, default=None))


EVERYTHING = Interval()
_UNIT = Interval(Fraction(0), Fraction(1))
_DOMAINS = {
    "embedding_cosine": Interval(Fraction(-1), Fraction(1)),
    # The minimum of w ln w is -1/e, and 0.368 > 1/e.
    "w_log_w": Interval(Fraction(-368, 1000), None),
}


def domain(name: str) -> Interval:
    """Return the range of a metric by definition; the whole line for an unknown metric."""
    definition = find_metric(name)
    if definition is None:
        return EVERYTHING
    narrower = _DOMAINS.get(definition.name, EVERYTHING)
    return Interval(definition.lower, definition.upper).meet(narrower)


def interval(term: Term, known: Mapping[str, Interval] | None = None) -> Interval:
    """Return an interval that contains the term; `known` has tighter bounds of metrics.

    A mean, minimum, maximum or quantile of values in an interval lies in it; a rate lies in
    [0, 1].
    """
    match term:
        case Number(value):
            return Interval(value, value)
        case Metric(name):
            return domain(name).meet((known or {}).get(canonical(name), EVERYTHING))
        case Statistic("rate"):
            return _UNIT
        case Statistic("mean" | "min" | "max" | "quantile" | "aggregate", of):
            return interval(of, known)
        case Norm():
            return Interval(Fraction(0), None)
        case Abs(of):
            return _magnitude(interval(of, known))
        case Arith("-", left, right) if left == right and _has_one_value(left):
            return Interval(Fraction(0), Fraction(0))
        case Arith(op, left, right):
            return _arithmetic(op, interval(left, known), interval(right, known))
        case Statistic() | TableValue():
            return EVERYTHING


def _has_one_value(term: Term) -> bool:
    """Return whether a term is the same number on both sides of a difference: a percentile is not,
    whose requests are represented by their worst token on either side."""
    parts = [part for part in subterms(term) if isinstance(part, Statistic)]
    return not any(part.kind in ("quantile", "aggregate") for part in parts)


def _magnitude(x: Interval) -> Interval:
    low = max(
        Fraction(0),
        x.low if x.low is not None else Fraction(0),
        -x.high if x.high is not None else Fraction(0),
    )
    high = None if x.low is None or x.high is None else max(abs(x.low), abs(x.high))
    return Interval(low, high)


def _arithmetic(op: str, x: Interval, y: Interval) -> Interval:
    match op:
        case "+":
            return Interval(_sum(x.low, y.low), _sum(x.high, y.high))
        case "-":
            return _arithmetic("+", x, Interval(_negated(y.high), _negated(y.low)))
        case "*":
            return _product(x, y)
        case "/" if y.low is not None and y.low == y.high and y.low != 0:
            inverse = 1 / y.low
            return _product(x, Interval(inverse, inverse))
        case _:
            return EVERYTHING


def _product(x: Interval, y: Interval) -> Interval:
    if y.low is not None and y.low == y.high:
        x, y = y, x
    if x.low is not None and x.low == x.high:  # a constant times an interval
        ends = (_times(x.low, y.low), _times(x.low, y.high))
        if x.low == 0:
            return Interval(Fraction(0), Fraction(0))
        return Interval(*ends) if x.low > 0 else Interval(*reversed(ends))
    if x.low is None or x.high is None or y.low is None or y.high is None:
        return EVERYTHING
    corners = [a * b for a in (x.low, x.high) for b in (y.low, y.high)]
    return Interval(min(corners), max(corners))


def _times(factor: Fraction, end: Fraction | None) -> Fraction | None:
    return None if end is None else factor * end


def _sum(a: Fraction | None, b: Fraction | None) -> Fraction | None:
    return None if a is None or b is None else a + b


def _negated(end: Fraction | None) -> Fraction | None:
    return None if end is None else -end
