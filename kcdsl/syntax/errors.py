"""Explain the errors of an expression that is not well formed, with fixes.

Lark parses the text by the same grammar; at each unusable token the explanation is kept, the token
is dropped, and parsing continues. An error within three tokens of another one is most probably its
consequence and is left out, unless it is a sign of another language.

A fix follows from the advice. What to change is decided in the decoded text of the expression, and
mapped to the file: there, escapes, folds and indentation stand between its characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache

from lark import Lark
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

import kcdsl_grammar
from kcdsl.diagnostics.codes import EXPRESSION_SYNTAX
from kcdsl.diagnostics.model import Edit, Fix
from kcdsl.source.scalar_map import ScalarMap
from kcdsl.source.yaml_nodes import Scalar

_MOST = 10
"""Maximum number of reported errors of one expression."""
_MOST_DROPPED = 100
"""Maximum number of tokens of one expression that are dropped; then parsing stops."""
_APART = 3
"""Number of valid tokens after an error before another one is reported."""
_INSTEAD = re.compile(r"write `[^`]+`")
"""The advice for signs of other languages, which are mistakes in any place."""
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_TOKEN = re.compile(r"\w+|[<>=!]=|[^\s\w]")


STARTS = ("requirement", "predicate", "budget", "quantity")


@cache
def build_lark() -> Lark:
    """Return Lark's parser of the expression grammar; building it takes some 70 ms."""
    return Lark(
        kcdsl_grammar.text("expression.lark"),
        parser="lalr",
        start=list(STARTS),
        propagate_positions=True,
        maybe_placeholders=False,
        keep_all_tokens=True,
    )


def explain(text: str, start: str, report: Callable[..., None]) -> None:
    """Report every mistake by `report(code, message, begin, end, help)`, at least one."""
    last: int | None = None
    found = dropped = 0

    def on_error(error: UnexpectedInput) -> bool:
        nonlocal last, found, dropped
        begin, end, message, help = _explain(error, text)
        foreign = help is not None and _INSTEAD.fullmatch(help) is not None
        apart = last is None or len(_TOKEN.findall(text, last, begin)) >= _APART
        if apart or (foreign and last is not None and begin >= last):
            report(EXPRESSION_SYNTAX, message, begin, end, help)
            found += 1
        last = max(end, last or 0)
        dropped += 1
        lost = help is not None and help.startswith("a region is ")  # its quantifier is not read
        return found < _MOST and dropped < _MOST_DROPPED and not lost

    try:
        build_lark().parse(text, start=start, on_error=on_error)
    except UnexpectedInput:
        return
    if last is None:
        # The table refused what Lark takes: never a pass.
        report(EXPRESSION_SYNTAX, "the expression cannot be read", 0, len(text))


def _explain(error: UnexpectedInput, text: str) -> tuple[int, int, str, str | None]:
    """Return the range, the message and the advice for one error."""
    if isinstance(error, UnexpectedToken):
        expected = set(error.accepts or error.expected)
        token = error.token
        if token.type == "$END":
            at = len(text.rstrip())  # an empty range: nothing there is wrong
            message = f"the expression ends too early; expected {expected_words(expected)}"
            advice = advice_for_token("", "$END", text, at, expected)
            return at, at, message, advice
        begin = token.start_pos or 0
        # Where neither may stand, Lark takes the letters of a name for a unit.
        word = _WORD.match(text, begin) if token.type == "UNIT" else None
        shown = str(token) if word is None else max(word[0], str(token), key=len)
        message = f"`{shown}` cannot stand here; expected {expected_words(expected)}"
        advice = advice_for_token(shown, token.type, text, begin, expected)
        return begin, begin + len(shown), message, advice
    begin = error.pos_in_stream or 0
    expected = set(error.allowed or ()) if isinstance(error, UnexpectedCharacters) else set()
    length, help = advice_for_character(text, begin)
    shown = text[begin : begin + length]
    if shown[:1] in {'"', "'"}:
        return begin, len(text.rstrip()), "the text is not closed", help
    message = f"`{shown}` is not part of the language"
    if expected and help is None:
        message += f"; expected {expected_words(expected)}"
    return begin, begin + length, message, help


