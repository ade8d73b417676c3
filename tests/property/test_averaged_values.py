"""Errors of values in a context product are averaged by the probabilities, not summed.

Both implementations, compared with products of extreme probabilities and errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product as pairs
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.affine.adjoint import Adjoint as ProverAdjoint
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine_run import affine_run
from kcdsl_certs.recheck.affine.adjoint import Adjoint, embedded
from kcdsl_certs.recheck.affine_walk import walk
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import Pass, parse
from kcdsl_certs.recheck.interval.tensors import read
from tests.support import proofs
from tests.support.affine_rules import RULES
from tests.support.prover import block, parameters

N = proofs.numerics
KERNELS: dict[str, Any] = {
    "free casts": N("bfloat16", "any"),
    "casts to nearest, fused": N("float32", "nearest", style="fused"),
    "free casts, fused": N("float16", "any", style="fused", scores="float32"),
    "casts toward zero": N("float16", "any_toward_zero"),
}
RULE, SHARED = "context straight from a linear", "context of shared heads"
HEADS, ROWS, WIDTH, INPUTS = 2, 3, 3, 6
Array = np.ndarray
Claim = Callable[[Array, int], tuple[float, Array, Array]]
"""For one functional [heads, d] of a row: the bound of the unprojected part, and the functionals of
the errors of the probabilities [heads, T] and of the inputs [T, D]."""


@dataclass(frozen=True)
class Product:
    """The operands: p̃ and ρ_p [heads, T, T], sum drifts [heads, T], ṽ and |o| [heads, T, d].

    Also W [heads, d, D], ρ_x [T, D]; `shared`: all heads read the same o.
    """

    p: Array
    moved: Array
    balance: Array
    v: Array
    own: Array
    weight: Array
    reach: Array
    claim: Claim
    shared: bool = False


@dataclass(frozen=True)
class Names:
    """The nodes of the product, its operands, the linear behind its values and the input."""

    product: str
    p: str
    v: str
    linear: str
    x: str

    @staticmethod
    def of(graph: Any) -> Names:
        inputs = {node["name"]: node["inputs"] for node in graph.nodes}
        ops = {node["name"]: node["op"] for node in graph.nodes}
        p, v = inputs[graph.output]
        linear = v
        while ops[linear] != "linear":
            (linear,) = inputs[linear]
        return Names(graph.output, p, v, linear, inputs[linear][0])


def written(graph: Any, record: Any, centre: Array, radius: float) -> KernelRun:
    """Return the run of a kernel that does not separate the casts of linears."""
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    x = torch.from_numpy(centre)
    return affine_run(block(graph), parameters(graph, record), x, spread, 2.0**-60)


def prover(graph: Any, record: Any, centre: Array, radius: float, _: Path) -> Product:
    names, run = Names.of(graph), written(graph, record, centre, radius)
    last, p, v, linear, x = (
        run.tape.entries[run.computed[name]]
        for name in (names.product, names.p, names.v, names.linear, names.x)
    )
    assert last.one_row is not None
    assert p.balance is not None
    assert linear.radius is not None
    one_row = last.one_row

    def claim(alpha: Array, row: int) -> tuple[float, Array, Array]:
        values = torch.from_numpy(alpha)[None, :, None, :]
        window = ((0, HEADS), (row, row + 1), (0, WIDTH))
        a = ProverAdjoint(values, window, last.shape)
        low, high = one_row.nonlinear.between(a)
        assert float(low) == -float(high)
        found: Any = dict(one_row.vjp(a))
        of_p = found[run.computed[names.p]].dense().values[0, :, row]
        of_x = found.get(run.computed[names.x])
        still = np.zeros(tuple(x.error_bound.shape))
        if isinstance(of_x, ProverAdjoint):
            still = of_x.dense().values[0].numpy()
        elif of_x is not None:  # sums over rows, which are never formed completely
            still = _carried(p.reference[:, row].numpy(), alpha, heads.numpy())
        return float(high), of_p.numpy(), still

    own = linear.radius.reshape(ROWS, -1, WIDTH).permute(1, 0, 2).expand(HEADS, -1, -1)
    node = next(node for node in run.graph.nodes if node.name == names.linear)
    weight = run.parameters.linear(run.source(node, 1))
    heads = weight.reshape(-1, WIDTH, INPUTS).expand(HEADS, -1, -1)
    return Product(
        p.reference.numpy(),
        p.error_bound.numpy(),
        p.balance[..., 0].numpy(),
        v.reference.numpy(),
        own.numpy(),
        heads.numpy(),
        x.error_bound.numpy(),
        claim,
    )


def _carried(p: Array, alpha: Array, weight: Array) -> Array:
    """Return Σ_h p_hj α_h W_h [T, D]."""
    return np.asarray(np.einsum("hj,hd,hdn->jn", p, alpha, weight))


def checker(graph: Any, record: Any, centre: Array, radius: float, folder: Path) -> Product:
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    proof = parse(proofs.dump(proofs.document(graph, record, record, sha256, centre, radius)))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    made = written(graph, record, centre, radius).passes.to_json()
    hints = {Pass(p["at"], p["of"], p["kind"], p["stop"]): tuple(p["rows"]) for p in made}
    with np.errstate(all="ignore"):
        found = walk(scene, scene.train, hints)
    forms: Any = found.forms
    names = Names.of(graph)
    p, v, x, last = (forms[name] for name in (names.p, names.v, names.x, names.product))
    averaged = found.tape.entries[last.place].averaged
    assert averaged is not None

    def claim(alpha: Array, row: int) -> tuple[float, Array, Array]:
        a = Adjoint(alpha[None, :, None, :], (0, row, 0))
        low, high = averaged.nonlinear.between(a)
        assert float(low[0]) == -float(high[0])
        pulled: Any = {place: pull(a) for place, pull in averaged.operands}
        of_x = pulled[x.place]
        if isinstance(of_x, Adjoint):
            still = embedded(of_x, (0, 0), x.shape).values[0]
        else:  # sums over rows, which nothing forms as a whole
            still = _carried(p.reference[:, row], alpha, weight)
        of_p = embedded(pulled[p.place], a.start, (HEADS, 1, p.shape[-1])).values[0, :, 0]
        return float(high[0]), of_p, still

    own = v.origin.rest.reshape(ROWS, -1, WIDTH).transpose(1, 0, 2)
    weight = v.origin.weight.reshape(-1, WIDTH, INPUTS)
    own, weight = (np.repeat(a, HEADS // len(a), axis=0) for a in (own, weight))
    return Product(
        p.reference,
        p.error_bound,
        p.balance[..., 0],
        v.reference,
        own,
        weight,
        x.error_bound,
        claim,
    )


def extreme(product: Product, head: int, row: int, rng: np.random.Generator) -> Array:
    """Return extreme errors of a row of probabilities with an admitted sum."""
    reach = product.moved[head, row]
    error = reach * rng.choice([-1.0, 1.0], size=reach.size)
    for _ in range(8):  # move the excess to elements with room
        excess = error.sum() - np.clip(
            error.sum(), *(product.balance[head, row] * np.array([-1, 1]))
        )
        room = (reach + error) if excess > 0 else (reach - error)
        if excess == 0 or room.sum() == 0:
            break
        error = error - np.sign(excess) * room * min(1.0, abs(excess) / room.sum())
    return error


def largest(
    product: Product, alpha: Array, row: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Return the unprojected part of an extreme run, and its bound."""
    bound, of_p, of_x = product.claim(alpha, row)
    e_x = product.reach * rng.choice([-1.0, 1.0], size=product.reach.shape)
    total = -(of_x * e_x).sum()
    moved = np.stack([extreme(product, h, row, rng) for h in range(HEADS)])
    p = product.p[:, row] + moved
    factors = p[:, :, None] * alpha[:, None]  # the factor of the values' own errors [heads, T, d]
    if product.shared:
        factors = np.broadcast_to(factors.sum(0), factors.shape)
    own = product.own * np.where(factors >= 0, 1.0, -1.0)
    for h in range(HEADS):
        e_v = e_x @ product.weight[h].T + own[h]
        formed = moved[h] @ product.v[h] + p[h] @ e_v
        total += alpha[h] @ formed - of_p[h] @ moved[h]
    return float(total), bound


