"""The register of certificates: recording, reading and checking."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any, Self

from sqlalchemy import Connection, select

from kcdsl.diagnostics import Diagnostic, Refusal, refuse
from kcdsl.diagnostics.codes import NOT_RECORDED, REGISTER_DAMAGED, STALE_SLOT
from kcdsl.release.issue import utc_now
from kcdsl.release.register import queries
from kcdsl.release.register.admission import (
    read_bundle,
    record,
    record_run,
    record_triple,
    refuse_counted,
    refuse_unfounded,
    run_of,
)
from kcdsl.release.register.audit import Audit, audit
from kcdsl.release.register.chain import Chain, begin, head_in
from kcdsl.release.register.database import WAIT, Location, RegisterDatabase, revision_of, upgrade
from kcdsl.release.register.events import BEFORE_FIRST, Event, EventKind, hash_of, parse_event
from kcdsl.release.register.projections import MARK, slot_after
from kcdsl.release.register.records import (
    PROMOTION,
    REVOCATION,
    RUN,
    SLOT_NAME,
    Certificate,
    CertificateStatus,
    Promotion,
    Revocation,
    Revoked,
    Run,
    Slot,
)
from kcdsl.release.register.schema import REVISION, bundles, events
from kcdsl_certs.encoding.records import Record
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import canonical_json
from kcdsl_certs.signatures import (
    SigningKey,
    TrustPolicy,
    bundle_bytes,
    decode,
    parse_bundle,
    sign,
)
from kcdsl_certs.statement import (
    CertifiedClause,
    Predicate,
    RegisterHead,
    Transfer,
    Triple,
    head_bytes,
)
from kcdsl_certs.verification.admission import read_statement

_BATCH = 1000


class Stale(Refusal):
    """Raised where a slot has changed since a decision was prepared; `slot` is its current state.

    The caller must read the slot again and verify the candidate against the live triple before a
    new decision.
    """

    def __init__(self, slot: Slot, detail: str) -> None:
        self.slot = slot
        super().__init__(
            Diagnostic(
                STALE_SLOT,
                f"the slot {slot.name} changed meanwhile: {detail}",
                help="compare the candidate with what is live now, and decide again",
            )
        )


class Register:
    """A register of triples, certificates, runs, promotions and revocations.

    Every change is an immutable event. Each modifying method is one transaction and returns after
    the data is on disk. Use it as a context manager.
    """

    def __init__(
        self,
        database: RegisterDatabase,
        clock: Callable[[], datetime],
        within: Connection | None = None,
    ) -> None:
        """Take the database of `open`; `within` is the transaction for all reads, if any."""
        self._database = database
        self._clock = clock
        self._within = within

    @classmethod
    def open(
        cls,
        place: str | os.PathLike[str],
        *,
        create: bool = False,
        clock: Callable[[], datetime] = utc_now,
        wait: float = WAIT,
    ) -> Self:
        """Open the register at a path, at `sqlite:///PATH` or at `postgresql://HOST/DATABASE`.

        With `create`, a missing register is created. `wait` is the time in seconds to wait for
        other writers. Raises Refusal for a missing register or tables of another version.
        """
        database = RegisterDatabase(Location.of(place), create=create, wait=wait)
        try:
            if create:
                _make(database, clock())
            database.refuse_other_revision()
        except BaseException:
            database.close()
            raise
        return cls(database, clock)

    @staticmethod
    def upgrade(place: str | os.PathLike[str]) -> tuple[str, str]:
        """Upgrade the tables of a register to the revision of this program, or change nothing.

        Returns the revisions before and after. Raises Refusal where there is no register, or a
        newer one.
        """
        database = RegisterDatabase(Location.of(place), create=False)
        try:
            database.refuse_other_revision(older=True)
            with database.defining() as connection:
                before = revision_of(connection)
                upgrade(connection)
            return before or "", REVISION
        finally:
            database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def refuse_other_revision(self) -> None:
        """Refuse tables of another version, as `open` does."""
        self._database.refuse_other_revision()

    def close(self) -> None:
        """Close the connections."""
        self._database.close()

    # --- recording --------------------------------------------------------------------------------

    def record_certificates(
        self, given: Sequence[bytes], trusted: TrustPolicy
    ) -> tuple[Certificate, ...]:
        """Record the certificates or weights transfers in bundles, whatever their verdicts.

        Each is recorded with its triple and, if it names a report, with the run of the report. All
        are recorded in one transaction, or none. Keys of `trusted` must have signed them, as in a
        check. A certificate that is recorded already is returned unchanged. Raises Refusal for a
        certificate that is inconsistent, that no trusted key signed, or whose sequence number is
        taken for the same triple and stage.
        """
        try:
            read = [read_bundle(bundle, trusted, self._clock()) for bundle in given]
        except Rejected as error:
            raise _not_recorded(error, "kcdsl check says what a certificate lacks") from error
        with self._appending() as (connection, chain):
            return tuple(record(connection, chain, each) for each in read)

    def record_triple(self, triple: Triple) -> str:
        """Record a triple that has no certificate yet; returns its digest."""
        with self._appending() as (connection, chain):
            record_triple(connection, chain, triple)
        return triple.digest

    def record_run(self, run: Run) -> Run:
        """Record a run of a triple that is recorded; one that is recorded already is returned."""
        _refuse_malformed(RUN, run.to_json())
        with self._appending() as (connection, chain):
            return record_run(connection, chain, run)

    def mark_run(self, identity: str, *, trusted: bool, reason: str) -> Run:
        """Mark a run as untrusted, or as trusted again; raises Refusal for an unknown run."""
        mark = MARK.write({"run": identity, "trusted": trusted, "reason": reason})
        _refuse_malformed(MARK, mark)
        with self._appending() as (connection, chain):
            if queries.run_in(connection, identity) is None:
                raise refuse(
                    NOT_RECORDED,
                    f"the register has no run sha256:{identity}",
                    help="`kcdsl register log` lists the runs; `kcdsl register add CERT` "
                    "records that of a certificate",
                )
            chain.append(EventKind.RUN_MARK, mark)
            found = queries.run_in(connection, identity)
            assert found is not None
        return found

    def revoke(
        self, subject: str, reason: str, *, kind: Revoked = Revoked.CERTIFICATE
    ) -> Revocation:
        """Revoke a certificate by its identifier, or a key by its fingerprint, known or not.

        A revocation is final. Revoking keys revokes a certificate once fewer keys are left than
        had to sign it.
        """
        entry = Revocation(kind, subject, reason)
        _refuse_malformed(REVOCATION, entry.to_json())
        with self._appending() as (connection, chain):
            found = queries.revocation_in(connection, kind, subject)
            if found is not None:
                return found
            event = chain.append(EventKind.REVOCATION, entry.to_json())
        return replace(entry, number=event.number)

    def promote(
        self,
        slot: str,
        expected_version: int,
        promotion: Promotion | Callable[[Register], Promotion],
        traffic: Iterable[str] = (),
    ) -> Slot:
        """Record a decision about a candidate, and update the slot accordingly.

        A decision may be a function of the register, evaluated in the same transaction, so that no
        other writer changes its input.
        `expected_version` is the version of the slot that the decision refers to; each decision
        increments it. Raises Stale where the slot has another version, or where the live triple is
        not the incumbent; Refusal where ADVANCED or PROMOTED has no certificate, or one that is not
        of the candidate, did not pass, or is not in force, or where `traffic`, digests of evidence,
        was used for another candidate or in another slot.
        """
        with self._appending() as (connection, chain):
            before = queries.slot_in(connection, slot)
            if before.version != expected_version:
                raise Stale(before, f"version {before.version}, not {expected_version}")
            if not isinstance(promotion, Promotion):
                promotion = promotion(type(self)(self._database, self._clock, connection))
            decided = replace(promotion, slot=slot, version=expected_version + 1)
            _refuse_malformed(PROMOTION, decided.to_json())
            try:
                slot_after(before, decided, 0)
            except Rejected as error:
                raise Stale(before, error.detail) from error
            refuse_unfounded(connection, decided, before, self._clock())
            refuse_counted(connection, slot, decided.candidate, traffic)
            chain.append(EventKind.PROMOTION, decided.to_json())
            return queries.slot_in(connection, slot)

    # --- reading ----------------------------------------------------------------------------------

    def certificate(self, identity: str) -> Certificate | None:
        """Return a certificate by its identifier."""
        with self._reading() as connection:
            return queries.certificate_in(connection, identity)

    def certificates(
        self, *, triple: str | None = None, stage: str | None = None
    ) -> tuple[Certificate, ...]:
        """Return certificates in the order in which they were recorded."""
        with self._reading() as connection:
            return tuple(queries.certificates_in(connection, triple, stage))

    def bundle(self, identity: str) -> bytes | None:
        """Return the recorded bundle of a certificate."""
        with self._reading() as connection:
            found = queries.certificate_in(connection, identity)
            if found is None:
                return None
            wanted = select(bundles.c.content).where(bundles.c.digest == found.bundle)
            content = connection.execute(wanted).scalar_one_or_none()
        if content is None or hash_of(bytes(content)) != found.bundle:
            raise refuse(
                REGISTER_DAMAGED,
                f"the bundle of sha256:{identity} is not as recorded",
                help="`kcdsl register check` lists what else is damaged; restore the register "
                "from a copy",
            )
        return bytes(content)

    def run_of(self, identity: str) -> Run | None:
        """Return the run whose report a recorded certificate names; None without one."""
        body = self._body(identity)
        return None if body is None else run_of(body)

    def obligations_of(self, identity: str) -> frozenset[str]:
        """Return the obligations for which a recorded certificate states results."""
        return frozenset(clause.obligation for clause in self.results_of(identity))

    def results_of(self, identity: str) -> tuple[CertifiedClause, ...]:
        """Return the results that a recorded certificate states; none of a weights transfer."""
        body = self._body(identity)
        return body.clauses if isinstance(body, Predicate) else ()

    def _body(self, identity: str) -> Predicate | Transfer | None:
        data = self.bundle(identity)
        with _damaged():
            return None if data is None else read_statement(decode(parse_bundle(data)).payload)

    def triple(self, digest: str) -> Triple | None:
        """Return a triple by its digest."""
        with self._reading() as connection:
            return queries.triple_in(connection, digest)

    def triples(self) -> tuple[Triple, ...]:
        """Return triples in the order in which they were recorded."""
        with self._reading() as connection:
            return tuple(queries.triples_in(connection))

    def run(self, identity: str) -> Run | None:
        """Return a run by its identity."""
        with self._reading() as connection:
            return queries.run_in(connection, identity)

    def runs(
        self,
        *,
        triple: str | None = None,
        stage: str | None = None,
        trusted: bool | None = None,
    ) -> tuple[Run, ...]:
        """Return runs in the order in which they were recorded."""
        with self._reading() as connection:
            return tuple(queries.runs_in(connection, triple, stage, trusted))

    def slot(self, name: str) -> Slot:
        """Return the state of a slot, with version 0 if there was no decision about it."""
        try:
            SLOT_NAME.read(name, "slot")
        except Rejected as error:
            raise _not_recorded(error) from error
        with self._reading() as connection:
            return queries.slot_in(connection, name)

    def slots(self) -> tuple[Slot, ...]:
        """Return every slot, by name."""
        with self._reading() as connection:
            return tuple(sorted(queries.slots_in(connection), key=lambda slot: slot.name))

    def promotions(
        self, *, slot: str | None = None, candidate: str | None = None
    ) -> tuple[Promotion, ...]:
        """Return decisions in the order in which they were recorded."""
        with self._reading() as connection:
            return tuple(queries.promotions_in(connection, slot, candidate))

    def refuse_counted(self, slot: str, candidate: str, traffic: Iterable[str]) -> None:
        """Raise Refusal where `promote` would refuse this traffic."""
        with self._reading() as connection:
            refuse_counted(connection, slot, candidate, traffic)

    def refuse_changed(self, triple: str) -> None:
        """Raise Refusal where rows were removed, or where a certificate of a triple or a revocation
        is not as its event says; rows that are read are compared in any case."""
        with self._reading() as connection:
            queries.refuse_changed(connection, triple)

    def revocations(self) -> tuple[Revocation, ...]:
        """Return revocations in the order in which they were recorded."""
        with self._reading() as connection:
            return tuple(queries.revocations_in(connection))

    def status_of(self, identity: str, at: datetime | None = None) -> CertificateStatus:
        """Return the status of a certificate; `at` (default: now) is compared with its validity.

        It is superseded by a newer one that names it, and by any newer one of the same triple and
        stage that did not pass. All recorded events count, at whatever time they were recorded.
        """
        with self._reading() as connection:
            return queries.status_in(connection, identity, at or self._clock())

    def events(self, since: int = 0) -> Iterator[Event]:
        """Yield the events after number `since`; raises Refusal for one that is damaged."""
        while True:
            wanted = select(events.c.body).where(events.c.number > since)
            with self._reading() as connection:
                ordered = wanted.order_by(events.c.number).limit(_BATCH)
                found = [bytes(body) for body in connection.execute(ordered).scalars()]
                batch = [parse_event(body) for body in found]
            yield from batch
            if len(batch) < _BATCH:
                return
            since = batch[-1].number

    # --- heads ------------------------------------------------------------------------------------

    def head(self) -> RegisterHead:
        """Return the number and the hash of the last event."""
        with self._reading() as connection:
            return head_in(connection)

    def sign_head(self, keys: Sequence[SigningKey], head: RegisterHead | None = None) -> bytes:
        """Return a head (default: the current one), signed by every key, as a Sigstore bundle.

        At least one key is required.
        """
        found = replace(head or self.head(), at=self._clock().replace(microsecond=0))
        envelope = sign(head_bytes(found), keys)
        return bundle_bytes(envelope, keys[0].public.hint)

    def check(self, heads: Sequence[bytes] = (), trusted: TrustPolicy | None = None) -> Audit:
        """Check everything that is recorded: the chain, the derived tables, and the bundles.

        Each of the signed `heads` must be the head of a prefix of the chain. With `trusted`,
        signatures of the heads and of every bundle are verified.
        """
        with self._reading() as connection:
            return audit(connection, heads, trusted, self._clock())

    # --- transactions -----------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        if self._within is not None:
            yield self._within
            return
        with self._database.reading() as connection, _damaged():
            yield connection

    @contextmanager
    def _appending(self) -> Iterator[tuple[Connection, Chain]]:
        assert self._within is None, "a decision writes nothing itself"
        with self._database.writing() as connection, _damaged():
            chain = Chain(connection, self._clock())
            yield connection, chain
            chain.close()


@contextmanager
def _damaged() -> Iterator[None]:
    """Refuse a register with malformed rows."""
    try:
        yield
    except (Rejected, TypeError) as error:  # SQLite columns accept any type
        raise refuse(
            REGISTER_DAMAGED,
            f"the register contradicts itself: {error}",
            help="`kcdsl register check` says what is wrong; nothing was written",
        ) from error


def _refuse_malformed(kind: Record[Any], entry: Mapping[str, Any]) -> None:
    """Refuse an entry that no event can hold."""
    try:
        kind.read(entry, "entry")
        canonical_json(dict(entry))
    except Rejected as error:
        raise _not_recorded(error) from error


def _not_recorded(error: Rejected, help: str | None = None) -> Refusal:
    return refuse(NOT_RECORDED, f"not recorded: {error.detail} ({error.reason})", help=help)


def _make(database: RegisterDatabase, moment: datetime) -> None:
    """Create tables and the first event where there are none, in one transaction."""
    if database.revision() is not None:
        return
    with database.defining() as connection:
        if revision_of(connection) is not None:
            return  # another process created them
        upgrade(connection)
        name = {"id": secrets.token_hex(16)}
        begin(
            connection,
            Event(1, moment.replace(microsecond=0), BEFORE_FIRST, EventKind.REGISTER, name),
        )
