"""Every character of a scalar is found at its source position, in every style and layout."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import yaml
from lsprotocol.types import PositionEncodingKind as Encoding

from kcdsl.diagnostics import Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.lsp.text.positions import Lines
from kcdsl.source import yaml_nodes
from kcdsl.source.scalar_map import map_scalar
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, SequenceNode, parse_yaml
from tests.support.layouts import SHORT, STYLES, Document, document

FAST, MANY = 300, 4000
WORDS = (
    "abc", "x", "kl", "p99(kl) <= 0.02", "forall x in points(all): no_flip(model, x)", "é", "𝒳🚀",
    "it's", '"', "'", "\\", "a#b", "a: b", "#", "- ", "--- ", "...", "%", "[a, b]", "{", "|", ">-",
    "quantile(0.9, kl)", "\ue000", "\u200b", "&x", "*x", "!!str",
)  # fmt: skip
WHITE = (" ", " ", " ", "  ", "\t", "\n", "\n", "\n\n", "\n\n\n", "\n ", "\n  ", " \n", "\n\t", "")


TAME = (" ", " ", " ", "  ", "\n", "\n\n", "\n\n\n", "")


def some_text(random: Random, style: str) -> str:
    """Return a random text; mostly one that the style can represent."""
    tame = style in {"plain", "'"} and random.random() < 0.8
    if tame:
        words = [random.choice(WORDS[:12]) for _ in range(random.randint(1, 9))]
        return "".join(word + random.choice(TAME) for word in words).strip()
    parts = [random.choice(WHITE) if random.random() < 0.2 else ""]
    for _ in range(random.choice([0, 1, 1, 2, 3, 5, 9])):
        parts += [random.choice(WORDS), random.choice(WHITE)]
    if random.random() < 0.2:
        parts.insert(random.randint(0, len(parts)), random.choice([*SHORT, "\x7f", "\ufeff"]))
    return "".join(parts)[: random.choice([1, 5, 1000, 1000])]


def scalars(node: Node) -> list[Scalar]:
    match node:
        case Scalar():
            return [node]
        case SequenceNode(items=items):
            return [scalar for item in items for scalar in scalars(item)]
        case Mapping(entries=entries):
            return [s for e in entries for part in (e.key, e.value) for s in scalars(part)]


def examine(made: Document, text: str) -> None:
    """Assert that the scalar is decoded as the text, and each character is where it was written."""
    source, sink = SourceFile("made.yaml", made.source), Sink()
    root = parse_yaml(source, sink)
    assert root is not None, [d.message for d in sink]
    found = scalars(root)
    (scalar,) = [s for s in found if s.span.start == made.start and s.text == text]
    assert scalar.style == made.style
    mapped = map_scalar(source, scalar)
    assert mapped.pieces is not None
    assert len(mapped.pieces) == len(text)
    for piece, places in zip(mapped.pieces, made.places, strict=True):
        assert piece in places
    assert all(a[1] <= b[0] for a, b in zip(mapped.pieces, mapped.pieces[1:], strict=False))
    assert scalar.span.end <= made.end
    assert not made.source[scalar.span.end : made.end].strip()
    for other in found:
        assert map_scalar(source, other).pieces is not None, other


def in_utf16(made: Document) -> None:
    """Assert that editors get the same positions, in their encoding."""
    lines = Lines(made.source)
    for offset in {made.start, made.end, *(a for each in made.places for a, _ in each)}:
        place = lines.place(offset, Encoding.Utf16)
        above, _, begun = made.source[:offset].rpartition("\n")
        begun = begun.rstrip("\r")
        assert place.character == len(begun.encode("utf-16-le")) // 2
        assert place.line == above.count("\n") + ("\n" in made.source[:offset])


def run(style: str, count: int, seed: int, *, tabs: bool = True) -> Counter[str]:
    """Examine a number of documents; return their number by kind."""
    kinds: Counter[str] = Counter()
    random = Random(f"{style} {seed}")
    while kinds["documents"] < count:
        text = some_text(random, style)
        made = document(random, text, style)
        if made is None or ("\t" in made.source and not tabs):
            continue
        try:
            examine(made, text)
            in_utf16(made)
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"{made.source!r} holds {text!r}") from error
        kinds["documents"] += 1
        kinds["characters"] += len(text)
        written = made.source[made.start : made.end]
        kinds["several lines"] += "\n" in written.strip()
        kinds["line ends with a return"] += "\r" in made.source
        kinds["astral"] += any(char > "\uffff" for char in made.source)
        kinds["no character"] += not text
    return kinds


@pytest.mark.sample(4)
@pytest.mark.parametrize("style", STYLES)
def test_characters_are_mapped_to_their_source_position(style: str) -> None:
    kinds = run(style, FAST, 0)
    assert min(kinds["several lines"], kinds["line ends with a return"], kinds["astral"]) > 50


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_characters_of_thousands_of_documents_are_mapped(style: str) -> None:
    assert run(style, MANY, 1)["documents"] == MANY


@pytest.mark.parametrize("style", STYLES)
def test_pure_python_parser_gives_equal_positions(
    style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It reads fewer documents: it does not accept tabs as white space everywhere.
    monkeypatch.setattr(yaml_nodes, "_LOADER", yaml.SafeLoader)
    run(style, 60, 2, tabs=False)
