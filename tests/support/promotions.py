"""Short constructors of demands, documents and candidates of promotions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from hashlib import sha256
from typing import Any

from kcdsl.ir.terms import Family, Level
from kcdsl.release.promotion import (
    FULL,
    OFFLINE,
    DemandedObligation,
    DocumentKind,
    EvidenceDocument,
    ObligationResult,
    Period,
    PromotionLimits,
    PromotionOutcome,
    PromotionStep,
    StagedCandidate,
    enter,
    step,
)
from kcdsl_backends.empirical.questions.looks import RULES
from kcdsl_certs.statement import STAGES

START = datetime(2026, 11, 30, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
LIMITS = PromotionLimits(HOUR, 100)
TRIPLE, LIVE = "a" * 64, "b" * 64
PERCENT = Fraction(1, 100)


def digest(name: str) -> str:
    """Return a digest that a name stands for."""
    return sha256(name.encode()).hexdigest()


def demand(
    clause: str = "N",
    slice: str = "all",
    *,
    family: Family = Family.NUMERICAL,
    level: Level = Level.L2,
    action: str = "log",
    allowed: Fraction | None = PERCENT,
    hard: bool = True,
    repeatable: bool = True,
) -> DemandedObligation:
    """Return a demand; by default a hard percentile clause of L2."""
    return DemandedObligation(
        f"{clause}/{slice}/0",
        clause,
        slice,
        family,
        level,
        action,
        hard,
        repeatable,
        allowed,
        clause,
    )


def certificate(
    name: str,
    results: Mapping[str, ObligationResult],
    *,
    valid: bool = True,
    until: datetime | None = None,
) -> EvidenceDocument:
    """Return a certificate with these results by obligation."""
    return EvidenceDocument(
        DocumentKind.CERTIFICATE,
        name,
        digest(name),
        frozenset(),
        results,
        requests_of=frozenset({digest("data")}),
        valid_until=until,
        valid=valid,
    )


def window(
    name: str,
    results: Mapping[str, ObligationResult],
    *,
    start: datetime = START,
    lasts: timedelta = HOUR,
    requests: int = 1000,
    slices: Iterable[str] = ("all",),
) -> EvidenceDocument:
    """Return a window of traffic with its own table."""
    return EvidenceDocument(
        DocumentKind.WINDOW,
        name,
        digest(f"file {name}"),
        frozenset({digest(f"table {name}")}),
        results,
        period=Period(start, start + lasts),
        requests=dict.fromkeys(slices, requests),
    )


def counts(k: int, n: int, evidence: str = "sample") -> ObligationResult:
    """Return a result of counts; the verdict follows from k/n."""
    return ObligationResult("violated" if k > n * PERCENT else "held", evidence, k, n)


HELD = ObligationResult("held", "census")


def at(stage: str, **changes: Any) -> StagedCandidate:
    """Return an active candidate that has just entered a stage."""
    found = enter(None, TRIPLE, LIVE, OFFLINE, START)
    assert isinstance(found, StagedCandidate)
    earlier = {one: (digest(one),) for one in STAGES[: STAGES.index(stage)]}
    return replace(found, **{"stage": stage, "certificates": earlier, **changes})


def look(
    candidate: StagedCandidate,
    demands: Iterable[DemandedObligation],
    *documents: EvidenceDocument,
    limits: PromotionLimits = LIMITS,
    counted: Iterable[str] = (),
    now: datetime = START + 2 * HOUR,
    **more: Any,
) -> PromotionStep:
    """Return the step of a candidate."""
    return step(
        candidate,
        tuple(demands),
        documents,
        limits,
        RULES,
        counted=frozenset(counted),
        now=now,
        **more,
    )


def passing(
    stage: str, demands: Iterable[DemandedObligation], n: int = 2000
) -> tuple[EvidenceDocument, ...]:
    """Return evidence that passes a stage."""
    demands = tuple(demands)
    shown = certificate(f"certificate of {stage}", {d.obligation: HELD for d in demands})
    if stage == OFFLINE:
        return (shown,)
    traffic = {d.obligation: counts(0, n) for d in demands if d.is_rate}
    slices = {d.slice or "" for d in demands}
    return shown, window(f"window of {stage}", traffic, requests=n, slices=slices)


ADVANCES = {
    stage: PromotionOutcome.KEPT if stage == FULL else PromotionOutcome.ADVANCED for stage in STAGES
}
