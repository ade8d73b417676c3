"""Complete decision of small problems by z3, in rational arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from scipy import sparse

from kcdsl_backends.vnnlib.bounds import NodeBox
from kcdsl_backends.vnnlib.problem import InputRegion, QueryProblem
from kcdsl_backends.vnnlib.program import Affine, ProgramBlock

_MOST_SPLITS = 64
_MOST_ENTRIES = 20_000
_FREE = frozenset({"input", "linear", "factor"})
_KNOWN = frozenset({
    *("linear", "relu", "difference", "factor", "mul", "power", "reciprocal", "floor", "ceil"),
    *("truncate", "positive", "zero", "select"),
})  # fmt: skip


def solved(
    problem: QueryProblem, region: InputRegion, ends: Sequence[NodeBox] | None, seconds: float
) -> tuple[str, list[Fraction] | None]:
    """Decide with z3 whether a region has a point: "sat" with its input, "unsat", or "unknown".

    `ends` are boxes of every block on the region. The answer for large problems is "unknown".
    """
    if seconds < 0.05 or not _small(problem, ends):
        return "unknown", None
    import z3

    solver = z3.Solver()
    solver.set("timeout", max(1, int(seconds * 1000)))
    values = _values(z3, problem, region, ends, solver)
    if values is None:
        return "unknown", None
    sums = _sums(problem.sums, values)
    cases = []
    for one in region.conjunctions:
        pairs = zip(one.rows, one.relations, strict=True)
        cases.append(z3.And([_compared(sums[row], relation) for row, relation in pairs]))
    solver.add(z3.Or(cases))
    try:
        answer = solver.check()
    except z3.Z3Exception:
        return "unknown", None
    if answer == z3.unsat:
        return "unsat", None
    if answer != z3.sat:
        return "unknown", None
    model, point = solver.model(), list[Fraction]()
    for i in range(problem.program.blocks[0].size):
        found = model.eval(z3.Real(f"x{i}"), model_completion=True)
        if not z3.is_rational_value(found):
            found = found.approx(20)
        point.append(Fraction(found.numerator_as_long(), found.denominator_as_long()))
    return "sat", point


def _small(problem: QueryProblem, ends: Sequence[NodeBox] | None) -> bool:
    splits = 0
    for index, block in enumerate(problem.program.blocks[1:], 1):
        if block.kind not in _KNOWN:
            return False
        if block.kind not in _FREE:
            box = None if ends is None else ends[index]
            splits += block.size if box is None else int((box.lo < box.hi).sum())
    entries = sum(a.entries for b in problem.program.blocks for a in b.operands)
    return splits <= _MOST_SPLITS and entries <= _MOST_ENTRIES


def _number(z3: Any, value: Fraction) -> Any:
    return z3.Q(value.numerator, value.denominator)


def _sums(a: Affine, values: Mapping[int, Sequence[Any]]) -> list[Any]:
    """Return sums as z3 terms."""
    import z3

    found = []
    held = {b: sparse.csr_array(m) for b, m in a.terms.items()}
    for row in range(a.size):
        parts = [_number(z3, Fraction(float(a.constant[row])))]
        for block, m in held.items():
            for place in range(m.indptr[row], m.indptr[row + 1]):
                factor = Fraction(float(m.data[place]))
                if factor:
                    parts.append(_number(z3, factor) * values[block][m.indices[place]])
        found.append(z3.Sum(parts))
    return found


def _compared(value: Any, relation: str) -> Any:
    match relation:
        case "<=":
            return value <= 0
        case "<":
            return value < 0
        case "==":
            return value == 0
    return value != 0


def _values(
    z3: Any,
    problem: QueryProblem,
    region: InputRegion,
    ends: Sequence[NodeBox] | None,
    solver: Any,
) -> dict[int, list[Any]] | None:
    """Return variables for the elements of every block and assert their definitions."""
    program = problem.program
    x = [z3.Real(f"x{i}") for i in range(program.blocks[0].size)]
    for i, (lo, hi) in enumerate(zip(region.lo, region.hi, strict=True)):
        if lo is not None:
            solver.add(x[i] >= _number(z3, lo))
        if hi is not None:
            solver.add(x[i] <= _number(z3, hi))
        if problem.whole[i]:
            solver.add(z3.IsInt(x[i]))
    values: dict[int, list[Any]] = {0: x}
    for index, block in enumerate(program.blocks[1:], 1):
        operands = [_sums(a, values) for a in block.operands]
        terms = []
        for i in range(block.size):
            value = _element_term(z3, block, i, [o[i] for o in operands])
            if value is None:
                return None
            # a variable for each number keeps the terms of later blocks small
            term = z3.Real(f"b{index}_{i}")
            solver.add(term == value)
            if block.kind == "reciprocal":
                solver.add(operands[0][i] != 0)
            if ends is not None:
                for end, above in ((ends[index].lo[0, i], True), (ends[index].hi[0, i], False)):
                    if np.isfinite(end):
                        bound = _number(z3, Fraction(float(end)))
                        solver.add(term >= bound if above else term <= bound)
            terms.append(term)
        values[index] = terms
    return values


def _element_term(z3: Any, block: ProgramBlock, i: int, operands: Sequence[Any]) -> Any:
    """Return one element of a block as a z3 term; None if its kind has none."""
    x, zero = operands[0], z3.RealVal(0)
    match block.kind:
        case "linear":
            return x
        case "relu":
            return z3.If(x > 0, x, zero)
        case "difference":
            moved = x + operands[1]
            return z3.If(moved > 0, moved, zero) - z3.If(x > 0, x, zero)
        case "factor":
            factor = block.value[i]
            factor = factor if isinstance(factor, Fraction) else factor.exact
            return None if factor is None else x * _number(z3, factor)
        case "mul":
            return x * operands[1]
        case "power":
            return z3.Product([x] * int(block.value))
        case "reciprocal":
            return 1 / x
        case "floor":
            return z3.ToReal(z3.ToInt(x))
        case "ceil":
            return -z3.ToReal(z3.ToInt(-x))
        case "truncate":
            return z3.If(x >= 0, z3.ToReal(z3.ToInt(x)), -z3.ToReal(z3.ToInt(-x)))
        case "positive":
            return z3.If(x > 0, z3.RealVal(1), zero)
        case "zero":
            return z3.If(x == 0, z3.RealVal(1), zero)
        case "select":
            return z3.If(x > 0, operands[1], operands[2])
    return None
