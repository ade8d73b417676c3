"""Records of a candidate in a register: its last state, and the status of its certificates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import REGISTER_DAMAGED
from kcdsl.release.promotion.candidate import StagedCandidate
from kcdsl.release.promotion.documents import is_about
from kcdsl.release.promotion.stages import OFFLINE
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.statement import Triple, Verdict, differences, relaxed

if TYPE_CHECKING:
    from kcdsl.release.register import CertificateStatus, Promotion, Register, Run


def candidate_in(history: Sequence[Promotion]) -> StagedCandidate | None:
    """Return the candidate after its last decision; None without a decision.

    Raises Refusal for a malformed record.
    """
    return _after(history[-1]) if history else None


def _after(last: Promotion) -> StagedCandidate:
    try:
        found = StagedCandidate.from_json(dict(last.progress))
        if found.triple != last.candidate:
            raise Rejected("candidate/other", "it is about another triple")
    except Rejected as error:
        raise refuse(
            REGISTER_DAMAGED,
            f"the decision {last.number} about {last.slot} does not say where its candidate is: "
            f"{error.detail}",
            help="`kcdsl promote` records decisions; begin the candidate anew in another slot",
        ) from error
    return found


@dataclass(frozen=True, slots=True)
class UntrustedRecords:
    """The untrusted runs and documents of a triple in a register.

    A report is not signed and names neither its run nor its stage, so it can be forged. If a run of
    the triple is untrusted, for the reason `marked`, a report is used only if it is `named`: a
    certificate states its digest, and its run is trusted. `why` has the reasons for reports and
    certificates, by digest.
    """

    why: Mapping[str, str] = field(default_factory=dict)
    marked: str | None = None
    named: frozenset[str] = frozenset()

    def of_report(self, identity: str) -> str | None:
        """Return why a report is not trusted; None where it is."""
        if self.marked is None or identity in self.why or identity in self.named:
            return self.why.get(identity)
        return f"no certificate names it, and it may be of another run: {self.marked}"


def untrusted_records(
    register: Register, triple: str, given: Mapping[str, Run | None] = MappingProxyType({})
) -> UntrustedRecords:
    """Return the distrust about a triple: the marked runs, and documents with the report or trace
    of a marked run. `given` has the runs of certificates that may not be recorded yet, by
    identifier."""
    told = {
        run: f"the register does not trust it: {run.reason}"
        for run in register.runs(triple=triple, trusted=False)
    }
    if not told:
        return UntrustedRecords()
    why = {run.report: text for run, text in told.items()}
    traces = {run.trace: text for run, text in told.items() if run.trace is not None}
    recorded = (one.identity for one in register.certificates(triple=triple))
    signed = dict(given) | {one: register.run_of(one) for one in recorded}
    for run in signed.values():
        if run is not None and run.trace is not None and run.report in why:
            traces[run.trace] = why[run.report]
    named: set[str] = set()
    for identity, run in signed.items():
        if run is None:
            continue
        text = why.get(run.report) or traces.get(run.trace or "")
        if text is not None:
            why[identity] = why[run.report] = text
        elif register.status_of(identity).standing.name != "REVOKED":
            named.add(run.report)
    found = UntrustedRecords(why, next(iter(told.values())), frozenset(named))
    for run in register.runs(triple=triple, trusted=True):
        text = found.of_report(run.report)
        if text is not None:
            why[run.report] = text
    return found


def untrusted_reports(
    register: Register, reports: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> dict[str, str]:
    """Return why reports are not trusted, by name: their run is, or may be, untrusted.

    `reports` has the sha256 and the document of each. Raises KeyError, TypeError or ValueError for
    a report without usable fields.
    """
    found: dict[str, str] = {}
    for digest in dict.fromkeys(run.triple for run in register.runs(trusted=False)):
        known, triple = untrusted_records(register, digest), register.triple(digest)
        for name, (identity, document) in reports.items():
            why = known.why.get(identity)
            if why is None and triple is not None and is_about(document, triple):
                why = known.of_report(identity)
            if why is not None:
                found.setdefault(name, why)
    return found


def untrusted_inputs(
    why: Mapping[str, str], history: Sequence[Promotion]
) -> tuple[frozenset[str], dict[str, str]]:
    """Return the untrusted documents that the current window of a candidate counts, and the reasons
    for those by which it advanced in its current attempt."""
    passed: set[str] = set()
    window: set[str] = set()
    before: StagedCandidate | None = None
    for each in history if why else ():
        after = _after(each)
        if before is None or before.attempt != after.attempt:
            passed, window = set(), set()
            before = replace(after, stage=OFFLINE, shown={})
        elif after.stage == before.stage != each.stage:
            continue  # traffic of a live triple that restarted
        window = {*each.evidence} | (window if before.epoch == after.epoch else set())
        if after.stage != before.stage:
            passed |= window | {one.document for one in before.shown.values()}
            passed |= {*after.certificates.get(before.stage, ())}
            window = set()
        before = after
    return frozenset(why.keys() & window), {one: why[one] for one in why.keys() & passed}


def deployed_in(
    register: Register,
    slot: str,
    deployed: Triple,
    parts: Collection[str],
    *,
    serving: bool = False,
) -> Triple:
    """Return the triple of a slot that equals the deployed one except for the host and `parts` of
    its kernels, because it may have been certified on another machine; the deployed one if there is
    none. With `serving` no part may differ if a certificate has results that depend on the machine,
    as in a check."""
    known = dict.fromkeys(each.candidate for each in reversed(register.promotions(slot=slot)))
    for digest in dict.fromkeys((deployed.digest, *known)):
        triple = register.triple(digest) if digest in known else None
        if triple is None or differences(triple, relaxed(triple, deployed, {*parts, "host"})):
            continue
        if digest == deployed.digest or not (serving and _is_of_a_machine(register, digest)):
            return triple
    return deployed


def _is_of_a_machine(register: Register, triple: str) -> bool:
    return any(
        result.quantity.is_of_a_machine
        for each in register.certificates(triple=triple)
        for result in register.results_of(each.identity)
    )


def why_withdrawn(register: Register, status: CertificateStatus) -> str | None:
    """Return why a certificate is withdrawn: it is unknown, revoked, or superseded, directly or
    through others, by one that did not pass. An expired certificate is not withdrawn (None).
    """
    why = ""
    while status.standing.name == "SUPERSEDED" and status.by is not None:
        newer = register.certificate(status.by)
        if newer is None or newer.verdict is not Verdict.PASSED:
            return why + status.detail
        why += f"the certificate {newer.identity[:12]} that supersedes it: "
        status = register.status_of(newer.identity)
    return why + status.detail if status.standing.name in ("REVOKED", "UNKNOWN") else None


def standing_of(
    candidate: StagedCandidate, register: Register, now: datetime, given: Collection[str] = ()
) -> tuple[dict[str, str], frozenset[str]]:
    """Return why certificates of a candidate are withdrawn, by identifier, and which are not in
    force. A certificate in `given` does not withdraw those that it supersedes: the look at it
    decides."""
    withdrawn: dict[str, str] = {}
    ended = set()
    for identity in dict.fromkeys(one for each in candidate.certificates.values() for one in each):
        status = register.status_of(identity, now)
        if status.in_force:
            continue
        ended.add(identity)
        why = why_withdrawn(register, status)
        if why is not None and status.by not in given:
            withdrawn[identity] = why
    return withdrawn, frozenset(ended)
