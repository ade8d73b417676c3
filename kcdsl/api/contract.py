"""The contract of a command: locating and compiling it, and permission to run its code."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import reduce
from numbers import Integral, Real
from operator import or_
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypedDict, get_args, get_origin, get_type_hints

from kcdsl.api.results import TableResult
from kcdsl.diagnostics import Refusal, Suppressed, refuse
from kcdsl.diagnostics.codes import FOREIGN_CODE, NO_CONTRACT, SEVERAL_CONTRACTS, USAGE
from kcdsl.diagnostics.model import at
from kcdsl.source.config import load_config, user_file
from kcdsl.source.files import in_contract, missing, open_regular, read_source, shown

if TYPE_CHECKING:
    from typing import Unpack

    from kcdsl.api.evaluation import Evaluation
    from kcdsl.api.verification import Verification
    from kcdsl.ir.terms import Clause, Program

_LIBRARY = re.compile(rb"^library[ \t]*:", re.MULTILINE)


class VerifyOptions(TypedDict, total=False):
    """Keyword arguments of `Contract.verify`: the options of `kcdsl verify`."""

    backend: str | None
    backend_seconds: float
    domains: str | None
    states: str | None
    weights: str | None
    alpha: str | None
    attack: bool
    chain: bool
    confirm: bool
    device: str
    engine: str
    jobs: int | None
    threads: int | None
    time_limit: float | None
    cache: PathLike | None
    output: PathLike | None
    sign: PathLike | Sequence[PathLike]
    stage: str
    lifetime: timedelta
    allow_code: bool


class EvaluateOptions(TypedDict, total=False):
    """Keyword arguments of `Contract.evaluate`: the options of `kcdsl evaluate`."""

    device: str
    seed: int
    seconds: float
    bound_seconds: float
    fresh: bool
    looks: int | None
    jobs: int | None
    engine: str
    output: PathLike | None
    sign: PathLike | Sequence[PathLike]
    stage: str
    lifetime: timedelta
    allow_code: bool


PathLike = str | os.PathLike[str]
_LEAST = {"looks": 1, "jobs": 1, "threads": 1}
_LARGEST = 2**63 - 1
_DEVICES = ("auto", "cpu", "cuda")
_TEXT, _PATH = "text, as on the command line", "a path"
_NEEDED: dict[Any, str] = {
    bool: "True or False",
    float: "a number of seconds, from 0 on",
    str: _TEXT,
    PathLike: _PATH,
    Sequence[str]: f"{_TEXT}, or several",
    Sequence[PathLike]: f"{_PATH}, or several",
    timedelta: "a datetime.timedelta, such as timedelta(days=90)",
}
"""The values that an option takes, in words, by its type."""


def refuse_values(settings: Any) -> None:
    """Raise Refusal for an invalid value of settings, a dataclass, by the name of the option; the
    command line checks its own arguments."""
    from kcdsl.route.catalogue import ENGINES
    from kcdsl_certs.statement import STAGES

    choices = {"device": _DEVICES, "engine": ENGINES, "stage": STAGES}
    for name, stated in get_type_hints(type(settings)).items():
        value, kinds = getattr(settings, name), get_args(stated)
        if NoneType in kinds:
            if value is None:
                continue
            stated = reduce(or_, (kind for kind in kinds if kind is not NoneType))
        least = _LEAST.get(name, 0)
        needed = f"a whole number from {least} on" if stated is int else _NEEDED.get(stated)
        if needed is not None and not _fits(stated, value, least):
            raise refuse(USAGE, f"{name} is {value!r}", help=needed)
        allowed = choices.get(name)
        if allowed is not None and value not in allowed:
            raise refuse(USAGE, f"{name} is {value!r}", help=f"allowed: {', '.join(allowed)}")


def _fits(kind: Any, value: Any, least: int) -> bool:
    """Return whether a value has a type of `_NEEDED`, or is a whole number from `least` on."""
    if get_origin(kind) is Sequence:
        (inner,) = get_args(kind)
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        return listed and all(_fits(inner, each, least) for each in value)
    if kind in (int, float):
        number = Integral if kind is int else Real
        real = isinstance(value, number) and not isinstance(value, bool)
        return real and (least <= value <= _LARGEST if kind is int else 0 <= value < math.inf)
    return isinstance(value, str | os.PathLike if kind == PathLike else kind)


@dataclass(frozen=True, slots=True, repr=False)
class Contract(TableResult):
    """A contract that was found and compiled, with its accepted findings."""

    path: Path
    program: Program
    accepted: tuple[Suppressed, ...]
    source: str
    """The sha256 (hex) of the text that was compiled, in UTF-8."""

    @property
    def says(self) -> str:
        """Return its name, its version and its file."""
        return f"{self.program.name} {self.program.version}, {self.path}"

    @property
    def base(self) -> Path:
        """Return the folder for its relative paths."""
        return self.path.resolve().parent

    @property
    def clauses(self) -> tuple[Clause, ...]:
        """Return the clauses, in the order of the contract."""
        return self.program.clauses

    def verify(
        self,
        block: str | Sequence[str] = (),
        *,
        clause: str | Sequence[str] = (),
        **options: Unpack[VerifyOptions],
    ) -> Verification:
        """Decide the clauses about every input of a region, only those of the given blocks or
        clauses if any, and write a certificate or its statement. Raises Refusal."""
        from kcdsl.api.verification import VerifySettings, verify

        given: dict[str, Any] = {**options, "sign": several(options.get("sign", ()))}
        return verify(self, VerifySettings(blocks=several(block), clauses=several(clause), **given))

    def evaluate(
        self, slices: str | Sequence[str] = (), **options: Unpack[EvaluateOptions]
    ) -> Evaluation:
        """Run both kernels on the slices and decide the measured clauses; write report, traces and
        the certificate or its statement. Raises Refusal."""
        from kcdsl.api.evaluation import EvaluateSettings, evaluate

        given: dict[str, Any] = {**options, "sign": several(options.get("sign", ()))}
        return evaluate(self, EvaluateSettings(slices=several(slices), **given))

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each clause."""
        from kcdsl.ir.printer import formula_text

        return [
            {
                "clause": clause.id,
                "level": clause.level.value,
                "family": clause.family.value,
                "slices": ", ".join(clause.slices),
                "requirement": formula_text(clause.require),
            }
            for clause in self.clauses
        ]


