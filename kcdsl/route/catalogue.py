"""The catalogue of backends: names, fragments and requirements, without importing them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class Fragment(StrEnum):
    """The kind of goal of a clause; a backend lists the fragments that it decides."""

    UNIVERSAL_DRIFT = "universal-drift"
    """forall x in region: a norm of drift(block, x) is below a constant."""
    UNIVERSAL_FLIP = "universal-flip"
    """forall x in region: the top-k set cannot change."""
    STATISTICAL = "statistical"
    """A statistic of a measured metric over a slice is compared with a constant."""
    TRACE_FIELDS = "trace-fields"
    """Trace records carry the named fields."""
    IMPLIED = "implied"
    """The clause follows from a proved drift clause by the bound chain."""
    OUTSIDE = "outside"
    """No backend of the catalogue decides the formula."""


OWN = "kcdsl_backends."
"""The package of kcdsl's own backends."""
_PROVABLE = frozenset({Fragment.UNIVERSAL_DRIFT, Fragment.UNIVERSAL_FLIP})
"""Fragments of foreign backends: their answers have a proof or a run that is verified here.
Measurements cannot be verified."""
_LONGEST_FAULT = 300


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """One backend, described without importing it."""

    name: str
    target: str
    """"package.module:ATTRIBUTE", imported only by `load`."""
    fragments: frozenset[Fragment]
    needs: tuple[str, ...] = ()
    summary: str = ""
    rank: int = 0
    """The backend with the least rank is chosen among those that can decide a clause."""
    around_weights: bool = False
    """Whether it decides goals for a weight ball (`Goal.weights`); others never get such goals."""
    chains: bool = False
    """Whether it proves blocks stage by stage: `decide` takes `chain`."""
    real_arithmetic: bool = False
    """Whether its bounds ignore its own rounding errors: it decides only clauses that admit
    `evidence: proof-real`."""
    domains: tuple[str, ...] = ()
    """Its proof domains, cheapest first, to choose from (`Goal.domains`); empty: no choice."""
    planner: str = ""
    """"package.module:ATTRIBUTE" of the planner of numbers of units; none if empty."""
    planner_needs: tuple[str, ...] = ()
    """The packages that the planner and `looks` need."""
    looks: str = ""
    """"package.module:ATTRIBUTE" of the sequential tests of counts (`LookRules`); none if empty."""
    attributor: str = ""
    """"package.module:ATTRIBUTE" of the attribution of drift to its sources; none if empty."""
    sizer: str = ""
    """"package.module:ATTRIBUTE" of the limit on the size of cases; none if empty."""
    queries: str = ""
    """"package.module:ATTRIBUTE" of the solver of VNN-LIB queries; none if empty."""
    fault: str = ""
    """Why its distribution cannot be used; it then decides nothing. Empty if it can be used."""

    def missing(self) -> tuple[str, ...]:
        """Return the needed packages that are not installed, without importing them."""
        return tuple(name for name in self.needs if find_spec(name) is None)

    def load(self) -> Any:
        """Import and return the backend."""
        return _imported(self.target)

    def load_planner(self) -> Any:
        """Import and return the planner."""
        return _imported(self.planner)

    def load_looks(self) -> Any:
        """Import and return the sequential tests of counts."""
        return _imported(self.looks)

    def load_attributor(self) -> Any:
        """Import and return the attribution of drift."""
        return _imported(self.attributor)

    def load_sizer(self) -> Any:
        """Import and return the limit on the size of cases."""
        return _imported(self.sizer)

    def load_queries(self) -> Any:
        """Import and return the solver of VNN-LIB queries."""
        return _imported(self.queries)


def is_foreign(spec: BackendSpec) -> bool:
    """Return whether a backend is of another distribution."""
    return not spec.target.startswith(OWN)


def _imported(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def catalogue() -> tuple[BackendSpec, ...]:
    """Return the backends of every installed distribution (entry-point group `kcdsl.backends`).

    Backends of other distributions only have fragments of proofs, and no planner, tests of counts
    or attribution. An unusable entry point is listed at the end, with the reason as its `fault`.
    """
    from importlib.metadata import entry_points

    found: dict[str, tuple[str, BackendSpec]] = {}
    faults: list[BackendSpec] = []
    points = entry_points(group="kcdsl.backends")
    for entry in sorted(points, key=lambda e: (not f"{e.module}.".startswith(OWN), e.value)):
        try:
            offered = _offered(entry.load())
            for name in found.keys() & {spec.name for spec in offered}:
                raise ValueError(f"the backend {name!r} is offered by {found[name][0]} already")
            found |= {spec.name: (entry.value, _as_far_as_checked(spec)) for spec in offered}
        except (Exception, SystemExit) as error:
            faults.append(_unusable(entry, error))
    ranked = sorted(found.values(), key=lambda pair: (pair[1].rank, pair[1].name))
    return (*(spec for _, spec in ranked), *faults)


def _offered(found: Any) -> tuple[BackendSpec, ...]:
    specs = tuple(found)
    if not all(isinstance(spec, BackendSpec) for spec in specs):
        raise TypeError("it is no tuple of kcdsl.route.catalogue.BackendSpec")
    return specs


def _unusable(entry: EntryPoint, error: BaseException) -> BackendSpec:
    """Return an entry for an unusable entry point, with the distribution and the reason. Its name
    is that of the entry point's object, which no backend has."""
    of = entry.value if entry.dist is None else f"{entry.value} of {entry.dist.name}"
    why = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_FAULT]
    return BackendSpec(entry.value, entry.value, frozenset(), fault=f"{of} cannot be used: {why}")


def _as_far_as_checked(spec: BackendSpec) -> BackendSpec:
    """Return a foreign backend reduced to the abilities whose answers can be verified."""
    if not is_foreign(spec):
        return spec
    fragments = spec.fragments & _PROVABLE
    return replace(
        spec, fragments=fragments, planner="", looks="", attributor="", sizer="", queries=""
    )


# --- execution ------------------------------------------------------------------------------------


ENGINES = ("processes", "ray")
"""Where cases run: in processes of this machine, or on a ray cluster."""


@dataclass(frozen=True, slots=True)
class Execution:
    """The execution of the cases of goals. `threads` may change last bits, `seconds` the results.

    Args:
        engine: one of `ENGINES`.
        jobs: the number of cases at a time; 1 uses this process; None starts in this process and
        uses as many processes as cores and memory allow if there is enough work.
        threads: threads of one case; None divides the cores among the cases.
        cache: folder of cached results of earlier runs; None disables the cache.
        seconds: time limit of searches for bounds or runs; None for no limit.
    """

    engine: str = "processes"
    jobs: int | None = None
    threads: int | None = None
    cache: Path | None = None
    seconds: float | None = None
