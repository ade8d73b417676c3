"""Search for runs with a large drift: places of the output, starts, ascents (gradient_ascent.py).

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
"""Random directions from which the promise of every output element is estimated."""
_TARGETS = 4
"""Places of the output that batches push at."""
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

    For some elements of the output, in both directions: climb from no rounding at all. At the best
    of them, climb again from random signs, and once more at the elements that became largest on
    the way. Every run tried counts, in every row.

    Args:
        centre, radius: the region, [T, D] and broadcastable; centre None for a block on token ids.
        candidates: how many places of the output to push at.
        rounds: steps of an ascent.
        restarts: how many random starts there are at the best places.
        places: places to push at before those, as indices of the flattened output: where a bound
            is largest, for instance.
        start: an input to climb from first, as shares of the radius from the centre.
        samples: how many inputs of the region to draw, and to walk on from the best of them.
        batches: how many batches of runs climb beside that (batched_search.py) where a kernel
            rounds to nearest and the input may move: the effort of the search there.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    ascent = Ascent(train, infer, kind, centre, radius)
    zero = ascent.zero()
    ascent.drift_of(zero)
    if not ascent.shapes:
        return ascent.best()
    promised = ascent.promise(_SAMPLES, generator)
    at_random = ascent.drift_of(ascent.signs(generator)).abs()
    pushed: dict[tuple[int, float], float] = {}

    def push(position: int, sign: float, start: Symbols) -> None:
        found = ascent.climb(start, position, sign, rounds)
        pushed[position, sign] = max(found, pushed.get((position, sign), -torch.inf))

    if ascent.moves and len(start) == zero["x", "x"].numel():
        shares = torch.tensor(start, dtype=torch.float64).reshape(zero["x", "x"].shape)
        begun = zero | {("x", "x"): shares.to(zero["x", "x"].device)}
        position = _largest(ascent.drift_of(begun).abs(), 1)[0]
        for sign in (1.0, -1.0):
            push(position, sign, begun)
    for position in dict.fromkeys([*places, *_largest(promised, candidates)]):
        for sign in (1.0, -1.0):
            push(position, sign, zero)
    for position in _largest(ascent.seen, 2):
        for sign in (1.0, -1.0):
            if (position, sign) not in pushed:
                push(position, sign, zero)
    for position in dict.fromkeys([*places[:2], *_largest(at_random, 3)]):
        for sign in (1.0, -1.0):
            push(position, sign, ascent.jump(zero, position, sign))
    ascent.sample(samples, generator)
    best = sorted(pushed, key=lambda place: -pushed[place])[:2]
    for position, sign in best:
        for _ in range(restarts):
            push(position, sign, ascent.signs(generator))
    if ascent.moves and (train.steps or infer.steps):
        targets = sorted(pushed, key=lambda place: -pushed[place])[:_TARGETS]
        batched_ascent(ascent, targets, batches, rounds, generator)
    return ascent.best()


def with_orders(run: RunPair, train: Simulator, infer: Simulator, kind: str) -> Attack | None:
    """Return the strongest run in which every sum has a concrete order, the rest as in `run`.

    What such a run attains needs no worst case of rounding errors in sums. All sums of a kernel
    have the same order. None where no sum has orders, or every such run overflows.
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
    """Return what a kernel computes in every order, all of its sums in the same one."""
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
