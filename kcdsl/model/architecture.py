"""Models: a program (the module), its weights, its configuration and its tokenizer.

The architectures of `kcdsl.model.architectures` are built in; of these, `hf` is any that Hugging
Face transformers builds from its config.json. A user's own is named `package.module:factory`, where
`factory(config: dict) -> torch.nn.Module` and the names of the module's parameters are the keys of
the checkpoint. Its forward pass takes token ids [T] and returns logits [T, V] (or hidden states,
if it has an attribute `encoder_only = True`). It may offer

- `blocks() -> dict[str, nn.Module]`: blocks by name, each taking hidden states [T, D];
- `hidden(ids) -> Tensor`: the states [T, D] that enter the head;
- `limits -> (vocabulary, longest sequence)`.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.checkpoint.modules import (
    HeldWeights,
    StreamedWeights,
    WeightReader,
    fill,
    fill_with_zeros,
    transposed_names,
    with_streamed_weights,
)
from kcdsl.model.checkpoint.served import ServedWeights
from kcdsl.model.checkpoint.tensors import (
    Checkpoint,
)
from kcdsl.model.files import Artefacts
from kcdsl.model.numerics import Numerics
from kcdsl.model.numerics.weights import linear_weight, served_weight
from kcdsl.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model: the training program in float32 on the CPU.

    `keys` maps parameter names to checkpoint keys. `built_in`: the module is one of `kcdsl.model`.
    `files` has the digests of the files that were read. With `by_block` the module holds no
    weights: a part reads its weights when it runs, or when `fill` is called.
    """

    module: nn.Module
    checkpoint: Checkpoint
    config: Mapping[str, Any]
    keys: Mapping[str, str]
    tokenizer_source: Tokenizer | None
    built_in: bool
    files: Artefacts = field(default_factory=lambda: Artefacts.of(Path()))
    by_block: bool = False
    served: ServedWeights | None = None
    """Weights that the inference kernel reads instead of the checkpoint, if any."""
    serving: bool = False
    """Whether the module holds the served weights."""
    served_file: tuple[Path, str] | None = None
    """The ONNX file that the inference kernel runs instead of the program, and its digest."""

    @property
    def encoder_only(self) -> bool:
        """Return whether the model ends in hidden states instead of logits."""
        return bool(getattr(self.module, "encoder_only", False))

    @property
    def fixed_length(self) -> int | None:
        """Return the number of tokens that the model takes; None where it is not fixed."""
        found: int | None = getattr(self.module, "fixed_length", None)
        return found

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Refuse where the contract and the checkpoint's folder have none."""
        if self.tokenizer_source is None:
            raise refuse(
                codes.TOKENIZER,
                "the model has no tokenizer",
                help="give model.tokenizer: bytes, or the path of a tokenizer.json",
            )
        return self.tokenizer_source

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """Return the vocabulary size and the longest sequence, None where they are not known."""
        own = getattr(self.module, "limits", None)
        if own is not None:
            return int(own[0]), int(own[1])
        sizes = [self.config.get(name) for name in ("vocab_size", "max_position_embeddings")]
        vocabulary, longest = (s if isinstance(s, int) else None for s in sizes)
        return vocabulary, longest

    def blocks(self) -> dict[str, nn.Module]:
        """Return every block by name."""
        own = getattr(self.module, "blocks", None)
        try:
            found: dict[str, nn.Module] = dict(own()) if own is not None else {}
        except (Exception, SystemExit) as error:  # foreign code may raise anything
            raise refuse(
                codes.MODEL_FACTORY,
                f"blocks() of the model failed: {type(error).__name__}: {error}",
                help="return a mapping from names to parts of the module",
            ) from error
        foreign = [name for name, part in found.items() if not isinstance(part, nn.Module)]
        if foreign:
            raise refuse(
                codes.MODEL_FACTORY,
                f"the block {foreign[0]!r} is no torch.nn.Module",
                help="return parts of the module that are torch.nn.Module from blocks()",
            )
        return found | {"model": self.module}

    def block_names(self) -> tuple[str, ...]:
        """Return the names of the blocks in order of application, `model` last."""
        return tuple(self.blocks())

    def linears(self) -> dict[str, tuple[str, ...]]:
        """Return the checkpoint keys of every matrix that a linear may read, by each of its names
        in the module: the weights of linears, and all matrices of a module that is not built in."""
        weights = {id(m.weight) for m in self.module.modules() if isinstance(m, nn.Linear)}
        named = {n: t for n, t in self.module.state_dict(keep_vars=True).items() if t.dim() == 2}
        keys: dict[int, list[str]] = {}
        for name, tensor in named.items():
            if name in self.keys:
                keys.setdefault(id(tensor), []).append(self.keys[name])
        return {
            name: tuple(sorted(set(keys[id(tensor)])))
            for name, tensor in named.items()
            if id(tensor) in keys and (id(tensor) in weights or not self.built_in)
        }

    @property
    def quantised_tensors(self) -> tuple[str, ...]:
        """Return the tensors that an ONNX file quantises, by the names that it gives them."""
        found: tuple[str, ...] = getattr(self.module, "quantised", ())
        return found

    def numerics_of(self, name: str, numerics: Numerics) -> Numerics:
        """Return the numerics of the linear whose weight has this name in the module."""
        keys = self.linears().get(name, ()) if numerics.overrides else ()
        return numerics.serving(keys[0]) if keys else numerics

    def batch(self, ids: Any) -> Tensor:
        """Return checked token ids [T], or [B, T] of equal length, on the CPU."""
        try:
            given = torch.as_tensor(ids)
        except (ValueError, TypeError):
            raise refuse(
                codes.SEQUENCE,
                "the sequences of a batch must be equally long",
                help="give sequences of one length, or one sequence at a time",
            ) from None
        if given.dim() == 2 and len(given) > 0:
            return torch.stack([self.ids(row) for row in given])
        return self.ids(given)

    def as_served(self) -> Model:
        """Return the model with the weights that the inference kernel reads in its module."""
        assert self.served is not None
        module = copy.deepcopy(self.module)
        held = module.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, key in self.keys.items():
                held[name].copy_(self.served[key])
        return replace(self, module=module, serving=True)

    def stored_linear(self, name: str, weight: Tensor, numerics: Numerics) -> Tensor:
        """Return a weight of the module, by its name, as a kernel with these numerics uses it."""
        own = self.numerics_of(name, numerics)
        if not self.serving or self.served is None:
            return linear_weight(weight, own, name)
        for key in self.linears().get(name, ()):
            self.served.refuse_other_storage(key, own)
        return served_weight(weight, own, name)

    def block(self, name: str) -> nn.Module:
        """Return the block of this name, a module on hidden states [T, D] (`model`: on ids [T])."""
        blocks = self.blocks()
        if name not in blocks:
            near = difflib.get_close_matches(name, blocks, n=1)
            raise refuse(
                codes.UNKNOWN_BLOCK,
                f"the model has no block {name!r}; it has {_summary(tuple(blocks))}",
                help=f"did you mean {near[0]!r}?" if near else None,
            )
        return blocks[name]

    def fill(self, part: nn.Module, *, zeros: bool = False) -> None:
        """Load the weights of an unfilled part of the module, each in the type of its parameter;
        with `zeros`, fill it with zeros instead, which take no memory."""
        if zeros:
            fill_with_zeros(part)
        elif self.by_block:
            fill(part, self._keys_by_parameter(), self.weights)

    def with_streamed_weights(self, part: nn.Module, weights: WeightReader) -> nn.Module:
        """Return a part of the module whose submodules load their weights when they run."""
        return StreamedWeights(part, self._keys_by_parameter(), weights)

    def _keys_by_parameter(self) -> dict[int, str]:
        named = self.module.named_parameters(remove_duplicate=False)
        return {id(tensor): self.keys[name] for name, tensor in named if name in self.keys}

    @property
    def transposed(self) -> frozenset[str]:
        """Return the checkpoint keys of matrices that the module holds transposed."""
        return frozenset(self.keys[n] for n in transposed_names(self.module) if n in self.keys)

    @property
    def weights(self) -> HeldWeights:
        """Return the tensors of the checkpoint by key, as the module holds them."""
        return HeldWeights(self.checkpoint.tensors, self.transposed)

    def ids(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Return token ids as a tensor [T]. Refuse a sequence that the model cannot take."""
        ids = torch.as_tensor(tokens)
        if ids.dim() != 1 or ids.numel() == 0 or ids.is_floating_point():
            raise refuse(
                codes.SEQUENCE,
                "a sequence must be a list of at least one token id",
                help="give whole numbers, such as [1, 2, 3]",
            )
        vocabulary, longest = self.limits
        if longest is not None and len(ids) > longest:
            raise refuse(
                codes.SEQUENCE,
                f"a sequence of {len(ids)} tokens; the model takes {longest}",
                help="shorten the request, or leave it out",
            )
        worst, least = int(ids.max()), int(ids.min())
        if least < 0 or (vocabulary is not None and worst >= vocabulary):
            bad = least if least < 0 else worst
            raise refuse(
                codes.SEQUENCE,
                f"token {bad} is out of the vocabulary of {vocabulary}",
                help="write the requests with the tokenizer of this model",
            )
        return ids.to(torch.long)

    def block_inputs(self, tokens: Sequence[int] | Tensor, name: str) -> Tensor | None:
        """Return the input of a block for this sequence in the training kernel, float32 [T, D].

        Return None for `model`, whose input is the tokens.
        """
        return self.all_block_inputs(tokens, (name,))[name]

    def all_block_inputs(
        self, tokens: Sequence[int] | Tensor, names: Sequence[str]
    ) -> dict[str, Tensor | None]:
        """Return `block_inputs` for several blocks from one forward pass."""
        ids = self.ids(tokens)
        entries: dict[str, nn.Module] = getattr(self.module, "block_entries", dict)()
        seen: dict[str, list[Tensor]] = {name: [] for name in names if name != "model"}
        handles = []
        for name, found in seen.items():
            entry = entries.get(name, self.block(name))
            last = list(seen.values()) if self.by_block else []
            handles.append(entry.register_forward_pre_hook(_recorder(found, last)))
        running = nullcontext() if self.built_in else unchanged(self.module)
        if self.by_block:
            keys = self._keys_by_parameter()
            running = with_streamed_weights(self.module, keys, self.weights)
        try:
            with torch.no_grad(), running:
                self.module(ids)
        except _AllRecorded:
            pass
        except (Exception, SystemExit) as error:  # foreign code may raise anything
            if self.built_in or isinstance(error, Refusal):
                raise
            raise refuse(
                codes.MODEL_FACTORY,
                f"the model failed on {len(ids)} tokens: {type(error).__name__}: {error}",
                help="run the module by itself on token ids of this length to see where it fails",
            ) from error
        finally:
            for handle in handles:
                handle.remove()
        result: dict[str, Tensor | None] = dict.fromkeys(names)
        for name, found in seen.items():
            if len(found) != 1 or found[0].dim() != 2:
                raise refuse(
                    codes.UNKNOWN_BLOCK,
                    f"block {name!r} ran {len(found)} times in the forward pass; it must run once,"
                    " on hidden states [T, D]",
                    help="leave it out of blocks(), or name the part of the module that runs "
                    "once on hidden states",
                )
            result[name] = found[0]
        return result


class _AllRecorded(BaseException):
    """Ends a forward pass once all wanted block inputs are recorded."""


def _recorder(
    found: list[Tensor], wanted: Sequence[list[Tensor]]
) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """Return a hook that records the input of a module and raises `_AllRecorded` after the last
    one."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        found.append(args[0].detach().clone())
        if wanted and all(wanted):
            raise _AllRecorded

    return hook


def _summary(names: tuple[str, ...]) -> str:
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(name.rstrip("0123456789"), []).append(name)
    spans = (g[0] if len(g) == 1 else f"{g[0]} … {g[-1]}" for g in kinds.values())
    return ", ".join(spans)


# --- modules that change when they run -----------------------------------------------------------

_OWN = frozenset(vars(nn.Module()))
"""Attributes that torch sets on every module; of them, only buffers and parameters are compared."""
_CHANGED: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Modules that changed in a run, with the changed attribute: a later run may not change again."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Run a module in this context. Refuse a module that changes an attribute, buffer or parameter:
    a table cached on its first run has the format and the length of that run.

    Containers and objects in attributes are compared; values in functions and globals are not.
    """
    if module not in _CHANGED:
        before, kept = _state(module)
        yield
        after, _ = _state(module)
        del kept  # keeps the objects alive until here, so that no id is reused
        places = [p for p in dict.fromkeys((*after, *before)) if before.get(p) != after.get(p)]
        if not places:
            return
        _CHANGED[module] = places[0]
    raise refuse(
        codes.MODEL_FACTORY,
        f"the model changes its {_CHANGED[module]!r} when it runs: what it computes depends on what"
        " ran before",
        help="make what is kept in __init__, and tables as buffers",
    )


def _state(module: nn.Module) -> tuple[dict[str, Any], list[Any]]:
    """Return the value of each attribute by its path, and the objects that must stay alive."""
    seen: dict[int, Any] = {}
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        own = {k: v for k, v in vars(part).items() if k not in _OWN}
        for name, value in {**part._buffers, **part._parameters, **own}.items():
            found[f"{path}.{name}".removeprefix(".")] = _held(value, seen)
    return found, list(seen.values())


def _held(value: Any, seen: dict[int, Any]) -> Any:
    """Return a comparable snapshot of a value; each object is visited once."""
    if isinstance(value, _PLAIN):
        return type(value).__name__, repr(value)
    if id(value) in seen:
        return id(value)
    seen[id(value)] = value
    match value:
        case Tensor():
            return id(value), None if value.is_inference() else value._version
        case list() | tuple():
            return [_held(v, seen) for v in value]
        case dict():
            return [(_held(k, seen), _held(v, seen)) for k, v in value.items()]
        case set() | frozenset():
            return {repr(v) for v in value}
        case np.ndarray():
            return id(value), value.tobytes()
        case type() | FunctionType() | ModuleType():
            return id(value)
        case _:
            return id(value), _held(getattr(value, "__dict__", None), seen)
