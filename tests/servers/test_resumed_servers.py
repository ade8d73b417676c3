"""An interrupted evaluation of a server resumes with its answers, if the server is unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcdsl.check.compile import load_contract
from kcdsl.diagnostics import Refusal, codes
from kcdsl_backends.empirical.backend import BACKEND
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel
from kcdsl_backends.empirical.sources.rollouts.record import Semantics, Side, TopLogs
from kcdsl_backends.empirical.sources.servers.kernel import (
    Continuation,
    UnusableReply,
    from_bytes,
    to_bytes,
)
from kcdsl_backends.empirical.table.checkpoint import RunCheckpoint
from kcdsl_backends.executors import THREAD
from tests.conftest import Cli
from tests.servers.conftest import QUICK
from tests.support.fake_server import FakeServer, serving

pytestmark = pytest.mark.usefixtures("shared_files")

COUNT = 8
CONTRACT = """\
kcdsl: 1
contract: served
version: 1.0.0
model: {{checkpoint: {folder}/model.safetensors, architecture: llama}}
data: requests.jsonl
kernels:
  train: {{run: torch.eager}}
  infer: {{run: server, url: "{url}", tokens: {tokens}, logprobs: {{values: processed}}{more}}}
slices: {{all: {{}}, long: {{where: length >= 20}}}}
clauses:
  N-K3: {{require: mean(k3) <= {limit}, level: L2}}
  S-TOP: {{require: mean(top1_overlap) >= 90%, level: L2}}
