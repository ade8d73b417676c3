"""Functionals of one row of a product with keys or values that come straight from a linear.

Such a functional reads what the linear adds of its own, o[h, j], with numbers that are known here:
its bound is formed here, and the functional goes on to the input of the linear at once, as a sum of
few outer products. Of values the probabilities average what they add (section 4).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kcdsl_backends.affine.adjoint import Adjoint, whole
from kcdsl_backends.affine.kernel import KernelRun, Operand
from kcdsl_backends.affine.rules.heads import Heads
from kcdsl_backends.affine.tape import PASS, SAFE, Curved, OneRow, Pulled
from kcdsl_backends.interval.box import gamma


def of_values(
    run: KernelRun, p: Operand, values: Heads, known: Tensor, second_order: bool
) -> OneRow | None:
    """Take rows of probabilities times values, as section 4 says of averages.

    With m_j = |a|·|o[h, j]| and any numbers p_j + e_j, |e_j| <= ρ_j, in front of the o[h, j],

        |Σ_j (p_j + e_j) a·o| <=
            Σ_j p_j m_j + Σ_j ρ_j |m_j - m| + m |Σ_j e_j| + 2 Σ_j (ρ_j - p_j)₊ m_j

    for every m >= 0; Σ_j ρ_j m_j may stand for the last three.

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
    weights, moved, balance = entry.reference, entry.reach, entry.balance
    below, beyond = 2 * (moved - weights).clamp_min(0), through(values)

    def between(a: Adjoint) -> tuple[Tensor, Tensor]:
        (first, last), (row, _), columns = a.window
        total = a.values.new_zeros(a.values.shape[0])
        for h in range(first, last):
            each = a.values[:, h - first, 0]  # [B, d]
            own = each.abs() @ values.own[h, :, slice(*columns)].T * SAFE  # [B, keys]
            total = total + own @ weights[h, row].abs()
            if not second_order:
                continue
            rest = own @ moved[h, row]
            if balance is not None:
                price = balance[h, row]
                middle = _middle(own, moved[h, row], price)
                around = (own - middle).abs() @ moved[h, row] + own @ below[h, row]
                rest = torch.minimum(rest, around + middle[:, 0] * price)
            total = total + rest + beyond(a, h)[:, 0] @ moved[h, row]
        total = total * SAFE
        return -total, total

    def pull(a: Adjoint) -> Pulled:
        (first, last), row, columns = a.window
        heads = slice(first, last)
        each = a.values[:, :, 0].transpose(0, 1)  # [heads, B, d]
        back = (each @ known[heads, :, slice(*columns)].mT).transpose(0, 1)[:, :, None]
        window = ((first, last), row, (0, weights.shape[-1]))
        found = [(place, Adjoint(back, window, tuple(weights.shape)))]
        if bool(values.reach.any()):
            inputs = each @ values.weight[heads, slice(*columns)]  # [heads, B, D]
            rows = torch.einsum("hj,hbn->bjn", weights[heads, row[0]], inputs)
            shape = tuple(values.reach.shape)
            found.append((source, Adjoint(rows, whole(shape), shape)))
        return found

    return OneRow(Curved(between), pull, nearer=second_order and balance is not None)


def of_keys(query: Operand, keys: Heads | None, known: Tensor) -> OneRow | None:
    """Take rows of queries times keys.

    Args:
        query: the queries [heads, T, d].
        keys: where the keys come from.
        known: the reference of the keys [heads, d, keys].
    """
    if keys is None or keys.source is None or query.index is None or not keys.plain:
        return None
    place, source, found_at = query.index, keys.source, query.reference

    def between(a: Adjoint) -> tuple[Tensor, Tensor]:
        (first, last), (row, _), columns = a.window
        own = keys.own[first:last, slice(*columns)]  # [heads, keys, d]
        size = (own @ found_at[first:last, row].abs()[..., None])[..., 0] * SAFE
        total = a.values[:, :, 0].abs().flatten(1) @ size.flatten() * SAFE
        return -total, total

    def pull(a: Adjoint) -> Pulled:
        (first, last), row, columns = a.window
        heads = slice(first, last)
        each = a.values[:, :, 0].transpose(0, 1)  # [heads, B, keys]
        back = (each @ known[heads, :, slice(*columns)].mT).transpose(0, 1)[:, :, None]
        window = ((first, last), row, (0, known.shape[1]))
        found = [(place, Adjoint(back, window, tuple(found_at.shape)))]
        if bool(keys.reach.any()):
            directions = found_at[heads, row[0], None] @ keys.weight[heads]  # [heads, 1, D]
            rows = torch.einsum("hbj,hn->bjn", each, directions[:, 0])
            shape = tuple(keys.reach.shape)
            found.append((source, Adjoint(rows, (columns, (0, shape[1])), shape)))
        return found

    return OneRow(Curved(between), pull)


def through(values: Heads) -> Callable[[Adjoint, int], Tensor]:
    """Return a function that bounds |a·W_h e_x[j]| of a head, [B, rows, keys]."""
    inexact = gamma(values.weight.shape[1] + PASS) * values.carried
    exact = not bool(values.reach.any())  # then all that the values are off by is their own

    def beyond(a: Adjoint, h: int) -> Tensor:
        part, columns = a.values[:, h - a.window[0][0]], slice(*a.window[-1])
        size = part.abs() @ inexact[h, :, columns].T
        if exact:
            return size
        return size + (part @ values.weight[h, columns]).abs() @ values.reach.T

    return beyond


def _middle(sizes: Tensor, weights: Tensor, price: Tensor) -> Tensor:
    """Return the m [B, 1] with the least Σ_j weights_j |sizes_j - m| + price·m of sizes [B, n]."""
    ordered, order = sizes.sort(dim=-1)
    below = weights.expand_as(sizes).gather(-1, order).cumsum(-1)
    wanted = ((weights.sum() - price) / 2).clamp_min(0)
    place = (below < wanted).sum(-1, keepdim=True).clamp_max(sizes.shape[-1] - 1)
    return torch.where(wanted > 0, ordered.gather(-1, place), 0.0)
