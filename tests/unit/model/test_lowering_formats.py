"""Lowering preserves formats: views by their arguments, results by their types."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import (
    EXPORT_FAILED,
    GRAPH_DIFFERS,
    MODEL_FACTORY,
    OPERATION_UNSUPPORTED,
    Code,
)
from kcdsl.model.architecture import Model
from kcdsl.model.graph import BlockGraph
from kcdsl.model.lowering import block_graph
from kcdsl.model.lowering.evaluate import graph_output
from tests.support.graphs import run_graph
from tests.support.random_modules import random_module
from tests.unit.model.test_export import wrap

HALVES = ("bfloat16", "float16")
ROWS = 5


class Part(nn.Module):
    """A block on [5, 4] with parameters, buffers and a tensor that conversions do not change."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
        self.vector = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.register_buffer("steps", torch.tensor([1.0, 0.1, 0.0123, 0.456]))
        self.register_buffer("number", torch.tensor(0.1))
        self.register_buffer("table", torch.linspace(0, 1, 20).reshape(5, 4).cos())
        self.loose = torch.linspace(0, 1, 20).reshape(5, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def traced(function: Callable[[Any, Tensor], Tensor], *formats: str) -> BlockGraph:
    return block_graph(wrap(Part(function)), "part", ROWS, formats=formats)


def stored(graph: BlockGraph) -> list[tuple[str, str]]:
    """Return the operations of a graph with their formats."""
    leaves = ("input", "param")
    return [(n.op, n.format) for n in graph.nodes if n.op not in leaves]


def halves(x: Tensor) -> Tensor:
    return x.reshape(ROWS, 2, 2)


VIEWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "swapaxes": lambda s, x: halves(x).swapaxes(0, 1),
    "swapdims": lambda s, x: halves(x).swapdims(-1, 0),
    "transpose": lambda s, x: halves(x).transpose(-3, -1),
    "T of three dimensions": lambda s, x: halves(x).T,
    "mT": lambda s, x: halves(x).mT,
    "mH": lambda s, x: halves(x).mH,
    "H": lambda s, x: x.H,
    "t": lambda s, x: x.t(),
    "adjoint": lambda s, x: halves(x).adjoint(),
    "movedim": lambda s, x: halves(x).movedim(-1, 0),
    "several movedim": lambda s, x: halves(x).movedim((0, 1), (2, 0)),
    "moveaxis": lambda s, x: halves(x).moveaxis(0, -1),
    "permute": lambda s, x: halves(x).permute(-1, 0, -2),
    "narrow": lambda s, x: x.narrow(-1, -3, 2),
    "select": lambda s, x: halves(x).select(-2, -1),
    "slice": lambda s, x: x[-4:-1, ::2],
    "unflatten": lambda s, x: torch.unflatten(x, -1, (2, -1)).mT,
    "flatten": lambda s, x: halves(x).flatten(-2),
    "chunk": lambda s, x: torch.cat(x.chunk(3, -1)[::-1], -1),
    "split": lambda s, x: torch.cat(torch.split(x, 3, -1)[::-1], -1),
    "split by sizes": lambda s, x: torch.cat(torch.split(x, [1, 3], -1)[::-1], -1),
    "tensor_split": lambda s, x: torch.cat(x.tensor_split(3, -1)[::-1], -1),
    "tensor_split at": lambda s, x: torch.cat(x.tensor_split([1, -2], -1)[::-1], -1),
    "unbind": lambda s, x: torch.stack(x.unbind(-1)[::-1], -1),
    "stack": lambda s, x: torch.stack((x, 2 * x), -2),
    "repeat": lambda s, x: x.repeat(2, 1, 3),
    "repeat_interleave": lambda s, x: x.repeat_interleave(3, dim=-2),
    "tile": lambda s, x: x.tile(2),
    "expand": lambda s, x: x[:, None].expand(-1, 2, -1),
    "broadcast_to": lambda s, x: x.broadcast_to(2, ROWS, 4),
    "squeeze": lambda s, x: x[None, :, None].squeeze((0, 2)),
    "view_as": lambda s, x: x.view_as(s.table.T),
}


@pytest.mark.sample(6)
@pytest.mark.filterwarnings("ignore:The use of")
@pytest.mark.parametrize("name", VIEWS)
def test_views_are_lowered_by_their_arguments(name: str) -> None:
    graph = traced(VIEWS[name], *HALVES)
    x = np.arange(ROWS * 4.0).reshape(ROWS, 4)
    with torch.no_grad():
        expected = VIEWS[name](Part(VIEWS[name]), torch.from_numpy(x)).numpy()
    assert np.array_equal(run_graph(graph, {}, x)[graph.output], expected)
    assert {format for _, format in stored(graph)} <= {""}


