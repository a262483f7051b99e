"""How public training code uses torch's scaler, after ``distamp.install()``, beside torch's own.

Each pattern is a few lines of our own in the manner of the code it names, for what no test of
`tests/scaler` asks in those words. Each was compared with that code on 2026-11-23; where a package
is installed, its own class is run. In one process the losses, scales and weights of every step are
torch's to the bit, through an overflow; on two ranks of which one overflows, both stay equal.
"""

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import distamp
from tests.ranks import RankError
from tests.trainers.common import FAULT, data, digest, faulty, model, rank

STEPS = 7
SCALE = 2.0**8


class Step(NamedTuple):
    """What one step left."""

    loss: float
    scale: float
    weights: float


class Job:
    """What a pattern is given, and what it left after each step."""

    def __init__(self, net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.model, self.batches = net, batches
        self.optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.01)
        self.steps: list[Step] = []

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = self.model(inputs)
        return (outputs.float() - targets).square().mean()

    def note(self, loss: Tensor, scaler: Any) -> None:
        self.steps.append(Step(loss.item(), scaler.get_scale(), digest(self.model)))


def scaler_of_torchs(**settings: Any) -> Any:
    """Torch's name, looked up when a trainer makes its scaler."""
    return torch.amp.GradScaler("cpu", **{"init_scale": SCALE, **settings})


def icefall(job: Job) -> None:
    """k2-fsa/icefall, zipformer/train.py: doubles a small scale itself, by update(number).

    Every 100th batch below 8, every 400th below 32; here every 2nd and every 4th.
    """
    scaler = scaler_of_torchs(init_scale=1.0)
    for number, batch in enumerate(job.batches):
        loss = job.loss(*batch)
        scaler.scale(loss).backward()
        scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad()
        now = scaler._scale.item()
        if number % 2 == 0 and (now < 8.0 or (now < 32.0 and number % 4 == 0)):
            scaler.update(now * 2.0)
        job.note(loss, scaler)


def sd_scripts(job: Job) -> None:
    """kohya-ss/sd-scripts, train_util.py: full_fp16, by a patch of ``_unscale_grads_``."""
    scaler = scaler_of_torchs()
    optimizer = torch.optim.SGD(job.model.half().parameters(), lr=0.01)
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


def infinity(job: Job) -> None:
    """FoundationVision/Infinity, utils/amp_opt.py: adds the flags of all ranks up; caps the scale.

    It clips first. The sum of two flags is 2.0.
    """
    scaler = scaler_of_torchs(growth_interval=2)
    optimizer = torch.optim.AdamW(job.model.parameters(), lr=0.01, fused=True)
    for batch in job.batches:
        loss = job.loss(*batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(job.model.parameters(), 2.0)
        states = scaler._per_optimizer_states.values() if dist.is_initialized() else ()
        for state in states:
            for flag in state["found_inf_per_device"].values():
                dist.all_reduce(flag)
        scaler.step(optimizer)
        scaler.update(new_scale=SCALE if scaler.get_scale() > SCALE else None)
        optimizer.zero_grad(set_to_none=True)
        job.note(loss, scaler)


def fastai(job: Job) -> None:
    """fastai/fastai, callback/fp16.py: a callback that is stepped in the optimizer's place."""

    class Callback:
        param_groups = job.optimizer.param_groups

        def step(self) -> None:
            self.skipped = False

    scaler, callback = scaler_of_torchs(), Callback()
    for batch in job.batches:
        loss = job.loss(*batch)
        scaler.scale(loss).backward()
        callback.skipped = True
        scaler.step(callback)
        if not callback.skipped:
            job.optimizer.step()
        scaler.update()
        job.optimizer.zero_grad()
        job.note(loss, scaler)


PATTERNS: list[Callable[[Job], None]] = [icefall, sd_scripts, infinity, fastai]


def train(number: int, ours: bool, fault: bool = True) -> list[Step]:
    """Run a pattern in one process, where a batch overflows, or on ranks of which one does."""
    pattern, net = PATTERNS[number], model()
    inputs, targets = data(4 * STEPS * 2).tensors
    mine = list(zip(inputs[rank() :: 2].split(4), targets[rank() :: 2].split(4), strict=True))
    if dist.is_initialized():
        faulty(net, FAULT)
        net = DistributedDataParallel(net.half() if pattern is sd_scripts else net)
    elif fault:
        mine[FAULT][1].fill_(torch.inf)
    job = Job(net, mine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what took the class before, and of wrappers
        with distamp.install() if ours else contextlib.nullcontext():
            pattern(job)
    return job.steps


def fairseq2_resumes(ours: bool) -> tuple[float, float]:
    """facebookresearch/fairseq2#1346: after a resume it unscales where nothing was scaled yet.

    Here rank 1 has no batch in the first step. The scale, and the norm of the gradients.
    """
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kind = distamp.DistGradScaler if ours else torch.amp.GradScaler
    saved = torch.amp.GradScaler("cpu", init_scale=SCALE).state_dict()
    scaler = kind("cpu", init_scale=4.0)
    scaler.load_state_dict(saved)
    if rank() == 0:
        inputs, targets = (each[:4] for each in data().tensors)
        scaler.scale((net(inputs) - targets).square().mean()).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1e6)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), norm.item()


