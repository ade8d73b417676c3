"""Architectures compared with formulas in numpy, and the loading of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import (
    CHANGED_MEANWHILE,
    CHECKPOINT_DTYPE,
    CHECKPOINT_SHAPE,
    CHECKPOINT_TENSORS,
    FILE_MISSING,
    KERNEL_NUMERICS,
    MODEL_CONFIG,
    MODEL_FACTORY,
    SEQUENCE,
    TOKENIZER,
    UNKNOWN_ARCHITECTURE,
    UNKNOWN_BLOCK,
)
from kcdsl.ir.terms import ModelRef
from kcdsl.model import loader
from kcdsl.model.architecture import Model
from kcdsl.model.architectures import llama
from kcdsl.model.architectures.bert import sentence_embedding
from kcdsl.model.attention import Composed, ScaledDotProduct, use_attention
from kcdsl.model.checkpoint import tensors as checkpoints
from kcdsl.model.decoder.rotary import Rotary
from kcdsl.model.loader import load_model
from tests.support.small_models import write_model

Array = NDArray[np.float64]
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def expect(code: object, *words: str) -> Any:
    """Expect a refusal with this code whose messages contain all the words."""

    def matches(refusal: Refusal) -> bool:
        text = "; ".join(f"{d.message} {d.help}" for d in refusal.diagnostics)
        return code in {d.code for d in refusal.diagnostics} and all(w in text for w in words)

    return pytest.RaisesExc(Refusal, check=matches)


def weights(model: Model) -> dict[str, Array]:
    return {k: t.double().numpy() for k, t in model.checkpoint.tensors.items()}


# --- llama, token by token and head by head ------------------------------------------------------


def rms(x: Array, gain: Array, eps: float) -> Array:
    return np.array([row / np.sqrt(np.mean(row**2) + eps) * gain for row in x])


def turn(vector: Array, position: int, theta: float) -> Array:
    """Rotate the pairs (i, i + d/2) of one head by position * theta^(-2i/d)."""
    half = len(vector) // 2
    out = np.empty_like(vector)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(vector))
        a, b = vector[i], vector[i + half]
        out[i] = a * np.cos(angle) - b * np.sin(angle)
        out[i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out


def llama_attention(w: dict[str, Array], prefix: str, x: Array, heads: int, kv: int) -> Array:
    def project(name: str) -> Array:
        return x @ w[f"{prefix}.{name}.weight"].T + w.get(f"{prefix}.{name}.bias", 0.0)

    q, k, v = project("q_proj"), project("k_proj"), project("v_proj")
    size = q.shape[1] // heads
    out = np.zeros((len(x), heads * size))
    for h in range(heads):
        g = h // (heads // kv)
        here, there = slice(h * size, (h + 1) * size), slice(g * size, (g + 1) * size)
        for t in range(len(x)):
            query = turn(q[t, here], t, 10000.0)
            scores = np.array(
                [query @ turn(k[s, there], s, 10000.0) / np.sqrt(size) for s in range(t + 1)]
            )
            weight = np.exp(scores - scores.max())
            out[t, here] = (weight / weight.sum()) @ v[: t + 1, there]
    return out @ w[f"{prefix}.o_proj.weight"].T


def llama_logits(model: Model, ids: list[int]) -> Array:
    w, c = weights(model), model.config
    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}"
        y = rms(x, w[f"{p}.input_layernorm.weight"], 1e-6)
        kv = c["num_key_value_heads"]
        x = x + llama_attention(w, f"{p}.self_attn", y, c["num_attention_heads"], kv)
        y = rms(x, w[f"{p}.post_attention_layernorm.weight"], 1e-6)
        gate = y @ w[f"{p}.mlp.gate_proj.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (y @ w[f"{p}.mlp.up_proj.weight"].T)
        x = x + inner @ w[f"{p}.mlp.down_proj.weight"].T
    x = rms(x, w["model.norm.weight"], 1e-6)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    logits: Array = x @ head.T
    return logits


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen"])
def test_llama_equals_the_published_formula(name: str, request: pytest.FixtureRequest) -> None:
    model: Model = request.getfixturevalue(name)
    with torch.no_grad():
        logits = model.module(model.ids(IDS)).double().numpy()
    np.testing.assert_allclose(logits, llama_logits(model, IDS), atol=2e-5)


def test_block_is_one_sub_layer(tiny_llama: Model) -> None:
    found = tiny_llama.all_block_inputs(IDS, tiny_llama.block_names())
    assert found["model"] is None
    inputs = {name: x for name, x in found.items() if x is not None}

    def run(name: str) -> torch.Tensor:
        entering = inputs[name]
        assert entering.shape == (len(IDS), 16)
        with torch.no_grad():
            result: torch.Tensor = tiny_llama.block(name)(entering)
        return result

    after_attention = inputs["layer_0"] + run("attn_0")
    torch.testing.assert_close(inputs["attn_0"], run("norm_0"))
    torch.testing.assert_close(inputs["norm_1"], after_attention)
    torch.testing.assert_close(inputs["mlp_0"], run("norm_1"))
    torch.testing.assert_close(inputs["layer_1"], after_attention + run("mlp_0"))
    torch.testing.assert_close(inputs["norm_4"], run("layer_1"))
    torch.testing.assert_close(inputs["head"], run("norm_4"))
    with torch.no_grad():
        torch.testing.assert_close(run("head"), tiny_llama.module(tiny_llama.ids(IDS)))


@pytest.mark.parametrize("program", [Composed(), ScaledDotProduct(), ScaledDotProduct("math")])
def test_padding_on_either_side_does_not_change_logits(
    tiny_llama: Model, program: Composed | ScaledDotProduct
) -> None:
    module = tiny_llama.module
    try:
        assert use_attention(module, program)
        with torch.no_grad():
            alone = module(torch.tensor(IDS))
            batch = torch.tensor([[*IDS, 0, 0], [0, 0, *IDS]])
            keys = torch.tensor([[True] * 8 + [False] * 2, [False] * 2 + [True] * 8])
            both = module(batch, keys)
    finally:
        use_attention(module, Composed())
    torch.testing.assert_close(both[0, :8], alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(both[1, 2:], alone, atol=1e-5, rtol=0)
    assert torch.isfinite(both).all()


def test_a_kernel_that_does_not_cap_scores_is_refused_for_a_model_that_does() -> None:
    module = torch.nn.Module()
    module.score_cap = 50.0  # type: ignore[assignment]
    with expect(KERNEL_NUMERICS, "caps its attention scores", "composed"):
        use_attention(module, ScaledDotProduct())
    x = torch.ones(1, 2, 4)
    with pytest.raises(ValueError, match="does not cap scores"):
        ScaledDotProduct()(x, x, x, scale=0.5, causal=True, keys=None, cap=50.0)


def test_a_large_checkpoint_that_becomes_a_small_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module was built without weights, and they would not be read."""
    write_model(tmp_path)
    monkeypatch.setattr(loader, "is_large", lambda *_: True)
    with expect(CHANGED_MEANWHILE, "model.safetensors"):
        load_model(
            ModelRef("model.safetensors", "llama", tokenizer="bytes"), tmp_path, by_block=True
        )


