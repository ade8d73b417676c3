"""Every change of every field of a proof is rejected, except for a documented list.

docs/proofs/certificate-fields.md names the fields with accepted changes, the kinds of change and
the reason. Any other change must be rejected. An accepted document makes its own statement: pairs
of simulated runs that it admits must satisfy its claims and witnesses.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kcdsl_certs.recheck import recheck
from tests.support.mutation.bases import BASES, made, repaired
from tests.support.mutation.changes import Change, field_of, places
from tests.support.mutation.documented import accepted_if_derived, stated
from tests.support.mutation.trials import every_change, exceeded, tried

Document = dict[str, Any]
Made = Callable[[str], tuple[Document, Path]]
# Claimed values; lowering them must never be accepted.
CLAIMED = ("claim", "cases[].claim", "cases[].witness[].value", "cases[].witness[].drift")


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


def one_of_each(changes: list[Change], seed: int, share: int = 1) -> list[Change]:
    """Return one change of every kind of every field, or of every third (…) of these."""
    groups: defaultdict[tuple[str, str], list[Change]] = defaultdict(list)
    for change in changes:
        groups[change.field, change.kind].append(change)
    chosen = [random.Random(seed).choice(group) for group in groups.values()]
    return chosen[seed % share :: share]


def accepted(
    document: Document, path: Path, some: list[Change], runs: int
) -> Iterator[tuple[str, str]]:
    """Yield field and kind of accepted changes; fail if the checker or a run fails."""
    for found in tried(document, path, some):
        assert found.outcome.reason != "internal", (str(found.change), found.outcome.detail)
        if found.outcome.ok:
            assert found.outcome.reason == "ok"
            assert exceeded(found.document, path, runs) == "", str(found.change)
            yield found.change.field, found.change.kind


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BASES)
def test_base_proofs_are_confirmed_and_valid(name: str, base: Made, follows: Any) -> None:
    document, path = base(name)
    follows(document)
    outcome = recheck(json.dumps(document).encode(), path)
    assert outcome.ok, outcome
    assert exceeded(document, path, runs=48) == ""


def test_bases_cover_every_kind_of_proof() -> None:
    bases = BASES.values()
    assert {b.domain for b in bases} == {"interval", "affine", "planes", "affine+planes"}
    for domain in ("interval", "affine"):
        some = [b for b in bases if b.domain == domain]
        assert {b.functional for b in some} >= {"inf", "2"}
        any_length = {"rows"} if domain == "interval" else set()
        assert {b.region for b in some} == {"points", "ball", "hull", "ids"} | any_length
        styles = {side["attention"]["style"] for b in some for side in (b.train, b.infer)}
        casts = {side["casts"] for b in some for side in (b.train, b.infer)}
        assert styles == {"composed", "fused"}
        assert casts >= {"any", "nearest"}
        assert any(b.infer["weights"]["format"].startswith("fp8") for b in some)
        assert any(b.infer["activations"]["format"] != "none" for b in some)
    assert {b.functional for b in bases} == {"inf", "2", "span", "no_flip"}
    for domain in ("interval", "affine", "planes"):
        sides = [s for b in bases if domain in b.domain.split("+") for s in (b.train, b.infer)]
        scales = {side[part]["scale"] for side in sides for part in ("weights", "activations")}
        assert scales >= {"group_128", "static", "per_channel"}
        assert any(side["weights"].get("rounding") == "toward_zero" for side in sides)
    casts = {side["casts"] for b in bases for side in (b.train, b.infer)}
    assert casts == {"any", "nearest", "toward_zero", "any_toward_zero", "any_direction"}
    assert {b.region for b in bases if b.planes} == {"ball", "hull"}
    assert {b.domain for b in bases if b.weights} == {"interval", "affine"}
    for domain in ("interval", "affine", "planes"):
        sides = [s for b in bases if domain in b.domain.split("+") for s in (b.train, b.infer)]
        assert any("shards" in side for side in sides)
        assert any("products" in side for side in sides)
        limits = {key for side in sides for key in side["activations"]}
        assert domain == "planes" or limits >= {"least_scale", "amax_limit", "batch_amax"}
    for domain in ("interval", "affine"):
        sides = [s for b in bases if domain in b.domain.split("+") for s in (b.train, b.infer)]
        assert any("overrides" in side and "applied" in side["weights"] for side in sides)
    assert {b.functional for b in bases if b.chance} == {"inf", "2", "span"}
    assert {b.region for b in bases if b.chance} == {"points", "ball"}


@pytest.mark.full
def test_every_field_of_the_schema_is_changed(base: Made, schemas: Any) -> None:
    schema = schemas["kcdsl.interval-proof/2"]
    seen = {
        field for name in BASES for path, _ in places(base(name)[0]) if (field := field_of(path))
    }
    missing = {field for field in fields_of(schema, schema, "") if field not in seen}
    # other tests change fields of a second checkpoint and of splits
    assert missing == {"checkpoint.infer", "cases[].splits", "cases[].splits[]"}


def fields_of(schema: Any, node: Any, field: str) -> Iterator[str]:
    """Yield every field of a schema, in the form of `field_of`."""
    if "$ref" in node:
        yield from fields_of(schema, schema["definitions"][node["$ref"].split("/")[-1]], field)
        return
    if field:
        yield field
    for key, inner in node.get("properties", {}).items():
        yield from fields_of(schema, inner, f"{field}.{key}" if field else key)
    if isinstance(inner := node.get("additionalProperties"), dict):
        yield from fields_of(schema, inner, f"{field}{{}}")
    if isinstance(inner := node.get("items"), dict):
        yield from fields_of(schema, inner, f"{field}[]")
    for inner in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from (f for f in fields_of(schema, inner, field) if f != field)


@pytest.mark.full
@pytest.mark.parametrize("name", BASES)
def test_lowered_claims_are_rejected(name: str, base: Made) -> None:
    document, path = base(name)
    lowered = [c for c in every_change(document) if c.field in CLAIMED and c.what == "one step"]
    if BASES[name].functional != "no_flip":
        assert {c.field for c in lowered} == set(CLAIMED)
    assert len(lowered) > len(document["cases"][0]["witness"])
    for found in tried(document, path, lowered):
        expected = ("claim/too-small", "claim/overall", "witness/too-small")
        assert found.outcome.reason in expected, (str(found.change), found.outcome)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", BASES)
def test_unlisted_changes_are_rejected(name: str, base: Made) -> None:
    """One change of every kind of a fifth of all fields; `make mutants` makes all."""
    document, path = base(name)
    listed = stated("Proof documents")
    some = one_of_each(every_change(document), list(BASES).index(name), share=5)
    found = set(accepted(document, path, some, runs=4))
    assert {(field, kind) for field, kind in found if kind not in listed.get(field, ())} == set()


@pytest.mark.slow
def test_accepted_changes_equal_the_list(tmp_path: Path) -> None:
    """All changes of all bases; fields accepted only if the claims follow may be absent."""
    found: Counter[tuple[str, str]] = Counter()
    cores, total = os.cpu_count() or 1, 0
    tasks = [(name, part, tmp_path / f"{name}, {part}") for part in range(PARTS) for name in BASES]
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn")) as crew:
        for count, pairs in crew.map(accepted_of_a_part, *zip(*tasks, strict=True)):
            total += count
            found.update(pairs)
    listed, anew = stated("Proof documents"), accepted_if_derived("Proof documents")
    print(summary(total, found))
    assert {(f, k) for f, k in found if k not in listed.get(f, ())} == set()
    missing = {(f, k) for f, kinds in listed.items() for k in kinds if (f, k) not in found}
    assert {(f, k) for f, k in missing if f not in anew} == set()


PARTS = 4
"""The number of parts of the changes of a base, for balanced processes."""


def accepted_of_a_part(name: str, part: int, folder: Path) -> tuple[int, Counter[tuple[str, str]]]:
    """Return the number of changes in a part of those of a base, and the accepted ones."""
    folder.mkdir()
    document, path = made(name, folder)[:2]
    some = every_change(document)[part::PARTS]
    return len(some), Counter(accepted(document, path, some, runs=12))


def summary(total: int, found: Counter[tuple[str, str]]) -> str:
    """Return the summary in docs/proofs/certificate-fields.md; pytest shows it with -rP."""
    kinds: Counter[str] = Counter()
    for (_, kind), count in found.items():
        kinds[kind] += count
    by_kind = ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common())
    some = f"{found.total():,} accepted in {len({f for f, _ in found})} fields"
    return f"{total:,} changes of {len(BASES)} proofs, {some}: {by_kind}"


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", BASES)
def test_graphs_must_match_their_digest(name: str, base: Made) -> None:
    """The same changes of graphs and constants without recomputed digests."""
    document, path = base(name)
    changes = [c for c in every_change(document) if c.field.startswith("graphs{}")]
    for change in one_of_each(changes, list(BASES).index(name), share=2):
        outcome = recheck(json.dumps(change.of(document)).encode(), path)
        assert not outcome.ok, str(change)
        assert outcome.reason != "internal", (str(change), outcome)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["decoder, interval, fused", "encoder, affine, fused"])
def test_parts_of_another_proof_are_rejected(name: str, base: Made) -> None:
    """Claims, regions, graphs and numerics of another proof: each alone, then with its graph."""
    document, path = base(name)
    for other in BASES:
        if other == name:
            continue
        foreign, elsewhere = base(other)
        assert recheck(json.dumps(document).encode(), elsewhere).reason == "checkpoint/digest"
        for key in ("graphs", "parameters", "cases"):
            if foreign[key] == document[key]:  # both bases are about the same block
                continue
            mixed = repaired({**json.loads(json.dumps(document)), key: foreign[key]}, True)
            assert not recheck(json.dumps(mixed).encode(), path).ok, (other, key)
