"""Every change of every leaf of a JSON document that a mutation test makes.

A change is a function on a copy of the document. It has a kind ("lower", "raise", …) and a field:
the path without element names (list indices, digests, keys of tensors).
"""

from __future__ import annotations

import base64
import copy
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.proofs import array

Document = dict[str, Any]
Path = tuple[str | int, ...]

HEX_REAL = re.compile(r"-?0x[01]\.[0-9a-f]+p[+-]\d+\Z")
DIGEST = re.compile(r"[0-9a-f]{64}\Z")
# Objects whose keys are names, not fields.
NAMED = (
    *("graphs", "constants", "parameters", "results", "tables"),
    *("input_scale", "input_zero_point", "overrides", "key_scale", "value_scale", "quantisers"),
)

LOWERINGS = {"one step": None, "0.1 %": 0.999, "1 %": 0.99, "50 %": 0.5}
RAISINGS = {"0.1 % more": 1.001, "doubled": 2.0}
HUGE = 2.0**1000


@dataclass(frozen=True, slots=True)
class Change:
    """One change at one path; `what` describes it, unique within field and path."""

    path: Path
    field: str
    kind: str
    what: str
    apply: Callable[[Document], None]

    def of(self, document: Document) -> Document:
        """Return a changed copy."""
        changed = copy.deepcopy(document)
        self.apply(changed)
        return changed

    def __str__(self) -> str:
        return f"{self.field} {self.kind} ({self.what}) at {'.'.join(map(str, self.path))}"


def field_of(path: Path) -> str:
    """Return the path without indices and names: "cases[].witness[].value", "graphs{}.graph"."""
    text, after = "", ""
    for key in path:
        if isinstance(key, int):
            text += "[]"
        elif after in NAMED:
            text += "{}"
        else:
            text += f".{key}" if text else key
        after = str(key) if after not in NAMED else ""
    return text


def at(document: Any, path: Path) -> Any:
    """Return the value at a path."""
    for key in path:
        document = document[key]
    return document


