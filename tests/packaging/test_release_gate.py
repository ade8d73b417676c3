"""The wheel with only the packages of requirements-gate.lock, as a release gate installs it."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.commands import run_here
from tests.support.installed import Installation, build, install

LOCK = "requirements-gate.lock"
CONTRACT = """\
kcdsl: 1
contract: release
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: requests.jsonl
slices:
  all: {}
clauses:
  N-A: {require: "forall x in points(all): norm_inf(drift(attn_0, x)) <= 0.01", level: L2}
  N-KL: {require: p99(kl) <= 0.02, level: L2}
"""
PROVED, MEASURED = "out/verify.cert.json", "out/evaluate.cert.json"
CHECK = ("check", PROVED, MEASURED, "--complete", "--recheck", "--kernels", "out/kernels.json")
TRUST = ("--key", "release.key.pub")
REGISTER = ("--register", "releases.db")


def pins(file: Path) -> dict[str, Requirement]:
    """Return the pins of a lock file by name."""
    lines = file.read_text(encoding="utf-8").splitlines()
    found = [Requirement(line.rstrip("\\")) for line in lines if line[:1].isalpha()]
    return {canonicalize_name(pin.name): pin for pin in found}


def test_gate_lock_pins_its_group_in_the_versions_of_setup(repository: Path) -> None:
    from importlib import metadata

    found, everything = pins(repository / LOCK), pins(repository / "requirements.lock")
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
    group = {canonicalize_name(name) for name in project["dependency-groups"]["gate"]}
    hard = {canonicalize_name(Requirement(r).name) for r in project["project"]["dependencies"]}
    assert group <= set(found)
    assert group <= hard
    for name, pin in found.items():
        assert pin.specifier == everything[name].specifier, "run `make lock`"
    for name, pin in found.items():
        if pin.marker is not None and not pin.marker.evaluate():
            continue
        for needed in map(Requirement, metadata.requires(name) or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert canonicalize_name(needed.name) in found, f"{name} needs {needed}"
    assert not {"torch", "z3-solver", "scipy", "onnx"} & set(found)


def test_gate_installation_commands_agree_everywhere(repository: Path) -> None:
    """In `make wheel`, the action, the jobs and the pages."""
    locked = f"--require-hashes --no-deps -r {LOCK}"
    count = f"{len(pins(repository / LOCK))} packages"
    for name in ("README.md", "docs/how-to/ci.md", "CHANGELOG.md"):
        assert count in (repository / name).read_text(encoding="utf-8"), name
    for name in ("README.md", "docs/how-to/ci.md", "docs/how-to/pipelines.md", "Makefile"):
        assert locked in (repository / name).read_text(encoding="utf-8"), name
    for name in ("action.yml", "contracts.yml", "gitlab-ci.yml"):
        text = (repository / "examples" / "github" / name).read_text(encoding="utf-8")
        assert LOCK in text
        installs = [line for line in text.splitlines() if "-m pip install" in line]
        assert len(installs) == 2
        assert "--require-hashes --no-deps -r " in installs[0]
        assert "--no-deps" in installs[1]


@pytest.fixture(scope="module")
def gate(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """Return an environment with the wheel and the packages of the lock that are installed here."""
    wheel = build(repository, "wheel", tmp_path_factory.mktemp("wheel"))
    locked = pins(repository / LOCK)
    names = [n for n, pin in locked.items() if pin.marker is None or pin.marker.evaluate()]
    return install(wheel, tmp_path_factory.mktemp("environment") / "env", only=names)


@pytest.fixture(scope="module")
def certified(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a contract and certificates of all its clauses, made with torch."""
    folder, source = tmp_path_factory.mktemp("certified"), repository / "examples" / "tiny_lm"
    for name in ("model.safetensors", "config.json"):
        shutil.copy(source / name, folder / name)
    row = json.dumps({"id": "a", "text": "Hi."})
    (folder / "requests.jsonl").write_text(f"{row}\n", encoding="utf-8")
    (folder / "contract.yaml").write_text(CONTRACT, encoding="utf-8")
    for words in (
        ("fmt",),
        ("keygen", "-o", "release.key"),
        ("verify", "--attack", "off", "--sign", "release.key"),
        ("evaluate", "--seconds", "0.1", "--sign", "release.key"),
    ):
        ran = run_here(*words, cwd=folder)
        assert ran.code == 0, ran.stdout + ran.stderr
    return folder


@pytest.fixture
def released(certified: Path, tmp_path: Path) -> Path:
    """Return a copy of the certified folder."""
    return shutil.copytree(certified, tmp_path / "released")


@pytest.mark.full
def test_gate_checks_and_records_certificates(gate: Installation, released: Path) -> None:
    done = gate.run("-c", "import torch", cwd=released, program="python")
    assert "No module named 'torch'" in done.stderr
    image = "registry.example/llm/model@sha256:" + "4f" * 32
    for words in (
        ("lint",),
        ("fmt", "--check"),
        ("explain", "KC641"),
        ("explain", "register"),
        ("explain", "kl"),
        (*CHECK, *TRUST),
        ("diff", PROVED, PROVED),
        ("register", "init", *REGISTER),
        ("register", "add", PROVED, MEASURED, *TRUST, *REGISTER),
        ("register", "check", *REGISTER),
        (*CHECK, *TRUST, *REGISTER),
        ("keygen", "-o", "gate.key"),
        ("companions", *CHECK[1:3], *CHECK[4:], *TRUST, "--sign", "gate.key", "--image", image),
        ("report", "out/report.json", "--format", "junit"),
    ):
        ran = gate.run(*words, cwd=released)
        assert ran.code == 0, f"{words}: {ran.stdout}{ran.stderr}"
    undecided = gate.run("show", PROVED, cwd=released)
    assert undecided.code == 3, undecided.stdout + undecided.stderr
    closed = gate.run("gate", *REGISTER, "--slot", "chat", "--stage", "offline-ci", cwd=released)
    assert closed.code == 3, closed.stdout + closed.stderr


@pytest.mark.full
def test_gate_rejects_changes_and_names_missing_packages(
    gate: Installation, released: Path
) -> None:
    assert gate.run("keygen", "-o", "other.key", cwd=released).code == 0
    assert gate.run(*CHECK, "--key", "other.key.pub", cwd=released).code == 4
    lacking = gate.run("compile", cwd=released)
    assert lacking.code == 2
    assert "the package torch is not installed" in lacking.stderr
    weights = bytearray((released / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (released / "model.safetensors").write_bytes(bytes(weights))
    ran = gate.run(*CHECK, *TRUST, cwd=released)
    assert ran.code == 4
    assert "checkpoint" in ran.stdout
