"""From fragments to backends, with the reasons for and against each one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kcdsl.ir.fragment import Placement, classify
from kcdsl.ir.terms import Clause, Program
from kcdsl.route.catalogue import BackendSpec, Fragment, catalogue
from kcdsl.route.premises import Premises


@dataclass(frozen=True, slots=True)
class Route:
    """Where a clause goes. `backend` is None where nobody decides it; `why_not` names every
    other backend with the reason. `premises` are the drift clauses an implied clause rests on;
    for a clause that is measured anyway they are those that could imply it as well."""

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
        reason = _against(spec, placement, premises, absent[spec.name], wanted)
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


def _against(
    spec: BackendSpec,
    placement: Placement,
    premises: tuple[str, ...],
    missing: tuple[str, ...],
    wanted: str | None,
) -> str | None:
    """Say why a backend does not take a clause, or None where it can."""
    if placement.fragment not in spec.fragments:
        decides = ", ".join(sorted(fragment.value for fragment in spec.fragments))
        return f"decides {decides}; {placement.blame[0].reason}"
    if missing:
        return f"needs {', '.join(missing)}, not installed"
    if placement.fragment is Fragment.IMPLIED and not premises:
        return "no drift clause on the block model could imply it"
    if wanted is not None and spec.name != wanted:
        return f"the backend {wanted} was asked for"
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