def test_llama_3_scaling_follows_the_published_rule() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    raw = {
        "vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 1, "max_position_embeddings": 4, "rope_theta": 500000.0,
    }  # fmt: skip
    (rotation,) = llama.read(raw | {"rope_scaling": scaling}).rotations
    assert rotation is not None
    rotary = Rotary(rotation, 64, 4)
    expected = []
    for i in range(32):
        step = 500000.0 ** (-2 * i / 64)
        wavelength = 2 * np.pi / step
        if wavelength > 8192 / 1.0:
            step /= 8.0
        elif wavelength >= 8192 / 4.0:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            step = (1 - smooth) * step / 8.0 + smooth * step
        expected.append(step)
    np.testing.assert_allclose(rotary.sin[1, :32].numpy(), np.sin(expected), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": -4}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "dynamic"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ],
)
def test_unsupported_configuration_is_refused(
    tiny_llama: Model, change: dict[str, Any], word: str
) -> None:
    with expect(MODEL_CONFIG, word):
        llama.read(dict(tiny_llama.config) | change)


# --- bert ----------------------------------------------------------------------------------------


def layer_norm(x: Array, gain: Array, bias: Array) -> Array:
    return np.array([(r - r.mean()) / np.sqrt(r.var() + 1e-12) * gain + bias for r in x])


