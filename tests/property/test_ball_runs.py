"""Runs in ball arithmetic are within the bounds of both programs: no slack, extreme inputs.

The roundings of a run are at their limits and carried with 200 bits, so a violation by one part in
10^50 is detected. "exact" runs round nothing: the real function.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import proofs
from tests.support.affine_rules import RULES
from tests.support.ball import numbers, runs
from tests.support.ball.bounds import Enclosures, Setting, all_enclosures
from tests.support.grids import by_turns
from tests.support.mutation.blocks import decoder, encoder, gated

N = proofs.numerics
Floats = np.ndarray

KERNELS: dict[str, Any] = {
    "float32 any": N("float32", "any"),
    "float32 nearest, fused": N("float32", "nearest", style="fused"),
    "bfloat16 any, fused": N("bfloat16", "any", style="fused", scores="float32"),
    "bfloat16 nearest": N("bfloat16", "nearest", scores="bfloat16"),
    "float16 any, float16 sums": N("float16", "any", accumulate="float16"),
    "float16 nearest, fp8 probabilities": N(
        "float16", "nearest", style="fused", scores="float32", probabilities="fp8_e4m3"
    ),
    "float64 any": N("float64", "any", accumulate="float64"),
    "bfloat16 toward zero": N("bfloat16", "toward_zero", scores="bfloat16"),
    "float16 any toward zero": N("float16", "any_toward_zero"),
    "bfloat16 any direction, fused": N("bfloat16", "any_direction", style="fused"),
}
PAIRS = [
    ("float32 any", "bfloat16 any, fused"),
    ("float32 nearest, fused", "bfloat16 nearest"),
    ("float16 any, float16 sums", "float16 nearest, fp8 probabilities"),
    ("float64 any", "float32 any"),
    ("float16 any toward zero", "bfloat16 toward zero"),
    ("float32 any", "bfloat16 any direction, fused"),
]
MODES = ("up", "down", "signs")


def usual(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return rng.standard_normal(shape)


def large(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return rng.standard_normal(shape) * 2.0**12


def small(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return rng.standard_normal(shape) * 2.0**-18


def subnormal(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Return numbers below the normal range of float16, and of float32 in one row."""
    found = np.rint(rng.standard_normal(shape) * 64) * 2.0**-24
    found[0] *= 2.0**-118
    return found


def uneven(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Return rows with one number far larger than the others."""
    found = rng.standard_normal(shape) * 2.0**-9
    found[..., 1] = 200.0
    return found


def level(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Return rows of nearly equal numbers, with almost no variance."""
    return 1 + rng.standard_normal(shape) * 2.0**-10


def nothing(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return np.zeros(shape)


INPUTS: dict[str, Callable[..., Floats]] = {
    f.__name__: f for f in (usual, large, small, subnormal, uneven, level, nothing)
}
BLOCKS: dict[str, Any] = {"decoder": decoder, "encoder": encoder, "gated": gated}
# For these a bound must exist at a point, for every rule; else little would be tested.
MODEST = ("usual", "small", "uneven")


def check(found: list[Enclosures], t: dict[str, Any], i: dict[str, Any]) -> None:
    """Fail if a pair of runs lies outside the bounds of any domain."""
    for said in found:
        for what, ends, value in (
            ("train", said.train, t.get),
            ("infer", said.infer, i.get),
            ("drift", said.drift, lambda name: None if name not in t else i[name] - t[name]),
        ):
            for name, (lo, hi) in ends.items():
                run = value(name)
                if run is not None:
                    where = numbers.outside(numbers.balls(run), lo, hi)
                    assert not where, (said.source, what, name, where)


def ran(setting: Setting, problem: Any, side: str, x: Floats, seed: int, mode: str) -> Any:
    record, kernel = getattr(setting, side), getattr(problem, side)
    return runs.run(
        setting.graph,
        record,
        x,
        lambda key: problem.parameters.plain(key, kernel),
        lambda key: problem.parameters.linear(key, kernel),
        seed,
        mode,
        False,
    )


@pytest.mark.sample(3)
@by_turns(one_of=2, rule=RULES, inputs=INPUTS)
def test_runs_of_every_rule_are_within_both_programs(
    tmp_path: Path, rule: str, inputs: str
) -> None:
    assert attacked(RULES[rule], tmp_path, rule, inputs) > 0 or inputs not in MODEST


@pytest.mark.sample(1)
@pytest.mark.parametrize("inputs", ["usual", "large", "level"])
@pytest.mark.parametrize("block", BLOCKS)
def test_runs_of_every_block_are_within_both_programs(
    tmp_path: Path, block: str, inputs: str
) -> None:
    assert attacked(BLOCKS[block], tmp_path, block, inputs) > 0 or inputs not in MODEST


def attacked(build: Any, folder: Path, name: str, inputs: str) -> int:
    """Return the number of enclosures compared with runs; fail if a run leaves one."""
    which = [sum(name.encode()), list(INPUTS).index(inputs)]
    rng = np.random.default_rng(which)
    graph, bounded = build(rng), 0
    for pair in PAIRS[sum(which) % 2 :: 2]:
        drawn = INPUTS[inputs](rng, graph.input_shape)
        centre = drawn.astype(np.float16).astype(np.float64) if inputs != "subnormal" else drawn
        scale = float(np.abs(centre).max())
        for radius in (0.0, scale * 2.0**-12):
            setting = Setting(graph, KERNELS[pair[0]], KERNELS[pair[1]], centre, radius)
            found = list(all_enclosures(setting, folder))
            bounded += len(found)
            problem = setting.problem(folder)
            for trial in range(2):
                x = centre + radius * rng.choice([-1.0, 0.0, 1.0], centre.shape)
                seeds = rng.integers(2**32, size=2)
                t = ran(setting, problem, "train", x, seeds[0], MODES[trial])
                i = ran(setting, problem, "infer", x, seeds[1], MODES[(trial + 1) % 3])
                check(found, t, i)
    return bounded


def test_slightly_too_small_bound_is_detected(tmp_path: Path) -> None:
    """Test the comparison itself: shrink an enclosure by one part in 10^12."""
    rng = np.random.default_rng(0)
    graph = RULES["scale"](rng)
    centre = np.full(graph.input_shape, 0.75)
    setting = Setting(graph, KERNELS["float32 any"], KERNELS["float32 any"], centre, 0.25)
    problem = setting.problem(tmp_path)
    found = list(all_enclosures(setting, tmp_path))
    t = ran(setting, problem, "train", centre + 0.25, 0, "up")
    check(found, t, t)
    moved = 2.0**-24 * 4  # the inner roundings are bounded more generously than runs need
    for said in found:
        lo, hi = said.train[graph.output]
        said.train[graph.output] = lo * (1 - moved), hi * (1 - moved)
    with pytest.raises(AssertionError, match="not in"):
        check(found, t, t)
