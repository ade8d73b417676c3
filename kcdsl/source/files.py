"""Reading text files without normalisation: offsets in the text are offsets in the file."""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

from kcdsl.diagnostics.codes import FILE_MISSING, INPUT_OUTPUT, NOT_UTF8, TOO_LARGE
from kcdsl.diagnostics.model import Diagnostic, Refusal, refuse
from kcdsl.diagnostics.report import Suggestion, did_you_mean
from kcdsl.diagnostics.spans import SourceFile, Span

SIZE_LIMIT = 2**20
"""Largest contract in bytes; reviewable contracts are a hundred times smaller."""


MARK = "\ufeff"
"""The byte order mark that some editors and shells write."""
MARKED = "the file begins with a byte order mark, and JSON does not"
"""The message for a JSON file that begins with `MARK`."""
UNMARKED = "save the file as UTF-8 without a byte order mark"
"""The help for it."""
SETTLED = 2_000_000_000
"""Nanoseconds after which a further change of a file changes its times, on any file system."""
_LONGEST_NAME = 255
_LISTED = 4
_NEIGHBOURS = 1000
"""The largest number of files of a folder considered for a suggestion."""


def user_place(
    variable: str, *below: str, environment: Mapping[str, str] = os.environ
) -> Path | None:
    """Return the folder that an XDG variable names, else one below the user's home.

    None where there is no such folder or only a relative one, which would be below the current
    folder and so possibly not the user's.
    """
    given = Path(environment.get(variable, ""))
    if given.is_absolute():
        return given
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home.joinpath(*below) if home.is_absolute() else None


def shown(path: Path) -> Path:
    """Return a path for display: relative if it is below the current folder."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def read_source(path: Path, limit: int = SIZE_LIMIT) -> SourceFile:
    """Read a UTF-8 text file; raises Refusal where it is missing, unreadable or too large."""
    data = read_bytes(path, limit + 1)
    return decode_source(str(path), data, limit)


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """Return a file, or its first `most` bytes; raises Refusal where it cannot be read, or where it
    has more bytes than its size states, as files of /proc do."""
    with open_file(path) as stream:
        try:
            size = os.fstat(stream.fileno()).st_size
            data = stream.read((size if most is None else min(size, most)) + 1)
        except OSError as error:
            raise refuse(
                INPUT_OUTPUT,
                f"{path} cannot be read: {error.strerror}",
                help="make the file readable, or name another one",
            ) from error
    if len(data) > size:
        raise refuse(
            INPUT_OUTPUT,
            f"{path} holds more bytes than its size says",
            help="copy its content to a regular file that nothing writes to",
        )
    return data if most is None else data[:most]


def is_parquet(path: Path) -> bool:
    """Return whether a file has the magic bytes of Parquet; raises Refusal where it is missing."""
    mark = b"PAR1"
    if read_bytes(path, len(mark)) == mark:
        return True
    with open_file(path) as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - len(mark)))
        return stream.read() == mark


def open_file(path: Path) -> BufferedReader:
    """Open a regular file to read; raises Refusal where it is missing or no regular file."""
    try:
        return open_regular(path)
    except FileNotFoundError as error:
        raise missing(path) from error
    except IsADirectoryError as error:
        raise refuse(
            FILE_MISSING, f"{path} is a folder, not a file", help=f"name a file in {path}"
        ) from error
    except OSError as error:
        raise refuse(
            INPUT_OUTPUT,
            f"{path} cannot be read: {error.strerror}",
            help="make the file readable, or name another one",
        ) from error


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read; raises OSError for a missing file, a folder, a pipe, a device.

    It does not block, not even on a pipe without a writer.
    """
    flags = os.O_RDONLY | _flag("O_NONBLOCK") | _flag("O_NOCTTY") | _flag("O_BINARY")
    try:
        descriptor = os.open(path, flags)
    except ValueError:
        raise FileNotFoundError(errno.ENOENT, "its name has a zero byte") from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "it is no regular file")


def is_settled(about: os.stat_result) -> bool:
    """Return whether every later change of a file will change its times.

    Times have the resolution of the file system's clock: a file that changed a moment ago can
    change again with the same times. Call this before the file is read.
    """
    return time.time_ns() - max(about.st_mtime_ns, about.st_ctime_ns) > SETTLED


def _flag(name: str) -> int:
    return int(getattr(os, name, 0))


def excerpt(text: object, most: int = 60) -> str:
    """Return the beginning of a text for quoting in a message, escaped."""
    said = str(text)
    return ascii(said[:most])[1:-1] + ("…" if len(said) > most else "")


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; ValueError for a repeated key, which readers treat differently."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {excerpt(twice)!r} is given twice")
    return found


