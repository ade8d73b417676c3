"""linear and matmul (section 3), with dynamic quantisation of a linear's input (section 2)."""

from __future__ import annotations

import math

import numpy as np

from kcdsl_certs.recheck import box, matrix_units, staircase
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Box, Floats
from kcdsl_certs.recheck.rules.parameters import held
from kcdsl_certs.recheck.rules.state import (
    Mask,
    Scene,
    State,
    Value,
    middle,
    numeric,
    settle,
)
from kcdsl_certs.recheck.spec import (
    CEILED,
    CODE_LARGEST,
    GRIDS,
    LEAST_POWER,
    NESTED,
    TOP_EXPONENT,
    Format,
    Kernel,
)
from kcdsl_certs.recheck.versions import Own
from kcdsl_certs.rejected import Rejected

_SMALL = 2.0**-20
_FLUSHED = 2.0**-126
_CUT_TERM = 2.0**-9 + 2.0**-20  # of a product whose factors are cut by 2^-10 each
_FAINT_SCALE, _FAINT_PRODUCT = 2.0**-133, 2.0**-117
_FAINT_TENSOR = 2.0**-113  # nvfp4: where 1/(m·s) is infinite, any code may be the largest


def linear(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return x @ weight.T + bias."""
    node.attrs.exactly()
    key = scene.keys.get(node.inputs[1])
    if key is None:
        raise Rejected("rule/weight", "the weight of a linear must be a parameter")
    x = numeric(inputs[0])
    weight = held(scene, key, linear=True)
    if len(x.shape) < 2 or x.shape[-1] != weight.shape[1]:
        raise Rejected("graph/shape", "the input does not fit the weight")
    bias = _bias(scene, node, inputs, weight.shape[0])
    x_t, away_t = _entering(scene.train, x.t, key)
    x_i, away_i = _entering(scene.infer, x.i, key)
    drift = box.add(x.d, box.sub(away_i, away_t))
    if (scene.train.activations[0], scene.infer.activations[0]) != ("none", "none"):
        drift = box.meet(drift, box.sub(x_i, x_t))
    w_t, w_i, w_d = (part.map(np.transpose) for part in (weight.t, weight.i, weight.d))
    products = box.matmul(x_t, w_t), box.matmul(x_i, w_i)
    y_t, y_i = box.add(products[0], bias[0]), box.add(products[1], bias[1])
    d = box.add(box.matmul(drift, w_i), box.matmul(x_t, w_d))
    d = box.add(d, bias[2])
    sizes = (
        _size(x_t, w_t, bias[0], y_t),
        _size(x_i, w_i, bias[1], y_i),
    )
    biased = len(inputs) == 3
    lost_t = clipped(scene.train, x.t, weight.t, key)
    lost_i = clipped(scene.infer, x.i, weight.i, key)
    error_t, own_t = _error(
        scene.train, x_t, w_t, sizes[0], products[0] if biased else None, key, lost_t
    )
    error_i, own_i = _error(
        scene.infer, x_i, w_i, sizes[1], products[1] if biased else None, key, lost_i
    )
    inner = scene.train.accumulate, scene.infer.accumulate
    return settle(scene, node, (y_t, y_i, d), (error_t, error_i), inner, own=(own_t, own_i))


def _entering(kernel: Kernel, x: Box, key: str) -> tuple[Box, Box]:
    """Return a linear's input after its quantisation, and its error."""
    return staircase.quantised(kernel, x, quantisation(kernel, x, key), key)


def _bias(scene: Scene, node: Node, inputs: list[Value], outputs: int) -> tuple[Box, Box, Box]:
    """Return the bias of both kernels and its drift: known numbers, or a parameter."""
    if len(inputs) < 3:
        return box.zeros((outputs,)), box.zeros((outputs,)), box.zeros((outputs,))
    bias = numeric(inputs[2])
    if not (bias.t.point and bias.i.point) and node.inputs[2] not in scene.keys:
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
    kernel: Kernel,
    x: Box,
    weight: Box,
    size: tuple[Floats, Floats],
    early: Box | None,
    key: str,
    lost: Floats | float,
) -> tuple[Floats, Own]:
    """Return E of a linear, and what of it is a cast of the product `early` before a bias.

    `lost` is what sums in 16 bits lose.
    """
    factors = box.mag(x), box.mag(weight)
    dynamic, before = kernel.activations[0] != "none", kernel.before_sums
    error = summed(kernel, factors, size, before=before, dynamic=dynamic, key=key)
    error = box.up(error + lost)
    error = box.up(error + reduced(kernel, size[0], error))
    if kernel.late:
        whole = box.mag(early) if early is not None else size[1]
        late = by_late_scales(kernel, factors, size[0], whole, error, early is not None)
        error = box.up(error + late)
    if early is not None and not kernel.stepped and kernel.coarse:
        u, eta = kernel.off(kernel.compute)
        cast = u * box.up(box.mag(early) + error) + eta
        # what the bias is added to is off by it, and so is the rounding of that sum
        own = box.up(cast * (1 + 2 * kernel.accumulate.u))
        return box.up(error + own), own
    return error, None


