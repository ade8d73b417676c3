"""`kcdsl lint`: check contracts and say everything that is wrong with them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kcdsl.check.compile import analyse
from kcdsl.cli.discover import contracts_in
from kcdsl.diagnostics import Diagnostic, Refusal, Severity, Sink, refuse
from kcdsl.diagnostics.codes import FILE_MISSING, INPUT_OUTPUT, NO_CONTRACT, USAGE
from kcdsl.diagnostics.render import FORMATS, SUFFIXES, render
from kcdsl.exits import Exit
from kcdsl.source.files import decode_source, read_source
from kcdsl.source.text import SourceFile

HELP = "check contracts and report what is wrong, without running anything"
_UNREADABLE = {FILE_MISSING, INPUT_OUTPUT, NO_CONTRACT}
_RANK = {Severity.NOTE: 0, Severity.WARNING: 1, Severity.ERROR: 2}
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
        choices=[severity.value for severity in _RANK],
        default=os.environ.get("KCDSL_FAIL_ON", "error"),
        help="least severity that gives exit code 1 (default: error)",
    )
    parser.add_argument("--fix", action="store_true", help="apply the safe fixes")
    parser.add_argument(
        "--unsafe-fixes", action="store_true", help="with --fix, apply the probable ones too"
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
    outputs = _outputs(arguments)
    if arguments.fail_on not in {severity.value for severity in _RANK}:
        raise refuse(
            USAGE, f"KCDSL_FAIL_ON is {arguments.fail_on!r}", help="error, warning or note"
        )
    if arguments.watch:
        from kcdsl.cli.watch import watch

        return watch(
            lambda: contracts_in(arguments.paths, Path()), lambda: _once(arguments, outputs)
        )
    return _once(arguments, outputs)


@dataclass(frozen=True, slots=True)
class _Output:
    format: str
    file: Path | None


def _outputs(arguments: argparse.Namespace) -> list[_Output]:
    """Return where findings go, in which form; the first without a file is that of stdout."""
    found: list[_Output] = []
    for word in arguments.format or ():
        format, sign, name = word.partition("=")
        if format not in FORMATS or (sign and not name):
            raise refuse(USAGE, f"there is no format `{word}`", help=f"one of {', '.join(FORMATS)}")
        found.append(_Output(format, Path(name) if sign else None))
    if arguments.output is not None:
        path = Path(arguments.output)
        if path.suffix not in SUFFIXES:
            raise refuse(
                USAGE,
                f"the suffix of {path} says no format",
                help=f"one of {', '.join(SUFFIXES)}, or --format FORMAT={path}",
            )
        found.append(_Output(SUFFIXES[path.suffix], path))
    if sum(output.file is None for output in found) > 1:
        raise refuse(USAGE, "two formats for standard output", help="give one of them a file")
    if not any(output.file is None for output in found) and arguments.output is None:
        actions = os.environ.get("GITHUB_ACTIONS") == "true"
        found.insert(0, _Output("github" if actions else "full", None))
    return found


def _once(arguments: argparse.Namespace, outputs: Sequence[_Output]) -> Exit:
    found: list[Diagnostic] = []
    names: list[str] = []
    fixed = changed = 0
    for source, folder, path in _texts(arguments, found, names):
        if arguments.fix or arguments.diff:
            from kcdsl.check.fixing import fix

            result = fix(source, folder, unsafe=arguments.unsafe_fixes)
            fixed += result.applied
            changed += result.source.text != source.text
            if arguments.diff:
                sys.stdout.write(_difference(source, result.source))
                continue
            if path is None:
                sys.stdout.write(result.source.text)
            elif result.source.text != source.text:
                from kcdsl.source.writing import write_bytes

                write_bytes(path, result.source.text.encode("utf-8"), path.stat().st_mode & 0o777)
            found.extend(result.left)
        else:
            sink = Sink()
            analyse(source, sink, folder)
            found.extend(sink)
    if arguments.diff and not found:
        return Exit.VIOLATED if changed and not arguments.exit_zero else Exit.HELD
    _deliver(found, names, outputs)
    if any(output.format == "full" and output.file is None for output in outputs):
        print(_summary(found, len(names), fixed), file=sys.stderr)
    if any(d.code in _UNREADABLE for d in found):
        return Exit.COULD_NOT_RUN
    worst = max((_RANK[d.severity] for d in found), default=-1)
    failed = worst >= _RANK[Severity(arguments.fail_on)]
    return Exit.VIOLATED if failed and not arguments.exit_zero else Exit.HELD


def _texts(
    arguments: argparse.Namespace, found: list[Diagnostic], names: list[str]
) -> Iterable[tuple[SourceFile, Path | None, Path | None]]:
    """Yield each text with its folder and file; what cannot be read is among the findings."""
    if _STDIN in arguments.paths:
        if len(arguments.paths) > 1:
            raise refuse(USAGE, "standard input is read alone", help="leave the other paths out")
        name = arguments.stdin_filename
        names.append(name)
        folder = Path(name).parent if name != "<stdin>" else Path()
        yield decode_source(name, sys.stdin.buffer.read()), folder, None
        return
    for path in contracts_in(arguments.paths, Path()):
        names.append(str(path))
        try:
            source = read_source(path)
        except Refusal as refusal:
            found.extend(refusal.diagnostics)
            continue
        yield source, path.parent, path


def _deliver(found: list[Diagnostic], names: list[str], outputs: Sequence[_Output]) -> None:
    for output in outputs:
        if output.file is not None:
            from kcdsl.source.writing import write_bytes

            text = render(found, output.format, None, names)
            write_bytes(output.file, f"{text}\n".encode())
        elif found or output.format in {"json", "sarif", "junit"}:
            print(render(found, output.format, sys.stdout, names))


def _difference(source: SourceFile, mended: SourceFile) -> str:
    from kcdsl.cli.fmt import difference

    return difference(source, mended.text, "fixed")


def _summary(found: list[Diagnostic], files: int, fixed: int) -> str:
    counts = [
        f"{n} {severity.value}{'s' if n != 1 else ''}"
        for severity in Severity
        if (n := sum(d.severity is severity for d in found))
    ]
    text = f"{files} contract{'s' if files != 1 else ''}: {', '.join(counts) or 'nothing found'}"
    if fixed:
        text += f"; {fixed} fixed"
    can = sum(d.fix is not None and d.fix.safe for d in found)
    return f"{text}; --fix mends {can}" if can else text
