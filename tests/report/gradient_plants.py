"""Forty planted wrong gradients, by which the comparison of gradients is scored.

The list was written before the comparison had run on a plant. The docstring of each plant says
which mistake the code makes. ``python -m tests.report.gradient_plants`` runs all plants and prints
a table.

A plant is found if the comparison accuses all parameters that the mistake makes wrong, and no other
parameter. It is explained if the axis, the cause and the factor of all of them are right, too.
"""

from __future__ import annotations

import contextlib
import fnmatch
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp.report import GradientComparison
from tests.ranks import RankError, RankPool, mesh
from tests.report.gradient_setups import (
    Case,
    ExpertNet,
    HandNet,
    all_reduce_grads,
    cross_entropy,
    in_autocast,
    net_case,
    other_weights,
    tokens_and_targets,
)
from tests.report.setups import BF16, Net, parallel, sharded

__all__ = [
    "PLANTS",
    "Plant",
    "Score",
    "expert_case",
    "hand_case",
    "pipeline_case",
    "run_plants",
    "score",
]

# Causes that the comparison names.
NOT_REDUCED = ("not reduced",)
COUNTED_TWICE = ("counted more than once",)
LOWER_PRECISION = ("reduced in lower precision",)
OTHER_COUNT = ("another number of tokens or micro-batches",)
FROZEN = ("frozen",)
MISSING = ("missing",)
NOT_FINITE = ("not finite",)
# A gradient alone does not show which of two causes is right.
COUNTED_TWICE_OR_OTHER_COUNT = (*COUNTED_TWICE, *OTHER_COUNT)
NOT_REDUCED_OR_OTHER_COUNT = (*NOT_REDUCED, *OTHER_COUNT)
ANY_CAUSE = (
    *NOT_REDUCED,
    *COUNTED_TWICE,
    *LOWER_PRECISION,
    *OTHER_COUNT,
    "multiplied by a factor",
)

# Patterns of the names of parameters.
ALL = ("*",)
NORMS = ("blocks.*.norm.*",)
EXPERTS = ("experts.*",)
GATE = ("gate.weight",)


@dataclass(frozen=True)
class Plant:
    """A wrong gradient, and the right answer.

    Args:
        name: The mistake in a few words.
        is_public: Whether a public thread reports the mistake.
        ranks: The number of ranks.
        wrong: Patterns of the parameters with a wrong gradient.
        factor: The factor of the reference, or None if there is no single factor.
        axis: The axis to which the cause belongs, or "" if it belongs to none.
        causes: The causes that are right.
        build: A function that returns the case on a rank.
    """

    name: str
    is_public: bool
    ranks: int
    wrong: tuple[str, ...]
    factor: float | None
    axis: str
    causes: tuple[str, ...]
    build: Callable[[], Case]


PLANTS: list[Plant] = []


