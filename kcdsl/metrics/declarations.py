"""Declarations of a user's metrics, read from the text of a Python file.

Nothing is imported or run: the file is parsed, and every argument of `@metric(...)` is a literal.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kcdsl.diagnostics.codes import METRIC_DECLARATION, METRIC_NAME_TAKEN
from kcdsl.diagnostics.model import Label, Sink
from kcdsl.diagnostics.report import Reporter, suggest
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir.terms import Family
from kcdsl.metrics.definition import POINTWISE, Better, Counted, MetricDefinition
from kcdsl.metrics.registry import PREFIX, find_metric
from kcdsl.source.numbers import exact
from kcdsl.units import UNITS

Report = Callable[[ast.expr, str, str | None], None]
"""Called with the node, the defect, and the way out."""


class LiteralReader:
    """Reads literals; anything else sets `failed`."""

    def __init__(self, values: Mapping[str, ast.expr], report: Report) -> None:
        self._report = report
        self._values = values
        self.failed = False

    def _literal(self, name: str, wanted: str, test: Callable[[Any], bool]) -> Any:
        node = self._values.get(name)
        value: Any = None
        if node is not None:
            try:
                value = ast.literal_eval(node)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                message = f"`{name}` is not a literal, and no Python is run to find its value"
                self._refuse(node, message, f"write {wanted}")
                return None
            if not test(value):
                self._refuse(node, f"`{name}` takes {wanted}")
                return None
        return value

    def _refuse(self, node: ast.expr, message: str, help: str | None = None) -> None:
        self.failed = True
        self._report(node, message, help)

    def text(self, name: str) -> str | None:
        """Return a text; None where it is missing, None, or no text."""
        found: str | None = self._literal(
            name, "a text", lambda v: v is None or (isinstance(v, str) and v.strip() != "")
        )
        return found

    def truth(self, name: str) -> bool:
        """Return a truth value."""
        return bool(self._literal(name, "True or False", lambda v: isinstance(v, bool)))

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        """Return one of the allowed texts; "" after an error."""
        found = self._literal(name, "a text", lambda v: isinstance(v, str))
        if found is None:
            self.failed = True
            return ""
        if found not in allowed:
            message = f"`{name}` cannot be `{found}`"
            self._refuse(self._values[name], message, suggest(found, allowed))
        return str(found)

    def choices(self, name: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
        """Return a list of allowed texts, each once; () after an error."""
        found = self._literal(
            name,
            "a list of texts",
            lambda v: isinstance(v, list | tuple) and all(isinstance(item, str) for item in v),
        )
        if found is None:
            self.failed = True
            return ()
        node = self._values[name]
        for item in found:
            if item not in allowed:
                self._refuse(node, f"`{name}` cannot hold `{item}`", suggest(item, allowed))
                return ()
        if not found or len(set(found)) < len(found):
            self._refuse(node, f"`{name}` {'names one twice' if found else 'is empty'}")
        return tuple(found)

    def number(self, name: str) -> Fraction | None:
        """Return an exact number; None where it is missing, None, or no number."""
        found = self._literal(
            name,
            "a number",
            lambda v: v is None or (isinstance(v, int | float) and not isinstance(v, bool)),
        )
        if found is None:
            return None
        try:
            value = exact(repr(found))
        except ValueError:  # an integer of very many digits
            value = None
        if value is None:
            self._refuse(self._values[name], f"`{name}` is too large, too small or not finite")
        return value


PARAMETERS: dict[str, str | None] = {
    "train_logits": "logits",
    "infer_logits": "logits",
    "train_hidden": "hidden",
    "infer_hidden": "hidden",
    "tokens": "tokens",
    "labels": "labels",
    "sampled": "sampled",
    "temperature": None,
}
"""Parameters of the function of a metric, each with its need (None: always available)."""
NEEDS = tuple(dict.fromkeys(need for need in PARAMETERS.values() if need is not None))
STATISTICS = (*sorted(POINTWISE), "rate")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARGUMENTS = (
    "name", "family", "unit", "better", "counted", "statistics", "needs", "summary", "signed",
    "lower", "upper",
)  # fmt: skip
_REQUIRED = ("family", "unit", "better", "counted", "needs")
_PUBLIC = {"kcdsl", "kcdsl.declare"}
_MARK = "\ufeff"
"""The byte order mark of some editors, which Python skips."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A metric with the place of its declaration."""

    definition: MetricDefinition
    source: SourceFile
    span: Span


