"""The same training in every layout and at every level, on real ranks, beside one process alone."""

import contextlib
from collections.abc import Callable
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
from torch.nn.parallel import DistributedDataParallel

from distamp import DataParallel, cast_model, initialize
from distamp.errors import StageError
from distamp.initialize import Amp
from tests.collectives import count_collectives
from tests.initialize.cells import whole
from tests.initialize.nets import adam, backward, batches, loss_of, net
from tests.ranks import RankPool, mesh

PATIENCE_S = 240.0  # a busy machine is slow to make the ranks' first connections
SCALE = 2.0**10
STEPS = 4
FAULT = 1
CPU = torch.device("cpu")
HALF, FULL = torch.float16, torch.float32
Made = tuple[nn.Module, torch.optim.Optimizer]


def ddp(model: nn.Module) -> Made:
    wrapped = DistributedDataParallel(model)
    return wrapped, adam(wrapped)


def zero(model: nn.Module) -> Made:
    wrapped, settings = DistributedDataParallel(model), {"lr": 0.01, "eps": 1e-3}
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, **settings)


def oss(model: nn.Module) -> Made:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    optimizer = OSS(model.parameters(), optim=torch.optim.Adam, lr=0.01, eps=1e-3)
    return ShardedDataParallel(model, optimizer), optimizer


def fsdp1(model: nn.Module, **settings: Any) -> Made:
    wrapped = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True, **settings)
    return wrapped, adam(wrapped)


def fsdp1_policy(model: nn.Module) -> Made:
    policy = MixedPrecision(param_dtype=HALF, reduce_dtype=HALF, cast_root_forward_inputs=True)
    return fsdp1(model, mixed_precision=policy)


def fsdp2(model: nn.Module, over: Any = None, **settings: Any) -> Made:
    over = over or mesh((dist.get_world_size(),), ("shard",))
    for part in (model.hidden, model):
        fully_shard(part, mesh=over, **settings)  # type: ignore[arg-type]
    return model, adam(model)


def fsdp2_policy(model: nn.Module) -> Made:
    return fsdp2(model, mp_policy=MixedPrecisionPolicy(param_dtype=HALF))


LAYOUTS: dict[str, tuple[Callable[[nn.Module], Made], tuple[str, ...]]] = {
    "plain": (lambda model: (model, adam(model)), ("O1", "O2", "O3", "bf16")),
    "DDP": (ddp, ("O1", "O2", "O3", "bf16")),
    "DDP, fp16 hook": (ddp, ("O1",)),
    "ZeRO": (zero, ("O1", "O3", "bf16")),
    "OSS": (oss, ("O1", "O3", "bf16")),
    "FSDP1": (fsdp1, ("O1", "O3", "bf16")),
    "FSDP2": (fsdp2, ("O1", "O2", "O3", "bf16")),
    "FSDP1 policy": (fsdp1_policy, ("O2",)),
    "FSDP2 policy": (fsdp2_policy, ("O2",)),
}


def made(layout: str, level: str) -> Amp:
    model = net(batchnorm=False)
    if "policy" not in layout:
        cast_model(model, level)
    wrapped, optimizer = LAYOUTS[layout][0](model)
    settings: dict[str, Any] = {"init_scale": SCALE} if level in ("O1", "O2") else {}
    if "hook" in layout:
        settings["comm_hook"] = "fp16"
    return initialize(wrapped, optimizer, level, **settings)


def share(batch: tuple[Tensor, ...], layout: str) -> Any:
    """This rank's rows, of as many as the batch is cut for; without a wrapper all see them all."""
    if layout == "plain" or not dist.is_initialized():
        return batch
    return tuple(tensor.chunk(2)[dist.get_rank() % 2] for tensor in batch)


def train(amp: Amp, layout: str) -> tuple[list[float], list[bool], list[Tensor]]:
    """Norms of taken steps, which were taken, the parameters in the end; rank 1 overflows once."""
    norms, taken = [], []
    for number, batch in enumerate(batches(STEPS)):
        amp.zero_grad()
        mine = not dist.is_initialized() or dist.get_rank() == 1
        bad = mine and number == FAULT and amp.precision.scales
        backward(amp, share(batch, layout), torch.inf if bad else 1.0)
        norm = amp.clip_grad_norm_(0.5).item()
        taken.append(bool(amp.step()))
        norms += [norm] if taken[-1] else []
    return norms, taken, whole(amp.model)


