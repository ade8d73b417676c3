"""Runs with a cache: equal outcomes, recomputation of changed parts only, rechecked entries."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kcdsl.ir.terms import Program
from kcdsl.model.loader import load_model
from kcdsl.model.numerics import (
    Activations,
    KvCache,
    MatrixUnit,
    Override,
    TensorCore,
    Weights,
)
from kcdsl.model.presets import resolve
from kcdsl.route.catalogue import Execution
from kcdsl.route.goals import goals
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Violated
from kcdsl.verdict.outcome import CaseOutcome, GoalOutcome
from kcdsl_backends.attack.runs import Attack, pack, unpack
from kcdsl_backends.certifier import cache as cache_module
from kcdsl_backends.certifier import tasks, worker
from kcdsl_backends.certifier.backend import BACKEND
from kcdsl_backends.certifier.bounds import CaseBound
from kcdsl_backends.certifier.cache import Cache, decode, encode, key_of
from kcdsl_backends.certifier.statements.cases import Case
from kcdsl_backends.certifier.worker import RunSettings, open_context
from tests.support.small_models import write_contract, write_model

HELD = "forall x in points(all): norm_inf(drift(%s, x)) <= 0.01"
OPEN = "forall x in points(all): norm_inf(drift(attn_0, x)) <= 1e-9"
FLIP = "forall x in points(all): no_flip(head, x)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model of two layers and two short prompts."""
    write_model(tmp_path, layers=2, prompts=("abc", "d"))
    return tmp_path


Decide = Callable[..., tuple[GoalOutcome, ...]]


@pytest.fixture
def decide(folder: Path) -> Decide:
    """Return a function that decides requirements with the cache in `folder/cache`."""

    def run(*requirements: str, cache: bool = True, **more: Any) -> tuple[GoalOutcome, ...]:
        program = write_contract(folder, *requirements)
        return outcomes(program, folder, folder / "cache" if cache else None, **more)

    return run


def outcomes(
    program: Program, folder: Path, cache: Path | None, **more: Any
) -> tuple[GoalOutcome, ...]:
    execution = Execution(jobs=1, cache=cache)
    return BACKEND.decide(program, folder, goals(program), execution=execution, **more)


