"""The metrics of the language, as data; `kcdsl.metrics.registry` explains the fields.

p is the policy of the training kernel, q that of the inference kernel, w = p(y)/q(y) at a token y
that was sampled from q.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from kcdsl.ir.terms import Family
from kcdsl.units import BYTES, NATS, ONE, RATIO, THROUGHPUT, TIME, Dimension

Kind = Literal["pointwise", "aggregate"]
Counted = Literal["token", "request", "window"]
Better = Literal["lower", "higher"]

POINTWISE = frozenset({"mean", "max", "min", "quantile"})
_INDICATOR = frozenset({"mean", "rate", "max"})
_AGGREGATE = frozenset({"aggregate"})
_ZERO, _UNIT = Fraction(0), Fraction(1)
LN_2_UP = Fraction(6931471805599454, 10**16)
"""A little more than ln 2, the largest Jensen-Shannon divergence."""


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """What the language knows of one metric. `needs` are the data it is computed from:
    `logits` (of both kernels), `hidden`, `sampled`, `tokens`, `labels`, `rewards`, `text`,
    `timing`, `memory`, `outcomes` or `repeats`; of recorded runs also `gold` (logits of a run in
    float32 or wider), `topk`, `rollouts`, `advantages`, `gradients`, `routes` or `stamps`."""

    name: str
    family: Family
    kind: Kind
    counted: Counted
    better: Better
    dimension: Dimension
    statistics: frozenset[str]
    needs: tuple[str, ...]
    summary: str
    signed: bool = False
    """Both signs are bad; the metric is bounded through `abs(...)` only."""
    lower: Fraction | None = _ZERO
    """The smallest value possible, where there is one."""
    upper: Fraction | None = None
    """The largest value possible, where there is one."""
    unit: str | None = None
    """The unit in which the function of a user's metric returns its values."""
    function: str | None = None
    """`module:function` or `file.py:function` of a user's metric; None for those built in."""

    @property
    def nonnegative(self) -> bool:
        """Say whether no value is below zero."""
        return self.lower is not None and self.lower >= 0


def _token(
    name: str,
    dimension: Dimension,
    summary: str,
    needs: str = "logits",
    *,
    family: Family = Family.NUMERICAL,
    better: Better = "lower",
    statistics: frozenset[str] = POINTWISE,
    signed: bool = False,
    lower: Fraction | None = _ZERO,
    upper: Fraction | None = None,
) -> MetricDefinition:
    return MetricDefinition(
        name, family, "pointwise", "token", better, dimension, statistics, (needs,), summary,
        signed, lower, upper,
    )  # fmt: skip


def _share(name: str, summary: str) -> MetricDefinition:
    return _token(name, RATIO, summary, "sampled", statistics=_INDICATOR, upper=_UNIT)


def _jaccard(k: int) -> MetricDefinition:
    return _token(
        f"jaccard{k}",
        RATIO,
        f"tokens in both lists of the {k} likeliest over tokens in either",
        family=Family.STATISTICAL,
        better="higher",
        upper=_UNIT,
    )


def _overlap(k: int) -> MetricDefinition:
    return _token(
        f"top{k}_overlap",
        RATIO,
        f"share of the {k} likeliest tokens on which both kernels agree",
        family=Family.STATISTICAL,
        better="higher",
        upper=_UNIT,
    )


def _request(
    name: str,
    family: Family,
    dimension: Dimension,
    needs: str,
    summary: str,
    *,
    better: Better = "lower",
    statistics: frozenset[str] = POINTWISE,
    signed: bool = False,
    lower: Fraction | None = _ZERO,
    upper: Fraction | None = None,
) -> MetricDefinition:
    return MetricDefinition(
        name, family, "pointwise", "request", better, dimension, statistics, (needs,), summary,
        signed, lower, upper,
    )  # fmt: skip


def _aggregate(
    name: str,
    family: Family,
    dimension: Dimension,
    needs: tuple[str, ...],
    summary: str,
    *,
    better: Better = "lower",
    statistics: frozenset[str] = _AGGREGATE,
    lower: Fraction | None = _ZERO,
    upper: Fraction | None = None,
) -> MetricDefinition:
    return MetricDefinition(
        name, family, "aggregate", "window", better, dimension, statistics, needs, summary,
        False, lower, upper,
    )  # fmt: skip


