"""Recounting of coverage: compares the rows of each slice in the data with the stated counts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from kcdsl_certs.encoding.files import open_regular
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import (
    LARGEST_DOCUMENT,
    Fields,
    canonical_digest,
    loose_load,
    strict_load,
)
from kcdsl_certs.statement import (
    ATTACK,
    MEASURED,
    CertifiedClause,
    Evidence,
    SliceSource,
    Verdict,
)
from kcdsl_certs.verification.proofs import LARGEST_PROOF, load_proof
from kcdsl_certs.verification.rows import Row, Selected, read_rows, select

Data = Callable[[str], Path | None]
"""Finds a data file by its name in the contract; None where it is missing."""
_WINDOW = 16
"""Consecutive units of one window."""
_EMPTY: tuple[Any, ...] = (None, "", [], {})


@dataclass(slots=True)
class Recount:
    """Counts the coverage of the results of one certificate.

    `slices` are the sources of the rows of each slice, `data` finds the files, `inputs` are the
    signed digests. `folder` has the proofs, `records` is the file with the record of each request,
    whose digest was already compared (None: it is missing).
    """

    slices: Mapping[str, SliceSource]
    data: Data
    inputs: Mapping[str, str]
    folder: Path
    records: bytes | None
    missing: list[str] = field(default_factory=list)
    """Descriptions of missing files."""
    beyond: list[str] = field(default_factory=list)
    """Descriptions of results that cannot be recounted here."""
    counted: list[str] = field(default_factory=list)
    _rows: dict[tuple[str, str], tuple[Row, ...] | None] = field(default_factory=dict)
    _chosen: dict[tuple[str, str], Selected] = field(default_factory=dict)
    """Selected rows by tokenizer and digest of data and predicate: clauses share slices."""
    _digests: dict[str, str] = field(default_factory=dict)
    _records: list[Mapping[str, Any]] | None = None

    def run(self, clauses: Iterable[CertifiedClause]) -> None:
        """Count every result that is not implied; raises Rejected `recount/…` for a difference."""
        for clause in clauses:
            if clause.implied_by is not None or clause.verdict is Verdict.INCONCLUSIVE:
                continue
            self._one(clause)

    def _one(self, clause: CertifiedClause) -> None:
        source = None if clause.slice is None else self.slices.get(clause.slice)
        if source is None:
            self._note(self.beyond, f"{clause.label}: the slice has no data")
            return
        measured = clause.proof is None and clause.method in MEASURED
        # Sampled or recorded units are not rows; only the digest of their file is compared.
        counted = not measured or source.units == "rows"
        rows = self._rows_of(source) if counted else self._unread(source)
        if rows is None:
            self._note(self.missing, source.data)
            return
        pin = {"data": self._digests[source.data], "where": source.where}
        pinned = canonical_digest(pin)
        if clause.slice_digest != pinned:
            raise Rejected("recount/slice-mismatch", f"{clause.label}: the slice is another one")
        if not counted:
            text = f"{clause.label}: its units are drawn or recorded, not rows of the data"
            self._note(self.beyond, text)
            return
        key = (source.tokens, pinned)
        if key not in self._chosen:
            self._chosen[key] = select(rows, source.where)
        chosen = self._chosen[key]
        if clause.proof is not None:
            self._proved(clause, source, chosen)
        elif clause.method == ATTACK:
            self._attacked(clause, chosen)
        elif measured:
            self._measured(clause, source, chosen)

    def _rows_of(self, source: SliceSource) -> tuple[Row, ...] | None:
        """Return the rows of the data with the signed digest; None where it is missing."""
        key = (source.data, source.tokens)
        if key not in self._rows:
            path = self._at_hand(source)
            if path is None:
                self._rows[key] = None
                return None
            with _opened(path, source) as file:
                data = file.read(LARGEST_DOCUMENT + 1)
            if len(data) > LARGEST_DOCUMENT:
                raise Rejected("recount/data", f"{source.data} is too large")
            self._pin(source, hashlib.sha256(data).hexdigest())
            self._rows[key] = read_rows(data, source.tokens)
        return self._rows[key]

    def _unread(self, source: SliceSource) -> tuple[Row, ...] | None:
        """Compare the digest of data without parsing it and return no rows; None where it is
        missing."""
        path = self._at_hand(source)
        if path is None:
            return None
        if source.data not in self._digests:
            with _opened(path, source) as file:
                self._pin(source, hashlib.file_digest(file, "sha256").hexdigest())
        return ()

    def _at_hand(self, source: SliceSource) -> Path | None:
        path = self.data(source.data)
        return path if path is not None and path.is_file() else None

    def _pin(self, source: SliceSource, digest: str) -> None:
        if self.inputs.get(source.data) != digest:
            raise Rejected("recount/data", f"{source.data} is not the data that was signed")
        self._digests[source.data] = digest

    @staticmethod
    def _note(notes: list[str], text: str) -> None:
        if text not in notes:
            notes.append(text)

    # --- proofs ----------------------------------------------------------------------------------

    def _proved(self, clause: CertifiedClause, source: SliceSource, chosen: Selected) -> None:
        proof = strict_load(load_proof(self.folder, clause), LARGEST_PROOF)
        cases = [Fields.of(item, "case") for item in Fields.of(proof, "proof").items("cases")]
        kind = "" if clause.region is None else clause.region.kind
        if kind in ("hull", "rows"):
            self._spanned(clause, kind, [case.text("name") for case in cases], chosen)
            return
        by_name = {case.text("name"): case.inner("region") for case in cases}
        self._same_names(clause, list(by_name), len(cases), chosen, "case")
        rows = {row.id: row for row in (*chosen.rows, *chosen.open)}
        seen: dict[str, Row] = {}
        unknown = 0
        for name, region in by_name.items():
            row = rows[name]
            content = _content(region)
            _fits(clause, row, region)
            other = seen.setdefault(content, row)
            known = other.tokens is not None and row.tokens is not None
            if known and other.tokens != row.tokens:
                detail = f"{clause.label}: {name} and {other.id} are one case twice"
                raise Rejected("recount/case-repeated", detail)
            unknown += row.tokens is None
        if unknown:
            text = f"{clause.label}: tokens of {unknown} row(s), which need the model's tokenizer"
            self._note(self.beyond, text)
        self._say(clause, f"{len(cases)} case(s)", chosen)

    def _spanned(
        self, clause: CertifiedClause, kind: str, names: list[str], chosen: Selected
    ) -> None:
        """Demand a box for each length of the slice's rows, or one of any length."""
        if not chosen.rows and not chosen.open:
            raise Rejected("recount/rows-missing", f"{clause.label}: the slice selects no row")
        if kind == "rows" and len(names) != 1:
            detail = f"{clause.label}: {len(names)} boxes of any length"
            raise Rejected("recount/rows-extra", detail)
        lengths = {row.length for row in chosen.rows}
        if kind == "hull" and None not in lengths and not chosen.open:
            if sorted(names) != sorted(f"hull-{length}" for length in lengths):
                detail = f"{clause.label}: boxes of {len(lengths)} lengths, {len(names)} are proved"
                raise Rejected("recount/rows-missing", detail)
            self._say(clause, f"{len(names)} box(es) for every length", chosen)
        self._note(self.beyond, f"{clause.label}: which rows lie in its box(es)")

    def _attacked(self, clause: CertifiedClause, chosen: Selected) -> None:
        most = len(chosen.rows) + len(chosen.open)
        if clause.n is not None and clause.n > most:
            raise Rejected("recount/count", f"{clause.label}: {clause.n} of {most} rows")

    def _same_names(
        self, clause: CertifiedClause, names: list[str], count: int, chosen: Selected, what: str
    ) -> None:
        """Demand that the names are exactly the rows of the slice, each once."""
        if len(names) != count or len(set(names)) != len(names):
            raise Rejected("recount/duplicate", f"{clause.label}: a {what} is there twice")
        found, sure = set(names), {row.id for row in chosen.rows}
        lacking = sorted(sure - found)
        if lacking or not names:
            shown = ", ".join(lacking[:3])
            detail = f"{clause.label}: no {what} of {len(lacking)} row(s) of the slice: {shown}"
            raise Rejected("recount/rows-missing", detail)
        stray = sorted(found - sure - {row.id for row in chosen.open})
        if stray:
            shown = ", ".join(stray[:3])
            detail = f"{clause.label}: {len(stray)} {what}(s) of no row of the slice: {shown}"
            raise Rejected("recount/rows-extra", detail)

    def _say(self, clause: CertifiedClause, what: str, chosen: Selected) -> None:
        rows = f"{len(chosen.rows)} row(s)"
        if chosen.open:
            text = f"{clause.label}: the length of {len(chosen.open)} row(s)"
            self._note(self.beyond, text)
        self.counted.append(f"{clause.label}: {what} of {rows}")

    # --- measured results ------------------------------------------------------------------------

    def _measured(self, clause: CertifiedClause, source: SliceSource, chosen: Selected) -> None:
        if self.records is None:
            self._note(self.missing, "the records of requests")
        least, most = _units_in(clause, chosen)
        rows = clause.counted in ("requests", "records")
        if rows and (clause.n is None or not least <= clause.n <= most or clause.n == 0):
            what = "rows" if clause.evidence is Evidence.CENSUS else "prompts"
            found = str(least) if least == most else f"{least} to {most}"
            detail = f"{clause.label}: {clause.n} {clause.counted}, the slice has {found} {what}"
            raise Rejected("recount/count", detail)
        if self.records is None:
            return
        own = [r for r in self._read_records() if clause.slice in _slices(r)]
        prefix = f"{source.data}:"
        names = [str(r.get("request")).removeprefix(prefix) for r in own]
        if not all(str(r.get("request")).startswith(prefix) for r in own):
            raise Rejected("recount/rows-extra", f"{clause.label}: a record of other data")
        self._same_names(clause, names, len(own), chosen, "record")
        self._units(clause, own, range(least, most + 1))
        self._fields(clause, own)
        self._say(clause, f"{clause.n} {clause.counted}", chosen)

    def _units(
        self, clause: CertifiedClause, own: list[Mapping[str, Any]], requests: range
    ) -> None:
        """Demand as many units as there are requests: their timed runs are no units."""
        there = range(len(own), len(own) + 1)
        if clause.evidence is not Evidence.CENSUS:
            there = requests
        match clause.counted:
            case "requests" | "records":
                counted = there
            case "windows":
                least, most = (max(1, n // _WINDOW) for n in (there[0], there[-1]))
                counted = range(least, most + 1)
            case _:
                raise Rejected(
                    "recount/unit", f"{clause.label}: {clause.counted!r} is no unit here"
                )
        if clause.n not in counted:
            found = " or ".join(dict.fromkeys(str(n) for n in (counted[0], counted[-1])))
            detail = f"{clause.label}: {clause.n} {clause.counted} are stated, {found} are recorded"
            raise Rejected("recount/count", detail)
        if clause.quantity.is_timed and not all(_times(record) for record in own):
            raise Rejected("recount/rows-missing", f"{clause.label}: a row was never timed")

    def _fields(self, clause: CertifiedClause, own: list[Mapping[str, Any]]) -> None:
        """Recount the records that have every field."""
        if clause.quantity.kind != "share":
            return
        names = clause.quantity.fields
        lacking = sum(any(record.get(name) in _EMPTY for name in names) for record in own)
        if lacking and clause.verdict is Verdict.PASSED and clause.is_hard:
            detail = f"{clause.label}: {lacking} record(s) lack a field"
            raise Rejected("recount/fields-missing", detail)
        least = lacking if clause.evidence is Evidence.CENSUS else min(1, lacking)
        if clause.exceed is not None and not least <= clause.exceed <= lacking:
            detail = f"{clause.label}: {clause.exceed} without a field, {lacking} are recorded"
            raise Rejected("recount/count", detail)

    def _read_records(self) -> list[Mapping[str, Any]]:
        if self._records is None:
            lines = [line for line in (self.records or b"").split(b"\n") if line.strip()]
            records = [Fields.of(loose_load(line), "record").record for line in lines]
            keys = [record.get("request") for record in records]
            if len({str(key) for key in keys}) != len(keys):
                raise Rejected("recount/duplicate", "a request is recorded twice")
            self._records = list(records)
        return self._records


def _units_in(clause: CertifiedClause, chosen: Selected) -> tuple[int, int]:
    """Return the least and the largest number of requests of a slice that a result may count.

    A census counts rows. A sample counts distinct prompts; duplicates can be recognised only among
    rows with known tokens.
    """
    every = (*chosen.rows, *chosen.open)
    if clause.evidence is Evidence.CENSUS:
        return len(chosen.rows), len(every)
    known = {row.tokens for row in chosen.rows if row.tokens is not None}
    unknown = sum(row.tokens is None for row in every)
    least = max(len(known), min(1, len(chosen.rows)))
    known |= {row.tokens for row in chosen.open if row.tokens is not None}
    return least, len(known) + unknown


@contextmanager
def _opened(path: Path, source: SliceSource) -> Iterator[BufferedReader]:
    try:
        with open_regular(path, "recount/data") as file:
            yield file
    except OSError as error:
        raise Rejected("recount/data", f"{source.data}: {error.strerror or error}") from None


def _slices(record: Mapping[str, Any]) -> list[Any]:
    found = record.get("slices")
    return found if isinstance(found, list) else []


def _times(record: Mapping[str, Any]) -> list[Any]:
    found = record.get("latency_s")
    return found if isinstance(found, list) else []


def _content(region: Fields) -> str:
    """Return the key by which regions are equal: the token ids, or the centre."""
    if "ids" in region.record:
        return repr(region.record["ids"])
    centre = region.inner("centre")
    return f"{centre.raw('shape')} {centre.raw('data')}"


def _fits(clause: CertifiedClause, row: Row, region: Fields) -> None:
    """Demand that a region matches its row: the same token ids, or as many states."""
    if row.tokens is None:
        return
    if "ids" in region.record:
        if list(row.tokens) != region.record["ids"]:
            raise Rejected("recount/case-mismatch", f"{clause.label}: {row.id} has other tokens")
        return
    shape = region.inner("centre").raw("shape")
    if not isinstance(shape, list) or not shape or shape[0] != len(row.tokens):
        detail = f"{clause.label}: {row.id} has {len(row.tokens)} tokens, its case has {shape!r}"
        raise Rejected("recount/case-mismatch", detail)
