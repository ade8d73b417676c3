"""Reduced documents that once revealed defects."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest
from lsprotocol.types import Position as Place
from lsprotocol.types import PositionEncodingKind as Encoding

from kcdsl.check.compile import analyse
from kcdsl.diagnostics.model import Refusal, Sink
from kcdsl.diagnostics.render import FORMATS, LintRun, render
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.format import format_text
from kcdsl.ir.predicates import Undecided, find_case, first_taken
from kcdsl.ir.terms import AllOf, FieldTest, NoneOf
from kcdsl.lsp.text.positions import Lines
from tests.fuzz.examination import SECONDS, examine
from tests.support.pages import completed

FOUND = {
    "a file name that no file can have": completed(f"data: {'x' * 300}.jsonl\n").encode(),
    "a file name with a zero": completed('data: "a\\0b"\n').encode(),
    "an import of such a file": completed(
        f"imports: [{{file: {'x' * 300}.yaml, digest: sha256:00, slices: [a]}}]\n"
    ).encode(),
    "a key without a value in braces": b"{b}",
    "the same among others": b"{n: {}, r: {a}, s: , t}",
    "a pair in a list": b"a: [b: c, {d: e}]\n",
    "a pair in a list with a comment": b"a: [b: c, # d\n e]\n",
    "a comment in empty braces": b"s: {L: {#\n}}\nl:",
    "a comment behind a comma": b"{r: {r,s: {t: o,#\ns: n}}}",
    "a comment in braces before a section": b"{- : {): 2},L: {r: s,#\nl: 2},V: {}}",
    "a comment before an inner dash": b"- #\n\n -",
    "a comment behind an inner dash": b"- - #\n   r",
    "comments at every depth": (
        b"- # a\n  - # b\n    # c\n    - # d\n      x: # e\n       1 # f\n    # g\n  # h\n# i\n- k"
    ),
    "comments behind closing braces": b"a: {b: {c: 1 # x\n} # y\n} # z\nd: 2\n",
    "comments between key and value": b"a: # x\n # y\n {b: 1, # z\n c: [2]}\nd:\n  # w\n  1\n",
    "a root in braces of several lines": b"{a: {b: 1, # c\n d: 2}, e: {f: 1}, g: 3}\n",
    "an indicator of indentation": b"  require: |\n   a\n  e: |2-\n     n",
    "a list of texts with spaces": b"a:\n  - |2\n       x\n      y\n  - |\n     z\n",
    "empty lines that belong to a text": b"a: |+\n  x\n\n\nb: {c: |-\n}\n",
    "empty lines after which a section begins": b"a: |+\n  x\n\nb:\n  c: 1\n# d\n",
    "white space at the end of a line of text": b"a: |\n  x  \n   \n  y\nb: >\n  x \n\n  y\n",
    "a line end with an escape": b'a: "x \\\n    y \\\n  z"\nb: {c: "x\\\n  y", d: "x\n\n  y"}\n',
    "an unbalanced bracket in braces": b"{a: f(b,\n c: d) e, f: g}\n",
    "a key of several lines": b"? a\n  b\n: c\n? |\n  d\n: e\n",
    "a long key": b"? " + b"k" * 1200 + b"\n: v\nb: {? " + b"k" * 1200 + b" : v}\n",
    "a document of nothing": b"--- # a\n",
    "escapes of what cannot be written": completed(
        'clauses:\n  A: {require: "p99(kl) <=\\_0.02 and \\"\\a\\N\\"", level: L1}\n'
    ).encode(),
    "an accepted finding in long braces": completed(
        "slices:\n  all: {}\n  # kcdsl: ignore[KC101] it is used soon\n"
        f"  long: {{where: '{' and '.join(['length > 128'] * 9)}'}}\n"
    ).encode(),
    "an accepted finding in braces of several lines": completed(
        "clauses:\n  A: {require: p99(kl) <= 1, slices: [all],\n"
        "      # kcdsl: ignore[KC507] for now\n      threshold: 1,\n      level: L1}\n"
    ).encode(),
    "a name in a list that reads as an expression": completed(
        'clauses:\n  A: {require: ["forall x in s():(m)", "p99( kl )<=1"], level: L1}\n'
    ).encode(),
    "an unbalanced bracket that becomes one line": b"a: {require: p99kl) \n 0.02, b: }\n",
    "a comment in braces that keep their lines": (
        b"a: {# b\n c: 1, # kcdsl: ignore[KC507] d\n}\ne: |# f\n g\n"
    ),
    "a comment in brackets that keep their lines": (
        b"- - # a\n   [# b\n c, # kcdsl: ignore[KC507] d\n# e\n] # f\n- {g: 1}\n"
    ),
    "a comment behind a long key": b'a:\n  "' + b"k" * 1200 + b'" : # b\n  # c\n  d: # e\n',
    "comments at a key without a value": b"? k # : y\n  # :\n: # x\nb: {c: # d\n, e # f\n, g: 1}\n",
    "a fix after which nothing can be read": b"clauses:\n L: {require: p(k%<.0}\n",
    "a fix after which more can be said": b"\to:",
    "a quantifier without a body in braces": b"{0: {e: forall x in s(): }, f: [exists y in s(): ]}",
    "a tag before nothing": b"{s,! }",
    "a tag before a text": b"a: !!str b\nc: &d e\n",
    "an alias": b"a: &v 1\nb: *v\n",
}


@pytest.mark.sample(49)
@pytest.mark.parametrize("data", FOUND.values(), ids=FOUND.keys())
@pytest.mark.parametrize("windows", [False, True], ids=["lf", "crlf"])
def test_documents_of_fixed_defects_violate_no_property(
    data: bytes, windows: bool, tmp_path: Path
) -> None:
    if windows:
        data = data.replace(b"\n", b"\r\n")
    found = examine(data, tmp_path, before=completed("").encode())
    assert found.failure is None, found.failure


@pytest.mark.parametrize("sign", ["\r", "\x85", "\u2028", "\u2029"])
@pytest.mark.parametrize("text", ["a: b # c{}clauses: d\n", "a: b{}  c\n", "a: |\n  b{}  c\n"])
def test_line_separators_of_other_readers_are_refused(sign: str, text: str) -> None:
    sink = Sink()
    source = SourceFile("c", text.format(sign))
    assert analyse(source, sink).root is None
    (found,) = sink
    assert found.code.id == "KC001"
    assert found.span is not None
    assert source.text[found.span.start : found.span.end] == sign
    assert f"U+{ord(sign):04X}" in found.message
    assert format_text(source, Sink()) is None


# --- time -----------------------------------------------------------------------------------------

MANY = 1_500
LARGE = {
    "unusable tokens": f"clauses:\n  A: {{require: 'p99(k{'[' * 10_000}', level: L1}}\n",
    "keys twice": "kernels: {" + "x, " * 4_000 + "x}\n",
    "keys twice on lines": "clauses:\n" + "  A: {require: mean(tv) <= 5%, level: L1}\n" * MANY,
    "rows": "tables:\n  t: {unit: nats, otherwise: 2, rows: ["
    + ", ".join(f"{{where: length < {i + 1}, value: {i}}}" for i in range(MANY))
    + "]}\n",
    "rows that one takes": "tables:\n  t: {unit: nats, rows: ["
    + ", ".join("{where: length < 5 or length > 3, value: 1}" for _ in range(300))
    + "]}\n",
    "tables": "tables:\n"
    + "".join(
        f"  t{i}: {{unit: nats, rows: [{{where: length < 9, value: 1}}], otherwise: 2}}\n"
        for i in range(MANY)
    ),
    "levels": "clauses:\n"
    + "".join(f"  A{i}: {{require: mean(tvx) <= 5%, level: L17}}\n" for i in range(MANY)),
    "fields on one line": "clauses:\n  A: {require: mean(tv) <= 5%, level: L1, "
    + ", ".join(f"x{i}: 1" for i in range(MANY))
    + "}\n",
    "comments": "clauses:\n"
    + "".join(f"  A{i}: {{require: mean(tv) <= 5%, level: L1}}  # x\n" for i in range(MANY)),
}


def taken(begun: float) -> float:
    return time.process_time() - begun


@pytest.mark.sample(3)
@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE.keys())
def test_large_document_is_checked_in_time(text: str) -> None:
    source, sink = SourceFile("c.kc.yaml", completed(text)), Sink()
    begun = time.process_time()
    analyse(source, sink)
    assert taken(begun) < SECONDS
    begun = time.process_time()
    with suppress(Refusal):  # because of too many findings
        format_text(source, Sink())
    assert taken(begun) < SECONDS
    for name in FORMATS:
        begun = time.process_time()
        render(list(sink), name, None, LintRun())
        assert taken(begun) < SECONDS, name


def test_predicate_questions_have_a_size_limit() -> None:
    from fractions import Fraction

    tests = tuple(FieldTest("length", "==", Fraction(n)) for n in range(3_000))
    with pytest.raises(Undecided):
        find_case(AllOf(tuple(NoneOf(test) for test in tests)))
    with pytest.raises(Undecided):
        first_taken(tests)
    taken, witness = first_taken(tests[1:4], ("length",))
    assert taken == {0, 1, 2}
    assert witness == {"length": Fraction(4)}


def test_positions_on_a_long_line_are_found_in_time() -> None:
    lines = Lines("é" * 50_000 + "😀")
    begun = time.process_time()
    for encoding in Encoding:
        for offset in range(0, 50_000, 200):
            assert lines.offset(lines.place(offset, encoding), encoding) == offset
    assert taken(begun) < SECONDS
    assert lines.offset(Place(0, 50_001), Encoding.Utf16) == 50_000  # inside the last character
    assert lines.offset(Place(0, 50_002), Encoding.Utf16) == 50_001
    assert lines.offset(Place(0, 100_003), Encoding.Utf8) == 50_000
    assert lines.offset(Place(0, 10**9), Encoding.Utf8) == 50_001
