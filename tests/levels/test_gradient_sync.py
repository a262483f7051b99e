"""Gradient accumulation without reduction: `Amp.no_sync`, what it leaves, and what ends it."""

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
from tests.levels.cells import whole, wrapped
from tests.on_ranks import on_ranks
from tests.ranks import mesh

BF16_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def linear(layout: str) -> nn.Module:
    """A linear layer whose weights are ones, in a layout."""
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
    inputs = torch.full((1, 4), size * (dist.get_rank() + 1))
    with amp.autocast():
        loss = (model or amp.model)(inputs).float().sum()
    amp.backward(loss)


def reductions(log: Any) -> list[str]:
    return [name for name, _ in log.calls if name.startswith(("allreduce", "reduce"))]


# -- no_sync --------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize(
    "layout", ["DDP", "part in DDP", "FSDP1", "FSDP2", "FSDP2 offload", "HSDP", "OSS"]
)
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
@pytest.mark.parametrize("layout", ["DDP", "FSDP1", "FSDP2", "HSDP", "OSS"])
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
    assert [name for name in reductions(after) if name.startswith("allreduce")] == []
    assert [name for name in reductions(after) if name.startswith("reduce")] != []


@on_ranks(2)
def test_a_region_pauses_every_model():
    models = linear("DDP"), linear("FSDP2")
    amp = initialize(models, [sgd(model) for model in models], "fp32")
    with count_collectives() as paused, amp.no_sync():
        for model in models:
            backward(amp, model=model)
    assert not reductions(paused)


# -- zero_grad ------------------------------------------------------------------------------------


def made(layout: str, level: str) -> Amp:
    """A layer in a layout at a level, whose learning rate is 1."""
    settings: dict[str, Any] = {"init_scale": 64.0} if level in ("fp16", "fp16-O2") else {}
    kind, _, more = layout.partition(", ")
    if more == "policy":
        model: Any = nn.Linear(4, 2, bias=False)
        nn.init.ones_(model.weight)
        fully_shard(model, mesh=mesh((dist.get_world_size(),), ("shard",)), mp_policy=BF16_POLICY)
    elif more == "cast":
        model = nn.Sequential(nn.Linear(4, 2, bias=False))
        nn.init.ones_(model[0].weight)
        model = wrapped(cast_model(model, level), kind, None, "")
    else:
        model = linear(kind if more == "int8" else layout)
    settings |= {"comm_hook": "int8"} if more == "int8" else {}
    return initialize(model, sgd(model), level, **settings)


@on_ranks(4)
@pytest.mark.parametrize(
    ("layout", "level", "set_to_none"),
    [
        ("DDP", "fp32", False),
        ("FSDP1", "fp32", True),
        ("FSDP1, flat", "fp32", False),
        ("FSDP2", "fp32", True),
        ("FSDP2", "fp32", False),
        ("FSDP2", "fp16", True),
        ("FSDP2 offload", "fp16", True),
        ("HSDP", "bf16", True),
        ("FSDP2, policy", "bf16", True),
        ("FSDP2, policy", "bf16-O2", False),
        ("FSDP2, cast", "bf16-O2", True),
        ("FSDP2, cast", "fp16-O2", False),
        ("FSDP2, int8", "bf16", True),
        ("DDP, int8", "bf16", False),
    ],
)
def test_zero_grad_drops_a_window_that_was_given_up(layout, level, set_to_none):
    """Ten times the gradient was accumulated under no_sync() and must not reach the weights."""
    amp = made(layout, level)
    with amp.no_sync():
        backward(amp, 10.0)
    amp.zero_grad(set_to_none)
    backward(amp)
    assert amp.step()
    (weight,) = whole(amp.model)
    mean = 2.5  # of the gradients 1 to 4 of the four ranks
    torch.testing.assert_close(weight, torch.full_like(weight, 1 - mean), rtol=0.02, atol=0)


@on_ranks(4)
def test_zero_grad_drops_what_is_reduced_over_the_shards_alone():
    model: Any = linear("HSDP")
    amp = initialize(model, sgd(model), "fp32")
    model.set_requires_all_reduce(False)
    backward(amp, 10.0)
    model.set_requires_all_reduce(True)
    amp.zero_grad()
    backward(amp)
    amp.step()
    (weight,) = whole(model)
    assert torch.equal(weight, torch.full_like(weight, -1.5))


class TwoLayers(nn.Module):
    """Two layers, of which a forward pass may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(8, 8)
        self.late = nn.Linear(8, 8)

    def forward(self, x: Tensor, late: bool) -> Any:
        return self.always(x) + self.late(x) if late else self.always(x)


@on_ranks(2)
@pytest.mark.parametrize(
    ("layout", "set_to_none"), [("DDP", False), ("FSDP2", False), ("FSDP2", True)]
)
def test_a_dropped_gradient_becomes_zeros_or_none_as_a_reduced_one_does(layout, set_to_none):
    """With zeros the layer decays although the next step does not use it; with None it stays."""
    torch.manual_seed(0)
    model: Any = TwoLayers()
    settings: Any = {"find_unused_parameters": True}
    if layout == "DDP":
        model = DistributedDataParallel(model, **settings)
    else:
        fully_shard(model, mesh=mesh((2,), ("shard",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1.0)
    amp = initialize(model, optimizer, "fp32")
    before = whole(model)[2]
    with amp.no_sync():
        amp.backward(amp.model(torch.ones(2, 8), True).square().mean())
    amp.zero_grad(set_to_none)
    amp.backward(amp.model(torch.ones(2, 8), False).square().mean())
    amp.step()
    expected = before if set_to_none else before * 0.9
    torch.testing.assert_close(whole(model)[2], expected, rtol=1e-6, atol=0)


# -- a layer that is first used in the last micro-batch --------------------------------------------


def train_late(paused: bool, layout: str, level: str) -> list[Tensor]:
    """One step of three micro-batches, of which only the last uses every layer."""
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
    return whole(model)


@on_ranks(4)
@pytest.mark.parametrize(
    ("layout", "level"), [("FSDP2", "bf16"), ("HSDP", "bf16"), ("FSDP2", "bf16-O2")]
)
def test_a_layer_first_used_in_the_last_microbatch_trains_as_if_each_was_reduced(layout, level):
    """Under a policy torch refuses it: "expects uniform gradient dtype"."""
    found = train_late(True, layout, level)
    torch.testing.assert_close(found, train_late(False, layout, level), rtol=2e-3, atol=1e-4)
    assert agreed(torch.cat([param.flatten() for param in found]))


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
    return whole(model)


@on_ranks(2)
@pytest.mark.parametrize("parts", [2, 3])
def test_a_static_graph_trains_as_another_one_does(parts):
    """torch asserts inside where the first pass of a static graph is not reduced."""
    found = train_static(True, parts)
    torch.testing.assert_close(found, train_static(False, parts))
    assert agreed(torch.cat([param.flatten() for param in found]))


@on_ranks(2)
def test_a_static_graph_pauses_once_it_was_reduced():
    model = DistributedDataParallel(nn.Linear(4, 2, bias=False), static_graph=True)
    amp = initialize(model, sgd(model), "fp32")
    backward(amp)
    with count_collectives() as paused, amp.no_sync():
        backward(amp)
    assert not reductions(paused)
