"""Verify, evaluate and sign a small model, then check certificates after every kind of tampering.

Each tampered copy must be refused with exit code 4 by a check that names the difference.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kcdsl.model.architectures.llama import build

CONFIG = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
CONTRACT = """\
kcdsl: 1
contract: small
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.sdpa.flash, numerics: {preset: torch-sdpa-flash, compute: float32}}
data: prompts.jsonl
slices:
  all: {}
  chat: {where: 'category == "chat"'}
clauses:
  N-A: {require: "forall x in points(all): norm_inf(drift(attn_0, x)) <= 0.01", level: L2}
  N-B: {require: "forall x in points(chat): norm_inf(drift(mlp_0, x)) <= 0.02", level: L2}
  N-KL: {require: p99(kl) <= 0.02, slices: [all, chat], level: L2}
"""
VERIFIED, EVALUATED = "out/verify.cert.json", "out/evaluate.cert.json"
Payload = dict[str, Any]


def call(*arguments: str, cwd: Path) -> None:
    """Run a command that must succeed, outside the fixtures of a test."""
    from kcdsl.cli import main

    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main(list(arguments))
    assert code == 0, (arguments, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the whole contract is verified, evaluated and signed."""
    folder = tmp_path_factory.mktemp("road")
    torch.manual_seed(5)
    state = {
        name: torch.randn_like(p) * 0.2 + ("norm" in name)
        for name, p in build(CONFIG).named_parameters()
    }
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    rows = [{"id": f"p{i}", "text": t, "category": "chat"} for i, t in enumerate(("hello", "a b"))]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "contract.yaml").write_text(CONTRACT)
    call("keygen", cwd=folder)
    call("verify", "--attack", "off", "--sign", "kcdsl.key", cwd=folder)
    call("evaluate", "--seconds", "1", "--sign", "kcdsl.key", cwd=folder)
    return folder


@pytest.fixture
def folder(certified: Path, tmp_path: Path) -> Path:
    """A copy of the certified folder to tamper with."""
    copy = tmp_path / "copy"
    shutil.copytree(certified, copy)
    return copy


def check(cli: Any, folder: Path, *options: str, certificates: tuple[str, ...] = ()) -> Any:
    """Check both certificates against the whole contract; return the run."""
    given = certificates or (VERIFIED, EVALUATED)
    key = ("--key", "kcdsl.key.pub")
    return cli("check", *given, "--complete", *key, "--recheck", *options, cwd=folder)


def swap(name: str, old: str, new: str) -> Callable[[Path], None]:
    """Return a change of a text file."""

    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


