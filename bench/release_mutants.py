"""Mutants of signed certificates, companions, register heads and registers.

    python -m bench.release_mutants --mutants 50000

A document (a certificate, a companion, a signed head) is changed in its bytes or fields and given
to every verifier of its form; acceptance with another payload than the signed one is wrong. A
register is an SQLite file with a signed head. Its bytes, values or rows are changed, or it is
written anew with other events, a correct chain and all rows that follow, and it is audited with the
head; a change of content that the audit does not notice is a wrong acceptance. `make tools`
installs the verifiers.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sqlite3
import sys
import tempfile
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, delete, text, update
from sqlalchemy.exc import SQLAlchemyError

from bench.common import Better, Figure, report
from kcdsl.diagnostics import Refusal
from kcdsl.release.register import Register
from kcdsl.release.register.chain import begin, insert_event
from kcdsl.release.register.events import BEFORE_FIRST, Event
from kcdsl.release.register.projections import apply
from kcdsl.release.register.schema import (
    PROJECTIONS,
    bundles,
    events,
    head,
    trigger_names,
    triggers,
)
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import strict_base64, time_text
from kcdsl_certs.signatures import SigningKey, decode, pae, parse_bundle
from tests.support import verifiers
from tests.support.mutation.changes import Change, changes
from tests.support.registers import TRUSTED, clock, fill
from tests.support.release_scenes import Released, form_of, released
from tests.support.vectors.golden import KEY_A
from tests.support.verifiers import Answer

PORTION = 2_000
"""Number of documents in one call of a verifier."""
REGISTERS = 0.05
"""Share of registers among the mutants."""
HEAD = "head of a register, Sigstore bundle v0.3"


@dataclass
class Tally:
    """Number of mutants of each form, and the mutants that were accepted wrongly."""

    tried: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def count(self, form: str, number: int) -> None:
        """Add a number of mutants of a form."""
        self.tried[form] = self.tried.get(form, 0) + number

    @property
    def total(self) -> int:
        """Return the number of mutants."""
        return sum(self.tried.values())


# --- documents ------------------------------------------------------------------------------------


def mutants(data: bytes, rng: random.Random) -> Iterator[bytes]:
    """Yield an endless sequence of mutants: bytes flipped, cut, dropped, doubled; fields
    changed."""
    document = json.loads(data)
    every = list(changes(document, {}))
    envelope = document.get("dsseEnvelope", document)
    statement = json.loads(strict_base64(envelope["payload"]))
    of_statement = list(changes(statement, {}))
    while True:
        at, bit = rng.randrange(len(data)), rng.randrange(8)
        match rng.choice(("flip", "cut", "drop", "double", "field", "field", "payload")):
            case "flip":
                made = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            case "cut":
                made = data[:at]
            case "drop":
                made = data[:at] + data[at + 1 :]
            case "double":
                made = data[: at + 1] + data[at:]
            case "payload":
                changed = rng.choice(of_statement).of(statement)
                stated = json.dumps(changed, ensure_ascii=False, separators=(",", ":"))
                payload = b64encode(stated.encode("utf-8", "surrogatepass"))
                made = data.replace(envelope["payload"].encode(), payload)
            case _:
                made = json.dumps(rng.choice(every).of(document)).encode("utf-8", "surrogatepass")
        if made != data:
            yield made


def ours(cases: Sequence[tuple[SigningKey, bytes]]) -> list[Answer]:
    """Verify bundles with the reader and the signatures of kcdsl."""
    found = []
    for key, bundle in cases:
        try:
            envelope = decode(parse_bundle(bundle))
        except Rejected:
            found.append(Answer(False))
            continue
        message = pae(envelope.payload_type, envelope.payload)
        accepted = any(key.public.verifies(s.value, message) for s in envelope.signatures)
        found.append(Answer(accepted, envelope.payload))
    return found


Reader = Callable[[Sequence[tuple[SigningKey, bytes]]], list[Answer]]


def _by(read: Callable[[list[tuple[bytes, bytes]]], list[Answer]]) -> Reader:
    return lambda cases: read([(key.public.pem, data) for key, data in cases])


READERS: tuple[tuple[str, Reader], ...] = (
    ("kcdsl", ours),
    ("@sigstore/verify", _by(verifiers.sigstore_js)),
)
"""Readers of bundles."""
PLAIN: tuple[tuple[str, Reader], ...] = (
    ("sigstore (PyPI)", _by(verifiers.sigstore_dsse)),
    ("securesystemslib", _by(verifiers.securesystemslib_dsse)),
)
"""Readers of plain envelopes."""


def of_documents(made: Released, signed_head: bytes, count: int, seed: int) -> Tally:
    """Try mutants of the certificate, of each companion and of a head in all their readers."""
    found = Tally()
    forms = [
        *((form_of(path), path.read_bytes(), key, READERS) for path, key in made.bundles[:3]),
        *((form_of(path), path.read_bytes(), key, PLAIN) for path, key in made.envelopes[:2]),
        (HEAD, signed_head, KEY_A, READERS),
    ]
    for number, (form, data, key, readers) in enumerate(forms):
        honest = json.loads(data)
        payload = strict_base64(honest.get("dsseEnvelope", honest)["payload"])
        for name, read in readers:
            if read([(key, data)]) != [Answer(True, payload)]:
                raise RuntimeError(f"{name} rejects the honest document: {form}")
        source = mutants(data, random.Random(f"{form} {seed}"))
        left = count * (number + 1) // len(forms) - count * number // len(forms)
        while left > 0:
            cases = [(key, one) for one in islice(source, min(PORTION, left))]
            left -= len(cases)
            found.count(form, len(cases))
            for name, read in readers:
                for (_, mutant), answer in zip(cases, read(cases), strict=True):
                    if answer.accepted and answer.payload != payload:
                        found.wrong.append(f"{name}: {form}: {mutant[:200]!r}")
    return found


# --- registers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Original:
    """A register with all kinds of events, its content, its events with all changes of their data,
    and its signed head."""

    path: Path
    content: Mapping[str, list[Any]]
    events: tuple[tuple[Event, list[Change]], ...]
    head: bytes

    @classmethod
    def made(cls, path: Path) -> Original:
        """Create it at a path; raise RuntimeError unless an audit with the head succeeds."""
        with Register.open(path, create=True, clock=clock) as register:
            fill(register)
            signed = register.sign_head([KEY_A])
            found = register.check([signed], TRUSTED)
            if not found.is_sound or not found.heads:
                raise RuntimeError(f"the register is not sound to begin with: {found.to_json()}")
            listed = tuple((e, list(changes(dict(e.data), {}))) for e in register.events())
        return cls(path, _content(path), listed, signed)


Way = Callable[[Original, Path, random.Random], str | None]
"""Changes a copy at a path; returns a description, or None if the change is impossible."""


def of_registers(original: Original, path: Path, count: int, seed: int) -> Tally:
    """Change copies of a register at a path; audit each with the signed head of the original."""
    rng, found = random.Random(seed), Tally()
    while found.total < count:
        shutil.copy(original.path, path)
        for beside in ("-wal", "-shm"):
            path.with_name(path.name + beside).unlink(missing_ok=True)
        name, way = rng.choice(WAYS)
        change = way(original, path, rng)
        if change is None or _same(path, original.content):
            continue
        found.count(f"register, {name}", 1)
        try:
            with Register.open(path, clock=clock) as register:
                sound = register.check([original.head], TRUSTED).is_sound
        except Refusal:
            sound = False
        if sound:
            found.wrong.append(f"register: {change}")
    return found


TABLES = ("events", "bundles", "head", *(table.name for table in PROJECTIONS))


def _content(path: Path) -> dict[str, list[Any]]:
    with closing(sqlite3.connect(path)) as raw:
        return {
            table: sorted(raw.execute(f"SELECT * FROM {table}").fetchall(), key=repr)
            for table in TABLES
        }


def _same(path: Path, content: Mapping[str, list[Any]]) -> bool:
    try:
        return _content(path) == content
    except (sqlite3.Error, OverflowError, UnicodeError):
        return False


def _byte(original: Original, path: Path, rng: random.Random) -> str | None:
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return f"byte {at}"


def _with_triggers_gone(
    path: Path, change: Callable[[sqlite3.Connection], str | None]
) -> str | None:
    with closing(sqlite3.connect(path, isolation_level=None)) as raw:
        raw.execute("PRAGMA synchronous=OFF")
        raw.execute("BEGIN")
        for name in trigger_names("sqlite"):
            raw.execute(f"DROP TRIGGER {name}")
        try:
            done = change(raw)
        except sqlite3.Error:
            return None  # the database refuses it
        for statement in triggers("sqlite"):
            raw.execute(statement)
        raw.execute("COMMIT")
        return done


def _chosen(raw: sqlite3.Connection, rng: random.Random) -> tuple[str, int]:
    table = rng.choice(TABLES)
    rows = [number for (number,) in raw.execute(f"SELECT rowid FROM {table}")]
    return table, rng.choice(rows)


def _value(original: Original, path: Path, rng: random.Random) -> str | None:
    def change(raw: sqlite3.Connection) -> str:
        table, row = _chosen(raw, rng)
        column = rng.choice([each[1] for each in raw.execute(f"PRAGMA table_info({table})")])
        ((old,),) = raw.execute(f"SELECT {column} FROM {table} WHERE rowid = ?", (row,))
        new = _other(old, rng)
        raw.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (new, row))
        return f"{table}.{column}: {old!r:.60} is {new!r:.60}"

    return _with_triggers_gone(path, change)


def _other(old: Any, rng: random.Random) -> Any:
    match old:
        case None:
            return "0" * 64
        case int():
            return rng.choice((old + 1, old - 1, -old - 2, str(old) + "x"))
        case bytes():
            at = rng.randrange(len(old))
            return old[:at] + bytes([old[at] ^ 1 << rng.randrange(7)]) + old[at + 1 :]
        case _:
            at = rng.randrange(len(old))
            return rng.choice(("", old[:at], old[:at] + rng.choice("0aZ~é") + old[at + 1 :]))


def _row_gone(original: Original, path: Path, rng: random.Random) -> str | None:
    def change(raw: sqlite3.Connection) -> str:
        table, row = _chosen(raw, rng)
        raw.execute(f"DELETE FROM {table} WHERE rowid = ?", (row,))
        return f"{table}: row {row} is gone"

    return _with_triggers_gone(path, change)


def _row_twice(original: Original, path: Path, rng: random.Random) -> str | None:
    """Duplicate a row with other keys."""

    def change(raw: sqlite3.Connection) -> str:
        table, row = _chosen(raw, rng)
        ((*values,),) = raw.execute(f"SELECT * FROM {table} WHERE rowid = ?", (row,))
        other = [
            value + 1000 if isinstance(value, int) else str(value).replace("a", "b")
            for value in values
        ]
        marks = ", ".join("?" * len(other))
        raw.execute(f"INSERT INTO {table} VALUES ({marks})", other)
        return f"{table}: row {row} stands there twice"

    return _with_triggers_gone(path, change)


def _anew(original: Original, path: Path, rng: random.Random) -> str | None:
    """Write the register as the program would for other events."""
    listed = [event for event, _ in original.events]
    at, other = rng.randrange(len(listed)), rng.randrange(1, len(listed))
    match rng.choice(("data", "data", "data", "data", "gone", "cut", "moved", "time")):
        case "data":
            change = rng.choice(original.events[at][1])
            listed[at] = replace(listed[at], data=change.of(dict(listed[at].data)))
            done = f"event {at + 1}: {change}"
        case "gone":
            del listed[other]
            done = f"without event {other + 1}"
        case "cut":
            del listed[other:]
            done = f"ends with event {other}"
        case "moved":
            listed.insert(rng.randrange(1, len(listed)), listed.pop(other))
            done = f"event {other + 1} at another place"
        case _:
            moved = timedelta(seconds=rng.choice((-86400, -1, 1, 86400)))
            listed[at] = replace(listed[at], time=listed[at].time + moved)
            done = f"event {at + 1} {moved} later"
    chain, previous = [], BEFORE_FIRST
    try:
        for number, event in enumerate(listed, 1):
            chain.append(replace(event, number=number, previous=previous))
            previous = chain[-1].hash
    except (Rejected, ValueError, TypeError):
        return None  # such an event has no bytes
    _write_anew(path, chain)
    return f"written anew, {done}"


def _write_anew(path: Path, chain: Sequence[Event]) -> None:
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        for name in trigger_names("sqlite"):
            connection.execute(text(f"DROP TRIGGER {name}"))
        for table in (*reversed(PROJECTIONS), events, head):
            connection.execute(delete(table))
        begin(connection, chain[0])
        follows = True
        for event in chain[1:]:
            insert_event(connection, event)
            try:
                if follows:
                    apply(connection, event)
            except (Rejected, SQLAlchemyError):
                follows = False  # no rows follow from what contradicts an earlier event
        last = {"number": chain[-1].number, "hash": chain[-1].hash}
        connection.execute(update(head).values(**last, time=time_text(chain[-1].time)))
        named = [str(event.data.get("bundle")) for event in chain]
        connection.execute(delete(bundles).where(bundles.c.digest.not_in(named)))
        for statement in triggers("sqlite"):
            connection.execute(text(statement))
    engine.dispose()


WAYS: tuple[tuple[str, Way], ...] = (
    ("a byte", _byte),
    ("a value", _value),
    ("a value", _value),
    ("a row gone", _row_gone),
    ("a row twice", _row_twice),
    ("written anew", _anew),
    ("written anew", _anew),
    ("written anew", _anew),
)


# --- all ------------------------------------------------------------------------------------------


def campaign(made: Released, folder: Path, count: int, seed: int) -> Tally:
    """Try `count` mutants of documents and registers; `folder` is for the registers."""
    original = Original.made(folder / "original.db")
    registers = round(count * REGISTERS)
    found = of_documents(made, original.head, count - registers, seed)
    other = of_registers(original, folder / "changed.db", registers, seed)
    return Tally({**found.tried, **other.tried}, [*found.wrong, *other.wrong])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the number of mutants."""
    parser.add_argument("--mutants", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)


def figures(made: Released, options: argparse.Namespace) -> list[Figure]:
    """Try mutants; print the numbers by form and those that were accepted wrongly."""
    with tempfile.TemporaryDirectory(prefix="kcdsl-mutants-") as place:
        found = campaign(made, Path(place), options.mutants, options.seed)
    for form, number in sorted(found.tried.items()):
        print(f"{form}: {number} mutants", flush=True)
    for one in found.wrong:
        print(f"WRONG: {one}")
    return [
        Figure("mutants", found.total, Better.HIGHER, options.mutants),
        Figure("wrong acceptances", len(found.wrong), Better.LOWER, 0),
    ]


def main() -> int:
    """Try mutants only; return 1 if one was accepted wrongly."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kcdsl-release-") as place:
        return report("release-mutants", figures(released(Path(place)), options))


if __name__ == "__main__":
    sys.exit(main())
