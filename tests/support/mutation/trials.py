"""Apply every change to a proof, check the result, and test accepted ones against runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.check import Outcome
from tests.support import kernels, proofs
from tests.support.mutation.bases import repaired
from tests.support.mutation.changes import Change, array_of, changes
from tests.support.mutation.vocabulary import with_names

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tried:
    """The checker's result for one changed document."""

    change: Change
    document: Document
    outcome: Outcome


def every_change(document: Document) -> list[Change]:
    """Return all changes of a proof."""
    graph = next(iter(document["graphs"].values()))["graph"]
    return list(changes(document, with_names(graph)))


def tried(document: Document, path: Path, some: Iterable[Change]) -> Iterator[Tried]:
    """Yield the outcome of each change, with digests recomputed as a forger would."""
    for change in some:
        changed = change.of(document)
        if change.field.startswith("graphs{}."):
            changed = repaired(changed, change.field.startswith("graphs{}.constants"))
        yield Tried(change, changed, recheck(json.dumps(changed).encode(), path))


def exceeded(document: Document, path: Path, runs: int = 24, seed: int = 0) -> str:
    """Return where simulated runs of an accepted document exceed its claims, else "".

    Every case's claim and witnesses are compared with pairs of runs that the numerics of the
    document admit, on points of its region. The runs use the record of the graph alone.
    """
    from kcdsl_certs.recheck.documents.document import parse
    from kcdsl_certs.recheck.interval.parameters import Parameters
    from kcdsl_certs.recheck.interval.tensors import read

    proof = parse(json.dumps(document).encode())
    tensors = read(path).tensors
    stored = Parameters(tensors, proof.parameters)
    functional, k = document["functional"]["kind"], document["functional"].get("k", 1)
    for record in document["cases"]:
        entry = document["graphs"][record["graph"]]
        graph = proofs.Graph(None, _nodes(entry["graph"]), output=entry["graph"]["output"])
        graph.constants = {k: array_of(v) for k, v in entry["constants"].items()}
        rng = np.random.default_rng(seed)
        for trial in range(runs):
            x = _point(record["region"], trial, rng)
            if "weights" in record["region"]:
                moved = _moved(tensors, record["region"], trial, rng)
                stored = Parameters(moved, {key: _digest(moved[key]) for key in proof.parameters})
            sides = []
            for side, kernel in (("train", proof.train), ("infer", proof.infer)):
                modes = ("random", "signs", "up", "down")
                mode = modes[(trial + (side == "infer") * (trial // 4)) % 4]
                run = kernels.Run(document["numerics"][side], rng, mode)
                with np.errstate(all="ignore"):
                    sides.append(
                        kernels.simulate(
                            graph,
                            run,
                            x,
                            lambda key, kernel=kernel, held=stored: held.plain(key, kernel),
                            lambda key, kernel=kernel, held=stored: held.linear(key, kernel),
                        )
                    )
            for witness in record["witness"]:
                t, i = (side[witness["node"]] for side in sides)
                if t.dtype == bool:
                    continue
                slack = 2.0**-44 * float(np.maximum(np.abs(t), np.abs(i)).max())
                drift = float.fromhex(witness["drift"])
                value = float.fromhex(witness["value"])
                if np.abs(i - t).max() > drift + slack or np.abs(t).max() > value + slack:
                    return f"node {witness['node']} of {record['name']}"
            t, i = (side[graph.output] for side in sides)
            slack = 2.0**-43 * float(np.maximum(np.abs(t), np.abs(i)).max())
            if not _kept(functional, k, t, i, record["claim"], slack):
                return f"the claim of {record['name']}"
    return ""


def _nodes(graph: Document) -> list[Document]:
    """Return the nodes with every number of an attribute as a hexadecimal string."""
    real = ("eps", "factor", "divisor", "offset")

    def attrs(found: Document) -> Document:
        return {
            k: float(v).hex() if k in real and isinstance(v, int) else v for k, v in found.items()
        }

    return [{**node, "attrs": attrs(node["attrs"])} for node in graph["nodes"]]


def _point(region: Document, trial: int, rng: np.random.Generator) -> np.ndarray | None:
    if "ids" in region:
        return None
    centre, radius = array_of(region["centre"]), array_of(region["radius"])
    if region["kind"] == "rows":  # two rows, each anywhere in the box of one row
        centre = np.repeat(centre, 2, axis=0)
    moves = (0.0, rng.choice([-1.0, 1.0], centre.shape), rng.uniform(-1, 1, centre.shape))
    return np.asarray(centre + radius * moves[trial % 3])


def _moved(tensors: Any, region: Document, trial: int, rng: np.random.Generator) -> Any:
    """Return the checkpoint, or another one in the region around its weights (float32)."""
    rho = float(Fraction(region["weights"])) * (1 - 2.0**-14)
    found = {}
    for key, tensor in tensors.items():
        assert tensor.dtype == "F32"
        w = np.frombuffer(tensor.data, dtype="<f4")
        by = (0.0, rng.choice([-1.0, 1.0], w.shape), rng.uniform(-1, 1, w.shape))[trial % 3]
        near = (w * (1 + rho * by)).astype("<f4")
        found[key] = replace(tensor, data=memoryview(near.tobytes()))
    return found


def _digest(tensor: Any) -> str:
    from kcdsl_certs.recheck.graphs.graph import array_digest

    return array_digest("float32", tensor.shape, tensor.data)


def _kept(functional: str, k: int, t: np.ndarray, i: np.ndarray, claim: str, slack: float) -> bool:
    if functional == "no_flip":
        top = [np.sort(np.argsort(v, axis=-1)[..., -k:], axis=-1) for v in (t, i)]
        return bool((top[0] == top[1]).all())
    d = i - t
    match functional:
        case "inf":
            seen = np.abs(d).max()
        case "2":
            seen = np.sqrt((d**2).sum(axis=-1)).max()
        case _:
            seen = (d.max(axis=-1) - d.min(axis=-1)).max()
    return bool(seen <= float.fromhex(claim) + slack)
