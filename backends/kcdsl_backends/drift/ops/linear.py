"""Linear layers: a weight times an input that may be quantised, in every domain (section 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.drift.affine.adjoint import (
    Adjoint,
    Row,
    diagonal,
    largest_eigenvalue,
    square_of,
)
from kcdsl_backends.drift.affine.ellipsoids import norm_on_ellipsoid
from kcdsl_backends.drift.affine.error_bounds import norms, rows
from kcdsl_backends.drift.affine.independent import Roundings, of_sums
from kcdsl_backends.drift.affine.kernel import KernelRun, StoredSpread
from kcdsl_backends.drift.affine.result_rounding import Early, Result, round_result
from kcdsl_backends.drift.affine.row_sums import WeightedRows
from kcdsl_backends.drift.affine.tape import (
    PASS,
    Adjoints,
    Shared,
    Tape,
    TapeEntry,
    reads_many,
)
from kcdsl_backends.drift.boxes import (
    SAFE,
    Box,
    Factor,
    NoBound,
    gamma,
    magnitude_product,
    matmul,
    up,
)
from kcdsl_backends.drift.boxes.matrices import Magnitudes, joined, products
from kcdsl_backends.drift.boxes.quantisers import quantiser_steps
from kcdsl_backends.drift.boxes.rounding import Apart, Rounding, StoredResult
from kcdsl_backends.drift.boxes.state import Parameter, State, Step
from kcdsl_backends.drift.boxes.sums import (
    Sums,
    saturation_error,
    term_roundings,
)
from kcdsl_backends.drift.linear import LinearOperand, LinearOrigin, LinearPart, LinearRun
from kcdsl_backends.drift.linear.tape import LINEAR_PASS, Functional, Source, added_adjoints
from kcdsl_backends.drift.ops.bilinear import Heads, bilinear_remainder
from kcdsl_backends.drift.ops.operation import Operation
from kcdsl_backends.drift.ops.quantised.inputs import activation_error, quantise


def interval_linear(step: Step) -> State:
    """Bound x @ weight.T + bias with the stored weights of both kernels."""
    x, kernels = step.operand(0), (step.kernels.train, step.kernels.infer)
    bias = step.kernels.plain(step.operand_node(2)) if len(step.node.inputs) > 2 else None
    name, key = step.node.name, str(step.operand_node(1).attrs["key"])
    entering, drift_in = [x.train, x.infer], x.drift
    for side, kernel in enumerate(kernels):
        stored = _interval_quantised(entering[side], kernel, name, key)
        if stored is not None:
            entering[side] = stored.value
            drift_in = drift_in + stored.error if side else drift_in - stored.error
    if entering[0] is not x.train or entering[1] is not x.infer:
        drift_in = drift_in.meet(entering[1] - entering[0])
    drift, each, totals, sizes = _products(step, drift_in, (entering[0], entering[1]))
    if bias is not None:
        drift = drift + bias.difference
    exact, errors, early = [], [], []
    for side, kernel in enumerate(kernels):
        product = result = each[side]
        size: Tensor | None = None
        lost: Tensor | float = 0.0
        if bias is not None:
            result, size = product + bias.boxes[side], bias.boxes[side].mag()
        if kernel.numerics.byte_sums != "wide":
            whole = step.kernels.linear(step.operand_node(1)).boxes[side]
            lost = saturation_error(x.infer if side else x.train, whole, kernel, name, key)
        error, cast = _linear_error(
            *(entering[side], product, result, totals[side], sizes[side], size, kernel, key, lost)
        )
        exact.append(result)
        errors.append(error)
        early.append(cast)
    return step.finish(
        (exact[0], exact[1]),
        drift,
        (errors[0], errors[1]),
        accumulates=True,
        apart=(early[0], early[1]),
    )


def _interval_quantised(x: Box, kernel: Rounding, node: str, weight: str) -> StoredResult | None:
    """Return a linear's input after its quantisation, and its error; None without it."""
    error = activation_error(x, kernel, node, weight)
    if error is None:
        return None
    known = quantiser_steps(x, error, kernel, weight, node)
    return known or StoredResult(x.widen(error), Box.around(error))


Sizes = Tensor | Magnitudes