def test_a_resumed_run_unscales_before_this_rank_has_scaled_a_loss(ranks2):
    (scale, norm), (other, none) = ranks2.run(fairseq2_resumes, ours=True)
    assert scale == other == SCALE
    assert none == 0.0
    net = model()
    inputs, targets = (each[:4] for each in data().tensors)
    (net(inputs) - targets).square().mean().backward()
    assert norm == pytest.approx(nn.utils.get_total_norm([p.grad for p in net.parameters()]).item())
    with pytest.raises(RankError, match="_scale is None"):
        ranks2.run(fairseq2_resumes, ours=False)


def nano_gpt(guard: bool) -> list[float]:
    """karpathy/nanoGPT, train.py: at bf16 its scaler is disabled, and there all the same."""
    net = faulty(model(), value=float("nan"))
    wrapped = DistributedDataParallel(net)
    inputs, targets = (each[4 * rank() :].split(4)[::2] for each in data().tensors)
    weights = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with distamp.install(guard=guard, max_consecutive_skips=3):
            scaler = torch.amp.GradScaler("cpu", enabled=False)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
            for batch in zip(inputs, targets, strict=True):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    outputs = wrapped(batch[0])
                scaler.scale((outputs.float() - batch[1]).square().mean()).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                weights.append(digest(net))
    return weights


def test_a_scaler_that_is_disabled_at_bf16_guards_where_that_was_asked_for(ranks2):
    one, other = ranks2.run(nano_gpt, guard=True)
    assert one == other
    assert one[FAULT] == one[FAULT - 1] != one[-1]
    _, spoilt = ranks2.run(nano_gpt, guard=False)
    assert math.isnan(spoilt[-1]), "as with torch's, which is disabled"


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("number", range(len(PATTERNS)), ids=lambda n: PATTERNS[n].__name__)
def test_losses_scales_skips_and_weights_are_torchs(number, fault):
    ours, theirs = (train(number, each, fault) for each in (True, False))
    assert len(ours) == STEPS
    assert str(ours) == str(theirs), "NaN is equal to NaN here"
    if fault:
        assert ours[FAULT].weights == ours[FAULT - 1].weights, "the step was skipped"


@pytest.mark.parametrize("number", range(len(PATTERNS)), ids=lambda n: PATTERNS[n].__name__)
def test_ranks_of_which_one_overflows_stay_equal(ranks2, number):
    one, other = ranks2.run(train, number, ours=True)
    assert [step[1:] for step in one] == [step[1:] for step in other]
    assert one[FAULT].weights == one[FAULT - 1].weights != one[FAULT + 1].weights
