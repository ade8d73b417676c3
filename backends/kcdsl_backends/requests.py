"""Requests: the rows of JSONL files that slices select.

A row is `{"id": ..., "text": ...}` or `{"id": ..., "tokens": [...]}` with any further fields. A row
without an `id` is named by the digest of its tokens, so that its name does not depend on its
position. Ambiguous input is refused with its line: a malformed line, a duplicate id, a row without
a field that a slice tests.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any, assert_never

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Refusal, refuse
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir.terms import AllOf, AnyOf, FieldTest, NoneOf, Predicate, Slice
from kcdsl.model.files import Artefacts
from kcdsl.source.files import MARK, MARKED, UNMARKED, excerpt, json_value, read_source, shown

SIZE_LIMIT = 256 * 2**20
"""Largest request file in bytes."""
LINES = 250_000
"""Largest number of lines of a request file."""

Tokenize = Callable[[str], Sequence[int]]
Render = Callable[[Mapping[str, Any]], Sequence[int]]
"""Returns the tokens of a row with `messages`; raises Refusal."""
Check = Callable[[Sequence[int]], object]
"""Raises Refusal for tokens that the model cannot take."""


@dataclass(frozen=True, slots=True)
class Request:
    """One row: its tokens, and the fields that slices test (`length` included)."""

    key: str
    """`file:id`, unique over all files."""
    id: str
    tokens: tuple[int, ...]
    fields: Mapping[str, str | bool | Fraction]
    line: int

    @property
    def length(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class RequestFile:
    """A request file as it was read; `sha256` pins its bytes."""

    name: str
    sha256: str
    requests: tuple[Request, ...]
    source: SourceFile | None = None
    """The text; None for a recording, whose rows are not lines of a text."""


def load_requests(
    path: Path,
    name: str,
    tokenize: Tokenize | None,
    check: Check = lambda tokens: None,
    render: Render | None = None,
) -> RequestFile:
    """Read a JSONL file that the contract calls `name`. `render` applies the chat template of the
    checkpoint; None if the command does not.

    Raises Refusal for a missing file, a malformed line, a duplicate id, text without a tokenizer,
    tokens that differ from those of the row's text, and tokens that `check` refuses.
    """
    source = read_source(shown(path), SIZE_LIMIT)
    if source.line_count > LINES:
        raise refuse(
            codes.TOO_LARGE,
            f"{source.name} has more than {LINES} lines",
            help="split it into the files of several slices",
        )
    sha256 = hashlib.sha256(source.text.encode("utf-8")).hexdigest()
    requests: list[Request] = []
    seen: dict[str, int] = {}
    unnamed: Counter[str] = Counter()
    for number in range(1, source.line_count + 1):
        line = source.line(number)
        if not line.strip():
            continue
        request = _read_row(source, number, line, name, (tokenize, render), check)
        if not request.id:
            digest = _digest(request.tokens)
            unnamed[digest] += 1
            own = digest if unnamed[digest] == 1 else f"{digest}-{unnamed[digest]}"
            request = replace(request, key=f"{name}:{own}", id=own)
        if request.id in seen:
            raise _refuse_line(
                codes.DUPLICATE_REQUEST,
                f"the id `{request.id}` was given in line {seen[request.id]} already",
                source,
                number,
                "give each row an id of its own, such as its number",
            )
        seen[request.id] = number
        requests.append(request)
    return RequestFile(name, sha256, tuple(requests), source)


def requests_of(
    files: Artefacts,
    name: str,
    tokenize: Tokenize | None,
    check: Check = lambda tokens: None,
    render: Render | None = None,
) -> RequestFile:
    """Read the JSONL file that a contract calls `name`, and record its digest; see
    `load_requests`."""
    found = load_requests(files.find(name), name, tokenize, check, render)
    files.record(name, found.sha256)
    return found


def select(file: RequestFile, slice_: Slice) -> tuple[Request, ...]:
    """Return the rows of a file that a slice selects, in the order of the file.

    Raises Refusal where a row lacks a field that the predicate names.
    """
    return tuple(r for r in file.requests if _holds(slice_.where, r, file, slice_.name))


# --- rows ----------------------------------------------------------------------------------------

DIGITS = 12
"""Hexadecimal digits that name a request without an id."""


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:DIGITS]


def _read_row(
    source: SourceFile,
    number: int,
    line: str,
    name: str,
    readers: tuple[Tokenize | None, Render | None],
    check: Check,
) -> Request:
    """Return the request of a line; its `id` is empty if the row has none."""

    def refusal(message: str, help: str | None = None) -> Refusal:
        return _refuse_line(codes.MALFORMED_REQUEST, message, source, number, help)

    if number == 1 and line.startswith(MARK):
        raise refusal(MARKED, UNMARKED)
    try:
        row = json_value(line, parse_float=_decimal, parse_constant=_decimal)
    except (ValueError, RecursionError) as error:
        raise refusal(f"not a JSON object: {error}") from None
    if not isinstance(row, dict):
        raise refusal('a request is a JSON object, such as {"id": "a", "text": "..."}')
    identifier = row.get("id", "")
    if isinstance(identifier, int) and not isinstance(identifier, bool):
        identifier = str(identifier)
    if not isinstance(identifier, str) or ("id" in row and not identifier):
        raise refusal(
            "the `id` of a request is a non-empty string or an integer",
            "leave it out to name the request by its tokens",
        )
    try:
        tokens = _tokens(row, *readers, refusal)
        check(tokens)
    except Refusal as error:
        first = error.diagnostics[0]
        if first.span is not None:
            raise
        raise _refuse_line(first.code, first.message, source, number, first.help) from error
    fields = {key: value for key, raw in row.items() if (value := _plain(raw)) is not None}
    fields.setdefault("length", Fraction(len(tokens)))
    return Request(f"{name}:{identifier}", identifier, tokens, fields, number)


def _tokens(
    row: Mapping[str, Any],
    tokenize: Tokenize | None,
    render: Render | None,
    refusal: Callable[..., Refusal],
) -> tuple[int, ...]:
    text, given = row.get("text"), row.get("tokens")
    if text is None and row.get("messages") is not None:
        return _rendered(row, render, refusal)
    if text is None and given is None:
        raise refusal(
            "a request needs a `text`, its `tokens` or `messages`",
            f"the row has {', '.join(f'`{key}`' for key in row)}",
        )
    if given is not None and not (
        isinstance(given, list)
        and all(isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in given)
    ):
        raise refusal("`tokens` must be a list of token ids")
    if text is None:
        tokens = tuple(given or ())
    else:
        if not isinstance(text, str):
            raise refusal("`text` must be a string")
        if tokenize is None:
            raise refusal(
                "the row has a `text`, but the model has no tokenizer",
                "name a tokenizer in the model section, or give `tokens`",
            )
        tokens = tuple(tokenize(text))
        if given is not None and tuple(given) != tokens:
            at = next(
                (i for i, (a, b) in enumerate(zip(given, tokens, strict=False)) if a != b),
                min(len(given), len(tokens)),
            )
            raise refusal(f"`tokens` and the tokens of `text` differ from position {at} on")
    if not tokens:
        raise refusal("the request has no tokens")
    return tokens


def _rendered(
    row: Mapping[str, Any], render: Render | None, refusal: Callable[..., Refusal]
) -> tuple[int, ...]:
    """Return the tokens of messages; tokens in the row must equal them."""
    messages, given = row["messages"], row.get("tokens")
    if not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages) and messages):
        raise refusal('`messages` must be a list such as [{"role": "user", "content": "..."}]')
    if render is None:
        if isinstance(given, list):  # they replace the template
            return _tokens({"tokens": given}, None, None, refusal)
        raise refusal(
            "the row has `messages`, and no chat template of the checkpoint is run for it",
            "`kcdsl evaluate` runs the template of a checkpoint with a tokenizer;"
            " elsewhere give the row its `tokens`",
        )
    tokens = tuple(render({name: _with_floats(cell) for name, cell in row.items()}))
    if given is not None and (not isinstance(given, list) or tuple(given) != tokens):
        raise refusal("`tokens` differ from those of `messages` under the chat template")
    if not tokens:
        raise refusal("the request has no tokens")
    return tokens


def _with_floats(cell: Any) -> Any:
    """Return a JSON value with floats for decimals, which templates print as 1e-07, not 1E-7."""
    match cell:
        case Decimal():
            return float(cell)
        case list():
            return [_with_floats(one) for one in cell]
        case dict():
            return {name: _with_floats(one) for name, one in cell.items()}
    return cell


def _plain(raw: Any) -> str | bool | Fraction | None:
    """Return a field that a slice can test, or None for null, lists and objects."""
    if isinstance(raw, str | bool):
        return raw
    if isinstance(raw, int | Decimal):
        return Fraction(raw)
    return None


def _decimal(digits: str) -> Decimal:
    """Return an exact number; raises ValueError for one whose fraction has very many digits."""
    if not digits[-1].isdigit():
        raise ValueError(f"{digits} is not a JSON value")
    try:
        number = Decimal(digits)
    except InvalidOperation:  # an exponent of many digits
        number = None
    if number is None or len(digits) > 1000 or (number and abs(number.adjusted()) > 400):
        raise ValueError(f"the number {excerpt(digits)} is out of range")
    return number


# --- predicates ----------------------------------------------------------------------------------


_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": eq,
    "!=": ne,
    "<": lt,
    "<=": le,
    ">": gt,
    ">=": ge,
}


def _every(
    parts: Sequence[Predicate], request: Request, file: RequestFile, slice_name: str
) -> list[bool]:
    return [_holds(part, request, file, slice_name) for part in parts]


def _holds(predicate: Predicate, request: Request, file: RequestFile, slice_name: str) -> bool:
    """Return whether a row satisfies a predicate. Every part is evaluated, so that missing fields
    are always found."""
    match predicate:
        case AllOf(parts):
            return all(_every(parts, request, file, slice_name))
        case AnyOf(parts):
            return any(_every(parts, request, file, slice_name))
        case NoneOf(part):
            return not _holds(part, request, file, slice_name)
        case FieldTest(field, op, value):
            actual = request.fields.get(field)
            if actual is None or _kind(actual) != _kind(value):
                problem = "has no" if actual is None else f"has the {_kind(actual)} {actual} as"
                message = (
                    f"the request `{request.id}` {problem} field `{field}`, which the slice "
                    f"`{slice_name}` compares with a {_kind(value)}"
                )
                help = "give the field to every row, or name a field that all rows have"
                if file.source is None:
                    word = "line" if file.name.endswith(".jsonl") else "row"
                    where = f"{file.name}, {word} {request.line}"
                    raise refuse(codes.REQUEST_FIELD, f"{where}: {message}", help=help)
                raise _refuse_line(codes.REQUEST_FIELD, message, file.source, request.line, help)
            return bool(_COMPARISONS[op](actual, value))
        case _:
            assert_never(predicate)


def _kind(value: str | bool | Fraction) -> str:
    if isinstance(value, bool):
        return "boolean"
    return "string" if isinstance(value, str) else "number"


def _refuse_line(
    code: codes.Code, message: str, source: SourceFile, number: int, help: str | None = None
) -> Refusal:
    start = source.line_start(number)
    end = start + max(1, len(source.line(number)))
    return refuse(code, message, help=help, source=source, span=Span(start, end))
