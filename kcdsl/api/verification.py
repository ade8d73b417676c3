"""Deciding the formal clauses of a contract, and writing certificates of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.api.backends import (
    FormalBackend,
    choose_device,
    execution_of,
    formal_backend,
    formal_backends,
    loaded,
    solver_if_installed,
)
from kcdsl.api.contract import (
    Contract,
    PathLike,
    refuse_foreign_code,
    refuse_values,
    results_folder,
)
from kcdsl.api.portfolio import AUTO, decide_together
from kcdsl.api.results import Progress, TableResult, discard_message, no_progress
from kcdsl.diagnostics import Refusal, Severity, refuse
from kcdsl.diagnostics.codes import (
    NO_BACKEND,
    NO_DOMAIN,
    NO_GOAL,
    NO_PROBABILITY,
    UNKNOWN_CLAUSE,
    WEIGHTS_REGION,
    Code,
)
from kcdsl.diagnostics.report import refuse_unknown
from kcdsl.exits import Exit
from kcdsl.ir.obligations import slices_of
from kcdsl.ir.tables import expand_tables, gaps
from kcdsl.ir.terms import ONNX
from kcdsl.model.files import Artefacts
from kcdsl.model.presets import resolve
from kcdsl.release.artefacts import refuse_untrusted
from kcdsl.release.issue import evidence_entries, issue
from kcdsl.release.requirements import kernel_here
from kcdsl.release.results import implied_clauses, proof_reference, proved_clauses
from kcdsl.release.signing import Target, signing_keys
from kcdsl.route.catalogue import Fragment
from kcdsl.route.fragments import classify
from kcdsl.route.goals import goals
from kcdsl.source.files import in_contract, read_source
from kcdsl.source.output import make_folder, refuse_folder, result, write_together
from kcdsl.verdict.model import EXITS, verdict_name, worst
from kcdsl.verdict.outcome import proved_drifts
from kcdsl.verdict.text.goals import VERIFY_SCHEMA, goal_json
from kcdsl_certs.encoding.reals import parse_real
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.statement import LARGEST_ALPHA, LEAST_ALPHA, WIDEST

if TYPE_CHECKING:
    from kcdsl.ir.terms import Program
    from kcdsl.route.catalogue import BackendSpec, Execution
    from kcdsl.route.goals import Goal
    from kcdsl.verdict.outcome import GoalOutcome, Implied


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """Settings of a verification; each field is the option of `kcdsl verify` of its name."""

    blocks: Sequence[str] = ()
    clauses: Sequence[str] = ()
    backend: str | None = None
    backend_seconds: float = 3600.0
    domains: str | None = None
    states: str | None = None
    weights: str | None = None
    alpha: str | None = None
    attack: bool = True
    chain: bool = False
    confirm: bool = True
    device: str = "auto"
    engine: str = "processes"
    jobs: int | None = None
    threads: int | None = None
    time_limit: float | None = None
    cache: PathLike | None = None
    output: PathLike | None = None
    sign: Sequence[PathLike] = ()
    stage: str = "offline-ci"
    lifetime: timedelta = field(default_factory=lambda: timedelta(days=90))
    allow_code: bool = False
    progress: Callable[[], AbstractContextManager[Progress]] = no_progress
    tell: Callable[[str], None] = discard_message

    def __post_init__(self) -> None:
        refuse_values(self)


@dataclass(frozen=True, slots=True, repr=False)
class Verification(TableResult):
    """The outcomes, and the file of the certificate or its statement.

    `not_implied` are clause and slice of requirements that demand a proof and do not follow from
    the proved bounds; empty if only some clauses or blocks were chosen.
    """

    program: Program
    outcomes: tuple[GoalOutcome, ...]
    implied: tuple[Implied, ...]
    not_implied: tuple[tuple[str, str], ...]
    target: Target
    exit: Exit
    cache: Path | None

    @property
    def says(self) -> str:
        """Return the verdict and the file."""
        verdicts = {code: name for name, code in EXITS.items()}
        return f"{verdicts[self.exit]}, {self.path}"

    @property
    def path(self) -> Path:
        """Return the file of the certificate, or of its statement."""
        return self.target.path

    @property
    def held(self) -> bool:
        """Return whether every decided clause holds."""
        return self.exit is Exit.HELD

    def to_json(self) -> dict[str, Any]:
        """Return the document `kcdsl.verify/2`."""
        return _document(self)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each goal: clause, region, bound, limit, attack and verdict."""
        names = ("clause", "block", "slice", "region", "functional", "threshold", "bound")
        return [
            {name: goal.get(name) for name in (*names, "attack", "verdict", "reason")}
            for goal in self.to_json()["goals"]
        ]


