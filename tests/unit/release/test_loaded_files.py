"""Signed files are the loaded ones: attacks by links, swaps and special files."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kcdsl.api import verification
from kcdsl.diagnostics import Refusal, codes
from kcdsl.ir.kernels import Recording
from kcdsl.ir.terms import KernelRef
from kcdsl.model.checkpoint.tensors import load_checkpoint
from kcdsl.model.files import CHECKPOINT, Artefacts, copy_hashed
from kcdsl_backends.empirical.sources.rollouts.logits import load_recorded_logits
from kcdsl_backends.requests import Request
from tests.support.small_models import write_model

CONTRACT = """\
kcdsl: 1
contract: small
version: 1.0.0
model: {checkpoint: CHECKPOINT, architecture: llama, config: config.json, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.sdpa.flash, numerics: {preset: torch-sdpa-flash, compute: float32}}
data: DATA
slices: {all: {}}
clauses:
  N-KL: {require: p99(kl) <= 1, slices: [all], level: L2}
  N-0: {require: "forall x in points(all): norm_inf(drift(attn_0, x)) <= 0.01", level: L2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with weights and prompts, and a contract about them."""
    home = tmp_path / "contract"
    home.mkdir()
    write_model(home, rows=[{"id": "a", "text": "hello"}])
    write(home)
    return home


def write(home: Path, checkpoint: str = "model.safetensors", data: str = "prompts.jsonl") -> None:
    text = CONTRACT.replace("CHECKPOINT", checkpoint).replace("DATA", data)
    (home / "contract.yaml").write_text(text)


def other_weights(path: Path, target: Path) -> None:
    """Write weights of the same shapes, each slightly larger."""
    save_file({name: tensor * 1.01 for name, tensor in load_file(path).items()}, target)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_hashing_and_loading_resolve_a_path_alike(folder: Path, tmp_path: Path, cli: Any) -> None:
    """The system resolves `d/../model.safetensors` relative to the target of d."""
    (folder / "deep" / "inner").mkdir(parents=True)
    other_weights(folder / "model.safetensors", folder / "deep" / "model.safetensors")
    (folder / "d").symlink_to("deep/inner")
    write(folder, "d/../model.safetensors")
    assert cli("keygen", "-o", tmp_path / "k.key").code == 0
    ran = cli("verify", "--attack", "off", "--sign", tmp_path / "k.key", cwd=folder)
    assert ran.code == 0, ran.stderr
    check = ("check", "out/verify.cert.json", "--key", tmp_path / "k.key.pub", "--format", "json")
    assert cli(*check, cwd=folder).code == 0
    honest = cli(*check, "--checkpoint", folder / "model.safetensors", cwd=folder)
    assert honest.code == 4  # the certificate does not name weights that did not run
    assert cli(*check, "--checkpoint", folder / "deep" / "model.safetensors", cwd=folder).code == 0


@pytest.mark.parametrize("link", ["file", "folder"])
def test_links_that_leave_the_folder_are_refused(
    folder: Path, tmp_path: Path, cli: Any, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (folder / "prompts.jsonl").rename(outside / "prompts.jsonl")
    if link == "file":
        (folder / "prompts.jsonl").symlink_to(outside / "prompts.jsonl")
    else:
        (folder / "way").symlink_to(outside)
        write(folder, data="way/prompts.jsonl")
    ran = cli("verify", "--attack", "off", cwd=folder)
    assert (ran.code, "KC610" in ran.stderr) == (2, True)
    monkeypatch.setenv("KCDSL_ALLOW_FOLDERS", str(outside))
    assert cli("verify", "--attack", "off", cwd=folder).code == 0


def test_weights_replaced_after_loading_are_not_signed(
    folder: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights are in place only during loading; the original ones are hashed."""
    honest, other = folder / "model.safetensors", folder / "other.safetensors"
    other_weights(honest, other)
    good, bad = honest.read_bytes(), other.read_bytes()
    decide = verification._decide

    def swapped(*given: Any) -> Any:
        honest.write_bytes(bad)
        try:
            return decide(*given)
        finally:
            honest.write_bytes(good)

    monkeypatch.setattr(verification, "_decide", swapped)
    ran = cli("verify", "--attack", "off", cwd=folder)
    assert (ran.code, "KC608" in ran.stderr) == (2, True)
    assert "the checkpoint changed" in ran.stderr
    assert not list((folder / "out").glob("*.json"))


def test_data_replaced_after_reading_are_not_signed(
    folder: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, decide = folder / "prompts.jsonl", verification._decide
    good = data.read_bytes()

    def swapped(*given: Any) -> Any:
        data.write_bytes(b'{"id": "easy", "text": "a"}\n')
        try:
            return decide(*given)
        finally:
            data.write_bytes(good)

    monkeypatch.setattr(verification, "_decide", swapped)
    ran = cli("verify", "--attack", "off", cwd=folder)
    assert (ran.code, "prompts.jsonl changed" in ran.stderr) == (2, True)


def test_digest_is_of_the_loaded_tensors_under_concurrent_writes(tmp_path: Path) -> None:
    """A thread rewrites the file in place continuously.

    Loaded tensors have their digest, and do not change afterwards: the file is not memory-mapped.
    """
    path = tmp_path / "m.safetensors"
    contents = []
    for value in (1.0, 2.0):
        save_file({"w": torch.full((1 << 18,), value)}, path)
        contents.append(path.read_bytes())
    stop = threading.Event()

    def rewrite() -> None:
        with path.open("r+b") as file:
            while not stop.is_set():
                for content in contents:
                    file.seek(0)
                    file.write(content)

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        loaded = [load_checkpoint(path) for _ in range(20)]
    finally:
        stop.set()
        thread.join()
    header = len(contents[0]) - 4 * (1 << 18)
    for found in loaded:
        data = contents[0][:header] + found.tensors["w"].numpy().tobytes()
        assert hashlib.sha256(data).hexdigest() == found.sha256
    one = load_checkpoint(path)
    before = one.tensors["w"].clone()
    with path.open("r+b") as file:
        file.seek(header)
        file.write(bytes(4 * (1 << 18)))
    assert torch.equal(one.tensors["w"], before)


def test_file_that_grows_or_shrinks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.zeros(1 << 12)}, path)
    size = path.stat().st_size
    real = os.fstat

    def claims(more: int) -> Callable[[int], os.stat_result]:
        def fstat(descriptor: int) -> os.stat_result:
            found = list(real(descriptor))
            found[6] += more
            return os.stat_result(found)

        return fstat

    for more in (-8, 8):
        monkeypatch.setattr("kcdsl.model.checkpoint.tensors.os.fstat", claims(more))
        with pytest.raises(Refusal) as caught:
            load_checkpoint(path)
        assert caught.value.diagnostics[0].code is codes.CHECKPOINT_FORMAT
    assert path.stat().st_size == size


