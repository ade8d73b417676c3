"""Write quantised matrices with the program that defines their format, and how it reads them.

Run `python -m tests.support.foreign_vectors NAME` where the package NAME is installed; it writes
tests/support/vectors/NAME.safetensors. A matrix CASE lies as CASE.PART, as the program stores it,
and as CASE.expected, as the program dequantises it. The metadata of the file has the
quantisation configuration of each case under `config:CASE`. docs/reference/quantised-checkpoints.md
says with which versions the files of this repository were written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.quantised import rounded

HERE = Path(__file__).parent / "vectors"
Written = tuple[dict[str, Tensor], dict[str, str]]
"""Tensors and metadata of a file."""


def matrix(rows: int, columns: int, seed: int) -> Tensor:
    """Return a matrix whose rows and columns have different magnitudes."""
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return drawn * torch.linspace(0.2, 3.0, columns) * torch.linspace(1.0, 2.0, rows).unsqueeze(1)


def torchao() -> Written:
    """Weights of every class that is read, flattened by torchao's own support of safetensors.

    `Int4Tensor` needs the package mslk; its kernel runs on GPUs, so its numbers are formed here.
    """
    own: Any = import_module("torchao.quantization")
    support: Any = import_module("torchao.prototype.safetensors.safetensors_support")

    def integer(bits: int) -> Any:
        return getattr(torch, f"int{bits}")

    def intx(bits: int, **more: Any) -> Any:
        return own.IntxWeightOnlyConfig(weight_dtype=integer(bits), **more)

    asymmetric = own.MappingType.ASYMMETRIC
    cases: dict[str, tuple[Any, torch.dtype]] = {
        "float8_row": (own.Float8WeightOnlyConfig(), torch.bfloat16),
        "float8_e5m2": (own.Float8WeightOnlyConfig(torch.float8_e5m2), torch.float32),
        "int8_row": (own.Int8WeightOnlyConfig(), torch.bfloat16),
        "int8_group": (own.Int8WeightOnlyConfig(granularity=own.PerGroup(8)), torch.float32),
        "int8_tensor": (own.Int8WeightOnlyConfig(granularity=own.PerTensor()), torch.float32),
        "int8_dynamic": (own.Int8DynamicActivationInt8WeightConfig(), torch.float32),
        "int4_group": (intx(4, granularity=own.PerGroup(8)), torch.float32),
        "int4_row": (intx(4, granularity=own.PerAxis(0)), torch.bfloat16),
        "int4_asymmetric": (
            intx(4, granularity=own.PerGroup(16), mapping_type=asymmetric),
            torch.float32,
        ),
        "int3_group": (intx(3, granularity=own.PerGroup(8)), torch.float32),
        "int8_inputs_int4_weights": (
            own.Int8DynamicActivationIntxWeightConfig(
                weight_dtype=integer(4), weight_granularity=own.PerGroup(16)
            ),
            torch.float32,
        ),
    }
    state, expected = {}, {}
    for seed, (name, (config, kind)) in enumerate(cases.items()):
        module = torch.nn.Sequential(torch.nn.Linear(32, 16, bias=False, dtype=kind))
        module[0].weight.data = matrix(16, 32, seed).to(kind)
        own.quantize_(module, config)
        weight = module[0].weight.data
        state[f"{name}.weight"] = weight
        expected[f"{name}.expected"] = weight.dequantize().to(kind)
    for name, shape, granularity in (
        ("float8_tensor", (16, 32), own.PerTensor()),
        ("float8_group", (16, 32), own.PerBlock([1, 8])),
        ("float8_block", (256, 128), own.PerBlock([128, 128])),
    ):
        weight = own.Float8Tensor.from_hp(
            matrix(*shape, len(state)).to(torch.bfloat16), granularity=granularity
        )
        state[f"{name}.weight"] = weight
        expected[f"{name}.expected"] = weight.dequantize()
    for seed, kind in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        name = f"int4_zero_points_{str(kind).removeprefix('torch.')}"
        weight = own.Int4Tensor.from_hp(matrix(16, 64, 50 + seed).to(kind), [1, 32])
        state[f"{name}.weight"], expected[f"{name}.expected"] = weight, fused(weight)
    tensors, metadata = support.flatten_tensor_state_dict(state)
    names = sorted(name.removesuffix(".weight") for name in state)
    configs = {f"config:{name}": json.dumps({"quant_method": "torchao"}) for name in names}
    return {**tensors, **expected}, {**metadata, **configs}


def fused(weight: Any) -> Tensor:
    """Return q·s + z of an Int4Tensor, each exact and then rounded once to the type of s."""
    found = torch.empty(weight.shape, dtype=weight.scale.dtype)
    for out, row in enumerate(weight.qdata.tolist()):
        for place in range(2 * len(row)):
            code = (row[place // 2] >> 4 * (place % 2)) % 16
            group = place // weight.block_size[1]
            scale, zero = (
                Fraction(float(t[group, out])) for t in (weight.scale, weight.zero_point)
            )
            exact = (code - 16 * (code > 7)) * scale + zero
            found[out, place] = rounded(exact, found.dtype)
    return found


def groups_of(w: Tensor, width: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return scales and zero points [out, groups] of groups of inputs; no zero point is 0."""
    parts = w.reshape(w.shape[0], -1, width)
    low, high = parts.amin(-1).clamp_max(0), parts.amax(-1).clamp_min(0)
    scale = ((high - low) / (2**bits - 1)).half().float()
    return scale, (-low / scale).round().clamp(1, 2**bits - 1)


