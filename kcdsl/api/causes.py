"""Causes of a failure: compares the trace of a triple with runs of earlier registered triples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.api.backends import choose_device, measuring_backend
from kcdsl.api.contract import Contract, read_contract
from kcdsl.api.evaluation import EvaluateSettings, gathered
from kcdsl.api.promotion import NO_FALLBACK, OF_STAGE
from kcdsl.api.results import no_progress
from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import ARTEFACT_REFUSED, REGISTER_DAMAGED
from kcdsl.model.files import Artefacts
from kcdsl.release.artefacts import checkpoint_manifest
from kcdsl.release.issue import utc_now
from kcdsl.release.requirements import build_triple, kernel_here
from kcdsl.source.files import is_parquet, read_bytes
from kcdsl.verdict.report import read_report, unusable
from kcdsl.verdict.studies.causes import (
    CHECKPOINT,
    FAILED,
    KERNELS,
    PRESENT,
    PREVIOUS,
    Certified,
    Explanation,
    Place,
    RunEvidence,
    agreed_rows,
)
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.signatures import decode, parse_bundle
from kcdsl_certs.statement import Predicate, Triple, differences, relaxed
from kcdsl_certs.statement.triple import INFER_CHECKPOINT

if TYPE_CHECKING:
    from kcdsl.api.results import Progress
    from kcdsl.ir.terms import Program
    from kcdsl.model.files import Artefacts
    from kcdsl.release.register import Promotion, PromotionReason, Register, Run

_ERROR = 0.05
_CONTRACT = "contract"
_NO_UNITS = "a report has no units to compare: name the trace beside it"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhySettings:
    """Settings; each field is the option of `kcdsl why` of its name. `checkpoint` maps digests of
    manifests to paths."""

    trace: Path
    register: str
    evidence: Sequence[str] = ()
    contract: Sequence[str] = ()
    checkpoint: Mapping[str, Path] = field(default_factory=dict)
    device: str = "auto"
    allow_code: bool = False
    progress: Callable[[], AbstractContextManager[Progress]] = no_progress
    clock: Callable[[], datetime] = utc_now


@dataclass(frozen=True, slots=True)
class _Measured:
    """A run: its report, its measurements (None for a report alone), the digest of its file, and
    its triple if it was run on this machine."""

    name: str
    document: Mapping[str, Any]
    evidence: Any
    digest: str | None = None
    triple: Triple | None = None


@dataclass(frozen=True, slots=True)
class _History:
    """The content of a register: runs by the digests of their traces and reports, triples by digest
    in the order of recording, and for the failed run its triple, the previous triple, the certified
    results and the decisions that refused the triple."""

    runs: Mapping[str, Run]
    triples: Mapping[str, Triple]
    found_by: str
    present: Triple | None = None
    previous: Triple | None = None
    certified: Certified = field(default_factory=dict)
    refused: tuple[str, ...] = ()

    def run(self, one: _Measured) -> Run | None:
        """Return the run of a file; None where it was not recorded."""
        return None if one.digest is None else self.runs.get(one.digest)


def explain(settings: WhySettings) -> Explanation:
    """Determine the causes of a failure; raises Refusal for unreadable files.

    Runs of other checkpoints and kernels are read from the files of `evidence`; missing runs are
    made if the given contracts and checkpoints allow it.
    """
    from kcdsl.release.register import Register

    backend = measuring_backend("pyarrow")
    failed = _read(backend, settings.trace)
    with Register.open(settings.register, clock=settings.clock) as register:
        history = _history(register, failed)
    present, previous = history.present, history.previous
    changed: Mapping[str, tuple[str, ...]] = {CHECKPOINT: (), KERNELS: (), _CONTRACT: ()}
    wanted: dict[Place, Triple] = {}
    if present is not None and previous is not None:
        changed = _differing(previous, present)
        wanted = _wanted(previous, present, changed)
    found, unused = {FAILED: failed}, {}

    def take(one: _Measured) -> None:
        place = _place_of(one, history, wanted, failed, backend)
        if isinstance(place, str):
            unused[one.name] = place
        elif place in found:
            unused[one.name] = f"{found[place].name} is of the same checkpoint and kernels"
        else:
            found[place] = one

    for name in dict.fromkeys(settings.evidence):
        take(_read(backend, Path(name)))
    if failed.evidence is not None:
        for one in _evaluated(settings, failed.evidence.seed, backend, wanted, found):
            take(one)
    cells = {place: one.evidence for place, one in found.items() if one.evidence is not None}
    program = None if failed.evidence is None else failed.evidence.program
    try:
        agreed = tuple(agreed_rows(failed.document, program, history.certified))
    except (KeyError, TypeError, ValueError) as error:
        raise unusable(settings.trace, f"{type(error).__name__}: {error}") from None
    run = history.run(failed)
    return Explanation(
        trace=str(settings.trace),
        contract=failed.document["contract"],
        triple=None if present is None else present.digest,
        previous=None if previous is None else previous.digest,
        found_by=history.found_by,
        changed=changed,
        error=_ERROR,
        agreed=agreed,
        runs=tuple(_runs(wanted, found, history)),
        effects=backend.effects(cells) if len(cells) > 1 else (),
        distrusted="" if run is None or run.trusted else f"its run is not trusted: {run.reason}",
        refused=history.refused,
        unused=unused,
    )


def _read(backend: Any, path: Path) -> _Measured:
    """Read a trace and decide it again, or read a report; raises Refusal."""
    digest = hashlib.sha256(read_bytes(path)).hexdigest()
    if not is_parquet(path):
        return _Measured(str(path), read_report(path), None, digest)
    evidence = backend.read_trace(path).evidence
    return _Measured(str(path), backend.conclude(evidence).to_json(), evidence, digest)


# --- the register ---------------------------------------------------------------------------------


def _history(register: Register, failed: _Measured) -> _History:
    """Return the history of the failed run in a register."""
    runs = {d: run for run in register.runs() for d in (run.report, run.trace) if d is not None}
    triples = {triple.digest: triple for triple in register.triples()}
    run = runs.get(failed.digest or "")
    named = triples.values() if run is None else (triples[run.triple],)
    digest = str(failed.document["contract"].get("digest")).removeprefix("sha256:")
    fits = [
        one
        for one in named
        if one.contract.digest == digest
        and not _why_other(failed, one, None if run is None else one)
    ]
    if len(fits) != 1:
        why = f"{len(fits)} triples that the trace fits" if fits else "no triple that it fits"
        return _History(runs, triples, f"the register has {why}")
    (present,) = fits
    previous, found_by = _before(register, present, triples)
    certified = dict(_certified(register, present))
    refused = tuple(_refused(register, present, runs))
    return _History(runs, triples, found_by, present, previous, certified, refused)


def _refused(register: Register, present: Triple, runs: Mapping[str, Run]) -> Iterator[str]:
    """Yield the decisions that refused a triple for violated clauses, with their reasons: those
    after which it did not advance in their slot, and that counted no run which is not trusted."""
    from kcdsl.release.register import PromotionState

    refusals = (PromotionState.BLOCKED, PromotionState.FROZEN, PromotionState.ROLLED_BACK)
    doubted = {digest for digest, run in runs.items() if not run.trusted}
    last: dict[str, list[Promotion]] = {}
    for decision in register.promotions(candidate=present.digest):
        if decision.state in refusals:
            last.setdefault(decision.slot, []).append(decision)
        elif decision.state is not PromotionState.HELD:
            last.pop(decision.slot, None)
    for decision in [each for of_slot in last.values() for each in of_slot]:
        if doubted.isdisjoint(decision.evidence):
            named = f"decision {decision.number} about {decision.slot} at {decision.stage}"
            stated = [one for one in decision.reasons if one.clause not in (OF_STAGE, NO_FALLBACK)]
            for reason in [one for one in stated if _is_beyond(one)] or stated:
                on = f" on {reason.slice}" if reason.slice else ""
                yield f"{named} ({decision.state}): {reason.clause}{on}: {reason.detail}"


def _is_beyond(reason: PromotionReason) -> bool:
    """Return whether the counts of a reason are beyond the share that its clause allows; a mean has
    no counts."""
    numbers = {name: Fraction(text) for name, text in reason.numbers.items()}
    if not numbers.keys() >= {"beyond", "of", "allowed"}:
        return False
    return numbers["beyond"] > numbers["allowed"] * numbers["of"]


def _before(
    register: Register, present: Triple, triples: Mapping[str, Triple]
) -> tuple[Triple | None, str]:
    """Return the triple with which the present one was last compared, else the last one of the
    same contract recorded before it; and how it was found."""
    for decision in reversed(register.promotions(candidate=present.digest)):
        if decision.incumbent is not None and decision.incumbent != present.digest:
            found_by = f"the incumbent of decision {decision.number} about {decision.slot}"
            return triples[decision.incumbent], found_by
    earlier = list(triples.values())[: list(triples).index(present.digest)]
    for triple in reversed(earlier):
        if triple.contract.id == present.contract.id:
            return triple, "the last triple of this contract that was recorded before"
    return None, "the register has no earlier triple of this contract"


def _certified(register: Register, triple: Triple) -> Iterator[tuple[str, Any]]:
    """Yield the results of certificates in force by obligation, the newest last."""
    from kcdsl_certs.verification.admission import read_statement

    signed = register.certificates(triple=triple.digest)
    for entry in sorted(signed, key=lambda one: one.sequence):
        bundle = register.bundle(entry.identity)
        if bundle is None or not register.status_of(entry.identity).in_force:
            continue
        try:
            body = read_statement(decode(parse_bundle(bundle)).payload)
        except Rejected as error:
            raise refuse(
                REGISTER_DAMAGED,
                f"sha256:{entry.identity}: {error.detail}",
                help="`kcdsl register check` lists what else is damaged; restore the register "
                "from a copy",
            ) from error
        if isinstance(body, Predicate):
            yield from ((clause.obligation, (clause, entry.identity)) for clause in body.clauses)


# --- which run is of what -------------------------------------------------------------------------


def _differing(found: Triple, wanted: Triple) -> dict[str, tuple[str, ...]]:
    """Return the differences of two triples, by factor; the host is ignored."""
    parts: dict[str, tuple[str, ...]] = {CHECKPOINT: (), KERNELS: (), _CONTRACT: ()}
    for one in differences(found, relaxed(found, wanted, {"host"})):
        factor = KERNELS if one.reason.startswith("triple/kernel-") else CHECKPOINT
        parts[_CONTRACT if one.reason == "triple/contract-mismatch" else factor] += (one.detail,)
    return parts


def _unlike(found: Triple, wanted: Triple) -> str:
    """Return why a triple differs from the wanted checkpoint and kernels; empty where it does not.
    Its contract may differ, since clauses are compared one by one."""
    if found.contract.id != wanted.contract.id:
        return "it is of another contract"
    parts = _differing(found, wanted)
    return "; ".join((*parts[CHECKPOINT], *parts[KERNELS]))


def _wanted(
    previous: Triple, present: Triple, changed: Mapping[str, Sequence[str]]
) -> dict[Place, Triple]:
    """Return the triples whose runs separate the changes, and that of the failed run."""
    known = {PREVIOUS: previous, PRESENT: present}
    weights, builds = (
        known if changed[factor] else {PRESENT: present} for factor in (CHECKPOINT, KERNELS)
    )
    return {
        (at, with_): replace(build, checkpoint=weights[at].checkpoint, contract=present.contract)
        for at in weights
        for with_, build in builds.items()
    }


def _why_other(one: _Measured, wanted: Triple, stated: Triple | None) -> str:
    """Return why a run differs from the wanted checkpoint and kernels; empty where it does not.

    A run has its kernels and weights; companion files of the weights are only in its `stated`
    triple.
    """
    from kcdsl.release.promotion.documents import OtherSubject, claimed_triple, names_weights_of

    try:
        claimed = claimed_triple(one.document, wanted, one.document["kernels"])
        weights = one.document["model"]["sha256"]
        why = _unlike(claimed, wanted)
    except (
        *(OtherSubject, Rejected),
        *(KeyError, TypeError, AttributeError, OverflowError),
    ) as error:
        return f"it does not identify its run: {error}"
    if why:
        return why
    if weights is not None and not names_weights_of(str(weights), wanted):
        return "it is of other weights"
    if stated is not None:
        return _unlike(stated, wanted)
    if weights is None or INFER_CHECKPOINT in wanted.checkpoint.companions:
        return "it does not name all weights that were read: record its run"
    return ""


def _place_of(
    one: _Measured,
    history: _History,
    wanted: Mapping[Place, Triple],
    failed: _Measured,
    backend: Any,
) -> Place | str:
    """Return the checkpoint and kernels of a run, or why it is ignored."""
    if one.evidence is None or failed.evidence is None:
        return _NO_UNITS
    run = history.run(one)
    if run is not None and not run.trusted:
        return f"its run is not trusted: {run.reason}"
    stated = one.triple if run is None else history.triples[run.triple]
    reasons = {place: _why_other(one, triple, stated) for place, triple in wanted.items()}
    fits = [place for place, why in reasons.items() if not why]
    if len(fits) > 1:
        return "it does not say what belongs to its weights: record its run"
    if not fits:
        return " / ".join(dict.fromkeys(reasons.values())) or history.found_by
    if fits[0] == FAILED:
        return "it is of the triple that failed"
    try:
        backend.refuse_other_requests(failed.evidence, one.evidence)
    except Refusal as refusal:
        return refusal.diagnostics[0].message
    return fits[0]


def _runs(
    wanted: Mapping[Place, Triple], found: Mapping[Place, _Measured], history: _History
) -> Iterator[RunEvidence]:
    """Yield the run of each checkpoint with each pair of kernels, marked if missing."""
    for place in wanted or (FAILED,):
        one = found.get(place)
        if one is None:
            triple = wanted[place]
            missing = (
                f"no run: {triple.checkpoint.name} sha256:{triple.checkpoint.digest[:12]}, "
                f"{triple.infer.name} sha256:{triple.infer.digest[:12]}"
            )
            yield RunEvidence(*place, "missing", missing=missing)
            continue
        run = history.run(one)
        yield RunEvidence(
            *place,
            "evaluated" if one.digest is None else "file",
            one.name,
            None if run is None else run.identity,
            str(one.document["verdict"]),
            _NO_UNITS if one.evidence is None else "",
        )


# --- runs that are missing ------------------------------------------------------------------------


def _evaluated(
    settings: WhySettings,
    seed: int,
    backend: Any,
    wanted: Mapping[Place, Triple],
    found: Mapping[Place, _Measured],
) -> Iterator[_Measured]:
    """Yield missing runs that can be made here: kernels of the contracts, on their own weights and
    on the given checkpoints."""
    for digest, path in settings.checkpoint.items():
        own = checkpoint_manifest(path).digest
        if own != digest:
            raise refuse(
                ARTEFACT_REFUSED,
                f"{path} is not the checkpoint sha256:{digest}: its digest is sha256:{own}",
                help="files keep their names, which are part of the digest",
            )
    device = choose_device(settings.device) if settings.contract else ""
    how = EvaluateSettings(
        device=settings.device,
        seed=seed,
        bound_seconds=0.0,
        allow_code=settings.allow_code,
        progress=settings.progress,
    )
    for name in dict.fromkeys(settings.contract):
        contract = read_contract(name)
        for weights in (None, *settings.checkpoint.values()):
            program, files = _with_weights(contract, weights)
            prints = {
                role: kernel_here(program, ref, files, device)
                for role, ref in (("train", program.train), ("infer", program.infer))
            }
            triple = build_triple(program, files, fingerprints=prints)
            if any(not _unlike(triple, one) for at, one in wanted.items() if at not in found):
                evidence = gathered(contract, how, program, files)
                document = backend.conclude(evidence).to_json()
                title = f"{name} on {weights or program.model.checkpoint}"
                yield _Measured(title, document, evidence, triple=triple)


def _with_weights(contract: Contract, path: Path | None) -> tuple[Program, Artefacts]:
    """Return the contract with other weights, and the files that it may read."""
    program, files = contract.program, Artefacts.of(contract.base)
    if path is None:
        return program, files
    files.allow(path if path.is_dir() else path.parent)
    model = replace(program.model, checkpoint=str(path.absolute()))
    return replace(program, model=model), files
