"""The digest of a contract depends on its meaning only."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kcdsl.check.compile import analyse, compile_source
from kcdsl.check.stored import from_json, term_from_json
from kcdsl.diagnostics import Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.canonical import digest, library_digest, to_json
from kcdsl.ir.terms import Program

BASE: dict[str, Any] = {
    "kcdsl": 1,
    "contract": "c",
    "version": "1.0.0",
    "model": {"checkpoint": "m.safetensors", "architecture": "llama"},
    "kernels": {
        "train": {"run": "torch.eager"},
        "infer": {
            "run": "torch.sdpa",
            "numerics": {"preset": "flash-attention-2", "compute": "bfloat16"},
        },
    },
    "slices": {"all": {}, "long": {"where": "length > 128"}, "short": {"where": "length < 9"}},
    "clauses": {
        "A": {"require": "p99(kl) <= 0.02", "slices": ["all", "long"], "level": "L2"},
        "B": {"require": "forall x in ball(all, 1e-3): no_flip(head, x)", "level": "L3"},
        "C": {"require": "throughput >= 4000 tok/s", "level": "L1", "then": "log"},
        "D": {"require": "has(trace, [rng_seed, build_fingerprint])", "level": "L3"},
    },
    "escalation": {"L1": "log", "numerical": {"L2": "guard"}},
}


def compiled(text: str) -> Program:
    """Compile a valid text."""
    sink = Sink()
    program = compile_source(SourceFile("generated.kc.yaml", text), sink)
    assert program is not None, [d.message for d in sink]
    return program


def shuffled(value: Any, order: random.Random) -> Any:
    """Change the order of the keys of every mapping, and of the lists of slices."""
    if isinstance(value, dict):
        keys = list(value)
        order.shuffle(keys)
        return {key: shuffled(value[key], order) for key in keys}
    if isinstance(value, list):
        return order.sample(value, len(value))
    return value


REFERENCE = digest(compiled(yaml.safe_dump(BASE)))


@settings(max_examples=40)
@given(st.randoms(use_true_random=False), st.sampled_from([20, 200]), st.booleans(), st.booleans())
def test_order_comments_and_layout_do_not_change_the_digest(
    order: random.Random, width: int, flow: bool, comments: bool
) -> None:
    text = yaml.safe_dump(
        shuffled(BASE, order), sort_keys=False, width=width, default_flow_style=flow
    )
    if comments:
        text = "# a comment\n" + text + "# the end\n"
    assert digest(compiled(text)) == REFERENCE


@given(
    st.sampled_from(
        [
            ("p99(kl) <= 0.02", "p99(kl)<=2e-2 nats"),
            ("p99(kl) <= 0.02", "0.02 >= p99(kl)"),
            ("p99(kl) <= 0.02", "not (quantile(99%, kl) > 0.01 + 0.01)"),
            ("throughput >= 4000 tok/s", "throughput >= 4e3 tok/s"),
            ("rng_seed, build_fingerprint", 'build_fingerprint, "rng_seed"'),
        ]
    )
)
def test_spelling_does_not_change_the_digest(pair: tuple[str, str]) -> None:
    text = yaml.safe_dump(BASE, width=200)
    assert pair[0] in text
    changed = {**BASE, "clauses": {k: dict(v) for k, v in BASE["clauses"].items()}}
    for clause in changed["clauses"].values():
        clause["require"] = clause["require"].replace(*pair)
    assert digest(compiled(yaml.safe_dump(changed))) == REFERENCE


@given(
    st.sampled_from(
        [
            ("0.02", "0.020000001"),
            ("p99", "p95"),
            ("L3", "L2"),
            ("1e-3", "1e-4"),
            ("length > 128", "length >= 128"),
            ("bfloat16", "float16"),
            ("head, x", "attn_0, x"),
            ("m.safetensors", "n.safetensors"),
            ("<=", "<"),
        ]
    )
)
def test_meaning_changes_the_digest(pair: tuple[str, str]) -> None:
    text = yaml.safe_dump(BASE, width=200)
    assert pair[0] in text
    assert digest(compiled(text.replace(*pair))) != REFERENCE


def test_stored_form_keeps_the_meaning() -> None:
    program = compiled(yaml.safe_dump(BASE))
    assert digest(from_json(to_json(program))) == REFERENCE


# --- one meaning, many spellings -----------------------------------------------------------------

LIBRARY = """\
kcdsl: 1
library: fleet
version: 1
data: d.jsonl
slices:
  tail: {where: length > 128}
  red: {data: red.jsonl, where: 'category == "red"'}
kernels: {fast: {run: torch.sdpa, numerics: {preset: flash-attention-2, compute: bfloat16}}}
tables:
  tau: {unit: ms, rows: [{where: length <= 128, value: 20}], otherwise: 50}
