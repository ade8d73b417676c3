"""The state that lowering and its handlers share: references, drafts, the current operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kcdsl.model.drafts import Drafts, as_constant, unsupported

MASKED = -1e30
"""A score at or below this is masked out: its exp is exactly zero beside any ordinary score."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A value that is computed at run time: the name of its draft and its shape."""

    name: str
    shape: tuple[int, ...]


Arguments = Mapping[str, Any]


class Lowering:
    """The state of one lowering: the drafts so far, and the current operation."""

    def __init__(self) -> None:
        self.drafts = Drafts()
        self.operator = ""
        self.origin = ""
        self.out_shape: tuple[int, ...] = ()

    def emit(self, op: str, inputs: list[Any], shape: tuple[int, ...], /, **attrs: Any) -> Ref:
        """Append a draft; plain inputs become constants."""
        names = tuple(self.ref(i).name for i in inputs)
        return Ref(self.drafts.add(op, names, shape, attrs, self.origin), shape)

    def ref(self, value: Any) -> Ref:
        """Return a value as a reference; a plain tensor becomes a constant."""
        if isinstance(value, Ref):
            return value
        try:
            array = as_constant(torch.as_tensor(value).detach().cpu().numpy())
        except (ValueError, TypeError) as error:
            raise self.unsupported(str(error)) from None
        return Ref(self.drafts.constant(array), array.shape)

    def unsupported(self, detail: str = "") -> Exception:
        """Build the refusal of the current operation."""
        return unsupported(self.origin, detail)

    def need(self, holds: bool, detail: str) -> None:
        """Refuse the current operation unless `holds`."""
        if not holds:
            raise self.unsupported(detail)


def plain_number(value: Any) -> float | None:
    """Return a number or a plain tensor of one element as a double; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype != torch.bool:
        return float(value.item())
    return None


def plain_mask(value: Any) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """Return a plain bool tensor as an array; None for anything else."""
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        return np.asarray(value.cpu().numpy())
    return None
