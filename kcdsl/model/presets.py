"""Presets of numerics specifications and their resolution; the sources stand in docs/numerics.md.

Imports neither numpy nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.ir.terms import KernelRef
from kcdsl.model.formats import (
    ACTIVATION_LAYOUTS,
    CODE_FORMATS,
    FORMATS,
    LAYOUTS,
    WEIGHT_LAYOUTS,
    CodeFormat,
)
from kcdsl.model.formats import CASTS as MEANINGS
from kcdsl.model.numerics import (
    Activations,
    Attention,
    KvCache,
    Numerics,
    Override,
    TensorCore,
    Unit,
    Weights,
    linear_name,
    sums_of_bytes,
)
from kcdsl.model.static_scales import cache_scales, dynamic_limits, static_scales

COMPUTE_FORMATS = ("float64", "float32", "tfloat32", "float16", "bfloat16")
ACCUMULATORS = ("float64", "float32", "tfloat32", "float16", "bfloat16")
CASTS = tuple(MEANINGS)
SCALED_FORMATS = tuple(name for name in CODE_FORMATS if name != "uint8")
WEIGHT_FORMATS = tuple(dict.fromkeys((*FORMATS, *SCALED_FORMATS)))
WEIGHT_ROUNDINGS = ("nearest", "toward_zero")
WEIGHT_SCALES = ("none", *WEIGHT_LAYOUTS)
WEIGHTS_APPLIED = ("weights", "sums", "stored_sums")
SCALE_FORMATS = ("float32", "float16", "bfloat16")
ACTIVATION_FORMATS = ("none", *(f.name for f in CODE_FORMATS.values() if f.activations))
ACTIVATION_SCALES = ("none", *ACTIVATION_LAYOUTS, "static")
CACHE_FORMATS = (
    "none",
    *(form.name for form in CODE_FORMATS.values() if form.static and not form.zero_point),
)
CACHE_SCALES = ("none", "per_tensor", "per_head", "per_token_head", "static")
STYLES = ("composed", "fused")
SIGMOIDS = ("relative", "absolute")
BYTE_SUMS = ("wide", "int16_pairs")
PRODUCTS = ("compute", "tfloat32")
RESULTS = (
    *("input", "context", "linear", "matmul", "add", "sub", "mul", "scale", "divide", "shift"),
    *("tanh", "silu", "gelu", "rope", "rms_norm", "layer_norm"),
)
"""The results that may have a format of their own: by role, or by operation."""

COMPOSED_EXP_ULPS = 4
FUSED_EXP_ULPS = 32
FAST_EXP_ULPS = 1024
"""The cubic exponential of PyTorch's CPU flash kernel on bfloat16 and float16 (908 measured)."""
SMALLEST_TILE = 32
WHOLE_ROW = 1 << 20
LARGEST_TILE = 1 << 24
LARGEST_EXP_ULPS = 1 << 16
LARGEST_SHARDS = 1 << 10
MOST_OVERRIDES, MOST_PATTERNS, LONGEST_PATTERN = 1 << 12, 64, 256
"""How many overrides there may be, how many of them with `*` or `?`, and how long they are."""

_E4M3_PER_CHANNEL = {"format": "fp8_e4m3", "scale": "per_channel"}
_E4M3_PER_TENSOR = {"format": "fp8_e4m3", "scale": "per_tensor"}

_VLLM_LEAST = 1 / (448 * 512)
"""The least dynamic FP8 scale of vLLM (csrc/quantization/w8a8/fp8/common.cuh)."""

