"""Rules for functionals of one row of a product in attention: averages of values, and keys in one
pass (section 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine.kernel import KernelRun, Operand
from kcdsl_backends.drift.affine.row_sums import (
    BoundedRows,
    KeyRows,
    KeyVectors,
    RowSums,
    ValueRows,
    Vectors,
)
from kcdsl_backends.drift.affine.tape import PASS, Nonlinear, SingleRow
from kcdsl_backends.drift.boxes import SAFE, gamma
from kcdsl_backends.drift.ops.bilinear import Heads, KeyMaps, KeyRow, _groups


def row_of_values(
    run: KernelRun, p: Operand, values: Heads, known: Tensor, second_order: bool
) -> SingleRow | None:
    """Return the rule of section 4 (averages) for single rows of probabilities times values.

    With m_j = |a|·|o[h, j]| and any numbers p_j + e_j, |e_j| <= ρ_j, in front of the o[h, j],

        |Σ_j (p_j + e_j) a·o| <=
            Σ_j p_j m_j + Σ_j ρ_j |m_j - m| + m |Σ_j e_j| + 2 Σ_j (ρ_j - p_j)₊ m_j

    for every m >= 0; Σ_j ρ_j m_j may stand for the last three. Of heads h that read the same o, all
    together are also at most Σ_j |Σ_h p_hj a_h|·|o| + Σ_j Σ_h ρ_hj m_hj.

    Args:
        run: the kernel.
        p: the probabilities [heads, T, keys].
        values: where the values come from.
        known: their reference [heads, keys, d].
        second_order: whether Σ_j e_j a·e_v[h, j] is bounded here; else it is known element by
            element.
    """
    place, source = p.index, values.source
    if place is None or source is None or not values.plain:
        return None
    entry, bound = run.tape.entries[place], run.tape.entries[source].rows
    weights, moved, balance = entry.reference, entry.error_bound, entry.balance
    below = 2 * (moved - weights).clamp_min(0)
    beyond, inexact = through_values(values, moved), moved @ _lost(values) * SAFE
    sizes = values.carried + values.own
    ends = [_last(row) + 1 for row in (weights != 0).any(0)]
    reads = [_last(row) + 1 for row in ((weights != 0) | (moved != 0)).any(0)]
    carries = bool(values.error_bound.any())
    lines = torch.stack([weights.abs(), moved, below], -1)
    last = _LastRow(values, known, moved, bound if carries else None)

    def between(a: Adjoint) -> tuple[Tensor, Tensor]:
        (first, stop), (row, _), columns = a.window
        heads, read, of_row = slice(first, stop), slice(0, reads[row]), last.get(a)
        own = of_row.own[:, :, read]  # [heads, B, keys]
        sums = torch.bmm(own, lines[heads, row, read])
        alone, around = sums[..., 0], torch.zeros_like(sums[..., 0])
        total = a.values.new_zeros(a.values.shape[0])
        if second_order:
            rest = around = sums[..., 1]
            if balance is not None:
                price, to = balance[heads, row], moved[heads, row, read]
                middle = _middle(own, to, price)
                apart = torch.bmm((own - middle).abs_(), to[..., None])[..., 0] + sums[..., 2]
                rest = torch.minimum(rest, apart + middle[..., 0] * price)
            alone = alone + rest
            if of_row.many is not None:
                size = inexact[heads, row, slice(*columns)].flatten()
                lost = a.values.abs().flatten(1) @ size * (1 + 2 * gamma(size.numel()))
                total = total + of_row.far[:, row] + lost
            else:
                for h in range(first, stop):
                    total = total + beyond(a, h)
        for members in _groups(values.groups, first, stop):
            some = [h - first for h in members]
            together = alone[some].sum(0)
            if len(members) > 1:
                joint = _together(a, members, weights[:, row], values, sizes)
                together = torch.minimum(together, joint + around[some].sum(0))
            total = total + together
        total = total * SAFE
        return -total, total

    def vjp(a: Adjoint) -> list[tuple[int, Adjoint | RowSums]]:
        (first, stop), (row, end), columns = a.window
        heads, read, of_row = slice(first, stop), slice(0, max(reads[row], 1)), last.get(a)
        window = ((first, stop), (row, end), (read.start, read.stop))
        found: list[tuple[int, Adjoint | RowSums]]
        back = of_row.back[:, :, None, read]
        found = [(place, Adjoint(back, window, tuple(weights.shape)))]
        if of_row.many is not None and bound is not None and ends[row]:
            own = weights[heads].diagonal(dim1=1, dim2=2)
            shares = ValueRows(of_row.many, weights[heads, row, : ends[row]], own)
            count = a.values.shape[0]
            found.append((source, RowSums(bound, row, 0, ends[row], count, values=shares)))
        elif carries and ends[row]:
            each = a.values[:, :, 0].transpose(0, 1)  # [heads, B, d]
            inputs = each @ values.part(heads, slice(*columns))  # [heads, B, D]
            rows = torch.einsum("hj,hbn->bjn", weights[heads, row, : ends[row]], inputs)
            shape = tuple(values.error_bound.shape)
            found.append((source, Adjoint(rows, ((0, ends[row]), (0, shape[1])), shape)))
        return found

    return SingleRow(Nonlinear(between), vjp, nearer=second_order and balance is not None)


@dataclass(frozen=True)
class _OfRow:
    """Functionals of one row of a context product, with their products with the values, which are
    the same in every row."""

    functionals: Adjoint
    values: Heads
    known: Tensor
    moved: Tensor
    bound: BoundedRows | None

    def same(self, a: Adjoint) -> bool:
        """Return whether other functionals have the same values and heads; rows may differ."""
        mine, one, two = self.functionals, self.functionals.values, a.values
        if (mine.window[0], mine.window[2]) != (a.window[0], a.window[2]):
            return False
        return one.shape == two.shape and torch.equal(one, two)

    @cached_property
    def heads(self) -> slice:
        return slice(*self.functionals.window[0])

    @cached_property
    def columns(self) -> slice:
        return slice(*self.functionals.window[2])

    @cached_property
    def back(self) -> Tensor:
        """Return a·v_j of the reference of every key [B, heads, keys]."""
        each, known = self.functionals.values[:, :, 0], self.known[self.heads, :, self.columns]
        return times_by_heads(each, known.mT)

    @cached_property
    def own(self) -> Tensor:
        """Bound |a|·|o_j| of the own errors of the values at every key [heads, B, keys]."""
        own = self.values.own[self.heads, :, self.columns]
        return self.functionals.values[:, :, 0].abs().transpose(0, 1) @ own.mT * SAFE

    @cached_property
    def many(self) -> Vectors | None:
        """Return them as functionals of every row of the source of the values."""
        if self.bound is None:
            return None
        each = self.functionals.values[:, :, 0].transpose(0, 1)  # [heads, B, d]
        weight = self.values.kept[self.heads, self.columns].to(torch.float64)
        return Vectors.of(each, weight, self.bound)

    @cached_property
    def far(self) -> Tensor:
        """Bound Σ_h Σ_j moved_htj |a·W_h| ρ_j of every row t [B, T]."""
        many = self.many
        assert many is not None
        return many.weighed(self.moved[self.heads], self.values.error_bound)


@dataclass(slots=True)
class _LastRow:
    """Cache of the last functionals of one row: those of the next row are often the same."""

    values: Heads
    known: Tensor
    moved: Tensor
    bound: BoundedRows | None
    last: _OfRow | None = None

    def get(self, a: Adjoint) -> _OfRow:
        """Return the functionals with their cached products."""
        if self.last is None or not self.last.same(a):
            self.last = None
            self.last = _OfRow(a, self.values, self.known, self.moved, self.bound)
        return self.last


def times_by_heads(values: Tensor, matrices: Tensor) -> Tensor:
    """Return values [B, heads, n] times the matrix [heads, n, m] of each head [B, heads, m]."""
    found = values.new_empty(*values.shape[:2], matrices.shape[-1])
    for head, matrix in enumerate(matrices):
        torch.mm(values[:, head], matrix, out=found[:, head])
    return found


def _last(chosen: Tensor) -> int:
    """Return the index of the last element that is true, -1 if there is none."""
    found = chosen.nonzero()
    return int(found[-1]) if len(found) else -1


def _together(
    a: Adjoint, members: list[int], weights: Tensor, values: Heads, sizes: Tensor
) -> Tensor:
    """Bound Σ_j Σ_h p_hj a_h·o[j] of heads that read the same values [B].

    Args:
        weights: p [heads, keys] of the row.
        sizes: of the values' errors [heads, keys, d].
    """
    (first, _), _, columns = a.window
    each, part = a.values[:, [h - first for h in members], 0], weights[members]
    own = values.own[members[0], :, slice(*columns)]
    joint = torch.einsum("hj,bhd->bjd", part, each).abs().flatten(1) @ own.flatten()
    lost = gamma(a.values.shape[1] + values.kept.shape[-2] + 2 * PASS)
    size = (sizes[members][:, :, slice(*columns)] * part.abs()[..., None]).sum(1)
    inexact = lost * (each.abs().flatten(1) @ size.flatten())
    return (joint * (1 + 2 * gamma(own.numel() + PASS)) + inexact) * SAFE


def row_of_keys(
    run: KernelRun, query: Operand, keys: KeyMaps | None, known: Tensor
) -> SingleRow | None:
    """Return the rule for single rows of queries times keys.

    Args:
        run: the kernel.
        query: the queries [heads, T, d].
        keys: where the keys come from.
        known: the reference of the keys [heads, d, keys].
    """
    if keys is None or keys.below.source is None or query.index is None:
        return None
    place, source, found_at = query.index, keys.below.source, query.reference
    shape, bound = tuple(keys.below.error_bound.shape), run.tape.entries[source].rows
    carries, last = bool(keys.below.error_bound.any()), _LastKeys(keys, found_at, bound)

    def between(a: Adjoint) -> tuple[Tensor, Tensor]:
        total = last.get(a).own(a.values[:, :, 0], a.window[0][0])
        return -total, total

    def vjp(a: Adjoint) -> list[tuple[int, Adjoint | RowSums]]:
        (first, end), (row, _), (start, stop) = a.window
        heads, each = slice(first, end), a.values[:, :, 0]
        back = times_by_heads(each, known[heads, :, start:stop].mT)[:, :, None]
        window = (a.window[0], a.window[1], (0, known.shape[1]))
        found: list[tuple[int, Adjoint | RowSums]]
        found = [(place, Adjoint(back, window, tuple(found_at.shape)))]
        if not carries or start == stop:
            return found
        if bound is not None:
            several, count = KeyRows(each, last.key_vectors(a), heads), a.values.shape[0]
            found.append((source, RowSums(bound, row, start, stop, count, keys=several)))
        else:
            along = keys.directions(found_at[heads, row], first, slice(start, stop))
            rows = torch.einsum("bhj,hjn->bjn", each, along.expand(-1, stop - start, -1))
            found.append((source, Adjoint(rows, ((start, stop), (0, shape[1])), shape)))
        return found

    return SingleRow(Nonlinear(between), vjp)


@dataclass(slots=True)
class _LastKeys:
    """Cache of the last row of queries: functionals of its heads follow one another."""

    keys: KeyMaps
    queries: Tensor
    bound: BoundedRows | None
    place: tuple[int, tuple[int, int]] | None = None
    row: KeyRow | None = None
    known: KeyVectors | None = None

    def get(self, a: Adjoint) -> KeyRow:
        """Return the functionals of the keys at the columns that they read."""
        place = a.window[1][0], a.window[2]
        if self.row is None or self.place != place:
            self.known = None
            self.row = self.keys.row(self.queries[:, place[0]], slice(*place[1]))
            self.place = place
        return self.row

    def key_vectors(self, a: Adjoint) -> KeyVectors:
        """Return the vectors by which the scores read the input of the keys."""
        row = self.get(a)
        if self.known is None:
            assert self.bound is not None
            self.known = row.key_vectors(self.bound)
        return self.known


def through_values(values: Heads, moved: Tensor) -> Callable[[Adjoint, int], Tensor]:
    """Return a function that bounds Σ_j moved[h, t, j] |a·W_h e_x[j]| of a head, [B]."""
    inexact = _lost(values)
    exact = not bool(values.error_bound.any())  # then the values have own errors only

    def beyond(a: Adjoint, h: int) -> Tensor:
        (first, _), (row, end), columns = a.window
        part, weights = a.values[:, h - first], moved[h, row:end]
        size = part.abs() * (weights @ inexact[h, :, slice(*columns)])
        total = size.flatten(1).sum(-1) * SAFE
        if exact:
            return total
        far = weights @ values.error_bound * SAFE
        sized = (part @ values.part(h, slice(*columns))).abs() * far
        return total + sized.flatten(1).sum(-1) * SAFE

    return beyond


def _lost(values: Heads) -> Tensor:
    """Bound the float64 error of taking adjoints of values through their linear."""
    return gamma(values.kept.shape[1] + PASS) * values.carried


CANDIDATES = 32
"""About so many elements of a row are looked at to find the middle one."""


def _middle(sizes: Tensor, weights: Tensor, price: Tensor) -> Tensor:
    """Return an m [heads, B, 1] that nearly minimises Σ_j weights_j |sizes_j - m| + price·m for
    sizes [heads, B, n]: the best of some of the sizes.

    Args:
        weights: [heads, n].
        price: [heads, 1].
    """
    step = max(1, sizes.shape[-1] // CANDIDATES)
    sizes, weights = sizes[..., ::step], weights[:, None, ::step] * step
    if not sizes.shape[-1]:
        return sizes.new_zeros(*sizes.shape[:-1], 1)
    ordered, order = sizes.sort(dim=-1)
    below = weights.expand_as(sizes).gather(-1, order).cumsum(-1)
    wanted = ((weights.sum(-1, keepdim=True) - price[..., None]) / 2).clamp_min(0)
    place = (below < wanted).sum(-1, keepdim=True).clamp_max(sizes.shape[-1] - 1)
    return torch.where(wanted > 0, ordered.gather(-1, place), 0.0)
