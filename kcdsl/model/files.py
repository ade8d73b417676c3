"""Where the files lie that a contract names, and their digests."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from kcdsl.config import shown
from kcdsl.diagnostics import codes, refuse
from kcdsl.source.files import missing

PACKAGE_PREFIX = "package:"


def resolve_file(ref: str, base: Path) -> Path:
    """Return the path of a file that a contract names.

    `ref` is absolute, relative to `base`, or `package:NAME/path/inside`, a file inside an installed
    package, which is located without importing it. Refuse what does not exist.
    """
    if ref.startswith(PACKAGE_PREFIX):
        return _inside_package(ref)
    path = (base / ref).resolve() if not Path(ref).is_absolute() else Path(ref)
    if not path.is_file():
        raise refuse(codes.FILE_MISSING, f"there is no file {ref} (looked in {base})")
    return path


def _inside_package(ref: str) -> Path:
    inner = PurePosixPath(ref.removeprefix(PACKAGE_PREFIX))
    if len(inner.parts) < 2 or ".." in inner.parts or inner.is_absolute():
        raise refuse(
            codes.FILE_MISSING,
            f"{ref!r} is no file inside a package",
            help="write package:IMPORT_NAME/path/inside",
        )
    name, rest = inner.parts[0], inner.parts[1:]
    try:
        spec = find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError, PackageNotFoundError):
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
        if path.is_file():
            return path
    raise refuse(codes.FILE_MISSING, f"the package {name!r} has no file {'/'.join(rest)}")


def file_digest(path: Path) -> str:
    """Return the sha256 (hex) of a file. Refuse what cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        raise missing(shown(path)) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise refuse(codes.FILE_MISSING, f"cannot read {shown(path)}: {reason}") from None