# `coarse_exp_ulps` takes the place of `exp_ulps` where compute is coarser than float32.
PRESETS: dict[str, dict[str, Any]] = {
    "torch-eager": {},
    "torch-sdpa-math": {
        "attention": {
            "style": "fused",
            "probabilities": "accumulate",
            "tile": WHOLE_ROW,
            "exp_ulps": COMPOSED_EXP_ULPS,
        }
    },
    "torch-sdpa-flash": {"attention": {"style": "fused", "coarse_exp_ulps": FAST_EXP_ULPS}},
    "torch-sdpa-efficient": {"attention": {"style": "fused"}},
    "torch-sdpa-cudnn": {"compute": "bfloat16", "attention": {"style": "fused"}},
    "flash-attention-2": {"compute": "bfloat16", "attention": {"style": "fused"}},
    "flash-attention-3": {"compute": "bfloat16", "attention": {"style": "fused", "tile": 64}},
    "torch-compile": {
        "attention": {"style": "fused", "scores": "compute", "coarse_exp_ulps": FAST_EXP_ULPS}
    },
    "torch-scaled-mm": {
        "weights": _E4M3_PER_CHANNEL,
        "activations": {"format": "fp8_e4m3", "scale": "per_token"},
    },
    "torchao-float8-weights": {"compute": "bfloat16", "weights": _E4M3_PER_CHANNEL},
    "torchao-int8-weights": {"weights": {"format": "int8_full", "scale": "per_channel"}},
    "torchao-int8-dynamic": {
        "weights": {"format": "int8_full", "scale": "per_channel"},
        "activations": {"format": "int8_full", "scale": "per_token"},
    },
    "torchao-int4-weights": {"weights": {"format": "int4_full", "scale": "per_channel"}},
    "fp8-weights": {"compute": "bfloat16", "weights": _E4M3_PER_CHANNEL},
    "fp8-w8a8-per-tensor": {
        "compute": "bfloat16",
        "weights": _E4M3_PER_TENSOR,
        "activations": {"format": "fp8_e4m3", "scale": "per_tensor"},
    },
    "fp8-w8a8-per-channel": {
        "compute": "bfloat16",
        "weights": _E4M3_PER_CHANNEL,
        "activations": {"format": "fp8_e4m3", "scale": "per_token"},
    },
    "vllm-fp8-per-token": {
        "compute": "bfloat16",
        "weights": _E4M3_PER_CHANNEL,
        "activations": {"format": "fp8_e4m3", "scale": "per_token", "least_scale": _VLLM_LEAST},
    },
    "vllm-fp8-kv-cache": {
        "compute": "bfloat16",
        "attention": {"style": "fused"},
        "kv_cache": {"format": "fp8_e4m3", "scale": "static", "key_scale": 1.0, "value_scale": 1.0},
    },
    "fp8-w8a8-blocks": {
        "compute": "bfloat16",
        "weights": {"format": "fp8_e4m3", "scale": "block_128"},
        "activations": {"format": "fp8_e4m3", "scale": "group_128"},
    },
    "fp8-w8a8-blocks-e8m0": {
        "compute": "bfloat16",
        "weights": {"format": "fp8_e4m3", "scale": "block_128_e8m0"},
        "activations": {"format": "fp8_e4m3", "scale": "group_128_e8m0"},
    },
    "awq-int4": {
        "compute": "float16",
        "weights": {"format": "uint4", "scale": "group_128", "scale_format": "float16"},
    },
    "nvfp4-weights": {
        "compute": "bfloat16",
        "weights": {"format": "fp4_e2m1", "scale": "nvfp4"},
    },
    "nvfp4": {
        "compute": "bfloat16",
        "weights": {"format": "fp4_e2m1", "scale": "nvfp4"},
        "activations": {"format": "fp4_e2m1", "scale": "nvfp4"},
    },
    "mxfp4": {
        "compute": "bfloat16",
        "weights": {"format": "fp4_e2m1", "scale": "mx"},
        "activations": {"format": "fp4_e2m1", "scale": "mx"},
    },
    "int8-weights": {"compute": "bfloat16", "weights": {"format": "int8", "scale": "per_channel"}},
    "mxfp8": {
        "compute": "bfloat16",
        "weights": {"format": "fp8_e4m3", "scale": "mx"},
        "activations": {"format": "fp8_e4m3", "scale": "mx"},
    },
    "onnxruntime-float32": {"sigmoid": "absolute"},
    "onnxruntime-int8": {
        "sigmoid": "absolute",
        "weights": {"format": "int8", "scale": "per_tensor"},
        "activations": {"format": "uint8", "scale": "per_tensor"},
    },
    "onnxruntime-int8-pairs": {
        "sigmoid": "absolute",
        "weights": {"format": "int8", "scale": "per_tensor"},
        "activations": {"format": "uint8", "scale": "per_tensor"},
        "byte_sums": "int16_pairs",
    },
}

