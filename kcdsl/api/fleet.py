"""Fleets: what certificates of pairs of kernels say of all of them under one contract."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.api.checking import read_certificate
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import USAGE

if TYPE_CHECKING:
    from kcdsl.api.contract import Contract
    from kcdsl.verdict.studies.fleet import Direction, Fleet
    from kcdsl_certs.signatures import Trust
    from kcdsl_certs.statement import Kernel, Predicate, RequiredClause

_NOT_PASSED = "clause/not-passed"
"""The one refusal that is a result: a pair that does not keep the contract was certified so."""


def fleet_of(
    contracts: Sequence[Contract], certificates: Sequence[Path], trust: Trust, moment: datetime
) -> Fleet:
    """Return the agreement of every two kernels that certificates speak of; raises Refusal.

    The contracts differ in their kernels alone. A certificate counts if trusted keys signed it, it
    is in force, its contract is one of them, and its results are about the limits, regions and rows
    of the clauses.
    """
    from kcdsl.release.requirements import required_clauses
    from kcdsl.verdict.studies.convergence import join
    from kcdsl.verdict.studies.fleet import MOST_KERNELS, Direction, Fleet, FleetKernel, KernelPair

    known = _alike(contracts)
    contract = contracts[0]
    program = contract.program
    required = required_clauses(program, contract.base)
    used: dict[Path, tuple[str, Predicate]] = {}
    unused: dict[str, str] = {}
    for path in dict.fromkeys(certificates):
        found = _read(path, known, required, trust, moment)
        if isinstance(found, str):
            unused[str(path)] = found
        elif any(found[0] == identity for identity, _ in used.values()):
            unused[str(path)] = "it is named twice"
        else:
            used[path] = found
    if not used:
        why = "; ".join(f"{file}: {reason}" for file, reason in unused.items())
        raise refuse(USAGE, f"no certificate is of use: {why}")
    checkpoints = {
        body.triple.manifest()["checkpoint"]["digest"]["sha256"] for _, body in used.values()
    }
    companions = {str(sorted(b.triple.checkpoint.companions.items())) for _, b in used.values()}
    if len(checkpoints) != 1 or len(companions) != 1:
        raise refuse(
            USAGE,
            f"the certificates are about {len(checkpoints)} checkpoints",
            help="a fleet serves one checkpoint: name certificates of one",
        )
    kernels = _kernels([body for _, body in used.values()])
    if len(kernels) > MOST_KERNELS:
        raise refuse(
            USAGE, f"{len(kernels)} kernels are named; at most {MOST_KERNELS} are compared"
        )
    labels = {digest: f"K{number}" for number, digest in enumerate(kernels, 1)}
    about = {"name": program.name, "version": program.version}

    def direction(train: str, infer: str) -> Direction:
        group = {
            str(path): (identity, body)
            for path, (identity, body) in used.items()
            if (body.triple.train.digest, body.triple.infer.digest) == (train, infer)
        }
        bodies = {name: body for name, (_, body) in group.items()}
        joined = join(program, about, required, bodies, {}) if bodies else None
        identities = [identity for identity, _ in group.values()]
        return Direction.of(labels[train], labels[infer], joined, identities)

    digests = list(kernels)
    pairs = tuple(
        KernelPair(labels[one], labels[two], (direction(one, two), direction(two, one)))
        for place, one in enumerate(digests)
        for two in digests[place + 1 :]
    )
    named = tuple(
        FleetKernel(labels[digest], kernel.name, digest) for digest, kernel in kernels.items()
    )
    return Fleet(about, checkpoints.pop(), named, pairs, unused)


def _alike(contracts: Sequence[Contract]) -> frozenset[str]:
    """Return the digests of contracts that differ in their kernels alone; raises Refusal."""
    from kcdsl.ir.canonical import digest

    first = contracts[0].program
    for other in contracts[1:]:
        same = replace(other.program, train=first.train, infer=first.infer)
        if digest(same) != digest(first):
            raise refuse(
                USAGE,
                f"{other.path} differs from {contracts[0].path} in more than its kernels",
                help="the contracts of a fleet share everything else, for example by a library",
            )
    return frozenset(digest(each.program).removeprefix("sha256:") for each in contracts)


def _kernels(bodies: Sequence[Predicate]) -> Mapping[str, Kernel]:
    """Return the kernels by digest, in the order in which they are named."""
    found: dict[str, Kernel] = {}
    for body in bodies:
        for kernel in (body.triple.train, body.triple.infer):
            found.setdefault(kernel.digest, kernel)
    return found


def _read(
    path: Path,
    known: Collection[str],
    required: Sequence[RequiredClause],
    trust: Trust,
    moment: datetime,
) -> tuple[str, Predicate] | str:
    """Return identity and body of a certificate, or why it counts for nothing."""
    from kcdsl_certs.encoding.rejected import Rejected
    from kcdsl_certs.statement import Predicate
    from kcdsl_certs.statement.triple import INFER_CHECKPOINT
    from kcdsl_certs.verification.coverage import check_stated
    from kcdsl_certs.verification.inspection import inspect

    seen = inspect(read_certificate(path), trust, moment)
    refused = [check for check in seen.refusals if check.reason != _NOT_PASSED]
    if refused or seen.authentic is not True:
        return "; ".join(f"{check.detail} ({check.reason})" for check in refused)
    body = seen.body
    if not isinstance(body, Predicate) or seen.stated is None or seen.identity is None:
        return "it is a weights transfer"
    named = body.triple.contract
    if named.digest not in known:
        return f"it is about another contract: {named.id} {named.version} {named.digest[:12]}"
    if INFER_CHECKPOINT in body.triple.checkpoint.companions:
        return "its inference kernel reads weights of its own"
    if body.triple.train.digest == body.triple.infer.digest:
        return "its two kernels are one"
    try:
        check_stated(body, seen.stated, tuple(required))
    except Rejected as error:
        return f"{error.detail} ({error.reason})"
    return seen.identity, body
