"""The front end starts fast because it imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.release_scenes import released

HEAVY = ("torch", "numpy", "z3", "onnx", "scipy", "safetensors", "tokenizers", "cryptography")
CORPUS = Path(__file__).resolve().parents[2] / "grammar" / "corpus"
PROGRAM = """
import sys
from kcdsl.cli import main
code = main(sys.argv[2:])
heavy = [name for name in sys.argv[1].split(",") if name in sys.modules]
print("imported:", ",".join(heavy), file=sys.stderr)
sys.exit(code)
"""


def imported(
    forbidden: tuple[str, ...], *words: str, folder: Path | None = None
) -> tuple[int, list[str]]:
    """Run a command in a new process; return its exit code and the imported forbidden modules."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(forbidden), *words],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        cwd=folder,
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("imported:"), done.stderr
    return done.returncode, [
        name for name in last.removeprefix("imported:").strip().split(",") if name
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--help",), 0),
        (("compile", "--help"), 0),
        (("verify", "--help"), 0),
        (("evaluate", "--help"), 0),
        (("check", "--help"), 0),
        (("lsp", "--help"), 0),
        (("lint", str(CORPUS / "accepted" / "statements.kc.yaml")), 0),
        (("lint", str(CORPUS / "rejected" / "unknown-metric.kc.yaml")), 1),
        (("compile", str(CORPUS / "accepted" / "example.kc.yaml")), 0),
        (("compile", "--emit", "ir", str(CORPUS / "accepted" / "example.kc.yaml")), 0),
        (("compile", "--emit", "smtlib", str(CORPUS / "accepted" / "example.kc.yaml")), 0),
        (("lint", str(CORPUS / "accepted" / "imports.kc.yaml")), 0),
        (("lint", str(CORPUS / "accepted" / "tables.kc.yaml")), 0),
        (("explain", "KC203"), 0),
        (("backends",), 0),
    ],
)
def test_nothing_heavy_is_imported(words: tuple[str, ...], code: int) -> None:
    assert imported(HEAVY, *words) == (code, [])


def test_lint_needs_no_table_printer() -> None:
    path = str(CORPUS / "accepted" / "statements.kc.yaml")
    assert imported(("rich", "jsonschema", "rfc8785"), "lint", path) == (0, [])


def test_explain_works_without_the_language_server_extra() -> None:
    """The packages of the language server belong to an extra."""
    assert imported(("lsprotocol", "pygls"), "explain", "kl") == (0, [])


def test_unused_features_are_not_imported(tmp_path: Path) -> None:
    text = (CORPUS / "accepted" / "example.kc.yaml").read_text(encoding="utf-8")
    text = text.replace("slices:", "data: refusals.jsonl\nslices:", 1)
    (tmp_path / "contract.yaml").write_text(text, encoding="utf-8")
    for name in ("model.safetensors", "refusals.jsonl"):
        (tmp_path / name).touch()
    idle = ("difflib", "hashlib", "json", "xml", "tomllib", "kcdsl.diagnostics.pages")
    assert imported(idle, "lint", str(tmp_path / "contract.yaml"), folder=tmp_path) == (0, [])


@pytest.mark.full
def test_check_imports_neither_threads_nor_unused_features(tmp_path: Path) -> None:
    made = released(tmp_path)
    idle = (
        *("concurrent.futures", "logging", "rich", "sqlalchemy", "alembic"),
        *("difflib", "subprocess", "tomllib", "_strptime", "kcdsl_certs.encoding.onnx"),
        *(f"kcdsl_certs.statement.{name}" for name in ("kernel_class", "register_head")),
        *("kcdsl_certs.statement.transfer", "kcdsl_certs.verification.transfers"),
        *(name for name in HEAVY if name != "cryptography"),
    )
    words = ("check", str(made.certificate), "--key", "one.key.pub")
    assert imported(idle, *words, folder=made.folder) == (0, [])


@pytest.mark.full
def test_compile_reads_a_checkpoint_without_the_compiler_of_torch(repository: Path) -> None:
    folder = str(repository / "examples" / "tiny_lm")
    assert imported(("torch.nn", "torch._dynamo", "scipy"), "compile", folder) == (0, ["torch.nn"])


def test_heavy_import_is_detected() -> None:
    assert imported(
        ("kcdsl.syntax", "yaml"), "lint", str(CORPUS / "accepted" / "statements.kc.yaml")
    )[1] == ["kcdsl.syntax", "yaml"]


@pytest.mark.parametrize(("call", "left"), [("main()", "True"), ("main(['--version'])", "False")])
def test_exit_of_a_process_skips_garbage_collection(call: str, left: str) -> None:
    program = (
        "import atexit, gc, sys\n"
        "before = gc.get_freeze_count()\n"  # not 0 in Python 3.12
        "atexit.register(lambda: print(gc.get_freeze_count() > before))\n"
        "from kcdsl.cli import main\n"
        f"sys.exit({call})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--version"],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == left
