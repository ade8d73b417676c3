"""Exact results of operations, their inner roundings, and errors and orders of accumulation.

The formulas of roundings are those of docs/proofs/relational-interval.md (sections 4 to 6), taken
at the values of one run instead of a box. As in docs/proofs/affine-forms.md, a row of a norm has
one mean and one inverse root. A batch of runs has a leading dimension, which values that all runs
share may lack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node, View
from kcdsl.model.numerics import Numerics
from kcdsl.model.numerics.formats import FORMATS, Format
from kcdsl_backends.drift.boxes import NoBound, gamma
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.ops import POINTWISE
from kcdsl_backends.drift.ops.norms.written import parts_of, written

MOVES = frozenset({"view", "concat"})
"""The operations of `moved`."""
_LEAVES = frozenset({"param", "constant"})
_PAIRED = frozenset({"add", "sub", "mul", "matmul", "rope"})
"""Operations that broadcast one operand against another."""


def moved(node: Node, operands: Sequence[Tensor], sources: Sequence[Node]) -> Tensor:
    """Return the value of one of `MOVES`; `sources` are the nodes of its operands."""
    fronts = [x.dim() - len(source.shape) for x, source in zip(operands, sources, strict=True)]
    if node.op == "view":
        return View.of(node).moved(operands[0], fronts[0])
    most = operands[fronts.index(max(fronts))]
    count = most.shape[: max(fronts)]
    whole = [
        x.expand(*count, *x.shape[before:]) for x, before in zip(operands, fronts, strict=True)
    ]
    return torch.cat(whole, int(node.attrs["dim"]) % len(sources[0].shape) + len(count))


def batchable(graph: BlockGraph) -> bool:
    """Return whether runs can be batched: operands that are broadcast against each other have the
    same number of dimensions, so that the batch dimension stays the first."""
    nodes = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        if node.op not in _PAIRED:
            continue
        ranks = {len(nodes[name].shape) for name in node.inputs if nodes[name].op not in _LEAVES}
        leaves = [len(nodes[name].shape) for name in node.inputs if nodes[name].op in _LEAVES]
        if len(ranks) > 1 or any(rank > min(ranks, default=rank) for rank in leaves):
            return False
    return True


# --- exact results -----------------------------------------------------------------------------


def exact(graph: BlockGraph, node: Node, operands: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Return the exact result of an operation; its row sums are those of `rows`."""
    attrs, count = node.attrs, len(node.inputs)
    match node.op:
        case "linear":
            y = operands[0] @ operands[1].T
            return y + operands[2] if count > 2 else y
        case "matmul":
            return operands[0] @ operands[1]
        case "add":
            return operands[0] + operands[1]
        case "sub":
            return operands[0] - operands[1]
        case "mul":
            return operands[0] * operands[1]
        case "scale":
            return operands[0] * float(attrs["factor"])
        case "divide":
            return operands[0] / float(attrs["divisor"])
        case "shift":
            return operands[0] + float(attrs["offset"])
        case "cast" | "route":
            return operands[0]
        case "softmax":
            return probabilities(masked(operands[0], operands), masked(rows, operands))
        case "rms_norm" | "layer_norm":
            y = normalised(node, operands[0], rows)
            y = y * operands[1] if count > 1 else y
            return y + operands[2] if count > 2 else y
        case "silu":
            return operands[0] * torch.sigmoid(rows)
        case "rope":
            x, half = operands[0], node.shape[-1] // 2
            turned = torch.cat([-x[..., half:], x[..., :half]], -1)
            return x * operands[1] + turned * operands[2]
        case "embedding":
            ids = torch.tensor(attrs["ids"], device=operands[0].device)
            return operands[0][ids].reshape(node.shape)
        case op if op in MOVES:
            sources = [graph.node(name) for name in node.inputs]
            return moved(node, operands, sources)
        case _:
            return POINTWISE[node.op].value(operands[0], node)


