"""Random modules with every operation and idiom of user code.

A module is a block on hidden states [rows, width]: a few steps, each of which keeps the shape and
the type of its input. Steps are drawn from `STEPS`; each draws its own spelling.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kcdsl.model.architecture import Model
from kcdsl.model.checkpoint.tensors import Checkpoint

Step = Callable[[Tensor], Tensor]
LONGEST = 300
INF = float("inf")


@dataclass(frozen=True, slots=True)
class Variant:
    """A random module, its input shape, and the steps it consists of."""

    seed: int
    module: Block
    rows: int
    width: int
    steps: tuple[str, ...]

    def model(self) -> Model:
        """Return a model whose block `part` is the module."""
        return model_of(self.module, self.width)


class Block(nn.Module):
    """A block whose steps are functions of its parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[Block, Tensor], Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, D]."""
        for step in self.steps:
            x = step(self, x)
        return x


class Whole(nn.Module):
    """A model with one block between an embedding and its result."""

    def __init__(self, part: nn.Module, width: int) -> None:
        super().__init__()
        drawn = torch.randn(8, width, generator=torch.Generator().manual_seed(width))
        self.table = nn.Embedding(8, width, _weight=drawn)
        self.part = part
        self.limits = (8, LONGEST)

    def forward(self, ids: Tensor) -> Tensor:
        """Return [T, D]."""
        result: Tensor = self.part(self.table(ids))
        return result

    def blocks(self) -> Mapping[str, nn.Module]:
        """Return the block."""
        return {"part": self.part}


def model_of(part: nn.Module, width: int) -> Model:
    """Return a model whose block `part` is a module on [T, width]; its checkpoint is in memory."""
    whole = Whole(part, width).eval().requires_grad_(False)
    named = dict(whole.named_parameters())
    checkpoint = Checkpoint(Path("in-memory"), "", named, {})
    return Model(whole, checkpoint, {}, {n: n for n in named}, None, False)


@dataclass(slots=True)
class Maker:
    """Draws the steps of one module: random choices, parameters and buffers."""

    draw: random.Random
    generator: torch.Generator
    block: Block
    width: int
    rows: int

    def normal(self, *shape: int, scale: float = 1.0, middle: float = 0.0) -> Tensor:
        """Return random numbers."""
        return middle + scale * torch.randn(*shape, generator=self.generator)

    def parameter(self, value: Tensor) -> str:
        """Register a parameter; return its name."""
        name = f"p{len(list(self.block.parameters()))}"
        self.block.register_parameter(name, nn.Parameter(value))
        return name

    def buffer(self, value: Tensor) -> str:
        """Register a non-persistent buffer; return its name."""
        name = f"b{len(list(self.block.buffers()))}"
        self.block.register_buffer(name, value, persistent=False)
        return name

    def heads(self) -> int:
        """Return a divisor of the width."""
        return self.draw.choice([n for n in (1, 2, 4, 8) if self.width % n == 0])

    def number(self) -> float:
        """Return a number that half-precision formats round."""
        return self.draw.choice((-3.3, 0.1, 1.7, 2.0, -0.5, 1e-3, 3.0))


Made = Callable[[Any, Tensor], Tensor]


def view(m: Maker) -> Made:
    """Exchange two dimensions, by every alias, and restore the shape."""
    heads, rows = m.heads(), m.rows
    size = m.width // heads
    turn = m.draw.choice(
        (
            lambda x: x.transpose(0, 1),
            lambda x: x.transpose(-1, -3),
            lambda x: x.swapaxes(0, -2),
            lambda x: x.swapdims(-1, 0),
            lambda x: x.permute(2, 0, 1),
            lambda x: x.permute(-1, -2, -3),
            lambda x: x.movedim(0, -1),
            lambda x: x.moveaxis((0, 1), (1, 2)),
            lambda x: x.mT,
            lambda x: x.mH,
            lambda x: torch.adjoint(x),
        )
    )
    back = m.draw.choice(
        (
            lambda x: x.reshape(rows, -1),
            lambda x: torch.unflatten(x.flatten(), 0, (rows, -1)),
            lambda x: x.contiguous().view(rows, heads * size),
        )
    )
    split = m.draw.choice(
        (lambda x: x.view(rows, heads, size), lambda x: torch.unflatten(x, -1, (heads, -1)))
    )
    return lambda s, x: back(turn(split(x)))


def splits(m: Maker) -> Made:
    """Split the last dimension, by every alias, and concatenate the parts in another order."""
    width = m.width
    cut = m.draw.choice(
        (
            lambda x: x.chunk(3, -1),
            lambda x: x.chunk(2, dim=1),
            lambda x: torch.split(x, 3, -1),
            lambda x: torch.split(x, [1, width - 1], dim=-1),
            lambda x: x.tensor_split(3, -1),
            lambda x: x.tensor_split((1, -1), dim=-1),
            lambda x: (x.narrow(-1, -1, 1), x.narrow(1, 0, width - 1)),
            lambda x: (x[:, -1:], x[:, : width - 1]),
            lambda x: (x[..., ::2], x[..., 1::2]),
            lambda x: tuple(p.unsqueeze(-1) for p in x.unbind(-1)),
            lambda x: (x.select(-1, -1)[:, None], x[:, :-1]),
        )
    )
    join = m.draw.choice((torch.cat, torch.concat, torch.concatenate))
    return lambda s, x: join(tuple(reversed(cut(x))), -1)


def repeats(m: Maker) -> Made:
    """Repeat rows or columns, and slice to the original size."""
    width = m.width
    many = m.draw.choice(
        (
            lambda x: x.repeat(1, 2)[:, 1 : width + 1],
            lambda x: x.repeat_interleave(2, dim=-1)[:, width:],
            lambda x: x.tile(3)[:, :width],
            lambda x: x[:, :, None].expand(-1, -1, 2).flatten(1)[:, ::2],
            lambda x: torch.stack((x, 2 * x), 1).reshape(-1, width)[1::2],
            lambda x: x.broadcast_to(2, *x.shape)[-1],
        )
    )
    return lambda s, x: many(x)


def scalar(m: Maker) -> Made:
    """Apply a scalar operation, in every spelling."""
    n, other = m.number(), m.number()
    return m.draw.choice(
        (
            lambda s, x: x + n,
            lambda s, x: n - x,
            lambda s, x: x - n,
            lambda s, x: x * n,
            lambda s, x: x / n,
            lambda s, x: torch.rsub(x, n),
            lambda s, x: torch.add(x, x, alpha=other),
            lambda s, x: torch.sub(x, 2 * x, alpha=2),
            lambda s, x: x * torch.tensor(n),
            lambda s, x: x + torch.tensor(n, dtype=torch.float64),
            lambda s, x: x * torch.arange(x.shape[-1]),
            lambda s, x: x * torch.tensor([True, False]).repeat(x.shape[-1])[: x.shape[-1]],
            lambda s, x: (x * n).add_(other),
            lambda s, x: torch.true_divide(-x, n),
            lambda s, x: x.square() * n,
            lambda s, x: torch.pow(x, 2) - other,
        )
    )


def buffers(m: Maker) -> Made:
    """Use a buffer or a plain tensor attribute: unchanged, converted, or of no dimensions."""
    wide = m.buffer(m.normal(LONGEST, m.width))
    row = m.buffer(m.normal(m.width))
    none = m.buffer(torch.tensor(m.number()))
    loose = m.normal(m.width)
    steps = m.buffer(torch.tensor([100.0 ** (-i / m.width) for i in range(m.width)]))

    def angles(s: Any, x: Tensor) -> Tensor:
        return torch.outer(torch.arange(x.shape[0], dtype=torch.float32), getattr(s, steps).float())

    return m.draw.choice(
        (
            lambda s, x: x * getattr(s, wide)[: x.shape[0]],
            lambda s, x: x + getattr(s, row),
            lambda s, x: x * getattr(s, none),
            lambda s, x: x - getattr(s, none),
            lambda s, x: (x * getattr(s, row).float()).to(x.dtype),
            lambda s, x: (x * loose).to(x.dtype),
            lambda s, x: x * loose.to(x.dtype),
            lambda s, x: (x * torch.arange(x.shape[0])[:, None].cos()).type_as(x),
            lambda s, x: x * angles(s, x).cos().to(x.dtype),
            lambda s, x: (x.float() * angles(s, x).sin()).to(x.dtype),
        )
    )


def casts(m: Maker) -> Made:
    """Cast to another type and back, around an operation or none."""
    n = m.number()
    other = m.draw.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64))
    return m.draw.choice(
        (
            lambda s, x: x.to(other).to(x.dtype),
            lambda s, x: (x.float() * n).to(x.dtype),
            lambda s, x: (x.to(torch.float32) + n).type_as(x),
            lambda s, x: (x.double() * n).to(dtype=x.dtype),
            lambda s, x: torch.relu(x.float()).to(x.dtype) * n,
            lambda s, x: x * 2 + (x.float() * n).to(x.dtype),
            lambda s, x: torch.softmax(x, -1, dtype=torch.float32).to(x.dtype),
            lambda s, x: (x.float() @ x.float().mT @ x.float()).to(x.dtype) / n,
        )
    )


def activation(m: Maker) -> Made:
    """Apply an activation or a gate, as one call or written out."""
    return m.draw.choice(
        (
            lambda s, x: F.silu(x),
            lambda s, x: x * torch.sigmoid(x),
            lambda s, x: x.sigmoid() * x,
            lambda s, x: (x.float() * x.float().sigmoid()).to(x.dtype),
            lambda s, x: F.gelu(x),
            lambda s, x: F.relu(x),
            lambda s, x: torch.relu(x) * x,
            lambda s, x: torch.tanh(x),
            lambda s, x: x - torch.tanh(-x),
            lambda s, x: F.dropout(x, 0.3, training=False),
            lambda s, x: torch.negative(x),
        )
    )


def norm(m: Maker) -> Made:
    """Apply a norm of torch or one written out, inside or outside of float32."""
    weight = m.parameter(m.normal(m.width, scale=0.2, middle=1.0))
    bias = m.parameter(m.normal(m.width, scale=0.2))
    eps = m.draw.choice((1e-5, 1e-6, 1e-3))
    if m.draw.random() < 0.3:
        return m.draw.choice(
            (
                lambda s, x: F.layer_norm(x, (m.width,), getattr(s, weight), getattr(s, bias), eps),
                lambda s, x: F.rms_norm(x, (m.width,), getattr(s, weight), eps),
                lambda s, x: F.layer_norm(x, (m.width,), eps=eps),
                lambda s, x: F.layer_norm(
                    x.float(), (m.width,), getattr(s, weight).float(), getattr(s, bias).float(), eps
                ).to(x.dtype),
            )
        )
    root: Callable[[Tensor, Tensor], Tensor] = m.draw.choice(
        (
            lambda c, v: c / torch.sqrt(v + eps),
            lambda c, v: c * torch.rsqrt(v + eps),
            lambda c, v: c * (v + eps).pow(-0.5),
            lambda c, v: c * (1.0 / torch.sqrt(v + eps)),
            lambda c, v: torch.rsqrt(eps + v) * c,
        )
    )
    square: Callable[[Tensor], Tensor] = m.draw.choice(
        (lambda c: c * c, lambda c: c.pow(2), torch.square)
    )
    centred, variance = m.draw.random() < 0.5, m.draw.random() < 0.3
    wide, early, biased = (m.draw.random() < 0.5 for _ in range(3))

    def written(s: Any, x: Tensor) -> Tensor:
        c = x.float() if wide else x
        if centred:
            before, c = c, c - c.mean(-1, keepdim=True)
            spread = square(c).mean(-1, keepdim=True)
            if variance:
                spread = before.var(-1, correction=0, keepdim=True)
        else:
            spread = square(c).mean(-1, keepdim=True)
        y = root(c, spread)
        y = y.to(x.dtype) if early else y
        y = y * getattr(s, weight)
        y = y + getattr(s, bias) if biased else y
        return y.to(x.dtype)

    return written


def linear(m: Maker) -> Made:
    """Multiply by a matrix, in every spelling."""
    weight = m.parameter(m.normal(m.width, m.width, scale=m.width**-0.5))
    bias = m.parameter(m.normal(m.width, scale=0.1))
    return m.draw.choice(
        (
            lambda s, x: F.linear(x, getattr(s, weight), getattr(s, bias)),
            lambda s, x: F.linear(x, getattr(s, weight)),
            lambda s, x: x @ getattr(s, weight).T,
            lambda s, x: x @ getattr(s, weight),
            lambda s, x: torch.mm(x, getattr(s, weight).t()),
            lambda s, x: torch.addmm(getattr(s, bias), x, getattr(s, weight).mT),
            lambda s, x: torch.addmm(x, x, getattr(s, weight)),
            lambda s, x: F.linear(x, getattr(s, weight) * 2.0, getattr(s, bias)),
            lambda s, x: x + F.linear(x, getattr(s, weight), getattr(s, bias)),
        )
    )


def attention(m: Maker) -> Made:
    """Apply self-attention, as one call or written out, with every kind of mask."""
    heads = m.heads()
    size = m.width // heads
    scale = m.draw.choice((None, 0.3, 1.0))
    causal = m.draw.random() < 0.5
    mask = m.draw.choice(("none", "fill", "where", "add", "least", "bias"))
    wide = m.draw.random() < 0.4
    divide = m.draw.random() < 0.5

    def split(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], heads, size).transpose(0, 1)

    def lower(x: Tensor) -> Tensor:
        return torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril()

    def one_call(s: Any, x: Tensor) -> Tensor:
        q, keep = split(x), lower(x)
        given: Any = None
        if not causal:
            given = {
                "fill": keep,
                "add": torch.zeros(keep.shape, dtype=x.dtype).masked_fill(~keep, -INF),
                "bias": torch.arange(x.shape[0]).to(x.dtype) / -8,
            }.get(mask)
        mixed = F.scaled_dot_product_attention(q, q, q, given, is_causal=causal, scale=scale)
        return mixed.transpose(0, 1).flatten(1)

    def written(s: Any, x: Tensor) -> Tensor:
        q, keep = split(x), lower(x)
        scores = q @ q.mT
        scores = scores / size**0.5 if divide else scores * (scale or size**-0.5)
        if mask == "fill":
            scores = scores.masked_fill(~keep, -INF)
        elif mask == "where":
            scores = torch.where(keep, scores, -INF)
        elif mask == "add":
            scores = scores + torch.zeros(keep.shape, dtype=x.dtype).masked_fill(~keep, -INF)
        elif mask == "least":
            scores = scores.masked_fill(~keep, torch.finfo(x.dtype).min)
        elif mask == "bias":
            scores = scores - torch.arange(x.shape[0]).to(x.dtype) / 8
        if wide:
            shares = torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype)
        else:
            shares = scores.softmax(-1)
        return (shares @ q).swapaxes(0, 1).reshape(x.shape[0], -1)

    def without_heads(s: Any, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=causal, scale=scale)

    return m.draw.choice((one_call, one_call, written, written, without_heads))


def rotation(m: Maker) -> Made:
    """Apply RoPE, with tables that are stored, converted, or computed in the forward pass."""
    half = m.width // 2
    if half * 2 != m.width:
        return scalar(m)
    steps = 100.0 ** -(torch.arange(half) / half)
    angles = torch.outer(torch.arange(LONGEST), torch.cat((steps, steps)))
    cos, sin = m.buffer(angles.cos()), m.buffer(angles.sin())
    wide, chunked = m.draw.random() < 0.4, m.draw.random() < 0.5

    def rotated(s: Any, x: Tensor) -> Tensor:
        y = x.float() if wide else x
        left, right = y.chunk(2, -1) if chunked else (y[..., :half], y[..., half:])
        turned = torch.cat((-right, left), -1)
        rows = x.shape[0]
        return (y * getattr(s, cos)[:rows] + turned * getattr(s, sin)[:rows]).to(x.dtype)

    return rotated


STEPS: dict[str, Callable[[Maker], Made]] = {
    f.__name__: f
    for f in (
        view, splits, repeats, scalar, buffers, casts, activation, norm, linear, attention, rotation
    )
}  # fmt: skip


def random_module(seed: int, widths: tuple[int, int] = (2, 64), longest: int = LONGEST) -> Variant:
    """Return a module of one to four steps, of a width in a range, for 1 to `longest` rows."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    width = draw.choice([n for n in (2, 3, 4, 6, 8, 16, 24, 32, 64) if widths[0] <= n <= widths[1]])
    rows = draw.choice([n for n in (1, 2, 3, 5, 17, 64, 300) if n <= longest])
    block = Block()
    maker = Maker(draw, generator, block, width, rows)
    names = tuple(draw.choice(list(STEPS)) for _ in range(draw.randint(1, 4)))
    block.steps = [STEPS[name](maker) for name in names]
    return Variant(seed, block, rows, width, names)
