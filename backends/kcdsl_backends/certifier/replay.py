"""Run a counterexample again: check its subject, simulate both kernels, compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import COUNTEREXAMPLE_ELSEWHERE, COUNTEREXAMPLE_RUN
from kcdsl.diagnostics.model import at
from kcdsl.ir.canonical import digest
from kcdsl.ir.terms import Program
from kcdsl.model.architecture import Model
from kcdsl.model.files import Artefacts
from kcdsl.model.loader import load_model
from kcdsl.model.presets import resolve
from kcdsl.route.goals import Goal, goals
from kcdsl.verdict.counterexample import Replayed
from kcdsl_backends.attack.runs import (
    Attack,
    InvalidRecord,
    RunPair,
    attack_of,
    pack,
    run_of,
    unpack,
)
from kcdsl_backends.certifier.statements.cases import Case, cases_of, slice_rows
from kcdsl_backends.certifier.statements.problems import BlockProblem, ProblemFactory
from kcdsl_backends.process import one_thread

SAME_ACTIVATIONS = 2.0**-16
"""Tolerance for float32 activations of two machines, relative to the largest."""
_NOT_ADMITTED = "the run of the counterexample is not admitted: "
SAME_RUN = 2.0**-36
"""Tolerance for float64 simulations on two machines, relative to the outputs."""


def case_record(
    problem: BlockProblem, factory: ProblemFactory, goal: Goal, case: Case
) -> dict[str, Any]:
    """Return the fields of a counterexample about its case, without the run."""
    case = case.at_its_length
    boxed = case.centre is not None and goal.region.kind.value != "points"
    return {
        "case": {"name": case.name, "tokens": list(case.tokens)},
        "checkpoint": {"sha256": weights_named(factory.model)},
        "graph": {"sha256": problem.graph.digest},
        "numerics": {"train": factory.train.to_json(), "infer": factory.infer.to_json()},
        "region": {
            "kind": goal.region.kind.value,
            "centre": pack(case.centre, "float64") if boxed and case.centre is not None else None,
            "radius": pack(case.radius, "float64") if boxed else None,
        },
    }


def weights_named(model: Model) -> str:
    """Return the digest (hex) of the weights of a counterexample: the checkpoint's, combined with
    that of the inference kernel if it has its own."""
    if model.served is None:
        return model.checkpoint.sha256
    return sha256(f"{model.checkpoint.sha256} {model.served.digest}".encode()).hexdigest()


def replay(
    program: Program,
    base: Path,
    document: Mapping[str, Any],
    *,
    device: str = "cpu",
    checkpoint: str | None = None,
) -> Replayed:
    """Simulate the run of a counterexample, as `read_counterexample` returned it.

    Args:
        base: folder of the contract.
        device: "cpu" or "cuda".
        checkpoint: weights that replace those of the contract; a configuration that the contract
            does not name is searched in their folder.

    Raises:
        Refusal: the document is about another contract, model, block, kernel pair or input, or its
            run is not admitted or does not reproduce the stated values.
    """
    _same("contract.sha256", document["contract"]["sha256"], digest(program))
    for name, here in (("name", program.name), ("version", program.version)):
        _same(f"contract.{name}", document["contract"][name], here)
    goal = _goal(program, document)
    named, files = program.model, Artefacts.of(base)
    if checkpoint is not None:
        named = replace(named, checkpoint=str(Path(checkpoint).absolute()))
        files.allow(Path(checkpoint).parent)
    model = load_model(named, files, by_block=True)
    _same("checkpoint.sha256", document["checkpoint"]["sha256"], weights_named(model))
    factory = ProblemFactory(
        model, resolve(program.train), resolve(program.infer), torch.device(device)
    )
    for side, numerics in (("train", factory.train), ("infer", factory.infer)):
        _same(f"numerics.{side}", document["numerics"][side], numerics.to_json())
    with at(goal.span):
        rows = slice_rows(program, model, goal.region.slice)
        cases = {case.name: case for case in cases_of(factory, goal, rows)} if rows else {}
    case = cases.get(document["case"]["name"])
    if case is None:
        raise _elsewhere("case.name", document["case"]["name"], "no case of the clause")
    _same("case.tokens", document["case"]["tokens"], list(case.tokens))
    case = case.at_its_length
    problem = factory.problem(goal.block, case.tokens)
    _same("graph.sha256", document["graph"]["sha256"], problem.graph.digest)
    return _run(problem, goal, case, document)


def _goal(program: Program, document: Mapping[str, Any]) -> Goal:
    known = {goal.clause.id: goal for goal in goals(program)}
    goal = known.get(document["clause"])
    if goal is None:
        raise _elsewhere("clause", document["clause"], "no clause about every input of a region")
    _same("block", document["block"], goal.block)
    _same("functional", document["functional"], goal.functional)
    _same("limit", document["limit"], {"op": goal.op, "value": str(goal.threshold)})
    _same("region.kind", document["region"]["kind"], goal.region.kind.value)
    return goal


def _run(problem: BlockProblem, goal: Goal, case: Case, document: Mapping[str, Any]) -> Replayed:
    train, infer = problem.simulators()
    try:
        run = run_of(document, {"train": train, "infer": infer})
        moved = _region_difference(run, case, document["region"])
    except InvalidRecord as error:
        raise _refused(_NOT_ADMITTED + str(error)) from error
    with one_thread():
        found = attack_of(run, train, infer, goal.functional)
    if found is None:
        raise _refused(_NOT_ADMITTED + "a value leaves its format, or is not a number")
    return Replayed(
        value=found.value,
        row=found.row,
        column=found.column,
        train=found.train_value,
        infer=found.infer_value,
        exact=_is_exact(found, document["attained"]),
        refutes=goal.refuted_by(found.value),
        symbols=sum(
            int((value != 0).sum()) for side in run.symbols.values() for value in side.values()
        ),
        ordered=sum(len(side) for side in run.orders.values()),
        moved=moved,
    )


def _region_difference(run: RunPair, case: Case, region: Mapping[str, Any]) -> float:
    """Return the largest difference between the region of a document and that of its case.

    Raises:
        InvalidRecord: the input is outside of the region, or the region is not that of the case.
    """
    packed = (region["centre"], region["radius"])
    if case.centre is None or run.x is None:
        if run.x is not None or packed != (None, None):
            raise InvalidRecord("token ids have no region but themselves")
        return 0.0
    if region["kind"] == "points":
        if packed != (None, None):
            raise InvalidRecord("a point has no radius")
        return _difference(run.x, case.centre, "the input")
    if None in packed:
        raise InvalidRecord("the region has no centre or no radius")
    shape = tuple(case.centre.shape)
    centre = unpack(region["centre"], shape, "the centre of the region").to(run.x.device)
    radius = unpack(region["radius"], tuple(case.radius.shape), "the radius of the region")
    radius = radius.to(run.x.device)
    if region["kind"] == "ball" and not torch.equal(radius, case.radius):
        raise InvalidRecord("the radius is not that of the clause")
    if not bool(((run.x - centre).abs() <= radius).all()):
        raise InvalidRecord("the input lies outside of the region")
    return max(
        _difference(centre, case.centre, "the centre of the region"),
        _difference(radius, case.radius, "the radius of the region"),
    )


def _difference(one: Tensor, two: Tensor, what: str) -> float:
    """Return the largest difference. Raises InvalidRecord beyond the tolerance for machines."""
    apart = float((one - two).abs().amax())
    if not apart <= SAME_ACTIVATIONS * float(two.abs().amax()):
        raise InvalidRecord(f"{what} is {apart:.3g} away from that of the case")
    return apart


def _is_exact(found: Attack, claimed: Mapping[str, Any]) -> bool:
    """Return whether a run has exactly the stated values; refuse differences beyond SAME_RUN."""
    size = SAME_RUN * max(abs(found.train_value), abs(found.infer_value), found.value)
    pairs = {"value": found.value, "train": found.train_value, "infer": found.infer_value}
    for name, here in pairs.items():
        there = float.fromhex(claimed[name])
        if not abs(here - there) <= size:
            raise _refused(
                f"the run does not attain what the counterexample says: `{name}` is {here!r} here, "
                f"{there!r} there"
            )
    for name, place in (("row", list(found.row)), ("column", found.column)):
        if claimed[name] != place:
            raise _refused(f"the largest drift is in {name} {place}, not in {claimed[name]}")
    return all(float.fromhex(claimed[name]) == here for name, here in pairs.items())


def _same(field: str, there: object, here: object) -> None:
    if there != here or type(there) is not type(here):
        raise _elsewhere(field, there, here)


def _elsewhere(field: str, there: object, here: object) -> Refusal:
    return refuse(
        COUNTEREXAMPLE_ELSEWHERE,
        f"the counterexample is about something else: its `{field}` is {_short(there)}, and here is"
        f" {_short(here)}",
        help="give the contract that was verified: --contract; what has changed since then needs a"
        " new `kcdsl verify`",
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _refused(why: str) -> Refusal:
    return refuse(COUNTEREXAMPLE_RUN, why, help="verify the contract again")
