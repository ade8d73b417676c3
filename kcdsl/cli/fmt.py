"""`kcdsl fmt`: write contracts in the house layout."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kcdsl.cli.discover import contracts_in
from kcdsl.config import load_config
from kcdsl.diagnostics import Refusal, Sink, refuse
from kcdsl.diagnostics.codes import USAGE
from kcdsl.diagnostics.render.full import render_full
from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.exits import Exit
from kcdsl.format import format_text
from kcdsl.source.files import decode_source, read_source
from kcdsl.source.writing import write_bytes

HELP = "write contracts in the house layout; comments and meaning stay"
_STDIN = "-"
_NO_END = "\n\\ No newline at end of file\n"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="files, folders (their *.kc.yaml and contract.yaml), or - for standard input",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a file would change"
    )
    parser.add_argument(
        "--diff", action="store_true", help="show what would change, and write nothing"
    )


def run(arguments: argparse.Namespace) -> Exit:
    """Format each file; exit code 1 where `--check` or `--diff` found one that would change, 2
    where one cannot be read, written or formatted, and then that file is left as it is."""
    dry = arguments.check or arguments.diff
    seen, failed, changed = 0, 0, 0
    for name, path in _places(arguments.paths):
        seen += 1
        try:
            source = _read(name, path)
            text = _formatted(source)
            if path is None and not dry:
                sys.stdout.write(text)
            if text == source.text:
                continue
            if path is not None and not dry:
                write_bytes(path, text.encode("utf-8"), path.stat().st_mode & 0o777)
        except Refusal as refusal:
            print(render_full(refusal.diagnostics, sys.stderr), file=sys.stderr)
            failed += 1
            continue
        changed += 1
        if arguments.diff:
            sys.stdout.write(difference(source, text))
        elif arguments.check:
            print(one_line(str(name)))
    notes = [
        f"{seen} file{'s' if seen != 1 else ''}: {changed} {'would change' if dry else 'changed'}"
    ]
    if failed:
        notes.append(f"{failed} left as they are" if failed > 1 else "1 left as it is")
    print(", ".join(notes), file=sys.stderr)
    if failed:
        return Exit.COULD_NOT_RUN
    return Exit.VIOLATED if dry and changed else Exit.HELD


def _places(paths: list[str]) -> list[tuple[str, Path | None]]:
    """Return the names of what is to be formatted; the path is None for standard input."""
    if _STDIN in paths:
        if len(paths) > 1:
            raise refuse(USAGE, "standard input is read alone", help="leave the others out")
        return [("<stdin>", None)]
    config = load_config(Path())
    found = contracts_in(paths, Path(), config.exclude, config.origin("exclude").folder)
    return [(str(path), path) for path in found]


def _read(name: str, path: Path | None) -> SourceFile:
    return decode_source(name, sys.stdin.buffer.read()) if path is None else read_source(path)


def _formatted(source: SourceFile) -> str:
    """Return the text in the house layout; raises Refusal where it has none."""
    sink = Sink()
    text = format_text(source, sink)
    if text is None:
        raise Refusal(tuple(sink))
    return text


def difference(source: SourceFile, text: str, how: str = "formatted") -> str:
    """Return what would change, as a unified diff."""
    from difflib import unified_diff
    from io import StringIO

    name = one_line(source.name)
    old, new = (list(StringIO(part, newline="\n")) for part in (source.text, text))
    lines = unified_diff(old, new, name, f"{name} ({how})")
    return "".join(line if line.endswith("\n") else f"{line}{_NO_END}" for line in lines)
