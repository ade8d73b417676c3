"""llama.cpp for tests: a GGUF file of a small llama with a byte tokenizer, and its real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_LAYER = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
_SERVE = """
import sys
import xllamacpp

found = xllamacpp.CommonParams()
found.model.path = sys.argv[1]
found.model_alias = {"tiny"}
found.hostnames = ["127.0.0.1"]
found.port = 0
found.n_ctx = 1024
found.n_parallel = 2
found.n_gpu_layers = 0
found.warmup = False
found.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
found.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
found.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
found.endpoint_props = True
found.cpuparams.n_threads = found.cpuparams_batch.n_threads = 1
if len(sys.argv) > 2:
    found.api_keys = [sys.argv[2]]
server = xllamacpp.Server(found)
print("listening", server.listening_address, flush=True)
sys.stdin.read()
"""


def write_gguf(folder: Path, path: Path, end: int = 2, **changed: Any) -> Path:
    """Write a llama of a Hugging Face folder (config.json, model.safetensors) as float32 GGUF.

    Tokens are bytes; `end` ends texts. `changed` are fields of config.json that the file states
    differently: a planted difference.
    """
    config = {**json.loads((folder / "config.json").read_text("utf-8")), **changed}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_bytes(writer, end)
    for name, tensor in load_file(folder / "model.safetensors").items():
        writer.add_tensor(*_tensor(name, tensor.astype(np.float32), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_bytes(writer: gguf.GGUFWriter, end: int) -> None:
    texts, kinds = [], []
    for byte in range(256):
        plain = 33 <= byte < 127
        space = byte == 32
        text = bytes([byte]) if plain else "▁".encode() if space else b"<0x%02X>" % byte
        texts.append(text)
        kinds.append(gguf.TokenType.NORMAL if plain or space else gguf.TokenType.BYTE)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores([0.0] * 256)
    writer.add_token_types(kinds)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(end)
    writer.add_unk_token_id(0)


def _tensor(
    name: str, tensor: NDArray[np.float32], config: Mapping[str, Any]
) -> tuple[str, NDArray[np.float32]]:
    """Return name and values as llama.cpp has them: heads of queries and keys interleaved."""
    if name in _WHOLE:
        return _WHOLE[name], tensor
    _, _, layer, rest = name.split(".", 3)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    number = next((config[field] for key, field in heads.items() if key in rest), None)
    if number is not None:
        halves = tensor.reshape(number, 2, -1, tensor.shape[1])
        tensor = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))
    return f"blk.{layer}.{_OF_LAYER[rest]}", tensor


@contextmanager
def llama_cpp_server(path: Path, key: str | None = None) -> Iterator[str]:
    """Start llama.cpp's server on a GGUF file; yield its address; end it."""
    command = [sys.executable, "-c", _SERVE, str(path), *([] if key is None else [key])]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = next((line.split()[1] for line in process.stdout if "listening" in line), None)
        assert address is not None, "the server did not start"
        yield address
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
