"""linear and matmul (section 3), and the context product (section 4)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.affine import cases
from kcdsl_certs.recheck.affine.adjoint import Adjoint, summed
from kcdsl_certs.recheck.affine.cases import Cases
from kcdsl_certs.recheck.affine.form import (
    UNIT,
    Form,
    Operand,
    Origin,
    Walk,
    numeric,
    product_up,
    raised,
)
from kcdsl_certs.recheck.affine.independent import of_sum, only_sure
from kcdsl_certs.recheck.affine.reaches import until
from kcdsl_certs.recheck.affine.rules import straight
from kcdsl_certs.recheck.affine.rules.averages import averages
from kcdsl_certs.recheck.affine.rules.moves import around
from kcdsl_certs.recheck.affine.rules.quantised import quantised
from kcdsl_certs.recheck.affine.storing import Early, Formed, settle
from kcdsl_certs.recheck.affine.tape import FAINT, Averaged, Curve, Entry, Pull, Shared
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Floats
from kcdsl_certs.recheck.nearby import alike
from kcdsl_certs.recheck.rules.linear import (
    by_late_scales,
    check_product,
    clipped,
    product_roundings,
    quantisation,
    reduced,
)
from kcdsl_certs.recheck.rules.linear import summed as rounding_of_sums
from kcdsl_certs.recheck.rules.parameters import held
from kcdsl_certs.recheck.rules.state import gamma, target
from kcdsl_certs.rejected import Rejected


def linear(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return x @ weight.T + bias."""
    node.attrs.exactly()
    kernel = walk.kernel
    key = walk.scene.keys.get(node.inputs[1])
    if key is None:
        raise Rejected("rule/weight", "the weight of a linear must be a parameter")
    weight = walk.scene.parameters.linear(key, kernel)
    before = numeric(inputs[0])
    if len(before.shape) < 2 or before.shape[-1] != weight.shape[1]:
        raise Rejected("graph/shape", "the input does not fit the weight")
    bias, around_bias = _bias(walk, node, inputs, weight.shape[0])
    x = _quantised(walk, before, key)
    n = weight.shape[1]
    size_w, turned = np.abs(weight), weight.T
    product = x.reference @ turned
    carried = product_up(x.reach, size_w.T) if x.place is not None else np.zeros(product.shape)
    spread = _spread(walk, key, weight)
    pushed = np.zeros(product.shape) if spread is None else product_up(x.size, spread.T)
    size_all = size_w if spread is None else raised(size_w + spread)
    terms = product_up(x.size, box.lifted(size_all).T)
    total = terms if bias is None else raised(terms + np.abs(bias) + around_bias)
    reference = product if bias is None else product + bias
    own = raised(total * gamma(n + 4, UNIT)) + FAINT
    alone, shared = own, None
    if spread is not None:  # all that other weights and biases make of the input
        own = raised(own + pushed + around_bias)
        shared = _shared(walk, node, x, spread, around_bias)
    result = raised(np.abs(reference) + carried + own)
    factors, sizes = (x.size, box.lifted(size_all).T), (box.lifted(total), box.lifted(result))
    dynamic = kernel.activations[0] != "none"
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
        # the rounding of the sum with the bias is of numbers that are off by this cast
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
    if shared is not None:
        rest = raised(alone + shared.rest + terms_back * carried + error)
        formed = replace(formed, shared=replace(shared, rest=rest))
    form = settle(walk, node, formed, target(kernel, node), kernel.accumulate, sums=True)
    entry = None if form.place is None else walk.tape.entries[form.place]
    if entry is None or entry.kept is not None or not entry.operands or x is not before:
        return form
    rest = raised(straight.radius_of(entry))
    version = walk.versions.get(node.name)
    rest = rest if version is None else raised(rest + version.own)
    index = np.arange(form.reference.size).reshape(form.shape)
    rest = rest.reshape(-1, weight.shape[0])
    plain = entry.centre is None and entry.apart is None
    return replace(form, origin=Origin(weight, node.inputs[0], rest, index, plain))


def _shared(
    walk: Walk, node: Node, x: Form, spread: Floats, around_bias: Floats | float
) -> Shared | None:
    """Return what other weights make of x in both kernels alike, Δc + Δ_bias, and what is beside.

    c is the reference of the kernel that was walked first. None where weights are stored in two
    ways; a bias of two ways is beside it.
    """
    kernels = walk.scene.train, walk.scene.infer
    if not alike(kernels, linear=True):
        return None
    c = walk.first.setdefault(node.name, x.reference)
    size = product_up(np.abs(c), spread.T)
    rest = product_up(raised(np.abs(x.reference - c) + x.reach), spread.T)
    if alike(kernels, linear=False):
        return Shared(node.name, raised(size + around_bias), rest)
    return Shared(node.name, size, raised(rest + around_bias))


