"""The same training in every layout and at every level, on real ranks, beside one process alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distamp import cast_model, initialize
from distamp.errors import StageError
from distamp.initialize import Amp
from tests.collectives import count_collectives
from tests.initialize.nets import Net, batches, loss_of, net
from tests.ranks import RankPool, mesh

STEPS = 4
PATIENCE_S = 240.0  # a busy machine is slow to make the ranks' first connections
CPU = torch.device("cpu")
Made = tuple[nn.Module, torch.optim.Optimizer]
Lr = {"lr": 0.01, "eps": 1e-3}


def plain(model: nn.Module) -> Made:
    return model, torch.optim.Adam(model.parameters(), **Lr)


def ddp(model: nn.Module) -> Made:
    wrapped = DistributedDataParallel(model)
    return wrapped, torch.optim.Adam(wrapped.parameters(), **Lr)


def zero(model: nn.Module) -> Made:
    wrapped = DistributedDataParallel(model)
    return wrapped, ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=torch.optim.Adam, **Lr
    )


def oss(model: nn.Module) -> Made:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    optimizer = OSS(model.parameters(), optim=torch.optim.Adam, **Lr)
    return ShardedDataParallel(model, optimizer), optimizer


def fsdp1(model: nn.Module, **settings: Any) -> Made:
    wrapped = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True, **settings)
    return wrapped, torch.optim.Adam(wrapped.parameters(), **Lr)


def fsdp1_policy(model: nn.Module) -> Made:
    half = torch.float16
    settings = MixedPrecision(param_dtype=half, reduce_dtype=half, cast_root_forward_inputs=True)
    return fsdp1(model, mixed_precision=settings)


def fsdp2(model: nn.Module, **settings: Any) -> Made:
    over = mesh((dist.get_world_size(),), ("shard",))
    fully_shard(model.hidden, mesh=over, **settings)
    fully_shard(model, mesh=over, **settings)
    return model, torch.optim.Adam(model.parameters(), **Lr)


def fsdp2_policy(model: nn.Module) -> Made:
    return fsdp2(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))


LAYOUTS: dict[str, Callable[[nn.Module], Made]] = {
    "plain": plain,
    "DDP": ddp,
    "ZeRO": zero,
    "OSS": oss,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "FSDP1 policy": fsdp1_policy,
    "FSDP2 policy": fsdp2_policy,
}
CASTS_BY_ITSELF = ("FSDP1 policy", "FSDP2 policy")
WITH_O2 = ("plain", "DDP", *CASTS_BY_ITSELF)
LEVELS = ("O1", "O2", "O3", "bf16")


def made(layout: str, level: str, **overrides: Any) -> Amp:
    model = net(batchnorm=False)
    if layout not in CASTS_BY_ITSELF:
        cast_model(model, level)
    wrapped, optimizer = LAYOUTS[layout](model)
    if level in ("O1", "O2"):
        overrides = {"init_scale": 2.0**10, **overrides}
    return initialize(wrapped, optimizer, level, **overrides)


def share(tensor: Tensor, layout: str) -> Tensor:
    """This rank's rows; without a wrapper every rank sees them all."""
    if layout == "plain" or not dist.is_initialized():
        return tensor
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def train(layout: str, level: str) -> tuple[list[float], list[Tensor]]:
    """Return the norms of the gradients, and the parameters in the end, whole."""
    amp = made(layout, level)
    norms = []
    for context, following in batches(STEPS):
        amp.zero_grad()
        with amp.autocast():
            logits = amp.model(share(context, layout))
        amp.backward(loss_of(logits, share(following, layout)))
        norms.append(amp.clip_grad_norm_(0.5).item())
        assert amp.step()
    return norms, whole(amp.model)


@torch.no_grad()
def whole(model: nn.Module) -> list[Tensor]:
    with contextlib.ExitStack() as stack:
        if isinstance(model, FullyShardedDataParallel):
            context = FullyShardedDataParallel.summon_full_params(model, writeback=False)
            stack.enter_context(context)
        return [
            (p.full_tensor() if isinstance(p, DTensor) else p).detach().float().clone()
            for p in model.parameters()
        ]


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[list[float], list[Tensor]]]:
    return {level: train("plain", level) for level in LEVELS}


def _cells() -> Iterator[tuple[str, str]]:
    for layout in LAYOUTS:
        for level in LEVELS:
            if (layout in WITH_O2) if level == "O2" else (layout not in CASTS_BY_ITSELF):
                yield layout, level


