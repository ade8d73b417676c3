"""Output of commands: JSON, reports in several formats, tables, progress."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import INPUT_OUTPUT, USAGE
from kcdsl.diagnostics.render.terminal import json_text, one_line
from kcdsl.source.files import read_source

if TYPE_CHECKING:
    from rich.progress import TaskID

    from kcdsl.diagnostics.spans import SourceFile, Span
    from kcdsl.ir.terms import Program

REPORT_FORMATS = ("text", "json", "junit", "github", "sarif", "concise", "html")
"""The formats of a report; `text` is for people, the others are for programs and browsers."""
Progress = Callable[[str, int, int], None]
"""A progress callback: the name of a stage, the work done, and the total work."""


# --- texts ---------------------------------------------------------------------------------------


def print_json(document: Any, **how: Any) -> None:
    """Print a JSON document."""
    sys.stdout.write(json_text(document, **how))


def write_text(text: str, file: str | Path | None) -> None:
    """Write a text to a file, or to standard output without one.

    Refuse to replace a file that is no text, such as a checkpoint.
    """
    if file is None:
        sys.stdout.write(text)
        return
    from kcdsl.source.output import write_bytes

    path = Path(file)
    if _is_binary(path):
        what = f"{path} is no text file, and is not replaced by one"
        raise refuse(INPUT_OUTPUT, what, help="name another file for the results")
    write_bytes(path, text.encode("utf-8"))


def _is_binary(path: Path) -> bool:
    """Return whether a regular file has a zero byte near its beginning."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as stream:
            return b"\0" in stream.read(4096)
    except OSError:
        return False


def refuse_replacing(targets: Iterable[str], read: Sequence[str | Path]) -> None:
    """Refuse existing files for results that the command reads, such as the contract."""
    for target in targets:
        if any(os.path.samefile(target, path) for path in read):
            raise refuse(
                USAGE,
                f"the results would replace `{target}`, which the command reads",
                help="name another file for the results",
            )


def say(text: str) -> None:
    """Print a line for people on stderr."""
    print(one_line(text), file=sys.stderr)


def difference(source: SourceFile, text: str, how: str = "formatted") -> str:
    """Return the changes of a file as a unified diff."""
    from difflib import unified_diff

    name, no_end = one_line(source.name), "\n\\ No newline at end of file\n"
    old, new = (list(StringIO(part, newline="\n")) for part in (source.text, text))
    lines = unified_diff(old, new, name, f"{name} ({how})")
    return "".join(line if line.endswith("\n") else f"{line}{no_end}" for line in lines)


# --- formats -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Output:
    """A format, and the file that it is written to; None for standard output."""

    format: str
    file: Path | None


def outputs(
    words: Sequence[str],
    formats: Sequence[str],
    usual: str,
    more: Sequence[Output] = (),
    *,
    screen: bool = True,
) -> tuple[Output, ...]:
    """Return the outputs requested by words such as `html` and `json=report.json`, and by `more`.

    Without an output to standard output, `usual` is written there if `screen`. Raises Refusal for
    an unknown format, and for two formats on standard output.
    """
    found = []
    for word in words:
        name, sign, file = word.partition("=")
        if name not in formats or (sign and not file):
            raise refuse(USAGE, f"there is no format `{word}`", help=f"one of {', '.join(formats)}")
        found.append(Output(name, Path(file) if sign else None))
    found += [output for output in more if output.file is not None or output not in found]
    if sum(output.file is None for output in found) > 1:
        raise refuse(USAGE, "two formats for standard output", help="give one of them a file")
    if screen and all(output.file is not None for output in found):
        found.append(Output(usual, None))
    return tuple(found)


def report_in(
    format: str,
    report: Mapping[str, Any],
    *,
    command: str,
    source: SourceFile | None = None,
    places: Mapping[str, Span] | None = None,
    attribution: Mapping[str, Any] | None = None,
) -> str:
    """Return a report document in a format other than `text`, ending with a line break."""
    match format:
        case "json":
            return json_text(report, allow_nan=False)
        case "html":
            from kcdsl.verdict.html import page

            return page(report, attribution) + "\n"
        case _:
            from kcdsl.verdict.messages import in_format

            text = in_format(report, format, command, source, places)
            return text + "\n" if text and not text.endswith("\n") else text


def clause_places(path: Path, program: Program) -> tuple[SourceFile, dict[str, Span]]:
    """Return a contract's file, and the span of each of its clauses."""
    source = read_source(path)
    inside = range(len(source.text) + 1)
    places = {clause.id: clause.span for clause in program.clauses}
    return source, {name: span for name, span in places.items() if span.end in inside}


# --- progress ------------------------------------------------------------------------------------


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Show a progress bar for each stage in this context; if stderr is no terminal, a line every
    30 s."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    hidden = not console.is_terminal
    if hidden:
        with _progress_lines() as report:
            yield report
        return
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, completed=done)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


_LONG = 512
"""The least number of steps for which `long_progress` shows progress."""


@contextmanager
def long_progress() -> Iterator[Progress]:
    """Show progress as `progress_bars`, from the first stage with many steps on, so that short work
    does not wait for the import of the bars."""
    with ExitStack() as stack:
        shown: list[Progress] = []

        def report(stage: str, done: int, total: int) -> None:
            if total < _LONG:
                return
            if not shown:
                shown.append(stack.enter_context(progress_bars()))
            shown[0](stage, done, total)

        yield report


_EVERY = 30.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """Work that has `done` of `total` steps, `first` of them when it was first reported, at the
    second `since`."""

    name: str
    done: int
    total: int
    since: float
    first: int

    def text(self, now: float) -> str:
        """Return the steps and the seconds that remain; before the first step, those it took."""
        if not self.name:
            return ""
        line, took = f", {self.name}: {self.done} of {self.total}", now - self.since
        if self.done >= self.total:
            return line
        if self.done == self.first or took <= 1:
            return f"{line} for {took:.0f} s"
        left = took / (self.done - self.first) * (self.total - self.done)
        return f"{line}, about {left:.0f} s left"


@contextmanager
def _progress_lines() -> Iterator[Progress]:
    """Write the progress of the latest stage and the remaining time to stderr every 30 s."""
    import threading

    started, over = time.monotonic(), threading.Event()
    latest = [_Stage("", 0, 0, started, 0)]

    def report(stage: str, done: int, total: int) -> None:
        last = latest[0]
        known = last.name == stage
        since, first = (last.since, last.first) if known else (time.monotonic(), done)
        latest[0] = _Stage(stage, done, total, since, first)

    def tell() -> None:
        while not over.wait(_EVERY):
            now = time.monotonic()
            say(f"progress: {now - started:.0f} s{latest[0].text(now)}")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield report
    finally:
        over.set()
        thread.join()
