"""Generation times are measured on streaming servers, and never where answers are not streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Barrier, Semaphore
from typing import Any

import pytest

from kcdsl.check.compile import load_contract
from kcdsl.diagnostics import Refusal, codes
from kcdsl.verdict.model import InvalidEvidence, verdict_name
from kcdsl.verdict.report import Report
from kcdsl_backends.empirical.backend import BACKEND
from kcdsl_backends.empirical.sources.kernels import timing as runtime
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel
from kcdsl_backends.empirical.sources.servers.kernel import ServerKernel
from kcdsl_backends.requests import Request
from tests.servers.conftest import QUICK, Loader
from tests.support.fake_server import Answer, FakeServer, serving

pytestmark = pytest.mark.usefixtures("shared_files")

TOKENS = 8
PREFILL, STEP = 2.0, 0.25
CONTRACT = """\
kcdsl: 1
contract: served
version: 1.0.0
model: {{checkpoint: {folder}/model.safetensors, architecture: llama}}
data: requests.jsonl
kernels:
  train: {{run: torch.eager}}
  infer: {{run: server, url: "{url}", tokens: 8, logprobs: {{values: processed}}}}
slices: {{all: {{}}}}
clauses:
  R-TTFT: {{require: p50(ttft) <= 1000 s, level: L1}}
  R-TPOT: {{require: p50(tpot) <= 20 ms, level: L1}}
  R-TAIL: {{require: p95(ttft) <= 1000 s, level: L1}}
  R-WHOLE: {{require: p50(latency) <= 1000 s, level: L1}}
  R-RATE: {{require: throughput >= 0.001 tok/s, level: L1}}
