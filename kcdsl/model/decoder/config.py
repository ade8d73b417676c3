"""The configuration of a decoder: everything that its forward pass depends on.

Needs no tensor library, so that configurations can be read without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kcdsl.model.configuration import LARGEST_DEPTH, Fields, family_of

LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotary embedding: `kind` is the form of scaling, `scaling` its parameters by name.

    `factors` are the divisors of the frequencies, one per pair (longrope).
    """

    theta: float
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts in place of one feed-forward network, in the layers `layers`.

    Each position uses `chosen` of the `experts` networks of width `inner_width`, those with the
    largest router logits, and takes a weighted sum of their results. The weights are the softmax
    over the chosen experts if `renormalised`, else over all experts. With `shared_width` the result
    of one more network is always added, times the sigmoid of a gate of its own.
    """

    experts: int
    chosen: int
    inner_width: int
    renormalised: bool
    layers: tuple[bool, ...]
    shared_width: int | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A form of the decoder.

    `windows` and `rotations` have an entry for each layer; None is full attention, or no rotary
    embedding. `norms` is the place of the norms of a sub-layer: before it, after it (before
    the residual is added), or both. `offset_gain`: norms multiply with 1 + weight. `head_norm`:
    queries and keys are normalised, each head by itself or all heads together. `fused`: one matrix
    holds the query, key and value maps, and one the gate and up maps. `score_cap` and `logit_cap`
    bound scores and logits by cap * tanh(x / cap).
    """

    vocabulary: int
    width: int
    inner_width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    eps: float
    positions: int
    tied: bool
    windows: tuple[int | None, ...]
    rotations: tuple[Rotation | None, ...]
    score_scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norms: Literal["before", "after", "around"] = "before"
    offset_gain: bool = False
    head_norm: Literal["", "head", "width"] = ""
    fused: bool = False
    score_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float | None = None
    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    logit_divisor: float = 1.0
    mixture: Mixture | None = None


