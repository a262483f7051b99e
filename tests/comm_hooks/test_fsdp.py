"""FSDP2 and FSDP1 through a wire, on real ranks, against the float64 mean without shards."""

import itertools
import math
import socket
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)

from distamp.comm_hooks import (
    LowPrecisionState,
    exchange,
    formats,
    fsdp_bf16_compress_hook,
    fsdp_fp16_compress_hook,
    register,
)
from distamp.comm_hooks import state as hook_state
from tests.comm_hooks.training import full_gradients
from tests.ranks import mesh

# Of each format: the relative L2 error that a gradient may have after one rounding.
ERRORS = {"fp16": 2.7e-4, "bf16": 2.4e-3}


class Net(nn.Module):
    """Shapes that no number of ranks, nor a block of 256, divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(37, 53)
        self.second = nn.Sequential(nn.Linear(53, 53), nn.GELU(), nn.Linear(53, 41, bias=False))
        self.last = nn.Linear(41, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.relu(self.first(x))))


def loss_of(model: nn.Module, rank: int, micro: int = 0) -> Tensor:
    x = torch.randn(6, 37, generator=torch.Generator().manual_seed(100 * micro + rank))
    return (model(x.to(next(model.parameters()).dtype)).double() ** 2).mean()


def error(model: nn.Module, micros: int = 1, factor: float = 1.0) -> float:
    """How far gradients are from ``factor`` times the float64 mean of summed microbatches."""
    exact, world = Net().double(), dist.get_world_size()
    for rank, micro in itertools.product(range(world), range(micros)):
        (loss_of(exact, rank, micro) / world).backward()
    true = full_gradients(exact)
    return float((full_gradients(model).double() / factor - true).norm() / true.norm())


def sharded(**settings: Any) -> Any:
    model = Net()
    settings = {"mesh": mesh((dist.get_world_size(),), ("shard",)), **settings}
    for each in (model.first, model.second):
        fully_shard(each, **settings)
    return fully_shard(model, **settings)


# -- FSDP2 -----------------------------------------------------------------------------------------


def _fsdp2(name: str, micros: int, settings: dict[str, Any]) -> tuple[float, int]:
    model = sharded(**settings)
    state = register(model, name)
    for micro in range(micros):
        model.set_requires_gradient_sync(micro + 1 == micros)
        loss_of(model, dist.get_rank(), micro).backward()
    return error(model, micros), state.stats().exchanges


@pytest.mark.parametrize(
    ("world", "name", "micros", "settings", "bound"),
    [
        (2, "fp16", 1, {}, ERRORS["fp16"]),
        (4, "fp16", 1, {}, ERRORS["fp16"]),
        (4, "bf16", 1, {}, ERRORS["bf16"]),
        (2, "fp16", 3, {"reshard_after_forward": True}, ERRORS["fp16"]),
        (2, "fp16", 3, {"reshard_after_forward": False}, ERRORS["fp16"]),
        (2, "fp16", 1, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, ERRORS["fp16"]),
        # bf16's own error.
        (2, "fp16", 1, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, 0.05),
    ],
)
def test_fsdp2_averages_with_one_rounding(ranks, world, name, micros, settings, bound):
    for found, exchanges in ranks(world).run(_fsdp2, name, micros, settings):
        assert found < bound
        # The last layer's shards are too small to be fewer bytes in blocks.
        assert exchanges == 2, "one for each other FSDP module, however many microbatches"


def _divided(factor: float, force_sum: bool, scale: float) -> float:
    model = sharded()
    register(model, "fp16")
    for module in (model, model.first, model.second):
        module.set_gradient_divide_factor(factor)
        module.set_force_sum_reduction_for_comms(force_sum)
    (loss_of(model, dist.get_rank()) * scale).backward()
    return error(model, factor=scale * dist.get_world_size() / factor)


@pytest.mark.parametrize(
    ("factor", "force_sum", "scale"),
    [(1.0, False, 1.0), (5.0, False, 2.0**-20), (2.0, True, 2.0**24), (5.0, True, 2.0**60)],
)
def test_fsdp2s_divide_factor_is_honoured_at_any_loss_scale(ranks2, factor, force_sum, scale):
    assert max(ranks2.run(_divided, factor, force_sum, scale)) < ERRORS["fp16"]


def _planted(name: str) -> list[bool]:
    """Whether this rank's own shards are finite, of inf and NaN on one rank."""
    model = sharded()
    register(model, name)
    finite = []
    for value, on in itertools.product((math.inf, -math.inf, math.nan, 1.0), (0, 3)):
        x = torch.ones(6, 37)
        if dist.get_rank() == on:
            x[0, 0] = value
        model.first(x).sum().backward()
        shards = [p.grad.to_local() for p in model.first.parameters()]
        finite.append(all(bool(each.isfinite().all()) for each in shards))
        model.first.zero_grad()
    return finite


