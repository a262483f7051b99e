"""Hooks of FSDP2 and FSDP1 on real ranks, compared with the float64 mean without shards."""

import socket
import warnings
import weakref
from collections.abc import Callable, Sequence
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
from tests.comm_hooks.training import PrescribedGradients, agreed, full_gradients, relative
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases
from tests.ranks import mesh

# The relative L2 error that a gradient may have after one rounding.
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
    """Return the loss of a rank's micro-batch."""
    generator = torch.Generator().manual_seed(100 * micro + rank)
    x = torch.randn(6, 37, generator=generator)
    dtype = next(model.parameters()).dtype
    output = model(x.to(dtype))
    return output.double().square().mean()


def backward(model: nn.Module, micro: int = 0) -> None:
    """Backpropagate the loss of this rank."""
    loss_of(model, dist.get_rank(), micro).backward()


def error(model: nn.Module, micros: int = 1, factor: float = 1.0) -> float:
    """Return the error of gradients: the exact ones are the float64 mean of summed micro-batches.

    Args:
        model: A model with gradients.
        micros: The number of micro-batches.
        factor: A factor that the gradients have.
    """
    exact = Net().double()
    world = dist.get_world_size()
    for rank in range(world):
        for micro in range(micros):
            loss = loss_of(exact, rank, micro) / world
            loss.backward()
    unscaled = full_gradients(model).double() / factor
    return relative(unscaled, full_gradients(exact))


def sharded(**settings: Any) -> Any:
    """Return the net with three units of FSDP2."""
    model = Net()
    settings = {"mesh": mesh((dist.get_world_size(),), ("shard",)), **settings}
    fully_shard(model.first, **settings)
    fully_shard(model.second, **settings)
    return fully_shard(model, **settings)


newer_than_2_11 = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="newer than torch 2.11"
)

since_2_15 = pytest.mark.skipif(
    not hasattr(FSDPModule, "finalize_backward"), reason="FSDP2 does this since torch 2.15"
)


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

# -- dtypes of FSDP2 -------------------------------------------------------------------------------