def by_late_scales(
    kernel: Kernel,
    factors: tuple[Floats, Floats],
    size: Floats,
    product: Floats,
    error: Floats,
    biased: bool,
) -> Floats:
    """Return what is lost where scales multiply sums of codes: what counts in units of codes near
    zero, times the greatest scale, and two casts of a sum that is stored, one before a bias.

    `factors` are the magnitudes of the input and of the weight, which is no smaller than its
    scale; `size` is S, `product` the magnitude of the sum without bias, `error` that of the sum.

    Raises:
        Rejected: "bound/overflow" where a sum of codes may overflow.
    """
    n, scale = factors[0].shape[-1], float(factors[1].max()) * (1 + _SMALL)
    lost = np.full(size.shape, (2 * n + 8) * _FLUSHED * scale)
    most = kernel.accumulate.largest
    if kernel.late == "stored_sums":
        u, eta = kernel.off(kernel.compute)
        cast = box.up(u * (1 + u) * box.up(product + error + lost)) + eta * (1 + scale)
        lost = box.up(lost + cast * (2 if biased else 1) * (1 + 2.0**-6))
        most = min(most, kernel.compute.largest)
    codes = box.up(factors[0].sum(axis=-1, keepdims=True) * (1 + _SMALL)) * 2 * kernel.most_code
    if kernel.other_unit is None:
        close = np.asarray((n + 8) * kernel.accumulate.u <= 2.0**-4)
    else:
        close = (8 * error <= size) | (size == 0)
    if not bool(((codes <= most) & close).all()):
        raise Rejected("bound/overflow", "a sum of products with codes may overflow")
    return box.up(lost)


def reduced(kernel: Kernel, size: Floats, error: Floats) -> Floats | float:
    """Return what is lost where the parts of a linear are stored and added in the compute format:
    every term is rounded once for each part, and once with a bias.

    Raises:
        Rejected: "bound/overflow" where a sum of parts may leave the format.
    """
    if kernel.shards == 1:
        return 0.0
    u, eta = kernel.off(kernel.compute)
    factor = math.expm1((kernel.shards + 1) * math.log1p(u)) * (1 + 2.0**-40)
    tiny = 2 * (kernel.shards + 1) * (1 + factor) * eta
    lost = box.up(box.up(size + error) * factor + tiny)
    if not bool((size + error + lost <= kernel.compute.largest).all()):
        raise Rejected("bound/overflow", f"a sum of parts may overflow {kernel.compute.name}")
    return lost


