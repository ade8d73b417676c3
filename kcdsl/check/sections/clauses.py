"""Checking of raw clauses: requirement, family, slices, budget, level, action."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from kcdsl.check.expressions.names import Scope
from kcdsl.check.expressions.statements import formula, trace_fields
from kcdsl.check.sections.fields import StructureReader
from kcdsl.check.sections.records import check_budget, read_budget, record_formula
from kcdsl.check.sections.structure import RawClause
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Fix, Label
from kcdsl.diagnostics.report import Reporter, did_you_mean, replacement, suggest
from kcdsl.diagnostics.spans import Span
from kcdsl.ir import terms as ir
from kcdsl.ir.canonical import normal_formula
from kcdsl.ir.escalation import ACTIONS, ALIASES
from kcdsl.ir.formulas import terms_of, walk
from kcdsl.metrics import Registry
from kcdsl.route.catalogue import Fragment
from kcdsl.route.fragments import classify, outside_diagnostic
from kcdsl.source.removal import add_field, without
from kcdsl.source.yaml_nodes import Node, Scalar, SequenceNode
from kcdsl.syntax.parser import parse_expression

FAMILIES: dict[str, ir.Family] = {
    **{family.value: family for family in ir.Family},
    "N": ir.Family.NUMERICAL,
    "S": ir.Family.STATISTICAL,
    "R": ir.Family.RUNTIME,
    "O": ir.Family.OBSERVABILITY,
}
_DEFAULT_SLICE = "all"
_PROOFS = {ir.EvidenceKind.PROOF, ir.EvidenceKind.PROOF_REAL}


class _Context(NamedTuple):
    raw: RawClause
    scope: Scope
    reporter: Reporter


def check_clause(raw: RawClause, scope: Scope, reporter: Reporter) -> ir.Clause | None:
    """Type one clause; None after an error, which is in the sink."""
    context = _Context(raw, scope, reporter)
    against = _override(context)
    requirement, text = _requirement(context, against)
    level = _level(context)
    action = _action(context)
    budget, budget_given = read_budget(raw, reporter)
    evidence = _evidence(context)
    holdout = _holdout(context)
    declared = _declared_family(context)
    slices = _listed_slices(context)
    if requirement is None:
        return None
    _check_tables(requirement, reporter)
    family = _family(context, requirement, declared)
    slices = _applied_slices(context, requirement, slices)
    check_budget(raw, requirement, budget, budget_given, scope.metrics, reporter)
    if family is None or slices is None or level is None:
        return None
    clause = ir.Clause(
        raw.id.text,
        family,
        normal_formula(requirement),
        level,
        slices,
        budget,
        evidence,
        action,
        text,
        raw.span,
        holdout,
    )
    _check_fragment(context, clause)
    return clause


def _requirement(context: _Context, against: bool) -> tuple[ir.Formula | None, str]:
    raw, reporter = context.raw, context.reporter
    node = raw.node("require")
    if isinstance(node, SequenceNode):
        fields = StructureReader(reporter).texts(node, "require")
        if fields is None:
            return None, ""
        names = [(field.text, field.span) for field in fields]
        text = f"has(trace, [{', '.join(name for name, _ in names)}])"
        return trace_fields(names, node.span, reporter), text
    if isinstance(node, Scalar):
        parsed = parse_expression(reporter.source, node, reporter.sink)
        if parsed is None:
            return None, ""
        text = " ".join(node.text.split())
        return formula(parsed, context.scope, reporter, against=against), text
    if node is not None:
        reporter.error(
            codes.WRONG_KIND,
            "`require` takes an expression",
            node.span,
            help="such as `require: p99(kl) <= 0.02`",
        )
        return None, ""
    if raw.node("metric") is None:
        return None, ""
    metric, op, threshold = (raw.scalar(name) for name in ("metric", "op", "threshold"))
    words = [
        metric.text if metric else "",
        op.text if op else "",
        threshold.text if threshold else "",
    ]
    return record_formula(raw, context.scope, reporter, against), " ".join(
        word for word in words if word
    )


def _check_tables(requirement: ir.Formula, reporter: Reporter) -> None:
    """Report a second table in a clause."""
    first: ir.TableValue | None = None
    for term in terms_of(requirement):
        if not isinstance(term, ir.TableValue):
            continue
        first = first or term
        if term.name != first.name:
            reporter.error(
                codes.CONFLICTING_FIELDS,
                "a clause can use only one table",
                term.span,
                "write one clause for each table",
                (Label(first.span, "another one"),),
            )
            return


def _override(context: _Context) -> bool:
    node = context.raw.node("override")
    if node is None:
        return False
    if isinstance(node, Scalar) and node.text == "direction":
        return True
    context.reporter.error(
        codes.NOT_ALLOWED,
        "`override` takes `direction`",
        node.span,
        help="write `override: direction`, or leave it out",
    )
    return False


def _level(context: _Context) -> ir.Level | None:
    node = context.raw.node("level")
    if node is None:
        return None
    if isinstance(node, Scalar) and node.text in ir.Level.__members__:
        return ir.Level(node.text)
    shown = f" `{node.text}`" if isinstance(node, Scalar) else ""
    help = "one of L1, L2, L3"
    if isinstance(node, Scalar) and f"L{node.text[-1:]}" in ir.Level.__members__:
        help = did_you_mean(f"L{node.text[-1]}", f"did you mean `L{node.text[-1]}`?")
    context.reporter.error(codes.NOT_ALLOWED, f"there is no level{shown}", node.span, help)
    return None


def check_action(name: Scalar, reporter: Reporter) -> str | None:
    """Return the canonical name of an action; None after an error."""
    action = ALIASES.get(name.text, name.text)
    if action in ACTIONS:
        return action
    reporter.error(
        codes.UNKNOWN_ACTION,
        f"there is no action `{name.text}`",
        name.span,
        suggest(name.text, ACTIONS, "actions"),
    )
    return None


def _action(context: _Context) -> str | None:
    for field in ("then", "remediation", "action"):
        node = context.raw.node(field)
        if node is not None:
            name = StructureReader(context.reporter).as_text(node, field)
            return None if name is None else check_action(name, context.reporter)
    return None


def _evidence(context: _Context) -> ir.EvidenceKind | None:
    kinds = [kind.value for kind in ir.EvidenceKind]
    word = _word(context, "evidence", "kind of evidence", kinds, kinds)
    return None if word is None else ir.EvidenceKind(word.text)


def _word(
    context: _Context, field: str, what: str, allowed: Collection[str], shown: list[str]
) -> Scalar | None:
    """Return the word of a field; None where it is missing or not allowed."""
    node = context.raw.node(field)
    if node is None or (isinstance(node, Scalar) and node.text in allowed):
        return node
    text = node.text if isinstance(node, Scalar) else node.kind
    context.reporter.error(
        codes.NOT_ALLOWED, f"there is no {what} `{text}`", node.span, suggest(text, shown)
    )
    return None


def _holdout(context: _Context) -> bool:
    node = context.raw.node("holdout")
    if node is None:
        return False
    if isinstance(node, Scalar) and isinstance(node.value, bool):
        return node.value
    plain = isinstance(node, Scalar) and node.text in {"true", "false"}
    context.reporter.error(
        codes.WRONG_KIND,
        "`holdout` takes true or false",
        node.span,
        "leave the quotation marks out" if plain else "write `holdout: true`, or leave it out",
    )
    return False


def _listed_slices(context: _Context) -> tuple[str, ...] | None:
    """Return the slices that the clause lists; () where it lists none, None after an error."""
    node = context.raw.node("slices")
    if node is None:
        return ()
    reporter, declared = context.reporter, context.scope.slices
    names = StructureReader(reporter).texts(node, "slices")
    if names is None:
        return None
    if not names:
        reporter.error(
            codes.EMPTY_SECTION,
            "the list of slices is empty",
            node.span,
            help="name a slice, or leave `slices` out where a slice `all` is declared",
        )
        return None
    seen: dict[str, Span] = {}
    for name in names:
        if name.text not in declared:
            reporter.error(
                codes.UNKNOWN_SLICE,
                f"no slice is called `{name.text}`",
                name.span,
                suggest(name.text, declared, "declared"),
            )
        elif name.text in seen:
            reporter.error(
                codes.DUPLICATE_IDENTIFIER,
                f"the slice `{name.text}` is listed twice",
                name.span,
                labels=(Label(seen[name.text], "first here"),),
                fix=_listed_once(reporter, node, name),
                help="list it once",
            )
        seen.setdefault(name.text, name.span)
    return tuple(seen) if all(name in declared for name in seen) else None


def _listed_once(reporter: Reporter, node: Node, name: Scalar) -> Fix | None:
    if not isinstance(node, SequenceNode):
        return None
    return without(reporter.source, node, [node.items.index(name)], safe=True)


def _applied_slices(
    context: _Context, requirement: ir.Formula, listed: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    if listed is None:
        return None
    node = context.raw.node("slices")
    formulas = list(walk(requirement))
    quantified = any(isinstance(f, ir.Quantified) for f in formulas)
    sampled = any(isinstance(f, ir.HasFields) for f in formulas) or any(
        isinstance(t, ir.Statistic) for t in terms_of(requirement)
    )
    if quantified and not sampled:
        if node is not None:
            context.reporter.error(
                codes.NO_SLICE,
                "the quantifier already names the slice",
                node.span,
                "leave `slices` out, or write one clause for each slice",
                fix=context.raw.without(context.reporter.source, ("slices",)),
            )
        return ()
    if listed:
        return listed
    if _DEFAULT_SLICE in context.scope.slices:
        return (_DEFAULT_SLICE,)
    context.reporter.error(
        codes.NO_SLICE,
        f"the clause `{context.raw.id.text}` names no slice, and no slice `all` is declared",
        context.raw.span,
        f"add `slices: [...]`; declared: {', '.join(context.scope.slices)}",
        fix=_only_slice(context),
    )
    return None


def _only_slice(context: _Context) -> Fix | None:
    """Return the fix that names the only declared slice."""
    if len(context.scope.slices) != 1:
        return None
    (name,) = context.scope.slices
    source, body = context.reporter.source, context.raw.body
    return add_field(source, body, "level", f"slices: [{name}]")


def _declared_family(context: _Context) -> tuple[ir.Family, Span] | None:
    names = [family.value for family in ir.Family]
    word = _word(context, "family", "family", FAMILIES, names)
    return None if word is None else (FAMILIES[word.text], word.span)


def families_of(requirement: ir.Formula, metrics: Registry) -> Iterator[tuple[ir.Family, Span]]:
    """Yield the family of each part of a requirement with its span."""
    for part in walk(requirement):
        match part:
            case ir.NoFlip(span=span):
                yield ir.Family.NUMERICAL, span
            case ir.HasFields(span=span):
                yield ir.Family.OBSERVABILITY, span
            case _:
                continue
    for term in terms_of(requirement):
        match term:
            case ir.Metric(name=name, span=span):
                yield metrics[name].family, span
            case ir.Norm(span=span):
                yield ir.Family.NUMERICAL, span
            case _:
                continue


def _family(
    context: _Context, requirement: ir.Formula, declared: tuple[ir.Family, Span] | None
) -> ir.Family | None:
    found: dict[ir.Family, Span] = {}
    for family, span in families_of(requirement, context.scope.metrics):
        found.setdefault(family, span)
    if not found:
        return declared[0] if declared is not None else None
    if declared is None:
        if len(found) == 1:
            return next(iter(found))
        labels = tuple(Label(span, family.value) for family, span in found.items())
        context.reporter.error(
            codes.WRONG_FAMILY,
            "the parts of the requirement belong to different families",
            context.raw.span,
            "state `family`, or write one clause for each part",
            labels,
        )
        return None
    family, span = declared
    if family not in found:
        other, place = next(iter(found.items()))
        context.reporter.error(
            codes.WRONG_FAMILY,
            f"the clause is declared {family} and its requirement is {other}",
            span,
            f"write `family: {other}`, or leave it out",
            (Label(place, other.value),),
            fix=replacement(span, other.value),
        )
        return None
    return family


def _check_fragment(context: _Context, clause: ir.Clause) -> None:
    placement = classify(clause)
    if placement.fragment is Fragment.OUTSIDE:
        context.reporter.sink.add(outside_diagnostic(clause, placement, context.reporter.source))
        return
    statistical = placement.fragment in {Fragment.STATISTICAL, Fragment.TRACE_FIELDS}
    if clause.evidence in _PROOFS and statistical:
        node = context.raw.node("evidence")
        context.reporter.error(
            codes.EVIDENCE_OUT_OF_REACH,
            f"`{clause.evidence}` is out of reach for this requirement: it reads measured data",
            node.span if node is not None else clause.span,
            "proofs exist for forall-clauses and for statistics of tv, kl, abs(log_ratio), "
            "reward_delta and grad_bias",
        )
