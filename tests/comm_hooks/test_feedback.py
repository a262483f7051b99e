"""The rounding error of a skipped step: dropped once, and only the error of that step."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, StepGuard, comm_hooks
from distamp.comm_hooks import COMM_FORMATS, CommHook
from distamp.comm_hooks.formats import BLOCK_NUMEL
from distamp.comm_hooks.residuals import Residual
from tests.comm_hooks.training import relative
from tests.on_ranks import on_ranks
from tests.ranks import mesh

# -- the store of residuals alone ------------------------------------------------------------------

SKIPPED, TAKEN = 1.0, 0.0
NUMEL = 2 * BLOCK_NUMEL


class Store:
    """A hook's residuals of two buckets; this test runs their exchanges itself."""

    def __init__(self) -> None:
        self.hook = CommHook("int8")
        self.buckets = {name: nn.Parameter(torch.zeros(NUMEL)) for name in "ab"}
        self._draw = torch.Generator().manual_seed(0)

    def gradient(self, scale: float = 1.0) -> Tensor:
        return torch.randn(NUMEL, generator=self._draw) * scale

    def stored(self, name: str) -> Residual:
        """The residual of a bucket, in the memory that messages read and write."""
        bucket = [self.buckets[name]]
        (residual,) = self.hook.residuals.get("1x2, shards", bucket, [NUMEL], torch.device("cpu"))
        return residual

    def residual(self, name: str) -> Tensor:
        """The residual in unscaled units."""
        return self.stored(name).values

    def exchange(self, name: str, gradient: Tensor) -> Tensor:
        """Return the elements of a gradient that the other ranks receive."""
        int8 = COMM_FORMATS["int8"]
        blocks = gradient.view(-1, BLOCK_NUMEL).clone()
        sent = torch.empty(int8.row_bytes(NUMEL), dtype=torch.uint8)
        self.stored(name).encode(int8, blocks, sent)
        int8.decode(sent, blocks)
        return blocks.flatten()

    def end_iteration(self, *flags: float) -> None:
        for flag in flags:
            self.hook.on_step(None, torch.tensor(flag))
        self.hook.on_update()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr("distamp.comm_hooks.residuals.rank_label", lambda: "rank 0 of 2")
    return Store()


@pytest.mark.parametrize("away", [0, 1, 3])
def test_the_error_of_a_skipped_spike_never_comes_back(store, away):
    """The bucket is not exchanged in so many iterations after the skip."""
    store.exchange("a", store.gradient(1e4))
    store.end_iteration(SKIPPED)
    for _ in range(away):
        store.exchange("b", store.gradient())
        store.end_iteration(TAKEN)
    gradient = store.gradient()
    assert relative(store.exchange("a", gradient), gradient) < 2e-2


@pytest.mark.parametrize("away", [0, 1, 3])
def test_the_error_of_a_taken_step_waits_for_its_bucket_through_skipped_ones(store, away):
    first = store.gradient()
    received = store.exchange("a", first)
    store.end_iteration(TAKEN)
    for _ in range(away):
        store.exchange("b", store.gradient(1e4))
        store.end_iteration(SKIPPED)
    second = store.gradient()
    total = received + store.exchange("a", second)
    torch.testing.assert_close(total + store.residual("a"), first + second)


def test_a_second_micro_batch_after_a_skip_adds_the_error_of_the_first(store):
    store.exchange("a", store.gradient())
    store.end_iteration(SKIPPED)
    spike, gradient = store.gradient(1e4), store.gradient()
    total = store.exchange("a", spike) + store.exchange("a", gradient)
    torch.testing.assert_close(total + store.residual("a"), spike + gradient)


def test_a_block_that_waits_while_a_step_is_skipped_keeps_its_error(store):
    """As the block of a parameter does that is not used while its bucket is exchanged."""
    store.exchange("a", store.gradient())
    store.end_iteration(TAKEN)
    before = store.residual("a").clone()
    spike = store.gradient(1e4)
    spike[:BLOCK_NUMEL] = 0.0
    store.exchange("a", spike)
    store.end_iteration(SKIPPED)
    unused_block, spoilt_block = store.residual("a").split(BLOCK_NUMEL)
    assert torch.equal(unused_block, before[:BLOCK_NUMEL])
    assert not spoilt_block.any()


def test_one_of_several_optimizers_that_skips_drops_the_error_of_all(store):
    store.exchange("a", store.gradient())
    store.exchange("b", store.gradient())
    store.end_iteration(SKIPPED, TAKEN)
    assert not store.residual("a").any()
    assert not store.residual("b").any()


