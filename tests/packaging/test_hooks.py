"""The pre-commit files are valid, need no network, and select the right files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pre_commit.clientlib import load_config, load_manifest

OFFERED = ".pre-commit-hooks.yaml"
OWN = ".pre-commit-config.yaml"


def test_both_hook_files_are_valid(repository: Path) -> None:
    load_config(repository / OWN)
    load_manifest(repository / OFFERED)


def test_own_hooks_are_local_and_install_nothing(repository: Path) -> None:
    config: dict[str, Any] = yaml.safe_load((repository / OWN).read_text(encoding="utf-8"))
    assert [entry["repo"] for entry in config["repos"]] == ["local"]
    assert {hook["language"] for hook in config["repos"][0]["hooks"]} == {"system"}


@pytest.mark.parametrize(
    ("path", "picked"),
    [
        ("a/b.kc.yaml", True),
        ("b.kc.yml", True),
        ("contract.yaml", True),
        ("examples/tiny_lm/contract.yaml", True),
        ("values.yaml", False),
        ("contract.yaml.txt", False),
        ("subcontract.yaml", False),
    ],
)
def test_published_hooks_select_contracts(repository: Path, path: str, picked: bool) -> None:
    hooks = {h["id"]: h for h in yaml.safe_load((repository / OFFERED).read_text("utf-8"))}
    assert {name: hook["entry"] for name, hook in hooks.items()} == {
        "kcdsl-lint": "kcdsl lint",
        "kcdsl-fmt": "kcdsl fmt",
        "kcdsl-certs": "kcdsl check",
    }
    for name in ("kcdsl-lint", "kcdsl-fmt"):
        assert bool(re.search(hooks[name]["files"], path)) is picked
    assert re.search(hooks["kcdsl-certs"]["files"], "out/verify-attn_0.cert.json")


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.mark.full
def test_hooks_run_in_a_project_with_contracts(repository: Path, tmp_path: Path) -> None:
    offered, project = tmp_path / "offered", tmp_path / "project"
    for folder in (offered, project):
        folder.mkdir()
        git(folder, "init", "-q")
    shutil.copy(repository / OFFERED, offered)
    git(offered, "add", ".")
    git(offered, "commit", "-qm", "hooks")
    (project / "good.kc.yaml").write_text(
        (repository / "examples" / "tiny_lm" / "contract.yaml").read_text(encoding="utf-8")
    )
    (project / "bad.kc.yaml").write_text("kcdsl:   1\nclauses: {}\n")
    git(project, "add", ".")
    environment = {
        **os.environ,
        "PRE_COMMIT_HOME": str(tmp_path / "cache"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }

    def hook(name: str, *files: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "pre_commit", "try-repo", str(offered), name]
        return subprocess.run(
            [*program, "--files", *files],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    assert hook("kcdsl-lint", "good.kc.yaml").returncode == 0
    failed = hook("kcdsl-lint", "bad.kc.yaml")
    assert failed.returncode == 1
    assert "KC109" in failed.stdout
    formatted = hook("kcdsl-fmt", "bad.kc.yaml")
    assert "files were modified by this hook" in formatted.stdout
    assert (project / "bad.kc.yaml").read_text() == "kcdsl: 1\nclauses: {}\n"
