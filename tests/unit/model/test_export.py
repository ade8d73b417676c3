"""Block graphs: equal to the module in float64, with supported operations, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import EXPORT_FAILED, OPERATION_UNSUPPORTED, SEQUENCE, UNKNOWN_BLOCK
from kcdsl.model.architecture import Model
from kcdsl.model.checkpoint.tensors import Checkpoint
from kcdsl.model.graph import BlockGraph
from kcdsl.model.lowering import block_graph
from kcdsl.model.lowering.drafts import OPERATIONS
from tests.support.graphs import run_graph

IDS = [3, 1, 4, 1, 5, 9, 2]
MODELS: dict[str, tuple[str, ...]] = {
    "tiny_llama": ("norm_1", "attn_1", "mlp_0", "layer_0", "head", "model"),
    "tiny_qwen": ("attn_0", "head", "model"),
    "tiny_bert": ("norm_0", "attn_1", "mlp_1", "layer_0", "model"),
    "own_model": ("norm_0", "attn_0", "mlp_0", "model"),
}


def parameters(model: Model) -> dict[str, NDArray[Any]]:
    return {k: t.numpy() for k, t in model.checkpoint.tensors.items()}


def ops(graph: BlockGraph) -> list[str]:
    return [n.op for n in graph.nodes]


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_graph_equals_the_block_in_float64(name: str, request: pytest.FixtureRequest) -> None:
    model: Model = request.getfixturevalue(name)
    double = copy.deepcopy(model.module).double()
    blocks: dict[str, nn.Module] = {**double.blocks(), "model": double}  # type: ignore[operator]
    inputs = model.all_block_inputs(IDS, MODELS[name])
    for block, entering in inputs.items():
        ids = IDS if block == "model" else None
        graph = block_graph(model, block, len(IDS), ids)
        x = None if entering is None else entering.numpy()
        found = run_graph(graph, parameters(model), x)[graph.output]
        with torch.no_grad():
            argument = torch.tensor(IDS) if entering is None else entering.double()
            expected = blocks[block](argument).numpy()
        np.testing.assert_allclose(found, expected, atol=1e-10, rtol=0)
        assert set(ops(graph)) <= OPERATIONS
        assert graph.input_shape == (None if block == "model" else (len(IDS), 16))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "heads"), [("tiny_llama", 2), ("tiny_bert", 2), ("own_model", 1)])
def test_nodes_of_attention_have_their_roles(
    name: str, heads: int, request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(name)
    graph = block_graph(model, "attn_0", 5)
    roles = [(n.op, n.role) for n in graph.nodes if n.role]
    assert roles == [
        ("matmul", "scores"),
        ("scale", "scores"),
        ("softmax", "probabilities"),
        ("matmul", "context"),
    ]
    softmax = next(n for n in graph.nodes if n.op == "softmax")
    assert len(softmax.inputs) == (1 if name == "tiny_bert" else 2)
    if name != "tiny_bert":
        mask = graph.constants[graph.node(softmax.inputs[1]).attrs["key"]]
        assert mask.dtype == np.bool_
        assert np.array_equal(mask.reshape(5, 5), np.tril(np.ones((5, 5), dtype=bool)))


@pytest.mark.full
def test_composed_parts_become_single_operations(own_model: Model) -> None:
    assert "rms_norm" in ops(block_graph(own_model, "norm_0", 4))
    assert ops(block_graph(own_model, "attn_0", 4)).count("rope") == 2
    assert "silu" in ops(block_graph(own_model, "mlp_0", 4))


@pytest.mark.full
def test_parameters_carry_their_checkpoint_key(tiny_llama: Model, own_model: Model) -> None:
    assert block_graph(tiny_llama, "head", 3).parameters == ("model.embed_tokens.weight",)
    whole = block_graph(own_model, "model", 3, [1, 2, 3])
    tied = [n for n in whole.nodes if "param:embedding.weight" in n.inputs]
    assert [n.op for n in tied] == ["embedding", "linear"]
    assert tied[0].attrs["ids"] == [1, 2, 3]


@pytest.mark.full
def test_graph_is_deterministic(tiny_llama: Model) -> None:
    first, second = (block_graph(tiny_llama, "layer_1", 4) for _ in range(2))
    assert first.digest == second.digest
    assert block_graph(tiny_llama, "layer_1", 5).digest != first.digest
    assert block_graph(tiny_llama, "layer_0", 4).digest != first.digest


@pytest.mark.full
def test_nodes_are_in_topological_order_and_used(tiny_bert: Model) -> None:
    graph = block_graph(tiny_bert, "model", 4, IDS[:4])
    seen: set[str] = set()
    for node in graph.nodes:
        assert set(node.inputs) <= seen
        seen.add(node.name)
    assert len(seen) == len(graph.nodes)
    read = {i for n in graph.nodes for i in n.inputs} | {graph.output}
    assert read == seen


@pytest.mark.full
def test_single_token_has_a_graph(tiny_llama: Model) -> None:
    graph = block_graph(tiny_llama, "attn_0", 1)
    assert graph.input_shape == (1, 16)


def test_graph_of_the_whole_model_needs_tokens(tiny_llama: Model) -> None:
    for length, ids in ((3, None), (4, [1, 2, 3]), (0, None)):
        with pytest.RaisesExc(Refusal, check=lambda r: r.diagnostics[0].code is SEQUENCE):
            block_graph(tiny_llama, "model", length, ids)
    with pytest.RaisesExc(Refusal, check=lambda r: r.diagnostics[0].code is UNKNOWN_BLOCK):
        block_graph(tiny_llama, "attn_9", 3)


# --- single modules ------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """A model whose block `part` is a module or a function on [T, 4]."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.part = part

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.part(self.table(ids))
        return result

    def blocks(self) -> Mapping[str, nn.Module]:
        return {"part": self.part}