_MEAN = frozenset({"mean"})
_STABLE = frozenset({"mean", "rate", "min"})
_N, _S, _R = Family.NUMERICAL, Family.STATISTICAL, Family.RUNTIME

DEFINITIONS: tuple[MetricDefinition, ...] = (
    # logits
    _token("logit_l2", ONE, "l2 norm of the difference of logits"),
    _token("logit_l2_centered", ONE, "the same after removing the mean difference"),
    _token("logit_linf", ONE, "largest absolute difference of logits"),
    _token("logit_span", ONE, "largest minus smallest difference of logits"),
    _token("logit_rel_l2", ONE, "l2 norm of the difference over that of the training logits"),
    _token("logit_cosine", ONE, "cosine of both vectors of logits", better="higher",
           lower=Fraction(-1), upper=_UNIT),
    _token("bitwise_mismatch_count", ONE, "logits of a position whose bits differ"),
    _token("ulp_max", ONE, "largest distance of two logits in units in the last place"),
    _token("stable_fraction", RATIO,
           "1 where the margin exceeds twice the largest difference of logits, else 0",
           better="higher", statistics=_STABLE, upper=_UNIT),
    _token("noise_ratio", ONE,
           "error of the inference kernel over that of the training kernel, against a gold run",
           "gold"),
    _token(
        "margin", ONE, "best minus second best logit of the training kernel", better="higher"
    ),
    # distributions
    _token("kl", NATS, "KL(train || infer) of the next-token distributions"),
    _token("kl_infer_train", NATS, "KL(infer || train) of the next-token distributions"),
    _token("jeffreys", NATS, "sum of both KL divergences"),
    _token("js", NATS, "Jensen-Shannon divergence, at most ln 2", upper=LN_2_UP),
    _token("tv", RATIO, "total variation of the next-token distributions", upper=_UNIT),
    _token("hellinger2", RATIO, "squared Hellinger distance", upper=_UNIT),
    _token("log_ratio_linf", NATS, "largest |ln of train over infer probability| of any token"),
    _token("chi2_train_infer", ONE, "chi-squared divergence of train from infer, sum p^2/q - 1"),
    _token("chi2_infer_train", ONE, "chi-squared divergence of infer from train, sum q^2/p - 1"),
    _token("renyi_inf", NATS, "largest ln of train over infer probability of any token"),
    _token("entropy_gap", NATS, "entropy of the training policy minus that of the inference policy",
           signed=True, lower=None),
    _token("topk_tail_kl", NATS,
           "KL(train || infer) of k tokens and the rest: a lower bound of kl", "topk"),
    _token("topk_tail_tv", RATIO,
           "total variation of k tokens and the rest: a lower bound of tv", "topk", upper=_UNIT),
    _request("token_kl_max", _N, NATS, "logits", "largest kl of any position of a request"),
    _request("sequence_tv", _N, RATIO, "logits",
             "total variations of the positions composed along the text of a request",
             upper=_UNIT),
    # the token sampled from the inference kernel
    _token(
        "log_ratio",
        NATS,
        "ln of train over infer probability of the sampled token",
        "sampled",
        signed=True,
        lower=None,
    ),
    _token("importance_ratio", ONE, "train over infer probability of the sampled token", "sampled",
           statistics=frozenset({"max", "quantile"})),
    _token("k1", NATS, "-ln w; its mean estimates KL(infer || train)", "sampled",
           statistics=_MEAN, lower=None),
    _token("k2", NATS, "(ln w)^2 / 2; its mean approximates KL(infer || train)", "sampled"),
    _token("k3", NATS, "w - 1 - ln w; its mean estimates KL(infer || train)", "sampled"),
    _token("w_log_w", NATS, "w ln w; its mean estimates KL(train || infer)", "sampled",
           statistics=_MEAN, lower=None),
    _token("w_log_w_minus", NATS, "w ln w - w + 1; its mean estimates KL(train || infer)",
           "sampled"),
    _token("tv_is", RATIO, "|w - 1| / 2; its mean estimates the total variation", "sampled"),
    _token("chi2_token", ONE, "w^2 - 1; its mean estimates chi2(train || infer)", "sampled",
           statistics=_MEAN, lower=Fraction(-1)),
    _token("chi2_is", ONE, "(w - 1)^2; its mean estimates chi2(train || infer)", "sampled"),
    _token("jsd_is", NATS,
           "(w ln(2w/(1+w)) + ln(2/(1+w)))/2; its mean estimates the Jensen-Shannon divergence",
           "sampled"),
    _token("is_variance_inflation", ONE,
           "w^2; its mean is what importance weighting multiplies a variance by", "sampled",
           statistics=_MEAN),
    _token("mult_prob_error", ONE, "e^|ln w|", "sampled", lower=_UNIT),
    _token("prob_absdiff", RATIO, "|p - q| of the sampled token", "sampled", upper=_UNIT),
    _token("binary_tv", RATIO, "total variation of whether the sampled token comes", "sampled",
           upper=_UNIT),
    _token("binary_kl", NATS, "larger KL divergence of whether the sampled token comes", "sampled"),
    _share("ratio_extreme", "1 where |ln w| > ln 2, else 0"),
    _share("ratio_above2", "1 where w > 2, else 0"),
    _share("ratio_above10", "1 where w > 10, else 0"),
    _share("ratio_below2", "1 where w < 1/2, else 0"),
    _share("ratio_below10", "1 where w < 1/10, else 0"),
    _share("clipfrac0", "1 where w is outside [0.8, 1.2], else 0"),
    _share("oob_tis", "1 where truncation at 2 would change w, else 0"),
    _share("oob_mis", "1 where masking outside [0.5, 2] would drop the token, else 0"),
    _share("oob_icepop", "1 where masking outside [0.5, 5] would drop the token, else 0"),
    _share("oob_veto", "1 where w < 0.0001, which would veto the sequence, else 0"),
    _aggregate("ess_frac", _N, RATIO, ("sampled",),
               "effective sample size of the raw ratios over their number", better="higher",
               upper=_UNIT),
    _aggregate("pearson_p", _N, ONE, ("sampled",),
               "correlation of both probabilities of sampled tokens", better="higher",
               lower=Fraction(-1), upper=_UNIT),
    _aggregate("pearson_logp", _N, ONE, ("sampled",),
               "correlation of both log-probabilities of sampled tokens", better="higher",
               lower=Fraction(-1), upper=_UNIT),
    _aggregate("tail_index", _N, ONE, ("sampled",),
               "Pareto shape of the largest ratios; above 0.7 their means are unreliable",
               lower=None),
    # sequences sampled from the inference kernel
    _request("seq_log_ratio", _N, NATS, "rollouts", "sum of ln w over a sequence",
             signed=True, lower=None),
    _request("geo_ratio", _N, ONE, "rollouts", "e^(mean ln w) of a sequence",
             statistics=frozenset({"max", "min", "quantile"})),
    _request("seq_max_abs", _N, NATS, "rollouts", "largest |ln w| of a sequence"),
    _request("seq_k3", _N, NATS, "rollouts", "W - 1 - ln W of the weight of a sequence"),
    _request("log_ppl_diff", _N, NATS, "rollouts",
             "ln perplexity of the training kernel minus that of the inference kernel",
             signed=True, lower=None),
    _request("ppl_ratio", _N, ONE, "rollouts", "perplexity of train over that of infer",
             statistics=frozenset({"max", "min", "quantile"})),
    _aggregate("ess_seq", _N, RATIO, ("rollouts",),
               "effective sample size of sequence weights over their number", better="higher",
               upper=_UNIT),
    _aggregate("tail_mass_seq", _N, RATIO, ("rollouts",),
               "share of sequences whose weight is outside [1/2, 2]", upper=_UNIT),
    _aggregate("length_scaling", _N, ONE, ("rollouts",),
               "slope of ln spread of ln w on ln length: 1/2 is noise, 1 a systematic bias",
               lower=None),
    _aggregate("icc", _N, ONE, ("rollouts",),
               "share of the variance of ln w that sequences explain", lower=None, upper=_UNIT),
    # hidden states
    _token("hidden_l2", ONE, "l2 norm of the difference of hidden states", "hidden"),
    _token("hidden_linf", ONE, "largest absolute difference of hidden states", "hidden"),
    _request("embedding_l2", _N, ONE, "hidden", "l2 norm of the difference of sentence embeddings"),
    _request("embedding_cosine", _N, ONE, "hidden", "cosine of the two sentence embeddings",
             better="higher", lower=Fraction(-1), upper=_UNIT),
    _aggregate("grad_bias", _N, ONE, ("logits",),
               "norm of the policy-gradient bias that ignoring the importance ratio causes"),
    _aggregate("adv_weighted_bias", _N, ONE, ("advantages",),
               "|mean of (w - 1) times advantage|, the scalar part of the gradient bias"),
    _aggregate("grad_cosine", _N, ONE, ("gradients",),
               "cosine of both gradients on a probe batch", better="higher",
               lower=Fraction(-1), upper=_UNIT),
    _aggregate("grad_rel_bias", _N, ONE, ("gradients",),
               "norm of the difference of both gradients over that of the training one"),
    # ranks, calibration, behaviour
    _overlap(1),
    _overlap(5),
    _overlap(10),
    _jaccard(1),
    _jaccard(5),
    _jaccard(10),
    _token("rbo10", RATIO, "rank-biased overlap of the ten likeliest tokens, p = 0.9", family=_S,
           better="higher", upper=_UNIT),
    _token("kendall10", RATIO, "Kendall distance of the lists of the ten likeliest tokens",
           family=_S, upper=_UNIT),
    _token("top1_flip", RATIO, "1 where another token comes first, else 0", family=_S,
           statistics=_INDICATOR, upper=_UNIT),
    _token("flip_hazard", ONE, "flips of the first token per 1000 tokens", family=_S,
           statistics=_MEAN, upper=Fraction(1000)),
    _request("greedy_divergence_step", _S, ONE, "logits",
             "tokens of a request before the first flip, all of them where none flips",
             better="higher"),
    _aggregate("router_agreement", _S, RATIO, ("routes",),
               "share of chosen experts that both kernels share, in the worst layer",
               better="higher", upper=_UNIT),
    _aggregate("tokens_any_flip", _S, RATIO, ("routes",),
               "share of tokens with other experts in at least one layer", upper=_UNIT),
    _token("router_margin", ONE, "score of the last chosen expert minus that of the next", "routes",
           family=_S, better="higher"),
    _aggregate("ece_gap", _S, RATIO, ("logits", "labels"),
               "absolute difference of the expected calibration errors", upper=_UNIT),
    _aggregate("ace_gap", _S, RATIO, ("logits", "labels"),
               "absolute difference of the adaptive calibration errors", upper=_UNIT),
    _aggregate("brier_gap", _S, ONE, ("logits", "labels"),
               "absolute difference of the mean Brier scores", upper=Fraction(2)),
    _aggregate("nll_gap", _S, NATS, ("logits", "labels"),
               "absolute difference of the mean -ln probabilities of the next tokens"),
    _aggregate("reward_delta", _S, ONE, ("rewards",), "absolute difference of the mean rewards"),
    _request("refusal_flip", _S, RATIO, "text",
             "1 where exactly one of the two kernels refuses, else 0",
             statistics=_INDICATOR, upper=_UNIT),
    _aggregate("json_parse_gap", _S, RATIO, ("text",),
               "absolute difference of the shares of output that parse as JSON", upper=_UNIT),
    _aggregate("tool_schema_gap", _S, RATIO, ("text",),
               "absolute difference of the shares of output that follow a tool's schema",
               upper=_UNIT),
    _aggregate("exact_match_gap", _S, RATIO, ("text",),
               "absolute difference of the shares of output that are the reference", upper=_UNIT),
    # the running system
    _request("latency", _R, TIME, "timing",
             "time of one forward pass over the request; of servers and recordings, from the "
             "request to its last token"),
    _request("ttft", _R, TIME, "timing", "time from a request to its first token"),
    _request("tpot", _R, TIME, "timing", "mean time between tokens after the first"),
    _aggregate("throughput", _R, THROUGHPUT, ("timing",), "tokens per second over the window",
               better="higher"),
    _aggregate("peak_memory", _R, BYTES, ("memory",), "largest memory in use",
               statistics=_AGGREGATE | {"max"}),
    _aggregate("kv_memory", _R, BYTES, ("memory",), "memory of keys and values"),
    _aggregate("failure_rate", _R, RATIO, ("outcomes",), "share of requests that failed",
               upper=_UNIT),
    _aggregate("determinism", _R, RATIO, ("repeats",),
               "share of repeated requests whose output is equal bit for bit",
               better="higher", upper=_UNIT),
)  # fmt: skip
