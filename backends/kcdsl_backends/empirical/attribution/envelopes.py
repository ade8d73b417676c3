"""Certified bounds (envelopes) of the drift that one source alone can cause in a block.

Let x be the input of a block in training, T the training kernel's block with numerics t, and h the
numerics t in which the source s alone is that of infer (`sources.mixed`). The interval backend
gives B >= 0, elementwise, with |K(x) - K'(x)| <= B for every block K that computes as h admits and
every K' that computes as t admits: this is its statement for the pair (t, h)
(docs/proofs/relational-interval.md).

The measured T is one such K'. Let D = |I(x) - T(x)| be the measured drift between infer and train.
If D > B in one element, then I is no block that h admits: no kernel that differs from training in s
alone drifts as far on x. Hence s alone cannot explain the drift; one element of one block on one
request is enough. If D <= B, s is merely not excluded. If the largest element of D is above the
largest of B, s alone cannot cause even the maximum drift of that block.

For `batch`, h is t: batches change the order of sums, which every specification leaves free, so a
row of a batch is one more run that t admits. For `routing` there is no bound.

The real hybrid of s is a K that claims h. If it exceeds B, a kernel does not compute as it claims
or the bound is wrong, and the attribution ends with KC625, as an evaluation does. A simulated
hybrid claims nothing and is not compared with B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from kcdsl.diagnostics import Refusal
from kcdsl.model.architecture import Model
from kcdsl.model.numerics import Numerics
from kcdsl.model.presets import resolve
from kcdsl.verdict.studies.attribution import Envelope
from kcdsl_backends.empirical.attribution import sources
from kcdsl_backends.empirical.attribution.hybrids import InBatch, Pair, hybrid
from kcdsl_backends.empirical.bounds.blocks import CertifiedBound, Certify, compare_request
from kcdsl_backends.empirical.bounds.requests import RequestBounds, logit_bounds
from kcdsl_backends.empirical.collection.context import Progress
from kcdsl_backends.empirical.diagnoses.reference import own_blocks
from kcdsl_backends.empirical.sources.kernels import BlockProgram, block_drift
from kcdsl_backends.empirical.table.evidence import Array
from kcdsl_backends.requests import Request

MakeCertify = Callable[[Numerics, Numerics], Certify]
"""Returns the bounds for the numerics of train and infer."""
OfLogits = Callable[[Array], float | None]
"""Maps bounds [T, V] of |drift| of the logits to a bound of the metric at every position; None if
it has none."""
HEAD = "head"
"""The block whose output are the logits."""
_MOST = 1e300
"""Replaces a quotient by 0: a drift of a block that the source cannot change at all."""


def interval_bounds(model: Model) -> MakeCertify:
    """Return the certified bounds of the interval backend."""
    from kcdsl_backends.certifier.statements.problems import (
        Graphs,
        ProblemFactory,
        certified_block_drift,
    )

    graphs: Graphs = {}

    def make(train: Numerics, infer: Numerics) -> Certify:
        factory = ProblemFactory(model, train, infer, torch.device("cpu"), graphs)
        return lambda block, x: certified_block_drift(model, block, x, train, infer, factory)

    return make


def most_of(metric: str, temperature: Fraction) -> OfLogits:
    """Return the map from bounds of the drift of the logits to a bound of a metric (of its
    magnitude, if it is signed), by the bound chain (docs/proofs/bound-chain.md)."""

    def most(limits: Array) -> float | None:
        found = logit_bounds(RequestBounds(-limits, limits), temperature).get(metric)
        return None if found is None or not np.isfinite(found).all() else float(found.max())

    return most


def envelopes(
    pair: Pair,
    players: Sequence[str],
    requests: Sequence[Request],
    make: MakeCertify,
    progress: Progress = lambda stage, done, total: None,
    of_logits: OfLogits = lambda limits: None,
) -> tuple[Envelope, ...]:
    """Return the envelope of every source on every block that has one input [T, D].

    `of_logits` maps a bound of the head's output to a bound of the metric.

    Raises Refusal (KC625) if a real hybrid, or infer itself, drifts beyond its bound.
    """
    names = own_blocks(pair.model)
    block_inputs = {r.key: pair.model.all_block_inputs(list(r.tokens), names) for r in requests}
    chosen = [s for s in (*players, None) if s != sources.ROUTING]
    found: list[Envelope] = []
    for done, source in enumerate(chosen, 1):
        kernel, numerics = _alone(pair, source)
        if numerics is None:
            continue
        certify = make(resolve(pair.train_ref), numerics)
        for name in names:
            rows = []
            for request in requests:
                x = block_inputs[request.key].get(name)
                if x is None:
                    continue
                x = x.to(torch.float32)
                bound = certify(name, x)
                row = _compare(pair, name, request, x, kernel, bound)
                if row.certified is not None and name == HEAD:
                    row = replace(row, metric=of_logits(np.asarray(bound.drift_bound, np.float64)))
                rows.append(replace(row, source=source or ""))
            if rows and source is not None:
                found.append(_worst_row(rows))
        progress("envelopes", done, len(chosen))
    return tuple(found)


def _alone(pair: Pair, source: str | None) -> tuple[BlockProgram | None, Numerics | None]:
    """Return the kernel with this source alone from infer (None: infer itself) and its claimed
    numerics. The kernel is None if none computes so or it is simulated, the numerics if they have
    no meaning."""
    if source is None:
        return pair.infer, resolve(pair.infer_ref)
    if source == sources.BATCH:
        return InBatch(pair.train), resolve(pair.train_ref)
    try:
        numerics = resolve(sources.mixed(pair.train_ref, pair.infer_ref, (source,)))
    except Refusal:
        return None, None
    try:
        made = hybrid(pair, (source,))
    except (Refusal, RuntimeError, ValueError):
        return None, numerics
    return None if made.simulated else made.kernel, numerics


def _compare(
    pair: Pair,
    name: str,
    request: Request,
    x: Tensor,
    kernel: BlockProgram | None,
    bound: CertifiedBound,
) -> Envelope:
    """Return the measured drift of a block and the bound of one source."""
    limits = np.asarray(bound.drift_bound, dtype=np.float64)
    measured: float | None = None
    if kernel is not None:
        measured = compare_request(
            request, name, pair.train, kernel, lambda r, b: x, lambda b, states: bound
        ).measured
    with torch.no_grad():
        observed = block_drift(pair.train, pair.infer, name, x).abs().numpy()
    row = Envelope("", name, request.key, float(observed.max()), None, None, measured)
    if not bool(np.isfinite(limits).all()):
        return replace(row, reason=getattr(bound, "reason", None) or "some elements have no bound")
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(observed == 0, 0.0, observed / limits)
    return replace(row, certified=float(limits.max()), ratio=float(min(ratios.max(), _MOST)))


def _worst_row(rows: Sequence[Envelope]) -> Envelope:
    """Return one row for all requests, without a bound if one request has none."""
    unbounded = next((row for row in rows if row.certified is None), None)
    if unbounded is not None:
        return replace(unbounded, observed=max(row.observed for row in rows))
    metrics = [row.metric for row in rows if row.metric is not None]
    return replace(
        max(rows, key=_drift_to_bound),
        ratio=max(row.ratio or 0.0 for row in rows),
        metric=max(metrics) if len(metrics) == len(rows) else None,
    )


def _drift_to_bound(row: Envelope) -> float:
    if not row.certified:
        return _MOST if row.observed else 0.0
    return row.observed / row.certified