def clipped(kernel: Kernel, x: Box, weight: Box, key: str) -> Floats | float:
    """Return what a linear loses where it adds products of bytes two by two in 16 bits.

    A pair of products of codes 0 … 255 with codes w, w' of one sign exceeds 2^15 - 1 by at most
    255|w + w'| - (2^15 - 1). Pairing the largest with the next largest gives the greatest sum.

    Raises:
        Rejected: "rule/weight" unless the weight is known.
    """
    if not kernel.paired:
        return 0.0
    if not weight.point:
        raise Rejected("rule/weight", "sums of bytes in 16 bits with a weight that is not known")
    entries = weight.lo
    whole = np.abs(entries) if kernel.weights[1] == "per_channel" else np.abs(entries).max()
    most = whole.max(axis=1) if whole.ndim else np.full(len(entries), whole)
    unit = most / (127 if kernel.weights[0] == "int8" else 128)
    losses = []
    for part in (np.maximum(entries, 0.0), np.maximum(-entries, 0.0)):
        falling = -np.sort(-part, axis=1)
        if falling.shape[1] % 2:
            falling = np.hstack([falling, np.zeros((len(falling), 1))])
        two = falling.reshape(len(falling), -1, 2).sum(axis=2)
        beyond = np.maximum(255 * two - 32767 * (1 - _SMALL) * unit[:, None], 0.0)
        losses.append(beyond.sum(axis=1))
    step = staircase.steps(kernel, x, key).scale.hi.max(axis=-1, keepdims=True)
    return box.up(np.maximum(*losses) * step * (1 + _SMALL) * (1 + 2.0**-44))


def flushed(
    kernel: Kernel, left: Floats, right: Floats, columns: int | None = None
) -> Floats | float:
    """Return what kernels coarser than float32 lose by reading and storing subnormals as zero.

    Each operand, product and partial sum may lose up to 2^-126: an operand times what it meets.
    Where products are of codes, the product of both scales may be subnormal besides.
    """
    n = columns or left.shape[-1]
    scaled = n * _FAINT_PRODUCT if kernel.activations[0] != "none" else 0.0
    if not kernel.coarse and not kernel.shortened:
        return scaled
    sizes = left.sum(axis=-1, keepdims=True), right.sum(axis=-2, keepdims=True) * (columns or 1)
    lost = box.up((sizes[0] + sizes[1] + 2 * n + 4) * (1 + _SMALL)) * _FLUSHED
    return box.up(lost + scaled)


def summed(
    kernel: Kernel,
    factors: tuple[Floats, Floats],
    size: tuple[Floats, Floats],
    *,
    extra: int = 0,
    before: int = 2,
    dynamic: bool = False,
    key: str = "",
    columns: int | None = None,
) -> Floats:
    """Return what sums of products lose, flushing included.

    `factors` are magnitudes, `size` is S and mag(Y); `extra` and `before` count the roundings of
    partial sums beside one for each term, and those of terms. `dynamic`: the input is quantised,
    as that of the linear with the weight `key`.
    With `columns` the left factor [..., 1] is the sum of so many, and the right one [1, ...] what
    each of them meets at most.

    Raises:
        Rejected: as `accumulated`.
    """
    n, unit = columns or factors[0].shape[-1], matrix_units.unit_of(kernel, dynamic)
    lost = box.up(size[0] * _CUT_TERM) if kernel.shortened else np.zeros(())
    size = size[0] + lost, size[1] + lost
    if unit is None:
        error = accumulated(kernel, *size, n + extra, before)
        return box.up(box.up(error + lost) + flushed(kernel, *factors, columns))
    count = matrix_units.instructions(unit, n, extra)
    steps = count[0] + extra + 1
    error = accumulated(kernel, *size, steps, before)
    total, partial = box.up(size[0] + error), box.up(box.up(size[0] + size[1]) / 2 + error)
    cut = matrix_units.cut_off(kernel, unit, count, factors, total, partial, dynamic, key)
    error = box.up(error + box.up(cut * (1 + 4 * steps * kernel.accumulate.u)))
    if not bool((size[0] + error <= kernel.accumulate.largest).all()):
        raise Rejected("bound/overflow", "a sum of a matrix unit may overflow")
    return box.up(box.up(error + lost) + flushed(kernel, *factors, columns))


