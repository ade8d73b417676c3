"""Fixes of diagnostics, applied to a text, and a check of the result."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kcdsl.check.compile import Analysis, analyse
from kcdsl.diagnostics.codes import DATA_ABSENT
from kcdsl.diagnostics.model import Diagnostic, Edit, Fix, Severity, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.canonical import digest, library_digest

_ROUNDS = 20
_SYNTAX, _ERRORS, _KINDS = 0, 1, 3
"""Kinds of findings: those that hide others have smaller numbers; a kind includes smaller ones."""
_ALONE = 32
"""The largest number of fixes of a round to try singly if all together make the text worse."""
_EFFORT = 2**22
"""The total number of characters to check, over all checks of the text. A contract of usual
size is checked hundreds of times before they are used up, one of the largest four times."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A text after its fixes: the number of applied fixes, the fixes that were undone because they
    did not improve it, the remaining findings, and the analysis of the text."""

    source: SourceFile
    applied: int
    refused: tuple[Diagnostic, ...]
    left: tuple[Diagnostic, ...]
    analysis: Analysis


def fix(
    source: SourceFile,
    folder: Path | None,
    *,
    unsafe: bool = False,
    wanted: Callable[[Diagnostic], bool] = lambda _: True,
) -> Fixed:
    """Apply the safe fixes (with `unsafe` the others too) of wanted diagnostics until none is left.

    Findings that hide others are fixed first: YAML and syntax errors, then other errors, then the
    rest. Each fix must reduce the findings of its kind and must not add errors, unless the text
    could not be parsed before; safe fixes must not change its meaning, if it has one. Other fixes
    are undone. Findings about missing files do not count. The number of checks of a very large text
    is limited; remaining findings are left.
    """
    effort = _CharacterBudget()
    state = _State(source, folder, effort)
    seen = {source.text}
    refused: dict[tuple[str, str], Diagnostic] = {}
    applied = 0
    for _ in range(_ROUNDS):
        if effort.is_spent:
            break
        offered = [d for d in state.sink if wanted(d) and _key(d) not in refused]
        kinds = ([d for d in offered if _kind(d) == kind] for kind in range(_KINDS))
        fitting = (_compatible(source, found, unsafe) for found in kinds)
        chosen = next((found for found in fitting if found), [])
        if not chosen:
            break
        after = state.after(chosen)
        if after is None:
            chosen, after = _one_by_one(state, chosen[:_ALONE], refused)
        if after is None:
            continue
        if after.source.text in seen:
            break
        seen.add(after.source.text)
        state, applied = after, applied + len(chosen)
    return Fixed(state.source, applied, tuple(refused.values()), tuple(state.sink), state.analysis)


@dataclass(slots=True)
class _CharacterBudget:
    """The remaining number of characters to check; the last check may exceed it."""

    left: int = _EFFORT

    @property
    def is_spent(self) -> bool:
        """Return whether the limit is reached."""
        return self.left <= 0


class _State:
    """A text with its findings."""

    def __init__(self, source: SourceFile, folder: Path | None, effort: _CharacterBudget) -> None:
        self.source, self.folder, self.sink = source, folder, Sink()
        self.effort = effort
        effort.left -= len(source.text)
        self.analysis = analyse(source, self.sink, folder)
        self.counts = [
            sum(_kind(d) <= kind and d.code != DATA_ABSENT for d in self.sink)
            for kind in range(_KINDS)
        ]

    def after(self, chosen: Sequence[Diagnostic]) -> _State | None:
        """Return the state after non-overlapping fixes of one kind; None where there are none, or
        where not each of them improves the text."""
        fixes = [d.fix for d in chosen if d.fix is not None]
        edits = [edit for fix in fixes for edit in fix.edits]
        if not edits:
            return None
        text = edited(self.source.text, edits)
        state = _State(SourceFile(self.source.name, text), self.folder, self.effort)
        better = state.better_by(len(fixes), _kind(chosen[0]), self)
        # A YAML error hides all other findings.
        hidden, hides = self.analysis.root is None, state.analysis.root is None
        if hidden != hides:
            better = hidden
        if not better or (all(fix.safe for fix in fixes) and not state.means_what(self)):
            return None
        return state

    def better_by(self, fixes: int, kind: int, before: _State) -> bool:
        """Return whether at least `fixes` findings of a kind are gone and no errors were added."""
        fewer = self.counts[kind] <= before.counts[kind] - fixes
        return fewer and all(self.counts[k] <= before.counts[k] for k in (_SYNTAX, _ERRORS))

    def means_what(self, before: _State) -> bool:
        """Return whether the text has the same meaning as before, if it had one."""
        meant = before.meaning
        return meant is None or self.meaning == meant

    @property
    def meaning(self) -> str | None:
        """Return the digest of the contract or library; None if it has errors."""
        if self.analysis.library is not None:
            return library_digest(self.analysis.library)
        return None if self.analysis.program is None else digest(self.analysis.program)


def _one_by_one(
    state: _State, chosen: list[Diagnostic], refused: dict[tuple[str, str], Diagnostic]
) -> tuple[list[Diagnostic], _State | None]:
    """Return the fixes that are harmless together, and the state after them; record the others."""
    kept: list[Diagnostic] = []
    best: _State | None = None
    for diagnostic in chosen:
        if state.effort.is_spent:
            break
        after = state.after([*kept, diagnostic])
        if after is None:
            refused[_key(diagnostic)] = diagnostic
        else:
            kept.append(diagnostic)
            best = after
    return kept, best


def _kind(diagnostic: Diagnostic) -> int:
    if diagnostic.severity is not Severity.ERROR:
        return _KINDS - 1
    return _SYNTAX if diagnostic.code.family == "KC0" else _ERRORS


def _key(diagnostic: Diagnostic) -> tuple[str, str]:
    """Return an identification of a finding that does not depend on places."""
    return diagnostic.code.id, diagnostic.message


def edited(text: str, edits: Iterable[Edit]) -> str:
    """Return a text after non-overlapping edits, with the line ends of the text."""
    windows = "\r\n" in text
    for edit in sorted(edits, key=lambda e: e.span, reverse=True):
        new = re.sub("\r?\n", "\r\n", edit.text) if windows else edit.text
        text = text[: edit.span.start] + new + text[edit.span.end :]
    return text


def _compatible(
    source: SourceFile, offered: Iterable[Diagnostic], unsafe: bool
) -> list[Diagnostic]:
    """Return the diagnostics whose fixes do not overlap earlier ones."""
    chosen: list[Diagnostic] = []
    taken: list[Edit] = []
    for diagnostic in offered:
        fix = diagnostic.fix
        if fix is None or not is_applied(fix, unsafe):
            continue
        if diagnostic.source is None or diagnostic.source.name != source.name:
            continue
        if not any(edit.span.touches(other.span) for edit in fix.edits for other in taken):
            chosen.append(diagnostic)
            taken.extend(fix.edits)
    return chosen


def is_applied(fix: Fix | None, unsafe: bool) -> bool:
    """Return whether `--fix` (or `--unsafe-fixes`) would apply a fix."""
    return fix is not None and (fix.safe or unsafe)
