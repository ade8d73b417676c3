"""The language reference is executed: its documents, tables and outputs."""

from __future__ import annotations

import re
from fractions import Fraction
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kcdsl.check.compile import Analysis, analyse
from kcdsl.check.expressions.fields import TRACE_FIELDS, predicate
from kcdsl.check.expressions.names import FUNCTIONS, PERCENTILE
from kcdsl.check.expressions.sorts import sort_of
from kcdsl.declare import metric
from kcdsl.diagnostics import Severity, Sink
from kcdsl.diagnostics.report import Reporter
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.escalation import ACTIONS, FAMILY_DEFAULTS
from kcdsl.ir.terms import Family, Level
from kcdsl.metrics import LN_2_UP, METRICS
from kcdsl.metrics.declarations import PARAMETERS
from kcdsl.route.fragments import classify
from kcdsl.source.yaml_nodes import Mapping, Scalar, parse_yaml
from kcdsl.syntax import ast
from kcdsl.syntax.parser import parse_expression
from kcdsl.units import UNITS
from tests.support.compiling import compile_contract

if TYPE_CHECKING:
    from tests.conftest import Cli

PAGE = Path(__file__).resolve().parents[3] / "grammar" / "README.md"
TEXT = PAGE.read_text("utf-8")
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(kind, info.strip(), body) for kind, info, body in BLOCK.findall(TEXT)]
DOCUMENTS = [(info, body) for kind, info, body in BLOCKS if kind == "yaml"]
HEAD = DOCUMENTS[0][1].split("clauses:")[0]


def section(title: str) -> str:
    """Return the text under a heading, up to the next heading of its level or above."""
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,4}} |\Z)", TEXT, re.M | re.S)
    assert found is not None, title
    return found[2]


def table(title: str, header: str) -> list[list[str]]:
    """Return the rows of the table with this header line under a heading."""
    lines = iter(section(title).splitlines())
    assert any(line.startswith(header) for line in lines), (title, header)
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
        rows.append([cell.strip().replace("\\|", "|") for cell in cells])
    assert rows
    return rows


def code(cell: str) -> str:
    """Return the text of the first code span of a cell."""
    found = re.match(r"`([^`]+)`", cell)
    assert found is not None, cell
    return found[1]


def checked(content: str) -> tuple[Analysis, list[str]]:
    """Return the analysis of a document and the codes of its errors and warnings."""
    whole = content if content.startswith("kcdsl: 1") else HEAD + content
    sink = Sink()
    analysis = analyse(SourceFile("README.md", whole), sink)
    return analysis, [d.code.id for d in sink if d.severity is not Severity.NOTE]


def requirement(text: str, more: str = "") -> tuple[Analysis, list[str]]:
    indented = f"clauses:\n  A:\n    level: L1\n{more}    require: >-\n      {text}\n"
    return checked(indented)


# --- documents -----------------------------------------------------------------------------------


def test_reference_contains_documents() -> None:
    assert len(DOCUMENTS) >= 14
    assert {kind for kind, _, _ in BLOCKS} <= {"yaml", "toml", "python", "console"}
    assert all(
        not info or re.fullmatch(r"file=\S+|reports=KC\d{3}(,KC\d{3})*", info)
        for _, info, _ in BLOCKS
    )


