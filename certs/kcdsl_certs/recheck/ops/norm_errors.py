"""Errors of storing the parts of a norm, fused or written out (section 6)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import ULP, Floats
from kcdsl_certs.recheck.interval.state import gamma
from kcdsl_certs.recheck.numerics.formats import FLOAT32, FLOAT64, FORMATS, Format
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics

_SLACK = 1 + 2.0**-44


@dataclass(frozen=True, slots=True)
class Norm:
    """Bounds of the input of a norm in one kernel: `size` of |x| and `centred` of |c| by element;
    by row `usual` of |mean|, `least` and `most` of the variance (with eps); and by element `apart`,
    the distance of x from the reading of x in sums over the row."""

    size: Floats
    centred: Floats
    usual: Floats
    least: Floats
    most: Floats
    apart: Floats


@dataclass(frozen=True, slots=True)
class Loss:
    """Errors of the parts of a norm: `theta` of the inverse root (relative), `mean` [..., 1] of the
    mean, and pairs (α, β) of centred numbers, normalised ones, and products with the gain."""

    theta: Floats
    mean: Floats
    centred: tuple[float, float]
    normed: tuple[float, float]
    weighted: tuple[float, float]
    formats: tuple[Format, Format]
    u: float
    tiny: float

    def elements(self, y: Floats, root: Floats) -> Floats:
        """Return the error of y besides those by theta and by the mean; roots are ≤ `root`."""
        before = box.up(y * (1 + self.theta) + self.mean * root)
        centred = self.centred[0] * before + self.centred[1] * root
        return box.up(centred + self.normed[0] * (before + centred) + self.normed[1], 12)

    def last(self, y: Floats, error: Floats, gain: Floats, bias: Floats) -> Floats:
        """Return the roundings of gain and bias on numbers of size y that have the error `error`.

        Raises Rejected "bound/overflow".
        """
        normal = box.up(y + error)
        _fits(normal, self.formats[0], "a normalised number")
        product = box.up(normal * gain)
        lost = box.up(self.weighted[0] * product + self.weighted[1])
        _fits(product + lost, self.formats[1], "a product with the gain")
        return box.up(lost + self.u * (product + lost + bias) + self.tiny, 12)


def losses(node: Node, kernel: KernelNumerics, eps: float, norm: Norm) -> Loss:
    """Return the errors of the parts of a norm.

    Raises Rejected "bound/overflow", or "bound/not-finite" where errors may exceed the variance.
    """
    stored = _Formats.of(node, kernel)
    u, n = stored.u, norm.size.shape[-1]
    sums = gamma(n + 6, u)
    epsilon, (alpha, beta) = np.zeros(norm.least.shape), (0.0, 0.0)
    length = np.sqrt((norm.apart**2).mean(axis=-1, keepdims=True) / norm.least)
    turned = box.up(length, n + 16)
    reading, centred = box.up(norm.size + norm.apart), box.up(norm.centred + norm.apart)
    if node.op == "layer_norm":
        one, eta = stored.cast("mean")
        average = box.up(reading.mean(axis=-1, keepdims=True), n + 4)
        epsilon = box.up(sums * average * (1 + one) + one * norm.usual + eta, 16)
        other = box.up(norm.apart.mean(axis=-1, keepdims=True), n + 4)
        epsilon = box.up(epsilon + other + (n + 6) * stored.tiny)
        stored.fits("mean", norm.usual + epsilon)
        alpha, beta = stored.off("centred", u)
        stored.fits("centred", (centred + epsilon) * (1 + alpha) + beta)
    if "variance" in node.parts:
        squares = box.up((reading**2).mean(axis=-1, keepdims=True), n + 4)
        wide = box.up((1 + 4 * sums * squares / norm.least) * (1 + turned) ** 2)
        name, (relative, absolute) = "variance", stored.cast("variance")
    else:
        ratio = box.up(epsilon**2 / norm.least)
        spread = (np.sqrt(1 + ratio) + turned) * (1 + alpha) + beta / np.sqrt(norm.least)
        wide = box.up(spread**2, 16)  # Minkowski: centred numbers with errors α and β, over v
        square, faint = stored.off("square", 2 * u)
        whole = box.up((centred + epsilon) * (1 + alpha) + beta)
        stored.fits("square", whole**2 * (1 + square) + faint)
        name = "mean2" if node.op == "layer_norm" else "mean"
        averaged, lost = stored.off(name, sums)
        relative = (1 + square) * (1 + averaged) - 1 + 4 * ULP
        absolute = faint * (1 + averaged) + lost + (n + 6) * stored.tiny
    wide = box.up(wide * (1 + relative) + absolute / norm.least, 16)
    stored.fits(name, norm.most * wide)
    shift, faint = stored.off("shift", 2 * u)
    ends = stored.scalar(eps, "shift")
    moved = max(ends[1] - eps, eps - ends[0]) + stored.tiny
    wide = box.up(wide * (1 + shift) + (moved * (1 + shift) + faint) / norm.least, 16)
    kappa = box.up(wide - 1 + 8 * ULP)
    if not bool((kappa < 1).all()):
        raise Rejected("bound/not-finite", "the variance may be lost in its roundings")
    stored.fits("shift", norm.most * (1 + kappa))
    return _rooted(stored, norm, kappa, epsilon, (alpha, beta))


def _rooted(
    stored: _Formats, norm: Norm, kappa: Floats, epsilon: Floats, centred: tuple[float, float]
) -> Loss:
    """Return the errors for a variance with a relative error of at most κ."""
    u, parts = stored.u, stored.node.parts
    by = "root" if "root" in parts else "sqrt"
    roundoff, eta = stored.cast(by)
    stored.fits(by, np.sqrt(norm.most * (1 + kappa)) * (1 + roundoff) + eta)
    shrunk = np.sqrt(norm.least * (1 - kappa)) * (1 - 4 * ULP)
    lost = box.up(roundoff + eta / shrunk)
    if not bool((lost < 1).all()):
        raise Rejected("bound/not-finite", "the root may be lost in its rounding")
    found = (1 + 10 * u) / (np.sqrt(1 - kappa) * (1 - lost))
    again = "root" if by == "root" else "reciprocal"
    if again in parts:
        roundoff, eta = stored.cast(again)
        found = found * (1 + roundoff) + eta * np.sqrt(norm.most)
    theta = box.up(found - 1 + 64 * ULP)
    if again in parts:
        stored.fits(again, (1 + theta) / np.sqrt(norm.least))
    normed = "normed" if "normed" in parts else "quotient"
    weighted = (u, stored.tiny)
    formats = stored.form(normed), stored.form(normed)
    if "weighted" in parts:
        weighted, formats = stored.off("weighted", u), (formats[0], stored.form("weighted"))
    last = stored.off(normed, 2 * u)
    return Loss(theta, epsilon, centred, last, weighted, formats, u, stored.tiny)


@dataclass(frozen=True, slots=True)
class _Formats:
    """The formats of the parts, and the arithmetic inside."""

    node: Node
    kernel: KernelNumerics
    u: float
    tiny: float

    @staticmethod
    def of(node: Node, kernel: KernelNumerics) -> _Formats:
        forms = [FORMATS[form] if form else kernel.holding for form in node.parts.values()]
        if all(form == FLOAT64 for form in forms):
            return _Formats(node, kernel, FLOAT64.u, 2.0**-1074)
        return _Formats(node, kernel, FLOAT32.u, 2.0**-149)

    def form(self, part: str) -> Format:
        """Return the format of a part."""
        name = self.node.parts[part]
        return FORMATS[name] if name else self.kernel.holding

    def cast(self, part: str) -> tuple[float, float]:
        """Return u and η of storing a part: 0 for the last part, which is the result, and for steps
        in a format as precise as the arithmetic."""
        form = self.form(part)
        precise = form.precision >= (53 if self.u == FLOAT64.u else FLOAT32.precision)
        if part == list(self.node.parts)[-1] or (self.kernel.stepped and precise):
            return 0.0, self.tiny
        u, eta = self.kernel.off(form)
        return u, eta + 2 * self.tiny

    def off(self, part: str, inside: float) -> tuple[float, float]:
        """Return α and β of a part whose arithmetic has the relative error `inside`."""
        u, eta = self.cast(part)
        return (inside + u + inside * u) * _SLACK, eta

    def fits(self, part: str, size: Floats) -> None:
        """Refuse a part that may overflow its format."""
        _fits(box.up(size), self.form(part), f"the {part}")

    def scalar(self, value: float, part: str) -> tuple[float, float]:
        """Return the least and the greatest number that a kernel may use for a scalar of a part."""
        inner = FLOAT64 if self.u == FLOAT64.u else FLOAT32
        return self.kernel.number(value, self.form(part), inner)


def _fits(size: Floats, form: Format, what: str) -> None:
    if not bool((size * _SLACK <= form.largest).all()):
        raise Rejected("bound/overflow", f"{what} may overflow {form.name}")


# float32 arithmetic inside: a smaller variance may lose its squares to underflow, a greater sum of
# squares may overflow.
LEAST_VARIANCE = 2.0**-100
MOST_SQUARES = 2.0**126


def root_error(kernel: KernelNumerics, size: Floats, least: Floats, centred: bool) -> Floats:
    """Return the relative error of a row's inverse root, `size` ≥ |x| and v ≥ `least` ([…, 1]).

    Raises Rejected "bound/not-finite".
    """
    n, u = size.shape[-1], kernel.inner.u
    if not centred:
        return np.full((*size.shape[:-1], 1), gamma(n + 3, u) + 8 * u)
    squares = (size**2).mean(axis=-1, keepdims=True) * (1 + (n + 8) * ULP)
    kappa = 4 * gamma(n + 6, u) * squares / least * (1 + 8 * ULP)
    if not bool((kappa < 1).all()):
        raise Rejected("bound/not-finite", "the mean is too large against the variance")
    root = box.up(1 / np.sqrt(1 - kappa) - 1 + 8 * ULP / (1 - kappa))
    return box.up(root * (1 + 8 * u) + 8 * u)
