"""The fragment of a clause, with the sub-expression that determines it."""

from __future__ import annotations

import pytest

from kcdsl.check.compile import compile_source
from kcdsl.diagnostics import Diagnostic, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.terms import Clause
from kcdsl.route.catalogue import Fragment
from kcdsl.route.fragments import classify
from kcdsl.route.goals import goal_of

HEAD = """kcdsl: 1
contract: c
version: 1
model: {checkpoint: m, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
slices: {all: {}, long: {where: length > 128}}
clauses:
  A:
    level: L1
"""

UNIVERSAL = (Fragment.UNIVERSAL_DRIFT, Fragment.UNIVERSAL_FLIP)
"""The fragments of clauses that are goals of formal backends."""


def compiled(expression: str, more: str = "") -> tuple[SourceFile, Clause | None, list[Diagnostic]]:
    """Compile one requirement in a folded scalar."""
    source = SourceFile("x", f"{HEAD}{more}    require: >-\n      {expression}\n")
    sink = Sink()
    program = compile_source(source, sink)
    return source, (program.clauses[0] if program is not None else None), list(sink)


@pytest.mark.parametrize(
    ("marked", "fragment"),
    [
        ("forall x in points(all): «norm_2(drift(attn_0, x)) <= 1»", Fragment.UNIVERSAL_DRIFT),
        ("forall x in ball(all, 1): «span(drift(head, x)) < 1»", Fragment.UNIVERSAL_DRIFT),
        ("forall x in hull(all, 1): «no_flip(head, x, 3)»", Fragment.UNIVERSAL_FLIP),
        ("«p99(kl)» <= 1", Fragment.STATISTICAL),
        ("«mean(kl)» <= 1 or not mean(abs(log_ratio)) > 2", Fragment.STATISTICAL),
        ("«mean(kl) + 3 * mean(kl)» <= p99(kl)", Fragment.STATISTICAL),
        ("«has(trace, [rng_seed])»", Fragment.TRACE_FIELDS),
        (
            "forall x in points(all): «norm_2(measured_drift(attn_0, x)) <= 1»",
            Fragment.STATISTICAL,
        ),
    ],
)
def test_fragments_of_requirements(marked: str, fragment: Fragment) -> None:
    source, clause, found = compiled(marked.replace("«", "").replace("»", ""))
    assert clause is not None, [d.message for d in found]
    placement = classify(clause)
    assert placement.fragment is fragment
    assert (goal_of(clause) is not None) is (fragment in UNIVERSAL)
    span = placement.blame[0].span
    assert source.text[span.start : span.end] == marked[marked.index("«") + 1 : marked.index("»")]


@pytest.mark.parametrize(
    ("marked", "words"),
    [
        ("«exists x in points(all): no_flip(model, x)»", "`exists`"),
        ("forall x in points(all): «2 * norm_2(drift(attn_0, x))» <= 1", "arithmetic"),
        ("forall x in points(all): «abs(norm_2(drift(attn_0, x)))» <= 1", "`abs`"),
        (
            "forall x in points(all): norm_2(drift(attn_0, x)) <= «norm_2(drift(attn_1, x))»",
            "two norms",
        ),
        (
            "forall x in points(all): norm_2(«measured_drift(attn_0, x)») <= 1 and "
            "norm_2(drift(attn_0, x)) <= 1",
            "observed and admissible",
        ),
        (
            "forall x in «ball(all, 1)»: norm_2(measured_drift(attn_0, x)) <= 1",
            "observed at points",
        ),
        ("forall x in points(all): «not no_flip(model, x)»", "a negation"),
        (
            "forall x in points(all): «no_flip(model, x) or no_flip(head, x)»",
            "`or` joins claims",
        ),
        (
            "forall x in ball(all, 1): «span(drift(head, x)) < 1 and norm_2(drift(mlp_0, x)) <= 1»",
            "`and` joins claims",
        ),
        (
            "«(forall x in points(all): no_flip(model, x)) and "
            "(forall x in points(long): no_flip(model, x))»",
            "`and` joins claims",
        ),
        (
            "forall x in points(all): «no_flip(model, x) and norm_2(drift(attn_0, x)) <= 1»",
            "different backends",
        ),
        (
            "forall x in points(all): «forall y in points(all): "
            "no_flip(model, x) and no_flip(model, y)»",
            "a nested `forall`",
        ),
    ],
)
def test_deciding_sub_expression_is_named(marked: str, words: str) -> None:
    source, clause, found = compiled(marked.replace("«", "").replace("»", ""))
    assert clause is None
    (diagnostic,) = found
    assert diagnostic.code.id == "KC401"
    assert words in diagnostic.message
    assert diagnostic.span is not None
    text = source.text[diagnostic.span.start : diagnostic.span.end]
    assert text == marked[marked.index("«") + 1 : marked.index("»")]


@pytest.mark.parametrize("metric", ["mean(abs(log_ratio))", "p99(kl)", "reward_delta", "grad_bias"])
def test_chain_metric_gives_an_implied_clause(metric: str) -> None:
    _, clause, _ = compiled(f"{metric} <= 0.1", "    evidence: proof\n")
    assert clause is not None
    assert classify(clause).fragment is Fragment.IMPLIED


def test_other_statistics_cannot_be_proved() -> None:
    _, clause, found = compiled("p99(logit_l2) <= 0.1", "    evidence: proof-real\n")
    assert clause is None
    assert [d.code.id for d in found] == ["KC403"]