def factors(node: Node, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the two factors of a matrix product, and the bias of a linear."""
    if node.op == "matmul":
        return operands[0], operands[1], None
    return operands[0], operands[1].T, operands[2] if len(operands) > 2 else None


def masked(scores: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """Return scores with -inf where the mask of a softmax forbids a column."""
    return scores if len(operands) < 2 else scores.masked_fill(~operands[1], -torch.inf)


# --- roundings inside of operations ------------------------------------------------------------

NORMS = frozenset({"layer_norm", "rms_norm"})
"""Operations with one rounding of the inverse root for each row."""
ROUNDED = frozenset(name for name, found in POINTWISE.items() if found.error is not None)
"""Functions of single numbers whose results are rounded."""
ELEMENTWISE = NORMS | {"add", "sub", "mul", "scale", "divide", "shift", "rope"} | ROUNDED
"""Operations with a rounding inside of every element."""


def normalised(node: Node, x: Tensor, rows: Tensor) -> Tensor:
    """Return x normalised, before the gain, with mean and root of `rows`."""
    c = x - rows.mean(-1, keepdim=True) if node.op == "layer_norm" else x
    return c * inverse_root(node, rows)


def probabilities(scores: Tensor, rows: Tensor) -> Tensor:
    """Return e^scores over the sums of e^rows; -inf where a mask forbids a column."""
    most = rows.detach().amax(-1, keepdim=True)
    return (scores - most).exp() / (rows - most).exp().sum(-1, keepdim=True)


def element_error(node: Node, value: Tensor, operands: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Return the error bound of each element in units of u_f, at the values of this run; mean and
    root of a norm are those of `rows`."""
    match node.op:
        case "add" | "sub" | "mul":
            return value.abs()
        case "scale" | "divide":
            return 3 * value.abs()
        case "shift":
            return value.abs() + abs(float(node.attrs["offset"]))
        case "rope":
            return 4 * turned_sizes(operands)
        case "layer_norm" | "rms_norm":
            return _norm_elements(node, value, operands, rows)
        case _:
            error = POINTWISE[node.op].error
            if error is None:
                raise ValueError(f"{node.op} has no rounding of its elements")
            return error(operands[0], value)


def turned_sizes(operands: Sequence[Tensor]) -> Tensor:
    """Return P = |x|·|cos| + |turned x|·|sin| of a rope."""
    x, half = operands[0].abs(), operands[0].shape[-1] // 2
    turned = torch.cat([x[..., half:], x[..., :half]], -1)
    return x * operands[1].abs() + turned * operands[2].abs()


def written_error(
    node: Node, x: Tensor, rows: Tensor, kernel: Rounding, moved: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Return the error of a norm composed of elementary operations, before its gain: the errors of
    the inverse root, the mean and every element times their symbols in `moved`. Mean and root are
    those of `rows`. Return 0 if there is no bound."""
    r = inverse_root(node, rows)
    v = r.square().reciprocal()
    mean = torch.zeros_like(r) if node.op == "rms_norm" else rows.mean(-1, keepdim=True)
    c, y = rows - mean, normalised(node, x, rows)
    try:
        found = written(node, kernel, rows.abs(), c.abs(), mean.abs(), v, v, torch.zeros_like(x))
    except NoBound:
        return torch.zeros_like(x)
    each, row, root = moved
    return root * found.theta * y + row * found.mean * r + each * found.apart(y.abs(), r)


def _norm_elements(node: Node, value: Tensor, operands: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Return 5|y·gain| + 3|bias|, plus 4|x·r·gain| for a layer norm."""
    bias = operands[2] if len(operands) > 2 else torch.zeros_like(value[..., :1])
    size = 5 * (value - bias).abs() + 3 * bias.abs()
    if node.op == "rms_norm":
        return size
    gain = operands[1].abs() if len(operands) > 1 else 1.0
    return size + 4 * operands[0].abs() * inverse_root(node, rows) * gain


def inverse_root(node: Node, x: Tensor) -> Tensor:
    """Return r [..., 1], the exact inverse root of a norm."""
    eps = float(node.attrs["eps"])
    if node.op == "rms_norm":
        return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return torch.rsqrt(x.var(-1, correction=0, keepdim=True) + eps)


def mean_error(node: Node, x: Tensor, numerics: Numerics) -> Tensor:
    """Return the error bound [..., 1] of y = (x - mean)·r due to the rounded mean of a row."""
    off = gamma(x.shape[-1] + 6, numerics.function_format.unit_roundoff) * x.abs().mean(
        -1, keepdim=True
    )
    return off * inverse_root(node, x)


def root_error(node: Node, x: Tensor, numerics: Numerics) -> Tensor:
    """Return θ [..., 1], the relative error bound of a norm's inverse root; 0 if there is none."""
    u = numerics.function_format.unit_roundoff
    n = x.shape[-1]
    if node.op == "rms_norm":
        return torch.full_like(x[..., :1], gamma(n + 3, u) + 8 * u)
    variance = x.var(-1, correction=0, keepdim=True) + float(node.attrs["eps"])
    kappa = 4 * gamma(n + 6, u) * x.square().mean(-1, keepdim=True) / variance
    theta = (1 + 8 * u) / torch.sqrt((1 - kappa).clamp_min(2.0**-20)) - 1
    return torch.where(kappa < 1 - 2.0**-20, theta, torch.zeros_like(theta))


def probability_error(scores: Tensor, numerics: Numerics) -> Tensor:
    """Return Θ [..., 1], the relative error bound of probabilities before they are stored.

    `scores` are those of the run, -inf where a mask forbids a column; Θ is 0 if there is no bound.
    """
    attention, u, columns = (
        numerics.attention,
        numerics.function_format.unit_roundoff,
        scores.shape[-1],
    )
    allowed = torch.isfinite(scores)
    known = torch.where(allowed, scores, torch.zeros_like(scores))
    highest = scores.amax(-1, keepdim=True)
    argument = torch.where(allowed, highest - known, torch.zeros_like(known)).amax(-1, keepdim=True)
    if attention.fused:
        argument = argument + 2 * known.abs().amax(-1, keepdim=True)
    exponential, one = 2 * attention.exp_ulps * u, u / (1 - u)
    each = u * argument + exponential / (1 - exponential) + one
    total = 2 * attention.tiles(columns) * each + (columns + 8) * one
    stored = FORMATS[attention.probabilities]
    if attention.fused and stored.coarse:
        roundoff = numerics.cast.unit(stored)
        lost = (1 + roundoff) * columns * numerics.cast.faint(stored)
        if lost >= 1:
            return torch.zeros_like(total)
        total = total + roundoff / (1 - roundoff) + lost / (1 - lost)
    return torch.expm1(total)


def rounded_inside(
    node: Node,
    value: Tensor,
    symbols: Mapping[str, Tensor],
    operands: Sequence[Tensor],
    rows: Tensor,
    kernel: Rounding,
    form: Format,
) -> Tensor:
    """Add the roundings inside of an operation to its exact result.

    Args:
        symbols: those of "mean", "root", "inside" and "early" that the operation has.
        rows: operand of the mean and root of a norm, or of the row sums of a softmax.
        kernel: numerics of the operation and of its kernel.
        form: the format of the result.
    """
    named = dict(symbols)
    numerics = kernel.numerics
    biased = node.op in (*NORMS, "linear") and len(operands) > 2
    bias = operands[2] if biased else torch.zeros_like(value[..., :1])
    exact = value
    if parts_of(node):
        nothing = torch.zeros_like(operands[0][..., :1])
        named.pop("inside", None)  # counted with the parts
        moved = tuple(named.pop(kind, nothing) for kind in ("early", "mean", "root"))
        x = operands[0]
        gain = operands[1] if len(operands) > 1 else 1.0
        shifts = moved[0], moved[1], moved[2]
        value = value + gain * written_error(node, x, rows, kernel, shifts)
    if "mean" in named:
        gain = operands[1] if len(operands) > 1 else 1.0
        value = value + named["mean"] * mean_error(node, rows, numerics) * gain
    if "root" in named:
        theta = root_error(node, rows, numerics)
        value = value + named["root"] * theta * (value - bias)
    if "inside" in named and node.op == "softmax":
        theta = probability_error(masked(rows, operands), numerics)
        value = value + named["inside"] * theta * value
    elif "inside" in named:
        size = element_error(node, exact, operands, rows).detach()
        value = value + named["inside"] * numerics.function_format.unit_roundoff * size
    if "early" in named:
        stored = turned_sizes(operands) if node.op == "rope" else value - bias
        stored_in = form if node.op == "silu" else kernel.compute
        roundoff = stored_in.unit_roundoff
        if kernel.own.cast.toward_zero:  # both products of a rope lose the same share
            value = value - roundoff * (1 + named["early"]) * (value - bias)
        else:
            value = value + kernel.own.cast.units * roundoff * named["early"] * stored
    return value


_ELEMENTS = 2**24
"""Limit of the products that are in memory at once."""


def straight_through(x: Tensor, step: Callable[[Tensor], Tensor]) -> Tensor:
    """Round by a step function; gradients pass through unchanged."""
    still = x.detach()
    return x + (step(still) - still)


def sum_error(
    total: Tensor, exact: Tensor, format: Format, roundings: int, before: int = 2
) -> Tensor:
    """Return A_k,j(Σ|terms|, sum) without its share of underflow; 0 where there is no bound.

    Args:
        total: Σ|terms|.
        exact: the exact sum.
        roundings: k, of partial sums.
        before: j, of a term before it is added.
    """
    u = format.unit_roundoff
    if (roundings + before) * u >= 1:
        return torch.zeros_like(total)
    size = roundings * (total + exact.abs()) / 2 + before * total
    return size * (u / (1 - (roundings + before) * u))


def ordered_product(
    left: Tensor, right: Tensor, bias: Tensor | None, accumulator: str, order: str
) -> Tensor:
    """Return left @ right (+ bias), summed in one of `ORDERS`.

    Args:
        left, right: [..., m, n] and [..., n, p], float64, leading dimensions alike or absent.
        bias: [p], added after the products.
        accumulator: format of partial sums, coarser than float64.

    Raises:
        ValueError: the order is unknown.
    """
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}")
    format = FORMATS[accumulator]
    heads = (left[..., :1, :1] * right[..., :1, :1]).shape[:-2]
    a = left.expand(*heads, *left.shape[-2:]).reshape(-1, *left.shape[-2:])
    b = right.expand(*heads, *right.shape[-2:]).reshape(-1, *right.shape[-2:])
    parts = [_rows(one, two, bias, format, order) for one, two in zip(a, b, strict=True)]
    return torch.stack(parts).reshape(*heads, left.shape[-2], right.shape[-1])


def _rows(a: Tensor, b: Tensor, bias: Tensor | None, format: Format, order: str) -> Tensor:
    step = max(1, _ELEMENTS // b.numel())
    done = []
    for start in range(0, a.shape[0], step):
        terms = a[start : start + step, :, None] * b  # in float64: as good as fused
        done.append(ORDERS[order](terms.movedim(1, 0), format))
    result = torch.cat(done)
    return result if bias is None else straight_through(result + bias, format.nearest)


def _one_by_one(terms: Iterator[Tensor], format: Format) -> Tensor:
    total = straight_through(next(terms), format.nearest)
    for term in terms:
        total = straight_through(total + term, format.nearest)
    return total


def _by(key: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Format], Tensor]:
    """Return a summation in increasing order of `key`, element by element."""

    def summed(terms: Tensor, format: Format) -> Tensor:
        order = key(terms).argsort(dim=0, stable=True)
        return _one_by_one(iter(terms.gather(0, order)), format)

    return summed


def _pairwise(terms: Tensor, format: Format) -> Tensor:
    level = straight_through(terms, format.nearest)
    while level.shape[0] > 1:
        rest = level[level.shape[0] // 2 * 2 :]
        pairs = straight_through(level[0 : level.shape[0] - 1 : 2] + level[1::2], format.nearest)
        level = torch.cat([pairs, rest])
    return level[0]


ORDERS: Mapping[str, Callable[[Tensor, Format], Tensor]] = {
    "forward": lambda terms, format: _one_by_one(iter(terms), format),
    "backward": lambda terms, format: _one_by_one(iter(terms.flip(0)), format),
    "pairwise": _pairwise,
    "growing": _by(lambda terms: terms.abs()),
    "falling": _by(lambda terms: -terms.abs()),
    "positive first": _by(lambda terms: -torch.sign(terms)),
    "negative first": _by(lambda terms: torch.sign(terms)),
}
"""Orders by name: [n, m, p] terms and a format -> [m, p]."""