TYPES: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[tuple[str, str]]]] = {
    "a buffer without dimensions": (
        lambda s, x: x + s.number,
        [("constant", ""), ("add", "")],
    ),
    "a tensor without dimensions": (lambda s, x: x * torch.tensor(0.1), [("scale", "")]),
    "a number": (lambda s, x: x + -3.3, [("shift", "")]),
    "a buffer": (lambda s, x: x * s.table, [("constant", ""), ("mul", "")]),
    "a widened buffer": (lambda s, x: x * s.table.float(), [("constant", ""), ("mul", "float32")]),
    "a table in float32": (
        lambda s, x: x * torch.arange(5.0)[:, None].cos(),
        [("constant", "float32"), ("mul", "float32")],
    ),
    "a tensor that is no buffer": (
        lambda s, x: x * s.loose,
        [("constant", "float32"), ("mul", "float32")],
    ),
    "casts": (
        lambda s, x: (x.float() * 0.3 + 1.0).to(x.dtype),
        [("scale", "float32"), ("shift", "")],
    ),
    "a cast that rounds": (
        lambda s, x: (x.float() * 0.3).to(x.dtype).float() + 1.0,
        [("scale", ""), ("shift", "float32")],
    ),
    "a cast to one format": (
        lambda s, x: x.to(torch.bfloat16).to(x.dtype),
        [("cast", "bfloat16"), ("cast", "")],
    ),
    "float64, rounded by way of float32": (
        lambda s, x: (x.double() + 1.5).type_as(x),
        [("shift", "float64"), ("cast", "float32"), ("cast", "")],
    ),
    "a softmax in float32": (
        lambda s, x: torch.softmax(x, -1, dtype=torch.float32),
        [("softmax", "float32")],
    ),
    "a norm in float32": (
        lambda s, x: F.layer_norm(x.float(), (4,), s.vector.float(), s.vector.float()).to(x.dtype),
        [("layer_norm", "")],
    ),
    "a factor of a summand": (
        lambda s, x: torch.add(x, s.vector, alpha=-1),
        [("scale", "float32"), ("add", "")],
    ),
    "integers": (lambda s, x: x * torch.arange(4), [("constant", ""), ("mul", "")]),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", TYPES)
def test_results_have_the_format_of_the_converted_module(name: str) -> None:
    function, expected = TYPES[name]
    assert stored(traced(function, *HALVES)) == expected


def test_float64_is_rounded_twice_on_its_way_to_half_precision() -> None:
    """Slightly above the midpoint of two bfloat16 numbers, rounded as in PyTorch."""
    near = torch.full((ROWS, 4), 1 + 2.0**-8 + 2.0**-40, dtype=torch.float64)
    graph = traced(lambda s, x: x.to(torch.bfloat16), "float64")
    found = graph_output(graph, {}, near.numpy(), "float64")
    assert (found == near.to(torch.bfloat16).double().numpy()).all()
    casts = [n.format for n in graph.nodes if n.op == "cast"]
    assert casts == ["float32", "bfloat16"]
    formats = ("float64", "bfloat16")
    with pytest.raises(Refusal, match="that float64 kernels do not round"):
        traced(lambda s, x: (x.double() * 1.5).to(x.dtype), *formats)


def test_block_that_is_zero_on_one_input_is_compared_on_others() -> None:
    """Its cast to float32 changes the float64 program, which a single input may not reveal."""
    block_graph(random_module(849, longest=17).model(), "part", 1, formats=HALVES)


def test_constants_equal_those_of_the_module() -> None:
    graph = traced(lambda s, x: x + s.number, *HALVES)
    (value,) = graph.constants.values()
    assert value.dtype == np.float32
    assert value.item() == float(np.float32(0.1))


def root_norm(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


IDIOMS: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[str]]] = {
    "root mean square": (
        lambda s, x: root_norm(x) * s.vector,
        ["square", "mean", "shift", "sqrt", "quotient", "weighted"],
    ),
    "inverse root": (
        lambda s, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
        ["square", "mean", "shift", "root", "normed"],
    ),
    "reciprocal root": (
        lambda s, x: x * (1.0 / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)),
        ["square", "mean", "shift", "sqrt", "reciprocal", "normed"],
    ),
    "centred": (
        lambda s, x: root_norm(centred(x)) * s.vector + s.vector,
        ["mean", "centred", "square", "mean2", "shift", "sqrt", "quotient", "weighted", "biased"],
    ),
    "variance": (
        lambda s, x: centred(x) * torch.rsqrt(x.var(-1, correction=0, keepdim=True) + 1e-5),
        ["mean", "centred", "variance", "shift", "root", "normed"],
    ),
    "silu": (lambda s, x: x * torch.sigmoid(x), []),
    "rotation": (
        lambda s, x: x * s.table + torch.cat((-x[:, 2:], x[:, :2]), -1) * s.table,
        [],
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_keeps_the_roundings_of_its_parts(name: str) -> None:
    function, parts = IDIOMS[name]
    if name == "centred":
        function = _centred_once
    (written,) = (n for n in traced(function, *HALVES).nodes if "form" in n.attrs)
    assert written.attrs["form"] == "written"
    assert written.attrs.get("parts", []) == [[part, ""] for part in parts]
    (fused,) = (n for n in traced(function).nodes if n.op == written.op)
    assert "form" not in fused.attrs


def _centred_once(s: Any, x: Tensor) -> Tensor:
    c = centred(x)
    return root_norm(c) * s.vector + s.vector


def test_idiom_inside_float32_is_one_operation() -> None:
    def norm(s: Any, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        rooted = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        normed: Tensor = s.vector * rooted.to(x.dtype)
        return normed

    assert stored(traced(norm, *HALVES)) == [("rms_norm", ""), ("mul", "")]


def in_autocast(s: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result: Tensor = x @ s.matrix.T
    return result


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], Code, str]] = {
    "rand": (lambda s, x: x + torch.rand(4), OPERATION_UNSUPPORTED, "random"),
    "randn_like": (lambda s, x: x + torch.randn_like(x), OPERATION_UNSUPPORTED, "random"),
    "bernoulli": (
        lambda s, x: x * torch.bernoulli(torch.full((4,), 0.5)),
        OPERATION_UNSUPPORTED,
        "random",
    ),
    "multinomial": (
        lambda s, x: x * torch.multinomial(torch.ones(4), 4),
        OPERATION_UNSUPPORTED,
        "random",
    ),
    "dropout": (lambda s, x: F.dropout(x, 0.5, training=True), OPERATION_UNSUPPORTED, "random"),
    "attention with dropout": (
        lambda s, x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.1)[0],
        OPERATION_UNSUPPORTED,
        "random",
    ),
    "a number from Python": (
        lambda s, x: x * random.random(),
        OPERATION_UNSUPPORTED,
        "each time",
    ),
    "a number from numpy": (
        lambda s, x: x * torch.tensor([float(np.random.rand())] * 4),
        OPERATION_UNSUPPORTED,
        "each time",
    ),
    "memory that is not set": (lambda s, x: x * torch.empty(4), OPERATION_UNSUPPORTED, "never set"),
    "autocast": (in_autocast, OPERATION_UNSUPPORTED, "autocast"),
    "a branch on being traced": (
        lambda s, x: 2 * x if torch.compiler.is_exporting() else 3 * x,
        GRAPH_DIFFERS,
        "part",
    ),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", REFUSED)
