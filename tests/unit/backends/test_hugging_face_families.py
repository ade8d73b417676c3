"""Every model family of transformers is run as transformers runs it, or refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kcdsl.diagnostics import Refusal, codes
from kcdsl.ir.terms import KernelRef, ModelRef
from kcdsl.model.loader import load_model
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel, load_kernel
from tests.conftest import Cli

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("shared_files")

IDS = [7, 200, 3, 3, 90, 41, 250, 11, 64, 5, 128, 77, 19, 230, 2, 99]
SMALL: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GATED = SMALL | {
    "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.3,
}  # fmt: skip
EXPERTS = GATED | {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT = {
    "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": GATED | {"head_dim": 8, "sliding_window": 8},
    "gemma3_text": GATED | {"head_dim": 8, "sliding_window": 8},
    "gpt2": GPT,
    "gpt_neox": SMALL | {"intermediate_size": 48, "initializer_range": 0.3},
    "opt": SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3},
    "bloom": {"vocab_size": 256, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": SMALL | {"initializer_range": 0.3},
    "mixtral": GATED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 24},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "head_dim": 8},
    "olmo2": GATED,
    "phi3": GATED,
    "mamba": {"vocab_size": 256, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
}
FLOAT8 = (("format", "fp8_e4m3"), ("scale", "per_channel"))
COMPOSED = frozenset({"gemma2", "bloom", "mamba"})
"""Families without `scaled_dot_product_attention` in transformers."""
Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a function that saves a small random model of a family, once, in a folder."""
    root = tmp_path_factory.mktemp("families")

    def save(kind: str) -> Path:
        if not (root / kind).is_dir():
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(kind, **FAMILIES[kind])
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / kind)
        return root / kind

    return save


def kernel(folder: Path, run: str, compute: str = "float32", **more: Any) -> TorchKernel:
    model = load_model(ModelRef("model.safetensors", "hf"), folder)
    numerics = tuple({"compute": compute, **more}.items())
    return load_kernel(KernelRef(run, numerics), model, "cpu", folder)


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the logits of transformers."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    with torch.no_grad():
        found: torch.Tensor = whole(torch.tensor([IDS])).logits[0]
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_of_each_family_equal_those_of_transformers(saved: Saved, kind: str) -> None:
    folder = saved(kind)
    expected = logits(folder)
    for run in ("torch.eager", "hf.transformers", "torch.sdpa", "hf.transformers.sdpa"):
        if kind == "mamba" and run == "torch.sdpa":
            continue  # without attention, both kernels of torch are identical
        if kind in COMPOSED and "sdpa" in run:
            with pytest.raises(Refusal) as caught:
                kernel(folder, run)
            (found,) = caught.value.diagnostics
            assert found.code in (codes.KERNEL_NUMERICS, codes.HF_FOLDER)
            way_out = "torch.eager" if run == "torch.sdpa" else "hf.transformers"
            assert way_out in (found.help or "")
            continue
        given = kernel(folder, run).logits(IDS)
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["phi3", pytest.param("gemma2", marks=pytest.mark.full)])
def test_tables_keep_the_format_of_transformers(saved: Saved, kind: str) -> None:
    """Frequencies of RoPE rounded to bfloat16 would differ at distant positions."""
    folder = saved(kind)
    given = kernel(folder, "torch.eager", "bfloat16").logits(IDS)
    torch.testing.assert_close(given, logits(folder, torch.bfloat16), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["gpt_neox", "mixtral"])
