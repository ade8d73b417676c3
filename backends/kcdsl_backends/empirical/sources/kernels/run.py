"""Running both kernels on one request and reading every metric the contract needs.

Both kernels read the same tokens (teacher forcing), so their outputs are comparable.
Logits are widened to float64 a few rows at a time; only values of metrics are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl.diagnostics import Refusal
from kcdsl.metrics import MEASURES
from kcdsl.metrics.definition import INFER_LOG, RANKED, TRAIN_LOG
from kcdsl_backends.empirical.metrics import policies as calibration
from kcdsl_backends.empirical.metrics import sampled
from kcdsl_backends.empirical.metrics.full_logits import CONTEXT, TIER_A, tier_a
from kcdsl_backends.empirical.metrics.measures import (
    AGGREGATES,
    PROBABILITY_FUNCTIONS,
    SAMPLED_FUNCTIONS,
    STATE_FUNCTIONS,
    TEXT_FUNCTIONS,
)
from kcdsl_backends.empirical.metrics.policies import PolicyPair, policy_pair
from kcdsl_backends.empirical.metrics.states import noise_ratio, row_l2, row_linf, row_span
from kcdsl_backends.empirical.metrics.user import UnusableFunction, call
from kcdsl_backends.empirical.sources.kernels import (
    BlockInput,
    MeasurementPlan,
    Outputs,
    block_drift,
    tensor_digest,
)
from kcdsl_backends.empirical.table.evidence import Array, RequestRun, SamplingUnit
from kcdsl_backends.empirical.table.requirements import norm_name
from kcdsl_backends.requests import Request

_ELEMENTS = 2**23
"""Largest number of logits that are held in float64 at a time, per kernel and array."""
_LABELLED = frozenset(m.name for m in MEASURES.values() if "labels" in m.needs)
_SAMPLED = frozenset(SAMPLED_FUNCTIONS) | frozenset(PROBABILITY_FUNCTIONS)


def run_request(
    request: Request, train: Outputs, infer: Outputs, plan: MeasurementPlan, block_input: BlockInput
) -> RequestRun:
    """Run both kernels on a request; if one fails, the unit has the reason and no values."""
    seed = sampled.request_seed(plan.seed, request.key)
    digests: dict[str, str] = {}
    try:
        with torch.no_grad():
            values, nonfinite, problems = _measure(
                request, train, infer, plan, block_input, seed, digests
            )
    except (RuntimeError, ValueError, Refusal) as error:
        unit = SamplingUnit(request.key, request.length, failure=str(error) or type(error).__name__)
        return RequestRun(unit, seed, digests, 0)
    failure = None
    if nonfinite:
        failure = f"{nonfinite} of the numbers that the kernels returned are not finite"
    return RequestRun(
        SamplingUnit(request.key, request.length, values, failure, problems),
        seed,
        digests,
        nonfinite,
    )


def _measure(
    request: Request,
    train: Outputs,
    infer: Outputs,
    plan: MeasurementPlan,
    block_input: BlockInput,
    seed: int,
    digests: dict[str, str],
) -> tuple[dict[str, Array], int, dict[str, str]]:
    values: dict[str, Array] = {}
    nonfinite = 0
    inputs: dict[str, Any] = {"temperature": plan.temperature}
    if plan.needs_hidden:
        states = _both(request, "hidden", train.hidden, infer.hidden, digests)
        nonfinite += sum(int((~torch.isfinite(s)).sum()) for s in states)
        for name, function in STATE_FUNCTIONS.items():
            values[name] = _array(function(*states))
        _add_inputs(inputs, plan, "hidden", states)
    if plan.needs_logits:
        logits = _both(request, "logits", train.logits, infer.logits, digests)
        nonfinite += sum(_undefined(side) for side in logits)
        found, drawn = _policy_values(request, logits, plan, seed)
        values.update(found)
        if "noise_ratio" in plan.metrics:
            values["noise_ratio"] = _noise_ratio(request, train, infer, logits)
        _add_inputs(inputs, plan, "logits", logits)
        inputs["sampled"] = _read_only(drawn)
    for block in sorted({block for block, _ in plan.norms}):
        drift = block_drift(train, infer, block, block_input(request, block))
        nonfinite += int((~torch.isfinite(drift)).sum())
        for kind in sorted(k for b, k in plan.norms if b == block):
            values[norm_name(block, kind)] = _array(_row_norm(drift, kind))
    own, problems = _user_values(request, plan, inputs) if not nonfinite else ({}, {})
    return {**values, **own}, nonfinite, problems


def _undefined(logits: Tensor) -> int:
    """Count the logits without a policy: NaN, +inf, and rows [V] of -inf only."""
    excluded = logits.amax(dim=-1).isneginf()
    return int((logits.isnan() | logits.isposinf()).sum()) + int(excluded.sum())


def _noise_ratio(
    request: Request, train: Outputs, infer: Outputs, logits: tuple[Tensor, Tensor]
) -> Array:
    """Return the errors of infer over those of train, [T], against a recorded run in float32."""
    for kernel in (train, infer):
        gold = getattr(kernel, "gold", lambda ids: None)(request.tokens)
        if gold is not None:
            return _array(noise_ratio(*logits, gold))
    raise ValueError("no run in float32 or wider was recorded beside the logits")


def _add_inputs(
    inputs: dict[str, Any], plan: MeasurementPlan, need: str, outputs: tuple[Tensor, Tensor]
) -> None:
    """Add the outputs of both kernels to the inputs of the user's functions, if one reads them."""
    if any(need in user.metric.needs for user in plan.user):
        for side, output in zip(("train", "infer"), outputs, strict=True):
            inputs[f"{side}_{need}"] = _read_only(_array(output))


