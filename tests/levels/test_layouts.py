"""The same training in every layout and at every level, on real ranks, beside one process alone."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp import cast_model, initialize
from distamp.comm_hooks import register_comm_hook
from distamp.errors import CallOrderError
from distamp.levels import Amp
from tests.collectives import count_collectives
from tests.comm_hooks.training import agreed
from tests.levels import nets
from tests.levels.cells import whole, wrapped
from tests.levels.nets import SCALE, adam, backward, batches, loss_of, made_in, net
from tests.on_ranks import on_ranks
from tests.ranks import mesh

STEPS = 4
FAULT = 1
HALF, FULL = torch.float16, torch.float32


LAYOUTS = {
    "plain": ("fp16", "fp16-O2", "fp16-O3", "bf16"),
    "DDP": ("fp16", "fp16-O2", "fp16-O3", "bf16"),
    "DDP, fp16 hook": ("fp16", "bf16"),
    "DDP, int8 hook": ("bf16",),
    "ZeRO": ("fp16", "fp16-O3", "bf16"),
    "OSS": ("fp16", "fp16-O3", "bf16"),
    "FSDP1": ("fp16", "fp16-O3", "bf16"),
    "FSDP2": ("fp16", "fp16-O2", "fp16-O3", "bf16"),
    "FSDP1, policy": ("fp16-O2",),
    "FSDP2, policy": ("fp16-O2",),
}


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
        bad = mine and number == FAULT and amp.level.scales
        backward(amp, share(batch, layout), torch.inf if bad else 1.0)
        norm = amp.clip_grad_norm_(0.5).item()
        taken.append(bool(amp.step()))
        norms += [norm] if taken[-1] else []
        amp.model.cpu()  # as between two phases of reinforcement learning; FSDP2 swaps its tensors
    return norms, taken, whole(amp.model)


def trained(layout: str, level: str) -> Any:
    amp = made_in(layout, level)
    # Of a wrapper that casts, the float32 shards are the masters.
    assert bool(amp.masters) is (level == "fp16-O2" and "policy" not in layout)
    found = *train(amp, layout), amp.scaler.get_scale()
    violations = amp.check(lambda: nets.train(amp, [share(next(batches(1)), layout)], 0.5))
    assert not violations, str(violations)
    for hook in amp.comm_hooks:
        amp.scaler.detach_comm_hook(hook)  # raises where it was not attached
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {level: trained("plain", level) for level in LAYOUTS["plain"]}


@on_ranks(2)
@pytest.mark.parametrize(("layout", "level"), [(la, le) for la in LAYOUTS for le in LAYOUTS[la]])
def test_a_layout_trains_and_skips_as_one_process_does(alone, layout, level):
    if layout == "OSS":
        pytest.importorskip("fairscale")
    norms, taken, parameters, scale = trained(layout, level)
    wanted = alone[level]
    assert (norms, taken, scale) == (pytest.approx(wanted[0], rel=3e-2), wanted[1], wanted[3])
    assert taken[FAULT] is (level == "bf16"), "what has no scaler has no fault"
    torch.testing.assert_close(parameters, wanted[2], rtol=5e-2, atol=8e-3)
    assert agreed(torch.cat([p.flatten() for p in parameters]))


@on_ranks(2)
@pytest.mark.parametrize(
    ("layout", "level"),
    [
        ("DDP", "fp16"),
        ("FSDP1", "fp16"),
        ("FSDP2", "fp16"),
        ("DDP", "fp16-O2"),
        ("FSDP2, policy", "fp16-O2"),
    ],
)
def test_accumulating_without_syncing_comes_to_the_same_and_sends_less(layout, level):
    """One step in two microbatches, the first without syncing, beside syncing both."""
    outcomes, counts = [], []
    for paused in (True, False):
        amp = made_in(layout, level)
        parts = zip(*(t.chunk(2) for t in share(next(batches(1)), layout)), strict=True)
        with count_collectives() as counter:
            for number, part in enumerate(parts):
                first = paused and number == 0
                with amp.no_sync() if first else contextlib.nullcontext():
                    backward(amp, part, 0.5)
        assert amp.step()
        outcomes.append(whole(amp.model))
        counts.append(counter.count)
    torch.testing.assert_close(*outcomes, rtol=2e-2, atol=2e-3)
    assert counts[0] < counts[1]


@on_ranks(4)
def test_copies_of_shards_count_once_in_the_norm(alone):
    """At fp16, sharded over two ranks; a hook averages two such copies."""
    over = mesh((2, 2), ("replicate", "shard"))
    model: Any = net(batchnorm=False)
    for part in (model.hidden, model):
        fully_shard(part, mesh=over["shard"])
    replicas = over["replicate"].get_group()
    settings: dict[str, Any] = {"comm_hook": "fp16", "replicas": replicas, "init_scale": SCALE}
    norms, taken, parameters = train(initialize(model, adam(model), "fp16", **settings), "FSDP2")
    assert (norms, taken) == (pytest.approx(alone["fp16"][0], rel=0.01), alone["fp16"][1])
    torch.testing.assert_close(parameters, alone["fp16"][2], rtol=0, atol=0.01)


@on_ranks(2)
@pytest.mark.parametrize("layout", ["DDP", "FSDP1", "FSDP2"])
def test_a_hook_that_was_registered_by_hand_is_attached(layout):
    model = wrapped(net(batchnorm=False), layout, None, "")
    hook = register_comm_hook(model, "fp16")
    amp = initialize(model, adam(model), "bf16")
    assert amp.comm_hooks == (hook,)
    amp.scaler.detach_comm_hook(hook)  # raises where it was not attached


@on_ranks(2)
def test_a_second_pass_that_ddp_would_not_reduce_is_refused_and_a_gans_is_not():
    """A second pass through one graph; and a GAN's way, where each forward has one pass."""
    amp, (context, following) = made_in("DDP", "fp16"), next(batches(1))
    logits = amp.model(context)
    amp.backward(loss_of(logits, following), retain_graph=True)
    with pytest.raises(CallOrderError, match="Add the losses before backward"):
        amp.backward(logits.float().square().mean())
    generator, judge = (DistributedDataParallel(net(seed, batchnorm=False)) for seed in (0, 1))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, judge)]
    amp = initialize([generator, judge], optimizers, "fp16", init_scale=SCALE)
    for context, following in batches(3):
        amp.zero_grad()
        made_up = generator(context)
        amp.backward(loss_of(judge(context), following))
        penalty = amp.grad(made_up.float().mean(), list(generator.parameters()), create_graph=True)
        norm = torch.stack([g.square().sum() for g in penalty]).sum().sqrt()
        amp.backward(loss_of(made_up, following) + norm)
        assert amp.step()


