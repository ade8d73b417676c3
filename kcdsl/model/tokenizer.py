"""Tokenizers: bytes, and `tokenizer.json` files."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

from kcdsl.diagnostics import codes, refuse
from kcdsl.ir.terms import ModelRef
from kcdsl.model.files import Artefacts, companion
from kcdsl.source.files import excerpt, read_bytes, shown


class Tokenizer(Protocol):
    """Turns text into token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, special tokens of the model included."""
        ...

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token ids of a text rendered by a chat template, which has special tokens."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        ...


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """One token per byte of UTF-8. A vocabulary below 256 takes only the bytes below its size."""

    vocabulary: int = 256

    def encode(self, text: str) -> list[int]:
        """Return the bytes of the text. Refuse a byte that is out of the vocabulary."""
        ids = list(text.encode("utf-8", errors="surrogatepass"))
        too_large = next((i for i in ids if i >= self.vocabulary), None)
        if too_large is not None:
            raise refuse(
                codes.TOKENIZER,
                f"byte {too_large} is out of the vocabulary of {self.vocabulary} bytes",
                help="name the tokenizer of the model; `bytes` is for models that read all 256"
                " bytes",
            )
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        """Return the bytes of the text: there are no special tokens."""
        return self.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Return the text; invalid UTF-8 becomes the replacement character."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer in the format of the `tokenizers` package, without padding or truncation."""

    def __init__(self, path: Path, data: bytes | None = None) -> None:
        from tokenizers import Tokenizer as Fast

        self._path = path
        given = read_bytes(path) if data is None else data
        with _refusing(path, "is no tokenizer"):
            self._fast: Any = Fast.from_buffer(given)
            stages = json.loads(given)
        self._growth = prod(_growth(stages.get(name)) for name in _STAGES)
        self._fast.no_padding()
        self._fast.no_truncation()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, special tokens included."""
        self._refuse_growth(text)
        with _refusing(self._path, "fails on a text"):
            return list(self._fast.encode(text).ids)

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token ids without added special tokens: the template writes them itself."""
        self._refuse_growth(text)
        with _refusing(self._path, "fails on a text"):
            return list(self._fast.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""
        with _refusing(self._path, "fails on token ids"):
            return str(self._fast.decode(ids))

    def _refuse_growth(self, text: str) -> None:
        """Refuse a text that the tokenizer may expand until the memory is exhausted."""
        if self._growth * len(text) > max(_LARGEST_TEXT, _USUAL_GROWTH * len(text)):
            raise refuse(
                codes.TOKENIZER,
                f"{shown(self._path)} may make {self._growth * len(text)} characters of a text of"
                f" {len(text)}",
                help="take the tokenizer.json of the checkpoint, or write `tokenizer: bytes`",
            )


_STAGES = ("normalizer", "pre_tokenizer", "post_processor")
_LARGEST_TEXT = 2**24
"""The largest number of characters to which a text may expand."""
_USUAL_GROWTH = 512
"""The largest expansion factor of any text; Unicode tables alone expand one character to 18."""


def _growth(stage: Any) -> int:
    """Return the largest number of characters or tokens that a stage makes of one character."""
    match stage:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1, -(-len(new) // len(old)))
        case {"type": "Replace", "content": str(new)}:
            return 1 + len(new)
        case {"type": "Prepend", "prepend": str(new)}:
            return 1 + len(new)
        case {"type": "Precompiled", "precompiled_charsmap": str(packed)}:
            table = base64.b64decode(packed)
            texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
            return max(1, *(len(text.decode(errors="replace")) for text in texts))
        case {"type": "ByteLevel"}:
            return 2
        case {"type": "TemplateProcessing", "single": list(items), "special_tokens": dict(own)}:
            return len(items) + sum(len(token.get("ids", ())) for token in own.values())
        case dict():
            return prod(_growth(part) for part in stage.values())
        case list():
            return prod(_growth(part) for part in stage)
        case _:
            return 1


@contextmanager
def _refusing(path: Path, what: str) -> Iterator[None]:
    """Refuse a tokenizer where the package fails: it raises a bare Exception for every defect of
    the file, and panics, which do not derive from Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise refuse(
            codes.TOKENIZER,
            f"{shown(path)} {what}: {excerpt(error, 200)}",
            help="take the tokenizer.json of the checkpoint, or write `tokenizer: bytes`",
        ) from None


def find_tokenizer(
    ref: ModelRef, checkpoint: Path, base: Path | Artefacts, config: Mapping[str, Any]
) -> Tokenizer | None:
    """Return the tokenizer of a model: the one its contract names, else the tokenizer.json beside
    the checkpoint, else bytes where the vocabulary has at most 256; None where there is none.

    `base` is the folder of the contract. Refuse a file that is missing or is no tokenizer.
    """
    size = config.get("vocab_size")
    byte_sized = isinstance(size, int) and size <= 256
    if ref.tokenizer == "bytes":
        return ByteTokenizer(min(size, 256) if isinstance(size, int) else 256)
    files = Artefacts.of(base)
    named = ref.tokenizer
    path = files.beside(checkpoint, "tokenizer.json") if named is None else files.find(named)
    if path is not None:
        return FileTokenizer(path, files.read(path, companion("tokenizer")))
    return ByteTokenizer(size) if byte_sized and isinstance(size, int) else None
