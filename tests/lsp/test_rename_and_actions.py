"""Edits offered by the server keep the meaning of a contract unless they say otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcdsl.check.fixes import edited
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.lsp.features.actions import FIX_ALL, QUICK_FIX, Action, actions, formatting
from kcdsl.lsp.features.navigation import definition, references
from kcdsl.lsp.features.rename import CannotRename, prepare, rename
from tests.support.editor import HEAD
from tests.support.snapshots import place, snapshot, span

TEXT = HEAD.replace("long:", "'long':") + (
    "tables:\n"
    "  tau: {unit: nats, rows: [{where: length <= 128, value: 0.01}], otherwise: 0.05}\n"
    "clauses:\n"
    "  N-1:\n"
    '    slices: ["long", all]\n'
    "    require: >-\n"
    "      p99(kl)\n"
    "      <= table(tau)\n"
    "    level: L2\n"
    "  N-2: {require: 'forall x in ball(long, 1e-3): span(drift(head, x)) <= 9', level: L2}\n"
    "  N-3: {require: p99(tv) <= 1%, level: L1}\n"
)


@pytest.mark.parametrize(
    ("piece", "name", "expected"),
    [
        ("long'", "tail", TEXT.replace("long", "tail")),
        ("long, 1e-3", "tail", TEXT.replace("long", "tail")),
        ("tau)", "limit", TEXT.replace("tau", "limit")),
        ("N-2", "N.2-b", TEXT.replace("N-2", "N.2-b")),
        ("x in", "input", TEXT.replace("forall x", "forall input").replace(", x)", ", input)")),
        ("x)) <=", "y", TEXT.replace("forall x", "forall y").replace(", x)", ", y)")),
    ],
)
def test_rename(piece: str, name: str, expected: str) -> None:
    found = rename(snapshot(TEXT), place(TEXT, piece), name)
    assert edited(TEXT, list(found)) == expected


@pytest.mark.parametrize(
    ("piece", "name", "reason"),
    [
        ("long, 1e-3", "all", "there is a slice `all` already"),
        ("long, 1e-3", "9", "cannot name a slice"),
        ("long, 1e-3", "not", "cannot name a slice"),
        ("x in", "kl", "already has a meaning"),
        ("x in", "attn_0", "already has a meaning"),
        ("x in", "drift", "already has a meaning"),
        ("N-2", "N-1", "there is a clause `N-1` already"),
        # N-3 lists no slice and so is on the one that is called `all`.
        ("all: {}", "every", "would not compile"),
        ("kl)", "tv", "keeps its name"),
        ("train", "infer", "keeps its name"),
        ("level: L1", "x", "no name here"),
    ],
)
def test_invalid_renames_are_refused(piece: str, name: str, reason: str) -> None:
    with pytest.raises(CannotRename, match=reason):
        rename(snapshot(TEXT), place(TEXT, piece), name)


def test_rename_never_captures_another_name() -> None:
    text = HEAD + (
        "clauses:\n  N: {level: L2, require: 'forall x in points(all): "
        "(forall y in points(all): no_flip(model, x) and no_flip(head, y))'}\n"
    )
    with pytest.raises(CannotRename):
        rename(snapshot(text), place(text, "y in"), "x")
    with pytest.raises(CannotRename):
        rename(snapshot(text), place(text, "x in"), "y")


def test_rename_works_in_a_contract_with_errors() -> None:
    text = TEXT.replace("p99(tv) <= 1%", "p99(tvx) <= 1%")
    found = rename(snapshot(text), place(text, "long, 1e-3"), "tail")
    assert edited(text, list(found)) == text.replace("long", "tail")


def test_names_of_libraries_cannot_be_renamed(tmp_path: Path) -> None:
    library = "kcdsl: 1\nlibrary: fleet\nversion: 1\ndata: p.jsonl\nslices: {tail: {}, head: {}}\n"
    (tmp_path / "fleet.kc.yaml").write_text(library)
    text = HEAD + "imports:\n  - {file: fleet.kc.yaml, slices: [tail]}\n"
    text += "clauses:\n  N: {require: p99(kl) <= 1, slices: [tail], level: L2}\n"
    with pytest.raises(CannotRename, match="imported under its own name"):
        prepare(snapshot(text, tmp_path), place(text, "tail], level"))
    mapped = text.replace("slices: [tail]}", "slices: {end: tail}}").replace("[tail]", "[end]")
    found = rename(snapshot(mapped, tmp_path), place(mapped, "end], level"), "tip")
    assert edited(mapped, list(found)) == mapped.replace("end:", "tip:").replace("[end]", "[tip]")
    with pytest.raises(CannotRename, match=r"declared|library"):
        prepare(snapshot(mapped, tmp_path), place(mapped, "tail}"))
    (target,) = definition(snapshot(mapped, tmp_path), place(mapped, "tail}"))
    assert target.path == tmp_path / "fleet.kc.yaml"
    assert target.source is not None
    assert target.source.text[target.span.start : target.span.end] == "tail"


def test_references_of_a_metric_cover_all_clauses() -> None:
    text = HEAD + (
        "clauses:\n  A: {require: mean(top1_overlap) >= 1%, level: L2}\n"
        "  B: {require: mean(top1_overlap) >= 2%, level: L2}\n"
    )
    found = references(snapshot(text), place(text, "top1_overlap"))
    assert [text[s.start : s.end] for s in found] == ["top1_overlap"] * 2
    assert found[0] == span(text, "top1_overlap")
    assert found[0].end < found[1].start
    slices = references(snapshot(TEXT), place(TEXT, "long, 1e-3"))
    assert [TEXT[s.start : s.end] for s in slices] == ["long"] * 3


def test_definition_of_a_user_metric(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from kcdsl import metric\n\n\n"
        '@metric(family="numerical", unit="nats", better="lower", counted="token", '
        'needs=["logits"])\n'
        "def my_drift(train_logits, infer_logits):\n"
        '    """How far."""\n'
        "    raise RuntimeError\n"
    )
    (tmp_path / "kcdsl.toml").write_text('metrics = ["mine.py"]\n')
    text = HEAD + "clauses:\n  A: {require: mean(my_drift) <= 1, level: L2}\n"
    known = snapshot(text, tmp_path)
    assert known.analysis.scope.metrics.find("my_drift") is not None, known.findings
    (target,) = definition(known, place(text, "my_drift"))
    assert target.path == tmp_path / "mine.py"
    assert target.source is not None
    assert target.source.text[target.span.start : target.span.end] == "my_drift"


# --- actions -------------------------------------------------------------------------------------


def offered(text: str, piece: str, only: tuple[str, ...] | None = None) -> dict[str, Action]:
    return {a.title: a for a in actions(snapshot(text), span(text, piece), only)}


def test_action_kinds_are_filtered_by_prefix() -> None:
    text = (
        HEAD + "clauses:\n  A: {require: forall x in points(all): no_flip(model, x), level: L2}\n"
    )
    assert {a.kind for a in offered(text, "forall").values()} == {QUICK_FIX, FIX_ALL}
    assert {a.kind for a in offered(text, "forall", ("source",)).values()} == {FIX_ALL}
    assert offered(text, "forall", ("refactor",)) == {}
    assert offered(text, "forall", ("source.organizeImports",)) == {}


SUSPECT = 'has(trace, ["rng_sead"])'


def test_suppression_comments_are_accepted_by_the_checker() -> None:
    text = f"{HEAD}clauses:\n  A:\n    level: L2\n    require: '{SUSPECT}'\n"
    action = offered(text, "rng_sead")["suppress KC208 with a reason"]
    accepted = edited(text, list(action.edits)).replace("] \n", "] it is ours\n")
    assert "    # kcdsl: ignore[KC208] it is ours\n    require" in accepted
    assert "KC208" not in {d.code.id for d in snapshot(accepted).findings}
    assert {"KC930", "KC931"} & {d.code.id for d in snapshot(accepted).findings} == set()


def test_second_suppressed_code_joins_the_first_comment() -> None:
    text = HEAD + "clauses:\n  A:\n    level: L2\n    # kcdsl: ignore[KC015] so\n"
    text += f"    require: '{SUSPECT}'\n"
    (action,) = (a for t, a in offered(text, "rng_sead").items() if t.startswith("suppress KC208"))
    assert "# kcdsl: ignore[KC015, KC208] so\n" in edited(text, list(action.edits))


def test_errors_and_block_scalars_have_no_suppression() -> None:
    text = f"{HEAD}clauses:\n  A:\n    level: L2\n    require: |\n      {SUSPECT}\n"
    assert not any(title.startswith("suppress") for title in offered(text, "rng_sead"))
    error = HEAD + "clauses:\n  A: {require: p99(klx) <= 1, level: L2}\n"
    assert not any(title.startswith("suppress") for title in offered(error, "klx"))


def test_unreadable_document_is_not_formatted() -> None:
    assert formatting(SourceFile("c", "a: [")) == ()
    text = HEAD + "clauses:\n  A:  {require:   p99(kl)<=1,  level: L2}   # why\n"
    result = edited(text, list(formatting(SourceFile("c", text))))
    assert "A: {require: p99(kl) <= 1, level: L2}" in result
    assert formatting(SourceFile("c", result)) == ()


def test_broken_document_has_no_edits() -> None:
    broken = TEXT + "  X: {require: 'a\n"
    assert all(a.kind == QUICK_FIX for a in actions(snapshot(broken), Span(0, len(broken))))