def change_weight(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"][3] += 2.0**-20
    save_file(state, folder / "model.safetensors")


def link_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.bin")
    (folder / "model.safetensors").symlink_to("weights.bin")


def edit_payload(name: str, edit: Callable[[Payload], None]) -> Callable[[Path], None]:
    """Return a change of the signed payload under the old signature."""

    def change(folder: Path) -> None:
        bundle = json.loads((folder / name).read_text())
        envelope = bundle["dsseEnvelope"]
        payload = json.loads(base64.b64decode(envelope["payload"]))
        edit(payload)
        packed = json.dumps(payload, separators=(",", ":"), sort_keys=True).encode()
        envelope["payload"] = base64.b64encode(packed).decode()
        (folder / name).write_text(json.dumps(bundle))

    return change


def change_verdict(payload: Payload) -> None:
    payload["predicate"]["clauses"][0]["verdict"] = "FAILED"


def change_signature(folder: Path) -> None:
    bundle = json.loads((folder / VERIFIED).read_text())
    entry = bundle["dsseEnvelope"]["signatures"][0]
    raw = bytearray(base64.b64decode(entry["sig"]))
    raw[-1] ^= 1
    entry["sig"] = base64.b64encode(raw).decode()
    (folder / VERIFIED).write_text(json.dumps(bundle))


def exchange_proofs(folder: Path) -> None:
    a, b = folder / "out/N-A.proof.json", folder / "out/N-B.proof.json"
    first, second = a.read_bytes(), b.read_bytes()
    assert first != second
    a.write_bytes(second)
    b.write_bytes(first)


SPOILED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "weight": (change_weight, ("triple/checkpoint-mismatch",)),
    "weights behind a link": (link_weights, ("link",)),
    "configuration": (swap("config.json", "32", "31"), ("triple/checkpoint-mismatch",)),
    "inference kernel": (
        swap("contract.yaml", "run: torch.sdpa.flash", "run: torch.sdpa"),
        ("triple/kernel-infer-mismatch",),
    ),
    "training kernel": (
        swap("contract.yaml", "{preset: torch-eager}", "{preset: torch-eager, casts: nearest}"),
        ("triple/kernel-train-mismatch",),
    ),
    "limit": (swap("contract.yaml", "<= 0.01", "<= 0.02"), ("triple/contract-mismatch",)),
    "slice": (
        swap("contract.yaml", 'category == "chat"', "length > 3"),
        ("triple/contract-mismatch",),
    ),
    "clause taken away": (
        swap("contract.yaml", CONTRACT[CONTRACT.index("  N-KL") :], ""),
        ("triple/contract-mismatch",),
    ),
    "data": (swap("prompts.jsonl", "hello", "jello"), ("prompts.jsonl",)),
    "result": (edit_payload(VERIFIED, change_verdict), ("signature/none-trusted",)),
    "signature": (change_signature, ("signature/none-trusted",)),
    "proofs": (exchange_proofs, ("N-A", "proof")),
    "a byte of a proof": (swap("out/N-A.proof.json", "attn_0", "attn_1"), ("N-A", "proof")),
    "no proof": (lambda folder: (folder / "out/N-A.proof.json").unlink(), ("N-A", "proof")),
}


def test_written_documents_follow_their_schemas(cli: Any, folder: Path) -> None:
    ran = check(cli, folder)
    assert ran.code == 0, ran.stdout + ran.stderr


@pytest.mark.sample(11)
@pytest.mark.parametrize("name", SPOILED)
def test_each_tampering_is_refused_by_a_check_that_names_it(
    name: str, cli: Any, folder: Path
) -> None:
    spoil, words = SPOILED[name]
    spoil(folder)
    ran = check(cli, folder)
    assert ran.code == 4, ran.stdout + ran.stderr
    document = json.loads(check(cli, folder, "--format", "json").stdout)
    failed = [c for d in _reports(document) for c in d["checks"] if c["outcome"] == "failed"]
    assert failed
    told = json.dumps(failed)
    for word in words:
        assert word in told, told


def _reports(document: Any) -> list[Any]:
    found = document if isinstance(document, list) else document.get("certificates", [document])
    assert isinstance(found, list)
    return found


def test_other_torch_version_is_refused_as_another_kernel(cli: Any, folder: Path) -> None:
    """Use the kernel record that a gate without torch gets."""
    record = "out/kernels.json"
    assert check(cli, folder, "--kernels", record).code == 0
    text = (folder / record).read_text()
    version = torch.__version__.partition("+")[0]
    assert version in text
    (folder / record).write_text(text.replace(version, "2.0.0"))
    ran = check(cli, folder, "--kernels", record)
    assert ran.code == 4
    assert "triple/kernel-train-mismatch" in ran.stdout


def test_certificate_of_some_clauses_does_not_cover_the_contract(cli: Any, folder: Path) -> None:
    for only, missing in ((VERIFIED, "N-KL"), (EVALUATED, "N-A")):
        ran = check(cli, folder, certificates=(only,))
        assert ran.code == 4
        assert missing in ran.stdout


def test_expired_certificates_and_unknown_keys_are_refused(cli: Any, folder: Path) -> None:
    assert check(cli, folder, "--at", "2000-01-01T00:00:00Z").code == 4
    assert check(cli, folder, "--at", "2999-01-01T00:00:00Z").code == 4
    call("keygen", "-o", "other.key", cwd=folder)
    ran = cli("check", VERIFIED, "--key", "other.key.pub", cwd=folder)
    assert ran.code == 4
    assert "signature/none-trusted" in ran.stdout
