"""Norms that a program writes out as several operations, part by part (section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl.model.numerics.formats import FORMATS, Format
from kcdsl_backends.drift.boxes import NoBound, gamma, overflow, refuse_overflow, up
from kcdsl_backends.drift.boxes.rounding import Rounding

_SAFE = 1.0 + 2.0**-40
_ROOT = 8
"""Roundings inside of a root."""

LEAST_VARIANCE, MOST_SQUARES = 2.0**-100, 2.0**126
"""Outside of these, squares underflow or their sum overflows in the float32 inside of a norm."""


def refuse_large_squares(node: str, size: Tensor, eps: float) -> None:
    """Refuse rows whose sum of squares may leave float32.

    Raises:
        NoBound: naming the largest element.
    """
    if not bool((size.shape[-1] * size.amax(-1) ** 2 + eps <= MOST_SQUARES).all()):
        raise overflow(node, size, " may make the sum of squares of its row leave float32")


@dataclass(frozen=True, slots=True)
class StoredPart:
    """The error of storing a part, α = (1 + k·u)(1 + u_F) - 1 and β, and its format."""

    form: Format
    unit: float
    faint: float

    def relative(self, inside: float) -> float:
        """Return α for a part with the relative error `inside` before it is stored."""
        return ((1 + inside) * (1 + self.unit) - 1) * _SAFE + 2.0**-60 * inside


@dataclass(frozen=True, slots=True)
class WrittenNorm:
    """The roundings of a norm that is written out, before its gain.

    `theta` [..., 1] is the relative error of the inverse root, `mean` [..., 1] that of the mean;
    `centred` has α and β of the centred number, `normed` those of the normalised number, `weighted`
    those of its product with the gain, if that is stored before a bias is added. `u` and `eta` are
    of the arithmetic inside.
    """

    theta: Tensor
    mean: Tensor
    centred: tuple[float, float]
    normed: tuple[float, float]
    weighted: tuple[float, float]
    forms: Mapping[str, Format]
    u: float
    eta: float

    def apart(self, y: Tensor, root: Tensor) -> Tensor:
        """Return the error of normalised numbers of size y in addition to those by mean and root;
        computed inverse roots are at most `root`."""
        (alpha, beta), (last, least) = self.centred, self.normed
        size = (y * (1 + self.theta) + self.mean * root) * _SAFE
        own = alpha * size + beta * root
        return up(own + last * (size + own) + least, 8)

    def result(
        self, node: str, y: Tensor, error: Tensor, own: Tensor, gain: Tensor, bias: Tensor
    ) -> Tensor:
        """Return E of the result, y with an error times the gain plus the bias; `own` is the part
        of the error that E includes.

        Raises:
            NoBound: a normalised number or its product with the gain may overflow.
        """
        refuse_overflow(node, up(y + error, 4), self.forms["normed"], ", normalised,")
        product = up((y + error) * gain, 4)
        rounded = self.weighted[0] * product + self.weighted[1]
        refuse_overflow(node, up(product + rounded, 4), self.forms["weighted"], ", times the gain,")
        return up(own * gain + rounded + self.u * (product + rounded + bias) + self.eta, 8)


def parts_of(node: Node) -> dict[str, str]:
    """Return the parts of a norm that is written out, with their formats; none otherwise."""
    return {str(part): str(form) for part, form in node.attrs.get("parts", ())}


def written(
    node: Node,
    kernel: Rounding,
    size: Tensor,
    centred: Tensor,
    middle: Tensor,
    least: Tensor,
    most: Tensor,
    apart: Tensor,
) -> WrittenNorm:
    """Return the roundings of a norm that is written out.

    Args:
        node: the norm.
        kernel: the kernel as it computes the node.
        size: magnitudes of the input.
        centred: magnitudes of the input less its mean (rms_norm: of the input).
        middle: magnitudes of the mean [..., 1].
        least, most: bounds of the variance with eps (or of the mean square) [..., 1].
        apart: the distance of the input from the reading of it in sums over a row.

    Raises:
        NoBound: a part may overflow, or roundings of the parts may exceed the variance.
    """
    parts, n, eps = parts_of(node), size.shape[-1], float(node.attrs["eps"])
    wide = all(FORMATS[form or kernel.own.compute].wide for form in parts.values())
    u, eta = (2.0**-53, 2.0**-1074) if wide else (2.0**-24, 2.0**-149)
    final = list(parts)[-1]

    def part(name: str) -> StoredPart:
        form = FORMATS[parts[name] or kernel.own.compute]
        exact = not kernel.free and form.precision >= (53 if wide else 24)
        if name == final or exact:
            return StoredPart(form, 0.0, eta)
        return StoredPart(form, kernel.unit(form), kernel.faint(form) + 2 * eta)

    def fits(name: str, magnitude: Tensor) -> None:
        refuse_overflow(node.name, up(magnitude * _SAFE), part(name).form, f", the {name},")

    off = torch.zeros_like(least)
    own = (0.0, 0.0)
    length = up(torch.linalg.vector_norm(apart, dim=-1, keepdim=True) * _SAFE, 4)
    turned = up(length * torch.rsqrt(least * n) * _SAFE, 4)
    size, centred = up(size + apart), up(centred + apart)
    count = gamma(n + 6, u)
    if "mean" in parts and node.op == "layer_norm":
        first, second = part("mean"), part("centred")
        average = size.mean(-1, keepdim=True) * _SAFE
        off = count * average * (1 + first.unit) + first.unit * middle + first.faint
        off = up((off + (n + 6) * eta + apart.mean(-1, keepdim=True)) * _SAFE, 4)
        fits("mean", middle + off)
        fits("centred", (centred + off) * (1 + second.unit) + second.faint)
        own = second.relative(u), second.faint
    if "variance" in parts:
        stored = part("variance")
        kappa = 4 * count * size.square().mean(-1, keepdim=True) * _SAFE / least
        kappa = (1 + kappa) * (1 + turned).square() * (1 + stored.unit) - 1 + stored.faint / least
        averaging = "variance"
    else:
        averaging = "mean2" if node.op == "layer_norm" else "mean"
        square, mean = part("square"), part(averaging)
        alpha, beta = own
        ratio = off.square() / least
        spread = (torch.sqrt(1 + ratio) + turned) * (1 + alpha) + beta * torch.rsqrt(least)
        kappa = up(spread.square() * _SAFE - 1, 4)
        whole = (centred + off) * (1 + alpha) + beta
        fits("square", whole.square() * (1 + square.relative(2 * u)) + square.faint)
        averaged = mean.relative(count)
        kappa = (1 + kappa) * (1 + square.relative(2 * u)) * (1 + averaged) - 1
        faint = square.faint * (1 + averaged) + mean.faint + (n + 6) * eta
        kappa = kappa + faint / least
    fits(averaging, most * (1 + kappa))
    shift = part("shift")
    low, high = _scalar(kernel, eps, shift.form, node.name)
    added = (max(high - eps, eps - low) + eta) * (1 + shift.unit) + shift.faint
    kappa = up(((1 + kappa) * (1 + shift.relative(2 * u)) - 1 + added / least) * _SAFE, 8)
    if not bool((kappa < 1).all()):
        raise NoBound(node.name, "the variance may be lost in the roundings of what is written out")
    fits("shift", most * (1 + kappa))
    root = 1 / torch.sqrt(1 - kappa) * (1 + _ROOT * u)
    highest = torch.rsqrt(least)
    if "root" in parts:  # a root and its reciprocal, each stored
        stored = part("root")
        fits("root", torch.sqrt(most * (1 + kappa)))
        lost = stored.unit + stored.faint * highest / torch.sqrt(1 - kappa)
        reciprocal = stored
    else:
        stored = part("sqrt")
        lost = stored.unit + stored.faint * highest / torch.sqrt(1 - kappa)
        reciprocal = (
            part("reciprocal") if "reciprocal" in parts else StoredPart(stored.form, 0.0, 0.0)
        )
        fits("sqrt", torch.sqrt(most * (1 + kappa)) * (1 + stored.unit) + stored.faint)
    if not bool((lost < 1).all()):
        raise NoBound(node.name, "the root may be lost in the roundings of what is written out")
    root = root / (1 - lost) * (1 + reciprocal.unit) * (1 + 2 * u)
    theta = up((root - 1 + reciprocal.faint * torch.sqrt(most)) * _SAFE + 2.0**-48, 4)
    if "quotient" not in parts:
        fits("root" if "root" in parts else "reciprocal", highest * (1 + theta))
    name = "quotient" if "quotient" in parts else "normed"
    normed = part(name)
    weighted = part("weighted") if "weighted" in parts else StoredPart(normed.form, 0.0, eta)
    return WrittenNorm(
        theta,
        off,
        own,
        (normed.relative(2 * u), normed.faint),
        (weighted.relative(u), weighted.faint),
        {"normed": normed.form, "weighted": weighted.form},
        u,
        eta,
    )


def _scalar(kernel: Rounding, value: float, form: Format, node: str) -> tuple[float, float]:
    """Return the least and the greatest value of eps after a possible rounding to a format."""
    pinned = kernel.own.pinned(form.name)
    return (kernel if pinned is None else Rounding(pinned)).scalar(value, form, node)
