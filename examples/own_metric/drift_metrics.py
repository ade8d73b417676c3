"""Two metrics of our own, for contracts in this folder (`metrics` of kcdsl.toml names this file).

kcdsl reads the declarations from this text; only `kcdsl evaluate` imports it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl import metric

Floats = NDArray[np.float64]


def entropy(logits: Floats, temperature: float) -> Floats:
    """Return the entropy in nats of the next-token distribution at each of [tokens, vocabulary]."""
    z = logits / temperature
    z = z - z.max(axis=-1, keepdims=True)
    p = np.exp(z)
    p /= p.sum(axis=-1, keepdims=True)
    result: Floats = np.log(np.exp(z).sum(axis=-1)) - (p * z).sum(axis=-1)
    return result


@metric(
    family="statistical",
    unit="nats",
    better="lower",
    counted="token",
    needs=["logits"],
    signed=True,
    summary="entropy of the inference policy minus that of the training policy",
)
def entropy_rise(train_logits: Floats, infer_logits: Floats, temperature: float) -> Floats:
    """Return H(infer) - H(train) at each position: [tokens]."""
    return entropy(infer_logits, temperature) - entropy(train_logits, temperature)


@metric(
    name="label_rank_kept",
    family="statistical",
    unit="%",
    better="higher",
    counted="request",
    needs=["logits", "labels"],
    upper=100,
)
def kept(train_logits: Floats, infer_logits: Floats, labels: NDArray[Any]) -> float:
    """Return the share of positions, in percent, at which the next token keeps its rank."""
    known = labels >= 0
    if not known.any():
        return 100.0
    rows = np.nonzero(known)[0]

    def ranks(logits: Floats) -> NDArray[np.intp]:
        ahead: NDArray[np.intp] = (logits[rows] > logits[rows, labels[rows], None]).sum(axis=-1)
        return ahead

    return float(100 * np.mean(ranks(train_logits) == ranks(infer_logits)))
