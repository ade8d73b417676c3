"""Functionals of one attention row, passed through values and keys at once.

Both programs agree with a pass through every entry, and no admitted additions exceed the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.affine import ellipsoids as prover
from kcdsl_backends.drift.affine.adjoint import Adjoint as ProverAdjoint
from kcdsl_backends.drift.affine_run import affine_run
from kcdsl_certs.recheck.affine import ellipsoids as checker
from kcdsl_certs.recheck.affine.adjoint import Adjoint, embedded
from kcdsl_certs.recheck.affine.form import Form
from kcdsl_certs.recheck.affine_walk import walk
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.tensors import read
from tests.support import proofs
from tests.support.prover import block, parameters

Floats = np.ndarray
ROWS, HEADS, SIZE, ROW = 5, 2, 4, 3
RECORD = proofs.numerics("bfloat16", "any", style="fused")
ROLES = ("context", "scores")


@dataclass(frozen=True)
class Added:
    """The additions of an entry: up to `radius`, and a rest up to `caps` with row sums `sums`."""

    shape: tuple[int, ...]
    radius: Floats | None
    caps: Floats | None
    sums: Floats | None


@dataclass(frozen=True)
class Entry:
    """An entry of the pass: its functionals [B, *shape], and its possible additions."""

    functionals: Floats
    added: Added


@dataclass(frozen=True)
class Met:
    """The bounds of a program, and the entries that it passes.

    `ends` are functionals of the entries from which a pass continues, in both directions.
    """

    around: Floats
    each: Floats
    entries: list[Entry]
    ends: list[tuple[Floats, Floats]]
    stopped: bool


def _graph(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return proofs.attention(rng, rows=ROWS, heads=HEADS, kv_heads=HEADS, size=SIZE)


def _named(graph: Any, role: str) -> str:
    return next(str(node["name"]) for node in graph.nodes if node["role"] == role)


def _centre(graph: Any, seed: int) -> Floats:
    rng = np.random.default_rng(100 + seed)
    return np.asarray(np.rint(rng.standard_normal(graph.input_shape) * 2**10) / 2**10)


def _functionals(shape: tuple[int, ...], seed: int) -> Floats:
    """Return more functionals of one row [B, heads, 1, n] than it has elements."""
    rng = np.random.default_rng(200 + seed)
    values = rng.standard_normal((2 * shape[0] * shape[2], shape[0], 1, shape[2]))
    values[0, 1:] = 0.0
    return np.asarray(values)


def _down(
    top: int, start: Any, ends: Sequence[int], pull: Callable[[int, Any], Iterator[tuple[int, Any]]]
) -> dict[int, list[Any]]:
    """Return the functionals of every entry down to the ends, as parts to be added."""
    found: dict[int, list[Any]] = {top: [start]}
    for place in range(top, -1, -1):
        for part in found.get(place, []) if place not in ends else []:
            for operand, below in pull(place, part):
                found.setdefault(operand, []).append(below)
    return found


def _sum(parts: Iterable[Floats]) -> Floats:
    return np.asarray(np.sum(np.stack(list(parts)), axis=0))


def _of_prover(_: Path, role: str, seed: int) -> Met:
    graph = _graph(seed)
    centre, spread = torch.from_numpy(_centre(graph, seed)), torch.zeros(1, 1, dtype=torch.float64)
    run = affine_run(block(graph), parameters(graph, RECORD), centre, spread, 0.0)
    entries, top = run.tape.entries, run.computed[_named(graph, role)]
    shape = entries[top].shape
    values = torch.from_numpy(_functionals(shape, seed))
    start = ProverAdjoint(values, ((0, shape[0]), (ROW, ROW + 1), (0, shape[2])), shape)
    gather = entries[top].gathered
    assert gather is not None
    found = gather(start, 0)
    assert found is not None
    places = [place for place, _ in found.adjoints]
    met = _down(top, start, places, lambda place, part: iter(entries[place].vjp(part)))
    passed = []
    for place, parts in met.items():
        if place == top or place in places:
            continue
        entry = entries[place]
        assert entry.centre is None
        assert entry.nonlinear is None
        split = entry.apart
        radius = entry.radius if split is None else split.radius
        added = Added(
            entry.shape,
            None if radius is None else radius.numpy(),
            None if split is None else split.caps.numpy(),
            None if split is None else split.total.numpy(),
        )
        passed.append(Entry(_sum(part.dense().values.numpy() for part in parts), added))
    ends = [
        (adjoint.dense().values.numpy(), _sum(p.dense().values.numpy() for p in met[place]))
        for place, adjoint in found.adjoints
    ]
    stopped = gather(start, max(met.keys() - {top}) - 1) is None
    around = prover.around_sum(found.parts).numpy()
    return Met(around, found.single.numpy(), passed, ends, stopped)


def _of_checker(folder: Path, role: str, seed: int) -> Met:
    graph = _graph(seed)
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    document = proofs.document(graph, RECORD, RECORD, sha256, _centre(graph, seed), 0.0)
    proof = parse(proofs.dump(document))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    with np.errstate(all="ignore"):
        found_walk = walk(scene, scene.train, None)
    form, entries = found_walk.forms[_named(graph, role)], found_walk.tape.entries
    assert isinstance(form, Form)
    assert form.place is not None
    top, start = form.place, Adjoint(_functionals(form.shape, seed), (0, ROW, 0))
    gather = entries[top].gather
    assert gather is not None
    found = gather(start, 0)
    assert found is not None
    places = [place for place, _ in found.passed]

    def pull(place: int, part: Adjoint) -> Iterator[tuple[int, Adjoint]]:
        for operand, back in entries[place].operands:
            below = back(part)
            if below is not None:
                yield operand, below

    def dense(place: int, part: Adjoint) -> Floats:
        shape = entries[place].error_bound.shape
        return embedded(part, (0,) * len(shape), shape).values

    met = _down(top, start, places, pull)
    passed = []
    for place, parts in met.items():
        if place == top or place in places:
            continue
        entry = entries[place]
        assert entry.centre is None
        assert not entry.nonlinear
        apart, radius = entry.apart, entry.radius
        added = Added(
            entry.error_bound.shape,
            radius if apart is None else apart.radius,
            None if apart is None else apart.caps,
            None if apart is None else apart.sums,
        )
        passed.append(Entry(_sum(dense(place, part) for part in parts), added))
    ends = [
        (dense(place, adjoint), _sum(dense(place, part) for part in met[place]))
        for place, adjoint in found.passed
    ]
    stopped = gather(start, max(met.keys() - {top}) - 1) is None
    return Met(checker.around_sum(found.parts), found.each, passed, ends, stopped)


PROGRAMS = {"prover": _of_prover, "checker": _of_checker}


def _most(entry: Entry, which: int) -> Floats:
    """Return the additions of an entry that maximise a functional."""
    alpha, added = entry.functionals[which], entry.added
    found = np.zeros(added.shape)
    if added.radius is not None:
        found += np.sign(alpha) * added.radius
    if added.caps is not None and added.sums is not None:
        order = np.argsort(-np.abs(alpha), axis=-1)
        caps = np.take_along_axis(np.broadcast_to(added.caps, added.shape), order, axis=-1)
        before = np.cumsum(caps, axis=-1) - caps
        taken, rest = np.clip(added.sums - before, 0.0, caps), np.zeros(added.shape)
        np.put_along_axis(rest, order, taken, axis=-1)
        found += np.sign(alpha) * rest
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_additions_of_entries_are_within_the_bound(
    tmp_path: Path, program: str, role: str, seed: int
) -> None:
    met = PROGRAMS[program](tmp_path, role, seed)
    assert any(entry.added.caps is not None for entry in met.entries)  # a rest with row sums
    for one, two in met.ends:
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-12 * np.abs(two).max())
    rng, count = np.random.default_rng(seed), len(met.each)
    nearest = 0.0
    for which in range(count):
        error = np.zeros(count)
        for entry in met.entries:
            error += entry.functionals.reshape(count, -1) @ _most(entry, which).reshape(-1)
        assert abs(error[which]) <= met.each[which]
        nearest = max(nearest, error[which] / met.each[which])
        for signs in (np.ones(count), rng.choice([-1.0, 1.0], count)):
            slack = 2.0**-20 * np.trace(met.around) * np.eye(count)
            mixed = signs * error
            along = float(mixed @ error) ** 2
            assert along <= float(mixed @ (met.around + slack) @ mixed)
    assert nearest > 0.6  # and no bound is far above the attained additions
    assert met.stopped


@pytest.mark.parametrize("role", ROLES)
def test_both_programs_agree_on_row_images(tmp_path: Path, role: str) -> None:
    one, two = (program(tmp_path, role, 1) for program in PROGRAMS.values())
    np.testing.assert_allclose(two.each, one.each, rtol=2.0**-8)
    np.testing.assert_allclose(two.around, one.around, atol=2.0**-8 * np.trace(one.around))
