"""Replies of a server to `/v1/completions`, checked or refused when they are read.

Two forms are in use. That of chats, from llama.cpp: `logprobs.content`, a list of tokens with ids,
bytes and likeliest tokens. And an older one, from vLLM, SGLang and TensorRT-LLM:
`logprobs.tokens`, `token_logprobs` and `top_logprobs`, with ids as `token_id:17` or in `token_ids`.
A token is identified by its id, else by the only id with these bytes or this text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.files import Artefacts, companion
from kcdsl.model.tokenizer import ByteTokenizer, Tokenizer
from kcdsl_backends.empirical.sources.rollouts.record import ROUNDING

_ID = re.compile(r"token_id:(\d{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True)
class ServedToken:
    """A token as a server names it: by id, by bytes, by text; None for those that it omits."""

    id: int | None
    bytes: bytes | None
    text: str | None


@dataclass(frozen=True, slots=True)
class Drawn:
    """One drawn token with its ln-probability, and the likeliest ones at its position."""

    token: ServedToken
    log: float
    top: tuple[tuple[ServedToken, float], ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """The tokens drawn after one prompt.

    `scale` says how probabilities were given: "log", or "plain" for llama.cpp's
    `post_sampling_probs`. `prompt_tokens` is the server's count, None if it states none.
    """

    drawn: tuple[Drawn, ...]
    scale: Literal["log", "plain"]
    stopped: bool
    prompt_tokens: int | None
    model: str | None
    fingerprint: str | None


def read_reply(answer: Any, most: int) -> Reply:
    """Return the content of an answer; `most` is the number of requested tokens.

    Raises Refusal for an answer without log-probabilities, with invalid numbers, with tokens
    of the prompt among the drawn ones, or with another number of tokens than it counts.
    """
    whole = _mapping(answer, "the answer")
    choices = whole.get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        found = f"{len(choices)} texts" if isinstance(choices, list) else "no text"
        raise _bad(f"one text was requested, and the answer has {found}")
    choice = _mapping(choices[0], "the text of the answer")
    logs = choice.get("logprobs")
    if not isinstance(logs, dict):
        raise _bad("it has no log-probabilities", "start the server so that it gives `logprobs`")
    if isinstance(logs.get("content"), list):
        drawn, scale = _of_chat(logs["content"])
    else:
        drawn, scale = _of_lists(logs, choice), "log"
    reason = choice.get("finish_reason")
    usage = whole.get("usage")
    counts: Mapping[str, Any] = usage if isinstance(usage, dict) else {}
    check_number(len(drawn), most, reason, _whole(counts.get("completion_tokens")))
    return Reply(
        drawn,
        scale,
        reason == "stop",
        _whole(counts.get("prompt_tokens")),
        _text(whole.get("model")),
        _text(whole.get("system_fingerprint")),
    )


@dataclass(frozen=True, slots=True)
class StreamPart:
    """The content of one event of a streamed answer; `reason` is why the text ended, None
    before."""

    tokens: int
    reason: object
    counted: int | None
    model: str | None
    fingerprint: str | None


def read_part(event: Any) -> StreamPart:
    """Return the content of an event of a streamed answer: number of tokens, and model.

    Raises Refusal for an event with a text without log-probabilities, whose tokens are not known.
    """
    whole = _mapping(event, "an event of the answer")
    choices = whole.get("choices")
    if not isinstance(choices, list) or len(choices) > 1:
        raise _bad("an event of the answer has no text, or several")
    choice = _mapping(choices[0], "the text of an event") if choices else {}
    usage = whole.get("usage")
    return StreamPart(
        _tokens_of(choice),
        choice.get("finish_reason"),
        _whole(usage.get("completion_tokens")) if isinstance(usage, dict) else None,
        _text(whole.get("model")),
        _text(whole.get("system_fingerprint")),
    )


def _tokens_of(choice: Mapping[str, Any]) -> int:
    logs = choice.get("logprobs")
    if not isinstance(logs, dict):
        if choice.get("text"):
            raise _bad("an event of it has a text without log-probabilities")
        return 0
    if isinstance(logs.get("content"), list):
        return len(_of_chat(logs["content"])[0])
    return len(_of_lists(logs, choice)) if logs.get("token_logprobs") != [] else 0


def check_number(found: int, most: int, reason: object, counted: int | None) -> None:
    """Refuse an answer with a wrong number of tokens, or with an unknown end."""
    if found == 0:
        raise _bad("it has no drawn token")
    if found > most:
        raise _bad(
            f"{most} tokens were requested, and it has log-probabilities of {found}",
            "let the server give those of drawn tokens alone, without the prompt (`echo`)",
        )
    if counted is not None and counted != found:
        raise _bad(f"it counts {counted} drawn tokens, and has log-probabilities of {found}")
    if reason not in ("stop", "length"):
        raise _bad(f"it ended for the reason {reason!r}, which is neither `stop` nor `length`")
    if reason == "length" and found != most:
        raise _bad(f"{most} tokens were requested, and it ended at its limit with {found}")


def _of_chat(content: Sequence[Any]) -> tuple[tuple[Drawn, ...], Literal["log", "plain"]]:
    scales = {"plain" if "logprob" not in _mapping(e, "a token") else "log" for e in content}
    if len(scales) > 1:
        raise _bad("some tokens have `logprob` and some have not")
    scale: Literal["log", "plain"] = "plain" if scales == {"plain"} else "log"
    value, listed = ("prob", "top_probs") if scale == "plain" else ("logprob", "top_logprobs")
    drawn = []
    for place, raw in enumerate(content):
        entry = _mapping(raw, f"token {place}")
        top = entry.get(listed) or ()
        if not isinstance(top, list | tuple):
            raise _bad(f"`{listed}` of token {place} is no list")
        rows = [_mapping(one, f"`{listed}` of token {place}") for one in top]
        drawn.append(
            Drawn(
                _named(entry),
                _log(entry.get(value), scale, f"token {place}"),
                tuple(
                    (_named(one), _log(one.get(value), scale, f"token {place}", drawn=False))
                    for one in rows
                ),
            )
        )
    return tuple(drawn), scale


def _named(entry: Mapping[str, Any]) -> ServedToken:
    raw = entry.get("bytes")
    given = (
        bytes(raw)
        if isinstance(raw, list) and all(isinstance(b, int) and 0 <= b < 256 for b in raw)
        else None
    )
    text = _text(entry.get("token"))
    found = _whole(entry.get("id"))
    if found is None and text is not None:
        found = _id_in(text)
    return ServedToken(found, given, text)


def _of_lists(logs: Mapping[str, Any], choice: Mapping[str, Any]) -> tuple[Drawn, ...]:
    values, texts = logs.get("token_logprobs"), logs.get("tokens")
    if not isinstance(values, list):
        raise _bad("it has no log-probabilities", "start the server so that it gives `logprobs`")
    length = len(values)
    ids = choice.get("token_ids")
    lists = {"tokens": texts, "top_logprobs": logs.get("top_logprobs"), "token_ids": ids}
    for name, found in lists.items():
        if found is not None and (not isinstance(found, list) or len(found) not in (0, length)):
            raise _bad(f"`{name}` and `token_logprobs` do not have the same length")
    if not texts and not ids:
        raise _bad("it does not say which tokens it drew")
    tops = lists["top_logprobs"] or [None] * length
    drawn = []
    for place, value in enumerate(values):
        text = _text(texts[place]) if texts else None
        known = _whole(ids[place]) if ids else None
        own = None if text is None else _id_in(text)
        if known is not None and own is not None and known != own:
            raise _bad(f"token {place} is {own} in `tokens` and {known} in `token_ids`")
        token = ServedToken(own if known is None else known, None, text)
        drawn.append(Drawn(token, _log(value, "log", f"token {place}"), _top(tops[place], place)))
    return tuple(drawn)


def _top(raw: Any, place: int) -> tuple[tuple[ServedToken, float], ...]:
    if raw is None:
        return ()
    rows = _mapping(raw, f"`top_logprobs` of token {place}")
    return tuple(
        (ServedToken(_id_in(text), None, text), _log(value, "log", f"token {place}", drawn=False))
        for text, value in rows.items()
    )


def _id_in(text: str) -> int | None:
    found = _ID.fullmatch(text)
    return None if found is None else int(found[1])


def _log(value: Any, scale: str, where: str, *, drawn: bool = True) -> float:
    """Return a ln-probability. Refuse other values, and probability 0 of a drawn token."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        found = "null" if value is None else repr(value)
        raise _bad(f"the log-probability of {where} is {found}")
    try:
        number = float(value)
    except OverflowError:
        digits = len(str(abs(value)))
        raise _bad(f"the log-probability of {where} is a number of {digits} digits") from None
    if scale == "plain":
        if not 0 <= number <= 1 + ROUNDING:
            raise _bad(f"the probability of {where} is {number:g}")
        number = math.log(number) if number > 0 else -math.inf
    if math.isnan(number) or number > ROUNDING or (drawn and number < -1e4):
        raise _bad(f"the log-probability of {where} is {number:g}")
    return number


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _bad(f"{what} is no object")
    return value


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _bad(what: str, help: str | None = None) -> Refusal:
    return refuse(codes.SERVER_REPLY, f"the answer of the server is not usable: {what}", help=help)


