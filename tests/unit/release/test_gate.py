"""The gate, by exit code and over HTTP: closed unless the register shows otherwise."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kcdsl.diagnostics import Refusal, codes
from kcdsl.ir.terms import Program
from kcdsl.model import fingerprint
from kcdsl.release.issue import issue
from kcdsl.release.promotion import CANARY, FULL, OFFLINE, SHADOW, CandidateState, StagedCandidate
from kcdsl.release.promotion.gate import GateAnswer, ask, fallback
from kcdsl.release.promotion.gate_server import LARGEST_BODY, GateServer
from kcdsl.release.promotion.recorded import UntrustedRecords, candidate_in, untrusted_records
from kcdsl.release.register import (
    Promotion,
    PromotionReason,
    PromotionState,
    Register,
    Run,
)
from kcdsl_certs.signatures import SigningKey, decode, parse_bundle
from kcdsl_certs.statement import STAGES, EvidenceFile, Predicate, Scope, Triple, Verdict
from kcdsl_certs.verification.admission import read_statement
from tests.support.promotions import at
from tests.support.promotions import digest as digest_of
from tests.support.registers import (
    NOW,
    TRUSTED,
    bundle,
    certified,
    predicate,
    recorded,
    triple,
)

SLOT = "chat/production"
LIVE, NEW = triple("live"), triple("new")


@pytest.fixture
def register(tmp_path: Path) -> Iterator[Register]:
    """Yield a register in which one triple is live."""
    with Register.open(tmp_path / "r.db", create=True, clock=lambda: NOW) as made:
        record(made, LIVE, FULL, state=PromotionState.PROMOTED, incumbent=None)
        yield made


def record(
    register: Register,
    about: Triple,
    stage: str,
    *,
    state: PromotionState = PromotionState.ADVANCED,
    incumbent: str | None = LIVE.digest,
    candidate_state: CandidateState = CandidateState.ACTIVE,
    lifetime: timedelta = timedelta(days=30),
) -> dict[str, str]:
    """Record certificates of every stage before one, and the candidate's state.

    Return their identities by stage.
    """
    found = {
        one: register.record_certificates(
            [certified(about, stage=one, lifetime=lifetime)], TRUSTED
        )[0].identity
        for one in STAGES[: STAGES.index(stage)]
    }
    register.record_triple(about)
    candidate = replace(
        at(stage),
        triple=about.digest,
        incumbent=incumbent,
        state=candidate_state,
        certificates={name: (identity,) for name, identity in found.items()},
    )
    decide(register, about, candidate, state, stage)
    return found


def decide(
    register: Register,
    about: Triple,
    candidate: StagedCandidate,
    state: PromotionState,
    stage: str,
    evidence: tuple[str, ...] = (),
) -> None:
    slot = register.slot(SLOT)
    last = list(candidate.certificates.values())[-1] if candidate.certificates else ()
    decision = Promotion(
        slot=SLOT,
        candidate=about.digest,
        incumbent=candidate.incumbent,
        contract=about.contract.digest,
        stage=stage,
        state=state,
        reasons=(PromotionReason("N-KL", "60 of 600 are beyond", "long"),),
        certificates=last if state in (PromotionState.ADVANCED, PromotionState.PROMOTED) else (),
        evidence=evidence,
        progress=candidate.to_json(),
    )
    register.promote(SLOT, slot.version, decision)


def answer(register: Register, about: Triple, stage: str, now: datetime = NOW) -> GateAnswer:
    return ask(register, SLOT, stage, about.digest, now).answer


def test_untrusted_run_of_an_earlier_window_closes_the_gate(
    register: Register,
) -> None:
    """A restarted window keeps the certificates of its stage, by which a candidate advances."""
    earlier = record(register, NEW, CANARY)
    report = EvidenceFile("report", "report.json", digest_of("report"))
    body = replace(predicate(NEW, stage=CANARY), evidence=(report,))
    signed = recorded(register, bundle(body)).identity
    held = {one: (identity,) for one, identity in earlier.items()} | {CANARY: (signed,)}
    looks = [
        (CANARY, 1, PromotionState.HELD, signed),
        (CANARY, 2, PromotionState.BLOCKED, digest_of("a window")),
        (FULL, 2, PromotionState.PROMOTED, digest_of("another window")),
    ]
    for stage, epoch, state, counted in looks:
        candidate = replace(
            at(stage), triple=NEW.digest, incumbent=LIVE.digest, epoch=epoch, certificates=held
        )
        decide(register, NEW, candidate, state, stage, (counted,))
    assert answer(register, NEW, FULL) is GateAnswer.SUCCESSFUL
    run = register.run_of(signed)
    assert run is not None
    register.mark_run(run.identity, trusted=False, reason="a shared machine")
    assert answer(register, NEW, FULL) is GateAnswer.INCONCLUSIVE


def test_untrusted_run_does_not_count_under_another_digest(register: Register) -> None:
    """By its report, or by its trace under another report.

    Another report counts if a certificate that is not revoked names it.
    """

    def signed(sequence: int, report: str, trace: str) -> str:
        files = [EvidenceFile("report", "report.json", digest_of(report))]
        files.append(EvidenceFile("trace", "trace.parquet", digest_of(trace)))
        body = predicate(NEW, stage=CANARY, sequence=sequence)
        return recorded(register, bundle(replace(body, evidence=tuple(files)))).identity

    def why(name: str) -> str | None:
        return untrusted_records(register, NEW.digest).of_report(digest_of(name))

    one, copied = signed(1, "report", "trace"), signed(2, "copy", "trace")
    other, lost = signed(3, "other", "another"), signed(4, "lost", "third")
    unsigned = Run("evaluate", NEW.digest, SHADOW, digest_of("unsigned"))
    register.record_run(unsigned)
    register.revoke(lost, "the key was lost")
    assert untrusted_records(register, NEW.digest) == UntrustedRecords()
    run = register.run_of(one)
    assert run is not None
    register.mark_run(run.identity, trusted=False, reason="a shared machine")
    found = untrusted_records(register, NEW.digest).why
    assert found.keys() == {
        one, copied, *map(digest_of, ("report", "copy", "unsigned", "lost"))
    }  # fmt: skip
    assert "a shared machine" in found[copied]
    assert other not in found
    assert why("other") is None
    for name in ("report", "copy", "unsigned", "lost", "never seen"):
        assert "a shared machine" in (why(name) or ""), name
    given = {"0" * 64: replace(run, report=digest_of("given"), trace=digest_of("fourth"))}
    assert untrusted_records(register, NEW.digest, given).of_report(digest_of("given")) is None
    given = {"0" * 64: replace(run, report=digest_of("given"))}
    assert "0" * 64 in untrusted_records(register, NEW.digest, given).why
    register.mark_run(run.identity, trusted=True, reason="it was alone")
    assert untrusted_records(register, NEW.digest) == UntrustedRecords()
    assert why("never seen") is None


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_unrecorded_triple_may_not_serve(register: Register, stage: str) -> None:
    gate = ask(register, SLOT, stage, NEW.digest, NOW)
    assert gate.answer is GateAnswer.INCONCLUSIVE
    assert not gate.known
    assert answer(register, LIVE, stage) is GateAnswer.SUCCESSFUL
    elsewhere = ask(register, "chat/other", stage, LIVE.digest, NOW)
    assert elsewhere.answer is GateAnswer.INCONCLUSIVE


@pytest.mark.parametrize("asked", STAGES)
@pytest.mark.parametrize("stage", [SHADOW, CANARY])
def test_candidate_may_serve_up_to_its_stage(register: Register, stage: str, asked: str) -> None:
    record(register, NEW, stage)
    may = STAGES.index(asked) <= STAGES.index(stage)
    assert answer(register, NEW, asked) is (
        GateAnswer.SUCCESSFUL if may else GateAnswer.INCONCLUSIVE
    )


@pytest.mark.parametrize("asked", STAGES)
@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        (CandidateState.BLOCKED, GateAnswer.FAILED),
        (CandidateState.ROLLED_BACK, GateAnswer.FAILED),
        (CandidateState.FROZEN, GateAnswer.INCONCLUSIVE),
    ],
)
def test_stopped_candidate_may_not_serve(
    register: Register, state: CandidateState, wanted: GateAnswer, asked: str
) -> None:
    record(register, NEW, CANARY, state=PromotionState.HELD, candidate_state=state)
    gate = ask(register, SLOT, asked, NEW.digest, NOW)
    assert gate.answer is wanted
    assert "N-KL on long: 60 of 600 are beyond" in gate.reasons


def test_revoked_certificate_of_any_stage_closes_the_gate(register: Register) -> None:
    for stage in (OFFLINE, SHADOW):
        about = triple(f"revoked at {stage}")
        found = record(register, about, CANARY)
        assert answer(register, about, CANARY) is GateAnswer.SUCCESSFUL
        register.revoke(found[stage], "wrong data")
        gate = ask(register, SLOT, CANARY, about.digest, NOW)
        assert gate.answer is GateAnswer.FAILED
        assert "wrong data" in gate.reasons[0]


def test_newer_failed_certificate_closes_the_gate(register: Register) -> None:
    record(register, NEW, CANARY)
    failed = certified(NEW, stage=SHADOW, sequence=2, verdict=Verdict.FAILED)
    register.record_certificates([failed], TRUSTED)
    assert answer(register, NEW, CANARY) is GateAnswer.FAILED


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("verdict", "wanted"),
    [
        (Verdict.FAILED, GateAnswer.FAILED),
        (Verdict.INCONCLUSIVE, GateAnswer.INCONCLUSIVE),
        (Verdict.PASSED, GateAnswer.SUCCESSFUL),
    ],
)
def test_failed_certificate_of_the_present_stage_closes_the_gate(
    register: Register, stage: str, verdict: Verdict, wanted: GateAnswer
) -> None:
    """Until `promote` decides about it, or a newer one in force passes."""
    newer: dict[str, Any] = {"stage": stage, "verdict": verdict}
    about = NEW
    if stage == FULL:
        record(register, about, FULL, state=PromotionState.PROMOTED)
    elif stage == OFFLINE:
        register.record_triple(about)
        began = replace(at(OFFLINE), triple=about.digest, incumbent=LIVE.digest)
        decide(register, about, began, PromotionState.HELD, OFFLINE)
    else:
        record(register, about, stage)
    assert answer(register, about, stage) is GateAnswer.SUCCESSFUL
    recorded(register, certified(about, sequence=5, **newer))
    assert answer(register, about, stage) is wanted
    recorded(register, certified(about, sequence=4, stage=stage))
    assert answer(register, about, stage) is wanted
    passed = recorded(register, certified(about, sequence=6, stage=stage))
    assert answer(register, about, stage) is GateAnswer.SUCCESSFUL
    register.revoke(passed.identity, "wrong data")
    assert answer(register, about, stage) is wanted


def test_decided_failure_leaves_the_gate_to_the_decision(register: Register) -> None:
    """A clause of L1 blocks, and its candidate continues."""
    record(register, NEW, CANARY)
    mild = recorded(register, certified(NEW, sequence=5, stage=CANARY, verdict=Verdict.FAILED))
    assert answer(register, NEW, CANARY) is GateAnswer.FAILED
    last = register.promotions(slot=SLOT, candidate=NEW.digest)[-1]
    blocked = replace(
        last, state=PromotionState.BLOCKED, certificates=(), evidence=(mild.identity,)
    )
    register.promote(SLOT, register.slot(SLOT).version, blocked)
    assert answer(register, NEW, CANARY) is GateAnswer.SUCCESSFUL


@pytest.mark.parametrize("stage", [SHADOW, CANARY])
def test_failure_closes_the_gate_after_its_certificate_expired(
    register: Register, stage: str
) -> None:
    """Of its stage, and of an earlier one."""
    record(register, NEW, CANARY)
    later = NOW + timedelta(days=3)
    assert answer(register, NEW, CANARY, later) is GateAnswer.SUCCESSFUL
    short = {"verdict": Verdict.FAILED, "lifetime": timedelta(days=1)}
    recorded(register, certified(NEW, stage=stage, sequence=2, **short))
    assert answer(register, NEW, CANARY, later) is GateAnswer.FAILED


@pytest.mark.parametrize("how", ["failed", "revoked", "failed elsewhere"])
def test_passed_certificate_does_not_hide_later_results(register: Register, how: str) -> None:
    found = record(register, NEW, CANARY)[SHADOW]
    other = triple("successor")
    about = other if how == "failed elsewhere" else NEW
    passed = certified(about, stage=SHADOW, sequence=2, supersedes=found)
    (newer,) = register.record_certificates([passed], TRUSTED)
    assert answer(register, NEW, CANARY) is not GateAnswer.FAILED
    if how == "revoked":
        register.revoke(newer.identity, "wrong data")
    else:
        failed = certified(about, stage=SHADOW, sequence=3, verdict=Verdict.FAILED)
        register.record_certificates([failed], TRUSTED)
    gate = ask(register, SLOT, CANARY, NEW.digest, NOW)
    assert gate.answer is GateAnswer.FAILED
    assert ("wrong data" if how == "revoked" else "sequence 3") in gate.reasons[0]


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM certificates WHERE verdict = 'FAILED'",
        "UPDATE certificates SET verdict = 'PASSED'",
        "UPDATE certificates SET stage = 'full' WHERE verdict = 'FAILED'",
    ],
)
def test_hidden_failure_does_not_open_the_gate(
    register: Register, tmp_path: Path, change: str
) -> None:
    record(register, NEW, CANARY)
    failed = certified(NEW, stage=CANARY, sequence=9, verdict=Verdict.FAILED)
    recorded(register, failed, TRUSTED)
    assert answer(register, NEW, CANARY) is GateAnswer.FAILED
    with closing(sqlite3.connect(tmp_path / "r.db")) as raw, raw:
        raw.execute(change)
    with pytest.raises(Refusal, match="contradicts itself"):
        ask(register, SLOT, CANARY, NEW.digest, NOW)


def test_decision_with_the_progress_of_another_triple_is_refused(register: Register) -> None:
    """A triple that was rolled back does not borrow the state of the live one."""
    record(register, NEW, CANARY, candidate_state=CandidateState.ROLLED_BACK)
    other = replace(at(CANARY), triple=LIVE.digest, incumbent=LIVE.digest)
    decide(register, NEW, other, PromotionState.HELD, CANARY)
    with pytest.raises(Refusal, match="about another triple") as caught:
        ask(register, SLOT, CANARY, NEW.digest, NOW)
    assert caught.value.diagnostics[0].code is codes.REGISTER_DAMAGED


def test_gate_closes_when_the_certificate_expires(register: Register) -> None:
    record(register, NEW, CANARY, lifetime=timedelta(days=2))
    assert answer(register, NEW, CANARY, NOW + timedelta(days=1, hours=22)) is GateAnswer.SUCCESSFUL
    assert answer(register, NEW, CANARY, NOW + timedelta(days=2)) is GateAnswer.INCONCLUSIVE


@pytest.mark.parametrize("stage", [CANARY, FULL])
@pytest.mark.parametrize("renewed", [False, True])
def test_gate_closes_when_one_of_the_certificates_expires(
    register: Register, stage: str, renewed: bool
) -> None:
    """A measurement does not replace an expired proof; a newer proof does."""
    record(
        register,
        NEW,
        stage,
        state=PromotionState.PROMOTED if stage == FULL else PromotionState.ADVANCED,
    )
    passed = CANARY if stage == FULL else SHADOW
    candidate = candidate_in(register.promotions(candidate=NEW.digest))
    assert candidate is not None
    one = replace(predicate(NEW).clauses[0], obligation="N-ATTN/all/0", id="N-ATTN")
    lives = (timedelta(days=2), *([timedelta(days=9)] if renewed else []))
    more = [
        recorded(
            register,
            bundle(
                replace(
                    predicate(NEW, stage=passed, sequence=number, lifetime=lifetime),
                    clauses=(one,),
                    scope=Scope(False, (("N-ATTN", "all"),)),
                )
            ),
        ).identity
        for number, lifetime in enumerate(lives, 2)
    ]
    signed = {**candidate.certificates, passed: (*candidate.certificates[passed], *more)}
    decide(register, NEW, replace(candidate, certificates=signed), PromotionState.HELD, stage)
    asked = [answer(register, NEW, stage, NOW + timedelta(days=n)) for n in (1, 3, 10)]
    ends = GateAnswer.INCONCLUSIVE
    closes = [GateAnswer.SUCCESSFUL, GateAnswer.SUCCESSFUL if renewed else ends, ends]
    assert asked == closes
    told = " ".join(ask(register, SLOT, stage, NEW.digest, NOW + timedelta(days=10)).reasons)
    assert "no other one shows N-ATTN/all/0" in told


def test_other_live_triple_closes_the_gate(register: Register) -> None:
    record(register, NEW, CANARY)
    other = triple("other")
    record(register, other, FULL, state=PromotionState.PROMOTED)
    assert answer(register, NEW, CANARY) is GateAnswer.INCONCLUSIVE
    assert answer(register, other, FULL) is GateAnswer.SUCCESSFUL
    assert answer(register, LIVE, FULL) is GateAnswer.INCONCLUSIVE


@pytest.mark.parametrize("stage", STAGES)
def test_triple_displaced_by_its_incumbent_may_not_serve(register: Register, stage: str) -> None:
    record(register, NEW, FULL, state=PromotionState.PROMOTED)
    assert answer(register, NEW, stage) is GateAnswer.SUCCESSFUL
    again = replace(
        at(FULL),
        triple=LIVE.digest,
        incumbent=NEW.digest,
        certificates={
            one.stage: (one.identity,) for one in register.certificates(triple=LIVE.digest)
        },
    )
    decide(register, LIVE, again, PromotionState.PROMOTED, FULL)
    assert register.slot(SLOT).triple == LIVE.digest
    assert answer(register, LIVE, stage) is GateAnswer.SUCCESSFUL
    assert answer(register, NEW, stage) is GateAnswer.INCONCLUSIVE


# --- where a rollback goes ------------------------------------------------------------------------


OLDER, NEWER = triple("older"), triple("newer")


@pytest.fixture
def three(register: Register) -> dict[str, str]:
    """Return the certificates of `OLDER`; `LIVE` was live before, and `NEWER` is after."""
    found = record(register, OLDER, FULL, state=PromotionState.PROMOTED)
    record(register, NEWER, FULL, state=PromotionState.PROMOTED, incumbent=OLDER.digest)
    return found


def test_rollback_target_is_the_last_live_triple(register: Register, three: dict[str, str]) -> None:
    assert fallback(register, SLOT, NEWER.digest, NOW) == OLDER.digest
    assert fallback(register, SLOT, OLDER.digest, NOW) == NEWER.digest
    assert fallback(register, "chat/other", NEWER.digest, NOW) is None


@pytest.mark.parametrize(
    "how", ["rolled back", "frozen", "blocked", "began anew", "revoked", "failed", "untrusted"]
)
def test_rollback_skips_triples_that_may_not_serve(
    register: Register, three: dict[str, str], how: str
) -> None:
    """Also where a certificate of its canary is in force."""
    states = {
        "rolled back": (CANARY, CandidateState.ROLLED_BACK, PromotionState.HELD),
        "frozen": (FULL, CandidateState.FROZEN, PromotionState.FROZEN),
        "blocked": (OFFLINE, CandidateState.BLOCKED, PromotionState.BLOCKED),
        "began anew": (SHADOW, CandidateState.ACTIVE, PromotionState.HELD),
    }
    if how in states:
        stage, state, decided = states[how]
        signed = {one: (identity,) for one, identity in three.items()}
        anew = replace(
            at(stage), triple=OLDER.digest, incumbent=NEWER.digest, state=state, attempt=2,
            certificates=signed,
        )  # fmt: skip
        decide(register, OLDER, anew, decided, stage)
    elif how == "revoked":
        register.revoke(three[SHADOW], "wrong data")
    elif how == "failed":
        recorded(register, certified(OLDER, stage=FULL, verdict=Verdict.FAILED))
    else:
        run = register.record_run(Run("evaluate", OLDER.digest, CANARY, digest_of("report")))
        last = register.promotions(slot=SLOT, candidate=OLDER.digest)[-1]
        again = replace(last, state=PromotionState.HELD, evidence=(digest_of("report"),),
                        incumbent=NEWER.digest, stage=CANARY)  # fmt: skip
        before = replace(StagedCandidate.from_json(dict(last.progress)), stage=CANARY)
        decide(register, OLDER, replace(before, incumbent=NEWER.digest), again.state, CANARY)
        register.promote(SLOT, register.slot(SLOT).version, again)
        assert fallback(register, SLOT, NEWER.digest, NOW) == OLDER.digest
        register.mark_run(run.identity, trusted=False, reason="a shared machine")
    assert fallback(register, SLOT, NEWER.digest, NOW) == LIVE.digest
    for one in register.certificates(triple=LIVE.digest):
        register.revoke(one.identity, "wrong data")
    assert fallback(register, SLOT, NEWER.digest, NOW) is None


def test_rollback_skips_triples_with_expired_certificates(
    register: Register, three: dict[str, str]
) -> None:
    assert fallback(register, SLOT, NEWER.digest, NOW + timedelta(days=30)) is None


def test_decision_without_a_candidate_gives_no_answer(register: Register) -> None:
    slot = register.slot(SLOT)
    register.record_triple(NEW)
    register.promote(
        SLOT,
        slot.version,
        Promotion(SLOT, NEW.digest, LIVE.digest, NEW.contract.digest, CANARY, PromotionState.HELD),
    )
    with pytest.raises(Refusal):
        ask(register, SLOT, CANARY, NEW.digest, NOW)


# --- the command ----------------------------------------------------------------------------------


def test_exit_codes_of_the_gate_command(
    register: Register, tmp_path: Path, cli: Callable[..., Any], follows: Callable[..., None]
) -> None:
    record(
        register, NEW, CANARY, state=PromotionState.HELD, candidate_state=CandidateState.ROLLED_BACK
    )
    frozen = triple("frozen")
    record(
        register, frozen, CANARY, state=PromotionState.HELD, candidate_state=CandidateState.FROZEN
    )
    wanted = {NEW.digest: 1, frozen.digest: 3, "0" * 64: 3}
    words = ("gate", "--register", tmp_path / "r.db", "--slot", SLOT, "--stage", "canary")
    for digest, code in wanted.items():
        ran = cli(*words, "--triple", f"sha256:{digest}", "--format", "json")
        document = json.loads(ran.stdout)
        follows(document)
        assert (ran.code, document["exit"], document["open"]) == (code, code, False)
    plain = cli(*words, "--triple", NEW.digest)
    assert plain.stdout.splitlines()[-1] == f"closed: sha256:{NEW.digest[:12]} at canary in {SLOT}"
    assert cli(*words, "--triple", "short").code == 2
    assert (
        cli("gate", "--register", tmp_path / "none.db", *words[3:], "--triple", "0" * 64).code == 2
    )
    for word in ("nowhere", "127.0.0.1:99999", ":"):
        assert cli("gate", "--register", tmp_path / "r.db", "--serve", word).code == 2


def test_gate_is_closed_where_recorded_times_are_of_another_machine(
    cli: Callable[..., Any],
    folder: Path,
    program: Program,
    key: SigningKey,
    certificate: Path,
    evidence: tuple[EvidenceFile, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A check refuses the certificate there, too."""
    stated = read_statement(decode(parse_bundle(certificate.read_bytes())).payload)
    assert isinstance(stated, Predicate)
    about: dict[str, Any] = {"program": program, "base": folder, "keys": [key]}
    certificate.write_bytes(issue(clauses=stated.clauses, evidence=evidence, **about))
    trusted = ("--key", "kcdsl.key.pub")
    assert cli("register", "init", "--register", "r.db", cwd=folder).code == 0
    words = ("--register", "r.db", "--slot", SLOT, "--stage", "offline-ci")
    ran = cli("promote", certificate, *trusted, *words, cwd=folder)
    assert ran.code == 0, ran.stdout + ran.stderr
    assert cli("gate", *words, cwd=folder).code == 0
    monkeypatch.setattr(fingerprint, "host", lambda: {"cores": 1, "memory": 1})
    assert cli("check", certificate, *trusted, cwd=folder).code == 4
    assert cli("gate", *words, cwd=folder).code == 3


