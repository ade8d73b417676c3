"""Kernel adapters: what each one computes, so that numerics it does not implement are refused.

Another distribution can add an adapter by an entry point of the group `kcdsl.adapters`, whose name
is the name of the adapter and whose object is an `Adapter`. Commands that only read a contract take
the names from the metadata and import nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.numerics import Activations, Numerics, Weights
from kcdsl.model.numerics.formats import FORMATS
from kcdsl.model.numerics.preset_table import (
    COMPOSED_EXP_ULPS,
    FAST_EXP_ULPS,
    FUSED_EXP_ULPS,
    SMALLEST_TILE,
    WHOLE_ROW,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

CPU_FLASH_TILE = 512
"""Keys per tile of the CPU flash kernel (aten/native/cpu/FlashAttentionKernel.cpp)."""

_FLASH_TILES = {"cpu": CPU_FLASH_TILE, "cuda": SMALLEST_TILE}
_ROW = {"cpu": WHOLE_ROW, "cuda": WHOLE_ROW}
_SMALL_TILES = {"cpu": SMALLEST_TILE, "cuda": SMALLEST_TILE}
_UNQUANTISED = (Activations("none"),)


@dataclass(frozen=True, slots=True)
class Adapter:
    """The computation of an adapter.

    `style` is the style of its attention, `backend` the kernel that PyTorch then selects. `scores`
    and `probabilities` are the formats of both in attention: "compute", or "wide" (at least
    float32). `tile` is the least number of keys per tile on a CPU and on CUDA, `exp_ulps` the error
    of the exponential, `coarse_exp_ulps` that on a CPU where compute is coarser than float32.
    `on_cuda` lists the formats it supports on CUDA, if not all.
    `weights` None: any stored weights. `free`: a compiler or the order of the scales determines
    where it rounds, so it cannot claim `casts: nearest`. `library` is the extra of kcdsl that
    it needs, and the package in that extra. `sigmoid` is the accuracy of the sigmoid in silu.
    `static` names the formats of activations that it quantises with static scales, one per linear.
    `tier` is the evidence tier: A logits, B the likeliest tokens per position, C sampled tokens.
    `of_file`: it runs the ONNX file of the contract, and no other model.
    `unproved` is the reason why its numerics are not checked here; a proof about the numerics is
    then no proof about the adapter.
    `engine` is the way to run it: "torch", "compile", "hf", "server" and "recorded" are built in,
    else `package.module:function`. The function takes the name of the adapter, the model, its
    module converted to the compute format on its device, and the numerics. It may change the
    module, and returns the program that runs in place of a part, by the name of the part
    (`kcdsl_backends.empirical.sources.kernels.engines.ProgramEngine`).
    """

    style: str
    presets: tuple[str, ...]
    backend: str | None = None
    scores: str = "compute"
    probabilities: str = "compute"
    tile: dict[str, int] | None = None
    exp_ulps: int = COMPOSED_EXP_ULPS
    coarse_exp_ulps: int = COMPOSED_EXP_ULPS
    engine: str = "torch"
    computes: tuple[str, ...] = ("float64", "float32", "float16", "bfloat16")
    on_cuda: tuple[str, ...] | None = None
    weights: tuple[Weights, ...] | None = None
    activations: tuple[Activations, ...] = _UNQUANTISED
    static: tuple[str, ...] = ()
    free: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    library: tuple[str, ...] = ()
    sigmoid: str = "relative"
    tier: str = "A"
    of_file: bool = False
    unproved: str | None = None

    @property
    def claimed_style(self) -> str:
        """Return the attention style that its numerics must have; compiled kernels may be fused."""
        return "fused" if self.engine == "compile" else self.style

    def computes_on(self, device: str) -> tuple[str, ...]:
        """Return the compute formats that it supports on a device."""
        return self.on_cuda if self.on_cuda is not None and device == "cuda" else self.computes


_KERNELS = "kcdsl_backends.empirical.sources.kernels"
_ENGINES = f"{_KERNELS}.torch_kernel"
_E4M3_ROWS = Weights("fp8_e4m3", "per_channel")
_E4M3_TENSOR = Weights("fp8_e4m3", "per_tensor")
_INT8 = (Weights("int8_full", "per_channel"), Weights("int8_full", "per_tensor"))
_CPU = ("cpu",)
_TORCHAO = ("torchao", "torchao")
_ONNX = ("onnxruntime", "onnxruntime", "onnxscript")
_HF = ("hf", "transformers")
_SERVER = ("server", "httpx")
_OTHER_ROUNDINGS = "transformers rounds norms and the tables of RoPE otherwise than numerics say"
_ELSEWHERE = "it runs elsewhere"
_HALVES = ("float16", "bfloat16")
_PLAIN = tuple(Weights(name) for name in ("float32", "float16", "bfloat16"))

_flash = partial(
    Adapter,
    "fused",
    ("torch-sdpa-flash",),
    scores="wide",
    tile=_FLASH_TILES,
    exp_ulps=FUSED_EXP_ULPS,
    coarse_exp_ulps=FAST_EXP_ULPS,
)
_tiled_on_cuda = partial(
    Adapter,
    "fused",
    scores="wide",
    tile=_SMALL_TILES,
    exp_ulps=FUSED_EXP_ULPS,
    coarse_exp_ulps=FUSED_EXP_ULPS,
    devices=("cuda",),
)
_torchao = partial(
    Adapter,
    "composed",
    engine=f"{_ENGINES}:torchao_linears",
    computes=("float32",),
    free=True,
    library=_TORCHAO,
)
_onnxruntime = partial(
    Adapter,
    "composed",
    engine=f"{_ENGINES}:onnx_sessions",
    computes=("float32",),
    free=True,
    devices=_CPU,
    library=_ONNX,
    sigmoid="absolute",
)
_transformers: dict[str, Any] = {
    "engine": "hf",
    "computes": ("float32", *_HALVES),
    "weights": _PLAIN,
    "free": True,
    "library": _HF,
    "unproved": _OTHER_ROUNDINGS,
}
ADAPTERS: dict[str, Adapter] = {
    "torch.eager": Adapter("composed", ("torch-eager", "fp8-weights", "int8-weights")),
    "torch.sdpa": _flash(),
    "torch.sdpa.math": Adapter(
        "fused",
        ("torch-sdpa-math",),
        backend="math",
        scores="wide",
        probabilities="wide",
        tile=_ROW,
    ),
    "torch.sdpa.flash": _flash(backend="flash", on_cuda=_HALVES),
    "torch.sdpa.efficient": _tiled_on_cuda(
        ("torch-sdpa-efficient",), backend="efficient", computes=("float32", *_HALVES)
    ),
    "torch.sdpa.cudnn": _tiled_on_cuda(("torch-sdpa-cudnn",), backend="cudnn", computes=_HALVES),
    "torch.compile": Adapter(
        "composed",
        ("torch-compile",),
        engine="compile",
        tile=_SMALL_TILES,
        exp_ulps=FUSED_EXP_ULPS,
        coarse_exp_ulps=FAST_EXP_ULPS,
        computes=("float32", *_HALVES),
        free=True,
    ),
    "torch.scaled_mm": Adapter(
        "composed",
        ("torch-scaled-mm", "fp8-w8a8-per-channel", "fp8-w8a8-per-tensor"),
        engine=f"{_ENGINES}:scaled_products",
        computes=("float32", "bfloat16"),
        weights=(_E4M3_ROWS, _E4M3_TENSOR),
        activations=(Activations("fp8_e4m3", "per_token"), Activations("fp8_e4m3", "per_tensor")),
        static=("fp8_e4m3",),
        free=True,
    ),
    "torchao.float8_weight_only": _torchao(
        ("torchao-float8-weights", "fp8-weights"),
        computes=("float32", "bfloat16"),
        weights=(_E4M3_ROWS, _E4M3_TENSOR),
    ),
    "torchao.int8_weight_only": _torchao(("torchao-int8-weights",), weights=_INT8),
    "torchao.int8_dynamic": _torchao(
        ("torchao-int8-dynamic",),
        weights=_INT8,
        activations=(Activations("int8_full", "per_token"),),
    ),
    "torchao.int4_weight_only": _torchao(
        ("torchao-int4-weights",),
        weights=(Weights("int4_full", "per_channel"), Weights("int4_full", "group_128")),
    ),
    "onnxruntime.float32": _onnxruntime(("onnxruntime-float32",), weights=(Weights("float32"),)),
    "onnxruntime.dynamic_int8": _onnxruntime(
        ("onnxruntime-int8", "onnxruntime-int8-pairs"),
        weights=(Weights("int8", "per_tensor"), Weights("int8", "per_channel")),
        activations=(Activations("uint8", "per_tensor"),),
    ),
    "onnxruntime.file": _onnxruntime(
        ("onnxruntime-float32",),
        engine=f"{_KERNELS}.onnx_file:file_sessions",
        computes=("float32", "float16"),
        activations=(*_UNQUANTISED, Activations("uint8", "per_tensor")),
        static=("uint8", "int8_full", "fp8_e4m3", "fp8_e5m2"),
        of_file=True,
    ),
    "hf.transformers": Adapter("composed", ("torch-eager",), **_transformers),
    "hf.transformers.sdpa": _flash(**_transformers),
    "server": Adapter("", (), engine="server", library=_SERVER, tier="B", unproved=_ELSEWHERE),
    "recorded": Adapter("", (), engine="recorded", tier="C", unproved=_ELSEWHERE),
}


GROUP = "kcdsl.adapters"
"""The group of entry points of adapters in other distributions."""
_FOREIGN = "it is of another distribution"


@lru_cache(maxsize=1)
def foreign_adapters() -> Mapping[str, EntryPoint]:
    """Return the entry points of other distributions by the names of their adapters.

    Raises ValueError where two have one name, or one has that of a built-in adapter.
    """
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda e: (e.name, e.value)):
        if entry.name in ADAPTERS or entry.name in found:
            first = found[entry.name].value if entry.name in found else "kcdsl"
            raise ValueError(f"adapter {entry.name!r} is offered by {first} and {entry.value}")
        found[entry.name] = entry
    return found


def adapter_names() -> tuple[str, ...]:
    """Return the names of all adapters, those of other distributions last; imports none of them."""
    return (*ADAPTERS, *foreign_adapters())


def is_adapter(run: str) -> bool:
    """Return whether there is an adapter of this name."""
    return run in ADAPTERS or run in foreign_adapters()


def preset_of(run: str) -> str | None:
    """Return the default preset of a kernel's numerics; None for a kernel without one, and for
    adapters of other distributions."""
    return next(iter(ADAPTERS[run].presets), None) if run in ADAPTERS else None


def distribution_of(run: str) -> str | None:
    """Return the distribution that an adapter needs besides torch."""
    if run not in ADAPTERS:
        dist = foreign_adapters()[run].dist if run in foreign_adapters() else None
        return None if dist is None else dist.name
    return next(iter(ADAPTERS[run].library[1:]), None)


def unproved(run: str) -> str | None:
    """Return the reason why the numerics of an adapter are not checked; imports no adapter.

    Refuse an unknown adapter.
    """
    return _FOREIGN if run in foreign_adapters() else find_adapter(run).unproved


def find_adapter(run: str) -> Adapter:
    """Return the adapter of this name; an adapter of another distribution is imported.

    Refuse an unknown name, and an entry point whose object is no `Adapter`.
    """
    if run in ADAPTERS:
        return ADAPTERS[run]
    if run not in foreign_adapters():
        from difflib import get_close_matches

        known = adapter_names()
        near = get_close_matches(run, known, n=1)
        raise refuse(
            codes.UNKNOWN_ADAPTER,
            f"unknown kernel adapter {run!r}; known: {', '.join(known)}",
            help=f"did you mean {near[0]!r}?" if near else None,
        )
    entry = foreign_adapters()[run]
    try:
        found: object = entry.load()
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        raise refuse(
            codes.KERNEL_FAILED,
            f"the adapter {run!r} ({entry.value}) cannot be imported:"
            f" {type(error).__name__}: {error}",
            help="install what it needs, or name another adapter; `kcdsl explain adapters` "
            "lists those of kcdsl",
        ) from error
    if not isinstance(found, Adapter):
        raise refuse(
            codes.KERNEL_FAILED,
            f"the adapter {run!r} ({entry.value}) is no kcdsl.model.adapters.Adapter",
            help="let the entry point of its distribution name an Adapter, as `kcdsl explain "
            "adapters` says, or name another adapter",
        )
    return replace(found, unproved=_FOREIGN)


def refuse_unserved(run: str, adapter: Adapter, numerics: Numerics, device: str) -> None:
    """Refuse a device that the adapter does not support, and numerics that it does not implement:
    finer than its own, or of another kind. Coarser numerics are accepted if casts are `any`."""
    if device not in adapter.devices:
        here = [n for n, a in ADAPTERS.items() if a.tier == "A" and device in a.devices]
        raise refuse(
            codes.KERNEL_NUMERICS,
            f"{run} runs on {' and '.join(adapter.devices)}, not on {device}",
            help=f"write --device {adapter.devices[0]}, or take an adapter that runs on {device}:"
            f" {', '.join(here)}",
        )
    problems = [p for p in _problems(adapter, numerics, device) if p]
    if problems:
        raise refuse(
            codes.KERNEL_NUMERICS,
            f"{run} does not compute as its numerics ({numerics.preset}) say:"
            f" {'; '.join(problems)}",
            help=f"numerics for {run}: {', '.join(adapter.presets)}" + _others(adapter, numerics),
        )


def refuse_no_file(run: str, adapter: Adapter, *, of_file: bool) -> None:
    """Refuse an adapter of ONNX files for any other model."""
    if adapter.of_file and not of_file:
        raise refuse(
            codes.KERNEL_NUMERICS,
            f"{run} runs the ONNX file of a contract, and the model is not an ONNX file",
            help="run onnxruntime.float32, or name the model as `model: {onnx: model.onnx}`",
        )


def _problems(adapter: Adapter, numerics: Numerics, device: str) -> list[str]:
    attention = numerics.attention
    for _, activations in numerics.sections:
        if not _quantises(adapter, activations):
            return [_other_activations(adapter, activations)]
    if numerics.compute not in adapter.computes_on(device):
        here = f" on {device}" if numerics.compute in adapter.computes else ""
        return [f"it does not compute in {numerics.compute}{here}"]
    if attention.style != adapter.claimed_style:
        return [f"its attention is {adapter.claimed_style}, not {attention.style}"]
    wide = "float64" if numerics.compute == "float64" else "float32"
    real = {"compute": numerics.compute, "wide": wide}
    tile = (adapter.tile or _ROW).get(device, SMALLEST_TILE)
    coarse = FORMATS[numerics.compute].precision < FORMATS["float32"].precision
    exp_ulps = adapter.coarse_exp_ulps if coarse and device == "cpu" else adapter.exp_ulps
    return [
        f"it reads keys and values as they are, not from a cache ({numerics.kv_cache.format})"
        if numerics.kv_cache is not None
        else "",
        "it quantises no single tensors" if numerics.quantisers and not adapter.of_file else "",
        _other_weights(adapter, numerics),
        _other_overrides(adapter, numerics),
        "it multiplies weights with their scales before the product, not sums"
        if any(w.applied != "weights" for w, _ in numerics.sections)
        else "",
        "its sigmoid is good to a share of 1, not of itself"
        if (adapter.sigmoid, numerics.sigmoid) == ("absolute", "relative")
        else "",
        "a CPU has no tensor core" if numerics.tensor_core is not None and device == "cpu" else "",
        *(_coarser(f"results.{n}", f, numerics.compute, numerics) for n, f in numerics.results),
        f"where it rounds is left to it, so its casts are `any`, not `{numerics.casts}`"
        if adapter.free and not numerics.cast.free
        else "",
        f"it rounds to nearest, so its casts are not `{numerics.casts}`"
        if numerics.cast.toward_zero
        else "",
        "it rounds weights to nearest, not toward_zero"
        if any(w.rounding != "nearest" for w, _ in numerics.sections)
        else "",
        _coarser("accumulate", numerics.accumulate, wide, numerics),
        _coarser("attention.scores", attention.scores, real[adapter.scores], numerics),
        _coarser(
            "attention.probabilities",
            attention.probabilities,
            real[adapter.probabilities],
            numerics,
        ),
        f"its tiles have {tile} keys, not {attention.tile}"
        if adapter.claimed_style == "fused" and attention.tile > tile
        else "",
        f"its exponential is good to {exp_ulps} ulp, not to {attention.exp_ulps}"
        if attention.exp_ulps < exp_ulps
        else "",
    ]


def _other_overrides(adapter: Adapter, numerics: Numerics) -> str:
    """Return why an adapter does not implement the overrides; empty where it does. Only an adapter
    that stores any weights and does not quantise inputs implements overrides."""
    if not numerics.overrides or (adapter.weights is None and adapter.engine != "hf"):
        return ""
    return "it quantises all linears alike, so it serves no `overrides`"


def _quantises(adapter: Adapter, claimed: Activations) -> bool:
    if claimed.scale == "static":
        return claimed.format in adapter.static
    return claimed in adapter.activations


def _other_activations(adapter: Adapter, claimed: Activations) -> str:
    if adapter.activations == _UNQUANTISED:
        models = ((name, a) for name, a in ADAPTERS.items() if not a.of_file)
        able = [name for name, a in models if _quantises(a, claimed)]
        instead = f"; {', '.join(able)} {'does' if len(able) == 1 else 'do'}" if able else ""
        return f"it does not quantise activations ({claimed.format}){instead}"
    static = [f"{name} static" for name in adapter.static]
    own = " or ".join([*(f"{a.format} {a.scale}" for a in adapter.activations), *static])
    if claimed.format == "none":
        return f"it quantises activations, to {own}"
    return f"its activations are {own}, not {claimed.format} {claimed.scale}"


def _other_weights(adapter: Adapter, numerics: Numerics) -> str:
    if adapter.weights is None or numerics.weights in adapter.weights:
        return ""
    own = " or ".join(f"{w.format} {w.scale}" for w in adapter.weights)
    return f"its weights are {own}, not {numerics.weights.format} {numerics.weights.scale}"


def _coarser(name: str, claimed: str, real: str, numerics: Numerics) -> str:
    """Return the defect of a claimed format: finer than the real one, or unequal with exact
    casts."""
    finer = FORMATS[claimed].precision > FORMATS[real].precision
    inexact = not numerics.cast.free and claimed != real and name != "accumulate"
    return f"{name} is {real}, not {claimed}" if finer or inexact else ""


def _others(adapter: Adapter, numerics: Numerics) -> str:
    if numerics.attention.style == adapter.claimed_style:
        return ""
    style = numerics.attention.style
    able = [n for n, a in ADAPTERS.items() if a.engine == "torch" and a.style == style]
    return f"; adapters with {numerics.attention.style} attention: {', '.join(able)}"
