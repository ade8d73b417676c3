"""Models of Hugging Face transformers, from local files alone: built from a config.json, or loaded.

The library is imported when one is needed, told to stay off the network, and runs no code of a
checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.files import weight_files
from kcdsl.source.files import shown

if TYPE_CHECKING:
    from kcdsl.model.architecture import Model

FOREIGN = True
_PREFIX = "program."
_POOLER = "pooler."


class HuggingFace(nn.Module):
    """A model of transformers with the forward pass of `kcdsl.model`: ids [..., T] to logits, or to
    the last hidden states of an encoder."""

    def __init__(self, program: Any, *, encoder_only: bool = False) -> None:
        super().__init__()
        self.program = program
        self.encoder_only = encoder_only

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits [..., T, V] of token ids [..., T] (encoder: states [..., T, D])."""
        found: Tensor = self.hidden(ids) if self.encoder_only else _run(self.program, ids, "logits")
        return found

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the last hidden states [..., T, D], which enter the head."""
        base = self.program if self.encoder_only else self.program.base_model
        return _run(base, ids, "last_hidden_state")

    @property
    def limits(self) -> tuple[int, int]:
        """Return the vocabulary size and the longest sequence."""
        config = self.program.config
        longest = getattr(config, "max_position_embeddings", None) or 1 << 24
        return int(config.vocab_size), int(longest)


def _run(program: Any, ids: Tensor, name: str) -> Tensor:
    whole = ids if ids.dim() == 2 else ids.unsqueeze(0)
    more = {} if program.config.is_encoder_decoder else {"use_cache": False}
    if program.config.model_type == "bert":
        more = {}
    found: Tensor = getattr(program(input_ids=whole, **more), name)
    return found if ids.dim() == 2 else found.squeeze(0)


def build(raw: Mapping[str, Any]) -> HuggingFace:
    """Build the causal language model of a configuration, its weights unset."""
    if find_spec("transformers") is None:
        raise refuse(
            codes.NO_PACKAGE,
            "the architecture hf needs transformers, which is not installed",
            help='pip install "kcdsl[hf]"',
        )
    with _offline():
        library: Any = import_module("transformers")
        try:
            config = library.AutoConfig.for_model(**raw)
            make = library.AutoModelForCausalLM.from_config
            program = make(config, attn_implementation="sdpa")
        except (Exception, SystemExit) as error:  # configurations fail in many ways
            raise refuse(
                codes.MODEL_CONFIG,
                f"transformers builds no causal language model of the configuration: {error}",
                help="give the config.json that was saved with the model",
            ) from error
    return HuggingFace(program)


AGREEMENT = 1e-4
"""Relative distance up to which two float32 programs of one model agree; two runs of MiniLM or of
the tiny LM are about 1e-6 apart, and one ignored key of a configuration 1e-2 and more."""
LARGEST_COMPARED = 2**31
"""Parameters up to which a second copy of the model is made for a comparison."""
_ROWS_COMPARED, _LONGEST_COMPARED = 3, 256
"""How many rows, and up to how many tokens of each, are run by transformers too."""


def compared_program(
    architecture: str | None, model: Model, rows: Iterable[Sequence[int]]
) -> str | None:
    """Compare a model of a built-in architecture with transformers on the first distinct rows, and
    say what came of it; None for a module of the user's own, which no other program is known for.

    Raises Refusal (KC455) where the two are different programs.
    """
    if not model.built_in or architecture is None:
        return None
    longest = min(_LONGEST_COMPARED, model.limits[1] or _LONGEST_COMPARED)
    known = dict.fromkeys(tuple(row[:longest]) for row in rows if len(row))
    module = model.module
    if model.by_block and sum(map(Tensor.numel, module.parameters())) <= LARGEST_COMPARED:
        module = copy.deepcopy(module)
        replace(model, module=module).fill(module)
    found = compare(architecture, module, model.config, tuple(known)[:_ROWS_COMPARED])
    return f"the architecture {architecture} is the program of the checkpoint: {found}"


def compare(
    architecture: str, module: nn.Module, raw: Mapping[str, Any], rows: Sequence[Sequence[int]]
) -> str:
    """Compare a built-in model with that of transformers on rows of token ids.

    Returns a sentence that says whether, with which version and on how many rows it was done.
    Raises Refusal (KC455) where the logits of one row (an encoder: the states) differ by more than
    `AGREEMENT` of their 2-norm: the checkpoint is of another program.
    """
    if find_spec("transformers") is None:
        return "it was not compared with transformers, which is not installed"
    if not rows:
        return "it was not compared with transformers: there are no rows"
    if sum(tensor.numel() for tensor in module.state_dict().values()) > LARGEST_COMPARED:
        return "it was not compared with transformers, for it is too large to be there twice"
    encoder = bool(getattr(module, "encoder_only", False))
    with _offline():
        library: Any = import_module("transformers")
        try:
            config = library.AutoConfig.for_model(**{"model_type": architecture, **raw})
            make = library.AutoModel if encoder else library.AutoModelForCausalLM
            program = make.from_config(config, attn_implementation="sdpa").eval().float()
            found = program.load_state_dict(module.state_dict(), strict=False, assign=True)
        except (Exception, SystemExit) as error:  # configurations fail in many ways
            first = str(error).strip().partition("\n")[0]
            return f"it was not compared with transformers, which cannot build the model: {first}"
    lost = [key for key in (*found.missing_keys, *found.unexpected_keys) if _counts(key)]
    if lost:
        raise _another_program(f"transformers has other weights: {', '.join(sorted(lost)[:4])}")
    theirs = HuggingFace(program, encoder_only=encoder)
    done = 0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor(list(row))
            results = (module(ids), theirs(ids))
            if not any(bool(torch.isfinite(result).all()) for result in results):
                continue  # neither gives numbers, which no distance can be told of
            done += 1
            apart = _distance(*results)
            if not apart <= AGREEMENT:
                raise _another_program(
                    f"on a row of {len(row)} tokens its results are {apart:.2g} of their norm away "
                    f"from those of transformers {library.__version__}"
                )
    if not done:
        return "it was not compared with transformers: no row gives finite numbers"
    return (
        f"it was compared with transformers {library.__version__} on {done} row(s): the "
        f"results agree within {AGREEMENT:g} of their norm"
    )


def _counts(key: str) -> bool:
    """Say whether a weight takes part; the pooler and tables of RoPE do not, nor a tied head."""
    return not key.startswith(_POOLER) and not key.endswith(
        ("rotary.cos", "rotary.sin", "inv_freq", "position_ids", "lm_head.weight")
    )


def _distance(own: Tensor, theirs: Tensor) -> float:
    """Return the relative distance in the 2-norm, in float64; infinite where a shape differs."""
    if own.shape != theirs.shape:
        return float("inf")
    first, second = own.double(), theirs.double()
    norm = float(first.norm())
    apart = float((first - second).norm())
    return apart / norm if norm > 0 else apart


def _another_program(why: str) -> Exception:
    return refuse(
        codes.MODEL_CONFIG,
        f"the built-in architecture is not the program of this checkpoint: {why}",
        help="`architecture: hf` measures what transformers runs; to prove bounds, give the model "
        "as `module: package.module:factory`",
    )


def canonical_key(key: str) -> str | None:
    """Return the module's name for a checkpoint key."""
    return _PREFIX + key


