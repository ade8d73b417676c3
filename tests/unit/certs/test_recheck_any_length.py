"""Proofs about sequences of any length: accepted documents, and rejected variations."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kcdsl_certs.recheck import recheck
from tests.support import proofs, sequences
from tests.support.mutation.bases import claimed

Document = dict[str, Any]
KERNELS = (
    proofs.numerics("float32", "nearest"),
    proofs.numerics("bfloat16", "any", style="fused", tile=4),
)


def made(folder: Path, build: Callable[[int], Any], longest: int) -> tuple[Document, Path]:
    """Return a proof with its derived claims, and its checkpoint."""
    graph, long = build(2), build(longest)
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    centre = np.random.default_rng(5).standard_normal((1, 8)).astype(np.float32)
    document = sequences.document(
        graph, sequences.tables_of(graph, long), KERNELS, sha256, centre, 2.0**-7, longest
    )
    return claimed(document, path), path


def decoder(rows: int) -> Any:
    return sequences.decoder(np.random.default_rng(2), rows)


def mlp(rows: int) -> Any:
    return proofs.mlp(np.random.default_rng(2), "silu", rows, 8)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Document, Path]:
    """Return a proof about 1 to 9 rows of attention."""
    return made(tmp_path_factory.mktemp("rows"), decoder, 9)


def case(document: Document) -> Document:
    found: Document = document["cases"][0]
    return found


def region(document: Document) -> Document:
    found: Document = case(document)["region"]
    return found


def test_proof_is_accepted(good: tuple[Document, Path], follows: Any) -> None:
    document, path = good
    follows(document)
    outcome = recheck(proofs.dump(document), path)
    assert outcome.ok, outcome
    assert outcome.bound == document["claim"]


def test_block_without_attention_needs_no_tables(tmp_path: Path, follows: Any) -> None:
    document, path = made(tmp_path, mlp, 1000)
    follows(document)
    assert "tables" not in region(document)
    assert recheck(proofs.dump(document), path).ok
    shorter = sequences.mutable_copy(document)
    region(shorter)["longest"] = 1
    assert recheck(proofs.dump(shorter), path).ok
    too_long = sequences.mutable_copy(document)
    region(too_long)["longest"] = 2**20 + 1
    assert recheck(proofs.dump(too_long), path).reason == "document/region"
    more = sequences.mutable_copy(document)
    region(more)["tables"] = {}
    assert recheck(proofs.dump(more), path).reason == "document/region"


@pytest.mark.parametrize("longest", [1, 2, 9])
def test_float64_tables_of_constants_are_rejected(longest: int, tmp_path: Path) -> None:
    """The bytes of constants and tables are equal, but as doubles they are other numbers."""
    graph, long = decoder(2), decoder(longest)
    tables = sequences.tables_of(graph, long)
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    known = {node["name"]: node["attrs"]["key"] for node in graph.nodes if node["name"] in tables}
    for name, key in known.items():
        constant = graph.constants[key]
        raw = (tables[name].tobytes() + bytes(2 * constant.nbytes))[: 2 * constant.nbytes]
        graph.constants[key] = np.frombuffer(raw, np.float64).reshape(constant.shape)
    document = sequences.document(graph, tables, KERNELS, sha256, np.zeros((1, 8)), 0.5, longest)
    assert recheck(proofs.dump(document), path).reason == "document/region"


@pytest.mark.parametrize("rows", [1, 3])
def test_constants_must_have_two_positions(rows: int, tmp_path: Path) -> None:
    graph, long = decoder(2), decoder(9)
    tables = sequences.tables_of(graph, long)
    for node in graph.nodes:
        if node["name"] in tables:
            graph.constants[node["attrs"]["key"]] = tables[node["name"]][:rows]
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    document = sequences.document(graph, tables, KERNELS, sha256, np.zeros((1, 8)), 0.5, 9)
    assert recheck(proofs.dump(document), path).reason == "document/region"


def test_claim_grows_with_the_longest_sequence(tmp_path: Path) -> None:
    document, path = made(tmp_path, decoder, 9)
    tables = sequences.tables_of(decoder(2), decoder(40))
    region(document)["longest"] = 40
    region(document)["tables"] = {name: proofs.array(array) for name, array in tables.items()}
    assert recheck(proofs.dump(document), path).reason == "claim/too-small"


def table(document: Document) -> tuple[str, np.ndarray]:
    name, record = next(iter(region(document)["tables"].items()))
    data = np.frombuffer(base64.b64decode(record["data"]), dtype="<f4")
    return name, data.reshape(record["shape"]).copy()


def with_table(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Document], None]:
    def edit(document: Document) -> None:
        name, values = table(document)
        region(document)["tables"][name] = proofs.array(change(values))

    return edit


def put(row: int, value: float) -> Callable[[Document], None]:
    def change(values: np.ndarray) -> np.ndarray:
        values[row, 0] = value
        return values

    return with_table(change)


def renamed_table(document: Document) -> None:
    name, values = table(document)
    del region(document)["tables"][name]
    region(document)["tables"]["other"] = proofs.array(values)


def without_table(document: Document) -> None:
    del region(document)["tables"][table(document)[0]]


def lowered(document: Document) -> None:
    claim = float.fromhex(document["claim"]) * (1 - 2.0**-20)
    document["claim"] = case(document)["claim"] = claim.hex()


def lowered_witness(document: Document) -> None:
    last = case(document)["witness"][-1]
    last["drift"] = (float.fromhex(last["drift"]) * (1 - 2.0**-20)).hex()


def bytes_of_floats(values: np.ndarray) -> np.ndarray:
    """Return a table of doubles whose bytes begin with those of a table of floats."""
    return np.frombuffer(values.tobytes() + bytes(values.nbytes), np.float64).reshape(values.shape)


EDITS: dict[str, tuple[Callable[[Document], object], str]] = {
    "no longest": (lambda d: region(d).pop("longest"), "document/region"),
    "longest 0": (lambda d: region(d).update(longest=0), "document/region"),
    "longest negative": (lambda d: region(d).update(longest=-9), "document/region"),
    "longest true": (lambda d: region(d).update(longest=True), "document/region"),
    "longest text": (lambda d: region(d).update(longest="9"), "document/region"),
    "longest null": (lambda d: region(d).update(longest=None), "document/region"),
    "longest one more": (lambda d: region(d).update(longest=10), "document/region"),
    "longest one less": (lambda d: region(d).update(longest=8), "document/region"),
    "longest too long": (lambda d: region(d).update(longest=2**20 + 1), "document/region"),
    "longest a fraction": (lambda d: region(d).update(longest=9.5), "document/json"),
    "no tables": (lambda d: region(d).pop("tables"), "document/region"),
    "tables empty": (lambda d: region(d).update(tables={}), "document/region"),
    "tables a list": (lambda d: region(d).update(tables=[]), "document/region"),
    "a table less": (without_table, "document/region"),
    "a table of another node": (renamed_table, "document/region"),
    "a position less": (with_table(lambda v: v[:-1]), "document/region"),
    "a position more": (with_table(lambda v: np.concatenate([v, v[:1]])), "document/region"),
    "a narrower table": (with_table(lambda v: v[:, :-1].copy()), "document/region"),
    "a table of doubles": (with_table(lambda v: v.astype(np.float64)), "document/region"),
    "a table of doubles, of the same bytes": (with_table(bytes_of_floats), "document/region"),
    "another first position": (put(0, 0.5), "document/region"),
    "another second position": (put(1, 0.25), "document/region"),
    "a position that is no number": (put(5, float("nan")), "parameter/not-finite"),
    "an infinite position": (put(8, float("inf")), "parameter/not-finite"),
    "larger rotations": (put(8, 3.0), "claim/too-small"),
    "two rows of a centre": (
        lambda d: region(d).update(centre=proofs.array(np.zeros((2, 8)))),
        "document/region",
    ),
    "two rows of a radius": (
        lambda d: region(d).update(radius=proofs.array(np.full((2, 8), 2.0**-9))),
        "document/region",
    ),
    "a negative radius": (
        lambda d: region(d).update(radius=proofs.array(np.full((1, 8), -1.0))),
        "document/region",
    ),
    "a drift of the input": (lambda d: region(d).update(drift={}), "document/region"),
    "a region of the weights": (lambda d: region(d).update(weights={}), "document/region"),
    "ids": (lambda d: region(d).update(ids=[1]), "document/region"),
    "a ball": (lambda d: region(d).update(kind="ball"), "document/region"),
    "a word of its own": (lambda d: region(d).update(kind="row"), "document/region"),
    "affine forms": (lambda d: case(d).update(domain="affine"), "document/domain"),
    "a smaller claim": (lowered, "claim/too-small"),
    "a smaller witness": (lowered_witness, "witness/too-small"),
}


@pytest.mark.parametrize("name", EDITS)
def test_variations_are_rejected(name: str, good: tuple[Document, Path]) -> None:
    document, path = good
    changed = sequences.mutable_copy(document)
    edit, reason = EDITS[name]
    edit(changed)
    outcome = recheck(proofs.dump(changed), path)
    assert not outcome.ok
    assert outcome.reason == reason, outcome


def test_ball_of_two_rows_does_not_cover_other_lengths(good: tuple[Document, Path]) -> None:
    """The same graph as a block of two rows: its region and its claim are smaller."""
    document, path = good
    changed = sequences.mutable_copy(document)
    case(changed)["region"] = {
        "kind": "ball",
        "centre": proofs.array(np.zeros((2, 8))),
        "radius": proofs.array(np.full((1, 1), 2.0**-7)),
        "longest": 9,
    }
    assert recheck(proofs.dump(changed), path).reason == "document/region"


@pytest.mark.parametrize("rows", [1, 3])
def test_graph_must_have_two_rows(rows: int, tmp_path: Path) -> None:
    graph = mlp(rows)
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    document = sequences.document(graph, {}, KERNELS, sha256, np.zeros((1, 8)), 0.5, 9)
    assert recheck(proofs.dump(document), path).reason == "graph/rows"


def test_softmax_at_any_length_must_belong_to_attention(tmp_path: Path) -> None:
    """Without its role, the softmax of a graph at two rows is one over two columns."""
    graph = decoder(2)
    for node in graph.nodes:
        if node["op"] == "softmax":
            node["role"] = ""
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    tables = sequences.tables_of(graph, decoder(9))
    document = sequences.document(graph, tables, KERNELS, sha256, np.zeros((1, 8)), 0.5, 9)
    assert recheck(proofs.dump(document), path).reason == "graph/rows"


def test_mask_without_visible_columns_is_rejected(tmp_path: Path) -> None:
    graph = decoder(2)
    graph.constants["mask"] = np.array([[True, False], [False, False]])
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    tables = sequences.tables_of(graph, decoder(9))
    document = sequences.document(graph, tables, KERNELS, sha256, np.zeros((1, 8)), 0.5, 9)
    assert recheck(proofs.dump(document), path).reason == "rule/mask"