def plant(
    name: str,
    *,
    wrong: tuple[str, ...],
    factor: float | None,
    axis: str,
    causes: tuple[str, ...],
    is_public: bool,
    ranks: int = 2,
) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Return a decorator that adds a function to `PLANTS`."""

    def add(build: Callable[[], Case]) -> Callable[[], Case]:
        entry = Plant(name, is_public, ranks, wrong, factor, axis, causes, build)
        PLANTS.append(entry)
        return build

    return add


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a name matches a pattern."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def matches_all(name: str) -> bool:
    """Return True for the name of each parameter."""
    return True


# Data parallel.


def ddp_case(**settings: Any) -> Case:
    """Return a case under DDP."""
    return net_case(DistributedDataParallel, **settings)


def two_microbatches_case(
    wrap: Callable[[Net], Any],
    sync_context: Callable[[Any, int], Any],
    divisor: float = 2,
) -> Case:
    """Return a case with two microbatches.

    ``sync_context`` returns the context of a microbatch from the model and the number of the
    microbatch.
    """
    case = net_case(wrap)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    tokens, targets = tokens_and_targets()
    microbatches = list(zip(tokens.chunk(2), targets.chunk(2), strict=True))

    def step() -> None:
        for number, (batch_tokens, batch_targets) in enumerate(microbatches):
            local_tokens = batch_tokens.chunk(world_size)[rank]
            local_targets = batch_targets.chunk(world_size)[rank]
            with sync_context(case.model, number):
                logits = case.model(local_tokens)
                loss = cross_entropy(logits, local_targets) / divisor
                loss.backward()

    case.step = step
    return case


def sync_always(model: Any, number: int) -> Any:
    """Return a context in which each microbatch is reduced."""
    return contextlib.nullcontext()


def no_sync_on_the_last(model: Any, number: int) -> Any:
    """Return a context in which the last microbatch is not reduced."""
    if number == 1:
        return model.no_sync()
    return contextlib.nullcontext()


def disable_sync_of_fsdp2(model: Any, number: int) -> Any:
    """Disable the reduction of the last microbatch under FSDP2."""
    is_first = number == 0
    model.set_requires_gradient_sync(is_first)
    return contextlib.nullcontext()


@plant(
    "no_sync on the last micro-batch",
    wrong=ALL,
    factor=1.0,
    axis="dp",
    causes=NOT_REDUCED,
    is_public=True,
)
def no_sync_of_ddp_on_the_last_microbatch() -> Case:
    """The last microbatch runs in no_sync, so DDP never reduces the gradients."""
    return two_microbatches_case(DistributedDataParallel, no_sync_on_the_last)


@plant(
    "a parameter that DDP ignores",
    wrong=("head.weight",),
    factor=1.0,
    axis="dp",
    causes=NOT_REDUCED,
    is_public=True,
)
def parameter_ignored_by_ddp() -> Case:
    """DDP ignores a parameter, and nobody else reduces it."""

    def wrap(net: Net) -> Any:
        ignored = ["head.weight"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
        return DistributedDataParallel(net)

    return net_case(wrap)


@plant(
    "a parameter left out of the averages",
    wrong=("blocks.1.up.bias",),
    factor=1.0,
    axis="all ranks",
    causes=NOT_REDUCED,
    is_public=True,
)
def parameter_left_out_of_averages() -> Case:
    """A loop of the user averages all gradients except a bias."""

    def is_averaged(name: str) -> bool:
        return name != "blocks.1.up.bias"

    def average(model: nn.Module) -> None:
        all_reduce_grads(model, None, is_averaged, mean=True)

    return net_case(lambda net: net, after=average)


@plant(
    "a mean of each rank's own tokens",
    wrong=ALL,
    factor=None,
    axis="dp",
    causes=OTHER_COUNT,
    is_public=True,
)
def mean_of_local_tokens() -> Case:
    """Half of the first rank's targets are padding, and each rank divides by its local count."""
    case = ddp_case()
    model = case.model
    reference = case.reference
    tokens, targets = tokens_and_targets()
    targets[:4, 2:] = -100
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    local_tokens = tokens.chunk(world_size)[rank]
    local_targets = targets.chunk(world_size)[rank]

    def step() -> None:
        loss = cross_entropy(model(local_tokens), local_targets)
        loss.backward()

    def reference_step() -> None:
        loss = cross_entropy(reference(tokens), targets)
        loss.backward()

    return Case(step, model, reference_step, reference)


@plant(
    "micro-batches that are not divided",
    wrong=ALL,
    factor=2.0,
    axis="",
    causes=OTHER_COUNT,
    is_public=True,
    ranks=3,
)
def microbatches_not_divided() -> Case:
    """The losses of two microbatches are added, and not divided by two."""
    return two_microbatches_case(DistributedDataParallel, sync_always, divisor=1)


def ddp_hook_case(hook: Any) -> Case:
    """Return a case under DDP with a communication hook."""

    def wrap(net: Net) -> Any:
        model = DistributedDataParallel(net)
        model.register_comm_hook(None, hook)
        return model

    return net_case(wrap)


def sum_bucket(state, bucket):  # DDP refuses annotations that are strings
    """Sum a bucket, and do not divide it by the number of ranks."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    def read_sum(reduced):
        (total,) = reduced.value()
        return total

    return future.then(read_sum)


def average_in_bf16(state, bucket):  # DDP refuses annotations that are strings
    """Average in bf16, like torch's bf16_compress_hook, which DDP refuses without NCCL."""
    buffer = bucket.buffer()
    compressed = buffer.to(BF16).div_(dist.get_world_size())
    future = dist.all_reduce(compressed, async_op=True).get_future()

    def decompress(reduced):
        (average,) = reduced.value()
        return buffer.copy_(average)

    return future.then(decompress)


@plant(
    "a hook that sums",
    wrong=ALL,
    factor=2.0,
    axis="dp",
    causes=COUNTED_TWICE_OR_OTHER_COUNT,
    is_public=True,
)
def hook_that_sums() -> Case:
    """A communication hook forgets the division by the number of ranks."""
    return ddp_hook_case(sum_bucket)


@plant(
    "a loss divided by the world, and DDP's mean",
    wrong=ALL,
    factor=0.5,
    axis="dp",
    causes=NOT_REDUCED_OR_OTHER_COUNT,
    is_public=True,
)
def loss_divided_by_the_world() -> Case:
    """The user divides the loss by the number of ranks, and DDP divides again."""

    def divided_loss(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets) / 2

    return ddp_case(loss=divided_loss)


