"""Kernels of contracts, as the front end writes them."""

from __future__ import annotations

from typing import Any

from kcdsl.ir.terms import KernelRef


def sorted_pairs(value: Any) -> Any:
    """Return mappings, however deep, as sorted pairs."""
    if not isinstance(value, dict):
        return value
    return tuple(sorted((k, sorted_pairs(v)) for k, v in value.items()))


def kernel(run: str, **numerics: Any) -> KernelRef:
    """Return a kernel with its numerics as sorted pairs."""
    return KernelRef(run, sorted_pairs(numerics))
