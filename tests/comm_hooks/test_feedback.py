"""The rounding error of a skipped step: dropped once, and only the error of that step."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
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
    """A hook's residuals of two buckets, whose exchanges this test runs by hand."""

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
    store.exchange("a", torch.cat([torch.zeros(BLOCK_NUMEL), store.gradient(1e4)[BLOCK_NUMEL:]]))
    store.end_iteration(SKIPPED)
    assert torch.equal(store.residual("a")[:BLOCK_NUMEL], before[:BLOCK_NUMEL])
    assert not store.residual("a")[BLOCK_NUMEL:].any()


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
    (kept,), (dropped,) = store.hook.state_dict()["residuals"].values()
    assert kept.any()
    assert not dropped.any()


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
    """Two layers, each of which is used where it is given a gradient for its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        eye = torch.eye(WIDTH)
        losses = [(getattr(self, name)(eye) * g.T).sum() for name, g in gradients.items()]
        return torch.stack(losses).sum()


def distributed(layout: str) -> tuple[nn.Module, nn.Module]:
    """A model of two layers as a user wraps it, and the module that has the two."""
    layers, size = Layers(), dist.get_world_size()
    if layout == "DDP":
        return DistributedDataParallel(layers, find_unused_parameters=True), layers
    if layout == "HSDP":
        settings: Any = {"mesh": mesh((2, size // 2), ("replicate", "shard"))}
    else:
        settings = {"mesh": mesh((size,), ("shard",))}
    for layer in (layers.a, layers.b):
        fully_shard(layer, **settings)
    return fully_shard(layers, **settings), layers


def everyones_gradients(seed: int, scale: float = 1.0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(dist.get_world_size(), WIDTH, WIDTH, generator=draw) * scale


def unscaled_gradient(layer: Any, scale: float) -> Tensor:
    gradient = layer.weight.grad
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient) / scale


@on_ranks("size")
@pytest.mark.parametrize("kind", ["scaler", "guard"])
@pytest.mark.parametrize(
    ("size", "layout", "why"),
    [
        (2, "DDP", "dropped"),
        (2, "FSDP2", "dropped"),
        (2, "FSDP2", "frozen"),
        (4, "HSDP", "dropped"),
        (4, "HSDP", "frozen"),
    ],
)
def test_a_layer_that_comes_back_after_a_skipped_spike_has_the_right_gradient(
    size, layout, kind, why
):
    """Layer ``a`` has a spike in a skipped step, drops out or is frozen for two, and comes back."""
    model, layers = distributed(layout)
    guard: Any = DistGradScaler("cpu", init_scale=2.0**10) if kind == "scaler" else StepGuard()
    guard.attach_comm_hook(comm_hooks.register_comm_hook(model, "int8"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    for step in range(4):
        optimizer.zero_grad()
        used = {"a": everyones_gradients(step, scale=1e4 if step == 0 else 1.0)[rank]}
        used["b"] = everyones_gradients(10 + step)[rank]
        if step == 0 and rank == 1:
            used["b"] = used["b"] * torch.inf
        if step in (1, 2) and why == "dropped":
            del used["a"]
        layers.a.requires_grad_(not (step in (1, 2) and why == "frozen"))
        guard.scale(model(used)).backward()
        if step == 3:
            found = unscaled_gradient(layers.a, guard.get_scale())
            assert relative(found, everyones_gradients(step).mean(0)) < 2e-2
        guard.step(optimizer)
        assert guard.step_was_taken(optimizer) == (step != 0)
        guard.update()


# DDP is no such case: it exchanges the sum of what it accumulated, and not the second micro-batch.
@on_ranks("size")
@pytest.mark.parametrize(("size", "layout"), [(2, "FSDP2"), (4, "HSDP")])
def test_two_reduced_micro_batches_after_a_skip_add_up_with_their_error(size, layout):
    """The first of the two is so large that its rounding error alone exceeds the second."""
    model, layers = distributed(layout)
    scaler = DistGradScaler("cpu", init_scale=2.0**10)
    scaler.attach_comm_hook(comm_hooks.register_comm_hook(model, "int8"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    for skips in (True, False):
        optimizer.zero_grad()
        for micro, scale in enumerate((1e4, 1.0)):
            factor = torch.inf if skips and rank == 0 else 1.0
            given = {name: everyones_gradients(micro, scale)[rank] * factor for name in "ab"}
            scaler.scale(model(given)).backward()
        if not skips:
            exact = everyones_gradients(0, 1e4).mean(0) + everyones_gradients(1).mean(0)
            error = unscaled_gradient(layers.a, scaler.get_scale()) - exact
            # The error of one rounding at this scale is about 100.
            assert float(error.abs().max()) < 10
        scaler.step(optimizer)
        assert scaler.step_was_taken(optimizer) is not skips
        scaler.update()


@on_ranks(2)
def test_a_layer_of_a_partly_used_fsdp2_module_has_no_error_of_another_layer():
    """torch does not tell a hook which parameters of the module were used."""
    layers = fully_shard(Layers())
    hook = comm_hooks.register_comm_hook(layers, "int8")
    for seed, (name, scale) in enumerate({"a": 1e4, "b": 1.0}.items()):
        everyones = everyones_gradients(seed, scale)
        layers({name: everyones[dist.get_rank()]}).backward()
        found = getattr(layers, name).weight.grad.full_tensor()
        assert relative(found, everyones.mean(0)) < 1e-6
    (reason,) = hook.stats().fallbacks
    assert "FSDP2 left out parameters of a module that were not used" in reason
