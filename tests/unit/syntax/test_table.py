"""The stored parse table equals the grammar, and its driver agrees with Lark."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from lark import Token as LarkToken
from lark import Tree
from lark.exceptions import UnexpectedInput

import kcdsl_grammar
from kcdsl.syntax import parser
from kcdsl.syntax.errors import STARTS, build_lark
from kcdsl_grammar.expression_table import STATES
from tests.support.expression_tables import table_module

PIECES = [
    "forall x in points(all): ",
    "exists y in ball(s, 1e-3): ",
    "implies ",
    "and ",
    "or ",
    "not ",
    "in ",
    "of ",
    "true ",
    "false ",
    "p99(kl)",
    "mean(abs(log_ratio))",
    "norm_inf(drift(attn_0, x))",
    "<= ",
    "< ",
    ">= ",
    "> ",
    "== ",
    "!= ",
    "+ ",
    "- ",
    "* ",
    "/ ",
    "(",
    ")",
    "[",
    "]",
    ", ",
    ": ",
    "0.02",
    "1e-3",
    ".5",
    "5.",
    "250 ms",
    "4000 tok/s",
    "1%",
    "99.5 %",
    "80 GiB",
    '"a b"',
    "'it'",
    "kl",
    "forallx",
    "andy",
    "x_1",
    "  ",
    "\t",
    "\n",
    "&&",
    "=",
    "é",
    "$",
    "{",
    '"open',
    "1e",
    "1.2.3",
    "not_in",
    "requests",
    "windows",
    "of requests",
    "1% of requests",
    "5 % of windows",
]


def as_lark_does(tree: Any) -> Any:
    """Return Lark's tree as nested tuples with ranges."""
    if isinstance(tree, LarkToken):
        return (tree.type, str(tree), tree.start_pos, tree.end_pos)
    return (
        str(tree.data),
        tree.meta.start_pos,
        tree.meta.end_pos,
        [as_lark_does(c) for c in tree.children],
    )


def as_ours(node: parser.ParseNode | parser.Token) -> Any:
    """Return the product's tree in the same form."""
    if isinstance(node, parser.Token):
        return (node.type, node.text, node.start, node.end)
    return (node.rule, node.start, node.end, [as_ours(child) for child in node.children])


def by_lark(text: str, start: str) -> Any:
    try:
        tree = build_lark().parse(text, start=start)
    except UnexpectedInput:
        return None
    assert isinstance(tree, Tree)
    return as_lark_does(tree)


def by_table(text: str, start: str) -> Any:
    node = parser.parse(text, start)
    return None if node is None else as_ours(node)


def test_stored_table_equals_the_grammar() -> None:
    stored = Path(kcdsl_grammar.__file__).parent / "expression_table.py"
    assert stored.read_text(encoding="utf-8") == table_module(), "run `make grammar`"


def test_no_state_accepts_both_a_name_and_a_unit() -> None:
    # The driver of the table selects between them by the state alone.
    assert not [row for row in STATES if {"NAME", "UNIT"} <= set(row)]


@pytest.mark.parametrize("start", STARTS)
def test_random_token_sequences_are_parsed_as_by_lark(start: str) -> None:
    rng = random.Random(start)
    accepted = 0
    for _ in range(1500):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 7)))
        expected = by_lark(text, start)
        assert by_table(text, start) == expected, text
        accepted += expected is not None
    assert accepted


def test_corpus_expressions_and_damaged_ones_are_parsed_as_by_lark(repository: Path) -> None:
    texts = set()
    for path in (repository / "grammar" / "corpus").rglob("*.yaml"):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            found = re.search(r"(?:require|where|budget): *(.+?)(?:, \w+:.*)?$", line)
            if found:
                texts.add(found[1].strip("\"'}"))
    assert len(texts) > 50
    rng = random.Random(1)
    for text in sorted(texts):
        for start in ("requirement", "budget"):
            assert by_table(text, start) == by_lark(text, start), text
        for _ in range(10):
            at = rng.randrange(len(text) + 1)
            cut = text[:at] + rng.choice(["", " ", "(", ")", ",", "and", "1", "x"]) + text[at + 1 :]
            assert by_table(cut, "requirement") == by_lark(cut, "requirement"), cut
