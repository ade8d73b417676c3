"""The real kernels: programs that run a model under the numerics they claim."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.diagnostics.model import at
from kcdsl.ir.terms import KernelRef
from kcdsl.model.adapters import (
    ADAPTERS,
    Adapter,
    find_adapter,
    refuse_no_file,
    refuse_unserved,
)
from kcdsl.model.architecture import Model
from kcdsl.model.attention import Composed, ScaledDotProduct, use_attention
from kcdsl.model.files import Artefacts
from kcdsl.model.fingerprint import kernel_fingerprint
from kcdsl.model.numerics import Numerics, Weights, plain_weights
from kcdsl.model.presets import refuse_strays, resolve
from kcdsl_backends.empirical.sources.kernels.engines import (
    Compiled,
    Program,
    ProgramEngine,
    ScaledLinear,
    exact_bytes,
    exact_settings,
    expected_weights,
    need,
    quantise_linear,
    refuse_other_weight,
    run_part,
)
from kcdsl_backends.empirical.sources.kernels.foreign_models import Interception, hugging_face
from kcdsl_backends.empirical.sources.kernels.onnx_runtime import Sessions

TORCH_TYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

__all__ = ["ADAPTERS", "TorchKernel", "load_kernel"]


@dataclass(frozen=True, slots=True)
class TorchKernel:
    """A model that runs as the contract says: in its precision, with its attention and weights."""

    ref: KernelRef
    numerics: Numerics
    model: Model
    device: torch.device
    module: nn.Module
    interception: Interception | None
    engine: ProgramEngine = field(default=run_part)

    def logits(self, ids: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> Tensor:
        """Return the output for token ids [T], or [B, T] of equal length.

        The logits [..., T, V] of a language model, the final hidden states [..., T, D] of an
        encoder, on the CPU in the output format of the kernel: widen them before subtracting.
        """
        return self.forward(self.tokens(ids)).cpu()

    def hidden(self, ids: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> Tensor:
        """Return the states [..., T, D] that enter the head (encoder: the final ones), float64."""
        own = self.module if self.model.encoder_only else None
        program = getattr(self.module, "hidden", own)
        if program is None:
            raise refuse(
                codes.MODEL_FACTORY,
                "the model does not show its hidden states",
                help="give the module a method hidden(ids)",
            )
        return _out(self._run("hidden", program, self.tokens(ids)))

    def block(self, name: str, x: Tensor) -> Tensor:
        """Run the real block on hidden states x [T, D] or [B, T, D] (float32); return float64 on
        the CPU. Sequences of a batch that would share a scale of activations run one by one."""
        self.model.block(name)
        if name == "model":
            raise refuse(
                codes.UNKNOWN_BLOCK,
                "the block `model` takes token ids; use logits",
                help="name a block inside the model, such as attn_0, or demand a drift of the "
                "logits, such as max(logit_linf)",
            )
        blocks = getattr(self.module, "blocks", None)
        if blocks is None:
            raise refuse(
                codes.UNKNOWN_BLOCK,
                f"{self.ref.run} does not show the block {name}",
                help="give the module a method blocks(), or leave out clauses about blocks",
            )
        own = blocks()
        states = x.to(self.device, TORCH_TYPES[self.numerics.compute])
        return _out(self._run(name, own[name], states))

    def tokens(self, ids: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> Tensor:
        """Return checked token ids on the kernel's device."""
        return self.model.batch(ids).to(self.device)

    def forward(self, tokens: Tensor) -> Tensor:
        """Run the model on checked tokens; the result stays on the device in its own precision."""
        return self._run("model", self.module, tokens)

    def fingerprint(self) -> dict[str, Any]:
        """Return the fingerprint that certificates bind; see `kcdsl.model.fingerprint`."""
        return kernel_fingerprint(self.ref, self.device.type)

    def weights_digest(self) -> str:
        """Return the sha256 of the parameters that the kernel holds now."""
        found = hashlib.sha256()
        held = ((n, p) for name, t in self.module.named_parameters() for n, p in _plain(name, t))
        for name, tensor in held:
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    def _run(self, name: str, part: Program, argument: Tensor) -> Tensor:
        batched = argument.dim() == (3 if argument.is_floating_point() else 2)
        if batched and self.numerics.activations.scale in ("per_tensor", "nvfp4"):
            return torch.stack([self._run(name, part, row) for row in argument])
        watch = self.interception if self.interception is not None else nullcontext()
        try:
            with torch.no_grad(), exact_settings(self.device), watch:
                result: object = self.engine(name, part)(argument)
        except RuntimeError as error:
            raise refuse(
                codes.KERNEL_FAILED,
                f"{self.ref.run} ({self.numerics.compute}) failed on {self.device.type}:"
                f" {_first_line(error)}",
                help=f"other adapters: {', '.join(self._others())}",
            ) from error
        except (Exception, SystemExit) as error:  # foreign code may raise anything
            if self.model.built_in or isinstance(error, Refusal):
                raise
            raise refuse(
                codes.MODEL_FACTORY,
                f"the model failed: {type(error).__name__}: {error}",
                help="run the module by itself on the token ids of a request to see where it fails",
            ) from error
        if not isinstance(result, Tensor):
            raise refuse(
                codes.MODEL_FACTORY,
                f"the model returned {type(result).__name__}, not a tensor",
                help="return a tensor from the module, such as the logits [T, V]",
            )
        return result

    def _others(self) -> list[str]:
        return [n for n, a in ADAPTERS.items() if a.engine == "torch" and n != self.ref.run]


