"""The comparison of a built-in architecture with Hugging Face transformers, on rows of tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.architecture import Model
from kcdsl.model.architectures.hf import (
    MISFITS,
    POOLER,
    HuggingFace,
    misfits,
    offline,
    outline,
    with_weights,
)
from kcdsl.model.checkpoint.modules import transposed_names
from kcdsl.model.decoder import name_in_mixtral

AGREEMENT = 1e-4
"""Tolerance for the relative distance of two float32 programs of one model. Two runs of MiniLM or
of the tiny LM are about 1e-6 apart; an ignored key of a configuration makes 1e-2 and more."""
LARGEST_COMPARED = 2**31
"""Largest number of parameters of a model that is copied for a comparison."""
_ROWS_COMPARED, _LONGEST_COMPARED = 3, 256
"""Number of rows, and of tokens of each, that are compared with transformers."""


def compared_program(
    architecture: str | None, model: Model, rows: Iterable[Sequence[int]]
) -> str | None:
    """Compare a model of a built-in architecture with transformers on the first distinct rows.

    Returns a sentence about the result; None for a module of the user, which transformers does not
    have. Raises Refusal (KC455) if the two are different programs.
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

    Returns a sentence with the version and the number of rows, or why there was no comparison.
    Raises Refusal (KC455) if the logits of one row (of an encoder: the states) differ by more than
    `AGREEMENT` of their 2-norm, because the checkpoint is then of another program.
    """
    if find_spec("transformers") is None:
        return "it was not compared with transformers, which is not installed"
    if not rows:
        return "it was not compared with transformers: there are no rows"
    if sum(tensor.numel() for tensor in module.state_dict().values()) > LARGEST_COMPARED:
        return "it was not compared with transformers, for it is too large to be there twice"
    encoder = bool(getattr(module, "encoder_only", False))
    with offline():
        library: Any = import_module("transformers")
        try:
            config = library.AutoConfig.for_model(**{"model_type": architecture, **raw})
            make = library.AutoModel if encoder else library.AutoModelForCausalLM
            program, found = with_weights(outline(make, config, ("eager",)), _stored(module, raw))
        except (Exception, SystemExit) as error:  # configurations fail in many ways
            first = str(error).strip().partition("\n")[0]
            return f"it was not compared with transformers, which cannot build the model: {first}"
    lost = [key for name in MISFITS for key in misfits(found, name) if _is_compared(key)]
    if lost:
        raise _another_program(f"transformers has other weights: {', '.join(sorted(lost)[:4])}")
    theirs = HuggingFace(program, encoder_only=encoder)
    done = 0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor(list(row))
            results = (module(ids), theirs(ids))
            if not any(bool(torch.isfinite(result).all()) for result in results):
                continue  # no distance without finite numbers
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


def _stored(module: nn.Module, raw: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a module with the names and layouts of its checkpoints."""
    turned, mixtral = transposed_names(module), raw.get("model_type") == "mixtral"
    return {
        name_in_mixtral(n) if mixtral else n: t.T if n in turned else t
        for n, t in module.state_dict().items()
    }


def _is_compared(key: str) -> bool:
    """Return whether a weight is compared; pooler, RoPE tables and tied head are not."""
    return not key.startswith(POOLER) and not key.endswith(
        ("rotary.cos", "rotary.sin", "inv_freq", "position_ids", "lm_head.weight")
    )


def _distance(own: Tensor, theirs: Tensor) -> float:
    """Return the relative distance in the 2-norm, in float64; infinite for different shapes."""
    if own.shape != theirs.shape:
        return float("inf")
    first, second = own.double(), theirs.double()
    norm = float(first.norm())
    apart = float((first - second).norm())
    return apart / norm if norm > 0 else apart


def _another_program(why: str) -> Refusal:
    return refuse(
        codes.MODEL_CONFIG,
        f"the built-in architecture is not the program of this checkpoint: {why}",
        help="`architecture: hf` measures what transformers runs; to prove bounds, give the model "
        "as `module: package.module:factory`",
    )
