"""Metrics from recorded runs: whole sequences, behaviour, gradients and routes of experts.

W is the weight of a sequence, the product of the ratios w of its tokens. Sources: Donner 1986
(intraclass correlation of groups of unequal size).
"""

from __future__ import annotations

from functools import partial

from kcdsl.ir.terms import Family
from kcdsl.metrics.definition import (
    ABSOLUTE_MEAN,
    ADVANTAGE_WEIGHTED,
    AGGREGATE,
    GRADIENTS,
    INDICATOR,
    LAYERS,
    LENGTHS,
    LOGS,
    ONE_WHOLE,
    RATIO_LOG,
    REROUTED,
    SHARED_ROUTES,
    MetricDefinition,
)
from kcdsl.metrics.policies import LOG_COLUMNS
from kcdsl.units import NATS, ONE, RATIO

_TEXT_COLUMNS = ("train_text", "infer_text")
_GRADIENT_COLUMNS = ("train_gradient", "infer_gradient")
_ROUTE_COLUMNS = ("train_routes", "infer_routes")
_NO_ROLLOUTS = "the tokens of requests were not sampled from the inference kernel as one text"
_NO_TEXT = "the requests carry no generated text of both kernels"
_NO_ROUTES = "the kernels record no routes of experts"
_NO_GRADIENTS = "a forward pass gives no gradients"
_RATIOS = frozenset({"max", "min", "quantile"})

_sequence = partial(
    MetricDefinition,
    counted="request",
    needs=("rollouts",),
    tier="C",
    noisy=True,
    reads=(RATIO_LOG,),
    columns=LOG_COLUMNS,
    absent=_NO_ROLLOUTS,
)
_aggregate = partial(
    MetricDefinition, kind="aggregate", counted="window", statistics=AGGREGATE, noisy=True
)
_of_sequences = partial(
    _aggregate, needs=("rollouts",), tier="C", columns=LOG_COLUMNS, absent=_NO_ROLLOUTS
)
_of_texts = partial(
    _aggregate,
    family=Family.STATISTICAL,
    needs=("text",),
    upper=ONE_WHOLE,
    tier="D",
    bias="biased",
    entry=ABSOLUTE_MEAN,
    absent=_NO_TEXT,
)
_of_gradients = partial(
    _aggregate,
    needs=("gradients",),
    tier="D",
    reads=GRADIENTS,
    columns=_GRADIENT_COLUMNS,
    absent=_NO_GRADIENTS,
)
_of_routes = partial(
    _aggregate,
    family=Family.STATISTICAL,
    needs=("routes",),
    upper=ONE_WHOLE,
    columns=_ROUTE_COLUMNS,
    absent=_NO_ROUTES,
)