def test_a_bucket_that_is_exchanged_after_another_optimizer_skipped_keeps_its_error(store):
    """As the generator's does, if the discriminator's step of the same iteration was skipped."""
    store.exchange("a", store.gradient())
    store.end_iteration(TAKEN)
    before = store.residual("a").clone()
    store.exchange("b", store.gradient(1e4))
    store.hook.on_step(None, torch.tensor(SKIPPED))
    gradient = store.gradient()
    received = store.exchange("a", gradient)
    store.end_iteration(TAKEN)
    torch.testing.assert_close(received + store.residual("a"), gradient + before)


@pytest.mark.parametrize("scales", [(1024.0, 512.0, 512.0), (1.0, 2.0**16, 2.0**20)])
def test_the_error_is_kept_in_unscaled_units_while_the_loss_scale_moves(store, scales):
    """The first step is taken, the second is skipped without the bucket, and the third has it."""
    first, second = store.gradient(), store.gradient()
    scale = torch.tensor(scales[0])
    store.hook.on_scale(scale)
    total = store.exchange("a", first * scale) / scale
    store.end_iteration(TAKEN)
    for value, flag in zip(scales[1:], (SKIPPED, None), strict=True):
        # A scaler writes its next scale into the same tensor.
        scale.fill_(value)
        store.hook.on_scale(scale)
        if flag is not None:
            store.exchange("b", store.gradient(1e4) * scale)
            store.end_iteration(flag)
    total += store.exchange("a", second * scale) / scale
    torch.testing.assert_close(total + store.residual("a"), first + second)


@on_ranks(1)
def test_a_state_that_was_saved_after_a_skip_has_nothing_of_that_step():
    store = Store()
    store.hook.name_parameters(store.buckets.items())
    store.exchange("a", store.gradient())
    store.end_iteration(TAKEN)
    store.exchange("b", store.gradient(1e4))
    store.end_iteration(SKIPPED)
    residuals = store.hook.state_dict()["residuals"]
    (of_taken_step,), (of_skipped_step,) = residuals.values()
    assert of_taken_step.any()
    assert not of_skipped_step.any()


def test_a_residual_of_several_blocks_drops_those_that_were_written():
    residual = Residual.from_values(torch.ones(3 * BLOCK_NUMEL))
    residual.written[1] = True
    residual.drop_written(torch.tensor(TAKEN))
    assert residual.values.all()
    residual.drop_written(torch.tensor(SKIPPED))
    assert residual.values.view(3, BLOCK_NUMEL).any(1).tolist() == [True, False, True]


# -- layers that drop out, in training -------------------------------------------------------------

WIDTH = 72


