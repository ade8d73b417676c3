"""`kcdsl verify` of a perceptron in an ONNX file: the region is split if a bound is too large."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from kcdsl_certs.recheck import recheck
from tests.support.onnx_files import model_of

NETWORK = """
<ir_version: 9, opset_import: ["" : 18]>
perceptron (int64[1,T] input_ids) => (float[1,T,2] last_hidden_state)
{
  embedded = Gather (table, input_ids)
  a = MatMul (embedded, w1)
  b = Add (a, b1)
  c = Relu (b)
  d = MatMul (c, w2)
  e = Add (d, b2)
  f = Relu (e)
  last_hidden_state = MatMul (f, w3)
}
"""
CONTRACT = """\
kcdsl: 1
contract: perceptron
version: 1.0.0
model: {onnx: model.onnx, blocks: {mlp_0: {from: embedded, to: last_hidden_state}}}
kernels:
  train: {run: torch.eager}
  infer: {run: torch.eager, numerics: {preset: int8-weights, compute: %s}}
data: rows.jsonl
slices: {all: {}}
clauses:
  N: {require: "forall x in ball(all, 2): norm_inf(drift(mlp_0, x)) <= %s", level: L2}
"""
Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, cli: Any) -> Run:
    """Return a function that verifies a threshold and returns the exit code and the goal."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (2, 6), "b1": (6,), "w2": (6, 6), "b2": (6,), "w3": (6, 2), "table": (4, 2)}
    held = {n: (rng.standard_normal(s) / s[0] ** 0.5).astype(np.float32) for n, s in shapes.items()}
    onnx.save(model_of(NETWORK, held), str(tmp_path / "model.onnx"))
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "tokens": [1]}\n')

    def verify(threshold: str, *options: str, compute: str = "float32") -> tuple[int, Any]:
        path = tmp_path / "contract.yaml"
        path.write_text(CONTRACT % (compute, threshold))
        common = ("--format", "json", "--cache", "off", "--jobs", "1", "-o", str(tmp_path / "out"))
        ran = cli("verify", str(path), *common, *options)
        assert ran.code in (0, 1, 3), ran.stderr
        (goal,) = json.loads(ran.stdout)["goals"]
        return ran.code, goal

    return verify


def test_proof_by_splits_is_rechecked_from_the_file(run: Run, tmp_path: Path, follows: Any) -> None:
    code, goal = run("0.013", "--domains", "splits", "--attack", "off")
    assert (code, goal["verdict"], goal["evidence"]["confirmed"]) == (0, "held", True)
    assert 0.0129 < goal["bound"] <= 0.013
    proofs = [p for p in (tmp_path / "out").glob("*.json") if b"interval-proof" in p.read_bytes()]
    documents = {path: json.loads(path.read_bytes()) for path in proofs}
    ((path, document),) = [(p, d) for p, d in documents.items() if "cases" in d]
    follows(document)
    assert [case["domain"] for case in document["cases"]] == ["splits"]
    assert recheck(path.read_bytes(), tmp_path / "model.onnx").ok
    document["cases"][0]["claim"] = document["claim"] = (goal["bound"] / 2).hex()
    less = recheck(json.dumps(document).encode(), tmp_path / "model.onnx")
    assert less.reason == "claim/too-small"


@pytest.mark.full
def test_splits_hold_where_one_bound_does_not(run: Run) -> None:
    code, goal = run("0.013", "--domains", "interval,affine,planes", "--attack", "off")
    assert (code, goal["verdict"]) == (3, "inconclusive")
    code, goal = run("0.013")
    assert (code, goal["verdict"], goal["evidence"]["confirmed"]) == (0, "held", True)
    assert goal["attack"] <= goal["bound"]


@pytest.mark.full
def test_point_above_the_limit_gives_a_counterexample(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack starts where the exact drift exceeds the limit."""
    from kcdsl_backends.attack import attack

    starts: list[tuple[float, ...]] = []

    def spied(*args: Any, **more: Any) -> Any:
        starts.append(more["start"])
        return attack(*args, **more)

    monkeypatch.setattr("kcdsl_backends.certifier.tasks.attack", spied)
    code, goal = run("0.009")
    assert (code, goal["verdict"]) == (1, "violated")
    assert goal["counterexample"]["value"] > 0.009
    assert Path(goal["counterexample"]["file"]).exists()
    (start,) = starts
    assert len(start) == 2
    assert all(-1 <= share <= 1 for share in start)
    code, goal = run("0.009", "--domains", "splits", "--attack", "off")
    assert code == 3
    assert "real arithmetic" in goal["reason"]


@pytest.mark.full
def test_unfinished_splits_are_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, goal = run("0.013", "--domains", "splits", "--attack", "off", compute="bfloat16")
    assert code == 3
    assert "all roundings together" in goal["reason"]
    monkeypatch.setattr("kcdsl_backends.certifier.bounds.MOST_BOXES", 1)
    code, goal = run("0.0115", "--domains", "interval,splits", "--attack", "off")
    assert code == 3
    assert "boxes are left" in goal["reason"]
    assert "the bound 0.037" in goal["reason"]
    monkeypatch.setattr("kcdsl_backends.certifier.bounds.MOST", 1000)
    code, goal = run("0.013", "--attack", "off")
    assert code == 3
    assert "splits" not in goal["reason"]
