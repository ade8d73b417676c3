"""Random graphs with pinned formats, and PyTorch's eager kernels that run them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support import proofs

SCALARS = (-3.3, 0.1, 1 / 3, 1e-3, 0.5, 2.0, 1e-6, 300.7)
UNARY = ("neg", "relu", "tanh", "silu", "gelu")
ROOTS = (("root", "normed"), ("sqrt", "quotient"), ("sqrt", "reciprocal", "normed"))
SPREADS = (
    ("mean", "centred", "square", "mean2"),
    ("mean", "centred", "variance"),
    ("variance", "mean", "centred"),
)
FORMATS = ("float32", "bfloat16", "float16")


def random_graph(rng: np.random.Generator, rows: int, width: int, steps: int) -> Any:
    """Return a graph with the formats of PyTorch's type promotion, for kernels up to float32.

    Some results and constants have a pinned format, others that of the kernel.
    """
    g = proofs.Graph((rows, width))
    x = g.add("input", [], (rows, width))
    known: list[tuple[str, str]] = [(x, "")]
    tables = {
        form: (g.constant(f"table {form}", _table(rng, width, form), form), form)
        for form in ("", "float32")
    }
    for step in range(steps):
        a, form = known[-1] if rng.random() < 0.7 else known[rng.integers(len(known))]
        shape, some = (rows, width), rng.random()
        if some < 0.2:
            to = str(rng.choice(["", *FORMATS]))
            known.append((g.add("cast", [a], shape, "", to), to))
        elif some < 0.4:
            op, name = [("shift", "offset"), ("scale", "factor"), ("divide", "divisor")][
                rng.integers(3)
            ]
            number = {name: float(rng.choice(SCALARS))}
            known.append((g.add(op, [a], shape, "", form, **number), form))
        elif some < 0.55:
            op = str(rng.choice(UNARY))
            how = {"form": "written"} if op == "silu" and rng.random() < 0.7 else {}
            known.append((g.add(op, [a], shape, "", form, **how), form))
        elif some < 0.7 and form == "":
            w = g.param(f"w{step}", rng.standard_normal((width, width)) / width**0.5)
            known.append((g.add("linear", [a, w], shape), ""))
        elif some < 0.8:
            known.append((_norm(g, a, form, rng, shape, step), form))
        else:
            fitting = [*tables.values(), *known]
            b, other = fitting[rng.integers(len(fitting))]
            both = _promoted(form, other)
            if both is None:
                continue
            op = str(rng.choice(["add", "sub", "mul"]))
            known.append((g.add(op, [a, b], shape, "", both), both))
    if known[-1][0] == x:
        g.add("shift", [x], (rows, width), offset=-3.3)
    return g


def _table(rng: np.random.Generator, width: int, form: str) -> np.ndarray:
    return rng.standard_normal((1, width)).astype(np.float32)


def _norm(
    g: Any, x: str, form: str, rng: np.random.Generator, shape: tuple[int, int], step: int
) -> str:
    op = str(rng.choice(["rms_norm", "layer_norm"]))
    inputs = [x]
    if form == "" and rng.random() < 0.6:
        inputs.append(g.param(f"gain {step}", 1 + 0.3 * rng.standard_normal(shape[1])))
        if op == "layer_norm" and rng.random() < 0.6:
            inputs.append(g.param(f"bias {step}", rng.standard_normal(shape[1])))
    eps = float(rng.choice([1e-8, 1e-6, 1e-5, 1e-2]))
    how: dict[str, Any] = {}
    if rng.random() < 0.75:
        spread = SPREADS[rng.integers(3)] if op == "layer_norm" else ("square", "mean")
        names = (
            *spread,
            "shift",
            *ROOTS[rng.integers(3)],
            *("weighted", "biased")[: len(inputs) - 1],
        )
        how = {"form": "written", "parts": [[name, form] for name in names]}
    return str(g.add(op, inputs, shape, "", form, eps=eps, **how))


def _promoted(a: str, b: str) -> str | None:
    """Return the promoted format of two, or None where it depends on the kernel's."""
    if a == b:
        return a
    return "float32" if "float32" in (a, b) else None


def run(graph: Any, compute: str, x: np.ndarray) -> dict[str, Tensor]:
    """Return the value of every node under PyTorch's eager kernels, for a module in `compute`."""
    own = getattr(torch, compute)
    values: dict[str, Tensor] = {}
    for node in graph.nodes:
        attrs: Mapping[str, Any] = {
            key: float.fromhex(value) if key in _NUMBERS else value
            for key, value in node["attrs"].items()
        }
        args = [values[name] for name in node["inputs"]]
        form = getattr(torch, node["format"]) if node["format"] else own
        match node["op"]:
            case "input":
                y = torch.from_numpy(x).to(torch.float32).to(own)
            case "param":
                y = torch.from_numpy(graph.tensors[attrs["key"]]).to(own)
            case "constant":
                y = torch.from_numpy(graph.constants[attrs["key"]]).to(form)
            case "cast":
                y = args[0].to(form)
            case op:
                y = _operation(op, attrs, args)
        assert y.dtype == form, (node, y.dtype)
        values[node["name"]] = y
    return values


_NUMBERS = ("eps", "factor", "divisor", "offset")


def _operation(op: str, attrs: Mapping[str, Any], args: list[Tensor]) -> Tensor:
    x = args[0]
    if attrs.get("form") == "written":
        return x * torch.sigmoid(x) if op == "silu" else _written(attrs, args)
    match op:
        case "linear":
            return F.linear(*args)
        case "add":
            return x + args[1]
        case "sub":
            return x - args[1]
        case "mul":
            return x * args[1]
        case "shift":
            return x + attrs["offset"]
        case "scale":
            return x * attrs["factor"]
        case "divide":
            return x / attrs["divisor"]
        case "neg":
            return -x
        case "rms_norm":
            return F.rms_norm(x, (x.shape[-1],), args[1] if len(args) > 1 else None, attrs["eps"])
        case "layer_norm":
            gain, bias = [*args[1:], None, None][:2]
            return F.layer_norm(x, (x.shape[-1],), gain, bias, attrs["eps"])
        case _:
            function: Any = getattr(F, op)
            y: Tensor = function(x)
            return y


def _written(attrs: Mapping[str, Any], args: list[Tensor]) -> Tensor:
    """Return a norm written out in elementary operations, in the order of its parts."""
    found: dict[str, Tensor] = {}
    x = args[0]
    for part, _ in attrs["parts"]:
        c = found.get("centred", x)
        match part:
            case "mean":
                averaged = found.get("square", x)
                y = averaged.mean(-1, keepdim=True)
            case "centred":
                y = x - found["mean"]
            case "square":
                y = c.pow(2)
            case "mean2":
                y = found["square"].mean(-1, keepdim=True)
            case "variance":
                y = x.var(-1, keepdim=True, unbiased=False)
            case "shift":
                spread = {**found, "rms": found["mean"]} if "mean" in found else found
                of = next(name for name in ("mean2", "variance", "rms") if name in spread)
                y = spread[of] + attrs["eps"]
            case "root":
                y = torch.rsqrt(found["shift"])
            case "sqrt":
                y = torch.sqrt(found["shift"])
            case "reciprocal":
                y = 1.0 / found["sqrt"]
            case "quotient":
                y = c / found["sqrt"]
            case "normed":
                y = c * (found["root"] if "root" in found else found["reciprocal"])
            case "weighted":
                y = (found["normed"] if "normed" in found else found["quotient"]) * args[1]
            case _:
                y = found["weighted"] + args[2]
        found[part] = y
    return y
