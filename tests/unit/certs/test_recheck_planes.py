"""Proofs by linear bounds: parsing, acceptance and rejections."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.bounds_walk import derive, walk
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.graphs.strict_json import Reader
from kcdsl_certs.recheck.interval.box import Box, exact
from kcdsl_certs.recheck.interval.state import State
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.linear_bounds import context
from tests.support import proofs
from tests.support.affine_rules import irregular_heads
from tests.support.mutation.bases import made
from tests.support.mutation.changes import array_of
from tests.support.proofs import array

Document = dict[str, Any]
Edit = Callable[[Document], None]
FEED = "feed-forward, planes"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Document, Path]:
    """Return a proof by linear bounds of a feed-forward block, with hints, and its checkpoint."""
    document, path, _ = made(FEED, tmp_path_factory.mktemp("planes"))
    return document, path


def outcome(base: tuple[Document, Path], edit: Edit) -> tuple[str, str]:
    """Return reason and detail of the checker's answer for a changed proof."""
    document = copy.deepcopy(base[0])
    edit(document["cases"][0])
    found = recheck(proofs.dump(document), base[1])
    return found.reason, found.detail


def hints(case: Document) -> Document:
    found: Document = case["planes"]
    return found


def test_unchanged_proof_is_accepted(base: tuple[Document, Path], follows: Any) -> None:
    follows(base[0])
    assert outcome(base, lambda case: None)[0] == "ok"


def test_claim_is_underivable_without_linear_bounds(base: tuple[Document, Path]) -> None:
    def edit(case: Document) -> None:
        del case["planes"], case["domain"]

    assert outcome(base, edit)[0] == "claim/too-small"


BAD: dict[str, Edit] = {
    "a field less": lambda case: hints(case).pop("met"),
    "a field more": lambda case: hints(case).update(extra=1),
    "rows beyond the node": lambda case: hints(case)["met"][0].update(rows=[0, 99]),
    "rows that fall": lambda case: hints(case)["met"][0].update(rows=[1, 1]),
    "a row without end": lambda case: hints(case)["met"][0].update(rows=[0]),
    "a node that is not there": lambda case: hints(case)["met"][0].update(of="nowhere"),
    "a node met twice": lambda case: hints(case)["met"].append(hints(case)["met"][0]),
    "slopes of no ReLU": lambda case: hints(case)["slopes"][0].update(of="n0_input"),
    "slopes twice": lambda case: hints(case)["slopes"].append(hints(case)["slopes"][0]),
    "slopes of another shape": lambda case: hints(case)["slopes"][0].update(
        values=array(np.zeros((6, 1), dtype=np.float32))
    ),
    "elements in one row": lambda case: hints(case)["slopes"][0].update(
        at=array(array_of(hints(case)["slopes"][0]["at"]).reshape(-1))
    ),
    "elements by number": lambda case: hints(case)["slopes"][0].update(
        at=array(array_of(hints(case)["slopes"][0]["at"]).astype(np.int64))
    ),
    "slopes in doubles": lambda case: hints(case)["slopes"][0].update(
        values=array(array_of(hints(case)["slopes"][0]["values"]).astype(np.float64))
    ),
    "slopes that are no numbers": lambda case: hints(case)["slopes"][0].update(
        values=array(array_of(hints(case)["slopes"][0]["values"]) * np.float32(np.nan))
    ),
    "infinite slopes": lambda case: hints(case)["searched"][0].update(
        values=array(array_of(hints(case)["searched"][0]["values"]) * np.float32(np.inf))
    ),
    "elements of another node": lambda case: hints(case)["slopes"][0].update(
        at=array(np.ones((2, 4), dtype=np.bool_))
    ),
    "elements as numbers": lambda case: hints(case)["slopes"][0].update(
        at=array(np.ones((2, 5), dtype=np.float32))
    ),
    "an element beyond the output": lambda case: hints(case)["searched"][0].update(element=6),
    "an element twice": lambda case: hints(case)["searched"].append(hints(case)["searched"][0]),
    "a side that is none": lambda case: hints(case)["searched"][0].update(side="both"),
    "as many as there may be, and one": lambda case: hints(case).update(
        searched=[hints(case)["searched"][0]] * 4097
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_hints_are_rejected(base: tuple[Document, Path], name: str) -> None:
    assert outcome(base, BAD[name])[0] == "document/planes"


def test_too_many_elements_with_own_slopes_are_rejected(base: tuple[Document, Path]) -> None:
    def edit(case: Document) -> None:
        hints(case)["searched"] = hints(case)["searched"][:1] * 4097

    reason, detail = outcome(base, edit)
    assert (reason, detail[:13]) == ("document/planes", "4097 elements"), detail


def test_huge_slopes_prove_nothing(base: tuple[Document, Path]) -> None:
    def edit(case: Document) -> None:
        record = hints(case)["slopes"][0]
        record["values"] = array(np.full_like(array_of(record["values"]), 3e38))

    reason, _ = outcome(base, edit)
    assert reason in ("claim/too-small", "witness/too-small", "bound/not-finite")


@pytest.mark.parametrize("domain", ["interval", "affine"])
def test_hints_of_slopes_require_linear_bounds(base: tuple[Document, Path], domain: str) -> None:
    assert outcome(base, lambda case: case.update(domain=domain))[0] == "document/field"


def test_passes_need_affine_forms(base: tuple[Document, Path]) -> None:
    def edit(case: Document) -> None:
        case["passes"] = {"train": [], "infer": []}

    assert outcome(base, edit)[0] == "document/field"


def test_linear_bounds_refuse_weight_balls(base: tuple[Document, Path]) -> None:
    def edit(case: Document) -> None:
        case["region"]["weights"] = "0.001"

    assert outcome(base, edit)[0] == "document/domain"


def test_linear_bounds_refuse_any_length(base: tuple[Document, Path]) -> None:
    def edit(case: Document) -> None:
        centre = array_of(case["region"]["centre"])[:1]
        case["region"] = {
            "kind": "rows",
            "centre": array(centre),
            "radius": array(np.zeros((1, 1))),
            "longest": 4,
        }

    assert outcome(base, edit)[0] == "document/domain"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("attention, interval, static caches", "planes do not cover a quantised cache"),
        ("residual, interval, quantised tensors", "planes do not cover quantised tensors"),
    ],
)
def test_linear_bounds_refuse_quantised_values(tmp_path: Path, name: str, message: str) -> None:
    document, path, _ = made(name, tmp_path)
    assert recheck(proofs.dump(document), path).ok
    document["cases"][0]["domain"] = "planes"
    found = recheck(proofs.dump(document), path)
    assert found.reason == "document/domain"
    assert message in found.detail