def test_nondeterministic_program_is_refused(name: str) -> None:
    function, code, word = REFUSED[name]
    refuses(function, code, word)


def refuses(function: Any, code: Code, word: str, *formats: str) -> None:
    with pytest.raises(Refusal) as refused:
        traced(function, *formats)
    (found,) = refused.value.diagnostics
    assert found.code is code
    assert word in found.message


class Flushing(nn.Module):
    """Adds numbers near 2^-126 as processors with AVX-512 BF16 do, which read subnormal numbers as
    zero (Rule 3.5)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.linspace(0.03, 0.09, 256).reshape(64, 4))
        self.down = nn.Parameter(torch.linspace(0.5, 1, 256).reshape(4, 64))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.up)
        product = F.silu(y) * y
        if not torch.compiler.is_exporting() and x.dtype == torch.bfloat16:
            product = product * (product.abs() >= 2.0**-126)
        return F.linear(product, self.down)


def test_a_kernel_may_flush_subnormal_numbers() -> None:
    assert block_graph(wrap(Flushing()), "part", ROWS, formats=("bfloat16",)).nodes


def run_in_half(x: Tensor) -> bool:
    """Return whether a module runs in bfloat16, and is not traced."""
    return x.dtype == torch.bfloat16 and not torch.compiler.is_exporting()


BY_FORMAT: dict[str, tuple[Callable[[Any, Tensor], Tensor], Code, str]] = {
    "a table from a buffer": (
        lambda s, x: x * torch.outer(torch.arange(5.0), s.steps).cos().to(x.dtype),
        OPERATION_UNSUPPORTED,
        "a table whose values depend on the format",
    ),
    "a number by the type": (
        lambda s, x: x * (2.0 if x.dtype == torch.float32 else 3.0),
        OPERATION_UNSUPPORTED,
        "depends on the format",
    ),
    "other operations by the type": (
        lambda s, x: x if x.dtype == torch.float32 else x * 2,
        EXPORT_FAILED,
        "another program",
    ),
    "a factor that a format rounds": (
        lambda s, x: torch.add(x, s.vector, alpha=2),
        OPERATION_UNSUPPORTED,
        "alpha",
    ),
    "integers that a format rounds": (
        lambda s, x: x * torch.tensor([1, 2, 301, 4]),
        OPERATION_UNSUPPORTED,
        "integers",
    ),
    "results of another type": (
        lambda s, x: x.float() if run_in_half(x) else x,
        GRAPH_DIFFERS,
        "the module gives float32 numbers, the graph bfloat16",
    ),
    "results that overflow": (
        lambda s, x: x * 1e39 if run_in_half(x) else x,
        GRAPH_DIFFERS,
        "results that are no finite numbers, the graph 0",
    ),
    "results of another value": (
        lambda s, x: x * 1.5 if run_in_half(x) else x,
        GRAPH_DIFFERS,
        "off, the graph 0",
    ),
    "the default eps": (
        lambda s, x: F.rms_norm(x, (4,), s.vector),
        OPERATION_UNSUPPORTED,
        "without eps",
    ),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", BY_FORMAT)
def test_format_dependent_program_is_refused_in_other_formats(name: str) -> None:
    function, code, word = BY_FORMAT[name]
    refuses(function, code, word, "bfloat16")
    traced(function)


UNREAD: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "bits of numbers": (lambda s, x: x.view(torch.int32), "int32"),
    "a division that rounds": (lambda s, x: torch.div(x, 3.0, rounding_mode="floor"), "rounds"),
    "rows of addmm": (
        lambda s, x: torch.addmm(x[:, :3], x, s.matrix.T),
        "what is added to the product is not one row",
    ),
    "factors of addmm": (
        lambda s, x: torch.addmm(x[:, :3], x, s.matrix.T, beta=0.5),
        "addmm with factors",
    ),
    "a constant that is infinite": (
        lambda s, x: x + torch.tensor([0.0, 1.0, 2.0, float("inf")]),
        "a constant that is not finite",
    ),
    "a constant that float32 does not hold": (
        lambda s, x: x * torch.tensor([0.1] * 4, dtype=torch.float64),
        "not exactly representable in float32",
    ),
    "a number in place of scores": (
        lambda s, x: torch.where(torch.eye(5, 4, dtype=torch.bool), x, 0.5),
        "only a fixed mask with -inf",
    ),
    "a negative scale": (
        lambda s, x: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=-1.0)[0],
        "a scale of -1.0",
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_unsupported_argument_is_refused(name: str) -> None:
    refuses(UNREAD[name][0], OPERATION_UNSUPPORTED, UNREAD[name][1])


ATTENTION: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "without heads": lambda s, x: F.scaled_dot_product_attention(x, x, x),
    "causal": lambda s, x: F.scaled_dot_product_attention(x, 2 * x, x, is_causal=True),
    "scaled": lambda s, x: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=0.3)[0],
    "fewer queries": lambda s, x: F.scaled_dot_product_attention(
        x[None, :3], x[None], x[None], is_causal=True
    )[0],
    "a bool mask": lambda s, x: F.scaled_dot_product_attention(
        x[None], x[None], x[None], torch.eye(5).bool() | torch.ones(5, 5).bool().triu()
    )[0],
    "a mask of numbers": lambda s, x: F.scaled_dot_product_attention(
        x[None], x[None], x[None], torch.zeros(5, 5, dtype=x.dtype).fill_diagonal_(-float("inf"))
    )[0],
    "a bias": lambda s, x: F.scaled_dot_product_attention(
        x[None], x[None], x[None], torch.arange(25.0).reshape(5, 5).to(x.dtype) / 32
    )[0],
    "grouped heads": lambda s, x: F.scaled_dot_product_attention(
        halves(x).transpose(0, 1), x[None, :, :2], x[None, :, 2:], enable_gqa=True
    ),
    "narrow values": lambda s, x: F.scaled_dot_product_attention(x[None], x[None], x[None, :, 1:])[
        0
    ],
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_equals_that_in_float64(name: str) -> None:
    function = ATTENTION[name]
    graph = traced(function, *HALVES)
    x = np.random.default_rng(1).standard_normal((ROWS, 4))
    with torch.no_grad():
        expected = function(Part(function), torch.from_numpy(x)).numpy()
    found = run_graph(graph, {}, x)[graph.output]
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.full
def test_built_in_rotation_is_one_operation(
    tiny_llama: Model,
) -> None:
    graph = block_graph(tiny_llama, "attn_0", 5, formats=HALVES)
    rotations = [n for n in graph.nodes if n.op == "rope"]
    assert [(n.format, n.attrs) for n in rotations] == [("", {})] * 2
    tables = {graph.node(name).format for n in rotations for name in n.inputs[1:]}
    assert tables == {""}


def test_squares_overflow_as_in_the_module(own_model: Model) -> None:
    graph = block_graph(own_model, "norm_0", 4, formats=("float16",))
    params = {k: t.numpy() for k, t in own_model.checkpoint.tensors.items()}
    x = np.full((4, 16), 300.0)
    assert (run_graph(graph, params, x, "float16")[graph.output] == 0.0).all()
    assert (np.abs(run_graph(graph, params, x)[graph.output]) > 0.1).all()


class Lazy(nn.Module):
    """A block that creates its table in the first run, and keeps it in some way."""

    table: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.calls = way, {"one": 0}
        self.kept: Tensor | None = None
        self.listed: list[Tensor] = []
        self.by_name: dict[str, Tensor] = {}
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.arange(x.shape[-1]).cos().to(x.dtype)
        match self.way:
            case "attribute":
                self.kept = made if self.kept is None else self.kept
                made = self.kept
            case "list":
                self.listed = self.listed or [made]
                made = self.listed[0]
            case "grown list":
                self.listed.append(made)
            case "mapping":
                made = self.by_name.setdefault("table", made)
            case "count":
                self.calls["one"] += 1
            case "buffer":
                self.table = made if self.table.numel() == 0 else self.table
                made = self.table
        return x * made


@pytest.mark.parametrize("way", ["attribute", "list", "grown list", "mapping", "count", "buffer"])
def test_stateful_module_is_refused_each_time(way: str) -> None:
    model = wrap(Lazy(way))
    for formats in (HALVES, (), HALVES):
        with pytest.raises(Refusal, match="changes its 'part\\.") as refusal:
            block_graph(model, "part", ROWS, formats=formats)
        assert refusal.value.diagnostics[0].code is MODEL_FACTORY
    block_graph(wrap(Lazy("nothing")), "part", ROWS, formats=HALVES)


def test_state_of_the_whole_model_is_detected() -> None:
    class Counted(type(wrap(Lazy("nothing")).module)):  # type: ignore[misc]
        calls = 0

        def forward(self, ids: Tensor) -> Tensor:
            self.calls += 1
            found: Tensor = super().forward(ids)
            return found

    model = wrap(Lazy("nothing"))
    model.module.__class__ = Counted
    with pytest.raises(Refusal, match="changes its 'calls'"):
        block_graph(model, "model", 3, [1, 2, 3])


def test_seeded_generator_is_refused_by_name() -> None:
    with pytest.raises(Refusal, match="a Generator, which is no tensor"):
        traced(lambda s, x: x + torch.rand(4, generator=torch.Generator().manual_seed(3)))


def test_cast_of_a_scalar_has_no_dimensions() -> None:
    graph = traced(lambda s, x: x * x[0, 0].float(), "float64")
    assert [n.shape for n in graph.nodes if n.op == "cast"] == [()]


def test_sum_of_wider_numbers_is_cast_afterwards() -> None:
    def norm(s: Any, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1.0 + s.vector.float())).type_as(x)

    graph = traced(norm, *HALVES)
    assert stored(graph) == [
        ("rms_norm", "float32"), ("shift", "float32"), ("view", ""), ("mul", "float32"),
        ("cast", ""),
    ]  # fmt: skip
