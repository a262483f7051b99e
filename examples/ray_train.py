"""Ray Train on two CPU workers: a scaler, compressed gradients, and a checkpoint that resumes.

    python examples/ray_train.py

Trains once without a stop, and once stopped half way and taken up again; both end with the same
weights, to the bit. Each worker is a process of its own, so the loop is the one for torchrun.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, autocast, comm_hooks

STEPS = 8


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 8, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


def train(config: dict[str, Any]) -> None:
    """What each worker runs."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    model = DistributedDataParallel(net)
    hook = comm_hooks.register_comm_hook(model, "fp16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = DistGradScaler("cpu", init_scale=2.0**10)
    scaler.attach_comm_hook(hook)
    # Ray's own restart after a failure comes with a checkpoint; a new run is given one.
    start, taken_up = 0, ray.train.get_checkpoint() or config["checkpoint"]
    if taken_up is not None:
        with taken_up.as_directory() as folder:
            shared = torch.load(Path(folder) / "shared.pt")
            net.load_state_dict(shared["model"])
            optimizer.load_state_dict(shared["optimizer"])
            scaler.load_state_dict(shared["scaler"])
            start = shared["step"]
            # With int8 also, of each rank's own: hook.load_state_dict(...), what rounding took.
    for step in range(start, config["stop_at"]):
        inputs, targets = batch(step, rank)
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            loss = (model(inputs).float() - targets).square().mean()
        if step == 2 and rank == 1:
            loss = loss * float("inf")  # one worker overflows; both skip
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    metrics = {
        "loss": loss.item(),
        "scale": scaler.get_scale(),
        "weights": sum(p.double().sum().item() for p in net.parameters()),
        "saved": hook.stats().saved,
    }
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            shared = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            shared |= {"scaler": scaler.state_dict(), "step": config["stop_at"]}
            torch.save(shared, Path(folder) / "shared.pt")
        saved = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
        ray.train.report(metrics, checkpoint=saved)


def fit(folder: str, name: str, stop_at: int, checkpoint: Any = None) -> Any:
    """Run two workers until ``stop_at``; what the first reported, and its checkpoint."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        train,
        train_loop_config={"stop_at": stop_at, "checkpoint": checkpoint},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(name=name, storage_path=folder),
    )
    return trainer.fit()


def main() -> None:
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    with tempfile.TemporaryDirectory() as folder:
        whole = fit(folder, "whole", STEPS)
        half = fit(folder, "half", STEPS // 2)
        rest = fit(folder, "rest", STEPS, half.checkpoint)
    ray.shutdown()
    for name, result in (("whole", whole), ("taken up", rest)):
        line = "{}: loss {loss:.6f}, scale {scale:g}, weights {weights:.9f}"
        print(line.format(name, **result.metrics))
    print(f"fp16 saved {whole.metrics['saved']:.0%} of the bytes")
    assert whole.metrics["weights"] == rest.metrics["weights"]


if __name__ == "__main__":
    main()
