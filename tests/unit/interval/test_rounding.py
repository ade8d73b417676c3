"""Rounding to formats compared with independent implementations; bounds of storing."""

import ml_dtypes
import numpy as np
import pytest
import torch

from kcdsl.model.numerics import Activations, Attention, Numerics, Weights
from kcdsl.model.numerics.formats import FORMATS
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.boxes.rounding import Rounding


def numerics(compute: str, casts: str) -> Numerics:
    return Numerics(
        "test",
        compute,
        "float32",
        casts,
        Weights(compute),
        Activations(),
        Attention("composed", compute, compute, 128, 4),
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bfloat16", ml_dtypes.bfloat16),
        ("fp8_e4m3", ml_dtypes.float8_e4m3fn),
        ("fp8_e5m2", ml_dtypes.float8_e5m2),
        ("float16", np.float16),
    ],
)
def test_nearest_agrees_with_the_format_on_a_dense_sample(name: str, dtype: type) -> None:
    """All float16 patterns in range, as exact float64 inputs, and ties between neighbours."""
    limit = FORMATS[name].largest
    patterns = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float64)
    values = patterns[np.isfinite(patterns) & (np.abs(patterns) <= limit)]
    values = np.concatenate([values, values * (1 + 2.0**-11), values * 2.0**-3])
    values = values[np.abs(values) <= limit].astype(np.float32)
    expected = values.astype(dtype).astype(np.float64)
    got = FORMATS[name].nearest(torch.from_numpy(values.astype(np.float64))).numpy()
    keep = np.isfinite(expected)
    np.testing.assert_array_equal(got[keep], expected[keep])


def test_nearest_float32_agrees_with_numpy() -> None:
    generator = np.random.default_rng(0)
    values = generator.standard_normal(100_000) * np.exp(generator.uniform(-90, 80, 100_000))
    got = FORMATS["float32"].nearest(torch.from_numpy(values)).numpy()
    np.testing.assert_array_equal(got, values.astype(np.float32).astype(np.float64))


@pytest.mark.parametrize("casts", ["any", "nearest"])
@pytest.mark.parametrize("compute", ["bfloat16", "float16", "float32"])
def test_storing_encloses_every_rounded_value(compute: str, casts: str) -> None:
    kernel = Rounding(numerics(compute, casts))
    generator = torch.Generator().manual_seed(1)
    centre = torch.randn(5000, generator=generator, dtype=torch.float64) * 3
    radius = torch.rand(5000, generator=generator, dtype=torch.float64) * 2.0**-9
    internal = torch.rand(5000, generator=generator, dtype=torch.float64) * 2.0**-20
    exact = Box(centre - radius, centre + radius)
    stored = kernel.store(exact, internal, kernel.compute, "n", kernel.inner(False))
    for _ in range(20):
        v = centre + radius * (2 * torch.rand(5000, generator=generator, dtype=torch.float64) - 1)
        held = v + internal * (2 * torch.rand(5000, generator=generator, dtype=torch.float64) - 1)
        value = kernel.compute.nearest(held)
        if casts == "nearest" and compute == "float32":
            value = held
        assert bool((stored.value.lo <= value).all() and (value <= stored.value.hi).all())
        error = value - v
        assert bool((stored.error.lo <= error).all() and (error <= stored.error.hi).all())


def test_cast_without_a_step_boundary_is_exact() -> None:
    kernel = Rounding(numerics("bfloat16", "nearest"))
    x = torch.tensor([1.001], dtype=torch.float64)
    inner = kernel.inner(False)
    stored = kernel.store(Box(x, x + 1e-6), torch.zeros_like(x), kernel.compute, "n", inner)
    assert stored.value.lo.item() == stored.value.hi.item() == 1.0
    assert float((stored.error.hi - stored.error.lo).max()) < 2e-6


def test_overflow_names_the_element_of_a_cast() -> None:
    kernel = Rounding(numerics("float16", "any"))
    x = torch.tensor([[1.0, 2.0], [65500.0, 3.0]], dtype=torch.float64)
    with pytest.raises(NoBound, match=r"element \[1, 0\] may exceed 65504"):
        kernel.store(
            Box.point(x), torch.zeros_like(x), kernel.compute, "scores", kernel.inner(False)
        )
