"""Hostile chains: a document that lacks any compared property is rejected."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.affine import remainders
from kcdsl_certs.recheck.graphs import strict_json
from tests.support.chains import chained
from tests.support.mutation.changes import Change, array_of, changes
from tests.support.mutation.vocabulary import with_names
from tests.support.proofs import array, array_digest

Document = dict[str, Any]
Base = tuple[Document, Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the models of this module."""
    return tmp_path_factory.mktemp("chains")


@pytest.fixture(scope="module")
def tokens(folder: Path) -> Base:
    """Return a chain of the whole model, on token ids."""
    found = chained(folder, "llama", "float32 fused", clause=0)
    return json.loads(found.document), found.checkpoint


@pytest.fixture(scope="module")
def halves(folder: Path) -> Base:
    """Return a chain of the halves of a layer, on a ball."""
    found = chained(folder, "llama", "float32 fused", clause=1)
    return json.loads(found.document), found.checkpoint


@pytest.fixture(scope="module")
def handing(folder: Path) -> Base:
    """Return a chain whose links exchange ellipsoids."""
    found = chained(folder, "bert", "bfloat16 nearest", clause=0, ellipsoids=True)
    return json.loads(found.document), found.checkpoint


def judged(base: Base, change: Callable[[Document], object]) -> str:
    """Return the reason of the rejection of a changed chain, or "ok"."""
    document, checkpoint = copy.deepcopy(base[0]), base[1]
    change(document)
    outcome = recheck(json.dumps(document).encode(), checkpoint)
    assert outcome.ok == (outcome.reason == "ok")
    assert outcome.reason != "internal", outcome.detail
    return outcome.reason


def having(change: Callable[..., object], *more: Any) -> Callable[[Document], object]:
    """Return a change of a document together with its required companions."""
    return lambda document: change(document, *more)


def drift_of(document: Document, number: int) -> Document:
    found: Document = links(document)[number]["region"]["drift"]
    return found


def output_of(document: Document, number: int, part: str) -> Document:
    found: Document = links(document)[number]["output"][part]
    return found


def links(document: Document) -> list[Document]:
    found: list[Document] = document["cases"][0]["links"]
    return found


def scaled(box: Document, factor: float) -> None:
    """Scale a box around its midpoint."""
    low, high = array_of(box["low"]), array_of(box["high"])
    middle, half = (low + high) / 2, (high - low) / 2
    box["low"], box["high"] = array(middle - half * factor), array(middle + half * factor)


def moved(record: Document, by: Callable[[np.ndarray], np.ndarray]) -> Document:
    return array(by(array_of(record)))


def regraph(document: Document, number: int, change: Callable[[Document], object]) -> None:
    """Change the graph of a link, and recompute its digest as a forger would."""
    link = links(document)[number]
    entry = copy.deepcopy(document["graphs"][link["graph"]])
    change(entry["graph"])
    digest = hashlib.sha256(strict_json.canonical(entry["graph"])).hexdigest()
    document["graphs"][digest] = entry
    link["graph"] = digest


def node(graph: Document, op: str) -> Document:
    found: Document = next(n for n in graph["nodes"] if n["op"] == op)
    return found


@pytest.mark.full
def test_chains_are_accepted(tokens: Base, halves: Base, follows: Any) -> None:
    for base in (tokens, halves):
        follows(base[0])
        assert judged(base, lambda document: None) == "ok"
    assert [link["name"] for link in links(tokens[0])] == [
        "model[0]", "layer_0", "layer_1", "model[3]",
    ]  # fmt: skip
    assert [link["name"] for link in links(halves[0])] == ["layer_1[0]", "layer_1[1]"]


def test_schemas_of_chains_and_proofs_agree(schemas: Any) -> None:
    """The common definitions of chains and proofs exist in both schemas."""
    one, two = (schemas[f"kcdsl.{name}"] for name in ("interval-proof/2", "chain-proof/3"))
    both = set(one["definitions"]) & set(two["definitions"]) - {"case"}
    assert both >= {"sha256", "hex", "claim", "passes", "array", "kernel", "graph"}
    assert {name: one["definitions"][name] for name in both} == {
        name: two["definitions"][name] for name in both
    }
    domains = one["definitions"]["case"]["properties"]["domain"]["enum"]
    links = two["definitions"]["link"]["properties"]["domain"]["enum"]
    assert links == [name for name in domains if "planes" not in name and name != "splits"]
    for name in ("passes", "witness", "claim"):
        stated = one["definitions"]["case"]["properties"][name]
        assert two["definitions"]["link"]["properties"][name] == stated


