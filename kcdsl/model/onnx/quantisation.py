"""QuantizeLinear and DequantizeLinear of ONNX files: the numerics of the kernel.

The graph without them is the program. Stored codes become parameters: (code - zero
point) · scale as float32, under the name of the result of DequantizeLinear. A quantiser of the
input of a product with a weight, or of the weight, becomes a part of the numerics of that linear.
Where other operators read quantised tensors, all static quantisers become quantisers of tensors
(docs/adr/0036): the program has one operator that marks the tensor in place of both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto, helper

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.numerics import StaticQuantiser, Weights
from kcdsl.model.numerics.fields import LARGEST_STATIC, LEAST_STATIC
from kcdsl.model.onnx.file_numerics import FileNumerics, LinearQuantisation, Section
from kcdsl.model.onnx.files import Array, OnnxFile, OnnxNode, type_name
from kcdsl.model.onnx.fusion import constant
from kcdsl.model.onnx.integer_products import as_dequantised
from kcdsl.model.onnx.operators import QUANTISE
from kcdsl.source.files import excerpt

COMPUTE: dict[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
}
"""Compute formats by ONNX type of the weights."""
_QUANTIZE, _DYNAMIC, _DEQUANTIZE = "QuantizeLinear", "DynamicQuantizeLinear", "DequantizeLinear"
QUANTISERS = frozenset({_QUANTIZE, _DYNAMIC, _DEQUANTIZE})
_FORMATS: dict[int, str] = {
    TensorProto.UINT8: "uint8",
    TensorProto.INT8: "int8_full",
    TensorProto.FLOAT8E4M3FN: "fp8_e4m3",
    TensorProto.FLOAT8E5M2: "fp8_e5m2",
}
"""Code formats by ONNX type; ONNX saturates int8 at -128."""
_STORED = frozenset({*_FORMATS, TensorProto.INT32})
_MOVES = frozenset({"Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Dropout"})
"""Operators that a per-tensor quantised input of a product may pass through."""
_SIGNED = frozenset({"MatMul", "Gemm", "Conv", "Add", "Sub", "Mul", "LayerNormalization"})
"""Operators after which ONNX Runtime drops a Relu before a quantiser that clips at zero."""
_REARRANGE = frozenset({"Transpose", "Reshape", "Unsqueeze", "Squeeze", "Split", "Slice", "Concat"})
"""Operators after which it does the same if their operands may be negative."""
_PRODUCTS = frozenset({"MatMul", "Gemm"})
_WEIGHT_FORMS = tuple(
    Weights(form, scale)
    for form in ("int8", "int8_full", "fp8_e4m3", "fp8_e5m2")
    for scale in ("per_tensor", "per_channel")
)
_HELP = (
    "quantise as `quantize_dynamic` and `quantize_static` of ONNX Runtime do: to 8 bits, tensors"
    " with one scale, weights with one scale or one for each channel"
)

_CODES = (
    "write DequantizeLinear behind each quantiser (quant_format=QuantFormat.QDQ), or MatMulInteger"
    " of its codes and those of a weight, Cast to FLOAT, and products with both scales"
)


@dataclass(frozen=True, slots=True)
class _Coded:
    """Codes of a tensor: their format, scale and zero point; no scale where it is dynamic."""

    node: OnnxNode
    source: str
    parts: tuple[str, ...]
    section: Section
    quantiser: StaticQuantiser | None = None
    """The quantiser, where it belongs to a tensor and not to a linear."""


class _Reader:
    """Removes quantisation operators from a graph, in the order of its nodes."""

    def __init__(self, file: OnnxFile) -> None:
        self.file = file
        self.tensors = dict(file.tensors)
        self.types = dict(file.types)
        for node in file.nodes:  # scales may be constants
            held = constant(node) if node.kind == "Constant" else None
            if held is not None:
                self.tensors[node.outputs[0]] = held
                kind = helper.np_dtype_to_tensor_dtype(held.dtype)
                self.types[node.outputs[0]] = int(kind)
        self._constants = self.tensors.keys() - file.tensors.keys()
        self.nodes: list[OnnxNode] = []
        self.linears: dict[str, LinearQuantisation] = {}
        self.quantisers: dict[str, StaticQuantiser] = {}
        self._by_tensor = _quantises_tensors(file)
        self._made = {name: node for node in file.nodes for name in node.outputs}
        self._read_back: dict[str, str] = {}
        """Dequantised tensors by their codes."""
        self._is: dict[str, str] = {}
        """Replacements of tensors after quantisers are removed."""
        self._coded: dict[str, _Coded] = {}
        self._scales: dict[str, OnnxNode] = {}
        self._inputs: dict[str, _Coded] = {}
        """Results of DequantizeLinear that depend on the tokens, and views of them."""
        self._fixed: dict[str, _Coded] = {}
        """Results of DequantizeLinear that are quantised parameters."""
        self._turns: dict[str, tuple[str, bool | None]] = {}
        """Views of parameters: the original tensor, and whether it is transposed; None for a view
        of any other kind."""

    def read(self) -> OnnxFile:
        """Return the file without quantisers."""
        for node in self.file.nodes:
            if node.kind in (_QUANTIZE, _DYNAMIC):
                self._quantise(node)
            elif node.kind == _DEQUANTIZE:
                self._dequantise(node)
            else:
                self._take(node)
        outputs = tuple(self._is.get(name, name) for name in self.file.outputs)
        for name in self.file.outputs:
            coded = self._coded.get(name) or self._inputs.get(name) or self._fixed.get(name)
            if coded is not None:
                raise _refusal(coded.node, "the output of the file is quantised", _HELP)
        kept = {n: t for n, t in self.tensors.items() if n not in self._constants}
        return replace(
            self.file, nodes=tuple(self.nodes), tensors=kept,
            types={n: self.types[n] for n in kept}, outputs=outputs,
        )  # fmt: skip

    # --- quantisers -------------------------------------------------------------------------------

    def _quantise(self, node: OnnxNode) -> None:
        source = node.inputs[0]
        self._refuse_codes(node, (source,))
        if source in self._inputs:
            raise _refusal(node, f"it quantises {excerpt(source)} once more", _HELP)
        source = self._is.get(source, source)
        if node.kind == _DYNAMIC:
            if len(node.outputs) != 3 or "" in node.outputs:
                raise _refusal(node, "it leaves out its scale or its zero point")
            section: Section = {"format": "uint8", "scale": "per_tensor"}
            coded = _Coded(node, source, node.outputs[1:], section)
            self._scales |= dict.fromkeys(node.outputs[1:], node)
        else:
            scale, zero, kind = self._parts(node)
            if source in self.tensors:
                section = {"kind": kind}
            else:
                section = _static(node, scale, zero, kind)
            coded = _Coded(node, source, (*node.inputs[1:], ""), section)
            if self._by_tensor and source not in self.tensors:
                coded = replace(coded, quantiser=_of_tensor(node, section))
        self._coded[node.outputs[0]] = coded

    def _parts(self, node: OnnxNode) -> tuple[Array, Array, int]:
        """Return scale, zero point and the type of codes of a quantiser."""
        names = (*node.inputs, "")
        scale, zero = self.tensors.get(names[1]), self.tensors.get(names[2])
        if scale is None or (names[2] and zero is None):
            raise _refusal(
                node, "its scale is no tensor of the file", "use DynamicQuantizeLinear, or a tensor"
            )
        if self.types[names[1]] != TensorProto.FLOAT:
            raise _refusal(node, "its scale is not FLOAT")
        given = node.attributes.get("output_dtype", 0)
        if node.kind == _DEQUANTIZE:
            given, own = self.types.get(node.inputs[0], 0), given
            if own not in (0, TensorProto.FLOAT):
                raise _refusal(node, f"its result is {type_name(own)}")
        kind = self.types[names[2]] if names[2] else given or TensorProto.UINT8
        if given not in (0, kind):
            raise _refusal(node, "its zero point is of another type than its codes")
        if node.attributes.get("block_size", 0):
            raise _refusal(node, "its scales are of blocks")
        if node.attributes.get("precision", 0) not in (0, TensorProto.FLOAT):
            raise _refusal(node, "it does not divide in FLOAT")
        if not node.attributes.get("saturate", 1):
            raise _refusal(node, "it does not saturate")
        if kind not in _STORED:
            raise _refusal(node, f"its codes are {type_name(kind)}")
        zero = np.zeros_like(scale) if zero is None else zero.astype(np.float32)
        if zero.size == scale.size == 1:  # a number, or a list of one
            zero = zero.reshape(scale.shape)
        if zero.shape != scale.shape:
            raise _refusal(node, "its zero points and its scales differ in shape")
        if kind not in (TensorProto.UINT8, TensorProto.INT8) and zero.any():
            raise _refusal(node, "its zero point is not 0")
        if not (scale.size and np.isfinite(scale).all() and (scale > 0).all()):
            raise _refusal(node, "a scale is not a number above 0")
        return scale, zero, kind

    def _dequantise(self, node: OnnxNode) -> None:
        source, result = node.inputs[0], node.outputs[0]
        if source in self._coded:
            self._undo(node, self._coded[source])
            return
        if source not in self.file.tensors:
            raise _refusal(
                node, f"{excerpt(source)} is neither a tensor of the file nor of QuantizeLinear"
            )
        if not set(node.inputs[1:]) - {""} <= self.file.tensors.keys():
            raise _refusal(node, "its scale is no tensor of the file", "store it as an initializer")
        scale, zero, _ = self._parts(node)
        held = self.tensors[source]
        value = _values(node, held, scale, zero)
        if not np.isfinite(value).all():
            raise _refusal(node, "a number that it makes is not finite")
        self.tensors[result], self.types[result] = value, int(TensorProto.FLOAT)

    def _undo(self, node: OnnxNode, coded: _Coded) -> None:
        """Remove a quantiser and its inverse."""
        result = node.outputs[0]
        mine = (*node.inputs[1:], "")[:2]
        dynamic = coded.node.kind == _DYNAMIC
        same = all(
            a == b or (not dynamic and a in self.tensors and b in self.tensors
                       and np.array_equal(self.tensors[a], self.tensors[b]))
            for a, b in zip(mine, coded.parts[:2], strict=True)
        )  # fmt: skip
        axes = {one.attributes.get("axis", 1) for one in (node, coded.node)}
        several = not dynamic and same and self.tensors[mine[0]].size > 1
        if not same or (len(axes) > 1 and several):
            raise _refusal(node, f"it does not undo {coded.node.place}")
        if node.attributes.get("block_size", 0) or node.attributes.get("output_dtype", 0) not in (
            0,
            TensorProto.FLOAT,
        ):
            raise _refusal(node, f"it does not undo {coded.node.place}")
        if coded.quantiser is not None:
            self._mark(node, coded.source, coded.node.outputs[0], coded.quantiser)
            return
        self._is[result] = coded.source
        if coded.source in self.tensors:
            self._fixed[result] = coded
        else:
            self._inputs[result] = coded

    def _mark(self, node: OnnxNode, source: str, codes: str, by: StaticQuantiser) -> None:
        """Replace a quantiser and its inverse by one marking operator; all readers of the same
        codes share its result."""
        result = node.outputs[0]
        if codes in self._read_back:
            self._is[result] = self._read_back[codes]
            return
        if by.zero_point == 0 and self._signed(source):
            positive = f"{result}/Relu"
            while positive in self._made or positive in self.tensors:
                positive += "_"
            self.nodes.append(OnnxNode(positive, "Relu", (source,), (positive,)))
            source = positive
        self.nodes.append(OnnxNode(node.name, QUANTISE, (source,), (result,)))
        self.quantisers[result] = by
        self._read_back[codes] = result

    def _signed(self, tensor: str) -> bool:
        """Return whether ONNX Runtime may have dropped a Relu after a tensor that may be negative,
        judged by its producer."""
        waiting, seen = [tensor], set[str]()
        while waiting:
            name = waiting.pop()
            node, by = self._made.get(name), self.quantisers.get(self._is.get(name, name))
            if node is None or name in seen:
                continue
            seen.add(name)
            if node.kind in _SIGNED or (by is not None and by.zero_point > 0):
                return True
            if node.kind in _REARRANGE:
                waiting += node.inputs if node.kind == "Concat" else node.inputs[:1]
        return False

    # --- everything else --------------------------------------------------------------------------

    def _refuse_codes(self, node: OnnxNode, names: Iterable[str]) -> None:
        for name in names:
            if name in self._coded:
                at = self._coded[name].node.place
                raise _refusal(node, f"it reads the codes of {at}", _CODES)
            if name in self._scales:
                at = self._scales[name].place
                raise _refusal(node, f"it reads the scale of {at}", _CODES)

    def _take(self, node: OnnxNode) -> None:
        if node.kind in ("Shape", "Size"):
            names = (self._coded[n].source if n in self._coded else n for n in node.inputs)
            self.nodes.append(replace(node, inputs=tuple(self._is.get(n, n) for n in names)))
            return
        self._refuse_codes(node, node.inputs)
        product = node.kind in _PRODUCTS and len(node.inputs) > 1
        for place, name in enumerate(node.inputs):
            coded = self._inputs.get(name)
            moved = node.kind in _MOVES and place == 0
            if coded is not None and moved and "input_scale" in coded.section:
                moved = not isinstance(coded.section["input_scale"], list)
            if coded is not None and moved:
                self._inputs[node.outputs[0]] = coded
            elif coded is not None and not (product and place == 0):
                raise _refusal(node, f"it reads what {coded.node.place} quantises", _HELP)
            if name in self._fixed and not (product and place == 1) and node.kind != "Transpose":
                at = self._fixed[name].node.place
                raise _refusal(node, f"it reads the parameter that {at} quantises", _HELP)
        first = node.inputs[0] if node.inputs else ""
        if node.kind == "Transpose" and node.attributes.get("perm", [1, 0]) == [1, 0]:
            if first in self._fixed:
                self._fixed[node.outputs[0]] = self._fixed[first]
            way: bool | None = True
        elif node.kind == "Transpose" and first in self._fixed:
            raise _refusal(node, "it moves a quantised parameter", _HELP)
        else:
            way = False if node.kind in ("Identity", "Dropout") else None
        held = self._is.get(first, first) in self.tensors or first in self._turns
        if held and node.kind in (_MOVES | {"Transpose"}):
            self._turns[node.outputs[0]] = (first, way)
        if product:
            self._product(node)
        elif node.kind == "Conv":  # a view of a matrix as its kernel makes it a linear
            key, _ = self._original(node.inputs[1])
            if key in self.tensors and self.tensors[key].ndim == 2:
                self._record(node, key, LinearQuantisation())
        self.nodes.append(
            replace(node, inputs=tuple(self._is.get(name, name) for name in node.inputs))
        )

    def _original(self, name: str) -> tuple[str, bool | None]:
        """Return the tensor of which another is a view, and whether it is transposed; None for a
        view of any other kind."""
        turned: bool | None = False
        while name in self._turns:
            name, again = self._turns[name]
            turned = None if turned is None or again is None else turned ^ again
        return name, turned

    def _record(self, node: OnnxNode, key: str, found: LinearQuantisation) -> None:
        if self.linears.setdefault(key, found) != found:
            raise _refusal(
                node,
                f"another product reads {excerpt(key)} with another quantiser, or transposed",
                "store a copy of the weight for each of the products",
            )

    def _product(self, node: OnnxNode) -> None:
        """Record the quantisation of the input and the weight of a product."""
        entering = node.inputs[0]
        weight, turned = self._original(node.inputs[1])
        if turned is not None:
            turned ^= bool(node.attributes.get("transB", 0)) and node.kind == "Gemm"
        key = self._is.get(weight, weight)
        coded, fixed = self._inputs.get(entering), self._fixed.get(weight)
        if key not in self.tensors:
            if coded is not None:
                raise _refusal(node, f"its operands depend on the tokens, and {coded.node.place}"
                               " quantises one", _HELP)  # fmt: skip
            return
        if self._is.get(entering, entering) in self.tensors:
            if fixed is not None:
                raise _refusal(
                    node, f"it multiplies two parameters, and {fixed.node.place} quantises one"
                )
            return
        if coded is None and fixed is None:
            self._record(node, key, LinearQuantisation())
            return
        if any(sign in key for sign in "*?["):
            raise _refusal(node, f"its weight has the name {excerpt(key)}", "rename the weight")
        if coded is not None and node.attributes.get("transA", 0):
            raise _refusal(node, "its quantised input is transposed")
        if turned is None:
            raise _refusal(node, f"its weight is a view of {excerpt(key)}", "store the view")
        bias, moved = self._original((*node.inputs, "")[2])
        if bias and (moved is not False or bias not in self.tensors):
            raise _refusal(node, "its bias is computed", "add it behind the product")
        found = LinearQuantisation(
            {} if coded is None else coded.section,
            {} if fixed is None else self._stored(node, fixed, key, turned),
            turned,
        )
        self._record(node, key, found)

    def _stored(self, node: OnnxNode, fixed: _Coded, key: str, turned: bool) -> Section:
        """Return the section `weights` that reproduces the quantised parameter of the file."""
        import torch

        from kcdsl.model.numerics.weights import dequantised

        scale, zero, kind = self._parts(fixed.node)
        held = self.tensors[key]
        if self.types[key] != TensorProto.FLOAT or held.ndim != 2:
            raise _refusal(fixed.node, f"{excerpt(key)} is no matrix of FLOAT")
        wanted = _quantised(fixed.node, held, scale, zero, kind)
        matrix, wanted = (a if turned else a.T for a in (held, wanted))
        for form in _WEIGHT_FORMS:
            own = dequantised(torch.from_numpy(np.ascontiguousarray(matrix)), form)
            if np.array_equal(own.numpy(), wanted):
                return {"format": form.format, "scale": form.scale}
        raise _refusal(
            fixed.node,
            f"no numerics say how it stores {excerpt(key)}: its scale is not the largest magnitude"
            " over the last code",
            "store the codes and DequantizeLinear alone",
        )


def _quantises_tensors(file: OnnxFile) -> bool:
    """Return whether a statically quantised tensor is read by anything other than as the first
    operand of a product with a weight."""
    computed = {one.name for one in file.inputs}
    codes, read = set[str](), set[str]()
    for node in file.nodes:
        first = node.inputs[0] if node.inputs else ""
        weight = len(node.inputs) > 1 and node.inputs[1] not in computed
        if (node.kind == _DEQUANTIZE and first in codes) or (node.kind in _MOVES and first in read):
            read.add(node.outputs[0])
        elif read.intersection(node.inputs[1:]) or (
            first in read and not (node.kind in _PRODUCTS and weight)
        ):
            return True
        elif node.kind == _QUANTIZE and first in computed:
            codes.add(node.outputs[0])
        if node.kind not in ("Shape", "Size") and computed.intersection(node.inputs):
            computed.update(node.outputs)
    return not read.isdisjoint(file.outputs)


def _refusal(node: OnnxNode, what: str, help: str | None = None) -> Refusal:
    return refuse(
        codes.OPERATION_UNSUPPORTED,
        f"{node.place} is not supported: {what}",
        help=help or _HELP,
    )


def _along(node: OnnxNode, scale: Array, held: Array) -> tuple[int, ...]:
    """Return the shape to which scales are reshaped for broadcasting."""
    if scale.shape in ((), (1,)):
        return (1,) * held.ndim
    axis = node.attributes.get("axis", 1)
    axis += held.ndim if axis < 0 else 0
    if not 0 <= axis < held.ndim or scale.shape != (held.shape[axis],):
        raise _refusal(node, "its scales do not fit what they scale")
    return tuple(-1 if i == axis else 1 for i in range(held.ndim))


def _values(node: OnnxNode, held: Array, scale: Array, zero: Array) -> Array:
    along = _along(node, scale, held)
    with np.errstate(all="ignore"):
        found = (held.astype(np.float32) - zero.reshape(along)) * scale.reshape(along)
    return np.asarray(found, dtype=np.float32)


def _quantised(node: OnnxNode, held: Array, scale: Array, zero: Array, kind: int) -> Array:
    """Return a parameter after quantisation and dequantisation."""
    from kcdsl.model.numerics.formats import CODE_FORMATS

    if kind not in _FORMATS:
        raise _refusal(node, f"its codes are {type_name(kind)}")
    import torch

    form, along = CODE_FORMATS[_FORMATS[kind]], _along(node, scale, held)
    ratio = torch.from_numpy((held / scale.reshape(along)).astype(np.float64))
    shift = zero.reshape(along)
    whole = form.grid.nearest(ratio).numpy() + shift
    found = np.clip(whole, 0.0 if form.zero_point else -form.below, form.above)
    return np.asarray((found - shift).astype(np.float32) * scale.reshape(along), dtype=np.float32)


def _static(node: OnnxNode, scale: Array, zero: Array, kind: int) -> Section:
    """Return the section `activations` of a static quantiser."""
    form = _FORMATS.get(kind)
    if form is None:
        raise _refusal(node, f"its codes are {type_name(kind)}")
    if scale.size > 1 and node.attributes.get("axis", 1) != -1:
        raise _refusal(node, "its scales are not those of the last dimension (axis=-1)")
    if scale.size > 1 and (zero != zero.flat[0]).any():
        raise _refusal(node, "its zero points differ")
    zero_point = int(zero.flat[0])
    if form == "int8_full" and zero_point:  # the same quantiser with unsigned codes
        form, zero_point = "uint8", zero_point + 128
    numbers = [float(one) for one in scale.reshape(-1)]
    section: Section = {
        "format": form,
        "scale": "static",
        "input_scale": numbers[0] if len(numbers) == 1 else numbers,
    }
    return section | ({"input_zero_point": zero_point} if form == "uint8" else {})


def _of_tensor(node: OnnxNode, section: Section) -> StaticQuantiser:
    """Return a per-tensor quantiser, with unsigned codes."""
    scale = section["input_scale"]
    if isinstance(scale, list):
        raise _refusal(node, "its scales are of channels, and its tensor is no input of products")
    if not LEAST_STATIC <= scale <= LARGEST_STATIC:
        raise _refusal(
            node,
            f"its scale is {scale:g}; it must lie between 2^-100 and 2^24",
            "calibrate without what hides scores: leave the sum with the mask, and the softmax"
            " behind it, out of `quantize_static` (nodes_to_exclude, op_types_to_quantize)",
        )
    if section["format"] not in ("uint8", "int8_full"):
        raise _refusal(node, f"it quantises a tensor to {section['format']}")
    return StaticQuantiser(scale, section.get("input_zero_point", 128))


def without_quantisers(file: OnnxFile) -> tuple[OnnxFile, FileNumerics]:
    """Return the program of a file without quantisers, and the numerics of the quantisers.

    Refuse (KC461) quantisers that no numerics express, with the operator and the node.
    """
    compute, file = COMPUTE[file.own], as_dequantised(file)
    first = next((node for node in file.nodes if node.kind in QUANTISERS), None)
    if first is None:
        return file, FileNumerics({}, compute)
    if compute != "float32":
        raise _refusal(first, f"the weights of the file are {compute}", "export it in FLOAT")
    reader = _Reader(file)
    return reader.read(), FileNumerics(reader.linears, compute, reader.quantisers)
