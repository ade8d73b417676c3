"""Where a block graph falls apart into links, one after the other (docs/chains.md).

A graph can be cut behind an operation if nothing after it reads anything else that was computed
before: only one state goes on. Between two such places stands either a single operation or a knot,
such as a sub-layer with its residual; a link has at least one knot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from kcdsl.model.architecture import Model
from kcdsl.model.graph import BlockGraph, Node

_LEAVES = ("param", "constant")
_WORTH = ("linear", "matmul", "embedding")
"""Operations one of which a link has: cutting off less, such as a norm, only loses."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive operations [first, end) of a graph that end where it can be cut."""

    first: int
    end: int
    keys: frozenset[str]
    knot: bool


def stages_of(model: Model, graph: BlockGraph) -> tuple[BlockGraph, ...]:
    """Return the links of a graph in order; one alone where it does not fall apart.

    A link is as long as a block of the model that has a name, and then has this name, such as the
    layers of `model`; or it is one knot with the single operations behind it. What stands before
    the first knot, and what follows the last without being of its block, are links of their own.
    Names of nodes stay what they are in the graph.
    """
    computed = [node for node in graph.nodes if node.op not in (*_LEAVES, "input")]
    pieces = _pieces(graph, computed)
    knots = [piece for piece in pieces if piece.knot]
    names = _names(model, graph.block, knots)
    runs: list[tuple[str | None, list[Segment]]] = []
    for piece in pieces:
        own = names.get(piece.first) if piece.knot else None
        if not runs:
            runs.append((own, [piece]))
            continue
        name, run = runs[-1]
        if piece.knot:
            joins = own is not None and own == name
        else:
            keys = _keys_of(model, name) if name is not None else None
            joins = not any(p.knot for p in run) or keys is None or piece.keys <= keys
        if joins:
            run.append(piece)
        else:
            runs.append((own, [piece]))
    spans: list[tuple[str | None, int, int]] = []
    for name, run in runs:
        first, end = run[0].first, run[-1].end
        if spans and not any(node.op in _WORTH for node in computed[first:end]):
            spans[-1] = (None, spans[-1][1], end)
        else:
            spans.append((name, first, end))
    return tuple(
        _link(graph, computed, first, end, name or f"{graph.block}[{number}]")
        for number, (name, first, end) in enumerate(spans)
    )


def partitions(
    graph: BlockGraph, links: tuple[BlockGraph, ...]
) -> Iterator[tuple[BlockGraph, ...]]:
    """Yield the links of a graph, then half as many longer ones, and so on down to two.

    Fewer links lose less between them; what changed takes longer to verify again.
    """
    yield links
    count = len(links)
    while count > 2:
        count = (count + 1) // 2
        yield _longer(graph, links, count)


def _longer(graph: BlockGraph, links: tuple[BlockGraph, ...], count: int) -> tuple[BlockGraph, ...]:
    """Return `count` links, each made of as many consecutive ones as the others or one less."""
    computed = [node for node in graph.nodes if node.op not in (*_LEAVES, "input")]
    places = {node.name: place for place, node in enumerate(computed)}
    first, before, found = 0, 0, []
    for number in range(1, count + 1):
        behind = -(-len(links) * number // count)
        end = places[links[behind - 1].output] + 1
        names = links[before].block, links[behind - 1].block
        name = "..".join(names if behind - before > 1 else names[:1])
        found.append(_link(graph, computed, first, end, name))
        first, before = end, behind
    return tuple(found)


def named(
    graph: BlockGraph, links: tuple[BlockGraph, ...], names: Sequence[str]
) -> tuple[BlockGraph, ...]:
    """Return the partition of a graph whose first links have these names."""
    return next(
        some
        for some in partitions(graph, links)
        if [link.block for link in some[: len(names)]] == list(names)
    )


def until(graph: BlockGraph, output: str) -> BlockGraph:
    """Return the graph up to a result, and all that it has before, for runs that end there."""
    computed = [node for node in graph.nodes if node.op not in (*_LEAVES, "input")]
    end = next(place for place, node in enumerate(computed) if node.name == output)
    return _link(graph, computed, 0, end + 1, graph.block)


def _pieces(graph: BlockGraph, computed: Sequence[Node]) -> list[Segment]:
    last = {name: place for place, node in enumerate(computed) for name in node.inputs}
    alive: set[str] = {node.name for node in graph.nodes if node.op == "input"}
    inside = {node.name for node in computed} | alive
    keys = {node.name: node.attrs["key"] for node in graph.nodes if node.op == "param"}
    pieces: list[Segment] = []
    first = 0
    for place, node in enumerate(computed):
        alive.add(node.name)
        alive = {name for name in alive & inside if last.get(name, -1) > place}
        final = place + 1 == len(computed)
        if final or (alive <= {node.name} and _is_state(node, graph)):
            part = computed[first : place + 1]
            read = frozenset(keys[name] for n in part for name in n.inputs if name in keys)
            knot = sum(n.op != "embedding" for n in part) > 1
            pieces.append(Segment(first, place + 1, read, knot))
            first = place + 1
    return pieces


def _is_state(node: Node, graph: BlockGraph) -> bool:
    """Say whether a result is a state that blocks hand on: [T, D], and no part of attention."""
    rows = graph.node(graph.output).shape[0]
    return node.role == "" and len(node.shape) == 2 and node.shape[0] == rows


def _names(model: Model, block: str, knots: Sequence[Segment]) -> Mapping[int, str]:
    """Return for knots, by where they begin, the largest named block that they are a part of; none
    that has all of them."""
    found: dict[int, str] = {}
    sizes = {name: keys for name in model.block_names() if (keys := _keys_of(model, name))}
    every = frozenset().union(*(knot.keys for knot in knots))
    for knot in knots:
        able = [
            name
            for name, keys in sizes.items()
            if name != block and knot.keys <= keys and not every <= keys
        ]
        if able:
            found[knot.first] = max(able, key=lambda name: len(sizes[name]))
    return found


def _keys_of(model: Model, name: str) -> frozenset[str]:
    """Return the checkpoint keys of the parameters of a named block."""
    keys = {id(tensor): model.keys[n] for n, tensor in _tensors(model.module) if n in model.keys}
    return frozenset(keys[id(t)] for _, t in _tensors(model.block(name)) if id(t) in keys)


def _tensors(module: nn.Module) -> list[tuple[str, object]]:
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def _link(
    graph: BlockGraph, computed: Sequence[Node], first: int, end: int, name: str
) -> BlockGraph:
    """Return operations [first, end) as a graph of its own, on what the one before them returns."""
    part, before = computed[first:end], computed[first - 1] if first else None
    read = {source for node in part for source in node.inputs}
    leaves = [n for n in graph.nodes if n.name in read and n.op in (*_LEAVES, "input")]
    entering: dict[str, str] = {}
    shape = graph.input_shape
    if before is not None:
        shape = before.shape
        entering[before.name] = "input"
        leaves.insert(0, Node("input", "input", (), shape))
    nodes = [
        replace(node, inputs=tuple(entering.get(source, source) for source in node.inputs))
        for node in part
    ]
    constants = {
        n.attrs["key"]: graph.constants[n.attrs["key"]] for n in leaves if n.op == "constant"
    }
    return BlockGraph(name, (*leaves, *nodes), part[-1].name, constants, shape)
