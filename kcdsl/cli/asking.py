"""What the options of `kcdsl verify` ask for beyond the contract: regions, chances, domains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fractions import Fraction

    from kcdsl.route.goals import Goal


def weights_within(text: str) -> Fraction:
    """Return the size of a region around the weights; refuse what is no number or too large."""
    from fractions import Fraction

    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import WEIGHTS_REGION
    from kcdsl_certs.clauses import WIDEST
    from kcdsl_certs.reals import parse_real
    from kcdsl_certs.rejected import Rejected

    try:
        rho = parse_real(text)
    except Rejected:
        rho = Fraction(0)
    if not 0 < rho <= WIDEST:
        raise refuse(
            WEIGHTS_REGION,
            f"--weights: {text[:40]!r} is no size of a region around the weights",
            help=f"a number above 0 and up to {WIDEST}, such as 1e-4 or 1/1024",
        )
    return rho


def with_chance(goals: Sequence[Goal], text: str) -> tuple[Goal, ...]:
    """Return the goals with another probability; refuse what is none, and where none is asked."""
    from dataclasses import replace
    from fractions import Fraction

    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import NO_PROBABILITY
    from kcdsl_certs.reals import parse_real
    from kcdsl_certs.rejected import Rejected
    from kcdsl_certs.verdicts import LARGEST_ALPHA, LEAST_ALPHA

    try:
        alpha = parse_real(text)
    except Rejected:
        alpha = Fraction(0)
    if not LEAST_ALPHA <= alpha <= LARGEST_ALPHA:
        raise refuse(
            NO_PROBABILITY,
            f"--alpha: {text[:40]!r} is no probability of a failure",
            help=f"a number from 1e-30 to {LARGEST_ALPHA}, such as 1e-9",
        )
    if all(goal.alpha is None for goal in goals):
        raise refuse(
            NO_PROBABILITY,
            "--alpha: no clause that is decided here leaves anything to chance",
            help="a clause does with `evidence: probabilistic`",
        )
    return tuple(g if g.alpha is None else replace(g, alpha=alpha) for g in goals)


def states_within(text: str) -> Fraction:
    """Return how far beyond their regions states may lie; refuse what is no number."""
    from fractions import Fraction

    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import WEIGHTS_REGION
    from kcdsl_certs.reals import parse_real
    from kcdsl_certs.rejected import Rejected

    try:
        reach = parse_real(text)
    except Rejected:
        reach = Fraction(-1)
    if not 0 <= reach < 2**100:
        raise refuse(
            WEIGHTS_REGION,
            f"--states: {text[:40]!r} is no distance from the states of a region",
            help="a number that is not negative, such as 1e-3",
        )
    return reach


def domains(text: str, backend: str, *, chain: bool) -> tuple[str, ...]:
    """Return the domains that are named; refuse others than those that the backend has."""
    from difflib import get_close_matches

    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import NO_DOMAIN
    from kcdsl.route.catalogue import catalogue

    known = next((spec.domains for spec in catalogue() if spec.name == backend), ())
    if chain or not known:
        what = "a chain" if chain else f"backend {backend!r}"
        raise refuse(
            NO_DOMAIN,
            f"--domains: {what} leaves no choice of domains",
            help="leave --domains out" + (", or --chain" if chain else ""),
        )
    named = tuple(name.strip() for name in text.split(","))
    for name in named:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise refuse(
                NO_DOMAIN,
                f"--domains: there is no domain {name[:40]!r}",
                help=f"did you mean {near[0]!r}?" if near else f"domains: {', '.join(known)}",
            )
    if len(set(named)) != len(named):
        raise refuse(
            NO_DOMAIN, f"--domains: {text[:80]!r} names a domain twice", help="name each once"
        )
    return tuple(name for name in known if name in named)
