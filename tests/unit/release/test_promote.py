"""`promote` on real files: checked certificates, counted windows, recorded decisions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kcdsl.api import promotion
from kcdsl.api.certificates import CheckSettings
from kcdsl.diagnostics import Refusal, codes
from kcdsl.release.promotion import CandidateState, PromotionOutcome
from kcdsl.release.register import PromotionState, Register, Revoked
from kcdsl.release.register.events import LARGEST_EVENT
from kcdsl_certs.signatures import decode, parse_bundle
from kcdsl_certs.statement import Verdict, certificate_id
from tests.support.commands import run_here
from tests.support.promotion_scenes import HOUR, SLOT, Pipeline, edited
from tests.support.registers import trusted

STAGES = ("offline-ci", "shadow", "canary")
NOON, ONE = "2026-11-30T12:00:00Z", "2026-11-30T13:00:00Z"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """Return a scene in which the triple is in the stage canary, with matching traffic."""
    pipeline = Pipeline.of(tmp_path_factory.mktemp("made"))
    pipeline.until("canary")
    return pipeline


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    """Return a scene without decisions."""
    return Pipeline.of(tmp_path)


@pytest.fixture
def in_canary(made: Pipeline, tmp_path: Path) -> Pipeline:
    """Return a copy of the scene in which the triple is in the stage canary."""
    return made.copy(tmp_path / "canary")


def refusal_of(call: Callable[[], Any]) -> Any:
    with pytest.raises(Refusal) as caught:
        call()
    return caught.value.diagnostics[0]


# --- the way --------------------------------------------------------------------------------------


def test_triple_advances_through_the_stages_and_serves(
    pipeline: Pipeline, follows: Callable[..., None]
) -> None:
    seen = []
    for stage in STAGES:
        found = pipeline.pass_stage(stage)
        follows(found.to_json())
        seen.append((found.step.outcome, found.step.candidate.stage, found.live is not None))
    assert seen == [
        (PromotionOutcome.ADVANCED, "shadow", False),
        (PromotionOutcome.ADVANCED, "canary", False),
        (PromotionOutcome.ADVANCED, "full", True),
    ]
    kept = pipeline.promote("full", pipeline.certificate("full"), pipeline.traffic("full"))
    assert kept.step.outcome is PromotionOutcome.KEPT, (kept.step.rows, kept.step.lacking)
    with pipeline.register() as register:
        slot = register.slot(SLOT)
        assert slot.triple == found.triple
        states = [one.state for one in register.promotions(slot=SLOT)]
    assert states == [
        PromotionState.ADVANCED,
        PromotionState.ADVANCED,
        PromotionState.PROMOTED,
        PromotionState.ADVANCED,
    ]


@pytest.mark.full
def test_new_triple_begins_at_the_first_stage(in_canary: Pipeline) -> None:
    in_canary.change_weights(1.0, 3.0)
    problem = refusal_of(lambda: in_canary.promote("canary", in_canary.certificate("canary")))
    assert problem.code is codes.PROMOTION_STAGE
    assert "has passed none" in problem.message


@pytest.mark.full
def test_changed_contract_is_another_triple(pipeline: Pipeline) -> None:
    pipeline.until("shadow")
    text = pipeline.contract.read_text(encoding="utf-8")
    pipeline.contract.write_text(text.replace("<= 0.02", "<= 0.03"), encoding="utf-8")
    found = lambda: pipeline.promote("shadow", pipeline.certificate("shadow"))  # noqa: E731
    assert refusal_of(found).code is codes.PROMOTION_STAGE


# --- windows --------------------------------------------------------------------------------------


def test_fast_clock_does_not_hide_a_violation(pipeline: Pipeline) -> None:
    """A stability window with a start in the future would exclude all traffic until then."""
    pipeline.now += timedelta(days=2)
    pipeline.until("shadow")
    pipeline.now -= timedelta(days=2)
    early = pipeline.promote("shadow")
    assert early.step.outcome is PromotionOutcome.HELD
    assert early.step.candidate.window.since == pipeline.now
    assert any("a clock that was ahead" in note for note in early.notes)
    bad = pipeline.promote("shadow", pipeline.traffic("shadow", beyond=300))
    assert bad.step.outcome is PromotionOutcome.FROZEN, (bad.step.rows, bad.unused)


@pytest.mark.full
def test_windows_accumulate_over_looks(in_canary: Pipeline) -> None:
    signed = in_canary.certificate("canary")
    first = in_canary.promote("canary", signed, in_canary.traffic("canary", n=200))
    assert first.step.outcome is PromotionOutcome.HELD
    second = in_canary.promote("canary", in_canary.traffic("canary", n=200))
    assert second.step.outcome is PromotionOutcome.HELD
    assert second.step.candidate.window.counts["N-KL/all/0"] == (0, 400)
    third = in_canary.promote("canary", in_canary.traffic("canary", n=200))
    assert third.step.outcome is PromotionOutcome.ADVANCED, third.step.rows


@pytest.mark.full
def test_window_counts_once_under_any_name(in_canary: Pipeline) -> None:
    start = in_canary.now
    window = in_canary.traffic("canary", n=200)
    in_canary.promote("canary", in_canary.certificate("canary"), window)
    copy = edited(window, environment__seed=1)
    again = in_canary.promote("canary", window, copy)
    assert again.step.outcome is PromotionOutcome.HELD
    assert again.step.candidate.window.counts["N-KL/all/0"] == (0, 200)
    assert set(again.unused.values()) == {"it was counted before"}
    assert not again.recorded
    (table,) = in_canary.folder.glob(f"traffic-{in_canary.made - 1}.parquet")
    other = in_canary.traffic("canary", n=200)
    more = in_canary.folder / f"traffic-{in_canary.made}.parquet"
    joined = in_canary.aggregate("canary", [table, more], start, in_canary.now)
    assert joined == other
    mixed = in_canary.promote("canary", joined)
    assert mixed.unused[str(joined)] == "rows of some of its tables were counted before"


@pytest.mark.full
def test_rewritten_table_counts_once(in_canary: Pipeline) -> None:
    start = in_canary.now
    window = in_canary.traffic("canary", n=200)
    found = in_canary.promote("canary", in_canary.certificate("canary"), window)
    assert found.step.candidate.window.counts["N-KL/all/0"] == (0, 200)
    rows = pq.read_table(in_canary.folder / f"traffic-{in_canary.made - 1}.parquet")
    one, two = (in_canary.folder / f"again-{i}.parquet" for i in (1, 2))
    pq.write_table(rows.take(list(range(199, -1, -1))), one, compression="gzip", row_group_size=7)
    again = in_canary.aggregate("canary", [one], start, in_canary.now)
    counted = in_canary.promote("canary", again)
    assert counted.unused == {str(again): "it was counted before"}
    pq.write_table(rows.slice(0, 100), one)
    pq.write_table(rows.slice(100), two)
    parts = in_canary.aggregate("canary", [one, two], start, in_canary.now)
    counted = in_canary.promote("canary", parts)
    assert counted.unused == {str(parts): "rows of some of its tables were counted before"}
    assert counted.step.candidate.window.counts["N-KL/all/0"] == (0, 200)


@pytest.mark.full
def test_shuffled_rows_count_once(in_canary: Pipeline) -> None:
    start = in_canary.now
    window = in_canary.traffic("canary", n=200)
    in_canary.promote("canary", in_canary.certificate("canary"), window)
    rows = pq.read_table(in_canary.folder / f"traffic-{in_canary.made - 1}.parquet")
    half, fresh = rows.slice(0, 100), rows.slice(0, 100)
    names = pa.array([f"fresh-{i}" for i in range(100)])
    fresh = fresh.set_column(fresh.column_names.index("request"), "request", names)
    with_more = half.append_column("queue", pa.array([0.5] * 100))
    for one in (half, rows.slice(100), with_more, pa.concat_tables([half, fresh])):
        in_canary.made += 1
        table = in_canary.folder / f"mixed-{in_canary.made}.parquet"
        pq.write_table(one, table)
        again = in_canary.aggregate("canary", [table], start, in_canary.now)
        counted = in_canary.promote("canary", again)
        assert set(counted.unused) == {str(again)}
        assert "counted before" in counted.unused[str(again)]
        assert counted.step.candidate.window.counts["N-KL/all/0"] == (0, 200)


@pytest.mark.full
def test_request_split_over_windows_counts_once(in_canary: Pipeline) -> None:
    """Otherwise one violating request would count once per window."""
    signed = in_canary.certificate("canary")
    names = {"request": [f"same-{i}" for i in range(200)]}
    first = in_canary.promote("canary", signed, in_canary.traffic("canary", n=200, columns=names))
    assert first.step.candidate.window.counts["N-KL/all/0"] == (0, 200)
    other = in_canary.traffic("canary", n=200, kl=0.002, columns=names)
    second = in_canary.promote("canary", other)
    assert second.unused == {str(other): "some of its requests were counted before, by their ids"}
    assert second.step.candidate.window.counts["N-KL/all/0"] == (0, 200)


@pytest.mark.full
@pytest.mark.parametrize("dry_run", [True, False])
def test_too_much_evidence_for_a_decision_is_refused(
    in_canary: Pipeline, dry_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 80 * promotion._MOST_COUNTED < LARGEST_EVENT  # {"sha256":"…"}, and a comma
    windows = [in_canary.traffic("canary", n=200) for _ in range(2)]
    given = in_canary.certificate("canary"), *windows
    monkeypatch.setattr(promotion, "_MOST_COUNTED", 200)
    problem = refusal_of(lambda: in_canary.promote("canary", *given, dry_run=dry_run))
    assert problem.code is codes.PROMOTION_EVIDENCE
    assert "at most 200" in problem.message
    assert in_canary.promote("canary", *given[:2], dry_run=dry_run).exit == 3


@pytest.mark.full
@pytest.mark.parametrize("dry_run", [True, False])
def test_traffic_counts_in_one_slot_only(in_canary: Pipeline, dry_run: bool) -> None:
    """Nor for another candidate; certificates are about the triple, and count in both slots."""
    other = "chat/other"
    in_canary.now += timedelta(minutes=1)
    in_canary.promote("offline-ci", in_canary.certificate("offline-ci"), slot=other)
    ready = in_canary.certificate("shadow"), in_canary.traffic("shadow")
    assert in_canary.promote("shadow", *ready, slot=other).exit == 0
    signed, window = in_canary.certificate("canary"), in_canary.traffic("canary", n=200)
    assert in_canary.promote("canary", signed, window).recorded
    with in_canary.register() as register:
        found = register.promotions(slot=SLOT)
    again = edited(window, environment__seed=1)
    rows = pq.read_table(in_canary.folder / f"traffic-{in_canary.made}.parquet")
    pq.write_table(rows.slice(0, 100), in_canary.folder / "half.parquet")
    in_canary.made += 1
    half = in_canary.aggregate(
        "canary", [in_canary.folder / "half.parquet"], in_canary.now - HOUR, in_canary.now
    )
    for given in ((window,), (signed, again), (half,)):
        ask = partial(in_canary.promote, "canary", *given, slot=other, dry_run=dry_run)
        problem = refusal_of(ask)
        assert problem.code is codes.PROMOTION_EVIDENCE
        assert f"was counted for sha256:{found[0].candidate[:12]} in {SLOT}" in problem.message
    with in_canary.register() as register:
        decided = register.promotions(slot=other)
        decision = replace(decided[-1], evidence=found[-1].evidence, certificates=(),
                           state=PromotionState.HELD)  # fmt: skip
        with pytest.raises(Refusal) as caught:
            register.promote(other, register.slot(other).version, decision, found[-1].evidence)
    assert caught.value.diagnostics[0].code is codes.PROMOTION_EVIDENCE
    assert in_canary.promote("canary", signed, slot=other, dry_run=dry_run).exit == 3


def test_planted_regression_has_the_reaction_of_its_level(tmp_path: Path) -> None:
    for level, outcome, state in (
        ("L1", PromotionOutcome.BLOCKED, CandidateState.ACTIVE),
        ("L2", PromotionOutcome.FROZEN, CandidateState.FROZEN),
        ("L3", PromotionOutcome.ROLLED_BACK, CandidateState.ROLLED_BACK),
    ):
        folder = tmp_path / level
        folder.mkdir()
        pipeline = Pipeline.of(folder)
        old = "N-KL: {require: p99(kl) <= 0.02, slices: [all, long], level: L2}"
        text = pipeline.contract.read_text(encoding="utf-8")
        assert old in text
        pipeline.contract.write_text(text.replace(old, old.replace("L2", level)), encoding="utf-8")
        pipeline.until("canary")
        bad = pipeline.promote("canary", pipeline.traffic("canary", beyond=60))
        assert bad.step.outcome is outcome
        assert bad.exit == 1
        assert bad.step.candidate.state is state
        rows = {(r.clause, r.slice): r for r in bad.step.rows}
        assert "60 of 600 are beyond (10 %), 1 % may be" in rows["N-KL", "all"].reason
        with pipeline.register() as register:
            decision = register.promotions(slot=SLOT)[-1]
        named = {(one.clause, one.slice): one.numbers for one in decision.reasons}
        numbers = {"beyond": "60", "of": "600", "allowed": "0.01"}
        assert named["N-KL", "all"] == numbers
        assert named["N-KL", "long"] == numbers


@pytest.mark.full
def test_live_triple_is_rolled_back_to_the_former_one(pipeline: Pipeline) -> None:
    pipeline.until("full")
    with pipeline.register() as register:
        first = register.slot(SLOT).triple
    pipeline.change_weights(1.0, 3.0)
    pipeline.until("full")
    with pipeline.register() as register:
        second = register.slot(SLOT).triple
    assert first != second
    text = pipeline.contract.read_text(encoding="utf-8")
    assert "N-BOTH: {require: mean(kl) <= 0.01" in text
    pipeline.now += timedelta(minutes=1)
    broken = [
        replace(c, verdict=Verdict.FAILED, value=Fraction(1, 2)) if c.id == "O-TRACE" else c
        for c in pipeline.results()
    ]
    failing = pipeline.certificate("full", broken)
    back = pipeline.promote("full", failing)
    assert back.step.outcome is PromotionOutcome.ROLLED_BACK, back.step.rows
    assert back.live == first
    with pipeline.register() as register:
        assert register.slot(SLOT).triple == first
        assert register.promotions(slot=SLOT)[-1].incumbent == first


@pytest.mark.full
@pytest.mark.parametrize("asked", ["offline-ci", "full"])
@pytest.mark.parametrize("stopped", ["frozen", "revoked"])
def test_stopped_live_triple_is_rolled_back(pipeline: Pipeline, stopped: str, asked: str) -> None:
    pipeline.until("full")
    with pipeline.register() as register:
        first = register.slot(SLOT).triple
    pipeline.change_weights(1.0, 3.0)
    pipeline.until("full")
    if stopped == "frozen":
        frozen = pipeline.promote("full", pipeline.traffic("full", beyond=60))
        assert frozen.step.outcome is PromotionOutcome.FROZEN
    else:
        with pipeline.register() as register:
            register.revoke(register.slot(SLOT).certificates[0], "wrong data")
    pipeline.now += timedelta(minutes=1)
    signed = pipeline.certificate("full")
    problem = refusal_of(lambda: pipeline.promote("full", signed))
    assert problem.code is codes.PROMOTION_STAGE
    before = 600 if stopped == "frozen" else 0
    for n in (200, 400):
        held = pipeline.promote("full", signed, pipeline.traffic("full", n=200))
        assert (held.exit, held.recorded) == (3, True)
        assert held.step.candidate.window.counts["N-KL/all/0"] == (before // 10, before + n)
        assert problem.message in held.notes[-1]
    pipeline.now += timedelta(minutes=1)
    broken = [
        replace(c, verdict=Verdict.FAILED, value=Fraction(1, 2)) if c.id == "O-TRACE" else c
        for c in pipeline.results()
    ]
    back = pipeline.promote(asked, pipeline.certificate(asked, broken))
    assert back.step.outcome is PromotionOutcome.ROLLED_BACK
    assert back.live == first
    with pipeline.register() as register:
        slot = register.slot(SLOT)
    assert (slot.triple, slot.stage) == (first, "full")


@pytest.mark.full
@pytest.mark.parametrize("meanwhile", [False, True])
def test_rollback_without_a_valid_incumbent_empties_the_slot(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, meanwhile: bool
) -> None:
    """Also if another writer revokes it between the look and the decision."""
    real = Register.promote

    def revoke(register: Register) -> None:
        for identity in first.certificates:
            register.revoke(identity, "the key was lost")

    def late(self: Register, *decision: Any) -> Any:
        revoke(self)
        return real(self, *decision)

    pipeline.until("full")
    with pipeline.register() as register:
        first = register.slot(SLOT)
        if not meanwhile:
            revoke(register)
    pipeline.change_weights(1.0, 3.0)
    pipeline.until("full")
    pipeline.now += timedelta(minutes=1)
    broken = [
        replace(c, verdict=Verdict.FAILED, value=Fraction(1, 2)) if c.id == "O-TRACE" else c
        for c in pipeline.results()
    ]
    failing = pipeline.certificate("full", broken)
    if meanwhile:
        monkeypatch.setattr(Register, "promote", late)
    back = pipeline.promote("full", failing)
    assert back.step.outcome is PromotionOutcome.ROLLED_BACK
    assert back.live is None
    assert back.notes[-1].startswith("rollback/no-target: ")
    with pipeline.register() as register:
        assert register.promotions(slot=SLOT)[-1].reasons[-1].clause == "rollback/no-target"


@pytest.mark.full
def test_rollback_skips_a_rolled_back_incumbent(pipeline: Pipeline) -> None:
    """The incumbent retried behind the triple that replaced it, and failed in its canary."""
    old = "N-KL: {require: p99(kl) <= 0.02, slices: [all, long], level: L2}"
    text = pipeline.contract.read_text(encoding="utf-8")
    assert old in text
    pipeline.contract.write_text(text.replace(old, old.replace("L2", "L3")), encoding="utf-8")
    weights = (pipeline.folder / "model.safetensors").read_bytes()
    pipeline.until("full")
    pipeline.change_weights(1.0, 3.0)
    pipeline.until("full")
    other = (pipeline.folder / "model.safetensors").read_bytes()
    (pipeline.folder / "model.safetensors").write_bytes(weights)
    pipeline.until("canary")
    pipeline.now += timedelta(minutes=1)
    signed, bad = pipeline.certificate("canary"), pipeline.traffic("canary", beyond=60)
    tried = pipeline.promote("canary", signed, bad)
    assert tried.step.outcome is PromotionOutcome.ROLLED_BACK
    (pipeline.folder / "model.safetensors").write_bytes(other)
    back = pipeline.promote("full", pipeline.traffic("full", beyond=60))
    assert back.step.outcome is PromotionOutcome.ROLLED_BACK
    assert back.live is None


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"window__stage": "shadow"}, "is of the stage shadow"),
        ({"window__triple": f"sha256:{'0' * 64}"}, "with other weights, kernels or contract"),
        ({"contract__digest": f"sha256:{'0' * 64}"}, "with other weights, kernels or contract"),
        ({"contract": None}, "was not decided by a contract"),
        ({"window__until": "2026-11-30T12:00:00Z"}, "ends before it begins"),
        ({"window__until": "2036-11-30T12:00:00Z"}, "still to come"),
        ({"window__from": "2026-11-01T12:00:00Z"}, "began before"),
        ({"deferred": {}}, "leaves N-ATTN-0 on long out"),
        ({"clauses": []}, "leaves N-KL on all out"),
    ],
)
def test_mismatched_window_does_not_count(
    in_canary: Pipeline, fields: dict[str, Any], why: str
) -> None:
    signed, window = in_canary.certificate("canary"), in_canary.traffic("canary")
    found = in_canary.promote("canary", signed, edited(window, **fields))
    assert found.step.outcome is PromotionOutcome.HELD
    (told,) = found.unused.values()
    assert why in told
    assert found.step.candidate.window.counts == {"R-LAT/all/0": (12, 600)}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "fields",
    [
        {"window": {}},
        {"window__from": "yesterday"},
        {"window__kernels": {"train": 3, "infer": 4}},
        {"tables": {"files": []}},
        {"tables": {"files": [{"sha256": "short"}]}},
        {"slices": [{"slice": "all", "requests": -1}]},
        {"slices": [{"slice": "all", "requests": True}]},
        {"clauses": [{}]},
        {"clauses": "none"},
        {"schema": "kcdsl.aggregate/1"},
    ],
)
def test_malformed_window_is_refused(in_canary: Pipeline, fields: dict[str, Any]) -> None:
    bad = edited(in_canary.traffic("canary"), **fields)
    problem = refusal_of(lambda: in_canary.promote("canary", bad))
    assert problem.code is codes.PROMOTION_EVIDENCE
    assert str(bad) in problem.message
    assert problem.help


def test_aggregate_without_times_is_not_a_window(in_canary: Pipeline) -> None:
    document = json.loads(in_canary.traffic("canary").read_text(encoding="utf-8"))
    del document["window"]
    plain = in_canary.folder / "plain.json"
    plain.write_text(json.dumps(document), encoding="utf-8")
    problem = refusal_of(lambda: in_canary.promote("canary", plain))
    assert problem.code is codes.PROMOTION_EVIDENCE


@pytest.mark.full
def test_nan_and_missing_values_hold_the_candidate(in_canary: Pipeline) -> None:
    signed = in_canary.certificate("canary")
    missing = in_canary.traffic("canary", columns={"kl": [None] + [0.001] * 599})
    found = in_canary.promote("canary", signed, missing)
    assert found.step.outcome is PromotionOutcome.HELD
    assert found.step.candidate.epoch == 2
    good = in_canary.promote("canary", in_canary.traffic("canary"))
    assert good.step.outcome is PromotionOutcome.HELD  # 600 do not show 1 % in a second window
    nan = in_canary.traffic("canary", columns={"kl": [float("nan")] * 60 + [0.001] * 540})
    found = in_canary.promote("canary", nan)
    assert found.step.outcome is PromotionOutcome.HELD
    assert found.step.candidate.epoch == 3


# --- certificates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ({"value": Fraction(1, 2)}, "0.5 instead of <= 0.02"),
        ({"value": None, "exceed": 1}, "does not hold"),
    ],
)
def test_failed_certificate_blocks_and_names_clause_and_slices(
    pipeline: Pipeline, numbers: dict[str, Any], why: str
) -> None:
    broken = [
        replace(c, verdict=Verdict.FAILED, **numbers) if (c.id, c.slice) == ("N-KL", "long") else c
        for c in pipeline.results()
    ]
    found = pipeline.promote("offline-ci", pipeline.certificate("offline-ci", broken))
    assert found.step.outcome is PromotionOutcome.BLOCKED
    rows = {(row.clause, row.slice): row for row in found.step.rows}
    assert rows["N-KL", "long"].status == "violated"
    assert why in rows["N-KL", "long"].reason
    assert rows["N-KL", "all"].status == "open"
    with pipeline.register() as register:
        assert register.promotions(slot=SLOT)[-1].state is PromotionState.BLOCKED


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["stage", "key", "expired", "weights", "evidence", "damaged"])
def test_invalid_certificate_promotes_nothing(pipeline: Pipeline, how: str) -> None:
    signed = pipeline.certificate("shadow" if how == "stage" else "offline-ci")
    match how:
        case "key":
            text = signed.read_text(encoding="utf-8")
            (pipeline.folder / "release.key.pub").unlink()
            (pipeline.folder / "release.key").unlink()
            assert run_here("keygen", "-o", "release.key", cwd=pipeline.folder).code == 0
            assert text
        case "expired":
            pipeline.now += timedelta(days=31)
        case "weights":
            pipeline.change_weights(5.0)
        case "evidence":
            (signed.parent / "report.json").unlink()
        case "damaged":
            signed.write_bytes(signed.read_bytes()[:-20])
        case _:
            pass
    found = pipeline.promote("offline-ci", signed) if how != "damaged" else None
    if found is None:
        problem = refusal_of(lambda: pipeline.promote("offline-ci", signed))
        assert problem.code is codes.PROMOTION_EVIDENCE
    else:
        assert found.exit == 4
        assert found.invalid[str(signed)]
    with pipeline.register() as register:
        assert register.promotions(slot=SLOT) == ()


def test_key_promotes_only_its_stages(pipeline: Pipeline, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    for stages, exit in (('["shadow", "canary"]', 4), ('["offline-ci"]', 0)):
        policy.write_text(
            f'[[trusted-keys]]\npath = "{pipeline.folder}/release.key.pub"\nstages = {stages}\n',
            encoding="utf-8",
        )
        signed = pipeline.certificate("offline-ci")
        found = pipeline.promote("offline-ci", signed, checks=CheckSettings(policy=str(policy)))
        assert found.exit == exit, found.invalid
        if exit == 4:
            assert found.invalid[str(signed)] == ("stage/key-not-allowed",)


@pytest.mark.parametrize("recorded", [True, False])
def test_key_revoked_in_the_register_does_not_count(pipeline: Pipeline, recorded: bool) -> None:
    """Also where the certificate was recorded under a smaller threshold of signatures."""
    assert run_here("keygen", "-o", "second.key", cwd=pipeline.folder).code == 0
    pipeline.keys = ("release.key", "second.key")
    signed = pipeline.certificate("offline-ci")
    first, second = pipeline.private_keys()
    with pipeline.register() as register:
        if recorded:
            register.record_certificates([signed.read_bytes()], trusted(first, second))
        register.revoke(first.public.fingerprint, "lost", kind=Revoked.KEY)
    files = tuple(str(pipeline.folder / f"{name}.pub") for name in pipeline.keys)
    for threshold, exit in ((2, 4), (1, 0)):
        checks = CheckSettings(key=files, threshold=threshold)
        found = pipeline.promote("offline-ci", signed, checks=checks, dry_run=True)
        assert found.exit == exit, found.invalid
        assert found.invalid.get(str(signed), ("",))[0] == (
            "register/key-revoked" if exit == 4 else ""
        )


@pytest.mark.full
def test_older_certificate_after_a_failed_one_is_invalid(pipeline: Pipeline) -> None:
    good = pipeline.certificate("offline-ci")
    pipeline.now += timedelta(minutes=1)
    broken = [
        replace(c, verdict=Verdict.FAILED, value=Fraction(1, 2)) if c.id == "O-TRACE" else c
        for c in pipeline.results()
    ]
    assert pipeline.promote("offline-ci", pipeline.certificate("offline-ci", broken)).exit == 1
    found = pipeline.promote("offline-ci", good)
    assert found.exit == 4
    assert found.invalid[str(good)][0] == "register/superseded"


@pytest.mark.full
@pytest.mark.parametrize("recorded", [True, False])
def test_expired_failure_withdraws_an_older_certificate(pipeline: Pipeline, recorded: bool) -> None:
    """Also in a dry run, and where the older one was not recorded before."""
    good = pipeline.certificate("offline-ci")
    pipeline.now += timedelta(minutes=1)
    broken = [
        replace(c, verdict=Verdict.FAILED, value=Fraction(1, 2)) if c.id == "O-TRACE" else c
        for c in pipeline.results()
    ]
    failed = pipeline.certificate("offline-ci", broken, days=1)
    with pipeline.register() as register:
        signers = trusted(*(key for key in pipeline.private_keys()))
        given = [good, failed] if recorded else [failed]
        register.record_certificates([one.read_bytes() for one in given], signers)
    pipeline.now += timedelta(days=2)
    for dry_run in (True, False):
        found = pipeline.promote("offline-ci", good, dry_run=dry_run)
        assert found.exit == 4
        assert found.invalid[str(good)][0] == "register/superseded"
        both = pipeline.promote("offline-ci", good, failed, dry_run=dry_run)
        assert both.exit == 4
        assert both.invalid[str(failed)][0] == "validity/expired"
    with pipeline.register() as register:
        assert register.promotions(slot=SLOT) == ()


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("verdict", "wanted"),
    [
        (Verdict.FAILED, PromotionOutcome.BLOCKED),
        (Verdict.INCONCLUSIVE, PromotionOutcome.HELD),
    ],
)
def test_failure_outweighs_an_older_passed_certificate(
    pipeline: Pipeline, verdict: Verdict, wanted: PromotionOutcome, dry_run: bool
) -> None:
    good = pipeline.certificate("offline-ci")
    pipeline.now += timedelta(minutes=1)
    value, reason = (Fraction(1, 2), None) if verdict is Verdict.FAILED else (None, "no data")
    worse = [
        replace(c, verdict=verdict, value=value, reason=reason) if c.id == "O-TRACE" else c
        for c in pipeline.results()
    ]
    failed = pipeline.certificate("offline-ci", worse)
    found = pipeline.promote("offline-ci", good, failed, dry_run=dry_run)
    assert found.step is not None
    assert found.step.outcome is wanted
    assert "did not pass" in found.unused[str(good)]


@pytest.mark.full
def test_revoked_certificate_stops_its_candidate(pipeline: Pipeline) -> None:
    pipeline.until("shadow")
    with pipeline.register() as register:
        (identity,) = register.promotions(slot=SLOT)[-1].certificates
        register.revoke(identity, "wrong data")
    problem = refusal_of(lambda: pipeline.promote("shadow", pipeline.certificate("shadow")))
    assert problem.code is codes.PROMOTION_STAGE
    assert "wrong data" in problem.message
    pipeline.now += timedelta(minutes=1)
    assert pipeline.promote("offline-ci", pipeline.certificate("offline-ci")).exit == 0


@pytest.mark.full
def test_resubmitted_revoked_certificate_stops_its_candidate(
    in_canary: Pipeline,
) -> None:
    """Beside a non-passing result, ignored certificates are dropped, and the look continues."""
    good = in_canary.certificate("canary")
    in_canary.promote("canary", good)
    with in_canary.register() as register:
        identity = certificate_id(decode(parse_bundle(good.read_bytes())).payload)
        register.revoke(identity, "wrong data")
    in_canary.now += timedelta(minutes=1)
    undecided = [
        replace(c, verdict=Verdict.INCONCLUSIVE, value=None, reason="no data")
        if c.id == "O-TRACE"
        else c
        for c in in_canary.results()
    ]
    failed = in_canary.certificate("canary", undecided)
    in_canary.now += timedelta(minutes=1)
    given = (good, failed, in_canary.certificate("canary"), in_canary.traffic("canary"))
    problem = refusal_of(lambda: in_canary.promote("canary", *given))
    assert problem.code is codes.PROMOTION_STAGE
    assert "wrong data" in problem.message
    with in_canary.register() as register:
        assert register.slot(SLOT).triple is None


@pytest.mark.full
def test_certificates_of_two_triples_are_refused_together(pipeline: Pipeline) -> None:
    pipeline.until("offline-ci")
    one = pipeline.certificate("offline-ci")
    pipeline.change_weights(7.0)
    two = pipeline.certificate("offline-ci")
    found = pipeline.promote("offline-ci", one, two)
    assert found.exit == 4  # the first is about other weights


# --- the register ---------------------------------------------------------------------------------


def test_dry_run_records_nothing(pipeline: Pipeline) -> None:
    signed = pipeline.certificate("offline-ci")
    found = pipeline.promote("offline-ci", signed, dry_run=True)
    assert (found.step.outcome, found.recorded) == (PromotionOutcome.ADVANCED, False)
    with pipeline.register() as register:
        assert register.promotions(slot=SLOT) == ()
        assert register.certificates() == ()
        assert register.slot(SLOT).version == 0


def test_nothing_is_recorded_without_evidence(pipeline: Pipeline) -> None:
    found = pipeline.promote("offline-ci")
    assert (found.exit, found.recorded) == (3, False)
    assert found.step.lacking == ("a certificate of the stage offline-ci that is in force",)


def test_concurrently_changed_slot_is_evaluated_again(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = pipeline.certificate("offline-ci")
    real, calls = Register.promote, []

    def slower(self: Register, slot: str, version: int, decision: Any, traffic: Any) -> Any:
        calls.append(version)
        if len(calls) == 1:
            other = replace(decision, state=PromotionState.HELD, progress=decision.progress)
            real(self, slot, version, replace(other, evidence=()))
        return real(self, slot, version, decision, traffic)

    monkeypatch.setattr(Register, "promote", slower)
    with pytest.raises(Refusal) as caught:
        pipeline.promote("offline-ci", signed)
    assert caught.value.diagnostics[0].code is codes.PROMOTION_STAGE
    assert calls == [0]


@pytest.mark.full
def test_concurrent_candidate_triggers_a_new_evaluation(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = pipeline.certificate("offline-ci")
    real, calls = Register.promote, []

    def slower(self: Register, slot: str, version: int, decision: Any, traffic: Any) -> Any:
        calls.append(version)
        if len(calls) == 1:
            from tests.support.registers import triple

            other = triple()
            self.record_triple(other)
            held = replace(
                decision,
                state=PromotionState.HELD,
                candidate=other.digest,
                contract=other.contract.digest,
                certificates=(),
                evidence=(),
                progress={},
            )
            real(self, slot, version, held)
        return real(self, slot, version, decision, traffic)

    monkeypatch.setattr(Register, "promote", slower)
    found = pipeline.promote("offline-ci", signed)
    assert found.step.outcome is PromotionOutcome.ADVANCED
    assert calls == [0, 1]
    assert found.version == 2
    assert "looked again beside its version 1" in found.notes[0]


@pytest.mark.full
def test_report_of_an_untrusted_run_does_not_count(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report is recorded as a run, and ignored after the run is marked untrusted."""
    import kcdsl.api.stage_evidence as gathering
    from kcdsl.release.promotion import DocumentKind, EvidenceDocument, ObligationResult
    from tests.support.promotions import digest

    report = pipeline.folder / "report.json"
    report.write_text('{"schema": "kcdsl.report/3"}', encoding="utf-8")
    broken = {"O-TRACE/all/0": ObligationResult("violated", "census", reason="no seed")}
    stand_in = EvidenceDocument(
        DocumentKind.REPORT, str(report), digest("report"), frozenset(), broken
    )
    monkeypatch.setattr(gathering, "read_evidence", lambda *about: stand_in)
    blocked = pipeline.promote("offline-ci", report)
    assert blocked.step.outcome is PromotionOutcome.BLOCKED
    with pipeline.register() as register:
        (run,) = register.runs()
        assert (run.report, run.trusted) == (digest("report"), True)
        register.mark_run(run.identity, trusted=False, reason="a shared machine")
    held = pipeline.promote("offline-ci", report)
    assert held.step.outcome is PromotionOutcome.HELD
    assert held.unused == {str(report): "the register does not trust it: a shared machine"}
    stand_in = replace(stand_in, identity=digest("the same results in other bytes"))
    held = pipeline.promote("offline-ci", report)
    assert held.step.outcome is PromotionOutcome.HELD
    (why,) = held.unused.values()
    assert why == (
        "no certificate names it, and it may be of another run: "
        "the register does not trust it: a shared machine"
    )
    assert pipeline.promote("offline-ci", report, slot="chat/other").unused == held.unused