def same(found: Sequence[GoalOutcome]) -> list[GoalOutcome]:
    """Return outcomes without seconds, memory and cache statistics."""
    return [replace(one, seconds=0.0, peak_bytes=0, cached=0) for one in found]


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("cache/*/*.json"))


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the value of an entry with a valid digest, as a forger would."""
    entry = json.loads(path.read_bytes())
    kinds = (CaseBound, CaseOutcome, Attack)
    assert Cache(path.parent.parent).write(
        entry["key"], encode(change(decode(entry["value"], kinds)))
    )


@pytest.mark.full
def test_second_run_reuses_everything(decide: Decide, folder: Path) -> None:
    hull = "forall x in hull(all, 0.01): span(drift(mlp_1, x)) <= 9"
    wanted = (HELD % "attn_0", OPEN, FLIP, hull)
    without = decide(*wanted, cache=False)
    assert not entries(folder)
    first = decide(*wanted)
    assert [one.cached for one in first] == [0, 0, 0, 0]
    second = decide(*wanted)
    assert [one.cached for one in second] == [len(one.cases) for one in first]
    assert same(without) == same(first) == same(second)
    assert all(one.confirmed for one in second if one.proof is not None)
    assert isinstance(second[0].verdict, Held)
    assert isinstance(second[1].verdict, Violated)


@pytest.mark.full
def test_cached_results_are_not_recomputed(decide: Decide, monkeypatch: pytest.MonkeyPatch) -> None:
    first = decide(HELD % "attn_0", OPEN)

    def never(*arguments: Any) -> Any:
        raise AssertionError("computed again")

    monkeypatch.setattr(tasks, "bound_case", never)
    monkeypatch.setattr(tasks, "attack_case", never)
    assert same(decide(HELD % "attn_0", OPEN)) == same(first)


@pytest.mark.full
def test_only_blocks_with_a_changed_tensor_are_verified_again(decide: Decide, folder: Path) -> None:
    """A step that changes the second MLP keeps earlier blocks and the input of the MLP."""
    blocks = ("attn_0", "mlp_0", "attn_1", "mlp_1", "head")
    wanted = [HELD.replace("0.01", "10") % block for block in blocks]
    decide(*wanted)
    weights = load_file(folder / "model.safetensors")
    (name,) = [key for key in weights if "1.mlp" in key and "down" in key]
    save_file(weights | {name: weights[name] * 1.25}, folder / "model.safetensors")
    second = decide(*wanted)
    assert [one.cached for one in second] == [2, 2, 2, 0, 0]  # the head's inputs changed
    assert same(second) == same(decide(*wanted, cache=False))
    assert all(one.confirmed for one in second)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("points(all)", "ball(all, 1e-3)"),
        ("norm_inf", "norm_2"),
        ("attn_0", "attn_1"),
        ("<= 0.01", "<= 0.02"),
        ("<= 0.01", "< 0.01"),
        ("norm_inf(drift(attn_0, x)) <= 0.01", "no_flip(attn_0, x)"),
    ],
)
def test_other_goal_has_another_key(decide: Decide, before: str, after: str) -> None:
    decide(HELD % "attn_0", attacks=False)
    (again,) = decide((HELD % "attn_0").replace(before, after), attacks=False)
    assert again.cached == 0


@pytest.mark.full
def test_tokens_numerics_rules_and_tables_are_in_the_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cached(program: Program) -> int:
        (one,) = outcomes(program, folder, folder / "cache", attacks=False)
        return one.cached

    program = write_contract(folder, HELD % "attn_0")
    assert cached(program) == 0
    assert cached(program) == 2
    assert cached(write_contract(folder, HELD % "attn_0", compute="float16")) == 0
    rows = [{"id": "p0", "text": "abc"}, {"id": "p1", "text": "e"}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cached(program) == 1
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 500.0}))
    assert cached(program) == 1  # a single token is at position 0, which theta does not affect
    version = cache_module.rules_version
    monkeypatch.setattr(worker, "rules_version", lambda: "0" * 64)
    monkeypatch.setattr("kcdsl_backends.certifier.backend.rules_version", lambda: "0" * 64)
    assert cached(program) == 0
    assert version() != "0" * 64


@pytest.mark.full
def test_every_bit_of_a_weight_is_in_the_key(folder: Path) -> None:
    path = folder / "model.safetensors"
    before = load_file(path)
    one, other = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qo")
    assert before[one].shape == before[other].shape == (16, 16)
    before[one][0, 0] = 0.0

    def key(**changed: torch.Tensor) -> str:
        save_file({**before, **changed}, path)
        program = write_contract(folder, HELD % "attn_0")
        (goal,) = goals(program)
        model = load_model(program.model, folder)
        rules = cache_module.rules_version()
        setting = RunSettings(
            program, folder, "cpu", 1, model.checkpoint.sha256, rules, folder / "cache"
        )
        case = Case(
            "p0", (1, 2), torch.zeros(2, 16, dtype=torch.float64), torch.zeros(1, 1).double()
        )
        return tasks.entry_of(open_context(setting, model), "bound", goal, case).key

    def with_first(value: float) -> torch.Tensor:
        changed = before[one].clone()
        changed[0, 0] = value
        return changed

    first = key()
    assert key() == first
    keys = [
        first,
        key(**{one: with_first(-0.0)}),
        key(**{one: with_first(2.0**-149)}),
        key(**{one: before[one].T.contiguous()}),
        key(**{one: before[other], other: before[one]}),
    ]
    assert len(set(keys)) == len(keys)


def test_every_field_of_the_numerics_is_in_the_key() -> None:
    numerics = resolve({"preset": "torch-eager"})
    unit = MatrixUnit(1, 2, 3, 4)
    start = replace(numerics, tensor_core=TensorCore(unit, unit))
    found = [numerics, start, *_changed(start)]
    assert len({key_of(one.to_json()) for one in found}) == len(found)
    assert len(found) > 20


def _changed(record: Any) -> list[Any]:
    """Return a record of data classes with one field after another changed."""
    pairs = {
        "results": (("input", "float32"),),
        "input_scale": (("*", (0.5,)),),
        "input_zero_point": (("*", 3),),
        "least_scale": 0.25,
        "amax_limit": 2.0,
        "batch_amax": 3.0,
        "overrides": (Override("*", Weights("float32", "none"), Activations()),),
        "kv_cache": KvCache("int8", "per_head"),
    }
    found = []
    for part in fields(record):
        value = getattr(record, part.name)
        if is_dataclass(value):
            found += [replace(record, **{part.name: inner}) for inner in _changed(value)]
        else:
            other = pairs.get(part.name, value + 1 if isinstance(value, int) else f"not {value}")
            found.append(replace(record, **{part.name: other}))
    return found


@pytest.mark.full
def test_names_of_requests_are_not_in_the_key(folder: Path) -> None:
    """The same region under another name is reused, and has the new name in result and proof."""
    program = write_contract(folder, HELD % "attn_0")
    outcomes(program, folder, folder / "cache")
    text = (folder / "prompts.jsonl").read_text()
    (folder / "prompts.jsonl").write_text(text.replace('"p0"', '"other"'))
    (one,) = outcomes(program, folder, folder / "cache")
    assert one.cached == 2
    assert [case.name for case in one.cases] == ["other", "p1"]
    assert same([one]) == same(outcomes(program, folder, None))
    assert one.confirmed


@pytest.mark.full
def test_damaged_entries_are_recomputed_and_reported(decide: Decide, folder: Path) -> None:
    first = decide(HELD % "attn_0")
    for path in entries(folder):
        path.write_bytes(path.read_bytes()[:-7])
    (second,) = decide(HELD % "attn_0")
    assert second.cached == 0
    assert second.notes == (*first[0].notes, "3 entries of the cache were damaged and found anew")
    assert same([replace(second, notes=first[0].notes)]) == same(first)
    (third,) = decide(HELD % "attn_0")
    assert (third.cached, third.notes) == (2, first[0].notes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [None, 1, ((1, 2), 3), {"a": 1}, (1, 2, 3), (None, 0.5, None)])
def test_malformed_entries_are_damaged(decide: Decide, folder: Path, value: Any) -> None:
    first = decide(HELD % "attn_0")
    for path in entries(folder):
        rewrite(path, lambda _: value)
    (second,) = decide(HELD % "attn_0")
    assert second.cached == 0
    assert same([replace(second, notes=first[0].notes)]) == same(first)


@pytest.mark.full
def test_forged_lower_bound_is_not_accepted(decide: Decide, folder: Path) -> None:
    """The digest is valid but the checker rejects the bound, so nothing is held."""
    limit = (HELD % "attn_0").replace("0.01", "1e-6")
    (honest,) = decide(limit, attacks=False)
    assert isinstance(honest.verdict, Inconclusive)

    def lower(value: Any) -> Any:
        bounded, _, stated = value
        lowered = replace(bounded, outcome=replace(bounded.outcome, bound=1e-7))
        return lowered, 1e-7, {**stated, "claim": (1e-7).hex()}

    for path in entries(folder):
        rewrite(path, lower)
    (lied,) = decide(limit, attacks=False)
    assert lied.cached == 2
    assert lied.proof is None
    assert isinstance(lied.verdict, Inconclusive)
    assert "does not confirm" in lied.verdict.reason
    (unconfirmed,) = decide(limit, attacks=False, confirm=False)
    assert not unconfirmed.confirmed


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["region", "graph", "name"])
def test_entry_cannot_change_the_subject_of_its_proof(
    decide: Decide, folder: Path, place: str
) -> None:
    """A valid proof of another region passes the checker and proves nothing about the goal."""
    ball = "forall x in ball(all, %s): norm_inf(drift(attn_0, x)) <= %r"
    (narrow,) = decide(ball % ("1e-6", 1.0), attacks=False, cache=False)
    limit = 2 * narrow.bound
    (honest,) = decide(ball % ("0.5", limit), attacks=False)
    assert isinstance(honest.verdict, Inconclusive)
    assert narrow.proof is not None
    told = json.loads(narrow.proof)["cases"]
    proved = {case["region"]["centre"]["shape"][0]: case for case in told}

    def lie(value: Any) -> Any:
        bounded, _, _ = value
        case = proved[bounded.outcome.length]
        stated = {k: v for k, v in case.items() if k not in ("name", "graph", "region")}
        claim = float.fromhex(case["claim"])
        lied = replace(bounded, outcome=replace(bounded.outcome, bound=claim))
        return lied, claim, {**stated, place: case[place]}

    for path in entries(folder):
        rewrite(path, lie)
    (found,) = decide(ball % ("0.5", limit), attacks=False)
    assert isinstance(found.verdict, Inconclusive)
    assert found.cached == 0
    assert "damaged" in found.notes[0]


@pytest.mark.full
def test_bound_that_differs_from_its_proof_is_damage(decide: Decide, folder: Path) -> None:
    """A bound that meets the limit beside a proof of another claim."""
    limit = (HELD % "attn_0").replace("0.01", "1e-6")
    (honest,) = decide(limit, attacks=False)
    for path in entries(folder):
        rewrite(
            path,
            lambda v: (replace(v[0], outcome=replace(v[0].outcome, bound=1e-7)), v[1], v[2]),
        )
    (found,) = decide(limit, attacks=False)
    assert found.cached == 0
    assert found.verdict == honest.verdict


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "fields",
    [
        {"attack": []}, {"attack": 1e-9}, {"length": "3"}, {"reason": 1}, {"margin": "0x1p-9"},
        {"stable": 1}, {"links": None}, {"alpha": 0.5}, {"bound": 0},
    ],
)  # fmt: skip
def test_cached_case_records_are_validated(
    decide: Decide, folder: Path, fields: dict[str, Any]
) -> None:
    """A run that is missing in the entry is not shown beside the bound, and nothing fails."""
    (honest,) = decide(HELD % "attn_0", attacks=False)
    for path in entries(folder):
        rewrite(path, lambda v: (replace(v[0], outcome=replace(v[0].outcome, **fields)), *v[1:]))
    (found,) = decide(HELD % "attn_0", attacks=False)
    assert found.cached == 0
    assert found.cases == honest.cases
    assert found.proof == honest.proof


@pytest.mark.full
def test_probabilistic_results_are_not_cached_as_certain(folder: Path) -> None:
    program = write_contract(folder, HELD % "layer_0", compute="bfloat16", evidence="probabilistic")
    goal = replace(goals(program)[0], threshold=Fraction(0))
    execution = Execution(jobs=1, cache=folder / "cache")

    def decided() -> GoalOutcome:
        (found,) = BACKEND.decide(program, folder, [goal], execution=execution, attacks=False)
        return found

    honest = decided()
    likely = [case for case in honest.cases if case.alpha == "0.000000001"]
    assert likely
    for path in entries(folder):
        rewrite(
            path, lambda v: (replace(v[0], outcome=replace(v[0].outcome, alpha=None)), v[1], v[2])
        )
    found = decided()
    assert found.cached == len(honest.cases) - len(likely)
    assert found.evidence == honest.evidence
    assert decided().cached == len(honest.cases)


@pytest.mark.full
def test_cached_counterexamples_are_simulated_again(
    decide: Decide, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that no kernel admits is damage."""
    ball = "forall x in ball(all, 1e-3): norm_inf(drift(attn_0, x)) <= 1e-9"
    (first,) = decide(ball)
    assert isinstance(first.verdict, Violated)
    (path,) = [p for p in entries(folder) if '"Attack"' in p.read_text()]
    before = path.read_bytes()
    kept = decode(json.loads(before)["value"], (Attack,))
    monkeypatch.setattr(tasks, "attack_case", lambda *arguments: kept)

    def is_damage(change: Callable[[Attack], Any]) -> bool:
        rewrite(path, change)
        (found,) = decide(ball)
        assert same([replace(found, notes=first.notes)]) == same([first])
        assert path.read_bytes() == before
        return "damaged" in " ".join(found.notes)

    def elsewhere(attack: Attack) -> Attack:
        record = dict(attack.record or {})
        shape = tuple(record["input"]["shape"])
        moved = unpack(record["input"], shape, "input") + 0.1
        return replace(attack, record={**record, "input": pack(moved, "float32")})

    def without_symbols(attack: Attack) -> Attack:
        return replace(attack, record={**(attack.record or {}), "symbols": {}})

    def without_roundings(attack: Attack) -> Attack:
        record = dict(attack.record or {})
        none: dict[str, Any] = {"train": {}, "infer": {}}
        return replace(attack, record={**record, "symbols": none, "orders": none})

    def boasting(attack: Attack) -> Attack:
        record = dict(attack.record or {})
        more = {**record["attained"], "value": (1.0).hex()}
        return replace(attack, record={**record, "attained": more})

    for change in (
        elsewhere,
        without_symbols,
        boasting,
        without_roundings,
        lambda attack: replace(attack, value=float("nan")),
        lambda attack: replace(attack, record=None),
        lambda attack: 3,
    ):
        assert is_damage(change)
    assert not is_damage(lambda attack: attack)


@pytest.mark.full
def test_attack_above_its_bound_is_not_evidence(decide: Decide, folder: Path) -> None:
    """One of the two is wrong, so neither is used."""
    (first,) = decide(HELD % "attn_0")
    assert first.attack is not None
    (path,) = [p for p in entries(folder) if '"Attack"' in p.read_text()]
    rewrite(path, lambda attack: replace(attack, value=first.bound * 1.5))
    (found,) = decide(HELD % "attn_0")
    assert isinstance(found.verdict, InvalidEvidence)
    assert found.proof is None
    assert "above the bound" in found.verdict.reason
