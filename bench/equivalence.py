"""Decisions about pairs of ACAS-Xu networks: is |g - f| < 0.05 for every input of a box?

Original networks against pruned and against perturbed copies on the box of VNN-COMP 2026
(`isomorphic_acasxu_2026`), in real arithmetic. Our answers are confirmed: the checker re-derives
a tree of boxes, or replays a counterexample in exact arithmetic. Peers get the same pairs and the
same processor time:

- `kcdsl vnnlib verify` and vibecheck on both networks as a query, with a tenfold
  limit of wall time, as the machine is shared;
- Marabou on one network whose output is the difference, output by output;
- CROWN of auto_LiRPA and of bound-propagation on that network, with boxes split here.

    python -m bench.equivalence FOLDER [--seconds S] [--pairs 1_5_5 ...] [--methods splits ...]

FOLDER holds `nets/` and `nets_pruned/` with `.nnet` files (the folder `onnx` of
github.com/lukasmrohwer/acasxu-isomorphic-networks-benchmark); it is not in this repository.
"1_5_5" is network 1_5 against its copy with 5 % pruned. "1_2_p1" is network 1_2 against a copy
perturbed as by the generator of that benchmark: a normal error of deviation 0.001 on every weight,
with seed 1; the seeds of the competition are not published. The first row names peers that are not
installed. The row of a peer names its answers that differ from confirmed ones.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import multiprocessing
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.common import Better, Figure, report
from bench.equivalence_peers import (
    BOX,
    LIMIT,
    OUTPUTS,
    SPENT,
    Answer,
    Pair,
    halved,
    marabou,
    vibecheck,
    vnnlib,
)
from bench.neurodiff import read_nnet
from bench.neurodiff_splits import differences

if TYPE_CHECKING:
    from torch import Tensor

OURS = ("splits", "vnnlib")
METHODS = (*OURS, "vibecheck", "marabou", "auto_lirpa", "bound_propagation")
PAIRS = ("1_5_5", "5_2_5", "2_2_30", "2_4_10", "2_4_p0", "1_2_p1", "5_2_p2", "1_8_p3")
"""The perturbed networks are those of the first four instances of the competition."""
DEVIATION = 0.001


def main() -> int:
    """Run every method on every pair and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=int, default=100)
    parser.add_argument("--pairs", nargs="+", default=PAIRS)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    asked = parser.parse_args()
    return report("equivalence", figures(asked.folder, asked.seconds, asked.pairs, asked.methods))


def figures(
    folder: Path,
    seconds: int,
    pairs: Sequence[str] = PAIRS,
    methods: Sequence[str] = METHODS,
) -> list[Figure]:
    """Run every method on every pair and return one row for each method."""
    needs = {"marabou": "maraboupy", "auto_lirpa": "auto_LiRPA"}
    absent = [
        method
        for method in methods
        if method not in OURS and importlib.util.find_spec(needs.get(method, method)) is None
    ]
    found = {
        method: {pair: _isolated(method, folder, pair, seconds) for pair in pairs}
        for method in methods
        if method not in absent
    }
    return _rows(found, seconds, absent)


def _rows(
    found: Mapping[str, Mapping[str, Answer]], seconds: int, absent: Sequence[str] = ()
) -> list[Figure]:
    """Return the rows of a table; raise SystemExit if two confirmed answers contradict."""
    known: dict[str, bool] = {}
    for method in OURS:
        for pair, one in found.get(method, {}).items():
            if one.equivalent is not None and known.setdefault(pair, one.equivalent) != (
                one.equivalent
            ):
                raise SystemExit(f"{pair}: our methods contradict each other")
    rows: list[Figure] = []
    for method, answers in found.items():
        decided = {pair: one for pair, one in answers.items() if one.equivalent is not None}
        held = sum(bool(one.equivalent) for one in decided.values())
        spent = sum(one.processor for one in answers.values())
        how = [
            f"{held} equivalent, {len(decided) - held} not, of {len(answers)}",
            f"{seconds} s each, {spent:.0f} s of processor in all",
        ]
        open_reasons = Counter(one.note for one in answers.values() if one.equivalent is None)
        how += [f"{count} open: {note}" for note, count in open_reasons.items()]
        wrong = [p for p, one in decided.items() if known.get(p, one.equivalent) != one.equivalent]
        how += [f"contradicts a confirmed answer: {', '.join(wrong)}"] if wrong else []
        how += [f"not installed: {', '.join(absent)}"] if absent and not rows else []
        row = Figure(f"{method}: decided", len(decided), Better.HIGHER, None, "; ".join(how))
        rows.append(row)
    return rows