def read_common(
    architecture: str, raw: Mapping[str, Any], *, eps: float = 1e-6, tied: bool = False
) -> dict[str, Any]:
    """Return the fields of `DecoderConfig` that all forms read in the same way.

    `eps` and `tied` are defaults of the family. Raises Refusal (KC455) for keys that no family of
    the architecture has, and for values that the decoder does not implement.
    """
    null = family_of(architecture, raw).null
    f = Fields(raw, architecture)
    heads, width = f.count("num_attention_heads"), f.count("hidden_size")
    layers = f.count("num_hidden_layers", most=LARGEST_DEPTH)
    kv_heads = f.count("num_key_value_heads", heads, null="num_key_value_heads" in null)
    head_width = f.count("head_dim", max(1, width // heads), null="head_dim" in null)
    f.check(heads % kv_heads == 0, "num_attention_heads is no multiple of num_key_value_heads")
    f.check(head_width % 2 == 0, "head_dim must be even for RoPE")
    f.check(
        raw.get("head_dim") is not None or width % heads == 0,
        "hidden_size is no multiple of num_attention_heads",
    )
    positions = f.count("max_position_embeddings", 2048)
    return {
        "vocabulary": f.count("vocab_size"),
        "width": width,
        "inner_width": f.count("intermediate_size"),
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_width": head_width,
        "eps": f.number("rms_norm_eps", eps),
        "positions": positions,
        "tied": f.flag("tie_word_embeddings", tied),
        "windows": (None,) * layers,
        "rotations": (None,) * layers,
        "score_scale": 1.0 / math.sqrt(head_width),
    }


# --- attention windows ----------------------------------------------------------------------------


def windows_of(
    architecture: str, raw: Mapping[str, Any], layers: int, otherwise: Sequence[str]
) -> tuple[int | None, ...]:
    """Return the attention window of each layer, by `layer_types` or else by `otherwise`.

    Refuse a list of another length, and a sliding layer without a window.
    """
    f = Fields(raw, architecture)
    kinds = f.kinds("layer_types", LAYER_KINDS) or tuple(otherwise)
    f.check(len(kinds) == layers, f"'layer_types' has {len(kinds)} entries for {layers} layers")
    if "sliding_attention" not in kinds:
        return (None,) * layers
    f.check(raw.get("sliding_window") is not None, "the field 'sliding_window' is missing")
    window = f.count("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def optional_windows(
    architecture: str, raw: Mapping[str, Any], layers: int
) -> tuple[int | None, ...]:
    """Return the windows of a family with `use_sliding_window`: the layers from
    `max_window_layers` on have one, unless `layer_types` states otherwise.

    Refuse sliding layers where no window is used.
    """
    f = Fields(raw, architecture)
    used = f.flag("use_sliding_window", False) and raw.get("sliding_window") is not None
    first = f.count("max_window_layers", 28, least=0)
    usual = [LAYER_KINDS[used and i >= first] for i in range(layers)]
    found = windows_of(architecture, raw, layers, usual)
    f.check(
        used or not any(found), "'layer_types' has sliding layers, and 'use_sliding_window' is off"
    )
    return found


# --- mixtures of experts --------------------------------------------------------------------------


def mixtral_mixture(
    architecture: str, raw: Mapping[str, Any], common: Mapping[str, Any]
) -> Mixture:
    """Return the mixture of every layer of Mixtral. Refuse more chosen experts than there are."""
    f = Fields(raw, architecture)
    found = _counts(f, "num_local_experts")
    return Mixture(*found, common["inner_width"], True, (True,) * common["layers"])


def qwen_mixture(
    architecture: str, raw: Mapping[str, Any], layers: int, *, shared: bool = False
) -> Mixture | None:
    """Return the mixture of a Qwen-MoE, None where no layer has one; `shared`: with a network that
    all positions use. Refuse inconsistent counts and layer numbers out of range."""
    f = Fields(raw, architecture)
    names = [n for n in ("num_experts", "num_local_experts") if n in raw]
    f.check(len(names) == 1, "'num_experts' is missing, or stated under two names")
    step, dense = f.count("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    whole = isinstance(dense, list) and all(type(i) is int and 0 <= i < layers for i in dense)
    f.check(whole, f"'mlp_only_layers' must be a list of numbers of layers, not {dense!r}")
    mixed = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    if not any(mixed):
        return None
    return Mixture(
        *_counts(f, names[0]),
        f.count("moe_intermediate_size"),
        f.flag("norm_topk_prob", False),
        mixed,
        f.count("shared_expert_intermediate_size") if shared else None,
    )


def _counts(f: Fields, name: str) -> tuple[int, int]:
    experts, chosen = f.count(name), f.count("num_experts_per_tok")
    f.check(chosen <= experts, f"'num_experts_per_tok' is {chosen}, of {experts} experts")
    return experts, chosen


# --- rotary embeddings ----------------------------------------------------------------------------


def rotation_of(
    architecture: str,
    raw: Mapping[str, Any],
    config: Mapping[str, Any],
    theta: float = 10000.0,
) -> Rotation:
    """Return the rotation of a configuration that has only one; `theta` is the default base.

    `config` has the common fields. Refuse numbers that are missing or out of range.
    """
    f = Fields(raw, architecture)
    table = f.mapping("rope_parameters") or f.mapping("rope_scaling")
    return scaled_rotation(architecture, table, config, f.number("rope_theta", theta))


def scaled_rotation(
    architecture: str, table: Mapping[str, Any], config: Mapping[str, Any], theta: float
) -> Rotation:
    """Return the rotation of one object of RoPE parameters; `theta` is the base if it has none."""
    kind = str(table.get("rope_type", table.get("type", "default")))
    f = Fields(table, f"{architecture} RoPE")
    base = f.number("rope_theta", theta)
    f.check(base > 1, "'rope_theta' must be greater than 1")
    match kind:
        case "linear" | "llama3":
            return Rotation(base, kind, _numbers(f, table, kind))
        case "yarn":
            return Rotation(base, kind, _yarn(f, table))
        case "longrope" | "su":
            return _longrope(f, table, config, base)
        case _:
            return Rotation(base)


_NEEDED = {
    "linear": ("factor",),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
}  # fmt: skip


def _numbers(f: Fields, table: Mapping[str, Any], kind: str) -> tuple[tuple[str, float], ...]:
    for name in _NEEDED[kind]:
        f.check(name in table, f"the field {name!r} is missing")
    found = {name: f.number(name, 1.0) for name in _NEEDED[kind]}
    if kind == "llama3":
        ordered = found["low_freq_factor"] < found["high_freq_factor"]
        f.check(ordered, "'low_freq_factor' must be less than 'high_freq_factor'")
    return tuple(sorted(found.items()))


def _yarn(f: Fields, table: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Return factor, original length, both limits of turns, and the multiplier of the tables."""
    for name in ("factor", "original_max_position_embeddings"):
        f.check(table.get(name) is not None, f"the field {name!r} is missing")
    factor = f.number("factor", 1.0)
    fast, slow = f.optional("beta_fast") or 32.0, f.optional("beta_slow") or 1.0
    f.check(slow < fast, "'beta_slow' must be less than 'beta_fast'")

    def grown(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    stated = table.get("attention_factor")
    scales = [table.get(name) for name in ("mscale", "mscale_all_dim")]
    if stated is not None:
        attention = f.number("attention_factor", 1.0)
    elif all(scales):
        one, all_ = (f.number(name, 1.0) for name in ("mscale", "mscale_all_dim"))
        attention = grown(one) / grown(all_)
    else:
        f.check(not any(scales), "'mscale' and 'mscale_all_dim' are stated together or not at all")
        attention = grown(1.0)
    found = {
        "factor": factor,
        "original": float(f.count("original_max_position_embeddings")),
        "fast": fast,
        "slow": slow,
        "attention": attention,
        "truncate": float(f.flag("truncate", True)),
    }
    return tuple(sorted(found.items()))


def _longrope(
    f: Fields, table: Mapping[str, Any], config: Mapping[str, Any], base: float
) -> Rotation:
    """Return the rotation of sequences up to the original length, which divides frequencies by
    `short_factor`; longer sequences are not covered."""
    original = f.count("original_max_position_embeddings")
    for name in ("short_factor", "long_factor"):
        divisors = table.get(name)
        f.check(
            isinstance(divisors, list)
            and len(divisors) == config["head_width"] // 2
            and all(isinstance(d, int | float) and not isinstance(d, bool) for d in divisors)
            and all(0 < d < math.inf for d in divisors),
            f"{name!r} must be a list of {config['head_width'] // 2} positive numbers",
        )
    factor = f.optional("factor") or config["positions"] / original
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    found = {"attention": f.optional("attention_factor") or usual, "original": float(original)}
    return Rotation(
        base, "longrope", tuple(sorted(found.items())), tuple(map(float, table["short_factor"]))
    )


def canonical_key(key: str) -> str | None:
    """Return the module's name for a checkpoint key; None for a key that carries no weights."""
    return None if key.endswith("rotary_emb.inv_freq") else key


def mixtral_key(key: str) -> str | None:
    """Return the module's name for a checkpoint key, as `canonical_key` does, for the expert names
    of Mixtral."""
    lead, found, rest = key.partition(".block_sparse_moe.")
    if not found:
        return canonical_key(key)
    *path, part, last = rest.split(".")
    return ".".join((lead, "mlp", *path, _MIXTRAL_PARTS.get(part, part), last))


def name_in_mixtral(name: str) -> str:
    """Return the checkpoint key of a name of the module: the inverse of `mixtral_key`."""
    lead, found, rest = name.partition(".mlp.")
    if not found:
        return name
    *path, part, last = rest.split(".")
    stored = {own: key for key, own in _MIXTRAL_PARTS.items()}
    return ".".join((lead, "block_sparse_moe", *path, stored.get(part, part), last))


_MIXTRAL_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
