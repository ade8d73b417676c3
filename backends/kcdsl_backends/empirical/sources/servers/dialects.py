"""The known servers: their sampling parameters, and how they identify themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any

from kcdsl.diagnostics import codes, refuse
from kcdsl.ir.kernels import LogProbabilities, Service
from kcdsl_backends.empirical.sources.servers.transport import Transport

LLAMA_CPP, VLLM, SGLANG, TENSORRT_LLM = "llama.cpp", "vLLM", "SGLang", "TensorRT-LLM"
OTHER = "another server"
_OWNERS = {"llamacpp": LLAMA_CPP, "vllm": VLLM, "sglang": SGLANG, "tensorrt_llm": TENSORRT_LLM}
"""The server for each value of `owned_by` in `/v1/models`."""

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    LLAMA_CPP: {
        "samplers": ["temperature", "top_k", "top_p", "min_p"],
        "repeat_penalty": 1.0,
        "dynatemp_range": 0.0,
        "mirostat": 0,
        "typical_p": 1.0,
        "cache_prompt": False,
        "backend_sampling": False,
    },
    VLLM: {
        "repetition_penalty": 1.0,
        "skip_special_tokens": False,
        "add_special_tokens": False,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    },
    SGLANG: {"repetition_penalty": 1.0, "skip_special_tokens": False, "return_token_ids": True},
    TENSORRT_LLM: {
        "repetition_penalty": 1.0,
        "skip_special_tokens": False,
        "add_special_tokens": False,
        "detokenize": False,
    },
    OTHER: {},
}
"""Parameters that turn off every change of the law that the contract does not state."""
_NO_TOP_K = {VLLM: -1, SGLANG: -1}
"""The value of `top_k` without truncation, if not 0."""
_LEAST_TOP = {LLAMA_CPP: 1, TENSORRT_LLM: 1}
"""The smallest `logprobs` with which a server returns any."""
_SALTED = frozenset({VLLM, SGLANG})
"""Servers that reuse the cache of a prompt only for requests with the same `cache_salt`."""
_MODES = {
    "raw_logprobs": "raw",
    "processed_logprobs": "processed",
    "raw_logits": "logits",
    "processed_logits": "logits",
}
"""vLLM's `--logprobs-mode`."""
_FACTS = ("n_vocab", "n_embd", "n_params", "size", "ftype", "n_ctx_train")
"""The fields of llama.cpp that describe a model."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity that a server states: its kind, its version, the model, facts of the model."""

    kind: str
    model: str
    version: str | None
    facts: tuple[tuple[str, object], ...] = ()

    def fact(self, name: str) -> object:
        """Return a fact; None if the server does not state it."""
        return dict(self.facts).get(name)

    def to_json(self) -> dict[str, Any]:
        """Return the record for the fingerprint."""
        return {
            "kind": self.kind,
            "model": self.model,
            "version": self.version,
            **dict(self.facts),
        }


def identify(transport: Transport, service: Service) -> Identity:
    """Ask a server for its kind, version and model.

    Refuse a server that does not list its models, one without the model of the contract, and one
    whose log-probabilities are not those of the contract.
    """
    listed = transport.get("/v1/models")
    entries = listed.get("data") if isinstance(listed, dict) else None
    given = entries if isinstance(entries, list) else []
    models = [e for e in given if isinstance(e, dict) and isinstance(e.get("id"), str)]
    if not models:
        raise refuse(
            codes.SERVER_REPLY,
            f"the server {transport.url} does not list its models (/v1/models)",
            help="give the address of an OpenAI-compatible server, without what follows /v1",
        )
    entry = _chosen(models, service, transport)
    kind = _OWNERS.get(str(entry.get("owned_by")), OTHER)
    version, facts = None, {}
    if kind == LLAMA_CPP:
        props = transport.get("/props")
        version = props.get("build_info") if isinstance(props, dict) else None
        meta = entry.get("meta")
        facts = {name: meta.get(name) for name in _FACTS} if isinstance(meta, dict) else {}
    elif kind in (VLLM, TENSORRT_LLM):
        said = transport.get("/version")
        version = said.get("version") if isinstance(said, dict) else None
        if kind == VLLM:
            _compare_mode(transport, service)
    elif kind == SGLANG:
        said = transport.get("/get_model_info")
        found = said if isinstance(said, dict) else {}
        facts = {name: found[name] for name in ("model_path", "weight_version") if name in found}
    known = {name: value for name, value in facts.items() if isinstance(value, str | int)}
    return Identity(
        kind,
        str(entry["id"]),
        version if isinstance(version, str) else None,
        tuple(sorted(known.items())),
    )


