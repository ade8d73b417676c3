"""`kcdsl explain METRIC` prints what editors show of a metric."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kcdsl.check.metrics import ALIASES, METRICS

if TYPE_CHECKING:
    from tests.conftest import Cli


@pytest.mark.parametrize("name", ["kl", "oob_icepop", "ess_frac", "top1_agreement"])
def test_a_metric_is_explained(cli: Cli, name: str) -> None:
    found = cli("explain", name)
    metric = METRICS[ALIASES.get(name, name)]
    assert found.code == 0
    assert found.stdout.startswith(f"{metric.name}: ")
    assert metric.summary[1:] in found.stdout
    assert f"better: {metric.better}" in found.stdout
    assert "`" not in found.stdout
    assert cli("explain", name, "--format", "markdown").stdout.startswith(f"**{metric.name}**")


def test_json_is_for_codes_and_clauses(cli: Cli) -> None:
    found = cli("explain", "kl", "--format", "json")
    assert (found.code, found.stdout) == (2, "")
    assert "not explained as JSON" in found.stderr


def test_with_a_contract_the_clause_is_meant(cli: Cli) -> None:
    found = cli("explain", "kl", "nowhere.yaml")
    assert found.code == 2
    assert "nowhere.yaml" in found.stderr
