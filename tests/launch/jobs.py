"""Run the launcher in this process or on the ranks of a pool, and read the records of a run."""

import contextlib
import io
import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from launch.config import parse
from launch.program import UsageError
from launch.train import run

ROOT = Path(__file__).resolve().parents[2]
# Flags of a short run of any model.
SHORT = (
    *("--seq-len", 16, "--global-batch-size", 8, "--eval-examples", 16),
    *("--warmup", 3, "--lr", 1e-2),
)
# The flags of a short run of a gpt so small that starting the processes is most of its time.
TINY = ("--layers", 2, "--d-model", 16, "--heads", 4, *SHORT)
# Flags of a run in fp16 whose steps overflow at the start and whenever the scale has grown.
FP16 = ("--precision", "fp16", "--init-scale", 2.0**26, "--growth-interval", 2)
# No run takes a tenth of this time on a quiet machine. A busy machine may need more.
TIMEOUT_S = 300.0

Rows = list[dict[str, Any]]


def text_file(folder: Path) -> Path:
    """Write a text of 32 KB with a pattern to learn, and return its path."""
    path = folder / "text.txt"
    rows = []
    for number in range(1920):
        factor = number % 7
        rows.append(f"row {number}: {number} times {factor} is {number * factor}\n")
    path.write_text("".join(rows)[: 32 * 1024])
    return path


def make_flags(text: Path, flags: str) -> list[str]:
    """Return the flags of a tiny run on a text."""
    tiny = [str(word) for word in ("--data", text, *TINY)]
    return [*tiny, *flags.split()]


def train(folder: Path, *runs: Sequence[object]) -> Rows:
    """Start runs in one folder one after another on this rank, and return the records."""
    for args in runs:
        with pool_rank():
            _run_without_time_limit(*args, "--run-dir", folder)
        if dist.is_initialized():
            dist.barrier()
    return records(folder)


def refusal(*args: object) -> str:
    """Return the message with which the launcher refuses a run."""
    try:
        with pool_rank():
            _run_without_time_limit(*args)
    except UsageError as error:
        return str(error)
    return "was not refused"


def _run_without_time_limit(*args: object) -> None:
    config = parse([str(arg) for arg in args])
    run(config, lambda: (False, math.inf))


@contextlib.contextmanager
def pool_rank() -> Iterator[io.StringIO]:
    """Let the launcher see this rank of a pool as a rank of torchrun, and return its output.

    The launcher draws no pictures meanwhile, because a picture takes longer than a run.
    """
    rank = {}
    if dist.is_initialized():
        rank = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with (
        mock.patch("launch.train.process_group", pool_group),
        mock.patch("launch.metrics.draw_figure"),
        mock.patch.dict(os.environ, rank),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        yield printed


@contextlib.contextmanager
def pool_group(config: object) -> Iterator[None]:
    """Use the process group of the pool instead of a new group."""
    if dist.is_initialized():
        # The creation of a group would wait until every rank has read the folder of the run.
        dist.barrier()
    yield


def until(folder: Path, step: int) -> None:
    """Wait until a run has a record of this step."""
    end = time.monotonic() + TIMEOUT_S
    while not any(row["step"] >= step for row in records(folder)):
        assert time.monotonic() < end
        time.sleep(0.01)


def records(folder: Path) -> Rows:
    """Return the records of a run, without the speed, which depends on the load of the machine."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    # The run may be writing its last line at this moment.
    complete_lines = path.read_text().split("\n")[:-1]
    rows = [json.loads(line) for line in complete_lines]
    for row in rows:
        row.pop("tokens_per_second", None)
    return rows


def training_records(rows: Rows) -> Rows:
    """Return the records of steps, without the records of rewinds and evaluations."""
    return [row for row in rows if "loss" in row]


def losses(rows: Rows) -> list[float]:
    """Return the training losses of the records."""
    return [row["loss"] for row in training_records(rows)]


def passed_over(rows: Rows) -> list[int]:
    """Return the steps that a run has taken back, or had under way when it went back."""
    steps: list[int] = []
    for row in rows:
        if "rewound" in row:
            steps += row["skipped_steps"]
    return steps


def weights(run: Path, step: int, kind: str = "model.") -> torch.Tensor:
    """Return the tensors of one kind in a checkpoint, flattened into one."""
    reader = dcp.FileSystemReader(run / "checkpoints" / f"step-{step:08d}")
    saved = reader.read_metadata().state_dict_metadata
    tensors: dict[str, torch.Tensor] = {}
    for name, metadata in saved.items():
        if name.startswith(kind) and hasattr(metadata, "size"):
            tensors[name] = torch.empty(metadata.size)
    with warnings.catch_warnings(action="ignore"):
        dcp.load(tensors, storage_reader=reader)
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])
