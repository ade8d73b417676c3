"""Typing of statements: from syntax to formulas of the IR."""

from __future__ import annotations

import re
from fractions import Fraction

from kcdsl.check.expressions.bounds import check_threshold, tables_stand_alone
from kcdsl.check.expressions.fields import TRACE_FIELDS, likely_field
from kcdsl.check.expressions.measurements import align, check_signs
from kcdsl.check.expressions.names import (
    BLOCK,
    FUNCTIONS,
    REGIONS,
    STATEMENTS,
    Scope,
    quantity,
    single_comparison,
    takes,
)
from kcdsl.check.expressions.sorts import (
    BOOL,
    FIELD,
    REGION,
    SLICE,
    UNKNOWN,
    ListSort,
    described,
    sort_of,
    wrong_sort,
)
from kcdsl.check.expressions.terms import block_name, check_input, term, variable_name
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Edit, Fix, Label
from kcdsl.diagnostics.report import Reporter, did_you_mean, suggest
from kcdsl.diagnostics.spans import Span
from kcdsl.ir import terms as ir
from kcdsl.ir.canonical import free_variables
from kcdsl.ir.formulas import NEGATED
from kcdsl.syntax import ast

_FIELD = re.compile(r"[^\s()<>=\[\]{}]+")


def formula(
    expression: ast.Expression,
    scope: Scope,
    reporter: Reporter,
    *,
    side: int = 1,
    against: bool = False,
) -> ir.Formula | None:
    """Type a statement; None after an error.

    `side` is 1 where the statement is asserted, -1 under a negation, 0 where it is only assumed
    (before `implies`); `against` allows comparisons against a metric's direction.
    """
    match expression:
        case ast.ComparisonChain():
            return _comparison(expression, scope, reporter, side, against)
        case ast.Negation(of=of, span=span):
            inner = formula(of, scope, reporter, side=-side, against=against)
            return None if inner is None else _negate(inner, span)
        case ast.Logic(op=op, parts=parts, span=span):
            typed = []
            for i, part in enumerate(parts):
                part_side = 0 if op == "implies" and i == 0 else side
                typed.append(formula(part, scope, reporter, side=part_side, against=against))
            found = tuple(part for part in typed if part is not None)
            return ir.Connective(op, found, span) if len(found) == len(parts) else None
        case ast.Quantifier():
            return _quantified(expression, scope, reporter, side, against)
        case ast.Call(function=ast.Name(id="no_flip")):
            return _no_flip(expression, scope, reporter)
        case ast.Call(function=ast.Name(id="has")):
            return _has(expression, scope, reporter)
        case ast.Membership():
            reporter.error(
                codes.WRONG_SORT,
                "`in [...]` belongs to the predicates of slices",
                expression.span,
                help="move it to `where` of a slice, and name the slice in `slices`",
            )
            return None
        case _:
            _not_a_statement(expression, scope, reporter)
            return None


def _not_a_statement(expression: ast.Expression, scope: Scope, reporter: Reporter) -> None:
    known = not isinstance(expression, ast.Call) or expression.function.id in FUNCTIONS
    if isinstance(expression, ast.Call) and not known:
        close = suggest(expression.function.id, STATEMENTS, "statements")
        if "did you mean" in close:
            reporter.error(
                codes.WRONG_SORT,
                f"there is no statement `{expression.function.id}(...)`",
                expression.function.span,
                close,
            )
            return
    if not known and term(expression, scope, reporter) is None:
        return
    if isinstance(expression, ast.Truth):
        reporter.error(
            codes.VACUOUS,
            "a truth value says nothing about the kernels",
            expression.span,
            "compare a statistic of a metric, or a norm of a drift, with a number",
        )
        return
    wrong_sort(
        BOOL, expression, scope, reporter, "compare it with something, such as `... <= 0.02`"
    )


def _comparison(
    expression: ast.ComparisonChain, scope: Scope, reporter: Reporter, side: int, against: bool
) -> ir.Formula | None:
    parts = single_comparison(expression, reporter)
    if parts is None:
        return None
    op, first, second = parts
    if op == "!=":
        reporter.error(
            codes.WRONG_SORT,
            "`!=` belongs to the predicates of slices",
            expression.op_spans[0],
            "bound the term by <= or >=",
        )
        return None
    left, right = term(first, scope, reporter), term(second, scope, reporter)
    if left is None or right is None:
        return None
    aligned = align(left, right, expression.span, reporter)
    if aligned is None or not tables_stand_alone((left.term, right.term), reporter):
        return None
    left, right = aligned
    for typed in (left, right):
        check_signs(typed.term, scope.metrics, reporter)
    compare = ir.Compare(op, left.term, right.term, expression.span)
    usable = check_threshold(compare, expression.op_spans[0], scope, reporter, side, against)
    return compare if usable else None


