"""FSDP2 and FSDP1 through a wire, on real ranks, against the float64 mean without shards."""

import itertools
import math
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)

from distamp.comm_hooks import (
    LowPrecisionState,
    formats,
    fsdp_bf16_compress_hook,
    fsdp_fp16_compress_hook,
    register,
)
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


def _replicas(by_torch: bool) -> tuple[float, dict[str, int]]:
    world = mesh((2, 2), ("replicate", "shard"))
    model = sharded(mesh=world if by_torch else world["shard"])
    replicas = None if by_torch else world["replicate"].get_group()
    state = register(model, "fp16", replicas=replicas)
    loss_of(model, dist.get_rank()).backward()
    return error(model), dict(state.stats().fallbacks)


def test_replicas_are_averaged_through_the_wire_and_torchs_hsdp_says_that_it_does_not(ranks4):
    for found, fallbacks in ranks4.run(_replicas, False):
        assert found < 3 * ERRORS["fp16"]
        assert all("too few" in why for why in fallbacks)
    uncompressed = "module that torch's HSDP all-reduces between replicas uncompressed"
    for found, fallbacks in ranks4.run(_replicas, True):
        assert found < ERRORS["fp16"]
        assert fallbacks[uncompressed] == 3


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
    bound = 4e-3 if parameter_type == torch.bfloat16 else ERRORS["fp16"]
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
    with pytest.raises((TypeError, ValueError)) as caught:
        register(model, wire, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "match"),
    [
        ("no wrapper", "cannot give Net a communication hook"),
        ("FSDP2 in bf16", "reduced in torch.bfloat16, which takes 2: choose 'bf16'"),
        ("FSDP2 with replicas", "two-dimensional mesh"),
        ("int8 under FSDP2", "needs error feedback"),
        ("int8 under FSDP1", "needs error feedback"),
        ("FSDP1 in fp16", "gradients are reduced in torch.float16, which takes 2"),
        ("FSDP1 of replicas", "no communication hook with"),
        ("inner FSDP1", "register on the outermost one"),
    ],
)
def test_what_cannot_be_is_said(ranks2, case, match):
    for message in ranks2.run(_refused, case):
        assert match in message
