"""Functionals of one row of attention: averages of values, and keys in one pass (section 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine.kernel import KernelRun, Operand
from kcdsl_backends.drift.affine.tape import PASS, Adjoints, Nonlinear, SingleRow
from kcdsl_backends.drift.boxes.box import SAFE, gamma
from kcdsl_backends.drift.ops.bilinear import Heads, KeyMaps


def row_of_values(
    run: KernelRun, p: Operand, values: Heads, known: Tensor, second_order: bool
) -> SingleRow | None:
    """Take rows of probabilities times values, as section 4 says of averages.

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
    entry = run.tape.entries[place]
    weights, moved, balance = entry.reference, entry.error_bound, entry.balance
    below, beyond = 2 * (moved - weights).clamp_min(0), through_values(values)
    sizes = values.carried + values.own
    ends = [_last(row) + 1 for row in (weights != 0).any(0)]

    def between(a: Adjoint) -> tuple[Tensor, Tensor]:
        (first, last), (row, _), columns = a.window
        total = a.values.new_zeros(a.values.shape[0])
        for members in _groups(values.groups, first, last):
            alone, around = torch.zeros_like(total), torch.zeros_like(total)
            for h in members:
                own = a.values[:, h - first, 0].abs() @ values.own[h, :, slice(*columns)].T * SAFE
                alone = alone + own @ weights[h, row].abs()  # own [B, keys]
                if not second_order:
                    continue
                rest = plain = own @ moved[h, row]
                if balance is not None:
                    price = balance[h, row]
                    middle = _middle(own, moved[h, row], price)
                    apart = (own - middle).abs() @ moved[h, row] + own @ below[h, row]
                    rest = torch.minimum(rest, apart + middle[:, 0] * price)
                alone, around = alone + rest, around + plain
                total = total + beyond(a, h)[:, 0] @ moved[h, row]
            if len(members) > 1:
                alone = torch.minimum(
                    alone, _together(a, members, weights[:, row], values, sizes) + around
                )
            total = total + alone
        total = total * SAFE
        return -total, total

    def vjp(a: Adjoint) -> Adjoints:
        (first, last), (row, end), columns = a.window
        heads = slice(first, last)
        each = a.values[:, :, 0].transpose(0, 1)  # [heads, B, d]
        back = (each @ known[heads, :, slice(*columns)].mT).transpose(0, 1)[:, :, None]
        window = ((first, last), (row, end), (0, weights.shape[-1]))
        found = [(place, Adjoint(back, window, tuple(weights.shape)))]
        if bool(values.error_bound.any()) and ends[row]:
            inputs = each @ values.weight[heads, slice(*columns)]  # [heads, B, D]
            rows = torch.einsum("hj,hbn->bjn", weights[heads, row, : ends[row]], inputs)
            shape = tuple(values.error_bound.shape)
            found.append((source, Adjoint(rows, ((0, ends[row]), (0, shape[1])), shape)))
        return found

    return SingleRow(Nonlinear(between), vjp, nearer=second_order and balance is not None)


def _last(chosen: Tensor) -> int:
    """Return the index of the last element that is true, -1 where there is none."""
    found = chosen.nonzero()
    return int(found[-1]) if len(found) else -1


def _groups(groups: tuple[int, ...], first: int, last: int) -> Iterator[list[int]]:
    """Yield the heads of a window that are the same."""
    for group in dict.fromkeys(groups[first:last]):
        yield [h for h in range(first, last) if groups[h] == group]


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
    lost = gamma(a.values.shape[1] + values.weight.shape[-2] + 2 * PASS)
    size = (sizes[members][:, :, slice(*columns)] * part.abs()[..., None]).sum(1)
    inexact = lost * (each.abs().flatten(1) @ size.flatten())
    return (joint * (1 + 2 * gamma(own.numel() + PASS)) + inexact) * SAFE


def row_of_keys(query: Operand, keys: KeyMaps | None, known: Tensor) -> SingleRow | None:
    """Take rows of queries times keys.

    Args:
        query: the queries [heads, T, d].
        keys: where the keys come from.
        known: the reference of the keys [heads, d, keys].
    """
    if keys is None or keys.below.source is None or query.index is None:
        return None
    place, source, found_at = query.index, keys.below.source, query.reference
    shape = tuple(keys.below.error_bound.shape)

    def between(a: Adjoint) -> tuple[Tensor, Tensor]:
        (first, last), (row, _), columns = a.window
        total = keys.own(a.values[:, :, 0], found_at[first:last, row], first, slice(*columns))
        return -total, total

    def vjp(a: Adjoint) -> Adjoints:
        (first, last), (row, _), (start, stop) = a.window
        each = a.values[:, :, 0].transpose(0, 1)  # [heads, B, keys]
        back = (each @ known[first:last, :, start:stop].mT).transpose(0, 1)[:, :, None]
        window = ((first, last), a.window[1], (0, known.shape[1]))
        found = [(place, Adjoint(back, window, tuple(found_at.shape)))]
        if bool(keys.below.error_bound.any()):
            along = keys.directions(found_at[first:last, row], first, slice(start, stop))
            rows = torch.einsum("hbj,hjn->bjn", each, along.expand(-1, stop - start, -1))
            found.append((source, Adjoint(rows, ((start, stop), (0, shape[1])), shape)))
        return found

    return SingleRow(Nonlinear(between), vjp)


def through_values(values: Heads) -> Callable[[Adjoint, int], Tensor]:
    """Return a function that bounds |a·W_h e_x[j]| of a head, [B, rows, keys]."""
    inexact = gamma(values.weight.shape[1] + PASS) * values.carried
    exact = not bool(values.error_bound.any())  # then all that the values are off by is their own

    def beyond(a: Adjoint, h: int) -> Tensor:
        part, columns = a.values[:, h - a.window[0][0]], slice(*a.window[-1])
        size = part.abs() @ inexact[h, :, columns].T
        if exact:
            return size
        return size + (part @ values.weight[h, columns]).abs() @ values.error_bound.T

    return beyond


def _middle(sizes: Tensor, weights: Tensor, price: Tensor) -> Tensor:
    """Return the m [B, 1] with the least Σ_j weights_j |sizes_j - m| + price·m of sizes [B, n]."""
    ordered, order = sizes.sort(dim=-1)
    below = weights.expand_as(sizes).gather(-1, order).cumsum(-1)
    wanted = ((weights.sum() - price) / 2).clamp_min(0)
    place = (below < wanted).sum(-1, keepdim=True).clamp_max(sizes.shape[-1] - 1)
    return torch.where(wanted > 0, ordered.gather(-1, place), 0.0)
