"""Operations that move numbers without rounding them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kcdsl.model.view import View
from kcdsl_backends.interval.box import Box
from kcdsl_backends.interval.context import Step
from kcdsl_backends.interval.readings import Apart
from kcdsl_backends.interval.state import State


def move(state: State, change: Callable[[Tensor], Tensor]) -> State:
    """Apply a rearrangement of elements to every end of a state."""
    one, two = (None if a is None else change(a) for a in state.apart)
    boxes = (state.train, state.infer, state.drift)
    train, infer, drift = (Box(change(b.lo), change(b.hi)) for b in boxes)
    return State(train, infer, drift, (one, two))


def view(step: Step) -> State:
    """Return the elements where a view puts them."""
    return move(step.operand(0), View.of(step.node).moved)


def concat(step: Step) -> State:
    """Return the operands joined along one dimension."""
    dim = int(step.node.attrs["dim"])
    parts = [step.operand(i) for i in range(len(step.node.inputs))]

    def join(boxes: list[Box]) -> Box:
        return Box(torch.cat([b.lo for b in boxes], dim), torch.cat([b.hi for b in boxes], dim))

    def side(which: int) -> Apart:
        each = [p.apart[which] for p in parts]
        if all(apart is None for apart in each):
            return None
        whole = [
            torch.zeros_like(p.train.lo) if apart is None else apart.expand(p.train.shape)
            for p, apart in zip(parts, each, strict=True)
        ]
        return torch.cat(whole, dim)

    return State(
        join([p.train for p in parts]),
        join([p.infer for p in parts]),
        join([p.drift for p in parts]),
        (side(0), side(1)),
    )


def neg(step: Step) -> State:
    """Return the state with its sign changed."""
    x = step.operand(0)
    return State(-x.train, -x.infer, -x.drift, x.apart)


def embedding(step: Step) -> State:
    """Return the rows of the table at the node's token ids."""
    table = step.kernels.plain(step.operand_node(0))
    ids = torch.tensor(step.node.attrs["ids"], device=table.train.device)
    return move(table.rows(ids).state(), lambda x: x.reshape(step.node.shape))
