"""Every decoded character of a scalar is found in the source, in every style."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kcdsl.diagnostics import Severity, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.source.scalar_map import map_scalar
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, SequenceNode, parse_yaml

WORDS = st.text(st.sampled_from("abkl <=()é𝒳\"'\\_.#:-"), min_size=1, max_size=12)
LINE = WORDS.map(str.strip).filter(bool)
BREAK = st.sampled_from(["\n", "\r\n"])


def scalars(node: Node) -> list[Scalar]:
    """Return every scalar of a tree."""
    match node:
        case Scalar():
            return [node]
        case SequenceNode(items=items):
            return [scalar for item in items for scalar in scalars(item)]
        case Mapping(entries=entries):
            return [s for e in entries for part in (e.key, e.value) for s in scalars(part)]


def block(lines: list[str], style: str, chomp: str, end: str, explicit: bool, deep: int) -> str:
    """Write a block scalar as the value of `k`, below an indented mapping."""
    indent = "    " + " " * deep
    header = f"{style}{2 + deep if explicit else ''}{chomp}"
    body = "".join(f"{indent}{line}{end}" if line.strip() else end for line in lines)
    return f"top:{end}  k: {header}{end}{body}  z: 1{end}"


def single(text: str) -> str:
    """Write a text in single quotes."""
    return "'" + text.replace("'", "''") + "'"


def double(text: str, escaped: list[bool]) -> str:
    """Write a text in double quotes, some of its characters as escapes."""
    out = []
    for char, hide in zip(text, escaped, strict=False):
        if hide or char in '"\\':
            out.append({'"': '\\"', "\\": "\\\\"}.get(char, f"\\U{ord(char):08x}"))
        else:
            out.append(char)
    return '"' + "".join(out) + '"'


def check(text: str, must_map: bool = True) -> list[Scalar]:
    """Assert that every scalar maps character by character; return the scalars."""
    source, sink = SourceFile("generated.yaml", text), Sink()
    root = parse_yaml(source, sink)
    assert root is not None, [d.message for d in sink if d.severity is Severity.ERROR]
    found = scalars(root)
    for scalar in found:
        mapped = map_scalar(source, scalar)
        if must_map:
            assert mapped.pieces is not None, (text, scalar)
        if mapped.pieces is None:
            continue
        assert len(mapped.pieces) == len(scalar.text)
        last = scalar.span.start
        for char, (start, end) in zip(scalar.text, mapped.pieces, strict=True):
            written = text[start:end]
            assert scalar.span.start <= start < end <= scalar.span.end
            assert start >= last, "places never go back"
            last = start
            folded = char == " " and written in {"\n", "\r\n"}
            broken = char == "\n" and written in {"\n", "\r\n"}
            escape = written.startswith("\\") or written == "''"
            assert written == char or folded or broken or escape
    return found


@pytest.mark.full
@settings(max_examples=300)
@given(
    lines=st.lists(st.one_of(LINE, st.just(""), LINE.map(lambda s: "  " + s)), min_size=1),
    style=st.sampled_from("|>"),
    chomp=st.sampled_from(["", "-", "+"]),
    end=BREAK,
    explicit=st.booleans(),
    deep=st.integers(0, 2),
)
def test_block_scalars_map_character_by_character(
    lines: list[str], style: str, chomp: str, end: str, explicit: bool, deep: int
) -> None:
    first = next((line for line in lines if line.strip()), "")
    if first.startswith(" ") and not explicit:
        lines = [line.strip() for line in lines]
    check(block(lines, style, chomp, end, explicit, deep))


@pytest.mark.full
@settings(max_examples=300)
@given(parts=st.lists(LINE, min_size=1, max_size=4), end=BREAK, gaps=st.integers(1, 3))
def test_multi_line_single_quoted_scalars_are_mapped(parts: list[str], end: str, gaps: int) -> None:
    text = (end * gaps + "    ").join(single(part)[1:-1] for part in parts)
    (_, value) = check(f"k: '{text}'{end}")
    assert value.style == "'"


@pytest.mark.full
@settings(max_examples=300)
@given(text=WORDS, escaped=st.lists(st.booleans(), min_size=12, max_size=12))
def test_double_quoted_scalars_are_mapped(text: str, escaped: list[bool]) -> None:
    (_, value) = check(f"k: {double(text, escaped)}\n")
    assert value.text == text


@pytest.mark.full
@settings(max_examples=300)
@given(
    words=st.lists(st.text("abkl(é𝒳_)<=", min_size=1, max_size=6), min_size=1, max_size=6),
    breaks=st.lists(st.sampled_from([" ", "  ", "\n  ", "\n\n   ", "\r\n "]), min_size=5),
)
def test_plain_scalars_are_mapped(words: list[str], breaks: list[str]) -> None:
    text = "x" + words[0]
    for gap, word in zip(breaks, words[1:], strict=False):
        text += gap + word
    (_, value) = check(f"k: {text}\n")
    assert value.style == "plain"


VALUES = st.recursive(
    st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.full
@settings(max_examples=300)
@given(value=VALUES, width=st.sampled_from([20, 80]), flow=st.booleans())
@example(value={"_(": "A", ")": ""}, width=20, flow=True)
def test_documents_written_by_pyyaml_are_mapped(value: object, width: int, flow: bool) -> None:
    text = yaml.safe_dump(
        {"k": value}, allow_unicode=True, width=width, default_flow_style=flow, sort_keys=False
    )
    source, sink = SourceFile("dumped.yaml", text), Sink()
    root = parse_yaml(source, sink)
    codes = {d.code.id for d in sink}
    if root is None:  # possibly with a note about a scalar before that
        assert codes - {"KC015"} == {"KC001"}
        return
    for scalar in scalars(root):
        mapped = map_scalar(source, scalar)
        odd = any(char in text for char in "\x85\u2028\u2029")
        assert mapped.pieces is not None or odd
