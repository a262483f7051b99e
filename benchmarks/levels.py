"""The cost of each precision level: validation loss and memory of levels and hooks.

    OMP_NUM_THREADS=1 python -m benchmarks.levels [--seeds 0 1 2] [--steps 300]

Two models train on real data, at every level from the same seed and on the same batches: the
launcher's GPT on the source of Python's standard library, and a small convolutional network with
batch norms on scikit-learn's digits (scikit-learn must be installed). Hooks run at fp32 on two
ranks and are compared with fp32 on two ranks. Memory is the number of bytes of all tensors at one
step, so it is the same on every machine.

The benchmark prints the tables of docs/results/levels.md and draws docs/images/levels.png. It does
not repeat a run with the same number of steps that is in docs/results/levels.json. Remove that file
to train everything again.
"""

import itertools
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from benchmarks.common import describe_environment, print_table, run_command
from distamp import cast_model, initialize
from distamp.levels import Amp
from distamp.scaler import DynamicLossScale
from launch.config import Config
from launch.data import batch_indices, load_data
from launch.model import GPT
from tests.ranks import RankPool

# fp32 from weights that were rounded to fp16 once: the effect of chance on so small a change.
CONTROL = "fp32, rounded"
# fp32 on two ranks under DistributedDataParallel, without a hook and with one.
TWO_RANKS = "fp32, 2 ranks"
HOOKS = {TWO_RANKS: None, "hook fp16": "fp16", "hook int8": "int8"}
SPLIT_MASTERS = "bf16-O2 split"
ONE_PROCESS = (
    *("fp32", CONTROL, "fp16", "fp16-O2", "fp16-O3"),
    *("bf16", "bf16-O2", SPLIT_MASTERS, "fp8"),
)
LEVELS = (*ONE_PROCESS, *HOOKS)
# The linear layer of the conv net has 10 outputs, and float8 needs multiples of 16.
UNSUPPORTED = {("conv net", "fp8")}
# The default scale would take many steps of so short a run to adapt.
SCALING: dict[str, Any] = {
    "init_scale": 2.0**12,
    "loss_scale": DynamicLossScale(growth_interval=100),
}
RESULTS = Path("docs/results/levels.json")
IMAGE = Path("docs/images/levels.png")

Run = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Attributes:
        make_model: Makes the model from torch's random numbers.
        make_optimizer: Makes the optimizer for a level.
        make_batch: Returns the training batch of a seed and step: inputs and targets.
        validation: The inputs and targets for the final loss.
    """

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[Iterable[Tensor], str], torch.optim.Optimizer]
    make_batch: Callable[[int, int], tuple[Tensor, Tensor]]
    validation: tuple[Tensor, Tensor]


def make_gpt_task(batch_size: int = 8) -> Task:
    """Return the launcher's GPT with the source of the standard library."""
    config = Config(layers=2, heads=4, d_model=64, seq_len=32, global_batch_size=batch_size)
    data = load_data(config)

    def make_batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        indices = next(batch_indices(len(data.train), seed, step * batch_size, batch_size))
        inputs, targets = default_collate([data.train[index] for index in indices])
        return inputs, targets

    def make_model() -> nn.Module:
        model = GPT(config, data.classes)
        for name, weight in model.named_parameters():
            model.init_weight(name, weight)
        return model

    def make_adamw(params: Iterable[Tensor], level: str) -> torch.optim.Optimizer:
        # At fp16-O3 the state of AdamW is float16, in which the usual eps is zero.
        eps = 1e-4 if level == "fp16-O3" else 1e-8
        return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), eps=eps)

    stride = len(data.held_out) // 64
    examples = [data.held_out[index * stride] for index in range(64)]
    inputs, targets = default_collate(examples)
    return Task(make_model, make_adamw, make_batch, (inputs, targets))


