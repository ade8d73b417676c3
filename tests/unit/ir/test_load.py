"""Damaged stored programs are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kcdsl.check.compile import load_program
from kcdsl.check.stored import from_json, load_bytes
from kcdsl.diagnostics import Refusal
from kcdsl.ir.canonical import document, to_json

CORPUS = Path(__file__).resolve().parents[3] / "grammar" / "corpus"


@pytest.fixture
def stored() -> dict[str, Any]:
    """Return the JSON of an accepted contract that uses every construct."""
    return to_json(load_program(CORPUS / "accepted" / "statements.kc.yaml"))


def test_digest_of_a_stored_program_is_checked() -> None:
    program = load_program(CORPUS / "accepted" / "record-form.kc.yaml")
    data = document(program)
    assert to_json(load_bytes(data)) == to_json(program)
    forged = data.replace(b'"1/50"', b'"1/5"')
    assert forged != data
    with pytest.raises(Refusal, match="digest"):
        load_bytes(forged)
    for key in (b'"clauses":', b'"level":'):
        with pytest.raises(Refusal, match="given twice"):
            load_bytes(data.replace(key, key + b'"L1",' + key, 1))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"nonsense", b"\xff", b"[" * 100_000])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        load_bytes(data)
    assert caught.value.diagnostics[0].code.id == "KC607"


def _set(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        target: Any = document
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("schema", value="kcdsl.ir/2"),
        _set("clauses", value=None),
        _set("clauses", 0, "level", value="L9"),
        _set("clauses", 0, "family", value="N"),
        _set("clauses", 0, "require", value={"kind": "maybe"}),
        _set("clauses", 0, "require", "op", value="=<"),
        _set("constants", "temperature", value="1/0"),
        _set("constants", "temperature", value=0.7),
        _set("escalation", "by_level", value={}),
        _set("slices", 0, "where", value={"sometimes": []}),
        _set("name", value=3),
        lambda document: document.pop("kernels"),
    ],
)
def test_every_damage_is_refused(
    stored: dict[str, Any], change: Callable[[dict[str, Any]], Any]
) -> None:
    damaged = json.loads(json.dumps(stored))
    damaged["clauses"].sort(key=lambda c: c["id"] != "N-TURNED")
    from_json(damaged)
    change(damaged)
    with pytest.raises(Refusal) as caught:
        from_json(damaged)
    assert caught.value.diagnostics[0].code.id == "KC607"