def load_kernel(
    ref: KernelRef,
    model: Model,
    device: torch.device | str | None = None,
    base: Path | None = None,
) -> TorchKernel:
    """Prepare a kernel of a model; `device` None means CUDA if present, else the CPU.

    `base` is the folder of the contract, to which a kernel's own folder is relative; None for that
    of the model.

    Refuse an unknown adapter, numerics that the adapter does not compute in (the message names
    those that do), a weight that does not fit its format, and a kernel that cannot run here.
    """
    with at(ref.span):
        return _load(ref, model, device, model.files if base is None else Artefacts.of(base))


def _load(
    ref: KernelRef, model: Model, device: torch.device | str | None, files: Artefacts
) -> TorchKernel:
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "cuda" and not torch.cuda.is_available():
        raise refuse(codes.NO_DEVICE, "there is no CUDA device", help="use the device cpu")
    adapter = find_adapter(ref.run)
    if adapter.tier != "A":
        raise refuse(
            codes.METRIC_OUT_OF_REACH,
            f"{ref.run} gives no logits, so it cannot be run in this place",
            help="let it be the inference kernel of `kcdsl evaluate`: `kcdsl explain adapters`",
        )
    numerics = resolve(ref)
    refuse_unserved(ref.run, adapter, numerics, place.type)
    refuse_strays(numerics, model.linears(), model.quantised_tensors)
    if ref.checkpoint is not None:
        if adapter.engine not in ("torch", "compile"):
            raise refuse(
                codes.KERNEL_NUMERICS,
                f"{ref.run} quantises weights itself, and the kernel has a checkpoint of its own",
                help="run torch.eager or torch.sdpa, or leave `checkpoint` out",
            )
        model = model.as_served()
    _refuse_foreign(ref.run, adapter, model, numerics)
    if adapter.engine == "hf":
        dtype = TORCH_TYPES[numerics.compute]
        program, own = hugging_face(ref, model, files, dtype, adapter.style)
        _refuse_overflow(program, numerics)
        program.to(place).requires_grad_(False)
        return TorchKernel(ref, numerics, own, place, program, None)
    module = copy.deepcopy(model.module).to(TORCH_TYPES[numerics.compute])
    _refuse_overflow(module, numerics)
    composed = adapter.style == "composed"
    use_attention(module, Composed() if composed else ScaledDotProduct(adapter.backend))
    module = module.to(place).eval().requires_grad_(False)
    if ":" in adapter.engine:
        engine: ProgramEngine = resolve_name(adapter.engine)(ref.run, model, module, numerics)
        return TorchKernel(ref, numerics, model, place, module, None, engine)
    stored = _stored_weights(model, module, numerics)
    interception = None
    if adapter.engine == "compile":
        _replace_weights(module, stored)
        return TorchKernel(ref, numerics, model, place, module, None, Compiled())
    if model.built_in:
        _replace_weights(module, stored)
    else:
        interception = Interception(module, stored, adapter)
    kernel = TorchKernel(ref, numerics, model, place, module, interception)
    _probe(kernel, adapter)
    return kernel


def _refuse_foreign(run: str, adapter: Adapter, model: Model, numerics: Numerics) -> None:
    """Refuse a missing library, and a user's module if the adapter needs to know its linears or how
    its attention is computed."""
    need(adapter.library, run)
    if adapter.of_file:
        from kcdsl.model.onnx.program import OnnxProgram

        refuse_no_file(run, adapter, of_file=isinstance(model.module, OnnxProgram))
        return
    plain = numerics.weights == Weights(numerics.compute) and not numerics.overrides
    whole = adapter.engine in ("torch", "hf")
    if model.built_in or (adapter.engine == "compile" and plain) or whole:
        return
    raise refuse(
        codes.KERNEL_NUMERICS,
        f"{run} serves the built-in architectures; with a module of your own it would not be known"
        " which of its products are quantised",
        help="run torch.eager with the stored weights, or torch.compile with plain ones",
    )


def scaled_products(run: str, model: Model, module: nn.Module, numerics: Numerics) -> ProgramEngine:
    """Replace the linears by float8 products with `torch._scaled_mm`."""
    originals = dict(model.module.named_parameters(remove_duplicate=False))
    expected = expected_weights(module, originals, numerics)
    for name, weight in expected.items():
        linear = module.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        original = originals[f"{name}.weight"]
        names = [key for key, tensor in originals.items() if tensor is original]
        scaled = ScaledLinear(linear, original, numerics, names)
        refuse_other_weight(run, name, scaled.weight, weight)
        module.set_submodule(name, scaled)
    return run_part


