"""Which column of a recording plays which role, in each format; users override single roles."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kcdsl.ir.recordings import ROLES

_OWN = {role: role for role in ROLES}
_VERL = {
    "group": "uid",
    "prompt": "prompts",
    "tokens": "responses",
    "whole_attention": "attention_mask",
    "mask": "response_mask",
    "infer_logs": "rollout_log_probs",
    "train_logs": "old_log_probs",
    "advantages": "advantages",
    "infer_reward": "token_level_scores",
    "infer_version": "min_global_steps",
    "infer_version_last": "max_global_steps",
    "train_routes": "train_routed_experts",
    "infer_routes": "routed_experts",
}
_TRL = {
    "prompt": "prompt_ids",
    "prompt_attention": "prompt_mask",
    "tokens": "completion_ids",
    "attention": "completion_mask",
    "mask": "tool_mask",
    "infer_logs": "sampling_per_token_logps",
    "train_logs": "old_per_token_logps",
    "advantages": "advantages",
    "infer_reward": "rewards",
}
FORMATS: Mapping[str, Mapping[str, str]] = {"rows": _OWN, "verl": _VERL, "trl": _TRL}
"""The column of each role by format. `rows` is ours: columns are named as roles."""

TEXT_DUMPS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "verl": (
        ("input", "output", "score"),
        "the files of `trainer.rollout_data_dir` hold texts and scores only, no tokens and no "
        "log-probabilities; write the batch itself (docs/rollouts.md)",
    ),
    "trl": (
        ("prompt", "completion"),
        "the files of `log_completions` hold texts, rewards and advantages only, no tokens and no "
        "log-probabilities; write the batch itself (docs/rollouts.md)",
    ),
}
"""Dumps of texts, known by their columns, with what they do not hold."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """The columns of a recording by role, as far as it has them, and those that must be there."""

    columns: Mapping[str, str]
    demanded: frozenset[str]
    """Roles that the contract names a column for: one that is absent is an error."""


def mapped(format: str, overrides: Mapping[str, str]) -> Mapped:
    """Return the columns of a format with those that the user names in their place."""
    return Mapped({**FORMATS[format], **overrides}, frozenset(overrides))


def text_dump(format: str, present: Collection[str]) -> str | None:
    """Return why a file of these columns is a dump of texts, None where it is not."""
    known = TEXT_DUMPS.get(format)
    if known is None or not set(known[0]) <= set(present):
        return None
    return known[1]
