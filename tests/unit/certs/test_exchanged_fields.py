"""Exchanging two values of a proof, or combining changes, gives a rejection or a true statement.

`test_proof_fields.py` changes one place. A forger may also move a valid value to another place:
numerics of one kernel to the other, a region, an array, a digest or a witness to another case or
node. The result is rejected, or it states something else that simulated runs satisfy.
"""

from __future__ import annotations

import copy
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kcdsl_certs.recheck import recheck
from tests.support.mutation.bases import BASES, made, repaired
from tests.support.mutation.changes import DIGEST, HEX_REAL, at, field_of, places
from tests.support.mutation.trials import every_change, exceeded

Document = dict[str, Any]
Place = tuple[str | int, ...]
Made = Callable[[str], tuple[Document, Path]]
EACH = 4
"""The number of pairs of each kind that are tried per proof."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a function that makes a proof, once."""
    folder = tmp_path_factory.mktemp("bases")
    known: dict[str, tuple[Document, Path]] = {}

    def make(name: str) -> tuple[Document, Path]:
        if name not in known:
            known[name] = made(name, folder)[:2]
        return known[name]

    return make


def kind_of(value: Any) -> str:
    """Return the kind of a value: values of one kind may be exchanged."""
    match value:
        case {"dtype": dtype, "shape": shape, "data": _}:
            return f"array {dtype} {shape}"
        case dict():
            return f"object {sorted(value)}"
        case list():
            return f"list {sorted({type(item).__name__ for item in value})}"
        case str() if HEX_REAL.match(value):
            return "real"
        case str() if DIGEST.match(value):
            return "digest"
        case _:
            return type(value).__name__


def exchanges(document: Document) -> dict[str, list[tuple[Place, Place]]]:
    """Return all pairs of places with different values of one kind, neither inside the other."""
    found: defaultdict[str, list[tuple[Place, Any]]] = defaultdict(list)
    for place, value in places(document):
        if place and place[-1] not in ("data", "schema"):
            found[kind_of(value)].append((place, value))
    return {
        kind: pairs
        for kind, some in found.items()
        if (
            pairs := [
                (one, two)
                for number, (one, a) in enumerate(some)
                for two, b in some[number + 1 :]
                if a != b and one != two[: len(one)] and two != one[: len(two)]
            ]
        )
    }


def exchanged(document: Document, one: Place, two: Place) -> Document:
    """Return a copy with two values exchanged, and its digests recomputed."""
    changed = copy.deepcopy(document)
    first, second = at(changed, one), at(changed, two)
    at(changed, one[:-1])[one[-1]], at(changed, two[:-1])[two[-1]] = second, first
    return repaired(changed, constants=True)


def sound(document: Document, path: Path, words: str) -> bool:
    """Return whether a document is accepted; fail if the checker or a run fails."""
    outcome = recheck(json.dumps(document).encode(), path)
    assert outcome.reason != "internal", (words, outcome.detail)
    if outcome.ok:
        assert exceeded(document, path, runs=4) == "", words
    return outcome.ok


def chosen(pairs: dict[str, list[tuple[Place, Place]]], seed: int) -> Iterator[tuple[Place, Place]]:
    rng = random.Random(seed)
    for kind in sorted(pairs):
        yield from rng.sample(pairs[kind], min(EACH, len(pairs[kind])))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", BASES)
def test_exchanged_values_are_rejected_or_true(name: str, base: Made) -> None:
    document, path = base(name)
    tried, accepted = 0, 0
    for one, two in chosen(exchanges(document), list(BASES).index(name)):
        words = f"{field_of(one)} and {field_of(two)}: {one}, {two}"
        tried += 1
        accepted += sound(exchanged(document, one, two), path, words)
    assert tried > 20
    assert accepted < tried / 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", BASES)
def test_combined_changes_are_rejected_or_true(name: str, base: Made) -> None:
    """For example a smaller region, accepted by itself, with a lowered claim."""
    document, path = base(name)
    rng = random.Random(list(BASES).index(name))
    alone = [
        c for c in every_change(document) if c.kind in ("lower", "raise", "other", "reordered")
    ]
    for _ in range(4 * EACH):
        some = rng.sample(alone, 2)
        changed = copy.deepcopy(document)
        try:
            for change in some:
                change.apply(changed)
        except (KeyError, IndexError, TypeError):  # the first change removed the second place
            continue
        sound(repaired(changed, constants=True), path, " and ".join(map(str, some)))
