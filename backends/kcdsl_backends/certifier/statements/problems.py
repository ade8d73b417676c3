"""Blocks of a loaded model under two numerics specifications, ready to be bounded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.architecture import Model
from kcdsl.model.graph import BlockGraph
from kcdsl.model.lowering import block_graph, traced_format
from kcdsl.model.lowering.kv_cache import with_caches
from kcdsl.model.lowering.quantisers import with_quantisers
from kcdsl.model.lowering.routes import Routes, chosen_routes, routers
from kcdsl.model.numerics import Numerics
from kcdsl.model.numerics.fields import refusal
from kcdsl.model.numerics.formats import FORMATS
from kcdsl.model.numerics.specification import plain_weights
from kcdsl.model.presets import refuse_strays
from kcdsl_backends.attack.simulation import Simulator
from kcdsl_backends.certifier.statements.sequences import sequence_graph, stored_tables
from kcdsl_backends.drift.affine_forms import AffineForms, affine_forms
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.boxes.state import ALONE, Entering, Kernels, Rows, StoredParameters
from kcdsl_backends.drift.boxes.weight_ball import WeightBall
from kcdsl_backends.drift.interval import Bounds, propagate
from kcdsl_backends.drift.linear_bounds import Enough, SlopeEffort
from kcdsl_backends.drift.linear_bounds import LinearFound as Planes
from kcdsl_backends.drift.linear_bounds import linear_bounds as planes_drift
from kcdsl_backends.drift.relu_networks import ReluNetwork, relu_network
from kcdsl_backends.process import threads_for

LARGEST = 2**24
"""Largest result, in elements, of a block that is bounded during a measurement: about 4 GB."""
_COARSE = 2.0**-12
"""Unit roundoff of a result from which on float64 roundings are negligible."""
_NOISE = 2.0**-36
"""Bound of the rounding errors of both programs, relative to the largest number of a block."""
LEAST_CLAIM = 2.0**-300
"""The least claim above zero. It exceeds the bounds that either program has for products that
underflow float64 (raised to 2^-500), for weights of any size."""
_MODELS_KEPT = 8
"""Number of cached graphs of the block `model`, one for each sequence."""

Graphs = dict[tuple[str, int | tuple[int, ...], tuple[str, ...], Routes], BlockGraph]
"""Block graphs by block, length (`model`: token ids), formats and routes."""


def claim_margin(train: Numerics, infer: Numerics, graph: BlockGraph | None = None) -> float:
    """Return the factor by which claims are inflated so that both programs agree.

    Two float64 implementations differ by their own roundings. For kernels that round to float32 or
    coarser these are negligible; for float64 kernels they are as large as the bounded drift, unless
    some result of `graph` is stored in a coarse format.
    """
    small = 1.0 + 2.0**-10
    pinned = set() if graph is None else {node.format for node in graph.nodes if node.format}
    formats = {train.compute, train.accumulate, infer.compute, infer.accumulate, *pinned}
    if not any(FORMATS[name].wide for name in formats):
        return small
    for node in () if graph is None else graph.nodes:
        if node.op in ("param", "constant", "embedding"):
            continue
        for kernel in (Rounding(train), Rounding(infer)):
            form = FORMATS.get(node.format) or kernel.format_for(node.role, node.op)
            if form.unit_roundoff >= _COARSE:
                return small
    return 4.0


@dataclass(frozen=True, slots=True)
class Claims:
    """The conversion of bounds to claims that both programs confirm: `factor` times the bound.

    A coarse result may have no effect on the output, as the probability of a single column has, and
    the bound is then as small as the programs' roundings. Such bounds are multiplied by `most`.
    """

    factor: float
    most: float

    @classmethod
    def of(cls, train: Numerics, infer: Numerics, graph: BlockGraph | None = None) -> Claims:
        """Return the claims about a block; see `claim_margin`."""
        return cls(claim_margin(train, infer, graph), claim_margin(train, infer))

    def claim(self, bound: float, witness: Mapping[str, tuple[float, float]]) -> float:
        """Return the claim for a bound, given the magnitudes (value, drift) of every node."""
        if bound == 0:
            return 0.0
        noise = _NOISE * max((value for value, _ in witness.values()), default=0.0)
        return max(min(bound * self.most, bound * self.factor + noise), LEAST_CLAIM)


class Feature(Enum):
    """Variations of a problem besides the input; the values are used in refusals."""

    LENGTH = "sequences of any length"
    WEIGHTS = "a region around the weights"
    STATES = "states that drift"
    CHANCE = "independent roundings"


@dataclass(frozen=True, slots=True)
class Coverage:
    """The features that a domain covers, and a pair that it does not cover together."""

    name: str
    features: frozenset[Feature] = frozenset()
    apart: frozenset[Feature] = frozenset()

    def refuse(self, node: str, asked: frozenset[Feature]) -> None:
        """Raise NoBound if the domain does not cover the features that are asked for."""
        for feature in Feature:
            if feature in asked - self.features:
                raise NoBound(node, f"{self.name} do not cover {feature.value}")
        if self.apart and self.apart <= asked:
            first, second = (feature.value for feature in Feature if feature in self.apart)
            raise NoBound(node, f"{self.name} do not cover {first} and {second} together")


INTERVALS = Coverage(
    "intervals",
    frozenset({Feature.LENGTH, Feature.WEIGHTS, Feature.STATES}),
    frozenset({Feature.LENGTH, Feature.WEIGHTS}),
)
AFFINE_FORMS = Coverage(
    "affine forms",
    frozenset({Feature.WEIGHTS, Feature.STATES, Feature.CHANCE}),
    frozenset({Feature.STATES, Feature.CHANCE}),
)
LINEAR_BOUNDS = Coverage("planes")
SPLITS = Coverage("boxes that are split")


@dataclass(frozen=True, slots=True)
class BlockProblem:
    """A block under two numerics: at one length, or at any up to `rows.longest`; for the stored
    weights, or for all in `weight_ball`; as a whole, or as a stage with the interface `entering`.

    `tables` are position tables, float32 [longest, n], by the name of their constant.
    """

    graph: BlockGraph
    train: StoredParameters
    infer: StoredParameters
    _: KW_ONLY
    rows: Rows | None = None
    tables: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    weight_ball: WeightBall | None = None
    entering: Entering | None = None

    @property
    def features(self) -> frozenset[Feature]:
        found = {
            Feature.LENGTH: self.rows,
            Feature.WEIGHTS: self.weight_ball,
            Feature.STATES: self.entering,
        }
        return frozenset(feature for feature, part in found.items() if part is not None)

    def kernels(self) -> Kernels:
        """Return both kernels in the form that the rules of the domains use."""
        return Kernels.of(self.train, self.infer, rows=self.rows, ball=self.weight_ball)

    def bound(self, centre: Tensor | None, radius: Tensor) -> Bounds:
        """Propagate boxes through the graph; see `propagate`. `centre` is [T, D], or [1, D] at any
        length; None for a block on token ids."""
        INTERVALS.refuse(self.graph.output, self.features)
        with threads_for(self.size):
            return propagate(self.graph, self.kernels(), centre, radius, self.entering or ALONE)

    def forms(
        self, centre: Tensor | None, radius: Tensor, alpha: Fraction | None = None
    ) -> AffineForms:
        """Return the affine forms of both kernels, with independent roundings given `alpha`; see
        `drift.affine_forms`."""
        asked = self.features | ({Feature.CHANCE} if alpha is not None else set())
        AFFINE_FORMS.refuse(self.graph.output, asked)
        return affine_forms(
            *(self.graph, self.train, self.infer, centre, radius, self.entering or ALONE),
            ball=self.weight_ball,
            alpha=alpha,
        )

    def planes(
        self, centre: Tensor | None, radius: Tensor, effort: SlopeEffort, enough: Enough
    ) -> Planes:
        """Bound the block by planes on the difference graph; see `drift.linear_bounds`."""
        LINEAR_BOUNDS.refuse(self.graph.output, self.features)
        with threads_for(self.size):
            return planes_drift(self.graph, self.kernels(), centre, radius, effort, enough)

    def layers(self, centre: Tensor | None, radius: Tensor) -> ReluNetwork:
        """Return the block as a ReLU network of each row; see `relu_network`."""
        SPLITS.refuse(self.graph.output, self.features)
        with threads_for(self.size):
            return relu_network(self.graph, self.kernels(), centre, radius)

    @property
    def size(self) -> int:
        """Return the number of elements of the largest node; 0 at any length."""
        if self.rows is not None:
            return 0
        return max(math.prod(node.shape) for node in self.graph.nodes)

    def simulators(self) -> tuple[Simulator, Simulator]:
        return (
            Simulator(self.graph, self.train.numerics, self.train),
            Simulator(self.graph, self.infer.numerics, self.infer),
        )


@dataclass(frozen=True, slots=True)
class ProblemFactory:
    """Builds block problems of one model and kernel pair; graphs and weights are cached.

    Factories of one model with other kernels may share `graphs`, keyed by block, length, formats
    and routes.
    """

    model: Model
    train: Numerics
    infer: Numerics
    device: torch.device
    graphs: Graphs = field(default_factory=dict, repr=False)
    _problems: dict[tuple[str, int, Routes], BlockProblem] = field(default_factory=dict, repr=False)
    _chosen: dict[tuple[str, tuple[int, ...]], Routes] = field(default_factory=dict, repr=False)
    _sequences: dict[tuple[str, int], BlockProblem] = field(default_factory=dict, repr=False)
    _around: dict[tuple[str, Fraction], WeightBall] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Refuse numerics that name linears or tensors that the model does not have."""
        for numerics in (self.train, self.infer):
            if numerics.overrides or numerics.calibrated_linears or numerics.quantisers:
                refuse_strays(numerics, self.model.linears(), self.model.quantised_tensors)

    @property
    def formats(self) -> tuple[str, ...]:
        """Return the compute formats of both kernels, by their names in block graphs."""
        return tuple(sorted({traced_format(n.compute) for n in (self.train, self.infer)}))

    def problem(
        self, block: str, tokens: tuple[int, ...], entering: Tensor | None = None
    ) -> BlockProblem:
        """Return the problem of a block for a sequence; that of `model` depends on the token ids.

        A block with mixtures of experts has the routes that the training kernel chooses for the
        sequence, or for the hidden states `entering` [T, D].
        """
        routes = self._routes(block, tokens, entering)
        key = (block, len(tokens), routes)
        if block != "model" and key in self._problems:
            return self._problems[key]
        problem = self.problem_of_graph(self._graph(block, tokens, routes, entering))
        if block != "model":
            if routes:  # problems have stored weights: keep the latest route only
                for other in [k for k in self._problems if k[:2] == key[:2]]:
                    del self._problems[other]
            self._problems[key] = problem
        return problem

    def _routes(self, block: str, tokens: tuple[int, ...], entering: Tensor | None) -> Routes:
        """Return the routes that the training kernel chooses in a block; none without routers."""
        if not routers(self.model, block):
            return ()
        if entering is not None:
            return chosen_routes(self.model, block, entering.to("cpu", torch.float32))
        key = (block, tokens)
        if key not in self._chosen:
            with threads_for(1024 * len(tokens)):
                entering = self.model.block_inputs(list(tokens), block)
                states = self.model.ids(tokens) if entering is None else entering
                self._chosen[key] = chosen_routes(self.model, block, states)
        return self._chosen[key]

    def _graph(
        self, block: str, tokens: tuple[int, ...], routes: Routes, entering: Tensor | None
    ) -> BlockGraph:
        ids = tokens if block == "model" else None
        key = (block, len(tokens) if ids is None else ids, self.formats, routes)
        if key in self.graphs:
            return self.graphs[key]
        with threads_for(0):
            if routes and ids is None and entering is None:
                entering = self.model.block_inputs(list(tokens), block)
            graph = block_graph(
                *(self.model, block, len(tokens), ids, self.formats),
                routes=routes,
                centre=None if entering is None else entering.to("cpu"),
            )
        if ids is not None:  # one for each sequence: keep the latest
            for other in [k for k in self.graphs if k[0] == block][: -_MODELS_KEPT + 1]:
                del self.graphs[other]
        self.graphs[key] = graph
        return graph

    def sequences(self, block: str, longest: int) -> BlockProblem:
        """Return the problem of a block at every length up to `longest`.

        Refuse a block that its graph at two rows does not describe at other lengths (KC474).
        """
        key = (block, longest)
        if routers(self.model, block):
            raise refuse(
                codes.FIXED_LENGTH,
                f"block {block!r} has a mixture of experts, which is bounded at one length",
                help="use hull(...), ball(...) or points(...) on rows of one length",
            )
        if self.train.kv_cache is not None or self.infer.kv_cache is not None:
            raise refuse(
                codes.FIXED_LENGTH,
                f"block {block!r} cannot be bounded at any length with a quantised kv_cache",
                help="use hull(...), which bounds it at each length of the slice",
            )
        if self.train.quantisers or self.infer.quantisers:
            raise refuse(
                codes.FIXED_LENGTH,
                f"block {block!r} cannot be bounded at any length with quantised tensors",
                help="use hull(...), which bounds it at each length of the slice",
            )
        if key not in self._sequences:
            with threads_for(0):
                graph, axes, tables = sequence_graph(self.model, block, longest, self.formats)
            known = stored_tables(graph, tables, self.train, self.infer, self.device)
            rows, problem = Rows(longest, axes, known), self.problem_of_graph(graph)
            self._sequences[key] = replace(problem, graph=graph, rows=rows, tables=tables)
        return self._sequences[key]

    def weight_ball(self, block: str, rho: Fraction) -> WeightBall:
        """Return the weight ball of radius rho, as both kernels store its parameters.

        Only the ball of the latest block is cached.
        """
        key = (block, rho)
        if self.model.served is not None:
            raise refuse(
                codes.WEIGHTS_REGION,
                "the inference kernel has a checkpoint of its own: no bound around its weights is"
                " known",
                help="leave out --weights",
            )
        if key not in self._around:
            tensors = self.model.weights
            self._around.clear()
            self._around[key] = WeightBall(rho, tensors, self.train, self.infer, self.device)
        return self._around[key]

    def problem_of_graph(self, graph: BlockGraph) -> BlockProblem:
        """Return the problem of a graph of the model, such as a part of a block."""
        kernels = self.train, self.infer
        for numerics in dict.fromkeys(kernels):
            _refuse_unquantised(graph, numerics)
        graph = with_caches(with_quantisers(graph, kernels), kernels)
        tensors = self.model.weights
        train = StoredParameters(tensors, graph.constants, self.train, self.device)
        return BlockProblem(graph, train, train.under(self.infer, self.model.served))

    def centre(self, block: str, tokens: tuple[int, ...]) -> Tensor | None:
        """Return the block's input in the training kernel, float64 [T, D]; None for `model`."""
        with threads_for(1024 * len(tokens)):
            x = self.model.block_inputs(list(tokens), block)
        return None if x is None else x.to(self.device, torch.float64)


