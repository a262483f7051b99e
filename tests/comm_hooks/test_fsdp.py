"""FSDP2 and FSDP1 through a wire, on real ranks, against the float64 mean without shards."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from typing import Any

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
from torch.distributed.tensor import DTensor

from distamp.comm_hooks import (
    LowPrecisionState,
    fsdp_bf16_compress_hook,
    fsdp_fp16_compress_hook,
    register,
)
from tests.ranks import mesh

# Of each format: the relative L2 error that a gradient may have.
ERRORS = {"fp16": 2.7e-4, "bf16": 2.4e-3}


class Net(nn.Module):
    """Shapes that no number of ranks, nor a block of 256, divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(37, 53)
        self.second = nn.Sequential(nn.Linear(53, 53), nn.GELU(), nn.Linear(53, 41, bias=False))
        self.last = nn.Linear(41, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.relu(self.first(x))))


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(rank: int, micro: int = 0) -> Tensor:
    return torch.randn(6, 37, generator=torch.Generator().manual_seed(100 * micro + rank))


def loss_of(output: Tensor) -> Tensor:
    return (output.double() ** 2).mean()


def expected(world: int, micros: int = 1) -> dict[str, Tensor]:
    """The float64 mean over ranks of the sum over microbatches."""
    model = net(torch.float64)
    for rank in range(world):
        for micro in range(micros):
            (loss_of(model(batch(rank, micro).double())) / world).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def full(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def errors(model: nn.Module, reference: dict[str, Tensor], factor: float = 1.0) -> list[float]:
    """The relative L2 error of each parameter's gradient, and of all together."""
    gradients = {name: full(p.grad).double() / factor for name, p in model.named_parameters()}
    return relative(gradients, reference)


def relative(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> list[float]:
    pairs = [(gradients[name], exact) for name, exact in reference.items()]
    pairs.append(tuple(torch.cat([t.flatten() for t in side]) for side in zip(*pairs, strict=True)))
    return [float((g - exact).norm() / exact.norm()) for g, exact in pairs]


def within(found: list[float], name: str, roundings: int = 1) -> bool:
    """Whether all gradients together, and each within four times more, are near enough."""
    *each, together = found
    return together < ERRORS[name] * roundings and max(each) < 4 * ERRORS[name] * roundings


def sharded(model: nn.Module, **settings: Any) -> nn.Module:
    settings = {"mesh": mesh((dist.get_world_size(),), ("shard",)), **settings}
    for each in (model.first, model.second):
        fully_shard(each, **settings)
    return fully_shard(model, **settings)


# -- FSDP2 ------------------------------------------------------------------------------------


def fsdp2(name: str, micros: int, settings: dict[str, Any]) -> tuple[list[float], int, int]:
    model = sharded(net(), **settings)
    counts = register(model, name).counts
    for micro in range(micros):
        model.set_requires_gradient_sync(micro + 1 == micros)
        loss_of(model(batch(dist.get_rank(), micro))).backward()
    sent = counts.bytes_sent[name]
    return errors(model, expected(dist.get_world_size(), micros)), counts.exchanges, sent


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", list(ERRORS))
def test_fsdp2_averages_with_one_rounding(ranks, world, name):
    for found, exchanges, _ in ranks(world).run(fsdp2, name, 1, {}):
        assert within(found, name)
        assert exchanges == 3, "one for each FSDP module"


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_accumulates_without_exchanges(ranks2, reshard):
    for found, exchanges, _ in ranks2.run(fsdp2, "fp16", 3, {"reshard_after_forward": reshard}):
        assert within(found, "fp16")
        assert exchanges == 3


def test_fsdp2_offloads_gradients(ranks2):
    settings = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for found, _, _ in ranks2.run(fsdp2, "fp16", 1, settings):
        assert within(found, "fp16")


def test_fsdp2_computes_in_bf16_and_reduces_in_fp32(ranks2):
    settings = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    for found, _, _ in ranks2.run(fsdp2, "fp16", 1, settings):
        assert max(found) < 0.05, "bf16's own error"


def _divided() -> list[list[float]]:
    model = sharded(net())
    register(model, "fp16")
    found = []
    for factor, force_sum in itertools.product((1.0, 2.0, 5.0), (False, True)):
        model.zero_grad()
        for module in (model, model.first, model.second):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(force_sum)
        loss_of(model(batch(dist.get_rank()))).backward()
        world = dist.get_world_size()
        found.append(errors(model, expected(world), world / factor))
    return found


def test_fsdp2s_divide_factor_is_honoured(ranks2):
    for found in itertools.chain.from_iterable(ranks2.run(_divided)):
        assert within(found, "fp16")


def _scaled(scale: float) -> list[float]:
    model = sharded(net())
    register(model, "fp16")
    (loss_of(model(batch(dist.get_rank()))) * scale).backward()
    return errors(model, expected(dist.get_world_size()), scale)


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**24, 2.0**60])
def test_no_loss_scale_over_or_underflows(ranks2, scale):
    for found in ranks2.run(_scaled, scale):
        assert within(found, "fp16")