@plant(
    "a bf16 hook",
    wrong=ALL,
    factor=1.0,
    axis="dp",
    causes=LOWER_PRECISION,
    is_public=True,
)
def hook_in_bf16() -> Case:
    """A communication hook averages in bf16."""
    return ddp_hook_case(average_in_bf16)


@plant(
    "a fp16 hook",
    wrong=ALL,
    factor=1.0,
    axis="dp",
    causes=LOWER_PRECISION,
    is_public=False,
)
def hook_in_fp16() -> Case:
    """The fp16_compress_hook of torch averages in fp16."""
    return ddp_hook_case(fp16_compress_hook)


@plant(
    "a loss weighted on one rank",
    wrong=ALL,
    factor=None,
    axis="dp",
    causes=OTHER_COUNT,
    is_public=False,
)
def loss_weighted_on_one_rank() -> Case:
    """Rank 1 multiplies its loss by 3."""
    weight = 1.0
    if dist.get_rank() == 1:
        weight = 3.0

    def weighted_loss(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets) * weight

    return ddp_case(loss=weighted_loss)


@plant(
    "an embedding summed again",
    wrong=("tok.weight",),
    factor=2.0,
    axis="dp",
    causes=COUNTED_TWICE,
    is_public=False,
)
def embedding_summed_again() -> Case:
    """Code for a tied embedding sums its gradient over the ranks that DDP has averaged."""

    def sum_again(model: nn.Module) -> None:
        all_reduce_grads(model, None, lambda name: "tok" in name)

    return ddp_case(after=sum_again)


@plant(
    "inf on one rank",
    wrong=("head.bias",),
    factor=None,
    axis="",
    causes=NOT_FINITE,
    is_public=False,
)
def inf_on_one_rank() -> Case:
    """An element of a gradient is inf on rank 1."""

    def write_inf(model: Any) -> None:
        if dist.get_rank() == 1:
            model.module.head.bias.grad[3] = float("inf")

    return ddp_case(after=write_inf)


# FSDP.


def fsdp2(net: Net, **policy: Any) -> Any:
    """Shard a net over all ranks with FSDP2."""
    world_size = dist.get_world_size()
    return sharded(net, mesh((world_size,), ("dp",)), **policy)


def fsdp1(net: Net, **settings: Any) -> Any:
    """Shard a net over all ranks with FSDP1."""
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(net, device_id=cpu, use_orig_params=True, **settings)


@plant(
    "FSDP2 without gradient sync on the last micro-batch",
    wrong=ALL,
    factor=None,
    axis="dp",
    causes=NOT_REDUCED,
    is_public=True,
)
def fsdp2_without_sync_on_the_last_microbatch() -> Case:
    """The user disables gradient sync for the last microbatch instead of the first."""
    return two_microbatches_case(fsdp2, disable_sync_of_fsdp2)


@plant(
    "FSDP2 that reduces in bf16",
    wrong=ALL,
    factor=1.0,
    axis="dp",
    causes=LOWER_PRECISION,
    is_public=True,
)
def fsdp2_that_reduces_in_bf16() -> Case:
    """The reduce_dtype of FSDP2 is bf16."""
    return net_case(lambda net: fsdp2(net, reduce_dtype=BF16))


@plant(
    "a block of FSDP2 that sums",
    wrong=("blocks.1.*",),
    factor=2.0,
    axis="dp",
    causes=COUNTED_TWICE,
    is_public=True,
)
def fsdp2_block_that_sums() -> Case:
    """A divide factor of 1 makes FSDP2 sum the gradients of a block."""

    def wrap(net: Net) -> Any:
        model = fsdp2(net)
        block = net.blocks[1]
        block.set_gradient_divide_factor(1.0)
        # Gloo has no sum with a factor, which torch uses otherwise.
        block.set_force_sum_reduction_for_comms(True)
        return model

    return net_case(wrap)


@plant(
    "a parameter that FSDP2 ignores",
    wrong=("head.weight",),
    factor=1.0,
    axis="dp",
    causes=NOT_REDUCED,
    is_public=True,
)
def parameter_ignored_by_fsdp2() -> Case:
    """FSDP2 ignores a parameter, and nobody else reduces it."""

    def wrap(net: Net) -> Any:
        dp = mesh((2,), ("dp",))
        for block in net.blocks:
            fully_shard(block, mesh=dp)
        return fully_shard(net, mesh=dp, ignored_params={net.head.weight})

    return net_case(wrap)


@plant(
    "HSDP whose replicas are not reduced",
    wrong=ALL,
    factor=1.0,
    axis="replicate",
    causes=NOT_REDUCED,
    is_public=True,
    ranks=4,
)
def hsdp_without_reduction_of_replicas() -> Case:
    """The all-reduce between replicas stays disabled."""

    def wrap(net: Net) -> Any:
        grid = mesh((2, 2), ("replicate", "shard"))
        model = sharded(net, grid)
        model.set_requires_all_reduce(False)
        return model

    return net_case(wrap)


