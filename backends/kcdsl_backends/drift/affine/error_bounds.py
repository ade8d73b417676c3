"""Bounds of many functionals of one entry: elements, deviations, Gram norms of rows, ellipsoids."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends import forked
from kcdsl_backends.drift.affine.adjoint import (
    MORE,
    Adjoint,
    Row,
    at,
    by_rows,
    diagonal,
    largest_eigenvalue,
    meet,
    parallel,
    square_of,
    whole,
)
from kcdsl_backends.drift.affine.ellipsoids import (
    ImageEllipsoid,
    Part,
    RankOne,
    around_sum,
    image,
    joined,
    norm_on_ellipsoid,
)
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine.row_sums import RowBound
from kcdsl_backends.drift.affine.tape import INPUT, Nonlinear, RowImages, Tape, TapeEntry
from kcdsl_backends.drift.boxes import SAFE
from kcdsl_backends.process import refuse_late

ROUNDED = 2.0**-36
"""More than the relative error of a product of adjoints in a reverse pass."""
FACTORED = 2.0**-24
"""More than √n times the relative error of the columns of a QR factorisation."""


MANY = 2**10
"""Functionals from which on their norm is that of the ellipsoid around them, to save time."""


@dataclass(slots=True)
class _Gram:
    """Sums of a reverse pass of B functionals, for a bound of their norm.

    With columns b_j of the symbols, |Σ b_j ξ_j|² <= (Σ d_j) λ for any d > 0, where λ is the largest
    eigenvalue of Σ b_j b_jᵀ/d_j; d_j = |b_j| here. `middle` [B] is added to the functionals.
    `loose` [B] bounds further parts functional by functional, `further` the norm of others; `parts`
    are ellipsoids of others. `single` [B] bounds all parts but the middle functional by functional,
    if an ellipsoid is wanted.
    """

    products: Tensor
    middle: Tensor
    loose: Tensor
    trace: float = 0.0
    further: float = 0.0
    parts: list[Part] = field(default_factory=list)
    single: Tensor | None = None

    @staticmethod
    def of(values: Tensor, *, surround: bool) -> _Gram:
        count = values.shape[0]
        zero = values.new_zeros(count)
        single = zero.clone() if surround else None
        return _Gram(values.new_zeros(count, count), zero, zero.clone(), single=single)

    def add(self, functional: Adjoint, radius: Tensor) -> None:
        """Add one symbol for every element."""
        part = radius.expand(functional.shape)[at(functional.window)].flatten()
        values = functional.values.flatten(1)
        alone = diagonal(values)
        if alone is not None:
            self._separate(alone * part)
            return
        if self.single is not None and values.shape[0] > values.shape[1]:
            self._few(values, part, self.single)
            return
        some = part != 0
        if bool(some.all()):
            self.columns(values * part)
        elif bool(some.any()):
            self.columns(values[:, some] * part[some])

    def _few(self, values: Tensor, sizes: Tensor, single: Tensor) -> None:
        """Add symbols of these sizes [n] for functionals [B, n] of few elements; they become a
        part, which `joined` multiplies together with other parts of the same functionals."""
        columns = values.norm(dim=0).clamp_min(2.0**-450)
        weights = (sizes * columns).sum() * (sizes / columns) * SAFE
        self.parts.append(ImageEllipsoid.of(values, weights))
        single += values.abs() @ sizes * SAFE

    def columns(self, columns: Tensor) -> None:
        """Add symbols with these columns [B, n]; parallel columns count as one symbol."""
        columns, lost = parallel(columns)
        if lost is not None:
            self.loose += lost
        sizes = columns.norm(dim=0)
        self.products += square_of(columns / sizes.clamp_min(2.0**-900).sqrt())
        self.trace += float(sizes.sum())
        if self.single is not None:
            self.single += columns.abs().sum(-1) * SAFE

    def _separate(self, sizes: Tensor) -> None:
        """Add one symbol of its own for each functional."""
        sizes = sizes.abs()
        self.products.diagonal().add_(sizes)
        self.trace += float(sizes.sum())
        if self.single is not None:
            self.single += sizes * SAFE

    def rows(self, functional: Adjoint, bound: RowBound) -> None:
        """Add the whole error of an entry whose rows have a bound: one symbol for each element and
        for each direction of a row."""
        self.add(functional, bound.radius)
        part = at(functional.window)
        for along, size in zip(bound.along, bound.size, strict=True):
            sums = (functional.values * along[part]).sum(-1)
            self.columns(sums * size[part[0]])
        self.loose += ROUNDED * functional.magnitude(bound.whole)

    def symbols(self, functional: Adjoint, entry: TapeEntry) -> None:
        """Add the part of an entry that is bounded element by element."""
        if entry.apart is not None:
            self.add(functional, entry.apart.radius)
            self._add_nonlinear(entry.apart.rest, functional)
        elif entry.radius is not None:
            self.add(functional, entry.radius)

    def _add_nonlinear(self, part: Nonlinear, functional: Adjoint) -> None:
        """Add a part that is bounded functional by functional."""
        if self.single is None or part.around is None:
            self.further += part.together(functional)
        else:
            self.parts += part.around(functional)
        if self.single is not None:
            low, high = part.between(functional)
            self.single += torch.maximum(-low, high)

    def add_terms(self, functional: Adjoint, entry: TapeEntry) -> None:
        """Add what an entry contributes besides its radius."""
        if entry.centre is not None:
            self.middle = self.middle + functional.against(entry.centre)
            self.loose += 2.0**-30 * functional.magnitude(entry.centre.abs())
        if entry.nonlinear is not None:
            self._add_nonlinear(entry.nonlinear, functional)
        self.loose += ROUNDED * functional.magnitude(entry.widest)

    def gather(self, found: RowImages) -> None:
        """Add the terms that functionals of one row of a product collect on their way."""
        assert self.single is not None
        self.parts += found.parts
        self.single += found.single
        self.loose += found.lost

    def merge(self, below: _Gram, factor: float) -> None:
        """Add the functionals below an entry that amplifies them by up to 1 + factor."""
        self.further += factor * below.norm() + below.further
        self.products += below.products
        self.trace += below.trace
        self.middle = self.middle + below.middle
        self.loose += below.loose

    def amplify(self, tape: Tape, functional: Adjoint, entry: TapeEntry, floor: int) -> None:
        """Add 1 + factor times the terms below an entry, for an ellipsoid: of the functionals of
        one row, or of its elements if these are fewer."""
        assert entry.amplified is not None
        factor = float(entry.amplified.factor.expand(entry.shape)[functional.first])
        values = functional.values.flatten(1)
        few = values.shape[0] > values.shape[1]
        read = functional
        if few:
            unit = torch.eye(values.shape[1], dtype=values.dtype, device=values.device)
            unit = unit.reshape(-1, *functional.values.shape[1:])
            read = Adjoint(unit, functional.window, functional.shape)
        below = _reverse(tape, dict(entry.vjp(read)), read.values, floor, surround=True)
        shape = below.ellipsoid() * (1 + factor) ** 2 * (1 + 2.0**-40)
        sizes = below.elements * (1 + factor)
        assert self.single is not None
        if few:
            image = ImageEllipsoid.of(values, shape)
            self.parts.append(image)
            self.single += torch.minimum(image.sizes, values.abs() @ sizes * SAFE)
        else:
            self.parts.append(shape)
            self.single += sizes

    def floor(self, functional: Adjoint, entry: TapeEntry) -> None:
        """Add the error of an entry at which a pass stops, row by row; if no ellipsoid is wanted,
        by the norms of the rows' errors."""
        self.loose += ROUNDED * functional.magnitude(entry.widest)
        for row, part in by_rows(functional):
            columns = slice(*part.window[-1])
            if row not in entry.ellipsoids:
                self.add(part, entry.error_bound)
                continue
            if not bool(part.values.any()):
                continue
            matrix = entry.ellipsoids[row][columns, columns]
            if self.single is None:
                self.further += norm_on_ellipsoid(matrix, part.values.flatten(1))
                continue
            inner, sizes = image(matrix, part.values.flatten(1))
            self.parts.append(inner)
            self.single += torch.minimum(sizes, part.magnitude(entry.error_bound))

    @property
    def rest(self) -> float:
        return float(self.middle.norm() + self.loose.norm()) + self.further

    def norm(self, matrix: Tensor | None = None) -> float:
        """Bound the norm of the functionals; of many, by this ellipsoid around them alone."""
        if matrix is not None and len(matrix) >= MANY:
            trace = float(matrix.diagonal().sum()) * MORE
            return math.sqrt(largest_eigenvalue(matrix, trace)) * MORE
        together = math.sqrt(self.trace * largest_eigenvalue(self.products, self.trace))
        self.parts = list[Part](joined(self.parts))
        for part in joined(self.parts):
            if isinstance(part, RankOne):
                together += math.sqrt(part.largest)
            else:
                size = float(part.diagonal().sum()) * (1 + 2.0**-30)
                together += math.sqrt(largest_eigenvalue(part, size))
        return (together + self.rest) * (1 + 2.0**-30)

    @property
    def elements(self) -> Tensor:
        """Return bounds [B] of the functionals one by one."""
        assert self.single is not None
        return (self.single + self.middle.abs() + self.loose) * SAFE * SAFE

    def ellipsoid(self) -> Tensor:
        """Return an ellipsoid [B, B] around the functionals."""
        self.parts = list[Part](joined(self.parts))  # shared with `norm`
        rest = float(self.loose.norm()) + self.further
        own, alone = self.trace * self.products, RankOne(self.middle, 0.0, rest**2)
        return around_sum([*self.parts, own, RankOne(self.middle), alone])