@pytest.mark.parametrize("name", list(ERRORS))
def test_inf_and_nan_arrive_where_they_belong(ranks4, name):
    finite = [all(case) for case in zip(*ranks4.run(_planted, name), strict=True)]
    assert finite == [False] * 6 + [True] * 2


def _replicas(wire: str, by_mesh: bool, micros: int) -> tuple[float, int, int]:
    """Two replicas of two shards, by one mesh or by ``replicas=``; its error and exchanges."""
    world = mesh((2, 2), ("replicate", "shard"))
    model = sharded(mesh=world if by_mesh else world["shard"])
    replicas = None if by_mesh else world["replicate"].get_group()
    state = register(model, wire, replicas=replicas)
    for micro in range(micros):
        model.set_requires_all_reduce(micro + 1 == micros)
        loss_of(model, dist.get_rank(), micro).backward()
    stats = state.stats()
    return error(model, micros), stats.exchanges, sum(stats.fallbacks.values())


@pytest.mark.parametrize("by_mesh", [False, True])
@pytest.mark.parametrize(("wire", "bound"), [("fp16", 8e-4), ("int8", 4e-2)])
def test_replicas_are_averaged_through_the_wire_once_a_step(ranks4, wire, bound, by_mesh):
    for found, exchanges, as_they_are in ranks4.run(_replicas, wire, by_mesh, 3):
        assert found < bound
        # Of each of three modules three reduce-scatters, and one average between replicas.
        assert exchanges + as_they_are == 3 * 3 + 3


def _hosts(wire: str) -> tuple[float, dict[str, int], str]:
    """The same where shards are on one host, and replicas on another."""
    model = sharded(mesh=mesh((2, 2), ("replicate", "shard")))
    with patch.object(socket, "gethostname", lambda: "aabb"[dist.get_rank()]):
        state = register(model, wire)
    loss_of(model, dist.get_rank()).backward()
    stats = state.stats()
    return error(model), dict(stats.bytes_sent), stats.levels


def test_shards_within_a_host_are_reduced_as_they_are(ranks4):
    for found, sent, _ in ranks4.run(_hosts, "int8"):
        assert found < 2e-2
        # 7049 elements in two large modules, of which each shard is averaged between two hosts.
        assert sent["int8"] < 7049 / 2 * 1.3


def _fed_back(steps: int) -> tuple[float, float]:
    """The error of the sum of all gradients so far, after one step and after all."""
    model, found = sharded(), []
    register(model, "int8")
    for step in range(1, steps + 1):
        # Gradients add up where they are.
        loss_of(model, dist.get_rank()).backward()
        found.append(error(model, factor=step))
    return found[0], found[-1]


def test_what_rounding_takes_of_shards_comes_back(ranks2):
    for first, last in ranks2.run(_fed_back, 16):
        assert first < 2e-2
        assert last < first / 5


def _gathered(wire: str, hosts: str) -> tuple[float, float, bool]:
    """How far outputs are from those of exact weights; errors of gradients; and the shards."""
    model, exact = sharded(), Net()
    before = [p.to_local().clone() for p in model.parameters()]
    with patch.object(socket, "gethostname", lambda: hosts[dist.get_rank()]):
        state = register(model, "fp16", gather=wire)
    x = torch.randn(6, 37, generator=torch.Generator().manual_seed(0))
    out, true = model(x), exact(x)
    loss_of(model, dist.get_rank()).backward()
    after = [p.to_local() for p in model.parameters()]
    assert state.stats().bytes_sent[f"{wire} weights"] > 0
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, out.detach())
    same = all(torch.equal(each, out) for each in every)
    off = float((out - true).detach().norm() / true.detach().norm())
    return off, error(model), same and all(map(torch.equal, before, after))


@pytest.mark.parametrize(
    ("hosts", "wire", "bound"), [("ab", "int8", 2e-2), ("ab", "bf16", 5e-3), ("abba", "int8", 2e-2)]
)
def test_weights_are_gathered_through_the_wire_and_shards_stay_exact(ranks, hosts, wire, bound):
    for off, wrong, exact in ranks(len(hosts)).run(_gathered, wire, hosts):
        assert 1e-5 < off < bound
        assert wrong < 3 * bound
        assert exact


