"""The configurations that the built-in architectures implement, key by key.

A family is one `model_type` of Hugging Face transformers. It declares each key of its config.json:
those that the forward pass reads, those with the values that the forward pass implements, and those
that do not change logits. Everything else is refused: a look-alike that has the same tensors and
one key more, such as a multiplier or layers without RoPE, is another program.

Needs no tensor library, so that `kcdsl compile` refuses what later commands would refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kcdsl.diagnostics import Refusal, codes, refuse

_INERT = frozenset({
    *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "initializer_range"),
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id"),
    *("mask_token_id", "unk_token_id", "tokenizer_class", "gradient_checkpointing"),
    *("attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    *("classifier_dropout", "id2label", "label2id", "problem_type", "task_specific_params"),
    *("finetuning_task", "num_labels", "_attn_implementation", "attn_implementation"),
    *("_attn_implementation_autoset", "model_type", "architectures"),
    # of generate(), not of the forward pass
    *("max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "num_beams"),
    *("repetition_penalty", "length_penalty", "no_repeat_ngram_size", "early_stopping"),
    *("num_return_sequences", "max_new_tokens"),
})  # fmt: skip
"""Keys of any family that change neither states nor logits of the forward pass."""

ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
"""The positive numbers that each form of RoPE scaling needs, and beside which it knows none."""
_ROPE_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True, slots=True)
class Family:
    """What one model_type may say in its config.json.

    `read` are the keys that the forward pass reads and checks itself, `only` the values of keys
    that it implements with nothing else, `needed` the keys whose default differs between families.
    """

    architecture: str
    classes: tuple[str, ...]
    read: frozenset[str]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()


_DECODER = frozenset({
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters"),
    "tie_word_embeddings",
})  # fmt: skip
_ONE_STACK: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "quantization_config": (None,),
    "pruned_heads": ({},),
    "partial_rotary_factor": (1, None),
    "tie_encoder_decoder": (False,),
}
_WINDOW = frozenset({"sliding_window", "use_sliding_window", "layer_types"})

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "llama",
        ("LlamaForCausalLM", "LlamaModel"),
        _DECODER | {"attention_bias", "mlp_bias"},
        {**_ONE_STACK, "pretraining_tp": (1,), "sliding_window": (None,)},
    ),
    "mistral": Family(
        "llama",
        ("MistralForCausalLM", "MistralModel"),
        _DECODER | {"sliding_window"},
        {**_ONE_STACK, "attention_bias": (False,), "mlp_bias": (False,)},
        needed=frozenset({"num_key_value_heads", "max_position_embeddings", "sliding_window"}),
    ),
    "qwen2": Family(
        "llama",
        ("Qwen2ForCausalLM", "Qwen2Model"),
        _DECODER | _WINDOW,
        {**_ONE_STACK, "mlp_bias": (False,), "use_mrope": (False,)},
        frozenset({"max_window_layers"}),
        frozenset({"num_key_value_heads", "max_position_embeddings"}),
    ),
    "bert": Family(
        "bert",
        (
            *("BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForTokenClassification"),
            *("BertForSequenceClassification", "BertForQuestionAnswering", "BertLMHeadModel"),
            *("BertForNextSentencePrediction", "BertForMultipleChoice"),
        ),
        frozenset({
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "hidden_act", "layer_norm_eps", "max_position_embeddings"),
            *("type_vocab_size", "position_embedding_type"),
        }),
        _ONE_STACK,
        frozenset({
            *("tie_word_embeddings", "directionality", "pooler_fc_size", "pooler_type"),
            *("pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"),
        }),
    ),
}  # fmt: skip


def family_of(architecture: str, raw: Mapping[str, Any]) -> Family:
    """Return the family of a configuration after every key was checked.

    One that states no model_type is of the family that has the name of the architecture.
    Raises Refusal (KC455) for an unknown model_type, a key that the family does not declare, and a
    value that the forward pass does not implement.
    """
    name = raw.get("model_type", architecture)
    own = [kind for kind, family in FAMILIES.items() if family.architecture == architecture]
    if name not in own:
        message = f"'model_type' is {name!r}; implemented: {', '.join(own)}"
        raise _refusal(architecture, message)
    family = FAMILIES[str(name)]
    for cls in raw.get("architectures") or ():
        if cls not in family.classes:
            raise _refusal(
                architecture,
                f"'architectures' names {cls!r}; implemented for {name}: "
                f"{', '.join(family.classes)}",
            )
    for key in sorted(family.needed - set(raw)):
        raise _refusal(architecture, f"the field {key!r} is missing, which {name} needs")
    for key, value in raw.items():
        if key in family.only:
            _one_of(architecture, key, value, family.only[key])
        elif key not in family.read | family.inert | _INERT:
            raise _refusal(
                architecture,
                f"{key!r} is no key that the architecture implements for {name}, and it may change "
                "what the model computes",
            )
    _check_rope(architecture, raw)
    return family


def _one_of(architecture: str, key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Refuse a value that is none of those implemented; true is not 1 here, nor false 0."""
    same = (value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)
    if not any(same):
        shown = ", ".join(repr(one) for one in allowed)
        raise _refusal(architecture, f"{key!r} is {value!r}; implemented: {shown}")


def _check_rope(architecture: str, raw: Mapping[str, Any]) -> None:
    """Refuse forms of RoPE, and fields of them, that the tables do not honour."""
    tables = [raw[name] for name in ("rope_parameters", "rope_scaling") if raw.get(name)]
    for table in tables:
        if not isinstance(table, Mapping):
            raise _refusal(architecture, f"the RoPE parameters are no object: {table!r}")
        kind = table.get("rope_type", table.get("type", "default"))
        if kind not in ROPE_FIELDS:
            shown = ", ".join(ROPE_FIELDS)
            raise _refusal(architecture, f"RoPE scaling {kind!r} is not implemented, only {shown}")
        if table.get("type", kind) != kind:
            raise _refusal(architecture, f"RoPE is of type {table['type']!r} and of {kind!r}")
        for key, value in table.items():
            if key == "partial_rotary_factor":
                _one_of(architecture, key, value, (1, None))
            elif key not in _ROPE_COMMON and key not in ROPE_FIELDS[str(kind)]:
                raise _refusal(architecture, f"{key!r} is no field of RoPE scaling {kind!r}")
    if len(tables) == 2 and dict(tables[0]) != dict(tables[1]):
        raise _refusal(architecture, "'rope_parameters' and 'rope_scaling' differ")
    thetas = [source["rope_theta"] for source in (raw, *tables) if "rope_theta" in source]
    if any(theta != thetas[0] for theta in thetas):
        raise _refusal(architecture, "'rope_theta' is stated twice, with two values")


def _refusal(architecture: str, message: str) -> Refusal:
    return refuse(
        codes.MODEL_CONFIG,
        f"{architecture} configuration: {message}",
        help="`architecture: hf` measures what transformers runs; to prove bounds, give the model "
        "as `module: package.module:factory`",
    )
