"""A small model of text and real text for it, shared by the tests beside this file."""

import inspect
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F  # noqa: N812

from distamp import cast_model, initialize
from distamp.levels import Amp
from tests.levels.cells import wrapped

CONTEXT = 4
SCALE = 2.0**10


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


def train(amp: Amp, given: Iterable[Any], max_norm: float | None = None) -> list[float]:
    """The losses of steps as a user writes them."""
    losses = []
    for batch in given:
        amp.zero_grad()
        losses.append(backward(amp, batch))
        amp.step(max_norm=max_norm)
    return losses


def made_in(layout: str, level: str) -> Amp:
    """A model at a level in a layout, in which its wrapper may cast by a policy of its own."""
    kind, _, more = layout.partition(", ")
    model: Any = net(batchnorm=False)
    if more != "policy":
        cast_model(model, level)
    adams: dict[str, Any] = {"lr": 0.01, "eps": 1e-3}
    if kind == "OSS":
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim.oss import OSS

        optimizer: Any = OSS(model.parameters(), optim=torch.optim.Adam, **adams)
        model = ShardedDataParallel(model, optimizer)
    elif kind == "ZeRO":
        model = wrapped(model, "DDP", None, "")
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, **adams)
    else:
        model = wrapped(model, kind, torch.float16 if more == "policy" else None, "")
        optimizer = adam(model)
    settings: dict[str, Any] = {"init_scale": SCALE} if level in ("fp16", "fp16-O2") else {}
    settings |= {"comm_hook": more.split()[0]} if "hook" in more else {}
    return initialize(model, optimizer, level, **settings)
