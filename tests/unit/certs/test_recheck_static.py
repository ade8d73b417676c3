"""Static scales in proofs: invalid records and underivable claims are rejected."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.numerics.kernel import Static
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from tests.support import proofs
from tests.support.mutation.bases import claimed

Document = dict[str, Any]
ONE = (1.0).hex()
GOOD: Document = {
    "format": "uint8",
    "scale": "static",
    "input_scale": {"*": [ONE], "a": [ONE, (0.5).hex()]},
    "input_zero_point": {"*": 3, "a": 0},
}


def parsed(activations: Document) -> Any:
    return parse_kernel(proofs.numerics(activations=activations), "kernel")


def test_record_of_static_scales_is_parsed() -> None:
    kernel = parsed(GOOD)
    assert kernel.static == Static((("*", (1.0,)), ("a", (1.0, 0.5))), (("*", 3), ("a", 0)))
    assert kernel.static.of("a.weight", "uint8") == ((1.0, 0.5), 0)
    assert kernel.static.of("b.weight", "uint8") == ((1.0,), 3)
    with pytest.raises(Rejected):
        kernel.static.of("", "uint8")
    assert parsed({"format": "int8", "scale": "per_token"}).static is None
    assert parsed(GOOD) != parsed({**GOOD, "input_zero_point": {"*": 4, "a": 0}})


def test_scales_without_a_linear_are_rejected() -> None:
    symmetric = {"format": "int8", "scale": "static", "input_scale": {"*": [ONE]}}
    assert parsed(symmetric).static == Static((("*", (1.0,)),), ())
    with pytest.raises(Rejected, match="numerics"):
        parsed({**symmetric, "input_scale": {}})


@pytest.mark.parametrize(
    "change",
    [
        {"input_scale": {}},
        {"input_scale": []},
        {"input_scale": {"*": []}},
        {"input_scale": {"*": ONE}},
        {"input_scale": {"*": [1]}},
        {"input_scale": {"*": [1.0]}},
        {"input_scale": {"*": [None]}},
        {"input_scale": {"": [ONE]}},
        {"input_scale": {"*": ["0x1.0p+0"]}},
        {"input_scale": {"*": [(0.1).hex()]}},  # not a float32 number
        {"input_scale": {"*": [(0.0).hex()]}},
        {"input_scale": {"*": [(-1.0).hex()]}},
        {"input_scale": {"*": [(2.0**-101).hex()]}},
        {"input_scale": {"*": [(2.0**25).hex()]}},
        {"input_scale": {"*": ["inf"]}},
        {"input_scale": {"*": ["nan"]}},
        {"input_zero_point": {}},
        {"input_zero_point": {"*": -1}},
        {"input_zero_point": {"*": 256}},
        {"input_zero_point": {"*": True}},
        {"input_zero_point": {"*": "3"}},
        {"input_zero_point": {"b": 3}},
        {"input_zero_point": {"*": 3, "b": 3}},
        {"format": "int8"},
        {"format": "none"},
        {"scale": "per_token"},
        {"more": 1},
    ],
)
def test_invalid_records_are_rejected(change: Document) -> None:
    with pytest.raises(Rejected):
        parsed({**GOOD, **change})


@pytest.mark.parametrize("missing", ["input_scale", "input_zero_point"])
def test_missing_scales_are_rejected(missing: str) -> None:
    with pytest.raises(Rejected):
        parsed({k: v for k, v in GOOD.items() if k != missing})


@pytest.fixture(scope="module", params=["interval", "affine"])
def proof(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Document, Path]:
    """Return a proof of two linears with different scales, exact to the last bit; and weights."""
    rng = np.random.default_rng(3)
    g = proofs.Graph((2, 4))
    x = g.add("input", [], (2, 4))
    w = g.param("up.weight", rng.standard_normal((6, 4)))
    y = g.add("gelu", [g.add("linear", [x, w], (2, 6))], (2, 6))
    g.add("linear", [y, g.param("down.weight", rng.standard_normal((3, 6)))], (2, 3))
    path = tmp_path_factory.mktemp("static") / "model.safetensors"
    sha256 = proofs.write_safetensors(path, g.tensors)
    centre = rng.standard_normal((2, 4))
    scales = {"up": 0.05, "down": [0.0625, 0.05, 0.07, 0.0625, 0.0625, 0.125]}
    records = (
        proofs.numerics("float32", "nearest"),
        proofs.numerics("float32", "nearest", activations=proofs.static("int8", scales)),
    )
    document = proofs.document(g, *records, sha256, centre, 2.0**-8)
    document["cases"][0]["domain"] = request.param
    return claimed(document, path), path


def judged(document: Document, path: Path) -> str:
    return recheck(json.dumps(document).encode(), path).reason


def changed(document: Document, name: str, scales: list[float] | None) -> Document:
    other = copy.deepcopy(document)
    given = other["numerics"]["infer"]["activations"]["input_scale"]
    if scales is None:
        del given[name]
    else:
        given[name] = [s.hex() for s in scales]
    return other


def test_proof_holds_for_its_own_scales_only(proof: tuple[Document, Path]) -> None:
    document, path = proof
    assert judged(document, path) == "ok"
    wider = changed(document, "up", [0.5])
    assert judged(wider, path) in ("claim/too-small", "witness/too-small")
    # one channel of one linear
    wider = changed(document, "down", [0.0625, 0.5, 0.0625, 0.0625, 0.0625, 0.125])
    assert judged(wider, path) in ("claim/too-small", "witness/too-small")
    assert judged(changed(document, "up", [2.0**-10]), path) == "bound/overflow"
    for name, scales in (("up", None), ("down", None), ("down", [0.5, 0.5])):
        assert judged(changed(document, name, scales), path) == "rule/static-scale"
    # the default scale would apply to a linear without its own
    unnamed = changed(changed(document, "up", None), "*", [1.0])
    assert judged(unnamed, path) in ("claim/too-small", "witness/too-small")
    dynamic = copy.deepcopy(document)
    dynamic["numerics"]["infer"]["activations"] = {"format": "int8", "scale": "per_token"}
    assert judged(dynamic, path) != "internal"


def test_lowered_claim_is_rejected(proof: tuple[Document, Path]) -> None:
    document, path = copy.deepcopy(proof[0]), proof[1]
    for place in (document, document["cases"][0]):
        value = float.fromhex(place["claim"])
        place["claim"] = np.nextafter(value, 0.0).item().hex()
    assert judged(document, path) in ("claim/too-small", "claim/overall")
