"""The errors of one kernel as a linear recurrence, and bounds of their functionals (section 1).

Every entry of the tape states

    e_n = Σ_m L_nm e_m + o_n,    |o_n - centre| <= radius element by element,

so a functional a·e_n is bounded by one reverse pass: Σ over entries of adjoint·centre ±
|adjoint|·radius. Entry 0 is the block input on its region, and is kept apart.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from kcdsl_backends.drift.affine.adjoint import (
    Adjoint,
    Row,
    at,
    by_rows,
    diagonal,
    in_cache,
    largest_eigenvalue,
    square_of,
)
from kcdsl_backends.drift.affine.cases import Cases, Ends, Together
from kcdsl_backends.drift.affine.ellipsoids import (
    Ellipsoids,
    ImageEllipsoid,
    Part,
    RankOne,
    RowSquares,
    bound_on_ellipsoid,
    reached,
)
from kcdsl_backends.drift.affine.independent import Chance, Parts, Roundings
from kcdsl_backends.drift.affine.row_sums import BoundedRows, RowSums, WeightedRows
from kcdsl_backends.drift.boxes import SAFE, gamma
from kcdsl_backends.process import refuse_late

Adjoints = Sequence[tuple[int, Adjoint]]
"""Functionals of the errors of operands."""
VJP = Callable[[Adjoint], Adjoints]
"""Lᵀ: the functionals of the operands' errors that a functional of the result's error is."""
RowVJP = Callable[[Adjoint], Sequence[tuple[int, Adjoint | RowSums]]]
"""The same of one row of a product, of operands of which many rows are read."""
RowBounds = Callable[[Row, Tensor], Tensor]
"""Bounds Σ |α_k o_k| of a row of a vector o for weights |α| [B, n] -> [B]."""
PASS = 8
"""Roundings of a reverse pass at an entry beside the products of its map: sums of adjoints."""
SMALL = 2.0**-9
"""Up to this multiple of the linear part a remainder is worth no ellipsoids."""
INPUT = 0
"""The entry of the block input."""
NORMS_OF_LAYER = 2
"""Norms of a layer: behind more of them, passes stop at ellipsoids around rows of the last one."""
OF_REST = 2.0**-3
"""Up to this share of what a pass has found so far, a bound of the rest by norms suffices."""
MANY_PRODUCTS = 2**26
"""From so many products on, small terms of a functional are bounded without reverse passes."""


def reads_many(shape: Sequence[int], inputs: int) -> bool:
    """Return whether a linear with this many inputs takes many products for results of a shape."""
    return math.prod(shape) * inputs >= MANY_PRODUCTS


@dataclass(frozen=True, slots=True)
class Nonlinear:
    """A part of o_n that is bounded functional by functional only (Definition 1.2).

    `between` returns lower and upper bounds [B] of the part for functionals; `norm` bounds the
    Euclidean norm of the part for all of them, if that is less than the norm of those bounds;
    `around` returns ellipsoids [B, B] whose members sum to the part, if they give smaller bounds.
    """

    between: Callable[[Adjoint], tuple[Tensor, Tensor]]
    norm: Callable[[Adjoint], float] | None = None
    around: Callable[[Adjoint], list[Part]] | None = None

    def together(self, adjoint: Adjoint) -> float:
        """Bound the Euclidean norm of this part for all functionals."""
        if self.norm is not None:
            return self.norm(adjoint)
        low, high = self.between(adjoint)
        return float(torch.maximum(-low, high).norm()) * SAFE

    def where(self, keep: Tensor) -> Nonlinear:
        """Return the same part of keep∘o_n."""
        norm, around = self.norm, self.around
        return Nonlinear(
            lambda a: self.between(a.times(keep)),
            None if norm is None else lambda a: norm(a.times(keep)),
            None if around is None else lambda a: around(a.times(keep)),
        )


@dataclass(frozen=True, slots=True)
class SingleRow:
    """Another reverse rule for functionals of one row of a product.

    `nonlinear` and `vjp` replace those of the entry. `nonlinear` includes the own errors of an
    operand; `vjp` leaves them out. `nearer`: its bounds are smaller, not only cheaper.
    """

    nonlinear: Nonlinear
    vjp: RowVJP
    nearer: bool = False

    def where(self, keep: Tensor) -> SingleRow:
        """Return the same rule for keep∘e."""
        vjp = self.vjp
        return SingleRow(self.nonlinear.where(keep), lambda a: vjp(a.times(keep)), self.nearer)


@dataclass(frozen=True, slots=True)
class RowImages:
    """The terms that functionals [B] of one row of a product collect on the way to the rows of the
    operand's source: `parts` are ellipsoids around them, `single` [B] bounds them functional by
    functional, `lost` [B] bounds the float64 error; `adjoints` are the functionals of other
    entries."""

    parts: list[Part]
    single: Tensor
    lost: Tensor
    adjoints: Adjoints


Gather = Callable[[Adjoint, int], RowImages | None]
"""Gathers what such functionals meet; None where a pass that stops at an entry meets less."""


@dataclass(frozen=True, slots=True)
class Amplified:
    """A remainder that is a multiple of the linear part of a functional (section 5).

    `factor` [..., 1] bounds the multiple, one for each row; `loose` bounds the remainder element by
    element, for functionals that read more than a single row.
    """

    factor: Tensor
    loose: Tensor

    def size(self, functional: Adjoint, read: Adjoint, source: TapeEntry) -> Tensor:
        """Bound the remainder of functionals [B] whose linear part is the functional `read` of the
        source: row by row by its ellipsoid, or element by element."""
        if not source.ellipsoids:
            return functional.magnitude(self.loose)
        total = torch.zeros_like(functional.values.flatten(1)[:, 0])
        for (row, part), (_, below) in zip(by_rows(functional), by_rows(read), strict=True):
            found, factor = part.magnitude(self.loose), float(self.factor[row].amax())
            if row in source.ellipsoids and factor > SMALL:
                along = bound_on_ellipsoid(source.ellipsoids[row], below.values.flatten(1))
                found = torch.minimum(found, along * factor * SAFE)
            total = total + found
        return total * SAFE


@dataclass(frozen=True, slots=True)
class SplitError:
    """Bounds of o without centre and nonlinear part: a `radius` smaller than that of the entry,
    plus a `rest` with known row sums: at most `caps` element by element, and `total` [..., 1]
    together. The radius of the entry bounds both together."""

    radius: Tensor
    rest: Nonlinear
    caps: Tensor
    total: Tensor


@dataclass(frozen=True, slots=True)
class Shared:
    """A part s of o that is the same in both kernels: the effect on a known number of weights of a
    region around those of the checkpoint.

    `size` bounds |s| and `rest` bounds |o - s|, element by element; where `keep` is 0, s is zero
    and the rest is all of o. The radius of the entry bounds both together.
    """

    size: Tensor
    rest: Tensor
    keep: Tensor | None = None

    def of(self, functional: Adjoint) -> Adjoint:
        """Return the functional of s that belongs to a functional of o."""
        return functional if self.keep is None else functional.times(self.keep)


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """One line of the recurrence.

    `error_bound` bounds |e| element by element; `centre` and `radius` are None if they are zero.
    `kept` says that the linear map was kept everywhere, with nothing rounded off to a grid;
    `carried` is the error bound from operand to operand, if reverse passes have lowered it;
    `ellipsoids` hold the errors of some rows.
    `ends`, `cases` and, of a softmax, `choices` bound the stored value more closely than the error
    bound; `together` bounds o more closely than the radius, which holds as well; `before` is the
    result before a cast to nearest or, of the output, a free one. `roundings` split the radius for
    bounds by chance, `apart` for others, `shared` for those of both kernels together. `balance`
    [..., 1] bounds |Σ e| of every row of probabilities. `one_row` is for functionals of one row of
    a product, `gathered` for ellipsoids around many of them, `rows` for functionals of many rows at
    once, `weighed` for small ones of single rows of a linear, instead of a pass. `moved` is the
    entry whose elements these are, with the map that moved or copied them.
    `squares` bounds weighted squares of errors, and `length` [..., 1] the norms of their rows.
    """

    name: str
    reference: Tensor
    error_bound: Tensor
    vjp: VJP
    centre: Tensor | None = None
    radius: Tensor | None = None
    nonlinear: Nonlinear | None = None
    amplified: Amplified | None = None
    kept: bool = True
    carried: Tensor | None = None
    ellipsoids: Ellipsoids = field(default_factory=dict)
    ends: Ends | None = None
    choices: Ends | None = None
    cases: Cases | None = None
    together: Together | None = None
    before: TapeEntry | None = None
    roundings: Roundings | None = None
    apart: SplitError | None = None
    balance: Tensor | None = None
    one_row: SingleRow | None = None
    gathered: Gather | None = None
    shared: Shared | None = None
    rows: BoundedRows | None = None
    weighed: WeightedRows | None = None
    moved: tuple[int, Callable[[Tensor], Tensor]] | None = None
    squares: RowSquares | None = None
    length: Tensor | None = None

    @property
    def by_row(self) -> bool:
        """Return whether functionals that read one row have smaller bounds."""
        return self.one_row is not None and self.one_row.nearer

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.reference.shape)

    @property
    def widest(self) -> Tensor:
        """Return the error bound as carried on; adjoint roundings are relative to it."""
        return self.error_bound if self.carried is None else self.carried

    @property
    def size(self) -> Tensor:
        """Return a bound of the magnitude of the stored value."""
        return (self.reference.abs() + self.error_bound) * SAFE


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds [B] of functionals: low <= a·e - region·(x - centre) - Σ shared·s - d <= high.

    d is the sum of the independent `parts` (None: d is zero). `shared` holds, by entry, functionals
    of the part that is the same in both kernels, with its size.
    """

    low: Tensor
    high: Tensor
    region: Adjoint | None
    parts: Parts | None = None
    chance: Chance | None = None
    shared: Mapping[str, tuple[Adjoint, Tensor]] = field(default_factory=dict)

    def with_parts(self, other: Range | None = None) -> tuple[Tensor, Tensor]:
        """Return bounds that include d; `other` adds its own parts."""
        both = self.parts if other is None else _with_parts(self.parts, other.parts)
        if both is None or self.chance is None:
            return self.low, self.high
        likely = both.likely(self.chance)
        return self.low - likely, self.high + likely

    def with_region(self, radius: Tensor) -> tuple[Tensor, Tensor]:
        """Return bounds of a·e for every input of the region."""
        low, high = self.with_parts()
        known = list(self.shared.values())
        known += [] if self.region is None else [(self.region, radius)]
        for functional, size in known:
            moved = functional.magnitude(size) * (1 + 2 * gamma(functional.values[0].numel() + 8))
            low, high = low - moved, high + moved
        return low, high

    def magnitude(self, radius: Tensor) -> Tensor:
        """Return a bound of |a·e| for every input of the region."""
        low, high = self.with_region(radius)
        return torch.maximum(-low, high)


