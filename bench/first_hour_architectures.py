"""Built-in decoders on small random models: distance from transformers, the way to a signed
certificate, and rejection of configurations that only look like one of them.

    python -m bench.first_hour --only architectures
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.common import Better, Figure
from tests.support import gpt_models
from tests.support.commands import Ran, run_here
from tests.support.decoders import (
    EVERY_FORM,
    SURE,
    Form,
    distance_from_transformers,
    random_changes,
    saved_model,
)
from tests.support.look_alikes import LOOK_ALIKES, refused

RANDOM = 6
"""Number of random configurations of each form, besides the small one."""
BLOCKS = ("attn_0", "mlp_0")
_CONTRACT = """\
kcdsl: 1
contract: first-hour
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: %s}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.eager, numerics: {preset: torch-eager, compute: bfloat16}}
data: requests.jsonl
slices: {all: {}}
clauses:
  N-ATTN: {require: "forall x in points(all): norm_inf(drift(attn_0, x)) <= 4", level: L2}
  N-MLP: {require: "forall x in points(all): norm_inf(drift(mlp_0, x)) <= 4", level: L2}
  N-KL: {require: "max(kl) <= 0.1", level: L2, evidence: census}
"""
_REQUESTS = '{"id": "a", "tokens": [3, 9, 5, 17, 33]}\n{"id": "b", "tokens": [8, 40, 41]}\n'


def figures() -> list[Figure]:
    """Measure every form, and count the look-alikes that are refused."""
    found = [figure for row in _rows() for figure in _of_form(row)]
    held = [refused(name, change) for name, change in LOOK_ALIKES]
    return [
        *found,
        Figure(
            "look-alikes of decoders refused",
            sum(held),
            Better.HIGHER,
            len(LOOK_ALIKES),
            f"of {len(LOOK_ALIKES)} configurations that transformers may run as another program",
        ),
    ]


@dataclass(frozen=True, slots=True)
class _Row:
    """A form of an architecture: its name, its distance from transformers on the small and on
    random configurations, and a function that writes a small random model to a folder."""

    name: str
    architecture: str
    distances: Callable[[], list[float]]
    save: Callable[[Path], object]


def _rows() -> Iterator[_Row]:
    """Yield every form."""
    for name, form in EVERY_FORM.items():
        save = partial(saved_model, name, seed=SURE.get(name, 0))
        yield _Row(name, form.architecture, partial(_distances, form), save)
    for name, kind in (("GPT-2", "gpt2"), ("GPT-NeoX", "gpt_neox")):
        yield _Row(name, kind, partial(_distances_of_gpt, kind), partial(gpt_models.written, kind))


def _distances(form: Form) -> list[float]:
    return [distance_from_transformers(form, 1)] + [
        distance_from_transformers(form, seed, **random_changes(form, seed))
        for seed in range(RANDOM)
    ]


def _distances_of_gpt(kind: str) -> list[float]:
    drawn = (gpt_models.drawn(kind, seed) for seed in range(RANDOM))
    small = gpt_models.distance(kind, gpt_models.saved(kind), 1)
    return [small, *(gpt_models.distance(kind, raw, n) for n, raw in enumerate(drawn))]


def _of_form(row: _Row) -> list[Figure]:
    name, lower, higher = row.name, Better.LOWER, Better.HIGHER
    distances = row.distances()
    worst = max(distances) if all(value == value for value in distances) else float("nan")
    small = "2 layers of width 16 (GPT-NeoX: 32), 2 requests; infer bfloat16, casts any"
    with tempfile.TemporaryDirectory() as folder:
        ran, goals = _run(row, Path(folder))
    found = [
        Figure(
            f"{name}: largest difference from transformers",
            worst,
            lower,
            1e-10,
            f"float64, relative to the largest logit, {RANDOM + 1} configurations",
        ),
        Figure(f"{name}: compiles", float(ran["compile"].code == 0), higher, 1.0, small),
    ]
    for block in BLOCKS:
        bound, attack = goals[block]
        found += [
            Figure(f"{name}: bound of {block}", bound, lower, None, small),
            Figure(f"{name}: attack / bound of {block}", attack / bound, lower, 1.0, "soundness"),
        ]
    return [
        *found,
        Figure(
            f"{name}: certificates accepted",
            float(all(ran[command].code == 0 for command in ("verify", "evaluate", "check"))),
            higher,
            1.0,
            "verify, evaluate (max of kl over 8 tokens) and check --recheck",
        ),
    ]


def _run(row: _Row, folder: Path) -> tuple[dict[str, Ran], dict[str, tuple[float, float]]]:
    """Run the commands on a random model; return their results, and bound and attack by block."""
    row.save(folder)
    (folder / "contract.kc.yaml").write_text(_CONTRACT % row.architecture)
    (folder / "requests.jsonl").write_text(_REQUESTS)
    run_here("keygen", "-o", "test.key", cwd=folder)
    ran = {
        "compile": run_here("compile", cwd=folder),
        "verify": run_here(
            "verify", "--sign", "test.key", "--format", "json", "--cache", "off", cwd=folder
        ),
        "evaluate": run_here("evaluate", "--sign", "test.key", cwd=folder),
    }
    certificates = ("out/verify.cert.json", "out/evaluate.cert.json")
    ran["check"] = run_here(
        "check", *certificates, "--key", "test.key.pub", "--recheck", "--complete", cwd=folder
    )
    goals = {goal["block"]: goal for goal in json.loads(ran["verify"].stdout)["goals"]}
    return ran, {block: (goals[block]["bound"], goals[block]["attack"]) for block in BLOCKS}
