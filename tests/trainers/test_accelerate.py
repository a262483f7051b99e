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
    adamw,
    data,
    digest,
    fresh_accelerate,
    in_ranks,
    model,
    needs,
    plant_inf,
    quiet,
    together,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("hugging_face")]
needs("accelerate")

SCALE = 2.0**10
STEPS = 6


def accelerator_with(
    ours: str | None,
    precision: str = "fp16",
    parts: int = 1,
    fsdp: int | None = None,
    smallest: int = 10,
) -> Any:
    """An Accelerator on the CPU; with torch's scaler where it is not ours."""
    quiet()
    from accelerate import Accelerator

    fresh_accelerate()
    made = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=parts,
        fsdp_plugin=None if fsdp is None else fsdp_plugin(fsdp, smallest),
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
    net: nn.Module | None = None,
    precision: str = "fp16",
    clip: float | None = None,
    parts: int = 1,
    comm_hook: str | None = None,
    load: str | None = None,
    save: str | None = None,
    fused: bool = False,
    fsdp: int | None = None,
    smallest: int = 10,
    value: float = float("inf"),
    **settings: Any,
) -> Any:
    """A loop as Accelerate's documentation writes it."""
    accelerator = accelerator_with(ours, precision, parts, fsdp, smallest)
    from distamp.integrations.accelerate import prepare

    settings = ({"init_scale": SCALE} if precision == "fp16" else {}) | settings
    run = SimpleNamespace(rates=[], skipped=[], norms=[], steps=[], sent=0, hooked=False)
    net = net or model()
    net = flat(net) if fsdp == 1 else net
    optimizer: Any = adamw(net, fused=fused)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    if ours == "before":
        prepare(accelerator, comm_hook=comm_hook, **settings)
    net, loader, schedule, optimizer = accelerator.prepare(
        net, DataLoader(data(), batch_size=2), schedule, optimizer
    )
    if ours == "after":
        prepare(accelerator, net, comm_hook=comm_hook, **settings)
    if load is not None:
        accelerator.load_state(load)
    for _, (inputs, targets) in zip(range(STEPS * parts), loader, strict=False):
        with accelerator.accumulate(net):
            accelerator.backward((net(inputs).float() - targets).square().mean())
            with count_collectives() as sent:
                if accelerator.sync_gradients:
                    plant_inf(net.parameters(), len(run.rates), fault, value)
                    if clip:
                        run.norms.append(float(accelerator.clip_grad_norm_(net.parameters(), clip)))
                optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            run.sent = sent.count
            run.steps.append(digest(net))
            run.rates.append(optimizer.param_groups[0]["lr"])
            run.skipped.append(accelerator.optimizer_step_was_skipped)
    if save is not None:
        accelerator.save_state(save)
    state = accelerator.scaler.state_dict() if accelerator.scaler else {}
    run.scale, run.growth = state.get("scale"), state.get("_growth_tracker")
    run.weights = digest(net)
    if isinstance(net, DistributedDataParallel):
        run.hooked = net._get_ddp_logging_data().get("comm_hook") is not None
    return run


# -- ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fsdp", "options"),
    [(None, {"parts": 2, "clip": 0.1}), (None, {"clip": 0.1, "fused": True})]
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
def test_what_a_hook_keeps_follows_the_loss_scale(ranks2, when):
    options = {"comm_hook": "int8", "fault": None, "init_scale": 1.0}
    constant, growing = (
        ranks2.run(train, when, **options, growth_interval=every) for every in (99, 1)
    )
    assert growing[0].hooked
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


@pytest.mark.parametrize("fsdp", [None, 2])
@pytest.mark.parametrize("first", ["before", None])
def test_a_checkpoint_at_bf16_goes_on_in_the_other_with_a_guards_state_or_without(
    ranks2, tmp_path, first, fsdp
):
    options = {"precision": "bf16", "fsdp": fsdp, "clip": 1e6}
    ranks2.run(train, first, None, **options, save=str(tmp_path))
    assert (tmp_path / "scaler.pt").exists() == bool(first)
    one, other = (
        ranks2.run(train, ours, None, **options, load=str(tmp_path)) for ours in ("before", None)
    )
    assert [run.weights for run in one] == [run.weights for run in other]
    assert all(run.sent <= 2 for run in one), "after the clip the step asks nobody"


@pytest.mark.parametrize(
    ("first", "then"), [("before", None), (None, "before"), ("after", "after")]
)
def test_a_checkpoint_of_either_goes_on_in_the_other(ranks2, tmp_path: Path, first: Any, then: Any):
    ranks2.run(train, first, None, save=str(tmp_path))
    assert torch.load(tmp_path / "scaler.pt")["_growth_tracker"] == STEPS
    one, other = (ranks2.run(train, each, None, load=str(tmp_path)) for each in (then, "before"))
    assert [run.weights for run in one] == [run.weights for run in other]


# -- what is kept, and refused ---------------------------------------------------------------------


@in_ranks
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


@in_ranks
def test_what_cannot_be_is_refused():
    from distamp.integrations.accelerate import prepare

    with pytest.raises(ValueError, match=r"'bf16'.*init_scale"):
        prepare(accelerator_with(None, "bf16"), init_scale=2.0)
    accelerator = accelerator_with(None, "no")
    accelerator.state._mixed_precision = "fp8"  # Accelerate has none of its backends here
    with pytest.raises(ValueError, match="fp8"):
        prepare(accelerator)
    with pytest.raises(TypeError, match=r"distamp\.DistGradScaler"):
        prepare(accelerator_with(None), scaler=torch.amp.GradScaler("cpu"))
    accelerator = accelerator_with("ours")
    accelerator.prepare(nn.Linear(2, 1))
    with pytest.raises(ValueError, match=r"before accelerator\.prepare"):
        prepare(accelerator)
