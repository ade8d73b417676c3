"""Two contracts side by side: one set of slices, so that their clauses speak of the same things.

Slices that select the same requests of the same data get one name; of two others that share a name,
each is marked `(old)` or `(new)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from kcdsl.ir.tables import expand_tables
from kcdsl.ir.terms import (
    Clause,
    Compare,
    Connective,
    Formula,
    HasFields,
    NoFlip,
    Not,
    Program,
    Quantified,
    Slice,
)
from kcdsl_backends.smt.predicates import selects_within
from kcdsl_backends.smt.solving import Clock


@dataclass(frozen=True, slots=True)
class Universe:
    """The slices of both contracts and what both agree on, as a program without clauses; and the
    clauses of each, tables written out, about these slices."""

    program: Program
    old: tuple[Clause, ...]
    new: tuple[Clause, ...]


def unite(old: Program, new: Program, clock: Clock) -> Universe:
    """Return the universe of two programs.

    The temperature and the user's metrics are part of it where both programs agree on them.
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
    united = {first[s.name]: replace(s, name=first[s.name]) for s in slices.values()}
    for declared in after.slices:
        chosen = second[declared.name]
        united.setdefault(chosen, replace(_placed(declared, after), name=chosen))
    same_temperature = old.constants.temperature == new.constants.temperature
    program = replace(
        before,
        slices=tuple(united.values()),
        clauses=(),
        constants=old.constants
        if same_temperature
        else replace(old.constants, temperature=type(old.constants.temperature)(0)),
        metrics=tuple(m for m in old.metrics if m in new.metrics)
        + tuple(m for m in new.metrics if all(m.name != o.name for o in old.metrics))
        + tuple(m for m in old.metrics if all(m.name != n.name for n in new.metrics)),
    )
    return Universe(
        program,
        tuple(_about(clause, first) for clause in before.clauses),
        tuple(_about(clause, second) for clause in after.clauses),
    )


def _placed(declared: Slice, program: Program) -> Slice:
    """Return a slice with its data, the default of its program written out."""
    return replace(declared, data=declared.data or program.data)


def _likely(slices: Mapping[str, Slice], other: Slice) -> list[Slice]:
    """Return the slices that another may be equal to, the one of its name first."""
    same = [slices[other.name]] if other.name in slices else []
    return same + [s for s in slices.values() if s.name != other.name]


def _equal(program: Program, a: Slice, b: Slice, clock: Clock) -> bool:
    if (a.data, a.where) == (b.data, b.where):
        return True
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
    match formula:
        case Quantified(region=region, body=body):
            inner = replace(region, slice=names[region.slice])
            return replace(formula, region=inner, body=_renamed(body, names))
        case Not(of=of):
            return replace(formula, of=_renamed(of, names))
        case Connective(parts=parts):
            return replace(formula, parts=tuple(_renamed(part, names) for part in parts))
        case Compare() | NoFlip() | HasFields():
            return formula
        case _:
            assert_never(formula)
