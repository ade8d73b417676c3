"""The state of a node, and the error of storing a result, in rational numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs.graph import Array, Block, Node
from kcdsl_certs.recheck.numerics.formats import FLOAT32, Format
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from tests.support.rationals import nearby
from tests.support.rationals.cells import (
    Cells,
    Pair,
    add,
    both,
    cut,
    meet,
    nearest,
    sub,
    widened,
)
from tests.support.rationals.weights import RationalParameters


@dataclass(frozen=True, slots=True)
class Known:
    """Enclosures of the training value, the inference value and inference minus training."""

    t: Cells
    i: Cells
    d: Cells


@dataclass(frozen=True, slots=True)
class DriftProblem:
    """The context of the rules: everything they read besides their inputs."""

    block: Block
    train: KernelNumerics
    infer: KernelNumerics
    parameters: RationalParameters
    keys: Mapping[str, str]
    weights: frozenset[str]
    region: tuple[Array | None, Array | None]
    drift: tuple[Array, Array] | None = None
    rho: Fraction = Fraction(0)


def pinned(problem: DriftProblem, node: Node) -> DriftProblem:
    """Return the problem with both kernels as they compute a node.

    A node may have its own format, and a linear the override of its weight.
    """
    if node.format and node.op != "constant":
        problem = replace(problem, train=problem.train.at(node), infer=problem.infer.at(node))
    key = problem.keys.get(node.inputs[1]) if node.op == "linear" else None
    if key is None or not (problem.train.others or problem.infer.others):
        return problem
    return replace(problem, train=problem.train.serving(key), infer=problem.infer.serving(key))


def recast(problem: DriftProblem, node: Node, x: Known) -> Known:
    """Return the state of a node after a cast to the format of the reader."""
    nodes, sides = problem.block.named, []
    for kernel, own in ((problem.train, x.t), (problem.infer, x.i)):
        form = kernel.result(node.op, node.role)
        read = kernel.reads(nodes, node.inputs[0], problem.drift is not None)
        nothing = [Fraction(0)] * len(own.pairs)
        if all(form.holds(other) for other in read):
            sides.append((own, Cells(own.shape, tuple((zero, zero) for zero in nothing))))
        else:
            widest = max(read, key=lambda other: other.precision)
            sides.append(stored(kernel, form, own, nothing, widest))
    (t, wrong_t), (i, wrong_i) = sides
    return reduce(t, i, both(x.d, both(wrong_i, wrong_t, sub), add))


def held(problem: DriftProblem, key: str, *, linear: bool) -> Known:
    """Return both kernels' stored parameters: of the tensor, or of every θ' in a weight ball."""
    stored = problem.parameters
    if problem.rho:
        kernels = problem.train, problem.infer
        if linear:
            kernels = problem.train.serving(key), problem.infer.serving(key)
        return Known(*nearby.both(*stored.singles(key), problem.rho, kernels, linear))
    get = stored.linear if linear else stored.plain
    t, i = get(key, problem.train), get(key, problem.infer)
    return Known(t, i, both(i, t, sub))


def reduce(t: Cells, i: Cells, d: Cells) -> Known:
    """Return the state after each box is intersected with the one implied by the others."""
    d = both(d, both(i, t, sub), meet)
    i = both(i, both(t, d, add), meet)
    return Known(both(t, both(i, d, sub), meet), i, d)


def settle(
    problem: DriftProblem,
    node: Node,
    exact: tuple[Cells, Cells, Cells],
    errors: tuple[Sequence[Fraction], Sequence[Fraction]],
    inner: tuple[Format, Format],
    beside: tuple[Cells, Cells] | None = None,
) -> Known:
    """Return the state of a stored result from f_t, f_i, f_i - f_t and the errors inside.

    `beside` is what either kernel may add to f before it is stored.
    """
    formed = exact[:2] if beside is None else tuple(map(both, exact, beside, (add, add)))
    sides = zip((problem.train, problem.infer), formed, errors, inner, strict=False)
    (t, wrong_t), (i, wrong_i) = (
        stored(k, k.result(node.op, node.role), y, e, f) for k, y, e, f in sides
    )
    if beside is not None:
        wrong_t, wrong_i = both(wrong_t, beside[0], add), both(wrong_i, beside[1], add)
    return reduce(t, i, both(exact[2], both(wrong_i, wrong_t, sub), add))


def stored(
    kernel: KernelNumerics, form: Format, y: Cells, error: Sequence[Fraction], inner: Format
) -> tuple[Cells, Cells]:
    """Return the stored value and its error against real arithmetic."""
    v = widened(y, error)
    u, tiny = kernel.units * Fraction(form.u), kernel.units * eta(form)
    if not kernel.stepped:
        cast = [u * size + tiny for size in v.mags]
        lost = [_off(kernel, pair, c) for pair, c in zip(v.pairs, cast, strict=True)]
        pairs = tuple((lo - e, hi + e) for (lo, hi), e in zip(lost, error, strict=True))
        value, away = widened(v, cast), Cells(y.shape, pairs)
        if kernel.inward:
            value = Cells(y.shape, tuple(_shrunk(pair, u, tiny) for pair in v.pairs))
    elif form.precision >= max(FLOAT32.precision, inner.precision):
        value, away = v, Cells(y.shape, tuple((-e, e) for e in error))
    else:
        steps = [_step(kernel, form, pair, e) for pair, e in zip(v.pairs, error, strict=True)]
        value = Cells(y.shape, tuple(s[0] for s in steps))
        away = Cells(y.shape, tuple(s[1] for s in steps))
        if kernel.inward and max(v.mags) > Fraction(inner.largest):
            raise Rejected("bound/overflow", f"a number may overflow {inner.name}")
    if max(value.mags) > Fraction(form.largest):
        raise Rejected("bound/overflow", f"a number may overflow {form.name}")
    return value, away


def _step(kernel: KernelNumerics, form: Format, v: Pair, error: Fraction) -> tuple[Pair, Pair]:
    step = cut if kernel.inward else nearest
    low, high = step(v[0], form), step(v[1], form)
    if low == high:
        return (low, high), (low - v[1] - error, low - v[0] + error)
    free = kernel.units * max(Fraction(form.u) * max(abs(v[0]), abs(v[1])), eta(form))
    off = _off(kernel, v, free)
    return (low, high), (off[0] - error, off[1] + error)


def _off(kernel: KernelNumerics, v: Pair, most: Fraction) -> Pair:
    """Return the error of a cast, at most `most`; of one sign where the cast goes toward zero."""
    if not kernel.inward:
        return -most, most
    return -most if v[1] > 0 else Fraction(0), most if v[0] < 0 else Fraction(0)


def _shrunk(v: Pair, u: Fraction, tiny: Fraction) -> Pair:
    """Return the numbers after free casts toward zero."""
    low = max(v[0] - u * v[0] - tiny, Fraction(0)) if v[0] > 0 else v[0]
    high = min(v[1] - u * v[1] + tiny, Fraction(0)) if v[1] < 0 else v[1]
    return low, high


def eta(form: Format) -> Fraction:
    """Return half the smallest subnormal number of a format."""
    return Fraction(2) ** (form.least - form.precision)


def gamma(count: int, u: float) -> Fraction:
    """Return count·u / (1 - count·u)."""
    product = count * Fraction(u)
    if product >= 1:
        raise Rejected("bound/not-finite", f"{count} roundings have no bound")
    return product / (1 - product)


def inner_formats(problem: DriftProblem) -> tuple[Format, Format]:
    """Return the formats of elementwise arithmetic in both kernels."""
    return problem.train.inner, problem.infer.inner
