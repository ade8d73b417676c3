"""`kcdsl fmt`: write contracts in the house layout."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kcdsl.cli.discover import contracts_in
from kcdsl.diagnostics import Sink
from kcdsl.diagnostics.render.full import render_full
from kcdsl.exits import Exit
from kcdsl.format import format_text
from kcdsl.source.files import decode_source, read_source
from kcdsl.source.text import SourceFile
from kcdsl.source.writing import write_bytes

HELP = "write contracts in the house layout; comments and meaning stay"
_STDIN = "-"


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
    where one cannot be read or is not YAML, and then that file is left as it is."""
    changed, failed, seen = [], 0, 0
    for source, path in _sources(arguments.paths):
        seen += 1
        sink = Sink()
        text = format_text(source, sink)
        if text is None:
            print(render_full(sink, sys.stderr), file=sys.stderr)
            failed += 1
            continue
        if path is None and not (arguments.check or arguments.diff):
            sys.stdout.write(text)
        if text == source.text:
            continue
        changed.append(source.name)
        if arguments.diff:
            sys.stdout.write(difference(source, text))
        elif path is not None and not arguments.check:
            write_bytes(path, text.encode("utf-8"), path.stat().st_mode & 0o777)
    dry = arguments.check or arguments.diff
    for name in changed if arguments.check and not arguments.diff else ():
        print(name)
    word = "would change" if dry else "changed"
    notes = [f"{seen} file{'s' if seen != 1 else ''}: {len(changed)} {word}"]
    if failed:
        notes.append(f"{failed} left as they are" if failed > 1 else "1 left as it is")
    print(", ".join(notes), file=sys.stderr)
    if failed:
        return Exit.COULD_NOT_RUN
    return Exit.VIOLATED if dry and changed else Exit.HELD


def _sources(paths: list[str]) -> list[tuple[SourceFile, Path | None]]:
    """Return the texts to format; the path is None for standard input."""
    if _STDIN in paths:
        return [(decode_source("<stdin>", sys.stdin.buffer.read()), None)]
    return [(read_source(path), path) for path in contracts_in(paths, Path())]


def difference(source: SourceFile, text: str, how: str = "formatted") -> str:
    """Return what would change, as a unified diff."""
    from difflib import unified_diff

    lines = unified_diff(
        source.text.splitlines(keepends=True),
        text.splitlines(keepends=True),
        source.name,
        f"{source.name} ({how})",
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
