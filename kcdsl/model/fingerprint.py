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


def kernel_fingerprint(ref: KernelRef, device: str = "cpu") -> dict[str, Any]:
    """Return the record that certificates bind: adapter, resolved numerics, torch version, device.

    `device` is the kind alone, "cpu" or "cuda". A version's local part ("+cpu") is left out: it
    names a build, not a program. The version is None where torch is not installed.
    """
    return {
        "schema": FINGERPRINT_SCHEMA,
        "run": ref.run,
        "numerics": resolve(ref).to_json(),
        "torch": _torch_version(),
        "device": device.partition(":")[0],
    }


def fingerprint_digest(fingerprint: dict[str, Any]) -> str:
    """Return the sha256 (hex) of the canonical JSON of a fingerprint."""
    return hashlib.sha256(rfc8785.dumps(fingerprint)).hexdigest()


def _torch_version() -> str | None:
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        return None
