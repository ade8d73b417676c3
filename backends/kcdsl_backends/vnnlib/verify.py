"""The commands of chapter 5 of the VNN-LIB standard: verify a query, list capabilities."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.files import Artefacts
from kcdsl.model.onnx.files import OnnxFile, newest_opset, read_onnx
from kcdsl_backends.vnnlib.evaluation import Point
from kcdsl_backends.vnnlib.network import operators
from kcdsl_backends.vnnlib.problem import QueryProblem, query_problem, refuse_other_graph
from kcdsl_backends.vnnlib.query import Query, decimal, read_query
from kcdsl_backends.vnnlib.search import decide

OLDEST_OPSET = 8


@dataclass(frozen=True, slots=True)
class QueryAnswer:
    """The answer to a query, the lines of an assignment, the reason, and notes for the user."""

    answer: str
    assignment: tuple[str, ...]
    reason: str
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Return the text for standard output."""
        return "".join(f"{line}\n" for line in (self.answer, *self.assignment))


def verify_query(path: Path, networks: Mapping[str, Path], seconds: float) -> QueryAnswer:
    """Decide a query about networks. Refuse files that cannot be used."""
    started = time.monotonic()
    problem = read_problem(path, networks)
    found = decide(problem, seconds - (time.monotonic() - started))
    first = problem.query.version == (1, 0)
    answer = "timeout" if first and found.answer == "timed-out" else found.answer
    assignment = () if found.point is None else assigned(problem, found.point)
    return QueryAnswer(answer, assignment, found.reason, notes_of(problem))


def read_problem(path: Path, networks: Mapping[str, Path]) -> QueryProblem:
    """Read a query and its networks."""
    query = read_query(path)
    return query_problem(query, _files(query, networks))


def _files(query: Query, given: Mapping[str, Path]) -> dict[str, OnnxFile]:
    """Return the file of every network. Refuse missing or surplus files and other graphs."""
    declared = {n.name: n for n in query.networks}
    own = [n for n in query.networks if n.relation is None or n.relation[0] != "equal-to"]
    if query.version == (1, 0) and len(given) == 1:
        given = {"N": next(iter(given.values()))}
    for name in given:
        network = declared.get(name)
        if network is None:
            raise refuse(
                codes.VNNLIB_NETWORK,
                f"the query declares no network {name!r}",
                help=f"it declares {', '.join(declared)}",
            )
        if network not in own:
            assert network.relation is not None
            raise refuse(
                codes.VNNLIB_NETWORK,
                f"the network {name!r} is equal to {network.relation[1]!r}",
                help="leave its file out",
            )
    absent = [n.name for n in own if n.name not in given]
    if absent:
        raise refuse(
            codes.VNNLIB_NETWORK,
            f"the network {absent[0]!r} has no file",
            help=f"name it: --network {absent[0]}=FILE.onnx",
        )
    read: dict[Path, OnnxFile] = {}
    files: dict[str, OnnxFile] = {}
    for network in query.networks:
        if network in own:
            path = given[network.name]
            if path not in read:
                beside = Artefacts.of(path.parent).admitted  # refuse links out of the folder
                read[path] = read_onnx(path, beside, oldest=OLDEST_OPSET, mixed=True)
            files[network.name] = read[path]
        else:
            assert network.relation is not None
            files[network.name] = files[network.relation[1]]
        if network.relation is not None:
            refuse_other_graph(network, files[network.relation[1]], files[network.name])
    return files


def notes_of(problem: QueryProblem) -> tuple[str, ...]:
    """Return the notes that apply to any answer to the query."""
    notes = []
    types = {v.type for v in problem.query.variables} - {"real"}
    if types:
        named = ", ".join(sorted(types))
        notes.append(f"the answer is about real numbers; the query declares {named}")
    if problem.contradictory:
        notes.append("no input satisfies the assertions about the inputs: the query is vacuous")
    if any(not region.bounded for region in problem.regions):
        notes.append("an input has no bound; only a small network can be decided")
    return tuple(notes)


def assigned(problem: QueryProblem, point: Point) -> tuple[str, ...]:
    """Return the lines of an assignment: inputs as exact decimals, other variables in float64."""
    lines: list[str] = []
    first = problem.query.version == (1, 0)
    for variable in problem.query.variables:
        tensor = problem.tensors[variable.name]
        if variable.kind == "input":
            held = tensor.terms[0].indices if tensor.size else ()
            values = [_text(point.x[i], variable.type) for i in held]
        else:
            values = [repr(float(v)) for v in point.near(tensor)]
        if first:
            lines += [f"({variable.name}_{i} {v})" for i, v in enumerate(values)]
            continue
        shape = ",".join(map(str, variable.shape))
        lines += [f"{variable.name} {variable.type} [{shape}]", *values]
    if first:
        lines = [f"{'(' if i == 0 else ' '}{line}" for i, line in enumerate(lines)]
        lines[-1] += ")"
    return tuple(lines)


def _text(value: Fraction, type: str) -> str:
    found = decimal(value)
    assert found is not None
    return found.removesuffix(".0") if type.startswith(("int", "uint", "bool")) else found


# --- supports -------------------------------------------------------------------------------------


def capability(name: str) -> str:
    """Return the output of the command `supports` for a capability."""
    return "".join(f"{v}\n" for v in _CAPABLE[name])


_CAPABLE: Mapping[str, tuple[str, ...]] = {
    "onnx-opset-versions": (str(OLDEST_OPSET), str(newest_opset())),
    "onnx-element-types": ("real",),
    "onnx-operators": tuple(operators()),
    "vnnlib-versions": ("1.0", "2.0"),
    "hidden-node-theories": ("NH", "H"),
    "multiple-input-output-theories": ("SIO", "MIO"),
    "multiple-network-theories": ("SNET", "MENET", "MINET", "MNET"),
    "multiple-node-comparison-theories": ("SNC", "MNC"),
    "arithmetic-complexity-theories": ("BND", "OUTC", "LIN", "POLY"),
    "optimised-disjunctive-reasoning": ("false",),
    "serialise-assignments": ("false",),
}
