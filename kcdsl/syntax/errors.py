"""Explain the errors of an expression that is not well formed, with fixes.

Lark parses the text by the same grammar; at each unusable token the explanation is kept, the token
is dropped, and parsing continues. An error within three tokens of another one is most probably its
consequence and is left out, unless it is a sign of another language.

An advice says which change it means. The change is decided in the decoded text of the expression,
and mapped to the file: there, escapes, folds and indentation stand between its characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
    """Report every mistake by `report(code, message, begin, end, advice)`, at least one."""
    last: int | None = None
    found = dropped = 0

    def on_error(error: UnexpectedInput) -> bool:
        nonlocal last, found, dropped
        begin, end, message, advice = _explain(error, text)
        foreign = advice is not None and advice.foreign
        apart = last is None or len(_TOKEN.findall(text, last, begin)) >= _APART
        if apart or (foreign and last is not None and begin >= last):
            report(EXPRESSION_SYNTAX, message, begin, end, advice)
            found += 1
        last = max(end, last or 0)
        dropped += 1
        final = advice is not None and advice.final
        return found < _MOST and dropped < _MOST_DROPPED and not final

    try:
        build_lark().parse(text, start=start, on_error=on_error)
    except UnexpectedInput:
        return
    if last is None:
        # The table refused what Lark takes: never a pass.
        report(EXPRESSION_SYNTAX, "the expression cannot be read", 0, len(text))


def _explain(error: UnexpectedInput, text: str) -> tuple[int, int, str, Advice | None]:
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
    length, advice = advice_for_character(text, begin)
    shown = text[begin : begin + length]
    if shown[:1] in {'"', "'"}:
        return begin, len(text.rstrip()), "the text is not closed", advice
    message = f"`{shown}` is not part of the language"
    if expected and advice is None:
        message += f"; expected {expected_words(expected)}"
    return begin, begin + length, message, advice


# --- advice ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advice:
    """The way out of a mistake: a sentence, and the change that it means if there is only one."""

    text: str
    instead: str | None = None
    """Text that replaces the characters of the mistake; an empty one removes them."""
    missing: str | None = None
    """Text to insert behind the last character before the mistake."""
    certain: bool = False
    """Whether the change means what the author meant, so that it may be made without a question."""
    foreign: bool = False
    """Whether this is a sign of another language, and so a mistake in any place."""
    final: bool = False
    """Whether nothing behind the mistake can be read."""

    def fix(self, scalar: Scalar, places: ScalarMap, begin: int, end: int) -> Fix | None:
        """Return the change of the characters `[begin, end)` of an expression, None if there is no
        definite one, or if its text needs quotation marks."""
        text = scalar.text
        if self.instead is not None:
            edit = Edit(places.span(begin, end), _apart(text, begin, end, self.instead))
            title = f"write `{self.instead}`" if self.instead else f"remove `{text[begin:end]}`"
            return Fix(title, (edit,), self.certain)
        if self.missing is None:
            return None
        at = len(text[:begin].rstrip())
        if self.missing == ")":
            at = _argument_end(text, at)
        if self.missing == ":" and scalar.style == "plain" and not _is_verbatim(places, at):
            return None
        edit = Edit(places.span(at, at), self.missing)
        return Fix(f"add `{self.missing.strip()}`", (edit,), self.certain)


def _write(word: str) -> Advice:
    return Advice(f"write `{word}`", instead=word, certain=True, foreign=True)


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

_NO_POWERS = Advice("there are no powers; multiply instead")
_MICROSECONDS = Advice("write `us` for microseconds", instead="us", certain=True)
_CHARACTERS: tuple[tuple[str, Advice], ...] = (
    ("&&", _write("and")),
    ("||", _write("or")),
    ("&", _write("and")),
    ("|", Advice("write `or`; a magnitude is `abs(...)`", instead="or")),
    ("^", _NO_POWERS),
    ("!", _write("not")),
    ("≤", _write("<=")),
    ("≥", _write(">=")),
    ("≠", _write("!=")),
    ("=>", Advice("write `>=` for a bound, or `implies`")),
    ("=<", _write("<=")),
    ("=", Advice("write `==` for equality, or `<=`, `>=` for a bound", instead="==")),
    ("∀", _write("forall")),
    ("∃", _write("exists")),
    ("∈", _write("in")),
    ("∧", _write("and")),
    ("∨", _write("or")),
    ("¬", _write("not")),
    ("→", _write("implies")),
    ("⇒", _write("implies")),
    ("×", _write("*")),
    ("·", _write("*")),
    ("÷", _write("/")),
    ("−", Advice("write the minus sign `-`", instead="-", certain=True)),
    ("∞", Advice("there is no infinite number; leave the clause out")),
    ("‖", Advice("write norm_2(...) or norm_inf(...)")),
    ("µsec", _MICROSECONDS),
    ("µs", _MICROSECONDS),
    ("µ", Advice("write `us` for microseconds")),
    ("{", Advice("the language has no braces; lists are `[a, b]`")),
    ("@", Advice("the language has no `@`")),
    (
        ".",
        Advice("a name holds letters, digits and `_`, and has no parts; a statistic is p99(kl)"),
    ),
    ("“", Advice('use straight quotation marks: "text"')),
    ("”", Advice('use straight quotation marks: "text"')),
    ("'", Advice("close the text with `'`")),
    ('"', Advice('close the text with `"`')),
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


def advice_for_character(text: str, at: int) -> tuple[int, Advice | None]:
    """Return the length of the unusable piece at `at`, and the advice about it."""
    for piece, advice in _CHARACTERS:
        if text.startswith(piece, at):
            return len(piece), advice
    return 1, None


def advice_for_token(
    token: str, kind: str, text: str, at: int, expected: Iterable[str]
) -> Advice | None:
    """Return the advice about a misplaced token, for common mistakes."""
    wanted = set(expected)
    before = text[:at].rstrip()
    if kind == "$END" and "RPAR" in wanted and text.count("(") > text.count(")"):
        return Advice("close the bracket with `)`", missing=")")
    if kind == "$END" and "RSQB" in wanted:
        return Advice("close the list with `]`", missing="]")
    if kind == "$END" and "OF" in wanted and before[-1:].isalpha():
        return Advice("a budget is a share, such as `1% of requests`")
    if kind == "$END" and "OF" in wanted:
        what = "say what the budget counts: `of requests` or `of windows`"
        return Advice(what, missing=" of requests")
    if kind == "RPAR" and text.count(")") > text.count("("):
        return Advice("there is no `(` to this `)`", instead="")
    if kind == "COMPARE" and before.endswith((">", "<", "=")):
        return Advice("write `<=` or `>=`; for an implication write `implies`")
    if kind == "STAR" and before.endswith("*"):
        return _NO_POWERS
    if kind in _NAMES and _QUANTIFIER.search(before):
        return Advice("put the quantified statement in parentheses: `(forall x in REGION: A)`")
    if kind in _NAMES and token in {"if", "then"}:
        return Advice("write `A implies B`", foreign=True)
    called = _CALLED.search(before)
    if called is not None and "LPAR" in wanted and kind in _NAMES:
        return Advice(f"write `{called[0]}({token})`", foreign=True)
    level = _LEVEL.search(before)
    if level is not None and kind == "NUMBER" and token.startswith("."):
        return Advice(f"write quantile(0.{level[1]}{token[1:]}, METRIC)")
    region = _REGION.search(before)
    if region is not None and "LPAR" in wanted and kind in _NAMES | {"COLON", "COMMA"}:
        name = region[1]
        regions = f"points({name}), ball({name}, RADIUS), hull({name}) or rows({name}, LONGEST)"
        return Advice(f"a region is {regions}", final=True)
    if kind == "COMMA" and _BOUND.search(before):
        return Advice("a quantifier binds one variable")
    if kind == "COMMA" and "COLON" in wanted:
        return Advice("write `:` after the region, not `,`")
    if kind == "COLON" and "IN" not in wanted:
        return Advice("a `:` follows only the region of `forall` or `exists`")
    if kind in _NAMES and "COLON" in wanted:
        return Advice("put `:` after the region", missing=":")
    if kind in _NAMES | {"NUMBER"} and "COMMA" in wanted:
        return Advice("separate arguments with `,`", missing=",")
    if kind in _NAMES | {"NUMBER", "LPAR", "LSQB", "NOT"}:
        return _misspelt_keyword(token, before, wanted, text[at:])
    return None


def _misspelt_keyword(token: str, before: str, wanted: set[str], rest: str) -> Advice | None:
    """Return the keyword that one of two words side by side probably means."""
    last = _LAST_WORD.search(before)
    words: list[tuple[str, tuple[str, ...]]] = []
    if last is not None:
        words.append((last[0], _BINDING if _BINDS.match(rest) else _JOINING))
    words.append((token, tuple(word for word in _JOINING if word.upper() in wanted)))
    for word, keywords in words:
        for keyword in keywords:
            if word != keyword and _alike(word.lower(), keyword):
                return Advice(f"did you mean `{keyword}` where `{word}` stands?")
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


# --- places of changes ---------------------------------------------------------------------------


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
