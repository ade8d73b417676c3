"""Comparison of a block graph with the module that it was traced from, before any proof.

Both must give the same numbers in float64; or in float32, if the module does not run or casts to
float32 in float64 and no kernel computes in float64. Converted to the format of a kernel, the
module must give results of the graph's types, overflow where the graph does, and differ from the
float64 result by no more than the graph's roundings explain. Inputs are ordinary, tiny and large
numbers and zeros. A difference is refused: a proof about another graph is no proof of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.architecture import unchanged
from kcdsl.model.attention import composed_attention
from kcdsl.model.graph import BlockGraph
from kcdsl.model.lowering.evaluate import NAMES, TYPES, graph_output, round_to
from kcdsl.model.numerics import UNROUNDED
from kcdsl.model.numerics.formats import FORMATS

Array = NDArray[Any]
SCALES = (1.0, 2.0**-60, 2.0**12, 0.0)
"""Factors of inputs drawn from a standard normal distribution."""
MOST = 2**24
"""The largest number of elements of a result for which a graph is run."""
_EXACT = {"float64": 2.0**-45, "float32": 2.0**-20}
"""Relative changes that exceed the roundings of a format by far."""
_NOTHING = 2.0**-120
"""The absolute error of underflow allowed in float32 and wider formats."""
_FLUSHED = 2.0**-126
"""The absolute error of a stored number in a format coarser than float32, whose subnormal numbers
kernels may read as zero (Rule 3.5)."""
_DRAWN = 8
"""The number of inputs that decide whether a block is the same program in float64."""
_TIMES = 64.0
"""Tolerance: this many times the effect of changing every result by one rounding."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Runs a converted block and its graph on the same input."""

    graph: BlockGraph
    params: Mapping[str, Tensor]
    parts: Mapping[str, nn.Module]
    ids: Tensor | None
    base: str

    def module(self, x: Array | None, format: str) -> Tensor:
        """Return the result of the block, converted to a format."""
        entering = self.ids if x is None else torch.from_numpy(x).to(TYPES[format])
        composed = nullcontext() if format == self.base else ComposedAttention()
        part = self.parts[format]
        with torch.no_grad(), composed, unchanged(part):
            found: Tensor = part(entering)
        return found

    def exact(self, x: Array | None) -> Array:
        """Return the result of the block in the widest format in which it runs."""
        return _numbers(self.module(x, self.base))

    def of_graph(self, x: Array | None, format: str) -> Array:
        """Return the result of the graph in a format."""
        return graph_output(self.graph, self.params, x, format)


class ComposedAttention(TorchFunctionMode):
    """Runs every attention as three operations, as a kernel does whose scores are stored."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one torch function."""
        run = composed_attention if func is F.scaled_dot_product_attention else func
        return run(*args, **(kwargs or {}))


def refuse_other_program(
    graph: BlockGraph,
    params: Mapping[str, Tensor],
    converted: Callable[[str], nn.Module],
    formats: Sequence[str],
    ids: Tensor | None,
) -> None:
    """Refuse a graph that differs from its block in float64 or in one of the formats.

    `converted` returns the block, converted to a format as the adapters do it.
    """
    kept = tuple(f for f in dict.fromkeys(formats) if f != "float64")
    parts = {f: converted(f) for f in dict.fromkeys(("float64", "float32", *kept))}
    run = _Run(graph, params, parts, ids, "float64")
    if "float64" not in formats and not _holds_in_float64(run):
        run = replace(run, base="float32")
    drawn = np.random.default_rng(0)
    for scale in SCALES if ids is None else (1.0,):
        x = None
        if graph.input_shape is not None and ids is None:
            x = scale * drawn.standard_normal(graph.input_shape)
        _as_exactly(run, x, drawn)
        for format in kept:
            _in_format(run, x, format, drawn)


def refuse_other_results(
    graph: BlockGraph, params: Mapping[str, Tensor], part: nn.Module, entering: Tensor
) -> None:
    """Refuse a graph that differs from a float64 block on one input: hidden states [T, D] or token
    ids."""
    x = _numbers(entering) if entering.is_floating_point() else None
    run = _Run(graph, params, {"float64": part}, entering if x is None else None, "float64")
    _as_exactly(run, x, np.random.default_rng(0))


def _holds_in_float64(run: _Run) -> bool:
    """Return whether the module runs in float64 and equals the graph without roundings, on several
    inputs: on a single one, the terms that differ may be zero."""
    shape, drawn = run.graph.input_shape, np.random.default_rng(0)
    try:
        for _ in range(1 if shape is None else _DRAWN):
            _as_exactly(run, None if shape is None else drawn.standard_normal(shape), drawn)
    except Refusal:
        return False
    return True


