"""Faulty or lying servers lead to a named refusal or a named diagnosis, never to a drift."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kcdsl.diagnostics import Refusal, codes
from kcdsl.diagnostics.codes import Code
from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.collection.servers import FAILURES, ServerRollouts, gather_rollouts
from kcdsl_backends.empirical.diagnoses.recorded import Recorded, recorded_prechecks
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel
from kcdsl_backends.empirical.sources.rollouts.record import Semantics
from kcdsl_backends.empirical.sources.servers.kernel import ServerKernel
from kcdsl_backends.empirical.sources.servers.transport import Limits
from kcdsl_backends.requests import Request
from tests.servers.conftest import Loader
from tests.support.fake_server import Answer, FakeServer, serving

Lie = Callable[[Answer], Any]


def logs(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][0]["logprobs"]
    return found


def put(answer: Answer, name: str, place: int, value: object) -> Answer:
    logs(answer)[name][place] = value
    return answer


def drop(answer: Answer, name: str) -> Answer:
    del logs(answer)[name][-1]
    return answer


def without(answer: Answer, *path: str) -> Answer:
    inside: Any = answer["choices"][0]
    for name in path[:-1]:
        inside = inside[name]
    inside[path[-1]] = None
    return answer


def echoed(answer: Answer) -> Answer:
    """Put the prompt before the generated text, as `echo` does."""
    for name, value in (("tokens", "token_id:65"), ("token_logprobs", -1.0), ("top_logprobs", {})):
        logs(answer)[name][:0] = [value] * 3
    answer["usage"]["completion_tokens"] += 3
    return answer


LIES: dict[str, tuple[Lie, Code, str]] = {
    "no log-probabilities": (
        lambda a: without(a, "logprobs"), codes.SERVER_REPLY, "no log-probabilities",
    ),
    "log-probabilities null": (
        lambda a: without(a, "logprobs", "token_logprobs"), codes.SERVER_REPLY, "no log-prob",
    ),
    "one null": (lambda a: put(a, "token_logprobs", 0, None), codes.SERVER_REPLY, "null"),
    "NaN": (lambda a: put(a, "token_logprobs", 0, math.nan), codes.SERVER_REPLY, "nan"),
    "infinite": (lambda a: put(a, "token_logprobs", 0, -math.inf), codes.SERVER_REPLY, "-inf"),
    "above 0": (lambda a: put(a, "token_logprobs", 0, 0.5), codes.SERVER_REPLY, "0.5"),
    "a text": (lambda a: put(a, "token_logprobs", 0, "-1"), codes.SERVER_REPLY, "'-1'"),
    "true": (lambda a: put(a, "token_logprobs", 0, True), codes.SERVER_REPLY, "True"),
    "least number": (
        lambda a: put(a, "token_logprobs", 0, -3.4028234663852886e38), codes.SERVER_REPLY, "e+38",
    ),
    "an integer that is no float64": (
        lambda a: put(a, "token_logprobs", 0, -(10**400)), codes.SERVER_REPLY, "401 digits",
    ),
    "an id of thousands of digits": (
        lambda a: put(a, "tokens", 0, f"token_id:{'9' * 5000}"),
        codes.TOKENS_NOT_ALIGNED, "is that of no token",
    ),
    "one token fewer": (lambda a: drop(a, "tokens"), codes.SERVER_REPLY, "same length"),
    "one value fewer": (lambda a: drop(a, "token_logprobs"), codes.SERVER_REPLY, "same length"),
    "the prompt too": (echoed, codes.SERVER_REPLY, "without the prompt"),
    "no token": (
        lambda a: {**a, "choices": [{**a["choices"][0], "logprobs": {"tokens": [],
                   "token_logprobs": [], "top_logprobs": []}}]},
        codes.SERVER_REPLY, "say which tokens",
    ),
    "two texts": (lambda a: {**a, "choices": a["choices"] * 2}, codes.SERVER_REPLY, "2 texts"),
    "no text": (lambda a: {**a, "choices": []}, codes.SERVER_REPLY, "0 texts"),
    "a list": (lambda a: [a], codes.SERVER_REPLY, "no object"),
    "cut short by a filter": (
        lambda a: {**a, "choices": [{**a["choices"][0], "finish_reason": "content_filter"}]},
        codes.SERVER_REPLY, "content_filter",
    ),
    "another count": (
        lambda a: {**a, "usage": {**a["usage"], "completion_tokens": 1}},
        codes.SERVER_REPLY, "counts 1 drawn",
    ),
    "a token of its own before the prompt": (
        lambda a: {**a, "usage": {**a["usage"], "prompt_tokens": 99}},
        codes.TOKENS_NOT_ALIGNED, "99 tokens",
    ),
    "a token beyond the vocabulary": (
        lambda a: put(a, "tokens", 0, "token_id:256"), codes.TOKENS_NOT_ALIGNED, "256",
    ),
    "a text that is two bytes": (
        lambda a: put(a, "tokens", 0, "ab"), codes.TOKENS_NOT_ALIGNED, "'ab'",
    ),
    "another model": (lambda a: {**a, "model": "large"}, codes.SERVER_CHANGED, "'large'"),
    "two values of the drawn token": (
        lambda a: put(a, "top_logprobs", 0, {
            logs(a)["tokens"][0]: -9.0, **{f"token_id:{i}": -10.0 for i in range(5)},
        }),
        codes.SERVER_REPLY, "two log-probabilities",
    ),
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", LIES)
def test_fault_at_the_start_is_refused_by_name_before_measuring(
    name: str, load: Loader, train: TorchKernel
) -> None:
    lie, code, words = LIES[name]
    fake = FakeServer(train.logits, change=lambda answer, _: lie(answer))
    with serving(fake) as url, pytest.raises(Refusal) as caught:
        load(url)
    first = caught.value.diagnostics[0]
    assert first.code is code, first.message
    assert words in first.message + (first.help or "")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LIES)
def test_later_fault_fails_the_request_or_the_evaluation(
    name: str, load: Loader, train: TorchKernel, requests: tuple[Request, ...]
) -> None:
    """An affected request has no value; a changed model ends the evaluation."""
    lie, code, _words = LIES[name]
    fake = FakeServer(train.logits)
    with serving(fake) as url:
        server = load(url, tokens=4)
        fake.change = lambda answer, question: (
            lie(answer) if question["prompt"] == list(requests[1].tokens) else answer
        )
        if code is codes.SERVER_CHANGED:
            with pytest.raises(Refusal):
                gather_rollouts(server, train, requests[:3], 0)
            return
        found = gather_rollouts(server, train, requests[:3], 0)
    assert list(found.failures) == [requests[1].key]
    assert code.id in found.failures[requests[1].key]
    assert set(found.rollouts) == {requests[0].key, requests[2].key}


def test_busy_server_is_retried(
    load: Loader, train: TorchKernel, requests: tuple[Request, ...]
) -> None:
    fake = FakeServer(train.logits)
    with serving(fake) as url:
        server = load(url, tokens=4)
        fake.statuses = [503, 429]
        drawn = server.draw(requests[0].tokens, 1)
    assert len(drawn.tokens) == 4
    assert len(fake.questions) == 4  # the trial, two refusals and the answer


@pytest.mark.full
def test_permanently_busy_server_is_refused(
    load: Loader, train: TorchKernel, requests: tuple[Request, ...]
) -> None:
    fake = FakeServer(train.logits)
    with serving(fake) as url:
        server = load(url, tokens=4)
        fake.statuses = [500] * 1000
        with pytest.raises(Refusal) as caught:
            gather_rollouts(server, train, requests, 0)
    assert caught.value.diagnostics[0].code is codes.SERVER_UNREACHABLE
    assert "status 500" in caught.value.diagnostics[0].message
    assert len(fake.questions) == 1 + 3 * FAILURES  # three attempts for each of the first requests


@pytest.mark.full
def test_unanswered_request_fails_alone(
    load: Loader, train: TorchKernel, requests: tuple[Request, ...]
) -> None:
    fake = FakeServer(train.logits)
    with serving(fake) as url:
        server = load(url, tokens=4)
        fake.statuses = [500] * 3
        found = gather_rollouts(server, train, requests[:4], 0)
    assert list(found.failures) == [requests[0].key]
    assert len(found.rollouts) == 3


def test_hanging_server_times_out(load: Loader, train: TorchKernel) -> None:
    limits = Limits(connect=1.0, answer=0.2, attempts=5, slow_attempts=2, pause=0.001)
    fake = FakeServer(train.logits, wait=0.6)
    with serving(fake) as url, pytest.raises(Refusal) as caught:
        load(url, limits=limits)
    first = caught.value.diagnostics[0]
    assert first.code is codes.SERVER_UNREACHABLE
    assert "200 ms" in first.message
    assert first.notes == ("asked 2 times",)


def test_truncated_answer_is_refused(load: Loader, train: TorchKernel) -> None:
    fake = FakeServer(train.logits, change=lambda answer, _: json.dumps(answer).encode()[:-20])
    with serving(fake) as url, pytest.raises(Refusal) as caught:
        load(url)
    first = caught.value.diagnostics[0]
    assert first.code is codes.SERVER_REPLY
    assert "no whole JSON" in first.message
    assert len(fake.questions) == 3  # it was retried: a connection may break


def test_endless_answer_is_cut_off(load: Loader, train: TorchKernel) -> None:
    limits = Limits(answer=20.0, attempts=1, size=2000)
    fake = FakeServer(train.logits, change=lambda answer, _: b" " * 4000)
    with serving(fake) as url, pytest.raises(Refusal) as caught:
        load(url, limits=limits)
    assert "more than 2000 bytes" in caught.value.diagnostics[0].message


def test_unreachable_server_is_refused(load: Loader) -> None:
    with pytest.raises(Refusal) as caught:
        load("http://127.0.0.1:9")
    assert caught.value.diagnostics[0].code is codes.SERVER_UNREACHABLE


def test_key_is_sent_and_never_printed(
    load: Loader, train: TorchKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the server repeats it in the text of its refusal."""
    monkeypatch.setenv("KCDSL_SERVER_KEY_TEST", "swordfish-4711")
    fake = FakeServer(train.logits)
    with serving(fake) as url:
        server = load(url, key="KCDSL_SERVER_KEY_TEST")
        assert fake.headers[-1]["Authorization"] == "Bearer swordfish-4711"
        assert "swordfish" not in repr(server) + json.dumps(server.fingerprint())
        fake.change = lambda answer, _: {**answer, "model": "other"}
    monkeypatch.setenv("KCDSL_SERVER_KEY_TEST", "two\nlines")
    with pytest.raises(Refusal) as caught:
        load(url, key="KCDSL_SERVER_KEY_TEST")
    assert "lines" not in str(caught.value.diagnostics[0].message)
    monkeypatch.delenv("KCDSL_SERVER_KEY_TEST")
    with pytest.raises(Refusal) as caught:
        load(url, key="KCDSL_SERVER_KEY_TEST")
    assert "KCDSL_SERVER_KEY_TEST is not set" in caught.value.diagnostics[0].message