@plant(
    "FSDP1 that reduces in bf16",
    wrong=ALL,
    factor=1.0,
    axis="dp",
    causes=LOWER_PRECISION,
    is_public=False,
)
def fsdp1_that_reduces_in_bf16() -> Case:
    """The reduce_dtype of FSDP1 is bf16."""
    mixed_precision = MixedPrecision(reduce_dtype=BF16)
    return net_case(lambda net: fsdp1(net, mixed_precision=mixed_precision))


@plant(
    "FSDP1 in no_sync on the last micro-batch",
    wrong=ALL,
    factor=None,
    axis="dp",
    causes=NOT_REDUCED,
    is_public=True,
)
def no_sync_of_fsdp1_on_the_last_microbatch() -> Case:
    """The last microbatch runs in no_sync, so FSDP1 never reduces its gradients."""
    return two_microbatches_case(fsdp1, no_sync_on_the_last)


# FSDP2 and tensor parallel.


def two_dimensional_case(after: Callable[[Any], None]) -> Case:
    """Return a case under FSDP2 over dp and tensor parallel over tp."""
    grid = mesh((2, 2), ("dp", "tp"))

    def wrap(net: Net) -> Any:
        return sharded(parallel(net, grid["tp"]), grid["dp"])

    dp_rank = grid.get_local_rank("dp")
    return net_case(wrap, ranks=(dp_rank, 2), after=after)


@plant(
    "a norm summed over tp again",
    wrong=("blocks.*.norm2.*",),
    factor=2.0,
    axis="tp",
    causes=COUNTED_TWICE,
    is_public=True,
    ranks=4,
)
def norm_summed_over_tp_again() -> Case:
    """A loop for sequence parallel norms sums gradients that are complete already."""

    def sum_again(model: nn.Module) -> None:
        grid = mesh((2, 2), ("dp", "tp"))
        group = grid["tp"].get_group()
        for name, param in model.named_parameters():
            if "norm2" in name:
                dist.all_reduce(param.grad.to_local(), group=group)

    return two_dimensional_case(sum_again)


@plant(
    "a sharded weight divided by its shards",
    wrong=("blocks.0.up.weight",),
    factor=0.5,
    axis="tp",
    causes=NOT_REDUCED,
    is_public=False,
    ranks=4,
)
def weight_divided_by_its_shards() -> Case:
    """The gradient of a column-parallel weight is divided by the number of its shards."""

    def divide(model: nn.Module) -> None:
        weight = model.get_parameter("blocks.0.up.weight")
        weight.grad.mul_(0.5)

    return two_dimensional_case(divide)


# Tensor and sequence parallel without DTensor.


def hand_case(
    shape: tuple[int, ...] = (2,),
    names: tuple[str, ...] = ("tp",),
    *,
    change: Callable[[HandNet], Any] = lambda model: None,
    finish: Callable[[HandNet, Any], None] | None = None,
    loss: Callable[[Tensor, Tensor, int], Tensor] | None = None,
    region: torch.dtype | None = None,
    auxiliary: Callable[[HandNet], Tensor] | None = None,
) -> Case:
    """Return a step of `HandNet` that reduces gradients over tp and then over dp.

    Args:
        shape: The shape of the mesh.
        names: The dimensions of the mesh, with "tp" among them.
        change: Changes the sharded model.
        finish: Reduces the gradients; correctly if None.
        loss: The loss of this rank's positions from logits, targets and the number of tokens of the
            data parallel rank.
        region: The dtype of autocast.
        auxiliary: A further loss of a model, which the reference has once.
    """
    grid = mesh(shape, names)
    tp = grid["tp"] if len(names) > 1 else grid
    group = tp.get_group()
    model = HandNet(group)
    reference = other_weights(HandNet())
    change(model)
    tokens, targets = tokens_and_targets()
    local_tokens = dp_chunk(grid, tokens)
    local_targets = dp_chunk(grid, targets)
    rank_tokens = position_chunk(tp, local_tokens)
    rank_targets = position_chunk(tp, local_targets)
    compute_loss = loss or share_of_loss
    reduce = finish or reduce_correctly

    def step() -> None:
        with in_autocast(region):
            logits = model(rank_tokens)
        total = compute_loss(logits, rank_targets, local_targets.numel())
        if auxiliary is not None:
            total = total + auxiliary(model)
        total.backward()
        reduce(model, grid)

    def reference_step() -> None:
        with in_autocast(region):
            logits = reference(tokens)
        total = cross_entropy(logits, targets)
        if auxiliary is not None:
            total = total + auxiliary(reference)
        total.backward()

    settings = {"shard_group_fn": model.shard_group, "mesh": grid}
    return Case(step, model, reference_step, reference, settings)


