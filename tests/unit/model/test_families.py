"""Built-in architectures implement their checkpoints: configurations key by key, and runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import MODEL_CONFIG
from kcdsl.model.architectures import llama
from kcdsl.model.configuration import family_of
from kcdsl.model.registry import declared, load, names
from kcdsl_backends.comparison import compare
from tests.support.decoders import EVERY_FORM, SMALL

transformers: Any = pytest.importorskip("transformers")

ENCODER: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
DECODER = ENCODER | {"num_key_value_heads": 2}
OURS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": ENCODER,
    **{form.kind: SMALL | dict(form.own) for form in reversed(EVERY_FORM.values())},
    "llama": DECODER,
    "bert": ENCODER,
}
FAMILIES = {kind: one for name in names() for kind, one in declared(name).families.items()}
ROWS = ((1, 2, 3), tuple(range(7, 39)))


def saved(kind: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json that transformers saves for a small model of this type."""
    stated = json.loads(json.dumps(OURS.get(kind, DECODER) | changes))
    config = transformers.AutoConfig.for_model(kind, **stated)
    found: dict[str, Any] = json.loads(config.to_json_string())
    return found


def architecture_of(kind: str) -> str:
    return next((name for name in names() if kind in declared(name).families), "llama")


@pytest.mark.parametrize("kind", FAMILIES)
def test_configurations_saved_by_transformers_are_accepted(kind: str) -> None:
    raw = saved(kind)
    assert family_of(architecture_of(kind), raw) is FAMILIES[kind]
    stated = json.loads(json.dumps(OURS[kind]))
    whole = transformers.AutoConfig.for_model(kind, **stated).to_dict()
    assert family_of(architecture_of(kind), whole | {"architectures": None}) is FAMILIES[kind]


@pytest.mark.parametrize(
    "kind",
    ["smollm3", "granite", "helium", "ernie4_5", "cohere", "gemma2", "qwen3", "olmo2", "phi3"],
)
def test_look_alikes_of_families_are_refused(kind: str) -> None:
    raw = saved(kind)
    with pytest.raises(Refusal) as refusal:
        family_of("llama", raw)
    assert refusal.value.diagnostics[0].code == MODEL_CONFIG
    assert repr(kind) in refusal.value.diagnostics[0].message
    pretended = raw | {"model_type": "llama"}
    own = saved("llama")
    if set(pretended) - set(own):
        with pytest.raises(Refusal):
            family_of("llama", pretended)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("llama", {"no_rope_layers": [1, 0]}),
        ("llama", {"embedding_multiplier": 12.0}),
        ("llama", {"attention_multiplier": 0.015625}),
        ("llama", {"residual_multiplier": 0.22}),
        ("llama", {"logits_scaling": 8.0}),
        ("llama", {"final_logit_softcapping": 30.0}),
        ("llama", {"sliding_window": 4}),
        ("llama", {"pretraining_tp": 2}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}),
        ("llama", {"auto_map": {"AutoModelForCausalLM": "m.Own"}}),
        ("llama", {"architectures": ["SmolLM3ForCausalLM"]}),
        ("llama", {"anything": None}),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "beta_fast": 32}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "factor": 4.0}}),
        ("llama", {"rope_theta": 1e6}),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        ("mistral", {"attention_bias": True}),
        ("qwen2", {"use_mrope": True}),
        ("qwen2", {"attention_bias": False}),
        ("bert", {"is_decoder": True}),
        ("bert", {"is_decoder": 0}),
        ("bert", {"embedding_size": 8}),
        ("bert", {"rope_theta": 10000.0}),
        ("bert", {"model_type": "roberta"}),
    ],
)
def test_unsupported_keys_and_values_are_refused(kind: str, change: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as refusal:
        family_of(architecture_of(kind), saved(kind) | change)
    (found,) = refusal.value.diagnostics
    assert found.code == MODEL_CONFIG
    assert found.help is not None


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_family_dependent_defaults_must_be_stated(kind: str) -> None:
    for key in sorted(FAMILIES[kind].needed):
        raw = saved(kind)
        del raw[key]
        with pytest.raises(Refusal, match=key):
            family_of("llama", raw)


COUNTS = (
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "n_positions"),
    *("type_vocab_size", "decoder_sparse_step", "no_rope_layer_interval", "num_local_experts"),
)


@pytest.mark.parametrize("kind", FAMILIES)
def test_count_that_is_null_is_refused_or_read_as_transformers_does(kind: str) -> None:
    """transformers 5 builds no model of a null that a family does not declare."""
    name, family = architecture_of(kind), FAMILIES[kind]
    wide = {"hidden_size": 64} if kind == "gpt_neox" else {}
    for key in sorted(family.read & set(COUNTS)):
        raw = saved(kind, **wide) | {key: None}
        if key not in family.null:
            with pytest.raises(Refusal, match=f"'{key}' is null"):
                load(name).build(raw)
            continue
        module = load(name).build(raw)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.uniform_(-0.5, 0.5)
        assert compare(name, module.eval(), raw, ROWS).startswith("it was compared")


