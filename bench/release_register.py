"""Registers of certificates: speed, concurrent writers, killed writers.

    make bench-release-register
    python -m bench.release_register --certificates 1000000 --kills 1000

Everything runs on an SQLite file and on a PostgreSQL server in a temporary folder (`make tools`
installs it). Seconds are wall time. The register for lookups is filled with events and rows in the
program's format, ten certificates per triple, but without bundles and signatures, which no lookup
reads; the program reads the last events and their rows back. PostgreSQL is filled by COPY without
waiting for the disk; VACUUM ANALYZE and CHECKPOINT follow, which the server would run later. A
lookup is `Register.status_of`: one transaction with all its queries, and the reading of what they
return. Opening a register, which connects and reads the revision of the tables, has a figure of its
own. `--only stock` measures lookups alone.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psycopg
from sqlalchemy import Connection, Table, insert, update

from bench.common import Better, Figure, report
from kcdsl.release.register import Certificate, Register, StatementKind
from kcdsl.release.register.chain import head_in
from kcdsl.release.register.database import Location, RegisterDatabase
from kcdsl.release.register.events import SCHEMA as EVENT_SCHEMA
from kcdsl.release.register.events import EventKind, hash_of, parse_event
from kcdsl.release.register.projections import text_of
from kcdsl.release.register.records import CERTIFICATE
from kcdsl.release.register.schema import certificates, events, head, triples
from kcdsl_certs.encoding.strict import time_text
from kcdsl_certs.statement import Verdict
from tests.support.postgres import postgres
from tests.support.register_writers import (
    SLOT,
    forked_promotions,
    kill_writers,
    lost,
    promotion,
    write_together,
)
from tests.support.registers import NOW, TRUSTED, certified, clock, triple
from tests.support.vectors.golden import KEY_A

LOOKUP = 0.005
"""Limit of the seconds of a lookup."""
PER_TRIPLE = 10
LOOKUPS = 500
OPENINGS = 20
SAMPLE = 11_000
"""Number of events that are read back from a filled register."""
WRITERS = 50
PROMOTIONS = 200
BETWEEN = 100
"""Kills between two audits."""
_PORTION = 1000
"""Triples in one transaction."""
SHOWN = 50_000
"""Certificates between two progress messages."""


# --- speed ----------------------------------------------------------------------------------------


def promotions(place: str) -> float:
    """Return promotions per second of one writer; each is one transaction."""
    with Register.open(place, create=True, clock=clock) as register:
        given = [certified(triple(f"speed {number}")) for number in range(PROMOTIONS)]
        candidates = register.record_certificates(given, TRUSTED)
        start = time.perf_counter()
        for version, candidate in enumerate(candidates):
            live = None if version == 0 else candidates[version - 1].triple
            register.promote(SLOT, version, promotion(candidate, live))
        return PROMOTIONS / (time.perf_counter() - start)


def recording(place: str) -> float:
    """Return certificates recorded per second, one in each transaction, signatures included."""
    given = [certified(triple(f"record {number}")) for number in range(PROMOTIONS)]
    with Register.open(place, create=True, clock=clock) as register:
        start = time.perf_counter()
        for bundle in given:
            register.record_certificates([bundle], TRUSTED)
        return PROMOTIONS / (time.perf_counter() - start)


def stock(place: str, count: int) -> list[str]:
    """Fill a new register with certificates; return some of their identities."""
    Register.open(place, create=True, clock=clock).close()
    database, some = RegisterDatabase(Location.of(place), create=False), []
    for first in range(0, count // PER_TRIPLE, _PORTION):
        with database.writing() as connection:
            last = head_in(connection)
            number, previous = last.number, last.hash
            rows: dict[Any, list[dict[str, Any]]] = {events: [], triples: [], certificates: []}
            for about in range(first, min(first + _PORTION, count // PER_TRIPLE)):
                for kind, table, row, data in _stocked(about):
                    number += 1
                    body = _body(number, previous, kind, data)
                    stated = {"number": number, "kind": kind.value, "previous": previous}
                    previous = hash_of(body)
                    rows[events].append({**stated, "time": AT, "hash": previous, "body": body})
                    rows[table].append({**row, "event": number})
                some.append(rows[certificates][-1]["identity"])
            if parse_event(body).hash != previous:
                raise RuntimeError("the events are not those that the program writes")
            for table, found in rows.items():
                _insert(connection, table, found)
            connection.execute(update(head).values(number=number, hash=previous))
        if len(some) % (SHOWN // PER_TRIPLE) == 0:
            print(f"{len(some) * PER_TRIPLE} of {count} certificates", file=sys.stderr, flush=True)
    database.close()
    if not database.is_sqlite:
        with psycopg.connect(place, autocommit=True) as plain:
            plain.execute("VACUUM ANALYZE")
            plain.execute("CHECKPOINT")
    return some


def _insert(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows into a table; they all have the same columns."""
    if connection.dialect.name == "sqlite":
        connection.execute(insert(table), rows)
        return
    connection.exec_driver_sql("SET LOCAL synchronous_commit TO off")
    raw: Any = connection.connection.dbapi_connection
    into = f"COPY {table.name} ({', '.join(rows[0])}) FROM STDIN"
    with raw.cursor() as cursor, cursor.copy(into) as copy:
        for row in rows:
            copy.write_row(tuple(row.values()))


