"""Models of Hugging Face transformers, from local files alone: built from a config.json, or loaded.

The library is imported on first use, kept offline, and runs no code of a checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kcdsl.diagnostics import Diagnostic, Refusal, codes, refuse
from kcdsl.model.files import weight_files
from kcdsl.source.files import excerpt, shown

if TYPE_CHECKING:
    from kcdsl.model.checkpoint.tensors import Checkpoint

FOREIGN = True
_PREFIX = "program."
POOLER = "pooler."


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
        config = self.program.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None) or 1 << 24
        return int(config.vocab_size), int(longest)

    def _apply(self, fn: Any, recurse: bool = True) -> HuggingFace:
        """Convert parameters only, as transformers does: tables such as the frequencies of RoPE
        keep the format in which they were created."""
        tables = {
            id(owner): {n: owner._buffers[n] for n in owner._non_persistent_buffers_set}
            for owner in self.modules()
        }
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # of torch
        for owner in self.modules():
            for name, table in tables.get(id(owner), {}).items():
                moved = owner._buffers.get(name)
                if table is not None and moved is not None:
                    owner._buffers[name] = table.to(moved.device)
        return self


def _run(program: Any, ids: Tensor, name: str) -> Tensor:
    whole = ids if ids.dim() == 2 else ids.unsqueeze(0)
    more = {} if program.config.is_encoder_decoder else {"use_cache": False}
    if program.config.model_type == "bert":
        more = {}
    found: Tensor = getattr(program(input_ids=whole, **more), name)
    return found if ids.dim() == 2 else found.squeeze(0)


def build(raw: Mapping[str, Any]) -> HuggingFace:
    """Build the causal language model of a configuration, without weights (`load_weights`).

    Refuse a configuration for which transformers has no such model in its own code.
    """
    if find_spec("transformers") is None:
        raise refuse(
            codes.NO_PACKAGE,
            "the architecture hf needs transformers, which is not installed",
            help='pip install "kcdsl[hf]"',
        )
    with offline():
        library: Any = import_module("transformers")
        return HuggingFace(outline(library.AutoModelForCausalLM, _configuration(library, raw)))


def load_weights(empty: HuggingFace, checkpoint: Checkpoint) -> tuple[HuggingFace, dict[str, str]]:
    """Return a built model with the weights of a checkpoint, and the checkpoint key of every
    parameter that is stored as a tensor of its own.

    transformers loads the tensors, because files may store them under other names, or each
    expert of a layer separately. Refuse weights that do not fit.
    """
    with offline():
        try:
            program, found = with_weights(empty.program, dict(checkpoint.tensors))
        except (Exception, SystemExit) as error:  # foreign code may raise anything
            raise refuse(
                codes.CHECKPOINT_TENSORS,
                f"transformers cannot take the weights of the checkpoint: {_first_line(error)}",
                help=_TOGETHER,
            ) from error
        _refuse_misfits(found, checkpoint)
        keys = keys_of(program, checkpoint.tensors, torch.float32, "the checkpoint")
    return HuggingFace(program), {_PREFIX + name: key for name, key in keys.items()}


def with_weights(empty: Any, tensors: dict[str, Tensor]) -> tuple[Any, Mapping[str, Any]]:
    """Return a model of transformers in float32 with these weights, and its loading report."""
    program, found = type(empty).from_pretrained(
        None,
        config=empty.config,
        state_dict=tensors,
        dtype=torch.float32,
        attn_implementation=empty.config._attn_implementation,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # the caller refuses them, by name
    )
    # one product for each expert, whose weights the kernels can see
    if getattr(program.config, "_experts_implementation", None) is not None:
        program.set_experts_implementation("eager")
    return program.eval(), found


_TOGETHER = "give config.json and weights that were saved together"
_OWN_MODULE = "give the model as `module: package.module:factory`"


def _configuration(library: Any, raw: Mapping[str, Any]) -> Any:
    """Return the configuration object. Refuse a configuration that needs code outside
    transformers."""
    kind = raw.get("model_type")
    known = library.models.auto.configuration_auto.CONFIG_MAPPING
    own = isinstance(kind, str) and kind in known
    if not own and raw.get("auto_map"):
        raise refuse(
            codes.MODEL_CONFIG,
            f"the program of model_type {excerpt(str(kind))!r} is code of the checkpoint's folder "
            "('auto_map'), which kcdsl does not run",
            help=f"review that code, and {_OWN_MODULE}",
        )
    if not own:
        raise refuse(
            codes.MODEL_CONFIG,
            f"transformers {library.__version__} has no model_type {excerpt(str(kind))!r}",
            help=f"install a transformers that has it, or {_OWN_MODULE}",
        )
    if raw.get("quantization_config"):
        raise refuse(
            codes.MODEL_CONFIG,
            "the checkpoint is stored quantised ('quantization_config'), and `architecture: hf` "
            "measures plain weights",
            help="give the checkpoint it was made of, and the quantisation as `numerics.weights`",
        )
    if raw.get("is_encoder_decoder"):
        raise refuse(
            codes.MODEL_CONFIG,
            f"{kind} is an encoder and a decoder; `architecture: hf` runs causal language models",
            help=_OWN_MODULE,
        )
    try:
        return library.AutoConfig.for_model(**{k: v for k, v in raw.items() if k != "auto_map"})
    except (Exception, SystemExit) as error:  # configurations fail in many ways
        raise _no_model(error) from error


def outline(make: Any, config: Any, ways: tuple[str, ...] = ("sdpa", "eager")) -> Any:
    """Return the model that an auto class of transformers builds from a configuration, without
    weights, with the first of the attention implementations `ways` that it supports."""
    failed: BaseException | None = None
    for attention in ways:
        try:
            with torch.device("meta"):
                return make.from_config(
                    config, attn_implementation=attention, trust_remote_code=False
                )
        except (Exception, SystemExit) as error:  # configurations fail in many ways
            failed = error
    assert failed is not None
    raise _no_model(failed) from failed


def _no_model(error: BaseException) -> Refusal:
    return refuse(
        codes.MODEL_CONFIG,
        f"transformers builds no causal language model of the configuration: {_first_line(error)}",
        help="give the config.json that was saved with the model",
    )


def _first_line(error: BaseException) -> str:
    return excerpt(str(error).strip().partition("\n")[0] or type(error).__name__, 300)


def _refuse_misfits(found: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Refuse weights that are missing, left over or of another shape, as `match_tensors` does."""
    problems = []
    keys = {name: misfits(found, name) for name in MISFITS}
    if keys["missing_keys"] and checkpoint.others:
        key, kind = next(iter(checkpoint.others.items()))
        problems.append(
            Diagnostic(
                codes.CHECKPOINT_DTYPE,
                f"{key} is stored as {kind}; supported: F32, BF16, F16",
                help="save the weights as they were trained; `numerics` says how a kernel stores "
                "them",
            )
        )
    for name, words in (
        ("missing_keys", "the checkpoint lacks"),
        ("unexpected_keys", "the architecture does not know"),
        ("mismatched_keys", "the configuration demands other shapes of"),
    ):
        code = codes.CHECKPOINT_SHAPE if name == "mismatched_keys" else codes.CHECKPOINT_TENSORS
        if keys[name]:
            named = ", ".join(keys[name][:4])
            problems.append(Diagnostic(code, f"{words} {named}", help=_TOGETHER))
    if problems:
        raise Refusal(problems)


