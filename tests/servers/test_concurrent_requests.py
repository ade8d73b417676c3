"""Concurrent requests: each sent once, limited in number, results in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcdsl.diagnostics import Refusal, codes
from kcdsl_backends.empirical.collection.servers import FAILURES, ServerRollouts, gather_rollouts
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel
from kcdsl_backends.executors import in_order
from kcdsl_backends.requests import Request
from tests.servers.conftest import Loader
from tests.support.fake_server import FakeServer, serving


@given(count=st.integers(0, 30), at_once=st.integers(1, 8))
def test_each_request_is_sent_once_and_results_keep_the_order(count: int, at_once: int) -> None:
    asked: list[int] = []

    def ask(number: int) -> str:
        asked.append(number)
        return f"answer {number}"

    found = list(in_order(range(count), ask, at_once))
    assert found == [f"answer {place}" for place in range(count)]
    assert sorted(asked) == list(range(count))


@pytest.mark.parametrize("at_once", [2, 5])
def test_concurrency_reaches_and_never_exceeds_its_limit(at_once: int) -> None:
    """Each request waits until as many as allowed are in flight."""
    together = threading.Barrier(at_once, timeout=20)
    inside, most, lock = 0, 0, threading.Lock()

    def ask(number: int) -> int:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        together.wait()
        with lock:
            inside -= 1
        return number

    assert list(in_order(range(4 * at_once), ask, at_once)) == list(range(4 * at_once))
    assert most == at_once


def test_results_keep_the_order_if_answers_arrive_in_reverse() -> None:
    later = [threading.Event() for _ in range(6)]
    later[5].set()

    def ask(number: int) -> int:
        assert later[number].wait(20)
        if number:
            later[number - 1].set()
        return number

    assert list(in_order(range(6), ask, 6)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("at_once", [1, 3])
def test_exception_of_one_request_ends_the_iteration(at_once: int) -> None:
    asked: list[int] = []

    def ask(number: int) -> int:
        asked.append(number)
        if number == 4:
            raise KeyError("four")
        return number

    with pytest.raises(KeyError, match="four"):
        list(in_order(range(1000), ask, at_once))
    assert len(asked) < 1000


def test_single_requests_are_sent_lazily() -> None:
    asked: list[int] = []
    with closing(in_order(range(9), asked.append)) as answers:
        next(answers)
        assert asked == [0]


def test_no_request_is_sent_after_the_consumer_stops() -> None:
    asked: list[int] = []
    two, go = threading.Event(), threading.Event()

    def ask(number: int) -> int:
        asked.append(number)
        if number == 0:
            return 0
        two.set()
        assert go.wait(20)
        return number

    with closing(in_order(range(100), ask, 2)) as answers:
        next(answers)
        assert two.wait(20)
    go.set()
    assert len(asked) <= 3


# --- a server ------------------------------------------------------------------------------------


def bits(found: ServerRollouts) -> list[Any]:
    """Return everything that was collected, as bytes."""
    rows: list[Any] = []
    for key, rollout in found.rollouts.items():
        row: list[Any] = [key, rollout.tokens]
        for side in (rollout.train, rollout.infer):
            assert side is not None
            assert side.top is not None
            row += [side.logs.tobytes(), side.top.ids.tobytes(), side.top.logs.tobytes()]
        rows.append(row)
    policies = [(p.key, np.asarray(p.logits).tobytes()) for p in found.policies]
    return [rows, list(found.failures.items()), policies]


@pytest.mark.full
def test_evidence_does_not_depend_on_concurrency(
    load: Loader, train: TorchKernel, requests: tuple[Request, ...]
) -> None:
    fake = FakeServer(train.logits, wait=0.02)
    with serving(fake) as url:
        one = gather_rollouts(load(url, tokens=4), train, requests, 3)
        assert fake.most == 1
        four = gather_rollouts(load(url, tokens=4, concurrency=4), train, requests, 3)
    assert 1 < fake.most <= 4
    assert bits(one) == bits(four)
    assert list(four.rollouts) == [request.key for request in requests]


def test_fingerprint_contains_the_concurrency(load: Loader, train: TorchKernel) -> None:
    with serving(FakeServer(train.logits)) as url:
        assert load(url, concurrency=4).fingerprint()["service"]["concurrency"] == 4


@pytest.mark.full
def test_one_failure_is_isolated_and_an_unreachable_server_ends_all(
    load: Loader, train: TorchKernel, requests: tuple[Request, ...]
) -> None:
    fake = FakeServer(train.logits)
    with serving(fake) as url:
        server = load(url, tokens=2, concurrency=4)
        fake.change = _null_for(requests[2])
        found = gather_rollouts(server, train, requests, 3)
        assert list(found.failures) == [requests[2].key]
        assert len(found.rollouts) == len(requests) - 1
        fake.statuses = [500] * 10_000
        with pytest.raises(Refusal) as caught:
            gather_rollouts(server, train, requests, 3)
    assert caught.value.diagnostics[0].code is codes.SERVER_UNREACHABLE
    assert len(requests) > FAILURES


@pytest.mark.full
def test_changed_model_ends_the_evaluation(
    load: Loader, train: TorchKernel, requests: tuple[Request, ...]
) -> None:
    fake = FakeServer(train.logits)
    with serving(fake) as url:
        server = load(url, tokens=2, concurrency=4)
        fake.change = lambda answer, question: (
            {**answer, "model": "other"}
            if question["prompt"] == list(requests[5].tokens)
            else answer
        )
        with pytest.raises(Refusal) as caught:
            gather_rollouts(server, train, requests, 3)
    assert caught.value.diagnostics[0].code is codes.SERVER_CHANGED


def _null_for(request: Request) -> Callable[[Any, Any], Any]:
    def change(answer: Any, question: Any) -> Any:
        if question["prompt"] == list(request.tokens):
            answer["choices"][0]["logprobs"]["token_logprobs"][0] = None
        return answer

    return change
