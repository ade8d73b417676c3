"""Finding proof objects by digest and having them re-derived."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from kcdsl_certs.encoding.files import open_regular
from kcdsl_certs.encoding.reals import parse_hex, parse_real, real_text
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import Fields, sha256_of, strict_base64, strict_load
from kcdsl_certs.statement import (
    LOWER,
    UPPER,
    CertifiedClause,
    Evidence,
    Quantity,
    Region,
    Triple,
    Verdict,
    holds,
)
from kcdsl_certs.statement.triple import INFER_CHECKPOINT

_WIDER = {"points": {"ball"}}
"""Kinds of region that contain those of another kind: balls contain their centres."""
INDEPENDENT = (
    "independent roundings: every rounding of a sum, of a free cast and of a quantised activation "
    "is random, with mean zero whatever came before it; for each input by itself a bound then "
    "fails with probability at most {alpha}"
)
"""The assumption that a result names for each probability of its proof."""
LARGEST_PROOF = 512 * 1024 * 1024
SOME_MARGIN = 2.0**-1074
"""The least positive double: the margin that a proof of no flips shows."""


class StepOutcome(StrEnum):
    """The outcome of a step of the verification."""

    OK = "ok"
    FAILED = "failed"
    NOT_RUN = "not_run"


@dataclass(frozen=True, slots=True)
class ProofResult:
    """The result of checking the proof of one clause."""

    outcome: StepOutcome
    reason: str = ""
    detail: str = ""


ProofChecker = Callable[[CertifiedClause, Triple], ProofResult]
"""Called with a clause and the triple of its certificate."""


class Rederivation(Protocol):
    """The result of a re-derivation; `bound` is a hexadecimal float."""

    @property
    def ok(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def bound(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def nodes(self) -> int: ...


def load_proof(folder: Path, clause: CertifiedClause) -> bytes:
    """Return the proof object of a clause from the certificate's folder, identified by its digest.

    Raises Rejected `proof/missing`, `proof/too-large` or `proof/digest-mismatch`.
    """
    if clause.proof is None:
        raise Rejected("proof/missing", f"{clause.label} names no proof")
    path = folder / clause.proof.path
    if not path.is_file():
        detail = f"{clause.label}: there is no file {clause.proof.path} beside the certificate"
        raise Rejected("proof/missing", detail)
    try:
        with open_regular(path, "proof/missing") as file:
            proof = file.read(LARGEST_PROOF + 1)
    except OSError as error:
        detail = f"{clause.label}: {clause.proof.path} ({error.strerror or error})"
        raise Rejected("proof/missing", detail) from None
    if len(proof) > LARGEST_PROOF:
        raise Rejected(
            "proof/too-large", f"{clause.proof.path} is larger than {LARGEST_PROOF} bytes"
        )
    if hashlib.sha256(proof).hexdigest() != clause.proof.digest:
        detail = f"{clause.label}: {clause.proof.path} is not the proof that was signed"
        raise Rejected("proof/digest-mismatch", detail)
    return proof


@dataclass(frozen=True, slots=True)
class PresentProofs:
    """Checks that proof files exist, have the signed digests, and are about their clauses, without
    re-deriving them."""

    folder: Path

    def __call__(self, clause: CertifiedClause, triple: Triple) -> ProofResult:
        """Check one proof file; a missing one is a failure."""
        try:
            bind(strict_load(load_proof(self.folder, clause), LARGEST_PROOF), clause, triple)
        except Rejected as error:
            return ProofResult(StepOutcome.FAILED, error.reason, error.detail)
        detail = f"{clause.label}: what was signed, not re-derived (--recheck does)"
        return ProofResult(StepOutcome.NOT_RUN, "proof/not-rederived", detail)


@dataclass(slots=True)
class Rechecker:
    """Re-derives proofs with `kcdsl_certs.recheck`; any error is a failure."""

    folder: Path
    checkpoint: Path
    served: Path | None = None
    """The inference kernel's own checkpoint, if any."""
    _known: dict[str, Rederivation] = field(default_factory=dict)

    def __call__(self, clause: CertifiedClause, triple: Triple) -> ProofResult:
        """Re-derive the proof of one clause."""
        try:
            return self._recheck(clause, triple)
        except Rejected as error:
            return ProofResult(StepOutcome.FAILED, error.reason, error.detail)
        except ImportError as error:
            detail = f"{clause.label}: {error}; a recheck needs numpy"
            return ProofResult(StepOutcome.FAILED, "proof/checker-missing", detail)
        except Exception as error:
            detail = f"{clause.label}: {type(error).__name__}: {error}"
            return ProofResult(StepOutcome.FAILED, "proof/checker-failed", detail)

    def _recheck(self, clause: CertifiedClause, triple: Triple) -> ProofResult:
        proof = load_proof(self.folder, clause)
        digest = hashlib.sha256(proof).hexdigest()
        if digest not in self._known:
            recheck: Any = import_module("kcdsl_certs.recheck").recheck
            self._known[digest] = recheck(proof, self.checkpoint, served=self.served)
        outcome = self._known[digest]
        if outcome.ok is not True:
            raise Rejected(
                "proof/not-confirmed", f"{clause.label}: {outcome.reason}: {outcome.detail}"
            )
        bind(strict_load(proof, LARGEST_PROOF), clause, triple)
        found = _rederived_bound(outcome, clause)
        detail = f"{clause.label}: re-derived {found} in {outcome.seconds:.2f} s"
        return ProofResult(StepOutcome.OK, "", f"{detail}, {outcome.nodes} operations")


