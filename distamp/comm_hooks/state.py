"""The state of a communication hook: what a user, a scaler and a checkpoint see of it."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.utils.weak import WeakTensorKeyDictionary

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.exchange import Exchange
from distamp.comm_hooks.formats import BLOCK, Feedback, WireFormat, wire_format
from distamp.comm_hooks.hosts import Hosts, agreed, hosts_of, own_row
from distamp.comm_hooks.stats import HookStats
from distamp.host import moved

__all__ = ["CommHookState", "fits", "reals_in", "state_of"]

# 5: residuals by bucket, where 4 had them by parameter.
_VERSION = 5


def fits(wire: WireFormat, dtype: torch.dtype) -> bool:
    """Return whether gradients do not grow on the wire."""
    return wire.block_bytes <= BLOCK * dtype.to_real().itemsize


def reals_in(parameter: Tensor) -> int:
    """Return how many numbers the gradient of a parameter takes in a bucket: two for a complex."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def resolve_group(process_group: ProcessGroup | None) -> ProcessGroup:
    """Return the group to exchange over: ``process_group``, or the default group for None.

    Raises:
        ValueError: torch.distributed is not initialised, or this rank is no member.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "a communication hook needs a process group: call "
            "torch.distributed.init_process_group first"
        )
    if torch_compat.is_non_member(process_group):
        raise ValueError(
            "process_group does not contain this rank; give each rank the group it belongs to"
        )
    group = dist.group.WORLD if process_group is None else process_group
    assert group is not None
    return group


class _Bucket:
    """Parameters whose gradients are exchanged together, and what rounding took from them.

    With error feedback it has one residual for each rounding: of the part that this rank sends to
    other hosts, and of the mean that it owns. They are in units of the mean, divided by the loss
    scale where a scaler is attached, and always finite.
    """

    def __init__(
        self, parameters: Sequence[Tensor], numel: int, wire: WireFormat, exchange: Exchange
    ) -> None:
        numels = [reals_in(each) for each in parameters] if wire.needs_error_feedback else []
        self.numel, self.exchange = numel, exchange
        self.plan = exchange.plan(numel, numels if sum(numels) == numel else ())
        self._parameters = [weakref.ref(each) for each in parameters]
        mine, device = self.plan.mine, exchange.device
        lengths = (mine.rows * mine.numel, mine.numel) if wire.needs_error_feedback else ()
        self.residuals = [torch.zeros(n, dtype=torch.float32, device=device) for n in lengths]

    def parameters(self) -> list[Tensor | None]:
        """Return those that there are still."""
        return [each() for each in self._parameters]

    def serves(self, parameters: Sequence[Tensor], numel: int, exchange: Exchange) -> bool:
        """Return whether it is of these parameters, exchanged in this way."""
        return (
            len(parameters) == len(self._parameters)
            and numel == self.numel
            and exchange is self.exchange
            and all(mine is each for mine, each in zip(self.parameters(), parameters, strict=True))
        )


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
        ValueError: Unknown format, or a group that this rank is no member of.
    """

    # What survives a call. The wire, what is counted, the group. Exchanges, by group: connections
    # and buffers. Of DDP: each parameter's bucket; names, by which a checkpoint knows buckets, and
    # what of a loaded state is in none yet. The loss scale once a scaler told it, whether the
    # backward passes of this iteration have it, the same on devices, and whether residuals are in
    # unscaled units.
    def __init__(
        self, wire: str | WireFormat = "fp16", process_group: ProcessGroup | None = None
    ) -> None:
        self.wire = wire if isinstance(wire, WireFormat) else wire_format(wire)
        if torch_compat.is_non_member(process_group):
            resolve_group(process_group)
        self.counts = HookStats()
        self._group = None if process_group is None else weakref.ref(process_group)
        self._exchanges: weakref.WeakKeyDictionary[ProcessGroup, dict[torch.device, Exchange]] = (
            weakref.WeakKeyDictionary()
        )
        self._buckets: Any = WeakTensorKeyDictionary()
        self._names: dict[int, str] = {}
        self._loaded: dict[tuple[str, ...], list[Tensor]] = {}
        self._scale: Tensor | None = None
        self._scaled_now = False
        self._pairs: dict[tuple[torch.device, bool], Tensor] = {}
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
        group = None if self._group is None else self._group()
        if self._group is not None and group is None:
            raise RuntimeError(
                "the process group of this communication hook was destroyed; wrap the model and "
                "register the hook again"
            )
        return resolve_group(group)

    def connect(self, group: ProcessGroup, device: torch.device, hosts: Hosts) -> Exchange:
        """Make the exchange of gradients on ``device`` over ``group``. Collective."""
        known = self._exchanges.setdefault(group, {})
        self.counts.levels = hosts.text
        # Of several devices of one process each has connections of its own.
        named = replace(hosts, name=f"{hosts.name}/{len(known)}")
        known[device] = Exchange(named, group, device, self.counts)
        return known[device]

    def exchange(self, group: ProcessGroup, device: torch.device) -> Exchange:
        """Return the exchange over some ranks; the first call for a device is collective."""
        known = self._exchanges.get(group, {})
        if device in known:
            return known[device]
        rows = agreed(own_row(self.wire.name), group)
        return self.connect(group, device, hosts_of(rows))

    def __getstate__(self) -> dict[str, Any]:
        return {"wire": self.wire.name}

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
        group = self.process_group
        if group.size() == 1 or values.numel() == 0:
            return torch_compat.completed(values)
        if not fits(self.wire, values.dtype):
            reason = f"{values.dtype} gradients all-reduced as they are".removeprefix("torch.")
            return self.all_reduce(values, reason)
        bucket = self._bucket(values, parameters, self.exchange(group, values.device))
        feedback = None
        if bucket.residuals:
            units = self._units(values.device)
            mine, owned = (Feedback(residual, units) for residual in bucket.residuals)
            feedback = mine, owned
        return bucket.exchange.average(values, self.wire, bucket.plan, feedback=feedback)

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
        with torch.no_grad():
            if group.size() == 1:
                (values if out is None else out).copy_(values / divisor)
                return
            exchange = self.exchange(group, values.device)
            if out is not None:
                exchange.reduce_scatter(out, values, self.wire, divisor=divisor)
            else:
                plan = exchange.plan(values.numel())
                exchange.average(values, self.wire, plan, divisor=divisor).wait()

    def all_reduce(self, values: Tensor, reason: str) -> Future[Tensor]:
        """Average gradients as without a hook, and count that."""
        group = self.process_group
        self.counts.fallbacks[reason] += 1
        work = dist.all_reduce(values.div_(group.size()), group=group, async_op=True)
        result: Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
        return result

    def _bucket(self, values: Tensor, parameters: Sequence[Tensor], exchange: Exchange) -> _Bucket:
        bucket: _Bucket | None = self._buckets.get(parameters[0]) if len(parameters) else None
        if bucket is not None and bucket.serves(parameters, values.numel(), exchange):
            return bucket
        what = f"{values.numel()} elements of {values.dtype}"
        row = own_row(what.replace("torch.", ""))
        agreed(row, self.process_group, "exchange different gradients", "model and bucket_cap_mb")
        bucket = _Bucket(parameters, values.numel(), self.wire, exchange)
        loaded = self._loaded.pop(self._named(parameters), [])
        if [each.shape for each in loaded] == [each.shape for each in bucket.residuals]:
            for mine, each in zip(bucket.residuals, loaded, strict=True):
                mine.copy_(each)
        self._buckets.update(dict.fromkeys(parameters, bucket))
        return bucket

    def _named(self, parameters: Iterable[Tensor | None]) -> tuple[str, ...]:
        return tuple(self._names.get(id(each), "") for each in parameters)

    def _units(self, device: torch.device) -> Tensor:
        """Return the scale of a backward pass, as of `Feedback`: 1 where no scaler told one."""
        # A rank without more inputs is in no backward pass, and keeps to the scale it heard last.
        known = self._scaled_now or not torch_compat.in_backward_pass()
        scale = self._scale if known else None
        key = device, scale is not None
        if key not in self._pairs:
            one = torch.ones((), dtype=torch.float32, device=device)
            here = one if scale is None else moved(scale, device)
            self._pairs[key] = torch.stack([here, here.reciprocal()])
        return self._pairs[key]

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
        for bucket in set(self._buckets.values()):
            names = self._named(bucket.parameters())
            if bucket.residuals and all(names):
                residuals[names] = [each.clone() for each in bucket.residuals]
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
            TypeError: Not a dict.
            ValueError: A version that this distamp does not read, or something else than residuals.
                Nothing is changed then.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                "a hook's state is the dict that hook.state_dict() returned, not "
                f"{state_dict!r:.80}"
            )
        version, residuals = state_dict.get("version"), state_dict.get("residuals")
        if type(version) is not int or version != _VERSION:
            raise ValueError(
                f"the hook's state has version {version!r:.80}, and this distamp reads {_VERSION}: "
                "load what state_dict() returned"
            )
        scaled, levels = state_dict.get("scaled"), state_dict.get("levels")
        if (
            not isinstance(residuals, Mapping)
            or not all(map(_is_residual, residuals.items()))
            or not isinstance(scaled, bool)
            or not isinstance(levels, str)
        ):
            raise ValueError(
                "the hook's state must have 'residuals', by the names of parameters two finite "
                "fp32 tensors, 'scaled', a bool, and 'levels', a str, not "
                f"{residuals!r:.80}, {scaled!r:.80} and {levels!r:.80}"
            )
        unknown = sorted({name for names in residuals for name in names} - {*self._names.values()})
        if unknown:
            raise ValueError(
                f"the hook's state has residuals of {unknown[0]!r} and {len(unknown) - 1} other "
                "parameters that the model does not have: load it for the model it was saved of"
            )
        if residuals and self.counts.levels not in ("", levels):
            warnings.warn(
                f"the hook's residuals were saved in {levels}, and this is {self.counts.levels}: "
                "they are dropped, which loses the rounding of one step",
                stacklevel=2,
            )
            residuals = {}
        self._buckets.clear()
        self._scaled, self._loaded = scaled, dict(residuals)

    # -- with a scaler ---------------------------------------------------------------------------

    def scale_changed(self, scale: Tensor) -> None:
        """See `distamp.protocols.CommHook.scale_changed`."""
        if not self._scaled:
            # They are in units of another scale, which nobody knows.
            self._loaded = {}
            self._keep(self._buckets, torch.zeros((), dtype=torch.float32, device="cpu"))
        self._scale, self._scaled, self._scaled_now = scale, True, True
        self._pairs = {}

    def step_ended(self, parameters: Sequence[Tensor] | None, found_inf: Tensor) -> None:
        """See `distamp.protocols.CommHook.step_ended`."""
        # What rounding took of a step that is not taken belongs to nothing.
        self._keep(self._buckets if parameters is None else parameters, 1 - found_inf)

    def iteration_ended(self) -> None:
        """See `distamp.protocols.CommHook.iteration_ended`."""
        self._scaled_now = False
        # The scaler may have written the next scale into the same tensor.
        self._pairs = {}

    def _keep(self, parameters: Iterable[Tensor], kept: Tensor) -> None:
        """Multiply the residuals of the buckets of some parameters by 1, or by 0 to drop them."""
        if not self.wire.needs_error_feedback:
            return
        for bucket in {self._buckets.get(each) for each in parameters} - {None}:
            for residual in bucket.residuals:
                residual.mul_(moved(kept, residual.device))


def _is_residual(item: tuple[Any, Any]) -> bool:
    """Return whether this is what a bucket keeps, by the names of its parameters."""
    names, tensors = item
    return (
        isinstance(names, tuple)
        and all(isinstance(name, str) for name in names)
        and isinstance(tensors, list)
        and all(
            isinstance(each, Tensor) and each.dtype is torch.float32 and bool(each.isfinite().all())
            for each in tensors
        )
    )


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
    if state is not None and not isinstance(state, ProcessGroup):
        raise TypeError(
            "the state of a communication hook must be a ProcessGroup, None (the default group) or "
            f"what distamp.comm_hooks.register returned, not {type(state).__name__}"
        )
    group = resolve_group(state)
    known = _states.setdefault(group, {})
    if wire not in known:
        known[wire] = CommHookState(wire, group)
    return known[wire]
