"""The same training in every layout and at every level, on real ranks and in one process."""

import itertools
from typing import Any, NamedTuple

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
from tests.levels.cells import full_params, wrapped
from tests.levels.nets import SCALE, adam, amp_in, backward, batches, loss_of, net
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases
from tests.ranks import mesh

STEPS = 4
FAULTY_STEP = 1
Batch = tuple[Tensor, Tensor]


def share(batch: Batch, layout: str) -> Batch:
    """Return this rank's rows of a batch that is cut for two ranks; without a wrapper, all rows."""
    if layout == "plain" or not dist.is_initialized():
        return batch
    context, following = batch
    index = dist.get_rank() % 2
    return context.chunk(2)[index], following.chunk(2)[index]


# -- training, compared with one process -----------------------------------------------------------


class Run(NamedTuple):
    """The norms of taken steps, a flag for each step, the last scale, and the weights."""

    norms: list[float]
    taken: list[bool]
    scale: float
    weights: list[Tensor]


def has_fault(step: int, amp: Amp) -> bool:
    """Return whether this rank's loss is infinite: once on rank 1, at a level with a scale."""
    is_faulty_rank = not dist.is_initialized() or dist.get_rank() == 1
    return step == FAULTY_STEP and is_faulty_rank and amp.level.scales


def train(amp: Amp, layout: str) -> Run:
    norms = []
    taken = []
    for step, batch in enumerate(batches(STEPS)):
        amp.zero_grad()
        factor = torch.inf if has_fault(step, amp) else 1.0
        backward(amp, share(batch, layout), factor)
        norm = amp.clip_grad_norm_(0.5).item()
        taken.append(bool(amp.step()))
        if taken[-1]:
            norms.append(norm)
        # Reinforcement learning moves a model between two phases; FSDP2 swaps its tensors.
        amp.model.cpu()
    return Run(norms, taken, amp.scaler.get_scale(), full_params(amp.model))


def check_contract(amp: Amp, layout: str) -> None:
    batch = share(next(batches(1)), layout)
    violations = amp.check(lambda: nets.train(amp, [batch], 0.5))
    assert not violations, str(violations)


@pytest.fixture(scope="module")
def single_process() -> dict[str, Run]:
    """Runs in one process, by level."""
    runs = {}
    for level in ("fp16", "fp16-O2", "fp16-O3", "bf16"):
        amp = amp_in("plain", level)
        runs[level] = train(amp, "plain")
        check_contract(amp, "plain")
    return runs


def check_layout(expected: Run, layout: str, level: str) -> None:
    """Train in a layout, and compare the run with that of one process."""
    if layout == "OSS":
        pytest.importorskip("fairscale")
    amp = amp_in(layout, level)
    # The float32 shards of a wrapper that casts are the masters.
    assert bool(amp.masters) is (level == "fp16-O2" and "policy" not in layout)
    run = train(amp, layout)
    assert run.norms == pytest.approx(expected.norms, rel=3e-2)
    assert run.taken == expected.taken
    assert run.taken[FAULTY_STEP] is (level == "bf16"), "a level without scale has no fault"
    assert run.scale == expected.scale
    torch.testing.assert_close(run.weights, expected.weights, rtol=5e-2, atol=8e-3)
    assert agreed(torch.cat([weight.flatten() for weight in run.weights]))
    check_contract(amp, layout)
    for hook in amp.comm_hooks:
        amp.scaler.detach_comm_hook(hook)  # raises if it was not attached


LAYOUTS = ["plain", "DDP", "DDP, fp16 hook", "ZeRO", "OSS", "FSDP1", "FSDP2"]


@on_ranks(2)
@pytest.mark.parametrize("layout", quick_cases(LAYOUTS, ["DDP", "FSDP2"]))
def test_at_fp16_a_layout_trains_and_skips_as_one_process_does(single_process, layout):
    check_layout(single_process["fp16"], layout, "fp16")


LAYOUTS_OF_O2 = ["plain", "DDP", "FSDP2", "FSDP1, policy", "FSDP2, policy"]


