"""The verdicts that the numbers of a clause result support, with binomial tails."""

from __future__ import annotations

from decimal import Context, Decimal, DivisionByZero, InvalidOperation, Overflow
from fractions import Fraction

from kcdsl_certs.encoding.reals import real_text
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.statement.clauses import (
    DOMAINS,
    IMPLIED,
    LOWER,
    UPPER,
    CertifiedClause,
    Evidence,
    Verdict,
    holds,
)

_CONTEXT = Context(
    prec=50,
    Emin=-(10**9),
    Emax=10**9,
    traps=[DivisionByZero, InvalidOperation, Overflow],
)
_MARGIN = Decimal("1e-30")
"""A relative bound; the error of a sum of at most 10^7 terms of 50 digits is far smaller."""
_MOST_UNITS = 10_000_000


def lower_tail(k: int, n: int, p: Fraction) -> Decimal:
    """Return an upper bound (tight to 1e-30) of P(X <= k) for X ~ Binomial(n, p), 0 < p < 1.

    The Clopper-Pearson upper limit at level α is at most p exactly if this tail is <= α.
    """
    if not (0 <= k <= n and 0 < p < 1) or n > _MOST_UNITS:
        raise Rejected("clause/counts", f"{k} of {n} at a rate of {p}")
    c = _CONTEXT
    one = c.divide(Decimal(p.numerator), Decimal(p.denominator))
    other = c.divide(Decimal(p.denominator - p.numerator), Decimal(p.denominator))
    odds = c.divide(one, other)
    term = c.power(other, n)
    total = term
    for i in range(1, k + 1):
        term = c.multiply(term, c.divide(c.multiply(odds, Decimal(n - i + 1)), Decimal(i)))
        total = c.add(total, term)
    return min(c.multiply(total, c.add(Decimal(1), _MARGIN)), Decimal(1))


def certifies(k: int, n: int, rate: Fraction, alpha: Fraction) -> bool:
    """Return whether k exceedances of n units show a rate below `rate` at level α (one look, fixed
    n).

    Clopper-Pearson: P(X <= k | rate) <= α.
    """
    if k * rate.denominator >= n * rate.numerator:
        return False
    tail = lower_tail(k, n, rate)
    return Fraction(tail) <= alpha


METHODS_OF_RATES = ("clopper-pearson/1",)
"""Methods whose sampled PASSED this package can re-derive from (exceed, n, budget, alpha)."""
ATTACK = "attack/1"
"""The method of a result from concrete runs of a region only."""
MEASURED = ("census/1", "one-sided-limits/1", *METHODS_OF_RATES)
"""The methods of measured results."""
METHODS = {
    Evidence.CENSUS: ("census/1",),
    Evidence.SAMPLE: ("one-sided-limits/1", *METHODS_OF_RATES, ATTACK),
}
LARGEST_ALPHA, LEAST_ALPHA = Fraction(1, 20), Fraction(1, 10**30)


def admissible(clause: CertifiedClause) -> frozenset[Verdict]:
    """Return the verdicts that the numbers of this result support.

    Raises Rejected (`clause/…`) where the record is inconsistent or has no evidence. A result that
    supports PASSED may also be INCONCLUSIVE (a weaker claim); one that shows a violation may not.
    """
    _consistent(clause)
    if clause.evidence.is_proof:
        return _admitted_by_proof(clause)
    census = clause.evidence is Evidence.CENSUS
    admitted = _admitted_by_census(clause) if census else _admitted_by_sample(clause)
    if clause.quantity.is_of_every_run or clause.method == ATTACK:  # runs found by a search
        return (admitted - {Verdict.PASSED}) or _OPEN
    return admitted


_PASS = frozenset({Verdict.PASSED, Verdict.INCONCLUSIVE})
_FAIL = frozenset({Verdict.FAILED})
_OPEN = frozenset({Verdict.INCONCLUSIVE})
_REFUTED = frozenset({Verdict.FAILED, Verdict.INCONCLUSIVE})


