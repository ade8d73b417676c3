"""Enclosures by node that prover and checker derive for a block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.affine_forms import affine_forms
from kcdsl_backends.drift.affine_run import affine_run, coarsest
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.form import Form
from kcdsl_certs.recheck.affine_walk import drift as derive
from kcdsl_certs.recheck.affine_walk import walk
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.state import DriftProblem, Mask, numeric
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.interval_walk import propagate
from tests.support import proofs
from tests.support.prover import block, parameters

Floats = np.ndarray
Ends = tuple[Floats, Floats]


@dataclass
class Enclosures:
    """Enclosures of one domain of one program, by node: value of either kernel, and drift."""

    source: str
    train: dict[str, Ends] = field(default_factory=dict)
    infer: dict[str, Ends] = field(default_factory=dict)
    drift: dict[str, Ends] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """A graph under two numerics, on a region with one radius."""

    graph: Any
    train: Any
    infer: Any
    centre: Floats
    radius: float

    def problem(self, folder: Path) -> DriftProblem:
        """Return the problem that the checker reads."""
        path = folder / "model.safetensors"
        sha256 = proofs.write_safetensors(path, self.graph.tensors)
        document = proofs.document(
            self.graph, self.train, self.infer, sha256, self.centre, self.radius
        )
        proof = parse(proofs.dump(document))
        return Derivation(proof, read(path).tensors).problem(proof.cases[0])


def all_enclosures(setting: Setting, folder: Path) -> Iterator[Enclosures]:
    """Yield the enclosures of each domain of each program; skip a domain that reports no bound."""
    problem = setting.problem(folder)
    with np.errstate(all="ignore"):
        for source in (checked_intervals, checked_forms):
            try:
                yield source(problem)
            except Rejected as rejection:
                if rejection.reason not in ("bound/not-finite", "bound/overflow"):
                    raise
    for of in (proved_intervals, proved_forms):
        try:
            yield of(setting)
        except NoBound:
            continue


def checked_intervals(problem: DriftProblem) -> Enclosures:
    found = Enclosures("intervals, checker")
    for node, value in propagate(problem):
        if not isinstance(value, Mask):
            state = numeric(value)
            found.train[node.name] = state.t.lo, state.t.hi
            found.infer[node.name] = state.i.lo, state.i.hi
            found.drift[node.name] = state.d.lo, state.d.hi
    return found


def checked_forms(problem: DriftProblem) -> Enclosures:
    found = Enclosures("forms, checker")
    for kernel, values in ((problem.train, found.train), (problem.infer, found.infer)):
        for name, form in walk(problem, kernel).forms.items():
            if isinstance(form, Form):
                values[name] = form.box.lo, form.box.hi
    output = derive(problem).output
    found.drift[problem.block.output] = output.lo, output.hi
    return found


def _tensors(setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(setting.centre), torch.full((1, 1), setting.radius).double()


def proved_intervals(setting: Setting) -> Enclosures:
    sides = (parameters(setting.graph, record) for record in (setting.train, setting.infer))
    output = BlockProblem(block(setting.graph), *sides).bound(*_tensors(setting)).output
    found = Enclosures("intervals, prover")
    for values, box in (
        (found.train, output.train),
        (found.infer, output.infer),
        (found.drift, output.drift),
    ):
        values[setting.graph.output] = box.lo.numpy(), box.hi.numpy()
    return found


def proved_forms(setting: Setting) -> Enclosures:
    found = Enclosures("forms, prover")
    built = block(setting.graph)
    sides = [parameters(setting.graph, record) for record in (setting.train, setting.infer)]
    centre, radius = _tensors(setting)
    grain = coarsest(built, *sides)
    for side, values in zip(sides, (found.train, found.infer), strict=True):
        run = affine_run(built, side, centre, radius, grain)
        for name, index in run.computed.items():
            entry = run.tape.entries[index]
            reference, reach = entry.reference.numpy(), entry.error_bound.numpy()
            values[name] = (
                np.nextafter(reference - reach, -np.inf),
                np.nextafter(reference + reach, np.inf),
            )
    box = affine_forms(built, sides[0], sides[1], centre, radius).box()
    found.drift[setting.graph.output] = box.lo.numpy(), box.hi.numpy()
    return found
