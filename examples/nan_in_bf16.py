"""One NaN on one of two ranks in bfloat16, with and without a guard, as a picture.

    python examples/nan_in_bf16.py                 # writes nan_in_bf16.svg; needs matplotlib
    python examples/nan_in_bf16.py picture.png

FSDP2 shards a model over two ranks. In one step, one element of a gradient becomes NaN on rank 1,
as a flipped bit in memory would do. Without a guard rank 1 steps with the NaN, the next forward
pass gathers the weight on both ranks, and the loss is NaN from then on. With a `StepGuard` both
ranks skip the step. Both runs have the same data and weights.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import distamp

STEPS, NAN_STEP = 60, 20
RUNS = {"without a guard": False, "with StepGuard": True}


def train(has_guard: bool) -> list[float]:
    """Train on two ranks, and return the loss before each step. Every rank calls this."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = distamp.StepGuard() if has_guard else None
    losses = []
    for step in range(1, STEPS + 1):
        inputs = torch.randn(64, 8)
        targets = inputs[:, :1] * 2.0 + inputs[:, 1:2]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
        loss.backward()
        if step == NAN_STEP and dist.get_rank() == 1:
            write_nan(model)
        if guard is None:
            optimizer.step()
        else:
            guard.step(optimizer)
            guard.update()
        losses.append(loss.item())
    return losses


def write_nan(model: nn.Module) -> None:
    """Write a NaN into this rank's shard of a gradient."""
    grad = next(model.parameters()).grad
    assert isinstance(grad, dist.tensor.DTensor)
    shard: Tensor = grad.to_local()
    shard.view(-1)[0] = float("nan")


def main_of_rank(rank: int, store: str, picture: str) -> None:
    """Join the group, train with and without a guard, and draw on rank 0."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    losses = {label: train(has_guard) for label, has_guard in RUNS.items()}
    if rank == 0:
        draw(losses, picture)
    dist.destroy_process_group()


def draw(losses: dict[str, list[float]], picture: str) -> None:
    """Draw the losses of both runs."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "distamp"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3))
    steps = range(1, STEPS + 1)
    for (label, curve), style in zip(losses.items(), ("C3-", "C0--"), strict=True):
        axes.plot(steps, curve, style, label=label, linewidth=1.8)
    axes.axvline(NAN_STEP, color="gray", linewidth=1, linestyle=":")
    axes.annotate("NaN on rank 1", (NAN_STEP + 0.7, max(losses["with StepGuard"]) * 0.9))
    last = losses["without a guard"][NAN_STEP - 1]
    axes.annotate("the loss is NaN from here on", (NAN_STEP, last), (NAN_STEP + 4, last * 2.0),
                  color="C3", arrowprops={"arrowstyle": "->", "color": "C3"})  # fmt: skip
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    axes.legend(loc="upper right")
    figure.tight_layout()
    metadata = {"Date": None} if picture.endswith(".svg") else None
    figure.savefig(picture, metadata=metadata)
    print(f"wrote {Path(picture).resolve()}")


def main() -> None:
    """Start two ranks."""
    picture = sys.argv[1] if len(sys.argv) > 1 else "nan_in_bf16.svg"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main_of_rank, args=(f"{folder}/store", picture), nprocs=2)


if __name__ == "__main__":
    main()
