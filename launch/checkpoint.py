"""Checkpoints by torch.distributed.checkpoint, for any number of ranks and any layout."""

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

# Errors of torch for a file that is missing, incomplete, or of another model.
_FILE_ERRORS = (OSError, ValueError, RuntimeError, LookupError, EOFError)


class Checkpoints:
    """The checkpoints of a run.

    A checkpoint contains each weight once, as the optimizer steps it: the fp32 master weight if
    there is one. A run of any precision level can therefore be resumed at any other level.

    Args:
        job: The run.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._folder = Path()
        self._pending: Any = None
        # A resumed run reads the optimizer's state only if it has the same optimizers, and the
        # state of each rank only if it has the same number of ranks on the same kind of device.
        self._optimizers = [type(optimizer).__name__ for optimizer in job.amp.optimizers]
        self._ranks = [job.layout.world_size, job.device.type]
        self._random_modules: list[Any] = [torch.random]
        if job.device.type != "cpu":
            self._random_modules.append(torch.get_device_module(job.device))
        # Background messages need a process group that training does not use.
        self._group: dist.ProcessGroup | None = None
        if job.config.async_save and job.layout.world_size > 1:
            self._group = dist.new_group(backend="gloo")

    def save(self) -> None:
        """Write a checkpoint, or start to write it in the background with ``--async-save``.

        Collective: every rank must call this, and not before the last checkpoint is written.

        Raises:
            UsageError: The checkpoint cannot be written on some rank. Older checkpoints stay.
        """
        job = self._job
        about = {
            **asdict(job.progress),
            "scaler": job.amp.scaler.state_dict(),
            "optimizers": self._optimizers,
            "ranks": self._ranks,
        }
        state = job.amp.flat_state_dict()
        state.update(job.average.values)
        state["about"] = json.dumps(about)
        state[self._rank_key] = self._rank_state()
        self._folder = job.config.run_dir / "checkpoints" / f"step-{job.progress.step:08d}"
        writer = dcp.FileSystemWriter(self._folder)
        with self._remove_if_incomplete():
            if job.config.async_save:
                self._pending = dcp.async_save(
                    state, storage_writer=writer, process_group=self._group
                )
                return
            dcp.save(state, storage_writer=writer)
        self._remove_old()

    def wait(self) -> None:
        """Wait until the checkpoint in the background is written.

        Raises:
            UsageError: The checkpoint could not be written.
        """
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        with self._remove_if_incomplete():
            pending.result()
        self._remove_old()

    @contextlib.contextmanager
    def _remove_if_incomplete(self) -> Iterator[None]:
        """Remove the checkpoint that is being written if this fails."""
        try:
            with _convert_file_errors(f"cannot write {self._folder}"):
                yield
        except UsageError as error:
            # On a full disk torch often reports only a corrupt archive.
            free = shutil.disk_usage(self._job.config.run_dir).free / 2**30
            remove_checkpoint(self._folder)
            raise UsageError(f"{error} ({free:.2f} GiB are free)") from None

    def _remove_old(self) -> None:
        config = self._job.config
        if self._job.layout.rank != 0:
            return
        with _convert_file_errors(f"cannot remove what is older than {self._folder}"):
            for checkpoint in list_checkpoints(config.run_dir)[config.keep_checkpoints :]:
                remove_checkpoint(checkpoint)

    def read(self, path: Path) -> None:
        """Restore the run from a checkpoint.

        Collective: every rank must call this. On the same number of ranks and the same kind of
        device, the run continues with the same random numbers and hook residuals. Otherwise they
        start anew.

        Raises:
            UsageError: The checkpoint is damaged, or of another model.
        """
        with _convert_file_errors(f"--resume {path}: it is damaged, or of another model"):
            self._read(path)

    def _read(self, path: Path) -> None:
        amp = self._job.amp
        averages = self._job.average.values
        reader = dcp.FileSystemReader(path)
        saved = reader.read_metadata().state_dict_metadata
        about = _read_about(reader)

        expected = dict(saved)
        if about["optimizers"] != self._optimizers:
            expected = {name: entry for name, entry in saved.items() if name.startswith("model.")}
        state = amp.flat_state_dict(expected)
        for name, average in averages.items():
            if name in saved:
                state[name] = average
        if about["ranks"] == self._ranks:
            state[self._rank_key] = None
        dcp.load(state, storage_reader=reader)

        amp.load_flat_state_dict(state)
        amp.load_state_dict(about["scaler"])
        for name in asdict(self._job.progress):
            setattr(self._job.progress, name, about[name])
        # An average that the checkpoint does not contain starts at the weights.
        for name in averages.keys() - saved.keys():
            weight_name = name.replace("ema.", "model.", 1)
            averages[name].copy_(state[weight_name])
        if self._rank_key in state:
            self._restore_rank_state(state[self._rank_key])

    @property
    def _rank_key(self) -> str:
        return f"rank.{self._job.layout.rank}"

    def _rank_state(self) -> bytes:
        """Return the state that differs between ranks: random numbers, buffers, hook residuals."""
        random_states = [module.get_rng_state() for module in self._random_modules]
        buffers = dict(unwrap_ddp(self._job.model).named_buffers())
        hook_states = [hook.state_dict() for hook in self._job.amp.comm_hooks]
        file = io.BytesIO()
        torch.save((random_states, buffers, hook_states), file)
        return file.getvalue()

    @torch.no_grad()
    def _restore_rank_state(self, content: bytes) -> None:
        file = io.BytesIO(content)
        random_states, buffers, hook_states = torch.load(file, "cpu", weights_only=True)
        for module, random_state in zip(self._random_modules, random_states, strict=True):
            module.set_rng_state(random_state)
        for name, buffer in unwrap_ddp(self._job.model).named_buffers():
            buffer.copy_(buffers[name])
        # Another level may have another number of hooks.
        for hook, hook_state in zip(self._job.amp.comm_hooks, hook_states, strict=False):
            hook.load_state_dict(hook_state)


def _read_about(reader: dcp.FileSystemReader) -> dict[str, Any]:
    """Read the progress, the scaler's state and the kind of run from a checkpoint."""
    state: dict[str, Any] = {"about": None}
    dcp.load(state, storage_reader=reader)
    return dict(json.loads(state["about"]))


