"""The choice of a backend for each clause, with reasons for and against each; premises."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kcdsl.ir.formulas import terms_of, walk
from kcdsl.ir.predicates import implies
from kcdsl.ir.terms import (
    Abs,
    AllOf,
    Clause,
    Compare,
    Metric,
    Norm,
    Program,
    Quantified,
    Slice,
    Statistic,
)
from kcdsl.model.registry import is_encoder
from kcdsl.route.catalogue import BackendSpec, Fragment, catalogue
from kcdsl.route.fragments import CHAIN_METRICS, Placement, classify

# --- premises -------------------------------------------------------------------------------------


_LOGITS_BLOCK = "model"


class Premises:
    """The clauses of a program that bound the drift of logits (block `model`), by slice.

    Each clause of the program is visited once, at construction, and each pair of slices at most
    once. The cost of `of` depends on its clause and on the number of premises, not on the other
    clauses.
    """

    def __init__(self, program: Program) -> None:
        """Collect the premises of a program."""
        self._program = program
        self._slices = {item.name: item for item in program.slices}
        self._names: list[str] = []
        self._on: dict[str, set[int]] = defaultdict(set)
        self._known: dict[str, frozenset[int]] = {}
        for clause in program.clauses:
            covered = _covered(clause)
            # The bound chain derives nothing from the output states of an encoder.
            if covered and not is_encoder(program.model.architecture):
                for name in covered:
                    self._on[name].add(len(self._names))
                self._names.append(clause.id)

    def of(self, clause: Clause) -> tuple[str, ...]:
        """Return the names of the premises of a clause, in the order of the program.

        Each slice of the clause needs a premise on a slice that may contain it; the result is
        empty where one has none. The premises are candidates; only the derivation decides.
        """
        if not self._names or not _derivable(clause):
            return ()
        found = [self._covering(name) for name in clause.slices]
        if not all(found):
            return ()
        return tuple(self._names[number] for number in sorted(frozenset().union(*found)))

    def _covering(self, name: str) -> frozenset[int]:
        if name not in self._known:
            outer = (numbers for on, numbers in self._on.items() if self._may_contain(on, name))
            self._known[name] = frozenset().union(*outer)
        return self._known[name]

    def _may_contain(self, outer: str, inner: str) -> bool:
        """Return whether no request is known to be in the inner slice and not in the outer one."""
        if outer == inner:
            return True
        a, b = self._slices.get(inner), self._slices.get(outer)
        if a is None or b is None or self._data(a) != self._data(b):
            return False
        return b.where == AllOf() or implies(a.where, b.where) is not False

    def _data(self, item: Slice) -> str | None:
        return item.data or self._program.data


def _derivable(clause: Clause) -> bool:
    """Return whether the bound chain derives statements about all metrics of a clause."""
    terms = tuple(terms_of(clause.require))
    statistics = [term for term in terms if isinstance(term, Statistic)]
    names = {term.name for term in terms if isinstance(term, Metric)}
    if not statistics or not names <= CHAIN_METRICS:
        return False
    return "log_ratio" not in names or all(isinstance(s.of, Abs) for s in statistics)


def _covered(clause: Clause) -> set[str]:
    """Return the slices on which a clause bounds the drift of logits."""
    return {
        part.region.slice
        for part in walk(clause.require)
        if isinstance(part, Quantified) and _bounds_logits(part)
    }


def _bounds_logits(part: Quantified) -> bool:
    return part.quantifier == "forall" and any(
        isinstance(inner, Compare)
        and isinstance(inner.left, Norm)
        and not inner.left.of.measured
        and inner.op in {"<=", "<"}
        and inner.left.of.block == _LOGITS_BLOCK
        for inner in walk(part.body)
    )


# --- routes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route:
    """The backend of a clause, None where no backend decides it; `why_not` names every other
    backend with the reason. `premises` are the drift clauses of an implied clause; for a measured
    clause, those that could imply it as well."""

    clause_id: str
    fragment: Fragment
    backend: str | None
    reason: str
    why_not: Mapping[str, str]
    premises: tuple[str, ...] = ()


def route(
    program: Program,
    specs: Iterable[BackendSpec] | None = None,
    wanted: str | None = None,
) -> tuple[Route, ...]:
    """Return the route of every clause, in the order of the program.

    `specs` defaults to the catalogue of the installed distributions; `wanted` names the only
    backend to consider. No backend is imported.
    """
    offers = tuple(catalogue() if specs is None else specs)
    absent = {spec.name: spec.missing() for spec in offers}
    premises = Premises(program)
    return tuple(
        _route(clause, premises.of(clause), offers, absent, wanted) for clause in program.clauses
    )


def _route(
    clause: Clause,
    premises: tuple[str, ...],
    offers: tuple[BackendSpec, ...],
    absent: Mapping[str, tuple[str, ...]],
    wanted: str | None,
) -> Route:
    placement = classify(clause)
    why_not: dict[str, str] = {}
    able: list[BackendSpec] = []
    for spec in offers:
        reason = _reason_against(spec, placement, premises, absent[spec.name], wanted)
        if reason is None:
            able.append(spec)
        else:
            why_not[spec.name] = reason
    chosen = min(able, key=lambda spec: (spec.rank, spec.name), default=None)
    if chosen is None:
        return Route(
            clause.id,
            placement.fragment,
            None,
            _nobody(placement, offers, absent, premises, wanted),
            why_not,
            premises,
        )
    for spec in able:
        if spec is not chosen:
            why_not[spec.name] = f"able too, but {chosen.name} comes first"
    reason = placement.blame[0].reason
    if placement.fragment is Fragment.IMPLIED:
        reason = f"may follow from {', '.join(premises)} by the bound chain"
    elif placement.fragment is Fragment.STATISTICAL and premises:
        reason += f"; may follow from {', '.join(premises)} too"
    return Route(clause.id, placement.fragment, chosen.name, reason, why_not, premises)


def _reason_against(
    spec: BackendSpec,
    placement: Placement,
    premises: tuple[str, ...],
    missing: tuple[str, ...],
    wanted: str | None,
) -> str | None:
    """Return why a backend cannot decide a clause; None where it can."""
    if spec.fault:
        return spec.fault
    if placement.fragment not in spec.fragments:
        decides = ", ".join(sorted(fragment.value for fragment in spec.fragments))
        return f"decides {decides}; {placement.blame[0].reason}"
    if missing:
        return f"needs {', '.join(missing)}, not installed"
    if placement.fragment is Fragment.IMPLIED and not premises:
        return "no drift clause on the block model could imply it"
    if wanted is not None and spec.name != wanted:
        return f"the backend {wanted} was requested"
    return None


def _nobody(
    placement: Placement,
    offers: tuple[BackendSpec, ...],
    absent: Mapping[str, tuple[str, ...]],
    premises: tuple[str, ...],
    wanted: str | None,
) -> str:
    if wanted is not None and wanted not in absent:
        return f"no backend is called {wanted}"
    if placement.fragment is Fragment.OUTSIDE:
        return placement.blame[0].reason
    fitting = [spec for spec in offers if placement.fragment in spec.fragments]
    if not fitting:
        return f"no installed backend decides {placement.fragment}"
    if wanted is not None and wanted not in {spec.name for spec in fitting}:
        return f"{wanted} does not decide {placement.fragment}"
    if placement.fragment is Fragment.IMPLIED and not premises:
        return "no drift clause on the block model could imply it"
    needs = {name for spec in fitting for name in absent[spec.name]}
    return f"not installed: {', '.join(sorted(needs))}"
