"""What identifies a kernel: adapter, numerics, and the build, machine and switches it runs with.

Imports no torch for a kernel on the processor: the rest is told by the installed distributions, the
system and the environment. See docs/certificate-fields.md for the parts and what a checker may
relax.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import rfc8785

from kcdsl.ir.canonical import service_json
from kcdsl.ir.terms import KernelRef
from kcdsl.model.machine import Machine, here
from kcdsl.model.presets import resolve

FINGERPRINT_SCHEMA = "kcdsl.kernel-fingerprint/2"
LIBRARIES = {"torchao": "torchao", "onnxruntime": "onnxruntime", "hf": "transformers"}
"""What the names of adapters begin with, and the library that runs them."""
_WITH_DEVICE = ("nvidia-", "triton", "pytorch-triton", "rocm", "amd-")
"""What the names of distributions begin with that bring the programs of a GPU."""


def kernel_fingerprint(
    ref: KernelRef, device: str = "cpu", machine: Machine | None = None
) -> dict[str, Any]:
    """Return the record that certificates bind.

    `run`, `numerics` and `device` (the kind alone, "cpu" or "cuda") say which kernel it is, with
    the folder of one that has a folder and what the contract says of a server. For a kernel that
    runs here, `software` has the libraries with version, RECORD and code, `hardware` the processor
    and the GPU with its driver, and `switches` what of the environment and of torch's settings can
    change a result. `machine` says where it runs; by default here.
    """
    kind = device.partition(":")[0]
    found: dict[str, Any] = {
        "schema": FINGERPRINT_SCHEMA,
        "run": ref.run,
        "numerics": resolve(ref).to_json() if ref.claims else None,
        "device": kind,
    }
    if ref.folder is not None:
        found["folder"] = ref.folder
    if ref.service is not None:
        stated = service_json(ref.service)
        found["service"] = {name: stated[name] for name in stated if name != "key"}
    if ref.service is not None or ref.recording is not None:
        return found
    place = here() if machine is None else machine
    return {
        **found,
        "software": _software(ref, kind, place),
        "hardware": {
            "processor": dict(place.processor()),
            "host": dict(place.host()),
            **({"gpu": dict(place.device())} if kind != "cpu" else {}),
        },
        "switches": {"environment": place.switches(), "torch": dict(place.flags())},
    }


def _software(ref: KernelRef, kind: str, machine: Machine) -> dict[str, Any]:
    names = ["torch"]
    first = ref.run.partition(".")[0]
    if first in LIBRARIES:
        names.append(LIBRARIES[first])
    compiled = ref.run == "torch.compile"
    if kind != "cpu":
        names += [name for name in machine.libraries() if name.startswith(_WITH_DEVICE)]
    found: dict[str, Any] = {name: _plain(machine.library(name)) for name in names}
    return {**found, "compiler": machine.compiler()} if compiled else found


def _plain(library: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if library is None else dict(library)


def fingerprint_digest(fingerprint: dict[str, Any]) -> str:
    """Return the sha256 (hex) of the canonical JSON of a fingerprint."""
    return hashlib.sha256(rfc8785.dumps(fingerprint)).hexdigest()
