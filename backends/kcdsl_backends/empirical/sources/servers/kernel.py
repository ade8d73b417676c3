"""The kernel behind a server: it draws tokens after prompts and states their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.diagnostics.model import at
from kcdsl.ir.kernels import KernelRef, Service
from kcdsl.model.adapters import find_adapter
from kcdsl.model.architecture import Model
from kcdsl.model.fingerprint import kernel_fingerprint
from kcdsl_backends.empirical.sources.kernels import NotRun
from kcdsl_backends.empirical.sources.kernels.engines import need
from kcdsl_backends.empirical.sources.rollouts.record import ROUNDING, Semantics, Side, TopLogs
from kcdsl_backends.empirical.sources.servers.dialects import (
    Identity,
    identify,
    question,
    refuse_unsettable,
    streamed,
)
from kcdsl_backends.empirical.sources.servers.replies import (
    Reply,
    StreamPart,
    Vocabulary,
    check_number,
    ends_of,
    read_part,
    read_reply,
)
from kcdsl_backends.empirical.sources.servers.transport import Limits, Transport, key_of

_SEEDS = 2**31
"""Number of seeds that every server accepts."""
_COMPLETIONS = "/v1/completions"
_TRIAL = 2
"""Number of tokens of the trial before the measurement."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The tokens [L] that were drawn after a prompt, with their log-probabilities."""

    tokens: tuple[int, ...]
    side: Side


