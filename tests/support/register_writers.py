"""Processes that write to a register concurrently, and processes that are killed meanwhile."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, islice
from multiprocessing import get_context

from kcdsl.release.register import (
    Certificate,
    Promotion,
    PromotionState,
    Register,
    Run,
    Stale,
)
from tests.support.registers import CONTRACT, TRUSTED, certified, clock, recorded, triple

SLOT = "chat/full"
_FORK = get_context("fork")
"""Children inherit the modules of this process; each opens its own register."""
SHORT = 0.03
"""The longest time in seconds from a writer's last planned entry to its kill."""
LONGEST = 300.0
"""The longest time in seconds to wait for the entries of a writer."""


def promotion(
    candidate: Certificate,
    incumbent: str | None,
    state: PromotionState = PromotionState.PROMOTED,
) -> Promotion:
    """Return a decision that makes a candidate live, or another decision about it."""
    return Promotion(
        SLOT,
        candidate.triple,
        incumbent,
        CONTRACT.digest,
        "full",
        state,
        certificates=(candidate.identity,),
    )


# --- at the same time -----------------------------------------------------------------------------


@dataclass(slots=True)
class Written:
    """Results reported by the writers: entries by kind, and the writer of each promoted version."""

    certificates: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    revoked: list[str] = field(default_factory=list)
    promoted: dict[int, str] = field(default_factory=dict)
    """The promoted candidate by resulting version."""
    stale: int = 0
    """The number of refusals because another writer was faster."""

    def add(self, line: str) -> None:
        """Parse one line that a writer wrote."""
        kind, *words = line.split()
        match kind:
            case "certificate":
                self.certificates.append(words[0])
            case "run":
                self.runs.append(words[0])
            case "revoked":
                self.revoked.append(words[0])
            case "promoted":
                assert int(words[0]) not in self.promoted, "two promotions made one version"
                self.promoted[int(words[0])] = words[1]
            case "stale":
                self.stale += 1


def lost(register: Register, written: Written) -> list[str]:
    """Return entries that writers reported as recorded and that the register lacks."""
    kept = {revocation.subject for revocation in register.revocations()}
    decided = {each.version: each for each in register.promotions(slot=SLOT)}
    missing = [f"revocation {each}" for each in written.revoked if each not in kept]
    missing += [f"run {each}" for each in written.runs if register.run(each) is None]
    missing += [
        f"certificate {each}" for each in written.certificates if register.bundle(each) is None
    ]
    for version, candidate in written.promoted.items():
        if version not in decided or decided[version].candidate != candidate:
            missing.append(f"promotion {version}")
    return missing


def forked_promotions(register: Register) -> list[str]:
    """Return promotions whose incumbent was not live, or that share a version."""
    wrong: list[str] = []
    live: str | None = None
    for version, each in enumerate(register.promotions(slot=SLOT), 1):
        if each.version != version or each.incumbent != live:
            wrong.append(f"version {each.version}")
        live = each.candidate
    if register.slot(SLOT).triple != live:
        wrong.append("the slot")
    return wrong


def write_together(place: str, writers: int, rounds: int) -> Written:
    """Run writers that each record and promote `rounds` times; return what they reported."""
    reader, writer = os.pipe()
    children = [
        _FORK.Process(target=_compete, args=(place, number, rounds, writer))
        for number in range(writers)
    ]
    for child in children:
        child.start()
    os.close(writer)
    written = Written()
    with os.fdopen(reader, encoding="ascii") as lines:
        for line in lines:
            written.add(line)
    for child in children:
        child.join(LONGEST)
        assert child.exitcode == 0, f"a writer ended with {child.exitcode}"
    return written