# --- interfaces -----------------------------------------------------------------------------------


def test_drift_beyond_the_next_region_is_rejected(tokens: Base) -> None:
    for number in (2, 3):
        reason = judged(tokens, having(lambda d, n: scaled(drift_of(d, n), 0.5), number))
        assert reason == "chain/interface"
    for end in ("low", "high"):
        assert judged(tokens, having(one_end, end)) == "chain/interface"


def one_end(document: Document, end: str) -> None:
    """Set one end of one element of a region's drift to zero."""
    drift = links(document)[2]["region"]["drift"]

    def one(values: np.ndarray) -> np.ndarray:
        values.flat[0] = 0.0
        return values

    drift[end] = moved(drift[end], one)


def test_interfaces_are_compared_exactly(tokens: Base) -> None:
    """A box equal to the preceding output is enough; a box one number smaller is not."""

    def tight(document: Document, toward: float) -> None:
        before, after = links(document)[1], links(document)[2]
        after["region"]["drift"] = copy.deepcopy(before["output"]["drift"])
        high = after["region"]["drift"]["high"]

        def least(values: np.ndarray) -> np.ndarray:
            values.flat[3] = np.nextafter(values.flat[3], toward)
            return values

        after["region"]["drift"]["high"] = moved(high, least)

    assert judged(tokens, lambda d: tight(d, math.inf)) == "ok"
    assert judged(tokens, lambda d: tight(d, -math.inf)) == "chain/interface"


def test_state_beyond_the_next_region_is_rejected(tokens: Base, halves: Base) -> None:
    def shrink(document: Document, number: int) -> None:
        region = links(document)[number]["region"]
        region["radius"] = moved(region["radius"], lambda r: r * 0.5)

    def shift(document: Document) -> None:
        region = links(document)[2]["region"]
        region["centre"] = moved(region["centre"], lambda c: c + 1e-3)

    assert judged(tokens, lambda d: shrink(d, 2)) == "chain/interface"
    assert judged(halves, lambda d: shrink(d, 1)) == "chain/interface"
    assert judged(tokens, shift) == "chain/interface"


def test_point_region_behind_a_link_is_rejected(tokens: Base) -> None:
    def point(document: Document) -> None:
        region = links(document)[2]["region"]
        region["radius"] = moved(region["radius"], lambda r: r * 0)

    assert judged(tokens, point) == "chain/interface"


@pytest.mark.full
def test_distances_of_readings_must_be_covered(tokens: Base) -> None:
    """Several readings of a link's result may differ, and the next link covers all of them."""
    number = 1

    def ends(document: Document) -> tuple[Document, Document]:
        before, after = links(document)[number : number + 2]
        return before["output"]["readings"], after["region"]["readings"]

    def lowered(document: Document, places: tuple[int, ...], side: str) -> None:
        for place in places:
            readings = ends(document)[place]
            readings[side] = moved(readings[side], lambda own: own * 0.5)

    def one(document: Document, side: str) -> None:
        def less(values: np.ndarray) -> np.ndarray:
            values.flat[3] *= 0.5
            return values

        readings = ends(document)[1]
        readings[side] = moved(readings[side], less)

    def without(document: Document, places: tuple[int, ...]) -> None:
        for place in places:
            where = ("output", "region")[place]
            del links(document)[number + place][where]["readings"]

    for side in ("train", "infer"):
        assert judged(tokens, having(lowered, (1,), side)) == "chain/interface"
        assert judged(tokens, having(lowered, (0,), side)) == "chain/output"
        assert judged(tokens, having(lowered, (0, 1), side)) == "chain/output"
        assert judged(tokens, having(one, side)) == "chain/interface"
    assert judged(tokens, having(without, (1,))) == "chain/interface"
    assert judged(tokens, having(without, (0,))) == "chain/output"
    assert judged(tokens, having(without, (0, 1))) == "chain/output"
    for value in (-1.0, math.nan, math.inf):

        def put(document: Document, place: int, value: float = value) -> None:
            def some(values: np.ndarray) -> np.ndarray:
                values.flat[0] = value
                return values

            readings = ends(document)[place]
            readings["infer"] = moved(readings["infer"], some)

        for place in (0, 1):
            assert judged(tokens, having(put, place)) == "document/readings"


