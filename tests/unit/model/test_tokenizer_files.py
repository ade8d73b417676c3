"""Tokenizers that load and fail on texts: refused, whatever the package raises."""

from __future__ import annotations

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
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "a"),  # one, too
    ],
    ids=["unknown word", "surrogate", "special token", "normalizer"],
)
def test_a_tokenizer_that_fails_is_refused(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(FILE | change))
    with pytest.raises(Refusal) as refusal:
        FileTokenizer(tmp_path / "tokenizer.json").encode(text)
    (diagnostic,) = refusal.value.diagnostics
    assert diagnostic.code == TOKENIZER
    assert diagnostic.help


def test_ids_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(FILE))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode("a b")) == "a a"
    with pytest.raises(Refusal):
        tokenizer.decode([-1])