def dp_chunk(grid: Any, batch: Tensor) -> Tensor:
    """Return the part of a batch that belongs to this data parallel rank."""
    if "dp" not in grid.mesh_dim_names:
        return batch
    dp_rank = grid.get_local_rank("dp")
    return batch.chunk(grid["dp"].size())[dp_rank]


def position_chunk(axis: Any, batch: Tensor) -> Tensor:
    """Return the positions of a batch that belong to this rank of a mesh dimension."""
    return batch.chunk(axis.size(), 1)[axis.get_local_rank()]


def share_of_loss(logits: Tensor, targets: Tensor, number_of_tokens: int) -> Tensor:
    """Return the loss of this rank's positions, divided by the number of all tokens."""
    return cross_entropy(logits, targets, "sum") / number_of_tokens


def reduce_correctly(
    model: HandNet, grid: Any, is_left_out: Callable[[str], bool] = lambda name: False
) -> None:
    """Sum replicated parameters over tp, and average all parameters over dp."""
    tp = grid["tp"] if grid.ndim > 1 else grid

    def is_summed(name: str) -> bool:
        return not model.is_shard(name) and not is_left_out(name)

    all_reduce_grads(model, tp.get_group(), is_summed)
    if grid.ndim > 1:
        all_reduce_grads(model, grid["dp"].get_group(), matches_all, mean=True)


def is_gate(name: str) -> bool:
    """Return whether a parameter belongs to the gate."""
    return "gate" in name


def is_head(name: str) -> bool:
    """Return whether a parameter belongs to the head."""
    return "head" in name


def is_norm(name: str) -> bool:
    """Return whether a parameter belongs to a norm."""
    return "norm" in name


@plant(
    "norms of sequence parallel not reduced",
    wrong=NORMS,
    factor=0.5,
    axis="tp",
    causes=NOT_REDUCED,
    is_public=True,
)
def norms_not_reduced_over_tp() -> Case:
    """Nobody sums the gradients of norms over the ranks that split the positions."""

    def reduce_without_norms(model: HandNet, grid: Any) -> None:
        reduce_correctly(model, grid, lambda name: matches(name, NORMS))

    return hand_case(finish=reduce_without_norms)


@plant(
    "a gate not reduced over tp",
    wrong=GATE,
    factor=0.5,
    axis="tp",
    causes=NOT_REDUCED,
    is_public=True,
)
def gate_not_reduced_over_tp() -> Case:
    """Nobody sums the gradient of the gate over tp."""

    def reduce_without_gate(model: HandNet, grid: Any) -> None:
        reduce_correctly(model, grid, is_gate)

    return hand_case(finish=reduce_without_gate)


@plant(
    "a bias summed over tp twice",
    wrong=("blocks.0.bias",),
    factor=2.0,
    axis="tp",
    causes=COUNTED_TWICE,
    is_public=False,
)
def bias_summed_over_tp_twice() -> Case:
    """A bias is summed with the other parameters, and once more alone."""

    def reduce_bias_twice(model: HandNet, grid: Any) -> None:
        reduce_correctly(model, grid)
        all_reduce_grads(model, grid.get_group(), lambda name: name.endswith("0.bias"))

    return hand_case(finish=reduce_bias_twice)


@plant(
    "a head averaged over tp",
    wrong=("head.*",),
    factor=0.5,
    axis="tp",
    causes=NOT_REDUCED,
    is_public=False,
)
def head_averaged_over_tp() -> Case:
    """The head is averaged over tp, where it must be summed."""

    def average_head(model: HandNet, grid: Any) -> None:
        reduce_correctly(model, grid, is_head)
        all_reduce_grads(model, grid.get_group(), is_head, mean=True)

    return hand_case(finish=average_head)


@plant(
    "a loss of local positions, summed over tp",
    wrong=ALL,
    factor=2.0,
    axis="tp",
    causes=COUNTED_TWICE_OR_OTHER_COUNT,
    is_public=True,
)
def loss_of_local_positions() -> Case:
    """Each rank takes the mean over its positions, and the means are summed over tp."""

    def mean_of_positions(logits: Tensor, targets: Tensor, number_of_tokens: int) -> Tensor:
        return cross_entropy(logits, targets)

    return hand_case(loss=mean_of_positions)


@plant(
    "a gather whose backward does not reduce",
    wrong=("tok.*", "gate.*", "blocks.0.*", "blocks.1.norm.*"),
    factor=None,
    axis="tp",
    causes=ANY_CAUSE,
    is_public=True,
)
def gather_without_reduction() -> Case:
    """The gather of block 1 passes each rank the local gradient in backward, without the sum."""

    def disable_reduction(model: HandNet) -> None:
        model.blocks[1].reduces = False

    return hand_case(change=disable_reduction)


