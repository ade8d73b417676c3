"""`kcdsl verify`: decide the formal clauses and write certificates."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.cli.foreign import add_allow_code, refuse_foreign_code
from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from kcdsl.diagnostics import Suppressed
    from kcdsl.ir.terms import Program
    from kcdsl.model.files import Artefacts
    from kcdsl.route.execution import Execution
    from kcdsl.route.goals import Goal
    from kcdsl.verdict.implied import Implied
    from kcdsl.verdict.outcome import GoalOutcome
    from kcdsl_certs.keys import SigningKey

HELP = "decide the clauses about every input of a region, and write certificates"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    from kcdsl.cli.devices import CHOICES
    from kcdsl.cli.execution import add_options
    from kcdsl.cli.numbers import positive
    from kcdsl.cli.signatures import add_signing_options

    parser.add_argument("contract", nargs="?", metavar="CONTRACT", help="default: the one here")
    parser.add_argument(
        "--block", action="append", metavar="NAME", help="only clauses on this block"
    )
    parser.add_argument("--clause", action="append", metavar="ID", help="only this clause")
    parser.add_argument("--backend", metavar="NAME", help="decide with this backend")
    parser.add_argument(
        "--backend-seconds",
        type=positive,
        default=3600.0,
        metavar="S",
        help="how long a backend of another distribution may take (default: 3600)",
    )
    parser.add_argument(
        "--domains",
        metavar="NAMES",
        help="bound in these domains alone, such as interval,planes (default: in all, cheapest "
        "first; planes of large blocks only if they are named)",
    )
    parser.add_argument(
        "--states",
        metavar="R",
        help="prove it for all states within R of those of the regions as well (default: 0)",
    )
    parser.add_argument(
        "--weights",
        metavar="RHO",
        help="prove it for all weights within RHO of those of the checkpoint, each relative to "
        "itself, such as 1e-4 or 1/1024 (default: for the checkpoint alone)",
    )
    parser.add_argument(
        "--alpha",
        metavar="P",
        help="clauses with `evidence: probabilistic` may be broken by independent roundings with "
        "at most this probability (default: 1e-9)",
    )
    parser.add_argument(
        "--attack",
        choices=("on", "off"),
        default="on",
        help="search for concrete runs beside the bounds (default: on)",
    )
    parser.add_argument(
        "--chain",
        action="store_true",
        help="prove blocks link by link, and show the slack of each link",
    )
    parser.add_argument(
        "--confirm",
        choices=("on", "off"),
        default="on",
        help="have the independent checker re-derive every proof (default: on)",
    )
    parser.add_argument(
        "--device", choices=CHOICES, default="auto", help="default: cuda where there is one"
    )
    add_options(parser)
    add_allow_code(parser)
    add_signing_options(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="folder of the certificate or statement (default: out beside CONTRACT)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> Exit:
    """Run the command."""
    from dataclasses import replace

    from kcdsl.check.compile import load_contract
    from kcdsl.cli.asking import domains, states_within, weights_within, with_chance
    from kcdsl.cli.devices import choose_device
    from kcdsl.cli.discover import find_contract, results_folder
    from kcdsl.cli.execution import execution_of, tell_cached
    from kcdsl.model.files import Artefacts
    from kcdsl.model.presets import resolve
    from kcdsl.release.artefacts import refuse_untrusted
    from kcdsl.release.signing import refuse_other_signers, signing_keys, tell_unsigned, written_as
    from kcdsl.source.files import in_contract
    from kcdsl.source.writing import refuse_folder
    from kcdsl.verdict.goal_report import VERIFY_SCHEMA, goal_json

    path = find_contract(arguments.contract, Path())
    (program, suppressed), base = load_contract(path), path.resolve().parent
    refuse_foreign_code(program, path, arguments, metrics=False)
    _refuse_inconsistent(program, path)
    chosen = _choose(program, arguments)
    if arguments.weights is not None:
        chosen = tuple(replace(goal, weights=weights_within(arguments.weights)) for goal in chosen)
    if arguments.states is not None:
        chosen = tuple(replace(goal, states=states_within(arguments.states)) for goal in chosen)
    if arguments.alpha is not None:
        chosen = with_chance(chosen, arguments.alpha)
    keys = signing_keys(arguments.sign)
    device = choose_device(arguments.device)
    more = arguments.weights is not None or arguments.states is not None
    backend = formal_backend(
        arguments.backend, around_weights=more, seconds=arguments.backend_seconds
    )
    if arguments.chain:
        _refuse_unchained(backend)
    if arguments.domains is not None:
        named = domains(arguments.domains, backend.name, chain=arguments.chain)
        chosen = tuple(replace(goal, domains=named) for goal in chosen)
    execution = execution_of(arguments)
    folder = results_folder(arguments.output, path)
    refuse_folder(folder)
    stem = "-".join(["verify", *(arguments.block or ()), *(arguments.clause or ())])
    target = written_as(folder / stem, bool(keys))
    replaced = bool(keys) and refuse_other_signers(target, keys)
    files = Artefacts.of(base)
    refuse_untrusted(program, files)
    with in_contract(path):
        outcomes = _decide(program, files, chosen, backend, device, execution, arguments)
        implied = _implied(program, files, outcomes, backend)
    certificate = _write(
        program, files, target, outcomes, implied, suppressed, keys, device, arguments
    )
    code = _exit(outcomes)
    if arguments.json:
        numerics = {"train": resolve(program.train), "infer": resolve(program.infer)}
        shown = str(certificate)
        document = {
            "schema": VERIFY_SCHEMA,
            "contract": {"name": program.name, "version": program.version},
            "goals": [
                _naming_file(goal_json(outcome, numerics, shown), outcome, folder)
                for outcome in outcomes
            ],
            "implied": [_implied_json(item) for item in implied],
            "certificate": shown,
            "exit": int(code),
        }
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        _print(outcomes, implied, certificate, arguments.contract)
    tell_cached(outcomes, execution)
    if not keys:
        tell_unsigned(certificate)
    elif replaced:
        print(
            one_line(f"note: {certificate} replaces an earlier one by the same keys"),
            file=sys.stderr,
        )
    return code


def recording(function: Any, program: Program, files: Artefacts) -> dict[str, Any]:
    """Return the argument by which a function of a backend records what it reads. For a backend
    that has none, record the files as they are before it runs."""
    from inspect import signature

    from kcdsl.release.artefacts import record_all

    if "artefacts" in signature(function).parameters:
        return {"artefacts": files}
    record_all(program, files)
    return {}


def _refuse_inconsistent(program: Program, path: Path) -> None:
    """Ask the SMT backend whether all clauses can hold at once; refuse if they cannot."""
    from kcdsl.diagnostics import Refusal, Severity
    from kcdsl.source.files import read_source

    backend = _smt()
    if backend is None:
        print("note: consistency of the clauses was not checked (no z3)", file=sys.stderr)
        return
    findings = backend.consistency(program, source=read_source(path))
    errors = [d for d in findings if d.severity is Severity.ERROR]
    if errors:
        raise Refusal(errors)


def _smt() -> Any:
    """Return the SMT backend, or None where z3 is not installed."""
    from kcdsl.route.catalogue import catalogue

    spec = next((s for s in catalogue() if s.name == "smt" and not s.missing()), None)
    return None if spec is None else spec.load()


def _choose(program: Program, arguments: argparse.Namespace) -> tuple[Goal, ...]:
    """Return the goals that the options select; refuse a selection that selects nothing."""
    from difflib import get_close_matches

    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import NO_GOAL, UNKNOWN_CLAUSE
    from kcdsl.route.goals import goals

    every = goals(program)
    known = [clause.id for clause in program.clauses]
    for wanted in arguments.clause or ():
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
        if (not arguments.block or goal.block in arguments.block)
        and (not arguments.clause or goal.clause.id in arguments.clause)
    )
    missing = [b for b in arguments.block or () if all(goal.block != b for goal in every)]
    if missing or not chosen:
        blocks = sorted({goal.block for goal in every})
        what = f"block {missing[0]!r}" if missing else "a drift for all inputs of a region"
        raise refuse(
            NO_GOAL,
            f"no clause of the contract speaks about {what}",
            help=(f"blocks with clauses: {', '.join(blocks)}; " if blocks else "")
            + "write `forall x in points(SLICE): norm_inf(drift(BLOCK, x)) <= LIMIT`; "
            "`kcdsl evaluate` decides what is measured",
        )
    return chosen


def _decide(
    program: Program,
    files: Artefacts,
    chosen: Sequence[Goal],
    backend: Any,
    device: str,
    execution: Execution,
    arguments: argparse.Namespace,
) -> tuple[GoalOutcome, ...]:
    from kcdsl.cli.execution import remembering
    from kcdsl.cli.progress import progress_bars

    with progress_bars() as progress:
        outcomes: tuple[GoalOutcome, ...] = backend.decide(
            program,
            files.base,
            chosen,
            device=device,
            attacks=arguments.attack == "on",
            confirm=arguments.confirm == "on",
            progress=progress,
            execution=remembering(execution, confirmed=arguments.confirm == "on"),
            **({"chain": True} if arguments.chain else {}),
            **recording(backend.decide, program, files),
        )
    return outcomes


def formal_backend(
    name: str | None, *, around_weights: bool = False, seconds: float = math.inf
) -> Any:
    """Return the backend for drift goals: the named one, else the first of the catalogue.

    One that knows no region around the weights is refused where one is asked for. One of another
    distribution is asked in a process of its own, and has so many `seconds` for all its answers.
    """
    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import NO_BACKEND, WEIGHTS_REGION
    from kcdsl.release.foreign import ForeignBackend
    from kcdsl.route.catalogue import Fragment, catalogue, is_foreign

    specs = catalogue()
    able = [s for s in specs if Fragment.UNIVERSAL_DRIFT in s.fragments and not s.missing()]
    named = [s for s in able if name is None or s.name == name]
    fit = [s for s in named if s.around_weights or not around_weights]
    if fit:
        return ForeignBackend(fit[0], seconds) if is_foreign(fit[0]) else fit[0].load()
    if named:
        raise refuse(
            WEIGHTS_REGION,
            f"backend {named[0].name!r} decides for the weights of the checkpoint alone",
            help="leave --weights out, or --backend",
        )
    for spec in specs:
        if spec.name == name:
            lacking = ", ".join(spec.missing())
            raise refuse(
                NO_BACKEND,
                f"backend {name!r} "
                + (f"needs {lacking}" if lacking else "does not decide drift for all inputs"),
                help="`kcdsl doctor` says how to install what is missing",
            )
    raise refuse(
        NO_BACKEND,
        f"there is no backend {name!r}" if name else "no installed backend decides drift clauses",
        help=f"backends: {', '.join(s.name for s in able) or 'none; see kcdsl doctor'}",
    )


def _refuse_unchained(backend: Any) -> None:
    """Refuse a backend that decides a block as one alone."""
    from inspect import signature

    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import NO_BACKEND

    if "chain" not in signature(backend.decide).parameters:
        raise refuse(
            NO_BACKEND,
            f"backend {backend.name!r} does not prove blocks link by link",
            help="leave out --chain, or name the backend `interval`",
        )


def _implied(
    program: Program, files: Artefacts, outcomes: Sequence[GoalOutcome], backend: Any
) -> tuple[Implied, ...]:
    """Return the empirical clauses, on slices with rows, that the proved drift bounds imply.

    A clause with a table is implied bucket by bucket, and nowhere if requests are in no bucket.
    """
    from dataclasses import replace

    from kcdsl.ir.buckets import expand_tables, gaps
    from kcdsl.verdict.proved import proved_drifts

    proved, smt = proved_drifts(program, outcomes), _smt()
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


def _implied_json(item: Implied) -> dict[str, Any]:
    return {
        "clause": item.clause_id,
        "slice": item.slice,
        "by": item.by,
        "chain": list(item.steps),
        "assumptions": list(item.assumptions),
    }


def _write(
    program: Program,
    files: Artefacts,
    target: Path,
    outcomes: Sequence[GoalOutcome],
    implied: Sequence[Implied],
    suppressed: Sequence[Suppressed],
    keys: Sequence[SigningKey],
    device: str,
    arguments: argparse.Namespace,
) -> Path:
    """Write the certificate, or its statement, and the proofs that it names, all or none."""
    from kcdsl.model.fingerprint import kernel_fingerprint
    from kcdsl.release.issue import issue, resting_on
    from kcdsl.release.proved import implied_clauses, proof_reference, proved_clauses
    from kcdsl.source.writing import make_folder, result, write_together

    proofs = {o.goal.clause.id: o.proof for o in outcomes if o.proof is not None}
    broken = {o.goal.clause.id: o.counterexample for o in outcomes if o.counterexample is not None}
    references = {name: proof_reference(name, proof) for name, proof in proofs.items()}
    results = proved_clauses(program, files, outcomes, references)
    results += implied_clauses(program, files, implied)
    folder = target.parent
    runs = {name: (_counterexample_file(folder, name), data) for name, data in broken.items()}
    bundle = issue(
        program=program,
        base=files,
        clauses=results,
        keys=keys,
        fingerprints={
            "train": kernel_fingerprint(program.train, device),
            "infer": kernel_fingerprint(program.infer, device),
        },
        stage=arguments.stage,
        lifetime=arguments.valid_for,
        suppressed=suppressed,
        evidence=[f for run in runs.values() for f in resting_on({"counterexample": run})],
        loaded=files.digests,
    )
    make_folder(folder)
    made = [result(folder / references[name].path, proofs[name]) for name in proofs]
    made += [result(path, data) for path, data in runs.values()]
    write_together([*made, result(target, bundle)], replace=True)
    return target


def _naming_file(goal: dict[str, Any], outcome: GoalOutcome, folder: Path) -> dict[str, Any]:
    """Add to a violated goal the file that `kcdsl replay` takes."""
    if outcome.counterexample is not None:
        file = _counterexample_file(folder, outcome.goal.clause.id)
        goal["counterexample"] = {**goal["counterexample"], "file": str(file)}
    return goal


def _counterexample_file(folder: Path, clause: str) -> Path:
    return folder / f"{clause}.counterexample.json"


def _exit(outcomes: Sequence[GoalOutcome]) -> Exit:
    from kcdsl.verdict.model import Held, InvalidEvidence, Violated

    if any(isinstance(o.verdict, Violated) for o in outcomes):
        return Exit.VIOLATED
    if any(isinstance(o.verdict, InvalidEvidence) for o in outcomes):
        return Exit.COULD_NOT_RUN
    if outcomes and all(isinstance(o.verdict, Held) for o in outcomes):
        return Exit.HELD
    return Exit.INCONCLUSIVE


def _print(
    outcomes: Sequence[GoalOutcome],
    implied: Sequence[Implied],
    certificate: Path,
    contract: str | None,
) -> None:
    from kcdsl.diagnostics.render.terminal import printable
    from kcdsl.release.signing import STATEMENT
    from kcdsl.verdict.console import print_on
    from kcdsl.verdict.goal_report import chain_table, goal_table
    from kcdsl.verdict.model import Inconclusive, InvalidEvidence, Violated

    def say(text: str, **how: Any) -> None:
        print_on(sys.stdout, text, markup=False, **how)

    print_on(sys.stdout, goal_table(outcomes))
    for table in filter(None, map(chain_table, outcomes)):
        print_on(sys.stdout, "", table)
    for outcome in outcomes:
        match outcome.verdict:
            case Inconclusive(reason) | InvalidEvidence(reason):
                say(f"{outcome.goal.clause.id}: {reason}")
            case Violated(counterexample):
                told = ", ".join(f"{name} {value}" for name, value in counterexample.items())
                say(f"{outcome.goal.clause.id}: counterexample ({told})")
                if outcome.counterexample is not None:
                    file = _counterexample_file(certificate.parent, outcome.goal.clause.id)
                    named = f" --contract {contract}" if contract is not None else ""
                    say(f"  again: kcdsl replay {file}{named}", soft_wrap=True)
            case _:
                pass
    for item in implied:
        say(f"\n{item.clause_id} on {item.slice} is implied:")
        for step in item.steps:
            say(f"  {step}")
    for text in dict.fromkeys(note for outcome in outcomes for note in outcome.notes):
        print(f"note: {printable(text)}", file=sys.stderr)
    kind = "statement" if certificate.name.endswith(STATEMENT) else "certificate"
    say(f"{kind}: {certificate}")
