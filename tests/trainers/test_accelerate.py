"""Accelerate with distamp's scaler, beside the same loop with torch's."""

import pickle
from pathlib import Path
from types import SimpleNamespace
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
from tests.collectives import count_collectives
from tests.trainers.common import (
    FAULT,
    data,
    digest,
    fresh_accelerate,
    model,
    needs,
    plant_inf,
    quiet,
    rank,
    together,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("hugging_face")]
needs("accelerate")

SCALE = 2.0**10
STEPS = 6


def accelerator_with(
    ours: str | None, parts: int = 1, precision: str = "fp16", fsdp: int | None = None
) -> Any:
    """An Accelerator on the CPU; with torch's scaler where it is not ours."""
    quiet()
    from accelerate import Accelerator

    fresh_accelerate()
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


def fsdp_plugin(version: int, smallest: int = 10) -> Any:
    """What makes Accelerate shard, on a CPU too; by itself what has so many parameters."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    # Accelerate gives FSDP to ranks that have accelerators, and to no others.
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="size_based_wrap",
        min_num_params=smallest,
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
    fault: int | None = FAULT,
    inf_at: int | None = None,
    clip: float | None = None,
    parts: int = 1,
    comm_hook: str | None = None,
    load: str | None = None,
    save: str | None = None,
    fused: bool = False,
    fsdp: int | None = None,
    **scaler: Any,
) -> Any:
    """A loop as Accelerate's documentation writes it."""
    accelerator = accelerator_with(ours, parts, fsdp=fsdp)
    from distamp.integrations.accelerate import prepare

    scaler = {"init_scale": SCALE} | scaler
    run = SimpleNamespace(skipped=[], rates=[], dtypes=set(), hooked=False)
    net: nn.Module = model()
    net[0].register_forward_hook(lambda module, inputs, out: run.dtypes.add(out.dtype))
    if fsdp == 1:
        net = flat(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    if ours == "before":
        prepare(accelerator, comm_hook=comm_hook, **scaler)
    net, loader, schedule, optimizer = accelerator.prepare(
        net, DataLoader(data(), batch_size=2), schedule, optimizer
    )
    if ours == "after":
        prepare(accelerator, net, comm_hook=comm_hook, **scaler)
    if load is not None:
        accelerator.load_state(load)
    for number, (inputs, targets) in zip(range(STEPS * parts), loader, strict=False):
        with accelerator.accumulate(net):
            loss = (net(inputs).float() - targets).square().mean()
            poisoned = number == inf_at and rank() == 1
            accelerator.backward(loss * float("inf") if poisoned else loss)
            if accelerator.sync_gradients:
                plant_inf(net.parameters(), len(run.skipped), fault)
                if clip:
                    accelerator.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            run.skipped.append(accelerator.optimizer_step_was_skipped)
            run.rates.append(optimizer.param_groups[0]["lr"])
    if save is not None:
        accelerator.save_state(save)
    run.weights, run.scale = digest(net), accelerator.scaler.get_scale()
    run.growth = accelerator.scaler._get_growth_tracker()
    if isinstance(net, DistributedDataParallel):
        run.hooked = net._get_ddp_logging_data().get("comm_hook") is not None
    return run


ONCE = [step == FAULT for step in range(STEPS)]

# -- ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "fsdp", "fused"),
    [
        ("before", None, False),
        ("before", None, True),
        ("after", None, False),
        ("after", None, True),
        ("before", 1, True),
        ("before", 2, True),
    ],
)
def test_all_ranks_skip_report_it_and_hold_the_schedule(ranks2, when, fsdp, fused):
    runs = ranks2.run(train, when, fsdp=fsdp, fused=fused)
    assert together(runs)
    for run in runs:
        assert (run.scale, run.skipped) == (SCALE / 2, ONCE)
        # Accelerate moves a schedule once for each process.
        assert run.rates == pytest.approx([0.01 / (2 * n + 1) for n in (1, 2, 2, 3, 4, 5)])
        assert run.dtypes == {torch.float16}


