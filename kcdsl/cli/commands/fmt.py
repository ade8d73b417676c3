"""`kcdsl fmt`: write contracts in the house layout."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from kcdsl.cli.common import Command, argument, switch
from kcdsl.cli.common.contracts import contracts_in
from kcdsl.cli.common.output import counted, difference
from kcdsl.diagnostics import Refusal, Sink, refuse
from kcdsl.diagnostics.codes import USAGE
from kcdsl.diagnostics.render.full import render_full
from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.exits import Exit
from kcdsl.format import format_text
from kcdsl.source.config import load_config
from kcdsl.source.files import decode_source, read_source
from kcdsl.source.writing import write_bytes

_STDIN = "-"


@dataclass(frozen=True, kw_only=True)
class Fmt(Command):
    """Write contracts in the house layout; comments and meaning stay."""

    paths: tuple[str, ...] = argument(
        "PATH",
        "files, folders (their *.kc.yaml and contract.yaml), or - for standard input",
        "*",
    )
    check: bool = switch("write nothing; exit 1 if a file would change")
    diff: bool = switch("show what would change, and write nothing")

    def run(self) -> Exit:
        """Format each file; exit code 1 where `--check` or `--diff` found one that would change, 2
        where one cannot be read, written or formatted, and then that file is left as it is."""
        dry = self.check or self.diff
        seen, failed, changed = 0, 0, 0
        for name, path in self._places():
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
            if self.diff:
                sys.stdout.write(difference(source, text))
            elif self.check:
                print(one_line(str(name)))
        summary = f"{counted(seen, 'file')}: {changed} {'would change' if dry else 'changed'}"
        if failed:
            summary += f", {failed} left as {'they are' if failed > 1 else 'it is'}"
        print(summary, file=sys.stderr)
        if failed:
            return Exit.COULD_NOT_RUN
        return Exit.VIOLATED if dry and changed else Exit.HELD

    def _places(self) -> list[tuple[str, Path | None]]:
        """Return the names of what is to be formatted; the path is None for standard input."""
        if _STDIN in self.paths:
            if len(self.paths) > 1:
                raise refuse(USAGE, "standard input is read alone", help="leave the others out")
            return [("<stdin>", None)]
        config = load_config(Path())
        found = contracts_in(self.paths, Path(), config.exclude, config.origin("exclude").folder)
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
