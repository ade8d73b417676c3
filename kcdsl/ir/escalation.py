"""The escalation policy Π: a total table from (family, level) to an action."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
"""Other names of actions in records."""

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
    """Return the total table from the rows of a contract.

    A cell of a family has priority over a level row, and a level row of the contract has priority
    over the default of a family.
    """
    by_level = tuple((level, levels.get(level, LEVEL_DEFAULTS[level])) for level in Level)
    by_family = []
    for family in Family:
        for level in Level:
            action = cells.get((family, level), levels.get(level))
            by_family.append((family, level, action or FAMILY_DEFAULTS[family, level]))
    return Escalation(by_level, tuple(by_family))


class Weakness(NamedTuple):
    """A cell of the table that is too mild.

    `than` is the least severe acceptable action: that of the lower level `below`, or the default of
    the family where `below` is None.
    """

    family: Family
    level: Level
    action: str
    than: str
    below: Level | None

    @property
    def reason(self) -> str:
        """Return the defect in words."""
        if self.below is None:
            return f"`{self.action}` replaces the default `{self.than}`"
        return f"`{self.action}` is milder than `{self.than}` of {self.below}"


def weakened(escalation: Escalation) -> list[Weakness]:
    """Return the cells that are milder than a lower level, or than the default rollback of L3
    observability clauses."""
    found = []
    for family in Family:
        worst: tuple[Level, str] | None = None
        for level in Level:
            action = escalation.action(family, level)
            default = FAMILY_DEFAULTS[family, level]
            if worst is not None and severity(action) < severity(worst[1]):
                found.append(Weakness(family, level, action, worst[1], worst[0]))
            elif (family, level) == (Family.OBSERVABILITY, Level.L3) and severity(
                action
            ) < severity(default):
                found.append(Weakness(family, level, action, default, None))
            if worst is None or severity(action) > severity(worst[1]):
                worst = (level, action)
    return found


_KINDS = ("log", None, "freeze", "fallback", "rollback")


def kind(action: str) -> int:
    """Return the rank of an action among log < remedies < freeze < fallback < rollback.

    Remedies (`guard`, `higher_precision` and the like) address different problems, so none of them
    is milder than another.
    """
    return _KINDS.index(action if action in _KINDS else None)