def test_recorded_logits_are_verified_by_digest_on_reading(tmp_path: Path) -> None:
    path = tmp_path / "logits.safetensors"
    save_file({"a": torch.randn(3, 5)}, path)
    ref = KernelRef("recorded", (), recording=Recording("logits", file="logits.safetensors"))
    request = Request("p:a", "a", (1, 2, 3), {}, 1)
    files = Artefacts.of(tmp_path)
    kernel = load_recorded_logits(ref, files, [request])
    assert files.digests == {"logits.safetensors": sha256(path)}
    assert kernel.logits([1, 2, 3]).shape == (3, 5)
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x00\x00\x80\x3f")
    with pytest.raises(Refusal) as caught:
        kernel.logits([1, 2, 3])
    assert caught.value.diagnostics[0].code is codes.CHANGED_MEANWHILE


def test_logits_file_must_match_one_request_id(tmp_path: Path) -> None:
    save_file({"1": torch.randn(3, 5)}, tmp_path / "logits.safetensors")
    ref = KernelRef("recorded", (), recording=Recording("logits", file="logits.safetensors"))
    one = Request("a.jsonl:1", "1", (1, 2, 3), {}, 1)
    files = Artefacts.of(tmp_path)
    assert load_recorded_logits(ref, files, [one, replace(one, key="b.jsonl:1")])
    with pytest.raises(Refusal, match="have one id"):
        load_recorded_logits(ref, files, [one, Request("b.jsonl:1", "1", (3, 2, 1), {}, 1)])


