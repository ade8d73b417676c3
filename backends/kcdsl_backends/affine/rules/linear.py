"""Linear maps and products of matrices (section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.affine.adjoint import Adjoint, at
from kcdsl_backends.affine.ellipsoids import longest
from kcdsl_backends.affine.independent import Roundings, of_sums
from kcdsl_backends.affine.kernel import KernelRun, Operand, Spread
from kcdsl_backends.affine.quantising import quantise
from kcdsl_backends.affine.reaches import Row, norms, rows, tighten
from kcdsl_backends.affine.rules.heads import Heads, heads
from kcdsl_backends.affine.rules.keys import keys
from kcdsl_backends.affine.rules.one_row import of_keys
from kcdsl_backends.affine.spectra import largest_eigenvalue
from kcdsl_backends.affine.storing import Early, Result, store
from kcdsl_backends.affine.tape import PASS, SAFE, Entry, Pulled, Shared, Tape
from kcdsl_backends.interval.box import Box, gamma
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.rules.linear import (
    activation_error,
    all_reduce_error,
    late_scale_error,
    saturation_error,
    summation_error,
    term_roundings,
)


def linear(run: KernelRun, node: Node) -> None:
    """Append x @ weight.T + bias."""
    index, x = _quantised(run, node)
    weight = run.parameters.linear(run.source(node, 1))
    bias, kernel, terms = run.optional(node, 2), run.rounding, weight.shape[1]
    absolute = weight.abs().T
    product = x.reference @ weight.T
    reference = product if bias is None else product + bias
    reach = x.reach @ absolute * SAFE
    shift = None if bias is None else bias.abs()
    moved, pushed, shared = None, None, None
    if run.spread is not None:  # all that other weights make of x̂ is an error of this result
        spread, more = run.spread.linear(run.source(node, 1)).T, run.around(node, 2)
        shared = _shared(run, run.spread, node, x, spread, more)
        absolute, moved = (absolute + spread) * SAFE, x.size @ spread * SAFE
        pushed = moved if more is None else (moved + more) * SAFE
        shift = shift if shift is None or more is None else (shift + more) * SAFE
    total = x.size @ absolute * SAFE
    if shift is not None:
        total = (total + shift) * SAFE
    value, dynamic = (reference.abs() + reach) * SAFE, kernel.numerics.activations.format != "none"
    value = value if pushed is None else (value + pushed) * SAFE
    key = str(run.source(node, 1).attrs["key"])
    terms_before = term_roundings(kernel)
    error = summation_error(
        *(x.size, absolute, total, value, kernel),
        before=terms_before,
        quantised=dynamic,
        weight=key,
    )
    parts = of_sums(
        *(x.size, absolute, total, value, error, kernel), before=terms_before, quantised=dynamic
    )
    lost = _saturated(run, node, weight, key)
    lost = lost + all_reduce_error(total, error + lost, kernel)
    before, biased = error + lost, bias is not None
    whole = (product.abs() + reach) * SAFE  # there is none where weights move
    lost = lost + late_scale_error(x.size, absolute, total, whole, before, kernel, biased)
    error, parts = error + lost, parts.beside(torch.zeros_like(error) + lost)
    early = None
    if bias is not None and kernel.free and kernel.coarse:
        again = 1.0 + 2.0 * kernel.u_accumulate  # the sum with the bias is rounded too
        unit, faint = again * kernel.unit(kernel.compute), again * kernel.faint(kernel.compute)
        off = reach + error if moved is None else reach + error + moved
        early = Early(unit, (unit * product.abs() + faint) * SAFE, unit * off * SAFE)
        parts = parts.cast(unit * (product.abs() + off) * SAFE, faint, kernel.casts)
    own = gamma(terms + 4) * total + gamma(max(weight.shape) + PASS) * reach
    if shared is not None:
        shared = replace(shared, rest=(error + own + shared.rest) * SAFE)
    own = own if pushed is None else (own + pushed) * SAFE

    still = not bool(x.reach.any())  # an input that is exactly known has nothing to pull back to

    def pull(a: Adjoint) -> Pulled:
        if still:
            return []
        start, stop = a.window[-1]
        values = a.values @ weight[start:stop]
        return [(index, Adjoint(values, (*a.window[:-1], (0, terms)), (*a.shape[:-1], terms)))]

    internal, parts = (error + own) * SAFE, parts.beside(own)
    result = Result(reference, pull, reach, internal, roundings=parts, early=early, shared=shared)
    store(run, node, result, accumulates=True)


def _saturated(run: KernelRun, node: Node, weight: Tensor, key: str) -> Tensor | float:
    """Return what sums of bytes lose, of the input before its quantisation."""
    if run.rounding.numerics.byte_sums == "wide":
        return 0.0
    if run.spread is not None:
        raise NoBound(node.name, "sums of bytes in 16 bits with weights that are not known")
    _, x = run.entry(node, 0)
    box = Box(x.reference - x.reach * SAFE, x.reference + x.reach * SAFE)
    return saturation_error(box, weight, run.rounding, node.name, key)


def _shared(
    run: KernelRun, spread: Spread, node: Node, x: Entry, weights: Tensor, bias: Tensor | None
) -> Shared | None:
    """Return what other weights make of x̂ in both kernels alike; None where they store in two ways.

    Of Δx̂ that is Δc, c what the first kernel reads at the centre. Here x̂ is off from c by what the
    references are apart, and by its error; the rest is what this and an unlike bias add.

    Args:
        weights: [in, out], bounds |Δ|.
        bias: [out], how far the bias may be from that of the checkpoint.
    """
    if not spread.linear_alike(run.source(node, 1)):
        return None
    known = run.common.setdefault(node.name, x.reference)
    size = known.abs() @ weights * SAFE
    away = (((x.reference - known).abs() + x.reach) * SAFE) @ weights * SAFE
    if bias is not None and spread.plain_alike(run.source(node, 2)):
        return Shared((size + bias) * SAFE, away)
    return Shared(size, away if bias is None else (away + bias) * SAFE)


def _quantised(run: KernelRun, node: Node) -> tuple[int, Entry]:
    """Return the input of a linear, as an entry of its own where it is quantised."""
    index, x = run.entry(node, 0)
    box = Box(x.reference - x.reach * SAFE, x.reference + x.reach * SAFE)
    weight = str(run.source(node, 1).attrs["key"])
    error = activation_error(box, run.rounding, node.name, weight)
    if error is None:
        return index, x
    stairs = quantise(run, node.name, weight, index, x, error)
    if stairs is not None:
        return run.tape.add(stairs), stairs
    reach = (x.reach + error) * SAFE
    quantised = Entry(
        f"{node.name}/input",
        x.reference,
        reach,
        lambda a: [(index, a)],
        None,
        error * SAFE,
        roundings=_of_codes(run, error),
    )
    return run.tape.add(quantised), quantised


def _of_codes(run: KernelRun, error: Tensor) -> Roundings | None:
    """Return the parts of what free roundings to codes add: all of it, unless codes may cut off
    what lies at the end of their range."""
    spec = run.rounding.numerics.activations
    if run.tape.chance is None or not run.rounding.free:
        return None
    if spec.cuts:
        return Roundings.none(error * SAFE)
    return Roundings.one(torch.zeros_like(error), error * SAFE)


def matmul(run: KernelRun, node: Node) -> None:
    """Append a @ b of two computed matrices."""
    scores = node.role == "scores"
    before = run.rounding.numerics.attention.term_roundings if scores else 2
    query, key = (
        (heads(run, node, 0), heads(run, node, 1, transposed=True)) if scores else (None, None)
    )
    if query is None or key is None:
        sharpen(run, node, torch.matmul)
    a, b = run.operand(node, 0), run.operand(node, 1)
    second = a.reach @ b.reach * SAFE
    if query is not None and key is not None:
        second = torch.minimum(second, _sharpened(run, node, query, key))
    result = product(run, a, b, a.reference.shape[-1], before)
    internal, parts = (result.internal + second) * SAFE, result.roundings
    parts = None if parts is None else parts.beside(second)
    one_row = of_keys(a, keys(run, node) if scores else None, b.reference)
    formed = Result(
        result.reference, result.pull, result.linear, internal, roundings=parts, one_row=one_row
    )
    store(run, node, formed, accumulates=True)


def sharpen(run: KernelRun, node: Node, times: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Tighten the reaches of both factors of a product while their product matters."""
    a, b = run.operand(node, 0), run.operand(node, 1)
    if a.index is None or b.index is None:
        return
    worth = run.negligible * times(a.reference, b.reference).abs().sum()
    for index, other in ((a.index, b.index), (b.index, a.index)):

        def matters(reach: Tensor, index: int = index, other: int = other) -> Tensor:
            rest = run.tape.entries[other].reach
            pair = (reach, rest) if index == a.index else (rest, reach)
            return (reach > 0).any(-1, keepdim=True) & (times(*pair).sum() > worth)

        tighten(run, node, index, matters)