MISFITS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def misfits(found: Mapping[str, Any], name: str) -> list[str]:
    """Return one list of the loading report of transformers, without weights of a pooler."""
    said = sorted(_said(key) for key in found.get(name, ()))
    return [key for key in said if not key.startswith(POOLER)]


def keys_of(
    program: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype, said: str
) -> dict[str, str]:
    """Return the key of every weight of a loaded model that is stored as a tensor of its own: of
    its parameters and its persistent buffers of floats.

    Args:
        program: a model of transformers.
        tensors: the weights that it was loaded from, as they are stored.
        dtype: the format that they were loaded in.
        said: the name of the checkpoint in messages.

    Refuse a model with a weight, or a part of one in its stored form, that equals none of the
    tensors: the library has initialised or changed it.
    """
    every = program.state_dict(keep_vars=True)
    held = {name: tensor for name, tensor in every.items() if tensor.is_floating_point()}
    names = {(p.data_ptr(), p.shape): name for name, p in reversed(held.items())}
    stored = _stored_form(program, {name: p.detach() for name, p in held.items()})
    keys: dict[str, str] = {}
    renamed: list[tuple[str, Tensor]] = []
    for key, part in stored.items():
        if key not in tensors:
            renamed.append((key, part))
            continue
        if not _holds(part, tensors[key], dtype):
            raise _another_weight(key, said)
        _name(keys, names, part, key)
    known = {names[place] for key, part in stored.items() if (place := _place(part)) in names
             and names[place] in keys}  # fmt: skip
    rest = [key for key in tensors if key not in stored]
    for key, part in renamed:
        if names.get(_place(part)) in known:
            continue  # tied to a parameter that is stored
        same = next((k for k in rest if _holds(part, tensors[k], dtype)), None)
        if same is None:
            raise _another_weight(key, said)
        rest.remove(same)
        _name(keys, names, part, same)
    return keys


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _name(
    keys: dict[str, str], names: Mapping[tuple[int, torch.Size], str], part: Tensor, key: str
) -> None:
    name = names.get(_place(part))
    if name is not None:
        keys.setdefault(name, key)


