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
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HERE = Path(__file__).parent / "vectors"
Written = tuple[dict[str, Tensor], dict[str, str]]
"""Tensors and metadata of a file."""


def matrix(rows: int, columns: int, seed: int) -> Tensor:
    """Return a matrix whose rows and columns have magnitudes of their own."""
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return drawn * torch.linspace(0.2, 3.0, columns) * torch.linspace(1.0, 2.0, rows).unsqueeze(1)


def torchao() -> Written:
    """Weights of every class that is read, flattened by torchao's own support of safetensors."""
    own: Any = import_module("torchao.quantization")
    support: Any = import_module("torchao.prototype.safetensors.safetensors_support")

    def intx(bits: int, **more: Any) -> Any:
        return own.IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), **more)

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
                weight_dtype=torch.int4, weight_granularity=own.PerGroup(16)
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
    tensors, metadata = support.flatten_tensor_state_dict(state)
    names = sorted(name.removesuffix(".weight") for name in state)
    configs = {f"config:{name}": json.dumps({"quant_method": "torchao"}) for name in names}
    return {**tensors, **expected}, {**metadata, **configs}


PROGRAMS: dict[str, Callable[[], Written]] = {"torchao": torchao}


def main() -> None:
    """Write the vectors of the packages that are named."""
    for name in sys.argv[1:]:
        tensors, metadata = PROGRAMS[name]()
        whole = {key: one.contiguous() for key, one in tensors.items()}
        save_file(whole, HERE / f"{name}.safetensors", metadata)


if __name__ == "__main__":
    main()