# --- HTTP -----------------------------------------------------------------------------------------


Ask = Callable[..., tuple[int, dict[str, Any]]]


@contextmanager
def serving(register: Any, usual: Mapping[str, str] | None = None) -> Iterator[GateServer]:
    """Serve in a thread of this process."""
    server = GateServer(("127.0.0.1", 0), register, lambda: NOW, usual or {})
    poll = {"poll_interval": 0.01}
    thread = threading.Thread(target=server.serve_forever, kwargs=poll, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def place(server: GateServer) -> tuple[str, int]:
    """Return where a server listens."""
    host, port = server.server_address[:2]
    return str(host), int(port)


def send(
    server: GateServer, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, Any]]:
    """Return status and document of a request."""
    with closing(http.client.HTTPConnection(*place(server), timeout=30)) as client:
        client.request(method, path, body, headers)
        reply = client.getresponse()
        assert reply.getheader("Content-Type") == "application/json"
        return reply.status, json.loads(reply.read())


def query(path: str, about: Triple | str = NEW, stage: str = CANARY, slot: str = SLOT) -> str:
    digest = about if isinstance(about, str) else f"sha256:{about.digest}"
    return f"{path}?slot={slot}&stage={stage}&triple={digest}"


def flagger(**metadata: Any) -> bytes:
    """Return a request body as Flagger sends it."""
    document = {
        "name": "chat", "namespace": "serving", "phase": "Progressing", "checksum": "85d557f47b",
        "metadata": metadata,
    }  # fmt: skip
    return json.dumps(document).encode()


