"""Presets of numerics and matrix units, as tables (docs/reference/numerics.md).

The sources of all numbers are in docs/reference/numerics.md.
"""

from __future__ import annotations

from typing import Any

from kcdsl.model.numerics import MatrixUnit, TensorCore

COMPOSED_EXP_ULPS = 4
FUSED_EXP_ULPS = 32
FAST_EXP_ULPS = 1024
"""The cubic exponential of PyTorch's CPU flash kernel on bfloat16 and float16 (908 measured)."""
SMALLEST_TILE = 32
WHOLE_ROW = 1 << 20
_E4M3_PER_CHANNEL = {"format": "fp8_e4m3", "scale": "per_channel"}
_E4M3_PER_TENSOR = {"format": "fp8_e4m3", "scale": "per_tensor"}

_VLLM_LEAST = 1 / (448 * 512)
"""The least dynamic FP8 scale of vLLM (csrc/quantization/w8a8/fp8/common.cuh)."""

# `coarse_exp_ulps` replaces `exp_ulps` where compute is coarser than float32.
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

_HOPPER_16 = MatrixUnit(fraction_bits=25, chunk=16, result_bits=23)
_BLACKWELL_8 = MatrixUnit(fraction_bits=25, chunk=32, result_bits=23)
_AMPERE_16 = MatrixUnit(fraction_bits=24, chunk=8, result_bits=23)
TENSOR_CORES = {
    "hopper_fp8": TensorCore(MatrixUnit(13, 32, 13), _HOPPER_16),
    "hopper_fp8_promoted": TensorCore(MatrixUnit(13, 32, 13, promote=128), _HOPPER_16),
    "hopper_16": TensorCore(_HOPPER_16, _HOPPER_16),
    "ada_fp8": TensorCore(MatrixUnit(13, 16, 13), _AMPERE_16),
    "ampere_16": TensorCore(_AMPERE_16, _AMPERE_16),
    "blackwell_fp8": TensorCore(_BLACKWELL_8, _HOPPER_16),
}
"""Matrix units as published (docs/reference/numerics.md, section Tensor cores)."""
