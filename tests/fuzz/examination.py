"""What must hold of every document, however damaged; the first thing that does not is returned."""

from __future__ import annotations

import json
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import unified_diff
from itertools import pairwise, zip_longest
from pathlib import Path

from kcdsl.check.compile import Analysis, analyse
from kcdsl.check.fixing import edited, fix
from kcdsl.diagnostics.model import Diagnostic, Refusal, Severity, Sink
from kcdsl.diagnostics.render import FORMATS, Checked, Run, render
from kcdsl.format import edits, format_text
from kcdsl.format.comments import find_comments, scalars
from kcdsl.ir.canonical import digest, document
from kcdsl.ir.load import load_bytes
from kcdsl.ir.terms import Program
from kcdsl.route.router import route
from kcdsl.source.files import decode_source
from kcdsl.source.scalar_map import map_scalar
from kcdsl.source.text import SourceFile, Span
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, Sequence, parse_yaml
from tests.fuzz.watchdog import Hang, limit

SECONDS = 2.0
NAME = "mutant.kc.yaml"
LAYOUT_ALONE = {"KC015"}
"""Codes of findings about the layout, which formatting may mend."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that must not happen: at which stage, and what; `key` tells defects apart."""

    stage: str
    key: str
    detail: str


@dataclass(slots=True)
class Examined:
    """What became of a document."""

    outcome: str
    failure: Failure | None = None
    slowest: float = 0.0
    """The processor time of the slowest stage."""


class Broken(Exception):
    """Raised where something does not hold."""


def examine(data: bytes, folder: Path, *, seconds: float = SECONDS) -> Examined:
    """Check everything that is promised of a document, each stage within a time limit."""
    examination = _Examination(folder, seconds)
    failure = None
    try:
        examination.run(data)
    except Broken as error:
        failure = Failure(examination.stage, str(error).partition(":")[0], str(error))
    except Hang as error:
        failure = Failure(examination.stage, "hang", f"{error}\n{traceback.format_exc()}")
    except Exception as error:
        failure = Failure(examination.stage, _origin(error), traceback.format_exc())
    return Examined(examination.outcome, failure, examination.slowest)


def _origin(error: Exception) -> str:
    """Return the kind of an exception and the last function of the project that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/kcdsl" in frame.filename] or list(frames)
    return f"{type(error).__name__} in {Path(own[-1].filename).name}:{own[-1].name}"


class _Examination:
    """Goes through the stages; `outcome` says how far the document came."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.seconds = seconds
        self.stage = ""
        self.outcome = "unreadable"
        self.slowest = 0.0

    @contextmanager
    def at(self, stage: str) -> Iterator[None]:
        self.stage = stage
        begun = time.process_time()
        with limit(self.seconds):
            yield
        self.slowest = max(self.slowest, time.process_time() - begun)

    def run(self, data: bytes) -> None:
        with self.at("read"):
            try:
                source = decode_source(NAME, data)
            except Refusal as refusal:
                _check_findings(refusal.diagnostics, None)
                return
        sink = Sink()
        with self.at("lint"):
            analysis = analyse(source, sink, self.folder)
        with self.at("findings"):
            _check_findings(sink, source)
        with self.at("places"):
            _check_places(source, analysis)
        self.outcome = "no YAML" if analysis.root is None else "rejected"
        program = analysis.program
        expect((program is None and analysis.library is None) == sink.has_errors, "no program and no error")
        if program is not None:
            self.outcome = "accepted"
            with self.at("program"):
                _check_program(program)
        with self.at("format"):
            text = _check_format(source)
        if text is not None:
            again = Sink()
            with self.at("lint"):
                after = analyse(SourceFile(NAME, text), again, self.folder)
            with self.at("meaning"):
                _check_meaning(analysis, sink, after, again)
        if any(found.fix is not None for found in sink):
            self._check_fixes(source, sink)

    def _check_fixes(self, source: SourceFile, sink: Sink) -> None:
        """Every fix alone, and all together, leads to a text that is read without a crash."""
        for found in sink:
            if found.fix is not None and found.source == source:
                with self.at("fix"):
                    edited(source.text, found.fix.edits)
        # Each round of fixes is a lint; a fix may take as long as its rounds.
        seconds, self.seconds = self.seconds, 10 * self.seconds
        with self.at("fix"):
            fixed = fix(source, self.folder, unsafe=True)
        self.seconds = seconds
        errors = sum(found.severity is Severity.ERROR for found in sink)
        left = sum(found.severity is Severity.ERROR for found in fixed.left)
        expect(left <= errors, f"fixes make errors: {errors}, then {left}")


def expect(true: bool, what: str) -> None:
    """Raise Broken unless something holds; the text before a colon names the defect."""
    if not true:
        raise Broken(what)


# --- findings -------------------------------------------------------------------------------------


