"""The identity of a kernel: adapter, numerics, software build, machine and switches.

No library is imported for it; torch is queried only if it is imported already, or if the device is
a GPU. All else comes from the metadata of distributions, the system and the environment.
Every probe can be replaced, to describe another machine.
docs/proofs/certificate-fields.md lists the parts and what a checker may relax.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    distribution,
    distributions,
    packages_distributions,
)
from pathlib import Path
from typing import Any

import rfc8785

from kcdsl.diagnostics.model import Refusal
from kcdsl.ir.canonical import service_json
from kcdsl.ir.terms import KernelRef
from kcdsl.model.adapters import distribution_of
from kcdsl.model.presets import resolve
from kcdsl.source.files import is_settled, open_regular, user_place
from kcdsl.source.modules import find_module

FINGERPRINT_SCHEMA = "kcdsl.kernel-fingerprint/2"
_WITH_DEVICE = ("nvidia-", "triton", "pytorch-triton", "rocm", "amd-")
"""Prefixes of the names of distributions with GPU libraries."""


def kernel_fingerprint(
    ref: KernelRef, device: str = "cpu", machine: Machine | None = None
) -> dict[str, Any]:
    """Return the record that certificates bind.

    `run`, `numerics` and `device` (the kind alone, "cpu" or "cuda") identify the kernel, with its
    folder or server section, if any. For a kernel on this machine, `software` has the libraries
    with version, RECORD and code, `hardware` the processor and the GPU with its driver, and
    `switches` the environment variables and torch settings that can change a result. `machine` is
    by default this machine.
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
    names = [name for name in ("torch", distribution_of(ref.run)) if name is not None]
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


# --- the machine ---------------------------------------------------------------------------------

_CODE = re.compile(r"\.(py|pyd|dll|dylib|so)(\.[0-9]+)*$")
"""Files of a distribution that can change what a kernel computes."""
_ROW_OF_CODE = re.compile(r"\.(?:py|pyd|dll|dylib|so)(?:\.[0-9]+)*(?:,|$)")
"""Matches a row of RECORD for such a file, if its name is not quoted."""
_INSTRUCTIONS = re.compile(
    r"avx|fma|f16c|amx|sse4|vnni|bf16|fp16|asimd|neon|sve|sme2?$|i8mm|dotprod|altivec|vsx|rvv"
)
"""Instruction sets for which libraries have kernels of their own."""
_SWITCHES = re.compile(
    r"ATEN_CPU_CAPABILITY|LD_PRELOAD|LD_LIBRARY_PATH|NVIDIA_TF32_OVERRIDE|CUDA_LAUNCH_BLOCKING"
    r"|CUDA_MODULE_LOADING|CUDA_(FORCE|DISABLE)_PTX_JIT|GLIBC_TUNABLES|PYTORCH_JIT"
    r"|TORCH_(ALLOW|BLAS|COMPILE|CUDNN|DISABLE|DYNAMO|FORCE|JIT|LINALG|NATIVE|NCCL|ROCM)_\w+"
    r"|PYTORCH_(JIT|MIOPEN|MPS|NO|TENSOREXPR|TUNABLEOP)_\w+|PYTORCH_TENSOREXPR"
    r"|TORCHDYNAMO_\w+|TORCHINDUCTOR_(?!CACHE_DIR)\w+|TORCHAO_\w+"
    # set by scikit-learn and threadpoolctl when they are imported; they change no result
    r"|(?!KMP_(DUPLICATE_LIB_OK|INIT_AT_FORK)$)"
    r"(OMP|KMP|GOMP|MKL|OPENBLAS|BLIS|DNNL|ONEDNN|VECLIB|NUMEXPR)_\w+"
    r"|(CUBLAS|CUBLASLT|CUDNN|CUTLASS|FLASH_ATTENTION|XFORMERS|VLLM|SGL|SGLANG|ORT|NCCL)_\w+"
    r"|(HSA|HIP|HIPBLASLT|ROCBLAS|MIOPEN)_\w+|TRITON_(?!CACHE_DIR)\w+"
)
_PRIVATE = re.compile(
    r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL|(^|_)(CACHE|HOME|LOG[A-Z]*|DEBUG|TRACE)(_|$)|PATH$|DIR$"
)
"""Variables that statements omit: secrets, and paths and log settings, which change no result."""
_SHOWN = frozenset({
    "LD_LIBRARY_PATH", "MKL_DEBUG_CPU_TYPE", "TORCHINDUCTOR_CPP_GEMM_CACHE_BLOCKING"
})  # fmt: skip
"""Variables that are shown although `_PRIVATE` matches, because they change results."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The probes of one machine; each returns JSON data without floats."""

    library: Callable[[str], Mapping[str, Any] | None]
    """Describes an installed distribution by name; None where it is not installed."""
    libraries: Callable[[], tuple[str, ...]]
    """The names of all distributions."""
    processor: Callable[[], Mapping[str, Any]]
    host: Callable[[], Mapping[str, Any]]
    """Cores and memory, which affect times but not results."""
    device: Callable[[], Mapping[str, Any]]
    """The GPU in use, and its driver."""
    compiler: Callable[[], str | None]
    """The C++ compiler of compiled kernels."""
    flags: Callable[[], Mapping[str, Any]]
    """The torch settings that differ from their defaults."""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def switches(self) -> dict[str, str]:
        """Return the variables of the environment that can change what a kernel computes."""
        return {
            name: value
            for name, value in sorted(self.environment.items())
            if _SWITCHES.fullmatch(name) and (name in _SHOWN or not _PRIVATE.search(name))
        }


