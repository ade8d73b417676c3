"""The program of an ONNX file as a module: token ids [T] in, hidden states or logits out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor, nn
from torch.nn import functional

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.checkpoint.modules import TransposedLinear
from kcdsl.model.checkpoint.tensors import Checkpoint
from kcdsl.model.onnx.file_numerics import FileNumerics
from kcdsl.model.onnx.files import KINDS, OnnxNode, read_onnx
from kcdsl.model.onnx.operators import QUANTISE, Turned
from kcdsl.model.onnx.plan import VIEWS, OnnxPlan, run_node
from kcdsl.model.onnx.quantisation import without_quantisers
from kcdsl.source.files import excerpt, shown

BlockEnds = tuple[str, str]
"""The tensors at which a block begins and ends."""


class _Held(nn.Module):
    """One weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


class _Product(TransposedLinear):
    """A matrix product with a weight; the bias is an operand."""

    def forward(self, x: Tensor, *bias: Tensor) -> Tensor:
        """Return x @ weight.T, with a bias added if one is given."""
        return functional.linear(x, self.weight, *bias)


def _holder(plan: OnnxPlan, name: str) -> nn.Module:
    held = plan.file.tensors[name]
    weight = torch.from_numpy(held.astype(np.float32))
    if name not in plan.turned:
        return _Held(weight)
    linear = _Product(held.shape[0], held.shape[1], bias=False)
    linear.weight = nn.Parameter(weight.T.contiguous(), requires_grad=False)
    return linear


