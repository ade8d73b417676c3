"""Cache entries: stored values are restored unchanged, and damaged entries are rejected."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kcdsl.verdict.outcome import CaseOutcome
from kcdsl_backends.certifier import cache as module
from kcdsl_backends.certifier.bounds import CaseBound
from kcdsl_backends.certifier.cache import (
    DAMAGE,
    Cache,
    Lookup,
    decode,
    encode,
    key_of,
    rules_version,
    sources_digest,
)
from kcdsl_backends.certifier.composition import _stage_of
from kcdsl_backends.certifier.stages import BoundedStage, StageOutput
from kcdsl_backends.certifier.tasks import refuse_inconsistent
from kcdsl_backends.drift.boxes import Box
from kcdsl_backends.drift.boxes.state import InterfaceEllipsoids

KEY = key_of({"a": 1})
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=12,
)


@dataclass(frozen=True)
class Pair:
    first: float
    rest: tuple[Any, ...]


@pytest.mark.full
@given(PLAIN)
def test_values_are_restored_unchanged(value: Any) -> None:
    text = json.dumps(encode(value), allow_nan=False)
    found = decode(json.loads(text), ())
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_are_restored_bitwise(kind: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(math.prod(shape)) % 2).reshape(shape).to(kind)
    found = decode(json.loads(json.dumps(encode(tensor))), ())
    assert found.dtype == kind
    assert found.shape == tensor.shape
    assert torch.equal(found, tensor)


def test_records_of_known_classes_are_restored() -> None:
    value = Pair(0.1, (math.inf, -0.0, [True]))
    assert decode(encode(value), (Pair,)) == value
    with pytest.raises(KeyError):
        decode(encode(value), ())


@pytest.mark.parametrize(
    "value",
    [
        {"float": "0x1p+1", "more": 1}, {"float": 1}, {"float": "one"}, {"tuple": 1}, {"other": 1},
        {"record": "Pair", "fields": {"first": 1}}, {"record": "Pair", "fields": {"x": 1}}, 1.5,
        {"tensor": {"dtype": "float64", "shape": [2], "zlib": ""}},
        {"tensor": {"dtype": "object", "shape": [0], "zlib": ""}},
        {"tensor": {"dtype": "float64", "shape": [-1], "zlib": ""}},
        {"tensor": {"dtype": "float64", "shape": [0], "zlib": "!"}},
        {"tensor": {"dtype": "none", "shape": [0], "zlib": ""}},
        {"tensor": {"dtype": "float64", "shape": [2**70], "zlib": ""}},
        {"tensor": {"dtype": "float64", "shape": [2**30, 2**30], "zlib": ""}},
        {"tensor": {"dtype": "float64", "shape": [0, 2**70], "zlib": "eJwDAAAAAAE="}},
        {"tensor": {"dtype": "i4,,", "shape": [0], "zlib": "eJwDAAAAAAE="}},
        {"tensor": {"dtype": ["float64"], "shape": [0], "zlib": "eJwDAAAAAAE="}},
        {"float": "0x1p99999"}, {"tensor": {}}, {},
    ],
)  # fmt: skip
def test_invalid_encodings_are_refused(value: Any) -> None:
    with pytest.raises(DAMAGE):
        decode(value, (Pair,))


def test_tensor_with_wrong_size_is_refused() -> None:
    stored = encode(torch.zeros(1000, dtype=torch.float64))
    stored["tensor"]["shape"] = [10]
    with pytest.raises(ValueError, match="not a tensor"):
        decode(stored, ())


@pytest.mark.parametrize("value", [object(), {1: 2}, Pair, b"bytes"])
def test_unsupported_values_are_an_error(value: Any) -> None:
    with pytest.raises(TypeError):
        encode(value)


def test_entry_is_found_under_its_key_only(tmp_path: Path, follows: Callable[..., None]) -> None:
    cache = Cache(tmp_path / "new" / "folder")
    assert cache.read(KEY) == (Lookup.ABSENT, None)
    value = encode(Pair(0.1, (torch.ones(2), {"a": 1})))
    assert cache.write(KEY, value)
    assert cache.read(KEY) == (Lookup.HIT, value)
    assert cache.read(key_of({"a": 2})) == (Lookup.ABSENT, None)
    follows(json.loads(cache.path(KEY).read_bytes()))
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [cache.path(KEY)]


def test_every_damage_is_detected(tmp_path: Path) -> None:
    """Truncated, one byte changed, under another key, of another form, or too large."""
    cache = Cache(tmp_path)
    cache.write(KEY, encode({"bound": 0.25}))
    path = cache.path(KEY)
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        assert cache.read(KEY) == (Lookup.DAMAGED, None), length
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        assert cache.read(KEY) == (Lookup.DAMAGED, None), place
    for text in (good + b" ", b"[" * 100_000, b"null", b"{}", b"[]", b"\xff", good + good):
        path.write_bytes(text)
        assert cache.read(KEY) == (Lookup.DAMAGED, None), text[:20]
    other = key_of({"a": 2})
    cache.path(other).parent.mkdir(exist_ok=True)
    cache.path(other).write_bytes(good)
    assert cache.read(other) == (Lookup.DAMAGED, None)
    path.unlink()
    path.mkdir()
    assert cache.read(KEY) == (Lookup.DAMAGED, None)
    assert not cache.write(KEY, 1)


def test_oversized_entry_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)
    cache.write(KEY, "a" * 2000)
    assert cache.read(KEY)[0] is Lookup.HIT
    monkeypatch.setattr(module, "LARGEST_ENTRY", 1000)
    assert cache.read(KEY) == (Lookup.DAMAGED, None)


def test_unwritable_folder_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file")
    assert not cache.write(KEY, 1)
    assert cache.read(KEY)[1] is None


@pytest.mark.parametrize("text", ["0.5", "1e3", "NaN", "Infinity"])
def test_entry_has_no_decimal_numbers(tmp_path: Path, text: str) -> None:
    """They are written in hexadecimal, and would be rounded."""
    cache = Cache(tmp_path)
    cache.write(KEY, 1)
    path = cache.path(KEY)
    path.write_bytes(path.read_bytes().replace(b'"value":1', f'"value":{text}'.encode()))
    assert cache.read(KEY) == (Lookup.DAMAGED, None)


@pytest.mark.parametrize(
    ("outcome", "claim", "stated", "why"),
    [
        ({}, 2.0, {"claim": (2.0).hex()}, "claims something else"),
        ({}, 1.0, {"claim": (2.0).hex()}, "claims something else"),
        ({}, 1, {"claim": (1.0).hex()}, "claims something else"),
        ({"bound": math.nan}, math.nan, {"claim": math.nan.hex()}, "claims something else"),
        ({}, 1.0, {"claim": (1.0).hex(), "chance": {"alpha": "0.1"}}, "leaves something else"),
        ({"alpha": "0.1"}, 1.0, {"claim": (1.0).hex()}, "leaves something else"),
        ({"stable": True, "bound": math.inf}, 1.0, None, "a bound without a proof"),
    ],
)
def test_bound_that_disagrees_with_its_proof_is_damage(
    outcome: dict[str, Any], claim: Any, stated: Any, why: str
) -> None:
    bounded = CaseBound(CaseOutcome(**{"name": "a", "length": 1, "bound": 1.0, **outcome}))
    goal: Any = SimpleNamespace(functional="inf")
    with pytest.raises(ValueError, match=why):
        refuse_inconsistent(goal, bounded, claim, stated)


@pytest.mark.parametrize("stored", [None, (2, 3)])
def test_stage_of_another_shape_is_damage(stored: tuple[int, int] | None) -> None:
    graph: Any = SimpleNamespace(output="y", node=lambda name: SimpleNamespace(shape=(1, 3)))
    zero = torch.zeros(1, 3, dtype=torch.float64)
    box = Box(zero, zero)
    held = None if stored is None else InterfaceEllipsoids(torch.zeros(stored), torch.zeros(stored))
    stage = BoundedStage(1.0, StageOutput(box, box, held), {})
    device = torch.device("cpu")
    if held is None:
        assert _stage_of(encode(stage), graph, device).claim == 1.0
        with pytest.raises(TypeError, match="not a stage"):
            _stage_of(encode(stage.output), graph, device)
        stage = replace(stage, output=StageOutput(box, Box(zero[0], zero[0])))
    with pytest.raises(ValueError, match="not a stage" if held is None else "other ellipsoids"):
        _stage_of(encode(stage), graph, device)


def test_different_inputs_have_different_keys() -> None:
    parts: list[dict[str, Any]] = [
        {"a": 1},
        {"a": "1"},
        {"a": [1]},
        {"a": {"b": 1}},
        {"b": 1},
        {"a": 1, "b": None},
        {},
    ]
    assert len({key_of(p) for p in parts}) == len(parts)
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})


def test_rules_version_depends_on_every_source(tmp_path: Path) -> None:
    (tmp_path / "p" / "sub").mkdir(parents=True)
    (tmp_path / "p" / "a.py").write_text("x = 1\n")
    (tmp_path / "p" / "sub" / "b.py").write_text("")
    roots = [tmp_path / "p"]
    first = sources_digest(roots, "torch 1")
    assert sources_digest(roots, "torch 1") == first
    found = {first, sources_digest(roots, "torch 2")}
    (tmp_path / "p" / "a.py").write_text("x = 2\n")
    found.add(sources_digest(roots, "torch 1"))
    (tmp_path / "p" / "a.py").write_text("x = 1\n")
    (tmp_path / "p" / "sub" / "b.py").rename(tmp_path / "p" / "b.py")
    found.add(sources_digest(roots, "torch 1"))
    (tmp_path / "p" / "c.py").write_text("")
    found.add(sources_digest(roots, "torch 1"))
    assert len(found) == 5
    with pytest.raises(RuntimeError, match="no source files"):
        sources_digest([tmp_path / "p" / "sub"], "")
    assert len(rules_version()) == 64


def test_rules_version_covers_every_package_with_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes the shares of error probabilities in `statement.verdicts`."""
    seen: list[str] = []

    def digest(roots: Sequence[Path], beside: str) -> str:
        seen.extend(root.name for root in roots)
        assert all((root / "__init__.py").is_file() for root in roots)
        return beside

    monkeypatch.setattr(module, "sources_digest", digest)
    assert torch.__version__ in rules_version.__wrapped__()
    assert seen == ["kcdsl", "kcdsl_backends", "kcdsl_certs"]