_HOPPER_16 = Unit(fraction_bits=25, chunk=16, result_bits=23)
_BLACKWELL_8 = Unit(fraction_bits=25, chunk=32, result_bits=23)
_AMPERE_16 = Unit(fraction_bits=24, chunk=8, result_bits=23)
TENSOR_CORES = {
    "hopper_fp8": TensorCore(Unit(13, 32, 13), _HOPPER_16),
    "hopper_fp8_promoted": TensorCore(Unit(13, 32, 13, promote=128), _HOPPER_16),
    "hopper_16": TensorCore(_HOPPER_16, _HOPPER_16),
    "ada_fp8": TensorCore(Unit(13, 16, 13), _AMPERE_16),
    "ampere_16": TensorCore(_AMPERE_16, _AMPERE_16),
    "blackwell_fp8": TensorCore(_BLACKWELL_8, _HOPPER_16),
}
"""Matrix units as published (docs/numerics.md, section Tensor cores)."""
UNIT_LIMITS = {"fraction_bits": 64, "chunk": 1 << 16, "result_bits": 23, "promote": 1 << 24}

ADAPTER_PRESETS = {
    "torch.eager": "torch-eager",
    "torch.sdpa": "torch-sdpa-flash",
    "torch.sdpa.math": "torch-sdpa-math",
    "torch.sdpa.flash": "torch-sdpa-flash",
    "torch.sdpa.efficient": "torch-sdpa-efficient",
    "torch.sdpa.cudnn": "torch-sdpa-cudnn",
    "torch.compile": "torch-compile",
    "torch.scaled_mm": "torch-scaled-mm",
    "torchao.float8_weight_only": "torchao-float8-weights",
    "torchao.int8_weight_only": "torchao-int8-weights",
    "torchao.int8_dynamic": "torchao-int8-dynamic",
    "torchao.int4_weight_only": "torchao-int4-weights",
    "onnxruntime.float32": "onnxruntime-float32",
    "onnxruntime.dynamic_int8": "onnxruntime-int8",
    "hf.transformers": "torch-eager",
    "hf.transformers.sdpa": "torch-sdpa-flash",
}
"""The preset that a kernel has where its numerics name none. A server has none."""


def resolve(spec: KernelRef | Mapping[str, Any]) -> Numerics:
    """Return the numerics of a kernel: the keys of the contract over those of its preset.

    `spec` is a kernel, or its numerics as a mapping (which must name a preset). Refuse an unknown
    preset, key, format or scale, saying what is allowed, and combinations without a meaning.
    """
    given = _plain(dict(spec.numerics) if isinstance(spec, KernelRef) else spec)
    if isinstance(spec, KernelRef) and not spec.claims:
        raise refuse(
            codes.NUMERICS,
            f"the kernel {spec.run} states no numerics, so nothing bounds its roundings",
            help="give it `numerics`, such as `{preset: flash-attention-2}`, if they are known",
        )
    if isinstance(spec, KernelRef):
        given.setdefault("preset", ADAPTER_PRESETS.get(spec.run))
    _known_keys(given, "numerics", Numerics.__dataclass_fields__)
    preset = given.pop("preset", None)
    if preset is None:
        raise _refusal("the numerics name no preset", PRESETS)
    preset = _choice("preset", preset, PRESETS)
    base = PRESETS[preset]
    merged = {**base, **given}
    compute = _choice("compute", merged.get("compute", "float32"), COMPUTE_FORMATS)
    accumulate = _choice("accumulate", merged.get("accumulate", "float32"), ACCUMULATORS)
    if "accumulate" not in merged and FORMATS[compute].precision > FORMATS[accumulate].precision:
        accumulate = compute
    if FORMATS[accumulate].precision < FORMATS[compute].precision:
        raise _refusal(f"accumulate {accumulate} is coarser than compute {compute}")
    activations = _activations(_merged(base, given, "activations"), compute)
    tensor_core = merged.get("tensor_core", "none")
    products = _products(merged.get("products", "compute"), compute, accumulate)
    weights = _weights(_merged(base, given, "weights"), compute)
    shards = _count("shards", merged.get("shards", 1), LARGEST_SHARDS)
    overrides = _overrides(merged.get("overrides", {}), weights, activations, compute)
    quantised = tuple(
        each
        for each in (activations, *(override.activations for override in overrides))
        if each.quantised
    )
    pairs = ((weights, activations), *((o.weights, o.activations) for o in overrides))
    _applied(pairs, accumulate, shards)
    if quantised and accumulate == "float16":
        raise _refusal(
            f"accumulate is float16 and activations are quantised to {quantised[0].format}: sums of"
            " products of codes exceed the largest number of float16",
            ("float32",),
        )
    return Numerics(
        preset=preset,
        compute=compute,
        accumulate=accumulate,
        casts=_casts(merged.get("casts", "any"), quantised),
        weights=weights,
        activations=activations,
        attention=_attention(base, given, compute, accumulate),
        results=_results(merged.get("results", {}), compute, accumulate),
        tensor_core=_tensor_core(tensor_core, compute, accumulate, quantised, products),
        sigmoid=_choice("sigmoid", merged.get("sigmoid", "relative"), SIGMOIDS),
        byte_sums=_byte_sums(merged.get("byte_sums", "wide"), pairs),
        products=products,
        shards=shards,
        overrides=overrides,
        kv_cache=_kv_cache(_merged(base, given, "kv_cache"), merged.get("casts", "any")),
    )


