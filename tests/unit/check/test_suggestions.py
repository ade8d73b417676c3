"""Every misspelt name gets a suggestion of the right one.

Three documents contain every field of the schema and a word of every kind. Each word is misspelt in
turn, and the report must name the intended word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kcdsl.check.compile import analyse
from kcdsl.diagnostics.model import Diagnostic, Severity, Sink
from kcdsl.diagnostics.report import nearest
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.canonical import library_digest
from kcdsl.ir.kernels import ROLES
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, SequenceNode, parse_yaml
from tests.support.configurations import DECODER_TEXT

SCHEMA = Path(__file__).resolve().parents[3] / "grammar" / "kcdsl_grammar" / "contract.schema.json"

LIBRARY = """\
kcdsl: 1
library: fleet
version: 1.0.0
slices: {chat: {where: length > 1}, code: {where: length > 2}}
kernels: {eager: {run: torch.eager}, flash: {run: torch.sdpa.flash}}
tables:
  limits: {unit: nats, rows: [{where: length > 1, value: 0.02}], otherwise: 0.05}
"""

CONTRACT = """\
kcdsl: 1
contract: example
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: c.json, tokenizer: bpe.json}
data: requests.jsonl
imports:
  - file: fleet.kc.yaml
    digest: DIGEST
    slices: [chat]
    kernels: {infer: flash}
    tables: {lim: limits}
kernels:
  train:
    run: torch.eager
    numerics:
      preset: torch-eager
      compute: float32
      accumulate: float32
      casts: any
      weights: {format: fp8_e4m3, scale: per_tensor, rounding: nearest}
      activations: {format: uint8, scale: static, input_scale: 0.1, input_zero_point: 12}
      attention: {style: fused, tile: 16, probabilities: float32, scores: float32, exp_ulps: 2}
      kv_cache: {format: int8, scale: static, key_scale: 0.5, value_scale: {"*": 0.5}}
      quantisers: {attended: {scale: 0.5, zero_point: 12}}
slices:
  all: {}
  long: {data: requests.jsonl, where: not (length <= 128 or length == 3)}
tables:
  own: {unit: nats, rows: [{where: length > 1, value: 0.02 nats}], otherwise: 0.05}
escalation:
  L1: log
  L2: guard
  L3: rollback
  numerical: {L1: log, L2: guard, L3: rollback}
  by_family: {runtime: {L1: log}}
  health: {guard_from: 1, fallback_from: 3}
constants: {temperature: 1, reward_range: 1, advantage_max: 1, score_norm_max: 1}
clauses:
  A: {require: p99(kl) <= table(own), slices: [all, long], level: L2, then: guard, evidence: census}
  B: {require: mean(kl) <= table(lim), slices: [chat], level: L2, remediation: guard, holdout: true}
  C: {metric: mean_kl, threshold: 2, delta: 1%, over: requests, family: numerical, level: L2}
  D:
    require: "forall x in ball(all, 1e-3): norm_inf(drift(attn_1, x)) <= 0.01"
    level: L2
    evidence: proof
  E: {require: "forall x in points(all): no_flip(model, x, 1)", level: L2}
  F: {require: max(kl) <= 0.02, budget: 1% of requests, level: L2, slices: all, action: guard}
  G: {require: p95(latency) <= 2 min and max(peak_memory) <= 3 GiB, level: L1, evidence: sample}
  H: {require: "has(trace, [rng_seed, request_shape])", level: L3}
  I: {require: [rng_seed, sampling_params], level: L3}
  J: {metric: mean_margin, op: ">=", threshold: 0.5, level: L1, override: direction}
"""

OTHER_FORMS = """\
kcdsl: 1
contract: example
version: 1.0.0
model: {checkpoint: model.safetensors, module: "net:build"}
data: requests.jsonl
imports:
  - file: fleet.kc.yaml
    digest: DIGEST
    slices: {talk: chat}
    kernels: {train: eager, infer: flash, guard: flash}
    tables: [limits]
kernels: {fallback: {run: torch.eager}}
slices: {all: {where: 'length in [1, 2] or length > 5'}}
escalation:
  N: {L1: log, L3: fallback}
  S: {L2: freeze}
  R: {L1: shed_load}
  O: {L1: log}
  by_family: {statistical: {L1: log}, observability: {L2: freeze}}
