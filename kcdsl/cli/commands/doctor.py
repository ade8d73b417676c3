"""`kcdsl doctor` and `kcdsl backends`: what is installed, what that enables, and what is missing.

Packages are imported here, one by one and inside a function, because an installed package whose
import fails counts as missing.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from kcdsl.cli.common import Command
from kcdsl.cli.common.options import OutputFormat, format_option
from kcdsl.cli.common.output import print_json
from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.exits import Exit

DISTRIBUTION = "kcdsl"
PYTHON_MINIMUM = (3, 11)
COMPILERS = ("g++", "clang++")

PURPOSES: Mapping[str, tuple[str, str]] = {
    "alembic": ("alembic", "registers of certificates: their tables"),
    "cryptography": ("cryptography", "keygen, signatures, check"),
    "duckdb": ("duckdb", "tables of tokens, recorded runs"),
    "jinja2": ("jinja2", "the HTML report, chat templates"),
    "lark": ("lark", "expressions of contracts"),
    "numpy": ("numpy", "block graphs, interval backend, check --recheck"),
    "onnx": ("onnx", "kernels onnxruntime.*: the exported program"),
    "packaging": ("packaging", "version ranges in this report"),
    "pyarrow": ("pyarrow", "traces: Parquet files"),
    "pyyaml": ("yaml", "contracts"),
    "rfc8785": ("rfc8785", "canonical JSON: digests, certificates"),
    "rich": ("rich", "tables and progress"),
    "safetensors": ("safetensors", "checkpoints"),
    "scipy": ("scipy", "confidence limits, error function"),
    "sqlalchemy": ("sqlalchemy", "registers of certificates"),
    "threadpoolctl": ("threadpoolctl", "processes that divide rows of large blocks"),
    "tokenizers": ("tokenizers", "prompts of published models"),
    "torch": ("torch", "reference and inference kernels, tracing of blocks"),
    "z3-solver": ("z3", "consistency, implied clauses"),
}
"""Every run-time requirement of pyproject.toml, by its normalised name (a test compares them): what
it is imported as, and what it is there for."""
EXTRAS: Mapping[str, tuple[str, str]] = {
    "torchao": ("torchao", "kernels torchao.*"),
    "onnxruntime": ("onnxruntime", "kernels onnxruntime.*"),
    "onnxscript": ("onnxruntime", "kernels onnxruntime.*, the export of blocks"),
    "transformers": ("hf", "kernels hf.transformers, the architecture hf"),
    "httpx": ("server", "kernels that ask a server"),
    "maraboupy": ("marabou", "the backend marabou"),
    "pandas": ("pandas", "results as data frames"),
    "psycopg": ("postgres", "registers in PostgreSQL"),
}
"""Distributions (imported by the same name) of extras: the extra, and what they are there for."""
LIRPA = ("auto_LiRPA", "0.3", "the backend lirpa, a second opinion")
"""It is installed without its requirements, which demand outdated versions."""


# --- what was found ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Package:
    """The state of one distribution. `problem` is None where it can be used."""

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
        """Return whether the package is there, in range, and imports."""
        return self.problem is None


@dataclass(frozen=True, slots=True)
class Backend:
    """One backend of the catalogue and the reasons why it cannot run."""

    name: str
    summary: str
    fragments: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def enabled(self) -> bool:
        """Return whether everything the backend needs can be used."""
        return not self.missing


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """The device on which `evaluate` would run."""

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
    device: DeviceReport
    problems: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        """Return whether compile, verify, evaluate and check can run."""
        return (
            not self.problems
            and self.python_problem is None
            and all(p.usable for p in self.packages if p.required)
            and any(b.enabled for b in self.backends)  # others may lack optional packages
        )

    @property
    def remedy(self) -> str | None:
        """Return the one command that installs what is missing, or None."""
        wanted = tuple(p.requirement for p in self.packages if p.required and not p.usable)
        return pip_install(*wanted) if wanted else None


def to_json(found: Environment) -> dict[str, Any]:
    """Return the document `kcdsl.doctor/1`."""
    return {
        "schema": "kcdsl.doctor/1",
        "ready": found.ready,
        "kcdsl": found.version,
        "python": {
            "version": found.python,
            "executable": found.executable,
            "problem": found.python_problem,
        },
        "packages": [asdict(package) for package in found.packages],
        "backends": [
            {
                "name": b.name,
                "summary": b.summary,
                "fragments": [str(fragment) for fragment in b.fragments],
                "enabled": b.enabled,
                "missing": list(b.missing),
            }
            for b in found.backends
        ],
        "device": asdict(found.device),
        "problems": list(found.problems),
        "remedy": found.remedy,
    }


# --- looking -------------------------------------------------------------------------------------


def pip_install(*words: str) -> str:
    """Return the command line that installs `words` into the environment of this interpreter."""
    return shlex.join([sys.executable, "-m", "pip", "install", *words])


def examine() -> Environment:
    """Examine this interpreter, its packages, the backends and the device."""
    problems: list[str] = []
    try:
        own: str | None = version(DISTRIBUTION)
    except PackageNotFoundError:
        own = None
        problems.append(
            "kcdsl is importable but not installed, so its backends are not registered; in the"
            f" checkout run: {pip_install('-e', '.')}"
        )
    packages = (*_required(), *_of_extras(), _lirpa(), _compiler())
    backends, trouble = _backends({p.module: p for p in packages})
    usable = {p.module for p in packages if p.usable}
    return Environment(
        version=own,
        python=".".join(map(str, sys.version_info[:3])),
        executable=sys.executable,
        python_problem=_python_problem(sys.version_info[:2]),
        packages=packages,
        backends=backends,
        device=_device() if "torch" in usable else DeviceReport("none", "torch cannot be used"),
        problems=(*problems, *trouble),
    )


def _python_problem(running: tuple[int, ...]) -> str | None:
    if running >= PYTHON_MINIMUM:
        return None
    return f"Python {'.'.join(map(str, PYTHON_MINIMUM))} or newer is needed"


def _declared(*, extras: bool) -> dict[str, str]:
    """Return normalised name -> requirement ("torch<2.14,>=2.8"), of the extras or of the rest."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return {}
    plain = [line.partition(";")[0].strip() for line in lines if (";" in line) is extras]
    return {_normalised(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]): line for line in plain}


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _required() -> Iterator[Package]:
    declared = _declared(extras=False)
    for name, (module, purpose) in PURPOSES.items():
        yield _package(name, module, purpose, declared.get(name, name))


