"""Locating and hashing the files of a contract, without loading them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from kcdsl.diagnostics import Diagnostic, Refusal, Sink, refuse
from kcdsl.diagnostics.codes import (
    ARTEFACT_REFUSED,
    CANNOT_CERTIFY,
    CHANGED_MEANWHILE,
    FILE_MISSING,
    INPUT_OUTPUT,
    METRIC_FUNCTION,
)
from kcdsl.ir.terms import KernelRef, ModelRef, Program
from kcdsl.model.checkpoint.headers import weights_folder
from kcdsl.model.files import (
    CHECKPOINT,
    MODULE,
    Artefacts,
    companion,
    file_digest,
    folder_files,
    folder_name,
)
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.statement import Checkpoint, Manifest, build_manifest, files_of
from kcdsl_certs.statement.manifest import Told, storage_manifest
from kcdsl_certs.statement.triple import INFER_CHECKPOINT


class ArtefactRefused(Refusal):
    """A checkpoint that must not be trusted; `reason` is the stable code of the rejection."""

    def __init__(self, rejection: Rejected) -> None:
        self.reason = rejection.reason
        self.detail = rejection.detail
        super().__init__(
            Diagnostic(
                ARTEFACT_REFUSED,
                f"the checkpoint is refused: {rejection.detail} ({rejection.reason})",
                help="give the regular file or the folder of regular files itself",
            )
        )


def checkpoint_manifest(path: Path, told: Told | None = None) -> Manifest:
    """Hash the checkpoint; `told` is called with the progress.

    Raises Refusal for files that cannot be read or must not be trusted.
    """
    try:
        return build_manifest(path, told)
    except Rejected as error:
        raise ArtefactRefused(error) from error
    except OSError as error:
        code = FILE_MISSING if isinstance(error, FileNotFoundError) else INPUT_OUTPUT
        raise refuse(
            code,
            f"{path} cannot be read: {error.strerror}",
            help="make the file readable, or name another one",
        ) from error


def companions(model: ModelRef, files: Artefacts, served: Path | None = None) -> dict[str, str]:
    """Return the sha256 of the companion files of the weights, by role.

    The roles are `config`, `tokenizer`, `generation_config`, `tokenizer_config` and `chat_template`
    (named by the contract, or beside the checkpoint), `module`, the source file of a user's own
    factory, and `infer_checkpoint`, the manifest of the inference kernel's own checkpoint; `served`
    replaces its path in the contract.
    """
    checkpoint = files.locate(model.checkpoint)
    found: dict[str, str] = {}
    for role, named, usual in (
        ("config", model.config, "config.json"),
        ("tokenizer", model.tokenizer, "tokenizer.json"),
        ("generation_config", None, "generation_config.json"),
        ("tokenizer_config", None, "tokenizer_config.json"),
        ("chat_template", None, "chat_template.jinja"),
    ):
        if role == "tokenizer" and named == "bytes":
            continue
        path = files.beside(checkpoint, usual) if named is None else files.find(named)
        if path is not None:
            found[role] = files.digest(path)
    if model.served is not None:
        try:
            place = files.find_weights(model.served) if served is None else served
            found[INFER_CHECKPOINT] = storage_manifest(place).digest
        except Rejected as error:
            raise ArtefactRefused(error) from error
    if model.module is not None:
        found["module"] = files.digest(_factory_source(model.module, files.base))
    return found


def _factory_source(target: str, base: Path) -> Path:
    """Return the source file of the factory's module, without importing it."""
    from kcdsl.source.modules import find_module

    name = target.partition(":")[0]
    path = find_module(name, [str(base), *(entry for entry in sys.path if entry)])
    if path is None:
        raise refuse(
            FILE_MISSING,
            f"there is no module {name} with a source file",
            help="put the module of the factory beside the contract, or install its package",
        )
    return path


def data_digests(program: Program, files: Artefacts) -> dict[str, str]:
    """Return the sha256 of every file that measurements depend on, by recorded name: data and
    recordings, the folders of kernels, and the modules of the user's metrics."""
    names = {program.data, *(s.data for s in program.slices)}
    kernels = (program.train, program.infer)
    names |= {kernel.recording.file for kernel in kernels if kernel.recording is not None}
    found = {name: files.digest(files.find(name)) for name in names if name is not None}
    for kernel in kernels:
        for path in _folder(program, kernel, files):
            found[folder_name(kernel, path.name)] = files.digest(files.admitted(path))
    modules = metric_files(program, files.base)
    found.update((name, files.digest(path)) for name, path in modules.items())
    return dict(sorted(found.items()))


