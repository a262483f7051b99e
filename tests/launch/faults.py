"""The launcher with planted faults: torchrun tests/launch/faults.py, with the flags of train.py.

The faults are a JSON object in the environment variable ``PLANTED_FAULTS``:

    nan: Steps with an update of NaN in one weight of the last rank.
    flip: Steps after which one bit of one weight of the last rank is flipped.
    poison: Steps with NaN in a gradient of the last rank.
    once: A folder. A fault of ``nan`` or ``flip`` makes a file there, and happens only once.
    dropped: Steps without their batches, in a run for comparison. It skips poisoned steps without a
        limit in a row, because a run that was killed between poisoned steps counts from 0 again.

docs/images/rewind.png is the picture in the folder of this run, in which `once` is an empty folder:

    PLANTED_FAULTS='{"nan": [45], "flip": [90], "poison": [135, 136, 137], "once": "/tmp/once"}' \\
        torchrun --nproc-per-node 2 tests/launch/faults.py --precision bf16 --steps 200 --seed 0 \\
        --layers 2 --d-model 64 --global-batch-size 16 --seq-len 64 --schedule constant \\
        --rewind-every 20 --max-rewinds 3 --check-update --check-replicas-every 1 \\
        --on-mismatch raise --log-every 2 --keep-checkpoints 0 --run-dir runs/rewind
"""

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch import Tensor

from distamp.levels import Amp
from launch import job as launch_job
from launch import train
from launch.data import Batch
from launch.job import Job

ENVIRONMENT_VARIABLE = "PLANTED_FAULTS"


class Faults:
    """The planted faults of one run on this rank.

    Args:
        planted: The object that the docstring of this module describes.
    """

    def __init__(self, planted: dict[str, Any]) -> None:
        self._planted = planted
        self._initialize = launch_job.initialize
        self._run_passes = train.run_passes
        self._train_step = train.train_step
        self._training_batches = train.training_batches

    def patches(self) -> list[Any]:
        """Return context managers that plant the faults."""
        names = ("run_passes", "train_step", "training_batches")
        patches = [mock.patch.object(train, name, getattr(self, name)) for name in names]
        if "dropped" in self._planted:
            patches.append(mock.patch.object(launch_job, "initialize", self.initialize))
        return patches

    def initialize(self, *args: Any, **settings: Any) -> Amp:
        """Call distamp's `initialize` without a limit of skips in a row."""
        settings["max_consecutive_skips"] = None
        return self._initialize(*args, **settings)

    def training_batches(self, job: Job) -> Iterator[Batch]:
        """Yield the batches of a run without the dropped ones."""
        dropped = set(self._planted.get("dropped", ()))
        for step, batch in enumerate(self._training_batches(job), 1):
            if step not in dropped:
                yield batch

    def run_passes(self, job: Job, *args: Any) -> Tensor:
        """Run the passes of a step; the loss of a poisoned step is NaN."""
        loss = self._run_passes(job, *args)
        if job.progress.step in self._planted.get("poison", ()) and _is_last_rank(job):
            next(iter(_stepped_weights(job))).grad.fill_(torch.nan)
        return loss

    def train_step(self, job: Job, *args: Any) -> tuple[Tensor, Tensor]:
        """Take a step, and spoil a weight after it if a fault is planted there."""
        optimizer = job.amp.optimizers[0]
        handle = optimizer.register_step_post_hook(lambda *_: self._write_nan(job))
        try:
            result = self._train_step(job, *args)
        finally:
            handle.remove()
        if self._happens("flip", job):
            local = next(iter(_stepped_weights(job))).detach().view(-1)
            local.view(torch.int32)[5] ^= 1 << 20
        return result

    def _write_nan(self, job: Job) -> None:
        if self._happens("nan", job):
            next(iter(_stepped_weights(job))).detach().view(-1)[3] = torch.nan

    def _happens(self, kind: str, job: Job) -> bool:
        """Return whether a fault happens in this step on this rank, and remember that it did."""
        step = job.progress.step
        if step not in self._planted.get(kind, ()) or not _is_last_rank(job):
            return False
        marker = Path(self._planted["once"]) / f"{kind}-{step}"
        if marker.exists():
            return False
        marker.touch()
        return True


def _is_last_rank(job: Job) -> bool:
    return job.layout.rank == job.layout.world_size - 1


def _stepped_weights(job: Job) -> Iterator[Tensor]:
    groups = job.amp.optimizers[0].param_groups
    return itertools.chain.from_iterable(group["params"] for group in groups)


def main() -> int:
    """Run the launcher's command line with the planted faults."""
    faults = Faults(json.loads(os.environ.get(ENVIRONMENT_VARIABLE, "{}")))
    for patch in faults.patches():
        patch.start()
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
