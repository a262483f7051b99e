"""Forty wrong gradients, planted as people make them, and a score of the comparison.

The list was written before the comparison had run on a plant. A plant names the wrong parameters,
their factor and their axis. ``python -m tests.report.gradient_plants`` runs all
of them and prints a table.

A plant is found if all parameters that it makes wrong are accused, and no others. It is explained
if also the first axis, the cause and, where there is one, the factor of all of them are right.
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

NOT_REDUCED = ("not reduced",)
COUNTED = ("counted more than once",)
LOWER = ("reduced in lower precision",)
COUNT = ("another number of tokens or micro-batches",)
FROZEN = ("frozen",)
MISSING = ("missing",)
NOT_FINITE = ("not finite",)
#: Causes that a plant may have as long as nothing in its numbers decides.
ANY = (*NOT_REDUCED, *COUNTED, *LOWER, *COUNT, "multiplied by a factor")


@dataclass(frozen=True)
class Plant:
    """One wrong gradient.

    Args:
        name: The mechanism.
        is_public: Whether a public thread reports the mechanism.
        ranks: The number of ranks.
        wrong: Patterns of the parameters with a wrong gradient.
        factor: The factor of the reference, or None if there is no single one.
        axis: The axis to which the cause belongs, or "" if it belongs to none.
        causes: The causes that are right.
        build: Makes the case on a rank.
    """

    name: str
    is_public: bool
    ranks: int
    wrong: tuple[str, ...]
    factor: float | None
    axis: str
    causes: tuple[str, ...]
    build: Callable[[], Case]


# -- data parallel ---------------------------------------------------------------------------------


def _ddp(**settings: Any) -> Case:
    return net_case(DistributedDataParallel, **settings)


def _in_two_micro_batches(wrap: Callable[[Net], Any], skips_sync: Any, divisor: float = 2) -> Case:
    """Two micro-batches; `skips_sync` makes the context of each from the model and its index."""
    case = net_case(wrap)
    tokens, targets = tokens_and_targets()
    place, count = dist.get_rank(), dist.get_world_size()
    parts = list(zip(tokens.chunk(2), targets.chunk(2), strict=True))

    def step() -> None:
        for index, (some_tokens, some_targets) in enumerate(parts):
            with skips_sync(case.model, index):
                logits = case.model(some_tokens.chunk(count)[place])
                loss = cross_entropy(logits, some_targets.chunk(count)[place])
                (loss / divisor).backward()

    case.step = step
    return case


def _no_sync_on_the_last(model: Any, index: int) -> Any:
    return model.no_sync() if index == 1 else contextlib.nullcontext()


def _fsdp2_sync_stays_off(model: Any, index: int) -> Any:
    model.set_requires_gradient_sync(index == 0)
    return contextlib.nullcontext()


def _ignored_by_ddp() -> Case:
    def wrap(net: Net) -> Any:
        names = ["head.weight"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
        return DistributedDataParallel(net)

    return net_case(wrap)


def _left_out_by_hand() -> Case:
    def average(model: nn.Module) -> None:
        all_reduce_grads(model, None, lambda name: name != "blocks.1.up.bias", mean=True)

    return net_case(lambda net: net, after=average)


def _local_mean_of_tokens() -> Case:
    """Half of the first rank's targets are padding, and each rank divides by its local count."""
    case = _ddp()
    tokens, targets = tokens_and_targets()
    targets[:4, 2:] = -100
    place, count = dist.get_rank(), dist.get_world_size()
    model, reference = case.model, case.reference

    def step() -> None:
        cross_entropy(model(tokens.chunk(count)[place]), targets.chunk(count)[place]).backward()

    def reference_step() -> None:
        cross_entropy(reference(tokens), targets).backward()

    return Case(step, model, reference_step, reference)


def _with_hook(hook: Any) -> Case:
    def wrap(net: Net) -> Any:
        model = DistributedDataParallel(net)
        model.register_comm_hook(None, hook)
        return model

    return net_case(wrap)