"""


class Killed(BaseException):
    """Ends an evaluation as a kill does: nothing catches it."""


@dataclass
class Lab:
    """A contract in a folder, a server, and evaluations that may be interrupted."""

    folder: Path
    tiny: Path
    fake: FakeServer
    url: str
    told: list[str] = field(default_factory=list)
    seed: int = 0

    def write(self, *, limit: str = "1e-3", tokens: int = 6, more: str = "") -> None:
        text = CONTRACT.format(
            folder=self.tiny, url=self.url, limit=limit, tokens=tokens, more=more
        )
        (self.folder / "contract.yaml").write_text(text, "utf-8")

    def evaluate(self, kept: bool = True, last: int | None = None) -> tuple[str, bytes]:
        """Return report and trace; with `last`, interrupt the evaluation after so many requests."""
        program, _ = load_contract(self.folder / "contract.yaml")
        self.told.clear()
        checkpoint = RunCheckpoint(self.folder / "evaluate.journal", tell=self.told.append)

        def progress(stage: str, done: int, total: int) -> None:
            if stage == "server and training kernel" and done == last:
                raise Killed

        self.fake.questions.clear()
        try:
            setting = BACKEND.prepare(program, self.folder, seed=self.seed)
            evidence = BACKEND.gather(setting, progress, checkpoint if kept else None)
        finally:
            checkpoint.close()
        # The record of the resumption is the one difference.
        notes = tuple(note for note in evidence.notes if not note.startswith("resumed: "))
        evidence = replace(evidence, notes=notes)
        report = BACKEND.conclude(evidence)
        return report.dumps(), BACKEND.write_trace(evidence, report)

    def interrupted(self, last: int = 5) -> None:
        with pytest.raises(Killed):
            self.evaluate(last=last)
        for thread in threading.enumerate():  # a kill ends them; here they end by themselves
            if thread.name == THREAD:
                thread.join(20)

    @property
    def prompts(self) -> list[bytes]:
        """Return the prompts of the last evaluation, without trial and repeat requests."""
        return [bytes(q["prompt"]) for q in self.fake.questions[2:]]


@pytest.fixture
def lab(
    tmp_path: Path, tiny_folder: Path, train: TorchKernel, monkeypatch: pytest.MonkeyPatch
) -> Any:
    monkeypatch.setattr("kcdsl_backends.empirical.sources.servers.kernel.Limits", lambda: QUICK)
    lines = (tiny_folder / "prompts.jsonl").read_text("utf-8").splitlines()[:COUNT]
    (tmp_path / "requests.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    fake = FakeServer(train.logits)
    with serving(fake) as url:
        found = Lab(tmp_path, tiny_folder, fake, url)
        found.write()
        yield found


@pytest.mark.full
@pytest.mark.parametrize("last", [1, 5, COUNT])
@pytest.mark.parametrize("more", ["", ", concurrency: 3"])
def test_resumed_run_equals_an_uninterrupted_one_and_repeats_nothing(
    lab: Lab, last: int, more: str
) -> None:
    lab.write(more=more)
    whole = lab.evaluate(kept=False)
    lab.interrupted(last)
    first = lab.prompts
    assert lab.evaluate() == whole
    again = lab.prompts
    assert len(set(first)) == len(first)
    assert len(set(again)) == len(again)
    assert lab.told == [f"resumed: {COUNT - len(again)} of {COUNT} requests"]
    # requests in flight at the kill are sent again
    assert last <= COUNT - len(again) <= len(first)
    assert more or not set(first) & set(again)


@pytest.mark.full
def test_run_resumes_after_two_kills(lab: Lab) -> None:
    whole = lab.evaluate(kept=False)
    lab.interrupted(2)
    lab.interrupted(5)
    assert lab.told == [f"resumed: 2 of {COUNT} requests"]
    assert lab.evaluate() == whole
    assert lab.told == [f"resumed: 5 of {COUNT} requests"]


def _page(name: str, value: Any) -> Callable[[Lab], None]:
    return lambda lab: lab.fake.pages.update({name: value})


def _said(name: str, value: Any) -> Callable[[Lab], None]:
    return lambda lab: setattr(lab.fake, name, value)


def _other_values(lab: Lab) -> None:
    """Change the last bits of the values, as another build or another cache does."""
    before = lab.fake.logits
    lab.fake.logits = lambda ids: before(ids) * (1 + 1e-6)


OTHERS: dict[str, tuple[Callable[[Lab], None], str]] = {
    "version": (_page("/version", {"version": "1.2.4"}), "version '1.2.3', then '1.2.4'"),
    "model": (
        _page("/v1/models", {"data": [{"id": "tiny", "owned_by": "sglang"}]}),
        "kind 'vLLM', then 'SGLang'",
    ),
    "fingerprint": (_said("stamp", "fp_2"), "system_fingerprint None, then 'fp_2'"),
    "values": (_other_values, "other tokens or values than before"),
    "settings": (_said("drawn", 3.0), "other tokens or values than before"),
}


@pytest.mark.full
@pytest.mark.parametrize("other", OTHERS)
def test_changed_server_is_reported_and_asked_everything_again(lab: Lab, other: str) -> None:
    change, words = OTHERS[other]
    lab.interrupted()
    change(lab)
    found = lab.evaluate()
    assert len(lab.told) == 1
    assert lab.told[0].startswith("not resumed: ")
    assert words in lab.told[0]
    assert len(lab.prompts) == COUNT
    assert found == lab.evaluate(kept=False)
    lab.evaluate()
    assert lab.told == [f"resumed: {COUNT} of {COUNT} requests"], "the new one is kept"


@pytest.mark.full
def test_nondeterministic_server_is_never_resumed(lab: Lab) -> None:
    noise = np.random.default_rng(0)

    def wobbly(answer: Any, question: Any) -> Any:
        values = answer["choices"][0]["logprobs"]["token_logprobs"]
        values[:] = [value - 1e-5 * noise.random() for value in values]
        answer["choices"][0]["logprobs"]["top_logprobs"] = None
        return answer

    lab.fake.change = wobbly
    lab.write(limit="1")
    text = (lab.folder / "contract.yaml").read_text("utf-8")
    (lab.folder / "contract.yaml").write_text(text[: text.index("  S-TOP")], "utf-8")
    lab.interrupted()
    lab.evaluate()
    assert "does not repeat itself" in lab.told[0]
    assert len(lab.prompts) == COUNT


@pytest.mark.full
def test_refused_repeat_request_does_not_identify_the_server(lab: Lab) -> None:
    """The refusal is equal both times, which does not identify the source of kept answers."""
    longest = max((lab.folder / "requests.jsonl").read_text("utf-8").splitlines(), key=len)
    prompt = json.loads(longest)["text"].encode()

    def lie(answer: Any, question: Any) -> Any:
        if bytes(question["prompt"]) == prompt and question["max_tokens"] > 2:
            answer["choices"][0]["finish_reason"] = "content_filter"
        return answer

    lab.fake.change = lie
    lab.interrupted()
    lab.evaluate()
    assert lab.told == [
        "not resumed: the answer by which the server would be known again cannot be used"
    ]
    assert len(lab.prompts) == COUNT


@pytest.mark.full
@pytest.mark.parametrize(
    "change",
    [
        lambda lab: lab.write(limit="1e-2"),
        lambda lab: lab.write(tokens=7),
        lambda lab: lab.write(more=", concurrency: 2"),
        lambda lab: setattr(lab, "seed", 1),
        lambda lab: (lab.folder / "requests.jsonl").write_text(
            (lab.folder / "requests.jsonl").read_text("utf-8").replace("User", "Uxer", 1), "utf-8"
        ),
    ],
    ids=["threshold", "tokens", "concurrency", "seed", "prompts"],
)
def test_changed_requests_restart_the_evaluation(lab: Lab, change: Callable[[Lab], Any]) -> None:
    lab.interrupted()
    change(lab)
    found = lab.evaluate()
    assert lab.told == []
    assert len(lab.prompts) == COUNT
    assert found == lab.evaluate(kept=False)


@pytest.mark.full
def test_answers_of_two_servers_are_discarded(lab: Lab) -> None:
    """It is unknown which server gave which answer, even if the first one is back later."""
    at = {"done": 0}

    def turn(answer: Any, question: Any) -> Any:
        at["done"] += 1
        if at["done"] == 2 + COUNT:
            lab.fake.pages["/version"] = {"version": "2"}
        return answer

    lab.fake.change = turn
    with pytest.raises(Refusal) as caught:
        lab.evaluate()
    assert caught.value.diagnostics[0].code is codes.SERVER_CHANGED
    assert not (lab.folder / "evaluate.journal").exists()
    lab.fake.pages.clear()
    lab.evaluate()
    assert lab.told == []
    assert len(lab.prompts) == COUNT


@pytest.mark.full
def test_remaining_requests_are_sent_after_an_outage(lab: Lab) -> None:
    whole = lab.evaluate(kept=False)
    first = json.loads((lab.folder / "requests.jsonl").read_text("utf-8").splitlines()[4])
    prompt = list(first["text"].encode())

    def fail(answer: Any, question: Any) -> Any:
        if question["prompt"] == prompt:
            lab.fake.statuses = [500] * 1000
        return answer

    lab.fake.change = fail
    with pytest.raises(Refusal) as caught:
        lab.evaluate()
    assert caught.value.diagnostics[0].code is codes.SERVER_UNREACHABLE
    lab.fake.change, lab.fake.statuses = (lambda answer, question: answer), []
    assert lab.evaluate() == whole
    assert lab.told == [f"resumed: 5 of {COUNT} requests"]


@pytest.mark.full
def test_unusable_answer_is_kept_and_not_requested_again(lab: Lab) -> None:
    first = json.loads((lab.folder / "requests.jsonl").read_text("utf-8").splitlines()[1])
    prompt = list(first["text"].encode())

    def null(answer: Any, question: Any) -> Any:
        if question["prompt"] == prompt and question["max_tokens"] > 2:
            answer["choices"][0]["logprobs"]["token_logprobs"][0] = None
        return answer

    lab.fake.change = null
    whole = lab.evaluate(kept=False)
    assert "KC655" in whole[0]
    lab.interrupted()
    lab.fake.change = lambda answer, question: answer
    assert lab.evaluate() == whole
    assert {row["verdict"] for row in json.loads(whole[0])["clauses"]} == {"invalid_evidence"}


@pytest.mark.full
def test_request_ids_may_contain_any_text(lab: Lab) -> None:
    path = lab.folder / "requests.jsonl"
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    for row, odd in zip(rows, ("a\0b", "\0", "answer", "server", "\n"), strict=False):
        row["id"] = odd
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    whole = lab.evaluate(kept=False)
    lab.interrupted()
    assert lab.evaluate() == whole
    assert lab.told == [f"resumed: 5 of {COUNT} requests"]


@pytest.mark.full
def test_truncated_records_are_requested_again(lab: Lab) -> None:
    whole = lab.evaluate(kept=False)
    lab.interrupted()
    path = lab.folder / "evaluate.journal"
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    assert lab.evaluate() == whole
    assert lab.told == [f"resumed: 4 of {COUNT} requests"]
    path.write_bytes(content[:400])
    assert lab.evaluate() == whole
    assert not any(told.startswith("resumed") for told in lab.told)


# --- the real server -----------------------------------------------------------------------------


@pytest.mark.full
def test_killed_process_resumes_with_the_real_server(
    llama_cpp: str, tiny_folder: Path, cli: Cli, tmp_path: Path
) -> None:
    """SIGKILL during requests; the report equals that of an uninterrupted process."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        text = CONTRACT.format(folder=tiny_folder, url=llama_cpp, limit="1e-3", tokens=48, more="")
        (tmp_path / name / "contract.yaml").write_text(text, "utf-8")
        rows = (tiny_folder / "prompts.jsonl").read_bytes()
        (tmp_path / name / "requests.jsonl").write_bytes(rows)
    assert cli("evaluate", "contract.yaml", cwd=tmp_path / "whole").code == 0
    checkpoint = tmp_path / "killed" / "out" / "evaluate.journal"
    process = subprocess.Popen(
        [sys.executable, "-m", "kcdsl", "evaluate", "contract.yaml"],
        cwd=tmp_path / "killed",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not checkpoint.exists() or checkpoint.stat().st_size < 40_000:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    ran = cli("evaluate", "contract.yaml", cwd=tmp_path / "killed")
    assert ran.code == 0, ran.stderr
    assert "resumed: " in ran.stderr
    assert not checkpoint.exists()
    one, two = ((tmp_path / f / "out" / "trace.jsonl").read_bytes() for f in ("whole", "killed"))
    assert one == two
    first, second = (
        json.loads((tmp_path / f / "out" / "report.json").read_text()) for f in ("whole", "killed")
    )
    assert second["notes"].pop().startswith("resumed: ")
    assert first == second


# --- bytes ---------------------------------------------------------------------------------------

LOGS = st.floats(max_value=0, allow_nan=False, width=64)


@given(data=st.data(), length=st.integers(1, 6), width=st.none() | st.integers(1, 5))
def test_stored_answers_are_bitwise_equal(
    data: st.DataObject, length: int, width: int | None
) -> None:
    semantics = Semantics("raw")
    logs = np.array(data.draw(st.lists(LOGS, min_size=length, max_size=length)))
    tokens = tuple(data.draw(st.lists(st.integers(0, 2**40), min_size=length, max_size=length)))
    top = None
    if width is not None:
        ids = np.arange(length * width, dtype=np.int64).reshape(length, width)
        flat = data.draw(st.lists(LOGS, min_size=length * width, max_size=length * width))
        top = TopLogs(ids, np.array(flat).reshape(length, width))
    answer = Continuation(tokens, Side(logs, semantics, top))
    content = to_bytes(answer)
    found = from_bytes(content, semantics)
    assert isinstance(found, Continuation)
    assert to_bytes(found) == content
    assert found.tokens == answer.tokens
    assert found.side.logs.tobytes() == logs.tobytes()
    if top is not None:
        assert found.side.top is not None
        assert found.side.top.ids.tolist() == top.ids.tolist()
        assert found.side.top.logs.tobytes() == top.logs.tobytes()
    with pytest.raises(json.JSONDecodeError):
        from_bytes(content[:-1], semantics)


@given(st.text(max_size=40))
def test_stored_failure_reason_is_restored(reason: str) -> None:
    assert from_bytes(to_bytes(UnusableReply(reason)), Semantics("raw")) == UnusableReply(reason)
