"""One look at evidence: the results of each obligation, and the spending of the error level.

Counts of units accumulate over the documents of a stability window, for any number of looks. An
error level α is spent as follows, so that the probability of a false decision stays below it:

- A rate is tested on the counts of traffic in the whole window (pinned rows would dilute it), or
on those of reports without traffic, at α / (e (e + 1)) in the e-th window of the triple at any
stage, restarts and later attempts included: the terms add up to α. Nothing is promoted from
`full`, so each window there has α.
- An alarm is tested on the counts of the whole window at α / (2 m e (e + 1)), and on those of the
j-th document alone at α / (2 m j (j + 1)), with m rates. The second test finds a late fault
after any amount of good traffic.

Sampled results without counts, such as means, are accepted only within the smallest number of looks
that any document of the stage planned for them, so that the looks of a stage spend at most α.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime
from fractions import Fraction

from kcdsl.release.promotion.candidate import ShownObligation, StagedCandidate
from kcdsl.release.promotion.evidence import DocumentKind, EvidenceDocument, ObligationResult
from kcdsl.release.promotion.stages import FULL, OFFLINE, DemandedObligation, LookRules
from kcdsl.verdict.records import Record
from kcdsl_certs.encoding.strict import time_text
from kcdsl_certs.statement import Evidence

_PROOFS = frozenset(kind.value for kind in Evidence if kind.is_proof)
SHOWN, VIOLATED, OPEN, NOT_DUE = "shown", "violated", "open", "not-due"


@dataclass(frozen=True, slots=True)
class LookRow(Record):
    """The status of one obligation on one slice after a look.

    `status` is "shown", "violated", "open", or "not-due" if the stage does not demand it.
    `k` of `n` units of the window were beyond; `allowed` is the allowed share.
    """

    clause: str
    slice: str | None
    obligation: str
    family: str
    level: str
    requirement: str
    status: str
    reason: str
    k: int | None
    n: int | None
    allowed: Fraction | None
    reaction: str | None


@dataclass(slots=True)
class Look:
    """Collects the results of documents about a candidate."""

    candidate: StagedCandidate
    demands: Mapping[str, DemandedObligation]
    rules: LookRules
    error: Fraction
    counts: dict[str, tuple[int, int]]
    traffic: dict[str, tuple[int, int]]
    shown: dict[str, ShownObligation]
    looks: dict[str, int]
    planned: dict[str, int]
    documents: int
    live: bool = False
    violated: dict[str, str] = field(default_factory=dict)
    spoiled: dict[str, str] = field(default_factory=dict)
    noted: dict[str, str] = field(default_factory=dict)

    @property
    def rates(self) -> int:
        """Return the number of obligations among which alarms share the error."""
        return max(1, sum(demand.is_rate for demand in self.demands.values()))

    def take(self, document: EvidenceDocument, repeated: Set[str]) -> None:
        """Add the results of a document. Results sampled on the requests of another document
        (`repeated`) are ignored unless they are violated or invalid."""
        counting = False
        for name, result in document.results.items():
            demand = self.demands[name]
            if name in repeated and result.verdict not in ("violated", "invalid_evidence"):
                continue
            if result.verdict == "invalid_evidence":
                self.spoiled[name] = f"{document.label}: {result.reason or 'no valid evidence'}"
            elif self.candidate.stage != OFFLINE and demand.is_rate:
                counting |= self._rate(document, demand, result, self.documents + 1)
            else:
                self._single(document, demand, result)
        self.documents += counting

    def _rate(
        self,
        document: EvidenceDocument,
        demand: DemandedObligation,
        result: ObligationResult,
        number: int,
    ) -> bool:
        """Add a rate of traffic; return whether it has counts."""
        name, allowed = demand.obligation, demand.allowed
        assert allowed is not None
        if document.kind is not DocumentKind.WINDOW and result.evidence != "sample":
            # a proof covers traffic too; pinned rows can only refute a rate of traffic
            if result.verdict == "violated":
                self.violated[name] = f"{document.label}: {_beyond(result.k, result.n, allowed)}"
            elif result.verdict == "held" and result.evidence in _PROOFS:
                self.shown[name] = ShownObligation(
                    result.evidence, document.identity, document.valid_until
                )
            return False
        if result.k is None or not result.n or not 0 <= result.k <= result.n:
            if document.kind is DocumentKind.CERTIFICATE and result.verdict == "violated":
                # a signed failure: its evaluation decided on counts that it does not contain
                self.violated[name] = f"{document.label}: {result.reason or 'it did not pass'}"
                return False
            kept = self.spoiled if document.kind is DocumentKind.WINDOW else self.noted
            why = result.reason or "it counts no unit"
            if document.kind is DocumentKind.CERTIFICATE and result.verdict == "held":
                why = "it has no counts; report.json of the same evaluation has"
            kept[name] = f"{document.label}: {why}"
            return False
        k, n = _added(self.counts, name, result.k, result.n)
        if document.kind is DocumentKind.WINDOW:
            _added(self.traffic, name, result.k, result.n)
        epoch = self.candidate.epoch
        whole = self.error / (2 * self.rates * epoch * (epoch + 1))
        alone = self.error / (2 * self.rates * number * (number + 1))
        if self.rules.shows_above(result.k, result.n, allowed, alone):
            self.violated[name] = f"{document.label}: {_beyond(result.k, result.n, allowed)}"
        elif self.rules.shows_above(k, n, allowed, whole):
            self.violated[name] = f"over the whole window, {_beyond(k, n, allowed)}"
        return True

    def _single(
        self, document: EvidenceDocument, demand: DemandedObligation, result: ObligationResult
    ) -> None:
        """Add a result that is not decided by counts of a window."""
        name = demand.obligation
        signed = document.kind is DocumentKind.CERTIFICATE
        read_here = signed or (
            document.kind is DocumentKind.REPORT and self.candidate.stage != OFFLINE
        )
        sampled = result.evidence == "sample"
        place = f"{self.candidate.stage} {name}"
        if sampled and read_here:
            self.looks[place] = self.looks.get(place, 0) + 1
            self.planned[place] = min(self.planned.get(place, document.looks), document.looks)
        if result.verdict == "violated" or (demand.allowed == 0 and (result.k or 0) > 0):
            self.violated[name] = f"{document.label}: {result.reason or _units(result)}"
        elif result.verdict != "held":
            self.noted[name] = f"{document.label}: {result.reason or 'not decided'}"
        elif document.kind is DocumentKind.WINDOW:
            self.noted[name] = "traffic cannot show it: a certificate or a report must"
        elif not read_here:
            self.noted[name] = f"a certificate must show it; {document.label} is not signed"
        elif sampled and self.looks[place] > self.planned[place]:
            self.noted[name] = (
                f"{document.label}: held at look {self.looks[place]}, and the fewest that were"
                f" planned at this stage are {self.planned[place]}"
            )
        else:
            self.shown[name] = ShownObligation(
                result.evidence, document.identity, document.valid_until
            )


def order_of(document: EvidenceDocument) -> tuple[int, str, str]:
    """Return the sort key of a document in a look."""
    kinds = list(DocumentKind)
    end = "" if document.period is None else time_text(document.period.end)
    return kinds.index(document.kind), end, document.identity


def why_unusable(
    document: EvidenceDocument,
    candidate: StagedCandidate,
    demands: Mapping[str, DemandedObligation],
    seen: Set[str],
    now: datetime,
) -> str | None:
    """Return why a document is ignored; None where it is used."""
    if document.identity in seen or (document.parts and document.parts <= seen):
        return "it was counted before"
    if document.parts & seen:
        return "rows of some of its tables were counted before"
    if document.ids & seen:
        return "some of its requests were counted before, by their ids"
    if not document.results:
        return "it has no results"
    unknown = sorted(document.results.keys() - demands.keys())
    if unknown:
        return f"the contract has no obligation {unknown[0]}"
    if document.period is None:
        return None
    if document.period.end > now:
        return f"it ends at {time_text(document.period.end)}, which is still to come"
    if document.period.start < candidate.window.since:
        begun = time_text(candidate.window.since)
        return f"it began before the stability window, which began at {begun}"
    return None


def row_of(
    demand: DemandedObligation, candidate: StagedCandidate, look: Look, error: Fraction
) -> LookRow:
    """Return the row of an obligation after a look."""
    name, stage = demand.obligation, candidate.stage
    k, n = look.traffic.get(name) or look.counts.get(name) or (None, None)
    status, reason, reacts = OPEN, look.noted.get(name, "there is no evidence"), None
    if name in look.violated:
        status, reason = VIOLATED, look.violated[name]
        reacts = demand.reaction(stage, look.live)
    elif name in look.spoiled:
        reason = look.spoiled[name]
    elif name in look.shown:
        status, reason = SHOWN, f"by {look.shown[name].by}"
    elif k is not None and n is not None and demand.is_rate:
        assert demand.allowed is not None
        reason = _beyond(k, n, demand.allowed)
        if look.rules.shows_below(k, n, demand.allowed, _error_of(candidate, error)):
            status = SHOWN
        else:
            reason = f"not shown yet: {reason}"
    if status is OPEN and not demand.is_due(stage):
        status, reason = NOT_DUE, f"{stage} does not demand it"
    return LookRow(
        demand.clause,
        demand.slice,
        name,
        demand.family.value,
        demand.level.value,
        demand.requirement,
        status,
        reason,
        k,
        n,
        demand.allowed,
        None if reacts is None else reacts.value,
    )


def _error_of(candidate: StagedCandidate, error: Fraction) -> Fraction:
    """Return the error level of the current window for showing a rate."""
    if candidate.stage == FULL:
        return error
    return error / (candidate.epoch * (candidate.epoch + 1))


def _added(counts: dict[str, tuple[int, int]], name: str, k: int, n: int) -> tuple[int, int]:
    """Add k of n units to the counts of an obligation, and return the counts."""
    before = counts.get(name, (0, 0))
    counts[name] = before[0] + k, before[1] + n
    return counts[name]


# --- words ----------------------------------------------------------------------------------------


def _beyond(k: int | None, n: int | None, allowed: Fraction) -> str:
    if k is None or n is None:
        return f"more than {float(100 * allowed):.6g} % are beyond"
    share = f"{100 * k / n:.3g} %" if n else "none"
    return f"{k} of {n} are beyond ({share}), {float(100 * allowed):.6g} % may be"


def _units(result: ObligationResult) -> str:
    if result.k is None or result.n is None:
        return "the requirement does not hold"
    return f"{result.k} of {result.n} are beyond, none may be"
