"""What became of a question to a server, and how it is kept for an evaluation that goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from kcdsl.diagnostics import Refusal, codes
from kcdsl_backends.empirical.rollouts.record import Semantics, Side, TopLogs
from kcdsl_backends.empirical.servers.kernel import Continuation, ServerKernel


@dataclass(frozen=True, slots=True)
class Unusable:
    """An answer that cannot be used, and why. It is kept: whoever asks again until an answer suits
    no longer has a sample."""

    reason: str


@dataclass(frozen=True, slots=True)
class Silence:
    """No answer. It is not kept: the next evaluation asks again."""

    refusal: Refusal

    @property
    def reason(self) -> str:
        """Return why there is none."""
        return _reason(self.refusal)


Answer = Continuation | Unusable | Silence


def answer_of(server: ServerKernel, prompt: tuple[int, ...], seed: int) -> Answer:
    """Let a server draw after a prompt; raises Refusal where another server answers."""
    try:
        return server.draw(prompt, seed)
    except Refusal as refusal:
        code = refusal.diagnostics[0].code
        if code is codes.SERVER_CHANGED:
            raise
        if code is codes.SERVER_UNREACHABLE:
            return Silence(refusal)
        return Unusable(_reason(refusal))
    except (RuntimeError, ValueError) as error:
        return Unusable(str(error) or type(error).__name__)


def _reason(refusal: Refusal) -> str:
    first = refusal.diagnostics[0]
    return f"{first.code}: {first.message}"


# --- bytes ---------------------------------------------------------------------------------------


def to_bytes(answer: Continuation | Unusable) -> bytes:
    """Return an answer as bytes: a line of JSON, then every float64 and int64 as it is."""
    if isinstance(answer, Unusable):
        return json.dumps({"unusable": answer.reason}).encode() + b"\n"
    top = answer.side.top
    head = {"tokens": list(answer.tokens), "top": None if top is None else top.ids.shape[1]}
    lists = b"" if top is None else top.ids.tobytes() + top.logs.tobytes()
    return json.dumps(head).encode() + b"\n" + answer.side.logs.tobytes() + lists


def from_bytes(content: bytes, semantics: Semantics) -> Continuation | Unusable:
    """Return the answer of `to_bytes`; `semantics` is what the server's values are of.

    Raises ValueError or KeyError for other bytes.
    """
    line, _, rest = content.partition(b"\n")
    head = json.loads(line)
    if "unusable" in head:
        return Unusable(str(head["unusable"]))
    tokens, width = tuple(head["tokens"]), head["top"]
    length = len(tokens)
    listed = 0 if width is None else length * width
    if len(rest) != 8 * (length + 2 * listed):
        raise ValueError(f"{len(rest)} bytes for {length} tokens")
    logs = np.frombuffer(rest, np.float64, length).copy()
    top = None
    if width is not None:
        ids = np.frombuffer(rest, np.int64, listed, 8 * length).copy()
        theirs = np.frombuffer(rest, np.float64, listed, 8 * (length + listed)).copy()
        top = TopLogs(ids.reshape(length, width), theirs.reshape(length, width))
    return Continuation(tokens, Side(logs, semantics, top))
