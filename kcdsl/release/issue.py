"""Issuing a certificate: a signed bundle from results."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kcdsl import __version__
from kcdsl.diagnostics import Suppressed, refuse
from kcdsl.diagnostics.codes import CANNOT_CERTIFY
from kcdsl.ir.terms import Program
from kcdsl.model.files import Artefacts
from kcdsl.release.artefacts import code_digests, data_digests, refuse_others, stated_digests
from kcdsl.release.requirements import Fingerprints, build_triple, required_clauses
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.signatures import SigningKey, bundle_bytes, sign
from kcdsl_certs.statement import (
    STAGES,
    AcceptedFinding,
    CertifiedClause,
    Comparison,
    Evaluator,
    Evidence,
    EvidenceFile,
    Input,
    Predicate,
    RequiredClause,
    Scope,
    Triple,
    Verdict,
    admissible,
    numerics_digest,
    payload_bytes,
    states_machine,
)
from kcdsl_certs.verification.evidence import refuse_unnamed

DEFAULT_LIFETIME = timedelta(days=90)
NON_CLAIMS = (
    "It says nothing about inputs outside the slices and regions that it names.",
    "It says nothing about the quality of the model, only about the drift between two kernels.",
    "A census speaks about its pinned rows alone; a sample speaks with its stated confidence.",
)
UNSEEN = (
    "The inference kernel was {how}: that it holds the weights of the checkpoint is not shown, only"
    " how far what it gave lies from the training kernel."
)


def utc_now() -> datetime:
    """Return the present time; the default clock."""
    return datetime.now(UTC)


def result_for(
    required: RequiredClause,
    wanted: Comparison | None = None,
    *,
    evidence: Evidence,
    method: str,
    verdict: Verdict,
    **numbers: Any,
) -> CertifiedClause:
    """Return a result with the fields that the contract states; `numbers` are other fields.

    `wanted` is the comparison of the result, by default the first one of the clause.

    The verdict is weakened to the one that the numbers support: a sampled result of a hard clause
    becomes INCONCLUSIVE, never PASSED. Raises Refusal where the numbers are inconsistent.
    """
    if wanted is None:
        wanted = next((c for part in required.alternatives for c in part), None)
    if wanted is None:
        raise refuse(
            CANNOT_CERTIFY,
            f"{required.label} has a form that a certificate cannot state",
            help="say it in several clauses: one of more than 64 alternatives, or one that negates "
            "a quantifier, has no normal form",
        )
    stated: dict[str, Any] = {
        "obligation": wanted.obligation,
        "id": required.id,
        "slice": required.slice,
        "slice_digest": required.slice_digest,
        "region": required.region,
        "budget": None if evidence.is_proof else required.budget,
        "quantity": wanted.quantity,
        "op": wanted.op,
        "tau": wanted.tau,
        "unit": wanted.unit,
        "evidence": evidence,
        "method": method,
        "verdict": verdict,
    }
    return weakened(CertifiedClause(**{**stated, **numbers}))


def weakened(clause: CertifiedClause) -> CertifiedClause:
    """Return the result with the strongest verdict that its numbers support, at most its own."""
    try:
        clause.to_json()
        admitted = admissible(clause)
    except Rejected as error:
        raise refuse(
            CANNOT_CERTIFY,
            f"{clause.label}: {error.detail} ({error.reason})",
            help="run `kcdsl verify` or `kcdsl evaluate` again; it is a defect if the result "
            "is the same",
        ) from error
    if clause.verdict in admitted:
        return clause
    verdict = Verdict.INCONCLUSIVE if Verdict.INCONCLUSIVE in admitted else Verdict.FAILED
    reason = clause.reason or f"its numbers do not admit {clause.verdict}"
    return dataclasses.replace(clause, verdict=verdict, reason=reason)


def issue(
    *,
    program: Program,
    base: Path | Artefacts,
    clauses: Sequence[CertifiedClause],
    keys: Sequence[SigningKey],
    clock: Callable[[], datetime] = utc_now,
    fingerprints: Fingerprints | None = None,
    stage: str = "offline-ci",
    lifetime: timedelta = DEFAULT_LIFETIME,
    sequence: int | None = None,
    evaluator: str = "kcdsl",
    assumptions: Sequence[str] = (),
    supersedes: str | None = None,
    suppressed: Sequence[Suppressed] = (),
    source: str | None = None,
    evidence: Sequence[EvidenceFile] = (),
    loaded: Mapping[str, str] | None = None,
) -> bytes:
    """Build the certificate of these results, signed by every key; returns the bundle.

    Without `keys` it is the unsigned statement, which `kcdsl sign` signs.
    `base` is the folder of the contract. The same results at the same time give the same payload.
    `sequence` defaults to the time of issue in seconds, so that it increases.
    `supersedes` is the identifier of an older certificate; `suppressed` are findings about the
    contract that its comments accept; `source` is the sha256 of its text. `loaded` are the
    digests of the files when they were read.
    `evidence` are the evidence files of measured results, stored beside the certificate.
    Raises Refusal for results that cannot be certified, and for files that have changed.
    """
    if not clauses or stage not in STAGES or lifetime <= timedelta(0):
        raise refuse(
            CANNOT_CERTIFY,
            "a certificate needs results, a stage and a lifetime",
            help="give at least one result, a stage such as offline-ci, and a time of validity"
            " above zero",
        )
    issued_at = clock().replace(microsecond=0)
    files = Artefacts.of(base)
    triple = build_triple(program, files, fingerprints=fingerprints)
    data = {**data_digests(program, files), **code_digests(program, files)}
    if loaded is not None:
        refuse_others(loaded, stated_digests(triple.checkpoint, data))
    # An obligation may state one comparison twice; the certificate states its result once.
    named = (_of_machine(_with_numerics(clause, triple), triple) for clause in clauses)
    results = tuple(dict.fromkeys(weakened(clause) for clause in named))
    try:
        predicate = Predicate(
            triple=triple,
            stage=stage,
            issued_at=issued_at,
            valid_until=issued_at + lifetime,
            sequence=int(issued_at.timestamp()) if sequence is None else sequence,
            scope=_scope(required_clauses(program, files), results),
            clauses=results,
            evaluator=Evaluator(evaluator, __version__),
            inputs=tuple(Input(*item) for item in data.items()),
            assumptions=tuple(assumptions),
            non_claims=_non_claims(program),
            supersedes=supersedes,
            suppressions=_accepted(suppressed),
            contract_source=source,
            evidence=tuple(evidence),
        )
        refuse_unnamed(results, predicate.evidence)
        payload = payload_bytes(predicate)
        if not keys:
            return payload
        return bundle_bytes(sign(payload, keys), keys[0].public.hint)
    except Rejected as error:
        raise refuse(
            CANNOT_CERTIFY,
            f"{error.detail} ({error.reason})",
            help="run `kcdsl verify` or `kcdsl evaluate` again on files that do not change "
            "meanwhile",
        ) from error


def evidence_entries(files: Mapping[str, tuple[Path, bytes]]) -> tuple[EvidenceFile, ...]:
    """Return the entries of a certificate for its evidence files, which are given by role."""
    return tuple(
        EvidenceFile(role, path.name, hashlib.sha256(data).hexdigest())
        for role, (path, data) in files.items()
    )


def _non_claims(program: Program) -> tuple[str, ...]:
    infer = program.infer
    if infer.service is not None:
        return (*NON_CLAIMS, UNSEEN.format(how="asked as a server"))
    if infer.recording is not None:
        return (*NON_CLAIMS, UNSEEN.format(how="read from a recording"))
    return NON_CLAIMS


def _accepted(suppressed: Sequence[Suppressed]) -> tuple[AcceptedFinding, ...]:
    return tuple(
        sorted({AcceptedFinding(item.diagnostic.code.id, item.reason) for item in suppressed})
    )


def _with_numerics(clause: CertifiedClause, triple: Triple) -> CertifiedClause:
    """Fill in the numerics of a proof from the fingerprints of the two kernels."""
    if clause.proof is None or clause.numerics is not None:
        return clause
    train, infer = numerics_digest(triple.train), numerics_digest(triple.infer)
    if train is None or infer is None:
        return clause
    return dataclasses.replace(clause, numerics=(train, infer))


def _of_machine(clause: CertifiedClause, triple: Triple) -> CertifiedClause:
    """Weaken a machine-dependent result to inconclusive where the triple names no machine."""
    passed = clause.verdict is Verdict.PASSED
    if not passed or not clause.quantity.is_of_a_machine or states_machine(triple.infer):
        return clause
    reason = "the machine that measured it is not known: the inference kernel did not run here"
    return dataclasses.replace(clause, verdict=Verdict.INCONCLUSIVE, reason=reason)


def _scope(required: tuple[RequiredClause, ...], results: tuple[CertifiedClause, ...]) -> Scope:
    present = {(r.id, r.slice) for r in results}
    stray = sorted(f"{id} [{slice}]" for id, slice in present - {(r.id, r.slice) for r in required})
    if stray:
        raise Rejected("clause/unknown", f"the contract has no {', '.join(stray)}")
    covers = tuple((r.id, r.slice) for r in required if (r.id, r.slice) in present)
    return Scope(len(covers) == len(required), covers)
