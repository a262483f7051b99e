"""Accelerate with distamp's scaler, beside the same loop with torch's."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import distamp
from distamp import DistGradScaler
from tests.trainers.common import FAULT, data, digest, model, needs, plant_inf, quiet, rank

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("hugging_face")]
needs("accelerate")

SCALE = 2.0**10
STEPS = 6


@dataclass
class Run:
    """What a loop left on one rank."""

    weights: float = 0.0
    scale: float = 0.0
    growth: int = 0
    skipped: list[bool] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)
    hooked: bool = False


def accelerator_with(
    ours: str | None, parts: int = 1, precision: str = "fp16", fsdp: int | None = None
) -> Any:
    """An Accelerator on the CPU; with torch's scaler where it is not ours."""
    quiet()
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    made = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=parts,
        fsdp_plugin=None if fsdp is None else fsdp_plugin(fsdp),
    )
    if ours in (None, "after") and precision == "fp16":  # as on an accelerator
        kind = ShardedGradScaler if fsdp == 1 else torch.amp.GradScaler
        made.scaler, made.native_amp = kind("cpu", init_scale=SCALE), True
    return made


def fsdp_plugin(version: int) -> Any:
    """What makes Accelerate shard, on a CPU too."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    # Accelerate gives FSDP to ranks that have accelerators, and to no others.
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="size_based_wrap",
        min_num_params=10,
        cpu_ram_efficient_loading=False,
        sync_module_states=False,
    )


def flat(net: nn.Module) -> nn.Module:
    """The model in FSDP1: Accelerate's own wrapping asks for an index that the CPU has not."""
    half, cpu = torch.float16, torch.device("cpu")
    precision = MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half)
    return FullyShardedDataParallel(
        net, device_id=cpu, mixed_precision=precision, use_orig_params=True
    )


def train(
    ours: str | None = "before",
    fault: bool = True,
    clip: float | None = None,
    parts: int = 1,
    comm_hook: str | None = None,
    in_loss: bool = False,
    load: str | None = None,
    save: str | None = None,
    steps: int = STEPS,
    settings: dict[str, Any] | None = None,
    optimizers: int = 1,
    fsdp: int | None = None,
    scaler: dict[str, Any] | None = None,
) -> Run:
    """A loop as Accelerate's documentation writes it."""
    accelerator = accelerator_with(ours, parts, fsdp=fsdp)
    from distamp.integrations.accelerate import prepare

    run = Run()
    scaler = {"init_scale": SCALE} | (scaler or {})
    net = model()
    net[0].register_forward_hook(lambda module, inputs, out: run.dtypes.add(out.dtype))
    pieces = [net] if optimizers == 1 else list(net[::2])
    if fsdp == 1:
        net = flat(net)
    made = [
        torch.optim.AdamW(each.parameters(), **({"lr": 0.01} | (settings or {}))) for each in pieces
    ]
    schedule = torch.optim.lr_scheduler.LambdaLR(made[0], lambda n: 1 / (n + 1))
    loader = DataLoader(data(), batch_size=2)
    if ours == "before":
        prepare(accelerator, comm_hook=comm_hook, **scaler)
    net, loader, schedule, *made = accelerator.prepare(net, loader, schedule, *made)
    if ours == "after":
        prepare(accelerator, net, comm_hook=comm_hook, **scaler)
    if load is not None:
        accelerator.load_state(load)
    backwards = 0
    for number, (inputs, targets) in enumerate(loader):
        if number == steps * parts:
            break
        with accelerator.accumulate(net):
            loss = (net(inputs).float() - targets).square().mean()
            if in_loss and number == FAULT and rank() == 1:
                loss = loss * float("inf")
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                if fault:
                    plant_inf(net.parameters(), backwards)
                backwards += 1
                if clip:
                    accelerator.clip_grad_norm_(net.parameters(), clip)
            for each in made:
                each.step()
            schedule.step()
            for each in made:
                each.zero_grad()
        if accelerator.sync_gradients:
            run.skipped.append(accelerator.optimizer_step_was_skipped)
            run.rates.append(made[0].param_groups[0]["lr"])
    if save is not None:
        accelerator.save_state(save)
    run.weights = digest_of(net)
    run.scale = accelerator.scaler.get_scale()
    run.growth = accelerator.scaler._get_growth_tracker()
    if isinstance(net, DistributedDataParallel):
        run.hooked = net._get_ddp_logging_data().get("comm_hook") is not None
    return run