def product(run: KernelRun, a: Operand, b: Operand, steps: int, before: int) -> Result:
    """Return a @ b without its remainder of second order."""
    if a.reference.shape[:-2] != b.reference.shape[:-2]:
        raise NoBound(run.graph.output, "a product of matrices that broadcasts")
    p, q, terms = a.reference, b.reference, a.reference.shape[-1]
    reference = p @ q
    linear = (a.reach @ q.abs() + p.abs() @ b.reach) * SAFE
    total = a.size @ b.size * SAFE
    value = (reference.abs() + a.reach @ b.size + p.abs() @ b.reach) * SAFE
    error = summation_error(
        a.size, b.size, total, value, run.rounding, extra=steps - terms, before=before
    )
    parts = of_sums(
        a.size, b.size, total, value, error, run.rounding, extra=steps - terms, before=before
    )
    own = gamma(terms + 4) * total + gamma(max(terms, *p.shape[-2:], q.shape[-1]) + PASS) * linear

    def pull(adjoint: Adjoint) -> Pulled:
        *lead, rows, columns = adjoint.window
        inner = (0, terms)
        found = []
        if a.index is not None:
            back = adjoint.values @ q[at((*lead, inner, columns))].mT
            found.append((a.index, Adjoint(back, (*lead, rows, inner), tuple(p.shape))))
        if b.index is not None:
            part = p[at((*lead, rows, inner))].mT
            single = rows[1] - rows[0] == 1  # then every product has one term
            back = part * adjoint.values if single else part @ adjoint.values
            found.append((b.index, Adjoint(back, (*lead, inner, columns), tuple(q.shape))))
        return found

    internal = (error + own) * SAFE
    return Result(reference, pull, linear, internal, roundings=parts.beside(own))


