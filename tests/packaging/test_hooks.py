"""The pre-commit files are valid, need no network, and pick the files they should."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pre_commit.clientlib import load_config, load_manifest

OFFERED = ".pre-commit-hooks.yaml"
OWN = ".pre-commit-config.yaml"


def test_both_files_are_valid(repository: Path) -> None:
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
def test_the_offered_hook_picks_contracts(repository: Path, path: str, picked: bool) -> None:
    (hook,) = yaml.safe_load((repository / OFFERED).read_text(encoding="utf-8"))
    assert hook["id"] == "kcdsl-lint"
    assert hook["entry"] == "kcdsl lint"
    assert bool(re.search(hook["files"], path)) is picked
