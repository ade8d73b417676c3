"""Transfer of a certificate to a later checkpoint: results that remain valid, and reasons."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kcdsl import __version__
from kcdsl_certs.encoding.reals import real_text
from kcdsl_certs.encoding.strict import strict_load
from kcdsl_certs.statement import (
    CertifiedClause,
    Evaluator,
    ExcludedResult,
    Predicate,
    Transfer,
    TransferredResult,
    Triple,
    Verdict,
)
from kcdsl_certs.verification.proofs import LARGEST_PROOF, load_proof
from kcdsl_certs.verification.transfers import Weights, weights_of

ASSUMPTIONS = (
    "with the later weights, too, the training kernel's activations on the rows of the slices lie "
    "in the regions that the proofs are about",
)
NON_CLAIMS = (
    "It says nothing about results of the earlier certificate that it does not name.",
    "It says nothing about the quality of the later weights.",
)


class TransferCase(Protocol):
    """A case of a goal with the later weights: name, graph digest, and region as in a proof."""

    @property
    def name(self) -> str: ...
    @property
    def graph(self) -> str: ...
    @property
    def region(self) -> Mapping[str, Any]: ...


Regions = Callable[[str], Sequence[TransferCase]]
"""Returns the cases of a clause with the later weights."""


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The transferred and the dropped results, in the order of the certificate."""

    carried: tuple[TransferredResult, ...]
    left: tuple[ExcludedResult, ...]


def plan(earlier: Predicate, folder: Path, weights: Weights, regions: Regions) -> TransferPlan:
    """Decide for every result of a verified certificate whether it is transferred.

    Args:
        earlier: its predicate.
        folder: where its proofs are.
        weights: the earlier and the later checkpoint.
        regions: returns the cases of a clause with the later weights.

    Raises:
        Rejected: a proof is missing or not about its clause, or a checkpoint has invalid numbers.
    """
    found: dict[tuple[str, str | None], TransferredResult | ExcludedResult] = {}
    for clause in earlier.clauses:
        if clause.implied_by is None:
            one = _one(clause, earlier.triple, folder, weights, regions)
            kept = found.setdefault((clause.id, clause.slice), one)
            if isinstance(one, ExcludedResult) and isinstance(kept, TransferredResult):
                found[clause.id, clause.slice] = one
    for clause in earlier.clauses:
        if clause.implied_by is not None:
            found[clause.id, clause.slice] = _implied(clause, found)
    return TransferPlan(
        tuple(item for item in found.values() if isinstance(item, TransferredResult)),
        tuple(item for item in found.values() if isinstance(item, ExcludedResult)),
    )


def _one(
    clause: CertifiedClause, triple: Triple, folder: Path, weights: Weights, regions: Regions
) -> TransferredResult | ExcludedResult:
    name, block = (clause.id, clause.slice), clause.block
    if clause.verdict is not Verdict.PASSED or clause.proof is None or clause.weights is None:
        return ExcludedResult(*name, "no-region", "it is of the earlier checkpoint alone", block)
    proof = load_proof(folder, clause)
    farthest = weights.farthest(weights_of(proof, clause, triple), clause.weights)
    if not farthest.inside:
        detail = (
            f"{farthest.earlier!r} became {farthest.later!r}, beyond {real_text(clause.weights)}"
            " of it"
        )
        return ExcludedResult(*name, "weights", detail, block, farthest.tensor, farthest.element)
    outside = _states(strict_load(proof, LARGEST_PROOF), clause, regions)
    if outside is not None:
        return ExcludedResult(*name, "states", outside, block)
    return TransferredResult(*name, clause.weights, farthest.ratio, farthest.tensor)


def _implied(
    clause: CertifiedClause,
    found: Mapping[tuple[str, str | None], TransferredResult | ExcludedResult],
) -> TransferredResult | ExcludedResult:
    sources = [item for (name, _), item in found.items() if name == clause.implied_by]
    for source in sources:
        if isinstance(source, ExcludedResult):
            detail = f"it follows from {source.id}, which is not transferred"
            return ExcludedResult(clause.id, clause.slice, source.reason, detail, clause.block)
    if not sources:
        detail = f"it follows from {clause.implied_by}, which is not here"
        return ExcludedResult(clause.id, clause.slice, "no-region", detail, clause.block)
    return TransferredResult(clause.id, clause.slice)


def _states(proof: Any, clause: CertifiedClause, regions: Regions) -> str | None:
    """Return why the inputs of a block differ from those of a proof; None where they are equal."""
    if all("ids" in case["region"] for case in proof["cases"]):
        return None
    return other_subject(proof, regions(clause.id))


def other_subject(proof: Any, now: Sequence[TransferCase]) -> str | None:
    """Return why a proof is not about these cases: other rows or graphs, or a region that exceeds
    the proved one; None where it is. The weights of regions are not compared."""
    proved = {case["name"]: case for case in proof["cases"]}
    if {case.name for case in now} != proved.keys():
        return "the slice has other rows"
    for case in now:
        if case.graph != proved[case.name]["graph"]:
            return f"{case.name}: the block has another graph"
        stated, own = (
            {**one, "weights": None} for one in (proved[case.name]["region"], case.region)
        )
        outside = None if stated == own else _outside(stated, own)
        if outside is not None:
            return f"{case.name}: {outside}"
    return None


def _outside(proved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return how a region exceeds a proved one; None where it lies inside."""
    if "centre" not in proved or "centre" not in now or "longest" in proved:
        return "the proof is about another kind of region"
    centre, radius = _array(proved["centre"]), _array(proved["radius"])
    later, reach = _array(now["centre"]), _array(now["radius"])
    if later.shape != centre.shape:
        return "the states have another shape"
    apart = np.abs(later - centre)
    far = np.where(apart == 0, reach, np.nextafter(np.nextafter(apart, np.inf) + reach, np.inf))
    if bool((far <= radius).all()):
        return None
    worst = int(np.argmax(far - radius))
    moved, room = apart.ravel()[worst], (radius - reach + np.zeros_like(apart)).ravel()[worst]
    return f"a state that enters the block moved by {moved:.3g}, the proof leaves {room:.3g}"


def _array(record: Mapping[str, Any]) -> NDArray[np.float64]:
    data = np.frombuffer(base64.b64decode(record["data"]), dtype="<f8")
    return data.astype(np.float64).reshape(record["shape"])


def transfer_of(
    earlier: Predicate,
    identity: str,
    path: str,
    triple: Triple,
    decided: TransferPlan,
    issued: datetime,
) -> Transfer:
    """Return the statement of a plan. It is valid as long as the earlier certificate."""
    return Transfer(
        triple=triple,
        base=identity,
        path=path,
        stage=earlier.stage,
        issued_at=issued,
        valid_until=earlier.valid_until,
        sequence=int(issued.timestamp()),
        carried=decided.carried,
        left=decided.left,
        evaluator=Evaluator("kcdsl", __version__),
        assumptions=ASSUMPTIONS,
        non_claims=NON_CLAIMS,
    )
