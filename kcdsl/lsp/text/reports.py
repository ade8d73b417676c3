"""The last verdicts about a contract, from the reports and certificates beside it.

The files `out/*.json` and `*.json` next to the contract are read: reports of `kcdsl evaluate`
(`kcdsl.report/3`) and certificates. A verdict for another digest of the contract is shown as stale.
Signatures are not checked here.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG
from typing import Any

from kcdsl.diagnostics.model import Refusal
from kcdsl.source.files import read_bytes

_SIZE_LIMIT = 4 * 2**20
_MOST_FILES = 64
_SECOND = 10**9
_VERDICTS = {"PASSED": "held", "FAILED": "violated", "INCONCLUSIVE": "inconclusive"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of one file on a clause on a slice. `digest` is that of its contract, `numbers` a
    short text about values, `modified` the modification time of the file."""

    clause: str
    slice: str
    verdict: str
    evidence: str
    numbers: str
    contract: str
    digest: str
    file: str
    modified: int

    def stale(self, digest: str | None) -> bool:
        """Return whether the verdict is about another text of the contract."""
        return digest is None or self.digest.removeprefix("sha256:") != digest


def verdicts(folder: Path | None, contract: str) -> tuple[Verdict, ...]:
    """Return the verdicts of the files beside a contract of this name, the newest first."""
    if folder is None:
        return ()
    found: list[Verdict] = []
    for file in _candidates(folder):
        try:
            about = file.stat()
        except OSError:
            continue
        if S_ISREG(about.st_mode) and about.st_size <= _SIZE_LIMIT:
            found += _read(file, about.st_mtime_ns, about.st_size)
    own = [verdict for verdict in found if verdict.contract == contract]
    # A report has more details than the certificate written with it.
    return tuple(sorted(own, key=lambda v: (-(v.modified // _SECOND), not v.numbers)))


def latest(found: tuple[Verdict, ...], clause: str, digest: str | None) -> tuple[Verdict, ...]:
    """Return the newest verdict on each slice of a clause, preferring those that are not stale."""
    kept: dict[str, Verdict] = {}
    for verdict in sorted(found, key=lambda item: item.stale(digest)):
        if verdict.clause == clause:
            kept.setdefault(verdict.slice, verdict)
    return tuple(kept.values())


def _candidates(folder: Path) -> list[Path]:
    found: list[Path] = []
    for place in (folder / "out", folder):
        try:
            found += sorted(file for file in place.iterdir() if file.name.endswith(".json"))
        except OSError:
            continue
    return [file for file in found if not file.name.endswith(".proof.json")][:_MOST_FILES]


@lru_cache(maxsize=256)
def _read(file: Path, modified: int, size: int) -> tuple[Verdict, ...]:
    """Return the verdicts in one file; empty if it is neither a report nor a certificate."""
    try:
        data = json.loads(read_bytes(file, _SIZE_LIMIT))
        if not isinstance(data, dict):
            return ()
        if data.get("schema") == "kcdsl.report/3":
            return tuple(_of_report(data, file.name, modified))
        return tuple(_of_certificate(data, file.name, modified))
    except (
        Refusal, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError,
        OverflowError,
    ):  # fmt: skip
        return ()


def _of_report(report: Mapping[str, Any], file: str, modified: int) -> Iterator[Verdict]:
    about = report["contract"]
    for row in report["clauses"]:
        yield Verdict(
            str(row["clause"]),
            str(row["slice"]),
            str(row["verdict"]),
            str(row.get("evidence") or ""),
            _numbers(row),
            str(about["name"]),
            str(about["digest"]),
            file,
            modified,
        )


def _numbers(row: Mapping[str, Any]) -> str:
    if row.get("value") is None:
        return str(row.get("reason") or "")
    unit = f" {row['unit']}" if row.get("unit") not in (None, "1") else ""
    text = f"{float(row['value']):.3g}{unit}"
    return text + (f", {row['n']} {row.get('counted') or 'samples'}" if row.get("n") else "")


def _of_certificate(bundle: Mapping[str, Any], file: str, modified: int) -> Iterator[Verdict]:
    envelope = bundle.get("dsseEnvelope", bundle)
    try:
        payload = base64.b64decode(envelope["payload"], validate=True)
    except (binascii.Error, KeyError):
        return
    predicate = json.loads(payload)["predicate"]
    about = predicate["triple"]["contract"]
    for row in predicate["clauses"]:
        word = str(row["verdict"])
        bound = row.get("bound")
        numbers = f"bound {bound['decimal']}" if isinstance(bound, dict) else ""
        yield Verdict(
            str(row["id"]),
            str(row.get("slice", "")),
            _VERDICTS.get(word, word.lower()),
            str(row.get("evidence") or ""),
            numbers,
            str(about["id"]),
            str(about["digest"]["sha256"]),
            file,
            modified,
        )
