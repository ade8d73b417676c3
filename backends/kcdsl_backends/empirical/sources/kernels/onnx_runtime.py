"""ONNX Runtime: every part is exported by torch.onnx and run by a session of the CPU provider."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.numerics import Numerics
from kcdsl_backends.empirical.sources.kernels.engines import Program, other_weight
from kcdsl_backends.process import quietly

EXAMPLE = 5
"""Length of the sequence with which a part is exported; the exported length is dynamic."""
SIZES = (0.0, 1e-40, 1e-30, 1e-20, 1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1.0, 1e3, 1e8)
"""Scales of the rows on which an exported program is compared with the original."""
ALIKE, FAINT = 2.0**-8, 1e-30
"""Tolerances of that comparison: relative to the largest element of a row, and absolute."""
_FOLDED = 2**40


@dataclass(frozen=True, slots=True)
class Sessions:
    """Exports each part when it first runs, and quantises it if the numerics say so.

    `weights` are the matrices [out, in] that the numerics define: every matrix of ONNX Runtime's
    quantiser must be one of them.
    """

    run: str
    numerics: Numerics
    weights: Sequence[Tensor]
    longest: int | None
    _programs: dict[str, Program] = field(default_factory=dict)

    def __call__(self, name: str, part: Program) -> Program:
        """Return the program that runs the session of the part."""
        if name not in self._programs:
            self._programs[name] = self._program(name, part)
        return self._programs[name]

    def _program(self, name: str, part: Program) -> Program:
        sessions: dict[int, Any] = {}

        def run(argument: Tensor) -> Tensor:
            tokens = not argument.is_floating_point()
            whole = argument if argument.dim() == (2 if tokens else 3) else argument.unsqueeze(0)
            if not sessions:
                sessions[0] = self._session(name, part, whole)
            found = torch.from_numpy(sessions[0].run(None, {"x": whole.numpy()})[0])
            return found if whole is argument else found.squeeze(0)

        return run

    def _session(self, name: str, part: Program, like: Tensor) -> Any:
        with TemporaryDirectory() as folder, quietly(logging.ERROR):
            path = Path(folder) / "part.onnx"
            _export(
                part,
                like.new_zeros(2, min(EXAMPLE, self.longest or EXAMPLE), *like.shape[2:]),
                path,
            )
            self._compare(name, part, like, session_of(path))
            if self.numerics.activations.format != "none":
                path = self._quantised(name, path)
            return session_of(path)

    def _compare(self, name: str, part: Program, like: Tensor, session: Any) -> None:
        """Refuse a program whose results differ from those of the part: on single rows of zeros,
        tiny and huge numbers, and on a sequence."""
        if not like.is_floating_point():
            probes = [like.new_zeros(1, 1)]
        else:
            width, drawn = like.shape[2:], torch.Generator().manual_seed(0)
            alone = torch.randn(len(SIZES), 1, *width, generator=drawn)
            sizes = torch.tensor(SIZES).reshape(-1, *[1] * (alone.dim() - 1))
            length = min(EXAMPLE, self.longest or EXAMPLE)
            probes = [alone * sizes, torch.randn(1, length, *width, generator=drawn)]
        for probe in probes:
            found, wanted = (
                torch.from_numpy(session.run(None, {"x": probe.numpy()})[0]),
                part(probe),
            )
            size = wanted.nan_to_num(0.0).abs().amax(-1, keepdim=True)
            near = (found - wanted).abs() <= ALIKE * size + FAINT
            if not bool((near | (found == wanted) | (found.isnan() & wanted.isnan())).all()):
                raise refuse(
                    codes.KERNEL_NUMERICS,
                    f"the program that {self.run} made of {name} computes something else than"
                    " the model does",
                    help="run torch.eager or torch.compile",
                )

    def _quantised(self, name: str, path: Path) -> Path:
        """Quantise the products with weights, and compare the stored weights with the numerics."""
        from onnx import load, numpy_helper
        from onnxruntime.quantization import QuantType, quantize_dynamic

        if self.numerics.byte_sums == "wide" and saturates():
            raise refuse(
                codes.KERNEL_NUMERICS,
                f"{self.run} sums products of 8-bit numbers in 16 bits on this processor, where"
                " they saturate",
                help="claim `byte_sums: int16_pairs` (preset: onnxruntime-int8-pairs), or run it on"
                " a processor with VNNI instructions",
            )
        quantised = path.with_name("quantised.onnx")
        quantize_dynamic(
            path,
            quantised,
            op_types_to_quantize=["MatMul"],
            weight_type=QuantType.QInt8,
            per_channel=self.numerics.weights.scale == "per_channel",
        )
        graph = load(quantised).graph
        stored = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
        products = [n for n in graph.node if n.op_type == "MatMulInteger"]
        for product in products:
            key = product.input[1].removesuffix("_quantized")
            scale, zero = stored[f"{key}_scale"], stored[f"{key}_zero_point"]
            value = stored[product.input[1]].astype(np.float32) * scale
            found = torch.from_numpy(value).t()
            if np.any(zero) or not any(
                found.shape == w.shape and torch.equal(found, w) for w in self.weights
            ):
                raise other_weight(self.run, f"a product of {name}")
        for node in graph.node:
            if node.op_type in ("MatMul", "Gemm") and any(i in stored for i in node.input):
                raise refuse(
                    codes.KERNEL_NUMERICS,
                    f"{self.run} leaves a product of {name} unquantised: {node.name}",
                    help="run onnxruntime.float32",
                )
        return quantised


@cache
def saturates(*settings: str, basic: bool = False) -> bool:
    """Return whether sessions with these options sum products of unsigned and signed 8-bit numbers
    in 16 bits here.

    ONNX Runtime chooses its kernels by processor and options alone, so the result is constant in a
    process.
    """
    from onnx import TensorProto, helper

    left = helper.make_tensor_value_info("x", TensorProto.UINT8, [4, 64])
    right = helper.make_tensor("w", TensorProto.INT8, [64, 16], np.full(1024, 127, np.int8))
    out = helper.make_tensor_value_info("y", TensorProto.INT32, [4, 16])
    node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
    model = helper.make_model(
        helper.make_graph([node], "g", [left], [out], [right]),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=9,
    )
    session = session_of(model.SerializeToString(), *settings, basic=basic)
    found = session.run(None, {"x": np.full((4, 64), 255, np.uint8)})
    return bool(np.any(found[0] != 64 * 255 * 127))


class _Part(nn.Module):
    """Wraps a function of a module as a module."""

    def __init__(self, function: Callable[..., Tensor], owner: nn.Module) -> None:
        super().__init__()
        self.owner = owner
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _export(part: Program, example: Tensor, path: Path) -> None:
    from onnxscript.optimizer import fold_constants

    owner = getattr(part, "__self__", None)
    module = part if isinstance(part, nn.Module) else None
    if module is None:
        assert isinstance(owner, nn.Module)
        module = _Part(part, owner)
    free = torch.export.Dim.DYNAMIC
    # The exporter's optimiser replaces numbers near 0 and 1 by 0 and 1, an epsilon of 1e-8 by 0.
    program = torch.onnx.export(
        module,
        (example,),
        dynamo=True,
        verbose=False,
        optimize=False,
        input_names=["x"],
        output_names=["y"],
        dynamic_shapes=({0: free, 1: free},),
    )
    assert program is not None
    fold_constants(program.model, input_size_limit=_FOLDED, output_size_limit=_FOLDED)
    program.save(path)


def session_of(
    model: Path | bytes, *settings: str, basic: bool = False, without: Sequence[str] = ()
) -> Any:
    """Return a session of a file, or of its bytes, with `settings` of ONNX Runtime switched on;
    `basic`: no operators are fused; `without`: disabled optimisers."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if basic:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    for setting in settings:
        options.add_session_config_entry(setting, "1")
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    given = os.fspath(model) if isinstance(model, Path) else model
    return onnxruntime.InferenceSession(
        given,
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=list(without),
        enable_fallback=0,  # a second attempt would print
    )