@dataclass(slots=True)
class Tape:
    """Entries in the order of the run; `radius` is that of the region of the block input.

    With `chance` roundings are independent, and bounds hold except for a share of all runs. `cut`
    is the last entry at a norm: its error bound is tight, so a reverse pass that stops there is
    tried before one down to the input.
    """

    radius: Tensor
    entries: list[TapeEntry] = field(default_factory=list)
    cut: int = INPUT
    chance: Chance | None = None
    settled: int | None = None
    """The last entry with ellipsoids from before a cast: passes to the input find little more."""
    factored: tuple[Tensor, Tensor] | None = None
    """The last functionals that were replaced by as many as they read elements, and these."""

    def add(self, entry: TapeEntry) -> int:
        self.entries.append(entry)
        return len(self.entries) - 1

    @property
    def floors(self) -> tuple[int, ...]:
        """Return the entries where reverse passes may stop, the cheapest first; the cut alone if
        passes to the input would find little more."""
        norms = sum(entry.amplified is not None for entry in self.entries[: self.cut + 1])
        deep = norms > NORMS_OF_LAYER and bool(self.entries[self.cut].ellipsoids)
        if self.cut == self.settled or (deep and self.chance is None):
            return (self.cut,)
        known = self.entries[self.cut].rows is not None  # a bound down to the input
        return (INPUT,) if known or self.cut == INPUT or self.chance else (self.cut, INPUT)

    @property
    def last_floor(self) -> int:
        """Return the entry where passes of the stored output stop: for a point region, the cut of
        Rule 2.12."""
        wide = bool(self.radius.any())
        return INPUT if wide or self.cut != self.settled else self.cut

    @property
    def near(self) -> int:
        """Return the entry where passes for norms may stop: the cut, if it has ellipsoids."""
        return self.cut if self.entries[self.cut].ellipsoids else INPUT

    def tighten(self, index: int, error_bound: Tensor) -> None:
        """Lower the error bound of an entry to a bound found by reverse passes."""
        entry = self.entries[index]
        lowered = torch.minimum(entry.error_bound, error_bound)
        self.entries[index] = replace(entry, error_bound=lowered, carried=entry.widest)

    def surround(self, index: int, ellipsoids: Ellipsoids) -> None:
        """Keep ellipsoids around the errors of rows of an entry."""
        self.entries[index] = replace(self.entries[index], ellipsoids=ellipsoids)

    def bound(
        self,
        index: int,
        adjoint: Adjoint,
        floor: int = INPUT,
        formed: TapeEntry | None = None,
        *,
        shared: bool = False,
        spare: Tensor | None = None,
    ) -> Range:
        """Bound functionals of the error of one entry by a reverse pass.

        Adjoints at the entry `floor` or before are bounded by the error bounds there; adjoints
        elsewhere too if that bound is at most `spare` [B]. `formed` replaces the entry: the same
        result before its cast. With `shared`, the part that is the same in both kernels is kept
        separate; rules for single rows of products are not used then.
        """
        refuse_late()
        count = adjoint.values.shape[0]
        return self._bound({index: adjoint}, count, floor, formed, shared=shared, spare=spare)

    def _bound(
        self,
        pending: dict[int, Adjoint],
        count: int,
        floor: int,
        formed: TapeEntry | None = None,
        *,
        shared: bool,
        spare: Tensor | None,
    ) -> Range:
        middle = torch.zeros(count, dtype=torch.float64, device=self.radius.device)
        spread, parts = torch.zeros_like(middle), None
        if self.chance is not None:
            self.chance.ask(count)
        terms, common = 8, dict[str, tuple[Adjoint, Tensor]]()
        sums = dict[int, RowSums]()
        while pending or sums:
            index = max(pending.keys() | sums.keys())
            if index in sums:
                many = sums.pop(index)
                few, whole = _negligible(spare, many.whole, middle)
                if bool(few.all()):
                    spread = spread + whole
                    continue
                if index not in pending or pending[index].one_row:
                    part, others = many.row, many.magnitude()
                else:  # added before they are bounded: they may cancel
                    part, others = many.all_rows, many.lost()
                part, others = part.without(few), torch.where(few, whole, others)
                spread = spread + others + self._meet(pending, index, part)
            functional = pending.pop(index)
            if index == INPUT:
                return self._range(middle, spread, terms, functional, parts, common)
            entry, formed = formed or self.entries[index], None
            terms += functional.values[0].numel()
            if index <= floor:
                spread = spread + reached(entry.ellipsoids, entry.error_bound, functional)
                continue
            sizes = self._sizes(functional, entry, spare is not None)
            few, whole = _negligible(spare, partial(sizes.__getitem__, 0), middle)
            if bool(few.any()):
                spread = spread + whole * few
                if bool(few.all()):
                    continue
                functional = functional.without(few)
                sizes = [size * ~few for size in sizes]
            if entry.centre is not None:
                middle = middle + functional.against(entry.centre)
                spread = spread + 2.0**-30 * sizes[1]
            if shared and entry.shared is not None:
                common[entry.name] = entry.shared.of(functional), entry.shared.size
                spread = spread + functional.magnitude(entry.shared.rest)
            elif entry.together is not None:
                low, high = entry.together.cases.between(functional)
                middle, spread = middle + (low + high) / 2, spread + (high - low) / 2 * SAFE
                spread = spread + functional.magnitude(entry.together.rest)
                spread = spread + 2.0**-50 * (low.abs() + high.abs())
            elif self.chance is not None and entry.roundings is not None:
                parts = Parts.of(functional, entry.roundings).plus(parts)
                spread = spread + functional.magnitude(entry.roundings.sure)
            elif entry.apart is not None:
                spread = spread + functional.magnitude(entry.apart.radius)
                low, high = entry.apart.rest.between(functional)
                middle, spread = middle + (low + high) / 2, spread + (high - low) / 2 * SAFE
            elif entry.radius is not None:
                spread = spread + sizes[-1]
            nonlinear = entry.nonlinear
            vjp: VJP | RowVJP = entry.vjp
            other = None if self.chance is not None or shared else entry.one_row
            if other is not None and functional.one_row:
                nonlinear, vjp = other.nonlinear, other.vjp
            if nonlinear is not None:
                low, high = nonlinear.between(functional)
                middle, spread = middle + (low + high) / 2, spread + (high - low) / 2 * SAFE
            if entry.weighed is not None and functional.single_row and not shared:
                far = entry.weighed.magnitude(functional)
                few = far <= OF_REST * spread
                spread = spread + torch.where(few, far, 0.0)
                if bool(few.all()):
                    continue
                functional = functional.without(few)
            adjoints = list[tuple[int, Adjoint]]()
            for source, read in vjp(functional):
                if isinstance(read, RowSums):
                    spread = spread + self._gather(sums, pending, source, read)
                else:
                    adjoints.append((source, read))
            if entry.amplified is not None:
                alone = not pending and not sums
                if alone and functional.single_row and len(adjoints) == 1:
                    rest = self._bound(dict(adjoints), count, floor, shared=shared, spare=spare)
                    factor = entry.amplified.factor.expand(entry.shape)[functional.first]
                    spread = spread + factor * rest.magnitude(self.radius)
                    own = self._range(middle, spread, terms, None, parts, common)
                    low, high = own.low + rest.low, own.high + rest.high
                    together = _with_parts(parts, rest.parts)
                    common.update(rest.shared)
                    return Range(low, high, rest.region, together, self.chance, common)
                if len(adjoints) == 1:
                    source, part = adjoints[0]
                    spread = spread + entry.amplified.size(functional, part, self.entries[source])
                else:
                    spread = spread + functional.magnitude(entry.amplified.loose)
            for source, part in adjoints:
                spread = spread + self._meet(pending, source, part)
        return self._range(middle, spread, terms, None, parts, common)

    @staticmethod
    def _sizes(functional: Adjoint, entry: TapeEntry, spare: bool) -> list[Tensor]:
        """Return |functional|·radius of the error bound, the centre and the radius of an entry, in
        this order; of those that are read: of the error bound where it may suffice, `spare`."""
        parts = [entry.error_bound if spare else None]
        parts.append(None if entry.centre is None else entry.centre.abs())
        parts.append(entry.radius if entry.apart is None and entry.together is None else None)
        known = [part for part in parts if part is not None]
        found = iter(functional.magnitudes(*known)) if known else iter(())
        zero = functional.values.new_zeros(())
        return [zero if part is None else next(found) for part in parts]

    def _meet(self, pending: dict[int, Adjoint], source: int, part: Adjoint) -> Tensor | float:
        """Add functionals to the pending ones of an entry; return the rounding error of the sum."""
        if source not in pending:
            pending[source] = part
            return 0.0
        part = pending[source] = pending[source].plus(part)
        return 2.0**-52 * part.magnitude(self.entries[source].error_bound)

    def _gather(
        self, sums: dict[int, RowSums], pending: dict[int, Adjoint], source: int, part: RowSums
    ) -> Tensor | float:
        """Add sums over rows to the pending ones of an entry; if the sum does not have this form,
        bound this one by itself, and return its bound."""
        both = sums[source].plus(part) if source in sums else part
        if both is not None:
            sums[source] = both
            return 0.0
        return part.magnitude() + self._meet(pending, source, part.row)

    def _range(
        self,
        middle: Tensor,
        spread: Tensor,
        terms: int,
        region: Adjoint | None,
        parts: Parts | None,
        shared: Mapping[str, tuple[Adjoint, Tensor]],
    ) -> Range:
        """Return the bounds, with the float64 errors of sums of `terms` products.

        2^-30 of |adjoint|·|centre| was added to the spread already, which covers those of the
        middle.
        """
        spread = spread * (1 + 2 * gamma(terms)) + middle.abs() * 2.0**-50
        return Range(middle - spread, middle + spread, region, parts, self.chance, shared)