def _products(
    step: Step, drift: Box, entering: tuple[Box, Box]
) -> tuple[Box, tuple[Box, Box], tuple[Tensor, Tensor], tuple[Sizes, Sizes]]:
    """Return the difference of both products with the weight, the products, bounds of the sums of
    magnitudes, and the magnitudes of the weight [in, out] of either kernel."""
    found, node = [], step.operand_node(1)
    sizes: tuple[Sizes, Sizes] | None = None
    for weight in step.kernels.linear_parts(node):
        factors = _factors(weight)
        apart = matmul(drift, factors[1])
        if not weight.alike:
            apart = apart + matmul(entering[0], _transposed(weight.difference))
        one, two = (matmul(x, factor) for x, factor in zip(entering, factors, strict=True))
        totals = [
            magnitude_product(s.mag(), f.size) for s, f in zip(entering, factors, strict=True)
        ]
        found.append([apart.lo, apart.hi, one.lo, one.hi, two.lo, two.hi, *totals])
        sizes = factors[0].size, factors[1].size
    assert sizes is not None
    if len(found) > 1:
        train, infer = (Magnitudes(kernel.kept(node)) for kernel in step.kernels.stored)
        sizes, found = (train, infer), [joined(found)]
    ends = found[0]
    return Box(*ends[:2]), (Box(*ends[2:4]), Box(*ends[4:6])), (ends[6], ends[7]), sizes


def _factors(weight: Parameter) -> tuple[Factor, Factor]:
    """Return the weight [in, out] of both kernels, the same object if they store it alike."""
    train, infer = weight.boxes
    one = _transposed(train)
    return one, one if weight.alike else _transposed(infer)


def _transposed(box: Box) -> Factor:
    return Factor.of(Box.point(box.lo.T) if box.lo is box.hi else Box(box.lo.T, box.hi.T))


def _linear_error(
    x: Box,
    product: Box,
    result: Box,
    total: Tensor,
    sizes: Sizes,
    bias: Tensor | None,
    kernel: Rounding,
    key: str,
    lost: Tensor | float,
) -> tuple[Tensor, Apart]:
    """Return E of a linear, with any order of summation and a free cast before the bias, and the
    part of E by that cast.

    `total` bounds the sums of magnitudes; `sizes` are those of the weight [in, out], which has the
    name `key`; `bias` is a magnitude. `lost` is the saturation error of sums of bytes.
    """
    if bias is not None:
        total = up(total + bias)
    sums = Sums(
        *(x.mag(), sizes, total, result.mag(), kernel),
        before=term_roundings(kernel),
        quantised=kernel.numerics.activations.quantised,
        weight=key,
    )
    error = sums.error()
    error = error + sums.beyond(error, lost, product.mag(), bias is not None)
    early: Apart = None
    if bias is not None and kernel.free and kernel.coarse:
        stored = kernel.compute
        cast = kernel.unit(stored) * (product.mag() + error) + kernel.faint(stored)
        # the rounded sum with the bias has that error too
        early = up(cast * (1.0 + 2.0 * kernel.u_accumulate), 6)
        error = error + early
    return up(error, 4), early


