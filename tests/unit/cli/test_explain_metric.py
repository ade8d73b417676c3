"""`kcdsl explain METRIC` prints the same text as the hover of editors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kcdsl.metrics import METRICS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Cli


@pytest.mark.parametrize("name", ["kl", "oob_icepop", "ess_frac", "top1_overlap"])
def test_metric_is_explained(cli: Cli, name: str) -> None:
    found = cli("explain", name)
    metric = METRICS[name]
    assert found.code == 0
    assert found.stdout.startswith(f"{metric.name}: ")
    assert metric.summary[1:] in found.stdout
    assert f"better: {metric.better}" in found.stdout
    assert "`" not in found.stdout


def test_json_is_available_for_codes_and_clauses(cli: Cli) -> None:
    found = cli("explain", "kl", "--format", "json")
    assert (found.code, found.stdout) == (2, "")
    assert "not explained as JSON" in found.stderr


def test_name_with_a_contract_refers_to_a_clause(cli: Cli) -> None:
    found = cli("explain", "kl", "nowhere.yaml")
    assert found.code == 2
    assert "nowhere.yaml" in found.stderr


@pytest.mark.parametrize("name", ["w_log_w", "k3", "chi2_token", "mult_prob_error", "log_ratio"])
def test_symbols_keep_their_case(cli: Cli, name: str) -> None:
    """W is the weight of a sequence, w that of a token."""
    assert f"\n{METRICS[name].summary}.\n" in cli("explain", name).stdout


@pytest.mark.parametrize("name", ["tv", "chi2_infer_train", "rbo10", "token_kl_max"])
def test_explanations_begin_with_a_capital_letter(cli: Cli, name: str) -> None:
    summary = METRICS[name].summary
    assert f"\n{summary[0].upper()}{summary[1:]}.\n" in cli("explain", name).stdout


@pytest.mark.parametrize(
    ("name", "metric"),
    [("p99_kl", "kl"), ("mean_abs_log_ratio", "log_ratio"), ("p95_latency_ms", "latency")],
)
def test_names_of_the_record_form_are_explained(cli: Cli, name: str, metric: str) -> None:
    assert cli("explain", name).stdout == cli("explain", metric).stdout


def test_user_metric_is_explained(cli: Cli, repository: Path) -> None:
    found = cli("explain", "entropy_rise", cwd=repository / "examples" / "own_metric")
    assert found.code == 0
    assert found.stdout.startswith("entropy_rise: Real[nats] per token\n")


def test_summary_of_a_user_metric_moves_no_cursor(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "contract.yaml").write_text(
        "kcdsl: 1\ncontract: own\nversion: 1.0.0\n"
        "model: {checkpoint: model.safetensors, architecture: llama}\n"
        "kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}\n"
        "data: requests.jsonl\nslices: {all: {}}\n"
        "clauses: {N: {require: max(gap) <= 1, slices: [all], level: L2}}\n"
    )
    (tmp_path / "kcdsl.toml").write_text('metrics = ["own.py"]\n')
    (tmp_path / "own.py").write_text(
        "from kcdsl import metric\n\n\n"
        '@metric(family="numerical", unit="1", better="lower", counted="token",\n'
        '        needs=["logits"], summary="a\\x1b[2Jb")\n'
        "def gap(train_logits, infer_logits): ...\n"
    )
    found = cli("explain", "gap", cwd=tmp_path)
    assert found.code == 0
    assert found.stdout.startswith("gap: Real per token\n")
    assert "\x1b" not in found.stdout


@pytest.mark.parametrize(("name", "help"), [("kll", "`kl`"), ("zzzzzz", "`kcdsl explain metrics`")])
def test_unknown_name_without_a_contract(cli: Cli, tmp_path: Path, name: str, help: str) -> None:
    found = cli("explain", name, cwd=tmp_path)
    assert (found.code, found.stdout) == (2, "")
    assert "KC471" in found.stderr
    assert f"`{name}` is no code and no metric" in found.stderr
    assert help in found.stderr


def test_page_of_the_manual_is_printed(cli: Cli, tmp_path: Path) -> None:
    shown = cli("explain", "rollouts", cwd=tmp_path)
    assert shown.code == 0
    assert shown.stdout.startswith("Recorded rollouts\n")
    assert "](" not in shown.stdout.partition("\n\n")[2][:2000]
    refused = cli("explain", "rollouts", "--format", "json", cwd=tmp_path)
    assert refused.code == 2
    assert "KC901" in refused.stderr
