"""Hovers: the meaning of the word at an offset, as Markdown."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kcdsl.check.compile import Analysis
from kcdsl.check.expressions.fields import TRACE_FIELDS, field_sorts
from kcdsl.check.expressions.measurements import in_words
from kcdsl.check.expressions.names import find_function
from kcdsl.check.expressions.sorts import UNKNOWN, sort_at
from kcdsl.diagnostics.codes import find as find_code
from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir import terms as ir
from kcdsl.ir.escalation import ACTIONS, severity
from kcdsl.ir.escalation import ALIASES as ACTION_ALIASES
from kcdsl.lsp.features.knowledge import (
    KEYWORDS,
    KnownClause,
    clause_named,
    describe_block,
    describe_function,
    describe_metric,
    describe_unit,
    description_at,
    kernel_text,
    library_text,
    mark,
    policy_action,
    scope_in,
    slice_text,
    table_text,
    verdicts_of,
)
from kcdsl.lsp.text.documents import Snapshot
from kcdsl.lsp.text.lexemes import Role
from kcdsl.lsp.text.nodes import (
    DocumentExpression,
    Field,
    Word,
    clause_of,
    fields_at,
    inner_span,
    written,
)
from kcdsl.metrics import MetricDefinition
from kcdsl.source.yaml_nodes import Mapping, Scalar
from kcdsl.syntax.parser import parse_expression

_IGNORE = re.compile(r"#[^\n]*?\bkcdsl:\s*ignore\[([^\]\n]*)")
_CODE = re.compile(r"KC[0-9]{3}")


@dataclass(frozen=True, slots=True)
class Hover:
    """A Markdown text for a range."""

    text: str
    span: Span


def hover(snapshot: Snapshot, offset: int) -> Hover | None:
    """Return the hover at an offset."""
    found = _ignored_code(snapshot.source, offset)
    if found is not None:
        return found
    analysis = snapshot.analysis
    holding = fields_at(analysis.root, offset)
    if not holding:
        return None
    field = holding[-1]
    if field.key is not None and field.key.span.holds(offset):
        return _key(snapshot, field)
    expression = written(analysis, field)
    if expression is not None:
        word = expression.at(offset)
        return None if word is None else _word(snapshot, expression, word, offset)
    if isinstance(field.value, Scalar) and field.value.span.end > field.value.span.start:
        return _value(snapshot, field, field.value)
    return None


def _ignored_code(source: SourceFile, offset: int) -> Hover | None:
    line = source.position(offset).line
    start = source.line_start(line)
    comment = _IGNORE.search(source.line(line))
    if comment is None:
        return None
    for code in _CODE.finditer(source.line(line), comment.start(1), comment.end(1)):
        span = Span(start + code.start(), start + code.end())
        found = find_code(code[0])
        if span.holds(offset) and found is not None:
            return Hover(code_text(found.id), span)
    return None


def code_text(id: str) -> str:
    """Return the description of a diagnostic code, as Markdown."""
    code = find_code(id)
    return (
        f"there is no code {id}"
        if code is None
        else f"**{code.id}**: {code.title}\n\n{code.explanation}"
    )


# --- YAML ----------------------------------------------------------------------------------------


def _key(snapshot: Snapshot, field: Field) -> Hover | None:
    assert field.key is not None
    analysis, span = snapshot.analysis, field.key.span
    item = _declared_clause(analysis, field)
    if item is not None:
        return Hover(clause_text(snapshot, item), span)
    if field.path[:-1] == ("slices",):
        return Hover(slice_text(analysis, field.name), span)
    if field.path[:-1] == ("tables",):
        return Hover(table_text(analysis, field.name), span)
    if field.path[0] == "imports" and len(field.path) == 4:
        return Hover(_imported_text(analysis, field.path[2], field.name), span)
    text = description_at(field.path, analysis.raw_library is not None)
    title = f"**{field.name}**"
    return Hover(f"{title}: {text}" if text else title, span) if text else None


def _declared_clause(analysis: Analysis, field: Field) -> KnownClause | None:
    """Return the clause whose identifier is the key."""
    if clause_of(field.path) != field.name or not isinstance(field.value, Mapping):
        return None
    item = clause_named(analysis, field.name)
    return item if item is not None and item.raw.id == field.key else None


def _value(snapshot: Snapshot, field: Field, scalar: Scalar) -> Hover | None:
    analysis, name, text = snapshot.analysis, field.name, scalar.text
    span = inner_span(analysis.source, scalar)
    in_clause = field.path[0] == "clauses"
    if in_clause and name == "slices":
        return Hover(slice_text(analysis, text), span)
    if in_clause and name == "id":
        item = clause_named(analysis, text)
        return None if item is None else Hover(clause_text(snapshot, item), span)
    if in_clause and name == "metric":
        return _record_metric(analysis, text, span)
    if name in {"then", "remediation", "action"} or field.path[0] == "escalation":
        return Hover(_action_text(text), span) if _action_text(text) else None
    if field.path[0] == "imports" and len(field.path) == 4 and isinstance(field.path[1], int):
        described = library_text(analysis, field.path[1], str(field.path[2]), text)
        return Hover(described, span) if described else None
    if in_clause and name == "require":
        return Hover(_trace_field(text), span)
    about = description_at(field.path, analysis.raw_library is not None)
    return Hover(f"**{name}**: {about}", span) if about else None


def _imported_text(analysis: Analysis, what: object, name: str) -> str:
    """Return the description of an imported name."""
    known = {"slices": slice_text, "tables": table_text}
    return known.get(str(what), kernel_text)(analysis, name)


def _trace_field(name: str) -> str:
    known = ", one of the well-known ones" if name in TRACE_FIELDS else ""
    return f"**{name}**: a field of a trace record{known}"


def _record_metric(analysis: Analysis, text: str, span: Span) -> Hover | None:
    metrics = analysis.scope.metrics
    record = metrics.find_record(text)
    if record is None:
        return None
    unit = f", its threshold in {record.unit}" if record.unit is not None else ""
    head = f"`{text}` is `{in_words(text, metrics)}`{unit}.\n\n"
    return Hover(head + describe_metric(metrics[record.metric]), span)


def _action_text(name: str) -> str:
    action = ACTION_ALIASES.get(name, name)
    if action not in ACTIONS:
        return ""
    also = f" (another spelling of `{action}`)" if action != name else ""
    return f"**{name}**{also}: action {severity(action) + 1} of {len(ACTIONS)}, mildest first"


# --- clauses -------------------------------------------------------------------------------------


def clause_text(snapshot: Snapshot, item: KnownClause) -> str:
    """Return the description of a clause, as Markdown: requirement, route, action, verdicts."""
    analysis, clause = snapshot.analysis, item.clause
    name = item.raw.id.text
    if clause is None:
        return f"**{name}**: a clause with errors"
    rows = [f"**{name}**: {clause.family} clause, level {clause.level}", ""]
    rows.append(f"```kcdsl\n{clause.text}\n```")
    if clause.slices:
        rows.append(f"- on {', '.join(f'`{s}`' for s in clause.slices)}")
    rows.append(f"- {_budget_text(clause)}")
    action = clause.action or policy_action(analysis, item)
    if action is not None:
        origin = "" if clause.action is not None else ", by the escalation policy"
        rows.append(f"- then `{action}`{origin}")
    if clause.holdout:
        rows.append("- held out: gates releases, never shown to a training loss")
    chosen = snapshot.route(name)
    if chosen is not None:
        backend = f"`{chosen.backend}`" if chosen.backend is not None else "nobody"
        rows.append(f"- decided by {backend}, fragment {chosen.fragment}: {chosen.reason}")
    for verdict, stale in verdicts_of(snapshot, name):
        where = f" on `{verdict.slice}`" if verdict.slice else ""
        evidence = f", {verdict.evidence}" if verdict.evidence else ""
        numbers = f" ({verdict.numbers})" if verdict.numbers else ""
        old = "; stale: the contract has changed since" if stale else ""
        rows.append(
            f"- {mark(verdict.verdict)} {verdict.verdict}{where}{evidence}{numbers}, "
            f"says {verdict.file}{old}"
        )
    return "\n".join(rows)


def _budget_text(clause: ir.Clause) -> str:
    if clause.budget is None:
        return "hard: no budget"
    return f"budget: {float(clause.budget.rate * 100):g}% of {clause.budget.unit}"


# --- expressions ---------------------------------------------------------------------------------


def _word(
    snapshot: Snapshot, expression: DocumentExpression, word: Word, offset: int
) -> Hover | None:
    analysis = snapshot.analysis
    text = _word_text(analysis, expression, word)
    span, sort = word.span, _sort(analysis, expression, offset)
    if sort is not None and word.lexeme.role in {
        Role.OPERATOR,
        Role.BRACKET,
        Role.NUMBER,
        Role.TEXT,
        Role.FIELD,
    }:
        span, shown = sort
        quoted_text = " ".join(analysis.source.text[span.start : span.end].split())
        text = f"`{quoted_text}`: `{shown}`" + (f"\n\n{text}" if text else "")
    elif sort is not None and word.lexeme.role is Role.FUNCTION and text:
        text = f"{text}\n\nHere: `{sort[1]}`"
    route = _route_text(snapshot, expression)
    if text and route:
        text = f"{text}\n\n---\n\n{route}"
    return Hover(text, span) if text else None


def _route_text(snapshot: Snapshot, expression: DocumentExpression) -> str:
    item = clause_named(snapshot.analysis, clause_of(expression.field.path))
    if item is None or item.clause is None:
        return ""
    chosen = snapshot.route(item.raw.id.text)
    if chosen is None:
        return ""
    backend = "nobody" if chosen.backend is None else f"`{chosen.backend}`"
    return f"decided by {backend}: {chosen.reason}"


def _sort(
    analysis: Analysis, expression: DocumentExpression, offset: int
) -> tuple[Span, str] | None:
    """Return span and sort of the smallest part at an offset; None in a broken expression."""
    if expression.start not in {"requirement", "predicate"}:
        return None
    parsed = parse_expression(analysis.source, expression.scalar, Sink())
    if parsed is None:
        return None
    fields = None
    if expression.start == "predicate":
        raw = analysis.raw or analysis.raw_library
        data = raw.data.text if raw is not None and raw.data is not None else None
        fields = field_sorts(analysis.slices, data)
    found = sort_at(parsed, scope_in(parsed, analysis.scope), offset, fields)
    if found is None or found[1] == UNKNOWN:
        return None
    return found[0], str(found[1])


def _word_text(analysis: Analysis, expression: DocumentExpression, word: Word) -> str:
    """Return the description of a single word."""
    name = word.lexeme.text
    match word.lexeme.role:
        case Role.METRIC:
            metric = analysis.scope.metrics.find(name)
            return describe_metric(metric) if metric is not None else ""
        case Role.FUNCTION:
            function = find_function(name)
            return (
                ""
                if function is None
                else describe_function(function, _measured(analysis, expression, word))
            )
        case Role.SLICE:
            return slice_text(analysis, name)
        case Role.TABLE:
            return table_text(analysis, name)
        case Role.BLOCK:
            return describe_block(name)
        case Role.VARIABLE:
            return _variable_text(expression, word)
        case Role.UNIT:
            return describe_unit(name) or ""
        case Role.KEYWORD:
            return f"**{name}**: {KEYWORDS[name]}" if name in KEYWORDS else ""
        case Role.FIELD:
            in_request = expression.start == "predicate"
            return f"**{name}**: a field of a request" if in_request else _trace_field(name)
        case Role.NUMBER if expression.start == "budget":
            return "The share that may break the requirement."
        case _:
            return ""


def _measured(
    analysis: Analysis, expression: DocumentExpression, word: Word
) -> MetricDefinition | None:
    """Return the metric that a statistic is applied to."""
    for other in expression.words:
        if other.lexeme.start > word.lexeme.end and other.lexeme.role is Role.METRIC:
            return analysis.scope.metrics.find(other.lexeme.text)
    return None


def _variable_text(expression: DocumentExpression, word: Word) -> str:
    """Return the description of the range of a bound variable."""
    binder = next((w for w in expression.words if w.lexeme.start == word.lexeme.binder), None)
    if binder is None:
        return f"**{word.lexeme.text}**: not bound by a quantifier"
    number = expression.words.index(binder)
    rest = [w.lexeme.text for w in expression.words[number + 2 :]]
    end = rest.index(")") + 1 if ")" in rest else len(rest)
    region = "".join(text if text != "," else ", " for text in rest[:end])
    kind = find_function(rest[0]) if rest else None
    about = f"\n\n{kind.meaning}" if kind is not None else ""
    return f"**{word.lexeme.text}**: an input in `{region}`{about}"
