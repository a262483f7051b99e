"""Train a byte-level GPT in mixed precision: ``torchrun --nproc-per-node 2 launch/train.py``."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

if not __package__:  # run as a script: the folder above holds the packages, this one does not
    sys.path[0] = str(Path(__file__).resolve().parents[1])
if missing := [name for name in ("tyro", "rich", "matplotlib") if find_spec(name) is None]:
    if os.environ.get("RANK", "0") == "0":
        print(f"error: no {missing[0]} here; pip install -e '.[train]' brings it", file=sys.stderr)
    sys.exit(2)

import torch
from torch.nn.utils import clip_grad_norm_

from distamp import autocast
from launch.data import TrainingWindows, validation_windows
from launch.device import DTYPES
from launch.errors import UsageError
from launch.job import Job, prepare
from launch.models import next_byte_loss
from launch.ranks import Ranks
from launch.strategies import last_microbatch_syncs


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line on this rank; return the exit code."""
    with Ranks.join() as ranks:
        try:
            run(args, ranks)
        except UsageError as error:
            return ranks.fail(error)
    return 0


def run(args: Sequence[str] | None, ranks: Ranks) -> None:
    """Make the job ready and train; when this returns, nothing holds the model any more."""
    job = prepare(args, ranks)
    with job.report:
        train(job)


def train(job: Job) -> None:
    """Train to the last step, writing results and checkpoints on the way."""
    config, ranks, device, run, model = job.config, job.ranks, job.device, job.run, job.model
    optimizer, schedule, scaler, progress = run.optimizer, run.schedule, run.scaler, run.progress
    windows = TrainingWindows(job.corpus.train, config.model.block, config.seed)
    share = config.batch // (ranks.world_size * config.accumulate)
    compute = autocast(device.type, DTYPES[config.precision], enabled=config.precision != "fp32")

    if progress.step == 0:
        job.report.validation(validate(job))
    while progress.step < config.steps:
        model.train()
        loss_sum = torch.zeros((), device=device)
        for microbatch in range(config.accumulate):
            first = progress.position + (microbatch * ranks.world_size + ranks.rank) * share
            tokens, targets = (t.to(device) for t in windows.take(first, share))
            with last_microbatch_syncs(model, microbatch == config.accumulate - 1):
                with compute:
                    logits = model(tokens)
                loss = next_byte_loss(logits, targets) / config.accumulate
                scaler.scale(loss).backward()
            loss_sum += loss.detach()

        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(run.model.parameters(), config.clip or math.inf)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        stepped = scaler.stepped(optimizer)
        optimizer.zero_grad()
        rate = optimizer.param_groups[0]["lr"]
        if stepped:  # a skipped step is none: the learning rate stays where it is
            schedule.step()

        progress.step += 1
        progress.position += config.batch
        progress.skipped += not stepped
        mean_loss = ranks.sum(loss_sum)[0] / ranks.world_size
        record = {
            "step": progress.step,
            "loss": mean_loss,
            "bits_per_byte": mean_loss / math.log(2),
            "loss_scale": scale,
            "stepped": stepped,
            "skipped": progress.skipped,
            "gradient_norm": float(norm),
            "learning_rate": rate,
        }
        job.report.step(record, tokens=config.batch * config.model.block)
        last = progress.step == config.steps
        if last or progress.step % config.evaluate_every == 0:
            job.report.validation(validate(job))
        if last or progress.step % config.checkpoint_every == 0:
            job.save()
    job.report.finish()


@torch.no_grad()
def validate(job: Job) -> dict[str, float]:
    """Return the mean loss over the windows of the held-out text, shared among the ranks."""
    config, ranks, device = job.config, job.ranks, job.device
    text, block = job.corpus.validation, config.model.block
    tokens, targets = validation_windows(text, block, config.validation_windows)
    model = job.run.model.eval()
    compute = autocast(device.type, DTYPES[config.precision], enabled=config.precision != "fp32")
    loss_sum, windows = 0.0, 0
    for batch in torch.arange(len(tokens))[ranks.rank :: ranks.world_size].split(32):
        with compute:
            logits = model(tokens[batch].to(device))
        loss_sum += float(next_byte_loss(logits, targets[batch].to(device))) * len(batch)
        windows += len(batch)
    total, count = ranks.sum(loss_sum, windows)
    loss = total / count
    return {
        "step": job.run.progress.step,
        "validation_loss": loss,
        "validation_bits_per_byte": loss / math.log(2),
    }


if __name__ == "__main__":
    sys.exit(main())
