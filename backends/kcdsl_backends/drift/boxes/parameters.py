"""The stored parameter values of both kernels, as the formal backends read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl.model.numerics import Numerics
from kcdsl.model.numerics.weights import linear_weight, plain_parameter, stored_constant
from kcdsl_backends.drift.boxes.box import NoBound


@dataclass(frozen=True, slots=True)
class StoredParameters:
    """The values one kernel holds, in float64 (exact), computed once per tensor and use.

    Args:
        tensors: checkpoint tensors by key, float32.
        constants: arrays of the block graph by key.
        numerics: the kernel's specification.
        device: where the values are needed.
    """

    tensors: Mapping[str, Tensor]
    constants: Mapping[str, NDArray[Any]]
    numerics: Numerics
    device: torch.device
    _cache: dict[tuple[str, str, str], Tensor] = field(default_factory=dict, repr=False)
    _beside: StoredParameters | None = field(default=None, repr=False)
    _shared: dict[tuple[str, str, str], bool] = field(default_factory=dict, repr=False)

    def under(self, numerics: Numerics) -> StoredParameters:
        """Return what another kernel stores of the same parameters; one copy serves both where they
        store alike."""
        alike = _storing(numerics) == _storing(self.numerics)
        cache = self._cache if alike else {}
        return replace(self, numerics=numerics, _cache=cache, _beside=self, _shared={})

    def shares(self, node: Node, other: StoredParameters, *, linear: bool = False) -> bool:
        """Say whether another kernel stores the same numbers of a parameter or constant.

        Of the kernel that this one was made `under`, each is compared once.
        """
        key = self._key(node, "linear" if linear and node.op == "param" else "plain")
        if other is self._beside and key in self._shared:
            return self._shared[key]
        read = StoredParameters.linear if linear else StoredParameters.plain
        mine, theirs = read(self, node), read(other, node)
        same = mine is theirs or torch.equal(mine, theirs)
        if other is self._beside:
            self._shared[key] = same
        return same

    def plain(self, node: Node) -> Tensor:
        """Return the value of a param or float constant node outside of linear weights."""
        return self._value(node, "plain")

    def linear(self, node: Node) -> Tensor:
        """Return the value of a param node used as the weight of a linear [out, in]."""
        return self._value(node, "linear" if node.op == "param" else "plain")

    def mask(self, node: Node) -> Tensor:
        """Return a boolean constant."""
        return torch.from_numpy(self.constants[node.attrs["key"]]).to(self.device)

    def _value(self, node: Node, use: str) -> Tensor:
        if node.op not in ("param", "constant"):
            raise NoBound(node.name, f"{node.op} stands where a parameter or a constant must")
        name, key = str(node.attrs["key"]), self._key(node, use)
        if key not in self._cache:
            if node.op == "param":
                source = self.tensors[name].detach().to("cpu", torch.float32)
                if use == "linear":
                    stored = linear_weight(source, self.numerics.serving(name), name)
                else:
                    stored = plain_parameter(source, self.numerics, name)
            else:
                source = torch.from_numpy(self.constants[name])
                stored = stored_constant(source, node.format, self.numerics, name)
            self._cache[key] = stored.to(self.device, torch.float64)
        return self._cache[key]

    @staticmethod
    def _key(node: Node, use: str) -> tuple[str, str, str]:
        return node.op, str(node.attrs["key"]), node.format or use


def _storing(numerics: Numerics) -> tuple[object, ...]:
    """Return all of a kernel's numerics that decides what it stores."""
    overrides = tuple(
        (each.pattern, each.weights, each.activations.quantised) for each in numerics.overrides
    )
    return numerics.weights, numerics.compute, numerics.by_codes, overrides