def verify(contract: Contract, settings: VerifySettings) -> Verification:
    """Decide the chosen clauses, write the results and return them; raises Refusal."""
    program = contract.program
    refuse_foreign_code(contract, allowed=settings.allow_code, metrics=False)
    _refuse_inconsistent(contract, settings.tell)
    chosen = _asked(settings, _chosen(program, settings.blocks, settings.clauses))
    keys = signing_keys(settings.sign)
    device = choose_device(settings.device)
    around = settings.weights is not None or settings.states is not None
    seconds = settings.backend_seconds
    together = settings.backend == AUTO
    named = None if together else settings.backend
    backend = formal_backend(named, around_weights=around, seconds=seconds)
    if settings.chain:
        _refuse_unchained(backend.name)
    if together and (settings.chain or settings.domains is not None):
        raise refuse(
            NO_BACKEND,
            f"--backend {AUTO} leaves the way to each backend",
            help="leave out --chain and --domains, or name a backend",
        )
    if settings.domains is not None:
        domains = _domains(settings.domains, backend.name, chain=settings.chain)
        chosen = tuple(replace(goal, domains=domains) for goal in chosen)
    execution = execution_of(
        settings.engine, settings.jobs, settings.threads, settings.cache, settings.tell
    )
    execution = replace(execution, seconds=settings.time_limit)
    folder = results_folder(settings.output, contract.path)
    refuse_folder(folder)
    stem = folder / "-".join(["verify", *settings.blocks, *settings.clauses])
    target = Target.of(stem, keys, program.name)
    files = Artefacts.of(contract.base)
    refuse_untrusted(program, files)
    with in_contract(contract.path):
        if together:
            outcomes = _together(settings, program, files, chosen, device, execution)
        else:
            outcomes = _decide(settings, program, files, chosen, backend, device, execution)
        implied = _implied(program, files, outcomes, backend)
    _write(settings, contract, files, target, outcomes, implied, device)
    chosen_alone = settings.blocks or settings.clauses
    missing = () if chosen_alone else _not_implied(program, implied)
    verdicts = {verdict_name(outcome.verdict) for outcome in outcomes}
    code = EXITS[worst(verdicts | ({"inconclusive"} if missing else set()))]
    return Verification(program, outcomes, implied, missing, target, code, execution.cache)


def _asked(options: VerifySettings, goals: tuple[Goal, ...]) -> tuple[Goal, ...]:
    """Return the goals with the weight ball, state ball and probability of the options."""
    if options.weights is not None:
        rho = _exact(
            options.weights,
            lambda size: 0 < size <= WIDEST,
            (WEIGHTS_REGION, "--weights: {} is no size of a region around the weights"),
            f"a number above 0 and up to {WIDEST}, such as 1e-4 or 1/1024",
        )
        goals = tuple(replace(goal, weights=rho) for goal in goals)
    if options.states is not None:
        reach = _exact(
            options.states,
            lambda size: 0 <= size < 2**100,
            (WEIGHTS_REGION, "--states: {} is no distance from the states of a region"),
            "a number that is not negative, such as 1e-3",
        )
        goals = tuple(replace(goal, states=reach) for goal in goals)
    if options.alpha is None:
        return goals
    alpha = _exact(
        options.alpha,
        lambda chance: LEAST_ALPHA <= chance <= LARGEST_ALPHA,
        (NO_PROBABILITY, "--alpha: {} is no probability of a failure"),
        f"a number from 1e-30 to {LARGEST_ALPHA}, such as 1e-9",
    )
    if all(goal.alpha is None for goal in goals):
        raise refuse(
            NO_PROBABILITY,
            "--alpha: no clause that is decided here leaves anything to chance",
            help="a clause does with `evidence: probabilistic`",
        )
    return tuple(g if g.alpha is None else replace(g, alpha=alpha) for g in goals)


def _decide(
    options: VerifySettings,
    program: Program,
    files: Artefacts,
    chosen: Sequence[Goal],
    backend: FormalBackend,
    device: str,
    execution: Execution,
) -> tuple[GoalOutcome, ...]:
    confirmed = options.confirm
    if not confirmed and execution.cache is not None:
        # The cache is disabled if no checker verifies its content.
        options.tell("note: --confirm off takes nothing from the cache, and keeps nothing")
        execution = replace(execution, cache=None)
    with options.progress() as progress:
        outcomes: tuple[GoalOutcome, ...] = backend.decide(
            program,
            files.base,
            chosen,
            device=device,
            attacks=options.attack,
            confirm=confirmed,
            progress=progress,
            execution=execution,
            artefacts=files,
            tell=lambda text: options.tell(f"note: {text}"),
            **({"chain": True} if options.chain else {}),
        )
    if not options.attack:
        note = "--attack off: no run was searched for, so nothing shows how near bounds are"
        outcomes = tuple(replace(o, notes=(*o.notes, note)) for o in outcomes)
    return outcomes


