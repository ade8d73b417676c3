"""How many pairs of ACAS-Xu networks are decided: is |g - f| < 0.05 for every input of a box?

Original networks against pruned copies on the box of VNN-COMP 2026 (`isomorphic_acasxu_2026`), in
real arithmetic. Our answers are confirmed: the checker derives a tree of boxes again, or replays a
counterexample in exact arithmetic. Peers get the same pairs and as much time of a processor:

- `kcdsl vnnlib verify` on both networks as a query, in as much elapsed time;
- Marabou on one network that has the difference as its output, output by output;
- CROWN of auto_LiRPA and of bound-propagation on that network, with boxes halved here;
- vibecheck on both networks, told ten times as many elapsed seconds: others use the machine too.

    python -m bench.equivalence FOLDER [--seconds S] [--pairs 1_5_5 ...] [--methods splits ...]

FOLDER holds `nets/` and `nets_pruned/` with `.nnet` files (the folder `onnx` of
github.com/lukasmrohwer/acasxu-isomorphic-networks-benchmark); nothing of it is in this repository.
"1_5_5" is network 1_5 against its copy with 5 % pruned. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import multiprocessing
import resource
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import Better, Figure, report
from bench.neurodiff import read_nnet

if TYPE_CHECKING:
    from torch import Tensor, nn

    from kcdsl_backends.drift.linear.constraints import LinearConstraint

BOX = tuple(
    (Fraction(low), Fraction(high))
    for low, high in (
        ("0.6", "0.679857769"),
        ("-0.5", "0.5"),
        ("-0.5", "0.5"),
        ("0.45", "0.5"),
        ("-0.45", "-0.45"),
    )
)
"""Normalised inputs: distance, angle, heading, both speeds."""
LIMIT = Fraction("0.05")
OUTPUTS = 5
METHODS = ("splits", "vnnlib", "vibecheck", "marabou", "auto_lirpa", "bound_propagation")
PAIRS = ("1_5_5", "2_6_5", "1_2_5", "5_2_5", "2_2_30", "5_2_30", "2_9_10", "2_4_10")
AT_ONCE = 64

Pair = tuple[list[tuple["Tensor", "Tensor"]], list[tuple["Tensor", "Tensor"]]]


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether a pair is equivalent (None: not decided), and the cost."""

    equivalent: bool | None
    note: str = ""
    processor: float = 0.0
    wall: float = 0.0


def main() -> int:
    """Ask every method about every pair and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=int, default=100)
    parser.add_argument("--pairs", nargs="+", default=PAIRS)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    asked = parser.parse_args()
    absent = {"vibecheck", "bound_propagation", "maraboupy", "auto_LiRPA"}
    absent = {name for name in absent if importlib.util.find_spec(name) is None}
    needs = {"marabou": "maraboupy", "auto_lirpa": "auto_LiRPA"}
    figures = []
    for method in asked.methods:
        if needs.get(method, method) in absent:
            print(f"{method} is not installed", file=sys.stderr)
            continue
        answers = [_apart(method, asked.folder, pair, asked.seconds) for pair in asked.pairs]
        decided = [one for one in answers if one.equivalent is not None]
        held = sum(bool(one.equivalent) for one in decided)
        spent = sum(one.processor for one in answers)
        how = f"{held} equivalent, {len(decided) - held} not, of {len(answers)}"
        how += f"; {asked.seconds} s each, {spent:.0f} s of processor in all"
        figures.append(Figure(f"{method}: decided", len(decided), Better.HIGHER, None, how))
    return report("equivalence", figures)


def read_pair(folder: Path, name: str) -> Pair:
    """Return weight and bias of every layer of an original network and of its pruned copy."""
    first, second, share = name.split("_")
    stem = f"ACASXU_run2a_{first}_{second}_batch_2000"
    files = folder / "nets" / f"{stem}.nnet", folder / "nets_pruned" / f"{stem}_pruned{share}.nnet"
    made = []
    for file in files:
        network = read_nnet(file)
        made.append(
            [
                (network.tensors[f"{k}.weight"], network.tensors[f"{k}.bias"])
                for k in range(len(network.sizes) - 1)
            ]
        )
    return made[0], made[1]


def unsafe() -> list[list[LinearConstraint]]:
    """Return what a difference of an output of at least the limit is, for either sign."""
    from kcdsl_backends.drift.linear.constraints import LinearConstraint

    found = []
    for output in range(OUTPUTS):
        for sign in (1.0, -1.0):
            own = tuple(sign * (k == output) for k in range(OUTPUTS))
            other = tuple(-v for v in own)
            found.append([LinearConstraint((0.0,) * len(BOX), own, other, -LIMIT)])
    return found


def _apart(method: str, folder: Path, pair: str, seconds: int) -> Answer:
    """Ask in a fresh process, which ends with its processor time."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            found = pool.submit(answer, method, folder, pair, seconds).result()
        except BrokenProcessPool:
            found = Answer(None, "the time of the processor is spent", seconds)
    said = {None: "not decided", True: "equivalent", False: "not equivalent"}[found.equivalent]
    cost = f"{found.processor:.1f} s of processor, {found.wall:.1f} s"
    print(f"{pair} {method}: {said} {found.note} ({cost})", file=sys.stderr, flush=True)
    return found


