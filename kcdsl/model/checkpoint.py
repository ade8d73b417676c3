"""Checkpoints: safetensors files, their digest, and the tensors as exact float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kcdsl.config import shown
from kcdsl.diagnostics import Diagnostic, Refusal, codes, refuse
from kcdsl.model.files import file_digest

EXACT_AS_FLOAT32 = {"F32", "F16", "BF16"}
_OTHER_PROGRAM = "check model.architecture and the configuration beside the checkpoint"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of one file, by key.

    `tensors` holds those stored as float32, bfloat16 or float16, as float32; `others` the type of
    every tensor stored otherwise. `sha256` is that of the file, in hex.
    """

    path: Path
    sha256: str
    tensors: Mapping[str, Tensor]
    others: Mapping[str, str]


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a safetensors file.

    Refuse a file that is missing or damaged, and one with a weight that is NaN or infinite.
    """
    digest = file_digest(path)
    tensors: dict[str, Tensor] = {}
    others: dict[str, str] = {}
    try:
        with safe_open(path, framework="pt") as stored:
            for key in sorted(stored.keys()):
                kind = str(stored.get_slice(key).get_dtype())
                if kind in EXACT_AS_FLOAT32:
                    tensors[key] = stored.get_tensor(key).to(torch.float32)
                else:
                    others[key] = kind
    except (SafetensorError, ValueError, OSError) as error:
        raise refuse(
            codes.CHECKPOINT_FORMAT,
            f"{shown(path)} is not a readable safetensors file: {error}",
            help="save the weights with safetensors.torch.save_file",
        ) from None
    if file_digest(path) != digest:
        raise refuse(codes.CHECKPOINT_FORMAT, f"{shown(path)} changed while it was read")
    _refuse_non_finite(path, tensors)
    return Checkpoint(path, digest, tensors, others)


def _refuse_non_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    bad = [key for key, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise refuse(
            codes.CHECKPOINT_NOT_FINITE,
            f"{shown(path)} holds NaN or infinite weights in {_listed(bad)}",
            help="take a checkpoint from before the training diverged",
        )


def match_tensors(
    checkpoint: Checkpoint,
    names: Mapping[str, str | None],
    expected: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, str],
) -> dict[str, str]:
    """Return the checkpoint key of every expected parameter.

    `names` gives each key's parameter name, None for a key that is not used; `expected` the shapes
    by parameter name; `optional` names that may stand for another one (a stored copy of a tied
    tensor), with that other name. Refuse, naming every tensor, a wrong type, a missing or
    unexpected tensor, two keys for one parameter, a wrong shape, and a copy that differs.
    """
    found: dict[str, str] = {}
    problems: list[Diagnostic] = []
    unexpected: list[str] = []
    for key, name in names.items():
        if name is None:
            continue
        if name not in expected and name not in optional:
            unexpected.append(key)
        elif key in checkpoint.others:
            kind = checkpoint.others[key]
            problems.append(
                Diagnostic(
                    codes.CHECKPOINT_DTYPE,
                    f"{key} is stored as {kind}; supported: F32, BF16, F16",
                    help="save the weights as they were trained; `numerics` says how a kernel "
                    "stores them",
                )
            )
            found[name] = key
        elif name in found:
            unexpected.append(key)
        else:
            found[name] = key
    missing = [name for name in expected if name not in found]
    if missing:
        problems.append(
            Diagnostic(
                codes.CHECKPOINT_TENSORS,
                f"the checkpoint lacks {_listed(missing)}",
                help=_OTHER_PROGRAM,
            )
        )
    if unexpected:
        problems.append(
            Diagnostic(
                codes.CHECKPOINT_TENSORS,
                f"the architecture does not know {_listed(unexpected)}",
                help=_OTHER_PROGRAM,
            )
        )
    if not problems:
        problems += _shape_problems(checkpoint, found, expected, optional)
    if problems:
        raise Refusal(problems)
    return {name: found[name] for name in expected}


def _shape_problems(
    checkpoint: Checkpoint,
    found: Mapping[str, str],
    expected: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, str],
) -> list[Diagnostic]:
    problems = [
        Diagnostic(
            codes.CHECKPOINT_SHAPE,
            f"{found[name]} has shape {tuple(checkpoint.tensors[found[name]].shape)};"
            f" the configuration demands {shape}",
            help=_OTHER_PROGRAM,
        )
        for name, shape in expected.items()
        if tuple(checkpoint.tensors[found[name]].shape) != shape
    ]
    problems += [
        Diagnostic(
            codes.CHECKPOINT_TENSORS,
            f"{found[name]} differs from {found[of]}, though the configuration ties them",
        )
        for name, of in optional.items()
        if name in found
        and not torch.equal(checkpoint.tensors[found[name]], checkpoint.tensors[found[of]])
    ]
    return problems


def _listed(names: list[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
