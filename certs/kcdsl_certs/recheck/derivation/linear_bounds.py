"""Walk a block graph in linear bounds of deviation and drift, node by node (sections 2 and 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import units
from kcdsl_certs.recheck.derivation.interval import apply, magnitudes
from kcdsl_certs.recheck.documents.hints import Bent, PlaneHints, Searched
from kcdsl_certs.recheck.graphs.graph import Array, Node
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import Bools, Box, Floats
from kcdsl_certs.recheck.interval.state import Scene, State, reduce
from kcdsl_certs.recheck.linear_bounds.context import DEVIATION, DRIFT, Context, elements, is_number
from kcdsl_certs.recheck.linear_bounds.tape import Functional, Slopes
from kcdsl_certs.recheck.ops.attention import rope, softmax
from kcdsl_certs.recheck.ops.elementwise import activations, arithmetic, pointwise
from kcdsl_certs.recheck.ops.linear import linear, matmul
from kcdsl_certs.recheck.ops.moves import leaves, view
from kcdsl_certs.recheck.ops.norms import norms
from kcdsl_certs.rejected import Rejected

Rule = Callable[[Context, Node], None]

_RULES: Mapping[str, Rule] = {
    "input": leaves.source_bounds,
    "embedding": leaves.embedding_bounds,
    "view": view.view_bounds,
    "concat": view.concat_bounds,
    "neg": pointwise.neg_bounds,
    "cast": pointwise.cast_bounds,
    "linear": linear.linear_bounds,
    "matmul": matmul.matmul_bounds,
    "mul": matmul.mul_bounds,
    "add": arithmetic.add_bounds,
    "sub": arithmetic.sub_bounds,
    "scale": arithmetic.scale_bounds,
    "divide": arithmetic.divide_bounds,
    "shift": arithmetic.shift_bounds,
    "rope": rope.rope_bounds,
    "tanh": activations.activation_bounds,
    "silu": activations.activation_bounds,
    "gelu": activations.activation_bounds,
    "softmax": softmax.softmax_bounds,
    "rms_norm": norms.rms_norm_bounds,
    "layer_norm": norms.layer_norm_bounds,
}
_CLOSELY: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("relu", "tanh", "silu", "gelu", "softmax", "layer_norm", "rms_norm"), (0,)),
    **dict.fromkeys(("matmul", "mul"), (0, 1)),
}


@dataclass(frozen=True, slots=True)
class Derived:
    """The boxes of the output, and by node the largest |T| and |D|."""

    output: State
    sizes: Mapping[str, tuple[float, float]]


def derive(scene: Scene, hints: PlaneHints | None = None) -> Derived:
    """Return what planes say of the output beside the interval domain.

    With hints only the functionals that they name are made, with the slopes that they name; without
    hints functionals of everything that a rule reads closely.

    Raises:
        Rejected: naming the node.
    """
    course = walk(scene, hints)
    sizes = {name: magnitudes(value) for name, value in course.values.items()}
    return Derived(course.state(scene.block.output), sizes)


def walk(scene: Scene, hints: PlaneHints | None = None) -> Context:
    """Write the whole tape; see `derive`."""
    beside = scene.rows, scene.drift, scene.held
    if scene.rho or any(part is not None for part in beside):
        raise Rejected("document/domain", "planes are of one length, checkpoint and input alone")
    if any(node.op == "cache" for node in scene.block.nodes):
        raise Rejected("document/domain", "planes do not cover a quantised cache")
    errors: dict[str, tuple[Box, Box]] = {}
    course = Context(replace(scene, errors=errors), errors)
    sharp = _Sharpener(course, hints)
    for node in scene.block.nodes:
        course.nodes[node.name] = node
        try:
            for position in _CLOSELY.get(node.op, ()):
                if position < len(node.inputs):
                    sharp.sharpen(node.inputs[position])
            inputs = [course.values[name] for name in node.inputs]
            course.values[node.name] = apply(course.scene, node, inputs)
            _write(course, node, hints)
        except Rejected as rejection:
            raise rejection.at(f"node {node.name[:80]!r}") from None
    sharp.sharpen(scene.block.output)
    if hints is not None:
        for searched in hints.searched:
            sharp.search(searched)
    return course


def _write(course: Context, node: Node, hints: PlaneHints | None) -> None:
    if node.op in ("param", "constant") or not is_number(course.values[node.name]):
        return
    if node.op == "relu":
        given = None if hints is None else hints.slopes.get(node.name)
        slopes = None if given is None else (_at(given), _rows(given.values))
        pointwise.relu_bounds(course, node, slopes)
    else:
        _RULES[node.op](course, node)


class _Sharpener:
    """Meets the boxes of nodes with what functionals of their elements show (section 5)."""

    def __init__(self, course: Context, hints: PlaneHints | None) -> None:
        self._course, self._hints = course, hints
        self._done: set[str] = set()

    def sharpen(self, name: str) -> None:
        """Bound the elements of a computed node once, in the rows that are named."""
        course, state = self._course, self._course.values[name]
        known = course.nodes[name].op in ("param", "constant")
        if name in self._done or known or not isinstance(state, State):
            return
        self._done.add(name)
        place = course.places[name]
        made = [
            elements(course.tape, place, unknown, self._rows(name, unknown, state.shape))
            for unknown in (DEVIATION, DRIFT)
        ]
        self._meet(name, state, made[0], made[1])

    def search(self, searched: Searched) -> None:
        """Bound one element of the output's drift with slopes of its own."""
        course, name = self._course, self._course.scene.block.output
        if name not in course.places:  # a parameter, which is known
            return
        state, place = course.state(name), course.places[name]
        row = np.unravel_index(searched.element, state.shape)
        where = tuple(int(k) for k in row)
        one = Functional(None, units(state.shape, where[:-1], where[-1], 1))
        sign = 1.0 if searched.side == "above" else -1.0
        middle, wide = course.tape.walk(place, one.times(sign), self._own(searched))
        most = float(box.above(middle + wide)[0])
        lo, hi = state.d.lo.copy(), state.d.hi.copy()
        if sign > 0:
            hi[where] = min(hi[where], most)
        else:
            lo[where] = max(lo[where], -most)
        entry = course.tape.entries[place]
        self._meet(name, state, entry.e, Box(lo, hi))

    def _meet(self, name: str, state: State, e: Box, d: Box) -> None:
        course, place = self._course, self._course.places[name]
        reference = box.exact(course.tape.entries[place].reference)
        t = box.meet(state.t, box.add(reference, e))
        sharper = reduce(t, state.i, box.meet(state.d, d), state.own)
        course.values[name] = sharper
        course.tape.sharpen(place, box.meet(e, box.sub(sharper.t, reference)), sharper.d)

    def _rows(self, name: str, unknown: str, shape: tuple[int, ...]) -> Bools:
        """Return for which rows [..., 1] of a node functionals are made."""
        chosen = np.ones((*shape[:-1], 1), dtype=np.bool_)
        if self._hints is None:
            return chosen
        chosen[...] = False
        runs = self._hints.met.get((name, unknown), ())
        for start, stop in zip(runs[::2], runs[1::2], strict=True):
            chosen.reshape(-1)[start:stop] = True
        return chosen

    def _own(self, searched: Searched) -> dict[int, Slopes]:
        """Return the slopes of one element: of the ReLUs in turn, as they are named."""
        if self._hints is None:
            return {}
        values, found, first = _rows(searched.values), {}, 0
        for name, bent in self._hints.slopes.items():
            place = self._course.places[name]
            relu = self._course.tape.entries[place].relu
            if relu is not None:
                part = values[:, first : first + bent.count]
                found[place] = relu.slopes.replaced(_at(bent), part)
            first += bent.count
        return found


def _at(bent: Bent) -> Bools:
    return np.frombuffer(bent.at.data, dtype=np.bool_).reshape(bent.at.shape)


def _rows(values: Array) -> Floats:
    return np.frombuffer(values.data, dtype="<f4").astype(np.float64).reshape(values.shape)
