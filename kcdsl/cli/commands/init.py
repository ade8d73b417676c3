"""`kcdsl init`: draft a contract from a model, a recording, or nothing."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.cli.common import Command, argument, choice, switch, value
from kcdsl.cli.common.options import output_option
from kcdsl.cli.common.output import progress_bars, say
from kcdsl.diagnostics import Refusal, Sink, refuse
from kcdsl.diagnostics.codes import KEY_EXISTS, USAGE
from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.draft.clauses import DraftPurpose
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from kcdsl.draft.origin import DraftFiles


@dataclass(frozen=True, kw_only=True)
class InitCommand(Command):
    """Draft a contract from a model, a recording of rollouts, or nothing."""

    source: str | None = argument(
        "FROM",
        "a Hugging Face model folder, an ONNX file, or recorded rollouts (default: this folder, "
        "or a small random model if it has none)",
        "?",
    )
    purpose: DraftPurpose | None = choice(
        DraftPurpose,
        "what the contract is for (default: serving; rl for recorded rollouts)",
        name="for",
    )
    data: str | None = value(
        "FILE",
        "requests (JSONL), or rollouts for the model to score (default: prompts.jsonl beside the "
        "contract, which is created if missing)",
    )
    quantised: str | None = value(
        "FOLDER",
        "the served weights, whose quantisation configuration is read, or the served ONNX file",
    )
    temperature: str = value("T", "the sampling temperature of the recorded tokens", "1")
    measure: bool = switch(
        "run the model to derive limits from the noise of the training kernel and from proved "
        "bounds"
    )
    force: bool = switch("replace an existing contract; other files are never replaced")
    output: str | None = output_option(
        "FILE", "the contract (default: contract.yaml here, or beside a model in another folder)"
    )

    def run(self) -> Exit:
        """Write the contract and its further files; --force replaces only the contract."""
        from kcdsl.draft.origin import DraftRequest, draft_of
        from kcdsl.source.output import NewFile, make_folder, write_together

        here = Path()
        wanted = DraftRequest(
            source=_path(self.source),
            data=_path(self.data),
            quantised=_path(self.quantised),
            purpose=self.purpose,
            output=_path(self.output),
            temperature=self.temperature,
        )
        found = draft_of(wanted, here, _recording)
        if self.measure and found.recorded:
            raise refuse(
                USAGE,
                "--measure runs the model, and the inference kernel is a recording here",
                help="leave it out",
            )
        make_folder(found.contract.parent)
        text = found.text
        _refuse_defect(text, found)
        files = [NewFile(path, data, 0o644) for path, data in found.more if _is_new(path, data)]
        files.append(NewFile(found.contract, text.encode(), 0o644))
        write_together(files, replace=self.force)
        if self.measure:
            found = _measured(found)
        _print(found, [file.path for file in files])
        return Exit.HELD


def _measured(found: DraftFiles) -> DraftFiles:
    """Write the contract again, with limits from runs; return the new files."""
    from kcdsl.api.contract import load
    from kcdsl.api.evaluation import EvaluateSettings
    from kcdsl.api.verification import VerifySettings
    from kcdsl.draft.measure import measured_clauses
    from kcdsl.source.output import write_bytes

    evaluating = EvaluateSettings(seconds=5.0, bound_seconds=0.0, progress=progress_bars, tell=say)
    verifying = VerifySettings(attack=False, confirm=False, cache="off", progress=progress_bars)
    contract = load(found.contract)
    clauses = measured_clauses(contract, found.draft.clauses, evaluating, verifying)
    found = replace(found, draft=replace(found.draft, clauses=clauses))
    write_bytes(found.contract, found.text.encode())
    return found


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def _recording(path: Path) -> Any:
    """Return the description of a recording by the measuring backend; None for other files."""
    from kcdsl.api.backends import measuring_backend

    return measuring_backend().recording(path)


def _refuse_defect(text: str, found: DraftFiles) -> None:
    """Refuse a draft that does not compile, or whose model does not fit its configuration, before
    any file is written. The checkpoint of an example is not there yet."""
    from kcdsl.check.compile import compile_source
    from kcdsl.model.files import Artefacts
    from kcdsl.model.loader import load_structure

    sink = Sink()
    program = compile_source(SourceFile(str(found.contract), text), sink)
    if program is None:
        raise Refusal(tuple(sink))
    files = Artefacts.of(found.contract.parent)
    for folder in found.allow:
        files.allow(folder)
    written = found.contract.parent / program.model.checkpoint in dict(found.more)
    if not written and not found.recorded:
        load_structure(program.model, files)


def _is_new(path: Path, data: bytes) -> bool:
    """Return whether a file of the draft does not exist yet; refuse a different existing file."""
    from kcdsl.source.files import read_bytes

    if not os.path.lexists(path):
        return True
    if read_bytes(path) != data:
        raise refuse(
            KEY_EXISTS,
            f"{path} is already there, and no draft replaces it",
            help="name the model, `kcdsl init FROM`, or draft in another folder",
        )
    return False


def _print(found: DraftFiles, paths: Sequence[Path]) -> None:
    for path in paths:
        print(one_line(f"wrote {path}"))
    for note in found.draft.notes:
        say(f"note: {note}")
    named = _argument(found.contract)
    if found.allow:
        folders = shlex.quote(",".join(str(folder) for folder in found.allow))
        print(one_line(f"first: export KCDSL_ALLOW_FOLDERS={folders}"))
    proved = [c.block for c in found.draft.clauses if c.block is not None]
    print("next:")
    if len(proved) < len(found.draft.clauses):
        print(f"  kcdsl evaluate{named}")
    if proved:
        print(f"  kcdsl verify{named} --block {proved[0]}")


def _argument(contract: Path) -> str:
    """Return the contract argument for commands; empty where they find the contract themselves."""
    from kcdsl.api.contract import find_contract

    with suppress(Refusal):
        if find_contract(None, Path()).resolve() == contract.resolve():
            return ""
    return f" {shlex.quote(str(contract))}"
