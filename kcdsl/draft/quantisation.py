"""The inference kernel of a draft, from the configuration of quantised weights.

Each method of quantisation is read by name. Parts of a configuration that no numerics express, or
no kernel of this machine runs, are listed with the kernel and not written into the numerics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

from kcdsl.diagnostics import Refusal
from kcdsl.ir.terms import KernelRef
from kcdsl.model.adapters import ADAPTERS, find_adapter, refuse_unserved
from kcdsl.model.presets import resolve

Section = dict[str, Any]

_ORDER = (
    *("torch.sdpa", "torch.eager", "torch.scaled_mm", "torchao.int8_dynamic"),
    *("torchao.int8_weight_only", "torchao.int4_weight_only"),
)
"""Kernels for a draft; the first one that supports its numerics is used."""
_HF = ("hf.transformers.sdpa", "torch.sdpa", "torch.eager")


@dataclass(frozen=True, slots=True)
class DraftKernel:
    """A kernel of a draft: its adapter and its numerics, and the parts that they omit."""

    run: str
    numerics: Section
    says: str
    """Its description in a comment."""
    unmet: tuple[str, ...] = ()
    checkpoint: str | None = None
    """The path in the contract of the weights that it reads instead of those of the model."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """The quantisation of weights, activations and the KV cache in a configuration."""

    says: str
    weights: Section
    activations: Section = field(default_factory=dict)
    kv_cache: Section = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    """Names of linears that are not quantised; `*` matches any text."""
    unmet: tuple[str, ...] = ()


def training_kernel(compute: str, architecture: str) -> DraftKernel:
    """Return the kernel that trained a model: composed attention in its format."""
    run = "hf.transformers" if architecture == "hf" else "torch.eager"
    return DraftKernel(run, {"preset": "torch-eager", "compute": compute}, compute)


def serving_kernel(
    compute: str,
    architecture: str,
    config: Mapping[str, Any] | None,
    linears: Iterable[str],
    *,
    capped: bool = False,
) -> DraftKernel:
    """Return the kernel that serves a model, by the configuration of its quantised weights.

    `linears` are the names of weights in the checkpoint; `capped`: the model caps its attention
    scores, which fused kernels of PyTorch do not support. Without a configuration it is fused
    attention in the format of training. A configuration of an unknown method is named in `unmet`.
    """
    read = None if config is None else read_quantisation(config)
    order = _order(architecture, capped)
    base: Section = {"compute": compute}
    order = _order(architecture, capped)
    kept: dict[str, Section] = {}
    said: tuple[str, ...] = ()
    if read is not None:
        said = read.unmet
        base |= {"weights": read.weights} if read.weights else {}
        if read.activations:
            base["activations"] = read.activations
        if read.kv_cache:
            base["kv_cache"] = read.kv_cache
        kept = {name: _plain(compute) for name in _present(read.kept, linears)}
        if kept and read.weights:
            base["overrides"] = kept
    what = compute + (f", {read.says}" if read is not None else "")
    for dropped in _ATTEMPTS:
        left = [key for key in dropped if key in base]
        if len(left) < len(dropped):
            continue
        numerics = {key: value for key, value in base.items() if key not in dropped}
        if "activations" in dropped and "overrides" in numerics:
            parts = {name: {"weights": part["weights"]} for name, part in kept.items()}
            numerics["overrides"] = parts
        found = _served(numerics, order)
        if found is not None:
            lost = (_DROPPED[key].format(_short(base[key])) for key in left)
            return DraftKernel(found[0], found[1], what, (*said, *lost))
    found = _served({"compute": compute}, order)
    assert found is not None
    plain = "no kernel here runs the quantised weights, so this one runs plain ones"
    return DraftKernel(found[0], found[1], compute, (*said, plain))


def stored_kernel(
    compute: str, architecture: str, config: Mapping[str, Any], checkpoint: str, *, capped: bool
) -> DraftKernel | None:
    """Return the kernel that reads the stored quantised weights and dequantises them before
    products; None for an unsupported method."""
    method = str(config.get("quant_method", "")).lower()
    if method not in _STORED:
        return None
    if method == "torchao" and _packed(config):
        return None
    read = read_quantisation(config)
    found = _served({"compute": compute}, _order(architecture, capped)[:2])
    if found is None or architecture == "hf":
        return None
    wanted = {"activations": read.activations, "kv_cache": read.kv_cache}
    lost = tuple(_DROPPED[key].format(_short(part)) for key, part in wanted.items() if part)
    return DraftKernel(found[0], found[1], f"{compute}, stored codes", lost, checkpoint)


def _order(architecture: str, capped: bool) -> tuple[str, ...]:
    order: tuple[str, ...] = _HF if architecture == "hf" else _ORDER
    if capped:
        order = tuple(run for run in order if ADAPTERS[run].style != "fused")
    return order


_STORED = frozenset(
    {"awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt", "torchao"}
)
"""Methods whose codes and scales are read from the checkpoint."""
_DROPPED = {
    "kv_cache": "the KV cache in {}, which no local kernel keeps",
    "overrides": "linears that stay as they are ({}): the local kernel quantises all alike",
    "activations": "activations in {} as configured, which no local kernel quantises",
}
_ATTEMPTS: tuple[tuple[str, ...], ...] = (
    *((), ("kv_cache",), ("overrides",), ("kv_cache", "overrides")),
    *(("activations",), ("kv_cache", "activations")),
)
"""Sections to omit until a kernel is found, in order."""


def _short(section: Section) -> str:
    return str(section.get("format") or ", ".join(section))


def _plain(compute: str) -> Section:
    return {"weights": {"format": compute}, "activations": {"format": "none"}}


def _served(numerics: Section, order: Iterable[str]) -> tuple[str, Section] | None:
    """Return the first adapter that runs here and supports the numerics, with its preset."""
    for run in order:
        adapter = ADAPTERS[run]
        if any(find_spec(name) is None for name in adapter.library[1:2]):
            continue
        stated = {"preset": adapter.presets[0], **numerics}
        if stated["preset"] == "torch-scaled-mm":
            stated.pop("preset")
            stated = {"preset": "fp8-w8a8-per-channel", **stated}
        try:
            resolved = resolve(KernelRef(run, _pairs(stated)))
            refuse_unserved(run, find_adapter(run), resolved, "cpu")
        except Refusal:
            continue
        return run, stated
    return None


def _pairs(section: Mapping[str, Any]) -> tuple[tuple[str, object], ...]:
    return tuple(
        sorted((k, _pairs(v) if isinstance(v, Mapping) else v) for k, v in section.items())
    )


def _present(names: Iterable[str], linears: Iterable[str]) -> Iterator[str]:
    """Yield the names that match a linear of the checkpoint."""
    known = [name.removesuffix(".weight") for name in linears if name.endswith(".weight")]
    for name in dict.fromkeys(names):
        if any(fnmatchcase(one, name) for one in known):
            yield name


# --- methods --------------------------------------------------------------------------------------


def read_quantisation(config: Mapping[str, Any]) -> Quantised:
    """Return the quantisation of a quantization_config; an unknown method is reported and quantises
    nothing."""
    method = str(config.get("quant_method") or config.get("quantization_method") or "").lower()
    reader = _METHODS.get(method)
    if reader is None:
        known = ", ".join(_METHODS)
        named = f"the method {method!r}" if method else "a configuration without quant_method"
        return Quantised("plain weights", {}, unmet=(f"{named}; known: {known}",))
    return reader(config)


def _fine_grained(config: Mapping[str, Any]) -> Quantised:
    """Read `fp8` of transformers: E4M3 in blocks or per tensor."""
    blocks, power = config.get("weight_block_size"), config.get("scale_fmt") == "ue8m0"
    kept = _names(config.get("modules_to_not_convert"))
    if blocks is None:
        return Quantised(
            "FP8 per tensor",
            {"format": "fp8_e4m3", "scale": "per_tensor"},
            {"format": "fp8_e4m3", "scale": "per_tensor"},
            kept=kept,
        )
    if blocks != [128, 128]:
        return Quantised("plain weights", {}, unmet=(f"FP8 weights in blocks of {blocks}",))
    end = "_e8m0" if power else ""
    return Quantised(
        "FP8 in blocks of 128",
        {"format": "fp8_e4m3", "scale": f"block_128{end}"},
        {"format": "fp8_e4m3", "scale": f"group_128{end}"},
        kept=kept,
    )


def _fbgemm(config: Mapping[str, Any]) -> Quantised:
    limit = config.get("activation_scale_ub")
    return Quantised(
        "FP8 per channel",
        {"format": "fp8_e4m3", "scale": "per_channel"},
        {"format": "fp8_e4m3", "scale": "per_token"},
        kept=_names(config.get("modules_to_not_convert")),
        unmet=() if limit is None else (f"the upper bound {limit} of scales of activations",),
    )


def _compressed(config: Mapping[str, Any]) -> Quantised:
    """Read compressed-tensors: one group of schemes for all linears."""
    groups = config.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    if not isinstance(groups, dict) or not isinstance(group, dict):
        return Quantised("plain weights", {}, unmet=("a configuration without config_groups",))
    unmet = [f"the group {other} of config_groups" for other in list(groups)[1:]]
    weights, wrong = _scheme(group.get("weights"), activation=False)
    unmet += [f"weights: {wrong}"] if wrong else []
    activations, wrong = _scheme(group.get("input_activations"), activation=True)
    unmet += [f"activations: {wrong}"] if wrong else []
    cache, scheme = {}, config.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        if (scheme.get("num_bits"), scheme.get("type")) == (8, "float"):
            cache = {
                "format": "fp8_e4m3",
                "scale": "static",
                "key_scale": 1.0,
                "value_scale": 1.0,
            }
        else:
            unmet.append("its scheme of the KV cache")
    said = f"{weights['format']} {weights['scale']}" if weights else "plain weights"
    kept = _names(config.get("ignore"))
    return Quantised(said, weights, activations, cache, kept, tuple(unmet))


def _scheme(raw: Any, *, activation: bool) -> tuple[Section, str | None]:
    """Return the section of one scheme of compressed-tensors, and its unsupported part."""
    if not isinstance(raw, dict):
        return {}, None
    bits, kind, strategy = raw.get("num_bits"), raw.get("type", "int"), raw.get("strategy")
    size = raw.get("group_size")
    said = f"{bits}-bit {kind} by {strategy}" + (f" of {size}" if size not in (None, -1) else "")
    if activation and raw.get("dynamic") is False:
        return {}, f"{said} with stored scales"
    if (kind, bits) == ("float", 4) and strategy == "tensor_group":
        return {"format": "fp4_e2m1", "scale": "nvfp4"}, None
    scale = {
        "tensor": "per_tensor",
        "channel": "per_channel",
        "token": "per_token",
        "group": f"group_{size}",
        "block": "block_128" if raw.get("block_structure") in ([128, 128], "128x128") else "",
    }.get(str(strategy), "")
    symmetric = raw.get("symmetric", True)
    formats = {("float", 8): "fp8_e4m3", ("int", 8): "int8_full", ("int", 4): "int4_full"}
    form = formats.get((str(kind), bits if isinstance(bits, int) else 0))
    if (kind, bits, symmetric) == ("int", 4, False):
        form = "uint4"
    elif not symmetric:
        return {}, f"{said}, asymmetric"
    if form is None or not scale:
        return {}, said
    return {"format": form, "scale": scale}, None


def _gptq(config: Mapping[str, Any]) -> Quantised:
    bits, size = config.get("bits"), config.get("group_size", -1)
    scale = "per_channel" if size in (-1, None) else f"group_{size}"
    form = "int4_full" if config.get("sym", True) else "uint4"
    unmet = ["the codes that GPTQ chose: weights are rounded to the nearest code here"]
    if config.get("desc_act"):
        unmet.append("groups in the order of activations (desc_act)")
    if bits != 4:
        return Quantised("plain weights", {}, unmet=(f"GPTQ with {bits} bits",))
    kept = ("lm_head",) if not config.get("lm_head") else ()
    return Quantised(
        f"GPTQ 4 bits {scale}", {"format": form, "scale": scale}, {}, {}, kept, tuple(unmet)
    )


def _awq(config: Mapping[str, Any]) -> Quantised:
    bits = config.get("bits", config.get("w_bit"))
    size = config.get("group_size", config.get("q_group_size", 128))
    if bits != 4:
        return Quantised("plain weights", {}, unmet=(f"AWQ with {bits} bits",))
    form = "uint4" if config.get("zero_point", True) else "int4_full"
    return Quantised(
        f"AWQ 4 bits in groups of {size}",
        {"format": form, "scale": f"group_{size}", "scale_format": "float16"},
        kept=("lm_head", *_names(config.get("modules_to_not_convert"))),
        unmet=("the channels that AWQ scaled: weights are those of the checkpoint here",),
    )


_MODELOPT: dict[str, tuple[str, Section, Section]] = {
    "FP8": (
        "FP8 per tensor",
        {"format": "fp8_e4m3", "scale": "per_tensor"},
        {"format": "fp8_e4m3", "scale": "per_tensor"},
    ),
    "FP8_PER_CHANNEL_PER_TOKEN": (
        "FP8 per channel",
        {"format": "fp8_e4m3", "scale": "per_channel"},
        {"format": "fp8_e4m3", "scale": "per_token"},
    ),
    "NVFP4": (
        "NVFP4",
        {"format": "fp4_e2m1", "scale": "nvfp4"},
        {"format": "fp4_e2m1", "scale": "nvfp4"},
    ),
    "W8A16": ("INT8 weights", {"format": "int8_full", "scale": "per_channel"}, {}),
    "W4A16_AWQ": ("4 bits in groups of 128", {"format": "int4_full", "scale": "group_128"}, {}),
}


def _modelopt(config: Mapping[str, Any]) -> Quantised:
    algorithm = str(config.get("quant_algo", ""))
    if algorithm not in _MODELOPT:
        return Quantised("plain weights", {}, unmet=(f"the algorithm {algorithm!r} of ModelOpt",))
    said, weights, activations = _MODELOPT[algorithm]
    cache: Section = {}
    if config.get("kv_cache_quant_algo") == "FP8":
        cache = {"format": "fp8_e4m3", "scale": "static", "key_scale": 1.0, "value_scale": 1.0}
    kept = _names(config.get("exclude_modules")) + _names(config.get("ignore"))
    unmet = ("stored scales of activations: they are formed from each tensor here",)
    return Quantised(said, weights, activations, cache, kept, unmet if algorithm == "FP8" else ())


_TORCHAO: dict[str, tuple[str, Section, Section]] = {
    "Float8WeightOnlyConfig": (
        "FP8 weights",
        {"format": "fp8_e4m3", "scale": "per_channel"},
        {},
    ),
    "Float8DynamicActivationFloat8WeightConfig": (
        "FP8 per tensor",
        {"format": "fp8_e4m3", "scale": "per_tensor"},
        {"format": "fp8_e4m3", "scale": "per_tensor"},
    ),
    "Int8WeightOnlyConfig": ("INT8 weights", {"format": "int8_full", "scale": "per_channel"}, {}),
    "Int8DynamicActivationInt8WeightConfig": (
        "INT8 per channel",
        {"format": "int8_full", "scale": "per_channel"},
        {"format": "int8_full", "scale": "per_token"},
    ),
}


def _packed(config: Mapping[str, Any]) -> bool:
    """Return whether torchao packs weights in a kernel-specific order, which is not supported."""
    name = _torchao_kind(config)
    if name == "Int4WeightOnlyConfig":
        return _torchao_field(config, "int4_packing_format", "plain") != "PLAIN"
    return name == "Float8DynamicActivationInt4WeightConfig"


def _torchao_field(config: Mapping[str, Any], name: str, default: str) -> str:
    """Return a field of a torchao configuration, a string or enumeration member, in upper case."""
    kind = config.get("quant_type")
    inner = kind.get("default", kind) if isinstance(kind, dict) else {}
    data = inner.get("_data") if isinstance(inner, dict) else None
    found = data.get(name, default) if isinstance(data, dict) else default
    found = found.get("_data") if isinstance(found, dict) else found
    return str(found).upper()


def _torchao_kind(config: Mapping[str, Any]) -> str:
    kind = config.get("quant_type")
    inner = kind.get("default", kind) if isinstance(kind, dict) else {}
    return str(inner.get("_type", kind)) if isinstance(inner, dict) else str(kind)


def _torchao(config: Mapping[str, Any]) -> Quantised:
    name = _torchao_kind(config)
    if name not in _TORCHAO:
        return Quantised("plain weights", {}, unmet=(f"the scheme {name!r} of torchao",))
    said, weights, activations = _TORCHAO[name]
    kept = _names(config.get("modules_to_not_convert"))
    kept += () if config.get("include_input_output_embeddings") else ("lm_head",)
    return Quantised(said, weights, activations, kept=kept)


def _names(raw: Any) -> tuple[str, ...]:
    """Return patterns with `*` for any text, from names and regular expressions `re:…`."""
    if not isinstance(raw, list):
        return ()
    found = []
    for name in raw:
        text = str(name)
        if text.startswith("re:"):
            text = text.removeprefix("re:").replace(".*", "*").replace("\\.", ".").rstrip("$")
        found.append(text)
    return tuple(found)


_METHODS: dict[str, Callable[[Mapping[str, Any]], Quantised]] = {
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fbgemm_fp8": _fbgemm,
    "fp8": _fine_grained,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "torchao": _torchao,
}
