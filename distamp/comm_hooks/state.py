"""The state of a communication hook: what a user, a scaler and a checkpoint see of it."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.utils.weak import WeakIdRef

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.exchange import Exchange, Plan
from distamp.comm_hooks.formats import BLOCK, Feedback, WireFormat, wire_format
from distamp.comm_hooks.hosts import Hosts, agreed, hosts_of, own_row
from distamp.comm_hooks.stats import HookStats
from distamp.host import moved

__all__ = ["CommHookState", "fits", "reals_in", "state_of"]

# 5: residuals by bucket, where 4 had them by parameter.
_VERSION = 5
UNEVEN = "hosts have different numbers of ranks"


def _is_state(state: Any) -> bool:
    """Return whether this is what `CommHookState.state_dict` returns, undamaged."""
    kinds = {"version": int, "levels": str, "scaled": bool, "residuals": dict}
    if not isinstance(state, Mapping) or any(type(state.get(k)) is not kinds[k] for k in kinds):
        return False
    return state["version"] == _VERSION and all(
        isinstance(names, tuple)
        and isinstance(residuals, list)
        and all(map(_is_residual, residuals))
        for names, residuals in state["residuals"].items()
    )


def _is_residual(value: Any) -> bool:
    return (
        isinstance(value, Tensor) and value.dtype is torch.float32 and bool(value.isfinite().all())
    )


def fits(wire: WireFormat, dtype: torch.dtype) -> bool:
    """Return whether gradients do not grow on the wire."""
    return wire.block_bytes <= BLOCK * dtype.to_real().itemsize


def reals_in(parameter: Tensor) -> int:
    """Return how many numbers the gradient of a parameter takes in a bucket: two for a complex."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


class _Bucket(NamedTuple):
    """What rounding took from a bucket of gradients that are exchanged together.

    There is one residual for each rounding: of the part that this rank sends to other hosts, and of
    the mean that it owns. They are in units of the mean, divided by the loss scale where a scaler
    is attached, and always finite.
    """

    plan: Plan
    names: tuple[str, ...]
    residuals: list[Tensor]