def _saved(folder: str, load: bool) -> tuple[list[Tensor], list[str]]:
    """Gradients of the fourth step, after all that was saved before it is loaded, or without."""
    model = sharded()
    state = register(model, "int8")
    for _ in range(0 if load else 3):
        model.zero_grad()
        loss_of(model, dist.get_rank()).backward()
    warned: list[str] = []
    if load:
        saved = {"hook": state.state_dict()}
        planner = DefaultLoadPlanner(allow_partial_load=True)
        checkpoint.load(saved, checkpoint_id=folder, planner=planner)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state.load_state_dict(saved["hook"])
        warned = [str(each.message) for each in caught]
    else:
        checkpoint.save({"hook": state.state_dict()}, checkpoint_id=folder)
    model.zero_grad()
    loss_of(model, dist.get_rank()).backward()
    return [p.grad.to_local() for p in model.parameters()], warned


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_residuals_of_shards_go_on_to_the_bit_by_torchs_checkpoints(ranks, tmp_path):
    whole = ranks(2).run(_saved, str(tmp_path), False)
    resumed = ranks(2).run(_saved, str(tmp_path), True)
    for (expected, _), (found, warned) in zip(whole, resumed, strict=True):
        assert all(map(torch.equal, expected, found))
        assert warned == []


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_residuals_of_another_number_of_ranks_are_said_to_be_lost(ranks, tmp_path):
    ranks(4).run(_saved, str(tmp_path), False)
    for _, warned in ranks(2).run(_saved, str(tmp_path), True):
        assert any("saved by 4 ranks, and this is rank" in each for each in warned)


def _separate() -> tuple[float, int]:
    """torch's own group for reduce-scatters, of the same ranks."""
    model = sharded()
    state = register(model, "fp16")
    before = len(state.stats().levels)
    model.set_separate_reduce_scatter_group()
    with patch.object(hook_state, "agreed", side_effect=AssertionError("within backward")):
        loss_of(model, dist.get_rank()).backward()
    return error(model), before


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="newer than torch 2.11"
)
def test_a_separate_group_for_reduce_scatters_needs_no_other_exchange(ranks2):
    for found, _ in ranks2.run(_separate):
        assert found < ERRORS["fp16"]


def _replicated(dtypes: bool) -> tuple[float, int, dict[str, int]]:
    """``replicate``, and of which one small layer is in bf16."""
    from torch.distributed._composable import replicate_with_fsdp

    model, over = Net(), mesh((dist.get_world_size(),), ("replicate",))
    for each in (model.first, model.second):
        replicate_with_fsdp.replicate(each, mesh=over)
    policy = MixedPrecisionPolicy(output_dtype=torch.float32)
    if dtypes:
        policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    replicate_with_fsdp.replicate(model.last, mesh=over, mp_policy=policy)
    state = register(model, "fp16")
    loss_of(model, dist.get_rank()).backward()
    stats = state.stats()
    return error(model), stats.exchanges, dict(stats.fallbacks)


@pytest.mark.parametrize("dtypes", [False, True])
def test_replicate_is_hooked_and_a_small_layer_of_another_dtype_refuses_nothing(ranks2, dtypes):
    for found, exchanges, fallbacks in ranks2.run(_replicated, dtypes):
        assert found < (3e-2 if dtypes else 2 * ERRORS["fp16"])
        assert exchanges == 2
        (why,) = fallbacks
        assert ("bfloat16" if dtypes else "too few elements") in why


def _fails() -> tuple[list[str], bool]:
    """What passes say after one that fails on rank 1, and whether an optimizer has gradients."""
    model, rank = sharded(), dist.get_rank()
    register(model, "fp16")
    loss_of(model, rank).backward()
    model.zero_grad()
    # Of a pass that failed the module is left with other ones: whole, which nobody steps.
    said, parameters = [], list(model.parameters())
    failing = patch.object(formats, "encode", side_effect=RuntimeError("out of memory"))
    for step in range(4):
        if (step, rank) == (0, 1):
            failing.start()
        with pytest.raises(RuntimeError) as raised:
            loss_of(model, rank).backward()
        patch.stopall()
        said.append(str(raised.value))
    return said, any(parameter.grad is not None for parameter in parameters)


def test_after_an_exchange_that_failed_every_later_pass_raises_too(new_ranks):
    for said, reduced in new_ranks(2, group_timeout=60).run(_fails):
        assert not reduced
        assert len(set(said)) == 1, "the first failure, again"


def _plans(sizes: int) -> list[int]:
    """How many plans there are of a model of modules of so many sizes, after each of two steps."""
    model: Any = nn.ModuleList(nn.Linear(40 + each, 60) for each in range(sizes))
    for each in model:
        fully_shard(each, mesh=mesh((dist.get_world_size(),), ("shard",)))
    made = []
    with patch.object(exchange, "shard_plan", wraps=exchange.shard_plan) as plan:
        register(model, "fp16")
        for _ in range(2):
            losses = [each(torch.ones(1, each.in_features)).sum() for each in model]
            torch.stack(losses).sum().backward()
            made.append(plan.call_count)
    return made


def test_plans_of_more_than_32_sizes_of_modules_are_made_once(ranks2):
    for made in ranks2.run(_plans, 40):
        assert made == [40, 40]


