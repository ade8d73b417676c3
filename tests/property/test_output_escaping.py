"""Commands print no terminal controls and no commands of build servers."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcdsl.diagnostics.codes import USAGE
from kcdsl.diagnostics.model import Diagnostic, Edit, Fix, Label
from kcdsl.diagnostics.render import FORMATS, Checked, LintRun, render
from kcdsl.diagnostics.render.terminal import json_for_terminals, one_line, printable
from kcdsl.diagnostics.spans import SourceFile, Span

if TYPE_CHECKING:
    from tests.conftest import Cli

EVIL = "\x1b[31m\x07\x9b2J\r\u202e\u2066\u2028\x85\x7f"
COMMAND = "\n::error file=a::b\n   ::stop-commands::x ##[error]y"
pieces = st.sampled_from([*EVIL, "::", "##[", "\n", "a", " ", "%0A", "é", "=", ",", "\t"])
texts = st.lists(pieces, max_size=12).map("".join)


def harmful(text: str) -> set[str]:
    """Return the terminal control characters of a text, except line ends."""
    bidirectional = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    kinds = {"Cc", "Zl", "Zp"}
    return {c for c in set(text) - {"\n"} if unicodedata.category(c) in kinds or c in bidirectional}


def commands_in(text: str) -> list[str]:
    """Return the lines of a text that the log of a build server treats as workflow commands."""
    return [line for line in text.splitlines() if line.lstrip().startswith("::") or "##[" in line]


@given(texts)
def test_escaped_texts_are_harmless(text: str) -> None:
    for function in (printable, one_line):
        assert not harmful(function(text))
        assert not commands_in(function(text))
        assert function(function(text)) == function(text)
    assert "\n" not in one_line(text)
    document = json.dumps([text], ensure_ascii=False)
    assert not harmful(json_for_terminals(document))
    assert json.loads(json_for_terminals(document)) == [text]


@given(message=texts, name=texts, note=texts, help=texts, label=texts, line=texts)
def test_renderers_print_harmless_text(
    message: str, name: str, note: str, help: str, label: str, line: str
) -> None:
    source = SourceFile(name.replace("\0", "") or "c.yaml", f"{line}abc\n")
    span = Span(len(line), len(line) + 1)
    fix = Fix(note or "fix", (Edit(span, label),))
    found = Diagnostic(
        USAGE, message, source, span, (Label(span, label),), (note,), help or None, fix=fix
    )
    run = LintRun(files=(Checked(source.name, ((label or "A", span),)),))
    for form in FORMATS:
        text = render([found], form, None, run)
        assert not harmful(text), form
        if form == "github":
            assert len(commands_in(text)) == 1
            assert len(text.splitlines()) == 1
        elif form in ("text", "concise"):
            assert not commands_in(text), form


CONTRACT = """\
kcdsl: 1
contract: hostile
version: 1.0.0
description: "\\e[31m\\x9b\\u202e\\n::error::x"
model: {checkpoint: "\\e[31m\\x9b\\u202e\\n::error::x", architecture: "\\e]0;\\n::error::x"}
kernels: {train: {run: torch.eager}, infer: {run: "\\e[2J\\n::error::x"}}
data: "\\u202e\\n::error::x.jsonl"
slices: {all: {where: 'category == "\\u2066"'}}
clauses:
  A: {require: "p99(kl) <= 1 \\e[31m\\n::error::x", slices: ["\\e[31m\\n::error::x"], level: L2}
  "\\e[31m\\n::error::x": {require: p99(kl) <= 1, slices: [all], level: L2}
"""
SOUND = """\
kcdsl: 1
contract: hostile
version: 1.0.0
model: {checkpoint: "a\\e[31m\\x9b\\u202e\\n::error::x", architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: "b\\u202e\\x9b\\n::error::x.jsonl"
slices: {all: {where: 'category == "\\u2066\\u202e"'}}
clauses:
  A: {require: p99(kl) <= 1, slices: [all], level: L2}
"""


@pytest.mark.parametrize("text", [CONTRACT, SOUND], ids=["unsound", "sound"])
def test_commands_print_hostile_names_escaped(cli: Cli, tmp_path: Path, text: str) -> None:
    folder = tmp_path / ("x" + COMMAND.replace("/", "") + EVIL.replace("\x85", ""))
    folder.mkdir()
    name = folder.name + ".kc.yaml"
    (folder / name).write_text(text)
    (folder / "contract.yaml").write_text(text)
    (folder / "other.yaml").write_text(SOUND.replace("<= 1", "<= 2"))
    (folder / "certificate.json").write_text(json.dumps({EVIL: EVIL, "a": COMMAND}))
    for words in (
        ("lint", "."),
        ("lint", "--format", "concise", name),
        ("lint", "--format", "github", name),
        ("lint", "--format", "json", name),
        ("lint", "--format", "sarif", name),
        ("lint", "--format", "junit", name),
        ("compile", name),
        ("fmt", "--check", "."),
        ("fmt", "--diff", name),
        ("diff", name, "other.yaml"),
        ("diff", "--format", "json", name, "other.yaml"),
        ("explain", "A", name),
        ("explain", COMMAND + EVIL),
        ("plan", name),
        ("config", "show"),
        ("keygen", "-o", folder.name + ".key"),
        ("check", "certificate.json", "--contract", name, "--key", folder.name + ".key.pub"),
        ("check", folder.name, "--contract", "contract.yaml", "--key", "nothing" + COMMAND),
        ("report", "certificate.json"),
        ("report", folder.name),
        ("sign", "certificate.json"),
        ("replay", "certificate.json", "--contract", name),
        ("verify", name),
        (COMMAND + EVIL,),
        ("lint", "--" + COMMAND + EVIL),
    ):
        ran = cli(*words, cwd=folder)
        said = ran.stdout + "\n" + ran.stderr
        assert not harmful(said), words
        github = "github" in words
        assert not [c for c in commands_in(said) if not (github and c.startswith("::"))], words
        if github:
            assert not any(line.startswith("::error::x") for line in said.splitlines())
