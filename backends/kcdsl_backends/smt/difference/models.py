"""Values that speak against an implication, made readable and checked without the solver.

Any values that the stated facts allow would do; those shown are thresholds of the clauses, points
half-way between two of them, or the solver's own values rounded, whichever still is an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import z3

from kcdsl.ir.formulas import terms_of, walk
from kcdsl.ir.printer import region_text, term_text
from kcdsl.ir.terms import (
    Abs,
    AllOf,
    Arith,
    Drift,
    HasFields,
    Metric,
    NoFlip,
    NoneOf,
    Norm,
    Number,
    Program,
    Statistic,
    Term,
)
from kcdsl.metrics import find_metric
from kcdsl.verdict.difference import Extent, Witness, WitnessValue
from kcdsl_backends.smt.axioms import Quantity
from kcdsl_backends.smt.claims import Claim, quantified
from kcdsl_backends.smt.difference.evaluation import Assignment, keeps
from kcdsl_backends.smt.implication import Refuted
from kcdsl_backends.smt.session import Session
from kcdsl_backends.smt.slices import example, request_text
from kcdsl_backends.smt.solver import Expression, Outcome, real
from kcdsl_backends.smt.translation import Flag, NormKey
from kcdsl_certs.reals import real_text


@dataclass(frozen=True, slots=True)
class Sides:
    """What the two contracts are called in a witness."""

    accepts: str
    refuses: str
    extent: Extent = Extent.CONTRACT


def witness_of(
    program: Program, refuted: Refuted, sides: Sides, about: frozenset[str] | None = None
) -> Witness | None:
    """Return values that keep the premises and not the claim; None where none can be shown.

    Of the premises, only what clauses named in `about` speak of is shown (None: all of them).
    """
    session, claim = refuted.session, refuted.claim
    if refuted.share is not None:
        return _of_budget(program, refuted, refuted.share, sides)
    goals = [session.fails[claim.name], *(session.holds[p.name] for p in refuted.premises)]
    spoken = [p for p in refuted.premises if about is None or p.clause.id in about]
    found = _values(session, [claim, *spoken], goals)
    if found is None:
        return None
    assignment, shown = found
    kept = [keeps(p.clause.require, p.slice, assignment) for p in refuted.premises]
    if not all(kept) or keeps(claim.clause.require, claim.slice, assignment):
        return None
    of = f"the slice {claim.slice}" if claim.slice else _places(claim)
    if claim.unit:
        of = f"every {_unit(claim)} of {of}"
    return _witness(program, claim, spoken, sides, of, assignment, shown)


def _of_budget(program: Program, refuted: Refuted, share: Fraction, sides: Sides) -> Witness | None:
    """Return units that fail a claim and keep every premise that may not fail of as many; None
    where those that fail must differ from each other."""
    session, claim = refuted.session, refuted.claim
    kept = [p for p in refuted.premises if p.rate < share]
    goals = [session.fails[claim.name], *(session.holds[p.name] for p in kept)]
    found = _values(session, [claim, *kept], goals)
    if found is None:
        return None
    assignment, shown = found
    if not all(keeps(p.clause.require, p.slice, assignment) for p in kept):
        return None
    if keeps(claim.clause.require, claim.slice, assignment):
        return None
    of = f"{real_text(share * 100)}% of the {claim.unit} of the slice {claim.slice}"
    return _witness(program, claim, (), sides, of, assignment, shown)


def _witness(
    program: Program,
    claim: Claim,
    premises: Sequence[Claim],
    sides: Sides,
    of: str,
    assignment: Assignment,
    shown: _Shown,
) -> Witness:
    values = [_quantity_value(q, assignment.quantities[q]) for q in shown.quantities]
    for key in shown.norms:
        values += _norm_values(key, assignment)
    lacking = [str(key[1]) for key in shown.flags if len(key) == 2 and not assignment.flags[key]]
    flips = [
        f"{_first(key)} at {key[0]}"
        for key in shown.flags
        if len(key) == 3 and not assignment.flags[key]
    ]
    return Witness(
        sides.accepts,
        sides.refuses,
        claim.clause.id,
        of,
        tuple(dict.fromkeys(values)),
        tuple(lacking),
        tuple(flips),
        _request(program, claim, premises),
        sides.extent,
        claim.unit or "slices",
    )


def _unit(claim: Claim) -> str:
    return claim.unit.removesuffix("s")


def _places(claim: Claim) -> str:
    regions = dict.fromkeys(region_text(part.region) for part in quantified(claim.clause))
    return f"an input of {', '.join(regions)}"


def _first(flag: Flag) -> str:
    _, block, k = flag
    return (
        f"the likeliest token of {block} changes" if k == 1 else f"the first {k} of {block} change"
    )


def _request(program: Program, claim: Claim, premises: Sequence[Claim]) -> str | None:
    """Return a request of the claim's slice, outside the slices of the premises if it can be."""
    own = _slices(claim)
    if not own:
        return None
    where = program.slice(own[0]).where
    names = dict.fromkeys(name for p in premises for name in _slices(p) if name != own[0])
    outside = [NoneOf(program.slice(name).where) for name in names]
    found = example(AllOf((where, *outside))) or example(where)
    return request_text(found) if found else None


