"""Completions at every cursor position, in complete and in broken documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kcdsl.check.expressions.names import all_functions, find_function
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.lsp.features.completion import Item, complete, plain
from kcdsl.lsp.text.cursor import comment_before, locate
from kcdsl.lsp.text.lexemes import lexemes
from tests.support.editor import HEAD
from tests.support.snapshots import snapshot

CLAUSE = ("clauses", "N")
PLACES = {
    "N:\n    ¦\n": (CLAUSE, False, ""),
    "N:\n    require: p99(kl) <= 1\n    le¦\n": (CLAUSE, True, "le"),
    "N:\n    require: p99(kl) <= 1\n    ¦\n    level: L2\n": (CLAUSE, True, ""),
    "N: {require: p99(kl) <= 1, ¦}\n": (CLAUSE, True, ""),
    "N: {require: p99(kl) <= 1, le¦\n  M: {require: p99(kl) <= 1}\n": (CLAUSE, True, "le"),
    "N:\n    level: ¦\n  M: {require: p99(kl) <= 1}\n": ((*CLAUSE, "level"), False, ""),
    "N:\n    slices: [all, ¦]\n": ((*CLAUSE, "slices", 1), False, ""),
    "N:\n    slices: [all, ¦\n    level: L1\n": ((*CLAUSE, "slices", 1), False, ""),
    "N:\n    slices:\n      - ¦\n    level: L2\n": ((*CLAUSE, "slices", 0), False, ""),
    "- {id: A, metric: p9¦, level: L1}\n": (("clauses", 0, "metric"), False, "p9"),
    "- id: A\n    metr¦\n": (("clauses", 0), True, "metr"),
    "N: {require: p99(¦, level: L2}\n": ((*CLAUSE, "require"), False, "p99("),
    "N: {require: quantile(0.9, ¦, level: L2}\n": ((*CLAUSE, "require"), False, "quantile(0.9, "),
    'N:\n    require: "p99(¦\n    level: L2\n': ((*CLAUSE, "require"), False, "p99("),
    'N:\n    require: \'has(trace, ["a", ¦\n': ((*CLAUSE, "require"), False, 'has(trace, ["a", '),
    "N:\n    require: >-\n      p99(kl)\n      <= 0¦\n    level: L2\n": (
        (*CLAUSE, "require"),
        False,
        "p99(kl) <= 0",
    ),
    "N:\n    require: |\n      p99(kl)\n      <= ¦\n": (
        (*CLAUSE, "require"),
        False,
        "p99(kl)\n<= ",
    ),
    "N: {require: forall x in points(all): span(drift(¦, level: L2}\n": (
        (*CLAUSE, "require"),
        False,
        "forall x in points(all): span(drift(",
    ),
}


@pytest.mark.parametrize("tail", PLACES)
def test_cursor_context_is_found(tail: str) -> None:
    text = f"{HEAD}clauses:\n  {tail}"
    offset = text.index("¦")
    found = locate(SourceFile("c", text.replace("¦", "")), offset)
    assert found is not None
    assert (found.path, found.is_key, found.before) == PLACES[tail]


@pytest.mark.sample(1)
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_every_prefix_of_a_document_has_a_context(end: str) -> None:
    text = HEAD + 'clauses:\n  N: {require: "p99(kl) <= 0.02", level: L2}\n  M:\n    level: L1\n'
    text = text.replace("\n", end) if end else text
    for cut in range(0, len(text), 3):
        complete(snapshot(text[:cut]), cut)


def labels(tail: str, folder: Path | None = None, head: str = HEAD) -> list[str]:
    return [item.label for item in items(tail, folder, head)]


def items(tail: str, folder: Path | None = None, head: str = HEAD) -> list[Item]:
    text = head + tail
    offset = text.index("¦")
    found = complete(snapshot(text.replace("¦", ""), folder), offset)
    return sorted(found, key=lambda item: (item.order, item.label))


def required(text: str) -> str:
    return f"clauses:\n  N:\n    require: {text}\n    level: L2\n"


@pytest.mark.parametrize(
    ("text", "some", "none"),
    [
        ("p99(¦", {"kl", "latency", "abs"}, {"throughput", "refusal_flip", "k1", "all", "mean"}),
        ("rate(¦", {"refusal_flip"}, {"kl", "latency"}),
        ("mean(abs(¦", {"log_ratio", "kl"}, {"throughput"}),
        ("quantile(¦", set(), {"kl"}),
        ("quantile(0.9, ¦", {"kl"}, {"refusal_flip"}),
        ("throughput >= 4 ¦", {"tok/s"}, {"ms", "B", "nats"}),
        ("peak_memory <= 4 ¦", {"GiB", "MB"}, {"ms", "%"}),
        ("mean(tv) <= 4 ¦", {"%", "ratio", "and"}, {"ms", "<="}),
        ("p99(kl) ¦", {"<=", "+"}, {"and", "implies", "in"}),
        ("p99(kl) <= 1 ¦", {"and", "or", "implies"}, {"<=", "GiB"}),
        ("forall ¦", {"x"}, {"kl"}),
        ("forall x ¦", {"in"}, {"<="}),
        ("forall x in ¦", {"points", "ball", "hull", "rows"}, {"mean"}),
        ("forall x in rows(¦", {"all", "long"}, {"kl", "x"}),
        ("forall x in hull(¦", {"all", "long"}, {"kl", "x"}),
        ("forall x in hull(all, ¦", set(), {"all"}),
        ("forall x in points(all): ¦", {"norm_inf", "no_flip"}, {"points"}),
        ("forall x in points(all): norm_2(¦", {"drift", "measured_drift"}, {"kl"}),
        ("forall x in points(all): norm_2(drift(head, ¦", {"x"}, {"head"}),
        ("has(¦", {"trace"}, {"kl"}),
        ("has(trace, [rng_seed, ¦", {"replay_signature"}, {"rng_seed"}),
        ("p99(kl) <= 1 and mean(¦", {"tv"}, {"throughput"}),
        ("p99(kl) <= ) 1 and mean(¦", {"tv"}, set()),
        ("¦", {"forall", "p99", "has", "throughput"}, {"drift", "points", "norm_inf", "kl"}),
    ],
)
def test_completions_in_expressions(text: str, some: set[str], none: set[str]) -> None:
    found = set(labels(required(text)))
    assert some <= found
    assert not none & found


def test_recommended_comparison_comes_first() -> None:
    assert labels(required("p99(kl) ¦"))[0] == "<="
    assert labels(required("mean(top1_overlap) ¦"))[0] == ">="


def test_signed_metric_is_wrapped_in_abs() -> None:
    found = {item.label: item for item in items(required("mean(¦"))}
    assert found["log_ratio"].insert == "abs(log_ratio)"
    inside = {item.label: item for item in items(required("mean(abs(¦"))}
    assert inside["log_ratio"].insert == "log_ratio"


def test_completions_of_tables_and_their_columns() -> None:
    head = (
        HEAD + "tables: {tau: {unit: nats, rows: [{where: length > 1, value: 1}], otherwise: 2}}\n"
    )
    assert labels(required("p99(kl) <= table(¦"), head=head) == ["tau"]
    assert "table" in labels(required("p99(kl) <= ¦"), head=head)
    assert "table" not in labels(required("p99(kl) <= ¦"))
    assert "table(tau)" in labels(
        "clauses:\n  - {id: N, metric: p99_kl, threshold: ¦}\n", head=head
    )


def test_predicates_complete_fields_of_the_data(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "category": name, "n": 1} for name in ("safety", "chat", "safety")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = labels("x: 1\n", tmp_path, HEAD.replace('"length > 128"', '"¦"'))
    assert {"length", "prompt", "category", "n"} <= set(fields)
    assert not {"kl", "mean", "forall"} & set(fields)
    values = labels("x: 1\n", tmp_path, HEAD.replace('"length > 128"', "'category == ¦'"))
    assert '"safety"' in values
    assert '"chat"' in values


def test_completions_in_budgets() -> None:
    assert labels("clauses:\n  N: {budget: 1¦}\n")[0] == "%"
    assert labels("clauses:\n  N: {budget: 1% of ¦}\n") == ["requests", "windows"]
    assert labels("clauses:\n  N: {budget: ¦}\n") == ["1% of requests", "1% of windows"]


def test_keys_omit_present_and_conflicting_ones() -> None:
    found = labels("clauses:\n  N:\n    metric: p99_kl\n    then: log\n    ¦\n")
    assert found[:2] == ["threshold", "level"]
    assert not {"require", "metric", "then", "action", "remediation"} & set(found)
    assert {item.insert for item in items("¦") if item.label == "tables"} == {"tables:\n  "}
    assert "library" not in labels("¦")


def test_completions_of_values(tmp_path: Path) -> None:
    assert labels("clauses:\n  N: {family: ¦}\n")[0] == "numerical"
    assert labels("clauses:\n  N: {evidence: ¦}\n")[0] == "proof"
    assert labels("clauses:\n  N: {holdout: ¦}\n") == ["true", "false"]
    assert labels("clauses:\n  N: {slices: [¦]}\n") == ["all", "long"]
    assert labels("clauses:\n  N: {slices: [all, ¦]}\n") == ["long"]
    assert labels("clauses:\n  - {id: N, slices: [long, ¦]}\n") == ["all"]
    assert "rng_seed" not in labels("clauses:\n  N: {require: [rng_seed, ¦]}\n")
    assert labels("clauses:\n  N: {metric: ¦}\n")[:1] == ["p50_logit_l2"]
    assert {"min_margin", "p1_margin"} <= set(labels("clauses:\n  N: {metric: ¦}\n"))
    assert not {"max_margin", "p99_margin"} & set(labels("clauses:\n  N: {metric: ¦}\n"))
    ops = {i.label: i.insert for i in items("clauses:\n  N: {metric: p99_kl, op: ¦}\n")}
    assert ops["<="] == '"<="'
    units = {i.label: i.insert for i in items("tables:\n  t:\n    unit: ¦\n")}
    assert units["%"] == '"%"'
    (tmp_path / "fleet.kc.yaml").write_text("")
    (tmp_path / "notes.txt").write_text("")
    assert labels("imports:\n  - file: ¦\n", tmp_path) == ["fleet.kc.yaml"]


@pytest.mark.parametrize(
    ("section", "some"),
    [
        ("casts: ¦", {"nearest", "any", "toward_zero", "any_toward_zero", "any_direction"}),
        ("weights: {rounding: ¦}", {"nearest", "toward_zero"}),
        ("weights: {¦}", {"format", "scale", "rounding", "scale_format", "applied"}),
    ],
)
def test_completions_of_casts_and_weight_rounding(section: str, some: set[str]) -> None:
    head = "kcdsl: 1\ncontract: a\nversion: 1.0.0\n"
    kernel = f"kernels:\n  infer:\n    run: torch.eager\n    numerics:\n      {section}\n"
    assert set(labels(kernel, head=head)) == some


def test_completions_of_library_names(tmp_path: Path) -> None:
    library = "kcdsl: 1\nlibrary: fleet\nversion: 1\ndata: p.jsonl\nslices: {tail: {}, head: {}}\n"
    (tmp_path / "fleet.kc.yaml").write_text(library)
    assert labels("imports:\n  - {file: fleet.kc.yaml, slices: [¦]}\n", tmp_path) == [
        "head",
        "tail",
    ]


def test_completions_in_comments() -> None:
    assert "KC203" in labels("# kcdsl: ignore[¦\n")
    assert labels("# ¦\n") == ["kcdsl: ignore"]
    assert labels("# anything else ¦\n") == []
    assert comment_before('a: "#" # b', 8) == "#"
    assert comment_before('a: "#" ', 7) is None
    assert comment_before("a#b", 3) is None


def test_completions_of_new_clauses() -> None:
    assert labels("clauses:\n  ¦\n  N: {require: p99(kl) <= 1, level: L2}\n")[0].startswith(
        "clause:"
    )


def test_plain_text_completions_have_no_snippet_marks() -> None:
    assert plain("forall ${1:x} in ${2:points(all)}: $0") == "forall x in points(all): "
    assert plain("kernels: {$1}") == "kernels: {}"


# --- functions -----------------------------------------------------------------------------------


def test_every_function_has_a_meaning_and_a_snippet() -> None:
    for function in (*all_functions(), find_function("p75")):
        assert function is not None
        assert function.meaning
        assert lexemes(plain(function.snippet))[0].text == function.name
