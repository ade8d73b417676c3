"""Block graphs from modules: torch.export, lowering, rewrites, roles."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import math
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.architecture import Model
from kcdsl.model.checkpoint.modules import NarrowWeights
from kcdsl.model.graph import BlockGraph
from kcdsl.model.lowering.agreement import MOST, refuse_other_program, refuse_other_results
from kcdsl.model.lowering.calls import Traced, lower
from kcdsl.model.lowering.drafts import Drafts, finish, remove_dead
from kcdsl.model.lowering.evaluate import NAMES, TYPES, traced_format
from kcdsl.model.lowering.rewrites import RULES, joined_views, mark_attention, spread_operands
from kcdsl.model.lowering.routes import Routes, along, recorded, routers

_FAKE = "torch._subclasses.fake_tensor"
_HARMLESS = frozenset({"aten::detach_"})
"""In-place operations that change no number; `torch.tensor` in a module makes them."""


def block_graph(
    model: Model,
    block: str,
    length: int,
    tokens: Sequence[int] | Tensor | None = None,
    formats: Iterable[str] = (),
    *,
    any_length: bool = False,
    routes: Routes = (),
    centre: Tensor | None = None,
) -> BlockGraph:
    """Return the graph of a block for sequences of `length` tokens.

    The block `model` takes token ids, which become part of its graph: pass them as `tokens`. The
    graph describes the block in kernels that compute in float32 and in `formats`: the module is
    converted to each of them and traced, which gives the storage format of each result. Then the
    graph is compared with the module; see `agreement.py`.

    A block with mixtures of experts needs their `routes`. The graph is then also compared with the
    module with free routers, on `centre` [T, D] or the ids, where they choose the same routes.

    Refuse an unknown block, one that torch.export cannot trace, an operation that block graphs do
    not have (the message names it and the calling module), and a block whose operations differ
    between formats or between runs.
    """
    ids = _ids(model, block, length, tokens)
    model.block(block)
    wanted = tuple(dict.fromkeys(("float32", *sorted(traced_format(f) for f in formats))))
    example = ids if ids is not None else torch.zeros(length, _input_width(model, block, length))
    traced = [
        _traced(model, block, format, example, seed, routes)
        for seed, format in enumerate(wanted if len(wanted) > 1 else wanted * 2)
    ]
    drafts = lower(traced, ids)
    simplify(drafts, any_length)
    graph = finish(drafts, block, None if ids is not None else tuple(example.shape))
    if max(math.prod(node.shape) for node in graph.nodes) <= MOST:
        params = NarrowWeights({key: model.weights.narrow(key) for key in graph.parameters})
        refuse_other_program(
            graph, params, lambda f: _part(model, block, f, params, routes), wanted, ids
        )
        if routes:
            _refuse_other_choice(model, graph, params, routes, centre if ids is None else ids)
    return graph


def _part(
    model: Model, block: str, format: str, weights: NarrowWeights, routes: Routes = ()
) -> nn.Module:
    """Return a block of a copy of the model that is converted to a format and has these routes."""
    whole = replace(model, module=converted(model, format))
    along(whole.module, routes)
    part = whole.block(block)
    return whole.with_streamed_weights(part, weights) if model.by_block else part


def _refuse_other_choice(
    model: Model,
    graph: BlockGraph,
    weights: NarrowWeights,
    routes: Routes,
    entering: Tensor | None,
) -> None:
    """Refuse a graph that differs from the block on an input where its routers choose the
    routes."""
    whole = replace(model, module=converted(model, "float64"))
    part = whole.block(graph.block)
    if model.by_block:
        part = whole.with_streamed_weights(part, weights)
    assert entering is not None
    x = entering.to(torch.float64) if entering.is_floating_point() else entering
    with torch.no_grad(), recorded(routers(whole, graph.block)) as seen:
        part(x)
    if tuple(seen.items()) == routes:
        refuse_other_results(graph, weights, part, x)


def _traced(
    model: Model, block: str, format: str, example: Tensor, seed: int, routes: Routes
) -> Traced:
    """Return a block of the model, converted to a format as adapters do it, exported."""
    whole = converted(model, format)
    along(whole, routes)
    part = replace(model, module=whole).block(block)
    model.fill(part, zeros=True)
    keys = {id(t): model.keys[n] for n, t in _tensors(whole) if n in model.keys}
    entering = example.to(TYPES[format]) if example.is_floating_point() else example
    with _seeded(seed):
        program = _export(block, part, entering)
    return Traced(format, program, dict(_tensors(part)), keys, model.transposed)


def converted(model: Model, format: str) -> nn.Module:
    """Return a copy of the model's module, converted to a format as the adapters do it."""
    try:
        return copy.deepcopy(model.module).to(TYPES[format])
    except Exception as error:  # foreign modules may refuse to be copied in many ways
        raise refuse(
            codes.EXPORT_FAILED,
            f"the module cannot be copied and converted to {format}:"
            f" {type(error).__name__}: {error}",
            help="let the module be one that copy.deepcopy and torch.nn.Module.to can take",
        ) from error


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Set a random seed in this context, so that results that depend on random numbers differ."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def simplify(drafts: Drafts, any_length: bool) -> None:
    """Apply every rewrite, remove dead nodes, mark attention, and join views.

    A graph for `any_length` does not expand operands that broadcast over rows.
    """
    remove_dead(drafts)
    for rule in RULES:
        drafts.rewrite(rule)
    remove_dead(drafts)
    mark_attention(drafts)
    if not any_length:
        spread_operands(drafts)
    drafts.rewrite(joined_views)
    remove_dead(drafts)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return every parameter and buffer with its name; a shared one under each of its names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return [*parameters, *module.named_buffers(remove_duplicate=False)]


