"""The manifest of a checkpoint, compatible with OpenSSF model signing (`method: files`).

The OpenSSF root digest is the sha256 over the concatenated raw file digests; it does not bind file
names. The digest of the manifest does. A certificate has both.
"""

from __future__ import annotations

import hashlib
import os
import stat
import unicodedata
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

from kcdsl_certs.encoding.files import open_regular, shown
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import canonical_digest
from kcdsl_certs.statement.weights import storage_files, weight_files

SCHEMA = "kcdsl.checkpoint-manifest/1"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Resource:
    """One file: its POSIX path relative to the checkpoint, its size in bytes, its sha256 (hex)."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a checkpoint in component order."""

    resources: tuple[Resource, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, which `digest` hashes."""
        return {
            "schema": SCHEMA,
            "method": "files",
            "hashType": "sha256",
            "resources": [
                {"name": r.name, "size": r.size, "sha256": r.sha256} for r in self.resources
            ],
        }

    @property
    def digest(self) -> str:
        """Return the sha256 (hex) of the canonical manifest: binds names, sizes and contents."""
        return canonical_digest(self.to_json())

    @property
    def weights_digest(self) -> str:
        """Return the digest (hex) by which proofs name the checkpoint: the sha256 of its only file,
        or the digest of the manifest of several files."""
        return self.resources[0].sha256 if len(self.resources) == 1 else self.digest

    @property
    def root_digest(self) -> str:
        """Return the OpenSSF root digest (hex): equals the subject of a `model.sig`."""
        root = hashlib.sha256()
        for resource in self.resources:
            root.update(bytes.fromhex(resource.sha256))
        return root.hexdigest()


Told = Callable[[int, int], None]
"""A progress callback of hashing: bytes read so far, and total bytes."""


def build_manifest(checkpoint: Path, told: Told | None = None) -> Manifest:
    """Hash a checkpoint file, an index with its shards, or the weights of a folder.

    In a folder with weights under Hugging Face names, these files are the checkpoint; in any other
    folder, all files below it are.

    Raises Rejected: `checkpoint/symlink`, `checkpoint/special-file`, `checkpoint/hardlink` (two
    names of one file), `checkpoint/name` (an unsafe name, or two that differ only in case),
    `checkpoint/index` and `checkpoint/ambiguous` (see `weights`), `checkpoint/empty`,
    `checkpoint/sparse` (a mostly sparse file), `checkpoint/changed` (a file was changed, added or
    replaced meanwhile). Raises OSError where a file cannot be read.
    """
    return _manifest(checkpoint, files_of, told)


def storage_manifest(checkpoint: Path) -> Manifest:
    """Hash a checkpoint with its configurations of weight storage.

    Raises as `build_manifest` does.
    """
    return _manifest(checkpoint, lambda path: _pairs(storage_files(path)))


def _manifest(
    checkpoint: Path,
    listed: Callable[[Path], list[tuple[str, Path]]],
    told: Told | None = None,
) -> Manifest:
    found = listed(checkpoint)
    read = None if told is None else _Read(sum(os.lstat(path).st_size for _, path in found), told)
    seen: dict[tuple[int, int], str] = {}
    resources: list[Resource] = []
    with closing(_hashed(found, read)) as hashed:
        for (name, _), (resource, identity) in zip(found, hashed, strict=True):
            if identity in seen:
                detail = f"{seen[identity]} and {name} are one file"
                raise Rejected("checkpoint/hardlink", detail)
            seen[identity] = name
            resources.append(resource)
    if listed(checkpoint) != found:
        raise Rejected("checkpoint/changed", f"{shown(checkpoint.name)} changed while it was read")
    return Manifest(tuple(resources))


def _hashed(
    found: list[tuple[str, Path]], read: _Read | None
) -> Generator[tuple[Resource, tuple[int, int]]]:
    """Yield the resource and identity of each file, in order; shards are hashed in parallel
    threads, since hashlib releases the interpreter lock."""
    if len(found) == 1:
        ((name, path),) = found
        yield _hash_file(path, name, read)
        return
    from concurrent.futures import ThreadPoolExecutor  # slow to import

    with ThreadPoolExecutor(max(1, min(_cores(), len(found)))) as threads:
        work = [threads.submit(_hash_file, path, name, read) for name, path in found]
        try:
            for one in work:
                yield one.result()
        except BaseException:  # including GeneratorExit, if the caller closes this generator
            threads.shutdown(cancel_futures=True)
            raise


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def files_of(checkpoint: Path) -> list[tuple[str, Path]]:
    """Return the files of a checkpoint with their names, in component order; nothing is read.

    Raises Rejected as `build_manifest` does, for defects that show without reading.
    """
    mode = os.lstat(checkpoint).st_mode
    if stat.S_ISLNK(mode):
        raise Rejected("checkpoint/symlink", f"{shown(checkpoint.name)} is a symbolic link")
    weights = weight_files(checkpoint)
    if weights is not None:
        pairs = _pairs(weights)
    elif stat.S_ISDIR(mode):
        pairs = [(_name(path, checkpoint), path) for path in _walk(checkpoint)]
    elif stat.S_ISREG(mode):
        pairs = [(_checked_name(checkpoint.name), checkpoint)]
    else:
        raise Rejected("checkpoint/special-file", f"{shown(checkpoint.name)} is no regular file")
    if not pairs:
        raise Rejected("checkpoint/empty", f"{shown(checkpoint.name)} holds no file")
    once: dict[str, str] = {}
    for name, _ in pairs:
        same = once.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
        if same != name:
            raise Rejected("checkpoint/name", f"{same} and {name} are one name on some systems")
    return sorted(pairs, key=lambda pair: PurePosixPath(pair[0]))


def _pairs(files: Iterable[Path]) -> list[tuple[str, Path]]:
    pairs = [(_checked_name(path.name), _plain(path)) for path in files]
    return sorted(pairs, key=lambda pair: PurePosixPath(pair[0]))


def _plain(path: Path) -> Path:
    """Return the path if it is a regular file and no link."""
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        raise Rejected("checkpoint/symlink", f"{shown(path.name)} is a symbolic link")
    if not stat.S_ISREG(mode):
        raise Rejected("checkpoint/special-file", f"{shown(path.name)} is no regular file")
    return path


def _walk(folder: Path) -> list[Path]:
    found: list[Path] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                raise Rejected("checkpoint/symlink", f"{shown(entry.name)} is a symbolic link")
            if entry.is_dir(follow_symlinks=False):
                found.extend(_walk(Path(entry.path)))
            elif entry.is_file(follow_symlinks=False):
                found.append(Path(entry.path))
            else:
                raise Rejected("checkpoint/special-file", f"{shown(entry.name)} is no regular file")
    return found


def _name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).parts
    return "/".join(_checked_name(part) for part in parts)


def _checked_name(part: str) -> str:
    try:
        part.encode("utf-8")
    except UnicodeEncodeError:
        raise Rejected("checkpoint/name", f"{shown(part)} is not UTF-8") from None
    if part in ("", ".", "..") or "/" in part or not part.isprintable():
        raise Rejected("checkpoint/name", f"{shown(part)} is not a plain file name")
    return part


@dataclass(slots=True)
class _Read:
    """The total number of bytes read by all threads."""

    total: int
    told: Told
    done: int = 0
    lock: Lock = field(default_factory=Lock)

    def add(self, size: int) -> None:
        with self.lock:
            self.done += size
            self.told(self.done, self.total)


def _hash_file(path: Path, name: str, read: _Read | None) -> tuple[Resource, tuple[int, int]]:
    with open_regular(path, "checkpoint/special-file", links=False) as file:
        before = os.fstat(file.fileno())
        if _is_hollow(file.fileno(), before):
            raise Rejected("checkpoint/sparse", f"{name} is almost all hole")
        digest, size = hashlib.sha256(), 0
        while size <= before.st_size and (chunk := file.read(_CHUNK)):
            digest.update(chunk)
            size += len(chunk)
            if read is not None:
                read.add(len(chunk))
        after = os.fstat(file.fileno())
    now = os.lstat(path)  # the file may have been replaced
    if size != before.st_size or len({_identity(found) for found in (before, after, now)}) > 1:
        raise Rejected("checkpoint/changed", f"{name} changed while it was read")
    return Resource(name, size, digest.hexdigest()), (before.st_dev, before.st_ino)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _is_hollow(descriptor: int, found: os.stat_result) -> bool:
    """Return whether reading a file would mostly read a hole: it is larger than 1 GiB, and less
    than a quarter of it is stored. Such a file may be valid, but reading it can take very long.
    """
    stored = getattr(found, "st_blocks", found.st_size) * 512
    if found.st_size <= 1 << 30 or stored * 4 >= found.st_size or not hasattr(os, "SEEK_DATA"):
        return False
    stored, at = 0, 0
    try:
        while at < found.st_size and stored * 4 < found.st_size:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
            at = os.lseek(descriptor, start, os.SEEK_HOLE)
            stored += at - start
    except OSError:  # no data after this offset, or no support by the file system
        pass
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)
    return stored * 4 < found.st_size
