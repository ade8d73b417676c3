"""Small models of GPT-2 and GPT-NeoX, compared with the implementations of transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers

from kcdsl.model import registry

GPT2: dict[str, Any] = {
    "vocab_size": 256, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
NEOX: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
SMALL = {"gpt2": GPT2, "gpt_neox": NEOX}


def saved(kind: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json that transformers saves for a small model of this type."""
    config = transformers.AutoConfig.for_model(kind, **(SMALL[kind] | changes))
    found: dict[str, Any] = json.loads(config.to_json_string())
    return found


def drawn(kind: str, seed: int) -> dict[str, Any]:
    """Return a random configuration of a model type."""
    draw = random.Random(seed)
    heads, half = draw.choice((1, 2, 3)), draw.choice((1, 2, 4))
    act = draw.choice(("gelu_new", "gelu", "gelu_pytorch_tanh"))
    layers, tied = draw.choice((1, 2, 4)), draw.random() < 0.5
    eps = draw.choice((1e-5, 1e-2))
    if kind == "gpt2":
        return saved(
            kind, n_embd=2 * half * heads, n_head=heads, n_layer=layers, tie_word_embeddings=tied,
            n_inner=draw.choice((None, 7)), activation_function=act, layer_norm_epsilon=eps,
        )  # fmt: skip
    return saved(
        kind, hidden_size=8 * half * heads, num_attention_heads=heads, num_hidden_layers=layers,
        tie_word_embeddings=tied, hidden_act=act, layer_norm_eps=eps,
        rotary_pct=draw.choice((0.25, 0.5, 1.0)), use_parallel_residual=draw.random() < 0.5,
        attention_bias=draw.random() < 0.5, rotary_emb_base=draw.choice((100, 10000)),
    )  # fmt: skip


def distance(kind: str, raw: dict[str, Any], seed: int) -> float:
    """Return the largest difference of logits from transformers in float64, by the largest logit.

    Both use the same RoPE tables: those of kcdsl are float32 roundings of float64.
    """
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**raw)
    make: Any = transformers.AutoModelForCausalLM.from_config
    theirs = make(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    module: Any = registry.load(kind).build(raw)
    rule = registry.load(kind).canonical_key
    own = module.state_dict()
    for name, tensor in theirs.state_dict().items():
        held = own[rule(name)]
        turned = tensor.dim() == 2 and ".c_" in name
        held.copy_(tensor.T if turned else tensor)
    for program in (theirs, module):
        program.double().eval()
    if kind == "gpt_neox":
        rotary = module.gpt_neox.layers[0].attention.rotary
        given = theirs.gpt_neox.rotary_emb(torch.zeros(1).double(), torch.arange(24)[None])
        tables = tuple(table[:24].double()[None] for table in (rotary.cos, rotary.sin))
        for one, two in zip(tables, given, strict=True):
            torch.testing.assert_close(one, two.double(), rtol=0, atol=1e-5)
        theirs.gpt_neox.rotary_emb.forward = lambda x, position_ids: tables
    ids = torch.randint(0, raw["vocab_size"], (2, 24))
    with torch.no_grad(), Wide():
        expected = theirs(ids, use_cache=False).logits
    with torch.no_grad():
        found = module(ids)
    return float((found - expected).abs().max() / expected.abs().max())


class Wide(torch.overrides.TorchFunctionMode):
    """Make the softmax of transformers, which requests float32, compute in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **wide)


def written(kind: str, folder: Path, seed: int = 0) -> None:
    """Write a small random model of a type as transformers does."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**saved(kind))
    make: Any = transformers.AutoModelForCausalLM.from_config
    make(config).save_pretrained(folder)
