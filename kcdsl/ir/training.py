"""The part of a contract that a training loss may use.

A clause with `holdout: true` is evaluated and gates releases. In a training loss, it would be
optimised directly and no longer measure what it should; so a trainer gets the contract without such
clauses, and without the slices, tables and metrics that only they use. The digest of the full
program binds the trainer to one contract; it does not protect the clauses against guessing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kcdsl.ir.canonical import digest, document_json
from kcdsl.ir.formulas import terms_of, walk
from kcdsl.ir.terms import Metric, Program, Quantified, TableValue

SCHEMA = "kcdsl.training/1"


@dataclass(frozen=True, slots=True)
class ExcludedParts:
    """The numbers of parts of a program that are excluded from training."""

    clauses: int
    slices: int
    tables: int
    metrics: int

    def __str__(self) -> str:
        parts = [
            f"{count} {name if count != 1 else name[:-1]}"
            for name in self.__dataclass_fields__
            if (count := getattr(self, name))
        ]
        return ", ".join(parts) or "nothing"


def for_training(program: Program) -> tuple[Program, ExcludedParts]:
    """Return the program without held-out clauses and the parts that only they need, and counts."""
    clauses = tuple(clause for clause in program.clauses if not clause.holdout)
    slices: set[str] = set()
    terms: set[tuple[type, str]] = set()  # a table may have the name of a metric
    for clause in clauses:
        slices |= set(clause.slices)
        slices |= {f.region.slice for f in walk(clause.require) if isinstance(f, Quantified)}
        named = (t for t in terms_of(clause.require) if isinstance(t, Metric | TableValue))
        terms |= {(type(term), term.name) for term in named}
    kept = tuple(s for s in program.slices if s.name in slices)
    tables = tuple(t for t in program.tables if (TableValue, t.name) in terms)
    metrics = tuple(m for m in program.metrics if (Metric, m.name) in terms)
    shown = replace(
        program,
        clauses=clauses,
        slices=kept,
        tables=tables,
        metrics=metrics,
        data=program.data if any(s.data is None for s in kept) else None,
        imports=(),
    )
    withheld = ExcludedParts(
        len(program.clauses) - len(clauses),
        len(program.slices) - len(kept),
        len(program.tables) - len(tables),
        len(program.metrics) - len(metrics),
    )
    return shown, withheld


def training_document(program: Program) -> bytes:
    """Return the file that `compile --emit ir --for training` writes, as canonical JSON."""
    import rfc8785

    shown, withheld = for_training(program)
    counts = {name: getattr(withheld, name) for name in withheld.__dataclass_fields__}
    return bytes(
        rfc8785.dumps(
            {
                "schema": SCHEMA,
                "program": document_json(shown),
                "withheld": counts,
                "full": {"digest": digest(program)},
            }
        )
    )