# --- advice ---------------------------------------------------------------------------------------


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
    """Return the length of the unusable piece at `at`, and its replacement."""
    for piece, help in _CHARACTERS:
        if text.startswith(piece, at):
            return len(piece), help
    return 1, None


def advice_for_token(
    token: str, kind: str, text: str, at: int, expected: Iterable[str]
) -> str | None:
    """Return the advice about a misplaced token, for common mistakes."""
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
        return "put the quantified statement in parentheses: `(forall x in REGION: A)`"
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
    """Return whether a word is a keyword with one wrong letter or with its letters in another
    order."""
    if sorted(word) == sorted(keyword):
        return True
    if abs(len(word) - len(keyword)) > 1 or min(len(word), len(keyword)) < 2:
        return False
    longer, shorter = sorted((word, keyword), key=len, reverse=True)
    start = next((i for i, c in enumerate(shorter) if c != longer[i]), len(shorter))
    return longer[start + 1 :] == shorter[start + (len(longer) == len(shorter)) :]


# --- fixes ----------------------------------------------------------------------------------------


_WRITE_INSTEAD = re.compile(r"write `([^`() ]+)`")
_GUESSES = {
    "write `==` for equality, or `<=`, `>=` for a bound": "==",
    "write `or`; a magnitude is `abs(...)`": "or",
    "write the minus sign `-`": "-",
}
_BEHIND = {
    "close the bracket with `)`": ")",
    "close the list with `]`": "]",
    "put `:` after the region": ":",
    "separate arguments with `,`": ",",
    "say what the budget counts: `of requests` or `of windows`": " of requests",
}
"""Advice -> the text that is missing behind the last character before the place."""
_SURE = {"write the minus sign `-`"}


def advised_fix(scalar: Scalar, places: ScalarMap, begin: int, end: int, help: str) -> Fix | None:
    """Return the fix that an advice about the characters `[begin, end)` of an expression describes.
    None if the advice leaves a choice, or if its text needs quotation marks.
    """
    text, span = scalar.text, places.span(begin, end)
    word = _WRITE_INSTEAD.fullmatch(help)
    instead = word[1] if word is not None else _GUESSES.get(help)
    if instead is not None:
        edit = Edit(span, _apart(text, begin, end, instead))
        return Fix(f"write `{instead}`", (edit,), word is not None or help in _SURE)
    if help.startswith("write `us`") and text[end : end + 1] == "s":
        return Fix("write `us`", (Edit(span, "u"),))
    if help in _BEHIND:
        missing = _BEHIND[help]
        at = len(text[:begin].rstrip())
        if missing == ")":
            at = _argument_end(text, at)
        if missing == ":" and scalar.style == "plain" and not _is_verbatim(places, at):
            return None
        edit = Edit(places.span(at, at), missing)
        return Fix(f"add `{missing.strip()}`", (edit,), safe=False)
    if help == "there is no `(` to this `)`":
        return Fix("remove `)`", (Edit(span, ""),), safe=False)
    return None


def _is_verbatim(places: ScalarMap, end: int) -> bool:
    """Return whether the characters before `end` are contiguous and on one line in the file; only
    then may the colon of a quantifier be unquoted (`kcdsl.source.yaml_text`)."""
    assert places.pieces is not None
    return places.pieces[end - 1][1] - places.pieces[0][0] == end


def _argument_end(text: str, end: int) -> int:
    """Return the end of the argument whose bracket is not closed before `end`. A comparison after
    it is not part of it, since no function takes one."""
    depth, compared = 0, end
    for at in range(end - 1, -1, -1):
        char = text[at]
        if char in ")]":
            depth += 1
        elif depth and char in "([":
            depth -= 1
        elif char in "([":
            return len(text[:compared].rstrip())
        elif not depth and char in "<>=":
            compared = at
    return end


def _apart(text: str, begin: int, end: int, word: str) -> str:
    """Return a word with spaces where it would merge with its neighbours."""
    if not word.isalpha():
        return word
    before = " " if text[begin - 1 : begin].isalnum() else ""
    after = " " if text[end : end + 1].isalnum() else ""
    return f"{before}{word}{after}"
