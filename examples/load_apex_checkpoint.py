"""Go on from a checkpoint that was written under Apex, here at fp16-O2.

    python examples/load_apex_checkpoint.py [CHECKPOINT]

Apex's documentation saves ``{"model", "optimizer", "amp"}``. Its loss scales go into
``amp.load_state_dict`` as they are; of several the smallest is taken. Its fp16-O2 saved weights in
fp32: they go into the masters too, which keep what the fp16 model rounds off. Without a file the
script first writes such a checkpoint.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from next_byte import NextByte, batches, device
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from distamp import initialize
from distamp.levels import Amp

STEPS = 10


def begin() -> tuple[Amp, torch.optim.Optimizer]:
    """Make everything anew."""
    model = NextByte().to(device())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return initialize(model, optimizer, "fp16-O2"), optimizer


def resume(checkpoint: dict[str, Any]) -> Amp:
    """Load what Apex saved."""
    amp, optimizer = begin()
    amp.model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    load_masters(amp, checkpoint["model"])
    return amp


@torch.no_grad()
def load_masters(amp: Amp, weights: dict[str, Tensor]) -> None:
    """Set the masters to weights that were saved in fp32, and round them into the model."""
    names = {id(parameter): name for name, parameter in amp.model.named_parameters()}
    for masters in amp.masters:
        for parameter, master in masters.pairs():
            master.copy_(weights[names[id(parameter)]])
        masters.write_back()


def train(amp: Amp, skip: int = 0) -> list[float]:
    """Train on the batches that follow; return the losses."""
    losses = []
    for context, following in list(batches(skip + STEPS))[skip:]:
        amp.zero_grad()
        logits = amp.model(context.to(device()))
        loss = F.cross_entropy(logits, following.to(device()))
        amp.backward(loss)
        amp.step()
        losses.append(loss.item())
    return losses


def write_as_apex_did(path: Path) -> list[float]:
    """Train a while, and save what Apex's fp16-O2 would have."""
    torch.manual_seed(0)
    amp, optimizer = begin()
    losses = train(amp)
    masters = {id(parameter): master for parameter, master in amp.masters[0].pairs()}
    weights = {n: masters.get(id(p), p).detach() for n, p in amp.model.named_parameters()}
    scaler = amp.scaler.state_dict()
    scales = {"loss_scale": scaler["scale"], "unskipped": scaler["_growth_tracker"]}
    saved = {"model": weights, "optimizer": optimizer.state_dict()}
    torch.save({**saved, "amp": {"loss_scaler0": scales}}, path)
    return losses


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(sys.argv[1] if len(sys.argv) > 1 else f"{folder}/apex.pt")
        before = [] if path.exists() else write_as_apex_did(path)
        checkpoint = torch.load(path, weights_only=True, map_location=device())
    for name, state in checkpoint["amp"].items():
        print(f"{name}: scale {state['loss_scale']:g}, clean iterations {state['unskipped']}")
    losses = [*before, *train(resume(checkpoint), skip=len(before))]
    print(f"fp16-O2: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {STEPS} steps after the checkpoint")


if __name__ == "__main__":
    main()
