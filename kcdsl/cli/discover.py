"""Find the contract that a command is about."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import (
    BAD_CONFIGURATION,
    FILE_MISSING,
    NO_CONTRACT,
    SEVERAL_CONTRACTS,
)


def find_contract(given: str | None, start: Path) -> Path:
    """Return the path of the contract.

    `given` wins; then `[tool.kcdsl] contract` of the nearest pyproject.toml, or `contract` of the
    nearest kcdsl.toml, upwards from `start`; then the only contract.yaml or *.kc.yaml in `start`.
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


def _in_folder(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and (path.name == "contract.yaml" or path.name.endswith((".kc.yaml", ".kc.yml")))
    )


def _existing(path: Path, origin: Path | None) -> Path:
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
    raise refuse(FILE_MISSING, f"there is no file {path}", notes=notes)


def _configured(start: Path) -> Path | None:
    for folder in (start.resolve(), *start.resolve().parents):
        for name, section in (("kcdsl.toml", ()), ("pyproject.toml", ("tool", "kcdsl"))):
            file = folder / name
            if not file.is_file():
                continue
            table: Any = _toml(file)
            for key in section:
                table = table.get(key) if isinstance(table, dict) else None
            if table is None:
                continue
            if not isinstance(table, dict):
                raise refuse(BAD_CONFIGURATION, f"{file}: the kcdsl section is not a table")
            contract = table.get("contract")
            if contract is None:
                continue
            if not isinstance(contract, str):
                raise refuse(BAD_CONFIGURATION, f"{file}: `contract` is not a text")
            return _existing(folder / contract, origin=file)
    return None


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise refuse(BAD_CONFIGURATION, f"{file} is not valid TOML: {error}") from error
    except OSError as error:
        raise refuse(FILE_MISSING, f"{file} cannot be read: {error.strerror}") from error