@pytest.mark.full
@pytest.mark.parametrize("implementation", [prover, checker])
@pytest.mark.parametrize(
    ("rule", "radius"),
    [(RULE, 0.0), (RULE, 2.0**-9), (RULE, 2.0**-7), (SHARED, 0.0), (SHARED, 2.0**-9)],
)
@pytest.mark.parametrize("name", KERNELS)
def test_rows_are_within_tight_bounds(
    tmp_path: Path, implementation: Callable[..., Product], radius: float, name: str, rule: str
) -> None:
    rng = np.random.default_rng([list(KERNELS).index(name), int(radius * 512)])
    nearest = 0.0
    for _ in range(4):
        graph = RULES[rule](rng)
        centre = np.rint(rng.standard_normal(graph.input_shape) * 2**10) / 2**10
        product = implementation(graph, KERNELS[name], centre, radius, tmp_path)
        product = replace(product, shared=rule == SHARED)
        # values with dominating errors of their own: averaging matters
        for _ in range(60):
            alpha = rng.standard_normal((HEADS, WIDTH)) * rng.choice([0.0, 1.0], size=(HEADS, 1))
            total, bound = largest(product, alpha, int(rng.integers(ROWS)), rng)
            assert total <= bound * (1 + 2.0**-40) + 2.0**-60
            nearest = max(nearest, total / bound if bound else 0.0)
    assert nearest > 0.5


