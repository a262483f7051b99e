"""What a step should have done, in float64 and without any wrapper or scaler."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 4
FEATURES = 8


class Net(nn.Module):
    """Four linear layers; ``head`` and ``tail`` are too narrow to give each of 4 ranks a row."""

    def __init__(self, head: int = 3, tail: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.second = nn.Linear(16, FEATURES)
        self.head = nn.Linear(FEATURES, head)
        self.tail = nn.Linear(head, tail)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.tail(torch.tanh(self.head(x)))


def loss_of(output: Tensor) -> Tensor:
    # A target far from the output keeps every gradient well away from zero, where Adam's first
    # step, g / (|g| + eps), would magnify rounding.
    return (output - 2.0).square().mean()


def batch(iteration: int, micro: int, shard: int) -> Tensor:
    """The input that one shard of the batch holds: the same on every rank that asks."""
    generator = torch.Generator().manual_seed(1000 * iteration + 100 * micro + shard)
    return torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Kind:
    """An optimizer class with its settings and one of its implementations."""

    cls: type[torch.optim.Optimizer]
    settings: Mapping[str, Any]
    implementation: Mapping[str, Any]

    def make(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        return self.cls(parameters, **self.settings, **self.implementation)


_CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}
_IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
KINDS: dict[str, Kind] = {
    f"{name} {how}": Kind(cls, settings, implementation)
    for name, (cls, settings) in _CLASSES.items()
    for how, implementation in _IMPLEMENTATIONS.items()
}
# torch refuses capturable on CPU at the step: what a user then sees is torch's own error.
KINDS["Adam capturable"] = Kind(torch.optim.Adam, {"lr": 0.01}, {"capturable": True})


class Reference:
    """The whole model in float64, trained on every shard of the batch at once.

    Args:
        parameters: name -> initial value. A name that ends in ``@r`` belongs to shard r alone, and
            its gradient is that shard's own, not the mean.
        parts: the names that each optimizer holds.
        forward: ``forward(parameters, x, shard) -> output``.
        kind: the optimizer, always run as a for-loop.
        shards: into how many shards the batch is split.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        parts: Sequence[Sequence[str]],
        forward: Callable[[Mapping[str, Tensor], Tensor, int], Tensor],
        kind: Kind,
        shards: int,
    ) -> None:
        self.parameters = {
            name: value.detach().double().clone().requires_grad_()
            for name, value in parameters.items()
        }
        self.parts = [list(part) for part in parts]
        self._forward = forward
        self._shards = shards
        self._optimizers = [
            kind.cls([self.parameters[name] for name in part], **kind.settings, foreach=False)
            for part in self.parts
        ]

    def backward(self, iteration: int, micro: int, last: float = 1.0) -> None:
        """Set every gradient, the sum over microbatches of the mean over shards.

        ``last`` multiplies the loss of the last microbatch.
        """
        for parameter in self.parameters.values():
            parameter.grad = None
        for step in range(micro):
            losses = [
                loss_of(self._forward(self.parameters, batch(iteration, step, shard), shard))
                for shard in range(self._shards)
            ]
            loss = torch.stack(losses).sum() / self._shards
            if step == micro - 1:
                loss = loss * last
            loss.backward()
        for name, parameter in self.parameters.items():
            if "@" in name and parameter.grad is not None:
                parameter.grad *= self._shards

    def largest(self, shard: int, iteration: int) -> float:
        """The largest gradient of one shard's first microbatch, before any reduction."""
        loss = loss_of(self._forward(self.parameters, batch(iteration, 0, shard), shard))
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        return max(float(gradient.abs().max()) for gradient in gradients)

    def norm(self, part: int) -> float:
        """The 2-norm of the gradients that one optimizer holds, on all ranks together."""
        gradients = [self.parameters[name].grad for name in self.parts[part]]
        return math.sqrt(sum(float(g.square().sum()) for g in gradients if g is not None))

    def clip(self, part: int, max_norm: float) -> None:
        nn.utils.clip_grad_norm_([self.parameters[name] for name in self.parts[part]], max_norm)

    def step(self, part: int) -> None:
        self._optimizers[part].step()


@dataclass
class ScaleRule:
    """torch's dynamic rule, within the bounds that distamp documents."""

    scale: float
    growth_interval: int
    tracker: int = 0

    def update(self, overflow: bool) -> None:
        scale, tracker = torch.tensor(self.scale), torch.tensor(self.tracker, dtype=torch.int32)
        found_inf = torch.tensor(float(overflow))
        torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, self.growth_interval)
        self.scale, self.tracker = scale.clamp(2.0**-24, 2.0**127).item(), int(tracker)

    def by_hand(self) -> float:
        """Another scale within the bounds, as a user might set it."""
        return self.scale / 4 if self.scale >= 1.0 else self.scale * 8
