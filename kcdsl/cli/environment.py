"""What is installed, what that enables, and the commands for what is missing.

Facts only: `kcdsl doctor` renders them. Packages are imported here, one by one and inside a
function, because a package that is installed and does not import is as good as missing.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

DISTRIBUTION = "kcdsl"
PYTHON_MINIMUM = (3, 11)


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a required distribution is imported as and what it is there for."""

    module: str
    purpose: str


PURPOSES: Mapping[str, Purpose] = {
    "cryptography": Purpose("cryptography", "keygen, signatures, check"),
    "duckdb": Purpose("duckdb", "tables of tokens, recorded runs"),
    "jinja2": Purpose("jinja2", "the HTML report"),
    "lark": Purpose("lark", "expressions of contracts"),
    "numpy": Purpose("numpy", "block graphs, interval backend, check --recheck"),
    "onnx": Purpose("onnx", "kernels onnxruntime.*: the exported program"),
    "packaging": Purpose("packaging", "version ranges in this report"),
    "pyarrow": Purpose("pyarrow", "traces: Parquet files"),
    "pyyaml": Purpose("yaml", "contracts"),
    "rfc8785": Purpose("rfc8785", "canonical JSON: digests, certificates"),
    "rich": Purpose("rich", "tables and progress"),
    "safetensors": Purpose("safetensors", "checkpoints"),
    "scipy": Purpose("scipy", "confidence limits, error function"),
    "tokenizers": Purpose("tokenizers", "prompts of published models"),
    "torch": Purpose("torch", "reference and inference kernels, tracing of blocks"),
    "z3-solver": Purpose("z3", "consistency, implied clauses"),
}
"""Every run-time requirement of pyproject.toml, by its normalised name (a test compares them)."""


@dataclass(frozen=True, slots=True)
class Package:
    """One distribution as found. `problem` is None where it can be used."""

    name: str
    module: str
    purpose: str
    requirement: str
    installed: str | None
    problem: str | None
    required: bool = True
    command: str | None = None

    @property
    def usable(self) -> bool:
        """Say whether the package is there, in range, and imports."""
        return self.problem is None


@dataclass(frozen=True, slots=True)
class Backend:
    """One backend of the catalogue and what keeps it from running."""

    name: str
    summary: str
    fragments: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def enabled(self) -> bool:
        """Say whether everything the backend needs can be used."""
        return not self.missing


@dataclass(frozen=True, slots=True)
class Device:
    """Where `evaluate` would run."""

    kind: str
    """"cuda", "cpu", or "none" where torch cannot be used."""
    name: str
    capability: str | None = None
    memory_bytes: int | None = None
    float8_storage: bool = False
    """float8 values can be stored and converted."""
    float8_products: bool = False
    """Matrix products run on float8 operands (CUDA, compute capability 8.9 and above)."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything that `kcdsl doctor` reports."""

    version: str | None
    python: str
    executable: str
    python_problem: str | None
    packages: tuple[Package, ...]
    backends: tuple[Backend, ...]
    device: Device
    problems: tuple[str, ...] = field(default=())

    @property
    def ready(self) -> bool:
        """Say whether the main road works: compile, verify, evaluate, check."""
        return (
            not self.problems
            and self.python_problem is None
            and all(p.usable for p in self.packages if p.required)
            and bool(self.backends)
            and all(b.enabled for b in self.backends)
        )

    @property
    def remedy(self) -> str | None:
        """Return the one command that installs what is missing, or None."""
        wanted = tuple(p.requirement for p in self.packages if p.required and not p.usable)
        return pip_install(*wanted) if wanted else None


def pip_install(*words: str) -> str:
    """Return the command line that installs `words` into the environment of this interpreter."""
    return shlex.join([sys.executable, "-m", "pip", "install", *words])


def examine() -> Environment:
    """Look at this interpreter, its packages, the backends and the device."""
    problems: list[str] = []
    try:
        own: str | None = version(DISTRIBUTION)
    except PackageNotFoundError:
        own = None
        problems.append(
            "kcdsl is importable but not installed, so its backends are not registered; in the"
            f" checkout run: {pip_install('-e', '.')}"
        )
    packages = (*_required(), *_kernel_libraries(), _compiler(), _auto_lirpa())
    backends, trouble = _backends({p.module: p for p in packages})
    problems.extend(trouble)
    usable = {p.module for p in packages if p.usable}
    return Environment(
        version=own,
        python=".".join(map(str, sys.version_info[:3])),
        executable=sys.executable,
        python_problem=_python_problem(sys.version_info[:2]),
        packages=packages,
        backends=backends,
        device=_device() if "torch" in usable else Device("none", "torch cannot be used"),
        problems=tuple(problems),
    )


def _python_problem(running: tuple[int, ...]) -> str | None:
    if running >= PYTHON_MINIMUM:
        return None
    return f"Python {'.'.join(map(str, PYTHON_MINIMUM))} or newer is needed"


def _required() -> tuple[Package, ...]:
    declared = _declared()
    return tuple(
        _package(name, known.module, known.purpose, declared.get(name, name))
        for name, known in PURPOSES.items()
    )