def here() -> Machine:
    """Return the machine that this process runs on."""
    return Machine(installed, installed_names, processor, host, gpu, compiler, torch_flags)


# --- installed libraries -------------------------------------------------------------------------


@lru_cache(maxsize=64)
def installed(name: str) -> Mapping[str, Any] | None:
    """Return the description of a distribution, or of one that provides its package under another
    name (`onnxruntime-gpu`), with that name; None where neither is installed."""
    try:
        return described(name, distribution(name))
    except PackageNotFoundError:
        others = sorted(set(packages_distributions().get(name.replace("-", "_"), ())))
    if not others:
        return None
    return {"name": others[0], **described(others[0], distribution(others[0]))}


def described(name: str, found: Distribution) -> Mapping[str, Any]:
    """Return version (local part included) and digests of an installed distribution.

    `record` is the sha256 of its file RECORD, which lists every file with its digest. `code` is the
    sha256 of the list of its code files, hashed as they are on disk, so that a file changed in
    place is noticed. An editable install (`pip install -e`) does not list its code in RECORD: there
    it is the code of its packages. Digests of unchanged files come from a cache.
    """
    record, about = found.read_text("RECORD"), found.metadata
    digest = None if record is None else hashlib.sha256(record.encode()).hexdigest()
    return {
        "version": about["Version"],
        "record": digest,
        "code": _code_digest(name, found, record or "", digest or ""),
        **(_built(found) if about["Name"] == "torch" else {}),
    }


def installed_names() -> tuple[str, ...]:
    """Return the names of the distributions that are installed."""
    names = {
        str(found.metadata["Name"] or "").lower().replace("_", "-") for found in distributions()
    }
    return tuple(sorted(names - {""}))


def _built(found: Distribution) -> dict[str, str]:
    """Return the build of torch: its commit, and its CUDA or ROCm version."""
    text = ""
    with suppress(OSError):
        path = Path(str(found.locate_file("torch/version.py")))
        text = path.read_text(encoding="utf-8")
    pairs = re.findall(r"^(git_version|cuda|hip|rocm)\b[^=\n]*= '([^'\n]*)'", text, re.MULTILINE)
    return dict(pairs)


def _code_digest(name: str, found: Distribution, record: str, sha256: str) -> str | None:
    """Return the sha256 over the names and digests of a distribution's code files."""
    root = str(found.locate_file(""))
    known = _DigestCache.of(name, root)
    # Paths in RECORD are relative to the folder, with few exceptions.
    paths = {
        path: path if path.startswith(os.sep) else f"{root}{os.sep}{path}"
        for path in known.listing(sha256, record)
    }
    if not record or _is_linked(found):
        paths |= _programs_of_packages(name, found)
    if not paths:
        return None
    lines = [f"{path} {known.digest(place)}\n" for path, place in paths.items()]
    known.keep()
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _is_linked(found: Distribution) -> bool:
    """Return whether a distribution is an editable install."""
    try:
        about = json.loads(found.read_text("direct_url.json") or "{}")
        return bool(about.get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError, RecursionError):
        return True


