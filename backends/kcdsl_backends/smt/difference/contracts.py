"""Two contracts as one program: slices, differences of context, and axes of comparison.

Slices that select the same requests of the same data get one name. Different slices with the same
name are marked `(old)` and `(new)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kcdsl.ir.canonical import kernel_json, normal_formula
from kcdsl.ir.formulas import rewritten, terms_of, walk
from kcdsl.ir.printer import formula_text, predicate_text
from kcdsl.ir.tables import expand_tables, table_of
from kcdsl.ir.terms import (
    AllOf,
    Budget,
    Clause,
    Formula,
    KernelRef,
    Metric,
    NoFlip,
    Norm,
    Program,
    Quantified,
    Slice,
    ThresholdTable,
)
from kcdsl.metrics import find_metric
from kcdsl.verdict.studies.difference import Change, Relation, from_implications
from kcdsl_backends.smt.claims import LEVELS, action_of, acts_as_severely, evidence_rank
from kcdsl_backends.smt.solver import Clock, selects_within
from kcdsl_certs.encoding.reals import real_text


def text_of(clause: Clause) -> str:
    """Return the source text of a requirement on one line."""
    return " ".join((clause.text or formula_text(clause.require)).split())


# --- the merged program ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Merged:
    """The common context and all slices as a program without clauses, and the clauses of both
    contracts on these slices, with tables expanded."""

    program: Program
    old: tuple[Clause, ...]
    new: tuple[Clause, ...]


def merge(old: Program, new: Program, clock: Clock) -> Merged:
    """Return the merged program of two programs.

    The temperature is 0 if the programs differ in it; metrics with two definitions are left out.
    """
    before, after = expand_tables(old), expand_tables(new)
    named = dict.fromkeys(s.name for s in after.slices)
    slices = {s.name: _placed(s, before) for s in before.slices}
    first, second = {name: name for name in slices}, {}
    for declared in after.slices:
        other = _placed(declared, after)
        same = next((s for s in _likely(slices, other) if _equal(old, s, other, clock)), None)
        if same is not None:
            second[other.name] = same.name
        elif other.name in slices:
            second[other.name] = f"{other.name} (new)"
        else:
            second[other.name] = other.name
    taken = set(second.values())
    first = {
        name: f"{name} (old)" if name in named and name not in taken else name for name in first
    }
    second = {name: first.get(chosen, chosen) for name, chosen in second.items()}
    merged = {first[s.name]: replace(s, name=first[s.name]) for s in slices.values()}
    for declared in after.slices:
        chosen = second[declared.name]
        merged.setdefault(chosen, replace(_placed(declared, after), name=chosen))
    same_temperature = old.constants.temperature == new.constants.temperature
    program = replace(
        before,
        data=None,  # each slice names its own
        slices=tuple(merged.values()),
        clauses=(),
        constants=old.constants
        if same_temperature
        else replace(old.constants, temperature=type(old.constants.temperature)(0)),
        metrics=tuple(m for m in old.metrics if m in new.metrics)
        + tuple(m for m in new.metrics if all(m.name != o.name for o in old.metrics))
        + tuple(m for m in old.metrics if all(m.name != n.name for n in new.metrics)),
    )
    return Merged(
        program,
        tuple(_about(clause, first) for clause in before.clauses),
        tuple(_about(clause, second) for clause in after.clauses),
    )


def _placed(declared: Slice, program: Program) -> Slice:
    """Return a slice with explicit data, the default of its program if it names none."""
    return replace(declared, data=declared.data or program.data)


def _likely(slices: Mapping[str, Slice], other: Slice) -> list[Slice]:
    """Return the slices to compare with another, the one of the same name first."""
    same = [slices[other.name]] if other.name in slices else []
    return same + [s for s in slices.values() if s.name != other.name]


def _equal(program: Program, a: Slice, b: Slice, clock: Clock) -> bool:
    if a.data != b.data or a.where == b.where:
        return a.data == b.data
    one, two = replace(a, name="a"), replace(b, name="b")
    return selects_within(program, one, two, clock) and selects_within(program, two, one, clock)


def _about(clause: Clause, names: Mapping[str, str]) -> Clause:
    """Return a clause with its slices renamed, each once."""
    return replace(
        clause,
        slices=tuple(dict.fromkeys(names[name] for name in clause.slices)),
        require=_renamed(clause.require, names),
    )


def _renamed(formula: Formula, names: Mapping[str, str]) -> Formula:
    def part(one: Formula) -> Formula:
        if not isinstance(one, Quantified):
            return one
        return replace(one, region=replace(one.region, slice=names[one.region.slice]))

    return rewritten(formula, part)


# --- context --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ContextChanges:
    """The differences outside the clauses: of models and kernels (`runs`), of the routes between
    kernels, of the temperature, of other constants, and of user metrics by name."""

    runs: tuple[Change, ...]
    routes: tuple[Change, ...]
    temperature: tuple[Change, ...]
    constants: tuple[Change, ...]
    metrics: Mapping[str, Change]

    @property
    def changes(self) -> tuple[Change, ...]:
        """Return all of them, in the order in which they are stated."""
        others = (*self.runs, *self.routes, *self.temperature, *self.constants)
        return (*others, *self.metrics.values())

    def altering(self, clause: Clause) -> tuple[Change, ...]:
        """Return the changes that give a clause another meaning in the other contract.

        Admitted runs depend on the numerics and the model, measured values on the temperature and
        on the definitions of user metrics.
        """
        terms = tuple(terms_of(clause.require))
        admitted = any(isinstance(part, NoFlip) for part in walk(clause.require)) or any(
            isinstance(term, Norm) and not term.of.measured for term in terms
        )
        read = {term.name for term in terms if isinstance(term, Metric)}
        tempered = any(found is None or found.tempered for found in map(find_metric, read))
        found = (*(self.runs if admitted else ()), *(self.temperature if tempered else ()))
        return (*found, *(change for name, change in self.metrics.items() if name in read))


def context_of(old: Program, new: Program) -> ContextChanges:
    """Return the differences of models, kernels, routes, constants and user metrics."""
    return ContextChanges(
        tuple(_runs(old, new)),
        tuple(_routes(old, new)),
        tuple(_constants(old, new, "temperature")),
        tuple(_constants(old, new, "reward_range", "advantage_max", "score_norm_max")),
        dict(_metrics(old, new)),
    )


def _runs(old: Program, new: Program) -> Iterator[Change]:
    for name in ("checkpoint", "architecture", "module", "config", "tokenizer"):
        before, after = getattr(old.model, name), getattr(new.model, name)
        if before != after:
            yield _change(f"model {name}", before, after)
    blocks = ({n: f"{a} to {b}" for n, a, b in program.model.blocks} for program in (old, new))
    yield from _pairs("model block", *blocks)
    yield from _kernel("kernel train", old.train, new.train)
    yield from _kernel("kernel infer", old.infer, new.infer)


def _routes(old: Program, new: Program) -> Iterator[Change]:
    yield from _kernel("route guard", old.guard, new.guard)
    yield from _kernel("route fallback", old.fallback, new.fallback)
    for name in ("guard_from", "fallback_from"):
        before, after = getattr(old.escalation, name), getattr(new.escalation, name)
        if before != after:
            yield _change(f"health {name}", real_text(before), real_text(after))


def _constants(old: Program, new: Program, *names: str) -> Iterator[Change]:
    for name in names:
        before, after = getattr(old.constants, name), getattr(new.constants, name)
        if before != after:
            shown = (None if value is None else real_text(value) for value in (before, after))
            yield _change(name, *shown)


def _metrics(old: Program, new: Program) -> Iterator[tuple[str, Change]]:
    known = {metric.name: metric for metric in old.metrics}
    for metric in new.metrics:
        before = known.get(metric.name)
        if before is not None and before != metric:
            fields = [
                name
                for name in metric.__dataclass_fields__
                if getattr(metric, name) != getattr(before, name)
            ]
            change = Change(
                f"metric {metric.name}",
                ", ".join(f"{name} {getattr(before, name)}" for name in fields),
                ", ".join(f"{name} {getattr(metric, name)}" for name in fields),
                Relation.INCOMPARABLE,
            )
            yield metric.name, change


def _change(name: str, old: str | None, new: str | None) -> Change:
    return Change(name, old or "none", new or "none", Relation.INCOMPARABLE)


def _kernel(name: str, old: KernelRef | None, new: KernelRef | None) -> Iterator[Change]:
    before, after = ({} if kernel is None else _parts_of(kernel) for kernel in (old, new))
    yield from _pairs(name, before, after)


def _pairs(name: str, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Change]:
    for key in dict.fromkeys((*before, *after)):
        if before.get(key) != after.get(key):
            yield _change(f"{name} {key}", before.get(key), after.get(key))


def _parts_of(kernel: KernelRef) -> dict[str, str]:
    """Return the fields of a kernel in a contract; numerics fields without a prefix."""
    stated = kernel_json(kernel)
    numerics = stated.pop("numerics")
    return {**dict(_flat(stated)), **dict(_flat(numerics))}


def _flat(stated: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in stated.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", str(value)


# --- axes of comparison ---------------------------------------------------------------------------


def consequences(before: Program, old: Clause, after: Program, new: Clause) -> Iterator[Change]:
    """Yield the differences of level, action, evidence, holdout and family."""
    if old.level is not new.level:
        ranks = LEVELS.index(old.level), LEVELS.index(new.level)
        yield Change("level", old.level.value, new.level.value, _ranked(*ranks))
    first, second = action_of(before, old), action_of(after, new)
    if first != second:
        both = acts_as_severely(second, first), acts_as_severely(first, second)
        yield Change("action", first or "none", second or "none", from_implications(*both))
    if old.evidence is not new.evidence:
        evidence = evidence_rank(old.evidence), evidence_rank(new.evidence)
        names = [kind.value if kind else "any" for kind in (old.evidence, new.evidence)]
        yield Change("evidence", names[0], names[1], _ranked(*evidence))
    if old.holdout is not new.holdout:
        shown = [str(clause.holdout).lower() for clause in (old, new)]
        yield Change("holdout", shown[0], shown[1], _ranked(old.holdout, new.holdout))
    if old.family is not new.family:
        yield Change("family", old.family.value, new.family.value, Relation.EQUAL)


def _ranked(old: int, new: int) -> Relation:
    return Relation.STRICTER if new > old else Relation.WEAKER


def stated(
    before: Program, old: Clause, after: Program, new: Clause, demand: Relation
) -> tuple[Change, ...]:
    """Return the differences of the requirements; a single one has the relation `demand`."""
    found = list(_stated(before, old, after, new))
    relation = demand if len(found) == 1 else None
    return tuple(Change(name, first, second, relation) for name, first, second in found)


def _stated(
    before: Program, old: Clause, after: Program, new: Clause
) -> Iterator[tuple[str, str, str]]:
    if normal_formula(old.require) != normal_formula(new.require):
        yield "require", text_of(old), text_of(new)
    if set(old.slices) != set(new.slices):
        yield "slices", ", ".join(old.slices) or "none", ", ".join(new.slices) or "none"
    if old.budget != new.budget:
        yield "budget", _budget(old.budget), _budget(new.budget)
    for name in sorted(_slices(old) & _slices(new)):
        first, second = before.slice(name), after.slice(name)
        if _requests(first, before) != _requests(second, after):
            yield f"slice {name}", _requests(first, before), _requests(second, after)
    tables = table_of(old), table_of(new)
    if tables[0] is not None and tables[0] == tables[1]:
        values = _table(before.table(tables[0])), _table(after.table(tables[0]))
        if values[0] != values[1]:
            yield f"table {tables[0]}", *values


def _slices(clause: Clause) -> set[str]:
    regions = {p.region.slice for p in walk(clause.require) if isinstance(p, Quantified)}
    return regions | set(clause.slices)


def _requests(declared: Slice, program: Program) -> str:
    data = declared.data or program.data or "no data"
    where = "every request" if declared.where == AllOf() else predicate_text(declared.where)
    return f"{where} in {data}"


def _budget(budget: Budget | None) -> str:
    if budget is None:
        return "none (hard)"
    return f"{real_text(budget.rate * 100)}% of {budget.unit}"


def _table(table: ThresholdTable) -> str:
    rows = [f"{predicate_text(row.where)}: {real_text(row.value)}" for row in table.rows]
    rest = [] if table.otherwise is None else [f"otherwise: {real_text(table.otherwise)}"]
    return "; ".join([*rows, *rest])
