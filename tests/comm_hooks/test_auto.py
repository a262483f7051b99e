"""``register(model, "auto")`` on real ranks: one choice for all, and what it leaves behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from distamp import comm_hooks
from distamp.comm_hooks import fsdp2
from distamp.comm_hooks.auto import as_it_is, timed_choice
from tests.comm_hooks.training import BOUNDS, agreed, gradients, inputs, mlp
from tests.ranks import logged, mesh

WIDTHS = (31, 97, 64, 5)


def _wrap(wrapper: str, net: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """The model and what ``register`` needs to know of it."""
    if wrapper == "DDP":
        return DistributedDataParallel(net, bucket_cap_mb=0.01), {}
    if wrapper == "FSDP1":
        return FullyShardedDataParallel(
            net, device_id=torch.device("cpu"), use_orig_params=True
        ), {}
    if wrapper == "FSDP2":
        return fully_shard(net, mesh=mesh((dist.get_world_size(),), ("shard",))), {}
    over = mesh((2, dist.get_world_size() // 2), ("replicate", "shard"))
    if wrapper == "HSDP":
        return fully_shard(net, mesh=over), {}
    return fully_shard(net, mesh=over["shard"]), {"replicas": over["replicate"].get_group()}


def _full(model: nn.Module) -> torch.Tensor:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return gradients(model)
    whole = [
        p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for p in model.parameters()
    ]
    return torch.cat([each.flatten() for each in whole])


def _chosen(wrapper: str) -> tuple[str, str, list[str], str, bool, float, bool, str]:
    """What was chosen, from what, the log, whether ranks agree on gradients, how exact they are."""
    model, options = _wrap(wrapper, mlp(*WIDTHS))
    plain = DistributedDataParallel(mlp(*WIDTHS))
    before = torch.random.get_rng_state()
    with logged("distamp.comm_hooks") as records:
        state = comm_hooks.register(model, "auto", **options)
    untouched = torch.equal(before, torch.random.get_rng_state())
    untouched &= all(p.grad is None for p in model.parameters())
    for each in (model, plain):
        each(inputs(0, WIDTHS[0])).square().sum().backward()
    mine, true = _full(model), gradients(plain)
    choice = state.stats().choice
    assert choice is not None
    # The exchanges that were timed are not counted, and those of a hook are.
    assert (state.stats().exchanges > 0) == choice.compressed
    assert state.wire.name == choice.wire
    error = ((mine - true).norm() / true.norm()).item()
    return (
        choice.wire,
        repr(choice),
        list(choice.seconds),
        "\n".join(records),
        agreed(mine),
        error,
        untouched,
        str(state.stats()),
    )


@pytest.mark.parametrize(
    ("size", "wrapper"),
    [
        (2, "DDP"),
        (4, "DDP"),
        (2, "FSDP1"),
        (4, "FSDP2"),
        (4, "HSDP"),
        (4, "replicas"),
    ],
)
def test_all_ranks_choose_alike_and_say_so(ranks, size, wrapper):
    answers = ranks(size).run(_chosen, wrapper)
    wire, first, *_ = answers[0]
    for rank, (_, choice, ways, said, same, error, untouched, message) in enumerate(answers):
        assert choice == first, "and from the same times"
        assert wire in ways == ["fp32", "fp16", "int8"][: 3 if wrapper == "DDP" else 2]
        assert message.startswith(f"auto chose {wire}")
        assert message.startswith(said or "auto"), "the same line, and on rank 0 alone"
        assert bool(said) == (rank == 0)
        assert same
        assert error <= (1e-6 if wire == "fp32" else 2 * BOUNDS[wire])
        assert untouched


def _uncompressed_replicas(factor: float | None) -> float:
    """The error of replicas for which ``auto`` chose no format."""
    over = mesh((2, 2), ("replicate", "shard"))
    replicas = over["replicate"].get_group()
    model = fully_shard(mlp(*WIDTHS), mesh=over["shard"])
    if factor is not None:
        model.set_gradient_divide_factor(factor)
        model.set_force_sum_reduction_for_comms(True)  # gloo multiplies by no factor
    state = comm_hooks.CommHookState(as_it_is(torch.float32))
    fsdp2.wrapped(model, replicas).attach(state, False)
    plain = DistributedDataParallel(mlp(*WIDTHS))
    for each in (model, plain):
        each(inputs(0, WIDTHS[0])).square().sum().backward()
    mine, true = _full(model), gradients(plain) * 4 / (factor or 4)
    assert agreed(mine)
    return ((mine - true).norm() / true.norm()).item()


@pytest.mark.parametrize("factor", [None, 8.0])
def test_replicas_are_averaged_where_no_format_was_chosen(ranks4, factor):
    assert max(ranks4.run(_uncompressed_replicas, factor)) < 1e-6


def _slow_on(ranks: list[int], ways: list[str]) -> str:
    """What is chosen where some ways are slow on some ranks, by real sleeps."""
    seconds = {"fp32": 0.001, "fp16": 0.05, "int8": 0.1}
    if dist.get_rank() in ranks:
        seconds |= dict.fromkeys(ways, 0.2)

    def trial(name: str) -> Any:
        return lambda sent: time.sleep(seconds[name])

    trials = {name: trial(name) for name in seconds}
    return timed_choice(trials, torch.zeros(8), [dist.group.WORLD]).wire


@pytest.mark.parametrize(
    ("slow", "wire"),
    [([], "fp32"), (["fp32"], "fp16"), (["fp32", "fp16"], "int8")],
)
def test_what_is_slow_on_one_rank_alone_is_chosen_by_none(ranks4, slow, wire):
    assert ranks4.run(_slow_on, [2], slow) == [wire] * 4


def _of_half(dtype: torch.dtype) -> tuple[str, list[str], str]:
    model = DistributedDataParallel(mlp(*WIDTHS).to(dtype))
    choice = comm_hooks.register(model, "auto").stats().choice
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    sharded = fully_shard(mlp(*WIDTHS), mesh=mesh((2,), ("shard",)), mp_policy=policy)
    state = comm_hooks.register(sharded, "auto")
    sharded(inputs(0, WIDTHS[0])).float().sum().backward()
    return choice.wire, list(choice.seconds), str(state.stats())


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float16")]
)
def test_gradients_of_two_bytes_are_not_sent_in_more(ranks2, dtype, name):
    for wire, ways, sharded in ranks2.run(_of_half, dtype):
        assert wire in ways == [name, "int8"]
        assert sharded == (f"auto chose {name} (no hook): no format is narrower than the gradients")


def _alone() -> tuple[str, bool]:
    model = DistributedDataParallel(mlp(*WIDTHS))
    state = comm_hooks.register(model, "auto")
    model(inputs(0, WIDTHS[0])).sum().backward()
    return str(state.stats()), bool(model._comm_hooks)


def test_one_rank_measures_nothing(ranks1):
    assert ranks1.run(_alone) == [("auto chose fp32 (no hook): there is one rank", False)]


def _left_over() -> tuple[list[str], int]:
    def threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name == "distamp-comm-hook"]

    groups = len(dist.distributed_c10d._world.pg_map)
    for _ in range(2):
        model = DistributedDataParallel(mlp(*WIDTHS))
        comm_hooks.register(model, "auto")
        model(inputs(0, WIDTHS[0])).sum().backward()
        del model
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "distamp-comm-hook":
            thread.join(30)
    return threads(), len(dist.distributed_c10d._world.pg_map) - groups


def test_measuring_leaves_nothing(ranks2):
    assert ranks2.run(_left_over) == [([], 0)] * 2


def _one_dies() -> str:
    # Before the model is wrapped: a group of its own, whose timeout is short.
    group = dist.new_group(timeout=timedelta(seconds=20))
    model = DistributedDataParallel(mlp(*WIDTHS), process_group=group)

    def trial(sent: torch.Tensor) -> None:
        dist.all_reduce(sent, group=group)
        if dist.get_rank() == 1:
            os._exit(7)

    with pytest.raises(RuntimeError) as caught:
        timed_choice({"fp32": trial, "fp16": trial}, torch.zeros(8), [group])
    assert not model._comm_hooks
    return type(caught.value).__name__


def test_a_rank_that_dies_while_it_is_timed_ends_it_on_the_others(new_ranks):
    answers = new_ranks(2, timeout=120).run(_one_dies, may_die=[1])
    assert isinstance(answers[0], str)
