"""Train a model in mixed precision: ``torchrun --nproc-per-node 2 launch/train.py``."""

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if not __package__:
    # This file runs as a script, so the packages of the repository are one folder above it.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
if missing := [
    name for name in ("cyclopts", "pydantic", "rich", "matplotlib") if find_spec(name) is None
]:
    sys.exit(f"error: {missing[0]} is not installed. Run pip install -e '.[train]'.")

import torch
from torch import Tensor

from distamp.report import StepReplay
from launch.checkpoint import Checkpoints
from launch.config import Config, parse, to_seconds
from launch.data import Batch, Data, batch_indices, load_batches, load_data
from launch.evaluate import evaluate
from launch.job import Job, Progress, make_job, try_start
from launch.metrics import Metrics
from launch.model import loss_function
from launch.optim import LRSchedule, shard_mesh
from launch.parallel import Layout, pick_device, process_group
from launch.program import (
    StopCheck,
    UsageError,
    die_with_parent,
    run_to_exit_code,
    watch_for_stop,
)
from launch.rewind import RUN_IS_BAD, Rewinds


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line on this rank and return the exit code."""

    def program() -> None:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent()
        config = parse(args)
        with watch_for_stop(to_seconds(config.max_time)) as check_stop:
            run(config, check_stop)

    return run_to_exit_code(program)


def run(config: Config, check_stop: StopCheck) -> None:
    """Train from the start or from a checkpoint, or do a dry run.

    Collective: every rank must call this.

    Args:
        config: The flags.
        check_stop: Returns whether a signal has asked this rank to stop, and the remaining seconds.

    Raises:
        UsageError: The run is refused, on every rank.
    """
    data = load_data(config)
    device = pick_device(config)
    if config.dry_run and not config.has_all_ranks:
        print(dry_run_report(config, data, try_start(config, data, device)))
        return
    with process_group(config):
        job = make_job(config, data, Layout.from_config(config, device), device)
        # The ranks have the same weights now. Their dropout must differ.
        torch.manual_seed(config.seed + 1 + job.layout.data_rank)
        checkpoints = Checkpoints(job)
        if config.resume is not None:
            checkpoints.read(config.resume)
        if config.dry_run:
            evaluate(job, examples=1)
            report = dry_run_report(config, data, start_steps(config))
            job.layout.run_on_first_rank(lambda: print(report))
            return
        # Metrics empties the folder of the run, so every refusal must come before.
        with Metrics(job) as metrics:
            train(job, checkpoints, metrics, check_stop)


def start_steps(config: Config) -> list[str]:
    """List the steps of `run` before the folder of the run is opened, as phrases for the user."""
    steps = [f"built the model {config.model} on every rank"]
    steps.append(f"made the optimizer {config.optimizer}")
    steps.append(f"called initialize at precision {config.precision}")
    if config.resume is not None:
        steps.append(f"read the checkpoint {config.resume}")
    steps.append("evaluated the model on one held-out example")
    return steps


def dry_run_report(config: Config, data: Data, steps: Sequence[str]) -> str:
    """Return the report of a dry run, with the steps that were done and the checks left out."""
    world_size = config.world_size
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    train_size, held_out_size = len(data.train), len(data.held_out)
    lines = [f"The dry run found no fault: these flags can run on {ranks}."]
    sizes = f"{train_size:,} examples and {held_out_size:,} held-out examples"
    lines.append(f"It read {data.name}, which has {sizes}.")
    for step in steps:
        lines.append(f"It {step}.")
    folder = config.run_dir
    lines.append(f"It wrote nothing, and did not test whether {folder} can be written to.")
    if not config.has_all_ranks:
        lines.append(
            f"It ran in one process. Start it with torchrun --nproc-per-node {world_size} to "
            "also check DDP, sharding, communication hooks, initialize on the wrapped model and "
            "the checkpoint of --resume."
        )
    return "\n".join(lines)


def train(job: Job, checkpoints: Checkpoints, metrics: Metrics, check_stop: StopCheck) -> None:
    """Train to the last step, or until a rank is asked to stop."""
    config, amp, layout, progress = job.config, job.amp, job.layout, job.progress
    taken_before = progress.step - progress.skipped
    schedule = LRSchedule(config, amp.optimizers, job.device, taken_before)
    replay = None
    if config.on_nonfinite == "report":
        replay = StepReplay(job.model).attach(amp.scaler)
    rewinds = Rewinds(job, schedule)
    batches = training_batches(job)
    taken_flags: list[Tensor] = []  # of the steps since the last record, on the device
    stop_reason = ""
    if progress.step == 0:
        metrics.record({"step": 0, **evaluate(job, config.eval_examples)})

    while progress.step < config.steps and not stop_reason:
        job.model.train()
        lr = schedule.set_lr()
        progress.step += 1
        progress.position += config.global_batch_size
        tasks = due_tasks(config, progress.step)
        # The host waits for the device only in a step that has a record.
        scale = amp.scaler.get_scale() if tasks else 1.0
        microbatches = [next(batches) for _ in range(config.accumulate)]
        step_function = train_step
        if config.check_precision and progress.step == 1:
            step_function = train_checked_step
        try:
            loss, taken = step_function(job, metrics, microbatches, replay)
            schedule.advance(taken)
            job.average.update(taken)
            amp.zero_grad()
            if rewinds.is_enabled and "save" in tasks:
                check_state(job)
            # Last, because it ends the iteration: a later error would count one step too many.
            rewinds.record()
        except RUN_IS_BAD as error:
            rewound = rewinds.go_back(error)
            progress.skipped = progress.step - int(schedule.taken)
            metrics.record(rewind_record(progress, rewound, error))
            taken_flags.clear()
            if config.keep_checkpoints and progress.step == config.steps:
                save(job, checkpoints, metrics, is_last=True)
            continue
        taken_flags.append(taken)
        if not tasks:
            continue

        # One message adds up the losses and the ranks that are to stop.
        has_signal, seconds = check_stop()
        loss_sum, num_signals, num_late = layout.all_reduce_sum(loss, has_signal, seconds <= 0)
        progress.skipped = progress.step - int(schedule.taken)
        record = {
            "step": progress.step,
            "loss": loss_sum / layout.data_world_size,
            "gradient_norm": float(amp.scaler.grad_norm()),
            "learning_rate": float(lr),
            "taken": bool(taken),
            "skipped": progress.skipped,
            "skipped_steps": list_skipped_steps(taken_flags, progress.step),
        }
        taken_flags.clear()
        if config.level.scales:
            record["loss_scale"] = scale
        metrics.record(record, seconds)
        if num_signals:
            stop_reason = "a signal asked it to stop"
        elif num_late:
            stop_reason = "--max-time is over"
        is_last = bool(stop_reason) or progress.step == config.steps
        # After a signal there may be little time, so only --max-time is followed by an evaluation.
        if "eval" in tasks or num_late:
            metrics.record({"step": progress.step, **evaluate(job, config.eval_examples)})
        if config.keep_checkpoints and ("save" in tasks or is_last):
            save(job, checkpoints, metrics, is_last=is_last)
        metrics.start_clock()
    for hook in amp.comm_hooks:
        metrics.print_line(f"The communication hook of rank 0 counted {hook.stats()}.")
    metrics.print_summary(stop_reason)


def training_batches(job: Job) -> Iterator[Batch]:
    """Return the microbatches of this rank, from the position of the run on."""
    config, layout = job.config, job.layout
    indices = batch_indices(
        length=len(job.data.train),
        seed=config.seed,
        position=job.progress.position,
        batch_size=job.microbatch_size,
        rank=layout.data_rank,
        world_size=layout.data_world_size,
    )
    return load_batches(job.data.train, indices, job.device, config.workers)


def due_tasks(config: Config, step: int) -> set[str]:
    """Return the tasks after a step: log, eval and save. Every task also writes a record."""
    intervals = {"log": config.log_every, "eval": config.eval_every, "save": config.save_every}
    if step == config.steps:
        return set(intervals)
    return {task for task, interval in intervals.items() if step % interval == 0}


def list_skipped_steps(taken_flags: Sequence[Tensor], last_step: int) -> list[int]:
    """Return the numbers of the skipped steps among the last steps."""
    first_step = last_step - len(taken_flags) + 1
    flags = torch.stack(list(taken_flags)).tolist()
    return [step for step, taken in enumerate(flags, first_step) if not taken]


def rewind_record(progress: Progress, rewound: int, error: Exception) -> dict[str, Any]:
    """Return the record of a rewind.

    The steps that were taken back count as skipped, as does the step under way.

    Args:
        progress: The progress of the run, with the step under way.
        rewound: The number of steps that were taken back.
        error: The error after which the run went back.
    """
    return {
        "step": progress.step,
        "rewound": rewound,
        "error": type(error).__name__,
        "skipped": progress.skipped,
        "skipped_steps": list(range(progress.step - rewound, progress.step + 1)),
    }


def run_passes(job: Job, microbatches: Sequence[Batch]) -> Tensor:
    """Run the forward and backward passes of a step and return the loss."""
    total = torch.zeros((), device=job.device)
    for number, batch in enumerate(microbatches, 1):
        is_last = number == len(microbatches)
        with nullcontext() if is_last else job.amp.no_sync():
            with job.amp.autocast():
                outputs = job.model(*batch.inputs, **batch.kwargs)
            loss = loss_function(job.model)(outputs, batch.targets) / len(microbatches)
            job.amp.backward(loss)
        total += loss.detach()
    return total


def train_step(
    job: Job, metrics: Metrics, microbatches: Sequence[Batch], replay: StepReplay | None
) -> tuple[Tensor, Tensor]:
    """Run one step: the forward and backward passes, clipping, and the optimizers.

    Returns:
        The loss of this rank's examples, and a flag that is true if the step was taken. Both are on
        the device.
    """
    config = job.config
    if replay is not None:
        replay.record(lambda: run_passes(job, microbatches), *map(vars, microbatches))
        replay.found = None
    loss = run_passes(job, microbatches)
    result = job.amp.step(
        max_norm=config.max_grad_norm or math.inf,
        skip_norm_above=config.skip_norm_above or None,
        shard_group_fn=shard_mesh,
    )
    if replay is not None and replay.found is not None:
        metrics.write_nonfinite_origin(replay.found)
    return loss, result.taken


def train_checked_step(
    job: Job, metrics: Metrics, microbatches: Sequence[Batch], replay: StepReplay | None
) -> tuple[Tensor, Tensor]:
    """Run one step and compare its precisions with the promises of the level."""
    results: list[tuple[Tensor, Tensor]] = []

    def step() -> None:
        results.append(train_step(job, metrics, microbatches, replay))

    violations = job.amp.check(step)
    path = job.config.run_dir / "precision.txt"
    job.layout.run_on_first_rank(lambda: path.write_text(f"{violations}\n", "utf-8"))
    for violation in violations:
        metrics.print_line(f"Warning: --precision {job.config.precision}: {violation}")
    return results[0]


def check_state(job: Job) -> None:
    """Check that a checkpoint of the run may be written.

    Collective: every rank must call this.

    Raises:
        NonFiniteWeightsError: Weights or the state of an optimizer have inf or NaN.
        ReplicaMismatchError: Replicas differ, with ``--on-mismatch raise``.
    """
    job.amp.scaler.check_weights()
    if job.config.check_replicas_every:
        job.amp.scaler.check_replicas()


def save(job: Job, checkpoints: Checkpoints, metrics: Metrics, *, is_last: bool) -> None:
    """Write a checkpoint. Only a failure of the last one ends the run.

    Raises:
        UsageError: The last checkpoint of the run cannot be written, the weights or the state of an
            optimizer have inf or NaN, or replicas differ.
    """
    try:
        check_state(job)
    except RUN_IS_BAD as error:
        raise UsageError(
            f"no checkpoint of step {job.progress.step} was written: {error}"
        ) from None
    try:
        checkpoints.wait()
    except UsageError as error:
        # The checkpoint before this one has failed, and this one replaces it.
        metrics.print_line(f"Warning: {error}")
    try:
        checkpoints.save()
        if is_last:
            checkpoints.wait()
    except UsageError as error:
        if is_last:
            raise
        metrics.print_line(f"Warning: {error}. The run continues and saves again later.")
        return
    is_pending = job.config.async_save and not is_last
    state = "being written" if is_pending else "written"
    step, steps = job.progress.step, job.config.steps
    metrics.print_line(f"step {step:>{len(str(steps))}}/{steps}  checkpoint {state}")


if __name__ == "__main__":
    sys.exit(main())
