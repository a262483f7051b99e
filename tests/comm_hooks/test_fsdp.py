"""FSDP2 and FSDP1 through a wire, on real ranks, against the float64 mean without shards."""

import itertools
import socket
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distamp.comm_hooks import (
    LowPrecisionState,
    fsdp_bf16_compress_hook,
    fsdp_fp16_compress_hook,
    register_comm_hook,
)
from distamp.fsdp_unit import FSDPUnit
from tests.comm_hooks.training import Given, agreed, full_gradients, relative
from tests.on_ranks import on_ranks
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
    return relative(full_gradients(model).double() / factor, full_gradients(exact))


def sharded(**settings: Any) -> Any:
    model = Net()
    settings = {"mesh": mesh((dist.get_world_size(),), ("shard",)), **settings}
    for each in (model.first, model.second):
        fully_shard(each, **settings)
    return fully_shard(model, **settings)


newer_than_2_11 = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="newer than torch 2.11"
)

since_2_15 = pytest.mark.skipif(
    not hasattr(FSDPModule, "finalize_backward"), reason="FSDP2 does this since torch 2.15"
)


# -- FSDP2 -----------------------------------------------------------------------------------------


class Reduces:
    """FSDP2's reduce-scatter, which notes what it is given."""

    def __init__(self) -> None:
        self.found: set[torch.dtype] = set()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:
        self.found.add(input_tensor.dtype)
        output_tensor.zero_()


@on_ranks(2)
@pytest.mark.parametrize("reduces", [None, torch.float32, torch.float16])
@pytest.mark.parametrize("gathers", [None, torch.bfloat16])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_gradients_are_reduced_in_the_dtype_that_is_foretold(own, gathers, reduces):
    """Without ``reduce_dtype`` it is another one since torch 2.15."""
    policy = MixedPrecisionPolicy(gathers, reduces, output_dtype=torch.float32)
    layer = fully_shard(nn.Linear(64, 64, dtype=own), mp_policy=policy)
    comm = Reduces()
    layer.set_custom_reduce_scatter(comm)
    layer(torch.ones(2, 64, dtype=own)).sum().backward()
    assert comm.found == {FSDPUnit(layer).reduce_dtype(own)}


F32, BF16 = torch.float32, torch.bfloat16


@since_2_15
@on_ranks(2)
@pytest.mark.parametrize("gathers", [None, BF16])
@pytest.mark.parametrize("reduces", [None, torch.float16])
@pytest.mark.parametrize("grad_dtypes", [(BF16, BF16), (BF16, F32), (F32, None), (None, None)])
def test_the_dtype_of_a_reduction_is_foretold_for_any_grad_dtype(grad_dtypes, reduces, gathers):
    """Without ``reduce_dtype`` gradients of several dtypes are promoted."""
    layer = nn.Linear(64, 64)
    layer.weight.grad_dtype, layer.bias.grad_dtype = grad_dtypes
    policy = MixedPrecisionPolicy(gathers, reduces, output_dtype=F32)
    fully_shard(layer, mp_policy=policy)
    comm = Reduces()
    layer.set_custom_reduce_scatter(comm)
    expected = FSDPUnit(layer).grad_reduce_dtype
    layer(torch.ones(2, 64)).sum().backward()
    assert comm.found == {expected}


@since_2_15
@on_ranks(2)
def test_gradients_of_several_dtypes_in_one_unit_are_rounded_parameter_by_parameter():
    """torch sends gradients of one dtype together, and int8 has a scale for each parameter."""
    numels, sizes = (3000, 2000, 5000, 1000), (1.0, 1e6, 1.0, 1e6)
    model = Given(*numels)
    for part in model.parts[1::2]:
        part.grad_dtype = BF16
    model = fully_shard(model, mesh=mesh((2,), ("shard",)))
    state = register_comm_hook(model, "int8")
    generator = torch.Generator().manual_seed(0)
    given = []
    for _ in range(dist.get_world_size()):
        grads = [torch.randn(numel, generator=generator) for numel in numels]
        given.append([size * grad for size, grad in zip(sizes, grads, strict=True)])
    model(given[dist.get_rank()]).backward()
    assert state.stats().exchanges == 1
    for part, grads in zip(model.parts, zip(*given, strict=True), strict=True):
        assert part.grad.dtype is part.grad_dtype
        assert relative(part.grad.full_tensor().float(), sum(grads) / 2) < 2e-2


