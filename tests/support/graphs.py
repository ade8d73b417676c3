"""A cache of block graphs per process: tracing a block takes longer than most tests."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from kcdsl.model.architecture import Model
    from kcdsl.model.graph import BlockGraph
    from kcdsl.model.lowering.routes import Routes

_READERS = (
    "kcdsl_backends.certifier.statements.problems",
    "kcdsl_backends.certifier.statements.sequences",
)
_KNOWN: dict[bytes, BlockGraph] = {}


def cache_graphs() -> None:
    """Make the certifier reuse graphs that this process has traced before.

    The key is everything that a graph depends on: the configuration, the values and checkpoint keys
    of every tensor, the block, the length, the ids and the formats. Programs from outside
    `kcdsl.model` are traced each time.
    """
    for name in _READERS:
        module: Any = sys.modules.get(name)
        if module is not None and module.block_graph is not _remembered:
            module.block_graph = _remembered


def _remembered(
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
    from kcdsl.model.lowering import block_graph

    if routes:
        return block_graph(model, block, length, tokens, formats, routes=routes, centre=centre)
    if not model.built_in or model.by_block:  # no weights that could identify it
        return block_graph(model, block, length, tokens, formats, any_length=any_length)
    ids = () if tokens is None else (int(t) for t in tokens)
    key = _digest(model, block, length, ids, (*sorted(formats), str(any_length)))
    if key not in _KNOWN:
        _KNOWN[key] = block_graph(model, block, length, tokens, formats, any_length=any_length)
    return _KNOWN[key]


def _digest(
    model: Model, block: str, length: int, tokens: Iterable[int], formats: Iterable[str]
) -> bytes:
    import torch

    found = hashlib.blake2b()
    said = (
        type(model.module).__qualname__,
        type(model.module).__module__,
        sorted((name, repr(value)) for name, value in model.config.items()),
        sorted(model.keys.items()),
        (block, length, *tokens),
        tuple(formats),
    )
    found.update(repr(said).encode())
    tensors = (model.module.named_parameters, model.module.named_buffers)
    for name, tensor in (pair for every in tensors for pair in every(remove_duplicate=False)):
        found.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.digest()


def run_graph(graph: BlockGraph, params: Any, x: Any, compute: str | None = None) -> dict[str, Any]:
    """Return the value of every node of a graph by name; see `graph_output`."""
    from kcdsl.model.lowering.evaluate import each_node

    return dict(each_node(graph, params, x, compute, {}))