def _negligible(
    spare: Tensor | None, whole: Callable[[], Tensor], like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return which functionals [B] are at most `spare`, and their bound."""
    if spare is None:
        return torch.zeros_like(like, dtype=torch.bool), torch.zeros_like(like)
    found = whole()
    return found <= spare, found


def _with_parts(one: Parts | None, two: Parts | None) -> Parts | None:
    return two if one is None else one.plus(two)


SAMPLE = 192
"""About so many elements of a row are looked at to find a price."""


@dataclass(frozen=True, slots=True)
class Remainder:
    """A vector o with low <= o <= high element by element, and Σ|o| <= total in every row.

    `low` <= 0 <= `high` [..., n], `total` [..., 1]. `sums` bounds Σ |α_k o_k| of one row as well.
    """

    low: Tensor
    high: Tensor
    total: Tensor
    sums: RowBounds | None = None
    known: dict[tuple[Row, bytes], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Bounds of functionals of one row by the row and their digest: the next passes often have the
    same ones."""

    def nonlinear(self) -> Nonlinear:
        return Nonlinear(self._between, self._norm, self._around)

    def _between(self, a: Adjoint) -> tuple[Tensor, Tensor]:
        if self.sums is None or not a.single_row:
            return self._by_total(a)
        row, values = a.first[:-1], a.on((*a.window[:-1], (0, a.shape[-1]))).flatten(1).contiguous()
        key = row, hashlib.sha256(values.cpu().numpy().data).digest()
        if key not in self.known:
            low, high = self._by_total(a)
            size = self.sums(row, values.abs())
            self.known[key] = torch.maximum(low, -size), torch.minimum(high, size)
        return self.known[key]

    def _by_total(self, a: Adjoint) -> tuple[Tensor, Tensor]:
        """Return the smallest and largest values by the ends and the total of each row."""
        part = at(a.window)
        low, high, total = -self.low[part], self.high[part], self.total[part[:-1]]
        ends = [_extremes(values, low, high, total) for values in in_cache(a.values)]
        least, most = (torch.cat(bounds) for bounds in zip(*ends, strict=True))
        return -least, most

    def _around(self, a: Adjoint) -> list[Part]:
        """Return an ellipsoid around A o: as Σ o²/cap <= Σ|o|, that of A∘√cap."""
        most, total = self._ends(a)
        flat, squares = a.values.flatten(1), most.flatten() * total * SAFE
        alone = diagonal(flat)
        if alone is not None:
            return [RankOne.axes(alone.square() * squares * SAFE)]
        return [ImageEllipsoid.of(flat, squares)]

    def _ends(self, a: Adjoint) -> tuple[Tensor, float]:
        """Return the caps of a window, and a bound of Σ|o| over all rows that are read."""
        part, read = at(a.window), a.values.any(0).any(-1, keepdim=True)
        most = torch.maximum(-self.low[part], self.high[part])
        total = torch.minimum(self.total[part[:-1]], most.sum(-1, keepdim=True) * SAFE)
        return most, float(total[read].sum()) * SAFE

    def _norm(self, a: Adjoint) -> float:
        """Bound |A o| by column norms and, as Σ o²/cap <= Σ|o|, by A∘√cap, over the rows read."""
        most, whole = self._ends(a)
        columns = a.values.norm(dim=0, keepdim=True) * SAFE
        one_by_one = float(_extremes(columns, most, most, self.total[at(a.window[:-1])])[1])
        scaled = (a.values * most.sqrt()).flatten(1)
        alone = diagonal(scaled)
        if alone is not None:
            spread = float(alone.square().amax()) * SAFE
        else:
            products = square_of(scaled)
            spread = largest_eigenvalue(products, float(scaled.square().sum()) * SAFE)
        return min(one_by_one, math.sqrt(spread * whole) * SAFE)


def _extremes(values: Tensor, low: Tensor, high: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Bound -Σ values·o and Σ values·o over -low <= o <= high with Σ|o| up to the total of every
    row: values [B, ..., n] -> [B].

    Any price λ >= 0 gives λ·total + Σ max(values - λ, 0)·high + Σ max(-values - λ, 0)·low.
    The best price is the size of the last element that is taken whole or in part, largest first. In
    long rows it is looked up among some of the elements.
    """
    sizes, step = values.abs(), max(1, values.shape[-1] // SAMPLE)
    some, order = sizes[..., ::step].sort(dim=-1, descending=True)
    all_fit = torch.maximum(low, high).sum(-1, keepdim=True) <= total

    def price_for(caps: Tensor) -> Tensor:
        last = (caps.gather(-1, order).cumsum(-1) * step < total).sum(-1, keepdim=True)
        found = some.gather(-1, last.clamp_max(some.shape[-1] - 1))
        return torch.where((last == some.shape[-1]) | all_fit, 0.0, found)

    def bound(price: Tensor, *parts: tuple[Tensor, Tensor]) -> Tensor:
        value = (price[..., 0] * total[..., 0]).reshape(len(values), -1).sum(-1)
        for weights, caps in parts:
            over = (weights - price).clamp_min_(0).reshape(len(values), -1)
            value = value + over @ caps.flatten()
        return value * (1 + 2 * gamma(low.numel() + 8))

    if torch.equal(low, high):
        most = bound(price_for(high[..., ::step].expand_as(some)), (sizes, high))
        return most, most
    minus, positive = -values, values[..., ::step] > 0
    upper, lower = high[..., ::step], low[..., ::step]
    most = bound(price_for(torch.where(positive, upper, lower)), (values, high), (minus, low))
    least = bound(price_for(torch.where(positive, lower, upper)), (values, low), (minus, high))
    return least, most
