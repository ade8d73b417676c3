"""Hostile files by name: small, but expensive for a careless reader."""

from __future__ import annotations

import struct
from collections.abc import Mapping

HEAD = """\
kcdsl: 1
contract: hostile
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: prompts.jsonl
slices: {all: {}}
clauses:
"""
CLAUSE = "  A: {require: p99(kl) <= 1, slices: [all], level: L2}\n"


def _clause(expression: str) -> str:
    return HEAD + f'  A: {{require: "{expression}", slices: [all], level: L2}}\n'


def _many(clauses: int) -> str:
    line = "  C{}: {{require: p99(kl) <= 1, slices: [all], level: L2}}\n"
    return HEAD + "".join(line.format(number) for number in range(clauses))


CONTRACTS: Mapping[str, str] = {
    "aliases": "a: &a x\nb: [" + "*a, " * 200_000 + "]\n",
    "laughs": "a: &a [x]\n"
    + "".join(f"b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 9)}]\n" for i in range(1, 20)),
    "anchors": "a: [" + "".join(f"&a{i} y, " for i in range(100_000)) + "]\n",
    "tags": "a: [" + "!x y, " * 150_000 + "]\n",
    "deep": "a: " + "[" * 200_000,
    "deep braces": "{a: " * 200_000,
    "indented": "".join(" " * i + "a:\n" for i in range(1_400)),
    "one key": "a: 1\n" * 200_000,
    "many keys": "".join(f"k{i}: 1\n" for i in range(90_000)),
    "many clauses": _many(18_000),
    "doubtful scalars": "a: [" + "yes, 1:20, " * 90_000 + "]\n",
    "one scalar": HEAD + CLAUSE + "description: " + "x" * 8_000_000,
    "comments that accept": HEAD + CLAUSE + "# kcdsl: ignore[KC208] because\n" * 30_000,
    "codes that accept": HEAD + CLAUSE + f"# kcdsl: ignore[{'KC208, ' * 140_000}] because\n",
    "imports": HEAD.replace("1\n", f"1\nimports: [{'x.yaml, ' * 100_000}]\n", 1) + CLAUSE,
    "parentheses": _clause("(" * 400_000 + "1" + ")" * 400_000),
    "signs": _clause("-" * 900_000 + "1 <= p99(kl)"),
    "digits": _clause("p99(kl) <= " + "9" * 900_000),
    "powers": _clause("9**9**9**9**9 <= p99(kl)"),
    "blanks": _clause(" " * 900_000),
    "calls": "f(" * 400_000,
    "words of regions": "forall x in points(" * 50_000,
    "broken clauses": HEAD + "".join(f'  C{i}: {{require: "}}\n' for i in range(20_000)),
}
"""Texts of contracts, for `kcdsl lint` and similar commands."""

LIBRARY = "kcdsl: 1\nlibrary: lib\nversion: 1.0.0\nslices: {own: {data: prompts.jsonl}}\n"
"""Text of `lib.yaml`, which the contracts of `ZEROS` import."""
_NAMING = """\
kcdsl: 1
contract: hostile
version: 1.0.0
imports: [{file: "lib.yaml", slices: [own]}]
model: {checkpoint: "model.safetensors", architecture: llama, config: "config.json", \
tokenizer: "tokenizer.json"}
kernels: {train: {run: torch.eager}, infer: {run: transformers, folder: "weights"}}
data: "prompts.jsonl"
slices: {all: {data: "prompts.jsonl"}, "other": {}}
clauses:
  A: {require: p99(kl) <= 1, slices: [all], level: L2}
"""
_OWN = _NAMING.replace("architecture: llama", 'module: "own:build"')
ZEROS: Mapping[str, str] = {
    "an import": _NAMING.replace('"lib.yaml"', r'"lib\0.yaml"'),
    "the checkpoint": _NAMING.replace('"model.', r'"model\x00.'),
    "the configuration of the model": _NAMING.replace('"config.', r'"config\u0000.'),
    "the tokenizer": _NAMING.replace('"tokenizer.', r'"tokenizer\U00000000.'),
    "the module": _OWN.replace('"own:', r'"own\0:'),
    "the factory": _OWN.replace(":build", r":build\0"),
    "the folder of a kernel": _NAMING.replace('"weights', r'"weights\0'),
    "the data": _NAMING.replace('data: "prompts', r'data: "prompts\0', 1),
    "the data of a slice": _NAMING.replace('{data: "', r'{data: "\0'),
    "the name of a slice": _NAMING.replace('"other"', r'"oth\0er"'),
}
"""Contracts with an escaped zero byte in a path or name."""
ZEROS_OF_CONFIGURATIONS: Mapping[str, str] = {
    "contract": r'contract = "a\u0000b"',
    "metrics": r'metrics = ["a\u0000b.py"]',
    "allow-folders": r'allow-folders = ["a\u0000b"]',
    "exclude": r'exclude = ["a\u0000b"]',
    "docs-url": r'docs-url = "a\u0000b"',
}
"""Texts of `kcdsl.toml` with a zero byte in a path."""
READERS: tuple[tuple[str, ...], ...] = (
    ("compile", "contract.yaml"),
    ("lint", "contract.yaml"),
    ("lint", "--fix", "contract.yaml"),
    ("fmt", "--check", "contract.yaml"),
    ("fmt", "contract.yaml"),
    ("plan", "contract.yaml"),
    ("diff", "contract.yaml", "contract.yaml"),
    ("explain", "A", "contract.yaml"),
    ("verify", "contract.yaml", "--allow-code"),
    ("evaluate", "contract.yaml", "--allow-code"),
    ("status", "contract.yaml"),
    ("attribute", "contract.yaml", "--allow-code"),
)
"""Commands that read a contract; every one refuses those of `ZEROS`."""
READERS_OF_CONFIGURATIONS = tuple(words for words in READERS if words[0] != "explain")
"""Commands that refuse an invalid configuration; `explain` explains the clause and reports the
error."""

