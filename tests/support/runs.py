"""Compare runs of kernels with the bounds of both programs, node by node."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine.tape import TapeEntry
from kcdsl_certs.recheck.affine.form import Form, Walk
from tests.support import kernels

Floats = np.ndarray


def mistaken(run: KernelRun, walk: Walk, values: dict[str, Floats]) -> list[str]:
    """Return the nodes at which a run exceeds a program's bound of a reading."""
    found = []
    for name, value in values.items():
        if name in run.computed and name != run.graph.output:
            entry, private = run.tape.entries[run.computed[name]], run.private.get(name)
            own = 0.0 if private is None else private.error_bound.numpy()
            if (np.abs(value - entry.reference.numpy()) > entry.error_bound.numpy() + own).any():
                found.append(f"prover, {name}")
            form, version = walk.forms[name], walk.versions.get(name)
            assert isinstance(form, Form)
            other = 0.0 if version is None else version.own
            if (np.abs(value - form.reference) > form.error_bound + other).any():
                found.append(f"checker, {name}")
            if private is None and version is None:
                found += [f"{where}, {name}" for where in too_long(entry, walk, form, value)]
    return found


def too_long(entry: TapeEntry, walk: Walk, form: Form, value: Floats) -> list[str]:
    """Return violations of bounds of row norms and weighted squares by a run."""
    assert form.place is not None
    errors, found = value - entry.reference.numpy(), []
    known, weights = walk.tape.entries[form.place], np.abs(errors) + np.abs(value)
    lengths = np.linalg.norm(errors, axis=-1, keepdims=True)
    if entry.length is not None and (lengths > entry.length.numpy()).any():
        found.append("length of the prover")
    if known.length is not None and (lengths > known.length).any():
        found.append("length of the checker")
    roots = np.sqrt((weights * errors**2).sum(axis=-1, keepdims=True))
    by_rows = None if entry.squares is None else entry.squares.whole(torch.from_numpy(weights))
    if by_rows is not None and (roots > by_rows.numpy()).any():
        found.append("squares of the prover")
    if known.squares is not None and (roots > known.squares.each(weights)).any():
        found.append("squares of the checker")
    return found


def simulated(walk: Walk, record: Any, graph: Any, x: Floats, rounded: Any) -> dict[str, Floats]:
    """Return all values of a run of the kernel of a walk."""
    known = walk.problem.parameters
    return kernels.simulate(
        graph,
        kernels.Run(record, *rounded),
        x,
        lambda key: known.plain(key, walk.kernel),
        lambda key: known.linear(key, walk.kernel),
    )
