"""Derive the bound of a case with outward-rounded doubles, in the domains that it names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine_walk import Pair, pair
from kcdsl_certs.recheck.bounds_walk import derive
from kcdsl_certs.recheck.documents.document import Apart, Case, Ends, Proof
from kcdsl_certs.recheck.graphs.any_length import marks_of
from kcdsl_certs.recheck.graphs.graph import Array, Block
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import Box
from kcdsl_certs.recheck.interval.parameters import Parameters
from kcdsl_certs.recheck.interval.served import Served
from kcdsl_certs.recheck.interval.state import (
    DriftProblem,
    Held,
    OverRows,
    Own,
    Rows,
    State,
    in_turn,
    numeric,
)
from kcdsl_certs.recheck.interval.tensors import Tensor
from kcdsl_certs.recheck.interval_walk import magnitudes, propagate
from kcdsl_certs.recheck.numerics.formats import Floats
from kcdsl_certs.recheck.ops.attention.cache import refuse_uncached
from kcdsl_certs.recheck.ops.leaves import table
from kcdsl_certs.recheck.ops.table import POINTWISE
from kcdsl_certs.recheck.output import bound, interface_ellipsoids, of_drift, of_rows, stays
from kcdsl_certs.recheck.split_walk import derive_splits


class Derivation:
    """Derives the cases of one proof."""

    def __init__(
        self,
        proof: Proof,
        tensors: Mapping[str, Tensor],
        served: Served | None = None,
        over_rows: OverRows = in_turn,
    ) -> None:
        """Check the parameters; raises what `Parameters` raises."""
        if not float(np.ldexp(np.ones(1), -1022)[0] * np.full(1, 0.5)[0]) > 0:
            raise Rejected("internal", "this process flushes subnormal numbers to zero")
        for block in proof.graphs.values():
            refuse_uncached(block, proof.train, proof.infer)
        self._proof, self._over_rows = proof, over_rows
        self._parameters = Parameters(tensors, proof.parameters, served, _transposed(proof))

    def derive(
        self, case: Case, held: Held | None = None
    ) -> tuple[float, dict[str, tuple[float, float]]]:
        """Return the bound of a case, and the sizes with which its witnesses are compared.

        By node: the largest T and D, in the affine domain |h̃_t| + ρ_t and |h̃_i - h̃_t| + ρ_i + ρ_t.
        `held` are ellipsoids around the drift of its input, in addition to the box.
        """
        problem = self.problem(case, held)
        functional = self._proof.functional
        with np.errstate(all="ignore"):
            if case.domain == "interval":
                output, sizes = _intervals(problem)
                return bound(functional, output), sizes
            if "planes" in case.domains:
                return self._planes(problem, case)
            if case.domain == "splits":
                assert case.claim is not None  # the functional is the largest drift
                return case.claim, derive_splits(problem, case.splits, case.claim)
            return self._affine(problem, case)

    def link(self, case: Case) -> tuple[float, dict[str, tuple[float, float]], Ends]:
        """Return the largest drift of a case, its sizes, and the boxes of T and D of its output."""
        return self.interface(case, None, wanted=False)[:3]

    def interface(
        self, case: Case, held: Held | None, *, wanted: bool
    ) -> tuple[float, dict[str, tuple[float, float]], Ends, Apart | None, Held | None]:
        """Return the result of `link`, the distance of readings of the output in either kernel,
        and, if `wanted`, ellipsoids around the output's rows.

        The interval domain has no ellipsoids.
        """
        problem, ellipsoids = replace(self.problem(case, held), followed=True), None
        with np.errstate(all="ignore"):
            if case.domain == "interval":
                output, sizes = _intervals(problem)
                t, d, own = output.t, output.d, output.own
            else:
                if not {"planes", "splits"}.isdisjoint(case.domains):
                    reason = f"{case.domain} are of whole blocks, not of links"
                    raise Rejected("document/domain", reason)
                forms = pair(problem, case.passes)
                t, d, sizes = forms.t.box, forms.output(), forms.sizes()
                own = forms.readings
                ellipsoids = interface_ellipsoids(forms) if wanted else None
                if forms.known is not None:
                    t = box.checked(box.meet(t, forms.known.t), "the training value")
                    d = box.checked(box.meet(d, forms.known.d), "the drift")
            one, two = (_readings(part, t.shape) for part in own)
            return of_drift("inf", d), sizes, (*_ends(t), *_ends(d)), (one, two), ellipsoids

    def _affine(
        self, problem: DriftProblem, case: Case
    ) -> tuple[float, dict[str, tuple[float, float]]]:
        """Return bound and sizes by affine forms, met with the interval boxes of the output."""
        forms = pair(problem, case.passes, case.chance)
        return self._by_forms(case, forms, forms.known), dict(forms.sizes())

    def _planes(
        self, problem: DriftProblem, case: Case
    ) -> tuple[float, dict[str, tuple[float, float]]]:
        """Return bound and sizes by planes and interval boxes, and by affine forms if named."""
        found = derive(problem, case.planes)
        if "affine" not in case.domains:
            return bound(self._proof.functional, found.output), dict(found.sizes)
        forms = pair(problem, case.passes)
        return self._by_forms(case, forms, found.output), dict(found.sizes)

    def _by_forms(self, case: Case, forms: Pair, known: State | None) -> float:
        """Return the functional by affine forms, met with the known boxes of the output."""
        functional, claim = self._proof.functional, case.claim
        if functional.kind == "no_flip":
            stable = stays(forms, functional.k, known)
            forms.settle()
            return 0.0 if stable else math.inf
        boxed = forms.output() if known is None else box.meet(forms.output(), known.d)
        boxed = box.checked(boxed, "the drift")
        found = of_drift(functional.kind, boxed)
        if functional.kind != "inf" and not (claim is not None and found <= claim):
            found = of_rows(forms, boxed, functional.kind, 0.0 if claim is None else claim)
        forms.settle()
        return found

    def problem(self, case: Case, held: Held | None = None) -> DriftProblem:
        """Return the context that the rules read for a case."""
        block = self._proof.graphs[case.graph]
        keys = {n.name: n.attrs.text("key") for n in block.nodes if n.op == "param"}
        centre, radius = _doubles(case.region.centre), _doubles(case.region.radius)
        train, infer = self._proof.train, self._proof.infer
        weights, rows = block.weights, self._rows(case, block)
        moved = case.region.drift
        drift = None if moved is None else Box(*(_numbers(array) for array in moved))
        train_own, infer_own = case.region.readings or (None, None)
        return DriftProblem(
            *(block, train, infer, self._parameters, keys, weights, centre, radius, rows, drift),
            rho=case.region.weights,
            held=held,
            over_rows=self._over_rows,
            readings=(_doubles(train_own), _doubles(infer_own)),
        )

    def _rows(self, case: Case, block: Block) -> Rows | None:
        """Return the marks and tables of a region of any length; None for one of a fixed length."""
        if case.region.kind != "rows":
            return None
        if case.region.longest is None or case.domain != "interval":
            raise Rejected("document/region", "sequences of any length are of the interval domain")
        formats = {node.name: node.format for node in block.nodes}
        tables = {
            name: table(array, name, formats[name], self._proof.train, self._proof.infer)
            for name, array in case.region.tables.items()
        }
        return Rows(case.region.longest, marks_of(block, POINTWISE), tables)


def _transposed(proof: Proof) -> frozenset[str]:
    """Return the checkpoint keys that every graph of a proof reads transposed.

    Raises Rejected "graph/field" where a graph reads one of them as it is.
    """
    turned = frozenset().union(*(block.transposed for block in proof.graphs.values()))
    for block in proof.graphs.values():
        both = sorted((turned & block.parameters) - block.transposed)
        if both:
            raise Rejected("graph/field", f"{both[0][:80]!r} is read transposed and as it is")
    return turned


def _ends(part: Box) -> tuple[list[float], list[float]]:
    return part.lo.ravel().tolist(), part.hi.ravel().tolist()


def _readings(own: Own, shape: tuple[int, ...]) -> list[float]:
    found: list[float] = np.broadcast_to(0.0 if own is None else own, shape).ravel().tolist()
    return found


def _intervals(problem: DriftProblem) -> tuple[State, dict[str, tuple[float, float]]]:
    """Return the output's boxes and the largest T and D of every node."""
    sizes = {}
    output: State | None = None
    for node, value in propagate(problem):
        sizes[node.name] = magnitudes(value)
        if node.name == problem.block.output:
            output = numeric(value)
    if output is None:
        raise Rejected("graph/order", "the output is not a node")
    return output, sizes


def _doubles(array: Array | None) -> Floats | None:
    return None if array is None else _numbers(array)


def _numbers(array: Array) -> Floats:
    return np.frombuffer(array.data, dtype="<f8").astype(np.float64).reshape(array.shape)