def mark(pipeline: Pipeline, certificate: Path, *, trusted: bool = False) -> None:
    """Mark the run behind a certificate."""
    payload = decode(parse_bundle(certificate.read_bytes())).payload
    with pipeline.register() as register:
        run = register.run_of(certificate_id(payload))
        assert run is not None
        register.mark_run(run.identity, trusted=trusted, reason="a shared machine")


@pytest.mark.full
def test_untrusted_run_restarts_the_window(in_canary: Pipeline) -> None:
    """Its results and counts are discarded; later traffic counts."""
    signed = in_canary.certificate("canary")
    first = in_canary.promote("canary", signed, in_canary.traffic("canary", n=200))
    assert first.step.candidate.window.counts["N-KL/all/0"] == (0, 200)
    assert "O-TRACE/all/0" in first.step.candidate.shown
    mark(in_canary, signed)
    again = in_canary.promote("canary", signed)
    assert (again.exit, again.recorded, again.step.candidate.epoch) == (3, True, 2)
    assert again.step.candidate.window.counts == {}
    assert again.step.candidate.shown == {}
    assert "does not trust it: a shared machine" in again.unused[str(signed)]
    assert again.notes
    assert "a certificate of the stage canary that is in force" in again.step.lacking
    more = in_canary.promote(
        "canary", in_canary.certificate("canary"), in_canary.traffic("canary", n=200)
    )
    assert more.step.candidate.window.counts["N-KL/all/0"] == (0, 200)
    assert more.step.candidate.epoch == 2
    last = in_canary.promote("canary", in_canary.traffic("canary", n=600))
    assert last.step.outcome is PromotionOutcome.ADVANCED, last.step.rows