def gptqmodel() -> Written:
    """Linears packed by GPTQModel's kernel of PyTorch, in both of its storage formats."""
    linears: Any = import_module("gptqmodel.nn_modules.qlinear.torch")
    formats: Any = import_module("gptqmodel.utils.model")
    configs: Any = import_module("gptqmodel.quantization.config")
    tensors, metadata = {}, {}
    cases = {
        "gptq_4": (4, False, False),
        "gptq_4_act_order": (4, True, False),
        "gptq_8": (8, False, False),
        "gptq_2": (2, False, False),
        "gptq_v2_4": (4, False, True),
        "gptq_v2_4_act_order": (4, True, True),
    }
    for seed, (name, (bits, ordered, second)) in enumerate(cases.items()):
        w = matrix(32, 64, seed)
        groups = torch.arange(64) // 16
        groups = groups[torch.randperm(64, generator=torch.Generator().manual_seed(seed))]
        groups = groups if ordered else groups.sort().values
        scale, zero = groups_of(w[:, groups.argsort(stable=True)], 16, bits)
        linear = torch.nn.Linear(64, 32, bias=False)
        linear.weight.data = w
        packed = linears.TorchLinear(
            bits=bits, group_size=16, sym=False, desc_act=ordered, in_features=64, out_features=32
        )
        packed.pack_original(linear, scale, zero, groups.int())
        packed.post_init()
        parts = {
            part: getattr(packed, part).clone() for part in ("qweight", "qzeros", "scales", "g_idx")
        }
        packed.scales = packed.scales.float()
        tensors[f"{name}.expected"] = packed.dequantize_weight().T
        if not second:
            stated = configs.QuantizeConfig(bits=bits, group_size=16, desc_act=ordered)
            formats.convert_gptq_v2_to_v1_format_module(packed, stated)
            parts["qzeros"] = packed.qzeros
        tensors |= {f"{name}.{part}": one for part, one in parts.items()}
        form = {"checkpoint_format": "gptq_v2" if second else "gptq"}
        config = {"quant_method": "gptq", "bits": bits, "group_size": 16, "desc_act": ordered}
        metadata[f"config:{name}"] = json.dumps({**config, **form})
    return tensors, metadata


def autoawq() -> Written:
    """A linear that AutoAWQ quantised and packed for its GEMM kernel."""
    gemm: Any = import_module("awq.modules.linear.gemm")
    packing: Any = import_module("awq.utils.packing_utils")
    quantizer: Any = import_module("awq.quantize.quantizer").AwqQuantizer
    stated = SimpleNamespace(group_size=16, zero_point=True, w_bit=4)
    linear = torch.nn.Linear(64, 32, bias=False)
    linear.weight.data = matrix(32, 64, 20)
    _, scale, zero = quantizer.pseudo_quantize_tensor(stated, linear.weight.data)
    packed = gemm.WQLinear_GEMM.from_linear(linear, 4, 16, False, scale.T, zero.T)
    held = (packed.qweight, packed.qzeros, packed.scales)
    expected = packing.dequantize_gemm(*held[:2], packed.scales.float(), 4, 16).T
    config = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}
    names = ("awq_4.qweight", "awq_4.qzeros", "awq_4.scales")
    parts = dict(zip(names, held, strict=True))
    return {**parts, "awq_4.expected": expected}, {"config:awq_4": json.dumps(config)}


