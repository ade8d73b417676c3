"""Reference runs: the model in float64, and in the formats that a kernel claims.

The difference of a plain program in the claimed formats from float64 is the size of error that the
claim allows. A plain program computes every operation of the module in the compute format, with the
stored weights and quantised activations of the claim; a fused kernel has a smaller error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kcdsl.model.architecture import Model
from kcdsl.model.attention import Composed, ScaledDotProduct, caps_scores, use_attention
from kcdsl.model.numerics import Numerics, StaticQuantiser, plain_weights
from kcdsl.model.numerics.weights import linear_weight
from kcdsl_backends.attack.quantised_inputs import quantised_tensor, to_nearest
from kcdsl_backends.empirical.diagnoses.model import POSITIONS

LARGEST = 2**28
"""Parameters of the largest model that is copied for reference runs (2 GiB in float64)."""
ROWS = 1024
"""Most rows of states on which blocks are compared: scores grow with their square."""
RESULT = 2**22
"""Most elements of the result of a compared block (32 MiB in float64)."""
_TYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "tfloat32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Reference:
    """Runs a model, or one block of it, without roundings (`claim` None) or as claimed."""

    model: Model
    train: Numerics
    infer: Numerics
    _modules: dict[Numerics | None, nn.Module] = field(default_factory=dict)

    def claim(self, side: int) -> Numerics:
        """Return the claimed numerics of train (0) or infer (1)."""
        return (self.train, self.infer)[side]

    def run(self, claim: Numerics | None, tokens: Sequence[int]) -> Tensor:
        """Return logits [T, V] or states [T, D] of token ids, float64; T is at most POSITIONS, the
        first ones."""
        with torch.no_grad():
            result: Tensor = self._module(claim)(self.model.ids(list(tokens)))
        return result[:POSITIONS].to(torch.float64, copy=True)

    def block(self, claim: Numerics | None, name: str, x: Tensor) -> Tensor:
        """Return the output of a block for states x [T, D], float64."""
        if claim is None or claim in self._modules:
            module = _blocks(self._module(claim))[name]
        else:
            module = _in_formats(self.model, self.model.block(name), claim)
        kind = torch.float64 if claim is None else _TYPES[claim.compute]
        with torch.no_grad():
            result: Tensor = module(x.to(kind))
        return result.to(torch.float64)

    def blocks(self) -> tuple[str, ...]:
        """Return `own_blocks` of the model."""
        return own_blocks(self.model)

    def inputs(self, tokens: Sequence[int], names: Sequence[str]) -> dict[str, Tensor]:
        """Return the input of each block in the float32 program, float32 [T, D].

        Long requests are cut, since blocks can be compared on any states: to ROWS rows and RESULT
        elements of the block's result, but not below POSITIONS rows.
        """
        found = self.model.all_block_inputs(list(tokens), names)
        known_inputs = {name: x for name, x in found.items() if x is not None}
        return {name: x[: self._rows(name, x)].clone() for name, x in known_inputs.items()}

    def _rows(self, name: str, x: Tensor) -> int:
        if len(x) <= POSITIONS:
            return len(x)
        width = self.block(None, name, x[:POSITIONS]).shape[-1]
        return max(POSITIONS, min(ROWS, RESULT // width))

    def release(self) -> None:
        """Free the copies of the model."""
        self._modules.clear()

    def _module(self, claim: Numerics | None) -> nn.Module:
        if claim in self._modules:
            return self._modules[claim]
        whole = self.model.module
        made = _exact(self.model) if claim is None else _in_formats(self.model, whole, claim)
        if claim in (None, self.train, self.infer):
            self._modules[claim] = made
        return made


def _blocks(module: nn.Module) -> Mapping[str, nn.Module]:
    found: Mapping[str, nn.Module] = getattr(module, "blocks")()  # noqa: B009
    return found


def own_blocks(model: Model) -> tuple[str, ...]:
    """Return the blocks with parameters of their own beyond those of inner blocks, in order."""
    found = {n: m for n, m in model.blocks().items() if n != "model"}
    return tuple(name for name in found if not _only_inner_parameters(name, found))


def _only_inner_parameters(name: str, blocks: Mapping[str, nn.Module]) -> bool:
    """Return whether smaller blocks together hold all parameters of a block."""
    held = {n: {id(p) for p in m.parameters()} for n, m in blocks.items()}
    smaller = [ids for ids in held.values() if ids < held[name]]
    return bool(smaller) and set().union(*smaller) == held[name]


def reference_of(model: Model, train: Numerics, infer: Numerics) -> Reference | None:
    """Return the reference of a model; None if it is too large to copy, if no module computes the
    claim (a quantised cache), or if kernels have checkpoints of their own."""
    if train.kv_cache is not None or infer.kv_cache is not None or model.served is not None:
        return None
    size = sum(p.numel() for p in model.module.parameters())
    return Reference(model, train, infer) if size <= LARGEST else None


def _exact(model: Model) -> nn.Module:
    return copy.deepcopy(model.module).to(torch.float64).eval()


def _in_formats(model: Model, part: nn.Module, claim: Numerics) -> nn.Module:
    """Return a copy of the module or of a part of it that computes in the claimed formats."""
    kind = _TYPES[claim.compute]
    module = copy.deepcopy(part).to(kind).eval()
    composed = claim.attention.style == "composed" or caps_scores(module)
    use_attention(module, Composed() if composed else ScaledDotProduct())
    names = {id(t): n for n, t in model.module.named_parameters(remove_duplicate=False)}
    stored = any(w not in plain_weights(claim) for w, _ in claim.sections)
    if stored and not model.built_in:
        _store_matrices(model, module, part, claim)
    for original, linear in zip(part.modules(), module.modules(), strict=True):
        if not isinstance(original, nn.Linear) or not isinstance(linear, nn.Linear):
            continue
        key = names[id(original.weight)]
        own = model.numerics_of(key, claim)
        if stored and model.built_in:
            weight = linear_weight(original.weight, own, key).to(kind)
            linear.weight = nn.Parameter(weight, requires_grad=False)
        if own.activations.format != "none":
            written = key if model.built_in else model.linears()[key][0]
            linear.register_forward_pre_hook(input_quantiser(own, written))
    if claim.quantisers:
        _quantise_tensors(module, claim)
    return module


def _quantise_tensors(module: nn.Module, claim: Numerics) -> None:
    """Make the program of an ONNX file quantise tensors as the numerics claim."""
    from kcdsl.model.onnx.program import OnnxBlock

    def step(by: StaticQuantiser) -> Callable[[Tensor], Tensor]:
        return lambda x: quantised_tensor(x.to(torch.float64), by).to(x.dtype)

    for part in module.modules():
        if isinstance(part, OnnxBlock):
            part.quantisers = {name: step(by) for name, by in claim.quantisers}


def _store_matrices(model: Model, module: nn.Module, part: nn.Module, claim: Numerics) -> None:
    """Store every matrix of a user's module as claimed. Those of linears are not known before it
    runs; storing an embedding too only allows more error."""
    with torch.no_grad():
        names = {id(t): n for n, t in model.module.named_parameters(remove_duplicate=False)}
        held = zip(part.named_parameters(), module.parameters(), strict=True)
        for (name, original), own in held:
            if own.dim() == 2:
                numerics = model.numerics_of(names.get(id(original), name), claim)
                own.copy_(linear_weight(original, numerics, name))


def input_quantiser(
    claim: Numerics, key: str
) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Return a hook that rounds the input of a linear to the format that the numerics claim."""

    def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *bias = arguments
        return (to_nearest(x.to(torch.float64), claim, key).to(x.dtype), *bias)

    return hook
