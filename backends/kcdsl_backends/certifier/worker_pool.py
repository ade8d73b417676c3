"""Run tasks in parallel on processes or machines, with the same answers as in one process."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from types import TracebackType

from kcdsl.diagnostics import Refusal
from kcdsl.route.catalogue import Execution
from kcdsl_backends.certifier.worker import (
    Defect,
    Ready,
    RejectedTask,
    Task,
    TaskResult,
    Unfinished,
    WorkerContext,
    peak_bytes,
    perform,
    work,
)
from kcdsl_backends.executors import (
    Processes,
    Ray,
    WorkerLost,
    allow_interrupts,
    available_memory,
    cores,
)

WORTH = 30.0
"""Least expected seconds of remaining work for which workers are started."""

Executor = Processes | Ray
OnAnswer = Callable[[int, TaskResult], None]
Wanted = Callable[[int], bool]


class TaskFailed(Exception):
    """An unexpected exception in this process or another; its notes have the traceback."""


class WorkersDoNotStart(Exception):
    """Worker processes end before their first task."""


def threads_of(execution: Execution, cases: int) -> int:
    """Return the number of threads for each case: as requested, else a share of the cores.

    The last bits of sums depend on it, so it must not depend on engine and jobs.
    """
    return execution.threads or max(1, cores() // max(1, min(cores(), cases)))


class WorkerPool:
    """Runs tasks here or in the workers of an `Execution`; a context manager.

    On exit all workers end: after their tasks, or at once on an exception.
    """

    def __init__(self, context: WorkerContext, execution: Execution) -> None:
        """Create a pool without workers; they start on demand."""
        self._context, self._execution = context, execution
        self._setting = pickle.dumps(context.setting)
        self._executor: Executor | None = None
        self._width = 1
        self._spent, self._done = 0.0, 0

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._executor is None:
            return
        if error is None:
            self._executor.shutdown(wait=True)
        else:
            self._executor.kill()
        self._executor = None

    @property
    def width(self) -> int:
        """Return the number of parts into which divisible work should be split."""
        return 1 if self._executor is None else self._width

    def run(
        self, tasks: Sequence[Task], on_answer: OnAnswer | None = None, wanted: Wanted | None = None
    ) -> list[TaskResult | None]:
        """Run all tasks and return the answers in order; None for tasks that are not `wanted`.

        `on_answer` is called for every answer as it arrives, in any order. Of refused or failed
        tasks, the first in the order of tasks is reported.

        Raises:
            Refusal: a task was refused.
            TaskFailed: a task raised an unexpected exception.
            WorkersDoNotStart: no worker could be started.
        """
        answers: list[TaskResult | None] = [None] * len(tasks)
        waiting, running = deque(range(len(tasks))), dict[Future[bytes], int]()
        last = len(tasks)

        def keep(index: int, answer: TaskResult) -> None:
            nonlocal last
            answers[index] = answer
            if isinstance(answer.value, RejectedTask | Defect):
                last = min(last, index)
            if on_answer is not None:
                on_answer(index, answer)

        while waiting or running:
            self._start_workers(len(waiting))
            while waiting and len(running) < self._width:
                index = waiting.popleft()
                if index > last or (wanted is not None and not wanted(index)):
                    continue
                if self._executor is None:
                    keep(index, self._run_here(tasks[index]))
                    break
                running[self._submit(tasks[index])] = index
            if running:
                self._collect(running, tasks, keep)
        if last < len(tasks):
            _raise(answers[last])
        return answers

    def _submit(self, task: Task) -> Future[bytes]:
        """Submit a task to the workers; if they have broken, return a future that says so."""
        assert self._executor is not None
        data = pickle.dumps(task)
        try:
            return self._executor.submit(work, self._setting, data)
        except BrokenExecutor:
            future: Future[bytes] = Future()
            future.set_exception(BrokenExecutor())
            return future

    def _run_here(self, task: Task) -> TaskResult:
        answer = perform(self._context, task)
        self._spent += answer.seconds
        self._done += 1
        return answer

    def _collect(
        self, running: dict[Future[bytes], int], tasks: Sequence[Task], keep: OnAnswer
    ) -> None:
        """Wait for answers and keep them. If the pool broke, run the lost tasks one by one."""
        allow_interrupts()
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        lost: list[int] = []
        for future in done:
            index = running.pop(future)
            try:
                keep(index, self._answer(future.result()))
            except BrokenExecutor:
                lost.append(index)
            except WorkerLost as error:
                keep(index, _lost(str(error)))
        if not lost:
            return
        for future in list(running):
            index = running.pop(future)
            try:
                keep(index, self._answer(future.result()))
            except BrokenExecutor:
                lost.append(index)
        if self._executor is not None:
            self._executor.kill()
            self._executor = None
        self._width = max(1, self._width // 2)
        for index in sorted(lost):
            keep(index, self._run_alone(tasks[index]))
        self._executor = self._open(self._width)

    def _answer(self, data: bytes) -> TaskResult:
        """Return the answer of a worker; record the user code that it imported."""
        answer: TaskResult = pickle.loads(data)
        self._context.factory.model.files.record_code(answer.code)
        return answer

    def _run_alone(self, task: Task) -> TaskResult:
        """Run a task alone in a new worker, so that a crash is due to this task."""
        executor = Processes(1, self._context.setting.threads)
        try:
            return self._answer(executor.submit(work, self._setting, pickle.dumps(task)).result())
        except BrokenExecutor:
            return _lost("it was killed, for want of memory for instance, or crashed")
        finally:
            executor.kill()

    def _start_workers(self, waiting: int) -> None:
        """Start workers if they are requested or the remaining work is worth it."""
        if self._executor is not None or waiting == 0:
            return
        engine, jobs = self._execution.engine, self._execution.jobs
        if engine == "processes" and jobs is None:
            expected = waiting * self._spent / max(1, self._done)
            if expected < WORTH or waiting < 2 or self._context.factory.device.type != "cpu":
                return
            jobs = min(_affordable(self._context.setting.threads), waiting)
        if engine == "processes" and jobs == 1:
            return
        self._width = jobs or 1
        self._executor = self._open(jobs)
        if isinstance(self._executor, Ray):
            self._width = self._executor.jobs
        self._check_start(self._executor)

    def _open(self, jobs: int | None) -> Executor:
        threads = self._context.setting.threads
        if self._execution.engine == "ray":
            return Ray(jobs, threads)
        return Processes(jobs or 1, threads)

    def _check_start(self, executor: Executor) -> None:
        """Check that a worker starts and loads the model before tasks are submitted."""
        allow_interrupts()
        try:
            answer = self._answer(
                executor.submit(work, self._setting, pickle.dumps(Ready())).result()
            )
        except (BrokenExecutor, WorkerLost) as error:
            raise WorkersDoNotStart(
                f"the first worker ended while it loaded the model ({error}); try --jobs 1"
            ) from error
        if answer.value is not None:
            _raise(answer)


def _lost(why: str) -> TaskResult:
    return TaskResult(Unfinished(f"the worker ended: {why}"), 0.0, 0)


def _raise(answer: TaskResult | None) -> None:
    match answer:
        case TaskResult(value=RejectedTask(diagnostics)):
            raise Refusal(diagnostics)
        case TaskResult(value=Defect(kind, message, trace)):
            error = TaskFailed(f"{kind}: {message}")
            error.add_note(trace)
            raise error
        case TaskResult(value=Unfinished(reason)):
            raise WorkersDoNotStart(f"the first worker did not load the model: {reason}")
        case _:
            raise AssertionError("nothing to raise")


def _affordable(threads: int) -> int:
    """Return the number of workers that cores and memory allow, at this process's peak memory."""
    by_cores = max(1, cores() // threads)
    memory = available_memory()
    return by_cores if memory is None else max(1, min(by_cores, memory // max(1, peak_bytes())))
