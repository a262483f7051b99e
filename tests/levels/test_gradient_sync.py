"""Gradient accumulation without reduction: `Amp.no_sync`, its gradients, and its end."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp import cast_model, initialize
from distamp.levels import Amp
from tests.collectives import count_collectives
from tests.comm_hooks.training import agreed
from tests.levels.cells import full_params, wrapped
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases
from tests.ranks import mesh

BF16_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def linear(layout: str) -> nn.Module:
    """Return a linear layer in a layout, with ones as weights."""
    layer = nn.Linear(4, 2, bias=False)
    nn.init.ones_(layer.weight)
    net = nn.Sequential(layer)
    if layout == "OSS":
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim.oss import OSS

        return ShardedDataParallel(net, OSS(net.parameters(), optim=torch.optim.SGD, lr=0.1))
    if layout == "FSDP1, flat":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"))
    if layout == "part in DDP":
        return nn.Sequential(DistributedDataParallel(layer))
    return wrapped(net, layout, None, "")


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def backward(amp: Amp, size: float = 1.0, model: nn.Module | None = None) -> None:
    """Add gradients of ``size`` times (rank + 1) to every weight."""
    model = model or amp.model
    inputs = torch.full((1, 4), size * (dist.get_rank() + 1))
    with amp.autocast():
        loss = model(inputs).float().sum()
    amp.backward(loss)


def reductions(log: Any) -> list[str]:
    return [name for name, _ in log.calls if name.startswith(("allreduce", "reduce"))]


# -- no_sync --------------------------------------------------------------------------------------


WHOLE_LAYOUTS = ["DDP", "FSDP1", "FSDP2", "HSDP", "OSS"]
LAYOUTS = [*WHOLE_LAYOUTS, "part in DDP", "FSDP2 offload"]


@on_ranks(4)
@pytest.mark.parametrize("layout", quick_cases(LAYOUTS, ["DDP", "part in DDP", "FSDP2"]))
def test_after_an_inner_region_the_outer_one_still_pauses(layout):
    if layout == "OSS":
        pytest.importorskip("fairscale")
    model = linear(layout)
    amp = initialize(model, sgd(model), "fp32")
    with count_collectives() as paused, amp.no_sync():
        with amp.no_sync():
            backward(amp)
        backward(amp)
    with count_collectives() as after:
        backward(amp)
    assert not reductions(paused)
    assert reductions(after)


@on_ranks(4)
@pytest.mark.parametrize("layout", quick_cases(WHOLE_LAYOUTS, ["DDP", "FSDP1", "FSDP2"]))
def test_an_exception_inside_ends_the_pause(layout):
    if layout == "OSS":
        pytest.importorskip("fairscale")
    model = linear(layout)
    amp = initialize(model, sgd(model), "fp32")
    with pytest.raises(KeyError), amp.no_sync():
        raise KeyError
    with count_collectives() as after:
        backward(amp)
    assert reductions(after)


@on_ranks(4)
def test_a_region_restores_what_the_user_had_set():
    """HSDP that reduces over its shards alone does so again after the region."""
    model: Any = linear("HSDP")
    amp = initialize(model, sgd(model), "fp32")
    model.set_requires_all_reduce(False)
    with amp.no_sync():
        backward(amp)
    with count_collectives() as after:
        backward(amp)
    names = {name.partition("_")[0] for name in reductions(after)}
    assert names == {"reduce"}


@on_ranks(2)
def test_a_region_pauses_every_model():
    models = linear("DDP"), linear("FSDP2")
    amp = initialize(models, [sgd(model) for model in models], "fp32")
    with count_collectives() as paused, amp.no_sync():
        for model in models:
            backward(amp, model=model)
    assert not reductions(paused)


# -- zero_grad ------------------------------------------------------------------------------------


def linear_with_policy() -> Any:
    """Return a linear layer with ones as weights in FSDP2, which casts to bfloat16."""
    layer = nn.Linear(4, 2, bias=False)
    nn.init.ones_(layer.weight)
    device_mesh = mesh((dist.get_world_size(),), ("shard",))
    return fully_shard(layer, mesh=device_mesh, mp_policy=BF16_POLICY)


def linear_after_cast(level: str) -> nn.Module:
    """Return a linear layer with ones as weights, cast for a level before FSDP2."""
    layer = nn.Linear(4, 2, bias=False)
    nn.init.ones_(layer.weight)
    model = cast_model(nn.Sequential(layer), level)
    return wrapped(model, "FSDP2", None, "")


def check_dropped_window(
    model: nn.Module, level: str, set_to_none: bool, comm_hook: str | None = None
) -> None:
    """Accumulate ten times the gradient under no_sync(), and check that no weight gets it."""
    settings: dict[str, Any] = {"init_scale": 64.0} if level in ("fp16", "fp16-O2") else {}
    if comm_hook is not None:
        settings["comm_hook"] = comm_hook
    amp = initialize(model, sgd(model), level, **settings)
    with amp.no_sync():
        backward(amp, 10.0)
    amp.zero_grad(set_to_none)
    backward(amp)
    assert amp.step()
    (weight,) = full_params(amp.model)
    mean = 2.5  # of the gradients 1 to 4 of the four ranks
    torch.testing.assert_close(weight, torch.full_like(weight, 1 - mean), rtol=0.02, atol=0)


WINDOWS = list(
    itertools.product(["DDP", "FSDP1", "FSDP1, flat", "FSDP2", "FSDP2 offload"], [True, False])
)
QUICK_WINDOWS = [("DDP", True), ("FSDP1", False), ("FSDP2", True), ("FSDP2", False)]


@on_ranks(4)
@pytest.mark.parametrize(("layout", "set_to_none"), quick_cases(WINDOWS, QUICK_WINDOWS))
def test_zero_grad_drops_a_window_that_was_given_up(layout, set_to_none):
    check_dropped_window(linear(layout), "fp32", set_to_none)


@on_ranks(4)
def test_zero_grad_drops_scaled_gradients_of_a_window_that_was_given_up():
    check_dropped_window(linear("FSDP2"), "fp16", set_to_none=True)


@on_ranks(4)
def test_zero_grad_drops_scaled_gradients_of_an_offloaded_model():
    check_dropped_window(linear("FSDP2 offload"), "fp16", set_to_none=True)


@on_ranks(4)
def test_zero_grad_drops_a_window_of_hsdp():
    check_dropped_window(linear("HSDP"), "bf16", set_to_none=True)


@on_ranks(4)
@pytest.mark.parametrize(("level", "set_to_none"), [("bf16", True), ("bf16-O2", False)])
def test_zero_grad_drops_a_window_of_fsdp2_that_casts(level, set_to_none):
    check_dropped_window(linear_with_policy(), level, set_to_none)


@on_ranks(4)
@pytest.mark.parametrize(("level", "set_to_none"), [("bf16-O2", True), ("fp16-O2", False)])
def test_zero_grad_drops_a_window_of_a_cast_model(level, set_to_none):
    check_dropped_window(linear_after_cast(level), level, set_to_none)


@on_ranks(4)
@pytest.mark.parametrize(("layout", "set_to_none"), [("FSDP2", True), ("DDP", False)])
def test_zero_grad_drops_a_window_with_a_communication_hook(layout, set_to_none):
    check_dropped_window(linear(layout), "bf16", set_to_none, comm_hook="int8")


@on_ranks(4)
def test_zero_grad_drops_gradients_that_are_reduced_over_the_shards_alone():
    model: Any = linear("HSDP")
    amp = initialize(model, sgd(model), "fp32")
    model.set_requires_all_reduce(False)
    backward(amp, 10.0)
    model.set_requires_all_reduce(True)
    amp.zero_grad()
    backward(amp)
    amp.step()
    (weight,) = full_params(model)
    assert torch.equal(weight, torch.full_like(weight, -1.5))


class TwoLayers(nn.Module):
    """Two layers. A forward pass may leave the second one out."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(8, 8)
        self.late = nn.Linear(8, 8)

    def forward(self, x: Tensor, late: bool) -> Any:
        return self.always(x) + self.late(x) if late else self.always(x)


