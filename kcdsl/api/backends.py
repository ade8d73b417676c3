"""Selection and loading of backends from the catalogue.

Each function raises Refusal (KC402 and similar) where no backend has the ability, or where its
requirements are not installed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import NO_BACKEND, NO_DEVICE, WEIGHTS_REGION
from kcdsl.route.catalogue import BackendSpec, Fragment, catalogue

if TYPE_CHECKING:
    from kcdsl.api.contract import PathLike
    from kcdsl.api.results import Progress
    from kcdsl.ir.terms import Program
    from kcdsl.model.files import Artefacts
    from kcdsl.release.promotion import LookRules
    from kcdsl.route.catalogue import Execution
    from kcdsl.route.goals import Goal
    from kcdsl.verdict.outcome import GoalOutcome

_DOCTOR = "`kcdsl doctor` says how to install what is missing"


class FormalBackend(Protocol):
    """A backend that decides goals about every input of a region."""

    @property
    def name(self) -> str:
        """Return its name in the catalogue."""

    def decide(
        self,
        program: Program,
        base: Path,
        goals: Sequence[Goal],
        *,
        device: str,
        attacks: bool,
        confirm: bool,
        progress: Progress | None,
        execution: Execution,
        artefacts: Artefacts | None,
        tell: Callable[[str], None] | None,
    ) -> tuple[GoalOutcome, ...]:
        """Return the outcomes of goals of the contract in the folder `base`, in their order.

        With `BackendSpec.chains` it also takes `chain`: whether blocks are proved in stages.
        """

    def slice_sizes(
        self,
        program: Program,
        base: Path,
        slices: Collection[str],
        *,
        artefacts: Artefacts | None,
    ) -> dict[str, int]:
        """Return the number of rows of each of these slices, or a lower bound of it."""


def _first(
    able: Sequence[BackendSpec],
    verb: str,
    lacking: Callable[[BackendSpec], Sequence[str]] = BackendSpec.missing,
) -> BackendSpec:
    """Return the first backend whose requirements are all installed."""
    for spec in able:
        if not lacking(spec):
            return spec
    absent = ", ".join(sorted({name for spec in able for name in lacking(spec)}))
    what = f"no installed backend {verb}: {absent} missing" if absent else f"no backend {verb}"
    raise refuse(NO_BACKEND, what, help="; ".join((_DOCTOR, *faults())))


def _absent(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if find_spec(name) is None)


def measuring_backend(*more: str) -> Any:
    """Return the measuring backend; the command needs `more` packages."""
    able = [spec for spec in catalogue() if Fragment.STATISTICAL in spec.fragments]
    return _first(able, "measures", lambda spec: (*spec.missing(), *_absent(more))).load()


def planner() -> Any:
    """Return the planner of the number of units."""
    able = [s for s in catalogue() if Fragment.STATISTICAL in s.fragments and s.planner]
    return _first(able, "plans", lambda spec: _absent(spec.planner_needs)).load_planner()


def look_rules() -> LookRules:
    """Return the sequential tests of counts."""
    able = [s for s in catalogue() if Fragment.STATISTICAL in s.fragments and s.looks]
    spec = _first(able, "decides growing counts", lambda one: _absent(one.planner_needs))
    rules: LookRules = spec.load_looks()
    return rules


def attributor() -> Any:
    """Return the attribution of drift to its sources."""
    able = [spec for spec in catalogue() if spec.attributor]
    return _first(able, "attributes").load_attributor()


def query_solver() -> Any:
    """Return the solver of VNN-LIB queries."""
    able = [spec for spec in catalogue() if spec.queries]
    return _first(able, "answers VNN-LIB queries").load_queries()


def replaying_backend() -> Any:
    """Return the backend that runs counterexamples."""
    for spec in catalogue():
        if Fragment.UNIVERSAL_DRIFT in spec.fragments and not spec.missing():
            backend = spec.load()
            if hasattr(backend, "replay"):
                return backend
    raise refuse(NO_BACKEND, "no installed backend runs counterexamples", help=_DOCTOR)


def solver_if_installed() -> Any:
    """Return the z3 backend, or None."""
    spec = next((s for s in catalogue() if s.name == "smt" and not s.missing()), None)
    return None if spec is None else spec.load()


def solver_backend(purpose: str) -> Any:
    """Return the z3 backend; the refusal names the purpose."""
    spec = next((spec for spec in catalogue() if spec.name == "smt"), None)
    if spec is None or spec.missing():
        lacking = "the backend smt" if spec is None else ", ".join(spec.missing())
        raise refuse(
            NO_BACKEND,
            f"{purpose} needs {lacking}, which is not installed",
            help="pip install z3-solver",
        )
    return spec.load()


def formal_backend(
    name: str | None, *, around_weights: bool = False, seconds: float = math.inf
) -> FormalBackend:
    """Return the backend for drift goals: the named one, else the first of the catalogue.

    Refuse a backend without weight balls if `around_weights`. A backend of another distribution
    runs in a separate process, with a time limit of `seconds` for all its answers.
    """
    able = formal_backends()
    named = [s for s in able if name is None or s.name == name]
    fit = [s for s in named if s.around_weights or not around_weights]
    if fit:
        return loaded(fit[0], seconds)
    if named:
        raise refuse(
            WEIGHTS_REGION,
            f"backend {named[0].name!r} decides for the weights of the checkpoint alone",
            help="leave --weights out, or --backend",
        )
    for spec in catalogue():
        if spec.name == name:
            lacking = ", ".join(spec.missing())
            why = f"needs {lacking}" if lacking else "does not decide drift for all inputs"
            raise refuse(NO_BACKEND, f"backend {name!r} {why}", help=_DOCTOR)
    names = ", ".join(s.name for s in able) or "none; see kcdsl doctor"
    raise refuse(
        NO_BACKEND,
        f"there is no backend {name!r}" if name else "no installed backend decides drift clauses",
        help="; ".join((f"backends: {names}", *faults())),
    )


def faults() -> tuple[str, ...]:
    """Return why installed distributions with backends cannot be used."""
    return tuple(spec.fault for spec in catalogue() if spec.fault)


def formal_backends() -> list[BackendSpec]:
    """Return the installed backends for drift goals, in the order of the catalogue."""
    specs = catalogue()
    return [s for s in specs if Fragment.UNIVERSAL_DRIFT in s.fragments and not s.missing()]


def loaded(spec: BackendSpec, seconds: float) -> FormalBackend:
    """Return a backend; one of another distribution has a time limit for all its answers."""
    from kcdsl.release.foreign import ForeignBackend
    from kcdsl.route.catalogue import is_foreign

    if is_foreign(spec):
        return ForeignBackend(spec, seconds)
    own: FormalBackend = spec.load()
    return own


# --- where work runs ------------------------------------------------------------------------------


def choose_device(wanted: str) -> str:
    """Return "cuda" or "cpu": `auto` takes CUDA where there is one. Raises Refusal without CUDA."""
    visible = "CUDA_VISIBLE_DEVICES"
    if wanted == "cuda" and os.environ.get(visible, "all") in ("", "-1"):
        raise refuse(
            NO_DEVICE, f"{visible} hides every CUDA device", help="unset it, or use --device cpu"
        )
    import torch

    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise refuse(NO_DEVICE, "torch sees no CUDA device", help="use --device cpu")
    return "cuda" if available and wanted != "cpu" else "cpu"


def execution_of(
    engine: str,
    jobs: int | None,
    threads: int | None,
    cache: PathLike | None,
    tell: Callable[[str], None],
) -> Execution:
    """Return the execution settings; the cache folder is created if possible."""
    from kcdsl.route.catalogue import Execution
    from kcdsl.source.output import make_folder

    folder: Path | None = None
    if cache is None:
        folder = _usual_cache(tell)
    elif cache != "off":
        folder = Path(cache).resolve()
        make_folder(folder)
    return Execution(engine, jobs, threads, folder)


def _usual_cache(tell: Callable[[str], None]) -> Path | None:
    """Return the default cache folder; None if it cannot be created."""
    from kcdsl.source.files import user_place

    base = user_place("XDG_CACHE_HOME", ".cache")
    if base is not None:
        folder = base / "kcdsl" / "certifier"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            return folder
    tell("note: there is no folder for the cache; nothing is remembered")
    return None
