"""Blocks of any length: both programs identify the row dimension, and refuse mixing of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.certifier.statements.sequences import FixedLength, row_axes
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.boxes.state import Entering
from kcdsl_backends.drift.linear_bounds import linear_walk
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.graphs.any_length import KEY, ROW, marks_of
from kcdsl_certs.recheck.ops.table import POINTWISE as CHECKED
from tests.support import proofs, prover, sequences
from tests.support.sequences import WIDTH, rows_of, scored

FLOAT32 = proofs.numerics("float32", "any")


def parsed(graph: Any) -> Any:
    """Return a graph as the checker reads it."""
    region = (FLOAT32, FLOAT32, "0" * 64, np.zeros(graph.input_shape or (1, 1)))
    ids = [1] if graph.input_shape is None else None
    document = proofs.document(graph, *region, ids=ids)
    return parse(proofs.dump(document)).graphs[graph.digest]


def attended(g: Any, x: str, s: str, width: int = WIDTH) -> Any:
    """Complete an attention with scores s and values x."""
    p = g.add("softmax", [s], (2, 2), role="probabilities")
    g.add("matmul", [p, x], (2, width), role="context")
    return g


def pooling() -> Any:
    g, x, s = scored()
    g.add("matmul", [s, x], (2, WIDTH))
    return g


def attention_without_softmax() -> Any:
    g, x, s = scored()
    g.add("matmul", [s, x], (2, WIDTH), role="context")
    return g


def weights_per_position() -> Any:
    g, x = rows_of()
    g.add("add", [x, g.param("positions", np.ones((2, WIDTH)))], (2, WIDTH))
    return g


def bias_by_distance() -> Any:
    g, x, s = scored()
    s = g.add("add", [s, g.constant("alibi", np.ones((2, 2), np.float32))], (2, 2), role="scores")
    return attended(g, x, s)


def joined_rows() -> Any:
    g, x = rows_of()
    y = g.add("concat", [x, x], (4, WIDTH), dim=0)
    g.slice(y, dim=0, start=0, stop=2)
    return g


def first_row() -> Any:
    g, x = rows_of()
    g.slice(x, dim=0, start=0, stop=1)
    return g


def first_row_from_the_end() -> Any:
    g, x = rows_of()
    g.slice(x, dim=-2, start=1, stop=2)
    return g


def merged() -> Any:
    g, x = rows_of()
    g.reshape(x, (1, 2 * WIDTH))
    return g


def scrambled() -> Any:
    g, x = rows_of()
    g.reshape(x, (WIDTH, 2))
    return g


def turned_output() -> Any:
    g, x = rows_of()
    g.permute(x, [1, 0])
    return g


def scores_as_output() -> Any:
    return scored()[0]


def norm_over_rows() -> Any:
    g, x = rows_of()
    y = g.permute(x, [1, 0])
    y = g.add("rms_norm", [y], (WIDTH, 2), eps=1e-6)
    g.permute(y, [1, 0])
    return g


def linear_over_rows() -> Any:
    g, x = rows_of()
    y = g.permute(x, [1, 0])
    y = g.add("linear", [y, g.param("w", np.eye(2))], (WIDTH, 2))
    g.permute(y, [1, 0])
    return g


def softmax_over_rows() -> Any:
    g, x = rows_of()
    y = g.permute(x, [1, 0])
    y = g.add("softmax", [y], (WIDTH, 2))
    g.permute(y, [1, 0])
    return g


def norm_of_scores() -> Any:
    g, x, s = scored()
    s = g.add("rms_norm", [s], (2, 2), eps=1e-6)
    return attended(g, x, s)


def rows_and_columns() -> Any:
    g, x = rows_of(width=2)
    y = g.permute(x, [1, 0])
    g.add("add", [x, y], (2, 2))
    return g


def gram_of_features() -> Any:
    g, x = rows_of()
    y = g.permute(x, [1, 0])
    y = g.add("matmul", [y, x], (WIDTH, WIDTH))
    g.add("matmul", [x, y], (2, WIDTH))
    return g


def rotation_by_features() -> Any:
    g, x = rows_of()
    table = g.constant("cos", np.ones((1, WIDTH), np.float32))
    g.add("rope", [x, table, table], (2, WIDTH))
    return g


def rotation_by_parameters() -> Any:
    g, x = rows_of()
    table = g.param("cos", np.ones((2, WIDTH)))
    g.add("rope", [x, table, table], (2, WIDTH))
    return g


def linear_by_rows() -> Any:
    g, x = rows_of()
    g.add("linear", [x, x], (2, 2))
    return g


def norm_of_pairs() -> Any:
    g, x, s = scored()
    s = g.reshape(s, (2, 2, 1))
    s = g.add("rms_norm", [s], (2, 2, 1), eps=1e-6)
    s = g.reshape(s, (2, 2))
    return attended(g, x, s)


def pairs_by_row(g: Any, s: str) -> str:
    """Return the scores as [query row, key row, 1]."""
    s = g.permute(s, [1, 0])
    return str(g.reshape(s, (2, 2, 1)))


def scores_of_scores() -> Any:
    g, x, s = scored()
    y = g.slice(x, dim=1, start=0, stop=1)
    y = g.permute(y, [1, 0])
    s = g.add("matmul", [pairs_by_row(g, s), y], (2, 2, 2), role="scores")
    p = g.add("softmax", [s], (2, 2, 2), role="probabilities")
    g.add("matmul", [p, x], (2, 2, WIDTH), role="context")
    return g


def unnamed_scores() -> Any:
    g, x = rows_of()
    k = g.permute(x, [1, 0])
    return attended(g, x, g.add("matmul", [x, k], (2, 2)))


def features_named_scores() -> Any:
    """Sum over rows under the name of a sum over features."""
    g, x = rows_of(width=2)
    y = g.permute(x, [1, 0])
    s = g.add("matmul", [y, x], (2, 2), role="scores")
    return attended(g, x, s, width=2)


def unnamed_context() -> Any:
    g, x, s = scored()
    p = g.add("softmax", [s], (2, 2), role="probabilities")
    g.add("matmul", [p, x], (2, WIDTH))
    return g


def context_over_features() -> Any:
    g, x = rows_of()
    y = g.permute(x, [1, 0])
    p = g.add("softmax", [x], (2, WIDTH))
    g.add("matmul", [p, y], (2, 2), role="context")
    return g


def unnamed_probabilities() -> Any:
    g, x, s = scored()
    p = g.add("softmax", [s], (2, 2))
    g.add("matmul", [p, x], (2, WIDTH), role="context")
    return g


def sum_of_rows() -> Any:
    g, x = rows_of()
    y = g.permute(x, [1, 0])
    y = g.add("matmul", [y, g.param("ones", np.ones((2, 1)))], (WIDTH, 1))
    y = g.permute(y, [1, 0])
    g.add("add", [x, y], (2, WIDTH))
    return g


def columns_and_rows() -> Any:
    g, x = rows_of(width=2)
    y = g.permute(x, [1, 0])
    g.add("add", [y, x], (2, 2))
    return g


def masked_features() -> Any:
    g, x = rows_of()
    mask = g.constant("mask", np.tril(np.ones((2, WIDTH), dtype=bool)))
    g.add("softmax", [x, mask], (2, WIDTH))
    return g


def rotation_of_features() -> Any:
    g, x = rows_of(width=2)
    table = g.constant("cos", np.ones((2, 2), np.float32))
    y = g.permute(x, [1, 0])
    y = g.add("rope", [y, table, table], (2, 2))
    g.permute(y, [1, 0])
    return g


def rotation_of_pairs() -> Any:
    g, x, s = scored()
    table = g.constant("cos", np.ones((2, 2), np.float32))
    y = g.expand(pairs_by_row(g, s), (2, 2, 2))
    y = g.add("rope", [y, table, table], (2, 2, 2))
    y = g.slice(y, dim=2, start=0, stop=1)
    y = g.reshape(y, (2, 2))
    return attended(g, x, g.permute(y, [1, 0]))


def doubled_rows() -> Any:
    g, x = rows_of()
    g.add("concat", [x, x], (4, WIDTH), dim=0)
    return g


def rows_beside_features() -> Any:
    g, x = rows_of(width=2)
    y = g.permute(x, [1, 0])
    g.add("concat", [x, y], (2, 4), dim=1)
    return g


def no_row() -> Any:
    g, _ = rows_of()
    g.param("table", np.ones((2, WIDTH)))
    return g


def three_rows() -> Any:
    return rows_of(3)[0]


def of_tokens() -> Any:
    g = proofs.Graph(None)
    g.add("embedding", [g.param("table", np.ones((3, WIDTH)))], (1, WIDTH), ids=[1])
    return g


MIXING: tuple[Callable[[], Any], ...] = (
    pooling,
    attention_without_softmax,
    weights_per_position,
    bias_by_distance,
    joined_rows,
    first_row,
    first_row_from_the_end,
    merged,
    scrambled,
    turned_output,
    scores_as_output,
    norm_over_rows,
    linear_over_rows,
    softmax_over_rows,
    norm_of_scores,
    rows_and_columns,
    gram_of_features,
    rotation_by_features,
    rotation_by_parameters,
    linear_by_rows,
    norm_of_pairs,
    scores_of_scores,
    unnamed_scores,
    features_named_scores,
    unnamed_context,
    unnamed_probabilities,
    context_over_features,
    sum_of_rows,
    columns_and_rows,
    masked_features,
    rotation_of_features,
    rotation_of_pairs,
    doubled_rows,
    rows_beside_features,
    no_row,
    three_rows,
    of_tokens,
)


@pytest.mark.parametrize("build", MIXING, ids=lambda build: build.__name__)
def test_mixing_of_rows_is_refused_by_both_programs(build: Callable[[], Any]) -> None:
    graph = build()
    with pytest.raises(FixedLength) as no:
        row_axes(prover.block(graph))
    assert no.value.reason
    with pytest.raises(Rejected) as rejection:
        marks_of(parsed(graph), CHECKED)
    assert rejection.value.reason == "graph/rows"
    assert rejection.value.detail


def of_nothing() -> Any:
    g, _ = rows_of()
    g.add("silu", [], (2, WIDTH))
    return g


def of_no_dimension() -> Any:
    g, x = rows_of()
    g.add("silu", [x], ())
    g.add("silu", [x], (2, WIDTH))
    return g


def of_another_rank() -> Any:
    g, x = rows_of()
    y = g.add("silu", [x], (2, WIDTH, 1))
    g.reshape(y, (2, WIDTH))
    return g


def of_three_dimensions() -> Any:
    g = proofs.Graph((2, WIDTH))
    x = g.add("input", [], (2, WIDTH, 1))
    g.reshape(x, (2, WIDTH))
    return g


def one_dimension_twice() -> Any:
    g, x = rows_of(width=2)
    g.permute(x, [0, 0])
    return g


def a_dimension_beyond() -> Any:
    g, x = rows_of()
    g.add("concat", [x, x], (2, 2 * WIDTH), dim=2)
    return g


def a_product_of_three() -> Any:
    g, x, s = scored()
    p = g.add("softmax", [s], (2, 2), role="probabilities")
    g.add("matmul", [p, x, x], (2, WIDTH), role="context")
    return g


def rows_repeated() -> Any:
    g, x = rows_of()
    y = g.expand(x, (4, WIDTH))
    g.slice(y, dim=1, start=0, stop=2)
    return g


MALFORMED: dict[Callable[[], Any], str] = {
    of_nothing: "graph/rows",
    of_no_dimension: "graph/rows",
    of_another_rank: "graph/shape",
    of_three_dimensions: "graph/rows",
    one_dimension_twice: "graph/field",
    a_dimension_beyond: "graph/field",
    a_product_of_three: "graph/field",
    rows_repeated: "graph/shape",
}


@pytest.mark.parametrize("build", MALFORMED, ids=lambda build: build.__name__)
def test_malformed_graphs_are_rejected(build: Callable[[], Any]) -> None:
    with pytest.raises(Rejected) as rejection:
        marks_of(parsed(build()), CHECKED)
    assert rejection.value.reason == MALFORMED[build]


def gated_rows() -> Any:
    g, x = rows_of()
    up = g.param("up", np.ones((3, WIDTH)))
    gate = g.add("silu", [g.add("linear", [x, up], (2, 3))], (2, 3))
    y = g.add("mul", [gate, g.add("linear", [x, up], (2, 3))], (2, 3))
    scale = g.constant("scale", np.ones((1, 3), np.float32))
    y = g.add("mul", [y, scale], (2, 3))
    y = g.add("softmax", [y], (2, 3))
    g.add("linear", [y, g.param("down", np.ones((WIDTH, 3)))], (2, WIDTH))
    return g


def one_head() -> Any:
    """Return attention with dimensions of size 1 beside those of rows."""
    g, x = rows_of()
    q = g.reshape(x, (2, 1, WIDTH))
    q = g.permute(q, [1, 0, 2])
    kv = g.reshape(q, (1, 1, 2, WIDTH))
    kv = g.expand(kv, (1, 3, 2, WIDTH))
    kv = g.reshape(kv, (3, 2, WIDTH))
    k = g.permute(kv, [0, 2, 1])
    s = g.add("matmul", [q, k], (3, 2, 2), role="scores")
    s = g.add("tanh", [g.add("scale", [s], (3, 2, 2), role="scores", factor=0.5)], (3, 2, 2))
    mask = g.constant("mask", np.tril(np.ones((2, 2), dtype=bool)))
    p = g.add("softmax", [s, mask], (3, 2, 2), role="probabilities")
    c = g.add("matmul", [p, kv], (3, 2, WIDTH), role="context")
    c = g.permute(c, [1, 0, 2])
    g.reshape(c, (2, 3 * WIDTH))
    return g


def two_heads() -> Any:
    return sequences.decoder(np.random.default_rng(1), 2)


@pytest.mark.parametrize("build", [gated_rows, one_head, two_heads])
def test_both_programs_identify_the_same_row_dimension(build: Callable[[], Any]) -> None:
    graph = build()
    axes = row_axes(prover.block(graph))
    marks = marks_of(parsed(graph), CHECKED)
    assert set(axes) == set(marks)
    for name, own in marks.items():
        assert axes[name] == tuple(own.index(mark) for mark in (ROW, KEY) if mark in own), name
    assert any(len(found) == 2 for found in axes.values()) == (build is not gated_rows)


def test_other_domains_refuse_any_length() -> None:
    short, long = (sequences.decoder(np.random.default_rng(1), n) for n in (2, 9))
    tables = sequences.tables_of(short, long)
    problem: BlockProblem = sequences.problem(short, tables, (FLOAT32, FLOAT32), 9)
    centre, radius = torch.zeros(1, 8).double(), torch.full((1, 1), 0.5).double()
    assert problem.bound(centre, radius).output.drift.hi.isfinite().all()
    with pytest.raises(NoBound, match="any length"):
        problem.forms(centre, radius)
    with pytest.raises(NoBound, match="any length"):
        linear_walk(problem.graph, problem.kernels(), centre.expand(2, 8), radius)
    sides = [prover.parameters(short, FLOAT32)] * 2
    with pytest.raises(NoBound):
        BlockProblem(problem.graph, *sides).forms(centre, radius)
    with pytest.raises(NoBound, match="not one row"):
        problem.bound(centre.expand(2, 8), radius)
    moved = Entering(Box(0 * centre, 0 * centre))
    with pytest.raises(NoBound, match="states that drift have one length"):
        replace(problem, entering=moved).bound(centre, radius)
