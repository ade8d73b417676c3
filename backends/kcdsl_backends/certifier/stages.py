"""The stages of a block graph (docs/proofs/chains.md), and the bound of one stage.

The input of a stage is an interface: a region of the training values and a box of the drift. A
graph can be cut after an operation if later operations read no earlier result but its own. The part
between two cuts is a single operation or a knot, such as a sub-layer with its residual; a stage has
at least one knot.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kcdsl.model.architecture import Model
from kcdsl.model.graph import BlockGraph, Node, array_digest
from kcdsl_backends.certifier.statements.problems import LEAST_CLAIM, BlockProblem, Claims
from kcdsl_backends.certifier.statements.proof import (
    Proof,
    ProofBuilder,
    box_region,
    encode_array,
    stated_of,
)
from kcdsl_backends.drift.affine_forms import output_ellipsoids, output_entry
from kcdsl_backends.drift.boxes import Box, NoBound, up
from kcdsl_backends.drift.boxes.rounding import Apart, power_of_two
from kcdsl_backends.drift.boxes.state import Entering, InterfaceEllipsoids
from kcdsl_backends.drift.functionals import drift_bound

_LEAVES = ("param", "constant")
_SUBSTANTIAL = ("linear", "matmul", "embedding")
"""Every stage has one of these operations; a cut around less, such as a norm, only loses."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive operations [first, end) of a graph between two cuts, with their parameters."""

    first: int
    end: int
    keys: frozenset[str]
    knot: bool


def stages_of(model: Model, graph: BlockGraph) -> tuple[BlockGraph, ...]:
    """Return the stages of a graph in order; the graph as one stage if it cannot be cut.

    A stage is a named block of the model, such as a layer of `model`, and has its name; or it is
    one knot with the single operations after it. Operations before the first knot, and those after
    the last that are not of its block, are separate stages. Names of nodes do not change.
    """
    computed = [node for node in graph.nodes if node.op not in (*_LEAVES, "input")]
    pieces = _segments(graph, computed)
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
        if spans and not any(node.op in _SUBSTANTIAL for node in computed[first:end]):
            spans[-1] = (None, spans[-1][1], end)
        else:
            spans.append((name, first, end))
    return tuple(
        _stage(graph, computed, first, end, name or f"{graph.block}[{number}]")
        for number, (name, first, end) in enumerate(spans)
    )


def partitions(
    graph: BlockGraph, stages: tuple[BlockGraph, ...]
) -> Iterator[tuple[BlockGraph, ...]]:
    """Yield the stages of a graph, then half as many longer ones, and so on down to two.

    Fewer stages lose less precision; a change takes longer to verify again.
    """
    yield stages
    count = len(stages)
    while count > 2:
        count = (count + 1) // 2
        yield _merged(graph, stages, count)


