"""The functions of expressions, the names at a place, quantities and comparisons."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from typing import NamedTuple

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Edit, Fix
from kcdsl.diagnostics.report import Reporter, did_you_mean, suggest
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir.terms import ThresholdTable
from kcdsl.metrics import BUILT_IN, Registry
from kcdsl.syntax import ast
from kcdsl.units import NO_UNITS, ONE, SPELLINGS, UNITS, Dimension
from kcdsl_grammar.expression_table import KEYWORDS

BLOCK = re.compile(r"(?:attn|mlp|norm|layer)_(?:0|[1-9][0-9]*)|head|model")
PERCENTILE = re.compile(r"p([1-9][0-9]?)")
BLOCK_EXAMPLES = ("attn_0", "mlp_0", "norm_0", "layer_0", "head", "model")
OTHER_NAMES = {
    "median": "p50",
    "avg": "mean",
    "average": "mean",
    "maximum": "max",
    "p100": "max",
    "minimum": "min",
    "p0": "min",
    "percentile": "quantile",
    "share": "rate",
}
"""Names of functions in other languages and tools -> the name here."""


class FunctionGroup(StrEnum):
    """The contexts of functions."""

    STATISTIC = "statistic"
    NORM = "norm"
    TERM = "term"
    DRIFT = "drift"
    REGION = "region"
    STATEMENT = "statement"


class FunctionParameter(NamedTuple):
    """One parameter of a function; `usage` is its form in messages, by default its name."""

    name: str
    meaning: str
    optional: bool = False
    usage: str = ""


class Function(NamedTuple):
    """A function of the language: its parameters, the sort of its value and its meaning.

    `snippet` is the text that a completion inserts, with editor placeholders.
    """

    name: str
    parameters: tuple[FunctionParameter, ...]
    sort: str
    meaning: str
    snippet: str
    group: FunctionGroup

    @property
    def least(self) -> int:
        """Return the number of parameters that are not optional."""
        return sum(not parameter.optional for parameter in self.parameters)

    @property
    def signature(self) -> str:
        """Return the call with all its parameters and the sort of its value."""
        shown = [f"{p.name}?" if p.optional else p.name for p in self.parameters]
        return f"{self.name}({', '.join(shown)}): {self.sort}"

    @property
    def usage(self) -> str:
        """Return the forms of the call, such as `hull(slice) or hull(slice, margin)`."""
        names = [parameter.usage or parameter.name for parameter in self.parameters]
        counts = range(self.least, len(names) + 1)
        return " or ".join(f"{self.name}({', '.join(names[:count])})" for count in counts)


_METRIC = FunctionParameter(
    "metric", "a metric with one value per token or request, or `abs(metric)`"
)
_BLOCK = FunctionParameter(
    "block", "`attn_0`, `mlp_0`, `norm_0`, `layer_0` and so on, `head` or `model`"
)
_INPUT = FunctionParameter("x", "the variable that a quantifier binds")
_SLICE = FunctionParameter("slice", "a slice of the contract")
_DRIFT = FunctionParameter(
    "drift", "`drift(block, x)` or `measured_drift(block, x)`", usage="drift(block, x)"
)


def _statistic(name: str, meaning: str) -> Function:
    return Function(
        name, (_METRIC,), "Real", meaning, f"{name}(${{1:metric}})", FunctionGroup.STATISTIC
    )


def _norm(name: str, meaning: str) -> Function:
    snippet = f"{name}(drift(${{1:block}}, ${{2:x}}))"
    return Function(name, (_DRIFT,), "Real", meaning, snippet, FunctionGroup.NORM)


def _percentile(name: str) -> Function:
    share = name.removeprefix("p")
    meaning = f"The value that at most {100 - int(share)}% of what is counted exceeds."
    return _statistic(name, meaning + " Tokens count by the worst one of each request.")


_FUNCTIONS = (
    _statistic("mean", "The mean of a metric over the slice."),
    _statistic("max", "The largest value of a metric over the slice."),
    _statistic("min", "The smallest value of a metric over the slice."),
    _statistic("rate", "The share of the slice for which an indicator is 1."),
    Function(
        "quantile",
        (FunctionParameter("q", "the level, strictly between 0 and 1, such as `0.999`"), _METRIC),
        "Real",
        "The value that at most the share 1 - q of what is counted exceeds.",
        "quantile(${1:0.999}, ${2:metric})",
        FunctionGroup.STATISTIC,
    ),
    *(_percentile(name) for name in ("p50", "p90", "p95", "p99")),
    _norm("norm_inf", "The largest absolute component of a drift, of its worst row."),
    _norm("norm_2", "The Euclidean norm of a drift, of its worst row."),
    _norm("span", "The largest minus the smallest component of a drift, of its worst row."),
    Function(
        "abs",
        (FunctionParameter("term", "a metric or a number"),),
        "Real",
        "The magnitude; a signed metric such as `log_ratio` is bounded through it.",
        "abs(${1:metric})",
        FunctionGroup.TERM,
    ),
    Function(
        "table",
        (FunctionParameter("name", "a table of the section `tables`"),),
        "Real per request",
        "The threshold that a table gives for the request at hand; it stands alone on one side of "
        "a comparison.",
        "table(${1:name})",
        FunctionGroup.TERM,
    ),
    Function(
        "drift",
        (_BLOCK, _INPUT),
        "Matrix[tokens, width]",
        "Any run of the inference kernel minus any run of the training kernel that their numerics "
        "admit. A statement about it is proved for all of them.",
        "drift(${1:block}, ${2:x})",
        FunctionGroup.DRIFT,
    ),
    Function(
        "measured_drift",
        (_BLOCK, _INPUT),
        "Matrix[tokens, width]",
        "The difference of the two runs that were observed.",
        "measured_drift(${1:block}, ${2:x})",
        FunctionGroup.DRIFT,
    ),
    Function(
        "points",
        (_SLICE,),
        "Region",
        "Each row of the slice, by itself and exactly.",
        "points(${1:slice})",
        FunctionGroup.REGION,
    ),
    Function(
        "ball",
        (_SLICE, FunctionParameter("radius", "a plain number, zero or more, such as `1e-3`")),
        "Region",
        "Around each row of the slice an l_inf ball on the input of the block.",
        "ball(${1:slice}, ${2:1e-3})",
        FunctionGroup.REGION,
    ),
    Function(
        "hull",
        (_SLICE, FunctionParameter("margin", "a relative margin, zero or more; default 0", True)),
        "Region",
        "The box around the inputs of the block over all rows of the slice, widened by a relative "
        "margin.",
        "hull(${1:slice})",
        FunctionGroup.REGION,
    ),
    Function(
        "rows",
        (
            _SLICE,
            FunctionParameter("longest", "a whole number: of how many rows a sequence is at most"),
            FunctionParameter("margin", "a relative margin, zero or more; default 0", True),
        ),
        "Region",
        "Every sequence, and every KV cache, of 1 to `longest` rows, each in the box of one row of "
        "the inputs of the block over all rows of the slice, widened by a relative margin.",
        "rows(${1:slice}, ${2:512})",
        FunctionGroup.REGION,
    ),
    Function(
        "no_flip",
        (
            _BLOCK,
            _INPUT,
            FunctionParameter("k", "how many of the largest components; default 1", True),
        ),
        "Bool",
        "No admissible pair of runs changes which components of a row are the k largest.",
        "no_flip(${1:model}, ${2:x})",
        FunctionGroup.STATEMENT,
    ),
    Function(
        "has",
        (
            FunctionParameter("trace", "the word `trace`"),
            FunctionParameter("[field, ...]", "fields of a record"),
        ),
        "Bool",
        "Every trace record carries the fields, not null.",
        "has(trace, [${1:build_fingerprint}])",
        FunctionGroup.STATEMENT,
    ),
)
_BY_NAME = {function.name: function for function in _FUNCTIONS}


def _named(group: FunctionGroup) -> tuple[str, ...]:
    return tuple(function.name for function in _FUNCTIONS if function.group is group)


STATISTICS, DRIFTS = _named(FunctionGroup.STATISTIC), _named(FunctionGroup.DRIFT)
REGIONS, STATEMENTS = _named(FunctionGroup.REGION), _named(FunctionGroup.STATEMENT)
NORMS = {name: name.removeprefix("norm_") for name in _named(FunctionGroup.NORM)}
"""Function -> the norm of the IR."""
FUNCTIONS = tuple(_BY_NAME)
"""Every function, in the order in which messages list them."""


def find_function(name: str) -> Function | None:
    """Return a function of the language; any percentile `pNN` is one."""
    found = _BY_NAME.get(name)
    if found is None and PERCENTILE.fullmatch(name):
        return _percentile(name)
    return found


def is_reserved(name: str) -> bool:
    """Return whether a name has a meaning in the language, so that no metric can have it."""
    named = (*FUNCTIONS, *KEYWORDS, "trace", "requests", "windows", "samples")
    return name in named or bool(PERCENTILE.fullmatch(name) or BLOCK.fullmatch(name))


def all_functions() -> tuple[Function, ...]:
    """Return every function, in the order in which messages list them."""
    return _FUNCTIONS


@dataclass(frozen=True, slots=True)
class Scope:
    """The names in scope: declared slices and bound variables, with their spans, and declared
    tables (None for one in error)."""

    slices: Mapping[str, Span]
    variables: Mapping[str, Span]
    tables: Mapping[str, ThresholdTable | None] = field(default_factory=dict)
    metrics: Registry = BUILT_IN
    regions: Mapping[str, str] = field(default_factory=dict)
    """Bound variable -> the function of its region: points, ball, hull or rows."""

    def bind(self, name: str, span: Span, region: str = "points") -> Scope:
        """Return the scope inside a quantifier over a region of the given function."""
        return replace(
            self,
            variables={**self.variables, name: span},
            regions={**self.regions, name: region},
        )


def takes(call: ast.Call, reporter: Reporter) -> bool:
    """Return whether a call has as many arguments as its function takes; report it if not."""
    function = find_function(call.function.id)
    assert function is not None
    fits = function.least <= len(call.arguments) <= len(function.parameters)
    if not fits:
        arguments_error(call, reporter)
    return fits


def arguments_error(call: ast.Call, reporter: Reporter) -> None:
    """Report that a call does not have the arguments its function takes."""
    function = find_function(call.function.id)
    assert function is not None
    message = f"`{call.function.id}` is called with unsuitable arguments"
    reporter.error(codes.WRONG_ARGUMENTS, message, call.span, function.usage)


def quantity(number: ast.Num, reporter: Reporter) -> tuple[Fraction, Dimension, bool] | None:
    """Return value in base units, dimension, and whether the unit was left out."""
    if number.unit is None:
        return number.value, ONE, True
    unit = UNITS.get(number.unit)
    if unit is None:
        reporter.error(
            codes.UNKNOWN_UNIT,
            f"there is no unit `{number.unit}`",
            number.unit_span,
            other_unit(number.unit),
        )
        return None
    return number.value * unit.factor, unit.dimension, False


def other_unit(name: str) -> str:
    """Return the suggestion for an unknown unit."""
    if name in NO_UNITS:
        return NO_UNITS[name]
    known = SPELLINGS.get(name.lower())
    return (
        suggest(name, UNITS, "units") if known is None else did_you_mean(known, f"write `{known}`")
    )


def single_comparison(
    expression: ast.ComparisonChain, reporter: Reporter
) -> tuple[str, ast.Expression, ast.Expression] | None:
    """Return operator, left and right side; report a chain such as `a <= b <= c`."""
    if len(expression.ops) > 1:
        reporter.error(
            codes.WRONG_SORT,
            "comparisons cannot be chained",
            expression.op_spans[1],
            "write `a <= b and b <= c`",
            fix=_unchained(expression, reporter.source),
        )
        return None
    (op,), (left, right) = expression.ops, expression.operands
    return op, left, right


def _unchained(expression: ast.ComparisonChain, source: SourceFile) -> Fix | None:
    """Return the fix that repeats the middle of a chain; None for a chain on several lines."""
    if len(expression.ops) > 2:
        return None
    middle = expression.operands[1].span
    text = source.text[middle.start : middle.end]
    if "\n" in text:
        return None
    return Fix("join two comparisons", (Edit(Span(middle.end, middle.end), f" and {text}"),))
