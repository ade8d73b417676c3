"""Blocks joined end to end: each ends in its last operation and takes what comes before it."""

from __future__ import annotations

import numpy as np
import pytest

from kcdsl_certs.recheck.chain import joined, refuse_other
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.graphs.graph import Block
from kcdsl_certs.rejected import Rejected
from tests.support import proofs

KERNEL = proofs.numerics("float32", "any")


def parsed(graph: proofs.Graph) -> Block:
    """Return a graph as the checker reads it."""
    assert graph.input_shape is not None
    centre = np.zeros(graph.input_shape)
    document = proofs.document(graph, KERNEL, KERNEL, "0" * 64, centre, 0.0)
    return parse(proofs.dump(document)).graphs[graph.digest]


def chain(*ops: str, shape: tuple[int, int] = (2, 3), output: int = -1) -> Block:
    """Return a graph of operations one after the other that returns one of them."""
    graph = proofs.Graph(shape)
    names = [graph.add("input", [], shape)]
    for op in ops:
        names.append(graph.add(op, names[-1:], shape))
    graph.output = names[output]
    return parsed(graph)


def test_parts_of_a_whole_are_accepted() -> None:
    refuse_other(chain("neg", "relu", "tanh"), [chain("neg"), chain("relu", "tanh")])


@pytest.mark.parametrize("first", [True, False])
def test_a_part_that_goes_on_behind_its_output_is_refused(first: bool) -> None:
    parts = [chain("neg", "relu", output=1), chain("tanh")]
    with pytest.raises(Rejected, match="does not end in its last operation"):
        joined(parts if first else parts[::-1])


def test_a_part_that_takes_another_shape_is_refused() -> None:
    with pytest.raises(Rejected, match="does not take what comes before it"):
        joined([chain("neg"), chain("relu", shape=(2, 4))])


def test_other_operations_or_more_of_them_are_refused() -> None:
    whole = chain("neg", "relu", "tanh")
    with pytest.raises(Rejected, match="operation 1 of"):
        refuse_other(whole, [chain("neg"), chain("silu", "tanh")])
    with pytest.raises(Rejected, match="has 3 operations, its links 4"):
        refuse_other(whole, [chain("neg", "relu"), chain("tanh", "neg")])
    with pytest.raises(Rejected, match="has 3 operations, its links 2"):
        refuse_other(whole, [chain("neg"), chain("relu")])