def test_one_name_cannot_have_two_digests(tmp_path: Path) -> None:
    files = Artefacts.of(tmp_path)
    (tmp_path / "a").write_bytes(b"one")
    files.read(files.find("a"), "a")
    (tmp_path / "a").write_bytes(b"two")
    with pytest.raises(Refusal) as caught:
        files.read(files.find("a"), "a")
    assert caught.value.diagnostics[0].code is codes.CHANGED_MEANWHILE


def test_copy_has_the_digest_of_its_source(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(1 << 16))
    assert copy_hashed(tmp_path / "a", tmp_path / "b") == sha256(tmp_path / "b")


def test_every_file_of_the_model_is_recorded(folder: Path) -> None:
    from kcdsl.check.compile import load_program
    from kcdsl.model.loader import load_model

    program = load_program(folder / "contract.yaml")
    model = load_model(program.model, folder)
    assert model.files.digests == {
        CHECKPOINT: model.checkpoint.root_digest,
        "the config of the checkpoint": sha256(folder / "config.json"),
    }


def test_source_of_a_factory_must_not_change_during_the_run(
    tmp_path: Path,
) -> None:
    from kcdsl.ir.terms import ModelRef
    from kcdsl.model.loader import load_model

    write_model(tmp_path, rows=[{"id": "a", "text": "hello"}])
    source = "from kcdsl.model.architectures.llama import build\n"
    path = tmp_path / "own_recorded_network.py"
    path.write_text(source)
    ref = ModelRef("model.safetensors", module="own_recorded_network:build", tokenizer="bytes")
    files = Artefacts.of(tmp_path)
    load_model(ref, files)
    assert files.digests["the module of the checkpoint"] == sha256(path)
    swap = f"import pathlib\npathlib.Path({str(path)!r}).write_text({source!r})\n"
    (tmp_path / "own_swapped_network.py").write_text(swap.replace("recorded", "swapped") + source)
    other = ModelRef("model.safetensors", module="own_swapped_network:build", tokenizer="bytes")
    with pytest.raises(Refusal) as caught:
        load_model(other, Artefacts.of(tmp_path))
    assert caught.value.diagnostics[0].code is codes.CHANGED_MEANWHILE


def test_changed_generation_config_changes_the_triple(folder: Path) -> None:
    from kcdsl.check.compile import load_program
    from kcdsl.release.requirements import build_triple

    program = load_program(folder / "contract.yaml")
    before = build_triple(program, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    after = build_triple(program, folder)
    assert "generation_config" in after.checkpoint.companions
    assert before.digest != after.digest


ENDLESS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "file of the system": lambda path: path.symlink_to("/proc/self/environ"),
    "folder": lambda path: path.mkdir(),
}


