"""Syntax errors in words: what could stand at a place, and the classic mistakes."""

from __future__ import annotations

import re
from collections.abc import Iterable

_WORDS = {
    "FORALL": "`forall`",
    "EXISTS": "`exists`",
    "IN": "`in`",
    "OF": "`of`",
    "AND": "`and`",
    "OR": "`or`",
    "NOT": "`not`",
    "IMPLIES": "`implies`",
    "TRUE": "`true`",
    "FALSE": "`false`",
    "NAME": "a name",
    "UNIT": "a unit",
    "NUMBER": "a number",
    "STRING": "a text in quotation marks",
    "COMPARE": "a comparison (<= < >= > ==)",
    "PLUS": "`+`",
    "MINUS": "`-`",
    "STAR": "`*`",
    "SLASH": "`/`",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "COMMA": "`,`",
    "COLON": "`:`",
    "$END": "the end of the expression",
}
TERMINALS = frozenset(_WORDS) - {"$END"}
"""Every terminal of the grammar that can be expected; a test compares it with the grammar."""
_NAMES = {"NAME", "UNIT"}
_OPERAND = {"NAME", "NUMBER", "LPAR"}
_ARITHMETIC = {"PLUS", "MINUS", "STAR", "SLASH"}
_LOGIC = {"AND", "OR", "IMPLIES"}
_BOUND = re.compile(r"\b(?:forall|exists)\s+\w+$")
_CALLED = re.compile(r"\b(?:p[0-9]+|mean|max|min|rate|abs)$")
_LEVEL = re.compile(r"\bp([0-9]{2})$")
_REGION = re.compile(r"\b(?:forall|exists)\s+\w+\s+in\s+(\w+)$")
_QUANTIFIER = re.compile(r"\b(?:forall|exists)$")

_LAST_WORD = re.compile(r"[A-Za-z]+$")
_BINDS = re.compile(r"\w+\s+in\b")
_BINDING = ("forall", "exists")
_JOINING = ("and", "or", "implies", "not", "in")

_CHARACTERS: tuple[tuple[str, str], ...] = (
    ("&&", "write `and`"),
    ("||", "write `or`"),
    ("&", "write `and`"),
    ("|", "write `or`; a magnitude is `abs(...)`"),
    ("^", "there are no powers; multiply instead"),
    ("!", "write `not`"),
    ("≤", "write `<=`"),
    ("≥", "write `>=`"),
    ("≠", "write `!=`"),
    ("=>", "write `>=` for a bound, or `implies`"),
    ("=<", "write `<=`"),
    ("=", "write `==` for equality, or `<=`, `>=` for a bound"),
    ("∀", "write `forall`"),
    ("∃", "write `exists`"),
    ("∈", "write `in`"),
    ("∧", "write `and`"),
    ("∨", "write `or`"),
    ("¬", "write `not`"),
    ("→", "write `implies`"),
    ("⇒", "write `implies`"),
    ("×", "write `*`"),
    ("·", "write `*`"),
    ("÷", "write `/`"),
    ("−", "write the minus sign `-`"),
    ("∞", "there is no infinite number; leave the clause out"),
    ("‖", "write norm_2(...) or norm_inf(...)"),
    ("µ", "write `us` for microseconds"),
    ("{", "the language has no braces; lists are `[a, b]`"),
    ("@", "the language has no `@`"),
    (".", "a name holds letters, digits and `_`, and has no parts; a statistic is p99(kl)"),
    ("“", 'use straight quotation marks: "text"'),
    ("”", 'use straight quotation marks: "text"'),
    ("'", "close the text with `'`"),
    ('"', 'close the text with `"`'),
)


def expected_words(terminals: Iterable[str]) -> str:
    """Return the expected terminals in words, the common groups as one word."""
    left = {t for t in terminals if t in _WORDS}
    words: list[str] = []
    if left >= _OPERAND:
        if left >= {"FORALL", "EXISTS", "NOT"}:
            words.append("`forall`, `exists`, `not`")
        words += ["a name", "a number", "`(`"]
        left -= _OPERAND | {"MINUS", "STRING", "TRUE", "FALSE", "LSQB"}
        left -= {"FORALL", "EXISTS", "NOT"}
    if left >= _ARITHMETIC:
        words.append("an operator (+ - * /)")
        left -= _ARITHMETIC
    if "COMPARE" in left:
        words.insert(0, _WORDS["COMPARE"])
        left -= {"COMPARE"}
    if left >= _LOGIC:
        words.append("`and`, `or`, `implies`")
        left -= _LOGIC
    closers = [t for t in ("RPAR", "RSQB", "COMMA", "COLON", "$END") if t in left]
    rest = sorted(left - set(closers))
    words = [_WORDS[t] for t in closers] + words + [_WORDS[t] for t in rest]
    if not words:
        return "something else"
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def advice_for_character(text: str, at: int) -> tuple[int, str | None]:
    """Return the length of the unusable piece at `at` and what to write instead."""
    for piece, help in _CHARACTERS:
        if text.startswith(piece, at):
            return len(piece), help
    return 1, None


