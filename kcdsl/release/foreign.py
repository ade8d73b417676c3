"""Backends of other distributions: run in separate processes, with answers that are verified here.

`Held` needs a case for every row of the slice, each with a bound that decides the goal, evidence
of the kind that the clause demands, and a proof object that the independent checker derives again
and whose graph and regions are those of the block. `Violated` needs a run that breaks the clause
again when it is repeated.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import NO_BACKEND
from kcdsl.ir.terms import EvidenceKind, Program
from kcdsl.model.files import Artefacts
from kcdsl.release.artefacts import data_digests, record_all
from kcdsl.release.requirements import build_triple, kernel_here, slice_sources
from kcdsl.release.results import proof_reference, proved_clauses
from kcdsl.route.catalogue import BackendSpec, catalogue, is_foreign
from kcdsl.route.goals import Goal
from kcdsl.source.files import read_bytes
from kcdsl.verdict.model import Evidence, Held, Inconclusive, InvalidEvidence, Verdict, Violated
from kcdsl.verdict.outcome import CaseOutcome, GoalOutcome
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import Fields, strict_base64, strict_load
from kcdsl_certs.statement import Evidence as Kind
from kcdsl_certs.verification.proofs import Rechecker, StepOutcome
from kcdsl_certs.verification.recount import Recount
from kcdsl_certs.verification.rows import read_rows, select

_LARGEST_ANSWER = 2**30
_PROOFS = frozenset({EvidenceKind.PROOF, EvidenceKind.PROOF_REAL, EvidenceKind.PROBABILISTIC})


@dataclass(frozen=True, slots=True)
class ForeignBackend:
    """A backend that is never imported here; its time limit for an answer is `seconds`."""

    spec: BackendSpec
    seconds: float

    @property
    def name(self) -> str:
        """Return its name in the catalogue."""
        return self.spec.name

    def decide(
        self,
        program: Program,
        base: Path,
        goals: Sequence[Goal],
        *,
        device: str = "cpu",
        progress: Any = None,
        artefacts: Artefacts | None = None,
        tell: Any = None,
        **wishes: Any,
    ) -> tuple[GoalOutcome, ...]:
        """Ask the backend about the goals; return the verified outcomes in their order.

        `artefacts` records all files that the backend may read.
        Raises Refusal (KC402) for an exception, and for answers that do not match the goals.
        """
        if artefacts is not None:
            record_all(program, artefacts)
        question = {
            "target": self.spec.target,
            "program": program,
            "base": base.resolve(),
            "goals": tuple(goals),
            "wishes": {**wishes, "device": device},
        }
        started = time.monotonic()
        document = self._asked(question)
        seconds = time.monotonic() - started
        if document is None:
            late = Inconclusive(f"backend {self.name!r} gave no answer within {self.seconds:g} s")
            none = Evidence(EvidenceKind.PROOF, n=0)
            return tuple(GoalOutcome(g, late, none, self.name, (), seconds, 0) for g in goals)
        try:
            told = _answers(document, goals, self.name, seconds)
        except Rejected as error:
            raise self._unusable(error.detail or error.reason) from error
        return tuple(verified_outcome(program, base, outcome, device) for outcome in told)

    def slice_sizes(
        self,
        program: Program,
        base: Path,
        slices: Collection[str],
        *,
        artefacts: Artefacts | None = None,
    ) -> dict[str, int]:
        """Return a lower bound of the number of rows of each slice, without the model's
        tokenizer."""
        files = artefacts or Artefacts.of(base)
        sources = slice_sources(program, files)
        found = dict.fromkeys(slices, 0)
        for name in found.keys() & sources.keys():
            source = sources[name]
            with suppress(Rejected):
                rows = read_rows(read_bytes(files.find(source.data)), source.tokens)
                found[name] = len(select(rows, source.where).rows)
        return found

    def _asked(self, question: Mapping[str, Any]) -> Any:
        """Return the answer of the backend; None after a timeout."""
        with tempfile.TemporaryDirectory(prefix="kcdsl-") as folder:
            asked, answer = Path(folder) / "question", Path(folder) / "answer"
            asked.write_bytes(pickle.dumps(question))
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "kcdsl.release.foreign_process",
                    str(asked),
                    str(answer),
                ],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_file(sys.stderr) else subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
            try:
                code = process.wait(None if math.isinf(self.seconds) else self.seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if not answer.is_file():
                raise self._unusable(f"its process ended with exit code {code}")
            with answer.open("rb") as stream:
                data = stream.read(_LARGEST_ANSWER + 1)
        try:
            return strict_load(data, _LARGEST_ANSWER)
        except Rejected as error:
            raise self._unusable(f"what it wrote cannot be read: {error.detail}") from error

    def _unusable(self, why: str) -> Refusal:
        return refuse(
            NO_BACKEND,
            f"backend {self.name!r} gave no usable answer: {why[:500]}",
            help="leave --backend out, or report this to its maintainer",
        )


def _has_file(stream: Any) -> bool:
    try:
        return bool(stream.fileno() >= 0)
    except (OSError, ValueError, AttributeError):
        return False


# --- reading answers -----------------------------------------------------------------------------


def _answers(
    document: Any, goals: Sequence[Goal], name: str, seconds: float
) -> tuple[GoalOutcome, ...]:
    """Return the outcomes in a document; raises Rejected unless each goal has one."""
    fields = Fields.of(document, "answer")
    if "error" in fields.record:
        raise Rejected("answer/error", fields.text("error"))
    records = [Fields.of(item, "answer") for item in fields.items("outcomes")]
    places = [record.raw("goal") for record in records]
    if places != list(range(len(goals))):
        detail = f"{len(goals)} goals were sent, in order; it answers {places!r}"
        raise Rejected("answer/goals", detail.replace("-1", "another goal"))
    return tuple(
        _outcome(record, goal, name, seconds) for record, goal in zip(records, goals, strict=True)
    )


def _outcome(record: Fields, goal: Goal, name: str, seconds: float) -> GoalOutcome:
    cases = tuple(_case(Fields.of(item, "case")) for item in record.items("cases"))
    kind, proof, run = record.text("evidence"), record.raw("proof"), record.raw("run")
    verdict = _verdict(record)
    if kind not in set(EvidenceKind):
        verdict = InvalidEvidence(f"there is no evidence of the kind {kind!r}")
        kind = EvidenceKind.PROOF.value
    return GoalOutcome(
        goal=goal,
        verdict=verdict,
        evidence=Evidence(EvidenceKind(kind), len(cases), assumptions=record.texts("assumptions")),
        backend=name,
        cases=cases,
        seconds=seconds,
        peak_bytes=0,
        proof=None if proof is None else strict_base64(str(proof)),
        counterexample=None if run is None else strict_base64(str(run)),
        notes=record.texts("notes"),
    )


def _verdict(record: Fields) -> Verdict:
    word, reason = record.text("verdict"), str(record.raw("reason") or "")
    match word:
        case "Held":
            return Held()
        case "Violated":
            shown = record.raw("counterexample")
            return Violated(shown if isinstance(shown, dict) else {})
        case "Inconclusive":
            return Inconclusive(reason or "it gives no reason")
        case "InvalidEvidence":
            return InvalidEvidence(reason or "it gives no reason")
    return InvalidEvidence(f"{word!r} is no verdict")


def _case(record: Fields) -> CaseOutcome:
    def number(name: str) -> float | None:
        value = record.raw(name)
        try:
            return None if value is None else float.fromhex(str(value))
        except (ValueError, OverflowError):
            raise Rejected("answer/number", f"{value!r} is no number") from None

    bound, stable, reason = number("bound"), record.raw("stable"), record.raw("reason")
    if bound is None:
        raise Rejected("answer/number", "a case without a bound")
    return CaseOutcome(
        name=record.text("name"),
        length=record.integer("length"),
        bound=math.inf if math.isnan(bound) else bound,
        attack=number("attack"),
        reason=None if reason is None else str(reason),
        stable=stable if isinstance(stable, bool) else None,
        margin=number("margin"),
    )


# --- what is believed ----------------------------------------------------------------------------


def verified_outcome(
    program: Program, base: Path, outcome: GoalOutcome, device: str
) -> GoalOutcome:
    """Return a verified outcome: an unproved verdict becomes inconclusive, and an impossible one
    invalid evidence."""
    attained = [case.attack for case in outcome.cases if case.attack is not None]
    if any(not value >= 0 or math.isinf(value) for value in attained):
        bare = tuple(replace(case, attack=None) for case in outcome.cases)
        why = InvalidEvidence("the value that its run attains is not a drift")
        return replace(outcome, verdict=why, cases=bare, proof=None, counterexample=None)
    match outcome.verdict:
        case Held():
            objection = _missing_evidence(outcome) or _unproved(program, base, outcome, device)
            if objection is None:
                return replace(outcome, confirmed=True, counterexample=None)
        case Violated():
            objection = _unbroken(program, base, outcome, device)
            if objection is None:
                return replace(outcome, proof=None)
        case _:
            return replace(outcome, proof=None, counterexample=None)
    reason = f"backend {outcome.backend!r} is not believed: {objection}"
    return replace(outcome, verdict=Inconclusive(reason), proof=None, counterexample=None)


def _missing_evidence(outcome: GoalOutcome) -> str | None:
    """Return why an answer `Held` is incomplete; None where it is complete."""
    goal, names = outcome.goal, [case.name for case in outcome.cases]
    demanded, kind = goal.clause.evidence, outcome.evidence.kind
    if not names or len(set(names)) != len(names):
        return "it names no case, or one twice"
    if kind not in _PROOFS:
        return f"a drift for all inputs is not shown by {kind}"
    if demanded is not None and not Kind(kind.value).is_at_least(Kind(demanded.value)):
        return f"the clause demands {demanded}, it has {kind}"
    if goal.functional == "no_flip":
        settled = all(case.stable is True for case in outcome.cases)
    else:
        settled = all(goal.admits(case.bound) for case in outcome.cases)
    if not settled:
        return "a case has no bound that settles the goal"
    if outcome.proof is None:
        return "it has no proof object that can be checked"
    return None


def _unproved(program: Program, base: Path, outcome: GoalOutcome, device: str) -> str | None:
    """Return why the proof does not show the clause; None where the checker derives it and the
    cases are the rows of the slice."""
    assert outcome.proof is not None
    name = outcome.goal.clause.id
    reference = proof_reference(name, outcome.proof)
    files = Artefacts.of(base)
    checkpoint = files.locate(program.model.checkpoint)
    named = program.model.served
    served = None if named is None else files.find_weights(named)
    prints = {
        role: kernel_here(program, getattr(program, role), files, device)
        for role in ("train", "infer")
    }
    try:
        (clause,) = proved_clauses(program, base, (outcome,), {name: reference})
        triple = build_triple(program, base, fingerprints=prints)
        with tempfile.TemporaryDirectory(prefix="kcdsl-") as place:
            folder = Path(place)
            (folder / reference.path).write_bytes(outcome.proof)
            found = Rechecker(folder, checkpoint, served)(clause, triple)
            if found.outcome is not StepOutcome.OK:
                return f"its proof is not confirmed: {found.detail} ({found.reason})"
            digests, sources = data_digests(program, files), slice_sources(program, files)
            count = Recount(sources, files.find, digests, folder, None)
            count.run((clause,))
            return _about_others(program, base, outcome, device)
    except Rejected as error:
        return f"its proof does not show the clause: {error.detail} ({error.reason})"
    except (ValueError, RecursionError):
        return "its proof is no document"
    except Refusal as refusal:
        return f"its proof does not show the clause: {refusal.diagnostics[0].message}"


def _about_others(program: Program, base: Path, outcome: GoalOutcome, device: str) -> str | None:
    """Return why a confirmed proof is not about the block on the regions of the rows; None where it
    is. The checker derives the bound of the graph and the regions that the proof states."""
    from kcdsl.release.transfer import other_subject  # needs numpy

    assert outcome.proof is not None
    own = next((s for s in catalogue() if not is_foreign(s) and s.domains), None)
    if own is None or own.missing():
        return "nothing is installed that computes the regions of its proof"
    checkpoint = Artefacts.of(base).locate(program.model.checkpoint)
    (cases,) = own.load().regions(
        program, base, (outcome.goal,), checkpoint=checkpoint, device=device
    )
    other = other_subject(json.loads(outcome.proof), cases)
    return None if other is None else f"its proof is about something else: {other}"


def _unbroken(program: Program, base: Path, outcome: GoalOutcome, device: str) -> str | None:
    """Return why a repeated run does not break the clause; None where it does."""
    if outcome.counterexample is None:
        return "it brings no run that can be run again"
    own = next((s for s in catalogue() if not is_foreign(s) and s.domains), None)
    if own is None or own.missing():
        return "nothing is installed that runs its counterexample again"
    try:
        document = json.loads(outcome.counterexample)
        if document.get("clause") != outcome.goal.clause.id:
            return "its counterexample is about another clause"
        replayed = own.load().replay(program, base, document, device=device)
    except Refusal as refusal:
        return f"its counterexample cannot be run: {refusal.diagnostics[0].message}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "its counterexample is no document"
    return None if replayed.refutes else "its counterexample does not break the clause"
