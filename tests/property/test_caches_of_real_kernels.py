"""Attention of PyTorch with keys and values stored in 8 bits, inside its bounds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kcdsl.ir.terms import ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.architectures.llama import build
from kcdsl.model.attention import Composed, ScaledDotProduct, use_attention
from kcdsl.model.graph import Node
from kcdsl.model.loader import load_model
from kcdsl.model.lowering.kv_cache import with_caches
from kcdsl.model.numerics import Numerics
from kcdsl.model.presets import resolve
from kcdsl_backends.attack.quantised_inputs import cached
from kcdsl_backends.certifier.statements.problems import ProblemFactory, claim_margin
from kcdsl_backends.drift.boxes import Box
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.ops.view import coded

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32, "tie_word_embeddings": True, "attention_bias": True,
}  # fmt: skip
TOKENS = (1, 5, 9, 2, 30, 7, 7)
POINT = torch.zeros(1, 1, dtype=torch.float64)
TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
KINDS: dict[str, dict[str, Any]] = {
    "vLLM": {"format": "fp8_e4m3", "scale": "static", "key_scale": 0.25, "value_scale": "0.07"},
    "vLLM, each head": {
        "format": "fp8_e4m3",
        "scale": "static",
        "key_scale": [0.07, 0.07, 0.1, 0.1],
        "value_scale": {"*": [0.05, 0.05, 0.08, 0.08]},
    },
    "SGLang e5m2": {"format": "fp8_e5m2", "scale": "none"},
    "each token of a head": {"format": "fp8_e4m3", "scale": "per_token_head"},
    "each head": {"format": "fp8_e4m3", "scale": "per_head"},
    "int8, each token of a head": {"format": "int8", "scale": "per_token_head"},
    "int8": {"format": "int8", "scale": "static", "key_scale": 0.3, "value_scale": 0.2},
}


@dataclass(frozen=True, slots=True)
class Cached:
    """Attention that stores keys and values [H, T, d] in 8 bits, and reads them back."""

    kind: str
    inner: Any

    def stored(self, x: Tensor, key: str) -> Tensor:
        spec = KINDS[self.kind]
        top = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}[spec["format"]]
        wide = x.float()
        if spec["scale"] == "static":
            given = spec[key]
            given = given["*"] if isinstance(given, dict) else given
            many = given if isinstance(given, list) else [float(given)]
            scale = torch.tensor(many).reshape(-1, 1, 1)
        elif spec["scale"] == "none":
            scale = torch.ones(1)
        else:
            dims = (-1,) if spec["scale"] == "per_token_head" else (-2, -1)
            scale = wide.abs().amax(dims, keepdim=True) / top
        ratio = (wide / scale).clamp(-top, top)
        code = ratio.round() if spec["format"] == "int8" else ratio.to(TYPES[spec["format"]])
        return (code.float() * scale).to(x.dtype)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        found: Tensor = self.inner(
            q, self.stored(k, "key_scale"), self.stored(v, "value_scale"), **how
        )
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a small decoder with grouped queries."""
    folder: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    module = build(LLAMA)
    state = {name: torch.randn_like(p) * 0.25 + 0.05 for name, p in module.named_parameters()}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return load_model(
        ModelRef("model.safetensors", architecture="llama", tokenizer="bytes"), folder
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("casts", ["any", "nearest"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_module_with_a_cache_is_within_its_bounds(
    model: Model, kind: str, compute: str, casts: str
) -> None:
    kernel = {"compute": compute, "kv_cache": KINDS[kind], "casts": casts}
    composed = casts == "nearest" or compute == "float16"
    preset = "torch-eager" if composed else "torch-sdpa-math"
    train, infer = resolve({"preset": "torch-eager"}), resolve({**kernel, "preset": preset})
    factory = ProblemFactory(model, train, infer, torch.device("cpu"))
    problem = factory.problem("attn_0", TOKENS)
    assert [node.op for node in problem.graph.nodes].count("cache") == 2
    name = "model.layers.0.self_attn."
    sources = [n.attrs["source"] for n in problem.graph.nodes if n.op == "cache"]
    assert sources == [f"{name}k_proj.weight", f"{name}v_proj.weight"]
    attention = model.block("attn_0")
    inner = Composed() if composed else ScaledDotProduct("math")
    form = getattr(torch, compute)
    for seed in range(3):
        drawn = torch.Generator().manual_seed(seed)
        x = torch.randn(len(TOKENS), 32, generator=drawn) * (1 + seed)
        with torch.no_grad():
            wide = attention(x)
            use_attention(attention, Cached(kind, inner))
            held = {n: p.data for n, p in attention.named_parameters()}
            for part in attention.parameters():
                part.data = part.data.to(form)
            narrow = attention(x.to(form))
            for named, part in attention.named_parameters():
                part.data = held[named]
            use_attention(attention, Composed())
        real = (wide.double() - narrow.double()).abs()
        margin = claim_margin(train, infer)
        for box in (
            problem.bound(x.double(), POINT).output.drift,
            problem.forms(x.double(), POINT).box(),
        ):
            assert bool((real <= box.mag() * margin).all())


CODES = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}


def numbers(kind: str, scale: float) -> np.ndarray:
    """Return every code times a scale, every boundary between two, and their float32 neighbours."""
    if kind in CODES:
        codes = np.arange(256, dtype=np.uint8).view(CODES[kind]).astype(np.float64)
        codes = np.unique(codes[np.isfinite(codes)])
        codes = codes[np.abs(codes) <= (224.0 if kind == "fp8_e4m3fnuz" else np.inf)]
    else:
        codes = np.arange(-128.0 if kind == "int8_full" else -127.0, 128.0)
    ends = (codes[1:] + codes[:-1]) / 2
    exact = (np.concatenate([codes, ends]) * np.float32(scale)).astype(np.float32)
    near = [np.nextafter(exact, np.float32(side)) for side in (-np.inf, np.inf)]
    found = np.concatenate([exact, *near])
    most = np.float32(np.float32(codes[-1]) * np.float32(scale))
    least = np.float32(np.float32(codes[0]) * np.float32(scale))
    return np.clip(found, least, most)


@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("scale", [1.0, 0.0371, 300.0])
@pytest.mark.parametrize("kind", [*CODES, "int8", "int8_full"])
def test_codes_and_boundaries_are_stored_as_by_a_library(
    kind: str, scale: float, part: str
) -> None:
    """In the simulator, and inside the rule for points and for boxes around them."""
    record = {
        "format": kind,
        "scale": "static",
        "key_scale": scale,
        "value_scale": [scale, 2 * scale],
    }
    flat = torch.from_numpy(numbers(kind, scale).astype(np.float64))
    flat = torch.cat([flat, torch.zeros(-len(flat) % 8, dtype=torch.float64)])
    x = flat.reshape(1, -1, 8).expand(2, -1, -1).contiguous()
    s = torch.tensor([scale, scale if part == "keys" else 2 * scale], dtype=torch.float32)
    ratio = x.float() / s[:, None, None]
    if kind in CODES:
        code = torch.from_numpy(ratio.numpy().astype(CODES[kind]).astype(np.float32))
    else:
        code = ratio.round().clamp(-128 if kind == "int8_full" else -127, 127)
    expected = (code * s[:, None, None]).double()
    x, expected = (x.mT.contiguous(), expected.mT) if part == "keys" else (x, expected)
    node = Node("c", "cache", ("x",), tuple(x.shape), {"part": part, "source": ""})
    for casts in ("nearest", "any"):
        spec = resolve({"preset": "torch-eager", "casts": casts, "kv_cache": record})
        if casts == "nearest":
            assert torch.equal(cached(x, node, spec, None), expected)
        for radius in (0.0, 2.0**-12 * scale):
            inside = _clipped(Box(x - radius, x + radius), x)
            found = coded(inside, node, Rounding(spec))
            assert found is not None
            assert bool((found.value.lo <= expected).all() & (expected <= found.value.hi).all())
            off = expected - x
            assert bool((found.error.lo <= off).all() & (off <= found.error.hi).all())


def _clipped(box: Box, x: Tensor) -> Box:
    """Return a box clipped to the range of its numbers."""
    return Box(box.lo.clamp_min(float(x.min())), box.hi.clamp_max(float(x.max())))


def test_number_beyond_a_static_scale_has_no_bound(model: Model) -> None:
    for given in (
        {"format": "fp8_e4m3", "scale": "static", "key_scale": 1e-4, "value_scale": 1.0},
        {"format": "int8", "scale": "static", "key_scale": 1.0, "value_scale": 1e-4},
    ):
        infer: Numerics = resolve({"preset": "torch-eager", "kv_cache": given})
        factory = ProblemFactory(
            model, resolve({"preset": "torch-eager"}), infer, torch.device("cpu")
        )
        x = torch.randn(len(TOKENS), 32, generator=torch.Generator().manual_seed(1)).double()
        with pytest.raises(Exception, match="overflow reachable: element"):
            factory.problem("attn_0", TOKENS).bound(x, POINT)


def test_graphs_without_a_cache_are_unchanged(model: Model) -> None:
    plain = resolve({"preset": "torch-eager"})
    graph = ProblemFactory(model, plain, plain, torch.device("cpu")).problem("attn_0", TOKENS).graph
    assert with_caches(graph, (plain, plain)) is graph
    none = resolve({"preset": "torch-eager", "kv_cache": {"format": "none"}})
    assert none.to_json() == plain.to_json()
    held = resolve({"preset": "torch-eager", "kv_cache": KINDS["each head"]})
    once = with_caches(graph, (plain, held))
    assert with_caches(once, (held, plain)).digest == once.digest != graph.digest
