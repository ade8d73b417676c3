"""The seeds of mutants: corpus, examples, pages of diagnostic codes, and generated documents."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.source.yaml_nodes import parse_yaml
from tests.support.pages import completed
from tests.support.styles import Writer

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```yaml([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Seed:
    """A document, the folder of the files that it names, and whether it must be accepted."""

    name: str
    data: bytes
    folder: Path
    good: bool


@cache
def seeds() -> tuple[Seed, ...]:
    """Return every document, ordered by name."""
    found: list[Seed] = []
    for place in ("grammar/corpus", "examples"):
        for path in sorted((ROOT / place).rglob("*.yaml")):
            if "out" not in path.parts:
                name = path.relative_to(ROOT).as_posix()
                found.append(
                    Seed(name, path.read_bytes(), path.parent, "rejected" not in path.parts)
                )
    for page in sorted((ROOT / "kcdsl" / "diagnostics" / "pages").glob("KC*.md")):
        blocks = _BLOCK.findall(page.read_text(encoding="utf-8"))
        for number, (words, block) in enumerate(blocks):
            data, good = completed(block).encode(), words.split()[:1] == ["good"]
            found.append(Seed(f"{page.stem}/{number}", data, ROOT / "grammar" / "corpus", good))
    return tuple(found)


@cache
def good_seeds() -> tuple[Seed, ...]:
    """Return the documents that must be accepted."""
    return tuple(seed for seed in seeds() if seed.good)


@cache
def readable_seeds() -> tuple[Seed, ...]:
    """Return the documents that are YAML, so that they have a tree."""
    texts = ((seed, seed.data.decode("utf-8", "replace")) for seed in seeds())
    return tuple(s for s, text in texts if parse_yaml(SourceFile(s.name, text), Sink()) is not None)


def generated_seed(number: int) -> Seed:
    """Return a valid document in random styles."""
    return Seed(f"styles/{number}", Writer(number).text().encode(), ROOT / "grammar/corpus", True)
