"""Checking certificates needs only the standard library, cryptography and rfc8785."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import json, sys
from kcdsl_certs.__main__ import main
code = main(sys.argv[1:])
roots = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({"code": code, "roots": roots}), file=sys.stderr)
"""
_FOREIGN = {
    "torch", "numpy", "z3", "lark", "yaml", "rich", "scipy", "onnx", "safetensors", "kcdsl",
    "kcdsl_backends", "kcdsl_grammar",
}  # fmt: skip


def test_standalone_checker_imports_nothing_heavy(vectors_folder: Path) -> None:
    words = ["check", "valid.cert.json", "--expect", "expectation.json", "--key", "a.pub"]
    words += ["--checkpoint", "model.safetensors", "--at", "2026-12-01T00:00:00Z", "--complete"]
    words += ["--data", "."]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *words],
        cwd=vectors_folder,
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stderr)
    assert told["code"] == 0
    assert _FOREIGN & set(told["roots"]) == set()
    third = {
        name
        for name in set(told["roots"]) - set(sys.stdlib_module_names)
        if not name.startswith("_")
    }
    assert {"kcdsl_certs", "cryptography", "rfc8785"} <= third


@pytest.mark.full
def test_module_runs_and_returns_exit_codes(vectors_folder: Path, tmp_path: Path) -> None:
    def run(certificate: str, key: str = "a.pub", **changes: str) -> int:
        options = {
            "--expect": "expectation.json",
            "--checkpoint": "model.safetensors",
            "--at": "2026-12-01T00:00:00Z",
            **{f"--{name}": value for name, value in changes.items()},
        }
        words = [word for pair in options.items() for word in pair]
        done = subprocess.run(
            [sys.executable, "-m", "kcdsl_certs", "check", certificate, "--key", key, *words],
            cwd=vectors_folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Traceback" not in done.stderr
        return done.returncode

    link = tmp_path / "model.safetensors"
    link.symlink_to(vectors_folder / "model.safetensors")
    assert run("valid.cert.json") == 0
    assert run("signature-changed.cert.json") == 4
    assert run("valid.cert.json", checkpoint=str(link)) == 4
    assert run("valid.cert.json", checkpoint="a.pub") == 4
    assert run("valid.cert.json", checkpoint="nowhere") == 2
    assert run("nowhere.cert.json") == 2
    assert run("valid.cert.json", key="expectation.json") == 2
    assert run("valid.cert.json", expect="a.pub") == 2
    assert run("valid.cert.json", expect="valid.cert.json") == 2
    assert run("valid.cert.json", at="yesterday") == 2
    assert run("valid.cert.json", threshold="0") == 2
    assert run("valid.cert.json", stage="nonsense") == 2