def test_deviations_of_no_finite_bound_are_refused(base: tuple[Document, Path]) -> None:
    """An infinite entry of a tape would make later bounds NaN."""
    proof = parse(proofs.dump(base[0]))
    walked = walk(Derivation(proof, read(base[1]).tensors).problem(proof.cases[0]))
    tape, entry = walked.tape, walked.tape.entries[0]
    assert tape.add(entry) == len(tape.entries) - 1
    for number in (np.inf, np.nan):
        with pytest.raises(Rejected, match="no finite bound") as rejected:
            tape.add(replace(entry, reference=entry.reference * number))
        assert rejected.value.reason == "bound/not-finite"
        wide = Box(entry.e.lo, entry.e.hi + number)
        for changed in (replace(entry, e=wide), replace(entry, d=wide)):
            with pytest.raises(Rejected, match="no finite bound"):
                tape.add(changed)


@pytest.mark.parametrize("what", ["drift", "rho"])
def test_linear_bounds_refuse_unsupported_scenes_directly(
    base: tuple[Document, Path], what: str
) -> None:
    """A caller that bypasses the parser gets no bound either."""
    proof = parse(proofs.dump(base[0]))
    scene = Derivation(proof, read(base[1]).tensors).problem(proof.cases[0])
    assert scene.centre is not None
    zero = np.zeros(scene.centre.shape)
    more: dict[str, Any] = {"drift": Box(zero, zero), "rho": Fraction(1, 1000)}
    with pytest.raises(Rejected, match="document/domain"):
        derive(replace(scene, **{what: more[what]}))


@pytest.mark.parametrize("wide", ["t", "i"])
def test_operand_without_linear_bounds_must_be_a_constant(
    base: tuple[Document, Path], wide: str
) -> None:
    """A box without linear bounds would be replaced by its midpoint."""
    proof = parse(proofs.dump(base[0]))
    scene = Derivation(proof, read(base[1]).tensors).problem(proof.cases[0])
    at = context.Context(scene, {})
    known = State(exact(np.ones((2,))), exact(np.ones((2,))), exact(np.zeros((2,))))
    node = Node("sum", "add", ("known", "unknown"), (2,), Reader({}, "sum"), "")
    at.values["known"] = known
    box = Box(np.ones((2,)), np.full((2,), 1.5))
    at.values["unknown"] = replace(known, t=box) if wide == "t" else replace(known, i=box)
    assert (at.operand(node, 0).reference == 1.0).all()
    with pytest.raises(Rejected, match="rule/weight"):
        at.operand(node, 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [FEED, "decoder, planes", "encoder, affine and planes, box"])
def test_functionals_in_parts_give_equal_bounds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows wider than 256 are bounded in parts."""
    document, path, _ = made(name, tmp_path)
    proof = parse(proofs.dump(document))
    doubles, case = Derivation(proof, read(path).tensors), proof.cases[0]
    found = []
    for numbers in (context._NUMBERS, 1):
        monkeypatch.setattr(context, "_NUMBERS", numbers)
        with np.errstate(all="ignore"):
            found.append(derive(doubles.problem(case), case.planes))
    at_once, apart = (one.output.d for one in found)
    narrow = 2.0**-40 * (at_once.hi - at_once.lo)
    assert (np.abs(apart.lo - at_once.lo) <= narrow).all()
    assert (np.abs(apart.hi - at_once.hi) <= narrow).all()


def broadcast(op: str) -> Any:
    """Return a product with broadcasting: matrices of heads times one, rows times one."""
    if op == "matmul":
        return irregular_heads("values of one column")(np.random.default_rng(1))
    g = proofs.Graph((2, 3))
    x = g.add("input", [], (2, 3))
    one = g.slice(x, dim=0, start=0, stop=1)
    g.add("mul", [x, one], (2, 3))
    return g


@pytest.mark.parametrize("op", ["mul", "matmul"])
def test_broadcasting_products_have_no_linear_bounds(op: str, tmp_path: Path) -> None:
    graph, path = broadcast(op), tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    side, centre = proofs.numerics("float32"), np.zeros(graph.input_shape)
    document = proofs.document(graph, side, side, sha256, centre)
    assert recheck(proofs.dump(document), path).ok
    document["cases"][0]["domain"] = "planes"
    assert recheck(proofs.dump(document), path).reason == "bound/not-finite"


def test_links_of_chains_refuse_linear_bounds(base: tuple[Document, Path]) -> None:
    proof = parse(proofs.dump(base[0]))
    doubles = Derivation(proof, read(base[1]).tensors)
    with pytest.raises(Rejected, match="document/domain"):
        doubles.link(proof.cases[0])