def make_conv_net_task(batch_size: int = 32) -> Task:
    """Return three convolutions with batch norms, and scikit-learn's handwritten digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    targets = torch.tensor(digits.target, dtype=torch.long)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held_out = order[:360]
    training = order[360:]

    def make_batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed * 100_003 + step)
        rows = training[torch.randint(len(training), (batch_size,), generator=generator)]
        return images[rows], targets[rows]

    def make_model() -> nn.Module:
        layers: list[nn.Module] = []
        for in_channels, out_channels, stride in ((1, 8, 1), (8, 16, 2), (16, 32, 2)):
            layers.append(nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False))
            layers.append(nn.BatchNorm2d(out_channels))
            layers.append(nn.ReLU())
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))

    def make_sgd(params: Iterable[Tensor], _: str) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, 0.01, momentum=0.9, weight_decay=1e-3)

    return Task(make_model, make_sgd, make_batch, (images[held_out], targets[held_out]))


# A rank gets the name of a task, because a task cannot be sent between processes.
TASKS: dict[str, Callable[[], Task]] = {"GPT": make_gpt_task, "conv net": make_conv_net_task}


def compute_loss(amp: Amp, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, in fp32, of a forward pass at the level."""
    with amp.autocast():
        logits = amp.model(inputs)
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def precision_of_run(level: str) -> str:
    """Return the precision level of a row of the tables."""
    if level in HOOKS or level == CONTROL:
        return "fp32"
    return level.split()[0]


def train(name: str, level: str, seed: int, steps: int) -> Run:
    """Train from a seed, with a hook on this rank's part of each batch; return the results."""
    task = TASKS[name]()
    torch.manual_seed(seed)
    model = task.make_model()
    if level == CONTROL:
        model.half().float()
    precision = precision_of_run(level)
    options: dict[str, Any] = {}
    if level == SPLIT_MASTERS:
        options["master_weights"] = "split"
    model = cast_model(model, precision, **options)
    rank = 0
    world_size = 1
    if level in HOOKS:
        model = DistributedDataParallel(model)
        rank = dist.get_rank()
        world_size = dist.get_world_size()
    optimizer = task.make_optimizer(list(model.parameters()), precision)
    if precision in ("fp16", "fp16-O2"):
        options.update(SCALING)
    amp = initialize(model, optimizer, precision, comm_hook=HOOKS.get(level), **options)

    def lr_factor(taken: int) -> float:
        warmup = (taken + 1) / 20
        decay = (steps - taken) / (steps / 2)
        return min(1.0, warmup, decay)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    skipped = 0
    for step in range(steps):
        batch = task.make_batch(seed, step)
        inputs, targets = (tensor.chunk(world_size)[rank] for tensor in batch)
        amp.zero_grad()
        amp.backward(compute_loss(amp, inputs, targets))
        amp.clip_grad_norm_(1.0)
        if amp.step():
            schedule.step()
        else:
            skipped += 1
    amp.model.eval()
    with torch.no_grad():
        loss = compute_loss(amp, *task.validation).item()
    memory = measure_memory(amp, inputs, targets)
    return {
        "task": name,
        "level": level,
        "seed": seed,
        "loss": loss,
        "skipped": skipped,
        "memory": memory,
    }


def measure_memory(amp: Amp, inputs: Tensor, targets: Tensor) -> dict[str, int]:
    """Take one more step and return its bytes by kind.

    The casts of weights that autocast makes count as activations.
    """
    (optimizer,) = amp.optimizers
    weights = list(amp.model.parameters())
    params = set(weights)
    for group in optimizer.param_groups:
        params.update(group["params"])
    # The keys are storages. The tensors are kept alive, so that no storage is used twice.
    activations: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        activations.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor

    def count_gradient_bytes() -> int:
        return sum(p.grad.nbytes for p in params if p.grad is not None)

    amp.model.train()
    amp.zero_grad()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compute_loss(amp, inputs, targets)
    for weight in weights:
        activations.pop(weight.untyped_storage().data_ptr(), None)
    amp.backward(loss)
    # Masters have gradients from the clipping on.
    bytes_before_clipping = count_gradient_bytes()
    amp.clip_grad_norm_(1.0)
    bytes_after_clipping = count_gradient_bytes()
    state_bytes = 0
    for state in optimizer.state.values():
        state_bytes += sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
    weight_bytes = sum(tensor.nbytes for tensor in (*weights, *amp.model.buffers()))
    master_bytes = sum(masters.nbytes for masters in amp.masters)
    activation_bytes = 0
    for activation in activations.values():
        activation_bytes += activation.untyped_storage().nbytes()
    return {
        "weights": weight_bytes,
        "masters": master_bytes,
        "gradients": max(bytes_before_clipping, bytes_after_clipping),
        "optimizer": state_bytes,
        "activations": activation_bytes,
    }


