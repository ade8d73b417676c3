"""The requests of a draft: given or generated rows, and their slices."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import codes, refuse
from kcdsl.draft.folder import ModelFolder
from kcdsl.source.files import excerpt, read_bytes, shown

MOST_SLICES = 6
"""The largest number of slices from columns of the data."""
_LEAST_ROWS = 2

PROMPTS = (
    ("question", "What is a kernel?"),
    ("question", "Why is the sky blue?"),
    ("question", "How far is the moon from the earth, and how was that measured first?"),
    ("question", "Which of these numbers is prime: 91, 97, 119? Explain how you know."),
    ("instruction", "Count to ten."),
    ("instruction", "Translate into German: the train leaves at noon."),
    ("instruction", "Write a haiku about the sea, then say in one sentence what it is about."),
    (
        "instruction",
        'Answer in JSON with the keys "city" and "country": where is the Eiffel tower?',
    ),
    ("code", "def add(a, b):"),
    ("code", "SELECT name, count(*) FROM orders GROUP BY name"),
    (
        "code",
        "for i in range(10):\n    if i % 3 == 0:\n        print(i)\n    else:\n        pass\n",
    ),
    (
        "code",
        "Write a function in Python that returns the longest common prefix of a list of strings, "
        "with a docstring, type hints and two examples.",
    ),
)
"""Requests for a draft without data: short and long, of three kinds."""


@dataclass(frozen=True, slots=True)
class DraftSlice:
    """A slice of a draft: its name, its predicate ("" for all) and a few words about it."""

    name: str
    where: str
    why: str


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The data of a draft: its path in the contract, its slices, its number of rows, and the text
    of the file if the draft generates it."""

    path: str
    slices: tuple[DraftSlice, ...]
    count: int
    text: str | None = None

    @property
    def named(self) -> tuple[str, ...]:
        """Return the slices from columns."""
        return tuple(s.name for s in self.slices if s.name not in ("all", "short", "long"))

    @property
    def short(self) -> bool:
        """Return whether there is a slice of short requests, on which blocks are proved."""
        return any(s.name == "short" for s in self.slices)

    @property
    def long(self) -> bool:
        """Return whether there is a slice of long requests."""
        return any(s.name == "long" for s in self.slices)