def read_declarations(
    source: SourceFile, module: str, sink: Sink, reserved: Callable[[str], bool]
) -> tuple[Declared, ...]:
    """Return the metrics that a Python file declares; errors are in the sink.

    `module` is the name of the file in the configuration; with the name of the function it
    identifies the metric. `reserved` returns whether a name belongs to the language.
    """
    reporter = Reporter(source, sink)
    tree = _parse(source, reporter)
    if tree is None:
        return ()
    return tuple(_File(source, module, reporter, tree, reserved).declarations())


def _parse(source: SourceFile, reporter: Reporter) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source.text.removeprefix(_MARK))
    except SyntaxError as error:
        line = min(max(1, error.lineno or 1), source.line_count)
        column = max(0, (error.offset or 1) - 1)
        at = min(source.line_start(line) + column, len(source.text))
        message = f"the file is not Python: {error.msg}"
        reporter.error(
            METRIC_DECLARATION,
            message,
            Span(at, min(at + 1, len(source.text))),
            help="correct it there; `python -m py_compile FILE` says the same",
        )
    except (ValueError, RecursionError, MemoryError) as error:
        reporter.error(
            METRIC_DECLARATION,
            f"the file is not Python: {error}",
            Span(0, 0),
            help="save it as Python source in UTF-8; `python -m py_compile FILE` says the same",
        )
    return None


