"""The type of every part of an expression."""

from __future__ import annotations

import pytest

from kcdsl.check.expressions.names import FUNCTIONS, Scope
from kcdsl.check.expressions.sorts import NAMES, UNKNOWN, described, sort_at, sort_of, sorts
from kcdsl.diagnostics import Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.metrics import METRICS
from kcdsl.source.yaml_nodes import Mapping, Scalar, parse_yaml
from kcdsl.syntax import ast
from kcdsl.syntax.parser import parse_expression

SCOPE = Scope({"all": Span(0, 0), "long": Span(0, 0)}, {})


def parsed(text: str) -> tuple[ast.Expression, int]:
    """Return an expression and its offset in the file."""
    source, sink = SourceFile("x", f"a: >-\n  {text}\n"), Sink()
    root = parse_yaml(source, sink)
    assert isinstance(root, Mapping)
    node = root.entries[0].value
    assert isinstance(node, Scalar)
    found = parse_expression(source, node, sink)
    assert found is not None, [d.message for d in sink]
    return found, source.text.index(text)


def shown(text: str, scope: Scope = SCOPE) -> str:
    return str(sort_of(parsed(text)[0], scope))


@pytest.mark.parametrize(
    ("text", "sort"),
    [
        ("1e-3", "Real"),
        ("250 ms", "Real[ms]"),
        ("5%", "Real[%]"),
        ("80 GiB", "Real[GiB]"),
        ("4000 tok/s", "Real[tok/s]"),
        ('"safety"', "Text"),
        ("true", "Bool"),
        ("[1, 2]", "List[Real]"),
        ("all", "Slice"),
        ("attn_0", "Block"),
        ("trace", "Trace"),
        ("points(all)", "Region"),
        ("ball(all, 1e-3)", "Region"),
        ("hull(all)", "Region"),
        ("rows(all, 64)", "Region"),
        ("kl", "Real[nats] per token"),
        ("abs(log_ratio)", "Real[nats] per token"),
        ("latency", "Real[s] per request"),
        ("latency * 2", "Real[s] per request"),
        ("throughput", "Real[tok/s] per window"),
        ("mean(kl)", "Real[nats] over tokens"),
        ("max(kl)", "Real[nats] over tokens"),
        ("p99(kl)", "Real[nats] over requests"),
        ("quantile(0.5, kl)", "Real[nats] over requests"),
        ("mean(latency)", "Real[s] over requests"),
        ("rate(refusal_flip)", "Real[ratio] over requests"),
        ("max(peak_memory)", "Real[B] over windows"),
        ("mean(kl) / mean(jeffreys)", "Real[ratio] over tokens"),
        ("p99(kl) / mean(kl)", "Real[ratio]"),
        ("mean(kl) + 1", "Real[nats] over tokens"),
        ("1 - mean(tv)", "Real[ratio] over tokens"),
        ("-mean(kl)", "Real[nats] over tokens"),
        ("throughput * 3 s", "Real[tok] per window"),
        ("3 ms * 2 ms", "Real[s^2]"),
        ("drift(attn_0, x)", "Matrix[tokens, width]"),
        ("drift(head, x)", "Matrix[tokens, vocabulary]"),
        ("drift(model, x)", "Matrix[tokens, outputs]"),
        ("measured_drift(mlp_0, x)", "Matrix[tokens, width]"),
        ("norm_inf(drift(attn_0, x))", "Real"),
        ("span(drift(attn_0, x))", "Real"),
        ("no_flip(model, x)", "Bool"),
        ("has(trace, [rng_seed])", "Bool"),
        ("p99(kl) <= 0.02", "Bool"),
        ("not p99(kl) <= 0.02", "Bool"),
        ("p99(kl) <= 1 and p99(kl) <= 2 implies mean(kl) <= 1", "Bool"),
        ("forall x in points(all): no_flip(model, x)", "Bool"),
        ("nothing", "unknown"),
        ("mean(3)", "unknown"),
        ("mean(mean(kl))", "unknown"),
        ("mean(kl * latency)", "unknown"),
        ("kl + mean(kl)", "unknown"),
        ("3 ms + 1", "unknown"),
        ("3 furlong", "unknown"),
        ("abs(all)", "unknown"),
        ("drift(none_0, x)", "unknown"),
    ],
)
def test_types_of_expression_parts(text: str, sort: str) -> None:
    assert shown(text) == sort


