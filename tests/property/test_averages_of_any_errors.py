"""Context products with arbitrary operand errors: averaged bounds hold, and are needed.

Beyond the errors of kernels, errors here exceed the probabilities, leave rows unbalanced or nearly
balanced, and accompany values whose own errors dominate or are negligible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.affine.adjoint import Adjoint as ProverAdjoint
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine_run import affine_run
from kcdsl_backends.drift.ops.bilinear import heads
from kcdsl_backends.drift.ops.one_row import row_of_values
from kcdsl_certs.recheck.affine.adjoint import Adjoint, embedded
from kcdsl_certs.recheck.affine_walk import walk
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import Pass, parse
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.ops.linear import bilinear
from kcdsl_certs.recheck.ops.linear.one_row import averages
from tests.support import proofs
from tests.support.prover import block, parameters

RECORD = proofs.numerics("float32", "any")
ROWS, WIDTH, RADIUS = 3, 3, 2.0**-9
Array = np.ndarray
Window = tuple[slice, slice]
Claim = Callable[[Array, int, Window], tuple[float, Array, Array]]
"""For one functional [heads, d] of a row, zero outside of some heads and columns: the bound of the
unprojected part, and the functionals of the errors of the probabilities [heads, T] and of the
inputs [T, D]."""


def product(rng: np.random.Generator, groups: int) -> Any:
    """Return probabilities times values, each read by two of twice as many heads."""
    g = proofs.Graph((ROWS, 6))
    x, heads = g.add("input", [], (ROWS, 6)), 2 * groups
    w = g.param("w", rng.standard_normal((heads * ROWS, 6)))
    s = g.add("linear", [x, w], (ROWS, heads * ROWS))
    s = g.reshape(s, (heads, ROWS, ROWS))
    p = g.add("softmax", [s], (heads, ROWS, ROWS), role="probabilities")
    w = g.param("v", rng.standard_normal((groups * WIDTH, 6)))
    v = g.add("linear", [x, w], (ROWS, groups * WIDTH))
    v = g.reshape(v, (ROWS, groups, WIDTH))
    v = g.permute(v, [1, 0, 2])
    v = g.reshape(v, (groups, 1, ROWS, WIDTH))
    v = g.expand(v, (groups, 2, ROWS, WIDTH))
    v = g.reshape(v, (heads, ROWS, WIDTH))
    g.add("matmul", [p, v], (heads, ROWS, WIDTH), role="context")
    return g


@dataclass(frozen=True)
class Operands:
    """p̃, ρ_p [heads, T, T], sum drifts [heads, T], |o| [heads, T, d] and ρ_x."""

    p: Array
    moved: Array
    balance: Array
    own: Array
    reach: Array

    @staticmethod
    def of(rng: np.random.Generator, groups: int) -> Operands:
        """Return operands of a causal product."""
        p = rng.dirichlet(np.full(ROWS, 0.5), size=(2 * groups, ROWS)) * np.tril(np.ones((3, 3)))
        own = rng.uniform(0, 1, size=(groups, ROWS, WIDTH)) * 2.0 ** rng.integers(-3, 1)
        return Operands(
            p,
            rng.uniform(0, 1, size=p.shape) * rng.choice([0.1, 1.0]),
            rng.uniform(0, 0.2, size=p.shape[:-1]) * rng.choice([0.0, 1.0, 4.0]),
            np.repeat(own, 2, axis=0),
            rng.uniform(0, 1, size=(ROWS, 6)) * rng.choice([0.0, 0.05]),
        )


@dataclass(frozen=True)
class Product:
    """Operands with W [heads, d, D], ṽ [heads, T, d] and a program's bounds of functionals."""

    operands: Operands
    weight: Array
    v: Array
    claim: Claim


def written(graph: Any, centre: Array) -> KernelRun:
    """Return the run of a kernel that does not separate the casts of linears."""
    radius = torch.full((1, 1), RADIUS, dtype=torch.float64)
    x = torch.from_numpy(centre)
    return affine_run(block(graph), parameters(graph, RECORD), x, radius, 2.0**-60)


def prover(rng: np.random.Generator, groups: int, _: Path) -> Product:
    graph = product(rng, groups)
    run = written(graph, rng.standard_normal(graph.input_shape))
    node = run.nodes[graph.output]
    p, v, values = run.operand(node, 0), run.operand(node, 1), heads(run, node, 1)
    assert p.index is not None
    assert values is not None
    one = Operands.of(rng, groups)
    tape, place = run.tape, p.index
    tape.entries[place] = replace(
        tape.entries[place],
        reference=torch.from_numpy(one.p),
        error_bound=torch.from_numpy(one.moved),
        balance=torch.from_numpy(one.balance)[..., None],
    )
    made_up = replace(
        values, own=torch.from_numpy(one.own), error_bound=torch.from_numpy(one.reach)
    )
    found = row_of_values(run, p, made_up, v.reference, second_order=True)
    assert found is not None
    curved, pull = found.nonlinear, found.vjp

    def claim(alpha: Array, row: int, where: Window) -> tuple[float, Array, Array]:
        some, columns = where
        window = ((some.start, some.stop), (row, row + 1), (columns.start, columns.stop))
        values = torch.from_numpy(alpha[where])[None, :, None]
        a = ProverAdjoint(values, window, tuple(v.reference.shape))
        low, high = curved.between(a)
        assert float(low) == -float(high)
        pulled: Any = dict(pull(a))
        still = np.zeros(one.reach.shape)
        if made_up.source in pulled:
            still = pulled[made_up.source].dense().values[0].numpy()
        return float(high), pulled[place].dense().values[0, :, row].numpy(), still

    return Product(one, values.weight.numpy(), v.reference.numpy(), claim)


