"""Spread work over processes or machines, so that every answer is that of this process alone."""

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
    Refused,
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
    available_memory,
    cores,
    let_interrupts_through,
)

WORTH = 30.0
"""Seconds of work still to be done, judged by what was done, that are worth starting workers."""

Executor = Processes | Ray
Told = Callable[[int, TaskResult], None]
Wanted = Callable[[int], bool]


class TaskFailed(Exception):
    """An exception that nobody foresaw, in this process or another; its notes have the trace."""


class WorkersDoNotStart(Exception):
    """Worker processes end before they do anything."""


def threads_of(execution: Execution, cases: int) -> int:
    """Return how many threads each case has: what was asked for, else a share of the cores.

    The last bits of sums depend on it, so it must not depend on engine and jobs.
    """
    return execution.threads or max(1, cores() // max(1, min(cores(), cases)))


class WorkerPool:
    """Does work, here or in as many workers as an `Execution` asks for; a context manager.

    On leaving it, all workers end: after their work, or at once where an exception leaves it.
    """

    def __init__(self, context: WorkerContext, execution: Execution) -> None:
        """Begin without workers; they start when there is work for them."""
        self._station, self._execution = context, execution
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
    def spread(self) -> int:
        """Return into how many parts work that can be divided should be."""
        return 1 if self._executor is None else self._width

    def run(
        self, tasks: Sequence[Task], told: Told | None = None, wanted: Wanted | None = None
    ) -> list[TaskResult | None]:
        """Do every task that is wanted when its turn comes; return the answers in their order.

        `told` hears of every answer as it comes, in any order. Where tasks are refused or end in
        a defect, the first of them in the order of tasks counts, whichever came first.

        Raises:
            Refusal: what a task refuses.
            DefectInWork: what a task did not foresee.
            WorkersDoNotStart: no worker could be started.
        """
        answers: list[TaskResult | None] = [None] * len(tasks)
        waiting, flying = deque(range(len(tasks))), dict[Future[bytes], int]()
        last = len(tasks)

        def keep(index: int, answer: TaskResult) -> None:
            nonlocal last
            answers[index] = answer
            if isinstance(answer.value, Refused | Defect):
                last = min(last, index)
            if told is not None:
                told(index, answer)

        while waiting or flying:
            self._widen(len(waiting))
            while waiting and len(flying) < self._width:
                index = waiting.popleft()
                if index > last or (wanted is not None and not wanted(index)):
                    continue
                if self._executor is None:
                    keep(index, self._here(tasks[index]))
                    break
                flying[self._give(tasks[index])] = index
            if flying:
                self._land(flying, tasks, keep)
        if last < len(tasks):
            _raise(answers[last])
        return answers

    def _give(self, task: Task) -> Future[bytes]:
        """Give a task to the pool; a pool that broke since answers as if it broke on the task."""
        assert self._executor is not None
        data = pickle.dumps(task)
        try:
            return self._executor.submit(work, self._setting, data)
        except BrokenExecutor:
            future: Future[bytes] = Future()
            future.set_exception(BrokenExecutor())
            return future

    def _here(self, task: Task) -> TaskResult:
        answer = perform(self._station, task)
        self._spent += answer.seconds
        self._done += 1
        return answer

    def _land(self, flying: dict[Future[bytes], int], tasks: Sequence[Task], keep: Told) -> None:
        """Wait for an answer and keep it. If the pool broke, do what was lost one by one."""
        let_interrupts_through()
        done, _ = wait(flying, return_when=FIRST_COMPLETED)
        lost: list[int] = []
        for future in done:
            index = flying.pop(future)
            try:
                keep(index, self._answer(future.result()))
            except BrokenExecutor:
                lost.append(index)
            except WorkerLost as error:
                keep(index, _lost(str(error)))
        if not lost:
            return
        for future in list(flying):
            index = flying.pop(future)
            try:
                keep(index, self._answer(future.result()))
            except BrokenExecutor:
                lost.append(index)
        if self._executor is not None:
            self._executor.kill()
            self._executor = None
        self._width = max(1, self._width // 2)
        for index in sorted(lost):
            keep(index, self._alone(tasks[index]))
        self._executor = self._open(self._width)

    def _answer(self, data: bytes) -> TaskResult:
        """Return the answer of a worker; record the own code that it imported."""
        answer: TaskResult = pickle.loads(data)
        self._station.factory.model.files.record_code(answer.code)
        return answer

    def _alone(self, task: Task) -> TaskResult:
        """Do a task in a worker of its own, so that whatever ends the worker is its doing."""
        executor = Processes(1, self._station.setting.threads)
        try:
            return self._answer(executor.submit(work, self._setting, pickle.dumps(task)).result())
        except BrokenExecutor:
            return _lost("it was killed, for want of memory for instance, or crashed")
        finally:
            executor.kill()

    def _widen(self, waiting: int) -> None:
        """Start workers once they are asked for, or worth it."""
        if self._executor is not None or waiting == 0:
            return
        engine, jobs = self._execution.engine, self._execution.jobs
        if engine == "processes" and jobs is None:
            expected = waiting * self._spent / max(1, self._done)
            if expected < WORTH or waiting < 2 or self._station.factory.device.type != "cpu":
                return
            jobs = min(_affordable(self._station.setting.threads), waiting)
        if engine == "processes" and jobs == 1:
            return
        self._width = jobs or 1
        self._executor = self._open(jobs)
        if isinstance(self._executor, Ray):
            self._width = self._executor.jobs
        self._prove(self._executor)

    def _open(self, jobs: int | None) -> Executor:
        threads = self._station.setting.threads
        if self._execution.engine == "ray":
            return Ray(jobs, threads)
        return Processes(jobs or 1, threads)

    def _prove(self, executor: Executor) -> None:
        """See that a worker can be started and finds the model, before work is given out."""
        let_interrupts_through()
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
        case TaskResult(value=Refused(diagnostics)):
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
    """Return how many workers cores and memory allow, each as large as this process was."""
    by_cores = max(1, cores() // threads)
    memory = available_memory()
    return by_cores if memory is None else max(1, min(by_cores, memory // max(1, peak_bytes())))
