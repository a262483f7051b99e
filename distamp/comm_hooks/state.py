"""The state of a communication hook: what a user, a scaler and a checkpoint see of it."""

from __future__ import annotations

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
from distamp.comm_hooks.buckets import Bucket, reals_in
from distamp.comm_hooks.choice import Choice
from distamp.comm_hooks.exchange import Exchange
from distamp.comm_hooks.formats import BLOCK, WIRE_FORMATS, WireFormat, wire_format
from distamp.comm_hooks.hosts import Hosts, agree, gathered, hosts_of, own_row
from distamp.comm_hooks.stats import Account, HookStats
from distamp.host import moved

__all__ = ["CommHookState", "check_sharded", "fits", "state_of"]

# 4: residuals of the mean, where 3 had them of this rank's own gradient.
_VERSION = 4


def fits(wire: WireFormat, dtype: torch.dtype) -> bool:
    """Return whether gradients do not grow on the wire."""
    return wire.block_bytes <= BLOCK * dtype.to_real().itemsize


def check_sharded(
    wire: WireFormat, dtype: torch.dtype, where: str = "MixedPrecisionPolicy"
) -> None:
    """Refuse formats that need error feedback, and gradients that are no wider than the wire.

    Raises:
        ValueError: They are so; the message names what to use.
    """
    if wire.needs_error_feedback:
        allowed = [n for n, each in WIRE_FORMATS.items() if not each.needs_error_feedback]
        raise ValueError(
            f"{wire.name} needs error feedback, which sharded gradients have not: use "
            f"DistributedDataParallel, or one of {', '.join(allowed)}"
        )
    if dtype.itemsize <= wire.payload.itemsize:
        raise ValueError(
            f"the {wire.name} wire is no narrower than gradients reduced in {dtype}: set "
            f"{where}(reduce_dtype=...) to torch.float32, or register no hook"
        )


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


