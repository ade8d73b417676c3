"""Output files, written atomically."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import INPUT_OUTPUT, KEY_EXISTS


def write_bytes(path: Path, data: bytes, mode: int = 0o644, *, own_name: bool = False) -> None:
    """Write a file atomically, replacing an older one; missing folders are created.

    Raises Refusal where that fails. For `own_name` see `NewFile`.
    """
    make_folder((path if own_name else _led_to(path)).parent)
    write_together([NewFile(path, data, mode, own_name)], replace=True)


def _led_to(path: Path) -> Path:
    """Return the target file of a link; any other path unchanged."""
    if not path.is_symlink() or _takes_data(path):
        return path
    try:
        found = path.resolve()
        if found.is_symlink():  # since Python 3.13 a cycle of links raises nothing
            raise OSError(errno.ELOOP, "a circle of links")
    except (OSError, RuntimeError) as error:
        raise refuse(
            INPUT_OUTPUT,
            f"{path} is a link that leads nowhere",
            help="remove the link, or write to another file",
        ) from error
    return found


def _takes_data(path: Path) -> bool:
    """Return whether a path is a device or a pipe, which must not be replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _pour(path: Path, data: bytes) -> None:
    try:
        with path.open("wb") as stream:
            stream.write(data)
    except OSError as error:
        raise refuse(
            INPUT_OUTPUT,
            f"{path} cannot be written: {error.strerror}",
            help="write to another file, or change the rights of its folder",
        ) from error


def open_to_append(path: Path) -> int:
    """Open a regular file to read and to append; create it if missing.

    Raises OSError for anything else, such as a symbolic link, a file with several hard links, or a
    pipe.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | _flag("O_NOFOLLOW") | _flag("O_NONBLOCK")
    descriptor = os.open(path, flags | _flag("O_BINARY"), 0o644)
    about = os.fstat(descriptor)
    if stat.S_ISREG(about.st_mode) and about.st_nlink == 1 and not path.is_symlink():
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file")


def _flag(name: str) -> int:
    return int(getattr(os, name, 0))


def make_folder(folder: Path) -> None:
    """Create a folder and its parents; raises Refusal where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise refuse(
            INPUT_OUTPUT,
            f"{folder} is a file, not a folder",
            help="name another folder, or move the file away",
        ) from error
    except OSError as error:
        raise refuse(
            INPUT_OUTPUT,
            f"{folder} cannot be made: {error.strerror}",
            help="name another folder, or change the rights of the one above it",
        ) from error


def refuse_folder(folder: Path) -> None:
    """Raise Refusal for a path that cannot become a folder of new files; creates nothing."""
    place = folder.absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise refuse(
            INPUT_OUTPUT,
            f"{place} is a file, not a folder",
            help="write to another folder, or move the file away",
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise refuse(
            INPUT_OUTPUT,
            f"{folder} cannot be written: no right to write in {place}",
            help="write to another folder",
        )


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to be written; it has `mode` from creation on.

    A link or a pipe at a path that the user gave is written through. At a name that the program
    chose (`own_name`) it is replaced, since an untrusted folder may contain one.
    """

    path: Path
    data: bytes
    mode: int
    own_name: bool = False

    @property
    def poured(self) -> bool:
        """Return whether the data is written to a device or a pipe."""
        return not self.own_name and _takes_data(self.path)


def result(path: Path, data: bytes) -> NewFile:
    """Return a result file with a name that the program chose."""
    return NewFile(path, data, 0o644, own_name=True)


def write_together(files: Sequence[NewFile], *, replace: bool) -> None:
    """Write several files, all of them or none; raises Refusal.

    At a path that the user gave, the target of a link is written, and a device or a pipe gets the
    data directly. Without `replace`, an existing file is refused and not changed.
    """
    if replace:
        files = [f if f.own_name else replaced(f, path=_led_to(f.path)) for f in files]
    temporaries: list[Path] = []
    created: list[Path] = []
    refuse_targets([file.path for file in files])
    poured = [file for file in files if replace and file.poured]
    files = [file for file in files if not (replace and file.poured)]
    try:
        for file in files:
            temporaries.append(_write_temporary(file))
        for file in poured:
            _pour(file.path, file.data)
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
        raise refuse(
            INPUT_OUTPUT,
            f"{names} cannot be written: {error.strerror}",
            help="write to another folder, or free some space",
        ) from error
    finally:
        _remove(temporaries)


def refuse_targets(paths: Sequence[Path], made: Sequence[Path] = ()) -> None:
    """Raise Refusal for a path that cannot become a file, or occurs twice; the folders `made` need
    not exist yet."""
    taken: set[Path] = set()
    for path in paths:
        if path.is_dir():
            help = f"name a file in {path}"
            raise refuse(INPUT_OUTPUT, f"{path} is a folder, not a file", help=help)
        if not path.parent.is_dir() and path.parent.absolute() not in {p.absolute() for p in made}:
            raise refuse(
                INPUT_OUTPUT,
                f"there is no folder {path.parent}",
                help="make the folder first, or name another file",
            )
        if path.resolve() in taken and not _takes_data(path):
            raise refuse(INPUT_OUTPUT, f"{path} is to be written twice", help="name another file")
        taken.add(path.resolve())


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
