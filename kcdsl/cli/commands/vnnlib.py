"""`kcdsl vnnlib`: the command line of solvers of VNN-LIB queries."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from kcdsl.cli.common import Command, argument, choice, switch, value, values
from kcdsl.cli.common.options import seconds
from kcdsl.cli.common.output import say
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import USAGE
from kcdsl.exits import Exit

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
    query: str | None = argument("QUERY", "the query of `verify`, of version 2.0 or 1.0", "?")
    network: tuple[str, ...] = values("NAME=FILE", "the ONNX file of a network of the query")
    timeout: float = value("SECONDS", "how long `verify` may take", _DAY, read=seconds)
    solver: str | None = value(
        "COMMAND", "ask this program instead, which runs; what it answers is tested"
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
