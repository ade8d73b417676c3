"""The escalation policy Π: a total table from (family, level) to an action."""

from __future__ import annotations

from collections.abc import Mapping

from kcdsl.ir.terms import Escalation, Family, Level

ACTIONS: tuple[str, ...] = (
    "log",
    "importance_correct",
    "other_decoding",
    "shed_load",
    "guard",
    "higher_precision",
    "freeze",
    "fallback",
    "rollback",
)
"""Every action, mildest first: `log < guard < freeze < fallback < rollback`, with the named
remediations between log and freeze."""

ALIASES = {"higher_precision_kernel": "higher_precision", "guarded_route": "guard"}
"""Other spellings that records use."""

LEVEL_DEFAULTS: dict[Level, str] = {Level.L1: "log", Level.L2: "guard", Level.L3: "fallback"}

FAMILY_DEFAULTS: dict[tuple[Family, Level], str] = {
    (Family.NUMERICAL, Level.L1): "log",
    (Family.NUMERICAL, Level.L2): "higher_precision",
    (Family.NUMERICAL, Level.L3): "fallback",
    (Family.STATISTICAL, Level.L1): "log",
    (Family.STATISTICAL, Level.L2): "other_decoding",
    (Family.STATISTICAL, Level.L3): "fallback",
    (Family.RUNTIME, Level.L1): "log",
    (Family.RUNTIME, Level.L2): "guard",
    (Family.RUNTIME, Level.L3): "fallback",
    (Family.OBSERVABILITY, Level.L1): "log",
    (Family.OBSERVABILITY, Level.L2): "freeze",
    (Family.OBSERVABILITY, Level.L3): "rollback",
}


def severity(action: str) -> int:
    """Return the rank of an action; a larger one is more severe. Raises ValueError if unknown."""
    return ACTIONS.index(action)


def build_escalation(
    levels: Mapping[Level, str], cells: Mapping[tuple[Family, Level], str]
) -> Escalation:
    """Complete the rows that a contract states to the total table.

    A cell of a family wins over a level row, and a level row of the contract wins over the
    default of a family.
    """
    by_level = tuple((level, levels.get(level, LEVEL_DEFAULTS[level])) for level in Level)
    by_family = []
    for family in Family:
        for level in Level:
            action = cells.get((family, level), levels.get(level))
            by_family.append((family, level, action or FAMILY_DEFAULTS[family, level]))
    return Escalation(by_level, tuple(by_family))


def weakened(escalation: Escalation) -> list[tuple[Family, Level, str]]:
    """Return the cells that are weaker than they should be, each with the reason."""
    found = []
    for family in Family:
        below = -1
        for level in Level:
            action = escalation.action(family, level)
            default = FAMILY_DEFAULTS[family, level]
            if severity(action) < below:
                found.append((family, level, f"`{action}` is milder than the level below it"))
            elif (family, level) == (Family.OBSERVABILITY, Level.L3) and severity(
                action
            ) < severity(default):
                found.append((family, level, f"`{action}` replaces the default `{default}`"))
            below = severity(action)
    return found
