"""Worlds whose metrics are computed from random logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from random import Random

from tests.support.contracts import Worlds
from tests.support.semantics.interpretations import Unit

SIZES = (0.01, 0.1, 0.3, 1.0, 3.0)


def metrics_of_row(
    random: Random, temperature: float = 1.0, sizes: Sequence[float] = SIZES
) -> dict[str, float]:
    """Return every metric of one position: two to five classes, small and large drifts."""
    n, size = random.choice((2, 2, 3, 5)), random.choice(sizes)
    z = [random.gauss(0, random.choice((0.01, 1, 3))) for _ in range(n)]
    d = [random.gauss(0, size) for _ in range(n)]
    p, q = (
        _softmax(z, temperature),
        _softmax([a + b for a, b in zip(z, d, strict=True)], temperature),
    )
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    ratios = [math.log(a / b) for a, b in zip(p, q, strict=True)]
    mean, token = sum(d) / n, random.randrange(n)
    return {
        "kl": _kl(p, q),
        "kl_infer_train": _kl(q, p),
        "jeffreys": _kl(p, q) + _kl(q, p),
        "js": (_kl(p, middle) + _kl(q, middle)) / 2,
        "tv": sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
        "hellinger2": max(0.0, 1 - sum(math.sqrt(a * b) for a, b in zip(p, q, strict=True))),
        "log_ratio_linf": max(abs(x) for x in ratios),
        "logit_span": max(d) - min(d),
        "logit_linf": max(abs(x) for x in d),
        "logit_l2": math.hypot(*d),
        "logit_l2_centered": math.hypot(*(x - mean for x in d)),
        "log_ratio": ratios[token],
        "k1": -ratios[token],
        "top1_overlap": float(random.random() < 0.8),
        "hidden_l2": random.choice((0.0, 0.3, 1.1, 2.5)),
    }


def _softmax(z: Sequence[float], temperature: float) -> list[float]:
    weights = [math.exp((x - max(z)) / temperature) for x in z]
    return [w / sum(weights) for w in weights]


def _kl(p: Sequence[float], q: Sequence[float]) -> float:
    return max(0.0, sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))


class MeasuredWorlds(Worlds):
    """Worlds whose metrics come from distributions; up to three tokens per request."""

    tokens = 3
    sizes: Sequence[float] = SIZES

    def unit(self, number: int) -> Unit:
        unit = super().unit(number)
        if number == 0:
            self.sizes = self.choice((SIZES, SIZES[:1], SIZES[:2], SIZES[:3], SIZES[2:]))
        rows = [metrics_of_row(self, 1.0, self.sizes) for _ in range(self.randint(1, self.tokens))]
        values = {name: tuple(Fraction(row[name]) for row in rows) for name in rows[0]}
        return replace(unit, values=values)
