"""GPT-2 and GPT-NeoX: equal to transformers, proved and checked; look-alikes refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import MODEL_CONFIG
from kcdsl.ir.terms import ModelRef
from kcdsl.model import registry
from kcdsl.model.checkpoint import tensors as checkpoints
from kcdsl.model.configuration import family_of
from kcdsl.model.loader import load_model
from kcdsl.model.lowering.export import block_graph
from kcdsl_backends.comparison import compare
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval.parameters import Parameters
from kcdsl_certs.recheck.interval.tensors import read
from tests.support.gpt_models import SMALL, distance, drawn, saved

transformers: Any = pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(12))])
def test_random_gpt_configurations_agree_with_transformers(kind: str, seed: int) -> None:
    raw = drawn(kind, seed)
    if kind == "gpt_neox" and seed == 0:
        raw["use_parallel_residual"] = False
    assert distance(kind, raw, seed) <= 1e-10


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"reorder_and_upcast_attn": True}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"add_cross_attention": True}),
        ("gpt2", {"activation_function": "relu"}),
        ("gpt2", {"activation_function": "gelu_fast"}),
        ("gpt2", {"attention_types": [[["global", "local"], 1]]}),
        ("gpt2", {"multi_query": True}),
        ("gpt2", {"rotary_dim": 4}),
        ("gpt2", {"architectures": ["GPTBigCodeForCausalLM"]}),
        ("gpt2", {"model_type": "gpt_bigcode"}),
        ("gpt2", {"hidden_size": 16}),
        ("gpt_neox", {"hidden_act": "relu"}),
        ("gpt_neox", {"rotary_pct": 0.5}),
        ("gpt_neox", {"rotary_emb_base": 500}),
        ("gpt_neox", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
        ("gpt_neox", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        ("gpt_neox", {"partial_rotary_factor": 0.5, "rope_parameters": None}),
        ("gpt_neox", {"rope_theta": 500, "rope_parameters": None}),
        ("gpt_neox", {"num_key_value_heads": 2}),
        ("gpt_neox", {"sliding_window": 8}),
        ("gpt_neox", {"head_dim": 4}),
        ("gpt_neox", {"architectures": ["GPTNeoXJapaneseForCausalLM"]}),
        ("gpt_neox", {"use_parallel_residual": 1}),
    ],
)
def test_look_alikes_are_refused_by_name(kind: str, change: dict[str, Any]) -> None:
    raw = saved(kind) | change
    with pytest.raises(Refusal) as caught:
        registry.load(kind).build(raw)
    (found,) = caught.value.diagnostics
    assert found.code is MODEL_CONFIG
    name = next(iter(change))
    stated = {"rope_parameters": "RoPE", "rotary_emb_base": "rope_theta"}
    assert stated.get(name, name) in found.message


def test_former_names_of_fields_are_read() -> None:
    """Configurations of Pythia use former names of the rotated part and the base."""
    old = saved("gpt_neox") | {"rotary_pct": 0.5, "rotary_emb_base": 500}
    del old["rope_parameters"]
    assert family_of("gpt_neox", old)
    new = saved("gpt_neox", rotary_pct=0.5, rotary_emb_base=500)
    one, two = (registry.load("gpt_neox").build(raw).settings for raw in (old, new))
    assert one == two
    assert (one.rotary_width, one.rope_theta) == (4, 500.0)


@pytest.mark.parametrize("large", [False, True])
def test_every_storage_of_weights_is_read(
    large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files without a head have no prefix, and old ones contain masks; blocks are read lazily."""
    raw = saved("gpt2")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**raw)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    stored = {k: t.contiguous() for k, t in theirs.transformer.state_dict().items()}
    stored["h.0.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if large:
        monkeypatch.setattr(checkpoints, "RESIDENT", 0)
    ref = ModelRef("model.safetensors", architecture="gpt2")
    model = load_model(ref, tmp_path, by_block=large)
    assert model.by_block is large
    assert len(model.transposed) == 8
    seen: list[torch.Tensor] = []
    theirs.transformer.h[1].attn.c_proj.register_forward_hook(
        lambda module, args, out: seen.append(out[0])
    )
    with torch.no_grad():
        theirs(torch.arange(5)[None])
    entering = model.block_inputs([0, 1, 2, 3, 4], "attn_1")
    assert entering is not None
    part = model.block("attn_1")
    model.fill(part)
    with torch.no_grad():
        torch.testing.assert_close(part(entering), seen[0])
    graph = block_graph(model, "attn_1", 5)
    turned = {n.attrs["key"] for n in graph.nodes if n.op == "param" and n.attrs.get("transposed")}
    assert turned == {"h.1.attn.c_attn.weight", "h.1.attn.c_proj.weight"}


def test_comparison_detects_another_program() -> None:
    raw = saved("gpt_neox")
    module: Any = registry.load("gpt_neox").build(raw)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.5, 0.5)
    assert "1 row(s)" in compare("gpt_neox", module.eval(), raw, ((1, 2, 3),))
    with pytest.raises(Refusal):
        compare("gpt_neox", module, raw | {"use_parallel_residual": False}, ((1, 2, 3),))


