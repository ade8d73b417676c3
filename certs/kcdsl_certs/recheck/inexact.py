"""The float64 tier: derive the bound of a case with outward rounded doubles."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.affine import of_rows, pair, stays
from kcdsl_certs.recheck.block import Array
from kcdsl_certs.recheck.document import Case, Proof
from kcdsl_certs.recheck.errors import Rejection
from kcdsl_certs.recheck.formats import Floats
from kcdsl_certs.recheck.functionals import bound, of_drift
from kcdsl_certs.recheck.propagate import magnitudes, propagate
from kcdsl_certs.recheck.rules.state import Scene, State, numeric
from kcdsl_certs.recheck.safetensors import Tensor
from kcdsl_certs.recheck.weights import Parameters

# Of the interval domain, beside which the affine one stands by itself.
_BOUNDLESS = ("bound/not-finite", "bound/overflow")


class Doubles:
    """Derives the cases of one proof."""

    def __init__(self, proof: Proof, tensors: Mapping[str, Tensor]) -> None:
        """Check the parameters; raises what `Parameters` raises."""
        if not float(np.ldexp(np.ones(1), -1022)[0] * np.full(1, 0.5)[0]) > 0:
            raise Rejection("internal", "this process flushes subnormal numbers to zero")
        self._proof = proof
        self._parameters = Parameters(tensors, proof.parameters)

    def derive(self, case: Case) -> tuple[float, dict[str, tuple[float, float]]]:
        """Return the bound of a case and what its witnesses are compared with.

        By node: the largest T and D, in the affine domain |h̃_t| + ρ_t and |h̃_i - h̃_t| + ρ_i + ρ_t.
        """
        scene = self.scene(case)
        functional = self._proof.functional
        with np.errstate(all="ignore"):
            if case.domain == "interval":
                output, sizes = _intervals(scene)
                return bound(functional, output), sizes
            return self._affine(scene, case.claim)

    def _affine(
        self, scene: Scene, claim: float | None
    ) -> tuple[float, dict[str, tuple[float, float]]]:
        """Return what affine forms say beside the interval domain, where that has a bound."""
        functional, forms = self._proof.functional, pair(scene)
        known: State | None = None
        try:
            known = _intervals(scene)[0]
        except Rejection as rejection:
            if rejection.reason not in _BOUNDLESS:
                raise
        if functional.kind == "no_flip":
            return 0.0 if stays(forms, functional.k, known) else math.inf, forms.sizes()
        boxed = forms.output() if known is None else box.meet(forms.output(), known.d)
        boxed = box.checked(boxed, "the drift")
        found = of_drift(functional.kind, boxed)
        if functional.kind != "inf" and not (claim is not None and found <= claim):
            found = of_rows(forms, boxed, functional.kind, 0.0 if claim is None else claim)
        return found, forms.sizes()

    def scene(self, case: Case) -> Scene:
        """Return what the rules read for a case."""
        block = self._proof.graphs[case.graph]
        keys = {n.name: n.attrs.text("key") for n in block.nodes if n.op == "param"}
        centre, radius = _doubles(case.region.centre), _doubles(case.region.radius)
        train, infer = self._proof.train, self._proof.infer
        weights = block.weights
        return Scene(block, train, infer, self._parameters, keys, weights, centre, radius)


def _intervals(scene: Scene) -> tuple[State, dict[str, tuple[float, float]]]:
    """Return the output's boxes and the largest T and D of every node."""
    sizes = {}
    output: State | None = None
    for node, value in propagate(scene):
        sizes[node.name] = magnitudes(value)
        if node.name == scene.block.output:
            output = numeric(value)
    if output is None:
        raise Rejection("graph/order", "the output is not a node")
    return output, sizes


def _doubles(array: Array | None) -> Floats | None:
    if array is None:
        return None
    return np.frombuffer(array.data, dtype="<f8").astype(np.float64).reshape(array.shape)
