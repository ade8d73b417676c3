"""Linears in every domain (section 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import Adjoint, reads_one_each, same
from kcdsl_certs.recheck.affine.before_casts import asked
from kcdsl_certs.recheck.affine.ellipsoids import LinearImage, WeightNorms
from kcdsl_certs.recheck.affine.form import Form, Operand, Origin, Walk, form_of, product_raised
from kcdsl_certs.recheck.affine.independent import of_sum, only_sure
from kcdsl_certs.recheck.affine.many_rows import Weighted
from kcdsl_certs.recheck.affine.result_rounding import Early, Formed, round_result
from kcdsl_certs.recheck.affine.tape import VJP, Shared, TapeEntry, reads_many
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval import box, quantisers
from kcdsl_certs.recheck.interval.box import TINY, UNIT, Box, Floats, magnitude, raised
from kcdsl_certs.recheck.interval.state import (
    DriftProblem,
    Own,
    State,
    Value,
    gamma,
    numeric,
    pinned,
    settle,
    target,
)
from kcdsl_certs.recheck.interval.sums import by_late_scales, clipped, reduced, rounding_of_sums
from kcdsl_certs.recheck.interval.weight_ball import alike
from kcdsl_certs.recheck.linear_bounds.context import (
    SPARE,
    Added,
    Context,
    PairOrigin,
    Reading,
    flat_product,
)
from kcdsl_certs.recheck.linear_bounds.tape import FunctionalBatch, joined
from kcdsl_certs.recheck.numerics.formats import CODES, layout_of
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from kcdsl_certs.recheck.ops.leaves import around, held, known
from kcdsl_certs.recheck.ops.linear import bilinear
from kcdsl_certs.recheck.ops.linear.quantised_inputs import quantisation, quantised
from kcdsl_certs.recheck.ops.operation import Operation


def linear_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return x @ weight.T + bias."""
    node.attrs.exactly()
    key = problem.keys.get(node.inputs[1])
    if key is None:
        raise Rejected("rule/weight", "the weight of a linear must be a parameter")
    x, shape = numeric(inputs[0]), problem.parameters.shape(key)
    if len(shape) != 2 or len(x.shape) < 2 or x.shape[-1] != shape[1]:
        raise Rejected("graph/shape", "the input does not fit the weight")
    bias = _bias(problem, node, inputs, shape[0])
    x_t, away_t = _entering(problem.train, x.t, key)
    x_i, away_i = _entering(problem.infer, x.i, key)
    drift = box.add(x.d, box.sub(away_i, away_t))
    if problem.train.coded_inputs or problem.infer.coded_inputs:
        drift = box.meet(drift, box.sub(x_i, x_t))
    inner = problem.train.accumulate, problem.infer.accumulate
    entering, biased = (x, x_t, x_i, drift), len(inputs) == 3
    parts = () if problem.rho else problem.parameters.parts(key, problem.train, problem.infer)
    if not parts:
        found = _products(problem, key, held(problem, key, linear=True), entering, bias, biased)
        return settle(problem, node, found.exact, found.errors, inner, own=found.own)
    each = []
    for rows in parts:
        weight = known(*problem.parameters.rows(key, rows, problem.train, problem.infer))
        t, i, d = (part.map(itemgetter(rows)) for part in bias)
        each.append(_products(problem, key, weight, entering, (t, i, d), biased))
    found = _joined(each)
    return settle(problem, node, found.exact, found.errors, inner, own=found.own)


@dataclass(frozen=True, slots=True)
class _Products:
    """Both results of a linear and their difference before they are stored, the errors inside, and
    the part of these from a cast before a bias."""

    exact: tuple[Box, Box, Box]
    errors: tuple[Floats, Floats]
    own: tuple[Own, Own]


def _joined(parts: list[_Products]) -> _Products:
    """Return results of some rows of a weight each as one."""

    def boxed(place: int) -> Box:
        ends = [part.exact[place] for part in parts]
        if all(end.point for end in ends):
            return box.exact(np.concatenate([end.lo for end in ends], -1))
        return Box(*(np.concatenate(e, -1) for e in ([b.lo for b in ends], [b.hi for b in ends])))

    def owned(side: int) -> Own:
        found = [part.own[side] for part in parts]
        some = [part for part in found if part is not None]
        return np.concatenate(some, -1) if len(some) == len(found) else None

    errors = [np.concatenate([part.errors[side] for part in parts], -1) for side in (0, 1)]
    return _Products((boxed(0), boxed(1), boxed(2)), (errors[0], errors[1]), (owned(0), owned(1)))