"""


class Clock:
    """A clock that the server controls: time passes once everything sent so far was received."""

    def __init__(self) -> None:
        self.now, self.looks = 0.0, Semaphore(0)

    def __call__(self) -> float:
        self.looks.release()
        return self.now

    def passing(self, sent: int) -> None:
        """Advance the clock before a chunk: by the prefill time, then by a step each."""
        if sent == 0:  # earlier readings of the clock do not count
            while self.looks.acquire(blocking=False):
                pass
            return
        assert self.looks.acquire(timeout=60)
        self.now += PREFILL if sent == 1 else STEP


@pytest.fixture
def fake(train: TorchKernel) -> FakeServer:
    return FakeServer(train.logits)


def times(server: ServerKernel, request: Request, clock: Callable[[], float]) -> Any:
    """Return the times of one generation."""

    def generate(request: Request, clock: runtime.Clock) -> Any:
        return server.stream(request.tokens, 0, clock)

    found = runtime.time_served(generate, [request], rounds=1, seconds=1e9, clock=clock)
    return found.runs[0]


def test_prefill_and_decode_times_are_separated(
    fake: FakeServer, load: Loader, requests: tuple[Request, ...]
) -> None:
    with serving(fake) as url:
        server = load(url, tokens=TOKENS)
        clock = Clock()
        fake.pace = clock.passing
        run = times(server, requests[0], clock)
    assert run.tokens == TOKENS
    assert {name: value.tolist() for name, value in run.values.items()} == {
        "ttft": [PREFILL], "tpot": [STEP], "latency": [PREFILL + STEP * (TOKENS - 1)]
    }  # fmt: skip
    assert fake.questions[-1]["stream"] is True
    assert fake.questions[-1]["ignore_eos"] is True


def test_tokens_in_one_event_share_the_time_of_a_step(
    fake: FakeServer, load: Loader, requests: tuple[Request, ...]
) -> None:
    """With two tokens per event, the second token of the first event took no observable time."""
    fake.each = 2
    with serving(fake) as url:
        server = load(url, tokens=TOKENS)
        clock = Clock()
        fake.pace = clock.passing
        run = times(server, requests[0], clock)
    assert run.values["ttft"].tolist() == [PREFILL]
    assert run.values["tpot"].tolist() == [(STEP * 3) / 6]


def test_withheld_token_is_not_counted(
    fake: FakeServer, load: Loader, requests: tuple[Request, ...]
) -> None:
    """llama.cpp does so inside a character: it counts the token but never sends it."""
    plain = fake.sendings

    def sendings(answer: Answer) -> Iterator[bytes]:
        *events, last = plain(answer)
        yield from (*events[:3], *events[4:])
        yield b'data: {"choices": [], "usage": {"completion_tokens": 8}}\n\n'
        yield last

    with serving(fake) as url:
        server = load(url, tokens=TOKENS)
        clock = Clock()
        fake.pace = clock.passing
        fake.sendings = sendings  # type: ignore[method-assign]
        run = times(server, requests[0], clock)
    assert run.tokens == TOKENS - 1
    assert not run.problems
    assert run.values["tpot"].tolist() == [STEP]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"streams": False}, "does not stream"),
        ({"lumps": (TOKENS,)}, "not streamed: 8 tokens came in 1 piece"),
        ({"lumps": (5, 2, 1)}, "not streamed: 8 tokens came in 3 pieces"),
        ({"each": TOKENS}, "not streamed: 8 tokens came in 1 piece"),
    ],
)
def test_answer_sent_at_once_is_refused(
    fake: FakeServer,
    load: Loader,
    requests: tuple[Request, ...],
    change: dict[str, Any],
    reason: str,
) -> None:
    with serving(fake) as url:
        server = load(url, tokens=TOKENS)
        clock = Clock()
        fake.pace = clock.passing
        for name, value in change.items():
            setattr(fake, name, value)
        with pytest.raises(Refusal) as refused:
            list(server.stream(requests[0].tokens, 0, clock))
    assert refused.value.diagnostics[0].code is codes.SERVER_REPLY
    assert reason in refused.value.diagnostics[0].message


def without_finish_reason(answer: Answer) -> Answer:
    """Return an answer without a finish reason."""
    return {**answer, "choices": [{**answer["choices"][0], "finish_reason": None}]}


def without_last_token(answer: Answer) -> Answer:
    """Return an answer without its last token."""
    choice = answer["choices"][0]
    logs = {name: values[:-1] for name, values in choice["logprobs"].items()}
    return {**answer, "choices": [{**choice, "logprobs": logs}]}


def event(data: str) -> Callable[[Answer], bytes]:
    return lambda answer: f"data: {data}\n\n".encode()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("lie", "code", "reason"),
    [
        (without_finish_reason, codes.SERVER_REPLY, "ended for the reason None"),
        (without_last_token, codes.SERVER_REPLY, "ended at its limit with 7"),
        (lambda answer: {**answer, "model": "large"}, codes.SERVER_CHANGED, "'large'"),
        (event('{"choices": [{}, {}]}'), codes.SERVER_REPLY, "no text, or several"),
        (event('{"error": "no memory"}'), codes.SERVER_REPLY, "no text, or several"),
        (event('{"choices": [{"text": "a"}]}'), codes.SERVER_REPLY, "without log-probabilities"),
        (event("null"), codes.SERVER_REPLY, "no object"),
        (event("[]"), codes.SERVER_REPLY, "no object"),
        (event("{"), codes.SERVER_REPLY, "no JSON"),
        (event("[DONE]"), codes.SERVER_REPLY, "no drawn token"),
        (lambda answer: b"", codes.SERVER_REPLY, "no drawn token"),
    ],
)
def test_incomplete_stream_is_refused(
    fake: FakeServer, load: Loader, requests: tuple[Request, ...], lie: Any, code: Any, reason: str
) -> None:
    with serving(fake) as url:
        server = load(url, tokens=TOKENS)
        plain = fake.sendings

        def sendings(answer: Answer) -> Iterator[bytes]:
            found = lie(answer)
            return iter([found]) if isinstance(found, bytes) else plain(found)

        fake.sendings = sendings  # type: ignore[method-assign]
        with pytest.raises(Refusal) as refused:
            list(server.stream(requests[0].tokens, 0, Clock()))
    assert refused.value.diagnostics[0].code is code
    assert reason in refused.value.diagnostics[0].message


def test_refused_request_is_not_retried_when_timed(
    fake: FakeServer, load: Loader, requests: tuple[Request, ...]
) -> None:
    with serving(fake) as url:
        server = load(url, tokens=TOKENS)
        fake.statuses = [500, 200]
        with pytest.raises(Refusal) as refused:
            list(server.stream(requests[0].tokens, 0, Clock()))
        assert fake.statuses == [200]  # a second attempt would have its own time
    assert refused.value.diagnostics[0].code is codes.SERVER_UNREACHABLE


def test_timed_requests_use_the_concurrency_of_the_contract(
    requests: tuple[Request, ...],
) -> None:
    both = Barrier(2)

    def generate(request: Request, clock: runtime.Clock) -> Iterator[tuple[float, int]]:
        both.wait(60)
        yield clock(), 1
        yield clock(), 1

    found = runtime.time_served(generate, requests[:2], rounds=1, seconds=0, at_once=2)
    assert [run.key for run in found.runs] == [request.key for request in requests[:2]]
    assert all(not run.problems for run in found.runs)


# --- contracts -----------------------------------------------------------------------------------


@pytest.fixture
def decided(
    fake: FakeServer, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Report]]:
    """Return a function that evaluates a timing contract with a simulated clock."""
    monkeypatch.setattr("kcdsl_backends.empirical.sources.servers.kernel.Limits", lambda: QUICK)
    clock = Clock()
    fake.pace = clock.passing
    monkeypatch.setattr(runtime, "time_served", partial(runtime.time_served, clock=clock))
    lines = (tiny_folder / "prompts.jsonl").read_text("utf-8").splitlines()[:8]
    (tmp_path / "requests.jsonl").write_text("\n".join(lines) + "\n", "utf-8")

    with serving(fake) as url:

        def decide(seconds: float = 1e9) -> Report:
            text = CONTRACT.format(folder=tiny_folder, url=url)
            (tmp_path / "contract.yaml").write_text(text, "utf-8")
            program, _ = load_contract(tmp_path / "contract.yaml")
            setting = BACKEND.prepare(program, tmp_path, seconds=seconds)
            evidence = BACKEND.gather(setting, lambda stage, done, total: None)
            report = BACKEND.conclude(evidence)
            trace = tmp_path / "trace.parquet"
            trace.write_bytes(BACKEND.write_trace(evidence, report))
            assert BACKEND.conclude(BACKEND.read_trace(trace).evidence).dumps() == report.dumps()
            return report

        yield decide


@pytest.mark.full
def test_timing_clauses_are_decided_on_a_running_server(
    decided: Callable[..., Report],
) -> None:
    report = decided()
    rows = {row.clause: row for row in report.clauses}
    verdicts = {id: verdict_name(row.verdict) for id, row in rows.items() if id != "R-RATE"}
    assert verdicts == {
        "R-TTFT": "held", "R-TPOT": "violated", "R-TAIL": "inconclusive", "R-WHOLE": "held"
    }  # fmt: skip
    assert rows["R-RATE"].value == pytest.approx(TOKENS / (PREFILL + STEP * (TOKENS - 1)))
    assert rows["R-TTFT"].value == PREFILL
    assert rows["R-TPOT"].value == STEP
    assert rows["R-WHOLE"].value == PREFILL + STEP * (TOKENS - 1)
    assert rows["R-TTFT"].n == 8  # requests, not their runs
    assert any("8 streamed tokens" in note for note in report.notes)


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "reason"),
    [({"streams": False}, "does not stream"), ({"lumps": (TOKENS,)}, "is not streamed")],
)
def test_server_without_streaming_passes_no_timing_clause(
    fake: FakeServer, decided: Callable[..., Report], change: dict[str, Any], reason: str
) -> None:
    for name, value in change.items():
        setattr(fake, name, value)
    for row in decided(seconds=0.0).clauses:
        assert isinstance(row.verdict, InvalidEvidence), row
        assert reason in row.verdict.reason


@pytest.mark.full
def test_unreachable_server_ends_a_timed_evaluation(
    fake: FakeServer, decided: Callable[..., Report]
) -> None:
    def gone(sent: int) -> None:
        raise ConnectionError

    fake.pace = gone
    with pytest.raises(Refusal) as refused:
        decided()
    assert refused.value.diagnostics[0].code is codes.SERVER_UNREACHABLE