def test_gate_answers_by_status_and_document(
    register: Register, follows: Callable[..., None]
) -> None:
    stopped, frozen = triple("stopped"), triple("frozen")
    record(register, NEW, CANARY)
    record(
        register,
        stopped,
        CANARY,
        state=PromotionState.HELD,
        candidate_state=CandidateState.ROLLED_BACK,
    )
    record(
        register, frozen, CANARY, state=PromotionState.HELD, candidate_state=CandidateState.FROZEN
    )
    with serving(register) as server:
        for about, gate, analysis, rollback, outcome in (
            (NEW, 200, 200, 409, "Successful"),
            (stopped, 403, 200, 200, "Failed"),
            (frozen, 409, 200, 409, "Inconclusive"),
            ("0" * 64, 404, 404, 404, "Inconclusive"),
        ):
            digest = about if isinstance(about, str) else about.digest
            body = flagger(slot=SLOT, stage=CANARY, triple=digest)
            for status, method, path, sent in (
                (gate, "GET", query("/gate", about), None),
                (gate, "POST", "/gate", body),
                (gate, "POST", query("/gate", about), flagger()),
                (analysis, "GET", query("/analysis", about), None),
                (rollback, "POST", "/rollback", body),
            ):
                found, document = send(server, method, path, sent)
                follows(document)
                assert (found, document["outcome"]) == (status, outcome), (method, path)
                assert document["open"] is (outcome == "Successful")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/", None, 404),
        ("GET", "/gate/", None, 404),
        ("GET", "/gate", None, 400),
        ("GET", "/gate?slot=a&stage=canary", None, 400),
        ("GET", query("/gate", stage="soon"), None, 400),
        ("GET", query("/gate", about="short"), None, 400),
        ("GET", query("/gate") + "&triple=" + "0" * 64, None, 400),
        ("GET", query("/gate") + "&x=1" * 20, None, 400),
        ("GET", query("/gate", slot="BAD%20SLOT"), None, 400),
        ("GET", query("/gate", slot="%ED%A0%80"), None, 400),
        ("POST", query("/gate", slot=""), flagger(slot="\ud800"), 400),
        ("GET", "x://[::1/gate", None, 400),
        ("GET", query("/gate", slot="%ff"), None, 400),
        ("GET", "/rollback", None, 405),
        ("POST", query("/analysis"), b"{}", 405),
        ("POST", query("/gate"), b"no json", 400),
        ("POST", query("/gate"), b"[]", 400),
        ("POST", query("/gate"), b'{"metadata": 3}', 400),
        ("POST", query("/gate"), flagger(triple="0" * 64), 400),
        ("POST", "/gate", flagger(slot=SLOT, stage=CANARY, triple=["0"]), 400),
        ("POST", query("/gate"), b" " * (LARGEST_BODY + 1), 413),
        ("PUT", query("/gate"), b"{}", 501),
        ("DELETE", query("/gate"), None, 501),
    ],
)
def test_invalid_requests_never_open_the_gate(
    register: Register, method: str, path: str, body: bytes | None, status: int
) -> None:
    record(register, NEW, CANARY)
    with serving(register) as server:
        with closing(http.client.HTTPConnection(*place(server), timeout=30)) as client:
            client.request(method, path, body)
            try:
                reply = client.getresponse()
            except ConnectionError:
                assert status == 413  # closed before the whole body was sent
                return
            text = reply.read().decode()
        assert reply.status == status
        assert "Traceback" not in text
        assert "/r.db" not in text