def _evidence_fits(clause: CertifiedClause) -> None:
    """Refuse evidence without its required fields, and evidence that the clause cannot have.

    A result for every input has a proof object about a drift or an order, or follows from one; a
    measured result has neither. So there are no proofs about times or traces.
    """
    named, follows = clause.proof is not None, clause.implied_by is not None
    if not clause.evidence.is_proof:
        if named or follows:
            detail = f"{clause.label}: {clause.evidence} evidence has no proof"
            raise Rejected("clause/evidence-kind", detail)
        if clause.method not in METHODS[clause.evidence]:
            detail = f"{clause.label}: {clause.method!r} is no method of {clause.evidence} evidence"
            raise Rejected("clause/method", detail)
        return
    if not named and not follows:
        raise Rejected("clause/proof-missing", f"{clause.label}: a proof is claimed, none is named")
    if named and follows:
        raise Rejected("clause/evidence-kind", f"{clause.label} has both a proof and a chain")
    if named and not clause.quantity.is_of_proofs:
        detail = f"{clause.label}: no proof object is about {clause.quantity}"
        raise Rejected("clause/evidence-kind", detail)
    if follows != (clause.method == IMPLIED) or (named and not is_method_of_proofs(clause.method)):
        detail = f"{clause.label}: {clause.method!r} is no method of such a proof"
        raise Rejected("clause/method", detail)


def is_method_of_proofs(method: str) -> bool:
    """Return whether a method has the form of those of proof objects: their parts in order."""
    name, version = method.removesuffix("/1"), method.endswith("/1")
    parts = name.split("+")
    domains = set(parts) - {"chain"}
    return version and parts == sorted(set(parts)) and bool(domains) and domains <= DOMAINS


def _consistent(clause: CertifiedClause) -> None:
    if clause.n is not None and clause.exceed is not None and clause.exceed > clause.n:
        raise Rejected("clause/counts", f"{clause.label}: {clause.exceed} of {clause.n} exceed")
    if clause.budget is not None and not 0 <= clause.budget < 1:
        raise Rejected("clause/budget", f"{clause.label}: a budget of {real_text(clause.budget)}")
    _evidence_fits(clause)
    if clause.evidence in (Evidence.PROOF_REAL, Evidence.PROBABILISTIC) and not clause.assumptions:
        raise Rejected("clause/assumption-unnamed", f"{clause.label} rests on {clause.evidence}")
    if clause.evidence is Evidence.PROBABILISTIC and clause.proof is not None:
        if clause.alpha is None or not 0 < clause.alpha <= LARGEST_ALPHA:
            raise Rejected("clause/alpha", f"{clause.label}: with what probability does it hold?")
    elif clause.evidence.is_proof and clause.alpha is not None:
        raise Rejected(
            "clause/alpha", f"{clause.label}: {clause.evidence} leaves nothing to chance"
        )
    reached = _reached(clause)
    if clause.bound is not None and reached is not None:
        inside = reached <= clause.bound if clause.op in UPPER else reached >= clause.bound
        if not inside:
            raise Rejected(
                "clause/attack-beyond-bound",
                f"{clause.label}: a run reached {reached!r}, the bound is {clause.bound!r}",
            )


def _reached(clause: CertifiedClause) -> float | None:
    if clause.op in UPPER:
        return clause.low
    return clause.high if clause.op in LOWER else None


def _admitted_by_proof(clause: CertifiedClause) -> frozenset[Verdict]:
    if not clause.is_hard:
        raise Rejected("clause/budget", f"{clause.label}: a proof knows no budget")
    reached = _reached(clause)
    if clause.op == "==":
        return _OPEN
    if clause.bound is not None and holds(Fraction(clause.bound), clause.op, clause.tau):
        return _PASS
    if reached is not None and not holds(Fraction(reached), clause.op, clause.tau):
        return _FAIL
    return _OPEN


