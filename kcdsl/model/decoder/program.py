"""A decoder: embedding, layers, final norm and head. Forward passes take ids [..., T]."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kcdsl.model.decoder.config import DecoderConfig
from kcdsl.model.decoder.experts import feed_forward
from kcdsl.model.decoder.parts import SelfAttention, norm
from kcdsl.model.decoder.rotary import Rotary


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each with its norms and its residual."""

    def __init__(self, config: DecoderConfig, number: int, rotary: Rotary | None) -> None:
        super().__init__()
        self.where = config.norms
        self.factor = config.residual_factor
        if self.where != "after":
            self.input_layernorm = norm(config, config.width)
        self.self_attn = SelfAttention(config, config.windows[number], rotary)
        self.post_attention_layernorm = norm(config, config.width)
        if self.where == "around":
            self.pre_feedforward_layernorm = norm(config, config.width)
        self.mlp = feed_forward(config, number)
        if self.where != "before":
            self.post_feedforward_layernorm = norm(config, config.width)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return [..., T, D]."""
        match self.where:
            case "before":
                x = self._added(x, self.self_attn(self.input_layernorm(x), keys))
                return self._added(x, self.mlp(self.post_attention_layernorm(x)))
            case "after":
                x = self._added(x, self.post_attention_layernorm(self.self_attn(x, keys)))
                return self._added(x, self.post_feedforward_layernorm(self.mlp(x)))
            case _:
                attended = self.self_attn(self.input_layernorm(x), keys)
                x = self._added(x, self.post_attention_layernorm(attended))
                inner = self.mlp(self.pre_feedforward_layernorm(x))
                return self._added(x, self.post_feedforward_layernorm(inner))

    def _added(self, x: Tensor, part: Tensor) -> Tensor:
        return x + part if self.factor == 1.0 else x + part * self.factor

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the sub-layers with their kinds, in the order in which they run."""
        for name, part in self.named_children():
            kind = {"self_attn": "attn", "mlp": "mlp"}.get(name, "norm")
            yield kind, part


class DecoderStack(nn.Module):
    """Embedding, layers and final norm."""

    embed_scale: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        tables = {
            rotation: Rotary(rotation, config.head_width, config.positions)
            for rotation in dict.fromkeys(config.rotations)
            if rotation is not None
        }
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, None if r is None else tables[r])
            for i, r in enumerate(config.rotations)
        )
        self.norm = norm(config, config.width)
        if config.embedding_scale is not None:
            # a buffer, so that a conversion to half precision rounds it
            scale = torch.tensor(config.embedding_scale, dtype=torch.float32)
            self.register_buffer("embed_scale", scale, persistent=False)

    def forward(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return the normalised hidden states [..., T, D]."""
        x: Tensor = self.embed_tokens(ids)
        if self.config.embedding_scale is not None:
            x = x * self.embed_scale
        if self.config.embedding_factor != 1.0:
            x = x * self.config.embedding_factor
        for layer in self.layers:
            x = layer(x, keys)
        normed: Tensor = self.norm(x)
        return normed


class LogitForm(nn.Module):
    """The division and the cap after the product of the head."""

    def __init__(self, divisor: float, cap: float | None) -> None:
        super().__init__()
        self.divisor, self.cap = divisor, cap

    def forward(self, logits: Tensor) -> Tensor:
        """Return the logits [..., T, V]."""
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


class Head(nn.Module):
    """The head: its product, followed by division and cap."""

    def __init__(self, product: nn.Module, form: nn.Module) -> None:
        super().__init__()
        self.product, self.form = product, form

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [..., T, V] of states [..., T, D]."""
        logits: Tensor = self.form(self.product(x))
        return logits


class Decoder(nn.Module):
    """A causal language model; its head is tied to the embedding if configured so."""

    encoder_only = False

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.settings = config
        self.model = DecoderStack(config)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        plain = config.logit_divisor == 1.0 and config.logit_cap is None
        self.logit_form = None if plain else LogitForm(config.logit_divisor, config.logit_cap)

    def forward(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return the logits [..., T, V] of token ids [..., T]."""
        logits: Tensor = self.lm_head(self.model(ids, keys))
        return logits if self.logit_form is None else self.logit_form(logits)

    def hidden(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return the hidden states [..., T, D] that enter the head."""
        states: Tensor = self.model(ids, keys)
        return states

    @property
    def limits(self) -> tuple[int, int]:
        """Return the vocabulary size and the longest sequence."""
        return self.settings.vocabulary, self.settings.positions

    def blocks(self) -> dict[str, nn.Module]:
        """Return every block by name, in order of application."""
        found: dict[str, nn.Module] = {}
        norms = 0
        for i, layer in enumerate(self.model.layers):
            assert isinstance(layer, DecoderLayer)
            for kind, part in layer.blocks():
                found[f"{kind}_{norms if kind == 'norm' else i}"] = part
                norms += kind == "norm"
            found[f"layer_{i}"] = layer
        found[f"norm_{norms}"] = self.model.norm
        form = self.logit_form
        found["head"] = self.lm_head if form is None else Head(self.lm_head, form)
        return found | {"model": self}

    def block_entries(self) -> dict[str, nn.Module]:
        """Return, for each block that is no module of the forward pass, the module whose input is
        the input of the block."""
        return {} if self.logit_form is None else {"head": self.lm_head}

    def block_exits(self) -> dict[str, nn.Module]:
        """Return, for each block that is no module of the forward pass, the module whose output is
        the output of the block."""
        return {} if self.logit_form is None else {"head": self.logit_form}
