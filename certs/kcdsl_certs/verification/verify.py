"""Strict verification of a certificate in named steps that fail closed, with reasons."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl_certs.encoding.files import open_regular
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import time_text
from kcdsl_certs.signatures import Rules, TrustPolicy
from kcdsl_certs.statement import (
    PREDICATE_TYPE,
    TRANSFER_TYPE,
    Predicate,
    RequiredClause,
    SliceSource,
    Statement,
    Triple,
    Verdict,
    certificate_id,
    differences,
    parse_predicate,
    relaxed,
    states,
)
from kcdsl_certs.verification.authentication import (
    Signed,
    allowed,
    authenticate,
    meets_threshold,
    refuse_other_type,
)
from kcdsl_certs.verification.coverage import check_clauses
from kcdsl_certs.verification.evidence import EvidenceFiles, refuse_unnamed
from kcdsl_certs.verification.evidence import compare as compare_evidence
from kcdsl_certs.verification.proofs import ProofChecker, StepOutcome
from kcdsl_certs.verification.recount import Data, Recount
from kcdsl_certs.verification.report import TRANSFER_STEPS, Log, NotRun, Report, Stop, refused

if TYPE_CHECKING:
    from kcdsl_certs.statement import Transfer
    from kcdsl_certs.verification.transfers import Earlier

Clock = Callable[[], datetime]


@dataclass(slots=True)
class CheckState(Signed):
    """The state of the steps, in order; a step reads only results of earlier ones.

    A statement has either a predicate (of a certificate) or a transfer.
    """

    predicate: Predicate | None = None
    transfer: Transfer | None = None
    stated: Verdict | None = None
    outside: tuple[str, ...] = ()


def verify(
    bundle: bytes,
    *,
    trusted: TrustPolicy,
    expected_triple: Triple,
    clock: Clock,
    required_clauses: Iterable[RequiredClause],
    stage: str | None = None,
    minimum_sequence: int | None = None,
    proofs: ProofChecker | None = None,
    partial: bool = False,
    expected_inputs: Mapping[str, str] | None = None,
    earlier: Earlier | None = None,
    signature_only: bool = False,
    evidence: Path | None = None,
    data: Data | None = None,
    slices: Mapping[str, SliceSource] | None = None,
    strict: bool = False,
) -> Report:
    """Verify a certificate against the triple to be deployed; never raises for bad input.

    `required_clauses` are those of the contract in force. With `partial` only those within the
    signed scope are demanded, and the rest is reported as `outside`; release gates do not use it.
    `proofs` checks the proof of each clause; without it a certificate with proofs is refused,
    unless `signature_only` excludes the files beside the statement.
    `evidence` is the folder of the proofs and the evidence files, `data` finds data files, and
    `slices` has the sources of the slices: with these, coverage is recounted. Missing files are
    reported and, with `strict`, refused.
    `earlier` has the inputs for a weights transfer; without it transfers are refused.
    """
    log, state = Log(), CheckState()
    try:
        moment = clock()
    except Exception as error:
        return refused("validity", Rejected("clock/failed", str(error)))
    try:
        read_signed(log, state, bundle, trusted, moment)
    except Stop:
        return Report(log.finish())
    assert state.envelope is not None
    payload, required = state.envelope.payload, tuple(required_clauses)
    if state.transfer is not None:
        from kcdsl_certs.verification.transfers import compare

        def base(bundle: bytes, triple: Triple, proofs: ProofChecker) -> Report:
            return verify(
                bundle,
                trusted=trusted,
                expected_triple=triple,
                clock=lambda: moment,
                required_clauses=required,
                stage=stage,
                proofs=proofs,
                partial=True,
                evidence=evidence,
                data=data,
                slices=slices,
                strict=strict,
                expected_inputs=expected_inputs,
            )

        transfer = state.transfer
        expected_triple = _as_far_as_asked(transfer, expected_triple, trusted)
        log.run("subject", lambda: _subject(state, expected_triple))
        log.run("components", lambda: _components(transfer, expected_triple, None, trusted))
        log.run("validity", lambda: check_validity(transfer, moment, trusted))
        log.run("sequence", lambda: check_sequence(transfer, payload, minimum_sequence, trusted))
        log.run("contract", lambda: _contract(transfer, expected_triple, trusted))
        found = compare(log, transfer, expected_triple, earlier, base, required, partial)
        log.run("stage", lambda: check_stage(state, stage, trusted.threshold))
        names = tuple(k.name for k in state.signed_by)
        checks = log.finish(TRANSFER_STEPS)
        return Report(
            checks,
            certificate_id(payload),
            None,
            names,
            found.outside,
            TRANSFER_STEPS,
            found.assumptions,
        )
    assert state.predicate is not None
    predicate = state.predicate
    expected_triple = _as_far_as_asked(predicate, expected_triple, trusted)
    log.run("subject", lambda: _subject(state, expected_triple))
    log.run(
        "components",
        lambda: _components(predicate, expected_triple, expected_inputs, trusted, data, strict),
    )
    log.run("validity", lambda: check_validity(predicate, moment, trusted))
    log.run("sequence", lambda: check_sequence(predicate, payload, minimum_sequence, trusted))
    log.run("contract", lambda: _contract(predicate, expected_triple, trusted))
    log.run("clauses", lambda: _clauses(state, required, partial))
    log.run("stage", lambda: check_stage(state, stage, trusted.threshold))
    log.run("proofs", lambda: _proofs(predicate, proofs, signature_only))
    beside = None if evidence is None else EvidenceFiles(evidence)
    log.run("evidence", lambda: check_evidence(predicate, beside, strict))
    log.run("recount", lambda: check_recount(predicate, beside, data, slices or {}, strict))
    return Report(
        log.finish(),
        certificate_id(payload),
        predicate,
        tuple(k.name for k in state.signed_by),
        state.outside,
        assumptions=predicate.every_assumption,
    )


def read_signed(
    log: Log, state: CheckState, bundle: bytes, trusted: TrustPolicy, moment: datetime
) -> None:
    """Run steps 1 to 7; the payload is read only after its signature is verified.

    Raises Stop at the first failure.
    """
    authenticate(log, state, bundle, trusted, moment)

    def statement_type() -> str:
        assert state.statement is not None
        return _statement_type(state, state.statement, trusted.threshold)

    log.run("statement-type", statement_type, stop=True)


def _statement_type(state: CheckState, statement: Statement, threshold: int) -> str:
    refuse_other_type(statement)
    kind = statement.predicate_type
    state.signed_by = allowed(state.signed_by, kind, threshold)
    if kind == TRANSFER_TYPE:
        from kcdsl_certs.statement import parse_transfer

        state.transfer = parse_transfer(statement.predicate)
        return kind
    if kind != PREDICATE_TYPE:
        raise Rejected("statement/predicate-type", f"predicateType is {kind!r}")
    state.predicate, state.stated = parse_predicate(statement.predicate)
    return kind


def _subject(state: CheckState, expected: Triple) -> str:
    assert state.statement is not None
    body = state.predicate or state.transfer
    assert body is not None
    subjects = state.statement.subjects
    if len(subjects) != 1:
        raise Rejected("subject/count", f"{len(subjects)} subjects; exactly one is accepted")
    if subjects[0] is None:
        raise Rejected("subject/no-sha256", "the subject has no sha256 digest")
    if subjects[0] != expected.digest:
        found = differences(body.triple, expected)
        if not found:
            raise Rejected("subject/mismatch", "the subject is not the triple that is deployed")
        raise Rejected(found[0].reason, "; ".join(d.detail for d in found))
    return f"sha256:{subjects[0]}"


def _as_far_as_asked(
    predicate: Predicate | Transfer, expected: Triple, trusted: TrustPolicy
) -> Triple:
    """Return the expected triple without the parts of the kernels that may differ.

    If results depend on the machine, no part may differ. Otherwise cores and memory of the host
    may, and the parts that the policy relaxes.
    """
    results = predicate.clauses if isinstance(predicate, Predicate) else ()
    if any(clause.quantity.is_of_a_machine for clause in results):
        return expected
    return relaxed(predicate.triple, expected, trusted.relaxed_parts | {"host"})


def _components(
    predicate: Predicate | Transfer,
    expected: Triple,
    expected_inputs: Mapping[str, str] | None,
    trusted: TrustPolicy,
    data: Data | None = None,
    strict: bool = False,
) -> str:
    refuse_unstated(predicate.triple, trusted)
    return check_components(predicate, expected, expected_inputs, data, strict)


def refuse_unstated(triple: Triple, trusted: Rules) -> None:
    """Raise Rejected where a kernel lacks a part that the policy demands."""
    for role, kernel in (("train", triple.train), ("infer", triple.infer)):
        missing = sorted(p for p in trusted.required_parts if not states(kernel, p))
        if missing:
            detail = f"the {role} kernel does not say its {', '.join(missing)}"
            raise Rejected("triple/kernel-part-missing", detail)


def check_components(
    predicate: Predicate | Transfer,
    expected: Triple,
    expected_inputs: Mapping[str, str] | None,
    data: Data | None = None,
    strict: bool = False,
) -> str:
    """Compare the triple and the inputs with the expected ones; raises Rejected for a difference.

    Other stated inputs, such as modules that the contract's own code imported, are compared with
    the files that `data` finds; with `strict`, missing ones are refused.
    """
    found = differences(predicate.triple, expected)
    if found:
        raise Rejected(found[0].reason, "; ".join(d.detail for d in found))
    if predicate.triple.digest != expected.digest:
        raise Rejected("triple/inconsistent", "the components repeat another triple")
    if not isinstance(predicate, Predicate):
        return "checkpoint, both kernels, contract"
    stated = {i.name: i.sha256 for i in predicate.inputs}
    if len(stated) != len(predicate.inputs):
        raise Rejected("input/duplicate", "an input is listed twice")
    for name, digest in (expected_inputs or {}).items():
        if name not in stated:
            raise Rejected("input/missing", f"the certificate does not name the data {name}")
        if stated[name] != digest:
            raise Rejected("input/mismatch", f"the data {name} changed")
    absent = _others(stated, expected_inputs or {}, data)
    if absent and strict:
        raise Rejected("input/not-at-hand", f"not at hand: {', '.join(absent)}")
    rest = f"; not at hand: {', '.join(absent)}" if absent else ""
    return f"checkpoint, both kernels, contract, {len(stated)} input(s){rest}"


def _others(stated: Mapping[str, str], expected: Mapping[str, str], data: Data | None) -> list[str]:
    """Compare the other stated inputs with their files; return the missing ones. Raises Rejected
    where one differs."""
    absent = []
    for name in sorted(stated.keys() - expected.keys()):
        path = None if data is None else data(name)
        if path is None or not path.is_file():
            absent.append(name)
            continue
        try:
            with open_regular(path, "input/unreadable") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise Rejected("input/unreadable", f"{name}: {error.strerror or error}") from None
        if found != stated[name]:
            raise Rejected("input/mismatch", f"{name} changed")
    return absent


def check_validity(predicate: Predicate | Transfer, moment: datetime, trusted: Rules) -> str:
    """Compare the validity period of a statement with the time and the policy; raises Rejected."""
    if moment.tzinfo is None:
        raise Rejected("time/no-zone", "the clock does not know its zone")
    if predicate.valid_until <= predicate.issued_at:
        raise Rejected("validity/empty", "it ends before it begins")
    if predicate.valid_until - predicate.issued_at > trusted.max_validity:
        raise Rejected(
            "validity/too-long",
            f"valid from {time_text(predicate.issued_at)} until {time_text(predicate.valid_until)},"
            f" longer than the {trusted.max_validity.days} days that are accepted",
        )
    if moment < predicate.issued_at:
        raise Rejected(
            "validity/not-yet",
            f"issued at {time_text(predicate.issued_at)}, the clock says {time_text(moment)}",
        )
    if moment >= predicate.valid_until:
        raise Rejected("validity/expired", f"it was valid until {time_text(predicate.valid_until)}")
    return f"until {time_text(predicate.valid_until)}"


def check_sequence(
    predicate: Predicate | Transfer, payload: bytes, minimum: int | None, trusted: Rules
) -> str:
    """Refuse a revoked certificate or a sequence below `minimum`; raises NotRun without minimum."""
    if certificate_id(payload) in trusted.revoked_certificates:
        raise Rejected("sequence/revoked", "this certificate was revoked")
    if minimum is None:
        raise NotRun("sequence/no-register", "no least sequence was given")
    if predicate.sequence < minimum:
        raise Rejected("sequence/rollback", f"{predicate.sequence} comes before {minimum}")
    return f"{predicate.sequence}, at least {minimum}"


def _contract(predicate: Predicate | Transfer, expected: Triple, trusted: TrustPolicy) -> str:
    if predicate.triple.contract != expected.contract:
        found = differences(predicate.triple, expected)
        detail = next(d.detail for d in found if d.reason == "triple/contract-mismatch")
        raise Rejected("triple/contract-mismatch", detail)
    return check_suppressions(predicate, trusted)


def check_suppressions(predicate: Predicate | Transfer, trusted: Rules) -> str:
    """Return the name of the contract and its accepted findings; raises Rejected where the policy
    forbids them."""
    contract = predicate.triple.contract
    name = f"{contract.id} {contract.version}"
    if not isinstance(predicate, Predicate) or not predicate.suppressions:
        return name  # for a transfer, the earlier certificate is checked instead
    accepted = "; ".join(f"{item.code}: {item.reason}" for item in predicate.suppressions)
    if trusted.refuse_suppressions:
        raise Rejected("contract/suppressions", f"{name} with accepted findings: {accepted}")
    return f"{name}, with accepted findings: {accepted}"


def _clauses(state: CheckState, required: tuple[RequiredClause, ...], partial: bool) -> str:
    assert state.predicate is not None
    assert state.stated is not None
    detail, state.outside = check_clauses(state.predicate, state.stated, required, partial=partial)
    return detail


def check_stage(state: CheckState, stage: str | None, threshold: int) -> str:
    """Compare the stage with the permissions of the signers and the requested stage; raises
    Rejected or NotRun."""
    body = state.predicate or state.transfer
    assert body is not None
    stated = body.stage
    able = tuple(k for k in state.signed_by if k.stages is None or stated in k.stages)
    meets_threshold(able, threshold, "stage/key-not-allowed")
    if stage is None:
        raise NotRun("stage/none-required", f"issued for {stated}; no stage was requested")
    if stated != stage:
        raise Rejected("stage/mismatch", f"issued for {stated}, {stage} is required")
    return stated


def check_recount(
    predicate: Predicate,
    evidence: EvidenceFiles | None,
    data: Data | None,
    slices: Mapping[str, SliceSource],
    strict: bool,
) -> str:
    """Recount the coverage of the results from the data; raises as `check_evidence` does."""
    if data is None or evidence is None:
        detail = "coverage was not counted again: no data was given"
        raise (Rejected if strict else NotRun)("recount/no-data", detail)
    records, inputs = evidence.document("records"), {i.name: i.sha256 for i in predicate.inputs}
    count = Recount(slices, data, inputs, evidence.folder, records)
    count.run(predicate.clauses)
    said = "; ".join(count.counted)
    if count.beyond:
        said += f"; not counted: {'; '.join(count.beyond)}"
    if count.missing:
        detail = f"coverage was not counted again, missing: {', '.join(count.missing)}"
        raise (Rejected if strict else NotRun)("recount/missing", f"{detail}; {said}")
    return said.removeprefix("; ")


def check_evidence(predicate: Predicate, found: EvidenceFiles | None, strict: bool) -> str:
    """Compare the evidence files with their digests and with the results.

    Raises Rejected where one differs; with `strict` also where one is missing, else NotRun.
    """
    refuse_unnamed(predicate.clauses, predicate.evidence)
    if not predicate.evidence:
        return "no result was measured"
    if found is None:
        detail = f"{len(predicate.evidence)} file(s) not checked"
        raise (Rejected if strict else NotRun)("evidence/not-looked-at", detail)
    found.examine(predicate.evidence)
    said = "; ".join(compare_evidence(found, predicate.clauses, predicate.triple))
    if any(file.role == "run-checkpoint" for file in predicate.evidence):
        said += "; a resumed run: some requests are of an earlier one, from its run checkpoint"
    if found.missing:
        detail = f"missing: {', '.join(found.missing)}" + (f"; compared: {said}" if said else "")
        raise (Rejected if strict else NotRun)("evidence/missing", detail)
    return f"{len(predicate.evidence)} file(s) as they were signed; compared: {said}"


def _proofs(predicate: Predicate, proofs: ProofChecker | None, signature_only: bool) -> str:
    claimed = [c for c in predicate.clauses if c.proof is not None]
    if not claimed:
        return "no clause rests on a proof object"
    if proofs is None:
        detail = f"{len(claimed)} proof(s) not checked"
        if signature_only:
            raise NotRun("proof/not-looked-at", f"{detail}: only the signature was requested")
        raise Rejected("proof/not-looked-at", detail)
    results = [proofs(clause, predicate.triple) for clause in claimed]
    for wanted in (StepOutcome.FAILED, StepOutcome.NOT_RUN):
        found = [r for r in results if r.outcome is wanted]
        if not found:
            continue
        detail = "; ".join(r.detail for r in found)
        if wanted is StepOutcome.FAILED:
            raise Rejected(found[0].reason, detail)
        raise NotRun(found[0].reason, detail)
    return "; ".join(r.detail for r in results)
