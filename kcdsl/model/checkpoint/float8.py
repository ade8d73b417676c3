"""Float8 weights of the methods `fp8` and `fbgemm_fp8`, with scales per block, tensor or row.

Sources of the rules: transformers (`integrations/finegrained_fp8.py`, `fbgemm_fp8.py`) and vLLM
(`quantization/fp8.py`); docs/reference/quantised-checkpoints.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kcdsl.model.checkpoint.quantised import (
    BLOCK,
    PLAIN,
    QuantisedWeight,
    Reader,
    Scheme,
    allow,
    matrix_of,
    need,
    of_blocks,
    unknown,
)


def fp8_scheme(config: Mapping[str, Any]) -> Scheme:
    """Return the storage format `fp8`: scales per block (DeepSeek) or per tensor (vLLM,
    transformers). Refuse (KC455) other variants."""
    allow(config, "fmt", ("e4m3", None), None)
    size = config.get("weight_block_size")
    if size is None:
        allow(config, "activation_scheme", ("dynamic", "static", None), None)
        return Scheme("fp8", "weight", ("weight_scale", "weight_scale_inv"), _decode_whole)
    allow(config, "activation_scheme", ("dynamic", None), None)
    if size != [BLOCK, BLOCK]:
        raise unknown("weight_block_size", size, ([BLOCK, BLOCK], None))
    return Scheme("fp8", "weight", ("weight_scale_inv",), _decode_blocked)


def fbgemm_scheme(config: Mapping[str, Any]) -> Scheme:
    """Return the storage format of FBGEMM: scales per row, and an upper limit of the dynamic scales
    of inputs. Refuse (KC455) a limit that is no number."""
    bound = config.get("activation_scale_ub", 1200.0)
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < math.inf:
        raise unknown("activation_scale_ub", bound, ("a positive number",))
    limit = float(torch.tensor(float(bound), dtype=torch.float32))

    def decode(read: Reader, base: str, kinds: Mapping[str, Any]) -> QuantisedWeight:
        return _decode_rows(read, base, kinds, limit)

    return Scheme("fbgemm_fp8", "weight", ("weight_scale", _UPPER), decode, limit=limit)


_UPPER = "input_scale_ub"
"""The tensor that repeats `activation_scale_ub` of the configuration of FBGEMM."""


def _decode_whole(read: Reader, base: str, kinds: Mapping[str, Any]) -> QuantisedWeight:
    """Return float8 codes times the scale of the tensor, which has one of two names."""
    parts = ("weight_scale", "weight_scale_inv")
    scales = [name for name in (f"{base}.{part}" for part in parts) if name in kinds]
    need(len(scales) == 1, f"{base}.weight", f"it has {len(scales)} scales")
    stored, scale = _float8(read, base, kinds, scales[0])
    need(scale.numel() == 1, f"{base}.weight", "its scale is not one number")
    spread = scale.reshape(1, 1).expand(*stored.shape)
    return matrix_of(stored * spread, "fp8_e4m3", "per_tensor", stored, scale)


def _decode_rows(
    read: Reader, base: str, kinds: Mapping[str, Any], limit: float
) -> QuantisedWeight:
    """Return float8 codes times the scales of their rows."""
    name = f"{base}.weight"
    stored, scale = _float8(read, base, kinds, f"{base}.weight_scale")
    rows = stored.shape[0]
    need(tuple(scale.shape) in ((rows,), (rows, 1)), name, "its scales are not those of rows")
    if f"{base}.{_UPPER}" in kinds:
        upper = read(f"{base}.{_UPPER}").to(torch.float32).reshape(-1).tolist()
        need(upper == [limit], name, f"its {_UPPER} is not that of the configuration")
    return matrix_of(stored * scale.reshape(rows, 1), "fp8_e4m3", "per_channel", stored, scale)


def _float8(read: Reader, base: str, kinds: Mapping[str, Any], scale: str) -> tuple[Tensor, Tensor]:
    """Return the codes of a matrix and their stored scales, as float32."""
    name, part = f"{base}.weight", scale.rpartition(".")[2]
    need(kinds[name] == "F8_E4M3", name, f"it is stored as {kinds[name]}")
    need(kinds.get(scale) in PLAIN, name, f"it has no {part} of a float format")
    stored = read(name).to(torch.float32)
    need(stored.dim() == 2, name, "it is no matrix")
    return stored, read(scale).to(torch.float32)


def _decode_blocked(read: Reader, base: str, kinds: Mapping[str, Any]) -> QuantisedWeight:
    """Return float8 codes times the scales of blocks of 128; the last blocks may be smaller."""
    stored, scale = _float8(read, base, kinds, f"{base}.weight_scale_inv")
    spread = of_blocks(scale, (stored.shape[0], stored.shape[1]), f"{base}.weight")
    return matrix_of(stored * spread, "fp8_e4m3", "block_128", stored, spread)
