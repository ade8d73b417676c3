"""What is known of a node in one kernel, and where the walk stands."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.affine.tape import FAINT, Tape
from kcdsl_certs.recheck.box import Bools, Box, Floats
from kcdsl_certs.recheck.errors import Rejection
from kcdsl_certs.recheck.rules.state import Mask, Scene, gamma
from kcdsl_certs.recheck.spec import Kernel

UNIT = 2.0**-53


@dataclass(frozen=True, slots=True)
class Origin:
    """The linear an operand was moved from: e = W e_x + o, `index` says which output is where.

    `weight` is [outputs, inputs], `source` the node x, `rest` ≥ |o| [rows, outputs]; `index` holds
    row·outputs + output for every element of the operand.
    """

    weight: Floats
    source: str
    rest: Floats
    index: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Form:
    """A node's reference h̃, the reach ρ ≥ |stored value - h̃| and its place on the tape.

    `place` None: the value is known to be h̃ (a parameter, a constant).
    """

    reference: Floats
    reach: Floats
    place: int | None
    origin: Origin | None = None
    allowed: Bools | None = None  # a softmax: which columns take part

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the node."""
        return self.reference.shape

    @property
    def size(self) -> Floats:
        """Return |h̃| + ρ, which bounds the stored value, for use in error terms."""
        return box.lifted(raised(np.abs(self.reference) + self.reach))

    @property
    def box(self) -> Box:
        """Return h̃ ± ρ."""
        return box.widen(box.exact(self.reference), self.reach)


Operand = Form | Mask


@dataclass(frozen=True, slots=True)
class Walk:
    """One kernel on its way through the block."""

    scene: Scene
    kernel: Kernel
    tape: Tape
    forms: dict[str, Operand]
    softmaxes: frozenset[str]
    grain: float  # the unit roundoff of the coarsest result of both kernels

    @property
    def negligible(self) -> float:
        """Return the share of a result up to which a remainder is worth no reverse passes."""
        return 2.0**-9 * self.grain

    def keep(self, name: str, form: Form) -> None:
        """Replace what is known of a node by something sharper."""
        self.forms[name] = form


def raised(values: Floats) -> Floats:
    """Return an upper bound of a short sum of products of non-negative numbers."""
    return np.asarray(values * (1 + 2.0**-40))


def product_up(a: Floats, b: Floats) -> Floats:
    """Return an upper bound of a @ b for non-negative a and b, up to float64 underflow."""
    return np.asarray((a @ b) * (1 + 4 * gamma(a.shape[-1] + 8, UNIT)) + FAINT)


def numeric(value: Operand) -> Form:
    """Return the form of an operand.

    Raises:
        Rejection: "rule/mask" for a mask.
    """
    if isinstance(value, Mask):
        raise Rejection("rule/mask", "a mask is read as numbers")
    return value


def known(reference: Floats) -> Form:
    """Return the form of numbers that are known."""
    return Form(reference, np.zeros(reference.shape), None)