def test_changed_server_version_is_refused_at_the_end(
    load: Loader, train: TorchKernel, requests: tuple[Request, ...]
) -> None:
    """The version changes behind one address; the answers do not."""
    fake = FakeServer(train.logits)
    with serving(fake) as url:
        server = load(url, tokens=2)
        fake.pages["/version"] = {"version": "1.2.4"}
        with pytest.raises(Refusal) as caught:
            gather_rollouts(server, train, requests[:2], 0)
    assert caught.value.diagnostics[0].code is codes.SERVER_CHANGED
    assert "1.2.4" in caught.value.diagnostics[0].message


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("mode", "values", "temperature", "good"),
    [
        ("raw_logprobs", "processed", "7/10", False),
        ("processed_logprobs", "processed", "7/10", True),
        ("raw_logprobs", "processed", "1", True),
        ("processed_logprobs", "raw", "1", True),
        ("raw_logits", "raw", "1", False),
    ],
)
def test_vllm_logprob_mode_is_compared_with_the_contract(
    load: Loader, train: TorchKernel, mode: str, values: str, temperature: str, good: bool
) -> None:
    said = {"vllm_config": {"model_config": {"logprobs_mode": mode}}}
    fake = FakeServer(train.logits, pages={"/server_info?config_format=json": said})
    with serving(fake) as url:
        if good:
            load(url, values, temperature=temperature)
            return
        with pytest.raises(Refusal) as caught:
            load(url, values, temperature=temperature)
    assert caught.value.diagnostics[0].code is codes.SERVER_SEMANTICS
    assert mode in caught.value.diagnostics[0].message