def _ids(
    model: Model, block: str, length: int, tokens: Sequence[int] | Tensor | None
) -> Tensor | None:
    if length < 1:
        raise refuse(
            codes.SEQUENCE,
            f"a block graph needs at least one token, not {length}",
            help="give a length of 1 or more",
        )
    if block != "model":
        return None
    if tokens is None:
        raise refuse(
            codes.SEQUENCE,
            "the graph of the whole model needs the token ids",
            help="give the tokens, or ask for a block inside the model",
        )
    ids = model.ids(tokens)
    if len(ids) != length:
        raise refuse(
            codes.SEQUENCE,
            f"{len(ids)} token ids for a graph of length {length}",
            help="give as many tokens as the graph has rows",
        )
    return ids


def _input_width(model: Model, block: str, length: int) -> int:
    """Return the width D of the block's input, observed in a forward pass."""
    seen = model.block_inputs([0] * length, block)
    assert seen is not None
    return int(seen.shape[-1])


def _export(block: str, module: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    loggers = [logging.getLogger(n) for n in ("torch.export", "torch._export", "torch.fx", _FAKE)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        # A failing export prints the whole graph; the refusal below says what matters.
        quiet = contextlib.redirect_stderr(io.StringIO())
        with warnings.catch_warnings(), torch.no_grad(), quiet:
            warnings.simplefilter("ignore")
            program = torch.export.export(module, (example,), strict=False)
            if _writes_in_place(program):
                program = program.run_decompositions({})
    except Exception as error:  # torch.export raises many kinds of error for foreign code
        other = NAMES.get(example.dtype, "float32")
        where = "" if other == "float32" else f" in {other}"
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise refuse(
            codes.EXPORT_FAILED,
            f"block {block!r} cannot be exported{where}: {first}",
            help="let the block do the same to every input, without branches on values",
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    return program


def _writes_in_place(program: torch.export.ExportedProgram) -> bool:
    """Return whether any operation changes a tensor; such a program must be made functional
    first."""
    calls = [n.target for n in program.graph.nodes if n.op == "call_function"]
    operators = [t for t in calls if isinstance(t, torch._ops.OpOverload)]
    return any(t._schema.is_mutable and t._schema.name not in _HARMLESS for t in operators)
