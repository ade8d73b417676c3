"""Both domains name the element that may overflow."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.affine_run import affine_run
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.drift.boxes.weight_ball import held_plain, near
from tests.support import proofs
from tests.support.prover import block, parameters

ROWS, WIDTH = 3, 4
PLACE = (1, 2)
"""The index of the large element."""
Floats = np.ndarray


def states(large: float) -> Floats:
    """Return an input with one large element, which float32 holds."""
    x = np.full((ROWS, WIDTH), 0.5)
    x[PLACE] = large
    return x


def graph_of(op: str, **attrs: Any) -> Any:
    g = proofs.Graph((ROWS, WIDTH))
    g.add(op, [g.add("input", [], (ROWS, WIDTH))], (ROWS, WIDTH), **attrs)
    return g


def linear() -> Any:
    """Return a linear whose outputs are twice an input, as a sum of two terms."""
    g = proofs.Graph((ROWS, WIDTH))
    x = g.add("input", [], (ROWS, WIDTH))
    g.add("linear", [x, g.param("w", 2 * np.eye(WIDTH))], (ROWS, WIDTH))
    return g


def rotation() -> Any:
    """Return a rotation that subtracts the third column from the first: small if both are large."""
    g = proofs.Graph((ROWS, WIDTH))
    x = g.add("input", [], (ROWS, WIDTH))
    sin = np.zeros((ROWS, WIDTH), dtype=np.float32)
    sin[:, 0] = 1
    tables = [g.constant("cos", np.ones_like(sin)), g.constant("sin", sin)]
    g.add("rope", [x, *tables], (ROWS, WIDTH))
    return g


N = proofs.numerics
CASES: dict[str, tuple[Callable[[], Any], Any, float, str]] = {
    "a result": (linear, N("float16", "any"), 40000.0, "may exceed 65504 (float16)"),
    "a result cut off": (
        linear,
        N("float16", "toward_zero"),
        40000.0,
        "may exceed 65504 (float16)",
    ),
    "a sum": (
        linear,
        N("float16", "any", accumulate="float16"),
        40000.0,
        "is a sum that may exceed 65504 (float16), or has too many roundings for that format",
    ),
    "an input of a linear": (
        linear,
        N("bfloat16", "any", activations=("fp8_e4m3", "none")),
        500.0,
        "of the input may exceed 448 (fp8_e4m3)",
    ),
    "a static scale": (
        linear,
        N("bfloat16", "nearest", activations=proofs.static("int8", 0.01)),
        2.0,
        "of the input may exceed 1.275 (int8 with its static scale)",
    ),
    "a product": (rotation, N("float16", "any"), 40000.0, "may exceed 65504 (float16)"),
    "squares of a norm": (
        lambda: graph_of("rms_norm", eps=1e-5),
        N("float32", "any"),
        1e19,
        "may make the sum of squares of its row leave float32",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_overflowing_element_is_named(name: str) -> None:
    build, record, large, what = CASES[name]
    graph, centre, place = build(), torch.from_numpy(states(large)), PLACE
    if name == "a product":
        place = (PLACE[0], 0)
        centre[place] = large
    stored, built = parameters(graph, record), block(graph)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    for bounded in (
        lambda: BlockProblem(built, stored, stored).bound(centre, zero),
        lambda: affine_run(built, stored, centre, zero, 0.0),
    ):
        with pytest.raises(NoBound) as refused:
            bounded()
        reason = refused.value.reason
        assert reason.startswith(f"overflow reachable: element {list(place)}"), reason
        assert what in reason, reason


def test_overflowing_element_of_a_weight_is_named() -> None:
    weight = torch.full((2, 3), 0.5, dtype=torch.float64)
    weight[1, 1] = 65000.0
    half = resolve({"preset": "torch-eager", "compute": "float16"})
    with pytest.raises(NoBound, match=r"overflow reachable: element \[1, 1\] may exceed 65504"):
        held_plain(near(weight, Fraction(1, 10)), half, "w")