_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class _File:
    source: SourceFile
    module: str
    reporter: Reporter
    tree: ast.Module
    reserved: Callable[[str], bool]

    def declarations(self) -> Iterator[Declared]:
        """Yield the declarations at the top level of the module; report all others."""
        direct, through = _imported_names(self.tree)
        if not direct and not through:
            return
        used: set[ast.expr] = set()
        functions: dict[str, ast.expr] = {}
        found: dict[str, Declared] = {}
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            for decorator in node.decorator_list:
                target = decorator.func if isinstance(decorator, ast.Call) else decorator
                if not _is_metric(target, direct, through):
                    continue
                used.add(decorator)
                declared = self._declaration(node, decorator)
                if declared is None:
                    continue
                if node.name in functions:
                    self._error(decorator, f"the function `{node.name}` is declared twice")
                    continue
                functions[node.name] = decorator
                name = declared.definition.name
                if name in found:
                    self.reporter.error(
                        METRIC_NAME_TAKEN,
                        f"two metrics are called `{name}`",
                        declared.span,
                        "give one of them another name",
                        (Label(found[name].span, "here too"),),
                    )
                    continue
                found[name] = declared
        for node in ast.walk(self.tree):
            call = node if isinstance(node, ast.Call) and node not in used else None
            if call is not None and _is_metric(call.func, direct, through):
                self._error(call, "`metric(...)` stands above a function as `@metric(...)`")
        yield from found.values()

    def _declaration(self, node: _Function, decorator: ast.expr) -> Declared | None:
        if not isinstance(decorator, ast.Call):
            self._error(decorator, "the declaration has no arguments", "write @metric(...)")
            return None
        if not isinstance(node, ast.FunctionDef) or node not in self.tree.body:
            what = "a plain function at the top of the module"
            self._error(decorator, f"a metric is {what}", "move the function there")
            return None
        values, good = self._arguments(decorator)
        parameters = self._parameters(node)
        definition = self._definition(node, values)
        if not good or parameters is None or definition is None:
            return None
        if not self._fits(node, decorator, parameters, definition):
            return None
        keyword = next((k.value for k in decorator.keywords if k.arg == "name"), None)
        place = self.span(keyword) if keyword is not None else self._name_span(node)
        return Declared(definition, self.source, place)

    # --- arguments -------------------------------------------------------------------------------

    def _arguments(self, call: ast.Call) -> tuple[dict[str, ast.expr], bool]:
        """Return the known arguments, and whether none is unknown or missing."""
        good = True
        if call.args:
            self._error(call.args[0], "the arguments of `metric` have names")
            good = False
        values: dict[str, ast.expr] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                self._error(keyword.value, "the arguments of `metric` are written out one by one")
                good = False
            elif keyword.arg not in _ARGUMENTS:
                help = suggest(keyword.arg, _ARGUMENTS, "arguments")
                self._error(keyword, f"`metric` takes no `{keyword.arg}`", help)
                good = False
            else:
                values[keyword.arg] = keyword.value
        missing = [f"`{name}`" for name in _REQUIRED if name not in values]
        if good and missing:
            self._error(call.func, f"the declaration needs {', '.join(missing)}")
            good = False
        return values, good

    def _definition(
        self, node: ast.FunctionDef, values: Mapping[str, ast.expr]
    ) -> MetricDefinition | None:
        read = LiteralReader(values, self._error)
        name = read.text("name") or node.name
        family = read.choice("family", tuple(f.value for f in Family))
        unit = read.choice("unit", tuple(UNITS))
        better = read.choice("better", ("lower", "higher"))
        counted = read.choice("counted", ("token", "request"))
        statistics = read.choices("statistics", STATISTICS) if "statistics" in values else None
        needs = read.choices("needs", NEEDS)
        summary = read.text("summary") if "summary" in values else _first_line(node)
        signed = read.truth("signed") if "signed" in values else False
        lower = read.number("lower") if "lower" in values else None if signed else Fraction(0)
        upper = read.number("upper") if "upper" in values else None
        if read.failed or not self._usable_name(name, node, values):
            return None
        if lower is not None and upper is not None and lower > upper:
            self._error(values["upper"], "`upper` lies below `lower`")
            return None
        scale = UNITS[unit].factor
        return MetricDefinition(
            name=name,
            family=Family(family),
            kind="pointwise",
            counted=_COUNTED[counted],
            better=_BETTER[better],
            dimension=UNITS[unit].dimension,
            statistics=POINTWISE if statistics is None else frozenset(statistics),
            needs=needs,
            summary=summary or "",
            signed=signed,
            lower=None if lower is None else lower * scale,
            upper=None if upper is None else upper * scale,
            unit=unit,
            function=f"{self.module}:{node.name}",
        )

    def _usable_name(
        self, name: str, node: ast.FunctionDef, values: Mapping[str, ast.expr]
    ) -> bool:
        place = self.span(values["name"]) if "name" in values else self._name_span(node)
        if not _NAME.fullmatch(name):
            help = "letters, digits and `_`, the first no digit"
            message = f"`{name}` cannot name a metric"
            self.reporter.error(METRIC_DECLARATION, message, place, help)
            return False
        taken = None
        if find_metric(name) is not None:
            taken = f"`{name}` is a metric of the language"
        elif self.reserved(name):
            taken = f"`{name}` already has a meaning in the language"
        elif PREFIX.match(name):
            taken = f"`{name}` begins as a name of the record form does"
        if taken is None:
            return True
        self.reporter.error(METRIC_NAME_TAKEN, taken, place, "give the metric another name")
        return False

    # --- parameters ------------------------------------------------------------------------------

    def _parameters(self, node: ast.FunctionDef) -> tuple[ast.arg, ...] | None:
        found = node.args
        starred = found.vararg or found.kwarg
        if starred is not None or found.posonlyargs:
            place = starred or found.posonlyargs[0]
            self._error(place, "the arguments of the function are passed by name, each by its own")
            return None
        defaults = [d for d in (*found.defaults, *found.kw_defaults) if d is not None]
        if defaults:
            message = "the function always gets what it takes, so nothing has a default"
            self._error(defaults[0], message)
            return None
        parameters = (*found.args, *found.kwonlyargs)
        for parameter in parameters:
            if parameter.arg not in PARAMETERS:
                help = suggest(parameter.arg, PARAMETERS, "the function may take")
                self._error(parameter, f"nothing is passed as `{parameter.arg}`", help)
                return None
        return parameters

    def _fits(
        self,
        node: ast.FunctionDef,
        decorator: ast.Call,
        parameters: tuple[ast.arg, ...],
        definition: MetricDefinition,
    ) -> bool:
        taken = {PARAMETERS[p.arg] for p in parameters}
        for parameter in parameters:
            need = PARAMETERS[parameter.arg]
            if need is not None and need not in definition.needs:
                message = f"`{parameter.arg}` is passed only where the metric needs `{need}`"
                self._error(parameter, message, f'add "{need}" to `needs`')
                return False
        unused = [need for need in definition.needs if need not in taken]
        if unused:
            message = f"the metric needs `{unused[0]}`, and the function takes none of it"
            place = next(k.value for k in decorator.keywords if k.arg == "needs")
            self._error(place, message, f"take {_listed(unused[0])}, or leave the need out")
            return False
        return True

    # --- places ----------------------------------------------------------------------------------

    def span(self, node: ast.expr | ast.keyword | ast.arg) -> Span:
        """Return the span of a node; Python counts columns in bytes."""
        start = self._offset(node.lineno, node.col_offset)
        last, column = node.end_lineno or node.lineno, node.end_col_offset
        return Span(start, start + 1 if column is None else self._offset(last, column))

    def _offset(self, line: int, column: int) -> int:
        start = self._line_start(line)
        piece = self.source.text[start : start + column]
        return start + len(piece.encode("utf-8")[:column].decode("utf-8", "ignore"))

    def _line_start(self, line: int) -> int:
        # Unlike this class, Python also ends lines at a lone carriage return.
        first = len(_MARK) if self.source.text.startswith(_MARK) else 0
        starts = [first, *(m.end() for m in re.finditer(r"\r\n|\r|\n", self.source.text))]
        return starts[line - 1]

    def _name_span(self, node: ast.FunctionDef) -> Span:
        start = self._offset(node.lineno, node.col_offset)
        at = self.source.text.index(node.name, start + len("def"))
        return Span(at, at + len(node.name))

    def _error(
        self, node: ast.expr | ast.keyword | ast.arg, message: str, help: str | None = None
    ) -> None:
        self.reporter.error(METRIC_DECLARATION, message, self.span(node), help)


_COUNTED: dict[str, Counted] = {"token": "token", "request": "request"}
_BETTER: dict[str, Better] = {"lower": "lower", "higher": "higher"}


def _imported_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the local names of `metric`, and those of modules that contain it."""
    direct: set[str] = set()
    through: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in _PUBLIC:
            direct |= {a.asname or a.name for a in node.names if a.name == "metric"}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in _PUBLIC:
                    through.add(alias.asname or alias.name)
                elif alias.name.startswith("kcdsl.") and alias.asname is None:
                    through.add("kcdsl")
    return direct, through


def _is_metric(target: ast.expr, direct: set[str], through: set[str]) -> bool:
    if isinstance(target, ast.Name):
        return target.id in direct
    return (
        isinstance(target, ast.Attribute)
        and target.attr == "metric"
        and ast.unparse(target.value) in through
    )


def _first_line(node: ast.FunctionDef) -> str:
    lines = (ast.get_docstring(node) or "").splitlines()
    return lines[0].strip() if lines else ""


def _listed(need: str) -> str:
    return " or ".join(f"`{name}`" for name, of in PARAMETERS.items() if of == need)
