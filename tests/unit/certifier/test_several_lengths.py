"""A block at several lengths: its graph at two rows must match the block at other lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl_backends.certifier.statements import sequences as lengths
from kcdsl_backends.certifier.statements.sequences import FixedLength, compare, row_axes
from tests.support import prover
from tests.support.sequences import WIDTH, rows_of, scored


def test_block_that_changes_with_its_length_is_refused() -> None:
    def mean(rows: int) -> Any:
        g, x = rows_of(rows)
        return g, g.add("scale", [x], (rows, WIDTH), factor=1.0 / rows)

    short, long = (prover.block(mean(rows)[0]) for rows in (2, 3))
    axes = row_axes(short)
    compare(short, axes, short, 2)
    with pytest.raises(FixedLength, match="not the same at 3 rows"):
        compare(short, axes, long, 3)


def test_row_dimension_is_identified_by_another_length() -> None:
    """[T, 4] as [2, T, 2]: at two rows this looks like [T, 2, 2]."""

    def folded(rows: int) -> Any:
        g, x = rows_of(rows)
        y = g.reshape(x, (2, rows, 2))
        g.reshape(y, (rows, WIDTH))
        return g

    short, long = (prover.block(folded(rows)) for rows in (2, 3))
    with pytest.raises(FixedLength):
        compare(short, row_axes(short), long, 3)


def turned(cos: Callable[[int], np.ndarray]) -> Callable[[int], Any]:
    """Return a rotation whose tables depend on the number of rows through `cos`."""

    def build(rows: int) -> Any:
        g, x = rows_of(rows)
        both = [g.constant(name, cos(rows).astype(np.float32)) for name in ("cos", "sin")]
        g.add("rope", [x, *both], (rows, WIDTH))
        return g

    return build


def as_exported(graph: Any) -> Any:
    """Return a graph whose constants are named by their key, as in exported graphs."""
    plain = [node["name"] for node in graph.nodes if node["op"] != "constant"]
    names = {name: f"op_{place}" for place, name in enumerate(plain)}
    names |= {n["name"]: n["attrs"]["key"] for n in graph.nodes if n["op"] == "constant"}
    for node in graph.nodes:
        node["name"] = names[node["name"]]
        node["inputs"] = [names[name] for name in node["inputs"]]
    graph.output = names[graph.output]
    return prover.block(graph)


def table(rows: int) -> np.ndarray:
    return np.add.outer(np.arange(rows), np.arange(WIDTH))


def one_more_operation(rows: int) -> Any:
    g, x = rows_of(rows)
    if rows > 2:
        g.add("tanh", [x], (rows, WIDTH))
    return g


def masked(build: Callable[[int], np.ndarray | None]) -> Callable[[int], Any]:
    def attention(rows: int) -> Any:
        g, x, s = scored(rows)
        mask = build(rows)
        inputs = [s] if mask is None else [s, g.constant("mask", mask)]
        p = g.add("softmax", inputs, (rows, rows), role="probabilities")
        g.add("matmul", [p, x], (rows, WIDTH), role="context")
        return g

    return attention


def causal(rows: int) -> np.ndarray:
    return np.tril(np.ones((rows, rows), dtype=bool))


def shifted(rows: int) -> Any:
    """Return a block with a constant of one row that depends on the length."""
    g, x = rows_of(rows)
    g.add("add", [x, g.constant("shift", np.full((1, WIDTH), rows, np.float32))], (rows, WIDTH))
    return g


def exchanged(rows: int) -> Any:
    g, x = rows_of(rows)
    y = g.add("tanh", [x], (rows, WIDTH))
    g.add("sub", [x, y] if rows < 3 else [y, x], (rows, WIDTH))
    return g


AT_THREE: dict[str, tuple[Callable[[int], Any], str]] = {
    "an operation more": (one_more_operation, "other operations at 3 rows"),
    "a mask": (masked(lambda rows: None if rows < 3 else causal(rows)), "not the same at 3 rows"),
    "another constant": (shifted, "reads something else at 3 rows"),
    "operands exchanged": (exchanged, "reads something else at 3 rows"),
}


@pytest.mark.parametrize("name", AT_THREE)
def test_difference_at_another_length_is_named(name: str) -> None:
    build, reason = AT_THREE[name]
    short, long = (as_exported(build(rows)) for rows in (2, 3))
    compare(short, row_axes(short), short, 2)
    with pytest.raises(FixedLength, match=reason):
        compare(short, row_axes(short), long, 3)


@pytest.mark.parametrize(
    "build", [masked(causal), masked(lambda rows: causal(rows).T), turned(table)]
)
def test_masks_and_positions_may_differ(build: Callable[[int], Any]) -> None:
    short, long = (as_exported(build(rows)) for rows in (2, 3))
    compare(short, row_axes(short), long, 3)


class Exported:
    """A model whose block is exported at each requested length."""

    def __init__(self, build: Callable[[int], Any], most: int | None) -> None:
        self.build, self.limits, self.asked = build, (1, most), list[int]()

    def graph(
        self, model: Any, block: str, rows: int, formats: Sequence[str] = (), *, any_length: bool
    ) -> Any:
        assert model is self
        assert any_length
        assert formats == ("float32",)
        self.asked.append(rows)
        if self.limits[1] is not None and rows > self.limits[1]:
            raise refuse(codes.SEQUENCE, f"{rows} rows are too many", help="ask for fewer")
        return as_exported(self.build(rows))


def exported(build: Callable[[int], Any], monkeypatch: Any, most: int | None = None) -> Exported:
    model = Exported(build, most)
    monkeypatch.setattr(lengths, "block_graph", model.graph)
    return model


def test_block_is_exported_at_two_three_and_the_longest_rows(monkeypatch: Any) -> None:
    model: Any = exported(turned(table), monkeypatch)
    graph, _, tables = lengths.sequence_graph(model, "block", 40, ("float32",))
    assert sorted(model.asked) == [2, 3, 40]
    assert set(tables) == set(graph.node(graph.output).inputs[1:])
    for found in tables.values():
        assert np.array_equal(found, table(40))


@pytest.mark.parametrize("different", [3, 40])
def test_deviating_length_is_found(different: int, monkeypatch: Any) -> None:
    def build(rows: int) -> Any:
        g, x = rows_of(rows)
        g.add("scale", [x], (rows, WIDTH), factor=0.5 if rows == different else 0.25)
        return g

    model: Any = exported(build, monkeypatch)
    with pytest.raises(Refusal, match=f"not the same at {different} rows"):
        lengths.sequence_graph(model, "block", 40, ("float32",))


def stretched(rows: int) -> Any:
    """Return a rotation with smaller angles in long sequences."""
    return turned(lambda n: table(n) * (1.0 if n < 8 else 0.5))(rows)


def parted(rows: int) -> Any:
    """Return a rotation whose tables are shared at short lengths only."""
    g, x = rows_of(rows)
    cos = g.constant("cos", table(rows).astype(np.float32))
    sin = cos
    if rows >= 8:
        sin = g.constant("sin", np.where(np.arange(rows)[:, None] < 2, 1, 2) * g.constants["cos"])
    g.add("rope", [x, cos, sin], (rows, WIDTH))
    return g


@pytest.mark.parametrize("build", [stretched, parted])
def test_tables_that_depend_on_the_length_are_refused(
    build: Callable[[int], Any], monkeypatch: Any
) -> None:
    model: Any = exported(build, monkeypatch)
    with pytest.raises(Refusal, match="its tables depend on the length"):
        lengths.sequence_graph(model, "block", 40, ("float32",))


def test_unread_positions_are_refused(monkeypatch: Any) -> None:
    model: Any = exported(turned(table), monkeypatch)
    with pytest.raises(Refusal, match="only 8192 positions are read"):
        lengths.sequence_graph(model, "block", 8193, ("float32",))
    assert max(model.asked) < 8192


def test_block_without_a_graph_of_the_longest_rows_is_refused(monkeypatch: Any) -> None:
    def build(rows: int) -> Any:
        if rows > 3:
            raise refuse(codes.SEQUENCE, "the mask has 3 rows", help="ask for fewer")
        return rows_of(rows)[0]

    model: Any = exported(build, monkeypatch)
    with pytest.raises(Refusal, match="no graph of 40 rows: the mask has 3 rows"):
        lengths.sequence_graph(model, "block", 40, ("float32",))


@pytest.mark.parametrize(("most", "seen"), [(None, 8192), (64, 64)])
def test_block_without_positions_covers_any_number_of_rows(
    most: int | None, seen: int, monkeypatch: Any
) -> None:
    model: Any = exported(lambda rows: rows_of(rows)[0], monkeypatch, most)
    assert lengths.sequence_graph(model, "block", 2**20, ("float32",))[2] == {}
    assert sorted(model.asked) == [2, 3, seen]
