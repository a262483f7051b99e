"""Models for comparisons of gradients, in layouts of torch and in layouts made without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from distamp.report import GradientComparison, compare_gradients
from tests.report.setups import Net

__all__ = [
    "Case",
    "ExpertNet",
    "HandNet",
    "all_reduce_grads",
    "copy_to_ranks",
    "cross_entropy",
    "gather_positions",
    "in_autocast",
    "net_case",
    "scatter_positions",
    "tokens_and_targets",
]

VOCABULARY = 32


# -- differentiable collectives, as tensor parallel libraries have them ----------------------------


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _GatherPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, dim: int, reduces: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.reduces = group, dim, reduces
        return _gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grad.contiguous()
        if ctx.reduces:
            dist.all_reduce(grad, group=ctx.group)
        return _own_chunk(grad, ctx.group, ctx.dim), None, None, None


class _ScatterPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return _own_chunk(total, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.group, ctx.dim), None, None


def _gather(x: Tensor, group: Any, dim: int) -> Tensor:
    size = dist.get_world_size(group)
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def _own_chunk(x: Tensor, group: Any, dim: int) -> Tensor:
    size = dist.get_world_size(group)
    place = dist.get_rank(group)
    return x.chunk(size, dim)[place].contiguous()


def copy_to_ranks(x: Tensor, group: Any) -> Tensor:
    """Return x; its gradient is summed over the ranks."""
    return x if group is None else _CopyToRanks.apply(x, group)


def gather_positions(x: Tensor, group: Any, dim: int = 1, reduces: bool = True) -> Tensor:
    """Concatenate the ranks' chunks; gradients are summed, and each rank gets its chunk."""
    return x if group is None else _GatherPositions.apply(x, group, dim, reduces)


def scatter_positions(x: Tensor, group: Any, dim: int = 1) -> Tensor:
    """Sum over the ranks, and return this rank's chunk."""
    return x if group is None else _ScatterPositions.apply(x, group, dim)