def accumulated(kernel: Kernel, size: Floats, result: Floats, k: int, j: int) -> Floats:
    """Return A_k,j(S, Y), S = `size`, mag(Y) = `result`; refuse sums that may overflow.

    Raises:
        Rejected: "bound/not-finite" or "bound/overflow".
    """
    form = kernel.accumulate
    left = 1 - (k + j) * form.u
    if left <= 0:
        raise Rejected("bound/not-finite", f"{k + j} roundings in {form.name} have no bound")
    # left is exact, or off by less than one part in 2^50.
    partial = k * box.up(size + result) / 2 + j * size
    error = box.up(form.u * box.up(partial) / (left * (1 - 2.0**-48)) + (k + j) * form.eta)
    if not bool((size + error <= form.largest).all()):
        raise Rejected("bound/overflow", f"a partial sum may overflow {form.name}")
    return error


def quantisation(kernel: Kernel, x: Box, key: str = "") -> Floats:
    """Return Q ≥ |x̂ - x| of the quantisation of what enters the linear with the weight `key`.

    The mx scale is a power of two made from the block's actual maximum, which the box bounds from
    both sides only: a number may saturate although others of its box are larger, but never by more
    than 1 - qmax/2^(emax + 1) of itself.

    Raises:
        Rejected: "bound/overflow" where an unscaled format or a static scale may overflow;
            "rule/static-scale".
    """
    if kernel.activations[0] == "none":
        return np.zeros(x.shape)
    static = kernel.activations[1] == "static"
    found = _calibrated(kernel, x, key) if static else _coded(kernel, x, key)
    return box.up(found + _FAINT_SCALE)  # the scale itself may be subnormal


def _calibrated(kernel: Kernel, x: Box, key: str) -> Floats:
    size, scale = box.mag(x), staircase.steps(kernel, x, key).scale.hi
    kind = kernel.activations[0]
    if kind in staircase.INTEGERS:
        return box.up((np.minimum(size, scale / 2) + size * _SMALL) * (1 + _SMALL))
    return _cast(GRIDS[kind], size, scale)


def _coded(kernel: Kernel, x: Box, key: str) -> Floats:
    kind, scale = kernel.activations
    size = box.mag(x)
    if scale == "none":
        over = np.argwhere(~(size <= CODE_LARGEST[kind]))
        if len(over):
            element = [int(i) for i in over[0]]
            raise Rejected("bound/overflow", f"element {element} of an input may overflow {kind}")
        return _cast(GRIDS[kind], size, np.ones(()))
    if scale == "nvfp4":
        return _nested(kernel, x, key)
    staircase.within_batch(kernel, x)
    most = np.maximum(staircase.largest(size, scale), kernel.batch_amax)
    if scale == "mx":
        return _shifted(kind, x, size, most)
    if kind == "uint8":
        above, below = staircase.extent(x, scale)
        step = box.lifted(above.hi + below.hi) / 255
        return box.up((step * (0.5 + 2.0**-14) + size * _SMALL) * (1 + _SMALL))
    step = np.minimum(most, kernel.amax_limit) / staircase.QMAX[kind]
    if scale in CEILED:
        step = np.maximum(2 * box.up(step), 2.0**LEAST_POWER)
    step = np.maximum(box.up(step), staircase.least_scale(kernel))
    match kind:
        case "int8":
            rounding = box.up((step / 2 + size * _SMALL) * (1 + _SMALL))
        case "int8_full":
            rounding = box.up((np.minimum(size, step / 2) + size * _SMALL) * (1 + _SMALL))
        case _:
            rounding = _cast(GRIDS[kind], size, step)
    if kernel.amax_limit == math.inf:
        return rounding
    last = kernel.amax_limit * (127 / 127.5 if kind == "int8_full" else 1.0) * (1 - _SMALL)
    return np.maximum(rounding, box.up(np.maximum(size - last, 0.0) + size * _SMALL))