@pytest.mark.full
def test_triple_advanced_by_an_untrusted_run_restarts(
    pipeline: Pipeline,
) -> None:
    """It stays live, its gate closes, and a violation of L3 rolls it back."""
    from kcdsl.release.promotion.gate import GateAnswer, ask

    def gate() -> Any:
        with pipeline.register() as register:
            live = register.slot(SLOT).triple
            assert live is not None
            return ask(register, SLOT, "full", live, pipeline.now)

    pipeline.until("canary")
    signed = pipeline.certificate("canary")
    live = pipeline.promote("canary", signed, pipeline.traffic("canary"))
    assert live.step.outcome is PromotionOutcome.ADVANCED
    assert gate().answer is GateAnswer.SUCCESSFUL
    mark(pipeline, signed)
    found = gate()
    assert found.answer is GateAnswer.INCONCLUSIVE
    assert "a shared machine" in found.reasons[0]
    problem = refusal_of(lambda: pipeline.promote("full", pipeline.certificate("full")))
    assert problem.code is codes.PROMOTION_STAGE
    assert "does not trust it: a shared machine" in problem.message
    held = pipeline.promote("full", pipeline.traffic("full"))
    assert (held.exit, held.live) == (3, live.triple)
    mark(pipeline, signed, trusted=True)
    assert gate().answer is GateAnswer.SUCCESSFUL
    mark(pipeline, signed)
    pipeline.now += timedelta(minutes=1)
    anew = pipeline.promote("offline-ci", pipeline.certificate("offline-ci"))
    assert (anew.exit, anew.step.candidate.attempt) == (0, 2)