class CommHookState:
    """The state of a hook that averages gradients through a wire; `register` returns one.

    Unlike the process group that torch's own hooks take for a state, it counts what it sends, and a
    `DistGradScaler` that is joined with it tells it the loss scale and which steps were skipped.

    A copy of it, as ``copy.deepcopy`` and ``torch.save`` of a DDP module make one, leaves the ranks
    out: torch registers no hook on a copy of a module, so it says, once, how to.

    Args:
        wire: The format on the way: a name of `WIRE_FORMATS`.
        process_group: The ranks to average over; None is the default group when first used.
        choice: How ``"auto"`` came to the format, for `stats`.

    Raises:
        ValueError: Unknown format, or a group that this rank is no member of.
    """

    # What survives a call. The wire, what is counted, the group. Exchanges, by group: connections
    # and buffers. Of a DDP model: each parameter's bucket and place in it, names and parameters for
    # checkpoints, and what of a loaded state is in no bucket yet. The loss scale, whether the
    # backward passes of this iteration have it, the same on devices, and whether residuals are in
    # its units. Whether a copy was warned of.
    def __init__(
        self,
        wire: str | WireFormat = "fp16",
        process_group: ProcessGroup | None = None,
        choice: Choice | None = None,
    ) -> None:
        self.wire = wire if isinstance(wire, WireFormat) else wire_format(wire)
        if torch_compat.is_non_member(process_group):
            resolve_group(process_group)
        self.account = Account(choice=choice)
        self._group = None if process_group is None else weakref.ref(process_group)
        self._exchanges: weakref.WeakKeyDictionary[ProcessGroup, dict[torch.device, Exchange]] = (
            weakref.WeakKeyDictionary()
        )
        self._buckets: Any = WeakTensorKeyDictionary()
        self._names: dict[int, str] = {}
        self._parameters: dict[str, weakref.ref[Tensor]] = {}
        self._loaded: dict[str, Tensor] = {}
        self._scale: Tensor | None = None
        self._scaled_now = False
        self._pairs: dict[tuple[torch.device, bool], Tensor] = {}
        self._scaled: bool | None = None
        self._copied = False

    def stats(self) -> HookStats:
        """Return what this rank has sent so far."""
        return self.account.stats()

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
        self.account.levels = hosts.text
        # Of several devices of one process each has connections of its own.
        named = replace(hosts, name=f"{hosts.name}/{len(known)}")
        known[device] = Exchange(named, group, device, self.account)
        return known[device]

    def exchange(self, group: ProcessGroup, device: torch.device) -> Exchange:
        """Return the exchange over some ranks; the first call for a device is collective."""
        known = self._exchanges.get(group, {})
        if device in known:
            return known[device]
        rows = gathered(own_row(self.wire.name), group)
        agree(rows)
        return self.connect(group, device, hosts_of(rows))

    # -- copies ----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        warned, self._copied = self._copied, True
        return {**self.state_dict(), "choice": self.account.choice, "warned": warned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CommHookState.__init__(self, state["wire"], choice=state["choice"])
        self._loaded, self._scaled = dict(state["residuals"]), state["scaled"]
        self._copied = True
        if not state["warned"]:
            warnings.warn(
                "a copy of a module with a communication hook sends gradients uncompressed, as "
                "fp32: torch registers no hook on copies. If this one is trained, call "
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
        exchange = self.exchange(group, values.device)
        bucket = self._bucket(values, parameters, exchange)
        feedback = None
        if self.wire.needs_error_feedback:
            feedback = bucket.feedback(self._units(values.device))
        return exchange.average(values, self.wire, bucket.plan, feedback=feedback)

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
                plan = exchange.plan(values.numel(), self.wire)
                exchange.average(values, self.wire, plan, divisor=divisor).wait()

    def _bucket(self, values: Tensor, parameters: Sequence[Tensor], exchange: Exchange) -> Bucket:
        bucket: Bucket
        known = self._buckets.get(parameters[0]) if len(parameters) else None
        if known is not None and known[0].serves(parameters, values.numel(), exchange):
            bucket = known[0]
            return bucket
        what = f"{values.numel()} elements of {values.dtype}"
        rows = gathered(own_row(what.replace("torch.", "")), self.process_group)
        agree(rows, "exchange different gradients", "model and bucket_cap_mb")
        bucket = Bucket(parameters, values.numel(), self.wire, exchange)
        for place, parameter in enumerate(parameters):
            before = self._residual_of(parameter)
            loaded = self._loaded.pop(self._names.get(id(parameter), ""), before)
            if loaded is not None:
                bucket.adopt(place, loaded)
            self._buckets[parameter] = bucket, place
        return bucket

    def _residual_of(self, parameter: Tensor) -> Tensor | None:
        bucket, place = self._buckets.get(parameter, (None, 0))
        found: Tensor | None = None if bucket is None else bucket.of(place)
        return found

    def _units(self, device: torch.device) -> Tensor:
        """Return the scale of a backward pass that an attached scaler scaled, or 1; see `Feedback`.

        Residuals that are in the other of these units, by a factor that nobody knows, are dropped.
        """
        # A rank without more inputs is in no backward pass, and keeps to the scale it heard last.
        known = self._scaled_now or not torch_compat.in_backward_pass()
        scale = self._scale if known else None
        if self._scaled not in (None, scale is not None):
            self._forget_residuals()
        self._scaled = scale is not None
        key = device, self._scaled
        if key not in self._pairs:
            here = (
                torch.ones((), dtype=torch.float32, device=device)
                if scale is None
                else moved(scale, device)
            )
            self._pairs[key] = torch.stack([here, here.reciprocal()])
        return self._pairs[key]

    def _forget_residuals(self) -> None:
        self._loaded = {}
        for bucket in {bucket for bucket, _ in self._buckets.values()}:
            bucket.keep(None, torch.zeros((), dtype=torch.float32, device=bucket.exchange.device))

    def all_reduce(self, values: Tensor, reason: str) -> Future[Tensor]:
        """Average gradients as without a hook, and count that."""
        group = self.process_group
        self.account.fallbacks[reason] += 1
        work = dist.all_reduce(values.div_(group.size()), group=group, async_op=True)
        result: Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
        return result

    # -- checkpoints -----------------------------------------------------------------------------

    def name_parameters(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Give parameters the names by which a checkpoint knows them."""
        named = list(named_parameters)
        self._names = {id(parameter): name for name, parameter in named}
        self._parameters = {name: weakref.ref(parameter) for name, parameter in named}

    def state_dict(self) -> dict[str, Any]:
        """Return what rounding took from this rank's gradients; each rank saves its own.

        ``"residuals"`` has, by parameter name, fp32 tensors of shape (2, numel): of the part that
        this rank sends to other hosts, and of the part of the mean that it owns (0 elsewhere). A
        complex parameter has twice as many, as `torch.view_as_real` has them. It is empty for
        formats without error feedback. ``"scaled"`` says whether they are in unscaled units, by an
        attached scaler, or in units of the gradients as they were exchanged; None before the first
        exchange. ``"levels"`` are the ranks and hosts that they belong to.
        """
        found = {}
        for name, reference in self._parameters.items():
            parameter = reference()
            residual = None if parameter is None else self._residual_of(parameter)
            if residual is not None:
                found[name] = residual
        return {
            "version": _VERSION,
            "wire": self.wire.name,
            "levels": self.account.levels,
            "scaled": self._scaled,
            "residuals": {**self._loaded, **found},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank, between any two backward passes.

        Residuals of other ranks and hosts are dropped, with a warning. They are dropped at the next
        exchange, too, if a scaler is attached now and was not then, or the other way.

        Raises:
            TypeError: Not a dict.
            ValueError: A version that this distamp does not read, parameters that the model does
                not have, or residuals of another shape. Nothing is changed then.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                "a hook's state is the dict that hook.state_dict() returned, not "
                f"{state_dict!r:.80}"
            )
        names = ("version", "residuals", "scaled", "levels")
        version, residuals, scaled, levels = (state_dict.get(name) for name in names)
        if not isinstance(version, int) or version != _VERSION:
            raise ValueError(
                f"the hook's state has version {version!r:.80}, and this distamp reads {_VERSION}: "
                "load what state_dict() returned"
            )
        if not (
            isinstance(residuals, Mapping)
            and isinstance(scaled, bool | None)
            and isinstance(levels, str | None)
        ):
            raise ValueError(
                "the hook's state must have 'residuals', a dict of tensors by parameter, 'scaled', "
                f"a bool or None, and 'levels', a str, not {residuals!r:.80}, {scaled!r:.80} and "
                f"{levels!r:.80}"
            )
        unknown = sorted(map(str, set(residuals) - set(self._parameters)))
        if unknown:
            raise ValueError(
                f"the hook's state has residuals of {unknown[0]!r} and {len(unknown) - 1} other "
                "parameters that the model does not have: load it for the model it was saved of"
            )
        for name, residual in residuals.items():
            _check_residual(name, residual, self._parameters[name]())
        if residuals and levels and self.account.levels not in ("", levels):
            warnings.warn(
                f"the hook's residuals were saved in {levels}, and this is {self.account.levels}: "
                "they are dropped, which loses the rounding of one step",
                stacklevel=2,
            )
            residuals = {}
        self._buckets.clear()
        self._scaled, self._loaded = scaled, dict(residuals)

    # -- with a scaler ---------------------------------------------------------------------------

    def scale_changed(self, scale: Tensor) -> None:
        """See `distamp.protocols.CommHook.scale_changed`."""
        self._scale, self._scaled_now = scale, True
        self._pairs = {}

    def step_ended(self, parameters: Sequence[Tensor] | None, found_inf: Tensor) -> None:
        """See `distamp.protocols.CommHook.step_ended`."""
        if not self.wire.needs_error_feedback:
            return
        places: dict[Bucket, list[int]] = {}
        for parameter in self._buckets if parameters is None else parameters:
            bucket, place = self._buckets.get(parameter, (None, 0))
            if bucket is not None:
                places.setdefault(bucket, []).append(place)
        # What rounding took of a step that is not taken belongs to nothing.
        for bucket, some in places.items():
            bucket.keep(some, 1 - moved(found_inf, bucket.exchange.device))

    def iteration_ended(self) -> None:
        """See `distamp.protocols.CommHook.iteration_ended`."""
        self._scaled_now = False
        # The scaler may have written the next scale into the same tensor.
        self._pairs = {}


def _check_residual(name: str, residual: object, parameter: Tensor | None) -> None:
    if not isinstance(residual, Tensor) or residual.dtype is not torch.float32:
        raise ValueError(f"the residuals of {name!r} must be fp32, not {residual!r:.80}")
    numel = residual.shape[-1] if parameter is None else reals_in(parameter)
    if residual.shape != (2, numel):
        raise ValueError(
            f"the residuals of {name!r} must be of shape (2, {numel}), not {tuple(residual.shape)}"
        )
    if not residual.isfinite().all():
        raise ValueError(f"the residuals of {name!r} hold inf or NaN")


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
