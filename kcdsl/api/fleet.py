"""Fleets: pairwise agreement of kernels under one contract, from certificates of pairs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.api.certificates import read_certificate
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import USAGE
from kcdsl.ir.canonical import digest
from kcdsl.model.files import file_digest
from kcdsl.release.artefacts import metric_files
from kcdsl.release.requirements import required_clauses
from kcdsl.verdict.studies.convergence import join
from kcdsl.verdict.studies.fleet import (
    MOST_KERNELS,
    CheckedClass,
    Direction,
    Fleet,
    FleetKernel,
    KernelPair,
)
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.statement import (
    KERNEL_CLASS_TYPE,
    ClassMember,
    Predicate,
    Verdict,
    certificate_id,
    parse_class,
)
from kcdsl_certs.statement import KernelClass as SignedClass
from kcdsl_certs.statement.triple import INFER_CHECKPOINT
from kcdsl_certs.verification.authentication import authentic, meets_threshold
from kcdsl_certs.verification.coverage import check_stated
from kcdsl_certs.verification.inspection import inspect

if TYPE_CHECKING:
    from kcdsl.api.contract import Contract
    from kcdsl.ir.terms import Program
    from kcdsl_certs.signatures import Trust
    from kcdsl_certs.statement import Kernel, RequiredClause

_NOT_PASSED = "clause/not-passed"
"""The only refusal that is a result: a certificate that a pair violates the contract."""
_ENDED = frozenset(("validity/expired", "sequence/revoked"))
"""Refusals of a failed certificate that do not undo its withdrawal of older ones."""


@dataclass(frozen=True, slots=True)
class FleetReading:
    """A fleet, the requirements of its contracts, and the accepted certificates, by identifier."""

    fleet: Fleet
    program: Program
    required: tuple[RequiredClause, ...]
    bodies: Mapping[str, Predicate]


def fleet_of(
    contracts: Sequence[Contract], certificates: Sequence[Path], trust: Trust, moment: datetime
) -> FleetReading:
    """Return the agreement of all pairs of kernels in certificates; raises Refusal.

    The contracts may differ only in their kernels. A certificate is used if trusted keys signed it,
    it is in force, its contract is one of them, its results are about the limits, regions and rows
    of the clauses, and the files of its metrics are those of the first contract.
    """
    known = _common_digests(contracts)
    files: dict[str, Path] = {}
    program = contracts[0].program
    required = required_clauses(program, contracts[0].base)
    metrics = {n: file_digest(p) for n, p in metric_files(program, contracts[0].base).items()}
    bodies: dict[str, Predicate] = {}
    ended: dict[str, Predicate] = {}
    unused: dict[str, str] = {}
    for path in dict.fromkeys(certificates):
        found = _read(path, known, required, metrics, trust, moment)
        if isinstance(found, str):
            unused[str(path)] = found
        elif found[0] in bodies:
            unused[str(path)] = "it is named twice"
        elif found[2]:
            ended[found[0]], unused[str(path)] = found[1], found[2]
        else:
            files[found[0]], bodies[found[0]] = path, found[1]
    for identity, why in _outdated(bodies, ended).items():
        unused[str(files[identity])] = why
        del bodies[identity]
    if not bodies:
        why = "; ".join(f"{file}: {reason}" for file, reason in unused.items())
        raise refuse(
            USAGE,
            f"no certificate can be used: {why}",
            help="give certificates of one contract and one checkpoint that are signed by a "
            "trusted key and in force",
        )
    weights = [body.triple.checkpoint for body in bodies.values()]
    different = {(one.digest, tuple(sorted(one.companions.items()))) for one in weights}
    if len(different) != 1:
        raise refuse(
            USAGE,
            f"the certificates are about {len(different)} checkpoints",
            help="a fleet serves one checkpoint: name certificates of one",
        )
    fleet = _joined(program, required, bodies, unused)
    there = {body.triple.contract.digest for body in bodies.values()}
    without = tuple(str(each.path) for each in contracts if _digest(each.program) not in there)
    return FleetReading(replace(fleet, without=without), program, required, bodies)


def _outdated(bodies: Mapping[str, Predicate], ended: Mapping[str, Predicate]) -> dict[str, str]:
    """Return why certificates are outdated, by identifier: one of the same triple and stage that is
    at least as new did not pass, whether or not it is in force (`ended`). Certificates that refute
    a clause are never outdated."""
    newest: dict[tuple[str, str], tuple[int, str]] = {}
    every = {**ended, **bodies}
    for identity, body in every.items():
        if body.verdict is not Verdict.PASSED:
            about = body.triple.digest, body.stage
            newest[about] = max(newest.get(about, (-1, "")), (body.sequence, identity))
    found: dict[str, str] = {}
    for identity, body in bodies.items():
        sequence, last = newest.get((body.triple.digest, body.stage), (-1, ""))
        if (
            body.sequence <= sequence
            and identity != last
            and all(clause.verdict is not Verdict.FAILED for clause in body.clauses)
        ):
            verdict = every[last].verdict
            found[identity] = f"sequence {sequence} of its triple and stage is {verdict}"
    return found


def _joined(
    program: Program,
    required: Sequence[RequiredClause],
    bodies: Mapping[str, Predicate],
    unused: Mapping[str, str],
) -> Fleet:
    """Return the fleet of the certificates of one checkpoint, which are given by identifier."""
    kernels: dict[str, Kernel] = {}
    for body in bodies.values():
        for kernel in (body.triple.train, body.triple.infer):
            kernels.setdefault(kernel.digest, kernel)
    if len(kernels) > MOST_KERNELS:
        raise refuse(
            USAGE,
            f"{len(kernels)} kernels are named; at most {MOST_KERNELS} are compared",
            help="give the certificates of fewer kernels",
        )
    labels = {digest: f"K{number}" for number, digest in enumerate(kernels, 1)}
    about = {"name": program.name, "version": program.version}

    def direction(train: str, infer: str) -> Direction:
        group = {
            identity: body
            for identity, body in bodies.items()
            if (body.triple.train.digest, body.triple.infer.digest) == (train, infer)
        }
        found = join(program, about, required, group, {}) if group else None
        return Direction.of(labels[train], labels[infer], found, tuple(group))

    pairs = tuple(
        KernelPair(labels[one], labels[two], (direction(one, two), direction(two, one)))
        for one, two in combinations(kernels, 2)
    )
    named = tuple(
        FleetKernel(labels[digest], kernel.name, digest) for digest, kernel in kernels.items()
    )
    checkpoint = next(iter(bodies.values())).triple.checkpoint.digest
    return Fleet(about, checkpoint, named, pairs, unused)


def _common_digests(contracts: Sequence[Contract]) -> frozenset[str]:
    """Return the digests of contracts that differ only in their kernels; raises Refusal."""
    first = contracts[0].program
    for other in contracts[1:]:
        same = replace(other.program, train=first.train, infer=first.infer)
        if digest(same) != digest(first):
            raise refuse(
                USAGE,
                f"{other.path} differs from {contracts[0].path} in more than its kernels",
                help="the contracts of a fleet share everything else, for example by a library",
            )
    return frozenset(_digest(each.program) for each in contracts)


def _digest(program: Program) -> str:
    return digest(program).removeprefix("sha256:")


def _read(
    path: Path,
    known: Collection[str],
    required: Sequence[RequiredClause],
    metrics: Mapping[str, str],
    trust: Trust,
    moment: datetime,
) -> tuple[str, Predicate, str] | str:
    """Return identifier and body of a certificate, with the reason if it only withdraws older ones;
    or the reason why it is ignored."""
    seen = inspect(read_certificate(path), trust, moment)
    refused = [check for check in seen.refusals if check.reason != _NOT_PASSED]
    why = "; ".join(f"{check.detail} ({check.reason})" for check in refused)
    body = seen.body
    withdraws = isinstance(body, Predicate) and body.verdict is not Verdict.PASSED
    may = _ENDED if withdraws else frozenset()
    if seen.authentic is not True or any(check.reason not in may for check in refused):
        return why
    if not isinstance(body, Predicate) or seen.stated is None or seen.identity is None:
        return "it is a weights transfer"
    named = body.triple.contract
    if named.digest not in known:
        return f"it is about another contract: {named.id} {named.version} {named.digest[:12]}"
    if INFER_CHECKPOINT in body.triple.checkpoint.companions:
        return "its inference kernel reads weights of its own"
    if body.triple.train.digest == body.triple.infer.digest:
        return "its two kernels are one"
    stated = {item.name: item.sha256 for item in body.inputs}
    other = [name for name, digest in metrics.items() if stated.get(name) != digest]
    if other:
        return f"it is about another {other[0]}"
    try:
        check_stated(body, seen.stated, tuple(required))
    except Rejected as error:
        return f"{error.detail} ({error.reason})"
    return seen.identity, body, why


# --- certificates of classes ----------------------------------------------------------------------


def class_statements(reading: FleetReading, moment: datetime) -> list[SignedClass]:
    """Return the statement about each class of at least two kernels; raises Refusal where its
    certificates are of several stages.

    It is valid as long as all its certificates.
    """
    names = {kernel.digest: kernel.name for kernel in reading.fleet.kernels}
    found = []
    for one in reading.fleet.classes:
        if len(one.members) < 2:
            continue
        bodies = [reading.bodies[identity] for identity in one.certificates]
        stages = {body.stage for body in bodies}
        if len(stages) != 1:
            raise refuse(
                USAGE,
                f"the certificates of a class are of {len(stages)} stages",
                help="name certificates of one stage",
            )
        found.append(
            SignedClass(
                reading.fleet.checkpoint,
                tuple(sorted({body.triple.contract.digest for body in bodies})),
                tuple(ClassMember(names[digest], digest) for digest in sorted(one.digests)),
                tuple(sorted(one.certificates)),
                stages.pop(),
                moment.replace(microsecond=0),
                min(body.valid_until for body in bodies),
            )
        )
    return found


def checked_class(
    path: Path, reading: FleetReading, trust: Trust, moment: datetime
) -> CheckedClass:
    """Check the certificate of a class: trusted keys signed it, and the fleet reproduces it."""
    members: tuple[str, ...] = ()
    try:
        bundle = read_certificate(path)
        signed = authentic(bundle, trust.rules, moment, (KERNEL_CLASS_TYPE,))
        found = parse_class(signed.statement)
        members = tuple(member.digest for member in found.members)
        if certificate_id(signed.payload) in trust.rules.revoked_certificates:
            raise Rejected("sequence/revoked", "this certificate was revoked")
        able = tuple(k for k in signed.signers if k.stages is None or found.stage in k.stages)
        meets_threshold(able, trust.rules.threshold, "stage/key-not-allowed")
        _derive(found, reading, moment)
    except Rejected as error:
        return CheckedClass(str(path), members, error.reason, error.detail)
    return CheckedClass(str(path), members)


def _derive(found: SignedClass, reading: FleetReading, moment: datetime) -> None:
    """Raise Rejected unless the given certificates show the whole statement of a class."""
    if not found.issued_at <= moment < found.valid_until:
        raise Rejected("validity/outside", "it is not valid at this time")
    fleet = reading.fleet
    if found.checkpoint != fleet.checkpoint:
        raise Rejected("class/checkpoint", "it is about other weights")
    members = {member.digest for member in found.members}
    labels = {kernel.label for kernel in fleet.kernels if kernel.digest in members}
    refuted = [p for p in fleet.pairs if {p.one, p.two} <= labels and p.agreement == "disagree"]
    if refuted:
        pair = f"{refuted[0].one} and {refuted[0].two}"
        raise Rejected("class/pair-refuted", f"another certificate says that {pair} disagree")
    absent = [identity for identity in found.certificates if identity not in reading.bodies]
    if absent:
        raise Rejected("class/certificate-missing", f"{absent[0]} is not among the certificates")
    bodies = [reading.bodies[identity] for identity in found.certificates]
    behind = dict(zip(found.certificates, bodies, strict=True))
    own = _joined(reading.program, reading.required, behind, {})
    if {kernel.digest for kernel in own.kernels} != members:
        raise Rejected("class/members", "its certificates are about other kernels")
    if any(pair.agreement != "agree" for pair in own.pairs):
        raise Rejected("class/pair-not-shown", "its certificates do not show every pair")
    if found.contracts != tuple(sorted({body.triple.contract.digest for body in bodies})):
        raise Rejected("class/contracts", "it names other contracts than its certificates")
    if {body.stage for body in bodies} != {found.stage}:
        raise Rejected("class/stage", "its certificates are of another stage")
    if found.valid_until > min(body.valid_until for body in bodies):
        raise Rejected("class/validity", "it is valid longer than a certificate behind it")
