"""The built-in model architectures: one module of `kcdsl.model.architectures` each.

A module defines `build(config) -> nn.Module`, and `canonical_key(key) -> str | None`, the name that
a checkpoint key has in what is built. It declares, as literals:

- `READ`: the keys of config.json that the forward passes of all its families read and check;
- `FAMILIES`: a `ModelFamily` for each `model_type` of Hugging Face transformers;
- `DECODER` (default False): it configures `kcdsl.model.decoder`, whose keys it reads as well, and
defines `read(config)`, which needs no torch and refuses values that the decoder does not
implement;
- `ENCODER_ONLY` (default False): it ends in hidden states instead of logits;
- `FOREIGN` (default False): its program is not one of `kcdsl.model`. Instead of `canonical_key` it
  defines `load_weights(module, checkpoint)`, which returns a module and the key of each parameter.

The literals are parsed from the source of the module, so that commands that only read a contract
import neither the module nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

_FOLDER = Path(__file__).with_name("architectures")
_LITERALS = frozenset({"READ", "FAMILIES", "DECODER", "ENCODER_ONLY", "FOREIGN"})
_DECODER = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rope_theta"),
    *("rope_scaling", "rope_parameters", "tie_word_embeddings"),
)
"""The keys that every configuration of the decoder reads."""
_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """The keys that the config.json of one model_type may have, besides the common ones.

    `read` are keys that the forward pass reads and checks itself, `only` keys with the values that
    it implements, `inert` keys that change no result, `needed` keys whose default differs between
    families, `null` counts that take their default where they are null, `rope` the forms of RoPE
    scaling, with "by layer" if each kind of layer may have its own and "partial" if a part of each
    head is rotated.
    """

    classes: tuple[str, ...]
    read: frozenset[str] = frozenset()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()
    null: frozenset[str] = frozenset()
    rope: tuple[str, ...] = _ROPE


class Architecture(NamedTuple):
    """The declarations of the module of an architecture."""

    name: str
    families: Mapping[str, ModelFamily]
    encoder_only: bool = False
    foreign: bool = False
    decoder: bool = False


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """Return the names of the architectures, sorted."""
    return tuple(sorted(p.stem for p in _FOLDER.glob("*.py") if not p.stem.startswith("_")))


@lru_cache(maxsize=16)
def declared(name: str) -> Architecture:
    """Return the declarations of an architecture; its module is parsed and not run."""
    import ast

    found: dict[str, Any] = {}
    for node in ast.parse((_FOLDER / f"{name}.py").read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=literal)]) if literal in _LITERALS:
                found[literal] = ast.literal_eval(node.value)
    read = (*found.get("READ", ()), *(_DECODER if found.get("DECODER", False) else ()))
    families = {
        kind: ModelFamily(
            tuple(said["classes"]),
            frozenset({*read, *said.get("read", ())}),
            said.get("only", {}),
            frozenset(said.get("inert", ())),
            frozenset(said.get("needed", ())),
            frozenset(said.get("null", ())),
            tuple(said.get("rope", _ROPE)),
        )
        for kind, said in found.get("FAMILIES", {}).items()
    }
    flags = (bool(found.get(literal, False)) for literal in ("ENCODER_ONLY", "FOREIGN", "DECODER"))
    return Architecture(name, families, *flags)


def is_encoder(name: str | None) -> bool:
    """Return whether an architecture is declared to end in hidden states."""
    return name in names() and declared(name).encoder_only


def load(name: str) -> ModuleType:
    """Import the module of an architecture."""
    return import_module(f"kcdsl.model.architectures.{name}")