def build(kind: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """Return the built-in module with random weights, and its configuration."""
    raw = saved(kind, **changes)
    torch.manual_seed(3)
    module: Any = load(architecture_of(kind)).build(raw)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.5, 0.5)
    return module.eval(), raw


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 8}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 99.0}}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 40}),
        ("qwen2", {}),
        ("bert", {}),
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("phi3", {}),
        ("mixtral", {}),
        ("qwen2_moe", {}),
        ("qwen3_moe", {}),
    ],
)
def test_each_family_agrees_with_transformers(kind: str, changes: dict[str, Any]) -> None:
    module, raw = build(kind, **changes)
    said = compare(architecture_of(kind), module, raw, ROWS)
    assert said.startswith("it was compared with transformers")
    assert "2 row(s)" in said


@pytest.mark.parametrize(("attribute", "value"), [("eps", 0.5), ("rope", 2.0)])
def test_other_program_with_equal_weights_is_refused(attribute: str, value: float) -> None:
    module, raw = build("llama")
    if attribute == "eps":
        module.model.norm.eps = value
    else:
        module.model.layers[0].self_attn.rotary.cos.mul_(value)
    with pytest.raises(Refusal) as refusal:
        compare("llama", module, raw, ROWS)
    assert refusal.value.diagnostics[0].code == MODEL_CONFIG


def test_program_with_other_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module, raw = build("llama")
    found: dict[str, Any] = {"missing_keys": {"model.layers.0.self_attn.q_norm.weight"}}
    monkeypatch.setattr(
        "kcdsl_backends.comparison.with_weights", lambda empty, tensors: (empty, found)
    )
    with pytest.raises(Refusal, match=r"transformers has other weights: .*q_norm\.weight"):
        compare("llama", module, raw, ROWS)


def test_missing_comparison_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    module, raw = build("llama")
    assert "no rows" in compare("llama", module, raw, ())
    monkeypatch.setattr("kcdsl_backends.comparison.find_spec", lambda name: None)
    assert "not installed" in compare("llama", module, raw, ROWS)


CONTRACT = """kcdsl: 1
contract: c
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: requests.jsonl
slices: {all: {}}
clauses:
  N-MLP: {require: "forall x in points(all): norm_inf(drift(mlp_0, x)) <= 0.1", level: L2}
  S-KL: {require: "p99(kl) <= 0.02", level: L2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a small llama, its configuration and a contract."""
    module, raw = build("llama")
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    (tmp_path / "requests.jsonl").write_text('{"id": "a", "tokens": [1, 2, 3]}\n')
    return tmp_path


@pytest.mark.parametrize("command", ["compile", "lint", "verify"])
def test_every_command_refuses_a_look_alike(
    cli: Callable[..., Any], folder: Path, command: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"no_rope_layers": [0, 1]}))
    ran = cli(command, "contract.yaml", cwd=folder)
    assert ran.code != 0
    assert "KC455" in ran.stdout + ran.stderr
    assert "no_rope_layers" in ran.stdout + ran.stderr


def test_statement_records_the_comparison_of_the_model(
    cli: Callable[..., Any], folder: Path
) -> None:
    ran = cli("verify", "--attack", "off", cwd=folder)
    assert ran.code == 0, ran.stderr
    statement = json.loads((folder / "out" / "verify.statement.json").read_text())
    said = [text for c in statement["predicate"]["clauses"] for text in c.get("assumptions", ())]
    assert any("compared with transformers" in text and "1 row(s)" in text for text in said)


@pytest.mark.full
def test_report_records_the_comparison_of_the_model(cli: Callable[..., Any], folder: Path) -> None:
    ran = cli("evaluate", cwd=folder)
    assert ran.code == 0, ran.stderr
    statement = json.loads((folder / "out" / "evaluate.statement.json").read_text())
    (said,) = statement["predicate"]["assumptions"]
    assert "compared with transformers" in said
    assert "1 row(s)" in said
    report = json.loads((folder / "out" / "report.json").read_text())
    assert report["model"]["program"] == said


@pytest.mark.parametrize("command", ["evaluate", "verify"])
def test_other_program_is_neither_measured_nor_proved(
    cli: Callable[..., Any],
    folder: Path,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = llama.build

    def other(raw: Any) -> Any:
        module: Any = whole(raw)
        module.model.norm.eps = 0.5
        return module

    monkeypatch.setattr(llama, "build", other)
    ran = cli(command, cwd=folder)
    assert ran.code == 2
    assert "KC455" in ran.stdout + ran.stderr
    assert not list((folder / "out").glob("*.statement.json"))


def test_non_finite_numbers_never_agree() -> None:
    module, raw = build("llama")
    with torch.no_grad():
        module.model.norm.weight.fill_(float("nan"))
    assert "not compared" in compare("llama", module, raw, ROWS)