def gram_norm(tape: Tape, index: int, functionals: Adjoint, floor: int = INPUT) -> float:
    """Bound the Euclidean norm of functionals of the error of one entry; where the pass may stop,
    see `Tape.bound`."""
    return _reverse(tape, {index: functionals}, functionals.values, floor, surround=False).norm()


def gram_ellipsoid(tape: Tape, index: int, functionals: Adjoint, floor: int) -> Tensor:
    """Return an ellipsoid [B, B] around functionals of the error of one entry; adjoints at `floor`
    or before are bounded by the ellipsoids and error bounds there."""
    return _reverse(
        tape, {index: functionals}, functionals.values, floor, surround=True
    ).ellipsoid()


def _reverse(
    tape: Tape, pending: dict[int, Adjoint], values: Tensor, floor: int, *, surround: bool
) -> _Gram:
    """Take functionals back to the input, or to the floor, where ellipsoids bound them. With
    `surround` the sums are for an ellipsoid; else functionals of one entry are compressed if they
    outnumber its elements."""
    gram = _Gram.of(values, surround=surround)
    while pending:
        refuse_late()
        index = max(pending)
        functional = pending.pop(index)
        if index == INPUT:
            gram.add(functional, tape.radius)
            break
        entry = tape.entries[index]
        if index <= floor:
            gram.floor(functional, entry)
            continue
        if entry.rows is not None:
            gram.rows(functional, entry.rows.rows)
            continue
        gram.add_terms(functional, entry)
        if surround and entry.gathered is not None and functional.one_row:
            gathered = entry.gathered(functional, floor)
            if gathered is not None:
                gram.symbols(functional, entry)
                gram.gather(gathered)
                meet(pending, gathered.adjoints)
                continue
        amplified = entry.amplified
        if surround and amplified is not None and not pending and functional.single_row:
            gram.symbols(functional, entry)
            gram.amplify(tape, functional, entry, floor)
            break
        adjoints = entry.vjp(functional)
        alone = not pending and len(adjoints) == 1
        wide = alone and adjoints[0][1].values[0].numel() < values.shape[0]
        if wide and not surround:
            if entry.radius is not None:
                gram.loose += functional.magnitude(entry.radius) * SAFE
            source, part = adjoints[0]
            inexact = FACTORED * part.magnitude(tape.entries[source].error_bound).norm()
            norm = gram_norm(tape, source, _compressed(tape, part), floor)
            gram.further += (norm + float(inexact)) * SAFE
            if amplified is not None:
                gram.loose += functional.magnitude(amplified.loose) * SAFE
            break
        gram.symbols(functional, entry)
        if amplified is not None:
            if alone and functional.single_row:
                factor = float(amplified.factor.expand(entry.shape)[functional.first])
                gram.merge(_reverse(tape, dict(adjoints), values, floor, surround=False), factor)
                break
            gram.loose += functional.magnitude(amplified.loose) * SAFE
        meet(pending, adjoints)
    return gram