def _rederived_bound(outcome: Rederivation, clause: CertifiedClause) -> str:
    """Return the confirmed bound in words; the clause must hold with it.

    Proofs bound drifts from above, and show that an order is kept, but not its margin.
    """
    if clause.quantity.kind == "margin":
        shown = outcome.bound == "held" and clause.op in LOWER
        if not shown or clause.bound is None or not clause.bound <= SOME_MARGIN:
            detail = f"{clause.label}: a margin of {clause.bound!r} is stated, some margin is shown"
            raise Rejected("proof/bound-not-confirmed", detail)
        return "that nothing flips"
    if clause.op not in UPPER:
        detail = f"{clause.label}: the proof shows no lower bound"
        raise Rejected("proof/bound-not-confirmed", detail)
    bound = Fraction(parse_hex(outcome.bound))
    if clause.bound is None or bound > Fraction(clause.bound):
        detail = f"{clause.label}: {clause.bound!r} is stated, {float(bound)!r} is re-derived"
        raise Rejected("proof/bound-not-confirmed", detail)
    if clause.verdict is Verdict.PASSED and not holds(bound, clause.op, clause.tau):
        raise Rejected("proof/bound-not-confirmed", f"{clause.label}: it does not hold")
    return f"{float(bound):.6g}"


def bind(document: Any, clause: CertifiedClause, triple: Triple) -> None:
    """Refuse a proof, even a correct one, that is not about the clause."""
    proof = Fields.of(document, "proof")
    block, numerics = proof.text("block"), proof.inner("numerics")
    if block != clause.block:
        raise Rejected("proof/block-mismatch", f"{clause.label}: the proof is about {block}")
    for role, kernel in (("train", triple.train), ("infer", triple.infer)):
        stated = kernel.fingerprint.get("numerics")
        if stated is None or numerics.raw(role) != stated:
            detail = f"{clause.label}: the proof is about other numerics of the {role} kernel"
            raise Rejected("proof/numerics-mismatch", detail)
    functional = proof.inner("functional")
    kind, k = functional.text("kind"), functional.integer("k")
    if not _is_about(clause.quantity, kind, k):
        detail = f"{clause.label}: the proof is about {kind}, not {clause.quantity}"
        raise Rejected("proof/functional-mismatch", detail)
    checkpoints = proof.inner("checkpoint")
    weights = checkpoints.raw("sha256")
    weights_digest = sha256_of(weights, "proof.checkpoint")
    of_one_file = hashlib.sha256(bytes.fromhex(weights_digest)).hexdigest()
    named = triple.checkpoint
    if of_one_file != named.root_digest and weights_digest != named.digest:
        raise Rejected(
            "proof/checkpoint-mismatch", f"{clause.label}: the proof is about other weights"
        )
    if checkpoints.record.get("infer") != triple.checkpoint.companions.get(INFER_CHECKPOINT):
        detail = f"{clause.label}: the proof is about other weights of the inference kernel"
        raise Rejected("proof/checkpoint-mismatch", detail)
    _bind_regions(proof, clause)
    used = method_of(document)
    if clause.method != used:
        detail = f"{clause.label}: {clause.method} is stated, the proof uses {used}"
        raise Rejected("proof/method-mismatch", detail)


