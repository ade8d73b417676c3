"""The report of an evaluation, read and written: the results of all clauses, and their context.

Plain frozen data, JSON with the schema "kcdsl.report/3" (`report.schema.json`) and nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import ATTRIBUTION_FILE, FILE_MISSING, REPORT_FILE, Code
from kcdsl.exits import Exit
from kcdsl.source.files import open_regular
from kcdsl.verdict.health import Health
from kcdsl.verdict.model import EXITS, WORST_FIRST, verdict_name, worst
from kcdsl.verdict.records import DocumentRecord, Record
from kcdsl.verdict.result import ClauseResult
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import loose_load

REPORT_SCHEMA = "kcdsl.report/3"


@dataclass(frozen=True, slots=True)
class Statistics(Record):
    """The error levels of sampled results.

    False passes and false violations each have a probability of at most `error`, over all the
    planned `looks` at growing data together (None: any number of looks). A single limit at one look
    has the error `limit_error`. Passes need no correction, since all clauses must hold. Violations
    share the error among the `sampled` results by Holm's method, since any of them counts; the last
    one has `violation_error`.
    """

    error: float = 0.05
    looks: int | None = 1
    limit_error: float = 0.05
    sampled: int = 0
    violation_error: float = 0.05

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        methods = {"passes": "intersection-union", "violations": "holm"}
        return Record.to_json(self) | methods


@dataclass(frozen=True, slots=True)
class Precheck(Record):
    """One precondition: `outcome` is "passed", "failed" or "not_applicable"."""

    name: str
    outcome: str
    detail: str
    value: float | None = None
    blocking: bool = False


@dataclass(frozen=True, slots=True)
class CrossCheck(Record):
    """Measured block drift and the certified bound for the claimed numerics, each the largest over
    the requests; `tightness` is the least certified / measured over the requests."""

    block: str
    requests: int
    measured: float
    certified: float
    tightness: float | None
    request: str


@dataclass(frozen=True, slots=True)
class ImpliedClause(Record):
    """A clause on a slice that follows once the drift clause `by` is proved; `chain` is one step
    per line."""

    clause: str
    slice: str
    by: str
    chain: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClauseWarning(Record):
    """A warning about a clause on a slice, with its diagnostic code."""

    code: str
    clause: str
    slice: str
    message: str


@dataclass(frozen=True, slots=True)
class SliceSummary(Record):
    """Statistics of the common drift metrics on a slice, independent of the clauses."""

    slice: str
    requests: int
    tokens: int
    statistics: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Report(DocumentRecord):
    """The results of one evaluation."""

    schema: ClassVar[str] = REPORT_SCHEMA

    contract: Mapping[str, str]
    """name, version, digest (sha256 of the canonical contract)."""
    model: Mapping[str, Any]
    kernels: Mapping[str, Mapping[str, Any]]
    """train and infer, each with `run`, `fingerprint` and `digest`."""
    data: tuple[Mapping[str, Any], ...]
    """The request files: name, sha256, rows."""
    environment: Mapping[str, Any]
    """Versions, device, seed, confidence."""
    clauses: tuple[ClauseResult, ...]
    slices: tuple[SliceSummary, ...]
    prechecks: tuple[Precheck, ...]
    crosschecks: tuple[CrossCheck, ...]
    implied: tuple[ImpliedClause, ...]
    deferred: Mapping[str, str]
    """Clauses, or a clause on a slice, that this evaluation does not decide, with the reason."""
    health: Health
    action: str
    notes: tuple[str, ...] = field(default=())
    statistics: Statistics = Statistics()
    warnings: tuple[ClauseWarning, ...] = ()
    bounding: Mapping[str, Any] = field(default_factory=dict)
    """The numerics of the certified bounds of the whole model, or why there are none."""
    charts: Mapping[str, Any] = field(default_factory=dict)
    """The data of the charts: plain JSON of bounded size."""

    @property
    def verdict(self) -> str:
        """Return violated, else invalid_evidence, else inconclusive, else held."""
        return overall(self.clauses)[0]

    @property
    def exit(self) -> Exit:
        """Return the exit code of the worst verdict."""
        return overall(self.clauses)[1]

    def to_json(self) -> dict[str, Any]:
        """Return the document "kcdsl.report/3"."""
        head = {"schema": self.schema, "verdict": self.verdict, "exit": int(self.exit)}
        return head | Record.to_json(self)


def deferred_name(clause: str, slice: str | None) -> str:
    """Return the key in `deferred` of a clause, or of one slice of it."""
    return clause if slice is None else f"{clause} on {slice}"


def not_decided(deferred: Mapping[str, str]) -> str:
    """Return a sentence about the deferred clauses; empty where there are none."""
    if not deferred:
        return ""
    return (
        f"not the verdict of the contract: {', '.join(deferred)} "
        f"{'is' if len(deferred) == 1 else 'are'} not decided here; `kcdsl status` joins the "
        "results of `kcdsl verify` and `kcdsl evaluate`"
    )


def overall(clauses: Sequence[ClauseResult]) -> tuple[str, Exit]:
    """Return the worst verdict over all clauses, and its exit code; without clauses it is
    invalid_evidence."""
    name = worst({verdict_name(clause.verdict) for clause in clauses})
    return name, EXITS[name]


# --- reading --------------------------------------------------------------------------------------


LARGEST = 2**28
"""The largest document in bytes."""
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

    Raises Refusal (KC674) for anything but a report of this version, and for a report whose verdict
    or exit code contradicts its clauses.
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
    """Return an attribution document; raises Refusal (KC675) for anything else."""
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
        document = loose_load(data)
    except Rejected as error:
        raise _refused(path, code, f"it is no JSON: {error.detail}", advice) from None
    if not isinstance(document, dict) or document.get("schema") != schema:
        raise _refused(path, code, f"it is no document of the schema {schema}", advice)
    return document


def _refused(path: Path, code: Code, why: str, advice: str) -> Refusal:
    return refuse(code, f"{path} is not usable: {why}", help=f"give {advice}")


# --- comparing ------------------------------------------------------------------------------------


Document = Mapping[str, Any]


def differences(recorded: Document, found: Document) -> tuple[str, ...]:
    """Return the differences of two documents "kcdsl.report/3", clauses first; () if equal.

    Numbers are compared in their JSON form, which is exact for float64.
    """
    rows = [_rows(document.get("clauses")) for document in (recorded, found)]
    texts = list(_of_clauses(*rows))
    for name in dict.fromkeys((*recorded, *found)):
        if name != "clauses" and _text(recorded.get(name)) != _text(found.get(name)):
            texts.append(f"the section {name} differs")
    return tuple(texts)


def _rows(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _of_clauses(recorded: list[Any], found: list[Any]) -> Iterator[str]:
    for before, after in zip_longest(recorded, found):
        if _text(before) == _text(after):
            continue
        if not isinstance(before, Mapping) or not isinstance(after, Mapping):
            yield f"{_place(before or after)}: in one of the reports alone"
            continue
        for name in dict.fromkeys((*before, *after)):
            was, now = _text(before.get(name)), _text(after.get(name))
            if was != now:
                yield f"{_place(after)}: {name} is {now}, and {was} was recorded"


def _place(row: Any) -> str:
    return f"{row.get('clause')} on {row.get('slice')}" if isinstance(row, Mapping) else "a row"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
