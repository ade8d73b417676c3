"""The state machine of a candidate: pure functions from a state and evidence to the next state.

A candidate collects evidence of its stage over a *stability window*. It advances if every clause
that the stage demands is shown, nothing is violated, and the window is long enough, in time and in
requests of each slice. Missing, empty or invalid evidence prevents this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from fractions import Fraction

from kcdsl.release.promotion.candidate import CandidateState, StabilityWindow, StagedCandidate
from kcdsl.release.promotion.evidence import DocumentKind, EvidenceDocument, duration, merged
from kcdsl.release.promotion.look import (
    NOT_DUE,
    SHOWN,
    Look,
    LookRow,
    order_of,
    row_of,
    why_unusable,
)
from kcdsl.release.promotion.stages import (
    FULL,
    OFFLINE,
    DemandedObligation,
    LookRules,
    Reaction,
    following,
    worst_reaction,
)

ERROR = Fraction(1, 20)


class PromotionOutcome(StrEnum):
    """The outcome of a look at the evidence."""

    ADVANCED = "advanced"
    KEPT = "kept"
    """At the last stage: the window is complete and nothing is violated."""
    HELD = "held"
    BLOCKED = "blocked"
    FROZEN = "frozen"
    ROLLED_BACK = "rolled-back"


@dataclass(frozen=True, slots=True)
class PromotionLimits:
    """The length of a stability window, its least number of requests of each slice, and the
    probability of a false decision of each kind."""

    window: timedelta
    requests: int
    error: Fraction = ERROR


@dataclass(frozen=True, slots=True)
class PromotionStep:
    """The candidate after a look, the outcome of the look, and the reasons.

    `lacking` lists missing conditions other than clauses, `unused` the ignored documents with
    reasons, `counted` the digests of the used ones.
    """

    candidate: StagedCandidate
    outcome: PromotionOutcome
    rows: tuple[LookRow, ...]
    lacking: tuple[str, ...]
    unused: Mapping[str, str]
    counted: tuple[str, ...]


def step(
    candidate: StagedCandidate,
    demands: Sequence[DemandedObligation],
    documents: Iterable[EvidenceDocument],
    limits: PromotionLimits,
    rules: LookRules,
    *,
    counted: Set[str],
    now: datetime,
    ended: Set[str] = frozenset(),
    live: bool = False,
    stopped: bool = False,
) -> PromotionStep:
    """Return the next state of a candidate; one that is `stopped` is rolled back or held.

    `counted` are the digests used by earlier looks, which are not counted again. `now` is the time
    of the look. `ended` are the identifiers of certificates that are no longer in force.
    `live`: the triple of the candidate is live in the slot.
    """
    by_name = {demand.obligation: demand for demand in demands}
    seen, unused = set(counted), dict[str, str]()
    fresh: list[tuple[EvidenceDocument, frozenset[str]]] = []
    for document in sorted(documents, key=order_of):
        why = why_unusable(document, candidate, by_name, seen, now)
        if why is None:
            marks = _sampled_in_window(candidate, document)
            repeated = frozenset(name for name, own in marks.items() if own & seen)
            seen |= {document.identity, *document.parts, *document.ids}.union(*marks.values())
            fresh.append((document, repeated))
        else:
            unused[document.name] = why
    window = candidate.window
    look = Look(
        candidate,
        by_name,
        rules,
        limits.error,
        dict(window.counts),
        dict(window.traffic),
        {
            name: shown
            for name, shown in candidate.shown.items()
            if (shown.until is None or now < shown.until) and shown.document not in ended
        },
        dict(candidate.looks),
        dict(candidate.planned),
        candidate.documents,
        live,
    )
    served = dict(window.requests)
    for document, repeated in fresh:
        look.take(document, repeated)
        for name, n in document.requests.items():
            served[name] = served.get(name, 0) + n
    periods = [document.period for document, _ in fresh if document.period is not None]
    signed = [d.identity for d, _ in fresh if d.kind is DocumentKind.CERTIFICATE and d.valid]
    certificates = dict(candidate.certificates)
    if signed:
        known = certificates.get(candidate.stage, ())
        certificates[candidate.stage] = tuple(dict.fromkeys((*known, *signed)))
    after = replace(
        candidate,
        window=StabilityWindow(
            window.since,
            look.counts,
            served,
            merged((*window.covered, *periods)),
            look.traffic,
        ),
        documents=look.documents,
        looks=look.looks,
        planned=look.planned,
        shown=look.shown,
        certificates=certificates,
    )
    rows = tuple(row_of(demand, after, look, limits.error) for demand in demands)
    lacking = _lacking(after, demands, limits, ended)
    if stopped or candidate.state is not CandidateState.ACTIVE:
        outcome, after = _rolled_back_or_held(after, by_name, look)
    else:
        outcome, after = _conclude(after, by_name, look, rows, lacking, now)
    return PromotionStep(after, outcome, rows, lacking, unused, tuple(sorted(seen - counted)))


def _sampled_in_window(
    candidate: StagedCandidate, document: EvidenceDocument
) -> dict[str, frozenset[str]]:
    """Return, by obligation, identifiers of the requests that a document sampled in the current
    stability window; empty offline, where the number of looks is limited instead."""
    if candidate.stage == OFFLINE:
        return {}
    where = f"{candidate.stage} {candidate.epoch}"
    return {
        name: frozenset(
            hashlib.sha256(f"{where} {digest} {name}".encode()).hexdigest()
            for digest in document.requests_of
        )
        for name, result in document.results.items()
        if result.evidence == "sample"
    }


def _lacking(
    candidate: StagedCandidate,
    demands: Sequence[DemandedObligation],
    limits: PromotionLimits,
    ended: Set[str],
) -> tuple[str, ...]:
    """Return the missing conditions for the next stage other than clauses."""
    found = []
    if all(identity in ended for identity in candidate.signed(candidate.stage)):
        found.append(f"a certificate of the stage {candidate.stage} that is in force")
    if candidate.stage == OFFLINE:
        return tuple(found)
    lasted = duration(candidate.window.covered)
    if lasted < limits.window:
        found.append(f"windows over {limits.window}; those that count cover {lasted}")
    for name in dict.fromkeys(d.slice for d in demands if d.slice and d.is_due(candidate.stage)):
        there = candidate.window.requests.get(name, 0)
        if there < limits.requests:
            found.append(f"{limits.requests} requests of {name}; there are {there}")
    return tuple(found)


def _rolled_back_or_held(
    candidate: StagedCandidate, demands: Mapping[str, DemandedObligation], look: Look
) -> tuple[PromotionOutcome, StagedCandidate]:
    if Reaction.ROLL_BACK in _reactions(candidate, demands, look):
        back = replace(candidate, state=CandidateState.ROLLED_BACK)
        return PromotionOutcome.ROLLED_BACK, back
    return PromotionOutcome.HELD, candidate


def _reactions(
    candidate: StagedCandidate, demands: Mapping[str, DemandedObligation], look: Look
) -> tuple[Reaction, ...]:
    return tuple(demands[name].reaction(candidate.stage, look.live) for name in look.violated)


def _conclude(
    candidate: StagedCandidate,
    demands: Mapping[str, DemandedObligation],
    look: Look,
    rows: Sequence[LookRow],
    lacking: Sequence[str],
    now: datetime,
) -> tuple[PromotionOutcome, StagedCandidate]:
    reactions = _reactions(candidate, demands, look)
    if reactions:
        match worst_reaction(reactions):
            case Reaction.ROLL_BACK:
                return _rolled_back_or_held(candidate, demands, look)
            case Reaction.FREEZE:
                return PromotionOutcome.FROZEN, replace(candidate, state=CandidateState.FROZEN)
            case Reaction.BLOCK if candidate.stage == OFFLINE:
                return PromotionOutcome.BLOCKED, replace(candidate, state=CandidateState.BLOCKED)
            case Reaction.BLOCK:
                return PromotionOutcome.BLOCKED, _restarted(candidate, now)
    spoiled = any(demands[name].is_due(candidate.stage) for name in look.spoiled)
    if spoiled and candidate.stage != OFFLINE:
        return PromotionOutcome.HELD, _restarted(candidate, now)
    if lacking or not rows or any(row.status not in (SHOWN, NOT_DUE) for row in rows):
        return PromotionOutcome.HELD, candidate
    if candidate.stage == FULL:
        return PromotionOutcome.KEPT, _restarted(candidate, now)
    after = following(candidate.stage)
    kept = candidate.shown if after == FULL else {}
    served = None if after == FULL else candidate.served
    entered = replace(
        candidate, stage=after, window=StabilityWindow(now), shown=kept, served=served
    )
    return PromotionOutcome.ADVANCED, entered


def _restarted(candidate: StagedCandidate, now: datetime) -> StagedCandidate:
    """Return the candidate with a new stability window of its stage."""
    return replace(candidate, epoch=candidate.epoch + 1, window=StabilityWindow(now))


def without(
    candidate: StagedCandidate, documents: Set[str], counted: Set[str], now: datetime
) -> StagedCandidate:
    """Return the candidate without the results of documents, by digest; if its window counted some
    of them (`counted`), a new window begins."""
    if not documents:
        return candidate
    shown = {name: one for name, one in candidate.shown.items() if one.document not in documents}
    own = candidate.certificates.get(candidate.stage, ())
    left = tuple(one for one in own if one not in documents)
    after = replace(
        candidate, shown=shown, certificates={**candidate.certificates, candidate.stage: left}
    )
    return _restarted(after, now) if counted else after


def begun(candidate: StagedCandidate, now: datetime) -> StagedCandidate:
    """Return the candidate with stability windows that have begun: a window that a clock which was
    ahead put into the future leaves all evidence out, also evidence of a violation."""
    served = candidate.served
    if served is not None and served.since > now:
        candidate = replace(candidate, served=StabilityWindow(now))
    return _restarted(candidate, now) if candidate.window.since > now else candidate