def _compressed(tape: Tape, functionals: Adjoint) -> Adjoint:
    """Return as many functionals as the window has elements, with the same norm: R of A = QR. R of
    the previous matrix is reused if the matrix is the same, as it often is in the next row."""
    matrix = functionals.values.flatten(1)
    if tape.factored is None or not torch.equal(tape.factored[0], matrix):
        tape.factored = matrix, torch.linalg.qr(matrix, mode="r").R
    triangular = tape.factored[1]
    shape = (triangular.shape[0], *functionals.values.shape[1:])
    return Adjoint(triangular.reshape(shape), functionals.window, functionals.shape)


BATCH = 512
"""Functionals bounded by one reverse pass."""
REST = 128
"""Elements of the rows of a head from which on each row is bounded by a pass of its own."""
MOST_NUMBERS = 2**28
"""Numbers of the functionals of one reverse pass, where each reads every token: 2 GiB."""


def unit_functionals(
    shape: tuple[int, ...],
    device: torch.device,
    *,
    by_row: bool = False,
    size: int = BATCH,
    only: Collection[Row] | None = None,
) -> Iterator[tuple[int, int, int, Adjoint]]:
    """Yield (first index, start, stop, functionals) that read single elements of a tensor.

    The functionals read elements start to stop of the flattened rest [i, ...]; all of them together
    cover the tensor. At most `size` come in one batch; with a long rest, or with `by_row`, no batch
    reads two rows of the last dimension. The same elements of all rows follow one another, as their
    passes share work. `only` has the rows to read, (i,) where batches read several; None: all.
    """
    rest, count = shape[1:], math.prod(shape[1:])
    if _reads_rows(shape, by_row, size):
        for start in range(0, shape[-1], size):
            stop = min(shape[-1], start + size)
            part = torch.eye(stop - start, dtype=torch.float64, device=device)
            for row in rows(shape):
                if only is not None and row not in only:
                    continue
                before = sum(k * math.prod(shape[axis + 2 :]) for axis, k in enumerate(row[1:]))
                window = (*((i, i + 1) for i in row), (start, stop))
                values = part.reshape(-1, *(1 for _ in row), stop - start)
                yield row[0], before + start, before + stop, Adjoint(values, window, shape)
        return
    for i in range(shape[0]):  # so that windows stay small
        if only is not None and (i,) not in only:
            continue
        for start in range(0, count, size):
            part = _unit(start, min(count, start + size), count, device)
            window = ((i, i + 1), *whole(rest))
            functionals = Adjoint(part.reshape(len(part), 1, *rest), window, shape)
            yield i, start, start + len(part), functionals


