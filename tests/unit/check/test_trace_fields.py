"""KC234: observability clauses cover the trace fields that other clauses need for replay."""

from __future__ import annotations

import pytest

from kcdsl.check.compile import compile_source
from kcdsl.diagnostics import Sink
from kcdsl.diagnostics.spans import SourceFile

HEAD = """kcdsl: 1
contract: c
version: 1
model: {checkpoint: m, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
slices: {all: {}, long: {where: length > 8}, own: {data: own.jsonl}}
clauses:
"""
FORWARD = "build_fingerprint, request_shape, replay_signature"
DRAWN = f"{FORWARD}, rng_seed, sampling_params"


def found(*clauses: str) -> list[str]:
    """Return the messages of KC234 for a contract with these clauses."""
    text = HEAD + "".join(f"  C{i}: {{{body}}}\n" for i, body in enumerate(clauses))
    sink = Sink()
    assert compile_source(SourceFile("x", text), sink) is not None, [d.message for d in sink]
    return [d.message for d in sink if d.code.id == "KC234"]


def observing(fields: str, more: str = "") -> str:
    """Return an observability clause."""
    return f"require: [{fields}], level: L3{more}"


@pytest.mark.parametrize(
    ("clause", "needed"),
    [
        ("require: p99(kl) <= 1, level: L2", FORWARD),
        ("require: mean(abs(log_ratio)) <= 1, level: L2", DRAWN),
        ("require: reward_delta <= 1, level: L2", DRAWN),
        ("require: p95(latency) <= 1 s, level: L1", "build_fingerprint, request_shape"),
        ("require: determinism >= 99%, level: L1", FORWARD),
        (
            "require: 'forall x in points(all): norm_2(measured_drift(attn_0, x)) <= 1', level: L2",
            FORWARD,
        ),
    ],
)
def test_each_needed_field_is_demanded(clause: str, needed: str) -> None:
    assert found(clause, observing(needed)) == []
    names = needed.split(", ")
    for missing in names:
        (message,) = found(clause, observing(", ".join(n for n in (*names, "x") if n != missing)))
        assert f"requires {missing} " in message


def test_proved_drift_and_contracts_without_observability_need_no_trace() -> None:
    proved = "require: 'forall x in points(all): no_flip(model, x)', level: L2"
    assert found(proved, observing("rng_seed")) == []
    assert found("require: p99(kl) <= 1, level: L2") == []


def test_coverage_is_per_slice() -> None:
    drift = "require: p99(kl) <= 1, slices: [long, own], level: L2"
    assert found(drift, observing(FORWARD)) != []  # a clause without slices applies to `all`
    assert found(drift, observing(FORWARD, ", slices: [long, own]")) == []
    assert found(drift, observing(FORWARD, ", slices: [all, own]")) == []
    assert found(drift, observing(FORWARD, ", slices: [all]")) != []
    assert found(drift, observing(FORWARD, ", slices: [long]"), observing(FORWARD)) != []


def test_clauses_cover_fields_jointly_and_one_finding_names_the_rest() -> None:
    first, second = FORWARD.split(", ", 1)
    kl, tv = "require: p99(kl) <= 1, level: L2", "require: mean(tv) <= 0.5, level: L2"
    assert found(kl, tv, observing(first), observing(second)) == []
    (message,) = found(kl, tv, observing(first))
    assert message.startswith("C0 and 1 more cannot be replayed")
    assert "requires request_shape, replay_signature" in message