def _planted(name: str) -> list[tuple[float, bool]]:
    """Whether this rank's own shards are finite, of inf and NaN on one rank."""
    model = sharded(net())
    register(model, name)
    answers = []
    for value, on in itertools.product((math.inf, -math.inf, math.nan, 1.0), (0, 3)):

        def spoil(gradient: Tensor, value: float = value) -> Tensor:
            gradient = gradient.clone()
            gradient[0, 0] = value
            return gradient

        hidden = model.first(batch(dist.get_rank()))
        if dist.get_rank() == on:
            hidden.register_hook(spoil)
        hidden.sum().backward()
        shards = [p.grad.to_local() for p in model.first.parameters()]
        answers.append((value, all(bool(each.isfinite().all()) for each in shards)))
        model.first.zero_grad()
    return answers


@pytest.mark.parametrize("name", list(ERRORS))
def test_inf_and_nan_arrive_where_they_belong(ranks4, name):
    for cases in zip(*ranks4.run(_planted, name), strict=True):
        arrived = not all(finite for _, finite in cases)
        assert arrived is not math.isfinite(cases[0][0])


def _replicas() -> list[float]:
    world = mesh((2, 2), ("replicate", "shard"))
    model = sharded(net(), mesh=world["shard"])
    register(model, "fp16", replicas=world["replicate"].get_group())
    loss_of(model(batch(dist.get_rank()))).backward()
    return errors(model, expected(4))


def test_replicas_are_averaged_through_the_wire_too(ranks4):
    for found in ranks4.run(_replicas):
        assert within(found, "fp16", roundings=3)


def _hsdp() -> tuple[list[float], dict[str, int]]:
    model = sharded(net(), mesh=mesh((2, 2), ("replicate", "shard")))
    state = register(model, "fp16")
    loss_of(model(batch(dist.get_rank()))).backward()
    return errors(model, expected(4)), dict(state.stats().fallbacks)


def test_torchs_hsdp_keeps_its_all_reduce_and_says_so(ranks4):
    for found, fallbacks in ranks4.run(_hsdp):
        assert within(found, "fp16")
        assert fallbacks == {
            "module that torch's HSDP all-reduces between replicas uncompressed": 3
        }


def _refused2(case: str) -> str:
    world = mesh((dist.get_world_size(),), ("shard",))
    wire = "fp16"
    model: nn.Module = net()
    options: dict[str, Any] = {}
    if case == "twice":
        register(sharded(model), wire)
    elif case == "bf16":
        sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    elif case == "int8":
        wire = "int8"
        sharded(model)
    elif case == "replicas":
        sharded(model, mesh=mesh((2, 1), ("replicate", "shard")))
        options["replicas"] = world.get_group()
    with pytest.raises((TypeError, ValueError)) as caught:
        register(model, wire, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "match"),
    [
        ("none", "cannot give Net a communication hook"),
        ("twice", "has a custom reduce-scatter already"),
        ("bf16", "reduced in torch.bfloat16, which takes 2: choose 'bf16'"),
        ("int8", "needs error feedback.*'fp16', 'bf16'"),
        ("replicas", "two-dimensional mesh"),
    ],
)
def test_what_fsdp2_cannot_do_is_said(ranks2, case, match):
    for message in ranks2.run(_refused2, case):
        assert "\n" not in message
        assert re.search(match, message), message


# -- FSDP1 ------------------------------------------------------------------------------------