def _programs_of_packages(name: str, found: Distribution) -> dict[str, str]:
    """Return the code files of the packages of a distribution, by name relative to the package;
    nothing is imported."""
    modules = {entry.module for entry in found.entry_points if entry.group.startswith("kcdsl.")}
    modules |= {module.partition(".")[0] for module in modules}
    modules |= {name.replace("-", "_"), *(found.read_text("top_level.txt") or "").split()}
    programs: dict[str, str] = {}
    for module in sorted(modules):
        source = find_module(module, [entry for entry in sys.path if entry])
        if source is None:
            continue
        alone = source.name != "__init__.py" and "." not in module
        root, inside = source.parent, [source] if alone else sorted(source.parent.rglob("*"))
        for path in inside:
            if _CODE.search(path.name):
                programs[f"{root.name}/{path.relative_to(root).as_posix()}"] = str(path)
    return dict(sorted(programs.items()))


def _listed(record: str) -> Iterator[str]:
    rows = record.splitlines()
    if '"' not in record:  # skip most of the rows, which are no code, quickly
        rows = [row for row in rows if _ROW_OF_CODE.search(row)]
    for row in csv.reader(rows):
        if row and _CODE.search(row[0]):
            yield row[0]


_LISTING = ""
"""Cache key of the list of code files and the digest of their RECORD: no file has this
name."""


@dataclass(slots=True)
class _DigestCache:
    """A cache of file digests by file identity, kept for the next process.

    A write changes the ctime of a file, which programs cannot set. A file that changed a moment ago
    is not cached, because it can change again within the resolution of the clock.
    """

    place: Path | None
    """The file of the cache; None where the user has no cache folder."""
    before: Mapping[str, Any]
    now: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, root: str) -> _DigestCache:
        """Return the cache of a distribution in one environment."""
        base = user_place("XDG_CACHE_HOME", ".cache")
        if base is None:
            return cls(None, {})
        plain = re.sub(r"[^a-z0-9.-]", "_", name)
        environment = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
        place = base / "kcdsl" / "libraries" / f"{plain}-{environment}.json"
        try:
            with open_regular(place) as stream:
                before = json.loads(stream.read())
        except (OSError, ValueError, RecursionError):
            before = {}
        return cls(place, before if isinstance(before, dict) else {})

    def listing(self, sha256: str, record: str) -> list[str]:
        """Return the code files that RECORD lists, from the cache if its digest is known."""
        held = self.before.get(_LISTING)
        if isinstance(held, list) and held[:1] == [sha256] and len(held) == 2:
            found = str(held[1])
        else:
            found = "\n".join(sorted(set(_listed(record))))
        self.now[_LISTING] = [sha256, found]
        return found.split("\n") if found else []

    def digest(self, path: str) -> str:
        """Return the sha256 of a file; a cached file is not opened."""
        held = self.now.get(path) or self.before.get(path)
        try:
            about = os.stat(path)
            settled = is_settled(about)
            if settled and isinstance(held, list) and len(held) == 2 and held[0] == _stamp(about):
                self.now[path] = held
                return str(held[1])
            with open_regular(Path(path)) as stream:
                about = os.fstat(stream.fileno())
                settled = is_settled(about)
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except (OSError, ValueError):
            return "missing"
        if settled:
            self.now[path] = [_stamp(about), found]
        return found

    def keep(self) -> None:
        if self.place is None or self.now == self.before or self.now.keys() == {_LISTING}:
            return
        from kcdsl.source.output import write_bytes

        self.before = self.now
        with suppress(OSError, Refusal):
            self.place.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self.place, json.dumps(self.now).encode())


def _stamp(about: os.stat_result) -> str:
    return f"{about.st_dev} {about.st_ino} {about.st_size} {about.st_ctime_ns}"


# --- processor, device, compiler -----------------------------------------------------------------