# --- what a link claims of its output -------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", ["train", "drift"])
@pytest.mark.parametrize("number", [1, 2])
def test_underivable_output_is_rejected(tokens: Base, part: str, number: int) -> None:
    """Matching interfaces are useless if a link exceeds them."""

    def forge(document: Document) -> None:
        before, after = links(document)[number], links(document)[number + 1]
        scaled(before["output"][part], 0.9)
        if part == "drift":
            scaled(after["region"]["drift"], 0.9)

    assert judged(tokens, forge) in ("chain/output", "chain/interface")
    assert judged(tokens, lambda d: scaled(links(d)[number]["output"][part], 0.9)) == "chain/output"


@pytest.mark.full
def test_underivable_end_of_one_element_is_rejected(tokens: Base) -> None:
    for part in ("train", "drift"):
        for end, toward in (("low", 1.0), ("high", -1.0)):
            reason = judged(tokens, having(narrow_end, part, end, toward))
            assert reason == "chain/output", (part, end)


def narrow_end(document: Document, part: str, end: str, toward: float) -> None:
    """Move one end of one element of an output inward by a hundredth of its width."""
    box = output_of(document, 1, part)
    width = array_of(box["high"]) - array_of(box["low"])

    def one(values: np.ndarray) -> np.ndarray:
        values.flat[5] += toward * width.flat[5] * 0.01
        return values

    box[end] = moved(box[end], one)


@pytest.mark.full
def test_lowered_claims_and_witnesses_of_links_are_rejected(tokens: Base) -> None:
    def lower(document: Document, number: int) -> None:
        link = links(document)[number]
        link["claim"] = (float.fromhex(link["claim"]) * 0.99).hex()

    def weaken(document: Document, number: int, field: str) -> None:
        witness = links(document)[number]["witness"][-1]
        witness[field] = (float.fromhex(witness[field]) * 0.99).hex()

    def overall(document: Document) -> None:
        document["claim"] = (float.fromhex(document["claim"]) * 0.999999).hex()

    for number in (1, 2, 3):
        assert judged(tokens, having(lower, number)) == "claim/too-small"
        for field in ("value", "drift"):
            reason = judged(tokens, having(weaken, number, field))
            assert reason == "witness/too-small"
    assert judged(tokens, overall) == "claim/overall"


# --- what the links are, one after the other ------------------------------------------------------


def test_links_in_another_order_are_rejected(tokens: Base) -> None:
    def swap(document: Document) -> None:
        one, two = links(document)[1:3]
        one["graph"], two["graph"] = two["graph"], one["graph"]

    def turn(document: Document) -> None:
        links(document)[1:3] = links(document)[2:0:-1]

    assert judged(tokens, swap) in ("chain/join", "document/witness")
    assert judged(tokens, turn) == "chain/join"


def test_missing_and_duplicate_links_are_rejected(tokens: Base, halves: Base) -> None:
    assert judged(tokens, lambda d: links(d).pop(1)) == "chain/join"
    assert judged(tokens, lambda d: links(d).insert(2, copy.deepcopy(links(d)[1]))) == "chain/join"
    assert judged(halves, lambda d: links(d).pop(0)) == "chain/links"
    assert judged(tokens, lambda d: d["cases"][0].update(links=[])) == "chain/links"


