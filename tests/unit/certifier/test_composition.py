"""Chain proofs of `kcdsl verify --chain`: where blocks are cut, and which links are cached."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kcdsl.model.lowering import block_graph
from kcdsl.route.catalogue import Execution
from kcdsl.route.goals import goals
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence
from kcdsl.verdict.outcome import CaseOutcome, GoalOutcome, LinkOutcome
from kcdsl_backends.attack.runs import Attack
from kcdsl_backends.certifier import cache as cache_module
from kcdsl_backends.certifier.backend import BACKEND
from kcdsl_backends.certifier.bounds import CaseBound
from kcdsl_backends.certifier.cache import Cache, decode, encode
from kcdsl_backends.certifier.composition import CompositionTask, StageAttackTask
from kcdsl_backends.certifier.decision import verdict_of
from kcdsl_backends.certifier.stages import (
    BoundedStage,
    Interface,
    StageOutput,
    named,
    partitions,
    prefix,
    rounded,
    stages_of,
)
from kcdsl_backends.certifier.worker import WorkerContext
from kcdsl_backends.drift.boxes import Box
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.chain import refuse_other
from kcdsl_certs.recheck.graphs.graph import parse_array, parse_block
from kcdsl_certs.recheck.graphs.strict_json import Reader
from tests.support.chains import chained, small
from tests.support.small_models import write_contract, write_model

MODEL = "forall x in points(all): norm_inf(drift(model, x)) <= 0.1"
BALL = "forall x in ball(all, 0.001): norm_inf(drift(layer_1, x)) <= 1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model of two layers and two short prompts."""
    write_model(tmp_path, layers=2, prompts=("abc", "d"))
    return tmp_path


Decide = Callable[..., tuple[GoalOutcome, ...]]


@pytest.fixture
def decide(folder: Path) -> Decide:
    """Return a function that decides requirements by chains with the cache in `folder/cache`."""

    def run(*requirements: str, **more: Any) -> tuple[GoalOutcome, ...]:
        program = write_contract(folder, *requirements)
        execution = Execution(jobs=1, cache=folder / "cache")
        more.setdefault("chain", True)
        more.setdefault("execution", execution)
        return BACKEND.decide(program, folder, goals(program), **more)

    return run


# --- where blocks fall apart ----------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "block", "names"),
    [
        ("llama", "model", ["model[0]", "layer_0", "layer_1", "model[3]"]),
        ("llama", "layer_0", ["layer_0[0]", "layer_0[1]"]),
        ("llama", "attn_0", ["attn_0[0]"]),
        ("llama", "mlp_1", ["mlp_1[0]"]),
        ("llama", "norm_0", ["norm_0[0]"]),
        ("llama", "head", ["head[0]"]),
        ("bert", "model", ["model[0]", "layer_0", "layer_1"]),
        ("bert", "layer_1", ["attn_1", "layer_1[1]"]),
        ("plain", "model", ["model[0]", "model[1]", "model[2]"]),
    ],
)
def test_blocks_are_cut_into_links(kind: str, block: str, names: list[str], tmp_path: Path) -> None:
    model, _ = small(tmp_path, kind)
    graph = block_graph(model, block, 3, (1, 5, 2) if block == "model" else None)
    links = stages_of(model, graph)
    assert [link.block for link in links] == names
    counts = []
    for some in partitions(graph, links):
        refuse_other(parsed(graph), [parsed(link) for link in some])
        assert named(graph, links, [link.block for link in some[:2]]) == some
        counts.append(len(some))
    assert counts == {1: [1], 2: [2], 3: [3, 2], 4: [4, 2]}[len(links)]
    parts = [parsed(link) for link in links]
    if len(parts) > 1:
        for wrong in (parts[::-1], parts[:-1], parts[1:], [*parts, parts[-1]]):
            with pytest.raises(Rejected, match="chain/join"):
                refuse_other(parsed(graph), wrong)
    beginning = prefix(graph, links[0].output)
    refuse_other(parsed(beginning), parts[:1])


def parsed(graph: Any) -> Any:
    from kcdsl_backends.certifier.statements.proof import encode_array

    arrays = {key: encode_array(value) for key, value in graph.constants.items()}
    record = Reader(json.loads(json.dumps({"graph": graph.to_json()})), "graph")
    constants = {key: parse_array(value, key) for key, value in arrays.items()}
    return parse_block(graph.digest, record, constants)