def _read_only(values: NDArray[Any]) -> NDArray[Any]:
    values = values.copy()
    values.setflags(write=False)
    return values


def _user_values(
    request: Request, plan: MeasurementPlan, inputs: dict[str, Any]
) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the values of the user's metrics, and the reasons for missing ones."""
    if not plan.user:
        return {}, {}
    tokens = np.array(request.tokens, dtype=np.int64)
    inputs["tokens"] = _read_only(tokens)
    inputs["labels"] = _read_only(np.append(tokens[1:], -1))
    values: dict[str, Array] = {}
    problems: dict[str, str] = {}
    for user in plan.user:
        try:
            values[user.metric.name] = call(user, inputs, request.length)
        except UnusableFunction as error:
            problems[user.metric.name] = str(error)
    return values, problems


def _both(
    request: Request,
    what: str,
    train: Callable[[Any], Tensor],
    infer: Callable[[Any], Tensor],
    digests: dict[str, str],
) -> tuple[Tensor, Tensor]:
    outputs = (train(request.tokens), infer(request.tokens))
    for side, output in zip(("train", "infer"), outputs, strict=True):
        if output.ndim != 2 or output.shape[0] != request.length:
            raise ValueError(
                f"the {side} kernel returned {what} of shape {tuple(output.shape)} for "
                f"{request.length} tokens"
            )
        digests[f"{side}.{what}"] = tensor_digest(output)
    if outputs[0].shape != outputs[1].shape:
        raise ValueError(
            f"the kernels return {what} of shapes {tuple(outputs[0].shape)} and "
            f"{tuple(outputs[1].shape)}"
        )
    return outputs


def compared(
    request: Request, train: Tensor, infer: Tensor, plan: MeasurementPlan
) -> dict[str, Array]:
    """Return the metrics of two outputs for a request: logits [T, V], or states [T, D] of an
    encoder."""
    if plan.encoder:
        return {name: _array(function(train, infer)) for name, function in STATE_FUNCTIONS.items()}
    return _policy_values(request, (train, infer), plan, sampled.request_seed(plan.seed, "again"))[
        0
    ]