def test_links_of_another_block_are_rejected(tokens: Base) -> None:
    """Each variant is a valid proof of a block other than that of the clause."""

    def eps(document: Document) -> None:
        regraph(document, 1, lambda g: node(g, "rms_norm")["attrs"].update(eps="0x1.0p-3"))

    def weight(document: Document) -> None:
        def exchange(graph: Document) -> None:
            keys = [n for n in graph["nodes"] if n["op"] == "param" and "q_proj" in n["name"]]
            keys[0]["attrs"]["key"] = keys[0]["attrs"]["key"].replace("layers.0", "layers.1")

        regraph(document, 1, exchange)

    def role(document: Document) -> None:
        def forget(graph: Document) -> None:
            next(n for n in graph["nodes"] if n["role"] == "scores")["role"] = ""

        regraph(document, 1, forget)

    def mask(document: Document) -> None:
        link = links(document)[1]
        entry = copy.deepcopy(document["graphs"][link["graph"]])
        name = next(k for k, a in entry["constants"].items() if a["dtype"] == "bool")
        ones = np.ones_like(array_of(entry["constants"][name]))
        entry["constants"][name] = array(ones)
        entry["graph"]["constants"][name] = array_digest(ones)
        own = hashlib.sha256(strict_json.canonical(entry["graph"])).hexdigest()
        document["graphs"][own] = entry
        link["graph"] = own

    def order(document: Document) -> None:
        def exchange(graph: Document) -> None:
            first = next(n for n in graph["nodes"] if n["op"] == "mul")
            first["inputs"] = first["inputs"][::-1]

        regraph(document, 1, exchange)

    def end(document: Document) -> None:
        def earlier(graph: Document) -> None:
            graph["output"] = next(n["name"] for n in graph["nodes"] if n["op"] == "add")

        regraph(document, 1, earlier)

    def stored(document: Document) -> None:
        regraph(document, 1, lambda g: node(g, "add").update(format="float64"))

    def form(document: Document) -> None:
        regraph(document, 1, lambda g: node(g, "silu")["attrs"].update(form="written"))

    for change in (eps, weight, role, mask, order, end, stored, form):
        assert judged(tokens, change) in ("chain/join", "document/witness"), change.__name__


def test_joined_links_must_equal_the_block_of_the_clause(tokens: Base) -> None:
    def another(document: Document) -> None:
        document["cases"][0]["graph"] = links(document)[1]["graph"]

    def unknown(document: Document) -> None:
        document["cases"][0]["graph"] = "0" * 64

    def shorter(document: Document) -> None:
        """Return a chain that ends a layer earlier, under the name of the block."""
        entry = copy.deepcopy(document["graphs"][document["cases"][0]["graph"]])
        entry["graph"]["output"] = node(entry["graph"], "add")["name"]
        digest = hashlib.sha256(strict_json.canonical(entry["graph"])).hexdigest()
        document["graphs"][digest] = entry
        document["cases"][0]["graph"] = digest

    assert judged(tokens, another) == "graph/block"
    assert judged(tokens, unknown) == "document/cases"
    assert judged(tokens, shorter) == "chain/join"
    assert judged(tokens, lambda d: d.update(block="layer_0")) == "graph/block"


# --- regions --------------------------------------------------------------------------------------


def test_drift_is_allowed_only_behind_the_first_link(tokens: Base, halves: Base) -> None:
    drift = links(halves[0])[1]["region"]["drift"]

    def at_the_beginning(document: Document) -> None:
        document["cases"][0]["region"]["drift"] = drift

    def of_the_first(document: Document) -> None:
        links(document)[0]["region"] = links(document)[1]["region"]

    assert judged(halves, at_the_beginning) == "document/region"
    assert judged(halves, of_the_first) == "document/field"
    assert judged(halves, lambda d: links(d)[1]["region"].pop("drift")) == "document/field"
    assert judged(halves, lambda d: links(d)[1].pop("region")) == "document/field"
    assert judged(halves, lambda d: links(d)[0].pop("output")) == "document/field"
    assert judged(halves, lambda d: links(d)[1].update(output=links(d)[0]["output"])) == (
        "document/field"
    )
    for kind in ("points", "ball", "rows"):
        reason = judged(halves, having(lambda d, k: links(d)[1]["region"].update(kind=k), kind))
        assert reason in ("document/region", "document/field"), kind

    def entire(document: Document, more: Document) -> None:
        document["cases"][0]["region"].update(more)

    def inner(document: Document, more: Document) -> None:
        links(document)[1]["region"].update(more)

    others: list[Document] = [{"weights": "1/1024"}, {"longest": 4}, {"tables": {}}]
    for more in others:
        reason = judged(halves, having(entire, more))
        assert reason == "document/region", more
        assert judged(halves, having(inner, more)) == "document/field"


