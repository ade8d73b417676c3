"""The values of each metric in one rollout, and the columns that each metric reads.

Only tokens inside the mask are read. Metrics of missing columns have no value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kcdsl.diagnostics import Refusal
from kcdsl.ir.kernels import ROLES
from kcdsl.ir.terms import Clause
from kcdsl.metrics import METRICS
from kcdsl.metrics.definition import (
    ADVANTAGE_WEIGHTED,
    CACHE,
    GRADIENTS,
    INFER_LOG,
    LAYERS,
    LENGTHS,
    REROUTED,
    SHARED_ROUTES,
    TRAIN_LOG,
)
from kcdsl_backends.empirical.metrics import policies, recorded
from kcdsl_backends.empirical.metrics.measures import (
    LIST_METRICS,
    PROBABILITY_FUNCTIONS,
    SAMPLED_FUNCTIONS,
    SEQUENCE_FUNCTIONS,
    SEQUENCE_LOG_FUNCTIONS,
)
from kcdsl_backends.empirical.metrics.recorded import TYPES, greedy_divergence_step
from kcdsl_backends.empirical.sources.rollouts.record import Array, Rollout, Side
from kcdsl_backends.empirical.statistics.estimates import NotMeasurable, indicators
from kcdsl_backends.empirical.table.requirements import measured_norms, metrics_of, unreadable

_KINDS = {"json_parse_gap": "parse", "tool_schema_gap": "schema", "exact_match_gap": "match"}


def measure_rollout(rollout: Rollout, metrics: Collection[str]) -> dict[str, Array]:
    """Return the arrays of the named metrics, and those that metrics of whole slices read.

    Raises NotMeasurable if the columns of a metric support no value; the text says which.
    """
    values: dict[str, Array] = {}
    delta = rollout.delta()
    if delta is not None and rollout.train is not None and rollout.infer is not None:
        train, infer = (side.logs[rollout.mask] for side in (rollout.train, rollout.infer))
        values.update(_sampled(train, infer, delta, metrics))
        if delta.size:
            values.update(_sequence(train, infer, delta))
        if "advantages" in rollout.arrays:
            advantages = rollout.arrays["advantages"][rollout.mask]
            values[ADVANTAGE_WEIGHTED] = np.expm1(delta) * advantages
    for name, function in _OTHERS.items():
        if name in metrics:
            values.update(function(rollout))
    if _OF_LISTS.intersection(metrics):
        values.update(_lists(rollout, metrics))
    return values


# --- tokens that were sampled --------------------------------------------------------------------


def _sampled(
    train: Array, infer: Array, delta: Array, metrics: Collection[str]
) -> dict[str, Array]:
    """Return the metrics of ln w, and ln w itself, from which many others are computed."""
    at, p, q = (torch.from_numpy(np.ascontiguousarray(a)) for a in (delta, train, infer))
    found = {"log_ratio": delta, TRAIN_LOG: train, INFER_LOG: infer}
    for name, function in SAMPLED_FUNCTIONS.items():
        if name in metrics:
            found[name] = function(at).numpy()
    for name, of_both in PROBABILITY_FUNCTIONS.items():
        if name in metrics:
            found[name] = of_both(p, q).numpy()
    return found


def _sequence(train: Array, infer: Array, delta: Array) -> dict[str, Array]:
    found = {
        **{name: function(delta) for name, function in SEQUENCE_FUNCTIONS.items()},
        **{name: function(train, infer) for name, function in SEQUENCE_LOG_FUNCTIONS.items()},
        LENGTHS: float(delta.size),
    }
    return {name: np.array([value]) for name, value in found.items()}


# --- the likeliest tokens ------------------------------------------------------------------------


def _lists(rollout: Rollout, metrics: Collection[str]) -> dict[str, Array]:
    train, infer = rollout.train, rollout.infer
    if train is None or infer is None or train.top is None or infer.top is None:
        return {}
    found: dict[str, Array] = {}
    if rollout.counted == 0:
        return found
    if "topk_tail_kl" in metrics or "topk_tail_tv" in metrics:
        pair = common_logs(rollout, train, infer)
        found["topk_tail_kl"] = policies.topk_tail_kl(*pair).numpy()
        found["topk_tail_tv"] = policies.topk_tail_tv(*pair).numpy()
    lists = [side.top.ids[rollout.mask] for side in (train, infer) if side.top is not None]
    depth = min(train.top.likeliest, infer.top.likeliest)
    same = lists[0][:, 0] == lists[1][:, 0]
    found["top1_overlap"] = same.astype(np.float64)
    found["top1_flip"] = 1.0 - found["top1_overlap"]
    found["flip_hazard"] = 1000.0 * found["top1_flip"]
    found["greedy_divergence_step"] = np.array([float(greedy_divergence_step(found["top1_flip"]))])
    for name, (function, k) in LIST_METRICS.items():
        if name in metrics and k <= depth:
            found[name] = function(lists[0][:, :depth], lists[1][:, :depth])
    return found


def common_logs(rollout: Rollout, train: Side, infer: Side) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ln p and ln q [N, m] of the tokens that both sides state at each counted position.

    These are the tokens in both lists and the sampled one; -inf on both sides if a position has
    fewer.
    """
    if train.top is None or infer.top is None:
        raise NotMeasurable("a side lists no likeliest tokens")
    tokens = np.array(rollout.tokens, dtype=np.int64)
    ids = [_with_sampled(side, tokens)[0][rollout.mask] for side in (train, infer)]
    logs = [_with_sampled(side, tokens)[1][rollout.mask] for side in (train, infer)]
    equal = (ids[0][:, :, None] == ids[1][:, None, :]) & (ids[0] >= 0)[:, :, None]
    shared = equal.any(axis=2)
    place = equal.argmax(axis=2)
    p = np.where(shared, logs[0], -np.inf)
    q = np.where(shared, np.take_along_axis(logs[1], place, axis=1), -np.inf)
    return torch.from_numpy(p), torch.from_numpy(q)


