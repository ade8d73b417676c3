"""Check properties of every document, however damaged; return the first violation."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Iterator
from collections.abc import Mapping as Table
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kcdsl.check.compile import Analysis, analyse
from kcdsl.check.fixes import edited, fix
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
    """A violated property: the stage, and a description; `key` tells defects apart."""

    stage: str
    key: str
    detail: str
    raised: bool = False
    """True for a traceback."""


@dataclass(slots=True)
class Examined:
    """The outcome of one document."""

    outcome: str
    failure: Failure | None = None
    times: Table[str, float] = field(default_factory=dict)
    """The processor time of each stage, of its slowest run."""
    codes: frozenset[str] = frozenset()
    """The codes of the findings."""
    changed: bool = False
    """True if formatting changes the document."""


def examine(
    data: bytes,
    folder: Path,
    *,
    before: bytes | None = None,
    served: bool = False,
    solved: bool = False,
    seconds: float = SECONDS,
) -> Examined:
    """Check every guarantee about a document, each stage within a time limit.

    `before` is the previous text in an editor; `folder` is where files are looked up. With `served`
    the requests of a language server are answered, with `solved` z3 parses the translated contract.
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
    """Return the type of an exception and the last function of the project in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/kcdsl" in frame.filename] or list(frames)
    return f"{type(error).__name__} in {Path(own[-1].filename).name}:{own[-1].name}"


class _Examination:
    """Run the stages; `outcome` names the last one that the document passed."""

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
        """Check that every finding has a place inside its file and renders in every format."""
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
        """Check fixes one at a time and together.

        The fixed text is read without a crash; a readable document stays readable, and safe fixes
        keep the meaning of a valid one.
        """
        for found in self.sink:
            if found.fix is not None and found.source == source:
                with self.at("fix"):
                    edited(source.text, found.fix.edits)
        errors = _errors(self.sink)
        for unsafe in (False, True):
            # Each round of fixes is a lint, so the time limit grows with the rounds.
            with self.at("fix", rounds=10):
                fixed = fix(source, self.folder, unsafe=unsafe)
            left = _errors(fixed.left)
            readable = fixed.analysis.root is not None
            if analysis.root is not None:
                expect(readable, f"fixes make it unreadable: {fixed.source.text!r}")
                expect(left <= errors, f"fixes make errors: {errors}, then {left}")
            elif not readable:  # a document that has become readable may have more errors
                expect(left <= errors, f"fixes make errors: {errors}, then {left}")
            if analysis.program is not None and not unsafe:
                program = fixed.analysis.program
                same = program is not None and digest(program) == digest(analysis.program)
                expect(same, f"safe fixes change the meaning: {fixed.source.text!r}")

    def serve(self, source: SourceFile, before: bytes | None) -> None:
        """Check that a server reports the findings of a check, and answers every request."""
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
    """Check that every scalar is mapped character by character, except in documented cases."""
    for scalar in scalars(analysis.root) if analysis.root is not None else ():
        raw = source.text[scalar.span.start : scalar.span.end]
        if raw.startswith("*"):  # an alias, which is an error
            continue
        mapped = map_scalar(source, scalar)
        expect(mapped.pieces is not None, f"unmapped {scalar.style}: {raw!r} as {scalar.text!r}")


# --- programs -------------------------------------------------------------------------------------


def _check_program(program: Program) -> None:
    """Check that a program survives a round trip, and that each clause has a route."""
    data = document(program)
    back = load_bytes(data)
    expect(document(back) == data or bool(program.imports), "another program after reading it back")
    expect(digest(back) == digest(program), "another digest after reading it back")
    expect(len(route(program)) == len(program.clauses), "a clause without a route")


def _check_question(program: Program) -> None:
    """Check that z3 parses the satisfiability question of all clauses, and its follow-ups."""
    import z3

    for text in (smtlib.consistency(program), smtlib.implication(program, program.clauses[0].id)):
        try:
            z3.parse_smt2_string(text)
        except z3.Z3Exception as error:
            raise Broken(f"z3 does not read it: {error}\n{text}") from error


def _check_edit(before: bytes, source: SourceFile, sink: Sink, folder: Path) -> None:
    """Check that an incremental check after an edit equals a full check, in both directions."""
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