@pytest.mark.full
def test_ellipsoids_come_from_the_preceding_link(handing: Base, follows: Any) -> None:
    """They are not stored; if the preceding link has none, none may be used."""
    follows(handing[0])
    regions = [link.get("region", {}) for link in links(handing[0])]
    assert [region.get("ellipsoids") for region in regions] == [None, True, True]
    assert judged(handing, lambda document: None) == "ok"

    def without(document: Document, number: int) -> None:
        del links(document)[number]["region"]["ellipsoids"]

    def in_intervals(document: Document) -> None:
        link = links(document)[0]
        link["domain"] = "interval"
        del link["passes"]

    lost = ("claim/too-small", "witness/too-small", "chain/output")
    assert judged(handing, having(without, 2)) in lost
    assert judged(handing, in_intervals) in (*lost, "chain/ellipsoids")
    others: tuple[object, ...] = (False, 1, "true", None, {}, [True])
    for value in others:
        put = having(lambda d, v: links(d)[1]["region"].update(ellipsoids=v), value)
        assert judged(handing, put) == "document/field"

    def of_the_whole(document: Document) -> None:
        document["cases"][0]["region"]["ellipsoids"] = True

    assert judged(handing, of_the_whole) == "document/region"


def test_links_in_the_interval_domain_have_no_ellipsoids(tokens: Base) -> None:
    """The interval domain computes none, whatever a document states."""
    number = next(i for i, one in enumerate(links(tokens[0])) if one.get("domain") != "affine")
    put = having(lambda d: links(d)[number + 1]["region"].update(ellipsoids=True))
    assert judged(tokens, put) == "chain/ellipsoids"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_numeric_ends_are_rejected(tokens: Base, value: float) -> None:
    def put(box: Document, end: str) -> None:
        def one(values: np.ndarray) -> np.ndarray:
            values.flat[0] = value
            return values

        box[end] = moved(box[end], one)

    for end in ("low", "high"):
        assert judged(tokens, having(lambda d, e: put(drift_of(d, 2), e), end)) == ("document/box")
        assert judged(tokens, having(lambda d, e: put(output_of(d, 1, "train"), e), end)) == (
            "document/box"
        )


def test_ends_out_of_order_or_shape_are_rejected(tokens: Base) -> None:
    def turned(box: Document) -> None:
        box["low"], box["high"] = box["high"], box["low"]

    def short(box: Document) -> None:
        box["low"] = moved(box["low"], lambda v: v[:1])

    def narrow(box: Document) -> None:
        box["low"] = array(array_of(box["low"]).astype(np.float32))

    for change in (turned, short, narrow):
        assert judged(tokens, having(lambda d, c: c(drift_of(d, 2)), change)) == "document/box"
        for part in ("train", "drift"):
            reason = judged(tokens, having(lambda d, c, p: c(output_of(d, 1, p)), change, part))
            assert reason == "document/box"


def test_proof_of_one_block_admits_no_chain_fields(halves: Base) -> None:
    """Outside of a chain, a region with a drift would prove a weaker statement.

    Its input is stored by neither kernel. So no field of a chain is allowed in a proof of one
    block.
    """
    document, path = halves
    link = copy.deepcopy(links(document)[1])
    graph = document["graphs"][link["graph"]]
    parameters = {n["attrs"]["key"] for n in graph["graph"]["nodes"] if n["op"] == "param"}
    plain = {
        **document,
        "schema": "kcdsl.interval-proof/2",
        "block": graph["graph"]["block"],
        "graphs": {link["graph"]: graph},
        "parameters": {key: document["parameters"][key] for key in parameters},
        "cases": [link],
    }
    assert recheck(json.dumps(plain).encode(), path).reason == "document/region"
    drift, readings = link["region"].pop("drift"), link["region"].pop("readings")
    assert recheck(json.dumps(plain).encode(), path).reason != "document/region"
    link["region"]["readings"] = readings
    assert recheck(json.dumps(plain).encode(), path).reason == "document/region"
    del link["region"]["readings"]
    link["output"] = {"train": drift, "drift": drift}
    assert recheck(json.dumps(plain).encode(), path).reason == "document/field"


@pytest.mark.full
def test_chains_are_checked_in_parts(tokens: Base) -> None:
    document, path = copy.deepcopy(tokens)
    second = copy.deepcopy(document["cases"][0])
    second["name"] = "again"
    links({"cases": [second]})[2]["claim"] = (0.0).hex()
    document["cases"].append(second)
    data = json.dumps(document).encode()
    assert recheck(data, path, part=(0, 2)).ok
    assert recheck(data, path, part=(1, 2)).reason == "claim/too-small"
    assert recheck(data, path).reason == "claim/too-small"
    assert recheck(data, path, part=(2, 3)).reason == "document/cases"


