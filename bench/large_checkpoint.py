"""Memory and bytes read by `verify --block attn_0` on a checkpoint with the shape of a 7B model.

`python -m bench.large_checkpoint` writes a folder of random bfloat16 shards with few of the layers,
on whose number a block does not depend, and runs processes on it, `kcdsl verify` last. Peak memory
is that beyond the same process for a model of one small layer; bytes are those that it reads. The
model is not compared with transformers, as a full one exceeds the limit for comparisons.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

SHAPE = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    **SHAPE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
CONTRACT = """\
kcdsl: 1
contract: large
version: 1.0.0
model: {checkpoint: ., architecture: llama, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager, compute: bfloat16}}
  infer: {run: torch.sdpa.flash, numerics: {preset: torch-sdpa-flash, compute: bfloat16}}
data: prompts.jsonl
slices: {all: {}}
clauses:
  N: {require: "forall x in points(all): norm_inf(drift(attn_0, x)) <= 1000", level: L2}
"""
_OPEN = """\
from pathlib import Path
from kcdsl.check.compile import load_program
from kcdsl.model.loader import load_model
program = load_program(Path("contract.yaml"))
model = load_model(program.model, Path.cwd(), by_block=True)
"""
_INPUT = f'{_OPEN}model.block_inputs([72, 101, 108, 108], "attn_0")\n'
_READ = f'{_OPEN}model.fill(model.block("attn_0"))\n'
_TRACE = f"""{_INPUT}
from kcdsl.model.lowering import block_graph
block_graph(model, "attn_0", 4, None, ("bfloat16",))
"""
_REPORT = """
import json, sys
status = dict(line.split(":") for line in open("/proc/self/status"))
io = dict(line.split(":") for line in open("/proc/self/io"))
print(json.dumps({"peak": int(status["VmHWM"].split()[0]) * 1024, "read": int(io["rchar"])}),
      file=sys.stderr)
"""
_VERIFY = """\
from kcdsl.cli import main
from kcdsl_backends import comparison
comparison.LARGEST_COMPARED = 0
try:
    main(["verify", "--block", "attn_0", "--attack", "off", "--cache", "off"])
except SystemExit:
    pass
"""


def write(folder: Path, shape: Mapping[str, Any], layers: int) -> int:
    """Write a contract and a checkpoint with one shard per layer; return the checkpoint's bytes."""
    import torch
    from safetensors.torch import save_file

    width, inner, words = (
        shape[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    shards: list[dict[str, tuple[int, ...]]] = [
        {
            "model.embed_tokens.weight": (words, width),
            "lm_head.weight": (words, width),
            "model.norm.weight": (width,),
        }
    ]
    for layer in range(layers):
        place = f"model.layers.{layer}"
        mine: dict[str, tuple[int, ...]]
        mine = {f"{place}.self_attn.{side}_proj.weight": (width, width) for side in "qkvo"}
        mine |= {f"{place}.mlp.{side}_proj.weight": (inner, width) for side in ("gate", "up")}
        mine[f"{place}.mlp.down_proj.weight"] = (width, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            mine[f"{place}.{norm}.weight"] = (width,)
        shards.append(mine)
    index: dict[str, str] = {}
    for number, shapes in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        made = {key: (torch.randn(s) * 0.02).to(torch.bfloat16) for key, s in shapes.items()}
        save_file(made, folder / name)
        index |= dict.fromkeys(made, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": layers}))
    (folder / "contract.yaml").write_text(CONTRACT)
    (folder / "prompts.jsonl").write_text('{"id": "p", "text": "Hello"}\n')
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def measured(folder: Path, code: str) -> dict[str, float]:
    """Run code in a new process; return its peak memory, bytes read and CPU seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    before = os.times()
    command = [sys.executable, "-c", code + _REPORT]
    ran = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    after = os.times()
    seconds = after.children_user + after.children_system
    seconds -= before.children_user + before.children_system
    return {**json.loads(ran.stderr.strip().splitlines()[-1]), "seconds": seconds}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="only the first of the steps")
    options = parser.parse_args()
    layers = options.layers
    with tempfile.TemporaryDirectory(prefix="kcdsl-") as place:
        small, large = Path(place) / "small", Path(place) / "large"
        for folder in (small, large):
            folder.mkdir()
        write(small, SMALL, 1)
        size = write(large, SHAPE, layers)
        block = 4 * SHAPE["hidden_size"] ** 2 * 2  # type: ignore[operator]
        print(f"checkpoint {size / 2**20:.0f} MiB, attn_0 {block / 2**20:.0f} MiB in bfloat16")
        print("| step | peak MiB | of the block | read MiB | CPU s |\n|---|---|---|---|---|")
        steps = {
            "first run: hash, form the input of the block": _INPUT,
            "form the input of the block": _INPUT,
            "read the block as float32": _READ,
            "trace it and compare the graph with the module": _TRACE,
            "verify": _VERIFY,
        }
        for name, code in islice(steps.items(), options.steps):
            base, found = measured(small, code), measured(large, code)
            peak, read = found["peak"] - base["peak"], found["read"] - base["read"]
            row = (f"{peak / 2**20:.0f}", f"{peak / block:.2f}", f"{read / 2**20:.0f}")
            print(f"| {name} | {' | '.join(row)} | {found['seconds']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