def json_value(text: str, **hooks: Any) -> Any:
    """Return the value of a JSON text; `hooks` are those of `json.loads`.

    Raises ValueError for a repeated key, and for half a surrogate pair, which no file can hold.
    """
    import json

    found = json.loads(text, object_pairs_hook=unique_pairs, **hooks)
    if "\\u" in text:
        try:
            json.dumps(found, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise ValueError("half a surrogate pair is no character") from None
    return found


def missing(path: Path, notes: tuple[str, ...] = ()) -> Refusal:
    """Return the refusal of a path where there is no file."""
    return refuse(FILE_MISSING, f"there is no file {path}", help=neighbours(path), notes=notes)


def neighbours(path: Path) -> str:
    """Return a help text for a missing file: the files of the same kind beside it; the folders for
    a name without a suffix of letters."""
    if re.search(r"-of-\d+\.", path.name):
        return "a part of the checkpoint: fetch it, or save the checkpoint again"
    folders = [] if path.suffix[1:].isalpha() else _names(path.parent, os.DirEntry.is_dir)
    close = similar_file(path) or _similar(path, folders)
    if close is not None:
        return f"did you mean {path.with_name(close)}?"
    if not is_folder(path.parent):
        return f"there is no folder {shown(path.parent)} either"
    place = "this folder" if path.parent.resolve() == Path.cwd() else str(shown(path.parent))
    kind = folders or [n for n in _names(path.parent) if Path(n).suffix == path.suffix]
    if not kind:
        return f"no file of {place} is of this kind; name one that is there"
    listed = excerpt(", ".join(sorted(kind)[:_LISTED]), 200)
    more = f" and {len(kind) - _LISTED} more" if len(kind) > _LISTED else ""
    return f"in {place} there is {listed}{more}"


def decode_source(name: str, data: bytes, limit: int = SIZE_LIMIT) -> SourceFile:
    """Return the text in the bytes of a file; raises Refusal if they are too many or no UTF-8."""
    if len(data) > limit:
        raise refuse(
            TOO_LARGE,
            f"{name} is larger than {limit} bytes",
            help="split it into several files",
        )
    try:
        return SourceFile(name, data.decode("utf-8"))
    except UnicodeDecodeError as error:
        start = len(data[: error.start].decode("utf-8"))
        line = data.count(b"\n", 0, error.start) + 1
        raise refuse(
            NOT_UTF8,
            f"{name} is not UTF-8: byte 0x{data[error.start]:02x} in line {line}",
            help="save it as UTF-8" + ("; it begins as UTF-16 does" if _is_utf16(data) else ""),
            source=SourceFile(name, data.decode("utf-8", errors="replace")),
            span=Span(start, start + 1),
        ) from error


def _is_utf16(data: bytes) -> bool:
    return data.startswith((b"\xff\xfe", b"\xfe\xff"))


# Unlike os.path, Path.exists() and similar methods raise for too long names.


def is_there(path: Path) -> bool:
    """Return whether a path exists; False for invalid paths."""
    return os.path.exists(path)


def similar_file(path: Path) -> str | None:
    """Return the name of a file in the same folder similar to a missing path, or None."""
    return _similar(path, _names(path.parent))


def _similar(path: Path, names: list[str]) -> str | None:
    if len(path.name) > _LONGEST_NAME:
        return None
    from difflib import get_close_matches

    close = get_close_matches(path.name, names, n=1, cutoff=0.8)
    return close[0] if close else None


def _names(
    folder: Path, kind: Callable[[os.DirEntry[str]], bool] = os.DirEntry.is_file
) -> list[str]:
    """Return the names of the first files of a folder, or of its first folders that are not hidden;
    none where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            found = [entry.name for entry in islice(entries, _NEIGHBOURS) if kind(entry)]
            return [one for one in found if kind is os.DirEntry.is_file or one[:1] not in "._"]
    except (OSError, ValueError):
        return []


def is_file(path: Path) -> bool:
    """Return whether a path is a file; False for invalid paths."""
    return os.path.isfile(path)


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder; False for invalid paths."""
    return os.path.isdir(path)


@contextmanager
def in_contract(path: Path) -> Iterator[None]:
    """Add the text of the contract, read again from `path`, to refusals with a span of it.

    A program that was not compiled from a text has empty spans, which are ignored.
    """
    try:
        yield
    except Refusal as refusal:
        refusal.diagnostics = tuple(_in_text(d, path) for d in refusal.diagnostics)
        raise


def _in_text(diagnostic: Diagnostic, path: Path) -> Diagnostic:
    span = diagnostic.span
    if diagnostic.source is not None or span is None:
        return diagnostic
    try:
        source = read_source(path)
    except Refusal:
        return replace(diagnostic, span=None)
    if not span.start < span.end <= len(source.text):
        return replace(diagnostic, span=None)
    return replace(diagnostic, source=source)


def suggest_file(text: str, folder: Path) -> Suggestion | None:
    """Return "did you mean …?" for a missing path if a file beside it has a similar name."""
    close = None if is_there(folder / text) else similar_file(folder / text)
    if close is None:
        return None
    whole = "".join((*text.rpartition("/")[:2], close))
    return did_you_mean(whole, f"did you mean `{whole}`?")
