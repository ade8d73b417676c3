"""Messages for authors who write the syntax of other tools."""

from __future__ import annotations

import pytest

from kcdsl.check.compile import analyse
from kcdsl.check.fixes import edited
from kcdsl.diagnostics import Diagnostic, Severity, Sink
from kcdsl.diagnostics.spans import SourceFile

HEAD = """kcdsl: 1
contract: c
version: 1.0.0
model: {checkpoint: m, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
slices: {all: {}}
tables:
  tau: {unit: nats, rows: [{where: length <= 128, value: 0.01}], otherwise: 0.05}
clauses:
  T: {require: p99(kl) <= table(tau), level: L1}
"""


def only(clause: str) -> tuple[Diagnostic, str]:
    """Return the only error of a clause, with its full text."""
    text = f"{HEAD}  A:\n    level: L1\n{clause}"
    sink = Sink()
    analyse(SourceFile("c.kc.yaml", text), sink)
    (found,) = [d for d in sink if d.severity is Severity.ERROR]
    return found, text


def of(require: str) -> tuple[Diagnostic, str]:
    return only(f"    require: >-\n      {require}\n")


@pytest.mark.parametrize(
    ("require", "help", "mended"),
    [
        ("p95(latency) <= 2 seconds", "write `s`", "p95(latency) <= 2 s"),
        ("throughput >= 4000 tokens/sec", "write `tok/s`", "throughput >= 4000 tok/s"),
        ("median(kl) <= 0.1", "write `p50(...)`", "p50(kl) <= 0.1"),
        ("p100(kl) <= 0.1", "write `max(...)`", "max(kl) <= 0.1"),
        ("p999(kl) <= 0.1", "write quantile(0.999, ...)", "quantile(0.999, kl) <= 0.1"),
        ("p99(kl) <= tau", "write table(tau)", "p99(kl) <= table(tau)"),
        ("has(trace, rng_seed)", "write has(trace, [field, ...])", "has(trace, [rng_seed])"),
    ],
)
def test_words_of_other_tools_are_recognised(require: str, help: str, mended: str) -> None:
    found, text = of(require)
    assert found.help == help
    assert found.fix is not None
    whole = edited(text, list(found.fix.edits))
    assert whole == text.replace(require, mended)
    sink = Sink()
    assert analyse(SourceFile("c.kc.yaml", whole), sink).program is not None


@pytest.mark.parametrize(
    ("require", "code", "help"),
    [
        ("p99(kl) < 2%", "KC301", "write a number of nats, such as 0.02 nats"),
        ("p95(latency) <= 80 GiB", "KC301", "write a time, such as 250 ms"),
        ("ece_gap <= 1 s", "KC301", "write a ratio, such as 1%"),
        ("mean(top1_overlap) >= 99.5", "KC404", "write `99.5%` for a percentage"),
        ("mean(top1_overlap) >= 1000", "KC404", None),
        ("mean(top1_overlap) > 100%", "KC404", None),
        ("quantile(99, kl) <= 0.1", "KC303", "write 99%"),
        ("quantile(0, kl) <= 0.1", "KC303", "for the extremes write max(...) or min(...)"),
        ("true", "KC404", "compare a statistic of a metric, or a norm of a drift, with a number"),
    ],
)
def test_messages_state_the_correct_syntax(require: str, code: str, help: str | None) -> None:
    found, _ = of(require)
    assert (found.code.id, found.help) == (code, help)


def test_incomplete_record_names_missing_fields() -> None:
    found, _ = only("    metric: p99_kl\n")
    assert found.help == "add `threshold: NUMBER`, or `threshold: table(NAME)`"


@pytest.mark.parametrize("value", ['"true"', "1"])
def test_holdout_must_be_a_boolean(value: str) -> None:
    found, _ = only(f"    require: p99(kl) <= 1\n    holdout: {value}\n")
    assert found.code.id == "KC103"
    assert found.help is not None
    assert ("quotation marks" in found.help) == value.startswith('"')


@pytest.mark.parametrize("where", ["length + 1 > 3", "-length < 3"])
def test_predicates_allow_no_arithmetic(where: str) -> None:
    text = HEAD.replace("all: {}", f"all: {{where: '{where}'}}")
    sink = Sink()
    analyse(SourceFile("c.kc.yaml", text), sink)
    assert [d.message for d in sink] == ["a test compares one field, and computes nothing"]


def test_list_of_statements_is_not_a_list_of_fields() -> None:
    text = f"{HEAD}  A: {{level: L1, require: [p99(kl) <= 1, rng_seed, mean(kl) <= 1]}}\n"
    sink = Sink()
    analysis = analyse(SourceFile("c.kc.yaml", text), sink)
    assert analysis.program is None
    found = [d for d in sink if d.severity is Severity.ERROR]
    assert [d.code.id for d in found] == ["KC107", "KC107"]
    assert all("join statements by `and`" in (d.help or "") for d in found)


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("infer: torch.sdpa", "write {run: torch.sdpa}"),
        ("infer: {run: torch.sdpa, numerics: torch-sdpa}", "write {preset: torch-sdpa}"),
        ("infer: {run: torch.sdpa, numerics: {weights: int8}}", "write {format: int8}"),
        ("infer: {run: sdpa}", "did you mean `torch.sdpa`?"),
        ("infer: {run: torch.sdpa, numerics: {compute: fp32}}", "did you mean 'float32'?"),
    ],
)
def test_messages_about_kernels(written: str, instead: str) -> None:
    text = HEAD.replace("infer: {run: torch.sdpa}", written)
    sink = Sink()
    analyse(SourceFile("c.kc.yaml", text), sink)
    assert [d.help for d in sink if d.severity is Severity.ERROR] == [instead]


def test_numbers_in_numerics_are_marked() -> None:
    numerics = "numerics: {attention: {exp_ulps: 1, tile: 0}}"
    text = HEAD.replace("infer: {run: torch.sdpa}", f"infer: {{run: torch.sdpa, {numerics}}}")
    sink = Sink()
    analyse(SourceFile("c.kc.yaml", text), sink)
    (found,) = [d for d in sink if d.severity is Severity.ERROR]
    assert found.span is not None
    assert text[found.span.start - 6 : found.span.end] == "tile: 0"
