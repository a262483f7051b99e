"""What a run goes on from, by torch.distributed.checkpoint: any number of ranks, any layout."""

from __future__ import annotations

import io
import json
import shutil
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import Optimizer

from distamp.initialize import Amp
from launch.config import Config, UsageError, checkpoints_of
from launch.parallel import Layout

__all__ = ["Checkpoints", "Progress", "State", "forget_after", "load_weights", "read_about"]


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
        model: Not wrapped, and before `distamp.initialize`, which may put masters into optimizers.
        optimizers: Over its parameters.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.model = model
        self.optimizers = optimizers
        self.progress = Progress()
        self.ema: dict[str, Tensor] = {}
        names = {id(p): name for name, p in model.named_parameters()}
        self._names = [[names[id(p)] for p in _parameters(o)] for o in optimizers]

    def weights(self) -> dict[str, Tensor]:
        """Return every parameter by name, as it is stepped."""
        found: dict[str, Tensor] = dict(self.model.named_parameters())
        for names, optimizer in zip(self._names, self.optimizers, strict=True):
            found |= dict(zip(names, _parameters(optimizer), strict=True))
        return {name: tensor.detach() for name, tensor in found.items()}

    def tensors(self) -> dict[str, Any]:
        """Return this rank's part of weights, their average and the optimizers' state, by name."""
        found = {f"model.{name}": tensor for name, tensor in self.weights().items()}
        found |= {f"ema.{name}": tensor for name, tensor in self.ema.items()}
        for name, _, state in self._states():
            found |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
        return found

    def expect(self, metadata: dict[str, Any]) -> None:
        """Give the optimizers the state that a checkpoint has, still empty."""
        for name, group, state in self._states():
            prefix, weight = f"optimizer.{name}.", self.weights()[name]
            for key, what in metadata.items():
                if not key.startswith(prefix):
                    continue
                empty: Tensor | None = None
                if isinstance(what, TensorStorageMetadata) and what.size == weight.shape:
                    empty = torch.zeros_like(weight)
                elif isinstance(what, TensorStorageMetadata):
                    on_device = group.get("fused") or group.get("capturable")
                    device = weight.device if on_device else "cpu"
                    empty = torch.zeros(what.size, dtype=what.properties.dtype, device=device)
                state[key.removeprefix(prefix)] = empty

    @torch.no_grad()
    def accept(self, read: dict[str, Any]) -> None:
        """Take over what was read into ``tensors``: values that are no tensors, and masters."""
        for name, _, state in self._states():
            for key in state:
                state[key] = read[f"optimizer.{name}.{key}"]
        stepped = self.weights()
        for name, parameter in self.model.named_parameters():
            if stepped[name].dtype != parameter.dtype:
                parameter.copy_(stepped[name])

    def _states(self) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
        found = []
        for names, optimizer in zip(self._names, self.optimizers, strict=True):
            pairs = [(group, p) for group in optimizer.param_groups for p in group["params"]]
            for name, (group, parameter) in zip(names, pairs, strict=True):
                found.append((name, group, optimizer.state[parameter]))
        return found


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class Checkpoints:
    """The checkpoints of a run: folders that torch writes, whose .metadata comes last.

    Args:
        config: Where, how many, and whether training waits for them.
        layout: The ranks that write.
    """

    def __init__(self, config: Config, layout: Layout) -> None:
        self._config = config
        self._layout = layout
        self._future: Future[Any] | None = None
        several = config.async_save and layout.world > 1
        # What is sent while training goes on needs a group that training does not use.
        self._group = dist.new_group(backend="gloo") if several else None

    def save(self, state: State, amp: Amp, device: torch.device, classes: int) -> None:
        """Write a checkpoint; every rank calls this.

        Raises:
            UsageError: It cannot be written, on any rank; those before it stay.
        """
        self.wait()
        if self._config.keep == 0:
            return
        about = {
            **asdict(state.progress),
            "ranks": self._layout.world,
            "device": device.type,
            "classes": classes,
            "optimizers": [type(optimizer).__name__ for optimizer in state.optimizers],
            "scaler": amp.scaler.state_dict(),
        }
        folder = self._config.run_dir / "checkpoints" / f"step-{state.progress.step:08d}"
        tensors = state.tensors()
        tensors[f"rank.{self._layout.rank}"] = _own_state(state, amp, device)
        with _one_sentence(f"cannot write {folder}"):
            if self._layout.rank == 0:
                tensors |= {f"model.{name}": value for name, value in _buffers(state.model).items()}
                folder.mkdir(parents=True, exist_ok=True)
                (folder / ".metadata").unlink(missing_ok=True)
                (folder / "state.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
            writer = FileSystemWriter(folder)
            if self._config.async_save:
                found: Any = async_save(tensors, storage_writer=writer, process_group=self._group)
                self._future = found
            else:
                save(tensors, storage_writer=writer)
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
        if self._layout.rank == 0:
            for old in checkpoints_of(self._config.run_dir)[self._config.keep :]:
                (old / ".metadata").unlink()  # from here on it is none
                shutil.rmtree(old, ignore_errors=True)

    def read(self, path: Path, state: State, amp: Amp, device: torch.device) -> None:
        """Put a run into the state of a checkpoint; every rank calls this.

        On as many ranks and the same kind of device it goes on with the same random numbers and
        residuals of hooks; else with fresh ones.

        Raises:
            UsageError: The checkpoint is damaged, or of another model.
        """
        about = read_about(path)
        same = about["ranks"] == self._layout.world and about["device"] == device.type
        kinds = [type(optimizer).__name__ for optimizer in state.optimizers]
        with _foreign(path):
            metadata = FileSystemReader(path).read_metadata().state_dict_metadata
            if about["optimizers"] == kinds:
                state.expect(metadata)
            own = f"rank.{self._layout.rank}"
            wanted: dict[str, Any] = {
                key: value
                for key, value in state.tensors().items()
                if key in metadata or not key.startswith("ema.")
            }
            wanted |= {f"model.{name}": value for name, value in _buffers(state.model).items()}
            if same:
                wanted[own] = None
            load(wanted, storage_reader=FileSystemReader(path))
        state.accept({**state.tensors(), **wanted})
        state.progress = Progress(**{name: about[name] for name in asdict(Progress())})
        if amp.precision.loss_scale == "dynamic" and about["scaler"]:
            amp.scaler.load_state_dict(about["scaler"])
        if same:
            _restore(state, amp, device, wanted[own])


def forget_after(run: Path, step: int | None, layout: Layout) -> None:
    """Let the checkpoints after a step, of a future that will be another, count no longer."""
    for path in checkpoints_of(run) if layout.rank == 0 else ():
        if step is None or int(path.name.removeprefix("step-")) > step:
            (path / ".metadata").unlink()


def read_about(path: Path) -> dict[str, Any]:
    """Read what a checkpoint says of itself.

    Raises:
        UsageError: It is damaged.
    """
    try:
        about: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
        needed = {*asdict(Progress()), "ranks", "device", "classes", "optimizers", "scaler"}
        if needed <= about.keys():
            return about
    except (OSError, ValueError, AttributeError):
        pass
    raise UsageError(f"{path}: it is damaged (state.json); pass an older checkpoint of the run")


def load_weights(path: Path, model: nn.Module) -> None:
    """Fill a whole model from a checkpoint: with the average of the weights where it has one.

    Raises:
        UsageError: The checkpoint is damaged, or of another model.
    """
    with _foreign(path), torch.no_grad():
        metadata = FileSystemReader(path).read_metadata().state_dict_metadata
        weights: dict[str, Any] = {name: p.detach() for name, p in model.named_parameters()}
        kind = "ema" if any(key.startswith("ema.") for key in metadata) else "model"
        wanted = {f"{kind}.{name}": tensor for name, tensor in weights.items()}
        wanted |= {f"model.{name}": tensor for name, tensor in _buffers(model).items()}
        load(wanted, storage_reader=FileSystemReader(path))


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return what is no parameter, but is saved with a model."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    saved = model.state_dict(keep_vars=True)
    return {
        name: t for name, t in saved.items() if name not in parameters and isinstance(t, Tensor)
    }


def _own_state(state: State, amp: Amp, device: torch.device) -> bytes:
    """Return what each rank has for itself: random numbers, statistics, residuals of hooks."""
    found: dict[str, Any] = {
        "random": torch.get_rng_state(),
        "buffers": _buffers(state.model),
        "hooks": [hook.state_dict() for hook in amp.comm_hooks],
    }
    if device.type != "cpu":
        found["device random"] = torch.get_device_module(device).get_rng_state(device)
    buffer = io.BytesIO()
    torch.save(found, buffer)
    return buffer.getvalue()


@torch.no_grad()
def _restore(state: State, amp: Amp, device: torch.device, own: bytes) -> None:
    found = torch.load(io.BytesIO(own), map_location="cpu", weights_only=True)
    torch.set_rng_state(found["random"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(found["device random"], device)
    for name, buffer in _buffers(state.model).items():
        buffer.copy_(found["buffers"][name])
    if len(found["hooks"]) == len(amp.comm_hooks):
        for hook, saved in zip(amp.comm_hooks, found["hooks"], strict=True):
            hook.load_state_dict(saved)


def _foreign(path: Path) -> AbstractContextManager[None]:
    return _one_sentence(f"--resume {path}: it is damaged, or of another model")


@contextmanager
def _one_sentence(what: str) -> Iterator[None]:
    """Turn what torch raises about files into a sentence that begins with ``what``."""
    try:
        with warnings.catch_warnings():
            # One process is one process; it is no mistake.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except (CheckpointException, OSError, ValueError, RuntimeError, KeyError, EOFError) as error:
        raise UsageError(f"{what} ({_reason(error)})") from None


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = error.failures[min(error.failures)][0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0]
