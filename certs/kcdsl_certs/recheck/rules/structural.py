"""Leaves and moves: operations that round nothing, and the block input (sections 2 and 7)."""

from __future__ import annotations

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.block import Array, Node
from kcdsl_certs.recheck.box import Box
from kcdsl_certs.recheck.formats import nearest
from kcdsl_certs.recheck.rules.parameters import held, known, rows
from kcdsl_certs.recheck.rules.state import Mask, Scene, State, Value, numeric, reduce, stored
from kcdsl_certs.recheck.spec import FLOAT32, FORMATS, Kernel
from kcdsl_certs.recheck.versions import Own
from kcdsl_certs.recheck.view import View
from kcdsl_certs.recheck.weights import plain
from kcdsl_certs.rejected import Rejected


def source(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return the block input: one float32 tensor for both kernels, stored where compute is coarse.

    Raises:
        Rejected: "graph/shape" or "rule/input".
    """
    node.attrs.exactly()
    if scene.centre is None or scene.radius is None or node.role:
        raise Rejected("rule/input", "a block on token ids has no block input")
    centre = scene.centre
    if scene.rows is not None:
        centre = np.broadcast_to(centre, node.shape)  # one row for all
    x = Box(box.add_down(centre, -scene.radius), box.add_up(centre, scene.radius))
    if x.shape != scene.block.input_shape:
        raise Rejected("graph/shape", "the region does not have the input's shape")
    if scene.drift is not None:
        return _apart(scene, x, scene.drift)
    (t, wrong_t), (i, wrong_i) = _taken(scene.train, x), _taken(scene.infer, x)
    if scene.errors is not None:
        scene.errors[node.name] = (wrong_t, wrong_i)
    return reduce(t, i, box.sub(wrong_i, wrong_t))


def _apart(scene: Scene, x: Box, drift: Box) -> State:
    """Return an input that another block formed: every reading of it by either kernel."""
    if drift.shape != x.shape or scene.rows is not None:
        raise Rejected("graph/shape", "the drift does not have the input's shape")
    return reduce(x, box.add(x, drift), drift, scene.entering)


def _taken(kernel: Kernel, x: Box) -> tuple[Box, Box]:
    form = kernel.result("input", "")
    if form.precision >= FLOAT32.precision:
        return x, box.zeros(x.shape)
    return stored(kernel, form, x, np.zeros(x.shape), FLOAT32)


def parameter(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return a checkpoint tensor as either kernel stores it.

    A tensor that is read as a linear weight alone stands as that; any other reader sees it plain.
    """
    key = node.attrs.exactly("key").text("key")
    return held(scene, key, linear=node.name in scene.weights)


def constant(scene: Scene, node: Node, inputs: list[Value]) -> Value:
    """Return a constant: a mask, or a float32 table as either kernel stores it."""
    key = node.attrs.exactly("key").text("key")
    array = scene.block.constants.get(key)
    if array is None:
        raise Rejected("graph/field", f"there is no constant {key[:80]!r}")
    if array.dtype == "bool":
        return Mask(np.frombuffer(array.data, dtype=np.bool_).reshape(array.shape))
    if array.dtype != "float32":
        raise Rejected("graph/field", f"constant {key[:80]!r} is neither float32 nor bool")
    return table(array, key, node.format, scene.train, scene.infer)


def table(array: Array, key: str, pinned: str, train: Kernel, infer: Kernel) -> State:
    """Return a float32 array as both kernels store it: as it is, if its format is pinned."""
    values = np.frombuffer(array.data, dtype="<f4").astype(np.float64).reshape(array.shape)
    if not np.isfinite(values).all():
        raise Rejected("parameter/not-finite", f"constant {key[:80]!r} holds NaN or infinity")
    if pinned:
        if not np.array_equal(nearest(values, FORMATS[pinned]), values):
            raise Rejected("graph/field", f"constant {key[:80]!r} is not one of {pinned}")
        return known(values, values)
    return known(
        plain(values, train.holding, key, train.cut_weights),
        plain(values, infer.holding, key, infer.cut_weights),
    )


def embedding(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return rows of a table."""
    ids = np.array(node.attrs.exactly("ids").integers("ids", 0), dtype=np.int64)
    key = scene.keys.get(node.inputs[0])
    if key is None:
        raise Rejected("rule/weight", "the table of an embedding must be a parameter")
    if not ids.size or not len(scene.parameters.shape(key)) == 2:
        raise Rejected("graph/shape", "an embedding needs ids and a matrix")
    if int(ids.max()) >= scene.parameters.shape(key)[0]:
        raise Rejected("graph/field", "an id is beyond the table")
    return rows(held(scene, key, linear=False), ids)


def view(scene: Scene, node: Node, inputs: list[Value]) -> Value:
    """Return the elements where a view puts them."""
    found, value = View.of(node, inputs[0].shape), inputs[0]
    if isinstance(value, Mask):
        return Mask(found.moved(value.allowed))
    state = numeric(value)
    one, two = (None if own is None else found.moved(own) for own in state.own)
    t, i, d = (part.map(found.moved) for part in (state.t, state.i, state.d))
    return State(t, i, d, (one, two))


def concat(scene: Scene, node: Node, inputs: list[Value]) -> Value:
    """Return the inputs one after another along one dimension."""
    rank = len(inputs[0].shape)
    dim = node.attrs.exactly("dim").integer("dim", -rank)
    if dim >= rank or any(len(value.shape) != rank for value in inputs):
        raise Rejected("graph/shape", "the inputs of a concat do not fit")
    if all(isinstance(value, Mask) for value in inputs):
        masks = [value.allowed for value in inputs if isinstance(value, Mask)]
        return Mask(np.concatenate(masks, axis=dim))
    states = [numeric(value) for value in inputs]

    def joined(boxes: list[Box]) -> Box:
        lo = np.concatenate([b.lo for b in boxes], axis=dim)
        if all(b.point for b in boxes):
            return box.exact(lo)
        return Box(lo, np.concatenate([b.hi for b in boxes], axis=dim))

    def own(side: int) -> Own:
        if all(s.own[side] is None for s in states):
            return None
        each = ((s.own[side], s.shape) for s in states)
        parts = [np.zeros(n) if part is None else np.broadcast_to(part, n) for part, n in each]
        return np.concatenate(parts, axis=dim)

    t, i, d = (joined([getattr(s, part) for s in states]) for part in ("t", "i", "d"))
    return State(t, i, d, (own(0), own(1)))