def _products(
    problem: DriftProblem,
    key: str,
    weight: State,
    entering: tuple[State, Box, Box, Box],
    bias: tuple[Box, Box, Box],
    biased: bool,
) -> _Products:
    """Return the results of a linear for rows of its weight.

    `entering` are the input, the inputs of both kernels after quantisation, and the drift of these.
    """
    x, x_t, x_i, drift = entering
    w_t, w_i, w_d = (part.map(np.transpose) for part in (weight.t, weight.i, weight.d))
    products = box.matmul(x_t, w_t), box.matmul(x_i, w_i)
    y_t, y_i = box.add(products[0], bias[0]), box.add(products[1], bias[1])
    d = box.add(box.matmul(drift, w_i), box.matmul(x_t, w_d))
    d = box.add(d, bias[2])
    sizes = (
        _size(x_t, w_t, bias[0], y_t),
        _size(x_i, w_i, bias[1], y_i),
    )
    lost_t = clipped(problem.train, x.t, weight.t, key)
    lost_i = clipped(problem.infer, x.i, weight.i, key)
    error_t, own_t = _error(
        problem.train, x_t, w_t, sizes[0], products[0] if biased else None, key, lost_t
    )
    error_i, own_i = _error(
        problem.infer, x_i, w_i, sizes[1], products[1] if biased else None, key, lost_i
    )
    return _Products((y_t, y_i, d), (error_t, error_i), (own_t, own_i))


def _entering(kernel: KernelNumerics, x: Box, key: str) -> tuple[Box, Box]:
    """Return a linear's input after its quantisation, and its error."""
    return quantisers.quantised(kernel, x, quantisation(kernel, x, key), key)


def _bias(
    problem: DriftProblem, node: Node, inputs: list[Value], outputs: int
) -> tuple[Box, Box, Box]:
    """Return the bias of both kernels and its drift: known numbers, or a parameter."""
    if len(inputs) < 3:
        return box.zeros((outputs,)), box.zeros((outputs,)), box.zeros((outputs,))
    bias = numeric(inputs[2])
    if not (bias.t.point and bias.i.point) and node.inputs[2] not in problem.keys:
        raise Rejected("rule/weight", "the bias of a linear must be known")
    if bias.shape != (outputs,):
        raise Rejected("graph/shape", "the bias does not fit the weight")
    if bias.t.point and bias.i.point:
        return bias.t, bias.i, box.sub(bias.i, bias.t)
    return bias.t, bias.i, bias.d


def _size(x: Box, weight: Box, bias: Box, y: Box) -> tuple[Floats, Floats]:
    """Return the magnitudes of all terms, summed, and of their sum; `weight` is [in, out]."""
    terms = box.product_up(box.mag(x), box.mag(weight))
    return box.up(terms + box.mag(bias)), box.mag(y)


def _error(
    kernel: KernelNumerics,
    x: Box,
    weight: Box,
    size: tuple[Floats, Floats],
    early: Box | None,
    key: str,
    lost: Floats | float,
) -> tuple[Floats, Own]:
    """Return E of a linear, and its part from a cast of the product `early` before a bias.

    `lost` bounds the error of sums in 16 bits.
    """
    factors = box.mag(x), box.mag(weight)
    dynamic, before = kernel.coded_inputs, kernel.before_sums
    error = rounding_of_sums(kernel, factors, size, before=before, dynamic=dynamic, key=key)
    error = box.up(error + lost)
    error = box.up(error + reduced(kernel, size[0], error))
    if kernel.late:
        whole = box.mag(early) if early is not None else size[1]
        late = by_late_scales(kernel, factors, size[0], whole, error, early is not None)
        error = box.up(error + late)
    if early is not None and not kernel.stepped and kernel.coarse:
        u, eta = kernel.off(kernel.compute)
        cast = u * box.up(box.mag(early) + error) + eta
        # the sum with the bias has this error in its operand, and in its own rounding
        own = box.up(cast * (1 + 2 * kernel.accumulate.u))
        return box.up(error + own), own
    return error, None


