"""What identifies a kernel: the adapter, its numerics, and the library that runs it.

Imports no torch: versions come from the metadata of the installed distributions.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import rfc8785

from kcdsl.ir.terms import KernelRef
from kcdsl.model.presets import resolve

FINGERPRINT_SCHEMA = "kcdsl.kernel-fingerprint/1"
LIBRARIES = ("torchao", "onnxruntime")
"""Libraries whose name begins that of their adapters."""


def kernel_fingerprint(ref: KernelRef, device: str = "cpu") -> dict[str, Any]:
    """Return the record that certificates bind: adapter, resolved numerics, torch version, device.

    `device` is the kind alone, "cpu" or "cuda". A version's local part ("+cpu") is left out: it
    names a build, not a program. The version is None where torch is not installed. A kernel of
    another library has the version of that besides.
    """
    library = ref.run.partition(".")[0]
    more = {library: _version(library)} if library in LIBRARIES else {}
    return {
        "schema": FINGERPRINT_SCHEMA,
        "run": ref.run,
        "numerics": resolve(ref).to_json(),
        "torch": _version("torch"),
        "device": device.partition(":")[0],
        **more,
    }


def fingerprint_digest(fingerprint: dict[str, Any]) -> str:
    """Return the sha256 (hex) of the canonical JSON of a fingerprint."""
    return hashlib.sha256(rfc8785.dumps(fingerprint)).hexdigest()


def _version(name: str) -> str | None:
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None
