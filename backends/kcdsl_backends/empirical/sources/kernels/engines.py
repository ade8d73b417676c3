"""Engines of kernels: parts of a model run unchanged, compiled, or with quantised linears.

`torch._scaled_mm` runs on float8 codes with dynamic or static scales of activations; torchao stores
weights in few bits. `exact_settings` turns TF32 and reduced-precision reductions off while a kernel
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.numerics import Numerics
from kcdsl.model.numerics.formats import CODE_FORMATS
from kcdsl.model.numerics.weights import linear_weight
from kcdsl_backends.process import exact_products, quietly

Program = Callable[[Tensor], Tensor]


class ProgramEngine(Protocol):
    """Returns the program of a part, the same one for the same name."""

    def __call__(self, name: str, part: Program) -> Program:
        """Return the program that runs in place of `part`, the block of this name."""
        ...


def run_part(name: str, part: Program) -> Program:
    """Run the part itself."""
    return part


def need(library: tuple[str, ...], run: str) -> None:
    """Refuse an adapter whose packages are missing; `library` is (extra, *packages)."""
    missing = [package for package in library[1:] if find_spec(package) is None]
    if missing:
        raise refuse(
            codes.NO_PACKAGE,
            f"{run} needs {' and '.join(missing)}, which is not installed",
            help=f'pip install "kcdsl[{library[0]}]"',
        )


def expected_weights(
    module: nn.Module, originals: Mapping[str, Tensor], numerics: Numerics
) -> dict[str, Tensor]:
    """Return the weight that the numerics define for every linear of a module, by its name."""
    return {
        name: linear_weight(originals[f"{name}.weight"], numerics, f"{name}.weight")
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear)
    }


def refuse_other_weight(run: str, name: str, held: Tensor, expected: Tensor) -> None:
    """Refuse a stored weight of a library that differs from the numerics in any element."""
    shown = held.detach().to("cpu", torch.float64)
    wanted = expected.detach().to("cpu", torch.float64)
    if shown.shape == wanted.shape and torch.equal(shown, wanted):
        return
    raise other_weight(run, name)


def other_weight(run: str, name: str) -> Refusal:
    """Return the refusal of a library's weight."""
    return refuse(
        codes.KERNEL_NUMERICS,
        f"{run} stores another weight for {name} than its numerics define",
        help="the library quantises otherwise than the release that `kcdsl explain numerics`"
        " names, or the weight has a row of zeros or of other numbers that it cannot quantise",
    )


# --- compiled ------------------------------------------------------------------------------------


_LIMIT = 1 << 16
"""Limit of compilations of one function: beyond the default of 8, PyTorch runs it uncompiled."""
OPTIONS: dict[str, Any] = {"pattern_matcher": False}
"""Inductor's patterns fuse a product and a following sum into `addmm`, which starts with the addend
and rounds it every few hundred terms; no numerics specification admits that."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Compiles each part when it runs for the first time; a part that breaks the graph fails."""

    _programs: dict[str, Program] = field(default_factory=dict)

    def __call__(self, name: str, part: Program) -> Program:
        """Return the compiled part."""
        if name not in self._programs:
            self._programs[name] = _compiled(part)
        return self._programs[name]


def _compiled(part: Program) -> Program:
    program = torch.compile(part, fullgraph=True, dynamic=True, options=OPTIONS)
    settings: Any = torch._dynamo.config

    def run(argument: Tensor) -> Tensor:
        with settings.patch(recompile_limit=_LIMIT, accumulated_recompile_limit=_LIMIT):
            result: Tensor = program(argument)
            return result

    return run


_COARSE_SUMS = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
"""Settings of products on CUDA: half-precision partial sums, half-precision sums."""


