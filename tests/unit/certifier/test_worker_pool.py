"""The worker pool: equal results wherever a task runs, none without a task."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kcdsl.diagnostics import Refusal, codes
from kcdsl.model.files import CHECKPOINT
from kcdsl.model.loader import load_model
from kcdsl.route.catalogue import Execution
from kcdsl_backends.certifier import worker_pool
from kcdsl_backends.certifier.cache import rules_version
from kcdsl_backends.certifier.tasks import RecheckResult
from kcdsl_backends.certifier.worker import (
    RunSettings,
    Task,
    TaskResult,
    Unfinished,
    WorkerContext,
    open_context,
    peak_bytes,
    perform,
)
from kcdsl_backends.certifier.worker_pool import (
    TaskFailed,
    WorkerPool,
    WorkersDoNotStart,
    threads_of,
)
from kcdsl_backends.executors import _group_memory, available_memory, cores
from tests.support.failing_tasks import Crash, CrashOnce, Echo, RaiseError
from tests.support.small_models import write_contract, write_model


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> WorkerContext:
    """Return the worker context of a small model."""
    folder = tmp_path_factory.mktemp("crew")
    write_model(folder)
    program = write_contract(folder, "forall x in points(all): norm_inf(drift(attn_0, x)) <= 1")
    model = load_model(program.model, folder)
    setting = RunSettings(program, folder, "cpu", 1, model.checkpoint.sha256, rules_version(), None)
    return open_context(setting, model)


@pytest.fixture(scope="module")
def pair(context: WorkerContext) -> Iterator[WorkerPool]:
    """Return two workers that tests share."""
    with WorkerPool(context, Execution(jobs=2)) as pool:
        yield pool


def said(answers: list[TaskResult | None]) -> list[str]:
    """Return the results of echo tasks."""
    return [a.value.reason for a in answers if a is not None and isinstance(a.value, RecheckResult)]


@pytest.mark.full
def test_results_are_in_the_order_of_tasks(context: WorkerContext, pair: WorkerPool) -> None:
    tasks = [Echo("slow", 0.3), Echo("b"), Echo("c"), Echo("d")]
    heard: list[int] = []
    answers = pair.run(tasks, lambda index, answer: heard.append(index))
    assert said(answers) == ["slow", "b", "c", "d"]
    assert sorted(heard) == [0, 1, 2, 3]
    with WorkerPool(context, Execution(jobs=1)) as alone:
        assert said(alone.run(tasks)) == said(answers)


@pytest.mark.full
def test_workers_are_other_processes(context: WorkerContext, pair: WorkerPool) -> None:
    import os

    with WorkerPool(context, Execution(jobs=1)) as alone:
        assert said(alone.run([Echo("", own=True)])) == [f" {os.getpid()}"]
    assert f" {os.getpid()}" not in said(pair.run([Echo("", own=True)]))


@pytest.mark.full
@pytest.mark.parametrize("jobs", [1, 2])
def test_out_of_memory_is_an_unfinished_task(
    context: WorkerContext, pair: WorkerPool, jobs: int
) -> None:
    pool = pair if jobs == 2 else WorkerPool(context, Execution(jobs=1))
    first, second = pool.run([RaiseError("memory"), Echo("next")])
    assert first is not None
    assert second is not None
    assert first.value == Unfinished("out of memory: no room")
    assert second.value == RecheckResult("next")


@pytest.mark.sample(1)
@pytest.mark.parametrize("jobs", [1, 2])
def test_first_refusal_is_raised(context: WorkerContext, jobs: int) -> None:
    tasks: list[Task] = [
        Echo("a", 0.2),
        RaiseError("refusal"),
        RaiseError("defect"),
        RaiseError("file"),
    ]
    with WorkerPool(context, Execution(jobs=jobs)) as pool, pytest.raises(Refusal) as caught:
        pool.run(tasks)
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code.id, diagnostic.help) == ("KC467", "take bfloat16")


@pytest.mark.full
def test_defect_names_its_exception_and_traceback(context: WorkerContext, pair: WorkerPool) -> None:
    for pool in (WorkerPool(context, Execution(jobs=1)), pair):
        with pytest.raises(TaskFailed, match="ValueError: planted") as caught:
            pool.run([RaiseError("planted"), Echo("late", 0.1)])
        assert "in run" in "".join(caught.value.__notes__)


def test_missing_file_is_refused(context: WorkerContext) -> None:
    with pytest.raises(Refusal) as caught:
        WorkerPool(context, Execution(jobs=1)).run([RaiseError("file")])
    assert caught.value.diagnostics[0].code.id == "KC602"
    assert "gone.safetensors" in caught.value.diagnostics[0].message


@pytest.mark.full
def test_unconsumed_tasks_are_not_run(context: WorkerContext, pair: WorkerPool) -> None:
    for pool in (WorkerPool(context, Execution(jobs=1)), pair):
        answers = pool.run([Echo("a"), Echo("b"), Echo("c")], wanted=lambda index: index != 1)
        assert [a is None for a in answers] == [False, True, False]


@pytest.mark.full
def test_crashed_worker_loses_only_its_task(context: WorkerContext, tmp_path: Path) -> None:
    """Other tasks of the broken pool run again."""
    tasks: list[Task] = [
        Echo("a", 0.5),
        Crash(),
        Echo("b"),
        CrashOnce(tmp_path / "marker"),
        Echo("c"),
    ]
    with WorkerPool(context, Execution(jobs=2)) as pool:
        answers = pool.run(tasks)
        assert said(answers) == ["a", "b", "second", "c"]
        assert answers[1] is not None
        assert isinstance(answers[1].value, Unfinished)
        assert "the worker ended" in answers[1].value.reason
        assert said(pool.run([Echo("after")])) == ["after"]


@pytest.mark.full
def test_workers_with_another_program_refuse_to_start(context: WorkerContext) -> None:
    """A worker with other rules or weights does not start."""
    for changed, words in (
        (replace(context.setting, rules="0" * 64), "the program"),
        (replace(context.setting, checkpoint="0" * 64), "the checkpoint"),
    ):
        other = WorkerContext(changed, context.factory)
        with WorkerPool(other, Execution(jobs=2)) as pool, pytest.raises(Refusal) as refused:
            pool.run([Echo("a"), Echo("b")])
        (found,) = refused.value.diagnostics
        assert found.code == codes.CHANGED_MEANWHILE
        assert found.message.startswith(words)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rules": "0" * 64}, "the program"),
        ({"checkpoint": "0" * 64}, "the checkpoint"),
        ({"loaded": {CHECKPOINT: "0" * 64}}, CHECKPOINT),
    ],
)
def test_worker_with_other_files_is_refused(
    context: WorkerContext, changed: dict[str, object], words: str
) -> None:
    with pytest.raises(Refusal) as refused:
        open_context(replace(context.setting, **changed), context.factory.model)  # type: ignore
    (found,) = refused.value.diagnostics
    assert found.code == codes.CHANGED_MEANWHILE
    assert found.message.startswith(words)


@pytest.mark.parametrize(
    "answer", [TaskResult(Unfinished("it was slow"), 0.0, 0), BrokenExecutor("it ended")]
)
def test_a_first_worker_that_does_not_load_the_model_is_an_error(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    done: Future[object] = Future()
    if isinstance(answer, BrokenExecutor):
        done.set_exception(answer)
    else:
        done.set_result(answer)
    executor: Any = SimpleNamespace(submit=lambda *_: done)
    pool = WorkerPool(context, Execution(jobs=2))
    monkeypatch.setattr(pool, "_answer", lambda result: result)
    with pytest.raises(WorkersDoNotStart, match=r"did not load the model: it was slow|jobs 1"):
        pool._check_start(executor)


@pytest.mark.full
def test_workers_that_cannot_start_are_an_error(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "Ready", Crash)
    with (
        WorkerPool(context, Execution(jobs=2)) as pool,
        pytest.raises(WorkersDoNotStart, match="jobs 1"),
    ):
        pool.run([Echo("a"), Echo("b")])


def test_few_tasks_start_no_workers(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "Processes", None)
    with WorkerPool(context, Execution()) as pool:
        assert said(pool.run([Echo("a"), Echo("b")])) == ["a", "b"]
        assert pool.width == 1


def test_many_tasks_start_workers(context: WorkerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Noted(Exception):
        pass

    def processes(jobs: int, threads: int) -> None:
        asked.append(jobs)
        raise Noted

    monkeypatch.setattr(worker_pool, "Processes", processes)
    monkeypatch.setattr(worker_pool, "WORTH", 0.1)
    monkeypatch.setattr(worker_pool, "cores", lambda: 64)
    monkeypatch.setattr(worker_pool, "available_memory", lambda: None)
    with WorkerPool(context, Execution()) as pool, pytest.raises(Noted):
        pool.run([Echo("a", 0.05), Echo("b"), Echo("c"), Echo("d")])
    monkeypatch.setattr(worker_pool, "available_memory", lambda: 2 * peak_bytes() + 1)
    with WorkerPool(context, Execution()) as pool, pytest.raises(Noted):
        pool.run([Echo("a", 0.05), Echo("b"), Echo("c"), Echo("d")])
    assert asked == [3, 2]


def test_thread_count_depends_on_cores_and_cases_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "cores", lambda: 8)
    assert [threads_of(Execution(jobs=jobs), 2) for jobs in (1, 2, 16)] == [4, 4, 4]
    assert threads_of(Execution(), 100) == 1
    assert threads_of(Execution(), 0) == 8
    assert threads_of(Execution(threads=3), 100) == 3


def test_thread_count_is_set_for_a_task_and_restored(context: WorkerContext) -> None:
    class Threads:
        def run(self, context: WorkerContext) -> tuple[RecheckResult, None]:
            return RecheckResult(str(torch.get_num_threads())), None

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert perform(context, Threads()).value == RecheckResult("1")
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_machine_resources_are_detected(tmp_path: Path) -> None:
    assert cores() >= 1
    memory = available_memory()
    assert memory is None or memory > 2**20
    assert _group_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("10\n")
    assert _group_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("30\n")
    assert _group_memory(tmp_path) == 20
