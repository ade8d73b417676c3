"""What is said of a metric as it is measured: tier, estimator, bias class, unit counted, range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal[
    "logits", "sampled", "hidden", "calibration", "gradient", "runtime", "text", "user"
]
Bias = Literal["exact", "unbiased", "biased", "lower_bound", "upper_bound"]


@dataclass(frozen=True, slots=True)
class Measure:
    """One metric as it is measured.

    `counted` is the unit of one value; `better` the good direction; `low` and `high` the range the
    values cannot leave, where there is one. `direction` names the two sides of a divergence.
    """

    name: str
    source: Source
    tier: str
    estimator: str
    bias: Bias
    counted: Literal["token", "request", "slice"]
    better: Literal["lower", "higher"]
    low: float | None = 0.0
    high: float | None = None
    direction: str = ""
    steps: int | None = None
    """Where it is set, a value is a whole number of 1/steps (shares of k tokens)."""
    noisy: bool = False
    """One more run of the same requests would give other values, so a verdict needs an interval."""
    unit: str = ""
    """The base unit of the values, where the name does not tell it."""