def affine_linear(run: KernelRun, node: Node) -> None:
    """Append x @ weight.T + bias."""
    index, x = _affine_quantised(run, node)
    weight = run.parameters.kept(run.source(node, 1))
    bias, kernel, terms = run.optional(node, 2), run.rounding, weight.shape[1]
    absolute, shift = Magnitudes.of(weight), None if bias is None else bias.abs()
    product, error_bound, total = products(weight, x.reference, x.error_bound, x.size)
    reference, error_bound = product if bias is None else product + bias, error_bound * SAFE
    moved, pushed, shared = None, None, None
    if run.spread is not None:  # the effect of other weights on x̂ is an error of this result
        spread, more = run.spread.of(run.source(node, 1), linear=True).T, run.around(node, 2)
        shared = _shared(run, run.spread, node, x, spread, more)
        absolute = (weight.to(torch.float64).abs().T + spread) * SAFE
        total, moved = x.size @ absolute, x.size @ spread * SAFE
        pushed = moved if more is None else (moved + more) * SAFE
        shift = shift if shift is None or more is None else (shift + more) * SAFE
    total = total * SAFE
    if shift is not None:
        total = (total + shift) * SAFE
    value = (reference.abs() + error_bound) * SAFE
    value = value if pushed is None else (value + pushed) * SAFE
    key = str(run.source(node, 1).attrs["key"])
    sums = Sums(
        *(x.size, absolute, total, value, kernel),
        before=term_roundings(kernel),
        quantised=kernel.numerics.activations.quantised,
        weight=key,
    )
    error = sums.error()
    parts = of_sums(sums, error)
    whole = (product.abs() + error_bound) * SAFE  # there is none where weights move
    lost = sums.beyond(error, _saturated(run, node, weight, key), whole, bias is not None)
    error, parts = error + lost, parts.with_sure(torch.zeros_like(error) + lost)
    early = None
    if bias is not None and kernel.free and kernel.coarse:
        again = 1.0 + 2.0 * kernel.u_accumulate  # the sum with the bias is rounded too
        unit, faint = again * kernel.unit(kernel.compute), again * kernel.faint(kernel.compute)
        off = error_bound + error if moved is None else error_bound + error + moved
        early = Early(unit, (unit * product.abs() + faint) * SAFE, unit * off * SAFE)
        parts = parts.cast(unit * (product.abs() + off) * SAFE, faint, kernel.casts)
    own = gamma(terms + 4) * total + gamma(max(weight.shape) + PASS) * error_bound
    if shared is not None:
        shared = replace(shared, rest=(error + own + shared.rest) * SAFE)
    own = own if pushed is None else (own + pushed) * SAFE

    passed = _LastProduct(weight)
    still = not bool(x.error_bound.any())  # an input that is exactly known has no adjoint

    def vjp(a: Adjoint) -> Adjoints:
        if still:
            return []
        values = passed.of(a)
        return [(index, Adjoint(values, (*a.window[:-1], (0, terms)), (*a.shape[:-1], terms)))]

    internal, parts = (error + own) * SAFE, parts.with_sure(own)
    below, weighed = run.tape.entries[index].rows, None
    if below is not None and reference.dim() == 2 and reads_many(reference.shape, terms):
        weighed = None if still else WeightedRows(weight, below)
    result = Result(
        *(reference, vjp, error_bound, internal),
        roundings=parts,
        early=early,
        shared=shared,
        weighed=weighed,
    )
    place = round_result(run, node, result, accumulates=True)
    entry = run.tape.entries[place]
    if entry.kept and weighed is not None:
        run.tape.entries[place] = replace(entry, weighed=weighed)


@dataclass(slots=True)
class _LastProduct:
    """Functionals times a weight [out, in]; the last product is cached, since functionals of a row
    are often those of the row before."""

    weight: Tensor
    last: tuple[Adjoint, Tensor] | None = None

    def of(self, a: Adjoint) -> Tensor:
        if self.last is not None:
            known, found = self.last
            same = known.window[-1] == a.window[-1] and known.values.shape == a.values.shape
            if same and torch.equal(known.values, a.values):
                return found
        self.last = None
        weight = self.weight[slice(*a.window[-1])].to(torch.float64)
        alone = diagonal(a.values.flatten(1)) if a.single_row else None
        if alone is None:
            found = _product(a.values, weight)
        else:
            found = (alone[:, None] * weight).reshape(*a.values.shape[:-1], -1)
        if a.single_row:
            self.last = a, found
        return found


def _product(functionals: Tensor, weight: Tensor) -> Tensor:
    """Return functionals [B, ..., out] times a weight; those that are zero take no time."""
    some = functionals.flatten(1).any(-1)
    if bool(some.all()):
        return functionals.contiguous() @ weight
    found = functionals.new_zeros(*functionals.shape[:-1], weight.shape[1])
    found[some] = functionals[some] @ weight
    return found


def _saturated(run: KernelRun, node: Node, weight: Tensor, key: str) -> Tensor | float:
    """Return the saturation error of sums of bytes, from the input before its quantisation."""
    if run.rounding.numerics.byte_sums == "wide":
        return 0.0
    if run.spread is not None:
        raise NoBound(node.name, "sums of bytes in 16 bits with weights that are not known")
    _, x = run.entry(node, 0)
    box = Box(x.reference - x.error_bound * SAFE, x.reference + x.error_bound * SAFE)
    return saturation_error(box, weight.to(torch.float64), run.rounding, node.name, key)


def _shared(
    run: KernelRun,
    spread: StoredSpread,
    node: Node,
    x: TapeEntry,
    weights: Tensor,
    bias: Tensor | None,
) -> Shared | None:
    """Return the effect of other weights on x̂ shared by both kernels; None if they differ.

    Of Δx̂ the shared part is Δc, with the first kernel's input c at the centre. The distance of x̂
    from c is that of the references plus the error of x̂; it and an unlike bias give the rest.

    Args:
        weights: [in, out], bounds |Δ|.
        bias: [out], the largest distance of the bias from that of the checkpoint.
    """
    if not spread.alike(run.source(node, 1), linear=True):
        return None
    known = run.common.setdefault(node.name, x.reference)
    size = known.abs() @ weights * SAFE
    away = (((x.reference - known).abs() + x.error_bound) * SAFE) @ weights * SAFE
    if bias is not None and spread.alike(run.source(node, 2)):
        return Shared((size + bias) * SAFE, away)
    return Shared(size, away if bias is None else (away + bias) * SAFE)


