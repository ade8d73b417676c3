"""Finite interpretations (worlds): explicit values for everything that a contract refers to.

A world lists the requests, the measured values of each, the recorded traces, and the runs that the
numerics of the two kernels admit. Values are exact; None stands for a value that is not a finite
number. `tests.support.semantics.evaluation` defines the meaning of a contract in a world.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from kcdsl.ir.predicates import Value
from kcdsl.ir.terms import Region

Measured = Fraction | None
Row = tuple[Measured, ...]
Matrix = tuple[Row, ...]
"""Rows of a block's output, such as the logits of each position."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One request, or one timed run of a request, which has the key of the request.

    `values` holds for each metric one value per token, or a single one. `record` is the trace
    record, or None.
    """

    key: str
    fields: Mapping[str, Value] = field(default_factory=dict)
    values: Mapping[str, tuple[Measured, ...]] = field(default_factory=dict)
    record: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A run of the training kernel and one of the inference kernel on the same input."""

    train: Matrix
    infer: Matrix


def _unknown(metric: str, units: tuple[Unit, ...]) -> Measured:
    return None


@dataclass(frozen=True, slots=True)
class World:
    """A finite interpretation of a contract.

    `data`: the requests of each file, in order; the file None is that of a contract without data.
    `timed`: the timed runs, for metrics of the runtime. `aggregate(metric, units)`: the value of a
    metric of a set of units. `admitted` and `observed`: the pairs of runs of a block on an input,
    all that the numerics admit and the one that was made. `inputs`: for a ball or a hull, its
    inputs besides the rows of its slice; an input of a row has the key of the row. `window`: the
    number of consecutive units in a window.
    """

    data: Mapping[str | None, tuple[Unit, ...]]
    timed: tuple[Unit, ...] = ()
    aggregate: Callable[[str, tuple[Unit, ...]], Measured] = _unknown
    admitted: Mapping[tuple[str, str], tuple[Pair, ...]] = field(default_factory=dict)
    observed: Mapping[tuple[str, str], Pair] = field(default_factory=dict)
    inputs: Mapping[Region, tuple[str, ...]] = field(default_factory=dict)
    window: int = 16
