"""The base class of layouts, and the plain layouts: one process alone, DDP, FSDP2.

A layout builds the model on this rank, runs backward as a user would, plants a value in this
rank's own gradients, and gathers the full parameters. It knows nothing of scalers.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from tests.place import rank_device
from tests.ranks import mesh
from tests.scaler.matrix.reference import Kind, Net, Reference, batch, loss_of

# A rank reads the number of ranks, so that programs can run on fewer than four.
WORLD = int(os.environ.get("WORLD_SIZE", "4"))
LAYERS = ("first", "second", "head", "tail")
# The layers of two optimizers. FSDP leaves rank 3 no part of the second half.
HALVES = (("first", "second"), ("head", "tail"))


class Layout:
    """Base: the same whole model on every rank, with no wrapper and no group.

    Attributes:
        widths: The widths of ``head`` and ``tail``.
        shards: The number of shards of the batch.
        group: ``"default"`` for a default group of ``torch.distributed``, or ``"none"``.
        kinds: The names of the optimizers that train in this layout. None for all of `KINDS`.
        init_scale: The loss scale at the start of a cell. It is low if gradients are float16.
        fp16_grads: As of the scaler.
        tolerance: The largest distance of parameters from float64 after a few steps. A wrong step
            is farther away.
        on_average: Whether the tolerance is of the average instead of the largest difference. The
            first step of Adam and Adagrad is equally large if a gradient is nearly zero, and half
            precision gets the sign of such a gradient wrong.
        norm_tolerance: The relative tolerance of a gradient norm.
        overflows_in_sum: Whether gradients are summed in float16, so that the sum of finite
            gradients can overflow.
        reference_class: The class of the reference.
    """

    widths: ClassVar[tuple[int, int]] = (3, 2)
    shards: ClassVar[int] = 1
    group: ClassVar[str] = "none"
    kinds: ClassVar[tuple[str, ...] | None] = None
    init_scale: ClassVar[float] = 2.0**16
    fp16_grads: ClassVar[str] = "error"
    tolerance: ClassVar[float] = 2e-5
    on_average: ClassVar[bool] = False
    norm_tolerance: ClassVar[float] = 1e-4
    overflows_in_sum: ClassVar[bool] = False
    reference_class: ClassVar[type[Reference]] = Reference

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        torch.manual_seed(0)
        self.net = self.place(self.make_net())
        self.initial = {name: p.detach().cpu().clone() for name, p in self.net.named_parameters()}
        self.model = self.wrap(self.net)

    # -- layouts override these -----------------------------------------------------------------

    def make_net(self) -> nn.Module:
        return Net(*self.widths)

    def place(self, net: nn.Module) -> nn.Module:
        return net.to(rank_device())

    def wrap(self, net: nn.Module) -> nn.Module:
        return net

    def shard_of(self, rank: int) -> int:
        """Return the shard of the batch that a rank computes; its neighbours may share it."""
        return rank * self.shards // WORLD

    def sharded(self, parameter: Tensor) -> bool:
        """Whether every rank holds a different part of a tensor that only its user can declare."""
        return False

    def domain_of(self, rank: int) -> int:
        """Return the domain of a rank. Ranks of one domain train one model and must agree."""
        return rank

    def process_group(self) -> Any:
        """Return the group or mesh that the scaler gets."""
        return None

    def parts(self) -> list[list[nn.Parameter]]:
        """Return this rank's parameters of the first and of the second optimizer."""
        return [
            [p for name in half for p in getattr(self.net, name).parameters()] for half in HALVES
        ]

    def part_names(self) -> list[list[str]]:
        """Return the full names of both parts, on all ranks of the domain together."""
        return [[n for n in self.initial if n.split(".")[0] in half] for half in HALVES]

    def optimizer(self, kind: Kind, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return kind.make(parameters)

    def attach(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Give the wrapper the optimizers, if it needs them."""

    def zero_grad(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()

    def inputs(self, x: Tensor) -> Tensor:
        """Return a batch in the dtype and on the device of the model."""
        return x.to(rank_device(), torch.float32)

    def backward(self, scaler: Any, iteration: int, micro: int, factors: Sequence[float]) -> None:
        """Run forward and backward of each microbatch; factors multiply this rank's losses."""
        for step in range(micro):
            with self.accumulating() if step + 1 < micro else contextlib.nullcontext():
                x = self.inputs(batch(iteration, step, self.shard_of(self.rank)))
                scaler.scale(loss_of(self.model(x).float()) * factors[step]).backward()

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def owned(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Return the parameters with gradients that this rank's step reads."""
        return [p for group in optimizer.param_groups for p in group["params"]]

    def full_parameters(self) -> dict[str, Tensor]:
        """Return the full value of every parameter that this rank holds or can gather."""
        values: dict[str, Tensor] = {}
        for name, param in self.net.named_parameters():
            full = param.full_tensor() if isinstance(param, DTensor) else param
            values[name] = full.detach().cpu().clone()
        return values

    def forward64(self, parameters: Mapping[str, Tensor], x: Tensor, shard: int) -> Tensor:
        return functional_call(Net(*self.widths).to("meta"), dict(parameters), (x,))

    # -- common to all layouts ------------------------------------------------------------------

    def reference(self, kind: Kind, optimizers: int) -> Reference:
        parts = self.part_names()
        if optimizers == 1:
            parts = [[name for part in parts for name in part]]
        return self.reference_class(self.initial, parts, self.forward64, kind, self.shards)

    def plant(self, optimizer: torch.optim.Optimizer, value: float, position: int) -> None:
        """Write ``value`` into one element of this rank's gradients, if it has any."""
        gradients: list[Tensor] = []
        for param in self.owned(optimizer):
            if param.grad is not None:
                local = local_values(param.grad)
                if local.numel() > 0:
                    gradients.append(local)
        if gradients:
            flat = gradients[position % len(gradients)].view(-1)
            flat[position % flat.numel()] = value


def local_values(gradient: Tensor) -> Tensor:
    """Return the dense storage behind a gradient on this rank."""
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local._values() if local.is_sparse else local


class Alone(Layout):
    """No process group: each process trains by itself."""


class World(Layout):
    """All ranks train one model."""

    group = "default"
    shards = WORLD

    def domain_of(self, rank: int) -> int:
        return 0


class DDP(World):
    def wrap(self, net: nn.Module) -> nn.Module:
        return DistributedDataParallel(net)

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        return self.model.no_sync()


def shard_layers(net: nn.Module, **settings: Any) -> nn.Module:
    for name in LAYERS:
        fully_shard(getattr(net, name), **settings)
    return fully_shard(net, **settings)


class FSDP2(World):
    shape: ClassVar[tuple[int, ...]] = (WORLD,)
    names: ClassVar[tuple[str, ...]] = ("shard",)
    policy: ClassVar[dict[str, Any]] = {}

    def wrap(self, net: nn.Module) -> nn.Module:
        return shard_layers(net, mesh=mesh(self.shape, self.names), **self.policy)
