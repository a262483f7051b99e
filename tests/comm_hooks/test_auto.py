"""``register(model, "auto")``: which way wins, and one choice for all ranks."""

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.shaped import run_on_hosts
from distamp import comm_hooks
from distamp.comm_hooks import auto
from distamp.comm_hooks.auto import choose, timed_choice
from distamp.comm_hooks.stats import Choice
from tests import netns
from tests.comm_hooks.training import BOUNDS, agreed, full_gradients, gradients, inputs, mlp
from tests.ranks import logged, mesh

WIDTHS = (31, 97, 64, 5)


@pytest.mark.parametrize(
    ("fp32", "fp16", "int8", "wire"),
    [
        ([4.0], [2.0], [1.0], "int8"),  # a slow link
        ([4.0], [2.0], [2.0], "fp16"),  # a tie goes to the more exact
        ([4.0], [2.0], [1.95], "fp16"),
        ([4.0], [2.0], [1.9], "int8"),
        ([1.0], [0.97], [0.98], "fp32"),  # not worth other numbers
        ([1.0], [0.95], [0.99], "fp16"),
        ([1.0], [1.2], [1.5], "fp32"),  # a slow processor
        ([1.0, 1.0, 1e-9], [0.5] * 3, [2.0] * 3, "fp16"),  # one odd time decides nothing
        ([1.0, 1.0, 1e9], [0.5] * 3, [2.0] * 3, "fp16"),
    ],
)
def test_the_most_exact_way_that_is_not_slower_wins(fp32, fp16, int8, wire):
    choice = choose({"fp32": fp32, "fp16": fp16, "int8": int8}, 26_214_400)
    assert choice.wire == wire
    assert choice.compressed == (wire != "fp32")
    assert str(choice).startswith(f"chose {wire}")
    assert "26.2 MB in fp32" in str(choice)


def _wrap(wrapper: str) -> tuple[Any, dict[str, Any]]:
    """The model and what ``register`` needs to know of it."""
    net = mlp(*WIDTHS)
    if wrapper == "DDP":
        return DistributedDataParallel(net, bucket_cap_mb=0.01), {}
    over = mesh((2, dist.get_world_size() // 2), ("replicate", "shard"))
    if wrapper == "HSDP":
        return fully_shard(net, mesh=over), {}
    return fully_shard(net, mesh=over["shard"]), {"replicas": over["replicate"].get_group()}


def _beside_ddp(model: Any) -> tuple[Tensor, float]:
    plain = DistributedDataParallel(mlp(*WIDTHS))
    for each in (model, plain):
        each(inputs(0, WIDTHS[0])).square().sum().backward()
    mine, true = full_gradients(model), gradients(plain)
    return mine, ((mine - true).norm() / true.norm()).item()


def _chosen(wrapper: str) -> dict[str, Any]:
    model, options = _wrap(wrapper)
    before = torch.random.get_rng_state()
    with logged("distamp.comm_hooks") as records:
        state = comm_hooks.register(model, "auto", **options)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    mine, error = _beside_ddp(model)
    stats = state.stats()
    assert stats.choice is not None
    # The exchanges that were timed are not counted, and those of a hook are.
    assert (stats.exchanges > 0) == stats.choice.compressed
    assert agreed(mine)
    assert error <= {"fp32": 1e-6, "torch bf16": 1e-2, **BOUNDS}[stats.choice.wire] * 2
    return {"choice": stats.choice, "said": records, "line": str(stats)}


@pytest.mark.parametrize("wrapper", ["DDP", "HSDP", "replicas"])
def test_all_ranks_choose_alike_and_the_first_says_so(ranks4, wrapper):
    answers = ranks4.run(_chosen, wrapper)
    choice = answers[0]["choice"]
    torchs = ["torch bf16"] if wrapper == "DDP" else []
    assert list(choice.seconds) == ["fp32", "fp16", *torchs, "int8"]
    assert answers[0]["said"] == [str(choice)]
    for rank, answer in enumerate(answers):
        assert answer["choice"] == choice
        assert answer["line"].startswith(str(choice))
        assert rank == 0 or not answer["said"]


def _slow_on_one_rank(ways: list[str]) -> str:
    """What is chosen where some ways are slow on rank 2, by real sleeps."""
    seconds = {"fp32": 0.001, "fp16": 0.02, "int8": 0.03}
    if dist.get_rank() == 2:
        seconds |= dict.fromkeys(ways, 0.06)

    def trial(name: str) -> Any:
        return lambda sent: time.sleep(seconds[name])

    trials = {name: trial(name) for name in seconds}
    return timed_choice(trials, torch.zeros(8), [dist.group.WORLD]).wire


@pytest.mark.parametrize(("slow", "wire"), [([], "fp32"), (["fp32", "fp16"], "int8")])
def test_what_is_slow_on_one_rank_alone_is_chosen_by_none(ranks4, slow, wire):
    assert ranks4.run(_slow_on_one_rank, slow) == [wire] * 4


def _of_half() -> tuple[str, list[str], list[str]]:
    model = DistributedDataParallel(mlp(*WIDTHS).half())
    choice = comm_hooks.register(model, "auto").stats().choice
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    sharded = fully_shard(mlp(*WIDTHS), mesh=mesh((2,), ("shard",)), mp_policy=policy)
    state = comm_hooks.register(sharded, "auto")
    ways = state.stats().choice
    return choice.wire, list(choice.seconds), list(ways.seconds)


def test_gradients_of_two_bytes_are_not_sent_in_more(ranks2):
    for wire, ways, sharded in ranks2.run(_of_half):
        assert wire in ways == ["float16", "int8"]
        assert sharded == ["float16", "int8"]


def _torchs() -> tuple[float, str]:
    """The error where torch's own bf16 is chosen, and what is said of it."""
    chosen = Choice("torch bf16", {}, 0, "the link is the bottleneck")
    model = DistributedDataParallel(mlp(*WIDTHS))
    with mock.patch.object(auto, "timed_choice", return_value=chosen):
        state = comm_hooks.register(model, "auto")
    return _beside_ddp(model)[1], str(state.stats())


def test_torchs_own_bf16_is_registered_where_it_is_chosen(ranks2):
    for error, line in ranks2.run(_torchs):
        assert 1e-4 < error < 1e-2
        assert line == "chose torch bf16: the link is the bottleneck"


def _alone() -> str:
    model = DistributedDataParallel(mlp(*WIDTHS))
    return str(comm_hooks.register(model, "auto").stats())


def test_one_rank_measures_nothing(ranks1):
    assert ranks1.run(_alone) == ["chose fp32 (no hook): there is one rank"]


# -- between hosts ---------------------------------------------------------------------------------


def rank() -> dict[str, Any]:
    """Choose on this host's rank, and train a step."""
    model = DistributedDataParallel(nn.Linear(500, 500))
    state = comm_hooks.register(model, "auto")
    model(torch.ones(2, 500)).sum().backward()
    stats = state.stats()
    return {"line": str(stats.choice), "sent": list(stats.bytes_sent)}


@pytest.mark.netns
@pytest.mark.xdist_group("netns")
def test_a_slow_link_is_sent_fewer_bytes():
    if reason := netns.missing():
        pytest.skip(reason)
    first, second = run_on_hosts("tests.comm_hooks.test_auto", 2, {}, 240, rate="20mbit")
    assert first == second
    assert first["sent"] in (["fp16"], ["int8"])
    assert "the link is the bottleneck" in first["line"]
