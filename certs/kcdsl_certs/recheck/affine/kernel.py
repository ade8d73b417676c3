"""Walk a block graph in one kernel and write its tape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.affine.form import Form, Operand, Walk
from kcdsl_certs.recheck.affine.independent import Budget
from kcdsl_certs.recheck.affine.passes import Passes
from kcdsl_certs.recheck.affine.reaches import kept
from kcdsl_certs.recheck.affine.rules import (
    activations,
    algebra,
    elementwise,
    moves,
    norms,
    softmax,
)
from kcdsl_certs.recheck.affine.tape import Entry, Tape
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Box
from kcdsl_certs.recheck.document import Hints
from kcdsl_certs.recheck.rules.state import Mask, Scene, pinned
from kcdsl_certs.recheck.spec import Kernel
from kcdsl_certs.rejected import Rejected

Rule = Callable[[Walk, Node, list[Operand]], Operand]

_OPS_OF_ROLE = {"probabilities": ("softmax",), "context": ("matmul",)}

# Each operation with its least and greatest number of inputs.
_RULES: dict[str, tuple[Rule, int, int]] = {
    "input": (moves.source, 0, 0),
    "param": (moves.leaf, 0, 0),
    "constant": (moves.leaf, 0, 0),
    "embedding": (moves.leaf, 1, 1),
    "cast": (elementwise.cast, 1, 1),
    "cache": (elementwise.cache, 1, 1),
    "linear": (algebra.linear, 2, 3),
    "matmul": (algebra.matmul, 2, 2),
    "add": (elementwise.add, 2, 2),
    "sub": (elementwise.sub, 2, 2),
    "mul": (elementwise.mul, 2, 2),
    "scale": (elementwise.scale, 1, 1),
    "divide": (elementwise.divide, 1, 1),
    "shift": (elementwise.shift, 1, 1),
    "neg": (moves.neg, 1, 1),
    "relu": (moves.relu, 1, 1),
    "tanh": (activations.tanh, 1, 1),
    "silu": (activations.silu, 1, 1),
    "gelu": (activations.gelu, 1, 1),
    "view": (moves.view, 1, 1),
    "concat": (moves.concat, 1, 10_000),
    "softmax": (softmax.softmax, 1, 2),
    "rms_norm": (norms.rms_norm, 1, 2),
    "layer_norm": (norms.layer_norm, 1, 3),
    "rope": (elementwise.rope, 3, 3),
}


def walk(
    scene: Scene,
    kernel: Kernel,
    hints: Hints | None = None,
    moved: bool = False,
    budget: Budget | None = None,
    boxes: Mapping[str, Box] | None = None,
    before: Walk | None = None,
) -> Walk:
    """Return the forms of every node in one kernel, and their tape.

    Reverse passes are those that the hints name, all that there are without hints. `moved` says
    that the kernel reads the block input with the drift of the region, where that has one. With a
    budget roundings are independent. `boxes` are those of the interval domain, by node; `before` is
    the walk of the other kernel.

    Raises:
        Rejected: naming the node.
    """
    region = None
    if scene.centre is not None and scene.radius is not None:
        region = np.broadcast_to(scene.radius, scene.centre.shape).astype(np.float64)
    softmaxes = frozenset(node.name for node in scene.block.nodes if node.op == "softmax")
    found = Walk(scene, kernel, Tape(region, budget=budget), {}, softmaxes, Passes(hints), moved)
    found.first.update({} if before is None else before.first)
    found.tape.add(Entry(np.zeros((1,)) if region is None else region))
    for node in scene.block.nodes:
        try:
            form = found.forms[node.name] = _apply(found, node)
            if boxes is not None and node.name in boxes and not isinstance(form, Mask):
                _meet(found, node.name, form, boxes[node.name])
        except Rejected as rejection:
            raise rejection.at(f"node {node.name[:80]!r}") from None
    return found


def _meet(at: Walk, name: str, form: Form, within: Box) -> None:
    """Lower the reach of a node to the farthest end of its box."""
    if form.place is None or form.place == 0:
        return
    above = box.add_up(within.hi, -form.reference)
    below = box.add_up(form.reference, -within.lo)
    kept(at, name, np.minimum(form.reach, np.maximum(above, below)))


def _apply(at: Walk, node: Node) -> Operand:
    if node.op not in _RULES:
        raise Rejected("rule/unknown-op", f"there is no rule for {node.op[:80]!r}")
    rule, least, most = _RULES[node.op]
    if not least <= len(node.inputs) <= most:
        raise Rejected("graph/field", f"{node.op} with {len(node.inputs)} inputs")
    if node.role in _OPS_OF_ROLE and node.op not in _OPS_OF_ROLE[node.role]:
        raise Rejected("graph/field", f"{node.op} in the role {node.role!r}")
    scene = pinned(at.scene, node)
    if scene is not at.scene:
        kernel = scene.train if at.kernel is at.scene.train else scene.infer
        at = replace(at, scene=scene, kernel=kernel)
    at.kernel.refuse_wide(scene.block.named, node)
    try:
        read = at.read(node)
        value = rule(at, read, [at.forms[name] for name in read.inputs])
    except ValueError as error:  # numpy refuses shapes that do not fit
        raise Rejected("graph/shape", str(error)[:200]) from None
    if value.shape != node.shape:
        raise Rejected("graph/shape", f"the shape is {list(value.shape)}, not {list(node.shape)}")
    return value