class Layers(nn.Module):
    """Two layers. A layer is used if the forward pass gets a gradient for its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        losses = []
        for name, gradient in gradients.items():
            output = getattr(self, name)(torch.eye(WIDTH))
            losses.append((output * gradient.T).sum())
        return torch.stack(losses).sum()


def distributed(layout: str) -> tuple[nn.Module, nn.Module]:
    """A model of two layers as a user wraps it, and the module that has the two."""
    layers = Layers()
    size = dist.get_world_size()
    if layout == "DDP":
        return DistributedDataParallel(layers, find_unused_parameters=True), layers
    if layout == "HSDP":
        device_mesh = mesh((2, size // 2), ("replicate", "shard"))
    else:
        device_mesh = mesh((size,), ("shard",))
    fully_shard(layers.a, mesh=device_mesh)
    fully_shard(layers.b, mesh=device_mesh)
    return fully_shard(layers, mesh=device_mesh), layers


def gradients_of_ranks(seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dist.get_world_size(), WIDTH, WIDTH, generator=generator) * scale


def unscaled_gradient(layer: Any, scale: float) -> Tensor:
    gradient = layer.weight.grad
    if isinstance(gradient, DTensor):
        gradient = gradient.full_tensor()
    return gradient / scale


def take_step_with_spike(model: Any, guard: Any, optimizer: Any) -> None:
    """Skip a step: layer ``a`` has a spike, and layer ``b`` is infinite on rank 1."""
    rank = dist.get_rank()
    gradients = {"a": gradients_of_ranks(0, scale=1e4)[rank], "b": gradients_of_ranks(10)[rank]}
    if rank == 1:
        gradients["b"] *= torch.inf
    optimizer.zero_grad()
    guard.scale(model(gradients)).backward()
    guard.step(optimizer)
    assert not guard.step_was_taken(optimizer)
    guard.update()


def take_step_without_a(model: Any, layers: Any, guard: Any, optimizer: Any, frozen: bool) -> None:
    """Take a step in which layer ``a`` is frozen or is not used."""
    rank = dist.get_rank()
    gradients = {"b": gradients_of_ranks(11)[rank]}
    if frozen:
        gradients = {"a": gradients_of_ranks(1)[rank], **gradients}
        layers.a.requires_grad_(False)
    optimizer.zero_grad()
    guard.scale(model(gradients)).backward()
    guard.step(optimizer)
    assert guard.step_was_taken(optimizer)
    guard.update()
    layers.a.requires_grad_(True)


def take_right_step(model: Any, layers: Any, guard: Any, optimizer: Any) -> None:
    """Take a step with both layers, and check the gradient of layer ``a``."""
    rank = dist.get_rank()
    exact = gradients_of_ranks(3)
    optimizer.zero_grad()
    loss = model({"a": exact[rank], "b": gradients_of_ranks(13)[rank]})
    guard.scale(loss).backward()
    gradient = unscaled_gradient(layers.a, guard.get_scale())
    assert relative(gradient, exact.mean(0)) < 2e-2
    guard.step(optimizer)
    assert guard.step_was_taken(optimizer)
    guard.update()


def check_layer_that_comes_back(layout: str, guard: Any, frozen: bool) -> None:
    """Give layer ``a`` a spike in a skipped step, leave it out of two steps, and use it again."""
    model, layers = distributed(layout)
    guard.attach_comm_hook(comm_hooks.register_comm_hook(model, "int8"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    take_step_with_spike(model, guard, optimizer)
    take_step_without_a(model, layers, guard, optimizer, frozen)
    take_step_without_a(model, layers, guard, optimizer, frozen)
    take_right_step(model, layers, guard, optimizer)


in_layouts = pytest.mark.parametrize(
    ("size", "layout", "frozen"),
    [
        pytest.param(2, "DDP", False, id="DDP, not used"),
        pytest.param(2, "FSDP2", False, id="FSDP2, not used"),
        pytest.param(2, "FSDP2", True, id="FSDP2, frozen"),
        pytest.param(4, "HSDP", False, id="HSDP, not used", marks=pytest.mark.slow),
        pytest.param(4, "HSDP", True, id="HSDP, frozen", marks=pytest.mark.slow),
    ],
)


@on_ranks("size")
@in_layouts
def test_a_layer_that_comes_back_after_a_skipped_spike_has_the_right_gradient(size, layout, frozen):
    scaler = DistGradScaler("cpu", init_scale=2.0**10)
    check_layer_that_comes_back(layout, scaler, frozen)


@on_ranks(2)
def test_under_a_guard_a_layer_that_comes_back_has_the_right_gradient():
    check_layer_that_comes_back("FSDP2", StepGuard(), frozen=False)


@pytest.mark.slow
@on_ranks("size")
@in_layouts
def test_under_a_guard_a_layer_that_comes_back_has_the_right_gradient_in_any_layout(
    size, layout, frozen
):
    check_layer_that_comes_back(layout, StepGuard(), frozen)


# DDP exchanges the sum of all micro-batches at once, so it is no such case.
@on_ranks("size")
@pytest.mark.parametrize(
    ("size", "layout"), [(2, "FSDP2"), pytest.param(4, "HSDP", marks=pytest.mark.slow)]
)
def test_two_reduced_micro_batches_after_a_skip_add_up_with_their_error(size, layout):
    """The first of the two is so large that its rounding error alone exceeds the second."""
    model, layers = distributed(layout)
    scaler = DistGradScaler("cpu", init_scale=2.0**10)
    scaler.attach_comm_hook(comm_hooks.register_comm_hook(model, "int8"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    large = gradients_of_ranks(0, scale=1e4)
    small = gradients_of_ranks(1)

    def accumulate(factor: float) -> None:
        optimizer.zero_grad()
        for gradients in (large, small):
            gradient = gradients[rank] * factor
            scaler.scale(model({"a": gradient, "b": gradient})).backward()

    accumulate(torch.inf if rank == 0 else 1.0)
    scaler.step(optimizer)
    assert not scaler.step_was_taken(optimizer)
    scaler.update()

    accumulate(1.0)
    exact = large.mean(0) + small.mean(0)
    error = unscaled_gradient(layers.a, scaler.get_scale()) - exact
    # The error of one rounding at this scale is about 100.
    assert float(error.abs().max()) < 10
    scaler.step(optimizer)
    assert scaler.step_was_taken(optimizer)


@on_ranks(2)
def test_a_layer_of_a_partly_used_fsdp2_module_has_no_error_of_another_layer():
    """torch does not tell a hook which parameters of the module were used."""
    layers = fully_shard(Layers())
    hook = comm_hooks.register_comm_hook(layers, "int8")
    large = gradients_of_ranks(0, scale=1e4)
    layers({"a": large[dist.get_rank()]}).backward()
    assert relative(layers.a.weight.grad.full_tensor(), large.mean(0)) < 1e-6
    small = gradients_of_ranks(1)
    layers({"b": small[dist.get_rank()]}).backward()
    assert relative(layers.b.weight.grad.full_tensor(), small.mean(0)) < 1e-6
    (reason,) = hook.stats().fallbacks
    assert "FSDP2 left out parameters of a module that were not used" in reason
