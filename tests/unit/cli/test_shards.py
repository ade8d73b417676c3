"""Checkpoints in shards: proved, signed, checked, measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kcdsl.model.checkpoint import tensors
from kcdsl.model.checkpoint.headers import INDEX
from kcdsl.model.lowering import evaluate
from kcdsl_backends import comparison
from kcdsl_backends.drift.boxes import matrices, state
from kcdsl_certs.recheck.interval import parameters
from tests.support.small_models import write_model

QUICK = ("--seconds", "0.2", "--bound-seconds", "0")
CONTRACT = """\
kcdsl: 1
contract: sharded
version: 1.0.0
model: {checkpoint: weights, architecture: llama, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.sdpa.flash, numerics: {preset: torch-sdpa-flash}}
data: prompts.jsonl
slices:
  all: {}
clauses:
  N: {require: "forall x in points(all): norm_inf(drift(attn_0, x)) <= 0.01", level: L2}
  M: {require: "p99(kl) <= 1e-3 nats", slices: [all], level: L2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a contract with a folder of two shards in bfloat16."""
    write_model(tmp_path, rows=[{"id": "p", "text": "hello", "category": "chat"}])
    held = {k: t.to(torch.bfloat16) for k, t in load_file(tmp_path / "model.safetensors").items()}
    (tmp_path / "model.safetensors").unlink()
    weights = tmp_path / "weights"
    weights.mkdir()
    (tmp_path / "config.json").rename(weights / "config.json")
    names = sorted(held)
    index: dict[str, str] = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        mine = names[number - 1 :: 2]
        save_file({key: held[key] for key in mine}, weights / name)
        index |= dict.fromkeys(mine, name)
    document = {"metadata": {"total_size": 1.0}, "weight_map": index}
    (weights / INDEX).write_text(json.dumps(document))
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    return tmp_path


def test_sharded_checkpoint_is_proved_signed_measured_and_checked(cli: Any, folder: Path) -> None:
    assert cli("keygen", "-o", "k.key", cwd=folder).code == 0
    verified = cli("verify", "--block", "attn_0", "--sign", "k.key", "--attack", "off", cwd=folder)
    assert verified.code == 0, verified.stderr
    evaluated = cli("evaluate", *QUICK, "--sign", "k.key", cwd=folder)
    assert evaluated.code == 0, evaluated.stderr
    certificates = [f"out/{name}.cert.json" for name in ("verify-attn_0", "evaluate")]
    check = ("check", *certificates, "--key", "k.key.pub", "--recheck", "--complete")
    checked = cli(*check, cwd=folder)
    assert checked.code == 0, checked.stdout + checked.stderr
    compiled = cli("compile", cwd=folder)
    assert compiled.code == 0
    # every file that was read is bound: an index of the same tensors, and a byte of a shard
    index = folder / "weights" / INDEX
    text = index.read_text()
    index.write_text(text.replace("1.0", "2.0"))
    assert cli(*check, cwd=folder).code == 4
    index.write_text(text)
    shard = folder / "weights" / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert cli(*check, cwd=folder).code == 4


@pytest.mark.full
def test_only_the_block_of_a_large_checkpoint_is_read(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights stay in their storage format, and are multiplied a few rows at a time."""
    command = ("verify", "--block", "attn_0", "--format", "json")
    read: dict[str, int] = {}
    reading = tensors.StoredTensors._read

    def noted(self: tensors.StoredTensors, key: str, start: int, end: int) -> Tensor:
        read[key] = max(read.get(key, 0), end - start)
        return reading(self, key, start, end)

    with monkeypatch.context() as small:
        small.setattr(tensors, "RESIDENT", 0)
        small.setattr(tensors.StoredTensors, "_read", noted)
        small.setattr(comparison, "LARGEST_COMPARED", 0)
        small.setattr(state, "KEPT_WIDE", 0)
        small.setattr(matrices, "KEPT_WIDE", 256)
        small.setattr(parameters, "_LARGE", 0)
        small.setattr(parameters, "_AT_ONCE", 256)
        small.setattr(evaluate, "LARGE", 0)
        small.setattr(evaluate, "_AT_ONCE", 256)
        part = cli(*command, cwd=folder, env={"XDG_CACHE_HOME": str(folder / "cache")})
    assert part.code == 0, part.stderr
    whole = cli(*command, cwd=folder)
    assert whole.code == 0, whole.stderr
    names = {f"model.layers.0.self_attn.{side}_proj.weight" for side in "qkvo"}
    assert read.keys() == {
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        *names,
    }
    width = json.loads((folder / "weights" / "config.json").read_text())["hidden_size"]
    assert read["model.embed_tokens.weight"] == 2 * width
    one, other = (json.loads(ran.stdout)["goals"][0] for ran in (whole, part))
    assert one["bound"] == pytest.approx(other["bound"], rel=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("domain", ["affine", "interval", "planes"])
@pytest.mark.parametrize("block", ["layer_0", "mlp_0"])
def test_row_by_row_products_give_equal_bounds(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, block: str, domain: str
) -> None:
    contract = CONTRACT.replace("drift(attn_0", f"drift({block}").replace("0.01", "9.0")
    contract = contract.replace("points(all)", "ball(all, 1e-6)")
    (folder / "contract.yaml").write_text(contract)
    command = (
        "verify",
        "--block",
        block,
        "--format=json",
        "--domains",
        domain,
        "--cache",
        "off",
    )
    bounds = []
    for most in (matrices.KEPT_WIDE, 0):
        monkeypatch.setattr(state, "KEPT_WIDE", most)
        monkeypatch.setattr(matrices, "KEPT_WIDE", 256 if most == 0 else most)
        monkeypatch.setattr(parameters, "_LARGE", most)
        monkeypatch.setattr(parameters, "_AT_ONCE", 256)
        ran = cli(*command, cwd=folder)
        assert ran.code == 0, ran.stderr
        bounds.append(json.loads(ran.stdout)["goals"][0]["bound"])
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-12)


def test_bytes_changed_after_hashing_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "RESIDENT", 0)
    found = tensors.load_checkpoint(folder / "weights")
    key = "model.layers.0.self_attn.q_proj.weight"
    assert found.tensors[key].dtype == torch.float32
    for shard in (folder / "weights").glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    with pytest.raises(Exception, match="changed while"):
        found.tensors[key]