def test_bert_equals_the_published_formula(tiny_bert: Model) -> None:
    from math import erf

    w = weights(tiny_bert)
    x = w["embeddings.word_embeddings.weight"][IDS]
    x = x + w["embeddings.position_embeddings.weight"][: len(IDS)]
    x = x + w["embeddings.token_type_embeddings.weight"][0]
    x = layer_norm(x, w["embeddings.LayerNorm.weight"], w["embeddings.LayerNorm.bias"])
    for i in range(2):
        p = f"encoder.layer.{i}"

        def dense(name: str, y: Array, p: str = p) -> Array:
            return y @ w[f"{p}.{name}.weight"].T + w[f"{p}.{name}.bias"]

        def normed(name: str, y: Array, p: str = p) -> Array:
            return layer_norm(y, w[f"{p}.{name}.weight"], w[f"{p}.{name}.bias"])

        q, k, v = (dense(f"attention.self.{n}", x) for n in ("query", "key", "value"))
        context = np.zeros_like(x)
        for h in range(4):
            part = slice(4 * h, 4 * h + 4)
            scores = q[:, part] @ k[:, part].T / 2.0
            shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
            context[:, part] = shares @ v[:, part]
        x = normed("attention.output.LayerNorm", x + dense("attention.output.dense", context))
        inner = dense("intermediate.dense", x)
        inner = inner * 0.5 * (1 + np.vectorize(erf)(inner / np.sqrt(2)))
        x = normed("output.LayerNorm", x + dense("output.dense", inner))
    with torch.no_grad():
        found = tiny_bert.module(tiny_bert.ids(IDS)).double().numpy()
    np.testing.assert_allclose(found, x, atol=2e-5)


def test_blocks_of_bert_compose_to_the_model(tiny_bert: Model) -> None:
    found = tiny_bert.all_block_inputs(IDS, tiny_bert.block_names())
    inputs = {name: x for name, x in found.items() if x is not None}

    def run(name: str) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = tiny_bert.block(name)(inputs[name])
        return result

    torch.testing.assert_close(inputs["layer_0"], run("norm_0"))
    torch.testing.assert_close(inputs["norm_1"], inputs["attn_0"] + run("attn_0"))
    torch.testing.assert_close(inputs["mlp_0"], run("norm_1"))
    torch.testing.assert_close(inputs["norm_2"], inputs["mlp_0"] + run("mlp_0"))
    torch.testing.assert_close(inputs["layer_1"], run("layer_0"))
    assert "head" not in tiny_bert.block_names()
    assert tiny_bert.encoder_only


def test_padding_does_not_change_a_sentence_embedding(tiny_bert: Model) -> None:
    keys = torch.tensor([[True] * 8 + [False] * 3])
    with torch.no_grad():
        alone = sentence_embedding(tiny_bert.module(torch.tensor(IDS)))
        padded = tiny_bert.module(torch.tensor([[*IDS, 0, 0, 0]]), keys)
    torch.testing.assert_close(sentence_embedding(padded, keys)[0], alone, atol=1e-6, rtol=0)
    assert float(alone.norm()) == pytest.approx(1.0)


def test_minilm_ranks_similar_sentences_first(minilm: Model) -> None:
    def embed(text: str) -> torch.Tensor:
        with torch.no_grad():
            return sentence_embedding(minilm.module(minilm.ids(minilm.tokenizer.encode(text))))

    food, bread, baby = (
        embed(t)
        for t in (
            "A man is eating food.",
            "A man is eating a piece of bread.",
            "The girl is carrying a baby.",
        )
    )
    assert float(food @ bread) > 0.7
    assert float(food @ baby) < 0.1


# --- loading -------------------------------------------------------------------------------------


def rewrite(model: Model, folder: Path, **changes: torch.Tensor | None) -> None:
    """Write the model's files into a folder with tensors changed (None: left out)."""
    tensors = load_file(model.checkpoint.path)
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(model.config)))


LLAMA_REF = ModelRef("model.safetensors", architecture="llama")


def test_missing_tensor_is_refused(tiny_llama: Model, tmp_path: Path) -> None:
    rewrite(tiny_llama, tmp_path, model__norm__weight=None)
    with expect(CHECKPOINT_TENSORS, "model.norm.weight"):
        load_model(LLAMA_REF, tmp_path)