@pytest.mark.parametrize(
    ("fsdp", "options"),
    [(None, {"parts": 2, "clip": 0.1})]
    + [(fsdp, options) for fsdp in (None, 1, 2) for options in ({}, {"clip": 0.1})],
)
def test_the_run_is_accelerates_to_the_bit_until_one_rank_overflows(ranks2, fsdp, options):
    ours, theirs = (
        ranks2.run(train, each, None, fsdp=fsdp, **options) for each in ("before", None)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.rates == other.rates
        # A norm over ranks is summed in another order than torch's.
        rel = 1e-6 if "clip" in options else 0
        assert mine.weights == pytest.approx(other.weights, rel=rel, abs=0)
    if not (fsdp or options):
        assert not together(ranks2.run(train, None))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_compresses_and_brings_the_news(ranks2, when):
    runs = ranks2.run(train, when, None, comm_hook="fp16", inf_at=FAULT)
    assert together(runs)
    assert all(run.hooked for run in runs)
    assert runs[0].skipped == ONCE


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_hook_keeps_follows_the_loss_scale(ranks2, when):
    options = {"comm_hook": "int8", "fault": None, "init_scale": 1.0}
    constant, growing = (
        ranks2.run(train, when, **options, growth_interval=every) for every in (99, 1)
    )
    assert growing[0].scale == 2.0**STEPS
    # At a scale of 1 small gradients of float16 are rounded otherwise than at 64.
    assert growing[0].weights == pytest.approx(constant[0].weights, rel=1e-9)


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [None, "before"])
def test_a_sharded_checkpoint_goes_on_with_the_count_it_was_saved_with(ranks2, tmp_path, first):
    """torch makes the optimizer's state by a step before it loads: no step to the scaler."""
    ranks2.run(train, first, fsdp=2, save=str(tmp_path))
    for run in ranks2.run(train, "after", None, fsdp=2, load=str(tmp_path)):
        assert run.growth == (STEPS - FAULT - 1) + STEPS


def at_bf16(folder: str, ours: bool, fsdp: int | None, load: bool) -> tuple[float, int]:
    """Weights after three steps, from a checkpoint or the start; collectives of clip and step."""
    accelerator = accelerator_with(None, precision="bf16", fsdp=fsdp)
    from distamp.integrations.accelerate import prepare

    if ours:
        prepare(accelerator)
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    if load:
        accelerator.load_state(folder)
    inputs, targets = (each[:2] for each in data().tensors)
    for _ in range(3):
        accelerator.backward((net(inputs).float() - targets).square().mean())
        with count_collectives() as sent:
            accelerator.clip_grad_norm_(net.parameters(), 1e6)
            optimizer.step()
        optimizer.zero_grad()
    if not load:
        accelerator.save_state(folder)
    return digest(net), sent.count


@pytest.mark.parametrize("fsdp", [None, 2])
@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_at_bf16_goes_on_in_the_other_with_a_guards_state_or_without(
    ranks2, tmp_path, first, fsdp
):
    ranks2.run(at_bf16, str(tmp_path), first, fsdp, load=False)
    assert (tmp_path / "scaler.pt").exists() == first
    one, other = (
        ranks2.run(at_bf16, str(tmp_path), ours, fsdp, load=True) for ours in (True, False)
    )
    assert [weights for weights, _ in one] == [weights for weights, _ in other]
    assert all(sent <= 2 for _, sent in one), "after the clip the step asks nobody"


@pytest.mark.parametrize(
    ("first", "then"), [("before", None), (None, "before"), ("after", "after")]
)
def test_a_checkpoint_of_either_goes_on_in_the_other(tmp_path: Path, first: Any, then: Any):
    train(first, save=str(tmp_path))
    assert torch.load(tmp_path / "scaler.pt")["_growth_tracker"] == STEPS
    one, other = (train(each, load=str(tmp_path)) for each in (then, "before"))
    assert one.weights == other.weights


# -- what is kept, and refused ---------------------------------------------------------------------


def test_scalers_that_are_there_are_kept_and_optimizers_can_be_pickled():
    from accelerate.utils import GradScalerKwargs
    from accelerate.utils.fsdp_utils import get_fsdp2_grad_scaler

    from distamp.integrations.accelerate import prepare

    accelerator = accelerator_with(None)
    accelerator.scaler_handler = GradScalerKwargs(growth_interval=7)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    scaler = prepare(accelerator)
    assert (scaler.get_growth_interval(), scaler.get_scale()) == (7, 32.0)
    assert prepare(accelerator) is accelerator.scaler is scaler
    second = prepare(accelerator, init_scale=2.0)
    optimizer = accelerator.prepare(torch.optim.SGD(model().parameters(), lr=0.1))
    assert optimizer.scaler is accelerator.scaler is second
    assert pickle.loads(pickle.dumps(optimizer)).scaler.get_scale() == 2.0
    with distamp.install():
        assert isinstance(get_fsdp2_grad_scaler(device="cpu"), DistGradScaler)


def test_what_cannot_be_is_refused():
    from distamp.integrations.accelerate import prepare

    with pytest.raises(ValueError, match=r"'bf16'.*init_scale"):
        prepare(accelerator_with(None, precision="bf16"), init_scale=2.0)
    accelerator = accelerator_with(None, precision="no")
    accelerator.state._mixed_precision = "fp8"  # Accelerate has none of its backends here
    with pytest.raises(ValueError, match="fp8"):
        prepare(accelerator)
    with pytest.raises(TypeError, match=r"distamp\.DistGradScaler"):
        prepare(accelerator_with(None), scaler=torch.amp.GradScaler("cpu"))
    accelerator = accelerator_with("ours")
    accelerator.prepare(nn.Linear(2, 1))
    with pytest.raises(ValueError, match=r"before accelerator\.prepare"):
        prepare(accelerator)