def wrapped(model: nn.Module, **settings: Any) -> FullyShardedDataParallel:
    settings = {"device_id": torch.device("cpu"), "use_orig_params": True, **settings}
    for name in ("first", "second"):
        setattr(model, name, FullyShardedDataParallel(getattr(model, name), **settings))
    return FullyShardedDataParallel(model, **settings)


def errors1(model: FullyShardedDataParallel, reference: dict[str, Tensor]) -> list[float]:
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        gradients = {
            name.replace("_fsdp_wrapped_module.", ""): p.grad.double()
            for name, p in model.named_parameters()
        }
    return relative(gradients, reference)


def _fsdp1(hook: str, strategy: str, micros: int) -> list[float]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy", FutureWarning)
        model = wrapped(net(), sharding_strategy=ShardingStrategy[strategy])
    hooks = {"fp16": fsdp_fp16_compress_hook, "bf16": fsdp_bf16_compress_hook}
    model.register_comm_hook(LowPrecisionState(model.process_group), hooks[hook])
    for micro in range(micros - 1):
        with model.no_sync():
            loss_of(model(batch(dist.get_rank(), micro))).backward()
    loss_of(model(batch(dist.get_rank(), micros - 1))).backward()
    return errors1(model, expected(dist.get_world_size(), micros))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_fsdp1s_hooks_run_on_a_cpu(ranks, world, strategy, hook):
    for found in ranks(world).run(_fsdp1, hook, strategy, 1):
        assert within(found, hook)


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_fsdp1_without_shards_all_reduces(ranks, hook):
    for found in ranks(4).run(_fsdp1, hook, "NO_SHARD", 1):
        assert within(found, hook, roundings=2)


def _direct(dtype: torch.dtype, parameter_type: torch.dtype) -> list[tuple[Any, float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    values = [
        torch.randn(world * 70, generator=torch.Generator().manual_seed(r)).to(dtype)
        for r in range(world)
    ]
    answers = []
    for pre, post in ((2.0, 2.0), (1.0, 1.0), (1.0, 7.0)):
        state = LowPrecisionState(dist.group.WORLD, parameter_type)
        state.gradient_predivide_factor, state.gradient_postdivide_factor = pre, post
        output = torch.empty(70, dtype=dtype)
        fsdp_fp16_compress_hook(state, values[rank], output)
        exact = sum(v.double() for v in values)[rank * 70 :][:70] / (pre * post)
        error = float((output.double() - exact).norm() / exact.norm())
        answers.append((output.dtype, error))
    return answers


@pytest.mark.parametrize("parameter_type", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_hook_casts_to_the_parameters_dtype(ranks4, dtype, parameter_type):
    bound = 4e-3 if parameter_type == torch.bfloat16 else ERRORS["fp16"]
    for answers in ranks4.run(_direct, dtype, parameter_type):
        for found, error in answers:
            assert found == parameter_type
            assert error < bound


def _register1(name: str) -> tuple[list[float], int]:
    model = wrapped(net())
    state = register(model, name)
    loss_of(model(batch(dist.get_rank()))).backward()
    return errors1(model, expected(dist.get_world_size())), state.counts.bytes_sent[name]


@pytest.mark.parametrize("name", list(ERRORS))
def test_fsdp1_takes_every_format_without_feedback(ranks2, name):
    for found, sent in ranks2.run(_register1, name):
        assert within(found, name)
        assert sent > 0


def _refused1(case: str) -> str:
    wire = "int8" if case == "int8" else "fp16"
    settings: dict[str, Any] = {}
    if case == "fp16":
        settings["mixed_precision"] = MixedPrecision(param_dtype=torch.float16)
    if case == "hybrid":
        world = mesh((1, dist.get_world_size()), ("replicate", "shard"))
        settings |= {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": world}
    model = wrapped(net(), **settings)
    if case == "twice":
        register(model, wire)
    if case == "inner":
        model(batch(0))
    with pytest.raises(ValueError) as caught:
        register(model.first if case == "inner" else model, wire)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "match"),
    [
        ("twice", "a communication hook already"),
        ("fp16", "gradients are reduced in torch.float16, which takes 2"),
        ("int8", "needs error feedback"),
        ("hybrid", "no communication hook with"),
        ("inner", "register on the outermost one"),
    ],
)
def test_what_fsdp1_cannot_do_is_said(ranks2, case, match):
    for message in ranks2.run(_refused1, case):
        assert "\n" not in message
        assert match in message
