"""Reading text files. Nothing is normalised: an offset in the text is an offset in the file."""

from __future__ import annotations

from pathlib import Path

from kcdsl.diagnostics.codes import FILE_MISSING, INPUT_OUTPUT, NOT_UTF8, TOO_LARGE
from kcdsl.diagnostics.model import refuse
from kcdsl.source.text import SourceFile

SIZE_LIMIT = 4 * 2**20
"""Largest contract in bytes; one that a person can review is a thousand times smaller."""


def read_source(path: Path, limit: int = SIZE_LIMIT) -> SourceFile:
    """Read a UTF-8 text file; raises Refusal where it is missing, unreadable or too large."""
    name = str(path)
    try:
        with path.open("rb") as stream:
            data = stream.read(limit + 1)
    except FileNotFoundError as error:
        raise refuse(FILE_MISSING, f"there is no file {name}") from error
    except IsADirectoryError as error:
        raise refuse(FILE_MISSING, f"{name} is a folder, not a file") from error
    except OSError as error:
        raise refuse(INPUT_OUTPUT, f"{name} cannot be read: {error.strerror}") from error
    return decode_source(name, data, limit)


def decode_source(name: str, data: bytes, limit: int = SIZE_LIMIT) -> SourceFile:
    """Return the text of a file by its bytes; raises Refusal where it is too large or not UTF-8."""
    if len(data) > limit:
        raise refuse(TOO_LARGE, f"{name} is larger than {limit} bytes")
    try:
        return SourceFile(name, data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise refuse(
            NOT_UTF8,
            f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}, "
            f"line {line}",
            help="save the file as UTF-8",
        ) from error