AT = time_text(NOW)


def _body(number: int, previous: str, kind: EventKind, data: str) -> bytes:
    """Return the canonical event, faster than the program does; `stock` compares the two."""
    start = (
        f'{{"data":{data},"kind":"{kind}","number":{number},"previous":{{"sha256":"{previous}"}}'
    )
    return f'{start},"schema":"{EVENT_SCHEMA}","time":"{AT}"}}'.encode()


def _stocked(number: int) -> Iterator[tuple[EventKind, Any, dict[str, Any], str]]:
    """Yield a triple and its certificates: kind, table, row and canonical data."""
    about = triple(f"stock {number}")
    digest, data = about.digest, text_of(about.to_json())
    row: dict[str, Any] = {"digest": digest, "contract": about.contract.digest, "triple": data}
    yield EventKind.TRIPLE, triples, row, data
    entry = Certificate(
        identity="1" * 64,
        kind=StatementKind.CERTIFICATE,
        bundle="1" * 64,
        triple=digest,
        stage="offline-ci",
        sequence=PER_TRIPLE,
        verdict=Verdict.PASSED,
        issued_at=NOW,
        valid_until=NOW + timedelta(days=90),
        complete=True,
        signers=(KEY_A.public.fingerprint,),
        threshold=1,
    )
    pattern = text_of(entry.to_json())
    for sequence in range(PER_TRIPLE):
        name = hashlib.sha256(f"{number} {sequence}".encode()).hexdigest()
        data = pattern.replace("1" * 64, name)
        data = data.replace(f'"sequence":{PER_TRIPLE}', f'"sequence":{sequence}')
        row = {
            "identity": name,
            "triple": digest,
            "stage": entry.stage,
            "sequence": sequence,
            "verdict": entry.verdict.value,
            "supersedes": None,
            "record": data,
        }
        yield EventKind.CERTIFICATE, certificates, row, data


def intact(place: str) -> None:
    """Raise RuntimeError unless the last events are a chain that ends with the head, and the rows
    of certificates are those that follow from them."""
    with Register.open(place, clock=clock) as register:
        last = register.head()
        before, *found = register.events(last.number - SAMPLE - 1)
        for event in found:
            if event.previous != before.hash or event.number != before.number + 1:
                raise RuntimeError(f"event {event.number} does not follow the one before it")
            before = event
            if event.kind is not EventKind.CERTIFICATE:
                continue
            stated = replace(CERTIFICATE.read(event.data, "data"), number=event.number)
            if register.certificate(stated.identity) != stated:
                raise RuntimeError(f"event {event.number} has another row")
        if (before.number, before.hash) != (last.number, last.hash):
            raise RuntimeError("the head is not the last event")


def openings(place: str) -> float:
    """Return the median seconds of opening a register."""
    times = []
    for _ in range(OPENINGS):
        start = time.perf_counter()
        with Register.open(place, clock=clock):
            times.append(time.perf_counter() - start)
    return median(times)


def lookups(place: str, identities: list[str]) -> tuple[float, float, float]:
    """Return the median and the 99th percentile of the seconds of a lookup with its standing, and
    the mean of its processor seconds."""
    rng, times = random.Random(0), []
    with Register.open(place, clock=clock) as register:
        before = time.process_time()
        for _ in range(LOOKUPS):
            identity = rng.choice(identities)
            start = time.perf_counter()
            found = register.status_of(identity)
            times.append(time.perf_counter() - start)
            if found.certificate is None or not found.in_force:
                raise RuntimeError(f"{identity}: {found.standing}")
        processor = (time.process_time() - before) / LOOKUPS
    return median(times), quantiles(times, n=100)[98], processor