def test_duplicate_case_names_are_rejected(tokens: Base) -> None:
    def twice(document: Document) -> None:
        document["cases"].append(copy.deepcopy(document["cases"][0]))

    assert judged(tokens, twice) == "document/cases"
    assert judged(tokens, lambda d: d.update(cases=[])) == "document/cases"


def test_linear_bounds_in_links_are_rejected(tokens: Base) -> None:
    """Linear bounds do not support a drift of the input."""
    for number in range(len(links(tokens[0]))):
        put = having(lambda d, n: links(d)[n].update(domain="affine+planes"), number)
        assert judged(tokens, put) == "document/domain"


@pytest.mark.full
def test_other_checkpoint_is_rejected(tokens: Base, tmp_path: Path) -> None:
    other = chained(tmp_path, "llama", "float32 fused", seed=18)
    assert recheck(json.dumps(tokens[0]).encode(), other.checkpoint).reason == "checkpoint/digest"

    def named(document: Document) -> None:
        document["checkpoint"] = json.loads(other.document)["checkpoint"]

    document = copy.deepcopy(tokens[0])
    named(document)
    outcome = recheck(json.dumps(document).encode(), other.checkpoint)
    assert outcome.reason == "parameter/digest"


def test_unknown_schema_is_rejected(tokens: Base) -> None:
    assert judged(tokens, lambda d: d.update(schema="kcdsl.chain-proof/1")) == "document/schema"
    assert judged(tokens, lambda d: d.update(more=1)) == "document/field"


# --- every field ----------------------------------------------------------------------------------