def _check_findings(found: Iterable[Diagnostic], source: SourceFile | None) -> None:
    """Every finding has a place inside its file, and renders in every format."""
    diagnostics = list(found)
    for item in diagnostics:
        expect(bool(item.message.strip()), f"empty message: {item.code.id}")
        if source is None:
            continue
        expect(item.source is not None and item.span is not None, f"no place: {item.code.id}")
        assert item.source is not None
        spans = [item.span, *(label.span for label in item.labels)]
        spans += [edit.span for edit in item.fix.edits] if item.fix is not None else []
        size = len(item.source.text)
        for span in spans:
            inside = span is not None and 0 <= span.start <= span.end <= size
            expect(inside, f"place outside the file: {item.code.id} {span} of {size}")
        if item.fix is not None:
            places = sorted(edit.span for edit in item.fix.edits)
            apart = all(a.end <= b.start for a, b in pairwise(places))
            expect(apart, f"edits of one fix overlap: {item.code.id} {places}")
    for name in FORMATS:
        text = render(diagnostics, name, None, Run(files=(Checked(NAME),)))
        text.encode("utf-8")
        if name in {"json", "sarif"}:
            json.loads(text)
        elif name == "junit":
            ElementTree.fromstring(text)
        elif name == "concise":
            expect(text.count("\n") + bool(text) == len(diagnostics), "concise: not one line each")
        else:
            expect(not any(ord(c) < 32 and c not in "\n\t" for c in text), f"{name}: control characters")


def _check_places(source: SourceFile, analysis: Analysis) -> None:
    """Every scalar is mapped character by character, but for what the documentation names."""
    for scalar in scalars(analysis.root) if analysis.root is not None else ():
        mapped = map_scalar(source, scalar)
        raw = source.text[scalar.span.start : scalar.span.end]
        expect(mapped.pieces is not None, f"unmapped {scalar.style}: {raw!r} as {scalar.text!r}")


# --- programs -------------------------------------------------------------------------------------


def _check_program(program: Program) -> None:
    """A program is stored and read back, and each of its clauses has a route."""
    data = document(program)
    back = load_bytes(data)
    expect(document(back) == data or bool(program.imports), "another program after reading it back")
    expect(digest(back) == digest(program), "another digest after reading it back")
    expect(len(route(program)) == len(program.clauses), "a clause without a route")


# --- format ---------------------------------------------------------------------------------------


def _check_format(source: SourceFile) -> str | None:
    """Formatting twice is formatting once; comments keep their order and what they stand at."""
    sink = Sink()
    text = format_text(source, sink)
    if text is None:
        expect(sink.has_errors, "not formatted, without an error")
        expect(all(d.code.id != "KC701" for d in sink), "refused to format")
        return None
    new = SourceFile(NAME, text)
    again = Sink()
    twice = format_text(new, again)
    expect(twice is not None, f"formatted once and not twice: {[d.message for d in again]}")
    assert twice is not None
    difference = "\n".join(unified_diff(text.splitlines(), twice.splitlines(), lineterm=""))
    expect(twice == text, f"formatted twice is another text:\n{difference}")
    expect("\r" not in text and text.endswith("\n"), "line ends")
    expect(_applied(source.text, text), "the edits lead to another text")
    before, after = _attached(source), _attached(new)
    for old, now in zip_longest(before, after):
        expect(old is not None and now is not None, "a comment too many or too few")
        same = old[:1] == now[:1] and now[1] in old[1:]
        expect(same, f"a comment moved: {old} to {now}")
    return text


def _applied(old: str, new: str) -> bool:
    text = old
    for edit in reversed(edits(old, new)):
        text = text[: edit.span.start] + edit.text + text[edit.span.end :]
    return text == new


def _attached(source: SourceFile) -> list[tuple[str | int, ...]]:
    """Return each comment with the number of scalars before it.

    Between a key and its value it may move above the key: then that number is allowed too.
    """
    root = parse_yaml(source, Sink())
    if root is None:
        return []
    ordered = list(_in_order(root))
    found: list[tuple[str | int, ...]] = []
    at = 0
    for comment in find_comments(source, root):
        while at < len(ordered) and ordered[at][0].start < comment.start:
            at += 1
        after_key = at > 0 and ordered[at - 1][1]
        found.append((comment.text, at, at - 1) if after_key else (comment.text, at))
    return found


def _in_order(node: Node) -> Iterator[tuple[Span, bool]]:
    """Yield the place of every scalar that is not empty, and whether it is a key."""
    match node:
        case Scalar(span=span):
            yield span, False
        case Sequence(items=items):
            for item in items:
                yield from _in_order(item)
        case Mapping(entries=entries):
            for entry in entries:
                yield entry.key.span, True
                yield from _in_order(entry.value)


def _check_meaning(before: Analysis, old: Sink, after: Analysis, new: Sink) -> None:
    """The formatted document means the same, and the same is said about it."""
    expect((before.program is None) == (after.program is None), "accepted before or after alone")
    if before.program is not None and after.program is not None:
        expect(digest(before.program) == digest(after.program), "formatted means something else")
    codes = [
        sorted(d.code.id for d in sink if d.code.id not in LAYOUT_ALONE) for sink in (old, new)
    ]
    expect(codes[0] == codes[1], f"other findings after formatting: {codes[0]} then {codes[1]}")
