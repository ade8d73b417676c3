"""What is known of a clause beyond its text: its meaning, its route, its last verdict."""

from __future__ import annotations

from dataclasses import dataclass

from kcdsl.check.compile import Analysis
from kcdsl.check.expressions.names import Scope
from kcdsl.check.sections.structure import RawClause
from kcdsl.ir import terms as ir
from kcdsl.ir.walk import walk
from kcdsl.lsp.documents import Snapshot
from kcdsl.lsp.reports import Verdict, latest
from kcdsl.source.yaml_nodes import Scalar
from kcdsl.syntax import ast
from kcdsl.verdict.names import SIGNS


@dataclass(frozen=True, slots=True)
class KnownClause:
    """A clause as written, with its meaning where it has one."""

    raw: RawClause
    clause: ir.Clause | None


def known_clauses(analysis: Analysis) -> tuple[KnownClause, ...]:
    """Return the clauses of a document in their order."""
    if analysis.raw is None:
        return ()
    pairs = zip(analysis.raw.clauses, analysis.clauses, strict=True)
    return tuple(KnownClause(raw, clause) for raw, clause in pairs)


def clause_named(analysis: Analysis, name: str | None) -> KnownClause | None:
    """Return the clause with an identifier."""
    return next((item for item in known_clauses(analysis) if item.raw.id.text == name), None)


def clause_at(analysis: Analysis, offset: int) -> KnownClause | None:
    """Return the clause that holds a place."""
    for item in known_clauses(analysis):
        end = max([item.raw.span.end, *(e.value.span.end for e in item.raw.fields)])
        if min(item.raw.id.span.start, item.raw.span.start) <= offset <= end:
            return item
    return None


def scope_in(expression: ast.Expression, scope: Scope) -> Scope:
    """Return the scope with the variables that the expression binds anywhere."""
    match expression:
        case ast.Quantifier(variable=variable, body=body):
            return scope_in(body, scope.bind(variable.id, variable.span))
        case ast.Logic(parts=parts):
            for part in parts:
                scope = scope_in(part, scope)
            return scope
        case ast.Negation(of=of):
            return scope_in(of, scope)
        case _:
            return scope


def verdicts_of(snapshot: Snapshot, clause: str) -> tuple[tuple[Verdict, bool], ...]:
    """Return the last verdict on each slice of a clause, and whether it is stale."""
    known = snapshot.digest
    return tuple((v, v.stale(known)) for v in latest(snapshot.verdicts, clause, known))


def mark(verdict: str) -> str:
    """Return the sign of a verdict."""
    return SIGNS.get(verdict, "·")


def policy_action(analysis: Analysis, item: KnownClause) -> str | None:
    """Return the action that the policy gives a clause which states none."""
    program, clause = analysis.draft, item.clause
    if clause is None or program is None or clause.action is not None:
        return None
    return program.escalation.action(clause.family, clause.level)


def is_formal(clause: ir.Clause) -> bool:
    """Say whether a clause speaks of every input of a region, so that `verify` decides it."""
    return any(isinstance(part, ir.Quantified) for part in walk(clause.require))


def quoted(scalar: Scalar) -> str:
    """Return a text on one line."""
    return " ".join(scalar.text.split())