WEIGHTLESS = {
    "cases[].links[].claim": {"raise"},
    "cases[].links[].domain": {"removed", "other"},
    "cases[].links[].name": {"other"},
    "cases[].links[].output.drift.high.data": {"lower", "raise"},
    "cases[].links[].output.drift.low.data": {"lower", "raise"},
    "cases[].links[].output.train.high.data": {"lower", "raise"},
    "cases[].links[].output.train.low.data": {"lower", "raise"},
    "cases[].links[].output.readings.infer.data": {"lower", "raise"},
    "cases[].links[].output.readings.train.data": {"lower", "raise"},
    "cases[].links[].passes": {"removed"},
    "cases[].links[].passes.infer": {"removed", "reordered"},
    "cases[].links[].passes.infer[].kind": {"other"},
    "cases[].links[].passes.infer[].rows[]": {"lower", "raise"},
    "cases[].links[].passes.infer[].stop": {"other"},
    "cases[].links[].passes.train": {"removed", "reordered"},
    "cases[].links[].passes.train[].kind": {"other"},
    "cases[].links[].passes.train[].rows[]": {"lower", "raise"},
    "cases[].links[].passes.train[].stop": {"other"},
    "cases[].links[].region.centre.data": {"lower", "raise"},
    "cases[].links[].region.drift.high.data": {"lower", "raise"},
    "cases[].links[].region.drift.low.data": {"lower", "raise"},
    "cases[].links[].region.ellipsoids": {"removed"},
    "cases[].links[].region.radius.data": {"lower", "raise"},
    "cases[].links[].region.readings.infer.data": {"lower", "raise"},
    "cases[].links[].region.readings.train.data": {"lower", "raise"},
    "cases[].links[].witness": {"removed", "reordered"},
    "cases[].links[].witness[].drift": {"lower", "raise"},
    "cases[].links[].witness[].value": {"lower", "raise"},
    "cases[].name": {"other"},
    "cases[].region.centre.data": {"lower", "raise"},
    "cases[].region.kind": {"other"},
    "cases[].region.radius.data": {"lower"},
    "claim": {"raise"},
}
"""Fields with accepted changes, and the kinds of change (docs/proofs/chains.md). Accepted lowerings
are within the margin of claims, or concern the first region, which is another statement."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("third", [0, 1, 2])
def test_unlisted_changes_of_chains_are_rejected(folder: Path, third: int) -> None:
    """One change of every kind of every field of cases; graphs are covered by other proofs."""
    found = chained(folder, "llama", "float32 fused", clause=1, tokens=(1,), ellipsoids=True)
    document: Document = json.loads(found.document)
    graph = next(iter(document["graphs"].values()))["graph"]
    groups: dict[tuple[str, str], list[Change]] = {}
    for change in changes(document, with_names(graph)):
        if change.field.startswith(("cases", "claim", "schema", "block")):
            groups.setdefault((change.field, change.kind), []).append(change)
    assert len(groups) > 400
    for (field, kind), some in list(groups.items())[third::3]:
        changed = random.Random(third).choice(some).of(document)
        outcome = recheck(json.dumps(changed).encode(), found.checkpoint)
        assert outcome.reason != "internal", (field, kind, outcome.detail)
        if kind not in WEIGHTLESS.get(field, ()):
            assert not outcome.ok, (field, kind)


@pytest.mark.parametrize("base", ["tokens", "halves"])
@pytest.mark.parametrize("number", [0, -1])
def test_links_admit_no_probabilistic_bounds(
    base: str, number: int, request: pytest.FixtureRequest
) -> None:
    more = {"domain": "affine", "chance": {"alpha": "0.001", "functionals": 2**20}}
    change = having(lambda document: links(document)[number].update(more))
    assert judged(request.getfixturevalue(base), change) == "document/field"


def refused(base: Base, change: Callable[[Document], object]) -> tuple[str, str]:
    """Return the reason and the detail of the rejection of a changed chain."""
    document, checkpoint = copy.deepcopy(base[0]), base[1]
    change(document)
    outcome = recheck(json.dumps(document).encode(), checkpoint)
    assert not outcome.ok
    return outcome.reason, outcome.detail


def test_inputs_of_links_have_the_shape_of_the_state(halves: Base) -> None:
    def narrow(document: Document) -> None:
        regraph(document, 1, lambda g: node(g, "input").update(shape=[1, 1]))

    reason, detail = refused(halves, narrow)
    assert reason == "chain/join"
    assert "has an input of another shape" in detail


def test_constants_of_chains_are_those_of_their_graph(halves: Base) -> None:
    def unknown(document: Document) -> None:
        case = document["cases"][0]
        entry = copy.deepcopy(document["graphs"][case["graph"]])
        node(entry["graph"], "constant")["attrs"]["key"] = "another"
        case["graph"] = hashlib.sha256(strict_json.canonical(entry["graph"])).hexdigest()
        document["graphs"][case["graph"]] = entry

    reason, detail = refused(halves, unknown)
    assert reason == "graph/field"
    assert "there is no constant 'another'" in detail


@pytest.mark.parametrize("side", ["train", "infer"])
def test_underivable_distances_of_readings_are_rejected(halves: Base, side: str) -> None:
    """Matching interfaces are useless if the readings of a link are farther apart."""

    def closer(document: Document) -> None:
        before, after = links(document)
        for readings in (before["output"]["readings"], after["region"]["readings"]):
            assert array_of(readings[side]).any()
            readings[side] = moved(readings[side], lambda own: own * 0.5)

    reason, detail = refused(halves, closer)
    assert reason == "chain/output"
    assert "readings may be farther apart" in detail


@pytest.mark.parametrize("value", [False, 1, "true", None, {}, [True]])
def test_ellipsoids_are_read_or_absent(halves: Base, value: object) -> None:
    reason, detail = refused(halves, lambda d: links(d)[1]["region"].update(ellipsoids=value))
    assert reason == "document/field"
    assert "has ellipsoids that are not true" in detail


@pytest.mark.parametrize("largest", [143, 144])
def test_ellipsoids_beyond_the_limit_are_refused(
    halves: Base, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ellipsoid of one row of 12 elements has 144 numbers."""
    monkeypatch.setattr(remainders, "LARGEST", largest)

    def asked(document: Document) -> None:
        link = links(document)[1]
        graph = document["graphs"][link["graph"]]["graph"]
        silu = node(graph, "silu")
        one = {"at": silu["name"], "of": silu["inputs"][0], "kind": "ellipsoid"}
        link["passes"] = {"train": [], "infer": [{**one, "stop": "cut", "rows": [0, 1]}]}
        link["region"]["ellipsoids"] = True
        for each in links(document):
            each["domain"] = "affine"

    reason, detail = refused(halves, asked)
    assert (reason == "document/passes") == (largest < 144), detail
    assert ("are too large" in detail) == (largest < 144)
