"""Norms of rows."""

from __future__ import annotations

import torch
from torch import Tensor


def row_l2(rows: Tensor) -> Tensor:
    """Return the Euclidean length of each row: [..., N] to [...]."""
    length: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return length


def row_linf(rows: Tensor) -> Tensor:
    """Return the largest magnitude in each row: [..., N] to [...]."""
    return rows.abs().amax(dim=-1)


def row_span(rows: Tensor) -> Tensor:
    """Return the largest minus the smallest element of each row: [..., N] to [...]."""
    return rows.amax(dim=-1) - rows.amin(dim=-1)
