"""Completion in expressions: the words that the grammar allows next, filtered by scope and sort."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lsprotocol.types import CompletionItemKind as ItemKind

from kcdsl.check.compile import Analysis
from kcdsl.check.expressions.fields import TRACE_FIELDS, field_sorts
from kcdsl.check.expressions.names import (
    BLOCK_EXAMPLES,
    DRIFTS,
    NORMS,
    PERCENTILE,
    REGIONS,
    STATEMENTS,
    STATISTICS,
    Function,
    all_functions,
    find_function,
)
from kcdsl.diagnostics.model import Refusal
from kcdsl.diagnostics.spans import Span
from kcdsl.lsp.features.completion import Item
from kcdsl.lsp.features.knowledge import (
    KEYWORDS,
    describe_block,
    describe_function,
    describe_metric,
    describe_unit,
    slice_text,
)
from kcdsl.lsp.text.documents import Snapshot
from kcdsl.lsp.text.lexemes import (
    Lexeme,
    OpenBracket,
    Role,
    Start,
    lexemes,
    next_terminals,
    open_frames,
)
from kcdsl.lsp.text.nodes import expressions
from kcdsl.metrics import MetricDefinition
from kcdsl.source.files import open_regular
from kcdsl.units import UNITS, Dimension, describe

_COMPARE = ("<=", ">=", "<", ">", "==")
_LOGIC = {"AND": "and", "OR": "or", "IMPLIES": "implies"}
_ARITHMETIC = {"PLUS": "+", "MINUS": "-", "STAR": "*", "SLASH": "/"}
_SAMPLE_BYTES = 65_536
_FEW_VALUES = 12


@dataclass(frozen=True, slots=True)
class _Place:
    """The cursor in an expression: preceding words, open brackets, and allowed terminals."""

    analysis: Analysis
    start: Start
    words: tuple[Lexeme, ...]
    frame: OpenBracket
    terminals: frozenset[str]
    span: Span
    folder: Path | None

    @property
    def last(self) -> str:
        return self.words[-1].text if self.words else ""

    def item(
        self,
        label: str,
        kind: ItemKind,
        insert: str | None = None,
        detail: str = "",
        documentation: str = "",
        snippet: bool = False,
        order: int = 5,
    ) -> Item:
        text = label if insert is None else insert
        return Item(label, kind, self.span, text, detail, documentation, snippet, order)


def suggest(snapshot: Snapshot, start: Start, before: str, offset: int) -> list[Item]:
    """Return the completions after `before`, which ends at the cursor."""
    analysis = snapshot.analysis
    metrics = analysis.scope.metrics
    words = lexemes(before, start, lambda name: metrics.find(name) is not None)
    begun = 0
    if words and words[-1].end == len(before) and _is_unfinished(words[-1]):
        # The word that ends at the cursor is unfinished and is completed.
        begun = len(words[-1].text)
        words = words[:-1]
    frames = open_frames(words)
    place = _Place(
        analysis,
        start,
        words,
        frames[-1] if frames else OpenBracket(""),
        next_terminals(words, start),
        Span(offset - begun, offset),
        snapshot.document.folder,
    )
    return list(_suggest(place, snapshot))


def _is_unfinished(word: Lexeme) -> bool:
    return (
        word.role not in {Role.NUMBER, Role.OPERATOR, Role.BRACKET, Role.TEXT} and word.text != "%"
    )


def _suggest(place: _Place, snapshot: Snapshot) -> Iterator[Item]:
    if "UNIT" in place.terminals:
        yield from _units(place)
    if place.start == "budget":
        yield from _budget(place)
        return
    if place.start == "quantity":
        return
    if "NAME" in place.terminals:
        if place.start == "predicate":
            yield from _fields(place, snapshot)
        else:
            yield from _names(place)
    if "STRING" in place.terminals and place.start == "predicate":
        yield from _texts(place, snapshot)
    yield from _signs(place)


# --- names ---------------------------------------------------------------------------------------


def _names(place: _Place) -> Iterator[Item]:
    """Yield the names that are allowed in the innermost open bracket."""
    opener, argument = place.frame.opener, place.frame.argument
    if place.last in {"forall", "exists"}:
        bound = {w.text for w in place.words if w.role is Role.VARIABLE}
        yield from (
            place.item(name, ItemKind.Variable, detail="a new variable")
            for name in ("x", "y", "z")
            if name not in bound
        )
    elif place.last == "in":
        yield from (_call(place, find_function(name), 0) for name in REGIONS)
    elif opener in REGIONS:
        if argument == 0:
            yield from _slices(place)
    elif opener in (*DRIFTS, "no_flip"):
        yield from _block_or_variable(place, argument)
    elif opener in NORMS:
        yield from (_call(place, find_function(name), 0) for name in DRIFTS)
    elif opener in STATISTICS or PERCENTILE.fullmatch(opener):
        if opener != "quantile" or argument == 1:
            yield from _metrics(place, opener)
            yield _call(place, find_function("abs"), 20)
    elif opener == "table":
        yield from _tables(place)
    elif opener == "has":
        if argument == 0:
            yield place.item("trace", ItemKind.Keyword, documentation=KEYWORDS["trace"])
    elif opener == "[":
        yield from (
            place.item(name, ItemKind.Value, detail="trace field")
            for name in TRACE_FIELDS
            if name not in {w.text for w in place.words}
        )
    elif opener == "abs":
        yield from _metrics(place, _statistic_around(place))
    else:
        yield from _statements(place)


def _statistic_around(place: _Place) -> str:
    """Return the statistic around an `abs(`; "" outside statistics."""
    frames = open_frames(place.words)
    return frames[-2].opener if len(frames) > 1 else ""


def _call(place: _Place, function: Function | None, order: int) -> Item:
    assert function is not None
    return place.item(
        function.name,
        ItemKind.Function,
        function.snippet,
        function.signature.removeprefix(function.name),
        describe_function(function),
        True,
        order,
    )


def _slices(place: _Place) -> Iterator[Item]:
    for name in place.analysis.scope.slices:
        text = slice_text(place.analysis, name)
        yield place.item(name, ItemKind.Module, detail="Slice", documentation=text)


def _tables(place: _Place) -> Iterator[Item]:
    for name, table in place.analysis.scope.tables.items():
        detail = "Table" if table is None else f"Table in {table.dimension}"
        yield place.item(name, ItemKind.Class, detail=detail)


def _block_or_variable(place: _Place, argument: int) -> Iterator[Item]:
    if argument == 0:
        for number, name in enumerate(_known_blocks(place)):
            text = describe_block(name)
            yield place.item(name, ItemKind.Class, detail="Block", documentation=text, order=number)
    elif argument == 1:
        names = [w.text for w in place.words if w.role is Role.VARIABLE and w.binder == w.start]
        for name in dict.fromkeys(names):
            yield place.item(name, ItemKind.Variable, detail="bound here")


def _known_blocks(place: _Place) -> list[str]:
    """Return the blocks in the contract, then an example of each kind."""
    used = [
        word.lexeme.text
        for expression in expressions(place.analysis)
        for word in expression.words
        if word.lexeme.role is Role.BLOCK
    ]
    return list(dict.fromkeys([*sorted(used), *BLOCK_EXAMPLES]))


def _metrics(place: _Place, statistic: str) -> Iterator[Item]:
    """Yield the metrics that support a statistic, grouped by the wanted direction."""
    kind = "quantile" if PERCENTILE.fullmatch(statistic) else statistic
    in_abs = place.frame.opener == "abs"
    for number, metric in enumerate(place.analysis.scope.metrics.definitions()):
        if statistic and kind not in metric.statistics:
            continue
        if not statistic and metric.kind == "pointwise":
            continue
        # A signed metric is only allowed inside `abs(...)`; others do not need it.
        order = number + (100 if metric.signed is not in_abs else 0)
        yield _metric(place, metric, order)


def _metric(place: _Place, metric: MetricDefinition, order: int) -> Item:
    insert, snippet = metric.name, False
    if metric.signed and place.frame.opener != "abs":
        insert = f"abs({metric.name})"
    return place.item(
        metric.name,
        ItemKind.Variable,
        insert,
        f"{metric.better} is better, per {metric.counted}",
        describe_metric(metric),
        snippet,
        order,
    )


def _statements(place: _Place) -> Iterator[Item]:
    """Yield the starts of a statement or a number outside calls."""
    after_comparison = bool(place.words) and place.last in _COMPARE
    if "FORALL" in place.terminals:
        yield place.item(
            "forall",
            ItemKind.Snippet,
            "forall ${1:x} in ${2:points(all)}: norm_inf(drift(${3:attn_0}, ${1:x})) <= ${4:0.01}",
            "statement about every input",
            KEYWORDS["forall"],
            True,
            0,
        )
    quantified = any(w.text in {"forall", "exists"} for w in place.words)
    for function in all_functions():
        if function.name in (*DRIFTS, *REGIONS) or (
            function.name == "table" and not after_comparison
        ):
            continue
        if function.sort == "Bool" and after_comparison:
            continue
        drifting = function.name in (*NORMS, "no_flip")
        if drifting and not quantified:
            continue
        order = 10 if drifting is quantified else 30
        if function.name == "table":
            if not place.analysis.scope.tables:
                continue
            order = 1
        yield _call(place, function, order)
    for metric in place.analysis.scope.metrics.definitions():
        if metric.kind == "aggregate":
            yield _metric(place, metric, 20)


# --- predicates ----------------------------------------------------------------------------------


def _fields(place: _Place, snapshot: Snapshot) -> Iterator[Item]:
    """Yield the fields of requests, from other predicates and from the data."""
    if place.last in _COMPARE or place.last == "!=" or place.frame.opener == "[":
        return
    known = dict(field_sorts(place.analysis.slices, None))
    for file in _data_files(snapshot):
        for name, values in _sampled(file).items():
            known.setdefault(name, _sort_of(values))
    for name, sort in known.items():
        yield place.item(name, ItemKind.Property, detail=sort)


def _texts(place: _Place, snapshot: Snapshot) -> Iterator[Item]:
    """Yield the texts of the left field in the data."""
    field = next((w.text for w in reversed(place.words) if w.role is Role.FIELD), None)
    for file in _data_files(snapshot):
        values = _sampled(file).get(field or "", [])
        for value in values[:_FEW_VALUES]:
            if isinstance(value, str) and '"' not in value and "\\" not in value:
                yield place.item(f'"{value}"', ItemKind.Value, detail=f"a {field} of {file.name}")


def _data_files(snapshot: Snapshot) -> list[Path]:
    raw, folder = snapshot.analysis.raw or snapshot.analysis.raw_library, snapshot.document.folder
    if raw is None or folder is None:
        return []
    from kcdsl.model.files import Artefacts

    files, found = Artefacts.of(folder), dict[Path, None]()
    for name in (raw.data, *(item.data for item in raw.slices)):
        if name is not None:
            with suppress(Refusal):
                found[files.find(name.text)] = None
    return list(found)


def _sampled(file: Path) -> dict[str, list[object]]:
    try:
        about = file.stat()
    except OSError:
        return {}
    return _fields_of(file, about.st_mtime_ns)


@lru_cache(maxsize=32)
def _fields_of(file: Path, modified: int) -> dict[str, list[object]]:
    """Return the fields of the first records of a file, each with its distinct values."""
    try:
        with open_regular(file) as stream:
            lines = stream.read(_SAMPLE_BYTES).split(b"\n")[:-1]
    except OSError:
        return {}
    found: dict[str, list[object]] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        for name, value in record.items() if isinstance(record, dict) else ():
            if isinstance(value, str | int | float | bool) and name.isidentifier():
                values = found.setdefault(name, [])
                if value not in values and len(values) <= _FEW_VALUES:
                    values.append(value)
    return found


def _sort_of(values: list[object]) -> str:
    if all(isinstance(value, bool) for value in values):
        return "Bool"
    return "Text" if all(isinstance(value, str) for value in values) else "Real"


# --- signs, units, budgets -----------------------------------------------------------------------


def _signs(place: _Place) -> Iterator[Item]:
    inside, after_statement = place.frame.opener != "", _ends_statement(place)
    if "IN" in place.terminals and (place.start == "predicate" or _binds(place)):
        yield place.item("in", ItemKind.Keyword, "in ", documentation=KEYWORDS["in"], order=40)
    if "NOT" in place.terminals and not inside:
        yield place.item("not", ItemKind.Keyword, "not ", documentation=KEYWORDS["not"], order=40)
    if inside or not place.words:
        return
    if "COMPARE" in place.terminals and not after_statement:
        signs = _COMPARE if place.start == "requirement" else (*_COMPARE, "!=")
        good = _wanted_sign(place)
        for number, sign in enumerate(signs):
            order = 0 if sign == good else number + 1
            yield place.item(sign, ItemKind.Operator, f"{sign} ", order=order)
        for terminal, sign in _ARITHMETIC.items() if place.start == "requirement" else ():
            if terminal in place.terminals:
                yield place.item(sign, ItemKind.Operator, f"{sign} ", order=50)
    for terminal, word in _LOGIC.items():
        if terminal in place.terminals and after_statement:
            yield place.item(
                word, ItemKind.Keyword, f"{word} ", documentation=KEYWORDS[word], order=40
            )


def _binds(place: _Place) -> bool:
    """Return whether the word before the cursor is the variable of a quantifier."""
    return bool(place.words) and place.words[-1].binder == place.words[-1].start


def _ends_statement(place: _Place) -> bool:
    """Return whether the text before the cursor is a comparison or a complete statement."""
    depth = 0
    for word in reversed(place.words):
        if word.role is Role.BRACKET and word.text in ")]":
            depth += 1
        elif word.role is Role.BRACKET and word.text in "([":
            depth -= 1
            if depth < 0:
                return False
        elif depth == 0:
            if word.text in (*_COMPARE, "!=", "in") or word.text in STATEMENTS:
                return True
            if word.text in {"and", "or", "implies", ":"}:
                return False
    return False


def _wanted_sign(place: _Place) -> str:
    """Return the comparison that fits the direction of the metric on the left."""
    metric = _metric_of(place)
    return ">=" if metric is not None and metric.better == "higher" else "<="


def _metric_of(place: _Place) -> MetricDefinition | None:
    """Return the metric of the comparison at the cursor: the last one before it."""
    for word in reversed(place.words):
        if word.role is Role.METRIC:
            return place.analysis.scope.metrics.find(word.text)
        if word.text in {"and", "or", "implies"}:
            return None
    return None


def _units(place: _Place) -> Iterator[Item]:
    """Yield the matching units: of the metric, of a budget, or all."""
    wanted = _dimension(place)
    fitting = [u for n, u in UNITS.items() if n != "1" and wanted in {None, u.dimension}]
    for number, unit in enumerate(fitting):
        name = unit.name
        before = "" if name == "%" else " " * (not _space_before(place))
        yield place.item(
            name,
            ItemKind.Unit,
            f"{before}{name}",
            describe(unit.dimension),
            describe_unit(name) or "",
            order=number,
        )


def _space_before(place: _Place) -> bool:
    """Return whether there is a space between the cursor and the number before it."""
    source = place.analysis.source.text
    return source[place.span.start - 1 : place.span.start].isspace()


def _dimension(place: _Place) -> Dimension | None:
    if place.start == "budget":
        return UNITS["%"].dimension
    if place.frame.opener in (*REGIONS, "quantile", "no_flip"):
        return UNITS["%"].dimension
    metric = _metric_of(place)
    return None if metric is None else metric.dimension


def _budget(place: _Place) -> Iterator[Item]:
    if place.last == "of":
        for name in ("requests", "windows"):
            yield place.item(name, ItemKind.Keyword, documentation=KEYWORDS[name])
    elif "OF" in place.terminals:
        yield place.item("of", ItemKind.Keyword, "of ", documentation=KEYWORDS["of"])
    elif not place.words:
        for unit in ("requests", "windows"):
            yield place.item(
                f"1% of {unit}",
                ItemKind.Snippet,
                f"${{1:1}}% of {unit}",
                documentation=KEYWORDS[unit],
                snippet=True,
            )