def advice_for_token(
    token: str, kind: str, text: str, at: int, expected: Iterable[str]
) -> str | None:
    """Return what to do about a token at the wrong place, for the classic mistakes."""
    wanted = set(expected)
    before = text[:at].rstrip()
    if kind == "$END" and "RPAR" in wanted and text.count("(") > text.count(")"):
        return "close the bracket with `)`"
    if kind == "$END" and "RSQB" in wanted:
        return "close the list with `]`"
    if kind == "$END" and "OF" in wanted and before[-1:].isalpha():
        return "a budget is a share, such as `1% of requests`"
    if kind == "$END" and "OF" in wanted:
        return "say what the budget counts: `of requests` or `of windows`"
    if kind == "RPAR" and text.count(")") > text.count("("):
        return "there is no `(` to this `)`"
    if kind == "COMPARE" and before.endswith((">", "<", "=")):
        return "write `<=` or `>=`; for an implication write `implies`"
    if kind == "STAR" and before.endswith("*"):
        return "there are no powers; multiply instead"
    if kind in _NAMES and _QUANTIFIER.search(before):
        return "put what is quantified in round brackets: `(forall x in REGION: A)`"
    if kind in _NAMES and token in {"if", "then"}:
        return "write `A implies B`"
    called = _CALLED.search(before)
    if called is not None and "LPAR" in wanted and kind in _NAMES:
        return f"write `{called[0]}({token})`"
    level = _LEVEL.search(before)
    if level is not None and kind == "NUMBER" and token.startswith("."):
        return f"write quantile(0.{level[1]}{token[1:]}, METRIC)"
    region = _REGION.search(before)
    if region is not None and "LPAR" in wanted and kind in _NAMES | {"COLON", "COMMA"}:
        name = region[1]
        return (
            f"a region is points({name}), ball({name}, RADIUS), hull({name}) or "
            f"rows({name}, LONGEST)"
        )
    if kind == "COMMA" and _BOUND.search(before):
        return "a quantifier binds one variable"
    if kind == "COMMA" and "COLON" in wanted:
        return "write `:` after the region, not `,`"
    if kind == "COLON" and "IN" not in wanted:
        return "a `:` follows only the region of `forall` or `exists`"
    if kind in _NAMES and "COLON" in wanted:
        return "put `:` after the region"
    if kind in _NAMES | {"NUMBER"} and "COMMA" in wanted:
        return "separate arguments with `,`"
    if kind in _NAMES | {"NUMBER", "LPAR", "LSQB", "NOT"}:
        return _misspelt_keyword(token, before, wanted, text[at:])
    return None


def _misspelt_keyword(token: str, before: str, wanted: set[str], rest: str) -> str | None:
    """Return the keyword that one of two words side by side probably means."""
    last = _LAST_WORD.search(before)
    words: list[tuple[str, tuple[str, ...]]] = []
    if last is not None:
        words.append((last[0], _BINDING if _BINDS.match(rest) else _JOINING))
    words.append((token, tuple(word for word in _JOINING if word.upper() in wanted)))
    for word, keywords in words:
        for keyword in keywords:
            if word != keyword and _alike(word.lower(), keyword):
                return f"did you mean `{keyword}` where `{word}` stands?"
    return None


def _alike(word: str, keyword: str) -> bool:
    """Say whether a word is a keyword but for one letter or the order of its letters."""
    if sorted(word) == sorted(keyword):
        return True
    if abs(len(word) - len(keyword)) > 1 or min(len(word), len(keyword)) < 2:
        return False
    longer, shorter = sorted((word, keyword), key=len, reverse=True)
    start = next((i for i, c in enumerate(shorter) if c != longer[i]), len(shorter))
    return longer[start + 1 :] == shorter[start + (len(longer) == len(shorter)) :]