def _holds(part: Tensor, tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a weight equals a stored one, rounded to `dtype` or to its own format."""
    return part.shape == tensor.shape and any(
        torch.equal(part, tensor.to(one).to(part.dtype)) for one in (dtype, part.dtype)
    )


def _stored_form(program: Any, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters under the names and in the shapes in which transformers stores them."""
    try:
        reverse: Any = import_module("transformers.core_model_loading").revert_weight_conversion
    except (ImportError, AttributeError):  # a release with one form for files and memory
        return held
    found: dict[str, Tensor] = reverse(program, held)
    return found


def _another_weight(name: str, said: str) -> Refusal:
    return refuse(
        codes.HF_FOLDER,
        f"transformers reads other numbers for the weight {name} than {said} holds",
        help="give weights that are plain: float32, bfloat16 or float16",
    )


def load_folder(
    folder: Path,
    dtype: torch.dtype,
    attention: str,
    named: Path | None = None,
    *,
    encoder_only: bool,
) -> HuggingFace:
    """Load a model from a folder in a type, with `attention` "eager" or "sdpa"; `named` is the name
    of the folder in messages.

    Refuse a folder without config.json and safetensors, one that transformers cannot load, and
    weights that are missing, unexpected or of another shape: the library would initialise the first
    at random and ignore the others.
    """
    said = shown(named or folder)
    if not (folder / "config.json").is_file() or not weight_files(folder):
        raise refuse(
            codes.HF_FOLDER,
            f"{said} is no folder of a model: it needs config.json and *.safetensors",
            help="save the model with save_pretrained, and name the folder as `folder`",
        )
    with offline():
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
            composed = attention == "sdpa" and "scaled_dot_product_attention" in str(error)
            raise refuse(
                codes.HF_FOLDER,
                f"transformers cannot load {said}: {type(error).__name__}: {_first_line(error)}",
                help="transformers composes its attention: run hf.transformers"
                if composed
                else None,
            ) from error
    for name in MISFITS:
        keys = misfits(found, name)
        if keys:
            raise refuse(
                codes.HF_FOLDER,
                f"the weights of {said} do not fit its config.json:"
                f" {name.replace('_', ' ')} {', '.join(keys[:4])}",
                help=_TOGETHER,
            )
    return HuggingFace(program.eval(), encoder_only=encoder_only)


def _said(key: Any) -> str:
    """Return an entry of the report as text: the name of a weight, with the shapes in file and
    model where they differ."""
    if isinstance(key, str):
        return key
    name, held, wanted = key
    return f"{name} ({list(held)} in the files, {list(wanted)} by config.json)"


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Keep transformers offline and its log quiet while it is imported and used."""
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
