"""Networks in real arithmetic: blocks of real numbers, each a function of sums of earlier ones.

All coefficients are exact: if a product or sum of coefficients would be rounded, the operands
become blocks instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Array = NDArray[np.float64]
Matrix = Any
"""A matrix of float64, dense or of scipy."""
_DENSE = 1 << 20
_MOST_ENTRIES = 1 << 25


class TooLarge(Exception):
    """A program would have too many coefficients."""


@dataclass(frozen=True, slots=True)
class Affine:
    """Sums: constant [n] + Σ matrix [n, size of a block] @ block, over blocks by their index."""

    constant: Array
    terms: Mapping[int, Matrix]

    @property
    def size(self) -> int:
        """Return the number of sums."""
        return len(self.constant)

    @property
    def entries(self) -> int:
        """Return the number of coefficients."""
        return sum(m.nnz if sparse.issparse(m) else m.size for m in self.terms.values())

    def rows(self, ids: NDArray[Any]) -> Affine:
        """Return some of the sums, in this order."""
        return Affine(self.constant[ids], {b: m[ids] for b, m in self.terms.items()})


@dataclass(frozen=True, slots=True)
class ProgramBlock:
    """Numbers [size]: the function `kind` of the operands, elementwise (`bounds.KINDS`).

    `value` has further parameters of the kind: exponents, bases, or exact factors.
    """

    kind: str
    size: int
    operands: tuple[Affine, ...] = ()
    value: Any = None


@dataclass(slots=True)
class NetworkProgram:
    """Blocks in topological order; the first is the input."""

    blocks: list[ProgramBlock] = field(default_factory=list)

    def add(self, kind: str, *operands: Affine, value: Any = None) -> Affine:
        """Append a block and return its elements."""
        size = operands[0].size
        self.blocks.append(ProgramBlock(kind, size, operands, value))
        return self.whole(len(self.blocks) - 1)

    def whole(self, index: int) -> Affine:
        """Return the elements of a block."""
        size = self.blocks[index].size
        eye = sparse.csr_array(sparse.identity(size, format="csr"))
        return Affine(np.zeros(size), {index: eye})

    def plain(self, a: Affine) -> Affine:
        """Return sums that are single elements of blocks, each used once; append a block otherwise.

        The empty sum, the number 0, is plain too.
        """
        if a.constant.any():
            return self.add("linear", a)
        total = np.zeros(a.size)
        for matrix in a.terms.values():
            counts = np.diff(matrix.indptr)
            total += counts
            once = np.bincount(matrix.indices, minlength=matrix.shape[1])
            if (matrix.data != 1).any() or (once > 1).any():
                return self.add("linear", a)
        return self.add("linear", a) if (total > 1).any() else a

    def linear(self, a: Affine, matrix: Any) -> Affine:
        """Return matrix @ a."""
        if matrix.nnz > _MOST_ENTRIES:
            raise TooLarge
        matrix = sparse.csr_array(matrix)
        one = self.plain(a)
        terms = {b: _clean(matrix @ m) for b, m in one.terms.items()}
        return Affine(np.zeros(matrix.shape[0]), {b: m for b, m in terms.items() if m.nnz})

    def plus(self, a: Affine, b: Affine, sign: float = 1.0) -> Affine:
        """Return a + b, or a - b with the sign -1."""
        found = _added(a, b, sign)
        if found is None:
            found = _added(self.plain(a), self.plain(b), sign)  # coefficients 1, 2 and -1
        assert found is not None
        return found

    def times(self, a: Affine, factors: Array) -> Affine:
        """Return a times constants [n], elementwise."""
        found = _scaled(a, factors)
        if found is None:
            found = _scaled(self.add("linear", a), factors)
        assert found is not None
        return found


def constant(values: Array) -> Affine:
    """Return constants as sums without terms."""
    return Affine(np.asarray(values, dtype=np.float64).reshape(-1), {})


def joined(parts: Sequence[Affine]) -> Affine:
    """Concatenate sums."""
    blocks = sorted({b for part in parts for b in part.terms})
    widths = {b: next(p.terms[b].shape[1] for p in parts if b in p.terms) for b in blocks}
    terms = {}
    for b in blocks:
        rows = [
            part.terms[b] if b in part.terms else sparse.csr_array((part.size, widths[b]))
            for part in parts
        ]
        terms[b] = sparse.csr_array(sparse.vstack(rows, format="csr"))
    return Affine(np.concatenate([part.constant for part in parts]), terms)


def _clean(matrix: Any) -> Any:
    found = sparse.csr_array(matrix)
    found.sum_duplicates()
    found.eliminate_zeros()
    return found


def _added(a: Affine, b: Affine, sign: float) -> Affine | None:
    """Return a + sign b; None if a coefficient would be rounded."""
    total = _exact_sum(a.constant, sign * b.constant)
    if total is None:
        return None
    terms: dict[int, Any] = {}
    for block in sorted({*a.terms, *b.terms}):
        one, two = a.terms.get(block), b.terms.get(block)
        if one is None or two is None:
            terms[block] = one if two is None else _clean(two * sign)
            continue
        if not _exact_matrices(one, two * sign):
            return None
        terms[block] = _clean(one + two * sign)
    return Affine(total, {b: m for b, m in terms.items() if m.nnz})


def _exact_sum(a: Array, b: Array) -> Array | None:
    with np.errstate(all="ignore"):
        total = a + b
        part = total - a
        error = (a - (total - part)) + (b - part)
    return total if not error.any() and np.isfinite(total).all() else None


def _exact_matrices(a: Any, b: Any) -> bool:
    """Return whether a + b is exact."""
    both = a.multiply(b)
    if not both.nnz:
        return True
    rows, columns = both.nonzero()
    x, y = (np.asarray(m[rows, columns]).reshape(-1) for m in (a, b))
    return _exact_sum(x, y) is not None


def _scaled(a: Affine, factors: Array) -> Affine | None:
    """Return a times constants; None if a product would be rounded."""
    if not _exact_product(a.constant, factors):
        return None
    terms = {}
    for block, matrix in a.terms.items():
        each = np.repeat(factors, np.diff(matrix.indptr))
        if not _exact_product(matrix.data, each):
            return None
        moved = matrix.copy()
        moved.data = matrix.data * each
        terms[block] = _clean(moved)
    return Affine(a.constant * factors, {b: m for b, m in terms.items() if m.nnz})


def _exact_product(a: Array, b: Array) -> bool:
    """Return whether a b is proved exact, by Dekker's product within a safe range."""
    with np.errstate(all="ignore"):
        product = a * b
        if bool(((a == 0) | (b == 0) | (np.abs(a) == 1) | (np.abs(b) == 1)).all()):
            return bool(np.isfinite(product).all())
        sizes = np.abs(np.concatenate([a, b]))
        sizes = sizes[sizes > 0]
        if sizes.max() > 2.0**400 or sizes.min() < 2.0**-400:
            return False
        parts = []
        for x in (a, b):
            high = x * (2.0**27 + 1)
            high = high - (high - x)
            parts.append((high, x - high))
        (ah, al), (bh, bl) = parts
        error = ((ah * bh - product) + ah * bl + al * bh) + al * bl
    return not bool(error.any())


def dense(program: NetworkProgram) -> NetworkProgram:
    """Return a program with dense matrices for those that are small or not sparse."""

    def turned(affine: Affine) -> Affine:
        terms = {}
        for block, matrix in affine.terms.items():
            cells = prod(matrix.shape)
            keep = cells > _DENSE and matrix.nnz * 8 < cells
            terms[block] = matrix if keep else matrix.toarray()
        return Affine(affine.constant, terms)

    blocks = [replace(b, operands=tuple(map(turned, b.operands))) for b in program.blocks]
    return NetworkProgram(blocks)


def fractions_of(a: Affine, values: Sequence[Sequence[Fraction]]) -> list[Fraction]:
    """Return exact sums for exact values of every block."""
    found = [Fraction(float(c)) for c in a.constant]
    for block, matrix in a.terms.items():
        held = sparse.csr_array(matrix)
        for row in range(a.size):
            for place in range(held.indptr[row], held.indptr[row + 1]):
                found[row] += Fraction(float(held.data[place])) * values[block][held.indices[place]]
    return found
