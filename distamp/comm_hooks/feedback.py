"""Error feedback: what rounding took, by bucket; how it follows loss scales and checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.formats import BLOCK, Feedback
from distamp.device_utils import is_cpu, to_device

__all__ = ["ErrorFeedback", "Residual"]

# 7: what is done with a bucket is one of two words in the keys of residuals.
_VERSION = 7


@dataclass(frozen=True)
class Residual:
    """The rounding error that one bucket waits to send, and the iteration that wrote each block.

    A block that is exchanged in no later iteration, because its layer drops out, keeps both.

    Args:
        values: fp32, 1-D, whole blocks.
        written: bool, for each block: whether an exchange of this iteration wrote it.
    """

    values: Tensor
    written: Tensor

    @classmethod
    def from_values(cls, values: Tensor) -> Residual:
        """Return a residual that no exchange of this iteration wrote."""
        written = torch.zeros(values.numel() // BLOCK, dtype=torch.bool, device=values.device)
        return cls(values, written)

    def drop_written(self, skipped: Tensor) -> None:
        """Set the blocks that this iteration wrote to zero where ``skipped`` is not 0.

        Args:
            skipped: 0-d, on any device; the host does not wait for a device.
        """
        dropped = self.written & (to_device(skipped, self.values.device) != 0)
        self.values.view(-1, BLOCK).masked_fill_(dropped.unsqueeze(1), 0.0)


class ErrorFeedback:
    """The residuals of one hook on this rank: what a scaler and a checkpoint see of it.

    They are fp32, in units of the mean, divided by the loss scale where a scaler is attached, and
    always finite. Of gradients that are averaged there is one for each rounding: of the part that
    this rank sends to other hosts, and of the mean that it owns; of shards the first alone.
    """

    # What survives a call. Residuals, by a bucket's name and the identities of its parameters.
    # Names, by which a checkpoint knows these, and what of a loaded state is in no bucket yet. The
    # loss scale once a scaler told it; by device what `Feedback.scale` says, written in place,
    # since a recorded graph reads it; whether the backward passes of this iteration have that
    # scale, and whether residuals are in unscaled units. In which levels buckets are exchanged.
    def __init__(self) -> None:
        self._residuals: dict[tuple[str, tuple[int, ...]], list[Residual]] = {}
        self._names: dict[int, str] = {}
        self._loaded: dict[str, list[Tensor]] = {}
        self._scale: Tensor | None = None
        self._units: dict[torch.device, Tensor] = {}
        self._scaled_now = False
        self._scaled = False
        self._levels: set[str] = set()

    def feedback(
        self, where: str, parameters: Sequence[Tensor], numels: Sequence[int], device: torch.device
    ) -> list[Feedback]:
        """Return the feedback of a bucket's roundings, as `Feedback`; a new one's is loaded, or 0.

        Args:
            where: What is done with the bucket, and between which ranks, in words.
            parameters: Whose gradients lie in it.
            numels: How many elements each rounding has.
            device: Where they lie.
        """
        key = where, tuple(map(id, parameters))
        residuals = self._residuals.get(key, [])
        if not _fits([residual.values for residual in residuals], numels):
            # DDP makes other buckets after the first pass.
            mine = {*key[1]}
            for other in [k for k in self._residuals if k[0] == where and mine & {*k[1]}]:
                del self._residuals[other]
            loaded = self._loaded.pop(self._name(key), [])
            if _fits(loaded, numels):
                values = [tensor.to(device, copy=True) for tensor in loaded]
            else:
                values = [torch.zeros(n, dtype=torch.float32, device=device) for n in numels]
            residuals = [Residual.from_values(tensor) for tensor in values]
            self._residuals[key] = residuals
        scale = self._units_of(device)
        return [Feedback(residual.values, residual.written, scale) for residual in residuals]

    def _name(self, key: tuple[str, tuple[int, ...]]) -> str:
        where, parameters = key
        names = (self._names.get(each, "?") for each in parameters)
        return f"{who()} in {where}: {', '.join(names)}"

    def _units_of(self, device: torch.device) -> Tensor:
        # A rank without more inputs is in no backward pass, and keeps to the scale it heard last.
        known = self._scale is None or self._scaled_now or not torch_compat.in_backward_pass()
        if not known:
            return torch.ones(2, dtype=torch.float32, device=device)
        if device not in self._units:
            self._units[device] = torch.ones(2, dtype=torch.float32, device=device)
            self._read_scale()
        return self._units[device]

    # -- with a scaler ---------------------------------------------------------------------------

    def on_scale(self, scale: Tensor) -> None:
        """See `distamp.observers.CommHook.on_scale`."""
        if not self._scaled:
            # They are in units of another scale, which nobody knows.
            self._loaded, self._residuals = {}, {}
        self._scale, self._scaled, self._scaled_now = scale, True, True
        self._read_scale()

    def on_step(self, parameters: Sequence[Tensor] | None, found_inf: Tensor) -> None:
        """See `distamp.observers.CommHook.on_step`.

        The rounding error of a skipped step is dropped here, and not at the bucket's next exchange,
        because a layer may drop out of the next iterations, or a second micro-batch may exchange
        the bucket again. If one of several optimizers skips, all buckets that the iteration
        exchanged so far lose their residuals. A bucket that the iteration did not exchange keeps
        its residual.
        """
        if is_cpu(found_inf.device) and not bool(found_inf):
            return
        for residual in self._all_residuals():
            residual.drop_written(found_inf)

    def on_update(self) -> None:
        """See `distamp.observers.CommHook.on_update`."""
        self._scaled_now = False
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
        for device, units in self._units.items():
            units[0].copy_(self._scale, non_blocking=device.type != "cpu")
            torch.reciprocal(units[0], out=units[1])

    # -- checkpoints -----------------------------------------------------------------------------

    def name_parameters(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Give parameters the names by which a checkpoint knows them; `register_comm_hook` does."""
        self._names = {id(parameter): name for name, parameter in named_parameters}

    def state_dict(self) -> dict[str, Any]:
        """Return what rounding took from this rank's gradients.

        Each rank saves its own, or all save theirs by ``torch.distributed.checkpoint``:
        ``"residuals"`` has lists of fp32 tensors, by which rank of how many this is, in which
        levels, and the names of a bucket's parameters. It is empty for formats without error
        feedback. ``"scaled"`` says whether they are in unscaled units, by an attached scaler.

        Raises:
            RuntimeError: Of a hook with error feedback that knows no names of parameters.
        """
        residuals = dict(self._loaded)
        for key, known in self._residuals.items():
            if not all(each in self._names for each in key[1]):
                raise RuntimeError(
                    "this hook knows no names of parameters, and equal buckets would be saved as "
                    "one: call state.name_parameters(model.module.named_parameters()) first, or "
                    "register it by distamp.comm_hooks.register_comm_hook"
                )
            residuals[self._name(key)] = [residual.values.clone() for residual in known]
        return {
            "version": _VERSION,
            "ranks": dist.get_world_size(),
            "scaled": self._scaled,
            "residuals": residuals,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank, between any two backward passes.

        A bucket of other parameters begins anew. Residuals of other ranks, or of other numbers of
        ranks or hosts, are dropped, with a warning; without one, if a scaler is attached now and
        was not then.

        Raises:
            ValueError: It is something else, or of a version that this distamp does not read.
        """
        if not _is_state(state_dict):
            raise ValueError(
                f"{state_dict!r:.80} is no state of a hook that this distamp reads (version "
                f"{_VERSION}): load what hook.state_dict() returned"
            )
        residuals, ranks = dict(state_dict["residuals"]), state_dict["ranks"]
        theirs = {name.partition(", ")[0] for name in residuals}
        mine = {f"{who()} in {each}" for each in self._levels}
        mine = mine or {each for each in theirs if each.startswith(f"{who()} in ")}
        same = ranks == dist.get_world_size() and theirs <= mine
        if not same and (residuals or self._residuals):
            warnings.warn(
                f"the hook's residuals are those of {', '.join(sorted(theirs))}, saved by {ranks} "
                f"ranks, and this is {', '.join(sorted(mine)) or who()}: they are dropped, which "
                "loses the rounding of one step",
                stacklevel=3,
            )
            residuals = {}
        self._residuals = {}
        self._scaled, self._loaded = state_dict["scaled"], residuals


def who() -> str:
    """Return which rank this is, by which a checkpoint knows its residuals."""
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


def _fits(residuals: Sequence[Tensor], numels: Sequence[int]) -> bool:
    return [each.numel() for each in residuals] == [*numels]


def _is_state(state: Any) -> bool:
    """Return whether this is what `ErrorFeedback.state_dict` returns, undamaged."""
    kinds = {"version": int, "ranks": int, "scaled": bool, "residuals": dict}
    if not isinstance(state, Mapping) or any(type(state.get(k)) is not kinds[k] for k in kinds):
        return False
    return state["version"] == _VERSION and all(
        isinstance(name, str) and isinstance(residuals, list) and all(map(_is_residual, residuals))
        for name, residuals in state["residuals"].items()
    )


def _is_residual(value: Any) -> bool:
    return (
        isinstance(value, Tensor) and value.dtype is torch.float32 and bool(value.isfinite().all())
    )
