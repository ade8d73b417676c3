"""Float64 errors of the projection at the end of a softmax are covered for any numerator.

Kernels round nothing here. With p the softmax of the reference scores and p̃ its float64 value, a
numerator v becomes (p - p̃) + v - p·Σv in real numbers; a reverse pass computes α·v - (α·p̃)·Σv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.affine.adjoint import Adjoint as ProverAdjoint
from kcdsl_backends.drift.affine_run import affine_run
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine_walk import walk
from kcdsl_certs.recheck.bounds_walk import walk as derive
from kcdsl_certs.recheck.linear_bounds.context import halves
from kcdsl_certs.recheck.linear_bounds.tape import FunctionalBatch
from tests.support import proofs
from tests.support.ball import numbers
from tests.support.ball.bounds import Setting
from tests.support.ball.unrounded import round_nothing
from tests.support.prover import block, parameters

Floats = np.ndarray
TRAIN = proofs.numerics("float64", "nearest", accumulate="float64", exp_ulps=0)
INFER = proofs.numerics(
    "float64", "nearest", accumulate="float64", exp_ulps=0, weights=("fp8_e4m3", "per_channel")
)
SHAPE = (2, 3, 3)
MASKED = np.broadcast_to(np.tril(np.ones((3, 3), dtype=bool)), SHAPE)


@pytest.fixture(autouse=True)
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    round_nothing(monkeypatch)


def softmax(rng: np.random.Generator, masked: bool) -> Any:
    """Return a softmax of a linear on the input."""
    g = proofs.Graph((3, 6))
    w = g.param("w", rng.standard_normal((6, 6)))
    y = g.add("linear", [g.add("input", [], (3, 6)), w], (3, 6))
    inputs = [g.reshape(y, SHAPE)]
    if masked:
        inputs.append(g.constant("mask", MASKED[0].copy()))
    g.add("softmax", inputs, SHAPE, role="probabilities")
    return g


@dataclass(frozen=True)
class Projection:
    """Reference scores, p̃, the largest numerators, the error of the projection.

    Also functionals [B, ...] pulled back; `still`: for a drift, which excludes p - p̃.
    """

    scores: Floats
    p: Floats
    most: Floats
    added: Floats
    pull: Callable[[Floats], Floats]
    still: bool = False


def prover(setting: Setting, _: Path) -> Iterator[Projection]:
    radius = torch.full((1, 1), setting.radius, dtype=torch.float64)
    side, x = parameters(setting.graph, TRAIN), torch.from_numpy(setting.centre)
    run = affine_run(block(setting.graph), side, x, radius, 0.0)
    node = run.nodes[setting.graph.output]
    place, scores = run.computed[node.name], run.operand(node, 0)
    entry, numerator = run.tape.entries[place], run.tape.entries[place - 1]
    assert entry.radius is not None
    window = tuple((0, n) for n in SHAPE)

    def pull(alpha: Floats) -> Floats:
        ((at, found),) = entry.vjp(ProverAdjoint(torch.from_numpy(alpha), window, SHAPE))
        assert at == place - 1
        return np.asarray(found.dense().values.numpy())

    reference, reach = entry.reference.numpy(), numerator.error_bound.numpy()
    yield Projection(scores.reference.numpy(), reference, reach, entry.radius.numpy(), pull)


def checker(setting: Setting, folder: Path) -> Iterator[Projection]:
    scene = setting.problem(folder)
    with np.errstate(all="ignore"):
        walked = walk(scene, scene.train)
    forms: Any = walked.forms
    form, scores = forms[setting.graph.output], forms[setting.graph.nodes[-1]["inputs"][0]]
    entry = walked.tape.entries[form.place]
    ((at, back),) = entry.operands
    assert entry.radius is not None

    def pull(alpha: Floats) -> Floats:
        found: Any = back(Adjoint(alpha, (0, 0, 0)))
        return np.asarray(found.values)

    reach = walked.tape.entries[at].error_bound
    yield Projection(scores.reference, form.reference, reach, entry.radius, pull)


def planes(setting: Setting, folder: Path) -> Iterator[Projection]:
    with np.errstate(all="ignore"):
        course = derive(setting.problem(folder))
    entry = course.tape.entries[course.places[setting.graph.output]]
    scores = course.tape.entries[course.places[setting.graph.nodes[-1]["inputs"][0]]]
    moved, _ = halves(scores.d)
    for k, reference in enumerate((scores.reference, scores.reference + moved / 2)):

        def pulled(alpha: Floats, k: int = k) -> tuple[int, Any]:
            parts: list[Any] = [None, None]
            parts[k] = Adjoint(alpha, (0, 0, 0))
            ((at, found),) = entry.vjp(FunctionalBatch(*parts))
            return at, (found.e, found.d)[k]

        def pull(alpha: Floats, pulled: Callable[[Floats], tuple[int, Any]] = pulled) -> Floats:
            return np.asarray(pulled(alpha)[1].values)

        most = course.tape.entries[pulled(np.ones((1, *SHAPE)))[0]].sizes[k]
        yield Projection(reference, entry.reference, most, entry.radius[k], pull, still=k == 1)


@pytest.mark.parametrize("program", [prover, checker, planes])
@pytest.mark.parametrize("masked", [False, True])
def test_float64_error_of_a_projection_is_covered(
    tmp_path: Path, masked: bool, program: Callable[[Setting, Path], Iterator[Projection]]
) -> None:
    rng = np.random.default_rng(4)
    mask = MASKED if masked else np.ones(SHAPE, dtype=bool)
    seen = {False: 0.0, True: 0.0}
    for _ in range(6):
        graph = softmax(rng, masked)
        centre = rng.standard_normal(graph.input_shape) * rng.choice([0.5, 2.0])
        for found in program(Setting(graph, TRAIN, INFER, centre, 2.0**-9), tmp_path):
            p = numbers.each(lambda s: s.exp(), numbers.balls(found.scores)) * mask
            p = p / numbers.total(p)
            off = p - numbers.balls(found.p)
            for _ in range(8):
                alpha = rng.standard_normal((1, *SHAPE)) * 2.0 ** rng.integers(-40, 2, SHAPE)
                v = numbers.balls(found.most * mask * rng.choice([-1.0, 1.0], SHAPE))
                real = v - p * numbers.total(v)
                if not found.still:
                    real = real + off
                pulled = (numbers.balls(found.pull(alpha)[0]) * v).sum()
                error = abs((numbers.balls(alpha[0]) * real).sum() - pulled)
                paid = (numbers.balls(np.abs(alpha[0])) * numbers.balls(found.added)).sum()
                assert not error > paid
                seen[found.still] = max(seen[found.still], float(error / paid))
    assert seen[False] > 2.0**-12
    assert seen[True] > 2.0**-12 or program is not planes
