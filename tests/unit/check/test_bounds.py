"""Direction, tail and vacuity of single comparisons."""

from __future__ import annotations

import pytest

from kcdsl.check.compile import compile_source
from kcdsl.diagnostics import Sink
from kcdsl.diagnostics.spans import SourceFile

HEAD = """kcdsl: 1
contract: c
version: 1
model: {checkpoint: m, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
slices: {all: {}}
clauses:
  A:
    level: L1
"""


def codes(expression: str, more: str = "") -> list[str]:
    """Return what is reported about one requirement."""
    sink = Sink()
    text = f"{HEAD}{more}    require: >-\n      {expression}\n"
    compile_source(SourceFile("x", text), sink)
    return [d.code.id for d in sink]


@pytest.mark.parametrize(
    "expression",
    [
        "p99(kl) >= 0.1",
        "p99(kl) > 0.1",
        "0.1 <= p99(kl)",
        "not p99(kl) <= 0.1",
        "2 * p99(kl) >= 0.1",
        "p99(kl) / 2 >= 0.1",
        "p99(kl) + 1 >= 2",
        "-p99(kl) <= 5",
        "1 - p99(kl) <= 5",
        "-2 * p99(kl) <= 5",
        "mean(top1_overlap) <= 50%",
        "1 - mean(top1_overlap) >= 1%",
        "mean(abs(log_ratio)) >= 0.1",
        "forall x in points(all): norm_2(drift(attn_0, x)) >= 0.1",
        "p99(kl) <= 1 and throughput <= 4000 tok/s",
        "p99(kl) <= 1 implies p99(kl) >= 0.1",
    ],
)
def test_comparisons_against_the_direction_are_errors(expression: str) -> None:
    assert "KC213" in codes(expression, "    family: numerical\n")


@pytest.mark.parametrize(
    "expression",
    [
        "p99(kl) <= 0.1",
        "-p99(kl) >= -0.1",
        "1 - mean(top1_overlap) <= 1%",
        "not p99(kl) > 0.1",
        "not not p99(kl) <= 0.1",
        "p99(kl) >= 0.1 implies mean(kl) <= 0.1",
        "p99(kl) == 0",
        "forall x in points(all): norm_2(drift(attn_0, x)) <= 0",
    ],
)
def test_comparisons_with_the_direction_are_accepted(expression: str) -> None:
    more = "    family: statistical\n" if "top1" in expression else ""
    assert codes(expression, more) == []


@pytest.mark.parametrize(
    "expression",
    [
        "p1(kl) <= 1",
        "quantile(0.01, kl) <= 1",
        "min(kl) <= 1",
        "max(embedding_cosine) >= 0.9",
        "p99(top5_overlap) >= 90%",
        "p10(abs(log_ratio)) <= 1",
    ],
)
def test_percentiles_of_the_harmless_tail_are_reported(expression: str) -> None:
    assert codes(expression) == ["KC507"]


@pytest.mark.parametrize(
    "expression",
    [
        "max(tv) <= 1",
        "max(tv) < 2",
        "mean(kl) < 0",
        "mean(kl) <= -1",
        "mean(top1_overlap) >= 0",
        "mean(top1_overlap) > 1",
        "min(embedding_cosine) > 1",
        "mean(abs(log_ratio)) < 0",
        "forall x in points(all): norm_2(drift(attn_0, x)) < 0",
        "p99(kl) == -1",
        "3 ms <= 4 ms",
        "mean(kl) <= 1 and 1 <= 2",
    ],
)
def test_vacuous_comparisons_are_reported(expression: str) -> None:
    assert codes(expression) == ["KC404"]


@pytest.mark.parametrize(
    ("expression", "vacuous"),
    [
        ("mean(abs(kl - kl)) <= 0", True),
        ("mean(kl) - mean(kl) <= 0", True),
        ("max(kl - kl) <= 1e-9", True),
        ("p99(kl) - p99(kl) <= 0", False),  # the worst token of each request, less its best
        ("mean(kl - js) <= 0", False),
    ],
)
def test_difference_of_a_term_and_itself_is_vacuous(expression: str, vacuous: bool) -> None:
    assert ("KC404" in codes(expression)) is vacuous


