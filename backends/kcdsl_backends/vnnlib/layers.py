"""Queries about one ReLU network, or two of the same layer sizes: decided by branch and bound.

The tree of boxes behind an `unsat` is derived again by the checker (section 9 of
docs/proofs/difference-planes.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse

from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.vnnlib.program import Affine, Array, NetworkProgram
from kcdsl_backends.vnnlib.query import Polynomial, Relation

if TYPE_CHECKING:
    from kcdsl_backends.drift.linear.constraints import LinearConstraint
    from kcdsl_backends.drift.linear.splitting import SplitDecision

Layer = tuple[Array, Array]
"""Weight [out, in] and bias [out]."""
MOST_NETWORKS = 2


@dataclass(frozen=True, slots=True)
class LinearSum:
    """inputs · x + Σ outputs[k] · (output of network k) + constant, scaled to integers."""

    inputs: tuple[float, ...]
    outputs: tuple[tuple[float, ...], ...]
    constant: Fraction

    def at_most_zero(self, sign: int) -> LinearConstraint:
        """Return the constraint that the sum, or its negative, is at most 0."""
        from kcdsl_backends.drift.linear.constraints import LinearConstraint

        inputs, first, second = (
            tuple(sign * value for value in part) for part in (self.inputs, *self._two())
        )
        return LinearConstraint(inputs, first, second, -sign * self.constant)

    def _two(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        first, *rest = self.outputs
        return first, rest[0] if rest else ()


@dataclass(frozen=True, slots=True)
class ReluQuery:
    """One or two networks with ReLU between their layers, and linear sums of inputs and outputs."""

    networks: tuple[tuple[Layer, ...], ...]
    sums: tuple[LinearSum, ...]

    def decided(
        self,
        low: Sequence[Fraction],
        high: Sequence[Fraction],
        conjunctions: Sequence[Sequence[tuple[int, Relation]]],
        seconds: float,
    ) -> SplitDecision | None:
        """Decide whether some conjunction of relations to 0 can hold in a box.

        "proved" means that none can. A counterexample satisfies the relations with `<` read as `<=`
        and `!=` left out. None: a conjunction without inequality, or a network without bound.
        """
        import torch

        from kcdsl_backends.drift.linear.splitting import decide

        unsafe = []
        for relations in conjunctions:
            group = []
            for row, relation in relations:
                signs = {"==": (1, -1), "!=": ()}.get(relation, (1,))
                group += [self.sums[row].at_most_zero(sign) for sign in signs]
            unsafe.append(group)
        if not unsafe or not all(unsafe):
            return None
        networks = [
            [(torch.from_numpy(weight), torch.from_numpy(bias)) for weight, bias in one]
            for one in self.networks
        ]
        try:
            return decide(networks, low, high, unsafe, seconds)
        except NoBound:
            return None


def relu_query(
    program: NetworkProgram,
    networks: Sequence[tuple[range, str]],
    tensors: Mapping[str, Affine],
    polynomials: Sequence[Polynomial],
) -> ReluQuery | None:
    """Return networks and polynomials as a query about layers; None if they have another form.

    Args:
        program: all networks, with the input as its first block.
        networks: the blocks and the output variable of each.
        tensors: the elements of every output variable.
        polynomials: sums of elements of the input, named "", and of output variables.
    """
    if not 1 <= len(networks) <= MOST_NETWORKS:
        return None
    found = [_layers(program, blocks, tensors[name]) for blocks, name in networks]
    layers = tuple(one for one in found if one is not None)
    sizes = {tuple(weight.shape for weight, _ in one) for one in layers}
    if len(layers) != len(networks) or len(sizes) != 1:
        return None
    places = {name: k for k, (_, name) in enumerate(networks)}
    outputs = len(layers[0][-1][1])
    each = [_sum(p, program.blocks[0].size, places, outputs) for p in polynomials]
    sums = tuple(one for one in each if one is not None)
    return ReluQuery(layers, sums) if len(sums) == len(each) else None


def _layers(program: NetworkProgram, blocks: range, output: Affine) -> tuple[Layer, ...] | None:
    """Return the layers of a network; None unless each ReLU reads only the layer before it."""
    found, before = list[Layer](), 0
    for index in blocks:
        block = program.blocks[index]
        if block.kind == "linear" and index == blocks[-1] and _is_whole(output, index):
            output = block.operands[0]
            break
        layer = _layer(program, block.operands[0], before) if block.kind == "relu" else None
        if layer is None:
            return None
        found.append(layer)
        before = index
    last = _layer(program, output, before)
    return None if last is None else (*found, last)


def _layer(program: NetworkProgram, sums: Affine, before: int) -> Layer | None:
    if not set(sums.terms) <= {before}:
        return None
    shape = sums.size, program.blocks[before].size
    held = sums.terms.get(before)
    weight: Any = np.zeros(shape) if held is None else held
    weight = weight.toarray() if sparse.issparse(weight) else np.asarray(weight)
    return np.ascontiguousarray(weight, dtype=np.float64), np.ascontiguousarray(sums.constant)


def _is_whole(sums: Affine, index: int) -> bool:
    """Return whether sums are exactly the elements of a block in order."""
    held: Any = sums.terms.get(index)
    if set(sums.terms) != {index} or sums.constant.any() or held.shape[0] != held.shape[1]:
        return False
    return bool((sparse.csr_array(held) != sparse.identity(len(sums.constant))).nnz == 0)


def _sum(
    polynomial: Polynomial, inputs: int, places: Mapping[str, int], outputs: int
) -> LinearSum | None:
    """Return a polynomial as a linear sum; None if it has products or inexact coefficients."""
    scale = lcm(*(value.denominator for value in polynomial.values()))
    if sum(abs(value * scale) for value in polynomial.values()) >= 2**53:
        return None
    of_inputs = [0.0] * inputs
    of_outputs = [[0.0] * outputs for _ in places]
    for key, value in polynomial.items():
        if len(key) > 1:
            return None
        for name, place in key:
            if name and name not in places:
                return None
            row = of_outputs[places[name]] if name else of_inputs
            row[place] = float(value * scale)
    constant = polynomial.get((), Fraction(0)) * scale
    return LinearSum(tuple(of_inputs), tuple(tuple(row) for row in of_outputs), constant)
