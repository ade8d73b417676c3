"""Hugging Face transformers as a kernel: agreement with the built-in programs, planted faults."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kcdsl.diagnostics import Refusal, codes
from kcdsl.ir.terms import KernelRef, ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.loader import load_model
from kcdsl_backends.empirical.diagnoses.weights import weights_digests
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel, load_kernel
from tests.conftest import Cli

pytestmark = pytest.mark.usefixtures("shared_files")

IDS = [7, 200, 3, 3, 90, 41, 250, 11, 64, 5, 128, 77, 19, 230, 2, 99]
PRECISIONS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def shapes(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that saves a small random model of an architecture in a folder."""
    import transformers

    folder = tmp_path_factory.mktemp("hugging-face")
    made: dict[str, Callable[[], Any]] = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**shapes())),
        "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shapes())),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=4,
                initializer_range=0.3, bos_token_id=1, eos_token_id=2,
            )
        ),
    }  # fmt: skip

    def save(name: str) -> Path:
        path = folder / name
        if not path.is_dir():
            torch.manual_seed(0)
            made[name]().save_pretrained(path)
        return path

    return save


def kernel(
    folder: Path, run: str, compute: str = "float32", architecture: str = "llama", **more: Any
) -> TorchKernel:
    model = load_model(ModelRef("model.safetensors", architecture), folder)
    return load_kernel(KernelRef(run, (("compute", compute),), **more), model, "cpu", folder)


def gold(folder: Path, architecture: str = "llama") -> Tensor:
    return kernel(folder, "torch.eager", "float64", architecture).logits(IDS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("run", ["hf.transformers", "hf.transformers.sdpa"])
@pytest.mark.parametrize("compute", PRECISIONS)
def test_logits_agree_with_the_built_in_program(
    saved: Callable[[str], Path], run: str, compute: str
) -> None:
    """Both have a similar distance from the exact run, caused by rounding."""
    folder = saved("llama")
    exact = gold(folder)
    size = float(exact.abs().max())
    own = kernel(folder, "torch.eager", compute).logits(IDS)
    theirs = kernel(folder, run, compute).logits(IDS)
    errors = [float((found - exact).abs().max()) for found in (own, theirs)]
    assert errors[1] < 3 * errors[0]
    assert errors[1] < 100 * PRECISIONS[compute] * size
    assert errors[1] > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "llama"])
def test_architectures_that_are_not_built_in_run_on_both_sides(
    saved: Callable[[str], Path], name: str
) -> None:
    import transformers

    folder = saved(name)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = whole(torch.tensor([IDS])).logits[0]
    for run in ("hf.transformers", "hf.transformers.sdpa", "torch.eager", "torch.sdpa.math"):
        found = kernel(folder, run, architecture="hf").logits(IDS)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_hidden_states_are_the_inputs_of_the_head(saved: Callable[[str], Path]) -> None:
    folder = saved("llama")
    theirs, own = (kernel(folder, run) for run in ("hf.transformers", "torch.eager"))
    torch.testing.assert_close(theirs.hidden(IDS), own.hidden(IDS), rtol=1e-4, atol=1e-4)
    head = load_file(folder / "model.safetensors")["lm_head.weight"].to(torch.float64)
    logits = theirs.logits(IDS).double()
    torch.testing.assert_close(theirs.hidden(IDS) @ head.T, logits, atol=1e-4, rtol=0)


