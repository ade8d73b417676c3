"""The model of a draft: a Hugging Face folder, read without torch and without its weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model import registry
from kcdsl.model.checkpoint.headers import StoredTensor, read_headers, weights_entry
from kcdsl.model.configuration import check_config, read_config
from kcdsl.source.files import excerpt, is_file, shown
from kcdsl_grammar.expression_table import KEYWORDS

COMPUTE = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Weight formats by safetensors type."""
QUANTISED = ("compression_config", "quantization_config")
"""The keys of config.json with the quantisation of weights."""
_OF_MODELOPT = "hf_quant_config.json"
_WHOLE = 4096
"""The default of the longest sequence, in tokens."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The model in a folder.

    `architecture` is built in, or "hf" with the reason in `unproved`: its clauses can be measured
    but not proved. `quantised` is the configuration of quantised weights, None for plain ones;
    `checkpoint` is the only file or the index of `files`, `stored` the type of most of the weights.
    """

    path: Path
    checkpoint: Path
    files: tuple[Path, ...]
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    architecture: str
    unproved: str | None
    quantised: Mapping[str, Any] | None
    stored: str

    @property
    def capped(self) -> bool:
        """Return whether the model caps its attention scores."""
        return self.config.get("attn_logit_softcapping") is not None

    @property
    def blocks(self) -> tuple[str, ...]:
        """Return the first blocks, whose drift can be proved; no MLP of a model with routers, since
        some position of a prompt usually has an uncertain choice."""
        routed = self.config.get("num_experts_per_tok") is not None
        return () if self.unproved else ("attn_0",) if routed else ("attn_0", "mlp_0")

    @property
    def name(self) -> str:
        """Return a name for the contract, from that of the folder."""
        words = re.sub(r"[^a-z0-9]+", "-", self.path.resolve().name.lower()).strip("-")
        plain = words[:1].isalpha() and words not in KEYWORDS
        return words if plain else f"model-{words}".strip("-")

    @property
    def compute(self) -> str:
        """Return the training format: the stated one, else the stored one."""
        stated = self.config.get("dtype") or self.config.get("torch_dtype")
        if stated in COMPUTE.values():
            return str(stated)
        return COMPUTE.get(self.stored, "bfloat16")

    @property
    def encoder(self) -> bool:
        """Return whether the model ends in hidden states."""
        return registry.is_encoder(self.architecture)

    @property
    def width(self) -> int:
        """Return the width of the hidden states."""
        found = self._text.get("hidden_size")
        return found if isinstance(found, int) and found > 0 else 1

    @property
    def tokenizer(self) -> Path | None:
        """Return the tokenizer.json of the folder, None where there is none."""
        path = self.path / "tokenizer.json"
        return path if is_file(path) else None

    @property
    def vocabulary(self) -> int:
        """Return the size of the vocabulary."""
        size = self._text.get("vocab_size")
        return size if isinstance(size, int) and size > 0 else 256

    @property
    def longest(self) -> int:
        """Return the largest number of tokens of a sequence."""
        found = [self._text.get(name) for name in ("max_position_embeddings", "n_positions")]
        sizes = [size for size in found if isinstance(size, int) and size > 0]
        window = self._text.get("sliding_window")
        if isinstance(window, int) and window > 0:
            sizes.append(window)
        return min(sizes, default=_WHOLE)

    @property
    def _text(self) -> Mapping[str, Any]:
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config


def read_folder(path: Path) -> ModelFolder:
    """Read config.json and the headers of the weights of a folder, or of the folder of a file.

    Refuse a folder without config.json or safetensors, and tensors that are damaged.
    """
    folder = path if path.is_dir() else path.parent
    if not is_file(folder / "config.json"):
        raise refuse(
            codes.HF_FOLDER,
            f"{shown(folder)} has no config.json",
            help="name the folder that save_pretrained wrote: config.json and *.safetensors",
        )
    config = read_config(folder / "config.json")
    headers = read_headers(path)
    tensors = headers.tensors
    kinds = Counter[str]()
    for stored in tensors.values():
        kinds[stored.kind] += stored.end - stored.start
    architecture, why = _architecture(config)
    return ModelFolder(
        folder,
        weights_entry(path),
        tuple(headers.files),
        config,
        tensors,
        architecture,
        why,
        quantisation_of(folder, config),
        max(kinds, key=lambda kind: kinds[kind], default="F32"),
    )


def quantisation_of(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantisation configuration of the weights of a folder; None without one."""
    for key in QUANTISED:
        found = config.get(key)
        if isinstance(found, dict) and found:
            return found
    beside = folder / _OF_MODELOPT
    if not is_file(beside):
        return None
    inner = read_config(beside).get("quantization")
    return {"quant_method": "modelopt", **inner} if isinstance(inner, dict) else None


def _architecture(config: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the built-in architecture of a configuration, or "hf" and the reason why there is
    none."""
    kind = config.get("model_type")
    plain = {key: value for key, value in config.items() if key not in QUANTISED}
    for name in registry.names() if isinstance(kind, str) else ():
        if kind not in registry.declared(name).families:
            continue
        try:
            check_config(name, plain)
        except Refusal as refusal:
            return "hf", refusal.diagnostics[0].message
        return name, None
    if not isinstance(kind, str):
        raise refuse(
            codes.MODEL_CONFIG,
            "config.json states no model_type, so nothing says which program the model is",
            help="give the config.json that was saved with the model",
        )
    return "hf", f"the model_type {excerpt(kind)!r} is not built in"