def _with_sampled(side: Side, tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], Array]:
    """Return the ids [L, k + 1] and logs of a side's list with the sampled token appended; its id
    is -1 if the list has it already."""
    assert side.top is not None
    listed = (side.top.ids == tokens[:, None]).any(axis=1)
    own = np.where(listed, -1, tokens)[:, None]
    ids = np.concatenate([side.top.ids, own], axis=1)
    return ids, np.concatenate([side.top.logs, side.logs[:, None]], axis=1)


# --- behaviour, gradients, routes, times ---------------------------------------------------------


def _reward(rollout: Rollout) -> dict[str, Array]:
    found = rollout.numbers
    return {"reward_delta": np.array([found["infer_reward"] - found["train_reward"]])}


def _refusal(rollout: Rollout) -> dict[str, Array]:
    sides = [rollout.numbers[f"{side}_refused"] for side in ("train", "infer")]
    train, infer = indicators(sides, "refused")
    return {"refusal_flip": np.array([float(train != infer)])}


def _texts(name: str) -> Callable[[Rollout], dict[str, Array]]:
    def gap(rollout: Rollout) -> dict[str, Array]:
        texts = [str(rollout.fields[f"role:{side}_text"]) for side in ("train", "infer")]
        passed = _indicators(_KINDS[name], texts, rollout)
        return {name: np.array([passed[1] - passed[0]])}

    return gap


def _indicators(kind: str, texts: list[str], rollout: Rollout) -> Array:
    if kind == "parse":
        return recorded.parses_as_json(texts)
    if kind == "match":
        return recorded.exact_matches(texts, [str(rollout.fields["role:reference"])] * 2)
    return recorded.calls_tool(texts, _schema(rollout))


def _schema(rollout: Rollout) -> Mapping[str, type | tuple[type, ...]]:
    schema = rollout.fields["role:schema"]
    if not isinstance(schema, dict) or not schema:
        raise NotMeasurable('schema: write fields with their types, such as {"city": "string"}')
    unknown = [kind for kind in schema.values() if not isinstance(kind, str) or kind not in TYPES]
    if unknown:
        raise NotMeasurable(f"schema: {unknown[0]!r} is no type; types: {', '.join(TYPES)}")
    return {str(name): TYPES[kind] for name, kind in schema.items()}


def _gradients(rollout: Rollout) -> dict[str, Array]:
    train, infer = (rollout.arrays[f"{side}_gradient"] for side in ("train", "infer"))
    if train.size != infer.size:
        raise NotMeasurable(f"gradients of {train.size} and {infer.size} numbers")
    return dict(zip(GRADIENTS, (train, infer, np.array([float(train.size)])), strict=True))


def _routes(rollout: Rollout) -> dict[str, Array]:
    train, infer = (rollout.arrays[f"{side}_routes"][rollout.mask] for side in ("train", "infer"))
    if not rollout.counted:
        return {}
    shares = [
        recorded.router_agreement(train[i : i + 1], infer[i : i + 1]) for i in range(len(train))
    ]
    return {
        SHARED_ROUTES: np.concatenate(shares),
        LAYERS: np.array([float(train.shape[1])]),
        REROUTED: recorded.any_flip(train, infer),
    }


def _router_margin(rollout: Rollout) -> dict[str, Array]:
    scores = rollout.arrays["train_router_scores"][rollout.mask]
    if not rollout.counted:
        return {}
    chosen = rollout.arrays["train_routes"].shape[2]
    return {"router_margin": recorded.router_margin(scores, chosen).min(axis=1)}


