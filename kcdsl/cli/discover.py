"""Find the contract that a command is about."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kcdsl.config import load_config, shown
from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import (
    NO_CONTRACT,
    SEVERAL_CONTRACTS,
)
from kcdsl.source.files import missing, open_regular


def find_contract(given: str | None, start: Path) -> Path:
    """Return the path of the contract.

    `given` wins; then `contract` of the configuration of `start` (see `kcdsl.config`); then the
    only contract.yaml or *.kc.yaml in `start`.
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
    if found:
        names = ", ".join(path.name for path in found)
        raise refuse(
            SEVERAL_CONTRACTS,
            f"{start} holds several contracts: {names}",
            help="name the contract on the command line",
        )
    raise refuse(
        NO_CONTRACT,
        f"no contract.yaml or *.kc.yaml in {start}, and no [tool.kcdsl] contract above it",
        help="name the contract on the command line",
    )


def results_folder(given: str | None, contract: Path, *inner: str) -> Path:
    """Return the folder for the results of a contract: the one given, else `out` beside it.

    What was not given lies below the contract's folder, or where the user allows it: raises Refusal
    for a link that leads elsewhere.
    """
    if given:
        return Path(given)
    folder = contract.parent.joinpath("out", *inner)
    _refuse_elsewhere(folder, contract.parent)
    return folder


def _refuse_elsewhere(path: Path, folder: Path) -> None:
    """Refuse a path that was found in a folder, and lies or leads elsewhere."""
    from kcdsl.model.files import Artefacts

    Artefacts.of(folder).admitted(path, str(path))


_LIBRARY = re.compile(rb"^library[ \t]*:", re.MULTILINE)


def contracts_in(
    given: Sequence[str], start: Path, exclude: Sequence[str] = (), base: Path | None = None
) -> list[Path]:
    """Return the files that a command is about: those given, the contracts below each folder
    given, sorted, or the one contract of `start` where nothing is given.

    `exclude` leaves files out of folders, by patterns as shells have them: those with `/` fit paths
    from `base` on, the others any name on the way. `*` fits `/` too.
    Raises Refusal for a file that is missing, a folder that holds no contract, and a link in it
    that leads out of it.
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
            raise refuse(
                NO_CONTRACT,
                f"no contract.yaml or *.kc.yaml below {name}",
                help="name a file, or another folder",
            )
        for link in filter(Path.is_symlink, inside):
            _refuse_elsewhere(link, path)
        found.update(dict.fromkeys(inside))
    return list(found)


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
    from fnmatch import fnmatchcase

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
    """Return the contracts in a folder; its libraries where there is nothing else."""
    if not folder.is_dir():
        return []
    found = sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and (path.name == "contract.yaml" or path.name.endswith((".kc.yaml", ".kc.yml")))
    )
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
