"""Kernels of a contract: adapter, claimed numerics, and location."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from kcdsl.diagnostics.spans import Span

_NOWHERE = Span(0, 0)

MOST_DRAWN = 1 << 16
"""The largest number of tokens sampled after one prompt."""
DRAWN = 32
"""The default number of tokens sampled after each prompt."""
MOST_TOP = 1 << 10
"""The largest number of top log-probabilities requested from a server."""
TOP = 5
"""The default number of top log-probabilities requested from a server."""
MOST_AT_ONCE = 1 << 10
"""The largest number of concurrent requests to a server."""


def is_onnx(path: str | None) -> bool:
    """Return whether a path has the name of an ONNX file."""
    return path is not None and path.lower().endswith(".onnx")


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """The distribution of a server's log-probabilities, and its sampling parameters.

    `values`: "raw" for the softmax of the model's logits, "processed" for the distribution that
    tokens are sampled from. `top_k` 0, `top_p` 1 and `min_p` 0 mean no truncation. `top` is the
    number of top log-probabilities to request.
    """

    values: str
    temperature: Fraction = Fraction(1)
    top_p: Fraction = Fraction(1)
    top_k: int = 0
    min_p: Fraction = Fraction(0)
    top: int = TOP

    def problem(self) -> tuple[str, str, str] | None:
        """Return why tokens are not sampled from the distribution of the values: the field, the
        defect, and a way out. None where they are."""
        if self.temperature == 0 or self.top_k == 1:
            name, value = ("temperature", 0) if self.temperature == 0 else ("top_k", 1)
            return (
                name,
                f"with `{name}: {value}` the server takes the likeliest token:"
                " what it writes is no sample of its law",
                "draw with `temperature: 1`",
            )
        if self.values == "processed":
            return None
        for name, neutral in (("temperature", 1), ("top_p", 1), ("top_k", 0), ("min_p", 0)):
            value = getattr(self, name)
            if value != neutral:
                return (
                    name,
                    f"tokens are drawn with `{name}: {float(value):g}`,"
                    " and raw log-probabilities are of another law",
                    f"ask for `values: processed`, or draw with `{name}: {neutral}`",
                )
        return None


@dataclass(frozen=True, slots=True)
class Service:
    """A server: its address, its model (None: the only one), the environment variable with its key,
    the number of tokens sampled after a prompt, and the number of concurrent prompts, which it may
    batch and so round differently."""

    url: str
    logprobs: LogProbabilities
    model: str | None = None
    key: str | None = None
    tokens: int = DRAWN
    concurrency: int = 1


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded kernel: `format` is one of `kcdsl.ir.kernels.FORMATS`.

    `columns` replaces column names of the format, as sorted pairs (role, column). `file` has the
    logits of the format `logits`. `logprobs` None: the distribution of the recorded
    log-probabilities is unknown. `recomputed`: the training side was computed, not copied.
    """

    format: str = "rows"
    columns: tuple[tuple[str, str], ...] = ()
    logprobs: LogProbabilities | None = None
    file: str | None = None
    recomputed: bool = False


@dataclass(frozen=True, slots=True)
class KernelRef:
    """One kernel: the adapter that runs it and its claimed numerics (plain data, resolved by
    `kcdsl.model.presets.resolve`).

    `folder` has the model of adapters that read a folder, None for the checkpoint's folder;
    `service` is for adapters of servers, `recording` for adapters of recorded runs. `checkpoint` is
    the inference kernel's own checkpoint, relative to the contract.
    """

    run: str
    numerics: tuple[tuple[str, object], ...]
    """The numerics mapping of the document as sorted pairs; nested mappings likewise."""
    span: Span = field(default=_NOWHERE, compare=False)
    folder: str | None = None
    service: Service | None = None
    recording: Recording | None = None
    checkpoint: str | None = None

    @property
    def own_file(self) -> str | None:
        """Return the ONNX file that it runs in place of the model's program; None for others."""
        return self.checkpoint if is_onnx(self.checkpoint) else None

    @property
    def claims(self) -> bool:
        """Return whether it claims any numerics: not for a server or a recording without stated
        numerics, nor for an ONNX file of its own."""
        if self.own_file is not None:
            return False
        return (self.service is None and self.recording is None) or bool(self.numerics)


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
    "infer_kept": "ids of all tokens that the sampler kept at each position [tokens][kept]",
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
"""Roles of the columns of a recording, with descriptions."""

LOGITS = "logits"
"""The format of whole logits; each request has a tensor in a file."""
FORMATS = ("rows", "verl", "trl", "nemo-rl", "prime-rl", "skyrl", "slime", LOGITS)
"""Layouts of recordings. `rows` is kcdsl's own: columns have the names of roles."""