clauses:
  - {id: A, require: p99(kl) <= table(limits) implies mean(tv) <= 5%, slices: talk, level: L1}
  - B: {require: mean(kl) <= 1, slices: [all], level: L2, family: N}
  - {id: C, require: "forall x in hull(all): span(drift(mlp_0, x)) < 1", level: L2}
  - {id: D, require: "forall x in points(all): norm_2(measured_drift(head, x)) <= 3", level: L2}
  - {id: E, require: max(kl) <= 3, budget: 2% of windows, level: L2}
  - {id: F, require: "throughput >= 3 tok/s and quantile(0.9, latency) <= 1 h", level: L2}
  - {id: G, require: mean(abs(log_ratio)) <= 0.1, level: L2, evidence: probabilistic}
"""

NUMERICS = """\
kcdsl: 1
contract: example
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama}
data: requests.jsonl
kernels:
  train: {run: torch.eager}
  infer:
    run: torch.sdpa
    numerics:
      preset: fp8-w8a8-per-tensor
      sigmoid: absolute
      byte_sums: wide
      products: compute
      shards: 2
      kv_cache: {format: fp8_e4m3, scale: per_head, least_scale: 0.001}
      weights: {format: fp8_e4m3, scale: per_tensor, scale_format: float16, applied: weights}
      activations:
        format: fp8_e4m3
        scale: per_batch
        least_scale: 0.001
        amax_limit: 100
        batch_amax: 300
      tensor_core:
        linears: {fraction_bits: 13, chunk: 32, result_bits: 13, promote: 128}
        others: {fraction_bits: 25, chunk: 16, result_bits: 23}
      overrides:
        lm_head: {weights: {format: bfloat16}, activations: {format: none}}
      results:
        input: float32
        context: float32
        linear: float32
        matmul: float32
        add: float32
        sub: float32
        mul: float32
        scale: float32
        divide: float32
        shift: float32
        tanh: float32
        silu: float32
        gelu: float32
        rope: float32
        rms_norm: float32
        layer_norm: float32
slices: {all: {}}
clauses:
  A: {require: max(kl) <= 1, level: L1}
"""

RECORDINGS = """\
kcdsl: 1
contract: recorded
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama}
data: requests.jsonl
kernels:
  train:
    run: recorded
    format: verl
    recomputed: true
    logprobs: {values: processed, temperature: 1, top_p: 1, top_k: 0, min_p: 0, top: 0}
  infer:
    run: recorded
    format: verl
    logprobs: {values: processed}
    columns:
COLUMNS
slices: {all: {}}
clauses:
  A: {require: mean(k3) <= 1, level: L1}
""".replace("COLUMNS", "\n".join(f"      {role}: own" for role in ROLES))

LOGITS = """\
kcdsl: 1
contract: whole-logits
version: 1.0.0
model: {onnx: model.onnx, blocks: {mlp_0: {from: hidden, to: logits}}}
data: requests.jsonl
kernels:
  train: {run: recorded, format: logits, file: train.safetensors}
  infer: {run: recorded, format: logits, file: infer.safetensors}
slices: {all: {}}
clauses:
  A: {require: max(kl) <= 1, level: L1}
"""

SERVED = """\
kcdsl: 1
contract: served
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: hf}
data: requests.jsonl
kernels:
  train: {run: hf.transformers, folder: hf}
  infer:
    run: server
    url: "http://127.0.0.1:8000"
    model: tiny
    key: KCDSL_SERVER_KEY
    tokens: 8
    concurrency: 2
    logprobs: {values: processed}
slices: {all: {}}
clauses:
  A: {require: mean(k3) <= 1, level: L1}
