"""Interface to auto_LiRPA: version 0.7 and the wheel of 0.3, with patches that the latter needs.

No object of the library leaves this module. Version 0.3 was written for torch 1.12 and numpy 1:
names that it imports are restored while it is imported and while it reads a graph.
"""

from __future__ import annotations

import io
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function as AutogradFunction

METHODS: Mapping[str, str] = {"ibp": "IBP", "crown": "CROWN", "alpha-crown": "CROWN-Optimized"}
"""Methods by their names here; the values are the library's names."""
_RECURSION = 20_000
"""Recursion limit while the library traverses a network."""


class Unanswered(Exception):
    """The library gives no bound; the message states the reason."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The box of an input of a network, `low` to `high`, [1, ...] float64."""

    low: Tensor
    high: Tensor


# --- functions of single numbers ------------------------------------------------------------------

Planes = tuple[Tensor, Tensor, Tensor, Tensor]
"""Slope and intercept of a lower line of a function on boxes, and of an upper line."""


@dataclass(frozen=True, slots=True)
class SmoothActivation:
    """A function that decreases up to one point and increases from there on.

    Args:
        value: the function.
        bottom: a float64 number next to that point; -inf if the function increases everywhere.
        curvature: upper bound of the magnitude of its second derivative.
    """

    value: Callable[[Tensor], Tensor]
    bottom: float
    curvature: float

    def range(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the greatest value on boxes."""
        ends = self.value(low), self.value(high)
        least = self.value(torch.full_like(low, self.bottom)) - self.curvature * 2.0**-40
        inside = (low < self.bottom) & (self.bottom < high)
        return torch.where(inside, least, torch.minimum(*ends)), torch.maximum(*ends)

    def planes(self, low: Tensor, high: Tensor) -> Planes:
        """Return the chord minus and plus M(h - l)²/8, with the curvature M."""
        slope = _slope(self.value, low, high)
        intercept = self.value(low) - slope * low
        off = self.curvature * (high - low).square() / 8
        return slope, intercept - off, slope, intercept + off


@dataclass(frozen=True, slots=True)
class Convex:
    """A convex function on all numbers or on positive ones.

    Args:
        value: the function.
        derivative: its derivative.
        rises: whether it increases; otherwise it decreases and is defined for positive numbers.
    """

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    rises: bool = False

    def range(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the greatest value on boxes."""
        self._refuse(low)
        ends = self.value(low), self.value(high)
        return ends if self.rises else (ends[1], ends[0])

    def planes(self, low: Tensor, high: Tensor) -> Planes:
        """Return the tangent at the midpoint and the chord."""
        self._refuse(low)
        middle = (low + high) / 2
        under, over = self.derivative(middle), _slope(self.value, low, high)
        return under, self.value(middle) - under * middle, over, self.value(low) - over * low

    def _refuse(self, low: Tensor) -> None:
        if not self.rises and not bool((low > 0).all()):
            raise ValueError("a variance or a sum of exponentials is not shown to be positive")


def _slope(value: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Return the slope of the chord; 0 on boxes that are points."""
    width = high - low
    return torch.where(width > 0, (value(high) - value(low)) / width, torch.zeros_like(width))


SCALAR: Mapping[str, SmoothActivation | Convex] = {
    "exp": Convex(torch.exp, torch.exp, rises=True),
    "reciprocal": Convex(torch.reciprocal, lambda x: -x.square().reciprocal()),
    "rsqrt": Convex(torch.rsqrt, lambda x: -x.rsqrt() / (2 * x)),
    "tanh": SmoothActivation(torch.tanh, -math.inf, 0.77),
    "gelu": SmoothActivation(torch.nn.functional.gelu, -0.7517915924990838, 0.798),
    "gelu_tanh": SmoothActivation(
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"), -0.752461361, 0.798
    ),
    "silu": SmoothActivation(torch.nn.functional.silu, -1.2784645427610738, 0.5001),
}
"""Functions by name. Those of the library are unsound: in 0.3 lower lines of square roots lie above
them and reciprocals are in float32, and in 0.7 chords on narrow boxes lie below the function."""


class _Traced(AutogradFunction):
    """A function of `SCALAR` as a single operation in a traced network."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, floor: float) -> Tensor:
        """Return the function of this name."""
        return SCALAR[name].value(x)

    @staticmethod
    def symbolic(graph: Any, x: Any, name: str, floor: float) -> Any:
        """Return the operation in the graph."""
        found = graph.op(f"kcdsl::{name}", x, floor_f=floor)
        found.setType(x.type())
        return found


def scalar(name: str, x: Tensor, floor: float = -math.inf) -> Tensor:
    """Apply a function of `SCALAR` as one operation of the traced network.

    Args:
        name: name of the function.
        x: its argument.
        floor: a proved lower bound of the argument, which the library may not find.
    """
    found: Tensor = _Traced.apply(x, name, floor)  # type: ignore[no-untyped-call]
    return found


# --- the library ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Library:
    version: str
    network: Any
    entry: Callable[[Entry], Any]


def version() -> str:
    """Return the version of the library that is installed."""
    return _library().version


def bounds(
    module: torch.nn.Module, entries: Sequence[Entry], method: str, *, rows: int = 2048
) -> tuple[Tensor, Tensor]:
    """Return lower and upper bounds of the output of a module, element by element.

    Args:
        module: a function of one tensor for each of the entries, [1, ...] float64.
        entries: boxes of its inputs.
        method: one of `METHODS`.
        rows: number of functionals that CROWN propagates back at a time.

    Raises:
        Unanswered: the library gives no finite bound.
    """
    library = _library()
    middle = tuple((entry.low + entry.high) / 2 for entry in entries)
    options: dict[str, Any] = {
        "conv_mode": "matrix",
        "sparse_intermediate_bounds": False,
        "optimize_bound_args": {"iteration": 20},
    }
    if not library.version.startswith("0.3"):
        options["crown_batch_size"] = rows
    with (
        torch.random.fork_rng(devices=[]), _recursing(_RECURSION), _in_float64(), _quiet(),
        _readable_nodes(library.version),
    ):  # fmt: skip
        torch.manual_seed(0)
        try:
            network = library.network(module, middle, bound_opts=options, device="cpu")
            given = tuple(library.entry(entry) for entry in entries)
            low, high = network.compute_bounds(x=given, method=METHODS[method])
        except (
            *(ArithmeticError, AssertionError, AttributeError, IndexError, KeyError),
            *(NotImplementedError, RuntimeError, TypeError, UnboundLocalError, ValueError),
        ) as error:
            said = str(error).strip().splitlines()
            what = f"{type(error).__name__}{': ' + said[0][:160] if said else ''}"
            raise Unanswered(f"auto_LiRPA {library.version} {method} stopped: {what}") from error
    low, high = low.detach(), high.detach()
    if not bool((torch.isfinite(low) & torch.isfinite(high) & (low <= high)).all()):
        raise Unanswered(f"auto_LiRPA {library.version} {method} gave no finite bound")
    return low, high


@cache
def _library() -> _Library:
    """Import the library and add the operations that it lacks."""
    with _quiet(), _recursing(), _removed_imports():
        import auto_LiRPA
        from auto_LiRPA.bound_ops import Bound
        from auto_LiRPA.utils import eyeC

    class Network(auto_LiRPA.BoundedModule):  # type: ignore[misc]
        def _named_members(
            self, get_members_fn: Any, prefix: str = "", recurse: bool = True, **_: Any
        ) -> Any:
            return super()._named_members(get_members_fn, prefix, recurse)

        def get_sparse_C(self, node: Any, *args: Any, **options: Any) -> Any:
            found = super().get_sparse_C(node, *args, **options)
            if not isinstance(found[0], eyeC):
                return found
            batch, rows, *shape = found[0].shape  # 0.3 cannot view some products with an eyeC
            dense = torch.eye(rows).unsqueeze(0).expand(batch, -1, -1)
            return (dense.reshape(batch, rows, *shape), *found[1:])

    def operation(function: SmoothActivation | Convex) -> type:
        class Operation(Bound):  # type: ignore[misc]
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                self.requires_input_bounds = [0]
                self.floor = float(self.attr["floor"])

            def _inside(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
                return low.clamp_min(self.floor), high.clamp_min(self.floor)

            def forward(self, x: Tensor) -> Tensor:
                return function.value(x)

            def interval_propagate(self, *boxes: Any) -> tuple[Tensor, Tensor]:
                return function.range(*self._inside(boxes[0][0], boxes[0][1]))

            def bound_backward(self, last_lA: Any, last_uA: Any, *x: Any, **_: Any) -> Any:
                under, least, over, most = function.planes(*self._inside(x[0].lower, x[0].upper))

                def back(a: Any, pair: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> Any:
                    if a is None:
                        return None, 0
                    up, down = a.clamp(min=0), a.clamp(max=0)
                    rest = up * pair[1] + down * other[1]
                    return up * pair[0] + down * other[0], rest.flatten(2).sum(-1)

                low, below = back(last_lA, (under, least), (over, most))
                high, above = back(last_uA, (over, most), (under, least))
                return [(low, high)], below, above

        return Operation

    for name, function in SCALAR.items():
        auto_LiRPA.register_custom_op(f"kcdsl::{name}", operation(function))

    def entry(one: Entry) -> Any:
        ball = auto_LiRPA.PerturbationLpNorm(norm=math.inf, x_L=one.low, x_U=one.high)
        return auto_LiRPA.BoundedTensor((one.low + one.high) / 2, ball)

    return _Library(str(auto_LiRPA.__version__), Network, entry)


@contextmanager
def _in_float64() -> Iterator[None]:
    """Make float64 the default type of new tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _recursing(limit: int = 0) -> Iterator[None]:
    """Raise the recursion limit to at least `limit`, and restore the former one afterwards.

    The library sets it to a million on import. The JSON reader recurses in C, so that a deeply
    nested document would then crash the process.
    """
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, limit))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard the output and the warnings of the library."""
    with warnings.catch_warnings(record=True), redirect_stdout(io.StringIO()):
        yield


@contextmanager
def _removed_imports() -> Iterator[None]:
    """Restore names that version 0.3 imports from numpy and torch, during the body."""
    import torch.onnx.symbolic_helper as helper

    settings = vars(sys.modules[helper.parse_args.__module__])["GLOBALS"]

    def opset(number: int) -> None:
        settings.export_onnx_opset_version = number

    old = ModuleType("numpy.lib.arraysetops")
    old.isin = np.isin  # type: ignore[attr-defined]
    added = "numpy.lib.arraysetops" not in sys.modules
    lacking = not hasattr(helper, "_set_opset_version")
    if added:
        sys.modules["numpy.lib.arraysetops"] = old
    if lacking:
        helper._set_opset_version = opset  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if added:
            del sys.modules["numpy.lib.arraysetops"]
        if lacking:
            del helper._set_opset_version  # type: ignore[attr-defined]


@contextmanager
def _readable_nodes(version: str) -> Iterator[None]:
    """Let version 0.3 read attributes of traced nodes by their names."""
    node: Any = torch._C.Node
    if hasattr(node, "__getitem__"):
        yield
        return
    node.__getitem__ = lambda one, name: getattr(one, one.kindOf(name))(name)
    try:
        yield
    finally:
        del node.__getitem__
