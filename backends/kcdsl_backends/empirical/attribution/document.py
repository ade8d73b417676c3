"""The document of an attribution: sources, causes and remedies, formed from what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from kcdsl.verdict.studies.attribution import (
    Attribution,
    Candidate,
    Envelope,
    EstimatedNumber,
    IntermediateKernel,
    Layers,
    Method,
    Remedy,
    Source,
    State,
    Status,
    Term,
)
from kcdsl_backends.empirical.attribution import sources
from kcdsl_backends.empirical.attribution.envelopes import HEAD
from kcdsl_backends.empirical.attribution.measurement import MeasuredCoalitions
from kcdsl_backends.empirical.attribution.shapley import (
    CoalitionColumn,
    Coefficients,
    Split,
    Statistic,
    Table,
    alone,
    intervals,
    left_out,
    merged,
    split,
)
from kcdsl_backends.empirical.attribution.sources import SourceSetting


@dataclass(frozen=True, slots=True)
class AttributionSubject:
    """The subject of the document: contract, kernels, slice, metric, seed."""

    contract: Mapping[str, str]
    kernels: Mapping[str, str]
    slice: str | None
    metric: str
    statistic: Statistic
    unit: str
    better: str
    batch: int
    seed: int
    settings: tuple[SourceSetting, ...]
    blocked: str | None = None
    """A mistake of the set-up that makes every number meaningless; None where none was found."""
    notes: tuple[str, ...] = ()

    @property
    def of_metric(self) -> str:
        """Return the unit and the metric, such as "nat of kl"."""
        return f"of {self.metric}" if self.unit == "1" else f"{self.unit} of {self.metric}"


def assemble(
    frame: AttributionSubject,
    measured: MeasuredCoalitions,
    layers: Layers | None,
    bounds: Sequence[Envelope],
) -> Attribution:
    """Return the document; the same evidence and seed give the same document, bit for bit."""
    table = Table(frame.statistic, frame.better, measured.columns)
    values = table.values()
    players = measured.players
    shares = split(len(players), values)
    figures = _figures(frame, table, players, shares)
    if players:
        total = figures["total"][""]
    else:
        total = EstimatedNumber(_value(frame, measured.infer) - values[0])
    noise = 0.0 if measured.noise is None else _value(frame, measured.noise) - values[0]
    method: Method = "shapley" if shares.whole else "orders_that_run"
    between = sorted(measured.coalitions.items(), key=lambda item: (item[0].bit_count(), item[0]))
    found = _sources(frame, measured, shares, figures, _Bounds(tuple(bounds), layers), total.value)
    status, reason = _status(frame, measured, table, shares, found)
    return Attribution(
        contract=frame.contract,
        kernels=frame.kernels,
        slice=frame.slice,
        metric=frame.metric,
        statistic=frame.statistic,
        unit=frame.unit,
        better=frame.better,
        requests=table.requests,
        batch=frame.batch,
        seed=frame.seed,
        status=status,
        reason=reason,
        total=total,
        baseline=values[0],
        noise=noise,
        method=method if players and shares.shares else "none",
        orders=(shares.orders, shares.all_orders),
        sources=found,
        terms=_terms(players, shares, figures),
        between=tuple(
            IntermediateKernel(c.taken, values.get(mask), c.reason, c.simulated)
            for mask, c in between
        ),
        layers=layers,
        envelopes=tuple(bounds),
        candidates=candidates(found, bounds, layers, frame.of_metric)
        if status != "invalid_evidence"
        else (),
        notes=frame.notes,
    )


Figures = Mapping[str, Mapping[str, EstimatedNumber]]


def _figures(
    frame: AttributionSubject, table: Table, players: Sequence[str], shares: Split
) -> Figures:
    """Return every number with its interval, by column and by name."""
    count, known = len(players), table.columns
    full = (1 << count) - 1
    columns: dict[str, dict[str, Coefficients]] = {
        "total": {"": {full: Fraction(1), 0: Fraction(-1)}} if full and full in known else {},
        "alone": _with_coefficients({p: alone(i, known) for i, p in enumerate(players)}),
        "left_out": _with_coefficients(
            {p: left_out(i, count, known) for i, p in enumerate(players)}
        ),
        "shapley": dict(zip(players, shares.shares, strict=False)),
        "terms": _term_shares(players, known),
    }
    found = intervals(table, {name: c for name, c in columns.items() if c}, frame.seed)
    if frame.blocked is None:
        return found
    return {
        name: {key: EstimatedNumber(k.value) for key, k in c.items()} for name, c in found.items()
    }


def _with_coefficients(columns: Mapping[str, Coefficients | None]) -> dict[str, Coefficients]:
    return {name: found for name, found in columns.items() if found is not None}


def _term_shares(players: Sequence[str], known: Mapping[int, Any]) -> dict[str, Coefficients]:
    """Return the shares of the four terms, from the game in which all sources of a term join
    together. It needs no further runs."""
    names = list(dict.fromkeys(sources.TERMS[p] for p in players))
    groups = tuple(
        tuple(i for i, p in enumerate(players) if sources.TERMS[p] == name) for name in names
    )
    masks = {found: mask for mask in known if (found := merged(mask, groups)) is not None}
    shares = split(len(names), masks)
    return {
        name: {masks[mask]: factor for mask, factor in own.items()}
        for name, own in zip(names, shares.shares, strict=False)
    }


def _value(frame: AttributionSubject, found: CoalitionColumn) -> float:
    """Return the statistic of one column."""
    return Table(frame.statistic, frame.better, {0: found}).values()[0]


def _status(
    frame: AttributionSubject,
    measured: MeasuredCoalitions,
    table: Table,
    shares: Split,
    found: Sequence[Source],
) -> tuple[Status, str | None]:
    if frame.blocked is not None:
        return "invalid_evidence", frame.blocked
    if not measured.players:
        if measured.infer.equals(table.columns[0]):
            return "no_drift", "both sides are equal in every source, and do not drift"
        return "inconclusive", "both sides are equal in every source, and yet they drift"
    if all(column.equals(table.columns[0]) for column in table.columns.values()):
        return "no_drift", "no kernel between both sides drifts"
    if all(v == table.values()[0] for v in table.values().values()):
        what = f"the {table.statistic} of {frame.metric}"
        return "inconclusive", f"{what} is the same for all kernels, although some requests drift"
    if not shares.shares:
        return "inconclusive", "no chain of kernels between both sides runs"
    if any(s.shown for s in found):
        return "attributed", table.limited()
    return "inconclusive", table.limited() or "the interval of every source contains 0"


def _sources(
    frame: AttributionSubject,
    measured: MeasuredCoalitions,
    shares: Split,
    figures: Figures,
    bounds: _Bounds,
    total: float,
) -> tuple[Source, ...]:
    settings = {s.source: s for s in frame.settings}
    found: list[Source] = []
    for name in sources.SOURCES:
        setting = settings.get(name) or _other_setting(name, frame, measured)
        differs = name in measured.players
        if not differs:
            found.append(_source_without_effect(setting, measured.missing.get(name)))
            continue
        share = figures.get("shapley", {}).get(name)
        envelope = bounds.envelope(name)
        found.append(
            Source(
                name=name,
                term=sources.TERMS[name],
                state="differs",
                train=setting.train,
                infer=setting.infer,
                reason=None if shares.whole else _unrunnable(name, measured),
                alone=figures.get("alone", {}).get(name),
                left_out=figures.get("left_out", {}).get(name),
                shapley=share,
                share=None if share is None or total == 0 else share.value / total,
                envelope=None if envelope is None else envelope.certified,
                observed=None if envelope is None else envelope.observed,
                envelope_block=None if envelope is None else envelope.block,
                can_explain=None if envelope is None else envelope.can_reach,
                excluded=bounds.excluded(name),
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The envelopes of the sources, and the drift by block."""

    rows: tuple[Envelope, ...]
    layers: Layers | None

    def envelope(self, source: str) -> Envelope | None:
        """Return the envelope of a source on the block with the largest gain."""
        if self.layers is None or not self.layers.rows:
            return None
        most = max(self.layers.rows, key=lambda row: row.gain).block
        return next((r for r in self.rows if (r.source, r.block) == (source, most)), None)

    def excluded(self, source: str) -> tuple[str, ...]:
        """Return the blocks of which the source is not the only cause."""
        return tuple(r.block for r in self.rows if r.source == source and r.can_explain is False)