@on_ranks(2)
@pytest.mark.parametrize("layout", quick_cases(LAYOUTS_OF_O2, ["FSDP2"]))
def test_at_fp16_o2_a_layout_trains_and_skips_as_one_process_does(single_process, layout):
    check_layout(single_process["fp16-O2"], layout, "fp16-O2")


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("layout", ["plain", "DDP", "ZeRO", "OSS", "FSDP1", "FSDP2"])
def test_at_fp16_o3_a_layout_trains_and_skips_as_one_process_does(single_process, layout):
    check_layout(single_process["fp16-O3"], layout, "fp16-O3")


@on_ranks(2)
def test_at_bf16_an_int8_hook_trains_as_one_process_does(single_process):
    check_layout(single_process["bf16"], "DDP, int8 hook", "bf16")


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_at_bf16_a_layout_trains_as_one_process_does(single_process, layout):
    check_layout(single_process["bf16"], layout, "bf16")


@on_ranks(4)
def test_copies_of_shards_count_once_in_the_norm(single_process):
    """Two ranks share the shards, and a hook averages two such copies."""
    device_mesh = mesh((2, 2), ("replicate", "shard"))
    model: Any = net(batchnorm=False)
    fully_shard(model.hidden, mesh=device_mesh["shard"])
    fully_shard(model, mesh=device_mesh["shard"])
    replicas = device_mesh["replicate"].get_group()
    settings: dict[str, Any] = {"comm_hook": "fp16", "replicas": replicas, "init_scale": SCALE}
    run = train(initialize(model, adam(model), "fp16", **settings), "FSDP2")
    expected = single_process["fp16"]
    assert run.norms == pytest.approx(expected.norms, rel=0.01)
    assert run.taken == expected.taken
    torch.testing.assert_close(run.weights, expected.weights, rtol=0, atol=0.01)


@on_ranks(2)
@pytest.mark.parametrize("layout", ["DDP", "FSDP1", "FSDP2"])
def test_a_hook_that_was_registered_before_initialize_is_attached(layout):
    model = wrapped(net(batchnorm=False), layout, None, "")
    hook = register_comm_hook(model, "fp16")
    amp = initialize(model, adam(model), "bf16")
    assert amp.comm_hooks == (hook,)
    amp.scaler.detach_comm_hook(hook)  # raises if it was not attached


# -- several backward passes -----------------------------------------------------------------------


def accumulate_two_parts(layout: str, level: str, pauses: bool) -> tuple[list[Tensor], int]:
    """Take a step in two micro-batches.

    Returns:
        The weights, and the number of collectives of both backward passes.
    """
    amp = amp_in(layout, level)
    context, following = share(next(batches(1)), layout)
    first, second = zip(context.chunk(2), following.chunk(2), strict=True)
    with count_collectives() as counter:
        if pauses:
            with amp.no_sync():
                backward(amp, first, 0.5)
        else:
            backward(amp, first, 0.5)
        backward(amp, second, 0.5)
    assert amp.step()
    return full_params(amp.model), counter.count


def check_accumulation(layout: str, level: str) -> None:
    weights, num_collectives = accumulate_two_parts(layout, level, pauses=True)
    synced_weights, num_synced_collectives = accumulate_two_parts(layout, level, pauses=False)
    torch.testing.assert_close(weights, synced_weights, rtol=2e-2, atol=2e-3)
    assert num_collectives < num_synced_collectives


@on_ranks(2)
@pytest.mark.parametrize("layout", quick_cases(["DDP", "FSDP1", "FSDP2"], quick=["DDP", "FSDP2"]))
def test_accumulation_without_syncing_trains_the_same_and_sends_less(layout):
    check_accumulation(layout, "fp16")


@on_ranks(2)
@pytest.mark.parametrize("layout", ["DDP", "FSDP2, policy"])
def test_accumulation_of_half_gradients_trains_the_same_and_sends_less(layout):
    check_accumulation(layout, "fp16-O2")


@on_ranks(2)
def test_a_second_pass_that_ddp_would_not_reduce_is_refused():
    """DDP reduces in the first backward pass through a graph, and not in the second."""
    amp = amp_in("DDP", "fp16")
    context, following = next(batches(1))
    logits = amp.model(context)
    amp.backward(loss_of(logits, following), retain_graph=True)
    with pytest.raises(CallOrderError, match="Add the losses before backward"):
        amp.backward(logits.float().square().mean())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@on_ranks(2)
