"""Search for runs with a large drift by ascents from several starts (gradient_ascent.py).

Deterministic: the same arguments give the same runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from kcdsl_backends.attack.batched_search import batched_ascent
from kcdsl_backends.attack.gradient_ascent import Ascent, Symbols
from kcdsl_backends.attack.operations import ORDERS
from kcdsl_backends.attack.runs import SIDES, Attack, RunPair, functional, measured
from kcdsl_backends.attack.simulation import Overflowed, Simulator

_SAMPLES = 24
"""Random directions for the first-order estimate of each output element's drift."""
_TARGETS = 4
"""Output elements that a batched search maximises."""
__all__ = ["Attack", "attack", "functional", "with_orders"]


def attack(
    train: Simulator,
    infer: Simulator,
    kind: str,
    centre: Tensor | None,
    radius: Tensor,
    *,
    candidates: int = 5,
    rounds: int = 12,
    restarts: int = 1,
    seed: int = 0,
    places: Sequence[int] = (),
    start: Sequence[float] = (),
    samples: int = 0,
    batches: int = 1,
) -> Attack:
    """Search for admissible runs of both kernels whose drift is large.

    An ascent maximises one output element in one direction. Ascents start without roundings, at
    the elements with the largest estimates and at those that became largest on the way, then from
    gradient signs and, for the best elements, from random signs. Every run tried is measured.

    Args:
        centre, radius: the region, [T, D] and broadcastable; centre None for a block on token ids.
        candidates: number of output elements to maximise.
        rounds: largest number of steps of an ascent.
        restarts: number of random starts for each of the best elements.
        places: indices of the flattened output to maximise first, such as where a bound is largest.
        start: an input to start from first, as offsets from the centre in units of the radius.
        samples: number of inputs drawn from the region, and of random-walk steps from the best.
        batches: number of batched searches (batched_search.py), which run if a kernel rounds to
            nearest and the region is more than a point.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    ascent = Ascent(train, infer, kind, centre, radius)
    zero = ascent.zero()
    ascent.drift_of(zero)
    if not ascent.shapes:
        return ascent.best()
    estimated = ascent.linear_estimate(_SAMPLES, generator)
    at_random = ascent.drift_of(ascent.signs(generator)).abs()
    reached: dict[tuple[int, float], float] = {}

    def climb_to(position: int, sign: float, start: Symbols) -> None:
        objective = ascent.climb(start, position, sign, rounds)
        reached[position, sign] = max(objective, reached.get((position, sign), -torch.inf))

    if ascent.moves and len(start) == zero["x", "x"].numel():
        shares = torch.tensor(start, dtype=torch.float64).reshape(zero["x", "x"].shape)
        given = zero | {("x", "x"): shares.to(zero["x", "x"].device)}
        position = _largest(ascent.drift_of(given).abs(), 1)[0]
        for sign in (1.0, -1.0):
            climb_to(position, sign, given)
    for position in dict.fromkeys([*places, *_largest(estimated, candidates)]):
        for sign in (1.0, -1.0):
            climb_to(position, sign, zero)
    for position in _largest(ascent.seen, 2):
        for sign in (1.0, -1.0):
            if (position, sign) not in reached:
                climb_to(position, sign, zero)
    for position in dict.fromkeys([*places[:2], *_largest(at_random, 3)]):
        for sign in (1.0, -1.0):
            climb_to(position, sign, ascent.sign_start(zero, position, sign))
    ascent.sample(samples, generator)
    best = sorted(reached, key=lambda place: -reached[place])[:2]
    for position, sign in best:
        for _ in range(restarts):
            climb_to(position, sign, ascent.signs(generator))
    if ascent.moves and (train.steps or infer.steps):
        targets = sorted(reached, key=lambda place: -reached[place])[:_TARGETS]
        batched_ascent(ascent, targets, batches, rounds, generator)
    return ascent.best()


def with_orders(run: RunPair, train: Simulator, infer: Simulator, kind: str) -> Attack | None:
    """Return the largest drift with all sums in a concrete order and other roundings as in `run`.

    Such a drift does not rest on a worst case of rounding errors in sums. All sums of a kernel
    have the same order. Return None if no sum has orders or every such run overflows.
    """
    if not train.ordered and not infer.ordered:
        return None
    strongest: Attack | None = None
    simulators = dict(zip(SIDES, (train, infer), strict=True))
    symbols = {
        side: _without_sums(run.symbols.get(side, {}), one) for side, one in simulators.items()
    }
    ends = [_in_every_order(run.x, symbols[side], one) for side, one in simulators.items()]
    for orders_train, out_train in ends[0]:
        for orders_infer, out_infer in ends[1]:
            both = RunPair(run.x, symbols, {"train": orders_train, "infer": orders_infer})
            tried = measured(both, out_train, out_infer, kind)
            if tried is not None and (strongest is None or tried.value > strongest.value):
                strongest = tried
    return strongest


def _in_every_order(
    x: Tensor | None, symbols: Mapping[str, Tensor], simulator: Simulator
) -> list[tuple[dict[str, str], Tensor]]:
    """Return (orders, output) for each order, which all sums of the kernel share."""
    found = []
    for order in ORDERS if simulator.ordered else ("forward",):
        orders = dict.fromkeys(sorted(simulator.ordered), order)
        with torch.no_grad(), suppress(Overflowed):
            found.append((orders, simulator.run(x, symbols, orders)))
    return found


def _without_sums(symbols: Mapping[str, Tensor], simulator: Simulator) -> dict[str, Tensor]:
    ordered = {f"sum {name}" for name in simulator.ordered}
    return {name: value for name, value in symbols.items() if name not in ordered}


def _largest(drift: Tensor, count: int) -> list[int]:
    flat = drift.flatten()
    return [int(i) for i in flat.topk(min(count, flat.numel())).indices]
