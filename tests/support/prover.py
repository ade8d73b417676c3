"""Convert graphs and numerics records of `proofs` to the types of the prover."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kcdsl.model.graph import BlockGraph, Node
from kcdsl.model.numerics import (
    Activations,
    Attention,
    KvCache,
    MatrixUnit,
    Numerics,
    Override,
    StaticQuantiser,
    TensorCore,
    Weights,
)
from kcdsl_backends.drift.boxes.state import StoredParameters


def numerics(record: Any) -> Numerics:
    """Return a numerics record as the prover's type."""
    found = Numerics(
        **{
            **record,
            "weights": Weights(**record["weights"]),
            "activations": _activations(record["activations"]),
            "attention": Attention(**record["attention"]),
            "results": tuple(sorted(record.get("results", {}).items())),
            "tensor_core": _core(record.get("tensor_core")),
            "overrides": tuple(
                Override(
                    pattern, Weights(**section["weights"]), _activations(section["activations"])
                )
                for pattern, section in sorted(record.get("overrides", {}).items())
            ),
            "kv_cache": _cache(record.get("kv_cache")),
            "quantisers": tuple(
                (name, StaticQuantiser(float.fromhex(one["scale"]), one["zero_point"]))
                for name, one in sorted(record.get("quantisers", {}).items())
            ),
        }
    )
    assert found.to_json() == record
    return found


def _activations(record: Any) -> Activations:
    scales = sorted(record.get("input_scale", {}).items())
    return Activations(
        record["format"],
        record["scale"],
        tuple((name, tuple(float.fromhex(s) for s in given)) for name, given in scales),
        tuple(sorted(record.get("input_zero_point", {}).items())),
    )


def _cache(record: Any) -> KvCache | None:
    if record is None:
        return None

    def scales(key: str) -> tuple[tuple[str, tuple[float, ...]], ...]:
        given = sorted(record.get(key, {}).items())
        return tuple((name, tuple(float.fromhex(s) for s in found)) for name, found in given)

    least = float.fromhex(record.get("least_scale", "0x0p0"))
    kind, scale = record["format"], record["scale"]
    return KvCache(kind, scale, scales("key_scale"), scales("value_scale"), least)


def _core(record: Any) -> TensorCore | None:
    return record and TensorCore(MatrixUnit(**record["linears"]), MatrixUnit(**record["others"]))


def block(graph: Any) -> BlockGraph:
    """Return a graph record as the prover's type."""

    def value(entry: Any) -> Any:
        if isinstance(entry, str) and "0x" in entry:
            return float.fromhex(entry)
        return tuple(entry) if isinstance(entry, list) else entry

    nodes = tuple(
        Node(
            node["name"],
            node["op"],
            tuple(node["inputs"]),
            tuple(node["shape"]),
            {
                name: entry if name == "key" else value(entry)
                for name, entry in node["attrs"].items()
            },
            node["role"],
            node["format"],
        )
        for node in graph.nodes
    )
    found = BlockGraph("block_0", nodes, graph.output, graph.constants, graph.input_shape)
    assert found.digest == graph.digest
    return found


def parameters(graph: Any, record: Any) -> StoredParameters:
    """Return the parameters as a kernel of these numerics stores them."""
    tensors: Mapping[str, torch.Tensor] = {
        key: torch.from_numpy(array) for key, array in graph.tensors.items()
    }
    return StoredParameters(tensors, graph.constants, numerics(record), torch.device("cpu"))