class RecordingReduceScatter:
    """A reduce-scatter of FSDP2 that records the dtypes of its inputs."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:
        self.dtypes.add(input_tensor.dtype)
        output_tensor.zero_()


@on_ranks(2)
@pytest.mark.parametrize("reduce_dtype", [None, F32, F16])
@pytest.mark.parametrize("param_dtype", [None, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gradients_are_reduced_in_the_dtype_that_the_unit_predicts(
    dtype, param_dtype, reduce_dtype
):
    """Without ``reduce_dtype`` it is another one since torch 2.15."""
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, output_dtype=F32)
    layer = fully_shard(nn.Linear(64, 64, dtype=dtype), mp_policy=policy)
    reduce_scatter = RecordingReduceScatter()
    layer.set_custom_reduce_scatter(reduce_scatter)
    layer(torch.ones(2, 64, dtype=dtype)).sum().backward()
    assert reduce_scatter.dtypes == {FSDPUnit(layer).reduce_dtype(dtype)}


@since_2_15
@on_ranks(2)
@pytest.mark.parametrize("param_dtype", [None, BF16])
@pytest.mark.parametrize("reduce_dtype", [None, F16])
@pytest.mark.parametrize("grad_dtypes", [(BF16, BF16), (BF16, F32), (F32, None), (None, None)])
def test_the_unit_predicts_the_dtype_of_a_reduction_for_any_grad_dtype(
    grad_dtypes, reduce_dtype, param_dtype
):
    """Without ``reduce_dtype`` gradients of several dtypes are promoted."""
    layer = nn.Linear(64, 64)
    layer.weight.grad_dtype, layer.bias.grad_dtype = grad_dtypes
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, output_dtype=F32)
    fully_shard(layer, mp_policy=policy)
    reduce_scatter = RecordingReduceScatter()
    layer.set_custom_reduce_scatter(reduce_scatter)
    expected = FSDPUnit(layer).grad_reduce_dtype
    layer(torch.ones(2, 64)).sum().backward()
    assert reduce_scatter.dtypes == {expected}


@on_ranks(2)
@pytest.mark.parametrize("dtype", [None, BF16])
def test_a_parameter_is_gathered_in_the_dtype_that_its_unit_predicts(dtype):
    layer = fully_shard(nn.Linear(8, 8), mp_policy=MixedPrecisionPolicy(dtype))
    unit = FSDPUnit(layer)
    shard = layer.weight
    predicted = unit.param_dtype_of(shard)
    layer.unshard()
    assert layer.weight is not shard
    assert layer.weight.dtype is predicted
    assert unit.param_dtype_of(layer.weight) is predicted


@on_ranks(2)
def test_a_parameter_of_another_unit_has_no_dtype():
    unit = FSDPUnit(fully_shard(nn.Linear(8, 8)))
    stray = nn.Parameter(torch.ones(8, 8))
    with pytest.raises(ValueError, match="is not sharded by the unit FSDPLinear"):
        unit.param_dtype_of(stray)


def gradients_of_sizes(numels: Sequence[int], sizes: Sequence[float]) -> list[list[Tensor]]:
    """Return random gradients of these sizes for two ranks."""
    generator = torch.Generator().manual_seed(0)
    ranks = []
    for _ in range(2):
        grads = []
        for numel, size in zip(numels, sizes, strict=True):
            grads.append(size * torch.randn(numel, generator=generator))
        ranks.append(grads)
    return ranks


@since_2_15
@on_ranks(2)
def test_gradients_of_several_dtypes_in_one_unit_are_rounded_parameter_by_parameter():
    """torch sends gradients of one dtype together, and int8 has a scale for each parameter."""
    numels = (3000, 2000, 5000, 1000)
    model = PrescribedGradients(*numels)
    model.parts[1].grad_dtype = BF16
    model.parts[3].grad_dtype = BF16
    model = fully_shard(model, mesh=mesh((2,), ("shard",)))
    hook = register_comm_hook(model, "int8")
    grads = gradients_of_sizes(numels, sizes=(1.0, 1e6, 1.0, 1e6))
    model(grads[dist.get_rank()]).backward()
    assert hook.stats().exchanges == 1
    for index, param in enumerate(model.parts):
        assert param.grad.dtype is param.grad_dtype
        exact = (grads[0][index] + grads[1][index]) / 2
        assert relative(param.grad.full_tensor().float(), exact) < 2e-2


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
    norm_params = list(model.norm.parameters())

    def override(param: Tensor) -> torch.dtype | None:
        is_of_norm = any(param is norm_param for norm_param in norm_params)
        return F32 if is_of_norm else None

    policy = MixedPrecisionPolicy(BF16, F32, param_dtype_override_fn=override)
    return fully_shard(model, mp_policy=policy)


@since_2_15
@on_ranks(2)
def test_a_parameter_is_gathered_in_the_dtype_of_its_override():
    layers = sharded_with_fp32_norm()
    unit = FSDPUnit(layers)
    predicted = [unit.param_dtype_of(param) for param in layers.parameters()]
    layers.unshard()
    assert predicted == [BF16, BF16, F32, F32]
    assert [param.dtype for param in layers.parameters()] == predicted


@since_2_15
@on_ranks(2)
def test_a_unit_with_an_override_is_reduced_through_the_hook():
    layers = sharded_with_fp32_norm()
    plain = sharded_with_fp32_norm()
    hook = register_comm_hook(layers, "fp16", param_format="int8")
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(6, 64, generator=generator)
    for model in (layers, plain):
        outputs = model(inputs)
        (outputs.square() * inputs).mean().backward()
    assert hook.stats().exchanges == 1
    assert "weights gathered uncompressed: of several dtypes" in str(hook.stats())
    assert relative(full_gradients(layers), full_gradients(plain)) < ERRORS["fp16"]


# -- gradients of FSDP2 ----------------------------------------------------------------------------


@since_2_15
@on_ranks(2)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(("format", "bound"), [("fp16", ERRORS["fp16"]), ("int8", 2e-2)])
def test_a_backward_pass_that_the_user_finalizes_is_reduced_through_the_hook(
    format, bound, async_op
):
    model = sharded()
    hook = register_comm_hook(model, format)
    model.set_manual_backward_finalization(True)
    for micro in range(3):
        model.set_requires_gradient_sync(False)
        backward(model, micro)
    assert not hook.stats().exchanges
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=async_op)
    if async_op:
        handle.wait()
    stats = hook.stats()
    assert stats.exchanges >= 2
    assert stats.exchanges + stats.fallbacks.total() == 3
    assert error(model, 3) < bound


def check_average(
    format: str = "fp16",
    micros: int = 1,
    bound: float = ERRORS["fp16"],
    separate_group: bool = False,
    **settings: Any,
) -> None:
    """Check the gradients of FSDP2 with these settings, synced in the last micro-batch."""
    model = sharded(**settings)
    hook = register_comm_hook(model, format)
    if separate_group:
        model.set_separate_reduce_scatter_group()
    for micro in range(micros):
        model.set_requires_gradient_sync(micro + 1 == micros)
        backward(model, micro)
    assert error(model, micros) < bound
    # The last layer's shards are too small to be fewer bytes in blocks.
    assert hook.stats().exchanges == 2, "one for each other module, however many micro-batches"


@on_ranks(2)
def test_fsdp2_averages_with_one_rounding():
    check_average()


@on_ranks(4)
@pytest.mark.parametrize("format", quick_cases(["fp16", "bf16"], quick=["bf16"]))
def test_fsdp2_averages_with_one_rounding_on_four_ranks(format):
    check_average(format, bound=ERRORS[format])


@on_ranks(2)
@pytest.mark.parametrize("reshard", quick_cases([True, False], quick=[True]))
def test_fsdp2_averages_micro_batches_with_one_rounding(reshard):
    check_average(micros=3, reshard_after_forward=reshard)


@on_ranks(2)
def test_fsdp2_averages_offloaded_shards_with_one_rounding():
    check_average(offload_policy=CPUOffloadPolicy(pin_memory=False))


@newer_than_2_11
@on_ranks(2)
def test_fsdp2_averages_in_its_own_group_for_reduce_scatters_with_one_rounding():
    check_average(separate_group=True)


@on_ranks(2)
def test_fsdp2_that_computes_in_bf16_averages_with_the_error_of_bf16():
    check_average(bound=0.05, mp_policy=MixedPrecisionPolicy(BF16, F32))


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
    loss = loss_of(model, dist.get_rank()) * scale
    loss.backward()
    expected_factor = scale * dist.get_world_size() / factor
    assert error(model, factor=expected_factor) < ERRORS["fp16"]


def check_average_of_replicas(hook: Any, model: Any, bound: float) -> None:
    """Check the gradients of three micro-batches, of which the last one averages replicas."""
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        backward(model, micro)
    assert error(model, 3) < bound
    stats = hook.stats()
    # Each of three modules has three reduce-scatters, and one average between replicas.
    assert stats.exchanges + stats.fallbacks.total() == 3 * 3 + 3


BOUNDS_OF_TWO_ROUNDINGS = [
    ("int8", 4e-2),
    pytest.param("fp16", 8e-4, marks=pytest.mark.slow),
]


@on_ranks(4)
@pytest.mark.parametrize(("format", "bound"), BOUNDS_OF_TWO_ROUNDINGS)
def test_replicas_of_a_mesh_are_averaged_once_a_step(format, bound):
    model = sharded(mesh=mesh((2, 2), ("replicate", "shard")))
    hook = register_comm_hook(model, format)
    check_average_of_replicas(hook, model, bound)


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize(("format", "bound"), BOUNDS_OF_TWO_ROUNDINGS)
def test_replicas_of_a_process_group_are_averaged_once_a_step(format, bound):
    device_mesh = mesh((2, 2), ("replicate", "shard"))
    model = sharded(mesh=device_mesh["shard"])
    hook = register_comm_hook(model, format, replicas=device_mesh["replicate"].get_group())
    check_average_of_replicas(hook, model, bound)


# The next test checks more of the same.
@pytest.mark.slow
@on_ranks(2)
def test_rounding_errors_of_shards_are_fed_back():
    model = sharded()
    register_comm_hook(model, "int8")
    errors = []
    for step in range(1, 17):
        # Gradients add up in ``param.grad``.
        backward(model)
        errors.append(error(model, factor=step))
    assert 2e-2 > errors[0] > 5 * errors[-1]


@on_ranks(4)
def test_a_rounding_error_is_fed_back_to_its_own_part_of_a_shard():
    width = 600
    layer = fully_shard(nn.Linear(width, width, bias=False))
    register_comm_hook(layer, "int8")
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(4, width, width, generator=generator)
    errors = []
    for step in range(1, 11):
        # Gradients add up in ``param.grad``.
        output = layer(torch.eye(width))
        (output * grads[dist.get_rank()].T).sum().backward()
        errors.append(relative(layer.weight.grad.full_tensor(), grads.mean(0) * step))
    assert 2e-2 > errors[0] > 5 * errors[-1]


# -- weights of FSDP2 ------------------------------------------------------------------------------


@on_ranks("world")
@pytest.mark.parametrize(
    ("world", "hosts", "format", "bound"),
    [
        (2, "ab", "int8", 2e-2),
        (2, "ab", "bf16", 5e-3),
        pytest.param(4, "abba", "int8", 2e-2, marks=pytest.mark.slow),
    ],
)
def test_weights_are_gathered_in_a_format_and_shards_stay_exact(world, hosts, format, bound):
    model = sharded()
    before = [param.to_local().clone() for param in model.parameters()]
    with patch.object(socket, "gethostname", lambda: hosts[dist.get_rank()]):
        hook = register_comm_hook(model, "fp16", param_format=format)
    x = torch.randn(6, 37, generator=torch.Generator().manual_seed(0))
    output = model(x).detach()
    exact = Net()(x).detach()
    backward(model)
    assert hook.stats().bytes_sent[f"{format} weights"] > 0
    assert 1e-5 < relative(output, exact) < bound
    assert agreed(output)
    assert error(model) < 3 * bound
    for param, shard in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.to_local(), shard)


@on_ranks(2)
def test_weights_of_several_dtypes_are_gathered_uncompressed_and_counted():
    half = nn.Linear(64, 64).bfloat16().requires_grad_(False)
    layers = fully_shard(nn.Sequential(nn.Linear(64, 64), half))
    hook = register_comm_hook(layers, "fp16", param_format="int8")
    layers.unshard()
    assert "1 x weights gathered uncompressed: of several dtypes" in str(hook.stats())


# -- residuals of FSDP2 ----------------------------------------------------------------------------


def residual_names(gathers_before: bool) -> set[str]:
    """Return the names of residuals; a forward pass before registration may gather the root."""
    model = sharded()
    if gathers_before:
        with torch.no_grad():
            loss_of(model, 0)
    hook = register_comm_hook(model, "int8")
    loss_of(model, 0).backward()
    return set(hook.state_dict()["residuals"])


@on_ranks(2)
def test_a_hook_that_is_registered_on_gathered_parameters_names_its_residuals():
    expected = residual_names(gathers_before=False)
    assert expected
    assert residual_names(gathers_before=True) == expected


def local_gradients(model: Any) -> list[Tensor]:
    """Run a step, and return this rank's shards of its gradients."""
    model.zero_grad()
    backward(model)
    return [param.grad.to_local() for param in model.parameters()]


