"""Write the parse table of the expression grammar: `python -m tests.support.expression_tables`.

Lark reads `expression.lark` and builds the LALR(1) table; that takes longer than linting a whole
contract. So the finished table is kept as a module of `kcdsl_grammar`, which `kcdsl.syntax.parser`
runs. A test compares the module with what this one writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kcdsl_grammar
from kcdsl.source.output import write_bytes
from kcdsl.syntax.errors import build_lark


def table_module() -> str:
    """Return the text of the module `kcdsl_grammar.expression_table`.

    States are numbered in the order in which a walk from the start states meets them, so that the
    same grammar always gives the same text.
    """
    lark = build_lark()
    table: Any = lark.parser.parser._parse_table
    rules = {rule: number for number, rule in enumerate(lark.rules)}
    order = _order(table)
    number_of = {state: number for number, state in enumerate(order)}
    starts = {str(name): number_of[state] for name, state in sorted(table.start_states.items())}
    ends = {str(name): number_of[state] for name, state in sorted(table.end_states.items())}
    words = {str(t.name).lower(): str(t.name) for t in lark.terminals if t.priority > 0}
    lines = [
        '"""The LALR(1) table of `expression.lark`. Written by `make grammar`, not by hand."""',
        "",
        "# fmt: off",
        "# ruff: noqa: E501",
        f"STARTS = {starts!r}",
        f"ENDS = {ends!r}",
        f"KEYWORDS = {dict(sorted(words.items()))!r}",
        "# (name of the rule, number of its symbols)",
        "RULES = (",
        *(f"    ({str(rule.origin.name)!r}, {len(rule.expansion)})," for rule in lark.rules),
        ")",
        "# state -> symbol -> next state, or -1 - the rule to reduce by",
        "STATES: tuple[dict[str, int], ...] = (",
    ]
    for state in order:
        row = {}
        for symbol, (_, argument) in sorted(table.states[state].items()):
            row[str(symbol)] = (
                number_of[argument] if argument in number_of else -1 - rules[argument]
            )
        lines.append(f"    {row!r},")
    return "\n".join([*lines, ")", ""])


def _order(table: Any) -> list[int]:
    """Return every state in the order of a walk from the start states."""
    waiting = [state for _, state in sorted(table.start_states.items())]
    found: dict[int, None] = {}
    while waiting:
        state = waiting.pop(0)
        if state in found:
            continue
        found[state] = None
        row = table.states[state]
        waiting += [row[symbol][1] for symbol in sorted(row) if type(row[symbol][1]) is int]
    return list(found)


def main() -> None:
    """Write the module beside the grammar."""
    path = Path(kcdsl_grammar.__file__).parent / "expression_table.py"
    write_bytes(path, table_module().encode("utf-8"))


if __name__ == "__main__":
    main()
