"""The evidence files of a statement: their presence, digests and content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcdsl_certs.encoding.files import open_regular
from kcdsl_certs.encoding.reals import parse_real
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import LARGEST_DOCUMENT, Fields, loose_load
from kcdsl_certs.statement import (
    MEASURED,
    NEEDED,
    CertifiedClause,
    EvidenceFile,
    Triple,
    Verdict,
)

_CHUNK = 1 << 20
_KERNELS, _REPORT = "kcdsl.kernels/1", "kcdsl.report/3"
_WORDS = {Verdict.PASSED: ("held",), Verdict.FAILED: ("violated",)}


def refuse_unnamed(clauses: tuple[CertifiedClause, ...], files: tuple[EvidenceFile, ...]) -> None:
    """Refuse measured results without evidence files, and a file named twice."""
    names = [file.path for file in files]
    if len(set(names)) != len(names):
        raise Rejected("evidence/duplicate", "one file is named twice as evidence")
    once = [file.role for file in files if file.role != "counterexample"]
    if len(set(once)) != len(once):
        raise Rejected("evidence/duplicate", "two files are named as one kind of evidence")
    measured = [clause.label for clause in clauses if clause.method in MEASURED]
    lacking = [role for role in NEEDED if role not in once]
    if measured and lacking:
        detail = f"{measured[0]} is measured, and no {' and no '.join(lacking)} is named"
        raise Rejected("evidence/unnamed", detail)


@dataclass(slots=True)
class EvidenceFiles:
    """The evidence files of one certificate in its folder, each read at most once."""

    folder: Path
    missing: list[str] = field(default_factory=list)
    _documents: dict[str, bytes] = field(default_factory=dict)

    def examine(self, files: tuple[EvidenceFile, ...]) -> None:
        """Hash every file and record missing ones. Raises Rejected where one was changed."""
        for file in files:
            path = self.folder / file.path
            if not path.is_file():
                self.missing.append(file.path)
                continue
            kept = file.role in ("records", "report", "kernels")
            digest, data = _read(path, kept)
            if digest != file.sha256:
                detail = f"{file.path} is not the {file.role} that was signed"
                raise Rejected("evidence/digest-mismatch", detail)
            if kept:
                self._documents[file.role] = data

    def document(self, role: str) -> bytes | None:
        """Return the bytes of a verified file; None where it is missing."""
        return self._documents.get(role)


def _read(path: Path, kept: bool) -> tuple[str, bytes]:
    """Return the digest of a file and, with `kept`, the hashed bytes."""
    found, parts, size = hashlib.sha256(), [], 0
    try:
        with open_regular(path, "evidence/unreadable") as file:
            while chunk := file.read(_CHUNK):
                found.update(chunk)
                size += len(chunk)
                if kept and size > LARGEST_DOCUMENT:
                    raise Rejected("evidence/too-large", f"{path.name}: {LARGEST_DOCUMENT} bytes")
                if kept:
                    parts.append(chunk)
    except OSError as error:
        raise Rejected("evidence/unreadable", f"{path.name}: {error.strerror or error}") from None
    return found.hexdigest(), b"".join(parts)


def compare(
    evidence: EvidenceFiles, clauses: tuple[CertifiedClause, ...], triple: Triple
) -> list[str]:
    """Compare the documents with the statement; return a description of the comparisons.

    Raises Rejected where the fingerprints are of other kernels, the report is of another contract,
    or a measured result is not in the report.
    """
    said = []
    kernels = evidence.document("kernels")
    if kernels is not None:
        _compare_kernels(loose_load(kernels), triple)
        said.append("fingerprints of the kernels")
    report = evidence.document("report")
    if report is not None:
        count = _compare_report(loose_load(report), clauses, triple)
        said.append(f"{count} measured result(s) with the report")
    return said


def _compare_kernels(document: Any, triple: Triple) -> None:
    fields = Fields.of(document, "kernels")
    stated = {"train": triple.train.fingerprint, "infer": triple.infer.fingerprint}
    if fields.text("schema") != _KERNELS or {r: fields.raw(r) for r in stated} != stated:
        raise Rejected(
            "evidence/kernels-mismatch", "the kernels that ran are not those of the triple"
        )


def _compare_report(document: Any, clauses: tuple[CertifiedClause, ...], triple: Triple) -> int:
    fields = Fields.of(document, "report")
    digest = fields.inner("contract").raw("digest")
    if fields.text("schema") != _REPORT or digest != f"sha256:{triple.contract.digest}":
        raise Rejected("evidence/report-mismatch", "the report is about another contract")
    rows = [Fields.of(row, "report.clauses").record for row in fields.items("clauses")]
    measured = [clause for clause in clauses if clause.method in MEASURED]
    for clause in measured:
        own = [row for row in rows if row.get("obligation") == clause.obligation]
        if not any(_is_of(row, clause) for row in own):
            detail = f"{clause.label} {clause.quantity} does not stand in the report"
            raise Rejected("evidence/report-mismatch", detail)
    return len(measured)


def _is_of(row: Mapping[str, Any], clause: CertifiedClause) -> bool:
    """Return whether a row of the report equals this result: units, counts, value, limits and
    verdict. A report has no certified bound."""
    counted, words = row.get("exceedance"), _WORDS.get(clause.verdict)
    if words is not None and row.get("verdict") not in words:
        return False
    if (row.get("clause"), row.get("slice")) != (clause.id, clause.slice):
        return False
    if row.get("evidence") != clause.evidence.value:
        return False
    counts = counted if isinstance(counted, dict) else {}
    if clause.n is not None and clause.n not in (row.get("n"), counts.get("n")):
        return False
    if clause.exceed is not None and clause.exceed != counts.get("k"):
        return False
    if clause.bound is not None or not _has_limits_of(row, clause):
        return False
    exact = row.get("exact")
    stated = exact.get("value") if isinstance(exact, dict) else None
    if clause.value is None:
        return True
    return isinstance(stated, str) and parse_real(stated) == clause.value


def _has_limits_of(row: Mapping[str, Any], clause: CertifiedClause) -> bool:
    """Return whether a row of the report has the confidence limits of this result, at no lower
    confidence."""
    limits = {name: getattr(clause, name) for name in ("low", "high")}
    if any(limit not in (None, row.get(name)) for name, limit in limits.items()):
        return False
    if clause.alpha is None or not any(limit is not None for limit in limits.values()):
        return True
    confidence = row.get("confidence")
    return isinstance(confidence, int | float) and confidence >= float(1 - clause.alpha)