def _spread(walk: Walk, key: str, weight: Floats) -> Floats | None:
    """Return how far other weights of the region may be from these; None without a region."""
    if not walk.scene.rho:
        return None
    wide = held(walk.scene, key, linear=True)
    return around(weight, wide.t if walk.kernel is walk.scene.train else wide.i)


def _bias(
    walk: Walk, node: Node, inputs: list[Operand], outputs: int
) -> tuple[Floats | None, Floats | float]:
    """Return the bias, and how far that of other weights may be from it."""
    if len(inputs) < 3:
        return None, 0.0
    bias = numeric(inputs[2])
    moves = bool(walk.scene.rho) and node.inputs[2] in walk.scene.keys
    if bias.place is not None and not moves:
        raise Rejected("rule/weight", "the bias of a linear must be known")
    if bias.shape != (outputs,):
        raise Rejected("graph/shape", "the bias does not fit the weight")
    return bias.reference, bias.reach if moves else 0.0


def _quantised(walk: Walk, x: Form, key: str) -> Form:
    """Return the quantised input, an entry of its own; x itself where there is none."""
    if walk.kernel.activations[0] == "none":
        return x
    radius = raised(quantisation(walk.kernel, x.box, key)) + FAINT
    if walk.kernel.stepped:
        return quantised(walk, x, radius, key)
    reach = raised(x.reach + radius)
    operands = () if x.place is None else ((x.place, _same),)
    split = only_sure(radius)
    form, scale = walk.kernel.activations
    uncut = walk.kernel.amax_limit == math.inf
    if uncut and scale not in ("mx", "nvfp4") and form not in ("uint8", "int8_full"):
        split = only_sure(np.zeros(radius.shape)).with_one(radius)
    entry = Entry(reach, operands, radius, split=split)
    return Form(x.reference, reach, walk.tape.add(entry))


def _same(adjoint: Adjoint) -> Adjoint:
    return adjoint


def _through(weight: Floats) -> Pull:
    """Return the pullback of x @ weight.T."""

    def pull(adjoint: Adjoint) -> Adjoint:
        columns = adjoint.window[-1]
        count = adjoint.extent[-1]
        flat = adjoint.values.reshape(-1, count) @ weight[columns]
        values = flat.reshape(adjoint.batch, *adjoint.extent[:-1], weight.shape[1])
        return Adjoint(values, (*adjoint.start[:-1], 0))

    return pull


