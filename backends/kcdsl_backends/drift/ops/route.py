"""The route of a mixture of experts: both kernels choose the experts of the graph (section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl.model.numerics import Activations, Numerics
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.boxes import Box, NoBound, down
from kcdsl_backends.drift.boxes.state import State, Step
from kcdsl_backends.drift.ops.operation import Operation

MARGIN = 2.0**-10 + 2.0**-16
"""How far a chosen logit must be above one that is not; 2^-16 is left for the checker."""
DEPTH = -63.0
"""How far a chosen logit may be below another one; the checker admits 64."""
MOST_EXPERTS, MOST_EXP_ULPS = 2048, 64
"""Up to these, shares of float32 are off by less than 2^-12 of themselves."""


def chosen_mask(node: Node, device: torch.device) -> Tensor:
    """Return [T, E], True where the route of a node has an expert."""
    experts = torch.tensor(node.attrs["experts"], device=device)
    mask = torch.zeros(node.shape, dtype=torch.bool, device=device)
    return mask.scatter(-1, experts, torch.ones_like(experts, dtype=torch.bool))


def refuse_numerics(node: Node, numerics: Numerics) -> None:
    """Refuse kernels for which the premise or the rows of an expert have no rule.

    Raises:
        NoBound: naming what has none.
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
    """Say whether what a row is quantised with depends on other rows."""
    layout = activations.layout
    return layout is not None and (layout.rows != 1 or layout.rule == "nested")


def refuse_close(node: Node, below: Tensor, above: Tensor, chosen: Tensor, which: str) -> None:
    """Refuse a route that a kernel may not take.

    Args:
        node: the route.
        below, above: bounds of the logits [T, E] of the kernel.
        chosen: True where an expert is chosen.
        which: "training" or "inference".

    Raises:
        NoBound: with the position and the experts whose logits are closest.
    """
    least = torch.where(chosen, below, torch.inf)
    others = torch.where(chosen, -torch.inf, above)
    margins = down(least.amin(-1) - others.amax(-1))
    depths = down(least.amin(-1) - above.amax(-1))
    unsure = ~(margins > MARGIN)
    if bool(unsure.any()):
        row = int(torch.where(unsure, margins, torch.inf).nan_to_num(-torch.inf).argmin())
        experts = int(least[row].argmin()), int(others[row].argmax())
        raise unsure_route(node, row, experts, float(margins[row]), which)
    if not bool((depths > DEPTH).all()):
        row = int(depths.nan_to_num(-torch.inf).argmin())
        raise NoBound(
            node.name,
            f"position {row}: the share of expert {int(least[row].argmin())} may be subnormal in"
            f" the {which} kernel",
        )


def unsure_route(
    node: Node, row: int, experts: tuple[int, int], margin: float, which: str
) -> NoBound:
    """Return that a position may have another route: with the second of two experts in place of
    the first, which is chosen."""
    expert, other = experts
    return NoBound(
        node.name,
        f"the route is not sure: at position {row} the {which} kernel may choose expert {other} in"
        f" place of {expert}, whose logit is above that of {other} by {margin:.3g} at least, which"
        f" must exceed {2.0**-10:.3g}",
    )


def interval_route(step: Step) -> State:
    """Return the logits, after both kernels were shown to choose the experts of the graph.

    Raises:
        NoBound: a kernel may choose others, or there is no rule.
    """
    node, kernels, x = step.node, step.kernels, step.operand(0)
    if kernels.rows is not None or kernels.ball is not None or kernels.handed:
        raise NoBound(
            node.name,
            "routes have no rule at any length, in a region around the weights, and on states that"
            " drift",
        )
    chosen = chosen_mask(node, x.train.lo.device)
    sides: tuple[tuple[Numerics, Box, str], ...] = (
        (kernels.train.own, x.train, "training"),
        (kernels.infer.own, x.infer, "inference"),
    )
    for numerics, box, which in sides:
        refuse_numerics(node, numerics)
        refuse_close(node, box.lo, box.hi, chosen, which)
    return State(x.train, x.infer, x.drift, x.apart)


def affine_route(run: KernelRun, node: Node) -> None:
    """Refuse routes, for which affine forms have no rule."""
    raise NoBound(node.name, "affine forms have no rule for routes")


OPERATIONS = {"route": Operation(interval_route, affine_route)}