def _slices(claim: Claim) -> list[str]:
    if claim.slice:
        return [claim.slice]
    return [part.region.slice for part in quantified(claim.clause)]


# --- values --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shown:
    """What the clauses in question speak of, in the order of their words."""

    quantities: tuple[Quantity, ...]
    norms: tuple[NormKey, ...]
    flags: tuple[Flag, ...]


def _values(
    session: Session, claims: Sequence[Claim], goals: Sequence[Expression]
) -> tuple[Assignment, _Shown] | None:
    """Return readable values that satisfy goals and all facts."""
    translator, fixed = session.translator, list(goals)
    outcome, model = session.solver.model(*fixed)
    if outcome is not Outcome.SAT or model is None:
        return None
    shown = _shown(session, claims)
    numbers = sorted({n for claim in claims for n in _numbers(claim)})
    variables = [translator.quantities[q] for q in shown.quantities]
    for key in shown.norms:
        least, some, largest = translator.norms[key]
        level = (least == some, some == largest)  # one number where it can be
        if session.solver.model(*fixed, *level)[0] is Outcome.SAT:
            fixed += level
        variables += [largest, least, some]
    for variable in variables:
        own = _fraction(model, variable)
        for candidate in _candidates(numbers, own):
            pinned = variable == real(candidate, translator.context)
            outcome, found = session.solver.model(*fixed, pinned)
            if outcome is Outcome.SAT and found is not None:
                model = found
                fixed.append(pinned)
                break
    quantities = {q: _fraction(model, v) for q, v in translator.quantities.items()}
    norms = {k: tuple(_fraction(model, v) for v in ends) for k, ends in translator.norms.items()}
    needed = [quantities[q] for q in shown.quantities]
    needed += [value for key in shown.norms for value in norms[key]]
    if any(value is None for value in needed):
        return None  # not a fraction
    flags = {
        key: z3.is_true(model.eval(v, model_completion=True)) for key, v in translator.flags.items()
    }
    exact = {q: v for q, v in quantities.items() if v is not None}
    ends = {
        k: (a, b, c)
        for k, (a, b, c) in norms.items()
        if a is not None and b is not None and c is not None
    }
    return Assignment(translator, exact, ends, flags), shown


def _fraction(model: z3.ModelRef, variable: Expression) -> Fraction | None:
    value = model.eval(variable, model_completion=True)
    if not z3.is_rational_value(value):
        return None
    return Fraction(value.numerator_as_long(), value.denominator_as_long())


def _candidates(numbers: Sequence[Fraction], own: Fraction | None) -> Iterator[Fraction]:
    """Yield values that read well, best first."""
    yield from reversed(numbers)
    yield from ((a + b) / 2 for a, b in pairwise(numbers))
    for number in reversed(numbers):
        yield from (2 * number, number / 2)
    yield from (Fraction(0), Fraction(1))
    if own is not None:
        for digits in (1, 2, 3, 6):
            yield Fraction(f"{float(own):.{digits}g}")


def _numbers(claim: Claim) -> Iterator[Fraction]:
    return (t.value for t in terms_of(claim.clause.require) if isinstance(t, Number))


