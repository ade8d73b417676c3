"""Modules whose weights are loaded when a part of them runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kcdsl.model.checkpoint.tensors import StoredTensors


class WeightReader(Protocol):
    """A source of weights by checkpoint key, with the exact stored numbers."""

    def __getitem__(self, key: str, /) -> Tensor: ...

    def rows(self, key: str, numbers: Tensor) -> Tensor:
        """Return these rows of a matrix."""
        ...


class TransposedLinear(nn.Linear):
    """A linear whose weight a checkpoint stores as [in, out]."""


def transposed_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that a checkpoint stores transposed."""
    parts = module.named_modules()
    return frozenset(f"{n}.weight" for n, part in parts if isinstance(part, TransposedLinear))


class HeldWeights(Mapping[str, Tensor]):
    """The tensors of a checkpoint in the layout of a module, with some matrices transposed."""

    def __init__(self, tensors: Mapping[str, Tensor], transposed: frozenset[str]) -> None:
        self._tensors = tensors
        self._transposed = transposed

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, key: str) -> Tensor:
        """Return a tensor, read from its file if it is not in memory."""
        tensor = self._tensors[key]
        return tensor.T.contiguous() if key in self._transposed else tensor

    def narrow(self, key: str) -> Tensor:
        """Return a tensor in the type that it is stored in."""
        held = self._tensors
        tensor = held.narrow(key) if isinstance(held, StoredTensors) else held[key]
        return tensor.T if key in self._transposed else tensor

    def rows(self, key: str, numbers: Tensor) -> Tensor:
        """Return these rows of a matrix."""
        read = getattr(self._tensors, "rows", None)
        if read is None or key in self._transposed:
            return self[key][numbers]
        found: Tensor = read(key, numbers)
        return found


class Unfilled(TorchFunctionMode):
    """Creates empty tensors (as in `nn.Linear`) on the meta device and skips their initialisation,
    which would import the compiler of torch and take seconds."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one torch function; `torch.empty` on the meta device, `torch.nn.init` not at all
        there."""
        kwargs = kwargs or {}
        if func is torch.empty:
            kwargs = {**kwargs, "device": "meta"}
        held = kwargs.get("tensor")
        made = getattr(func, "__module__", None) == nn.init.__name__
        if made and isinstance(held, Tensor) and held.is_meta:
            return held
        return func(*args, **kwargs)


def empty_parameters(module: nn.Module) -> None:
    """Replace every parameter by an empty one; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, held in part._parameters.items():
            if held is not None:
                if id(held) not in made:
                    made[id(held)] = nn.Parameter(held.detach().to("meta"), requires_grad=False)
                part._parameters[name] = made[id(held)]


def fill(part: nn.Module, keys: Mapping[int, str], weights: WeightReader) -> None:
    """Read the weights of a part of a module, each in the type of its parameter.

    `keys` are those of the checkpoint, by the identity of the parameters.
    """
    _replace(part, lambda held: weights[keys[id(held)]].to(held.dtype))


def fill_with_zeros(part: nn.Module) -> None:
    """Fill the parameters of a part with zeros; their pages take no memory until written."""

    def zeros(held: Tensor) -> Tensor:
        raw = torch.from_numpy(np.zeros(held.numel() * held.dtype.itemsize, dtype=np.uint8))
        return raw.view(held.dtype).view(held.shape)

    _replace(part, zeros)


def _replace(part: nn.Module, value: Callable[[Tensor], Tensor]) -> None:
    made: dict[int, nn.Parameter] = {}
    for module in part.modules():
        for name, held in module._parameters.items():
            if held is not None and held.is_meta:
                if id(held) not in made:
                    made[id(held)] = nn.Parameter(value(held), requires_grad=False)
                module._parameters[name] = made[id(held)]


@contextmanager
def with_streamed_weights(
    module: nn.Module, keys: Mapping[int, str], weights: WeightReader
) -> Iterator[None]:
    """Run a module in this context: each submodule with parameters of its own loads them before it
    runs and frees them after. An embedding loads only the rows that it looks up."""
    handles: list[Any] = []
    looked_up: list[nn.Module] = []
    emptied = {
        part: dict(part._parameters)
        for part in module.modules()
        if any(held is not None and held.is_meta for held in part._parameters.values())
    }

    def drop(part: nn.Module, *_: object) -> None:
        part._parameters.update(emptied[part])

    def take(part: nn.Module, _: object) -> None:
        for name, held in emptied[part].items():
            if held is not None and held.is_meta:
                read = weights[keys[id(held)]].to(held.dtype)
                part._parameters[name] = nn.Parameter(read, requires_grad=False)

    try:
        for part in emptied:
            if type(part) is nn.Embedding and part.max_norm is None:
                key = keys[id(part.weight)]
                looked = partial(_looked_up, weights, key, part.weight.dtype)
                part.forward = looked  # type: ignore[method-assign]
                looked_up.append(part)
            else:
                handles.append(part.register_forward_pre_hook(take))
                handles.append(part.register_forward_hook(drop))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for part in looked_up:
            del part.forward
        for part in emptied:
            drop(part)


def _looked_up(weights: WeightReader, key: str, kind: torch.dtype, ids: Tensor) -> Tensor:
    numbers, places = torch.unique(ids, return_inverse=True)
    return weights.rows(key, numbers).to(kind)[places]


class StreamedWeights(nn.Module):
    """A part of a module that holds the weights of one submodule at a time, while that runs."""

    def __init__(self, part: nn.Module, keys: Mapping[int, str], weights: WeightReader) -> None:
        """Store the arguments of `with_streamed_weights`."""
        super().__init__()
        self.part = part
        self._read = keys, weights

    def forward(self, x: Tensor) -> Tensor:
        """Run the part."""
        with with_streamed_weights(self.part, *self._read):
            found: Tensor = self.part(x)
        return found


class NarrowWeights(dict[str, Tensor]):
    """Some tensors of a checkpoint in the types that they are stored in, by key."""

    def rows(self, key: str, numbers: Tensor) -> Tensor:
        """Return these rows of a matrix."""
        return self[key][numbers]
