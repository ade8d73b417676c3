"""Metrics of the logits and of the next-token distributions of both kernels.

p is the policy of the training kernel, q that of the inference kernel, z their logits. Sources:
Webber et al. 2010 (rank-biased overlap), Fagin et al. 2003 (Kendall distance of top-k lists).
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial

from kcdsl.ir.terms import Family
from kcdsl.metrics.definition import (
    INDICATOR,
    LISTS,
    LN_2_UP,
    LOGITS,
    MEAN,
    ONE_WHOLE,
    TOPS,
    MetricDefinition,
)
from kcdsl.units import NATS, ONE, RATIO

_TRAIN_INFER, _INFER_TRAIN = "KL(train || infer)", "KL(infer || train)"
LOG_COLUMNS = ("train_logs", "infer_logs")
LIST_COLUMNS = ("train_top_ids", "train_top_logs", "infer_top_ids", "infer_top_logs")

_logits = partial(MetricDefinition, reads=LOGITS, entry="fused:values_of")
_raw = partial(_logits, untempered=True)
_first = partial(
    MetricDefinition,
    untempered=True,
    family=Family.STATISTICAL,
    reads=LOGITS,
    entry="full_logits:tier_a",
    columns=LIST_COLUMNS,
)
_list = partial(
    MetricDefinition,
    untempered=True,
    family=Family.STATISTICAL,
    upper=ONE_WHOLE,
    reads=TOPS,
    columns=LIST_COLUMNS,
)
_topk = partial(
    MetricDefinition,
    needs=("topk",),
    tier="B",
    bias="lower_bound",
    noisy=True,
    reads=LISTS,
    columns=(*LOG_COLUMNS, *LIST_COLUMNS),
)


def _overlap(k: int) -> MetricDefinition:
    return _list(
        f"top{k}_overlap",
        RATIO,
        f"share of the {k} likeliest tokens on which both kernels agree",
        f"|top{k}(p) and top{k}(q)| / {k}",
        better="higher",
        steps=k,
        depth=k,
        entry=f"ranks:overlap{k}",
    )


def _jaccard(k: int) -> MetricDefinition:
    return _list(
        f"jaccard{k}",
        RATIO,
        f"tokens in both lists of the {k} likeliest over tokens in either",
        f"tokens in both of top{k}(p), top{k}(q) / tokens in either",
        better="higher",
        depth=k,
        entry=f"ranks:jaccard{k}",
    )


DEFINITIONS = (
    # logits
    _raw("logit_l2", ONE, "l2 norm of the difference of logits", "||dz||_2"),
    _raw(
        "logit_l2_centered",
        ONE,
        "the same after removing the mean difference",
        "||dz - mean(dz)||_2",
    ),
    _raw("logit_linf", ONE, "largest absolute difference of logits", "max |dz|"),
    _raw("logit_span", ONE, "largest minus smallest difference of logits", "max dz - min dz"),
    _raw(
        "logit_rel_l2",
        ONE,
        "l2 norm of the difference over that of the training logits",
        "||dz||_2 / ||z_train||_2",
    ),
    _raw(
        "logit_cosine",
        ONE,
        "cosine of both vectors of logits",
        "cosine of both logits",
        better="higher",
        lower=-ONE_WHOLE,
        upper=ONE_WHOLE,
    ),
    _raw(
        "bitwise_mismatch_count",
        ONE,
        "logits of a position whose bits differ",
        "logits whose bits differ",
        entry="full_logits:bit_metrics",
    ),
    _raw(
        "ulp_max",
        ONE,
        "largest distance of two logits in units in the last place",
        "largest distance of two logits in units in the last place",
        entry="full_logits:bit_metrics",
    ),
    _raw(
        "stable_fraction",
        RATIO,
        "1 where the margin exceeds twice the largest difference of logits, else 0",
        "1 where margin > 2 max |dz|",
        better="higher",
        statistics=frozenset({"mean", "rate", "min"}),
        upper=ONE_WHOLE,
        steps=1,
        entry="full_logits:tier_a",
    ),
    MetricDefinition(
        "noise_ratio",
        ONE,
        "error of the inference kernel over that of the training kernel, against a gold run",
        "||z_infer - z_gold|| / ||z_train - z_gold||",
        needs=("gold",),
        reads=(*LOGITS, "gold_logits"),
        entry="states:noise_ratio",
        absent="no run of the training kernel in float32 or wider is at hand as a reference",
    ),
    _raw(
        "margin",
        ONE,
        "best minus second best logit of the training kernel",
        "z_(1) - z_(2) of the training kernel",
        better="higher",
        entry="full_logits:tier_a",
    ),
    # distributions
    _logits(
        "kl",
        NATS,
        "KL(train || infer) of the next-token distributions",
        "sum p (e^d - 1 - d)",
        estimates=_TRAIN_INFER,
    ),
    _logits(
        "kl_infer_train",
        NATS,
        "KL(infer || train) of the next-token distributions",
        "sum q (e^-d - 1 + d)",
        estimates=_INFER_TRAIN,
    ),
    _logits(
        "jeffreys",
        NATS,
        "sum of both KL divergences",
        f"{_TRAIN_INFER} + {_INFER_TRAIN}",
        estimates="symmetric",
    ),
    _logits(
        "js",
        NATS,
        "Jensen-Shannon divergence, at most ln 2",
        "KL(p || m)/2 + KL(q || m)/2",
        upper=LN_2_UP,
        estimates="symmetric",
    ),
    _logits(
        "tv",
        RATIO,
        "total variation of the next-token distributions",
        "sum |p - q| / 2",
        upper=ONE_WHOLE,
        estimates="symmetric",
    ),
    _logits(
        "hellinger2",
        RATIO,
        "squared Hellinger distance",
        "sum (sqrt p - sqrt q)^2 / 2",
        upper=ONE_WHOLE,
        estimates="symmetric",
    ),
    _logits(
        "log_ratio_linf",
        NATS,
        "largest |ln of train over infer probability| of any token",
        "max |ln p - ln q|",
        estimates="symmetric",
    ),
    _logits(
        "chi2_train_infer",
        ONE,
        "chi-squared divergence of train from infer, sum p^2/q - 1",
        "sum p^2/q - 1",
        estimates="chi2(train || infer)",
    ),
    _logits(
        "chi2_infer_train",
        ONE,
        "chi-squared divergence of infer from train, sum q^2/p - 1",
        "sum q^2/p - 1",
        estimates="chi2(infer || train)",
    ),
    _logits(
        "renyi_inf",
        NATS,
        "largest ln of train over infer probability of any token",
        "max (ln p - ln q)",
        estimates="train over infer",
    ),
    _logits(
        "entropy_gap",
        NATS,
        "entropy of the training policy minus that of the inference policy",
        "H(p) - H(q)",
        signed=True,
        lower=None,
        estimates="train - infer",
    ),
    _topk(
        "topk_tail_kl",
        NATS,
        "KL(train || infer) of k tokens and the rest: a lower bound of kl",
        "KL of (top k, rest)",
        estimates=_TRAIN_INFER,
        entry="policies:topk_tail_kl",
        absent="both kernels give full logits, of which `kl` is exact",
    ),
    _topk(
        "topk_tail_tv",
        RATIO,
        "total variation of k tokens and the rest: a lower bound of tv",
        "TV of (top k, rest)",
        upper=ONE_WHOLE,
        estimates="symmetric",
        entry="policies:topk_tail_tv",
        absent="both kernels give full logits, of which `tv` is exact",
    ),
    MetricDefinition(
        "token_kl_max",
        NATS,
        "largest kl of any position of a request",
        "largest kl of any position",
        counted="request",
        estimates=_TRAIN_INFER,
        reads=("kl",),
        entry="recorded:max_token_kl",
    ),
    MetricDefinition(
        "sequence_tv",
        RATIO,
        "total variations of the positions composed along the text of a request",
        "1 - prod(1 - tv) along the text of the request; bounds the tv of sequences "
        "only if every history keeps these values",
        counted="request",
        upper=ONE_WHOLE,
        bias="biased",
        estimates="symmetric",
        reads=("tv",),
        entry="recorded:composed_tv",
    ),
    MetricDefinition(
        "grad_bias",
        ONE,
        "norm of the policy-gradient bias that ignoring the importance ratio causes",
        "2 A_max G mean(tv)",
        kind="aggregate",
        counted="window",
        statistics=frozenset({"aggregate"}),
        bias="upper_bound",
        valued="token",
        reads=("tv",),
        entry="measures:gradient_function",
    ),
    # the likeliest tokens
    _first(
        "top1_overlap",
        RATIO,
        "share of the 1 likeliest tokens on which both kernels agree",
        "same first token",
        better="higher",
        upper=ONE_WHOLE,
        steps=1,
    ),
    _overlap(5),
    _overlap(10),
    _jaccard(1),
    _jaccard(5),
    _jaccard(10),
    _list(
        "rbo10",
        RATIO,
        "rank-biased overlap of the ten likeliest tokens, p = 0.9",
        "rank-biased overlap of the first ten, p = 0.9, extrapolated",
        better="higher",
        depth=10,
        entry="ranks:rbo10",
    ),
    _list(
        "kendall10",
        RATIO,
        "Kendall distance of the lists of the ten likeliest tokens",
        "Kendall distance of the first ten, penalty 1/2, over 145",
        depth=10,
        entry="ranks:kendall10",
    ),
    _first(
        "top1_flip",
        RATIO,
        "1 where another token comes first, else 0",
        "1 where another token comes first",
        statistics=INDICATOR,
        upper=ONE_WHOLE,
        steps=1,
    ),
    _first(
        "flip_hazard",
        ONE,
        "flips of the first token per 1000 tokens",
        "flips per 1000 tokens",
        statistics=MEAN,
        upper=Fraction(1000),
    ),
    MetricDefinition(
        "greedy_divergence_step",
        ONE,
        "tokens of a request before the first flip, all of them where none flips",
        "tokens before the first flip; all where none flips",
        family=Family.STATISTICAL,
        untempered=True,
        counted="request",
        better="higher",
        reads=("top1_flip",),
        entry="recorded:greedy_divergence_step",
        columns=LIST_COLUMNS,
    ),
)
"""The metrics of full logits, of their likeliest tokens, and of the texts they are read along."""
