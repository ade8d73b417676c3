"""Many clauses on many slices, each with its own chance of a false verdict.

"Promote if all hold" is an intersection of claims: whatever is false is accepted with at most its
own error, so passes need no correction (Berger 1982). "Alarm if any is violated" is a union: with
twenty verdicts at 5 % a false alarm is the usual case, so violations are corrected by Holm's
method, which bounds the chance of any false one whatever the dependence between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction


def holm(
    family: int,
    error: Fraction,
    candidates: Iterable[int],
    rejected: Callable[[int, Fraction], bool],
) -> tuple[frozenset[int], Fraction]:
    """Return which candidates are rejected among `family` hypotheses, and the last level used.

    `rejected(i, level)` says whether i is rejected at an error level by itself; what is rejected at
    a level must be at every larger one. Only candidates are asked: those rejected at `error`.
    """
    left, found = set(candidates), set[int]()
    if family < len(left):
        raise ValueError(f"{len(left)} candidates in a family of {family}")
    level = error / max(1, family)
    while left:
        level = error / (family - len(found))
        new = {i for i in sorted(left) if rejected(i, level)}
        if not new:
            break
        left -= new
        found |= new
    return frozenset(found), level


def average_evidence(logarithms: Sequence[float]) -> float:
    """Return ln of the mean of e-values: evidence against all of them, however they depend."""
    if not logarithms:
        raise ValueError("no e-values")
    top = max(logarithms)
    if math.isinf(top):
        return top
    return top + math.log(math.fsum(math.exp(x - top) for x in logarithms) / len(logarithms))