def _other_setting(
    name: str, frame: AttributionSubject, measured: MeasuredCoalitions
) -> SourceSetting:
    if name == sources.BATCH:
        together = frame.batch > 1 and name in measured.players
        return SourceSetting(name, "alone", f"in batches of {frame.batch}" if together else "alone")
    differs = name in measured.players
    return SourceSetting(name, "its own experts", "other experts" if differs else "the same")


def _source_without_effect(setting: SourceSetting, why: str | None) -> Source:
    """Return a source without effect: equal on both sides (exactly 0, not run), or absent."""
    state: State = "equal" if why is None or "both sides" in why else "absent"
    zero = EstimatedNumber(0.0, 0.0, 0.0) if state == "equal" else None
    return Source(
        name=setting.source,
        term=sources.TERMS[setting.source],
        state=state,
        train=setting.train if state == "equal" else "–",
        infer=setting.infer if state == "equal" else "–",
        reason=why,
        alone=zero,
        left_out=zero,
        shapley=zero,
        share=0.0 if zero is not None else None,
    )


def _unrunnable(name: str, measured: MeasuredCoalitions) -> str | None:
    """Return why a kernel with this source alone, or without it alone, does not run."""
    for coalition in measured.coalitions.values():
        inside = name in coalition.taken
        if coalition.column is None and (len(coalition.taken) == 1) == inside:
            return f"{'+'.join(coalition.taken)} does not run: {coalition.reason}"
    return None


