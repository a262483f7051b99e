"""What a run goes on from, by torch.distributed.checkpoint: any number of ranks, any layout."""

import io
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from distamp.initialize import Amp
from launch.config import Config
from launch.folder import checkpoints_of, remove
from launch.model import unwrapped
from launch.optim import Average
from launch.parallel import Layout
from launch.usage import UsageError

# What torch raises where a file is not there, not whole, or of another model.
_FAULTS = (OSError, ValueError, RuntimeError, LookupError, EOFError)


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        step: Steps done, skipped ones included.
        position: Examples read, over all ranks: the whole state of the data.
        skipped: Steps that the scaler skipped.
    """

    step: int = 0
    position: int = 0
    skipped: int = 0


class Checkpoints:
    """The checkpoints of a run: folders that torch writes, whose .metadata comes last.

    A weight is in one once, as the optimizer steps it: the fp32 master where there is one. So a run
    of any level goes on at any other.

    Args:
        config: Where, how many, and whether training waits for them.
        layout: The ranks that write.
        amp: The model, its optimizers, its loss scale and its hooks.
        average: Of the weights.
        progress: How far the run is.
        device: Whose random numbers are written.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        amp: Amp,
        average: Average,
        progress: Progress,
        device: torch.device,
    ) -> None:
        self._config = config
        self._layout = layout
        self._amp = amp
        self._average = {f"ema.{name}": value for name, value in average.values.items()}
        self._progress = progress
        self._kinds = [type(optimizer).__name__ for optimizer in amp.optimizers]
        self._ranks = [layout.world, device.type]
        # What draws random numbers.
        self._random: list[Any] = [torch.random]
        if device.type != "cpu":
            self._random.append(torch.get_device_module(device))
        self._future: Any = None
        several = config.async_save and layout.world > 1
        # What is sent while training goes on needs a group that training does not use.
        self._group = dist.new_group(backend="gloo") if several else None

    def save(self) -> None:
        """Write a checkpoint; every rank calls this.

        Raises:
            UsageError: It cannot be written, on any rank; those before it stay.
        """
        self.wait()
        if self._config.keep == 0:
            return
        state = self._amp.flat_state_dict() | self._average
        state[f"rank.{self._layout.rank}"] = self._own()
        if self._layout.rank == 0:
            about = {**asdict(self._progress), "scaler": self._amp.scaler.state_dict()}
            state["about"] = json.dumps(about | {"ranks": self._ranks, "optimizers": self._kinds})
        folder = self._config.run_dir / "checkpoints" / f"step-{self._progress.step:08d}"
        writer = dcp.FileSystemWriter(folder)
        with _one_sentence(f"cannot write {folder}"):
            if self._config.async_save:
                self._future = dcp.async_save(
                    state, storage_writer=writer, process_group=self._group
                )
            else:
                dcp.save(state, storage_writer=writer)
                self._prune()

    def wait(self) -> None:
        """Wait for the one that is being written.

        Raises:
            UsageError: It could not be written.
        """
        future, self._future = self._future, None
        if future is not None:
            with _one_sentence("cannot write a checkpoint"):
                future.result()
            self._prune()

    def _prune(self) -> None:
        for old in checkpoints_of(self._config.run_dir)[self._config.keep :]:
            if self._layout.rank == 0:
                remove(old)

    def read(self, path: Path) -> None:
        """Put the run into the state of a checkpoint; every rank calls this.

        On as many ranks and the same kind of device it goes on with the same random numbers and
        residuals of hooks; else with fresh ones.

        Raises:
            UsageError: The checkpoint is damaged, or of another model.
        """
        amp, own = self._amp, f"rank.{self._layout.rank}"
        reader = dcp.FileSystemReader(path)
        with _one_sentence(f"--resume {path}: it is damaged, or of another model"):
            saved = reader.read_metadata().state_dict_metadata
            first: dict[str, Any] = {"about": None}
            dcp.load(first, storage_reader=reader)
            about = json.loads(first["about"])
            state = amp.flat_state_dict(saved if about["optimizers"] == self._kinds else None)
            state |= {name: value for name, value in self._average.items() if name in saved}
            if about["ranks"] == self._ranks:
                state[own] = None
            dcp.load(state, storage_reader=reader)
            amp.load_flat_state_dict(state)
            for name in self._average.keys() - saved.keys():  # it begins here
                self._average[name].copy_(state[name.replace("ema.", "model.", 1)])
            for name in asdict(self._progress):
                setattr(self._progress, name, about[name])
            if amp.precision.loss_scale == "dynamic" and about["scaler"]:
                amp.scaler.load_state_dict(about["scaler"])
            if own in state:
                self._restore(state[own])

    def _own(self) -> bytes:
        """Return what each rank has for itself: random numbers, statistics, residuals of hooks."""
        random = [module.get_rng_state() for module in self._random]
        hooks = [hook.state_dict() for hook in self._amp.comm_hooks]
        file = io.BytesIO()
        buffers = dict(unwrapped(self._amp.model).named_buffers())
        torch.save((random, buffers, hooks), file)
        return file.getvalue()

    @torch.no_grad()
    def _restore(self, own: bytes) -> None:
        random, buffers, hooks = torch.load(io.BytesIO(own), "cpu", weights_only=True)
        for module, numbers in zip(self._random, random, strict=True):
            module.set_rng_state(numbers)
        for name, tensor in unwrapped(self._amp.model).named_buffers():
            tensor.copy_(buffers[name])
        for hook, saved in zip(self._amp.comm_hooks, hooks, strict=False):
            hook.load_state_dict(saved)


def load_weights(path: Path, amp: Amp) -> None:
    """Fill a whole model from a checkpoint: with the average of the weights where it has one.

    Raises:
        UsageError: The checkpoint is damaged, or of another model.
    """
    with _one_sentence(f"{path}: it is damaged, or of another model"):
        reader = dcp.FileSystemReader(path)
        saved = reader.read_metadata().state_dict_metadata
        state = {}
        for name, tensor in amp.flat_state_dict().items():
            average = name.replace("model.", "ema.", 1)
            state[average if average in saved else name] = tensor
        dcp.load(state, storage_reader=reader)


@contextmanager
def _one_sentence(what: str) -> Iterator[None]:
    """Turn what torch raises about files into a sentence that begins with ``what``."""
    try:
        with warnings.catch_warnings():
            # One process is one process; it is no mistake.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except (dcp.CheckpointException, *_FAULTS) as error:
        cause: BaseException = error
        if isinstance(error, dcp.CheckpointException):
            cause = error.failures[min(error.failures)][0]
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        raise UsageError(f"{what} ({lines[0][:200]})") from None
