"""How public training code uses torch's scaler, after ``distamp.install()``, beside torch's own.

Each pattern is a few lines of our own in the manner of the code it names: which calls it makes of
the scaler, in which order, and which of its inner names it reads. Each was compared with that code
on 2026-11-23; where a package is installed, its own class is run. In one process the losses,
scales and weights of every step are torch's to the bit, through an overflow; on two ranks of which
one overflows, both stay equal.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp import sharded_grad_scaler as sharded
from torch.nn.parallel import DistributedDataParallel

import distamp
from tests.trainers.common import FAULT, data, digest, faulty, model, rank

STEPS = 7
SCALE = 2.0**8
MICRO = 2


class Step(NamedTuple):
    """What one step left."""

    loss: float
    scale: float
    weights: float


@dataclass
class Job:
    """What a pattern is given, and what it left after each step."""

    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    steps: list[Step] = field(default_factory=list)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = self.model(inputs)
        return (outputs.float() - targets).square().mean()

    def note(self, loss: Tensor, scaler: Any) -> None:
        self.steps.append(Step(loss.item(), scaler.get_scale(), digest(self.model.parameters())))


def scaler_of_torchs(**settings: Any) -> Any:
    """Torch's name, looked up when a trainer makes its scaler."""
    return torch.amp.GradScaler("cpu", **{"init_scale": SCALE, **settings})


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


# -- patterns -------------------------------------------------------------------------------------


def nanogpt(job: Job) -> None:
    """karpathy/nanoGPT, train.py: micro-steps, clip, step, update, zero_grad(set_to_none)."""
    scaler, optimizer = scaler_of_torchs(), adamw(job.model)
    for inputs, targets in job.batches:
        parts = list(zip(inputs.chunk(MICRO), targets.chunk(MICRO), strict=True))
        for number, part in enumerate(parts):
            if isinstance(job.model, DistributedDataParallel):
                job.model.require_backward_grad_sync = number == len(parts) - 1
            loss = job.loss(*part) / MICRO
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        job.note(loss, scaler)


class NativeScaler:
    """facebookresearch/mae, util/misc.py: NativeScalerWithGradNormCount, which always unscales.

    timm's is run in the page's code.
    """

    def __init__(self) -> None:
        self.inner = scaler_of_torchs()

    def __call__(self, loss: Tensor, optimizer: Any, parameters: Any) -> None:
        self.inner.scale(loss).backward(create_graph=False)
        self.inner.unscale_(optimizer)
        torch.stack([p.grad.detach().norm() for p in parameters]).norm()
        self.inner.step(optimizer)
        self.inner.update()


def mae(job: Job) -> None:
    """Its loop, with a run that is resumed; and fairseq's and coqui's question for the scale."""
    scaler, optimizer = NativeScaler(), adamw(job.model)
    for number, (inputs, targets) in enumerate(job.batches):
        optimizer.zero_grad()
        loss = job.loss(inputs, targets)
        before = scaler.inner.get_scale()
        scaler(loss, optimizer, job.model.parameters())
        assert scaler.inner.get_scale() in (before, before * scaler.inner.get_backoff_factor())
        if number == FAULT + 1:
            state, scaler = scaler.inner.state_dict(), NativeScaler()
            scaler.inner.load_state_dict(state)
        job.note(loss, scaler.inner)


