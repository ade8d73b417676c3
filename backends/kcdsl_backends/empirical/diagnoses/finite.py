"""Evidence that is missing: numbers that are not finite, failed requests, slices without rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.diagnoses.model import outcome
from kcdsl_backends.empirical.table.units import Unit


def finite(units: Sequence[Unit], nonfinite: Mapping[str, int]) -> Precheck:
    """No request may have failed or given NaN or infinity; `nonfinite` counts those by request.

    Numbers that are not finite block; a request that failed is what `failure_rate` counts.
    """
    name = "finite"
    failed = [unit for unit in units if unit.failure is not None]
    if not failed:
        return outcome(name, bool(units), f"{len(units)} requests", 0.0)
    share = len(failed) / len(units)
    spoiled = [unit for unit in failed if nonfinite.get(unit.key)]
    first = (spoiled or failed)[0]
    detail = f"{len(failed)} of {len(units)} requests; {first.key}: {first.failure}"
    return outcome(name, False, detail, share, blocking=bool(spoiled))


def empty_slice(slices: Mapping[str, int]) -> Precheck:
    """Every slice must have a row; a clause on one that has none is invalid evidence."""
    empty = sorted(name for name, rows in slices.items() if rows == 0)
    detail = f"{', '.join(empty)}: no request" if empty else f"{len(slices)} slices"
    return outcome("empty_slice", not empty, detail, float(len(empty)))
