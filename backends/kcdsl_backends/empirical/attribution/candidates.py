"""The list of causes: what each source could do, what it did, and what may be done about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from kcdsl.verdict.attribution import (
    Candidate,
    Envelope,
    Figure,
    Layers,
    Remedy,
    Source,
)
from kcdsl_backends.empirical.attribution import sources
from kcdsl_backends.empirical.attribution.envelopes import HEAD

MOST = 0.5
"""From this share on a source is most of the drift."""
_NAMED = 3
"""Blocks that a candidate names at most."""

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

    `of_metric` follows its numbers, such as "nat of kl".
    """
    able = [s for s in found if s.state == "differs"]
    able.sort(key=lambda s: (not s.shown, -abs(s.shapley.value if s.shapley else 0.0)))
    return tuple(
        _candidate(rank, source, [r for r in rows if r.source == source.name], layers, of_metric)
        for rank, source in enumerate(able, 1)
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
    """Return where the source does most: by what a block gains, as far as the source's own hybrid
    moves that block. Without such a hybrid nothing is named."""
    if layers is None:
        return ()
    own = {r.block: r.measured / r.observed for r in rows if r.measured and r.observed}
    scores = {row.block: row.gain * min(1.0, own.get(row.block, 0.0)) for row in layers.rows}
    ordered = sorted(scores, key=lambda block: -scores[block])
    return tuple(block for block in ordered if scores[block] > 0)[:_NAMED]


def _evidence(source: Source, rows: Sequence[Envelope], of_metric: str) -> Iterable[str]:
    if source.alone is not None:
        yield f"alone {_figure(source.alone)}"
    if source.left_out is not None:
        yield f"left out, {_figure(source.left_out)} less"
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


def _figure(figure: Figure) -> str:
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