def _reads_rows(shape: tuple[int, ...], by_row: bool, size: int) -> bool:
    """Return whether no batch reads two rows of the last dimension."""
    rest = math.prod(shape[1:])
    return len(shape) > 1 and (by_row or len(shape) == 2 or rest > min(size, REST))


def of_elements(
    tape: Tape,
    shape: tuple[int, ...],
    known: tuple[Tensor, ...],
    bound: Callable[[int, int, int, Adjoint], tuple[Tensor, ...] | None],
    *,
    by_row: bool = False,
) -> tuple[Tensor, ...]:
    """Return bounds of every element of a tensor.

    Args:
        known: bounds that are kept where `bound` gives none.
        bound: the bounds of functionals of `unit_functionals`, None for no bounds.
        by_row: whether no batch may read two rows of the last dimension.
    """
    size, device = at_once(tape), known[0].device

    def bound_rows(share: Sequence[Row], results: tuple[Tensor, ...]) -> None:
        some = set(share)
        each = unit_functionals(shape, device, by_row=by_row, size=size, only=some)
        for i, start, stop, functionals in each:
            found = bound(i, start, stop, functionals)
            if found is not None:
                for result, values in zip(results, found, strict=True):
                    result[i].view(-1)[start:stop] = values

    parts = (
        list(rows(shape)) if _reads_rows(shape, by_row, size) else [(i,) for i in range(shape[0])]
    )
    return over_rows(tape, parts, known, math.prod(shape), bound_rows)