DEFINITIONS = (
    _sequence(
        "seq_log_ratio",
        NATS,
        "sum of ln w over a sequence",
        "sum ln w",
        signed=True,
        lower=None,
        bias="unbiased",
        estimates="-KL(infer || train) of sequences",
        entry="recorded:seq_log_ratio",
    ),
    _sequence(
        "geo_ratio",
        ONE,
        "e^(mean ln w) of a sequence",
        "e^(mean ln w)",
        statistics=_RATIOS,
        bias="biased",
        entry="recorded:geo_ratio",
    ),
    _sequence(
        "seq_max_abs",
        NATS,
        "largest |ln w| of a sequence",
        "max |ln w|",
        bias="lower_bound",
        entry="recorded:seq_max_abs",
    ),
    _sequence(
        "seq_k3",
        NATS,
        "W - 1 - ln W of the weight of a sequence",
        "W - 1 - ln W, W = e^(sum ln w)",
        bias="unbiased",
        estimates="KL(infer || train) of sequences",
        entry="recorded:seq_k3",
    ),
    _sequence(
        "log_ppl_diff",
        NATS,
        "ln perplexity of the training kernel minus that of the inference kernel",
        "-mean ln w: train minus infer",
        signed=True,
        lower=None,
        bias="unbiased",
        estimates="KL(infer || train) per token",
        reads=LOGS,
        entry="recorded:log_ppl_diff",
    ),
    _sequence(
        "ppl_ratio",
        ONE,
        "perplexity of train over that of infer",
        "e^(-mean ln w)",
        statistics=_RATIOS,
        bias="biased",
        reads=LOGS,
        entry="recorded:ppl_ratio",
    ),
    _of_sequences(
        "ess_seq",
        RATIO,
        "effective sample size of sequence weights over their number",
        "(sum W)^2 / (n sum W^2), raw",
        better="higher",
        upper=ONE_WHOLE,
        bias="biased",
        reads=("seq_log_ratio",),
        entry="sampled:ess_fraction",
    ),
    _of_sequences(
        "tail_mass_seq",
        RATIO,
        "share of sequences whose weight is outside [1/2, 2]",
        "share of W outside [1/2, 2]",
        upper=ONE_WHOLE,
        bias="unbiased",
        reads=("seq_log_ratio",),
        entry="recorded:tail_mass",
    ),
    _of_sequences(
        "length_scaling",
        ONE,
        "slope of ln spread of ln w on ln length: 1/2 is noise, 1 a systematic bias",
        "slope of ln rms(sum ln w) on ln L",
        lower=None,
        bias="biased",
        reads=(RATIO_LOG, LENGTHS),
        entry="sums:length_scaling",
    ),
    _of_sequences(
        "icc",
        ONE,
        "share of the variance of ln w that sequences explain",
        "one-way ICC(1) of ln w",
        lower=None,
        upper=ONE_WHOLE,
        bias="biased",
        reads=(RATIO_LOG, LENGTHS),
        entry="sums:intraclass_correlation",
    ),
    _aggregate(
        "adv_weighted_bias",
        ONE,
        "|mean of (w - 1) times advantage|, the scalar part of the gradient bias",
        "|mean (w - 1) A|",
        needs=("advantages",),
        tier="C",
        bias="biased",
        reads=(ADVANTAGE_WEIGHTED,),
        entry=ABSOLUTE_MEAN,
        columns=(*LOG_COLUMNS, "advantages"),
        absent="the requests carry no advantages",
    ),
    _of_gradients(
        "grad_cosine",
        ONE,
        "cosine of both gradients on a probe batch",
        "cosine of g_train, g_infer",
        better="higher",
        lower=-ONE_WHOLE,
        upper=ONE_WHOLE,
        entry="recorded:grad_cosine",
    ),
    _of_gradients(
        "grad_rel_bias",
        ONE,
        "norm of the difference of both gradients over that of the training one",
        "||g_infer - g_train|| / ||g_train||",
        entry="recorded:grad_rel_bias",
    ),
    _of_routes(
        "router_agreement",
        RATIO,
        "share of chosen experts that both kernels share, in the worst layer",
        "least over layers of mean |R_p and R_q| / k",
        better="higher",
        reads=(SHARED_ROUTES, LAYERS),
        entry="recorded:least_agreement",
    ),
    _of_routes(
        "tokens_any_flip",
        RATIO,
        "share of tokens with other experts in at least one layer",
        "share of tokens rerouted in any layer",
        reads=(REROUTED,),
        entry="recorded:mean_of",
    ),
    MetricDefinition(
        "router_margin",
        ONE,
        "score of the last chosen expert minus that of the next",
        "k-th best score - next, in the layer with least",
        family=Family.STATISTICAL,
        better="higher",
        needs=("routes",),
        noisy=True,
        entry="recorded:router_margin",
        columns=("train_router_scores", "train_routes"),
        absent=_NO_ROUTES,
    ),
    _aggregate(
        "reward_delta",
        ONE,
        "absolute difference of the mean rewards",
        "|mean paired difference|",
        family=Family.STATISTICAL,
        needs=("rewards",),
        tier="D",
        bias="biased",
        reads=("reward_delta",),
        entry=ABSOLUTE_MEAN,
        columns=("train_reward", "infer_reward"),
        absent="the requests carry no rewards of both kernels",
    ),
    MetricDefinition(
        "refusal_flip",
        RATIO,
        "1 where exactly one of the two kernels refuses, else 0",
        "1 where one refuses",
        family=Family.STATISTICAL,
        counted="request",
        statistics=INDICATOR,
        needs=("text",),
        upper=ONE_WHOLE,
        tier="D",
        bias="unbiased",
        noisy=True,
        columns=("train_refused", "infer_refused"),
        absent=_NO_TEXT,
    ),
    _of_texts(
        "json_parse_gap",
        RATIO,
        "absolute difference of the shares of output that parse as JSON",
        "|share of infer - share of train| of outputs that parse",
        reads=("json_parse_gap",),
        columns=_TEXT_COLUMNS,
    ),
    _of_texts(
        "tool_schema_gap",
        RATIO,
        "absolute difference of the shares of output that follow a tool's schema",
        "|share of infer - share of train| of outputs that follow a schema",
        reads=("tool_schema_gap",),
        columns=(*_TEXT_COLUMNS, "schema"),
    ),
    _of_texts(
        "exact_match_gap",
        RATIO,
        "absolute difference of the shares of output that are the reference",
        "|share of infer - share of train| of outputs that are the reference",
        reads=("exact_match_gap",),
        columns=(*_TEXT_COLUMNS, "reference"),
    ),
)
"""The metrics that a forward pass of both kernels does not provide."""
