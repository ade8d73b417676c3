"""The digest of a contract depends on its meaning alone."""

from __future__ import annotations

import random
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kcdsl.check.compile import compile_source
from kcdsl.diagnostics import Sink
from kcdsl.ir.canonical import digest, to_json
from kcdsl.ir.load import from_json
from kcdsl.ir.terms import Program
from kcdsl.source.text import SourceFile

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
        "B": {"require": "forall x in ball(all, 1e-3): no_flip(model, x)", "level": "L3"},
        "C": {"require": "throughput >= 4000 tok/s", "level": "L1", "then": "log"},
        "D": {"require": "has(trace, [rng_seed, build_fingerprint])", "level": "L3"},
    },
    "escalation": {"L1": "log", "numerical": {"L2": "guard"}},
}


def compiled(text: str) -> Program:
    """Compile a text that must be right."""
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
def test_order_comments_and_layout_take_no_part(
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
def test_spelling_takes_no_part(pair: tuple[str, str]) -> None:
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
            ("model, x", "head, x"),
            ("m.safetensors", "n.safetensors"),
            ("<=", "<"),
        ]
    )
)
def test_meaning_takes_part(pair: tuple[str, str]) -> None:
    text = yaml.safe_dump(BASE, width=200)
    assert pair[0] in text
    assert digest(compiled(text.replace(*pair))) != REFERENCE


def test_the_stored_form_loads_to_the_same_meaning() -> None:
    program = compiled(yaml.safe_dump(BASE))
    assert digest(from_json(to_json(program))) == REFERENCE
