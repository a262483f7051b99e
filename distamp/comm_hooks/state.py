"""The state of a communication hook: what a user, a scaler and a checkpoint see of it."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.exchange import Chunks, Exchange, Plan
from distamp.comm_hooks.feedback import ErrorFeedback
from distamp.comm_hooks.formats import BLOCK, Feedback, WireFormat, wire_format
from distamp.comm_hooks.hosts import Hosts, agreed, hosts_of, own_row
from distamp.comm_hooks.stats import HookStats

__all__ = ["CommHookState", "fits", "reals_in", "state_of"]

UNEVEN = "hosts have different numbers of ranks"
SMALL = "too few elements to be fewer bytes in blocks"


def fits(wire: WireFormat, dtype: torch.dtype) -> bool:
    """Return whether gradients do not grow on the wire."""
    return wire.block_bytes <= BLOCK * dtype.to_real().itemsize


def reals_in(parameter: Tensor) -> int:
    """Return how many numbers the gradient of a parameter takes in a bucket: two for a complex."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


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

    # What survives a call. The wire, what is counted, the group. Exchanges, by group and device:
    # connections and buffers. What rounding took.
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
        self._feedback = ErrorFeedback()

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

    def stay_on_hosts(self, shards: ProcessGroup | None, replicas: ProcessGroup | None) -> bool:
        """Return whether shards are reduced within hosts, and replicas between them."""
        found = [
            each.on_one_host
            for group in (shards, replicas)
            for each in (self._exchanges.get(group, {}) if group else {}).values()
            if each is not None
        ]
        return len(found) > 1 and found[0] and not found[-1]

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
        group = self.process_group
        if group.size() == 1 or values.numel() == 0:
            return torch_compat.completed(values)
        numels = [reals_in(each) for each in parameters]
        found = self.planned(
            group, "all", values.device, values.dtype, values.numel(), parameters, numels
        )
        if isinstance(found, str):
            return self.all_reduce(values, f"gradients all-reduced as they are: {found}")
        exchange, plan, residuals = found
        assert isinstance(plan, Plan)
        return exchange.average(values, self.wire, plan, feedback=residuals)

    def reduce(
        self,
        values: Tensor,
        group: ProcessGroup,
        divisor: float,
        out: Tensor | None = None,
        parameters: Sequence[Tensor] = (),
        numels: Sequence[int] = (),
    ) -> None:
        """Write this rank's part of the sum over some ranks to ``out``; without, the sum in place.

        Args:
            values: 1-D, contiguous, floating.
            group: The ranks.
            divisor: By which the sum is divided.
            out: 1-D, contiguous, floating.
            parameters: Those whose gradients lie in it; for error feedback.
            numels: How many elements each of them has in a shard.

        Raises:
            RuntimeError: An exchange failed on this rank, or did before.
        """
        if group.size() == 1:
            (values if out is None else out).copy_(values / divisor)
            return
        kind = "replicas" if out is None else "shards"
        shard = values if out is None else out
        found = self.planned(
            group, kind, values.device, values.dtype, shard.numel(), parameters, numels
        )
        if isinstance(found, str):
            self.counts.fallbacks[f"gradients reduced as they are: {found}"] += 1
            # In fp32, as the others are, and divided first.
            whole = values.float().div_(divisor)
            total = whole if out is None else out.new_empty(out.shape, dtype=torch.float32)
            torch_compat.reduce(whole, group, None if out is None else total)
            shard.copy_(total)
            return
        exchange, plan, residuals = found
        if out is None:
            assert isinstance(plan, Plan)
            exchange.average(values, self.wire, plan, divisor=divisor, feedback=residuals).wait()
        else:
            assert isinstance(plan, list)
            taken = residuals[0] if residuals else None
            exchange.reduce_scatter(out, values, self.wire, plan, divisor=divisor, feedback=taken)

    def all_reduce(self, values: Tensor, reason: str) -> Future[Tensor]:
        """Average gradients as without a hook, and count that."""
        group = self.process_group
        self.counts.fallbacks[reason] += 1
        work = dist.all_reduce(values.div_(group.size()), group=group, async_op=True)
        result: Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
        return result

    def planned(
        self,
        group: ProcessGroup,
        kind: str,
        device: torch.device,
        dtype: torch.dtype,
        numel: int,
        parameters: Sequence[Tensor],
        numels: Sequence[int],
    ) -> tuple[Exchange, Plan | Chunks, tuple[Feedback, ...]] | str:
        """Return what carries gradients, and where they go; or why they should go as they are.

        Args:
            group: The ranks.
            kind: Of a bucket ``"all"``; under FSDP ``"shards"`` or ``"replicas"``.
            device: Where they lie.
            dtype: Theirs.
            numel: How many; of shards, in one.
            parameters: Whose.
            numels: How many of each.
        """
        # What is reduced by a hook of FSDP is added up in fp32 whatever it is.
        itemsize = dtype.itemsize if kind == "all" else 4
        if kind == "all" and not fits(self.wire, dtype):
            return f"{dtype} is no wider than {self.wire.name}".removeprefix("torch.")
        exchange = self.exchange(group, device)
        if exchange is None:
            return UNEVEN
        fed = self.wire.needs_error_feedback
        known = self._feedback.known(exchange, kind, numel, parameters) if fed else None
        if known is None:
            # Blocks begin where parameters do, where one unit would not do for two of them.
            lengths = numels if fed and sum(numels) == numel else [numel]
            find = exchange.chunks if kind == "shards" else exchange.plan
            plan = find(self.wire, lengths, itemsize)
            if plan is None:
                return SMALL
            if not fed:
                return exchange, plan, ()
            known = self._feedback.bucket(exchange, kind, numel, parameters, plan)
        units = self._feedback.units(device)
        return exchange, known.plan, tuple(Feedback(each, units) for each in known.residuals)

    # -- checkpoints -----------------------------------------------------------------------------

    def name_parameters(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Give parameters the names by which a checkpoint knows them; `register` does."""
        self._feedback.name_parameters(named_parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return what rounding took from this rank's gradients.

        Each rank saves its own, or all save theirs by ``torch.distributed.checkpoint``:
        ``"residuals"`` has lists of fp32 tensors, by which rank of how many this is, in which
        levels, and the names of a bucket's parameters. It is empty for formats without error
        feedback. ``"scaled"`` says whether they are in unscaled units, by an attached scaler.

        Raises:
            RuntimeError: Of a hook with error feedback that knows no names of parameters.
        """
        return {"wire": self.wire.name, **self._feedback.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank, between any two backward passes.

        A bucket of other parameters begins anew. Residuals of other ranks, or of other numbers of
        ranks or hosts, are dropped, with a warning; without one, if a scaler is attached now and
        was not then.

        Raises:
            ValueError: It is something else, or of a version that this distamp does not read.
        """
        every = (each for known in self._exchanges.values() for each in known.values())
        self._feedback.load_state_dict(state_dict, [each.levels for each in every if each])

    # -- with a scaler ---------------------------------------------------------------------------

    def scale_changed(self, scale: Tensor) -> None:
        """See `distamp.protocols.CommHook.scale_changed`."""
        self._feedback.scale_changed(scale)

    def step_ended(self, parameters: Sequence[Tensor] | None, found_inf: Tensor) -> None:
        """See `distamp.protocols.CommHook.step_ended`."""
        self._feedback.step_ended(found_inf)

    def iteration_ended(self) -> None:
        """See `distamp.protocols.CommHook.iteration_ended`."""
        self._feedback.iteration_ended()


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
