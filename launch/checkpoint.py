"""What a run goes on from, by torch.distributed.checkpoint: any number of ranks, any layout."""

import contextlib
import io
import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from launch.config import read_config
from launch.data import Data
from launch.folder import find_checkpoint, list_checkpoints, remove_checkpoint
from launch.job import Job, make_job
from launch.model import unwrap_ddp
from launch.parallel import Layout, pick_device
from launch.program import UsageError, convert_to_usage_error

# What torch raises where a file is not there, not whole, or of another model.
_FAULTS = (OSError, ValueError, RuntimeError, LookupError, EOFError)


class Checkpoints:
    """The checkpoints of a run: folders that torch writes, whose .metadata comes last.

    A weight is in one once, as the optimizer steps it: the fp32 master where there is one. So a run
    of any level goes on at any other.

    Args:
        job: What is written, and read.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        # What decides whether optimizers, and what a rank has for itself, mean the same again.
        self._kinds = {
            "optimizers": [type(optimizer).__name__ for optimizer in job.amp.optimizers],
            "ranks": [job.layout.world, job.device.type],
        }
        on_device = [torch.get_device_module(job.device)] if job.device.type != "cpu" else []
        self._random: list[Any] = [torch.random, *on_device]  # what draws random numbers
        self._future: Any = None
        # What is sent while training goes on needs a group that training does not use.
        several = job.config.async_save and job.layout.world > 1
        self._group = dist.new_group(backend="gloo") if several else None

    def save(self) -> None:
        """Write a checkpoint, or begin to; every rank calls this, and none while one is written.

        Raises:
            UsageError: It cannot be written, on any rank; those before it stay.
        """
        config, amp, progress = self._job.config, self._job.amp, self._job.progress
        state = amp.flat_state_dict() | self._job.average.values
        about = {**asdict(progress), "scaler": amp.scaler.state_dict(), **self._kinds}
        state |= {"about": json.dumps(about), f"rank.{self._job.layout.rank}": self._own()}
        self._folder = config.run_dir / "checkpoints" / f"step-{progress.step:08d}"
        writer = dcp.FileSystemWriter(self._folder)
        with self._writing():
            if config.async_save:
                group = self._group
                self._future = dcp.async_save(state, storage_writer=writer, process_group=group)
                return
            dcp.save(state, storage_writer=writer)
        self._prune()

    def wait(self) -> None:
        """Wait for the one that is being written.

        Raises:
            UsageError: It could not be written.
        """
        future, self._future = self._future, None
        if future is not None:
            with self._writing():
                future.result()
            self._prune()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with _refused(f"cannot write {self._folder}"):
                yield
        except UsageError as error:
            # Of a full disk torch has not always more to say than that its archive is odd.
            free = shutil.disk_usage(self._job.config.run_dir).free / 2**30
            remove_checkpoint(self._folder)  # half of it would go on filling the disk
            raise UsageError(f"{error} ({free:.2f} GiB are free)") from None

    def _prune(self) -> None:
        with _refused(f"cannot remove what is older than {self._folder}"):
            if self._job.layout.rank == 0:
                for old in list_checkpoints(self._job.config.run_dir)[
                    self._job.config.keep_checkpoints :
                ]:
                    remove_checkpoint(old)

    def read(self, path: Path) -> None:
        """Put the run into the state of a checkpoint; every rank calls this.

        On as many ranks and the same kind of device it goes on with the same random numbers and
        residuals of hooks; else with fresh ones.

        Raises:
            UsageError: The checkpoint is damaged, or of another model.
        """
        amp, average = self._job.amp, self._job.average.values
        own = f"rank.{self._job.layout.rank}"
        reader = dcp.FileSystemReader(path)
        with _refused(f"--resume {path}: it is damaged, or of another model"):
            saved = reader.read_metadata().state_dict_metadata
            first: dict[str, Any] = {"about": None}
            dcp.load(first, storage_reader=reader)
            about = json.loads(first["about"])
            alike = about["optimizers"] == self._kinds["optimizers"]
            weights = {name: value for name, value in saved.items() if name.startswith("model.")}
            state = amp.flat_state_dict(saved if alike else weights)
            state |= {name: value for name, value in average.items() if name in saved}
            if about["ranks"] == self._kinds["ranks"]:
                state[own] = None
            dcp.load(state, storage_reader=reader)
            amp.load_flat_state_dict(state)
            for name in average.keys() - saved.keys():  # it begins here
                average[name].copy_(state[name.replace("ema.", "model.", 1)])
            for name in asdict(self._job.progress):
                setattr(self._job.progress, name, about[name])
            amp.load_state_dict(about["scaler"])
            if own in state:
                self._restore(state[own])

    def _own(self) -> bytes:
        """Return what each rank has for itself: random numbers, statistics, residuals of hooks."""
        random = [module.get_rng_state() for module in self._random]
        buffers = dict(unwrap_ddp(self._job.model).named_buffers())
        hooks = [hook.state_dict() for hook in self._job.amp.comm_hooks]
        file = io.BytesIO()
        torch.save((random, buffers, hooks), file)
        return file.getvalue()

    @torch.no_grad()
    def _restore(self, own: bytes) -> None:
        random, buffers, hooks = torch.load(io.BytesIO(own), "cpu", weights_only=True)
        for module, numbers in zip(self._random, random, strict=True):
            module.set_rng_state(numbers)
        for name, tensor in unwrap_ddp(self._job.model).named_buffers():
            tensor.copy_(buffers[name])
        for hook, saved in zip(self._job.amp.comm_hooks, hooks, strict=False):
            hook.load_state_dict(saved)


def load_run(path: Path, data: Data) -> Job:
    """Read a run's flags and its newest checkpoint on one process, to be used on some data.

    Its weights are their average, where the run has one.

    Args:
        path: The folder of a run, or one checkpoint.
        data: Those of the run, or others with as many classes.

    Raises:
        UsageError: There is no such run, or it is damaged or of another model.
    """
    run, checkpoint = find_checkpoint(path)
    alone = {"replicate": 0, "shard": 1, "tp": 1, "comm_hook": "none", "accumulate": 1}
    config = read_config(run).model_copy(
        update={**alone, "compile": False, "activation_checkpointing": "none"}
    )
    job = make_job(config, data, Layout(), pick_device(config), trains=False)
    with _refused(f"{checkpoint}: it is damaged, or of another model"):
        reader = dcp.FileSystemReader(checkpoint)
        saved = reader.read_metadata().state_dict_metadata
        weights = job.amp.flat_state_dict()
        named = {f"ema.{name.removeprefix('model.')}": name for name in weights}
        state = {own if own in saved else name: weights[name] for own, name in named.items()}
        dcp.load(state, storage_reader=reader)
    return job


@contextlib.contextmanager
def _refused(what: str) -> Iterator[None]:
    """Turn what torch raises about files into a sentence that begins with ``what``."""
    with convert_to_usage_error(what, *_FAULTS), warnings.catch_warnings():
        # One process is one process; it is no mistake.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except dcp.CheckpointException as error:  # of one rank or several: the first says why
            raise RuntimeError(str(error.failures[min(error.failures)][0])[:200]) from None
