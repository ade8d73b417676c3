"""`kcdsl lint`: check contracts and say everything that is wrong with them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

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
    USAGE,
)
from kcdsl.diagnostics.render import DOCUMENTS, FORMATS, Checked, Run, render
from kcdsl.exits import Exit
from kcdsl.source.files import decode_source, read_source
from kcdsl.source.text import SourceFile

HELP = "check contracts and report what is wrong, without running anything"
_UNREADABLE = {FILE_MISSING, INPUT_OUTPUT, NO_CONTRACT, BAD_CONFIGURATION}
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
    options = read_options(arguments)
    if not arguments.watch:
        return _Session(options).run()
    if _STDIN in arguments.paths:
        raise refuse(USAGE, "standard input cannot be watched", help="name files or folders")
    from kcdsl.cli.watch import watch

    session = _Session(options)
    return watch(session.watched, lambda: session.run())


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
        """Return the files whose change matters: the contracts and what they import or name."""
        return {*self._paths(), *self.behind}

    def run(self) -> Exit:
        """Check every path once and write the findings."""
        self.found, self.suppressed, self.files = [], [], []
        self.fixed = self.changed = 0
        for source, folder, path in self._texts():
            self._check(source, folder, path)
        shown = [d for d in dict.fromkeys(self.found) if self.options.shows(d)]
        code = self._code(shown)
        if self.options.diff and not shown:
            return Exit.VIOLATED if self.changed and not self.options.exit_zero else Exit.HELD
        self._deliver(shown, code)
        return code

    def _paths(self) -> list[Path]:
        config = self.options.config
        return contracts_in(
            self.options.paths, Path(), config.exclude, config.origin("exclude").folder
        )

    def _texts(self) -> Iterator[tuple[SourceFile, Path | None, Path | None]]:
        """Yield each text with its folder and file; what cannot be read is among the findings."""
        if _STDIN in self.options.paths:
            if len(self.options.paths) > 1:
                raise refuse(USAGE, "standard input is read alone", help="leave the others out")
            name = self.options.stdin_filename
            yield decode_source(name, sys.stdin.buffer.read()), Path(name).parent, None
            return
        for path in self._paths():
            try:
                source = read_source(path)
            except Refusal as refusal:
                self.files.append(Checked(str(path)))
                self.found.extend(refusal.diagnostics)
                continue
            yield source, path.parent, path

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
            print(f"{where}: its fix was taken back: it would make errors", file=sys.stderr)
        if options.diff:
            from kcdsl.cli.fmt import difference

            sys.stdout.write(difference(source, mended.source.text, "fixed"))
            return
        if path is None:
            sys.stdout.write(mended.source.text)
        elif mended.source.text != source.text:
            from kcdsl.source.writing import write_bytes

            target = path.resolve()
            write_bytes(target, mended.source.text.encode("utf-8"), target.stat().st_mode & 0o777)
        self._keep(mended.analysis, mended.left)

    def _keep(self, analysis: Analysis, found: Sink | Sequence[Diagnostic]) -> None:
        self.found.extend(found)
        self.suppressed.extend(analysis.suppressed)
        clauses = analysis.raw.clauses if analysis.raw is not None else ()
        named = tuple((clause.id.text, clause.span) for clause in clauses)
        self.files.append(Checked(analysis.source.name, named))
        sources = [d.source for d in found if d.source is not None]
        self.behind |= {Path(source.name) for source in sources}
        self.behind |= {item.loaded.path for item in analysis.imports if item.loaded is not None}
        if self.options.config.file is not None:
            self.behind.add(Path(self.options.config.file.name))

    def _code(self, shown: Sequence[Diagnostic]) -> Exit:
        if any(d.code in _UNREADABLE for d in shown):
            return Exit.COULD_NOT_RUN
        failed = any(self.options.fails(d.severity) for d in shown)
        return Exit.VIOLATED if failed and not self.options.exit_zero else Exit.HELD

    def _deliver(self, shown: list[Diagnostic], code: Exit) -> None:
        options = self.options
        about = Run(
            files=tuple(self.files),
            suppressed=tuple(s for s in self.suppressed if options.shows(s.diagnostic)),
            docs_url=options.config.docs_url,
            fail_on=options.fail_on,
            exit_code=int(code),
        )
        for output in options.outputs:
            if output.file is not None:
                from kcdsl.source.writing import write_bytes

                text = render(shown, output.format, None, about)
                write_bytes(output.file, f"{text}\n".encode())
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
                print(text, file=stream)
            if output.format == "full":
                print(self._summary(shown), file=sys.stderr)

    def _summary(self, shown: list[Diagnostic]) -> str:
        files = len(self.files)
        counts = [
            _number(n, severity.value)
            for severity in Severity
            if (n := sum(d.severity is severity for d in shown))
        ]
        if self.suppressed:
            counts.append(f"{len(self.suppressed)} accepted")
        text = f"{_number(files, 'contract')}: {', '.join(counts) or 'nothing found'}"
        if self.fixed:
            text += f"; {self.fixed} fixed"
        safe = sum(d.fix is not None and d.fix.safe for d in shown)
        guesses = sum(d.fix is not None and not d.fix.safe for d in shown)
        if safe:
            more = f" ({safe + guesses} with --unsafe-fixes)" if guesses else ""
            return f"{text}; --fix mends {safe}{more}"
        return f"{text}; --fix --unsafe-fixes mends {guesses}" if guesses else text


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
