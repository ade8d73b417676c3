"""`kcdsl explain`: what a code or a metric means, a page of the manual, or which backends cover a
clause and why."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.api.contract import find_contract, read_contract, refuse_foreign_code
from kcdsl.cli.common import Command, argument, switch, value
from kcdsl.cli.common.options import OutputFormat, code_words, format_option
from kcdsl.cli.common.output import print_json
from kcdsl.diagnostics import Diagnostic, Refusal, Severity, Sink, refuse
from kcdsl.diagnostics.codes import (
    FAMILIES,
    NO_CONTRACT,
    OUTSIDE_FRAGMENTS,
    UNKNOWN_CLAUSE,
    UNKNOWN_CODE,
    USAGE,
    Code,
    all_codes,
    find,
)
from kcdsl.diagnostics.pages import Page, manual_page, manual_pages
from kcdsl.diagnostics.render.terminal import counted, one_line
from kcdsl.diagnostics.report import nearest, suggest
from kcdsl.exits import Exit
from kcdsl.source.files import in_contract, read_source

if TYPE_CHECKING:
    from kcdsl.check.compile import Analysis
    from kcdsl.diagnostics.spans import SourceFile
    from kcdsl.ir.terms import Clause, Program
    from kcdsl.metrics import MetricDefinition, Registry
    from kcdsl.route.catalogue import BackendSpec
    from kcdsl.route.fragments import UncoveredReason
    from kcdsl.route.router import Route

_CODE = re.compile(r"(?i)(?:kc)?([0-9]+)")


@dataclass(frozen=True, kw_only=True)
class ExplainCommand(Command):
    """Explain a code, a metric, or which backends cover a clause; print a page of the manual."""

    topic: str | None = argument(
        "CODE|METRIC|PAGE|CLAUSE",
        "a code such as KC203, a family of codes such as KC2, a metric such as kl, a page of the "
        "manual such as rollouts, or a clause of the contract; without: list the codes",
        "?",
        words=code_words,
    )
    contract: str | None = argument("CONTRACT", "the contract of the clause", "?")
    format: OutputFormat = format_option()
    size: bool = switch("load the model and show which cases of a clause are small enough for z3")
    smtlib: str | None = value(
        "DIR", "with --size: write the z3 queries of these cases into this folder"
    )
    vnnlib: str | None = value(
        "DIR", "load the model and write each case as a VNN-LIB query with its networks"
    )

    def run(self) -> Exit:
        """Print a page of a code or of the manual, a metric, the backends of a clause, or the list
        of all codes.

        With a contract, a clause has priority over a metric or page of the same name.
        """
        if self.topic is None:
            _list_codes(all_codes(), self.format)
            return Exit.HELD
        code = _CODE.fullmatch(self.topic)
        if code is not None:
            _explain_code(f"KC{code[1]}", self.format)
            return Exit.HELD
        from kcdsl.metrics import BUILT_IN

        metric = None if self.contract is not None else _metric_named(self.topic, BUILT_IN)
        page = manual_page(self.topic) if self.contract is None and metric is None else None
        if metric is not None:
            _show_metric(metric, self.format)
        elif page is not None:
            _show_page(page, self.format)
        elif self.size and self.format is not OutputFormat.TEXT:
            raise refuse(USAGE, "--size has no JSON", help="leave --format out")
        else:
            _explain_clause(self.topic, self.contract, self.format)
            if self.size or self.smtlib is not None:
                _show_sizes(self.topic, self.contract, self.smtlib)
            if self.vnnlib is not None:
                _write_queries(self.topic, self.contract, self.vnnlib)
        return Exit.HELD


# --- codes ---------------------------------------------------------------------------------------


def _explain_code(wanted: str, format: OutputFormat) -> None:
    """Print the page of a code, or the list of a family of codes."""
    if wanted in FAMILIES:
        _list_codes(tuple(c for c in all_codes() if c.family == wanted), format)
        return
    found = find(wanted)
    if found is None:
        # Similar numbers are unrelated, so none is suggested.
        family = wanted[:3]
        help = "`kcdsl explain` lists every code"
        if family in FAMILIES:
            help = f"`kcdsl explain {family}` lists the codes about {FAMILIES[family]}"
        raise refuse(UNKNOWN_CODE, f"there is no code {wanted}", help=help)
    if format is OutputFormat.JSON:
        _print_codes((found,))
    else:
        _print_markdown(found.page.markdown, found.page.plain)


def _print_markdown(markdown: str, plain: str) -> None:
    """Print a text, formatted on a terminal and as plain text otherwise."""
    if not sys.stdout.isatty():
        print(plain, end="")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(markdown))


def _list_codes(codes: Sequence[Code], format: OutputFormat) -> None:
    """Print codes by family: their titles, in JSON their meaning too."""
    if format is OutputFormat.JSON:
        _print_codes(codes)
        return
    for family in dict.fromkeys(code.family for code in codes):
        before = "\n" if codes[0].family != family else ""
        print(f"{before}{family}: {FAMILIES[family]}\n")
        for code in codes:
            if code.family == family:
                print(f"{code.id}  {code.title}")


def _print_codes(codes: Sequence[Code]) -> None:
    described = [
        {
            "code": code.id,
            "title": code.title,
            "family": FAMILIES[code.family],
            "summary": code.summary,
            "explanation": code.explanation,
            "markdown": code.page.markdown,
        }
        for code in codes
    ]
    print_json({"schema": "kcdsl.codes/1", "codes": described})


def _show_page(page: Page, format: OutputFormat) -> None:
    """Print a page of the manual. Refuse JSON."""
    if format is OutputFormat.JSON:
        raise refuse(USAGE, "a page is not explained as JSON", help="leave --format out")
    _print_markdown(page.markdown, page.plain)


# --- metrics -------------------------------------------------------------------------------------


def _metric_named(name: str, registry: Registry) -> MetricDefinition | None:
    """Return the metric of a name, also of one of the record form such as `p99_kl`."""
    found = registry.find(name)
    if found is not None:
        return found
    record = registry.find_record(name)
    return None if record is None else registry.find(record.metric)


def _show_metric(metric: MetricDefinition, format: OutputFormat) -> None:
    """Print a metric as editors show it. Refuse JSON."""
    from kcdsl.lsp.features.knowledge import describe_metric

    if format is OutputFormat.JSON:
        help = "leave --format out; `kcdsl explain metrics` has the table of all metrics"
        raise refuse(USAGE, "a metric is not explained as JSON", help=help)
    text = describe_metric(metric)
    _print_markdown(text, text.replace("**", "").replace("`", "") + "\n")


# --- clauses -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BackendAnswer:
    """The answer of a backend to a clause. `blame` is the part that it cannot decide, if any."""

    backend: str
    covers: bool
    reason: str
    blame: UncoveredReason | None


def _explain_clause(name: str, given: str | None, format: OutputFormat) -> None:
    """Print the table of backends for a clause of a contract.

    A clause that no backend covers is explained too, and so is one in a contract with errors in
    other clauses. If there is no such clause, the user's metric of this name is shown.
    """
    from kcdsl.check.compile import analyse, no_program
    from kcdsl.route.catalogue import catalogue
    from kcdsl.route.router import route

    path = _contract_for(name, given)
    source, sink = read_source(path), Sink()
    analysis = analyse(source, sink, path.parent)
    if analysis.raw is not None and all(c.id.text != name for c in analysis.raw.clauses):
        metric = _metric_named(name, analysis.scope.metrics)
        if metric is not None:
            _show_metric(metric, format)
            return
        clauses = [c.id.text for c in analysis.raw.clauses]
        near = (*clauses, *analysis.scope.metrics.names())
        raise refuse(
            UNKNOWN_CLAUSE,
            f"{path} has no clause `{name}`, and there is no code or metric of this name",
            help=suggest(name, near if nearest(name, near) else clauses, "clauses"),
        )
    program = analysis.draft
    elsewhere = [found for found in sink if found.severity is Severity.ERROR]
    clause = next((c for c in program.clauses if c.id == name), None) if program else None
    own = tuple(found for found in elsewhere if _speaks_of(found, name, analysis))
    if own:
        raise Refusal(own)
    if program is None or clause is None:
        raise no_program(path, sink)
    specs = catalogue()
    chosen = next(r for r in route(program, specs) if r.clause_id == clause.id)
    candidates = [_candidate(clause, spec, chosen) for spec in specs]
    if format is OutputFormat.JSON:
        print_json(_document(program, clause, chosen, candidates, source))
    else:
        _print_table(program, clause, chosen, candidates, source)
    if elsewhere:
        errors = counted(len(elsewhere), "error")
        print(f"the contract has {errors}: `kcdsl lint` shows them", file=sys.stderr)


def _show_sizes(name: str, given: str | None, folder: str | None) -> None:
    """Print for each case of a clause whether it is small enough, and why; write its queries."""
    from kcdsl.model.files import Artefacts
    from kcdsl.route.catalogue import catalogue
    from kcdsl.route.goals import goals
    from kcdsl.source.output import make_folder, result, write_together

    contract = read_contract(given)
    goal = next((one for one in goals(contract.program) if one.clause.id == name), None)
    specs = [spec for spec in catalogue() if spec.sizer and not spec.missing()]
    if goal is None or not specs:
        print("\nno backend that takes small cases alone covers the clause")
        return
    refuse_foreign_code(contract, allowed=False, metrics=False)
    files, written = Artefacts.of(contract.base), []
    for spec in specs:
        with in_contract(contract.path):
            found = spec.load_sizer()(contract.program, files, goal)
        print(f"\nsmall enough for {spec.name}:")
        for number, one in enumerate(found):
            print(f"  {one_line(one.case)}: {'yes' if one.small else 'no'}, {one.reason}")
            for place, text in enumerate(one.scripts if folder is not None else ()):
                path = Path(folder or "") / f"{name}-{number}-{place}.smt2"
                written.append(result(path, text.encode()))
    if folder is not None:
        make_folder(Path(folder))
        write_together(written, replace=True)
        print(f"{counted(len(written), 'question')} in {folder}")


def _write_queries(name: str, given: str | None, folder: str) -> None:
    """Write each case of a clause as a VNN-LIB query and its networks, or print why it has none."""
    from kcdsl.api.backends import query_solver
    from kcdsl.model.files import Artefacts
    from kcdsl.route.goals import goals
    from kcdsl.source.output import make_folder, result, write_together

    contract = read_contract(given)
    goal = next((one for one in goals(contract.program) if one.clause.id == name), None)
    if goal is None:
        print("\nthe clause is no goal about every input of a region")
        return
    refuse_foreign_code(contract, allowed=False, metrics=False)
    with in_contract(contract.path):
        found = query_solver().exported(contract.program, Artefacts.of(contract.base), goal)
    print("\nas VNN-LIB queries, in which unsat shows that the clause holds:")
    written = []
    for number, one in enumerate(found):
        print(f"  {one_line(one.case)}: {'yes' if one.files else 'no'}, {one.reason}")
        for suffix, data in one.files:
            separator = "." if suffix == "vnnlib" else "-"
            path = Path(folder) / f"{name}-{number}{separator}{suffix}"
            written.append(result(path, data))
    make_folder(Path(folder))
    write_together(written, replace=True)
    print(f"{counted(len(written), 'file')} in {folder}")


def _contract_for(topic: str, given: str | None) -> Path:
    """Return the path of the contract. If there is none, the topic may be a misspelt code or
    metric, so the refusal mentions both."""
    from kcdsl.metrics import BUILT_IN

    try:
        return find_contract(given, Path())
    except Refusal as refusal:
        if given is not None or refusal.diagnostics[0].code is not NO_CONTRACT:
            raise
        known = (*BUILT_IN.names(), *manual_pages())
        raise refuse(
            UNKNOWN_CLAUSE,
            f"`{topic}` is no code and no metric, and there is no contract here to look for a"
            " clause of this name",
            help=suggest(topic, known)
            if nearest(topic, known)
            else f"name the contract of the clause: kcdsl explain {topic} CONTRACT;"
            " `kcdsl explain metrics` lists the metrics, `kcdsl explain` the codes",
        ) from refusal


def _speaks_of(found: Diagnostic, name: str, analysis: Analysis) -> bool:
    """Return whether an error concerns a clause, other than that no backend covers it."""
    if found.code is OUTSIDE_FRAGMENTS or found.span is None or analysis.raw is None:
        return False
    if found.source is not None and found.source.name != analysis.source.name:
        return False
    own = [c for c in analysis.raw.clauses if c.id.text == name]
    spans = [part.span for c in own for part in (c.id, c.body) if part is not None]
    return any(span.start <= found.span.start <= span.end for span in spans)


def _candidate(clause: Clause, spec: BackendSpec, chosen: Route) -> BackendAnswer:
    from kcdsl.route.catalogue import Fragment
    from kcdsl.route.fragments import UncoveredReason, classify, why_uncovered

    blame = why_uncovered(clause, spec.fragments)
    if blame is not None:
        return BackendAnswer(spec.name, False, spec.fault or blame.reason, blame)
    if chosen.fragment is Fragment.IMPLIED and not chosen.premises:
        reason = chosen.why_not[spec.name]
        place = classify(clause).blame[0].span
        return BackendAnswer(spec.name, False, reason, UncoveredReason(reason, place))
    if spec.name == chosen.backend:
        return BackendAnswer(
            spec.name, True, "it is the least backend that covers the clause", None
        )
    return BackendAnswer(spec.name, True, chosen.why_not.get(spec.name, ""), None)


def _print_table(
    program: Program,
    clause: Clause,
    chosen: Route,
    candidates: list[BackendAnswer],
    source: SourceFile,
) -> None:
    from rich.text import Text

    from kcdsl.diagnostics.render.full import render_place
    from kcdsl.verdict.text.console import rendered, table

    at = source.position(clause.span.start)
    head = (
        f"clause    {clause.id} of {program.name}, {one_line(source.name)}:{at.line}",
        f"requires  {one_line(clause.text)}",
        f"fragment  {chosen.fragment}: {chosen.reason}",
        f"backend   {chosen.backend or 'none'}\n",
    )
    rows = []
    for item in candidates:
        word = Text("yes" if item.covers else "no", style="green" if item.covers else "red")
        quoted = "" if item.blame is None else " ".join(_text_of(item.blame, source).split())
        rows.append((item.backend, word, f"`{quoted}`: {item.reason}" if quoted else item.reason))
    found = table(("backend", "covers it", "because"), rows, padding=(0, 1), pad_edge=False)
    sys.stdout.write(rendered(*map(Text, head), found, terminal=sys.stdout.isatty()))
    for item in candidates:
        if item.blame is not None and item.blame.span.end > item.blame.span.start:
            print(f"\nout of reach of {item.backend}: {item.blame.reason}")
            print(render_place(source, item.blame.span, "", sys.stdout))


def _text_of(blame: UncoveredReason, source: SourceFile) -> str:
    return source.text[blame.span.start : blame.span.end]


def _document(
    program: Program,
    clause: Clause,
    chosen: Route,
    candidates: list[BackendAnswer],
    source: SourceFile,
) -> dict[str, Any]:
    return {
        "schema": "kcdsl.explain/1",
        "contract": program.name,
        "clause": clause.id,
        "requires": clause.text,
        "fragment": str(chosen.fragment),
        "backend": chosen.backend,
        "reason": chosen.reason,
        "backends": [
            {
                "backend": item.backend,
                "covers": item.covers,
                "reason": item.reason,
                "blame": None if item.blame is None else _place(item.blame, source),
            }
            for item in candidates
        ],
    }


def _place(blame: UncoveredReason, source: SourceFile) -> dict[str, object]:
    start, end = source.position(blame.span.start), source.position(blame.span.end)
    return {
        "text": _text_of(blame, source),
        "line": start.line,
        "column": start.column,
        "end_line": end.line,
        "end_column": end.column,
    }
