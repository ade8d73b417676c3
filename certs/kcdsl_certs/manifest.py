"""The manifest of a checkpoint, compatible with OpenSSF model signing (`method: files`).

The OpenSSF root digest is the sha256 over the concatenated raw file digests; it does not bind file
names. The digest of the manifest itself does. Both go into a certificate.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kcdsl_certs.canonical import canonical_digest
from kcdsl_certs.reject import Reject

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
        """Return plain data; this is what `digest` hashes."""
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
    def root_digest(self) -> str:
        """Return the OpenSSF root digest (hex): equals the subject of a `model.sig`."""
        root = hashlib.sha256()
        for resource in self.resources:
            root.update(bytes.fromhex(resource.sha256))
        return root.hexdigest()


def build_manifest(checkpoint: Path) -> Manifest:
    """Hash a checkpoint file, or every file below a checkpoint folder (nothing is ignored).

    Raises Reject: `checkpoint/symlink`, `checkpoint/special-file`, `checkpoint/hardlink` (two
    names of one file), `checkpoint/name`, `checkpoint/empty`, `checkpoint/changed` (the file
    changed while it was read). Raises OSError where a file cannot be read.
    """
    mode = os.lstat(checkpoint).st_mode
    if stat.S_ISLNK(mode):
        raise Reject("checkpoint/symlink", f"{checkpoint.name} is a symbolic link")
    if stat.S_ISDIR(mode):
        pairs = [(_name(path, checkpoint), path) for path in _walk(checkpoint)]
    else:
        pairs = [(_checked_name(checkpoint.name), checkpoint)]
    if not pairs:
        raise Reject("checkpoint/empty", f"{checkpoint.name} holds no file")
    seen: dict[tuple[int, int], str] = {}
    resources: list[Resource] = []
    for name, path in sorted(pairs, key=lambda pair: PurePosixPath(pair[0])):
        resource, identity = _hash_file(path, name)
        if identity in seen:
            raise Reject("checkpoint/hardlink", f"{seen[identity]} and {name} are one file")
        seen[identity] = name
        resources.append(resource)
    return Manifest(tuple(resources))


def _walk(folder: Path) -> list[Path]:
    found: list[Path] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                raise Reject("checkpoint/symlink", f"{entry.name} is a symbolic link")
            if entry.is_dir(follow_symlinks=False):
                found.extend(_walk(Path(entry.path)))
            else:
                found.append(Path(entry.path))
    return found


def _name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).parts
    return "/".join(_checked_name(part) for part in parts)


def _checked_name(part: str) -> str:
    try:
        part.encode("utf-8")
    except UnicodeEncodeError:
        raise Reject("checkpoint/name", f"{part!r} is not UTF-8") from None
    if part in ("", ".", "..") or "/" in part or "\0" in part:
        raise Reject("checkpoint/name", f"{part!r} is not a file name")
    return part


def _hash_file(path: Path, name: str) -> tuple[Resource, tuple[int, int]]:
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags)
    with os.fdopen(descriptor, "rb") as file:
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode):
            raise Reject("checkpoint/special-file", f"{name} is not a regular file")
        digest, size = hashlib.sha256(), 0
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
        after = os.fstat(descriptor)
    same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    if size != before.st_size or not same:
        raise Reject("checkpoint/changed", f"{name} changed while it was read")
    return Resource(name, size, digest.hexdigest()), (before.st_dev, before.st_ino)


def file_digest(path: Path) -> str:
    """Return the sha256 (hex) of one file (links are followed: for data, not for checkpoints)."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
