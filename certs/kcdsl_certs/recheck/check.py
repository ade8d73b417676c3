"""Accept or reject a proof document."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kcdsl_certs.recheck.document import Case, Proof, parse
from kcdsl_certs.recheck.errors import Rejection
from kcdsl_certs.recheck.room import check_room
from kcdsl_certs.recheck.safetensors import read

# bound of a case, and (largest T, largest D) of its nodes by name
Derived = tuple[float, Mapping[str, tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check found.

    `reason` is "ok" or a stable code, `detail` names the place. `bound` is the largest bound that
    was derived (float.hex; "held" for no_flip; "" if a case had none), `nodes` how many nodes were
    derived, over all cases.
    """

    ok: bool
    reason: str
    detail: str
    bound: str
    seconds: float
    nodes: int


def recheck(
    proof: bytes, checkpoint: Path, exact: bool = False, part: tuple[int, int] = (0, 1)
) -> Outcome:
    """Re-derive every bound of a proof from the checkpoint and compare it with the claims.

    The re-derived bound of each case must be at most its claim, every re-derived magnitude at most
    its witness, and the overall claim at least every case's. `exact` uses rational arithmetic,
    for graphs of linear, matmul and piecewise linear operations. `part` (first, step) derives every
    step-th case from `first` alone, so that several processes can share a proof: all parts together
    are the check. Nothing is ever raised: whatever goes wrong is a rejection, with reason
    "internal" for the unforeseen.
    """
    started = time.perf_counter()
    found = _Found()
    try:
        _check(proof, checkpoint, exact, part, found)
        ok, reason, detail = True, "ok", f"{found.cases} cases follow from the checkpoint"
    except Rejection as rejection:
        ok, reason, detail = False, rejection.reason, rejection.detail[:2000]
    except MemoryError:
        ok, reason, detail = False, "check/memory", "there is not enough memory to derive it"
    except Exception as error:
        ok, reason, detail = False, "internal", f"{type(error).__name__}: {str(error)[:500]}"
    seconds = time.perf_counter() - started
    return Outcome(ok, reason, detail, found.bound, seconds, found.nodes)


@dataclass(slots=True)
class _Found:
    bound: str = ""
    nodes: int = 0
    cases: int = 0


def _check(data: bytes, path: Path, exact: bool, part: tuple[int, int], found: _Found) -> None:
    proof = parse(data)
    checkpoint = read(path)
    if checkpoint.sha256 != proof.checkpoint:
        raise Rejection("checkpoint/digest", "the checkpoint is not the one of the proof")
    check_room(proof)
    derive: Callable[[Case], Derived]
    if exact:
        from kcdsl_certs.recheck.exact import Rational

        derive = Rational(proof, checkpoint.tensors).derive
    else:
        from kcdsl_certs.recheck.inexact import Doubles

        derive = Doubles(proof, checkpoint.tensors).derive
    first, step = part
    cases = proof.cases[first::step] if first >= 0 and step > 0 else ()
    if not cases:
        raise Rejection("document/cases", f"no case is part {first} of {step}")
    bounds = []
    for case in cases:
        try:
            bounds.append(_case(proof, case, derive, found))
        except Rejection as rejection:
            raise rejection.at(f"case {case.name[:80]!r}") from None
        claims = proof.claim, case.claim
        if claims[0] is not None and not (claims[1] is not None and claims[0] >= claims[1]):
            raise Rejection("claim/overall", f"less than the claim of case {case.name[:80]!r}")
    found.bound = max(bounds).hex() if proof.claim is not None else "held"


def _case(proof: Proof, case: Case, derive: Callable[[Case], Derived], found: _Found) -> float:
    bound, sizes = derive(case)
    found.nodes += len(sizes)
    found.cases += 1
    if not math.isfinite(bound):
        if proof.claim is None:
            raise Rejection("claim/too-small", "the order of the largest columns is not proved")
        raise Rejection("bound/not-finite", "the functional has no finite bound")
    if case.claim is not None and not bound <= case.claim:
        raise Rejection(
            "claim/too-small", f"claims {case.claim.hex()}, but only {bound.hex()} follows"
        )
    for witness in case.witness:
        value, drift = sizes[witness.node]
        if not (value <= witness.value and drift <= witness.drift):
            raise Rejection(
                "witness/too-small",
                f"node {witness.node[:80]!r} has value {value.hex()} and drift {drift.hex()}",
            )
    return bound
