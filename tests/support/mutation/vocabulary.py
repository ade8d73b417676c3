"""The other values of fields with a fixed vocabulary."""

from __future__ import annotations

from itertools import chain

FORMATS = ("float64", "float32", "tfloat32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
OPS = (
    "input", "param", "constant", "embedding", "linear", "matmul", "add", "sub", "mul", "scale",
    "divide", "shift", "neg", "relu", "tanh", "silu", "gelu", "view", "concat", "softmax",
    "rms_norm", "layer_norm", "rope", "exp",
    "cache", "quantise",
)  # fmt: skip
SCALES = (
    "none", "per_tensor", "per_channel", "per_token", "per_batch", "block_128", "group_128", "mx",
    "static",
)  # fmt: skip
CASTS = ("any", "nearest", "toward_zero", "any_toward_zero", "any_direction", "free")
CODES = ("int8", "int8_full", "uint8")
NODE = "graphs{}.graph.nodes[]"

WORDS: dict[str, tuple[str, ...]] = {
    "schema": ("kcdsl.interval-proof/2", "kcdsl.block-graph/3"),
    "block": ("block_1", "model"),
    "claim": ("held", (1.0).hex()),
    "functional.kind": ("inf", "2", "span", "no_flip", "1"),
    "cases[].claim": ("held", (1.0).hex()),
    "cases[].chance.alpha": (
        *("0.001", "0.05", "1/48", "0.00000001", "0.0010", "1e-3", "0", "-0.001", "1/10", "nan"),
    ),
    "cases[].domain": ("interval", "affine", "planes", "affine+planes", "zonotope"),
    "cases[].planes.met[].unknown": ("deviation", "drift", "value"),
    "cases[].planes.searched[].side": ("below", "above", "both"),
    "cases[].name": ("case-0", "case-1"),
    "cases[].region.kind": ("points", "ball", "hull", "rows"),
    "cases[].region.weights": (
        *("0.0078125", "0.03125", "0.5", "1/3", "1/64", "0.50", "0.0156250", "15625e-6"),
        *("0", "0.0", "-0.015625", "0.75", "1", "nan", "0x1.0000000000000p-6"),
    ),
    "graphs{}.graph.schema": ("kcdsl.block-graph/2", "kcdsl.interval-proof/2"),
    "graphs{}.graph.block": ("block_1",),
    **{
        f"cases[].passes.{side}[].{field}": words
        for side in ("train", "infer")
        for field, words in (
            ("kind", ("elements", "deviations", "norm", "ellipsoid", "product", "all")),
            ("stop", ("cut", "input", "middle")),
        )
    },
    f"{NODE}.op": OPS,
    f"{NODE}.format": ("", "float64", "float32", "float16", "bfloat16", "tfloat32", "half"),
    f"{NODE}.role": ("", "scores", "probabilities", "context", "query"),
    **dict(
        chain.from_iterable(
            {
                f"numerics.{side}.preset": ("torch-eager", "fp8-weights"),
                f"numerics.{side}.compute": FORMATS,
                f"numerics.{side}.accumulate": FORMATS,
                f"numerics.{side}.casts": CASTS,
                f"numerics.{side}.weights.format": (*FORMATS, *CODES, "none"),
                f"numerics.{side}.weights.scale": SCALES,
                f"numerics.{side}.weights.applied": ("weights", "sums", "stored_sums"),
                f"numerics.{side}.overrides{{}}.weights.applied": ("weights", "stored_sums"),
                f"numerics.{side}.overrides{{}}.weights.format": (*FORMATS, *CODES, "none"),
                f"numerics.{side}.overrides{{}}.weights.scale": SCALES,
                f"numerics.{side}.overrides{{}}.activations.format": (*FORMATS, *CODES, "none"),
                f"numerics.{side}.overrides{{}}.activations.scale": SCALES,
                f"numerics.{side}.weights.rounding": ("toward_zero", "nearest", "up"),
                f"numerics.{side}.weights.scale_format": ("float16", "bfloat16", "float32"),
                f"numerics.{side}.activations.format": (*FORMATS, *CODES, "none"),
                f"numerics.{side}.activations.scale": SCALES,
                f"numerics.{side}.results{{}}": FORMATS,
                f"numerics.{side}.sigmoid": ("absolute", "relative"),
                f"numerics.{side}.byte_sums": ("int16_pairs", "wide"),
                f"numerics.{side}.products": ("tfloat32", "compute", "bfloat16"),
                f"numerics.{side}.kv_cache.format": (*CODES, "none"),
                f"numerics.{side}.kv_cache.scale": (
                    *("none", "per_tensor", "per_head", "per_token_head", "static", "per_token"),
                ),
                f"numerics.{side}.attention.style": ("composed", "fused", "tiled"),
                f"numerics.{side}.attention.scores": FORMATS,
                f"numerics.{side}.attention.probabilities": FORMATS,
            }.items()
            for side in ("train", "infer")
        )
    ),
}


def with_names(graph: dict[str, object]) -> dict[str, tuple[str, ...]]:
    """Return the vocabulary, with other node and constant names where fields hold names."""
    nodes = graph["nodes"]
    assert isinstance(nodes, list)
    names = tuple(str(node["name"]) for node in nodes)
    keys = tuple(str(n["attrs"]["key"]) for n in nodes if "key" in n["attrs"])
    return {
        **WORDS,
        f"{NODE}.name": names[:3],
        **{
            f"cases[].passes.{side}[].{field}": names
            for side in ("train", "infer")
            for field in ("at", "of")
        },
        "cases[].planes.met[].of": names,
        "cases[].planes.slopes[].of": names,
        f"{NODE}.inputs[]": names,
        f"{NODE}.attrs.key": keys,
        "graphs{}.graph.output": names,
        "cases[].witness[].node": names[:3],
    }