@plant(
    "a shard frozen on one rank",
    wrong=("blocks.0.up.weight",),
    factor=None,
    axis="tp",
    causes=FROZEN,
    is_public=True,
)
def shard_frozen_on_one_rank() -> Case:
    """Rank 1 does not train its shard of a weight."""

    def freeze_on_rank_1(model: HandNet) -> None:
        if dist.get_rank() == 1:
            model.blocks[0].up.weight.requires_grad_(False)

    return hand_case(change=freeze_on_rank_1)


@plant(
    "a shard detached on one rank",
    wrong=("blocks.1.down.weight",),
    factor=None,
    axis="tp",
    causes=MISSING,
    is_public=False,
)
def shard_detached_on_one_rank() -> Case:
    """Rank 1 detaches its shard of a weight in the forward pass."""

    def detach_on_rank_1(model: HandNet) -> None:
        if dist.get_rank() == 1:
            down = model.blocks[1].down
            down.forward = lambda x: nn.functional.linear(x, down.weight.detach())

    return hand_case(change=detach_on_rank_1)


def dp_tp_case(finish: Callable[[HandNet, Any], None]) -> Case:
    """Return a case of `HandNet` over dp and tp."""
    return hand_case((2, 2), ("dp", "tp"), finish=finish)


@plant(
    "a gate not reduced over dp",
    wrong=GATE,
    factor=1.0,
    axis="dp",
    causes=NOT_REDUCED,
    is_public=True,
    ranks=4,
)
def gate_not_reduced_over_dp() -> Case:
    """The gate is summed over tp, but not averaged over dp."""

    def reduce_gate_over_tp(model: HandNet, grid: Any) -> None:
        tp_group = grid["tp"].get_group()
        dp_group = grid["dp"].get_group()
        all_reduce_grads(model, tp_group, lambda name: not model.is_shard(name))
        all_reduce_grads(model, dp_group, lambda name: not is_gate(name), mean=True)

    return dp_tp_case(reduce_gate_over_tp)


@plant(
    "a gate not reduced over dp and tp",
    wrong=GATE,
    factor=0.5,
    axis="dp and tp",
    causes=NOT_REDUCED,
    is_public=True,
    ranks=4,
)
def gate_not_reduced_over_dp_and_tp() -> Case:
    """Nobody reduces the gate."""

    def reduce_without_gate(model: HandNet, grid: Any) -> None:
        tp_group = grid["tp"].get_group()
        dp_group = grid["dp"].get_group()

        def is_summed(name: str) -> bool:
            return not model.is_shard(name) and not is_gate(name)

        all_reduce_grads(model, tp_group, is_summed)
        all_reduce_grads(model, dp_group, lambda name: not is_gate(name), mean=True)

    return dp_tp_case(reduce_without_gate)


@plant(
    "a gate averaged over the world",
    wrong=GATE,
    factor=0.5,
    axis="tp",
    causes=NOT_REDUCED,
    is_public=True,
    ranks=4,
)
def gate_averaged_over_the_world() -> Case:
    """The gate is averaged over all ranks, where it must be summed over tp."""

    def average_gate(model: HandNet, grid: Any) -> None:
        reduce_correctly(model, grid, is_gate)
        # The gate is averaged over dp already, so only the mean over tp is wrong.
        all_reduce_grads(model, None, is_gate, mean=True)

    return dp_tp_case(average_gate)


@plant(
    "an auxiliary loss times tp",
    wrong=GATE,
    factor=None,
    axis="tp",
    causes=ANY_CAUSE,
    is_public=True,
)
def auxiliary_loss_on_each_tp_rank() -> Case:
    """Every tensor parallel rank computes the whole z-loss of the gate, and the sum counts both."""

    def router_loss(model: HandNet) -> Tensor:
        return model.gate.weight.square().sum() / 50

    return hand_case(auxiliary=router_loss)


@plant(
    "norms reduced in bf16 over tp",
    wrong=NORMS,
    factor=1.0,
    axis="tp",
    causes=LOWER_PRECISION,
    is_public=True,
)
def norms_reduced_in_bf16() -> Case:
    """The gradients of norms are summed over tp in bf16."""

    def reduce_norms_in_bf16(model: HandNet, grid: Any) -> None:
        reduce_correctly(model, grid, is_norm)
        all_reduce_grads(model, grid.get_group(), is_norm, dtype=BF16)

    return hand_case(finish=reduce_norms_in_bf16)


# Experts.