@pytest.mark.parametrize("listed", [7, True, "tiny", {"id": "tiny"}, None])
def test_malformed_model_list_is_refused(load: Loader, train: TorchKernel, listed: object) -> None:
    fake = FakeServer(train.logits, pages={"/v1/models": {"data": listed}})
    with serving(fake) as url, pytest.raises(Refusal) as caught:
        load(url)
    assert caught.value.diagnostics[0].code is codes.SERVER_REPLY


def test_long_model_lists_are_abbreviated_in_messages(load: Loader, train: TorchKernel) -> None:
    listed = [{"id": f"{i}{'x' * 10_000}"} for i in range(1000)]
    fake = FakeServer(train.logits, pages={"/v1/models": {"data": listed}})
    with serving(fake) as url, pytest.raises(Refusal) as caught:
        load(url)
    assert len(caught.value.diagnostics[0].message) < 2000


@pytest.mark.parametrize("owner", ["vllm", "sglang", "tensorrt_llm", "llamacpp", "someone"])
def test_request_contains_every_sampling_parameter(
    load: Loader, train: TorchKernel, owner: str
) -> None:
    """Defaults that change the distribution, such as llama.cpp's `top_k` of 40, are overridden."""
    fake = FakeServer(train.logits, owner=owner)
    with serving(fake) as url:
        load(url, "raw")
    body = fake.questions[0]
    assert (body["temperature"], body["top_p"], body["n"], body["echo"]) == (1.0, 1.0, 1, False)
    none = {"vllm": -1, "sglang": -1}.get(owner, 0)
    assert body.get("top_k", 0) == none
    assert body.get("min_p", 0.0) == 0.0
    assert ("top_k" in body) == (owner != "someone")
    penalties = {"repetition_penalty", "repeat_penalty"} & body.keys()
    assert all(body[name] == 1.0 for name in penalties)
    assert bool(penalties) == (owner != "someone")


