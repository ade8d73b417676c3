"""`kcdsl verify` decides the formal clauses, `kcdsl vnnlib` answers queries about ONNX networks."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.api.contract import read_contract
from kcdsl.cli.common import Command, argument, choice, switch, value, values
from kcdsl.cli.common.execution import (
    CertificateOptions,
    CodeOptions,
    Device,
    Engine,
    device_option,
    engine_option,
    jobs_option,
)
from kcdsl.cli.common.options import (
    OutputFormat,
    contract_argument,
    format_option,
    output_option,
    positive,
    seconds,
    thread_count,
)
from kcdsl.cli.common.output import print_json, progress_bars, say
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import USAGE
from kcdsl.diagnostics.render.terminal import printable
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from kcdsl.api.verification import Verification


class StepMode(StrEnum):
    """The choice whether a step is done."""

    ON = "on"
    OFF = "off"


@dataclass(frozen=True, kw_only=True)
class VerifyCommand(CodeOptions, CertificateOptions):
    """Decide clauses for all inputs of a region, and write certificates."""

    contract: str | None = contract_argument()
    blocks: tuple[str, ...] = values("NAME", "only clauses on this block", name="block")
    clauses: tuple[str, ...] = values("ID", "only this clause", name="clause")
    backend: str | None = value(
        "NAME",
        "decide with this backend, or with all in turn: `auto` (default: the first applicable)",
    )
    backend_seconds: float = value(
        "S", "time limit for a backend of another distribution", 3600.0, read=positive
    )
    domains: str | None = value(
        "NAMES",
        "use only these proof domains: interval,affine,planes,splits (default: all, cheapest "
        "first; planes of large blocks only if named)",
    )
    states: str | None = value(
        "R", "also prove it for all states within distance R of the regions (default: 0)"
    )
    weights: str | None = value(
        "RHO",
        "prove it for all weights within relative distance RHO of the checkpoint, such as 1e-4 "
        "or 1/1024 (default: only for the checkpoint)",
    )
    alpha: str | None = value(
        "P",
        "largest probability that independent roundings violate a clause with `evidence: "
        "probabilistic` (default: 1e-9)",
    )
    attack: StepMode = choice(StepMode, "also search for counterexamples", StepMode.ON)
    chain: bool = switch("prove blocks stage by stage and show the slack of each stage")
    confirm: StepMode = choice(
        StepMode, "re-derive every proof with the independent checker", StepMode.ON
    )
    device: Device = device_option()
    jobs: int | None = jobs_option("cases", "by cores and memory")
    engine: Engine = engine_option("cases")
    threads: int | None = value(
        "N",
        "threads per case (default: the cores, divided among the cases)",
        read=thread_count,
    )
    time_limit: float | None = value(
        "S",
        "time limit of the search for bounds and counterexamples; results found by then are kept "
        "(default: none)",
        read=positive,
    )
    cache: str | None = value(
        "DIR",
        "folder of the cache of earlier runs, or `off` (default: kcdsl/certifier in "
        "$XDG_CACHE_HOME or ~/.cache)",
    )
    output: str | None = output_option(
        "DIR", "folder for the certificate or statement (default: out beside CONTRACT)"
    )
    format: OutputFormat = format_option()

    def run(self) -> Exit:
        """Decide the chosen clauses, write the results, then print them."""
        from kcdsl.api.verification import VerifySettings, verify

        settings = self.settings(
            VerifySettings,
            attack=self.attack is StepMode.ON,
            confirm=self.confirm is StepMode.ON,
            progress=progress_bars,
            tell=say,
        )
        found = verify(read_contract(self.contract), settings)
        if self.format is OutputFormat.JSON:
            print_json(found.to_json(), allow_nan=False)
        else:
            _print(found, self.contract)
        for text in dict.fromkeys(note for outcome in found.outcomes for note in outcome.notes):
            print(f"note: {printable(text)}", file=sys.stderr)
        cached = sum(outcome.cached for outcome in found.outcomes)
        if cached:
            cases = sum(len(outcome.cases) for outcome in found.outcomes)
            say(f"cache: {cached} of {cases} cases from {found.cache}")
        found.target.tell()
        return found.exit


def _print(found: Verification, contract: str | None) -> None:
    from kcdsl.api.verification import counterexample_file
    from kcdsl.release.signing import STATEMENT
    from kcdsl.verdict.model import Inconclusive, InvalidEvidence, Violated
    from kcdsl.verdict.text.console import print_on
    from kcdsl.verdict.text.goals import chain_table, goal_table

    def tell(text: str, **how: Any) -> None:
        print_on(sys.stdout, text, markup=False, **how)

    outcomes, certificate = found.outcomes, found.path
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
                shown, attack = counterexample.get("value"), outcome.attack
                if isinstance(shown, float) and attack is not None and shown < 0.99 * attack:
                    tell(f"  each sum of this run has one order; {attack:.3g} leaves orders free")
                if outcome.counterexample is not None:
                    file = counterexample_file(certificate.parent, outcome)
                    named = f" --contract {contract}" if contract is not None else ""
                    tell(f"  again: kcdsl replay {file}{named}", soft_wrap=True)
            case _:
                pass
    for clause, name in found.not_implied:
        tell(f"{clause} on {name}: it does not follow from the proved bounds")
    for item in found.implied:
        tell(f"\n{item.clause_id} on {item.slice} is implied:")
        for step in item.steps:
            tell(f"  {step}")
    kind = "statement" if certificate.name.endswith(STATEMENT) else "certificate"
    tell(f"{kind}: {certificate}")


# --- vnnlib ---------------------------------------------------------------------------------------

_DAY = 86_400.0


def _capability(what: str) -> bool:
    found: bool = switch(f"of `supports`: {what}", group="capability")
    return found


@dataclass(frozen=True, kw_only=True)
class VnnlibCommand(Command):
    """Answer VNN-LIB queries about ONNX networks, as their solvers do."""

    action: str = choice(
        ["verify", "supports"],
        "decide a query: sat, unsat, unknown or timed-out; or print one capability",
        positional="",
    )
    query: str | None = argument("QUERY", "the query of `verify`, in VNN-LIB 2.0 or 1.0", "?")
    network: tuple[str, ...] = values("NAME=FILE", "the ONNX file of a network of the query")
    timeout: float = value("SECONDS", "time limit of `verify`", _DAY, read=seconds)
    solver: str | None = value(
        "COMMAND", "run this solver program instead; its answers are checked"
    )
    onnx_opset_versions: bool = _capability("the first and the last version of operators")
    onnx_element_types: bool = _capability("the element types for which answers are sound")
    onnx_operators: bool = _capability("the operators")
    vnnlib_versions: bool = _capability("the first and the last version of queries")
    hidden_node_theories: bool = _capability("theories of hidden nodes")
    multiple_input_output_theories: bool = _capability("theories of several inputs or outputs")
    multiple_network_theories: bool = _capability("theories of several networks")
    multiple_node_comparison_theories: bool = _capability("theories of comparisons of nodes")
    arithmetic_complexity_theories: bool = _capability("theories of arithmetic")
    optimised_disjunctive_reasoning: bool = _capability("whether `or` is more than its cases")
    serialise_assignments: bool = _capability("whether assignments are written as tensors")

    def run(self) -> Exit:
        """Print the answer, with the assignment of `sat`, on stdout; notes go to stderr."""
        from kcdsl.api.backends import query_solver

        if self.action == "supports":
            sys.stdout.write(query_solver().capability(self._asked()))
            return Exit.HELD
        if self.query is None:
            raise refuse(USAGE, "`verify` needs a query", help="kcdsl vnnlib verify QUERY.vnnlib")
        path, networks = Path(self.query), self._networks()
        solver = query_solver()
        if self.solver is None:
            found = solver.verify(path, networks, self.timeout)
        else:
            found = solver.ask(self.solver, path, networks, self.timeout)
        for note in (*found.notes, f"{found.answer}: {found.reason}"):
            say(f"note: {note}")
        sys.stdout.write(found.text)
        return Exit.HELD

    def _asked(self) -> str:
        names = [name for name, option in self.options() if option.group == "capability"]
        asked = [name for name in names if getattr(self, name)]
        if len(asked) != 1 or self.query is not None or self.network or self.solver is not None:
            raise refuse(
                USAGE,
                "`supports` prints one capability",
                help=f"name one: --{', --'.join(name.replace('_', '-') for name in names)}",
            )
        return asked[0].replace("_", "-")

    def _networks(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for text in self.network:
            name, equals, file = text.partition("=")
            if not (name and equals and file) or name in found:
                what = "names a network twice" if name in found else "is not NAME=FILE"
                raise refuse(USAGE, f"--network {text} {what}", help="--network f=f.onnx")
            found[name] = Path(file)
        return found
