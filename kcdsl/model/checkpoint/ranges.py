"""Parts of large files, read on demand and compared with digests of the whole file.

A large file is hashed once, as a whole and chunk by chunk. What is read of it later is read into
memory and compared chunk by chunk, so that every byte that is used is one of the file that its
digest names, whatever became of the file meanwhile. Nothing is mapped: a mapped page would show
what is written to the file after it was compared.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.checkpoint.headers import read_headers
from kcdsl.source.files import is_settled, open_file, open_regular, shown, user_place
from kcdsl.source.writing import make_folder, write_bytes
from kcdsl_certs.statement.manifest import Manifest, Resource

RESIDENT = 1 << 28
"""Bytes of weights up to which a checkpoint is held in memory as a whole."""

CHUNK = 1 << 18
"""Bytes that one digest is of: what is read at least."""
_SHA = 32
_BUFFER = 1 << 22


@dataclass(frozen=True, slots=True)
class HashedFile:
    """A file with the sha256 (hex) of its bytes, and that of every chunk, one after the other."""

    path: Path
    size: int
    sha256: str
    chunks: bytes

    def read(self, start: int, end: int) -> memoryview:
        """Return the bytes [start, end) as they were when the file was hashed.

        Refuse where the file holds others by now.
        """
        first, last = start // CHUNK, -(-end // CHUNK)
        offset = first * CHUNK
        held = memoryview(bytearray(min(last * CHUNK, self.size) - offset))
        with open_file(self.path) as stream:
            stream.seek(offset)
            at = 0
            while at < len(held):
                count = stream.readinto(held[at : at + _BUFFER])
                if not count:
                    raise changed(self.path)
                at += count
        for number in range(first, last):
            begin = number * CHUNK - offset
            found = hashlib.sha256(held[begin : begin + CHUNK]).digest()
            if found != self.chunks[number * _SHA : (number + 1) * _SHA]:
                raise changed(self.path)
        return held[start - offset : end - offset]


def changed(path: Path) -> Refusal:
    """Return the refusal of a file that is not the one that was hashed."""
    return refuse(
        codes.CHANGED_MEANWHILE,
        f"{shown(path)} changed while the command ran",
        help="run it again: what it found is about the files as they were",
    )


def hashed_file(path: Path) -> HashedFile:
    """Hash a file as a whole and in chunks; it is read once, a few MiB at a time.

    The digests are kept in the user's cache for a file that the system says is the same: device,
    number, size and times; those of a file that changed just now are not. Refuse a file that is
    missing or changes meanwhile.
    """
    with open_file(path) as stream:
        about = os.fstat(stream.fileno())
        place = _place(about) if is_settled(about) else None
        kept = _kept(path, place, about.st_size)
        if kept is not None:
            return kept
        found = _hash(path, stream, about.st_size)
        if _stamp(os.fstat(stream.fileno())) != _stamp(about):
            raise changed(path)
    if place is not None:
        body = bytes.fromhex(found.sha256) + found.chunks
        with suppress(OSError, Refusal):
            make_folder(place.parent)
            write_bytes(place, hashlib.sha256(body).digest() + body)
    return found


def weights_digest(checkpoint: Path) -> str:
    """Return how proofs name a checkpoint as it is now; refuse files that cannot be read."""
    return manifest_now(checkpoint).weights_digest


def manifest_now(checkpoint: Path) -> Manifest:
    """Return the manifest of a checkpoint as it is now; refuse files that cannot be read."""
    if checkpoint.suffix == ".onnx":
        from kcdsl.model.onnx.files import read_onnx

        return read_onnx(checkpoint).manifest
    headers = read_headers(checkpoint)
    files = [Resource(path.name, *_digest(path)) for path in headers.files]
    if headers.index is not None:
        index, data = headers.index
        files.append(Resource(index.name, len(data), hashlib.sha256(data).hexdigest()))
    return manifest_of(files)


def _digest(path: Path) -> tuple[int, str]:
    """Return the size and the sha256 (hex) of a file; that of a large one may be kept."""
    with open_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= RESIDENT:
            return size, hashlib.file_digest(stream, "sha256").hexdigest()
    return size, hashed_file(path).sha256


def manifest_of(files: Iterable[Resource]) -> Manifest:
    """Return the manifest of the files of a checkpoint, in component order."""
    return Manifest(tuple(sorted(files, key=lambda one: PurePosixPath(one.name))))


def _hash(path: Path, stream: BufferedReader, size: int) -> HashedFile:
    whole, chunks = hashlib.sha256(), bytearray()
    buffer, at = memoryview(bytearray(CHUNK)), 0
    while at < size:
        count, part = 0, buffer[: min(CHUNK, size - at)]
        while count < len(part):
            more = stream.readinto(part[count:])
            if not more:
                raise changed(path)
            count += more
        whole.update(part)
        chunks += hashlib.sha256(part).digest()
        at += count
    if stream.read(1):
        raise changed(path)
    return HashedFile(path, size, whole.hexdigest(), bytes(chunks))


def _stamp(about: os.stat_result) -> str:
    """Return what the system says of a file; no program sets the time of its last change."""
    numbers = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    return " ".join(map(str, numbers))


def _place(about: os.stat_result) -> Path | None:
    base = user_place("XDG_CACHE_HOME", ".cache")
    if base is None:
        return None
    return base / "kcdsl" / "weights" / hashlib.sha256(_stamp(about).encode()).hexdigest()


def _kept(path: Path, place: Path | None, size: int) -> HashedFile | None:
    """Return what was kept of a file; None where nothing is, or something damaged."""
    if place is None:
        return None
    length = _SHA * (2 + -(-size // CHUNK))
    try:
        with open_regular(place) as stream:
            data = stream.read(length + 1)
    except OSError:
        return None
    if len(data) != length or hashlib.sha256(data[_SHA:]).digest() != data[:_SHA]:
        return None
    return HashedFile(path, size, data[_SHA : 2 * _SHA].hex(), data[2 * _SHA :])