def all_reduce_grads(
    model: nn.Module,
    group: Any,
    matches: Callable[[str], bool],
    mean: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Sum or average the gradients of matching parameters over a group, as training code does."""
    for name, param in model.named_parameters():
        if matches(name) and param.grad is not None:
            message = param.grad.to(dtype or param.grad.dtype)
            dist.all_reduce(message, group=group)
            if mean:
                message = message / dist.get_world_size(group)
            param.grad.copy_(message)


# -- models ----------------------------------------------------------------------------------------


class HandBlock(nn.Module):
    """A feed-forward block with tensor and sequence parallel, made of plain tensors."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        ranks = 1 if group is None else dist.get_world_size(group)
        self.group = group
        self.reduces = True
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32 // ranks)
        self.down = nn.Linear(32 // ranks, 16, bias=False)
        self.bias = nn.Parameter(torch.randn(16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        whole = gather_positions(self.norm(x), self.group, reduces=self.reduces)
        hidden = torch.relu(self.up(whole))
        output = scatter_positions(self.down(hidden), self.group)
        return x + output + self.bias


class HandNet(nn.Module):
    """A model that is tensor parallel by plain tensors; positions are split between its blocks."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group = group
        self.tok = nn.Embedding(VOCABULARY, 16)
        self.gate = nn.Linear(16, 16, bias=False)
        self.blocks = nn.ModuleList([HandBlock(group), HandBlock(group)])
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of this rank's positions."""
        x = self.tok(tokens)
        x = x * torch.sigmoid(self.gate(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @staticmethod
    def is_shard(name: str) -> bool:
        """Return whether the ranks hold shards of a parameter."""
        return ".up." in name or ".down." in name

    def shard_group(self, param: Tensor) -> Any:
        """Return the group over which a parameter is sharded."""
        for name, other in self.named_parameters():
            if other is param:
                return self.group if self.is_shard(name) else None
        return None


class ExpertNet(nn.Module):
    """A mixture of experts that the ranks divide among them; tokens go to all experts."""

    def __init__(self, group: Any = None, experts: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        ranks = 1 if group is None else dist.get_world_size(group)
        self.group = group
        self.tok = nn.Embedding(VOCABULARY, 16)
        self.router = nn.Linear(16, experts)
        self.experts = nn.Module()
        local_experts = experts // ranks
        self.experts.up = nn.Parameter(torch.randn(local_experts, 16, 24) / 4)
        self.experts.down = nn.Parameter(torch.randn(local_experts, 24, 16) / 4)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens).flatten(0, 1)
        gates = gather_positions(self.router(x).softmax(-1), self.group, 0)
        local_gates = gates
        if self.group is not None:
            local_gates = gates.chunk(dist.get_world_size(self.group), 1)[dist.get_rank(self.group)]
        everything = gather_positions(x, self.group, 0)
        hidden = torch.relu(torch.einsum("td,edh->eth", everything, self.experts.up))
        outputs = torch.einsum("eth,ehd,te->td", hidden, self.experts.down, local_gates)
        x = x + scatter_positions(outputs, self.group, 0)
        logits = self.head(x)
        return logits.unflatten(0, tokens.shape)

    def shard_group(self, param: Tensor) -> Any:
        """Return the group over which an expert is sharded."""
        is_expert = param is self.experts.up or param is self.experts.down
        return self.group if is_expert else None


# -- steps -----------------------------------------------------------------------------------------


def tokens_and_targets(batch: int = 12, length: int = 8) -> tuple[Tensor, Tensor]:
    """Return a global batch."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, batch, length)
    tokens, targets = torch.randint(VOCABULARY, shape, generator=generator)
    return tokens, targets


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the loss in float32; targets of -100 are ignored."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction=reduction)


@dataclass
class Case:
    """The arguments of a comparison on one rank."""

    step: Callable[[], Any]
    model: Any
    reference_step: Callable[[], Any]
    reference: nn.Module
    settings: dict[str, Any] = field(default_factory=dict)

    def compare(self, **settings: Any) -> GradientComparison:
        """Run the comparison."""
        settings = {**self.settings, **settings}
        if dist.get_rank() > 0:
            return compare_gradients(self.step, self.model, **settings)
        return compare_gradients(
            self.step, self.model, self.reference_step, self.reference, **settings
        )


def in_autocast(region: torch.dtype | None) -> Any:
    """Return an autocast region of a dtype, which does nothing for None."""
    dtype = region or torch.bfloat16
    return torch.autocast("cpu", dtype, enabled=region is not None)


def other_weights(model: nn.Module) -> nn.Module:
    """Change the weights of a reference, which the comparison must replace."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.5)
    return model


def net_case(
    wrap: Callable[[Net], Any],
    *,
    region: torch.dtype | None = None,
    ranks: Sequence[int] | None = None,
    attends: bool = False,
    after: Callable[[Any], None] = lambda model: None,
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
) -> Case:
    """A step of `Net` over the global batch; each data parallel rank has a part.

    Args:
        wrap: Puts the model in its layout.
        region: The dtype of autocast.
        ranks: The place among the data parallel ranks, and their number; all ranks if None.
        attends: Whether the model has attention.
        after: Runs after the backward pass of the sharded model.
        loss: The loss of this rank's part.
    """
    model = wrap(Net(attends=attends))
    reference = other_weights(Net(attends=attends))
    tokens, targets = tokens_and_targets()
    place, count = ranks or (dist.get_rank(), dist.get_world_size())
    local_tokens = tokens.chunk(count)[place]
    local_targets = targets.chunk(count)[place]

    def step() -> None:
        with in_autocast(region):
            logits = model(local_tokens)
        loss(logits, local_targets).backward()
        after(model)

    def reference_step() -> None:
        with in_autocast(region):
            logits = reference(tokens)
        cross_entropy(logits, targets).backward()

    return Case(step, model, reference_step, reference)