def _of_extras() -> Iterator[Package]:
    declared = _declared(extras=True)
    for name, (extra, purpose) in EXTRAS.items():
        found = _package(name, "", purpose, declared.get(name, name))  # slow, and loud, to import
        command = None if found.usable else pip_install(f"{DISTRIBUTION}[{extra}]")
        yield replace(found, module=name, required=False, command=command)


def _lirpa() -> Package:
    name, wanted, purpose = LIRPA
    found = _package(name, "", purpose, name)  # slow to import
    commands = (
        pip_install(f"{DISTRIBUTION}[lirpa]"),
        pip_install("--no-deps", f"{name}=={wanted}"),
    )
    command = None if found.usable else " && ".join(commands)
    return replace(found, module=name, required=False, command=command)


def _package(name: str, module: str, purpose: str, requirement: str) -> Package:
    problem, installed = None, None
    try:
        installed = version(name)
    except PackageNotFoundError:
        problem = "missing"
    else:
        problem = _out_of_range(installed, requirement) or _import_problem(module)
    command = None if problem is None else pip_install(requirement)
    return Package(name, module, purpose, requirement, installed, problem, command=command)


def _out_of_range(installed: str, requirement: str) -> str | None:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return None  # reported as a separate missing package
    wanted = Requirement(requirement).specifier
    return None if wanted.contains(installed, prereleases=True) else f"outside {wanted}"


def _import_problem(module: str) -> str | None:
    """Return why a module does not import, or None. Any failure of foreign code counts."""
    if not module:
        return None
    try:
        import_module(module)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return f"does not import: {type(error).__name__}: {first}"
    return None


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


def _backends(packages: Mapping[str, Package]) -> tuple[tuple[Backend, ...], tuple[str, ...]]:
    from kcdsl.route.catalogue import catalogue

    try:
        specs = catalogue()
    except Exception as error:
        return (), (f"the backends cannot be listed: {type(error).__name__}: {error}",)
    if not specs:
        return (), ("no backend is registered (entry-point group kcdsl.backends)",)
    unusable = {module for module, package in packages.items() if not package.usable}
    rows = tuple(
        Backend(
            spec.name,
            spec.summary,
            tuple(sorted(spec.fragments)),
            tuple(need for need in spec.needs if need in spec.missing() or need in unusable),
        )
        for spec in specs
        if not spec.fault
    )
    return rows, tuple(spec.fault for spec in specs if spec.fault)


def _device() -> DeviceReport:
    import torch

    float8 = hasattr(torch, "float8_e4m3fn")
    if not torch.cuda.is_available():
        return DeviceReport("cpu", f"{torch.get_num_threads()} threads", float8_storage=float8)
    major, minor = torch.cuda.get_device_capability(0)
    return DeviceReport(
        "cuda",
        torch.cuda.get_device_name(0),
        capability=f"{major}.{minor}",
        memory_bytes=int(torch.cuda.get_device_properties(0).total_memory),
        float8_storage=float8,
        float8_products=float8 and (major, minor) >= (8, 9),
    )


