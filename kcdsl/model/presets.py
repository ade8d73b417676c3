"""Resolution of numerics specifications: a preset (preset_table.py) with the keys of a contract.

Imports neither numpy nor torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.ir.terms import KernelRef
from kcdsl.model.adapters import preset_of
from kcdsl.model.numerics import (
    Activations,
    Attention,
    KvCache,
    MatrixUnit,
    Numerics,
    Override,
    TensorCore,
    Weights,
    linear_name,
    sums_of_bytes,
)
from kcdsl.model.numerics.fields import (
    as_dictionaries,
    cache_scales,
    choice_of,
    count_of,
    dynamic_limits,
    mapping_of,
    refusal,
    refuse_unknown,
    section_of,
    static_quantisers,
    static_scales,
)
from kcdsl.model.numerics.formats import (
    ACTIVATION_LAYOUTS,
    CODE_FORMATS,
    FORMATS,
    LAYOUTS,
    WEIGHT_LAYOUTS,
    CodeFormat,
)
from kcdsl.model.numerics.formats import CASTS as MEANINGS
from kcdsl.model.numerics.preset_table import (
    COMPOSED_EXP_ULPS,
    FUSED_EXP_ULPS,
    PRESETS,
    SMALLEST_TILE,
    TENSOR_CORES,
)

COMPUTE_FORMATS = ("float64", "float32", "tfloat32", "float16", "bfloat16")
ACCUMULATORS = ("float64", "float32", "tfloat32", "float16", "bfloat16")
CASTS = tuple(MEANINGS)
SCALED_FORMATS = tuple(name for name, form in CODE_FORMATS.items() if form.weights)
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
"""Results that may have a format of their own: roles and operations."""

LARGEST_TILE = 1 << 24
LARGEST_EXP_ULPS = 1 << 16
LARGEST_SHARDS = 1 << 10
MOST_OVERRIDES, MOST_PATTERNS, LONGEST_PATTERN = 1 << 12, 64, 256
"""The largest number of overrides, the same with `*` or `?`, and the longest pattern."""

UNIT_LIMITS = {"fraction_bits": 64, "chunk": 1 << 16, "result_bits": 23, "promote": 1 << 24}


def resolve(spec: KernelRef | Mapping[str, Any]) -> Numerics:
    """Return the numerics of a kernel: its preset with the keys of the contract.

    `spec` is a kernel, or its numerics as a mapping (which must name a preset). Refuse an unknown
    preset, key, format or scale, listing the allowed ones, and inconsistent combinations.
    """
    given = as_dictionaries(dict(spec.numerics) if isinstance(spec, KernelRef) else spec)
    if isinstance(spec, KernelRef) and spec.own_file is not None:
        raise refuse(
            codes.NUMERICS,
            f"{spec.own_file} is a program of its own, so no numerics say how {spec.run} computes",
            help="nothing is proved about it: measure it with `kcdsl evaluate`",
        )
    if isinstance(spec, KernelRef) and not spec.claims:
        raise refuse(
            codes.NUMERICS,
            f"the kernel {spec.run} states no numerics, so nothing bounds its roundings",
            help="give it `numerics`, such as `{preset: flash-attention-2}`, if they are known",
        )
    if isinstance(spec, KernelRef):
        given.setdefault("preset", preset_of(spec.run))
    refuse_unknown(given, "numerics", Numerics.__dataclass_fields__)
    preset = given.pop("preset", None)
    if preset is None:
        raise refusal("the numerics name no preset", PRESETS)
    preset = choice_of("preset", preset, PRESETS)
    base = PRESETS[preset]
    merged = {**base, **given}
    compute = choice_of("compute", merged.get("compute", "float32"), COMPUTE_FORMATS)
    accumulate = choice_of("accumulate", merged.get("accumulate", "float32"), ACCUMULATORS)
    if "accumulate" not in merged and FORMATS[compute].precision > FORMATS[accumulate].precision:
        accumulate = compute
    if FORMATS[accumulate].precision < FORMATS[compute].precision:
        raise refusal(f"accumulate {accumulate} is coarser than compute {compute}")
    activations = _activations(section_of(base, given, "activations"), compute)
    tensor_core = merged.get("tensor_core", "none")
    products = _products(merged.get("products", "compute"), compute, accumulate)
    weights = _weights(section_of(base, given, "weights"), compute)
    shards = count_of("shards", merged.get("shards", 1), LARGEST_SHARDS)
    overrides = _overrides(merged.get("overrides", {}), weights, activations, compute)
    quantised = tuple(
        each
        for each in (activations, *(override.activations for override in overrides))
        if each.quantised
    )
    pairs = ((weights, activations), *((o.weights, o.activations) for o in overrides))
    _applied(pairs, accumulate, shards)
    if quantised and accumulate == "float16":
        raise refusal(
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
        sigmoid=choice_of("sigmoid", merged.get("sigmoid", "relative"), SIGMOIDS),
        byte_sums=_byte_sums(merged.get("byte_sums", "wide"), pairs),
        products=products,
        shards=shards,
        overrides=overrides,
        kv_cache=_kv_cache(section_of(base, given, "kv_cache"), merged.get("casts", "any")),
        quantisers=static_quantisers(
            merged.get("quantisers", {}),
            compute,
            MEANINGS[choice_of("casts", merged.get("casts", "any"), CASTS)],
        ),
    )


def refuse_strays(
    numerics: Numerics, linears: Mapping[str, tuple[str, ...]], tensors: Collection[str] = ()
) -> None:
    """Refuse an override that matches no linear of a model, conflicting overrides of one linear,
    and static scales of linears, or quantisers of tensors, that the model does not have.

    Args:
    linears: the checkpoint keys of weights, by the names of linears in the module.
    tensors: the tensors that the model may quantise.
    """
    for name, _ in numerics.quantisers:
        if name not in tensors:
            raise refusal(
                f"the model quantises no tensor {name!r}",
                near=sorted(tensors),
                tried=name,
                help="quantisers are those of an ONNX file: kcdsl init FILE.onnx writes them",
            )
    groups = tuple(linears.values())
    known = [name for names in groups for name in names]
    named = {linear_name(each) for each in (*linears, *known)}
    for name in numerics.calibrated_linears:
        if name not in named:
            raise refusal(
                f"no linear of the model has the name {name!r} of a static scale",
                near=sorted(named),
                tried=name,
            )
    for override in numerics.overrides:
        if not any(override.fits(name) for name in known):
            raise refusal(
                f"no linear of the model has the name {override.pattern!r} of an override",
                near=[linear_name(name) for name in known],
                tried=override.pattern,
            )
    for names in groups:
        if len({numerics.serving(name) for name in names}) > 1:
            raise refusal(
                f"overrides tell {' and '.join(map(linear_name, names))} apart, which are one"
                " weight: write the same for all of its names"
            )


def _overrides(
    raw: object, weights: Weights, activations: Activations, compute: str
) -> tuple[Override, ...]:
    """Read `overrides`; a missing section is that of the kernel."""
    found: dict[str, Override] = {}
    for written, section in mapping_of("overrides", raw).items():
        pattern, place = linear_name(written), f"overrides.{written}"
        plain = "[" not in pattern and not pattern.endswith(".weight")
        if not plain or not 1 <= len(pattern) <= LONGEST_PATTERN:
            raise refusal(
                f"overrides has the name {written[:80]!r}; it must be the name of a linear, with"
                f" `*` for any text and `?` for any character, of {LONGEST_PATTERN} at most"
            )
        if pattern in found:
            raise refusal(f"overrides names {pattern!r} twice, with `.weight` and without")
        given = mapping_of(place, section)
        refuse_unknown(given, place, ("weights", "activations"))
        if not given:
            raise refusal(f"{place} changes nothing", ("weights", "activations"))
        try:
            found[pattern] = Override(
                pattern,
                _weights(mapping_of("weights", given["weights"]), compute)
                if "weights" in given
                else weights,
                _activations(mapping_of("activations", given["activations"]), compute)
                if "activations" in given
                else activations,
            )
        except Refusal as raised:
            cause = raised.diagnostics[0]
            raise refuse(codes.NUMERICS, f"{place}.{cause.message}", help=cause.help) from None
    if len(found) > MOST_OVERRIDES or sum(not o.exact for o in found.values()) > MOST_PATTERNS:
        raise refusal(
            f"there are more than {MOST_OVERRIDES} overrides, or {MOST_PATTERNS} with `*` or `?`"
        )
    return tuple(found[pattern] for pattern in sorted(found))


def _kv_cache(raw: dict[str, Any], casts: object) -> KvCache | None:
    """Read the section `kv_cache`; None if it is missing or its format is "none"."""
    if not raw:
        return None
    refuse_unknown(raw, "kv_cache", KvCache.__dataclass_fields__)
    format = choice_of("kv_cache.format", raw.get("format", "none"), CACHE_FORMATS)
    scale = choice_of("kv_cache.scale", raw.get("scale", "none"), CACHE_SCALES)
    if format == "none":
        if scale != "none" or set(raw) - {"format", "scale"}:
            raise refusal("kv_cache has scales but no format", CACHE_FORMATS[1:])
        return None
    if scale == "none" and format not in FORMATS:
        raise refusal(f"a kv_cache of {format} has no scale 'none'", CACHE_SCALES[1:])
    if MEANINGS[choice_of("casts", casts, CASTS)].units != 1:
        raise refusal(
            f"casts are {casts!r} and kv_cache is {format}: quantisers round to nearest",
            ("nearest", "any"),
        )
    return KvCache(format, scale, *cache_scales(raw, scale))


def _products(raw: object, compute: str, accumulate: str) -> str:
    """Read `products`; only float32 operands can be truncated to tfloat32."""
    found = choice_of("products", raw, PRODUCTS)
    if found != "compute" and (compute, accumulate) != ("float32", "float32"):
        raise refusal(
            f"products are in {found}, compute in {compute} and sums in {accumulate}: it is for"
            " float32",
            ("compute",),
        )
    return found


def _applied(
    sections: tuple[tuple[Weights, Activations], ...], accumulate: str, shards: int
) -> None:
    """Refuse scales applied to sums where there is no rule for it."""
    for weights, activations in sections:
        if weights.applied == "weights":
            continue
        if activations.quantised:
            raise refusal(
                f"weights.applied is {weights.applied!r} and activations are quantised to"
                f" {activations.format}: scales may come after the sum there in any case",
                ("weights",),
            )
        if FORMATS[accumulate].coarse:
            raise refusal(
                f"weights.applied is {weights.applied!r} and accumulate {accumulate}: sums of codes"
                " are formed in float32",
                ("weights",),
            )
        if weights.applied == "stored_sums" and shards != 1:
            raise refusal(
                "weights.applied is 'stored_sums' and there are shards", ("weights", "sums")
            )


def _byte_sums(raw: object, sections: tuple[tuple[Weights, Activations], ...]) -> str:
    """Read `byte_sums`; only products of unsigned with signed bytes are summed in pairs."""
    found = choice_of("byte_sums", raw, BYTE_SUMS)
    weights, activations = sections[0]
    able = any(sums_of_bytes(w, a) for w, a in sections)
    if found != "wide" and not able:
        raise refusal(
            f"byte_sums is {found!r}: it is for uint8 activations and int8 weights, with one scale"
            f" per tensor or channel; these are {activations.format} and {weights.format}"
            f" {weights.scale}",
            ("wide",),
        )
    return found


def _casts(raw: object, quantised: tuple[Activations, ...]) -> str:
    """Read `casts`; directed casts exclude quantisers, which round to nearest."""
    casts = choice_of("casts", raw, CASTS)
    if MEANINGS[casts].units != 1 and quantised:
        raise refusal(
            f"casts are {casts!r} and activations are quantised to {quantised[0].format}:"
            " quantisers round to nearest",
            ("nearest", "any"),
        )
    return casts


def _results(raw: object, compute: str, accumulate: str) -> tuple[tuple[str, str], ...]:
    """Read the section `results`; results in the compute format are omitted."""
    given = mapping_of("results", raw)
    refuse_unknown(given, "results", RESULTS)
    named = {"compute": compute, "accumulate": accumulate}
    found = {
        key: choice_of(f"results.{key}", named.get(value, value), FORMATS)
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
        refuse_unknown(raw, "tensor_core", TensorCore.__dataclass_fields__)
        core = TensorCore(_unit("linears", raw), _unit("others", raw))
    else:
        core = TENSOR_CORES[choice_of("tensor_core", raw, ("none", *TENSOR_CORES))]
    short = compute in ("float16", "bfloat16") or products == "tfloat32"
    if not short or accumulate != "float32":
        raise refusal(
            "a tensor core multiplies float16, bfloat16 or tfloat32 and accumulates in float32;"
            f" compute is {compute} and accumulate {accumulate}"
        )
    if any(each.nested for each in quantised):
        raise refusal("no matrix unit for activations of nvfp4 is known", ("none",))
    eight = bool(quantised) and all(each.codes.units for each in quantised)
    if core.linears != core.others and not eight:
        raise refusal(
            "the unit of the linears multiplies quantised inputs, and activations are not"
            " quantised to fp8",
            ("hopper_16", "ampere_16"),
        )
    return core


def _unit(name: str, section: dict[str, Any]) -> MatrixUnit:
    raw = mapping_of(f"tensor_core.{name}", section.get(name, {}))
    refuse_unknown(raw, f"tensor_core.{name}", MatrixUnit.__dataclass_fields__)
    number = {
        key: count_of(f"tensor_core.{name}.{key}", raw.get(key), UNIT_LIMITS[key])
        for key in ("fraction_bits", "chunk", "result_bits")
    }
    promote = raw.get("promote", 0)
    if promote != 0:
        promote = count_of(f"tensor_core.{name}.promote", promote, UNIT_LIMITS["promote"])
        if promote % number["chunk"]:
            raise refusal(
                f"tensor_core.{name}.promote is {promote!r}; it must be an integer number of chunks"
            )
    return MatrixUnit(**number, promote=int(promote))


def _weights(raw: dict[str, Any], compute: str) -> Weights:
    refuse_unknown(raw, "weights", Weights.__dataclass_fields__)
    format = choice_of("weights.format", raw.get("format", compute), WEIGHT_FORMATS)
    scale = choice_of("weights.scale", raw.get("scale", "none"), WEIGHT_SCALES)
    if scale != "none" and format not in SCALED_FORMATS:
        raise refusal(f"weights of format {format} have no scale", SCALED_FORMATS)
    if format in SCALED_FORMATS:
        able = _fitting(CODE_FORMATS[format], WEIGHT_LAYOUTS)
        able += ["none"] if format in FORMATS else []
        if scale not in able:
            raise refusal(f"{format} weights have no scale {scale!r}", able)
    scale_format = choice_of(
        "weights.scale_format", raw.get("scale_format", "float32"), SCALE_FORMATS
    )
    if scale_format != "float32" and (scale == "none" or LAYOUTS[scale].rule != "amax"):
        raise refusal(f"scales of {scale!r} are not stored in {scale_format}", ("float32",))
    rounding = choice_of("weights.rounding", raw.get("rounding", "nearest"), WEIGHT_ROUNDINGS)
    if scale != "none" and rounding != "nearest":
        raise refusal(f"the codes of weights with a scale are not rounded {rounding}", ("nearest",))
    applied = choice_of("weights.applied", raw.get("applied", "weights"), WEIGHTS_APPLIED)
    whole = scale in ("per_tensor", "per_channel")
    late = (
        scale != "none" and LAYOUTS[scale].rule != "nested" and (applied != "stored_sums" or whole)
    )
    if applied != "weights" and not late:
        raise refusal(
            f"weights.applied is {applied!r} and weights.scale {scale!r}: a scale for a whole"
            " channel or tensor may be multiplied with stored sums, one of a part of a channel with"
            " sums",
            ("weights",),
        )
    return Weights(format, scale, rounding, scale_format, applied)


def _fitting(form: CodeFormat, layouts: Iterable[str]) -> list[str]:
    """Return those layouts that a code format supports."""
    return [name for name in layouts if LAYOUTS[name].fits(form)]


def _activations(raw: dict[str, Any], compute: str) -> Activations:
    """Read the section `activations`; the compute format means no quantisation."""
    refuse_unknown(raw, "activations", Activations.__dataclass_fields__)
    format = raw.get("format", "none")
    format = "none" if format == compute else format
    if format in COMPUTE_FORMATS:
        raise refusal(
            f"activations.format is {format!r}, and compute is {compute!r}: activations that are"
            " not quantised have the compute format"
        )
    format = choice_of("activations.format", format, ACTIVATION_FORMATS)
    scale = choice_of("activations.scale", raw.get("scale", "none"), ACTIVATION_SCALES)
    if format == "none" and scale != "none":
        raise refusal("activations have a scale but no format", ACTIVATION_FORMATS[1:])
    if format != "none":
        form = CODE_FORMATS[format]
        able = _fitting(form, ACTIVATION_LAYOUTS)
        able += ["none"] if format in FORMATS else []
        able += ["static"] if form.static else []
        if scale not in able:
            raise refusal(f"{format} activations have no scale {scale!r}", able)
    return Activations(
        *(format, scale),
        *static_scales(raw, format, scale),
        *dynamic_limits(raw, format, scale),
    )


def _attention(
    base: Mapping[str, Any], given: Mapping[str, Any], compute: str, accumulate: str
) -> Attention:
    mine = mapping_of("attention", given.get("attention", {}))
    theirs = dict(base.get("attention", {}))
    refuse_unknown(mine, "attention", Attention.__dataclass_fields__)
    if "style" in mine and mine["style"] != theirs.get("style", "composed"):
        theirs = {}
    raw = {**theirs, **mine}
    style = choice_of("attention.style", raw.get("style", "composed"), STYLES)
    fused = style == "fused"
    exp_ulps = FUSED_EXP_ULPS if fused else COMPOSED_EXP_ULPS
    if FORMATS[compute].coarse:
        exp_ulps = raw.get("coarse_exp_ulps", exp_ulps)
    named = {"compute": compute, "accumulate": accumulate}

    def stored(key: str, default: str) -> str:
        value = raw.get(key, default)
        return choice_of(f"attention.{key}", named.get(value, value), FORMATS)

    return Attention(
        style=style,
        scores=stored("scores", accumulate if fused else compute),
        probabilities=stored("probabilities", compute),
        tile=count_of("attention.tile", raw.get("tile", SMALLEST_TILE), LARGEST_TILE),
        exp_ulps=count_of("attention.exp_ulps", raw.get("exp_ulps", exp_ulps), LARGEST_EXP_ULPS),
    )
