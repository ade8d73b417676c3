"""The number of units that a contract needs, planned before a sample is drawn.

No kernel is run and no model loaded; of the model only the tokenizer is read, if slices select by
length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.ir.canonical import digest
from kcdsl.ir.formulas import walk
from kcdsl.ir.kernels import LOGITS
from kcdsl.ir.obligations import Comparison, Obligation, named_slices, obligations_of
from kcdsl.ir.tables import expand_tables, whole_of
from kcdsl.ir.terms import Abs, Clause, EvidenceKind, HasFields, ModelRef, Program
from kcdsl.metrics import registry_of
from kcdsl.model.configuration import find_config
from kcdsl.model.files import Artefacts
from kcdsl.model.tokenizer import ByteTokenizer, Tokenizer, find_tokenizer
from kcdsl.verdict.result import TRACE_RECORDS
from kcdsl.verdict.studies import plan as document
from kcdsl.verdict.studies.plan import Plan, PlanRow
from kcdsl_backends.empirical.statistics import estimates, planning, rates
from kcdsl_backends.empirical.statistics.bootstrap import FEWEST_CLUSTERS
from kcdsl_backends.empirical.statistics.estimates import CONFIDENCE, Confidence
from kcdsl_backends.empirical.statistics.rates import most_exceedances
from kcdsl_backends.empirical.table.requirements import (
    NO_WINDOW_HAS,
    WINDOW,
    allowed_rate,
    better_of,
    bounded_mean,
    is_mean,
    is_throughput,
    measured_anew,
    metrics_of,
    obstacle,
    of_runs,
    prompts_are_units,
    reads_times,
    requirement_text,
    sampling_unit,
    statistic_count,
    window_count,
)
from kcdsl_backends.requests import RequestFile, requests_of, select

if TYPE_CHECKING:
    from kcdsl_backends.empirical.questions.prior import Observed

_PROOFS = (EvidenceKind.PROOF, EvidenceKind.PROOF_REAL, EvidenceKind.PROBABILISTIC)
_ONE_EACH = "a request counts once, however often it is timed"
NOISY = frozenset(
    {
        *("sampled", "timing", "rollouts", "topk", "advantages", "rewards", "text"),
        *("gradients", "routes"),
    }
)
"""Needs of metrics whose values vary between runs of the same requests."""


def plan(
    program: Program,
    base: Path,
    *,
    looks: int | None = 1,
    power: float = 0.8,
    prior: Path | None = None,
    slices: Sequence[str] = (),
) -> Plan:
    """Return the number of units for every clause that measurements decide, slice by slice.

    `base` is the folder of the contract, `looks` how many evaluations of growing data share the
    error (None: any number), `prior` the trace of an earlier evaluation. Missing data
    files leave the available number of units unknown. Raises Refusal for data files and traces
    that cannot be read, and for a contract without a clause to measure.
    """
    stated, program = program, expand_tables(program)
    earlier = None
    if prior is not None:
        from kcdsl_backends.empirical.questions.prior import Prior  # needs torch

        earlier = Prior.read(prior)
    confidence = estimates.confidence_over(looks)
    rows_of, units_of = _available(program, base)
    rows: list[PlanRow] = []
    elsewhere: dict[str, str] = {}
    for clause in program.clauses:
        reason = obstacle(clause)
        if clause.evidence in _PROOFS:
            reason = f"demands {clause.evidence}; `kcdsl verify` decides it"
        if reason is not None:
            elsewhere[clause.id] = reason
            continue
        for name in named_slices(clause) or tuple(s.name for s in program.slices):
            if slices and whole_of(name) not in slices:
                continue
            for obligation in obligations_of(clause, name):
                seen = None if earlier is None else earlier.observe(obligation)
                available = rows_of[name], units_of[name]
                case = _Case(obligation, name, *available, earlier is not None, seen)
                rows.append(_row(case, program, confidence, power))
    if not rows:
        raise refuse(
            codes.NOTHING_TO_EVALUATE,
            "the contract has no clause that running the kernels decides",
            notes=tuple(f"{name}: {why}" for name, why in elsewhere.items()),
            help="add a clause such as `p99(kl) <= 0.02`, or run `kcdsl verify`",
        )
    return Plan(
        {
            "name": stated.name,
            "version": stated.version,
            "digest": f"sha256:{digest(stated).removeprefix('sha256:')}",
        },
        CONFIDENCE,
        looks,
        power,
        tuple(rows),
        elsewhere,
    )


# --- one row -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Case:
    """An obligation, with the available data and the values of an earlier run."""

    obligation: Obligation
    slice: str
    requests: int | None
    prompts: int | None
    """Number of units of a sample among its requests."""
    has_prior: bool
    seen: Observed | None

    @property
    def unseen(self) -> str:
        """Return the note on missing values of an earlier run."""
        if self.has_prior:
            return "the prior trace has no data for it"
        return "a prior trace determines how many (--prior FILE)"


def _row(case: _Case, program: Program, confidence: Confidence, power: float) -> PlanRow:
    part, allowed = case.obligation.part, allowed_rate(case.obligation.part)
    needs = _needs(part, program)
    bare = PlanRow(
        obligation=case.obligation.id,
        clause=part.id,
        slice=case.slice,
        requirement=requirement_text(part, case.obligation.clause),
        evidence="sample",
        state="unknown",
        unit=_unit(part, program),
        have=_units(part, case.requests),
        allowed=allowed,
        note=f"a window is {WINDOW} units in a row" if _by_window(part) else "",
    )
    if part.budget is None:
        confidence = confidence.divided(statistic_count(part.require))
    whole = metrics_of(part.require) & NO_WINDOW_HAS
    if whole and _by_window(part):
        note = f"one window by itself has no {', '.join(sorted(whole))}"
        return replace(bare, state="never", note=note)
    varies = needs & NOISY or (_drawn(program) and metrics_of(part.require) - {"kv_memory"})
    if part.evidence is not EvidenceKind.SAMPLE and not varies:
        return _census(bare)
    bare = replace(bare, have=_units(part, case.prompts))
    if part.evidence is EvidenceKind.CENSUS:
        if prompts_are_units(program):
            return _census(bare)
        return replace(bare, state="never", note="a census of values that vary from run to run")
    if confidence.anytime and measured_anew(part.require, program):
        if of_runs(part.require):
            why = "runs are made anew at every look; plan the looks (--looks K)"
            return replace(bare, state="never", note=why)
        bare = replace(bare, note=bare.note or "logged tokens: a server answers anew at every look")
    if allowed is None:
        few = bare.have is not None and bare.have < FEWEST_CLUSTERS
        if is_throughput(part) and few:
            note = f"below {FEWEST_CLUSTERS} requests throughput has no limits"
            return replace(bare, state="too_few", note=note)
        if not is_mean(part):
            return replace(bare, note="what it needs depends on the values")
        return _mean(bare, case, confidence, power)
    if allowed == 0:
        return replace(
            bare,
            state="never",
            shows=_shows(bare.have, confidence),
            note="that none ever is beyond needs a proof or a census",
        )
    return _rate(bare, case, allowed, confidence, power)


def _census(row: PlanRow) -> PlanRow:
    if row.have == 0:
        return replace(row, evidence="census", state="too_few", note="no rows: invalid evidence")
    note = "decides these rows exactly, and no others"
    return replace(row, evidence="census", state="census", note=note)


def _rate(
    row: PlanRow, case: _Case, allowed: Fraction, confidence: Confidence, power: float
) -> PlanRow:
    fewest = planning.units_for_budget(allowed, confidence)
    found = replace(
        row,
        without_any=fewest,
        at_half=planning.units_at_rate(allowed, allowed / 2, confidence),
        with_power=planning.units_with_power(allowed, allowed / 2, power, confidence),
        prior=_rate_prior(case, allowed, confidence, power),
        note=row.note or (case.unseen if case.has_prior and case.seen is None else ""),
    )
    if fewest is None:
        found = replace(found, note=f"it needs more than {planning.MOST_UNITS:g} {row.unit}")
    if row.have is None:
        return replace(found, note="the data is not here yet")
    return replace(
        found,
        state="enough" if fewest is not None and row.have >= fewest else "too_few",
        note=found.note or (_ONE_EACH if reads_times(case.obligation.part.require) else ""),
        may_exceed=most_exceedances(row.have, allowed, confidence),
        shows=_shows(row.have, confidence),
    )


def _rate_prior(
    case: _Case, allowed: Fraction, confidence: Confidence, power: float
) -> document.PriorSample | None:
    seen = case.seen
    if seen is None or seen.k is None:
        return None
    tau = None
    if seen.worst is not None:
        better = better_of(case.obligation)
        tau = rates.threshold(seen.worst, allowed, confidence, better=better)
    needed = planning.units_with_power(allowed, Fraction(seen.k, seen.n), power, confidence)
    return document.PriorSample(seen.n, k=seen.k, needed=needed, threshold=tau)


def _mean(row: PlanRow, case: _Case, confidence: Confidence, power: float) -> PlanRow:
    seen = case.seen
    if confidence.anytime:
        why = "a mean has no limit that holds at every look; plan the looks (--looks K)"
        return replace(row, state="never", note=why)
    if row.have is not None and row.have < FEWEST_CLUSTERS:
        row = replace(row, state="too_few", note=f"below {FEWEST_CLUSTERS} a mean has no limits")
    comparison = case.obligation.comparison
    assert comparison is not None
    if comparison.op == "==":
        return replace(row, note="no number of units shows that a mean is equal to a number")
    bounded = bounded_mean(case.obligation.part)
    if bounded is not None:
        row = replace(row, without_any=planning.units_for_budget(bounded.share, confidence))
    if seen is None or seen.value is None or seen.variance is None:
        return row if row.note else replace(row, note=case.unseen)
    distance = _slack(comparison, seen.value)
    residuals = seen.residuals
    if residuals is not None and _grows_worse(comparison, seen.value) < 0:
        residuals = -residuals
    needed = planning.units_for_mean(seen.variance, distance, power, confidence, residuals)
    why = "the mean of the prior trace is not within the threshold"
    if bounded is not None and seen.value == bounded.best:
        needed = row.without_any
    elif needed is not None and seen.variance == 0:
        needed = None
        why = "every request of the prior trace is alike, which shows nothing of others"
    elif needed is not None and bounded is not None:
        away = min(Fraction(1), Fraction(seen.away or 1, seen.n))
        some = planning.units_with_some(away, power, confidence)
        unseen = planning.units_with_unseen(
            float(bounded.share),
            abs(seen.value - bounded.best) / bounded.width,
            seen.variance / bounded.width**2,
            power,
            confidence,
        )
        needed = None if some is None or unseen is None else max(needed, some, unseen)
    row = replace(row, prior=document.PriorSample(seen.n, value=seen.value, needed=needed))
    if needed is None:
        return replace(row, note=row.note or why)
    if row.have is None:
        return row
    return replace(row, state="enough" if row.have >= needed else "too_few")


def _slack(compared: Comparison, value: float) -> float:
    """Return the distance of a mean to its threshold; negative beyond it."""
    magnitude = abs(value) if isinstance(compared.quantity, Abs) else value
    slack = float(compared.threshold) - magnitude
    return -slack if compared.op in (">=", ">") else slack


def _grows_worse(compared: Comparison, value: float) -> int:
    """Return the sign of the changes that bring a mean nearer to its threshold."""
    turned = isinstance(compared.quantity, Abs) and value < 0
    return -1 if (compared.op in (">=", ">")) != turned else 1


def _shows(units: int | None, confidence: Confidence) -> float | None:
    return planning.shown_by(units, confidence) if units else None


# --- units ---------------------------------------------------------------------------------------


def _needs(part: Clause, program: Program) -> frozenset[str]:
    """Return the data that the metrics of a part are computed from."""
    registry = registry_of(program)
    found = (registry.find(name) for name in metrics_of(part.require))
    return frozenset(need for metric in found if metric is not None for need in metric.needs)


def _drawn(program: Program) -> bool:
    """Return whether everything is measured at drawn tokens."""
    recording = program.infer.recording
    rollouts = recording is not None and recording.format != LOGITS
    return rollouts or program.infer.service is not None


def _by_window(part: Clause) -> bool:
    return part.budget is not None and part.budget.unit == "windows"


def _unit(part: Clause, program: Program) -> str:
    if _by_window(part):
        return "windows"
    fields = any(isinstance(f, HasFields) for f in walk(part.require))
    return TRACE_RECORDS if fields else f"{sampling_unit(program)}s"


def _units(part: Clause, requests: int | None) -> int | None:
    return requests if requests is None or not _by_window(part) else window_count(requests)


def _available(
    program: Program, base: Path
) -> tuple[Mapping[str, int | None], Mapping[str, int | None]]:
    """Return the numbers of requests and of units of a sample by slice: requests with one prompt
    are one unit. None if a file is missing.

    Recorded rollouts and requests to a server with one prompt are one request too.
    """
    if program.infer.recording is not None and program.infer.recording.format != LOGITS:
        from kcdsl_backends.empirical.collection.recordings import units_available

        units = units_available(program, base)
        return units, units
    files: dict[str, RequestFile | None] = {}
    requests: dict[str, int | None] = {}
    found: dict[str, int | None] = {}
    for slice_ in program.slices:
        name = slice_.data if slice_.data is not None else program.data
        if name is not None and name not in files:
            files[name] = _load(program, base, name)
        file = None if name is None else files[name]
        rows = () if file is None else select(file, slice_)
        found[slice_.name] = None if file is None else len({row.tokens for row in rows})
        requests[slice_.name] = None if file is None else len(rows)
    return found if program.infer.service is not None else requests, found


def _load(program: Program, base: Path, name: str) -> RequestFile | None:
    files = Artefacts.of(base)
    try:
        files.find(name)
        tokenizer = _tokenizer(program.model, files)
    except Refusal as refusal:
        if refusal.diagnostics[0].code is codes.FILE_MISSING:
            return None
        raise
    return requests_of(files, name, None if tokenizer is None else tokenizer.encode)


def _tokenizer(model: ModelRef, files: Artefacts) -> Tokenizer | None:
    if model.tokenizer == "bytes":  # needs no checkpoint
        return ByteTokenizer()
    checkpoint = files.find_weights(model.checkpoint)
    return find_tokenizer(model, checkpoint, files, find_config(model, checkpoint, files))