def _shown(session: Session, claims: Sequence[Claim]) -> _Shown:
    translator = session.translator
    quantities: dict[Quantity, None] = {}
    for claim in claims:
        for term in terms_of(claim.clause.require):
            if isinstance(term, Statistic | Metric):
                for side in ("largest", "smallest"):
                    quantity = translator.quantity(term, claim.slice, side)
                    if quantity in translator.quantities:
                        quantities.setdefault(quantity)
    first = claims[0].clause
    regions = [part.region for part in quantified(first)]
    spoken = {
        (t.of.block, t.of.measured, t.kind)
        for claim in claims
        for t in terms_of(claim.clause.require)
        if isinstance(t, Norm)
    }
    norms = [k for k in translator.norms if k[0].region in regions and k[1:] in spoken]
    fields = [
        (claim.slice, name)
        for claim in claims
        for part in walk(claim.clause.require)
        if isinstance(part, HasFields)
        for name in part.fields
    ]
    stable = {
        (part.block, part.k)
        for claim in claims
        for part in walk(claim.clause.require)
        if isinstance(part, NoFlip)
    }
    flags: list[Flag] = [key for key in dict.fromkeys(fields) if key in translator.flags]
    flags += [
        key
        for key in translator.flags
        if len(key) == 3 and key[1:] in stable and getattr(key[0], "region", None) in regions
    ]
    return _Shown(tuple(quantities), tuple(norms), tuple(flags))


# --- words ---------------------------------------------------------------------------------------


def _quantity_value(quantity: Quantity, value: Fraction) -> WitnessValue:
    return WitnessValue(str(quantity), in_units(value, _dimension(quantity.term)), _exact(value))


def _norm_values(key: NormKey, assignment: Assignment) -> list[WitnessValue]:
    witness, block, measured, kind = key
    name = f"{term_text(Norm(kind, Drift(block, 'x', measured)))} at {witness}"
    least, _, largest = assignment.norms[key]
    if measured or least == largest:
        return [WitnessValue(name, _plain(largest), _exact(largest))]
    return [
        WitnessValue(f"largest {name}", _plain(largest), _exact(largest)),
        WitnessValue(f"least {name}", _plain(least), _exact(least)),
    ]


def _exact(value: Fraction) -> str:
    return f"{value.numerator}/{value.denominator}"


def _dimension(term: Term) -> str:
    match term:
        case Statistic("rate"):
            return "ratio"
        case Statistic(_, of) | Abs(of):
            return _dimension(of)
        case Metric(name):
            definition = find_metric(name)
            return "1" if definition is None else str(definition.dimension)
        case Arith("+" | "-", left, _):
            return _dimension(left)
        case _:
            return "1"


_SCALES: Mapping[str, tuple[tuple[Fraction, str], ...]] = {
    "s": (
        (Fraction(1), "s"),
        (Fraction(1, 10**3), "ms"),
        (Fraction(1, 10**6), "us"),
        (Fraction(1, 10**9), "ns"),
    ),
    "B": (
        (Fraction(2**30), "GiB"),
        (Fraction(2**20), "MiB"),
        (Fraction(2**10), "KiB"),
        (Fraction(1), "B"),
    ),
    "ratio": ((Fraction(1, 100), "%"),),
    "tok/s": ((Fraction(1), "tok/s"),),
    "nat": ((Fraction(1), "nats"),),
}


def in_units(value: Fraction, dimension: str) -> str:
    """Write a value in base units of a dimension with a unit that suits its size."""
    scales = _SCALES.get(dimension)
    if scales is None:
        return _plain(value)
    factor, unit = next(((f, u) for f, u in scales if abs(value) >= f), scales[-1])
    return f"{_plain(value / factor)}{'' if unit == '%' else ' '}{unit}"


def _plain(value: Fraction) -> str:
    """Write an exact number, small ones as people do: 1e-5."""
    exact = real_text(value)
    if "/" in exact or value == 0 or abs(value) >= Fraction(1, 1000):
        return exact
    digits = exact.partition(".")[2]
    leading = len(digits) - len(digits.lstrip("0")) + 1
    mantissa = digits.lstrip("0")
    point = f".{mantissa[1:]}" if len(mantissa) > 1 else ""
    return f"{'-' if value < 0 else ''}{mantissa[0]}{point}e-{leading}"