def _chosen(models: list[dict[str, Any]], service: Service, transport: Transport) -> dict[str, Any]:
    names = [str(entry["id"]) for entry in models]
    wanted = service.model
    if wanted is None and len(models) == 1:
        return models[0]
    if wanted in names:
        return models[names.index(wanted)]
    missing = "several models" if wanted is None else f"no model {wanted!r}"
    shown = [name[:80] for name in names[:10]] + (["…"] if len(names) > 10 else [])
    raise refuse(
        codes.SERVER_CHANGED,
        f"the server {transport.url} has {missing}; it has {', '.join(shown)}",
        help="name one of them as `model` of the kernel",
    )


def _compare_mode(transport: Transport, service: Service) -> None:
    """Compare vLLM's `--logprobs-mode` with the contract, if the server shows it."""
    said = transport.get("/server_info?config_format=json")
    mode = _find(said, "logprobs_mode")
    if mode is None:
        return
    found = _MODES.get(str(mode), str(mode))
    logs = service.logprobs
    same_law = replace(logs, values="raw").problem() is None
    if found == logs.values or (same_law and found in ("raw", "processed")):
        return
    raise refuse(
        codes.SERVER_SEMANTICS,
        f"the server gives {mode}, and the contract says `values: {logs.values}`",
        help=f"start it with --logprobs-mode {logs.values}_logprobs, or correct the contract",
    )


def _find(value: Any, name: str) -> object:
    """Return the first value of this name in nested objects; None if there is none."""
    if isinstance(value, dict):
        if isinstance(value.get(name), str):
            return str(value[name])
        for part in value.values():
            found = _find(part, name)
            if found is not None:
                return found
    return None


def question(
    kind: str, service: Service, model: str, prompt: list[int] | str, tokens: int, seed: int
) -> dict[str, Any]:
    """Return the body of a request: it states every parameter of the law, so that no default of the
    server counts."""
    logs = service.logprobs
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "n": 1,
        "stream": False,
        "echo": False,
        "logprobs": max(logs.top, _LEAST_TOP.get(kind, 0)),
        "temperature": float(logs.temperature),
        "top_p": float(logs.top_p),
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed,
        **_DEFAULTS[kind],
    }
    if kind != OTHER:
        body["top_k"] = logs.top_k or _NO_TOP_K.get(kind, 0)
        body["min_p"] = float(logs.min_p)
    if kind == LLAMA_CPP:
        body["post_sampling_probs"] = logs.values == "processed"
    return body


def streamed(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with a streamed answer of all tokens and, if the server can, without its
    cache of the same prompt, since a prompt is sent several times."""
    found = {**body, "stream": True}
    if kind != OTHER:
        found["ignore_eos"] = True
    if kind in _SALTED:
        found["cache_salt"] = token_hex(8)
    return found


def refuse_unsettable(kind: str, logs: LogProbabilities) -> None:
    """Refuse sampling parameters that cannot be set on a server."""
    if kind == OTHER and (logs.top_k or logs.min_p):
        raise refuse(
            codes.SERVER_SEMANTICS,
            "the server does not say which one it is, so `top_k` and `min_p` cannot be set",
            help="draw without them, or serve with vLLM, SGLang, TensorRT-LLM or llama.cpp",
        )