@on_ranks(2)
def test_passes_that_ddps_own_no_sync_does_not_reduce_may_be_two():
    """The gradients of both passes add up on each rank. The ranks have different rows."""
    amp = made_in("DDP", "fp16")
    context, following = share(next(batches(1)), "DDP")
    params = list(amp.model.parameters())
    scale = amp.scaler.get_scale()
    with amp.model.no_sync():  # type: ignore[operator]
        logits = amp.model(context)
        loss = loss_of(logits, following)
        penalty = logits.float().square().mean()
        loss_grads = torch.autograd.grad(scale * loss, params, retain_graph=True)
        penalty_grads = torch.autograd.grad(scale * penalty, params, retain_graph=True)
        amp.backward(loss, retain_graph=True)
        amp.backward(penalty)
    for param, grad, penalty_grad in zip(params, loss_grads, penalty_grads, strict=True):
        torch.testing.assert_close(param.grad, grad + penalty_grad)


LEVELS = ("fp16", "fp16-O2", "fp16-O3", "bf16", "bf16-O2", "bf16-O3")


class TimedBlock(nn.Module):
    """A block of a diffusion model: a float32 timestep comes before the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, timestep: Tensor, hidden: Tensor) -> Any:
        return self.linear(hidden) + torch.sin(timestep)[:, None]


class Diffusion(nn.Module):
    """Two layers around such a block, which is given its timestep in float32 at every level."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.block, self.after = nn.Linear(8, 8), TimedBlock(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        timestep = torch.arange(len(x), dtype=FULL)
        return self.after(self.block(timestep, self.before(x)))


@on_ranks(2)
@pytest.mark.parametrize(
    ("layout", "level"),
    [
        *((layout, level) for layout in ("plain", "DDP", "FSDP2") for level in LEVELS),
        # FSDP1 casts by a policy at fp16-O2 and bf16-O2.
        *(("FSDP1", level) for level in LEVELS if not level.endswith("O2")),
    ],
)
def test_a_pinned_block_returns_the_models_dtype_beside_a_float32_timestep(layout, level):
    pins = {"block": "fp32"}
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    wanted = Diffusion()(x).square().mean().item()
    model = wrapped(cast_model(Diffusion(), level, module_precision=pins), layout, None, "")
    amp = initialize(model, adam(model), level, module_precision=pins)
    with amp.autocast():
        loss = amp.model(x).float().square().mean()
    amp.backward(loss)
    assert amp.step()
    assert loss.item() == pytest.approx(wanted, rel=3e-2)
