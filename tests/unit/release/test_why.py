"""`kcdsl why`: planted causes of a failure are distinguished, without guesses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kcdsl.api.causes import WhySettings, explain
from kcdsl.diagnostics import Refusal, codes
from kcdsl.ir.terms import EvidenceKind
from kcdsl.release.artefacts import checkpoint_manifest
from kcdsl.release.register import PromotionReason, Register
from kcdsl.verdict.studies.causes import EFFECTS, Explanation, agreed_rows
from kcdsl_backends.empirical.decision.report import conclude
from kcdsl_certs.statement import Verdict
from tests.support.evidence import clause, program
from tests.support.registers import clock
from tests.support.small_models import DECODER, write_model
from tests.support.why_scenes import CLAUSES, Scene, both, certified

OLD, NEW = ("old", "old"), ("new", "new")
OTHERS = (OLD, ("old", "new"), ("new", "old"))


def states(found: Explanation) -> tuple[str, ...]:
    """Return the states of contract, kernels and checkpoint."""
    return tuple(cause.state for cause in found.causes)


def words(found: Explanation, cause: int) -> str:
    """Return all texts about a cause."""
    one = found.causes[cause]
    return " | ".join((*one.because, *one.missing))


# --- planted causes -------------------------------------------------------------------------------


def test_failure_within_the_contract_blames_the_contract(tmp_path: Path) -> None:
    scene = both(tmp_path, {NEW}, bad=3)
    found = scene.why(NEW, *OTHERS)
    assert states(found) == ("shown", "excluded", "excluded")
    assert "2 of 2 rows hold on the trace" in words(found, 0)
    assert found.exit == 1


OF_COUNTS = {"beyond": "52", "of": "600", "allowed": "0.01"}
FEW = {"beyond": "1", "of": "600", "allowed": "0.01"}


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (
            (
                PromotionReason("stage", "the window is too short"),
                PromotionReason("N-KL", "traffic: 52 of 600", "code", OF_COUNTS),
                PromotionReason("N-TV", "1 of 600", "all", FEW),
            ),
            ("N-KL on code: traffic: 52 of 600",),
        ),
        (
            (PromotionReason("stage", "too short"), PromotionReason("N-MEAN", "0.2 > 0.1", "all")),
            ("N-MEAN on all: 0.2 > 0.1",),
        ),
    ],
)
def test_a_contract_that_refused_the_triple_elsewhere_is_not_too_loose(
    tmp_path: Path, reasons: tuple[PromotionReason, ...], said: tuple[str, ...]
) -> None:
    """The pinned requests keep the contract; the traffic of the canary did not."""
    scene = both(tmp_path, set())
    scene.refuse(scene.triple("new", "new"), *reasons)
    found = scene.why(NEW, *OTHERS)
    assert states(found) == ("excluded", "undecided", "undecided")
    (decision,) = {text.partition(": ")[0] for text in found.refused}
    assert decision.endswith("about chat/production at canary (frozen)")
    assert tuple(text.partition(": ")[2] for text in found.refused) == said
    assert "the trace does not hold them" in words(found, 1)
    assert words(found, 2) == words(found, 1)
    assert found.exit == 3


def test_decisions_about_other_triples_or_by_untrusted_runs_refuse_nothing(tmp_path: Path) -> None:
    scene = both(tmp_path, set())
    reason = PromotionReason("N-KL", "52 of 600", "code", OF_COUNTS)
    scene.refuse(scene.triple("old", "old"), reason)
    other = scene.write(replace(scene, count=4).table("new", "new"), "hot")
    scene.record(other, scene.triple("new", "new"), trusted=False)
    digest = hashlib.sha256(other.read_bytes()).hexdigest()
    scene.refuse(scene.triple("new", "new"), reason, evidence=(digest,))
    found = scene.why(NEW, *OTHERS)
    assert found.refused == ()
    assert states(found) == ("shown", "excluded", "excluded")


def test_a_refusal_after_which_the_triple_went_live_is_over(tmp_path: Path) -> None:
    scene = both(tmp_path, set())
    new = scene.triple("new", "new")
    scene.refuse(new, PromotionReason("N-KL", "52 of 600", "code", OF_COUNTS))
    scene.register(new, promoted=True)
    found = scene.why(NEW, *OTHERS)
    assert found.refused == ()
    assert states(found)[0] == "shown"


def test_new_kernel_build_that_violates_a_clause_is_named(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {("old", "new"): 12})
    scene.register(scene.triple("old", "old"), scene.triple("old", "new"))
    found = scene.why(("old", "new"), OLD)
    assert states(found) == ("excluded", "shown", "excluded")
    assert "N-KL all (L2), change of the kernels: held before, violated after" in words(found, 1)
    assert "12 of 40 requests kept the threshold before and do not now, 0" in words(found, 1)
    assert "did not change" in words(found, 2)
    row = found.row("kernels", "present", "N-KL/all/0")
    assert row is not None
    assert row.delta == -12 / 40
    assert row.high is not None
    assert row.high < 0


def test_new_weights_that_violate_a_clause_are_named(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {("new", "old"): 12})
    scene.register(scene.triple("old", "old"), scene.triple("new", "old"))
    found = scene.why(("new", "old"), OLD)
    assert states(found) == ("excluded", "excluded", "shown")
    assert "change of the checkpoint: held before, violated after" in words(found, 2)


EXPECTED = {
    # what is broken beside the run that failed: (kernels, checkpoint)
    (): ("excluded", "shown"),  # the two together alone
    (("old", "new"),): ("shown", "excluded"),
    (("new", "old"),): ("excluded", "shown"),
    (("old", "new"), ("new", "old")): ("shown", "shown"),
    (OLD,): ("excluded", "shown"),
    (OLD, ("old", "new")): ("shown", "excluded"),
    (OLD, ("new", "old")): ("excluded", "shown"),
    (OLD, ("old", "new"), ("new", "old")): ("excluded", "excluded"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("broken", EXPECTED, ids=str)
def test_four_runs_distinguish_two_changes(
    tmp_path: Path, broken: tuple[tuple[str, str], ...]
) -> None:
    scene = both(tmp_path, {NEW, *broken})
    found = scene.why(NEW, *OTHERS)
    assert states(found) == ("excluded", *EXPECTED[broken])
    assert found.exit == (0 if states(found) == ("excluded",) * 3 else 1)
    assert len(found.effects) == 5


@pytest.mark.full
def test_failure_only_in_combination_is_an_interaction(tmp_path: Path) -> None:
    found = both(tmp_path, {NEW}).why(NEW, *OTHERS)
    row = found.row("interaction", "", "N-KL/all/0")
    assert row is not None
    assert (row.worse, row.better, row.delta, row.change) == (12, 0, -12 / 40, "regressed")
    assert "with the previous kernels the present checkpoint holds" in words(found, 2)
    (tmp_path / "apart").mkdir()
    apart = both(tmp_path / "apart", {NEW, ("old", "new")}).why(NEW, *OTHERS)
    none = apart.row("interaction", "", "N-KL/all/0")
    assert none is not None
    assert (none.worse, none.better, none.change) == (0, 0, "unchanged")


def test_swapped_runs_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, {("old", "new"): 12})
    scene.register(scene.triple("old", "old"), scene.triple("old", "new"))
    swapped = {key: places[::-1] for key, places in EFFECTS.items()}
    monkeypatch.setattr("kcdsl_backends.empirical.questions.pairs.EFFECTS", swapped)
    assert states(scene.why(("old", "new"), OLD)) != ("excluded", "shown", "excluded")


# --- not decided ----------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("missing", OTHERS)
def test_missing_run_is_named_without_a_guess(tmp_path: Path, missing: tuple[str, str]) -> None:
    scene = both(tmp_path, {NEW})
    found = scene.why(NEW, *(one for one in OTHERS if one != missing))
    (lacking,) = [run for run in found.runs if run.source == "missing"]
    assert lacking.place == tuple({"old": "previous", "new": "present"}[one] for one in missing)
    if missing == ("old", "new"):  # without it, an interaction looks like a regression
        assert states(found)[1:] == ("undecided", "undecided")
        assert f"no run of {lacking.title}" in words(found, 1)
        assert f"no run of {lacking.title}" in words(found, 2)
    else:
        assert states(found)[1:] == ("excluded", "shown")


def test_only_the_contract_is_decided_without_other_runs(tmp_path: Path) -> None:
    found = both(tmp_path, {NEW}).why(NEW)
    assert states(found) == ("excluded", "undecided", "undecided")
    assert found.exit == 3
    assert found.effects == ()


@pytest.mark.parametrize("marked", [OLD, ("old", "new")])
def test_untrusted_run_does_not_count(tmp_path: Path, marked: tuple[str, str]) -> None:
    scene = Scene(tmp_path, {("old", "new"): 12})
    scene.register(scene.triple("old", "old"), scene.triple("old", "new"))
    scene.record(scene.trace(*marked), scene.triple(*marked), trusted=False)
    found = scene.why(("old", "new"), OLD)
    assert states(found)[1] == "undecided"
    assert "overheated" in words(found, 1) + str(found.unused)
    if marked == ("old", "new"):
        assert states(found) == ("undecided",) * 3


def test_insignificant_difference_is_not_a_cause(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {OLD: 4, ("old", "new"): 5})
    scene.register(scene.triple("old", "old"), scene.triple("old", "new"))
    found = scene.why(("old", "new"), OLD)
    assert states(found) == ("excluded", "undecided", "excluded")
    assert "difference is not shown" in words(found, 1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("which", ["present", "previous"])
@pytest.mark.parametrize("how", ["nan", "empty", "failed"])
def test_invalid_evidence_names_no_cause(tmp_path: Path, how: str, which: str) -> None:
    scene = Scene(tmp_path, {("old", "new"): 12})
    scene.register(scene.triple("old", "old"), scene.triple("old", "new"))
    table = scene.table("old", {"present": "new", "previous": "old"}[which])
    runs = {}
    for key, run in table.runs.items():
        values: dict[str, Any] = dict(run.unit.values)
        values["kl"] = {"nan": values["kl"] * np.nan, "empty": np.zeros(0)}.get(how, values["kl"])
        unit = replace(run.unit, values=values)
        if how == "failed":
            unit = replace(unit, values={}, failure="out of memory")
        runs[key] = replace(run, unit=unit)
    path = scene.write(replace(table, runs=runs), "spoiled")
    found = scene.why(path, OLD) if which == "present" else scene.why(("old", "new"), path)
    assert "shown" not in states(found)
    assert found.causes[1].state == "undecided"
    assert found.exit == 3


def test_trace_without_requests_names_no_cause(tmp_path: Path) -> None:
    scene = Scene(tmp_path, count=0)
    scene.register(scene.triple("old", "old"), scene.triple("old", "new"))
    found = scene.why(("old", "new"), OLD)
    assert states(found) == ("undecided", "undecided", "excluded")


def test_register_without_the_triple_decides_only_the_contract(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {NEW: 12})
    scene.register(scene.triple("old", "old"))
    found = scene.why(NEW, OLD)
    assert states(found) == ("excluded", "undecided", "undecided")
    assert "no triple that it fits" in words(found, 1)
    assert list(found.unused.values()) == [found.found_by]


def test_first_triple_of_a_contract_has_no_predecessor(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {NEW: 12})
    scene.register(scene.triple("new", "new"))
    assert "no earlier triple" in words(scene.why(NEW), 1)


@pytest.mark.parametrize("limit", ["1/10", "1/100000"])
def test_verdicts_of_another_obligation_do_not_count(tmp_path: Path, limit: str) -> None:
    scene = both(tmp_path, {NEW})
    earlier = Scene(tmp_path, clauses=(clause("N-KL", "quantile", "kl", limit, q="9/10"),))
    runs = [earlier.write(earlier.table(*one), f"other-{'-'.join(one)}") for one in OTHERS]
    found = scene.why(NEW, *runs)
    assert states(found) == ("excluded", "undecided", "undecided")
    assert "asks something else" in words(found, 1)
    assert "asks something else" in words(found, 2)


def test_two_runs_of_another_obligation_exclude_nothing(tmp_path: Path) -> None:
    scene = both(tmp_path, {NEW, ("old", "new")})
    loose = Scene(tmp_path, {}, (clause("N-KL", "quantile", "kl", "1/10", q="9/10"),))
    runs = [loose.write(loose.table(*one), "-".join(one)) for one in (OLD, ("new", "old"))]
    found = scene.why(NEW, ("old", "new"), *runs)
    assert states(found) == ("excluded", "undecided", "undecided")


# --- which runs count -----------------------------------------------------------------------------


def test_previous_triple_is_the_incumbent_of_the_last_decision(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {NEW: 12})
    scene.register(scene.triple("old", "old"), scene.triple("new", "new"), promoted=True)
    scene.register(scene.triple("other", "old"))
    found = scene.why(NEW)
    assert found.previous == scene.triple("old", "old").digest
    assert "the incumbent of decision" in found.found_by


def test_runs_of_other_triples_are_named_and_ignored(tmp_path: Path) -> None:
    scene = both(tmp_path, {NEW})
    fewer = Scene(tmp_path, count=39)
    other = scene.table("old", "old")
    stray = {
        "weights": scene.write(scene.table("stranger", "old"), "stranger"),
        "kernels": scene.write(scene.table("old", "stranger"), "build"),
        "requests": fewer.write(fewer.table("old", "old"), "fewer"),
        "itself": scene.write(scene.table("new", "new", seed=1), "again"),
        "contract": scene.write(replace(other, contract={**other.contract, "name": "x"}), "x"),
        "report": tmp_path / "report.json",
    }
    stray["report"].write_text(json.dumps(conclude(scene.table("old", "old")).to_json()))
    found = scene.why(NEW, *stray.values())
    reasons = {name: found.unused[str(path)] for name, path in stray.items()}
    assert "other weights" in reasons["weights"]
    assert "torch" in reasons["kernels"] or "software" in reasons["kernels"]
    assert "other requests" in reasons["requests"]
    assert "triple that failed" in reasons["itself"]
    assert "another contract" in reasons["contract"]
    assert "no units" in reasons["report"]
    assert len([run for run in found.runs if run.source == "missing"]) == 3


def test_second_run_of_the_same_pair_is_named(tmp_path: Path) -> None:
    scene = both(tmp_path, {NEW})
    again = scene.write(scene.table("old", "old", drift=2e-2), "second")
    found = scene.why(NEW, OLD, again)
    assert "same checkpoint and kernels" in found.unused[str(again)]


def test_recorded_runs_distinguish_effects_of_the_weights(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {("old", "old"): 12})
    before = scene.triple("old", "old")
    other = replace(before.checkpoint, companions={"tokenizer": "2" * 64})
    scene.register(replace(before, checkpoint=other), before)
    failed = scene.trace("old", "old")
    scene.record(failed, before)
    earlier = Scene(tmp_path)
    run = earlier.write(earlier.table("old", "old"), "earlier")
    assert "record its run" in scene.why(failed, run).unused[str(run)]
    scene.record(run, replace(before, checkpoint=other))
    found = scene.why(failed, run)
    assert states(found) == ("excluded", "excluded", "shown")
    assert [cell.run is not None for cell in found.runs] == [True, True]


def test_other_host_is_not_another_kernel(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {NEW: 12})
    scene.register(scene.triple("old", "new"), scene.triple("new", "new"))
    table = scene.table("old", "new")
    for side in table.kernels.values():
        side["fingerprint"]["hardware"] = {"host": "production"}
    found = scene.why(NEW, scene.write(table, "elsewhere"))
    assert states(found) == ("excluded", "excluded", "shown")


# --- certificates ---------------------------------------------------------------------------------

SAMPLED = (clause("N-KL", "mean", "kl", "1/1000", sample=True),)


def sampled(folder: Path, **changes: Any) -> Scene:
    """Return a scene with a clause that the few requests do not decide, and a certificate."""
    scene = Scene(folder, clauses=SAMPLED, count=6)
    triple = scene.triple("new", "new")
    scene.register(scene.triple("old", "old"), triple)
    scene.certify(triple, certified(**changes))
    return scene


def test_run_within_the_certified_value_is_within_the_contract(tmp_path: Path) -> None:
    found = sampled(tmp_path).why(NEW)
    assert found.agreed[0].verdict == "inconclusive"
    assert states(found)[0] == "shown"
    assert "certified by sha256:" in words(found, 0)


def test_revoked_certificate_shows_nothing(tmp_path: Path) -> None:
    scene = sampled(tmp_path)
    with Register.open(scene.place, clock=clock) as register:
        register.revoke(register.certificates()[0].identity, "regression")
    assert states(scene.why(NEW))[0] == "undecided"


def test_undecided_clause_without_a_passed_certificate_stays_open(tmp_path: Path) -> None:
    scene = Scene(tmp_path, clauses=SAMPLED, count=6)
    scene.register(scene.triple("old", "old"), scene.triple("new", "new"))
    assert states(scene.why(NEW)) == ("undecided",) * 3
    other = Scene(tmp_path / "other", clauses=SAMPLED, count=6)
    other.folder.mkdir()
    other.register(other.triple("old", "old"), other.triple("new", "new"))
    other.certify(other.triple("old", "old"), certified())
    assert states(other.why(NEW))[0] == "undecided"


PROOF = replace(clause("N-PROOF", "max", "tv", "1"), evidence=EvidenceKind.PROOF)


def test_clause_that_demands_a_proof_needs_a_certificate(tmp_path: Path) -> None:
    scene = Scene(tmp_path, clauses=(*CLAUSES, PROOF))
    triple = scene.triple("new", "new")
    scene.register(scene.triple("old", "old"), triple)
    open_ = scene.why(NEW)
    assert states(open_)[0] == "undecided"
    assert "N-PROOF all (L2): demands proof" in words(open_, 0)
    result = certified(obligation="N-PROOF/all/0", id="N-PROOF")
    scene.certify(triple, replace(result, verdict=Verdict.INCONCLUSIVE, value=None, n=0))
    assert states(scene.why(NEW))[0] == "undecided"
    scene.certify(triple, result, sequence=2)
    assert states(scene.why(NEW))[0] == "shown"


def test_exceeded_bound_certifies_nothing() -> None:
    signed = certified()
    row = {
        "verdict": "inconclusive", "op": "<=", "obligation": "N-KL/all/0", "clause": "N-KL",
        "slice": "all", "level": "L2", "requirement": "", "unit": "nat", "threshold": 1e-3,
        "value": 1e-4, "reason": "few units", "exact": {"value": "0.0001", "threshold": "0.001"},
    }  # fmt: skip
    for change, state in (
        ({}, "inside"),
        ({"exact": {"value": "0.002", "threshold": "0.001"}}, "open"),
        ({"exact": {"value": "0.0001", "threshold": "0.002"}}, "open"),
        ({"exact": {"value": None, "threshold": "0.001"}}, "open"),
        ({"op": "<"}, "open"),
        ({"verdict": "invalid_evidence"}, "open"),
        ({"verdict": "violated"}, "outside"),
    ):
        report = {"clauses": [row | change], "deferred": {}}
        (found,) = agreed_rows(report, None, {"N-KL/all/0": (signed, "1" * 64)})
        assert found.state == state, change
    for text in ("1/0", "1e999999999"):
        report = {"clauses": [row | {"exact": {"value": text, "threshold": text}}], "deferred": {}}
        with pytest.raises(ValueError, match="is not a decimal"):
            list(agreed_rows(report, None, {"N-KL/all/0": (signed, "1" * 64)}))
    for result in (replace(signed, bound=5e-5), replace(signed, verdict=Verdict.FAILED)):
        known = {"N-KL/all/0": (result, "1" * 64)}
        (found,) = agreed_rows({"clauses": [row], "deferred": {}}, None, known)
        assert (found.state, found.certified) == ("open", result.bound)


def test_slice_that_was_left_out_is_open_on_its_own() -> None:
    """A clause of the same name on other slices, as of another bucket, has no part in it."""
    two = program(
        (
            clause("N-KL", "mean", "kl", "0.01", slices=("all", "short")),
            clause("N-KL", "mean", "kl", "0.02", slices=("long",)),
        )
    )
    for deferred, obligations in (
        ({"N-KL on short": "why"}, ["N-KL/short/0"]),
        ({"N-KL": "why"}, ["N-KL/all/0", "N-KL/short/0", "N-KL/long/0"]),
        ({"N-TV on all": "why"}, ["N-TV on all"]),
    ):
        found = agreed_rows({"clauses": [], "deferred": deferred}, two, {})
        assert [row.obligation for row in found] == obligations


# --- shown ----------------------------------------------------------------------------------------


def test_report_alone_decides_the_contract(tmp_path: Path) -> None:
    scene = both(tmp_path, {NEW})
    path = tmp_path / "report.json"
    path.write_text(json.dumps(conclude(scene.table("new", "new")).to_json()))
    found = scene.why(path, OLD)
    assert states(found) == ("excluded", "undecided", "undecided")
    assert "no units" in str(found.unused)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("kernels", "train", "fingerprint", "run"), 0.5),
        pytest.param(
            ("kernels", "train", "fingerprint", "run"), 10**400, marks=pytest.mark.full, id="huge"
        ),
    ],
)
def test_report_that_identifies_no_run_fits_no_triple(
    tmp_path: Path, place: tuple[str, ...], value: object
) -> None:
    scene = both(tmp_path, {NEW})
    document = json.loads(json.dumps(conclude(scene.table("new", "new")).to_json()))
    part = document
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    path = tmp_path / "report.json"
    path.write_text(json.dumps(document))
    found = scene.why(path, OLD)
    assert "the register has no triple that it fits" in str(found)
    assert states(found)[1:] == ("undecided", "undecided")


@pytest.mark.full
@pytest.mark.parametrize("rows", [[{"verdict": "held"}], [{"verdict": "held", "clause": []}]])
def test_clauses_of_a_report_without_their_fields_are_refused(
    tmp_path: Path, rows: list[Any]
) -> None:
    scene = both(tmp_path, {NEW})
    document = json.loads(json.dumps(conclude(scene.table("new", "new")).to_json()))
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**document, "clauses": rows, "verdict": "held", "exit": 0}))
    with pytest.raises(Refusal) as refused:
        scene.why(path, OLD)
    assert refused.value.diagnostics[0].code is codes.REPORT_FILE


def test_the_command_prints_text_and_json(
    tmp_path: Path, cli: Any, follows: Callable[..., None]
) -> None:
    scene = both(tmp_path, {NEW})
    command: list[Any] = ["why", scene.trace(*NEW), "--register", scene.place]
    for one in OTHERS:
        command += ["--evidence", scene.trace(*one)]
    ran = cli(*command)
    assert ran.code == 1, ran.stderr
    assert "the model update interacted with the kernels: yes" in ran.stdout
    assert "the kernel build regressed: no" in ran.stdout
    document = json.loads(cli(*command, "--format", "json").stdout)
    follows(document, "kcdsl.why/1")
    assert [cause["state"] for cause in document["causes"]] == ["excluded", "excluded", "shown"]
    lacking = cli(*command[:-2])
    assert lacking.code == 1
    follows(
        json.loads(
            cli("why", scene.trace(*OLD), "--register", scene.place, "--format", "json").stdout
        )
    )


def test_damaged_files_and_wrong_digests_are_refused(tmp_path: Path, cli: Any) -> None:
    scene = both(tmp_path, {NEW})
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(scene.trace(*OLD).read_bytes()[:-9] + b"PAR1")
    with pytest.raises(Refusal) as refused:
        scene.why(NEW, cut)
    assert refused.value.diagnostics[0].code in (codes.TRACE_CHANGED, codes.TRACE_FILE)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"other")
    with pytest.raises(Refusal) as refused:
        explain(
            WhySettings(
                trace=scene.trace(*NEW),
                register=str(scene.place),
                checkpoint={"0" * 64: weights},
            )
        )
    assert refused.value.diagnostics[0].code is codes.ARTEFACT_REFUSED
    asked = ("why", scene.trace(*NEW), "--register", scene.place, "--checkpoint")
    assert cli(*asked, "model.safetensors").code == 2
    assert cli("why", scene.trace(*NEW), "--register", tmp_path / "none.db").code == 2


# --- runs that are made here ----------------------------------------------------------------------

CONTRACT = """\
kcdsl: 1
contract: pair
version: 1.0.0
model: {checkpoint: CHECKPOINT/model.safetensors, architecture: llama, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.eager, numerics: {preset: torch-eager, compute: COMPUTE}}
data: prompts.jsonl
slices: {all: {}}
clauses:
  N-KL: {require: p95(kl) <= 1e-9, level: L2}
