"""The sections `escalation` and `constants`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from kcdsl.check.sections.clauses import FAMILIES, check_action
from kcdsl.check.sections.fields import StructureReader
from kcdsl.check.sections.structure import ACTION_FIELDS, RawClause
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Fix, Label
from kcdsl.diagnostics.report import Reporter, replacement, suggest
from kcdsl.diagnostics.spans import Span
from kcdsl.ir.escalation import ALIASES, Weakness, build_escalation, kind, weakened
from kcdsl.ir.terms import (
    FALLBACK_FROM,
    GUARD_FROM,
    Clause,
    Constants,
    Escalation,
    Family,
    Level,
)
from kcdsl.source.removal import without
from kcdsl.source.yaml_nodes import Mapping, MappingEntry, Scalar

_LEVELS = tuple(Level.__members__)
_HEALTH = ("guard_from", "fallback_from")
_LARGEST = 1_000_000
_CONSTANTS = ("temperature", "reward_range", "advantage_max", "score_norm_max")


@dataclass(slots=True)
class _Stated:
    """The rows of a contract, each action with its span."""

    levels: dict[Level, Scalar] = field(default_factory=dict)
    cells: dict[tuple[Family, Level], Scalar] = field(default_factory=dict)

    def place(self, family: Family, level: Level) -> Span | None:
        """Return the span that sets the action of a cell; None for a default."""
        scalar = self.cells.get((family, level)) or self.levels.get(level)
        return None if scalar is None else scalar.span


def read_escalation(node: Mapping | None, reader: StructureReader) -> Escalation:
    """Return the total escalation policy; errors are in the sink."""
    stated = _Stated()
    for entry in node.entries if node is not None else ():
        assert node is not None
        name = entry.key.text
        if name in _LEVELS:
            action = _action(node, name, reader)
            if action is not None:
                stated.levels[Level(name)] = action
        elif name == "by_family":
            table = reader.mapping(node, name)
            for row in table.entries if table is not None else ():
                if row.key.text in FAMILIES and table is not None:
                    _family(table, row.key.text, reader, stated)
                else:
                    _unknown(row.key, reader, [family.value for family in Family])
        elif name in FAMILIES:
            _family(node, name, reader, stated)
        elif name != "health":
            rows = [*_LEVELS, *(family.value for family in Family), "by_family", "health"]
            _unknown(entry.key, reader, rows)
    guard_from, fallback_from = _health(node, reader)
    escalation = replace(
        build_escalation(
            {level: _name(scalar) for level, scalar in stated.levels.items()},
            {cell: _name(scalar) for cell, scalar in stated.cells.items()},
        ),
        guard_from=guard_from,
        fallback_from=fallback_from,
    )
    _report_weakened(escalation, stated, reader)
    return escalation


def _health(node: Mapping | None, reader: StructureReader) -> tuple[Fraction, Fraction]:
    """Return the thresholds of the health score; the defaults after an error."""
    defaults = GUARD_FROM, FALLBACK_FROM
    section = reader.mapping(node, "health", _HEALTH)
    if section is None:
        return defaults
    found = dict(zip(_HEALTH, defaults, strict=True))
    for entry in section.entries:
        if entry.key.text not in found:
            continue
        number = reader.number(entry.value, entry.key.text)
        if number is None:
            return defaults
        found[entry.key.text] = number
    guard_from, fallback_from = found.values()
    if not 0 < guard_from < fallback_from <= _LARGEST:
        reader.reporter.error(
            codes.OUT_OF_RANGE,
            f"`health` needs 0 < guard_from < fallback_from <= {_LARGEST}",
            section.span,
            f"the defaults are guard_from: {GUARD_FROM} and fallback_from: {FALLBACK_FROM}",
        )
        return defaults
    return guard_from, fallback_from


def _report_weakened(escalation: Escalation, stated: _Stated, reader: StructureReader) -> None:
    """Report each entry that makes cells too mild, once for all its families."""
    places: dict[tuple[Span, str], list[Weakness]] = {}
    for weakness in weakened(escalation):
        span = stated.place(weakness.family, weakness.level)
        if span is None and weakness.below is not None:
            span = stated.place(weakness.family, weakness.below)
        if span is not None:
            places.setdefault((span, weakness.reason), []).append(weakness)
    for (span, reason), cells in places.items():
        first = cells[0]
        below = None if first.below is None else stated.place(first.family, first.below)
        labels = () if below in {None, span} or below is None else (Label(below, first.than),)
        families = ", ".join(cell.family.value for cell in cells)
        reader.reporter.warning(
            codes.WEAKENED_ESCALATION,
            f"{families} {first.level}: {reason}",
            span,
            f"write {first.family}: {{{first.level}: ACTION}} with the action that is meant",
            labels,
        )


def _unknown(key: Scalar, reader: StructureReader, allowed: list[str]) -> None:
    reader.reporter.error(
        codes.UNKNOWN_FIELD,
        f"`escalation` has no row `{key.text}`",
        key.span,
        suggest(key.text, allowed, "rows"),
    )


def _family(parent: Mapping, name: str, reader: StructureReader, stated: _Stated) -> None:
    row, family = reader.mapping(parent, name, _LEVELS), FAMILIES[name]
    for entry in row.entries if row is not None else ():
        if row is None or entry.key.text not in _LEVELS:
            continue
        action = _action(row, entry.key.text, reader)
        if action is None:
            continue
        cell = family, Level(entry.key.text)
        if cell in stated.cells:
            reader.reporter.error(
                codes.CONFLICTING_FIELDS,
                f"the action of {family} {cell[1]} is given twice",
                action.span,
                "keep one of them",
                (Label(stated.cells[cell].span, "here too"),),
                fix=_keep_first(reader, row, entry, stated.cells[cell]),
            )
            continue
        stated.cells[cell] = action


def _keep_first(
    reader: StructureReader, row: Mapping, entry: MappingEntry, first: Scalar
) -> Fix | None:
    """Return the fix that removes the second of two actions; safe if both are equal."""
    same = isinstance(entry.value, Scalar) and entry.value.text == first.text
    return without(reader.reporter.source, row, [row.entries.index(entry)], safe=same)


def _action(parent: Mapping, name: str, reader: StructureReader) -> Scalar | None:
    scalar = reader.text(parent, name)
    known = scalar is not None and check_action(scalar, reader.reporter) is not None
    return scalar if known else None


def _name(scalar: Scalar) -> str:
    return ALIASES.get(scalar.text, scalar.text)


def check_actions(
    raws: Sequence[RawClause],
    clauses: Sequence[Clause | None],
    escalation: Escalation,
    reporter: Reporter,
) -> None:
    """Warn of clauses whose own action is milder than that of the policy for their level."""
    for raw, clause in zip(raws, clauses, strict=True):
        if clause is None or clause.action is None:
            continue
        policy = escalation.action(clause.family, clause.level)
        node = next((n for name in ACTION_FIELDS if (n := raw.node(name)) is not None), None)
        if node is None or kind(clause.action) >= kind(policy):
            continue
        reporter.warning(
            codes.MILD_ACTION,
            f"`{clause.action}` is milder than `{policy}`, the action for {clause.family} "
            f"{clause.level}",
            node.span,
            "give the clause another level, or change the policy in `escalation`",
            fix=replacement(node.span, policy),
        )


def read_constants(node: Mapping | None, reader: StructureReader) -> Constants:
    """Return the constants of the bound chain; errors are in the sink."""
    if node is None:
        return Constants()
    reader.fields(node, "`constants`", _CONSTANTS)
    values: dict[str, Fraction] = {}
    for entry in node.entries:
        name, value = entry.key.text, entry.value
        if name not in _CONSTANTS:
            continue
        number = reader.number(entry.value, entry.key.text)
        if number is None:
            continue
        if number < 0 or (name == "temperature" and number == 0):
            word = "positive" if name == "temperature" else "not negative"
            reader.reporter.error(
                codes.OUT_OF_RANGE, f"`{name}` is {word}", value.span, help=f"such as `{name}: 1`"
            )
        else:
            values[name] = number
    return Constants(
        values.get("temperature", Fraction(1)),
        values.get("reward_range"),
        values.get("advantage_max"),
        values.get("score_norm_max"),
    )