def load_folder(
    folder: Path,
    dtype: torch.dtype,
    attention: str,
    named: Path | None = None,
    *,
    encoder_only: bool,
) -> HuggingFace:
    """Load a model from a folder in a type, with `attention` "eager" or "sdpa"; messages call the
    folder `named`.

    Refuse a folder without config.json and safetensors, one that transformers cannot load, and
    weights that are missing, left over or of another shape: the library would invent the first and
    leave out the others.
    """
    said = shown(named or folder)
    if not (folder / "config.json").is_file() or not weight_files(folder):
        raise refuse(
            codes.HF_FOLDER,
            f"{said} is no folder of a model: it needs config.json and *.safetensors",
            help="save the model with save_pretrained, and name the folder as `folder`",
        )
    with _offline():
        library: Any = import_module("transformers")
        kind = library.AutoModel if encoder_only else library.AutoModelForCausalLM
        try:
            program, found = kind.from_pretrained(
                str(folder),
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
        except (Exception, SystemExit) as error:  # foreign code may raise anything
            raise refuse(
                codes.HF_FOLDER,
                f"transformers cannot load {said}: {type(error).__name__}: {error}",
            ) from error
    for name in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(
            _said(key) for key in found.get(name, ()) if not _said(key).startswith(_POOLER)
        )
        if keys:
            raise refuse(
                codes.HF_FOLDER,
                f"the weights of {said} do not fit its config.json:"
                f" {name.replace('_', ' ')} {', '.join(keys[:4])}",
                help="give config.json and weights that were saved together",
            )
    return HuggingFace(program.eval(), encoder_only=encoder_only)


def _said(key: Any) -> str:
    """Return how transformers calls a weight; one of another shape with its shapes in the files and
    in the model."""
    if isinstance(key, str):
        return key
    name, held, wanted = key
    return f"{name} ({list(held)} in the files, {list(wanted)} by config.json)"


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keep transformers from the network while it is imported and used, and its remarks quiet."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            remarks: Any = import_module("transformers.utils.logging")
            remarks.disable_progress_bar()
            yield
    finally:
        logging.disable(level)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
