"""Routes of mixtures of experts: the premise that both kernels choose the experts of the graph
(Rule 5.8)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.form import (
    Form,
    Operand,
    Version,
    Walk,
    form_of,
    known_form,
)
from kcdsl_certs.recheck.affine.tape import TapeEntry
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.graphs.strict_json import integer
from kcdsl_certs.recheck.interval.box import Bools, Box, Floats, add_down, add_up, raised
from kcdsl_certs.recheck.interval.state import DriftProblem, State, Value, numeric
from kcdsl_certs.recheck.numerics.formats import LAYOUTS
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from kcdsl_certs.recheck.ops.operation import Operation

ABOVE = 2.0**-10
"""A chosen logit must be above every logit that is not chosen by more than this."""
BELOW = 64.0
"""A chosen logit must be less than this below every other one."""
_MOST_EXPERTS, _MOST_EXP_ULPS = 2048, 64
_BATCH = 128  # pairs of experts at a time


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


def _admitted(problem: DriftProblem, node: Node) -> None:
    """Refuse scenes and kernels for which routes have no rule. Raises Rejected "rule/route"."""
    if problem.rows is not None or problem.rho or problem.drift is not None or problem.followed:
        raise Rejected(
            "rule/route", "routes at any length, around weights, or in stages of a chain"
        )
    for kernel in (problem.train, problem.infer):
        own = kernel.own
        if node.shape[-1] > _MOST_EXPERTS or own.exp_ulps > _MOST_EXP_ULPS:
            raise Rejected("rule/route", "more experts or exp_ulps than the rule admits")
        for each in (own, *(other for _, other in own.others)):
            _by_rows(each)


def _by_rows(kernel: KernelNumerics) -> None:
    """Refuse activations whose scales depend on several rows. Raises Rejected "rule/route"."""
    scale = kernel.activations[1]
    layout = LAYOUTS.get(scale)
    if layout is not None and (layout.height != 1 or layout.nested):
        raise Rejected("rule/route", f"activations with scales {scale!r}, of several rows")


def _sure(values: Box, experts: Bools, which: str) -> None:
    """Refuse logits for which a kernel may choose other experts. Raises Rejected "bound/route"."""
    least = np.min(np.where(experts, values.lo, np.inf), axis=-1)
    others = np.max(np.where(experts, -np.inf, values.hi), axis=-1)
    if not bool((add_down(least, -others) > ABOVE).all()):
        row = int(np.argmin(add_down(least, -others)))
        raise Rejected("bound/route", f"position {row} may have another route in {which}")
    _normal(values, experts, which)


def _normal(values: Box, experts: Bools, which: str) -> None:
    """Refuse chosen shares that may be subnormal. Raises Rejected "bound/route"."""
    least = np.min(np.where(experts, values.lo, np.inf), axis=-1)
    depth = add_down(least, -np.max(values.hi, axis=-1))
    if not bool((depth > -BELOW).all()):
        row = int(np.argmin(depth))
        raise Rejected("bound/route", f"position {row} may have a subnormal share in {which}")


def route_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> Value:
    """Return the logits of a router; refuse unless both kernels choose the experts of the node."""
    experts, x = chosen(node), numeric(inputs[0])
    if x.shape != node.shape:
        raise Rejected("graph/shape", "a route has the shape of its logits")
    _admitted(problem, node)
    _sure(x.t, experts, "training")
    _sure(x.i, experts, "inference")
    return State(x.t, x.i, x.d, x.own)


def route_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Operand:
    """Return the logits of a router; refuse unless the kernel chooses the experts of the node.

    Raises Rejected "bound/route", or "rule/route" where there is no rule.
    """
    experts, x = chosen(node), form_of(inputs[0])
    if x.shape != node.shape:
        raise Rejected("graph/shape", "a route has the shape of its logits")
    _admitted(walk.problem, node)
    if walk.tape.budget is not None:
        raise Rejected("rule/route", "routes with independent roundings")
    own = walk.own(node, 0)
    error_bound = x.error_bound if own is None else raised(x.error_bound + own)
    values = Box(add_down(x.reference, -error_bound), add_up(x.reference, error_bound))
    if x.place is None:
        _sure(values, experts, "a kernel")
        return known_form(x.reference)
    for row in range(node.shape[0]):
        _separate(walk, x, (row, own), values, experts[row])
    _normal(values, experts, "a kernel")
    place = walk.tape.add(TapeEntry(x.error_bound, ((x.place, lambda a: a),)))
    if own is not None:
        walk.versions[node.name] = Version(own)
    return Form(x.reference, x.error_bound, place, x.origin, cases=x.cases)


def _separate(
    walk: Walk, x: Form, at: tuple[int, Floats | None], values: Box, experts: Bools
) -> None:
    """Refuse a row unless every chosen logit is above every other one: by the boxes of both, else
    by a functional of their difference. Raises Rejected "bound/route"."""
    row, own = at
    inside, outside = np.nonzero(experts)[0], np.nonzero(~experts)[0]
    first, second = (index.reshape(-1) for index in np.meshgrid(inside, outside, indexing="ij"))
    lo, hi, reference = values.lo[row], values.hi[row], x.reference[row]
    asked = ~(add_down(lo[first], -hi[second]) > ABOVE)
    first, second = first[asked], second[asked]
    for start in range(0, first.size, _BATCH):
        one, two = first[start : start + _BATCH], second[start : start + _BATCH]
        functionals = np.zeros((one.size, 1, experts.size))
        functionals[np.arange(one.size), 0, one] = 1.0
        functionals[np.arange(one.size), 0, two] = -1.0
        assert x.place is not None
        found = walk.tape.bound(x.place, Adjoint(functionals, (row, 0)))
        wide = found.around(walk.tape.region)
        if own is not None:
            wide = raised(wide + own[row][one] + own[row][two])
        least = add_down(add_down(reference[one], -reference[two]), found.centre)
        if not bool((add_down(least, -wide) > ABOVE).all()):
            raise Rejected("bound/route", f"position {row} may have another route in a kernel")


OPERATIONS = {"route": Operation(1, 1, route_interval, route_affine, None, forms=False)}