def test_sampling_settings_without_a_parameter_are_refused(
    load: Loader, train: TorchKernel
) -> None:
    with (
        serving(FakeServer(train.logits, owner="someone")) as url,
        pytest.raises(Refusal) as caught,
    ):
        load(url, top_k=4)
    assert caught.value.diagnostics[0].code is codes.SERVER_SEMANTICS


# --- lies that only the numbers show -------------------------------------------------------------


def named(
    server: ServerKernel, train: TorchKernel, requests: tuple[Request, ...]
) -> dict[str, Precheck]:
    """Return the preconditions that failed."""
    found: ServerRollouts = gather_rollouts(server, train, requests, 5)
    assert not found.failures
    temperature = server.semantics.temperature
    subject = Recorded(
        tuple(found.rollouts.values()), temperature, {"all": len(requests)},
        Semantics("processed", temperature), server.semantics, found.policies, True,
    )  # fmt: skip
    return {c.name: c for c in recorded_prechecks(subject) if c.outcome == "failed"}


PLANTED: dict[str, tuple[Mapping[str, Any], str, str]] = {
    "honest": ({}, "1", ""),
    "honest at 0.7": ({}, "7/10", ""),
    "values of temperature 1, tokens of 0.7": ({"said": 1.0}, "7/10", "temperature_fit"),
    "values of 0.5, tokens of 1.5": ({"drawn": 1.5}, "1/2", "sampling_law"),
    "values and tokens of 1 instead of 0.7": (
        {"said": 1.0, "drawn": 1.0}, "7/10", "temperature_fit",
    ),
    "greedy": ({"greedy": True}, "1", "sampling_law"),
    "silently cut off": ({"cut": 2}, "1", "sampling_law"),
    "values of the next token": ({"change": lambda a, _: _shifted(a)}, "1", "alignment_shift"),
}  # fmt: skip


def _shifted(answer: Answer) -> Answer:
    """Assign to each token the values of the next."""
    found = logs(answer)
    found["token_logprobs"] = [*found["token_logprobs"][1:], found["token_logprobs"][0]]
    found["top_logprobs"] = None
    return answer


@pytest.mark.full
@pytest.mark.parametrize("name", PLANTED)
def test_diagnoses_name_undeclared_faults(
    name: str, load: Loader, train: TorchKernel, requests: tuple[Request, ...]
) -> None:
    planted, temperature, expected = PLANTED[name]
    fake = FakeServer(train.logits, **planted)
    with serving(fake) as url:
        found = named(load(url, temperature=temperature, tokens=40, top=2), train, requests)
    if not expected:
        assert not found
        return
    assert expected in found, {n: c.detail for n, c in found.items()}
    assert found[expected].blocking
