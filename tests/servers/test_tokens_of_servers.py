"""Token ids in answers of servers, and prompts as text where a server takes no ids."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers

from kcdsl.diagnostics import Refusal, codes
from kcdsl.diagnostics.codes import Code
from kcdsl.model.files import Artefacts
from kcdsl.model.tokenizer import ByteTokenizer, FileTokenizer
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel
from kcdsl_backends.empirical.sources.servers.replies import (
    Reply,
    ServedToken,
    Vocabulary,
    ends_of,
    read_reply,
)
from kcdsl_backends.requests import Request
from tests.servers.conftest import Loader
from tests.support.fake_server import Answer, FakeServer, serving

BYTES = Vocabulary(256, ByteTokenizer())
WORDS = ("a", "b", "ab", "Ġa", "Ġb", "Ġab")
"""Tokens of a byte-level BPE; Ġ is a leading space."""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Return a small vocabulary of a tokenizer.json."""
    fast = Fast(models.BPE({w: i for i, w in enumerate((*WORDS, "Ġ"))}, [("a", "b")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    fast.save(str(path))
    return Vocabulary(len(WORDS) + 1, FileTokenizer(path))


@given(st.integers(0, 255))
def test_token_id_is_used_unchanged(token: int) -> None:
    assert BYTES.id_of(ServedToken(token, None, None)) == token
    assert BYTES.id_of(ServedToken(token, bytes([token]), "anything")) == token
    assert BYTES.id_of(ServedToken(None, bytes([token]), None)) == token


@pytest.mark.parametrize(
    ("vocabulary", "token"),
    [
        (BYTES, ServedToken(256, None, None)),
        (BYTES, ServedToken(-1, None, None)),
        (BYTES, ServedToken(65, b"B", None)),
        (BYTES, ServedToken(None, b"AB", None)),
        (BYTES, ServedToken(None, None, "AB")),
        (BYTES, ServedToken(None, None, "\ufffd")),
        (BYTES, ServedToken(None, None, None)),
        (Vocabulary(256, None), ServedToken(None, None, "A")),
        (Vocabulary(None, None), ServedToken(2**63, None, None)),
    ],
)
def test_ambiguous_token_is_refused(vocabulary: Vocabulary, token: ServedToken) -> None:
    with pytest.raises(Refusal) as caught:
        vocabulary.id_of(token)
    assert caught.value.diagnostics[0].code is codes.TOKENS_NOT_ALIGNED


@pytest.mark.parametrize(("text", "expected"), [("a", 0), (" a", 3), (" ab", 5), ("ab", 2)])
def test_unique_token_text_identifies_the_token(
    words: Vocabulary, text: str, expected: int
) -> None:
    assert words.id_of(ServedToken(None, None, text)) == expected
    assert words.id_of(ServedToken(expected, text.encode(), text)) == expected


class Twins:
    """Two tokens with one text, which a server's answer cannot tell apart."""

    def encode(self, text: str) -> list[int]:
        return [0] * len(text)

    def encode_rendered(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: list[int]) -> str:
        return "".join("xxy"[i] for i in ids)


def test_text_of_two_tokens_is_ambiguous() -> None:
    vocabulary = Vocabulary(3, Twins())
    assert vocabulary.id_of(ServedToken(None, None, "y")) == 2
    with pytest.raises(Refusal) as caught:
        vocabulary.id_of(ServedToken(None, None, "x"))
    assert "2 tokens" in caught.value.diagnostics[0].message


def test_concurrent_text_lookups_agree() -> None:
    """The first thread builds the table of texts; no other thread may see an incomplete one."""

    class Slow:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

        def encode_rendered(self, text: str) -> list[int]:
            return self.encode(text)

        def decode(self, ids: list[int]) -> str:
            time.sleep(0.001)
            return "".join(map(chr, ids))

    vocabulary = Vocabulary(60, Slow())
    with ThreadPoolExecutor(4) as threads:
        found = list(
            threads.map(lambda i: vocabulary.id_of(ServedToken(None, None, chr(i))), [59] * 4)
        )
    assert found == [59] * 4


def test_id_with_other_bytes_reveals_another_vocabulary(words: Vocabulary) -> None:
    with pytest.raises(Refusal) as caught:
        words.id_of(ServedToken(0, b"b", "b"))
    assert "'b' there" in caught.value.diagnostics[0].message


def test_tokens_may_be_identified_by_text_alone(
    load: Loader, train: TorchKernel, requests: tuple[Request, ...]
) -> None:
    """SGLang and older servers do so; here each text is one byte."""

    def named(answer: Answer, question: object) -> Answer:
        logs = answer["choices"][0]["logprobs"]
        logs["tokens"] = [chr(int(token.split(":")[1])) for token in logs["tokens"]]
        logs["top_logprobs"] = [
            {chr(int(token.split(":")[1])): value for token, value in row.items()}
            for row in logs["top_logprobs"]
        ]
        return answer

    fake = FakeServer(train.logits)
    with serving(fake) as url:
        by_id = load(url, tokens=6, top=2).draw(requests[0].tokens, 3)
        fake.change = named
        by_text = load(url, tokens=6, top=2).draw(requests[0].tokens, 3)
    assert by_text.tokens == by_id.tokens
    assert by_text.side.top is not None
    assert by_id.side.top is not None
    assert (by_text.side.top.ids == by_id.side.top.ids).all()


@pytest.mark.full
def test_ids_may_accompany_the_log_probabilities(
    load: Loader, train: TorchKernel, requests: tuple[Request, ...]
) -> None:
    def beside(answer: Answer, question: object) -> Answer:
        choice = answer["choices"][0]
        ids = [int(token.split(":")[1]) for token in choice["logprobs"]["tokens"]]
        choice["token_ids"] = ids
        choice["logprobs"]["tokens"] = ["?"] * len(ids)
        choice["logprobs"]["top_logprobs"] = None
        return answer

    fake = FakeServer(train.logits)
    with serving(fake) as url:
        by_id = load(url, tokens=6).draw(requests[0].tokens, 3)
        fake.change = beside
        found = load(url, tokens=6).draw(requests[0].tokens, 3)
        assert found.tokens == by_id.tokens
        assert found.side.top is None, "what it does not list is absent"
        fake.change = lambda answer, question: _contradicting(beside(answer, question))
        with pytest.raises(Refusal) as caught:
            load(url, tokens=6)
    assert caught.value.diagnostics[0].code is codes.SERVER_REPLY


def _contradicting(answer: Answer) -> Answer:
    logs = answer["choices"][0]["logprobs"]
    first = answer["choices"][0]["token_ids"][0]
    logs["tokens"] = [f"token_id:{(first + 1) % 256}", *logs["tokens"][1:]]
    return answer


def test_prompts_are_sent_as_text_where_ids_are_refused(
    load: Loader, train: TorchKernel, requests: tuple[Request, ...]
) -> None:
    """Only texts that tokenise to exactly the tokens of the prompt."""

    class Texts(FakeServer):
        def answer(self, question: Any) -> Answer:
            return super().answer({**question, "prompt": list(question["prompt"].encode())})

    fake = Texts(train.logits)
    fake.statuses = [400]
    with serving(fake) as url:
        server = load(url, tokens=3)
        assert server.prompts == "text"
        assert len(server.draw(requests[0].tokens, 1).tokens) == 3
        assert fake.questions[-1]["prompt"] == bytes(requests[0].tokens).decode()
        with pytest.raises(Refusal) as caught:
            server.draw((255, 254), 1)
    assert caught.value.diagnostics[0].code is codes.TOKENS_NOT_ALIGNED


def test_prompt_of_full_context_length_is_refused(
    load: Loader, train: TorchKernel, requests: tuple[Request, ...]
) -> None:
    with serving(FakeServer(train.logits)) as url:
        server = load(url, tokens=8)
        assert len(server.draw((65,) * 253, 1).tokens) == 3
        with pytest.raises(Refusal) as caught:
            server.draw((65,) * 256, 1)
    assert caught.value.diagnostics[0].code is codes.SEQUENCE


# --- the end of a text ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generating", "ends"),
    [
        ({}, None, set()),
        ({"eos_token_id": 2}, None, {2}),
        ({"eos_token_id": None}, '{"eos_token_id": [5, 7]}', {5, 7}),
        ({"eos_token_id": 2}, '{"eos_token_id": [2, 7]}', {2, 7}),
        ({"eos_token_id": [2, "x", True]}, "[1", {2}),
        ({"eos_token_id": 2}, "[3]", {2}),
    ],
)
def test_end_tokens_are_read_from_the_model_files(
    config: dict[str, Any], generating: str | None, ends: set[int], tmp_path: Path
) -> None:
    if generating is not None:
        (tmp_path / "generation_config.json").write_text(generating, "utf-8")
    assert ends_of(Artefacts.of(tmp_path), tmp_path / "model.safetensors", config) == ends


def test_omitted_end_token_is_refused(
    load: Loader, train: TorchKernel, requests: tuple[Request, ...]
) -> None:
    """Values would be missing exactly where texts end, so the rest is not a random sample."""

    def stopped(answer: Answer, question: object) -> Answer:
        answer["choices"][0]["finish_reason"] = "stop"
        return answer

    fake = FakeServer(train.logits)
    with serving(fake) as url:
        server = load(url, tokens=4)
        drawn = server.draw(requests[0].tokens, 1).tokens
        fake.change = stopped
        assert server.draw(requests[0].tokens, 1).tokens == drawn, "nothing says what ends texts"
        ends = [frozenset({drawn[-1], 300}), frozenset({(drawn[-1] + 1) % 256})]
        good, bad = (
            replace(server, vocabulary=replace(server.vocabulary, ends=own)) for own in ends
        )
        assert good.draw(requests[0].tokens, 1).tokens == drawn
        with pytest.raises(Refusal) as caught:
            bad.draw(requests[0].tokens, 1)
        fake.change = lambda answer, question: answer
        assert bad.draw(requests[0].tokens, 1).tokens == drawn, "it did not end there"
    assert caught.value.diagnostics[0].code is codes.SERVER_REPLY
    assert f"last token {drawn[-1]} is none" in caught.value.diagnostics[0].message


# --- damaged answers -----------------------------------------------------------------------------

GOOD = {
    "model": "m",
    "usage": {"prompt_tokens": 2, "completion_tokens": 2},
    "choices": [
        {
            "finish_reason": "length",
            "logprobs": {
                "content": [
                    {"id": 5, "bytes": [5], "logprob": -0.5, "top_logprobs": []},
                    {"id": 6, "bytes": [6], "logprob": -1.5, "top_logprobs": []},
                ]
            },
        }
    ],
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += places(inner, (*path, index))
    return found


PLACES = places(GOOD)


@given(st.sampled_from(PLACES[1:]), ANYTHING)
def test_damaged_answer_is_refused_or_gives_finite_values(
    path: tuple[Any, ...], value: Any
) -> None:
    """Never another exception, never a value that is not a log-probability."""
    damaged = json.loads(json.dumps(GOOD))
    inside = damaged
    for step in path[:-1]:
        inside = inside[step]
    inside[path[-1]] = value
    reply, refused = read(damaged)
    if reply is None:
        assert refused is codes.SERVER_REPLY
        return
    assert len(reply.drawn) == 2
    assert all(-1e4 <= one.log <= 1e-4 for one in reply.drawn)


def read(answer: Any) -> tuple[Reply | None, Code | None]:
    """Return the contents of an answer, or the code of its refusal."""
    try:
        return read_reply(answer, 2), None
    except Refusal as refusal:
        return None, refusal.diagnostics[0].code


def test_probabilities_are_read_in_linear_and_log_scale() -> None:
    import math

    plain = json.loads(json.dumps(GOOD))
    for entry in plain["choices"][0]["logprobs"]["content"]:
        entry["prob"] = math.exp(entry.pop("logprob"))
        entry["top_probs"] = entry.pop("top_logprobs")
    logs, other = read_reply(GOOD, 2), read_reply(plain, 2)
    assert (logs.scale, other.scale) == ("log", "plain")
    for one, two in zip(logs.drawn, other.drawn, strict=True):
        assert one.log == pytest.approx(two.log, rel=1e-12)


def test_missing_httpx_names_the_extra(load: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real: Callable[[str], Any] = importlib.util.find_spec
    monkeypatch.setattr(
        "kcdsl_backends.empirical.sources.kernels.engines.find_spec",
        lambda name: None if name == "httpx" else real(name),
    )
    with pytest.raises(Refusal) as caught:
        load("http://127.0.0.1:9")
    assert caught.value.diagnostics[0].code is codes.NO_PACKAGE
    assert 'pip install "kcdsl[server]"' in (caught.value.diagnostics[0].help or "")


def test_server_provides_no_logits(load: Loader, train: TorchKernel, tiny_folder: Path) -> None:
    with serving(FakeServer(train.logits)) as url:
        server = load(url, tokens=2)
    asked: tuple[Callable[[], object], ...] = (
        lambda: server.logits([1]),
        lambda: server.hidden([1]),
        lambda: server.tokens([1]),
        lambda: server.block("attn_0", train.hidden([1])),
        lambda: server.forward(train.tokens([1])),
    )
    for ask in asked:
        with pytest.raises(Refusal) as caught:
            ask()
        assert caught.value.diagnostics[0].code is codes.METRIC_OUT_OF_REACH
    assert server.tier == "B"