def _as_exactly(run: _Run, x: Array | None, drawn: np.random.Generator) -> None:
    expected = _attempt(run, lambda: run.exact(x), run.base)
    found = run.of_graph(x, run.base)
    if expected.shape != found.shape:
        raise _differs(run, run.base, f"the shape {expected.shape}, the graph {found.shape}")
    units = (FORMATS[n.format].unit_roundoff for n in run.graph.nodes if n.format)
    change = max(_EXACT[run.base], max(units, default=0.0))
    allowed = 32 * change * _largest(expected) + _NOTHING
    if _same(expected, found, allowed):
        return
    if not _same(expected, found, allowed + _TIMES * _moved(run, x, change, drawn)):
        raise _differs(run, run.base, _numbers_differ(expected, found))


def _in_format(run: _Run, x: Array | None, format: str, drawn: np.random.Generator) -> None:
    rounded = None if x is None else round_to(x, format)
    if rounded is not None and not np.isfinite(rounded).all():
        return
    result = _attempt(run, lambda: run.module(rounded, format), format)
    wanted = result_type(run.graph, run.graph.output, format)
    if result.dtype != wanted:
        raise _differs(run, format, f"{NAMES.get(result.dtype)} numbers, the graph {NAMES[wanted]}")
    found, expected = _numbers(result), run.of_graph(rounded, format)
    exact = run.exact(rounded)
    unit = FORMATS[format].unit_roundoff
    near = [expected]
    if rounded is not None and not _same_kinds(found, expected):
        near += [run.of_graph(round_to(rounded * (1 + s), format), format) for s in (unit, -unit)]
    if not any(_same_kinds(found, other) for other in near):
        raise _differs(run, format, _numbers_differ(found, expected))
    finite = np.isfinite(found) & np.isfinite(expected) & np.isfinite(exact)
    if not finite.any():
        return
    off, by_graph = (float(np.abs(v - exact)[finite].max()) for v in (found, expected))
    floor = 8 * (unit * _largest(exact[finite]) + FORMATS[format].smallest_subnormal)
    if off <= _TIMES * by_graph + floor:
        return
    flushed = _FLUSHED if FORMATS[format].coarse else 0.0
    if off > _TIMES * (by_graph + _moved(run, rounded, unit, drawn, flushed)) + floor:
        raise _differs(run, format, f"results {off:.3g} off, the graph {by_graph:.3g}")


def _moved(
    run: _Run, x: Array | None, change: float, drawn: np.random.Generator, flushed: float = 0.0
) -> float:
    """Return the change of the output under relative changes of the input and stored results, and
    absolute ones of at most `flushed`."""

    def changed(value: Array) -> Array:
        chance = drawn.uniform(-1, 1, value.shape)
        return value * (1 + change * chance) + flushed * chance

    before = graph_output(run.graph, run.params, x)
    with np.errstate(all="ignore"):
        gap = np.abs(graph_output(run.graph, run.params, x, None, changed) - before)
    return float(gap[np.isfinite(gap)].max(initial=0.0))


def result_type(graph: BlockGraph, name: str, compute: str) -> torch.dtype:
    """Return the type of a node's result in a kernel that computes in a format."""
    node = graph.node(name)
    if node.op == "embedding" or node.op not in UNROUNDED:
        return TYPES[node.format or compute]
    found = [result_type(graph, i, compute) for i in node.inputs]
    kind = found[0]
    for other in found[1:]:
        kind = torch.promote_types(kind, other)
    return kind


def _attempt(run: _Run, action: Callable[[], Any], format: str) -> Any:
    try:
        return action()
    except Refusal:
        raise
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        first = (str(error).strip().splitlines() or [""])[0]
        raise _differs(run, format, f"{type(error).__name__}: {first}") from error


def _numbers(result: Tensor) -> Array:
    return np.asarray(result.detach().to("cpu", torch.float64).numpy())


def _same(one: Array, two: Array, allowed: float) -> bool:
    if not _same_kinds(one, two):
        return False
    finite = np.isfinite(one)
    return bool((np.abs(one - two)[finite] <= allowed).all())


def _same_kinds(one: Array, two: Array) -> bool:
    """Return whether the same elements are finite, infinite, and NaN."""
    if one.shape != two.shape:
        return False
    kinds = ((np.isfinite(v), np.isnan(v)) for v in (one, two))
    return all(np.array_equal(a, b) for a, b in zip(*kinds, strict=True))


def _largest(value: Array) -> float:
    finite = np.abs(value[np.isfinite(value)])
    return float(finite.max(initial=0.0))


def _numbers_differ(module: Array, graph: Array) -> str:
    if not _same_kinds(module, graph):
        counts = [int((~np.isfinite(v)).sum()) for v in (module, graph)]
        return f"{counts[0]} results that are no finite numbers, the graph {counts[1]}"
    finite = np.isfinite(module)
    return f"results {float(np.abs(module - graph)[finite].max()):.3g} from those of the graph"


def _differs(run: _Run, format: str, what: str) -> Exception:
    return refuse(
        codes.GRAPH_DIFFERS,
        f"the graph of block {run.graph.block!r} is not what the module does in {format}:"
        f" the module gives {what}",
        help="let the module do the same whether it is traced or run, in every format",
    )