@contextmanager
def exact_settings(device: torch.device) -> Iterator[None]:
    """Turn off every setting by which PyTorch may compute coarser than claimed, while the context
    is open.

    These are TF32 or bfloat16 inside float32 products, half precision between the steps of its math
    attention, and on CUDA half-precision sums, whole or partial. Refuse a thread that flushes
    subnormal numbers to zero, which no numerics of float32 admits.
    """
    _refuse_flushing()
    with ExitStack() as stack:
        stack.enter_context(exact_products())
        fused: Any = torch.backends.cuda
        if fused.fp16_bf16_reduction_math_sdp_allowed():
            fused.allow_fp16_bf16_reduction_math_sdp(False)
            stack.callback(fused.allow_fp16_bf16_reduction_math_sdp, True)
        if device.type == "cuda":
            for name in _COARSE_SUMS:
                if getattr(fused.matmul, name):
                    setattr(fused.matmul, name, False)
                    stack.callback(setattr, fused.matmul, name, True)
        yield


def _refuse_flushing() -> None:
    if bool(torch.full((8,), 2.0**-126, device="cpu").mul(0.5).all()):
        return
    raise refuse(
        codes.KERNEL_NUMERICS,
        "this process flushes subnormal numbers to zero, which numerics do not admit",
        help="call torch.set_flush_denormal(False); a library built with -ffast-math may set it",
    )


# --- scaled --------------------------------------------------------------------------------------


_FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn}
_ALIGNED = 16
"""Both widths of a weight are multiples of this on CUDA (PyTorch, `_scaled_mm_out_cuda`)."""


