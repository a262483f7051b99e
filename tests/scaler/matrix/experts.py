"""Layouts in which parameters or activations have ranks of their own: experts, sequences."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import mesh, subgroup
from tests.scaler.matrix.layout import DDP, FSDP2, WORLD, World, shard_layers
from tests.scaler.matrix.reference import BATCH, Net, Reference


class _ExpertNet(Net):
    """Net and an expert in the middle, which some ranks send no tokens to."""

    def __init__(self, *widths: int, used: bool) -> None:
        super().__init__(*widths)
        self.expert = nn.Linear(8, 8)
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        if self.used:
            x = x + self.expert(x)
        return self.tail(torch.tanh(self.head(x)))


class DDPExperts(DDP):
    """DDP that ignores the experts: each rank holds its own, with its own gradients."""

    clips = False
    used: ClassVar[tuple[bool, ...]] = (True,) * 4

    def make_net(self) -> nn.Module:
        return _ExpertNet(*self.widths, used=self.used[self.rank])

    def wrap(self, net: nn.Module) -> nn.Module:
        ignored = [name for name, _ in net.named_parameters() if name.startswith("expert.")]
        experts = {name: self.initial.pop(name) for name in ignored}
        for shard in range(WORLD):
            for name, value in experts.items():
                self.initial[f"{name}@{shard}"] = value + 0.01 * shard
        with torch.no_grad():
            for parameter in net.expert.parameters():
                parameter += 0.01 * self.rank
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
        return super().wrap(net)

    def sharded(self, parameter: Tensor) -> bool:
        return any(parameter is own for own in self.net.expert.parameters())

    def parts(self) -> list[list[nn.Parameter]]:
        expert = list(self.net.expert.parameters())
        mine = {id(p) for p in expert}
        return [[p for p in self.net.parameters() if id(p) not in mine], expert]

    def part_names(self) -> list[list[str]]:
        shared = [name for name in self.initial if "@" not in name]
        return [shared, [name for name in self.initial if "@" in name]]

    def full_parameters(self) -> dict[str, Tensor]:
        values = super().full_parameters()
        return {
            f"{name}@{self.rank}" if name.startswith("expert.") else name: value
            for name, value in values.items()
        }

    def forward64(self, parameters: Mapping[str, Tensor], x: Tensor, shard: int) -> Tensor:
        mine = {
            name.split("@")[0]: value
            for name, value in parameters.items()
            if "@" not in name or name.endswith(f"@{shard}")
        }
        net = _ExpertNet(*self.widths, used=self.used[shard]).to("meta")
        return functional_call(net, mine, (x,))


class DDPIdleExperts(DDPExperts):
    """Ranks 1 and 3 send no tokens to their expert: its gradients are None there."""

    used = (True, False, True, False)


# Ranks 0 and 2 hold one expert between them, ranks 1 and 3 another.
EXPERTS = 2


class _ExpertReference(Reference):
    """The gradient of an expert is the mean over the ranks that hold it, as FSDP2 leaves it."""

    def backward(self, iteration: int, micro: int, last: float = 1.0) -> None:
        super().backward(iteration, micro, last)
        for name, parameter in self.parameters.items():
            if "@" in name and parameter.grad is not None:
                parameter.grad *= EXPERTS / WORLD


class MeshExperts(DDPExperts):
    """FSDP2 over all ranks for what is shared; each expert over the ranks that hold it.

    One optimizer holds DTensors of two meshes, and of the smaller one every rank sees a part alone.
    """

    clips = True
    reference_class = _ExpertReference

    def make_net(self) -> nn.Module:
        return _ExpertNet(*self.widths, used=True)

    def wrap(self, net: nn.Module) -> nn.Module:
        over = mesh((WORLD // EXPERTS, EXPERTS), ("expert_shard", "expert"))
        experts = {name: v for name, v in self.initial.items() if name.startswith("expert.")}
        for name, value in experts.items():
            del self.initial[name]
            for expert in range(EXPERTS):
                self.initial[f"{name}@{expert}"] = value + 0.01 * expert
        with torch.no_grad():
            for parameter in net.expert.parameters():
                parameter += 0.01 * (self.rank % EXPERTS)
        fully_shard(net.expert, mesh=over["expert_shard"])
        return shard_layers(net, mesh=mesh((WORLD,), ("shard",)))

    def accumulating(self) -> Any:
        return World.accumulating(self)

    def full_parameters(self) -> dict[str, Tensor]:
        return {
            f"{name}@{self.rank % EXPERTS}" if name.startswith("expert.") else name: value
            for name, value in World.full_parameters(self).items()
        }

    def forward64(self, parameters: Mapping[str, Tensor], x: Tensor, shard: int) -> Tensor:
        mine = {
            name.split("@")[0]: value
            for name, value in parameters.items()
            if "@" not in name or name.endswith(f"@{shard % EXPERTS}")
        }
        return functional_call(_ExpertNet(*self.widths, used=True).to("meta"), mine, (x,))


# -- context parallel ------------------------------------------------------------------------------

SEQUENCE_RANKS = 2


class _Gather(torch.autograd.Function):
    """Every rank's rows, in order; backward adds up what all ranks' outputs make of each row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.rank = group, dist.get_rank(group)
        ctx.rows = len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.rank * ctx.rows : (ctx.rank + 1) * ctx.rows], None


class _AttentionNet(Net):
    """Net in which the rows of a batch are one sequence, and attend to all of it.

    Args:
        widths: of ``head`` and ``tail``.
        group: The ranks that hold a part of the sequence each; None where this one holds all.
    """

    def __init__(self, *widths: int, group: Any = None) -> None:
        super().__init__(*widths)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        everyone = x if self.group is None else _Gather.apply(x, self.group)
        weights = torch.softmax(x @ everyone.T / x.shape[-1] ** 0.5, dim=-1)
        return self.tail(torch.tanh(self.head(x + weights @ everyone)))


class ContextParallel(FSDP2):
    """Each sequence is cut in two; parameters are sharded over sequences and their parts at once.

    Ranks 0 and 1 hold one sequence, ranks 2 and 3 another.
    """

    shards: ClassVar[int] = WORLD // SEQUENCE_RANKS

    def make_net(self) -> nn.Module:
        groups = [
            subgroup(list(range(first, first + SEQUENCE_RANKS)))
            for first in range(0, WORLD, SEQUENCE_RANKS)
        ]
        return _AttentionNet(*self.widths, group=groups[self.rank // SEQUENCE_RANKS])

    def shard_of(self, rank: int) -> int:
        return rank // SEQUENCE_RANKS

    def inputs(self, x: Tensor) -> Tensor:
        rows = BATCH // SEQUENCE_RANKS
        part = self.rank % SEQUENCE_RANKS
        return x[part * rows : (part + 1) * rows].float()

    def forward64(self, parameters: Mapping[str, Tensor], x: Tensor, shard: int) -> Tensor:
        net = _AttentionNet(*self.widths).to("meta")
        return functional_call(net, dict(parameters), (x,))