def late_layer_after_dropped_window(layout: str, set_to_none: bool) -> tuple[Tensor, Tensor]:
    """Drop gradients of two layers, take a step that uses one, and return the unused weight.

    Returns:
        The weight before and after the step, which may decay it by a tenth.
    """
    torch.manual_seed(0)
    model: Any = TwoLayers()
    if layout == "DDP":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        fully_shard(model, mesh=mesh((2,), ("shard",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1.0)
    amp = initialize(model, optimizer, "fp32")
    weight = full_params(model)[2]
    with amp.no_sync():
        amp.backward(amp.model(torch.ones(2, 8), True).square().mean())
    amp.zero_grad(set_to_none)
    amp.backward(amp.model(torch.ones(2, 8), False).square().mean())
    amp.step()
    return weight, full_params(model)[2]


@on_ranks(2)
@pytest.mark.parametrize("layout", ["DDP", "FSDP2"])
def test_a_dropped_gradient_becomes_zeros_as_a_reduced_one_does(layout):
    """With zeros the layer decays although the step does not use it."""
    weight, decayed = late_layer_after_dropped_window(layout, set_to_none=False)
    torch.testing.assert_close(decayed, weight * 0.9, rtol=1e-6, atol=0)


@on_ranks(2)
def test_a_dropped_gradient_becomes_none_as_a_reduced_one_does():
    """With None the layer stays."""
    weight, unchanged = late_layer_after_dropped_window("FSDP2", set_to_none=True)
    torch.testing.assert_close(unchanged, weight, rtol=1e-6, atol=0)


# -- a layer that is first used in the last micro-batch --------------------------------------------


def train_late(paused: bool, layout: str, level: str) -> list[Tensor]:
    """Return the weights after a step of three micro-batches; only the last uses every layer."""
    torch.manual_seed(0)
    shapes = {"FSDP2": (4,), "HSDP": (2, 2)}
    names = {"FSDP2": ("shard",), "HSDP": ("replicate", "shard")}
    model: Any = fully_shard(
        TwoLayers(), mesh=mesh(shapes[layout], names[layout]), mp_policy=BF16_POLICY
    )
    amp = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for number in range(3):
        inputs = torch.randn(4, 8, generator=generator)
        last = number == 2

        def forward(inputs: Tensor = inputs, last: bool = last) -> Tensor:
            with amp.autocast():
                output: Tensor = amp.model(inputs, last)
                return output.float().square().mean()

        if paused and not last:
            with amp.no_sync():
                amp.backward(forward())
        else:
            amp.backward(forward())
    assert amp.step(max_norm=100.0)
    return full_params(model)


LATE = [("FSDP2", "bf16"), ("HSDP", "bf16"), ("FSDP2", "bf16-O2")]


@on_ranks(4)
@pytest.mark.parametrize(("layout", "level"), quick_cases(LATE, quick=[("FSDP2", "bf16")]))
def test_a_layer_first_used_in_the_last_microbatch_trains_as_if_each_was_reduced(layout, level):
    """Under a policy torch refuses it: "expects uniform gradient dtype"."""
    weights = train_late(True, layout, level)
    reduced = train_late(False, layout, level)
    torch.testing.assert_close(weights, reduced, rtol=2e-3, atol=1e-4)
    assert agreed(torch.cat([weight.flatten() for weight in weights]))


# -- a static graph -------------------------------------------------------------------------------


def train_static(static: bool, parts: int) -> list[Tensor]:
    """Three steps of DDP, in which all but the last micro-batch are under no_sync()."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    model = DistributedDataParallel(net, static_graph=static)
    amp = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        amp.zero_grad()
        for part in range(parts):
            inputs = torch.randn(4, 6, generator=generator)
            if part < parts - 1:
                with amp.no_sync():
                    amp.backward(amp.model(inputs).square().mean())
            else:
                amp.backward(amp.model(inputs).square().mean())
        assert amp.step(max_norm=1.0)
    return full_params(model)


@on_ranks(2)
@pytest.mark.parametrize("parts", [2, 3])
def test_a_static_graph_trains_as_another_one_does(parts):
    """torch asserts inside where the first pass of a static graph is not reduced."""
    weights = train_static(True, parts)
    torch.testing.assert_close(weights, train_static(False, parts))
    assert agreed(torch.cat([weight.flatten() for weight in weights]))


@on_ranks(2)
def test_a_static_graph_pauses_once_it_was_reduced():
    model = DistributedDataParallel(nn.Linear(4, 2, bias=False), static_graph=True)
    amp = initialize(model, sgd(model), "fp32")
    backward(amp)
    with count_collectives() as paused, amp.no_sync():
        backward(amp)
    assert not reductions(paused)