def test_override_affects_the_direction_only() -> None:
    more = "    override: direction\n"
    assert codes("p99(kl) >= 0.1", more) == []
    assert codes("p99(kl) >= 0", more) == ["KC404"]
    assert codes("mean(log_ratio) <= 1", more) == ["KC506"]


@pytest.mark.parametrize(
    "expression",
    [
        "p99(kl) <= 10 * mean(kl)",
        "10 * mean(kl) >= p99(kl)",
        "p99(kl) - mean(kl) <= 0.1",
        "p99(kl) / mean(kl) <= 10",
        "mean(kl) <= 0.1 + mean(jeffreys)",
        "mean(kl - jeffreys) <= 0.1",
        "not p99(kl) > 10 * mean(kl)",
        "mean(kl) * mean(embedding_cosine) <= 0.1",
        "abs(embedding_cosine) >= 0.1 implies mean(abs(embedding_cosine)) <= 0.5",
        "p95(latency) * throughput <= 100 tok",
        "forall x in points(all): norm_2(measured_drift(attn_0, x)) "
        "<= norm_2(measured_drift(mlp_0, x))",
    ],
)
def test_unknown_directions_are_reported(expression: str) -> None:
    if expression.startswith("abs"):
        expression = expression.replace("abs(embedding_cosine) >=", "min(embedding_cosine) >=", 1)
    found = codes(expression, "    family: numerical\n" if "latency" not in expression else "")
    assert found == ["KC216"]
    assert codes(expression, "    override: direction\n") in ([], ["KC214"])


@pytest.mark.parametrize(
    "expression",
    [
        "mean(kl) + mean(jeffreys) <= 0.1",
        "mean(kl) <= 0.1 - mean(jeffreys)",
        "mean(kl) * mean(jeffreys) <= 0.1",
        "mean(kl) / mean(top1_overlap) <= 0.1",
        "mean(kl * tv) <= 0.1",
        "mean(-kl) >= -0.1",
        "mean(abs(kl - jeffreys)) <= 0.1",
        "abs(mean(kl) - mean(jeffreys)) <= 0.1",
        "mean(top1_overlap) >= 0.5 + mean(tv)",
        "p95(latency) / throughput <= 1 s / 4 tok/s",
        "mean(kl) == mean(jeffreys)",
    ],
)
def test_combinations_with_every_part_bounded_are_accepted(expression: str) -> None:
    family = "runtime" if "latency" in expression else "numerical"
    assert codes(expression, f"    family: {family}\n") == []


@pytest.mark.parametrize(
    "expression",
    [
        "mean(kl) + mean(jeffreys) >= 0.1",
        "0.1 <= mean(kl) * mean(jeffreys)",
        "1 / mean(kl) <= 10",
        "mean(abs(kl - jeffreys)) >= 0.1",
        "mean(-kl) <= -0.1",
        "mean(tv) >= mean(top1_overlap)",
    ],
)
def test_combinations_with_no_part_bounded_are_errors(expression: str) -> None:
    assert "KC213" in codes(expression, "    family: numerical\n")


@pytest.mark.parametrize(
    ("expression", "code"),
    [
        ("2 * p1(kl) <= 1", "KC507"),
        ("p1(kl) + mean(jeffreys) <= 1", "KC507"),
        ("p1(kl + jeffreys) <= 1", "KC507"),
        ("p99(-kl) >= -1", "KC507"),
        ("1 - p99(top1_overlap) <= 5%", "KC507"),
        ("max(tv) <= 1 + mean(tv)", "KC404"),
        ("mean(tv) + mean(hellinger2) <= 2", "KC404"),
        ("mean(tv) + 1 < 1", "KC404"),
    ],
)
def test_tails_and_vacuity_in_combinations(expression: str, code: str) -> None:
    family = "statistical" if "top1" in expression else "numerical"
    more = f"    family: {family}\n" + ("    override: direction\n" if code == "KC404" else "")
    assert codes(expression, more) == [code]