DIVIDED = 2**23
"""Numbers of adjoints from which on rows are divided among processes: about a second of work."""


def over_rows(
    tape: Tape,
    some: Sequence[Row],
    known: tuple[Tensor, ...],
    functionals: int,
    work: Callable[[Sequence[Row], tuple[Tensor, ...]], None],
) -> tuple[Tensor, ...]:
    """Return copies of `known` after `work(share, copies)` has written the results of all rows, for
    which it bounds so many functionals. Bounds by chance are counted, so they stay in one process,
    as do those on a device."""
    widest = max((entry.reference.shape[-1] for entry in tape.entries), default=1)
    alone = tape.chance is not None or known[0].device.type != "cpu"
    if alone or functionals * widest < DIVIDED:
        copies = tuple(k.clone(memory_format=torch.contiguous_format) for k in known)
        work(some, copies)
        return copies

    def write(share: Sequence[Row], results: forked.Arrays) -> None:
        work(share, tuple(map(torch.from_numpy, results)))

    found = forked.over_rows(some, tuple(k.numpy() for k in known), write)
    return tuple(map(torch.from_numpy, found))


def _unit(start: int, stop: int, count: int, device: torch.device) -> Tensor:
    """Return functionals [stop - start, count] that read one element each."""
    values = torch.zeros(stop - start, count, dtype=torch.float64, device=device)
    values[torch.arange(stop - start), torch.arange(start, stop)] = 1.0
    return values


def of_sums(tokens: int) -> int:
    """Return how many are bounded by one pass where they read rows of many tokens in sums: the more
    rows, the more work they share."""
    return min(4 * BATCH, max(2 * BATCH, 16 * tokens))