def select_runs(runs: Sequence[Run], task: str, level: str) -> list[Run]:
    """Return the runs of a task at a level, in the order of their seeds."""
    selected = [run for run in runs if run["task"] == task and run["level"] == level]
    return sorted(selected, key=lambda run: int(run["seed"]))


def compare_with_fp32(runs: Sequence[Run], task: str, level: str) -> list[float]:
    """Return for each seed the difference between the loss at a level and at fp32 in per cent."""
    baseline = TWO_RANKS if level in HOOKS else "fp32"
    level_runs = select_runs(runs, task, level)
    fp32_runs = select_runs(runs, task, baseline)
    differences = []
    for run, fp32_run in zip(level_runs, fp32_runs, strict=False):
        ratio = run["loss"] / fp32_run["loss"]
        differences.append(100 * (ratio - 1))
    return differences


def print_tables(runs: Sequence[Run]) -> None:
    """Print the tables of losses and of memory."""
    loss_rows = []
    memory_rows = []
    for task, level in itertools.product(TASKS, LEVELS):
        differences = compare_with_fp32(runs, task, level)
        if not differences:
            continue
        selected = select_runs(runs, task, level)
        losses = [run["loss"] for run in selected]
        mean_loss = statistics.mean(losses)
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        mean_difference = statistics.mean(differences)
        low = min(differences)
        high = max(differences)
        skipped = statistics.mean(run["skipped"] for run in selected)
        loss = f"{mean_loss:.4f} ± {spread:.4f}"
        difference = f"{mean_difference:+.2f} % ({low:+.2f} to {high:+.2f})"
        loss_rows.append([task, level, loss, difference, f"{skipped:.1f}"])
        if level in ONE_PROCESS:
            sizes = [f"{nbytes / 1024:,.0f}" for nbytes in selected[0]["memory"].values()]
            memory_rows.append([task, level, *sizes])
    comparison = "Difference from fp32 on the same ranks, seed by seed"
    print_table(["Model", "Level", "Validation loss", comparison, "Steps skipped"], loss_rows)
    kinds = ["Weights", "Masters", "Gradients", "Optimizer state", "Activations"]
    title = "KiB at one step, each tensor counted once."
    print_table(["Model", "Level", *kinds], memory_rows, title)


def draw(runs: Sequence[Run]) -> None:
    """Draw the difference between the loss of every run and of fp32 from the same seed."""
    from matplotlib import pyplot

    labels = [re.sub(" |(?<=-)", "\n", level) for level in LEVELS]
    figure, axes = pyplot.subplots(1, len(TASKS), figsize=(10, 3.5), layout="constrained")
    for axis, task in zip(axes, TASKS, strict=True):
        axis.axhspan(-1, 1, color="0.92")
        for index, level in enumerate(LEVELS):
            differences = compare_with_fp32(runs, task, level)
            axis.plot([index] * len(differences), differences, "o", color=f"C{index}")
        axis.set_title(task)
        axis.set_xticks(range(len(LEVELS)), labels)
        axis.tick_params(axis="x", labelsize=7)
    axes[0].set_ylabel("validation loss, difference from fp32, %\n(a dot for each seed; grey: 1 %)")
    figure.savefig(IMAGE, dpi=110, metadata={"Software": ""})


def main(*, seeds: Sequence[int] = (0, 1, 2), steps: int = 300) -> None:
    """Train both models at every level, print the tables and draw the picture.

    Args:
        seeds: Seeds, with a run for each.
        steps: Number of steps of each run.
    """
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"steps": 0}
    if results["steps"] != steps:
        results = {"environment": describe_environment(), "steps": steps, "runs": []}
    runs = results["runs"]
    finished = {(run["task"], run["seed"], run["level"]) for run in runs}
    with RankPool(2, timeout=600) as pool:
        for task, seed, level in itertools.product(TASKS, seeds, LEVELS):
            if (task, seed, level) in finished or (task, level) in UNSUPPORTED:
                continue
            if level in HOOKS:
                run = pool.run(train, task, level, seed, steps)[0]
            else:
                run = train(task, level, seed, steps)
            runs.append(run)
            print(task, level, seed, f"loss {run['loss']:.4f}", flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print_tables(runs)
    draw(runs)


if __name__ == "__main__":
    run_command(main)