class CommHookState:
    """The state of a hook that averages gradients through a wire; `register` returns one.

    Unlike the process group that torch's own hooks take for a state, it counts what it sends, and a
    `DistGradScaler` that is joined with it tells it the loss scale and which steps were skipped.

    A copy of it, as ``copy.deepcopy`` and ``torch.save`` of a DDP module make one, has its format
    alone: torch registers no hook on a copy of a module, so it says how to.

    Args:
        wire: The format on the way: a name of `WIRE_FORMATS`.
        process_group: The ranks to average over; None is the default group when first used.

    Raises:
        ValueError: Unknown format.
    """

    # What survives a call. The wire, what is counted, the group. Exchanges, by group: connections
    # and buffers. With error feedback: buckets, by exchange, length and parameters; names, by which
    # a checkpoint knows these, and what of a loaded state is in no bucket yet. The loss scale once
    # a scaler told it, with its reciprocal; whether the backward passes of this iteration have it,
    # and whether residuals are in unscaled units.
    def __init__(
        self, wire: str | WireFormat = "fp16", process_group: ProcessGroup | None = None
    ) -> None:
        self.wire = wire if isinstance(wire, WireFormat) else wire_format(wire)
        self.counts = HookStats()
        self._group: Callable[[], ProcessGroup | None] = torch_compat.default_group
        if process_group is not None:
            self._group = weakref.ref(process_group)
        self._exchanges: weakref.WeakKeyDictionary[
            ProcessGroup, dict[torch.device, Exchange | None]
        ] = weakref.WeakKeyDictionary()
        self._buckets: dict[tuple[Exchange, int, tuple[WeakIdRef, ...]], _Bucket] = {}
        self._names: dict[int, str] = {}
        self._loaded: dict[tuple[str, ...], list[Tensor]] = {}
        self._scale: Tensor | None = None
        self._pair: Tensor | None = None
        self._scaled_now = False
        self._scaled = False

    def stats(self) -> HookStats:
        """Return what this rank has sent so far."""
        return copy.deepcopy(self.counts)

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that are averaged over.

        Raises:
            ValueError: torch.distributed is not initialised.
            RuntimeError: The group was destroyed.
        """
        group = self._group()
        if group is None or torch_compat.is_destroyed(group):
            self.close()
            raise RuntimeError(
                "the process group of this communication hook was destroyed; wrap the model and "
                "register the hook again"
            )
        return group

    def close(self) -> None:
        """Give threads and connections back, when what is under way is done; on any rank alone.

        Without, it is done when the state and its model are collected, at the first use after the
        group was destroyed, and as the interpreter ends.
        """
        for known in self._exchanges.values():
            for each in filter(None, known.values()):
                each.transport.close()

    def __enter__(self) -> CommHookState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def exchange(
        self, group: ProcessGroup, device: torch.device, hosts: Hosts | None = None
    ) -> Exchange | None:
        """Return the exchange over some ranks; the first call for a device is collective.

        None where hosts have different numbers of ranks: gradients go as they are.

        Args:
            group: The ranks.
            device: Where gradients lie.
            hosts: Which of the ranks are on which; without, the first call asks them.
        """
        known = self._exchanges.setdefault(group, {})
        if device not in known:
            hosts = hosts or hosts_of(agreed(own_row(self.wire.name), group))
            self.counts.levels = hosts.text
            # Of several devices of one process each has connections of its own.
            named = replace(hosts, name=f"{hosts.name}/{len(known)}")
            even = bool(hosts.ranks)
            known[device] = Exchange(named, group, device, self.counts) if even else None
        return known[device]

    def __getstate__(self) -> dict[str, Any]:
        return {"wire": self.wire}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CommHookState.__init__(self, state["wire"])
        warnings.warn(
            "a copy of a module with a communication hook sends gradients uncompressed, as fp32: "
            "torch registers no hook on copies. If this one is trained, call "
            f'distamp.comm_hooks.register(model, "{self.wire.name}") on it',
            stacklevel=2,
        )

    # -- exchanges -------------------------------------------------------------------------------

    def average(self, values: Tensor, parameters: Sequence[Tensor]) -> Future[Tensor]:
        """Average one bucket over all ranks, in place, while the caller goes on.

        Args:
            values: 1-D, contiguous, dense.
            parameters: Those whose gradients lie in it.

        Raises:
            RuntimeError: An exchange failed before, on whichever rank.
        """
        group, wire = self.process_group, self.wire
        if group.size() == 1 or values.numel() == 0:
            return torch_compat.completed(values)
        if not fits(wire, values.dtype):
            reason = f"{values.dtype} gradients all-reduced as they are".removeprefix("torch.")
            return self.all_reduce(values, reason)
        exchange = self.exchange(group, values.device)
        if exchange is None:
            return self.all_reduce(values, f"gradients all-reduced as they are ({UNEVEN})")
        if not wire.needs_error_feedback:
            return exchange.average(values, wire, exchange.plan(values.numel()))
        bucket = self._bucket(exchange, values.numel(), parameters)
        units = self._units(values.device)
        of_mine, of_mean = (Feedback(each, units) for each in bucket.residuals)
        return exchange.average(values, wire, bucket.plan, feedback=(of_mine, of_mean))

    def reduce(
        self, values: Tensor, group: ProcessGroup, divisor: float, out: Tensor | None = None
    ) -> None:
        """Write this rank's part of the sum over some ranks to ``out``; without, the sum in place.

        Args:
            values: 1-D, contiguous, floating.
            group: The ranks.
            divisor: By which the sum is divided.
            out: 1-D, contiguous, floating.

        Raises:
            RuntimeError: An exchange failed on this rank, or did before.
        """
        if group.size() == 1:
            (values if out is None else out).copy_(values / divisor)
            return
        exchange = self.exchange(group, values.device)
        if exchange is None:
            self.counts.fallbacks[f"gradients reduced as they are ({UNEVEN})"] += 1
            torch_compat.reduce(values.div_(divisor), group, out)
        elif out is None:
            plan = exchange.plan(values.numel())
            exchange.average(values, self.wire, plan, divisor=divisor).wait()
        else:
            exchange.reduce_scatter(out, values, self.wire, divisor=divisor)

    def all_reduce(self, values: Tensor, reason: str) -> Future[Tensor]:
        """Average gradients as without a hook, and count that."""
        group = self.process_group
        self.counts.fallbacks[reason] += 1
        work = dist.all_reduce(values.div_(group.size()), group=group, async_op=True)
        result: Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
        return result

    def _bucket(self, exchange: Exchange, numel: int, parameters: Sequence[Tensor]) -> _Bucket:
        references = tuple(map(WeakIdRef, parameters))
        key = exchange, numel, references
        if key in self._buckets:
            return self._buckets[key]
        # DDP makes other buckets after the first pass.
        kept = {k: each for k, each in self._buckets.items() if not {*k[2]} & {*references}}
        numels = [reals_in(each) for each in parameters]
        plan = exchange.plan(*numels if sum(numels) == numel else [numel])
        lengths = plan.mine.rows * plan.mine.numel, plan.mine.numel
        bucket = _Bucket(
            plan,
            tuple(self._names.get(id(each), "") for each in parameters),
            [torch.zeros(n, dtype=torch.float32, device=exchange.device) for n in lengths],
        )
        loaded = self._loaded.pop(bucket.names, [])
        if tuple(each.numel() for each in loaded) == lengths:
            for mine, each in zip(bucket.residuals, loaded, strict=True):
                mine.copy_(each)
        self._buckets = {**kept, key: bucket}
        return bucket

    def _units(self, device: torch.device) -> Tensor:
        """Return the scale of a backward pass, as of `Feedback`: 1 where no scaler told one."""
        # A rank without more inputs is in no backward pass, and keeps to the scale it heard last.
        if self._pair is not None and (self._scaled_now or not torch_compat.in_backward_pass()):
            return moved(self._pair, device)
        return _ones(device)

    # -- checkpoints -----------------------------------------------------------------------------

    def name_parameters(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Give parameters the names by which a checkpoint knows them."""
        self._names = {id(parameter): name for name, parameter in named_parameters}

    def state_dict(self) -> dict[str, Any]:
        """Return what rounding took from this rank's gradients; each rank saves its own.

        ``"residuals"`` has, by the names of the parameters of a bucket, two fp32 tensors: of the
        part that this rank sends to other hosts, and of the mean that it owns. It is empty for
        formats without error feedback. ``"scaled"`` says whether they are in unscaled units, by an
        attached scaler. ``"levels"`` are the ranks and hosts that they belong to.
        """
        residuals = dict(self._loaded)
        for bucket in self._buckets.values():
            residuals[bucket.names] = [each.clone() for each in bucket.residuals]
        return {
            "version": _VERSION,
            "wire": self.wire.name,
            "levels": self.counts.levels,
            "scaled": self._scaled,
            "residuals": residuals,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank, between any two backward passes.

        A bucket of other parameters begins anew. Residuals of other ranks and hosts are dropped,
        with a warning; without one, if a scaler is attached now and was not then.

        Raises:
            ValueError: It is something else, or of a version that this distamp does not read.
        """
        if not _is_state(state_dict):
            raise ValueError(
                f"{state_dict!r:.80} is no state of a hook that this distamp reads (version "
                f"{_VERSION}): load what hook.state_dict() returned"
            )
        levels, residuals = state_dict["levels"], dict(state_dict["residuals"])
        if residuals and self.counts.levels not in ("", levels):
            warnings.warn(
                f"the hook's residuals were saved in {levels}, and this is {self.counts.levels}: "
                "they are dropped, which loses the rounding of one step",
                stacklevel=2,
            )
            residuals = {}
        self._buckets = {}
        self._scaled, self._loaded = state_dict["scaled"], residuals

    # -- with a scaler ---------------------------------------------------------------------------

    def scale_changed(self, scale: Tensor) -> None:
        """See `distamp.protocols.CommHook.scale_changed`."""
        if not self._scaled:
            # They are in units of another scale, which nobody knows.
            self._loaded, self._buckets = {}, {}
        self._scale, self._scaled, self._scaled_now = scale, True, True
        self._read_scale()

    def step_ended(self, parameters: Sequence[Tensor] | None, found_inf: Tensor) -> None:
        """See `distamp.protocols.CommHook.step_ended`."""
        stepped = None if parameters is None else {*map(WeakIdRef, parameters)}
        for (_, _, references), bucket in self._buckets.items():
            if stepped is None or not stepped.isdisjoint(references):
                for residual in bucket.residuals:
                    # What rounding took of a step that is not taken belongs to nothing.
                    residual.mul_(1 - moved(found_inf, residual.device))

    def iteration_ended(self) -> None:
        """See `distamp.protocols.CommHook.iteration_ended`."""
        self._scaled_now = False
        # The scaler may have written the next scale into the same tensor.
        self._read_scale()

    def _read_scale(self) -> None:
        if self._scale is not None:
            self._pair = torch.stack([self._scale, self._scale.reciprocal()])


@lru_cache(64)
def _ones(device: torch.device) -> Tensor:
    return torch.ones(2, dtype=torch.float32, device=device)


# States of hooks that were given a process group, or None, where torch's take no more than that.
_states: weakref.WeakKeyDictionary[ProcessGroup, dict[str, CommHookState]] = (
    weakref.WeakKeyDictionary()
)


def state_of(state: CommHookState | ProcessGroup | None, wire: str) -> CommHookState:
    """Return the state itself, or the one that hooks of this format share for a process group.

    Raises:
        TypeError: ``state`` is something else.
    """
    if isinstance(state, CommHookState):
        return state
    group = torch_compat.default_group() if state is None else state
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            "the state of a communication hook must be a ProcessGroup, None (the default group) or "
            f"what distamp.comm_hooks.register returned, not {type(state).__name__}"
        )
    known = _states.setdefault(group, {})
    if wire not in known:
        known[wire] = CommHookState(wire, group)
    return known[wire]