class ScaledLinear(nn.Module):
    """A linear whose weight is stored as codes, and whose input is quantised at run time.

    `names` are those of its weight; a static scale may be given by any of them, and must be the
    same for all.
    """

    def __init__(
        self, linear: nn.Linear, original: Tensor, numerics: Numerics, names: Sequence[str] = ()
    ) -> None:
        super().__init__()
        rows = numerics.weights.scale == "per_channel"
        static = numerics.activations.scale == "static"
        self.given = _given(numerics, names) if static else None
        self.by_token = rows if static else numerics.activations.scale == "per_token"
        if rows != self.by_token:
            raise refuse(
                codes.KERNEL_NUMERICS,
                "torch._scaled_mm takes scales of rows on both sides, or one scale on each;"
                f" the weights are {numerics.weights.scale},"
                f" the activations {numerics.activations.scale}",
                help="per_channel goes with per_token, per_tensor with per_tensor",
            )
        place, shape = linear.weight.device, tuple(linear.weight.shape)
        if place.type == "cuda" and any(width % _ALIGNED for width in shape):
            raise refuse(
                codes.KERNEL_NUMERICS,
                f"torch._scaled_mm takes widths that {_ALIGNED} divides on CUDA, and"
                f" {_called(names)} has {shape[1]} and {shape[0]}",
                help="use --device cpu, or torch.eager with the preset fp8-weights",
            )
        quantised, scale = quantise(original.to(place, torch.float32), by_row=rows)
        self.codes = nn.Parameter(quantised, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """Return the dequantised weight, float32 [out, in]."""
        return self.codes.to(torch.float32) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, [..., out]."""
        flat, found = quantise(
            x.reshape(-1, x.shape[-1]).to(torch.float32), by_row=self.by_token, given=self.given
        )
        own = self.scale.t() if self.by_token else self.scale
        inside = (
            self.bias if x.dtype != torch.float32 else None
        )  # not supported for float32 results
        y = torch._scaled_mm(
            flat, self.codes.t(), scale_a=found, scale_b=own, bias=inside, out_dtype=x.dtype
        )
        if self.bias is not None and inside is None:
            y = y + self.bias
        return y.reshape(*x.shape[:-1], -1)


def quantise(x: Tensor, *, by_row: bool, given: float | None = None) -> tuple[Tensor, Tensor]:
    """Return the float8 codes of a float32 matrix and its scales, [rows, 1] or a single number.

    `given`: one static scale for the whole matrix.
    """
    largest = CODE_FORMATS["fp8_e4m3"].divisor
    sizes = x.abs()
    scale = (sizes.amax(dim=1, keepdim=True) if by_row else sizes.amax()) / largest
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    if given is not None:
        scale = torch.full_like(scale, given)
    return (x / scale).clamp(-largest, largest).to(_FLOAT8["fp8_e4m3"]), scale


def _given(numerics: Numerics, names: Sequence[str]) -> float:
    """Return the static scale of the input of a linear."""
    found = {numerics.activations.calibrated(name) for name in names}
    scales = {one.scales for one in found if one is not None}
    if None in found or len(scales) != 1 or len(next(iter(scales))) != 1:
        raise refuse(
            codes.KERNEL_NUMERICS,
            f"torch._scaled_mm takes one static scale of the input of {_called(names)}",
            help="write one number in activations.input_scale, by all names that a weight has",
        )
    return scales.pop()[0]


def _called(names: Sequence[str]) -> str:
    return " and ".join(name.removesuffix(".weight") for name in names) or "a linear"


# --- torchao linears -----------------------------------------------------------------------------


TILE = 128


@cache
def exact_bytes(device: str) -> bool:
    """Return whether products of matrices of signed bytes are exact on a kind of device.

    On processors without VNNI instructions oneDNN adds them in 16 bits, which saturates.
    """
    ends = torch.tensor([127, -128, 127, -128], dtype=torch.int8).repeat_interleave(16)
    left = torch.stack([ends, -ends.clamp_min(-127), ends.abs().clamp_max(127), ends.roll(16)])
    left = left.repeat(8, 1).to(torch.int8).to(device)
    found = torch._int_mm(left, left[:16].t().contiguous())
    wide = left.to("cpu", torch.float64)
    return bool(torch.equal(found.cpu().to(torch.float64), wide @ wide[:16].T))


def quantise_linear(linear: nn.Linear, original: Tensor, numerics: Numerics) -> None:
    """Set the weight of a linear to torchao's quantisation of the float32 original.

    Refuse groups that do not fill its width.
    """
    if numerics.weights.scale == "group_128" and linear.in_features % TILE:
        raise refuse(
            codes.KERNEL_NUMERICS,
            f"torchao takes groups of {TILE} inputs, and a linear has {linear.in_features}",
            help="write `scale: per_channel`",
        )
    with quietly():
        from torchao.quantization import quantize_

        compute = linear.weight.dtype
        linear.weight = nn.Parameter(original.to(linear.weight.device), requires_grad=False)
        quantize_(linear, _configuration(numerics))
        if compute != torch.float32:
            linear.weight = nn.Parameter(_in(linear.weight, compute), requires_grad=False)


def _in(weight: Any, compute: torch.dtype) -> Tensor:
    """Return a float8 weight whose dequantised form has another type; its scale stays float32."""
    found: Tensor = type(weight)(
        weight.qdata,
        weight.scale,
        block_size=weight.block_size,
        mm_config=weight.mm_config,
        act_quant_kwargs=weight.act_quant_kwargs,
        kernel_preference=weight.kernel_preference,
        dtype=compute,
    )
    return found


def _configuration(numerics: Numerics) -> Any:
    if numerics.weights.format == "int4_full":
        return _four_bits(numerics.weights.scale)
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        PerRow,
        PerTensor,
    )

    scale = PerRow() if numerics.weights.scale == "per_channel" else PerTensor()
    if numerics.weights.format == "fp8_e4m3":
        return Float8WeightOnlyConfig(granularity=scale, set_inductor_config=False)
    if numerics.activations.format == "none":
        return Int8WeightOnlyConfig(granularity=scale, set_inductor_config=False)
    return Int8DynamicActivationInt8WeightConfig(
        granularity=[PerRow(), scale], set_inductor_config=False
    )


def _four_bits(scale: str) -> Any:
    """Return the configuration of 4-bit weights that every device runs.

    `Int4WeightOnlyConfig` has no kernel for CPUs; this one holds the same codes, one per byte.
    """
    from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerGroup

    return IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, "int4"),  # noqa: B009
        granularity=PerAxis(0) if scale == "per_channel" else PerGroup(128),
    )
