"""Writing files that are either complete or not there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import INPUT_OUTPUT, KEY_EXISTS


def write_bytes(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file in one step, replacing an older one; missing folders are made.

    A link stays, and what it leads to is written; a device or a pipe takes the data as it is.
    Raises Refusal where that fails.
    """
    target = _led_to(path)
    if target.exists() and not target.is_file() and not target.is_dir():
        _pour(target, data)
        return
    make_folder(target.parent)
    write_together([NewFile(target, data, mode)], replace=True)


def _led_to(path: Path) -> Path:
    """Return what a link leads to; a path that is none as it is."""
    try:
        return path.resolve() if path.is_symlink() else path
    except (OSError, RuntimeError) as error:
        raise refuse(INPUT_OUTPUT, f"{path} is a link that leads nowhere") from error


def _pour(path: Path, data: bytes) -> None:
    try:
        with path.open("wb") as stream:
            stream.write(data)
    except OSError as error:
        raise refuse(INPUT_OUTPUT, f"{path} cannot be written: {error.strerror}") from error


def make_folder(folder: Path) -> None:
    """Make a folder and what is above it; raises Refusal where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise refuse(INPUT_OUTPUT, f"{folder} is a file, not a folder") from error
    except OSError as error:
        raise refuse(INPUT_OUTPUT, f"{folder} cannot be made: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to be written; `mode` holds from its first byte on."""

    path: Path
    data: bytes
    mode: int


def write_together(files: Sequence[NewFile], *, replace: bool) -> None:
    """Write several files, all of them or none; raises Refusal.

    Without `replace`, a file that is already there is left as it is and refused.
    """
    temporaries: list[Path] = []
    created: list[Path] = []
    for file in files:
        _refuse_target(file.path)
    try:
        for file in files:
            temporaries.append(_write_temporary(file))
        for file, temporary in zip(files, temporaries, strict=True):
            if replace:
                os.replace(temporary, file.path)
            else:
                os.link(temporary, file.path)
                created.append(file.path)
    except FileExistsError as error:
        _remove(created)
        taken = error.filename2 or error.filename
        raise refuse(
            KEY_EXISTS,
            f"{taken} is already there",
            help="choose another name with -o, or replace it with --force",
        ) from error
    except OSError as error:
        _remove(created)
        names = " and ".join(str(file.path) for file in files)
        raise refuse(INPUT_OUTPUT, f"{names} cannot be written: {error.strerror}") from error
    finally:
        _remove(temporaries)


def _refuse_target(path: Path) -> None:
    if path.is_dir():
        raise refuse(INPUT_OUTPUT, f"{path} is a folder, not a file", help=f"name a file in {path}")
    if not path.parent.is_dir():
        raise refuse(INPUT_OUTPUT, f"there is no folder {path.parent}")


def _write_temporary(file: NewFile) -> Path:
    temporary = file.path.with_name(f".{file.path.name}.{secrets.token_hex(6)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file.mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(file.data)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
