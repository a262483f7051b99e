"""What each level costs and what it comes to: validation loss and memory of levels and hooks.

    OMP_NUM_THREADS=1 python -m benchmarks.levels [--seeds 0 1 2] [--steps 300]

Two models on real data, from the same seed and over the same batches at every level: the launcher's
GPT on the Python standard library's source, and a small convolutional network with batch norms on
scikit-learn's digits (which must be installed). Hooks run at fp32 on two ranks, beside fp32 on two
ranks. Memory is counted in bytes, tensor by tensor, at one step: it depends on no machine.

Prints the tables of docs/results/levels.md, and draws docs/images/levels.png. A run that
docs/results/levels.json has, with as many steps, is not run again: remove it to train all anew.
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

from benchmarks.common import command, environment, table
from distamp import cast_model, initialize
from distamp.levels import Amp
from distamp.scaler import DynamicLossScale
from launch.config import Config
from launch.data import batch_indices, load_data
from launch.model import GPT
from tests.ranks import RankPool

# fp32 from weights that were rounded to fp16 once: what chance alone makes of so small a change.
CONTROL = "fp32, rounded"
# fp32 on two ranks under DistributedDataParallel, and with gradients reduced in a wire format.
TWO_RANKS = "fp32, 2 ranks"
HOOKS = {TWO_RANKS: None, "hook fp16": "fp16", "hook int8": "int8"}
SPLIT = "bf16-O2 split"
ALONE = ("fp32", CONTROL, "fp16", "fp16-O2", "fp16-O3", "bf16", "bf16-O2", SPLIT, "fp8")
LEVELS = (*ALONE, *HOOKS)
# Its one linear layer has 10 outputs, and float8 takes multiples of 16.
LEFT_OUT = {("conv net", "fp8")}
# A run this short would otherwise spend a part of it on finding its scale.
SCALING: dict[str, Any] = {
    "init_scale": 2.0**12,
    "loss_scale": DynamicLossScale(growth_interval=100),
}
RESULTS, IMAGE = Path("docs/results/levels.json"), Path("docs/images/levels.png")


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Attributes:
        model: Makes the model, from torch's random numbers.
        optimizer: Makes its optimizer for a level.
        batch: Returns the training batch of a seed and step: inputs and targets.
        validation: What the final loss is taken on.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[Tensor], str], torch.optim.Optimizer]
    batch: Callable[[int, int], tuple[Tensor, Tensor]]
    validation: tuple[Tensor, Tensor]


def gpt(batch: int = 8) -> Task:
    """Return the launcher's GPT over the standard library's source."""
    config = Config(layers=2, heads=4, d_model=64, seq_len=32, global_batch_size=batch)
    data = load_data(config)

    def take(seed: int, step: int) -> tuple[Tensor, Tensor]:
        places = next(batch_indices(len(data.train), seed, step * batch, batch))
        inputs, targets = default_collate([data.train[place] for place in places])
        return inputs, targets

    def model() -> nn.Module:
        made = GPT(config, data.classes)
        for name, weight in made.named_parameters():
            made.init_weight(name, weight)
        return made

    def adamw(parameters: Iterable[Tensor], level: str) -> torch.optim.Optimizer:
        # At fp16-O3, where AdamW's state is float16, the usual eps would be zero.
        eps = 1e-4 if level == "fp16-O3" else 1e-8
        return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), eps=eps)

    places = range(0, len(data.held_out), len(data.held_out) // 64)[:64]
    inputs, targets = default_collate([data.held_out[place] for place in places])
    return Task(model, adamw, take, (inputs, targets))


def conv_net(batch: int = 32) -> Task:
    """Return three convolutions with batch norms over scikit-learn's handwritten digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    targets = torch.tensor(digits.target, dtype=torch.long)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held_out, rest = order[:360], order[360:]

    def take(seed: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed * 100_003 + step)
        rows = rest[torch.randint(len(rest), (batch,), generator=generator)]
        return images[rows], targets[rows]

    def model() -> nn.Module:
        layers: list[nn.Module] = []
        for inner, outer, stride in ((1, 8, 1), (8, 16, 2), (16, 32, 2)):
            layers.append(nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False))
            layers += [nn.BatchNorm2d(outer), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))

    def sgd(parameters: Iterable[Tensor], _: str) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.01, momentum=0.9, weight_decay=1e-3)

    return Task(model, sgd, take, (images[held_out], targets[held_out]))


# What a rank is given by name: a task itself does not travel between processes.
TASKS: dict[str, Callable[[], Task]] = {"GPT": gpt, "conv net": conv_net}


def loss_of(amp: Amp, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, in fp32, of a pass at the level."""
    with amp.autocast():
        logits = amp.model(inputs)
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def train(name: str, level: str, seed: int, steps: int) -> dict[str, Any]:
    """Train from a seed, with a hook on this rank's part of a batch; return the held-out loss."""
    task = TASKS[name]()
    torch.manual_seed(seed)
    made = task.model()
    if level == CONTROL:
        made.half().float()
    precision = level.split()[0].rstrip(",") if level in ALONE else "fp32"
    how: dict[str, Any] = {"master_weights": "split"} if level == SPLIT else {}
    model = cast_model(made, precision, **how)
    rank, ranks = 0, 1
    if level in HOOKS:
        model = DistributedDataParallel(model)
        rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer = task.optimizer(list(model.parameters()), precision)
    scaling = SCALING if precision in ("fp16", "fp16-O2") else {}
    amp = initialize(model, optimizer, precision, comm_hook=HOOKS.get(level), **scaling, **how)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda taken: min(1.0, (taken + 1) / 20, (steps - taken) / (steps / 2))
    )
    skipped = 0
    for step in range(steps):
        inputs, targets = (each.chunk(ranks)[rank] for each in task.batch(seed, step))
        amp.zero_grad()
        amp.backward(loss_of(amp, inputs, targets))
        amp.clip_grad_norm_(1.0)
        if amp.step():
            schedule.step()
        else:
            skipped += 1
    amp.model.eval()
    with torch.no_grad():
        loss = loss_of(amp, *task.validation).item()
    memory = memory_of(amp, inputs, targets)
    known = {"task": name, "level": level, "seed": seed}
    return {**known, "loss": loss, "skipped": skipped, "memory": memory}


