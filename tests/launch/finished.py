"""Do a run of the launcher to its end, summary included, on the pool's ranks."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from launch.train import train as train_job
from tests.launch import pooled

# At a scale of 2^19 gradients overflow: the first steps are skipped and the others are taken.
SKIPPING = ("--precision", "fp16", "--init-scale", 2.0**19, "--checkpoint-every", 3)
SKIPPING = (*SKIPPING, "--keep-checkpoints", 9)


def finish(folder: Path, *flags: object) -> dict[str, Any]:
    """Do a run as the command does; return its summary, and what the last checkpoint holds."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        job = pooled.job("--run-dir", folder, *flags)
        with job.report:
            with job.trace:
                train_job(job)
            summary = job.summary()
            job.report.finish(summary)
    if dist.is_initialized():
        dist.barrier()
        pooled._keep_groups()
    newest = max((folder / "checkpoints").glob("step-*")) / "manifest.json"
    manifest = json.loads(newest.read_text())
    return {"summary": summary, "printed": shown.getvalue(), "manifest": manifest}
