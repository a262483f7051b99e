"""Train a model in mixed precision: ``torchrun --nproc-per-node 2 launch/train.py``."""

import copy
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the folder above holds the packages, this one does not
    sys.path[0] = str(Path(__file__).resolve().parents[1])
if missing := [name for name in ("tyro", "rich", "matplotlib") if find_spec(name) is None]:
    sys.exit(f"error: no {missing[0]} here; pip install -e '.[train]' brings it")

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from distamp import cast_model, initialize
from distamp.initialize import Amp
from distamp.scaler import DynamicSchedule
from launch.checkpoint import Checkpoints, State
from launch.config import Config, parse
from launch.data import Data, Order, batches, load_data
from launch.evaluate import evaluate
from launch.folder import checkpoint_of
from launch.metrics import Metrics, Record
from launch.model import build, fill, is_empty, loss_of
from launch.optim import Rates, make_optimizers
from launch.parallel import (
    Layout,
    cut_over,
    join,
    parallelize,
    pick_device,
    prepare_blocks,
    settle,
)
from launch.stop import die_with_parent, listening
from launch.usage import UsageError, refusing, require


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line on this rank; return the exit code."""

    def body() -> None:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent()
        config = parse(args)
        with listening(config.max_time) as asked:
            run(config, asked)

    return refusing(body)


def run(config: Config, asked: Callable[[], bool]) -> None:
    """Train from the start, or from a checkpoint, to the last step.

    Raises:
        UsageError: It cannot be done, as every rank finds.
    """
    data, device, resume = load_data(config), pick_device(config), start_from(config)
    with join(config):
        job = make_ready(config, data, device, resume)
        try:
            train(job, asked)
        finally:
            job.metrics.close()


def start_from(config: Config) -> Path | None:
    """Return the checkpoint to go on from, if there is to be one.

    Raises:
        UsageError: There is none, or another run is in the way.
    """
    resume = None if config.resume is None else checkpoint_of(config.resume)[1]
    there = next(p for p in (config.run_dir, *config.run_dir.absolute().parents) if p.exists())
    writable = there.is_dir() and os.access(there, os.W_OK)
    require(writable, f"--run-dir {config.run_dir}: {there} cannot be written to")
    begun = (config.run_dir / "metrics.jsonl").exists()
    free = config.goes_on or config.overwrite or not begun
    hint = f"--resume {config.run_dir} goes on with it, --overwrite starts again"
    require(free, f"--run-dir {config.run_dir}: it has a run; {hint}")
    return resume


@dataclass
class Job:
    """All that the loop works with."""

    config: Config
    data: Data
    device: torch.device
    layout: Layout
    model: nn.Module
    amp: Amp
    state: State
    checkpoints: Checkpoints
    metrics: Metrics


def make_ready(config: Config, data: Data, device: torch.device, resume: Path | None) -> Job:
    """Make the model and all that trains it, or read it from a checkpoint."""
    layout = Layout.of(config, device)
    inner = make_model(config, data, layout, device)
    optimizers = make_optimizers(inner, config)
    state = State(inner, optimizers)
    model = settle(inner, layout, data.train[0][0], device)
    amp = make_amp(model, optimizers, config, layout)
    torch.manual_seed(config.seed + 1 + layout.data_rank)
    if config.ema:
        state.ema = {name: weight.clone() for name, weight in state.weights().items()}
    checkpoints = Checkpoints(config, layout, state, amp, device)
    if resume is not None:
        checkpoints.read(resume)
    # Nothing in the run's folder changes before this.
    metrics = Metrics(config, data, inner, layout, device, state.progress.step)
    return Job(config, data, device, layout, model, amp, state, checkpoints, metrics)


def make_model(config: Config, data: Data, layout: Layout, device: torch.device) -> nn.Module:
    """Build the model, cast and sharded, and draw its weights; no rank ever has all of them."""
    made = build(config, data)
    model = copy.deepcopy(made) if is_empty(made) else made.to(device)
    if layout.shard * layout.tp == 1 or not config.level.master_weights:
        cast_model(model, config.level)
    prepare_blocks(model, config)
    parallelize(model, config, layout, device)
    if is_empty(made):
        fill(model, made, config.seed, device)
    return model


def make_amp(model: nn.Module, optimizers: list[Optimizer], config: Config, layout: Layout) -> Amp:
    """Set up mixed precision by distamp's one call.

    Raises:
        UsageError: distamp refuses it; with its reason.
    """
    scale: dict[str, Any] = {}
    if config.level.loss_scale == "dynamic":
        schedule = DynamicSchedule(growth_interval=config.growth_interval)
        scale = {"init_scale": config.init_scale, "schedule": schedule}
    if config.hook:
        scale |= {"comm_hook": config.hook, "replicas": layout.replicas}
    try:
        return initialize(model, optimizers, config.level, **scale)
    except (ValueError, RuntimeError) as error:
        hook = f" --hook {config.hook}" if config.hook else ""
        raise UsageError(f"--precision {config.precision}{hook}: {error}") from None


def read_ahead(job: Job) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's microbatches, from where the run is."""
    config, layout = job.config, job.layout
    count = config.batch // (layout.data_world * config.accumulate)
    where = layout.data_rank, layout.data_world
    order = Order(len(job.data.train), config.seed, job.state.progress.position, count, *where)
    return batches(job.data.train, order, job.device, config.workers)


