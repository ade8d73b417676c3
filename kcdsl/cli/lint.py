"""`kcdsl lint`: check contracts and say everything that is wrong with them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.check.compile import Analysis, analyse
from kcdsl.cli.discover import contracts_in
from kcdsl.cli.lint_options import Options, read_options
from kcdsl.config import SEVERITIES
from kcdsl.diagnostics import Diagnostic, Refusal, Severity, Sink, Suppressed, refuse
from kcdsl.diagnostics.codes import (
    BAD_CONFIGURATION,
    FILE_MISSING,
    INPUT_OUTPUT,
    NO_CONTRACT,
    SEVERAL_CONTRACTS,
    USAGE,
)
from kcdsl.diagnostics.render import DOCUMENTS, FORMATS, Checked, Run, render
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.exits import Exit
from kcdsl.source.files import SIZE_LIMIT, decode_source, is_folder, read_source

if TYPE_CHECKING:
    from kcdsl.check.sections.structure import RawClause

HELP = "check contracts and report what is wrong, without running anything"
_UNREADABLE = {FILE_MISSING, INPUT_OUTPUT, NO_CONTRACT, SEVERAL_CONTRACTS, BAD_CONFIGURATION}
_STDIN = "-"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="contracts, folders of contracts, or - for standard input (default: the one here)",
    )
    parser.add_argument(
        "--format",
        action="append",
        metavar="FORMAT[=FILE]",
        help=f"how findings are written: {', '.join(FORMATS)}; with a file, there; may be repeated "
        "(default: full, and github in GitHub Actions)",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write findings to a file too, format by its suffix"
    )
    parser.add_argument(
        "--fail-on",
        choices=SEVERITIES,
        help="least severity that gives exit code 1 (default: error)",
    )
    parser.add_argument(
        "--select",
        action="append",
        metavar="CODES",
        help="show warnings and notes of these codes only, such as KC208,KC5; errors always",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        metavar="CODES",
        help="leave out warnings and notes of these codes; errors never",
    )
    parser.add_argument(
        "--statistics", action="store_true", help="show how often each code occurs, not where"
    )
    parser.add_argument("--fix", action="store_true", help="apply the safe fixes")
    parser.add_argument(
        "--unsafe-fixes",
        action="store_true",
        help="with --fix or --diff, apply the probable ones too",
    )
    parser.add_argument(
        "--diff", action="store_true", help="show what --fix would change, and write nothing"
    )
    parser.add_argument(
        "--stdin-filename", metavar="NAME", default="<stdin>", help="the name of standard input"
    )
    parser.add_argument(
        "--watch", action="store_true", help="check again whenever a file changes, until Ctrl-C"
    )
    parser.add_argument(
        "--exit-zero",
        action="store_true",
        help="exit 0 whatever is found, unless nothing could run",
    )


def run(arguments: argparse.Namespace) -> Exit:
    """Print every finding; exit code 1 if one is at least as severe as `--fail-on`, 2 if a file
    cannot be read."""
    if not arguments.watch:
        return _Session(read_options(arguments)).run()
    if _STDIN in arguments.paths:
        raise refuse(USAGE, "standard input cannot be watched", help="name files or folders")
    from kcdsl.cli.watch import watch

    session = _Session(read_options(arguments))

    def again() -> Exit:
        session.options = read_options(arguments)
        return session.run()

    return watch(session.watched, again)


class _Session:
    """Runs over the same paths; keeps which files the last one has read."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.found: list[Diagnostic] = []
        self.suppressed: list[Suppressed] = []
        self.files: list[Checked] = []
        self.behind: set[Path] = set()
        self.fixed = 0
        self.changed = 0

    def watched(self) -> set[Path]:
        """Return the files whose change matters: the contracts, those that are named and not
        there yet, and what they import or name."""
        named = {Path(name) for name in self.options.paths}
        paths, _ = self._paths()
        return {*paths, *self.behind, *(path for path in named if not is_folder(path))}

    def run(self) -> Exit:
        """Check every path once and write the findings."""
        self.found, self.suppressed, self.files = [], [], []
        self.fixed = self.changed = 0
        for source, folder, path in self._texts():
            self._check(source, folder, path)
        if self.options.config.file is not None:
            self.behind.add(Path(self.options.config.file.name))
        shown = [d for d in dict.fromkeys(self.found) if self.options.shows(d)]
        code = self._code(shown)
        if self.options.diff and not shown:
            return Exit.VIOLATED if self.changed and not self.options.exit_zero else Exit.HELD
        self._deliver(shown, code)
        return code

    def _paths(self) -> tuple[list[Path], list[Diagnostic]]:
        """Return the files that the paths name, and what is wrong with other paths."""
        config, options = self.options.config, self.options
        found: dict[Path, None] = {}
        wrong: list[Diagnostic] = []
        for name in options.paths or (None,):
            given = () if name is None else (name,)
            try:
                paths = contracts_in(given, Path(), config.exclude, config.origin("exclude").folder)
            except Refusal as refusal:
                wrong.extend(refusal.diagnostics)
            else:
                found.update(dict.fromkeys(paths))
        return list(found), wrong

    def _texts(self) -> Iterator[tuple[SourceFile, Path | None, Path | None]]:
        """Yield each text with its folder and file; what cannot be read is among the findings."""
        if _STDIN in self.options.paths:
            if len(self.options.paths) > 1:
                raise refuse(USAGE, "standard input is read alone", help="leave the others out")
            name = self.options.stdin_filename
            source = self._read(name, lambda: decode_source(name, _standard_input()))
            if source is not None:
                yield source, Path(name).parent, None
            return
        paths, wrong = self._paths()
        self.found.extend(wrong)
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
        options = self.options
        if not options.fix and not options.diff:
            sink = Sink()
            self._keep(analyse(source, sink, folder), sink)
            return
        from kcdsl.check.fixing import fix

        mended = fix(source, folder, unsafe=options.unsafe, wanted=options.shows)
        self.fixed += mended.applied
        self.changed += mended.source.text != source.text
        for diagnostic in mended.refused:
            where = f"{source.name}: {diagnostic.code}"
            print(
                f"{where}: its fix was taken back: the contract would be no better", file=sys.stderr
            )
        if options.diff:
            from kcdsl.cli.fmt import difference

            sys.stdout.write(difference(source, mended.source.text, "fixed"))
            return
        if path is None:
            sys.stdout.write(mended.source.text)
        elif mended.source.text != source.text:
            from kcdsl.source.writing import write_bytes

            write_bytes(path, mended.source.text.encode("utf-8"), path.stat().st_mode & 0o777)
        self._keep(mended.analysis, mended.left)

    def _keep(self, analysis: Analysis, found: Sink | Sequence[Diagnostic]) -> None:
        self.found.extend(found)
        self.suppressed.extend(analysis.suppressed)
        clauses = analysis.raw.clauses if analysis.raw is not None else ()
        named = tuple((clause.id.text, _whole(clause)) for clause in clauses)
        self.files.append(Checked(analysis.source.name, named))
        sources = [d.source for d in found if d.source is not None]
        self.behind |= {Path(source.name) for source in sources}
        self.behind |= {item.loaded.path for item in analysis.imports if item.loaded is not None}

    def _code(self, shown: Sequence[Diagnostic]) -> Exit:
        if any(d.code in _UNREADABLE for d in shown):
            return Exit.COULD_NOT_RUN
        failed = any(self.options.fails(d.severity) for d in shown)
        return Exit.VIOLATED if failed and not self.options.exit_zero else Exit.HELD

    def _deliver(self, shown: list[Diagnostic], code: Exit) -> None:
        options = self.options
        accepted = tuple(s for s in self.suppressed if options.shows(s.diagnostic))
        about = Run(
            files=tuple(self.files),
            suppressed=accepted,
            docs_url=options.config.docs_url,
            fail_on=options.fail_on,
            exit_code=int(code),
        )
        for output in options.outputs:
            if output.file is not None:
                from kcdsl.source.writing import write_bytes

                text = render(shown, output.format, None, about)
                # Names of files may hold bytes that are no characters; in JSON, this is an escape.
                write_bytes(output.file, f"{text}\n".encode("utf-8", "backslashreplace"))
                continue
            # The mended text of standard input has standard output for itself.
            mended = options.fix and _STDIN in options.paths
            stream = sys.stderr if mended else sys.stdout
            if options.statistics:
                text = _statistics(shown)
            elif shown or output.format in DOCUMENTS:
                text = render(shown, output.format, stream, about)
            else:
                text = ""
            if text:
                print(text, file=stream, flush=True)
            if output.format == "full" and self.files:
                print(self._summary(shown, len(accepted)), file=sys.stderr)

    def _summary(self, shown: list[Diagnostic], accepted: int) -> str:
        files = len(self.files)
        counts = [
            _number(n, severity.value)
            for severity in Severity
            if (n := sum(d.severity is severity for d in shown))
        ]
        if accepted:
            counts.append(f"{accepted} accepted")
        text = f"{_number(files, 'contract')}: {', '.join(counts) or 'nothing found'}"
        if self.fixed:
            text += f"; {self.fixed} fixed"
        if not any(d.fix for d in shown):
            return text
        from kcdsl.check.fixing import mends

        safe = sum(mends(d.fix, unsafe=False) for d in shown)
        every = sum(mends(d.fix, unsafe=True) for d in shown)
        if not safe:
            return f"{text}; {every} fixable with --fix --unsafe-fixes"
        more = f", {every - safe} more with --unsafe-fixes" if every > safe else ""
        return f"{text}; {safe} fixable with --fix{more}"


def _whole(clause: RawClause) -> Span:
    """Return the place of a clause with all its fields."""
    if clause.body is None:
        return clause.span
    body = clause.body.span
    return Span(min(clause.span.start, body.start), max(clause.span.end, body.end))


def _standard_input() -> bytes:
    """Return what standard input holds, one byte more than is allowed at most."""
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise refuse(INPUT_OUTPUT, "there is no standard input", help="name a file")
    data: bytes = stream.read(SIZE_LIMIT + 1)
    return data


def _statistics(shown: list[Diagnostic]) -> str:
    """Return a line for each code, the most frequent first: how often, severities, fixable."""
    rows = []
    for code in {d.code for d in shown}:
        those = [d for d in shown if d.code == code]
        severity = max((d.severity for d in those), key=SEVERITIES.index)
        fixable = sum(d.fix is not None for d in those)
        note = f" ({fixable} with a fix)" if fixable else ""
        rows.append((-len(those), code.id, f"{severity.value:7}  {code.id}  {code.title}{note}"))
    width = len(str(max((-count for count, _, _ in rows), default=0)))
    return "\n".join(f"{-count:{width}}  {text}" for count, _, text in sorted(rows))


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