def torchao_linears(run: str, model: Model, module: nn.Module, numerics: Numerics) -> ProgramEngine:
    """Replace the weights of the linears by torchao's quantised ones."""
    device = next(module.parameters()).device.type
    if numerics.activations.format != "none" and not exact_bytes(device):
        raise refuse(
            codes.KERNEL_NUMERICS,
            f"{run} adds products of 8-bit numbers in 16 bits on this processor, where they"
            " saturate: no numerics admits that",
            help="run it on a processor with VNNI instructions, or torchao.int8_weight_only",
        )
    originals = dict(model.module.named_parameters(remove_duplicate=False))
    for name, weight in expected_weights(module, originals, numerics).items():
        linear = module.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        try:
            quantise_linear(linear, originals[f"{name}.weight"], numerics)
            found = getattr(linear.weight, "dequantize")()  # noqa: B009
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            raise refuse(
                codes.KERNEL_FAILED,
                f"torchao cannot quantise {name} {list(weight.shape)}: {_first_line(error)}",
                help="run torch.eager with the same weights",
            ) from error
        refuse_other_weight(run, name, found, weight)
    return run_part


def onnx_sessions(run: str, model: Model, module: nn.Module, numerics: Numerics) -> ProgramEngine:
    """Return sessions of ONNX Runtime for the parts of a model."""
    originals = dict(model.module.named_parameters(remove_duplicate=False))
    expected = expected_weights(module, originals, numerics)
    return Sessions(run, numerics, tuple(expected.values()), model.limits[1])


def _plain(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return the tensors of a parameter: a quantised one holds codes and a scale."""
    codes_held = getattr(tensor, "qdata", None)
    if codes_held is None:
        return [(name, tensor)]
    return [(f"{name}.qdata", codes_held), (f"{name}.scale", getattr(tensor, "scale"))]  # noqa: B009


def _stored_weights(model: Model, module: nn.Module, numerics: Numerics) -> dict[str, Tensor]:
    """Return the dequantised weight of every matrix by its name, empty for plain weights."""
    if all(w in plain_weights(numerics) for w, _ in numerics.sections):
        return {}
    originals = dict(model.module.named_parameters(remove_duplicate=False))
    matrices = {n: t for n, t in module.named_parameters(remove_duplicate=False) if t.dim() == 2}
    linear = {f"{n}.weight" for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    wanted = [n for n in matrices if n in linear or not model.built_in]
    return {
        n: model.stored_linear(n, originals[n], numerics).to(matrices[n].device, matrices[n].dtype)
        for n in wanted
    }


def _replace_weights(module: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Set the stored weight of every linear; this unties a head from the embedding."""
    for name, weight in stored.items():
        linear = module.get_submodule(name.removesuffix(".weight"))
        linear.weight = nn.Parameter(weight, requires_grad=False)


def _refuse_overflow(module: nn.Module, numerics: Numerics) -> None:
    for name, tensor in module.named_parameters():
        if not bool(torch.isfinite(tensor).all()):
            raise refuse(
                codes.WEIGHT_OVERFLOW,
                f"{name} does not fit {numerics.compute}: it overflows",
                help="compute in a format with a wider range, such as bfloat16",
            )


def _probe(kernel: TorchKernel, adapter: Adapter) -> None:
    """Run once on a short sequence, to refuse a kernel that cannot run as claimed."""
    count = kernel.model.fixed_length or min(2, kernel.model.limits[1] or 2)
    watch = kernel.interception
    with warnings.catch_warnings(), nullcontext() if watch is None else watch.below():
        warnings.simplefilter("ignore")
        kernel.forward(kernel.tokens([0] * count))
    if watch is None:
        return
    watch.probing = False
    if watch.whole_layers:
        raise refuse(
            codes.KERNEL_NUMERICS,
            f"the model calls {', '.join(sorted(watch.whole_layers))}, as"
            " torch.nn.MultiheadAttention does, which forms its attention in another way than"
            f" {kernel.ref.run} claims",
            help="call torch.nn.functional.scaled_dot_product_attention in the model",
        )
    if adapter.style == "fused" and watch.softmax_calls:
        raise refuse(
            codes.KERNEL_NUMERICS,
            f"the model composes its attention itself, so {kernel.ref.run} would not be used",
            help="call torch.nn.functional.scaled_dot_product_attention in the model,"
            " or run torch.eager",
        )
    if watch.matrix_products:
        raise refuse(
            codes.KERNEL_NUMERICS,
            "the model multiplies by a weight outside torch.nn.functional.linear, where its stored"
            f" form cannot be put in: {', '.join(sorted(watch.matrix_products))}",
            help="use torch.nn.Linear or torch.nn.functional.linear",
        )


def _out(result: Tensor) -> Tensor:
    return result.to("cpu", torch.float64)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
