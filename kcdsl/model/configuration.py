"""The configuration of a model: reading config.json, and checking that an architecture implements
it.

An architecture declares each key of the config.json of its families (`kcdsl.model.registry`): those
that the forward pass reads, those of which it implements only some values, and those that do not
change logits. Everything else is refused: a model with the same tensors and one more key, such as a
multiplier or layers without RoPE, is another program.

Needs no tensor library, so that `kcdsl compile` can already refuse a configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.ir.terms import ONNX, ModelRef
from kcdsl.model.checkpoint.headers import weights_folder
from kcdsl.model.files import Artefacts, companion
from kcdsl.model.registry import ModelFamily, declared, load
from kcdsl.source.files import json_value, read_bytes, shown

LARGEST_COUNT = 1 << 24
"""The largest width, vocabulary or length; larger numbers would exhaust the memory."""
_LARGEST_CONFIG = 16 * 2**20
"""The largest config.json in bytes; real ones have a few KiB."""
LARGEST_DEPTH = 1 << 12
"""The greatest number of layers."""


class Fields:
    """The fields of one configuration. Each reader checks type and range."""

    def __init__(self, raw: Mapping[str, Any], architecture: str) -> None:
        self._raw = raw
        self._architecture = architecture

    def _refusal(self, message: str) -> Refusal:
        return refuse(
            codes.MODEL_CONFIG,
            f"{self._architecture} configuration: {message}",
            help="correct config.json, or take that of the published model",
        )

    def check(self, holds: bool, message: str) -> None:
        """Refuse with `message` unless `holds`."""
        if not holds:
            raise self._refusal(message)

    def count(
        self,
        name: str,
        default: int | None = None,
        most: int = LARGEST_COUNT,
        least: int = 1,
        *,
        null: bool = False,
    ) -> int:
        """Return an integer from `least` to `most`; a missing field takes the default, and one that
        is null if `null`."""
        value = self._raw.get(name)
        self.check(null or value is not None or name not in self._raw, f"{name!r} is null")
        value = default if value is None else value
        self.check(value is not None, f"the field {name!r} is missing")
        good = isinstance(value, int) and not isinstance(value, bool) and value >= least
        wanted = "a positive integer" if least == 1 else f"an integer from {least} on"
        self.check(good, f"{name!r} must be {wanted}, not {value!r}")
        assert isinstance(value, int)
        self.check(value <= most, f"{name!r} is greater than {most}")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a finite positive number."""
        value = self._raw.get(name, default)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        self.check(
            good and 0 < value <= sys.float_info.max,
            f"{name!r} must be a positive number, not {value!r}",
        )
        return float(value)

    def optional(self, name: str) -> float | None:
        """Return a finite positive number; None where the field is missing or null."""
        return None if self._raw.get(name) is None else self.number(name, 0.0)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._raw.get(name, default)
        self.check(isinstance(value, bool), f"{name!r} must be true or false, not {value!r}")
        return bool(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return a nested object; empty where the field is missing or null."""
        value = self._raw.get(name)
        value = {} if value is None else value
        self.check(isinstance(value, dict), f"{name!r} must be an object, not {value!r}")
        assert isinstance(value, dict)
        return value

    def kinds(self, name: str, allowed: Iterable[str]) -> tuple[str, ...]:
        """Return a list of words that are all allowed; empty where it is missing or null."""
        value = self._raw.get(name)
        value = [] if value is None else value
        good = isinstance(value, list) and set(map(str, value)) <= set(allowed)
        self.check(good, f"{name!r} must be a list of {', '.join(allowed)}, not {value!r}")
        return tuple(value)

    def require(self, name: str, allowed: Iterable[object], default: object) -> None:
        """Refuse a value outside `allowed`."""
        options = tuple(allowed)
        value = self._raw.get(name, default)
        shown = ", ".join(map(str, options))
        self.check(value in options, f"{name!r} is {value!r}; supported: {shown}")


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Refuse a missing file and any other content."""
    return parse_config(path, read_bytes(path, _LARGEST_CONFIG + 1))


def parse_config(path: Path, data: bytes) -> dict[str, Any]:
    """Return the JSON object in the bytes of a file. Refuse any other content."""
    try:
        if len(data) > _LARGEST_CONFIG:
            raise ValueError(f"it is larger than {_LARGEST_CONFIG} bytes")
        raw = json_value(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise refuse(
            codes.MODEL_CONFIG,
            f"{shown(path)} is not JSON: {error}",
            help="give the config.json that was saved with the model",
        ) from None
    if not isinstance(raw, dict):
        raise refuse(
            codes.MODEL_CONFIG,
            f"{shown(path)} must hold a JSON object",
            help="give the config.json that was saved with the model",
        )
    return raw


def find_config(ref: ModelRef, checkpoint: Path, base: Path | Artefacts) -> dict[str, Any]:
    """Return the configuration of a model: the file its contract names, else the config.json beside
    the checkpoint; empty for a user's own module or an ONNX file without one.

    `base` is the folder of the contract. Refuse a file that is missing or cannot be read.
    """
    files = Artefacts.of(base)
    if ref.config is not None:
        path = files.find(ref.config)
    else:
        beside = files.beside(checkpoint, "config.json")
        if beside is None and (ref.module is not None or ref.architecture == ONNX):
            return {}
        path = beside or weights_folder(checkpoint) / "config.json"
    return parse_config(path, files.read(path, companion("config"), _LARGEST_CONFIG))


# --- what an architecture implements --------------------------------------------------------------

_INERT = frozenset({
    *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "initializer_range"),
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id"),
    *("mask_token_id", "unk_token_id", "tokenizer_class", "gradient_checkpointing"),
    *("attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    *("classifier_dropout", "id2label", "label2id", "problem_type", "task_specific_params"),
    *("finetuning_task", "num_labels", "_attn_implementation", "attn_implementation"),
    *("_attn_implementation_autoset", "model_type", "architectures"),
    # read by generate(), not by the forward pass
    *("max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "num_beams"),
    *("repetition_penalty", "length_penalty", "no_repeat_ngram_size", "early_stopping"),
    *("num_return_sequences", "max_new_tokens"),
})  # fmt: skip
"""Keys of any family that change neither hidden states nor logits."""

ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast"),
        *("beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        *("short_factor", "long_factor", "factor", "original_max_position_embeddings"),
        "attention_factor",
    ),
}
"""The fields of each form of RoPE scaling, besides the common ones."""
ROPE_BY_LAYER = ("full_attention", "sliding_attention")
"""Kinds of layers that may have their own RoPE parameters."""
_OLD_NAMES = {"su": "longrope"}
"""Earlier names of forms of RoPE scaling."""
_ROPE_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_ONE_STACK: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "quantization_config": (None,),
    "pruned_heads": ({},),
    "partial_rotary_factor": (1, None),
    "tie_encoder_decoder": (False,),
}
"""Keys of any family with the only values that the forward passes implement."""


def check_config(architecture: str, raw: Mapping[str, Any]) -> None:
    """Refuse a configuration that an architecture does not implement, without importing torch: all
    values are checked for a form of the decoder, only the keys for any other architecture.

    Raises Refusal (KC455).
    """
    family_of(architecture, raw)
    if declared(architecture).decoder:
        load(architecture).read(raw)


def family_of(architecture: str, raw: Mapping[str, Any]) -> ModelFamily:
    """Check every key of a configuration and return its family.

    Without model_type, the family is the one that has the name of the architecture.
    Raises Refusal (KC455) for an unknown model_type, a key that the family does not declare, and a
    value that the forward pass does not implement.
    """
    name, own = raw.get("model_type", architecture), declared(architecture).families
    if not isinstance(name, str) or name not in own:
        message = f"'model_type' is {name!r}; implemented: {', '.join(own)}"
        raise _refusal(architecture, message)
    family = own[name]
    only = {k: v for k, v in _ONE_STACK.items() if k not in family.read} | dict(family.only)
    classes = raw.get("architectures") or ()
    for cls in classes if isinstance(classes, list | tuple) else (classes,):
        if not isinstance(cls, str) or cls not in family.classes:
            raise _refusal(
                architecture,
                f"'architectures' names {cls!r}; implemented for {name}: "
                f"{', '.join(family.classes)}",
            )
    for key in sorted(family.needed - set(raw)):
        raise _refusal(architecture, f"the field {key!r} is missing, which {name} needs")
    for key, value in raw.items():
        if key in only:
            _one_of(architecture, key, value, only[key])
        elif key not in family.read | family.inert | _INERT:
            raise _refusal(
                architecture,
                f"{key!r} is no key that the architecture implements for {name}, and it may change "
                "what the model computes",
            )
    _check_rope(architecture, raw, family.rope)
    return family


def _one_of(architecture: str, key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Refuse a value that is not implemented; true differs from 1, and false from 0."""
    same = (value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)
    if not any(same):
        shown = ", ".join(repr(one) for one in allowed)
        raise _refusal(architecture, f"{key!r} is {value!r}; implemented: {shown}")


def _check_rope(architecture: str, raw: Mapping[str, Any], forms: tuple[str, ...]) -> None:
    """Refuse RoPE forms and fields that a family does not implement."""
    named = {name: raw[name] for name in ("rope_parameters", "rope_scaling") if raw.get(name)}
    for table in named.values():
        if not isinstance(table, Mapping):
            raise _refusal(architecture, f"the RoPE parameters are no object: {table!r}")
    if len(named) == 2 and dict(named["rope_parameters"]) != dict(named["rope_scaling"]):
        raise _refusal(architecture, "'rope_parameters' and 'rope_scaling' differ")
    by_layer = named.get("rope_parameters", {})
    if "by layer" in forms and set(by_layer) <= set(ROPE_BY_LAYER) and by_layer:
        if "rope_theta" in raw:
            raise _refusal(architecture, "'rope_theta' is stated twice, by layer and for all")
        for table in by_layer.values():
            if not isinstance(table, Mapping):
                raise _refusal(architecture, f"the RoPE parameters are no object: {table!r}")
            _check_form(architecture, table, forms)
        return
    for table in named.values():
        _check_form(architecture, table, forms)
    thetas = [t["rope_theta"] for t in (raw, *named.values()) if "rope_theta" in t]
    if any(theta != thetas[0] for theta in thetas):
        raise _refusal(architecture, "'rope_theta' is stated twice, with two values")


def _check_form(architecture: str, table: Mapping[str, Any], forms: tuple[str, ...]) -> None:
    """Refuse one object of RoPE parameters whose form or fields a family does not implement."""
    stated = [table[name] for name in ("rope_type", "type") if name in table] or ["default"]
    kind, *same = (_OLD_NAMES.get(str(name), name) for name in stated)
    if kind not in forms or kind not in ROPE_FIELDS:
        shown = ", ".join(form for form in forms if form in ROPE_FIELDS)
        raise _refusal(architecture, f"RoPE scaling {kind!r} is not implemented, only {shown}")
    if any(other != kind for other in same):
        raise _refusal(architecture, f"RoPE is of type {stated[1]!r} and of {stated[0]!r}")
    for key, value in table.items():
        if key == "partial_rotary_factor" and "partial" not in forms:
            _one_of(architecture, key, value, (1, None))
        elif key not in _ROPE_COMMON and key not in ROPE_FIELDS[str(kind)]:
            raise _refusal(architecture, f"{key!r} is no field of RoPE scaling {kind!r}")


def _refusal(architecture: str, message: str) -> Refusal:
    return refuse(
        codes.MODEL_CONFIG,
        f"{architecture} configuration: {message}",
        help="`architecture: hf` measures what transformers runs; to prove bounds, give the model "
        "as `module: package.module:factory`",
    )
