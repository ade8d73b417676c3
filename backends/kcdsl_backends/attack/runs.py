"""Concrete runs of both kernels: an input, rounding symbols, orders of sums; and their drift."""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl_backends.attack.operations import ORDERS
from kcdsl_backends.attack.simulation import Overflowed, Simulator

SIDES = ("train", "infer")
STEPS = 64
"""Symbols between the ends of their range are rounded to multiples of 1/STEPS."""
_ROUNDED = 1 - 2.0**-30
"""Factor that rounds a functional down by more than its own rounding errors."""


@dataclass(frozen=True, slots=True)
class RunPair:
    """An input and the roundings of both kernels, which determine both simulations.

    `x` [T, D] holds float32 numbers as float64, None for a block on token ids. Keys of `symbols`
    and `orders` are the kernel ("train", "infer"), then the names that `Simulator` uses; a missing
    symbol is 0.
    """

    x: Tensor | None
    symbols: Mapping[str, Mapping[str, Tensor]]
    orders: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def outputs(self, train: Simulator, infer: Simulator) -> tuple[Tensor, Tensor]:
        """Simulate both kernels. Raises Overflowed if the run is not admitted."""
        one, two = (
            simulator.run(self.x, self.symbols.get(side, {}), self.orders.get(side))
            for side, simulator in zip(SIDES, (train, infer), strict=True)
        )
        return one, two


@dataclass(frozen=True, slots=True)
class Attack:
    """A concrete admissible pair of runs.

    `value` is the functional of its drift, rounded down: a true lower bound of the supremum. It is
    attained in `row`; `column` is the element with the largest drift there, and `train_value` and
    `infer_value` are its values in both kernels. `run` is the run and `record` its JSON form; one
    or both may be None.
    """

    value: float
    row: tuple[int, ...]
    column: int
    train_value: float
    infer_value: float
    run: RunPair | None = field(default=None, repr=False, compare=False)
    record: Mapping[str, Any] | None = field(default=None, repr=False)
    rerouted: str = ""
    """Description of a run that chooses other experts than the graph; empty if none was found."""


def functional(drift: Tensor, kind: str) -> Tensor:
    """Return the functional of every row of a drift [..., n] -> [...]."""
    match kind:
        case "inf":
            return drift.abs().amax(-1)
        case "2":
            return drift.square().sum(-1).sqrt()
        case "span":
            return drift.amax(-1) - drift.amin(-1)
        case _:
            raise ValueError(f"unknown functional {kind!r}")


def attack_of(run: RunPair, train: Simulator, infer: Simulator, kind: str) -> Attack | None:
    """Simulate a run and return its drift; None if it overflows."""
    with torch.no_grad():
        try:
            outputs = run.outputs(train, infer)
        except Overflowed:
            return None
        return measured(run, *outputs, kind)


def measured(run: RunPair, out_train: Tensor, out_infer: Tensor, kind: str) -> Attack | None:
    """Return the drift of a run with these outputs; None if it is not finite."""
    drift = out_infer - out_train
    rows = functional(drift, kind)
    if not bool(torch.isfinite(rows).all()):
        return None
    flat = int(rows.flatten().argmax())
    row = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), rows.shape))
    column = int(drift[row].abs().argmax())
    return Attack(
        float(rows[row]) * _ROUNDED,
        row,
        column,
        float(out_train[row][column]),
        float(out_infer[row][column]),
        run,
    )


_KINDS: Mapping[str, str] = {"float32": "<f4", "float64": "<f8", "sixty-fourths": "|i1"}


class InvalidRecord(ValueError):
    """A record that is no admitted run of these kernels."""


def record_run(run: RunPair) -> dict[str, Any]:
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
    """Return value, place and outputs of an attack as JSON data, floats in hexadecimal."""
    return {
        "value": found.value.hex(),
        "row": list(found.row),
        "column": found.column,
        "train": found.train_value.hex(),
        "infer": found.infer_value.hex(),
    }


def run_of(record: Mapping[str, Any], simulators: Mapping[str, Simulator]) -> RunPair:
    """Return the run of a record, on the device of the kernels' parameters.

    Raises:
        InvalidRecord: an array is damaged or has another shape, a number is not finite, an input
            is not float32, a symbol is unknown or not in [-1, 1], or an order is unknown.
    """
    graph = simulators["train"].graph
    device = simulators["train"].parameters.device
    x = record["input"]
    if (x is None) != (graph.input_shape is None):
        raise InvalidRecord("`input` does not fit the block")
    return RunPair(
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
    """Return an input; raise InvalidRecord unless its numbers are float32."""
    if not torch.equal(x, x.to(torch.float32).to(torch.float64)):
        raise InvalidRecord("`input` holds numbers that are not float32")
    return x


def _symbols(record: Mapping[str, Any], side: str, simulator: Simulator) -> dict[str, Tensor]:
    shapes, found = simulator.symbol_shapes(), {}
    for name, packed in record["symbols"][side].items():
        if name not in shapes:
            raise InvalidRecord(f"the {side} kernel has no rounding symbol {name!r}")
        value = unpack(packed, shapes[name], f"symbol {name!r} of the {side} kernel")
        if not bool((value.abs() <= 1).all()):
            raise InvalidRecord(f"symbol {name!r} of the {side} kernel leaves [-1, 1]")
        found[name] = value
    return found


def _orders(record: Mapping[str, Any], side: str, simulator: Simulator) -> dict[str, str]:
    found: dict[str, str] = dict(record["orders"][side])
    for name, order in found.items():
        if name not in simulator.ordered:
            raise InvalidRecord(f"the {side} kernel has no sum {name!r} that may be ordered")
        if order not in ORDERS:
            raise InvalidRecord(f"there is no order {order!r}")
        if f"sum {name}" in record["symbols"][side]:
            raise InvalidRecord(f"the sum {name!r} of the {side} kernel has an order and a symbol")
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
        InvalidRecord: it is damaged, has another shape or holds numbers that are not finite.
    """
    kind, dtype = packed["kind"], _KINDS.get(packed["kind"])
    if dtype is None or tuple(packed["shape"]) != shape:
        raise InvalidRecord(f"{what} has another kind or shape than {list(shape)}")
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        raw = base64.b64decode(packed["data"], validate=True)
        decompressor = zlib.decompressobj()
        data = decompressor.decompress(raw, expected + 1)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise InvalidRecord(f"{what} is damaged: {error}") from error
    if len(data) != expected or decompressor.unused_data or not decompressor.eof:
        raise InvalidRecord(f"{what} is damaged: {len(data)} bytes or more, {expected} expected")
    array: NDArray[Any] = np.frombuffer(data, dtype).astype(np.float64).reshape(shape)
    if not np.isfinite(array).all():
        raise InvalidRecord(f"{what} holds numbers that are not finite")
    return torch.from_numpy(array / STEPS if kind == "sixty-fourths" else array)