def read_pair(folder: Path, name: str) -> Pair:
    """Return weight and bias of every layer of an original network and of its changed copy."""
    first, second, change = name.split("_")
    stem = f"ACASXU_run2a_{first}_{second}_batch_2000"
    original = layers_of(folder / "nets" / f"{stem}.nnet")
    if change.startswith("p"):
        return original, perturbed(original, int(change[1:]))
    return original, layers_of(folder / "nets_pruned" / f"{stem}_pruned{change}.nnet")


def layers_of(path: Path) -> list[tuple[Tensor, Tensor]]:
    """Return weight and bias of every layer of a `.nnet` file."""
    network = read_nnet(path)
    count = len(network.sizes) - 1
    return [(network.tensors[f"{k}.weight"], network.tensors[f"{k}.bias"]) for k in range(count)]


def perturbed(layers: list[tuple[Tensor, Tensor]], seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return float32 layers with a normal error of deviation `DEVIATION` on every number."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [
        (
            weight + DEVIATION * torch.randn(weight.shape, generator=generator),
            bias + DEVIATION * torch.randn(bias.shape, generator=generator),
        )
        for weight, bias in layers
    ]


def _isolated(method: str, folder: Path, pair: str, seconds: int) -> Answer:
    """Run a method in a new process with a limit of processor time."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            found = pool.submit(answer, method, folder, pair, seconds).result()
        except BrokenProcessPool:
            found = Answer(None, SPENT, seconds)
        except Exception as error:
            if method in OURS:
                raise
            text = str(error).strip().partition("\n")[0][:100]
            found = Answer(None, f"{type(error).__name__}: {text}")
    said = {None: "not decided", True: "equivalent", False: "not equivalent"}[found.equivalent]
    cost = f"{found.processor:.1f} s of processor, {found.wall:.1f} s"
    print(f"{pair} {method}: {said} {found.note} ({cost})", file=sys.stderr, flush=True)
    return found


def answer(method: str, folder: Path, pair: str, seconds: int) -> Answer:
    """Return the answer of a method to a pair, computed in this process."""
    import torch

    torch.set_num_threads(1)
    networks = read_pair(folder, pair)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    before = time.process_time()
    spent = math.ceil(before) + seconds
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (spent + (method == "splits") * 10**6, hard))
    wall = time.perf_counter()
    match method:
        case "splits":
            found = _splits(networks, seconds)
        case "vnnlib":
            found = vnnlib(networks, seconds)
        case "vibecheck":
            found = vibecheck(networks, seconds)
        case "marabou":
            found = marabou(networks)
        case _:
            found = halved(networks, method)
    used = found.processor or time.process_time() - before
    return replace(found, processor=used, wall=time.perf_counter() - wall)


def _splits(networks: Pair, seconds: int) -> Answer:
    """Return our answer after confirmation by the checker, whose time counts."""
    from kcdsl_backends.drift.linear.splitting import decide

    low, high = [one for one, _ in BOX], [one for _, one in BOX]
    found = decide(
        networks, low, high, differences(OUTPUTS, len(BOX), LIMIT), seconds, clock=time.process_time
    )
    if found.tree is not None:
        return Answer(True, f"{found.boxes} boxes, {found.tree.leaves} leaves derived again")
    if found.point is not None:
        return Answer(False, f"replayed, {found.boxes} boxes")
    return Answer(None, found.note)


if __name__ == "__main__":
    raise SystemExit(main())