def _negate(inner: ir.Formula, span: Span) -> ir.Formula:
    if isinstance(inner, ir.Compare) and inner.op in NEGATED:
        return ir.Compare(NEGATED[inner.op], inner.left, inner.right, span)
    if isinstance(inner, ir.Not):
        return inner.of
    return ir.Not(inner, span)


def _quantified(
    expression: ast.Quantifier, scope: Scope, reporter: Reporter, side: int, against: bool
) -> ir.Formula | None:
    name = expression.variable
    if name.id in scope.variables:
        reporter.error(
            codes.SHADOWED_NAME,
            f"`{name.id}` is already bound",
            name.span,
            "choose another name",
            (Label(scope.variables[name.id], "bound here"),),
        )
        return None
    if scope.metrics.known(name.id) or name.id in FUNCTIONS or BLOCK.fullmatch(name.id):
        reporter.error(
            codes.SHADOWED_NAME,
            f"`{name.id}` already has a meaning",
            name.span,
            "choose another name",
        )
    region = _region(expression.region, scope, reporter)
    if expression.region.function.id not in REGIONS:
        return None
    inner_side = side if expression.kind == "forall" else 0
    body = formula(
        expression.body,
        scope.bind(name.id, name.span, expression.region.function.id),
        reporter,
        side=inner_side,
        against=against,
    )
    if body is None:
        return None
    if name.id not in free_variables(body):
        reporter.error(
            codes.UNUSED_VARIABLE,
            f"the statement does not use `{name.id}`",
            name.span,
            f"use drift(block, {name.id}), or leave the quantifier out",
        )
        return None
    if region is None:
        return None
    return ir.Quantified(expression.kind, name.id, region, body, expression.span)


def _region(call: ast.Call, scope: Scope, reporter: Reporter) -> ir.Region | None:
    name, arguments = call.function.id, call.arguments
    if name not in REGIONS:
        known = sort_of(call, scope) != UNKNOWN
        reporter.error(
            codes.WRONG_SORT,
            f"a {REGION} is needed here, not {described(call, scope)}",
            call.span if known else call.function.span,
            suggest(name, REGIONS, "regions"),
        )
        return None
    if not takes(call, reporter):
        return None
    slice_name = arguments[0]
    if not isinstance(slice_name, ast.Name):
        wrong_sort(SLICE, slice_name, scope, reporter)
        return None
    if slice_name.id not in scope.slices:
        reporter.error(
            codes.UNKNOWN_SLICE,
            f"no slice is called `{slice_name.id}`",
            slice_name.span,
            suggest(slice_name.id, scope.slices, "declared"),
        )
        return None
    rest, longest = arguments[1:], None
    if name == "rows":
        longest, rest = _longest(rest[0], reporter), rest[1:]
    radius = _radius(rest[0], reporter) if rest else Fraction(0)
    if radius is None or (name == "rows" and longest is None):
        return None
    return ir.Region(ir.RegionKind(name), slice_name.id, radius, call.span, longest)


def _longest(expression: ast.Expression, reporter: Reporter) -> int | None:
    """Return the largest number of rows of a sequence of a region."""
    number = expression.of if isinstance(expression, ast.Minus) else expression
    whole = isinstance(number, ast.Num) and number.unit is None and number.value.denominator == 1
    if not whole or not isinstance(number, ast.Num):
        reporter.error(
            codes.WRONG_ARGUMENTS,
            "the longest sequence is a whole number of rows",
            expression.span,
            help="write a number without a unit, such as 128",
        )
        return None
    if isinstance(expression, ast.Minus) or not 1 <= number.value <= ir.MOST_ROWS:
        reporter.error(
            codes.OUT_OF_RANGE,
            f"the longest sequence has 1 to {ir.MOST_ROWS} rows",
            expression.span,
            help="write a number in this range, such as 128",
        )
        return None
    return int(number.value)


