"""The files of a contract: allowed locations, and the digests of the bytes that were read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.ir.terms import KernelRef
from kcdsl.model.checkpoint.headers import weights_folder
from kcdsl.source.config import allowed_folders
from kcdsl.source.files import excerpt, neighbours, open_file, read_bytes, shown

PACKAGE_PREFIX = "package:"
CHECKPOINT = "the checkpoint"
"""The name under which the root digest of the weights is recorded."""
MODULE = "module "
"""The prefix of names of own code outside the folder of the contract."""
_CHUNK = 1 << 22
_LARGEST = 256 * 2**20


def companion(role: str) -> str:
    """Return the name under which a file that belongs to the weights is recorded."""
    return f"the {role} of the checkpoint"


@dataclass(slots=True)
class Artefacts:
    """The files that one command reads for a contract.

    Files must lie below the contract's folder, in an installed package, or in a folder that the
    user allows (`allow-folders`); links may lead only to such places. Every reader records the
    digest of the bytes that it used, so that a certificate can be compared with them.
    """

    base: Path
    allowed: list[Path] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    """The sha256 (hex) of every file read, by its name in certificates."""
    hashed: dict[Path, str] = field(default_factory=dict)
    """The sha256 (hex) of files that were hashed and not read."""
    code: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The contract's own modules that other processes imported for this command, by their paths:
    each with its name in a statement, and the sha256 (hex) of what was compiled."""

    @classmethod
    def of(cls, base: Path | Artefacts) -> Artefacts:
        """Return the files of the contracts in a folder; none is read yet."""
        if isinstance(base, Artefacts):
            return base
        here = Path(os.path.realpath(base))
        return cls(here, [here, *allowed_folders(here)])

    def allow(self, path: Path) -> None:
        """Allow the files of a folder that the user named on the command line."""
        self.allowed.append(Path(os.path.realpath(path)))

    def locate(self, reference: str) -> Path:
        """Return the path that a contract names: absolute, relative to the contract's folder, or
        `package:NAME/inside`. Links are followed except the last one.

        Refuse a path that does not exist, or that lies or leads outside the allowed folders.
        """
        if reference.startswith(PACKAGE_PREFIX):
            return self._inside_package(reference)
        if "\0" in reference:
            raise refuse(
                codes.FILE_MISSING,
                f"{reference!a} is no path: it has a zero byte",
                help="write the path without it",
            )
        path = self.base / reference
        found = self.admitted(path, reference)
        if not os.path.lexists(path):
            raise self._missing(reference)
        return found

    def find(self, reference: str) -> Path:
        """Return the path of a file that a contract names; as `locate`, and refuse a folder."""
        path = self.locate(reference)
        if not os.path.exists(path) or os.path.isdir(path):
            raise self._missing(reference)
        return path

    def find_weights(self, reference: str) -> Path:
        """Return the path of a checkpoint that a contract names, a file or a folder; as `locate`,
        and refuse one that is not there."""
        path = self.locate(reference)
        return path if os.path.isdir(path) else self.find(reference)

    def at_hand(self, reference: str) -> Path | None:
        """Return the path of a file as `find` does; None where `find` would refuse it."""
        try:
            return self.find(reference)
        except Refusal:
            return None

    def beside(self, checkpoint: Path, name: str) -> Path | None:
        """Return the path of a file in the folder of the weights; None where there is none."""
        path = weights_folder(checkpoint) / name
        if not os.path.lexists(path):
            return None
        return self.admitted(path, name)

    def read(self, path: Path, name: str, most: int = _LARGEST) -> bytes:
        """Return the bytes of a file, and record their digest under `name`."""
        from hashlib import sha256

        data = read_bytes(path, most + 1)
        if len(data) > most:
            raise refuse(
                codes.TOO_LARGE,
                f"{shown(path)} is larger than {most} bytes",
                help="name the file that is meant: none of this kind is so large",
            )
        self.record(name, sha256(data).hexdigest())
        return data

    def record(self, name: str, digest: str) -> None:
        """Record a digest. Refuse one that differs from an earlier one: the file was replaced."""
        if self.digests.setdefault(name, digest) != digest:
            raise refuse(
                codes.CHANGED_MEANWHILE,
                f"{name} changed while the command ran",
                help="run it again: its results are for the files before the change",
            )

    def record_code(self, found: Mapping[str, tuple[str, str]]) -> None:
        """Record own modules that another process imported, in the form of `code`. Refuse a digest
        that differs from an earlier one: the file was replaced."""
        for path, (name, digest) in found.items():
            if self.code.setdefault(path, (name, digest))[1] != digest:
                raise refuse(
                    codes.CHANGED_MEANWHILE,
                    f"{name} changed while the command ran",
                    help="run it again: its results are for the files before the change",
                )

    def digest(self, path: Path) -> str:
        """Return the sha256 (hex) of a file; each file is hashed once."""
        if path not in self.hashed:
            self.hashed[path] = file_digest(path)
        return self.hashed[path]

    def admitted(self, path: Path, named: str | None = None) -> Path:
        """Return a path with all links followed except the last; refuse a path that lies or leads
        outside the allowed folders."""
        real = Path(os.path.realpath(path))
        if any(real.is_relative_to(root) for root in self.allowed):
            if path.name in ("", "..", "."):
                return real
            return Path(os.path.realpath(path.parent)) / path.name
        raise refuse(
            codes.OUTSIDE_FOLDER,
            f"{excerpt(named or path, 100)} leads outside of the contract's folder",
            help="move the file below it, or allow its folder: KCDSL_ALLOW_FOLDERS=FOLDER "
            "(`kcdsl explain KC610`)",
        )

    def _missing(self, reference: str) -> Refusal:
        place = f"there is no file {reference} (looked in {shown(self.base)})"
        return refuse(codes.FILE_MISSING, place, help=neighbours(self.base / reference))

    def _inside_package(self, reference: str) -> Path:
        root, path = _package_file(reference)
        self.allow(root)
        self.allow(path.resolve().parent)
        return path