def test_failing_register_never_opens_the_gate() -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("secret at /srv/register")

    with serving(Broken()) as server:
        for path in (query("/gate"), query("/analysis"), "/health"):
            status, document = send(server, "GET", path)
            assert status == 500
            assert document["open"] is False
            assert "secret" not in json.dumps(document)


@pytest.mark.parametrize("how", ["removed", "replaced", "upgraded"])
def test_changed_register_is_not_served_from_memory(
    register: Register, tmp_path: Path, how: str
) -> None:
    """A deleted file still has its contents for a process that has it open."""
    file, other = tmp_path / "r.db", tmp_path / "other.db"
    record(register, NEW, CANARY)
    with Register.open(file, clock=lambda: NOW) as read, serving(read) as server:
        assert send(server, "GET", query("/gate"))[0] == 200
        if how == "replaced":
            with Register.open(other, create=True, clock=lambda: NOW) as made:
                record(made, LIVE, FULL, state=PromotionState.PROMOTED, incumbent=None)
            for log in ("r.db-wal", "r.db-shm"):
                (tmp_path / log).unlink(missing_ok=True)
            os.replace(other, file)
        elif how == "removed":
            file.unlink()
        else:
            with closing(sqlite3.connect(file)) as raw, raw:
                raw.execute("UPDATE alembic_version SET version_num = '9999'")
        for path in (query("/gate"), query("/analysis")):
            assert send(server, "GET", path)[0] == (404 if how == "replaced" else 503)
        if how != "replaced":
            assert send(server, "GET", "/health")[0] == 503
            assert not file.exists() or how == "upgraded"


