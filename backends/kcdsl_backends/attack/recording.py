"""Runs as plain data: what a counterexample keeps of a run, and the run again from that.

A symbol is left out where it is 0 everywhere. The others are int8 numbers of sixty-fourths where
that is exact, as for signs and for steps half of the way, and float64 otherwise; bytes are
little-endian, compressed (zlib) and in base64.
"""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl_backends.attack.ascent import STEPS
from kcdsl_backends.attack.runs import SIDES, Attack, Run
from kcdsl_backends.attack.simulate import Simulator
from kcdsl_backends.attack.sums import ORDERS

_KINDS: Mapping[str, str] = {"float32": "<f4", "float64": "<f8", "sixty-fourths": "|i1"}


class Unusable(ValueError):
    """A record that is no admitted run of these kernels."""


def record_run(run: Run) -> dict[str, Any]:
    """Return `input`, `symbols` and `orders` of a run as JSON data."""
    return {
        "input": None if run.x is None else pack(run.x, "float32"),
        "symbols": {
            side: {
                name: _pack_symbol(value)
                for name, value in sorted(run.symbols.get(side, {}).items())
                if bool((value != 0).any())
            }
            for side in SIDES
        },
        "orders": {side: dict(sorted(run.orders.get(side, {}).items())) for side in SIDES},
    }


def attained(found: Attack) -> dict[str, Any]:
    """Return what a run attains, and where, as JSON data; floats in hexadecimal."""
    return {
        "value": found.value.hex(),
        "row": list(found.row),
        "column": found.column,
        "train": found.train_value.hex(),
        "infer": found.infer_value.hex(),
    }


def run_of(record: Mapping[str, Any], simulators: Mapping[str, Simulator]) -> Run:
    """Return the run of a record, on the device of the kernels' parameters.

    Raises:
        Unusable: an array is damaged or has another shape, a number is not finite, an input is not
            float32, a symbol is not in [-1, 1], or names what the kernel does not round; an order
            that there is not.
    """
    graph = simulators["train"].graph
    device = simulators["train"].parameters.device
    x = record["input"]
    if (x is None) != (graph.input_shape is None):
        raise Unusable("`input` does not fit the block")
    return Run(
        None
        if x is None
        else _single(unpack(x, tuple(graph.input_shape or ()), "input")).to(device),
        {
            side: {name: value.to(device) for name, value in _symbols(record, side, one).items()}
            for side, one in simulators.items()
        },
        {side: _orders(record, side, one) for side, one in simulators.items()},
    )


def _single(x: Tensor) -> Tensor:
    """Return an input; refuse one that no kernel can be given."""
    if not torch.equal(x, x.to(torch.float32).to(torch.float64)):
        raise Unusable("`input` holds numbers that are not float32")
    return x


def _symbols(record: Mapping[str, Any], side: str, simulator: Simulator) -> dict[str, Tensor]:
    shapes, found = simulator.symbol_shapes(), {}
    for name, packed in record["symbols"][side].items():
        if name not in shapes:
            raise Unusable(f"the {side} kernel has no rounding symbol {name!r}")
        value = unpack(packed, shapes[name], f"symbol {name!r} of the {side} kernel")
        if not bool((value.abs() <= 1).all()):
            raise Unusable(f"symbol {name!r} of the {side} kernel leaves [-1, 1]")
        found[name] = value
    return found


def _orders(record: Mapping[str, Any], side: str, simulator: Simulator) -> dict[str, str]:
    found: dict[str, str] = dict(record["orders"][side])
    for name, order in found.items():
        if name not in simulator.ordered:
            raise Unusable(f"the {side} kernel has no sum {name!r} that may be ordered")
        if order not in ORDERS:
            raise Unusable(f"there is no order {order!r}")
        if f"sum {name}" in record["symbols"][side]:
            raise Unusable(f"the sum {name!r} of the {side} kernel has an order and a symbol")
    return found


def _pack_symbol(value: Tensor) -> dict[str, Any]:
    parts = value * STEPS
    whole = bool((parts == parts.round()).all()) and bool((value.abs() <= 1).all())
    return pack(parts if whole else value, "sixty-fourths" if whole else "float64")


def pack(value: Tensor, kind: str) -> dict[str, Any]:
    """Return an array as its kind, its shape and its compressed bytes."""
    array = value.detach().cpu().contiguous().numpy().astype(_KINDS[kind])
    data = base64.b64encode(zlib.compress(array.tobytes(), 9)).decode("ascii")
    return {"kind": kind, "shape": list(value.shape), "data": data}


def unpack(packed: Mapping[str, Any], shape: tuple[int, ...], what: str) -> Tensor:
    """Return an array of a known shape as float64.

    Raises:
        Unusable: it is damaged, has another shape or holds numbers that are not finite.
    """
    kind, dtype = packed["kind"], _KINDS.get(packed["kind"])
    if dtype is None or tuple(packed["shape"]) != shape:
        raise Unusable(f"{what} has another kind or shape than {list(shape)}")
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        raw = base64.b64decode(packed["data"], validate=True)
        decompressor = zlib.decompressobj()
        data = decompressor.decompress(raw, expected + 1)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise Unusable(f"{what} is damaged: {error}") from error
    if len(data) != expected or decompressor.unused_data or not decompressor.eof:
        raise Unusable(f"{what} is damaged: {len(data)} bytes or more, {expected} expected")
    array: NDArray[Any] = np.frombuffer(data, dtype).astype(np.float64).reshape(shape)
    if not np.isfinite(array).all():
        raise Unusable(f"{what} holds numbers that are not finite")
    return torch.from_numpy(array / STEPS if kind == "sixty-fourths" else array)
