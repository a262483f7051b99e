"""Skipped steps and gradient elements flushed to zero: HeadroomSchedule beside torch's rule.

    OMP_NUM_THREADS=1 python -m benchmarks.headroom [--steps 2000] [--seeds 0 1] [--jobs 2]

Each run is the launcher's own fp16 training, from the same seed under either schedule. Counted in
taken steps: elements that are exactly zero in the gradients of the linear layers' parameters, and
in the float16 gradients that enter these layers. At every hundredth step the same batch is done in
fp32 as well, to show how many of those would be zero without float16.

    OMP_NUM_THREADS=1 python -m benchmarks.headroom --cost

times a whole round of the scaler under either schedule instead, and

    OMP_NUM_THREADS=1 python -m benchmarks.headroom --noise

shows how the gain depends on how much the largest gradient varies from step to step.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import environment, interleave, markdown, ratio
from benchmarks.scaler_round import NoFusedStep, NoStep
from distamp import DistGradScaler
from distamp.scaler import DynamicSchedule, HeadroomSchedule, ScaleState, Schedule
from launch.command_line import parse
from launch.job import Job, prepare
from launch.models import mean_loss
from launch.ranks import Ranks
from launch.reporting import METRICS, read_metrics
from launch.train import train

SCHEDULES = ("dynamic", "headroom")
MODEL = ["--layers", "2", "--heads", "4", "--width", "64", "--block", "64", "--batch", "16"]
REFERENCE_EVERY = 100
IMAGE = Path("docs/images/headroom.png")


@dataclass
class Run:
    """What one training run came to.

    Attributes:
        scales: The loss scale of each step.
        skipped: The steps that were skipped.
        parameters: Zeros in the gradients of linear layers' parameters, over taken steps.
        activations: Zeros in the float16 gradients that enter linear layers, over taken steps.
        elements: How many elements of either were looked at.
        reference: How many of either were zero in fp32, over the steps done in fp32 as well.
        reference_steps: How many those are.
        validation_loss: At the end.
    """

    schedule: str
    seed: int
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    parameters: int = 0
    activations: int = 0
    elements: list[int] = field(default_factory=lambda: [0, 0])
    reference: list[int] = field(default_factory=lambda: [0, 0])
    reference_steps: int = 0
    validation_loss: float = math.nan

    @property
    def taken(self) -> int:
        """Steps that were taken."""
        return len(self.scales) - len(self.skipped)

    @property
    def mean_scale(self) -> float:
        """The harmonic mean of the loss scale over taken steps: flushing goes with its inverse."""
        skipped = set(self.skipped)
        taken = [s for step, s in enumerate(self.scales, 1) if step not in skipped]
        return len(taken) / sum(1 / s for s in taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--growth-interval", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--results", type=Path, help="also write the runs there, as JSON")
    parser.add_argument("--plot", type=Path, help=f"draw the loss scale, e.g. to {IMAGE}")
    parser.add_argument("--cost", action="store_true", help="time a round of the scaler instead")
    parser.add_argument("--noise", action="store_true", help="follow made-up gradients instead")
    arguments = parser.parse_args()
    print(environment(), flush=True)
    if arguments.cost:
        print(cost())
        return
    if arguments.noise:
        print(noise(arguments.steps, arguments.growth_interval, arguments.seeds))
        return
    tasks = [(kind, seed) for seed in arguments.seeds for kind in SCHEDULES]
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        futures = [
            pool.submit(run, kind, seed, arguments.steps, arguments.growth_interval)
            for kind, seed in tasks
        ]
        runs = [future.result() for future in futures]
    if arguments.results:
        arguments.results.write_text(json.dumps([asdict(r) for r in runs]))
    print(table(runs))
    if arguments.plot:
        plot(runs[: len(SCHEDULES)], arguments.growth_interval, arguments.plot)


def run(schedule: str, seed: int, steps: int, growth_interval: int) -> Run:
    """Train with the launcher, and count."""
    result = Run(schedule, seed)
    with (
        TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        Ranks.join() as ranks,
    ):
        flags = ["--precision", "fp16", "--schedule", schedule, "--seed", seed, "--steps", steps]
        flags += ["--growth-interval", growth_interval, "--run-dir", folder]
        flags += ["--evaluate-every", steps, "--checkpoint-every", steps]
        job = prepare(parse([*map(str, flags), *MODEL]), ranks)
        Counter(job, result)
        with job.report:
            train(job)
        records = read_metrics(Path(folder) / METRICS)
    for record in records:
        if "loss_scale" in record:
            result.scales.append(record["loss_scale"])
            if not record["stepped"]:
                result.skipped.append(record["step"])
        result.validation_loss = record.get("validation_loss", result.validation_loss)
    return result


class Counter:
    """Counts zeros in a job's gradients, from hooks on its model and optimizer."""

    def __init__(self, job: Job, result: Run) -> None:
        self.job = job
        self.result = result
        self.zeros = self.seen = 0
        layers = [module for module in job.run.model.modules() if isinstance(module, nn.Linear)]
        self.parameters = [parameter for layer in layers for parameter in layer.parameters()]
        for layer in layers:
            layer.register_forward_hook(self._watch_output)
        job.run.model.register_forward_pre_hook(self._forget)
        job.run.optimizer.register_step_pre_hook(self._count)

    def _forget(self, *_: object) -> None:
        self.zeros = self.seen = 0

    def _watch_output(self, layer: nn.Module, inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._count_entering)

    def _count_entering(self, gradient: Tensor) -> None:
        # The first position attends to itself alone, so its query's gradient is zero in any dtype.
        gradient = gradient[:, 1:]
        self.zeros += _zeros(gradient)
        self.seen += gradient.numel()

    def _count(self, *_: object) -> None:
        result = self.result
        result.activations += self.zeros
        result.elements[1] += self.seen
        for parameter in self.parameters:
            assert parameter.grad is not None
            result.parameters += _zeros(parameter.grad)
            result.elements[0] += parameter.numel()
        if self.job.run.progress.step % REFERENCE_EVERY == 0:
            self._reference()

    def _reference(self) -> None:
        progress, config = self.job.run.progress, self.job.config
        tokens, targets = self.job.data.take(progress.position, config.batch)
        with torch.enable_grad():
            loss = mean_loss(self.job.run.model(tokens), targets)
            gradients = torch.autograd.grad(loss, self.parameters)
        self.result.reference[0] += sum(map(_zeros, gradients))
        self.result.reference[1] += self.zeros
        self.result.reference_steps += 1


