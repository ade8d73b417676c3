"""What identifies a kernel: the adapter, its numerics, and the library that runs it.

Imports no torch: versions come from the metadata of the installed distributions.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import rfc8785

from kcdsl.ir.canonical import service_json
from kcdsl.ir.terms import KernelRef
from kcdsl.model.presets import resolve

FINGERPRINT_SCHEMA = "kcdsl.kernel-fingerprint/1"
LIBRARIES = {"torchao": "torchao", "onnxruntime": "onnxruntime", "hf": "transformers"}
"""What the names of adapters begin with, and the library that runs them."""


def kernel_fingerprint(ref: KernelRef, device: str = "cpu") -> dict[str, Any]:
    """Return the record that certificates bind: adapter, resolved numerics, torch version, device.

    `device` is the kind alone, "cpu" or "cuda". A version's local part ("+cpu") is left out: it
    names a build, not a program. The version is None where torch is not installed. A kernel of
    another library has the version of that besides, one of a folder the folder, and one that asks
    a server what the contract says of it; the numerics of a server that claims none are None.
    """
    library = LIBRARIES.get(ref.run.partition(".")[0])
    more: dict[str, Any] = {} if library is None else {library: _version(library)}
    if ref.folder is not None:
        more["folder"] = ref.folder
    if ref.service is not None:
        stated = service_json(ref.service)
        more["service"] = {name: stated[name] for name in stated if name != "key"}
    return {
        "schema": FINGERPRINT_SCHEMA,
        "run": ref.run,
        "numerics": resolve(ref).to_json() if ref.claims else None,
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