def load_run(path: Path, data: Data) -> Job:
    """Load a run's newest checkpoint on one process, for evaluation.

    The weights are the moving averages if the run has any.

    Args:
        path: The folder of a run, or one checkpoint.
        data: The data of the run, or other data with the same number of classes.

    Raises:
        UsageError: There is no such run, or it is damaged or of another model.
    """
    run_dir, checkpoint = find_checkpoint(path)
    one_process = {
        "replicate": 0,
        "shard": 1,
        "tp": 1,
        "comm_hook": "none",
        "accumulate": 1,
        "compile": False,
        "activation_checkpointing": "none",
    }
    config = read_config(run_dir).model_copy(update=one_process)
    job = make_job(config, data, Layout(), pick_device(config), for_training=False)
    with _convert_file_errors(f"{checkpoint}: it is damaged, or of another model"):
        reader = dcp.FileSystemReader(checkpoint)
        saved = reader.read_metadata().state_dict_metadata
        state: dict[str, Any] = {}
        saved_names: dict[str, str] = {}
        for name, weight in job.amp.flat_state_dict().items():
            average_name = name.replace("model.", "ema.", 1)
            saved_name = average_name if average_name in saved else name
            if isinstance(weight, torch.Tensor) or saved_name in saved:
                state[saved_name] = weight
                saved_names[name] = saved_name
        dcp.load(state, storage_reader=reader)
        # Weights are loaded in place, and the extra states of modules are not.
        loaded = {name: state[saved_name] for name, saved_name in saved_names.items()}
        job.amp.load_flat_state_dict(loaded)
    return job


@contextlib.contextmanager
def _convert_file_errors(subject: str) -> Iterator[None]:
    """Convert torch's errors about files to a `UsageError` that begins with the subject."""
    with convert_to_usage_error(subject, *_FILE_ERRORS), warnings.catch_warnings():
        # torch warns about a single process, which is intended here.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except dcp.CheckpointException as error:
            # Several ranks may have failed. The first one gives the reason.
            first_rank = min(error.failures)
            reason = str(error.failures[first_rank][0])
            raise RuntimeError(reason[:200]) from None
