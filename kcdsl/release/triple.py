"""The triple of a contract, rebuilt from what is about to be deployed; no tensor library needed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import KERNELS_FILE
from kcdsl.ir.terms import KernelRef, Program
from kcdsl.model.files import Artefacts
from kcdsl.release.artefacts import checkpoint_manifest, companions, data_digests
from kcdsl.release.requirements import required_clauses, slice_sources
from kcdsl_certs.rejected import Rejected
from kcdsl_certs.requirements import Expectation
from kcdsl_certs.triple import Checkpoint, Contract, Kernel, Triple

Fingerprints = Mapping[str, Mapping[str, Any]]
"""Kernel fingerprints by role, "train" and "infer": plain data without floats."""


def build_triple(
    program: Program,
    base: Path | Artefacts,
    *,
    fingerprints: Fingerprints | None = None,
    checkpoint: Path | None = None,
) -> Triple:
    """Return the triple of a compiled contract whose folder is `base`.

    `fingerprints` are those of the kernels that will run; by default they are taken here.
    `checkpoint` replaces the path that the contract names. Raises Refusal where a file is missing
    or must not be trusted.
    """
    files = Artefacts.of(base)
    path = checkpoint if checkpoint is not None else files.locate(program.model.checkpoint)
    manifest = checkpoint_manifest(path)
    kernels = {
        role: _kernel(ref, None if fingerprints is None else fingerprints.get(role), role)
        for role, ref in (("train", program.train), ("infer", program.infer))
    }
    return Triple(
        Checkpoint.of(path.name, manifest, companions(program.model, files)),
        kernels["train"],
        kernels["infer"],
        Contract(program.name, program.version, _contract_digest(program)),
    )


def _kernel(ref: KernelRef, given: Mapping[str, Any] | None, role: str) -> Kernel:
    fingerprint = _fingerprint(ref) if given is None else dict(given)
    kernel = Kernel(ref.run, fingerprint)
    try:
        _ = kernel.digest
    except Rejected as error:
        raise refuse(
            KERNELS_FILE, f"the fingerprint of the {role} kernel has no canonical form: {error}"
        ) from error
    return kernel


def _fingerprint(ref: KernelRef) -> dict[str, Any]:
    fingerprint: dict[str, Any] = import_module("kcdsl.model.fingerprint").kernel_fingerprint(ref)
    return fingerprint


def _contract_digest(program: Program) -> str:
    digest: str = import_module("kcdsl.ir.canonical").digest(program)
    return digest.removeprefix("sha256:")


def build_expectation(
    program: Program,
    base: Path | Artefacts,
    *,
    fingerprints: Fingerprints | None = None,
    checkpoint: Path | None = None,
) -> Expectation:
    """Return all that a verifier must know beforehand: triple, clauses, data digests, slices."""
    files = Artefacts.of(base)
    return Expectation(
        build_triple(program, files, fingerprints=fingerprints, checkpoint=checkpoint),
        required_clauses(program, files),
        data_digests(program, files),
        slice_sources(program, files),
    )
