"""Properties of every document, however damaged; the first that does not hold is returned."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Iterator
from collections.abc import Mapping as Table
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kcdsl.check.compile import Analysis, analyse
from kcdsl.check.fixing import edited, fix
from kcdsl.check.incremental import Incremental
from kcdsl.check.stored import load_bytes
from kcdsl.diagnostics.model import Diagnostic, Refusal, Severity, Sink, Suppressed
from kcdsl.diagnostics.render import FORMATS
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.canonical import digest, document
from kcdsl.ir.terms import Program
from kcdsl.logic import smtlib
from kcdsl.route.router import route
from kcdsl.source.files import decode_source
from kcdsl.source.scalar_map import map_scalar
from kcdsl.source.yaml_nodes import scalars
from tests.fuzz.findings import check_colours, check_rendering, check_spans
from tests.fuzz.formatting import check_format, check_meaning
from tests.fuzz.promise import Broken, expect
from tests.fuzz.serving import asked, check_answer, requests, same_findings
from tests.fuzz.watchdog import Hang, limit

SECONDS = 2.0
NAME = "mutant.kc.yaml"


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that must not happen: at which stage, and what; `key` tells defects apart."""

    stage: str
    key: str
    detail: str
    raised: bool = False
    """Whether it is a traceback."""


@dataclass(slots=True)
class Examined:
    """What became of a document."""

    outcome: str
    failure: Failure | None = None
    times: Table[str, float] = field(default_factory=dict)
    """The processor time of each stage, of its slowest run."""
    codes: frozenset[str] = frozenset()
    """The codes of what was found."""
    changed: bool = False
    """Whether formatting makes another text of it."""


def examine(
    data: bytes,
    folder: Path,
    *,
    before: bytes | None = None,
    served: bool = False,
    solved: bool = False,
    seconds: float = SECONDS,
) -> Examined:
    """Check everything that is promised of a document, each stage within a time limit.

    `before` is what an editor held before the document; `folder` is where files are looked for.
    With `served` a language server is asked about it, with `solved` z3 reads the question that it
    is put as.
    """
    examination = _Examination(folder, seconds)
    failure = None
    try:
        examination.run(data)
        if examination.source is not None and before is not None:
            with examination.at("edit"):
                _check_edit(before, examination.source, examination.sink, folder)
        if examination.source is not None and served:
            examination.serve(examination.source, before)
        if examination.program is not None and solved:
            with examination.at("solver"):
                _check_question(examination.program)
    except Broken as error:
        failure = Failure(examination.stage, str(error).partition(":")[0], str(error))
    except Hang as error:
        failure = Failure(examination.stage, "hang", f"{error}\n{traceback.format_exc()}")
    except Exception as error:
        failure = Failure(examination.stage, _origin(error), traceback.format_exc(), True)
    return Examined(
        examination.outcome,
        failure,
        examination.times,
        frozenset(examination.codes),
        examination.changed,
    )


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
        self.outcome = "not text"
        self.changed = False
        self.times: dict[str, float] = {}
        self.codes: set[str] = set()
        self.source: SourceFile | None = None
        self.sink = Sink()
        self.program: Program | None = None

    @contextmanager
    def at(self, stage: str, *, rounds: int = 1) -> Iterator[None]:
        self.stage = stage
        begun = time.process_time()
        with limit(rounds * self.seconds):
            yield
        taken = time.process_time() - begun
        self.times[stage] = max(self.times.get(stage, 0.0), taken / rounds)

    def run(self, data: bytes) -> None:
        with self.at("read"):
            try:
                self.source = source = decode_source(NAME, data)
            except Refusal as refusal:
                self._check_findings(refusal.diagnostics, (), None)
                return
        sink = self.sink
        with self.at("lint"):
            analysis = analyse(source, sink, self.folder)
        self._check_findings(tuple(sink), analysis.suppressed, source)
        with self.at("places"):
            _check_places(source, analysis)
        self.outcome = "not YAML" if analysis.root is None else "rejected"
        self.program = program = analysis.program
        nothing = program is None and analysis.library is None
        expect(nothing == sink.has_errors, "no program and no error, or both")
        if program is not None:
            self.outcome = "accepted"
            with self.at("program"):
                _check_program(program)
        elif analysis.library is not None:
            self.outcome = "library"
        with self.at("format"):
            text = check_format(source)
        if text is not None:
            self.changed = text != source.text
            again = Sink()
            with self.at("lint"):
                after = analyse(SourceFile(NAME, text), again, self.folder)
            with self.at("meaning"):
                check_meaning(source, analysis, sink, after, again)
        if any(found.fix is not None for found in sink):
            self._check_fixes(source, analysis)

    def _check_findings(
        self,
        found: tuple[Diagnostic, ...],
        accepted: tuple[Suppressed, ...],
        source: SourceFile | None,
    ) -> None:
        """Every finding has a place inside its file, and renders in every format."""
        everything = (*found, *(item.diagnostic for item in accepted))
        self.codes |= {item.code.id for item in everything}
        with self.at("findings"):
            check_spans(everything, source)
        for name in FORMATS:
            with self.at(name):
                check_rendering(found, accepted, name, NAME)
        with self.at("colours"):
            check_colours(found)

    def _check_fixes(self, source: SourceFile, analysis: Analysis) -> None:
        """Every fix alone, and all together, leads to a text that is read without a crash; what
        could be read still can, and the safe ones leave the meaning of what has one."""
        for found in self.sink:
            if found.fix is not None and found.source == source:
                with self.at("fix"):
                    edited(source.text, found.fix.edits)
        errors = _errors(self.sink)
        for unsafe in (False, True):
            # Each round of fixes is a lint; a fix may take as long as its rounds.
            with self.at("fix", rounds=10):
                fixed = fix(source, self.folder, unsafe=unsafe)
            left = _errors(fixed.left)
            readable = fixed.analysis.root is not None
            if analysis.root is not None:
                expect(readable, f"fixes make it unreadable: {fixed.source.text!r}")
                expect(left <= errors, f"fixes make errors: {errors}, then {left}")
            elif not readable:  # a document that can be read at last may have more errors
                expect(left <= errors, f"fixes make errors: {errors}, then {left}")
            if analysis.program is not None and not unsafe:
                program = fixed.analysis.program
                same = program is not None and digest(program) == digest(analysis.program)
                expect(same, f"safe fixes change the meaning: {fixed.source.text!r}")

    def serve(self, source: SourceFile, before: bytes | None) -> None:
        """A server finds what a check finds, and answers every request."""
        old = None if before is None else before.decode("utf-8", "replace")
        with self.at("server"):
            question = asked(source, old, self.folder)
            same = same_findings(question.snapshot, self.sink, NAME)
            expect(same, "the server finds something else")
        for method, params, offset in requests(question):
            with self.at(method):
                check_answer(question, method, params, offset)


