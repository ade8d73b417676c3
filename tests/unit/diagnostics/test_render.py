"""Renderings: exact carets, stable widths, safe characters."""

from __future__ import annotations

import io
import json

import pytest

from kcdsl.diagnostics import Diagnostic, Label, Severity
from kcdsl.diagnostics.codes import UNKNOWN_METRIC, all_codes, find
from kcdsl.diagnostics.render import render
from kcdsl.diagnostics.render.documents import render_json
from kcdsl.diagnostics.render.full import render_full
from kcdsl.diagnostics.render.lines import render_concise
from kcdsl.diagnostics.spans import SourceFile, Span

TEXT = "a: 1\nrequire: >-\n  p99(kll)\n  <= 0.02\n"
SOURCE = SourceFile("c.kc.yaml", TEXT)
AT = TEXT.index("kll")


def diagnostic(**changes: object) -> Diagnostic:
    """Return a diagnostic about `kll`."""
    values: dict[str, object] = {
        "code": UNKNOWN_METRIC,
        "message": "there is no metric `kll`",
        "source": SOURCE,
        "span": Span(AT, AT + 3),
        "help": "did you mean `kl`?",
    }
    return Diagnostic(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove colour variables from the environment."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def test_full_rendering() -> None:
    assert render_full([diagnostic()]) == "\n".join(
        [
            "error[KC203]: there is no metric `kll`",
            "  --> c.kc.yaml:3:7",
            "  |",
            "3 |   p99(kll)",
            "  |       ^^^",
            "  = help: did you mean `kl`?",
        ]
    )


def test_rendering_of_labels_notes_and_multi_line_spans() -> None:
    start, end = TEXT.index("p99"), TEXT.index("0.02") + 4
    shown = render_full(
        [
            diagnostic(
                span=Span(start, end), labels=(Label(Span(0, 1), "declared here"),), notes=("why",)
            )
        ]
    )
    assert shown.splitlines()[2:] == [
        "  |",
        "1 | a: 1",
        "  | - declared here",
        "  ...",
        "3 |   p99(kll)",
        "  |   ^^^^^^^^",
        "4 |   <= 0.02",
        "  |   ^^^^^^^",
        "  = note: why",
        "  = help: did you mean `kl`?",
    ]


def test_rendering_of_wide_characters_tabs_and_end_of_text() -> None:
    source = SourceFile("x", "é漢\tk\n")
    shown = render_full([diagnostic(source=source, span=Span(3, 4), help=None)]).splitlines()
    assert shown[3:] == ["1 | é漢    k", "  |        ^"]
    shown = render_full([diagnostic(source=source, span=Span(4, 4), help=None)]).splitlines()
    assert shown[-1] == "  |         ^"
    shown = render_full([diagnostic(source=source, span=Span(5, 5), help=None)]).splitlines()
    assert shown[1] == " --> x:2:1".replace(" -->", "  -->")


def test_long_lines_are_cut_around_the_span() -> None:
    source = SourceFile("x", "a" * 500 + "TARGET" + "b" * 500)
    lines = render_full([diagnostic(source=source, span=Span(500, 506))]).splitlines()
    assert max(map(len, lines)) <= 100
    column = lines[4].index("^")
    assert lines[3][column : column + 6] == "TARGET"
    assert lines[4].count("^") == 6


def test_control_characters_never_reach_the_terminal() -> None:
    source = SourceFile("x", "a\x1b[31m\n")
    shown = render_full([diagnostic(source=source, span=Span(0, 1), message="\x1b[31mred")])
    assert "\x1b" not in shown


def test_colour_depends_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in render_full([diagnostic()], io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in render_full([diagnostic()], io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in render_full([diagnostic()], io.StringIO())


def test_rendering_without_a_position() -> None:
    shown = render_full([diagnostic(source=None, span=None)])
    assert shown == "error[KC203]: there is no metric `kll`\n  = help: did you mean `kl`?"
    assert render_concise([diagnostic(source=None, span=None)]).startswith("error[KC203]")


def test_concise_rendering() -> None:
    assert render_concise([diagnostic(severity=Severity.WARNING)]) == (
        "c.kc.yaml:3:7: warning[KC203] there is no metric `kll` (did you mean `kl`?)"
    )


def test_json_rendering() -> None:
    (record,) = json.loads(render_json([diagnostic()]))
    assert record == {
        "code": "KC203",
        "severity": "error",
        "file": "c.kc.yaml",
        "line": 3,
        "column": 7,
        "end_line": 3,
        "end_column": 10,
        "message": "there is no metric `kll`",
        "help": "did you mean `kl`?",
    }
    (record,) = json.loads(render_json([diagnostic(source=None, span=None)]))
    assert record["line"] is None
    assert json.loads(render([], "json", io.StringIO())) == []


def test_json_codes_are_complete() -> None:
    codes = all_codes()
    assert [c.id for c in codes] == sorted({c.id for c in codes})
    assert all(c.explanation.endswith(".") and c.title == c.title.strip() for c in codes)
    assert find("kc203") is UNKNOWN_METRIC
    assert find("KC000") is None