@pytest.mark.full
def test_block_that_cannot_be_cut_is_inconclusive(decide: Decide) -> None:
    (found,) = decide("forall x in points(all): norm_inf(drift(attn_0, x)) <= 1")
    assert found.verdict == Inconclusive("p0: block 'attn_0' does not fall apart into stages")
    assert found.proof is None


def test_regions_without_chain_support_are_inconclusive(tmp_path: Path) -> None:
    """Sequences of any length, and weight balls: no chain supports them."""
    made = chained(tmp_path, clause=1)
    several = replace(made.case, longest=4)
    moving = replace(made.goal, weights=Fraction(1, 1024))
    for task in (CompositionTask(made.goal, several), CompositionTask(moving, made.case)):
        found, _ = task.run(made.context)
        assert found.contents is None
        assert found.bounded.outcome.bound == math.inf
        assert found.bounded.outcome.reason is not None
        assert found.bounded.outcome.reason.startswith("stages ")


# --- goals ----------------------------------------------------------------------------------------


@pytest.mark.full
def test_chains_decide_goals(decide: Decide) -> None:
    flip = "forall x in points(all): no_flip(model, x, 1)"
    found = decide(MODEL, BALL, flip)
    for one in found:
        assert one.verdict == Held(), one
        assert one.confirmed
        document = json.loads(one.proof or b"")
        assert document["schema"] == "kcdsl.chain-proof/3"
        assert [case["name"] for case in document["cases"]] == ["p0", "p1"]
        for case in one.cases:
            assert case.links[-1].bound == case.bound
    shown = found[0].cases[0].links
    assert [link.name for link in shown] == ["model[0]", "layer_0", "layer_1", "model[3]"]
    assert all(link.attack is not None and link.attack <= link.bound for link in shown)
    assert shown[-1].attack == found[0].cases[0].attack
    assert found[2].cases[0].stable


@pytest.mark.full
def test_proofs_without_chains_are_unchanged(decide: Decide) -> None:
    one, two = decide(MODEL, chain=False, attacks=False), decide(MODEL, attacks=False)
    document = json.loads(one[0].proof or b"")
    assert document["schema"] == "kcdsl.interval-proof/2"
    assert set(document["cases"][0]) <= {
        "name", "graph", "region", "claim", "witness", "domain", "passes",
    }  # fmt: skip
    assert one[0].cases[0].links == ()
    assert two[0].cases[0].links != ()


@pytest.mark.full
def test_unreachable_limit_stays_inconclusive(decide: Decide) -> None:
    (found,) = decide(MODEL.replace("0.1", "0.0001"), attacks=False)
    assert isinstance(found.verdict, Inconclusive)
    assert 0.0001 < found.bound < 0.001


@pytest.mark.full
def test_ellipsoids_and_fewer_links_are_tried_until_the_goal_is_decided(decide: Decide) -> None:
    """Ellipsoids are tighter than boxes, and fewer links than many.

    Attained drifts are listed beside the final links.
    """
    names, bounds, handed = [], [], []
    for limit in ("0.1", "0.0009", "0.0004"):
        (found,) = decide(MODEL.replace("0.1", limit), attacks=limit == "0.0004")
        document = json.loads(found.proof or b"")
        handed.append(
            sum("ellipsoids" in link["region"] for link in document["cases"][0]["links"][1:])
        )
        assert (found.verdict, found.confirmed) == (Held(), True)
        names.append([link.name for link in found.cases[0].links])
        bounds.append(found.bound)
    worst = max(found.cases, key=lambda case: case.bound)
    assert all(link.attack is not None for link in worst.links[:-1])
    short = ["model[0]", "layer_0", "layer_1", "model[3]"]
    assert names == [short, short, ["model[0]..layer_0", "layer_1..model[3]"]]
    assert bounds[2] <= 0.0004 < bounds[1] <= 0.0009 < bounds[0]
    assert handed == [0, 2, 1]


@pytest.mark.full
def test_run_above_a_link_bound_is_not_evidence(decide: Decide) -> None:
    links = (LinkOutcome("layer_0", 0.5, 0.6), LinkOutcome("model[3]", 1.0, 0.2))
    (found,) = decide(MODEL, attacks=False)
    case = CaseOutcome("p0", 3, 0.01, attack=0.001, links=links)
    verdict = verdict_of(found.goal, [case], None)
    assert isinstance(verdict, InvalidEvidence)
    assert "behind layer_0" in verdict.reason