def modelopt() -> Written:
    """A linear of a model that ModelOpt exported, and one that its NVFP4 tensor packed."""
    quantization: Any = import_module("modelopt.torch.quantization")
    export: Any = import_module("modelopt.torch.export")
    reading: Any = import_module("modelopt.torch.export.quant_utils")
    fp4: Any = import_module("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor
    transformers: Any = import_module("transformers")
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=64, hidden_size=32, intermediate_size=48,
        num_hidden_layers=1, num_attention_heads=4,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    key = "model.layers.0.self_attn.q_proj"
    model.get_submodule(key).weight.data = matrix(32, 32, 30)
    stated = quantization.FP8_DEFAULT_CFG
    quantization.quantize(model, stated, lambda each: each(torch.arange(16)[None]))
    with TemporaryDirectory() as folder:
        export.export_hf_checkpoint(model, export_dir=folder)
        held = load_file(Path(folder) / "model.safetensors")
        told = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
    tensors = {f"fp8.{part}": held[f"{key}.{part}"] for part in ("weight", "weight_scale")}
    expected = reading.from_quantized_weight(
        tensors["fp8.weight"], tensors["fp8.weight_scale"], "fp8", torch.float32
    )
    packed, scale, whole = fp4.quantize(matrix(16, 64, 31), 16)
    read = packed.dequantize(torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})
    tensors |= {
        "fp8.expected": expected,
        "nvfp4.weight": packed._quantized_data,
        "nvfp4.weight_scale": scale,
        "nvfp4.weight_scale_2": whole,
        "nvfp4.expected": read,
    }
    for seed, (name, last) in enumerate({"fp8_pc_pt": 448, "int8_wo": 127}.items()):
        w = matrix(16, 32, 32 + seed)
        scale = w.abs().amax(-1) / last
        code = reading.to_quantized_weight(w, scale, name)
        rows, kind = (scale, name) if name == "int8_wo" else (scale[:, None], "fp8")
        read = reading.from_quantized_weight(code, rows, kind, torch.float32)
        parts = {"weight": code, "weight_scale": scale, "expected": read}
        tensors |= {f"{name}.{part}": one for part, one in parts.items()}
    w = matrix(16, 32, 34)
    scale = w.reshape(16, 2, 16).abs().amax(-1) / 7
    tensors["int4_awq.weight"] = reading.to_quantized_weight(w, scale, "int4_awq", None, 16)
    tensors["int4_awq.weight_scale"] = scale
    spread = scale.repeat_interleave(16, dim=1)  # ModelOpt cannot unpack its own format, so
    tensors["int4_awq.expected"] = (w / spread).round().clamp(-8, 7) * spread
    names: dict[str, dict[str, Any]] = {
        "nvfp4": {"quant_algo": "NVFP4", "group_size": 16},
        "fp8_pc_pt": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "int8_wo": {"quant_algo": "W8A16"},
        "int4_awq": {"quant_algo": "W4A16_AWQ", "group_size": 16, "has_zero_point": False},
    }
    others = {
        f"config:{name}": json.dumps({"quant_method": "modelopt", **one})
        for name, one in names.items()
    }
    return tensors, {"config:fp8": json.dumps(told), **others}


def transformers() -> Written:
    """Float8 in blocks of 128 and of one scale, as transformers writes `quant_method: fp8`."""
    own: Any = import_module("transformers.integrations.finegrained_fp8")
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    cases = {"fp8_block": ((256, 128), 40, (128, 128)), "fp8_tensor": ((16, 32), 41, None)}
    for name, (shape, seed, block) in cases.items():
        stated = import_module("transformers").FineGrainedFP8Config(weight_block_size=block)
        holder = SimpleNamespace(quantization_config=stated)
        parts = own.Fp8Quantize(holder).convert({f"{name}.weight": matrix(*shape, seed)})
        held = (parts[f"{name}.{part}"] for part in ("weight", "weight_scale_inv"))
        tensors |= {**parts, f"{name}.expected": own.Fp8Dequantize(holder)._dequantize_one(*held)}
        told = {**stated.to_dict(), "weight_block_size": None if block is None else list(block)}
        metadata[f"config:{name}"] = json.dumps(told)
    return tensors, metadata


PROGRAMS: dict[str, Callable[[], Written]] = {
    "autoawq": autoawq,
    "gptqmodel": gptqmodel,
    "modelopt": modelopt,
    "torchao": torchao,
    "transformers": transformers,
}


def main() -> None:
    """Write the vectors of the packages that are named."""
    for name in sys.argv[1:]:
        tensors, metadata = PROGRAMS[name]()
        whole = {key: one.contiguous() for key, one in tensors.items()}
        save_file(whole, HERE / f"{name}.safetensors", metadata)


if __name__ == "__main__":
    main()
