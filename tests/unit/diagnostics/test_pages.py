"""The page of each code: its form, and its executed examples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kcdsl.diagnostics.codes import all_codes, find
from kcdsl.diagnostics.model import Refusal
from kcdsl.diagnostics.pages import Page, page
from tests.support.pages import (
    agrees,
    blocks,
    consoles,
    forget_modules,
    found,
    names,
    prepare,
    provide,
    run_planted,
    sections,
    without_variation,
)

if TYPE_CHECKING:
    from tests.conftest import Cli


ALONG_WITH = {"KC905": {"KC203"}, "KC906": {"KC208"}}
"""Codes that accompany another: an ineffective suppression does not remove the finding."""


def the_page(name: str) -> Page:
    code = find(name)
    assert code is not None, f"{name} is no code"
    return page(code)


@pytest.mark.parametrize("name", names())
def test_form_of_a_page(name: str) -> None:
    code, read = find(name), the_page(name)
    assert code is not None
    assert read.text.partition("\n")[0] == f"# {code.id}: {code.title}"
    assert read.summary.endswith(".")
    assert sections(read.text)[:3] == ("Why is this bad", "Example", "Use instead")
    examples = list(blocks(read.text))
    kinds = [block.kind for block in examples if block.kind]
    assert "bad" in kinds
    assert "good" in kinds
    for block in examples:
        assert block.language in {"yaml", "file", "python", "console"}
        assert block.kind in {"bad", "good"} or block.language in {"file", "python"}
    prose = re.sub(r"^```.*?^```$", "", read.text, flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"^\s*(```|~~~)|^ {4,}|^\$ ", prose, re.MULTILINE)


@pytest.mark.parametrize("name", names())
def test_examples_of_contracts_report_their_code(name: str, tmp_path: Path) -> None:
    for block in blocks(the_page(name).text):
        if block.language != "yaml" or not block.kind:
            continue
        source, diagnostics = found(block.text, tmp_path)
        if block.kind == "good":
            assert [f"{d.code}: {d.message}" for d in diagnostics] == []
            continue
        assert [str(d.code) for d in diagnostics] == [name], [d.message for d in diagnostics]
        span = diagnostics[0].span
        assert span is not None
        assert block.at is not None, 'a bad contract says at="…"'
        assert source.text[span.start : span.end] == block.at


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", names())
def test_examples_of_commands_print_their_output(
    name: str, tmp_path: Path, cli: Cli, cli_process: Cli
) -> None:
    examples = list(blocks(the_page(name).text))
    provide(examples, tmp_path)
    for block in examples:
        if block.language == "python" and block.kind == "bad":
            with pytest.raises(Refusal) as refused:
                prepare(block, tmp_path)
            assert [str(d.code) for d in refused.value.diagnostics] == [name]
            continue
        prepare(block, tmp_path)
        if block.language != "console" or not block.kind:
            continue
        shown = ""
        for command in consoles(block.text):
            # Libraries read their environment variables once in a process.
            run = cli_process if command.environment else cli
            if block.planted is None:
                with forget_modules(tmp_path):
                    ran = run(*command.words, cwd=tmp_path, env=command.environment)
                printed = without_variation(ran.stdout + ran.stderr, block.varies)
            else:
                printed = run_planted(block.planted, command.words, tmp_path)
            expected = without_variation(command.output, block.varies)
            assert printed == expected or agrees(expected, printed), command.words
            shown += printed
        reported = set(re.findall(r"\b(?:error|warning|note)\[(KC\d+)\]", shown))
        assert reported == ({name} | ALONG_WITH.get(name, set()) if block.kind == "bad" else set())


def test_ellipsis_matches_only_as_documented() -> None:
    assert agrees("a … c\n", "a b c  \n")
    assert not agrees("a … c\n", "a b\nc\n")
    assert agrees("a\n…\nz\n", "a\nb\nc\nz\n")
    assert not agrees("a\n…\nz\n", "a\nb\n")
    assert not agrees("", "a\n")
    assert not agrees("a.c\n", "abc\n")


def test_rough_comparison_allows_only_fractions_to_differ() -> None:
    assert agrees("n 12 v  0.25 s\n", "n 12  v 0.5 s\n", roughly=True)
    assert agrees("v 2.5e-12\n", "v 2.2e-11\n", roughly=True)
    assert not agrees("v 2.5e-12\n", "v 2.3e-11\n", roughly=True)
    assert not agrees("v 2.5e-08\n", "v 7.6e-08\n", roughly=True)
    assert agrees("v 4.05e+03\n", "v 3.54e+03\n", roughly=True)
    assert not agrees("v 4.05e+03\n", "v 3.54e+04\n", roughly=True)
    assert not agrees("v 0.25\n", "v 0.5\n")
    assert not agrees("v 0.25\n", "v 0.8\n", roughly=True)
    assert not agrees("v 0.25\n", "v 0\n", roughly=True)
    assert not agrees("n 12\n", "n 13\n", roughly=True)
    assert not agrees("v 0.25 kept\n", "v 0.25 held\n", roughly=True)


def test_codes_and_pages_correspond() -> None:
    assert list(names()) == [code.id for code in all_codes()]
    assert len(names()) >= 130