def _together(
    options: VerifySettings,
    program: Program,
    files: Artefacts,
    chosen: Sequence[Goal],
    device: str,
    execution: Execution,
) -> tuple[GoalOutcome, ...]:
    """Ask the installed backends in turn."""

    def ask(
        backend: FormalBackend, goals: Sequence[Goal], seconds: float | None
    ) -> tuple[GoalOutcome, ...]:
        limited = replace(execution, seconds=seconds)
        return _decide(options, program, files, goals, backend, device, limited)

    def load(spec: BackendSpec, seconds: float | None) -> FormalBackend:
        most = options.backend_seconds
        return loaded(spec, most if seconds is None else min(most, seconds))

    offers = [(spec, partial(load, spec)) for spec in formal_backends()]
    return decide_together(offers, chosen, ask, execution.seconds)


def _write(
    options: VerifySettings,
    contract: Contract,
    files: Artefacts,
    target: Target,
    outcomes: Sequence[GoalOutcome],
    implied: Sequence[Implied],
    device: str,
) -> None:
    """Write the certificate, or its statement, and its proofs together."""
    program, folder = contract.program, target.path.parent
    proofs = {o.goal.clause.id: o.proof for o in outcomes if o.proof is not None}
    references = {name: proof_reference(name, proof) for name, proof in proofs.items()}
    results = proved_clauses(program, files, outcomes, references)
    results += implied_clauses(program, files, implied)
    runs = {
        o.goal.clause.id: (counterexample_file(folder, o), o.counterexample)
        for o in outcomes
        if o.counterexample is not None
    }
    bundle = issue(
        program=program,
        base=files,
        clauses=results,
        keys=target.keys,
        fingerprints={
            "train": kernel_here(program, program.train, files, device),
            "infer": kernel_here(program, program.infer, files, device),
        },
        stage=options.stage,
        lifetime=options.lifetime,
        suppressed=contract.accepted,
        source=contract.source,
        evidence=[f for run in runs.values() for f in evidence_entries({"counterexample": run})],
        loaded=files.digests,
    )
    make_folder(folder)
    made = [result(folder / references[name].path, proofs[name]) for name in proofs]
    made += [result(path, data) for path, data in runs.values()]
    write_together([*made, result(target.path, bundle)], replace=True)


# --- what is asked -------------------------------------------------------------------------------


def _refuse_inconsistent(contract: Contract, tell: Callable[[str], None]) -> None:
    """Ask the SMT backend whether all clauses can hold at once; refuse if they cannot."""
    backend = solver_if_installed()
    if backend is None:
        tell("note: consistency of the clauses was not checked (no z3)")
        return
    findings = backend.consistency(contract.program, source=read_source(contract.path))
    errors = [d for d in findings if d.severity is Severity.ERROR]
    if errors:
        raise Refusal(errors)


def _refuse_unchained(name: str) -> None:
    """Refuse a backend without support for chains."""
    if not any(spec.chains for spec in formal_backends() if spec.name == name):
        raise refuse(
            NO_BACKEND,
            f"backend {name!r} does not prove blocks stage by stage",
            help="leave out --chain, or name the backend `interval`",
        )


def _chosen(program: Program, blocks: Sequence[str], clauses: Sequence[str]) -> tuple[Goal, ...]:
    """Return the goals that the options select; refuse a selection that selects nothing."""
    every = goals(program)
    known = [clause.id for clause in program.clauses]
    refuse_unknown(clauses, known, UNKNOWN_CLAUSE, "the contract has no clause", "clauses")
    chosen = tuple(
        goal
        for goal in every
        if (not blocks or goal.block in blocks) and (not clauses or goal.clause.id in clauses)
    )
    missing = [b for b in blocks if all(goal.block != b for goal in every)]
    if missing or not chosen:
        present = sorted({goal.block for goal in every})
        what = f"block {missing[0]!r}" if missing else "a drift for all inputs of a region"
        raise refuse(
            NO_GOAL,
            f"no clause of the contract is about {what}",
            help=(f"blocks with clauses: {', '.join(present)}; " if present else "")
            + "write `forall x in points(SLICE): norm_inf(drift(BLOCK, x)) <= LIMIT`; "
            "`kcdsl evaluate` decides what is measured",
        )
    return chosen


