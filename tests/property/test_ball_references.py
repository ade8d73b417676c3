"""Float64 errors of both programs alone: unrounded kernels, against 200 bits.

With formats of 400 bits a bound covers only the verifier's own rounding and remainders of second
order. The exact function must lie inside, at every node, without slack; at a point these bounds
must be small.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.form import Form
from kcdsl_certs.recheck.affine_walk import walk
from tests.support import proofs
from tests.support.affine_rules import RULES
from tests.support.ball import numbers, runs
from tests.support.ball.bounds import Setting, all_enclosures
from tests.support.ball.points import corner
from tests.support.ball.unrounded import round_nothing
from tests.support.mutation.blocks import decoder, encoder, gated

BLOCKS: dict[str, Any] = {**RULES, "decoder": decoder, "encoder": encoder, "gated": gated}
RECORD = proofs.numerics("float64", "nearest", accumulate="float64", exp_ulps=0)


@pytest.fixture(autouse=True)
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    round_nothing(monkeypatch)


def exactly(setting: Setting, x: np.ndarray) -> dict[str, Any]:
    def stored(key: str) -> np.ndarray:
        return np.asarray(setting.graph.tensors[key].astype(np.float64))

    return runs.run(setting.graph, RECORD, x, stored, stored, 0, "up", exact=True)


@pytest.mark.sample(11)
@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**-20])
@pytest.mark.parametrize("rule", BLOCKS)
def test_exact_function_is_within_the_float64_error(
    tmp_path: Path, rule: str, scale: float
) -> None:
    rng = np.random.default_rng([list(BLOCKS).index(rule), int(scale)])
    graph = BLOCKS[rule](rng)
    centre = rng.standard_normal(graph.input_shape) * scale
    compared = 0
    for radius in (0.0, scale * 2.0**-14):
        setting = Setting(graph, RECORD, RECORD, centre, radius)
        points = [corner(centre, radius, rng) for _ in range(3)]
        values = [exactly(setting, x) for x in points]
        for said in all_enclosures(setting, tmp_path):
            for ends in (said.train, said.infer):
                for name, (lo, hi) in ends.items():
                    for value in values:
                        if name not in value:
                            continue
                        where = numbers.outside(numbers.balls(value[name]), lo, hi)
                        assert not where, (said.source, name, where)
                        compared += 1
                        if radius == 0 and scale == 1:
                            size = max(float(np.abs(lo).max()), float(np.abs(hi).max()))
                            assert (hi - lo).max() <= 2.0**-30 * size + 2.0**-90, said.source
    assert compared > 0 or scale > 1


@pytest.mark.parametrize("radius", [0.0, 2.0**-14])
@pytest.mark.parametrize("rule", BLOCKS)
def test_functionals_of_the_exact_error_are_within_the_reverse_pass(
    tmp_path: Path, rule: str, radius: float
) -> None:
    """Adjoints are computed in float64 too; their error is covered."""
    rng = np.random.default_rng([list(BLOCKS).index(rule), int(radius * 2**14)])
    graph = BLOCKS[rule](rng)
    centre = rng.standard_normal(graph.input_shape)
    setting = Setting(graph, RECORD, RECORD, centre, radius)
    scene = setting.problem(tmp_path)
    with np.errstate(all="ignore"):
        found = walk(scene, scene.train)
    x = corner(centre, radius, rng)
    values, moved = exactly(setting, x), numbers.balls(x) - numbers.balls(centre)
    for name, form in found.forms.items():
        if not isinstance(form, Form) or form.place is None:
            continue
        weights = rng.standard_normal((2, *form.shape))
        adjoint = Adjoint(weights, (0,) * len(form.shape))
        bound = found.tape.bound(form.place, adjoint)
        error = numbers.balls(values[name]) - numbers.balls(form.reference)
        for k in range(2):
            seen = (numbers.balls(weights[k]) * error).sum()
            if bound.input is not None:
                shift = moved[bound.input.window]
                seen = seen - (numbers.balls(bound.input.values[k]) * shift).sum()
            away = abs(seen - numbers.arb(float(bound.centre[k])))
            assert not away > numbers.arb(float(bound.radius[k])), name
