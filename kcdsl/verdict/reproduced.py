"""What differs between two reports of one evaluation, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

Document = Mapping[str, Any]


def differences(recorded: Document, found: Document) -> tuple[str, ...]:
    """Return what differs between two documents "kcdsl.report/2", clauses first; () if nothing.

    Numbers are compared as JSON writes them, which is exact for float64.
    """
    rows = [_rows(document.get("clauses")) for document in (recorded, found)]
    texts = list(_of_clauses(*rows))
    for name in dict.fromkeys((*recorded, *found)):
        if name != "clauses" and _text(recorded.get(name)) != _text(found.get(name)):
            texts.append(f"the section {name} differs")
    return tuple(texts)


def _rows(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _of_clauses(recorded: list[Any], found: list[Any]) -> Iterator[str]:
    for before, after in zip_longest(recorded, found):
        if _text(before) == _text(after):
            continue
        if not isinstance(before, Mapping) or not isinstance(after, Mapping):
            yield f"{_place(before or after)}: in one of the reports alone"
            continue
        for name in dict.fromkeys((*before, *after)):
            was, now = _text(before.get(name)), _text(after.get(name))
            if was != now:
                yield f"{_place(after)}: {name} is {now}, and {was} was recorded"


def _place(row: Any) -> str:
    return f"{row.get('clause')} on {row.get('slice')}" if isinstance(row, Mapping) else "a row"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
