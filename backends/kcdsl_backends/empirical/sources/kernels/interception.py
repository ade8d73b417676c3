"""How a user's module gets stored weights and another attention without being rewritten."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel
from torch.overrides import TorchFunctionMode

from kcdsl.model.attention import SDP_BACKENDS, composed_attention
from kcdsl_backends.adapters import Adapter

_SOFTMAX = frozenset({"softmax", "_softmax"})
_PRODUCTS = frozenset({
    "matmul", "mm", "addmm", "bmm", "baddbmm", "addbmm", "einsum", "bilinear", "mv", "addmv",
    "dot", "inner", "tensordot", "__matmul__", "__rmatmul__",
})  # fmt: skip
_WHOLE = frozenset({
    "multi_head_attention_forward", "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
})  # fmt: skip
"""What forms attention in a program of torch's own, where no other can be put in."""


class Interception(TorchFunctionMode):
    """Puts the stored weight into every `linear` and the adapter's program into every attention.

    Also notes what it cannot serve: `softmax_calls` outside `scaled_dot_product_attention`,
    `whole_layers`, the names of functions that form an attention themselves, and `matrix_products`,
    the names of weights that enter a product outside `linear`.
    """

    def __init__(self, module: nn.Module, stored: Mapping[str, Tensor], adapter: Adapter) -> None:
        super().__init__()
        parameters = dict(module.named_parameters(remove_duplicate=False))
        self._adapter = adapter
        self._stored = {id(parameters[name]): weight for name, weight in stored.items()}
        self._owners = {parameters[n].untyped_storage().data_ptr(): n for n in stored}
        self.softmax_calls = 0
        self.whole_layers: set[str] = set()
        self.matrix_products: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one torch function, with its weight or its program exchanged."""
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _SOFTMAX:
            self.softmax_calls += 1
        elif name in _WHOLE:
            self.whole_layers.add(name)
        elif name in _PRODUCTS:
            self._note((*args, *kwargs.values()))
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        stored = self._stored.get(id(weight))
        if stored is None:
            self._note((weight,))
        return F.linear(input, weight if stored is None else stored, bias)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
        if self._adapter.style == "composed":
            return composed_attention(query, key, value, *rest, **more)
        backend = self._adapter.backend
        with sdpa_kernel([SDP_BACKENDS[backend]]) if backend else nullcontext():
            return F.scaled_dot_product_attention(query, key, value, *rest, **more)

    def _note(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                owner = self._owners.get(value.untyped_storage().data_ptr())
                if owner is not None:
                    self.matrix_products.add(owner)
            elif isinstance(value, list | tuple):
                self._note(value)
