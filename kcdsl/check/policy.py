"""The sections `escalation` and `constants`."""

from __future__ import annotations

from fractions import Fraction

from kcdsl.check.clauses import FAMILIES, check_action
from kcdsl.check.escalation import build_escalation, weakened
from kcdsl.check.report import suggest
from kcdsl.check.structure import StructureReader
from kcdsl.diagnostics.codes import OUT_OF_RANGE, UNKNOWN_FIELD, WEAKENED_ESCALATION, WRONG_KIND
from kcdsl.ir.terms import Constants, Escalation, Family, Level
from kcdsl.source.yaml_nodes import Mapping, Scalar

_LEVELS = tuple(Level.__members__)
_CONSTANTS = ("temperature", "reward_range", "advantage_max", "score_norm_max")


def read_escalation(node: Mapping | None, reader: StructureReader) -> Escalation:
    """Return the total escalation policy; errors are in the sink."""
    levels: dict[Level, str] = {}
    cells: dict[tuple[Family, Level], str] = {}
    if node is None:
        return build_escalation(levels, cells)
    for entry in node.entries:
        name = entry.key.text
        if name in _LEVELS:
            action = _action(node, name, reader)
            if action is not None:
                levels[Level(name)] = action
        elif name == "by_family":
            table = reader.mapping(node, name)
            for row in table.entries if table is not None else ():
                if row.key.text in FAMILIES and table is not None:
                    _family(table, row.key.text, reader, cells)
                else:
                    _unknown(row.key, reader, [family.value for family in Family])
        elif name in FAMILIES:
            _family(node, name, reader, cells)
        else:
            _unknown(entry.key, reader, [*_LEVELS, *(family.value for family in Family)])
    escalation = build_escalation(levels, cells)
    for family, level, reason in weakened(escalation):
        reader.reporter.warning(
            WEAKENED_ESCALATION,
            f"{family} {level}: {reason}",
            node.entries[0].key.span if node.entries else node.span,
            f"write {family}: {{{level}: ACTION}} with the action that is meant",
        )
    return escalation


def _unknown(key: Scalar, reader: StructureReader, allowed: list[str]) -> None:
    reader.reporter.error(
        UNKNOWN_FIELD,
        f"`escalation` has no row `{key.text}`",
        key.span,
        suggest(key.text, allowed, "rows"),
    )


def _family(
    parent: Mapping,
    name: str,
    reader: StructureReader,
    cells: dict[tuple[Family, Level], str],
) -> None:
    row = reader.mapping(parent, name, _LEVELS)
    for entry in row.entries if row is not None else ():
        if row is None or entry.key.text not in _LEVELS:
            continue
        action = _action(row, entry.key.text, reader)
        if action is not None:
            cells[FAMILIES[name], Level(entry.key.text)] = action


def _action(parent: Mapping, name: str, reader: StructureReader) -> str | None:
    scalar = reader.text(parent, name)
    return None if scalar is None else check_action(scalar, reader.reporter)


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
        number = value.value if isinstance(value, Scalar) else None
        if isinstance(number, bool) or not isinstance(number, int | Fraction):
            reader.reporter.error(WRONG_KIND, f"`{name}` takes a number", value.span)
        elif number < 0 or (name == "temperature" and number == 0):
            word = "positive" if name == "temperature" else "not negative"
            reader.reporter.error(OUT_OF_RANGE, f"`{name}` is {word}", value.span)
        else:
            values[name] = Fraction(number)
    return Constants(
        values.get("temperature", Fraction(1)),
        values.get("reward_range"),
        values.get("advantage_max"),
        values.get("score_norm_max"),
    )
