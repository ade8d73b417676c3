"""Imports, a table of thresholds and held-out clauses, from evaluation to gate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("shared_files")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny_lm"
CONTRACT = EXAMPLE / "variants" / "shared-limits.kc.yaml"
TABLE = """\
tables:
  tau_kl:
    unit: nats
    rows:
      - {where: 'category == "safety"', value: 5e-7}
      - {where: "length <= 80", value: 1e-6}
    otherwise: 2e-6
"""
INLINE = f"""\
kcdsl: 1
contract: tiny-lm-shared-limits
version: 1.0.0
model:
  checkpoint: {EXAMPLE}/model.safetensors
  architecture: llama
  config: {EXAMPLE}/config.json
kernels:
  train: {{run: torch.eager, numerics: {{preset: torch-eager, compute: float32}}}}
  infer: {{run: torch.sdpa.flash, numerics: {{preset: torch-sdpa-flash, compute: float32}}}}
data: prompts.jsonl
slices:
  all: {{}}
  json: {{where: 'category == "json"'}}
{TABLE}clauses:
  N-KL: {{require: p99(kl) <= table(tau_kl), level: L2}}
"""


ROWS = [json.loads(line) for line in (EXAMPLE / "prompts.jsonl").read_text().splitlines()]
FEW = [
    row
    for category, short in (("safety", True), ("json", True), ("json", False), ("chat", True))
    for row in [r for r in ROWS if r["category"] == category and (r["length"] <= 80) is short][:2]
]
"""Two prompts of each kind that the contract below distinguishes, for a quick evaluation."""


def write_prompts(folder: Path, *more: dict[str, Any]) -> None:
    """Write the data of the contract below."""
    lines = [json.dumps(row) for row in (*FEW, *more)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signing key for this module."""
    from kcdsl.cli import main

    path = tmp_path_factory.mktemp("keys") / "test.key"
    assert main(["keygen", "-o", str(path)]) == 0
    return path


Evaluate = Callable[..., tuple[Any, dict[str, Any]]]


@pytest.fixture
def evaluate(cli: Any, key: Path, tmp_path: Path) -> Evaluate:
    """Return a function that evaluates a contract and returns the run and its report."""

    def run(contract: Path | str, *options: str) -> tuple[Any, dict[str, Any]]:
        if isinstance(contract, str):
            path = tmp_path / "contract.yaml"
            path.write_text(contract)
            contract = path
            if not (tmp_path / "prompts.jsonl").exists():
                write_prompts(tmp_path)
        ran = cli("evaluate", contract, "--sign", key, "-o", tmp_path, "--format", "json", *options)
        return ran, json.loads(ran.stdout) if ran.stdout else {}

    return run


@pytest.mark.full
def test_each_bucket_is_decided_by_its_own_limit(
    cli: Any, key: Path, tmp_path: Path, evaluate: Evaluate, follows: Callable[..., None]
) -> None:
    ran, report = evaluate(CONTRACT, "--seconds", "2")
    assert ran.code == 0, ran.stderr
    follows(report)
    rows = {row["slice"]: row for row in report["clauses"] if row["clause"] == "N-KL"}
    # No request of the slice `safety` is in a bucket other than the first.
    assert {name: (row["threshold"], row["n"]) for name, row in rows.items()} == {
        'all[tau_kl: category == "safety"]': (5e-7, 12),
        "all[tau_kl: length <= 80]": (1e-6, 23),
        "all[tau_kl: otherwise]": (2e-6, 13),
        'safety[tau_kl: category == "safety"]': (5e-7, 12),
    }
    assert {row["clause"] for row in report["clauses"] if row["holdout"]} == {"N-TV", "S-TOP5"}
    assert {row["slice"] for row in report["slices"]} == {"all", "safety", "short"}
    check = ("check", tmp_path / "evaluate.cert.json", "--key", f"{key}.pub", "--contract")
    assert cli(*check, CONTRACT).code == 0


@pytest.mark.full
def test_certificate_for_one_table_does_not_satisfy_another(
    cli: Any, key: Path, tmp_path: Path, evaluate: Evaluate
) -> None:
    ran, _ = evaluate(INLINE, "--seconds", "0.1")
    assert ran.code == 0, ran.stderr
    contract = tmp_path / "contract.yaml"
    check = ("check", tmp_path / "evaluate.cert.json", "--key", f"{key}.pub")
    assert cli(*check, "--contract", contract).code == 0
    for old, new in (
        ("value: 1e-6", "value: 1e-7"),
        ("otherwise: 2e-6", "otherwise: 3e-6"),
        ("length <= 80", "length <= 81"),
        ("table(tau_kl)", "2e-6"),
    ):
        assert old in INLINE
        contract.write_text(INLINE.replace(old, new))
        assert cli(*check, "--contract", contract).code == 4, (old, new)


