"""Softmax after a norm: prover and checker bound each row alike, in layers of several tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.first_hour_verify import OPTIONS, Row, write_case
from kcdsl.model.graph import Node
from kcdsl_backends.drift.affine import before_casts, error_bounds, kernel, row_ellipsoids
from kcdsl_backends.drift.affine.adjoint import Adjoint, at
from kcdsl_backends.drift.affine.error_bounds import deviations, unit_functionals
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine.tape import (
    INPUT,
    Amplified,
    Nonlinear,
    SingleRow,
    Tape,
    TapeEntry,
)
from kcdsl_certs.recheck.affine import form, reverse_passes
from kcdsl_certs.recheck.ops.linear import linear


def test_deviations_use_bounds_of_single_rows() -> None:
    ones = torch.ones(3, 2, dtype=torch.float64)
    tape = Tape(ones)
    tape.add(TapeEntry("region", 0 * ones, ones, lambda a: []))

    def nothing(a: Adjoint) -> tuple[Tensor, Tensor]:
        zero = a.values.new_zeros(len(a.values))
        return zero, zero

    known = SingleRow(Nonlinear(nothing), lambda a: [])
    vague = TapeEntry("scores", 0 * ones, ones, lambda a: [(INPUT, a)], one_row=known)
    index = tape.add(vague)
    needed = torch.tensor([[True], [True], [False]])
    found = deviations(tape, index, ones / 2, needed)
    assert (found[:2] <= 1e-12).all()
    assert (found[2] >= 1.0).all()


def test_unit_functionals_read_no_other_columns() -> None:
    read = torch.zeros(2, 3, 10, dtype=torch.float64)
    for i, start, stop, unit in unit_functionals((2, 3, 10), read.device, by_row=True, size=4):
        first, last = unit.window[-1]
        assert torch.equal(unit.values.flatten(1), torch.eye(last - first, dtype=torch.float64))
        assert i == unit.window[0][0]
        assert (start, stop) == tuple(10 * unit.window[1][0] + k for k in (first, last))
        read[at(unit.window)] += 1
    assert (read == 1).all()


@pytest.mark.parametrize(("norms", "further"), [(2, True), (3, False)])
def test_passes_stop_at_the_cut_beyond_the_first_layer(norms: int, further: bool) -> None:
    ones = torch.ones(3, 2, dtype=torch.float64)
    amplified = Amplified(ones[:, :1], ones)
    for surrounded in (True, False):
        tape = Tape(ones)
        for number in range(norms):
            entry = TapeEntry(f"norm{number}", 0 * ones, ones, lambda a: [], amplified=amplified)
            tape.cut = tape.add(entry)
        if surrounded:
            tape.surround(tape.cut, {(0,): torch.eye(2, dtype=torch.float64)})
        stops = surrounded and not further
        assert tape.floors == ((tape.cut,) if stops else (tape.cut, INPUT))


@pytest.mark.full
@pytest.mark.parametrize("width", [64, 128])
def test_checker_confirms_a_layer_of_several_tokens(tmp_path: Path, cli: Any, width: int) -> None:
    write_case(tmp_path, Row("layer_0", width, 8))
    ran = cli("verify", tmp_path / "contract.yaml", "--format", "json", *OPTIONS)
    assert ran.code == 0, ran.stdout
    (goal,) = json.loads(ran.stdout)["goals"]
    assert goal["verdict"] == "held"
    assert goal["evidence"]["confirmed"]


@pytest.mark.full
@pytest.mark.parametrize("wide", [False, True])
def test_checker_confirms_a_layer_whose_linears_are_bounded_by_norms(
    tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch, wide: bool
) -> None:
    used = list[str]()

    def bounded(run: KernelRun, node: Node, entry: TapeEntry) -> row_ellipsoids.LinearImage | None:
        found = row_ellipsoids.bounded_by_length(run, node, entry)
        used.extend([] if found is None else [node.name])
        return found

    monkeypatch.setattr(before_casts, "bounded_by_length", bounded)
    mine, theirs = ("WEIGHTS", "MANY_WEIGHTS", "FAR"), ("_SOME", "_MANY", "_FAR")
    for module, names in ((row_ellipsoids, mine), (linear, theirs)):
        for name, value in zip(names, (1, 1, 0.5), strict=True):
            monkeypatch.setattr(module, name, value)
    if wide:  # rows of 64 elements are wide, as those of 1024 are by default
        monkeypatch.setattr(kernel, "WIDE", 64)
        monkeypatch.setattr(form, "_WIDE", 64)
        monkeypatch.setattr(error_bounds, "MANY", 64)
        monkeypatch.setattr(reverse_passes, "_MANY", 64)
    write_case(tmp_path, Row("layer_0", 64, 6))
    ran = cli("verify", tmp_path / "contract.yaml", "--format", "json", *OPTIONS[2:])
    assert ran.code == 0, ran.stdout
    (goal,) = json.loads(ran.stdout)["goals"]
    assert used == ["linear:4", "linear:5"]
    assert goal["evidence"]["confirmed"]
    assert 0 < goal["attack"] <= goal["bound"]