def _affine_quantised(run: KernelRun, node: Node) -> tuple[int, TapeEntry]:
    """Return the input of a linear, as an entry of its own where it is quantised."""
    index, x = run.entry(node, 0)
    box = Box(x.reference - x.error_bound * SAFE, x.reference + x.error_bound * SAFE)
    weight = str(run.source(node, 1).attrs["key"])
    error = activation_error(box, run.rounding, node.name, weight)
    if error is None:
        return index, x
    quantised_entry = quantise(run, node.name, weight, index, x, error)
    if quantised_entry is not None:
        return run.tape.add(quantised_entry), quantised_entry
    error_bound = (x.error_bound + error) * SAFE
    quantised = TapeEntry(
        f"{node.name}/input",
        x.reference,
        error_bound,
        lambda a: [(index, a)],
        None,
        error * SAFE,
        roundings=_of_codes(run, error),
    )
    return run.tape.add(quantised), quantised


def _of_codes(run: KernelRun, error: Tensor) -> Roundings | None:
    """Return the error of free roundings to codes as independent roundings, or in the worst case if
    codes may saturate; None without `chance`, or without free casts."""
    spec = run.rounding.numerics.activations
    if run.tape.chance is None or not run.rounding.free:
        return None
    if spec.cuts:
        return Roundings.none(error * SAFE)
    return Roundings.one(torch.zeros_like(error), error * SAFE)


def _through_weights(query: Heads, key: Heads) -> Tensor:
    """Bound |e_q·e_k| through the product of both weights."""
    width = query.weight.shape[1]
    inner = (query.weight.mT @ key.weight).abs()
    inner = inner + gamma(width + 4) * (query.weight.abs().mT @ key.weight.abs())
    both = query.error_bound @ inner @ key.error_bound.T
    return bilinear_remainder(query, key, both)


