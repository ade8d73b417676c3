"""Accept or reject a proof document."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.chain import Sizes, derive_chain, refuse_gaps
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.chain_document import CHAIN_SCHEMA, ChainDocument, parse_chain
from kcdsl_certs.recheck.documents.document import Apart, Case, Ends, Proof, load, proof_of
from kcdsl_certs.recheck.graphs.graph import Block
from kcdsl_certs.recheck.interval.served import read_served
from kcdsl_certs.recheck.interval.state import OverRows, in_turn
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.ops.table import OPERATIONS

# Bytes per element: two ends of three boxes (interval), or reference and error bound (affine).
_BOXES, _FORMS = 6 * 8, 2 * 8
_LIMIT_OF_GROUP = Path("/sys/fs/cgroup/memory.max")


def refuse_larger(proof: Proof) -> None:
    """Refuse a proof one of whose cases needs more bytes than this machine has.

    Raises Rejected "graph/size".
    """
    there = available()
    for case in proof.cases:
        block = proof.graphs[case.graph]
        walked = case.domain in ("interval", "splits")
        needed = boxes(block) if walked else forms(block)
        if needed > there:
            raise Rejected(
                "graph/size",
                f"graph {case.graph[:12]} needs at least {needed / 2**30:.1f} GiB of memory, "
                f"{there / 2**30:.1f} GiB are there",
            )


def boxes(block: Block) -> int:
    """Return a lower bound of the peak bytes of the interval domain, over all nodes in order."""
    last = {name: at for at, node in enumerate(block.nodes) for name in node.inputs}
    ending: dict[int, int] = {}
    most = now = 0
    for at, node in enumerate(block.nodes):
        size = _elements(node.op, node.shape) * _BOXES
        now += size
        most = max(most, now)
        end = last.get(node.name, at)
        ending[end] = ending.get(end, 0) + size
        now -= ending.pop(at, 0)
    return most


def forms(block: Block) -> int:
    """Return a lower bound of the bytes of affine forms, which are kept to the end of a case."""
    return sum(_elements(node.op, node.shape) for node in block.nodes) * _FORMS


def available() -> int:
    """Return the memory limit of this process in bytes, as far as the system states one."""
    try:
        import resource
    except ImportError:  # not a Unix system
        return 2**63
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            found.append(limit)
    try:
        text = _LIMIT_OF_GROUP.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        text = ""
    if text.isdigit():
        found.append(int(text))
    return min(found)


def _elements(op: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) if op in OPERATIONS and OPERATIONS[op].forms else 0


_FAINT = 2.0**-500  # bounds the derived size of an exact zero, whose terms may underflow in float64

# bound of a case, and (largest T, largest D) of its nodes by name
Derived = tuple[float, Sizes]

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a check.

    `reason` is "ok" or a stable code, `detail` names the place. `bound` is the largest bound that
    was derived (float.hex; "held" for no_flip; "" if a case had none), `nodes` the number of
    derived nodes over all cases.
    """

    ok: bool
    reason: str
    detail: str
    bound: str
    seconds: float
    nodes: int


def recheck(
    proof: bytes,
    checkpoint: Path,
    part: tuple[int, int] = (0, 1),
    served: Path | None = None,
    over_rows: OverRows = in_turn,
) -> Outcome:
    """Re-derive every bound of a proof from the checkpoint and compare it with the claims.

    The re-derived bound of each case must be at most its claim, every re-derived magnitude at most
    its witness, and the overall claim at least every case's. Nothing is raised: unforeseen errors
    are rejections with reason "internal".

    Args:
        proof: the document.
        checkpoint: the checkpoint that it is about.
        part: (first, step) derives every step-th case from `first` alone, so that several processes
            can share a proof; the proof is checked when all parts are.
        served: the checkpoint of the inference kernel where it has one of its own.
        over_rows: divides the rows of long passes, for example among processes.
    """
    started = time.perf_counter()
    totals = _Totals()
    try:
        _check(proof, _Checkpoints(checkpoint, served, over_rows), part, totals)
        ok, reason, detail = True, "ok", f"{totals.cases} cases follow from the checkpoint"
    except Rejected as rejection:
        ok, reason, detail = False, rejection.reason, rejection.detail[:2000]
    except MemoryError:
        ok, reason, detail = False, "check/memory", "there is not enough memory to derive it"
    except Exception as error:
        ok, reason, detail = False, "internal", f"{type(error).__name__}: {str(error)[:500]}"
    seconds = time.perf_counter() - started
    return Outcome(ok, reason, detail, totals.bound, seconds, totals.nodes)


@dataclass(slots=True)
class _Totals:
    bound: str = ""
    nodes: int = 0
    cases: int = 0