def checker(rng: np.random.Generator, groups: int, folder: Path) -> Product:
    graph = product(rng, groups)
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    x = rng.standard_normal(graph.input_shape)
    proof = parse(proofs.dump(proofs.document(graph, RECORD, RECORD, sha256, x, RADIUS)))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    made = written(graph, x).passes.to_json()
    hints = {Pass(p["at"], p["of"], p["kind"], p["stop"]): tuple(p["rows"]) for p in made}
    with np.errstate(all="ignore"):
        walked = walk(scene, scene.train, hints)
    node = next(node for node in graph.nodes if node["name"] == graph.output)
    forms: Any = walked.forms
    p, v = (forms[name] for name in node["inputs"])
    values = bilinear.values(walked, v, (2 * groups, ROWS, WIDTH))
    assert values is not None
    one = Operands.of(rng, groups)
    p = replace(p, reference=one.p, error_bound=one.moved, balance=one.balance[..., None])
    made_up = replace(values, rest=one.own, error_bound=np.stack([one.reach] * 2 * groups))
    found = averages(walked, p, v, made_up)
    assert found is not None
    curve, ((_, to_p), (_, to_x)) = found.nonlinear, found.operands

    def claim(alpha: Array, row: int, where: Window) -> tuple[float, Array, Array]:
        a = Adjoint(alpha[where][None, :, None], (where[0].start, row, where[1].start))
        low, high = curve.between(a)
        assert float(low[0]) == -float(high[0])
        found_p, found_x, of_p = to_p(a), to_x(a), np.zeros((2 * groups, ROWS))
        assert isinstance(found_p, Adjoint)
        assert isinstance(found_x, Adjoint)
        of_p[where[0]] = found_p.values[0, :, 0]
        return float(high[0]), of_p, embedded(found_x, (0, 0), one.reach.shape).values[0]

    return Product(one, values.weight, v.reference, claim)


def admitted(one: Operands, head: int, row: int, rng: np.random.Generator) -> Array:
    """Return extreme admitted errors of a row of probabilities.

    All but one are at an end of their own interval, and that one is where the sum requires it.
    """
    reach, balance = one.moved[head, row], one.balance[head, row]
    while True:
        error, last = reach * rng.choice([-1.0, 1.0], size=reach.size), rng.integers(reach.size)
        rest = error.sum() - error[last]
        low, high = max(-balance - rest, -reach[last]), min(balance - rest, reach[last])
        if low <= high:
            error[last] = rng.choice([low, high])
            return error
        if rng.random() < 0.1:
            return error * min(1.0, balance / abs(error.sum()))


def attained(
    made: Product, alpha: Array, row: int, pulled: tuple[Array, Array], rng: np.random.Generator
) -> float:
    """Return the unprojected part of an extreme run."""
    one, (of_p, of_x) = made.operands, pulled
    e_x = one.reach * rng.choice([-1.0, 1.0], size=one.reach.shape)
    moved = np.stack([admitted(one, h, row, rng) for h in range(len(alpha))])
    p = one.p[:, row] + moved
    factors = p[:, :, None] * alpha[:, None]  # the factor of the values' own errors [heads, T, d]
    factors = np.repeat(factors[::2] + factors[1::2], 2, axis=0)  # equal for each two heads
    e_v = np.stack([e_x @ weight.T for weight in made.weight])
    e_v = e_v + one.own * np.where(factors >= 0, 1.0, -1.0)
    formed = np.einsum("hj,hjd->hd", moved, made.v) + np.einsum("hj,hjd->hd", p, e_v)
    return float((alpha * formed).sum() - (of_p * moved).sum() - (of_x * e_x).sum())


WINDOWS = [(slice(0, 4), slice(0, 3)), (slice(2, 4), slice(1, 3)), (slice(1, 4), slice(0, 2))]


@pytest.mark.sample(1)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("implementation", [prover, checker])
def test_rows_are_within_the_bound_for_any_operands(
    tmp_path: Path, implementation: Callable[..., Product], groups: int
) -> None:
    rng, nearest = np.random.default_rng(8 + groups), []
    for trial in range(24):
        made = implementation(rng, groups, tmp_path)
        for row in range(ROWS):
            shape = (2 * groups, WIDTH)
            some, columns = WINDOWS[trial % 3 if groups == 2 else 0]
            where = slice(some.start, min(some.stop, 2 * groups)), columns
            alpha = np.zeros(shape)
            alpha[where] = (rng.standard_normal(shape) * rng.choice([0, 1, 1], (len(alpha), 1)))[
                where
            ]
            bound, *pulled = made.claim(alpha, row, where)
            functionals = pulled[0], pulled[1]
            most = max(attained(made, alpha, row, functionals, rng) for _ in range(30))
            assert most <= bound * (1 + 2.0**-40) + 2.0**-60
            nearest.append(most / bound if bound else 0.0)
    assert max(nearest) > 1 - 2.0**-20