def test_a_gan_with_one_backward_pass_for_each_forward_pass_trains():
    generator = DistributedDataParallel(net(0, batchnorm=False))
    judge = DistributedDataParallel(net(1, batchnorm=False))
    optimizers = [sgd(generator), sgd(judge)]
    amp = initialize([generator, judge], optimizers, "fp16", init_scale=SCALE)
    params = list(generator.parameters())
    for context, following in batches(3):
        amp.zero_grad()
        generated = generator(context)
        amp.backward(loss_of(judge(context), following))
        grads = amp.grad(generated.float().mean(), params, create_graph=True)
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        amp.backward(loss_of(generated, following) + norm)
        assert amp.step()


@on_ranks(2)
def test_two_passes_that_ddps_own_no_sync_does_not_reduce_add_up():
    """The ranks have different rows, and keep the gradients of both passes."""
    amp = amp_in("DDP", "fp16")
    context, following = share(next(batches(1)), "DDP")
    params = list(amp.model.parameters())
    scale = amp.scaler.get_scale()
    with amp.model.no_sync():
        logits = amp.model(context)
        loss = loss_of(logits, following)
        penalty = logits.float().square().mean()
        loss_grads = torch.autograd.grad(scale * loss, params, retain_graph=True)
        penalty_grads = torch.autograd.grad(scale * penalty, params, retain_graph=True)
        amp.backward(loss, retain_graph=True)
        amp.backward(penalty)
    for param, grad, penalty_grad in zip(params, loss_grads, penalty_grads, strict=True):
        torch.testing.assert_close(param.grad, grad + penalty_grad)


# -- a pinned block with a float32 input -----------------------------------------------------------


class TimedBlock(nn.Module):
    """A block of a diffusion model: a float32 timestep comes before the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, timestep: Tensor, hidden: Tensor) -> Any:
        return self.linear(hidden) + torch.sin(timestep)[:, None]


class Diffusion(nn.Module):
    """Two layers around a timed block, which gets its timestep in float32 at every level."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.block = TimedBlock()
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        timestep = torch.arange(len(x), dtype=torch.float32)
        return self.last(self.block(timestep, self.first(x)))


def check_pinned_block(layout: str, level: str) -> None:
    """Check the loss of a model with a block in fp32 at a level, and take a step."""
    pins = {"block": "fp32"}
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    exact = Diffusion()(x).square().mean().item()
    model = cast_model(Diffusion(), level, module_precision=pins)
    model = wrapped(model, layout, None, "")
    amp = initialize(model, adam(model), level, module_precision=pins)
    with amp.autocast():
        loss = amp.model(x).float().square().mean()
    amp.backward(loss)
    assert amp.step()
    assert loss.item() == pytest.approx(exact, rel=3e-2)


LEVELS_OF_PINS = ["fp16", "bf16-O2", "bf16-O3", "fp16-O2", "fp16-O3", "bf16"]
CASES_OF_PINS = list(itertools.product(["plain", "DDP", "FSDP2"], LEVELS_OF_PINS))
QUICK_CASES_OF_PINS = [
    ("plain", "fp16"),
    ("plain", "bf16-O2"),
    ("plain", "bf16-O3"),
    ("DDP", "fp16"),
    ("FSDP2", "bf16-O2"),
]


@on_ranks(2)
@pytest.mark.parametrize(("layout", "level"), quick_cases(CASES_OF_PINS, QUICK_CASES_OF_PINS))
def test_a_pinned_block_returns_the_models_dtype_beside_a_float32_timestep(layout, level):
    check_pinned_block(layout, level)


@on_ranks(2)
@pytest.mark.parametrize("level", ["fp16", "fp16-O3", "bf16", "bf16-O3"])
def test_a_pinned_block_in_fsdp1_returns_the_models_dtype_beside_a_float32_timestep(level):
    """At fp16-O2 and bf16-O2 a policy of FSDP1 casts."""
    check_pinned_block("FSDP1", level)
