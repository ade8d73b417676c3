"""The document of `kcdsl why`: causes of a failure in production.

There are three possible causes: the contract admits the failure, the kernel build regressed, or the
update of the model interacted with the kernels. A change is a cause if the clause held without it,
is violated with it, and the paired difference of the two runs is significant.

Plain frozen data, JSON with the schema "kcdsl.why/1" (`why.schema.json`) and nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, Literal

from kcdsl.exits import Exit
from kcdsl.ir.obligations import HOLDS, obligations_of, slices_of
from kcdsl.ir.tables import expand_tables
from kcdsl.ir.terms import Clause, Program
from kcdsl.verdict.records import DocumentRecord, Record
from kcdsl.verdict.report import deferred_name
from kcdsl.verdict.studies.comparison import PairedRow, regression_text
from kcdsl_certs.encoding.reals import parse_real
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.statement import CertifiedClause, Verdict

Factor = Literal["kernels", "checkpoint"]
Place = tuple[str, str]
"""The checkpoint and the kernels of a run, each `PREVIOUS` or `PRESENT`."""
Certified = Mapping[str, tuple[CertifiedClause, str]]
"""Results of certificates, with the identifier of the certificate, by obligation."""

PREVIOUS, PRESENT = "previous", "present"
CHECKPOINT: Factor = "checkpoint"
KERNELS: Factor = "kernels"
INTERACTION = "interaction"
FAILED = (PRESENT, PRESENT)
"""The run to be explained."""
EFFECTS: Mapping[tuple[str, str], tuple[Place, ...]] = {
    (KERNELS, PREVIOUS): ((PREVIOUS, PREVIOUS), (PREVIOUS, PRESENT)),
    (KERNELS, PRESENT): ((PRESENT, PREVIOUS), FAILED),
    (CHECKPOINT, PREVIOUS): ((PREVIOUS, PREVIOUS), (PRESENT, PREVIOUS)),
    (CHECKPOINT, PRESENT): ((PREVIOUS, PRESENT), FAILED),
    (INTERACTION, ""): (
        (PREVIOUS, PREVIOUS), (PREVIOUS, PRESENT), (PRESENT, PREVIOUS), FAILED,
    ),
}  # fmt: skip
"""The changed factor, the state of the other factor, and the runs that show it, the earlier ones
first."""


@dataclass(frozen=True, slots=True)
class AgreedRow(Record):
    """One obligation on the trace, and whether the run satisfies it.

    `value` and `threshold` are in base units of `unit`. `certified` is the bound, or the confidence
    limit, of the newest certificate in force; `certificate` is one that shows an obligation which
    the run leaves open.
    """

    obligation: str
    clause: str
    slice: str
    level: str
    requirement: str
    unit: str
    op: str
    threshold: float | None
    value: float | None
    verdict: str
    state: Literal["inside", "outside", "open"]
    certified: float | None = None
    certificate: str | None = None
    reason: str = ""

    @property
    def label(self) -> str:
        """Return its name: clause, slice and level."""
        level = self.level and f"({self.level})"
        return " ".join(filter(None, (self.clause, self.slice, level)))


@dataclass(frozen=True, slots=True)
class RunEvidence(Record):
    """The run of one checkpoint with one pair of kernels, its identifier in the register, and its
    verdict; `missing` describes the run that would be needed where there is none."""

    checkpoint: str
    kernels: str
    source: Literal["file", "evaluated", "missing"]
    file: str | None = None
    run: str | None = None
    verdict: str | None = None
    missing: str = ""

    @property
    def place(self) -> Place:
        """Return the checkpoint and the kernels of the run."""
        return self.checkpoint, self.kernels

    @property
    def title(self) -> str:
        """Return its place in words."""
        return f"the {self.checkpoint} checkpoint with the {self.kernels} kernels"


@dataclass(frozen=True, slots=True)
class Effect(Record):
    """The effect of a change of one factor while the other factor has the state `at`.

    For an interaction, `delta` is the difference of two differences, and `worse` and `better` count
    units by its sign.
    """

    factor: str
    at: str
    rows: tuple[PairedRow, ...]


@dataclass(frozen=True, slots=True)
class Cause(Record):
    """One of the three causes, the evidence for or against it, and missing evidence."""

    cause: Literal["contract", "kernels", "checkpoint"]
    state: Literal["shown", "excluded", "undecided"]
    because: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation(DocumentRecord):
    """The causes of a failure, with their evidence.

    `found_by` states how the previous triple was found, or why there is none, `changed` the
    differences to the present one, by factor, `distrusted` why the trace is not used as evidence,
    and `refused` the decisions that blocked, froze or rolled back the triple by this contract.
    """

    schema: ClassVar[str] = "kcdsl.why/1"
    derived: ClassVar[tuple[str, ...]] = ("causes", "exit")

    trace: str
    contract: Mapping[str, str]
    triple: str | None
    previous: str | None
    found_by: str
    changed: Mapping[str, tuple[str, ...]]
    error: float
    agreed: tuple[AgreedRow, ...]
    runs: tuple[RunEvidence, ...]
    effects: tuple[Effect, ...]
    distrusted: str = ""
    refused: tuple[str, ...] = ()
    unused: Mapping[str, str] = field(default_factory=dict)

    @property
    def causes(self) -> tuple[Cause, Cause, Cause]:
        """Return the three causes: contract, kernels, checkpoint."""
        if self.distrusted:
            lacking = (self.distrusted,)
            return (
                Cause("contract", "undecided", (), lacking),
                Cause("kernels", "undecided", (), lacking),
                Cause("checkpoint", "undecided", (), lacking),
            )
        return (
            _contract(self.agreed, self.refused),
            _change(self, KERNELS, _by_kernels),
            _change(self, CHECKPOINT, _by_checkpoint),
        )

    @property
    def exit(self) -> Exit:
        """Return 1 where a cause is shown, 3 where none is and one is undecided, else 0."""
        states = {cause.state for cause in self.causes}
        if "shown" in states:
            return Exit.VIOLATED
        return Exit.INCONCLUSIVE if "undecided" in states else Exit.HELD

    def row(self, factor: str, at: str, obligation: str) -> PairedRow | None:
        """Return an obligation in an effect; None where a run is missing or did not decide it."""
        found = (e for e in self.effects if (e.factor, e.at) == (factor, at))
        return next((row for e in found for row in e.rows if row.obligation == obligation), None)


# --- what was agreed ------------------------------------------------------------------------------


def agreed_rows(
    report: Mapping[str, Any], program: Program | None, certified: Certified
) -> Iterator[AgreedRow]:
    """Yield every obligation of a contract, and whether the run of a report satisfies it.

    `certified` are results of certificates in force, used where the run leaves an obligation open.
    Raises KeyError, TypeError or ValueError for a malformed document.
    """
    for row in report["clauses"]:
        signed, verdict = certified.get(row["obligation"]), row["verdict"]
        shown = verdict == "inconclusive" and signed is not None and _admits(signed[0], row)
        known = [row[name] for name in _FIELDS]
        yield _agreed(known, _STATES.get(verdict, "open"), signed, shown, row["reason"] or "")
    clauses = () if program is None else expand_tables(program).clauses
    for name, why in report["deferred"].items():
        stated = [
            (clause, slice)
            for clause in clauses
            for slice in dict.fromkeys((None, *slices_of(clause)))
            if deferred_name(clause.id, slice) == name
        ]
        for clause, slice in stated:
            yield from _deferred(clause, slice, why, certified)
        if not stated:
            unknown = (name, name, "", *[""] * 4, None, None, "not_decided")
            yield _agreed(unknown, "open", None, False, why)


_FIELDS = (
    *("obligation", "clause", "slice", "level", "requirement"),
    *("unit", "op", "threshold", "value", "verdict"),
)
_STATES: Mapping[str, Any] = {"held": "inside", "violated": "outside"}


def _deferred(
    clause: Clause, slice: str | None, why: str, certified: Certified
) -> Iterator[AgreedRow]:
    """Yield obligations that measurement does not decide but a certificate may show."""
    for part in slices_of(clause) if slice is None else (slice,):
        for obligation in obligations_of(clause, part):
            signed = certified.get(obligation.id)
            shown = signed is not None and signed[0].verdict is Verdict.PASSED
            named = (obligation.id, clause.id, part or "", clause.level.value, clause.text)
            limit: tuple[str, str, float | None] = ("", "", None)
            if signed is not None:
                limit = (signed[0].unit, signed[0].op, float(signed[0].tau))
            yield _agreed((*named, *limit, None, "not_decided"), "open", signed, shown, why)


def _agreed(
    known: Sequence[Any],
    state: Any,
    signed: tuple[CertifiedClause, str] | None,
    shown: bool,
    reason: str,
) -> AgreedRow:
    limit, identity = (None, None) if signed is None else (_limit(signed[0]), signed[1])
    more = ("inside", limit, identity, reason) if shown else (state, limit, None, reason)
    return AgreedRow(*known, *more)


def _admits(result: CertifiedClause, row: Mapping[str, Any]) -> bool:
    """Return whether a certificate shows a requirement, and the value of the run satisfies both
    the threshold and the certified bound."""
    exact = row["exact"]
    if result.verdict is not Verdict.PASSED or result.op != row["op"] or None in exact.values():
        return False
    bound = result.tau if result.bound is None else Fraction(result.bound)
    try:
        value, threshold = parse_real(exact["value"]), parse_real(exact["threshold"])
    except Rejected as error:
        raise ValueError(error.detail) from None
    return threshold == result.tau and all(
        HOLDS[result.op](value, limit) for limit in (result.tau, bound)
    )


def _limit(result: CertifiedClause) -> float | None:
    limit = result.low if result.op in (">=", ">") else result.high
    return limit if result.bound is None else result.bound


def _contract(rows: Sequence[AgreedRow], refused: tuple[str, ...]) -> Cause:
    """Decide whether the contract is a cause: it is too loose if the run satisfies every clause,
    and no decision refused the triple for a violated one."""
    outside = tuple(f"{row.label} is violated" for row in rows if row.state == "outside")
    if outside or refused:
        return Cause("contract", "excluded", (*outside, *refused))
    signed = [row for row in rows if row.certificate is not None]
    because = tuple(f"{row.label}: certified by sha256:{row.certificate}" for row in signed)
    left = tuple(f"{row.label}: {row.reason}" for row in rows if row.state == "open")
    if left or not rows:
        return Cause("contract", "undecided", because, left or ("no clause was decided",))
    held = f"{len(rows) - len(signed)} of {len(rows)} rows hold on the trace"
    return Cause("contract", "shown", (held, *because))


# --- a change -------------------------------------------------------------------------------------


_Finding = tuple[bool | None, str]
"""Whether a change broke an obligation, None if undecided, and the reason."""


def _change(
    told: Explanation, factor: Factor, decide: Callable[[Explanation, AgreedRow], _Finding]
) -> Cause:
    """Decide whether a change is a cause: it broke an obligation that the trace violates."""
    if told.previous is not None and not told.changed[factor]:
        return Cause(factor, "excluded", (f"the {factor} did not change",))
    outside = [row for row in told.agreed if row.state == "outside"]
    left = tuple(f"{row.label}: {row.reason}" for row in told.agreed if row.state == "open")
    if told.refused and not outside:
        left = ("a run of the requests that violated a clause: the trace does not hold them", *left)
    if not told.agreed or (told.previous is None and (outside or left)):
        return Cause(factor, "undecided", (), (told.found_by, *left))
    found = [decide(told, row) for row in outside]
    shown, against, missing = (
        tuple(dict.fromkeys(why for broke, why in found if broke is answer))
        for answer in (True, False, None)
    )
    if shown:
        return Cause(factor, "shown", shown, missing)
    if missing or left:
        return Cause(factor, "undecided", against, (*missing, *left))
    return Cause(factor, "excluded", against or ("no clause is violated on the trace",))


def _by_kernels(told: Explanation, row: AgreedRow) -> _Finding:
    """Return whether the kernels broke an obligation with the previous checkpoint too; if only with
    the present one, the cause is an interaction."""
    late = _broke(told, KERNELS, PRESENT, row)
    if not told.changed[CHECKPOINT]:
        return late
    early = _broke(told, KERNELS, PREVIOUS, row)
    alone = _before(told, CHECKPOINT, row)
    if early[0]:
        return early
    if alone == "held":
        return False, f"{row.label}: the previous checkpoint holds with the present kernels"
    if late[0] and alone != "violated":
        unknown = f"{row.label}: the previous checkpoint with the present kernels is not decided"
        return None, unknown if early[0] is False else early[1]
    return late if late[0] else _joined(early, late)


def _by_checkpoint(told: Explanation, row: AgreedRow) -> _Finding:
    """Return whether the checkpoint broke an obligation with either pair of kernels."""
    late = _broke(told, CHECKPOINT, PRESENT, row)
    if not told.changed[KERNELS]:
        return late
    early = _broke(told, CHECKPOINT, PREVIOUS, row)
    if late[0]:
        alone = "; with the previous kernels the present checkpoint holds"
        return True, late[1] + (alone if _before(told, KERNELS, row) == "held" else "")
    return early if early[0] else _joined(early, late)


def _before(told: Explanation, factor: Factor, asked: AgreedRow) -> str:
    """Return the verdict of a run without one change; empty where it is not comparable."""
    row = told.row(factor, PRESENT, asked.obligation)
    return "" if row is None or row.change == "not_compared" else row.verdicts[0]


def _joined(one: _Finding, two: _Finding) -> _Finding:
    """Combine two findings without a cause: the result is undecided if either is."""
    left = [why for broke, why in (one, two) if broke is None]
    return (None, "; ".join(left)) if left else one


def _broke(told: Explanation, factor: Factor, at: str, asked: AgreedRow) -> _Finding:
    """Return whether a change of one factor broke an obligation: it held before, is violated after,
    and the paired difference is significant."""
    title = f"{asked.label}, {effect_title(told, factor, at)}"
    row = told.row(factor, at, asked.obligation)
    if row is None:
        places = EFFECTS[factor, at]
        lacking = [run.title for run in told.runs if run.place in places and run.missing]
        why = f"no run of {' nor of '.join(lacking)}" if lacking else "the runs do not decide it"
        return None, f"{title}: {why}"
    if row.change == "not_compared":
        return None, f"{title}: {row.reason}"
    before, after = row.verdicts
    if before == "violated":
        return False, f"{title}: violated without the change, too"
    if after == "held":
        return False, f"{title}: it still holds"
    if (before, after) != ("held", "violated"):
        return None, f"{title}: {before} before, {after} after"
    if row.change != "regressed":
        return None, f"{title}: the difference is not shown"
    return True, f"{title}: held before, violated after; {regression_text(row)}"


# --- for people -----------------------------------------------------------------------------------


TITLES: Mapping[str, str] = {
    "contract": "the contract is too loose",
    "kernels": "the kernel build regressed",
    "checkpoint": "the model update interacted with the kernels",
}
STATES: Mapping[str, tuple[str, str]] = {
    "shown": ("yes", "violated"),
    "excluded": ("no", "held"),
    "undecided": ("not decided", "inconclusive"),
}
"""The word for each state of a cause, and the verdict with the same colour."""
FOOT = (
    "a change is a cause only where the clause held without it, is violated with it, and the"
    " difference of the runs is shown; the incident itself is a statement of the user"
)


def effect_title(told: Explanation, factor: str, at: str) -> str:
    """Return the title of an effect: the compared runs."""
    if factor == INTERACTION:
        return "interaction of checkpoint and kernels"
    other = KERNELS if factor == CHECKPOINT else CHECKPOINT
    return f"change of the {factor}" + (f" with the {at} {other}" if told.changed[other] else "")


def history_lines(told: Explanation) -> Iterator[str]:
    """Yield how the previous triple was found, the differences, and ignored evidence."""
    name = "none" if told.previous is None else f"sha256:{told.previous[:12]}"
    yield f"previous triple: {name}, {told.found_by}"
    for texts in told.changed.values():
        yield from texts
    for file, why in told.unused.items():
        yield f"not used: {file}: {why}"
