"""Each page of a code: its form, and its examples as they really are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kcdsl.diagnostics.codes import all_codes, find
from kcdsl.diagnostics.pages import Page, names, page
from tests.support.pages import consoles, found

if TYPE_CHECKING:
    from tests.conftest import Cli


def the_page(name: str) -> Page:
    code = find(name)
    assert code is not None, f"{name} is no code"
    read = page(code)
    assert read is not None
    return read


@pytest.mark.parametrize("name", names())
def test_the_form_of_a_page(name: str) -> None:
    code, read = find(name), the_page(name)
    assert code is not None
    assert read.heading == f"{code.id}: {code.title}"
    assert read.summary.endswith(".")
    assert read.sections[:3] == ("Why is this bad", "Example", "Use instead")
    kinds = [block.kind for block in read.blocks if block.kind]
    assert "bad" in kinds
    assert "good" in kinds


@pytest.mark.parametrize("name", names())
def test_examples_of_contracts(name: str, tmp_path: Path) -> None:
    for block in the_page(name).blocks:
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


@pytest.mark.parametrize("name", names())
def test_examples_of_commands(name: str, tmp_path: Path, cli: Cli) -> None:
    for block in the_page(name).blocks:
        if block.language == "file":
            assert block.name
            path = tmp_path / block.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "console" and block.kind:
            shown = ""
            for words, output in consoles(block.text):
                assert words[0] == "kcdsl"
                ran = cli(*words[1:], cwd=tmp_path)
                printed = ran.stdout + ran.stderr
                assert printed == output, words
                shown += printed
            assert (f"[{name}]" in shown) == (block.kind == "bad")


def test_there_are_pages_of_codes_only() -> None:
    assert set(names()) <= {code.id for code in all_codes()}
    assert len(names()) >= 10
