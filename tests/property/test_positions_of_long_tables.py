"""Any length with position tables longer than one chunk: every position counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.boxes import Box as ProverBox
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.ops import attention as prover_rules
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.box import Box
from kcdsl_certs.recheck.interval.state import DriftProblem, numeric
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.interval_walk import propagate
from kcdsl_certs.recheck.ops.attention import context as checker_rules
from tests.support import kernels, proofs, sequences
from tests.support.prover import numerics

N = proofs.numerics
LONGEST, WIDTH = 1300, 4
PAIR = (N("float64", "any", accumulate="float64"), N("bfloat16", "any"))
PLACES = (0, 255, 256, 511, 512, 700, 1023, 1024, 1299)
"""Positions in the chunk that either program reads: the first, one inside and the last."""


def turned(rows: int, place: int) -> Any:
    """Return a zero rotation except at one position, where all numbers grow."""
    g = proofs.Graph((rows, WIDTH))
    x = g.add("input", [], (rows, WIDTH))
    cos, sin = np.ones((LONGEST, WIDTH), np.float32), np.zeros((LONGEST, WIDTH), np.float32)
    cos[place], sin[place] = 3.0117, -2.0171
    c, s = g.constant("cos", cos[:rows]), g.constant("sin", sin[:rows])
    g.add("rope", [x, c, s], (rows, WIDTH))
    return g


@pytest.mark.parametrize("place", PLACES)
def test_every_position_is_covered(place: int, tmp_path: Path) -> None:
    short, long = turned(2, place), turned(LONGEST, place)
    tables = sequences.tables_of(short, long)
    centre = np.array([[1.1015625, -0.7001953125, 0.300048828125, 2.4951171875]])
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, {})
    document = sequences.document(short, tables, PAIR, sha256, centre, 0.0, LONGEST)
    proof = parse(proofs.dump(document))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    with np.errstate(all="ignore"):
        state = numeric({n.name: v for n, v in propagate(scene)}[short.output])
    problem = sequences.problem(short, tables, PAIR, LONGEST)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    bounds = problem.bound(torch.from_numpy(centre), zero).output
    checked = (state.t, state.i, state.d)
    proved = tuple(Box(b.lo.numpy(), b.hi.numpy()) for b in _boxes(bounds))

    x = np.repeat(centre, LONGEST, 0)
    for modes in (("up", "up"), ("up", "down"), ("down", "up"), ("signs", "signs")):
        t, i = (
            _run(record, mode, long, x, scene) for record, mode in zip(PAIR, modes, strict=True)
        )
        for boxes in (checked, proved):
            for box, value in zip(boxes, (t, i, i - t), strict=True):
                slack = 2.0**-46 * np.abs(value).max()
                assert (box.lo[:1] - slack <= value).all()
                assert (value <= box.hi[:1] + slack).all()


def _boxes(state: Any) -> tuple[ProverBox, ProverBox, ProverBox]:
    return state.train, state.infer, state.drift


def _run(record: Any, mode: str, graph: Any, x: np.ndarray, scene: DriftProblem) -> np.ndarray:
    run = kernels.Run(record, np.random.default_rng(3), mode)
    stored = scene.parameters.plain
    values = kernels.simulate(graph, run, x, lambda key: stored(key, scene.train), lambda key: x)
    return values[graph.output]


@pytest.mark.parametrize("off", [0.0, 0.125, 0.75])
@pytest.mark.parametrize("accumulate", ["float16", "bfloat16", "float32"])
def test_products_use_the_sum_of_stored_probabilities(accumulate: str, off: float) -> None:
    """Stored probabilities sum to at most 1 + off.

    Sums of that size are rounded, and the values have this share as an additional error.
    """
    record = N("float32", "any", accumulate=accumulate)
    longest, value = 200, 3.0
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}[accumulate]
    # a sum of n terms: (1 + u)^(n - 1), or n·u where that is known to be enough
    steps = (longest - 1) * unit * (1 + off) * value
    least = off * value + min(steps, (1 + off) * value) * (1 - 2.0**-20)
    shape = (1, 2, WIDTH)
    box = np.full(shape, value)
    found = prover_rules._any_length_error(
        torch.full((1, 2, 1), off, dtype=torch.float64),
        ProverBox(-torch.from_numpy(box), torch.from_numpy(box)),
        Rounding(numerics(record)),
        longest,
    )
    graph = turned(2, 0)
    document = sequences.document(
        graph, sequences.tables_of(graph, turned(9, 0)), (record, record), "0" * 64,
        np.zeros((1, WIDTH)), 1.0, 9,
    )  # fmt: skip
    kernel = parse(proofs.dump(document)).train
    again = checker_rules._error(kernel, np.full((1, 2, 1), off), Box(-box, box), longest)
    for errors in (found.numpy(), again):
        assert (errors >= least).all()
    np.testing.assert_allclose(again, np.broadcast_to(found.numpy(), again.shape), rtol=2.0**-9)
