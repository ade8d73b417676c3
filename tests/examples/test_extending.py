"""examples/extending: each patch applies to this tree, and what it adds passes its tests."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from importlib import import_module
from pathlib import Path, PurePath

import pytest

from examples.extending.run import Extension, extensions, try_out

EXTENSIONS = extensions()
MOST = {
    "adapter": (2, 1),
    "architecture": (1, 2),
    "format": (3, 1),
    "metric": (1, 1),
    "operation": (4, 1),
}
"""The largest number of files that an addition may change: in the product, and in the tests."""


def test_every_patch_has_a_size_limit() -> None:
    assert {extension.name for extension in EXTENSIONS} == set(MOST)


@pytest.mark.parametrize("extension", EXTENSIONS, ids=lambda extension: extension.name)
def test_patch_touches_few_files_and_names_its_tests(extension: Extension) -> None:
    tests = sum(file.startswith("tests/") for file in extension.files)
    product, own = MOST[extension.name]
    assert 0 < len(extension.files) - tests <= product
    assert tests <= own
    assert extension.tests


@pytest.mark.parametrize("extension", EXTENSIONS, ids=lambda extension: extension.name)
def test_patch_applies_to_this_tree(extension: Extension, repository: Path) -> None:
    command = ["git", "apply", "--check", str(extension.patch)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("extension", EXTENSIONS, ids=lambda extension: extension.name)
def test_patched_tree_passes_the_tests_of_the_patch(extension: Extension) -> None:
    assert try_out(extension) == ""


def is_there(module: str, name: str) -> bool:
    """Return whether a module of this tree has a name, or a module of it."""
    with suppress(ImportError):
        return hasattr(import_module(module), name) or bool(import_module(f"{module}.{name}"))
    return False


@pytest.mark.parametrize("extension", EXTENSIONS, ids=lambda extension: extension.name)
def test_names_that_a_patch_imports_exist(extension: Extension) -> None:
    """A patch is no module that type checkers read: a name that was changed shows here at once."""
    added = "\n".join(
        line.removeprefix("+")
        for line in extension.patch.read_text(encoding="utf-8").splitlines()
        if line.startswith("+") and not line.startswith("+++")
    )
    found = re.findall(r"^from ((?:kcdsl|bench|tests)[\w.]*) import (\([^)]*\)|.*)$", added, re.M)
    own = {PurePath(file).stem for file in extension.files}
    lacking = [
        f"{module}.{name}"
        for module, names in found
        if module.rpartition(".")[2] not in own
        for name in re.findall(r"\w+", names)
        if not is_there(module, name)
    ]
    assert lacking == []