"""
IMPORTING: dict[str, Any] = {
    "kcdsl": 1,
    "contract": "c",
    "version": "1.0.0",
    "model": {"checkpoint": "m.safetensors", "architecture": "llama"},
    "kernels": {"train": {"run": "torch.eager"}},
    "imports": [
        {"file": "fleet.kc.yaml", "slices": ["tail"], "kernels": {"infer": "fast"}},
        {"file": "fleet.kc.yaml", "slices": {"angry": "red"}, "tables": ["tau"]},
    ],
    "slices": {"all": {}},
    "clauses": {
        "A": {"require": "p95(latency) <= table(tau)", "slices": ["tail", "all"], "level": "L1"},
        "B": {"require": "mean(kl) <= 0.02", "slices": ["angry"], "level": "L2", "holdout": True},
    },
}
INLINE: dict[str, Any] = {
    **{key: value for key, value in IMPORTING.items() if key != "imports"},
    "kernels": {
        "train": {"run": "torch.eager"},
        "infer": {
            "run": "torch.sdpa",
            "numerics": {"preset": "flash-attention-2", "compute": "bfloat16"},
        },
    },
    "slices": {
        "all": {},
        "tail": {"data": "d.jsonl", "where": "length > 128"},
        "angry": {"data": "red.jsonl", "where": 'category == "red"'},
    },
    "tables": {
        "tau": {
            "unit": "s",
            "rows": [{"where": "128 >= length", "value": "20 ms"}],
            "otherwise": 0.05,
        }
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the library."""
    place = tmp_path_factory.mktemp("imports")
    (place / "fleet.kc.yaml").write_text(LIBRARY)
    analysis = analyse(SourceFile("fleet.kc.yaml", LIBRARY), Sink(), place)
    assert analysis.library is not None
    for item in IMPORTING["imports"]:
        item["digest"] = library_digest(analysis.library)
    return place


@pytest.mark.full
@settings(max_examples=30)
@given(st.randoms(use_true_random=False), st.booleans())
def test_imports_and_their_order_do_not_change_the_digest(
    folder: Path, order: random.Random, flow: bool
) -> None:
    text = yaml.safe_dump(shuffled(IMPORTING, order), sort_keys=False, default_flow_style=flow)
    sink = Sink()
    program = compile_source(SourceFile("c.kc.yaml", text), sink, folder)
    assert program is not None, [d.message for d in sink]
    assert digest(program) == digest(compiled(yaml.safe_dump(INLINE)))


SAME: tuple[tuple[str, ...], ...] = (
    (
        "{require: p95(latency) <= 20 ms, level: L1}",
        "{require: p95(latency) <= 0.02 s, level: L1}",
        "{require: p95(latency) <= 2e4 us, level: L1}",
        "{require: 1 ms * 20 >= p95(latency), slices: [all], level: L1}",
        "{metric: p95_latency_ms, threshold: 20, level: L1}",
        "{metric: p95_latency_s, threshold: 20 ms, op: '<=', delta: 0, level: L1, family: R}",
        "{level: 'L1', require: >-\n  p95(latency)\n  <= 20 ms\n}",
    ),
    (
        "{require: mean(top1_overlap) >= 99.5%, level: L3, slices: all}",
        "{require: mean(top1_overlap) >= 0.995, level: L3, holdout: false}",
        "{require: 'mean(top1_overlap) >= 995e-3 ratio', level: L3}",
        "{metric: top1_overlap, threshold: 99.5%, level: L3}",
        "{metric: mean_top1_overlap, threshold: 0.995, level: L3, family: statistical}",
        "{require: not mean(top1_overlap) < 99.5%, level: L3}",
    ),
    (
        "{require: 'forall x in points(all): no_flip(model, x)', level: L3}",
        "{require: 'forall y in points(all): no_flip(model, y)', level: L3}",
        "{require: 'forall request in points(all): no_flip(model, request, 1)', level: L3}",
    ),
    (
        "{require: mean(kl) <= p99(kl), level: L1, override: direction}",
        "{require: p99(kl) >= mean(kl), level: L1, override: direction}",
    ),
    (
        "{require: ece_gap <= 1%, budget: 5% of windows, level: L1, then: higher_precision}",
        "{metric: ece_gap, threshold: 0.01, delta: 0.05, over: windows, level: L1,"
        " remediation: higher_precision_kernel}",
    ),
    (
        "{require: 'has(trace, [rng_seed, build_fingerprint])', level: L3}",
        "{require: [build_fingerprint, rng_seed], level: L3}",
    ),
)


def one_clause(body: str) -> str:
    """Return the digest of a contract with this clause."""
    rest = {key: value for key, value in BASE.items() if key not in {"clauses", "escalation"}}
    if ">-" in body:  # a block scalar needs block style
        body = "\n    level: L1\n    require: >-\n      p95(latency)\n      <= 20 ms"
    return digest(compiled(yaml.safe_dump(rest) + f"clauses:\n  A: {body}\n"))


@pytest.mark.parametrize("spellings", SAME, ids=lambda s: s[0])
def test_equivalent_clauses_have_one_digest(spellings: tuple[str, ...]) -> None:
    assert len({one_clause(body) for body in spellings}) == 1


def test_different_clauses_have_different_digests() -> None:
    assert len({one_clause(spellings[0]) for spellings in SAME}) == len(SAME)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("mean(kl) <= 1 and mean(tv) <= 0.1", "mean(tv) <= 0.1 and mean(kl) <= 1"),
        ("mean(kl) + p99(kl) <= 1", "p99(kl) + mean(kl) <= 1"),
        ("mean(kl) <= 1 and mean(kl) <= 1", "mean(kl) <= 1"),
    ],
)
def test_laws_of_logic_and_arithmetic_are_not_applied(one: str, other: str) -> None:
    """As documented, only forms named by the normal form are identified."""
    found = [one_clause(f"{{require: '{text}', level: L1}}") for text in (one, other)]
    assert found[0] != found[1]


@pytest.mark.parametrize("kind", ["power", "", None, 1])
def test_stored_terms_of_an_unknown_kind_are_refused(kind: object) -> None:
    with pytest.raises(ValueError, match="unknown term"):
        term_from_json({"kind": kind})