def _terms(players: Sequence[str], shares: Split, figures: Figures) -> tuple[Term, ...]:
    names = dict.fromkeys(sources.TERMS[s] for s in sources.SOURCES)
    found = figures.get("terms", {})
    return tuple(
        Term(
            name,
            tuple(s for s in sources.SOURCES if sources.TERMS[s] == name and s in players),
            found.get(name),
        )
        for name in names
    )


MOST = 0.5
"""Smallest share with which a source counts as most of the drift."""
_NAMED = 3
"""Largest number of blocks that a candidate names."""

_REMEDIES: dict[str, tuple[Remedy, ...]] = {
    sources.OPERATOR: (
        Remedy(
            "same_attention_program",
            "run one attention program on both sides: that of training in inference, or the other "
            "way round",
        ),
        Remedy(
            "importance_correct",
            "truncate or mask importance ratios (TIS, MIS, IcePop) while the programs differ",
        ),
    ),
    sources.PRECISION: (
        Remedy("higher_precision_blocks", "compute the named blocks in the training format"),
        Remedy("float16", "train and roll out in float16, which has 8 times the precision of bf16"),
    ),
    sources.WEIGHTS: (
        Remedy("unquantised_blocks", "keep the weights of the named blocks unquantised"),
        Remedy("finer_scales", "give the weights finer scales: one per channel, or per group"),
    ),
    sources.ACTIVATIONS: (
        Remedy("unquantised_inputs", "do not quantise what enters the named blocks"),
        Remedy("finer_scales", "quantise activations per token instead of per tensor"),
    ),
    sources.BATCH: (
        Remedy(
            "batch_invariant_kernels",
            "run batch-invariant kernels in inference (one order of sums whatever the batch, "
            "attention with num_splits = 1)",
        ),
    ),
    sources.ROUTING: (Remedy("routing_replay", "replay the experts of the rollout in training"),),
}
_FP32_HEAD = Remedy("fp32_lm_head", "compute the head (the last linear) in float32")