class OnnxBlock(nn.Module):
    """The nodes between two tensors of a program: hidden states [T, D] in and out.

    `quantisers` are applied to the tensors that the file quantises, by name; there are none by
    default.
    """

    def __init__(
        self,
        plan: OnnxPlan,
        runs: Sequence[OnnxNode],
        ends: BlockEnds,
        holders: Mapping[str, nn.Module],
    ) -> None:
        """Take the nodes to run, and the modules of their weights by name in the file."""
        super().__init__()
        self.plan = plan
        self.runs = tuple(runs)
        self.ends = ends
        self.read = tuple(holders)
        self.quantisers: dict[str, Callable[[Tensor], Tensor]] = {}
        self.holders = nn.ModuleList(holders.values())
        self.register_buffer("own", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the nodes for x."""
        return _rows(self.run(x, x.shape[0]))

    def run(self, x: Tensor, length: int, entries: Sequence[nn.Module] = ()) -> Tensor:
        """Run the nodes; `entries` are called with the rows of the tensors where blocks begin."""
        known, shapes = self.plan.at(length)
        first, last = self.ends
        own = self.own.dtype
        assert isinstance(own, torch.dtype)
        values: dict[str, Any] = {first: x.reshape(shapes[first].shape)}
        for name, holder in zip(self.read, self.holders, strict=True):
            weight = holder.get_parameter("weight")
            values[name] = Turned(weight, holder) if name in self.plan.turned else weight
        for node in self.runs:
            run_node(self.plan, node, known, values, own)
            for name in node.outputs:
                if node.kind == QUANTISE and name in self.quantisers:
                    values[name] = self.quantisers[name](values[name])
                for entry in entries:
                    if isinstance(entry, _Entry) and entry.tensor == name:
                        entry(_rows(values[name]))
        found: Tensor = values[last]
        return found


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[1:]) if x.dim() == 3 else x


class _Entry(nn.Identity):
    """The start of a block: an identity through which its input passes."""

    def __init__(self, tensor: str) -> None:
        super().__init__()
        self.tensor = tensor


class OnnxProgram(OnnxBlock):
    """The whole program of an ONNX file, and its blocks."""

    def __init__(self, plan: OnnxPlan, blocks: Mapping[str, BlockEnds]) -> None:
        """Build the module. Refuse blocks that the file does not have."""
        shapes = plan.at(plan.usual_length)[1]
        output = _output(plan, shapes)
        holders = {name: _holder(plan, name) for name in plan.weights}
        runs = nodes_between(plan, plan.ids, output, "model")
        super().__init__(plan, runs, (plan.ids, output), _used(runs, holders))
        self.encoder_only = not _is_logits(plan, output, shapes)
        self.vocabulary = _vocabulary(plan)
        self.names = tuple(blocks)
        self.entries = nn.ModuleList()
        self.parts = nn.ModuleList()
        for name, ends in blocks.items():
            for tensor in ends:
                _refuse_shapeless(plan, name, tensor, shapes)
            part = nodes_between(plan, *ends, name)
            self.entries.append(_Entry(ends[0]))
            self.parts.append(OnnxBlock(plan, part, ends, _used(part, holders)))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the output for token ids [T]: logits [T, V] or hidden states [T, D]."""
        return _rows(self.run(ids, ids.shape[-1], tuple(self.entries)))

    def blocks(self) -> dict[str, nn.Module]:
        """Return the blocks by name."""
        return dict(zip(self.names, self.parts, strict=True))

    def block_entries(self) -> dict[str, nn.Module]:
        """Return the modules through which the inputs of the blocks pass."""
        return dict(zip(self.names, self.entries, strict=True))

    @property
    def quantised(self) -> tuple[str, ...]:
        """Return the tensors that the file quantises."""
        return tuple(n.outputs[0] for n in self.plan.file.nodes if n.kind == QUANTISE)

    @property
    def fixed_length(self) -> int | None:
        """Return the only number of tokens that the program takes; None where it varies."""
        return self.plan.fixed_length

    @property
    def keys(self) -> dict[str, str]:
        """Return the tensor name in the file of every parameter."""
        return {f"holders.{i}.weight": name for i, name in enumerate(self.read)}


def read_program(
    path: Path, blocks: Iterable[tuple[str, str, str]], admitted: Callable[[Path], Path]
) -> tuple[OnnxProgram, Checkpoint, FileNumerics]:
    """Read an ONNX file: its program with these blocks, its tensors as a checkpoint, and the
    numerics of its quantisers.

    Refuse as `read_onnx` does, and also unsupported operators and blocks.
    """
    file, stated = without_quantisers(read_onnx(path, admitted))
    plan = OnnxPlan(file)
    _refuse_no_linear(plan, stated)
    program = OnnxProgram(plan, {name: (first, last) for name, first, last in blocks})
    tensors: dict[str, Tensor] = {}
    others: dict[str, str] = {}
    for name, held in file.tensors.items():
        if file.types[name] in KINDS:
            tensors[name] = torch.from_numpy(held.astype(np.float32))
        else:
            others[name] = TensorProto.DataType.Name(file.types[name])
    manifest = file.manifest
    checkpoint = Checkpoint(
        path, manifest.weights_digest, tensors, others, root=manifest.root_digest
    )
    return program, checkpoint, stated


def _refuse_no_linear(plan: OnnxPlan, stated: FileNumerics) -> None:
    """Refuse a quantised product that the program does not run as a linear: numerics, which belong
    to linears, would leave it unquantised."""
    for key, one in stated.linears.items():
        matrix = key in plan.weights and plan.file.tensors[key].ndim == 2
        linear = matrix and one.transposed is not (key in plan.turned)
        if (one.activations or one.weights) and not linear:
            raise refuse(
                codes.OPERATION_UNSUPPORTED,
                f"{shown(plan.file.path)}: a product with {excerpt(key)} is quantised, but no"
                " linear: its weight is a constant, no matrix of finite numbers, or read otherwise"
                " as well",
                help="store the weight as an initializer [in, out] that only the product reads",
            )


def _used(runs: Sequence[OnnxNode], holders: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    read = {name for node in runs for name in node.inputs}
    return {name: holder for name, holder in holders.items() if name in read}


def nodes_between(plan: OnnxPlan, first: str, last: str, block: str) -> list[OnnxNode]:
    """Return the nodes that compute one tensor from another. Refuse unconnected tensors, and nodes
    that depend on the tokens by another path."""
    made = {name: node for node in plan.runs for name in node.outputs if name}
    found: set[str] = set()
    waiting, reached = [last], False
    while waiting:
        name = waiting.pop()
        if name == first:
            reached = True
            continue
        node = made.get(name)
        if name == plan.ids:
            raise refuse(
                codes.UNKNOWN_BLOCK,
                f"the block {block!r} reads more of the tokens than {excerpt(first)!r}",
                help="begin it where everything that it reads is computed from one tensor",
            )
        if node is None or node.outputs[0] in found:
            continue
        found.add(node.outputs[0])
        waiting += [i for i in node.inputs if i]
    if not reached:
        raise refuse(
            codes.UNKNOWN_BLOCK,
            f"the block {block!r}: {excerpt(last)!r} does not depend on {excerpt(first)!r}",
            help="name two tensors of which the second is computed from the first",
        )
    return [n for n in plan.runs if n.outputs[0] in found]


def _refuse_shapeless(
    plan: OnnxPlan, block: str, tensor: str, shapes: Mapping[str, Tensor]
) -> None:
    """Refuse a tensor that the program does not have or that is not [1, T, D] or [T, D]."""
    if tensor not in shapes:
        from difflib import get_close_matches

        near = get_close_matches(tensor, [n for n in shapes if n not in plan.weights], n=1)
        raise refuse(
            codes.UNKNOWN_BLOCK,
            f"the block {block!r} names {excerpt(tensor)!r}, which the program does not compute",
            help=f"did you mean {excerpt(near[0])!r}?" if near else None,
        )
    shape = tuple(shapes[tensor].shape)
    length = plan.usual_length
    if shape[-3:-1] not in ((1, length), (length,)) or len(shape) not in (2, 3):
        raise refuse(
            codes.UNKNOWN_BLOCK,
            f"the block {block!r} names {excerpt(tensor)!r} of shape {list(shape)} for {length}"
            " tokens; it must be hidden states [1, T, D] or [T, D]",
            help="name the hidden states between two layers, such as the output of a residual Add",
        )


def _output(plan: OnnxPlan, shapes: Mapping[str, Tensor]) -> str:
    """Return the output of the file that has a row for each token."""
    names = plan.file.outputs
    usual = [n for n in ("logits", "last_hidden_state") if n in names]
    for name in (*usual, *names):
        found = shapes.get(name)
        if found is None or found.dim() not in (2, 3) or not found.is_floating_point():
            continue
        if found.shape[-2] == plan.usual_length:
            return name
    raise plan.file.refusal(
        f"none of its outputs, {', '.join(map(excerpt, names))}, has a row for each token",
        "export logits or hidden states of all tokens",
    )


def _vocabulary(plan: OnnxPlan) -> int | None:
    """Return the number of rows of the embedding table."""
    ids = {plan.ids}
    for node in plan.runs:
        if node.kind in (*VIEWS, "Cast") and node.inputs[0] in ids:
            ids.add(node.outputs[0])
        if node.kind == "Gather" and node.inputs[1] in ids and node.inputs[0] in plan.weights:
            return int(plan.file.tensors[node.inputs[0]].shape[0])
    return None


def _is_logits(plan: OnnxPlan, output: str, shapes: Mapping[str, Tensor]) -> bool:
    return output == "logits" or shapes[output].shape[-1] == _vocabulary(plan)