def _refuse_unquantised(graph: BlockGraph, numerics: Numerics) -> None:
    """Refuse (KC463) a product with a matrix that these numerics quantise, but no linear: its
    bounds would leave the quantisation out, which a kernel applies."""
    held: dict[str, str] = {}
    for node in graph.nodes:
        keys = [held[name] for name in node.inputs if name in held]
        if node.op == "param" and len(node.shape) == 2:
            held[node.name] = str(node.attrs["key"])
        elif node.op in ("view", "concat", "cast") and keys:
            held[node.name] = keys[0]
        elif node.op == "matmul" and keys:
            own = numerics.serving(keys[0])
            plain = replace(own.weights, rounding="nearest") in plain_weights(own)
            if own.activations.quantised or not plain:
                raise refusal(
                    f"{node.name} of the block {graph.block!r} multiplies by {keys[0]}, which is"
                    " quantised, but is no linear: its bias is computed, or the matrix is not"
                    " transposed",
                    help="call torch.nn.functional.linear with it and with a bias that is a"
                    " parameter, or leave it unquantised by an override",
                )


@dataclass(frozen=True, slots=True)
class CertifiedDrift:
    """A certified bound of one block on one input.

    `drift_bound` is the elementwise bound of |inference - training|, float64 of the output's shape,
    and `bound_inf` its largest element. Without a bound both are infinite and `reason` says why.
    """

    bound_inf: float
    drift_bound: NDArray[np.float64]
    reason: str | None = None


