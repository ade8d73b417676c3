"""Weights that an inference kernel reads from a checkpoint of its own, such as a quantised one.

They correspond one to one, by name, to the tensors of the training kernel. Quantised matrices are
dequantised by their storage format (`quantised`); every other tensor is read as stored.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.checkpoint.headers import (
    StoredTensor,
    file_metadata,
    header_of,
    metadata_of,
    not_readable,
    read_headers,
    weights_folder,
)
from kcdsl.model.checkpoint.inputs import (
    refuse_other_cache,
    refuse_other_codes,
    refuse_other_inputs,
    stored_inputs,
)
from kcdsl.model.checkpoint.quantised import (
    PLAIN,
    QuantisedWeight,
    Scheme,
    broken,
    is_sound,
)
from kcdsl.model.checkpoint.ranges import HashedFile, changed, hashed_file, manifest_of
from kcdsl.model.checkpoint.schemes import scheme_of
from kcdsl.model.checkpoint.tensors import TYPES
from kcdsl.model.checkpoint.torchao import torchao_scheme
from kcdsl.model.numerics.formats import CODE_FORMATS, LAYOUTS
from kcdsl.model.numerics.specification import Numerics
from kcdsl.source.files import excerpt, is_file, json_value, read_bytes, shown
from kcdsl_certs.statement.manifest import Resource

CONFIG, QUANTISATION = "config.json", "hf_quant_config.json"
_LARGEST_CONFIG = 16 * 2**20
_CODED = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_FACTOR = ".pre_quant_scale"
"""ModelOpt's name of the input factors of AWQ and SmoothQuant."""
OF_FILES = frozenset({
    *("quantization_config", "torch_dtype", "dtype", "transformers_version", "_name_or_path"),
    *("architectures", "use_cache", "unsloth_version", "compression_config"),
})  # fmt: skip
"""Keys of config.json about the storage of weights or the writer of the file."""


