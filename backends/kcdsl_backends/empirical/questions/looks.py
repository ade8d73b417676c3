"""Decisions on growing counts: the rules by which promotions decide on traffic."""

from __future__ import annotations

from fractions import Fraction

from kcdsl.ir.terms import Clause, EvidenceKind, Program
from kcdsl_backends.empirical.metrics.user import measures_of
from kcdsl_backends.empirical.statistics import rates
from kcdsl_backends.empirical.statistics.estimates import Confidence
from kcdsl_backends.empirical.table.requirements import allowed_rate, metrics_of


class AnytimeRules:
    """Decides counts by the e-process: at every look, for any number and any stopping rule.

    It is the `LookRules` of `kcdsl.release.promotion`.
    """

    def allowed_rate(self, clause: Clause) -> Fraction | None:
        """Return the share of units that may be beyond; 0 if none may, None if units are not
        counted."""
        return allowed_rate(clause)

    def varies(self, clause: Clause, program: Program) -> bool:
        """Return whether values vary between runs of the same requests, or the clause demands a
        sample."""
        known = measures_of(program)
        noisy = any(known[name].noisy for name in metrics_of(clause.require) if name in known)
        return noisy or clause.evidence is EvidenceKind.SAMPLE

    def shows_below(self, k: int, n: int, rate: Fraction, error: Fraction) -> bool:
        """Return whether k of n show a rate of at most `rate`, with one `error` for all looks."""
        return rates.shows_below(k, n, rate, Confidence(error, anytime=True))

    def shows_above(self, k: int, n: int, rate: Fraction, error: Fraction) -> bool:
        """Return whether k of n show a rate above `rate`, with one `error` for all looks."""
        return rates.shows_above(k, n, rate, Confidence(error, anytime=True))


RULES = AnytimeRules()