def _admitted_by_census(clause: CertifiedClause) -> frozenset[Verdict]:
    if clause.slice_digest is None:
        raise Rejected("clause/census-not-pinned", f"{clause.label}: a census of what? no digest")
    if clause.n is None or clause.n == 0:
        return _OPEN
    if not clause.is_hard:
        return _by_count(clause, clause.n)
    if clause.value is None:
        return _OPEN if clause.exceed is None else (_FAIL if clause.exceed else _PASS)
    if clause.exceed and clause.quantity.is_of_every_unit:
        return _FAIL
    return _PASS if holds(clause.value, clause.op, clause.tau) else _FAIL


def _by_count(clause: CertifiedClause, n: int) -> frozenset[Verdict]:
    if clause.exceed is None or clause.budget is None:
        return _OPEN
    return _PASS if clause.exceed <= clause.budget * n else _FAIL


def _admitted_by_sample(clause: CertifiedClause) -> frozenset[Verdict]:
    """Return the verdicts that a sample supports: on a rate or statistic, never on all units."""
    if clause.n is None or clause.n == 0:
        return _OPEN
    if clause.alpha is not None and not 0 < clause.alpha <= LARGEST_ALPHA:
        raise Rejected("clause/alpha", f"{clause.label}: alpha {real_text(clause.alpha)}")
    if clause.is_hard:
        return _hard_sample(clause)
    if clause.exceed is None or clause.budget is None:
        return _OPEN
    if clause.exceed > clause.budget * clause.n:
        return _REFUTED
    if clause.method not in METHODS_OF_RATES or clause.alpha is None:
        return _OPEN
    if certifies(clause.exceed, clause.n, clause.budget, clause.alpha):
        return _PASS
    return _OPEN


def _hard_sample(clause: CertifiedClause) -> frozenset[Verdict]:
    """Return the verdicts of a hard clause from a sample.

    Zero violations of n show only a rate of about 3/n, so a claim about every unit never passes.
    A mean, a percentile or a ratio passes if its one-sided confidence limit does.
    """
    if clause.value is not None and not holds(clause.value, clause.op, clause.tau):
        return _REFUTED
    if clause.quantity.is_of_every_unit:
        return _REFUTED if clause.exceed else _OPEN
    limit = clause.high if clause.op in UPPER else clause.low if clause.op in LOWER else None
    if clause.alpha is None or limit is None or clause.value is None:
        return _OPEN
    if limit < clause.value if clause.op in UPPER else limit > clause.value:
        raise Rejected("clause/limit", f"{clause.label}: the limit {limit!r} excludes the value")
    return _PASS if holds(Fraction(limit), clause.op, clause.tau) else _OPEN


def check_verdict(clause: CertifiedClause) -> None:
    """Refuse a result whose verdict is not supported by its numbers."""
    admitted = admissible(clause)
    if clause.verdict in admitted:
        return
    if (
        clause.evidence is Evidence.SAMPLE
        and clause.is_hard
        and clause.verdict is Verdict.PASSED
        and admitted == _OPEN
    ):
        raise Rejected(
            "clause/evidence-overstated",
            f"{clause.label}: this sample cannot show it; a clause about every unit needs a "
            "budget, a proof or a census, and a statistic a confidence limit that passes",
        )
    raise Rejected(
        "clause/verdict-contradicts-numbers",
        f"{clause.label} is called {clause.verdict}, its numbers admit "
        f"{' or '.join(sorted(admitted))}",
    )


def overall(clauses: tuple[CertifiedClause, ...]) -> Verdict:
    """Return FAILED if any result failed, else INCONCLUSIVE if any is, or if there is none."""
    verdicts = {c.verdict for c in clauses}
    if Verdict.FAILED in verdicts:
        return Verdict.FAILED
    return Verdict.PASSED if verdicts == {Verdict.PASSED} else Verdict.INCONCLUSIVE