def test_server_for_one_slot_needs_fewer_parameters(register: Register) -> None:
    record(register, NEW, CANARY)
    with serving(register, {"slot": SLOT, "stage": CANARY}) as server:
        assert send(server, "GET", f"/gate?triple={NEW.digest}")[0] == 200
        assert send(server, "GET", f"/gate?triple={NEW.digest}&stage=full")[0] == 409
        with closing(http.client.HTTPConnection(*place(server), timeout=30)) as client:
            client.request("GET", "/health")
            reply = client.getresponse()
            assert (reply.status, reply.read()) == (204, b"")


def test_silent_client_does_not_block_others(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(register, NEW, CANARY)
    with serving(register) as server:
        silent = [socket.create_connection(place(server)) for _ in range(5)]
        try:
            for one in silent:
                one.sendall(b"GET /gate HTTP/1.1\r\nX: ")
            assert send(server, "GET", query("/gate"))[0] == 200
        finally:
            for one in silent:
                one.close()


def test_slow_client_is_disconnected(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kcdsl.release.promotion.gate_server.SECONDS", 0.2)
    with serving(register) as server, socket.create_connection(place(server)) as slow:
        slow.settimeout(0.02)
        slow.sendall(b"GET /gate HTTP/1.1\r\nX: ")
        for _ in range(500):
            try:
                slow.sendall(b"x")
                if slow.recv(10) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("it is still served")


def test_huge_content_length_is_refused(register: Register) -> None:
    with serving(register) as server:
        found = send(server, "POST", query("/gate"), None, **{"Content-Length": "9" * 5000})
    assert found[0] == 413


@pytest.mark.parametrize("length", ["", "-1", "1_0", "\xb2"])
def test_body_without_a_length_is_refused(register: Register, length: str) -> None:
    with serving(register) as server:
        found = send(server, "POST", query("/gate"), None, **{"Content-Length": length})
    assert found[0] == 411


def test_empty_body_leaves_the_question_in_the_query(register: Register) -> None:
    record(register, NEW, CANARY)
    with serving(register) as server:
        assert send(server, "POST", query("/gate"), b"")[0] == 200


def test_truncated_body_is_refused(register: Register) -> None:
    record(register, NEW, CANARY)
    with serving(register) as server, socket.create_connection(place(server)) as client:
        head = f"POST {query('/gate')} HTTP/1.0\r\nContent-Length: 9\r\n\r\n{{}}"
        client.sendall(head.encode())
        client.shutdown(socket.SHUT_WR)
        with client.makefile("rb") as reply:
            assert b" 408 " in reply.readline()


def test_excess_connections_are_closed(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kcdsl.release.promotion.gate_server.MOST_AT_A_TIME", 2)
    with serving(register) as server:
        silent = [socket.create_connection(place(server)) for _ in range(2)]
        try:
            for one in silent:
                one.sendall(b"GET /health HTTP/1.1\r\nX: ")
            for _ in range(200):
                with socket.create_connection(place(server)) as more:
                    more.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                    try:
                        if more.recv(10) == b"":
                            break
                    except ConnectionError:
                        break
            else:
                pytest.fail("every connection was served")
        finally:
            for one in silent:
                one.close()


@pytest.mark.full
def test_stopped_server_finishes_its_answers(tmp_path: Path) -> None:
    place = tmp_path / "r.db"
    Register.open(place, create=True).close()
    words = ["-m", "kcdsl", "gate", "--serve", "0", "--register", str(place)]
    with subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            address = ("127.0.0.1", int(server.stderr.readline().rpartition(":")[2]))
            with socket.create_connection(address) as first:
                first.sendall(b"GET /health HTTP/1.1\r\n")
                with socket.create_connection(address) as second:  # accepted after the first
                    second.sendall(b"GET /health HTTP/1.1\r\n\r\n")
                    assert second.recv(100).startswith(b"HTTP/1.0 204")
                server.send_signal(signal.SIGTERM)
                assert server.stderr.readline().startswith("gate: stopping")
                first.sendall(b"\r\n")
                assert first.recv(100).startswith(b"HTTP/1.0 204")
            assert server.wait(60) == 0
        finally:
            server.kill()
