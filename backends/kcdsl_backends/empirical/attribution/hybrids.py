"""Loading a kernel between train and infer; where no kernel computes so, the reason."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
from torch import nn

from kcdsl.ir.terms import KernelRef
from kcdsl.model.architecture import Model
from kcdsl.model.numerics import Activations, Numerics
from kcdsl.model.presets import resolve
from kcdsl_backends.adapters import ADAPTERS
from kcdsl_backends.empirical.attribution.sources import different, mixed
from kcdsl_backends.empirical.diagnoses import input_quantiser
from kcdsl_backends.empirical.sources.kernels.run import Kernel
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel

Load = Callable[[KernelRef], Kernel]
"""Prepares a kernel; raises Refusal where none computes so."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Both sides: how the contract describes them, the kernels themselves, and how others load."""

    train_ref: KernelRef
    infer_ref: KernelRef
    train: Kernel
    infer: Kernel
    model: Model
    load: Load


@dataclass(frozen=True, slots=True)
class Hybrid:
    """A kernel between both sides. `simulated`: the inputs of its linears are quantised by their
    definition, element by element, and not by the inference kernel."""

    kernel: Kernel
    numerics: Numerics
    simulated: bool = False


def hybrid(pair: Pair, taken: Collection[str]) -> Hybrid:
    """Return the kernel with the sources `taken` from infer; both ends are the kernels themselves.

    Raises Refusal where no kernel computes so.
    """
    own = frozenset(different(pair.train_ref, pair.infer_ref))
    chosen = frozenset(taken) & own
    if not chosen:
        return Hybrid(pair.train, resolve(pair.train_ref))
    if chosen == own:
        return Hybrid(pair.infer, resolve(pair.infer_ref))
    ref = mixed(pair.train_ref, pair.infer_ref, chosen)
    numerics = resolve(ref)
    if not _simulates(ref, numerics, pair.model):
        return Hybrid(pair.load(ref), numerics)
    unquantised = dict(ref.numerics) | {"activations": Activations().to_json()}
    kernel = pair.load(replace(ref, numerics=tuple(sorted(unquantised.items()))))
    if not isinstance(kernel, TorchKernel):
        return Hybrid(pair.load(ref), numerics)
    _quantise_inputs(kernel.module, pair.model, numerics)
    return Hybrid(replace(kernel, ref=ref, numerics=numerics), numerics, simulated=True)


def _simulates(ref: KernelRef, numerics: Numerics, model: Model) -> bool:
    """Say whether an adapter that quantises no activations is to run with quantised ones."""
    adapter = ADAPTERS.get(ref.run)
    if numerics.overrides or adapter is None or not model.built_in:
        return False
    if numerics.activations.format == "none":
        return False
    return adapter.engine == "torch" and adapter.activations == (Activations("none"),)


def _quantise_inputs(module: nn.Module, model: Model, numerics: Numerics) -> None:
    names = {id(t): n for n, t in model.module.named_parameters(remove_duplicate=False)}
    for original, linear in zip(model.module.modules(), module.modules(), strict=True):
        if isinstance(original, nn.Linear) and isinstance(linear, nn.Linear):
            key = names[id(original.weight)]
            linear.register_forward_pre_hook(input_quantiser(numerics, key))


@dataclass(frozen=True, slots=True)
class InBatch:
    """A kernel whose blocks run in a batch of two equal sequences."""

    kernel: Kernel

    def block(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return what the block makes of the states x [T, D]."""
        return self.kernel.block(name, torch.stack([x, x]))[0]