@lru_cache(maxsize=1)
def processor() -> Mapping[str, Any]:
    """Return the model of the processor and the instruction sets that libraries select by."""
    text = ""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    lines = dict(_fields(text))
    names = lines.get("flags") or lines.get("Features") or ""
    model = lines.get("model name") or lines.get("CPU part")
    if not model:
        from platform import processor as generic  # compiles patterns at its import

        model = generic()
    return {
        "machine": os.uname().machine,
        "model": " ".join(model.split()),
        "instructions": sorted({n for n in names.split() if _INSTRUCTIONS.match(n)}),
    }


def host() -> Mapping[str, Any]:
    """Return the number of cores of this process and the memory of the machine in GiB."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = 0
    with suppress(OSError, ValueError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return {"cores": cores or 1, "memory": memory}


def _fields(text: str) -> Iterator[tuple[str, str]]:
    """Yield the fields of the first processor of /proc/cpuinfo."""
    for line in text.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()


def gpu() -> Mapping[str, Any]:
    """Return model, capability, memory and driver of the GPU in use."""
    import torch

    if not torch.cuda.is_available():
        return {"model": None}
    about = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "model": about.name,
        "capability": f"{about.major}.{about.minor}",
        "architecture": str(getattr(about, "gcnArchName", "") or ""),
        "processors": int(about.multi_processor_count),
        "memory": int(about.total_memory),
        "driver": driver(),
    }


def driver() -> str | None:
    """Return the version of the GPU's driver; None where it is unknown."""
    for place in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        with suppress(OSError):
            text = Path(place).read_text(encoding="utf-8", errors="replace")
            found = re.search(r"\b[0-9]+\.[0-9]+(\.[0-9]+)*\b", text)
            if found is not None:
                return found.group()
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return run.stdout.strip().splitlines()[0]
    return None


@lru_cache(maxsize=1)
def compiler() -> str | None:
    """Return the version line of the C++ compiler."""
    import subprocess

    command = [os.environ.get("CXX", "").split(" ")[0] or "g++", "--version"]
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return run.stdout.splitlines()[0].strip()
    return None


_FLAGS: tuple[tuple[str, str, Any], ...] = (
    ("float32_matmul_precision", "get_float32_matmul_precision", "highest"),
    ("deterministic_algorithms", "are_deterministic_algorithms_enabled", False),
    ("deterministic_warn_only", "is_deterministic_algorithms_warn_only_enabled", False),
    ("default_dtype", "get_default_dtype", "torch.float32"),
    ("flush_denormal", "_C._get_flush_denormal", False),
    ("matmul.allow_tf32", "backends.cuda.matmul.allow_tf32", False),
    ("matmul.fp16_reduction", "backends.cuda.matmul.allow_fp16_reduced_precision_reduction", True),
    ("matmul.bf16_reduction", "backends.cuda.matmul.allow_bf16_reduced_precision_reduction", True),
    ("cudnn.allow_tf32", "backends.cudnn.allow_tf32", True),
    ("cudnn.benchmark", "backends.cudnn.benchmark", False),
    ("cudnn.deterministic", "backends.cudnn.deterministic", False),
    ("mkldnn.enabled", "backends.mkldnn.enabled", True),
    ("sdp.flash", "backends.cuda.flash_sdp_enabled", True),
    ("sdp.math", "backends.cuda.math_sdp_enabled", True),
    ("sdp.efficient", "backends.cuda.mem_efficient_sdp_enabled", True),
    ("sdp.cudnn", "backends.cuda.cudnn_sdp_enabled", True),
)
"""Settings of torch: name in the record, attribute path, default."""


def torch_flags() -> Mapping[str, Any]:
    """Return the torch settings that differ from their defaults; empty if torch is not imported."""
    torch = sys.modules.get("torch")
    found: dict[str, Any] = {}
    for name, place, usual in _FLAGS if torch is not None else ():
        value: Any = torch
        try:
            for part in place.split("."):
                value = getattr(value, part)
            value = value() if callable(value) else value
        except (AttributeError, RuntimeError):
            continue
        value = value if isinstance(value, bool | str) else str(value)
        if value != usual:
            found[name] = value
    return found
