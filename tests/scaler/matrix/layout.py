"""What a layout is, and the plain ones: one process alone, DDP, FSDP2.

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

from tests.place import here
from tests.ranks import mesh
from tests.scaler.matrix.reference import Kind, Net, Reference, batch, loss_of

# In a rank it is how many there are, so that programs run on fewer than elsewhere.
WORLD = int(os.environ.get("WORLD_SIZE", "4"))
LAYERS = ("first", "second", "head", "tail")
# Which layers each of two optimizers holds. FSDP leaves rank 3 nothing of the second's.
HALVES = (("first", "second"), ("head", "tail"))


class Layout:
    """Base: the same whole model on every rank, with no wrapper and no group.

    Attributes:
        widths: of ``head`` and ``tail``.
        shards: into how many shards the batch is split.
        group: what ``torch.distributed`` should be: ``"default"``, or ``"none"`` for no group.
        kinds: the names of the optimizers that train on it; None for all of `KINDS`.
        init_scale: what the cells begin with; lower where gradients are float16.
        fp16_grads: what the scaler is given.
        tolerance: of parameters after a few steps, against float64; a step that is wrong is off by
            more.
        on_average: whether that is of the average and not of the largest difference: Adam's and
            Adagrad's first step is as large where a gradient is nearly zero as elsewhere, and half
            precision gets the sign of such a gradient wrong.
        norm_tolerance: of a gradient norm, relative.
        overflows_in_sum: whether gradients are summed in float16, so that finite ones can overflow.
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

    # -- what differs between layouts -----------------------------------------------------------

    def make_net(self) -> nn.Module:
        return Net(*self.widths)

    def place(self, net: nn.Module) -> nn.Module:
        return net.to(here())

    def wrap(self, net: nn.Module) -> nn.Module:
        return net

    def shard_of(self, rank: int) -> int:
        """Which shard of the batch a rank computes: its neighbours may have the same."""
        return rank * self.shards // WORLD

    def sharded(self, parameter: Tensor) -> bool:
        """Whether each rank holds another such tensor, and nothing but its user can say so."""
        return False

    def domain_of(self, rank: int) -> int:
        """Ranks of one domain train one model together, and must agree."""
        return rank

    def process_group(self) -> Any:
        """What the scaler is given."""
        return None

    def parts(self) -> list[list[nn.Parameter]]:
        """The parameters of each of two optimizers on this rank."""
        return [
            [p for name in half for p in getattr(self.net, name).parameters()] for half in HALVES
        ]

    def part_names(self) -> list[list[str]]:
        """The full names of the same, on all ranks of the domain together."""
        return [[n for n in self.initial if n.split(".")[0] in half] for half in HALVES]

    def optimizer(self, kind: Kind, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return kind.make(parameters)

    def attach(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Give the wrapper the optimizers, where it needs them."""

    def zero_grad(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()

    def inputs(self, x: Tensor) -> Tensor:
        """A batch as the model takes it."""
        return x.to(here(), torch.float32)

    def backward(self, scaler: Any, iteration: int, micro: int, factors: Sequence[float]) -> None:
        """Forward and backward of each microbatch; ``factors`` multiply this rank's losses."""
        for step in range(micro):
            with self.accumulating() if step + 1 < micro else contextlib.nullcontext():
                x = self.inputs(batch(iteration, step, self.shard_of(self.rank)))
                scaler.scale(loss_of(self.model(x).float()) * factors[step]).backward()

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def owned(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """The parameters whose gradients this rank's step reads."""
        return [p for group in optimizer.param_groups for p in group["params"]]

    def full_parameters(self) -> dict[str, Tensor]:
        """Name -> full value, of every parameter this rank holds or can gather."""
        whole = {
            name: p.full_tensor() if isinstance(p, DTensor) else p
            for name, p in self.net.named_parameters()
        }
        return {name: p.detach().cpu().clone() for name, p in whole.items()}

    def forward64(self, parameters: Mapping[str, Tensor], x: Tensor, shard: int) -> Tensor:
        return functional_call(Net(*self.widths).to("meta"), dict(parameters), (x,))

    # -- what does not --------------------------------------------------------------------------

    def reference(self, kind: Kind, optimizers: int) -> Reference:
        parts = self.part_names()
        if optimizers == 1:
            parts = [[name for part in parts for name in part]]
        return self.reference_class(self.initial, parts, self.forward64, kind, self.shards)

    def plant(self, optimizer: torch.optim.Optimizer, value: float, where: int) -> None:
        """Write ``value`` into one element of this rank's gradients, if it has any."""
        gradients = [
            local
            for p in self.owned(optimizer)
            if p.grad is not None and (local := local_values(p.grad)).numel() > 0
        ]
        if gradients:
            flat = gradients[where % len(gradients)].view(-1)
            flat[where % flat.numel()] = value


def local_values(gradient: Tensor) -> Tensor:
    """The dense storage behind a gradient on this rank."""
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
