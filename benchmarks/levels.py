"""What each level costs and what it comes to: validation loss and memory of levels and hooks.

    OMP_NUM_THREADS=1 python -m benchmarks.levels [--seeds 0 1 2] [--steps 300] [--write]

Two models on real data, from the same seed and over the same batches at every level: the launcher's
GPT on the Python standard library's source, and a small convolutional network with batch norms on
scikit-learn's digits (which must be installed). Hooks run at O0 on two ranks, beside O0 on two
ranks. Memory is counted in bytes, tensor by tensor, at one step: it depends on no machine.

``--write`` puts the results into docs/results/levels.json, docs/levels.md and
docs/images/levels.png. It keeps each run that ends and skips those that it has, so after it was cut
off the same command goes on; remove the first file to train all of them again. ``--render`` writes
the last two from the first, and trains nothing.
"""

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import environment
from benchmarks.levels_page import CONTROL, HOOKS, LEVELS, RESULTS, render, write
from distamp import cast_model, initialize
from distamp.initialize import Amp
from distamp.scaler import DynamicSchedule
from launch.config import Config
from launch.data import Order, load_data
from launch.model import GPT
from tests.ranks import RankPool

RANKS = 2
# A run this short would otherwise spend a part of it on finding its scale.
SCALING: dict[str, Any] = {"init_scale": 2.0**12, "schedule": DynamicSchedule(growth_interval=100)}


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Attributes:
        model: Makes the model, from torch's random numbers.
        optimizer: Makes its optimizer for a level.
        batch: Returns the training batch of a step: inputs and targets.
        validation: What the final loss is taken on.
    """

    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[Tensor], str], torch.optim.Optimizer]
    batch: Callable[[int, int], tuple[Tensor, Tensor]]
    validation: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Memory:
    """Bytes at one step, each tensor counted once.

    Attributes:
        weights: Parameters and buffers of the model.
        masters: fp32 copies that the optimizer steps.
        gradients: The most that lies in memory at one time between backward and step.
        optimizer: The optimizer's own state.
        activations: What the graph of the forward pass keeps for backward, parameters apart; casts
            of weights that autocast makes are among it.
    """

    weights: int
    masters: int
    gradients: int
    optimizer: int
    activations: int


@dataclass(frozen=True)
class Run:
    """One training run."""

    task: str
    level: str
    seed: int
    loss: float
    skipped: int
    memory: Memory


def gpt(batch: int = 8, block: int = 32) -> Task:
    """Return the launcher's GPT over the standard library's source."""
    config = Config(layers=2, heads=4, width=64, block=block, batch=batch)
    data = load_data(config)

    def stacked(examples: Any, places: Iterable[int]) -> tuple[Tensor, Tensor]:
        inputs, targets = zip(*(examples[place] for place in places), strict=True)
        return torch.stack(inputs), torch.stack(targets)

    def take(seed: int, step: int) -> tuple[Tensor, Tensor]:
        return stacked(data.train, next(iter(Order(len(data.train), seed, step * batch, batch))))

    def model() -> nn.Module:
        made = GPT(config, data.classes)
        return made.apply(made.init_weights)

    held_out = range(0, len(data.held_out), len(data.held_out) // 64)[:64]
    return Task("GPT", model, adamw, take, stacked(data.held_out, held_out))


def adamw(parameters: Iterable[Tensor], level: str) -> torch.optim.Optimizer:
    """Return AdamW; at O3, where its state is float16, the usual eps would be zero."""
    eps = 1e-4 if level == "O3" else 1e-8
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), eps=eps)


class ConvNet(nn.Module):
    """Three convolutions with batch norms over 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inner, outer, stride in ((1, 8, 1), (8, 16, 2), (16, 32, 2)):
            layers += [
                nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(outer),
                nn.ReLU(),
            ]
        self.features = nn.Sequential(*layers)
        self.classes = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, 1, 8, 8) to logits (batch, 10)."""
        logits: Tensor = self.classes(self.features(images).mean((2, 3)))
        return logits


def conv_net(batch: int = 32) -> Task:
    """Return a small convolutional network over scikit-learn's handwritten digits."""
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

    return Task(
        "conv net",
        ConvNet,
        lambda parameters, _: torch.optim.SGD(parameters, 0.01, momentum=0.9, weight_decay=1e-3),
        take,
        (images[held_out], targets[held_out]),
    )