def test_batched_rows_equal_single_rows(saved: Callable[[str], Path]) -> None:
    found = kernel(saved("llama"), "hf.transformers")
    both = found.logits([IDS, IDS[::-1]])
    torch.testing.assert_close(both[0], found.logits(IDS), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(both[1], found.logits(IDS[::-1]), rtol=1e-5, atol=1e-5)


def test_kernel_exposes_no_blocks(saved: Callable[[str], Path]) -> None:
    found = kernel(saved("llama"), "hf.transformers")
    with pytest.raises(Refusal) as caught:
        found.block("attn_0", torch.zeros(3, 32))
    assert caught.value.diagnostics[0].code is codes.UNKNOWN_BLOCK


def test_loading_uses_no_network_and_restores_the_environment(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    def refused(*arguments: object, **more: object) -> None:
        raise AssertionError("the network was asked")

    folder = saved("llama")
    before = dict(os.environ)
    monkeypatch.setattr(socket.socket, "connect", refused)
    kernel(folder, "hf.transformers").logits(IDS)
    assert dict(os.environ) == before


# --- digests -------------------------------------------------------------------------------------


def digests(folder: Path, other: Path) -> set[str]:
    model = load_model(ModelRef("model.safetensors", "llama"), folder)
    train = load_kernel(KernelRef("torch.eager", ()), model, "cpu")
    reference = KernelRef("hf.transformers", (), folder=str(other))
    infer = load_kernel(reference, model, "cpu", folder)
    sha256 = model.checkpoint.sha256
    return set(weights_digests(train, infer, sha256, sha256).values())


def copied(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_equal_weights_in_another_file_have_one_digest(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = saved("llama")
    other = copied(folder, tmp_path / "same", lambda tensors: None)
    assert len(digests(folder, folder)) == 1
    assert len(digests(folder, other)) == 1


def test_one_changed_number_changes_the_digest(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    def nudge(tensors: dict[str, Tensor]) -> None:
        row = tensors["model.layers.1.mlp.up_proj.weight"]
        row[3, 3] = torch.nextafter(row[3, 3], torch.tensor(torch.inf))

    folder = saved("llama")
    assert len(digests(folder, copied(folder, tmp_path / "other", nudge))) == 2


def test_missing_and_surplus_weights_are_refused(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers would fill the first with random numbers, and drop the second."""

    def forget(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(48, 32)

    def reshape(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] = torch.ones(16)

    folder = saved("llama")
    shaped = "mismatched keys model.norm.weight ([16] in the files, [32] by config.json)"
    for change, words in (
        (forget, "missing keys"),
        (add, "unexpected keys"),
        (reshape, shaped),
    ):
        with pytest.raises(Refusal) as caught:
            digests(folder, copied(folder, tmp_path / words.split()[0], change))
        first = caught.value.diagnostics[0]
        assert first.code is codes.HF_FOLDER
        assert words in first.message


def test_another_vocabulary_is_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    import transformers

    larger = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shapes(vocab_size=300)))
    larger.save_pretrained(tmp_path / "larger")
    with pytest.raises(Refusal) as caught:
        digests(saved("llama"), tmp_path / "larger")
    assert "300 tokens" in caught.value.diagnostics[0].message


def test_empty_folder_is_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for other in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(Refusal) as caught:
            digests(saved("llama"), other)
        assert caught.value.diagnostics[0].code is codes.HF_FOLDER


@pytest.mark.parametrize(
    ("numerics", "words"),
    [
        ((("compute", "float64"),), "float64"),
        ((("weights", (("format", "int8"), ("scale", "per_channel"))),), "int8"),
        ((("preset", "torch-sdpa-flash"),), "attention is composed"),
        ((("casts", "nearest"),), "casts are `any`"),
    ],
)
def test_formats_that_transformers_lacks_are_refused(
    saved: Callable[[str], Path], numerics: tuple[tuple[str, object], ...], words: str
) -> None:
    model: Model = load_model(ModelRef("model.safetensors", "llama"), saved("llama"))
    with pytest.raises(Refusal) as caught:
        load_kernel(KernelRef("hf.transformers", numerics), model, "cpu")
    assert caught.value.diagnostics[0].code is codes.KERNEL_NUMERICS
    assert words in caught.value.diagnostics[0].message


# --- contracts -----------------------------------------------------------------------------------

CONTRACT = """\
kcdsl: 1
contract: hugging-face
version: 1.0.0
model: {{checkpoint: {folder}/model.safetensors, architecture: {architecture}, tokenizer: bytes}}
data: requests.jsonl
kernels: {{train: {{run: {train}}}, infer: {{run: {infer}, folder: {other}}}}}
slices: {{all: {{}}}}
clauses:
  N-KL: {{require: max(kl) <= 1e-6, level: L2}}
  S-TOP: {{require: mean(top1_overlap) >= 99%, level: L2}}
"""


def evaluated(
    cli: Cli, at: Path, folder: Path, other: Path, train: str, architecture: str = "llama"
) -> tuple[dict[str, str], dict[str, str], str]:
    """Return the verdicts, the failed preconditions, and the output."""
    rows = [{"id": f"r{i}", "tokens": [(17 * i + 31 * j) % 256 for j in range(20)]}
            for i in range(6)]  # fmt: skip
    (at / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = CONTRACT.format(
        folder=folder, other=other, architecture=architecture, train=train, infer="hf.transformers"
    )
    (at / "contract.yaml").write_text(text)
    ran = cli("evaluate", "contract.yaml", "-o", "out", cwd=at)
    report = json.loads((at / "out" / "report.json").read_text())
    verdicts = {row["clause"]: row["verdict"] for row in report["clauses"]}
    failed = {c["name"]: c["detail"] for c in report["prechecks"] if c["outcome"] == "failed"}
    return verdicts, failed, ran.stdout + ran.stderr


@pytest.mark.full
def test_contract_compares_it_with_the_built_in_kernel(
    saved: Callable[[str], Path], cli: Cli, tmp_path: Path
) -> None:
    folder = saved("llama")
    verdicts, failed, printed = evaluated(cli, tmp_path, folder, folder, "torch.eager")
    assert verdicts == {"N-KL": "held", "S-TOP": "held"}, printed
    assert failed == {}
    assert "Failed to load" not in printed


@pytest.mark.full
def test_other_architectures_run_transformers_on_both_sides(
    saved: Callable[[str], Path], cli: Cli, tmp_path: Path
) -> None:
    folder = saved("gpt2")
    verdicts, failed, printed = evaluated(
        cli, tmp_path, folder, folder, "hf.transformers.sdpa", "hf"
    )
    assert verdicts == {"N-KL": "held", "S-TOP": "held"}, printed
    assert failed == {}


@pytest.mark.full
def test_changed_weights_are_diagnosed(
    saved: Callable[[str], Path], cli: Cli, tmp_path: Path
) -> None:
    def nudge(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 3] += 1e-6

    folder = saved("llama")
    other = copied(folder, tmp_path / "other", nudge)
    verdicts, failed, _ = evaluated(cli, tmp_path, folder, other, "torch.eager")
    assert "weights_checksum" in failed
    assert set(verdicts.values()) == {"invalid_evidence"}


@pytest.mark.full
def test_changed_rope_base_is_diagnosed(
    saved: Callable[[str], Path], cli: Cli, tmp_path: Path
) -> None:
    """The weights are equal; config.json of the folder states another base of RoPE."""
    folder = saved("llama")
    other = copied(folder, tmp_path / "other", lambda tensors: None)
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500.0
    (other / "config.json").write_text(json.dumps(config))
    verdicts, failed, _ = evaluated(cli, tmp_path, folder, other, "torch.eager")
    assert "weights_checksum" not in failed
    assert "stale_weights" in failed
    assert "infer" in failed["stale_weights"]
    assert set(verdicts.values()) == {"invalid_evidence"}


def test_missing_transformers_names_the_extra(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        "kcdsl_backends.empirical.sources.kernels.engines.find_spec",
        lambda name: None if name == "transformers" else real(name),
    )
    with pytest.raises(Refusal) as caught:
        kernel(saved("llama"), "hf.transformers")
    assert caught.value.diagnostics[0].code is codes.NO_PACKAGE
    assert 'pip install "kcdsl[hf]"' in (caught.value.diagnostics[0].help or "")