def train_cells(layout: str, levels: tuple[str, ...]) -> dict[str, Any]:
    return {level: train(layout, level) for level in levels}


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "plain"])
def test_a_layout_trains_as_one_process_does(ranks2: RankPool, alone, layout):
    levels = tuple(level for kind, level in _cells() if kind == layout)
    ranks = ranks2.run(train_cells, layout, levels, timeout=PATIENCE_S)
    for level in levels:
        norms, parameters = alone[level]
        for theirs, values in (rank[level] for rank in ranks):
            assert theirs == pytest.approx(norms, rel=3e-2), level
            for ours, reference in zip(values, parameters, strict=True):
                torch.testing.assert_close(ours, reference, rtol=5e-2, atol=8e-3)
        for one, other in zip(*(rank[level][1] for rank in ranks), strict=True):
            assert torch.equal(one, other), f"{level}: the ranks have parted"


def overflow_on_one_rank(layout: str, levels: tuple[str, ...]) -> dict[str, Any]:
    return {level: _overflow(layout, level) for level in levels}


def _overflow(layout: str, level: str) -> tuple[list[bool], float, bool]:
    amp = made(layout, level)
    before = whole(amp.model)
    taken = []
    for number, (context, following) in enumerate(batches(2)):
        amp.zero_grad()
        with amp.autocast():
            logits = amp.model(share(context, layout))
        bad = number == 0 and dist.get_rank() == 1
        amp.backward(loss_of(logits, share(following, layout)) * (torch.inf if bad else 1.0))
        taken.append(bool(amp.step()))
        if number == 0:
            unchanged = all(map(torch.equal, before, whole(amp.model)))
    return taken, amp.scaler.get_scale(), unchanged


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks2: RankPool, layout):
    levels = tuple(level for kind, level in _cells() if kind == layout and level in ("O1", "O2"))
    for shown in ranks2.run(overflow_on_one_rank, layout, levels, timeout=PATIENCE_S):
        assert shown == {level: ([False, True], 2.0**9, True) for level in levels}


def masters_in_bytes() -> dict[str, int]:
    return {layout: sum(m.nbytes for m in made(layout, "O2").masters) for layout in WITH_O2}


def test_float32_shards_are_the_masters_of_a_wrapper_that_casts(ranks2: RankPool):
    whole = sum(p.numel() * 4 for p in net(batchnorm=False).parameters())
    for kept in ranks2.run(masters_in_bytes, timeout=PATIENCE_S):
        assert kept == {"plain": whole, "DDP": whole, "FSDP1 policy": 0, "FSDP2 policy": 0}


def accumulate(layout: str, level: str) -> tuple[list[Tensor], list[Tensor], int, int]:
    """Train one step in two microbatches, the first without syncing, beside syncing both."""
    outcomes, counts = [], []
    for paused in (True, False):
        amp = made(layout, level)
        ((context, following),) = batches(1)
        rows = zip(share(context, layout).chunk(2), share(following, layout).chunk(2), strict=True)
        with count_collectives() as counter:
            for number, (some, after) in enumerate(rows):
                pause = amp.no_sync() if paused and number == 0 else contextlib.nullcontext()
                with pause:
                    with amp.autocast():
                        logits = amp.model(some)
                    amp.backward(loss_of(logits, after) / 2)
        assert amp.step()
        outcomes.append(whole(amp.model))
        counts.append(counter.count)
    return *outcomes, *counts


@pytest.mark.parametrize(
    ("layout", "level"),
    [
        *((layout, "O1") for layout in ("DDP", "FSDP1", "FSDP2")),
        *((layout, "O2") for layout in ("DDP", "FSDP2 policy")),
    ],
)
def test_accumulating_without_syncing_comes_to_the_same(ranks2: RankPool, layout, level):
    for paused, synced, few, many in ranks2.run(accumulate, layout, level, timeout=PATIENCE_S):
        for ours, reference in zip(paused, synced, strict=True):
            torch.testing.assert_close(ours, reference, rtol=2e-2, atol=2e-3)
        assert few < many


