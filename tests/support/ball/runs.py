"""Runs of kernels in ball arithmetic, with the admitted roundings applied explicitly.

With numerics "exact" nothing rounds, so a run is the real function itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from flint import arb

from tests.support import kernels
from tests.support.ball import numbers
from tests.support.ball.numbers import Balls, balls, each

# precision, exponent of the smallest normal number
FORMATS = {
    "float64": (53, -1022), "float32": (24, -126), "tfloat32": (11, -126), "float16": (11, -14),
    "bfloat16": (8, -126), "fp8_e4m3": (4, -6), "fp8_e5m2": (3, -14),
}  # fmt: skip


@dataclass
class BallRun(kernels.Run):
    """One run of a kernel on balls; `exact` turns every rounding off."""

    exact: bool = False

    def roundoff(self, form: str) -> arb:
        return numbers.ZERO if self.exact else numbers.power(-FORMATS[form][0])

    def faint(self, form: str) -> arb:
        """Return half the smallest subnormal number of a format."""
        precision, least = FORMATS[form]
        return numbers.ZERO if self.exact else numbers.power(least - precision)

    def wobble(self, v: Any, form: str, times: float = 1.0) -> Balls:
        found = balls(v)
        factor = 1 + self.roundoff(form) * arb(times) * balls(self.lean(found.shape))
        return np.asarray(found * factor, dtype=object)

    def step(self, v: Any) -> Balls:
        return self.wobble(v, self.inner)

    def store(self, v: Any, form: str, inner: str = "float32") -> Balls:
        found = balls(v)
        if self.exact:
            return found
        match self.numerics["casts"]:
            case "any":
                moved = self.wobble(found, form) + self.faint(form) * balls(self.lean(found.shape))
                return np.asarray(moved, dtype=object)
            case "any_direction":
                moved = self.wobble(found, form, 2.0)
                moved = moved + 2 * self.faint(form) * balls(self.lean(found.shape))
                return np.asarray(moved, dtype=object)
            case "any_toward_zero":
                share = self.roundoff(form) * (1 + balls(self.lean(found.shape)))
                less = each(abs, found) * (1 - share)
                less = less - self.faint(form) * (1 + balls(self.lean(found.shape)))
                least_of = each(lambda x, y: x.max(numbers.ZERO) * y.sgn(), less, found)
                return np.asarray(least_of, dtype=object)
        precision, least = FORMATS[form]
        if precision >= max(24, FORMATS[inner][0]):
            return found
        step = numbers.cut if self.numerics["casts"] == "toward_zero" else numbers.nearest
        return each(lambda x: step(x, precision, least), found)

    def dot(self, a: Any, b: Any) -> Balls:
        a, b = balls(a), balls(b)
        form = self.numerics["accumulate"]
        total: Balls | None = None
        for k in self.rng.permutation(a.shape[-1]):
            term = self.wobble(a[..., :, k, None] * b[..., None, k, :], form)
            total = term if total is None else self.wobble(total + term, form)
        assert total is not None
        return total

    def quantised(self, x: Any, key: str = "") -> Balls:
        assert self.exact or self.numerics["activations"]["format"] == "none"
        return balls(x)

    def function(self, op: str, x: Any) -> Balls:
        known = {
            "gelu": numbers.gelu,
            "gelu by tanh": numbers.gelu_tanh,
            "silu": numbers.silu,
            "tanh": numbers.tanh,
        }
        return self.wobble(each(known[op], balls(x)), self.inner, 8)

    def relu(self, x: Any) -> Balls:
        return each(lambda v: v.max(numbers.ZERO), balls(x))

    def exp(self, x: Any) -> Balls:
        ulps = self.numerics["attention"]["exp_ulps"]
        values = each(lambda v: v.exp(), balls(self.step(x)))
        return self.wobble(values, self.inner, 2 * ulps)

    def softmax(self, scores: Any, mask: np.ndarray, form: str) -> Balls:
        scores = balls(scores)
        found = np.full(scores.shape, numbers.ZERO, dtype=object)
        for row in np.ndindex(*scores.shape[:-1]):
            columns = np.flatnonzero(mask[row])
            s = scores[(*row, columns)]
            e = self.exp(s - s[np.argmax([float(v) for v in s])])
            found[(*row, columns)] = self.store(self.step(e / self.sum(e)), form)
        return found

    def online(self, scores: Any, mask: np.ndarray, v: Any) -> Balls:
        scores = balls(scores)
        attention, form = self.numerics["attention"], self.numerics["accumulate"]
        values = np.broadcast_to(balls(v), (*scores.shape[:-2], *np.shape(v)[-2:]))
        out = np.full((*scores.shape[:-1], values.shape[-1]), numbers.ZERO, dtype=object)
        for row in np.ndindex(*scores.shape[:-1]):
            out[row] = self._row(
                scores[row], mask[row], values[row[:-1]], attention, form, self.rng.random() < 0.5
            )
        return out

    def _row(
        self, s: Balls, mask: np.ndarray, v: Balls, attention: Any, form: str, rounded: bool
    ) -> Balls:
        top: arb | None = None
        total, out = numbers.ZERO, np.full(v.shape[-1:], numbers.ZERO, dtype=object)
        for start in range(0, s.size, attention["tile"]):
            columns = [k for k in range(start, min(start + attention["tile"], s.size)) if mask[k]]
            if not columns:
                continue
            highest = max(columns, key=lambda k: float(s[k]))
            new = s[highest] if top is None or float(s[highest]) > float(top) else top
            factor = numbers.ZERO if top is None else self.exp(np.array([top - new]))[0]
            p = self.exp(s[columns] - new)
            q = self.store(p, attention["probabilities"])
            parts = self.sum(q if rounded else p)[0]
            total = self.step(self.step(np.array([total * factor])) + parts)[0]
            out = self.wobble(out * factor, form)
            for k, weight in zip(columns, q, strict=True):
                out = self.wobble(out + self.wobble(weight * v[k], form), form)
            top = new
        return self.wobble(out / total, form)


def run(
    graph: Any, record: Any, x: Any, plain: Any, linear: Any, seed: int, mode: str, exact: bool
) -> dict[str, Balls]:
    """Return the value of every node of a run: exact, or rounded as `mode` states."""
    made = BallRun(record, np.random.default_rng(seed), mode, exact)
    found = kernels.simulate(graph, made, None if x is None else balls(x), plain, linear)
    return {name: value for name, value in found.items() if value.dtype != bool}