# -- FSDP1 -----------------------------------------------------------------------------------------


def wrapped(**settings: Any) -> FullyShardedDataParallel:
    model = Net()
    settings = {"device_id": torch.device("cpu"), "use_orig_params": True, **settings}
    for name in ("first", "second"):
        setattr(model, name, FullyShardedDataParallel(getattr(model, name), **settings))
    return FullyShardedDataParallel(model, **settings)


def _fsdp1(hook: str, strategy: str) -> float:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy", FutureWarning)
        model = wrapped(sharding_strategy=ShardingStrategy[strategy])
    if hook == "register":
        register(model, "fp16")
    else:
        hooks = {"fp16": fsdp_fp16_compress_hook, "bf16": fsdp_bf16_compress_hook}
        model.register_comm_hook(LowPrecisionState(model.process_group), hooks[hook])
    loss_of(model, dist.get_rank()).backward()
    return error(model)


@pytest.mark.parametrize(
    ("world", "hook", "strategy", "bound"),
    [
        (2, "register", "FULL_SHARD", ERRORS["fp16"]),
        (2, "fp16", "SHARD_GRAD_OP", ERRORS["fp16"]),
        (4, "bf16", "FULL_SHARD", ERRORS["bf16"]),
        # Without shards gradients are all-reduced, with two roundings.
        (4, "fp16", "NO_SHARD", 2 * ERRORS["fp16"]),
    ],
)
def test_fsdp1s_hooks_run_on_a_cpu(ranks, world, hook, strategy, bound):
    assert max(ranks(world).run(_fsdp1, hook, strategy)) < bound


def _direct(dtype: torch.dtype, parameter_type: torch.dtype) -> float:
    rank, world = dist.get_rank(), dist.get_world_size()
    values = torch.randn(world, world * 700, generator=torch.Generator().manual_seed(0)).to(dtype)
    state = LowPrecisionState(dist.group.WORLD, parameter_type)
    state.gradient_predivide_factor, state.gradient_postdivide_factor = 1.0, 7.0
    output = torch.empty(700, dtype=dtype)
    fsdp_fp16_compress_hook(state, values[rank].clone(), output)
    assert output.dtype == parameter_type
    exact = values.double().sum(0)[rank * 700 :][:700] / 7
    return float((output.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("parameter_type", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_hook_casts_to_the_parameters_dtype(ranks4, dtype, parameter_type):
    # Gradients of two bytes go as they are, and are added up in fp16.
    bound = 1e-3 if dtype == torch.float16 else ERRORS["fp16"]
    bound = 4e-3 if parameter_type == torch.bfloat16 else bound
    assert max(ranks4.run(_direct, dtype, parameter_type)) < bound


# -- what cannot be --------------------------------------------------------------------------------


def _refused(case: str) -> str:
    world = mesh((dist.get_world_size(),), ("shard",))
    wire, options = "int8" if case.startswith("int8") else "fp16", {}
    model: Any = Net()
    if case == "FSDP2 in bf16":
        model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    elif case == "FSDP2 with replicas":
        model = sharded(mesh=mesh((2, 1), ("replicate", "shard")))
        options["replicas"] = world.get_group()
    elif case == "FSDP2 with a user's hook":
        model = sharded(mesh=mesh((2, 1), ("replicate", "shard")))
        model.first.set_all_reduce_hook(lambda shard: None)
    elif case == "FSDP1 in fp16":
        model = wrapped(mixed_precision=MixedPrecision(param_dtype=torch.float16))
    elif case == "FSDP1 of replicas":
        over = mesh((1, dist.get_world_size()), ("replicate", "shard"))
        model = wrapped(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=over)
    elif case == "inner FSDP1":
        outer = wrapped()
        loss_of(outer, 0)
        model = outer.first
    elif case != "no wrapper":
        model = sharded() if case.endswith("FSDP2") else wrapped()
    with pytest.raises((TypeError, ValueError, AssertionError)) as caught:
        register(model, wire, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "match"),
    [
        ("no wrapper", "cannot give Net a communication hook"),
        ("FSDP2 in bf16", "reduced in torch.bfloat16, which takes 2: choose 'bf16'"),
        ("FSDP2 with replicas", "two-dimensional mesh"),
        ("FSDP2 with a user's hook", "FSDPLinear has an all-reduce hook already"),
        ("int8 under FSDP1", "needs error feedback"),
        ("FSDP1 in fp16", "gradients are reduced in torch.float16, which takes 2"),
        ("FSDP1 of replicas", "not supported for hybrid strategies"),
        ("inner FSDP1", "can only be called on a root instance"),
    ],
)
def test_what_cannot_be_is_said(ranks2, case, match):
    for message in ranks2.run(_refused, case):
        assert match in message