@dataclass(frozen=True, slots=True)
class ServedWeights(Mapping[str, Tensor]):
    """Weights of the inference kernel as float32, by the keys of the training checkpoint.

    `digest` (hex) is the digest of the manifest of all files: weights, index and configurations.
    `shapes` has the tensors that the kernel reads, by training key and stored name; `transposed`
    names those that the files store transposed.
    """

    path: Path
    digest: str
    config: Mapping[str, Any]
    scheme: Scheme | None
    stored: Mapping[str, StoredTensor]
    files: Mapping[str, HashedFile]
    matrices: Mapping[str, frozenset[str]]
    shapes: Mapping[str, tuple[int, ...]]
    transposed: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.shapes))

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, key: str) -> Tensor:
        """Read a tensor; refuse NaN, infinity, and data that its format does not allow."""
        if key not in self.shapes:
            raise KeyError(key)
        found = self.quantised(key)
        value = self._raw(key).to(torch.float32) if found is None else found.value
        finite = bool(torch.isfinite(value).all()) if found is None else is_sound(found)
        if not finite:
            raise refuse(
                codes.CHECKPOINT_NOT_FINITE,
                f"{shown(self.path)} holds NaN or infinite weights in {key}",
                help="quantise the model again",
            )
        return value.T.contiguous() if key in self.transposed else value

    def quantised(self, key: str) -> QuantisedWeight | None:
        """Return a quantised matrix; None for a tensor that is not quantised."""
        if key not in self.matrices or self.scheme is None:
            return None
        kinds = {part: one.kind for part, one in self.stored.items()}
        try:
            found = self.scheme.decode(self._raw, key.removesuffix(".weight"), kinds)
        except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
            raise broken(key, f"its tensors do not fit its format: {excerpt(error)}") from None
        if tuple(found.value.shape) != self.shapes[key]:
            raise _other_shape(key, tuple(found.value.shape), self.shapes[key])
        return found

    def refuse_other_shape(self, key: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor whose headers contradict this shape; no weight is read."""
        if key not in self.matrices or self.scheme is None:
            stored = tuple(reversed(shape)) if key in self.transposed else shape
            if self.stored[key].shape != stored:
                raise _other_shape(key, self.stored[key].shape, stored)
            return
        if key in self.transposed:
            raise refuse(
                codes.MODEL_CONFIG,
                f"{key} is quantised, and its architecture stores it as [in, out]: no format says"
                " which of the two its codes are in",
                help="give the inference kernel a checkpoint in bfloat16 or float16, and say in"
                " `numerics` how it quantises it",
            )
        place = f"{key.removesuffix('.weight')}.{self.scheme.codes}"
        if len(shape) != 2 or not self.scheme.holds(shape, place, self.stored[place]):
            raise _other_shape(place, self.stored[place].shape, shape)

    def _raw(self, name: str) -> Tensor:
        one = self.stored[name]
        kind = {**TYPES, **_CODED}.get(one.kind)
        if kind is None:
            raise refuse(
                codes.CHECKPOINT_DTYPE,
                f"{name} is stored as {one.kind}",
                help="`kcdsl explain quantised-checkpoints` has the formats that are read; "
                "store it in one of them",
            )
        if one.start == one.end:
            return torch.empty(one.shape, dtype=kind)
        raw = torch.frombuffer(
            bytearray(self.files[name].read(one.start, one.end)), dtype=torch.uint8
        )
        return raw.view(kind).reshape(one.shape)

    @property
    def plain_names(self) -> tuple[str, ...]:
        """Return the names of weights: one per quantised matrix, none for its companion tensors."""
        parts = {part for own in self.matrices.values() for part in own}
        whole = (name for name in self.stored if name not in parts)
        return tuple(sorted((*whole, *self.matrices)))

    def refuse_other_storage(self, key: str, numerics: Numerics) -> None:
        """Refuse (KC463) numerics whose storage of a matrix differs from this checkpoint, where the
        bounds depend on it (products of codes), and numerics with other scales of inputs."""
        weights, found = numerics.weights, self.quantised(key)
        if found is not None and self.scheme is not None:
            kinds = {part: one.kind for part, one in self.stored.items()}
            refuse_other_codes(key, self.scheme.inputs_of(key), self.scheme.cache, numerics)
            refuse_other_cache(self._raw, key, kinds, numerics.kv_cache)
            inputs = stored_inputs(self._raw, key.removesuffix(".weight"), kinds)
            refuse_other_inputs(key, inputs, self.scheme.limit, numerics.activations)
        if weights.layout is None or found is None:
            if weights.layout is not None:
                raise _other(key, "it is not quantised", "an override")
            if found is not None and numerics.by_codes:
                raise _other(key, f"it is {found.form} {found.layout}", "weights")
            return
        form, layout = CODE_FORMATS[weights.format], LAYOUTS[weights.scale]
        forms = {"int8": ("int8", "int8_full"), "int4": ("int4_full",)}
        able = forms.get(found.form, (found.form,))
        said = f"it is {found.form or 'of a form without a name'} {found.layout}".rstrip()
        if form.name not in able or layout.name != found.layout or found.least_code < -form.below:
            raise _other(key, said, "weights")
        if weights.scale_format != "float32":
            raise _other(key, "its scales are taken as float32 numbers", "weights.scale_format")
        late = numerics.by_codes or weights.applied != "weights"
        least = found.scale * (1.0 if form.integer else math.ldexp(1.0, form.top_exponent))
        if late and not float(found.value.abs().max()) >= least:
            raise refuse(
                codes.NUMERICS,
                f"{key} has a scale that is larger than its largest code needs; where scales are"
                " multiplied after the codes no bound of that is known",
                help="quantise it with scales of its largest magnitudes",
            )


def _other_shape(key: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> Refusal:
    return refuse(
        codes.CHECKPOINT_SHAPE,
        f"{key} has shape {shape}; expected that of {expected}",
        help="quantise the checkpoint again for this model, or name the config.json that "
        "belongs to it",
    )


def _other(key: str, what: str, field: str) -> Refusal:
    return refuse(
        codes.NUMERICS,
        f"the checkpoint of the inference kernel stores {key} otherwise: {what}",
        help=f"state it in numerics: `{field}`, or leave `weights` and `activations` out for a "
        "kernel that multiplies dequantised weights",
    )


def load_served(
    path: Path, admitted: Callable[[Path], Path], *, headers_only: bool = False
) -> ServedWeights:
    """Read headers and configuration of an inference kernel's checkpoint; no weight is read yet.

    With `headers_only` its files are not hashed either, and its weights cannot be read later.
    """
    headers = read_headers(path, admitted)
    folder = weights_folder(path)
    read: list[Resource] = []

    def document(name: str) -> dict[str, Any]:
        place = folder / name
        if not is_file(place):
            return {}
        data = read_bytes(admitted(place), _LARGEST_CONFIG)
        read.append(Resource(name, len(data), hashlib.sha256(data).hexdigest()))
        return _object(place, data)

    config, more = document(CONFIG), document(QUANTISATION)
    if headers.index is not None:
        index, data = headers.index
        read.append(Resource(index.name, len(data), hashlib.sha256(data).hexdigest()))
    method = config.get("quantization_config") or more.get("quantization")
    if method is not None and not isinstance(method, dict):
        raise refuse(
            codes.MODEL_CONFIG,
            "the quantisation configuration is no object",
            help="write `quantization_config` as the tool that quantised the checkpoint does, "
            "as a mapping",
        )
    by_torchao = method is not None and str(method.get("quant_method", "")).lower() == "torchao"
    files: dict[str, HashedFile] = {}
    metadata: dict[str, str] = {}
    for place, header in headers.files.items():
        if headers_only:
            told = file_metadata(place) if by_torchao else {}
        else:
            one = hashed_file(place)
            end = min((t.start for t in header.values()), default=one.size)
            first = one.read(0, end)
            if header_of(first, one.size) != header:
                raise changed(place)
            told = _metadata(place, first) if by_torchao else {}
            files |= dict.fromkeys(header, one)
            read.append(Resource(place.name, one.size, one.sha256))
        _add(metadata, told, place)
    stored = headers.tensors
    scheme = None
    if method is not None:
        scheme = torchao_scheme(metadata) if by_torchao else scheme_of(method)
    kinds = {name: one.kind for name, one in stored.items()}
    matrices = {} if scheme is None else scheme.matrices(tuple(stored), kinds)
    digest = "" if headers_only else manifest_of(read).digest
    found = ServedWeights(path, digest, config, scheme, stored, files, matrices, {})
    for name in found.plain_names:
        if name in matrices and name in kinds and name not in matrices[name]:
            raise refuse(
                codes.CHECKPOINT_TENSORS,
                f"{excerpt(name)} is stored twice, as it is and as codes",
                help="quantise the model again with the library that its configuration names",
            )
        if name not in matrices and kinds[name] not in PLAIN:
            said = "no quantisation configuration" if scheme is None else scheme.name
            raise refuse(
                codes.CHECKPOINT_DTYPE,
                f"{excerpt(name)} is stored as {kinds[name]}, which {said} says nothing of",
                help="keep config.json, with its quantization_config, beside the weights",
            )
    return found


def _metadata(place: Path, first: memoryview) -> dict[str, str]:
    try:
        return metadata_of(first)
    except ValueError as error:
        raise not_readable(place, error) from None


def _add(metadata: dict[str, str], told: Mapping[str, str], place: Path) -> None:
    """Add the metadata of a file; refuse values that contradict another shard."""
    for name, text in told.items():
        if metadata.setdefault(name, text) != text:
            raise refuse(
                codes.CHECKPOINT_FORMAT,
                f"the metadata of {shown(place)} says something else of {excerpt(name)} than"
                " another shard",
                help="save the checkpoint again with save_pretrained",
            )


def matched(
    served: ServedWeights,
    train: Mapping[str, Any],
    rule: Callable[[str], str | None],
    keys: Mapping[str, str],
    tied: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    transposed: frozenset[str],
    same_program: Callable[[Mapping[str, Any]], bool],
) -> ServedWeights:
    """Return the weights by the keys of the training checkpoint. Refuse a configuration of another
    model, and tensors that are missing, unknown or of another shape.

    Args:
        train: the configuration of the training kernel's model.
        rule: returns the parameter name of a tensor name.
        keys: keys of the training checkpoint by parameters.
        tied: names of parameters that are copies, with the names of their originals.
        shapes: the shapes of parameters.
        transposed: keys of the parameters that the files store transposed.
        same_program: returns whether a configuration with other keys describes the program of
        `train`.
    """
    if served.config and not same_program(served.config):
        _refuse_other_model(train, served.config, same_program)
    served = replace(served, transposed=transposed)
    names: dict[str, tuple[int, ...]] = {}
    unknown: list[str] = []
    copies: dict[str, str] = {}
    for name in served.plain_names:
        own = rule(name)
        if own is None:
            continue
        if own in tied:
            copies[name] = tied[own]
        elif own not in keys or keys[own] != name:
            unknown.append(name)
        else:
            names[name] = shapes[own]
            served.refuse_other_shape(name, shapes[own])
    for name in unknown:
        if name.endswith(_FACTOR):
            raise refuse(
                codes.MODEL_CONFIG,
                f"{excerpt(name)} multiplies the inputs of its matrix, and rounds them: no rule of"
                " bounds has this rounding",
                help="quantise the model again by an algorithm that leaves inputs as they are, or"
                " multiply the factors into the layer before, and export it again",
            )
    missing = [key for key in keys.values() if key not in names]
    if missing or unknown:
        said = f"lacks {excerpt(missing[0])}" if missing else f"has {excerpt(unknown[0])} besides"
        raise refuse(
            codes.CHECKPOINT_TENSORS,
            f"the checkpoint of the inference kernel {said}",
            help="give the quantised form of the checkpoint of the contract",
        )
    found = replace(served, shapes=names)
    for name, of in copies.items():
        other = keys[of]
        quantised = {name, other} & served.matrices.keys()
        if not served.digest and not quantised:
            continue
        if quantised or not torch.equal(found._raw(name), found._raw(other)):
            raise refuse(
                codes.CHECKPOINT_TENSORS,
                f"{name} differs from {other}, though the configuration ties them",
                help="write `tie_word_embeddings: false` into config.json if both are meant, "
                "else save the model again",
            )
    return found


def _refuse_other_model(
    train: Mapping[str, Any],
    infer: Mapping[str, Any],
    same_program: Callable[[Mapping[str, Any]], bool],
) -> None:
    """Refuse the configuration of another program, by a key that makes it another one; keys about
    storage (`OF_FILES`) do not."""
    keys = sorted(
        (train.keys() | infer.keys()) - OF_FILES, key=lambda key: (key != "model_type", key)
    )
    differ = [key for key in keys if train.get(key) != infer.get(key)]
    telling = (key for key in differ if not same_program({**train, key: infer.get(key)}))
    for key in (*islice(telling, 1), *differ)[:1]:
        raise refuse(
            codes.MODEL_CONFIG,
            f"config.json of the inference kernel's checkpoint has {excerpt(key)} "
            f"{excerpt(infer.get(key))}; that of the model has {excerpt(train.get(key))}",
            help="both kernels run one model: give the quantised form of its checkpoint",
        )


def _object(path: Path, data: bytes) -> dict[str, Any]:
    try:
        found = json_value(data.decode())
    except (ValueError, RecursionError) as error:
        raise refuse(
            codes.MODEL_CONFIG,
            f"{shown(path)} is not JSON: {error}",
            help="give the file that was saved with the quantised weights",
        ) from None
    if not isinstance(found, dict):
        raise refuse(
            codes.MODEL_CONFIG,
            f"{shown(path)} must hold a JSON object",
            help="give the file that was saved with the quantised weights",
        )
    return found