@pytest.mark.parametrize(
    ("info", "body"), [item for item in DOCUMENTS if not item[0].startswith("file=")]
)
def test_documents_report_their_stated_codes(info: str, body: str) -> None:
    expected = info.removeprefix("reports=").split(",") if info else []
    analysis, found = checked(body)
    assert found == expected
    assert analysis.program is not None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with every file of the page."""
    for _, info, body in BLOCKS:
        if info.startswith("file="):
            path = tmp_path / info.removeprefix("file=")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "name", [info.removeprefix("file=") for info, _ in DOCUMENTS if info.startswith("file=")]
)
def test_files_compile_in_their_folder(folder: Path, name: str) -> None:
    path = folder / name
    program, sink = compile_contract(path)
    assert [d.message for d in sink if d.severity is not Severity.NOTE] == []
    assert (program is None) == ("\nlibrary:" in path.read_text("utf-8"))


def test_commands_print_the_shown_output(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    consoles = [body for kind, _, body in BLOCKS if kind == "console"]
    assert consoles
    for body in consoles:
        runs = re.findall(r"^\$ kcdsl ([^\n]*)\n((?:(?!\$ ).*\n?)*)", body, re.M)
        assert len(runs) == len(re.findall(r"^\$ ", body, re.M)) > 0
        for command, printed in runs:
            ran = cli(*command.split(), cwd=folder)
            shown = "\n".join(line.rstrip() for line in ran.stdout.splitlines())
            assert shown.strip() == printed.strip(), command


# --- tables that are compiled --------------------------------------------------------------------


def syntax(text: str) -> ast.Expression:
    source, sink = SourceFile("x", f"a: >-\n  {text}\n"), Sink()
    root = parse_yaml(source, sink)
    assert isinstance(root, Mapping)
    node = root.entries[0].value
    assert isinstance(node, Scalar)
    found = parse_expression(source, node, sink)
    assert found is not None, [d.message for d in sink]
    return found


@pytest.mark.parametrize("row", table("Sorts", "| expression | sort |"), ids=lambda r: r[0])
def test_table_of_types(row: list[str]) -> None:
    scope = checked("clauses: {A: {require: mean(kl) <= 1, level: L1}}\n")[0].scope
    assert str(sort_of(syntax(code(row[0])), scope)) == row[1]


@pytest.mark.parametrize(
    "row", table("Typing rules", "| rule | refused | code |"), ids=lambda r: r[0]
)
def test_table_of_typing_rules(row: list[str]) -> None:
    analysis, found = requirement(code(row[1]))
    assert (analysis.program, found) == (None, [row[2]])


@pytest.mark.parametrize("row", table("Meaning", "| requirement | fragment |"), ids=lambda r: r[0])
def test_table_of_fragments(row: list[str]) -> None:
    analysis, found = requirement(code(row[0]))
    assert found == []
    assert analysis.program is not None
    assert classify(analysis.program.clauses[0]).fragment.value == code(row[1])


@pytest.mark.parametrize(
    "row", table("Predicates of slices", "| predicate | r is in"), ids=lambda r: r[0]
)
def test_table_of_predicates(row: list[str]) -> None:
    sink = Sink()
    assert predicate(syntax(code(row[0])), Reporter(SourceFile("x", ""), sink)) is not None
    assert list(sink) == []


def test_table_of_operator_precedence() -> None:
    from kcdsl.ir.printer import print_expression

    bound = {
        "a + b * c": "a + (b * c)",
        "a - b - c": "(a - b) - c",
        "-a * b": "(-a) * b",
        "not a <= b and c <= d": "(not (a <= b)) and (c <= d)",
        "a <= b or c <= d and e <= f": "(a <= b) or ((c <= d) and (e <= f))",
        "a <= b implies c <= d implies e <= f": "(a <= b) implies ((c <= d) implies (e <= f))",
        "a <= b or c <= d implies e <= f": "((a <= b) or (c <= d)) implies (e <= f)",
        "forall x in points(s): a <= b and c <= d": "forall x in points(s): (a <= b and c <= d)",
    }
    for plain, bracketed in bound.items():
        assert syntax(plain) == syntax(bracketed)
        assert print_expression(syntax(bracketed)) == plain


# --- tables that are compared --------------------------------------------------------------------


def test_table_of_units() -> None:
    bases = {"s": "s", "B": "B", "tok": "tok", "tok/s": "tok/s", "nats": "nat", "ratio": "ratio"}
    found = {}
    for name, _, worth in table("Units and dimensions", "| unit | measures |"):
        factor, base = worth.split(" ")
        found[code(name)] = (Fraction(factor), bases.get(base, base))
    assert found == {u.name: (u.factor, str(u.dimension)) for u in UNITS.values()}


def end(text: str) -> Fraction | None:
    if text in ("∞", "-∞"):
        return None
    return LN_2_UP if text == "ln 2" else Fraction(text)


def test_table_of_metrics() -> None:
    header = "| metric | family | one per | better | dimension | range | statistics | from |"
    rows = {code(row[0]): row for row in table("Metrics", header)}
    assert list(rows) == list(METRICS)
    for name, definition in METRICS.items():
        named, family, counted, better, dimension, span, statistics, needs, what = rows[name]
        assert re.findall(r"`(\w+)`", named) == [name]
        assert (family, counted, better) == (
            definition.family,
            definition.counted,
            definition.better,
        )
        assert {"nats": "nat"}.get(dimension, dimension) == str(definition.dimension)
        low, high = span.strip("[]").split(", ")
        assert (end(low), end(high)) == (definition.lower, definition.upper)
        words = {"alone": "aggregate"}
        listed = {words.get(w, w) for w in statistics.split(", ") if w != "through `abs`"}
        assert listed == definition.statistics
        assert ("through `abs`" in statistics) == definition.signed
        assert tuple(needs.split(", ")) == definition.needs
        assert what == definition.summary


def test_table_of_functions() -> None:
    listed: set[str] = set()
    for names, _, _ in table("Functions", "| function | call | gives |"):
        listed |= set(re.findall(r"`(\w+)`", names)) - {"pNN"}
    assert listed == set(FUNCTIONS)
    assert PERCENTILE.fullmatch("p17")


def test_table_of_actions_and_defaults() -> None:
    text = section("Escalation")
    first = text.split("The table")[0]
    assert tuple(re.findall(r"`(\w+)`", first)) == ACTIONS
    for family, *cells in table("Escalation", "| | L1 | L2 | L3 |"):
        row = [FAMILY_DEFAULTS[Family(family), level] for level in Level]
        assert [code(cell) for cell in cells] == row


def test_table_of_trace_fields() -> None:
    known = section("Trace fields").split("Well known:")[1].split(". ")[0]
    assert tuple(re.findall(r"`(\w+)`", known)) == TRACE_FIELDS


def test_table_of_decorator_arguments() -> None:
    listed = [
        name
        for row in table("Metrics of your own", "| argument | takes |")
        for name in re.findall(r"`(\w+)`", row[0])
    ]
    assert sorted(listed) == sorted(signature(metric).parameters)


def test_table_of_function_parameters() -> None:
    listed: dict[str, str | None] = {}
    for names, given, _ in table("Metrics of your own", "| parameter | is given by |"):
        for name in re.findall(r"`(\w+)`", names):
            listed[name] = None if given == "always there" else code(given)
    assert listed == PARAMETERS
