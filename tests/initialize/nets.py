"""A small model of text and real text for it, shared by the tests beside this file."""

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from distamp.initialize import Amp

CONTEXT = 4


class Net(nn.Module):
    """Predicts the next byte; with or without a batch norm."""

    def __init__(self, width: int = 32, batchnorm: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.hidden = nn.Linear(CONTEXT * 8, width)
        self.norm = nn.BatchNorm1d(width) if batchnorm else nn.LayerNorm(width)
        self.output = nn.Linear(width, 256)

    def forward(self, context: Tensor) -> Tensor:
        hidden = self.norm(self.hidden(self.embedding(context).flatten(1)))
        return self.output(torch.tanh(hidden))


def net(seed: int = 0, **settings: object) -> Net:
    torch.manual_seed(seed)
    return Net(**settings)  # type: ignore[arg-type]


def batches(count: int, size: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield contexts (size, CONTEXT) and the bytes that follow them, from a module's source."""
    text = torch.frombuffer(bytearray(inspect.getsource(textwrap), "utf-8"), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        starts = torch.randint(len(text) - CONTEXT, (size,), generator=generator)
        windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
        yield windows[:, :-1], windows[:, -1]


def loss_of(logits: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), following)


def llama(**settings: Any) -> Any:
    """One layer of Llama, of sizes that take no time."""
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape | heads | settings))


def values(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)


def backward(amp: Amp, batch: tuple[Tensor, Tensor], factor: float = 1.0, **options: bool) -> float:
    """Forward and backward as a user writes them; the loss."""
    with amp.autocast():
        logits = amp.model(batch[0])
    loss = loss_of(logits, batch[1]) * factor
    amp.backward(loss, **options)
    return loss.item()
