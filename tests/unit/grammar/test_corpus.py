"""Every document of the corpus compiles, or is refused with the expected code and position."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from kcdsl.check.stored import load_bytes
from kcdsl.diagnostics import Severity
from kcdsl.diagnostics.codes import all_codes
from kcdsl.ir.canonical import digest, document, to_json
from kcdsl.route.router import route
from kcdsl_grammar import text
from tests.support.compiling import compile_contract

CORPUS = Path(__file__).resolve().parents[3] / "grammar" / "corpus"
ACCEPTED = sorted(CORPUS.glob("accepted/*.kc.yaml"))
REJECTED = sorted(CORPUS.glob("rejected/*.kc.yaml"))
EXPECT = re.compile(r"# expect: (KC\d{3}) (\d+):(\d+)\n")


def name(path: Path) -> str:
    return path.name.removesuffix(".kc.yaml")


def test_corpus_is_not_empty() -> None:
    assert len(ACCEPTED) >= 6
    assert len(REJECTED) >= 80


@pytest.mark.parametrize("path", ACCEPTED, ids=name)
def test_valid_documents_compile(path: Path) -> None:
    program, sink = compile_contract(path)
    assert [d.message for d in sink if d.severity is Severity.ERROR] == []
    assert program is not None
    assert program.clauses
    assert {r.clause_id for r in route(program)} == {c.id for c in program.clauses}


@pytest.mark.parametrize("path", ACCEPTED, ids=name)
def test_accepted_documents_round_trip_through_the_stored_form(path: Path) -> None:
    program, _ = compile_contract(path)
    assert program is not None
    stored = document(program)
    jsonschema.Draft7Validator(json.loads(text("ir.schema.json"))).validate(json.loads(stored))
    again = load_bytes(stored)
    assert to_json(again) == to_json(program)
    assert digest(again) == digest(program)


@pytest.mark.parametrize("path", REJECTED, ids=name)
def test_invalid_documents_report_their_code(path: Path) -> None:
    first = EXPECT.match(path.read_text(encoding="utf-8"))
    assert first is not None, "the first line says what is expected"
    program, sink = compile_contract(path)
    assert program is None
    errors = [d for d in sink if d.severity is Severity.ERROR]
    found = []
    for diagnostic in errors:
        assert diagnostic.source is not None
        assert diagnostic.span is not None
        at = diagnostic.source.position(diagnostic.span.start)
        found.append((diagnostic.code.id, at.line, at.column))
    assert found == [(first[1], int(first[2]), int(first[3]))]


def test_every_code_of_the_front_end_is_in_the_corpus() -> None:
    families = ("KC0", "KC1", "KC2", "KC3", "KC5")
    declared = {c.id for c in all_codes() if c.id.startswith(families)}
    shown = {EXPECT.match(p.read_text(encoding="utf-8"))[1] for p in REJECTED}  # type: ignore[index]
    elsewhere = {
        "KC008",  # not UTF-8: tests/unit/source/test_files.py
        "KC011",  # too large: the same
        "KC012",  # nested too deeply: tests/unit/source/test_yaml_nodes.py
        "KC013",  # empty document: the same
        "KC015",  # a note: tests/unit/source/test_masking.py
        "KC208",  # a warning: tests/unit/check/test_clauses.py
        "KC123",  # needs a library that imports itself: tests/unit/check/test_imports.py
        "KC124",  # a warning: the same
        "KC125",  # of commands: the same
        "KC215",  # a warning: tests/unit/check/test_policy.py
        "KC216",  # a warning: tests/unit/check/test_bounds.py
        "KC218",  # in Python files: tests/unit/check/test_user_metrics.py
        "KC219",  # the same
        "KC220",  # the same
        "KC232",  # a warning: tests/unit/check/test_tables.py
        "KC233",  # a warning: tests/unit/check/test_policy.py
        "KC234",  # a warning: tests/unit/check/test_trace_fields.py
    }
    ours = {code for code in declared - shown - elsewhere if code < "KC510"}
    assert ours == set()


def _plain(path: Path) -> object | None:
    """Read a document as other tools do; None if only kcdsl can read it."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError:
        return None


@pytest.mark.parametrize("path", ACCEPTED, ids=name)
def test_accepted_documents_follow_the_json_schema(path: Path) -> None:
    document = _plain(path)
    if document is None:
        assert name(path) == "example", "documents should be plain YAML where they can be"
        return
    jsonschema.Draft7Validator(json.loads(text("contract.schema.json"))).validate(document)


BEYOND_THE_SCHEMA = {"two-tables", "escalation-row-twice", "escalation-row-twice-the-same"}
STRUCTURAL = {"KC101", "KC102", "KC104", "KC106", "KC109", "KC105", "KC456"}


@pytest.mark.parametrize("path", REJECTED, ids=name)
def test_json_schema_refuses_structural_errors(path: Path) -> None:
    expected = EXPECT.match(path.read_text(encoding="utf-8"))
    assert expected is not None
    document = _plain(path)
    if expected[1] not in STRUCTURAL or document is None or name(path) in BEYOND_THE_SCHEMA:
        return
    validator = jsonschema.Draft7Validator(json.loads(text("contract.schema.json")))
    assert list(validator.iter_errors(document)) != []
