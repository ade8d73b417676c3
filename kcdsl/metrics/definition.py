"""The definition of a metric: meaning, unit, range, direction, and measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from kcdsl.ir.terms import Family
from kcdsl.units import Dimension

Kind = Literal["pointwise", "aggregate"]
Counted = Literal["token", "request", "window"]
Better = Literal["lower", "higher"]
Bias = Literal["exact", "unbiased", "biased", "lower_bound", "upper_bound"]
Tier = Literal["A", "B", "C", "D", "E", "F"]

POINTWISE = frozenset({"mean", "max", "min", "quantile"})
INDICATOR = frozenset({"mean", "rate", "max"})
MEAN = frozenset({"mean"})
AGGREGATE = frozenset({"aggregate"})
ZERO, ONE_WHOLE = Fraction(0), Fraction(1)
LN_2_UP = Fraction(6931471805599454, 10**16)
"""An upper bound of ln 2, the largest Jensen-Shannon divergence."""

ABSOLUTE_MEAN = "absolute mean"
"""The entry of an aggregate that is the absolute value of the mean of its array. Its limits are
those of the mean: noise makes the absolute value too large, and a limit of that would not do."""


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """A metric of the language or of a user.

    `needs` are the data it is computed from: `logits` (of both kernels), `hidden`, `sampled`,
    `tokens`, `labels`, `rewards`, `text`, `timing`, `memory`, `outcomes` or `repeats`; of recorded
    runs also `gold` (logits of a run in float32 or wider), `topk`, `rollouts`, `advantages`,
    `gradients` or `routes`.

    Tiers: A full logits or states of both kernels; B the k likeliest tokens of both; C tokens
    sampled from the inference kernel; D recorded behaviour; E the clock, the memory counter,
    repeated runs; F records.
    """

    name: str
    dimension: Dimension
    summary: str
    """The meaning in words."""
    formula: str = ""
    """The formula of a value, in symbols."""
    family: Family = Family.NUMERICAL
    kind: Kind = "pointwise"
    counted: Counted = "token"
    better: Better = "lower"
    statistics: frozenset[str] = POINTWISE
    needs: tuple[str, ...] = ("logits",)
    signed: bool = False
    """Deviations of both signs are bad; the metric may only be bounded through `abs(...)`."""
    lower: Fraction | None = ZERO
    """The least possible value, None if unbounded."""
    upper: Fraction | None = None
    """The largest possible value, None if unbounded."""
    tier: Tier = "A"
    bias: Bias = "exact"
    estimates: str = ""
    """The quantity that the mean estimates or bounds, with the two sides of a divergence."""
    noisy: bool = False
    """Repeated runs of the same requests give different values: a verdict needs an interval."""
    untempered: bool = False
    """Computed from logits before the temperature of the contract, or from the order of tokens."""
    steps: int | None = None
    """If set, a value is a multiple of 1/steps (shares of k tokens)."""
    depth: int = 1
    """The number of likeliest tokens that are compared."""
    valued: Literal["token", "request", "slice"] | None = None
    """The unit that has one value; None where it is `counted`."""
    reads: tuple[str, ...] = ()
    """The arrays (below, or other metrics) that the value is computed from."""
    entry: str | Callable[..., Any] = ""
    """The function of these arrays: `module:function` below `kcdsl_backends.empirical.metrics`, or
    the function itself where the methods of an array are all that it needs; `ABSOLUTE_MEAN`; empty
    where the evaluator measures the metric itself, with no function of arrays."""
    columns: tuple[str, ...] | None = None
    """The columns of a recording that it is computed from; None if recordings cannot provide it."""
    absent: str = ""
    """The reason why a forward pass of both kernels does not provide it; empty if it does."""
    unit: str | None = None
    """The unit in which the function of a user's metric returns its values."""
    function: str | None = None
    """`module:function` or `file.py:function` of a user's metric; None for those built in."""

    @property
    def low(self) -> float | None:
        """Return the least possible value."""
        return None if self.lower is None else float(self.lower)

    @property
    def high(self) -> float | None:
        """Return the largest possible value."""
        return None if self.upper is None else float(self.upper)

    @property
    def tempered(self) -> bool:
        """Return whether values depend on the temperature of the contract."""
        return not self.untempered and not {"logits", "sampled"}.isdisjoint(self.needs)

    @property
    def per(self) -> Literal["token", "request", "slice"]:
        """Return the unit with one value each: a token, a request or a whole slice."""
        if self.valued is not None:
            return self.valued
        return "slice" if self.counted == "window" else self.counted


# --- arrays --------------------------------------------------------------------------------------

# Names of the recorded arrays of a request from which metrics are computed, besides the metrics per
# token or per request, which are recorded under their own names.

LOGITS = ("train_logits", "infer_logits")
"""Logits [T, V] of both kernels, read by one pass over all of them; never kept."""
STATES = ("train_hidden", "infer_hidden")
"""Last hidden states [T, D] of both kernels; never kept."""
TOPS = ("train_top", "infer_top")
"""Ids [T, k] of the likeliest tokens of both kernels, likeliest first; never kept."""
LISTS = ("train_top_logs", "infer_top_logs")
"""ln p and ln q [T, m] of the tokens that both sides list; never kept."""
LOGS = TRAIN_LOG, INFER_LOG = ("sampled_train_log", "sampled_infer_log")
"""ln p and ln q of the sampled tokens."""
RATIO_LOG = "log_ratio"
"""ln w of the sampled tokens: the metric of this name."""
CONFIDENCES = ("ece_train", "ece_train_right", "ece_infer", "ece_infer_right")
"""Of each labelled position [T]: the probability of the likeliest token of both kernels, and 1
where it is the label."""
BINS = 15
"""The bins of a calibration error."""
RANKS = 5
"""The likeliest tokens that `ace_gap` compares."""
RANKED = ("ace_train", "ace_train_hits", "ace_infer", "ace_infer_hits")
"""Flattened [T, 5] arrays: probabilities of the five likeliest tokens, and which is the label."""
LENGTHS = "rollout_lengths"
"""Counted tokens of each rollout of a request, in the order of its arrays."""
ADVANTAGE_WEIGHTED = "advantage_weighted"
"""(w - 1) A of each counted token."""
SHARED_ROUTES, LAYERS, REROUTED = "shared_routes", "routed_layers", "rerouted"
"""Shares of chosen experts that both sides share, token by token [tokens x layers]; how many layers
each rollout has; 1 for each token that was rerouted in any layer."""
GRADIENTS = ("train_gradient", "infer_gradient", "gradient_width")
"""Gradients of each rollout, one after the other, and how many numbers each of them has."""
CACHE = "cache_bytes"
"""Bytes of keys and values of each rollout."""