def expert_case(
    finish: Callable[[ExpertNet, Any], None] | None = None,
    *,
    ranks: int = 2,
    region: torch.dtype | None = None,
) -> Case:
    """Return a step of `ExpertNet`; each rank has other experts and other tokens."""
    grid = mesh((ranks,), ("ep",))
    group = grid.get_group()
    model = ExpertNet(group)
    reference = other_weights(ExpertNet())
    tokens, targets = tokens_and_targets()
    rank = dist.get_rank()
    local_tokens = tokens.chunk(ranks)[rank]
    local_targets = targets.chunk(ranks)[rank]
    reduce = finish or reduce_experts_correctly

    def step() -> None:
        with in_autocast(region):
            logits = model(local_tokens)
        loss = cross_entropy(logits, local_targets)
        loss.backward()
        reduce(model, group)

    def reference_step() -> None:
        with in_autocast(region):
            logits = reference(tokens)
        loss = cross_entropy(logits, targets)
        loss.backward()

    settings = {"shard_group_fn": model.shard_group, "mesh": grid}
    return Case(step, model, reference_step, reference, settings)


def is_expert(name: str) -> bool:
    """Return whether a parameter belongs to an expert."""
    return "experts" in name


def reduce_experts_correctly(
    model: ExpertNet,
    group: Any,
    divisor: float | None = None,
    is_left_out: Callable[[str], bool] = lambda name: False,
) -> None:
    """Average all parameters except experts over the ranks, and divide the experts.

    An expert has the tokens of all ranks, so its gradient is the sum over the ranks already.
    """

    def is_averaged(name: str) -> bool:
        return not is_expert(name) and not is_left_out(name)

    all_reduce_grads(model, group, is_averaged, mean=True)
    if divisor is None:
        divisor = dist.get_world_size(group)
    for name, param in model.named_parameters():
        if is_expert(name):
            param.grad.div_(divisor)


@plant(
    "experts not divided by the ranks",
    wrong=EXPERTS,
    factor=2.0,
    axis="ep",
    causes=COUNTED_TWICE,
    is_public=True,
)
def experts_not_divided() -> Case:
    """The gradients of experts stay sums over the ranks."""

    def reduce_without_division(model: ExpertNet, group: Any) -> None:
        reduce_experts_correctly(model, group, divisor=1.0)

    return expert_case(reduce_without_division)


@plant(
    "experts divided twice",
    wrong=EXPERTS,
    factor=0.5,
    axis="ep",
    causes=NOT_REDUCED,
    is_public=True,
)
def experts_divided_twice() -> Case:
    """The gradients of experts are divided by the square of the number of ranks."""

    def reduce_with_two_divisions(model: ExpertNet, group: Any) -> None:
        reduce_experts_correctly(model, group, divisor=4.0)

    return expert_case(reduce_with_two_divisions)


@plant(
    "experts averaged as replicas",
    wrong=EXPERTS,
    factor=None,
    axis="ep",
    causes=ANY_CAUSE,
    is_public=True,
)
def experts_averaged_as_replicas() -> Case:
    """The gradients of experts are averaged over ranks that have other experts."""

    def average_experts(model: ExpertNet, group: Any) -> None:
        reduce_experts_correctly(model, group)
        all_reduce_grads(model, group, is_expert, mean=True)

    return expert_case(average_experts)


@plant(
    "a router's bias not reduced",
    wrong=("router.bias",),
    factor=1.0,
    axis="ep",
    causes=NOT_REDUCED,
    is_public=True,
)
def router_bias_not_reduced() -> Case:
    """Nobody reduces the bias of the router."""

    def reduce_without_router_bias(model: ExpertNet, group: Any) -> None:
        reduce_experts_correctly(model, group, is_left_out=lambda name: name == "router.bias")

    return expert_case(reduce_without_router_bias)


# Context and pipeline parallel.


@plant(
    "context parallel averaged",
    wrong=ALL,
    factor=0.5,
    axis="cp",
    causes=NOT_REDUCED_OR_OTHER_COUNT,
    is_public=True,
)
def context_parallel_averaged() -> Case:
    """The loss of a rank is its share of the sum over all positions, and gradients are averaged."""
    cp = mesh((2,), ("cp",))
    model = Net(attends=False)
    reference = other_weights(Net(attends=False))
    tokens, targets = tokens_and_targets()
    rank_tokens = position_chunk(cp, tokens)
    rank_targets = position_chunk(cp, targets)

    def step() -> None:
        loss = share_of_loss(model(rank_tokens), rank_targets, targets.numel())
        loss.backward()
        all_reduce_grads(model, cp.get_group(), matches_all, mean=True)

    def reference_step() -> None:
        loss = cross_entropy(reference(tokens), targets)
        loss.backward()

    return Case(step, model, reference_step, reference, {"mesh": cp})


