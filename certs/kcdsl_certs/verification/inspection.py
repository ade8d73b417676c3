"""Inspection of a certificate alone, without contract, weights or files beside it.

The content is read whether or not a trusted key signed it; see `authentic`. The steps are those of
a check that need nothing else: a step that fails here fails in every check, and a step that
compares with the deployment is not run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import strict_load
from kcdsl_certs.signatures import (
    PAYLOAD_TYPE,
    Envelope,
    Rules,
    Trust,
    TrustedKey,
    decode,
    pae,
    parse_bundle,
)
from kcdsl_certs.statement import (
    LARGEST_PAYLOAD,
    PREDICATE_TYPE,
    TRANSFER_TYPE,
    Predicate,
    Statement,
    Verdict,
    certificate_id,
    parse_predicate,
    parse_statement,
)
from kcdsl_certs.verification.coverage import check_results, refuse_stray
from kcdsl_certs.verification.proofs import StepOutcome
from kcdsl_certs.verification.report import (
    EARLIER_FAILED,
    STEPS,
    TRANSFER_STEPS,
    Check,
    Log,
    NotRun,
    Stop,
)
from kcdsl_certs.verification.verify import (
    CheckState,
    check_evidence,
    check_sequence,
    check_stage,
    check_suppressions,
    check_validity,
    read_signed,
    refuse_unstated,
)

if TYPE_CHECKING:
    from kcdsl_certs.statement import Transfer

NEEDS_ARTEFACTS = "step/needs-artefacts"
"""The reason of steps that need the contract, the weights, the kernels or files."""
NO_KEY = "signature/no-key"
"""The reason of unverified signatures without trusted keys."""


@dataclass(frozen=True, slots=True)
class SeenSignature:
    """One signature: the key that it names, which is a hint, and the trusted key that made it.

    `problem` is the reason if the signature is not accepted.
    """

    keyid: str | None
    key: TrustedKey | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Inspection:
    """The content of a certificate, and the results of the steps that need nothing else.

    `authentic` is None without trusted keys, so that no signature was verified; False where a step
    up to `statement-type` failed. `body` is None where it cannot be read.
    """

    checks: tuple[Check, ...]
    authentic: bool | None
    signatures: tuple[SeenSignature, ...] = ()
    identity: str | None = None
    statement: Statement | None = None
    body: Predicate | Transfer | None = None
    stated: Verdict | None = None

    @property
    def refusals(self) -> tuple[Check, ...]:
        """Return the steps that failed: a check of the same policy fails them too."""
        return tuple(c for c in self.checks if c.outcome is StepOutcome.FAILED)

    @property
    def left_out(self) -> tuple[Check, ...]:
        """Return the steps that were not run."""
        return tuple(c for c in self.checks if c.outcome is StepOutcome.NOT_RUN)


def inspect(
    bundle: bytes, trust: Trust | None, moment: datetime, *, stage: str | None = None
) -> Inspection:
    """Inspect a certificate at a moment; never raises for bad input.

    Without `trust` no signature is verified, and the other steps are run on the unverified content.
    """
    log, state = Log(), CheckState()
    if trust is not None:
        with suppress(Stop):
            read_signed(log, state, bundle, trust.rules, moment)
        authentic: bool | None = not any(c.outcome is StepOutcome.FAILED for c in log.checks)
    else:
        authentic = None if _read_unverified(log, state, bundle) else False
    body = state.predicate or state.transfer
    rules = Rules() if trust is None else trust.rules
    if authentic is not False and body is not None:
        _examine(log, state, body, rules, moment, stage)
    envelope, statement = _opened(bundle, state)
    body, stated = _content(statement, state)
    steps = STEPS if body is None or isinstance(body, Predicate) else TRANSFER_STEPS
    return Inspection(
        _with_rest(log, steps, stopped=authentic is False),
        authentic,
        () if envelope is None else _seen(envelope, trust, moment),
        None if envelope is None else certificate_id(envelope.payload),
        statement,
        body,
        stated,
    )


def _read_unverified(log: Log, state: CheckState, bundle: bytes) -> bool:
    """Run steps 1 to 7 without signatures; return whether all of them are ok."""

    def parse() -> str:
        state.raw = parse_bundle(bundle)
        return f"{len(bundle)} bytes"

    def decoded() -> str:
        assert state.raw is not None
        state.envelope = decode(state.raw)
        return f"{len(state.envelope.signatures)} signature(s)"

    def payload_type() -> str:
        assert state.envelope is not None
        if state.envelope.payload_type != PAYLOAD_TYPE:
            raise Rejected("payload/type", f"{state.envelope.payload_type!r}")
        return state.envelope.payload_type

    def unverified() -> str:
        raise NotRun(NO_KEY, "no key is trusted: the signers are unknown")

    def payload() -> str:
        assert state.envelope is not None
        state.statement = parse_statement(strict_load(state.envelope.payload, LARGEST_PAYLOAD))
        return certificate_id(state.envelope.payload)

    def kind() -> str:
        assert state.statement is not None
        state.predicate, state.transfer, state.stated = _parsed(state.statement)
        return state.statement.predicate_type

    try:
        for name, step in (("bundle", parse), ("encoding", decoded)):
            log.run(name, step, stop=True)
        for name in ("signatures", "threshold"):
            log.run(name, unverified)
        last = (("payload-type", payload_type), ("payload", payload), ("statement-type", kind))
        for name, step in last:
            log.run(name, step, stop=True)
    except Stop:
        return False
    return True


def _examine(
    log: Log,
    state: CheckState,
    body: Predicate | Transfer,
    rules: Rules,
    moment: datetime,
    stage: str | None,
) -> None:
    """Run the parts of the later steps that need no comparison."""
    assert state.envelope is not None
    assert state.statement is not None
    payload, statement = state.envelope.payload, state.statement

    def alone(step: Callable[[], str]) -> Callable[[], str]:
        def run() -> str:
            raise NotRun(NEEDS_ARTEFACTS, step())

        return run

    def components() -> str:
        refuse_unstated(body.triple, rules)
        return "not compared with what is deployed"

    log.run("subject", alone(lambda: _subject(statement, body)))
    log.run("components", alone(components))
    log.run("validity", lambda: check_validity(body, moment, rules))
    log.run("sequence", lambda: check_sequence(body, payload, None, rules))
    log.run("contract", alone(lambda: check_suppressions(body, rules)))
    if isinstance(body, Predicate):
        assert state.stated is not None
        stated = state.stated
        log.run("clauses", alone(lambda: _results(body, stated)))
        log.run("evidence", lambda: check_evidence(body, None, strict=False))

    def staged() -> str:
        if state.signed_by:
            return check_stage(state, stage, rules.threshold)
        if stage is not None and body.stage != stage:
            raise Rejected("stage/mismatch", f"issued for {body.stage}, {stage} is required")
        raise NotRun(NO_KEY, f"issued for {body.stage}; whether the signers may is not known")

    log.run("stage", staged)


def _subject(statement: Statement, body: Predicate | Transfer) -> str:
    if len(statement.subjects) != 1:
        raise Rejected("subject/count", f"{len(statement.subjects)} subjects; one is accepted")
    if statement.subjects[0] is None:
        raise Rejected("subject/no-sha256", "the subject has no sha256 digest")
    if statement.subjects[0] != body.triple.digest:
        raise Rejected("subject/mismatch", "the subject is not the triple that is stated")
    return "the triple that is stated; not compared with what is deployed"


def _results(body: Predicate, stated: Verdict) -> str:
    """Return a summary of the results; raises Rejected where they could show no contract."""
    found = check_results(body, stated)
    refuse_stray(body)
    if not body.scope.covers:
        raise Rejected("clause/nothing-covered", "the certificate covers no clause")
    for (clause, slice_), results in found.items():
        if not any(result.verdict is Verdict.PASSED for result in results):
            where = clause if slice_ is None else f"{clause} [{slice_}]"
            raise Rejected("clause/not-passed", f"{where} is {results[0].verdict}")
    without = [pair for pair in body.scope.covers if pair not in found]
    if without:
        raise Rejected("clause/missing", f"{without[0][0]} is covered and has no result")
    return f"{len(found)} result(s) consistent; not compared with the contract"


def _with_rest(log: Log, steps: tuple[str, ...], *, stopped: bool) -> tuple[Check, ...]:
    """Return the steps in order, with missing ones as not run."""
    done = {check.name: check for check in log.checks}
    reason = EARLIER_FAILED if stopped else NEEDS_ARTEFACTS
    return tuple(done.get(n, Check(n, StepOutcome.NOT_RUN, reason)) for n in steps)


def _opened(bundle: bytes, state: CheckState) -> tuple[Envelope | None, Statement | None]:
    """Return envelope and statement as far as they can be parsed, without verification."""
    envelope, statement = state.envelope, state.statement
    with suppress(Rejected):
        if envelope is None:
            envelope = decode(parse_bundle(bundle))
        if statement is None:
            statement = parse_statement(strict_load(envelope.payload, LARGEST_PAYLOAD))
    return envelope, statement


def _content(
    statement: Statement | None, state: CheckState
) -> tuple[Predicate | Transfer | None, Verdict | None]:
    """Return the unverified body and its stated verdict."""
    body = state.predicate or state.transfer
    if body is not None or statement is None:
        return body, state.stated
    try:
        predicate, transfer, stated = _parsed(statement)
    except Rejected:
        return None, None
    return predicate or transfer, stated


def _parsed(statement: Statement) -> tuple[Predicate | None, Transfer | None, Verdict | None]:
    """Return the body of a statement by its type; raises Rejected."""
    if statement.predicate_type == TRANSFER_TYPE:
        from kcdsl_certs.statement import parse_transfer

        return None, parse_transfer(statement.predicate), None
    if statement.predicate_type != PREDICATE_TYPE:
        raise Rejected("statement/predicate-type", f"predicateType is {statement.predicate_type!r}")
    predicate, stated = parse_predicate(statement.predicate)
    return predicate, None, stated


def _seen(envelope: Envelope, trust: Trust | None, moment: datetime) -> tuple[SeenSignature, ...]:
    """Return every signature with the trusted key that made it."""
    if trust is None:
        return tuple(SeenSignature(s.keyid, None, "not verified") for s in envelope.signatures)
    message = pae(envelope.payload_type, envelope.payload)
    found: list[SeenSignature] = []
    for signature in envelope.signatures:
        made = (k for k in trust.rules.keys if k.key.verifies(signature.value, message))
        key = next(made, None)
        found.append(SeenSignature(signature.keyid, key, _problem(key, trust.rules, moment)))
    return tuple(found)


def _problem(key: TrustedKey | None, rules: Rules, moment: datetime) -> str:
    if key is None:
        return "made by no trusted key, or for other bytes"
    if key.key.fingerprint in rules.revoked_keys:
        return "the key was revoked"
    return "" if key.is_valid_at(moment) else "the key is outside its own validity"
