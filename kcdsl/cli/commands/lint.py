"""`kcdsl lint`: check contracts and report all findings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.api.contract import contracts_in
from kcdsl.check.compile import Analysis, analyse
from kcdsl.cli.common import Command, argument, choice, switch, value, values
from kcdsl.cli.common.options import code_words, output_option
from kcdsl.cli.common.output import Output, difference, outputs, refuse_replacing
from kcdsl.diagnostics import Diagnostic, Refusal, Severity, Sink, Suppressed, refuse
from kcdsl.diagnostics.codes import (
    BAD_CONFIGURATION,
    FILE_MISSING,
    INPUT_OUTPUT,
    NO_CONTRACT,
    SEVERAL_CONTRACTS,
    USAGE,
)
from kcdsl.diagnostics.render import DOCUMENTS, FORMATS, SUFFIXES, Checked, LintRun, render
from kcdsl.diagnostics.render.terminal import counted
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.exits import Exit
from kcdsl.source.config import CODES_HELP, code_or_beginning, load_config
from kcdsl.source.files import SIZE_LIMIT, decode_source, read_source

if TYPE_CHECKING:
    from kcdsl.check.sections.structure import RawClause

_UNREADABLE = {FILE_MISSING, INPUT_OUTPUT, NO_CONTRACT, SEVERAL_CONTRACTS, BAD_CONFIGURATION}
_STDIN = "-"
_SEVERITIES = tuple(Severity)
"""The most severe first."""


@dataclass(frozen=True, kw_only=True)
class LintCommand(Command):
    """Check contracts and report what is wrong, without running anything."""

    paths: tuple[str, ...] = argument(
        "PATH",
        "contracts, folders of contracts, or - for standard input (default: the one here)",
        "*",
    )
    format: tuple[str, ...] = values(
        "FORMAT[=FILE]",
        f"how findings are written: {', '.join(FORMATS)}; with a file, there; may be repeated "
        "(default: text, and github in GitHub Actions)",
        words=lambda: FORMATS,
        writes=True,
    )
    output: str | None = output_option("FILE", "write findings to a file too, format by its suffix")
    fail_on: Severity | None = choice(
        Severity, "lowest severity that gives exit code 1 (default: error)"
    )
    select: tuple[str, ...] | None = values(
        "CODES",
        "show warnings and notes of these codes only, such as KC208,KC5; errors always",
        None,
        words=code_words,
    )
    ignore: tuple[str, ...] | None = values(
        "CODES", "leave out warnings and notes of these codes; errors never", None, words=code_words
    )
    fix: bool = switch("apply the safe fixes")
    unsafe_fixes: bool = switch("with --fix or --diff: also apply unsafe fixes, which are guesses")
    diff: bool = switch("show what --fix would change, and write nothing")
    stdin_filename: str = value("NAME", "the name of standard input", "<stdin>")
    exit_zero: bool = switch("exit 0 even with findings, unless nothing could run")

    def run(self) -> Exit:
        """Print every finding; exit code 1 if one is at least as severe as `--fail-on`, 2 if a
        file cannot be read."""
        return _Session(self).run()


class _LintSettings:
    """The settings of a run: command line over environment over configuration.

    `select` and `ignore` hold codes and prefixes of codes. With only `--select` on the command
    line, `ignore` of the configuration does not apply.
    """

    def __init__(self, given: LintCommand) -> None:
        """Raise Refusal for inconsistent settings."""
        self.config = config = load_config(Path())
        self.outputs = self._outputs(given)
        chosen = given.select is not None
        self.select = _codes(given.select, "select", config.select)
        self.ignore = _codes(given.ignore, "ignore", () if chosen else config.ignore)
        self.fail_on = Severity(given.fail_on or config.fail_on)

    def _outputs(self, given: LintCommand) -> tuple[Output, ...]:
        """Return the outputs and their formats; at most one is standard output."""
        more = []
        if given.output is not None:
            path = Path(given.output)
            if path.suffix not in SUFFIXES:
                raise refuse(
                    USAGE,
                    f"the suffix of {path} is not that of a format",
                    help=f"one of {', '.join(SUFFIXES)}, or --format FORMAT={path}",
                )
            more.append(Output(SUFFIXES[path.suffix], path))
        usual = "github" if os.environ.get("GITHUB_ACTIONS") == "true" else "text"
        return outputs(given.format, FORMATS, usual, more, screen=given.output is None)

    def shows(self, diagnostic: Diagnostic) -> bool:
        """Return whether a diagnostic is shown: every error is."""
        if diagnostic.severity is Severity.ERROR:
            return True
        code = diagnostic.code.id
        return (not self.select or code.startswith(self.select)) and not code.startswith(
            self.ignore
        )

    def fails(self, severity: Severity) -> bool:
        """Return whether a finding of this severity gives exit code 1."""
        return _SEVERITIES.index(severity) <= _SEVERITIES.index(self.fail_on)


def _codes(given: Sequence[str] | None, name: str, configured: tuple[str, ...]) -> tuple[str, ...]:
    """Return codes and prefixes of codes; each must match an existing code."""
    if given is None:
        return configured
    found = []
    for word in (part.strip() for item in given for part in item.split(",")):
        fitting = code_or_beginning(word) if word else None
        if word and fitting is None:
            raise refuse(USAGE, f"--{name}: no code begins with `{word}`", help=CODES_HELP)
        found += [] if fitting is None else [fitting]
    return tuple(found)


class _Session:
    """One run over the paths of a command, and its findings."""

    def __init__(self, command: LintCommand) -> None:
        self.command = command
        self.settings = _LintSettings(command)
        self.found: list[Diagnostic] = []
        self.suppressed: list[Suppressed] = []
        self.files: list[Checked] = []
        self.fixed = 0
        self.changed = 0

    def run(self) -> Exit:
        """Check every path once and write the findings."""
        for source, folder, path in self._texts():
            self._check(source, folder, path)
        shown = [d for d in dict.fromkeys(self.found) if self.settings.shows(d)]
        code = self._code(shown)
        if self.command.diff and not shown:
            return Exit.VIOLATED if self.changed and not self.command.exit_zero else Exit.HELD
        self._deliver(shown, code)
        return code

    def _texts(self) -> Iterator[tuple[SourceFile, Path | None, Path | None]]:
        """Yield each text with its folder and file; unreadable files become findings."""
        if _STDIN in self.command.paths:
            if len(self.command.paths) > 1:
                raise refuse(USAGE, "standard input is read alone", help="leave the others out")
            name = self.command.stdin_filename
            source = self._read(name, lambda: decode_source(name, _standard_input()))
            if source is not None:
                yield source, Path(name).parent, None
            return
        config = self.settings.config
        paths: dict[Path, None] = {}
        asked: list[tuple[str, ...]] = [(path,) for path in self.command.paths] or [()]
        for given in asked:
            try:
                found = contracts_in(given, Path(), config.exclude, config.origin("exclude").folder)
            except Refusal as refusal:
                self.found.extend(refusal.diagnostics)
            else:
                paths.update(dict.fromkeys(found))
        refuse_replacing(self.command.named_files(written=True), list(paths))
        for path in paths:
            source = self._read(str(path), partial(read_source, path))
            if source is not None:
                yield source, path.parent, path

    def _read(self, name: str, read: Callable[[], SourceFile]) -> SourceFile | None:
        try:
            return read()
        except Refusal as refusal:
            self.files.append(Checked(name))
            self.found.extend(refusal.diagnostics)
            return None

    def _check(self, source: SourceFile, folder: Path | None, path: Path | None) -> None:
        if not self.command.fix and not self.command.diff:
            sink = Sink()
            self._keep(analyse(source, sink, folder), sink)
            return
        from kcdsl.check.fixes import fix

        mended = fix(source, folder, unsafe=self.command.unsafe_fixes, wanted=self.settings.shows)
        self.fixed += mended.applied
        self.changed += mended.source.text != source.text
        for diagnostic in mended.refused:
            where = f"{source.name}: {diagnostic.code}"
            print(
                f"{where}: its fix was taken back: the contract would be no better", file=sys.stderr
            )
        if self.command.diff:
            sys.stdout.write(difference(source, mended.source.text, "fixed"))
            return
        if path is None:
            sys.stdout.write(mended.source.text)
        elif mended.source.text != source.text:
            from kcdsl.source.output import write_bytes

            write_bytes(path, mended.source.text.encode("utf-8"), path.stat().st_mode & 0o777)
        self._keep(mended.analysis, mended.left)

    def _keep(self, analysis: Analysis, found: Sink | Sequence[Diagnostic]) -> None:
        self.found.extend(found)
        self.suppressed.extend(analysis.suppressed)
        clauses = analysis.raw.clauses if analysis.raw is not None else ()
        named = tuple((clause.id.text, _whole(clause)) for clause in clauses)
        self.files.append(Checked(analysis.source.name, named))

    def _code(self, shown: Sequence[Diagnostic]) -> Exit:
        if any(d.code in _UNREADABLE for d in shown):
            return Exit.COULD_NOT_RUN
        failed = any(self.settings.fails(d.severity) for d in shown)
        return Exit.VIOLATED if failed and not self.command.exit_zero else Exit.HELD

    def _deliver(self, shown: list[Diagnostic], code: Exit) -> None:
        settings = self.settings
        accepted = tuple(s for s in self.suppressed if settings.shows(s.diagnostic))
        about = LintRun(
            files=tuple(self.files),
            suppressed=accepted,
            docs_url=settings.config.docs_url,
            fail_on=settings.fail_on,
            exit_code=int(code),
        )
        for output in settings.outputs:
            if output.file is not None:
                from kcdsl.source.output import write_bytes

                text = render(shown, output.format, None, about)
                # File names may contain undecodable bytes, which are escaped in JSON.
                write_bytes(output.file, f"{text}\n".encode("utf-8", "backslashreplace"))
                continue
            # The fixed text of standard input is the only content of standard output.
            asked = self.command
            mended = asked.fix and not asked.diff and _STDIN in asked.paths
            stream = sys.stderr if mended else sys.stdout
            if shown or output.format in DOCUMENTS:
                text = render(shown, output.format, stream, about)
            else:
                text = ""
            if text:
                print(text, file=stream, flush=True)
            if output.format == "text" and self.files:
                print(self._summary(shown, len(accepted)), file=sys.stderr)

    def _summary(self, shown: list[Diagnostic], accepted: int) -> str:
        counts = [
            counted(n, severity.value)
            for severity in Severity
            if (n := sum(d.severity is severity for d in shown))
        ]
        if accepted:
            counts.append(f"{accepted} accepted")
        found = ", ".join(counts) or "nothing found"
        text = f"{counted(len(self.files), 'contract')}: {found}"
        if self.fixed:
            text += f"; {self.fixed} fixed"
        if not any(d.fix for d in shown):
            return text
        from kcdsl.check.fixes import is_applied

        safe = sum(is_applied(d.fix, unsafe=False) for d in shown)
        every = sum(is_applied(d.fix, unsafe=True) for d in shown)
        if not safe:
            return f"{text}; {every} fixable with --fix --unsafe-fixes"
        more = f", {every - safe} more with --unsafe-fixes" if every > safe else ""
        return f"{text}; {safe} fixable with --fix{more}"


def _whole(clause: RawClause) -> Span:
    """Return the span of a clause with all its fields."""
    if clause.body is None:
        return clause.span
    body = clause.body.span
    return Span(min(clause.span.start, body.start), max(clause.span.end, body.end))


def _standard_input() -> bytes:
    """Return standard input, at most one byte more than the limit."""
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise refuse(INPUT_OUTPUT, "there is no standard input", help="name a file")
    data: bytes = stream.read(SIZE_LIMIT + 1)
    return data
