"""Tokenizers that load but fail on texts are refused, for any exception of the package."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import TOKENIZER
from kcdsl.model.tokenizer import FileTokenizer

WORDS = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
FILE: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
    "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
    "decoder": None, "model": WORDS,
}  # fmt: skip
SPECIAL = {
    "type": "TemplateProcessing", "pair": [], "special_tokens": {},
    "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": WORDS | {"unk_token": "[UNK]"}}, "b"),
        ({}, "\ud800"),
        ({"post_processor": SPECIAL}, "a"),  # a panic
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "a"),  # too
    ],
    ids=["unknown word", "surrogate", "special token", "normalizer"],
)
def test_failing_tokenizer_is_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(FILE | change))
    with pytest.raises(Refusal) as refusal:
        FileTokenizer(tmp_path / "tokenizer.json").encode(text)
    (diagnostic,) = refusal.value.diagnostics
    assert diagnostic.code == TOKENIZER
    assert diagnostic.help


def test_invalid_ids_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(FILE))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode("a b")) == "a a"
    with pytest.raises(Refusal):
        tokenizer.decode([-1])


TENFOLD = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
TEMPLATE = {
    "type": "TemplateProcessing", "pair": [], "special_tokens": {},
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 3 * 10**5,
}  # fmt: skip
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TABLE = base64.b64encode(bytes(4) + b"a" * 10**6 + b"\0").decode()


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [TENFOLD] * 12}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 10**6}},
        {"normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "a" * 10**6}, TENFOLD]}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": TABLE}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 40}},
        {"post_processor": TEMPLATE},
    ],
    ids=["sequence", "empty pattern", "prefix", "table", "bytes", "template"],
)  # fmt: skip
def test_memory_exhausting_tokenizer_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(FILE | change))
    with pytest.raises(Refusal, match=r"characters of a text of 60|is no tokenizer"):
        FileTokenizer(tmp_path / "tokenizer.json").encode("a" * 60)


def test_ordinary_tokenizer_accepts_long_texts(tmp_path: Path) -> None:
    stages = {
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "NFKC"}, {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]},
        "post_processor": {
            "type": "TemplateProcessing", "pair": [],
            "single": [{"Sequence": {"id": "A", "type_id": 0}},
                       {"SpecialToken": {"id": "</s>", "type_id": 0}}],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [0], "tokens": ["a"]}}},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(FILE | stages))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert len(tokenizer.encode("a  " * 200_000)) == 200_001