def test_requirements_contain_thresholds_and_slices_of_the_table(tmp_path: Path) -> None:
    """The digest of the contract is not the only binding."""
    from kcdsl.check.compile import load_program
    from kcdsl.release.requirements import required_clauses

    path = tmp_path / "contract.yaml"
    write_prompts(tmp_path)

    def stated(text: str) -> dict[Any, Any]:
        path.write_text(text)
        return {
            (r.id, r.slice): (str(r.alternatives[0][0]), r.slice_digest, r.inside)
            for r in required_clauses(load_program(path), tmp_path)
        }

    before = stated(INLINE)
    assert [tau for tau, _, _ in before.values()] == [
        "p99(kl) <= 0.0000005 [nat]",
        "p99(kl) <= 0.000001 [nat]",
        "p99(kl) <= 0.000002 [nat]",
    ]
    assert len({sha for _, sha, _ in before.values()}) == 3
    assert all("all" in inside for _, _, inside in before.values())
    assert stated(INLINE.replace("length <= 80", "length <= 81")).keys() != before.keys()
    assert stated(INLINE.replace("1e-6", "3e-6")) != before


@pytest.mark.full
def test_an_empty_bucket_is_never_a_pass(evaluate: Evaluate) -> None:
    ran, report = evaluate(INLINE.replace("length <= 80", "length <= 3"), "--seconds", "0.1")
    assert (ran.code, report["verdict"]) == (2, "invalid_evidence")
    empty = [row for row in report["clauses"] if row["verdict"] != "held"]
    assert [row["slice"] for row in empty] == ["all[tau_kl: length <= 3]"]


@pytest.mark.full
def test_only_the_failing_bucket_is_violated(evaluate: Evaluate) -> None:
    ran, report = evaluate(INLINE.replace("value: 1e-6", "value: 1e-13"), "--seconds", "0.1")
    assert ran.code == 1
    broken = [row["slice"] for row in report["clauses"] if row["verdict"] == "violated"]
    assert broken == ["all[tau_kl: length <= 80]"]


@pytest.mark.full
def test_request_outside_every_bucket_gives_invalid_evidence(
    tmp_path: Path, evaluate: Evaluate
) -> None:
    """Lengths are whole numbers and the rows cover them; a file may state another number."""
    rows = "      - {where: length <= 80, value: 1}\n      - {where: length >= 81, value: 1}\n"
    table = "tables:\n  tau_kl:\n    unit: nats\n    rows:\n" + rows
    write_prompts(tmp_path, FEW[0] | {"id": "odd", "length": 80.5})
    text = INLINE.replace(TABLE, table)
    ran, report = evaluate(text, "--seconds", "0.1")
    assert (ran.code, report["verdict"]) == (2, "invalid_evidence")
    assert {row["verdict"] for row in report["clauses"]} == {"invalid_evidence"}
    assert "'odd' first, are in no row of the table tau_kl" in report["clauses"][0]["reason"]
    write_prompts(tmp_path)
    assert evaluate(text, "--seconds", "0.1")[0].code == 0


@pytest.mark.full
def test_buckets_of_a_chosen_slice_only(evaluate: Evaluate) -> None:
    text = INLINE.replace("level: L2}", "slices: [all, json], level: L2}")
    ran, report = evaluate(text, "--slice", "json", "--seconds", "0.1")
    assert ran.code == 0, ran.stderr
    assert {row["slice"] for row in report["clauses"]} == {
        "json[tau_kl: length <= 80]", "json[tau_kl: otherwise]"
    }  # fmt: skip
    assert "N-KL" not in report["deferred"]


AUDIT = f"""\
kcdsl: 1
contract: audit
version: 1
model:
  checkpoint: {EXAMPLE}/model.safetensors
  architecture: llama
  config: {EXAMPLE}/config.json
kernels:
  train:
    run: torch.eager
    numerics: {{preset: torch-eager, compute: float64, accumulate: float64}}
  infer:
    run: torch.sdpa.flash
    numerics: {{preset: torch-sdpa-flash, compute: float64, accumulate: float64}}
data: prompts.jsonl
slices: {{all: {{}}}}
tables:
  t:
    unit: nats
    rows: [{{where: length <= 10, value: 1e-3}}, {{where: length >= 11, value: 2e-3}}]
clauses:
  N-LOGITS:
    require: "forall x in points(all): span(drift(model, x)) <= 0.1"
    evidence: proof
    level: L2
  N-KL: {{require: p99(kl) <= table(t), evidence: proof, level: L2}}
constants: {{temperature: 1}}
"""


@pytest.mark.full
def test_proof_implies_a_table_bucket_by_bucket(cli: Any, key: Path, tmp_path: Path) -> None:
    contract = tmp_path / "contract.yaml"
    contract.write_text(AUDIT)
    rows = [{"id": f"p{n}", "text": "x" * n} for n in (8, 12)]
    options = ("--attack", "off", "--sign", key, "-o", tmp_path, "--format", "json")

    def implied(*more: dict[str, Any]) -> list[str]:
        lines = [json.dumps(row) for row in (*rows, *more)]
        (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
        ran = cli("verify", contract, *options)
        assert ran.code == (3 if more else 0), ran.stderr
        return [item["slice"] for item in json.loads(ran.stdout)["implied"]]

    check = ("check", tmp_path / "verify.cert.json", "--contract", contract, "--complete")
    assert implied() == ["all[t: length <= 10]", "all[t: length >= 11]"]
    assert cli(*check, "--key", f"{key}.pub").code == 0
    # A request outside every bucket: nothing is implied, and the clause is not covered.
    assert implied({"id": "odd", "text": "x" * 9, "length": 10.5}) == []
    assert cli(*check, "--key", f"{key}.pub").code == 4
