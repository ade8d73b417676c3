"""An incremental check after an edit finds what a full check finds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kcdsl.check.compile import analyse
from kcdsl.check.incremental import Incremental
from kcdsl.check.layout import layout
from kcdsl.diagnostics.model import Diagnostic, Sink
from kcdsl.diagnostics.spans import SourceFile

NASTY = (
    '"', "'", "{", "}", "[", "]", ":", ": ", "\n", "\n  ", "\n  X: ", "#", " # ", "|", "- ", "&a ",
    "*a", "!t ", "\t", "\r", "---\n", "é", "\N{GRINNING FACE}", "  N-KL:\n", "kl", "all", "0", "%",
    "x", " ", "", "<<: ", "clauses:\n", "\nclauses:\n", "slices:\n", "ms", "forall ",
)  # fmt: skip
CLAUSES = """\
  N-KL:
    require: p99(kl) <= 0.02
    # about the level
    level: L2
  N-TEXT:   # a comment
    require: >-
      mean(tv)
      <= 5%
    level: L1
  N-LITERAL:
    require: |
      forall x in ball(long, 1e-3):
        norm_inf(drift(attn_0, x)) <= 0.05
    level: L2

  S-TOP: {require: mean(top1_overlap) >= 99.5%, slices: [long], level: L3, then: rollback}
  N-QUOTED: {require: "forall x in points(all): no_flip(model, x)", level: L3}
  N-BARE: {require: quantile(0.999, kl) <= 0.1 nats, level: L2}
  R-LAT: {require: p95(latency) <= 250 ms, budget: 5% of windows, level: L1}
  N-WRONG: {require: p99(klx) <= 0.02, level: L2}
  N-LEVEL: {require: p99(kl) <= 0.03, level: L9}
  # between
  O-TRACE:
    require: [rng_seed, build_fingerprint]
    level: L3
"""


@pytest.fixture
def base(repository: Path) -> str:
    text = (repository / "examples" / "tiny_lm" / "contract.yaml").read_text(encoding="utf-8")
    head, rest = text.split("clauses:\n", 1)
    tail = rest[rest.index("escalation:") :]
    return f"{head}clauses:\n{CLAUSES}\n{tail}"


def fresh(source: SourceFile) -> list[Diagnostic]:
    sink = Sink()
    analyse(source, sink)
    return sink.found


def test_layout_finds_every_clause(base: str) -> None:
    found = layout(base)
    assert found is not None
    assert found.names == (
        "N-KL", "N-TEXT", "N-LITERAL", "S-TOP", "N-QUOTED", "N-BARE", "R-LAT", "N-WRONG", "N-LEVEL",
        "O-TRACE",
    )  # fmt: skip
    assert "".join(base[s.start : s.end] for s in found.clauses) in base
    assert "escalation:" in found.context


def edited(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text))
    match rng.randrange(4):
        case 0:
            return text[:at] + rng.choice(NASTY) + text[at:]
        case 1:
            return text[:at] + text[at + rng.randint(1, 12) :]
        case 2:
            return text[:at] + rng.choice(NASTY) + text[at + rng.randint(1, 6) :]
        case _:
            lines = text.splitlines(keepends=True)
            i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[i], lines[j] = lines[j], lines[i]
            return "".join(lines)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
def test_random_edits_equal_a_full_check(base: str, seed: int) -> None:
    rng = random.Random(seed)
    incremental = Incremental()
    text, reduced = base, 0
    for _ in range(120):
        source = SourceFile("contract.yaml", text)
        analysis, sink = incremental.analyse(source)
        assert sink.found == fresh(source), text
        assert analysis().source == source
        # Most edits start from the valid document, as undone typing does.
        text = edited(base if rng.random() < 0.7 else text, rng)
        reduced += layout(text) is not None
    assert reduced > 20


HEAD = """\
kcdsl: 1
contract: c
version: 1
model: {checkpoint: m, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
slices: {all: {}}
tables:
  kl: {unit: nats, rows: [{where: length > 9, value: 0.01}], otherwise: 0.05}
clauses:
  FIRST: {require: mean(js) <= 0.3, level: L2}
"""
DOUBTED = "  N-TV: {require: p99(tv) <= 2%, level: L2, budget: 1% of requests}\n"
"""A clause with a warning (KC501)."""
IGNORED = "  # kcdsl: ignore[KC501] it is meant so\n"
LAST = "  N-JS: {require: p99(js) <= 0.02, level: L2}\n"


TABLES = """\
  A: {require: mean(kl) <= 0.02, level: L2}
  B: {require: p99(kl) <= table(kl), level: L2}
"""
"""Of which the first names a metric that is called like the table."""


@pytest.mark.parametrize(
    ("clauses", "old", "new"),
    [
        (TABLES + LAST, LAST, LAST.replace("0.02", "0.03")),
        (TABLES + LAST, TABLES, TABLES.replace("table(kl)", "0.05")),
        (IGNORED + DOUBTED + LAST, LAST, LAST.replace("0.02", "0.03")),
        (IGNORED + DOUBTED + LAST, IGNORED, ""),
        (LAST + DOUBTED, LAST, IGNORED + LAST),
    ],
)
def test_findings_that_need_several_clauses_equal_a_full_check(
    clauses: str, old: str, new: str
) -> None:
    incremental, text = Incremental(), HEAD + clauses
    for version in (text, text.replace(old, new), text):
        source = SourceFile("c", version)
        assert incremental.analyse(source)[1].found == fresh(source), version


def test_only_the_edited_clause_is_checked_again(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kcdsl.check import compile as compiler
    from kcdsl.check.sections import clauses

    checked: list[str] = []
    plain = clauses.check_clause

    def counting(raw, *rest):  # type: ignore[no-untyped-def]
        checked.append(raw.id.text)
        return plain(raw, *rest)

    monkeypatch.setattr(compiler, "check_clause", counting)
    incremental = Incremental()
    copies = "".join(
        f"  COPY-{i}: {{require: p99(kl) <= 0.0{i}, level: L2}}\n" for i in range(1, 9)
    )
    base = base.replace("  O-TRACE:\n", f"{copies}  O-TRACE:\n")
    base = base.replace("[rng_seed, ", "[request_shape, replay_signature, ")  # all that is needed
    incremental.analyse(SourceFile("c", base))
    checked.clear()
    _, sink = incremental.analyse(SourceFile("c", base.replace("250 ms", "250 msx")))
    assert "R-LAT" in checked
    assert {"N-WRONG", "N-LEVEL"} <= set(checked)
    assert sum(name.startswith("COPY-") for name in checked) <= 1
    assert "KC302" in {str(d.code) for d in sink}
