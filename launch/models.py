"""The model: a byte-level GPT."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn

from launch.config import ModelConfig

__all__ = ["GPT", "decayed_groups", "init_model", "next_byte_loss"]

_BYTES = 256


class Block(nn.Module):
    """Attention and a feed-forward network, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.feed_norm = nn.LayerNorm(config.width)
        self.feed_in = nn.Linear(config.width, 4 * config.width)
        self.feed_out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, time, width)
        x = x + F.dropout(self.attention_out(mixed), dropout)
        fed = self.feed_out(F.gelu(self.feed_in(self.feed_norm(x))))
        return x + F.dropout(fed, dropout)


class GPT(nn.Module):
    """A causal transformer that predicts each byte from those before it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.bytes = nn.Embedding(_BYTES, config.width)
        self.places = nn.Embedding(config.block, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, _BYTES, bias=False)
        self.apply(_init)
        # GPT-2's: what is added to the residual stream shrinks with how often that is done.
        for block in self.blocks:
            for layer in (block.attention_out, block.feed_out):
                assert isinstance(layer, nn.Linear)
                nn.init.normal_(layer.weight, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 bytes (batch, time) to logits (batch, time, 256)."""
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats, taken in fp32 whatever the model computed in.

    An fp16 loss would round, and its seed gradient, the loss scale, would overflow at 65536.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def decayed_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Split parameters for AdamW: matrices decay, biases and norms do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def init_model(config: ModelConfig, seed: int, device: torch.device) -> GPT:
    """Build the model with weights that depend on the seed alone."""
    torch.manual_seed(seed)
    return GPT(config).to(device)
