"""The import layers of the four packages hold, and the check can fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = {
    "kcdsl": "kcdsl",
    "kcdsl_grammar": "grammar/kcdsl_grammar",
    "kcdsl_backends": "backends/kcdsl_backends",
    "kcdsl_certs": "certs/kcdsl_certs",
}
LINT = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint_imports(root: Path, path: list[Path]) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the packages found on `path`, with the configuration in `root`."""
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache", "--no-logo"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_layers_hold(repository: Path) -> None:
    roots = [(repository / folder).parent for folder in PACKAGES.values()]
    done = lint_imports(repository, roots)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("kcdsl_certs", "kcdsl"),
        ("kcdsl_certs", "kcdsl_grammar"),
        ("kcdsl_certs", "kcdsl_backends"),
        ("kcdsl_grammar", "kcdsl"),
        ("kcdsl", "kcdsl_backends"),
        ("kcdsl_certs", "torch"),
        ("kcdsl_certs", "z3"),
        ("kcdsl_certs", "scipy"),
        ("kcdsl_grammar", "lark"),
    ],
)
def test_planted_import_is_found(
    tmp_path: Path, repository: Path, package: str, forbidden: str
) -> None:
    shutil.copy(repository / "pyproject.toml", tmp_path)
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / package / "planted.py").write_text(f"import {forbidden}\n")
    done = lint_imports(tmp_path, [tmp_path])
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{package}.planted -> {forbidden}" in done.stdout


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("kcdsl_certs", {"numpy", "torch", "kcdsl", "lark", "yaml", "rich"}),
        ("kcdsl_certs.verification.verify", {"numpy", "torch", "kcdsl", "lark", "yaml", "rich"}),
        ("kcdsl_grammar", {"numpy", "torch", "kcdsl", "lark", "yaml", "rich"}),
        ("kcdsl_backends", {"numpy", "torch", "z3", "scipy"}),
        ("kcdsl.cli", {"numpy", "torch", "z3", "scipy", "onnx", "rich"}),
    ],
)
def test_packages_import_no_unneeded_modules(module: str, absent: set[str]) -> None:
    script = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert module in loaded
    assert not loaded & absent