def resolve_file(ref: str, base: Path | Artefacts) -> Path:
    """Return the path of a file that a contract in the folder `base` names; see `Artefacts`."""
    return Artefacts.of(base).find(ref)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of a folder from which transformers reads weights."""
    single = folder / "model.safetensors"
    return (single,) if single.is_file() else tuple(sorted(folder.glob("model-*.safetensors")))


def folder_files(folder: Path) -> tuple[Path, ...]:
    """Return all existing files of a folder that transformers reads."""
    usual = ("config.json", "generation_config.json", "model.safetensors.index.json")
    found = (folder / name for name in usual)
    return (*(path for path in found if os.path.lexists(path)), *weight_files(folder))


def folder_name(kernel: KernelRef, file: str) -> str:
    """Return the name under which a file of a kernel's folder is recorded."""
    return f"{file} beside the checkpoint" if kernel.folder is None else f"{kernel.folder}/{file}"


def copy_hashed(path: Path, target: Path) -> str:
    """Copy a regular file; return the sha256 (hex) of the copy."""
    from hashlib import sha256

    digest = sha256()
    with open_file(path) as stream, target.open("xb") as copy:
        while data := stream.read(_CHUNK):
            digest.update(data)
            copy.write(data)
    return digest.hexdigest()


def _package_file(ref: str) -> tuple[Path, Path]:
    """Return the folder of a package and the file in it, for `package:NAME/path/inside`."""
    inner = PurePosixPath(ref.removeprefix(PACKAGE_PREFIX))
    if len(inner.parts) < 2 or ".." in inner.parts or inner.is_absolute() or "\0" in ref:
        raise refuse(
            codes.FILE_MISSING,
            f"{ref!r} is no file inside a package",
            help="write package:IMPORT_NAME/path/inside",
        )
    name, rest = inner.parts[0], inner.parts[1:]
    try:
        spec = find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    roots = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not roots:
        raise refuse(
            codes.FILE_MISSING,
            f"the package {name!r} of {ref!r} is not installed",
            help=f"pip install --no-deps {name.replace('_', '-')}",
        )
    for root in roots:
        path = Path(root).joinpath(*rest)
        if path.exists():
            return Path(root), path
    raise refuse(
        codes.FILE_MISSING,
        f"the package {name!r} has no file {'/'.join(rest)}",
        help="correct the path behind `package:`, or install a version of the package that has"
        " the file",
    )


def file_digest(path: Path) -> str:
    """Return the sha256 (hex) of a regular file. Refuse a file that cannot be read."""
    import hashlib

    with open_file(path) as stream:
        try:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            reason = error.strerror or str(error)
            raise refuse(
                codes.FILE_MISSING,
                f"cannot read {shown(path)}: {reason}",
                help="make the file readable, or copy it to another disk",
            ) from None
