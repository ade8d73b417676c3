"""What a recording of rollouts can hold: the roles of its columns, and its formats."""

from __future__ import annotations

ROLES = {
    "id": "what names the row; its number where there is none",
    "group": "what rows of one prompt share, such as the group of GRPO",
    "prompt": "token ids of the prompt",
    "prompt_attention": "1 where the prompt is no padding",
    "tokens": "token ids that the inference kernel sampled",
    "attention": "1 where a sampled token is no padding",
    "whole_attention": "the two together: prompt, then sampled tokens",
    "mask": "1 for tokens that count: not those of tools or users",
    "train_logs": "ln-probabilities of the sampled tokens, training kernel",
    "infer_logs": "the same, inference kernel",
    "train_top_ids": "the k likeliest tokens of each position, training kernel",
    "train_top_logs": "their ln-probabilities",
    "infer_top_ids": "the k likeliest tokens of each position, inference kernel",
    "infer_top_logs": "their ln-probabilities",
    "advantages": "the advantage of the row, or of each token",
    "train_reward": "the reward of what the training kernel wrote (per token: their sum)",
    "infer_reward": "the reward of what the inference kernel wrote (per token: their sum)",
    "train_refused": "1 where the training kernel refuses",
    "infer_refused": "1 where the inference kernel refuses",
    "train_text": "what the training kernel wrote",
    "infer_text": "what the inference kernel wrote",
    "reference": "the text that an exact match must be",
    "schema": "fields of a tool call with their types",
    "train_version": "the version of the policy that gave the ln-probabilities of train",
    "infer_version": "the version of the policy that sampled",
    "infer_version_last": "the version that sampled the last token, where it changed on the way",
    "arrived": "when the request came, seconds",
    "stamps": "when each token was given out, seconds",
    "train_routes": "chosen experts [tokens, layers, k], training kernel",
    "infer_routes": "chosen experts [tokens, layers, k], inference kernel",
    "train_router_scores": "scores of all experts [tokens, layers, experts], training kernel",
    "train_gradient": "gradient of the row on a probe of the parameters, training kernel",
    "infer_gradient": "the same from the ln-probabilities of the inference kernel",
    "cache": "layers, heads, width and bytes of one number of the cache of keys and values",
}
"""What a column of a recording can be, and what it holds."""

LOGITS = "logits"
"""The format of whole logits; each request has a tensor in a file."""
FORMATS = ("rows", "verl", "trl", LOGITS)
"""How recordings are laid out. `rows` is ours: columns are named as roles."""