def matmul(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return a @ b of two matrices; in the role "context", the probabilities times the values."""
    node.attrs.exactly()
    kernel = walk.kernel
    if any(not isinstance(value, Form) for value in inputs):
        raise Rejected("rule/mask", "a product with a mask")
    a, b = numeric(inputs[0]), numeric(inputs[1])
    n = check_product(a.shape, b.shape)
    context = (
        node.role == "context" and walk.named.get(node.inputs[0], node.inputs[0]) in walk.softmaxes
    )
    reference = a.reference @ b.reference
    left, right = np.abs(a.reference), np.abs(b.reference)
    own = product_up(left, right) * gamma(n + 4, UNIT) + FAINT
    rest, curved, averaged = _remainder(walk, node, context)
    a, b = numeric(walk.forms[node.inputs[0]]), numeric(walk.forms[node.inputs[1]])
    by_a = product_up(a.reach, right) if a.place is not None else np.zeros(reference.shape)
    by_b = product_up(left, b.reach) if b.place is not None else np.zeros(reference.shape)
    carried = raised(by_a + by_b)
    result = raised(np.abs(reference) + own + carried + rest)
    size = product_up(a.size, b.size)
    k, j = product_roundings(kernel, node, n)
    if context:
        tiles = -(-n // kernel.tile) if kernel.fused else 1
        k, j = n + 2 * tiles + 4, 2
    sizes = box.lifted(size), box.lifted(result)
    factors = (a.size, b.size)
    error = rounding_of_sums(kernel, factors, sizes, extra=k - n, before=j)
    split = of_sum(kernel, factors, sizes, error, extra=k - n, before=j)
    lead = math.prod(reference.shape[:-2])
    copies = lead // min(math.prod(a.shape[:-2]), math.prod(b.shape[:-2]))
    count = max(reference.shape[-2:]) * copies
    mapped = own + gamma(count + 8, UNIT) * carried
    radius = mapped + error
    operands: list[tuple[int, Pull]] = []
    if a.place is not None:
        operands.append((a.place, _left(b.reference, a.shape)))
    if b.place is not None:
        operands.append((b.place, _right(a.reference, b.shape)))
    formed = Formed(
        reference,
        carried,
        tuple(operands),
        raised(radius if curved else radius + rest),
        bent=rest if curved else None,
        curved=curved,
        averaged=averaged,
        cases=_in_cases(a, b, raised(own + error)) if context else None,
        split=split.with_sure(mapped if curved else mapped + rest),
    )
    region = walk.tape.region
    tight = context and region is not None and bool(region.any())
    return settle(walk, node, formed, target(kernel, node), kernel.accumulate, tight=tight)


def _in_cases(p: Form, v: Form, error: Floats) -> Cases | None:
    """Return p @ v ± error in the cases of the probabilities, where these are steps."""
    choices = None if p.steps is None else p.steps.choices
    if choices is None:
        return None
    left = cases.room(error.shape) - int(math.log2(len(choices.lo)))
    worth = np.abs(v.reference).sum(axis=-1)[..., None, :]
    return cases.product(cases.chosen(choices, worth, left), v.box, error)


def _remainder(
    walk: Walk, node: Node, context: bool
) -> tuple[Floats, tuple[Curve, ...], Averaged | None]:
    """Return an elementwise bound of e_a e_b, and bounds of its functionals where there are any:
    of all, and of those of one row with the own errors of the values."""
    a, b = numeric(walk.forms[node.inputs[0]]), numeric(walk.forms[node.inputs[1]])
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    if a.place is None or b.place is None:
        return np.zeros(shape), (), None
    if context:
        rest = product_up(a.reach, b.reach)
        values = straight.values(walk, b, shape)
        if values is not None and walk.chosen(node, node.inputs[1], "product").any():
            curve = straight.context_curve(a.reach, values, rest)
            return rest, (curve,), averages(walk, a, b, values)
        return rest, (), None
    finer = straight.scores(walk, node, shape) if node.role == "scores" else None
    if finer is None:
        for name in node.inputs:
            until(walk, node, name)
    a, b = numeric(walk.forms[node.inputs[0]]), numeric(walk.forms[node.inputs[1]])
    rest = product_up(a.reach, b.reach)
    return (rest if finer is None else np.minimum(rest, finer)), (), None


def _left(b: Floats, shape: tuple[int, ...]) -> Pull:
    """Return the pullback a ← α bᵀ, one matrix product per leading index."""

    def pull(adjoint: Adjoint) -> Adjoint:
        *lead, _, columns = adjoint.window
        lead_b = _leading(b, lead)
        matrices = b[(*lead_b, slice(None), columns)].swapaxes(-1, -2)
        alpha = np.moveaxis(adjoint.values, 0, -3)  # [*lead, B, rows, columns]
        head = alpha.shape[:-3]
        flat = alpha.reshape(*head, -1, alpha.shape[-1]) @ matrices
        values = np.moveaxis(flat.reshape(*head, *alpha.shape[-3:-1], -1), -3, 0)
        found = Adjoint(np.ascontiguousarray(values), (*adjoint.start[:-1], 0))
        return summed(found, shape)

    return pull


def _right(a: Floats, shape: tuple[int, ...]) -> Pull:
    """Return the pullback b ← aᵀ α."""

    def pull(adjoint: Adjoint) -> Adjoint:
        *lead, rows, _ = adjoint.window
        lead_a = _leading(a, lead)
        matrices = a[(*lead_a, rows, slice(None))].swapaxes(-1, -2)
        alpha = np.moveaxis(adjoint.values, 0, -2)  # [*lead, rows, B, columns]
        head, (batch, width) = alpha.shape[:-3], alpha.shape[-2:]
        flat = matrices @ alpha.reshape(*head, alpha.shape[-3], -1)
        values = np.moveaxis(flat.reshape(*head, -1, batch, width), -2, 0)
        start = (*adjoint.start[:-2], 0, adjoint.start[-1])
        return summed(Adjoint(np.ascontiguousarray(values), start), shape)

    return pull


def _leading(array: Floats, lead: list[slice]) -> tuple[slice, ...]:
    """Return the leading slices of a factor that may be broadcast."""
    own = array.shape[:-2]
    chosen = lead[len(lead) - len(own) :]
    return tuple(slice(None) if n == 1 else s for n, s in zip(own, chosen, strict=True))
