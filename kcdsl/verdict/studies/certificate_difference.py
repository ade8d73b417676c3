"""The differences of two certificates, as `kcdsl diff` states them.

A certificate is stricter than another if it states more: a lower limit or bound, stronger
evidence, less budget, fewer assumptions. Differences of the triples have no such order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from kcdsl.diagnostics.render.terminal import counted
from kcdsl.verdict.quantities import UNREACHED
from kcdsl.verdict.records import DocumentRecord, Record
from kcdsl.verdict.studies.certificate_view import CertificateView, Content, ResultView
from kcdsl.verdict.studies.difference import (
    Change,
    ClauseStatus,
    Relation,
    change_lines,
    plain,
    together,
)
from kcdsl_certs.statement import LOWER, UPPER, Evidence, Predicate, Region, Verdict
from kcdsl_certs.verification.inspection import Inspection

_VERDICTS = (Verdict.FAILED, Verdict.INCONCLUSIVE, Verdict.PASSED)
_MEANING = {
    Relation.EQUAL: "both state the same results",
    Relation.STRICTER: "NEW states all that OLD states, and more",
    Relation.WEAKER: "NEW states less than OLD",
    Relation.INCOMPARABLE: "NEW states less than OLD here and more, or other things, there",
    Relation.UNDECIDED: "it is open whether NEW states all that OLD states",
}


@dataclass(frozen=True, slots=True)
class NamedCertificate(Record):
    """A certificate: its file, identifier and contract, and whether its signature verified."""

    file: str
    identity: str | None
    contract: str
    signed: str


@dataclass(frozen=True, slots=True)
class ResultDifference(Record):
    """The difference of one result. A change without a relation concerns a number that is no claim,
    such as a measured value."""

    obligation: str
    clause: str
    slice: str | None
    status: ClauseStatus
    relation: Relation
    claim: str
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class CertificateDifference(DocumentRecord):
    """The difference of two certificates: triple, results, and other fields."""

    schema: ClassVar[str] = "kcdsl.certificate-diff/1"
    derived: ClassVar[tuple[str, ...]] = ("relation",)

    old: NamedCertificate
    new: NamedCertificate
    triple: tuple[Change, ...]
    changes: tuple[Change, ...]
    results: tuple[ResultDifference, ...]

    @property
    def relation(self) -> Relation:
        """Return the relation of all claims of NEW to all claims of OLD."""
        around = [c.relation for c in self.changes if c.relation is not None]
        return together((*around, *(result.relation for result in self.results)))


# --- finding --------------------------------------------------------------------------------------


def compare_certificates(
    old: tuple[CertificateView, Inspection], new: tuple[CertificateView, Inspection]
) -> CertificateDifference:
    """Return the difference of two certificates, both with a readable predicate."""
    contents = [_content(each[0]) for each in (old, new)]
    bodies = [each[1].body for each in (old, new)]
    assert isinstance(bodies[0], Predicate)
    assert isinstance(bodies[1], Predicate)
    return CertificateDifference(
        old=_named(old[0], contents[0]),
        new=_named(new[0], contents[1]),
        triple=tuple(_triple(*contents)),
        changes=tuple(_around(old[0], new[0], *contents)),
        results=tuple(_results(contents[0], contents[1], _regions(bodies[0]), _regions(bodies[1]))),
    )


def _content(view: CertificateView) -> Content:
    assert view.content is not None
    return view.content


def _named(view: CertificateView, content: Content) -> NamedCertificate:
    contract = f"{content.contract['id']} {content.contract['version']}"
    return NamedCertificate(view.file, view.identity, contract, view.signed)


def _triple(old: Content, new: Content) -> Iterator[Change]:
    """Yield the differing components of the triple."""
    yield from _fields("checkpoint", old.checkpoint, new.checkpoint)
    for role in ("train", "infer"):
        one, other = old.kernels[role], new.kernels[role]
        yield from _fields(f"{role} kernel", {"name": one.name}, {"name": other.name})
        yield from _fields(f"{role} numerics", one.numerics, other.numerics)
        yield from _fields(f"{role} kernel", one.build, other.build)
    yield from _fields("contract", old.contract, new.contract)


def _fields(
    name: str, old: Mapping[str, Any], new: Mapping[str, Any], place: str = ""
) -> Iterator[Change]:
    for key in dict.fromkeys((*old, *new)):
        one, other = old.get(key), new.get(key)
        path = f"{place}.{key}" if place else str(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _fields(name, one, other, path)
        elif one != other:
            yield Change(f"{name}: {path}", _shown(one), _shown(other), None)


def _shown(value: Any) -> str:
    return UNREACHED if value is None or value == "" else str(value)


def _around(
    view: CertificateView, later: CertificateView, old: Content, new: Content
) -> Iterator[Change]:
    """Yield the differences outside the results."""
    if old.stage != new.stage:
        yield Change("stage", old.stage, new.stage, Relation.INCOMPARABLE)
    if old.complete != new.complete:
        relation = Relation.STRICTER if new.complete else Relation.WEAKER
        words = {True: "the whole contract", False: "a part of the contract"}
        yield Change("scope", words[bool(old.complete)], words[bool(new.complete)], relation)
    for name, one, other in (
        ("issued", old.validity.issued_at, new.validity.issued_at),
        ("valid until", old.validity.valid_until, new.validity.valid_until),
        ("validity", old.validity.state, new.validity.state),
        ("sequence", str(old.sequence), str(new.sequence)),
        ("supersedes", _shown(old.supersedes), _shown(new.supersedes)),
        ("evaluator", " ".join(old.evaluator.values()), " ".join(new.evaluator.values())),
    ):
        if one != other:
            yield Change(name, one, other, None)
    signers = [_signers(each) for each in (view, later)]
    if signers[0] != signers[1] or later.signed == "refused":
        trusted: Relation | None = None
        if later.signed == "refused":  # nothing in it has a known author
            lost = view.signed == "verified"
            trusted = Relation.WEAKER if lost else Relation.UNDECIDED
        yield Change("signers", signers[0], signers[1], trusted)
    for name, texts in (
        ("assumption", (old.assumptions, new.assumptions)),
        ("non-claim", (old.non_claims, new.non_claims)),
        ("accepted finding", tuple(_findings(each) for each in (old, new))),
    ):
        for text in dict.fromkeys((*texts[0], *texts[1])):
            there = [text in side for side in texts]
            if there[0] != there[1]:
                order = Relation.WEAKER if there[1] else Relation.STRICTER
                one, other = (text if side else UNREACHED for side in there)
                yield Change(name, one, other, order)
    yield from _fields("data", old.inputs, new.inputs)
    files = [{f"{f['role']} {f['path']}": f["sha256"] for f in each.files} for each in (old, new)]
    yield from _fields("evidence", files[0], files[1])


def _signers(view: CertificateView) -> str:
    names = [s.key or s.keyid or "without a hint" for s in view.signatures]
    return f"{', '.join(names) or UNREACHED} ({view.signed.replace('_', ' ')})"


def _findings(content: Content) -> tuple[str, ...]:
    return tuple(f"{item['code']}: {item['reason']}" for item in content.suppressions)


_Key = tuple[str, str, str]


def _regions(body: Predicate) -> dict[_Key, tuple[Region | None, str | None]]:
    """Return the inputs of each result: its region, and the digest of its slice."""
    return {(c.obligation, str(c.quantity), c.op): (c.region, c.slice_digest) for c in body.clauses}


def _results(
    old: Content,
    new: Content,
    regions: Mapping[_Key, tuple[Region | None, str | None]],
    later: Mapping[_Key, tuple[Region | None, str | None]],
) -> Iterator[ResultDifference]:
    before, after = ({_key(r): r for r in each.results} for each in (old, new))
    for key in dict.fromkeys((*before, *after)):
        one, other = before.get(key), after.get(key)
        if one is None or other is None:
            found = one or other
            assert found is not None
            status = ClauseStatus.ADDED if one is None else ClauseStatus.REMOVED
            passed = found.verdict == Verdict.PASSED
            relation = Relation.STRICTER if one is None else Relation.WEAKER
            if not passed:  # adding or removing a result that shows nothing changes nothing
                relation = Relation.EQUAL
            yield _difference(found, status, relation, ())
            continue
        changes = (*_ordered(one, other), *_inputs(regions[key], later[key]), *_numbers(one, other))
        relation = together(c.relation for c in changes if c.relation is not None)
        yield _difference(other, ClauseStatus.BOTH, relation, changes)


def _key(result: ResultView) -> _Key:
    return result.obligation, result.quantity, result.op


def _difference(
    result: ResultView, status: ClauseStatus, relation: Relation, changes: tuple[Change, ...]
) -> ResultDifference:
    return ResultDifference(
        result.obligation,
        result.clause,
        result.slice,
        status,
        relation,
        f"{result.claim}: {result.verdict}",
        changes,
    )


def _ordered(one: ResultView, other: ResultView) -> Iterator[Change]:
    """Yield the changes that make a result stricter or weaker."""
    if one.verdict != other.verdict:
        more = _VERDICTS.index(Verdict(other.verdict)) > _VERDICTS.index(Verdict(one.verdict))
        yield _ranked("verdict", one.verdict, other.verdict, more)
    if one.unit != other.unit:
        yield Change("unit", one.unit, other.unit, Relation.INCOMPARABLE)
    if one.tau != other.tau:
        lower = Fraction(other.tau) < Fraction(one.tau)
        if one.op in (*UPPER, *LOWER):
            yield _ranked("limit", one.tau, other.tau, lower is (one.op in UPPER))
        else:
            yield Change("limit", one.tau, other.tau, Relation.INCOMPARABLE)
    if one.evidence != other.evidence:
        more = Evidence(other.evidence).is_at_least(Evidence(one.evidence))
        yield _ranked("evidence", one.evidence, other.evidence, more)
    if one.bound != other.bound:
        if one.bound is None or other.bound is None:
            more = one.bound is None
        else:
            more = (other.bound < one.bound) is (one.op in UPPER)
        yield _ranked("bound", _float(one.bound), _float(other.bound), more)
    for name, less_is_more in (("budget", True), ("confidence", False), ("weights", False)):
        old, new = getattr(one, name), getattr(other, name)
        if old == new:
            continue
        usual = Fraction(name == "confidence")  # the default: no error probability, budget or ball
        before, now = (usual if text is None else Fraction(text) for text in (old, new))
        if before != now:
            yield _ranked(name, _shown(old), _shown(new), (now < before) is less_is_more)


def _ranked(name: str, old: str, new: str, more: bool) -> Change:
    return Change(name, old, new, Relation.STRICTER if more else Relation.WEAKER)


def _inputs(
    one: tuple[Region | None, str | None], other: tuple[Region | None, str | None]
) -> Iterator[Change]:
    """Yield changes of the inputs of a result: a wider ball of the same slice contains more."""
    old, new = one[0], other[0]
    if old != new:
        relation = Relation.INCOMPARABLE
        if (
            old is not None
            and new is not None
            and (old.kind, old.slice, old.longest) == (new.kind, new.slice, new.longest)
        ):
            relation = Relation.STRICTER if new.radius > old.radius else Relation.WEAKER
        yield Change("region", _shown(old), _shown(new), relation)
    if one[1] != other[1]:
        yield Change("rows of the slice", _shown(one[1]), _shown(other[1]), Relation.INCOMPARABLE)


def _numbers(one: ResultView, other: ResultView) -> Iterator[Change]:
    """Yield the changes of numbers that are no claims."""
    for name in ("value", "attained", "low", "high", "n", "counted", "exceed", "method"):
        old, new = getattr(one, name), getattr(other, name)
        if old != new:
            texts = [_float(v) if isinstance(v, float) else _shown(v) for v in (old, new)]
            if name == "value":
                texts = [one.number("value"), other.number("value")]
            yield Change(name, texts[0], texts[1], None)


def _float(value: float | None) -> str:
    return UNREACHED if value is None else f"{value:.6g}"


# --- for people -----------------------------------------------------------------------------------


def full(found: CertificateDifference) -> str:
    """Return the difference as plain text; equal results are only counted."""
    lines = [f"OLD  {_line(found.old)}", f"NEW  {_line(found.new)}", ""]
    lines += [f"{found.relation}: {_MEANING[found.relation]}", _counts(found)]
    if found.triple:
        lines += ["", "another triple", *change_lines(found.triple)]
    if found.changes:
        lines += ["", "around the results", *change_lines(found.changes)]
    for result in found.results:
        if _is_shown(result):
            lines += ["", f"{_title(result)}: {_status(result)}", f"  states  {result.claim}"]
            lines += change_lines(result.changes)
    return plain(lines)


def _line(named: NamedCertificate) -> str:
    signed = {
        "verified": "signature verified",
        "refused": "NOT ACCEPTED under the policy here",
        "not_verified": "SIGNATURE NOT VERIFIED",
    }[named.signed]
    identity = "" if named.identity is None else f"  sha256:{named.identity[:16]}"
    return f"{named.file}  {named.contract}{identity}  {signed}"


def _is_shown(result: ResultDifference) -> bool:
    return result.status is not ClauseStatus.BOTH or bool(result.changes)


def _title(result: ResultDifference) -> str:
    return result.clause if result.slice is None else f"{result.clause} on {result.slice}"


def _status(result: ResultDifference) -> str:
    gone = result.status in (ClauseStatus.ADDED, ClauseStatus.REMOVED)
    return f"{result.status}, {result.relation}" if gone else str(result.relation)


def _counts(found: CertificateDifference) -> str:
    counts = Counter(result.relation for result in found.results)
    parts = [f"{counts[relation]} {relation}" for relation in Relation if counts[relation]]
    return f"{counted(len(found.results), 'result')}: {', '.join(parts) or 'none'}"