def _radius(expression: ast.Expression, reporter: Reporter) -> Fraction | None:
    negative = isinstance(expression, ast.Minus)
    number = expression.of if isinstance(expression, ast.Minus) else expression
    read = quantity(number, reporter) if isinstance(number, ast.Num) else None
    if read is None:
        if not isinstance(number, ast.Num):
            reporter.error(
                codes.WRONG_ARGUMENTS,
                "a radius or margin is a number",
                expression.span,
                help="write it in digits, such as ball(all, 1e-3)",
            )
        return None
    value, dimension, _ = read
    if dimension.exponents or (negative and value != 0):
        reporter.error(
            codes.OUT_OF_RANGE,
            "a radius or margin is a plain number, zero or more",
            expression.span,
            help="write it without a unit and a sign, such as 1e-3",
        )
        return None
    return value


def _no_flip(call: ast.Call, scope: Scope, reporter: Reporter) -> ir.Formula | None:
    if not takes(call, reporter):
        return None
    block = block_name(call.arguments[0], scope, reporter)
    variable = variable_name(call.arguments[1], scope, reporter)
    k = 1
    if len(call.arguments) == 3:
        number = call.arguments[2]
        whole = isinstance(number, ast.Num) and number.unit is None
        if not whole or not isinstance(number, ast.Num) or number.value.denominator != 1:
            reporter.error(
                codes.WRONG_ARGUMENTS,
                "k is a whole number",
                number.span,
                help="write it in digits, such as no_flip(attn_0, x, 1)",
            )
            return None
        k = int(number.value)
        if k < 1:
            reporter.error(
                codes.OUT_OF_RANGE,
                "k is at least 1",
                number.span,
                help="write 1 for the likeliest token, 5 for the first five",
            )
            return None
    if block is None or variable is None:
        return None
    if not check_input(block, call.arguments[1], scope, reporter):
        return None
    return ir.NoFlip(block, variable, k, call.span)


def _has(call: ast.Call, scope: Scope, reporter: Reporter) -> ir.Formula | None:
    if not takes(call, reporter):
        return None
    trace, listed = call.arguments
    if not isinstance(trace, ast.Name) or trace.id != "trace":
        reporter.error(
            codes.UNKNOWN_NAME,
            "the first argument of `has` is `trace`",
            trace.span,
            help="write has(trace, [rng_seed])",
        )
        return None
    if not isinstance(listed, ast.ListOf):
        edits = (
            Edit(Span(listed.span.start, listed.span.start), "["),
            Edit(Span(listed.span.end, listed.span.end), "]"),
        )
        named = isinstance(listed, ast.Name)
        fix = Fix("put it in square brackets", edits, safe=False) if named else None
        help = "write has(trace, [field, ...])"
        wrong_sort(ListSort(FIELD), listed, scope, reporter, help, fix=fix)
        return None
    fields: list[tuple[str, Span]] = []
    for item in listed.items:
        match item:
            case ast.Name(id=name, span=span) | ast.Text(value=name, span=span):
                fields.append((name, span))
            case _:
                wrong_sort(FIELD, item, scope, reporter)
                return None
    return trace_fields(fields, call.span, reporter)


def _is_field(name: str, span: Span, reporter: Reporter) -> bool:
    """Report a statement where the name of a field is expected."""
    if _FIELD.fullmatch(name):
        return True
    reporter.error(
        codes.BAD_IDENTIFIER,
        f"`{name}` cannot name a field of traces",
        span,
        "a list names fields that every record has; join statements by `and`, in one text",
    )
    return False


def trace_fields(
    fields: list[tuple[str, Span]], span: Span, reporter: Reporter
) -> ir.HasFields | None:
    """Check the fields that every trace record must have."""
    if not fields:
        reporter.error(
            codes.WRONG_ARGUMENTS,
            "the list of trace fields is empty",
            span,
            help="name the fields, such as has(trace, [rng_seed, replay_signature])",
        )
        return None
    known = [_is_field(name, place, reporter) for name, place in fields]
    if not all(known):
        return None
    seen: dict[str, Span] = {}
    for number, (name, place) in enumerate(fields):
        if name in seen:
            before = fields[number - 1][1]
            reporter.error(
                codes.DUPLICATE_IDENTIFIER,
                f"the field `{name}` is listed twice",
                place,
                labels=(Label(seen[name], "first here"),),
                fix=Fix(f"remove `{name}`", (Edit(Span(before.end, place.end), ""),)),
                help="list it once",
            )
        seen.setdefault(name, place)
        close = likely_field(name)
        if close is not None:
            reporter.warning(
                codes.DOUBTFUL_NAME,
                f"`{name}` is not one of the well-known trace fields",
                place,
                did_you_mean(
                    close, f"did you mean `{close}`? Well known: {', '.join(TRACE_FIELDS)}"
                ),
            )
    return ir.HasFields(tuple(seen), span)