@pytest.mark.full
def test_unfinished_attack_of_a_link_is_tolerated(
    decide: Decide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(self: Any, context: WorkerContext) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(StageAttackTask, "run", exhausted)
    (found,) = decide(MODEL)
    assert found.verdict == Held()
    assert found.cases[0].links[0].attack is None
    assert any("no runs beside the stages" in note for note in found.notes)


# --- what is remembered ---------------------------------------------------------------------------


@pytest.mark.full
def test_second_run_reuses_every_link(decide: Decide) -> None:
    first, second = decide(MODEL, BALL), decide(MODEL, BALL)
    assert [one.cached for one in first] == [0, 0]
    assert [one.cached for one in second] == [2, 2]
    assert [one.proof for one in first] == [one.proof for one in second]
    assert all(link.cached for one in second for case in one.cases for link in case.links)


def alter(folder: Path, name: str, by: float) -> None:
    """Make a training step that changes one tensor only."""
    path = folder / "model.safetensors"
    state = load_file(path)
    state[name] = state[name] * (1 + by)
    save_file(state, path)


def known(found: GoalOutcome) -> list[bool]:
    return [link.cached for link in found.cases[0].links]


@pytest.mark.full
def test_links_before_a_changed_weight_are_cached(decide: Decide, folder: Path) -> None:
    decide(MODEL, attacks=False)
    alter(folder, "model.layers.1.mlp.up_proj.weight", 0.01)
    (found,) = decide(MODEL, attacks=False)
    assert known(found) == [True, True, False, False]
    assert found.verdict == Held()


@pytest.mark.full
def test_links_after_a_small_change_are_cached(decide: Decide, folder: Path) -> None:
    """If a step moves a state by less than the margin of an interface, later links are reused.

    Their claims are checked as always.
    """
    decide(BALL, attacks=False)
    alter(folder, "model.layers.1.self_attn.o_proj.weight", 1e-6)
    (found,) = decide(BALL, attacks=False)
    assert known(found) == [False, True]
    assert (found.verdict, found.confirmed) == (Held(), True)
    alter(folder, "model.layers.1.self_attn.o_proj.weight", 0.1)
    (found,) = decide(BALL, attacks=False)
    assert known(found) == [False, False]
    assert (found.verdict, found.confirmed) == (Held(), True)


@pytest.mark.full
def test_cached_interface_is_dropped_if_it_prevents_a_proof(decide: Decide, folder: Path) -> None:
    (first,) = decide(BALL, attacks=False)
    case = first.cases[0]
    widened(folder, case.links[0].bound)
    (second,) = decide(BALL, attacks=False)
    assert case.bound < second.cases[0].bound
    limit = BALL.replace("<= 1", f"<= {first.bound * 1.001!r}")
    (third,) = decide(limit, attacks=False)
    assert (third.verdict, third.confirmed) == (Held(), True)


def widened(folder: Path, by: float) -> None:
    """Widen the drift of every cached interface, as a run with other weights may."""

    def wider(value: Any) -> Any:
        if not isinstance(value, Interface) or value.drift is None:
            return None
        return replace(value, drift=Box(value.drift.lo - by, value.drift.hi + by))

    assert rewritten(folder, wider) > 0


def rewritten(folder: Path, change: Callable[[Any], Any]) -> int:
    """Change entries with a valid digest, as a forger would; return their number."""
    count = 0
    stages = BoundedStage, StageOutput, Interface, Box
    kinds = (CaseBound, CaseOutcome, LinkOutcome, Attack, *stages)
    for path in sorted((folder / "cache").glob("*/*.json")):
        entry = json.loads(path.read_bytes())
        changed = change(decode(entry["value"], kinds))
        if changed is not None:
            assert Cache(folder / "cache").write(entry["key"], encode(changed))
            count += 1
    return count


@pytest.mark.full
def test_forged_entries_are_rechecked(decide: Decide, folder: Path) -> None:
    """Narrower outputs, and regions that match: the checker derives the true ones."""
    decide(BALL, attacks=False)

    def narrower(value: Any) -> Any:
        match value:
            case BoundedStage(claim, StageOutput(train, Box(low, high)), stated):
                return BoundedStage(claim, StageOutput(train, Box(low * 0.5, high * 0.5)), stated)
            case _:
                return None

    assert rewritten(folder, narrower) == 2
    (found,) = decide(BALL, attacks=False)
    assert isinstance(found.verdict, Inconclusive)
    assert "chain/output" in found.verdict.reason
    assert found.proof is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["name", "graph", "region"])
