"""Elementwise arithmetic in rational numbers."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from tests.support.rationals.cells import ZERO, Cells, Pair, add, both, mul
from tests.support.rationals.linear import middle
from tests.support.rationals.state import (
    DriftProblem,
    Known,
    inner_formats,
    recast,
    reduce,
    settle,
)


def pairwise(combine: Callable[[Pair, Pair], Pair]) -> Callable[..., Known]:
    """Return the rule of an operation that is linear in both inputs."""

    def rule(problem: DriftProblem, node: Node, inputs: list[Known]) -> Known:
        node.attrs.exactly()
        a, b = inputs
        exact = both(a.t, b.t, combine), both(a.i, b.i, combine), both(a.d, b.d, combine)
        return settle(
            problem, node, exact, _errors(problem, exact, 1, False), inner_formats(problem)
        )

    return rule


def _errors(
    problem: DriftProblem, exact: tuple[Cells, Cells, Cells], count: int, faint: bool
) -> tuple[list[Fraction], list[Fraction]]:
    found = []
    for form, y in zip(inner_formats(problem), exact, strict=False):
        lost = Fraction(2) ** (form.least - form.precision + 1) if faint else ZERO
        found.append([count * Fraction(form.u) * size + lost for size in y.mags])
    return found[0], found[1]


def mul_rule(problem: DriftProblem, node: Node, inputs: list[Known]) -> Known:
    """Return a * b."""
    node.attrs.exactly()
    a, b = inputs
    d = both(both(middle(a), b.d, mul), both(a.d, middle(b), mul), add)
    exact = both(a.t, b.t, mul), both(a.i, b.i, mul), d
    return settle(problem, node, exact, _errors(problem, exact, 1, True), inner_formats(problem))


def scaled(name: str) -> Callable[..., Known]:
    """Return the rule of a product with, or a division by, an attribute."""

    def rule(problem: DriftProblem, node: Node, inputs: list[Known]) -> Known:
        number = _number(node, name)
        if name == "divisor" and number == 0:
            raise Rejected("graph/field", "a division by zero")
        by = number if name == "factor" else 1 / number
        x = inputs[0]
        exact = tuple(part.each(lambda p: mul(p, (by, by))) for part in (x.t, x.i, x.d))
        found = exact[0], exact[1], exact[2]
        others = []
        for kernel, own in ((problem.train, x.t), (problem.infer, x.i)):
            low, high = _scalar(kernel, node, number)
            if name == "divisor":
                if low * high <= 0:
                    raise Rejected("bound/not-finite", "a divisor may be rounded to 0")
                low, high = 1 / high, 1 / low
            others.append(own.each(_times(low - by, high - by)))
        moved = others[0], others[1]
        sizes = both(found[0], moved[0], add), both(found[1], moved[1], add), found[2]
        errors = _errors(problem, sizes, 3, True)
        return settle(problem, node, found, errors, inner_formats(problem), moved)

    return rule


def shift(problem: DriftProblem, node: Node, inputs: list[Known]) -> Known:
    """Return x + offset."""
    by = _number(node, "offset")
    x = inputs[0]
    exact = x.t.each(lambda p: add(p, (by, by))), x.i.each(lambda p: add(p, (by, by))), x.d
    errors, others = [], []
    for kernel, form, y in zip(
        (problem.train, problem.infer), inner_formats(problem), exact, strict=False
    ):
        low, high = _scalar(kernel, node, by)
        others.append(y.each(_same((low - by, high - by))))
        u = Fraction(form.u)
        errors.append([u * (size + abs(by) * (1 + u)) for size in both(y, others[-1], add).mags])
    moved = others[0], others[1]
    return settle(problem, node, exact, (errors[0], errors[1]), inner_formats(problem), moved)


def _same(pair: Pair) -> Callable[[Pair], Pair]:
    return lambda _: pair


def _times(low: Fraction, high: Fraction) -> Callable[[Pair], Pair]:
    return lambda pair: mul(pair, (low, high))


def _scalar(kernel: KernelNumerics, node: Node, value: Fraction) -> Pair:
    """Return the least and the greatest value that a kernel may use for a Python number."""
    low, high = kernel.scalar(float(value), node)
    return (value, value) if low == high else (Fraction(low), Fraction(high))


def cast(problem: DriftProblem, node: Node, inputs: list[Known]) -> Known:
    """Return x in the format of the node."""
    node.attrs.exactly()
    return recast(problem, node, inputs[0])


def _number(node: Node, name: str) -> Fraction:
    raw = node.attrs.exactly(name).raw(name)
    whole = isinstance(raw, int) and not isinstance(raw, bool)
    value = Fraction(raw) if whole else Fraction(node.attrs.real(name))
    if value != 0 and not Fraction(1, 2**126) <= abs(value) <= 2**126:
        raise Rejected("graph/field", f"{name} leaves the range of float32")
    return value


def neg(problem: DriftProblem, node: Node, inputs: list[Known]) -> Known:
    """Return -x."""
    node.attrs.exactly()
    x = inputs[0]
    t, i, d = (part.each(lambda p: (-p[1], -p[0])) for part in (x.t, x.i, x.d))
    return Known(t, i, d)


def relu(problem: DriftProblem, node: Node, inputs: list[Known]) -> Known:
    """Return max(x, 0)."""
    node.attrs.exactly()
    x = inputs[0]
    moved = []
    for t, i, d in zip(x.t.pairs, x.i.pairs, x.d.pairs, strict=True):
        if t[0] >= 0 and i[0] >= 0:
            moved.append(d)
        elif t[1] <= 0 and i[1] <= 0:
            moved.append((ZERO, ZERO))
        else:
            moved.append((min(d[0], ZERO), max(d[1], ZERO)))
    positive = [part.each(lambda p: (max(p[0], ZERO), max(p[1], ZERO))) for part in (x.t, x.i)]
    return reduce(positive[0], positive[1], Cells(x.d.shape, tuple(moved)))
