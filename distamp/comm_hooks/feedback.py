"""Error feedback: what rounding took, by bucket; how it follows loss scales and checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdRef

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.exchange import Chunks, Exchange, Plan
from distamp.host import moved

__all__ = ["Bucket", "ErrorFeedback"]

# 6: rank and number of ranks in the keys of residuals.
_VERSION = 6


class Bucket(NamedTuple):
    """What rounding took from gradients that are exchanged together.

    Residuals are fp32, in units of the mean, divided by the loss scale where a scaler is attached,
    and always finite. Of gradients that are averaged there is one for each rounding: of the part
    that this rank sends to other hosts, and of the mean that it owns; of shards the first alone.
    """

    plan: Plan | Chunks
    name: str
    residuals: list[Tensor]


class ErrorFeedback:
    """The residuals of one hook on this rank."""

    # What survives a call. Buckets, by exchange, kind, length and parameters. Names, by which a
    # checkpoint knows these, and what of a loaded state is in no bucket yet. The loss scale once a
    # scaler told it; by device what `Feedback.units` says, written in place, since a recorded
    # graph reads it; whether the backward passes of this iteration have that scale, whether one of
    # its optimizers has stepped, and whether residuals are in unscaled units.
    def __init__(self) -> None:
        self._buckets: dict[tuple[Hashable, str, int, tuple[WeakIdRef, ...]], Bucket] = {}
        self._names: dict[int, str] = {}
        self._loaded: dict[str, list[Tensor]] = {}
        self._scale: Tensor | None = None
        self._units: dict[torch.device, Tensor] = {}
        self._scaled_now = False
        self._stepped_now = False
        self._scaled = False

    def bucket(
        self,
        exchange: Exchange,
        kind: str,
        numel: int,
        parameters: Sequence[Tensor],
        plan: Plan | Chunks,
    ) -> Bucket:
        """Return the bucket of these gradients; residuals of a new one are loaded ones, or zeros.

        Args:
            exchange: What carries them.
            kind: What is done with them, in a word.
            numel: How many.
            parameters: Whose.
            plan: Where they go, if the bucket is new.
        """
        references = tuple(map(WeakIdRef, parameters))
        key = exchange, kind, numel, references
        if key not in self._buckets:
            # DDP makes other buckets after the first pass.
            mine = {*references}
            for other in [k for k in self._buckets if k[:2] == key[:2] and mine & {*k[3]}]:
                del self._buckets[other]
            if isinstance(plan, Plan):
                lengths = [plan.mine.rows * plan.mine.numel, plan.mine.numel]
            else:
                lengths = [sum(places.rows * places.numel for _, _, places in plan)]
            names = (self._names.get(id(each), "") for each in parameters)
            name = f"{who()} in {exchange.levels}, {kind}: {', '.join(names)}"
            residuals = [
                torch.zeros(n, dtype=torch.float32, device=exchange.device) for n in lengths
            ]
            loaded = self._loaded.pop(name, [])
            if [each.numel() for each in loaded] == lengths:
                for residual, each in zip(residuals, loaded, strict=True):
                    residual.copy_(each)
            self._buckets[key] = Bucket(plan, name, residuals)
        return self._buckets[key]

    def known(
        self, exchange: Exchange, kind: str, numel: int, parameters: Sequence[Tensor]
    ) -> Bucket | None:
        """Return the bucket of these gradients, if it is there already."""
        return self._buckets.get((exchange, kind, numel, tuple(map(WeakIdRef, parameters))))

    def units(self, device: torch.device) -> Tensor:
        """Return what `Feedback.units` is in a backward pass: ones where no scaler told a scale."""
        # A rank without more inputs is in no backward pass, and keeps to the scale it heard last.
        if self._scale is None or not (self._scaled_now or not torch_compat.in_backward_pass()):
            return _ones(device)
        if device not in self._units:
            self._units[device] = torch.ones(3, dtype=torch.float32, device=device)
            self._read_scale()
        return self._units[device]

    # -- with a scaler ---------------------------------------------------------------------------

    def scale_changed(self, scale: Tensor) -> None:
        """See `distamp.protocols.CommHook.scale_changed`."""
        if not self._scaled:
            # They are in units of another scale, which nobody knows.
            self._loaded, self._buckets = {}, {}
        self._scale, self._scaled, self._scaled_now = scale, True, True
        self._read_scale()

    def step_ended(self, found_inf: Tensor) -> None:
        """See `distamp.protocols.CommHook.step_ended`.

        What rounding took of a step that is not taken belongs to nothing; where one of several
        optimizers skips, all begin again.
        """
        for units in self._units.values():
            taken = 1 - moved(found_inf, units.device)
            units[2].copy_(units[2] * taken if self._stepped_now else taken)
        self._stepped_now = True

    def iteration_ended(self) -> None:
        """See `distamp.protocols.CommHook.iteration_ended`."""
        self._scaled_now = self._stepped_now = False
        # The scaler may have written the next scale into the same tensor.
        self._read_scale()

    def _read_scale(self) -> None:
        for device, units in self._units.items():
            assert self._scale is not None
            units[0].copy_(self._scale, non_blocking=device.type != "cpu")
            torch.reciprocal(units[0], out=units[1])

    # -- checkpoints -----------------------------------------------------------------------------

    def name_parameters(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Give parameters the names by which a checkpoint knows them."""
        self._names = {id(parameter): name for name, parameter in named_parameters}

    def state_dict(self) -> dict[str, Any]:
        """See `CommHookState.state_dict`."""
        residuals = dict(self._loaded)
        for bucket in self._buckets.values():
            if not all(name.strip() for name in bucket.name.partition(": ")[2].split(", ")):
                raise RuntimeError(
                    "this hook knows no names of parameters, and equal buckets would be saved as "
                    "one: call state.name_parameters(model.module.named_parameters()) first, or "
                    "register it by distamp.comm_hooks.register"
                )
            kept = [self._units.get(r.device, _ones(r.device))[2] * r for r in bucket.residuals]
            residuals[bucket.name] = kept
        ranks = dist.get_world_size()
        return {
            "version": _VERSION,
            "ranks": ranks,
            "scaled": self._scaled,
            "residuals": residuals,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], levels: Sequence[str]) -> None:
        """See `CommHookState.load_state_dict`; ``levels`` are those of the exchanges, if known.

        Raises:
            ValueError: It is something else.
        """
        if not _is_state(state_dict):
            raise ValueError(
                f"{state_dict!r:.80} is no state of a hook that this distamp reads (version "
                f"{_VERSION}): load what hook.state_dict() returned"
            )
        residuals: dict[str, list[Tensor]] = dict(state_dict["residuals"])
        ranks = dist.get_world_size()
        if state_dict["ranks"] != ranks and (residuals or self._buckets):
            warnings.warn(
                f"the hook's residuals were saved by {state_dict['ranks']} ranks, and this is one "
                f"of {ranks}: they are dropped, which loses the rounding of one step",
                stacklevel=3,
            )
            residuals = {}
        theirs = {name.partition(", ")[0] for name in residuals}
        mine = {f"{who()} in {each}" for each in levels}
        if theirs - mine if levels else [x for x in theirs if not x.startswith(f"{who()} in ")]:
            warnings.warn(
                f"the hook's residuals are those of {', '.join(sorted(theirs))}, and this is "
                f"{', '.join(sorted(mine)) or who()}: they are dropped, which loses the rounding "
                "of one step",
                stacklevel=3,
            )
            residuals = {}
        self._buckets = {}
        for units in self._units.values():
            units[2].fill_(1.0)
        self._scaled, self._loaded = state_dict["scaled"], residuals


def who() -> str:
    """Return which rank this is, by which a checkpoint knows its residuals."""
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


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


@lru_cache(64)
def _ones(device: torch.device) -> Tensor:
    return torch.ones(3, dtype=torch.float32, device=device)