CONFIGURATIONS: Mapping[str, str] = {
    "deep": "a = " + "[" * 100_000,
    "deep tables": "a = " + "{a=" * 50_000,
    "points": "a" + ".a" * 100_000 + " = 1\n",
    "many keys": "".join(f"k{i} = 1\n" for i in range(20_000)),
    "many modules": "metrics = [" + ",".join(f'"m{i}.py"' for i in range(20_000)) + "]\n",
    "digits": "a = " + "9" * 200_000,
    "large": "#" * 2_000_000,
}
"""Texts of `kcdsl.toml` beside a contract."""

MODULES: Mapping[str, str] = {
    "deep": "x = " + "(" * 100_000,
    "signs": "x = " + "-" * 500_000 + "1",
    "sum": "x = " + "+".join(["1"] * 200_000),
    "attributes": "x" + ".a" * 300_000,
    "digits": "x = " + "9" * 100_000,
    "nul": "x = 1\0",
    "declarations": "import kcdsl\n" + "@kcdsl.metric()\ndef f(): pass\n" * 20_000,
}
"""Texts of modules that declare metrics."""

DATA: Mapping[str, bytes] = {
    "deep": b'{"id": "a", "tokens": ' + b"[" * 1_000_000,
    "digits": b'{"id": "a", "tokens": [' + b"9" * 5_000_000 + b"]}",
    "keys": b'{"id": "a", ' + b'"a": 1, ' * 500_000 + b'"b": 2}',
    "blank lines": b"\n" * 20_000_000,
    "rows": b'{"id": "a", "tokens": [0]}\n' * 400_000,
}
"""Bytes of `prompts.jsonl`."""

DOCUMENTS: Mapping[str, bytes] = {
    "deep": b'{"a": ' + b"[" * 1_000_000,
    "closed": b'{"a": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
    "digits": b'{"a": ' + b"9" * 10_000_000 + b"}",
    "keys": b"{" + b",".join(b'"k%d": 1' % i for i in range(300_000)) + b"}",
    "payload": b'{"dsseEnvelope": {"payload": "' + b"A" * 30_000_000 + b'"}}',
}
"""Bytes of a certificate, a report, a counterexample and so on."""


def _checkpoint(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + b"\0" * 8


CHECKPOINT = _checkpoint(b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}')
"""Bytes of harmless weights."""
CHECKPOINTS: Mapping[str, bytes] = {
    "length": struct.pack("<Q", 2**63) + b"{",
    "blanks": _checkpoint(b"{}" + b" " * (90 * 2**20)),
    "deep": _checkpoint(b'{"w": ' + b"[" * 1_000_000),
    "digits": _checkpoint(b'{"w": {"dtype": "F32", "shape": [' + b"9" * 5_000_000 + b"]}}"),
}
"""Bytes of `model.safetensors`."""