def _sum_hook(state, bucket):  # annotations as text, which DDP refuses
    """A hook that forgets the division by the number of ranks."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def _bf16_hook(state, bucket):  # annotations as text, which DDP refuses
    """Average in bf16, like torch's bf16_compress_hook, which DDP refuses without NCCL."""
    buffer = bucket.buffer()
    small = buffer.to(BF16).div_(dist.get_world_size())
    future = dist.all_reduce(small, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def _divided_by_the_world_too() -> Case:
    return _ddp(loss=lambda logits, targets: cross_entropy(logits, targets) / 2)


def _loss_weighted_on_one_rank() -> Case:
    weight = 3.0 if dist.get_rank() == 1 else 1.0
    return _ddp(loss=lambda logits, targets: cross_entropy(logits, targets) * weight)


def _embedding_summed_again() -> Case:
    """Code for a tied embedding sums its gradient over the ranks that DDP has averaged."""

    def sum_again(model: nn.Module) -> None:
        all_reduce_grads(model, None, lambda name: "tok" in name)

    return _ddp(after=sum_again)


def _inf_on_one_rank() -> Case:
    def plant(model: Any) -> None:
        if dist.get_rank() == 1:
            model.module.head.bias.grad[3] = float("inf")

    return _ddp(after=plant)


# -- FSDP ------------------------------------------------------------------------------------------


def _fsdp2(net: Net, **policy: Any) -> Any:
    return sharded(net, mesh((dist.get_world_size(),), ("dp",)), **policy)


def _block_sums() -> Case:
    def wrap(net: Net) -> Any:
        model = _fsdp2(net)
        net.blocks[1].set_gradient_divide_factor(1.0)
        # Gloo has no sum with a factor, which torch uses otherwise.
        net.blocks[1].set_force_sum_reduction_for_comms(True)
        return model

    return net_case(wrap)


def _ignored_by_fsdp2() -> Case:
    def wrap(net: Net) -> Any:
        device_mesh = mesh((2,), ("dp",))
        for block in net.blocks:
            fully_shard(block, mesh=device_mesh)
        return fully_shard(net, mesh=device_mesh, ignored_params={net.head.weight})

    return net_case(wrap)


def _replicas_never_reduced() -> Case:
    def wrap(net: Net) -> Any:
        model = sharded(net, mesh((2, 2), ("replicate", "shard")))
        model.set_requires_all_reduce(False)
        return model

    return net_case(wrap)


def _fsdp1(net: Net, **settings: Any) -> Any:
    return FullyShardedDataParallel(
        net, device_id=torch.device("cpu"), use_orig_params=True, **settings
    )


def _fsdp1_bf16() -> Case:
    return net_case(lambda net: _fsdp1(net, mixed_precision=MixedPrecision(reduce_dtype=BF16)))


# -- two-dimensional layouts of torch --------------------------------------------------------------


def _two_dimensional(after: Callable[[Any], None]) -> Case:
    grid = mesh((2, 2), ("dp", "tp"))
    return net_case(
        lambda net: sharded(parallel(net, grid["tp"]), grid["dp"]),
        ranks=(grid.get_local_rank("dp"), 2),
        after=after,
    )


def _scale(model: nn.Module, name: str, factor: float) -> None:
    param = dict(model.named_parameters())[name]
    param.grad.mul_(factor)


def _norm_summed_over_tp_again() -> Case:
    """A loop for sequence parallel norms sums gradients that are complete already."""

    def sum_again(model: nn.Module) -> None:
        group = mesh((2, 2), ("dp", "tp"))["tp"].get_group()
        for name, param in model.named_parameters():
            if "norm2" in name:
                dist.all_reduce(param.grad.to_local(), group=group)

    return _two_dimensional(sum_again)


def _shards_scaled_on_one_axis() -> Case:
    """The gradient of a column-parallel weight is divided by the number of its shards."""
    return _two_dimensional(lambda model: _scale(model, "blocks.0.up.weight", 0.5))


# -- tensor and sequence parallel without DTensor --------------------------------------------------


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
    """A step of `HandNet`, with training code that reduces gradients over tp and then over dp.

    Args:
        shape: The shape of the mesh.
        names: Its dimensions, with "tp" among them.
        change: Changes the sharded model.
        finish: Reduces the gradients; rightly if None.
        loss: The loss of this rank's positions from logits, targets and the number of tokens of the
            data parallel rank.
        region: The dtype of autocast.
        auxiliary: A further loss of a model, which the reference has once.
    """
    grid = mesh(shape, names)
    tp = grid["tp"] if len(names) > 1 else grid
    group = tp.get_group()
    place, count = (grid.get_local_rank("dp"), grid["dp"].size()) if "dp" in names else (0, 1)
    model, reference = HandNet(group), other_weights(HandNet())
    change(model)
    tokens, targets = tokens_and_targets()
    local_tokens, local_targets = tokens.chunk(count)[place], targets.chunk(count)[place]
    tp_place, tp_count = tp.get_local_rank(), tp.size()
    own_tokens = local_tokens.chunk(tp_count, 1)[tp_place]
    own_targets = local_targets.chunk(tp_count, 1)[tp_place]

    def share_of_loss(logits: Tensor, some_targets: Tensor, number: int) -> Tensor:
        return cross_entropy(logits, some_targets, "sum") / number

    def step() -> None:
        with in_autocast(region):
            logits = model(own_tokens)
        total = (loss or share_of_loss)(logits, own_targets, local_targets.numel())
        if auxiliary is not None:
            total = total + auxiliary(model)
        total.backward()
        (finish or reduce_rightly)(model, grid)

    def reference_step() -> None:
        with in_autocast(region):
            logits = reference(tokens)
        total = cross_entropy(logits, targets)
        if auxiliary is not None:
            total = total + auxiliary(reference)
        total.backward()

    settings = {"shard_group_fn": model.shard_group, "mesh": grid}
    return Case(step, model, reference_step, reference, settings)


def reduce_rightly(
    model: HandNet, grid: Any, left_out: Callable[[str], bool] = lambda name: False
) -> None:
    """Sum replicated parameters over tp, and average all over dp."""
    tp = grid["tp"] if grid.ndim > 1 else grid

    def is_summed(name: str) -> bool:
        return not model.is_shard(name) and not left_out(name)

    all_reduce_grads(model, tp.get_group(), is_summed)
    if grid.ndim > 1:
        all_reduce_grads(model, grid["dp"].get_group(), lambda name: True, mean=True)


def _left_out_of_tp(*patterns: str) -> Callable[[HandNet, Any], None]:
    def finish(model: HandNet, grid: Any) -> None:
        reduce_rightly(model, grid, lambda name: _matches(name, patterns))

    return finish


def _bias_summed_twice(model: HandNet, grid: Any) -> None:
    reduce_rightly(model, grid)
    all_reduce_grads(model, grid.get_group(), lambda name: name.endswith("0.bias"))


def _head_averaged(model: HandNet, grid: Any) -> None:
    reduce_rightly(model, grid, lambda name: "head" in name)
    all_reduce_grads(model, grid.get_group(), lambda name: "head" in name, mean=True)


def _gate_left_out_of_dp(model: HandNet, grid: Any) -> None:
    all_reduce_grads(model, grid["tp"].get_group(), lambda name: not model.is_shard(name))
    dp = grid["dp"].get_group()
    all_reduce_grads(model, dp, lambda name: "gate" not in name, mean=True)


def _gate_left_out_of_both(model: HandNet, grid: Any) -> None:
    def is_summed(name: str) -> bool:
        return not model.is_shard(name) and "gate" not in name

    all_reduce_grads(model, grid["tp"].get_group(), is_summed)
    dp = grid["dp"].get_group()
    all_reduce_grads(model, dp, lambda name: "gate" not in name, mean=True)


def _gate_averaged_over_the_world(model: HandNet, grid: Any) -> None:
    reduce_rightly(model, grid, lambda name: "gate" in name)
    # Over dp it is averaged already, so only the mean over tp is wrong.
    all_reduce_grads(model, None, lambda name: "gate" in name, mean=True)


def _norms_in_bf16(model: HandNet, grid: Any) -> None:
    reduce_rightly(model, grid, lambda name: "norm" in name)
    all_reduce_grads(model, grid.get_group(), lambda name: "norm" in name, dtype=BF16)


def _gather_without_reduction(model: HandNet) -> None:
    """The gather of block 1 passes each rank the local gradient in backward, without the sum."""
    model.blocks[1].reduces = False


def _freeze_on_rank_1(model: HandNet) -> None:
    if dist.get_rank() == 1:
        model.blocks[0].up.weight.requires_grad_(False)


def _detach_on_rank_1(model: HandNet) -> None:
    if dist.get_rank() == 1:
        down = model.blocks[1].down
        down.forward = lambda x: nn.functional.linear(x, down.weight.detach())


def _router_loss(model: HandNet) -> Tensor:
    """A z-loss of the gate, which every tensor parallel rank computes whole."""
    return model.gate.weight.square().sum() / 50


def _loss_of_local_positions(logits: Tensor, targets: Tensor, number: int) -> Tensor:
    return cross_entropy(logits, targets)


# -- experts ---------------------------------------------------------------------------------------


def expert_case(
    finish: Callable[[ExpertNet, Any], None] | None = None,
    *,
    ranks: int = 2,
    region: torch.dtype | None = None,
) -> Case:
    """A step of `ExpertNet`; each rank has other experts and other tokens."""
    grid = mesh((ranks,), ("ep",))
    group = grid.get_group()
    model, reference = ExpertNet(group), other_weights(ExpertNet())
    tokens, targets = tokens_and_targets()
    place = dist.get_rank()
    local_tokens, local_targets = tokens.chunk(ranks)[place], targets.chunk(ranks)[place]

    def step() -> None:
        with in_autocast(region):
            logits = model(local_tokens)
        cross_entropy(logits, local_targets).backward()
        (finish or reduce_experts_rightly)(model, group)

    def reference_step() -> None:
        with in_autocast(region):
            logits = reference(tokens)
        cross_entropy(logits, targets).backward()

    settings = {"shard_group_fn": model.shard_group, "mesh": grid}
    return Case(step, model, reference_step, reference, settings)


def reduce_experts_rightly(
    model: ExpertNet,
    group: Any,
    divisor: float | None = None,
    left_out: Callable[[str], bool] = lambda name: False,
) -> None:
    """Average all but experts over the ranks; divide experts, which have all ranks' tokens."""

    def is_averaged(name: str) -> bool:
        return "experts" not in name and not left_out(name)

    all_reduce_grads(model, group, is_averaged, mean=True)
    for name, param in model.named_parameters():
        if "experts" in name:
            param.grad.div_(dist.get_world_size(group) if divisor is None else divisor)


def _experts_not_divided(model: ExpertNet, group: Any) -> None:
    reduce_experts_rightly(model, group, divisor=1.0)


def _experts_divided_twice(model: ExpertNet, group: Any) -> None:
    reduce_experts_rightly(model, group, divisor=4.0)


def _experts_averaged(model: ExpertNet, group: Any) -> None:
    """Experts are averaged as if they were replicas."""
    reduce_experts_rightly(model, group)
    all_reduce_grads(model, group, lambda name: "experts" in name, mean=True)


def _router_bias_left_out(model: ExpertNet, group: Any) -> None:
    reduce_experts_rightly(model, group, left_out=lambda name: name == "router.bias")


# -- context and pipeline parallel -----------------------------------------------------------------


def _context_parallel(shape: tuple[int, ...], names: tuple[str, ...], averages: bool) -> Case:
    """Positions are split over cp; the loss is a share of the sum over all positions."""
    grid = mesh(shape, names)
    cp = grid["cp"] if grid.ndim > 1 else grid
    place, count = (grid.get_local_rank("dp"), grid["dp"].size()) if "dp" in names else (0, 1)
    model, reference = Net(attends=False), other_weights(Net(attends=False))
    tokens, targets = tokens_and_targets()
    local_tokens, local_targets = tokens.chunk(count)[place], targets.chunk(count)[place]
    own_tokens = local_tokens.chunk(cp.size(), 1)[cp.get_local_rank()]
    own_targets = local_targets.chunk(cp.size(), 1)[cp.get_local_rank()]

    def step() -> None:
        total = cross_entropy(model(own_tokens), own_targets, "sum") / local_targets.numel()
        total.backward()
        all_reduce_grads(model, cp.get_group(), lambda name: True, mean=averages)
        if grid.ndim > 1:
            all_reduce_grads(model, grid["dp"].get_group(), lambda name: True, mean=True)

    def reference_step() -> None:
        cross_entropy(reference(tokens), targets).backward()

    return Case(step, model, reference_step, reference, {"mesh": grid})


class _First(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.tok = net.tok
        self.blocks = nn.ModuleDict({"0": net.blocks[0]})

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks["0"](self.tok(tokens))


class _Last(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"1": net.blocks[1]})
        self.head = nn.Linear(16, 32)
        self.head.weight, self.head.bias = net.head.weight, net.head.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks["1"](x))