def test_loaded_weights_equal_the_checkpoint(
    saved: Saved, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are stored under other names, or per expert."""
    from kcdsl.model.architectures import hf

    folder = saved(kind)
    model = load_model(ModelRef("model.safetensors", "hf"), folder)
    stored = load_file(folder / "model.safetensors")
    assert set(model.keys.values()) <= set(stored)
    own = model.module.state_dict()
    for name, key in model.keys.items():
        assert torch.equal(own[name], stored[key])
    whole = hf._stored_form

    def other(program: Any, held: dict[str, Any]) -> dict[str, Any]:
        found = whole(program, held)
        name = sorted(found)[-1]
        return found | {name: found[name] + 1e-3}

    monkeypatch.setattr(hf, "_stored_form", other)
    with pytest.raises(Refusal) as caught:
        load_model(ModelRef("model.safetensors", "hf"), folder)
    assert caught.value.diagnostics[0].code is codes.HF_FOLDER


def test_missing_expert_weight_is_refused(saved: Saved, tmp_path: Path) -> None:
    folder = saved("mixtral")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(Refusal) as caught:
        load_model(ModelRef("model.safetensors", "hf"), tmp_path)
    (found,) = caught.value.diagnostics
    assert found.code is codes.CHECKPOINT_SHAPE
    assert "layers.1" in found.message


def test_unquantised_experts_are_never_reported_as_quantised(saved: Saved) -> None:
    with pytest.raises(Refusal) as caught:
        kernel(saved("mixtral"), "torch.eager", weights=FLOAT8)
    (found,) = caught.value.diagnostics
    assert found.code is codes.KERNEL_NUMERICS
    assert "experts" in found.message


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "unheard_of"}, "has no model_type 'unheard_of'"),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Model"}}, "does not run"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"model_type": "vit"}, "builds no causal language model"),
        ({"num_attention_heads": 0}, "builds no causal language model"),
    ],
)
def test_unsupported_families_are_refused_with_help(
    saved: Saved, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = saved("olmo2")
    raw = json.loads((folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "own.py").write_text("raise SystemExit('code of a checkpoint was run')")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(Refusal) as caught:
        load_model(ModelRef("model.safetensors", "hf"), tmp_path)
    (found,) = caught.value.diagnostics
    assert found.code is codes.MODEL_CONFIG
    assert words in found.message
    assert found.help


@pytest.mark.parametrize("kind", [[], {}, 5, None])
def test_model_types_that_are_no_names_are_refused(kind: object) -> None:
    from kcdsl.model.architectures import hf

    with pytest.raises(Refusal, match="has no model_type") as caught:
        hf.build({"model_type": kind})
    assert caught.value.diagnostics[0].code is codes.MODEL_CONFIG


def test_a_stored_weight_that_no_tensor_equals_is_refused() -> None:
    """The library stores it under a name that the checkpoint does not have."""
    from kcdsl.model.architectures import hf

    program = torch.nn.Linear(2, 2, bias=False)
    other = {"renamed": program.weight.detach() + 1}
    with pytest.raises(Refusal, match="other numbers for the weight weight"):
        hf.keys_of(program, other, torch.float32, "the checkpoint")


def test_persistent_buffers_of_floats_are_weights() -> None:
    """A transfer to later weights compares the tensors with a key only."""
    from kcdsl.model.architectures import hf

    program = torch.nn.BatchNorm1d(2)
    stored = {n: t for n, t in program.state_dict().items() if t.is_floating_point()}
    keys = hf.keys_of(program, stored, torch.float32, "the checkpoint")
    assert keys == {name: name for name in ("weight", "bias", "running_mean", "running_var")}
    other = stored | {"running_mean": torch.ones(2)}
    with pytest.raises(Refusal, match="other numbers for the weight running_mean"):
        hf.keys_of(program, other, torch.float32, "the checkpoint")


def test_attention_that_no_implementation_has_is_refused() -> None:
    from kcdsl.model.architectures import hf

    class Fails:
        def from_config(self, config: object, **options: object) -> None:
            raise ValueError(f"no attention {options['attn_implementation']}")

    with pytest.raises(Refusal, match="no attention eager"):
        hf.outline(Fails(), None)


def test_remote_code_beside_a_known_model_is_not_run(saved: Saved, tmp_path: Path) -> None:
    """transformers' own implementation of the model_type runs, whatever `auto_map` names."""
    folder = saved("olmo2")
    raw = json.loads((folder / "config.json").read_text())
    raw["auto_map"] = {"AutoModelForCausalLM": "own.Model", "AutoConfig": "own.Config"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "own.py").write_text("raise SystemExit('code of a checkpoint was run')")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    for run in ("torch.eager", "hf.transformers"):
        given = kernel(tmp_path, run).logits(IDS)
        torch.testing.assert_close(given, logits(folder), rtol=1e-4, atol=1e-4)


CONTRACT = """\
kcdsl: 1
contract: families
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: hf, tokenizer: bytes}
data: requests.jsonl
kernels: {train: {run: torch.eager}, infer: {run: hf.transformers, numerics: {compute: bfloat16}}}
slices: {all: {}}
clauses:
  N-KL: {require: max(kl) <= 1, level: L2}
"""


def contract(folder: Path) -> Path:
    rows = [{"id": f"r{i}", "tokens": [(17 * i + 31 * j) % 256 for j in range(20)]}
            for i in range(3)]  # fmt: skip
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "contract.yaml").write_text(CONTRACT)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("kind", FAMILIES)
def test_each_family_is_evaluated(saved: Saved, cli: Cli, kind: str) -> None:
    ran = cli("evaluate", "contract.yaml", "-o", "out", cwd=contract(saved(kind)))
    assert ran.code == 0, ran.stdout + ran.stderr


@pytest.mark.full
@pytest.mark.parametrize("command", [("compile",), ("lint",), ("plan",), ("explain", "N-KL")])
def test_reading_commands_do_not_import_transformers(
    saved: Saved, tmp_path: Path, command: tuple[str, ...]
) -> None:
    folder = contract(saved("gpt_neox"))
    (tmp_path / "transformers.py").write_text("raise SystemExit('transformers was imported')")
    more = ("contract.yaml",) if command[0] != "explain" else ()
    ran = subprocess.run(
        [sys.executable, "-c", "import sys; from kcdsl.cli import main; sys.exit(main())",
         *command, *more],
        cwd=folder, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "transformers was imported" not in ran.stdout + ran.stderr
    assert ran.returncode == 0, ran.stderr
