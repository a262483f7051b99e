"""The launcher's own networks: transformers over bytes and over patches of images."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn

from launch.config import Shape

__all__ = ["GPT", "Block", "ImageClassifier"]

# Names as torch's parallelize_module takes them: heads and hidden channels are divided.
_COLUMNS = ("blocks.*.qkv", "blocks.*.feed_in")
_ROWS = ("blocks.*.attention_out", "blocks.*.feed_out")


class LayerNorm(nn.LayerNorm):
    """A layer norm whose weights may be of another dtype than its input, as sharding gathers them.

    torch's takes that on a GPU alone, where autocast casts all of it to fp32.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same shape and dtype."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Block(nn.Module):
    """Attention and a feed-forward network, each added to the residual stream."""

    def __init__(self, shape: Shape, *, causal: bool) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.causal = causal
        self.dropout = shape.dropout
        self.attention_norm = LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.feed_norm = LayerNorm(shape.width)
        self.feed_in = nn.Linear(shape.width, 4 * shape.width)
        self.feed_out = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, time, _ = x.shape
        # Heads come first, so that tensor parallel gives a rank whole ones.
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, -1, 3, self.head_width)
        query, key, value = qkv.permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=self.causal
        )
        mixed = mixed.transpose(1, 2).reshape(batch, time, -1)
        x = x + F.dropout(self.attention_out(mixed), dropout)
        fed = self.feed_out(F.gelu(self.feed_in(self.feed_norm(x))))
        return x + F.dropout(fed, dropout)


class _Transformer(nn.Module):
    """A stack of blocks and a head; what a position is made of differs between the two below."""

    norms_take_half_weights = True

    def __init__(self, shape: Shape, classes: int, *, causal: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape, causal=causal) for _ in range(shape.layers))
        self.norm = LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, classes, bias=False)

    def initialise(self) -> None:
        self.apply(_init)
        # GPT-2's: what is added to the residual stream shrinks with how often that is done.
        for block in self.blocks:
            for layer in (block.attention_out, block.feed_out):
                assert isinstance(layer, nn.Linear)
                nn.init.normal_(layer.weight, std=0.02 / (2 * len(self.blocks)) ** 0.5)

    def tensor_parallel_plan(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the layers to divide by columns, and those by rows."""
        return _COLUMNS, _ROWS


class GPT(_Transformer):
    """A causal transformer that predicts each byte from those before it."""

    def __init__(self, shape: Shape, classes: int = 256) -> None:
        super().__init__(shape, classes, causal=True)
        self.bytes = nn.Embedding(classes, shape.width)
        self.places = nn.Embedding(shape.block, shape.width)
        self.initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 bytes (batch, time) to logits (batch, time, 256)."""
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ImageClassifier(_Transformer):
    """A transformer over the patches of an image, whose mean says the class.

    No convolution: on a CPU those are far slower in fp16 than matrix products.
    """

    def __init__(self, shape: Shape, image: tuple[int, int, int], classes: int) -> None:
        super().__init__(shape, classes, causal=False)
        channels, height, width = image
        self.patch = shape.patch
        self.pixels = nn.Linear(channels * shape.patch**2, shape.width)
        patches = (height // shape.patch) * (width // shape.patch)
        self.places = nn.Embedding(patches, shape.width)
        self.initialise()

    def forward(self, images: Tensor) -> Tensor:
        """Map float images (batch, channels, height, width) to logits (batch, classes)."""
        patches = F.pixel_unshuffle(images, self.patch).flatten(2).transpose(1, 2)
        x = self.pixels(patches) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(dim=1))
        return logits


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
