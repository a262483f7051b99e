"""Error feedback: the rounding error of each bucket, through loss scales, skips and checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from distamp.comm_hooks import torch_private
from distamp.comm_hooks.formats import BLOCK_NUMEL, CommFormat
from distamp.device_utils import is_cpu, to_device

__all__ = ["Residual", "ResidualStore"]

# The version of a state. Since version 7 its keys contain "buckets" or "shards".
_VERSION = 7

# The words for the use of a bucket, and the identities of its parameters.
BucketKey: TypeAlias = tuple[str, tuple[int, ...]]


class Residual(NamedTuple):
    """The rounding error of one bucket, which the next message of the bucket sends.

    A block keeps its error and its mark while its layer drops out, because no message is sent.

    Attributes:
        values: fp32 (n * 256,), in unscaled units.
        written: bool (n,). Whether a message of this iteration has replaced the block's error.
        loss_scale: fp32 (2,). The loss scale of the gradients, and its reciprocal.
    """

    values: Tensor
    written: Tensor
    loss_scale: Tensor

    @classmethod
    def from_values(cls, values: Tensor) -> Residual:
        """Return a residual that no message of this iteration has written."""
        num_blocks = values.numel() // BLOCK_NUMEL
        written = torch.zeros(num_blocks, dtype=torch.bool, device=values.device)
        loss_scale = torch.ones(2, dtype=torch.float32, device=values.device)
        return cls(values, written, loss_scale)

    def encode(self, format: CommFormat, blocks: Tensor, out: Tensor, first_block: int = 0) -> None:
        """Encode blocks plus their error, and replace the error by that of the encoding.

        A block of zeros belongs to a parameter that was not used, and no rank would read the
        message. Its error is neither sent nor changed.

        Args:
            format: The format.
            blocks: fp32 (n, 256), which this overwrites.
            out: As `CommFormat.encode` takes it.
            first_block: The place of the first block in this residual.
        """
        stop_block = first_block + len(blocks)
        errors = self.values.view(-1, BLOCK_NUMEL)[first_block:stop_block]
        written = self.written[first_block:stop_block]
        is_zero = _find_zero_blocks(blocks)
        work = torch.mul(errors, self.loss_scale[0])
        if is_zero is not None:
            work.masked_fill_(is_zero, 0.0)
        blocks.add_(work)
        format.encode(blocks, out)

        format.decode(out, work)
        # A block that is not finite has no error that a later message could send.
        new_errors = blocks.sub_(work).mul_(self.loss_scale[1]).nan_to_num_(0.0, 0.0, 0.0)
        if is_zero is None:
            errors.copy_(new_errors)
            written.fill_(True)
        else:
            errors.copy_(torch.where(is_zero, errors, new_errors))
            written.logical_or_(is_zero.squeeze(1).logical_not_())

    def drop_written(self, skipped: Tensor) -> None:
        """Set the blocks that this iteration wrote to zero if ``skipped`` is not 0.

        Args:
            skipped: 0-d, on any device. The host does not synchronise with a device.
        """
        dropped = self.written & (to_device(skipped, self.values.device) != 0)
        self.values.view(-1, BLOCK_NUMEL).masked_fill_(dropped.unsqueeze(1), 0.0)


def _find_zero_blocks(blocks: Tensor) -> Tensor | None:
    """Return a mask (n, 1) of blocks of zeros, or None if there is no such block."""
    # A look at each block's first element spares a CPU a pass over all elements, and would
    # synchronise with a GPU.
    if blocks.device.type == "cpu" and bool(blocks[:, 0].all()):
        return None
    return ~blocks.any(1, keepdim=True)


class ResidualStore:
    """The residuals of one hook on this rank.

    Residuals are fp32, in units of the mean gradient, and always finite. They are divided by the
    loss scale if a scaler is attached. A bucket that is averaged is rounded twice and has two
    residuals, for the part that this rank sends to other hosts and for the mean that this rank
    owns. Shards have the first residual alone.
    """

    # Private attributes that survive a call:
    # _residuals: by bucket, a residual for each rounding.
    # _names: by the identity of a parameter, its name in a checkpoint.
    # _loaded: by name of a bucket, tensors of a loaded state that no bucket has used yet.
    # _scale: the loss scale of the attached scaler.
    # _scale_by_device: by device, `Residual.loss_scale`. It is written in place because a recorded
    #   graph reads it.
    # _is_current: whether `_scale` is the scale of this iteration's backward passes.
    # _is_unscaled: whether residuals are divided by the loss scale.
    # _topologies: the names of the topologies that buckets were exchanged over.

    def __init__(self) -> None:
        self._residuals: dict[BucketKey, list[Residual]] = {}
        self._names: dict[int, str] = {}
        self._loaded: dict[str, list[Tensor]] = {}
        self._scale: Tensor | None = None
        self._scale_by_device: dict[torch.device, Tensor] = {}
        self._is_current = False
        self._is_unscaled = False
        self._topologies: set[str] = set()

    def add_topology(self, name: str) -> None:
        """Let a loaded state have residuals of buckets over this topology."""
        self._topologies.add(name)

    def get(
        self, usage: str, params: Sequence[Tensor], numels: list[int], device: torch.device
    ) -> list[Residual]:
        """Return the residuals of a bucket. A new bucket gets loaded residuals, or zeros.

        Args:
            usage: The topology, and "buckets" or "shards".
            params: The parameters of the gradients in the bucket.
            numels: The number of elements of each rounding.
            device: The device of the gradients.
        """
        key = usage, tuple(map(id, params))
        residuals = self._residuals.get(key, [])
        if [residual.values.numel() for residual in residuals] != numels:
            residuals = self._make_residuals(key, numels, device)
            self._residuals[key] = residuals
        loss_scale = self._loss_scale_on(device)
        return [Residual(values, written, loss_scale) for values, written, _ in residuals]

    def _make_residuals(
        self, key: BucketKey, numels: list[int], device: torch.device
    ) -> list[Residual]:
        """Make the residuals of a bucket, and drop old buckets that shared its parameters."""
        usage, param_ids = key
        # DDP builds other buckets after its first pass.
        for old_usage, old_param_ids in list(self._residuals):
            if old_usage == usage and not set(param_ids).isdisjoint(old_param_ids):
                del self._residuals[old_usage, old_param_ids]
        loaded = self._loaded.pop(self._bucket_name(key), [])
        if [values.numel() for values in loaded] == numels:
            return [Residual.from_values(values.to(device, copy=True)) for values in loaded]
        residuals = []
        for numel in numels:
            values = torch.zeros(numel, dtype=torch.float32, device=device)
            residuals.append(Residual.from_values(values))
        return residuals

    def _bucket_name(self, key: BucketKey) -> str:
        usage, param_ids = key
        names = ", ".join(self._names.get(param_id, "?") for param_id in param_ids)
        return f"{rank_label()} in {usage}: {names}"

    def _loss_scale_on(self, device: torch.device) -> Tensor:
        # A rank that has no more inputs is in no backward pass, and keeps the last scale.
        if self._scale is not None and not self._is_current and torch_private.in_backward_pass():
            return torch.ones(2, dtype=torch.float32, device=device)
        if device not in self._scale_by_device:
            self._scale_by_device[device] = torch.ones(2, dtype=torch.float32, device=device)
            self._read_scale()
        return self._scale_by_device[device]

    # -- with a scaler ---------------------------------------------------------------------------

    def on_scale(self, scale: Tensor) -> None:
        """See `distamp.observers.CommHook.on_scale`."""
        if not self._is_unscaled:
            # These residuals were multiplied by a scale that this store never received.
            self._loaded = {}
            self._residuals = {}
        self._scale = scale
        self._is_unscaled = True
        self._is_current = True
        self._read_scale()

    def on_step(self, params: Sequence[Tensor] | None, found_inf: Tensor) -> None:
        """See `distamp.observers.CommHook.on_step`.

        The rounding error of a skipped step is dropped here, and not in the bucket's next message,
        because a layer may drop out of the next iterations, or a second micro-batch may send the
        bucket again. If one of several optimizers skips, all buckets that the iteration has sent so
        far lose their residuals. A bucket that the iteration did not send keeps its residual.
        """
        if is_cpu(found_inf.device) and not bool(found_inf):
            return
        for residual in self._all_residuals():
            residual.drop_written(found_inf)

    def on_update(self) -> None:
        """See `distamp.observers.CommHook.on_update`."""
        self._is_current = False
        for residual in self._all_residuals():
            residual.written.zero_()
        # The scaler may have written the next scale into the same tensor.
        self._read_scale()

    def _all_residuals(self) -> Iterator[Residual]:
        for residuals in self._residuals.values():
            yield from residuals

    def _read_scale(self) -> None:
        if self._scale is None:
            return
        for device, loss_scale in self._scale_by_device.items():
            loss_scale[0].copy_(self._scale, non_blocking=device.type != "cpu")
            torch.reciprocal(loss_scale[0], out=loss_scale[1])

    # -- checkpoints -----------------------------------------------------------------------------

    def name_parameters(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Set the names of parameters in checkpoints."""
        self._names = {id(param): name for name, param in named_parameters}

    def state_dict(self) -> dict[str, Any]:
        """See `CommHook.state_dict`."""
        residuals_by_name = dict(self._loaded)
        for key, residuals in self._residuals.items():
            if any(param_id not in self._names for param_id in key[1]):
                raise RuntimeError(
                    "This hook has no names of parameters, so equal buckets would be saved as "
                    "one. Call hook.name_parameters(model.module.named_parameters()) first, or "
                    "register the hook by distamp.comm_hooks.register_comm_hook."
                )
            values = [residual.values.clone() for residual in residuals]
            residuals_by_name[self._bucket_name(key)] = values
        return {
            "version": _VERSION,
            "ranks": dist.get_world_size(),
            "scaled": self._is_unscaled,
            "residuals": residuals_by_name,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `CommHook.load_state_dict`."""
        if not _is_state(state_dict):
            raise ValueError(
                f"{state_dict!r:.80} is no state of a hook that this distamp reads (version "
                f"{_VERSION}): load what hook.state_dict() returned"
            )
        residuals = dict(state_dict["residuals"])
        num_ranks = state_dict["ranks"]
        saved_labels = {name.partition(", ")[0] for name in residuals}
        labels = {f"{rank_label()} in {topology}" for topology in self._topologies}
        if not labels:
            prefix = f"{rank_label()} in "
            labels = {label for label in saved_labels if label.startswith(prefix)}
        is_same = num_ranks == dist.get_world_size() and saved_labels <= labels
        if not is_same and (residuals or self._residuals):
            warnings.warn(
                f"the hook's residuals are those of {', '.join(sorted(saved_labels))}, saved by "
                f"{num_ranks} ranks, and this is {', '.join(sorted(labels)) or rank_label()}: they "
                "are dropped, which loses the rounding of one step",
                stacklevel=3,
            )
            residuals = {}
        self._residuals = {}
        self._is_unscaled = state_dict["scaled"]
        self._loaded = residuals

    # -- snapshots -------------------------------------------------------------------------------

    def snapshot_state(self) -> dict[str, Any]:
        """See `distamp.observers.SnapshotSource`: the live residuals of each bucket."""
        state: dict[str, Any] = {}
        state["loaded"] = self._loaded
        state["is_unscaled"] = self._is_unscaled
        values_by_key: dict[BucketKey, list[Tensor]] = {}
        for key, residuals in self._residuals.items():
            values_by_key[key] = [residual.values for residual in residuals]
        state["values"] = values_by_key
        return state

    def load_snapshot_state(self, state: dict[str, Any]) -> None:
        """See `distamp.observers.SnapshotSource`: buckets that came later lose their residuals."""
        residuals_by_key: dict[BucketKey, list[Residual]] = {}
        for key, tensors in state["values"].items():
            residuals: list[Residual] = []
            for values in tensors:
                residual = Residual.from_values(values)
                residuals.append(residual)
            residuals_by_key[key] = residuals
        self._residuals = residuals_by_key
        self._loaded = state["loaded"]
        self._is_unscaled = state["is_unscaled"]
        self.on_update()


def rank_label() -> str:
    """Return the label of this rank's residuals in a checkpoint."""
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


def _is_state(state: Any) -> bool:
    """Return whether `ResidualStore.state_dict` returned this, and it is undamaged."""
    if not isinstance(state, Mapping):
        return False
    types = {"version": int, "ranks": int, "scaled": bool, "residuals": dict}
    for key, expected in types.items():
        if type(state.get(key)) is not expected:
            return False
    if state["version"] != _VERSION:
        return False
    for name, tensors in state["residuals"].items():
        if not isinstance(name, str) or not isinstance(tensors, list):
            return False
        if not all(map(_is_residual, tensors)):
            return False
    return True


def _is_residual(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dtype is not torch.float32:
        return False
    return bool(value.isfinite().all())
