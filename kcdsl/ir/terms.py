"""The first-order intermediate representation of a contract.

Everything is frozen and hashable. Numbers are exact fractions in base units (see
`kcdsl.check.units`): seconds, bytes, tokens/second, nats, or 1. Spans point into the contract file
and take no part in equality, so the digest of a clause depends on its meaning alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from dataclasses import field as dataclass_field
from enum import StrEnum
from fractions import Fraction

from kcdsl.source.text import Span

_NOWHERE = Span(0, 0)


class Family(StrEnum):
    """The four clause families of a contract C = (N, S, R, O, Π)."""

    NUMERICAL = "numerical"
    STATISTICAL = "statistical"
    RUNTIME = "runtime"
    OBSERVABILITY = "observability"


class Level(StrEnum):
    """Severity of a clause."""

    L1 = "L1"
    L2 = "L2"
    L3 = "L3"


class EvidenceKind(StrEnum):
    """What a verdict rests on, strongest first."""

    PROOF = "proof"
    PROOF_REAL = "proof-real"
    PROBABILISTIC = "probabilistic"
    CENSUS = "census"
    SAMPLE = "sample"


# --- terms ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Number:
    """An exact constant in base units of `dimension` ("1", "s", "B", "tok/s", "nat", "ratio")."""

    value: Fraction
    dimension: str = "1"
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Metric:
    """A registered metric, evaluated per unit (token, request, window …)."""

    name: str
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Statistic:
    """A statistic of a metric over a slice. `kind`: mean, max, min, rate, quantile (with `q`), or
    aggregate, for a metric that is one number per window by itself."""

    kind: str
    of: Term
    q: Fraction | None = None
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Drift:
    """`drift(block, x)`: any admissible run of the inference kernel minus one of the training one.

    `measured` stands for `measured_drift`, the difference of the two runs that were observed.
    """

    block: str
    variable: str
    measured: bool = False
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of a drift, taken row by row (token by token) and then the largest row.

    `kind`: "inf", "2" or "span" (largest minus smallest component of the row).
    """

    kind: str
    of: Drift
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Abs:
    """Absolute value."""

    of: Term
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Arith:
    """`left op right` with op one of + - * /."""

    op: str
    left: Term
    right: Term
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class TableValue:
    """`table(name)`: the threshold that a table of the contract gives for the request at hand.

    It stands alone on the right of a comparison. A clause that holds one means: for every bucket
    of the table, the clause with the value of the bucket, on the slice within the bucket
    (`kcdsl.ir.buckets.expand_tables`).
    """

    name: str
    dimension: str = "1"
    span: Span = field(default=_NOWHERE, compare=False)


Term = Number | Metric | Statistic | Norm | Abs | Arith | TableValue


# --- regions -------------------------------------------------------------------------------------


class RegionKind(StrEnum):
    """How the inputs of a quantifier are given."""

    POINTS = "points"
    """Each row of the slice, by itself, exactly."""
    BALL = "ball"
    """Around each row of the slice, an l_inf ball of the given radius on the block's input."""
    HULL = "hull"
    """The box spanned by the block's inputs over all rows of the slice, plus a relative margin."""


@dataclass(frozen=True, slots=True)
class Region:
    """The set a quantifier ranges over."""

    kind: RegionKind
    slice: str
    radius: Fraction = Fraction(0)
    span: Span = field(default=_NOWHERE, compare=False)


# --- formulas ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compare:
    """`left op right` with op one of <= < >= > ==."""

    op: str
    left: Term
    right: Term
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class NoFlip:
    """No admissible pair of runs changes the top-k set of any row of `block` at `variable`."""

    block: str
    variable: str
    k: int = 1
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class HasFields:
    """Every trace record carries these fields, not null."""

    fields: tuple[str, ...]
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Not:
    """Negation."""

    of: Formula
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Connective:
    """`op` is "and", "or" or "implies" (exactly two parts)."""

    op: str
    parts: tuple[Formula, ...]
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Quantified:
    """`forall` or `exists` a variable in a region."""

    quantifier: str
    variable: str
    region: Region
    body: Formula
    span: Span = field(default=_NOWHERE, compare=False)


Formula = Compare | NoFlip | HasFields | Not | Connective | Quantified