def answer(method: str, folder: Path, pair: str, seconds: int) -> Answer:
    """Return what a method says of a pair, in this process."""
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
            found = _vnnlib(networks, seconds)
        case "vibecheck":
            found = _vibecheck(networks, seconds)
        case "marabou":
            found = _marabou(networks)
        case _:
            found = _halved(networks, method)
    used = found.processor or time.process_time() - before
    return replace(found, processor=used, wall=time.perf_counter() - wall)


def _splits(networks: Pair, seconds: int) -> Answer:
    """Return our answer, which the checker has confirmed; its time counts."""
    from kcdsl_backends.drift.linear.splitting import decide

    low, high = [one for one, _ in BOX], [one for _, one in BOX]
    found = decide(networks, low, high, unsafe(), seconds, clock=time.process_time)
    if found.tree is not None:
        return Answer(True, f"{found.boxes} boxes, {found.tree.leaves} leaves derived again")
    if found.point is not None:
        return Answer(False, f"replayed, {found.boxes} boxes")
    return Answer(None, found.note)


def product(networks: Pair) -> nn.Sequential:
    """Return one float64 network whose output is g - f."""
    import torch
    from torch import nn

    parts: list[nn.Module] = []
    count = len(networks[0])
    for k, ((w, b), (v, c)) in enumerate(zip(*networks, strict=True)):
        if k == 0:
            weight, bias = torch.cat([w, v]), torch.cat([b, c])
        elif k == count - 1:
            weight, bias = torch.cat([-w, v], 1), c.double() - b.double()
        else:
            weight = torch.block_diag(w, v)  # type: ignore[no-untyped-call]  # torch has no type of it
            bias = torch.cat([b, c])
        linear = nn.Linear(weight.shape[1], weight.shape[0]).double()
        linear.weight.data, linear.bias.data = weight.double(), bias.double()
        parts += [linear, nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def _halved(networks: Pair, method: str) -> Answer:
    """Return the answer of CROWN of a library, with boxes halved along the widest input."""
    import torch

    network = product(networks)
    low, high = (torch.tensor([[float(one[end]) for one in BOX]]).double() for end in (0, 1))
    width = (high - low).clamp_min(1e-9)
    most = float(LIMIT)
    if method == "bound_propagation":
        library = importlib.import_module("bound_propagation")
        bounded = library.BoundModelFactory().build(network)

        def drift(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                found = bounded.crown(library.HyperRectangle(lo, hi)).concretize()
            return found.lower, found.upper

    else:
        from kcdsl_backends.lirpa.library import Entry, bounds

        def drift(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
            return bounds(network, [Entry(lo, hi)], "crown")

    while len(low):
        lo, hi = low[-AT_ONCE:], high[-AT_ONCE:]
        low, high = low[:-AT_ONCE], high[:-AT_ONCE]
        with torch.no_grad():
            if float(network((lo + hi) / 2).abs().max()) >= most:
                return Answer(False, "a centre of a box")
        least, largest = drift(lo, hi)
        left = torch.maximum(-least, largest).amax(1) >= most
        lo, hi = lo[left], hi[left]
        cut = ((hi - lo) / width).argmax(1, keepdim=True)
        middle = ((lo + hi) / 2).gather(1, cut)
        low = torch.cat([low, lo, lo.scatter(1, cut, middle)])
        high = torch.cat([high, hi.scatter(1, cut, middle), hi])
    return Answer(True)


def _marabou(networks: Pair) -> Answer:
    """Return the answer of Marabou: one query for each output and sign."""
    from maraboupy import Marabou, MarabouCore
    from torch.nn import Linear

    layers = [one for one in product(networks) if isinstance(one, Linear)]
    for output in range(OUTPUTS):
        for sign in (1.0, -1.0):
            query, count = MarabouCore.InputQuery(), len(BOX)
            sizes = [len(layer.bias) for layer in layers]
            query.setNumberOfVariables(count + 2 * sum(sizes[:-1]) + sizes[-1])
            for place, (least, largest) in enumerate(BOX):
                query.setLowerBound(place, float(least))
                query.setUpperBound(place, float(largest))
            before = list(range(count))
            for k, layer in enumerate(layers):
                here = list(range(count, count + sizes[k]))
                count += sizes[k]
                for row, place in enumerate(here):
                    equation = MarabouCore.Equation(MarabouCore.Equation.EQ)
                    for value, source in zip(layer.weight[row].tolist(), before, strict=True):
                        if value:
                            equation.addAddend(value, source)
                    equation.addAddend(-1.0, place)
                    equation.setScalar(-float(layer.bias[row]))
                    query.addEquation(equation)
                if k < len(layers) - 1:
                    before = list(range(count, count + sizes[k]))
                    count += sizes[k]
                    for source, place in zip(here, before, strict=True):
                        MarabouCore.addReluConstraint(query, source, place)
                else:
                    before = here
            if sign > 0:
                query.setLowerBound(before[output], float(LIMIT))
            else:
                query.setUpperBound(before[output], -float(LIMIT))
            options = Marabou.createOptions(verbosity=0, numWorkers=1)
            said, *_ = MarabouCore.solve(query, options, "")
            if said == "sat":
                return Answer(False, f"output {output}")
            if said != "unsat":
                return Answer(None, str(said))
    return Answer(True)


def query(first: str, shape: str) -> str:
    """Return the question of a pair as VNN-LIB; `first` precedes the index of an element."""
    variables = "(declare-input X_{0} real {1}) (declare-output Y_{0} real {1})"
    lines = [
        "(vnnlib-version <2.0>)",
        f"(declare-network f {variables.format('f', shape)})",
        f"(declare-network g (isomorphic-to f) {variables.format('g', shape)})",
    ]
    for place, (least, largest) in enumerate(BOX):
        here = f"X_f[{first}{place}]"
        lines.append(f"(assert (and (<= {here} {float(largest)!r}) (>= {here} {float(least)!r})))")
        lines.append(f"(assert (== {here} X_g[{first}{place}]))")
    cases = []
    for k in range(OUTPUTS):
        f, g = f"Y_f[{first}{k}]", f"Y_g[{first}{k}]"
        cases.append(f"(>= {g} (+ {f} {float(LIMIT)})) (<= {g} (- {f} {float(LIMIT)}))")
    return "\n".join([*lines, f"(assert (or {' '.join(cases)}))", ""])


def _vnnlib(networks: Pair, seconds: int) -> Answer:
    """Return the answer of `kcdsl vnnlib verify`, which has the elapsed time."""
    from kcdsl_backends.vnnlib import QUERIES

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "query.vnnlib").write_text(query("0,", "[1,5]"), encoding="utf-8")
        files = {letter: folder / f"{letter}.onnx" for letter in "fg"}
        for letter, network in zip("fg", networks, strict=True):
            write_onnx(network, files[letter])
        found = QUERIES.verify(folder / "query.vnnlib", files, float(seconds))
    return Answer({"sat": False, "unsat": True}.get(found.answer), found.reason)


def _vibecheck(networks: Pair, seconds: int) -> Answer:
    """Return the answer of vibecheck, as the program that it is."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "query.vnnlib").write_text(query("", "[5]"), encoding="utf-8")
        command = [sys.executable, "-m", "vibecheck", "verify", str(folder / "query.vnnlib")]
        for letter, network in zip("fg", networks, strict=True):
            write_onnx(network, folder / f"{letter}.onnx")
            command += ["--network", f"{letter}={folder / letter}.onnx"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        done = subprocess.run(
            [*command, "--timeout", str(10 * seconds)],
            capture_output=True,
            text=True,
            check=False,
        )
        used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    said = (done.stdout.strip().splitlines() or ["ended"])[0]
    return Answer({"sat": False, "unsat": True}.get(said), said, used)


def write_onnx(network: list[tuple[Tensor, Tensor]], path: Path) -> None:
    """Write a network of an opset that every peer reads."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes: list[Any] = []
    held, last = [], "x"
    for k, (weight, bias) in enumerate(network):
        held.append(numpy_helper.from_array(weight.numpy(), f"w{k}"))
        held.append(numpy_helper.from_array(bias.numpy(), f"b{k}"))
        nodes.append(helper.make_node("Gemm", [last, f"w{k}", f"b{k}"], [f"z{k}"], transB=1))
        last = f"z{k}"
        if k < len(network) - 1:
            nodes.append(helper.make_node("Relu", [last], [f"h{k}"]))
            last = f"h{k}"
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size])
        for name, size in (("x", network[0][0].shape[1]), (last, network[-1][0].shape[0]))
    ]
    graph = helper.make_graph(nodes, "network", ends[:1], ends[1:], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)
    onnx.save(model, path)


if __name__ == "__main__":
    raise SystemExit(main())