_LARGEST = 1 << 31
"""More tokens than any vocabulary has, for a model that does not state its size."""
_REPLACEMENT = "\ufffd"
"""The replacement character for bytes that are no text."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of the local model: ids below `size`, and the tokenizer.

    A token with an ambiguous id is refused: a wrong id would be measured as a drift.
    """

    size: int | None
    tokenizer: Tokenizer | None
    ends: frozenset[int] = frozenset()
    """The tokens that end texts according to the files of the model; empty if they name none."""
    _ids: dict[str, list[int]] = field(default_factory=dict)

    def id_of(self, token: ServedToken) -> int:
        """Return the id of a token. Refuse one outside the vocabulary, one with other bytes on the
        server than here, and one without id that could be several."""
        if token.id is not None:
            return self._checked(token.id, token)
        if isinstance(self.tokenizer, ByteTokenizer) and token.bytes is not None:
            if len(token.bytes) != 1:
                raise _doubt(f"{token.bytes!r} is not one byte")
            return self._checked(token.bytes[0], token)
        if token.text is None or self.tokenizer is None or self.size is None:
            raise _doubt("it names tokens without ids, and the model has no tokenizer to find them")
        found = self._by_text().get(token.text, [])
        if len(found) != 1 or _REPLACEMENT in token.text:
            several = f"is that of {len(found)} tokens" if found else "is that of no token"
            raise _doubt(f"the text {token.text!r} {several}")
        return found[0]

    def prompt_text(self, tokens: tuple[int, ...]) -> str | None:
        """Return the text that is read as exactly these tokens; None if there is none."""
        if self.tokenizer is None:
            return None
        text = self.tokenizer.decode(list(tokens))
        try:
            return text if tuple(self.tokenizer.encode(text)) == tokens else None
        except Refusal:
            return None

    def _checked(self, found: int, token: ServedToken) -> int:
        size = _LARGEST if self.size is None else self.size
        if not 0 <= found < size:
            raise _doubt(f"the token {found} is out of the vocabulary of {size}")
        if token.bytes is None or self.tokenizer is None:
            return found
        if isinstance(self.tokenizer, ByteTokenizer):
            if token.bytes != bytes([found]):
                raise _doubt(f"the token {found} is {token.bytes!r} there, and that byte here")
            return found
        there = token.bytes.decode("utf-8", errors="replace").strip()
        here = self.tokenizer.decode([found]).strip()
        known = bool(there) and bool(here) and _REPLACEMENT not in there + here
        if known and there != here:
            raise _doubt(f"the token {found} is {there!r} there, and {here!r} here")
        return found

    def _by_text(self) -> dict[str, list[int]]:
        if not self._ids and self.tokenizer is not None:
            made: dict[str, list[int]] = {}
            for found in range(self.size or 0):
                made.setdefault(self.tokenizer.decode([found]), []).append(found)
            self._ids.update(made)  # in one step, so that other threads see all or none
        return self._ids


def ends_of(files: Artefacts, checkpoint: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """Return the tokens that end texts: `eos_token_id` of the configuration, and of a file
    generation_config.json in the folder of the checkpoint, which servers read too."""
    generating, path = {}, files.beside(checkpoint, "generation_config.json")
    if path is not None:
        data = files.read(path, companion("generation_config"))
        try:
            generating = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError):
            generating = {}
    found: set[int] = set()
    for stated in (config, generating):
        named = stated.get("eos_token_id") if isinstance(stated, Mapping) else None
        each = named if isinstance(named, list) else [named]
        found |= {one for one in each if isinstance(one, int) and not isinstance(one, bool)}
    return frozenset(found)


def _doubt(what: str) -> Refusal:
    return refuse(
        codes.TOKENS_NOT_ALIGNED,
        f"the tokens of the server cannot be aligned with those of the model: {what}",
        help="serve the model of the contract, with its tokenizer, and let the server give token"
        " ids",
    )
