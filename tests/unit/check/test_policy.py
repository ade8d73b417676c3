"""The escalation policy: a total table, and no silent weakening."""

from __future__ import annotations

import pytest

from kcdsl.check.compile import compile_source
from kcdsl.check.escalation import ACTIONS, FAMILY_DEFAULTS, build_escalation, severity, weakened
from kcdsl.diagnostics import Sink
from kcdsl.ir.terms import Escalation, Family, Level
from kcdsl.source.text import SourceFile

HEAD = """kcdsl: 1
contract: c
version: 1
model: {checkpoint: m, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
slices: {all: {}}
clauses: {A: {require: ece_gap <= 1%, level: L1}}
"""


def policy(text: str) -> tuple[Escalation, list[str]]:
    """Return the policy of a contract with this section, and the warnings."""
    sink = Sink()
    program = compile_source(SourceFile("x", HEAD + text), sink)
    assert program is not None, [d.message for d in sink]
    return program.escalation, [d.code.id for d in sink]


@pytest.mark.parametrize(
    ("family", "actions"),
    [
        (Family.NUMERICAL, ("log", "higher_precision", "fallback")),
        (Family.STATISTICAL, ("log", "other_decoding", "fallback")),
        (Family.RUNTIME, ("log", "guard", "fallback")),
        (Family.OBSERVABILITY, ("log", "freeze", "rollback")),
    ],
)
def test_defaults(family: Family, actions: tuple[str, str, str]) -> None:
    escalation, found = policy("")
    assert tuple(escalation.action(family, level) for level in Level) == actions
    assert found == []


def test_the_table_is_total() -> None:
    escalation = build_escalation({}, {})
    assert {(f, lv) for f, lv, _ in escalation.by_family} == {
        (f, lv) for f in Family for lv in Level
    }
    assert dict(escalation.by_level) == {
        Level.L1: "log",
        Level.L2: "guard",
        Level.L3: "fallback",
    }


def test_precedence() -> None:
    escalation, _ = policy(
        "escalation: {L2: freeze, numerical: {L2: guard}, observability: {L3: rollback}}\n"
    )
    assert escalation.action(Family.NUMERICAL, Level.L2) == "guard"
    assert escalation.action(Family.RUNTIME, Level.L2) == "freeze"
    assert escalation.action(Family.OBSERVABILITY, Level.L3) == "rollback"


def test_the_form_by_family_and_short_names_mean_the_same() -> None:
    long, _ = policy("escalation: {numerical: {L2: higher_precision}, L1: log}\n")
    short, _ = policy("escalation: {L1: log, by_family: {N: {L2: higher_precision_kernel}}}\n")
    assert long == short


def test_weakening_is_said() -> None:
    assert policy("escalation: {L3: fallback}\n")[1] == ["KC215"]
    assert policy("escalation: {runtime: {L2: log, L1: guard}}\n")[1] == ["KC215"]
    assert policy("escalation: {L3: rollback}\n")[1] == []


def test_severity_is_the_stated_order() -> None:
    order = ["log", "guard", "freeze", "fallback", "rollback"]
    assert sorted(order, key=severity) == order
    assert len(set(ACTIONS)) == len(ACTIONS)
    assert all(
        severity("log") < severity(a) < severity("freeze")
        for a in ("higher_precision", "importance_correct", "other_decoding", "shed_load")
    )
    with pytest.raises(ValueError, match="not in tuple"):
        severity("nothing")


def test_defaults_never_weaken() -> None:
    assert weakened(build_escalation({}, {})) == []
    assert set(FAMILY_DEFAULTS.values()) <= set(ACTIONS)
