"""Train the tiny language model on corpus.txt and write model.safetensors.

    python train.py [--steps 1600] [--output model.safetensors]

A few minutes on two CPU cores. The seed is fixed; on one machine with one number of threads the
result is the same every time. The loss is printed in nats per byte; guessing gives 5.55.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from kcdsl.model.architectures.llama import build
from kcdsl.model.attention import ScaledDotProduct, use_attention
from kcdsl.model.configuration import read_config
from kcdsl.model.decoder.program import Decoder

HERE = Path(__file__).parent
WINDOW = 160
BATCH = 24
PEAK_RATE = 4e-3
WARM_UP = 100


def read_bytes(path: Path) -> Tensor:
    """Return the bytes of a file as token ids."""
    return torch.tensor(list(path.read_bytes()), dtype=torch.long)


def initialise(model: Decoder) -> None:
    """Draw all matrices from a normal distribution, smaller where they feed a residual."""
    depth = len(model.model.layers)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            narrow = name.endswith(("o_proj.weight", "down_proj.weight"))
            torch.nn.init.normal_(parameter, std=0.04 / (math.sqrt(2 * depth) if narrow else 1.0))


def rate(step: int, steps: int) -> float:
    """Return the learning rate: linear warm-up, then a cosine to a twentieth of the peak."""
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return PEAK_RATE * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def batch_loss(model: Decoder, data: Tensor, starts: Tensor) -> Tensor:
    """Return the mean loss of predicting the next byte in the windows at `starts`."""
    windows = torch.stack([data[s : s + WINDOW + 1] for s in starts.tolist()])
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Decoder, data: Tensor) -> float:
    """Return the mean loss over all whole windows of the held-out text."""
    starts = torch.arange(0, len(data) - WINDOW - 1, WINDOW)
    return float(batch_loss(model, data, starts))


def train(steps: int) -> Decoder:
    """Return the trained model in evaluation mode."""
    torch.manual_seed(20)
    data, held_out = read_bytes(HERE / "corpus.txt"), read_bytes(HERE / "held_out.txt")
    model = build(read_config(HERE / "config.json"))
    initialise(model)
    use_attention(model, ScaledDotProduct())
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.05)
    began = time.perf_counter()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate(step, steps)
        starts = torch.randint(0, len(data) - WINDOW - 1, (BATCH,))
        loss = batch_loss(model, data, starts)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 0 or step == steps - 1:
            seconds = time.perf_counter() - began
            print(
                f"step {step:5d}  loss {float(loss.detach()):.4f}"
                f"  held-out {held_out_loss(model, held_out):.4f}  {seconds:.0f} s",
                flush=True,
            )
    return model.eval()


def main() -> None:
    """Train and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--output", type=Path, default=HERE / "model.safetensors")
    options = parser.parse_args()
    model = train(options.steps)
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    temporary = options.output.with_suffix(".partial")
    save_file(tensors, temporary, metadata={"format": "pt"})
    os.replace(temporary, options.output)
    count = sum(t.numel() for t in tensors.values())
    print(f"{options.output}: {count} parameters, {options.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
