"""Quantised weights that the inference kernel reads (docs/reference/quantised-checkpoints.md)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from kcdsl_certs.encoding.files import open_regular
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval import decoding
from kcdsl_certs.recheck.interval.decoding import (
    Decoded,
    Parts,
    largest_amax,
    method_name,
    parsed,
)
from kcdsl_certs.recheck.interval.stated import fits_cache, fits_inputs, fits_torchao
from kcdsl_certs.recheck.interval.tensors import (
    Singles,
    Tensor,
    as_float32,
    integers,
    numbers,
    read_file,
    read_index,
)
from kcdsl_certs.recheck.interval.torchao import told_by_torchao, torchao
from kcdsl_certs.statement.manifest import Manifest, Resource
from kcdsl_certs.statement.weights import CONFIGURATIONS, SINGLE, index_of

_LARGEST = 1 << 24
_PARTS = (
    "weight", "weight_scale", "weight_scale_2", "weight_global_scale", "weight_zero_point",
    "weight_packed", "weight_shape", "weight_g_idx", "weight_scale_inv", "qweight",
    "qzeros", "scales", "g_idx", "_weight_qdata", "_weight_scale", "_weight_zero_point",
    "_weight_act_pre_scale", "pre_quant_scale", "input_scale_ub",
    *("input_scale", "activation_scale", "input_global_scale", "_weight_act_quant_scale"),
    *("input_zero_point", "_weight_act_quant_zero_point", "k_scale", "v_scale", "output_scale"),
)  # fmt: skip
_METHODS = {
    "compressed-tensors": decoding.compressed_tensors,
    "gptq": decoding.gptq,
    "awq": decoding.awq,
    "modelopt": decoding.modelopt,
    "fp8": decoding.fp8,
    "fbgemm_fp8": decoding.fbgemm_fp8,
    "torchao": torchao,
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """Static scales of the input of a linear, one or one for each channel, and the zero point as a
    signed code."""

    scales: tuple[float, ...]
    zero: int


@dataclass(frozen=True, slots=True)
class Served:
    """The tensors of a checkpoint of the inference kernel, and the digest of its manifest (hex).

    `metadata` has the metadata texts of tensors, a mapping for each file.
    """

    digest: str
    tensors: Mapping[str, Tensor]
    method: Mapping[str, Any]
    metadata: Sequence[Mapping[str, str]] = ()

    def plain(self, key: str) -> Singles:
        """Return a tensor that is not quantised. Raises Rejected "parameter/…"."""
        if key not in self.tensors or key in self.coded:
            raise Rejected("parameter/missing", f"the inference kernel has no plain {key!r}")
        return as_float32(self.tensors[key], key)

    @property
    def coded(self) -> frozenset[str]:
        """Return the names of quantised matrices."""
        found = set()
        for name, tensor in self.tensors.items():
            base, _, last = name.rpartition(".")
            if last in ("weight_packed", "qweight", "_weight_qdata"):
                found.add(f"{base}.weight")
            elif last == "weight" and tensor.dtype in ("F8_E4M3", "F8_E5M2", "I8", "U8"):
                found.add(name)
        return frozenset(found)

    def matrix(self, key: str) -> Decoded:
        """Return a quantised matrix.

        Raises Rejected "served/method" for an unknown format, "served/tensor" for tensors that do
        not fit it, "parameter/not-finite".
        """
        base = key.removesuffix(".weight")
        try:
            if len(self._codes(base)) > 1:
                raise ValueError("it is stored twice")
            if not isinstance(self.method, dict):
                raise Rejected("served/config", "the quantisation configuration is no object")
            name = method_name(self.method)
            if name not in _METHODS:
                raise Rejected("served/method", f"{name[:40]!r} is not known")
            found = _METHODS[name](Parts(self.tensors, self.method, self.metadata), base)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise Rejected("served/tensor", f"{key[:80]!r}: {error}") from None
        if not np.isfinite(found.value).all() or not np.isfinite(found.largest_scale):
            raise Rejected("parameter/not-finite", f"{key!r} holds NaN or infinity")
        return found

    def cached(self, key: str, name: str) -> float | None:
        """Return a cache scale of the output of the linear with this weight: `name` is "k_scale"
        (keys), "v_scale" (values) or "output_scale" (either).

        Raises Rejected "served/tensor" for a tensor that is not one float.
        """
        stored = self.tensors.get(f"{key.removesuffix('.weight')}.{name}")
        if stored is None:
            return None
        if stored.dtype not in ("F32", "F16", "BF16"):
            raise Rejected("served/tensor", f"{name} of {key[:80]!r} is no float")
        found = numbers(stored).ravel()
        if found.size != 1:
            raise Rejected("served/tensor", f"{name} of {key[:80]!r} is not one number")
        return float(found[0])

    @property
    def largest_amax(self) -> float | None:
        """Return the limit of the amax of dynamic scales of inputs, if the format states one.

        Raises Rejected "served/method" if it is not a positive number.
        """
        return largest_amax(self.method)

    def inputs(self, key: str) -> Inputs | None:
        """Return the static input scales of a quantised matrix, None if no tensor has them.

        Raises Rejected "served/tensor" for an invalid scale or zero point.
        """
        base = key.removesuffix(".weight")
        direct = ("input_scale", "activation_scale", "_weight_act_quant_scale")
        offset = ("input_zero_point", "_weight_act_quant_zero_point")
        given = [name for name in (*direct, "input_global_scale") if self.has(base, name)]
        zeros = [name for name in offset if self.has(base, name)]
        if not given and not zeros:
            return None
        try:
            if len(given) != 1 or len(zeros) > 1:
                raise ValueError("its inputs have two scales, or a zero point alone")
            stored = self.tensors[f"{base}.{given[0]}"]
            if stored.dtype not in ("F32", "F16", "BF16"):
                raise ValueError("a scale of its inputs is no float")
            scales = numbers(stored).ravel()
            with np.errstate(all="ignore"):
                scales = scales if given[0] in direct else np.float32(1) / scales
            if not scales.size or not (np.isfinite(scales) & (scales > 0)).all():
                raise ValueError("a scale of its inputs is not positive")
            found = {0}
            for name in zeros:
                point = self.tensors[f"{base}.{name}"]
                if point.dtype not in ("I8", "I32", "I64"):
                    raise ValueError("a zero point of its inputs is no signed integer")
                found = set(integers(point, point.dtype).ravel().tolist())
            if len(found) != 1:
                raise ValueError("its inputs have several zero points")
        except ValueError as error:
            raise Rejected("served/tensor", f"{key[:80]!r}: {error}") from None
        return Inputs(tuple(float(one) for one in scales), int(found.pop()))

    def says(self, key: str, inputs: tuple[str, str] | None, cache: tuple[str, str] | None) -> str:
        """Return which of "inputs" and "keys and values" the checkpoint quantises with another code
        format or scale layout; "" for neither. Inputs and caches without codes are not compared.

        Raises Rejected "served/method" for a configuration that cannot be compared.
        """
        name, base = method_name(self.method), key.removesuffix(".weight")
        try:
            if inputs is not None:
                if name == "torchao":
                    alike = fits_torchao(told_by_torchao(self.metadata, base), *inputs)
                else:
                    alike = fits_inputs(self.method, name, *inputs)
                if not alike:
                    return "inputs"
            if cache is not None and not fits_cache(self.method, name, *cache):
                return "keys and values"
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            said = f"codes of the inputs of {key[:80]!r}: {error}"
            raise Rejected("served/method", said) from None
        return ""

    def _codes(self, base: str) -> list[str]:
        names = ("weight", "weight_packed", "qweight", "_weight_qdata")
        return [name for name in names if self.has(base, name)]

    def has(self, base: str, name: str) -> bool:
        """Return whether a matrix has a tensor."""
        return f"{base}.{name}" in self.tensors


def read_served(path: Path, keys: Collection[str]) -> Served:
    """Return the inference kernel's tensors of these parameters; every file is hashed.

    Raises Rejected "checkpoint/…", as reading a checkpoint does.
    """
    names = {
        f"{base}.{part}" for base in (key.rpartition(".")[0] for key in keys) for part in _PARTS
    }
    index = index_of(path)
    if index is None:
        one = path / SINGLE if os.path.isdir(path) else path
        single = read_file(one, {*names, *keys})
        resources, folder = [single.resource], one.parent
        tensors, metadata = single.tensors, [single.metadata]
    else:
        resources, tensors, metadata = read_index(index, {*names, *keys})
        folder = index.parent
    documents = {}
    for name in CONFIGURATIONS:
        if os.path.lexists(folder / name):
            with open_regular(folder / name, "checkpoint/unreadable") as file:
                data = file.read(_LARGEST + 1)
            resources.append(Resource(name, len(data), hashlib.sha256(data).hexdigest()))
            documents[name] = parsed(data)
    method = documents.get("config.json", {}).get("quantization_config")
    method = method or documents.get("hf_quant_config.json", {}).get("quantization") or {}
    ordered = tuple(sorted(resources, key=lambda one: PurePosixPath(one.name)))
    return Served(Manifest(ordered).digest, tensors, method, metadata)