def certified_block_drift(
    model: Model,
    block: str,
    x: Tensor,
    train_numerics: Numerics,
    infer_numerics: Numerics,
    problem_factory: ProblemFactory | None = None,
) -> CertifiedDrift:
    """Bound the drift of a block on the float32 input x [T, D], elementwise.

    Pass the same `problem_factory` for many inputs, so that graphs and weights are built once. A
    block with a result of more than `LARGEST` elements, such as the scores of a long request, has
    no bound.
    """
    factory = problem_factory or ProblemFactory(
        model, train_numerics, infer_numerics, torch.device("cpu")
    )
    problem = factory.problem(block, tuple(range(x.shape[0])), x)
    radius = torch.zeros(1, 1, dtype=torch.float64, device=factory.device)
    shape = problem.graph.node(problem.graph.output).shape
    results = [n for n in problem.graph.nodes if n.op not in ("param", "constant")]
    size = max(math.prod(node.shape) for node in results)
    if size > LARGEST:
        reason = f"{block} has a result of {size:,} numbers, more than {LARGEST:,}"
        return CertifiedDrift(float("inf"), np.full(shape, np.inf), reason)
    try:
        output = problem.bound(x.to(factory.device, torch.float64), radius).output
    except NoBound as no:
        return CertifiedDrift(float("inf"), np.full(shape, np.inf), str(no))
    bound = output.drift.mag() * claim_margin(train_numerics, infer_numerics)
    return CertifiedDrift(float(bound.amax()), bound.cpu().numpy())