@dataclass(frozen=True, slots=True)
class BeforeLinear:
    """The linear that computed an operand: e = W e_x + o, |o| <= own [..., m].

    W is in the format in which it is kept. An activation needs bounds repeatedly, often with the
    same weights, and each takes a matrix as large as the linear: `known` caches the last of every
    row. The bound of |e_x| must not change.
    """

    weight: Tensor
    own: Tensor
    source: int
    known: dict[Row, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def weighted_squares(self, tape: Tape, weights: Tensor) -> Tensor:
        """Bound Σ_k weights_k e_k²/2 in every row of the operand, [..., 1], from |e_x| <= ρ.

        The root of the sum is at most (√λ √n + |√weights own|)/√2, with λ the largest eigenvalue
        of ρ Wᵀ weights W ρ and n the number of inputs.
        """
        found = torch.empty_like(weights[..., :1])
        for row in rows(tuple(found.shape)):
            before = self.known.get(row)
            if before is None or not torch.equal(before[0], weights[row]):
                self.known[row] = weights[row], self._weighted_squares(tape, weights[row], row)
            found[row] = self.known[row][1]
        return found

    def _weighted_squares(self, tape: Tape, weights: Tensor, row: Row) -> Tensor:
        source = tape.entries[self.source]
        error_bound = source.error_bound[row]
        moved = self._stretch(weights, error_bound) * math.sqrt(len(error_bound))
        if row in source.ellipsoids:
            root = weights.sqrt()[:, None] * self.weight
            moved = min(moved, norm_on_ellipsoid(source.ellipsoids[row], root))
        return self._and_own(moved, weights, row)

    def sharpened(
        self, tape: Tape, weights: Tensor, sums: Tensor, needed: Tensor, floor: int
    ) -> Tensor:
        """Lower bounds of `weighted_squares` in the rows needed by the norm of e_x, from a reverse
        pass that may stop at `floor`."""
        error_bound = tape.entries[self.source].error_bound
        unit = torch.eye(error_bound.shape[-1], dtype=error_bound.dtype, device=error_bound.device)
        lengths = norms(tape, self.source, unit, needed, floor)
        found, last, stretch = sums.clone(), None, 0.0
        for row in rows(tuple(found.shape)):
            if bool(needed[row]):
                if last is None or not torch.equal(last, weights[row]):
                    last = weights[row]
                    stretch = self._stretch(last, torch.ones_like(error_bound[row]))
                found[row] = self._and_own(stretch * float(lengths[row]), last, row)
        return torch.minimum(found, sums)

    def _stretch(self, weights: Tensor, scale: Tensor) -> float:
        """Bound |√weights W e_x|₂ / |e_x/scale|₂."""
        scaled = weights.sqrt()[:, None] * self.weight * scale
        trace = float(scaled.square().sum()) * SAFE
        return math.sqrt(largest_eigenvalue(square_of(scaled.T), trace))

    def _and_own(self, moved: float, weights: Tensor, row: Row) -> Tensor:
        """Bound the sum of a row by |√weights W e_x|₂ <= moved and the linear's own error."""
        own = (weights * self.own[row].square()).sum().sqrt() * SAFE
        return (moved + own).square() / 2 * SAFE


def before_linear(run: KernelRun, node: Node) -> BeforeLinear | None:
    """Return the linear that computed the input of a node, None where there is none."""
    source = run.source(node, 0)
    if source.op != "linear" or run.quantises(source):
        return None
    entry, below = run.tape.entries[run.computed[source.name]], run.operand(source, 0).index
    if not entry.kept or entry.radius is None or below is None:
        return None
    own = run.own(source.name)
    assert own is not None
    return BeforeLinear(run.parameters.kept(run.source(source, 1)), own, below)


def linear_linear(run: LinearRun, node: Node) -> None:
    """Append x @ weight.T + bias: Δy = W' Δx + (W' - W) x + (b' - b)."""
    x = _linear_quantised(run, node)
    weight = run.kernels.linear(run.source(node, 1))
    bias = run.kernels.plain(run.source(node, 2)) if len(node.inputs) > 2 else None
    train, infer, same = weight.train, weight.infer, weight.alike
    change = torch.zeros_like(train) if same else infer - train
    reference = x.reference @ train.T
    known = x.reference @ change.T
    size, moved = x.reference.abs(), x.reference.abs() @ change.abs().T
    total_size = size @ train.abs().T
    if bias is not None:
        reference, known = reference + bias.train, known + (bias.infer - bias.train)
        total_size = total_size + bias.train.abs()
        moved = moved + (bias.infer - bias.train).abs()
    inputs, outputs = train.shape[1], train.shape[0]
    own, back = gamma(inputs + LINEAR_PASS), gamma(outputs + LINEAR_PASS)
    e, d = x.deviation.mag(), x.drift.mag()
    along = e @ train.abs().T
    across = d @ infer.abs().T + e @ change.abs().T
    deviation = LinearPart(torch.zeros_like(reference), (own * total_size + back * along) * SAFE)
    drift = LinearPart(known, (own * moved + back * across + 2.0**-1000) * SAFE)

    def through(part: Adjoint, matrix: Tensor) -> Adjoint:
        start, stop = part.window[-1]
        values = part.values @ matrix[start:stop]
        return Adjoint(values, (*part.window[:-1], (0, inputs)), (*part.shape[:-1], inputs))

    def vjp(a: Functional) -> list[Source]:
        on_e = None if a.deviation is None else through(a.deviation, train)
        on_d = None if a.drift is None else through(a.drift, infer)
        if a.drift is not None and not same:
            on_e = added_adjoints(on_e, through(a.drift, change))
        return [(x.index, Functional(on_e, on_d))]

    whole = run.append(node, reference, vjp, deviation, drift)
    if whole and x.index == run.operand(node, 0).index and reference.dim() == 2:
        run.origins[node.name] = LinearOrigin(x.index, run.index[node.name], train, infer)


def _linear_quantised(run: LinearRun, node: Node) -> LinearOperand:
    """Return the input of a linear, with an entry of its own where a kernel quantises it."""
    x, state = run.operand(node, 0), run.state(run.source(node, 0))
    weight = str(run.source(node, 1).attrs["key"])
    kernels = run.kernels.at(node, run.nodes)
    by_train = activation_error(state.train, kernels.train, node.name, weight)
    by_infer = activation_error(state.infer, kernels.infer, node.name, weight)
    if by_train is None and by_infer is None:
        return x
    zero = torch.zeros_like(x.reference)
    first = zero if by_train is None else by_train
    second = first if by_infer is None else first + by_infer
    index = run.inexact(f"{node.name}/input", x.index, first * SAFE, second * SAFE)
    entry = run.tape.entries[index]
    return LinearOperand(index, entry.reference, entry.deviation, entry.drift)


OPERATIONS = {"linear": Operation(interval_linear, affine_linear, linear_linear)}