def pipeline_case(tied: str = "", sends_back: bool = True, head_factor: float = 1.0) -> Case:
    """Two stages that exchange activations and their gradients.

    Args:
        tied: "" for no tied embedding, "summed" if the stages sum its gradient, "left" if not.
        sends_back: Whether the second stage returns the gradient of its input.
        head_factor: A factor of the last stage's loss.
    """
    grid = mesh((2,), ("pp",))
    net, reference = Net(attends=False), Net(attends=False)
    if tied:
        net.head.weight, reference.head.weight = net.tok.weight, reference.tok.weight
    other_weights(reference)
    tokens, targets = tokens_and_targets()
    stage: Any = _First(net) if dist.get_rank() == 0 else _Last(net)

    def step() -> None:
        if dist.get_rank() == 0:
            output = stage(tokens)
            dist.send(output.detach(), 1)
            grad = torch.zeros_like(output)
            if sends_back:
                dist.recv(grad, 1)
                output.backward(grad)
        else:
            received = torch.empty(12, 8, 16)
            dist.recv(received, 0)
            received.requires_grad_()
            (head_factor * cross_entropy(stage(received), targets)).backward()
            if sends_back:
                dist.send(received.grad, 0)
        if tied == "summed":
            weight = stage.tok.weight if dist.get_rank() == 0 else stage.head.weight
            dist.all_reduce(weight.grad)

    def reference_step() -> None:
        cross_entropy(reference(tokens), targets).backward()

    return Case(step, stage, reference_step, reference, {"mesh": grid})


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


