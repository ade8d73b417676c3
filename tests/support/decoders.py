"""Small decoders of every built-in form, compared with the implementations of transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kcdsl.ir.terms import ModelRef
from kcdsl.model import registry
from kcdsl.model.architecture import Model
from kcdsl.model.loader import load_model
from kcdsl.model.presets import resolve
from kcdsl_backends.attack import attack
from kcdsl_backends.certifier.statements.problems import ProblemFactory, claim_margin
from kcdsl_backends.certifier.statements.proof import Proof, ProofBuilder, box_region
from kcdsl_backends.drift.functionals import drift_bound
from kcdsl_certs.recheck import recheck

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LONG = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
_WINDOW = {"use_sliding_window": True, "sliding_window": 3}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 10}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 3}


@dataclass(frozen=True, slots=True)
class Form:
    """A model type of an architecture, with the fields that it adds to `SMALL`."""

    architecture: str
    kind: str
    own: Mapping[str, Any] = field(default_factory=dict)

    def saved(self, **changes: Any) -> dict[str, Any]:
        """Return the config.json that transformers saves."""
        import transformers

        stated = json.loads(json.dumps({**SMALL, **self.own, **changes}))
        config = transformers.AutoConfig.for_model(self.kind, **stated)
        found: dict[str, Any] = json.loads(config.to_json_string())
        return found


FORMS: dict[str, Form] = {
    "Llama": Form("llama", "llama"),
    "Llama, YaRN": Form("llama", "llama", {"rope_scaling": _YARN}),
    "Mistral": Form("llama", "mistral", {"sliding_window": 3}),
    "Qwen2": Form("llama", "qwen2", _WINDOW | {"max_window_layers": 0}),
    "Qwen3": Form("qwen3", "qwen3", {"head_dim": 8}),
    "Gemma 2": Form(
        "gemma", "gemma2", _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}
    ),
    "Gemma 3": Form("gemma", "gemma3_text", _GEMMA | {"sliding_window_pattern": 2}),
    "Phi-3": Form(
        "phi3", "phi3", {"rope_scaling": _LONG, "original_max_position_embeddings": 32}
    ),
    "OLMo 2": Form("olmo2", "olmo2"),
    "SmolLM3": Form("smollm3", "smollm3", {"no_rope_layers": [0, 1]}),
    "Granite": Form(
        "granite",
        "granite",
        {
            "attention_multiplier": 0.3, "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4, "logits_scaling": 2.5,
        },
    ),
}  # fmt: skip
"""Every form with proofs of all blocks, by its name in tables."""

MIXTURES: dict[str, Form] = {
    "Mixtral": Form("llama", "mixtral", {"num_local_experts": 5, "sliding_window": 3}),
    "Qwen2-MoE": Form("llama", "qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 7}),
    "Qwen3-MoE": Form("qwen3", "qwen3_moe", _EXPERTS | {"head_dim": 8, "norm_topk_prob": True}),
}
"""Forms with a router: a bound of its block needs equal routes of both kernels."""
SURE = {"Mixtral": 0, "Qwen2-MoE": 17, "Qwen3-MoE": 59}
"""Seeds of small random mixtures with stable routes in bfloat16, on rows of bench.first_hour."""

EVERY_FORM = FORMS | MIXTURES


# --- random configurations ------------------------------------------------------------------------


def random_changes(form: Form, seed: int) -> dict[str, Any]:
    """Return the fields of a random configuration of a form that differ from `SMALL`."""
    draw = random.Random(seed)
    kv, times, half = draw.choice((1, 2, 3)), draw.choice((1, 2, 3)), draw.choice((1, 2, 4))
    heads, layers = kv * times, draw.choice((1, 2, 5))
    named = {"qwen3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe"}
    width = heads * 2 * half * (draw.choice((1, 2)) if form.kind in named else 1)
    found: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": draw.randint(5, 40),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "rms_norm_eps": draw.choice((1e-6, 1e-5, 1e-2)),
        "tie_word_embeddings": draw.random() < 0.5,
    }
    if form.kind in named:
        found["head_dim"] = 2 * half
    if form.kind not in ("mistral", "qwen2", "phi3", "mixtral", "qwen2_moe"):
        found["attention_bias"] = draw.random() < 0.5
    if form.kind in ("llama", "granite", "smollm3"):
        found["mlp_bias"] = draw.random() < 0.5
    if form.kind == "smollm3":
        found["no_rope_layers"] = [draw.choice((0, 1)) for _ in range(layers)]
    if form.kind in ("qwen2", "qwen3", "smollm3"):
        found |= {"use_sliding_window": True, "sliding_window": draw.randint(1, 9)}
        found["layer_types"] = _kinds(draw, layers)
    if form.kind in ("gemma2", "gemma3_text"):
        found |= {"layer_types": _kinds(draw, layers), "sliding_window": draw.randint(1, 9)}
        found["query_pre_attn_scalar"] = draw.choice((4, 17))
    if form.kind in ("mistral", "phi3", "mixtral"):
        found["sliding_window"] = draw.choice((None, 1, 5))
    if form.kind in ("mixtral", "qwen2_moe", "qwen3_moe"):
        found |= _random_experts(draw, form.kind, layers)
    scaling = _random_scaling(draw, form.kind, half)
    return found | ({} if scaling is None else {"rope_scaling": scaling})


def _random_experts(draw: random.Random, kind: str, layers: int) -> dict[str, Any]:
    chosen = draw.randint(1, 4)
    many = {"num_experts_per_tok": chosen}
    experts = chosen + draw.randint(0, 4)
    if kind == "mixtral":
        return many | {"num_local_experts": experts}
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": draw.randint(1, 9)}
    if kind == "qwen2_moe":
        windows["layer_types"] = _kinds(draw, layers)
    return (
        many
        | windows
        | {
            "num_experts": experts,
            "moe_intermediate_size": draw.randint(3, 9),
            "norm_topk_prob": draw.random() < 0.5,
            "decoder_sparse_step": draw.choice((1, 2)),
            "mlp_only_layers": [i for i in range(layers) if draw.random() < 0.2],
        }
    )


def _kinds(draw: random.Random, layers: int) -> list[str]:
    return [draw.choice(("full_attention", "sliding_attention")) for _ in range(layers)]


def _random_scaling(draw: random.Random, kind: str, half: int) -> dict[str, Any] | None:
    if kind == "phi3":
        factors = {
            name: [draw.uniform(1, 3) for _ in range(half)]
            for name in ("short_factor", "long_factor")
        }
        return {"rope_type": "longrope"} | factors
    forms = [
        None,
        {"rope_type": "linear", "factor": draw.uniform(1, 5)},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 24,
        },
        _YARN | {"beta_fast": draw.uniform(2, 40), "truncate": draw.random() < 0.5},
        _YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
        _YARN | {"attention_factor": 1.3},
    ]  # fmt: skip
    return draw.choice(forms)


# --- models ---------------------------------------------------------------------------------------


def randomise(module: nn.Module, seed: int, scale: float = 0.3) -> None:
    """Draw every parameter from a normal distribution; gains of norms are centred at 1."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            offset = type(module.get_submodule(name.rpartition(".")[0])).__name__
            parameter.copy_(torch.randn_like(parameter) * scale + float(offset == "RMSNorm"))


