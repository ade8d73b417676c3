"""Answers of `kcdsl vnnlib` and of other verifiers to the question of bench/equivalence.py."""

from __future__ import annotations

import importlib
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

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
AT_ONCE = 64
SPENT = "the time of the processor is spent"

Pair = tuple[list[tuple["Tensor", "Tensor"]], list[tuple["Tensor", "Tensor"]]]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer whether a pair is equivalent (None: not decided), and the cost."""

    equivalent: bool | None
    note: str = ""
    processor: float = 0.0
    wall: float = 0.0


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


def halved(networks: Pair, method: str) -> Answer:
    """Return the answer of a library's CROWN with boxes halved along the widest input."""
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


def marabou(networks: Pair) -> Answer:
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
                    equation.setScalar(-float(layer.bias[row].detach()))
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
    """Return the query of a pair as VNN-LIB; `first` precedes the index of an element."""
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


def vnnlib(networks: Pair, seconds: int) -> Answer:
    """Return the answer of `kcdsl vnnlib verify`."""
    from kcdsl_backends.vnnlib import QUERIES

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "query.vnnlib").write_text(query("0,", "[1,5]"), encoding="utf-8")
        files = {letter: folder / f"{letter}.onnx" for letter in "fg"}
        for letter, network in zip("fg", networks, strict=True):
            write_onnx(network, files[letter])
        found = QUERIES.verify(folder / "query.vnnlib", files, float(10 * seconds))
    return Answer({"sat": False, "unsat": True}.get(found.answer), found.reason)


def vibecheck(networks: Pair, seconds: int) -> Answer:
    """Return the answer of vibecheck, run as a program."""
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
    said = (done.stdout.strip().splitlines() or [""])[0]
    if not said:
        ended = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1][:100]
        said = SPENT if done.returncode < 0 else ended
    return Answer({"sat": False, "unsat": True}.get(said), said, used)


def write_onnx(network: list[tuple[Tensor, Tensor]], path: Path) -> None:
    """Write a network in an opset that every peer supports."""
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
