"""Train small models under DDP on this rank, with a hook and without one."""

import contextlib
import copy
import itertools
import random
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distamp import comm_hooks
from tests.place import rank_device
from tests.ranks import mesh

__all__ = [
    "BOUNDS",
    "WIDTHS",
    "PrescribedGradients",
    "agreed",
    "errors",
    "full_gradients",
    "gradients",
    "heavy_tailed",
    "inputs",
    "mlp",
    "random_layout",
    "relative",
    "spread",
    "train_layouts",
    "wrapped",
]

# Relative L2 error of the mean of one exchange; twice rounded, so about 1.4 units of the payload.
BOUNDS = {"fp16": 4e-4, "bf16": 3e-3, "int8": 2e-2}
WIDTHS = (31, 97, 64, 5)


def mlp(*widths: int, seed: int = 0) -> nn.Module:
    """Return linear layers of these widths with a tanh between each two."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for width, next_width in itertools.pairwise(widths):
        layers.append(nn.Linear(width, next_width))
        layers.append(nn.Tanh())
    return nn.Sequential(*layers[:-1])


class PrescribedGradients(nn.Module):
    """Parameters that get the gradients which the forward pass receives.

    A parameter is not used if the forward pass receives fewer gradients than there are parameters.
    """

    def __init__(self, *shapes: int | tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        pairs = zip(self.parts, gradients, strict=False)
        losses = [(param * gradient).sum() for param, gradient in pairs]
        return torch.stack(losses).sum()


def wrapped(
    net: nn.Module, format: str | None, *, ranks_per_host: int | None = None, **settings: Any
) -> tuple[Any, Any]:
    """Return a copy of ``net`` under DDP with small buckets, and the state of its hook.

    Args:
        net: The model.
        format: The format of the hook. None registers no hook, and returns None as its state.
        ranks_per_host: The argument of the hook.
        settings: Arguments of DDP.
    """
    settings = {"bucket_cap_mb": 0.002, **settings}
    model = DistributedDataParallel(copy.deepcopy(net), **settings)
    if format is None:
        return model, None
    hook = comm_hooks.register_comm_hook(model, format, ranks_per_host=ranks_per_host)
    return model, hook


def spread(wrapper: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """Return an mlp in a wrapper, and the arguments that ``register_comm_hook`` needs for it."""
    net = mlp(*WIDTHS).to(rank_device())
    size = dist.get_world_size()
    if wrapper == "DDP":
        settings = {"bucket_cap_mb": 0.01, **settings}
        return DistributedDataParallel(net, **settings), {}
    if wrapper == "FSDP1":
        return FullyShardedDataParallel(net, device_id=rank_device(), **settings), {}
    if wrapper == "FSDP2":
        return fully_shard(net, mesh=mesh((size,), ("shard",)), **settings), {}
    # Two replicas of half of the ranks each: rank 2 of 4 is in the groups of ranks 3 and 0.
    device_mesh = mesh((2, size // 2), ("replicate", "shard"))
    if wrapper == "HSDP":
        return fully_shard(net, mesh=device_mesh), {}
    model = fully_shard(net, mesh=device_mesh["shard"])
    return model, {"replicas": device_mesh["replicate"].get_group()}


def heavy_tailed(numel: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Return values over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    magnitudes = torch.randn(numel, generator=generator).mul_(2).exp_()
    return values * magnitudes * scale


def inputs(iteration: int, width: int, rows: int = 4) -> Tensor:
    """Return the batch of this rank."""
    seed = 1000 * iteration + dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator)


def gradients(model: nn.Module) -> Tensor:
    """Return all gradients of a model in one tensor."""
    flat = []
    for param in model.parameters():
        if param.grad is not None:
            flat.append(param.grad.to_dense().flatten())
    return torch.cat(flat)


def full_gradients(model: nn.Module) -> Tensor:
    """Return all gradients of a model with shards in one tensor.

    Collective: every rank must call this.
    """
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return gradients(model)
    flat = []
    for param in model.parameters():
        grad = param.grad
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        flat.append(grad.flatten())
    return torch.cat(flat)


def relative(tensor: Tensor, exact: Tensor) -> float:
    """Return the relative L2 error of a tensor."""
    return float((tensor - exact).norm() / exact.norm())


def agreed(values: Tensor) -> bool:
    """Return whether all ranks hold the same bits.

    Collective: every rank must call this.
    """
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, values.numpy().tobytes())
    return all(data == gathered[0] for data in gathered)


def accumulate(model: Any, iteration: int, width: int, micro_batches: int) -> None:
    """Add the gradients of all micro-batches; DDP reduces in the last one."""
    model.zero_grad()
    for number in range(micro_batches):
        is_last = number + 1 == micro_batches
        with contextlib.nullcontext() if is_last else model.no_sync():
            batch = inputs(iteration + 10 * number, width)
            model(batch).square().sum().backward()


def errors(
    net: nn.Module,
    format: str,
    width: int,
    micro_batches: int = 1,
    **settings: Any,
) -> list[float]:
    """Return the relative L2 error against plain DDP in three iterations.

    The error is inf if ranks differ.
    """
    plain, _ = wrapped(net, None, **settings)
    hooked, _ = wrapped(net, format, **settings)
    errors_of_iterations = []
    for iteration in range(3):
        accumulate(plain, iteration, width, micro_batches)
        accumulate(hooked, iteration, width, micro_batches)
        compressed = gradients(hooked)
        error = relative(compressed, gradients(plain))
        if not agreed(compressed):
            error = float("inf")
        errors_of_iterations.append(error)
    return errors_of_iterations


class _PartlyTrained(nn.Module):
    """Layers, a few of them frozen, and one layer that is never used."""

    def __init__(self, net: nn.Module, frozen: Sequence[int]) -> None:
        super().__init__()
        self.net = net
        self.unused = nn.Linear(7, 9)
        for index, param in enumerate(net.parameters()):
            param.requires_grad_(index not in frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def random_layout(seed: int, size: int) -> tuple[nn.Module, int, str, dict[str, Any]]:
    """Draw a model, its width, a format, and settings of DDP and of hosts, from ``seed``."""
    draw = random.Random(seed)
    widths = [draw.randint(1, 120) for _ in range(draw.randint(2, 9))]
    net = mlp(*widths, seed=seed)
    num_params = 2 * len(widths) - 2
    host_sizes = [divisor for divisor in range(1, size + 1) if size % divisor == 0]
    cap = draw.choice([1e-4, 1e-3, 0.01, 0.05, 25])
    format = draw.choice(list(comm_hooks.COMM_FORMATS))
    settings: dict[str, Any] = {
        "find_unused_parameters": draw.random() < 0.3,
        "static_graph": draw.random() < 0.3,
        "gradient_as_bucket_view": draw.random() < 0.5,
    }
    if settings["static_graph"]:
        settings["find_unused_parameters"] = False
    if settings["find_unused_parameters"] and draw.random() < 0.7:
        frozen = draw.sample(range(num_params), draw.randrange(num_params))
        net = _PartlyTrained(net, frozen)
    settings["bucket_cap_mb"] = cap
    settings["ranks_per_host"] = draw.choice([None, *host_sizes])
    return net, widths[0], format, settings


def train_layouts(seeds: Sequence[int]) -> list[tuple[int, str, float]]:
    """Return the seed, the format and the error of each layout with wrong gradients."""
    wrong = []
    for seed in seeds:
        net, width, format, settings = random_layout(seed, dist.get_world_size())
        with warnings.catch_warnings():
            # DDP warns that no parameter is unused.
            warnings.simplefilter("ignore")
            error = max(errors(net, format, width, **settings))
        # Layers of a few elements may have twice the error; a wrong exchange has a thousand times.
        if not error <= 2 * BOUNDS[format]:
            wrong.append((seed, format, error))
    return wrong
