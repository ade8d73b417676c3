"""Every metric this backend measures, and those that only recorded runs can feed.

p is the policy of the training kernel, q that of the inference kernel, w = p/q at a sampled token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from kcdsl_backends.empirical.metrics.measure import Bias, Measure, Source


def _exact(
    name: str,
    estimator: str,
    *,
    source: Source = "logits",
    counted: Literal["token", "request", "slice"] = "token",
    better: Literal["lower", "higher"] = "lower",
    low: float | None = 0.0,
    high: float | None = None,
    direction: str = "",
    steps: int | None = None,
    unit: str = "",
) -> Measure:
    return Measure(
        name,
        source,
        "A",
        estimator,
        "exact",
        counted,
        better,
        low,
        high,
        direction,
        steps,
        unit=unit,
    )


def _overlap(k: int) -> Measure:
    return _exact(
        f"top{k}_overlap",
        f"|top{k}(p) and top{k}(q)| / {k}",
        better="higher",
        high=1.0,
        steps=k,
    )


def _jaccard(k: int) -> Measure:
    estimator = f"tokens in both of top{k}(p), top{k}(q) / tokens in either"
    return _exact(f"jaccard{k}", estimator, better="higher", high=1.0)


def _sampled(
    name: str,
    estimator: str,
    bias: Bias,
    direction: str,
    low: float | None,
    *,
    counted: Literal["token", "slice"] = "token",
    better: Literal["lower", "higher"] = "lower",
    high: float | None = None,
    unit: str = "",
) -> Measure:
    return Measure(
        name,
        "sampled",
        "C",
        estimator,
        bias,
        counted,
        better,
        low,
        high,
        direction,
        noisy=True,
        unit=unit,
    )


def _share(name: str, estimator: str) -> Measure:
    return _sampled(name, estimator, "unbiased", "", 0.0, high=1.0)


def _calibration(name: str, estimator: str, high: float | None, unit: str = "") -> Measure:
    return Measure(
        name, "calibration", "A", estimator, "biased", "slice", "lower", 0.0, high, unit=unit
    )


def _runtime(
    name: str,
    estimator: str,
    *,
    counted: Literal["request", "slice"],
    better: Literal["lower", "higher"] = "lower",
    bias: Bias = "exact",
    high: float | None = None,
    noisy: bool = False,
) -> Measure:
    return Measure(name, "runtime", "E", estimator, bias, counted, better, 0.0, high, noisy=noisy)


_TRAIN_INFER = "KL(train || infer)"
_INFER_TRAIN = "KL(infer || train)"
_CHI2 = "chi2(train || infer)"

MEASURES: Mapping[str, Measure] = {
    m.name: m
    for m in (
        _exact("logit_l2", "||dz||_2"),
        _exact("logit_l2_centered", "||dz - mean(dz)||_2"),
        _exact("logit_linf", "max |dz|"),
        _exact("logit_span", "max dz - min dz"),
        _exact("logit_rel_l2", "||dz||_2 / ||z_train||_2"),
        _exact(
            "logit_cosine", "cosine of both logits", better="higher", low=-1.0, high=1.0, unit="1"
        ),
        _exact("bitwise_mismatch_count", "logits whose bits differ"),
        _exact("ulp_max", "largest distance of two logits in units in the last place"),
        _exact(
            "stable_fraction", "1 where margin > 2 max |dz|", better="higher", high=1.0, steps=1
        ),
        _exact("margin", "z_(1) - z_(2) of the training kernel", better="higher"),
        _exact("kl", "sum p (e^d - 1 - d)", direction=_TRAIN_INFER),
        _exact("kl_infer_train", "sum q (e^-d - 1 + d)", direction=_INFER_TRAIN),
        _exact("jeffreys", f"{_TRAIN_INFER} + {_INFER_TRAIN}", direction="symmetric"),
        _exact("js", "KL(p || m)/2 + KL(q || m)/2", high=0.6931471805599454, direction="symmetric"),
        _exact("tv", "sum |p - q| / 2", high=1.0, direction="symmetric"),
        _exact("hellinger2", "sum (sqrt p - sqrt q)^2 / 2", high=1.0, direction="symmetric"),
        _exact("chi2_train_infer", "sum p^2/q - 1", direction="chi2(train || infer)"),
        _exact("chi2_infer_train", "sum q^2/p - 1", direction="chi2(infer || train)"),
        _exact("renyi_inf", "max (ln p - ln q)", direction="train over infer", unit="nat"),
        _exact("entropy_gap", "H(p) - H(q)", direction="train - infer", low=None, unit="nat"),
        _exact("log_ratio_linf", "max |ln p - ln q|", direction="symmetric"),
        _exact("top1_overlap", "same first token", better="higher", high=1.0, steps=1),
        _overlap(5),
        _overlap(10),
        _jaccard(1),
        _jaccard(5),
        _jaccard(10),
        _exact(
            "rbo10",
            "rank-biased overlap of the first ten, p = 0.9, extrapolated",
            better="higher",
            high=1.0,
        ),
        _exact("kendall10", "Kendall distance of the first ten, penalty 1/2, over 145", high=1.0),
        _exact("top1_flip", "1 where another token comes first", high=1.0, steps=1),
        _exact("flip_hazard", "flips per 1000 tokens", high=1000.0),
        _exact(
            "greedy_divergence_step",
            "tokens before the first flip; all where none flips",
            counted="request",
            better="higher",
        ),
        _exact(
            "token_kl_max",
            "largest kl of any position",
            counted="request",
            direction=_TRAIN_INFER,
            unit="nat",
        ),
        Measure(
            "sequence_tv",
            "logits",
            "A",
            "1 - prod(1 - tv) along the text of the request; bounds the tv of sequences "
            "only if every history keeps these values",
            "biased",
            "request",
            "lower",
            0.0,
            1.0,
            "symmetric",
        ),
        _exact("hidden_l2", "||dh||_2", source="hidden"),
        _exact("hidden_linf", "max |dh|", source="hidden"),
        _exact("embedding_l2", "||e_infer - e_train||_2", source="hidden", counted="request"),
        _exact(
            "embedding_cosine",
            "1 - ||e_infer - e_train||^2 / 2",
            source="hidden",
            counted="request",
            better="higher",
            low=-1.0,
            high=1.0,
        ),
        Measure(
            "grad_bias", "gradient", "A", "2 A_max G mean(tv)", "upper_bound", "token", "lower"
        ),
        Measure(
            "ece_gap",
            "calibration",
            "A",
            "|ECE_train - ECE_infer|, 15 equal-mass bins, labels = next token of the text",
            "biased",
            "slice",
            "lower",
            0.0,
            1.0,
        ),
        _sampled("log_ratio", "ln w", "unbiased", f"-{_INFER_TRAIN}", None),
        _sampled("w_log_w", "w ln w", "unbiased", _TRAIN_INFER, None),
        _sampled("w_log_w_minus", "w ln w - w + 1", "unbiased", _TRAIN_INFER, 0.0),
        _sampled("k1", "-ln w", "unbiased", _INFER_TRAIN, None),
        _sampled("k2", "(ln w)^2 / 2", "biased", _INFER_TRAIN, 0.0),
        _sampled("k3", "w - 1 - ln w", "unbiased", _INFER_TRAIN, 0.0),
        _sampled("tv_is", "|w - 1| / 2", "unbiased", "symmetric", 0.0),
        _sampled("importance_ratio", "w; its mean is 1 where q covers p", "unbiased", "", 0.0),
        _calibration(
            "ace_gap", "|ACE_train - ACE_infer|, five likeliest tokens, 15 equal-mass bins", 1.0
        ),
        _calibration("brier_gap", "|mean Brier score of infer - of train|, paired", 2.0, "1"),
        _calibration(
            "nll_gap", "|mean -ln of the next token of infer - of train|, paired", None, "nat"
        ),
        _sampled("chi2_token", "w^2 - 1", "unbiased", _CHI2, -1.0),
        _sampled("chi2_is", "(w - 1)^2", "unbiased", _CHI2, 0.0),
        _sampled(
            "jsd_is",
            "(w ln(2w/(1 + w)) + ln(2/(1 + w)))/2",
            "unbiased",
            "symmetric",
            0.0,
            unit="nat",
        ),
        _sampled(
            "is_variance_inflation", "w^2; n/ESS", "unbiased", "1 + chi2(train || infer)", 0.0
        ),
        _sampled(
            "mult_prob_error", "e^|ln w|; about 1 + 2 TV at small drift", "biased", "symmetric", 1.0
        ),
        _sampled(
            "prob_absdiff",
            "|p(y) - q(y)| of the sampled token y",
            "lower_bound",
            "symmetric",
            0.0,
            high=1.0,
        ),
        _sampled(
            "binary_tv",
            "|p(y) - q(y)|: TV of 'y or not y'",
            "lower_bound",
            "symmetric",
            0.0,
            high=1.0,
        ),
        _sampled(
            "binary_kl",
            "larger KL of 'y or not y', of both directions",
            "lower_bound",
            "larger of both",
            0.0,
            unit="nat",
        ),
        _share("ratio_extreme", "1 where |ln w| > ln 2"),
        _share("ratio_above2", "1 where w > 2"),
        _share("ratio_above10", "1 where w > 10"),
        _share("ratio_below2", "1 where w < 1/2"),
        _share("ratio_below10", "1 where w < 1/10"),
        _share("clipfrac0", "1 where w is outside [0.8, 1.2]"),
        _share("oob_tis", "1 where w > 2"),
        _share("oob_mis", "1 where w is outside [0.5, 2]"),
        _share("oob_icepop", "1 where w is outside [0.5, 5]"),
        _share("oob_veto", "1 where w < 0.0001"),
        _sampled(
            "ess_frac",
            "(sum w)^2 / (n sum w^2), raw",
            "biased",
            "1/(1 + chi2(train || infer))",
            0.0,
            counted="slice",
            better="higher",
            high=1.0,
        ),
        _sampled(
            "pearson_p",
            "correlation of p(y) and q(y)",
            "biased",
            "symmetric",
            -1.0,
            counted="slice",
            better="higher",
            high=1.0,
            unit="1",
        ),
        _sampled(
            "pearson_logp",
            "correlation of ln p(y) and ln q(y)",
            "biased",
            "symmetric",
            -1.0,
            counted="slice",
            better="higher",
            high=1.0,
            unit="1",
        ),
        _sampled(
            "tail_index",
            "Pareto shape k of the largest w; above 0.7 no mean of w is reliable",
            "biased",
            "",
            None,
            counted="slice",
        ),
        _runtime(
            "latency", "wall time of one forward pass, synchronised", counted="request", noisy=True
        ),
        _runtime("ttft", "first token - arrival", counted="request", noisy=True),
        _runtime("tpot", "(last - first) / (tokens - 1)", counted="request", noisy=True),
        _runtime("throughput", "tokens / seconds", counted="request", better="higher", noisy=True),
        _runtime(
            "peak_memory",
            "largest memory of the process (CUDA: of the allocator)",
            counted="slice",
            bias="upper_bound",
        ),
        _runtime("failure_rate", "failed requests / requests", counted="request", high=1.0),
        _runtime(
            "determinism", "equal outputs / repeats", counted="request", better="higher", high=1.0
        ),
    )
}
"""Every metric this backend measures."""

_ROLLOUTS = "the tokens of requests were not sampled from the inference kernel as one text"
_TEXT = "the requests carry no generated text of both kernels"
_ROUTES = "the kernels record no routes of experts"
_GRADIENTS = "a forward pass gives no gradients"

UNMEASURED: Mapping[str, str] = {
    "noise_ratio": "no run of the training kernel in float32 or wider is at hand as a reference",
    "topk_tail_kl": "both kernels give full logits, of which `kl` is exact",
    "topk_tail_tv": "both kernels give full logits, of which `tv` is exact",
    **dict.fromkeys(
        (
            "seq_log_ratio", "geo_ratio", "seq_max_abs", "seq_k3", "log_ppl_diff", "ppl_ratio",
            "ess_seq", "tail_mass_seq", "length_scaling", "icc",
        ),
        _ROLLOUTS,
    ),
    "reward_delta": "the requests carry no rewards of both kernels",
    "adv_weighted_bias": "the requests carry no advantages",
    "refusal_flip": _TEXT,
    **dict.fromkeys(("json_parse_gap", "tool_schema_gap", "exact_match_gap"), _TEXT),
    **dict.fromkeys(("grad_cosine", "grad_rel_bias"), _GRADIENTS),
    **dict.fromkeys(("router_agreement", "tokens_any_flip", "router_margin"), _ROUTES),
    "kv_memory": "a forward pass keeps no keys and values",
}  # fmt: skip
"""Metrics of the language that recorded runs feed, with what a forward pass lacks of them."""