def trained(layout: str) -> dict[str, Any]:
    found = {}
    for level in LAYOUTS[layout][1]:
        amp = made(layout, level)
        # Of a wrapper that casts, the float32 shards are the masters.
        assert bool(amp.masters) is (level == "O2" and "policy" not in layout)
        found[level] = *train(amp, layout), amp.scaler.get_scale()
        for hook in amp.comm_hooks:
            amp.scaler.detach(hook)  # raises where it was not attached
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return trained("plain")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_and_skips_as_one_process_does(ranks2: RankPool, alone, layout):
    if layout == "OSS":
        pytest.importorskip("fairscale")
    one, other = ranks2.run(trained, layout, timeout=PATIENCE_S)
    for level, (norms, taken, parameters, scale) in one.items():
        wanted = alone[level]
        assert norms == pytest.approx(wanted[0], rel=3e-2), level
        assert (taken, scale) == (wanted[1], wanted[3]), level
        assert taken[FAULT] is (level == "bf16"), "what has no scaler has no fault"
        torch.testing.assert_close(parameters, wanted[2], rtol=5e-2, atol=8e-3)
        assert all(map(torch.equal, parameters, other[level][2])), f"{level}: ranks have parted"
        assert other[level][1:2] == (taken,)


def accumulate(layout: str, level: str) -> Any:
    """One step in two microbatches, the first without syncing, beside syncing both."""
    outcomes, counts = [], []
    for paused in (True, False):
        amp = made(layout, level)
        parts = zip(*(t.chunk(2) for t in share(next(batches(1)), layout)), strict=True)
        with count_collectives() as counter:
            for number, part in enumerate(parts):
                first = paused and number == 0
                with amp.no_sync() if first else contextlib.nullcontext():
                    backward(amp, part, 0.5)
        assert amp.step()
        outcomes.append(whole(amp.model))
        counts.append(counter.count)
    return *outcomes, *counts


@pytest.mark.parametrize(
    ("layout", "level"),
    [("DDP", "O1"), ("FSDP1", "O1"), ("FSDP2", "O1"), ("DDP", "O2"), ("FSDP2 policy", "O2")],
)
def test_accumulating_without_syncing_comes_to_the_same_and_sends_less(ranks2, layout, level):
    for paused, synced, few, many in ranks2.run(accumulate, layout, level, timeout=PATIENCE_S):
        torch.testing.assert_close(paused, synced, rtol=2e-2, atol=2e-3)
        assert few < many


def copies_of_shards() -> Any:
    """At O1, sharded over two ranks; a hook averages two such copies."""
    over = mesh((2, 2), ("replicate", "shard"))
    model, optimizer = fsdp2(net(batchnorm=False), over["shard"])
    replicas = over["replicate"].get_group()
    settings: dict[str, Any] = {"comm_hook": "fp16", "replicas": replicas, "init_scale": SCALE}
    return train(initialize(model, optimizer, "O1", **settings), "FSDP2")


def test_copies_of_shards_count_once_in_the_norm(ranks4: RankPool, alone):
    norms, taken, parameters, _ = alone["O1"]
    for found in ranks4.run(copies_of_shards, timeout=PATIENCE_S):
        assert found[:2] == (pytest.approx(norms, rel=0.01), taken)
        torch.testing.assert_close(found[2], parameters, rtol=0, atol=0.01)


def passes_through_ddp() -> tuple[str, list[bool]]:
    """A second pass through one graph; and a GAN's way, where each forward has one pass."""
    amp, (context, following) = made("DDP", "O1"), next(batches(1))
    logits = amp.model(context)
    amp.backward(loss_of(logits, following), retain_graph=True)
    with pytest.raises(StageError) as refused:
        amp.backward(logits.float().square().mean())
    generator, judge = (DistributedDataParallel(net(seed, batchnorm=False)) for seed in (0, 1))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, judge)]
    amp = initialize([generator, judge], optimizers, "O1", init_scale=SCALE)
    taken = []
    for context, following in batches(3):
        amp.zero_grad()
        made_up = generator(context)
        amp.backward(loss_of(judge(context), following))
        penalty = amp.grad(made_up.float().mean(), list(generator.parameters()), create_graph=True)
        norm = torch.stack([g.square().sum() for g in penalty]).sum().sqrt()
        amp.backward(loss_of(made_up, following) + norm)
        taken.append(bool(amp.step()))
    return str(refused.value), taken


def test_a_second_pass_that_ddp_would_not_reduce_is_refused_and_a_gans_is_not(ranks2: RankPool):
    for refused, taken in ranks2.run(passes_through_ddp, timeout=PATIENCE_S):
        assert "Add the losses up" in refused
        assert taken == [True] * 3


@pytest.mark.parametrize(
    ("level", "returned"), [("bf16", torch.bfloat16), ("O1", HALF), ("O2", FULL)]
)
def test_dataparallel_computes_in_the_levels_dtype(level, returned):
    model = DataParallel(net(batchnorm=False))
    amp = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
    with amp.autocast():
        assert amp.model(next(batches(1))[0]).dtype is returned
