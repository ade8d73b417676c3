"""Names in the documentation exist: modules, attributes, files, options and schemas."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kcdsl.cli.commands import COMMANDS
from tests.support.commands import run_here

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = {
    "kcdsl": "kcdsl",
    "kcdsl_backends": "backends/kcdsl_backends",
    "kcdsl_certs": "certs/kcdsl_certs",
    "kcdsl_grammar": "grammar/kcdsl_grammar",
    "bench": "bench",
    "tests": "tests",
}
"""The folder of each import package."""
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
DOTTED = re.compile(r"^(?:kcdsl|kcdsl_\w+|bench|tests)(?:\.\w+)+(?=$|\()")
PLACE = re.compile(r"^(?:\w+/)+[\w.-]*$")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
SCHEMA = re.compile(r"^kcdsl\.[a-z-]+/\d+$")

NO_MODULES = {
    "kcdsl.toml": "a file",
    "kcdsl.backends": "a group of entry points",
    "kcdsl.adapters": "a group of entry points",
    "kcdsl.slices": "a key in Parquet files",
    "kcdsl.trace": "a key in Parquet files",
    "kcdsl.digest": "a key in Parquet files",
    "kcdsl.verify": "a command of the language server",
    "kcdsl.evaluate": "a command of the language server",
    "kcdsl.explain": "a command of the language server",
    "kcdsl.lua": "a file",
}
OTHERS = {
    "CONTRIBUTING.md": {"kcdsl/diagnostics/pages/KCnnn.md"},
    "docs/explanation/comparison.md": {
        "beta_crown.py", "bound_multi_gpu.py", "docs/comparison.md", "docs/glossary.md",
        "docs/why.md", "tests/test_parser_error.py"
    },
    "docs/reference/lint.md": {"kcdsl/kcdsl.toml"},
    "docs/reference/numerics.md": {"quant_utils.py", "quant_primitives.py"},
    "docs/reference/verify.md": {"kcdsl/certifier"},
    "grammar/README.md": {"metrics.py"},
}  # fmt: skip
"""Files of users and of other projects, by page."""
WRITTEN = ("bench/results/", "out/", "dist/", "build/")
"""Files that commands write."""
OTHER_OPTIONS = {
    "--count", "--seed", "--within", "--only", "--jobs", "--modules", "--write", "--share",
    "--resume", "--list", "--tokens", "--block", "--random",
    "--no-deps", "--no-build-isolation", "--prefix", "--import-mode",
    "--insecure-ignore-tlog", "--public-key-id", "--verified-level", "--attestation",
    "--type", "--bundle", "--logprobs-mode", "--model-path", "--strict",
    "--save-debug-rollout-data", "--save-debug-train-data",
}  # fmt: skip
"""Options of pip, pytest, mypy, cosign, slsa-verifier, servers and the programs of bench/."""


@cache
def pages() -> dict[str, str]:
    """Return the text of each page without its fenced blocks."""
    found = {
        *REPOSITORY.glob("*.md"),
        *REPOSITORY.glob("docs/[!s]*/*.md"),
        REPOSITORY / "docs" / "README.md",
        *REPOSITORY.glob("examples/*/README.md"),
        *REPOSITORY.glob("kcdsl/diagnostics/pages/*.md"),
        *(REPOSITORY / folder / "README.md" for folder in ("backends", "certs", "grammar")),
    }
    return {
        path.relative_to(REPOSITORY).as_posix(): FENCE.sub("", path.read_text(encoding="utf-8"))
        for path in sorted(found)
    }


@cache
def names_of(path: Path) -> frozenset[str]:
    """Return the names that a module defines or imports, with attributes of its classes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=asname):
                found.add(asname or name)
    return frozenset(found)


def resolves(dotted: str) -> bool:
    """Return whether a dotted name is a module, or a name in one."""
    first, *rest = dotted.split(".")
    place = REPOSITORY / ROOTS[first]
    while rest and (place / rest[0]).is_dir():
        place /= rest.pop(0)
    if rest and (place / f"{rest[0]}.py").is_file():
        module = place / f"{rest.pop(0)}.py"
    else:
        module = place / "__init__.py"
    return not rest or (module.is_file() and set(rest) <= names_of(module))


def exists(place: str) -> bool:
    """Return whether a path exists, relative to the repository or to a package."""
    roots = ("", "backends", "certs", "grammar", "kcdsl", "backends/kcdsl_backends")
    return place.startswith(WRITTEN) or any((REPOSITORY / root / place).exists() for root in roots)


@cache
def options() -> frozenset[str]:
    """Return the options of all commands, and of the stand-alone checker."""
    shown = [run_here(name, "--help", cwd=REPOSITORY).stdout for name in COMMANDS]
    checker = [sys.executable, "-m", "kcdsl_certs", "check", "--help"]
    shown.append(subprocess.run(checker, capture_output=True, encoding="utf-8", check=True).stdout)
    return frozenset(OTHER_OPTIONS.union({"--version"}, *map(OPTION.findall, shown)))


@cache
def file_names() -> frozenset[str]:
    """Return the names of the Python files of the repository."""
    return frozenset(
        path.name
        for root in (*ROOTS.values(), "examples")
        for path in (REPOSITORY / root).rglob("*.py")
    )


def unresolved(page: str, text: str) -> list[str]:
    """Return the names on a page that do not exist."""
    bad = []
    folders = {*ROOTS, "docs", "examples", "grammar", "backends", "certs"}
    for span in SPAN.findall(text):
        if span in NO_MODULES or span in OTHERS.get(page, ()):
            continue
        if found := DOTTED.match(span):
            known = resolves(found.group())
        elif PLACE.match(span) and span.split("/")[0] in folders:
            known = exists(span)
        else:
            known = not re.fullmatch(r"\w+\.py", span) or span in file_names()
        if not known:
            bad.append(span)
        if not page.startswith("docs/adr/"):  # a decision record may name what it deletes
            bad += [option for option in OPTION.findall(span) if option not in options()]
    return bad


@pytest.mark.parametrize("page", pages())
def test_names_on_pages_exist(page: str) -> None:
    assert unresolved(page, pages()[page]) == []


def test_schemas_named_on_pages_exist(schemas: dict[str, dict[str, Any]]) -> None:
    fixed = {"kcdsl.triple/1", "kcdsl.checkpoint-manifest/1", "kcdsl.kernel-fingerprint/2"}
    known = {*schemas, *fixed}
    for page, text in pages().items():
        named = {span for span in SPAN.findall(text) if SCHEMA.match(span)}
        assert named <= known, page


@pytest.mark.parametrize(
    "text",
    [
        "`kcdsl.ir.nothing`",
        "`kcdsl.ir.terms.Nothing`",
        "`kcdsl_certs.recheck.nothing()`",
        "`tests/unit/test_nothing.py`",
        "`test_nothing.py`",
        "`docs/nothing.md`",
        "`kcdsl verify --nothing`",
    ],
)
def test_unknown_name_is_found(text: str) -> None:
    assert len(unresolved("page.md", text)) == 1


def test_valid_names_resolve() -> None:
    text = "`kcdsl.ir.terms` `kcdsl_certs.recheck` `kcdsl/exits.py` `test_names.py` `--block`"
    assert unresolved("page.md", text) == []
