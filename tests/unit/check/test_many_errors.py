"""A document with five errors reports each of them once and at its position.

Each wrong line of the documents ends with a comment that lists the expected codes and marked text.
"""

from __future__ import annotations

import re

import pytest

from kcdsl.check.compile import analyse
from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile

HEAD = """\
kcdsl: 1
contract: c
version: 1.0.0
model: {checkpoint: m.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: d.jsonl
slices: {all: {}}
"""
DOCUMENTS = {
    "the head": """\
kcdsl: 2  # KC105 2
contract: two names  # KC107 two names
version: 1.0.0
model: {checkpoint: m.safetensors, architecture: lama}  # KC456 lama
kernels:
  train: {run: torch.eagr}  # KC210 torch.eagr
  infer: {run: torch.sdpa, numerics: {compute: flot32}}  # KC463 flot32
data: [d.jsonl]  # KC103 [d.jsonl]
slices: {all: {}}
clauses:
  A: {require: p99(kl) <= 1, level: L1}
""",
    "the kernels": """\
kcdsl: 1
contract: c
version: 1.0.0
model: {chekpoint: m.safetensors, architecture: llama}  # KC101 chekpoint
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eagr}}  # KC463 torch-eagr
  infer:
    run: torch.sdpa
    numerics:
      casts: sometimes  # KC463 sometimes
      weights: {format: fp9, scale: per_tenser}  # KC463 fp9, KC463 per_tenser
      attention: {style: fused, tile: many}  # KC103 many
slices: {all: {}}
clauses:
  A: {require: p99(kl) <= 1, level: L1}
""",
    "slices and tables": """\
kcdsl: 1
contract: c
version: 1.0.0
model: {checkpoint: m.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
slices:
  all: {}
  long: {wher: length > 128}  # KC101 wher
  code: {where: length >}  # KC010
tables:
  limits:
    unit: nts  # KC302 nts
    rows:
      - {where: length > 10, value: much}  # KC010 much
    otherwise: 0.01
clauses:
  A: {require: p99(kl) <= table(limts), slices: [all], level: L1}  # KC231 limts
  B: {require: p99(kl) <= 1, slices: [al], level: L1}  # KC202 al
""",
    "escalation and constants": HEAD
    + """\
escalation:
  L1: lgo  # KC209 lgo
  L4: guard  # KC101 L4
  numericl: {L1: log}  # KC101 numericl
constants:
  temperatur: 1  # KC101 temperatur
  reward_range: -2  # KC303 -2
  advantage_max: [1]  # KC103 [1]
clauses:
  A: {require: p99(kl) <= 1, level: L1}
""",
    "requirements": HEAD
    + """\
clauses:
  A: {require: p99(klx) <= 1, level: L1}  # KC203 klx
  B: {require: max(tv) <= 5 sek, level: L1}  # KC302 sek
  C: {require: p95(latency) <= 2 GiB, level: L1}  # KC301 p95(latency) <= 2 GiB
  D: {require: men(kl) <= 1, level: L1}  # KC205 men
  E: {require: "forall x in points(all): norm_2(drift(atn_0, x)) <= 1", level: L1}  # KC204 atn_0
  F: {require: "forall x in points(non): norm_inf(drift(attn_0, x)) <= 0.1", level: L1}  # KC202 non
  G: {require: mean(kl) <= 1 adn max(tv) <= 5%, level: L1}  # KC010 max
""",
    "fields of clauses": HEAD
    + """\
clauses:
  A: {require: p95(latency) <= 2 s, level: L7}  # KC104 L7
  B: {require: mean(kl) <= 1, levl: L1}  # KC101 levl
  C: {require: mean(kl) <= 1, level: L1, evidence: prof}  # KC104 prof
  D: {require: mean(kl) <= 1, level: L1, then: gard}  # KC209 gard
  E: {require: mean(kl) <= 1, level: L1, family: numeric}  # KC104 numeric
  F: {require: mean(kl) <= 1, level: L1, holdout: perhaps}  # KC103 perhaps
  2G: {require: mean(kl) <= 1, level: L1}  # KC107 2G
""",
    "records and budgets": HEAD
    + """\
clauses:
  A: {metric: p99_klx, threshold: 1, level: L1}  # KC203 p99_klx
  B: {metric: mean_kl, threshold: 1, op: =<, level: L1}  # KC104 =<
  C: {require: max(kl) <= 1, budget: 2, level: L1}  # KC010
  D: {require: max(kl) <= 1, budget: 1% of reqests, level: L1}  # KC502 reqests
  E: {metric: mean_kl, threshold: high, level: L1}  # KC010 high
""",
    "keys, anchors and tags": """\
kcdsl: 1
contract: c
version: 1.0.0
model: &m {checkpoint: m.safetensors, architecture: llama}  # KC003 &m
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: d.jsonl
data: e.jsonl  # KC002 data
slices: {all: {}}
clauses:
  A: {require: !!str p99(kl) <= 1, level: L1}  # KC005 !!str
  A: {require: p99(kl) <= 1, level: L1}  # KC002 A
  B: {require: p99(kl) <= 1 and, level: L1}  # KC010
""",
    "one expression": HEAD
    + """\
clauses:
  A:
    require: |
      p99(klx) <= 1  # KC203 klx
      and men(tv) <= 5 %  # KC205 men
      and max(tv) <= 3 s  # KC301 max(tv) <= 3 s
      and mean(kl) <= table(none)  # KC231 none
      and p95(latency) <= 2 sek  # KC302 sek
    level: L2
""",
}


def expected(text: str) -> tuple[str, list[tuple[str, int, str]]]:
    """Return a document without its expectations, and these: code, line, text."""
    lines, wanted = [], []
    for number, line in enumerate(text.splitlines(), 1):
        bare, _, said = line.partition("  # KC")
        lines.append(bare)
        for part in f"KC{said}".split(", KC") if said else ():
            code, _, place = part.removeprefix("KC").partition(" ")
            wanted.append((f"KC{code}", number, place))
    return "\n".join(lines) + "\n", wanted


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_error_is_reported_once(name: str) -> None:
    text, wanted = expected(DOCUMENTS[name])
    source, sink = SourceFile("contract.yaml", text), Sink()
    assert analyse(source, sink).program is None
    found = []
    for diagnostic in sink:
        assert diagnostic.span is not None
        start, end = diagnostic.span.start, diagnostic.span.end
        found.append((str(diagnostic.code), source.position(start).line, source.text[start:end]))
    assert len(wanted) >= 5
    assert sorted(found) == sorted(wanted)


def test_findings_of_combined_errors_equal_those_of_single_errors() -> None:
    """No finding depends on the combination of two errors."""
    text, _ = expected(DOCUMENTS["fields of clauses"])
    clauses = re.findall(r"^  \w+: \{.*\n", text, re.MULTILINE)
    assert len(clauses) == 7
    alone = []
    for clause in clauses:
        sink = Sink()
        analyse(SourceFile("contract.yaml", f"{HEAD}clauses:\n{clause}"), sink)
        alone += [(d.code, d.message, d.help) for d in sink]
    together = Sink()
    analyse(SourceFile("contract.yaml", text), together)
    assert [(d.code, d.message, d.help) for d in together] == alone
