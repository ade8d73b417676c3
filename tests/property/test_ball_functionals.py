"""Functionals of single rows in both programs cover the float64 errors on the way.

Kernels round nothing here, so bounds consist of the verifier's error; compared with 200 bits,
without slack. Rows of products use separate rules: through keys and values at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.affine.adjoint import Adjoint as ProverAdjoint
from kcdsl_backends.drift.affine_run import affine_run
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.form import Form
from kcdsl_certs.recheck.affine_walk import walk
from tests.support import proofs
from tests.support.affine_rules import RULES, Build, rotated_heads, scores, source
from tests.support.ball import numbers, runs
from tests.support.ball.bounds import Setting
from tests.support.ball.points import corner
from tests.support.ball.unrounded import round_nothing
from tests.support.mutation.blocks import decoder, encoder, gated
from tests.support.prover import block, parameters

Floats = np.ndarray
RECORD = proofs.numerics("float64", "nearest", accumulate="float64", exp_ulps=0)
BATCH = 6
CaseBound = tuple[Floats, Floats, Floats | None]
"""For functionals [B]: lower and upper bounds, and the functionals of the input [B, T, D]."""
Side = tuple[dict[str, Floats], Callable[[str, tuple[int, ...], Floats], CaseBound]]
"""The reference of every node, and bounds of functionals [B, n] of one of its rows."""


def attended(oddly: str) -> Build:
    """Return a context product whose values come from a linear, but not as its heads."""

    def build(rng: np.random.Generator) -> Any:
        g, x = source()
        w, s = g.param("w", rng.standard_normal((6, 6))), scores(g, x, rng)
        if oddly == "values of a stack of rows":
            x = g.reshape(x, (1, 3, 6))
            v = g.add("linear", [x, w], (1, 3, 6))
            v = g.reshape(v, (3, 2, 3))
            v = g.permute(v, [1, 0, 2])
        elif oddly == "values of no linear":
            v = g.add("relu", [g.add("linear", [x, w], (3, 6))], (3, 6))
            v = g.reshape(v, (3, 2, 3))
            v = g.permute(v, [1, 0, 2])
        elif oddly == "values with rows and heads mixed":
            v = g.add("linear", [x, w], (3, 6))
            v = g.reshape(v, (2, 3, 3))
        elif oddly == "values of one row for each head":
            v = g.add("linear", [x, w], (3, 6))
            v = g.slice(v, dim=0, start=1, stop=3)
            v = g.reshape(v, (2, 1, 6))
            v = g.expand(v, (2, 3, 6))
        else:  # values of the last rows
            s = g.slice(s, dim=2, start=0, stop=2)
            v = g.add("linear", [x, w], (3, 6))
            v = g.reshape(v, (3, 2, 3))
            v = g.permute(v, [1, 0, 2])
            v = g.slice(v, dim=1, start=1, stop=3)
        columns, width = (2, 3) if oddly == "values of the last rows" else (3, 3)
        width = 6 if oddly == "values of one row for each head" else width
        p = g.add("softmax", [s], (2, 3, columns), role="probabilities")
        g.add("matmul", [p, v], (2, 3, width), role="context")
        return g

    return build


def turned_oddly(some: bool) -> Build:
    """Return scores of keys that were moved after their rotation.

    Only the last rows are used, or rows take the place of heads.
    """

    def build(rng: np.random.Generator) -> Any:
        g, x = source()
        q, k = rotated_heads(g, x, rng, "q", 3), rotated_heads(g, x, rng, "k", 3)
        if some:
            k = g.slice(k, dim=1, start=1, stop=3)
        else:
            k = g.permute(k, [1, 0, 2])
        rows = 2 if some else 3
        k = g.permute(k, [0, 2, 1])
        g.add("matmul", [q, k], (3, 3, rows), role="scores")
        return g

    return build


ODDLY = (
    "values of a stack of rows",
    "values of no linear",
    "values with rows and heads mixed",
    "values of one row for each head",
    "values of the last rows",
)
BLOCKS: dict[str, Any] = {
    **RULES,
    "decoder": decoder,
    "encoder": encoder,
    "gated": gated,
    **{kind: attended(kind) for kind in ODDLY},
    "turned keys of the last rows": turned_oddly(True),
    "turned keys with rows for heads": turned_oddly(False),
}


@pytest.fixture(autouse=True)
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    round_nothing(monkeypatch)


def prover(setting: Setting, _: Path) -> Side:
    radius = torch.full((1, 1), setting.radius, dtype=torch.float64)
    side, x = parameters(setting.graph, RECORD), torch.from_numpy(setting.centre)
    run = affine_run(block(setting.graph), side, x, radius, 0.0)

    def bound(name: str, row: tuple[int, ...], values: Floats) -> CaseBound:
        index = run.computed[name]
        window = (*((i, i + 1) for i in row), (0, values.shape[-1]))
        shape = tuple(run.tape.entries[index].shape)
        each = torch.from_numpy(values).reshape(len(values), *(1 for _ in row), -1)
        found = run.tape.bound(index, ProverAdjoint(each, window, shape))
        region = None if found.region is None else found.region.dense().values.numpy()
        return found.low.numpy(), found.high.numpy(), region

    return {n: run.tape.entries[i].reference.numpy() for n, i in run.computed.items()}, bound


def checker(setting: Setting, folder: Path) -> Side:
    scene = setting.problem(folder)
    with np.errstate(all="ignore"):
        found = walk(scene, scene.train)
    forms = {
        name: form
        for name, form in found.forms.items()
        if isinstance(form, Form) and form.place is not None
    }

    def bound(name: str, row: tuple[int, ...], values: Floats) -> CaseBound:
        place = forms[name].place
        assert place is not None
        each = values.reshape(len(values), *(1 for _ in row), -1)
        said = found.tape.bound(place, Adjoint(each, (*row, 0)))
        region = None
        if said.input is not None:
            region = np.zeros((len(values), *setting.graph.input_shape))
            region[(slice(None), *said.input.window)] = said.input.values
        return said.centre - said.radius, said.centre + said.radius, region

    return {name: form.reference for name, form in forms.items()}, bound


def rows(shape: tuple[int, ...], rng: np.random.Generator) -> Iterator[tuple[int, ...]]:
    """Yield the last row, and another one."""
    yield tuple(n - 1 for n in shape[:-1])
    yield tuple(int(rng.integers(n)) for n in shape[:-1])


@pytest.mark.sample(10)
@pytest.mark.parametrize("program", [prover, checker])
@pytest.mark.parametrize("radius", [0.0, 2.0**-14])
@pytest.mark.parametrize("rule", BLOCKS)
def test_exact_error_of_a_row_is_within_its_reverse_pass(
    tmp_path: Path, rule: str, radius: float, program: Callable[[Setting, Path], Side]
) -> None:
    rng = np.random.default_rng([list(BLOCKS).index(rule), int(radius * 2**14)])
    graph = BLOCKS[rule](rng)
    setting = Setting(graph, RECORD, RECORD, rng.standard_normal(graph.input_shape), radius)
    references, bound = program(setting, tmp_path)

    def stored(key: str) -> Floats:
        return np.asarray(graph.tensors[key].astype(np.float64))

    for x in (corner(setting.centre, radius, rng) for _ in range(2)):
        values = runs.run(graph, RECORD, x, stored, stored, 0, "up", exact=True)
        moved = numbers.balls(x) - numbers.balls(setting.centre)
        for name, reference in references.items():
            error = numbers.balls(values[name]) - numbers.balls(reference)
            for row in rows(reference.shape, rng):
                weights = rng.standard_normal((BATCH, reference.shape[-1]))
                low, high, region = bound(name, row, weights)
                for k in range(BATCH):
                    seen, rounded = (numbers.balls(weights[k]) * error[row]).sum(), numbers.ZERO
                    if region is not None:  # sums of it are rounded, which its reader covers
                        terms = numbers.balls(region[k]) * moved
                        seen, rounded = seen - terms.sum(), numbers.size(terms).sum()
                    rounded = rounded * numbers.power(-52)
                    assert not seen < numbers.arb(float(low[k])) - rounded, (name, row)
                    assert not seen > numbers.arb(float(high[k])) + rounded, (name, row)


def copies(kind: str) -> Any:
    """Return copies of one element of every row, or concatenated operands."""
    g = proofs.Graph((3, 1))
    x = g.add("input", [], (3, 1))
    if kind == "copied":
        g.expand(x, (3, 40))
    else:
        g.add("concat", [x] * 40, (3, 40), dim=1)
    return g


@pytest.mark.parametrize("program", [prover, checker])
@pytest.mark.parametrize("kind", ["copied", "joined"])
def test_near_cancellation_is_covered(
    tmp_path: Path, kind: str, program: Callable[[Setting, Path], Side]
) -> None:
    """Only the sum of forty numbers rounds on the way to the input: the remainders of 1 and -1."""
    graph = copies(kind)
    setting = Setting(graph, RECORD, RECORD, np.array([[0.5], [1.0], [2.0]]), 2.0**-14)
    _, bound = program(setting, tmp_path)
    for small in (2.0**-54, 0.7 * 2.0**-53, 1.3 * 2.0**-53):
        values = np.full((1, 40), small)
        values[0, 0], values[0, -1] = 1.0, -1.0
        low, high, region = bound(graph.output, (1,), values)
        known = numbers.ZERO if region is None else numbers.arb(float(region[0, 1, 0]))
        rest = (numbers.arb(38) * numbers.arb(small) - known) * numbers.arb(setting.radius)
        assert not abs(rest) > numbers.arb(float(high[0])) + abs(known) * numbers.power(-66)
        assert float(low[0]) == -float(high[0])
