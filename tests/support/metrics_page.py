"""The table of docs/metrics.md, written from the registries of the language and the backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kcdsl.metrics import METRICS
from kcdsl_backends.empirical import runtime
from kcdsl_backends.empirical.metrics import bits, calibration, curves, gradient, sequences
from kcdsl_backends.empirical.metrics.aggregates import AGGREGATES
from kcdsl_backends.empirical.metrics.measures import (
    MEASURES,
    PAIR_FUNCTIONS,
    PROBABILITY_FUNCTIONS,
    SAMPLED_FUNCTIONS,
    STATE_FUNCTIONS,
)
from kcdsl_backends.empirical.metrics.recorded import RECORDED, RECORDED_FUNCTIONS

HEADER = "| metric | formula | tier | bias | estimates | better | unit | from | module |"

_OTHERS: Mapping[str, Callable[..., Any]] = {
    "bitwise_mismatch_count": bits.bit_metrics,
    "ulp_max": bits.bit_metrics,
    "greedy_divergence_step": curves.greedy_divergence_step,
    "token_kl_max": sequences.max_token_kl,
    "sequence_tv": sequences.composed_tv,
    "grad_bias": gradient.bias_of_tv,
    "ece_gap": calibration.ece_gap,
    **dict.fromkeys(
        ("latency", "ttft", "tpot", "throughput", "peak_memory", "failure_rate", "determinism"),
        runtime.time_requests,
    ),
    **dict.fromkeys(("brier_gap", "nll_gap", "ace_gap"), calibration.scores),
}
_STATED = {
    "log_ratio": "metrics.sampled",
    "top1_flip": "metrics.ranks",
    "flip_hazard": "metrics.curves",
    "length_scaling": "metrics.sequences",
    "router_agreement": "metrics.routing",
    **dict.fromkeys(
        ("refusal_flip", "json_parse_gap", "tool_schema_gap", "exact_match_gap", "reward_delta"),
        "metrics.behaviour",
    ),
    **dict.fromkeys(
        ("ratio_extreme", "ratio_above2", "ratio_above10", "ratio_below2", "ratio_below10"),
        "metrics.tails",
    ),
    **dict.fromkeys(
        ("clipfrac0", "oob_tis", "oob_mis", "oob_icepop", "oob_veto"), "metrics.rejection"
    ),
}
"""Where the idea of a metric stands whose function is made from another."""


def module_of(name: str) -> str:
    """Return the module, below `kcdsl_backends.empirical`, that computes a metric."""
    if name in _STATED:
        return _STATED[name]
    for functions in (
        _OTHERS, PAIR_FUNCTIONS, SAMPLED_FUNCTIONS, PROBABILITY_FUNCTIONS, STATE_FUNCTIONS,
        {n: a.function for n, a in AGGREGATES.items()}, RECORDED_FUNCTIONS,
    ):  # fmt: skip
        function: Any = functions.get(name)
        if function is None:
            continue
        while isinstance(function, partial):
            function = function.keywords.get("metric", function.func)
        return str(function.__module__).removeprefix("kcdsl_backends.empirical.")
    raise KeyError(name)


def rows() -> list[str]:
    """Return a row for each metric of the language, in its order."""
    found = []
    for name, metric in METRICS.items():
        measure = MEASURES.get(name) or RECORDED[name]
        cells = (
            f"`{name}`",
            measure.estimator,
            measure.tier,
            measure.bias.replace("_", " "),
            measure.direction,
            measure.better,
            str(metric.dimension),
            ", ".join(metric.needs),
            f"`{module_of(name)}`",
        )
        found.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return found
