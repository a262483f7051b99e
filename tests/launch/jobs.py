"""Start the launcher as its users do, or call it on the pool's ranks, and read what it leaves."""

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
# The same with a gpt so small that the processes' start is most of a run.
TINY = ("--layers", 2, "--d-model", 16, "--heads", 4, *SHORT)
# In fp16, with steps that overflow at the start and whenever the scale has grown.
FP16 = ("--precision", "fp16", "--init-scale", 2.0**26, "--growth-interval", 2)
# No run here takes a tenth of this, but on a machine that has much else to do.
TIMEOUT_S = 300.0

Rows = list[dict[str, Any]]


def text_file(folder: Path) -> Path:
    """A text of 32 KB with something to learn in it."""
    path = folder / "text.txt"
    rows = (f"row {i}: {i} times {i % 7} is {i * (i % 7)}\n" for i in range(1920))
    path.write_text("".join(rows)[: 32 * 1024])
    return path


def train(folder: Path, *runs: Sequence[object]) -> Rows:
    """Do one run after the other in one folder, on this rank; return its records."""
    for args in runs:
        with here():
            run(parse([*map(str, args), "--run-dir", str(folder)]), lambda: (False, math.inf))
        if dist.is_initialized():
            dist.barrier()
    return records(folder)


def refusal(*args: object) -> str:
    """The line with which a run is refused."""
    try:
        with here():
            run(parse([*map(str, args)]), lambda: (False, math.inf))
    except UsageError as error:
        return str(error)
    return "was not refused"


@contextlib.contextmanager
def here() -> Iterator[io.StringIO]:
    """Be a rank of torchrun's, whose words are kept; nothing is drawn, which takes longest."""
    rank = {}
    if dist.is_initialized():
        rank = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with (
        mock.patch("launch.train.process_group", joined),
        mock.patch("launch.metrics.draw_figure"),
        mock.patch.dict(os.environ, rank),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        yield printed


@contextlib.contextmanager
def joined(config: object) -> Iterator[None]:
    """The pool's group, in place of one of the run's own."""
    if dist.is_initialized():
        dist.barrier()  # as making a group does: each rank has looked at the run's folder
    yield


def until(folder: Path, step: int) -> None:
    """Wait until a run has a record of this step."""
    end = time.monotonic() + TIMEOUT_S
    while not any(row["step"] >= step for row in records(folder)):
        assert time.monotonic() < end
        time.sleep(0.01)


def records(folder: Path) -> Rows:
    """What a run has recorded, but for what depends on the machine's load."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


def losses(rows: Rows) -> list[float]:
    return [row["loss"] for row in rows if "loss" in row]


def passed_over(rows: Rows) -> list[int]:
    """Return the steps that a run has taken back, or had under way when it went back."""
    steps: list[int] = []
    for row in rows:
        if "rewound" in row:
            steps += row["skipped_steps"]
    return steps


def weights(run: Path, step: int, kind: str = "model.") -> torch.Tensor:
    reader = dcp.FileSystemReader(run / "checkpoints" / f"step-{step:08d}")
    saved = reader.read_metadata().state_dict_metadata
    found: dict[str, torch.Tensor] = {}
    for name, about in saved.items():
        if name.startswith(kind) and hasattr(about, "size"):
            found[name] = torch.empty(about.size)
    with warnings.catch_warnings(action="ignore"):
        dcp.load(found, storage_reader=reader)
    return torch.cat([found[name].flatten() for name in sorted(found)])