# --- showing -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DoctorCommand(Command):
    """Show what is installed, which backends it enables, and how to install what is missing."""

    format: OutputFormat = format_option()

    def run(self) -> Exit:
        """Print the report; 0 where compile, verify, evaluate and check can run, else 2."""
        found = examine()
        if self.format is OutputFormat.JSON:
            print_json(to_json(found))
        else:
            _print(found)
        return Exit.HELD if found.ready else Exit.COULD_NOT_RUN


def _print(found: Environment) -> None:
    packages = [_package_row(package) for package in found.packages]
    backends = [_backend_row(backend) for backend in found.backends]
    own = found.version or "(not installed)"
    headline = f"kcdsl {own}, Python {found.python} ({found.executable})"
    try:
        from rich import box
        from rich.text import Text

        from kcdsl.verdict.text.console import print_on, table
    except ImportError:  # the command must work without rich
        print("\n".join([headline, *("  ".join(row) for row in (*packages, *backends))]))
    else:
        print_on(sys.stdout, Text(headline))
        for title, columns, rows in (
            ("packages", ("package", "installed", "range", "for", "state"), packages),
            ("backends", ("backend", "decides", "state"), backends),
        ):
            styled = (
                (*cells, Text(state, style="green" if state == "ok" else "yellow"))
                for *cells, state in rows
            )
            how = {"padding": (0, 1), "header_style": "table.header"}
            print_on(sys.stdout, table(columns, styled, title, box=box.SIMPLE_HEAD, **how))
    for line in (*_device_lines(found.device), *_advice(found)):
        print(line)  # commands are not wrapped, so that they can be copied


def _package_row(package: Package) -> tuple[str, ...]:
    wanted = package.requirement.removeprefix(package.name).strip()
    state = package.problem or "ok"
    if package.problem is not None and not package.required:
        state = f"optional, {state}"
    return (package.name, package.installed or "-", wanted or "any", package.purpose, state)


def _backend_row(backend: Backend) -> tuple[str, ...]:
    state = "ok" if backend.enabled else f"needs {', '.join(backend.missing)}"
    return (backend.name, ", ".join(backend.fragments), state)


def _device_lines(device: DeviceReport) -> Iterator[str]:
    match device.kind:
        case "cuda":
            size = f"{(device.memory_bytes or 0) / 2**30:.0f} GiB"
            yield f"device: CUDA, {device.name}, {size}, compute capability {device.capability}"
        case "cpu":
            yield f"device: CPU, {device.name}; no CUDA device is visible to torch"
        case _:
            yield f"device: none; {device.name}"
            return
    storage = "can be stored" if device.float8_storage else "unknown to this torch"
    products = "run on the device" if device.float8_products else "are computed after conversion"
    yield f"float8: {storage}; products of float8 operands {products}"


def _advice(found: Environment) -> Iterator[str]:
    if found.python_problem is not None:
        yield f"problem: {found.python_problem}"
    for problem in found.problems:
        yield f"problem: {problem}"
    for package in found.packages:
        if package.required and not package.usable:
            yield f"problem: {package.name}: {package.problem} ({package.purpose})"
    if found.remedy is not None:
        yield f"run: {found.remedy}"
    for package in found.packages:
        if not package.required and package.command is not None:
            yield f"optional {package.name} ({package.purpose}): {package.command}"
    if found.ready:
        yield "compile, verify, evaluate and check can run."
    else:
        yield "not all of compile, verify, evaluate and check can run; each problem says what for."


# --- backends ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BackendsCommand(Command):
    """List the backends, what they decide and what they lack."""

    format: OutputFormat = format_option()

    def run(self) -> Exit:
        """Print the catalogue; nothing heavy is imported."""
        from kcdsl.route.catalogue import catalogue

        specs = catalogue()
        if self.format is OutputFormat.JSON:
            records = [
                {
                    "name": spec.name,
                    "summary": spec.summary,
                    "fragments": sorted(fragment.value for fragment in spec.fragments),
                    "needs": list(spec.needs),
                    "missing": list(spec.missing()),
                    "rank": spec.rank,
                    **({"fault": spec.fault} if spec.fault else {}),
                }
                for spec in specs
            ]
            print_json({"schema": "kcdsl.backends/1", "backends": records})
            return Exit.HELD
        for spec in specs:
            if spec.fault:
                print(one_line(spec.fault))
                continue
            missing = spec.missing()
            state = f"lacks {', '.join(missing)}" if missing else "ready"
            print(f"{spec.name}  ({state})")
            print(f"  {spec.summary}")
            print(f"  decides {', '.join(sorted(f.value for f in spec.fragments))}")
        return Exit.HELD
