"""The example with user-defined metrics: linted, evaluated, certified, stale after a change."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Cli

QUICK = ("--seconds", "1", "--bound-seconds", "0", "--allow-code")
"""Without times and bounds of the whole model; the folder's own code may run."""


@pytest.fixture
def folder(repository: Path, tmp_path: Path) -> Path:
    """Return a copy of the example beside the model that it uses, at the configured path."""
    shutil.copy(repository / "examples" / "kcdsl.toml", tmp_path)
    for name in ("own_metric", "tiny_lm"):
        shutil.copytree(
            repository / "examples" / name, tmp_path / name, ignore=shutil.ignore_patterns("out")
        )
    return tmp_path / "own_metric"


def rows(ran: Any) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["clause"], row["slice"]): row for row in json.loads(ran.stdout)["clauses"]}


def test_lint_reports_nothing_and_does_not_import_the_metric(cli: Cli, folder: Path) -> None:
    module = folder / "drift_metrics.py"
    module.write_text(module.read_text("utf-8") + "\nraise SystemExit('run')\n", encoding="utf-8")
    ran = cli("lint", "--format", "json", cwd=folder)
    assert (ran.code, json.loads(ran.stdout)) == (0, [])
    assert cli("compile", cwd=folder).code == 0
    assert not any("drift_metrics" in name for name in sys.modules)


@pytest.mark.full
def test_contract_is_evaluated_and_certified(
    cli: Cli, folder: Path, follows: Any, tmp_path: Path
) -> None:
    assert cli("keygen", "-o", tmp_path / "test.key").code == 0
    ran = cli(
        "evaluate", "--format=json", *QUICK, "--sign", tmp_path / "test.key", "-o", "out",
        cwd=folder,
    )  # fmt: skip
    assert ran.code == 0, ran.stderr
    report = json.loads(ran.stdout)
    follows(report)
    found = rows(ran)
    assert {row["verdict"] for row in found.values()} == {"held"}
    assert found["S-RANK", "all"]["value"] == 1
    assert found["S-RANK", "all"]["unit"] == "ratio"
    assert 0 < found["S-ENTROPY", "all"]["value"] < 1e-3
    assert {item["name"] for item in report["environment"]["metrics"]} == {
        "entropy_rise",
        "label_rank_kept",
    }
    check = ("check", "out/evaluate.cert.json", "--key", tmp_path / "test.key.pub", "--contract",
             "contract.kc.yaml", "--kernels", "out/kernels.json")  # fmt: skip
    assert cli(*check, cwd=folder).code == 0
    module = folder / "drift_metrics.py"
    module.write_text(module.read_text("utf-8").replace("100 * np.mean", "0 * 99 * np.mean"))
    changed = cli(*check, cwd=folder)
    assert changed.code == 4
    assert "drift_metrics.py" in changed.stdout + changed.stderr


@pytest.mark.full
def test_failing_metric_gives_invalid_evidence(cli: Cli, folder: Path) -> None:
    module = folder / "drift_metrics.py"
    text = module.read_text("utf-8").replace(
        "    known = labels", "    raise OSError(5)\n    known = labels"
    )
    module.write_text(text, encoding="utf-8")
    ran = cli("evaluate", "--format", "json", *QUICK, "--slice", "safety", "-o", "out", cwd=folder)
    assert ran.code == 2
    found = rows(ran)
    assert found["S-RANK", "safety"]["verdict"] == "invalid_evidence"
    assert "OSError" in json.dumps(found["S-RANK", "safety"])
    assert found["S-ENTROPY-MEAN", "safety"]["verdict"] == "held"


@pytest.mark.full
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_output_of_metric_functions_is_not_in_the_report(
    cli_process: Cli, folder: Path, jobs: str
) -> None:
    module = folder / "drift_metrics.py"
    text = module.read_text("utf-8").replace(
        "    return entropy(infer_logits",
        "    print('from the function')\n    return entropy(infer_logits",
    )
    module.write_text(text + "\nprint('from the module')\n", encoding="utf-8")
    prompts = folder.parent / "tiny_lm" / "prompts.jsonl"
    rows_ = [r for r in prompts.read_text("utf-8").splitlines(keepends=True) if "safety" in r]
    prompts.write_text("".join(rows_[:2]), encoding="utf-8")
    ran = cli_process(
        "evaluate", "--format", "json", *QUICK, "--jobs", jobs, "-o", "out", cwd=folder
    )
    assert json.loads(ran.stdout)["schema"] == "kcdsl.report/3"
    assert "from the function" in ran.stderr
    assert "from the module" in ran.stderr