@on_ranks(2)
@pytest.mark.parametrize("dtype", [None, BF16])
def test_a_parameter_is_gathered_in_the_dtype_that_its_unit_foretells(dtype):
    layer = fully_shard(nn.Linear(8, 8), mp_policy=MixedPrecisionPolicy(dtype))
    unit, shard = FSDPUnit(layer), layer.weight
    foretold = unit.param_dtype_of(shard)
    layer.unshard()
    assert layer.weight is not shard
    assert layer.weight.dtype is foretold
    assert unit.param_dtype_of(layer.weight) is foretold
    with pytest.raises(ValueError, match="is not sharded by the unit FSDPLinear"):
        unit.param_dtype_of(nn.Parameter(torch.ones(8, 8)))


class Normalized(nn.Module):
    """A linear layer in bfloat16, and a norm in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x.bfloat16())
        return self.norm(hidden.float())


def sharded_with_fp32_norm() -> Any:
    model = Normalized()
    norm = set(map(id, model.norm.parameters()))

    def override(param: Tensor) -> torch.dtype | None:
        return F32 if id(param) in norm else None

    policy = MixedPrecisionPolicy(BF16, F32, param_dtype_override_fn=override)
    return fully_shard(model, mp_policy=policy)


@since_2_15
@on_ranks(2)
def test_a_parameter_is_gathered_in_the_dtype_of_its_override():
    layers = sharded_with_fp32_norm()
    unit = FSDPUnit(layers)
    foretold = [unit.param_dtype_of(param) for param in layers.parameters()]
    layers.unshard()
    assert foretold == [BF16, BF16, F32, F32]
    assert [param.dtype for param in layers.parameters()] == foretold


@since_2_15
@on_ranks(2)
def test_a_unit_with_an_override_is_reduced_through_the_wire():
    layers = sharded_with_fp32_norm()
    plain = sharded_with_fp32_norm()
    state = register_comm_hook(layers, "fp16", param_format="int8")
    inputs = torch.randn(6, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for model in (layers, plain):
        (model(inputs) ** 2 * inputs).mean().backward()
    assert state.stats().exchanges == 1
    assert "weights gathered uncompressed: of several dtypes" in str(state.stats())
    assert relative(full_gradients(layers), full_gradients(plain)) < ERRORS["fp16"]


@since_2_15
@on_ranks(2)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_a_backward_pass_that_the_user_finalizes_is_reduced_through_the_wire(wire, async_op):
    model = sharded()
    state = register_comm_hook(model, wire)
    model.set_manual_backward_finalization(True)
    for micro in range(3):
        model.set_requires_gradient_sync(False)
        loss_of(model, dist.get_rank(), micro).backward()
    assert not state.stats().exchanges
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=async_op)
    if async_op:
        handle.wait()
    stats = state.stats()
    assert stats.exchanges >= 2
    assert stats.exchanges + sum(stats.fallbacks.values()) == 3
    assert error(model, 3) < (ERRORS["fp16"] if wire == "fp16" else 2e-2)


@on_ranks("world")
@pytest.mark.parametrize(
    ("world", "name", "micros", "settings", "bound"),
    [
        (2, "fp16", 1, {}, ERRORS["fp16"]),
        (4, "fp16", 1, {}, ERRORS["fp16"]),
        (4, "bf16", 1, {}, ERRORS["bf16"]),
        (2, "fp16", 3, {"reshard_after_forward": True}, ERRORS["fp16"]),
        (2, "fp16", 3, {"reshard_after_forward": False}, ERRORS["fp16"]),
        (2, "fp16", 1, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, ERRORS["fp16"]),
        # torch's own group for reduce-scatters, of the same ranks.
        pytest.param(2, "fp16", 1, {"separate": True}, ERRORS["fp16"], marks=newer_than_2_11),
        # bf16's own error.
        (2, "fp16", 1, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, 0.05),
    ],
)
def test_fsdp2_averages_with_one_rounding(world, name, micros, settings, bound):
    separate = settings.pop("separate", False)
    model = sharded(**settings)
    state = register_comm_hook(model, name)
    if separate:
        model.set_separate_reduce_scatter_group()
    for micro in range(micros):
        model.set_requires_gradient_sync(micro + 1 == micros)
        loss_of(model, dist.get_rank(), micro).backward()
    assert error(model, micros) < bound
    # The last layer's shards are too small to be fewer bytes in blocks.
    assert state.stats().exchanges == 2, "one for each other module, however many microbatches"


@on_ranks(2)
@pytest.mark.parametrize(
    ("factor", "force_sum", "scale"),
    [(1.0, False, 1.0), (5.0, False, 2.0**-20), (2.0, True, 2.0**24), (5.0, True, 2.0**60)],
)
def test_fsdp2s_divide_factor_is_honoured_at_any_loss_scale(factor, force_sum, scale):
    model = sharded()
    register_comm_hook(model, "fp16")
    for module in (model, model.first, model.second):
        module.set_gradient_divide_factor(factor)
        module.set_force_sum_reduction_for_comms(force_sum)
    (loss_of(model, dist.get_rank()) * scale).backward()
    assert error(model, factor=scale * dist.get_world_size() / factor) < ERRORS["fp16"]


@on_ranks(4)
@pytest.mark.parametrize("by_mesh", [False, True])
@pytest.mark.parametrize(("wire", "bound"), [("fp16", 8e-4), ("int8", 4e-2)])
def test_replicas_are_averaged_through_the_wire_once_a_step(wire, bound, by_mesh):
    """Two replicas of two shards, by one mesh or by ``replicas=``."""
    world = mesh((2, 2), ("replicate", "shard"))
    model = sharded(mesh=world if by_mesh else world["shard"])
    replicas = None if by_mesh else world["replicate"].get_group()
    state = register_comm_hook(model, wire, replicas=replicas)
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        loss_of(model, dist.get_rank(), micro).backward()
    assert error(model, 3) < bound
    stats = state.stats()
    # Of each of three modules three reduce-scatters, and one average between replicas.
    assert stats.exchanges + sum(stats.fallbacks.values()) == 3 * 3 + 3


@on_ranks(2)
def test_what_rounding_takes_of_shards_comes_back():
    model, found = sharded(), []
    register_comm_hook(model, "int8")
    for step in range(1, 17):
        # Gradients add up where they are.
        loss_of(model, dist.get_rank()).backward()
        found.append(error(model, factor=step))
    assert 2e-2 > found[0] > 5 * found[-1]


@on_ranks(4)
def test_what_rounding_takes_comes_back_to_the_part_of_a_shard_that_it_was_taken_of():
    size, width = dist.get_world_size(), 600
    layer = fully_shard(nn.Linear(width, width, bias=False))
    register_comm_hook(layer, "int8")
    everyone = torch.randn(size, width, width, generator=torch.Generator().manual_seed(0))
    found = []
    for step in range(1, 11):
        # Gradients add up where they are.
        (layer(torch.eye(width)) * everyone[dist.get_rank()].T).sum().backward()
        found.append(relative(layer.weight.grad.full_tensor(), everyone.mean(0) * step))
    assert 2e-2 > found[0] > 5 * found[-1]


@on_ranks("world")
@pytest.mark.parametrize(
    ("world", "hosts", "wire", "bound"),
    [(2, "ab", "int8", 2e-2), (2, "ab", "bf16", 5e-3), (4, "abba", "int8", 2e-2)],
)
def test_weights_are_gathered_through_the_wire_and_shards_stay_exact(world, hosts, wire, bound):
    model, exact = sharded(), Net()
    before = [p.to_local().clone() for p in model.parameters()]
    with patch.object(socket, "gethostname", lambda: hosts[dist.get_rank()]):
        state = register_comm_hook(model, "fp16", param_format=wire)
    x = torch.randn(6, 37, generator=torch.Generator().manual_seed(0))
    out, true = model(x).detach(), exact(x).detach()
    loss_of(model, dist.get_rank()).backward()
    assert state.stats().bytes_sent[f"{wire} weights"] > 0
    assert 1e-5 < relative(out, true) < bound
    assert agreed(out)
    assert error(model) < 3 * bound
    assert all(map(torch.equal, before, (p.to_local() for p in model.parameters())))


@on_ranks(2)
def test_weights_of_several_dtypes_are_gathered_as_they_are_and_counted():
    half = nn.Linear(64, 64).bfloat16().requires_grad_(False)
    layers = fully_shard(nn.Sequential(nn.Linear(64, 64), half))
    state = register_comm_hook(layers, "fp16", param_format="int8")
    layers.unshard()
    assert "1 x weights gathered uncompressed: of several dtypes" in str(state.stats())


@on_ranks(2)
def test_a_hook_that_is_registered_on_gathered_parameters_names_its_residuals():
    """A forward pass alone leaves the parameters of the root gathered."""

    def residual_names(gathers: bool) -> set[str]:
        model = sharded()
        if gathers:
            with torch.no_grad():
                loss_of(model, 0)
        state = register_comm_hook(model, "int8")
        loss_of(model, 0).backward()
        return set(state.state_dict()["residuals"])

    expected = residual_names(gathers=False)
    assert expected
    assert residual_names(gathers=True) == expected


@on_ranks(2)
def test_residuals_of_shards_go_on_to_the_bit_by_torchs_checkpoints(tmp_path):
    def gradients(model: Any) -> list[Tensor]:
        model.zero_grad()
        loss_of(model, dist.get_rank()).backward()
        return [p.grad.to_local() for p in model.parameters()]

    whole, resumed = sharded(), sharded()
    state, other = register_comm_hook(whole, "int8"), register_comm_hook(resumed, "int8")
    for _ in range(3):
        gradients(whole)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch's own
        checkpoint.save({"hook": state.state_dict()}, checkpoint_id=tmp_path)
        saved = {"hook": other.state_dict()}
        checkpoint.load(
            saved, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True)
        )
    other.load_state_dict(saved["hook"])
    assert all(map(torch.equal, gradients(whole), gradients(resumed)))


@on_ranks(2)
@pytest.mark.parametrize(
    ("dtype", "why", "bound"),
    [(None, "too few elements", 2 * ERRORS["fp16"]), (torch.bfloat16, "bfloat16", 3e-2)],
)
def test_replicate_is_hooked_and_a_small_layer_of_another_dtype_refuses_nothing(dtype, why, bound):
    from torch.distributed._composable import replicate_with_fsdp

    model, over = Net(), mesh((dist.get_world_size(),), ("replicate",))
    for each in (model.first, model.second):
        replicate_with_fsdp.replicate(each, mesh=over)
    policy = MixedPrecisionPolicy(dtype, dtype, output_dtype=torch.float32)
    replicate_with_fsdp.replicate(model.last, mesh=over, mp_policy=policy)
    state = register_comm_hook(model, "fp16")
    loss_of(model, dist.get_rank()).backward()
    assert error(model) < bound
    assert state.stats().exchanges == 2
    (said,) = state.stats().fallbacks
    assert why in said


# -- FSDP1 -----------------------------------------------------------------------------------------


def wrapped(**settings: Any) -> FullyShardedDataParallel:
    model = Net()
    settings = {"device_id": torch.device("cpu"), "use_orig_params": True, **settings}
    for name in ("first", "second"):
        setattr(model, name, FullyShardedDataParallel(getattr(model, name), **settings))
    return FullyShardedDataParallel(model, **settings)


@on_ranks("world")
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
def test_fsdp1s_hooks_run_on_a_cpu(world, hook, strategy, bound):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy", FutureWarning)
        model = wrapped(sharding_strategy=ShardingStrategy[strategy])
    if hook == "register":
        register_comm_hook(model, "fp16")
    else:
        hooks = {"fp16": fsdp_fp16_compress_hook, "bf16": fsdp_bf16_compress_hook}
        model.register_comm_hook(LowPrecisionState(model.process_group), hooks[hook])
    loss_of(model, dist.get_rank()).backward()
    assert error(model) < bound


@on_ranks(4)
@pytest.mark.parametrize(
    ("dtype", "parameter_type", "bound"),
    [
        (torch.float32, torch.float64, ERRORS["fp16"]),
        (torch.float32, torch.bfloat16, 4e-3),
        # Gradients of two bytes go as they are, and are added up in fp16.
        (torch.float16, torch.float64, 1e-3),
    ],
)
def test_the_hook_casts_to_the_parameters_dtype(dtype, parameter_type, bound):
    rank, world = dist.get_rank(), dist.get_world_size()
    values = torch.randn(world, world * 700, generator=torch.Generator().manual_seed(0)).to(dtype)
    state = LowPrecisionState(dist.group.WORLD, parameter_type)
    state.gradient_predivide_factor, state.gradient_postdivide_factor = 1.0, 7.0
    output = torch.empty(700, dtype=dtype)
    fsdp_fp16_compress_hook(state, values[rank].clone(), output)
    assert output.dtype == parameter_type
    assert relative(output.double(), values.double().sum(0)[rank * 700 :][:700] / 7) < bound


# -- memory beyond torch's own reduction -----------------------------------------------------------

WIDTH = 1400


class Peak(TorchDispatchMode):
    """The most bytes that were there at once of what this thread allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, Tensor)):
            if storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, storage._cdata)
        self.most = max(self.most, sum(self._sizes.values()))
        return out


