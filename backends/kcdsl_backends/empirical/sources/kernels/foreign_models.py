"""Models that are not built in: those of transformers, and users' modules with replaced parts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from kcdsl.diagnostics import codes, refuse
from kcdsl.ir.terms import KernelRef
from kcdsl.model.adapters import Adapter
from kcdsl.model.architecture import Model
from kcdsl.model.architectures.hf import HuggingFace, keys_of, load_folder
from kcdsl.model.attention import SDP_BACKENDS, composed_attention
from kcdsl.model.checkpoint.headers import weights_folder
from kcdsl.model.checkpoint.tensors import load_checkpoint
from kcdsl.model.files import Artefacts, copy_hashed, folder_files, folder_name, weight_files

ATTENTION = {"composed": "eager", "fused": "sdpa"}
"""The names of the styles of attention in transformers."""


def hugging_face(
    ref: KernelRef, model: Model, files: Artefacts, dtype: torch.dtype, style: str
) -> tuple[HuggingFace, Model]:
    """Load the model of a folder in a type; return it, and the model of the contract with it.

    The digest of its checkpoint is that of the contract if it holds the same weights, else its own,
    so that `weights_checksum` detects a difference. Refuse a model with another vocabulary, and one
    whose weights differ from its files. A private copy of the files, made while they are hashed, is
    loaded, so that they cannot change in between.
    """
    named = ref.folder
    folder = weights_folder(model.checkpoint.path) if named is None else files.base / named
    if named is not None:
        folder = files.admitted(folder, named)
    with TemporaryDirectory(prefix="kcdsl-") as copied:
        for path in (files.admitted(path) for path in folder_files(folder)):
            digest = copy_hashed(path, Path(copied) / path.name)
            files.record(folder_name(ref, path.name), digest)
        encoder = model.encoder_only
        program = load_folder(Path(copied), dtype, ATTENTION[style], folder, encoder_only=encoder)
        tensors = _read(Path(copied))
    if program.limits[0] != model.limits[0]:
        raise refuse(
            codes.HF_FOLDER,
            f"the model of the folder has {program.limits[0]} tokens,"
            f" that of the contract {model.limits[0]}",
            help="name the folder of the contract's model",
        )
    keys_of(program.program, tensors, dtype, "the files of the folder")
    same = tensors.keys() == model.checkpoint.tensors.keys() and all(
        torch.equal(tensor, model.checkpoint.tensors[key]) for key, tensor in tensors.items()
    )
    digest = model.checkpoint.sha256 if same else _digest(tensors)
    checkpoint = replace(model.checkpoint, sha256=digest)
    return program, replace(model, module=program, checkpoint=checkpoint, built_in=False)


def _read(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the files of a folder, as float32."""
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        found.update(load_checkpoint(path).tensors)
    return found


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 over names, shapes and float32 values."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        found.update(f"{name} {tuple(tensor.shape)} ".encode())
        found.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


_SOFTMAX = frozenset({"softmax", "_softmax"})
_PRODUCTS = frozenset({
    "matmul", "mm", "addmm", "bmm", "baddbmm", "addbmm", "einsum", "bilinear", "mv", "addmv",
    "dot", "inner", "tensordot", "__matmul__", "__rmatmul__", "grouped_mm", "_grouped_mm",
    "linear", "linalg_matmul", "linalg_multi_dot", "chain_matmul",
    "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell",
})  # fmt: skip
_LOOKUPS = frozenset({"embedding", "index_select"})
_LIKE = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})
"""Functions that read only the type or the shape of their second operand."""
_WHOLE = frozenset({
    "multi_head_attention_forward", "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
})  # fmt: skip
"""Functions of torch that compute an attention themselves, so that it cannot be replaced."""


class Interception(TorchFunctionMode):
    """Uses the stored weight in every `linear` and the adapter's program in every attention.

    Also records the calls that it cannot replace: `softmax_calls` outside
    `scaled_dot_product_attention`, `whole_layers`, the names of functions that compute an attention
    themselves, and `matrix_products`, the names of weights used in a product outside `linear`, or
    in one by a tensor that is computed from weights alone, such as a copy of one.
    """

    def __init__(self, module: nn.Module, stored: Mapping[str, Tensor], adapter: Adapter) -> None:
        super().__init__()
        parameters = dict(module.named_parameters(remove_duplicate=False))
        self._adapter = adapter
        self._stored = {id(parameters[name]): weight for name, weight in stored.items()}
        every = module.state_dict(keep_vars=True) if stored else {}
        # buffers, and weights of more than two dimensions, such as those of experts, have no
        # stored form
        seen = {n: t for n, t in every.items() if t.is_floating_point() and t.dim() > 1}
        self._owners = {tensor.untyped_storage().data_ptr(): n for n, tensor in seen.items()}
        self._fixed: Any = WeakIdKeyDictionary()
        """Tensors that depend on no input, each with the name of a weight that it is computed from,
        or None."""
        for held in (*parameters.values(), *module.buffers()):
            self._fixed[held] = self._owner(held)
        self.probing = bool(stored)
        self._batched = isinstance(module, HuggingFace)
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
        """Run one torch function, with its weight or its program replaced."""
        kwargs = kwargs or {}
        found = self._run(func, args, kwargs)
        name = getattr(func, "__name__", "").partition(".")[0]
        if self.probing and name not in _LOOKUPS:
            read = list(_tensors(args[:1] if name in _LIKE else (args, kwargs)))
            fixed = all(tensor in self._fixed for tensor in read)
            owner = next(filter(None, map(self._fixed.get, read)), None)
            for tensor in _tensors(found):
                if fixed:
                    self._fixed[tensor] = owner
                else:
                    self._fixed.pop(tensor, None)
        return found

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        name = getattr(func, "__name__", "").partition(".")[0]
        if name in _SOFTMAX:
            self.softmax_calls += not self._is_router(args)
        elif name in _WHOLE:
            self.whole_layers.add(name)
        elif name in _PRODUCTS:
            self._note((*args, *kwargs.values()))
        return func(*args, **kwargs)

    def _is_router(self, args: tuple[Any, ...]) -> bool:
        """Return whether a softmax chooses experts: its rows are [tokens, experts], while scores of
        attention have a batch dimension too."""
        return self._batched and bool(args) and isinstance(args[0], Tensor) and args[0].dim() == 2

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

    def below(self) -> AbstractContextManager[Any]:
        """Return a context that records products in programs that call no function of torch, such
        as those of TorchScript."""
        return _Below(self._note) if self._owners else nullcontext()

    def _note(self, values: tuple[Any, ...]) -> None:
        for tensor in _tensors(values):
            owner = self._owner(tensor) or self._fixed.get(tensor)
            if owner is not None:
                self.matrix_products.add(owner)

    def _owner(self, tensor: Tensor) -> str | None:
        return self._owners.get(tensor.untyped_storage().data_ptr())


class _Below(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    def __init__(self, note: Callable[[tuple[Any, ...]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._note = note

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "").partition(".")[0] in _PRODUCTS:
            self._note((args, kwargs))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