# --- slices predicates, clauses, contract --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FieldTest:
    """`field op value` on a request; op one of == != <= < >= >; value a string, number or bool."""

    field: str
    op: str
    value: str | Fraction | bool
    span: Span = dataclass_field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class AllOf:
    """Conjunction of slice predicates; empty means every request."""

    parts: tuple[Predicate, ...] = ()


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Disjunction of slice predicates."""

    parts: tuple[Predicate, ...] = ()


@dataclass(frozen=True, slots=True)
class NoneOf:
    """Negation of a slice predicate."""

    part: Predicate


Predicate = FieldTest | AllOf | AnyOf | NoneOf


@dataclass(frozen=True, slots=True)
class Slice:
    """A named set of requests: rows of `data` (JSONL, relative to the contract) that satisfy
    `where`. `data` None means the contract's default data."""

    name: str
    data: str | None = None
    where: Predicate = AllOf()
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row of a table: the value for the requests that satisfy `where` and no earlier row."""

    where: Predicate
    value: Fraction


@dataclass(frozen=True, slots=True)
class ThresholdTable:
    """Thresholds by context: the first row that a request satisfies gives its value.

    Values are in base units of `dimension`. `otherwise` is the value for the requests of no row;
    None where the rows cover every request, and then a request of no row is invalid evidence.
    """

    name: str
    dimension: str
    rows: tuple[TableRow, ...]
    otherwise: Fraction | None = None
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Budget:
    """Allowed exceedance: at most `rate` of the `unit` ("requests" or "windows")."""

    rate: Fraction
    unit: str


@dataclass(frozen=True, slots=True)
class Clause:
    """One clause c = (id, metric, τ, S, δ, level, action), its requirement as a formula.

    `slices` is empty for a clause whose quantifier already names its slice. `text` is the
    requirement as the author wrote it. `budget` None makes the clause hard. A `holdout` clause is
    evaluated and gates releases, and is never shown to a training loss.
    """

    id: str
    family: Family
    require: Formula
    level: Level
    slices: tuple[str, ...] = ()
    budget: Budget | None = None
    evidence: EvidenceKind | None = None
    action: str | None = None
    text: str = field(default="", compare=False)
    span: Span = field(default=_NOWHERE, compare=False)
    holdout: bool = False


@dataclass(frozen=True, slots=True)
class ModelRef:
    """Where the weights are and which program they belong to.

    Exactly one of `architecture` (a module of kcdsl.model: "llama", "bert") and `module`
    ("package.module:factory") is set. `checkpoint` and `tokenizer` are paths relative to the
    contract; a checkpoint may also be `package:NAME/path/inside`, a file inside an installed
    distribution.
    """

    checkpoint: str
    architecture: str | None = None
    module: str | None = None
    config: str | None = None
    tokenizer: str | None = None


@dataclass(frozen=True, slots=True)
class KernelRef:
    """One kernel: the adapter that runs it and the numerics it claims (plain data, resolved by
    `kcdsl.model.numerics.resolve`)."""

    run: str
    numerics: tuple[tuple[str, object], ...]
    """The numerics mapping of the document as sorted pairs; nested mappings likewise."""
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Escalation:
    """Π: the action for each level, and per family where it differs.

    `by_level` and `by_family` are total: every (family, level) has an action, defaults included.
    """

    by_level: tuple[tuple[Level, str], ...]
    by_family: tuple[tuple[Family, Level, str], ...]

    def action(self, family: Family, level: Level) -> str:
        """Return the action for a clause of this family and level."""
        for f, lv, name in self.by_family:
            if f is family and lv is level:
                return name
        return dict(self.by_level)[level]


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of the bound chain that the contract states; None where it states none."""

    temperature: Fraction = Fraction(1)
    reward_range: Fraction | None = None
    """osc(R) = max R - min R."""
    advantage_max: Fraction | None = None
    score_norm_max: Fraction | None = None


@dataclass(frozen=True, slots=True)
class UserMetric:
    """A metric of the user that clauses speak of, as it was declared beside its function.

    `function` is `module:function` or `file.py:function`. `counted` is "token" or "request", `unit`
    the unit in which the function returns its values, `dimension` what the unit measures. `lower`
    and `upper` are the ends of the range, in base units; None where there is none.
    """

    name: str
    function: str
    family: Family
    counted: str
    better: str
    unit: str
    dimension: str
    statistics: tuple[str, ...]
    needs: tuple[str, ...]
    signed: bool = False
    lower: Fraction | None = None
    upper: Fraction | None = None


@dataclass(frozen=True, slots=True)
class ImportedFrom:
    """Where imported parts of a program come from: the file as the contract names it, and the
    digest of the library's meaning ("sha256:…")."""

    file: str
    digest: str


@dataclass(frozen=True, slots=True)
class Library:
    """A compiled library: slices, kernels and tables that contracts import by digest."""

    name: str
    version: str
    slices: tuple[Slice, ...]
    kernels: tuple[tuple[str, KernelRef], ...]
    tables: tuple[ThresholdTable, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled contract.

    Imported parts are part of it like those of its own; `imports` says where they come from and
    takes no part in equality and digest, so that a contract means the same with its imports
    written out. `tables` are those that clauses speak of.
    """

    name: str
    version: str
    model: ModelRef
    train: KernelRef
    infer: KernelRef
    data: str | None
    slices: tuple[Slice, ...]
    clauses: tuple[Clause, ...]
    escalation: Escalation
    constants: Constants = Constants()
    tables: tuple[ThresholdTable, ...] = ()
    imports: tuple[ImportedFrom, ...] = field(default=(), compare=False)
    metrics: tuple[UserMetric, ...] = ()
    """The user's metrics that clauses speak of, by name."""

    def slice(self, name: str) -> Slice:
        """Return the declared slice of this name."""
        return next(s for s in self.slices if s.name == name)

    def table(self, name: str) -> ThresholdTable:
        """Return the declared table of this name."""
        return next(t for t in self.tables if t.name == name)