def _policy_values(
    request: Request, logits: tuple[Tensor, Tensor], plan: MeasurementPlan, seed: int
) -> tuple[dict[str, Array], NDArray[np.int64]]:
    values = _exact_values(logits, plan)
    if not _needs_policies(plan):
        return values, np.empty(0, dtype=np.int64)
    parts: list[dict[str, Array]] = []
    drawn: list[Tensor] = []
    rows = max(1, _ELEMENTS // logits[0].shape[1])
    tokens = torch.tensor(request.tokens, dtype=torch.int64)
    for start in range(0, request.length, rows):
        pair = policy_pair(
            logits[0][start : start + rows], logits[1][start : start + rows], plan.temperature
        )
        found, sampled_tokens = _sampled_values(pair, plan, sampled.request_seed(seed, str(start)))
        drawn.append(sampled_tokens)
        labels = tokens[start + 1 : start + 1 + rows]
        if labels.numel():
            n = labels.numel()
            logs = (pair.train_logits, pair.infer_logits, pair.train_log, pair.infer_log)
            head = PolicyPair(*(log[:n] for log in logs))
            if "ece_gap" in plan.metrics:
                found.update(calibration.confidences(head, labels))
            found.update(_scores(head, labels, plan.metrics))
        parts.append(found)
    for name in dict.fromkeys(name for part in parts for name in part):
        values[name] = np.concatenate([part[name] for part in parts if name in part])
    every = torch.cat(drawn).cpu().numpy()
    return values, every


def _exact_values(logits: tuple[Tensor, Tensor], plan: MeasurementPlan) -> dict[str, Array]:
    """Return the metrics of full logits: by position, and those of the whole request."""
    texts = {name: made for name, made in TEXT_FUNCTIONS.items() if name in plan.metrics}
    width = logits[0].shape[1]
    wanted = plan.metrics & TIER_A
    wanted |= {name for name in plan.context if name in CONTEXT or MEASURES[name].depth <= width}
    needed = {source for source, _ in texts.values()}
    if plan.gradient is not None:
        needed.add("tv")
    if not wanted | needed:
        return {}
    found = tier_a(*logits, plan.temperature, wanted | needed)
    values = {name: found[name] for name in sorted(wanted)}
    if plan.gradient is not None:
        values["grad_bias"] = plan.gradient(found["tv"])
    for name, (source, function) in texts.items():
        defined = bool(np.isfinite(found[source]).all())
        values[name] = np.array([function(found[source]) if defined else math.nan])
    return values


def _needs_policies(plan: MeasurementPlan) -> bool:
    """Return whether the policies are needed: to sample from them, or to score labels."""
    asked = any("sampled" in user.metric.needs for user in plan.user)
    return asked or bool(plan.metrics & (_SAMPLED | _LABELLED | set(AGGREGATES)))


def _scores(head: PolicyPair, labels: Tensor, metrics: frozenset[str]) -> dict[str, Array]:
    """Return the scores of labelled positions for the calibration metrics other than `ece_gap`."""
    if not metrics & (_LABELLED - {"ece_gap"}):
        return {}
    found = calibration.scores(head, labels)
    values: dict[str, Array] = {}
    if "brier_gap" in metrics:
        values["brier_gap"] = found.brier
    if "nll_gap" in metrics:
        values["nll_gap"] = found.nll
    if "ace_gap" in metrics:
        ranked = (found.train_ranked, found.train_hits, found.infer_ranked, found.infer_hits)
        values.update({n: part.reshape(-1) for n, part in zip(RANKED, ranked, strict=True)})
    return values


def _sampled_values(
    pair: PolicyPair, plan: MeasurementPlan, seed: int
) -> tuple[dict[str, Array], Tensor]:
    """Return the metrics of sampled tokens, and these tokens (none if not needed)."""
    found: dict[str, Array] = {}
    read = {name for metric in plan.metrics & set(AGGREGATES) for name in AGGREGATES[metric].inputs}
    wanted = plan.metrics | read
    logs = {TRAIN_LOG, INFER_LOG} & wanted
    asked = any("sampled" in user.metric.needs for user in plan.user)
    if not (wanted & _SAMPLED or logs or asked):
        return found, torch.empty(0, dtype=torch.int64)
    drawn = sampled.sample_tokens(pair, seed)
    at = drawn[:, None]
    train_log, infer_log = (side.gather(-1, at)[:, 0] for side in (pair.train_log, pair.infer_log))
    for name in sorted(wanted & set(SAMPLED_FUNCTIONS)):
        found[name] = _array(SAMPLED_FUNCTIONS[name](train_log - infer_log))
    for name in sorted(wanted & set(PROBABILITY_FUNCTIONS)):
        found[name] = _array(PROBABILITY_FUNCTIONS[name](train_log, infer_log))
    if logs:
        found.update({TRAIN_LOG: _array(train_log), INFER_LOG: _array(infer_log)})
    return found, drawn


def _row_norm(drift: Tensor, kind: str) -> Tensor:
    match kind:
        case "inf":
            return row_linf(drift)
        case "2":
            return row_l2(drift)
        case "span":
            return row_span(drift)
    raise ValueError(f"unknown norm {kind!r}")


def _array(values: Tensor) -> Array:
    return values.detach().to("cpu", torch.float64).numpy()
