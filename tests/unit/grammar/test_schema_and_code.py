"""The JSON schema, the language reference and the code list the same names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kcdsl.check.expressions.fields import TRACE_FIELDS
from kcdsl.check.expressions.names import FUNCTIONS
from kcdsl.check.sections.clauses import FAMILIES
from kcdsl.check.sections.fields import (
    IMPORT_FIELDS,
    KERNEL_FIELDS,
    ROLES,
    ROW_FIELDS,
    SLICE_FIELDS,
    TABLE_FIELDS,
)
from kcdsl.check.sections.sources import LOGPROBS_FIELDS, RECORDED, SERVERS, VALUES
from kcdsl.check.sections.structure import CLAUSE_FIELDS, LIBRARY_SECTIONS, SECTIONS
from kcdsl.ir.escalation import ACTIONS, ALIASES
from kcdsl.ir.terms import EvidenceKind, Level
from kcdsl.metrics import METRICS, RECORD_NAMES
from kcdsl.model import registry
from kcdsl.model.adapters import ADAPTERS, preset_of
from kcdsl.units import UNITS
from kcdsl_grammar import text

REFERENCE = (Path(__file__).resolve().parents[3] / "grammar" / "README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """Return the JSON schema of contracts."""
    loaded: dict[str, Any] = json.loads(text("contract.schema.json"))
    return loaded


@pytest.mark.parametrize("name", ["contract.schema.json", "ir.schema.json", "training.schema.json"])
def test_schemas_are_valid_json_schemas(name: str) -> None:
    jsonschema.Draft7Validator.check_schema(json.loads(text(name)))


def test_schema_lists_the_names_of_the_code(schema: dict[str, Any]) -> None:
    definitions = schema["definitions"]
    clause = definitions["clause"]["properties"]
    assert set(definitions["contract"]["properties"]) == set(SECTIONS)
    assert set(definitions["library"]["properties"]) == set(LIBRARY_SECTIONS)
    for name in ("contract_imports", "library_imports"):
        assert set(definitions[name]["items"]["properties"]) == set(IMPORT_FIELDS)
    roles = definitions["contract_imports"]["items"]["properties"]["kernels"]["properties"]
    assert list(roles) == list(definitions["contract"]["properties"]["kernels"]["properties"])
    assert tuple(roles) == ROLES
    table = definitions["tables"]["additionalProperties"]["properties"]
    assert set(table) == set(TABLE_FIELDS)
    assert set(table["rows"]["items"]["properties"]) == set(ROW_FIELDS)
    assert table["unit"]["enum"] == [*UNITS, 1]
    assert set(definitions["slices"]["additionalProperties"]["properties"]) == set(SLICE_FIELDS)
    assert set(clause) == {*CLAUSE_FIELDS, "id"}
    assert set(definitions["action"]["enum"]) == {*ACTIONS, *ALIASES}
    assert set(definitions["family"]["enum"]) == set(FAMILIES)
    assert definitions["kernel"]["properties"]["run"]["enum"] == list(ADAPTERS)
    assert definitions["model"]["properties"]["architecture"]["enum"] == list(registry.names())
    assert clause["level"]["enum"] == list(Level.__members__)
    assert clause["evidence"]["enum"] == [kind.value for kind in EvidenceKind]


def test_every_adapter_with_default_numerics_has_a_preset() -> None:
    assert {*SERVERS, *RECORDED} == {run for run in ADAPTERS if preset_of(run) is None}


def test_schema_lists_the_fields_of_kernels(schema: dict[str, Any]) -> None:
    kernel = schema["definitions"]["kernel"]["properties"]
    assert set(kernel) == set(KERNEL_FIELDS)
    logprobs = kernel["logprobs"]["properties"]
    assert set(logprobs) == set(LOGPROBS_FIELDS)
    assert logprobs["values"]["enum"] == list(VALUES)


@pytest.mark.parametrize(
    "name",
    [
        *METRICS, *RECORD_NAMES, *FUNCTIONS, *ACTIONS, *ADAPTERS,
        *registry.names(),
        *SECTIONS, *LIBRARY_SECTIONS, *IMPORT_FIELDS, *TABLE_FIELDS, *ROW_FIELDS,
        *CLAUSE_FIELDS, *UNITS, *TRACE_FIELDS, *(kind.value for kind in EvidenceKind),
    ],
)  # fmt: skip
def test_language_reference_names_everything(name: str) -> None:
    code = " ".join(re.findall(r"`([^`]+)`|^```.*?^```", REFERENCE, re.MULTILINE | re.DOTALL))
    assert re.search(rf"(?<![\w.]){re.escape(name)}(?![\w])", code), name
