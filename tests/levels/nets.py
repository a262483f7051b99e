"""A small model of text and real text for it, shared by the tests in this folder."""

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
    """Return a Llama of one layer, of sizes that take no time."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes | heads | settings)
    return transformers.LlamaForCausalLM(config)


def values(module: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in module.parameters()]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)


def backward(amp: Amp, batch: tuple[Tensor, Tensor], factor: float = 1.0, **options: bool) -> float:
    """Run a forward and a backward pass as a user writes them, and return the loss."""
    context, following = batch
    with amp.autocast():
        logits = amp.model(context)
    loss = loss_of(logits, following) * factor
    amp.backward(loss, **options)
    return loss.item()


def train(amp: Amp, steps: Iterable[Any], max_norm: float | None = None) -> list[float]:
    """Take a step for each batch as a user writes it, and return the losses."""
    losses = []
    for batch in steps:
        amp.zero_grad()
        losses.append(backward(amp, batch))
        amp.step(max_norm=max_norm)
    return losses


def _wrap_with_optimizer(model: nn.Module, kind: str, policy: bool) -> tuple[Any, Any]:
    """Return a wrapped model and its Adam, which ZeRO and OSS shard."""
    settings: dict[str, Any] = {"lr": 0.01, "eps": 1e-3}
    if kind == "OSS":
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim.oss import OSS

        oss = OSS(model.parameters(), optim=torch.optim.Adam, **settings)
        return ShardedDataParallel(model, oss), oss
    if kind == "ZeRO":
        model = wrapped(model, "DDP", None, "")
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, **settings)
        return model, zero
    model = wrapped(model, kind, torch.float16 if policy else None, "")
    return model, adam(model)


def amp_in(layout: str, level: str) -> Amp:
    """Return an Amp over the net in a layout.

    Args:
        layout: A wrapper, as in ``"DDP"``. After a comma comes ``"policy"`` if the wrapper casts by
            a policy, or the name of a hook, as in ``"DDP, fp16 hook"``.
        level: The level.
    """
    kind, _, option = layout.partition(", ")
    casts_by_policy = option == "policy"
    model: Any = net(batchnorm=False)
    if not casts_by_policy:
        cast_model(model, level)
    model, optimizer = _wrap_with_optimizer(model, kind, casts_by_policy)
    settings: dict[str, Any] = {}
    if level in ("fp16", "fp16-O2"):
        settings["init_scale"] = SCALE
    if option.endswith("hook"):
        settings["comm_hook"] = option.split()[0]
    return initialize(model, optimizer, level, **settings)