def refuse_strays(numerics: Numerics, linears: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse an override that fits no linear of a model, overrides of one linear that disagree, and
    static scales of a linear that the model does not have.

    Args:
        linears: the names of weights in the checkpoint, by those of linears in the module.
    """
    groups = tuple(linears.values())
    known = [name for names in groups for name in names]
    named = {linear_name(each) for each in (*linears, *known)}
    for name in numerics.calibrated_linears:
        if name not in named:
            raise _refusal(
                f"no linear of the model has the name {name!r} of a static scale",
                near=sorted(named),
                tried=name,
            )
    for override in numerics.overrides:
        if not any(override.fits(name) for name in known):
            raise _refusal(
                f"no linear of the model has the name {override.pattern!r} of an override",
                near=[linear_name(name) for name in known],
                tried=override.pattern,
            )
    for names in groups:
        if len({numerics.serving(name) for name in names}) > 1:
            raise _refusal(
                f"overrides tell {' and '.join(map(linear_name, names))} apart, which are one"
                " weight: write the same for all of its names"
            )


def _overrides(
    raw: object, weights: Weights, activations: Activations, compute: str
) -> tuple[Override, ...]:
    """Read `overrides`; a section that an override leaves out is that of the kernel."""
    found: dict[str, Override] = {}
    for written, section in _mapping("overrides", raw).items():
        pattern, place = linear_name(written), f"overrides.{written}"
        plain = "[" not in pattern and not pattern.endswith(".weight")
        if not plain or not 1 <= len(pattern) <= LONGEST_PATTERN:
            raise _refusal(
                f"overrides has the name {written[:80]!r}; it must be the name of a linear, with"
                f" `*` for any text and `?` for any character, of {LONGEST_PATTERN} at most"
            )
        if pattern in found:
            raise _refusal(f"overrides names {pattern!r} twice, with `.weight` and without")
        given = _mapping(place, section)
        _known_keys(given, place, ("weights", "activations"))
        if not given:
            raise _refusal(f"{place} changes nothing", ("weights", "activations"))
        try:
            found[pattern] = Override(
                pattern,
                _weights(_mapping("weights", given["weights"]), compute)
                if "weights" in given
                else weights,
                _activations(_mapping("activations", given["activations"]), compute)
                if "activations" in given
                else activations,
            )
        except Refusal as refusal:
            cause = refusal.diagnostics[0]
            raise refuse(codes.NUMERICS, f"{place}.{cause.message}", help=cause.help) from None
    if len(found) > MOST_OVERRIDES or sum(not o.exact for o in found.values()) > MOST_PATTERNS:
        raise _refusal(
            f"there are more than {MOST_OVERRIDES} overrides, or {MOST_PATTERNS} with `*` or `?`"
        )
    return tuple(found[pattern] for pattern in sorted(found))


def _kv_cache(raw: dict[str, Any], casts: object) -> KvCache | None:
    """Read the section `kv_cache`; without one, and with the format "none", there is no cache."""
    if not raw:
        return None
    _known_keys(raw, "kv_cache", KvCache.__dataclass_fields__)
    format = _choice("kv_cache.format", raw.get("format", "none"), CACHE_FORMATS)
    scale = _choice("kv_cache.scale", raw.get("scale", "none"), CACHE_SCALES)
    if format == "none":
        if scale != "none" or set(raw) - {"format", "scale"}:
            raise _refusal("kv_cache has scales but no format", CACHE_FORMATS[1:])
        return None
    if scale == "none" and format not in FORMATS:
        raise _refusal(f"a kv_cache of {format} has no scale 'none'", CACHE_SCALES[1:])
    if MEANINGS[_choice("casts", casts, CASTS)].units != 1:
        raise _refusal(
            f"casts are {casts!r} and kv_cache is {format}: quantisers round to nearest",
            ("nearest", "any"),
        )
    return KvCache(format, scale, *cache_scales(raw, scale))


def _products(raw: object, compute: str, accumulate: str) -> str:
    """Read `products`; only float32 numbers are shortened before they are multiplied."""
    found = _choice("products", raw, PRODUCTS)
    if found != "compute" and (compute, accumulate) != ("float32", "float32"):
        raise _refusal(
            f"products are in {found}, compute in {compute} and sums in {accumulate}: it is for"
            " float32",
            ("compute",),
        )
    return found


def _applied(
    sections: tuple[tuple[Weights, Activations], ...], accumulate: str, shards: int
) -> None:
    """Refuse scales that are multiplied with sums where there is no rule for it."""
    for weights, activations in sections:
        if weights.applied == "weights":
            continue
        if activations.quantised:
            raise _refusal(
                f"weights.applied is {weights.applied!r} and activations are quantised to"
                f" {activations.format}: scales may come after the sum there in any case",
                ("weights",),
            )
        if FORMATS[accumulate].coarse:
            raise _refusal(
                f"weights.applied is {weights.applied!r} and accumulate {accumulate}: sums of codes"
                " are formed in float32",
                ("weights",),
            )
        if weights.applied == "stored_sums" and shards != 1:
            raise _refusal(
                "weights.applied is 'stored_sums' and there are shards", ("weights", "sums")
            )


def _byte_sums(raw: object, sections: tuple[tuple[Weights, Activations], ...]) -> str:
    """Read `byte_sums`; only products of unsigned with signed bytes are summed in pairs."""
    found = _choice("byte_sums", raw, BYTE_SUMS)
    weights, activations = sections[0]
    able = any(sums_of_bytes(w, a) for w, a in sections)
    if found != "wide" and not able:
        raise _refusal(
            f"byte_sums is {found!r}: it is for uint8 activations and int8 weights, with one scale"
            f" per tensor or channel; these are {activations.format} and {weights.format}"
            f" {weights.scale}",
            ("wide",),
        )
    return found


def _casts(raw: object, quantised: tuple[Activations, ...]) -> str:
    """Read `casts`; quantisers round to nearest, so there are none beside directed casts."""
    casts = _choice("casts", raw, CASTS)
    if MEANINGS[casts].units != 1 and quantised:
        raise _refusal(
            f"casts are {casts!r} and activations are quantised to {quantised[0].format}:"
            " quantisers round to nearest",
            ("nearest", "any"),
        )
    return casts


def _results(raw: object, compute: str, accumulate: str) -> tuple[tuple[str, str], ...]:
    """Read the section `results`; a result in the compute format is left out."""
    given = _mapping("results", raw)
    _known_keys(given, "results", RESULTS)
    named = {"compute": compute, "accumulate": accumulate}
    found = {
        key: _choice(f"results.{key}", named.get(value, value), FORMATS)
        for key, value in given.items()
    }
    return tuple(sorted((key, form) for key, form in found.items() if form != compute))


def _tensor_core(
    raw: object,
    compute: str,
    accumulate: str,
    quantised: tuple[Activations, ...],
    products: str,
) -> TensorCore | None:
    """Read `tensor_core`: a name, or the mapping of a numerics record."""
    if raw == "none":
        return None
    if isinstance(raw, dict):
        _known_keys(raw, "tensor_core", TensorCore.__dataclass_fields__)
        core = TensorCore(_unit("linears", raw), _unit("others", raw))
    else:
        core = TENSOR_CORES[_choice("tensor_core", raw, ("none", *TENSOR_CORES))]
    short = compute in ("float16", "bfloat16") or products == "tfloat32"
    if not short or accumulate != "float32":
        raise _refusal(
            "a tensor core multiplies float16, bfloat16 or tfloat32 and accumulates in float32;"
            f" compute is {compute} and accumulate {accumulate}"
        )
    if any(each.nested for each in quantised):
        raise _refusal("no matrix unit for activations of nvfp4 is known", ("none",))
    eight = bool(quantised) and all(each.format.startswith("fp8") for each in quantised)
    if core.linears != core.others and not eight:
        raise _refusal(
            "the unit of the linears multiplies quantised inputs, and activations are not"
            " quantised to fp8",
            ("hopper_16", "ampere_16"),
        )
    return core


def _unit(name: str, section: dict[str, Any]) -> Unit:
    raw = _mapping(f"tensor_core.{name}", section.get(name, {}))
    _known_keys(raw, f"tensor_core.{name}", Unit.__dataclass_fields__)
    number = {
        key: _count(f"tensor_core.{name}.{key}", raw.get(key), UNIT_LIMITS[key])
        for key in ("fraction_bits", "chunk", "result_bits")
    }
    promote = raw.get("promote", 0)
    if promote != 0:
        promote = _count(f"tensor_core.{name}.promote", promote, UNIT_LIMITS["promote"])
        if promote % number["chunk"]:
            raise _refusal(
                f"tensor_core.{name}.promote is {promote!r}; it must be an integer number of chunks"
            )
    return Unit(**number, promote=int(promote))


def _weights(raw: dict[str, Any], compute: str) -> Weights:
    _known_keys(raw, "weights", Weights.__dataclass_fields__)
    format = _choice("weights.format", raw.get("format", compute), WEIGHT_FORMATS)
    scale = _choice("weights.scale", raw.get("scale", "none"), WEIGHT_SCALES)
    if scale != "none" and format not in SCALED_FORMATS:
        raise _refusal(f"weights of format {format} have no scale", SCALED_FORMATS)
    if format in SCALED_FORMATS:
        able = _fitting(CODE_FORMATS[format], WEIGHT_LAYOUTS)
        able += ["none"] if format in FORMATS else []
        if scale not in able:
            raise _refusal(f"{format} weights have no scale {scale!r}", able)
    scale_format = _choice(
        "weights.scale_format", raw.get("scale_format", "float32"), SCALE_FORMATS
    )
    if scale_format != "float32" and (scale == "none" or LAYOUTS[scale].rule != "amax"):
        raise _refusal(f"scales of {scale!r} are not stored in {scale_format}", ("float32",))
    rounding = _choice("weights.rounding", raw.get("rounding", "nearest"), WEIGHT_ROUNDINGS)
    if scale != "none" and rounding != "nearest":
        raise _refusal(
            f"the codes of weights with a scale are not rounded {rounding}", ("nearest",)
        )
    applied = _choice("weights.applied", raw.get("applied", "weights"), WEIGHTS_APPLIED)
    whole = scale in ("per_tensor", "per_channel")
    late = (
        scale != "none" and LAYOUTS[scale].rule != "nested" and (applied != "stored_sums" or whole)
    )
    if applied != "weights" and not late:
        raise _refusal(
            f"weights.applied is {applied!r} and weights.scale {scale!r}: a scale for a whole"
            " channel or tensor may be multiplied with stored sums, one of a part of a channel with"
            " sums",
            ("weights",),
        )
    return Weights(format, scale, rounding, scale_format, applied)


def _fitting(form: CodeFormat, layouts: Iterable[str]) -> list[str]:
    """Return those layouts that the scales of a format of codes may have."""
    return [name for name in layouts if LAYOUTS[name].fits(form)]


def _activations(raw: dict[str, Any], compute: str) -> Activations:
    """Read the section `activations`; the compute format written there means no quantisation."""
    _known_keys(raw, "activations", Activations.__dataclass_fields__)
    format = raw.get("format", "none")
    format = "none" if format == compute else format
    if format in COMPUTE_FORMATS:
        raise _refusal(
            f"activations.format is {format!r}, and compute is {compute!r}: activations that are"
            " not quantised have the compute format"
        )
    format = _choice("activations.format", format, ACTIVATION_FORMATS)
    scale = _choice("activations.scale", raw.get("scale", "none"), ACTIVATION_SCALES)
    if format == "none" and scale != "none":
        raise _refusal("activations have a scale but no format", ACTIVATION_FORMATS[1:])
    if format != "none":
        form = CODE_FORMATS[format]
        able = _fitting(form, ACTIVATION_LAYOUTS)
        able += ["none"] if format in FORMATS else []
        able += ["static"] if form.static else []
        if scale not in able:
            raise _refusal(f"{format} activations have no scale {scale!r}", able)
    return Activations(
        *(format, scale),
        *static_scales(raw, format, scale),
        *dynamic_limits(raw, format, scale),
    )


def _attention(
    base: Mapping[str, Any], given: Mapping[str, Any], compute: str, accumulate: str
) -> Attention:
    mine = _mapping("attention", given.get("attention", {}))
    theirs = dict(base.get("attention", {}))
    _known_keys(mine, "attention", Attention.__dataclass_fields__)
    if "style" in mine and mine["style"] != theirs.get("style", "composed"):
        theirs = {}
    raw = {**theirs, **mine}
    style = _choice("attention.style", raw.get("style", "composed"), STYLES)
    fused = style == "fused"
    exp_ulps = FUSED_EXP_ULPS if fused else COMPOSED_EXP_ULPS
    if FORMATS[compute].coarse:
        exp_ulps = raw.get("coarse_exp_ulps", exp_ulps)
    named = {"compute": compute, "accumulate": accumulate}

    def stored(key: str, default: str) -> str:
        value = raw.get(key, default)
        return _choice(f"attention.{key}", named.get(value, value), FORMATS)

    return Attention(
        style=style,
        scores=stored("scores", accumulate if fused else compute),
        probabilities=stored("probabilities", compute),
        tile=_count("attention.tile", raw.get("tile", SMALLEST_TILE), LARGEST_TILE),
        exp_ulps=_count("attention.exp_ulps", raw.get("exp_ulps", exp_ulps), LARGEST_EXP_ULPS),
    )


# --- reading -------------------------------------------------------------------------------------


def _plain(value: Any) -> dict[str, Any]:
    """Return nested mappings, or sorted pairs that stand for them, as dictionaries."""
    items = value.items() if isinstance(value, Mapping) else value
    return {str(k): _plain_value(v) for k, v in items}


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _plain(value)
    pairs = isinstance(value, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in value)
    return _plain(value) if pairs else value


def _merged(base: Mapping[str, Any], given: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a nested mapping; one that names a format replaces that of the preset."""
    mine = _mapping(key, given.get(key, {}))
    return mine if "format" in mine else {**base.get(key, {}), **mine}


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refusal(f"{name} must be a mapping, not {value!r}")
    return value


def _known_keys(raw: Mapping[str, Any], name: str, known: Iterable[str]) -> None:
    known = tuple(known)
    for key in raw:
        if key not in known:
            raise _refusal(f"{name} has no key {key!r}", known, key)


def _choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    options = tuple(allowed)
    if not isinstance(value, str) or value not in options:
        raise _refusal(f"{name} is {value!r}", options, value)
    return value


def _count(name: str, value: Any, largest: int) -> int:
    number = isinstance(value, int | float | Fraction) and not isinstance(value, bool)
    if not number or not 1 <= value <= largest or value != int(value):
        raise _refusal(f"{name} is {value!r}; it must be an integer from 1 to {largest}")
    return int(value)


_OTHER_NAMES = {
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "single": "float32",
    "float": "float32",
    "tf32": "tfloat32",
    "fp16": "float16",
    "half": "float16",
    "fp8": "fp8_e4m3",
    "e4m3": "fp8_e4m3",
    "e5m2": "fp8_e5m2",
    "channel": "per_channel",
    "tensor": "per_tensor",
}
"""What people call formats and scales that have another name here."""


def _refusal(
    message: str, allowed: Iterable[str] = (), tried: object = None, near: Iterable[str] = ()
) -> Refusal:
    """Return a refusal with what is allowed; `near`: names among which one may have been meant."""
    import difflib

    options = tuple(allowed)
    among = (*options, *near)
    near = difflib.get_close_matches(str(tried), among, n=1) if tried is not None else []
    near = [name for name in (_OTHER_NAMES.get(str(tried).lower()),) if name in options] or near
    shown = f"; allowed: {', '.join(options)}" if options else ""
    return refuse(
        codes.NUMERICS, message + shown, help=f"did you mean {near[0]!r}?" if near else None
    )
