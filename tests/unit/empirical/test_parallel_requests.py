"""Requests evaluated in other processes give equal results, and none is lost."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kcdsl.check.compile import load_program
from kcdsl.diagnostics import Refusal
from kcdsl.ir.terms import Program
from kcdsl_backends.empirical.backend import BACKEND
from kcdsl_backends.empirical.collection.parallel import ParallelPlan, Recipe, run_piece, task_id
from kcdsl_backends.empirical.table.evidence import EvidenceTable, RequestRun

_CONTRACT = """kcdsl: 1
contract: spread
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json}
kernels:
  train: {run: torch.eager, numerics: {compute: float32}}
  infer: {run: torch.eager, numerics: {compute: bfloat16}}
data: prompts.jsonl
slices: {all: {}}
clauses:
  N-KL: {require: p99(kl) <= 1e-4 nats, slices: [all], level: L2}
  N-K3: {require: mean(k3) <= 1e-3, slices: [all], level: L2}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    made = tmp_path_factory.mktemp("spread")
    for name in ("model.safetensors", "config.json"):
        shutil.copy(repository / "examples/tiny_lm" / name, made / name)
    lines = (repository / "examples/tiny_lm/prompts.jsonl").read_text().splitlines()
    (made / "prompts.jsonl").write_text("\n".join(lines[:20]) + "\n")
    (made / "contract.yaml").write_text(_CONTRACT)
    return made


@pytest.fixture(scope="module")
def program(folder: Path) -> Program:
    return load_program(folder / "contract.yaml")


def _recipe(program: Program, folder: Path) -> Recipe:
    return Recipe(program, folder, "cpu", (), 0, torch.get_num_threads())


def _evidence(program: Program, folder: Path, spread: ParallelPlan | None) -> EvidenceTable:
    setting = BACKEND.prepare(program, folder, crosscheck=False)
    return BACKEND.gather(setting, lambda stage, done, total: None, None, spread)


def _same(one: RequestRun, other: RequestRun) -> bool:
    a, b = one.unit, other.unit
    return (
        (a.key, a.tokens, a.failure, one.seed, dict(one.digests))
        == (b.key, b.tokens, b.failure, other.seed, dict(other.digests))
        and a.values.keys() == b.values.keys()
        and all(a.values[n].tobytes() == b.values[n].tobytes() for n in a.values)
    )


@pytest.fixture(scope="module")
def alone(program: Program, folder: Path) -> EvidenceTable:
    return _evidence(program, folder, None)


def _hold(found: EvidenceTable, alone: EvidenceTable) -> None:
    assert list(found.runs) == list(alone.runs)
    assert all(_same(found.runs[key], alone.runs[key]) for key in alone.runs)
    assert BACKEND.conclude(found) == BACKEND.conclude(alone)


@pytest.mark.full
def test_worker_processes_give_equal_bits(
    program: Program, folder: Path, alone: EvidenceTable
) -> None:
    _hold(_evidence(program, folder, ParallelPlan(_recipe(program, folder), "processes", 2)), alone)


@pytest.mark.full
@pytest.mark.parametrize("threads", [None, "3"])
def test_workers_have_equal_fingerprints(
    program: Program,
    folder: Path,
    alone: EvidenceTable,
    monkeypatch: pytest.MonkeyPatch,
    threads: str | None,
) -> None:
    """Variables that set the thread counts of libraries are part of them."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name)
        if threads:
            monkeypatch.setenv(name, threads)
    found = _evidence(program, folder, ParallelPlan(_recipe(program, folder), "processes", 2))
    assert all(_same(found.runs[key], alone.runs[key]) for key in alone.runs)


@pytest.mark.slow
def test_ray_workers_give_equal_bits(program: Program, folder: Path, alone: EvidenceTable) -> None:
    _hold(_evidence(program, folder, ParallelPlan(_recipe(program, folder), "ray", 2)), alone)


class _Pool:
    """Answers immediately, but loses the workers of some tasks."""

    def __init__(self, lost: set[int], damage: Any = None) -> None:
        self.lost, self.damage, self.count = lost, damage, 0

    def submit(self, function: Any, recipe: bytes, keys: Sequence[str]) -> Future[bytes]:
        future: Future[bytes] = Future()
        if self.count in self.lost:
            future.set_exception(BrokenExecutor("killed"))
        else:
            answer = function(recipe, keys)
            future.set_result(self.damage(answer) if self.damage else answer)
        self.count += 1
        return future

    def kill(self) -> None:
        pass


def _with_pools(monkeypatch: pytest.MonkeyPatch, *pools: _Pool) -> None:
    left = list(pools)
    monkeypatch.setattr(ParallelPlan, "_open", lambda self, pieces: left.pop(0))


@pytest.mark.full
def test_lost_task_is_run_again(
    program: Program, folder: Path, alone: EvidenceTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _Pool({1}), _Pool(set())
    _with_pools(monkeypatch, first, second)
    _hold(_evidence(program, folder, ParallelPlan(_recipe(program, folder), "processes", 2)), alone)
    assert (first.count, second.count) == (3, 1)


@pytest.mark.full
def test_task_that_is_lost_twice_is_an_error(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_pools(monkeypatch, _Pool({2}), _Pool({0}))
    with pytest.raises(Refusal, match="ended 2 times") as found:
        _evidence(program, folder, ParallelPlan(_recipe(program, folder), "processes", 2))
    assert str(found.value.diagnostics[0].code) == "KC684"


@pytest.mark.full
def test_incomplete_answer_is_an_error(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shorter(data: bytes) -> bytes:
        answer = pickle.loads(data)
        return pickle.dumps(replace(answer, runs=answer.runs[:-1]))

    _with_pools(monkeypatch, _Pool(set(), shorter))
    with pytest.raises(Refusal, match="answered for other requests"):
        _evidence(program, folder, ParallelPlan(_recipe(program, folder), "processes", 2))


@pytest.mark.full
@pytest.mark.parametrize("part", ["requests", "model"])
def test_worker_with_other_files_is_an_error(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str
) -> None:
    """Its requests have equal names but other tokens or weights, which no value would reveal."""
    for path in folder.iterdir():
        shutil.copy(path, tmp_path / path.name)
    if part == "requests":
        prompts = tmp_path / "prompts.jsonl"
        *first, last = prompts.read_text().splitlines()
        row = json.loads(last)
        prompts.write_text("\n".join([*first, json.dumps({**row, "text": "another"})]) + "\n")
    else:
        path = tmp_path / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))
    _with_pools(monkeypatch, _Pool(set()))
    with pytest.raises(Refusal, match=f"runs with other {part} than this process") as found:
        _evidence(program, folder, ParallelPlan(_recipe(program, tmp_path), "processes", 2))
    assert str(found.value.diagnostics[0].code) == "KC684"


def test_worker_that_fails_to_load_states_the_reason(program: Program, tmp_path: Path) -> None:
    recipe = pickle.dumps(_recipe(program, tmp_path))
    answer = pickle.loads(run_piece(recipe, ("prompts.jsonl:a",)))
    assert [str(d.code) for d in answer.refusal] == ["KC601"]


def test_names_of_tasks_depend_on_their_inputs() -> None:
    assert task_id(b"a", ["x", "y"]) == task_id(b"a", ["x", "y"])
    assert len({task_id(b"a", ["x"]), task_id(b"b", ["x"]), task_id(b"a", ["y"])}) == 3