def test_entries_cannot_change_the_subject_of_a_link(
    decide: Decide, folder: Path, place: str
) -> None:
    (first,) = decide(BALL, attacks=False)
    assert first.proof is not None
    told = json.loads(first.proof)["cases"][0][place]

    def subject(value: Any) -> Any:
        match value:
            case BoundedStage(claim, output, stated):
                return BoundedStage(claim, output, {**stated, place: told})
            case (CaseBound() as bounded, float(claim), dict(stated)):
                return bounded, claim, {**stated, place: told}
            case _:
                return None

    assert rewritten(folder, subject) == 4
    (found,) = decide(BALL, attacks=False)
    assert found.verdict == Held()
    assert found.proof == first.proof
    assert known(found) == [False, False]
    assert any("damaged" in note for note in found.notes)


@pytest.mark.full
def test_final_bound_is_read_from_the_proof(decide: Decide, folder: Path) -> None:
    """A lower bound beside a valid proof of another one would appear in the result."""
    (first,) = decide(BALL, attacks=False)

    def lower(value: Any) -> Any:
        match value:
            case (CaseBound(outcome) as bounded, claim, stated):
                return replace(bounded, outcome=replace(outcome, bound=0.0)), claim, stated
            case _:
                return None

    assert rewritten(folder, lower) == 2
    (found,) = decide(BALL, attacks=False)
    assert (found.verdict, found.bound) == (Held(), first.bound)
    assert first.bound > 0
    assert any("damaged" in note for note in found.notes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [1, "text", (), (1.0, 2.0), {"a": 1}])
def test_malformed_link_entries_are_damaged(decide: Decide, folder: Path, value: Any) -> None:
    (first,) = decide(BALL, attacks=False)
    rewritten(folder, lambda kept: value if isinstance(kept, BoundedStage | Interface) else None)
    (second,) = decide(BALL, attacks=False)
    assert second.verdict == Held()
    assert second.proof == first.proof
    assert any("damaged" in note for note in second.notes)


@pytest.mark.full
def test_other_program_has_no_cached_links(decide: Decide, monkeypatch: pytest.MonkeyPatch) -> None:
    decide(BALL, attacks=False)
    for module in ("kcdsl_backends.certifier.backend", "kcdsl_backends.certifier.worker"):
        monkeypatch.setattr(f"{module}.rules_version", lambda: "another")
    assert cache_module.rules_version() != "another"
    (found,) = decide(BALL, attacks=False)
    assert known(found) == [False, False]


# --- interfaces -----------------------------------------------------------------------------------


def test_interfaces_contain_their_source_values() -> None:
    generator = torch.Generator().manual_seed(1)
    for scale in (1.0, 2.0**-60, 2.0**40):
        low = torch.randn(3, 5, generator=generator, dtype=torch.float64) * scale
        wide = torch.rand(3, 5, generator=generator, dtype=torch.float64) ** 9 * scale
        box = Box(low, torch.maximum(low + wide, low))
        found = rounded(box)
        assert bool(((found.lo <= box.lo) & (box.hi <= found.hi)).all())
        width, before = found.hi - found.lo, box.hi - box.lo
        assert bool((width <= before * 1.2501 + 2.0**-1070 + low.abs() * 2.0**-50).all())
        output = StageOutput(box, box)
        entering = output.interface()
        assert output.fits(entering)
        assert entering.drift is not None
        shrunk = replace(entering, drift=Box(entering.drift.lo, entering.drift.hi - wide - scale))
        assert not output.fits(shrunk)
        assert not output.fits(replace(entering, radius=entering.radius * 0.5))
        assert not output.fits(Interface(None, entering.radius))
        assert not output.fits(replace(entering, radius=entering.radius[:1]))
        read = replace(output, readings=(wide, wide * 0))
        again = read.interface()
        assert read.fits(again)
        assert again.readings is not None
        assert output.fits(again)
        assert not read.fits(entering)
        assert len({entering.digest, again.digest}) == 2
        assert not read.fits(replace(again, readings=(again.readings[0] * 0.5, wide)))
        assert not read.fits(replace(again, readings=(wide[:1], wide)))
    point = Box(torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64))
    assert rounded(point).is_point