def saved_model(name: str, folder: Path, seed: int = 0, **changes: Any) -> Model:
    """Write a random model of a form to a folder, and load it again."""
    form = EVERY_FORM[name]
    raw = form.saved(**changes)
    module = registry.load(form.architecture).build(raw)
    randomise(module, seed)
    weights = {k: p.detach() for k, p in module.named_parameters()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return load_model(ModelRef("model.safetensors", architecture=form.architecture), folder)


class _Float64(TorchFunctionMode):
    """Make a program that requests float32 compute in float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = {k: _widened(v) for k, v in (kwargs or {}).items()}
        return func(*map(_widened, args), **wide)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _rounded(module: nn.Module, args: Any, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Round tables of RoPE to float32, as the built-in programs do."""
    with torch._C.DisableTorchFunction():
        return tuple(table.to(torch.float32).to(torch.float64) for table in tables)


def _with_joined_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights in the layout of transformers: all experts of a layer in one tensor."""
    found, parts = dict[str, Tensor](), dict[str, dict[tuple[str, int], Tensor]]()
    for name, weight in weights.items():
        lead, experts, rest = name.partition(".experts.")
        if experts:
            number, part, _ = rest.split(".")
            parts.setdefault(lead + experts, {})[part, int(number)] = weight
        else:
            found[name] = weight
    for lead, each in parts.items():
        count = range(1 + max(number for _, number in each))
        gates = [torch.cat([each["gate_proj", i], each["up_proj", i]]) for i in count]
        found[lead + "gate_up_proj"] = torch.stack(gates)
        found[lead + "down_proj"] = torch.stack([each["down_proj", i] for i in count])
    return found


def transformers_logits(module: nn.Module, raw: Mapping[str, Any], ids: Tensor) -> Tensor:
    """Return the logits of transformers with the weights of a module, in float64.

    Also computes in float64 where the implementation requests float32. Tables are rounded to
    float32.
    """
    import transformers

    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            config = transformers.AutoConfig.for_model(**raw)
            make: Any = transformers.AutoModelForCausalLM.from_config
            program = make(config, attn_implementation="eager", dtype=torch.float64)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, buffer in program.named_buffers():
        if name.endswith("embed_scale"):
            buffer.copy_(buffer.float().double())
    for part in program.modules():
        if type(part).__name__.endswith("RotaryEmbedding"):
            part.register_forward_hook(_rounded)
    found = program.load_state_dict(_with_joined_experts(module.state_dict()), strict=False)
    missing = [key for key in found.missing_keys if key != "lm_head.weight"]
    extra = [k for k in found.unexpected_keys if "rotary" not in k]
    assert missing == extra == []
    program.tie_weights()
    if getattr(program.config, "_experts_implementation", None) is not None:
        program.set_experts_implementation("eager")
    with torch.no_grad(), _Float64():
        logits: Tensor = program.eval()(input_ids=ids, use_cache=False).logits
    return logits


def distance_from_transformers(form: Form, seed: int, **changes: Any) -> float:
    """Return the largest difference of logits between the built-in program and transformers.

    Both run in float64 with the same random weights; the result is relative to the largest logit.
    """
    raw = form.saved(**changes)
    module = registry.load(form.architecture).build(raw)
    randomise(module, seed)
    longest = min(24, module.limits[1])
    ids = torch.randint(3, raw["vocab_size"], (2, longest))
    wide = module.double().eval()
    with torch.no_grad():
        own = wide(ids)
    theirs = transformers_logits(wide, raw, ids)
    assert own.shape == theirs.shape
    return float((own - theirs).abs().max() / theirs.abs().max())


# --- proofs ---------------------------------------------------------------------------------------

TOKENS = (3, 9, 5, 17, 33)


class Proved(NamedTuple):
    """Bounds by prover and checker of a block's drift on one sequence, and the drift of an attack.

    `attack` is 0 where no attack ran.
    """

    bound: float
    rechecked: float
    attack: float


def proved(
    model: Model, block: str, infer: Mapping[str, Any], attacked: bool = False, radius: float = 0.0
) -> Proved:
    """Bound the drift of a block between float32 torch.eager and a kernel, and recheck the proof.

    Raises AssertionError if the checker rejects the proof.
    """
    first, second = resolve({"preset": "torch-eager"}), resolve(infer)
    factory = ProblemFactory(model, first, second, torch.device("cpu"))
    problem, centre = factory.problem(block, TOKENS), factory.centre(block, TOKENS)
    assert centre is not None
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    bounds = problem.bound(centre, spread)
    bound = drift_bound(bounds.output.drift, "inf")
    builder = ProofBuilder(model, block, first, second, "inf", 1)
    region = box_region("ball" if radius else "points", centre, spread)
    claim = bound * claim_margin(first, second)
    builder.add("a", problem.graph, region, claim, Proof(bounds.witness))
    outcome = recheck(builder.document(), model.checkpoint.path)
    assert outcome.ok, (outcome.reason, outcome.detail)
    worst = 0.0
    if attacked:
        worst = attack(*problem.simulators(), "inf", centre, spread).value
    return Proved(bound, float.fromhex(outcome.bound), worst)
