"""Formats of results: what type promotion gives where a module is converted to each format."""

from __future__ import annotations

from collections.abc import Mapping

import torch

TYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""The formats that a module can be converted to, as the adapters do it."""
NAMES = {dtype: name for name, dtype in TYPES.items()}

OWN = ""
"""Stored in the kernel's own format."""
HALF = ("bfloat16", "float16")
WIDE = "wide"
"""Stored in float32 by half-precision kernels, and in float64 by those of float64. Only a graph
under construction has it: inside of an operation."""


def traced_format(compute: str) -> str:
    """Return the format to which a module is converted for a kernel that computes in `compute`."""
    return compute if compute in TYPES else "float32"


def stored_type(name: str, format: str) -> torch.dtype:
    """Return the type of a result that is stored as a name says, in a module of a format."""
    if name == WIDE:
        return torch.promote_types(TYPES[format], torch.float32)
    return TYPES[name or format]


def stored_name(types: Mapping[str, torch.dtype]) -> str | None:
    """Return where a result is stored whose type is known in each of some formats.

    OWN, a format of `TYPES` that is the same in all, or WIDE; None where no such name says it.
    """
    if all(dtype == TYPES[name] for name, dtype in types.items()):
        return OWN
    found = set(types.values())
    if len(found) == 1:
        return NAMES.get(found.pop())
    wide = all(
        dtype == torch.promote_types(TYPES[name], torch.float32) for name, dtype in types.items()
    )
    return WIDE if wide else None
