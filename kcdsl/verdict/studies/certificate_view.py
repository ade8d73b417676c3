"""The document of `kcdsl show`: one certificate for people.

Plain frozen data, JSON with the schema "kcdsl.show/1" (`show.schema.json`) and nothing heavy. The
certificate is untrusted: nothing in it is run, and no name in it is trusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from typing import Any, ClassVar

from kcdsl.exits import Exit
from kcdsl.verdict.quantities import distinct_text, nearest_double, scale, stated
from kcdsl.verdict.records import DocumentRecord, Record
from kcdsl_certs.encoding.reals import real_text
from kcdsl_certs.encoding.strict import time_text
from kcdsl_certs.signatures import Trust
from kcdsl_certs.statement import (
    LOWER,
    CertifiedClause,
    Evidence,
    Kernel,
    Predicate,
    Transfer,
    numerics_digest,
)
from kcdsl_certs.verification.inspection import Inspection, SeenSignature
from kcdsl_certs.verification.report import Check

_UNVERIFIED = "SIGNATURE NOT VERIFIED: anybody may have written this; name a key or a policy"
_AUTHENTIC = {True: "verified", False: "refused", None: "not_verified"}
_EVIDENCE = {
    Evidence.PROOF: "proof",
    Evidence.PROOF_REAL: "proof in real arithmetic",
    Evidence.PROBABILISTIC: "proof for independent roundings",
    Evidence.CENSUS: "census",
    Evidence.SAMPLE: "sample",
}


@dataclass(frozen=True, slots=True)
class ResultView(Record):
    """One result: its claim, inputs, weights and evidence.

    `tau`, `value`, `budget`, `weights` and `confidence` are exact texts in the base unit `unit`.
    `attained` is the value of a concrete run, and `tightness` the factor between it and the bound,
    at least 1; None where there is no such run, for a margin, and for a bound with random
    roundings. `low` and `high` are the confidence limits of a sample.
    """

    obligation: str
    clause: str
    slice: str | None
    claim: str
    quantity: str
    op: str
    tau: str
    unit: str
    region: str | None
    weights: str | None
    verdict: str
    evidence: str
    method: str
    bound: float | None
    attained: float | None
    tightness: float | None
    value: str | None
    low: float | None
    high: float | None
    n: int | None
    counted: str | None
    exceed: int | None
    budget: str | None
    confidence: str | None
    implied_by: str | None
    proof: str | None
    assumptions: tuple[str, ...]
    scope: str | None
    reason: str | None

    @property
    def rests_on(self) -> str:
        """Return the evidence in words: its kind, amount and confidence."""
        words = [_EVIDENCE[Evidence(self.evidence)]]
        if self.implied_by is not None:
            words = [f"follows from {self.implied_by}"]
        if self.n is not None:
            cases = "case" if self.n == 1 else "cases"
            counted = cases if self.counted == "region" else self.counted or "units"
            words.append(f"{self.n} {counted}")
        if self.value is not None and self.decisive != self.number("value"):
            words.append(f"value {self.number('value')}")
        if self.exceed is not None:
            words.append(f"{self.exceed} beyond")
        if self.confidence is not None:
            words.append(f"confidence {real_text(100 * Fraction(self.confidence))}%")
        return ", ".join(words)

    def number(self, name: str) -> str:
        """Return a number of this result in the unit of its threshold."""
        found = getattr(self, name)
        if isinstance(found, str):
            found = nearest_double(Fraction(found))
        limit = nearest_double(Fraction(self.tau))
        return distinct_text(found, limit, scale(self.unit, limit))

    @property
    def decisive(self) -> str:
        """Return the deciding number: the certified bound, the confidence limit of a sample, or
        else the measured value."""
        limit = "low" if self.op in LOWER else "high"
        for name in ("bound", limit, "value"):
            if getattr(self, name) is not None:
                return self.number(name)
        return self.number("value")


@dataclass(frozen=True, slots=True)
class KernelView(Record):
    """One kernel: its name, a hint, and numerics and machine from its fingerprint."""

    name: str
    digest: str
    numerics_digest: str | None
    fingerprint: Mapping[str, Any]

    @property
    def numerics(self) -> dict[str, str]:
        """Return the specification of its numerics, by the path of each field."""
        return dict(flat(self.fingerprint.get("numerics")))

    @property
    def build(self) -> dict[str, str]:
        """Return the rest of the fingerprint: program, device, software, machine, switches."""
        rest = {k: v for k, v in self.fingerprint.items() if k not in ("numerics", "schema")}
        return dict(flat(rest))


def flat(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the innermost values of a document as text, each with its path."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield from flat(value[name], f"{place}.{name}" if place else str(name))
    elif isinstance(value, list):
        yield place, ", ".join(map(str, value)) or "none"
    elif value is not None:
        yield place, str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class ReadSignature(Record):
    """One signature: the key that it names (a hint), the trusted key that made it, and the reason
    if the policy does not accept it."""

    derived: ClassVar[tuple[str, ...]] = ("trusted",)

    keyid: str | None
    key: str | None
    sha256: str | None
    stages: tuple[str, ...] | None
    problem: str

    @property
    def trusted(self) -> bool:
        """Return whether the policy accepts the signature."""
        return self.key is not None and not self.problem


@dataclass(frozen=True, slots=True)
class Window(Record):
    """The validity period of a certificate, and its state at the moment of reading."""

    issued_at: str
    valid_until: str
    state: str
    days_left: int | None

    @classmethod
    def of(cls, issued: datetime, until: datetime, moment: datetime) -> Window:
        """Return the period with its state at a moment."""
        state, left = "in force", (until - moment).days
        if until <= issued:
            state = "empty"
        elif moment < issued:
            state = "not yet valid"
        elif moment >= until:
            state = "expired"
        return cls(
            time_text(issued), time_text(until), state, left if state == "in force" else None
        )


@dataclass(frozen=True, slots=True)
class Content(Record):
    """The statements of a certificate or weights transfer."""

    kind: str
    subject: str | None
    contract: Mapping[str, str | None]
    checkpoint: Mapping[str, Any]
    kernels: Mapping[str, KernelView]
    stage: str
    validity: Window
    sequence: int
    supersedes: str | None
    evaluator: Mapping[str, str]
    verdict: str | None
    complete: bool | None
    covers: tuple[str, ...]
    results: tuple[ResultView, ...]
    assumptions: tuple[str, ...]
    non_claims: tuple[str, ...]
    inputs: Mapping[str, str]
    files: tuple[Mapping[str, str], ...]
    suppressions: tuple[Mapping[str, str], ...]
    earlier: Mapping[str, str] | None
    carried: tuple[Mapping[str, Any], ...]
    left: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class CertificateView(DocumentRecord):
    """A certificate for people, with the results of the check steps that need nothing else.

    `content` is None where it cannot be read. `signed` is `verified`, `refused`, or `not_verified`
    if no keys are trusted. `gates` are documents of `kcdsl gate` about its triple, one for each
    slot of the register; None without a register.
    """

    schema: ClassVar[str] = "kcdsl.show/1"
    derived: ClassVar[tuple[str, ...]] = ("exit",)

    file: str
    moment: str
    identity: str | None
    signed: str
    trust: Mapping[str, Any] | None
    signatures: tuple[ReadSignature, ...]
    content: Content | None
    steps: tuple[Mapping[str, str], ...]
    gates: tuple[Mapping[str, Any], ...] | None = None

    @property
    def refusals(self) -> tuple[Mapping[str, str], ...]:
        """Return the steps that failed."""
        return tuple(step for step in self.steps if step["outcome"] == "failed")

    @property
    def left_out(self) -> tuple[str, ...]:
        """Return the names of the steps that were not run."""
        return tuple(step["name"] for step in self.steps if step["outcome"] == "not_run")

    @property
    def exit(self) -> Exit:
        """Return the exit code; 0 does not mean that the certificate passes, since steps are left
        out."""
        if self.refusals:
            return Exit.CERTIFICATE_INVALID
        return Exit.HELD if self.signed == "verified" else Exit.INCONCLUSIVE

    @property
    def headline(self) -> tuple[str, str]:
        """Return a colour word and the sentence about signatures, which is shown first."""
        why = self.refusals[0] if self.refusals else None
        if self.signed == "verified":
            names = ", ".join(s.key or "" for s in self.signatures if s.trusted)
            words = f"Signature verified: signed by {names}, trusted here"
            if why is None:
                return "held", words
            return "violated", f"{words}; but not accepted: {why['detail']} ({why['reason']})"
        if why is not None:
            words = f"NOT ACCEPTED: {why['detail']} ({why['reason']})"
            if self.content is None or self.signed == "refused":
                return "violated", words
            return "violated", f"{words}. {_UNVERIFIED}"
        return "inconclusive", _UNVERIFIED

    @property
    def gate(self) -> tuple[str, str]:
        """Return a colour word and the expected result of a check, as far as it is known."""
        if self.refusals:
            reasons = ", ".join(dict.fromkeys(step["reason"] for step in self.refusals))
            return "violated", f"`kcdsl check` refuses it: {reasons}"
        rest = ", ".join(self.left_out)
        return "inconclusive", f"no step failed so far; not run: {rest}"

    @property
    def gate_lines(self) -> tuple[tuple[str, str], ...]:
        """Return a colour word and a sentence for the answer of the gate in each slot."""
        if self.gates is None:
            return ()
        if not self.gates:
            return (("inconclusive", "`kcdsl gate` is closed: no slot has a decision about it"),)
        lines = []
        for gate in self.gates:
            open_ = "open" if gate["open"] else "closed"
            where = f"{gate['slot']} at {gate['stage']}"
            words = f"`kcdsl gate` is {open_} in {where}: {'; '.join(gate['reasons'])}"
            lines.append((_ANSWERS[gate["outcome"]], words))
        return tuple(lines)


_ANSWERS = {"Successful": "held", "Failed": "violated", "Inconclusive": "inconclusive"}


def certificate_view(
    file: str,
    inspection: Inspection,
    trust: Trust | None,
    moment: datetime,
    *,
    recorded: Check | None = None,
    gates: tuple[Mapping[str, Any], ...] | None = None,
) -> CertificateView:
    """Return the view of an inspected certificate; `recorded` is the step of the register."""
    body = inspection.body
    checks = inspection.checks if recorded is None else (*inspection.checks, recorded)
    return CertificateView(
        file=file,
        moment=time_text(moment.replace(microsecond=0)),
        identity=inspection.identity,
        signed=_AUTHENTIC[inspection.authentic],
        trust=None if trust is None else trust.to_json(),
        signatures=tuple(map(_signature, inspection.signatures)),
        content=None if body is None else _content(body, inspection, moment),
        steps=tuple(check.to_json() for check in checks),
        gates=gates,
    )


def _signature(seen: SeenSignature) -> ReadSignature:
    key = seen.key
    if key is None:
        return ReadSignature(seen.keyid, None, None, None, seen.problem)
    stages = None if key.stages is None else tuple(sorted(key.stages))
    return ReadSignature(seen.keyid, key.name, key.key.fingerprint, stages, seen.problem)


def _content(body: Predicate | Transfer, inspection: Inspection, moment: datetime) -> Content:
    triple, statement = body.triple, inspection.statement
    own = body if isinstance(body, Predicate) else None
    over = body if isinstance(body, Transfer) else None
    contract = triple.contract
    subjects = () if statement is None else statement.subjects
    return Content(
        kind="certificate" if own else "weights transfer",
        subject=subjects[0] if len(subjects) == 1 else None,
        contract={
            "id": contract.id,
            "version": contract.version,
            "digest": contract.digest,
            "source": None if own is None else own.contract_source,
        },
        checkpoint={
            "name": triple.checkpoint.name,
            "digest": triple.checkpoint.digest,
            "rootDigest": triple.checkpoint.root_digest,
            "companions": dict(triple.checkpoint.companions),
        },
        kernels={"train": _kernel(triple.train), "infer": _kernel(triple.infer)},
        stage=body.stage,
        validity=Window.of(body.issued_at, body.valid_until, moment),
        sequence=body.sequence,
        supersedes=None if own is None else own.supersedes,
        evaluator={"id": body.evaluator.id, "version": body.evaluator.version},
        verdict=None if inspection.stated is None else str(inspection.stated),
        complete=None if own is None else own.scope.complete,
        covers=() if own is None else tuple(_label(*pair) for pair in own.scope.covers),
        results=() if own is None else tuple(map(_result, own.clauses)),
        assumptions=body.assumptions if own is None else own.every_assumption,
        non_claims=body.non_claims,
        inputs={} if own is None else {item.name: item.sha256 for item in own.inputs},
        files=()
        if own is None
        else tuple({"role": f.role, "path": f.path, "sha256": f.sha256} for f in own.evidence),
        suppressions=()
        if own is None
        else tuple({"code": item.code, "reason": item.reason} for item in own.suppressions),
        earlier=None if over is None else {"path": over.path, "digest": over.base},
        carried=() if over is None else tuple(item.to_json() for item in over.carried),
        left=() if over is None else tuple(item.to_json() for item in over.left),
    )


def _kernel(kernel: Kernel) -> KernelView:
    return KernelView(kernel.name, kernel.digest, numerics_digest(kernel), kernel.fingerprint)


def _label(clause: str, slice: str | None) -> str:
    return clause if slice is None else f"{clause} [{slice}]"


def _result(clause: CertifiedClause) -> ResultView:
    proof, lower = clause.evidence.is_proof, clause.op in LOWER
    attained = (clause.high if lower else clause.low) if proof else None
    return ResultView(
        obligation=clause.obligation,
        clause=clause.id,
        slice=clause.slice,
        claim=_claim(clause),
        quantity=str(clause.quantity),
        op=clause.op,
        tau=real_text(clause.tau),
        unit=clause.unit,
        region=None if clause.region is None else str(clause.region),
        weights=_exact(clause.weights),
        verdict=str(clause.verdict),
        evidence=str(clause.evidence),
        method=clause.method,
        bound=clause.bound,
        attained=attained,
        tightness=_tightness(clause, attained),
        value=_exact(clause.value),
        low=None if proof else clause.low,
        high=None if proof else clause.high,
        n=clause.n,
        counted=clause.counted,
        exceed=clause.exceed,
        budget=_exact(clause.budget),
        confidence=None if clause.alpha is None else real_text(1 - clause.alpha),
        implied_by=clause.implied_by,
        proof=None if clause.proof is None else clause.proof.path,
        assumptions=clause.assumptions,
        scope=clause.scope,
        reason=clause.reason,
    )


def _exact(value: Fraction | None) -> str | None:
    return None if value is None else real_text(value)


def _tightness(clause: CertifiedClause, attained: float | None) -> float | None:
    """Return bound / attained, or its inverse for a bound from below.

    Bounds with random roundings have none, because an attack chooses its roundings; nor have
    margins, of which only the sign matters.
    """
    chance = clause.evidence is Evidence.PROBABILISTIC
    if attained is None or clause.bound is None or chance or clause.quantity.kind == "margin":
        return None
    above, below = clause.bound, attained
    if clause.op in LOWER:
        above, below = attained, clause.bound
    return above / below if below > 0 else None


def _claim(clause: CertifiedClause) -> str:
    """Return the claim in the syntax of contracts, followed by its slice, weight ball and
    budget."""
    text = _comparison(clause)
    if clause.region is not None:
        text = f"forall x in {clause.region}: {text}"
    elif clause.slice is not None:
        text += f" on {clause.slice}"
    if clause.weights is not None:
        text += f", for all weights within {real_text(clause.weights)} of each"
    if not clause.is_hard:
        assert clause.budget is not None
        text += f", up to {_in_unit(clause.budget, '%')} of {clause.counted or 'units'} beyond"
    return text


def _comparison(clause: CertifiedClause) -> str:
    quantity = clause.quantity
    if quantity.kind == "margin" and clause.op == ">" and clause.tau == 0:
        return f"no_flip({quantity.block}, x{'' if quantity.k == 1 else f', {quantity.k}'})"
    if quantity.kind == "share" and clause.op == ">=" and clause.tau == 1:
        return f"has(trace, [{', '.join(map(json.dumps, quantity.fields))}])"
    return f"{quantity} {clause.op} {_in_unit(clause.tau, clause.unit)}"


def _in_unit(exact: Fraction, unit: str) -> str:
    """Return a number as its author stated it; unchanged if it overflows a double."""
    near = nearest_double(exact)
    return stated(near, scale(unit, near)) if math.isfinite(near) else real_text(exact)