"""

OWN = re.compile(
    r"val \.(contract|library|version|model\.module|imports\[0\]\.digest|clauses\[\d\]\.id)"
    r"|key \.(clauses\.\w|slices\.\w+|tables\.\w+|kernels\.(eager|flash))"
    r"|val \.kernels\.infer\.columns\.\w+"
    r"|key \.clauses\[1\]\.B|key \.imports\[0\]\.\w+\.(lim|talk)"
    r"|key \.kernels\.\w+\.numerics\.quantisers\.\w+"
)
"""Fields whose names the author or the model chooses; no text of the contract has a right one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the documents name."""
    made = tmp_path_factory.mktemp("suggestions")
    for name in ("model.safetensors", "c.json", "bpe.json", "requests.jsonl"):
        (made / name).write_text(DECODER_TEXT if name == "c.json" else "", encoding="utf-8")
    (made / "fleet.kc.yaml").write_text(LIBRARY, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def documents(folder: Path) -> dict[str, str]:
    """Return the documents, completed with the digest of the library."""
    library = analyse(SourceFile("fleet.kc.yaml", LIBRARY), Sink(), folder).library
    assert library is not None
    digest = library_digest(library)
    forms = {
        "contract": CONTRACT,
        "other forms": OTHER_FORMS,
        "numerics": NUMERICS,
        "library": LIBRARY,
        "recordings": RECORDINGS,
        "logits": LOGITS,
        "served": SERVED,
    }
    return {name: text.replace("DIGEST", digest) for name, text in forms.items()}


def found(text: str, folder: Path) -> list[Diagnostic]:
    sink = Sink()
    analyse(SourceFile("contract.yaml", text), sink, folder)
    return sink.found


def scalars(node: Node | None, path: str) -> Iterator[tuple[str, Scalar]]:
    """Yield every key and every value of a document with its path."""
    if isinstance(node, Mapping):
        for entry in node.entries:
            here = f"{path}.{entry.key.text}"
            yield f"key {here}", entry.key
            yield from scalars(entry.value, here)
    elif isinstance(node, SequenceNode):
        for index, item in enumerate(node.items):
            yield from scalars(item, f"{path}[{index}]")
    elif isinstance(node, Scalar):
        yield f"val {path}", node


def misspelt(word: str) -> str:
    """Return a word without its middle letter, or with an extra one if it is short."""
    middle = len(word) // 2
    return word[:middle] + word[middle + 1 :] if len(word) > 3 else f"{word}x"


def words(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield every word of at least two letters that the author does not choose, and its offset."""
    for path, node in scalars(parse_yaml(SourceFile("contract.yaml", text), Sink()), ""):
        if OWN.fullmatch(path):
            continue
        for word in re.finditer(
            r"(?<![\w.])[A-Za-z_][\w.]+", text[node.span.start : node.span.end]
        ):
            yield path, word[0], node.span.start + word.start()


@pytest.mark.parametrize(
    "name", ["contract", "other forms", "library", "recordings", "logits", "served"]
)
def test_original_documents_have_no_findings(
    documents: dict[str, str], folder: Path, name: str
) -> None:
    worse = [d for d in found(documents[name], folder) if d.severity is Severity.ERROR]
    assert [d.message for d in worse] == []


@pytest.mark.full
@pytest.mark.parametrize("name", ["contract", "other forms", "library", "recordings"])
def test_misspelt_word_suggests_the_right_one(
    documents: dict[str, str], folder: Path, name: str
) -> None:
    text, silent, seen = documents[name], [], 0
    for path, word, at in words(text):
        if word in {"true", "tok"}:  # a boolean, half of a unit
            continue
        wrong = misspelt(word)
        diagnostics = found(text[:at] + wrong + text[at + len(word) :], folder)
        said = [f"{d.message} {d.help} {d.fix}" for d in diagnostics]
        if not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", line) for line in said):
            silent.append((path, wrong, said))
        seen += 1
    assert [f"{path}: {wrong}: {said}" for path, wrong, said in silent] == []
    assert seen > 20


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "properties":
                yield from (("field", name) for name in value)
            if key == "enum":
                yield "enum", value
            yield from _parts(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _parts(value)


def test_documents_contain_every_field_of_the_schema(documents: dict[str, str]) -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    wanted = {name for kind, name in _parts(schema) if kind == "field"}
    assert len(wanted) > 50
    keys = {
        path.rpartition(".")[2]
        for text in documents.values()
        for path, _ in scalars(parse_yaml(SourceFile("contract.yaml", text), Sink()), "")
        if path.startswith("key ")
    }
    assert wanted <= keys


def test_listed_values_are_nearest_to_their_misspelling() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    lists = [value for kind, value in _parts(schema) if kind == "enum"]
    assert len(lists) >= 8
    for allowed in lists:
        names = [value for value in allowed if isinstance(value, str) and len(value) > 4]
        for name in names:
            assert nearest(misspelt(name), names) == name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("kl_divergence", "kl"),
        ("top1_agreement", "top1_overlap"),
        ("router_agreemnt", "router_agreement"),
        ("greedy_divergence_stp", "greedy_divergence_step"),
        ("unheard_of", None),
    ],
)
def test_first_word_weighs_more_than_the_last(name: str, meant: str | None) -> None:
    names = ("greedy_divergence_step", "kl", "reverse_kl", "router_agreement", "top1_overlap")
    assert nearest(name, names) == meant
