"""The route of a mixture of experts: both kernels choose the experts of the graph (section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl.model.numerics import Activations, Numerics
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.boxes import SAFE, Box, NoBound, down, up
from kcdsl_backends.drift.boxes.state import State, Step
from kcdsl_backends.drift.ops.operation import Operation
from kcdsl_backends.drift.ops.view import same

MARGIN = 2.0**-10 + 2.0**-16
"""Least margin of a chosen logit above one that is not; 2^-16 of it is spare for the checker."""
DEPTH = -63.0
"""Most that a chosen logit may be below another one; the checker admits 64."""
WIDER = 2.0**-10
"""Relative widening of boxes, as for `no_flip` (section 8)."""
MOST_EXPERTS, MOST_EXP_ULPS = 2048, 64
"""Up to these, the relative error of float32 shares is less than 2^-12."""
BATCH = 256
"""Most pairs of experts that are compared at a time."""
_ALONE = (
    "routes have no rule at any length, in a region around the weights, on states that drift, and"
    " with independent roundings"
)


def chosen_mask(node: Node, device: torch.device) -> Tensor:
    """Return [T, E], True where the route of a node has an expert."""
    experts = torch.tensor(node.attrs["experts"], device=device)
    mask = torch.zeros(node.shape, dtype=torch.bool, device=device)
    return mask.scatter(-1, experts, torch.ones_like(experts, dtype=torch.bool))


def refuse_numerics(node: Node, numerics: Numerics) -> None:
    """Refuse kernels for which the premise or the rows of an expert have no rule.

    Raises:
        NoBound: naming what has no rule.
    """
    if node.shape[-1] > MOST_EXPERTS or numerics.attention.exp_ulps > MOST_EXP_ULPS:
        raise NoBound(
            node.name,
            f"routes have a rule for up to {MOST_EXPERTS} experts and exp_ulps {MOST_EXP_ULPS}",
        )
    for each in (numerics.activations, *(part.activations for part in numerics.overrides)):
        if _shared_by_rows(each):
            raise NoBound(
                node.name,
                f"scales {each.scale!r} of activations are of all rows that an expert gets, and"
                " the graph gives it every row",
            )


def _shared_by_rows(activations: Activations) -> bool:
    """Return whether the scale of a row depends on other rows."""
    layout = activations.layout
    return layout is not None and (layout.rows != 1 or layout.rule == "nested")


def least_margins(box: Box, chosen: Tensor, to: Tensor) -> Tensor:
    """Return lower bounds of the margins of each position's chosen logits above those of `to`."""
    least = torch.where(chosen, box.lo, torch.inf).amin(-1)
    return down(least - torch.where(to, box.hi, -torch.inf).amax(-1))


def refuse_close(node: Node, box: Box, chosen: Tensor, which: str) -> None:
    """Refuse a route that a kernel may not take.

    Args:
        node: the route.
        box: a box of the kernel's logits [T, E].
        chosen: True where an expert is chosen.
        which: the kernel's name in the reason.

    Raises:
        NoBound: naming the position and the experts whose logits are closest.
    """
    margins = least_margins(box, chosen, ~chosen)
    if not bool((margins > MARGIN).all()):
        row = int(margins.nan_to_num(-torch.inf).argmin())
        expert = int(torch.where(chosen[row], box.lo[row], torch.inf).argmin())
        other = int(torch.where(chosen[row], -torch.inf, box.hi[row]).argmax())
        raise _unsure(node, row, (expert, other), float(margins[row]), which)
    _refuse_faint(node, box, chosen, which)


def _refuse_faint(node: Node, box: Box, chosen: Tensor, which: str) -> None:
    """Refuse a chosen share that may be subnormal."""
    depths = least_margins(box, chosen, torch.ones_like(chosen))
    if not bool((depths > DEPTH).all()):
        row = int(depths.nan_to_num(-torch.inf).argmin())
        expert = int(torch.where(chosen[row], box.lo[row], torch.inf).argmin())
        raise NoBound(
            node.name,
            f"position {row}: the share of expert {expert} may be subnormal in {which}",
        )


