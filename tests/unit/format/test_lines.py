"""Line edits between two texts: complete, and minimal where text is unchanged."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcdsl.format import edits

LINES = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "  c\n", "d\n", "e\n", "\n"]), max_size=12)
END = st.sampled_from(["", "z", "z\n"])


def applied(old: str, new: str) -> str:
    text = old
    for edit in reversed(edits(old, new)):
        text = text[: edit.span.start] + edit.text + text[edit.span.end :]
    return text


@pytest.mark.full
@settings(max_examples=500)
@given(LINES, END, LINES, END)
def test_edits_transform_one_text_into_the_other(
    old: list[str], old_end: str, new: list[str], new_end: str
) -> None:
    before, after = "".join(old) + old_end, "".join(new) + new_end
    assert applied(before, after) == after
    found = edits(before, after)
    assert all(a.span.end < b.span.start for a, b in pairwise(found))
    assert bool(found) == (before != after)


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("a\nb\nc\n", "a\nB\nc\n", [(2, 4, "B\n")]),
        ("a\nx\nb\nx\nc\n", "a\ny\nb\nx\nC\n", [(2, 4, "y\n"), (8, 10, "C\n")]),
        ("a\nb\n", "a\n\nb\n", [(2, 2, "\n")]),
        ("a\n\n\nb\n", "a\n\nb\n", [(3, 4, "")]),
        ("a\nb", "a\nb\n", [(2, 3, "b\n")]),
        ("x\nx\nx\n", "x\ny\nx\n", [(2, 4, "y\n")]),
        ("", "a\n", [(0, 0, "a\n")]),
    ],
)
def test_only_what_changed_is_replaced(
    old: str, new: str, wanted: list[tuple[int, int, str]]
) -> None:
    assert [(e.span.start, e.span.end, e.text) for e in edits(old, new)] == wanted


def test_thousands_of_equal_lines_are_compared_in_time() -> None:
    old = "".join(f"C-{n}:\n  require:  x\n  level: L2\n  slices: [all]\n" for n in range(5000))
    new = old.replace("require:  x", "require: x")
    begun = time.process_time()
    assert len(edits(old, new)) == 5000
    assert time.process_time() - begun < 2