def _folder(program: Program, kernel: KernelRef, files: Artefacts) -> tuple[Path, ...]:
    """Return the files of a kernel that loads a folder of its own."""
    if not kernel.run.startswith("hf."):
        return ()
    named = kernel.folder
    folder = weights_folder(files.locate(program.model.checkpoint))
    if named is not None:
        folder = files.locate(named)
    return folder_files(folder)


def metric_files(program: Program, base: Path) -> dict[str, Path]:
    """Return the Python files of the user's metrics by the names of their modules.

    Nothing is imported. Raises Refusal where a metric is no longer declared.
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
            raise refuse(
                METRIC_FUNCTION,
                f"{metric.function} declares no `{metric.name}` any more",
                help="declare it again with `@kcdsl.metric`, or compile the contract with the "
                "metric that is there",
            )
        found[metric.function.rpartition(":")[0]] = Path(place.source.name)
    return found


def code_digests(program: Program, files: Artefacts) -> dict[str, str]:
    """Return the sha256 of the modules that the contract's own Python code imported, by their names
    in a statement, without the modules that the contract names itself.

    Raises Refusal where a file has changed since its import.
    """
    if program.model.module is None and not program.metrics:
        return {}
    from kcdsl.model.own_code import imported_code

    named = {path.resolve() for path in metric_files(program, files.base).values()}
    if program.model.module is not None:
        named.add(_factory_source(program.model.module, files.base).resolve())
    found: dict[str, str] = {}
    for path, (name, digest) in imported_code(files).items():
        if path not in named:
            found[name] = digest
            refuse_changed(name, digest, file_digest(path))
    return found


def input_at_hand(files: Artefacts, name: str) -> Path | None:
    """Return the file of an input from its name in a statement; None where it does not exist.
    Nothing is imported."""
    if not name.startswith(MODULE):
        return files.at_hand(name)
    from kcdsl.source.modules import find_module

    paths = [str(files.base), *filter(None, sys.path)]
    return find_module(name.removeprefix(MODULE), paths)


def refuse_changed(name: str, before: str, now: str) -> None:
    """Raise Refusal where a file has changed since it was used."""
    if before != now:
        raise refuse(
            CHANGED_MEANWHILE,
            f"{name} changed while the command ran",
            help="run it again: its results are for the files before the change",
        )


def stated_digests(checkpoint: Checkpoint, data: Mapping[str, str]) -> dict[str, str]:
    """Return the digests that a certificate states, by the names under which reads are recorded."""
    belonging = {companion(role): digest for role, digest in checkpoint.companions.items()}
    return {CHECKPOINT: checkpoint.root_digest, **belonging, **data}


def refuse_others(loaded: Mapping[str, str], stated: Mapping[str, str]) -> None:
    """Raise Refusal where a loaded file, weights included, differs from the digests that a
    certificate would state."""
    if CHECKPOINT not in loaded:
        raise refuse(
            CANNOT_CERTIFY,
            "nothing says which weights were loaded",
            help="a backend records the digests of what it reads: `artefacts` of its functions",
        )
    changed = sorted(name for name, digest in loaded.items() if stated.get(name) != digest)
    if changed:
        raise refuse(
            CHANGED_MEANWHILE,
            f"{', '.join(changed)} changed while the command ran",
            help="run it again: its results are for the files before the change",
        )


def record_all(program: Program, files: Artefacts) -> None:
    """Record all existing files, for a backend that does not report its reads; missing files are
    refused by their readers."""
    now = Artefacts.of(files.base)
    for read in (_weights, _belonging, data_digests):
        try:
            found = read(program, now)
        except ArtefactRefused:
            raise
        except Refusal:
            continue
        for name, digest in found.items():
            files.record(name, digest)


def _weights(program: Program, files: Artefacts) -> dict[str, str]:
    path = files.locate(program.model.checkpoint)
    return {CHECKPOINT: checkpoint_manifest(path).root_digest}


def _belonging(program: Program, files: Artefacts) -> dict[str, str]:
    return {companion(role): d for role, d in companions(program.model, files).items()}


def refuse_untrusted(program: Program, files: Artefacts) -> None:
    """Raise Refusal early for a checkpoint that no certificate can name."""
    try:
        path = files.locate(program.model.checkpoint)
    except Refusal:
        return  # its reader refuses it, with its place in the contract
    try:
        files_of(path)
    except Rejected as error:
        raise ArtefactRefused(error) from error
    except OSError as error:
        raise refuse(
            INPUT_OUTPUT,
            f"{path} cannot be read: {error.strerror}",
            help="make the weights readable, or name other ones",
        ) from error