# --- the command ----------------------------------------------------------------------------------


def test_command_prints_the_decision_and_returns_its_code(
    pipeline: Pipeline, cli: Callable[..., Any], follows: Callable[..., None]
) -> None:
    from kcdsl.release.issue import utc_now

    pipeline.now = utc_now() - timedelta(seconds=1)
    signed = pipeline.certificate("offline-ci")
    words = ("--register", "register.db", "--slot", SLOT, "--key", "release.key.pub")
    held = cli("promote", "--stage", "offline-ci", *words, cwd=pipeline.folder)
    assert held.code == 3
    assert "lacking: a certificate of the stage offline-ci" in held.stdout
    dry = cli("promote", signed, "--stage", "offline-ci", "--dry-run", "--format", "json", *words,
              cwd=pipeline.folder)  # fmt: skip
    document = json.loads(dry.stdout)
    follows(document)
    assert (dry.code, document["outcome"], document["recorded"]) == (0, "advanced", False)
    done = cli("promote", signed, "--stage", "offline-ci", *words, cwd=pipeline.folder)
    assert done.code == 0, done.stderr
    assert f"advanced: offline-ci -> shadow, sha256:{document['triple'][:12]}" in done.stdout
    wrong = cli("promote", signed, "--stage", "canary", *words, cwd=pipeline.folder)
    assert wrong.code == 4
    skipped = cli("promote", "--stage", "canary", *words, cwd=pipeline.folder)
    assert skipped.code == 2
    assert "error[KC699]" in skipped.stderr
    assert "in the stage shadow, not in canary" in skipped.stderr


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "words",
    [
        ("--slot", SLOT, "--stage", "canary"),
        ("--register", "register.db", "--stage", "canary"),
        ("--register", "register.db", "--slot", SLOT),
        ("--register", "none.db", "--slot", SLOT, "--stage", "canary"),
        ("--register", "register.db", "--slot", "BAD SLOT", "--stage", "canary"),
        ("--register", "register.db", "--slot", SLOT, "--stage", "canary", "--window", "soon"),
        ("nothing.json", "--register", "register.db", "--slot", SLOT, "--stage", "canary"),
        ("contract.yaml", "--register", "register.db", "--slot", SLOT, "--stage", "canary"),
    ],
)
def test_invalid_input_is_refused(
    pipeline: Pipeline, cli: Callable[..., Any], words: tuple[str, ...]
) -> None:
    ran = cli("promote", *words, "--key", "release.key.pub", cwd=pipeline.folder)
    assert ran.code == 2
    assert ran.stdout == ""
    assert "Traceback" not in ran.stderr
    assert ran.stderr


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--from", NOON), "--from needs --stage"),
        (("--stage", "canary"), "--contract, --from and --until"),
        (("--stage", "canary", "--from", "noon", "--until", NOON), "noon"),
        (
            ("--stage", "canary", "--from", NOON, "--until", NOON),
            "the window ends at",
        ),
        (
            ("--stage", "canary", "--from", NOON, "--until", ONE, "--slice", "all"),
            "all slices",
        ),
    ],
)  # fmt: skip
def test_window_must_have_every_required_field(
    pipeline: Pipeline, cli: Callable[..., Any], words: tuple[str, ...], told: str
) -> None:
    pipeline.traffic("canary", n=3)
    table = f"traffic-{pipeline.made}.parquet"
    ran = cli("aggregate", table, "--contract", "contract.yaml", *words, cwd=pipeline.folder)
    assert ran.code == 2
    assert told in " ".join(ran.stderr.split())


def test_window_follows_its_schema(pipeline: Pipeline, follows: Callable[..., None]) -> None:
    document = json.loads(pipeline.traffic("canary", n=3).read_text(encoding="utf-8"))
    follows(document)
    assert document["window"]["stage"] == "canary"
    assert timedelta(hours=1) == HOUR