def _zeros(tensor: Tensor) -> int:
    return tensor.numel() - int(tensor.count_nonzero())


def table(runs: list[Run]) -> str:
    """Return the counts of all runs, and their ratios for each seed."""
    header = ["seed", "schedule", "skipped", "mean scale", "zeros: parameters"]
    header += ["zeros: entering layers", "zero in fp32", "validation loss"]
    rows = []
    for r in runs:
        parameters = f"{r.parameters:,} ({_per_million(r.parameters, r.elements[0])})"
        entering = f"{r.activations:,} ({_per_million(r.activations, r.elements[1])})"
        skipped = f"{len(r.skipped)} of {len(r.scales)}"
        cells = [r.seed, r.schedule, skipped, f"2^{math.log2(r.mean_scale):.2f}", parameters]
        cells += [entering, f"{r.reference[0]} and {r.reference[1]}", f"{r.validation_loss:.4f}"]
        rows.append([str(cell) for cell in cells])
    lines = [markdown(header, rows), ""]
    for torchs, ours in zip(runs[::2], runs[1::2], strict=True):
        rates = [
            _ratio(ours.parameters / ours.taken, torchs.parameters / torchs.taken),
            _ratio(ours.activations / ours.taken, torchs.activations / torchs.taken),
        ]
        lines.append(
            f"seed {ours.seed}: {_ratio(len(ours.skipped), len(torchs.skipped))} of torch's skipped"
            f" steps; per taken step {rates[0]} of its zeros in parameters' gradients and"
            f" {rates[1]} in those that enter layers"
        )
    return "\n".join(lines)


def _per_million(count: int, of: int) -> str:
    return f"{1e6 * count / max(1, of):.3g} in a million"


def _ratio(mine: float, peers: float) -> str:
    return f"{mine / peers:.2f}" if peers else f"{mine:g}/0"


def cost() -> str:
    """Time a round (step, update) with both schedules, and plain and fused optimizers."""
    rows = []
    for parameters, elements in ((20, 25_000), (1000, 25_000)):
        for kind in (NoStep, NoFusedStep):
            times = interleave(_rounds(parameters, elements, kind), rounds=12)
            ours, torchs = times["headroom"], times["dynamic"]
            rows.append(
                [
                    f"{parameters:,}",
                    "fused" if kind is NoFusedStep else "plain",
                    f"{1000 * statistics.median(torchs):.3g}",
                    f"{1000 * statistics.median(ours):.3g}",
                    str(ratio(ours, torchs)),
                ]
            )
    header = ["parameters of 25,000", "optimizer", "dynamic, ms", "headroom, ms", "ratio"]
    return markdown(header, rows)


