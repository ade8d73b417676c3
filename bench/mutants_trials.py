"""Test runs on the checker with defects, each in a separate process, and their cache."""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import resource
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, NoReturn

from bench.mutants_changes import Mutant, apart, changed
from bench.mutants_tests import FIRST, ROOT, Results, run
from tests.support.files import files_below

SHARED = ("kcdsl", "backends", "certs", "grammar", "examples", "tests")
"""Folders whose files affect a test, besides its own file."""
OWN = ("bench/mutants_tests.py", "bench/mutants_changes.py")
LONGEST = 3600
"""Time limit in seconds for tests that have not run before."""


def sources() -> str:
    """Return a digest of the files that all tests may read: product, examples, shared test code."""
    found = hashlib.sha256()
    inside = [path for name in SHARED for path in files_below(ROOT / name)]
    for path in (*inside, *(ROOT / name for name in OWN)):
        if not (path.name.startswith("test_") and path.suffix == ".py"):
            found.update(f"{path.relative_to(ROOT)}\0".encode())
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class ResultCache:
    """Results of earlier campaigns on the same sources, in a folder for these.

    An entry is written whole or not at all. Its name depends on the question and on the digests of
    the test files.
    """

    folder: Path

    def entry(self, *question: object, files: Collection[str]) -> Path:
        """Return the path of the answer to a question about some test files."""
        found = hashlib.sha256(repr(question).encode())
        for file in sorted(files):
            found.update(f"{file}\0".encode())
            found.update(hashlib.sha256((ROOT / file).read_bytes()).digest())
        return self.folder / found.hexdigest()[:32]


def write(entry: Path, value: object) -> None:
    """Write an entry of the cache."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    temporary = entry.with_name(f"{entry.name}.{os.getpid()}")
    temporary.write_bytes(pickle.dumps(value))
    os.replace(temporary, entry)


def without_defect(file: str, cache: ResultCache) -> Results:
    """Return the first-tier results of a file on the unchanged checker.

    Failures are not stored.
    """
    entry = cache.entry("without a defect", files=[file])
    if entry.exists():
        known: Results = pickle.loads(entry.read_bytes())
        return known
    found = forked((), [file], "-m", FIRST)
    if not failure(found):
        write(entry, found)
    return found


@dataclass(frozen=True, slots=True)
class Trial:
    """A mutant, tests that may find it, and the time limit of their process in seconds."""

    mutant: Mutant
    tests: tuple[str, ...]
    seconds: float


def alone(trial: Trial, cache: ResultCache) -> str:
    """Return the first test that fails on a mutant, "" if none."""
    if not trial.tests:
        return ""
    paths = list(dict.fromkeys(test.partition("::")[0] for test in trial.tests))
    entry = cache.entry("alone", trial.mutant.key, trial.tests, files=paths)
    if not entry.exists():
        seconds = limit(trial.seconds)
        found = forked([trial.mutant], paths, "-x", tests=trial.tests, seconds=seconds)
        write(entry, failure(found))
    return str(pickle.loads(entry.read_bytes()))


def failure(found: Results) -> str:
    """Return the first test that failed or ended the process, "" if none did."""
    return found.ended or next(iter(found.failed), "")


def limit(seconds: float) -> int:
    """Return the time limit of a process with a defect, given its seconds without one."""
    return int(60 + 4 * seconds)


@dataclass(frozen=True, slots=True)
class Round:
    """Mutants that are planted together, and the tests of a file and a tier to run on them.

    `known` are the results of the tests without a defect; without them all tests run that begin
    within `most` seconds.
    """

    file: str
    mutants: tuple[Mutant, ...]
    known: Results | None = None
    tier: str = FIRST
    most: float = math.inf


def together(round: Round, cache: ResultCache) -> dict[str, str]:
    """Return the mutants that tests of a file find, by keys, with the test that finds each.

    A test that fails on all of them runs again with each alone. A test that fails on several
    together but on none alone finds none.
    """
    wanted = {mutant.key for mutant in round.mutants}
    entry = cache.entry("together", round.tier, round.most, files=[round.file])
    if entry.exists():
        tried, found = pickle.loads(entry.read_bytes())
        if wanted <= tried:
            return {key: test for key, test in found.items() if key in wanted}
    found = {}
    for group in apart(round.mutants):
        found |= _found(round, group)
    write(entry, (wanted, found))
    return found


def _found(round: Round, group: list[Mutant]) -> dict[str, str]:
    found: dict[str, str] = {}
    tests: Sequence[str] = ()
    options: tuple[str, ...] = ("-m", round.tier)
    seconds: int = LONGEST
    if round.known is not None:
        tests = round.known.meeting({mutant.block for mutant in group})
        options, seconds = (), limit(round.known.seconds(tests))
        if not tests:
            return {}
    while group:
        results = forked(
            group, [round.file], *options, tests=tests, seconds=seconds, most=round.most
        )
        named = [test for test in results.failed if test in results.tests]
        failed = [*([results.ended] if results.ended else []), *named]
        by, silent = _explained(group, failed, results)
        found |= by
        if not by:
            break
        group = [mutant for mutant in group if mutant.key not in by]
        tests, options = [test for test in failed if test not in silent], ()
    return found


def _explained(
    group: Sequence[Mutant], failed: Sequence[str], results: Results
) -> tuple[dict[str, str], set[str]]:
    """Return the mutants that the first successful test finds alone, and the tests that find none.

    A test that fails without a defect finds none.
    """
    silent: set[str] = set()
    for test in failed:
        result = results.tests.get(test)
        met = [m for m in group if result is None or m.block is None or m.block in result.blocks]
        file, seconds = test.partition("::")[0], limit(result.seconds if result else 60)
        by = {
            mutant.key: test
            for mutant in met
            if failure(forked([mutant], [file], tests=[test], seconds=seconds))
        }
        if by and not failure(forked([], [file], tests=[test], seconds=seconds)):
            return by, silent
        silent.add(test)
    return {}, silent


def forked(
    mutants: Sequence[Mutant], paths: Sequence[str], *options: str,
    tests: Sequence[str] = (), seconds: int = LONGEST, most: float = math.inf,
) -> Results:  # fmt: skip
    """Return the results of tests on a checker with defects, run in a fork of this process.

    This process has imported the slow packages, but not the checker.
    """

    def results(current: IO[str]) -> Results:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 60))

        def started(test: str) -> None:
            current.seek(0)
            current.truncate()
            current.write(test)
            current.flush()

        change = partial(changed, mutants=mutants)
        return run(change, paths, *options, tests=tests, most=most, started=started)

    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile("w+") as current:
        child = os.fork()
        if child == 0:
            _answer(partial(results, current), answer)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) or os.WEXITSTATUS(status):
            current.seek(0)
            return Results({}, (), current.read() or paths[0])
        answer.seek(0)
        found: Results = pickle.load(answer)
        return found


def _answer(task: Callable[[], Results], answer: IO[bytes]) -> NoReturn:
    """Write the result of a task without other output, and end the process."""
    try:
        with tempfile.TemporaryFile("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            pickle.dump(task(), answer)
            answer.flush()
        os._exit(0)
    finally:
        os._exit(1)
