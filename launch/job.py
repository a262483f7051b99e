"""One run made ready: asked-for settings become a model, text, and a place to write to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from distamp import DistGradScaler
from distamp.scaler import DynamicSchedule, HeadroomSchedule
from launch import checkpoint
from launch.checkpoint import RunState
from launch.config import Config, parse
from launch.data import Corpus, load_corpus
from launch.device import check_memory, check_precision, pick_device, slowdown
from launch.errors import UsageError
from launch.models import decayed_groups, init_model
from launch.ranks import Ranks
from launch.reporting import METRICS, Reporter, RunReporter, read_metrics, write_config
from launch.strategies import spread

__all__ = ["Job", "prepare"]


@dataclass
class Job:
    """All that the training loop works with.

    Attributes:
        model: ``run.model`` as it is called, spread over the ranks.
    """

    config: Config
    ranks: Ranks
    device: torch.device
    corpus: Corpus
    run: RunState
    model: nn.Module
    report: Reporter

    def save(self) -> None:
        """Write the checkpoint; every rank calls this, as each has random numbers of its own."""
        random = self.ranks.gather(checkpoint.random_state(self.device))
        with self.ranks.together():
            if self.ranks.is_main:
                about = {
                    "shape": asdict(self.config.model),
                    "settings": _settings(self.config, self.ranks),
                    "corpus": {"name": self.corpus.name, "digest": self.corpus.digest},
                }
                state = {**about, **self.run.state_dict(), "random": random}
                checkpoint.save(self.config.folder / checkpoint.NAME, state)


def prepare(args: Sequence[str] | None, ranks: Ranks) -> Job:
    """Read the command line, and build or restore what it asks for.

    Raises:
        UsageError: On every rank, if any rank finds that it cannot be done.
    """
    with ranks.together():
        config = parse(args, quiet=not ranks.is_main)
        config.check(ranks.world_size)
        device = pick_device(config.device, ranks)
        check_precision(device, config.precision)
        check_memory(config, device)
        corpus = load_corpus(config.data)
        _check_length(config, corpus)
        saved = None if config.resume is None else checkpoint.load(config.resume, device)
        if saved is not None:
            _check_same_run(saved, config, corpus)
    with ranks.together():
        if len(set(ranks.gather(corpus.digest))) > 1:
            raise UsageError(f"--data: the ranks do not read the same text from {corpus.name}")
    with ranks.together():
        run = build(config, device)
        report = _claim_folder(config, saved) if ranks.is_main else Reporter()
    if saved is not None:
        run.load_state_dict(saved)
    sample = torch.zeros(1, 1, dtype=torch.long, device=device)
    model = spread(run.model, ranks, device, sample)
    torch.manual_seed(config.seed + 1 + ranks.rank)
    if saved is not None and len(saved["random"]) == ranks.world_size:
        checkpoint.restore_random_state(saved["random"][ranks.rank], device)
    report.start(_facts(config, corpus, ranks, device))
    if saved is not None:
        report.note(_changes(saved, config, ranks))
    if ranks.is_main and (slower := slowdown(device, config.precision)) > 3:
        report.note(
            f"This {device.type} multiplies matrices {slower:.0f} times slower in"
            f" {config.precision} than in fp32\n"
        )
    return Job(config, ranks, device, corpus, run, model, report)


_SCHEDULES = {kind.kind: kind for kind in (DynamicSchedule, HeadroomSchedule)}


def build(config: Config, device: torch.device) -> RunState:
    """Build the model and what trains it, at step 0."""
    model = init_model(config.model, config.seed, device)
    groups = decayed_groups(model, config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
    schedule = LambdaLR(optimizer, lambda taken: learning_rate(config, taken))
    try:
        scaler = DistGradScaler(
            device.type,
            init_scale=config.init_scale,
            schedule=_SCHEDULES[config.schedule](growth_interval=config.growth_interval),
            enabled=config.precision == "fp16",
        )
    except ValueError as error:
        raise UsageError(f"the loss scale's settings: {error}") from None
    return RunState(model, optimizer, schedule, scaler)


def learning_rate(config: Config, taken: int) -> float:
    """Return the learning rate after so many taken steps, as a part of the peak.

    Linear warmup, then a cosine down to ``final_lr``. Skipped steps do not count.
    """
    if taken < config.warmup:
        return (taken + 1) / config.warmup
    done = min(1.0, (taken - config.warmup) / max(1, config.steps - config.warmup))
    return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * done))


def _check_length(config: Config, corpus: Corpus) -> None:
    """Refuse a text too short for one window of validation or one batch of training."""
    block = config.model.block
    if len(corpus.validation) <= block:
        raise UsageError(
            f"--block {block}: the last tenth of {corpus.name}, which is held out, has"
            f" {len(corpus.validation)} bytes; pass a --block below that, or more text"
        )
    windows = len(corpus.train) // block - 1
    if config.batch > windows:
        raise UsageError(
            f"--batch {config.batch}: {corpus.name} has {windows} training windows of {block} bytes"
        )


# The settings that decide which numbers a run comes to.
_NUMBERS = (
    *("precision", "steps", "batch", "accumulate", "lr", "warmup", "final_lr"),
    *("weight_decay", "clip", "seed", "growth_interval", "schedule"),
)


def _settings(config: Config, ranks: Ranks) -> dict[str, object]:
    return {**{name: getattr(config, name) for name in _NUMBERS}, "ranks": ranks.world_size}


def _check_same_run(saved: dict[str, Any], config: Config, corpus: Corpus) -> None:
    """Refuse a checkpoint of another model or text, or one with nothing left to do."""
    where = f"--resume {config.resume}"
    for name, ours in asdict(config.model).items():
        theirs = saved["shape"][name]
        if ours != theirs:
            raise UsageError(
                f"{where}: it belongs to another model, with {name} {theirs} where this run has"
                f" {ours}; pass --{name} {theirs}"
            )
    if saved["corpus"]["digest"] != corpus.digest:
        raise UsageError(
            f"{where}: it was trained on other text ({saved['corpus']['name']}) than"
            f" {corpus.name} holds now; pass the same --data"
        )
    done = saved["progress"]["step"]
    if done >= config.steps:
        raise UsageError(f"{where}: all its {done} steps are done; pass a --steps above {done}")


def _claim_folder(config: Config, saved: dict[str, Any] | None) -> RunReporter:
    """Make the run's folder, and begin its metrics with what happened before the checkpoint."""
    folder = config.folder
    history = []
    step = 0
    if saved is not None and config.resume is not None:
        step = saved["progress"]["step"]
        origin = config.resume if config.resume.is_dir() else config.resume.parent
        history = read_metrics(origin / METRICS, until=step)
    if (folder / METRICS).exists() and not config.overwrite and saved is None:
        raise UsageError(
            f"--run-dir {folder}: it already holds a run; pass --resume {folder} to go on with it,"
            " --overwrite to start again, or another --run-dir"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if saved is None:
            (folder / checkpoint.NAME).unlink(missing_ok=True)
        write_config(folder, config)
        return RunReporter(folder, config, history, step)
    except OSError as error:
        raise UsageError(f"--run-dir {folder}: cannot write there ({error.strerror})") from None


def _facts(config: Config, corpus: Corpus, ranks: Ranks, device: torch.device) -> dict[str, str]:
    """Say in a few rows what is about to be trained."""
    shape = config.model
    many = "1 process" if ranks.world_size == 1 else f"{ranks.world_size} ranks, DDP"
    train, held_out = (_size(len(text)) for text in (corpus.train, corpus.validation))
    scaled = ", the loss scaled by DistGradScaler" if config.precision == "fp16" else ""
    return {
        "Model": f"byte-level GPT, {shape.parameters / 1e6:.2f} M parameters"
        f" ({shape.layers} layers, width {shape.width}, context {shape.block})",
        "Text": f"{corpus.name}, {train} and {held_out} held out",
        "Device": f"{device.type}, {many}",
        "Precision": f"{config.precision}{scaled}",
        "Steps": f"{config.steps} of {config.batch} sequences",
    }


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _changes(saved: dict[str, Any], config: Config, ranks: Ranks) -> str:
    """Say where a resumed run goes on, and which settings differ from what it was started with."""
    ours, theirs = _settings(config, ranks), saved["settings"]
    differ = [f"{n} {theirs[n]} -> {ours[n]}" for n in ours if ours[n] != theirs[n]]
    where = f"Going on from {config.resume} at step {saved['progress']['step']}"
    return f"{where}, with other settings: {', '.join(differ)}" if differ else where