@pytest.mark.parametrize(
    ("text", "at", "sort"),
    [
        ("forall x in points(all): norm_inf(drift(attn_0, «x»)) <= 1", "x", "Sequence[Token]"),
        ("forall «x» in points(all): norm_inf(drift(attn_0, x)) <= 1", "x", "Sequence[Token]"),
        ("forall «x» in ball(all, 1): no_flip(head, x)", "x", "Matrix[tokens, width]"),
        ("forall x in hull(all): no_flip(head, «x»)", "x", "Matrix[tokens, width]"),
        ("forall x in hull(all): no_flip(head, x, «5»)", "5", "Int"),
        ("forall x in hull(all): no_flip(«head», x)", "head", "Block"),
        ("forall x in «hu»ll(all): no_flip(head, x)", "hull(all)", "Region"),
        ("forall x in hull(«all»): no_flip(head, x)", "all", "Slice"),
        ("forall x in ball(all, «1e-3»): no_flip(head, x)", "1e-3", "Real"),
        ("has(«trace», [rng_seed])", "trace", "Trace"),
        ("has(trace, [«rng_seed»])", "rng_seed", "Field"),
        ("has(trace, «[»rng_seed])", "[rng_seed]", "List[Field]"),
        ("«p99»(kl) <= 0.02", "p99(kl)", "Real[nats] over requests"),
        ("p99(«kl») <= 0.02", "kl", "Real[nats] per token"),
        ("p99(kl) <= «0.02»", "0.02", "Real"),
        ("p99(kl) «<=» 0.02", "p99(kl) <= 0.02", "Bool"),
        ("mean(kl) <= 2 «*» 3", "2 * 3", "Real"),
    ],
)
def test_smallest_part_at_an_offset(text: str, at: str, sort: str) -> None:
    plain = text.replace("«", "").replace("»", "")
    expression, begin = parsed(plain)
    offset = begin + text.index("«")
    found = sort_at(expression, SCOPE, offset)
    assert found is not None
    span, what = found
    assert plain[span.start - begin : span.end - begin] == at
    assert str(what) == sort
    assert sort_at(expression, SCOPE, begin - 1) is None


def test_every_part_has_a_type_and_outer_parts_come_first() -> None:
    expression, begin = parsed("p99(kl) <= 2 * mean(kl) and has(trace, [a])")
    found = [(span.start - begin, span.end - begin, str(sort)) for span, sort in
             sorts(expression, SCOPE)]  # fmt: skip
    assert found[0] == (0, 43, "Bool")
    assert [sort for _, _, sort in found] == [
        "Bool", "Bool", "Real[nats] over requests", "Real[nats] per token",
        "Real[nats] over tokens", "Real", "Real[nats] over tokens", "Real[nats] per token",
        "Bool", "Trace", "List[Field]", "Field",
    ]  # fmt: skip


def test_types_of_predicate_fields() -> None:
    expression, begin = parsed('length > 5 and category == "x" and unheard in [true]')
    fields = {"length": "Int", "category": "Text"}
    found = {
        str(sort)
        for span, sort in sorts(expression, SCOPE, fields)
        if span.end - span.start in (6, 8)
    }
    assert found == {"Int", "Text", "List[Bool]"}
    assert dict(sorts(expression, SCOPE, fields))[Span(begin + 35, begin + 42)] == UNKNOWN


def test_names_of_types_in_messages() -> None:
    assert described(parsed("250 ms")[0], SCOPE) == "Real[ms]"
    assert described(parsed("nothing")[0], SCOPE) == "the name `nothing`"
    assert described(parsed("nothing(1)")[0], SCOPE) == "`nothing(...)`"
    assert described(parsed("1 ms + 2 B")[0], SCOPE) == "an expression without a sort"


def test_every_metric_and_function_has_a_type() -> None:
    for name, metric in METRICS.items():
        assert shown(name).endswith(f"per {metric.counted}")
    calls = {
        "quantile": "quantile(0.5, kl)", "rate": "rate(refusal_flip)", "table": None,
        "abs": "abs(kl)", "norm_inf": "norm_inf(drift(head, x))",
        "norm_2": "norm_2(drift(head, x))", "span": "span(drift(head, x))",
        "drift": "drift(head, x)", "measured_drift": "measured_drift(head, x)",
        "points": "points(all)", "ball": "ball(all, 1)", "hull": "hull(all, 1)",
        "rows": "rows(all, 9)",
        "no_flip": "no_flip(head, x)", "has": "has(trace, [a])",
    }  # fmt: skip
    heads = set()
    for function in FUNCTIONS:
        text = calls.get(function, f"{function}(kl)")
        if text is not None:
            heads.add(shown(text).split("[")[0].split(" ")[0])
    assert heads == {"Real", "Matrix", "Region", "Bool"}
    assert heads <= set(NAMES)