class FirstStage(nn.Module):
    """The embedding and block 0 of a net."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.tok = net.tok
        self.blocks = nn.ModuleDict({"0": net.blocks[0]})

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.tok(tokens)
        return self.blocks["0"](embedded)


class LastStage(nn.Module):
    """Block 1 and the head of a net."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"1": net.blocks[1]})
        self.head = nn.Linear(16, 32)
        self.head.weight = net.head.weight
        self.head.bias = net.head.bias

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks["1"](x)
        return self.head(hidden)


def pipeline_case(tied: str = "") -> Case:
    """Return a case of two stages that exchange activations and their gradients.

    Args:
        tied: "" for no tied embedding, "summed" if the stages sum its gradient, "left" if not.
    """
    grid = mesh((2,), ("pp",))
    rank = dist.get_rank()
    net = Net(attends=False)
    reference = Net(attends=False)
    if tied:
        net.head.weight = net.tok.weight
        reference.head.weight = reference.tok.weight
    other_weights(reference)
    tokens, targets = tokens_and_targets()
    stage: Any = FirstStage(net) if rank == 0 else LastStage(net)

    def run_first_stage() -> None:
        output = stage(tokens)
        dist.send(output.detach(), 1)
        grad = torch.zeros_like(output)
        dist.recv(grad, 1)
        output.backward(grad)

    def run_last_stage() -> None:
        received = torch.empty(12, 8, 16)
        dist.recv(received, 0)
        received.requires_grad_()
        loss = cross_entropy(stage(received), targets)
        loss.backward()
        dist.send(received.grad, 0)

    def step() -> None:
        if rank == 0:
            run_first_stage()
        else:
            run_last_stage()
        if tied == "summed":
            weight = stage.tok.weight if rank == 0 else stage.head.weight
            dist.all_reduce(weight.grad)

    def reference_step() -> None:
        loss = cross_entropy(reference(tokens), targets)
        loss.backward()

    return Case(step, stage, reference_step, reference, {"mesh": grid})


@plant(
    "a tied embedding not summed over stages",
    wrong=("tok.weight",),
    factor=0.5,
    axis="pp",
    causes=NOT_REDUCED,
    is_public=True,
)
def tied_embedding_not_summed() -> Case:
    """The first and the last stage share a weight, and nobody sums its gradients."""
    return pipeline_case(tied="left")


# The score.


@dataclass(frozen=True)
class Score:
    """The comparison's answer to one plant."""

    plant: str
    found: bool
    explained: bool
    text: str


def has_right_factor(factor: float | None, expected: float | None) -> bool:
    """Return whether a factor is within 3 % of the expected factor, if there is one."""
    if expected is None:
        return True
    return factor is not None and abs(factor - expected) <= 0.03 * expected


def score(plant: Plant, comparison: GradientComparison) -> Score:
    """Compare an answer with the plant."""
    wrong = {row.name for row in comparison.rows if matches(row.name, plant.wrong)}
    accused = {row.name for row in comparison.differences}
    found = bool(wrong) and accused == wrong
    explained = found
    for row in comparison.differences:
        has_right_cause = row.axis == plant.axis and row.cause in plant.causes
        if not has_right_cause or not has_right_factor(row.factor, plant.factor):
            explained = False
    return Score(plant.name, found, explained, str(comparison))


def score_on_rank(index: int) -> Score:
    """Return the score of a plant on this rank."""
    torch.manual_seed(0)
    plant = PLANTS[index]
    case = plant.build()
    return score(plant, case.compare())


def run_plants(patterns: Sequence[str] = ()) -> list[Score]:
    """Run the plants with a pattern in their name, or all; print a line for each."""
    pools: dict[int, RankPool] = {}
    scores = []
    for index, plant in enumerate(PLANTS):
        if patterns and not any(pattern in plant.name for pattern in patterns):
            continue
        if plant.ranks not in pools:
            pools[plant.ranks] = RankPool(plant.ranks)
        try:
            result = pools[plant.ranks].run(score_on_rank, index)[0]
        except RankError as error:
            result = Score(plant.name, False, False, str(error)[-1500:])
        scores.append(result)
        print(f"{plant.name:55} found={result.found} explained={result.explained}", flush=True)
        if patterns or not result.explained:
            print(result.text, flush=True)
    for pool in pools.values():
        pool.close()
    return scores


def main() -> None:
    """Print the score of the plants that the arguments name, or of all."""
    scores = run_plants(sys.argv[1:])
    found = sum(result.found for result in scores)
    explained = sum(result.explained for result in scores)
    print(f"{found} found and {explained} explained, of {len(scores)}")


if __name__ == "__main__":
    # Ranks import the functions by the module's name, which is another one in a script.
    from tests.report import gradient_plants

    gradient_plants.main()
