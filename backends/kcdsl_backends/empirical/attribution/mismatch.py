"""The first operation of a block at which two kernels differ in bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kcdsl_backends.empirical.sources.kernels.run import Kernel
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel

Noted = list[tuple[str, str, Tensor]]
"""What the parts of a block took in ("enters") and gave ("leaves"), in the order of the run."""


def first_operation(train: Kernel, infer: Kernel, block: str, x: Tensor) -> str:
    """Return where a block's run on x first differs: a part of it, what comes before that part, or
    the block where its parts cannot be told apart."""
    runs = [_noted(kernel, block, x) for kernel in (train, infer)]
    if not runs[0] or [(n, w) for n, w, _ in runs[0]] != [(n, w) for n, w, _ in runs[1]]:
        return block
    before = ""
    for (name, what, a), (_, _, b) in zip(runs[0], runs[1], strict=True):
        if a.shape == b.shape and torch.equal(a, b):
            before = name
            continue
        if what == "leaves":
            return name
        return f"between {before} and {name}" if before else f"before {name}"
    return f"after {before}"


def _noted(kernel: Kernel, block: str, x: Tensor) -> Noted:
    blocks = getattr(kernel.module, "blocks", None) if isinstance(kernel, TorchKernel) else None
    if blocks is None:
        return []
    part: nn.Module = blocks()[block]
    found: Noted = []
    leaves = [(name, m) for name, m in part.named_modules() if name and not list(m.children())]
    handles = [m.register_forward_hook(_noting(name, found)) for name, m in leaves]
    try:
        kernel.block(block, x)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _noting(name: str, found: Noted) -> Any:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: object) -> None:
        for what, value in (("enters", arguments[0] if arguments else None), ("leaves", output)):
            if isinstance(value, Tensor):
                found.append((name, what, value.detach().to("cpu", torch.float64)))

    return hook
