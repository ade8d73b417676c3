"""Code lenses: decide a clause from the editor, and what the last run said."""

from __future__ import annotations

from dataclasses import dataclass

from kcdsl.diagnostics.spans import Span
from kcdsl.lsp.documents import Snapshot
from kcdsl.lsp.knowledge import is_formal, known_clauses, mark, verdicts_of


@dataclass(frozen=True, slots=True)
class Lens:
    """A title above a clause, and the command of `kcdsl` that it runs for the clause."""

    span: Span
    title: str
    command: str
    clause: str


def lenses(snapshot: Snapshot) -> list[Lens]:
    """Return one lens for each clause that can be decided."""
    if snapshot.analysis.program is None or snapshot.document.path is None:
        return []
    found = []
    for item in known_clauses(snapshot.analysis):
        if item.clause is None:
            continue
        name, span = item.raw.id.text, item.raw.id.span
        formal = is_formal(item.clause)
        command = "verify" if formal else "evaluate"
        title = "verify this clause" if formal else "evaluate this contract"
        shown = verdicts_of(snapshot, name)
        if shown:
            worst = next((v for v, _ in shown if v.verdict != "held"), shown[0][0])
            stale = " (stale)" if any(old for _, old in shown) else ""
            title = f"{mark(worst.verdict)} {worst.verdict}{stale} · {title}"
        found.append(Lens(span, title, command, name))
    return found