@dataclass(frozen=True, slots=True)
class ServerKernel(NotRun):
    """A server that was identified, and drew a few tokens on trial."""

    lacks: ClassVar[str] = "a server draws after prompts, and gives no"
    instead: ClassVar[str] = (
        "metrics of drawn tokens, such as mean(k3) or p99(tv_is): `kcdsl explain adapters`"
    )

    ref: KernelRef
    service: Service
    transport: Transport
    identity: Identity
    vocabulary: Vocabulary
    longest: int | None
    prompts: Literal["ids", "text"] = "ids"
    stamp: str | None = None
    """The `system_fingerprint` of its first answer."""

    @property
    def semantics(self) -> Semantics:
        """Return the semantics of its log-probabilities."""
        return Semantics.of(self.service.logprobs)

    @property
    def tier(self) -> str:
        """Return the tier of its evidence: B with the likeliest tokens, C without."""
        return "B" if self.service.logprobs.top else "C"

    def fingerprint(self) -> dict[str, Any]:
        """Return its identification by the contract and by its own statements."""
        return {
            **kernel_fingerprint(self.ref),
            "server": {**self.identity.to_json(), "system_fingerprint": self.stamp},
        }

    def draw(self, prompt: Sequence[int], seed: int) -> Continuation:
        """Let the server draw tokens after a prompt: the number of the contract, limited by the
        context length of the model.

        Raises Refusal if it does not answer, if the answer cannot be used, if ids of tokens are
        ambiguous, and if another server or model answers than at first.
        """
        given = tuple(prompt)
        reply = self._ask(given, seed, self._wanted(given))
        self._check_same(reply)
        return self._continuation(reply)

    def stream(
        self, prompt: Sequence[int], seed: int, clock: Callable[[], float]
    ) -> Iterator[tuple[float, int]]:
        """Let the server draw as `draw` does, and yield (time of `clock`, number of tokens) as they
        arrive; first the time of the request with 0 tokens.

        Raises Refusal as `draw`, and if tokens do not arrive one by one: not streamed, or buffered
        on the way.
        """
        given = tuple(prompt)
        wanted = self._wanted(given)
        body = streamed(self.identity.kind, self._question(given, seed, wanted))
        moments: list[float] = []
        found, reason, counted = 0, None, None
        events = self.transport.stream(_COMPLETIONS, body, clock)
        asked, _ = next(events)
        yield asked, 0
        for moment, event in events:
            part = read_part(event)
            self._check_same(part)
            reason = part.reason if reason is None else reason
            counted = part.counted if counted is None else counted
            if part.tokens:
                found += part.tokens
                moments.append(moment)
                yield moment, part.tokens
        # llama.cpp holds back a token that ends inside a character and never reports it: then fewer
        # tokens arrive than are counted, and the time of each is overestimated, not underestimated.
        whole = max(found, counted) if found and counted is not None else found
        check_number(whole, wanted, reason, counted)
        reads = len(set(moments))
        if found > 1 and (reads == 1 or 2 * reads < len(moments)):
            raise refuse(
                codes.SERVER_REPLY,
                f"the answer of the server is not streamed: {found} tokens came in {reads}"
                f" {'piece' if reads == 1 else 'pieces'}",
                help="connect to the server directly, not through a proxy that buffers its "
                "answers, from a"
                " machine that is fast enough to see single tokens",
            )

    def _wanted(self, prompt: tuple[int, ...]) -> int:
        """Return the number of tokens to draw; refuse a prompt that leaves no room."""
        wanted = self.service.tokens
        if self.longest is not None:
            wanted = min(wanted, self.longest - len(prompt))
        if wanted < 1:
            raise refuse(
                codes.SEQUENCE,
                f"a prompt of {len(prompt)} tokens leaves no room: the model takes {self.longest}",
                help="shorten the prompt, or leave the request out",
            )
        return wanted

    def check_unchanged(self) -> None:
        """Identify the server again. Refuse one that differs from the measured one."""
        now = identify(self.transport, self.service)
        if now != self.identity:
            raise _changed(differences(self.identity.to_json(), now.to_json()))

    def _question(self, prompt: tuple[int, ...], seed: int, tokens: int) -> dict[str, Any]:
        text = self.vocabulary.prompt_text(prompt) if self.prompts == "text" else None
        if self.prompts == "text" and text is None:
            raise refuse(
                codes.TOKENS_NOT_ALIGNED,
                "the server takes texts alone, and no text is read as exactly these tokens",
                help="serve the model where prompts may be token ids",
            )
        return question(
            self.identity.kind,
            self.service,
            self.identity.model,
            list(prompt) if text is None else text,
            tokens,
            seed % _SEEDS,
        )

    def _ask(self, prompt: tuple[int, ...], seed: int, tokens: int) -> Reply:
        answer = self.transport.post(_COMPLETIONS, self._question(prompt, seed, tokens))
        if answer is None:
            raise refuse(
                codes.SERVER_REPLY,
                f"the server {self.transport.url} has no {_COMPLETIONS}",
                help="serve the model with completions; chats would add tokens of their own",
            )
        reply = read_reply(answer, tokens)
        if reply.prompt_tokens is not None and reply.prompt_tokens != len(prompt):
            raise refuse(
                codes.TOKENS_NOT_ALIGNED,
                f"the server read {reply.prompt_tokens} tokens where {len(prompt)} were sent",
                help="let it add no token of its own, such as one for the beginning of texts",
            )
        return reply

    def _check_same(self, reply: Reply | StreamPart) -> None:
        model = self.identity.model if reply.model is None else reply.model
        found = differences(
            {"model": self.identity.model, "system_fingerprint": self.stamp},
            {"model": model, "system_fingerprint": reply.fingerprint},
        )
        if found:
            raise _changed(found)

    def _continuation(self, reply: Reply) -> Continuation:
        plain = reply.scale == "plain"
        values = self.service.logprobs.values
        if plain and values == "raw":
            raise refuse(
                codes.SERVER_SEMANTICS,
                "the server gives probabilities after sampling, and the contract says"
                " `values: raw`",
                help="write `values: processed`",
            )
        if not plain and self.identity.kind == "llama.cpp" and values == "processed":
            raise refuse(
                codes.SERVER_SEMANTICS,
                "the server gives log-probabilities before sampling, and the contract says"
                " `values: processed`",
                help="take a server that knows `post_sampling_probs`, or write `values: raw`",
            )
        tokens = tuple(self.vocabulary.id_of(one.token) for one in reply.drawn)
        logs = np.array([one.log for one in reply.drawn], np.float64)
        ends = self.vocabulary.ends
        if reply.stopped and ends and tokens[-1] not in ends:
            raise refuse(
                codes.SERVER_REPLY,
                "the answer of the server is not usable: the text ended, and its last token"
                f" {tokens[-1]} is none that ends texts ({', '.join(map(str, sorted(ends)))}), so"
                " the token that was drawn there is missing",
                help="let the server give the token that ends a text; where texts end with others,"
                " name them as `eos_token_id` in generation_config.json beside the checkpoint",
            )
        return Continuation(tokens, Side(logs, self.semantics, self._top(reply, tokens)))

    def _top(self, reply: Reply, tokens: tuple[int, ...]) -> TopLogs | None:
        """Return the likeliest tokens; None if a position has fewer than requested. Refuse a second
        log-probability of the drawn token."""
        count = self.service.logprobs.top
        if self.vocabulary.size is not None:
            count = min(count, self.vocabulary.size)
        if count == 0 or any(len(one.top) < count for one in reply.drawn):
            return None
        ids, logs = [], []
        for one, token in zip(reply.drawn, tokens, strict=True):
            rows = [(log, self.vocabulary.id_of(named)) for named, log in one.top]
            rows.sort(key=lambda row: (-row[0], row[1]))
            if any(found == token and abs(log - one.log) > ROUNDING for log, found in rows):
                raise refuse(
                    codes.SERVER_REPLY,
                    "the answer of the server is not usable: it gives the drawn token"
                    f" {token} two log-probabilities",
                    help="ask the server itself, and not a proxy; if it contradicts itself, "
                    "update it",
                )
            ids.append([found for _, found in rows[:count]])
            logs.append([log for log, _ in rows[:count]])
        return TopLogs(np.array(ids, np.int64), np.array(logs, np.float64))