# -- the list --------------------------------------------------------------------------------------

ALL = ("*",)
NORMS = ("blocks.*.norm.*",)
EXPERTS = ("experts.*",)
SHARDS = ("blocks.*.up.*", "blocks.*.down.*")
PLANTS: list[Plant] = []


def _plant(name: str, is_public: bool, ranks: int, wrong: tuple[str, ...], *answer: Any) -> None:
    factor, axis, causes, build = answer
    PLANTS.append(Plant(name, is_public, ranks, wrong, factor, axis, causes, build))


_plant(
    "no_sync on the last micro-batch",
    True,
    2,
    ALL,
    1.0,
    "dp",
    NOT_REDUCED,
    lambda: _in_two_micro_batches(DistributedDataParallel, _no_sync_on_the_last),
)
_plant(
    "a parameter that DDP ignores",
    True,
    2,
    ("head.weight",),
    1.0,
    "dp",
    NOT_REDUCED,
    _ignored_by_ddp,
)
_plant(
    "a parameter left out of the averages",
    True,
    2,
    ("blocks.1.up.bias",),
    1.0,
    "all ranks",
    NOT_REDUCED,
    _left_out_by_hand,
)
_plant("a mean of each rank's own tokens", True, 2, ALL, None, "dp", COUNT, _local_mean_of_tokens)
_plant(
    "micro-batches that are not divided",
    True,
    3,
    ALL,
    2.0,
    "",
    COUNT,
    lambda: _in_two_micro_batches(
        DistributedDataParallel, lambda *_: contextlib.nullcontext(), divisor=1
    ),
)
_plant(
    "a hook that sums",
    True,
    2,
    ALL,
    2.0,
    "dp",
    (*COUNTED, *COUNT),
    lambda: _with_hook(_sum_hook),
)
_plant(
    "a loss divided by the world, and DDP's mean",
    True,
    2,
    ALL,
    0.5,
    "dp",
    (*NOT_REDUCED, *COUNT),
    _divided_by_the_world_too,
)
_plant("a bf16 hook", True, 2, ALL, 1.0, "dp", LOWER, lambda: _with_hook(_bf16_hook))
_plant("a fp16 hook", False, 2, ALL, 1.0, "dp", LOWER, lambda: _with_hook(fp16_compress_hook))
_plant("a loss weighted on one rank", False, 2, ALL, None, "dp", COUNT, _loss_weighted_on_one_rank)
_plant(
    "an embedding summed again",
    False,
    2,
    ("tok.weight",),
    2.0,
    "dp",
    COUNTED,
    _embedding_summed_again,
)
_plant("inf on one rank", False, 2, ("head.bias",), None, "", NOT_FINITE, _inf_on_one_rank)
_plant(
    "FSDP2 without gradient sync on the last micro-batch",
    True,
    2,
    ALL,
    None,
    "dp",
    NOT_REDUCED,
    lambda: _in_two_micro_batches(_fsdp2, _fsdp2_sync_stays_off),
)
_plant(
    "FSDP2 that reduces in bf16",
    True,
    2,
    ALL,
    1.0,
    "dp",
    LOWER,
    lambda: net_case(lambda net: _fsdp2(net, reduce_dtype=BF16)),
)
_plant("a block of FSDP2 that sums", True, 2, ("blocks.1.*",), 2.0, "dp", COUNTED, _block_sums)
_plant(
    "a parameter that FSDP2 ignores",
    True,
    2,
    ("head.weight",),
    1.0,
    "dp",
    NOT_REDUCED,
    _ignored_by_fsdp2,
)
_plant(
    "HSDP whose replicas are not reduced",
    True,
    4,
    ALL,
    1.0,
    "replicate",
    NOT_REDUCED,
    _replicas_never_reduced,
)
_plant("FSDP1 that reduces in bf16", False, 2, ALL, 1.0, "dp", LOWER, _fsdp1_bf16)
_plant(
    "FSDP1 in no_sync on the last micro-batch",
    True,
    2,
    ALL,
    None,
    "dp",
    NOT_REDUCED,
    lambda: _in_two_micro_batches(_fsdp1, _no_sync_on_the_last),
)
_plant(
    "a norm summed over tp again",
    True,
    4,
    ("blocks.*.norm2.*",),
    2.0,
    "tp",
    COUNTED,
    _norm_summed_over_tp_again,
)
_plant(
    "a sharded weight divided by its shards",
    False,
    4,
    ("blocks.0.up.weight",),
    0.5,
    "tp",
    NOT_REDUCED,
    _shards_scaled_on_one_axis,
)
_plant(
    "norms of sequence parallel not reduced",
    True,
    2,
    NORMS,
    0.5,
    "tp",
    NOT_REDUCED,
    lambda: hand_case(finish=_left_out_of_tp(*NORMS)),
)
_plant(
    "a gate not reduced over tp",
    True,
    2,
    ("gate.weight",),
    0.5,
    "tp",
    NOT_REDUCED,
    lambda: hand_case(finish=_left_out_of_tp("gate.*")),
)
_plant(
    "a bias summed over tp twice",
    False,
    2,
    ("blocks.0.bias",),
    2.0,
    "tp",
    COUNTED,
    lambda: hand_case(finish=_bias_summed_twice),
)
_plant(
    "a head averaged over tp",
    False,
    2,
    ("head.*",),
    0.5,
    "tp",
    NOT_REDUCED,
    lambda: hand_case(finish=_head_averaged),
)
_plant(
    "a loss of local positions, summed over tp",
    True,
    2,
    ALL,
    2.0,
    "tp",
    (*COUNT, *COUNTED),
    lambda: hand_case(loss=_loss_of_local_positions),
)
_plant(
    "a gather whose backward does not reduce",
    True,
    2,
    ("tok.*", "gate.*", "blocks.0.*", "blocks.1.norm.*"),
    None,
    "tp",
    ANY,
    lambda: hand_case(change=_gather_without_reduction),
)
_plant(
    "a shard frozen on one rank",
    True,
    2,
    ("blocks.0.up.weight",),
    None,
    "tp",
    FROZEN,
    lambda: hand_case(change=_freeze_on_rank_1),
)
_plant(
    "a shard detached on one rank",
    False,
    2,
    ("blocks.1.down.weight",),
    None,
    "tp",
    MISSING,
    lambda: hand_case(change=_detach_on_rank_1),
)
_plant(
    "a gate not reduced over dp",
    True,
    4,
    ("gate.weight",),
    1.0,
    "dp",
    NOT_REDUCED,
    lambda: hand_case((2, 2), ("dp", "tp"), finish=_gate_left_out_of_dp),
)
_plant(
    "a gate not reduced over dp and tp",
    True,
    4,
    ("gate.weight",),
    0.5,
    "dp and tp",
    NOT_REDUCED,
    lambda: hand_case((2, 2), ("dp", "tp"), finish=_gate_left_out_of_both),
)
_plant(
    "a gate averaged over the world",
    True,
    4,
    ("gate.weight",),
    0.5,
    "tp",
    NOT_REDUCED,
    lambda: hand_case((2, 2), ("dp", "tp"), finish=_gate_averaged_over_the_world),
)
_plant(
    "an auxiliary loss times tp",
    True,
    2,
    ("gate.weight",),
    None,
    "tp",
    ANY,
    lambda: hand_case(auxiliary=_router_loss),
)
_plant(
    "norms reduced in bf16 over tp",
    True,
    2,
    NORMS,
    1.0,
    "tp",
    LOWER,
    lambda: hand_case(finish=_norms_in_bf16),
)
_plant(
    "experts not divided by the ranks",
    True,
    2,
    EXPERTS,
    2.0,
    "ep",
    COUNTED,
    lambda: expert_case(_experts_not_divided),
)
_plant(
    "experts divided twice",
    True,
    2,
    EXPERTS,
    0.5,
    "ep",
    NOT_REDUCED,
    lambda: expert_case(_experts_divided_twice),
)
_plant(
    "experts averaged as replicas",
    True,
    2,
    EXPERTS,
    None,
    "ep",
    ANY,
    lambda: expert_case(_experts_averaged),
)
_plant(
    "a router's bias not reduced",
    True,
    2,
    ("router.bias",),
    1.0,
    "ep",
    NOT_REDUCED,
    lambda: expert_case(_router_bias_left_out),
)
_plant(
    "context parallel averaged",
    True,
    2,
    ALL,
    0.5,
    "cp",
    (*COUNT, *NOT_REDUCED),
    lambda: _context_parallel((2,), ("cp",), averages=True),
)
_plant(
    "a tied embedding not summed over stages",
    True,
    2,
    ("tok.weight",),
    0.5,
    "pp",
    NOT_REDUCED,
    lambda: pipeline_case(tied="left"),
)