def digest_of(net: nn.Module) -> float:
    """One number for the whole weights, wherever ranks keep them."""
    if isinstance(net, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(net):
            return digest(net.parameters())
    return digest(p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters())


def together(runs: list[Run]) -> bool:
    return (runs[0].weights, runs[0].scale) == (runs[1].weights, runs[1].scale)


# -- ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fused", [False, True])
def test_all_ranks_skip_report_it_and_hold_the_schedule(ranks2, when, fused):
    assert not together(ranks2.run(train, None))
    runs = ranks2.run(train, when, settings={"fused": fused})
    assert together(runs)
    for run in runs:
        assert run.scale == SCALE / 2
        assert run.skipped == [step == FAULT for step in range(STEPS)]
        # Accelerate moves a schedule once for each process.
        assert run.rates == pytest.approx([0.01 / (2 * n + 1) for n in (1, 2, 2, 3, 4, 5)])
        assert run.dtypes == {torch.float16}


@pytest.mark.parametrize(
    ("fsdp", "options"),
    [(None, {"parts": 2, "clip": 0.1})]
    + [(fsdp, options) for fsdp in (None, 1, 2) for options in ({}, {"clip": 0.1})],
)
def test_without_an_overflow_the_run_is_accelerates_to_the_bit(ranks2, fsdp, options):
    ours, theirs = (
        ranks2.run(train, each, fault=False, fsdp=fsdp, **options) for each in ("before", None)
    )
    assert [(run.weights, run.rates) for run in ours] == [
        (run.weights, run.rates) for run in theirs
    ]


@pytest.mark.parametrize("fsdp", [1, 2])
def test_sharded_ranks_skip_with_a_fused_optimizer(ranks2, fsdp):
    runs = ranks2.run(train, fsdp=fsdp, settings={"fused": True})
    assert together(runs)
    for run in runs:
        assert run.skipped == [step == FAULT for step in range(STEPS)]
        assert run.scale == SCALE / 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_compresses_and_brings_the_news(ranks2, when):
    runs = ranks2.run(train, when, comm_hook="fp16", in_loss=True, fault=False)
    assert together(runs)
    assert all(run.hooked for run in runs)
    assert runs[0].skipped == [step == FAULT for step in range(STEPS)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_hook_keeps_follows_the_loss_scale(ranks2, when):
    options = {"comm_hook": "int8", "fault": False}
    constant, growing = (
        ranks2.run(train, when, **options, scaler={"init_scale": 1.0, "growth_interval": every})
        for every in (99, 1)
    )
    assert growing[0].scale == 2.0**STEPS
    assert growing[0].weights == constant[0].weights


# -- Accelerate's own FSDP -------------------------------------------------------------------------


@pytest.mark.parametrize("first", [None, "before"])
def test_a_sharded_checkpoint_goes_on_with_the_count_it_was_saved_with(ranks2, tmp_path, first):
    """torch makes the optimizer's state by a step before it loads: no step to the scaler."""
    ranks2.run(train, first, fsdp=2, save=str(tmp_path))
    for run in ranks2.run(train, "after", fsdp=2, fault=False, load=str(tmp_path)):
        assert run.growth == (STEPS - FAULT - 1) + STEPS


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "then"), [("before", None), (None, "before"), ("after", "after")]
)
def test_a_checkpoint_of_either_goes_on_in_the_other(tmp_path: Path, first: Any, then: Any):
    train(first, fault=False, save=str(tmp_path))
    state = torch.load(tmp_path / "scaler.pt")
    assert state["_growth_tracker"] == STEPS
    one = train(then, fault=False, load=str(tmp_path))
    other = train("before", fault=False, load=str(tmp_path))
    assert one.weights == other.weights


# -- what is refused, and kept ---------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_unwrapped_model_computes_in_float32_again(when):
    from distamp.integrations.accelerate import prepare

    accelerator = accelerator_with(when)
    if when == "before":
        prepare(accelerator)
    net = accelerator.prepare(nn.Linear(2, 1))
    if when == "after":
        prepare(accelerator)
    net(torch.ones(1, 2))
    plain = accelerator.unwrap_model(net, keep_fp32_wrapper=False)
    assert torch.equal(plain(torch.ones(1, 2)), nn.Linear.forward(plain, torch.ones(1, 2)))


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def test_settings_of_the_handler_and_scalers_that_are_there_are_kept():
    accelerator = accelerator_with(None)
    from accelerate.utils import GradScalerKwargs
    from accelerate.utils.fsdp_utils import get_fsdp2_grad_scaler

    from distamp.integrations.accelerate import prepare

    accelerator.scaler_handler = GradScalerKwargs(growth_interval=7)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    scaler = prepare(accelerator)
    assert (scaler.get_growth_interval(), scaler.get_scale()) == (7, 32.0)
    assert accelerator.scaler is scaler
    with distamp.install():
        assert isinstance(get_fsdp2_grad_scaler(device="cpu"), DistGradScaler)
        accelerator.scaler = torch.amp.GradScaler("cpu")
    assert prepare(accelerator) is accelerator.scaler


def test_the_last_prepare_counts_and_its_optimizers_can_be_pickled():
    from distamp.integrations.accelerate import prepare

    accelerator = accelerator_with("ours")
    first = prepare(accelerator, init_scale=4.0)
    assert prepare(accelerator) is first
    second = prepare(accelerator, init_scale=2.0)
    optimizer = accelerator.prepare(sgd())
    assert optimizer.scaler is accelerator.scaler is second
    other = pickle.loads(pickle.dumps(optimizer))
    assert (type(other), other.scaler.get_scale()) == (type(optimizer), 2.0)
    assert other.step_was_skipped is accelerator.optimizer_step_was_skipped is False


def test_what_cannot_be_is_refused():
    from distamp.integrations.accelerate import prepare

    with pytest.raises(ValueError, match="'bf16'"):
        prepare(accelerator_with(None, precision="bf16"))
    with pytest.raises(ValueError, match="init_scale"):
        prepare(accelerator_with(None, precision="no"), init_scale=2.0)
    assert prepare(accelerator_with(None, precision="bf16"), comm_hook="fp16") is None
    with pytest.raises(TypeError, match=r"distamp\.DistGradScaler"):
        prepare(accelerator_with(None), scaler=torch.amp.GradScaler("cpu"))
    accelerator = accelerator_with("ours")
    accelerator.prepare(nn.Linear(2, 1))
    with pytest.raises(ValueError, match=r"before accelerator\.prepare"):
        prepare(accelerator)