@pytest.mark.slow
@on_ranks(2)
def test_residuals_of_shards_resume_bit_identical_from_torchs_checkpoints(tmp_path):
    model = sharded()
    hook = register_comm_hook(model, "int8")
    for _ in range(3):
        local_gradients(model)
    resumed = sharded()
    resumed_hook = register_comm_hook(resumed, "int8")
    saved = {"hook": resumed_hook.state_dict()}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch's own
        checkpoint.save({"hook": hook.state_dict()}, checkpoint_id=tmp_path)
        checkpoint.load(saved, checkpoint_id=tmp_path, planner=planner)
    resumed_hook.load_state_dict(saved["hook"])
    assert all(map(torch.equal, local_gradients(model), local_gradients(resumed)))


# -- replicate, which has units as FSDP2 has -------------------------------------------------------


def check_replicate(dtype: torch.dtype | None, bound: float, reason: str) -> None:
    """Check the gradients of three units; the last one reduces in ``dtype`` and uncompressed."""
    from torch.distributed._composable import replicate_with_fsdp

    model = Net()
    device_mesh = mesh((2,), ("replicate",))
    replicate_with_fsdp.replicate(model.first, mesh=device_mesh)
    replicate_with_fsdp.replicate(model.second, mesh=device_mesh)
    policy = MixedPrecisionPolicy(dtype, dtype, output_dtype=F32)
    replicate_with_fsdp.replicate(model.last, mesh=device_mesh, mp_policy=policy)
    hook = register_comm_hook(model, "fp16")
    backward(model)
    assert error(model) < bound
    assert hook.stats().exchanges == 2
    (fallback,) = hook.stats().fallbacks
    assert reason in fallback


