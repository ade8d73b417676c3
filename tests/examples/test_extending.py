"""examples/extending: each patch applies to this tree, and what it adds passes its tests."""

from __future__ import annotations

import re
import subprocess
from importlib import import_module
from pathlib import Path

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


def test_names_that_patches_import_exist() -> None:
    """A name that was changed in the tree shows here, without a run of the patched copy."""
    checked = 0
    for extension in EXTENSIONS:
        text = extension.patch.read_text(encoding="utf-8")
        found = re.findall(r"^\+from ((?:kcdsl|tests|bench)[\w.]*) import ([\w, ]+)$", text, re.M)
        for module, names in found:
            if any(file.endswith(f"{module.replace('.', '/')}.py") for file in extension.files):
                continue  # the patch adds or changes the module: its tests show what it holds
            for name in (part.split(" as ")[0].strip() for part in names.split(",")):
                assert hasattr(import_module(module), name), (extension.name, module, name)
                checked += 1
    assert checked > 10


@pytest.mark.full
@pytest.mark.parametrize("extension", EXTENSIONS, ids=lambda extension: extension.name)
def test_patched_tree_passes_the_tests_of_the_patch(extension: Extension) -> None:
    assert try_out(extension) == ""