# -- the score -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """The comparison's answer to one plant."""

    plant: str
    found: bool
    explained: bool
    text: str


def score(plant: Plant, comparison: GradientComparison) -> Score:
    """Compare an answer with the plant."""
    wrong = {row.name for row in comparison.rows if _matches(row.name, plant.wrong)}
    accused = {row.name for row in comparison.differences}
    found = bool(wrong) and accused == wrong
    explained = found
    for row in comparison.differences:
        has_factor = plant.factor is None or (
            row.factor is not None and abs(row.factor - plant.factor) <= 0.03 * plant.factor
        )
        explained = explained and has_factor
        explained = explained and row.axis == plant.axis and row.cause in plant.causes
    return Score(plant.name, found, explained, str(comparison))


def _run(index: int) -> Score:
    torch.manual_seed(0)
    plant = PLANTS[index]
    return score(plant, plant.build().compare())


def run_plants(patterns: Sequence[str] = ()) -> list[Score]:
    """Run the plants with a pattern in their name, or all; print a line for each."""
    pools: dict[int, RankPool] = {}
    scores = []
    for index, plant in enumerate(PLANTS):
        if patterns and not any(pattern in plant.name for pattern in patterns):
            continue
        pool = pools.setdefault(plant.ranks, RankPool(plant.ranks))
        try:
            result = pool.run(_run, index)[0]
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