def several(given: Any) -> tuple[Any, ...]:
    """Return the values of an option that takes one value or several."""
    if isinstance(given, str | os.PathLike) or not isinstance(given, Iterable):
        return (given,)
    return tuple(given)


def load(path: PathLike | None = None) -> Contract:
    """Return the contract of a file or of a folder with one contract; by default that of the
    current folder, as commands find it. Raises Refusal with the diagnostics."""
    if not isinstance(path, str | os.PathLike | None):
        raise refuse(USAGE, f"the contract is {path!r}", help=_PATH)
    return read_contract(None if path is None else os.fspath(path))


def read_contract(given: str | None) -> Contract:
    """Find a contract and compile it; raises Refusal."""
    import hashlib

    from kcdsl.check.compile import contract_of

    path = find_contract(given, Path())
    source = read_source(path)
    program, accepted = contract_of(path, source)
    digest = hashlib.sha256(source.text.encode("utf-8")).hexdigest()
    return Contract(path, program, tuple(accepted), digest)


def find_contract(given: str | None, start: Path) -> Path:
    """Return the path of the contract.

    It is `given`, else `contract` of the configuration of `start`, else the only contract.yaml or
    *.kc.yaml in `start`.
    Raises Refusal where there is none, where there are several, or where the file is missing.
    """
    if given is not None:
        return _existing(Path(given), origin=None)
    configured = _configured(start)
    if configured is not None:
        return configured
    found = _in_folder(start)
    if len(found) == 1:
        return found[0]
    help = "name the contract on the command line"
    if found:
        names = ", ".join(path.name for path in found)
        raise refuse(SEVERAL_CONTRACTS, f"{start} holds several contracts: {names}", help=help)
    message = f"no contract.yaml or *.kc.yaml in {start}, and no [tool.kcdsl] contract above it"
    raise refuse(NO_CONTRACT, message, help=f"{help}; `kcdsl init` drafts one")


def contracts_in(
    given: Sequence[str], start: Path, exclude: Sequence[str] = (), base: Path | None = None
) -> list[Path]:
    """Return the files of a command: the given files, the contracts below each given folder,
    sorted, or the only contract of `start` by default.

    `exclude` has shell patterns of files in folders to skip: a pattern with `/` matches paths
    relative to `base`, any other one each part of a path. `*` matches `/` too.
    Raises Refusal for a missing file, a folder without contracts, and a link that leads out of a
    folder.
    """
    if not given:
        return [_the_one(start)]
    found: dict[Path, None] = {}
    for name in given:
        path = Path(name)
        if not path.is_dir():
            found[_existing(path, origin=None)] = None
            continue
        inside = sorted(
            p
            for p in path.rglob("*")
            if _is_contract(p) and not _hidden(p, path) and not _excluded(p, exclude, base or start)
        )
        if not inside:
            message = f"no contract.yaml or *.kc.yaml below {name}"
            raise refuse(NO_CONTRACT, message, help="name a file, or another folder")
        for link in filter(Path.is_symlink, inside):
            _refuse_elsewhere(link, path)
        found.update(dict.fromkeys(inside))
    return list(found)


