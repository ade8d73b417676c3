"""An external solver: a program with the command line of the VNN-LIB standard.

A point of the solver is accepted only if it satisfies the query. Its `unsat` is not proved again;
a short search for a counterexample may refute it.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.source.files import excerpt
from kcdsl_backends.vnnlib.problem import QueryProblem
from kcdsl_backends.vnnlib.search import admitted, decide
from kcdsl_backends.vnnlib.verify import QueryAnswer, assigned, notes_of, read_problem

_ANSWERS = frozenset({"sat", "unsat", "unknown", "timed-out", "timeout"})
_GRACE = 10.0
"""Seconds beyond the time limit after which a solver is stopped."""
_LARGEST = 1 << 27
_OWN = 5.0
"""Seconds of the search for a counterexample to `unsat`."""


def ask_solver(
    command: str, path: Path, networks: Mapping[str, Path], seconds: float
) -> QueryAnswer:
    """Ask a program about a query. Refuse an unknown answer or one that is refuted here."""
    problem = read_problem(path, networks)
    words = _words(command)
    printed = _run(words, path, networks, seconds)
    if printed is None:
        return QueryAnswer("timed-out", (), f"{words[0]} was stopped", notes_of(problem))
    lines = printed.splitlines()
    answer = lines[0].strip() if lines else ""
    if answer not in _ANSWERS:
        raise _wrong(words, f"printed {excerpt(answer)!r}, no answer")
    if answer == "sat":
        return _point(words, problem, lines[1:])
    if answer == "unsat":
        own = decide(problem, min(_OWN, seconds))
        if own.point is not None:
            raise _wrong(words, "answers unsat, but a point satisfies the query")
        word = f"`unsat` is the claim of {words[0]}; it is not verified here"
        confirmed = own.answer == "unsat"
        notes = notes_of(problem) if confirmed else (*notes_of(problem), word)
        reason = f"{words[0]}, and {own.reason}" if confirmed else words[0]
        return QueryAnswer("unsat", (), reason, notes)
    return QueryAnswer(answer, (), words[0], notes_of(problem))


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    if not words:
        raise refuse(codes.USAGE, f"{command!r} is no command", help="--solver 'PROGRAM OPTIONS'")
    return words


def _wrong(words: Sequence[str], what: str) -> Refusal:
    return refuse(
        codes.VNNLIB_SOLVER,
        f"the solver {excerpt(words[0])} {what}",
        help="run it alone: it takes `verify QUERY --network NAME=FILE --timeout SECONDS`",
    )


def _run(
    words: Sequence[str], path: Path, networks: Mapping[str, Path], seconds: float
) -> str | None:
    """Return the output of a solver; None if it had to be stopped."""
    asked = [*words, "verify", str(path)]
    for name, file in networks.items():
        asked += ["--network", f"{name}={file}"]
    asked += ["--timeout", str(max(1, int(seconds)))]
    try:
        process = subprocess.Popen(
            asked,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise _wrong(words, f"cannot be run: {error.strerror}") from None
    started = time.monotonic()
    try:
        printed, errors = process.communicate(timeout=max(1, int(seconds)) + _GRACE)
    except subprocess.TimeoutExpired:
        _stop(process)
        return None
    except BaseException:
        _stop(process)
        raise
    if process.returncode != 0 or len(printed) > _LARGEST:
        last = (errors.decode("utf-8", "replace").strip().splitlines() or ["nothing"])[-1]
        took = f"after {time.monotonic() - started:.0f} s with status {process.returncode}"
        raise _wrong(words, f"ended {took} and said: {excerpt(last, 200)}")
    return printed.decode("utf-8", "replace")


def _stop(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _point(words: Sequence[str], problem: QueryProblem, lines: Sequence[str]) -> QueryAnswer:
    """Return `sat` with the solver's point if that satisfies the query, else `unknown`."""
    given = _assignment(problem, lines)
    if given is None:
        reason = f"{words[0]} answers sat, without an assignment of all inputs"
        return QueryAnswer("unknown", (), reason, notes_of(problem))
    point = admitted(problem, given)
    if point is None:
        reason = f"{words[0]} answers sat; its point does not satisfy the query in real arithmetic"
        return QueryAnswer("unknown", (), reason, notes_of(problem))
    return QueryAnswer("sat", assigned(problem, point), words[0], notes_of(problem))


def _assignment(problem: QueryProblem, lines: Sequence[str]) -> list[Fraction] | None:
    """Parse the input of an assignment in the format of `assigned`; None if it is incomplete or
    contradictory."""
    known = {v.name: v for v in problem.query.variables}
    found: dict[int, Fraction] = {}
    first = problem.query.version == (1, 0)
    name, place = "", 0
    for line in lines:
        words = line.replace("(", " ").replace(")", " ").split()
        if not words:
            continue
        if first and len(words) == 2:
            name, _, index = words[0].rpartition("_")
            place = int(index) if index.isascii() and index.isdigit() else -1
        elif words[0] in known:
            name, place = words[0], 0
            continue
        variable = known.get(name)
        if variable is None or not 0 <= place < variable.size:
            return None
        if variable.kind == "input":
            number = _number(words[-1])
            element = int(problem.tensors[name].terms[0].indices[place])
            if number is None or found.setdefault(element, number) != number:
                return None
        place += 1
    count = problem.program.blocks[0].size
    return [found[i] for i in range(count)] if len(found) == count else None


def _number(text: str) -> Fraction | None:
    mantissa, _, exponent = text.lower().partition("e")
    digits = exponent.lstrip("+-")
    if len(mantissa) > 400 or len(digits) > 3 or (digits and not digits.isdigit()):
        return None
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