def messages() -> list[int]:
    """Return how many collectives each step sent, of two models and two optimizers."""
    models = [net(seed, batchnorm=False) for seed in (0, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    amp = initialize(models, optimizers, "O1", num_losses=2, init_scale=2.0**10)
    counts = []
    for context, following in batches(5):
        amp.zero_grad()
        for number, model in enumerate(amp.models):
            with amp.autocast():
                logits = model(context)
            amp.backward(loss_of(logits, following), number)
        with count_collectives() as counter:
            amp.step()
        counts.append(counter.count)
    return counts


def test_a_step_of_several_optimizers_and_losses_is_one_message(ranks2: RankPool):
    for counts in ranks2.run(messages, timeout=PATIENCE_S):
        assert counts[-3:] == [1, 1, 1]


def train_through_a_wire() -> tuple[list[bool], list[Tensor]]:
    """Train with a hook and without; the second batch overflows on one rank."""
    outcomes = []
    for hook in ("fp16", None):
        amp = made("DDP", "O1", comm_hook=hook)
        taken = []
        for number, (context, following) in enumerate(batches(5)):
            amp.zero_grad()
            with amp.autocast():
                logits = amp.model(share(context, "DDP"))
            bad = number == 1 and dist.get_rank() == 1
            loss = loss_of(logits, share(following, "DDP"))
            amp.backward(loss * (torch.inf if bad else 1.0))
            taken.append(bool(amp.step()))
        outcomes.append((taken, whole(amp.model)))
    (taken, ours), (expected, reference) = outcomes
    assert taken == expected
    for one, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=8e-3)
    return taken, ours


def test_a_comm_hook_carries_gradients_and_hears_of_skips(ranks2: RankPool):
    ranks = ranks2.run(train_through_a_wire, timeout=PATIENCE_S)
    for taken, values in ranks:
        assert taken == [True, False, True, True, True]
        assert all(map(torch.equal, values, ranks[0][1]))


def train_copies_of_shards() -> tuple[list[float], list[Tensor]]:
    """As `train` at O1, sharded over two ranks, and a hook averages two such copies."""
    world, model = mesh((2, 2), ("replicate", "shard")), net(batchnorm=False)
    fully_shard(model.hidden, mesh=world["shard"])
    fully_shard(model, mesh=world["shard"])
    optimizer = torch.optim.Adam(model.parameters(), **Lr)
    replicas = world["replicate"].get_group()
    amp = initialize(
        model, optimizer, "O1", init_scale=2.0**10, comm_hook="fp16", replicas=replicas
    )
    norms = []
    for context, following in batches(STEPS):
        amp.zero_grad()
        with amp.autocast():
            logits = amp.model(share(context, "FSDP2"))
        amp.backward(loss_of(logits, share(following, "FSDP2")))
        norms.append(amp.clip_grad_norm_(0.5).item())
        assert amp.step()
    return norms, whole(model)


def test_copies_of_shards_count_once_in_the_norm(ranks4: RankPool):
    norms, parameters = train("plain", "O1")
    for found, trained in ranks4.run(train_copies_of_shards):
        torch.testing.assert_close(found, norms, rtol=0.01, atol=0)
        torch.testing.assert_close(trained, parameters, rtol=0, atol=0.01)


def second_pass_through_ddp() -> str:
    amp = made("DDP", "O1")
    ((context, following),) = batches(1)
    logits = amp.model(context)
    amp.backward(loss_of(logits, following), retain_graph=True)
    try:
        amp.backward(logits.float().square().mean())
    except StageError as error:
        return str(error)
    return "not refused"


def test_a_second_pass_that_ddp_would_not_reduce_is_refused(ranks2: RankPool):
    for shown in ranks2.run(second_pass_through_ddp, timeout=PATIENCE_S):
        assert "Add the losses up" in shown


def passes_that_ddp_reduces() -> list[bool]:
    """A GAN's way: two models, and a graph of the first that is used after the second's pass."""
    generator, judge = (DistributedDataParallel(net(seed, batchnorm=False)) for seed in (0, 1))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, judge)]
    amp = initialize([generator, judge], optimizers, "O1", init_scale=2.0**10)
    taken = []
    for context, following in batches(2):
        amp.zero_grad()
        made_up = generator(context)
        amp.backward(loss_of(judge(context), following))
        penalty = amp.grad(made_up.float().mean(), list(generator.parameters()), create_graph=True)
        norm = torch.stack([g.square().sum() for g in penalty]).sum().sqrt()
        amp.backward(loss_of(made_up, following) + norm)
        taken.append(bool(amp.step()))
    return taken


def test_one_pass_through_each_forward_is_not(ranks2: RankPool):
    assert ranks2.run(passes_that_ddp_reduces, timeout=PATIENCE_S) == [[True, True], [True, True]]


def test_replicas_of_dataparallel_compute_in_the_levels_dtype():
    from distamp.autocast import DataParallel

    seen: set[torch.dtype] = set()

    class Watched(Net):
        def forward(self, context: Tensor) -> Tensor:
            logits = super().forward(context)
            seen.add(logits.dtype)
            return logits

    for level, wanted in (("bf16", torch.bfloat16), ("O1", torch.float16), ("O2", torch.float16)):
        seen.clear()
        model = DataParallel(Watched(batchnorm=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp = initialize(model, optimizer, level)
        ((context, following),) = batches(1)
        with amp.autocast():
            logits = amp.model(context)
        amp.backward(loss_of(logits, following))
        assert seen == {wanted}
        assert logits.dtype is (torch.float32 if level == "O2" else wanted)