def _cache(rollout: Rollout) -> dict[str, Array]:
    sizes = rollout.arrays["cache"]
    whole = (sizes == np.floor(sizes)) & (sizes < 2**53)
    if sizes.size != 4 or not bool(whole[:3].all()):
        raise NotMeasurable("cache: write [layers, heads, width, bytes of one number]")
    layers, heads, width = (int(s) for s in sizes[:3])
    tokens = len(rollout.prompt) + len(rollout.tokens)
    return {CACHE: np.array([recorded.kv_memory(layers, heads, width, tokens, float(sizes[3]))])}


_OTHERS: Mapping[str, Callable[[Rollout], dict[str, Array]]] = {
    "reward_delta": _reward,
    "refusal_flip": _refusal,
    **{name: _texts(name) for name in _KINDS},
    "grad_cosine": _gradients,
    "grad_rel_bias": _gradients,
    "router_agreement": _routes,
    "tokens_any_flip": _routes,
    "router_margin": _router_margin,
    "kv_memory": _cache,
}
_OF_LISTS = frozenset(
    {
        *LIST_METRICS,
        *("topk_tail_kl", "topk_tail_tv", "top1_overlap", "top1_flip", "flip_hazard"),
        "greedy_divergence_step",
    }
)


def served(rollout: Rollout) -> dict[str, Array]:
    """Return the times of a rollout from the stamps of its counted tokens; a single one has no
    `tpot`."""
    own = rollout.arrays["stamps"][rollout.mask]
    stamps = recorded.Served(rollout.numbers["arrived"], own.tolist())
    found = {
        "latency": recorded.latency(stamps),
        "ttft": recorded.time_to_first_token(stamps),
    }
    if len(stamps.tokens) > 1:
        found["tpot"] = recorded.time_per_output_token(stamps)
    return {name: np.array([value]) for name, value in found.items()}


# --- needs ---------------------------------------------------------------------------------------


NEEDS: Mapping[str, tuple[str, ...]] = {
    m.name: m.columns for m in METRICS.values() if m.columns is not None
}
"""The roles of columns that each metric of a recording reads."""

_LOGITS = "the recording holds no logits: let both kernels read them (format: logits), or run"


def check_needs(
    clauses: Sequence[Clause],
    roles: Collection[str],
    columns: Mapping[str, str],
    user: Iterable[str],
) -> None:
    """Refuse a clause whose metric reads a column that the recording lacks.

    `user` are the user's own metrics, which read arrays of a forward pass of both kernels.
    """
    own = frozenset(user)
    for clause in clauses:
        for name in sorted(metrics_of(clause.require)):
            if name in own:
                raise _out_of_reach(clause, name, "metrics of your own read arrays of both kernels")
            if name not in NEEDS:
                raise _out_of_reach(clause, name, _why_not(name))
            missing = [role for role in NEEDS[name] if role not in roles]
            if missing:
                raise _lacking(clause, name, missing, columns)
        if measured_norms(clause.require):
            raise _out_of_reach(clause, "measured_drift", "a recording runs no block")


def check_depths(clauses: Sequence[Clause], rollouts: Sequence[Rollout]) -> None:
    """Refuse a metric of longer lists of the likeliest tokens than the recording has."""
    depths = [
        min(r.train.top.likeliest, r.infer.top.likeliest)
        for r in rollouts
        if r.train is not None and r.infer is not None and r.train.top and r.infer.top and r.counted
    ]
    for clause in clauses:
        for name in sorted(metrics_of(clause.require) & set(LIST_METRICS)):
            k = LIST_METRICS[name][1]
            if depths and min(depths) < k:
                why = f"it needs the {k} likeliest tokens, and the recording lists {min(depths)}"
                raise _out_of_reach(clause, name, why)


def _why_not(name: str) -> str:
    if name in ("peak_memory", "determinism"):
        return "nothing is run, so nothing is timed, repeated or counted"
    return _LOGITS


def _out_of_reach(clause: Clause, name: str, why: str) -> Refusal:
    help = "metrics of recordings, and what each of them reads: `kcdsl explain rollouts`"
    return unreadable(clause, f"`{name}`", f"but {why}", help)


def _lacking(
    clause: Clause, name: str, missing: Sequence[str], columns: Mapping[str, str]
) -> Refusal:
    named = " and no ".join(f"`{columns.get(role, role)}`" for role in missing)
    return unreadable(
        clause,
        f"`{name}`",
        f"but the recording has no column {named}",
        f"record it, or name its column: columns: {{{missing[0]}: NAME}}",
        tuple(f"{role}: {ROLES[role]}" for role in missing),
    )
