"""Ranges of large files, read on demand and compared with digests of the file.

A large file is hashed once, as a whole and per chunk. Later reads are compared with the digests of
the chunks, so every byte that is used belongs to the hashed file even if the file was changed
meanwhile. Files are not memory-mapped: a mapped page would show writes after the comparison.
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
from kcdsl.source.output import make_folder, write_bytes
from kcdsl_certs.statement.manifest import Manifest, Resource

RESIDENT = 1 << 28
"""The largest checkpoint, in bytes of weights, that is held in memory as a whole."""

CHUNK = 1 << 18
"""Bytes per digest; the least number of bytes of a read."""
_SHA = 32
_BUFFER = 1 << 22


@dataclass(frozen=True, slots=True)
class HashedFile:
    """A file with the sha256 (hex) of its bytes and the concatenated digests of its chunks."""

    path: Path
    size: int
    sha256: str
    chunks: bytes

    def read(self, start: int, end: int) -> memoryview:
        """Return the bytes [start, end) of the hashed file.

        Refuse where the file has changed there.
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
    """Return the refusal of a file that changed after it was hashed."""
    return refuse(
        codes.CHANGED_MEANWHILE,
        f"{shown(path)} changed while the command ran",
        help="run it again: its results are for the files before the change",
    )


def hashed_file(path: Path) -> HashedFile:
    """Hash a file as a whole and in chunks; it is read once, a few MiB at a time.

    The user's cache keeps the digests under the device, inode, size and times of the file, unless
    the file changed a moment ago. Refuse a file that is missing or changes meanwhile.
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
    """Return the current digest by which proofs name a checkpoint; refuse unreadable files."""
    return manifest_now(checkpoint).weights_digest


def manifest_now(checkpoint: Path) -> Manifest:
    """Return the current manifest of a checkpoint; refuse unreadable files."""
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
    """Return the size and the sha256 (hex) of a file, from the cache for large files."""
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
    """Return the identity of a file for the cache; programs cannot set its ctime."""
    numbers = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    return " ".join(map(str, numbers))


def _place(about: os.stat_result) -> Path | None:
    base = user_place("XDG_CACHE_HOME", ".cache")
    if base is None:
        return None
    return base / "kcdsl" / "weights" / hashlib.sha256(_stamp(about).encode()).hexdigest()


def _kept(path: Path, place: Path | None, size: int) -> HashedFile | None:
    """Return the cached digests of a file; None where there are none or they are damaged."""
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