def _compete(place: str, number: int, rounds: int, pipe: int) -> None:
    with Register.open(place, clock=clock, wait=LONGEST) as register:
        for turn in range(rounds):
            about = triple(f"{number}-{turn}")
            found = recorded(register, certified(about), TRUSTED)
            _tell(pipe, f"certificate {found.identity}")
            while True:
                slot = register.slot(SLOT)
                try:
                    new = register.promote(SLOT, slot.version, promotion(found, slot.triple))
                except Stale:
                    _tell(pipe, "stale")
                    continue
                _tell(pipe, f"promoted {new.version} {found.triple}")
                break


def _tell(pipe: int, line: str) -> None:
    os.write(pipe, f"{line}\n".encode("ascii"))  # whole, as it is shorter than PIPE_BUF


def promote_once(place: str, candidates: Sequence[Certificate]) -> list[bool]:
    """Run one process per candidate that promotes it at version 0; return which ones succeeded."""
    reader, writer = os.pipe()
    children = [_FORK.Process(target=_once, args=(place, each, writer)) for each in candidates]
    for child in children:
        child.start()
    os.close(writer)
    with os.fdopen(reader, encoding="ascii") as lines:
        told = [line.strip() for line in lines]
    for child in children:
        child.join(LONGEST)
        assert child.exitcode == 0
    assert len(told) == len(candidates)
    return [each == "promoted" for each in told]


def _once(place: str, candidate: Certificate, pipe: int) -> None:
    with Register.open(place, clock=clock, wait=LONGEST) as register:
        try:
            register.promote(SLOT, 0, promotion(candidate, None))
        except Stale:
            _tell(pipe, "stale")
        else:
            _tell(pipe, "promoted")


# --- killed ---------------------------------------------------------------------------------------


def kill_writers(place: str, kills: int, seed: int) -> Written:
    """Start a writer and kill it, `kills` times; return what the writers reported.

    Each writer is killed at a random time after a random number of its entries; after zero entries
    this is while the register is opened or created.
    """
    rng, written = random.Random(seed), Written()
    for number in range(kills):
        reader, writer = os.pipe()
        child = _FORK.Process(target=_append, args=(place, seed * 10**6 + number, writer))
        child.start()
        os.close(writer)
        with os.fdopen(reader, encoding="ascii") as lines:
            for line in islice(lines, rng.randrange(5)):
                written.add(line)
            time.sleep(rng.uniform(0, SHORT))
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            assert child.exitcode == -signal.SIGKILL, f"a writer ended with {child.exitcode}"
            for line in lines:
                if line.endswith("\n"):
                    written.add(line)
    return written


@contextmanager
def stopped_writer(place: str) -> Iterator[None]:
    """Stop a process in the middle of an append; kill it at exit."""
    reader, writer = os.pipe()
    child = _FORK.Process(target=_hold, args=(place, writer))
    child.start()
    assert child.pid is not None
    os.close(writer)
    try:
        assert os.read(reader, 1) == b"x"
        os.kill(child.pid, signal.SIGSTOP)
        yield
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        os.close(reader)


def _hold(place: str, pipe: int) -> None:
    with Register.open(place, clock=clock) as register, register._appending():
        os.write(pipe, b"x")
        time.sleep(LONGEST)


def _append(place: str, seed: int, pipe: int) -> None:
    rng = random.Random(seed)
    with Register.open(place, create=True, clock=clock, wait=LONGEST) as register:
        for number in count():
            name = f"{seed}-{number}"
            sha256 = hashlib.sha256(name.encode()).hexdigest()
            found = recorded(register, certified(triple(name)), TRUSTED)
            _tell(pipe, f"certificate {found.identity}")
            match rng.randrange(3):
                case 0:
                    register.revoke(sha256, "tried")
                    _tell(pipe, f"revoked {sha256}")
                case 1:
                    run = register.record_run(Run("verify", found.triple, "shadow", sha256))
                    _tell(pipe, f"run {run.identity}")
                case _:
                    slot = register.slot(SLOT)
                    with suppress(Stale):
                        new = register.promote(SLOT, slot.version, promotion(found, slot.triple))
                        _tell(pipe, f"promoted {new.version} {found.triple}")