def test_unexpected_tensor_is_refused(tiny_llama: Model, tmp_path: Path) -> None:
    rewrite(tiny_llama, tmp_path, adapter__weight=torch.zeros(2))
    with expect(CHECKPOINT_TENSORS, "adapter.weight"):
        load_model(LLAMA_REF, tmp_path)


def test_tensor_of_the_wrong_shape_is_refused(tiny_llama: Model, tmp_path: Path) -> None:
    rewrite(tiny_llama, tmp_path, model__norm__weight=torch.zeros(17))
    with expect(CHECKPOINT_SHAPE, "model.norm.weight", "(17,)", "(16,)"):
        load_model(LLAMA_REF, tmp_path)


def test_tensor_of_the_wrong_type_is_refused(tiny_llama: Model, tmp_path: Path) -> None:
    rewrite(tiny_llama, tmp_path, model__norm__weight=torch.zeros(16, dtype=torch.float64))
    with expect(CHECKPOINT_DTYPE, "model.norm.weight"):
        load_model(LLAMA_REF, tmp_path)


def test_equal_copy_of_the_tied_head_is_accepted(tiny_llama: Model, tmp_path: Path) -> None:
    head = tiny_llama.checkpoint.tensors["model.embed_tokens.weight"]
    rewrite(tiny_llama, tmp_path, lm_head__weight=head.clone())
    found = load_model(LLAMA_REF, tmp_path)
    assert found.keys["model.embed_tokens.weight"] == "model.embed_tokens.weight"
    rewrite(tiny_llama, tmp_path, lm_head__weight=head + 1)
    with expect(CHECKPOINT_TENSORS, "differs"):
        load_model(LLAMA_REF, tmp_path)


def test_keys_without_weights_are_ignored(tiny_bert: Model, tmp_path: Path) -> None:
    tensors = {f"bert.{k}": v for k, v in tiny_bert.checkpoint.tensors.items()}
    tensors["bert.embeddings.position_ids"] = torch.arange(32)
    tensors["bert.pooler.dense.weight"] = torch.zeros(16, 16)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(dict(tiny_bert.config)))
    found = load_model(ModelRef("model.safetensors", architecture="bert"), tmp_path)
    assert (
        found.keys["encoder.layer.0.output.dense.bias"] == "bert.encoder.layer.0.output.dense.bias"
    )
    with torch.no_grad():
        ids = found.ids(IDS)
        assert torch.equal(found.module(ids), tiny_bert.module(ids))


def test_missing_or_broken_configuration_is_refused(tiny_llama: Model, tmp_path: Path) -> None:
    rewrite(tiny_llama, tmp_path)
    (tmp_path / "config.json").write_text("{")
    with expect(MODEL_CONFIG, "config.json"):
        load_model(LLAMA_REF, tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with expect(MODEL_CONFIG, "object"):
        load_model(LLAMA_REF, tmp_path)
    (tmp_path / "config.json").unlink()
    with expect(FILE_MISSING, "config.json"):
        load_model(LLAMA_REF, tmp_path)


def test_unknown_architecture_is_refused_with_a_suggestion(
    tiny_llama: Model, tmp_path: Path
) -> None:
    rewrite(tiny_llama, tmp_path)
    with expect(UNKNOWN_ARCHITECTURE, "lama", "'llama'"):
        load_model(ModelRef("model.safetensors", architecture="lama"), tmp_path)


def test_unknown_block_is_refused_with_a_suggestion(tiny_llama: Model) -> None:
    with expect(UNKNOWN_BLOCK, "atn_0", "'attn_0'", "attn_0 … attn_1"):
        tiny_llama.block("atn_0")
    with expect(UNKNOWN_BLOCK):
        tiny_llama.block_inputs(IDS, "attn_2")


@pytest.mark.parametrize(
    ("ids", "word"),
    [([], "at least one"), ([40], "40"), ([-1], "-1"), ([0] * 33, "33"), ([[1]], "list")],
)
def test_unsupported_sequence_is_refused(tiny_llama: Model, ids: list[Any], word: str) -> None:
    with expect(SEQUENCE, word):
        tiny_llama.ids(ids)


# --- a user's own --------------------------------------------------------------------------------


def test_user_module_is_loaded_with_its_blocks(own_model: Model) -> None:
    assert own_model.block_names() == ("norm_0", "attn_0", "mlp_0", "model")
    entering = own_model.block_inputs(IDS, "attn_0")
    assert entering is not None
    assert entering.shape == (len(IDS), 16)
    assert own_model.limits == (40, 32)
    assert not own_model.built_in


CODED = """\
import torch


class Coded(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.zeros(2, 3, dtype=torch.int8))

    def forward(self, ids):
        return torch.nn.functional.one_hot(ids, 3).float() @ self.codes.float().T


def build(config):
    return Coded()
"""


@pytest.mark.parametrize("resident", [1 << 28, 0], ids=["in memory", "on demand"])
def test_integers_of_a_module_are_those_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: int
) -> None:
    """Otherwise a proof would be about the integers with which the module is built."""
    monkeypatch.setattr(checkpoints, "RESIDENT", resident)
    (tmp_path / "coded.py").write_text(CODED)
    codes = torch.tensor([[1, -2, 3], [0, 127, -128]], dtype=torch.int8)
    ref = ModelRef("model.safetensors", module="coded:build")
    save_file({"codes": codes}, tmp_path / "model.safetensors")
    assert torch.equal(load_model(ref, tmp_path).module(torch.tensor([2]))[0], codes[:, 2].float())
    for other, code in (
        (codes.float(), CHECKPOINT_DTYPE),
        (codes.long(), CHECKPOINT_DTYPE),
        (codes.T.contiguous(), CHECKPOINT_SHAPE),
    ):
        save_file({"codes": other}, tmp_path / "model.safetensors")
        with expect(code, "codes"):
            load_model(ref, tmp_path)


