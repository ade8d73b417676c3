"""Tokenizers: bytes, and `tokenizer.json` files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
        """Return the token ids of a text that a chat template wrote, special tokens and all."""
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
            )
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        """Return the bytes of the text: there are no special tokens."""
        return self.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Return the text; bytes that are no UTF-8 become the replacement character."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer in the format of the `tokenizers` package, without padding or truncation."""

    def __init__(self, path: Path, data: bytes | None = None) -> None:
        from tokenizers import Tokenizer as Fast

        self._path = path
        given = read_bytes(path) if data is None else data
        with _refusing(path, "is no tokenizer"):
            self._fast: Any = Fast.from_buffer(given)
        self._fast.no_padding()
        self._fast.no_truncation()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, special tokens included."""
        with _refusing(self._path, "fails on a text"):
            return list(self._fast.encode(text).ids)

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token ids of the text alone: a template writes special tokens itself."""
        with _refusing(self._path, "fails on a text"):
            return list(self._fast.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""
        with _refusing(self._path, "fails on token ids"):
            return str(self._fast.decode(ids))


@contextmanager
def _refusing(path: Path, what: str) -> Iterator[None]:
    """Refuse a tokenizer where the package fails: with a bare Exception for every defect of the
    file, and with panics, which are no exceptions of Python."""
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
    the checkpoint, else bytes where the vocabulary is no larger; None where there is none.

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