def _errors(found: Iterable[Diagnostic]) -> int:
    return sum(item.severity is Severity.ERROR for item in found)


def _check_places(source: SourceFile, analysis: Analysis) -> None:
    """Every scalar is mapped character by character, but for what the documentation names."""
    for scalar in scalars(analysis.root) if analysis.root is not None else ():
        raw = source.text[scalar.span.start : scalar.span.end]
        if raw.startswith("*"):  # an alias, which is an error
            continue
        mapped = map_scalar(source, scalar)
        expect(mapped.pieces is not None, f"unmapped {scalar.style}: {raw!r} as {scalar.text!r}")


# --- programs -------------------------------------------------------------------------------------


def _check_program(program: Program) -> None:
    """A program is stored and read back, and each of its clauses has a route."""
    data = document(program)
    back = load_bytes(data)
    expect(document(back) == data or bool(program.imports), "another program after reading it back")
    expect(digest(back) == digest(program), "another digest after reading it back")
    expect(len(route(program)) == len(program.clauses), "a clause without a route")


def _check_question(program: Program) -> None:
    """z3 reads the question whether every clause can hold, and those that it can be asked next."""
    import z3

    for text in (smtlib.consistency(program), smtlib.implication(program, program.clauses[0].id)):
        try:
            z3.parse_smt2_string(text)
        except z3.Z3Exception as error:
            raise Broken(f"z3 does not read it: {error}\n{text}") from error


def _check_edit(before: bytes, source: SourceFile, sink: Sink, folder: Path) -> None:
    """Checking again after an edit finds what checking anew finds, back and forth."""
    try:
        old = SourceFile(NAME, before.decode("utf-8"))
    except UnicodeDecodeError:
        return
    incremental, fresh = Incremental(), Sink()
    incremental.analyse(old, folder)
    _, found = incremental.analyse(source, folder)
    expect(found.found == sink.found, "other findings after an edit")
    analyse(old, fresh, folder)
    _, found = incremental.analyse(old, folder)
    expect(found.found == fresh.found, "other findings after undoing an edit")