def own_rows(model: ModelFolder, path: str) -> DraftRows:
    """Return requests for a model: texts where it has a tokenizer, else token ids from a seed."""
    rows: list[dict[str, Any]] = []
    encode = _encoder(model)
    from random import Random

    chance = Random(0)
    most = max(2, model.longest)
    for number, (kind, text) in enumerate(PROMPTS):
        row: dict[str, Any] = {"id": f"{kind}-{number:02}"}
        tokens = None if encode is None else encode(text)
        if tokens is not None and max(tokens, default=0) < model.vocabulary:
            if len(tokens) <= most:
                row["text"] = text
            else:
                row["tokens"] = tokens[:most]
        else:
            length = min(most, max(2, len(text) // 4))
            row["tokens"] = [chance.randrange(model.vocabulary) for _ in range(length)]
        length = len(tokens) if tokens is not None and "text" in row else len(row["tokens"])
        rows.append({**row, "category": kind, "length": length})
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return DraftRows(path, slices_of(rows), len(rows), text)


def given_rows(file: Path, path: str, model: ModelFolder) -> DraftRows:
    """Return the requests of a JSONL file, with slices by its columns and by length.

    Rows with `messages` give no slices by length, which is known only after the chat template has
    run. Refuse rows that have no text, tokens or messages.
    """
    encode = _encoder(model)
    rows = json_rows(file)
    lengths = True
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("length"), bool | int | float | str):
            row.pop("length", None)  # slices cannot test it
        elif not _is_length(row["length"]):
            raise _no_row(file, number, f"`length` is {excerpt(repr(row['length']))}, no number")
        if isinstance(row.get("tokens"), list):
            row.setdefault("length", len(row["tokens"]))
        elif isinstance(row.get("text"), str):
            if encode is None:
                raise refuse(
                    codes.MALFORMED_REQUEST,
                    f"{shown(file)}, line {number}: the row has a `text`, and {shown(model.path)} "
                    "has no tokenizer.json",
                    help="save the tokenizer there, or name rows with `tokens`: --data FILE",
                )
            row.setdefault("length", len(encode(row["text"])) or 1)
        elif isinstance(row.get("messages"), list):
            lengths = False
        else:
            raise refuse(
                codes.MALFORMED_REQUEST,
                f"{shown(file)}, line {number}: a row has `text`, `tokens` or `messages`, and this "
                f"one {excerpt(', '.join(row)) or 'nothing'}",
                help='write {"text": "..."}, {"tokens": [1, 2]} or {"messages": [...]}',
            )
    return DraftRows(path, slices_of(rows, lengths=lengths), len(rows))


def _is_length(value: bool | int | float | str) -> bool:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def json_rows(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file. Refuse any other line, and an empty file."""
    found = []
    for number, line in enumerate(read_bytes(file).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise _no_row(file, number, str(error)) from None
        if not isinstance(row, dict):
            raise _no_row(file, number, f"a row is a JSON object, not {type(row).__name__}")
        found.append(row)
    if not found:
        raise refuse(codes.MALFORMED_REQUEST, f"{shown(file)} has no rows", help="give one a line")
    return found


def _no_row(file: Path, number: int, why: str) -> Exception:
    return refuse(
        codes.MALFORMED_REQUEST,
        f"{shown(file)}, line {number}: {excerpt(why, 120)}",
        help='each line is one object, such as {"id": "a", "text": "..."}',
    )


def slices_of(
    rows: Sequence[Mapping[str, Any]], *, lengths: bool = True, skip: Sequence[str] = ()
) -> tuple[DraftSlice, ...]:
    """Return the slice of all rows, slices of short and long rows, and one slice per value of
    columns with few values."""
    found = [DraftSlice("all", "", f"all {len(rows)} requests")]
    sizes = sorted(row["length"] for row in rows) if lengths else []
    if sizes:
        least = sizes[min(1, len(sizes) - 1)]
        count = sum(size <= least for size in sizes)
        found.append(
            DraftSlice("short", f"length <= {least}", f"{count} short enough to be proved quickly")
        )
        most = sizes[(3 * len(sizes)) // 4]
        above = sum(size >= most for size in sizes)
        if most > least and above >= _LEAST_ROWS:
            found.append(DraftSlice("long", f"length >= {most}", f"the {above} longest"))
    found += _by_columns(rows, skip)
    return tuple(one for one in found if not one.where or _compiles(one.where))


def _compiles(where: str) -> bool:
    """Return whether a predicate compiles without a finding: a column may have the name of a
    keyword or one like `length`, and a value may be too long or too large."""
    from kcdsl.check.expressions.fields import predicate
    from kcdsl.diagnostics import Sink
    from kcdsl.diagnostics.report import Reporter
    from kcdsl.diagnostics.spans import SourceFile, Span
    from kcdsl.source.yaml_nodes import Scalar
    from kcdsl.syntax.parser import parse_expression

    source, sink = SourceFile("", where), Sink()
    text = Scalar(where, where, "plain", Span(0, len(where)))
    tree = parse_expression(source, text, sink)
    found = None if tree is None else predicate(tree, Reporter(source, sink))
    return found is not None and not any(sink)


def _by_columns(rows: Sequence[Mapping[str, Any]], skip: Sequence[str]) -> list[DraftSlice]:
    found: list[DraftSlice] = []
    taken = {"all", "short", "long"}
    for column in rows[0]:
        if column in ("id", "text", "tokens", "length", *skip) or not _IDENTIFIER.fullmatch(column):
            continue
        values = [row.get(column) for row in rows]
        if not all(isinstance(value, str) for value in values):
            continue
        counts = {value: values.count(value) for value in sorted(set(map(str, values)))}
        repeated = all(count >= _LEAST_ROWS for count in counts.values())
        if not 2 <= len(counts) <= MOST_SLICES - len(found) or not repeated:
            continue
        for value, count in counts.items():
            name = _slug(value)
            if (
                not name
                or name in taken
                or '"' in value
                or "\\" in value
                or not value.isprintable()
            ):
                continue
            taken.add(name)
            found.append(DraftSlice(name, f'{column} == "{value}"', f"{count} by `{column}`"))
    return found


_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORDS = frozenset({"and", "or", "not", "in", "implies", "true", "false", "forall", "exists"})


def _slug(value: str) -> str:
    word = re.sub(r"[^a-z0-9]+", "_", value.lower()).strip("_")[:40]
    return word if word[:1].isalpha() and word not in _WORDS else ""


def _encoder(model: ModelFolder) -> Callable[[str], list[int]] | None:
    """Return the encoder from text to token ids; None where the folder has no tokenizer."""
    from kcdsl.model.tokenizer import ByteTokenizer, FileTokenizer

    if model.tokenizer is not None:
        return FileTokenizer(model.tokenizer).encode
    if 128 <= model.vocabulary <= 256:
        return ByteTokenizer(model.vocabulary).encode
    return None
