"""Which token a server means: by its id, else by the one id that has these bytes or this text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.files import Artefacts, companion
from kcdsl.model.tokenizer import ByteTokenizer, Tokenizer
from kcdsl_backends.empirical.sources.servers.replies import Named

_LOST = "\ufffd"
"""What stands for bytes that are no text."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of the model on this side: ids below `size`, and what the tokenizer makes of them.

    A token whose id is in doubt is refused: a wrong id would be measured as a drift.
    """

    size: int | None
    tokenizer: Tokenizer | None
    ends: frozenset[int] = frozenset()
    """The tokens that end texts, as far as the files of the model say; empty where they do not."""
    _ids: dict[str, list[int]] = field(default_factory=dict)

    def id_of(self, token: Named) -> int:
        """Return the id of a token. Refuse one that is out of the vocabulary, that has other bytes
        here than there, and one that is given without id and could be several."""
        if token.id is not None:
            return self._checked(token.id, token)
        if isinstance(self.tokenizer, ByteTokenizer) and token.bytes is not None:
            if len(token.bytes) != 1:
                raise _doubt(f"{token.bytes!r} is not one byte")
            return self._checked(token.bytes[0], token)
        if token.text is None or self.tokenizer is None or self.size is None:
            raise _doubt("it names tokens without ids, and the model has no tokenizer to find them")
        found = self._by_text().get(token.text, [])
        if len(found) != 1 or _LOST in token.text:
            several = f"is that of {len(found)} tokens" if found else "is that of no token"
            raise _doubt(f"the text {token.text!r} {several}")
        return found[0]

    def prompt_text(self, tokens: tuple[int, ...]) -> str | None:
        """Return the text that is read as exactly these tokens; None where there is none."""
        if self.tokenizer is None:
            return None
        text = self.tokenizer.decode(list(tokens))
        try:
            return text if tuple(self.tokenizer.encode(text)) == tokens else None
        except Refusal:
            return None

    def _checked(self, found: int, token: Named) -> int:
        if found < 0 or (self.size is not None and found >= self.size):
            raise _doubt(f"the token {found} is out of the vocabulary of {self.size}")
        if token.bytes is None or self.tokenizer is None:
            return found
        if isinstance(self.tokenizer, ByteTokenizer):
            if token.bytes != bytes([found]):
                raise _doubt(f"the token {found} is {token.bytes!r} there, and that byte here")
            return found
        there = token.bytes.decode("utf-8", errors="replace").strip()
        here = self.tokenizer.decode([found]).strip()
        known = bool(there) and bool(here) and _LOST not in there + here
        if known and there != here:
            raise _doubt(f"the token {found} is {there!r} there, and {here!r} here")
        return found

    def _by_text(self) -> dict[str, list[int]]:
        if not self._ids and self.tokenizer is not None:
            made: dict[str, list[int]] = {}
            for found in range(self.size or 0):
                made.setdefault(self.tokenizer.decode([found]), []).append(found)
            self._ids.update(made)  # at once: another thread sees all of it or nothing
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
