"""The examination of a document finds planted defects of the program."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lsprotocol import types as lsp

from kcdsl.check import fixes
from kcdsl.check.compile import analyse
from kcdsl.check.incremental import Incremental
from kcdsl.check.sections import clauses
from kcdsl.diagnostics.codes import UNKNOWN_METRIC, UNUSED_TABLE
from kcdsl.diagnostics.model import Diagnostic, Severity, Sink
from kcdsl.diagnostics.render import FORMATS, render
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.format.layout import Printer
from kcdsl.ir.canonical import document
from kcdsl.logic import smtlib
from kcdsl.lsp.answers import FEATURES
from kcdsl.lsp.text.positions import Lines
from kcdsl.source.scalar_map import map_scalar
from tests.fuzz import serving
from tests.fuzz.examination import examine
from tests.fuzz.reduction import reduce
from tests.fuzz.watchdog import Hang, limit
from tests.support.pages import completed

GOOD = completed(
    "clauses:\n  # why\n  N-KL:   {require: p99(kl) <= 0.02, slices: [long], level: L2}\n"
).encode()
LIBRARY = b"""\
kcdsl: 1
library: shared
version: 1.0.0
slices:
  all: {}
  long: {where: "length > 128"}
"""
NOTED = completed("clauses:\n  A: {require: p99(klx) <= 0.02, level: L2}\n").encode()


def failure(data: bytes = GOOD, **options: Any) -> tuple[str, str]:
    """Return the stage and the kind of the first violation in a document."""
    found = examine(data, Path(), **options).failure
    assert found is not None
    return found.stage, found.key


def test_valid_documents_violate_no_property() -> None:
    good = examine(GOOD, Path(), before=NOTED, served=True, solved=True)
    assert (good.outcome, good.failure, good.changed) == ("accepted", None, True)
    assert {"solver", "server", "textDocument/rename", "edit", "sarif"} <= set(good.times)
    noted = examine(NOTED, Path(), before=GOOD, served=True)
    assert (noted.outcome, noted.failure) == ("rejected", None)
    assert "KC203" in noted.codes
    library = examine(LIBRARY, Path(), served=True)
    assert (library.outcome, library.failure) == ("library", None)
    assert examine(b"\xff", Path()).outcome == "not text"
    broken = examine(b"a: [", Path(), before=GOOD, served=True)
    assert (broken.outcome, broken.failure) == ("not YAML", None)


def test_finds_a_formatter_that_changes_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Printer.text
    changed = {"0.02": "0.03", "> 128": "> 256"}
    monkeypatch.setattr(Printer, "text", lambda self: replaced(text(self), changed))
    assert failure() == ("format", "refused to format")
    assert failure(LIBRARY) == ("format", "refused to format")
    # Without the formatter's own check, the changed meaning is found.
    monkeypatch.setattr("kcdsl.format.document._keeps", lambda *_: True)
    assert failure() == ("meaning", "formatted means something else")
    assert failure(LIBRARY) == ("meaning", "formatted means something else")


def replaced(text: str, changes: dict[str, str]) -> str:
    """Return a text with words replaced."""
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


def test_finds_a_formatter_that_quotes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Printer.text
    lose = {"0.02": "0.03"}
    monkeypatch.setattr(
        Printer, "text", lambda self: text(self) if self._careful else replaced(text(self), lose)
    )
    assert failure() == ("format", "everything had to be quoted")


@pytest.mark.parametrize(
    ("pattern", "new", "key"),
    [
        (r"  # why\n", "", "a comment too many or too few"),
        (r"(?s)  # why\n(.*)", r"\1# why\n", "a comment moved"),
        (r"\Z", " ", "line ends"),
        (r"\n", "\n\n", "formatted twice is another text"),
    ],
)
def test_finds_a_formatter_that_loses_or_moves_comments(
    monkeypatch: pytest.MonkeyPatch, pattern: str, new: str, key: str
) -> None:
    text = Printer.text
    monkeypatch.setattr(Printer, "text", lambda self: re.sub(pattern, new, text(self)))
    monkeypatch.setattr("kcdsl.format.document._keeps", lambda *_: True)
    assert failure() == ("format", key)


def checked_by(monkeypatch: pytest.MonkeyPatch, check: Callable[..., Any]) -> None:
    """Put a check of clauses before the real one."""
    plain = clauses.check_clause

    def planted(raw: Any, *rest: Any) -> Any:
        check(raw, *rest)
        return plain(raw, *rest)

    monkeypatch.setattr("kcdsl.check.compile.check_clause", planted)


def test_finds_a_checker_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: dict[str, str] = {}
    checked_by(monkeypatch, lambda *_: nothing["x"])
    stage, key = failure()
    assert stage == "lint"
    assert key.startswith("KeyError in ")
    found = examine(GOOD, Path()).failure
    assert found is not None
    assert found.raised


@pytest.mark.sample(1)
@pytest.mark.parametrize("sleeping", [False, True])
def test_finds_a_checker_that_hangs(monkeypatch: pytest.MonkeyPatch, sleeping: bool) -> None:
    def hang(*_: object) -> None:
        while True:
            if sleeping:
                time.sleep(0.1)

    checked_by(monkeypatch, hang)
    assert failure(seconds=0.05) == ("lint", "hang")


def test_finds_a_hang_that_the_checker_catches(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> None:
        try:
            while True:
                pass
        except Exception:
            return

    checked_by(monkeypatch, slow)
    assert failure(seconds=0.2) == ("lint", "hang")


@pytest.mark.parametrize("span", [Span(0, 10**6), Span(5, 4), Span(-1, 2)])
def test_finds_a_finding_outside_the_file(monkeypatch: pytest.MonkeyPatch, span: Span) -> None:
    def misplace(raw: Any, scope: Any, reporter: Any) -> None:
        reporter.warning(UNUSED_TABLE, "misplaced", span, "look elsewhere")

    checked_by(monkeypatch, misplace)
    assert failure() == ("findings", "place outside the file")


def test_finds_a_wrong_editor_position(monkeypatch: pytest.MonkeyPatch) -> None:
    offset = Lines.offset
    monkeypatch.setattr(Lines, "offset", lambda self, *place: max(0, offset(self, *place) - 1))
    assert failure(NOTED)[0] == "findings"
    assert failure(NOTED)[1].startswith("another place in ")


def test_finds_a_program_returned_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgiving(source: Any, sink: Sink, *rest: Any) -> Any:
        analysis = analyse(source, sink, *rest)
        sink.add(Diagnostic(UNKNOWN_METRIC, "planted", source, Span(0, 0)))
        return analysis

    monkeypatch.setattr("tests.fuzz.examination.analyse", forgiving)
    assert failure() == ("places", "no program and no error, or both")


@pytest.mark.parametrize("name", FORMATS)
def test_finds_a_format_that_loses_a_finding(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def forgetful(found: Any, format: str, *rest: Any) -> str:
        return render(found[1:] if format == name else found, format, *rest)

    monkeypatch.setattr("tests.fuzz.findings.render", forgetful)
    stage, key = failure(NOTED)
    assert (stage, key.partition(":")[0]) == (name, name)


def test_finds_terminal_output_that_lacks_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_text(found: Any, format: str, stream: Any, *rest: Any) -> str:
        return "\x1b[31m\x1b[0m" if stream is not None else render(found, format, stream, *rest)

    monkeypatch.setattr("tests.fuzz.findings.render", without_text)
    assert failure(NOTED) == ("colours", "text")


@pytest.mark.parametrize("name", FORMATS)
def test_finds_invalid_content_in_a_format(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def malformed(found: Any, format: str, *rest: Any) -> str:
        return render(found, format, *rest) + ("\x1b[" if format == name else "")

    monkeypatch.setattr("tests.fuzz.findings.render", malformed)
    assert failure(NOTED)[0] == name


def test_finds_a_map_that_misses_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    def partial(source: SourceFile, scalar: Any) -> Any:
        return map_scalar(SourceFile(source.name, source.text.replace("long", "lonh")), scalar)

    monkeypatch.setattr("tests.fuzz.examination.map_scalar", partial)
    assert failure() == ("places", "unmapped plain")


def test_finds_a_program_that_a_round_trip_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.fuzz.examination.document",
        lambda program: document(program).replace(b"1/50", b"1/40"),
    )
    assert failure()[0] == "program"


def test_finds_smtlib_that_solvers_reject(monkeypatch: pytest.MonkeyPatch) -> None:
    consistency = smtlib.consistency
    monkeypatch.setattr(smtlib, "consistency", lambda program: consistency(program) + "(assert")
    assert failure(solved=True) == ("solver", "z3 does not read it")


def test_finds_fixes_that_introduce_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    harm(monkeypatch, lambda text: replaced(text, {"version: 1.0.0\n": "", "contract": "contrac"}))
    assert failure(NOTED) == ("fix", "fixes make errors")


def test_finds_fixes_that_make_a_document_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    harm(monkeypatch, lambda text: text + "]")
    assert failure(NOTED) == ("fix", "fixes make it unreadable")


def test_finds_safe_fixes_that_change_the_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    harm(monkeypatch, lambda text: text.replace("5%", "6%"))
    unused = "tables: {t: {unit: nats, rows: [{where: length < 9, value: 1}], otherwise: 2}}\n"
    assert failure(completed(unused).encode()) == ("fix", "safe fixes change the meaning")


def harm(monkeypatch: pytest.MonkeyPatch, harm: Callable[[str], str]) -> None:
    """Replace the effect of fixes."""

    def after(state: Any, chosen: Any) -> Any:
        source = SourceFile(state.source.name, harm(state.source.text))
        return fixes._State(source, state.folder, state.effort)

    monkeypatch.setattr(fixes._State, "after", after)


def test_finds_an_incremental_check_that_misses_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Incremental, *_: Any, **__: Any) -> Any:
        return None, Sink()

    monkeypatch.setattr(Incremental, "analyse", forgetful)
    assert failure(NOTED, before=GOOD) == ("edit", "other findings after an edit")
    monkeypatch.setattr("tests.fuzz.examination.analyse", silent)
    assert failure(GOOD, before=NOTED) == ("edit", "other findings after undoing an edit")


def silent(source: SourceFile, sink: Sink, *rest: Any) -> Any:
    """Check a document and drop everything but errors."""
    analysis = analyse(source, sink, *rest)
    sink.found[:] = [found for found in sink if found.severity is Severity.ERROR]
    return analysis


# --- the language server --------------------------------------------------------------------------


def answered(monkeypatch: pytest.MonkeyPatch, method: str, change: Callable[[Any], Any]) -> None:
    """Replace the answer of a feature of the server."""
    feature, *rest = FEATURES[method]

    def planted(question: Any, params: Any) -> Any:
        return change(feature(question, params))

    monkeypatch.setitem(FEATURES, method, (planted, *rest))


def test_finds_a_server_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, lsp.TEXT_DOCUMENT_HOVER, lambda _: 1 // 0)
    stage, key = failure(served=True)
    assert (stage, key.split()[0]) == ("textDocument/hover", "ZeroDivisionError")


def test_finds_a_server_that_misses_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kcdsl.lsp.text.documents._shown", lambda *_: [])
    assert failure(NOTED, served=True) == ("server", "the server finds something else")


PLANTED: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "a symbol beyond the end": (
        lsp.TEXT_DOCUMENT_DOCUMENT_SYMBOL,
        lambda found: [replace_range(found[0], lsp.Range(place(0, 0), place(99, 0)))],
        "a range outside of textDocument/documentSymbol",
    ),
    "a range that ends before it begins": (
        lsp.TEXT_DOCUMENT_HOVER,
        lambda _: lsp.Hover("x", lsp.Range(place(1, 0), place(0, 0))),
        "a range outside of textDocument/hover",
    ),
    "an answer that cannot be sent": (
        lsp.TEXT_DOCUMENT_HOVER,
        lambda _: lsp.Hover("\ud800"),
        "UnicodeEncodeError",
    ),
    "a token without letters": (
        lsp.TEXT_DOCUMENT_SEMANTIC_TOKENS_FULL,
        lambda _: lsp.SemanticTokens([0, 0, 0, 0, 0]),
        "a token beyond its line",
    ),
    "tokens in each other": (
        lsp.TEXT_DOCUMENT_SEMANTIC_TOKENS_FULL,
        lambda _: lsp.SemanticTokens([0, 0, 3, 0, 0, 0, 1, 2, 0, 0]),
        "a token in another",
    ),
    "half a token": (
        lsp.TEXT_DOCUMENT_SEMANTIC_TOKENS_FULL,
        lambda _: lsp.SemanticTokens([0, 0, 3]),
        "tokens that are not five numbers each",
    ),
    "an offer elsewhere": (
        lsp.TEXT_DOCUMENT_COMPLETION,
        lambda _: offers(lsp.TextEdit(lsp.Range(place(0, 0), place(0, 0)), "x")),
        "an offer that is not at the cursor",
    ),
    "an offer of nothing": (
        lsp.TEXT_DOCUMENT_COMPLETION,
        lambda _: offers(None),
        "an offer without an edit",
    ),
    "a rename twice": (
        lsp.TEXT_DOCUMENT_RENAME,
        lambda edit: twice(edit),
        "edits of a rename overlap",
    ),
    "a rename of a part": (
        lsp.TEXT_DOCUMENT_RENAME,
        lambda edit: first(edit),
        "a rename makes errors",
    ),
}


def place(line: int, character: int) -> lsp.Position:
    return lsp.Position(line, character)


def replace_range(symbol: Any, range: lsp.Range) -> Any:
    """Return a symbol at another range."""
    return lsp.DocumentSymbol(symbol.name, symbol.kind, range, range)


def offers(edit: lsp.TextEdit | None) -> lsp.CompletionList:
    return lsp.CompletionList(False, [lsp.CompletionItem("x", text_edit=edit)])


def twice(edit: lsp.WorkspaceEdit) -> lsp.WorkspaceEdit:
    """Return every edit of a rename twice."""
    changes = edit.changes or {}
    return lsp.WorkspaceEdit({uri: [*found, *found] for uri, found in changes.items()})


def first(edit: lsp.WorkspaceEdit) -> lsp.WorkspaceEdit:
    """Return only the first edit of a rename."""
    changes = edit.changes or {}
    return lsp.WorkspaceEdit({uri: [*found][:1] for uri, found in changes.items()})


@pytest.mark.sample(8)
@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED.keys())
def test_finds_invalid_server_answers(
    monkeypatch: pytest.MonkeyPatch, planted: tuple[str, Callable[[Any], Any], str]
) -> None:
    method, change, key = planted
    answered(monkeypatch, method, change)
    # Every offset is a cursor, so that one of them is in a name.
    monkeypatch.setattr(serving, "cursors", lambda text: list(range(len(text))))
    found = failure(GOOD, served=True)
    assert found[0] == method
    assert found[1].startswith(key)


# --- tools ----------------------------------------------------------------------------------------


def test_time_limit_counts_processor_time_and_leaves_no_alarm() -> None:
    def work() -> None:
        with limit(0.05):
            while True:
                pass

    with pytest.raises(Hang):
        work()
    with limit(0.05):
        time.sleep(0.15)  # a busy machine is not a hang
    begun = time.process_time()
    while time.process_time() - begun < 0.1:
        pass


def test_document_is_reduced_to_the_part_that_reveals_the_defect() -> None:
    data = b"\n".join(b"line %d" % n for n in range(40)) + b"\nx: [bad\n"
    assert reduce(data, lambda d: b"[b" in d) == b"[b"
    assert reduce("é\n[b".encode(), lambda d: "é".encode() in d) == "é".encode()
    assert reduce(b"\xff[b", lambda d: b"\xff" in d) == b"\xff"
    begun = time.monotonic()
    assert reduce(data, lambda d: d == data, seconds=0.0) == data
    assert time.monotonic() - begun < 1
