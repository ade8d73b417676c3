"""Tiled online softmax, simulated rounding by rounding, stays inside B and the context's error."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from kcdsl.model.presets import resolve
from kcdsl_backends.drift.boxes import Box
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.ops import softmax as prover
from kcdsl_backends.drift.ops.attention import _context_error
from kcdsl_certs.recheck.interval.box import exact
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from kcdsl_certs.recheck.ops.attention import probabilities as checker

DTYPES = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
}
ULPS = 8
F32 = np.float32


def run(
    rng: np.random.Generator,
    scores: np.ndarray,
    values: np.ndarray,
    tile: int,
    dtype: type,
    rounded_sum: bool,
    lean: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities and output of one row, in float32 with wrong exponentials.

    Args:
        rounded_sum: whether the row sum is made of probabilities after their cast.
        lean: 1 or -1: all exponentials err that way; 0: at random.
    """

    def exp(x: np.ndarray) -> np.ndarray:
        wrong = lean if lean else rng.uniform(-1, 1, np.shape(x))
        true = np.exp(np.asarray(x, dtype=np.float64))
        return np.asarray(true * (1 + wrong * ULPS * 2.0**-23), dtype=F32)

    top, total = F32(-np.inf), F32(0)
    weights = np.zeros(scores.shape, dtype=F32)
    output = np.zeros(values.shape[1], dtype=F32)
    for start in range(0, len(scores), tile):
        part = scores[start : start + tile].astype(F32)
        above = max(top, part.max())
        rescale = exp(np.asarray(top - above, dtype=F32)) if np.isfinite(top) else F32(0)
        fresh = exp(part - above)
        stored = fresh.astype(dtype).astype(F32)
        total = F32(total * rescale)
        for p in rng.permutation(stored if rounded_sum else fresh):
            total = F32(total + p)
        weights = (weights * rescale).astype(F32)
        weights[start : start + tile] = stored
        output = (output * rescale).astype(F32)
        for j in rng.permutation(len(part)):
            output = (output + (stored[j] * values[start + j]).astype(F32)).astype(F32)
        top = above
    return (weights / total).astype(np.float64), (output / total).astype(np.float64)


@pytest.mark.parametrize("rounded_sum", [True, False])
@pytest.mark.parametrize("stored", list(DTYPES))
@pytest.mark.parametrize("tile", [1, 4, 16, 64])
def test_every_tiling_is_within_the_bounds(tile: int, stored: str, rounded_sum: bool) -> None:
    spec = resolve(
        {
            "preset": "torch-sdpa-flash",
            "attention": {
                "style": "fused",
                "probabilities": stored,
                "tile": tile,
                "exp_ulps": ULPS,
            },
        }
    )
    kernel, other = Rounding(spec), parse_kernel(spec.to_json(), "infer")
    rng = np.random.default_rng(tile)
    closest = 0.0
    for size in (0.1, 3.0, 20.0):
        for lean in (-1, 0, 1):
            keys = int(rng.integers(2, 50))
            s = (rng.standard_normal(keys) * size).astype(F32).astype(np.float64)
            v = rng.standard_normal((keys, 3)).astype(F32).astype(np.float64)
            wide = np.exp((s - s.max()).astype(np.longdouble))
            p = (wide / wide.sum()).astype(np.float64)
            found, output = run(rng, s, v, tile, DTYPES[stored], rounded_sum, lean)
            high = p[None] * (1 + 2.0**-40)
            probabilities = Box(torch.zeros(1, keys, dtype=torch.float64), torch.from_numpy(high))
            b = prover._rounding(
                Box.point(torch.from_numpy(s[None])), probabilities, None, kernel
            ).numpy()
            allowed = np.ones((1, keys), dtype=bool)
            second = checker.softmax_rounding(other, exact(s[None]), high, allowed)
            error = np.abs(found - p)[None]
            assert (error <= b).all()
            assert (error <= second).all()
            closest = max(closest, float((error / b).max()))
            result = Box.point(torch.from_numpy(p[None] @ v))
            values = Box.point(torch.from_numpy(v))
            granted = _context_error(
                probabilities, torch.from_numpy(b), values, result, kernel
            ).numpy()
            assert (np.abs(output - p @ v)[None] <= granted).all()
    assert closest > 0.02