def method_of(document: Any) -> str:
    """Return the method of a proof object: the sorted domains of its cases, or of their links, and
    `chain` for proofs in links, joined to one text."""
    parts: set[str] = set()
    for item in Fields.of(document, "proof").items("cases"):
        case = Fields.of(item, "case")
        links = [case]
        if "links" in case.record:
            parts.add("chain")
            links = [Fields.of(link, "link") for link in case.items("links")]
        for link in links:
            parts.update((link.text_or_none("domain") or "interval").split("+"))
    return "+".join(sorted(parts)) + "/1"


def _bind_regions(proof: Fields, clause: CertifiedClause) -> None:
    """Refuse other kinds of region, smaller balls, and a wrong number of cases."""
    cases = [Fields.of(item, "case") for item in proof.items("cases")]
    kinds = {case.inner("region").text("kind") for case in cases}
    region = clause.region
    if region is None or kinds not in ({region.kind}, _WIDER.get(region.kind)):
        detail = f"{clause.label}: the proof is about {', '.join(sorted(kinds)) or 'nothing'}"
        raise Rejected("proof/region-mismatch", detail)
    names = [case.text("name") for case in cases]
    if len(set(names)) != len(names) or len(names) != clause.n:
        detail = f"{clause.label}: {len(set(names))} regions are proved, {clause.n} are stated"
        raise Rejected("proof/region-mismatch", detail)
    _bind_chances(cases, clause)
    if clause.weights is not None:
        _bind_weights(cases, clause, clause.weights)
    if kinds == {"rows"}:
        _bind_longest(cases, clause, region)
    if kinds != {"ball"} or region.kind != "ball":
        return
    for case in cases:
        data = strict_base64(case.inner("region").inner("radius").text("data"))
        if len(data) % 8 or not all(r >= region.radius for (r,) in struct.iter_unpack("<d", data)):
            detail = f"{clause.label}: a ball of the proof is smaller than {region}"
            raise Rejected("proof/region-mismatch", detail)


def _bind_chances(cases: list[Fields], clause: CertifiedClause) -> None:
    """Refuse a probabilistic proof unless the result states its probability."""
    for case in cases:
        if "chance" not in case.record:
            continue
        alpha = parse_real(case.inner("chance").text("alpha"))
        known = clause.evidence is Evidence.PROBABILISTIC and clause.alpha is not None
        if not known or clause.alpha is None or clause.alpha < alpha:
            detail = f"{clause.label}: the proof holds but for a share {real_text(alpha)} of runs"
            raise Rejected("clause/evidence-overstated", detail)
        if INDEPENDENT.format(alpha=real_text(alpha)) not in clause.assumptions:
            detail = f"{clause.label}: the proof takes roundings as independent"
            raise Rejected("clause/assumption-unnamed", detail)


def _bind_weights(cases: list[Fields], clause: CertifiedClause, rho: Fraction) -> None:
    """Refuse a proof about a smaller weight ball, or about one checkpoint only."""
    for case in cases:
        stated = case.inner("region").text_or_none("weights")
        if stated is None or parse_real(stated) < rho:
            detail = f"{clause.label}: the proof is about weights within {stated or 0} of each"
            raise Rejected("proof/weights-mismatch", detail)


def _bind_longest(cases: list[Fields], clause: CertifiedClause, region: Region) -> None:
    """Refuse a proof about shorter sequences than those of the region of rows."""
    for case in cases:
        longest = case.inner("region").integer("longest")
        if region.longest is None or longest < region.longest:
            detail = f"{clause.label}: the proof is about shorter sequences than {region}"
            raise Rejected("proof/region-mismatch", detail)


def _is_about(quantity: Quantity, kind: str, k: int) -> bool:
    """Return whether a quantity is the functional of a proof about its block."""
    if kind == "no_flip":
        return quantity.kind == "margin" and quantity.k == k
    return quantity.is_of_proofs and quantity.kind == "norm" and quantity.name == kind