def _shifted(kind: str, x: Box, size: Floats, most: Floats) -> Floats:
    """Return Q of an mx scale, which keeps `kept` of the largest number of its block at least."""
    kept = CODE_LARGEST[kind] * 2.0 ** -(TOP_EXPONENT[kind] + 1)
    least = staircase.largest(np.maximum(np.maximum(x.lo, -x.hi), 0.0), "mx")
    cut = np.minimum(size * (1 - kept), np.maximum(size - kept * least * (1 - _SMALL), 0.0))
    step = np.maximum(most * 2.0 ** -TOP_EXPONENT[kind], 2.0**LEAST_POWER)
    return np.maximum(_cast(GRIDS[kind], size, step), box.up(cut + size * _SMALL))


def _nested(kernel: Kernel, x: Box, key: str) -> Floats:
    """Return Q of nvfp4, whose largest code stands for 15/16 of the largest number of the group at
    least, for all of it but 6·2^-10 of the tensor's scale, or for 6·448 of that scale."""
    kind, size = kernel.activations[0], box.mag(x)
    tensor, step = staircase.nested(kernel, x, key)
    top = CODE_LARGEST[kind]
    sure = staircase.largest(np.maximum(np.maximum(x.lo, -x.hi), 0.0), "nvfp4")
    share = np.minimum(size / 16, np.maximum(size - sure * (15 / 16) * (1 - _SMALL), 0.0))
    small = np.minimum(size, tensor * (top * 2.0**-10) * (1 + _SMALL))
    beyond = np.maximum(size - tensor * (top * NESTED[1]) * (1 - _SMALL), 0.0)
    cut = np.maximum(np.maximum(share, small), beyond)
    found = np.maximum(_cast(GRIDS[kind], size, step), box.up(cut + size * _SMALL))
    return found if kernel.static is not None else box.up(found + _FAINT_TENSOR)


def _cast(form: Format, size: Floats, scale: Floats) -> Floats:
    return box.up((form.u * size + scale * form.eta) * (1 + _SMALL))


def matmul(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return a @ b of two computed matrices."""
    node.attrs.exactly()
    if any(isinstance(value, Mask) for value in inputs):
        raise Rejected("rule/mask", "a product with a mask")
    a, b = numeric(inputs[0]), numeric(inputs[1])
    n = check_product(a.shape, b.shape)
    y_t, y_i = box.matmul(a.t, b.t), box.matmul(a.i, b.i)
    d = box.add(box.matmul(middle(a), b.d), box.matmul(a.d, middle(b)))
    errors = []
    for kernel, left, right, y in ((scene.train, a.t, b.t, y_t), (scene.infer, a.i, b.i, y_i)):
        size = box.product_up(box.mag(left), box.mag(right))
        k, j = product_roundings(kernel, node, n)
        factors = box.mag(left), box.mag(right)
        errors.append(summed(kernel, factors, (size, box.mag(y)), extra=k - n, before=j))
    inner = scene.train.accumulate, scene.infer.accumulate
    return settle(scene, node, (y_t, y_i, d), (errors[0], errors[1]), inner)


def product_roundings(kernel: Kernel, node: Node, n: int) -> tuple[int, int]:
    """Return how often partial sums, and terms before, of a product of n terms may be rounded.

    A fused score product may scale both operands before. A fused context product that does not read
    a softmax directly is granted the rescaling of an online softmax all the same.
    """
    if kernel.fused and node.role == "context":
        return n + 2 * -(-n // kernel.tile) + 4, 2
    return n, 6 if kernel.fused and node.role == "scores" else 2


def check_product(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return the number of terms of a @ b.

    Raises:
        Rejected: "graph/shape".
    """
    if len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
        raise Rejected("graph/shape", f"no matrix product of {list(a)} and {list(b)}")
    return a[-1]
