"""The proof document, from which an independent checker re-derives a bound (certs/README.md)."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kcdsl.model.architecture import Model
from kcdsl.model.graph import BlockGraph, array_digest
from kcdsl.model.numerics import Numerics
from kcdsl_backends.certifier.statements.problems import LEAST_CLAIM, claim_margin

PROOF_SCHEMA = "kcdsl.interval-proof/2"
CHAIN_SCHEMA = "kcdsl.chain-proof/3"


def encode_array(array: NDArray[Any]) -> dict[str, Any]:
    """Return an array as dtype, shape and base64 of its little-endian bytes."""
    data = np.ascontiguousarray(array)
    little = data.astype(data.dtype.newbyteorder("<"), copy=False)
    return {
        "dtype": data.dtype.name,
        "shape": list(data.shape),
        "data": base64.b64encode(little.tobytes()).decode("ascii"),
    }


@dataclass(frozen=True, slots=True)
class Contents:
    """Cases of a proof with their graphs, parameter digests and claims."""

    graphs: Mapping[str, dict[str, Any]]
    parameters: Mapping[str, str]
    cases: tuple[dict[str, Any], ...]
    claims: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """The data for the re-derivation of a bound: domain, magnitudes of all nodes, and hints.

    `domain` is "interval", "affine", "planes", "affine+planes" or "splits". `passes` are the
    reverse passes of affine forms, `planes` the hints of planes, `splits` the tree of boxes of each
    row, `chance` the failure probability of the bound for independent roundings.
    """

    witness: Mapping[str, tuple[float, float]]
    domain: str = "interval"
    passes: Mapping[str, Any] | None = None
    planes: Mapping[str, Any] | None = None
    splits: Sequence[bytes] | None = None
    chance: Mapping[str, Any] | None = None


@dataclass(slots=True)
class ProofBuilder:
    """Collects the cases of one goal into a proof document.

    `digests` keeps digests of parameters by key; builders of one model may share it.
    """

    model: Model
    block: str
    train: Numerics
    infer: Numerics
    functional: str
    k: int
    digests: dict[str, str] = field(default_factory=dict, repr=False)
    _graphs: dict[str, dict[str, Any]] = field(default_factory=dict)
    _parameters: dict[str, str] = field(default_factory=dict)
    _cases: list[dict[str, Any]] = field(default_factory=list)
    _claims: list[float] = field(default_factory=list)

    def add(
        self, name: str, graph: BlockGraph, region: Mapping[str, Any], claim: float, proof: Proof
    ) -> None:
        """Add one case. `region` comes from `box_region` or `token_region`."""
        margin = claim_margin(self.train, self.infer)

        def wider(size: float) -> str:
            return (max(size * margin, LEAST_CLAIM) if size else 0.0).hex()

        stated = {
            "claim": "held" if self.functional == "no_flip" else claim.hex(),
            **({} if proof.domain == "interval" else {"domain": proof.domain}),
            **({} if proof.passes is None else {"passes": proof.passes}),
            **({} if proof.planes is None else {"planes": plain(proof.planes)}),
            **({} if proof.splits is None else {"splits": _texts(proof.splits)}),
            **({} if proof.chance is None else {"chance": proof.chance}),
            "witness": [
                {"node": node, "value": wider(v), "drift": wider(d)}
                for node, (v, d) in proof.witness.items()
            ],
        }
        self.add_stated(name, graph, region, claim, stated)

    def add_stated(
        self,
        name: str,
        graph: BlockGraph,
        region: Mapping[str, Any],
        claim: float,
        stated: Mapping[str, Any],
    ) -> None:
        """Add one case with given statements; name, graph and region are added to them."""
        digest = self.add_graph(graph)
        self._claims.append(claim)
        self._cases.append({"name": name, "graph": digest, "region": dict(region), **stated})

    def add_graph(self, graph: BlockGraph) -> str:
        """Add a graph with the digests of its parameters; return its own digest."""
        digest = graph.digest
        if digest not in self._graphs:
            constants = {key: encode_array(graph.constants[key]) for key in sorted(graph.constants)}
            self._graphs[digest] = {"graph": graph.to_json(), "constants": constants}
        self._parameters.update(self.digests_of(graph))
        return digest

    def digests_of(self, graph: BlockGraph) -> dict[str, str]:
        """Return the digest of every parameter that a graph reads."""
        for key in graph.parameters:
            if key not in self.digests:
                self.digests[key] = array_digest(self.model.weights[key].numpy())
        return {key: self.digests[key] for key in graph.parameters}

    @property
    def checkpoints(self) -> dict[str, Any]:
        """Return the field of a proof with the checkpoint, and the inference kernel's if it has its
        own."""
        served = self.model.served
        own = {} if served is None else {"infer": served.digest}
        return {"checkpoint": {"sha256": self.model.checkpoint.sha256, **own}}

    def contents(self) -> Contents:
        """Return the cases so far as plain data, which another process can absorb."""
        return Contents(self._graphs, self._parameters, tuple(self._cases), tuple(self._claims))

    def absorb(self, contents: Contents) -> None:
        """Add the cases of another builder of the same goal."""
        self._graphs.update(contents.graphs)
        self._parameters.update(contents.parameters)
        self._cases.extend(contents.cases)
        self._claims.extend(contents.claims)

    def document(self) -> bytes:
        """Return the proof as canonical UTF-8 JSON."""
        claim = "held" if self.functional == "no_flip" else max(self._claims).hex()
        body = {
            "schema": CHAIN_SCHEMA if any("links" in c for c in self._cases) else PROOF_SCHEMA,
            "block": self.block,
            **self.checkpoints,
            "numerics": {"train": self.train.to_json(), "infer": self.infer.to_json()},
            "functional": {"kind": self.functional, "k": self.k},
            "graphs": self._graphs,
            "parameters": self._parameters,
            "cases": self._cases,
            "claim": claim,
        }
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return text.encode("utf-8")


def _texts(parts: Sequence[bytes]) -> list[str]:
    return [base64.b64encode(part).decode("ascii") for part in parts]


def plain(value: Any) -> Any:
    """Return plain data with its arrays encoded."""
    if isinstance(value, np.ndarray):
        return encode_array(value)
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def box_region(kind: str, centre: Tensor, radius: Tensor) -> dict[str, Any]:
    """Return a region of hidden states [T, D] in the format of a proof."""
    return {
        "kind": kind,
        "centre": encode_array(centre.cpu().numpy()),
        "radius": encode_array(radius.cpu().numpy()),
    }


def rows_region(
    centre: Tensor, radius: Tensor, longest: int, tables: Mapping[str, NDArray[Any]]
) -> dict[str, Any]:
    """Return the region of sequences of 1 to `longest` rows in the format of a proof.

    `centre` is [1, D], `radius` [1, D] or [1, 1]; `tables` extend the block's constants of two
    positions to all positions.
    """
    named = {name: encode_array(tables[name]) for name in sorted(tables)}
    return {
        **box_region("rows", centre, radius),
        "longest": longest,
        **({"tables": named} if named else {}),
    }


def token_region(ids: Sequence[int]) -> dict[str, Any]:
    """Return the region of one token sequence."""
    return {"kind": "points", "ids": list(ids)}


SUBJECT = frozenset({"name", "graph", "region"})
"""The fields of a case in a proof that identify its subject."""


def stated_of(contents: Contents | None) -> tuple[float, dict[str, Any] | None]:
    """Return the claim of a case and the statements of its proof without the subject."""
    if contents is None or not contents.cases:
        return 0.0, None
    (record,), (claim,) = contents.cases, contents.claims
    return claim, {k: v for k, v in record.items() if k not in SUBJECT}