def test_checker_reads_a_matrix_in_one_orientation(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}, path)
    tensors = read(path).tensors
    with pytest.raises(Rejected) as caught:
        Parameters(tensors, {"b": ""}, None, frozenset({"b"}))
    assert caught.value.reason == "parameter/shape"


# --- proofs ---------------------------------------------------------------------------------------

CONTRACT = """\
kcdsl: 1
contract: gpt
version: 1.0.0
model: {{checkpoint: model.safetensors, architecture: {kind}, tokenizer: bytes}}
data: requests.jsonl
kernels:
  train: {{run: torch.eager, numerics: {{preset: torch-eager}}}}
  infer: {{run: torch.sdpa.flash, numerics: {{preset: torch-sdpa-flash, {numerics}}}}}
slices: {{all: {{}}}}
clauses:
  N-ATTN: {{require: "forall x in ball(all, 1e-3): norm_inf(drift(attn_0, x)) <= 5", level: L2}}
  N-MLP: {{require: "forall x in ball(all, 1e-3): norm_inf(drift(mlp_0, x)) <= 5", level: L2}}
  N-KL: {{require: max(kl) <= 1, level: L2}}
"""
INT8 = "weights: {format: int8, scale: per_channel}"
CASES = [
    ("gpt2", {}, INT8),
    ("gpt_neox", {"use_parallel_residual": False}, "compute: bfloat16"),
    pytest.param(
        "gpt2", {"tie_word_embeddings": False}, "compute: bfloat16", marks=pytest.mark.full
    ),
    pytest.param("gpt_neox", {"rotary_pct": 1.0}, INT8, marks=pytest.mark.full),
]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "changes", "numerics"), CASES)
def test_both_blocks_are_proved_and_rechecked(
    cli: Callable[..., Any], tmp_path: Path, kind: str, changes: dict[str, Any], numerics: str
) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(SMALL[kind] | changes))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    rows = [{"id": "a", "tokens": [7, 200, 3, 90]}]
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "contract.yaml").write_text(CONTRACT.format(kind=kind, numerics=numerics))
    assert cli("keygen", "-o", "a.key", cwd=tmp_path).code == 0
    ran = cli("verify", "--sign", "a.key", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    envelope = json.loads((tmp_path / "out" / "verify.cert.json").read_text())["dsseEnvelope"]
    proved = json.loads(base64.b64decode(envelope["payload"]))["predicate"]["clauses"]
    assert [clause["quantity"]["block"] for clause in proved] == ["attn_0", "mlp_0"]
    for clause in proved:
        assert float(clause["bound"]["decimal"]) >= float(clause["low"]["decimal"]) > 0
    checked = cli("check", "out/verify.cert.json", "--key", "a.key.pub", "--recheck", cwd=tmp_path)
    assert checked.code == 0, checked.stdout + checked.stderr
    tensors = load_file(tmp_path / "model.safetensors")
    key = next(name for name in tensors if name.endswith(("0.mlp.c_fc.weight", "h_to_4h.weight")))
    tensors[key][1, 2] += 1e-3
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checked = cli("check", "out/verify.cert.json", "--key", "a.key.pub", "--recheck", cwd=tmp_path)
    assert checked.code == 4
