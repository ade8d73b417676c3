"""Metrics of rollouts: closed forms, the prompt as the unit, masked tokens."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl.ir.terms import Metric, Statistic
from kcdsl.metrics import MEASURES, METRICS, RECORDED, UNMEASURED
from kcdsl_backends.empirical.decision.estimates import Settings, evaluate
from kcdsl_backends.empirical.metrics.measures import MAGNITUDES, RECORDED_AGGREGATES
from kcdsl_backends.empirical.metrics.policies import kl
from kcdsl_backends.empirical.metrics.sums import intraclass_correlation
from kcdsl_backends.empirical.sources.rollouts.measures import (
    NEEDS,
    common_logs,
    measure_rollout,
    served,
)
from kcdsl_backends.empirical.sources.rollouts.prompts import groups_of, run_of, timed
from kcdsl_backends.empirical.sources.rollouts.record import (
    Rollout,
    Semantics,
    Side,
    TopLogs,
    problem_of,
)
from kcdsl_backends.empirical.statistics.estimates import ONE_LOOK, NotMeasurable
from kcdsl_backends.empirical.table.evidence import SliceData

RAW = Semantics("raw")
ALL = {**MEASURES, **RECORDED}


def rollout(
    train: Any, infer: Any, *, key: str = "a", prompt: tuple[int, ...] = (1,), **more: Any
) -> Rollout:
    count = len(train)
    found = Rollout(
        key,
        prompt,
        tuple(range(count)),
        np.ones(count, dtype=bool),
        Side(np.array(train, dtype=np.float64), RAW),
        Side(np.array(infer, dtype=np.float64), RAW),
        place="row 1",
    )
    return replace(found, **more)


def on_slice(rollouts: list[Rollout], metrics: set[str], groups: bool = True) -> SliceData:
    units = groups_of("f", rollouts, rollouts)
    assert groups == (len(units) < len(rollouts))
    runs = tuple(run_of(unit, metrics, 0).unit for unit in units)
    times = tuple(unit for group in units for unit in timed(group))
    return SliceData("all", runs, times, measures=ALL)


def value(name: str, data: SliceData, kind: str = "aggregate") -> float:
    term = Metric(name) if kind == "aggregate" else Statistic(kind, Metric(name), None)
    found, _ = evaluate(term, data, "upper", Settings(0, None))
    return float(found.value)


# --- tokens --------------------------------------------------------------------------------------


def test_only_unmasked_tokens_are_used() -> None:
    mask = np.array([True, False, True])
    found = measure_rollout(
        rollout([-1.0, -9.0, -2.0], [-1.5, -1.0, -2.25], mask=mask), {"k1", "k3", "tv_is"}
    )
    assert found["log_ratio"].tolist() == [0.5, 0.25]
    assert found["k1"].tolist() == [-0.5, -0.25]
    assert found["k3"] == pytest.approx([math.expm1(0.5) - 0.5, math.expm1(0.25) - 0.25])
    assert found["seq_log_ratio"].tolist() == [0.75]
    assert found["geo_ratio"] == pytest.approx([math.exp(0.375)])
    assert found["seq_max_abs"].tolist() == [0.5]
    assert found["log_ppl_diff"] == pytest.approx([-0.375])
    assert found["ppl_ratio"] == pytest.approx([math.exp(-0.375)])


def test_rollout_without_its_lists_leaves_the_unit_without_their_metrics() -> None:
    """A server that leaves lists out at one of two draws after a prompt hides nothing."""
    lists = TopLogs(np.array([[0, 1]] * 2), np.log([[0.5, 0.25]] * 2))
    bare = rollout([-1.0, -1.0], [-1.0, -1.0], key="b")
    sides = {name: replace(getattr(bare, name), top=lists) for name in ("train", "infer")}
    metrics = {"top1_flip", "k3"}
    assert value("top1_flip", on_slice([replace(bare, **sides)], metrics, False), "max") == 0.0
    data = on_slice([replace(bare, key="a", **sides), bare], metrics)
    with pytest.raises(NotMeasurable, match="top1_flip: the request f:a: its rollout of row 1"):
        value("top1_flip", data, "max")
    assert value("k3", data, "max") == 0.0


def test_estimates_from_sampled_tokens_match_the_divergences() -> None:
    """Estimates of both KL, TV, chi2 and ESS lie within four standard errors of the exact values.

    Tokens are drawn from q. Each estimate agrees with its direction, and not with the other one.
    """
    rng = np.random.default_rng(3)
    p, q = (rng.dirichlet(np.full(12, 2.0)) for _ in range(2))
    q = 0.6 * p + 0.4 * q
    units = []
    for i in range(400):
        drawn = rng.choice(12, size=50, p=q)
        units.append(rollout(np.log(p[drawn]), np.log(q[drawn]), key=str(i), prompt=(i, i)))
    exact = {
        "w_log_w_minus": float((p * np.log(p / q)).sum()),
        "k3": float((q * np.log(q / p)).sum()),
        "k1": float((q * np.log(q / p)).sum()),
        "tv_is": float(np.abs(p - q).sum() / 2),
        "chi2_is": float((p * p / q).sum() - 1),
        "importance_ratio": 1.0,
    }
    data = on_slice(units, set(exact), groups=False)
    for name, truth in exact.items():
        sums = np.array([float(u.values[name].mean()) for u in data.requests])
        error = float(sums.std(ddof=1)) / math.sqrt(sums.size)
        assert abs(float(sums.mean()) - truth) < 4 * error, name
    ess = value("ess_frac", data)
    assert ess == pytest.approx(1 / float((p * p / q).sum()), rel=0.02)
    other = float((q * np.log(q / p)).sum())
    assert abs(exact["w_log_w_minus"] - other) > 0.005  # the directions differ here


def test_sequences_have_their_closed_forms() -> None:
    rows = [
        rollout([-1.0, -1.0], [-1.5, -0.8], key="a", prompt=(1,)),
        rollout([-1.0, -2.0, -3.0], [-1.0, -2.0, -4.0], key="b", prompt=(2,)),
    ]
    data = on_slice(rows, set(), groups=False)
    sums = [0.5 - 0.2, 1.0]
    weights = np.exp(sums)
    assert value("seq_log_ratio", data, "mean") == pytest.approx(np.mean(sums))
    assert value("seq_k3", data, "max") == pytest.approx(math.e - 2)
    assert value("ess_seq", data) == pytest.approx(weights.sum() ** 2 / (2 * (weights**2).sum()))
    assert value("tail_mass_seq", data) == 0.5
    assert value("icc", data) == pytest.approx(
        intraclass_correlation([0.5, -0.2, 0.0, 0.0, 1.0], [2, 3])
    )


def test_length_scaling_uses_the_rollouts_of_all_prompts() -> None:
    rng = np.random.default_rng(0)
    rows = []
    for i in range(64):
        drift = 0.01 * rng.standard_normal(32)
        rows.append(rollout(drift - 1, np.full(32, -1.0), key=str(i), prompt=(i % 16, 0)))
    data = on_slice(rows, set())
    assert len(data.requests) == 16
    assert value("length_scaling", data) == pytest.approx(0.5, abs=0.2)
    biased = [
        rollout(np.full(8, -1.01), np.full(8, -1.0), key=str(i), prompt=(i,)) for i in range(9)
    ]
    assert value("length_scaling", on_slice(biased, set(), groups=False)) == pytest.approx(1)


# --- the likeliest tokens ------------------------------------------------------------------------


def _with_lists(p: Any, q: Any, token: int, k: int = 3) -> Rollout:
    """Return a rollout of one token with top-k lists of both sides."""

    def lists(law: Any) -> TopLogs:
        best = np.argsort(-law, kind="stable")[:k]
        return TopLogs(best[None], np.log(law[best])[None])

    found = rollout([math.log(p[token])], [math.log(q[token])])
    assert found.train is not None
    assert found.infer is not None
    return replace(
        found,
        tokens=(token,),
        train=replace(found.train, top=lists(p)),
        infer=replace(found.infer, top=lists(q)),
    )


@pytest.mark.full
def test_top_k_lists_bound_divergences_from_below() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        p, q = rng.dirichlet(np.full(20, 0.5), size=2) + 1e-6
        p, q = p / p.sum(), q / q.sum()
        token = int(rng.choice(20, p=q))
        one = _with_lists(p, q, token)
        found = measure_rollout(one, {"topk_tail_kl", "topk_tail_tv"})
        exact = float(
            kl(torch.log(torch.from_numpy(p))[None], torch.log(torch.from_numpy(q))[None])
        )
        assert 0 <= float(found["topk_tail_kl"][0]) <= exact + 1e-9
        assert float(found["topk_tail_tv"][0]) <= float(np.abs(p - q).sum() / 2) + 1e-9
    whole = _with_lists(p, q, token, k=20)
    found = measure_rollout(whole, {"topk_tail_kl"})
    assert float(found["topk_tail_kl"][0]) == pytest.approx(exact, rel=1e-6)


def test_common_tokens_include_the_sampled_one() -> None:
    p = np.array([0.5, 0.2, 0.1, 0.1, 0.1])
    q = np.array([0.1, 0.5, 0.1, 0.2, 0.1])
    one = _with_lists(p, q, 4, k=2)  # lists {0, 1} and {1, 3}
    assert one.train is not None
    assert one.infer is not None
    train, infer = common_logs(one, one.train, one.infer)
    both = sorted(zip(train[0].exp().tolist(), infer[0].exp().tolist(), strict=True))
    assert both == [pytest.approx((0, 0)), pytest.approx((0.1, 0.1)), pytest.approx((0.2, 0.5))]
    found = measure_rollout(one, {"top1_overlap", "topk_tail_tv"})
    assert found["top1_overlap"].tolist() == [0.0]
    assert found["top1_flip"].tolist() == [1.0]
    assert found["greedy_divergence_step"].tolist() == [0.0]
    # lumped: 0.1/0.1, 0.2/0.5 and the rest 0.7/0.4
    assert float(found["topk_tail_tv"][0]) == pytest.approx(0.3)


# --- behaviour, gradients, routes, times ---------------------------------------------------------


def _behaving(key: str, group: str, **numbers: float) -> Rollout:
    return rollout([-1.0], [-1.0], key=key, group=group, numbers=numbers)


def test_rewards_are_paired_by_prompt() -> None:
    rows = [
        _behaving("a", "x", train_reward=0.0, infer_reward=1.0),
        _behaving("b", "x", train_reward=0.0, infer_reward=0.0),
        _behaving("c", "y", train_reward=1.0, infer_reward=0.0),
    ]
    data = on_slice(rows, {"reward_delta"})
    assert value("reward_delta", data) == pytest.approx(abs((0.5 - 1.0) / 2))


def test_limits_of_a_magnitude_are_those_of_the_mean() -> None:
    rng = np.random.default_rng(1)
    rows = [
        _behaving(str(i), str(i), train_reward=0.0, infer_reward=float(rng.standard_normal()))
        for i in range(80)
    ]
    data = on_slice(rows, {"reward_delta"}, groups=False)
    found, n = evaluate(Metric("reward_delta"), data, "upper", Settings(0, ONE_LOOK))
    mean = float(np.mean([r.numbers["infer_reward"] for r in rows]))
    assert n == 80
    assert float(found.value) == pytest.approx(abs(mean))
    assert found.low == 0  # the mean may be 0, which its magnitude alone would never show
    assert found.high is not None
    assert float(found.high) > abs(mean)


def test_advantages_weight_the_gradient_bias() -> None:
    arrays = {"advantages": np.array([1.0, -1.0, 5.0])}
    row = rollout(
        [math.log(2), math.log(0.5), -1.0], [0.0, 0.0, -1.0], arrays=arrays,
        mask=np.array([True, True, False]),
    )  # fmt: skip
    data = on_slice([row], set(), groups=False)
    assert value("adv_weighted_bias", data) == pytest.approx(abs((1.0 + 0.5) / 2))


def test_texts_of_both_sides_are_evaluated() -> None:
    fields = {
        "role:train_text": '{"city": "Oslo"}',
        "role:infer_text": '{"city": 3}',
        "role:reference": '{"city": "Oslo"} ',
        "role:schema": {"city": "string"},
    }
    names = {"json_parse_gap", "tool_schema_gap", "exact_match_gap"}
    data = on_slice([rollout([-1.0], [-1.0], fields=fields)], names, groups=False)
    assert [value(name, data) for name in sorted(names)] == [1.0, 0.0, 1.0]
    kinds: tuple[Any, ...] = (["string"], {}, None, "word")
    for kind in kinds:
        wrong = rollout([-1.0], [-1.0], fields={**fields, "role:schema": {"city": kind}})
        with pytest.raises(NotMeasurable, match=f"{re.escape(repr(kind))} is no type"):
            measure_rollout(wrong, {"tool_schema_gap"})
    unusable = on_slice([wrong], {"tool_schema_gap"}, groups=False)
    with pytest.raises(NotMeasurable, match="is no type"):
        value("tool_schema_gap", unusable)


def test_refusals_are_paired_by_prompt() -> None:
    rows = [
        _behaving("a", "x", train_refused=1.0, infer_refused=0.0),
        _behaving("b", "y", train_refused=1.0, infer_refused=1.0),
    ]
    data = on_slice(rows, {"refusal_flip"}, groups=False)
    assert value("refusal_flip", data, "rate") == 0.5


def test_gradients_of_rollouts_sum_to_that_of_the_batch() -> None:
    arrays = [
        {"train_gradient": np.array([1.0, 0.0]), "infer_gradient": np.array([0.0, 1.0])},
        {"train_gradient": np.array([2.0, 4.0]), "infer_gradient": np.array([3.0, 4.0])},
    ]
    rows = [
        rollout([-1.0], [-1.0], key=str(i), prompt=(i,), arrays=a) for i, a in enumerate(arrays)
    ]
    data = on_slice(rows, {"grad_cosine", "grad_rel_bias"}, groups=False)
    assert value("grad_rel_bias", data) == pytest.approx(1.0 / 5.0)  # (3, 4) and (3, 5)
    assert value("grad_cosine", data) == pytest.approx(29 / (5 * math.sqrt(34)))
    uneven = replace(rows[1], arrays={**arrays[1], "train_gradient": np.ones(3)})
    with pytest.raises(NotMeasurable, match="3 and 2"):
        measure_rollout(uneven, {"grad_cosine"})


def test_routes_are_compared_layer_by_layer() -> None:
    train = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]]])
    infer = np.array([[[1, 0], [2, 4]], [[0, 1], [3, 2]], [[7, 8], [7, 8]]])
    scores = np.array([[[0.1, 0.5, 0.2, 0.3]] * 2] * 3)
    row = rollout(
        [-1.0] * 3, [-1.0] * 3, mask=np.array([True, True, False]),
        arrays={"train_routes": train, "infer_routes": infer, "train_router_scores": scores},
    )  # fmt: skip
    names = {"router_agreement", "tokens_any_flip", "router_margin"}
    data = on_slice([row], names, groups=False)
    assert value("router_agreement", data) == 0.75
    assert value("tokens_any_flip", data) == 0.5
    assert value("router_margin", data, "min") == pytest.approx(0.1)


def test_timestamps_give_times_and_the_cache_its_bytes() -> None:
    row = rollout(
        [-1.0] * 3, [-1.0] * 3, numbers={"arrived": 10.0},
        arrays={"stamps": np.array([10.5, 10.75, 11.0]), "cache": np.array([2.0, 4, 8, 2])},
    )  # fmt: skip
    assert {k: v.tolist() for k, v in served(row).items()} == {
        "latency": [1.0], "ttft": [0.5], "tpot": [0.25]
    }  # fmt: skip
    data = on_slice([row], {"kv_memory"}, groups=False)
    assert value("ttft", data, "max") == 0.5
    assert value("tpot", data, "max") == 0.25
    assert value("throughput", data) == 3.0
    assert value("kv_memory", data) == 2 * 2 * 4 * 8 * (1 + 3) * 2
    wrong = replace(row, arrays={**row.arrays, "cache": np.array([1e308, 4, 8, 2])})
    with pytest.raises(NotMeasurable, match="cache: write"):
        measure_rollout(wrong, {"kv_memory"})


def test_tokens_of_tools_make_no_kernel_faster() -> None:
    """They come at once, and the kernel under test did not write them."""
    stamps = np.array([0.5, *[0.6] * 8, 1.0])
    mask = np.array([True, *[False] * 8, True])
    row = rollout(
        [-1.0] * 10, [-1.0] * 10, numbers={"arrived": 0.0}, arrays={"stamps": stamps}, mask=mask
    )
    data = on_slice([row], set(), groups=False)
    assert value("tpot", data, "max") == 0.5
    assert value("throughput", data) == 2.0


# --- units ---------------------------------------------------------------------------------------


def test_rollouts_of_one_prompt_are_one_unit() -> None:
    rows = [rollout([-1.0], [-1.0], key=str(i), prompt=(i // 4,)) for i in range(12)]
    groups = groups_of("f", rows, rows)
    assert [len(g.members) for g in groups] == [4, 4, 4]
    assert [g.request.key for g in groups] == ["f:0", "f:4", "f:8"]
    named = [replace(r, group="one") for r in rows]
    assert [g.request.key for g in groups_of("f", named, named)] == ["f:group one"]
    alone = [replace(r, prompt=()) for r in rows]
    assert len(groups_of("f", alone, alone)) == 12


def test_slice_with_some_rollouts_of_a_prompt_has_its_own_unit() -> None:
    rows = [rollout([-1.0], [-1.0 - i], key=str(i)) for i in range(4)]
    whole, part = groups_of("f", rows, rows)[0], groups_of("f", rows, rows[:2])[0]
    assert whole.request.key != part.request.key
    assert "2 of 4" in part.request.key
    assert groups_of("f", rows, rows[2:])[0].request.key != part.request.key
    assert run_of(part, set(), 0).unit.values["log_ratio"].tolist() == [0.0, 1.0]


def test_limits_of_means_count_prompts() -> None:
    """Samples that repeat the value of their prompt do not narrow the limits."""
    rng = np.random.default_rng(2)
    drifts = 0.1 * rng.standard_normal(40)
    wide = [rollout([-1.0 + d], [-1.0], key=f"{i}", prompt=(i,)) for i, d in enumerate(drifts)]
    many = [replace(r, key=f"{r.key}.{j}") for r in wide for j in range(16)]
    term = Statistic("mean", Metric("log_ratio"), None)
    spans = []
    for rows in (wide, many):
        data = on_slice(rows, set(), groups=rows is many)
        found, n = evaluate(term, data, "upper", Settings(0, ONE_LOOK))
        assert n == 40
        assert found.low is not None
        assert found.high is not None
        spans.append(float(found.high - found.low))
    assert spans[0] == pytest.approx(spans[1], rel=1e-9)


def test_non_finite_ratios_fail_the_unit() -> None:
    row = rollout([-math.inf, -1.0], [-1.0, -1.0])
    run = run_of(groups_of("f", [row], [row])[0], {"k3"}, 0)
    assert run.nonfinite == 1
    assert run.unit.failure == "1 of its ln-ratios are not finite"


# --- tables --------------------------------------------------------------------------------------


def test_every_recorded_metric_has_its_columns() -> None:
    """25 metrics are refused after a forward pass; each has columns here, or logits."""
    fed = set(NEEDS) | {"noise_ratio"}
    assert set(UNMEASURED) <= fed
    assert set(RECORDED_AGGREGATES) | set(MAGNITUDES) <= set(UNMEASURED)
    assert set(NEEDS) <= set(METRICS)


def test_problems_of_rollouts_are_reported() -> None:
    good = rollout([-1.0, -2.0], [-1.0, -2.0])
    assert problem_of(good, 2) is None
    outside = ("prompt", "1 at position 0 is no token id of a vocabulary of 1")
    assert problem_of(good, 1) == outside
    assert problem_of(replace(good, mask=np.ones(3, dtype=bool))) == (
        "mask", "3 values for 2 tokens"
    )  # fmt: skip
    twice = TopLogs(np.array([[1, 1], [0, 1]]), np.log(np.full((2, 2), 0.3)))
    listed = replace(good, train=Side(np.array([-1.0, -2.0]), RAW, twice))
    assert problem_of(listed) == (
        "train_top_ids", "a token occurs twice in the list of one position"
    )  # fmt: skip
    heavy = TopLogs(np.array([[0, 1], [0, 1]]), np.log(np.full((2, 2), 0.6)))
    listed = replace(good, train=Side(np.array([-1.0, -2.0]), RAW, heavy))
    assert problem_of(listed) == (
        "train_top_logs", "the probabilities of a position sum to more than 1"
    )  # fmt: skip
    others = TopLogs(np.array([[1], [0]]), np.log(np.full((2, 1), 0.9)))
    listed = replace(good, tokens=(0, 0), train=Side(np.log([0.3, 0.9]), RAW, others))
    assert problem_of(listed) == (
        "train_top_logs", "the probabilities of a position sum to more than 1"
    )  # fmt: skip
    assert problem_of(replace(listed, mask=np.array([False, True]))) is None
    strange = replace(others, ids=np.array([[2], [0]]))
    listed = replace(good, train=Side(np.array([-3.0, -3.0]), RAW, strange))
    assert problem_of(listed, 2) == ("train_top_ids", "2 is no token id of a vocabulary of 2")