# --- writers --------------------------------------------------------------------------------------


def together(place: str, writers: int) -> tuple[int, int]:
    """Return how many entries of concurrent writers were lost, and how many promotions forked."""
    Register.open(place, create=True, clock=clock).close()
    written = write_together(place, writers, 2)
    with Register.open(place, clock=clock) as register:
        wrong = len(lost(register, written)) + len(register.check(trusted=TRUSTED).defects)
        return wrong, len(forked_promotions(register))


def killed(place: str, kills: int, seed: int) -> tuple[int, int]:
    """Return the number of entries acknowledged to killed writers, and the number of lost entries,
    forked promotions and audit findings."""
    told = wrong = 0
    for turn, left in enumerate(range(kills, 0, -BETWEEN)):
        written = kill_writers(place, min(BETWEEN, left), seed + turn)
        told += len(written.certificates) + len(written.runs) + len(written.revoked)
        told += len(written.promoted)
        with Register.open(place, create=True, clock=clock) as register:
            wrong += len(lost(register, written)) + len(forked_promotions(register))
            wrong += len(register.check(trusted=TRUSTED).defects)
    return told, wrong


# --- figures --------------------------------------------------------------------------------------


def figures(options: argparse.Namespace) -> list[Figure]:
    """Measure everything on both databases."""
    found: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="kcdsl-register-") as name, postgres() as server:
        folder = Path(name)
        files = (folder / f"{number}.db" for number in range(100))
        places: tuple[tuple[str, Callable[[], str]], ...] = (
            ("SQLite", lambda: str(next(files))),
            ("PostgreSQL", server.database),
        )
        for kind, new in places:
            found += _of(kind, new, options)
    return found


def _of(kind: str, new: Callable[[], str], options: argparse.Namespace) -> Iterator[Figure]:
    yield from _looked_up(kind, new(), options.certificates)
    if options.only == "stock":
        return
    one = "one writer, one transaction each"
    yield Figure(f"promotions/s, {kind}", promotions(new()), Better.HIGHER, None, one)
    yield Figure(f"certificates recorded/s, {kind}", recording(new()), Better.HIGHER, None, one)
    lost_entries, forked = together(new(), options.writers)
    writers = f"{options.writers} processes"
    yield Figure(f"lost or defective, {writers}, {kind}", lost_entries, Better.LOWER, 0)
    yield Figure(f"promotions forked, {writers}, {kind}", forked, Better.LOWER, 0)
    told, wrong = killed(new(), options.kills, options.seed)
    kills = f"{options.kills} writers killed with SIGKILL"
    yield Figure(f"entries told before kills, {kind}", told, Better.HIGHER, 1, kills)
    yield Figure(f"lost or defective after kills, {kind}", wrong, Better.LOWER, 0, kills)


def _looked_up(kind: str, place: str, count: int) -> Iterator[Figure]:
    start = time.process_time()
    identities = stock(place, count)
    intact(place)
    filled = f"{count} certificates, processor time of this process, without the server's"
    took = time.process_time() - start
    yield Figure(f"register filled, s, {kind}", took, Better.LOWER, None, filled)
    opened = f"connection and revision of the tables, median of {OPENINGS}"
    yield Figure(f"register opened, s, {kind}", openings(place), Better.LOWER, None, opened)
    middle, high, processor = lookups(place, identities)
    among = f"{count} certificates, {LOOKUPS} lookups with their standing, register open"
    yield Figure(f"lookup, median s, {kind}", middle, Better.LOWER, LOOKUP, among)
    yield Figure(f"lookup, 99th percentile s, {kind}", high, Better.LOWER, None, among)
    own = "mean of the processor time of this process, without the server's"
    yield Figure(f"lookup, processor s, {kind}", processor, Better.LOWER, None, own)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the sizes of the measurements."""
    parser.add_argument("--certificates", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--writers", type=int, default=WRITERS)
    parser.add_argument("--only", choices=("stock",), help="fill registers and look up alone")


def main() -> int:
    """Measure and report; return 1 if something was lost or unnoticed, or a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser)
    parser.add_argument("--seed", type=int, default=1)
    return report("release-register", figures(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