def _sharpened(run: KernelRun, node: Node, query: Heads, key: Heads) -> Tensor:
    """Bound |e_q·e_k|, after tightening what both come from as far as it matters."""
    scores = run.operand(node, 0).reference @ run.operand(node, 1).reference
    worth = run.negligible * scores.abs().sum()

    def matters(reach: Tensor) -> Tensor:
        bound = _through_weights(query.again(run), key.again(run)).sum()
        return (reach > 0).any(-1, keepdim=True) & ~(bound <= worth)

    for source in dict.fromkeys((query.source, key.source)):
        if source is not None:
            tighten(run, node, source, matters)
    return _through_weights(query.again(run), key.again(run))


def _through_weights(query: Heads, key: Heads) -> Tensor:
    """Bound |e_q·e_k| through the product of both weights."""
    width = query.weight.shape[1]
    inner = (query.weight.mT @ key.weight).abs()
    inner = inner + gamma(width + 4) * (query.weight.abs().mT @ key.weight.abs())
    both = query.reach @ inner @ key.reach.T
    both = torch.minimum(both, query.lengths[:, :, None] * key.lengths[:, None, :])
    mixed = query.own @ key.carried.mT + query.carried @ key.own.mT + query.own @ key.own.mT
    return (both + mixed) * SAFE


@dataclass(frozen=True, slots=True)
class BeforeLinear:
    """Where the operand of an operation comes from: e = W e_x + o, |o| <= own [..., m].

    An activation asks again and again, often with the same weights, and each answer takes a matrix
    as large as the linear: `known` holds the last of every row. The reach of x must not change.
    """

    weight: Tensor
    own: Tensor
    source: int
    known: dict[Row, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def energy(self, tape: Tape, weights: Tensor) -> Tensor:
        """Bound Σ_k weights_k e_k²/2 in every row of the operand, [..., 1], from |e_x| <= ρ.

        The root of the sum is at most (√λ √n + |√weights own|)/√2, with λ the largest eigenvalue
        of ρ Wᵀ weights W ρ and n the number of inputs.
        """
        found = torch.empty_like(weights[..., :1])
        for row in rows(tuple(found.shape)):
            before = self.known.get(row)
            if before is None or not torch.equal(before[0], weights[row]):
                self.known[row] = weights[row], self._energy(tape, weights[row], row)
            found[row] = self.known[row][1]
        return found

    def _energy(self, tape: Tape, weights: Tensor, row: Row) -> Tensor:
        source = tape.entries[self.source]
        reach = source.reach[row]
        moved = self._stretch(weights, reach) * math.sqrt(len(reach))
        if row in source.ellipsoids:
            root = weights.sqrt()[:, None] * self.weight
            moved = min(moved, longest(source.ellipsoids[row], root))
        return self._and_own(moved, weights, row)

    def sharpened(self, tape: Tape, weights: Tensor, sums: Tensor, needed: Tensor) -> Tensor:
        """Lower such bounds in the rows needed, by the norm of e_x, for which a pass is made."""
        reach = tape.entries[self.source].reach
        unit = torch.eye(reach.shape[-1], dtype=reach.dtype, device=reach.device)
        lengths = norms(tape, self.source, unit, needed)
        found, last, stretch = sums.clone(), None, 0.0
        for row in rows(tuple(found.shape)):
            if bool(needed[row]):
                if last is None or not torch.equal(last, weights[row]):
                    last = weights[row]
                    stretch = self._stretch(last, torch.ones_like(reach[row]))
                found[row] = self._and_own(stretch * float(lengths[row]), last, row)
        return torch.minimum(found, sums)

    def _stretch(self, weights: Tensor, scale: Tensor) -> float:
        """Bound |√weights W e_x|₂ / |e_x/scale|₂."""
        scaled = weights.sqrt()[:, None] * self.weight * scale
        trace = float(scaled.square().sum()) * SAFE
        return math.sqrt(largest_eigenvalue(scaled.T @ scaled, trace))

    def _and_own(self, moved: float, weights: Tensor, row: Row) -> Tensor:
        """Bound the sum of a row by |√weights W e_x|₂ <= moved and what the linear adds."""
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
    return BeforeLinear(run.parameters.linear(run.source(source, 1)), own, below)