def train(job: Job, asked: Callable[[], bool]) -> None:
    """Train to the last step, or until a rank is asked to stop."""
    config, model, amp, state = job.config, job.model, job.amp, job.state
    layout, progress, metrics = job.layout, job.state.progress, job.metrics
    rates = Rates(config, state.optimizers, job.device, progress.step - progress.skipped)
    average = get_ema_multi_avg_fn(config.ema)
    source = read_ahead(job)
    ended = False
    if progress.step == 0:
        metrics.note(validate(job))

    while progress.step < config.steps and not ended:
        model.train()
        rate = rates.set()
        total = torch.zeros((), device=job.device)
        for microbatch in range(1, config.accumulate + 1):
            inputs, targets = next(source)
            with nullcontext() if microbatch == config.accumulate else amp.no_sync():
                with amp.autocast():
                    outputs = model(inputs)
                loss = loss_of(model)(outputs, targets) / config.accumulate
                amp.backward(loss)
            total += loss.detach()

        progress.step += 1
        progress.position += config.batch
        due = what_is_due(config, progress.step)
        # Where no record is due, nothing below waits for the device.
        scale = amp.scaler.get_scale() if due else 1.0
        norm = amp.clip_grad_norm_(config.clip or math.inf, sharded=cut_over)
        taken = amp.step().taken
        rates.count(taken)
        if config.ema and taken:
            average([*state.ema.values()], [*state.weights().values()], 0)
        amp.zero_grad()

        if due:
            # One message has the loss, and whether any rank was asked to end.
            loss_sum, several = layout.sum(total, asked())
            progress.skipped = progress.step - int(rates.taken)
            record = {"step": progress.step, "loss": loss_sum / layout.data_world}
            record |= {"gradient_norm": float(norm), "learning_rate": float(rate)}
            if config.level.scales:
                record |= {"loss_scale": scale, "taken": bool(taken), "skipped": progress.skipped}
            metrics.note(record)
            refuse_nan(config, record)
            ended = several > 0
            if "eval" in due:
                metrics.note(validate(job))
            if "save" in due or ended:
                save(job, must=ended or progress.step == config.steps)
            metrics.start_clock(progress.step)
    job.checkpoints.wait()
    for hook in amp.comm_hooks:
        metrics.say(f"gradients: {hook.stats()}")
    metrics.summarize(ended, progress.step, progress.skipped)


def what_is_due(config: Config, step: int) -> set[str]:
    """Return what is due after a step; a record is, wherever anything is."""
    every = {"log": config.log_every, "eval": config.eval_every, "save": config.save_every}
    return {name for name, steps in every.items() if step % steps == 0 or step == config.steps}


def validate(job: Job) -> Record:
    """Return a record of the loss over held-out examples."""
    found = evaluate(job.model, job.data, job.config, job.amp.autocast(), job.layout, job.device)
    return {"step": job.state.progress.step, **found}


def save(job: Job, *, must: bool) -> None:
    """Write a checkpoint; a failure ends the run only if there will be no other time.

    Raises:
        UsageError: It cannot be written, and must be.
    """
    try:
        job.checkpoints.save()
        if must:
            job.checkpoints.wait()
    except UsageError as error:
        if must:
            raise
        job.metrics.say(f"Warning: {error}; the run goes on, and tries again at the next save")


def refuse_nan(config: Config, record: Record) -> None:
    """End a run that has diverged, before its next checkpoint; in fp16 such a step was skipped.

    Raises:
        UsageError: On every rank.
    """
    fine = config.level.scales or math.isfinite(record["loss"])
    lost = f"step {record['step']}: the loss is {record['loss']}, at a learning rate of"
    require(fine, f"{lost} {record['learning_rate']:g}; a smaller --lr may help")


if __name__ == "__main__":
    sys.exit(main())