def _rounds(
    parameters: int, elements: int, kind: type[torch.optim.Optimizer]
) -> dict[str, Callable[[], None]]:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    ps = [torch.zeros(elements, device=device, requires_grad=True) for _ in range(parameters)]
    for p in ps:
        p.grad = torch.randn_like(p)
    optimizer = kind(ps)  # type: ignore[call-arg, arg-type]

    def rounds(schedule: Any) -> Callable[[], None]:
        # A scale of 1 leaves the gradients as they are, so nothing has to be restored.
        scaler = DistGradScaler(device.type, init_scale=1.0, schedule=schedule)
        scaler.scale(torch.ones((), device=device))

        def one() -> None:
            scaler.step(optimizer)
            scaler.update()

        return one

    bounds = {"min_scale": 1.0, "max_scale": 1.0}
    kinds = {"dynamic": DynamicSchedule, "headroom": HeadroomSchedule}
    return {name: rounds(schedule(**bounds)) for name, schedule in kinds.items()}


def noise(steps: int, growth_interval: int, seeds: list[int]) -> str:
    """Follow gradients whose largest is log-normal, and count overflows and the scale."""
    header = ["noise, octaves", "torch's overflows", "headroom's", "headroom's scale / torch's"]
    rows = []
    for octaves in (0.1, 0.2, 0.3, 0.5, 0.8):
        totals = {}
        for kind in (DynamicSchedule, HeadroomSchedule):
            overflows, inverse = 0, 0.0
            for seed in seeds:
                draws = torch.randn(steps, generator=torch.Generator().manual_seed(seed))
                sizes = (0.1 * 2.0 ** (octaves * draws)).tolist()
                # torch's scale is a power of two, so where the limit lies between two matters.
                start = 2.0 ** (16 + seed / max(1, len(seeds)))
                skipped, mean = _follow(kind(growth_interval=growth_interval), sizes, start)
                overflows += skipped
                inverse += mean
            totals[kind] = overflows / len(seeds), inverse
        (theirs, their_inverse), (ours, our_inverse) = totals.values()
        rows.append(
            [f"{octaves}", f"{theirs:.1f}", f"{ours:.1f}", f"{their_inverse / our_inverse:.2f}"]
        )
    return markdown(header, rows)


def _follow(schedule: Schedule, sizes: list[float], scale: float) -> tuple[int, float]:
    """Return the overflows, and the mean of the inverse scale over taken steps."""
    cpu = torch.device("cpu")
    state = ScaleState.initial(scale, 0, schedule.initial_hysteresis, cpu, schedule.initial_memory)
    overflows, inverse = 0, 0.0
    for size in sizes:
        now = state.scale.item()
        overflow = now * size > torch.finfo(torch.float16).max
        overflows += overflow
        inverse += 0.0 if overflow else 1 / now
        largest = math.inf if overflow else now * size
        state = schedule.next_state(state, torch.tensor(float(overflow)), torch.tensor(largest))
    return overflows, inverse / (len(sizes) - overflows)


def plot(runs: list[Run], growth_interval: int, path: Path) -> None:
    """Draw the loss scale of one seed's runs, one above the other, with the skipped steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    titles = {"dynamic": "torch's rule", "headroom": "HeadroomSchedule"}
    figure, axes = plt.subplots(
        len(runs), 1, figsize=(8, 5), sharex=True, sharey=True, layout="constrained"
    )
    for axis, r in zip(axes, runs, strict=True):
        steps = range(1, len(r.scales) + 1)
        axis.step(steps, r.scales, where="post", color="#1f5fae", lw=1.2)
        axis.axhline(r.mean_scale, color="#9a9a9a", lw=0.8, ls="--")
        scales = [r.scales[step - 1] for step in r.skipped]
        axis.plot(r.skipped, scales, "x", color="#8c1d18", ms=6)
        axis.set_title(f"{titles[r.schedule]}: {len(r.skipped)} skipped steps", loc="left", size=10)
        axis.set_yscale("log", base=2)
        axis.set_ylabel("loss scale")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6e6e6", lw=0.6)
        axis.set_axisbelow(True)
    axes[-1].set_xlabel(
        f"step (x: skipped; dashed: harmonic mean; growth interval {growth_interval})"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
