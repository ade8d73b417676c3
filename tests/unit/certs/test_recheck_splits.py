"""Proofs by split boxes: forged trees, and blocks and claims that they do not prove."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.interval.box import Box
from kcdsl_certs.recheck.linear_bounds.constraints import replay
from kcdsl_certs.recheck.linear_bounds.splits import leaves_of, recheck_split
from kcdsl_certs.recheck.split_walk import walk
from tests.support import proofs
from tests.support.mutation.trials import exceeded
from tests.support.plane_blocks import feed_forward, perceptron
from tests.support.proofs import array
from tests.support.split_blocks import LEAF, prover, scene_of, stated

Document = dict[str, Any]
Edit = Callable[[Document], None]
PAIR = (
    proofs.numerics("float32", "any"),
    proofs.numerics("float32", weights=("int8", "per_channel")),
)
CENTRE = np.array([[0.25, -0.5], [-0.125, 0.75]])
RADIUS, ROWS, LIMIT = 2.0, 2, 0.026


def text(tree: bytes) -> str:
    return base64.b64encode(tree).decode()


def trees(case: Document) -> list[bytes]:
    return [base64.b64decode(tree) for tree in case["splits"]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Document, Path]:
    """Return a proof whose trees have cuts, and its checkpoint."""
    graph = perceptron(np.random.default_rng(4), (2, 7, 6, 2))
    network = prover(graph, PAIR, CENTRE, RADIUS)
    found = [one.tree.data for one in network.split(LIMIT, 1.0, 200) if one.tree is not None]
    assert len(found) == ROWS
    assert all(len(tree) > 2 for tree in found)
    return stated(tmp_path_factory.mktemp("splits"), graph, PAIR, CENTRE, RADIUS, LIMIT, found)


def changed(base: tuple[Document, Path], edit: Edit) -> Document:
    document = copy.deepcopy(base[0])
    edit(document["cases"][0])
    return document


def reason(base: tuple[Document, Path], edit: Edit) -> str:
    """Return the checker's answer for a changed case."""
    return recheck(proofs.dump(changed(base, edit)), base[1]).reason


def test_proof_by_splits_is_accepted(base: tuple[Document, Path], follows: Any) -> None:
    follows(base[0])
    assert reason(base, lambda case: None) == "ok"
    assert exceeded(*base, runs=60) == ""


def of_first(change: Callable[[bytes], bytes]) -> Edit:
    """Return an edit of the tree of the first row."""

    def edit(case: Document) -> None:
        first, *others = trees(case)
        case["splits"] = [text(tree) for tree in (change(first), *others)]

    return edit


