"""linear and matmul in rational numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.numerics.formats import CODES, LAYOUTS, LEAST_POWER, NESTED, Format
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from tests.support.rationals.cells import (
    ZERO,
    Cells,
    Pair,
    Shape,
    add,
    both,
    matmul,
    meet,
    points,
    product,
    sub,
)
from tests.support.rationals.quantisers import (
    INTEGERS,
    extents,
    largest,
    nested,
    quantised,
    quantisers,
)
from tests.support.rationals.state import DriftProblem, Known, eta, gamma, held, settle

_SMALL = Fraction(1, 2**20)


def linear_rule(problem: DriftProblem, node: Node, inputs: list[Known]) -> Known:
    """Return x @ weight.T + bias."""
    node.attrs.exactly()
    key = problem.keys.get(node.inputs[1])
    if key is None:
        raise Rejected("rule/weight", "the weight of a linear must be a parameter")
    x = inputs[0]
    weight = held(problem, key, linear=True)
    w_t, w_i, w_d = (_turned(part) for part in (weight.t, weight.i, weight.d))
    outputs = w_t.shape[1]
    b_t, b_i, b_d = _bias(problem, node, inputs, outputs)
    x_t, away_t = quantised(problem.train, x.t, _quantisation(problem.train, x.t, key), key)
    x_i, away_i = quantised(problem.infer, x.i, _quantisation(problem.infer, x.i, key), key)
    drift = both(x.d, both(away_i, away_t, sub), add)
    if (problem.train.activations[0], problem.infer.activations[0]) != ("none", "none"):
        drift = both(drift, both(x_i, x_t, sub), meet)
    d = both(matmul(drift, w_i), matmul(x_t, w_d), add)
    p_t, p_i = matmul(x_t, w_t), matmul(x_i, w_i)
    exact = (
        both(p_t, b_t, add),
        both(p_i, b_i, add),
        both(d, b_d, add),
    )
    biased = len(inputs) == 3
    errors = (
        _linear_error(
            problem.train,
            x_t,
            w_t,
            b_t,
            p_t if biased else None,
            _clipped(problem.train, x.t, w_t, key),
        ),
        _linear_error(
            problem.infer,
            x_i,
            w_i,
            b_i,
            p_i if biased else None,
            _clipped(problem.infer, x.i, w_i, key),
        ),
    )
    inner = problem.train.accumulate, problem.infer.accumulate
    return settle(problem, node, exact, errors, inner)


def _turned(weight: Cells) -> Cells:
    rows, columns = weight.shape
    order = [i * columns + j for j in range(columns) for i in range(rows)]
    return weight.taken((columns, rows), order)


def _bias(
    problem: DriftProblem, node: Node, inputs: list[Known], outputs: int
) -> tuple[Cells, Cells, Cells]:
    if len(inputs) < 3:
        none = points((outputs,), [ZERO] * outputs)
        return none, none, none
    bias = inputs[2]
    wide = any(lo != hi for lo, hi in bias.t.pairs + bias.i.pairs)
    if (wide and node.inputs[2] not in problem.keys) or bias.t.shape != (outputs,):
        raise Rejected("rule/weight", "the bias of a linear must be known and fit")
    return bias.t, bias.i, bias.d if wide else both(bias.i, bias.t, sub)


def _linear_error(
    kernel: KernelNumerics,
    x: Cells,
    w: Cells,
    b: Cells,
    early: Cells | None,
    clipped: list[Fraction],
) -> list[Fraction]:
    n, bias = x.shape[-1], b.mags
    sums = product(x.shape, x.mags, w.shape, w.mags)
    sizes = [s + bias[k % len(bias)] for k, s in enumerate(sums)]
    results = both(matmul(x, w), b, add).mags
    errors = _accumulated(kernel, sizes, results, n, kernel.before_sums)
    lost = _flushed(kernel, x.shape, x.mags, w.shape, w.mags)
    errors = [e + f + c for e, f, c in zip(errors, lost, clipped, strict=True)]
    errors = [e + _reduced(kernel, s, e) for e, s in zip(errors, sizes, strict=True)]
    if kernel.late:
        alone = results if early is None else early.mags
        late = _by_late_scales(kernel, x, w, alone, errors, early is not None)
        errors = [e + lost for e, lost in zip(errors, late, strict=True)]
    if early is None or kernel.stepped or not kernel.coarse:
        return errors
    u, least = kernel.units * Fraction(kernel.compute.u), kernel.units * eta(kernel.compute)
    again = 1 + 2 * Fraction(kernel.accumulate.u)  # the sum with the bias is rounded too
    return [e + again * (u * (m + e) + least) for e, m in zip(errors, early.mags, strict=True)]


def _by_late_scales(
    kernel: KernelNumerics,
    x: Cells,
    w: Cells,
    alone: Sequence[Fraction],
    errors: list[Fraction],
    biased: bool,
) -> list[Fraction]:
    """Return the error of linears whose scales multiply sums of codes, stored or not."""
    n, scale = x.shape[-1], max(w.mags) * (1 + _SMALL)
    outputs, most = w.shape[1], Fraction(kernel.accumulate.largest)
    faint, count = (2 * n + 8) * scale / 2**126, 0
    u, least = kernel.units * Fraction(kernel.compute.u), kernel.units * eta(kernel.compute)
    if kernel.late == "stored_sums":
        count, most = 2 if biased else 1, min(most, Fraction(kernel.compute.largest))
    wide = (n + 8) * Fraction(kernel.accumulate.u) > Fraction(1, 16)
    found = []
    for k, (value, error) in enumerate(zip(alone, errors, strict=True)):
        row = k // outputs * n
        codes = 2 * Fraction(kernel.most_code) * sum(x.mags[row : row + n])
        if wide or codes > most:
            raise Rejected("bound/overflow", "a sum of products with codes may overflow")
        cast = u * (1 + u) * (value + error + faint) + least * (1 + scale)
        found.append(faint + count * cast * (1 + Fraction(1, 64)))
    return found


def _reduced(kernel: KernelNumerics, size: Fraction, error: Fraction) -> Fraction:
    """Return the error of adding the stored parts of a sharded linear in the compute format."""
    if kernel.shards == 1:
        return ZERO
    factor = (1 + kernel.units * Fraction(kernel.compute.u)) ** (kernel.shards + 1) - 1
    tiny = 2 * (kernel.shards + 1) * (1 + factor) * kernel.units * eta(kernel.compute)
    lost = (size + error) * factor + tiny
    if size + error + lost > Fraction(kernel.compute.largest):
        raise Rejected("bound/overflow", f"a sum of parts may overflow {kernel.compute.name}")
    return lost


def _clipped(kernel: KernelNumerics, x: Cells, w: Cells, key: str) -> list[Fraction]:
    """Return the error of saturating pairs of byte products in 16 bits; `w` is [in, out]."""
    n, m = w.shape
    count = len(x.pairs) // n
    if not kernel.paired:
        return [ZERO] * (count * m)
    if any(lo != hi for lo, hi in w.pairs):
        raise Rejected("rule/weight", "sums of bytes in 16 bits with a weight that is not known")
    columns = [[w.pairs[i * m + j][0] for i in range(n)] for j in range(m)]
    tops = [max(abs(v) for v in column) for column in columns]
    if kernel.weights[1] == "per_tensor":
        tops = [max(tops)] * m
    last = 127 if kernel.weights[0] == "int8" else 128
    lost = []
    for column, top in zip(columns, tops, strict=True):
        limit = 32767 * top / last * (1 - _SMALL)
        sides = []
        for sign in (1, -1):
            falling = [*sorted((max(sign * v, ZERO) for v in column), reverse=True), ZERO]
            two = [falling[k] + falling[k + 1] for k in range(0, n, 2)]
            sides.append(sum((max(255 * t - limit, ZERO) for t in two), ZERO))
        lost.append(max(sides))
    steps = [by.scale[1] for by in quantisers(kernel, x, key)]
    rows = [max(steps[k * n : (k + 1) * n]) for k in range(count)]
    return [step * each * (1 + _SMALL) for step in rows for each in lost]


def _flushed(
    kernel: KernelNumerics, a: Shape, x: Sequence[Fraction], b: Shape, y: Sequence[Fraction]
) -> list[Fraction]:
    """Return the flush error: 2^-126·(Σ|a| + Σ|b| + 2n + 4) for compute coarser than float32.

    Add 2^-117·n where activations are quantised.
    """
    left = product(a, x, b, [Fraction(1)] * len(y))
    scaled = Fraction(a[-1], 2**117) if kernel.activations[0] != "none" else ZERO
    if not kernel.coarse and not kernel.shortened:
        return [scaled] * len(left)
    right = product(a, [Fraction(1)] * len(x), b, y)
    more = 2 * a[-1] + 4
    sums = [i + j + more for i, j in zip(left, right, strict=True)]
    return [s * (1 + _SMALL) / 2**126 + scaled for s in sums]


def _accumulated(
    kernel: KernelNumerics, sizes: Sequence[Fraction], results: Sequence[Fraction], k: int, j: int
) -> list[Fraction]:
    if kernel.other_unit is not None:
        raise Rejected("rule/unknown-op", "there is no exact rule for sums of matrix units")
    form = kernel.accumulate
    cut = Fraction(1, 2**9) + Fraction(1, 2**20) if kernel.shortened else ZERO
    short = [s * cut for s in sizes]
    sizes = [s + e for s, e in zip(sizes, short, strict=True)]
    results = [y + e for y, e in zip(results, short, strict=True)]
    each, lost = gamma(k + j, form.u) / (k + j), (k + j) * eta(form)
    pairs = zip(sizes, results, strict=True)
    errors = [each * (k * (s + y) / 2 + j * s) + lost for s, y in pairs]
    if any(s + e > Fraction(form.largest) for s, e in zip(sizes, errors, strict=True)):
        raise Rejected("bound/overflow", f"a partial sum may overflow {form.name}")
    return [e + more for e, more in zip(errors, short, strict=True)]


def _quantisation(kernel: KernelNumerics, x: Cells, key: str) -> list[Fraction]:
    """Return the quantisation error Q of the input of the linear with the weight `key`."""
    if kernel.activations[0] == "none":
        return [ZERO] * len(x.mags)
    static = kernel.activations[1] == "static"
    found = _calibrated(kernel, x, key) if static else _coded(kernel, x, key)
    return [error + Fraction(1, 2**133) for error in found]


def _calibrated(kernel: KernelNumerics, x: Cells, key: str) -> list[Fraction]:
    pairs = list(zip(x.mags, quantisers(kernel, x, key), strict=True))
    if kernel.activations[0] in INTEGERS:
        return [(min(m, q.scale[1] / 2) + m * _SMALL) * (1 + _SMALL) for m, q in pairs]
    return [_cast(CODES[q.kind].form, m, q.scale[1]) for m, q in pairs]


def _coded(kernel: KernelNumerics, x: Cells, key: str) -> list[Fraction]:
    kind, scale = kernel.activations
    sizes = x.mags
    if scale == "none":
        if max(sizes) > Fraction(CODES[kind].last):
            element = sizes.index(max(sizes))
            raise Rejected("bound/overflow", f"element {element} of an input may overflow {kind}")
        return [_cast(CODES[kind].form, size, Fraction(1)) for size in sizes]
    if scale == "nvfp4":
        return _nested(kernel, x, key)
    if kind == "uint8":
        ends, half = zip(*extents(x, scale), strict=True), Fraction(1, 2) + Fraction(1, 2**14)
        wide = [(above[1] + below[1]) / 255 for above, below in ends]
        return [(w * half + s * _SMALL) * (1 + _SMALL) for s, w in zip(sizes, wide, strict=True)]
    batch = Fraction(kernel.batch_amax)
    if scale == "per_batch" and max(sizes) > batch:
        raise Rejected("bound/overflow", "an element may exceed the batch's largest")
    most = [max(m, batch) for m in largest(sizes, x.shape, scale)]
    if scale == "mx":
        return _shifted(kind, x, most)
    return [_rounded(kernel, size, top) for size, top in zip(sizes, most, strict=True)]


def _rounded(kernel: KernelNumerics, size: Fraction, most: Fraction) -> Fraction:
    """Return Q of a number of at most `size` in a group of at most `most`."""
    kind, scale = kernel.activations
    full, limited = kind == "int8_full", kernel.amax_limit < math.inf
    limit = Fraction(kernel.amax_limit) if limited else most
    step = min(most, limit) / (Fraction(255, 2) if full else Fraction(CODES[kind].last))
    if LAYOUTS[scale].ceiled:
        step = max(2 * step, Fraction(2) ** LEAST_POWER)
    step = max(step, Fraction(kernel.least_scale), Fraction(1, 2**23) if full else ZERO)
    if kind == "int8":
        found = (step / 2 + size * _SMALL) * (1 + _SMALL)
    elif full:
        found = (min(size, step / 2) + size * _SMALL) * (1 + _SMALL)
    else:
        found = _cast(CODES[kind].form, size, step)
    if not limited:
        return found
    last = limit * (Fraction(254, 255) if full else 1) * (1 - _SMALL)
    return max(found, max(size - last, ZERO) + size * _SMALL)


def _shifted(kind: str, x: Cells, most: Sequence[Fraction]) -> list[Fraction]:
    """Return Q for scales of mx."""
    step = Fraction(1, 2 ** CODES[kind].exponent)
    kept = Fraction(CODES[kind].last) * step / 2
    least = largest([max(lo, -hi, ZERO) for lo, hi in x.pairs], x.shape, "mx")
    return [
        max(
            _cast(CODES[kind].form, s, max(m * step, Fraction(2) ** LEAST_POWER)),
            min(s * (1 - kept), max(s - kept * low * (1 - _SMALL), ZERO)) + s * _SMALL,
        )
        for s, m, low in zip(x.mags, most, least, strict=True)
    ]


def _nested(kernel: KernelNumerics, x: Cells, key: str) -> list[Fraction]:
    """Return Q for nested scales, which are multiples of one scale of the tensor."""
    kind, found = kernel.activations[0], []
    top, kept = Fraction(CODES[kind].last), Fraction(15, 16) * (1 - _SMALL)
    least = largest([max(lo, -hi, ZERO) for lo, hi in x.pairs], x.shape, "nvfp4")
    scales = zip(*nested(kernel, x, key), strict=True)
    for size, low, (tensor, step) in zip(x.mags, least, scales, strict=True):
        cut = max(
            min(size / 16, max(size - low * kept, ZERO)),
            min(size, tensor * top / 1024 * (1 + _SMALL)),
            size - tensor * top * Fraction(NESTED[1]) * (1 - _SMALL),
        )
        found.append(max(_cast(CODES[kind].form, size, step), cut + size * _SMALL))
    subnormal = Fraction(1, 2**113) if kernel.static is None else ZERO
    return [error + subnormal for error in found]


def _cast(form: Format, size: Fraction, scale: Fraction) -> Fraction:
    return (Fraction(form.u) * size + scale * eta(form)) * (1 + _SMALL)


def middle(a: Known) -> Cells:
    """Return a box of (a_t + a_i)/2."""
    one = both(a.t, a.d.each(_half), add)
    return both(one, both(a.t, a.i, add).each(_half), meet)


def _half(pair: Pair) -> Pair:
    return pair[0] / 2, pair[1] / 2


def matmul_rule(problem: DriftProblem, node: Node, inputs: list[Known]) -> Known:
    """Return a @ b of two computed matrices."""
    node.attrs.exactly()
    a, b = inputs
    n = a.t.shape[-1]
    d = both(matmul(middle(a), b.d), matmul(a.d, middle(b)), add)
    errors = []
    for kernel, left, right in ((problem.train, a.t, b.t), (problem.infer, a.i, b.i)):
        sizes = product(left.shape, left.mags, right.shape, right.mags)
        k, j = n, 2
        if kernel.fused and node.role == "scores":
            j = 6
        elif kernel.fused and node.role == "context":
            k = n + 2 * -(-n // kernel.tile) + 4
        lost = _flushed(kernel, left.shape, left.mags, right.shape, right.mags)
        results = matmul(left, right).mags
        sums = _accumulated(kernel, sizes, results, k, j)
        errors.append([e + f for e, f in zip(sums, lost, strict=True)])
    inner = problem.train.accumulate, problem.infer.accumulate
    exact = matmul(a.t, b.t), matmul(a.i, b.i), d
    return settle(problem, node, exact, (errors[0], errors[1]), inner)