def _peak(wire: str | None, ranks_per_host: int | None, gather: str | None = None) -> int:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(WIDTH, WIDTH))  # over all ranks
    if wire is not None:
        register_comm_hook(model, wire, ranks_per_host=ranks_per_host, param_format=gather)
    peak = Peak()
    # What lanes allocate is counted in this thread alone.
    here = patch.object(ThreadPoolExecutor, "submit", _at_once)
    for _ in range(2):  # With what stays from the first pass on.
        loss = model(torch.ones(2, WIDTH)).sum()
        with peak, here:
            loss.backward()
    return peak.most


def _at_once(_: ThreadPoolExecutor, function: Callable[..., object], *arguments: object) -> None:
    function(*arguments)


@on_ranks(4)
@pytest.mark.parametrize("ranks_per_host", [None, 2])
# Residuals are those gradients that a rank sends: all, or half of them on hosts of two.
@pytest.mark.parametrize(("wire", "gather", "kept"), [("fp16", None, 0.0), ("int8", "int8", 1.0)])
def test_shards_are_reduced_in_a_quarter_of_their_gradients_memory_beyond_residuals(
    wire, gather, kept, ranks_per_host
):
    """Beyond torch's default."""
    more = _peak(wire, ranks_per_host, gather) - _peak(None, None)
    allowed = kept / (ranks_per_host or 1) + 0.25
    assert more <= allowed * 4 * (WIDTH * WIDTH + WIDTH)
