"""Train a model in mixed precision: ``torchrun --nproc-per-node 2 launch/train.py``."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

if not __package__:  # run as a script: the folder above holds the packages, this one does not
    sys.path[0] = str(Path(__file__).resolve().parents[1])
if missing := [name for name in ("tyro", "rich", "matplotlib") if find_spec(name) is None]:
    if os.environ.get("RANK", "0") == "0":
        print(f"error: no {missing[0]} here; pip install -e '.[train]' brings it", file=sys.stderr)
    sys.exit(2)

import torch

from launch.command_line import read
from launch.config import Config
from launch.errors import UsageError
from launch.job import Job, prepare
from launch.lost_rank import LostRank
from launch.models import mean_loss
from launch.ranks import Ranks
from launch.stopping import Preempted, Stop
from launch.strategies import needs_group


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line on this rank; return the exit code."""
    given = read(args, quiet=os.environ.get("RANK", "0") != "0")
    config = given if isinstance(given, Config) else Config()
    group = Ranks.join(config.backend, config.timeout, always=needs_group(config))
    with Stop(config.max_minutes).listening() as stop, group as ranks:
        try:
            run(given, ranks, stop)
        except UsageError as error:
            return ranks.fail(error)
        except LostRank as lost:
            return ranks.report_lost_rank(lost)
        except Preempted as preempted:
            ranks.leave()
            return preempted.code
        except KeyboardInterrupt:  # a second Ctrl-C
            ranks.leave()
            return 128 + signal.SIGINT
    return 0


def run(given: Config | UsageError, ranks: Ranks, stop: Stop) -> None:
    """Make the job ready and train; when this returns, nothing holds the model any more."""
    with ranks.watching(lambda: "before the first step"):
        job = prepare(given, ranks, stop)
    with job.report, ranks.watching(lambda: job.position):
        with job.trace:
            train(job)
        job.report.finish(job.summary())


def train(job: Job) -> None:
    """Train to the last step, writing results and checkpoints on the way."""
    config, ranks, device, run = job.config, job.ranks, job.device, job.run
    amp, parallel, progress, span = run.amp, run.parallel, run.progress, job.trace.span

    if progress.step == 0:
        job.validated(validate(job))
    with job.batches() as batches:
        while progress.step < config.steps:
            parallel.model.train()
            rate = job.steps.learning_rate()
            for group in run.optimizer.param_groups:
                group["lr"] = rate
            loss_sum = torch.zeros((), device=device)
            with job.precision_report():
                for microbatch in range(config.accumulate):
                    with span("data"):
                        inputs, targets = next(batches)
                    reduces = microbatch == config.accumulate - 1
                    with nullcontext() if reduces else amp.no_sync():
                        with span("forward"):
                            with amp.autocast():
                                logits = parallel.model(inputs)
                            loss = mean_loss(logits, targets) / config.accumulate
                        with span("backward"):
                            amp.backward(loss)
                    loss_sum += loss.detach()

            progress.step += 1
            progress.position += config.batch
            due = job.due()
            # Where no record is written, nothing below waits for the device or another rank.
            scale = amp.scaler.get_scale() if due.record else None
            with span("step"):
                norm = amp.clip_grad_norm_(config.clip or math.inf)
                stepped = job.steps.count(amp.step().taken, wait=due.record)
                if stepped is False:
                    run.count_overflow()
            amp.zero_grad()

            if due.record:
                # The message that the loss needs also says whether any rank was asked to stop.
                loss_total, asked_to_stop = ranks.sum(loss_sum, job.stop.asked)
                record = {
                    "step": progress.step,
                    **job.losses(loss_total / ranks.world_size),
                    "loss_scale": scale,
                    "stepped": stepped,
                    "skipped": progress.skipped,
                    "gradient_norm": float(norm),
                    "learning_rate": float(rate),
                }
                job.recorded(record)
                if due.validation:
                    job.validated(validate(job))
                if due.checkpoint or asked_to_stop:
                    job.save(must=due.last or asked_to_stop > 0)
                if asked_to_stop and not due.last:
                    raise job.stopped()
            job.trace.step()


@torch.no_grad()
def validate(job: Job) -> dict[str, float]:
    """Return loss and accuracy over the held-out examples, shared among the ranks."""
    config, ranks, device, parallel = job.config, job.ranks, job.device, job.run.parallel
    inputs, targets = job.data.validation(config.validation_windows)
    parallel.model.eval()
    loss_sum, right, count = 0.0, 0.0, 0
    # Sharded models need every rank in each pass: one that has run out repeats the last examples,
    # and counts them for nothing.
    world, rank = parallel.dp_world_size, parallel.dp_rank
    for start in range(0, len(inputs), 32 * world):
        mine = torch.arange(start, start + 32 * world)[rank::world]
        new = int((mine < len(inputs)).sum())
        mine = mine.clamp(max=len(inputs) - 1)[: max(1, new)]
        with job.run.amp.autocast():
            logits = parallel.model(inputs[mine].to(device))
        expected = targets[mine].to(device)
        loss_sum += float(mean_loss(logits, expected)) * new
        right += float((logits.argmax(-1) == expected).float().mean()) * new
        count += new
    loss_total, right_total, total = ranks.sum(loss_sum, right, count)
    losses = job.losses(loss_total / total)
    return {
        "step": job.run.progress.step,
        **{f"validation_{name}": value for name, value in losses.items()},
        "validation_accuracy": right_total / total,
    }


if __name__ == "__main__":
    sys.exit(main())
