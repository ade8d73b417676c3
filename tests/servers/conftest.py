"""A small trained llama, its training kernel, and llama.cpp's real server on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kcdsl.ir.kernels import KernelRef, LogProbabilities, Service
from kcdsl.ir.terms import ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.loader import load_model
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel, load_kernel
from kcdsl_backends.empirical.sources.servers.kernel import ServerKernel, load_server
from kcdsl_backends.empirical.sources.servers.transport import Limits
from kcdsl_backends.requests import Request, load_requests
from tests.support.llama_cpp import llama_cpp_server, write_gguf

QUICK = Limits(connect=5.0, answer=20.0, attempts=3, slow_attempts=2, pause=0.001)
Loader = Callable[..., ServerKernel]


@pytest.fixture(scope="session")
def tiny_folder(repository: Path) -> Path:
    """Return the folder of the trained byte model."""
    return repository / "examples" / "tiny_lm"


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Model:
    """Return the trained byte model."""
    return load_model(ModelRef("model.safetensors", "llama", config="config.json"), tiny_folder)


@pytest.fixture(scope="session")
def train(tiny: Model) -> TorchKernel:
    """Return its training kernel."""
    return load_kernel(KernelRef("torch.eager", ()), tiny, "cpu")


@pytest.fixture(scope="session")
def requests(tiny: Model, tiny_folder: Path) -> tuple[Request, ...]:
    """Return some of its prompts."""
    assert tiny.tokenizer_source is not None
    path = tiny_folder / "prompts.jsonl"
    return load_requests(path, "prompts.jsonl", tiny.tokenizer_source.encode, tiny.ids).requests[:8]


@pytest.fixture(scope="session")
def gguf_file(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model as a GGUF file."""
    return write_gguf(tiny_folder, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def llama_cpp(gguf_file: Path) -> Iterator[str]:
    """Return the address of llama.cpp's server, which computes in float32 throughout."""
    with llama_cpp_server(gguf_file) as address:
        yield address


@pytest.fixture
def load(tiny: Model, requests: tuple[Request, ...]) -> Loader:
    """Return a function that loads a server as the kernel of a contract."""

    def loaded(
        url: str,
        values: str = "processed",
        *,
        temperature: str = "1",
        tokens: int = 16,
        key: str | None = None,
        limits: Limits = QUICK,
        name: str | None = None,
        concurrency: int = 1,
        **more: Any,
    ) -> ServerKernel:
        logs = LogProbabilities(values, Fraction(temperature), **more)
        service = Service(url, logs, name, key, tokens, concurrency)
        reference = KernelRef("server", (), service=service)
        return load_server(reference, tiny, requests[0].tokens, limits)

    return loaded
