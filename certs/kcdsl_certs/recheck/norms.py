"""How far the weights of a later checkpoint are from those of an earlier one.

Elements are compared as the float32 numbers that kernels read. Whether |θ' - θ| ≤ ρ|θ| is decided
exactly: where it can hold, ρ ≤ 1/2, the difference of two float32 numbers is a float32 number, and
what is too near to ρ for doubles is compared as a fraction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from kcdsl_certs.recheck.box import Floats, above, down
from kcdsl_certs.recheck.safetensors import Tensor
from kcdsl_certs.recheck.weights import as_float32
from kcdsl_certs.rejected import Rejected


@dataclass(frozen=True, slots=True)
class Moved:
    """The element of a tensor that moved most: `ratio` ≥ |θ' - θ|/|θ|, infinite from zero.

    `inside` says whether all elements of the tensor are in the region.
    """

    tensor: str
    element: tuple[int, ...]
    earlier: float
    later: float
    ratio: float
    inside: bool


def same_tensors(earlier: Mapping[str, Tensor], later: Mapping[str, Tensor]) -> None:
    """Refuse checkpoints of other tensors, shapes or dtypes.

    Raises:
        Rejected: "transfer/tensors".
    """
    apart = sorted(earlier.keys() ^ later.keys())
    if apart:
        where = "earlier" if apart[0] in earlier else "later"
        raise Rejected("transfer/tensors", f"only the {where} checkpoint has {apart[0][:200]!r}")
    for name, one in earlier.items():
        two = later[name]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            detail = f"{name[:200]!r} was {one.dtype} {list(one.shape)}, is {two.dtype}"
            raise Rejected("transfer/tensors", f"{detail} {list(two.shape)}")


def moved(
    earlier: Mapping[str, Tensor], later: Mapping[str, Tensor], keys: Iterable[str], rho: Fraction
) -> list[Moved]:
    """Return of every named tensor the element that moved most.

    Raises:
        Rejected: "transfer/tensors" for one that is missing, "parameter/dtype" and
            "parameter/not-finite" for what is no weight.
    """
    found = []
    for key in sorted(keys):
        if key not in earlier or key not in later or earlier[key].shape != later[key].shape:
            raise Rejected("transfer/tensors", f"there is no {key[:200]!r} of one shape in both")
        one, two = (as_float32(part[key], key).astype(np.float64) for part in (earlier, later))
        if one.size:
            found.append(_moved(key, one, two, rho))
    return found


def _moved(key: str, one: Floats, two: Floats, rho: Fraction) -> Moved:
    size, apart = np.abs(one), np.abs(two - one)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(apart == 0, 0.0, np.where(size == 0, np.inf, above(apart / size)))
    factor = float(rho)
    low = np.nextafter(factor, 0.0) if Fraction(factor) > rho else factor
    # The product is exact where ρ has few bits; elements at the very end of it are common then.
    limit = low * size if low == rho and _few_bits(low) else down(low * size)
    sure = (apart == 0) | (apart <= limit)
    inside = bool(sure.all())
    if not inside:
        inside = all(_inside(one[tuple(at)], two[tuple(at)], rho) for at in np.argwhere(~sure))
    place = tuple(int(n) for n in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    return Moved(key, place, float(one[place]), float(two[place]), float(ratio[place]), inside)


def _few_bits(factor: float) -> bool:
    """Say whether the products of a double with all float32 numbers are doubles: whether it has 29
    bits at most, and is not so small that products are cut off."""
    numerator, denominator = factor.as_integer_ratio()
    return numerator < 2**29 and denominator <= 2**512


def _inside(one: float, two: float, rho: Fraction) -> bool:
    before, after = Fraction(float(one)), Fraction(float(two))
    return abs(after - before) <= rho * abs(before)