def _unsure(node: Node, row: int, experts: tuple[int, int], margin: float, which: str) -> NoBound:
    """Return the error that a position may have another route: the second of two experts in place
    of the first, which is chosen."""
    expert, other = experts
    return NoBound(
        node.name,
        f"the route is not sure: at position {row} {which} may choose expert {other} in"
        f" place of {expert}, whose logit is above that of {other} by {margin:.3g} at least, which"
        f" must exceed {2.0**-10:.3g}",
    )


def _wider(box: Box) -> Box:
    """Return a box that contains that of the checker, whose roundings differ."""
    return box.widen(up(WIDER * (box.hi - box.lo)))


def interval_route(step: Step) -> State:
    """Return the logits; refuse unless both kernels choose the experts of the graph.

    Raises:
        NoBound: a kernel may choose others, or there is no rule.
    """
    node, kernels, x = step.node, step.kernels, step.operand(0)
    if kernels.rows is not None or kernels.ball is not None or kernels.handed:
        raise NoBound(node.name, _ALONE)
    chosen = chosen_mask(node, x.train.lo.device)
    for numerics, box, which in (
        (kernels.train.own, x.train, "the training kernel"),
        (kernels.infer.own, x.infer, "the inference kernel"),
    ):
        refuse_numerics(node, numerics)
        refuse_close(node, _wider(box), chosen, which)
    return State(x.train, x.infer, x.drift, x.apart)


def affine_route(run: KernelRun, node: Node) -> None:
    """Append the logits; refuse unless the kernel chooses the experts of the graph. Experts that
    boxes do not separate are compared by reverse passes.

    Raises:
        NoBound: the kernel may choose others, or there is no rule.
    """
    if run.spread is not None or run.handed or run.tape.chance is not None:
        raise NoBound(node.name, _ALONE)
    refuse_numerics(node, run.parameters.numerics)
    index, x = run.entry(node, 0)
    own = torch.zeros_like(x.error_bound)
    again = run.again(node, 0)
    own = own if again is None else own + again
    box = _wider(Box.point(x.reference).widen(up((x.error_bound + own) * SAFE)))
    chosen = chosen_mask(node, x.reference.device)
    _refuse_open(run, node, index, (box, own), chosen)
    same(run, node)


def _refuse_open(
    run: KernelRun, node: Node, index: int, known: tuple[Box, Tensor], chosen: Tensor
) -> None:
    """Refuse a route if reverse passes do not separate some pair of experts either."""
    box, own = known
    reference, tape = run.tape.entries[index].reference, run.tape
    rows = (~(least_margins(box, chosen, ~chosen) > MARGIN)).nonzero()[:, 0].tolist()
    for row in rows:
        lo, hi = box.lo[row], box.hi[row]
        inside, outside = chosen[row].nonzero()[:, 0], (~chosen[row]).nonzero()[:, 0]
        pairs = torch.cartesian_prod(inside, outside).reshape(-1, 2)
        pairs = pairs[~(down(lo[pairs[:, 0]] - hi[pairs[:, 1]]) > MARGIN)]
        for part in torch.split(pairs, BATCH):
            first, second = part.unbind(-1)
            values = torch.zeros(len(part), len(lo), dtype=torch.float64, device=lo.device)
            count = torch.arange(len(part), device=lo.device)
            values[count, first], values[count, second] = 1.0, -1.0
            adjoint = Adjoint(values[:, None], ((row, row + 1), (0, len(lo))), tuple(node.shape))
            low, high = tape.bound(index, adjoint).with_region(tape.radius)
            beside = (own[row][first] + own[row][second]) * SAFE
            low = low - WIDER * torch.maximum(low.abs(), high.abs()) - beside
            apart = down(down(reference[row][first] - reference[row][second]) + down(low, 4), 2)
            if not bool((apart > MARGIN).all()):
                at = int(apart.nan_to_num(-torch.inf).argmin())
                experts = int(first[at]), int(second[at])
                raise _unsure(node, row, experts, float(apart[at]), "a kernel")
    _refuse_faint(node, box, chosen, "a kernel")


OPERATIONS = {"route": Operation(interval_route, affine_route)}