@pytest.mark.parametrize("implementation", [prover, checker])
@pytest.mark.parametrize("radius", [0.0, 2.0**-9])
def test_rows_share_only_parts_of_equal_functionals(
    tmp_path: Path, implementation: Callable[..., Product], radius: float
) -> None:
    rng, record = np.random.default_rng(8), next(iter(KERNELS.values()))
    graph = RULES[RULE](rng)
    centre = np.rint(rng.standard_normal(graph.input_shape) * 2**10) / 2**10
    one = rng.standard_normal((HEADS, WIDTH))
    other = one.copy()
    other[0, 0] += 2.0**-30
    product = implementation(graph, record, centre, radius, tmp_path)
    for alpha, row in ((one, 1), (one, 2), (other, 2), (one, 2), (-one, 1), (other, 1), (one, 1)):
        fresh = implementation(graph, record, centre, radius, tmp_path).claim(alpha, row)
        for mine, expected in zip(product.claim(alpha, row), fresh, strict=True):
            np.testing.assert_array_equal(mine, expected)


@pytest.mark.full
@pytest.mark.parametrize("missing", ["balance", "below", "around"])
def test_every_part_of_the_bound_is_needed(tmp_path: Path, missing: str) -> None:
    """The extreme runs above exceed a bound without any one of its parts."""
    rng = np.random.default_rng(3)
    exceeded = 0
    for _ in range(2000):
        reach = rng.uniform(0, 1, ROWS) * (2.0 if missing == "below" else 0.5)
        p = rng.dirichlet(np.ones(ROWS))
        own, balance = rng.uniform(0.5, 1, ROWS), 0.3 * rng.uniform()
        if missing != "below":
            reach = np.minimum(reach, p)
        one = Product(
            p[None, None],
            reach[None, None],
            np.array([[balance]]),
            v=np.zeros(0),
            own=np.zeros(0),
            weight=np.zeros(0),
            reach=np.zeros(0),
            claim=_never,
        )
        error = extreme(one, 0, 0, rng)
        if abs(error.sum()) > balance + 2.0**-40:
            continue
        m = float(np.median(own))
        parts = {
            "balance": m * balance,
            "below": own @ (2 * np.maximum(reach - p, 0)),
            "around": np.abs(own - m) @ reach,
        }
        largest = np.abs(p + error) @ own
        assert largest <= p @ own + sum(parts.values()) + 2.0**-40
        exceeded += largest > p @ own + sum(v for k, v in parts.items() if k != missing) + 2.0**-40
    assert exceeded > 0


def _never(alpha: Array, row: int) -> tuple[float, Array, Array]:
    raise AssertionError


