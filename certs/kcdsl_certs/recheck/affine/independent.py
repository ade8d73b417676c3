"""Independent roundings (section 8): bounds of functionals that fail in a share of all runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.interval.box import Floats
from kcdsl_certs.recheck.interval.sums import flushed, unit_of
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics

_REMEMBERED = 16  # most elements of an entry that may be counted in the worst case
_TOGETHER = 64  # the same for all entries together
_MORE = 1 + 2.0**-38
_FAINT = 2.0**-480  # bounds the sum of 2^40 roots whose squares underflow in float64


@dataclass(slots=True)
class Budget:
    """α, divided among `functionals`; `used` is the number that a kernel has bounded."""

    alpha: Fraction
    functionals: int
    used: int = 0

    def take(self, count: int) -> None:
        """Count bounds of functionals.

        Raises Rejected "bound/chance" if they are more than those that share the probability.
        """
        self.used += count
        if self.used > self.functionals:
            raise Rejected("bound/chance", f"more than {self.functionals} functionals are bounded")

    @property
    def factor(self) -> float:
        """Return an upper bound of 2 ln(2N/α)."""
        return 2 * math.log(float(2 * self.functionals / self.alpha) * _MORE) * _MORE


@dataclass(frozen=True, slots=True)
class Split:
    """An entry's radius: `sure`, and the sum and the root of squares of its own roundings."""

    sure: Floats
    most: Floats
    root: Floats

    def with_one(self, rounding: Floats, sure: Floats | float = 0.0) -> Split:
        """Return the same with one more rounding in every element, and `sure` added."""
        return Split(
            (self.sure + sure) * _MORE,
            (self.most + rounding) * _MORE,
            np.sqrt(self.root**2 + rounding**2) * _MORE,
        )

    def with_cast(self, kernel: KernelNumerics, rounding: Floats, sure: Floats | float) -> Split:
        """Return the same with one more cast; a directed one does not have mean zero, so it is
        sure."""
        if kernel.units != 1:
            return self.with_sure(rounding + sure)
        return self.with_one(rounding, sure)

    def with_sure(self, more: Floats | float) -> Split:
        """Return the same with `more` added to the sure part."""
        return Split((self.sure + more) * _MORE, self.most, self.root)


def only_sure(radius: Floats) -> Split:
    """Return a radius without roundings of its own."""
    return Split(radius, np.zeros(radius.shape), np.zeros(radius.shape))


def of_sum(
    kernel: KernelNumerics,
    factors: tuple[Floats, Floats],
    size: tuple[Floats, Floats],
    error: Floats,
    *,
    extra: int = 0,
    before: int = 2,
    dynamic: bool = False,
) -> Split:
    """Return the parts of the error of sums; arguments as for `sums.rounding_of_sums`."""
    if kernel.shortened or unit_of(kernel, dynamic) is not None:
        return only_sure(error)
    n, form = factors[0].shape[-1], kernel.accumulate
    whole = size[0] + error
    partial = (size[0] + size[1]) / 2 + error
    root = form.u * np.sqrt(n * partial**2 + whole**2) * _MORE
    most = form.u * (n * partial + whole) * _MORE
    shared = (extra + before - 1) * form.u * whole
    faint = flushed(kernel, *factors) + (n + extra + before) * form.eta
    return Split((shared + faint) * _MORE, most, root)


@dataclass(frozen=True, slots=True)
class Likely:
    """Roundings in functionals [B]: `most` and `root` of the largest ones [B, K], and the sum of
    squares of all others [B]."""

    most: Floats
    root: Floats
    rest: Floats

    @staticmethod
    def nothing(batch: int) -> Likely:
        """Return an empty sum of roundings."""
        return Likely(np.zeros((batch, 0)), np.zeros((batch, 0)), np.zeros(batch))

    def plus(self, other: Likely) -> Likely:
        """Return the roundings of two sums that share none."""
        most = np.concatenate([self.most, other.most], axis=1)
        root = np.concatenate([self.root, other.root], axis=1)
        return Likely(*_largest(most, root, self.rest + other.rest, _TOGETHER))

    def bound(self, budget: Budget) -> Floats:
        """Return a bound of their sum that fails in a share of at most α/N of all runs."""
        with np.errstate(all="ignore"):
            worth = np.where(self.most > 0, self.root**2 / self.most, np.inf)
        order = np.argsort(-worth, axis=1, kind="stable")
        most = np.take_along_axis(self.most, order, axis=1)
        squares = np.take_along_axis(self.root, order, axis=1) ** 2
        found = np.full(len(self.rest), np.inf)
        for taken in range(most.shape[1] + 1):
            left = squares[:, taken:].sum(axis=1) + self.rest
            each = most[:, :taken].sum(axis=1) + np.sqrt(budget.factor * left)
            found = np.minimum(found, each)
        return np.asarray(found * _MORE + _FAINT)


def read(adjoint: Adjoint, split: Split) -> Likely:
    """Return an entry's own roundings in functionals of it."""
    size = np.abs(adjoint.values).reshape(adjoint.batch, -1)
    most = size * split.most[adjoint.window].reshape(-1)
    root = size * split.root[adjoint.window].reshape(-1)
    return Likely(*_largest(most, root, np.zeros(adjoint.batch), _REMEMBERED))


def _largest(most: Floats, root: Floats, rest: Floats, count: int) -> tuple[Floats, Floats, Floats]:
    """Return the elements with the largest roots, and the squares of the others with the rest."""
    if root.shape[1] <= count:
        return most, root, rest * _MORE
    chosen = np.argpartition(root, root.shape[1] - count, axis=1)[:, -count:]
    others = root.copy()
    np.put_along_axis(others, chosen, 0.0, axis=1)
    terms = 1 + 4 * root.shape[1] * 2.0**-53
    rest = (rest + np.einsum("bk,bk->b", others, others) * terms) * _MORE
    largest = np.take_along_axis(root, chosen, axis=1)
    return np.take_along_axis(most, chosen, axis=1), largest, rest
