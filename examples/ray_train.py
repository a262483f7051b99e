"""Ray Train on two CPU workers: a scaler, compressed gradients, and a checkpoint that resumes.

    python examples/ray_train.py

The example trains once without a stop, and once with a stop half way and a resume. Both runs end
with bit-identical weights. Each worker is a separate process, so the loop is the same as for
torchrun.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, autocast, comm_hooks

STEPS = 8


def make_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random inputs and their sums as the targets."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 8, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


def train(config: dict[str, Any]) -> None:
    """Train on one worker."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    model = DistributedDataParallel(net)
    hook = comm_hooks.register_comm_hook(model, "fp16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = DistGradScaler("cpu", init_scale=2.0**10)
    scaler.attach_comm_hook(hook)
    start = 0
    # Ray passes a checkpoint when it restarts a worker. This example passes one in the config.
    checkpoint = ray.train.get_checkpoint() or config["checkpoint"]
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        start = state["step"]
        # An int8 hook has rounding residuals, which differ between ranks. Each rank would save
        # hook.state_dict() too, and load it here.
    for step in range(start, config["stop_at"]):
        inputs, targets = make_batch(step, rank)
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            outputs = model(inputs)
        loss = (outputs.float() - targets).square().mean()
        # One worker overflows in this step, and both skip it.
        if step == 2 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    metrics = {
        "loss": loss.item(),
        "scale": scaler.get_scale(),
        "weights": sum(p.double().sum().item() for p in net.parameters()),
        "saved": hook.stats().saved,
    }
    state = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "step": config["stop_at"],
    }
    with tempfile.TemporaryDirectory() as folder:
        new_checkpoint = None
        if rank == 0:
            torch.save(state, Path(folder) / "state.pt")
            new_checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=new_checkpoint)


def fit(folder: str, name: str, stop_at: int, checkpoint: Any = None) -> Any:
    """Run two workers up to a step, and return the result of the first worker."""
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
        uninterrupted = fit(folder, "uninterrupted", STEPS)
        first_half = fit(folder, "first-half", STEPS // 2)
        resumed = fit(folder, "resumed", STEPS, first_half.checkpoint)
    ray.shutdown()
    for name, result in (("uninterrupted", uninterrupted), ("resumed", resumed)):
        line = "{}: loss {loss:.6f}, scale {scale:g}, weights {weights:.9f}"
        print(line.format(name, **result.metrics))
    print(f"fp16 saved {uninterrupted.metrics['saved']:.0%} of the bytes")
    assert uninterrupted.metrics["weights"] == resumed.metrics["weights"]


if __name__ == "__main__":
    main()
