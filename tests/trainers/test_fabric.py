"""Lightning's Fabric with distamp's plugins, beside the same loop with its own."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from distamp import DistGradScaler, StepGuard
from tests.trainers.common import FAULT, data, digest, in_ranks, model, needs, plant_inf, quiet

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("lightning")]
needs("lightning")

SCALE = 2.0**10
Ended = tuple[tuple[float, float, set[torch.dtype]], list[float]]


def train(
    ours: bool = True,
    devices: int = 2,
    sharded: bool = False,
    fault: int | None = FAULT,
    clip: dict[str, Any] | None = None,
    clips: int = 1,
    fused: bool = False,
    **step: Any,
) -> Ended:
    """Weights, loss scale and dtypes of the first layer after five steps; their losses."""
    quiet()
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision as Theirs
    from lightning.fabric.strategies import FSDPStrategy

    from distamp.integrations.fabric import FSDPPrecision, MixedPrecision

    class Fsdp(FSDPStrategy):
        """Fabric refuses the class itself without a GPU, and no subclass."""

    strategy: Any = "ddp" if devices > 1 else "auto"
    plugin: Any = Theirs("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))
    if sharded:
        strategy, plugin = Fsdp(), FSDPPrecision("16-mixed", init_scale=SCALE)
    elif ours:
        plugin = MixedPrecision("16-mixed", "cpu", init_scale=SCALE)
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy, plugins=plugin)
    fabric.launch()
    net, dtypes, losses = model(), set(), []
    net[0].register_forward_hook(lambda module, inputs, out: dtypes.add(out.dtype))
    if sharded:  # Fabric does not tell it to be on the CPU.
        net = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    wrapped = fabric.setup_module(net)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01, fused=fused)
    stepper = fabric.setup_optimizers(optimizer)
    inputs, targets = (each[2 * fabric.global_rank :].split(2)[::2] for each in data().tensors)
    for number in range(5):
        stepper.zero_grad()
        loss = (wrapped(inputs[number]).float() - targets[number]).square().mean()
        fabric.backward(loss)
        losses.append(loss.item())
        plant_inf(net.parameters(), number, fault)
        for _ in range(clips if clip else 0):
            fabric.clip_gradients(wrapped, stepper, **clip)
        stepper.step(**step)
    return (digest(net), plugin.scaler.get_scale(), dtypes), losses


BY_NORM = {"max_norm": 0.1, "error_if_nonfinite": False}


@pytest.mark.parametrize(
    ("clip", "sharded", "fused"),
    [
        (BY_NORM, False, True),
        ({"clip_val": 0.01}, False, True),
        (None, True, False),
        (BY_NORM, True, False),
        (None, True, True),
    ],
)
def test_shards_and_fused_optimizers_train_as_the_whole_model(ranks2, clip, sharded, fused):
    (one, _), (other, _) = ranks2.run(train, clip=clip, sharded=sharded, fused=fused)
    (whole, _), _ = ranks2.run(train, clip=clip)
    assert one == other
    assert one[1:] == whole[1:]
    assert one[0] == pytest.approx(whole[0], rel=1e-3 if sharded else 1e-5)


@in_ranks
def test_a_second_clip_before_the_step_finds_them_clipped():
    once, twice = (train(devices=1, clip={"clip_val": 0.01}, clips=n) for n in (1, 2))
    assert once == twice


@in_ranks
def test_without_an_overflow_the_run_is_fabrics_to_the_bit():
    ours, theirs = (train(each, devices=1, fault=None, clip=BY_NORM) for each in (True, False))
    assert ours == theirs


def test_the_region_is_for_the_device_that_is_there_whatever_torch_was_built_for(monkeypatch):
    from distamp.integrations.fabric import FSDPPrecision

    def built_for_cuda(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for_cuda)
    assert FSDPPrecision("16-mixed").forward_context().device == "cpu"


@in_ranks
def test_what_plugins_take_and_refuse():
    from distamp.integrations.fabric import (
        FSDPPrecision,
        HalfPrecision,
        MixedPrecision,
        Precision,
    )

    scaler = DistGradScaler("cpu")
    assert FSDPPrecision("16-mixed", scaler).scaler is scaler
    assert isinstance(FSDPPrecision("16-mixed").scaler, DistGradScaler)
    with pytest.raises(ValueError, match="does not scale losses"):
        FSDPPrecision("bf16-mixed", scaler)
    for plugin in (Precision(), HalfPrecision("bf16-true"), MixedPrecision("bf16-mixed", "cpu")):
        assert isinstance(plugin.scaler, StepGuard)
    with pytest.raises(RuntimeError, match="closure"):
        train(devices=1, closure=lambda: None)
