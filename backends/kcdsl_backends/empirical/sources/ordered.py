"""Questions to a server, some at a time: what comes is taken in the order of the questions."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import TypeVar

THREAD = "question"
"""The name of threads that ask."""
Asked = TypeVar("Asked")
Given = TypeVar("Given")


def in_order(
    questions: Sequence[Asked],
    ask: Callable[[Asked], Given],
    at_once: int = 1,
    known: Mapping[int, Given] | None = None,
) -> Generator[Given, None, None]:
    """Yield the answer to each question, in the order of the questions.

    `known` are answers by their place, which are not asked for. With `at_once` 1 a question is
    asked when its answer is wanted; else so many threads ask, ahead of what is wanted. What `ask`
    raises is raised here as soon as it comes. Once the generator is closed nothing more is asked.
    """
    ready: dict[int, Given] = dict(known or {})
    left = [place for place in range(len(questions)) if place not in ready]
    with closing(_arriving(questions, left, ask, at_once)) as arriving:
        for place in range(len(questions)):
            while place not in ready:
                at, given = next(arriving)
                ready[at] = given
            yield ready.pop(place)


def _arriving(
    questions: Sequence[Asked], places: Sequence[int], ask: Callable[[Asked], Given], at_once: int
) -> Generator[tuple[int, Given], None, None]:
    """Yield (place, answer) as answers come."""
    if at_once == 1:
        for place in places:
            yield place, ask(questions[place])
        return
    waiting, lock, over = iter(places), Lock(), Event()
    come: SimpleQueue[tuple[int, Given] | BaseException] = SimpleQueue()

    def work() -> None:
        while not over.is_set():
            with lock:
                place = next(waiting, None)
            if place is None:
                return
            try:
                come.put((place, ask(questions[place])))
            except BaseException as error:  # it is raised where answers are taken
                over.set()
                come.put(error)

    # daemons: an evaluation that is ended does not wait for answers on their way
    for _ in range(min(at_once, len(places))):
        Thread(target=work, name=THREAD, daemon=True).start()
    try:
        for _ in places:
            found = come.get()
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        over.set()
