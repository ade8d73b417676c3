"""The checker's interval rules in rational arithmetic: its float64 boxes must enclose the result.

Supports linear, matmul and the piecewise linear operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from unittest.mock import patch

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck import Outcome, recheck
from kcdsl_certs.recheck.documents.document import Case, Ends, Functional, Proof
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval.tensors import Tensor
from kcdsl_certs.recheck.ops.attention.cache import refuse_uncached
from tests.support.rationals import elementwise, linear, moves
from tests.support.rationals.cells import Cells, Pair, add, ceiling, root, sub
from tests.support.rationals.state import DriftProblem, Known, pinned
from tests.support.rationals.weights import RationalParameters

_RULES: dict[str, tuple[Callable[[DriftProblem, Node, list[Known]], Known], int, int]] = {
    "input": (moves.input_rule, 0, 0),
    "param": (moves.param_rule, 0, 0),
    "constant": (moves.constant_rule, 0, 0),
    "embedding": (moves.embedding_rule, 1, 1),
    "cast": (elementwise.cast, 1, 1),
    "linear": (linear.linear_rule, 2, 3),
    "matmul": (linear.matmul_rule, 2, 2),
    "add": (elementwise.pairwise(add), 2, 2),
    "sub": (elementwise.pairwise(sub), 2, 2),
    "mul": (elementwise.mul_rule, 2, 2),
    "scale": (elementwise.scaled("factor"), 1, 1),
    "divide": (elementwise.scaled("divisor"), 1, 1),
    "shift": (elementwise.shift, 1, 1),
    "neg": (elementwise.neg, 1, 1),
    "relu": (elementwise.relu, 1, 1),
    "view": (moves.view_rule, 1, 1),
    "concat": (moves.concat_rule, 1, 10_000),
}

_OPS_OF_ROLE = {"probabilities": ("softmax",), "context": ("matmul",)}


def recheck_exactly(proof: bytes, checkpoint: Path) -> Outcome:
    """Check a proof as `recheck` does, with its cases derived in rational arithmetic."""
    with patch("kcdsl_certs.recheck.check.Derivation", Rational):
        return recheck(proof, checkpoint)


class Rational:
    """Derives the cases of one proof exactly."""

    def __init__(
        self, proof: Proof, tensors: Mapping[str, Tensor], over_rows: object | None = None
    ) -> None:
        """Check the parameters; raises what `RationalParameters` raises. No passes are divided."""
        for block in proof.graphs.values():
            refuse_uncached(block, proof.train, proof.infer)
        self._proof = proof
        self._parameters = RationalParameters(tensors, proof.parameters)

    def derive(
        self, case: Case, held: object | None = None
    ) -> tuple[float, dict[str, tuple[float, float]]]:
        """Return the bound of a case and the largest T and D of every node, rounded up.

        `held` is ignored, because intervals use boxes alone. Raises: Rejected: "document/domain"
        for a case of another domain than interval.
        """
        if case.domain != "interval":
            raise Rejected("document/domain", f"no exact arithmetic for {case.domain!r}")
        if case.region.kind == "rows":
            raise Rejected("document/region", "no exact arithmetic for sequences of any length")
        states = self.states(case)
        sizes = {n: (ceiling(max(s.t.mags)), ceiling(max(s.d.mags))) for n, s in states.items()}
        output = states[self._proof.graphs[case.graph].output]
        return _bound(self._proof.functional, output), sizes

    def link(self, case: Case) -> tuple[float, dict[str, tuple[float, float]], Ends]:
        """Return the largest drift of a case, its sizes, and the boxes of T and D of its output."""
        bound, sizes = self.derive(case)
        output = self.states(case)[self._proof.graphs[case.graph].output]
        return bound, sizes, (*_ends(output.t), *_ends(output.d))

    def interface(
        self, case: Case, held: object | None, *, wanted: bool
    ) -> tuple[float, dict[str, tuple[float, float]], Ends, None, None]:
        """Return the result of `link` without ellipsoids and distances of readings.

        The interval rules here use neither.
        """
        return (*self.link(case), None, None)

    def states(self, case: Case) -> dict[str, Known]:
        """Return every node's enclosures."""
        block = self._proof.graphs[case.graph]
        problem = DriftProblem(
            block,
            self._proof.train,
            self._proof.infer,
            self._parameters,
            {n.name: n.attrs.text("key") for n in block.nodes if n.op == "param"},
            block.weights,
            (case.region.centre, case.region.radius),
            case.region.drift,
            case.region.weights,
        )
        found: dict[str, Known] = {}
        for node in block.nodes:
            try:
                found[node.name] = _apply(problem, node, [found[name] for name in node.inputs])
            except Rejected as rejection:
                raise rejection.at(f"node {node.name[:80]!r}") from None
        return found


def _ends(cells: Cells) -> tuple[list[float], list[float]]:
    """Return the ends, rounded outward."""
    return [-ceiling(-lo) for lo, _ in cells.pairs], [ceiling(hi) for _, hi in cells.pairs]


def _apply(problem: DriftProblem, node: Node, inputs: list[Known]) -> Known:
    if node.op not in _RULES:
        raise Rejected("rule/unknown-op", f"there is no exact rule for {node.op[:80]!r}")
    rule, least, most = _RULES[node.op]
    if not least <= len(inputs) <= most:
        raise Rejected("graph/field", f"{node.op} with {len(inputs)} inputs")
    if node.role in _OPS_OF_ROLE and node.op not in _OPS_OF_ROLE[node.role]:
        raise Rejected("graph/field", f"{node.op} in the role {node.role!r}")
    problem = pinned(problem, node)
    for kernel in (problem.train, problem.infer):
        kernel.refuse_wide(problem.block.named, node)
    value = rule(problem, node, inputs)
    if value.t.shape != node.shape:
        raise Rejected("graph/shape", f"the shape is {list(value.t.shape)}")
    return value


def _bound(functional: Functional, output: Known) -> float:
    """Return an upper bound of the functional; for no_flip 0 if the top k stay, else infinity."""
    n = output.d.shape[-1]

    def rows(cells: Cells) -> list[tuple[Pair, ...]]:
        return [cells.pairs[k : k + n] for k in range(0, len(cells.pairs), n)]

    match functional.kind:
        case "inf":
            return ceiling(max(output.d.mags))
        case "2":
            squares = [sum(max(-lo, hi) ** 2 for lo, hi in row) for row in rows(output.d)]
            return ceiling(root(Fraction(max(squares))))
        case "span":
            spans = [max(p[1] for p in row) - min(p[0] for p in row) for row in rows(output.d)]
            return ceiling(max(spans))
    if functional.k >= n:
        raise Rejected("document/field", f"no_flip {functional.k} needs more columns")
    for t, i in zip(rows(output.t), rows(output.i), strict=True):
        chosen = set(sorted(range(n), key=lambda k: t[k][0])[n - functional.k :])
        for row in (t, i):
            least = min(row[k][0] for k in chosen)
            if not least > max(row[k][1] for k in range(n) if k not in chosen):
                return math.inf
    return 0.0
