"""Train a model in mixed precision: ``torchrun --nproc-per-node 2 launch/train.py``."""

import math
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

if not __package__:  # run as a script: the folder above holds the packages, this one does not
    sys.path[0] = str(Path(__file__).resolve().parents[1])
if missing := [
    name for name in ("cyclopts", "pydantic", "rich", "matplotlib") if find_spec(name) is None
]:
    sys.exit(f"error: no {missing[0]} here; pip install -e '.[train]' brings it")

import torch
from torch import Tensor

from distamp.errors import NonFiniteGradientsError
from distamp.report import StepReplay
from launch.checkpoint import Checkpoints
from launch.config import Config, parse, to_seconds
from launch.data import Batch, Data, batch_indices, load_batches, load_data
from launch.evaluate import evaluate
from launch.job import Job, make_job, try_start
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


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line on this rank; return the exit code."""

    def program() -> None:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent()
        config = parse(args)
        with watch_for_stop(to_seconds(config.max_time)) as check_stop:
            run(config, check_stop)

    return run_to_exit_code(program)


def run(config: Config, check_stop: StopCheck) -> None:
    """Train from the start, or from a checkpoint, to the last step.

    Args:
        config: The flags.
        check_stop: Whether this rank is, by a signal, and the seconds until the clock does.

    Raises:
        UsageError: The run was refused, on every rank.
    """
    data = load_data(config)
    device = pick_device(config)
    if config.dry_run and not config.has_all_ranks:
        print(dry_run_report(config, data, try_start(config, data, device)))
        return
    with process_group(config):
        job = make_job(config, data, Layout.of(config, device), device)
        # After all that is alike on the ranks: dropout draws other numbers on each.
        torch.manual_seed(config.seed + 1 + job.layout.data_rank)
        checkpoints = Checkpoints(job)
        if config.resume is not None:
            checkpoints.read(config.resume)
        if config.dry_run:
            evaluate(job, examples=1)
            report = dry_run_report(config, data, start_steps(config))
            job.layout.run_on_first_rank(lambda: print(report))
            return
        # Metrics opens the folder of the run, which a refusal above must leave unchanged.
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
    ranks = "1 rank" if config.world_size == 1 else f"{config.world_size} ranks"
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
            "It ran in one process. Start it with torchrun --nproc-per-node "
            f"{config.world_size} to also check DDP, sharding, communication hooks, initialize on "
            "the wrapped model and the checkpoint of --resume."
        )
    return "\n".join(lines)


def train(job: Job, checkpoints: Checkpoints, metrics: Metrics, check_stop: StopCheck) -> None:
    """Train to the last step, or until a rank is asked to stop."""
    config, amp, layout, progress = job.config, job.amp, job.layout, job.progress
    examples = job.data.train
    rates = LRSchedule(config, amp.optimizers, job.device, progress.step - progress.skipped)
    replay = None
    if config.on_nonfinite == "report":
        replay = StepReplay(job.model).attach(amp.scaler)
    ranks = layout.data_rank, layout.data_world_size
    chosen = batch_indices(
        len(examples), config.seed, progress.position, job.microbatch_size, *ranks
    )
    source = load_batches(examples, chosen, job.device, config.workers)
    ended = ""
    if progress.step == 0:
        metrics.note({"step": 0, **evaluate(job, config.eval_examples)})

    while progress.step < config.steps and not ended:
        job.model.train()
        rate = rates.set()
        progress.step += 1
        progress.position += config.global_batch_size
        tasks = due_tasks(config, progress.step)
        # Without a record to write, nothing here waits for the device.
        scale = amp.scaler.get_scale() if tasks else 1.0
        microbatches = [next(source) for _ in range(config.accumulate)]
        do_step = train_step
        if config.check_precision and progress.step == 1:
            do_step = train_checked_step
        loss, taken = do_step(job, metrics, microbatches, replay)
        rates.count(taken)
        job.average.count(taken)
        amp.zero_grad()

        if tasks:
            # One message has the loss, and how many ranks are to end.
            has_signal, seconds = check_stop()
            loss_sum, signalled, late = layout.sum(loss, has_signal, seconds <= 0)
            progress.skipped = progress.step - int(rates.taken)
            record = {
                "step": progress.step,
                "loss": loss_sum / layout.data_world_size,
                "gradient_norm": float(amp.scaler.grad_norm()),
                "learning_rate": float(rate),
                "taken": bool(taken),
                "skipped": progress.skipped,
            }
            if config.level.scales:
                record["loss_scale"] = scale
            metrics.note(record, seconds)
            if signalled:
                ended = "asked to stop"
            elif late:
                ended = "--max-time is over"
            is_last = bool(ended) or progress.step == config.steps
            if "eval" in tasks or late:  # whoever sent a signal does not wait for long
                metrics.note({"step": progress.step, **evaluate(job, config.eval_examples)})
            if config.keep_checkpoints and ("save" in tasks or is_last):
                save(job, checkpoints, metrics, must=is_last)
            metrics.start_clock()
    for hook in amp.comm_hooks:
        metrics.say(f"gradients: {hook.stats()}")
    metrics.summarize(ended=ended)


def run_passes(job: Job, microbatches: Sequence[Batch]) -> Tensor:
    """Do the forward and backward passes of a step; return the loss."""
    total = torch.zeros((), device=job.device)
    for number, batch in enumerate(microbatches, 1):
        with nullcontext() if number == len(microbatches) else job.amp.no_sync():
            with job.amp.autocast():
                outputs = job.model(*batch.inputs, **batch.kwargs)
            loss = loss_function(job.model)(outputs, batch.targets) / len(microbatches)
            job.amp.backward(loss)
        total += loss.detach()
    return total


def train_step(
    job: Job, metrics: Metrics, microbatches: Sequence[Batch], replay: StepReplay | None
) -> tuple[Tensor, Tensor]:
    """Do one step: forward and backward passes, clip, and the optimizers.

    Returns:
        The loss of this rank's examples, and whether the step was taken; both on the device.
    """
    config = job.config
    if replay is not None:
        replay.record(lambda: run_passes(job, microbatches), *map(vars, microbatches))
        replay.found = None
    loss = run_passes(job, microbatches)
    max_norm = config.max_grad_norm or math.inf
    skip_norm_above = config.skip_norm_above or None
    try:
        taken = job.amp.step(
            max_norm=max_norm, skip_norm_above=skip_norm_above, shard_group_fn=shard_mesh
        ).taken
    except NonFiniteGradientsError as error:
        where = "--on-nonfinite report says" if replay is None else "nonfinite.jsonl says"
        what, _, _ = str(error).partition(". ")
        raise UsageError(
            f"step {job.progress.step}: {what}; {where} where inf or NaN came from, and a smaller "
            "--lr may help"
        ) from None
    if replay is not None and replay.found is not None:
        metrics.blame(replay.found)
    return loss, taken


def train_checked_step(
    job: Job, metrics: Metrics, microbatches: Sequence[Batch], replay: StepReplay | None
) -> tuple[Tensor, Tensor]:
    """Do one step, and compare the precisions that ran with what the level promises."""
    outcomes: list[tuple[Tensor, Tensor]] = []
    violations = job.amp.check(
        lambda: outcomes.append(train_step(job, metrics, microbatches, replay))
    )
    path = job.config.run_dir / "precision.txt"
    job.layout.run_on_first_rank(lambda: path.write_text(f"{violations}\n", "utf-8"))
    for violation in violations:
        metrics.say(f"Warning: --precision {job.config.precision}: {violation}")
    return outcomes[0]


def due_tasks(config: Config, step: int) -> set[str]:
    """Return what to do after a step; a record is written wherever anything is done."""
    every = {"log": config.log_every, "eval": config.eval_every, "save": config.save_every}
    return {name for name, steps in every.items() if step % steps == 0 or step == config.steps}


def save(job: Job, checkpoints: Checkpoints, metrics: Metrics, *, must: bool) -> None:
    """Write a checkpoint; a failure ends the run only if there will be no other time.

    Raises:
        UsageError: It cannot be written, and must be.
    """
    try:
        checkpoints.wait()
    except UsageError as error:  # of the one before, in whose place comes this one
        metrics.say(f"Warning: {error}")
    try:
        checkpoints.save()
        if must:
            checkpoints.wait()
    except UsageError as error:
        if must:
            raise
        metrics.say(f"Warning: {error}; the run goes on, and tries again at the next save")
    else:
        written = "written" if must or not job.config.async_save else "being written"
        step, steps = job.progress.step, job.config.steps
        metrics.say(f"step {step:>{len(str(steps))}}/{steps}  checkpoint {written}")


if __name__ == "__main__":
    sys.exit(main())