class Apply(nn.Module):
    """A module with one matrix, one vector, and a function of the input and both."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
        self.vector = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.matrix, self.vector)


def wrap(part: nn.Module) -> Model:
    module = Wrapped(part).eval().requires_grad_(False)
    named = dict(module.named_parameters())
    checkpoint = Checkpoint(Path("in-memory"), "", named, {})
    return Model(module, checkpoint, {}, {n: n for n in named}, None, False)


def heads(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], 2, 2).transpose(0, 1)


def attend(x: Tensor, mask: Tensor, *, add: bool) -> Tensor:
    scores = heads(x) @ heads(x).mT / 2.0
    hidden = scores + mask if add else torch.where(mask, scores, float("-inf"))
    mixed = F.softmax(hidden, dim=-1, dtype=torch.float32) @ heads(x)
    return mixed.transpose(0, 1).flatten(1)


LOWER = torch.ones(3, 3, dtype=torch.bool).tril()
ADDED = torch.zeros(3, 3).masked_fill(~LOWER, float("-inf"))
LARGE = torch.zeros(3, 3).masked_fill(~LOWER, torch.finfo(torch.float32).min)

TABLE = torch.linspace(0, 1, 12).reshape(3, 4)

FUNCTIONS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], set[str]]] = {
    "matrix product with a transposed weight": (lambda x, m, v: x @ m.t(), {"linear"}),
    "addmm of activations": (lambda x, m, v: torch.addmm(v[:3], x, x.T), {"matmul", "concat"}),
    "addmm with a computed weight": (
        lambda x, m, v: torch.addmm(v[:3][None], x, 2 * m.T),
        {"matmul", "concat"},
    ),
    "a bias that is computed": (lambda x, m, v: F.linear(x, m, 2 * v[:3]), {"matmul", "concat"}),
    "addmm with a bias": (lambda x, m, v: torch.addmm(v[:3], x, m.T), {"matmul", "concat"}),
    "product with a weight as it is": (lambda x, m, v: x[:, :3] @ m, {"matmul", "view"}),
    "inverse root norm": (
        lambda x, m, v: v * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)),
        {"rms_norm"},
    ),
    "power norm": (
        lambda x, m, v: x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).pow(-0.5),
        {"rms_norm"},
    ),
    "reciprocal norm": (
        lambda x, m, v: x * (1.0 / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)),
        {"rms_norm"},
    ),
    "layer norm by hand": (
        lambda x, m, v: (
            (x - x.mean(-1, keepdim=True))
            / torch.sqrt(x.var(-1, correction=0, keepdim=True) + 1e-5)
            * v
        ),
        {"layer_norm", "mul"},
    ),
    "layer norm from a centred square": (
        lambda x, m, v: (
            (c := x - x.mean(-1, keepdim=True)) * torch.rsqrt((c * c).mean(-1, keepdim=True) + 1e-5)
        ),
        {"layer_norm"},
    ),
    "layer norm": (lambda x, m, v: F.layer_norm(x, (4,), v), {"layer_norm"}),
    "norms of torch": (lambda x, m, v: F.rms_norm(x, (4,), v, 1e-6), {"rms_norm"}),
    "where mask": (lambda x, m, v: attend(x, LOWER, add=False), {"softmax"}),
    "added mask": (lambda x, m, v: attend(x, ADDED, add=True), {"softmax"}),
    "added least number": (lambda x, m, v: attend(x, LARGE, add=True), {"softmax"}),
    "two masks": (lambda x, m, v: attend(x, LARGE, add=True) + 0 * v, {"softmax"}),
    "finite bias on scores": (lambda x, m, v: attend(x, LOWER * -2.0, add=True), {"add"}),
    "attention with a mask": (
        lambda x, m, v: (
            F.scaled_dot_product_attention(heads(x)[None], heads(x)[None], heads(x)[None], LOWER)
            .squeeze(0)
            .transpose(0, 1)
            .flatten(1)
        ),
        {"softmax"},
    ),
    "gates": (lambda x, m, v: F.silu(x) * torch.tanh(x) + F.gelu(x) - F.relu(-x), {"silu", "gelu"}),
    "GELU by tanh": (lambda x, m, v: F.gelu(x, approximate="tanh") - F.gelu(x), {"gelu", "sub"}),
    "in place": (lambda x, m, v: (x * 2).add_(1).mul_(v), {"scale", "shift", "mul"}),
    "numbers on the left": (lambda x, m, v: 3.0 - (2 * x) / 5.0, {"neg", "shift", "divide"}),
    "alpha": (lambda x, m, v: torch.sub(torch.add(x, v, alpha=3), x, alpha=0.5), {"scale", "sub"}),
    "pieces": (
        lambda x, m, v: torch.cat([*torch.split(x, [1, 3], -1), x.repeat_interleave(2, -1)], -1),
        {"concat", "view"},
    ),
    "layouts": (
        lambda x, m, v: (
            torch.stack((x.unsqueeze(0).squeeze(), x.narrow(0, 0, 3)), 1).flatten(1)
            + x[1].expand(3, 4).repeat_interleave(2, 1)
        ),
        {"concat", "view"},
    ),
    "constants": (
        lambda x, m, v: x * torch.arange(4).cos() + torch.ones(3, 1) * torch.tensor(2.0),
        {"mul", "add"},
    ),
    "almost a rotation": (
        lambda x, m, v: x * TABLE.cos() + torch.cat((-x[:, 1:3], x[:, :2]), -1) * TABLE.sin(),
        {"concat", "mul", "add"},
    ),
    "halves that are not exchanged": (
        lambda x, m, v: x * TABLE.cos() + torch.cat((-x[:, :2], x[:, 2:]), -1) * TABLE.sin(),
        {"concat", "mul", "add"},
    ),
    "rotation": (
        lambda x, m, v: torch.cat((-x[:, 2:], x[:, :2]), -1) * TABLE.sin() + TABLE.cos() * x,
        {"rope"},
    ),
    "rows": (lambda x, m, v: x[:, :3] + m[torch.tensor([0, 2, 1])][:, :3], {"embedding"}),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_graph_equals_the_function(name: str) -> None:
    function, wanted = FUNCTIONS[name]
    part = Apply(function)
    model = wrap(part)
    graph = block_graph(model, "part", 3)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float32)
    with torch.no_grad():
        expected = part(x).numpy()
    params = {k: t.numpy() for k, t in model.checkpoint.tensors.items()}
    found = run_graph(graph, params, x.numpy())[graph.output]
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert wanted <= set(ops(graph))
    assert set(ops(graph)) <= OPERATIONS


def test_finite_bias_on_scores_keeps_their_role() -> None:
    graph = block_graph(wrap(Apply(FUNCTIONS["finite bias on scores"][0])), "part", 3)
    assert [n.op for n in graph.nodes if n.role == "scores"] == ["matmul", "divide", "add"]


def test_probabilities_that_are_used_twice_have_no_role() -> None:
    def twice(x: Tensor, m: Tensor, v: Tensor) -> Tensor:
        shares = torch.softmax(x @ x.T, -1)
        return shares @ x + shares.mean(-1, keepdim=True)

    with refused("aten::mean"):
        block_graph(wrap(Apply(twice)), "part", 3)

    def summed(x: Tensor, m: Tensor, v: Tensor) -> Tensor:
        shares = torch.softmax(x @ x.T, -1)
        return shares @ x[:, :3] + shares

    graph = block_graph(wrap(Apply(summed)), "part", 3)
    assert {n.role for n in graph.nodes} == {""}


def refused(*words: str, code: object = OPERATION_UNSUPPORTED) -> Any:
    def matches(refusal: Refusal) -> bool:
        (found,) = refusal.diagnostics
        return found.code is code and all(w in f"{found.message} {found.help}" for w in words)

    return pytest.RaisesExc(Refusal, check=matches)


UNSUPPORTED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "sine": (lambda x, m, v: torch.sin(x), "aten::sin"),
    "root outside a norm": (lambda x, m, v: torch.sqrt(x * x + 1), "aten::sqrt"),
    "division by an activation": (lambda x, m, v: x / (x * x + 1), "aten::div"),
    "norm of another tensor": (
        lambda x, m, v: x * torch.rsqrt((x * v).pow(2).mean(-1, keepdim=True) + 1e-5),
        "aten::mean",
    ),
    "norm without eps": (
        lambda x, m, v: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
        "aten::mean",
    ),
    "norm with a negative eps": (
        lambda x, m, v: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - 1e-5),
        "aten::mean",
    ),
    "mask from the data": (lambda x, m, v: x.masked_fill(x > 0, float("-inf")), "aten::gt"),
    "mask outside softmax": (
        lambda x, m, v: x.masked_fill(torch.eye(3, 4, dtype=torch.bool), float("-inf")) * 2,
        "aten::masked_fill",
    ),
    "mask with another value": (
        lambda x, m, v: x.masked_fill(torch.eye(3, 4, dtype=torch.bool), 7.0),
        "fixed mask",
    ),
    "softmax over tokens": (lambda x, m, v: torch.softmax(x, 0), "last dimension"),
    "unbiased variance": (
        lambda x, m, v: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5),
        "aten::var",
    ),
    "cube": (lambda x, m, v: x**3, "aten::pow"),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_operation_is_refused_by_name(name: str) -> None:
    function, word = UNSUPPORTED[name]
    with refused(word, "the block itself", "rms_norm"):
        block_graph(wrap(Apply(function)), "part", 3)


class OwnBias(nn.Linear):
    """A linear whose bias is its input."""

    def forward(self, input: Tensor) -> Tensor:
        """Return W x + x."""
        return F.linear(input, self.weight, input)


def test_the_input_is_no_bias_of_a_linear() -> None:
    with refused("what is added to the product is not one row"):
        block_graph(wrap(OwnBias(4, 4)), "part", 3)


def test_refusal_names_the_calling_module() -> None:
    part = nn.Sequential(nn.Linear(4, 4), nn.Softplus())
    with refused("aten::softplus in 1 (Softplus)"):
        block_graph(wrap(part), "part", 3)


class Hiding(nn.Module):
    """A module with an unregistered part."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = (nn.Linear(4, 4),)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the part."""
        result: Tensor = self.hidden[0](x)
        return result


class Branching(nn.Module):
    """A module whose control flow depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x or its double."""
        return x if float(x.detach().sum()) > 0 else x * 2


def test_value_dependent_control_flow_is_refused() -> None:
    with refused("part", code=EXPORT_FAILED):
        block_graph(wrap(Branching()), "part", 3)


def test_block_that_ignores_its_input_is_refused() -> None:
    with refused("depends on its input"):
        block_graph(wrap(Apply(lambda x, m, v: torch.ones(3, 4))), "part", 3)


def test_unregistered_parameter_is_refused() -> None:
    model = wrap(Hiding())
    model.module.blocks = lambda: {"part": model.module.part.hidden[0]}  # type: ignore
    with refused("does not own"):
        block_graph(model, "part", 3)


def test_arrays_of_the_wrong_shape_are_an_error(tiny_llama: Model) -> None:
    graph = block_graph(tiny_llama, "mlp_0", 3)
    with pytest.raises(ValueError, match="shape"):
        run_graph(graph, parameters(tiny_llama), np.zeros((4, 16)))
    with pytest.raises(ValueError, match="none was given"):
        run_graph(graph, parameters(tiny_llama), None)