"""


@pytest.mark.full
def test_missing_runs_are_produced_from_local_contracts(tmp_path: Path, cli: Any) -> None:
    rows = [{"id": f"p{i}", "text": f"prompt {i}"} for i in range(8)]
    for name, scale in (("old", 0.2), ("new", 0.25)):
        (tmp_path / name).mkdir()
        write_model(tmp_path / name, config=DECODER, rows=rows, scale=scale)
    (tmp_path / "prompts.jsonl").write_bytes((tmp_path / "new" / "prompts.jsonl").read_bytes())
    assert cli("keygen", "-o", "release.key", cwd=tmp_path).code == 0
    for name, compute in (("old", "float32"), ("new", "bfloat16")):
        text = CONTRACT.replace("CHECKPOINT", name).replace("COMPUTE", compute)
        (tmp_path / f"{name}.yaml").write_text(text)
        words = ("evaluate", f"{name}.yaml", "--bound-seconds", "0", "--sign", "release.key")
        assert cli(*words, "-o", f"out-{name}", cwd=tmp_path).code in (0, 1)
    register = ("--register", "register.db")
    assert cli("register", "init", *register, cwd=tmp_path).code == 0
    signed = [f"out-{name}/evaluate.cert.json" for name in ("old", "new")]
    added = cli("register", "add", *signed, "--key", "release.key.pub", *register, cwd=tmp_path)
    assert added.code == 0, added.stderr
    digests = [
        f"sha256:{checkpoint_manifest(tmp_path / name / 'model.safetensors').digest}={name}"
        "/model.safetensors"
        for name in ("old", "new")
    ]
    why = ("why", "out-new/trace.parquet", "--format", "json", *register, "--contract", "old.yaml")
    both_of = ("--contract", "new.yaml", "--checkpoint", digests[0], "--checkpoint", digests[1])
    document = json.loads(cli(*why, *both_of, cwd=tmp_path).stdout)
    assert [run["source"] for run in document["runs"]] == ["evaluated"] * 3 + ["file"]
    assert [cause["state"] for cause in document["causes"]] == ["excluded", "shown", "excluded"]
    fewer = json.loads(cli(*why, cwd=tmp_path).stdout)
    assert [run["source"] for run in fewer["runs"]].count("missing") == 2
    assert fewer["causes"][1]["state"] == "undecided"