def load_server(
    ref: KernelRef, model: Model, trial: Sequence[int], limits: Limits | None = None
) -> ServerKernel:
    """Identify a server, and let it draw on trial after the tokens `trial`.

    Refuse if httpx is missing, no key is set, the server does not answer, is not that of the
    contract, has another vocabulary, or gives no usable log-probabilities.
    """
    with at(ref.span):
        return _load(ref, model, trial, limits or Limits())


def _load(ref: KernelRef, model: Model, trial: Sequence[int], limits: Limits) -> ServerKernel:
    need(find_adapter(ref.run).library, ref.run)
    service = ref.service
    if service is None:
        raise refuse(
            codes.SERVER_ADDRESS,
            f"the kernel {ref.run} has no `url`",
            help="add `url: http://HOST:PORT` to the kernel",
        )
    problem = service.logprobs.problem()
    if problem is not None:
        raise refuse(codes.NO_SAMPLES, problem[1], help=problem[2])
    transport = Transport(service.url, key_of(service.key), limits)
    identity = identify(transport, service)
    refuse_unsettable(identity.kind, service.logprobs)
    size, longest = model.limits
    if identity.fact("n_vocab") not in (None, size):
        raise refuse(
            codes.TOKENS_NOT_ALIGNED,
            f"the server's model has {identity.fact('n_vocab')} tokens, that of the contract"
            f" {size}",
            help="serve the model of the contract",
        )
    ends = ends_of(model.files, model.checkpoint.path, model.config)
    vocabulary = Vocabulary(size, model.tokenizer_source, ends)
    kernel = ServerKernel(ref, service, transport, identity, vocabulary, longest)
    return _tried(kernel, tuple(trial))


def _tried(kernel: ServerKernel, trial: tuple[int, ...]) -> ServerKernel:
    """Return the kernel after a trial: with ids as prompts, or texts if the server refuses ids."""
    most = _TRIAL if kernel.longest is None else max(1, min(_TRIAL, kernel.longest - 1))
    prompt = trial if kernel.longest is None else trial[: kernel.longest - most]
    try:
        reply = kernel._ask(prompt, 0, most)
    except Refusal as refusal:
        if not _refused(refusal) or kernel.vocabulary.prompt_text(prompt) is None:
            raise
        kernel = replace(kernel, prompts="text")
        reply = kernel._ask(prompt, 0, most)
    kernel = replace(kernel, stamp=reply.fingerprint)
    kernel._check_same(reply)
    kernel._continuation(reply)
    return kernel


def _refused(refusal: Refusal) -> bool:
    """Return whether a server refused the form of a question (status 400 or 422)."""
    found = refusal.diagnostics[0]
    stated = any(f"status {status}" in found.message for status in (400, 422))
    return found.code is codes.SERVER_UNREACHABLE and stated


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the changed statements of a server about itself; empty if there are none."""
    names = [n for n in dict.fromkeys((*before, *now)) if before.get(n) != now.get(n)]
    return "; ".join(f"{n} {before.get(n)!r}, then {now.get(n)!r}" for n in names)


def _changed(found: str) -> Refusal:
    return refuse(
        codes.SERVER_CHANGED,
        f"the server is another one than it was at first: {found}",
        help="measure one server with one model, not several behind one address",
    )


# --- answers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnusableReply:
    """An answer that cannot be used, and why. It is not asked for again: asking until an answer is
    usable would bias the sample."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """No answer."""

    refusal: Refusal

    @property
    def reason(self) -> str:
        """Return why there is no answer."""
        return _reason(self.refusal)


Answer = Continuation | UnusableReply | NoAnswer


def answer_of(server: ServerKernel, prompt: tuple[int, ...], seed: int) -> Answer:
    """Let a server draw after a prompt; raises Refusal if another server answers."""
    try:
        return server.draw(prompt, seed)
    except Refusal as refusal:
        code = refusal.diagnostics[0].code
        if code is codes.SERVER_CHANGED:
            raise
        if code is codes.SERVER_UNREACHABLE:
            return NoAnswer(refusal)
        return UnusableReply(_reason(refusal))
    except (RuntimeError, ValueError) as error:
        return UnusableReply(str(error) or type(error).__name__)


def _reason(refusal: Refusal) -> str:
    first = refusal.diagnostics[0]
    return f"{first.code}: {first.message}"