@pytest.mark.full
def test_modules_of_two_models_may_share_a_name(own_model: Model, tmp_path: Path) -> None:
    for name, kind in (("first", "ReLU"), ("second", "Tanh")):
        folder = tmp_path / name
        folder.mkdir()
        source = f"import torch\ndef build(config): return torch.nn.{kind}()\n"
        (folder / "namesake.py").write_text(source)
        save_file({}, folder / "model.safetensors")
        model = load_model(ModelRef("model.safetensors", module="namesake:build"), folder)
        assert type(model.module).__name__ == kind


def test_model_that_fails_on_a_sequence_is_refused(save_model: Any) -> None:
    model = save_model("own", max_position_embeddings=4)
    object.__setattr__(model, "config", {})
    with expect(MODEL_FACTORY, "failed on 8 tokens"):
        model.block_inputs(IDS, "attn_0")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("raise RuntimeError('broken')", "broken"),
        ("def build(config): return 3", "not a torch.nn.Module"),
        ("def other(config): pass", "build"),
        ("def build(config): return config['absent']", "absent"),
    ],
)
def test_failing_factory_is_refused(
    own_model: Model, tmp_path: Path, source: str, word: str
) -> None:
    rewrite(own_model, tmp_path)
    name = f"broken_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    with expect(MODEL_FACTORY, word):
        load_model(ModelRef("model.safetensors", module=f"{name}:build"), tmp_path)
    with expect(MODEL_FACTORY, "package.module:factory"):
        load_model(ModelRef("model.safetensors", module="no_colon"), tmp_path)


# --- tokenizers ----------------------------------------------------------------------------------


def test_byte_tokenizer_is_reversible(tiny_llama: Model, save_model: Any) -> None:
    model = save_model("llama", vocab_size=256)
    text = "Grüße, 世界\n"
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text
    with expect(TOKENIZER, "out of the vocabulary of 40"):
        tiny_llama.tokenizer.encode("A")


def test_model_without_a_tokenizer_is_reported(save_model: Any) -> None:
    model = save_model("llama", vocab_size=300)
    with expect(TOKENIZER, "no tokenizer", "tokenizer.json"):
        _ = model.tokenizer


def test_invalid_tokenizer_file_is_refused(tiny_llama: Model, tmp_path: Path) -> None:
    rewrite(tiny_llama, tmp_path)
    (tmp_path / "tok.json").write_text("{}")
    with expect(TOKENIZER, "tok.json"):
        load_model(
            ModelRef("model.safetensors", architecture="llama", tokenizer="tok.json"), tmp_path
        )


def test_file_tokenizer_neither_pads_nor_truncates(minilm: Model) -> None:
    short, long = (minilm.tokenizer.encode(t) for t in ("a", "word " * 400))
    assert len(short) == 3
    assert len(long) == 402
