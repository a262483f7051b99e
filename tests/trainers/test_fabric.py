"""Lightning's Fabric with distamp's plugins, beside the same loop with its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainers.common import data, digest, model, needs, plant_inf, quiet

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("lightning")]
needs("lightning")

SCALE = 2.0**10


def train(
    ours: bool = True,
    devices: int = 2,
    clip: dict[str, Any] | None = None,
    fault: bool = True,
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
        if clip:
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
    with pytest.raises(NotImplementedError, match="clipping"):
        train(ours=False, devices=1, clip=clip, fused=True)
    fused, plain = ranks2.run(train, clip=clip, fused=True), ranks2.run(train, clip=clip)
    assert fused[0][:2] == fused[1][:2]
    assert fused[0][0] == pytest.approx(plain[0][0], rel=1e-5)


def test_lbfgs_learns():
    with pytest.raises(TypeError, match="LBFGS"):
        train(ours=False, devices=1, optimizer="LBFGS")
    _, scale, losses = train(devices=1, optimizer="LBFGS", lr=0.1, max_iter=4)
    assert scale == SCALE
    assert losses[:4] == sorted(losses[:4], reverse=True)


def test_without_an_overflow_the_run_is_fabrics_to_the_bit():
    ours, theirs = (train(each, devices=1, clip={"max_norm": 0.1}) for each in (True, False))
    assert ours == theirs


def test_fsdps_plugin_takes_a_scaler():
    from distamp import DistGradScaler
    from distamp.integrations.fabric import FSDPPrecision

    scaler = DistGradScaler("cpu")
    assert FSDPPrecision("16-mixed", scaler).scaler is scaler
    assert isinstance(FSDPPrecision("16-mixed").scaler, DistGradScaler)
    with pytest.raises(ValueError, match="does not scale losses"):
        FSDPPrecision("bf16-mixed", scaler)
