"""The triple of a contract, rebuilt from what is about to be deployed; and its kernels in a file.

No tensor library is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import FILE_MISSING, KERNELS_FILE
from kcdsl.ir.terms import KernelRef, Program
from kcdsl.model.files import Artefacts
from kcdsl.release.artefacts import checkpoint_manifest, companions, data_digests
from kcdsl.release.requirements import required_clauses, slice_sources
from kcdsl.source.files import open_regular
from kcdsl_certs.rejected import Rejected
from kcdsl_certs.statement import Checkpoint, Contract, Expectation, Kernel, Triple
from kcdsl_certs.strict import strict_load

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


# --- the file of fingerprints ---------------------------------------------------------------------


KERNELS_SCHEMA = "kcdsl.kernels/1"
_LARGEST = 2**20


def kernels_document(fingerprints: Fingerprints) -> bytes:
    """Return the document `kcdsl.kernels/1` (kernels.schema.json) of both kernels."""
    document = {
        "schema": KERNELS_SCHEMA,
        "train": dict(fingerprints["train"]),
        "infer": dict(fingerprints["infer"]),
    }
    return (json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_kernels(path: Path) -> Fingerprints:
    """Read the fingerprints of `train` and `infer`; raises Refusal where that fails."""
    try:
        with open_regular(path) as stream:
            value: Any = strict_load(stream.read(_LARGEST + 1), _LARGEST)
    except OSError as error:
        raise refuse(FILE_MISSING, f"{path} cannot be read: {error.strerror}") from error
    except Rejected as error:
        raise _refused(path, f": {error.detail} ({error.reason})") from error
    match value:
        case {"schema": schema, "train": dict(train), "infer": dict(infer), **rest}:
            if schema == KERNELS_SCHEMA and not rest:
                return {"train": train, "infer": infer}
        case _:
            pass
    raise _refused(path, "")


def _refused(path: Path, why: str) -> Refusal:
    return refuse(
        KERNELS_FILE,
        f"{path} is no document of the schema {KERNELS_SCHEMA}{why}",
        help="`kcdsl evaluate` writes one, kernels.json; it has the objects `train` and `infer`",
    )
