"""Candidates: the state of a triple in the stages of a slot, as a value and as JSON data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from kcdsl.release.promotion.evidence import Period
from kcdsl.release.promotion.stages import CANARY, FULL, OFFLINE
from kcdsl_certs.encoding.records import (
    COUNT,
    DIGEST,
    TEXT,
    TIME,
    Record,
    RecordField,
    by_name,
    constant,
    many,
    member,
    one_of,
)
from kcdsl_certs.statement import STAGES

SCHEMA = "kcdsl.candidate/1"


class CandidateState(StrEnum):
    """The state of a candidate within its stage."""

    ACTIVE = "active"
    BLOCKED = "blocked"
    FROZEN = "frozen"
    ROLLED_BACK = "rolled-back"


@dataclass(frozen=True, slots=True)
class ShownObligation:
    """An obligation that a document shows without counts: the kind of evidence, the identifier of
    the document, and its expiry; None: it does not expire during the stage."""

    by: str
    document: str
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class StabilityWindow:
    """The evidence since the window began: counts (k, n) by obligation, requests by slice, and the
    periods covered. `traffic` has only the counts of windows, without those of reports and
    certificates."""

    since: datetime
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)
    covered: tuple[Period, ...] = ()
    traffic: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StagedCandidate:
    """The state of a triple in the stages of a slot.

    Args:
        triple: its digest, sha256 in hex.
        incumbent: the digest of the live triple when it began; None where there was none.
        stage: the stage whose evidence is collected.
        state: whether it may advance.
        attempt: the number of times it began at the first stage.
        epoch: the number of its current stability window.
        documents: the number of documents with counts, over all stages and attempts.
        looks: the number of sampled results without counts, by stage and obligation.
        planned: the smallest number of looks that any of them was planned for, likewise.
        shown: obligations that documents of this stage show without counts.
        certificates: the identifiers of the accepted certificates, by stage.
        served: the window at `full` of a live triple that restarted; None for any other triple.
    """

    triple: str
    incumbent: str | None
    stage: str
    state: CandidateState
    attempt: int
    epoch: int
    window: StabilityWindow
    documents: int = 0
    looks: Mapping[str, int] = field(default_factory=dict)
    planned: Mapping[str, int] = field(default_factory=dict)
    shown: Mapping[str, ShownObligation] = field(default_factory=dict)
    certificates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    served: StabilityWindow | None = None

    def signed(self, stage: str) -> tuple[str, ...]:
        """Return the certificates of a stage; `full` uses those of canary."""
        own = self.certificates.get(stage, ())
        return (*self.certificates.get(CANARY, ()), *own) if stage == FULL else own

    def to_json(self) -> dict[str, Any]:
        """Return JSON data without floats for the register."""
        return _CANDIDATE.write(self)

    @staticmethod
    def from_json(value: Any) -> StagedCandidate:
        """Read the record of `to_json`; raises Rejected."""
        return _CANDIDATE.read(value, "candidate")


_PERIOD = Record(Period, RecordField("from", TIME, "start"), RecordField("until", TIME, "end"))
_COUNTS = Record(
    lambda beyond, of: (beyond, of),
    RecordField("beyond", COUNT, get=lambda counts: counts[0]),
    RecordField("of", COUNT, get=lambda counts: counts[1]),
)
_WINDOW = Record(
    StabilityWindow,
    RecordField("since", TIME),
    RecordField("counts", by_name(_COUNTS.codec)),
    RecordField("requests", by_name(COUNT)),
    RecordField("covered", many(_PERIOD.codec)),
    RecordField("traffic", by_name(_COUNTS.codec), absent={}),
)
_SHOWN = Record(
    ShownObligation,
    RecordField("by", TEXT),
    RecordField("document", DIGEST),
    RecordField("until", TIME, absent=None),
)
_CANDIDATE: Record[StagedCandidate] = Record(
    lambda schema, **found: StagedCandidate(**found),
    RecordField("schema", constant(SCHEMA), get=lambda candidate: SCHEMA),
    RecordField("triple", DIGEST),
    RecordField("incumbent", DIGEST, absent=None),
    RecordField("stage", one_of(STAGES)),
    RecordField("state", member(CandidateState)),
    RecordField("attempt", COUNT),
    RecordField("epoch", COUNT),
    RecordField("window", _WINDOW.codec),
    RecordField("documents", COUNT),
    RecordField("looks", by_name(COUNT)),
    RecordField("planned", by_name(COUNT)),
    RecordField("shown", by_name(_SHOWN.codec)),
    RecordField("certificates", by_name(many(DIGEST))),
    RecordField("served", _WINDOW.codec, absent=None),
)


# --- entering a stage -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnusableEvidence:
    """The candidate cannot use the evidence: it is in another stage or stopped.

    `refutable` is the candidate to judge by this evidence if its triple is live: it may be rolled
    back, and otherwise counts are kept (`gathered`).
    """

    why: str
    way_out: str
    refutable: StagedCandidate | None = None


def enter(
    previous: StagedCandidate | None,
    triple: str,
    live: str | None,
    stage: str,
    now: datetime,
    withdrawn: Mapping[str, str] = MappingProxyType({}),
) -> StagedCandidate | UnusableEvidence:
    """Return the candidate before new evidence of a stage is applied.

    `previous` is the last state of this triple in the slot, `live` the triple that is live there,
    and `withdrawn` maps digests of withdrawn evidence to reasons. Other weights, kernel builds or
    contracts are another triple, which begins at the first stage. A candidate restarts there if it
    was blocked, frozen or rolled back, if its incumbent was replaced meanwhile, or if its evidence
    was withdrawn. No stage is skipped.

    A stopped candidate that is live still serves: UnusableEvidence then has the candidate to roll
    back.
    """
    if previous is None:
        if stage != OFFLINE:
            return UnusableEvidence(
                f"the triple {triple[:12]} is not in the stage {stage}: it has passed none",
                f"every triple begins at {OFFLINE}; other weights, kernels or a changed contract "
                "are another triple",
            )
        return StagedCandidate(
            triple, live, OFFLINE, CandidateState.ACTIVE, 1, 1, StabilityWindow(now)
        )
    stopped = _why_stopped(previous, live, withdrawn)
    if stopped is not None and stage == OFFLINE:
        return StagedCandidate(
            triple,
            previous.incumbent if live == triple else live,
            OFFLINE,
            CandidateState.ACTIVE,
            previous.attempt + 1,
            previous.epoch + 1,
            StabilityWindow(now),
            previous.documents,
            previous.looks,
            previous.planned,
            served=_at_full(previous) if live == triple else None,
        )
    refutable = _served(previous, stage) if live == triple else None
    if stopped is not None:
        why = f"the triple {triple[:12]} {stopped}"
        return UnusableEvidence(why, f"it begins anew at {OFFLINE}", refutable)
    if stage != previous.stage:
        return UnusableEvidence(
            f"the triple {triple[:12]} is in the stage {previous.stage}, not in {stage}",
            f"give evidence of {previous.stage}; no stage is left out or repeated",
            refutable,
        )
    return previous


def _why_stopped(
    previous: StagedCandidate, live: str | None, withdrawn: Mapping[str, str]
) -> str | None:
    """Return why a candidate cannot continue; None where it can."""
    if previous.state is not CandidateState.ACTIVE:
        return f"is {previous.state} in the stage {previous.stage}"
    displaced = previous.stage == FULL and live != previous.triple
    if displaced or live not in (previous.incumbent, previous.triple):
        return f"has another incumbent: {(live or 'nothing')[:12]} is live now"
    gone = next(iter(withdrawn), None)
    return None if gone is None else f"rests on sha256:{gone[:12]}: {withdrawn[gone]}"


def _served(previous: StagedCandidate, stage: str) -> StagedCandidate:
    """Return a live candidate for evidence of a stage, without counts of other stages."""
    if stage == previous.stage:
        return previous
    gathered = _at_full(previous) if stage == FULL else None
    window = gathered or StabilityWindow(previous.window.since)
    return replace(previous, stage=stage, window=window)


def _at_full(candidate: StagedCandidate) -> StabilityWindow | None:
    return candidate.window if candidate.stage == FULL else candidate.served


def gathered(previous: StagedCandidate, looked: StagedCandidate) -> StagedCandidate:
    """Return a stopped live candidate with the counts of a look that did not roll it back, so that
    a slow regression accumulates over looks."""
    after = replace(previous, documents=looked.documents)
    if looked.stage == previous.stage:
        return replace(after, window=looked.window)
    return replace(after, served=looked.window) if looked.stage == FULL else after
