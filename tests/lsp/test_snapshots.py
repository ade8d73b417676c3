"""Snapshots of a document: complete or not, large or small, with the files beside it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from lsprotocol import types as lsp
from lsprotocol.types import PositionEncodingKind as Encoding

from kcdsl.check import incremental
from kcdsl.check.compile import analyse
from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir.canonical import digest
from kcdsl.lsp.features.decorations import TYPES, encode, hints, lenses, tokens
from kcdsl.lsp.features.hover import hover
from kcdsl.lsp.features.knowledge import description_at, fields_at, values_at
from kcdsl.lsp.features.navigation import outline
from kcdsl.lsp.text import documents, reports
from kcdsl.lsp.text.cursor import repaired_yaml
from kcdsl.lsp.text.documents import Checker, Snapshot, document
from kcdsl.lsp.text.positions import NOWHERE
from kcdsl.lsp.text.reports import latest, verdicts
from kcdsl.route.router import route
from kcdsl.source.files import SIZE_LIMIT
from tests.support.editor import HEAD
from tests.support.snapshots import place, ranges, snapshot, span

TEXT = HEAD + (
    "clauses:\n"
    "  # one\n"
    "  # two\n"
    "  N-1: {require: p99(kl) <= 0.02 nats, slices: [long], level: L2}\n"
    "  N-2:\n"
    "    require: |\n"
    "      forall x in points(all):\n"
    "        norm_inf(drift(attn_0, x)) <= 0.05\n"
    "    evidence: proof\n"
    "    level: L2\n"
    "escalation: {L2: guard}\n"
)


# --- unfinished documents ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken",
    [
        TEXT.replace("p99(kl) <= 0.02 nats", '"p99('),
        TEXT.replace("slices: [long]", "slices: [lo"),
        TEXT.replace("    evidence: proof", "    evidence: 'proof"),
        TEXT.replace("    evidence: proof", "    evid"),
        TEXT.replace("escalation: {L2: guard}", "escalation: {L2: "),
        TEXT.replace("data: prompts.jsonl", "data: 'prompts"),
        TEXT + "  }\n",
        TEXT + "\t",
    ],
)
def test_repaired_document_keeps_positions(broken: str) -> None:
    found = repaired_yaml(SourceFile("c", broken))
    assert found is not None
    assert len(found.text) == len(broken)
    assert all(a in {b, " "} for a, b in zip(found.text, broken, strict=True))
    kept = sum(a == b for a, b in zip(found.text, broken, strict=True))
    assert kept > len(broken) * 0.6
    analysis = analyse(found, Sink())
    assert analysis.root is not None


def test_valid_yaml_needs_no_repair() -> None:
    known = snapshot(TEXT)
    assert known.settled == (known, NOWHERE)
    assert known.settled[1] is NOWHERE


def test_last_readable_version_is_used_if_repair_fails() -> None:
    checker = Checker()
    uri = "file:///nowhere/c.kc.yaml"
    checker.snapshot(document(uri, TEXT, 1), {})
    hopeless = "{[\n" * 8 + TEXT
    broken = checker.snapshot(document(uri, hopeless, 2), {})
    view, way = broken.settled
    assert view.source.text == TEXT
    assert way.offset(place(hopeless, "kl)")) == place(TEXT, "kl)")
    found = hover(view, place(TEXT, "kl)"))
    assert found is not None
    assert way.back.span(found.span) == span(hopeless, "kl")
    again = checker.snapshot(document(uri, hopeless + "x", 3), {})
    assert again.good is not None
    assert again.good.source.text == TEXT
    assert again.good.good is None


# --- large documents -----------------------------------------------------------------------------


def large() -> str:
    clauses = "".join(
        f"  N-{n}:\n    require: p99(kl) <= {n + 1}e-6  # é🜁\n    slices: [long]\n    level: L2\n"
        for n in range(60)
    )
    return f"{HEAD}clauses:\n{clauses}escalation: {{L2: guard}}\n"


def test_partial_analysis_of_a_large_document_gives_equal_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = large()
    whole = snapshot(text)
    at = place(text, "41e-6")
    expected_hover = hover(whole, at - 8)
    expected_tokens = tokens(whole)
    monkeypatch.setattr(documents, "LARGE", 100)
    part = snapshot(text).near(Span(at, at))
    assert not part.whole
    assert len(part.analysis.clauses) < 3
    assert {t for t in expected_tokens if t.span.touches(Span(at, at))} <= set(tokens(part))
    found = hover(part, at - 8)
    assert found is not None
    assert expected_hover is not None
    assert found.span == expected_hover.span
    # The route follows from the whole contract, so that a part does not state it.
    assert expected_hover.text.startswith(found.text)


def test_semantic_tokens_of_large_and_small_documents_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = large().replace("p99(kl) <= 7e-6", "forall x in points(long): span(drift(head, x)) <= 1")
    known = snapshot(text)
    expected = tokens(known)
    monkeypatch.setattr("kcdsl.lsp.features.decorations.LARGE", 100)
    monkeypatch.setattr(documents, "LARGE", 100)
    assert tokens(snapshot(text)) == expected
    assert len(expected) > 300


def test_semantic_tokens_are_ordered_without_overlap() -> None:
    found = tokens(snapshot(TEXT))
    for one, other in pairwise(found):
        assert one.span.end <= other.span.start
    assert {token.type for token in found} <= set(TYPES)
    data = encode(found, document("file:///c", TEXT).lines, Encoding.Utf16)
    assert len(data) == 5 * len(found)
    assert min(data) >= 0


def test_edit_of_a_clause_is_checked_incrementally(monkeypatch: pytest.MonkeyPatch) -> None:
    checker, text = Checker(), large()
    uri = "file:///nowhere/c.kc.yaml"
    checker.snapshot(document(uri, text, 1), {})
    lengths: list[int] = []
    real = analyse

    def counted(source: SourceFile, *rest: object) -> object:
        lengths.append(len(source.text.split()))
        return real(source, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(incremental, "analyse", counted)
    found = checker.snapshot(document(uri, text.replace("41e-6", "42e-5"), 2), {})
    assert len(lengths) == 1
    assert lengths[0] < len(text.split()) / 5
    assert found.source.text != text


# --- checking ------------------------------------------------------------------------------------


def test_each_version_is_checked_once() -> None:
    checker = Checker()
    first = checker.snapshot(document("file:///a.kc.yaml", TEXT, 1), {})
    assert checker.snapshot(document("file:///a.kc.yaml", TEXT, 1), {}) is first
    checker.forget("file:///a.kc.yaml")
    assert checker.snapshot(document("file:///a.kc.yaml", TEXT, 1), {}) is not first


def test_closed_files_are_cached_without_analysis() -> None:
    checker = Checker()
    first = checker.snapshot(document("file:///a.kc.yaml", TEXT), {})
    again = checker.snapshot(document("file:///a.kc.yaml", TEXT), {})
    assert again.findings is first.findings
    assert again.analysis.clauses == first.analysis.clauses
    assert "analysis" not in checker.snapshot(document("file:///a.kc.yaml", TEXT), {}).__dict__


def test_open_texts_replace_files(tmp_path: Path) -> None:
    library = "kcdsl: 1\nlibrary: fleet\nversion: 1\ndata: p.jsonl\nslices: {tail: {}}\n"
    text = HEAD + "imports:\n  - {file: fleet.kc.yaml, slices: [tail]}\nclauses:\n"
    text += "  N: {require: p99(kl) <= 1, slices: [tail], level: L2}\n"
    checker, path = Checker(), tmp_path / "fleet.kc.yaml"
    uri = (tmp_path / "c.kc.yaml").as_uri()

    def messages(texts: dict[Path, SourceFile]) -> list[str]:
        return [d.message for d in checker.snapshot(document(uri, text, 1), texts).findings]

    assert any("is not there" in message for message in messages({}))
    opened = messages({path: SourceFile(str(path), library)})
    assert not any("is not there" in message or "no slice" in message for message in opened)
    changed = messages({path: SourceFile(str(path), library.replace("tail", "end"))})
    assert any("has no slice `tail`" in message for message in changed)


def test_invalid_configuration_is_reported_in_the_document(tmp_path: Path) -> None:
    (tmp_path / "kcdsl.toml").write_text("metrics = 3\n")
    found = snapshot(TEXT, tmp_path).findings
    (told,) = [d for d in found if "kcdsl.toml:1" in d.message]
    assert told.span == Span(0, 0)


def test_failing_pass_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RecursionError("planted")

    monkeypatch.setattr(incremental.Incremental, "analyse", broken)
    (found,) = snapshot(TEXT).findings
    assert found.code.id == "KC999"
    assert "planted" in found.message
    assert snapshot(TEXT).analysis.root is None


def test_huge_document_is_refused_at_once() -> None:
    text = "#" * (SIZE_LIMIT + 1)
    (found,) = snapshot(text).findings
    assert found.code.id == "KC011"
    assert outline((known := snapshot(text)).analysis, ranges(known)) == []


# --- outline -------------------------------------------------------------------------------------


def test_outline_of_every_form_of_clauses() -> None:
    text = HEAD + (
        "clauses:\n"
        "  - {id: A, metric: p99_kl, threshold: 0.02, level: L2}\n"
        "  - B: {require: [rng_seed], level: L2}\n"
    )
    known = snapshot(text)
    clauses = next(s for s in outline(known.analysis, ranges(known)) if s.name == "clauses")
    assert clauses.children is not None
    assert [(c.name, c.kind, c.detail) for c in clauses.children] == [
        ("A", lsp.SymbolKind.Property, "p99_kl 0.02"),
        ("B", lsp.SymbolKind.Property, "has(trace, [rng_seed])"),
    ]
    for symbol in (clauses, *clauses.children):
        assert symbol.range.start <= symbol.selection_range.start
        assert symbol.selection_range.end <= symbol.range.end


def test_nested_symbols_lie_inside_their_parents() -> None:
    known = snapshot(TEXT)
    symbols = outline(known.analysis, ranges(known))
    assert any(symbol.children for symbol in symbols)
    for symbol in symbols:
        for child in symbol.children or ():
            assert symbol.range.start <= child.range.start
            assert child.range.end <= symbol.range.end


# --- hints and lenses ----------------------------------------------------------------------------


def shown_hints(known: Snapshot, within: Span) -> set[tuple[int, str]]:
    """Return the lines and the words of hints."""
    found = hints(known, within, ranges(known))
    return {(hint.position.line, str(hint.label)) for hint in found}


def commands(known: Snapshot) -> list[lsp.Command]:
    """Return the commands of the lenses."""
    return [x.command for x in lenses(known, ranges(known)) if x.command is not None]


def test_inlay_hints_show_defaults() -> None:
    known = snapshot(TEXT)
    found = shown_hints(known, Span(0, len(TEXT)))
    first = TEXT[: place(TEXT, "N-1")].count("\n")
    assert (first, ": nats over requests") in found
    assert (first, " → guard") in found
    assert not any(line == first and " on " in text for line, text in found)
    stated = snapshot(TEXT.replace("slices: [long], level: L2", "level: L2, then: log"))
    part = shown_hints(stated, span(stated.source.text, "N-1: {require: p99(kl) <= 1"[:5]))
    assert " on all" not in {text for _, text in part}
    whole = shown_hints(stated, Span(0, len(stated.source.text)))
    assert " on all" in {text for _, text in whole}


def test_error_elsewhere_keeps_the_hints_of_a_clause() -> None:
    text = HEAD + (
        "clauses:\n"
        "  A: {require: p99(kl) <= 1, level: L2}\n"
        "  B: {require: p99(klx) <= 1, level: L2}\n"
        '  C: {require: "exists x in points(all): span(drift(attn_0, x)) <= 1", level: L2}\n'
    )
    known = snapshot(text)
    found = shown_hints(known, Span(0, len(text)))
    line = text[: place(text, "A:")].count("\n")
    assert {(line, " → empirical"), (line, " → higher_precision"), (line + 2, " → nobody")} <= found
    assert (line + 1, " → empirical") not in found
    shown = hover(known, place(text, "C:"))
    assert shown is not None
    assert "decided by nobody, fragment outside" in shown.text


def test_contract_with_errors_has_no_code_lens() -> None:
    assert [(x.command, x.arguments[1:]) for x in commands(snapshot(TEXT)) if x.arguments] == [
        ("kcdsl.evaluate", ["N-1"]),
        ("kcdsl.verify", ["N-2"]),
    ]
    assert commands(snapshot(TEXT.replace("p99(kl)", "p99(klx)"))) == []


# --- reports -------------------------------------------------------------------------------------


def report(folder: Path, name: str, digest: str, clause: str, verdict: str, **row: object) -> None:
    (folder / "out").mkdir(exist_ok=True)
    content = {
        "schema": "kcdsl.report/3",
        "contract": {"name": "demo", "version": "1.0.0", "digest": f"sha256:{digest}"},
        "clauses": [{"clause": clause, "slice": "long", "verdict": verdict, **row}],
    }
    (folder / "out" / name).write_text(json.dumps(content))


def own_digest(known: Snapshot) -> str:
    assert known.analysis.program is not None
    return digest(known.analysis.program)


def test_verdicts_are_matched_by_digest(tmp_path: Path) -> None:
    known = snapshot(TEXT, tmp_path)
    report(
        tmp_path, "report.json", own_digest(known), "N-1", "violated", value=0.5, unit="nat", n=8
    )
    found = hover(known, place(TEXT, "N-1"))
    assert found is not None
    assert "✗ violated on `long` (0.5 nat, 8 samples), says report.json" in found.text
    assert "stale" not in found.text
    assert commands(known)[0].title == "✗ violated · evaluate this contract"
    edited = snapshot(TEXT.replace("0.02", "0.03"), tmp_path)
    later = hover(edited, place(TEXT, "N-1"))
    assert later is not None
    assert "stale: the contract has changed since" in later.text


def test_verdict_of_the_current_contract_precedes_newer_ones(tmp_path: Path) -> None:
    known = snapshot(TEXT, tmp_path)
    report(tmp_path, "a.json", own_digest(known), "N-1", "held")
    report(tmp_path, "b.json", "00", "N-1", "violated")
    (shown,) = latest(verdicts(tmp_path, "demo"), "N-1", own_digest(known))
    assert (shown.verdict, shown.file) == ("held", "a.json")
    assert verdicts(tmp_path, "another") == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "[]",
        "{}",
        "3",
        '{"schema": "kcdsl.report/3"}',
        '{"payload": "!"}',
        '{"schema": "kcdsl.report/3", "contract": {}, "clauses": [{}]}',
        "[" * 5000,
        '{"schema": "kcdsl.report/3", "contract": {"name": "demo", "digest": ""}, "clauses": '
        f'[{{"clause": "N", "slice": "all", "verdict": "held", "value": 1{"0" * 400}}}]}}',
    ],
)
def test_other_json_files_are_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.json").write_text(text)
    assert verdicts(tmp_path, "demo") == ()


def test_certificates_of_the_example_are_found(repository: Path, tmp_path: Path) -> None:
    vectors = sorted((repository / "certs" / "vectors").rglob("*.json"))
    assert vectors
    for number, file in enumerate(vectors[:40]):
        (tmp_path / f"{number}.json").write_bytes(file.read_bytes())
    names = {v.contract for v in _every(tmp_path)}
    assert names


def _every(folder: Path) -> list[reports.Verdict]:
    found: list[reports.Verdict] = []
    for file in folder.iterdir():
        about = file.stat()
        found += reports._read(file, about.st_mtime_ns, about.st_size)
    return found


# --- the schema ----------------------------------------------------------------------------------


def test_schema_lookup_by_path() -> None:
    assert "slices" in [f.name for f in fields_at(())]
    assert fields_at(())[0].required
    assert "library" in [f.name for f in fields_at((), library=True)]
    assert [f.name for f in fields_at(("kernels", "train", "numerics", "weights"))] == [
        "format",
        "scale",
        "rounding",
        "scale_format",
        "applied",
    ]
    assert values_at(("clauses", "N", "level")) == ["L1", "L2", "L3"]
    assert values_at(("clauses", 3, "level")) == ["L1", "L2", "L3"]
    assert fields_at(("nothing",)) == []
    assert description_at(("slices", "x", "where")).startswith("Predicate")


@pytest.mark.parametrize(
    "name", ["examples/tiny_lm/contract.yaml", "examples/minilm/contract.yaml"]
)
def test_routes_equal_those_of_the_whole_contract(repository: Path, name: str) -> None:
    path = repository / name
    known = Checker().snapshot(document(path.as_uri(), path.read_text(encoding="utf-8")), {})
    assert known.analysis.program is not None
    expected = route(known.analysis.program)
    assert [known.route(item.clause_id) for item in expected] == list(expected)
    assert known.route("nothing") is None
