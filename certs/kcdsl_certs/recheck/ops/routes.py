"""Routes of mixtures of experts: the premise that both kernels choose the experts of the graph
(Rule 5.8)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.form import Operand, Walk
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.graphs.reading import integer
from kcdsl_certs.recheck.interval.box import Bools, Box, add_down
from kcdsl_certs.recheck.interval.state import Scene, State, Value, numeric
from kcdsl_certs.recheck.numerics.formats import LAYOUTS
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from kcdsl_certs.recheck.ops.operation import Operation

ABOVE = 2.0**-10
"""A chosen logit must be above every other one that is not by more than this."""
BELOW = 64.0
"""A chosen logit must not be as far as this below any."""
_MOST_EXPERTS, _MOST_EXP_ULPS = 2048, 64


def chosen(node: Node) -> Bools:
    """Return [T, E], True where an expert is chosen.

    Raises Rejected "graph/field" for anything but the same number of distinct experts in ascending
    order at every position.
    """
    attrs = node.attrs.exactly("experts")
    if len(node.shape) != 2:
        raise Rejected("graph/shape", "a route is of logits [T, E]")
    length, experts = node.shape
    rows, wrong = attrs.items("experts"), attrs.fail("'experts' must be lists of experts")
    if len(rows) != length:
        raise attrs.fail("'experts' must have a list for every position")
    found = np.zeros(node.shape, dtype=np.bool_)
    for number, row in enumerate(rows):
        if not isinstance(row, list) or not row or len(row) != len(rows[0]):
            raise attrs.fail("'experts' must be lists of one length, of one expert at least")
        numbers = [integer(item, 0, wrong) for item in row]
        if any(one >= two for one, two in pairwise(numbers)):
            raise attrs.fail("'experts' must be in ascending order")
        if numbers[-1] >= experts:
            raise attrs.fail(f"'experts' names {numbers[-1]}, of {experts}")
        found[number, numbers] = True
    return found


def _admitted(scene: Scene, node: Node) -> None:
    """Refuse what routes have no rule for. Raises Rejected "rule/route"."""
    if scene.rows is not None or scene.rho or scene.drift is not None or scene.followed:
        raise Rejected(
            "rule/route", "routes at any length, around weights, or in stages of a chain"
        )
    for kernel in (scene.train, scene.infer):
        own = kernel.own
        if node.shape[-1] > _MOST_EXPERTS or own.exp_ulps > _MOST_EXP_ULPS:
            raise Rejected("rule/route", "more experts or exp_ulps than the rule admits")
        for each in (own, *(other for _, other in own.others)):
            _by_rows(each)


def _by_rows(kernel: KernelNumerics) -> None:
    """Refuse activations whose scales are made of several rows. Raises Rejected "rule/route"."""
    scale = kernel.activations[1]
    layout = LAYOUTS.get(scale)
    if layout is not None and (layout.height != 1 or scale == "nvfp4"):
        raise Rejected("rule/route", f"activations with scales {scale!r}, of several rows")


def _sure(values: Box, experts: Bools, which: str) -> None:
    """Refuse logits of which others may be chosen. Raises Rejected "bound/route"."""
    least = np.min(np.where(experts, values.lo, np.inf), axis=-1)
    others = np.max(np.where(experts, -np.inf, values.hi), axis=-1)
    most = np.max(values.hi, axis=-1)
    if not bool((add_down(least, -others) > ABOVE).all()):
        row = int(np.argmin(add_down(least, -others)))
        raise Rejected("bound/route", f"position {row} may have another route in {which}")
    if not bool((add_down(least, -most) > -BELOW).all()):
        row = int(np.argmin(add_down(least, -most)))
        raise Rejected("bound/route", f"position {row} may have a subnormal share in {which}")


def route_interval(scene: Scene, node: Node, inputs: list[Value]) -> Value:
    """Return the logits of a router of which both kernels choose the experts of the node."""
    experts, x = chosen(node), numeric(inputs[0])
    if x.shape != node.shape:
        raise Rejected("graph/shape", "a route has the shape of its logits")
    _admitted(scene, node)
    _sure(x.t, experts, "training")
    _sure(x.i, experts, "inference")
    return State(x.t, x.i, x.d, x.own)


def route_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Operand:
    """Refuse routes: affine forms have no rule for them. Raises Rejected "rule/route"."""
    raise Rejected("rule/route", "affine forms have no rule for routes")


OPERATIONS = {"route": Operation(1, 1, route_interval, route_affine, None, forms=False)}