@pytest.fixture
def no_hang() -> Iterator[None]:
    """Fail a test that hangs."""

    def late(*given: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("no_hang")
@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("role", ["data", "checkpoint", "config", "tokenizer"])
def test_special_files_are_refused_and_never_quoted(
    folder: Path, cli: Any, kind: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERY_PRIVATE", "do-not-show-this")
    ENDLESS[kind](folder / "odd")
    text = (folder / "contract.yaml").read_text()
    plain = {
        "data": ("data: prompts.jsonl", "data: odd"),
        "checkpoint": ("checkpoint: model.safetensors", "checkpoint: odd"),
        "config": ("config: config.json", "config: odd"),
        "tokenizer": ("tokenizer: bytes", "tokenizer: odd"),
    }[role]
    (folder / "contract.yaml").write_text(text.replace(*plain))
    for command in ("plan", "compile", "verify"):
        ran = cli(command, "contract.yaml", cwd=folder)
        assert "do-not-show-this" not in ran.stdout + ran.stderr
        assert ran.code == 2 or command != "verify", ran.stderr


@pytest.mark.usefixtures("no_hang")
@pytest.mark.parametrize("name", ["/proc/self/environ", "/dev/zero", "../../../../../etc/passwd"])
@pytest.mark.parametrize("command", ["plan", "verify", "check"])
def test_data_outside_the_folder_are_refused_by_every_command(
    folder: Path, cli: Any, command: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERY_PRIVATE", "do-not-show-this")
    assert cli("keygen", "-o", folder / "k.key").code == 0
    (folder / "c.json").write_text("{}")
    write(folder, data=name)
    words = ["c.json", "--key", "k.key.pub"] if command == "check" else []
    ran = cli(command, *words, cwd=folder)
    assert (ran.code, "KC610" in ran.stderr) == (2, True), ran.stderr
    assert "do-not-show-this" not in ran.stdout + ran.stderr
    assert "root:" not in ran.stdout + ran.stderr


def test_file_larger_than_its_stated_size_is_refused(
    folder: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allowed or not: files of /proc state no size."""
    monkeypatch.setenv("KCDSL_ALLOW_FOLDERS", "/proc")
    write(folder, data="/proc/self/status")
    ran = cli("plan", cwd=folder)
    assert (ran.code, "more bytes than its size says" in ran.stderr) == (2, True)


def test_nul_byte_in_a_path_is_a_diagnostic(tmp_path: Path) -> None:
    for reference in ("a\0b", "package:a\0b/c", "\0"):
        with pytest.raises(Refusal) as caught:
            Artefacts.of(tmp_path).find(reference)
        assert caught.value.diagnostics[0].code is codes.FILE_MISSING
        assert "\0" not in caught.value.diagnostics[0].message


def test_configuration_cannot_allow_more_than_its_own_folder(
    folder: Path, tmp_path: Path, cli: Any
) -> None:
    (tmp_path / "secret.jsonl").write_text('{"id": "a", "text": "x"}\n')
    write(folder, data="../secret.jsonl")
    for allowed in ("..", "/", str(tmp_path)):
        (folder / "kcdsl.toml").write_text(f"allow-folders = [{json.dumps(allowed)}]\n")
        assert cli("plan", cwd=folder).code == 2
    (folder / "kcdsl.toml").unlink()
    (tmp_path / "kcdsl.toml").write_text('allow-folders = ["."]\n')
    assert cli("plan", cwd=folder).code == 0


def test_import_from_outside_is_refused_and_not_quoted(
    folder: Path, tmp_path: Path, cli: Any
) -> None:
    (tmp_path / "secret.yaml").write_text("password: do-not-show-this\n")
    text = (folder / "contract.yaml").read_text()
    more = "imports: [{file: ../secret.yaml, slices: [x]}]\nslices: {all: {}}"
    (folder / "contract.yaml").write_text(text.replace("slices: {all: {}}", more))
    ran = cli("lint", "contract.yaml", cwd=folder)
    assert "outside" in ran.stdout + ran.stderr
    assert "do-not-show-this" not in ran.stdout + ran.stderr


def test_hugging_face_folder_is_loaded_from_a_private_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files read by transformers cannot be swapped after hashing."""
    from kcdsl_backends.empirical.sources.kernels import foreign_models as engine

    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
    seen: dict[str, bytes] = {}

    def load(folder: Path, *given: Any, **named: Any) -> Any:
        (tmp_path / "config.json").write_bytes(b"swapped")
        seen.update({path.name: path.read_bytes() for path in folder.iterdir()})
        assert folder != tmp_path
        raise InterruptedError

    class Model:
        encoder_only = False

        class checkpoint:
            path = tmp_path / "model.safetensors"

    monkeypatch.setattr(engine, "load_folder", load)
    files = Artefacts.of(tmp_path)
    with pytest.raises(InterruptedError):
        engine.hugging_face(
            KernelRef("hf.transformers", ()), Model, files, torch.float32, "fused"  # type: ignore[arg-type]
        )  # fmt: skip
    assert seen == {name: name.encode() for name in ("config.json", "model.safetensors")}
    assert (
        files.digests["config.json beside the checkpoint"]
        == hashlib.sha256(b"config.json").hexdigest()
    )