def linear_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return x @ weight.T + bias."""
    node.attrs.exactly()
    kernel = walk.kernel
    key = walk.problem.keys.get(node.inputs[1])
    if key is None:
        raise Rejected("rule/weight", "the weight of a linear must be a parameter")
    weight = walk.problem.parameters.linear(key, kernel)
    before = form_of(inputs[0])
    if len(before.shape) < 2 or before.shape[-1] != weight.shape[1]:
        raise Rejected("graph/shape", "the input does not fit the weight")
    bias, around_bias = _bias_affine(walk, node, inputs, weight.shape[0])
    x = _quantised_affine(walk, before, key)
    n = weight.shape[1]
    size_w, turned = np.abs(weight), weight.T
    product = x.reference @ turned
    carried = (
        product_raised(x.error_bound, size_w.T) if x.place is not None else np.zeros(product.shape)
    )
    spread = _spread(walk, key, weight)
    pushed = np.zeros(product.shape) if spread is None else product_raised(x.size, spread.T)
    size_all = size_w if spread is None else raised(size_w + spread)
    terms = product_raised(x.size, box.lifted(size_all).T)
    total = terms if bias is None else raised(terms + np.abs(bias) + around_bias)
    reference = product if bias is None else product + bias
    own = raised(total * gamma(n + 4, UNIT)) + TINY
    alone, shared = own, None
    if spread is not None:  # the whole effect of other weights and biases
        own = raised(own + pushed + around_bias)
        shared = _shared(walk, node, x, spread, around_bias)
    result = raised(np.abs(reference) + carried + own)
    factors, sizes = (x.size, box.lifted(size_all).T), (box.lifted(total), box.lifted(result))
    dynamic = kernel.coded_inputs
    early_on = kernel.before_sums
    error = rounding_of_sums(kernel, factors, sizes, before=early_on, dynamic=dynamic, key=key)
    split = of_sum(kernel, factors, sizes, error, before=early_on, dynamic=dynamic)
    if kernel.paired:
        if spread is not None:
            raise Rejected("rule/weight", "sums of bytes with weights that are not known")
        lost = clipped(kernel, before.box, box.exact(weight), key) + np.zeros(error.shape)
        error, split = raised(error + lost), split.with_sure(lost)
    if kernel.shards > 1:
        parts = raised(reduced(kernel, sizes[0], error) + np.zeros(error.shape))
        error, split = raised(error + parts), split.with_sure(parts)
    if kernel.late:
        alone_sum = raised(np.abs(product) + carried + own)
        biased = bias is not None
        late = raised(by_late_scales(kernel, factors, sizes[0], alone_sum, error, biased))
        error, split = raised(error + late), split.with_sure(late)
    terms_back = gamma(weight.shape[0] + 8, UNIT)  # the reverse pass sums over the outputs
    early = None
    if bias is not None and not kernel.stepped and kernel.coarse:
        # the sum with the bias rounds numbers that include the error of this cast
        u, eta = ((1 + 2 * kernel.accumulate.u) * part for part in kernel.off(kernel.compute))
        cast = raised(u * (np.abs(product) + carried + own + error))
        early = Early(u, raised(u * np.abs(product)) + eta, raised(cast) + eta)
        split = split.with_cast(kernel, cast, eta)
    formed = Formed(
        reference,
        carried,
        () if x.place is None else ((x.place, _through(weight)),),
        raised(own + terms_back * carried + error),
        split=split.with_sure(own + terms_back * carried),
        early=early,
    )
    if x is before:
        formed = replace(formed, image=_by_norms(walk, node, formed, weight))
    if shared is not None:
        rest = raised(alone + shared.rest + terms_back * carried + error)
        formed = replace(formed, shared=replace(shared, rest=rest))
    form = round_result(walk, node, formed, target(kernel, node), kernel.accumulate, sums=True)
    entry = None if form.place is None else walk.tape.entries[form.place]
    if entry is None or entry.kept is not None or not entry.operands or x is not before:
        return form
    below = walk.tape.entries[entry.operands[0][0]].rows
    plain = len(form.shape) == 2 and reads_many(form.shape, n)
    if below is not None and plain and form.place is not None:
        entry = replace(entry, weighted=Weighted(weight, below))
        walk.tape.entries[form.place] = entry
    rest = raised(bilinear.radius_of(entry))
    version = walk.versions.get(node.name)
    rest = rest if version is None else raised(rest + version.own)
    index = np.arange(form.reference.size).reshape(form.shape)
    rest = rest.reshape(-1, weight.shape[0])
    plain = entry.centre is None and entry.apart is None
    place = form.place if version is None else None
    far = formed.image is not None and formed.image.far
    norms = formed.image.norms if formed.image is not None and far else None
    origin = Origin(weight, node.inputs[0], rest, index, plain, place, norms)
    return replace(form, origin=origin)


def _by_norms(walk: Walk, node: Node, formed: Formed, weight: Floats) -> LinearImage | None:
    """Return the bounds of a large linear by norms of its input, `far` if its error bound is far
    above its result in some row: a prover makes no passes for it. None of others."""
    tape = walk.tape
    if not formed.operands or weight.size < _SOME or walk.kernel.stepped or tape.budget is not None:
        return None
    lengths = tape.entries[formed.operands[0][0]].length
    ratio = _FAR_OF_TRAINING if walk.trained else _FAR
    sizes = ratio * np.abs(formed.reference).sum(axis=-1)
    far = weight.size >= _MANY and bool((formed.loose.sum(axis=-1) > sizes).any())
    named = any(part.any() for part in asked(walk, node.name, "norm", formed.reference.shape))
    if lengths is None or not (far or named):
        return None
    return LinearImage(WeightNorms.of(weight), lengths, formed.radius, far)


def _shared(
    walk: Walk, node: Node, x: Form, spread: Floats, around_bias: Floats | float
) -> Shared | None:
    """Return the effect Δc + Δ_bias of other weights on both kernels, and the rest.

    c is the reference of the kernel that was walked first. None if the kernels store weights
    differently; the effect of a bias that they store differently is part of the rest.
    """
    kernels = walk.problem.train, walk.problem.infer
    if not alike(kernels, linear=True):
        return None
    c = walk.first.setdefault(node.name, x.reference)
    size = product_raised(np.abs(c), spread.T)
    rest = product_raised(raised(np.abs(x.reference - c) + x.error_bound), spread.T)
    if alike(kernels, linear=False):
        return Shared(node.name, raised(size + around_bias), rest)
    return Shared(node.name, size, raised(rest + around_bias))


def _spread(walk: Walk, key: str, weight: Floats) -> Floats | None:
    """Return a bound of |other weights of the region - these|; None without a region."""
    if not walk.problem.rho:
        return None
    wide = held(walk.problem, key, linear=True)
    return around(weight, wide.t if walk.kernel is walk.problem.train else wide.i)


def _bias_affine(
    walk: Walk, node: Node, inputs: list[Operand], outputs: int
) -> tuple[Floats | None, Floats | float]:
    """Return the bias, and how far that of other weights may be from it."""
    if len(inputs) < 3:
        return None, 0.0
    bias = form_of(inputs[2])
    moves = bool(walk.problem.rho) and node.inputs[2] in walk.problem.keys
    if bias.place is not None and not moves:
        raise Rejected("rule/weight", "the bias of a linear must be known")
    if bias.shape != (outputs,):
        raise Rejected("graph/shape", "the bias does not fit the weight")
    return bias.reference, bias.error_bound if moves else 0.0


def _quantised_affine(walk: Walk, x: Form, key: str) -> Form:
    """Return the quantised input as a separate entry; x itself if it is not quantised."""
    if not walk.kernel.coded_inputs:
        return x
    radius = raised(quantisation(walk.kernel, x.box, key)) + TINY
    if walk.kernel.stepped:
        return quantised(walk, x, radius, key)
    error_bound = raised(x.error_bound + radius)
    operands = () if x.place is None else ((x.place, _same),)
    split = only_sure(radius)
    code, layout = CODES[walk.kernel.activations[0]], layout_of(walk.kernel.activations[1])
    uncut = walk.kernel.amax_limit == math.inf
    if uncut and not (layout.floored or layout.nested or code.shifted or code.full):
        split = only_sure(np.zeros(radius.shape)).with_one(radius)
    entry = TapeEntry(error_bound, operands, radius, split=split)
    return Form(x.reference, error_bound, walk.tape.add(entry))


def _same(adjoint: Adjoint) -> Adjoint:
    return adjoint


_SOME, _MANY = 2**20, 2**21  # weights: for norms of rows, and for far more than the result
_FAR, _FAR_OF_TRAINING = 7.5, 0.95  # ratios of error bound and result, less than those of a prover
_HELD = 2**22  # numbers in cached products, beside the last one


def _through(weight: Floats) -> VJP:
    """Return the pullback of x @ weight.T, which caches its last products for single rows: those of
    other rows are often the same."""
    last: list[tuple[Floats, slice, Floats]] = []

    def vjp(adjoint: Adjoint) -> Adjoint:
        columns = adjoint.window[-1]
        alone = adjoint.values.size == adjoint.batch * adjoint.extent[-1]
        flat = adjoint.values.reshape(-1, adjoint.extent[-1])
        known = [one[2] for one in last if one[1] == columns and same(one[0], flat)]
        if known:
            found = known[0]
        else:
            while last and sum(one[2].size for one in last) > _HELD:
                del last[0]
            if alone and reads_one_each(flat):
                found = np.diagonal(flat)[:, None] * weight[columns]
            else:
                found = _product(flat, weight[columns])
            if alone:
                last.append((flat.copy(), columns, found))
        values = found.reshape(adjoint.batch, *adjoint.extent[:-1], weight.shape[1])
        return Adjoint(values, (*adjoint.start[:-1], 0))

    return vjp


def _product(functionals: Floats, weight: Floats) -> Floats:
    """Return functionals times a weight; those that are zero take no time."""
    some = functionals.any(axis=-1)
    if some.all():
        return np.asarray(functionals @ weight)
    found = np.zeros((len(functionals), weight.shape[1]))
    found[some] = functionals[some] @ weight
    return found


def linear_bounds(context: Context, node: Node) -> None:
    """Write x @ weight.T + bias: e is W_t e, D is W_i D + (W_i - W_t) e, plus own terms."""
    problem = pinned(context.problem, node)
    key = problem.keys.get(node.inputs[1])
    if key is None:
        raise Rejected("rule/weight", "the weight of a linear must be a parameter")
    train = problem.parameters.linear(key, problem.train)
    infer = problem.parameters.linear(key, problem.infer)
    x = _quantised_bounds(context, node, key)
    change = infer - train
    moves = bool(change.any())
    reference, known = x.reference @ train.T, x.reference @ change.T
    sizes = [np.abs(x.reference) @ np.abs(w).T for w in (train, change)]
    if len(node.inputs) > 2:
        bias = context.state(node.inputs[2])
        apart = bias.i.lo - bias.t.lo
        reference, known = reference + bias.t.lo, known + apart
        sizes = [sizes[0] + np.abs(bias.t.lo), sizes[1] + np.abs(apart)]
    outputs, inputs = train.shape
    formed, carried = gamma(inputs + SPARE, UNIT), gamma(outputs + SPARE, UNIT)
    size_e, size_d = magnitude(x.e), magnitude(x.d)
    on_e = size_e @ np.abs(train).T
    on_d = size_d @ np.abs(infer).T + size_e @ np.abs(change).T

    def through(adjoint: Adjoint, matrix: Floats) -> Adjoint:
        return Adjoint(
            flat_product(adjoint.values, matrix[adjoint.window[-1]]), (*adjoint.start[:-1], 0)
        )

    def vjp(f: FunctionalBatch) -> tuple[tuple[int, FunctionalBatch], ...]:
        e = None if f.e is None else through(f.e, train)
        if f.d is None:
            return ((x.place, FunctionalBatch(e, None)),)
        if moves:
            e = joined(e, through(f.d, change))
        return ((x.place, FunctionalBatch(e, through(f.d, infer))),)

    straight = context.write(
        node,
        reference,
        vjp,
        Added(np.zeros(reference.shape), raised(formed * sizes[0] + carried * on_e) + TINY),
        Added(known, raised(formed * sizes[1] + carried * on_d) + TINY),
    )
    if straight and reference.ndim == 2 and x.place == context.operand(node, 0).place:
        index = np.arange(reference.size, dtype=np.int64).reshape(reference.shape)
        place = context.places[node.name]
        context.origins[node.name] = PairOrigin(x.place, place, train, infer, index)


def _quantised_bounds(context: Context, node: Node, key: str) -> Reading:
    """Return the input of a linear; if a kernel quantises it, as a separate entry."""
    x, state = context.operand(node, 0), context.state(node.inputs[0])
    problem = pinned(context.problem, node)
    key = problem.keys.get(node.inputs[1], "")
    by_train = quantisation(problem.train, state.t, key)
    by_infer = quantisation(problem.infer, state.i, key)
    if not (by_train.any() or by_infer.any()):
        return x
    return context.inexact(x, raised(by_train), raised(by_train + by_infer))


OPERATIONS = {"linear": Operation(2, 3, linear_interval, linear_affine, linear_bounds)}
