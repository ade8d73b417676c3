"""Branch and bound on input boxes with linear bounds of one or two ReLU networks.

`decide` decides whether linear constraints on inputs and outputs can be met in a box, in real
arithmetic; `split` also if the results of layers are rounded. The result is a `SplitTree`, whose
leaves the checker derives again (section 9 of docs/proofs/difference-planes.md)."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kcdsl.inequalities import round_down, round_up
from kcdsl_backends.drift.linear.constraints import Layers, LinearConstraint, holds_at, run
from kcdsl_backends.drift.linear.paired import Hidden, OutputRows, PairedLayer, PairedNetwork
from kcdsl_backends.process import refuse_late
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.linear_bounds.constraints import replay
from kcdsl_certs.recheck.linear_bounds.splits import recheck_split

LEAF = 0xFFFF
"""The code of a box that is not split, in a tree."""
SPARE = 2.0**-30
"""The relative margin of a bound to its limit at a leaf: the checker rounds in another order."""
ON_CPU, ON_DEVICE = 32, 4096
"""Batch sizes of boxes: one that fits a cache; one that keeps a graphics processor busy."""
_STARTS, _STEPS = 64, 40
"""Of the search for a counterexample before the first split, for each conjunction."""
_MOST_STARTS = 4096
"""The most starts of all conjunctions together."""


@dataclass(frozen=True, slots=True)
class SplitTree:
    """Boxes cut in halves, in preorder: the input that is cut, or LEAF; bytes of uint16, "<"."""

    data: bytes

    @property
    def leaves(self) -> int:
        return int((np.frombuffer(self.data, "<u2") == LEAF).sum())


@dataclass(frozen=True, slots=True)
class SplitDecision:
    """The decision whether all constraints of some conjunction can hold at once.

    `tree` proves that they cannot; `point` is an input at which they hold exactly. `boxes` is the
    number of bounded boxes. `note` is the reason of "unknown".
    """

    verdict: Literal["proved", "counterexample", "unknown"]
    boxes: int
    seconds: float
    tree: SplitTree | None = None
    point: tuple[Fraction, ...] | None = None
    note: str = ""


def decide(
    networks: Sequence[Layers],
    low: Sequence[Fraction],
    high: Sequence[Fraction],
    unsafe: Sequence[Sequence[LinearConstraint]],
    seconds: float,
    device: str = "cpu",
    clock: Callable[[], float] = time.monotonic,
) -> SplitDecision:
    """Decide whether an input of a box meets all constraints of a conjunction of `unsafe`.

    The checker has derived a returned tree and replayed a returned point, without a time limit.

    Args:
        networks: one network or two of the same layer sizes, evaluated in real arithmetic.
        low, high: the corners of the box, rounded outward to float64.
        unsafe: a disjunction of conjunctions.
        seconds: time limit of the search by `clock`.
        device: where bounds are computed.

    Raises:
        NoBound: a parameter is not finite or too large, or the network is.
        ValueError: sizes do not fit.
    """
    found = split(networks, low, high, unsafe, seconds=seconds, device=device, clock=clock)
    plain = [[(w.cpu().numpy(), b.cpu().numpy()) for w, b in one] for one in networks]
    facts = [[(c.inputs, c.first, c.second, c.limit) for c in group] for group in unsafe]
    if found.point is not None and not replay(plain, low, high, facts, found.point):
        return SplitDecision(
            "unknown", found.boxes, found.seconds, note="the point is not replayed"
        )
    if found.tree is None:
        return found
    try:
        recheck_split(plain, low, high, facts, found.tree.data)
    except Rejected as rejected:
        note = f"the checker does not derive the tree: {rejected}"
        return SplitDecision("unknown", found.boxes, found.seconds, note=note)
    return found


def split(
    networks: Sequence[Layers],
    low: Sequence[Fraction],
    high: Sequence[Fraction],
    unsafe: Sequence[Sequence[LinearConstraint]],
    *,
    roundings: Sequence[tuple[Tensor, Tensor]] | None = None,
    most: int | None = None,
    seconds: float = math.inf,
    device: str = "cpu",
    clock: Callable[[], float] = time.monotonic,
) -> SplitDecision:
    """Search as `decide` does, without running the checker on the result.

    Args:
        roundings: for each layer bounds [out] of the first network's error against W h + b, and of
            the difference of both networks' errors; a point is of networks without roundings.
        most: limit of the bounded boxes, which the last batch may exceed.

    Raises:
        OutOfTime: the time limit of the command is exceeded.
    """
    started = clock()
    query = _Query.of(networks, low, high, unsafe, torch.device(device), roundings)
    point, near = query.searched()
    if point is not None:
        return SplitDecision("counterexample", 0, clock() - started, point=point)
    if roundings is not None and not query.below(near):
        note = "at one input the drift and all roundings together exceed it"
        return SplitDecision("unknown", len(near), clock() - started, note=note)
    search = BoxSearch(query.network, query.rows, *query.box, deepest=True)
    while search.open:
        if clock() - started > seconds:
            note = f"{seconds:g} s passed with {len(search.open)} boxes left"
            return SplitDecision("unknown", search.boxes, clock() - started, note=note)
        if most is not None and search.boxes >= most:
            note = f"{len(search.open)} boxes are left of {search.boxes}"
            return SplitDecision("unknown", search.boxes, clock() - started, note=note)
        refuse_late()
        for batch in search.batches():
            worst = query.worst(batch.bounds)
            left = ~(worst < 0)
            point = query.met(batch, left)
            if point is not None:
                passed = clock() - started
                return SplitDecision("counterexample", search.boxes, passed, point=point)
            if not search.split(batch, left, worst):
                note = "a box has no float64 inside"
                return SplitDecision("unknown", search.boxes, clock() - started, note=note)
    passed = clock() - started
    return SplitDecision("proved", search.boxes, passed, tree=search.tree())


@dataclass(frozen=True, slots=True)
class BoxBatch:
    """A batch of bounded boxes: corners [B, inputs], bounds [B, M], slopes in x [B, M, inputs]."""

    nodes: tuple[int, ...]
    low: Tensor
    high: Tensor
    bounds: Tensor
    slopes: Tensor
    hidden: Hidden


@dataclass(slots=True)
class BoxSearch:
    """The open boxes, and the tree of the boxes that were split.

    `deepest`: search depth first, so that few boxes are open; else the largest bounds first.
    """

    network: PairedNetwork
    rows: OutputRows
    low: Tensor
    high: Tensor
    deepest: bool
    boxes: int = 0
    cuts: list[int] = field(default_factory=lambda: [LEAF])
    children: list[int] = field(default_factory=lambda: [-1])
    """The first child of a node; the second follows it."""
    open: list[tuple[float, int, Tensor, Tensor, Hidden | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.open = [(0.0, 0, self.low, self.high, None)]

    def batches(self) -> Iterator[BoxBatch]:
        """Take the next boxes and yield them with their bounds."""
        count = ON_CPU if self.low.device.type == "cpu" else ON_DEVICE
        taken = [heapq.heappop(self.open) for _ in range(min(count, len(self.open)))]
        low = torch.stack([one[2] for one in taken])
        high = torch.stack([one[3] for one in taken])
        known = None
        if all(one[4] is not None for one in taken):
            each = [one[4] or () for one in taken]
            known = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
        bounds, slopes, hidden = self.network.above(low, high, self.rows, known)
        self.boxes += len(taken)
        yield BoxBatch(tuple(one[1] for one in taken), low, high, bounds, slopes, hidden)

    def split(self, batch: BoxBatch, chosen: Tensor, worst: Tensor) -> bool:
        """Halve the chosen boxes; return False where one has no float64 between its corners."""
        score = (batch.high - batch.low) * batch.slopes.abs().amax(1)
        score = torch.where(batch.high > batch.low, score.nan_to_num(0.0, 0.0, 0.0), -1.0)
        wide = batch.high - batch.low
        flat = score.amax(1, keepdim=True) <= 0  # all slopes are zero: cut the widest input
        cuts = torch.where(flat, wide, score).argmax(1).tolist()
        for k in torch.nonzero(chosen).flatten().tolist():
            cut, low, high = cuts[k], batch.low[k], batch.high[k]
            middle = low[cut] + (high[cut] - low[cut]) / 2
            if not bool((low[cut] < middle) & (middle < high[cut])):
                return False
            first, second = high.clone(), low.clone()
            first[cut], second[cut] = middle, middle
            hidden = tuple(part[k] for part in batch.hidden)
            node, child = batch.nodes[k], len(self.cuts)
            self.cuts[node], self.children[node] = cut, child
            self.cuts += [LEAF, LEAF]
            self.children += [-1, -1]
            key = -child if self.deepest else -float(worst[k])
            heapq.heappush(self.open, (key, child, low, first, hidden))
            heapq.heappush(self.open, (key, child + 1, second, high, hidden))
        return True

    def tree(self) -> SplitTree:
        """Return the tree of splits, in preorder."""
        order, found = [0], []
        while order:
            node = order.pop()
            found.append(self.cuts[node])
            if self.cuts[node] != LEAF:
                order += [self.children[node] + 1, self.children[node]]
        return SplitTree(np.array(found, "<u2").tobytes())


@dataclass(frozen=True, slots=True)
class _Query:
    """The question of `decide`, as tensors and in exact numbers."""

    networks: tuple[tuple[tuple[Tensor, Tensor], ...], ...]
    network: PairedNetwork
    exact_box: tuple[tuple[Fraction, ...], tuple[Fraction, ...]]
    box: tuple[Tensor, Tensor]
    unsafe: tuple[tuple[LinearConstraint, ...], ...]
    rows: OutputRows
    """The negated left sides of all constraints."""
    limits: Tensor
    """A constraint cannot hold where the bound of its row is below this."""
    groups: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(
        networks: Sequence[Layers],
        low: Sequence[Fraction],
        high: Sequence[Fraction],
        unsafe: Sequence[Sequence[LinearConstraint]],
        device: torch.device,
        roundings: Sequence[tuple[Tensor, Tensor]] | None = None,
    ) -> _Query:
        held = tuple(
            tuple((weight.to(device).double(), bias.to(device).double()) for weight, bias in one)
            for one in networks
        )
        if len(held) not in (1, 2) or len({tuple(w.shape for w, _ in one) for one in held}) != 1:
            raise ValueError("one network, or two of the same layer sizes")
        inputs, outputs = held[0][0][0].shape[1], held[0][-1][0].shape[0]
        flat = [one for group in unsafe for one in group]
        fits = len(low) == len(high) == inputs and all(unsafe)
        for one in flat:
            wanted = inputs, outputs, outputs if len(held) == 2 else 0
            fits = fits and (len(one.inputs), len(one.first), len(one.second)) == wanted
        if not fits or not flat or any(a > b for a, b in zip(low, high, strict=True)):
            raise ValueError("the box or the constraints do not fit the network")
        layers = tuple(
            PairedLayer.of(
                one,
                held[1][k] if len(held) == 2 else None,
                None if roundings is None else roundings[k],
            )
            for k, one in enumerate(held[0])
        )

        def tensor(values: Sequence[Sequence[float]]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        first = tensor([one.first for one in flat])
        second = tensor([one.second for one in flat]) if len(held) == 2 else 0 * first
        rows = OutputRows(-tensor([one.inputs for one in flat]), -(first + second), -second)
        limits = [round_down(-one.limit) for one in flat]
        limits = [limit - SPARE * (1 + abs(limit)) for limit in limits]
        places, groups = 0, []
        for group in unsafe:
            groups.append(tuple(range(places, places + len(group))))
            places += len(group)
        corners = tensor([[round_down(v) for v in low], [round_up(v) for v in high]])
        exact = tuple(low), tuple(high)
        return _Query(
            held,
            PairedNetwork(layers),
            exact,
            (corners[0], corners[1]),
            tuple(tuple(group) for group in unsafe),
            rows,
            tensor([limits])[0],
            tuple(groups),
        )

    def worst(self, bounds: Tensor) -> Tensor:
        """Return in each box the margin by which some conjunction may hold, from bounds [B, rows];
        negative: none can."""
        over = bounds - self.limits
        return torch.stack([over[:, group].amin(1) for group in self.groups], 1).amax(1)

    def below(self, x: Tensor) -> bool:
        """Return whether no conjunction holds at inputs [B, inputs], in floating point."""
        return bool((self.worst(self.network.above(x, x, self.rows)[0]) < 0).all())

    def excess(self, x: Tensor) -> Tensor:
        """Return by how much inputs [B, inputs] violate each conjunction [B, groups]."""
        f = run(self.networks[0], x)
        drift = run(self.networks[1], x) - f if len(self.networks) == 2 else 0 * f
        value = x @ self.rows.inputs.T + f @ self.rows.first.T + drift @ self.rows.drift.T
        missed = self.limits - value
        return torch.stack([missed[:, group].amax(1) for group in self.groups], 1)

    def searched(self) -> tuple[tuple[Fraction, ...] | None, Tensor]:
        """Search by steps of the gradient's sign; return an input at which a conjunction holds,
        None if none is found, and the last inputs [B, inputs] with the smallest excess."""
        low, high = self.box
        generator = torch.Generator().manual_seed(0)
        groups = len(self.groups)
        count = max(1, min(_STARTS, _MOST_STARTS // groups))
        start = torch.rand(count * groups, len(low), generator=generator, dtype=torch.float64)
        x = low + (high - low) * start.to(low.device)
        which = torch.arange(count * groups, device=low.device) % groups
        for step in range(_STEPS):
            x = x.detach().requires_grad_(True)
            missed = self.excess(x)
            found = self._exactly(x.detach(), missed.detach())
            if found is not None:
                return found, x.detach()[:0]
            own = missed.gather(1, which.unsqueeze(1)).sum()
            (gradient,) = torch.autograd.grad(own, x)
            share = 0.5 / (1 + step / 4)
            moved = x.detach() - share * (high - low) * gradient.sign()
            x = torch.minimum(torch.maximum(moved, low), high)
        order = self.excess(x).amin(1).argsort(stable=True)
        return None, x[order[:ON_CPU]]

    def met(self, batch: BoxBatch, left: Tensor) -> tuple[Fraction, ...] | None:
        """Return a centre or corner of a box at which a conjunction holds, None without one."""
        if not bool(left.any()):
            return None
        low, high = batch.low[left], batch.high[left]
        worst = batch.slopes[left].abs().sum(-1).argmax(1)
        slopes = batch.slopes[left][torch.arange(len(low), device=low.device), worst]
        x = torch.cat([low + (high - low) / 2, torch.where(slopes > 0, high, low)])
        return self._exactly(x, self.excess(x))

    def _exactly(self, x: Tensor, missed: Tensor) -> tuple[Fraction, ...] | None:
        """Return the input with the smallest excess, moved into the exact box, if it satisfies a
        conjunction there in exact arithmetic."""
        best = int(missed.amin(1).argmin())
        if not float(missed[best].amin()) <= 2 * SPARE * (1 + float(self.limits.abs().amax())):
            return None
        point = tuple(
            min(max(Fraction(value), least), most)
            for value, least, most in zip(x[best].tolist(), *self.exact_box, strict=True)
        )
        return point if holds_at(self.networks, point, self.unsafe) else None
