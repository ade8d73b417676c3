"""Whole evaluations of fake kernels: reports, traces, planted faults, failures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from kcdsl.diagnostics.model import Refusal
from kcdsl.exits import Exit
from kcdsl.ir.terms import (
    Compare,
    Constants,
    Drift,
    EvidenceKind,
    Family,
    HasFields,
    Level,
    Norm,
    Number,
    Quantified,
    Region,
    RegionKind,
)
from kcdsl.verdict.model import Held, InvalidEvidence
from kcdsl_backends.empirical.bounds.blocks import EACH, LENGTHS, compared_requests
from kcdsl_backends.empirical.diagnoses.weights import watch_weights
from tests.support.evaluation import evaluate
from tests.support.reports import report_schema

FIELDS = (
    "build_fingerprint",
    "request_shape",
    "rng_seed",
    "sampling_params",
    "replay_signature",
)


def strict(lab: Any) -> tuple[Any, ...]:
    """Return clauses that equal kernels satisfy and a visible drift violates."""
    return (
        lab.clause(lab.statistic("quantile", "kl", "99/100"), limit="1/1000000", id="N-KL"),
        lab.clause(lab.statistic("max", "logit_linf"), limit="1/1000", id="N-LINF"),
        lab.clause(
            lab.statistic("mean", "log_ratio", magnitude=True), limit="1/1000", id="N-RATIO"
        ),
        lab.clause(
            lab.statistic("mean", "top1_overlap"),
            ">=",
            "99/100",
            id="S-TOP1",
            family=Family.STATISTICAL,
        ),
        lab.clause(HasFields(FIELDS), id="O-TRACE", family=Family.OBSERVABILITY, level=Level.L3),
    )


def outcome(found: Any, name: str) -> Any:
    return next(p for p in found.report.prechecks if p.name == name)


def test_equal_kernels_satisfy_every_clause(lab: Any) -> None:
    found = lab.evaluate(*strict(lab), certified=1e-9)
    report = found.report
    assert report.exit is Exit.HELD
    assert report.verdict == "held"
    assert (report.health.score, report.action) == (1.0, "log")
    assert all(isinstance(row.verdict, Held) for row in report.clauses)
    assert [c.block for c in report.crosschecks] == ["attn_0"]
    assert report.crosschecks[0].requests == EACH
    assert {p.outcome for p in report.prechecks} == {"passed", "not_applicable"}
    unknown = {p.name for p in report.prechecks if p.outcome == "not_applicable"}
    assert unknown == {"batch_invariance", "swapped_sides", "coarser_layer", "stale_weights"}
    document = json.loads(report.dumps())
    jsonschema.validate(document, report_schema())
    required = {"clause", "slice", "metric", "value", "low", "high", "n", "threshold", "verdict"}
    assert required | {"evidence"} <= set(document["clauses"][0])


def test_limits_do_not_depend_on_the_order_of_requests(lab: Any) -> None:
    """Otherwise another order of a file may give another verdict."""
    tokens = np.random.default_rng(0).integers(0, 16, (40, 24)).tolist()
    rows = [replace(r, tokens=tuple(t)) for r, t in zip(lab.requests(40), tokens, strict=True)]
    terms = (
        lab.statistic("mean", "k3"),
        lab.statistic("aggregate", "ess_frac"),
        lab.statistic("aggregate", "ece_gap"),
    )
    clauses = [
        lab.clause(term, evidence=EvidenceKind.SAMPLE, id=f"S-{i}") for i, term in enumerate(terms)
    ]
    found = []
    for order in (rows, rows[::-1], rows[20:] + rows[:20]):
        kernel = lab.kernel(lab.drifting(0.3))
        report = lab.evaluate(*clauses, infer=kernel, rows=tuple(order)).report
        found.append([(row.value, row.low, row.high) for row in report.clauses])
    assert all(None not in row for row in found[0])
    assert found[0] == found[1] == found[2]


def test_evaluation_is_reproducible(lab: Any) -> None:
    kernel = lab.kernel(lab.drifting(1e-3))
    first, second = (lab.evaluate(*strict(lab), infer=kernel) for _ in range(2))
    assert first.report.dumps() == second.report.dumps()
    assert first.traces == second.traces
    shuffled = lab.requests()[::-1]
    other = lab.evaluate(*strict(lab), infer=kernel, rows=shuffled)
    for before, after in zip(first.report.clauses, other.report.clauses, strict=True):
        assert before.value == after.value


PLANTED: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "drift": lambda base: lambda t: base(t) + 0.05 * torch.arange(16.0, dtype=torch.float64),
    "temperature": lambda base: lambda t: base(t) / 0.7,
    "off by one": lambda base: lambda t: torch.roll(base(t), 1, 0),
    "permuted vocabulary": lambda base: lambda t: torch.roll(base(t), 1, 1),
    "nan": lambda base: lambda t: torch.where(torch.arange(16) == 3, torch.nan, base(t)),
    "infinite": lambda base: lambda t: torch.where(torch.arange(16) == 3, torch.inf, base(t)),
    "masked token": lambda base: lambda t: torch.where(torch.arange(16) == 3, -torch.inf, base(t)),
    "short": lambda base: lambda t: base(t)[:-1],
    "other vocabulary": lambda base: lambda t: base(t)[:, :-1],
    "top-k filter": lambda base: (
        lambda t: base(t).masked_fill(base(t) < base(t).topk(4, -1).values[:, -1:], -torch.inf)
    ),
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_never_pass(lab: Any, bug: str) -> None:
    found = lab.evaluate(*strict(lab), infer=lab.kernel(PLANTED[bug](lab.base)))
    assert found.report.exit in (Exit.VIOLATED, Exit.COULD_NOT_RUN)
    assert found.report.action != "log"
    assert found.report.health.score < 1
    jsonschema.validate(found.report.to_json(), report_schema())


def test_temperature_on_one_side_is_diagnosed(lab: Any) -> None:
    found = lab.evaluate(*strict(lab), infer=lab.kernel(PLANTED["temperature"](lab.base)))
    check = outcome(found, "temperature_fit")
    assert check.outcome == "failed"
    assert check.value == pytest.approx(0.7, rel=1e-3)
    verdicts = {row.clause: row.verdict for row in found.report.clauses}
    assert isinstance(verdicts.pop("O-TRACE"), Held)
    for verdict in verdicts.values():
        assert isinstance(verdict, InvalidEvidence)
        assert "temperature_fit" in verdict.reason


def test_shifted_output_is_diagnosed(lab: Any) -> None:
    rows = lab.requests(length=12)
    late = lab.kernel(PLANTED["off by one"](lab.base))
    found = lab.evaluate(*strict(lab), infer=late, rows=rows)
    check = outcome(found, "alignment_shift")
    assert (check.outcome, check.value) == ("failed", 1.0)
    fine = lab.evaluate(*strict(lab), infer=lab.kernel(lab.drifting(0.1)), rows=rows)
    assert outcome(fine, "alignment_shift").outcome == "passed"
    assert outcome(fine, "temperature_fit").outcome == "passed"


def test_unsampled_mass_invalidates_sampled_metrics(lab: Any) -> None:
    found = lab.evaluate(*strict(lab), infer=lab.kernel(PLANTED["top-k filter"](lab.base)))
    assert outcome(found, "support_check").outcome == "failed"
    assert "top-k 4" in outcome(found, "truncation_mass").detail
    row = next(r for r in found.report.clauses if r.clause == "N-RATIO")
    assert isinstance(row.verdict, InvalidEvidence)
    assert "truncation_mass" in row.verdict.reason
    assert "support_check" in row.verdict.reason


def test_swapped_kernels_change_kl(lab: Any) -> None:
    clause = lab.clause(lab.statistic("mean", "kl"))
    one, two = lab.kernel(lab.base), lab.kernel(lab.drifting(3.0))
    forward = lab.evaluate(clause, train=one, infer=two).report.clauses[0].value
    backward = lab.evaluate(clause, train=two, infer=one).report.clauses[0].value
    assert forward != pytest.approx(backward, rel=0.05)


def test_failed_request_fails_its_clauses_and_is_in_the_trace(
    lab: Any,
) -> None:
    broken = lab.requests()[4].tokens

    def function(tokens: tuple[int, ...]) -> torch.Tensor:
        if tokens == broken:
            raise RuntimeError("out of memory")
        return lab.base(tokens)

    failures = lab.clause(
        lab.statistic("aggregate", "failure_rate"), limit="1/10", id="R-1", family=Family.RUNTIME
    )
    found = lab.evaluate(*strict(lab), failures, infer=lab.kernel(function))
    verdicts = {row.clause: row.to_json()["verdict"] for row in found.report.clauses}
    assert verdicts["N-KL"] == "invalid_evidence"
    assert verdicts["R-1"] == "held"
    assert verdicts["O-TRACE"] == "violated"
    assert found.report.exit is Exit.VIOLATED
    assert found.report.action == "rollback"
    lost = [t for t in found.traces if t["failure"] is not None]
    assert [t["request"] for t in lost] == ["rows.jsonl:4"]
    assert lost[0]["replay_signature"] is None
    assert outcome(found, "finite").outcome == "failed"


def test_empty_slice_never_passes(lab: Any) -> None:
    found = lab.evaluate(*strict(lab), rows=())
    assert found.report.exit is Exit.COULD_NOT_RUN
    assert {row.to_json()["verdict"] for row in found.report.clauses} == {"invalid_evidence"}
    assert found.report.health.deviation == math.inf
    jsonschema.validate(found.report.to_json(), report_schema())


def test_unselected_slice_is_deferred(lab: Any) -> None:
    clauses = strict(lab)
    other = lab.clause(lab.statistic("mean", "kl"), id="N-FEW", slices=("few",))
    rows = lab.requests()
    found = lab.evaluate(*clauses, other, slices={"all": rows})
    assert "selected" in found.report.deferred["N-FEW"]
    with pytest.raises(Refusal) as caught:
        lab.evaluate(other, slices={"all": rows})
    assert caught.value.diagnostics[0].code.id == "KC623"


def test_different_weights_block_all_but_trace_clauses(lab: Any) -> None:
    weights = {"loaded": "a" * 64, "infer": "b" * 64}
    found = lab.evaluate(*strict(lab), weights=weights)
    verdicts = {row.clause: row.to_json()["verdict"] for row in found.report.clauses}
    assert verdicts.pop("O-TRACE") == "held"
    assert set(verdicts.values()) == {"invalid_evidence"}
    assert outcome(found, "weights_checksum").blocking


def test_kernel_that_changes_its_weights_is_blocked(lab: Any) -> None:
    class Learning(lab.kernel):  # type: ignore[misc]
        runs = 0

        def weights_digest(self) -> str:
            return str(self.runs)

    train, infer = Learning(name="train"), lab.kernel(name="infer")
    watch = watch_weights({"train": train, "infer": infer})
    assert watch() == {}
    found = lab.evaluate(*strict(lab), train=train, infer=infer, changed_weights=watch)
    assert outcome(found, "weights_checksum").outcome == "passed"
    Learning.runs = 1
    assert watch() == {"train": "changed"}
    found = lab.evaluate(*strict(lab), train=train, infer=infer, changed_weights=watch)
    assert outcome(found, "weights_checksum").outcome == "failed"
    verdicts = {row.clause: row.to_json()["verdict"] for row in found.report.clauses}
    assert set(verdicts.values()) == {"held", "invalid_evidence"}
    assert verdicts["O-TRACE"] == "held"


def test_nondeterministic_kernel_is_diagnosed(lab: Any) -> None:
    generator = torch.Generator().manual_seed(0)

    def noisy(tokens: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(len(tokens), 16, generator=generator, dtype=torch.float64)
        return lab.base(tokens) + 1e-12 * noise

    clause = lab.clause(lab.statistic("aggregate", "determinism"), ">=", "1", family=Family.RUNTIME)
    found = lab.evaluate(clause, infer=lab.kernel(noisy))
    check = outcome(found, "self_determinism")
    assert (check.outcome, check.value) == ("failed", 0.5)
    assert found.report.exit is Exit.VIOLATED
    assert lab.evaluate(clause).report.exit is Exit.HELD


def test_encoders_have_states_and_no_logits(lab: Any) -> None:
    fine = (
        lab.clause(lab.statistic("max", "hidden_l2"), id="N-1"),
        lab.clause(lab.statistic("min", "embedding_cosine"), ">=", "99/100", id="N-2"),
    )
    found = lab.evaluate(*fine, encoder=True)
    assert found.report.exit is Exit.HELD
    assert {p.name for p in found.report.prechecks}.isdisjoint({"temperature_fit"})
    for metric in ("kl", "log_ratio", "ece_gap", "grad_bias", "top1_overlap"):
        with pytest.raises(Refusal) as caught:
            lab.evaluate(lab.clause(lab.statistic("mean", metric)), encoder=True)
        assert caught.value.diagnostics[0].code.id == "KC624"
        assert "encoder" in caught.value.diagnostics[0].message


def test_gradient_bias_needs_constants_of_the_contract(lab: Any) -> None:
    clause = lab.clause(lab.statistic("aggregate", "grad_bias"), limit="1/1000000")
    with pytest.raises(Refusal, match="constants"):
        lab.evaluate(clause)
    from fractions import Fraction

    constants = Constants(advantage_max=Fraction(2), score_norm_max=Fraction(3))
    stated = lab.program(clause, constants=constants)
    assert lab.evaluate(clause, program=stated).report.exit is Exit.HELD
    tv = lab.evaluate(
        lab.clause(lab.statistic("mean", "tv")), infer=lab.kernel(lab.drifting(0.1))
    ).report.clauses[0]
    bias = lab.evaluate(clause, program=stated, infer=lab.kernel(lab.drifting(0.1))).report.clauses[
        0
    ]
    assert bias.value == pytest.approx(12 * tv.value)
    assert bias.estimators[0].bias == "upper_bound"


@pytest.mark.full
def test_calibration_uses_the_next_token_of_the_text(lab: Any) -> None:
    clause = lab.clause(lab.statistic("aggregate", "ece_gap"), limit="1/1000")
    assert lab.evaluate(clause).report.clauses[0].value == 0
    loose = lab.evaluate(clause, infer=lab.kernel(lab.drifting(2.0)))
    assert loose.report.exit is Exit.VIOLATED
    assert loose.report.clauses[0].low is not None
    hot = lab.evaluate(clause, infer=lab.kernel(PLANTED["temperature"](lab.base)))
    assert isinstance(hot.report.clauses[0].verdict, InvalidEvidence)
    few = lab.evaluate(clause, rows=lab.requests(2))
    assert few.report.exit is Exit.COULD_NOT_RUN


def test_unmeasured_block_is_checked_on_few_lengths(lab: Any) -> None:
    rows = [
        replace(row, key=f"r:{n}-{i}", tokens=tuple(range(n)))
        for n in (*range(40, 2, -1), 5, 5)
        for i, row in enumerate(lab.requests(6))
    ]
    chosen = compared_requests(rows)
    lengths = [row.length for row in chosen]
    assert len(chosen) == LENGTHS * EACH
    assert len(set(lengths)) == LENGTHS
    assert {min(lengths), max(lengths)} == {3, 40}
    assert all(lengths.count(n) == EACH for n in lengths)
    assert compared_requests(rows[:1]) == rows[:1]
    assert compared_requests([]) == []
    two = [row for row in rows if row.length in (3, 40)]
    assert {row.length for row in compared_requests(two)} == {3, 40}


def test_measured_block_is_checked_on_every_request(lab: Any) -> None:
    from fractions import Fraction

    body = Compare("<=", Norm("2", Drift("attn_0", "x", measured=True)), Number(Fraction(1)))
    found = lab.evaluate(
        lab.clause(Quantified("forall", "x", Region(RegionKind.POINTS, "all"), body)),
        certified=1e-9,
    )
    assert found.report.crosschecks[0].requests == 20
    assert not any("compared with its certified bound" in n for n in found.report.notes)


def test_measured_drift_above_the_certified_bound_aborts_with_its_own_code(lab: Any) -> None:
    good = lab.kernel(scale=1.001)
    found = lab.evaluate(*strict(lab), infer=good, certified=0.0011)
    check = found.report.crosschecks[0]
    assert check.measured == pytest.approx(0.001)
    assert check.certified == 0.0011
    assert check.tightness == pytest.approx(1.1)
    for kernel, certified in ((good, 0.0009), (lab.kernel(scale=math.nan), 1.0)):
        with pytest.raises(Refusal) as caught:
            lab.evaluate(*strict(lab), infer=kernel, certified=certified)
        diagnostic = caught.value.diagnostics[0]
        assert diagnostic.code.id == "KC625"
        assert "attn_0" in diagnostic.message


def test_nan_or_misshapen_bound_aborts(lab: Any) -> None:
    for bound in (np.full((6, 4), np.nan), np.full((5, 4), 1.0)):
        with pytest.raises(Refusal) as caught:
            lab.evaluate(*strict(lab), certify=lambda block, x, b=bound: lab.bound(1.0, b))
        assert caught.value.diagnostics[0].code.id == "KC625"


def test_element_above_its_own_bound_is_found(lab: Any) -> None:
    bound = np.full((6, 4), 5.0)
    bound[2, 1] = 1e-9
    with pytest.raises(Refusal, match="token 2, feature 1"):
        lab.evaluate(
            *strict(lab),
            infer=lab.kernel(scale=1.001),
            certify=lambda block, x: lab.bound(5.0, bound),
        )


def test_infinite_bound_certifies_nothing_and_is_reported(lab: Any) -> None:
    found = lab.evaluate(*strict(lab), infer=lab.kernel(scale=1.001), certified=math.inf)
    document = found.report.to_json()["crosschecks"][0]
    assert document["certified"] is None
    assert document["tightness"] is None


def test_measured_drift_clauses_run_the_blocks(lab: Any) -> None:
    from fractions import Fraction

    norm = Norm("2", Drift("attn_0", "x", measured=True))
    body = Compare("<=", norm, Number(Fraction(3, 1000)))
    clause = lab.clause(Quantified("forall", "x", Region(RegionKind.POINTS, "all"), body))
    found = lab.evaluate(clause, infer=lab.kernel(scale=1.001))
    assert found.report.clauses[0].value == pytest.approx(0.002)
    missing = Compare("<=", Norm("2", Drift("mlp_9", "x", True)), Number(Fraction(1)))
    other = lab.clause(Quantified("forall", "x", Region(RegionKind.POINTS, "all"), missing))
    with pytest.raises(Refusal, match="mlp_9"):
        lab.evaluate(other)


def test_proof_clauses_are_deferred_unless_measuring_refutes_them(lab: Any) -> None:
    proof = lab.clause(
        lab.statistic("max", "kl"), limit="1/1000000", id="N-P", evidence=EvidenceKind.PROOF
    )
    plain = lab.clause(lab.statistic("mean", "tv"), id="N-T")
    held = lab.evaluate(proof, plain)
    assert "verify" in held.report.deferred["N-P"]
    assert held.report.exit is Exit.HELD
    broken = lab.evaluate(proof, plain, infer=lab.kernel(lab.drifting(0.1)))
    assert broken.report.exit is Exit.VIOLATED
    with pytest.raises(Refusal):
        lab.evaluate(proof)


def test_traces_contain_the_fields_for_replay(lab: Any) -> None:
    found = lab.evaluate(*strict(lab))
    assert len(found.traces) == 20
    record = found.traces[0]
    assert all(record[name] not in (None, "", []) for name in FIELDS)
    assert record["build_fingerprint"] == "sha256:" + "2" * 64
    assert record["slices"] == ["all", "few"]
    assert found.traces[5]["slices"] == ["all"]
    changed = lab.evaluate(*strict(lab), infer=lab.kernel(lab.drifting(1e-12)))
    assert changed.traces[0]["replay_signature"] != record["replay_signature"]
    json.dumps(found.traces, allow_nan=False)
    worst = max(t["values"]["kl"]["max"] for t in found.traces)
    row = next(r for r in found.report.clauses if r.clause == "N-KL")
    assert row.value <= worst


def test_runtime_clauses_time_the_inference_kernel(lab: Any) -> None:
    clauses = (
        lab.clause(
            lab.statistic("quantile", "latency", "1/2"),
            limit="10",
            id="R-1",
            family=Family.RUNTIME,
        ),
        lab.clause(
            lab.statistic("aggregate", "throughput"), ">=", "1", id="R-2", family=Family.RUNTIME
        ),
        lab.clause(
            lab.statistic("aggregate", "peak_memory"),
            limit="1000000000000",
            id="R-3",
            family=Family.RUNTIME,
        ),
    )
    longer = (replace(r, key=f"longer.jsonl:{r.id}") for r in lab.requests(16, length=7))
    found = lab.evaluate(*clauses, rows=(*lab.requests(16), *longer))
    assert found.report.exit is Exit.HELD
    first = found.report.clauses[0]
    assert first.exceedance is not None
    assert (first.counted, first.exceedance.of, first.exceedance.n) == ("requests", "requests", 32)
    assert len(found.traces[0]["latency_s"]) == 3
    assert found.traces[0]["latency_s"]
    assert lab.evaluate(*strict(lab)).traces[0]["latency_s"] == []


def test_slice_summary_uses_the_worst_token_of_requests(lab: Any) -> None:
    found = lab.evaluate(*strict(lab), infer=lab.kernel(lab.drifting(0.1)))
    summary = found.report.slices[0]
    assert (summary.slice, summary.requests, summary.tokens) == ("all", 20, 120)
    kl = summary.statistics["kl"]
    assert kl["mean"] <= kl["p50"] <= kl["p95"] <= kl["p99"] <= kl["worst"]
    top = summary.statistics["top1_overlap"]
    assert top["worst"] <= top["p95"] <= top["p50"]


def test_large_vocabularies_in_parts_give_equal_results(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = lab.kernel(lab.drifting(0.01))
    ece = lab.clause(lab.statistic("aggregate", "ece_gap"), id="S-1")
    clauses = (*strict(lab)[:2], ece)
    whole = lab.evaluate(*clauses, infer=kernel).report
    monkeypatch.setattr("kcdsl_backends.empirical.sources.kernels.run._ELEMENTS", 40)
    parts = lab.evaluate(*clauses, infer=kernel).report
    assert [r.value for r in parts.clauses] == [r.value for r in whole.clauses]


def test_evaluation_reports_progress(lab: Any) -> None:
    told: list[tuple[str, int, int]] = []
    base = lab.setting(*strict(lab), certified=1.0)
    evaluate(replace(base), lambda *step: told.append(step))
    stages = list(dict.fromkeys(stage for stage, _, _ in told))
    assert stages == ["both kernels", "cross-check attn_0", "noise floor"]
    assert told[-1][1:] == (8, 8)
