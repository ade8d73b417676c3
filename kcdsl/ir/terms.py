"""The first-order intermediate representation of a contract.

Everything is frozen and hashable. The nodes of formulas are in `kcdsl.ir.formulas`; this module
exports them and defines slices, tables, clauses and programs. Spans point into the contract file
and are ignored by equality, so the digest of a clause depends only on its meaning.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction

from kcdsl.diagnostics.spans import Span
from kcdsl.ir.formulas import (
    MOST_ROWS,
    Abs,
    AllOf,
    AnyOf,
    Arith,
    Compare,
    Connective,
    Drift,
    FieldTest,
    Formula,
    HasFields,
    Metric,
    NoFlip,
    NoneOf,
    Norm,
    Not,
    Number,
    Predicate,
    Quantified,
    Region,
    RegionKind,
    Statistic,
    TableValue,
    Term,
)
from kcdsl.ir.kernels import KernelRef

__all__ = [
    "FALLBACK_FROM",
    "GUARD_FROM",
    "MOST_ROWS",
    "ONNX",
    "Abs",
    "AllOf",
    "AnyOf",
    "Arith",
    "Budget",
    "Clause",
    "Compare",
    "Connective",
    "Constants",
    "Drift",
    "Escalation",
    "EvidenceKind",
    "Family",
    "FieldTest",
    "Formula",
    "HasFields",
    "ImportedFrom",
    "KernelRef",
    "Level",
    "Library",
    "Metric",
    "ModelRef",
    "NoFlip",
    "NoneOf",
    "Norm",
    "Not",
    "Number",
    "Predicate",
    "Program",
    "Quantified",
    "Region",
    "RegionKind",
    "Slice",
    "Statistic",
    "TableRow",
    "TableValue",
    "Term",
    "ThresholdTable",
    "UserMetric",
]

_NOWHERE = Span(0, 0)
_EVERY_REQUEST = AllOf()


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
    """The kinds of evidence, strongest first."""

    PROOF = "proof"
    PROOF_REAL = "proof-real"
    PROBABILISTIC = "probabilistic"
    CENSUS = "census"
    SAMPLE = "sample"


# --- slices, tables, clauses, contract -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slice:
    """A named set of requests: rows of `data` (JSONL, relative to the contract) that satisfy
    `where`. `data` None means the contract's default data."""

    name: str
    data: str | None = None
    where: Predicate = _EVERY_REQUEST
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row of a table: the value for the requests that satisfy `where` and no earlier row."""

    where: Predicate
    value: Fraction


@dataclass(frozen=True, slots=True)
class ThresholdTable:
    """Thresholds by request: the first row that a request satisfies has its value.

    Values are in base units of `dimension`. `otherwise` is the value for requests of no row; None
    if the rows should cover every request: a request of no row is then invalid evidence.
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

    `slices` is empty for a clause whose quantifier already names its slice. `text` is the source
    text of the requirement. `budget` None makes the clause hard. A `holdout` clause is evaluated
    and gates releases, but is excluded from training losses.
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


ONNX = "onnx"
"""The architecture of a model whose program is the graph of an ONNX file."""


@dataclass(frozen=True, slots=True)
class ModelRef:
    """The weights and the program of a model.

    Exactly one of `architecture` (a module of kcdsl.model: "llama", "bert") and `module`
    ("package.module:factory") is set. `checkpoint` and `tokenizer` are paths relative to the
    contract; a checkpoint may also be `package:NAME/path/inside`, a file inside an installed
    distribution. `served` is the inference kernel's own checkpoint, if any; `Program` sets it. If
    the architecture is `ONNX`, the checkpoint is an ONNX file with the program, and `blocks` has
    the name of each block with its first and last tensor. `Program` also sets its kernels: numerics
    of the inference kernel, and of kernels that run the file, must equal those of the file.
    """

    checkpoint: str
    architecture: str | None = None
    module: str | None = None
    config: str | None = None
    tokenizer: str | None = None
    served: str | None = None
    span: Span = field(default=_NOWHERE, compare=False)
    blocks: tuple[tuple[str, str, str], ...] = ()
    infer: KernelRef | None = field(default=None, compare=False)
    others: tuple[KernelRef, ...] = field(default=(), compare=False)


GUARD_FROM = Fraction(1)
FALLBACK_FROM = Fraction(3)


@dataclass(frozen=True, slots=True)
class Escalation:
    """Π: the action for each level, and per family where it differs.

    `by_level` and `by_family` are total: every (family, level) has an action, defaults included.
    The health score selects the guard kernel from D = `guard_from` on (eta_1 of the paper), and the
    fallback kernel from D = `fallback_from` on (eta_2); 0 < guard_from < fallback_from.
    """

    by_level: tuple[tuple[Level, str], ...]
    by_family: tuple[tuple[Family, Level, str], ...]
    guard_from: Fraction = GUARD_FROM
    fallback_from: Fraction = FALLBACK_FROM

    def action(self, family: Family, level: Level) -> str:
        """Return the action for a clause of this family and level."""
        for f, lv, name in self.by_family:
            if f is family and lv is level:
                return name
        return dict(self.by_level)[level]


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of the bound chain in the contract; None where it states none."""

    temperature: Fraction = Fraction(1)
    reward_range: Fraction | None = None
    """osc(R) = max R - min R."""
    advantage_max: Fraction | None = None
    score_norm_max: Fraction | None = None


@dataclass(frozen=True, slots=True)
class UserMetric:
    """A user metric in clauses, as it was declared with its function.

    `function` is `module:function` or `file.py:function`. `counted` is "token" or "request", `unit`
    the unit of the returned values, `dimension` its dimension. `lower` and `upper` are the ends of
    the range, in base units; None where it is unbounded.
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
    """The origin of imported parts of a program: the file as named in the contract, and the digest
    of the library's meaning ("sha256:…")."""

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

    Imported parts are treated like its own; `imports` has their origins and is ignored by equality
    and digest, so that a contract has the same meaning with its imports inlined. `tables` are those
    used by clauses.
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
    """The user's metrics in clauses, by name."""
    guard: KernelRef | None = None
    """The kernel of the guarded route; None where the contract names none."""
    fallback: KernelRef | None = None
    """The kernel that `fallback` switches to; None where the contract names none."""

    def __post_init__(self) -> None:
        """Set the inference kernel's checkpoint of the model, and the kernels of an ONNX file."""
        of_file = self.model.architecture == ONNX
        infer = self.infer if of_file else None
        rest = [kernel for role, kernel in self.kernels.items() if role != "infer" and of_file]
        own = replace(self.model, served=self.infer.checkpoint, infer=infer, others=tuple(rest))
        if (own, own.infer, own.others) != (self.model, self.model.infer, self.model.others):
            object.__setattr__(self, "model", own)

    @property
    def kernels(self) -> dict[str, KernelRef]:
        """Return every kernel that the contract names, by its role."""
        named = {
            "train": self.train,
            "infer": self.infer,
            "guard": self.guard,
            "fallback": self.fallback,
        }
        return {role: kernel for role, kernel in named.items() if kernel is not None}

    def slice(self, name: str) -> Slice:
        """Return the declared slice of this name."""
        return next(s for s in self.slices if s.name == name)

    def table(self, name: str) -> ThresholdTable:
        """Return the declared table of this name."""
        return next(t for t in self.tables if t.name == name)
