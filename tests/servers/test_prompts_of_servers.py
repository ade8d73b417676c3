"""The statistical unit of samples of a server is the prompt, however many requests repeat it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel
from tests.conftest import Cli
from tests.support.fake_server import FakeServer, serving

pytestmark = pytest.mark.usefixtures("shared_files")

CONTRACT = """\
kcdsl: 1
contract: served
version: 1.0.0
model: {{checkpoint: {folder}/model.safetensors, architecture: llama}}
data: requests.jsonl
kernels:
  train: {{run: torch.eager}}
  infer: {{run: server, url: "{url}", tokens: 4, logprobs: {{values: processed}}}}
slices: {{all: {{}}, even: {{where: kind == "even"}}}}
clauses:
  N-K3: {{require: mean(k3) <= 1e-3, slices: [all, even], level: L2}}
  N-MOST: {{require: p50(abs(log_ratio)) <= 1e-2, slices: [all], level: L2}}
"""
Decide = Callable[..., tuple[dict[str, Any], FakeServer]]


@pytest.fixture
def decide(cli: Cli, tmp_path: Path, tiny_folder: Path, train: TorchKernel) -> Decide:
    def run(prompts: list[str], change: Any = None) -> tuple[dict[str, Any], FakeServer]:
        rows = [
            {"id": f"r{i}", "text": text, "kind": "odd" if i % 2 else "even"}
            for i, text in enumerate(prompts)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "requests.jsonl").write_text(lines, "utf-8")
        fake = FakeServer(train.logits)
        if change is not None:
            fake.change = change
        with serving(fake) as url:
            text = CONTRACT.format(folder=tiny_folder, url=url)
            (tmp_path / "contract.yaml").write_text(text, "utf-8")
            ran = cli("evaluate", "contract.yaml", "--format", "json", "-o", "out", cwd=tmp_path)
            assert ran.stdout, ran.stderr
            plan = json.loads(cli("plan", "contract.yaml", "--format", "json", cwd=tmp_path).stdout)
        report = json.loads(ran.stdout)
        planned = {(row["clause"], row["slice"]): row["have"] for row in plan["rows"]}
        counted = {(row["clause"], row["slice"]): row["n"] for row in report["clauses"]}
        assert {k: n for k, n in counted.items() if n} == {
            k: planned[k] for k in counted if counted[k]
        }
        again = cli("replay", "out/trace.parquet", cwd=tmp_path)
        assert again.code == ran.code, again.stderr
        return report, fake

    return run


@pytest.mark.full
def test_repeated_prompt_is_one_unit(decide: Decide) -> None:
    report, fake = decide(["User: a", "User: b"] * 20)
    assert {row["n"] for row in report["clauses"] if row["slice"] == "all"} == {2}
    assert {row["n"] for row in report["clauses"] if row["slice"] == "even"} == {1}
    assert "held" not in {row["verdict"] for row in report["clauses"]}
    assert any("38 requests repeat a prompt" in note for note in report["notes"])
    assert len({q["seed"] for q in fake.questions}) > 40, "each is drawn with a seed of its own"


@pytest.mark.full
def test_different_prompts_are_different_units(decide: Decide) -> None:
    report, _ = decide([f"User: {i}" for i in range(40)])
    assert {row["n"] for row in report["clauses"] if row["slice"] == "all"} == {40}
    assert {row["n"] for row in report["clauses"] if row["slice"] == "even"} == {20}
    assert {row["verdict"] for row in report["clauses"]} == {"held"}
    assert not any("repeat" in note for note in report["notes"])


@pytest.mark.full
def test_unit_fails_if_one_of_its_requests_fails(decide: Decide) -> None:
    seen: list[int] = []

    def null(answer: Any, question: Any) -> Any:
        if bytes(question["prompt"]) == b"User: 3" and question["max_tokens"] > 2:
            seen.append(question["seed"])
            if len(seen) == 2:
                answer["choices"][0]["logprobs"]["token_logprobs"][0] = None
        return answer

    report, _ = decide([f"User: {i % 20}" for i in range(40)], null)
    whole = {row["verdict"] for row in report["clauses"] if row["slice"] == "all"}
    assert whole == {"invalid_evidence"}
