"""Lightning's Fabric with distamp's plugins, beside the same loop with its own."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.trainers.common import (
    FAULT,
    adamw,
    batches,
    digest,
    in_ranks,
    model,
    needs,
    plant_inf,
    quiet,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("lightning")]
needs("lightning")

SCALE, STEPS = 2.0**10, 6


def train(
    net: nn.Module | None = None,
    plugin: Any = None,
    strategy: Any = None,
    devices: int = 2,
    sharded: bool = False,
    fault: int | None = FAULT,
    value: float = float("inf"),
    clip: dict[str, Any] | None = None,
    clips: int = 1,
    fused: bool = False,
    **step: Any,
) -> Any:
    """What a loop as Fabric's documentation writes it leaves, and what it saw in each step."""
    quiet()
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import FSDPStrategy

    from distamp.integrations.fabric import FSDPPrecision, MixedPrecision

    class Fsdp(FSDPStrategy):
        """Fabric refuses the class itself without a GPU, and no subclass."""

    strategy = strategy or ("ddp" if devices > 1 else "auto")
    plugin = plugin or MixedPrecision("16-mixed", "cpu", init_scale=SCALE)
    if sharded:
        strategy, plugin = Fsdp(), FSDPPrecision("16-mixed", init_scale=SCALE)
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy, plugins=plugin)
    fabric.launch()
    run = SimpleNamespace(losses=[], weights=[], norms=[], skipped=[], dtypes=set())
    net = net or model()
    first = next(each for each in net.modules() if isinstance(each, nn.Linear))
    first.register_forward_hook(lambda module, inputs, out: run.dtypes.add(out.dtype))
    if sharded:  # Fabric does not tell it to be on the CPU.
        net = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    wrapped = fabric.setup_module(net)
    optimizer = adamw(wrapped, fused=fused)
    stepper = fabric.setup_optimizers(optimizer)
    for number, (inputs, targets) in zip(range(STEPS), batches(), strict=False):
        stepper.zero_grad()
        loss = (wrapped(inputs).float() - targets).square().mean()
        fabric.backward(loss)
        plant_inf(net.parameters(), number, fault, value)
        for _ in range(clips if clip else 0):
            run.norms.append(fabric.clip_gradients(wrapped, stepper, **clip))
        stepper.step(**step)
        run.losses.append(loss.item())
        run.weights.append(digest(wrapped))
        stepped = getattr(plugin.scaler, "stepped", lambda optimizer: None)
        run.skipped.append(stepped(optimizer) is False)
    run.scale = plugin.scaler.get_scale()
    return run


BY_NORM = {"max_norm": 0.1, "error_if_nonfinite": False}


@pytest.mark.parametrize(
    ("clip", "sharded", "fused"),
    [
        (BY_NORM, False, True),
        ({"clip_val": 0.01}, False, True),
        (BY_NORM, True, False),
        (None, True, True),
    ],
)
def test_shards_and_fused_optimizers_train_as_the_whole_model(ranks2, clip, sharded, fused):
    one, other = ranks2.run(train, clip=clip, sharded=sharded, fused=fused)
    whole, _ = ranks2.run(train, clip=clip)
    assert one.weights == other.weights
    assert (one.scale, one.dtypes) == (whole.scale, whole.dtypes)
    assert one.weights[-1] == pytest.approx(whole.weights[-1], rel=1e-3 if sharded else 1e-5)


@in_ranks
def test_a_second_clip_before_the_step_finds_them_clipped():
    once, twice = (train(devices=1, clip={"clip_val": 0.01}, clips=n) for n in (1, 2))
    assert once.weights == twice.weights


@in_ranks
def test_without_an_overflow_the_run_is_fabrics_to_the_bit():
    from lightning.fabric.plugins import MixedPrecision as Theirs

    theirs = Theirs("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))
    ours, other = (
        train(plugin=each, devices=1, fault=None, clip=BY_NORM) for each in (None, theirs)
    )
    assert (ours.losses, ours.weights) == (other.losses, other.weights)


@in_ranks
def test_the_region_is_for_the_device_that_is_there_whatever_torch_was_built_for():
    from distamp.integrations.fabric import FSDPPrecision

    def built_for_cuda(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    with mock.patch.object(torch.accelerator, "current_accelerator", built_for_cuda):
        assert FSDPPrecision("16-mixed").forward_context().device == "cpu"


@in_ranks
def test_a_closure_is_refused():
    with pytest.raises(RuntimeError, match="closure"):
        train(devices=1, closure=lambda: None)
