"""Reading reports and attributions that were written earlier."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import ATTRIBUTION_FILE, FILE_MISSING, REPORT_FILE, Code
from kcdsl.source.files import open_regular
from kcdsl.verdict.names import EXITS, WORST_FIRST, worst
from kcdsl.verdict.report import REPORT_SCHEMA

LARGEST = 2**28
"""Bytes of a document that are read."""
ATTRIBUTION_SCHEMA = "kcdsl.attribution/1"
_REPORT_FIELDS = {
    "verdict": str,
    "exit": int,
    "action": str,
    "health": dict,
    "contract": dict,
    "model": dict,
    "kernels": dict,
    "data": list,
    "environment": dict,
    "clauses": list,
    "slices": list,
    "prechecks": list,
    "crosschecks": list,
    "implied": list,
    "deferred": dict,
    "notes": list,
}


def read_report(path: Path) -> Mapping[str, Any]:
    """Return a report document.

    Raises Refusal (KC674) for what is no report of this version, and for one whose verdict or exit
    code is not that of its clauses.
    """
    document = _read(path, REPORT_FILE, REPORT_SCHEMA, "report.json as `kcdsl evaluate` wrote it")
    for name, kind in _REPORT_FIELDS.items():
        if not isinstance(document.get(name), kind):
            raise unusable(path, f"it has no usable field `{name}`")
    rows = document["clauses"]
    found = [row.get("verdict") if isinstance(row, dict) else None for row in rows]
    if not found or not all(name in WORST_FIRST for name in found):
        raise unusable(path, "its clauses have no usable verdicts")
    name = worst({str(one) for one in found})
    if document["verdict"] != name or document["exit"] != EXITS[name]:
        raise unusable(path, f"it says {document['verdict']!r}, its clauses say {name!r}")
    return document


def read_attribution(path: Path) -> Mapping[str, Any]:
    """Return an attribution document; raises Refusal (KC675) for what is none of this version."""
    advice = "the JSON that `kcdsl attribute` wrote"
    document = _read(path, ATTRIBUTION_FILE, ATTRIBUTION_SCHEMA, advice)
    for name in ("sources", "layers"):
        rows = document.get(name)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise _refused(path, ATTRIBUTION_FILE, f"it has no usable field `{name}`", advice)
    return document


def unusable(path: Path, why: str) -> Refusal:
    """Return the refusal of a report (KC674)."""
    return _refused(path, REPORT_FILE, why, "report.json as `kcdsl evaluate` wrote it")


def _read(path: Path, code: Code, schema: str, advice: str) -> dict[str, Any]:
    try:
        with open_regular(path) as stream:
            data = stream.read(LARGEST + 1)
    except FileNotFoundError:
        raise refuse(FILE_MISSING, f"there is no file {path}", help=f"give {advice}") from None
    except OSError as error:
        raise _refused(path, code, error.strerror or "it cannot be read", advice) from None
    if len(data) > LARGEST:
        raise _refused(path, code, f"it is larger than {LARGEST} bytes", advice)
    try:
        document = json.loads(data, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise _refused(path, code, "it is nested too deeply", advice) from None
    except ValueError as error:
        raise _refused(path, code, f"it is no JSON: {error}", advice) from None
    if not isinstance(document, dict) or document.get("schema") != schema:
        raise _refused(path, code, f"it is no document of the schema {schema}", advice)
    return document


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text} is too large")
    return value


def _refused(path: Path, code: Code, why: str, advice: str) -> Refusal:
    return refuse(code, f"{path} is not usable: {why}", help=f"give {advice}")
