"""A step in float64 without any wrapper or scaler, to which the steps of ranks are compared."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 4
FEATURES = 8


class Net(nn.Module):
    """Four linear layers; ``head`` and ``tail`` are too narrow to give all of 4 ranks a row."""

    def __init__(self, head: int = 3, tail: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.second = nn.Linear(16, FEATURES)
        self.head = nn.Linear(FEATURES, head)
        self.tail = nn.Linear(head, tail)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second(x))
        x = torch.tanh(self.head(x))
        return self.tail(x)


def loss_of(output: Tensor) -> Tensor:
    """Return a loss with gradients well away from zero, because its target is far away.

    Adam's first step, g / (|g| + eps), would magnify the rounding of a gradient near zero.
    """
    return (output - 2.0).square().mean()


def batch(iteration: int, micro: int, shard: int) -> Tensor:
    """Return the input of one shard of the batch, which is the same on every rank."""
    seed = 1000 * iteration + 100 * micro + shard
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Kind:
    """An optimizer class with its settings and one of its implementations."""

    cls: type[torch.optim.Optimizer]
    settings: Mapping[str, Any]
    implementation: Mapping[str, Any]

    def make(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        return self.cls(parameters, **self.settings, **self.implementation)


#: "SGD for-loop", "SGD foreach", "SGD fused", "Adam for-loop" and so on.
KINDS: dict[str, Kind] = {}


def _add_kinds(name: str, cls: type[torch.optim.Optimizer], **settings: float) -> None:
    """Add the three implementations of an optimizer class to `KINDS`."""
    KINDS[f"{name} for-loop"] = Kind(cls, settings, {"foreach": False, "fused": False})
    KINDS[f"{name} foreach"] = Kind(cls, settings, {"foreach": True})
    KINDS[f"{name} fused"] = Kind(cls, settings, {"fused": True})


_add_kinds("SGD", torch.optim.SGD, lr=0.1, momentum=0.9)
_add_kinds("Adam", torch.optim.Adam, lr=0.01)
_add_kinds("AdamW", torch.optim.AdamW, lr=0.01, weight_decay=0.1)
_add_kinds("Adagrad", torch.optim.Adagrad, lr=0.05)
# torch refuses capturable on CPU at the step, so a user sees torch's own error.
KINDS["Adam capturable"] = Kind(torch.optim.Adam, {"lr": 0.01}, {"capturable": True})


Forward = Callable[[Mapping[str, Tensor], Tensor, int], Tensor]


class Reference:
    """The whole model in float64, trained on every shard of the batch at once.

    Args:
        parameters: The initial values by name. A name with ``@r`` at its end belongs to shard r
            alone, and its gradient is not the mean over all shards.
        parts: The names of the parameters of each optimizer.
        forward: ``forward(parameters, x, shard) -> output``.
        kind: The optimizer, which always runs as a for-loop.
        shards: The number of shards of the batch.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        parts: Sequence[Sequence[str]],
        forward: Forward,
        kind: Kind,
        shards: int,
    ) -> None:
        self.parameters: dict[str, Tensor] = {}
        for name, value in parameters.items():
            copied = value.detach().double().clone()
            self.parameters[name] = copied.requires_grad_()
        self.parts = [list(part) for part in parts]
        self._forward = forward
        self._shards = shards
        self._optimizers: list[torch.optim.Optimizer] = []
        for part in range(len(self.parts)):
            params = self._params_of(part)
            self._optimizers.append(kind.cls(params, **kind.settings, foreach=False))

    def _params_of(self, part: int) -> list[Tensor]:
        return [self.parameters[name] for name in self.parts[part]]

    def backward(self, iteration: int, micro: int, last: float = 1.0) -> None:
        """Set every gradient, the sum over microbatches of the mean over shards.

        Args:
            iteration: The number of the iteration, which selects the batch.
            micro: The number of microbatches.
            last: A factor of the last microbatch's loss.
        """
        for parameter in self.parameters.values():
            parameter.grad = None
        for step in range(micro):
            losses = [self._loss(iteration, step, shard) for shard in range(self._shards)]
            loss = torch.stack(losses).sum() / self._shards
            if step == micro - 1:
                loss = loss * last
            loss.backward()
        for name, parameter in self.parameters.items():
            if "@" in name and parameter.grad is not None:
                parameter.grad *= self._shards

    def _loss(self, iteration: int, micro: int, shard: int) -> Tensor:
        inputs = batch(iteration, micro, shard)
        output = self._forward(self.parameters, inputs, shard)
        return loss_of(output)

    def largest(self, shard: int, iteration: int) -> float:
        """Return the largest gradient of one shard's first microbatch, before any reduction."""
        loss = self._loss(iteration, 0, shard)
        largest = 0.0
        for gradient in torch.autograd.grad(loss, list(self.parameters.values())):
            largest = max(largest, float(gradient.abs().max()))
        return largest

    def norm(self, part: int) -> float:
        """Return the 2-norm of one optimizer's gradients, over all ranks together."""
        total = 0.0
        for parameter in self._params_of(part):
            if parameter.grad is not None:
                total += float(parameter.grad.square().sum())
        return math.sqrt(total)

    def clip(self, part: int, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self._params_of(part), max_norm)

    def step(self, part: int) -> None:
        self._optimizers[part].step()


@dataclass
class ScaleRule:
    """torch's dynamic rule, within the bounds that distamp documents."""

    scale: float
    growth_interval: int
    tracker: int = 0

    def update(self, overflow: bool) -> None:
        scale = torch.tensor(self.scale)
        tracker = torch.tensor(self.tracker, dtype=torch.int32)
        found_inf = torch.tensor(float(overflow))
        torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, self.growth_interval)
        self.scale = scale.clamp(2.0**-24, 2.0**127).item()
        self.tracker = int(tracker)

    def by_hand(self) -> float:
        """Return another scale within the bounds, as a user might set it."""
        return self.scale / 4 if self.scale >= 1.0 else self.scale * 8