@on_ranks(2)
def test_replicate_is_hooked_and_a_small_layer_is_not_compressed():
    check_replicate(None, 2 * ERRORS["fp16"], "too few elements")


@on_ranks(2)
def test_replicate_is_hooked_although_a_small_layer_is_reduced_in_bf16():
    check_replicate(BF16, 3e-2, "bfloat16")


# -- FSDP1 -----------------------------------------------------------------------------------------


def in_fsdp1(strategy: str) -> FullyShardedDataParallel:
    settings: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    settings["sharding_strategy"] = ShardingStrategy[strategy]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy", FutureWarning)
        model = Net()
        model.first = FullyShardedDataParallel(model.first, **settings)
        model.second = FullyShardedDataParallel(model.second, **settings)
        return FullyShardedDataParallel(model, **settings)


@on_ranks(2)
def test_a_registered_hook_of_fsdp1_averages_with_one_rounding():
    model = in_fsdp1("FULL_SHARD")
    register_comm_hook(model, "fp16")
    backward(model)
    assert error(model) < ERRORS["fp16"]


def check_hook_of_torchs_name(hook: Any, strategy: str, bound: float) -> None:
    model = in_fsdp1(strategy)
    model.register_comm_hook(LowPrecisionState(model.process_group), hook)
    backward(model)
    assert error(model) < bound


