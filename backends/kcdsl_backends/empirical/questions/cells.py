"""Cells of an experiment and their results, kept in a run checkpoint in its folder.

A checkpoint is valid for the digests of contract, weights, data and their files, the seed, the
axes, the versions and the processor. If one of these, or the contract's own code, has changed,
every cell is measured again.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kcdsl import __version__
from kcdsl.diagnostics.model import Refusal
from kcdsl.ir.canonical import digest
from kcdsl.ir.terms import Program
from kcdsl.model.files import Artefacts, file_digest
from kcdsl.model.fingerprint import here
from kcdsl.release.artefacts import companions, data_digests
from kcdsl_backends.empirical.collection.resume import OwnCode, recorded_code_unchanged
from kcdsl_backends.empirical.table.checkpoint import RunCheckpoint

Prepare = Callable[..., Any]
"""Loads a contract: `EmpiricalBackend.prepare`."""
CHECKPOINT = "cells.run-checkpoint"
"""The name of the file that keeps the cells of an experiment."""


def manifest(program: Program, base: Path, seed: int, **more: Any) -> dict[str, Any]:
    """Return the inputs of an experiment: digests of the contract and of every file that its
    numbers depend on; seed; versions; the machine with the settings that can change a result.

    A missing file has no digest; the code that reads it refuses it.
    """
    files: dict[str, str] = {}
    artefacts = Artefacts.of(base)
    for read in (_weights, _companions, data_digests):
        with suppress(Refusal):
            files.update(read(program, artefacts))
    return {
        "contract": {
            "name": program.name,
            "version": program.version,
            "digest": f"sha256:{digest(program).removeprefix('sha256:')}",
        },
        "files": {name: f"sha256:{digest}" for name, digest in sorted(files.items())},
        "seed": seed,
        "versions": {
            "kcdsl": __version__,
            "python": platform.python_version(),
            **_libraries(),
            "machine": platform.machine(),
            "processor": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
            "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        },
        "machine": _machine(),
        **more,
    }


def _machine() -> dict[str, Any]:
    """Return the part of kernel fingerprints that describes this machine."""
    place = here()
    return {
        "processor": dict(place.processor()),
        "host": dict(place.host()),
        **({"gpu": dict(place.device())} if torch.cuda.is_available() else {}),
        "switches": {"environment": place.switches(), "torch": dict(place.flags())},
    }


def _weights(program: Program, artefacts: Artefacts) -> dict[str, str]:
    """Return the digest of the checkpoint, or of every file in it if it is a folder."""
    name = program.model.checkpoint
    path = artefacts.locate(name)
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        return {f"{name}/{file.relative_to(path)}": file_digest(file) for file in inside}
    return {name: file_digest(path)}


def _companions(program: Program, artefacts: Artefacts) -> dict[str, str]:
    return {f"({role})": digest for role, digest in companions(program.model, artefacts).items()}


def _libraries() -> dict[str, str]:
    """Return the versions of the libraries that run kernels, as far as they are installed."""
    found = {}
    for name in ("torch", "torchao", "onnxruntime", "transformers", "numpy"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@dataclass(frozen=True, slots=True)
class Cells:
    """The stored cells of one experiment."""

    checkpoint: RunCheckpoint
    code: OwnCode

    def cell(
        self, name: str, spec: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the stored cell, or measure it now.

        A refusal becomes a cell with its reason, so that no cell is silently absent. It is not
        stored, since a missing input may be present in the next run.
        """
        place = json.dumps([name, spec], sort_keys=True)
        known = self.checkpoint.note(place)
        if known is not None:
            found: dict[str, Any] = json.loads(known)
            return found
        try:
            cell = {**spec, "status": "ran", "reason": None, **measure()}
        except Refusal as error:
            first = error.diagnostics[0]
            return {**spec, "status": "not_run", "reason": f"{first.code}: {first.message}"}
        self.code.keep()
        self.checkpoint.keep_note(place, json.dumps(cell, allow_nan=False).encode())
        return cell


@contextmanager
def cells_in(
    folder: Path, of: Mapping[str, Any], *, fresh: bool = False, base: Path = Path()
) -> Iterator[Cells]:
    """Open the cells of an experiment with the manifest `of`, of a contract in the folder `base`;
    `fresh` measures all of them again. Raises Refusal where the checkpoint cannot be written."""
    text = json.dumps(of, sort_keys=True, separators=(",", ":"), default=str)
    key = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    checkpoint, files = RunCheckpoint(folder / CHECKPOINT, fresh), Artefacts.of(base)
    checkpoint.open(key)
    try:
        if not recorded_code_unchanged(checkpoint, files):
            checkpoint.restart(key, "own code that was imported then has changed since")
        yield Cells(checkpoint, OwnCode(files, checkpoint))
    finally:
        checkpoint.close()


def failed_checks(prechecks: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return name and detail of the preconditions that failed."""
    return [
        {"name": check["name"], "detail": check["detail"]}
        for check in prechecks
        if check["outcome"] == "failed"
    ]


def pass_record(row: Mapping[str, Any], narrow: Sequence[str]) -> dict[str, Any]:
    """Return a row of a report as a cell shows it: its pass rate with limits (Clopper-Pearson, each
    one-sided at the confidence of the clause), and why it is narrow."""
    beyond = row["exceedance"]
    rates: dict[str, float | None] = {"rate": None, "low": None, "high": None}
    if beyond is not None:
        n, k = beyond["n"], beyond["k"]
        rates["rate"] = (n - k) / n
        rates["low"] = None if beyond["high"] is None else 1 - beyond["high"]
        rates["high"] = None if beyond["low"] is None else 1 - beyond["low"]
    return {
        "clause": row["clause"],
        "slice": row["slice"],
        "requirement": row["requirement"],
        "metric": row["metric"],
        "op": row["op"],
        "value": row["value"],
        "threshold": row["threshold"],
        "unit": row["unit"],
        "verdict": row["verdict"],
        "reason": row["reason"],
        "n": row["n"] if beyond is None else beyond["n"],
        "passed": None if beyond is None else beyond["n"] - beyond["k"],
        **rates,
        "narrow": list(narrow),
    }
