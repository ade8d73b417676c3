"""Quantisation parameters that a checkpoint stores beside its matrices: codes of inputs, of cached
keys and values, their static scales, and limits of dynamic scales.

They do not change the numbers of a matrix. The numerics of the kernel repeat them and are compared
with the stored ones, so that a proof is about the scales that the kernel reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.checkpoint.activations import StatedCodes
from kcdsl.model.numerics.specification import Activations, KvCache, Numerics, linear_name

SCALES = ("input_scale", "activation_scale", "input_global_scale", "_weight_act_quant_scale")
"""Names of static scales; the third is stored as a reciprocal."""
ZERO_POINTS = ("input_zero_point", "_weight_act_quant_zero_point")
CACHES = {"k_scale": "keys", "v_scale": "values"}
"""Names of static cache scales beside a linear, as ModelOpt stores them."""
_OUTPUTS = {"k_proj": "keys", "v_proj": "values"}
"""Linears whose `output_scale` is a cache scale, as compressed-tensors stored it."""
_FLOATS = frozenset({"F32", "F16", "BF16"})
_SIGNED = frozenset({"I8", "I32", "I64"})


@dataclass(frozen=True, slots=True)
class StoredInputs:
    """The static quantiser of the input of a linear: one float32 scale, or one per channel, and the
    zero point as a signed code."""

    scales: tuple[float, ...]
    zero_point: int


def stored_inputs(
    read: Callable[[str], Tensor], base: str, kinds: Mapping[str, str]
) -> StoredInputs | None:
    """Return the static quantiser that is stored for the input of a matrix; None without one.

    Refuse (KC453) two quantisers, zero points without scales, and invalid scales.
    """
    scales = [name for name in (f"{base}.{part}" for part in SCALES) if name in kinds]
    zeros = [name for name in (f"{base}.{part}" for part in ZERO_POINTS) if name in kinds]
    if not scales and not zeros:
        return None
    one = len(scales) == 1 and len(zeros) <= 1
    stored = one and kinds[scales[0]] in _FLOATS and all(kinds[z] in _SIGNED for z in zeros)
    if not stored:
        raise _broken(base, "static scales and zero points of one kind")
    found = read(scales[0]).to(torch.float32).reshape(-1)
    if scales[0].endswith(".input_global_scale"):
        found = 1.0 / found
    points = {int(z) for name in zeros for z in read(name).reshape(-1).tolist()} or {0}
    if not found.numel() or not bool((torch.isfinite(found) & (found > 0)).all()):
        raise _broken(base, "positive static scales")
    if len(points) != 1:
        raise _broken(base, "one zero point")
    return StoredInputs(tuple(found.tolist()), points.pop())


def cache_scales(base: str) -> dict[str, str]:
    """Return the names of static cache scales beside a linear, each with "keys" or "values"."""
    own = _OUTPUTS.get(base.rpartition(".")[2])
    return CACHES if own is None else {**CACHES, "output_scale": own}


def refuse_other_cache(
    read: Callable[[str], Tensor], key: str, kinds: Mapping[str, str], stated: KvCache | None
) -> None:
    """Refuse (KC463) numerics whose scales of cached keys and values differ from those stored
    beside the linear with this weight, which computes the keys or values."""
    base = key.removesuffix(".weight")
    for part, side in cache_scales(base).items():
        if stated is None or f"{base}.{part}" not in kinds:
            continue
        if kinds[f"{base}.{part}"] not in _FLOATS:
            raise _broken(base, f"a static scale of the {side}, not of the type stored,")
        found = read(f"{base}.{part}").to(torch.float32).reshape(-1).tolist()
        by = stated.quantiser(side, key)
        scales = {scale for _, each in by.input_scale for scale in each} if by else set()
        if len(found) != 1 or scales != set(found):
            field = "key_scale" if side == "keys" else "value_scale"
            shown = found[0] if len(found) == 1 else f"{len(found)} numbers"
            raise refuse(
                codes.NUMERICS,
                f"the checkpoint of the inference kernel has the static scale {shown!r} for the"
                f" {side} of {key}, and the numerics state others",
                help="state it in numerics: `kv_cache: {scale: static, "
                f"{field}: {{{linear_name(key)}: {shown}}}}}`, or leave `kv_cache` out for a kernel"
                " that keeps them as they are",
            )


def _broken(base: str, what: str) -> Refusal:
    return refuse(
        codes.CHECKPOINT_TENSORS,
        f"the checkpoint of the inference kernel must store {what} of the input of {base}",
        help="quantise the model again with the library that its configuration names",
    )


def refuse_other_codes(
    key: str, inputs: StatedCodes | None, cache: StatedCodes | None, numerics: Numerics
) -> None:
    """Refuse (KC463) numerics whose codes or scale layout, for the inputs of the linear with this
    weight or for keys and values, differ from those that a checkpoint states.

    Numerics without quantised inputs are accepted: the kernel then uses quantised weights only.
    """
    for stated, what, field, quantised in (
        (inputs, f"the input of {key}", "activations", numerics.activations),
        (cache, "keys and values", "kv_cache", numerics.kv_cache),
    ):
        if stated is None or quantised is None or quantised.format == "none":
            continue
        if (quantised.format, quantised.scale) in stated.able:
            continue
        section = stated.section
        help = (
            "no numerics express such codes: "
            if section is None
            else (f"state them in numerics: `{field}: {{{section}}}`, or ")
        )
        left = "`kv_cache`" if field == "kv_cache" else "`weights` and `activations`"
        kept = "keeps them as they are" if field == "kv_cache" else "multiplies dequantised weights"
        raise refuse(
            codes.NUMERICS,
            f"the checkpoint of the inference kernel states {stated.said} for {what}, and the"
            f" numerics state {quantised.format} {quantised.scale}",
            help=f"{help}leave {left} out for a kernel that {kept}",
        )


def refuse_other_inputs(
    key: str, stored: StoredInputs | None, limit: float | None, stated: Activations
) -> None:
    """Refuse (KC463) numerics whose quantiser of the inputs of the linear with this weight differs
    from that of the checkpoint.

    Args:
        stored: the static quantiser that the checkpoint has.
        limit: the upper limit of magnitudes in dynamic scales, where the format has one.
    """
    if not stated.quantised:
        return
    if limit is not None and stated.amax_limit != limit:
        raise _other(key, f"dynamic scales of magnitudes up to {limit!r}", f"amax_limit: {limit!r}")
    if stored is None:
        return
    found = stated.calibrated(key)
    zero = 128 if found is None or not stated.codes.zero_point else found.zero_point
    same = found is not None and found.scales == stored.scales
    if same and zero == stored.zero_point + 128:
        return
    name = linear_name(key)
    scales = stored.scales[0] if len(stored.scales) == 1 else list(stored.scales)
    shown = f"{scales!r}" if len(stored.scales) <= 4 else f"{len(stored.scales)} numbers"
    point = f" and the zero point {stored.zero_point}" if stored.zero_point else ""
    raise _other(key, f"the static scale {shown}{point}", f"input_scale: {{{name}: {shown}}}")


def _other(key: str, what: str, field: str) -> Refusal:
    return refuse(
        codes.NUMERICS,
        f"the checkpoint of the inference kernel has {what} for the input of {key}, and the"
        " numerics state others",
        help=f"state it in numerics: `activations: {{{field}}}`, or leave `weights` and"
        " `activations` out for a kernel that multiplies dequantised weights",
    )