def icefall(job: Job) -> None:
    """k2-fsa/icefall, zipformer/train.py: doubles a small scale itself, by update(number).

    Every 100th batch below 8, every 400th below 32; here every 2nd and every 4th.
    """
    scaler, optimizer = scaler_of_torchs(init_scale=1.0), adamw(job.model)
    for number, (inputs, targets) in enumerate(job.batches):
        loss = job.loss(inputs, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if number % 2 == 0:
            now = scaler._scale.item()
            if now < 8.0 or (now < 32.0 and number % 4 == 0):
                scaler.update(now * 2.0)
            assert now >= 1e-5, "icefall stops here"
        job.note(loss, scaler)


def sd_scripts(job: Job) -> None:
    """kohya-ss/sd-scripts, train_util.py: full_fp16, by a patch of ``_unscale_grads_``."""
    job.model.half()
    scaler, optimizer = scaler_of_torchs(), torch.optim.SGD(job.model.parameters(), lr=0.01)
    original = scaler._unscale_grads_

    def replaced(optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return original(optimizer, inv_scale, found_inf, True)

    scaler._unscale_grads_ = replaced
    for inputs, targets in job.batches:
        loss = (job.model(inputs.half()).float() - targets).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        job.note(loss, scaler)


def dinov2(job: Job) -> None:
    """facebookresearch/dinov2, train/train.py: FSDP1's own clipping and ShardedGradScaler."""
    scaler = sharded.ShardedGradScaler("cpu", init_scale=SCALE)
    optimizer = adamw(job.model)
    for inputs, targets in job.batches:
        optimizer.zero_grad(set_to_none=True)
        loss = job.loss(inputs, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        job.model.clip_grad_norm_(3.0)
        scaler.step(optimizer)
        scaler.update()
        with FullyShardedDataParallel.summon_full_params(job.model):
            job.note(loss, scaler)


def own_fp16(job: Job) -> None:
    """float32 copies of float16 weights, as fp16 optimizers of one's own keep them."""
    job.model.half()
    copies = [nn.Parameter(p.detach().float()) for p in job.model.parameters()]
    scaler, optimizer = scaler_of_torchs(), torch.optim.AdamW(copies, lr=0.01)
    for inputs, targets in job.batches:
        loss = (job.model(inputs.half()).float() - targets).square().mean()
        scaler.scale(loss).backward()
        for own, parameter in zip(copies, job.model.parameters(), strict=True):
            own.grad = parameter.grad.float()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(copies, 1.0)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for own, parameter in zip(copies, job.model.parameters(), strict=True):
                parameter.copy_(own)
                parameter.grad = None
        job.note(loss, scaler)


def infinity(job: Job) -> None:
    """FoundationVision/Infinity, utils/amp_opt.py: adds the flags of all ranks up; caps the scale.

    It clips first. The sum of two flags is 2.0.
    """
    scaler = scaler_of_torchs(growth_interval=2)
    optimizer = torch.optim.AdamW(job.model.parameters(), lr=0.01, fused=True)
    for inputs, targets in job.batches:
        loss = job.loss(inputs, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(job.model.parameters(), 2.0)
        if dist.is_initialized():
            for state in scaler._per_optimizer_states.values():
                for flag in state["found_inf_per_device"].values():
                    dist.all_reduce(flag)
        scaler.step(optimizer)
        if scaler.get_scale() > SCALE:
            scaler.update(new_scale=SCALE)
        else:
            scaler.update()
        optimizer.zero_grad(set_to_none=True)
        job.note(loss, scaler)


def nemo(job: Job) -> None:
    """NVIDIA/NeMo, nlp_overrides.py: a subclass with hysteresis, an own step and an own update.

    Its group is Megatron's model parallel one, which here is all ranks.
    """

    class GradScaler(torch.amp.GradScaler):
        def __init__(self, hysteresis: int) -> None:
            super().__init__("cpu", init_scale=SCALE)
            self.optimizer_update_skipped: bool | None = None
            self.hysteresis = self._hysteresis_tracker = hysteresis

        def _unscale_grads_(self, optimizer: Any, *args: Any) -> Any:
            if getattr(optimizer, "_custom_amp_unscale_grads", False):
                return optimizer.unscale_grads(*args)
            return super()._unscale_grads_(optimizer, *args)

        def _maybe_opt_step(self, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
            flag = self._together([*state["found_inf_per_device"].values()])
            self.optimizer_update_skipped = flag.item() != 0
            return None if self.optimizer_update_skipped else optimizer.step(*args, **kwargs)

        def update(self, new_scale: Any = None) -> None:
            scale, tracker = self._check_scale_growth_tracker("update")
            states = self._per_optimizer_states.values()
            flag = self._together([f for s in states for f in s["found_inf_per_device"].values()])
            self._hysteresis_tracker -= 1
            if flag.item() == 0:
                self._hysteresis_tracker = self.hysteresis
            if flag.item() > 0 and self._hysteresis_tracker > 0:
                tracker.fill_(0)
            else:
                factors = (self._growth_factor, self._backoff_factor, self._growth_interval)
                torch._amp_update_scale_(scale, tracker, flag, *factors)
            refresh = torch.amp.grad_scaler._refresh_per_optimizer_state
            self._per_optimizer_states = defaultdict(refresh)

        def _together(self, flags: list[Tensor]) -> Tensor:
            flag = torch.stack(flags).sum(dim=0, keepdim=True)
            if dist.is_initialized():
                dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            return flag

    scaler, optimizer = GradScaler(hysteresis=2), adamw(job.model)
    for inputs, targets in job.batches:
        optimizer.zero_grad()
        loss = job.loss(inputs, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        job.note(loss, scaler)


def skrl(job: Job) -> None:
    """Toni-SM/skrl, agents/torch/ppo: reduce_parameters() averages by hand what is scaled."""
    net = job.model.module if isinstance(job.model, DistributedDataParallel) else job.model
    scaler, optimizer = scaler_of_torchs(enabled=True), adamw(net)
    for inputs, targets in job.batches:
        loss = (net(inputs) - targets).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if dist.is_initialized():
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        job.note(loss, scaler)


def speechbrain(job: Job) -> None:
    """speechbrain/speechbrain, core.py: two optimizers, each unscaled, clipped and stepped."""
    halves = list(job.model.parameters())
    optimizers = {
        "encoder": torch.optim.AdamW(halves[:2], lr=0.01),
        "decoder": torch.optim.SGD(halves[2:], lr=0.01),
    }
    scaler = scaler_of_torchs()
    for inputs, targets in job.batches:
        loss = job.loss(inputs, targets)
        scaler.scale(loss / 1).backward()
        for optimizer in optimizers.values():
            scaler.unscale_(optimizer)
        for optimizer in optimizers.values():
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 5.0)
        for optimizer in optimizers.values():
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        job.note(loss, scaler)


def fastai(job: Job) -> None:
    """fastai/fastai, callback/fp16.py: a callback that is stepped in the optimizer's place."""

    class Callback:
        def __init__(self, opt: torch.optim.Optimizer) -> None:
            self.opt, self.skipped = opt, False

        @property
        def param_groups(self) -> Any:
            return self.opt.param_groups

        def step(self, *args: Any, **kwargs: Any) -> None:
            self.skipped = False

    optimizer = adamw(job.model)
    scaler, callback = scaler_of_torchs(), Callback(optimizer)
    scaler._growth_interval = min(scaler._growth_interval, 50)
    for inputs, targets in job.batches:
        loss = job.loss(inputs, targets)
        scaler.scale(loss).backward()
        callback.skipped = True
        scaler.step(callback)
        if not callback.skipped:
            optimizer.step()
        scaler.update()
        optimizer.zero_grad()
        job.note(loss, scaler)


PATTERNS: dict[str, Callable[[Job], None]] = {
    each.__name__: each
    for each in (
        nanogpt,
        mae,
        icefall,
        sd_scripts,
        dinov2,
        own_fp16,
        infinity,
        nemo,
        skrl,
        speechbrain,
        fastai,
    )
}
FULLY_SHARDED = {"dinov2"}
SEVERAL = {"speechbrain"}


# -- running them ----------------------------------------------------------------------------------


@contextlib.contextmanager
def scaler_from(ours: bool) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what was imported before, and of wrappers
        with distamp.install() if ours else contextlib.nullcontext():
            yield


def train(name: str, ours: bool, fault: bool = True) -> list[Step]:
    """Run a pattern in one process, where a batch overflows, or on ranks of which one does."""
    inputs, targets = data(4 * STEPS * 2).tensors
    first = rank() if dist.is_initialized() else 0
    mine = list(zip(inputs[first::2].split(4), targets[first::2].split(4), strict=True))
    net = model()
    if dist.is_initialized():
        net = faulty(net, FAULT * (MICRO if name == "nanogpt" else 1)) if fault else net
        wrapped: nn.Module = DistributedDataParallel(net.half() if name in HALF else net)
        if name in FULLY_SHARDED:
            half = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
            cpu = torch.device("cpu")
            wrapped = FullyShardedDataParallel(net, device_id=cpu, mixed_precision=half)
    else:
        wrapped = net
        mine[FAULT][1].fill_(torch.inf if fault else 1.0)
    job = Job(wrapped, mine[:STEPS])
    with scaler_from(ours):
        PATTERNS[name](job)
    return job.steps


HALF = {"sd_scripts", "own_fp16"}


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("name", sorted(set(PATTERNS) - FULLY_SHARDED))
def test_losses_scales_skips_and_weights_are_torchs(name, fault):
    ours, theirs = (train(name, each, fault) for each in (True, False))
    assert len(ours) == STEPS
    assert str(ours) == str(theirs), "NaN is equal to NaN here"
    if fault:
        assert ours[FAULT].weights == ours[FAULT - 1].weights, "the step was skipped"


def on_ranks(names: list[str]) -> dict[str, list[Step]]:
    return {name: train(name, ours=True) for name in names}


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_ranks_of_which_one_overflows_stay_equal(ranks2, name):
    one, other = (steps[name] for steps in ranks2.run(on_ranks, [name]))
    assert [step[1:] for step in one] == [step[1:] for step in other]
    if name not in SEVERAL:  # the other steps
        assert one[FAULT].weights == one[FAULT - 1].weights != one[FAULT + 1].weights


@pytest.mark.parametrize("name", sorted(FULLY_SHARDED))
def test_sharded_runs_without_an_overflow_are_torchs(ranks2, name):
    for steps in zip(
        *(ranks2.run(train, name, each, False) for each in (True, False)), strict=True
    ):
        assert steps[0] == steps[1]
