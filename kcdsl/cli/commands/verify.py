"""`kcdsl verify`: decide the formal clauses and write certificates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.cli.common import choice, switch, value, values
from kcdsl.cli.common.contracts import Contract, read_contract, refuse_foreign_code, results_folder
from kcdsl.cli.common.options import (
    Certifies,
    Device,
    Engine,
    RunsCode,
    choose_device,
    contract_argument,
    count,
    device_option,
    engine_option,
    execution_of,
    jobs_option,
    json_option,
    output_option,
    positive,
)
from kcdsl.cli.common.output import print_json, progress_bars, say
from kcdsl.cli.common.plugins import formal_backend, solver_if_installed
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
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from kcdsl.ir.terms import Program
    from kcdsl.model.files import Artefacts
    from kcdsl.release.signing import Target
    from kcdsl.route.catalogue import Execution
    from kcdsl.route.goals import Goal
    from kcdsl.verdict.outcome import GoalOutcome, Implied


class Switch(StrEnum):
    """Whether a step is done."""

    ON = "on"
    OFF = "off"


@dataclass(frozen=True, kw_only=True)
class VerifyCommand(RunsCode, Certifies):
    """Decide the clauses about every input of a region, and write certificates."""

    contract: str | None = contract_argument()
    block: tuple[str, ...] = values("NAME", "only clauses on this block")
    clause: tuple[str, ...] = values("ID", "only this clause")
    backend: str | None = value("NAME", "decide with this backend")
    backend_seconds: float = value(
        "S", "how long a backend of another distribution may take", 3600.0, read=positive
    )
    domains: str | None = value(
        "NAMES",
        "bound in these domains alone, such as interval,planes (default: in all, cheapest first; "
        "planes of large blocks only if they are named)",
    )
    states: str | None = value(
        "R", "prove it for all states within R of those of the regions as well (default: 0)"
    )
    weights: str | None = value(
        "RHO",
        "prove it for all weights within RHO of those of the checkpoint, each relative to itself, "
        "such as 1e-4 or 1/1024 (default: for the checkpoint alone)",
    )
    alpha: str | None = value(
        "P",
        "clauses with `evidence: probabilistic` may be broken by independent roundings with at "
        "most this probability (default: 1e-9)",
    )
    attack: Switch = choice(Switch, "search for concrete runs beside the bounds", Switch.ON)
    chain: bool = switch("prove blocks stage by stage, and show the slack of each stage")
    confirm: Switch = choice(
        Switch, "have the independent checker re-derive every proof", Switch.ON
    )
    device: Device = device_option()
    jobs: int | None = jobs_option("cases", "by cores and memory")
    engine: Engine = engine_option("cases")
    threads: int | None = value(
        "N",
        "threads of one case (default: the cores, divided among the cases)",
        read=count,
    )
    time_limit: float | None = value(
        "S",
        "search for bounds and runs for so many seconds; what is found by then is kept "
        "(default: as long as it takes)",
        read=positive,
    )
    cache: str | None = value(
        "DIR",
        "folder of what earlier runs found, or `off` (default: kcdsl/certifier in "
        "$XDG_CACHE_HOME or ~/.cache)",
    )
    output: str | None = output_option(
        "DIR", "folder of the certificate or statement (default: out beside CONTRACT)"
    )
    json: bool = json_option()

    def run(self) -> Exit:
        """Decide the chosen clauses, and write what was found before it is printed."""
        from kcdsl.model.files import Artefacts
        from kcdsl.release.artefacts import refuse_untrusted
        from kcdsl.release.signing import Target, signing_keys
        from kcdsl.source.files import in_contract
        from kcdsl.source.writing import refuse_folder
        from kcdsl.verdict.model import EXITS, verdict_name, worst

        contract = read_contract(self.contract)
        program = contract.program
        refuse_foreign_code(contract, allowed=self.allow_code, metrics=False)
        _refuse_inconsistent(contract)
        chosen = self._asked(_chosen(program, self.block, self.clause))
        keys = signing_keys(self.sign)
        device = choose_device(self.device)
        around = self.weights is not None or self.states is not None
        backend = formal_backend(self.backend, around_weights=around, seconds=self.backend_seconds)
        if self.chain:
            _refuse_unchained(backend)
        if self.domains is not None:
            domains = _domains(self.domains, backend.name, chain=self.chain)
            chosen = tuple(replace(goal, domains=domains) for goal in chosen)
        execution = execution_of(self.engine, self.jobs, self.threads, self.cache)
        execution = replace(execution, seconds=self.time_limit)
        folder = results_folder(self.output, contract.path)
        refuse_folder(folder)
        target = Target.of(folder / "-".join(["verify", *self.block, *self.clause]), keys)
        files = Artefacts.of(contract.base)
        refuse_untrusted(program, files)
        with in_contract(contract.path):
            outcomes = self._decide(program, files, chosen, backend, device, execution)
            implied = _implied(program, files, outcomes, backend)
        self._write(contract, files, target, outcomes, implied, device)
        code = EXITS[worst({verdict_name(outcome.verdict) for outcome in outcomes})]
        if self.json:
            print_json(_document(program, outcomes, implied, target.path, code), allow_nan=False)
        else:
            _print(outcomes, implied, target.path, self.contract)
        cached, cases = sum(o.cached for o in outcomes), sum(len(o.cases) for o in outcomes)
        if cached:
            say(f"cache: {cached} of {cases} cases from {execution.cache}")
        target.tell()
        return code

    def _asked(self, goals: tuple[Goal, ...]) -> tuple[Goal, ...]:
        """Return the goals with the regions and the probability that options ask for."""
        from kcdsl_certs.statement import LARGEST_ALPHA, LEAST_ALPHA, WIDEST

        if self.weights is not None:
            rho = _exact(
                self.weights,
                lambda size: 0 < size <= WIDEST,
                (WEIGHTS_REGION, "--weights: {} is no size of a region around the weights"),
                f"a number above 0 and up to {WIDEST}, such as 1e-4 or 1/1024",
            )
            goals = tuple(replace(goal, weights=rho) for goal in goals)
        if self.states is not None:
            reach = _exact(
                self.states,
                lambda size: 0 <= size < 2**100,
                (WEIGHTS_REGION, "--states: {} is no distance from the states of a region"),
                "a number that is not negative, such as 1e-3",
            )
            goals = tuple(replace(goal, states=reach) for goal in goals)
        if self.alpha is None:
            return goals
        alpha = _exact(
            self.alpha,
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
        self,
        program: Program,
        files: Artefacts,
        chosen: Sequence[Goal],
        backend: Any,
        device: str,
        execution: Execution,
    ) -> tuple[GoalOutcome, ...]:
        confirmed = self.confirm is Switch.ON
        if not confirmed and execution.cache is not None:
            # Nothing is remembered where no checker looks at what comes out of the cache.
            say("note: --confirm off takes nothing from the cache, and keeps nothing")
            execution = replace(execution, cache=None)
        with progress_bars() as progress:
            outcomes: tuple[GoalOutcome, ...] = backend.decide(
                program,
                files.base,
                chosen,
                device=device,
                attacks=self.attack is Switch.ON,
                confirm=confirmed,
                progress=progress,
                execution=execution,
                **({"chain": True} if self.chain else {}),
                **_telling(backend.decide),
                **recording(backend.decide, program, files),
            )
        if self.attack is Switch.OFF:
            note = "--attack off: no run was searched for, so nothing shows how near bounds are"
            outcomes = tuple(replace(o, notes=(*o.notes, note)) for o in outcomes)
        return outcomes

    def _write(
        self,
        contract: Contract,
        files: Artefacts,
        target: Target,
        outcomes: Sequence[GoalOutcome],
        implied: Sequence[Implied],
        device: str,
    ) -> None:
        """Write the certificate, or its statement, and the proofs that it names, all or none."""
        from kcdsl.model.fingerprint import kernel_fingerprint
        from kcdsl.release.issue import issue, resting_on
        from kcdsl.release.results import implied_clauses, proof_reference, proved_clauses
        from kcdsl.source.writing import make_folder, result, write_together

        program, folder = contract.program, target.path.parent
        proofs = {o.goal.clause.id: o.proof for o in outcomes if o.proof is not None}
        references = {name: proof_reference(name, proof) for name, proof in proofs.items()}
        results = proved_clauses(program, files, outcomes, references)
        results += implied_clauses(program, files, implied)
        runs = {
            o.goal.clause.id: (_counterexample_file(folder, o), o.counterexample)
            for o in outcomes
            if o.counterexample is not None
        }
        bundle = issue(
            program=program,
            base=files,
            clauses=results,
            keys=target.keys,
            fingerprints={
                "train": kernel_fingerprint(program.train, device),
                "infer": kernel_fingerprint(program.infer, device),
            },
            stage=self.stage.value,
            lifetime=self.lifetime,
            suppressed=contract.accepted,
            evidence=[f for run in runs.values() for f in resting_on({"counterexample": run})],
            loaded=files.digests,
        )
        make_folder(folder)
        made = [result(folder / references[name].path, proofs[name]) for name in proofs]
        made += [result(path, data) for path, data in runs.values()]
        write_together([*made, result(target.path, bundle)], replace=True)


def recording(function: Any, program: Program, files: Artefacts) -> dict[str, Any]:
    """Return the argument by which a function of a backend records what it reads. For a backend
    that has none, record the files as they are before it runs."""
    from inspect import signature

    from kcdsl.release.artefacts import record_all

    if "artefacts" in signature(function).parameters:
        return {"artefacts": files}
    record_all(program, files)
    return {}


def _telling(function: Any) -> dict[str, Any]:
    """Return the argument by which a backend tells beforehand what work may cost, if it has one."""
    from inspect import signature

    return (
        {"tell": lambda text: say(f"note: {text}")}
        if "tell" in signature(function).parameters
        else {}
    )


# --- what is asked -------------------------------------------------------------------------------


def _refuse_inconsistent(contract: Contract) -> None:
    """Ask the SMT backend whether all clauses can hold at once; refuse if they cannot."""
    from kcdsl.source.files import read_source

    backend = solver_if_installed()
    if backend is None:
        print("note: consistency of the clauses was not checked (no z3)", file=sys.stderr)
        return
    findings = backend.consistency(contract.program, source=read_source(contract.path))
    errors = [d for d in findings if d.severity is Severity.ERROR]
    if errors:
        raise Refusal(errors)


def _refuse_unchained(backend: Any) -> None:
    """Refuse a backend that decides a block as one alone."""
    from inspect import signature

    if "chain" not in signature(backend.decide).parameters:
        raise refuse(
            NO_BACKEND,
            f"backend {backend.name!r} does not prove blocks stage by stage",
            help="leave out --chain, or name the backend `interval`",
        )


def _chosen(program: Program, blocks: Sequence[str], clauses: Sequence[str]) -> tuple[Goal, ...]:
    """Return the goals that the options select; refuse a selection that selects nothing."""
    from difflib import get_close_matches

    from kcdsl.route.goals import goals

    every = goals(program)
    known = [clause.id for clause in program.clauses]
    for wanted in clauses:
        if wanted not in known:
            near = get_close_matches(wanted, known, n=1)
            raise refuse(
                UNKNOWN_CLAUSE,
                f"the contract has no clause {wanted!r}",
                help=f"did you mean {near[0]!r}?" if near else f"clauses: {', '.join(known)}",
            )
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
            f"no clause of the contract speaks about {what}",
            help=(f"blocks with clauses: {', '.join(present)}; " if present else "")
            + "write `forall x in points(SLICE): norm_inf(drift(BLOCK, x)) <= LIMIT`; "
            "`kcdsl evaluate` decides what is measured",
        )
    return chosen


def _exact(
    text: str, admits: Callable[[Fraction], bool], wrong: tuple[Code, str], help: str
) -> Fraction:
    """Return the exact value of an option; refuse what is no number, or not one of the admitted.

    `wrong` is the code of the refusal and its message, with a place for the text.
    """
    from kcdsl_certs.encoding.reals import parse_real
    from kcdsl_certs.encoding.rejected import Rejected

    code, message = wrong
    try:
        found = parse_real(text)
        if admits(found):
            return found
    except Rejected:
        pass
    raise refuse(code, message.format(repr(text[:40])), help=help)


def _domains(text: str, backend: str, *, chain: bool) -> tuple[str, ...]:
    """Return the domains that are named; refuse others than those that the backend has."""
    from difflib import get_close_matches

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
    for name in named:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise refuse(
                NO_DOMAIN,
                f"--domains: there is no domain {name[:40]!r}",
                help=f"did you mean {near[0]!r}?" if near else f"domains: {', '.join(known)}",
            )
    if len(set(named)) != len(named):
        raise refuse(
            NO_DOMAIN, f"--domains: {text[:80]!r} names a domain twice", help="name each once"
        )
    return tuple(name for name in known if name in named)


# --- what was found ------------------------------------------------------------------------------


def _implied(
    program: Program, files: Artefacts, outcomes: Sequence[GoalOutcome], backend: Any
) -> tuple[Implied, ...]:
    """Return the empirical clauses, on slices with rows, that the proved drift bounds imply.

    A clause with a table is implied bucket by bucket, and nowhere if requests are in no bucket.
    """
    from kcdsl.ir.tables import expand_tables, gaps
    from kcdsl.verdict.outcome import proved_drifts

    proved, smt = proved_drifts(program, outcomes), solver_if_installed()
    if not proved or smt is None:
        return ()
    found: tuple[Implied, ...] = smt.derive(program, proved)
    if not found:
        return ()
    written, missed = expand_tables(program), gaps(program)
    asked = replace(written, slices=(*written.slices, *(gap.slice for gap in missed)))
    names = {item.slice for item in found} | {gap.slice.name for gap in missed}
    more = recording(backend.slice_sizes, program, files)
    sizes = backend.slice_sizes(asked, files.base, names, **more)
    spoiled = {name for gap in missed if sizes[gap.slice.name] > 0 for name in gap.spoils}
    return tuple(item for item in found if sizes[item.slice] > 0 and item.slice not in spoiled)


def _counterexample_file(folder: Path, outcome: GoalOutcome) -> Path:
    return folder / f"{outcome.goal.clause.id}.counterexample.json"


def _document(
    program: Program,
    outcomes: Sequence[GoalOutcome],
    implied: Sequence[Implied],
    certificate: Path,
    code: Exit,
) -> dict[str, Any]:
    from kcdsl.model.presets import resolve
    from kcdsl.verdict.text.goals import VERIFY_SCHEMA, goal_json

    numerics = {"train": resolve(program.train), "infer": resolve(program.infer)}
    described = []
    for outcome in outcomes:
        goal = goal_json(outcome, numerics, str(certificate))
        if outcome.counterexample is not None:
            file = _counterexample_file(certificate.parent, outcome)
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
            for item in implied
        ],
        "certificate": str(certificate),
        "exit": int(code),
    }


def _print(
    outcomes: Sequence[GoalOutcome],
    implied: Sequence[Implied],
    certificate: Path,
    contract: str | None,
) -> None:
    from kcdsl.diagnostics.render.terminal import printable
    from kcdsl.release.signing import STATEMENT
    from kcdsl.verdict.model import Inconclusive, InvalidEvidence, Violated
    from kcdsl.verdict.text.console import print_on
    from kcdsl.verdict.text.goals import chain_table, goal_table

    def tell(text: str, **how: Any) -> None:
        print_on(sys.stdout, text, markup=False, **how)

    print_on(sys.stdout, goal_table(outcomes))
    for table in filter(None, map(chain_table, outcomes)):
        print_on(sys.stdout, "", table)
    for outcome in outcomes:
        match outcome.verdict:
            case Inconclusive(reason) | InvalidEvidence(reason):
                tell(f"{outcome.goal.clause.id}: {reason}")
            case Violated(counterexample):
                told = ", ".join(f"{name} {value}" for name, value in counterexample.items())
                tell(f"{outcome.goal.clause.id}: counterexample ({told})")
                if outcome.counterexample is not None:
                    file = _counterexample_file(certificate.parent, outcome)
                    named = f" --contract {contract}" if contract is not None else ""
                    tell(f"  again: kcdsl replay {file}{named}", soft_wrap=True)
            case _:
                pass
    for item in implied:
        tell(f"\n{item.clause_id} on {item.slice} is implied:")
        for step in item.steps:
            tell(f"  {step}")
    for text in dict.fromkeys(note for outcome in outcomes for note in outcome.notes):
        print(f"note: {printable(text)}", file=sys.stderr)
    kind = "statement" if certificate.name.endswith(STATEMENT) else "certificate"
    tell(f"{kind}: {certificate}")
