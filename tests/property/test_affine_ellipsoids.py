"""Ellipsoids around errors: runs inside, functionals below, both programs agree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear

from kcdsl_backends.drift.affine import ellipsoids as prover
from kcdsl_backends.drift.affine import tape
from kcdsl_backends.drift.affine.adjoint import Adjoint as ProverAdjoint
from kcdsl_backends.drift.affine_run import affine_run
from kcdsl_certs.recheck.affine import ellipsoids as checker
from kcdsl_certs.recheck.affine import remainders
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.form import Form, Walk
from kcdsl_certs.recheck.affine_walk import walk
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.tensors import read
from tests.support import kernels, proofs
from tests.support.mutation.bases import Base, proof_of
from tests.support.mutation.blocks import decoder, encoder
from tests.support.prover import block, parameters

Floats = np.ndarray
N = proofs.numerics
KERNELS = {
    "float32": N("float32", "any"),
    "bfloat16 fused": N("bfloat16", "any", style="fused"),
    "float16 nearest": N("float16", "nearest", accumulate="float32"),
    "fp8 weights": N("float32", "any", weights=("fp8_e4m3", "per_channel")),
}
MODES = ("random", "signs", "up", "down")
RADII = (0.0, 2.0**-10)


def two_layers(rng: np.random.Generator) -> Any:
    """Return two layers with norms after their residuals, so that ellipsoids are propagated."""
    first, second = encoder(rng), encoder(rng)
    shapes = {node["name"]: tuple(node["shape"]) for node in second.nodes}
    names = {}
    for node in second.nodes:
        if node["op"] == "input":
            names[node["name"]] = first.output
            continue
        inputs = [names[name] for name in node["inputs"]]
        attrs = {k: v for k, v in node["attrs"].items() if k != "key"}
        if node["op"] == "param":
            key = node["attrs"]["key"]
            names[node["name"]] = first.param(f"second.{key}", second.tensors[key])
            continue
        more = {"role": node["role"]} if node["role"] else {}
        shape = shapes[node["name"]]
        names[node["name"]] = first.add(node["op"], inputs, shape, **more, **attrs)
    return first


def normed(rng: np.random.Generator) -> Any:
    """Return an attention with its residual, and the norm of the next block."""
    return followed(decoder(rng), rng)


def followed(graph: Any, rng: np.random.Generator) -> Any:
    """Append the norm of the next block."""
    last, shape = graph.output, tuple(graph.nodes[-1]["shape"])
    weight = graph.param("next.weight", 1 + 0.1 * rng.standard_normal(shape[-1]))
    graph.add("rms_norm", [last, weight], shape, eps=1e-5)
    return graph


def rotated(rng: np.random.Generator) -> Any:
    """Return such an attention in which every head has its own keys and values."""
    return followed(proofs.attention(rng, rows=3, heads=2, kv_heads=2, size=2), rng)


GRAPHS = {
    "decoder": normed,
    "encoder": encoder,
    "two layers": two_layers,
    "own keys": rotated,
}


def walked(
    folder: Path, graph: Any, record: Any, centre: Floats, radius: float, passes: Any = None
) -> Walk:
    """Return the walk of a kernel with the named reverse passes, by default with all."""
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    document = proofs.document(graph, record, record, sha256, centre, radius)
    if passes is not None:
        both = {"train": passes, "infer": passes}
        document["cases"][0].update(domain="affine", passes=both)
    proof = parse(proofs.dump(document))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    with np.errstate(all="ignore"):
        hints = proof.cases[0].passes
        return walk(scene, scene.train, None if hints is None else hints[0])


def surrounded(found: Walk) -> dict[str, Mapping[tuple[int, ...], Floats]]:
    """Return the ellipsoids of the checker, by node."""
    forms = ((n, f) for n, f in found.forms.items() if isinstance(f, Form) and f.place)
    every = ((name, found.tape.entries[form.place or 0].ellipsoids) for name, form in forms)
    return {name: rows for name, rows in every if rows}


def beyond(error: Floats, shape: Floats) -> float:
    """Return eᵀ P⁻¹ e: at most 1 if and only if no functional of e exceeds its bound."""
    scale = float(np.trace(shape))
    if scale == 0:
        return np.inf if error.any() else 0.0
    return float(error @ np.linalg.solve(shape / scale, error)) / scale


def beyond_readings(error: Floats, shape: Floats, own: Floats | None) -> float:
    """Return the minimum of (e - δ)ᵀ P⁻¹ (e - δ) over |δ| ≤ own.

    A reading of a node is in the sum of the ellipsoid of the common error and the box of its own
    roundings.
    """
    scale = float(np.trace(shape))
    if own is None or not own.any() or scale == 0:
        return beyond(error, shape)
    root = np.linalg.inv(np.linalg.cholesky(shape / scale))
    nearest = lsq_linear(root, root @ error, (-own - 1e-300, own + 1e-300), method="bvls")
    return 2.0 * float(nearest.cost) / scale


@pytest.mark.sample(1)
@pytest.mark.parametrize("radius", RADII)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("kind", GRAPHS)
def test_runs_are_within_the_ellipsoids_of_both_programs(
    tmp_path: Path, kind: str, name: str, radius: float
) -> None:
    which = [list(GRAPHS).index(kind), list(KERNELS).index(name), RADII.index(radius)]
    rng = np.random.default_rng(which)
    graph, record = GRAPHS[kind](rng), KERNELS[name]
    centre = np.rint(rng.standard_normal(graph.input_shape) * 2**14) / 2**14
    found = walked(tmp_path, graph, record, centre, radius)
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    sides = block(graph), parameters(graph, record)
    run = affine_run(*sides, torch.from_numpy(centre), spread, 0.0)
    known = surrounded(found)
    assert known
    plain, linear = found.problem.parameters.plain, found.problem.parameters.linear
    farthest = 0.0
    for trial in range(24):
        x = centre + radius * rng.choice([-1.0, 1.0], centre.shape)
        rounded = kernels.Run(record, rng, MODES[trial % 4])
        values = kernels.simulate(
            graph,
            rounded,
            x,
            lambda key: plain(key, found.kernel),
            lambda key: linear(key, found.kernel),
        )
        for node, rows in known.items():
            form = found.forms[node]
            entry = run.tape.entries[run.computed[node]]
            assert isinstance(form, Form)
            assert set(entry.ellipsoids) <= set(rows)  # rows without errors need none
            version, private = found.versions.get(node), run.private.get(node)
            theirs = None if private is None else private.error_bound.numpy()
            both = (
                (form.reference, rows, None if version is None else version.own),
                (
                    *(entry.reference.numpy(), {r: p.numpy() for r, p in entry.ellipsoids.items()}),
                    theirs,
                ),
            )
            for reference, shapes, own in both:
                for row, shape in shapes.items():
                    alone = None if own is None else own[row]
                    ratio = beyond_readings(values[node][row] - reference[row], shape, alone)
                    assert ratio <= 1 + 2.0**-20, (node, row)
                    farthest = max(farthest, ratio)
    assert farthest > 2.0**-12  # the ellipsoids have the size of the errors


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", GRAPHS)
def test_both_programs_agree_on_ellipsoids(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(list(GRAPHS).index(kind))
    graph, record = GRAPHS[kind](rng), KERNELS["float32"]
    centre = np.rint(rng.standard_normal(graph.input_shape) * 2**14) / 2**14
    spread = torch.full((1, 1), 2.0**-12, dtype=torch.float64)
    sides = block(graph), parameters(graph, record)
    run = affine_run(*sides, torch.from_numpy(centre), spread, 0.0)
    passes = run.passes.to_json()  # bounds of other passes lower the sizes of later roundings
    known = surrounded(walked(tmp_path, graph, record, centre, 2.0**-12, passes))
    assert known
    for node, rows in known.items():
        entry = run.tape.entries[run.computed[node]]
        assert set(entry.ellipsoids) == set(rows)
        for row, shape in rows.items():
            other = entry.ellipsoids[row].numpy()
            np.testing.assert_allclose(shape, other, rtol=0, atol=2.0**-10 * np.trace(other))


def positive(rng: np.random.Generator, n: int) -> Floats:
    """Return a random P, long in some directions and short in others."""
    axes = rng.standard_normal((n, n)) * np.exp2(-rng.uniform(0, 20, n))
    return axes @ axes.T


def members(rng: np.random.Generator, shape: Floats, count: int) -> Floats:
    """Return points [count, n] on the surface of an ellipsoid."""
    values, vectors = np.linalg.eigh(shape)
    on = rng.standard_normal((count, len(shape)))
    on /= np.linalg.norm(on, axis=-1, keepdims=True)
    return np.asarray(on @ (vectors * np.sqrt(np.maximum(values, 0.0))).T)


@pytest.mark.parametrize("seed", range(6))
def test_sums_images_and_lengths_contain_their_members(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 9))
    shapes = [positive(rng, n) * 4.0 ** rng.integers(-6, 6) for _ in range(4)]
    shapes[-1] = np.zeros((n, n))
    total = np.sum([members(rng, shape, 400) for shape in shapes], axis=0)
    vector, rest = 2.0 * rng.standard_normal(n), 0.5
    total += rng.choice([-1.0, 1.0], (400, 1)) * vector
    total += rest * members(rng, np.eye(n), 400)
    lines = [(vector, 1.0, 0.0), (vector, 0.0, rest**2)]
    matrix = rng.standard_normal((int(rng.integers(1, 2 * n)), n))
    tensors = [torch.from_numpy(shape) for shape in shapes]
    theirs = checker.image_with_bounds(shapes[0], matrix)
    image, extents = prover.image(tensors[0], torch.from_numpy(matrix))
    both = (
        (
            checker.around_sum([*shapes, *(checker.RankOne(*line) for line in lines)]),
            theirs[0],
            theirs[1],
            checker.norm_on_ellipsoid(shapes[0], matrix),
            checker.bound_on_ellipsoid(shapes[0], matrix),
        ),
        (
            prover.around_sum(
                [*tensors, *(prover.RankOne(torch.from_numpy(v), *more) for v, *more in lines)]
            ).numpy(),
            image.numpy(),
            extents.numpy(),
            prover.norm_on_ellipsoid(tensors[0], torch.from_numpy(matrix)),
            prover.bound_on_ellipsoid(tensors[0], torch.from_numpy(matrix)).numpy(),
        ),
    )
    for around, moved_shape, sizes, longest, along in both:
        np.testing.assert_allclose(sizes, along, rtol=1e-9, atol=1e-9 * np.abs(matrix).max())
        for point in total:
            assert beyond(point, around) <= 1 + 2.0**-20
        moved = members(rng, shapes[0], 400) @ matrix.T
        assert float(np.linalg.norm(moved, axis=-1).max()) <= longest
        assert (np.abs(moved).max(axis=0) <= along).all()
        exact = np.sqrt(np.einsum("bi,ij,bj->b", matrix, shapes[0], matrix))
        assert (along >= exact).all()
        assert (along <= exact * (1 + 2.0**-20) + 2.0**-20 * np.abs(matrix).max()).all()
        assert float(np.linalg.eigvalsh(moved_shape - matrix @ shapes[0] @ matrix.T)[0]) >= -(
            2.0**-40
        )
        singular = np.linalg.norm(matrix @ np.linalg.cholesky(shapes[0] + 1e-14 * np.eye(n)), 2)
        assert longest >= singular * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_sums_of_images_contain_their_members(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, count = int(rng.integers(2, 9)), int(rng.integers(1, 16))
    matrix, other = rng.standard_normal((count, n)), rng.standard_normal((count, 3))
    if seed % 3 == 0:
        matrix = np.diag(rng.standard_normal(n))
        other, count = other[:1].repeat(n, axis=0), n
    sizes, shapes = np.exp2(-rng.uniform(0, 20, n)), [positive(rng, n), positive(rng, 3)]
    plain = positive(rng, count)
    parts = [(matrix, shapes[0]), (matrix, sizes), (other, shapes[1])]
    total = members(rng, plain, 400)
    for functionals, shape in parts:
        whole = np.diag(shape) if shape.ndim == 1 else shape
        total = total + members(rng, whole, 400) @ functionals.T
    theirs = [checker.EllipsoidImage.of(*part) for part in parts]
    first = torch.from_numpy(matrix)
    maps = first, first.view(matrix.shape), torch.from_numpy(other)
    ours = [
        prover.ImageEllipsoid.of(one, torch.from_numpy(shape))
        for one, (_, shape) in zip(maps, parts, strict=True)
    ]
    by_checker = [np.asarray(part) for part in checker.multiplied([plain, *theirs])]
    by_prover = [np.asarray(part) for part in prover.joined([torch.from_numpy(plain), *ours])]
    for around, each in (
        (checker.around_sum([plain, *theirs]), by_checker),
        (prover.around_sum([torch.from_numpy(plain), *ours]).numpy(), by_prover),
    ):
        assert len(each) == 3  # two with equal functionals are one
        longest = sum(float(np.linalg.eigvalsh(part)[-1]) ** 0.5 for part in each)
        for point in total:
            assert beyond(point, around) <= 1 + 2.0**-20
            assert float(np.linalg.norm(point)) <= longest
    for (functionals, shape), one, two in zip(parts, theirs, ours, strict=True):
        whole = np.diag(shape) if shape.ndim == 1 else shape
        exact = np.diagonal(functionals @ whole @ functionals.T)
        for extents in (one.extents, two.sizes.numpy()):
            assert (extents**2 >= exact).all()
            assert (extents**2 <= exact * (1 + 2.0**-20) + 2.0**-40).all()


@pytest.mark.parametrize("seed", range(6))
def test_remainders_with_bounded_sums_are_in_their_ellipsoids(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, n, count = int(rng.integers(1, 4)), int(rng.integers(2, 9)), int(rng.integers(1, 12))
    low, high = -rng.uniform(0.1, 1, (rows, n)), rng.uniform(0.1, 1, (rows, n))
    caps = np.maximum(-low, high)
    sums = caps.max(axis=-1, keepdims=True) * rng.uniform(1, 2, (rows, 1))
    if seed == 3:
        sums[0] = np.inf  # no bound of the sum except the caps
    values = rng.standard_normal((count, rows, n))
    if seed == 5:  # functionals of one element each
        count = rows * n
        values = np.diag(rng.standard_normal(count)).reshape(count, rows, n)
    if seed == 4 and rows > 1:
        values[:, 0] = 0.0  # a window may contain unused rows
    theirs = remainders.Remainder(low, high, sums).nonlinear.around
    tensors = torch.from_numpy(low), torch.from_numpy(high), torch.from_numpy(sums)
    ours = tape.Remainder(*tensors).nonlinear().around
    assert theirs is not None
    assert ours is not None
    (one,) = theirs(Adjoint(values, (0, 0)))
    (two,) = ours(ProverAdjoint.full(torch.from_numpy(values)))
    flat = values.reshape(count, -1)
    around = checker.around_sum([one]), prover.around_sum([two]).numpy()
    np.testing.assert_allclose(*around, rtol=1e-6, atol=1e-6 * np.trace(around[1]))
    farthest = 0.0
    for _ in range(200):
        inside = rng.choice([-1.0, 1.0], (rows, n)) * caps * (rng.uniform(size=(rows, n)) < 0.4)
        size = np.abs(inside).sum(axis=-1, keepdims=True)
        inside *= np.minimum(1.0, sums / np.maximum(size, 1e-9))
        inside = np.clip(inside, low, high)
        point = flat @ inside.reshape(-1)
        for shape in around:
            farthest = max(farthest, ratio := beyond(point, shape))
            assert ratio <= 1 + 2.0**-20
    assert farthest > 0.1
    alone = np.zeros((1, rows, n))
    alone[0, -1, -1] = 1.0  # one element as large as its cap and the sum: attained
    single = np.zeros((rows, n))
    single[-1, -1] = 0.5
    exact = remainders.Remainder(-single, single, single[:, -1:]).nonlinear.around
    assert exact is not None
    around_one = checker.around_sum(exact(Adjoint(alone, (0, 0))))
    assert float(np.trace(around_one)) == pytest.approx(0.25, rel=1e-6)


def test_non_finite_ellipsoids_bound_nothing() -> None:
    shape = np.array([[np.inf, 0.0], [0.0, 1.0]])
    for broken in (shape, shape * np.nan):
        functionals = np.eye(2)
        tensors = torch.from_numpy(broken), torch.from_numpy(functionals)
        with np.errstate(all="ignore"):
            assert not np.isfinite(checker.bound_on_ellipsoid(broken, functionals)[0])
        assert not bool(torch.isfinite(prover.bound_on_ellipsoid(*tensors)[0]))
        many = np.ones((3, 2))
        with np.errstate(all="ignore"):
            assert not np.isfinite(checker.norm_on_ellipsoid(broken, many))
        assert not np.isfinite(prover.norm_on_ellipsoid(tensors[0], torch.from_numpy(many)))


def test_rows_without_an_ellipsoid_keep_their_error_bound() -> None:
    rng = np.random.default_rng(5)
    shape, reach = positive(rng, 3), np.abs(rng.standard_normal((2, 3))) + 100.0
    values = rng.standard_normal((4, 2, 3))
    mine = checker.reached({(0,): shape}, reach, Adjoint(values, (0, 0)))
    tensors = torch.from_numpy(reach), ProverAdjoint.full(torch.from_numpy(values))
    theirs = prover.reached({(0,): torch.from_numpy(shape)}, *tensors).numpy()
    expected = np.sqrt(np.einsum("bi,ij,bj->b", values[:, 0], shape, values[:, 0]))
    expected = expected + np.abs(values[:, 1]) @ reach[1]
    for found in (mine, theirs):
        assert (found >= expected).all()
        np.testing.assert_allclose(found, expected, rtol=2.0**-20)


def norms_without_bias(rng: np.random.Generator) -> Any:
    """Return linears and norms without bias, which are linear in inputs far below the eps."""
    graph = proofs.Graph((2, 6))
    x = graph.add("input", [], (2, 6))
    for name in "abc":
        gain = graph.param(f"{name}.gain", np.ones(6))
        y = graph.add("rms_norm", [x, gain], (2, 6), eps=1e-2)
        weight = graph.param(f"{name}.weight", rng.standard_normal((6, 6)) / 2)
        x = graph.add("add", [x, graph.add("linear", [y, weight], (2, 6))], (2, 6))
    return graph


def test_squares_below_float64_do_not_narrow_a_bound(tmp_path: Path) -> None:
    """From 2^-500 on, squares of errors underflow; relative to the inputs no bound gets smaller."""
    one, two = (
        N("float64", "nearest", accumulate="float64"),
        N("float64", "any", accumulate="float64"),
    )
    graph = norms_without_bias(np.random.default_rng(3))
    point = torch.zeros(2, 6, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    asked = affine_run(block(graph), parameters(graph, two), *point, 2.0**-24)
    assert any(entry.ellipsoids for entry in asked.tape.entries)
    claims = []
    for exponent in (-200, -480, -500, -520, -560, -700):
        size = 2.0**exponent
        base = Base(norms_without_bias, "affine", "inf", "points", one, two, spread=size)
        document, _, _ = proof_of(base, 3, tmp_path)
        case = document["cases"][0]
        claims.append(float.fromhex(case["claim"]) / size)
    assert min(claims) >= claims[0] * (1 - 1e-9) > 0


@pytest.mark.full
def test_no_ellipsoids_beyond_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    graph, record = two_layers(rng), KERNELS["float32"]
    centre = torch.from_numpy(rng.standard_normal(graph.input_shape))
    spread = torch.full((1, 1), 2.0**-12, dtype=torch.float64)
    sides = block(graph), parameters(graph, record)
    with_them = affine_run(*sides, centre, spread, 2.0**-24)
    monkeypatch.setattr("kcdsl_backends.drift.ops.norms.affine.LARGEST", 0)
    without = affine_run(*sides, centre, spread, 2.0**-24)
    assert any(entry.ellipsoids for entry in with_them.tape.entries)
    assert not any(entry.ellipsoids for entry in without.tape.entries)
    assert not any(kind == "ellipsoid" for _, _, kind, _ in without.passes.rows)
    assert all(bool(torch.isfinite(entry.error_bound).all()) for entry in without.tape.entries)