def memory_of(amp: Amp, inputs: Tensor, targets: Tensor) -> dict[str, int]:
    """Return bytes at one more step; casts of weights that autocast makes are activations."""
    (optimizer,) = amp.optimizers
    weights = [*amp.model.parameters()]
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    saved: dict[int, Tensor] = {}  # by storage; alive, so that none's place is used again

    def save(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor

    def gradients() -> int:
        return sum(p.grad.nbytes for p in {*weights, *stepped} if p.grad is not None)

    amp.model.train()
    amp.zero_grad()
    with saved_tensors_hooks(save, lambda tensor: tensor):
        loss = loss_of(amp, inputs, targets)
    for weight in weights:
        saved.pop(weight.untyped_storage().data_ptr(), None)
    amp.backward(loss)
    held = gradients()
    amp.clip_grad_norm_(1.0)
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return {
        "weights": sum(t.nbytes for t in (*weights, *amp.model.buffers())),
        "masters": sum(masters.nbytes for masters in amp.masters),
        "gradients": max(held, gradients()),
        "optimizer": sum(t.nbytes for t in state),
        "activations": sum(t.untyped_storage().nbytes() for t in saved.values()),
    }


def _of(runs: list[dict[str, Any]], task: str, level: str) -> tuple[list[dict[str, Any]], Any]:
    """Return the runs of a level by seed, and how many per cent their losses lie beside fp32's."""

    def of(wanted: str) -> list[dict[str, Any]]:
        found = [run for run in runs if (run["task"], run["level"]) == (task, wanted)]
        return sorted(found, key=lambda run: run["seed"])  # type: ignore[no-any-return]

    mine, base = of(level), of(TWO_RANKS if level in HOOKS else "fp32")
    return mine, [100 * (a["loss"] / b["loss"] - 1) for a, b in zip(mine, base, strict=False)]


def show(runs: list[dict[str, Any]]) -> None:
    """Print the tables of losses and of memory."""
    losses, memory = [], []
    for task, level in itertools.product(TASKS, LEVELS):
        mine, beside = _of(runs, task, level)
        if not beside:
            continue  # not run
        each = [run["loss"] for run in mine]
        spread = statistics.stdev(each) if len(each) > 1 else 0.0
        change = f"{statistics.mean(beside):+.2f} % ({min(beside):+.2f} to {max(beside):+.2f})"
        skipped = statistics.mean(run["skipped"] for run in mine)
        cells = [f"{statistics.mean(each):.4f} ± {spread:.4f}", change, f"{skipped:.1f}"]
        losses.append([task, level, *cells])
        if level in ALONE:
            held = [f"{value / 1024:,.0f}" for value in mine[0]["memory"].values()]
            memory.append([task, level, *held])
    beside_what = "beside fp32 of the same ranks, seed by seed"
    table(["Model", "Level", "Validation loss", beside_what, "Steps skipped"], losses)
    kinds = ["Weights", "Masters", "Gradients", "Optimizer state", "Activations"]
    table(["Model", "Level", *kinds], memory, "KiB at one step, each tensor counted once.")


def plot(runs: list[dict[str, Any]]) -> None:
    """Draw the loss of every run beside that of fp32 from the same seed."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(TASKS), figsize=(10, 3.5), layout="constrained")
    for axis, task in zip(axes, TASKS, strict=True):
        axis.axhspan(-1, 1, color="0.92")
        for place, level in enumerate(LEVELS):
            _, beside = _of(runs, task, level)
            axis.plot([place] * len(beside), beside, "o", color=f"C{place}")
        axis.set_title(task)
        axis.set_xticks(range(len(LEVELS)), [re.sub(" |(?<=-)", "\n", level) for level in LEVELS])
        axis.tick_params(axis="x", labelsize=7)
    axes[0].set_ylabel("validation loss beside fp32, %\n(each dot a seed, grey: 1 %)")
    figure.savefig(IMAGE, dpi=110, metadata={"Software": ""})


def main(*, seeds: Sequence[int] = (0, 1, 2), steps: int = 300) -> None:
    """Train both models at every level, print the tables and draw the picture.

    Args:
        seeds: Of each run; one or several.
        steps: Of each run.
    """
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"steps": 0}
    if results["steps"] != steps:
        results = {"environment": environment(), "steps": steps, "runs": []}
    runs = results["runs"]
    had = {(run["task"], run["seed"], run["level"]) for run in runs}
    with RankPool(2, timeout=600) as pool:
        for task, seed, level in itertools.product(TASKS, seeds, LEVELS):
            if (task, seed, level) in had or (task, level) in LEFT_OUT:
                continue
            given = task, level, seed, steps
            runs.append(pool.run(train, *given)[0] if level in HOOKS else train(*given))
            print(task, level, seed, f"loss {runs[-1]['loss']:.4f}", flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    show(runs)
    plot(runs)


if __name__ == "__main__":
    command(main)
