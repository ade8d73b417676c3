"""Promotion of a candidate by evidence, recorded in a register by compare-and-swap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from kcdsl.api.backends import look_rules
from kcdsl.api.certificates import CheckSettings
from kcdsl.api.contract import PathLike, read_contract
from kcdsl.api.results import TableResult
from kcdsl.api.stage_evidence import StageEvidence, gather
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import PROMOTION_EVIDENCE, PROMOTION_STAGE
from kcdsl.exits import Exit
from kcdsl.release.issue import utc_now
from kcdsl.release.promotion import (
    FULL,
    DemandedObligation,
    DocumentKind,
    EvidenceDocument,
    LookRules,
    PromotionLimits,
    PromotionOutcome,
    PromotionStep,
    StagedCandidate,
    UnusableEvidence,
    begun,
    demanded_obligations,
    enter,
    gathered,
    step,
    without,
)
from kcdsl.release.promotion.gate import fallback
from kcdsl.release.promotion.recorded import (
    UntrustedRecords,
    candidate_in,
    deployed_in,
    standing_of,
    untrusted_inputs,
    untrusted_records,
)
from kcdsl_certs.encoding.reals import real_text
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import time_text
from kcdsl_certs.statement import Verdict

if TYPE_CHECKING:
    from kcdsl.release.register import Promotion, Register, Run, Slot
    from kcdsl_certs.signatures import TrustPolicy
    from kcdsl_certs.statement import Triple
    from kcdsl_certs.verification.report import Report

EXITS = {
    PromotionOutcome.ADVANCED: Exit.HELD,
    PromotionOutcome.KEPT: Exit.HELD,
    PromotionOutcome.HELD: Exit.INCONCLUSIVE,
    PromotionOutcome.BLOCKED: Exit.VIOLATED,
    PromotionOutcome.FROZEN: Exit.VIOLATED,
    PromotionOutcome.ROLLED_BACK: Exit.VIOLATED,
}
_TRIES = 5
_MOST_COUNTED = 40_000
"""Digests of evidence of one decision, such as those of 300 windows: an event of a register has at
most 4 MiB."""
NO_FALLBACK = "rollback/no-target"
"""The reason of a decision that empties a slot."""
OF_STAGE = "stage"
"""The reason of a decision about what a stage lacks, which is no clause."""
NOTHING_LIVE = "no other triple that was live in the slot may serve: nothing is live now"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromoteSettings:
    """Settings of a promotion; `checks` has the options of `kcdsl check`, and each other field is
    the option of `kcdsl promote` of its name."""

    register: str
    slot: str
    stage: str
    evidence: Sequence[PathLike] = ()
    contract: str | None = None
    window: timedelta
    requests: int
    dry_run: bool = False
    checks: CheckSettings = field(default_factory=CheckSettings)
    clock: Callable[[], datetime] = utc_now


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Promoted(TableResult):
    """The result of a look; `step` is None where a certificate is not valid."""

    slot: str
    stage: str
    triple: str | None = None
    step: PromotionStep | None = None
    version: int | None = None
    """The version of the slot after the look."""
    live: str | None = None
    """The digest of the live triple of the slot after the look."""
    recorded: bool = False
    unused: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    invalid: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Reasons why certificates are not valid, by file."""

    @property
    def says(self) -> str:
        """Return the slot, the stage and the outcome."""
        outcome = "invalid certificates" if self.step is None else self.step.outcome.value
        return f"{self.slot} at {self.stage}, {outcome}"

    @property
    def exit(self) -> Exit:
        """Return the exit code of the command."""
        return Exit.CERTIFICATE_INVALID if self.step is None else EXITS[self.step.outcome]

    def to_json(self) -> dict[str, Any]:
        """Return the document `kcdsl.promotion/1`."""
        found = self.step
        return {
            "schema": "kcdsl.promotion/1",
            "outcome": None if found is None else found.outcome.value,
            "exit": int(self.exit),
            "slot": self.slot,
            "version": self.version,
            "live": self.live,
            "triple": self.triple,
            "stage": self.stage,
            "candidate": None if found is None else found.candidate.to_json(),
            "clauses": self.rows(),
            "lacking": [] if found is None else list(found.lacking),
            "unused": dict(self.unused),
            "invalid": {name: list(reasons) for name, reasons in self.invalid.items()},
            "recorded": self.recorded,
            "notes": list(self.notes),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each obligation."""
        return [] if self.step is None else [row.to_json() for row in self.step.rows]


def promote(settings: PromoteSettings) -> Promoted:
    """Evaluate the evidence of a stage, and record the next state of the candidate.

    If another writer changed the slot meanwhile, the evidence is evaluated again with its new
    state. Raises Refusal for unreadable files, and for a stage that the candidate is not in.
    """
    from kcdsl.release.register import Register, Run, Stale

    contract = read_contract(settings.contract)
    checks = replace(
        settings.checks,
        contract=contract.path,
        stage=settings.stage,
        at=time_text(settings.clock()),
    )
    evidence = gather(contract, settings.evidence, checks)
    nothing = Promoted(slot=settings.slot, stage=settings.stage)
    if evidence.invalid or evidence.expected is None:
        return replace(nothing, invalid=evidence.invalid)
    rules = look_rules()
    demands = demanded_obligations(contract.program, rules)
    notes: list[str] = []
    with Register.open(settings.register, clock=settings.clock) as register:
        triple = _candidate(evidence, register, settings.slot)
        about = _Promotion(settings, evidence, demands, rules, triple)
        weak = about.record(register)
        if weak and not about.failures:
            return replace(nothing, triple=triple.digest, invalid=weak)
        for _ in range(_TRIES):
            slot = register.slot(settings.slot)
            look = about.look(register, slot, weak)
            found = look.step
            if len(found.counted) > _MOST_COUNTED:
                raise refuse(
                    PROMOTION_EVIDENCE,
                    f"one look counted {len(found.counted)} digests of evidence; a register keeps "
                    f"at most {_MOST_COUNTED} of a decision",
                    help="give some of the windows now, and the others afterwards",
                )
            register.refuse_counted(settings.slot, triple.digest, about.traffic(found))
            decision = about.decision(look, register, slot)
            withdrawn = about.withdraws(found, slot)
            go_back = partial(about.gone_back, decision)
            changes = look.restarted or found.counted or found.outcome is not PromotionOutcome.HELD
            recorded = bool(changes) and not settings.dry_run
            if recorded:
                for report in about.reports:
                    register.record_run(Run("evaluate", triple.digest, settings.stage, report))
                try:
                    slot = register.promote(
                        *(settings.slot, slot.version),
                        go_back if withdrawn else decision,
                        about.traffic(found),
                    )
                except Stale as stale:
                    notes.append(
                        "the slot changed meanwhile: looked again beside its version "
                        f"{stale.slot.version}"
                    )
                    continue
            told = []
            if withdrawn and (slot.triple if recorded else go_back(register).incumbent) is None:
                told.append(f"{NO_FALLBACK}: {NOTHING_LIVE}")
            return replace(
                nothing,
                triple=triple.digest,
                step=found,
                version=slot.version,
                live=slot.triple,
                recorded=recorded,
                unused={**look.unused, **found.unused},
                notes=(*notes, *look.notes, *told),
            )
    raise refuse(
        PROMOTION_STAGE,
        f"the slot {settings.slot} changed during each of {_TRIES} looks",
        help="run the command again",
    )


def _candidate(evidence: StageEvidence, register: Register, slot: str) -> Triple:
    """Return the triple of the evidence: that of its certificates, else the deployed one of the
    slot."""
    assert evidence.expected is not None
    stated = evidence.triple
    if stated is not None:
        return stated
    return deployed_in(register, slot, evidence.expected.triple, evidence.relaxed_parts)


@dataclass(frozen=True, slots=True)
class _Look:
    """A step, the candidate to record after it, the reasons for ignored files, and whether its
    window restarts because a run is no longer trusted."""

    step: PromotionStep
    progress: StagedCandidate
    unused: Mapping[str, str]
    restarted: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Promotion:
    """The evaluation of the evidence of one candidate."""

    settings: PromoteSettings
    evidence: StageEvidence
    demands: Sequence[DemandedObligation]
    rules: LookRules
    triple: Triple

    def record(self, register: Register) -> dict[str, tuple[str, ...]]:
        """Record certificates and the triple, unless it is a dry run; return why certificates are
        not in force, by file."""
        given, trust = self.evidence.certificates, self.evidence.trust
        if not self.settings.dry_run:
            if given and trust is not None:
                register.record_certificates([b for _, b in given.values()], trust.rules)
            else:
                register.record_triple(self.triple)
        register.refuse_changed(self.triple.digest)
        weak: dict[str, tuple[str, ...]] = {}
        known = register.certificates(triple=self.triple.digest, stage=self.settings.stage)
        failed = (one.sequence for one in known if one.verdict is not Verdict.PASSED)
        newest = max((*self.failures, *failed), default=0)
        for name, (report, bundle) in given.items():
            if report.accepted:
                assert trust is not None
                assert report.predicate is not None
                try:
                    if report.predicate.sequence < newest:
                        why = f"sequence {newest} of this stage did not pass"
                        raise Rejected("register/superseded", why)
                    self._refuse_weak(report, bundle, register, trust.rules)
                except Rejected as error:
                    weak[name] = (error.reason, error.detail)
        return weak

    def _refuse_weak(
        self, report: Report, bundle: bytes, register: Register, trusted: TrustPolicy
    ) -> None:
        """Raise Rejected for a certificate that is not in force, or with too few signatures by keys
        that the register has not revoked, as a check with the register does."""
        from kcdsl.release.register import Standing
        from kcdsl.release.register.step import refuse_keys, refuse_standing, revoked_keys

        assert report.certificate is not None
        assert report.predicate is not None
        now = self.settings.clock()
        status = register.status_of(report.certificate, now)
        if status.standing is not Standing.UNKNOWN or not self.settings.dry_run:
            refuse_standing(status)
        refuse_keys(bundle, trusted, revoked_keys(register), report.predicate.stage, now)

    @property
    def failures(self) -> tuple[int, ...]:
        """Return the sequences of the given certificates that state a failure."""
        given = (report for report, _ in self.evidence.certificates.values())
        return tuple(r.predicate.sequence for r in given if r.predicate and not r.accepted)

    @property
    def reports(self) -> tuple[str, ...]:
        """Return the digests of the reports about the candidate."""
        documents, _ = self.evidence.documents(self.demands, self.triple, self.settings.stage)
        return tuple(d.identity for d in documents if d.kind is DocumentKind.REPORT)

    def traffic(self, found: PromotionStep) -> tuple[str, ...]:
        """Return the digests of the traffic counted by a step: of windows and of their rows."""
        documents, _ = self.evidence.documents(self.demands, self.triple, self.settings.stage)
        windows = (each for each in documents if each.kind is DocumentKind.WINDOW)
        known = {digest for each in windows for digest in (each.identity, *each.parts)}
        return tuple(sorted(known & {*found.counted}))

    def look(self, register: Register, slot: Slot, weak: Mapping[str, tuple[str, ...]]) -> _Look:
        """Return the next state of the candidate for the current slot, without the certificates in
        `weak`; raises Refusal."""
        settings, now = self.settings, self.settings.clock().replace(microsecond=0)
        history = register.promotions(slot=settings.slot, candidate=self.triple.digest)
        previous, withdrawn, ended = candidate_in(history), dict[str, str](), frozenset[str]()
        distrust = untrusted_records(register, self.triple.digest, self._runs(weak))
        counted, passed = untrusted_inputs(distrust.why, history)
        ahead = False
        if previous is not None:
            read = self.evidence.certificates.items()
            given = [r.certificate for name, (r, _) in read if r.certificate and name not in weak]
            withdrawn, ended = standing_of(previous, register, now, given)
            withdrawn |= passed
            previous = without(previous, distrust.why.keys(), counted, now)
            again = begun(previous, now)
            ahead, previous = again != previous, again
        digest, live = self.triple.digest, slot.triple == self.triple.digest
        entered = enter(previous, digest, slot.triple, settings.stage, now, withdrawn)
        barred = entered if isinstance(entered, UnusableEvidence) else None
        candidate = entered.refutable if isinstance(entered, UnusableEvidence) else entered
        if barred is not None and candidate is None:
            raise refuse(PROMOTION_STAGE, barred.why, help=barred.way_out)
        assert candidate is not None
        documents, unused = self.evidence.documents(self.demands, self.triple, settings.stage)
        unused |= {name: f"it is not in force: {why[-1]}" for name, why in weak.items()}
        unused |= self._untrusted(documents, distrust)
        documents = tuple(each for each in documents if each.name not in unused)
        take = partial(
            step,
            candidate,
            self.demands,
            limits=PromotionLimits(settings.window, settings.requests),
            rules=self.rules,
            counted={digest for each in history for digest in each.evidence},
            now=now,
            ended=ended,
            live=live,
            stopped=barred is not None,
        )
        found = take(documents)
        reasons = {
            "it counted untrusted evidence": bool(counted),
            "a clock that was ahead put it into the future": ahead,
        }
        notes = tuple(f"the window begins anew: {why}" for why, holds in reasons.items() if holds)
        if barred is None or found.outcome is PromotionOutcome.ROLLED_BACK:
            return _Look(found, found.candidate, unused, bool(notes), notes)
        found = take([each for each in documents if each.kind is DocumentKind.WINDOW])
        if previous is None or not found.counted:
            raise refuse(PROMOTION_STAGE, barred.why, help=barred.way_out)
        why = f"traffic is counted, and nothing else: {barred.why}; {barred.way_out}"
        return _Look(found, gathered(previous, found.candidate), unused, notes=(*notes, why))

    def withdraws(self, found: PromotionStep, slot: Slot) -> bool:
        """Return whether a step withdraws the live triple of the slot."""
        return found.outcome is PromotionOutcome.ROLLED_BACK and slot.triple == self.triple.digest

    def gone_back(self, decision: Promotion, register: Register) -> Promotion:
        """Return a decision with the triple that becomes live again, by the current register."""
        from kcdsl.release.register import PromotionReason

        now = self.settings.clock()
        target = fallback(register, decision.slot, self.triple.digest, now)
        none = () if target else (PromotionReason(NO_FALLBACK, NOTHING_LIVE),)
        return replace(decision, incumbent=target, reasons=(*decision.reasons, *none))

    def _untrusted(
        self, documents: Sequence[EvidenceDocument], known: UntrustedRecords
    ) -> dict[str, str]:
        """Return why documents are not trusted, by name: their run is, or may be, untrusted."""
        found = {}
        for each in documents:
            why = known.why.get(each.identity)
            if each.kind is DocumentKind.REPORT:
                why = known.of_report(each.identity)
            if why is not None:
                found[each.name] = why
        return found

    def _runs(self, weak: Mapping[str, tuple[str, ...]]) -> dict[str, Run | None]:
        """Return the runs of the given certificates, by the identifier of the certificate."""
        from kcdsl.release.register.admission import run_of

        return {
            report.certificate: run_of(report.predicate)
            for name, (report, _) in self.evidence.certificates.items()
            if report.certificate is not None and report.predicate is not None and name not in weak
        }

    def decision(self, look: _Look, register: Register, slot: Slot) -> Promotion:
        """Return the decision for the register; for a withdrawal of the live triple still without
        the triple that becomes live again."""
        from kcdsl.release.register import Promotion, PromotionReason, PromotionState

        states = {
            PromotionOutcome.ADVANCED: PromotionState.ADVANCED,
            PromotionOutcome.KEPT: PromotionState.ADVANCED,
            PromotionOutcome.HELD: PromotionState.HELD,
            PromotionOutcome.BLOCKED: PromotionState.BLOCKED,
            PromotionOutcome.FROZEN: PromotionState.FROZEN,
            PromotionOutcome.ROLLED_BACK: PromotionState.ROLLED_BACK,
        }
        found, after, stage = look.step, look.progress, self.settings.stage
        live = found.outcome is PromotionOutcome.ADVANCED and after.stage == FULL
        served = slot.triple == self.triple.digest
        new = live and not served
        withdrawn = self.withdraws(found, slot)
        state = PromotionState.PROMOTED if new else states[found.outcome]
        reasons = [PromotionReason(OF_STAGE, text) for text in found.lacking]
        for row in found.rows:
            if row.status in ("violated", "open"):
                numbers = {} if row.n is None else {"beyond": str(row.k), "of": str(row.n)}
                if row.allowed is not None:
                    numbers["allowed"] = real_text(row.allowed)
                reasons.append(PromotionReason(row.clause, row.reason, row.slice, numbers))
        return Promotion(
            slot=slot.name,
            candidate=self.triple.digest,
            incumbent=after.incumbent,
            contract=self.triple.contract.digest,
            stage=FULL if live or withdrawn else stage,
            state=state,
            reasons=tuple(reasons),
            certificates=_in_force(after.signed(stage), register, self.settings.clock()),
            evidence=found.counted,
            progress=after.to_json(),
        )


def _in_force(signed: Sequence[str], register: Register, now: datetime) -> tuple[str, ...]:
    return tuple(one for one in signed if register.status_of(one, now).in_force)