def candidates(
    found: Sequence[Source], rows: Sequence[Envelope], layers: Layers | None, of_metric: str
) -> tuple[Candidate, ...]:
    """Return the sources that differ, shown ones first and the largest share before others.

    `of_metric` is the unit and metric of its numbers, such as "nat of kl".
    """
    differing = [s for s in found if s.state == "differs"]
    differing.sort(key=lambda s: (not s.shown, -abs(s.shapley.value if s.shapley else 0.0)))
    return tuple(
        _candidate(rank, source, [r for r in rows if r.source == source.name], layers, of_metric)
        for rank, source in enumerate(differing, 1)
    )


def _candidate(
    rank: int,
    source: Source,
    rows: Sequence[Envelope],
    layers: Layers | None,
    of_metric: str,
) -> Candidate:
    share = source.shapley
    confirmed = None
    if source.left_out is not None and source.left_out.low is not None:
        confirmed = source.left_out.shown and (source.share or 0.0) > 0
    blocks = _blocks(rows, layers)
    return Candidate(
        rank,
        source.name,
        source.share,
        None if share is None else share.low,
        None if share is None else share.high,
        _verdict(source),
        source.can_explain,
        confirmed,
        blocks,
        tuple(_evidence(source, rows, of_metric)),
        _remedies(source, layers),
    )


def _verdict(source: Source) -> Literal["most", "part", "against", "not_shown"]:
    if not source.shown or source.share is None:
        return "not_shown"
    if source.share < 0:
        return "against"
    return "most" if source.share >= MOST else "part"


def _blocks(rows: Sequence[Envelope], layers: Layers | None) -> tuple[str, ...]:
    """Return the blocks with the largest effect of the source: the gain of a block times the share
    of its drift that the source's own hybrid has. Without such a hybrid return none."""
    if layers is None:
        return ()
    own = {r.block: r.measured / r.observed for r in rows if r.measured and r.observed}
    scores = {row.block: row.gain * min(1.0, own.get(row.block, 0.0)) for row in layers.rows}
    ordered = sorted(scores, key=lambda block: -scores[block])
    return tuple(block for block in ordered if scores[block] > 0)[:_NAMED]


def _evidence(source: Source, rows: Sequence[Envelope], of_metric: str) -> Iterable[str]:
    if source.alone is not None:
        yield f"alone {_figure_text(source.alone)}"
    if source.left_out is not None:
        yield f"left out, {_figure_text(source.left_out)} less"
    if source.shapley is not None and not source.shown:
        why = (
            "its interval contains 0" if source.shapley.low is not None else "there is no interval"
        )
        yield f"not shown: {why}"
    if source.envelope is not None and source.observed is not None:
        where = f"of {source.envelope_block}, where most arises"
        if source.can_explain:
            yield f"no bound excludes that it alone makes the drift {where}"
        else:
            most = f"{source.envelope:.3g} of {source.observed:.3g}"
            yield f"alone it makes at most {most} of the drift {where} (certified)"
    yield from (
        f"in {row.block} alone it makes at most {row.metric:.3g} {of_metric} at any position "
        "(certified)"
        for row in rows
        if row.metric is not None
    )
    if source.excluded:
        yield (
            f"not the only cause: excluded by bounds in {len(source.excluded)} of {len(rows)} "
            f"blocks, {source.excluded[0]} first"
        )
    if source.reason:
        yield source.reason


def _figure_text(figure: EstimatedNumber) -> str:
    if figure.low is None or figure.high is None:
        return f"{figure.value:.3g}"
    return f"{figure.value:.3g} [{figure.low:.3g}, {figure.high:.3g}]"


def _remedies(source: Source, layers: Layers | None) -> tuple[Remedy, ...]:
    usual = _REMEDIES[source.name]
    if source.name == sources.PRECISION and layers is not None and layers.rows:
        most = max(layers.rows, key=lambda row: row.gain)
        if most.block == HEAD and most.gain > 0:
            return (_FP32_HEAD, *usual)
    return usual
