"""Resume from a checkpoint that was written under Apex, here at fp16-O2.

    python examples/load_apex_checkpoint.py [CHECKPOINT]

Apex's documentation saves ``{"model", "optimizer", "amp"}``. `amp.load_state_dict` accepts Apex's
loss scales unchanged, and takes the smallest of several. Apex's O2 saved the weights in fp32. The
example loads them into the master weights too, because the fp16 model would round them. Without a
file, the script first writes such a checkpoint.
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


def make_amp() -> tuple[Amp, torch.optim.Optimizer]:
    """Make the model and the optimizer, and initialize them at fp16-O2."""
    model = NextByte().to(device())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return initialize(model, optimizer, "fp16-O2"), optimizer


def resume(checkpoint: dict[str, Any]) -> Amp:
    """Load a checkpoint of Apex."""
    amp, optimizer = make_amp()
    amp.model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    load_masters(amp, checkpoint["model"])
    return amp


@torch.no_grad()
def load_masters(amp: Amp, weights: dict[str, Tensor]) -> None:
    """Copy fp32 weights into the master weights, and round them into the model."""
    names = {id(param): name for name, param in amp.model.named_parameters()}
    for masters in amp.masters:
        for param, master in masters.pairs():
            name = names[id(param)]
            master.copy_(weights[name])
        masters.write_back()


def train(amp: Amp, skip: int = 0) -> list[float]:
    """Train on the batches after the first ``skip`` ones, and return the losses."""
    losses = []
    data = list(batches(skip + STEPS))
    for context, next_bytes in data[skip:]:
        amp.zero_grad()
        logits = amp.model(context.to(device()))
        loss = F.cross_entropy(logits, next_bytes.to(device()))
        amp.backward(loss)
        amp.step()
        losses.append(loss.item())
    return losses


def write_as_apex_did(path: Path) -> list[float]:
    """Train some steps and write the checkpoint that Apex's O2 would have written."""
    torch.manual_seed(0)
    amp, optimizer = make_amp()
    losses = train(amp)
    masters = {id(param): master for param, master in amp.masters[0].pairs()}
    weights = {}
    for name, param in amp.model.named_parameters():
        weights[name] = masters.get(id(param), param).detach()
    scaler = amp.scaler.state_dict()
    scaler_of_apex = {"loss_scale": scaler["scale"], "unskipped": scaler["_growth_tracker"]}
    checkpoint = {
        "model": weights,
        "optimizer": optimizer.state_dict(),
        "amp": {"loss_scaler0": scaler_of_apex},
    }
    torch.save(checkpoint, path)
    return losses


def main() -> None:
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(sys.argv[1] if len(sys.argv) > 1 else f"{folder}/apex.pt")
        if not path.exists():
            losses = write_as_apex_did(path)
        checkpoint = torch.load(path, weights_only=True, map_location=device())
    for name, state in checkpoint["amp"].items():
        print(f"{name}: scale {state['loss_scale']:g}, clean iterations {state['unskipped']}")
    amp = resume(checkpoint)
    losses += train(amp, skip=len(losses))
    print(f"fp16-O2: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {STEPS} steps after the checkpoint")


if __name__ == "__main__":
    main()
