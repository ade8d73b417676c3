"""Checking a weights transfer: verifies the earlier certificate and compares the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any

from kcdsl_certs.encoding.files import open_regular
from kcdsl_certs.encoding.reals import real_text
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import strict_load, time_text
from kcdsl_certs.signatures import envelope as dsse
from kcdsl_certs.statement import (
    LARGEST_PAYLOAD,
    TRANSFER_TYPE,
    CertifiedClause,
    Checkpoint,
    Predicate,
    RequiredClause,
    Transfer,
    TransferredResult,
    Triple,
    build_manifest,
    certificate_id,
    parse_predicate,
    parse_statement,
    transferred_predicate,
)
from kcdsl_certs.statement.weights import ONNX
from kcdsl_certs.verification.coverage import check_clauses
from kcdsl_certs.verification.proofs import (
    LARGEST_PROOF,
    PresentProofs,
    ProofChecker,
    Rechecker,
    StepOutcome,
    bind,
    load_proof,
)
from kcdsl_certs.verification.report import EARLIER_FAILED, Check, Log, NotRun, Report

VerifyBase = Callable[[bytes, Triple, ProofChecker], Report]
"""Verifies an earlier certificate against the triple with the earlier checkpoint."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """The inputs for checking a transfer.

    `folder` has the earlier certificate and its proofs, `checkpoint` the earlier weights, `later`
    those about to be deployed; with `recheck` the proofs are derived again.
    """

    folder: Path
    checkpoint: Path
    later: Path
    recheck: bool = False


@dataclass(frozen=True, slots=True)
class Compared:
    """The clauses outside the scope, and the assumptions of the transferred results."""

    outside: tuple[str, ...]
    assumptions: tuple[str, ...]


def compare(
    log: Log,
    transfer: Transfer,
    expected: Triple,
    earlier: Earlier | None,
    verify: VerifyBase,
    required: tuple[RequiredClause, ...],
    partial: bool,
) -> Compared:
    """Run the steps base, weights, clauses and proofs."""
    found = _Found()

    def base() -> str:
        if earlier is None:
            raise Rejected("transfer/no-base", "the earlier checkpoint was not given (--base)")
        return _base(transfer, expected, earlier, verify, found)

    def weights() -> str:
        if earlier is None or found.predicate is None:
            raise Rejected("transfer/no-base", "there is no earlier certificate to go by")
        found.carried = transferred_predicate(found.predicate, transfer.triple, transfer.carried)
        return compare_weights(found.predicate, found.carried, transfer.carried, earlier)

    def clauses() -> str:
        if found.carried is None:
            raise Rejected("transfer/no-base", "there is nothing to transfer")
        verdict = found.carried.verdict
        detail, found.outside = check_clauses(found.carried, verdict, required, partial=partial)
        return detail

    def proofs() -> str:
        if found.proofs is None:
            raise NotRun(EARLIER_FAILED, "")
        if found.proofs.outcome is StepOutcome.OK:
            return found.proofs.detail
        kind = NotRun if found.proofs.outcome is StepOutcome.NOT_RUN else Rejected
        raise kind(found.proofs.reason, found.proofs.detail)

    for name, step in (("base", base), ("weights", weights), ("clauses", clauses)):
        log.run(name, step)
    log.run("proofs", proofs)
    carried = () if found.carried is None else found.carried.every_assumption
    return Compared(found.outside, tuple(dict.fromkeys((*transfer.assumptions, *carried))))


@dataclass(slots=True)
class _Found:
    predicate: Predicate | None = None
    carried: Predicate | None = None
    proofs: Check | None = None
    outside: tuple[str, ...] = ()


def _base(
    transfer: Transfer, expected: Triple, earlier: Earlier, verify: VerifyBase, found: _Found
) -> str:
    """Verify the earlier certificate, whose payload must have the digest in the transfer."""
    bundle = _read(earlier.folder / transfer.path)
    payload = dsse.decode(dsse.parse_bundle(bundle)).payload
    if certificate_id(payload) != transfer.base:
        detail = f"{transfer.path} is not the certificate that the transfer names"
        raise Rejected("transfer/another-base", detail)
    triple = earlier_triple(payload, expected, earlier.checkpoint)
    checker: ProofChecker = PresentProofs(earlier.folder)
    if earlier.recheck:
        checker = Rechecker(earlier.folder, earlier.checkpoint)
    report = verify(bundle, triple, checker)
    found.proofs = next((c for c in report.checks if c.name == "proofs"), None)
    if not report.accepted or report.predicate is None:
        failed = (c for c in report.checks if c.outcome is StepOutcome.FAILED)
        detail = next((f"{c.name}: {c.detail}" for c in failed), "")
        reason = report.reasons[0] if report.reasons else "transfer/base-refused"
        raise Rejected(reason, f"the earlier certificate: {detail}")
    if transfer.valid_until > report.predicate.valid_until:
        until = time_text(report.predicate.valid_until)
        raise Rejected("validity/beyond-base", f"the earlier certificate is valid until {until}")
    if transfer.stage != report.predicate.stage:
        detail = f"the earlier certificate was issued for {report.predicate.stage}"
        raise Rejected("stage/mismatch", detail)
    found.predicate = report.predicate
    return f"{transfer.path}: sha256:{transfer.base}"


def earlier_triple(payload: bytes, expected: Triple, checkpoint: Path) -> Triple:
    """Return the triple with the earlier checkpoint: the weights at this path, with their name in
    the earlier certificate and the current other files of the model.

    Only that name is taken from the payload. Raises Rejected `transfer/base-checkpoint`.
    """
    statement = parse_statement(strict_load(payload, LARGEST_PAYLOAD))
    if statement.predicate_type == TRANSFER_TYPE:
        detail = "it is a transfer itself: carry over the certificate that it names"
        raise Rejected("transfer/of-a-transfer", detail)
    stated = parse_predicate(statement.predicate)
    try:
        manifest = build_manifest(checkpoint)
    except OSError as error:
        detail = f"{checkpoint}: {error.strerror or error}"
        raise Rejected("transfer/base-checkpoint", detail) from None
    named = stated[0].triple.checkpoint
    if manifest.root_digest != named.root_digest:
        detail = f"{checkpoint.name} is not the checkpoint of the earlier certificate"
        raise Rejected("transfer/base-checkpoint", detail)
    part = Checkpoint(named.name, named.digest, named.root_digest, expected.checkpoint.companions)
    return replace(expected, checkpoint=part)


def _read(path: Path) -> bytes:
    try:
        with open_regular(path, "transfer/no-base") as file:
            return file.read(dsse.LARGEST_BUNDLE + 1)
    except OSError as error:
        raise Rejected("transfer/no-base", f"{path.name}: {error.strerror or error}") from None


def compare_weights(
    base: Predicate, carried: Predicate, stated: tuple[TransferredResult, ...], earlier: Earlier
) -> str:
    """Compare the weights that the proofs read in both checkpoints, independently of the
    statement."""
    weights = Weights(earlier.checkpoint, earlier.later)
    weights.refuse_others(base.triple, carried.triple)
    moved = {(item.id, item.slice): item for item in stated}
    found = []
    for clause in carried.clauses:
        if clause.proof is None or clause.weights is None:
            continue
        keys = weights_of(load_proof(earlier.folder, clause), clause, base.triple)
        farthest = weights.farthest(keys, clause.weights)
        where = f"{farthest.tensor}{list(farthest.element)}"
        if not farthest.inside:
            detail = f"{clause.label}: {where} was {farthest.earlier!r}, is {farthest.later!r}"
            raise Rejected(
                "transfer/outside", f"{detail}: beyond {real_text(clause.weights)} of it"
            )
        item = moved[clause.id, clause.slice]
        if item.moved is None or item.moved < farthest.ratio:
            detail = f"{clause.label} states {item.moved!r}, {where} moved {farthest.ratio!r}"
            raise Rejected("transfer/moved-further", detail)
        limit = real_text(clause.weights)
        found.append(f"{clause.label} moved {farthest.ratio:.3g} of {limit} ({where})")
    return "; ".join(found)


def weights_of(proof: bytes, clause: CertifiedClause, triple: Triple) -> frozenset[str]:
    """Return the tensors that the proof of a clause reads.

    Raises Rejected where it is no proof, or not about the clause.
    """
    document: Any = import_module("kcdsl_certs.recheck.documents.document")
    bind(strict_load(proof, LARGEST_PROOF), clause, triple)
    try:
        parsed = document.parse(proof)
    except Rejected as error:
        raise Rejected("proof/malformed", f"{clause.label}: {error}") from None
    return frozenset(parsed.parameters)


class Weights:
    """Two checkpoints of the same tensors, shapes and dtypes."""

    def __init__(self, earlier: Path, later: Path) -> None:
        """Read both. Raises Rejected `transfer/tensors`, also for ONNX files, whose programs may
        differ, and as reading a checkpoint does."""
        for path in (earlier, later):
            if path.name.endswith(ONNX):
                detail = f"{path.name} has a program beside the weights, which is not compared"
                raise Rejected("transfer/tensors", detail)
        self._norms: Any = _numpy("kcdsl_certs.recheck.interval.weight_ball")
        read = import_module("kcdsl_certs.recheck.interval.tensors").read
        self._earlier, self._later = _of_file(earlier, read), _of_file(later, read)
        self._norms.same_tensors(self._earlier.tensors, self._later.tensors)

    @property
    def digests(self) -> tuple[str, str]:
        """Return the root digest of both."""
        return self._earlier.root_digest, self._later.root_digest

    def refuse_others(self, earlier: Triple, later: Triple) -> None:
        """Raise Rejected `transfer/changed` unless the weights are those of both triples."""
        if self.digests != (earlier.checkpoint.root_digest, later.checkpoint.root_digest):
            detail = (
                "these are not the weights that are named, or they changed while they were read"
            )
            raise Rejected("transfer/changed", detail)

    def farthest(self, keys: frozenset[str], rho: Fraction) -> Any:
        """Return the element of these tensors that moved most, or one outside the ball of radius ρ
        (`Moved` of `recheck.interval.weight_ball`); `inside`: all are in the ball.

        Raises Rejected for tensors that are missing or contain NaN or infinity.
        """
        found = self._norms.moved(self._earlier.tensors, self._later.tensors, keys, rho)
        if not found:
            raise Rejected("transfer/tensors", "the proof reads no weights")
        return max(found, key=lambda item: (not item.inside, item.ratio))


def _numpy(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        detail = f"{error}; comparing weights needs numpy"
        raise Rejected("transfer/checker-missing", detail) from None


def _of_file(path: Path, step: Callable[[Path], Any]) -> Any:
    """Run a step on a file; a rejection names the file."""
    try:
        return step(path)
    except Rejected as error:
        raise Rejected(error.reason, f"{path.name}: {error.detail}") from None
