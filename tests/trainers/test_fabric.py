"""Lightning's Fabric with distamp's plugins, beside the same loop with its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.trainers.common import data, digest, in_ranks, model, needs, plant_inf, quiet, refusal

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("lightning")]
needs("lightning")

SCALE = 2.0**10


def train(
    ours: bool = True,
    devices: int = 2,
    clip: dict[str, Any] | None = None,
    fault: bool = True,
    clips: int = 1,
    optimizer: str = "AdamW",
    **settings: Any,
) -> tuple[float, float, list[float]]:
    """Weights, loss scale and losses after five steps."""
    quiet()
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision as Theirs

    from distamp.integrations.fabric import MixedPrecision

    if ours:
        plugin = MixedPrecision("16-mixed", "cpu", init_scale=SCALE)
    else:
        plugin = Theirs("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))
    fabric = Fabric(
        accelerator="cpu",
        devices=devices,
        plugins=plugin,
        strategy="ddp" if devices > 1 else "auto",
    )
    if devices > 1:
        fabric.launch()
    net = model()
    made = getattr(torch.optim, optimizer)(net.parameters(), **({"lr": 0.01} | settings))
    wrapped, stepper = fabric.setup(net, made)
    losses = []
    for step, start in enumerate(range(0, 20, 4)):
        inputs, targets = data()[start + 2 * fabric.global_rank :][:2]

        def closure(inputs: Any = inputs, targets: Any = targets) -> Any:
            stepper.zero_grad()
            loss = (wrapped(inputs).float() - targets).square().mean()
            fabric.backward(loss)
            losses.append(loss.item())
            return loss

        if optimizer == "LBFGS":
            stepper.step(closure)
            continue
        closure()
        if fault:
            plant_inf(net.parameters(), step)
        for _ in range(clips if clip else 0):
            fabric.clip_gradients(
                wrapped,
                stepper,
                **clip,
                **({} if "clip_val" in clip else {"error_if_nonfinite": False}),
            )
        stepper.step()
    return digest(net.parameters()), plugin.scaler.get_scale(), losses


def test_ranks_stay_together_where_fabrics_own_part(ranks2):
    one, other = ranks2.run(train, ours=False)
    assert one[:2] != other[:2]
    one, other = ranks2.run(train)
    assert one[:2] == other[:2]
    assert one[1] == SCALE / 2


@pytest.mark.parametrize("clip", [{"max_norm": 0.1}, {"clip_val": 0.01}])
def test_a_fused_optimizer_is_clipped_as_one_that_is_not(ranks2, clip):
    refused, _ = ranks2.run(refusal, train, ours=False, devices=1, clip=clip, fused=True)
    assert refused.startswith("NotImplementedError: Gradient clipping")
    fused, plain = ranks2.run(train, clip=clip, fused=True), ranks2.run(train, clip=clip)
    assert fused[0][:2] == fused[1][:2]
    assert fused[0][0] == pytest.approx(plain[0][0], rel=1e-5)


@in_ranks
def test_lbfgs_is_refused():
    with pytest.raises(RuntimeError, match="closure"):
        train(devices=1, optimizer="LBFGS")


@in_ranks
def test_a_second_clip_before_the_step_finds_them_clipped():
    once, twice = (train(devices=1, clip={"clip_val": 0.01}, clips=n) for n in (1, 2))
    assert once == twice


@in_ranks
def test_without_an_overflow_the_run_is_fabrics_to_the_bit():
    options: dict[str, Any] = {"devices": 1, "fault": False, "clip": {"max_norm": 0.1}}
    ours, theirs = (train(each, **options) for each in (True, False))
    assert ours == theirs


def train_sharded(
    clip: dict[str, Any] | None = None, fused: bool = False
) -> tuple[float, float, set[torch.dtype]]:
    """Weights, loss scale and the dtypes of the first layer after five steps of FSDP1 in Fabric."""
    quiet()
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import FSDPStrategy

    from distamp.integrations.fabric import FSDPPrecision

    class Fsdp(FSDPStrategy):
        """Fabric refuses the class itself without a GPU, and no subclass."""

    plugin = FSDPPrecision("16-mixed", init_scale=SCALE)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=Fsdp(), plugins=plugin)
    fabric.launch()
    net = model()
    dtypes: set[torch.dtype] = set()
    net[0].register_forward_hook(lambda module, inputs, out: dtypes.add(out.dtype))
    # Fabric does not tell it to be on the CPU.
    net = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    net = fabric.setup_module(net)
    stepper = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused))
    for step, start in enumerate(range(0, 20, 4)):
        inputs, targets = data()[start + 2 * fabric.global_rank :][:2]
        stepper.zero_grad()
        fabric.backward((net(inputs).float() - targets).square().mean())
        plant_inf(net.parameters(), step)
        if clip:
            fabric.clip_gradients(net, stepper, **clip, error_if_nonfinite=False)
        stepper.step()
    with FullyShardedDataParallel.summon_full_params(net):
        return digest(net.parameters()), plugin.scaler.get_scale(), dtypes


@pytest.mark.parametrize(
    ("clip", "fused"), [(None, False), ({"max_norm": 0.1}, False), (None, True)]
)
def test_fsdp_trains_in_float16_and_as_on_the_whole_model(ranks2, clip, fused):
    one, other = ranks2.run(train_sharded, clip=clip, fused=fused)
    assert one == other
    assert one[1:] == (SCALE / 2, {torch.float16})
    whole, _ = ranks2.run(train, clip=clip)
    assert one[0] == pytest.approx(whole[0], rel=1e-3)


@in_ranks
def test_fsdps_plugin_takes_a_scaler():
    from distamp import DistGradScaler
    from distamp.integrations.fabric import FSDPPrecision

    scaler = DistGradScaler("cpu")
    assert FSDPPrecision("16-mixed", scaler).scaler is scaler
    assert isinstance(FSDPPrecision("16-mixed").scaler, DistGradScaler)
    with pytest.raises(ValueError, match="does not scale losses"):
        FSDPPrecision("bf16-mixed", scaler)
