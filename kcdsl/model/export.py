"""Block graphs from modules: torch.export, lowering, rewrites, roles."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.architecture import Model
from kcdsl.model.drafts import Drafts, finish, remove_dead
from kcdsl.model.graph import BlockGraph
from kcdsl.model.lowering import lower
from kcdsl.model.rewrites import RULES
from kcdsl.model.roles import mark_attention


def block_graph(
    model: Model, block: str, length: int, tokens: Sequence[int] | Tensor | None = None
) -> BlockGraph:
    """Return the graph of a block for sequences of `length` tokens.

    The block `model` takes token ids, which become part of its graph: pass them as `tokens`.
    Refuse an unknown block, one that torch.export cannot trace, and an operation that block graphs
    do not have (the message names it and the module that calls it).
    """
    module = model.block(block)
    ids = _ids(model, block, length, tokens)
    example = ids if ids is not None else torch.zeros(length, _input_width(model, block, length))
    program = _export(block, module, example)
    keys = {id(t): model.keys[n] for n, t in _tensors(model.module) if n in model.keys}
    targets = dict(_tensors(module))
    drafts = lower(program, keys, ids, targets)
    simplify(drafts)
    shape = None if ids is not None else tuple(example.shape)
    return finish(drafts, block, shape)


def simplify(drafts: Drafts) -> None:
    """Apply every rewrite, remove what nothing reads, and mark attention."""
    remove_dead(drafts)
    for rule in RULES:
        drafts.rewrite(rule)
    remove_dead(drafts)
    mark_attention(drafts)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return every parameter and buffer with its name; a shared one comes under each name."""
    parameters = module.named_parameters(remove_duplicate=False)
    return [*parameters, *module.named_buffers(remove_duplicate=False)]


def _ids(
    model: Model, block: str, length: int, tokens: Sequence[int] | Tensor | None
) -> Tensor | None:
    if length < 1:
        raise refuse(codes.SEQUENCE, f"a block graph needs at least one token, not {length}")
    if block != "model":
        return None
    if tokens is None:
        raise refuse(codes.SEQUENCE, "the graph of the whole model needs the token ids")
    ids = model.ids(tokens)
    if len(ids) != length:
        raise refuse(codes.SEQUENCE, f"{len(ids)} token ids for a graph of length {length}")
    return ids


def _input_width(model: Model, block: str, length: int) -> int:
    """Return D of the block's input, seen in a forward pass."""
    seen = model.block_inputs([0] * length, block)
    assert seen is not None
    return int(seen.shape[-1])


def _export(block: str, module: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    loggers = [logging.getLogger(n) for n in ("torch.export", "torch._export", "torch.fx")]
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
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise refuse(
            codes.EXPORT_FAILED,
            f"block {block!r} cannot be exported: {first}",
            help="let the block do the same to every input, without branches on values",
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    return program


def _writes_in_place(program: torch.export.ExportedProgram) -> bool:
    """Say whether any operation changes a tensor; such a program must be made functional first."""
    calls = [n.target for n in program.graph.nodes if n.op == "call_function"]
    return any(t._schema.is_mutable for t in calls if isinstance(t, torch._ops.OpOverload))
