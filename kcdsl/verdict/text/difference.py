"""The difference of two contracts for people: plain text and Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kcdsl.verdict.difference import (
    Change,
    ClauseDifference,
    Difference,
    Extent,
    Named,
    Relation,
    Status,
    Witness,
)

_MEANING = {
    Relation.EQUAL: "both accept the same kernels",
    Relation.STRICTER: "whatever NEW accepts, OLD accepts",
    Relation.WEAKER: "NEW may accept kernels that OLD refuses, or is milder with them",
    Relation.INCOMPARABLE: "NEW is neither as strict as OLD nor weaker throughout",
    Relation.UNDECIDED: "whether NEW is as strict as OLD is open",
}
_UNITS = {"slices": "whole slices", "requests": "single requests", "windows": "single windows"}
_ORDER = (
    Relation.WEAKER,
    Relation.INCOMPARABLE,
    Relation.UNDECIDED,
    Relation.STRICTER,
    Relation.EQUAL,
)


def full(found: Difference) -> str:
    """Return the difference as plain text; clauses that are the same are counted only."""
    lines = [f"OLD  {_named(found.old)}", f"NEW  {_named(found.new)}", ""]
    lines.append(f"{found.relation}: {_MEANING[found.relation]}")
    lines.append(_counts(found))
    if found.changes:
        lines += ["", "around the clauses", *_changes(found.changes)]
    for clause in found.clauses:
        if _is_shown(clause):
            lines += ["", f"{_head(clause)}", *_body(clause)]
    return "\n".join(lines) + "\n"


def markdown(found: Difference) -> str:
    """Return the difference as Markdown, for a review."""
    lines = [f"**{found.relation}**: {_MEANING[found.relation]}. {_counts(found)}.", ""]
    lines += ["| clause | relation | what differs |", "|---|---|---|"]
    for change in found.changes:
        lines.append(_row(f"({change.name})", change.relation, [_arrow(change)]))
    for clause in found.clauses:
        if _is_shown(clause):
            lines.append(_row(_title(clause), clause.relation, list(_cells(clause))))
    lines += ["", f"OLD: {_named(found.old)}  ", f"NEW: {_named(found.new)}"]
    return "\n".join(lines) + "\n"


def _named(contract: Named) -> str:
    return f"{contract.name} {contract.version}  sha256:{contract.digest[:16]}"


def _is_shown(clause: ClauseDifference) -> bool:
    same = clause.relation is Relation.EQUAL and clause.status is Status.BOTH
    return not same or bool(clause.changes)


def _counts(found: Difference) -> str:
    counts = Counter(clause.relation for clause in found.clauses)
    parts = [f"{counts[relation]} {relation}" for relation in _ORDER if counts[relation]]
    plural = "clause" if len(found.clauses) == 1 else "clauses"
    return f"{len(found.clauses)} {plural}: {', '.join(parts) or 'none'}"


def _title(clause: ClauseDifference) -> str:
    if clause.status is Status.RENAMED:
        return f"{clause.old_id} is now {clause.id}"
    return clause.id


def _head(clause: ClauseDifference) -> str:
    status = f"{clause.status}, " if clause.status in (Status.ADDED, Status.REMOVED) else ""
    return f"{_title(clause)}: {status}{clause.relation}"


def _body(clause: ClauseDifference) -> Iterator[str]:
    if clause.status in (Status.ADDED, Status.REMOVED):
        yield f"  require  {clause.new_text or clause.old_text}"
    yield from _changes(clause.changes)
    for line in _remarks(clause):
        yield f"  {line}"


def _remarks(clause: ClauseDifference) -> Iterator[str]:
    """Yield what follows from the changes: a witness, or by what the old clause still holds."""
    if clause.witness is not None:
        yield from witness_lines(clause.witness)
    if clause.kept_by:
        names = ", ".join(clause.kept_by)
        known = clause.status is Status.ADDED
        yield f"{'adds nothing to' if known else 'still implied by'} {names}"
    elif clause.status is Status.ADDED and clause.relation is Relation.EQUAL:
        yield "adds nothing"
    for reason in clause.why:
        equal = clause.kept_by or clause.relation is Relation.EQUAL
        yield f"  because {reason}" if equal else f"though {reason}"


def _changes(changes: tuple[Change, ...]) -> list[str]:
    width = max((len(change.name) for change in changes), default=0)
    lines = []
    for change in changes:
        relation = f"  ({change.relation})" if change.relation is not None else ""
        if len(change.old) + len(change.new) + width > 84:
            lines.append(f"  {change.name.ljust(width)}  {change.old}")
            lines.append(f"  {''.ljust(width)}  -> {change.new}{relation}")
        else:
            lines.append(f"  {change.name.ljust(width)}  {_arrow(change)}{relation}")
    return lines


def _arrow(change: Change) -> str:
    return f"{change.old} -> {change.new}"


def witness_lines(witness: Witness) -> Iterator[str]:
    """Yield a witness as text."""
    accepts, refuses = witness.accepts, witness.refuses
    match witness.extent:
        case Extent.CONTRACT:
            said = f"{accepts} accepts and {refuses} refuses"
        case Extent.UNIT:
            said = (
                f"{refuses} refuses, and no clause of {accepts} about {_UNITS[witness.unit]} does"
            )
        case Extent.CLAUSE:
            said = f"{witness.clause} of {accepts} accepts and that of {refuses} refuses"
    yield f"{said}, on {witness.of}:"
    for value in witness.values:
        yield f"  {value.what} = {value.shown}"
    for field in witness.lacking:
        yield f"  a trace record without {field}"
    for flip in witness.flips:
        yield f"  {flip}"
    if witness.request is not None:
        yield f"  for example a request {witness.request}"


# --- Markdown ------------------------------------------------------------------------------------


def _cells(clause: ClauseDifference) -> Iterator[str]:
    if clause.status in (Status.ADDED, Status.REMOVED):
        yield f"{clause.status}: `{clause.new_text or clause.old_text}`"
    for change in clause.changes:
        yield f"{change.name}: {_arrow(change)}"
    yield from (line.strip() for line in _remarks(clause))


def _row(title: str, relation: Relation | None, cells: list[str]) -> str:
    inside = "<br>".join(cell.replace("|", "\\|").replace("<=", "&lt;=") for cell in cells)
    return f"| {title} | {relation or ''} | {inside} |"
