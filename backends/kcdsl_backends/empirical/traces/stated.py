"""Programs as they were stated: the canonical JSON, and beside it what that leaves out.

The canonical form keeps the meaning and no more. A report also shows the author's wording, orders
its rows as the contract does, and labels terms by the names that the author chose; so a trace holds
these too. The two must say the same: the program that is read has the digest that stands with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kcdsl.ir.canonical import digest, document_json, formula_json
from kcdsl.ir.load import formula_from_json, from_json
from kcdsl.ir.terms import Clause, Program

_Item = TypeVar("_Item")


def stated_json(program: Program) -> dict[str, Any]:
    """Return a program as plain JSON data, with orders, names and wording as they were stated."""
    return {
        "canonical": document_json(program),
        "slices": [slice_.name for slice_ in program.slices],
        "tables": [table.name for table in program.tables],
        "metrics": [metric.name for metric in program.metrics],
        "clauses": [
            {
                "id": clause.id,
                "text": clause.text,
                "require": formula_json(clause.require),
                "slices": list(clause.slices),
            }
            for clause in program.clauses
        ],
    }


def stated_program(value: Any) -> Program:
    """Return the program of `stated_json`.

    Raises ValueError, TypeError, KeyError or Refusal where the data are not such a program, or what
    was stated has another digest than the canonical form beside it.
    """
    canonical = value["canonical"]
    held = from_json(canonical, "the program of the trace")
    clauses = {clause.id: clause for clause in held.clauses}
    program = replace(
        held,
        slices=_in_order(held.slices, value["slices"], lambda slice_: slice_.name),
        tables=_in_order(held.tables, value["tables"], lambda table: table.name),
        metrics=_in_order(held.metrics, value["metrics"], lambda metric: metric.name),
        clauses=tuple(_worded(clauses[entry["id"]], entry) for entry in value["clauses"]),
    )
    if digest(program) != canonical["digest"]:
        raise ValueError("the program is another than its digest says")
    return program


def _in_order(
    items: Sequence[_Item], names: Sequence[str], name_of: Callable[[_Item], str]
) -> tuple[_Item, ...]:
    known = {name_of(item): item for item in items}
    return tuple(known[name] for name in names)


def _worded(clause: Clause, entry: Any) -> Clause:
    if not isinstance(entry["text"], str):
        raise TypeError(f"the wording of {clause.id} is no text")
    return replace(
        clause,
        text=entry["text"],
        require=formula_from_json(entry["require"]),
        slices=tuple(entry["slices"]),
    )