def at_once(tape: Tape) -> int:
    """Return how many functionals go through a reverse pass together, so that memory is bounded for
    any number of tokens. In sums over rows, where a block has one softmax, each takes the numbers
    of one row for every head: the more of them, the less often what they share is formed."""
    matrices = [entry.reference for entry in tape.entries if entry.reference.dim() == 2]
    softmaxes = [entry.reference for entry in tape.entries if entry.balance is not None]
    sums = any(entry.rows is not None for entry in tape.entries) and not tape.last_floor
    if sums and len(softmaxes) == 1:
        columns = max(matrix.shape[1] for matrix in matrices)
        most = MOST_NUMBERS // (len(softmaxes[0]) * columns)
        return max(1, min(of_sums(softmaxes[0].shape[-1]), most))
    widest = max((matrix.numel() for matrix in matrices), default=1)
    return max(1, min(BATCH, MOST_NUMBERS // widest))


def elements(tape: Tape, index: int, needed: Tensor, floor: int = INPUT) -> Tensor:
    """Bound |e| of an entry, element by element: by reverse passes in the rows that are needed.

    Args:
        needed: [..., 1] bool; other rows keep the error bound of the entry.
        floor: where the passes may stop, see `Tape.bound`.
    """
    entry = tape.entries[index]
    if entry.moved is not None and entry.cases is None:
        return _elements_before(tape, entry, entry.moved, needed, floor)

    def bound(i: int, start: int, stop: int, functionals: Adjoint) -> tuple[Tensor] | None:
        if not bool(needed[at(functionals.window[:-1])].any()):
            return None
        return (tape.bound(index, functionals, floor).magnitude(tape.radius),)

    known = (entry.error_bound,)
    (found,) = of_elements(tape, entry.shape, known, bound, by_row=entry.by_row)
    return torch.minimum(found, entry.error_bound)


def _elements_before(
    tape: Tape,
    entry: TapeEntry,
    moved: tuple[int, Callable[[Tensor], Tensor]],
    needed: Tensor,
    floor: int,
) -> Tensor:
    """Bound |e| of an entry in the rows needed by that of the entry it was moved from."""
    index, change = moved
    source = tape.entries[index]
    if index <= floor or not bool(needed.any()):
        return entry.error_bound
    place = change(torch.arange(source.reference.numel()).to(needed.device).view(source.shape))
    read = torch.zeros(source.reference.numel(), dtype=torch.bool, device=needed.device)
    read[place[needed.expand(entry.shape)]] = True
    found = change(elements(tape, index, read.view(source.shape).any(-1, keepdim=True), floor))
    if entry.radius is not None:
        found = (found + entry.radius) * SAFE
    return torch.where(needed, torch.minimum(found, entry.error_bound), entry.error_bound)


def tighten_error(
    run: KernelRun,
    node: Node,
    index: int,
    needed: Callable[[Tensor], Tensor],
    floors: Sequence[int] | None = None,
) -> None:
    """Lower the error bound of an entry that an operation reads by reverse passes, in the rows
    [..., 1] for which `needed` finds the present error bound too large. The passes stop at each of
    `floors` in turn, by default at every possible one."""
    tape = run.tape
    if _bounds_from_passes(run, tape.entries[index].name):
        return
    for floor in tape.floors if floors is None else floors:
        rows = needed(tape.entries[index].error_bound)
        if not run.passing(node, index, "elements", rows, floor):
            return
        tape.tighten(index, elements(tape, index, rows, floor))


def _bounds_from_passes(run: KernelRun, name: str) -> bool:
    """Return whether reverse passes found the error bounds of a result before a cast, of its own or
    of the operand of an elementwise function."""
    while name in run.nodes and run.nodes[name].op in ("silu", "gelu", "tanh"):
        name = run.nodes[name].inputs[0]
    return name in run.lowered or name in run.by_length


def deviations(
    tape: Tape,
    index: int,
    weights: Tensor,
    needed: Tensor,
    floor: int = INPUT,
    read: Tensor | None = None,
) -> Tensor:
    """Bound |e_j - Σ_k weights_k e_k| in every row of an entry [..., n], each row by a pass of its
    own: rules for functionals of one row do not hold for several rows together.

    Args:
        weights: [..., n], for every row the weights of a mean.
        needed: [..., 1] bool: rows for which reverse passes are made.
        floor: where the passes may stop, see `Tape.bound`.
        read: [..., n] bool: the elements j for which they are made, those with weights among them;
            None: all.
    """
    entry = tape.entries[index]
    wide = (entry.error_bound + (weights.abs() * entry.error_bound).sum(-1, keepdim=True)) * SAFE
    unit = torch.eye(entry.shape[-1], dtype=torch.float64, device=weights.device)

    def bound_rows(share: Sequence[Row], results: tuple[Tensor, ...]) -> None:
        for row in share:
            some = slice(None) if read is None else read[row].nonzero()[:, 0]
            functionals = on_row(unit[some] - weights[row], row, entry.shape)
            functionals = functionals if read is None else functionals.narrowed(-1)
            bounds = tape.bound(index, functionals, floor).magnitude(tape.radius)
            results[0][row][some] = bounds

    chosen = list(_chosen(needed))
    count = len(chosen) * entry.shape[-1]
    (found,) = over_rows(tape, chosen, (wide,), count, bound_rows)
    return torch.minimum(found, wide)


def directions(tape: Tape, index: int, along: Tensor, needed: Tensor) -> Tensor:
    """Bound |Σ_j along_j e_j| in every row of an entry [..., n] -> [..., 1]."""
    entry = tape.entries[index]
    found = (along.abs() * entry.error_bound).sum(-1, keepdim=True) * SAFE
    for row in _chosen(needed):
        functional = on_row(along[row].reshape(1, -1), row, entry.shape)
        found[row] = tape.bound(index, functional).magnitude(tape.radius)
    return found


def norms(
    tape: Tape, index: int, functionals: Tensor, needed: Tensor, floor: int = INPUT
) -> Tensor:
    """Bound the Euclidean norm of functionals [m, n] of every row of an entry -> [..., 1]; infinite
    in rows that are not `needed` [..., 1]. Where passes may stop, see `Tape.bound`."""
    return _norms(tape, index, lambda row: functionals, needed, floor)


def weighted_norms(
    tape: Tape, index: int, weights: Tensor, needed: Tensor, floor: int = INPUT
) -> Tensor:
    """Bound the Euclidean norm of weights∘e likewise, of weights [..., n] of every element."""
    return _norms(tape, index, lambda row: torch.diag(weights[row]), needed, floor)


def _norms(
    tape: Tape,
    index: int,
    functionals: Callable[[Row], Tensor],
    needed: Tensor,
    floor: int = INPUT,
) -> Tensor:
    entry = tape.entries[index]

    def bound_rows(share: Sequence[Row], results: tuple[Tensor, ...]) -> None:
        for row in share:
            each = on_row(functionals(row), row, entry.shape)
            results[0][row] = gram_norm(tape, index, each, floor)

    chosen, far = list(_chosen(needed)), torch.full_like(entry.error_bound[..., :1], torch.inf)
    count = len(chosen) * entry.shape[-1]
    (found,) = over_rows(tape, chosen, (far,), count, bound_rows)
    return found


def surround_rows(tape: Tape, index: int, needed: Tensor, floor: int) -> tuple[Tensor, Tensor]:
    """Find ellipsoids around the errors of the rows [..., 1] needed, by reverse passes that stop at
    `floor` (see `Tape.bound`). Return bounds of the elements and of the norms of these rows,
    infinite in other rows."""
    entry, chosen = tape.entries[index], list(_chosen(needed))
    far, n = torch.full_like(entry.error_bound, torch.inf), entry.shape[-1]
    places = {row: place for place, row in enumerate(chosen)}

    def bound_rows(share: Sequence[Row], results: tuple[Tensor, ...]) -> None:
        single, norm, matrices = results
        for row, gram in _surrounded(tape, index, share, floor):
            matrix = matrices[places[row]] = gram.ellipsoid()
            single[row], norm[row] = gram.elements, gram.norm(matrix)

    known = far, far[..., :1], far.new_full((len(chosen), n, n), torch.nan)
    single, norm, matrices = over_rows(tape, chosen, known, len(chosen) * n, bound_rows)
    tape.surround(index, dict(zip(chosen, matrices, strict=True)))
    return single, norm


def each_ellipsoid(
    tape: Tape, index: int, needed: Tensor, floor: int
) -> Iterator[tuple[Row, Tensor, Tensor]]:
    """Yield such ellipsoids one by one, with bounds of the elements, without storing them."""
    for row, gram in _surrounded(tape, index, _chosen(needed), floor):
        yield row, gram.ellipsoid(), gram.elements


def _surrounded(
    tape: Tape, index: int, some: Iterable[Row], floor: int
) -> Iterator[tuple[Row, _Gram]]:
    """Yield the sums of passes of the unit functionals of some rows."""
    shape = tape.entries[index].shape
    unit = torch.eye(shape[-1], dtype=torch.float64, device=tape.radius.device)
    for row in some:
        pending = {index: on_row(unit, row, shape)}
        yield row, _reverse(tape, pending, unit, floor, surround=True)


def _chosen(needed: Tensor) -> Iterator[Row]:
    """Yield the index of every row needed, all heads of a row in turn: they often share reads."""
    yield from sorted(
        (tuple(row) for row in needed[..., 0].nonzero().tolist()), key=lambda row: row[::-1]
    )


def rows(shape: tuple[int, ...]) -> Iterator[Row]:
    """Yield the index of every row of the last dimension."""
    return product(*map(range, shape[:-1]))


def on_row(values: Tensor, row: tuple[int, ...], shape: tuple[int, ...]) -> Adjoint:
    """Return functionals [B, n] of one row of a tensor."""
    window = (*((i, i + 1) for i in row), (0, shape[-1]))
    return Adjoint(values.reshape(-1, *(1 for _ in row), shape[-1]), window, shape)
