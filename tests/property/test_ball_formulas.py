"""The formulas of relational-interval.md, evaluated independently in ball arithmetic.

Both programs must agree with the formulas from above, tightly: no end of a box may lie inside the
box of the formulas, nor outside by more than a share of its width that float64 explains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flint import arb

from tests.support import proofs
from tests.support.affine_rules import ROWS, RULES, WIDTH, heads, source
from tests.support.ball import numbers
from tests.support.ball.bounds import Ends, Setting, all_enclosures
from tests.support.ball.boxes import Box
from tests.support.ball.kernel import Kernel
from tests.support.ball.relational import Page
from tests.support.grids import by_turns
from tests.support.mutation.blocks import decoder, encoder, gated

N = proofs.numerics
KERNELS: dict[str, Any] = {
    "float32 any": N("float32", "any"),
    "float32 nearest, fused": N("float32", "nearest", style="fused"),
    "bfloat16 any, fused": N("bfloat16", "any", style="fused", scores="float32"),
    "bfloat16 nearest, fp8 weights": N(
        "bfloat16", "nearest", scores="bfloat16", weights=("fp8_e4m3", "per_channel")
    ),
    "float16 nearest, fp8 probabilities": N(
        "float16", "nearest", style="fused", scores="float32", probabilities="fp8_e4m3"
    ),
    "float16 any, float16 sums": N("float16", "any", accumulate="float16"),
    "bfloat16 toward zero": N(
        "bfloat16",
        "toward_zero",
        scores="bfloat16",
        weights=("bfloat16", "none", "toward_zero"),
    ),
    "float16 any toward zero": N("float16", "any_toward_zero"),
    "float16 any direction, fused": N("float16", "any_direction", style="fused"),
}
PAIRS = [
    ("float32 any", "bfloat16 any, fused"),
    ("float32 nearest, fused", "bfloat16 nearest, fp8 weights"),
    ("bfloat16 nearest, fp8 weights", "float16 nearest, fp8 probabilities"),
    ("float32 any", "float32 nearest, fused"),
    ("float16 any, float16 sums", "float32 any"),
    ("float16 any toward zero", "bfloat16 toward zero"),
    ("float32 any", "float16 any direction, fused"),
]


def read_again(rng: np.random.Generator) -> Any:
    """Return norms of a value that is recomputed for each reading."""
    g, x = source()
    shape = (ROWS, WIDTH)
    w = g.param("w", rng.standard_normal((WIDTH, WIDTH)) / 2)
    a = g.add("linear", [x, w, g.param("b", rng.standard_normal(WIDTH))], shape)
    y = g.add("shift", [g.add("scale", [a], shape, factor=-0.3)], shape, offset=0.7)
    y = g.add("mul", [g.add("gelu", [y], shape), g.add("neg", [a], shape)], shape)
    y = g.add("sub", [x, g.add("divide", [y], shape, divisor=1.7)], shape)
    gain = g.param("g", 1 + 0.3 * rng.standard_normal(WIDTH))
    y = g.add("rms_norm", [y, gain], shape, eps=1e-2)
    y = g.add("add", [g.add("relu", [y], shape), a], shape)
    g.add("layer_norm", [y, gain], shape, eps=1e-2)
    return g


def rows_read_again(rng: np.random.Generator) -> Any:
    """Return a softmax of a recomputed value, and a norm of a softmax."""
    g, x = source()
    y = heads(g, x, rng, "h")
    shape = (2, ROWS, 2)
    angles = rng.standard_normal((ROWS, 2))
    y = g.slice(y, dim=-1, start=0, stop=2)
    cos = g.constant("cos", np.cos(angles).astype(np.float32))
    sin = g.constant("sin", np.sin(angles).astype(np.float32))
    turned = g.add("rope", [y, cos, sin], shape)
    y = g.add("concat", [turned, g.add("silu", [y], shape)], (2, ROWS, 4), dim=2)
    p = g.add("softmax", [y], (2, ROWS, 4), role="probabilities")
    y = g.add("mul", [p, g.add("tanh", [y], (2, ROWS, 4))], (2, ROWS, 4))
    g.add("layer_norm", [y], (2, ROWS, 4), eps=1e-2)
    return g


BLOCKS: dict[str, Any] = {
    **RULES,
    "decoder": decoder,
    "encoder": encoder,
    "gated": gated,
    "read again": read_again,
    "rows read again": rows_read_again,
}
# Of a width. Bounds of values rounded to float32 are so narrow that float64 counts for more.
AGREE, AGREE_FINE = 1e-9, 2e-5


def page(setting: Setting, folder: Path) -> Page:
    problem = setting.problem(folder)

    def stored(kernel: Any) -> tuple[Any, Any]:
        return (
            lambda key: problem.parameters.plain(key, kernel),
            lambda key: problem.parameters.linear(key, kernel),
        )

    found = Page(
        setting.graph,
        (Kernel(setting.train), Kernel(setting.infer)),
        (stored(problem.train), stored(problem.infer)),
        setting.centre,
        setting.radius,
    )
    # a weight read only by linears is stored as their weight
    (plain_t, linear_t), (plain_i, linear_i) = found.parameters
    found.parameters = (
        (_leaf(setting.graph, plain_t, linear_t), linear_t),
        (_leaf(setting.graph, plain_i, linear_i), linear_i),
    )
    return found


def _leaf(graph: Any, plain: Any, linear: Any) -> Any:
    weights = {
        node["attrs"]["key"]
        for node in graph.nodes
        if node["op"] == "param"
        and all(
            n["op"] == "linear" and n["inputs"][1] == node["name"]
            for n in graph.nodes
            if node["name"] in n["inputs"]
        )
    }
    return lambda key: linear(key) if key in weights else plain(key)


def compare(said: Ends, box: Box, scale: float, agree: float) -> str:
    """Return the errors of the ends that a program reports, or ""."""
    for index in np.ndindex(*box.lo.shape):
        low: arb = box.lo.item(index)
        high: arb = box.hi.item(index)
        lo, hi = arb(float(said[0][index])), arb(float(said[1][index]))
        slack = agree * (high - low) + arb(scale) * numbers.power(-41)
        ends = f"[{lo.str(17)}, {hi.str(17)}], the formulas [{low.str(17)}, {high.str(17)}]"
        if lo > low or hi < high:
            return f"{index} is too small: {ends}"
        if low - lo > slack or hi - high > slack:
            return f"{index} is larger than need be: {ends}"
    return ""


@pytest.mark.sample(5)
@by_turns(one_of=2, rule=BLOCKS, pair=PAIRS)
def test_both_programs_agree_with_the_formulas(
    tmp_path: Path, rule: str, pair: tuple[str, str]
) -> None:
    rng = np.random.default_rng([list(BLOCKS).index(rule), PAIRS.index(pair)])
    graph = BLOCKS[rule](rng)
    train, infer = (KERNELS[name] for name in pair)
    fine = any(KERNELS[name]["compute"] == "float32" for name in pair)
    compared = 0
    for radius in (0.0, 2.0**-12, 2.0**-4):
        centre = rng.standard_normal(graph.input_shape).astype(np.float32).astype(np.float64)
        setting = Setting(graph, train, infer, centre, radius)
        found = [said for said in all_enclosures(setting, tmp_path) if "intervals" in said.source]
        if not found:
            continue
        derived = page(setting, tmp_path)
        derived.derive()
        states = {
            name: derived.state(name)
            for name, value in derived.states.items()
            if not isinstance(value, np.ndarray)
        }
        for said in found:
            for part, ends in (("t", said.train), ("i", said.infer), ("d", said.drift)):
                for name, box in ends.items():
                    expected = getattr(states[name], part)
                    scale = max(float(np.abs(v).max()) for v in (*box, *said.train[name]))
                    agree = AGREE_FINE if fine else AGREE
                    wrong = compare(box, expected, scale, agree)
                    assert not wrong, (said.source, part, name, radius, wrong)
                    compared += 1
    assert compared > 0


@pytest.mark.parametrize("rule", BLOCKS)
def test_every_operation_has_a_formula(rule: str) -> None:
    graph = BLOCKS[rule](np.random.default_rng(0))
    lacking = {node["op"] for node in graph.nodes if not hasattr(Page, f"_{node['op']}")}
    assert not lacking
