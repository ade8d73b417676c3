"""Blocks concatenated into one: each ends in its last operation and starts at the one before."""

from __future__ import annotations

import numpy as np
import pytest

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.chain import joined, refuse_gaps, refuse_other
from kcdsl_certs.recheck.documents.chain_document import (
    LARGEST_DRIFT,
    ChainCase,
    ChainDocument,
    Link,
)
from kcdsl_certs.recheck.documents.document import Case, CaseRegion, Proof, parse
from kcdsl_certs.recheck.graphs.graph import Block
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from tests.support import proofs

KERNEL = proofs.numerics("float32", "any")


def parsed(graph: proofs.Graph) -> Block:
    """Return a graph as the checker's type."""
    assert graph.input_shape is not None
    centre = np.zeros(graph.input_shape)
    document = proofs.document(graph, KERNEL, KERNEL, "0" * 64, centre, 0.0)
    return parse(proofs.dump(document)).graphs[graph.digest]


def chain(*ops: str, shape: tuple[int, int] = (2, 3), output: int = -1) -> Block:
    """Return a graph of operations in sequence that returns one of them."""
    graph = proofs.Graph(shape)
    names = [graph.add("input", [], shape)]
    for op in ops:
        names.append(graph.add(op, names[-1:], shape))
    graph.output = names[output]
    return parsed(graph)


def test_parts_of_the_whole_block_are_accepted() -> None:
    refuse_other(chain("neg", "relu", "tanh"), [chain("neg"), chain("relu", "tanh")])


@pytest.mark.parametrize("first", [True, False])
def test_part_with_operations_after_its_output_is_refused(first: bool) -> None:
    parts = [chain("neg", "relu", output=1), chain("tanh")]
    with pytest.raises(Rejected, match="does not end in its last operation"):
        joined(parts if first else parts[::-1])


def test_part_with_another_input_shape_is_refused() -> None:
    with pytest.raises(Rejected, match="does not take what comes before it"):
        joined([chain("neg"), chain("relu", shape=(2, 4))])


def test_other_or_additional_operations_are_refused() -> None:
    whole = chain("neg", "relu", "tanh")
    with pytest.raises(Rejected, match="operation 1 of"):
        refuse_other(whole, [chain("neg"), chain("silu", "tanh")])
    with pytest.raises(Rejected, match="has 3 operations, its links 4"):
        refuse_other(whole, [chain("neg", "relu"), chain("tanh", "neg")])
    with pytest.raises(Rejected, match="has 3 operations, its links 2"):
        refuse_other(whole, [chain("neg"), chain("relu")])


def linked(
    format: str = "", pinned: str = "", form: str = "fused", *, silu: bool = True
) -> proofs.Graph:
    """Return a sum with a constant, followed by a silu, with its own formats and form."""
    graph = proofs.Graph((2, 3))
    x = graph.add("input", [], (2, 3))
    table = graph.constant("table", np.ones((2, 3), dtype=np.float32), pinned)
    total = graph.add("add", [x, table], (2, 3), "", format)
    if silu:
        graph.add("silu", [total], (2, 3), form=form)
    return graph


def silu(form: str = "fused") -> Block:
    graph = proofs.Graph((2, 3))
    graph.add("silu", [graph.add("input", [], (2, 3))], (2, 3), form=form)
    return parsed(graph)


@pytest.mark.parametrize(
    ("part", "last"),
    [
        ({"format": "bfloat16"}, "written"),
        ({"format": "float32", "pinned": "float32"}, "written"),
        ({"format": "float32"}, "fused"),
    ],
)
def test_part_with_other_formats_is_refused(part: dict[str, str], last: str) -> None:
    """Names and attributes agree, but a kernel rounds elsewhere, or to another format."""
    whole = parsed(linked("float32", form="written"))
    refuse_other(whole, [parsed(linked("float32", silu=False)), silu("written")])
    with pytest.raises(Rejected, match="chain/join"):
        refuse_other(whole, [parsed(linked(**part, silu=False)), silu(last)])


def normed(root: tuple[str, ...], mean: str) -> Block:
    graph = proofs.Graph((2, 3))
    names = ("square", "mean", "shift", *root, "weighted")
    parts = [[name, mean if name == "mean" else ""] for name in names]
    gain = graph.param("gain", np.ones(3))
    inputs = [graph.add("input", [], (2, 3)), gain]
    graph.add("rms_norm", inputs, (2, 3), eps=1e-5, form="written", parts=parts)
    return parsed(graph)


@pytest.mark.parametrize(
    ("root", "mean"), [(("sqrt", "quotient"), "float32"), (("root", "normed"), "")]
)
def test_norm_with_other_formats_is_refused(root: tuple[str, ...], mean: str) -> None:
    whole = normed(("root", "normed"), "float32")
    refuse_other(whole, [whole])
    with pytest.raises(Rejected, match="chain/join"):
        refuse_other(whole, [normed(root, mean)])


def test_sum_of_a_wider_format_across_links_is_refused() -> None:
    """Some kernels round such an operand before the addition, as in one graph."""

    def ends(narrow: str) -> tuple[proofs.Graph, proofs.Graph, proofs.Graph]:
        whole, first, second = (proofs.Graph((2, 3)) for _ in range(3))
        x = whole.add("input", [], (2, 3))
        wide = whole.add("tanh", [x], (2, 3), "", "float32")
        whole.add("add", [wide, wide], (2, 3), "", narrow)
        first.add("tanh", [first.add("input", [], (2, 3))], (2, 3), "", "float32")
        y = second.add("input", [], (2, 3))
        second.add("add", [y, y], (2, 3), "", narrow)
        return whole, first, second

    def chain_of(narrow: str) -> ChainDocument:
        graphs = {graph.digest: graph for graph in ends(narrow)}
        region = CaseRegion("hull", None, None, None, drift=None)
        whole, *parts = graphs
        links = tuple(Link(Case("", digest, region, 0.0, (), "interval"), None) for digest in parts)
        blocks = {digest: parsed(graph) for digest, graph in graphs.items()}
        kernel = parse_kernel(KERNEL, "kernel")
        proof = Proof("block_0", "0" * 64, kernel, kernel, LARGEST_DRIFT, blocks, {}, (), 0.0)
        return ChainDocument("block_0", proof, proof, (ChainCase("p0", whole, links),))

    with pytest.raises(AssertionError):  # continues to the interface, which this chain lacks
        refuse_gaps(chain_of("float32"))
    with pytest.raises(Rejected, match="rule/format"):
        refuse_gaps(chain_of("bfloat16"))