@pytest.mark.full
def test_alternative_bound_is_never_wider(tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    gained = 0.0
    for record, rule in pairs(KERNELS.values(), [RULE, SHARED]):
        graph = RULES[rule](rng)
        centre = np.rint(rng.standard_normal(graph.input_shape) * 2**10) / 2**10
        run = written(graph, record, centre, 0.0)
        place = run.computed[graph.output]
        entry = run.tape.entries[place]
        for row in range(ROWS):
            values = torch.from_numpy(rng.standard_normal((16, HEADS, 1, WIDTH)))
            a = ProverAdjoint(values, ((0, HEADS), (row, row + 1), (0, WIDTH)), entry.shape)
            run.tape.entries[place] = entry
            near = run.tape.bound(place, a).magnitude(run.tape.radius)
            run.tape.entries[place] = replace(entry, one_row=None)
            wide = run.tape.bound(place, a).magnitude(run.tape.radius)
            assert bool((near <= wide * (1 + 2.0**-12)).all())
            gained = max(gained, float((wide / near).max()))
    assert gained > 1.001


@pytest.mark.parametrize("name", KERNELS)
def test_drifts_of_row_sums_agree(tmp_path: Path, name: str) -> None:
    """Roundings of probabilities are most of them: without these, the rest is of float64."""
    rng = np.random.default_rng(6)
    graph = RULES[RULE](rng)
    centre = np.rint(rng.standard_normal(graph.input_shape) * 2**10) / 2**10
    both = [made(graph, KERNELS[name], centre, 2.0**-9, tmp_path) for made in (prover, checker)]
    np.testing.assert_allclose(both[1].balance, both[0].balance, rtol=2.0**-6)
    assert (both[1].balance > 2.0**-40).all()


def test_functionals_of_some_heads_are_bounded_as_in_all(tmp_path: Path) -> None:
    """Heads 2 and 3 have the same scores and values, so that own errors of values cancel."""
    rng, graph = np.random.default_rng(7), proofs.Graph((ROWS, INPUTS))
    x = graph.add("input", [], (ROWS, INPUTS))
    parts = list[str]()
    for count in (4, 4, 2):
        weight = rng.standard_normal((count * WIDTH, INPUTS)) / 2
        weight[3 * WIDTH :] = weight[2 * WIDTH : 3 * WIDTH]
        part = graph.add(
            "linear", [x, graph.param(f"w{len(parts)}", weight)], (ROWS, count * WIDTH)
        )
        parts.append(graph.permute(graph.reshape(part, (ROWS, count, WIDTH)), [1, 0, 2]))
    values = graph.expand(graph.reshape(parts[2], (2, 1, ROWS, WIDTH)), (2, 2, ROWS, WIDTH))
    values = graph.reshape(values, (4, ROWS, WIDTH))
    key, square = graph.permute(parts[1], [0, 2, 1]), (4, ROWS, ROWS)
    scores = graph.add("matmul", [parts[0], key], square, role="scores")
    shares = graph.add("softmax", [scores], square, role="probabilities")
    last = graph.add("matmul", [shares, values], (4, ROWS, WIDTH), role="context")
    sha256 = proofs.write_safetensors(tmp_path / "model.safetensors", graph.tensors)
    record, centre = KERNELS["free casts"], rng.standard_normal((ROWS, INPUTS))
    proof = parse(proofs.dump(proofs.document(graph, record, record, sha256, centre, 0.0)))
    scene = Derivation(proof, read(tmp_path / "model.safetensors").tensors).problem(proof.cases[0])
    made = written(graph, record, centre, 0.0).passes.to_json()
    hints = {Pass(p["at"], p["of"], p["kind"], p["stop"]): tuple(p["rows"]) for p in made}
    with np.errstate(all="ignore"):
        found = walk(scene, scene.train, hints)
    forms: Any = found.forms
    place = forms[last].place
    assert found.tape.entries[place].averaged is not None
    alpha = rng.standard_normal((1, 1, 1, WIDTH)) * np.array([1.0, -1.0])[:, None, None]
    whole = np.concatenate([np.zeros_like(alpha), alpha], axis=1)
    some, all_heads = (
        found.tape.bound(place, Adjoint(values, (start, 1, 0))).radius
        for values, start in ((alpha, 2), (whole, 0))
    )
    np.testing.assert_allclose(some, all_heads, rtol=2.0**-16)  # float32 products
