"""Limits of a draft from runs of its model: noise of the training kernel, and proved bounds.

The noise is the drift of the training kernel from the same program in the next wider format, and
from itself when requests are batched differently (the noise floor of an evaluation).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from tempfile import TemporaryDirectory

from kcdsl.api.contract import Contract
from kcdsl.api.evaluation import EvaluateSettings, measured
from kcdsl.api.verification import VerifySettings, verify
from kcdsl.diagnostics import Refusal, codes
from kcdsl.draft.clauses import USUAL, DraftClause
from kcdsl.ir.terms import ONNX, KernelRef
from kcdsl.model.presets import resolve
from kcdsl.verdict.result import ClauseResult

WIDER = {"bfloat16": "float32", "float16": "float32", "float32": "float64", "float64": "float64"}
"""The next wider format."""
ROOM = 3
"""The limit of a measured clause as a multiple of its noise."""
HEADROOM = Fraction(5, 4)
"""The limit of a proved clause as a multiple of its proved bound."""


def measured_clauses(
    contract: Contract,
    clauses: Iterable[DraftClause],
    evaluating: EvaluateSettings,
    verifying: VerifySettings,
) -> tuple[DraftClause, ...]:
    """Return the clauses of a draft, whose contract is already written, with limits from runs.

    A clause keeps its usual limit where there is no noise, where noise cannot be measured (ONNX
    files with quantisers), and where no bound is found. Raises Refusal if the model does not run.
    """
    clauses = tuple(clauses)
    program, wide = contract.program, WIDER[resolve(contract.program.train).compute]
    numerics = (("compute", wide), ("preset", "torch-eager"))
    reference = KernelRef("torch.eager", numerics, program.train.span)
    rows: dict[str, list[ClauseResult]] = {}
    try:
        report = measured(contract, evaluating, replace(program, infer=reference))
    except Refusal as refusal:
        if refusal.diagnostics[0].code is not codes.NUMERICS or program.model.architecture != ONNX:
            raise
    else:  # an ONNX file with quantisers cannot run in a wider format
        for row in report.clauses:
            rows.setdefault(row.clause, []).append(row)
    bounds = _bounds(contract, [c.id for c in clauses if c.block is not None], verifying)
    return tuple(
        _noisy(clause, rows, wide) if clause.block is None else _proved(clause, bounds)
        for clause in clauses
    )


def _bounds(contract: Contract, names: list[str], settings: VerifySettings) -> Mapping[str, float]:
    if not names:
        return {}
    with TemporaryDirectory(prefix="kcdsl-init-") as folder:
        found = verify(contract, replace(settings, clauses=names, output=folder))
    return {outcome.goal.clause.id: outcome.bound for outcome in found.outcomes}


def _proved(clause: DraftClause, bounds: Mapping[str, float]) -> DraftClause:
    bound = bounds.get(clause.id, math.inf)
    if not 0 < bound < math.inf:
        return replace(clause, note=f"{USUAL}; no bound was found")
    limit = _rounded(Fraction(bound) * HEADROOM, up=True)
    return replace(clause, limit=limit, note=f"the bound proved for this draft is {bound:.3g}")


def _noisy(clause: DraftClause, rows: Mapping[str, list[ClauseResult]], wide: str) -> DraftClause:
    if not clause.op:
        return clause
    lower = clause.op == "<="
    seen = [value for row in rows.get(clause.id, []) for value in _values(row)]
    if not seen:
        return replace(clause, note=f"{USUAL}; it could not be measured")
    worst = max(seen) if lower else min(seen)
    if clause.timed:
        limit = Fraction(worst) * ROOM if lower else Fraction(worst) / ROOM
        note = f"{ROOM} times worse than the program in {wide} on this machine"
        return replace(clause, limit=_rounded(limit, up=lower), note=note)
    best = 0 if lower else 1
    noise = Fraction(worst) - best
    if noise == 0:
        return replace(clause, note=f"{USUAL}; no noise of the training kernel was seen")
    limit = best + ROOM * noise
    if not lower and limit <= 0:
        return replace(clause, note=f"{USUAL}; the noise of the training kernel leaves nothing")
    limit = 100 * limit if clause.unit == "%" else limit
    note = f"{ROOM} times the noise of the training kernel, {float(abs(noise)):.2g}"
    return replace(clause, limit=_rounded(limit, up=lower), note=note)


def _values(row: ClauseResult) -> list[float]:
    """Return the numbers of a row: its value, the confidence limit of a sample, the noise floor."""
    floor = None if row.context is None else row.context.noise_floor
    found = [row.value, row.high if row.op == "<=" else row.low]
    if row.evidence == "census":
        found = [row.value]
    found.append(None if floor is None else floor.value)
    return [value for value in found if value is not None and math.isfinite(value)]


def _rounded(value: Fraction, *, up: bool) -> str:
    """Return a positive number rounded up or down to three digits."""
    digits = Context(prec=3, rounding=ROUND_CEILING if up else ROUND_FLOOR)
    exact = digits.divide(Decimal(value.numerator), Decimal(value.denominator)).normalize()
    return f"{exact:f}" if Fraction(1, 1000) <= value < 10**6 else f"{exact:e}"
