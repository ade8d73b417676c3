"""An ONNX file run unchanged by ONNX Runtime on the CPU, quantisers included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.diagnostics.model import at
from kcdsl.ir.terms import KernelRef
from kcdsl.model.adapters import find_adapter
from kcdsl.model.architecture import Model
from kcdsl.model.checkpoint.ranges import changed
from kcdsl.model.files import Artefacts, copy_hashed
from kcdsl.model.fingerprint import kernel_fingerprint
from kcdsl.model.numerics import Numerics
from kcdsl.model.onnx.files import OnnxInput, read_input, read_onnx
from kcdsl.model.onnx.integer_products import PRODUCT
from kcdsl.model.onnx.plan import filled, token_inputs
from kcdsl.model.onnx.program import OnnxBlock, OnnxProgram
from kcdsl.model.onnx.quantisation import without_quantisers
from kcdsl.source.files import excerpt, shown
from kcdsl_backends.empirical.sources.kernels.engines import Program, ProgramEngine, need
from kcdsl_backends.empirical.sources.kernels.onnx_runtime import saturates, session_of
from kcdsl_certs.statement.manifest import Manifest, storage_manifest

_EXACT = "session.x64quantprecision"
"""The session option for exact sums of byte products on processors without an instruction for
it."""
_UNFUSED = "session.disable_quant_qdq"
"""The session option that keeps quantisers of tensors, without fusing them into operators on
codes."""
_MERGING = "DoubleQDQPairsRemover"
"""The optimiser that merges two quantisers in a row, with a scale that no file states."""
_ARRAYS: dict[str, Any] = {
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
}

_FLOATS = ("tensor(float)", "tensor(float16)", "tensor(double)")
"""The accepted types of outputs."""


def file_sessions(run: str, model: Model, module: nn.Module, numerics: Numerics) -> ProgramEngine:
    """Return sessions of the ONNX file of a model, for the whole model and for its blocks.

    Refuse a model that is no ONNX file, a file that has changed, numerics that are not those of its
    quantisers and, without quantisers, weights that are quantised.
    """
    program, checkpoint, files = model.module, model.checkpoint, model.files
    assert isinstance(program, OnnxProgram)  # load_kernel
    held = read_onnx(checkpoint.path, files.admitted).manifest
    folder, path = _copied(checkpoint.path, held, files)
    copied = read_onnx(path)
    if copied.manifest.root_digest != checkpoint.root_digest:
        raise changed(checkpoint.path)
    without_quantisers(copied)[1].refuse_unserved(run, numerics)
    settings = []
    basic = any(a.format.startswith("fp8") for _, a in numerics.sections)
    if numerics.quantisers:
        settings.append(_UNFUSED)
    if numerics.byte_sums == "wide":
        settings.append(_EXACT)
        apart = basic or bool(numerics.quantisers)  # quantisers are not fused into products
        of_bytes = not apart or any(node.kind == PRODUCT for node in copied.nodes)
        if of_bytes and saturates(_EXACT, basic=basic):  # without effect at the basic level
            raise refuse(
                codes.KERNEL_NUMERICS,
                f"{run} sums products of 8-bit numbers in 16 bits on this processor, where they"
                " saturate",
                help="run it on a processor with VNNI instructions",
            )
    without = (_MERGING,) if numerics.quantisers else ()
    return FileSessions(program, path, folder, tuple(settings), basic, without)


def _copied(given: Path, held: Manifest, files: Artefacts) -> tuple[TemporaryDirectory[str], Path]:
    """Copy a file and its external data into a temporary folder; return folder and copy."""
    folder = TemporaryDirectory(prefix="kcdsl-")
    for one in held.resources:
        copy_hashed(files.admitted(given.parent / one.name), Path(folder.name) / one.name)
    return folder, Path(folder.name) / given.name


def load_own_file(ref: KernelRef, model: Model) -> FileKernel:
    """Prepare a kernel that runs an ONNX file of its own, with any operators of ONNX Runtime.

    Refuse a file that changed since it was hashed, inputs that do not follow from a sequence of
    tokens, and a file without logits (of an encoder, hidden states).
    """
    with at(ref.span):
        adapter = find_adapter(ref.run)
        need(adapter.library, ref.run)
        if not adapter.of_file or model.served_file is None:
            raise refuse(
                codes.KERNEL_NUMERICS,
                f"{ref.run} does not run {ref.own_file}",
                help="run onnxruntime.file",
            )
        given, digest = model.served_file
        folder, path = _copied(given, storage_manifest(given), model.files)
        if storage_manifest(path).digest != digest:
            raise changed(given)
        ids, fillers, outputs = _inputs_and_outputs(path, given)
        usual = "last_hidden_state" if model.encoder_only else "logits"
        output = usual if usual in outputs else outputs[0]
        if output != usual and len(outputs) > 1:
            raise refuse(
                codes.ONNX_FILE,
                f"{shown(given)}: its outputs are {', '.join(map(excerpt, outputs))}",
                help=f"name the output `{usual}`",
            )
        try:
            session = session_of(path)
        except Exception as error:  # of ONNX Runtime, which has no class of its own for all
            raise _failed(ref, error) from error
        types = {one.name: one.type for one in session.get_outputs()}
        if types[output] not in _FLOATS:
            raise refuse(
                codes.ONNX_FILE,
                f"{shown(given)}: its output {excerpt(output)} is {types[output]}",
                help=f"cast it to one of {', '.join(_FLOATS)}",
            )
        return FileKernel(ref, model, folder, session, ids, fillers, output)


def _inputs_and_outputs(
    path: Path, given: Path
) -> tuple[OnnxInput, tuple[OnnxInput, ...], tuple[str, ...]]:
    """Return the token ids, the inputs that are filled, and the outputs of a file."""

    def refusal(what: str, help: str) -> Refusal:
        return refuse(codes.ONNX_FILE, f"{shown(given)}: {what}", help=help)

    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # of the protobuf library
        raise refusal(f"it is no ONNX file: {type(error).__name__}", "export it anew") from error
    graph, outside = model.graph, onnx.external_data_helper.uses_external_data
    nodes = [*graph.node, *(node for one in model.functions for node in one.node)]
    if any(outside(tensor) for tensor in _inside(nodes)):
        raise refusal("a tensor inside of a node lies in another file", "store it in this file")
    held = {tensor.name for tensor in graph.initializer}
    ends = [value.name for value in (*graph.input, *graph.output)]
    if not all(isinstance(name, str) for name in ends):  # protobuf gives them as bytes
        raise refusal("a name of an input or an output is no UTF-8", "export it anew")
    inputs = [read_input(value) for value in graph.input if value.name not in held]
    name, fillers = token_inputs(inputs, refusal)
    outputs = tuple(value.name for value in graph.output)
    if not outputs:
        raise refusal("it has no output", "export logits or hidden states of all tokens")
    ids = next(one for one in inputs if one.name == name)
    return ids, tuple(fillers), outputs


def _inside(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors inside nodes; the manifest of the file does not cover their external
    data."""
    for node in nodes:
        for one in node.attribute:
            yield from (one.t, *one.tensors)
            for sparse in (one.sparse_tensor, *one.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            for graph in (one.g, *one.graphs):
                yield from graph.initializer
                for sparse in graph.sparse_initializer:
                    yield from (sparse.values, sparse.indices)
                yield from _inside(graph.node)


def _failed(ref: KernelRef, error: Exception) -> Refusal:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return refuse(
        codes.KERNEL_FAILED,
        f"{ref.run} failed on {ref.own_file}: {first}",
        help="a file that ONNX Runtime runs on the CPU takes token ids, [1, T] or [T]",
    )


@dataclass(frozen=True, slots=True)
class FileKernel:
    """An ONNX file in place of the model's program: it runs as a whole, on the CPU."""

    ref: KernelRef
    model: Model
    folder: TemporaryDirectory[str]
    session: Any
    ids: OnnxInput
    fillers: tuple[OnnxInput, ...]
    output: str

    def tokens(self, ids: Any) -> Tensor:
        """Return checked token ids, [T] or [B, T]."""
        return self.model.batch(ids)

    def forward(self, tokens: Tensor) -> Tensor:
        """Run the file on checked tokens: logits [..., T, V], or hidden states of an encoder."""
        if tokens.dim() == 2:
            return torch.stack([self.forward(row) for row in tokens])
        whole = tokens.numpy()
        given = whole if self.ids.sizes is not None and len(self.ids.sizes) == 1 else whole[None]
        kind = np.int32 if self.ids.type == onnx.TensorProto.INT32 else np.int64
        feeds = {self.ids.name: given.astype(kind)}
        feeds |= {one.name: filled(one, len(whole)) for one in self.fillers}
        try:
            (found,) = self.session.run([self.output], feeds)
        except Exception as error:  # of ONNX Runtime, which has no class of its own for all
            raise _failed(self.ref, error) from error
        rows = torch.from_numpy(found)
        if rows.dim() not in (2, 3) or rows.shape[:-1] not in ((len(whole),), (1, len(whole))):
            raise refuse(
                codes.ONNX_FILE,
                f"{self.ref.own_file}: its output {excerpt(self.output)} has the shape"
                f" {list(rows.shape)} for {len(whole)} tokens",
                help="export logits or hidden states of all tokens",
            )
        return rows.reshape(rows.shape[-2:])

    def logits(self, ids: Any) -> Tensor:
        """Return the output for token ids [T] or [B, T]."""
        return self.forward(self.tokens(ids))

    def hidden(self, ids: Any) -> Tensor:
        """Return the final states of an encoder, float64. Refuse those of a language model."""
        if not self.model.encoder_only:
            raise self._refusal("hidden states")
        return self.logits(ids).to(torch.float64)

    def block(self, name: str, x: Tensor) -> Tensor:
        """Refuse: the file does not name the nodes of a block."""
        raise self._refusal(f"the block {name}")

    def fingerprint(self) -> dict[str, Any]:
        """Return the fingerprint that certificates bind; see `kcdsl.model.fingerprint`."""
        return kernel_fingerprint(self.ref, "cpu")

    def _refusal(self, what: str) -> Refusal:
        return refuse(
            codes.METRIC_OUT_OF_REACH,
            f"an ONNX file of its own does not show {what}",
            help="leave such clauses out",
        )


@dataclass(frozen=True, slots=True)
class FileSessions:
    """Runs an ONNX file unchanged: the whole file, or the nodes of a block.

    `path` is a copy of the file in `folder`, with its external data; `settings` are those of its
    sessions. `basic`: no operators are fused, since ONNX Runtime 1.31 fuses operators on FP8 codes
    into one that does not take them, and drops a Relu before a quantiser. `without`: disabled
    optimisers.
    """

    program: OnnxProgram
    path: Path
    folder: TemporaryDirectory[str]
    settings: tuple[str, ...]
    basic: bool
    without: tuple[str, ...] = ()
    _programs: dict[str, Program] = field(default_factory=dict)

    def __call__(self, name: str, part: Program) -> Program:
        """Return the program that runs the session of the part."""
        if name not in self._programs:
            self._programs[name] = self._program(name)
        return self._programs[name]

    def _program(self, name: str) -> Program:
        part = self.program.blocks().get(name)
        first, last = part.ends if isinstance(part, OnnxBlock) else self.program.ends
        path = self.path if part is None else self._block(first, last)
        session = session_of(path, *self.settings, basic=self.basic, without=self.without)
        plan = self.program.plan
        types = {one.name: _ARRAYS[one.type] for one in session.get_inputs()}

        def on(row: Tensor) -> Tensor:
            known, shapes = plan.at(row.shape[0])
            given = {plan.ids: np.zeros(tuple(shapes[plan.ids].shape), np.int64), **known}
            given[first] = row.numpy().reshape(tuple(shapes[first].shape))
            feeds = {key: np.asarray(given[key], dtype=types[key]) for key in types}
            found = torch.from_numpy(session.run([last], feeds)[0])
            return found.reshape(found.shape[-2:])

        def run(argument: Tensor) -> Tensor:
            if argument.dim() == (2 if argument.is_floating_point() else 1):
                return on(argument)
            return torch.stack([on(row) for row in argument])

        return run

    def _block(self, first: str, last: str) -> Path:
        """Write the nodes between two tensors as a file in the folder of the copy; return its
        path."""
        model = onnx.load(str(self.path), load_external_data=False)
        graph = model.graph
        producers = {name: place for place, node in enumerate(graph.node) for name in node.output}
        places, read, waiting = set[int](), set[str](), [last]
        equal_tensors = _same_dequantised(graph, first)
        while waiting:
            name = waiting.pop()
            if name in equal_tensors or name not in producers:
                read.add(first if name in equal_tensors else name)
            elif producers[name] not in places:
                places.add(producers[name])
                waiting += [i for i in graph.node[producers[name]].input if i]
        for node in (graph.node[place] for place in places):
            for position, name in enumerate(node.input):
                if name in equal_tensors:
                    node.input[position] = first
        own = self.program.plan.file.own
        ends = [onnx.helper.make_tensor_value_info(name, own, None) for name in (first, last)]
        block = onnx.helper.make_graph(
            [graph.node[place] for place in sorted(places)],
            "block",
            [ends[0], *(one for one in graph.input if one.name in read)],
            [ends[1]],
            [held for held in graph.initializer if held.name in read],
        )
        whole = onnx.helper.make_model(
            block, opset_imports=model.opset_import, ir_version=model.ir_version
        )
        place, path = mkstemp(".onnx", dir=self.folder.name)  # a name unused by the copy
        with open(place, "wb") as stream:
            stream.write(whole.SerializeToString())
        return Path(path)


def _same_dequantised(graph: Any, tensor: str) -> set[str]:
    """Return a tensor and those that DequantizeLinear computes from the same codes."""
    makers = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    codes = {node.input[0] for node in makers if tensor in node.output}
    return {tensor, *(node.output[0] for node in makers if node.input[0] in codes)}
