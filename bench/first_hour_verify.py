"""What `kcdsl verify` costs at ordinary sizes: one case of attention, and of a whole layer.

Random weights of the size that training begins with, float32 torch eager against bfloat16 flash
attention with free casts; the command as users run it, without attacks, its checker included, on
one thread. Seconds of the processor stand beside those of the clock, as machines are shared.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.common import Better, Figure
from bench.large_layer import CONFIG, layer

ROWS: tuple[tuple[str, int, int, float, float], ...] = (
    ("attn_0", 1024, 128, 60.0, 4.0),
    ("mlp_0", 1024, 8, 60.0, 4.0),
    ("layer_0", 1024, 8, 60.0, 4.0),
)
"""Block, width, tokens, and the seconds and GB that are wanted of each."""
_CONTRACT = """\
kcdsl: 1
contract: ordinary-sizes
version: 1.0.0
model: {{checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}}
kernels:
  train: {{run: torch.eager, numerics: {{preset: torch-eager, compute: float32}}}}
  infer: {{run: torch.sdpa.flash, numerics: {{preset: torch-sdpa-flash, compute: bfloat16}}}}
data: prompts.jsonl
slices: {{some: {{where: "length > 0"}}}}
clauses:
  N: {{require: "forall x in points(some): norm_inf(drift({block}, x)) <= 1e9", level: L2}}
"""
_TEXT = "The quick brown fox jumps over the lazy dog near the big river bank. " * 8


def figures() -> list[Figure]:
    """Measure every row."""
    found = []
    for block, width, tokens, seconds, memory in ROWS:
        name = f"verify {block}, width {width}, {tokens} tokens"
        cost = _cost(block, width, tokens)
        where = "kcdsl verify --attack off --domains affine, one thread, bfloat16, casts any"
        lower = Better.LOWER
        found += [
            Figure(f"{name}: processor seconds", cost["cpu"], lower, seconds, where),
            Figure(f"{name}: seconds", cost["wall"], lower, None, where),
            Figure(f"{name}: peak GB", cost["peak"] / 1e9, lower, memory, where),
            Figure(f"{name}: bound", cost["bound"], lower, None, "norm_inf of the drift"),
        ]
    return found


def _cost(block: str, width: int, tokens: int) -> dict[str, float]:
    """Return what one run of the command costs, and the bound that it finds."""
    config = dict(
        CONFIG,
        hidden_size=width,
        num_attention_heads=width // 64,
        intermediate_size=width * 11 // 4,
        vocab_size=320,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        layer(folder, "cpu", config)
        (folder / "prompts.jsonl").write_text(json.dumps({"id": "a", "text": _TEXT[:tokens]}))
        (folder / "contract.yaml").write_text(_CONTRACT.format(block=block))
        command = [
            *(sys.executable, "-m", "kcdsl", "verify", str(folder / "contract.yaml"), "--json"),
            *("--attack", "off", "--domains", "affine", "--jobs", "1", "--threads", "1"),
            *("--cache", "off"),
        ]
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wall, after = (
            time.perf_counter() - started,
            resource.getrusage(resource.RUSAGE_CHILDREN),
        )
    if done.returncode:
        raise SystemExit(f"{block}, {tokens} tokens: {done.stdout[-400:]}{done.stderr[-400:]}")
    goal: dict[str, Any] = json.loads(done.stdout)["goals"][0]
    print(f"  {block}, {tokens} tokens: {wall:.1f} s", file=sys.stderr, flush=True)
    return {
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "wall": wall,
        "peak": float(goal["peak_bytes"]),
        "bound": float(goal["bound"]),
    }