@dataclass(frozen=True, slots=True)
class _Checkpoints:
    """The checkpoints that a proof may be about."""

    checkpoint: Path
    served: Path | None
    over_rows: OverRows = in_turn

    def derivation(self, proof: Proof, keys: Collection[str]) -> Derivation:
        """Read the tensors of `keys`, compare digests, and return the derivation of cases."""
        found = read(self.checkpoint, keys)
        if found.sha256 != proof.checkpoint:
            raise Rejected("checkpoint/digest", "the checkpoint is not the one of the proof")
        if proof.served is None:
            return Derivation(proof, found.tensors, over_rows=self.over_rows)
        if self.served is None:
            raise Rejected("checkpoint/served", "the checkpoint of the inference kernel is needed")
        served = read_served(self.served, keys)
        if served.digest != proof.served:
            detail = "the inference kernel's checkpoint is not the one of the proof"
            raise Rejected("checkpoint/digest", detail)
        return Derivation(proof, found.tensors, served, self.over_rows)


def _check(data: bytes, checkpoints: _Checkpoints, part: tuple[int, int], totals: _Totals) -> None:
    record = load(data)
    if record.has("schema") and record.raw("schema") == CHAIN_SCHEMA:
        _check_chain(parse_chain(record), checkpoints, part, totals)
        return
    proof = proof_of(record)
    refuse_larger(proof)
    derive = checkpoints.derivation(proof, proof.parameters).derive
    bounds = []
    for case in _share(proof.cases, part):
        try:
            bounds.append(_case(proof, case, derive, totals))
        except Rejected as rejection:
            raise rejection.at(f"case {case.name[:80]!r}") from None
        _refuse_more(proof, case)
    totals.bound = max(bounds).hex() if proof.claim is not None else "held"


def _check_chain(
    chain: ChainDocument, checkpoints: _Checkpoints, part: tuple[int, int], totals: _Totals
) -> None:
    keys = {*chain.inner.parameters, *chain.last.parameters}
    refuse_gaps(chain)
    for proof in (chain.inner, chain.last):
        refuse_larger(proof)
    inner, last = (checkpoints.derivation(proof, keys) for proof in (chain.inner, chain.last))

    def compared(case: Case, bound: float, sizes: Sizes) -> None:
        totals.nodes += len(sizes)
        _compare(case, bound, sizes)

    def derived(
        case: Case, held: Any, wanted: bool
    ) -> tuple[float, Sizes, Ends, Apart | None, Any]:
        return inner.interface(case, held, wanted=wanted)

    def follows(case: Case, held: Any) -> float:
        return _case(chain.last, case, lambda one: last.derive(one, held), totals)

    bounds = []
    for case in _share(chain.cases, part):
        try:
            bounds.append(derive_chain(case, derived, follows, compared))
        except Rejected as rejection:
            raise rejection.at(f"case {case.name[:80]!r}") from None
        _refuse_more(chain.last, case.links[-1].case)
    totals.bound = max(bounds).hex() if chain.last.claim is not None else "held"


def _share(cases: tuple[_Item, ...], part: tuple[int, int]) -> tuple[_Item, ...]:
    """Return every step-th case from the first on."""
    first, step = part
    chosen = cases[first::step] if first >= 0 and step > 0 else ()
    if not chosen:
        raise Rejected("document/cases", f"no case is part {first} of {step}")
    return chosen


def _refuse_more(proof: Proof, case: Case) -> None:
    """Refuse a case that claims more than the whole proof."""
    claims = proof.claim, case.claim
    if claims[0] is not None and not (claims[1] is not None and claims[0] >= claims[1]):
        raise Rejected("claim/overall", f"less than the claim of case {case.name[:80]!r}")


def _case(proof: Proof, case: Case, derive: Callable[[Case], Derived], totals: _Totals) -> float:
    bound, sizes = derive(case)
    totals.nodes += len(sizes)
    totals.cases += 1
    if not math.isfinite(bound):
        if proof.claim is None:
            raise Rejected("claim/too-small", "the order of the largest columns is not proved")
        raise Rejected("bound/not-finite", "the functional has no finite bound")
    _compare(case, bound, sizes)
    return bound


def _compare(case: Case, bound: float, sizes: Sizes) -> None:
    """Refuse a case whose derived bound or sizes exceed its claim or its witnesses."""
    if case.claim is not None and not bound <= case.claim:
        raise Rejected(
            "claim/too-small", f"claims {case.claim.hex()}, but only {bound.hex()} follows"
        )
    for witness in case.witness:
        value, drift = sizes[witness.node]
        if not (_holds(witness.value, value) and _holds(witness.drift, drift)):
            raise Rejected(
                "witness/too-small",
                f"node {witness.node[:80]!r} has value {value.hex()} and drift {drift.hex()}",
            )


def _holds(witness: float, derived: float) -> bool:
    """Return whether a witness bounds a derived size, up to the underflow of exact zeros."""
    return witness >= 0 and derived <= witness + _FAINT
