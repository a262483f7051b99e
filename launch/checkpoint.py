"""What a run goes on from, by torch.distributed.checkpoint: any number of ranks, any layout."""

import io
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from distamp.initialize import Amp
from launch.config import Config
from launch.folder import checkpoints_of, remove
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


class State:
    """What changes while a run goes on, under names that mean the same in every layout.

    A weight is here once, as the optimizer steps it: the fp32 master where there is one. So a run
    of any level goes on at any other.

    Args:
        model: Not wrapped.
        optimizers: Over its parameters; before `distamp.initialize`, which may give them masters.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.model = model
        self.optimizers = optimizers
        self.kinds = [type(optimizer).__name__ for optimizer in optimizers]
        self.progress = Progress()
        self.ema: dict[str, Tensor] = {}
        names = {id(p): name for name, p in model.named_parameters()}
        self._names = [[names[id(p)] for p, _ in _stepped(each)] for each in optimizers]

    def weights(self) -> dict[str, Tensor]:
        """Return every parameter by name, as it is stepped."""
        found: dict[str, Tensor] = dict(self.model.named_parameters())
        found |= {name: parameter for name, parameter, _, _ in self._states()}
        return {name: tensor.detach() for name, tensor in found.items()}

    def tensors(self) -> dict[str, Any]:
        """Return this rank's part of weights, their average and the optimizers' state, by name."""
        found = {f"model.{name}": tensor for name, tensor in self.weights().items()}
        found |= {f"ema.{name}": tensor for name, tensor in self.ema.items()}
        for name, _, _, state in self._states():
            found |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
        return found

    def expect(self, metadata: dict[str, Any]) -> None:
        """Give the optimizers the state that a checkpoint has, still empty."""
        for name, weight, group, state in self._states():
            # The count of steps is on the host, unless the kernel reads it.
            on_device = group.get("fused") or group.get("capturable")
            prefix, device = f"optimizer.{name}.", weight.device if on_device else "cpu"
            for key in (key for key in metadata if key.startswith(prefix)):
                size = getattr(metadata[key], "size", None)  # None: of no tensor
                like = torch.zeros_like(weight) if size == weight.shape else None
                other = None if size is None else torch.zeros(size, device=device)
                state[key.removeprefix(prefix)] = other if like is None else like

    @torch.no_grad()
    def accept(self, read: dict[str, Any]) -> None:
        """Take over what was read into ``tensors``: values that are no tensors, and masters."""
        for name, _, _, state in self._states():
            state |= {key: read[f"optimizer.{name}.{key}"] for key in state}
        stepped = self.weights()
        for name, parameter in self.model.named_parameters():
            if stepped[name].dtype != parameter.dtype:
                parameter.copy_(stepped[name])

    def _states(self) -> Iterator[tuple[str, Tensor, dict[str, Any], dict[str, Any]]]:
        for names, optimizer in zip(self._names, self.optimizers, strict=True):
            for name, (parameter, group) in zip(names, _stepped(optimizer), strict=True):
                yield name, parameter, group, optimizer.state[parameter]


def _stepped(optimizer: Optimizer) -> list[tuple[Tensor, dict[str, Any]]]:
    return [(p, group) for group in optimizer.param_groups for p in group["params"]]


class Checkpoints:
    """The checkpoints of a run: folders that torch writes, whose .metadata comes last.

    Args:
        config: Where, how many, and whether training waits for them.
        layout: The ranks that write.
        state: What is written.
        amp: Whose loss scale and hooks are written too.
        device: Whose random numbers are.
    """

    def __init__(
        self, config: Config, layout: Layout, state: State, amp: Amp, device: torch.device
    ) -> None:
        self._config = config
        self._layout = layout
        self._state = state
        self._amp = amp
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
        state, tensors = self._state, self._state.tensors()
        tensors[f"rank.{self._layout.rank}"] = self._own()
        if self._layout.rank == 0:
            about = {**asdict(state.progress), "scaler": self._amp.scaler.state_dict()}
            about |= {"ranks": self._ranks, "optimizers": state.kinds}
            tensors |= {**_buffers(state.model), "about": json.dumps(about)}
        folder = self._config.run_dir / "checkpoints" / f"step-{state.progress.step:08d}"
        writer = dcp.FileSystemWriter(folder)
        with _one_sentence(f"cannot write {folder}"):
            if self._config.async_save:
                found: Any = dcp.async_save(
                    tensors, storage_writer=writer, process_group=self._group
                )
                self._future = found
            else:
                dcp.save(tensors, storage_writer=writer)
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
        state, own = self._state, f"rank.{self._layout.rank}"
        reader = dcp.FileSystemReader(path)
        with _one_sentence(f"--resume {path}: it is damaged, or of another model"):
            metadata = reader.read_metadata().state_dict_metadata
            first: dict[str, Any] = {"about": None}
            dcp.load(first, storage_reader=reader)
            about = json.loads(first["about"])
            if about["optimizers"] == state.kinds:
                state.expect(metadata)
            wanted = state.tensors() | _buffers(state.model)
            new = [name for name in state.ema if f"ema.{name}" not in metadata]
            averages = {name: wanted.pop(f"ema.{name}") for name in new}
            if about["ranks"] == self._ranks:
                wanted[own] = None
            dcp.load(wanted, storage_reader=reader)
            state.accept(wanted)
            for name, average in averages.items():
                average.copy_(wanted[f"model.{name}"])
            state.progress = Progress(**{name: about[name] for name in asdict(Progress())})
            if self._amp.precision.loss_scale == "dynamic" and about["scaler"]:
                self._amp.scaler.load_state_dict(about["scaler"])
            if own in wanted:
                self._restore(wanted[own])

    def _own(self) -> bytes:
        """Return what each rank has for itself: random numbers, statistics, residuals of hooks."""
        random = [module.get_rng_state() for module in self._random]
        hooks = [hook.state_dict() for hook in self._amp.comm_hooks]
        buffer = io.BytesIO()
        torch.save((random, _buffers(self._state.model), hooks), buffer)
        return buffer.getvalue()

    @torch.no_grad()
    def _restore(self, own: bytes) -> None:
        random, buffers, hooks = torch.load(io.BytesIO(own), "cpu", weights_only=True)
        for module, numbers in zip(self._random, random, strict=True):
            module.set_rng_state(numbers)
        for name, tensor in _buffers(self._state.model).items():
            tensor.copy_(buffers[name])
        for hook, saved in zip(self._amp.comm_hooks, hooks, strict=False):
            hook.load_state_dict(saved)


def load_weights(path: Path, model: nn.Module) -> None:
    """Fill a whole model from a checkpoint: with the average of the weights where it has one.

    Raises:
        UsageError: The checkpoint is damaged, or of another model.
    """
    with _one_sentence(f"{path}: it is damaged, or of another model"):
        metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        kind = "ema" if any(name.startswith("ema.") for name in metadata) else "model"
        weights = {f"{kind}.{name}": p.detach() for name, p in model.named_parameters()}
        dcp.load({**weights, **_buffers(model)}, storage_reader=dcp.FileSystemReader(path))


def _buffers(model: nn.Module) -> dict[str, Any]:
    """Return what is no parameter, but is saved with a model; under their names in a checkpoint."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    saved = model.state_dict(keep_vars=True)
    return {f"model.{name}": saved[name] for name in saved.keys() - parameters.keys()}


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
