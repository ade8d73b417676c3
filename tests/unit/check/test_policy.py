"""The escalation policy: a complete table, and a warning for every weakening."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kcdsl.check.compile import compile_source
from kcdsl.diagnostics import Severity, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.canonical import digest
from kcdsl.ir.escalation import ACTIONS, FAMILY_DEFAULTS, build_escalation, severity, weakened
from kcdsl.ir.terms import Escalation, Family, Level

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
def test_default_policy(family: Family, actions: tuple[str, str, str]) -> None:
    escalation, found = policy("")
    assert tuple(escalation.action(family, level) for level in Level) == actions
    assert found == []


def test_policy_table_is_total() -> None:
    escalation = build_escalation({}, {})
    assert {(f, lv) for f, lv, _ in escalation.by_family} == {
        (f, lv) for f in Family for lv in Level
    }
    assert dict(escalation.by_level) == {
        Level.L1: "log",
        Level.L2: "guard",
        Level.L3: "fallback",
    }


def test_precedence_of_policy_entries() -> None:
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


def test_weakening_is_reported() -> None:
    assert policy("escalation: {L3: fallback}\n")[1] == ["KC215"]
    assert policy("escalation: {runtime: {L2: log, L1: guard}}\n")[1] == ["KC215"]
    assert policy("escalation: {L3: rollback}\n")[1] == []


def test_severity_order_of_actions() -> None:
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


def warned(text: str) -> list[tuple[str, str, str]]:
    """Return code, message and marked text of every finding."""
    sink = Sink()
    compile_source(SourceFile("x", HEAD + text), sink)
    return [
        (d.code.id, d.message, (HEAD + text)[d.span.start : d.span.end]) for d in sink if d.span
    ]


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        (
            "{L1: log, runtime: {L1: guard, L2: log}}",
            "runtime L2: `log` is milder than `guard` of L1",
            "log",
        ),
        (
            "{runtime: {L1: freeze}}",
            "runtime L2: `guard` is milder than `freeze` of L1",
            "freeze",
        ),
        (
            "{L1: freeze, L2: guard, L3: rollback}",
            "numerical, statistical, runtime, observability L2: `guard` is milder than `freeze` "
            "of L1",
            "guard",
        ),
        (
            "{L3: fallback}",
            "observability L3: `fallback` replaces the default `rollback`",
            "fallback",
        ),
        (
            "{by_family: {O: {L3: freeze}}}",
            "observability L3: `freeze` replaces the default `rollback`",
            "freeze",
        ),
    ],
)
def test_weakening_entry_is_marked(text: str, message: str, place: str) -> None:
    assert warned(f"escalation: {text}\n") == [("KC215", message, place)]


def test_level_is_compared_with_every_lower_one() -> None:
    """L3 is milder than L1, although it is not milder than L2."""
    found = weakened(
        build_escalation(
            {},
            {
                (Family.RUNTIME, Level.L1): "fallback",
                (Family.RUNTIME, Level.L2): "log",
                (Family.RUNTIME, Level.L3): "guard",
            },
        )
    )
    assert [(w.level, w.than, w.below) for w in found] == [
        (Level.L2, "fallback", Level.L1),
        (Level.L3, "fallback", Level.L1),
    ]


@pytest.mark.parametrize(
    ("clause", "marked"),
    [
        ("{require: p99(kl) <= 1, level: L3, then: guard}", "guard"),
        ("{require: p99(kl) <= 1, level: L3, remediation: log}", "log"),
        ("{require: p99(kl) <= 1, level: L2, then: log}", "log"),
        ("{require: 'has(trace, [rng_seed])', level: L3, then: fallback}", "fallback"),
        ("{require: 'has(trace, [rng_seed])', level: L2, then: guard}", "guard"),
        ("{require: p99(kl) <= 1, level: L2, then: importance_correct}", None),
        ("{require: p99(kl) <= 1, level: L2, then: guard}", None),
        ("{require: p99(kl) <= 1, level: L1, then: log}", None),
        ("{require: p99(kl) <= 1, level: L3, then: rollback}", None),
        ("{require: p99(kl) <= 1, level: L3}", None),
    ],
)
def test_action_milder_than_the_policy_is_reported(clause: str, marked: str | None) -> None:
    head = HEAD.replace("{require: ece_gap <= 1%, level: L1}", clause)
    sink = Sink()
    assert compile_source(SourceFile("x", head), sink) is not None
    found = [(d.code.id, head[d.span.start : d.span.end]) for d in sink if d.span]
    assert found == ([] if marked is None else [("KC233", marked)])


def test_policy_of_the_contract_applies() -> None:
    text = HEAD.replace("level: L1}", "level: L3, then: guard}")
    sink = Sink()
    compile_source(SourceFile("x", text + "escalation: {statistical: {L3: guard}}\n"), sink)
    assert [d.code.id for d in sink] == []


def test_contract_sets_the_thresholds_of_the_health_score() -> None:
    escalation, found = policy("escalation: {health: {guard_from: 0.5, fallback_from: 2.5}}\n")
    assert (escalation.guard_from, escalation.fallback_from) == (Fraction(1, 2), Fraction(5, 2))
    assert found == []
    one, _ = policy("escalation: {health: {fallback_from: 4}}\n")
    assert (one.guard_from, one.fallback_from) == (Fraction(1), Fraction(4))


@pytest.mark.parametrize(
    ("health", "code"),
    [
        ("{guard_from: 0}", "KC303"),
        ("{guard_from: 3}", "KC303"),
        ("{guard_from: -1, fallback_from: 2}", "KC303"),
        ("{fallback_from: 1e9}", "KC303"),
        ("{guard_from: high}", "KC103"),
        ("{guard_from: true}", "KC103"),
        ("{guard: 1}", "KC101"),
        ("1", "KC103"),
    ],
)
def test_unordered_thresholds_are_errors(health: str, code: str) -> None:
    sink = Sink()
    source = SourceFile("x", f"{HEAD}escalation: {{health: {health}}}\n")
    assert compile_source(source, sink) is None
    assert [d.code.id for d in sink if d.severity is Severity.ERROR] == [code]
    assert all(d.span is not None for d in sink)


def test_guard_and_fallback_kernels_are_part_of_the_contract() -> None:
    named = HEAD.replace(
        "infer: {run: torch.sdpa}}",
        "infer: {run: torch.sdpa}, guard: {run: torch.sdpa.math}, fallback: {run: torch.eager}}",
    )
    program, plain = (compile_source(SourceFile("x", text), Sink()) for text in (named, HEAD))
    assert program is not None
    assert plain is not None
    assert {role: kernel.run for role, kernel in program.kernels.items()} == {
        "train": "torch.eager",
        "infer": "torch.sdpa",
        "guard": "torch.sdpa.math",
        "fallback": "torch.eager",
    }
    assert (plain.guard, plain.fallback) == (None, None)
    assert digest(program) != digest(plain)
    sink = Sink()
    wrong = named.replace("torch.sdpa.math", "torch.sdpa.maths")
    assert compile_source(SourceFile("x", wrong), sink) is None
    assert [d.code.id for d in sink] == ["KC210"]
