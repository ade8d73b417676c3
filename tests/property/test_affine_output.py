"""The stored output: the error of a free cast at a point is relative to its operand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kcdsl.model.numerics.formats import FORMATS
from kcdsl_backends.drift.affine.result_rounding import cast_freely
from kcdsl_backends.drift.affine_forms import affine_forms
from kcdsl_backends.drift.boxes import Box
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_certs.recheck.affine_walk import drift as derive
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.tensors import read
from tests.support import proofs
from tests.support.prover import block, numerics, parameters

EXACT = proofs.numerics("float64", "any", accumulate="float64")
ROUNDED = proofs.numerics(
    "float64", "any", accumulate="float64", results={"input": "bfloat16", "linear": "bfloat16"}
)
UNIT = 2.0**-8


@pytest.mark.parametrize("weight", [1.5, -1.5])
@pytest.mark.parametrize("radius", [0.0, 2.0**-10])
def test_roundings_of_shrinking_values_are_smaller(
    tmp_path: Path, weight: float, radius: float
) -> None:
    """x(1 + a)w(1 + b) has an error of 2u + u² where it grows and of 2u - u² where it shrinks."""
    g = proofs.Graph((1, 1))
    g.add("linear", [g.add("input", [], (1, 1)), g.param("w", np.array([[weight]]))], (1, 1))
    centre, wide = np.array([[0.75]]), torch.full((1, 1), radius).double()
    one, two = parameters(g, EXACT), parameters(g, ROUNDED)
    found = affine_forms(block(g), one, two, torch.from_numpy(centre), wide).box()
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, g.tensors)
    proof = parse(proofs.dump(proofs.document(g, EXACT, ROUNDED, sha256, centre, radius)))
    with np.errstate(all="ignore"):
        derived = derive(Derivation(proof, read(path).tensors).problem(proof.cases[0])).output
    size = 0.75 * abs(weight)
    grows, shrinks = size * (2 * UNIT + UNIT**2), size * (2 * UNIT - UNIT**2)
    for lo, hi in ((float(found.lo), float(found.hi)), (derived.lo.item(), derived.hi.item())):
        up, down = (hi, -lo) if weight > 0 else (-lo, hi)
        assert up >= grows
        assert down >= shrinks
        if radius == 0.0:
            assert up == pytest.approx(grows, rel=2.0**-30)
            assert down == pytest.approx(shrinks, rel=2.0**-30)


@given(
    st.floats(-1e30, 1e30),
    st.floats(0, 1e30),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from(["any", "any_direction"]),
)
def test_free_cast_of_a_box(low: float, width: float, name: str, casts: str) -> None:
    form, high = FORMATS[name], low + width
    ends = (torch.tensor([v], dtype=torch.float64) for v in (low, high))
    kernel = Rounding(numerics(proofs.numerics(name, casts)))
    box = cast_freely(Box(*ends), form, kernel)
    units = 1 if casts == "any" else 2
    for value in (low, high, (low + high) / 2):
        for sign in (-1, 1):
            for faint in (-1, 0, 1):
                lost = sign * units * form.unit_roundoff
                cast = value * (1 + lost) + faint * units * form.underflow
                assert float(box.lo) <= cast <= float(box.hi)


@given(
    st.floats(-1e30, 1e30), st.floats(0, 1e30), st.sampled_from(["float32", "bfloat16", "float16"])
)
def test_free_cast_toward_zero_of_a_box(low: float, width: float, name: str) -> None:
    """No value grows or changes its sign, and the loss is within its bound."""
    form, high = FORMATS[name], low + width
    ends = (torch.tensor([v], dtype=torch.float64) for v in (low, high))
    kernel = Rounding(numerics(proofs.numerics(name, "any_toward_zero")))
    box = cast_freely(Box(*ends), form, kernel)
    for value in (low, high, (low + high) / 2):
        for share in (0.0, 0.5, 1.0):
            lost = share * 2 * (form.unit_roundoff * abs(value) + form.underflow)
            cast = math.copysign(max(abs(value) - lost, 0.0), value)
            assert float(box.lo) <= cast <= float(box.hi)
    assert low >= 0 or float(box.lo) == low
    assert high <= 0 or float(box.hi) == high
    assert low < 0 or float(box.lo) >= 0