@on_ranks(2)
def test_the_fp16_hook_of_fsdp1_runs_on_a_cpu():
    check_hook_of_torchs_name(fsdp_fp16_compress_hook, "SHARD_GRAD_OP", ERRORS["fp16"])


@on_ranks(4)
def test_the_bf16_hook_of_fsdp1_runs_on_a_cpu():
    check_hook_of_torchs_name(fsdp_bf16_compress_hook, "FULL_SHARD", ERRORS["bf16"])


@on_ranks(4)
def test_the_fp16_hook_of_fsdp1_all_reduces_without_shards():
    """Without shards there are two roundings."""
    check_hook_of_torchs_name(fsdp_fp16_compress_hook, "NO_SHARD", 2 * ERRORS["fp16"])


@on_ranks(4)
@pytest.mark.parametrize(
    ("dtype", "param_dtype", "bound"),
    [
        (F32, torch.float64, ERRORS["fp16"]),
        (F32, BF16, 4e-3),
        # Gradients of two bytes are sent uncompressed, and are added up in fp16.
        (F16, torch.float64, 1e-3),
    ],
)
def test_the_hook_casts_to_the_parameters_dtype(dtype, param_dtype, bound):
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(4, 4, 700, generator=generator).to(dtype)
    state = LowPrecisionState(dist.group.WORLD, param_dtype)
    state.gradient_predivide_factor = 1.0
    state.gradient_postdivide_factor = 7.0
    rank = dist.get_rank()
    output = torch.empty(700, dtype=dtype)
    fsdp_fp16_compress_hook(state, grads[rank].flatten().clone(), output)
    assert output.dtype == param_dtype
    exact = grads.double().sum(0)[rank] / 7
    assert relative(output.double(), exact) < bound


# -- memory beyond torch's own reduction -----------------------------------------------------------

WIDTH = 1400
GRADIENT_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class PeakMemory(TorchDispatchMode):
    """Measures the most bytes of tensors, allocated by this thread, that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, sum(self._sizes.values()))
        return outputs

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            weakref.finalize(storage, self._sizes.pop, key)


def run_at_once(_: ThreadPoolExecutor, function: Callable[..., object], *args: object) -> None:
    """Run a submitted function in the calling thread."""
    function(*args)


def peak_of_backward(format: str | None, **options: Any) -> int:
    """Return the peak memory of the second backward pass, with a hook if there is a format."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(WIDTH, WIDTH))
    if format is not None:
        register_comm_hook(model, format, **options)
    memory = PeakMemory()
    # Allocations of lanes are counted in this thread alone.
    lanes = patch.object(ThreadPoolExecutor, "submit", run_at_once)
    # The second pass has the buffers that stay from the first.
    for _ in range(2):
        loss = model(torch.ones(2, WIDTH)).sum()
        with memory, lanes:
            loss.backward()
    return memory.peak


def check_memory(format: str, residuals: float, **options: Any) -> None:
    """Check the memory of a hook beyond torch's reduction.

    Args:
        format: The format of gradients.
        residuals: The share of the gradients that residuals take.
        options: Other arguments of the hook.
    """
    additional = peak_of_backward(format, **options) - peak_of_backward(None)
    assert additional <= (residuals + 0.25) * GRADIENT_BYTES


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("ranks_per_host", [None, 2])
def test_shards_are_reduced_in_a_quarter_of_their_gradients_memory(ranks_per_host):
    check_memory("fp16", residuals=0.0, ranks_per_host=ranks_per_host)


@pytest.mark.slow
@on_ranks(4)
def test_residuals_take_the_memory_of_all_gradients_on_one_host():
    check_memory("int8", residuals=1.0, param_format="int8")


@pytest.mark.slow
@on_ranks(4)
def test_residuals_take_the_memory_of_half_of_the_gradients_on_two_hosts():
    """A rank sends half of its gradients between the hosts."""
    check_memory("int8", residuals=0.5, param_format="int8", ranks_per_host=2)