def _merged(
    graph: BlockGraph, stages: tuple[BlockGraph, ...], count: int
) -> tuple[BlockGraph, ...]:
    """Merge consecutive stages into `count` ones of equal numbers of stages, up to one."""
    computed = [node for node in graph.nodes if node.op not in (*_LEAVES, "input")]
    places = {node.name: place for place, node in enumerate(computed)}
    first, before, found = 0, 0, []
    for number in range(1, count + 1):
        behind = -(-len(stages) * number // count)
        end = places[stages[behind - 1].output] + 1
        names = stages[before].block, stages[behind - 1].block
        name = "..".join(names if behind - before > 1 else names[:1])
        found.append(_stage(graph, computed, first, end, name))
        first, before = end, behind
    return tuple(found)


def named(
    graph: BlockGraph, stages: tuple[BlockGraph, ...], names: Sequence[str]
) -> tuple[BlockGraph, ...]:
    """Return the partition of a graph whose first stages have these names."""
    return next(
        some
        for some in partitions(graph, stages)
        if [stage.block for stage in some[: len(names)]] == list(names)
    )


def prefix(graph: BlockGraph, output: str) -> BlockGraph:
    """Return the part of a graph that ends with a result."""
    computed = [node for node in graph.nodes if node.op not in (*_LEAVES, "input")]
    end = next(place for place, node in enumerate(computed) if node.name == output)
    return _stage(graph, computed, 0, end + 1, graph.block)


def _segments(graph: BlockGraph, computed: Sequence[Node]) -> list[Segment]:
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
    """Return whether a result is a state between blocks: [T, D] and no part of attention."""
    rows = graph.node(graph.output).shape[0]
    return node.role == "" and len(node.shape) == 2 and node.shape[0] == rows


def _names(model: Model, block: str, knots: Sequence[Segment]) -> Mapping[int, str]:
    """Return the largest named block that contains a knot, by the knot's first operation; without
    blocks that contain all knots."""
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


def _stage(
    graph: BlockGraph, computed: Sequence[Node], first: int, end: int, name: str
) -> BlockGraph:
    """Return operations [first, end) as a graph whose input is the result before them."""
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


NOISE = 2.0**-36
"""Bound of the rounding errors of both programs, relative to the largest number of a state."""
REACHES = 2.0**-7
"""Share of the width by which the claimed box of the training value is widened. Prover and checker
bound it in different ways, and the drift depends little on it."""
DIGITS = 4
"""Interfaces are rounded outward to this many binary digits of their width."""


Readings = tuple[Tensor, Tensor]
"""Bounds of the difference between a reading of a state and its base value, in both kernels."""


@dataclass(frozen=True, slots=True)
class Interface:
    """The input of a stage: states [T, D] in centre ± radius, and their drift (None: no drift).

    `centre` None: the token ids of the block. `around` has ellipsoids around the rows of the drift,
    which the checker derives too. `readings` None: all readings are the same.
    """

    centre: Tensor | None
    radius: Tensor
    drift: Box | None = None
    around: InterfaceEllipsoids | None = None
    readings: Readings | None = None

    @property
    def digest(self) -> str:
        """Return the sha256 (hex) of its numbers; token ids are part of the graph."""
        drift = () if self.drift is None else (self.drift.lo, self.drift.hi)
        around = () if self.around is None else (self.around.middle, self.around.shapes)
        parts = [self.centre, self.radius, *drift, *around, *(self.readings or ())]
        digests = ["" if p is None else array_digest(p.cpu().numpy()) for p in parts]
        return hashlib.sha256("|".join(digests).encode()).hexdigest()

    def entering(self, *, followed: bool = False) -> Entering:
        """Return the interface for the domains; `followed`: another stage reads the output."""
        return Entering(self.drift, self.around, self.readings or (None, None), followed)

    def region(self) -> dict[str, Any]:
        """Return the region of a stage in a proof; requires a drift."""
        assert self.centre is not None
        assert self.drift is not None
        stated = {**box_region("hull", self.centre, self.radius), "drift": box_record(self.drift)}
        stated.update(_readings_record(self.readings))
        return stated if self.around is None else {**stated, "ellipsoids": True}


@dataclass(frozen=True, slots=True)
class StageOutput:
    """Claimed boxes of the training value and of the drift of a stage's output, and ellipsoids
    around the rows of the drift if requested."""

    train: Box
    drift: Box
    around: InterfaceEllipsoids | None = None
    readings: Readings | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the output in the format of a proof."""
        boxes = {"train": box_record(self.train), "drift": box_record(self.drift)}
        return {**boxes, **_readings_record(self.readings)}

    @property
    def largest(self) -> float:
        return float(self.drift.mag().amax())

    def interface(self) -> Interface:
        """Return an interface that contains the output, rounded outward."""
        train, readings = rounded(self.train), None
        centre = train.lo / 2 + train.hi / 2
        radius = up(torch.maximum(train.hi - centre, centre - train.lo))
        if self.readings is not None:
            one, two = (rounded(Box(torch.zeros_like(own), own)).hi for own in self.readings)
            readings = one, two
        return Interface(centre, radius, rounded(self.drift), self.around, readings)

    def fits(self, interface: Interface) -> bool:
        """Return whether an interface contains the output, by exact comparison."""
        centre, radius, drift = interface.centre, interface.radius, interface.drift
        if centre is None or drift is None or interface.around is not None:
            return False
        if self.readings is not None and interface.readings is None:
            return False
        pairs = zip(self.readings or (), interface.readings or (), strict=False)
        parts = (centre, radius, drift.lo, drift.hi, *(interface.readings or ()))
        if any(p.shape != self.train.shape or p.dtype != torch.float64 for p in parts):
            return False
        low = _sum_upwards(centre - radius, centre, -radius)
        high = -_sum_upwards(-centre - radius, -centre, -radius)
        inside = [low <= self.train.lo, self.train.hi <= high]
        inside += [drift.lo <= self.drift.lo, self.drift.hi <= drift.hi]
        inside += [own <= most for own, most in pairs]
        return all(bool(each.all()) for each in inside)


@dataclass(frozen=True, slots=True)
class BoundedStage:
    """The proved bounds of a stage: largest drift, output, and statements of the proof."""

    claim: float
    output: StageOutput
    stated: Mapping[str, Any]


def bound_stage(
    name: str,
    problem: BlockProblem,
    interface: Interface,
    builder: ProofBuilder,
    claims: Claims,
    *,
    ellipsoids: bool = False,
) -> BoundedStage:
    """Bound the output of a stage by every domain at once.

    Args:
        name: name of the stage in the proof.
        problem: the stage; another stage reads its output.
        interface: its input.
        builder: an empty proof about the largest drift.
        claims: the conversion of bounds to claims.
        ellipsoids: also compute ellipsoids around the rows of the drift, from affine forms.

    Raises:
        NoBound: no domain has a bound of the output.
    """
    problem = replace(problem, entering=interface.entering(followed=True))
    centre, radius = interface.centre, interface.radius
    bounds, forms, why = None, None, ""
    try:
        bounds = problem.bound(centre, radius)
    except NoBound as no:
        why = str(no)
    try:
        forms = problem.forms(centre, radius)
        found = forms.box()
    except NoBound:
        forms = None
    if bounds is None and forms is None:
        raise NoBound(name, why)
    if forms is None:
        assert bounds is not None
        train, drift, apart = bounds.output.train, bounds.output.drift, bounds.output.apart
        claim = claims.claim(drift_bound(drift, "inf"), bounds.witness)
        builder.add(name, problem.graph, {}, claim, Proof(bounds.witness))
    else:
        end = output_entry(forms.train, forms.output)
        train, drift, apart = Box.point(end.reference).widen(end.error_bound), found, forms.readings
        if bounds is not None:
            train, drift = train.meet(bounds.output.train), drift.meet(bounds.output.drift)
        witness = forms.witness()
        claim = claims.claim(drift_bound(drift, "inf"), witness)
        builder.add(name, problem.graph, {}, claim, Proof(witness, "affine", forms.passes))
    _, stated = stated_of(builder.contents())
    assert stated is not None
    margin, noise = claims.factor, float(train.mag().amax()) * NOISE
    known = math.inf if bounds is None else float(bounds.output.drift.mag().amax())
    one = _claimed(train, max(margin, 1 + REACHES), noise, REACHES)
    two = _claimed(drift, margin, noise, faint=LEAST_CLAIM if known > 0 else 0.0)
    held = output_ellipsoids(forms) if ellipsoids and forms is not None else None
    readings = None
    if any(own is not None for own in apart):
        first, second = (_claimed_readings(own, train, margin, noise) for own in apart)
        readings = first, second
    return BoundedStage(claim, StageOutput(one, two, held, readings), stated)


def _claimed_readings(own: Apart, like: Box, margin: float, noise: float) -> Tensor:
    """Return the claimed difference of readings, widened as the training value is."""
    zero = torch.zeros_like(like.lo)
    if own is None:
        return zero
    most = own.expand(zero.shape) + LEAST_CLAIM  # the programs differ in tiny bounds of zeros
    return _claimed(Box(-most, most), max(margin, 1 + REACHES), noise, REACHES).hi


def _sum_upwards(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return a + b rounded up; `total` is the sum rounded to nearest."""
    part = total - a
    rest = (a - (total - part)) + (b - part)
    return torch.where(rest > 0, up(total), total)


def box_record(box: Box) -> dict[str, Any]:
    """Return a box in the format of a proof."""
    return {"low": encode_array(box.lo.cpu().numpy()), "high": encode_array(box.hi.cpu().numpy())}


def _readings_record(readings: Readings | None) -> dict[str, Any]:
    """Return the field of readings in a proof; empty if all readings are the same."""
    if readings is None:
        return {}
    train, infer = (encode_array(own.cpu().numpy()) for own in readings)
    return {"readings": {"train": train, "infer": infer}}


def _claimed(
    box: Box, margin: float, noise: float, share: float = 2.0**-10, faint: float = LEAST_CLAIM
) -> Box:
    """Return a box widened so that the checker's box lies within it.

    The width is multiplied by `margin`, but grows by at most a share of itself plus `noise`, the
    rounding errors of both programs. `faint` is added for numbers that are zero for every input, as
    after a norm without gain; it exceeds the bounds of both programs.
    """
    middle, spread = box.midpoint()
    if box.is_point:
        return box
    wider = torch.minimum(spread * margin, spread * (1 + share) + noise)
    return Box.point(middle).widen(up(wider + middle.abs() * 2.0**-51 + faint, 2))


def rounded(box: Box) -> Box:
    """Round a box outward to multiples of a power of two of at most its width / 2^DIGITS."""
    width = box.hi - box.lo
    _, exponent = torch.frexp(width)
    step = power_of_two((exponent - 1 - DIGITS).clamp(-1000, 1000))
    low, high = torch.floor(box.lo / step) * step, torch.ceil(box.hi / step) * step
    kept = (width == 0) | ~torch.isfinite(low) | ~torch.isfinite(high)
    return Box(
        torch.where(kept, box.lo, torch.minimum(low, box.lo)),
        torch.where(kept, box.hi, torch.maximum(high, box.hi)),
    )