def results_folder(given: PathLike | None, contract: Path, *inner: str) -> Path:
    """Return the folder for the results of a contract: the given one, else `out` beside it.

    The default must lie below the contract's folder or an allowed folder: raises Refusal for a link
    that leads elsewhere.
    """
    if given:
        return Path(given)
    folder = contract.parent.joinpath("out", *inner)
    _refuse_elsewhere(folder, contract.parent)
    return folder


def _refuse_elsewhere(path: Path, folder: Path) -> None:
    """Refuse a path in a folder that leads out of it."""
    from kcdsl.model.files import Artefacts

    Artefacts.of(folder).admitted(path, str(path))


def _the_one(start: Path) -> Path:
    try:
        return find_contract(None, start)
    except Refusal as refusal:
        (problem,) = refusal.diagnostics
        if problem.code != SEVERAL_CONTRACTS:
            raise
        raise Refusal(replace(problem, help="name one of them, or `.` for all")) from refusal


def _excluded(path: Path, patterns: Sequence[str], base: Path) -> bool:
    if not patterns:
        return False
    whole = Path(os.path.relpath(path.resolve(), base.resolve()))
    ways = [step.as_posix() for step in (whole, *whole.parents)]
    return any(
        any(fnmatchcase(way, pattern.strip("/")) for way in ways)
        if "/" in pattern
        else any(fnmatchcase(part, pattern) for part in whole.parts)
        for pattern in patterns
    )


def _hidden(path: Path, below: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(below).parts)


def _is_contract(path: Path) -> bool:
    named = path.name == "contract.yaml" or path.name.endswith((".kc.yaml", ".kc.yml"))
    return named and path.is_file()


def _in_folder(folder: Path) -> list[Path]:
    """Return the contracts in a folder; its libraries if there are no contracts."""
    if not folder.is_dir():
        return []
    found = sorted(filter(_is_contract, folder.iterdir()))
    for link in filter(Path.is_symlink, found):
        _refuse_elsewhere(link, folder)
    if len(found) < 2:
        return found
    return [path for path in found if not _is_library(path)] or found


def _is_library(path: Path) -> bool:
    try:
        with open_regular(path) as stream:
            return _LIBRARY.search(stream.read(2**16)) is not None
    except OSError:
        return False


def _existing(path: Path, origin: str | None) -> Path:
    if path.is_file():
        return path
    notes = (f"named in {origin}",) if origin is not None else ()
    if path.is_dir():
        found = _in_folder(path)
        if len(found) == 1:
            return found[0]
        raise refuse(
            NO_CONTRACT if not found else SEVERAL_CONTRACTS,
            f"{path} is a folder with {len(found) or 'no'} contracts",
            help="name the contract file",
            notes=notes,
        )
    raise missing(path, notes)


def _configured(start: Path) -> Path | None:
    config = load_config(start)
    if config.contract is None:
        return None
    origin = config.origin("contract")
    path = shown(origin.folder / config.contract)
    if config.file is not None and origin.source is config.file:
        _refuse_elsewhere(path, origin.folder)
    return _existing(path, origin=origin.where)


# --- code that a contract brings along -----------------------------------------------------------


def refuse_foreign_code(contract: Contract, *, allowed: bool, metrics: bool = True) -> None:
    """Raise Refusal where a command would run code of a contract without permission.

    A contract has Python code in two places: the factory of its model, and its own metrics.
    `allowed` is the value of `--allow-code`. Without `metrics` the command runs only the model.
    """
    if allowed:
        return
    program, base = contract.program, contract.base
    named = [] if program.model.module is None else [(program.model.module, base)]
    if metrics and program.metrics:
        from kcdsl.check.user_metrics import configured_functions

        folders = configured_functions(base)
        functions = [metric.function for metric in program.metrics]
        named += [(name, folders[name]) for name in functions if name in folders]
    if not named:
        return
    config = load_config(base)
    origin = config.origin("trusted-folders")
    trusted = [(origin.folder / Path(f).expanduser()).resolve() for f in config.trusted_folders]
    unknown = [
        name
        for name, folder in named
        if not all(any(f.is_relative_to(t) for t in trusted) for f in (base, folder))
    ]
    if not unknown:
        return
    listed = ", ".join(unknown[:3]) + (" and others" if len(unknown) > 3 else "")
    mine = user_file()
    where = f", or list the folder in `trusted-folders` of {mine}" if mine is not None else ""
    with in_contract(contract.path), at(program.model.span):
        raise refuse(
            FOREIGN_CODE,
            f"the contract names Python code that would run with your rights: {listed}",
            help=f"read the code; then pass --allow-code{where}",
        )