FORGED: dict[str, tuple[Edit, str]] = {
    "a leaf less": (of_first(lambda tree: tree[:-2]), "document/splits"),
    "a leaf more": (of_first(lambda tree: tree + LEAF), "document/splits"),
    "half a number": (of_first(lambda tree: tree[:-1]), "document/splits"),
    "a cut alone": (of_first(lambda tree: tree[:2]), "document/splits"),
    "an empty tree": (of_first(lambda tree: b""), "document/splits"),
    "an input that is not there": (of_first(lambda tree: b"\2\0" + tree[2:]), "document/splits"),
    "no tree": (lambda case: case.update(splits=[]), "document/splits"),
    "a tree less": (lambda case: case.update(splits=case["splits"][:1]), "document/splits"),
    "a tree more": (lambda case: case["splits"].append(text(LEAF)), "document/splits"),
    "no base64": (lambda case: case.update(splits=["//", *case["splits"][1:]]), "document/field"),
    "other bits of base64": (
        lambda case: case.update(splits=["//9=", *case["splits"][1:]]),
        "document/field",
    ),
    "a number": (lambda case: case.update(splits=[65535, *case["splits"][1:]]), "document/field"),
    "trees without the domain": (lambda case: case.pop("domain"), "document/field"),
    "trees of planes": (lambda case: case.update(domain="planes"), "document/field"),
    "the domain without trees": (lambda case: case.pop("splits"), "document/field"),
    "weights that move": (
        lambda case: case["region"].update(weights="0.001"),
        "document/domain",
    ),
    "hints of planes": (
        lambda case: case.update(planes={"met": [], "slopes": [], "searched": []}),
        "document/field",
    ),
    "a larger box": (
        lambda case: case["region"].update(radius=array(np.full((1, 1), 8 * RADIUS))),
        "claim/too-small",
    ),
    "another box": (
        lambda case: case["region"].update(centre=array(CENTRE + 16.0)),
        "claim/too-small",
    ),
    "a claim of nothing": (lambda case: case.update(claim=(0.0).hex()), "claim/too-small"),
    "a claim that runs exceed": (
        lambda case: case.update(claim=(float.fromhex(case["claim"]) / 8).hex()),
        "claim/too-small",
    ),
    "a witness less": (
        lambda case: case["witness"][-1].update(drift=(0.0).hex()),
        "witness/too-small",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_proofs_are_rejected(base: tuple[Document, Path], name: str) -> None:
    edit, why = FORGED[name]
    assert reason(base, edit) == why


def test_infinite_claim_is_rejected(base: tuple[Document, Path]) -> None:
    assert reason(base, lambda case: case.update(claim="inf")).startswith("document/")


def test_tree_with_other_cuts_is_sound(base: tuple[Document, Path]) -> None:
    """The checker bounds every leaf by itself, so whatever it accepts is true."""

    def other(tree: bytes) -> bytes:
        cuts = np.frombuffer(tree, "<u2")
        return np.where(cuts == 0xFFFF, cuts, 1 - cuts % 2).astype("<u2").tobytes()

    for edit in (of_first(other), lambda case: case["splits"].reverse()):
        document = changed(base, edit)
        found = recheck(proofs.dump(document), base[1])
        assert found.reason in ("ok", "claim/too-small")
        if found.ok:
            assert exceeded(document, base[1], runs=60) == ""


def of_weight(weight: float, output: int) -> Any:
    """Return a block with a weight other than 0 or 1 in the row of one output."""
    g = proofs.Graph((ROWS, 2))
    x = g.add("input", [], (ROWS, 2))
    y = g.add("linear", [x, g.param("in", np.eye(2))], (ROWS, 2))
    y = g.add("relu", [y], (ROWS, 2))
    last = np.zeros((2, 2))
    last[output] = [1.0, weight]
    g.add("linear", [y, g.param("out", last)], (ROWS, 2))
    return g


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("share", [64 / 127, 0.5037, 0.504])
def test_every_row_and_output_is_bounded_on_both_sides(
    tmp_path: Path, row: int, output: int, share: float
) -> None:
    """int8 stores 64/127: the drift of one output of one row is about 2e-3, -5e-4 or zero."""
    centre = np.full((ROWS, 2), -8.0)
    centre[row, 1] = 8.0
    document, path = stated(
        tmp_path, of_weight(share, output), PAIR, centre, 1.0, 1e-4, [LEAF] * ROWS
    )
    wanted = "ok" if share == 64 / 127 else "claim/too-small"
    assert recheck(proofs.dump(document), path).reason == wanted


def test_other_functionals_admit_no_splits(base: tuple[Document, Path]) -> None:
    document = copy.deepcopy(base[0])
    document["functional"] = {"kind": "2", "k": 1}
    assert recheck(proofs.dump(document), base[1]).reason == "document/domain"


def branching(rng: np.random.Generator) -> Any:
    g = feed_forward(rng, ROWS, 2)
    g.add("add", [g.nodes[0]["name"], g.output], (ROWS, 2))
    return g


def followed(rng: np.random.Generator) -> Any:
    g = feed_forward(rng, ROWS, 2)
    before = g.output
    g.add("relu", [before], (ROWS, 2))
    g.output = before
    return g


def smooth(rng: np.random.Generator) -> Any:
    g = feed_forward(rng, ROWS, 2)
    g.add("tanh", [g.output], (ROWS, 2))
    return g


def turned(rng: np.random.Generator) -> Any:
    g = feed_forward(rng, ROWS, 2)
    g.permute(g.output, [1, 0])
    return g


def twice(rng: np.random.Generator) -> Any:
    return feed_forward(rng, ROWS, 2, layers=2)


def shifted_late(rng: np.random.Generator) -> Any:
    """Return a block that adds a parameter after a ReLU."""
    g = perceptron(rng, (2, 2))
    relu = g.add("relu", [g.output], (ROWS, 2))
    g.add("add", [relu, g.param("late", rng.standard_normal(2))], (ROWS, 2))
    return g


def shifted_by_rows(rng: np.random.Generator) -> Any:
    g = perceptron(rng, (2, 3, 2))
    g.add("add", [g.output, g.param("rows", rng.standard_normal((ROWS, 2)))], (ROWS, 2))
    return g


def shifted_by_one(rng: np.random.Generator) -> Any:
    g = perceptron(rng, (2, 3, 2))
    g.add("add", [g.output, g.param("one", rng.standard_normal((ROWS, 1)))], (ROWS, 2))
    return g


def still(rng: np.random.Generator) -> Any:
    """Return a block that does not read its input."""
    g = proofs.Graph((ROWS, 2))
    y = g.add("relu", [g.param("p", rng.standard_normal((ROWS, 2)))], (ROWS, 2))
    g.add("linear", [y, g.param("w", rng.standard_normal((2, 2)))], (ROWS, 2))
    return g


def summed(rng: np.random.Generator) -> Any:
    """Return a block that adds parameters and does not read its input."""
    g = proofs.Graph((ROWS, 2))
    parts = [g.param(name, rng.standard_normal((ROWS, 2))) for name in ("p", "q")]
    g.add("add", parts, (ROWS, 2))
    return g


@pytest.mark.parametrize(
    "build",
    [
        *(branching, followed, smooth, turned, twice),
        *(shifted_late, shifted_by_rows, shifted_by_one, still, summed),
    ],
)
def test_blocks_other_than_relu_networks_admit_no_splits(tmp_path: Path, build: Any) -> None:
    """Both programs refuse a block that is not a sequence of linears and ReLUs."""
    from kcdsl_backends.drift.boxes import NoBound

    graph = build(np.random.default_rng(5))
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    document = proofs.document(graph, *PAIR, sha256, CENTRE, RADIUS)
    assert recheck(proofs.dump(document), path).ok
    document["cases"][0] |= {"domain": "splits", "splits": [text(LEAF)] * ROWS}
    assert recheck(proofs.dump(document), path).reason == "document/domain"
    with pytest.raises(NoBound):
        prover(graph, PAIR, CENTRE, RADIUS)


def test_blocks_on_token_ids_admit_no_splits(tmp_path: Path) -> None:
    g = proofs.Graph(None)
    table = g.param("table", np.random.default_rng(6).standard_normal((4, 2)))
    g.add("embedding", [table], (ROWS, 2), ids=[1, 3])
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, g.tensors)
    document = proofs.document(g, *PAIR, sha256, CENTRE, ids=[1, 3])
    assert recheck(proofs.dump(document), path).ok
    document["cases"][0] |= {"domain": "splits", "splits": [text(LEAF)] * ROWS}
    found = recheck(proofs.dump(document), path)
    assert (found.reason, found.detail[-9:]) == ("document/domain", "token ids")


@pytest.mark.parametrize("shape", [(4,), (2, 2, 4)])
def test_inputs_of_other_than_two_dimensions_admit_no_splits(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    g = proofs.Graph(shape)
    g.add("relu", [g.add("input", [], shape)], shape)
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, {})
    document = proofs.document(g, *PAIR, sha256, np.ones(shape))
    document["cases"][0]["region"]["radius"] = array(np.zeros(shape))
    assert recheck(proofs.dump(document), path).ok
    document["cases"][0] |= {"domain": "splits", "splits": [text(LEAF)] * shape[0]}
    assert recheck(proofs.dump(document), path).reason == "document/domain"


def test_splits_refuse_unsupported_scenes_directly(base: tuple[Document, Path]) -> None:
    """A caller that bypasses the parser gets no layers either."""
    scene = scene_of(*base)
    zero = np.zeros(CENTRE.shape)
    for change in ({"drift": Box(zero, zero)}, {"rho": Fraction(1, 1000)}):
        with pytest.raises(Rejected, match="no rule for any length, weight balls, chains"):
            walk(replace(scene, **change))


@st.composite
def some_trees(draw: st.DrawFn) -> bytes:
    """Draw a tree of boxes of three inputs."""
    cuts: list[int] = []
    left = 1
    while left:
        cut = 0xFFFF if len(cuts) > 24 else draw(st.sampled_from([0xFFFF, 0xFFFF, 0, 1, 2]))
        cuts.append(cut)
        left += -1 if cut == 0xFFFF else 1
    return np.array(cuts, "<u2").tobytes()


@given(some_trees(), st.randoms(use_true_random=False))
def test_leaves_cover_the_box_once(tree: bytes, random: Any) -> None:
    """Volumes of dyadic boxes add up exactly, and every point lies in a leaf."""
    low, high = np.array([-1.0, 0.0, 0.5]), np.array([1.0, 0.25, 4.5])
    leaves = [(part.low, part.high) for part in leaves_of(tree, low, high)]
    assert sum(float((hi - lo).prod()) for lo, hi in leaves) == float((high - low).prod())
    for _ in range(8):
        x = np.array([random.uniform(a, b) for a, b in zip(low, high, strict=True)])
        assert any(bool(((lo <= x) & (x <= hi)).all()) for lo, hi in leaves)
    assert all(bool(((low <= lo) & (lo <= hi) & (hi <= high)).all()) for lo, hi in leaves)


# --- networks and constraints that a caller gives -------------------------------------------------

ONE = ([[1.0]], [0.0])
SAFE: list[Any] = [([0.0], [-1.0], [], Fraction(-3))]
"""-f <= -3 is unsatisfiable by f = x in [0, 2]."""


def split(network: Any, facts: Any, high: Any = 2, *, low: Any = 0, second: Any = None) -> int:
    networks = [network] if second is None else [network, second]
    layers = [[(np.array(w), np.array(b)) for w, b in one] for one in networks]
    return recheck_split(layers, [Fraction(low)], [Fraction(high)], [facts], LEAF)


def test_leaf_proves_an_unsatisfiable_constraint() -> None:
    assert split([ONE], SAFE) == 1


@pytest.mark.parametrize(
    ("network", "limit"),
    [
        ([([[2.0**-1074]], [0.0])], Fraction(-1, 2**76)),
        ([([[2.0**-950]], [0.0]), ([[2.0**-600]], [0.0])], Fraction(-1, 2**570)),
    ],
)
def test_underflowing_functionals_prove_nothing(network: Any, limit: Fraction) -> None:
    """At x = 2^1000 both constraints hold, by products that underflow to 0 in float64."""
    facts: list[Any] = [([0.0], [-0.5], [], limit)]
    arrays = [(np.array(w), np.array(b)) for w, b in network]
    at = [Fraction(2**1000)]
    assert replay([arrays], [Fraction(0)], at, [facts], at)
    with pytest.raises(Rejected, match="empty or too large"):
        split(network, facts, 2**1000)


@pytest.mark.parametrize(
    ("network", "facts", "second"),
    [
        ([ONE], [([0.0], [-1.0], [1.0], Fraction(-3))], None),
        ([ONE], [([0.0], [-1.0, 0.0], [], Fraction(-3))], None),
        ([ONE], [([], [-1.0], [], Fraction(-3))], None),
        ([ONE], [([0.0], [-1.0], [], Fraction(-3)), ([0.0], [], [], Fraction(0))], None),
        ([ONE], [([0.0], [np.nan], [], Fraction(-3))], None),
        ([ONE], [([0.0], [-1.0], [], Fraction(-(10**400)))], None),
        ([ONE], [], None),
        ([([[1.0], [1.0]], [0.0])], [([0.0], [-1.0, 0.0], [], Fraction(-3))], None),
        ([([[1.0]], [[0.0]])], SAFE, None),
        ([([1.0], [0.0])], SAFE, None),
        ([ONE, ([[1.0, 1.0]], [0.0])], SAFE, None),
        ([], SAFE, None),
        (
            [([[1.0], [1.0]], [0.0, 0.0])],
            [([0.0], [-1.0, 0.0], [0.0, 0.0], Fraction(-3))],
            [([[1.0], [1.0]], [0.0])],
        ),
    ],
)
def test_mismatched_shapes_are_rejected(network: Any, facts: Any, second: Any) -> None:
    with pytest.raises(Rejected) as rejected:
        split(network, facts, second=second)
    assert rejected.value.reason == "document/splits"


@pytest.mark.parametrize("number", [2.0**100, np.inf, np.nan])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_networks_of_too_large_numbers_are_rejected(
    number: float, second: bool, bias: bool
) -> None:
    large = [([[1.0]], [number])] if bias else [([[number]], [0.0])]
    networks: Any = ([ONE], large) if second else (large, None)
    with pytest.raises(Rejected, match="layer 0 has numbers that are too large") as rejected:
        split(networks[0], SAFE, second=networks[1])
    assert rejected.value.reason == "bound/not-finite"


@pytest.mark.parametrize(
    "network",
    [[ONE] * 33, [([[1.0]] * 4097, [0.0] * 4097), ([[1.0] * 4097], [0.0])]],
)
def test_networks_beyond_the_limits_are_rejected(network: Any) -> None:
    assert split(network[:32] if len(network) > 2 else [ONE], SAFE) == 1
    with pytest.raises(Rejected, match="the networks are too large") as rejected:
        split(network, SAFE)
    assert rejected.value.reason == "document/splits"


def test_empty_box_is_rejected() -> None:
    with pytest.raises(Rejected, match="empty or too large"):
        split([ONE], SAFE, low=3)
