"""A fuzzing campaign: examine numbered mutants in several processes and count the outcomes.

A worker that dies, or reports nothing for ten minutes, is itself a finding about its current
mutant; another worker continues after that mutant.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.fuzz.examination import Examined, Failure, examine
from tests.fuzz.mutants import Mutant, mutant
from tests.fuzz.reduction import reduce

SILENCE = 600.0
"""Seconds of wall time after which a worker is killed; the watchdog reports hangs before that."""
MEMORY = 4 * 2**30
"""Bytes of address space of a worker."""
_MOST_REDUCED = 3
"""The largest number of findings of one kind that are reduced."""

Examine = Callable[[Mutant], Examined]


@dataclass(frozen=True, slots=True)
class Finding:
    """A mutant that reveals a defect."""

    number: int
    kind: str
    seed: str
    failure: Failure


@dataclass(slots=True)
class Tally:
    """The outcomes of the mutants so far."""

    examined: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The number of mutants by kind of mutation and outcome."""
    slowest: dict[str, tuple[float, int]] = field(default_factory=dict)
    """For each stage the longest time in seconds, and the number of the mutant."""
    codes: set[str] = field(default_factory=set)
    texts: set[bytes] = field(default_factory=set)
    """The digests of the documents."""
    changed: int = 0
    """The number of accepted documents that formatting changes."""
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    """The wall time of the campaign."""

    def add(self, made: Mutant, examined: Examined) -> None:
        """Count one mutant."""
        self.examined += 1
        self.outcomes[made.kind, examined.outcome] += 1
        self.codes |= examined.codes
        self.texts.add(sha256(made.data).digest())
        self.changed += examined.changed and examined.outcome == "accepted"
        for stage, taken in examined.times.items():
            self.slowest[stage] = max(self.slowest.get(stage, (0.0, 0)), (taken, made.number))
        if examined.failure is not None:
            found = Finding(made.number, made.kind, made.seed.name, examined.failure)
            self.findings.append(found)

    def outcome(self, name: str, of_kind: str | None = None) -> int:
        """Return the number of mutants, of all kinds or of one, with an outcome."""
        return sum(
            count
            for (kind, outcome), count in self.outcomes.items()
            if outcome == name and of_kind in (None, kind)
        )

    def kind(self, name: str) -> int:
        """Return how many mutants there are of a kind."""
        return sum(count for (kind, _), count in self.outcomes.items() if kind == name)

    def longest(self) -> tuple[float, str, int]:
        """Return the longest time of any stage, the stage, and the number of the mutant."""
        times = ((taken, stage, number) for stage, (taken, number) in self.slowest.items())
        return max(times, default=(0.0, "", 0))


def options(made: Mutant) -> dict[str, Any]:
    """Return which expensive checks apply to a mutant; each applies to a share of the mutants."""
    turn = made.number % 8
    return {
        "before": made.seed.data if turn in (0, 2) else None,
        "served": turn == 2,
        "solved": turn == 1,
    }


def examine_mutant(made: Mutant) -> Examined:
    """Examine a mutant, some of them as an edit of their seed."""
    return examine(made.data, made.seed.folder, **options(made))


def run(
    campaign: int,
    numbers: Iterable[int],
    *,
    workers: int = 0,
    examining: Examine = examine_mutant,
    progress: Callable[[Tally], None] = lambda _: None,
    silence: float = SILENCE,
) -> Tally:
    """Examine mutants and return the tally; without workers, run in this process."""
    tally, begun = Tally(), time.monotonic()
    wanted = list(numbers)
    if not workers:
        found: Iterable[tuple[int, Examined]] = (
            (number, examining(mutant(campaign, number))) for number in wanted
        )
    else:
        found = _by_workers(campaign, wanted, workers, examining, silence)
    for number, examined in found:
        tally.add(mutant(campaign, number), examined)
        progress(tally)
    tally.findings.sort(key=lambda finding: finding.number)
    tally.seconds = time.monotonic() - begun
    return tally


def _by_workers(
    campaign: int, numbers: list[int], workers: int, examining: Examine, silence: float
) -> Iterator[tuple[int, Examined]]:
    """Yield numbers and results of mutants in the order of completion."""
    shares = [numbers[i::workers] for i in range(workers)]
    running = [_Worker(campaign, share, examining) for share in shares if share]
    try:
        while running:
            ready = wait([worker.results for worker in running], timeout=1.0)
            for worker in tuple(running):
                if worker.results in ready:
                    try:
                        yield worker.next()
                        continue
                    except EOFError:
                        failure = Failure("worker", "ended", "the process ended")
                elif worker.silent_for() > silence:
                    failure = Failure("worker", "hang", f"nothing for {silence:g} s")
                else:
                    continue
                running.remove(worker)
                worker.stop()
                if worker.left:
                    yield worker.left[0], Examined("lost", failure)
                if worker.left[1:]:
                    running.append(_Worker(campaign, worker.left[1:], examining))
    finally:
        for worker in running:
            worker.stop()


class _Worker:
    """A process that examines mutants in sequence; `left` are the unfinished ones."""

    def __init__(self, campaign: int, numbers: list[int], examining: Examine) -> None:
        self.left = numbers
        self.results, end = multiprocessing.get_context("fork").Pipe(duplex=False)
        self._process = multiprocessing.get_context("fork").Process(
            target=_work, args=(campaign, numbers, examining, end), daemon=True
        )
        self._process.start()
        end.close()
        self._heard = time.monotonic()

    def next(self) -> tuple[int, Examined]:
        """Return the next result; raises EOFError at the end."""
        examined: Examined = self.results.recv()
        self._heard = time.monotonic()
        number, self.left = self.left[0], self.left[1:]
        return number, examined

    def silent_for(self) -> float:
        """Return the seconds since the last result."""
        return time.monotonic() - self._heard

    def stop(self) -> None:
        """End the process, if it is still running."""
        self._process.kill()
        self._process.join()
        self.results.close()


def _work(campaign: int, numbers: list[int], examining: Examine, results: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for number in numbers:
        results.send(examining(mutant(campaign, number)))


def reduced(
    campaign: int, findings: Iterable[Finding], seconds: float = 20.0
) -> Iterator[tuple[Finding, bytes]]:
    """Yield a few findings of each kind with a small document that reveals the same defect."""
    seen: Counter[tuple[str, str]] = Counter()
    for finding in findings:
        key = (finding.failure.stage, finding.failure.key)
        seen[key] += 1
        if seen[key] > _MOST_REDUCED:
            continue
        made = mutant(campaign, finding.number)
        if finding.failure.stage == "worker":  # would kill this process too
            yield finding, made.data
        else:
            yield finding, smaller(made, key, seconds)


def smaller(made: Mutant, key: tuple[str, str], seconds: float) -> bytes:
    """Return a small document that fails at the same stage in the same way as a mutant."""

    def shows(data: bytes) -> bool:
        failure = examine(data, made.seed.folder, **options(made)).failure
        return failure is not None and (failure.stage, failure.key) == key

    return reduce(made.data, shows, seconds)