# What a rank is given by name: a task itself does not travel between processes.
TASKS: dict[str, Callable[[], Task]] = {"GPT": gpt, "conv net": conv_net}


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, in fp32."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def train(name: str, level: str, seed: int, steps: int) -> Run:
    """Train from a seed, with a hook on this rank's part of a batch; return the held-out loss."""
    task = TASKS[name]()
    torch.manual_seed(seed)
    made = task.model()
    if level == CONTROL:
        made.half().float()
    precision = level.split(",")[0] if level not in HOOKS else "O0"
    model = cast_model(made, precision)
    ranks = RANKS if level in HOOKS else 1
    if ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = task.optimizer(list(model.parameters()), precision)
    scaling = SCALING if precision in ("O1", "O2") else {}
    amp = initialize(model, optimizer, precision, comm_hook=HOOKS.get(level), **scaling)
    rank = dist.get_rank() if ranks > 1 else 0
    rate = [group["lr"] for group in optimizer.param_groups]
    skipped = taken = 0
    memory: Memory | None = None
    for step in range(steps):
        inputs, targets = (each.chunk(ranks)[rank] for each in task.batch(seed, step))
        for group, peak in zip(optimizer.param_groups, rate, strict=True):
            group["lr"] = peak * min(1.0, (taken + 1) / 20, (steps - taken) / (steps / 2))
        amp.zero_grad()
        measure = steps // 2 == step
        activations = _Saved(amp.model)
        with activations if measure else contextlib.nullcontext():
            with amp.autocast():
                logits = amp.model(inputs)
            loss = mean_loss(logits, targets)
        amp.backward(loss)
        if measure:
            held = _gradient_bytes(amp)
        amp.clip_grad_norm_(1.0)
        if measure:
            memory = _memory(amp, max(held, _gradient_bytes(amp)), activations.bytes)
        stepped = bool(amp.step())
        skipped += not stepped
        taken += stepped
    assert memory is not None
    return Run(task.name, level, seed, validate(task, amp), skipped, memory)


@torch.no_grad()
def validate(task: Task, amp: Amp) -> float:
    """Return the loss on what was held out, computed at the level itself."""
    amp.model.eval()
    inputs, targets = task.validation
    with amp.autocast():
        logits = amp.model(inputs)
    return mean_loss(logits, targets).item()


class _Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts what autograd keeps inside, each storage once and parameters not at all."""

    def __init__(self, model: nn.Module) -> None:
        self._known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._held: list[Tensor] = []  # alive, so that no storage's place is used again
        self.bytes = 0
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self._held.append(tensor.detach())
            self.bytes += storage.nbytes()
        return tensor


def _memory(amp: Amp, gradients: int, activations: int) -> Memory:
    (optimizer,) = amp.optimizers
    return Memory(
        _bytes([*amp.model.parameters(), *amp.model.buffers()]),
        sum(masters.nbytes for masters in amp.masters),
        gradients,
        _bytes(v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)),
        activations,
    )


def _gradient_bytes(amp: Amp) -> int:
    (optimizer,) = amp.optimizers
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    everyone = {id(p): p for p in (*amp.model.parameters(), *stepped)}.values()
    return _bytes(p.grad for p in everyone if p.grad is not None)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t._values().nbytes if t.is_sparse else t.nbytes for t in tensors)


def _earlier(steps: int) -> list[dict[str, Any]]:
    """Return the runs of as many steps that were kept."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"steps": 0}
    runs: list[dict[str, Any]] = kept["runs"] if kept["steps"] == steps else []
    return runs


def tables(results: dict[str, Any], *, to_page: bool) -> None:
    """Put the tables into the page, or print them."""
    if to_page:
        write(results)
    else:
        print(render(results))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--levels", nargs="+", default=LEVELS, choices=LEVELS)
    parser.add_argument("--write", action="store_true", help="put the results into the docs")
    parser.add_argument(
        "--render", action="store_true", help="write the docs from the last results"
    )
    options = parser.parse_args()
    if options.render:
        tables(json.loads(RESULTS.read_text()), to_page=True)
        return
    results: dict[str, Any] = {
        "command": f"OMP_NUM_THREADS=1 python -m benchmarks.levels --steps {options.steps} --write",
        "environment": environment(),
        "steps": options.steps,
        "runs": _earlier(options.steps) if options.write else [],
    }
    runs = results["runs"]
    had = {(run["task"], run["level"], run["seed"]) for run in runs}
    asked = [(t, s, x) for t in options.tasks for s in options.seeds for x in options.levels]
    with RankPool(RANKS, timeout=600) as pool:
        for task, seed, level in asked:
            if (task, level, seed) in had:
                continue
            start = time.perf_counter()
            given = (task, level, seed, options.steps)
            run = pool.run(train, *given)[0] if level in HOOKS else train(*given)
            runs.append(asdict(run))
            if options.write:
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(
                f"{run.task:9} {level:11} seed {seed}: loss {run.loss:.4f}, {run.skipped} "
                f"skipped, {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    tables(results, to_page=options.write)


if __name__ == "__main__":
    main()