def places(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the value and every value below it, containers before their contents."""
    yield path, value
    items: Iterator[tuple[str | int, Any]] = iter(())
    if isinstance(value, dict):
        items = iter(value.items())
    elif isinstance(value, list):
        items = iter(enumerate(value))
    for key, item in items:
        yield from places(item, (*path, key))


def changes(document: Document, words: dict[str, tuple[str, ...]]) -> Iterator[Change]:
    """Yield every change of a document.

    `words` maps a field with a fixed vocabulary to the other values that it may have.
    """
    digests = sorted({v for _, v in places(document) if isinstance(v, str) and DIGEST.match(v)})
    for path, value in places(document):
        if not path:
            yield from _of_object((), "(document)", value)
            continue
        field = field_of(path)
        for kind, what, new in _replacements(field, value, words, digests):
            yield Change(path, field, kind, what, _put(path, new))
        if isinstance(value, dict):
            yield from _of_object(path, field, value)
            if set(value) == {"dtype", "shape", "data"}:
                yield from _of_array(path, field, value)
        if isinstance(value, list):
            yield from _of_list(path, field, value)


def _put(path: Path, new: Any) -> Callable[[Document], None]:
    def apply(document: Document) -> None:
        at(document, path[:-1])[path[-1]] = copy.deepcopy(new)

    return apply


def _replacements(
    field: str, value: Any, words: dict[str, tuple[str, ...]], digests: list[str]
) -> Iterator[tuple[str, str, Any]]:
    if isinstance(value, str) and HEX_REAL.match(value):
        yield from _of_real(value)
    elif isinstance(value, bool) or value is None:
        yield "type", "to 1", 1
        yield "type", "to a list", [1]
    elif isinstance(value, int):
        yield from _of_integer(value)
    elif isinstance(value, str) and DIGEST.match(value):
        yield "other", "a digit changed", value[:-1] + ("0" if value[-1] != "0" else "1")
        yield "other", "in capitals", value.upper()
        yield "other", "cut", value[:-1]
        yield from (("other", f"swapped for {d[:8]}", d) for d in digests if d != value)
    elif isinstance(value, str) and not field.endswith(".data"):
        for word in words.get(field, ()):
            if word != value:
                yield "other", f"to {word!r}", word
        for word in ("", value + " ", value + "́", value.swapcase(), "\u0000", "𝔁"):
            if word != value:
                yield "other", f"to {word!r}", word
    odds: tuple[Any, ...] = (None, True, 7, "x", [], {}, [[]])
    for odd in odds:
        if type(odd) is not type(value):
            yield "type", f"to {odd!r}", odd


def _of_real(value: str) -> Iterator[tuple[str, str, Any]]:
    number = float.fromhex(value)
    for what, factor in LOWERINGS.items():
        lowered = math.nextafter(number, -math.inf) if factor is None else number * factor
        if lowered < number:
            yield "lower", what, lowered.hex()
    if number > 0:
        yield "lower", "to zero", (0.0).hex()
    if number >= 0:
        yield "negative", "negative", (-number or -1.0).hex()
    if value != (-0.0).hex():
        yield "zero", "minus zero", (-0.0).hex()
    for what, factor in RAISINGS.items():
        if math.isfinite(number * factor) and number * factor > number:
            yield "raise", what, (number * factor).hex()
    yield "raise", "to 2^1000", HUGE.hex()
    for word in ("nan", "inf", "-inf", "1e9999", "0x1p99999999999"):
        yield "not finite", f"to {word}", word
    for word in (repr(number), value.upper(), f" {value}", value.replace("p", "0p")):
        yield "spelling", f"to {word!r}", word
    yield "type", "to a JSON number", 1


def _of_integer(value: int) -> Iterator[tuple[str, str, Any]]:
    for what, new in (("less one", value - 1), ("halved", value // 2), ("to 0", 0)):
        if new < value:
            yield "lower", what, new
    if value >= 0:
        yield "negative", "negative", -value or -1
    yield "negative", "to -2^31", -(2**31)
    for what, new in (("and one", value + 1), ("doubled", 2 * value or 2)):
        yield "raise", what, new
    for what, new in (("to 2^31", 2**31), ("to 2^53 - 1", 2**53 - 1), ("to 2^53", 2**53)):
        yield "huge", what, new
    yield "huge", "to 10^400", 10**400


def _of_object(path: Path, field: str, value: Document) -> Iterator[Change]:
    for key in value:

        def drop(document: Document, key: str = key) -> None:
            del at(document, path)[key]

        def rename(document: Document, key: str = key) -> None:
            found = at(document, path)
            found[key + "́"] = found.pop(key)

        below = field_of((*path, key))
        yield Change((*path, key), below, "removed", "without it", drop)
        yield Change((*path, key), below, "renamed", "under another name", rename)
    for key in ("extra", "", "__proto__"):

        def add(document: Document, key: str = key) -> None:
            at(document, path)[key] = 1

        yield Change(path, field, "added", f"a field {key!r}", add)


def _of_list(path: Path, field: str, value: list[Any]) -> Iterator[Change]:
    variants: list[tuple[str, str, Any]] = [("added", "with a null", [*value, None])]
    if value:
        variants += [
            ("removed", "without the first", value[1:]),
            ("removed", "without the last", value[:-1]),
            ("removed", "emptied", []),
            ("repeated", "the last twice", [*value, value[-1]]),
            ("repeated", "the first twice", [value[0], *value]),
        ]
    if len(value) > 1 and value[::-1] != value:
        variants += [
            ("reordered", "reversed", value[::-1]),
            ("reordered", "turned", [*value[1:], value[0]]),
        ]
        swapped = [value[1], value[0], *value[2:]]
        if swapped != value:
            variants.append(("reordered", "the first two exchanged", swapped))
    for kind, what, new in variants:
        if new != value:
            yield Change(path, field, kind, what, _put(path, new))


def array_of(record: Document) -> np.ndarray:
    """Return the array of a record."""
    data = base64.b64decode(record["data"])
    return np.frombuffer(data, dtype=record["dtype"]).reshape(record["shape"]).copy()


def _of_array(path: Path, field: str, record: Document) -> Iterator[Change]:
    value = array_of(record)
    inside = f"{field}.data"
    for place in sorted({0, value.size // 2, value.size - 1}) if value.size else ():
        for kind, what, new in _elements(value.flat[place]):
            changed = value.copy()
            changed.flat[place] = new
            if changed.tobytes() != value.tobytes():
                what = f"element {place} {what}"
                yield Change(path, inside, kind, what, _put(path, array(changed)))
    text = record["data"]
    for what, new in (
        ("cut", text[:-4]),
        ("longer", text + "AAAA"),
        ("a line break", text[:4] + "\n" + text[4:]),
        ("no base64", "*" * len(text)),
        ("no ASCII", "é" * len(text)),
        ("url-safe", text.replace("+", "-").replace("/", "_") + "=="),
    ):
        yield Change(path, inside, "encoding", what, _put((*path, "data"), new))
    turned = {**record, "shape": record["shape"][::-1]}
    if turned != record:
        yield Change(path, f"{field}.shape", "other", "turned", _put(path, turned))
    for kind in ("float64", "float32", "bool", "int64", "float16"):
        if kind != record["dtype"]:
            other = {**record, "dtype": kind}
            yield Change(path, f"{field}.dtype", "other", f"to {kind}", _put(path, other))
            if kind != "float16":
                recast = array(np.nan_to_num(value).astype(kind))
                yield Change(path, field, "other", f"cast to {kind}", _put(path, recast))
    flat = array(value.reshape(-1))
    if flat != record:
        yield Change(path, field, "other", "flattened", _put(path, flat))


def _elements(value: Any) -> Iterator[tuple[str, str, Any]]:
    if isinstance(value, np.bool_):
        yield "other", "flipped", not value
        return
    if not isinstance(value, np.floating):
        yield "other", "and one", value + 1
        return
    for what, factor in (("0.1 %", 0.999), ("1 %", 0.99), ("50 %", 0.5), ("to zero", 0.0)):
        yield "lower", f"lower by {what}" if factor else what, value * factor
    for what, factor in RAISINGS.items():
        yield "raise", what, value * factor
    yield "negative", "negative", -value if value else -1.0
    yield "huge", "huge", 1e30
    for word in (np.nan, np.inf, -np.inf):
        yield "not finite", f"to {word}", word
