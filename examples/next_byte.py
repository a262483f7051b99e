"""Real text, and a small model that predicts the next byte, for all examples."""

import argparse
import inspect
import textwrap
from collections.abc import Iterator

import torch
from torch import Tensor, nn

CONTEXT = 8


class NextByte(nn.Module):
    """A two-layer perceptron over the last ``CONTEXT`` bytes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.hidden = nn.Linear(CONTEXT * 16, width)
        self.output = nn.Linear(width, 256)

    def forward(self, context: Tensor) -> Tensor:
        embedded = self.embedding(context).flatten(1)
        return self.output(torch.tanh(self.hidden(embedded)))


def batches(count: int, size: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``count`` batches of contexts (size, CONTEXT) and next bytes (size,).

    The text is the source of two modules of the standard library.
    """
    source = inspect.getsource(argparse) + inspect.getsource(textwrap)
    text = torch.frombuffer(bytearray(source, "utf-8"), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(CONTEXT + 1)
    for _ in range(count):
        starts = torch.randint(len(text) - CONTEXT, (size,), generator=generator)
        windows = text[starts[:, None] + offsets]
        yield windows[:, :-1], windows[:, -1]


def device() -> str:
    """Return the accelerator's type if there is one, else ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return "cpu"
    return accelerator.type