def _exact(
    text: str, admits: Callable[[Fraction], bool], wrong: tuple[Code, str], help: str
) -> Fraction:
    """Return the exact value of an option; refuse an invalid or inadmissible number.

    `wrong` is the code of the refusal and its message, with a placeholder for the text.
    """
    code, message = wrong
    try:
        found = parse_real(text)
        if admits(found):
            return found
    except Rejected:
        pass
    raise refuse(code, message.format(repr(text[:40])), help=help)


def _domains(text: str, backend: str, *, chain: bool) -> tuple[str, ...]:
    """Return the chosen domains; refuse domains that the backend does not have."""
    from kcdsl.route.catalogue import catalogue

    known = next((spec.domains for spec in catalogue() if spec.name == backend), ())
    if chain or not known:
        what = "a chain" if chain else f"backend {backend!r}"
        raise refuse(
            NO_DOMAIN,
            f"--domains: {what} leaves no choice of domains",
            help="leave --domains out" + (", or --chain" if chain else ""),
        )
    named = tuple(name.strip() for name in text.split(","))
    refuse_unknown(named, known, NO_DOMAIN, "--domains: there is no domain", "domains")
    if len(set(named)) != len(named):
        raise refuse(
            NO_DOMAIN, f"--domains: {text[:80]!r} names a domain twice", help="name each once"
        )
    return tuple(name for name in known if name in named)


# --- what was found ------------------------------------------------------------------------------


def _ends_in_logits(program: Program, files: Artefacts) -> bool:
    """Return whether the output of a model is logits. An architecture declares it; a module and an
    ONNX file are loaded."""
    if program.model.module is None and program.model.architecture != ONNX:
        return True
    from kcdsl.model.loader import load_model

    return not load_model(program.model, files).encoder_only


def _implied(
    program: Program, files: Artefacts, outcomes: Sequence[GoalOutcome], backend: FormalBackend
) -> tuple[Implied, ...]:
    """Return the empirical clauses, on slices with rows, that the proved drift bounds imply.

    A clause with a table is implied per bucket, and nowhere if some requests are in no bucket.
    """
    proved, smt = proved_drifts(program, outcomes), solver_if_installed()
    if not proved or smt is None:
        return ()
    found: tuple[Implied, ...] = smt.derive(program, proved)
    if not found or not _ends_in_logits(program, files):
        return ()
    written, missed = expand_tables(program), gaps(program)
    asked = replace(written, slices=(*written.slices, *(gap.slice for gap in missed)))
    names = {item.slice for item in found} | {gap.slice.name for gap in missed}
    sizes = backend.slice_sizes(asked, files.base, names, artefacts=files)
    spoiled = {name for gap in missed if sizes[gap.slice.name] > 0 for name in gap.spoils}
    return tuple(item for item in found if sizes[item.slice] > 0 and item.slice not in spoiled)


def _not_implied(program: Program, implied: Sequence[Implied]) -> tuple[tuple[str, str], ...]:
    """Return clause and slice of what must follow from proved bounds and does not."""
    demanded = {c.id for c in program.clauses if classify(c).fragment is Fragment.IMPLIED}
    found = {(item.clause_id, item.slice) for item in implied}
    asked = (
        (clause.id, name or "")
        for clause in expand_tables(program).clauses
        if clause.id in demanded
        for name in slices_of(clause)
    )
    return tuple(each for each in asked if each not in found)


def counterexample_file(folder: Path, outcome: GoalOutcome) -> Path:
    """Return the file of the run that breaks a goal."""
    return folder / f"{outcome.goal.clause.id}.counterexample.json"


def _document(found: Verification) -> dict[str, Any]:
    program, certificate = found.program, found.path
    numerics = {"train": resolve(program.train), "infer": resolve(program.infer)}
    described = []
    for outcome in found.outcomes:
        goal = goal_json(outcome, numerics, str(certificate))
        if outcome.counterexample is not None:
            file = counterexample_file(certificate.parent, outcome)
            goal["counterexample"] = {**goal["counterexample"], "file": str(file)}
        described.append(goal)
    return {
        "schema": VERIFY_SCHEMA,
        "contract": {"name": program.name, "version": program.version},
        "goals": described,
        "implied": [
            {
                "clause": item.clause_id,
                "slice": item.slice,
                "by": item.by,
                "chain": list(item.steps),
                "assumptions": list(item.assumptions),
            }
            for item in found.implied
        ],
        "not_implied": [{"clause": clause, "slice": name} for clause, name in found.not_implied],
        "certificate": str(certificate),
        "exit": int(found.exit),
    }
