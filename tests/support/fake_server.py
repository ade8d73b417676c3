"""A completion server that answers from a model's logits, or with a planted fault.

Covers only faults that a real server does not show on demand.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch
from torch import Tensor

Answer = dict[str, Any]
Change = Callable[[Answer, Mapping[str, Any]], Any]


@dataclass
class FakeServer:
    """Behaviour of the server.

    `logits` computes the model's logits. `drawn` and `said` are the temperatures of sampling and of
    the reported log-probabilities, None for the requested one; `greedy` takes the likeliest token.
    `change` alters an answer; bytes are sent unchanged. `statuses` are sent before the answer, and
    `wait` is a delay in seconds.
    """

    logits: Callable[[Sequence[int]], Tensor]
    owner: str = "vllm"
    drawn: float | None = None
    said: float | None = None
    greedy: bool = False
    cut: int = 0
    """The number of tokens that samples are truncated to, whatever the request states."""
    change: Change = lambda answer, question: answer
    statuses: list[int] = field(default_factory=list)
    wait: float = 0.0
    pages: dict[str, Any] = field(default_factory=dict)
    questions: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    streams: bool = True
    """False: it answers as a whole, even if a request asks for a stream."""
    lumps: tuple[int, ...] = ()
    """The number of events of a stream that are sent together."""
    each: int = 1
    """The number of tokens per event."""
    pace: Callable[[int], None] = lambda sent: None
    """Called before each chunk of a stream, headers first, with the number of earlier chunks."""
    stamp: str | None = None
    """The `system_fingerprint` of its answers."""
    inside: int = 0
    """The number of requests in progress."""
    most: int = 0
    """The largest number of concurrent requests so far."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, path: str) -> Any:
        """Return the resource at a path, or None."""
        if path in self.pages:
            return self.pages[path]
        if path == "/v1/models":
            return {"data": [{"id": "tiny", "owned_by": self.owner}]}
        return {"version": "1.2.3"} if path == "/version" else None

    def answer(self, question: Mapping[str, Any]) -> Answer:
        """Return the answer to a request, before it is changed."""
        random = np.random.default_rng(question["seed"])
        context = list(question["prompt"])
        prompt = len(context)
        asked = float(question["temperature"])
        tokens, values, tops = [], [], []
        for _ in range(question["max_tokens"]):
            row = self.logits(context)[-1]
            law = torch.log_softmax(row / (self.drawn or asked), -1)
            if self.cut:
                law = law.masked_fill(law < law.topk(self.cut).values[-1], -torch.inf)
                law = torch.log_softmax(law, -1)
            shown = torch.log_softmax(row / (self.said or asked), -1)
            chances = law.exp().numpy()
            one = int(law.argmax()) if self.greedy else int(random.choice(len(chances), p=chances))
            best = shown.topk(max(1, question["logprobs"]))
            rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            tokens.append(f"token_id:{one}")
            values.append(float(shown[one]))
            tops.append({f"token_id:{token}": value for token, value in rows})
            context.append(one)
        logs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
        choice = {"index": 0, "text": "", "logprobs": logs, "finish_reason": "length"}
        usage = {"prompt_tokens": prompt, "completion_tokens": len(tokens)}
        found: Answer = {"model": "tiny", "choices": [choice], "usage": usage}
        return found if self.stamp is None else {**found, "system_fingerprint": self.stamp}

    def sendings(self, answer: Answer) -> Iterator[bytes]:
        """Yield the chunks of a streamed answer."""
        choice, logs = answer["choices"][0], answer["choices"][0]["logprobs"]
        whole = {name: value for name, value in answer.items() if name != "usage"}
        count = len(logs["tokens"])
        events = []
        for at in range(0, count, self.each):
            end = at + self.each
            part = {
                **choice,
                "logprobs": {name: values[at:end] for name, values in logs.items()},
                "finish_reason": choice["finish_reason"] if end >= count else None,
            }
            events.append(b"data: " + json.dumps({**whole, "choices": [part]}).encode() + b"\n\n")
        lumps = self.lumps or (1,) * len(events)
        for size in lumps:
            yield b"".join(events[:size])
            del events[:size]
        yield b"data: [DONE]\n\n"


@contextmanager
def serving(fake: FakeServer) -> Iterator[str]:
    """Serve a fake on this machine; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            fake.headers.append(dict(self.headers))
            found = fake.get(self.path)
            self._send(404 if found is None else 200, {} if found is None else found)

        def do_POST(self) -> None:
            fake.headers.append(dict(self.headers))
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with fake.lock:
                fake.questions.append(question)
                fake.inside += 1
                fake.most = max(fake.most, fake.inside)
            try:
                time.sleep(fake.wait)
                status = fake.statuses.pop(0) if fake.statuses else 200
                good = fake.change(fake.answer(question), question) if status == 200 else {}
            finally:
                with fake.lock:
                    fake.inside -= 1
            if status == 200 and fake.streams and question["stream"]:
                self._stream(good)
            else:
                self._send(status, good)

        def _stream(self, answer: Answer) -> None:
            fake.pace(0)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.end_headers()
            for sent, data in enumerate(fake.sendings(answer), 1):
                fake.pace(sent)
                self.wfile.write(data)

        def _send(self, status: int, found: Any) -> None:
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