def _declared() -> dict[str, str]:
    """Return normalised name -> requirement ("torch<2.14,>=2.8"), extras left out."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return {}
    plain = [line for line in lines if ";" not in line]
    return {_normalised(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]): line for line in plain}


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _package(name: str, module: str, purpose: str, requirement: str) -> Package:
    try:
        installed = version(name)
    except PackageNotFoundError:
        return Package(
            name, module, purpose, requirement, None, "missing", command=pip_install(requirement)
        )
    problem = _out_of_range(installed, requirement) or (_import_problem(module) if module else None)
    command = None if problem is None else pip_install(requirement)
    return Package(name, module, purpose, requirement, installed, problem, command=command)


def _out_of_range(installed: str, requirement: str) -> str | None:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return None  # reported as a missing package of its own
    wanted = Requirement(requirement).specifier
    return None if wanted.contains(installed, prereleases=True) else f"outside {wanted}"


def _import_problem(module: str) -> str | None:
    """Return why the module does not import, or None. Any failure of foreign code counts."""
    try:
        import_module(module)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return f"does not import: {type(error).__name__}: {first}"
    return None


KERNEL_LIBRARIES: Mapping[str, tuple[str, str]] = {
    "torchao": ("torchao", "kernels torchao.*"),
    "onnxruntime": ("onnxruntime", "kernels onnxruntime.*"),
    "onnxscript": ("onnxruntime", "kernels onnxruntime.*, the export of blocks"),
    "transformers": ("hf", "kernels hf.transformers, the architecture hf"),
    "httpx": ("server", "kernels that ask a server"),
}
"""Distributions (imported by the same name) that kernels need: the extra, and what they run."""


def _kernel_libraries() -> tuple[Package, ...]:
    return tuple(
        replace(
            found,
            module=name,
            required=False,
            command=None if found.problem is None else pip_install(f"{DISTRIBUTION}[{extra}]"),
        )
        for name, (extra, purpose) in KERNEL_LIBRARIES.items()
        for found in (_package(name, "", purpose, _of_extra(name)),)  # slow, and loud, to import
    )


def _of_extra(name: str) -> str:
    """Return the requirement of a distribution that an extra of this one names."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return name
    plain = (line.partition(";")[0].strip() for line in lines if ";" in line)
    return next((line for line in plain if re.split(r"[^\w.-]", line)[0] == name), name)


def _compiler() -> Package:
    """Look for the C++ compiler that torch.compile calls on a CPU."""
    found = next((name for name in COMPILERS if shutil.which(name)), None)
    return Package(
        "C++ compiler",
        "",
        "kernels torch.compile",
        ", ".join(COMPILERS),
        found,
        None if found else "missing",
        required=False,
        command=None if found else "apt-get install g++",
    )


COMPILERS = ("g++", "clang++")


_LIRPA_PURPOSE = "not used yet: no backend calls it"


def _auto_lirpa() -> Package:
    """Look for auto_LiRPA, which no index offers in a version that works with current torch."""
    found = _package("auto_LiRPA", "auto_LiRPA", _LIRPA_PURPOSE, "auto_LiRPA")
    problem = found.problem
    if found.installed is not None and found.installed.startswith(("0.2", "0.3")):
        problem = "releases up to 0.3 do not work with current torch"
    return Package(
        found.name,
        found.module,
        found.purpose,
        ">=0.7, from source",
        found.installed,
        problem,
        required=False,
        command=None if problem is None else AUTO_LIRPA_COMMAND,
    )


AUTO_LIRPA_COMMAND = " && ".join(
    (
        "git clone https://github.com/Verified-Intelligence/auto_LiRPA",
        pip_install("appdirs", "graphviz", "tqdm"),
        pip_install("--no-deps", "./auto_LiRPA"),
    )
)
"""Its set-up pins torch below 2.9, pytest and pylint, which it does not need: hence --no-deps."""


def _backends(packages: Mapping[str, Package]) -> tuple[tuple[Backend, ...], tuple[str, ...]]:
    from kcdsl.route.catalogue import catalogue

    try:
        specs = catalogue()
    except Exception as error:
        return (), (f"the backends cannot be listed: {type(error).__name__}: {error}",)
    if not specs:
        return (), ("no backend is registered (entry-point group kcdsl.backends)",)
    rows = tuple(
        Backend(
            spec.name,
            spec.summary,
            tuple(sorted(spec.fragments)),
            tuple(
                need
                for need in spec.needs
                if need in spec.missing() or (need in packages and not packages[need].usable)
            ),
        )
        for spec in specs
    )
    return rows, ()


def _device() -> Device:
    import torch

    float8 = hasattr(torch, "float8_e4m3fn")
    if not torch.cuda.is_available():
        return Device("cpu", f"{torch.get_num_threads()} threads", float8_storage=float8)
    major, minor = torch.cuda.get_device_capability(0)
    return Device(
        "cuda",
        torch.cuda.get_device_name(0),
        capability=f"{major}.{minor}",
        memory_bytes=int(torch.cuda.get_device_properties(0).total_memory),
        float8_storage=float8,
        float8_products=float8 and (major, minor) >= (8, 9),
    )


def to_json(environment: Environment) -> dict[str, Any]:
    """Return the document `kcdsl.doctor/1`."""
    return {
        "schema": "kcdsl.doctor/1",
        "ready": environment.ready,
        "kcdsl": environment.version,
        "python": {
            "version": environment.python,
            "executable": environment.executable,
            "problem": environment.python_problem,
        },
        "packages": [
            {
                "name": p.name,
                "module": p.module,
                "purpose": p.purpose,
                "required": p.required,
                "requirement": p.requirement,
                "installed": p.installed,
                "problem": p.problem,
                "command": p.command,
            }
            for p in environment.packages
        ],
        "backends": [
            {
                "name": b.name,
                "summary": b.summary,
                "fragments": list(b.fragments),
                "enabled": b.enabled,
                "missing": list(b.missing),
            }
            for b in environment.backends
        ],
        "device": {
            "kind": environment.device.kind,
            "name": environment.device.name,
            "capability": environment.device.capability,
            "memory_bytes": environment.device.memory_bytes,
            "float8_storage": environment.device.float8_storage,
            "float8_products": environment.device.float8_products,
        },
        "problems": list(environment.problems),
        "remedy": environment.remedy,
    }
