"""The plan of an ONNX file: which nodes run, which are folded, and which tensors are parameters.

A tensor of the file is a parameter if the program reads it directly or through views. Everything
else that does not depend on tokens is folded, once per length. A batch is one sequence, unpadded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.onnx.files import KINDS, Array, OnnxFile, OnnxInput, OnnxNode, type_name
from kcdsl.model.onnx.folding import folded
from kcdsl.model.onnx.fusion import constant, fused
from kcdsl.model.onnx.operators import QUANTISE, OperatorCall, Turned
from kcdsl.source.files import excerpt

_TOKENS = re.compile(r"(.*[._/])?(input_?ids?|tokens?|ids|input)(:0)?$")
_FILLED: Mapping[str, Callable[[int], Array]] = {
    "attention_mask": lambda length: np.ones((1, length), dtype=np.int64),
    "token_type_ids": lambda length: np.zeros((1, length), dtype=np.int64),
    "segment_ids": lambda length: np.zeros((1, length), dtype=np.int64),
    "position_ids": lambda length: np.arange(length, dtype=np.int64)[None],
}
"""Values of inputs other than the tokens, for one sequence without padding."""
_FILLED_TYPES: Mapping[int, type[np.generic]] = {
    TensorProto.INT64: np.int64,
    TensorProto.INT32: np.int32,
    TensorProto.BOOL: np.bool_,
    TensorProto.FLOAT: np.float32,
}
VIEWS = frozenset({"Identity", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Flatten"})
_OF_SHAPE = frozenset({"Shape", "Size"})
_WEIGHT_PLACES = {"MatMul": 1, "Gemm": 1}
_USUAL_LENGTH = 3
"""The sequence length with which the program is checked when it is read."""
_HIDDEN = -1e30
"""A score at or below this is masked: a tensor with such numbers is a mask, not a weight."""


class OnnxPlan:
    """The nodes of a file that run, those that are folded, and the tensors that are parameters."""

    __slots__ = (
        "_fixed",
        "_folds",
        "_known",
        "file",
        "fillers",
        "ids",
        "runs",
        "turned",
        "weights",
    )

    def __init__(self, file: OnnxFile) -> None:
        """Classify the nodes of a file. Refuse inputs that do not belong to a token sequence."""
        self.file = replace(file, nodes=fused(file.nodes, file.tensors, file.outputs))
        self.ids, self.fillers = token_inputs(file.inputs, file.refusal)
        self._fixed: dict[int, tuple[dict[str, Array], dict[str, Tensor]]] = {}
        dynamic, views = self._flow()
        needed, wanted = self._demand(dynamic, views)
        self.runs = [
            n for n in self.file.nodes
            if n.kind not in _OF_SHAPE and (n.outputs[0] in dynamic or n.outputs[0] in wanted)
        ]  # fmt: skip
        self._folds = [
            n for n in self.file.nodes
            if n.outputs[0] not in dynamic and any(o in needed for o in n.outputs)
        ]  # fmt: skip
        held = [name for name in file.tensors if name in wanted]
        self.turned = {name for name in held if self._is_turned(name)}
        self.weights = tuple(held)
        self._known = {n: v for n, v in file.tensors.items() if n in needed and n not in wanted}
        self._known |= {n: file.tensors[n] for n in held if n in needed}

    def __deepcopy__(self, memo: dict[int, Any]) -> OnnxPlan:
        """Return the plan itself: copies of a module share it."""
        return self

    def _flow(self) -> tuple[set[str], set[str]]:
        """Return the tensors that depend on the tokens, and the views of weights."""
        dynamic, views = {self.ids}, {n for n in self.file.tensors if self._is_weight(n)}
        for node in self.file.nodes:
            reads = dynamic.intersection(node.inputs) or node.kind == QUANTISE
            if node.kind not in _OF_SHAPE and reads:
                dynamic.update(filter(None, node.outputs))
            elif node.kind in VIEWS and node.inputs[0] in views:
                views.add(node.outputs[0])
        return dynamic, views

    def _demand(self, dynamic: set[str], views: set[str]) -> tuple[set[str], set[str]]:
        """Return the fixed tensors whose values are read, and the weights and views that are
        run."""
        needed: set[str] = set()
        wanted: set[str] = set()
        for node in reversed(self.file.nodes):
            if node.outputs[0] in dynamic:
                tables = node.inputs[1:] if node.kind == "RotaryEmbedding" else ()
                for name in node.inputs:
                    if name in views and name not in tables:
                        wanted.add(name)
                    elif name not in dynamic:
                        needed.add(name)
                continue
            if node.outputs[0] in wanted:
                wanted.add(node.inputs[0])
                needed.update(node.inputs[1:])
            if needed.intersection(node.outputs):
                needed.update(name for name in node.inputs if name not in dynamic)
        return needed - {""}, wanted

    def _is_weight(self, name: str) -> bool:
        held = self.file.tensors[name]
        if self.file.types[name] not in KINDS or held.size < 2:
            return False
        numbers = held.astype(np.float32)
        return bool((numbers > _HIDDEN).all()) and bool(np.isfinite(numbers).all())

    def _is_turned(self, name: str) -> bool:
        """Return whether only products read a tensor, all as a matrix [in, out]."""
        users = [n for n in self.runs if name in n.inputs]
        return self.file.tensors[name].ndim == 2 and all(
            _WEIGHT_PLACES.get(n.kind) == n.inputs.index(name)
            and n.inputs.count(name) == 1
            and not n.attributes.get("transB", 0)
            for n in users
        )

    @property
    def fixed_length(self) -> int | None:
        """Return the number of tokens that the program takes; None where it is not fixed."""
        own = next(one for one in self.file.inputs if one.name == self.ids)
        return (own.sizes[-1] if own.sizes else None) or None

    @property
    def usual_length(self) -> int:
        """Return a valid number of tokens."""
        return self.fixed_length or _USUAL_LENGTH

    def batched(self) -> bool:
        """Return whether the token ids have a batch dimension."""
        own = next(one for one in self.file.inputs if one.name == self.ids)
        return own.sizes is None or len(own.sizes) == 2

    def at(self, length: int) -> tuple[dict[str, Array], dict[str, Tensor]]:
        """Return the fixed tensors for a number of tokens, and every other one as a meta tensor.

        Refuse a length that the program does not take, and operators that are not supported.
        """
        if length not in self._fixed:
            self._fixed[length] = self._laid_out(length)
        return self._fixed[length]

    def _laid_out(self, length: int) -> tuple[dict[str, Array], dict[str, Tensor]]:
        known = dict(self._known)
        for one in self.fillers:
            known[one.name] = filled(one, length)
        shape = (1, length) if self.batched() else (length,)
        shapes: dict[str, Any] = {self.ids: torch.zeros(shape, dtype=torch.int64, device="meta")}
        for name in self.weights:
            held = self.file.tensors[name]
            if name in self.turned:
                shapes[name] = Turned(torch.empty(held.shape[::-1], device="meta"))
            else:
                shapes[name] = torch.empty(held.shape, device="meta")
        folds = {n.outputs[0] for n in self._folds}
        runs = {n.outputs[0] for n in self.runs}
        for node in self.file.nodes:
            try:
                if node.outputs[0] in folds:
                    self._fold(node, known, shapes)
                if node.outputs[0] in runs:
                    run_node(self, node, known, shapes, torch.float32)
            except Refusal:
                raise
            except Exception as error:  # raised by operators for sizes that do not fit
                first = (str(error).splitlines() or [""])[0]
                raise refuse(
                    codes.ONNX_FILE,
                    f"{node.place} fails on {length} tokens: {excerpt(first)}",
                    help="export with a length that varies, or give sequences of the length that"
                    " the file was exported for",
                ) from None
        return known, {n: t for n, t in shapes.items() if isinstance(t, Tensor)}

    def _fold(self, node: OnnxNode, known: dict[str, Array], shapes: Mapping[str, Any]) -> None:
        if node.kind in _OF_SHAPE and node.inputs[0] in shapes:
            sizes = shapes[node.inputs[0]]
            sizes = list((sizes.weight.T if isinstance(sizes, Turned) else sizes).shape)
            if node.kind == "Size":
                known[node.outputs[0]] = np.asarray(np.prod(sizes), dtype=np.int64)
                return
            first, last = node.attributes.get("start", 0), node.attributes.get("end")
            known[node.outputs[0]] = np.asarray(sizes[first:last], dtype=np.int64)
            return
        found = constant(node) if node.kind == "Constant" else None
        operands = [known.get(name) for name in node.inputs]
        values = [found] if found is not None else folded(node, operands, self.file.opset)
        for name, value in zip(node.outputs, values, strict=False):
            if name:
                known[name] = value


def token_inputs(
    inputs: Sequence[OnnxInput], refusal: Callable[[str, str], Refusal]
) -> tuple[str, list[OnnxInput]]:
    """Return the name of the token ids, and the other inputs, which have fixed values. Refuse, by a
    message and its help, inputs that do not belong to a token sequence."""
    whole = (TensorProto.INT64, TensorProto.INT32)
    tokens = [
        one for one in inputs
        if one.type in whole and one.name not in _FILLED and _TOKENS.match(one.name)
    ]  # fmt: skip
    if len(inputs) == 1 and inputs[0].type in whole:
        tokens = list(inputs)
    others = [one for one in inputs if one not in tokens]
    strange = [one for one in others if one.name not in _FILLED]
    if len(tokens) != 1 or strange:
        named = ", ".join(excerpt(one.name) for one in inputs) or "none"
        raise refusal(
            f"its inputs are {named}; a model takes token ids (input_ids), and may take"
            f" {', '.join(_FILLED)}",
            "export the model without a cache of keys and values, on token ids",
        )
    sizes = tokens[0].sizes
    if sizes is not None and (
        len(sizes) not in (1, 2) or (len(sizes) == 2 and sizes[0] not in (None, 1))
    ):
        raise refusal(
            f"its token ids have the shape {list(sizes)}; it must be [1, T], or vary",
            "export it for one sequence",
        )
    for one in others:
        if one.type not in _FILLED_TYPES or (
            one.sizes is not None and len(one.sizes) not in (1, 2)
        ):
            kind = f"{type_name(one.type)} of {list(one.sizes or ())}"
            raise refusal(
                f"its input {one.name} is {kind}; what is filled has one number for each token",
                "export it with the masks that the tokenizer makes",
            )
    return tokens[0].name, others


def filled(one: OnnxInput, length: int) -> Array:
    """Return the value of an input other than the tokens, for one sequence without padding."""
    found = _FILLED[one.name](length).astype(_FILLED_TYPES[one.type])
    return found[0] if one.sizes is not None and len(one.sizes) == 1 else found


def run_node(
    plan: OnnxPlan,
    node: OnnxNode,
    known: Mapping[str, Array],
    values: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    """Run one node; add its results to the values."""
    operands = tuple(values.get(name, known.get(name)) for name in node.inputs)
    device = next((v.device for v in values.values() if isinstance(v, Tensor)), None)
    call = OperatorCall(node, operands, plan.file.own, dtype, plan.file.opset, device)
    for name, operand in zip(node.inputs, operands, strict=True):
        call.need(not name or operand is not None, f"it reads the second result {excerpt(name)}")
    for name, value in zip(node.outputs, call.run(), strict=False):
        if name:
            values[name] = value
