"""The state of a communication hook: what a user, a scaler and a checkpoint see of it."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.exchange import Exchange
from distamp.comm_hooks.feedback import ErrorFeedback
from distamp.comm_hooks.formats import CommFormat, Feedback, checked_format
from distamp.comm_hooks.hosts import Hosts, agreed
from distamp.comm_hooks.plans import Plan
from distamp.comm_hooks.stats import HookStats

__all__ = ["NO_FEWER", "UNEVEN", "CommHook", "reals_in", "state_of"]

# Why gradients or weights go as they are.
UNEVEN = "hosts have different numbers of ranks"
NO_FEWER = "too few elements, or too narrow ones, to be fewer bytes in blocks"
_PARTLY_USED = (
    "FSDP2 left out parameters of a module that were not used, and error feedback cannot tell which"
)


def reals_in(parameter: Tensor) -> int:
    """Return how many numbers the gradient of a parameter takes in a bucket: two for a complex."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


class CommHook(ErrorFeedback, AbstractContextManager["CommHook"]):
    """The state of a hook that averages gradients through a wire; `register_comm_hook` returns one.

    Unlike the process group that torch's own hooks take for a state, it counts what it sends, and a
    `DistGradScaler` that is joined with it tells it the loss scale and which steps were skipped.

    A copy of it, as ``copy.deepcopy`` and ``torch.save`` of a DDP module make one, has its format
    alone: torch registers no hook on a copy of a module, so it says how to.

    Args:
        format: The format of gradients in messages: a name of `COMM_FORMATS`, or one of its values.
        process_group: The ranks to average over; None is the default group when first used.

    Raises:
        ValueError: The format is not one of `COMM_FORMATS`.
    """

    # What survives a call, beside what rounding took. The wire, what is counted, the group.
    # Exchanges, by name of a group and device: connections, buffers and plans.
    def __init__(
        self, format: str | CommFormat = "fp16", process_group: ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.format = checked_format(format)
        # The format in which FSDP2 gathers weights, if `register_comm_hook` got ``param_format``.
        self.param_format: CommFormat | None = None
        self.counts = HookStats()
        #: Whether this is a copy, which no model calls because torch registers no hook on copies.
        self.is_copy = False
        given = None if process_group is None else weakref.ref(process_group)
        self._group: Callable[[], ProcessGroup | None] = given or torch_compat.default_group
        self._exchanges: dict[tuple[str, torch.device], Exchange | None] = {}

    def stats(self) -> HookStats:
        """Return the counts of this rank since the hook was made."""
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
        for each in filter(None, self._exchanges.values()):
            each.transport.close()

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
        key = group.group_name, device
        if key not in self._exchanges:
            hosts = hosts or agreed(self.format.name, group)
            self.counts.levels = hosts.text
            self._exchanges[key] = None
            if hosts.ranks:
                self._exchanges[key] = found = Exchange(hosts, group, device, self.counts)
                self._levels.add(found.levels)
        return self._exchanges[key]

    def __getstate__(self) -> dict[str, Any]:
        return {"wire": self.format}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CommHook.__init__(self, state["wire"])
        self.is_copy = True
        warnings.warn(
            "a copy of a module with a communication hook sends gradients uncompressed, as fp32: "
            "torch registers no hook on copies. If this one is trained, call "
            f'distamp.comm_hooks.register_comm_hook(model, "{self.format.name}") on it',
            stacklevel=2,
        )

    # -- exchanges -------------------------------------------------------------------------------

    def average(self, values: Tensor, parameters: Sequence[Tensor]) -> Future[Tensor]:
        """Average a bucket over all ranks; as `reduce`."""
        group, numels = self.process_group, [reals_in(each) for each in parameters]
        return self.reduce(values, group, float(group.size()), None, numels, parameters)

    def reduce(
        self,
        values: Tensor,
        group: ProcessGroup,
        divisor: float,
        out: Tensor | None = None,
        numels: Sequence[int] = (),
        parameters: Sequence[Tensor] = (),
    ) -> Future[Tensor]:
        """Write this rank's part of the sum over some ranks to ``out``, and wait for it.

        Without ``out`` the sum replaces the values, while the caller goes on.

        Args:
            values: 1-D, contiguous, floating.
            group: The ranks.
            divisor: By which the sum is divided.
            out: 1-D, contiguous, floating.
            numels: How many of each parameter, in a shard where there is ``out``.
            parameters: Whose; for error feedback.

        Raises:
            RuntimeError: An exchange failed on this rank, or did before.
        """
        shard = values if out is None else out
        if group.size() == 1 or values.numel() == 0:
            return torch_compat.completed(shard.copy_(values / divisor))
        kind = "buckets" if out is None else "shards"
        # FSDP2 reduces gradients of parameters that were used, and does not say which were.
        if sum(numels) != shard.numel():
            if self.format.needs_error_feedback:
                return self.reduce_as_it_is(values, group, divisor, out, _PARTLY_USED)
            numels = [shard.numel()]
        planned = self.planned(kind, group, values.device, values.dtype, numels, parameters)
        if isinstance(planned, str):
            return self.reduce_as_it_is(values, group, divisor, out, planned)
        exchange, plan, feedback = planned
        if out is None:
            return exchange.average(values, self.format, plan, divisor, feedback)
        exchange.reduce_scatter(out, values, self.format, plan, divisor, feedback)
        return torch_compat.completed(out)

    def reduce_as_it_is(
        self, values: Tensor, group: ProcessGroup, divisor: float, out: Tensor | None, reason: str
    ) -> Future[Tensor]:
        """Do as `reduce` without a wire, and count the reason."""
        self.counts.fallbacks[f"gradients reduced as they are: {reason}"] += 1
        values.div_(divisor)
        if out is None:
            work = dist.all_reduce(values, group=group, async_op=True)
            result: Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
            return result
        total = out if out.dtype is values.dtype else out.to(values.dtype)
        torch_compat.reduce_scatter(total, values, group=group)
        return torch_compat.completed(out.copy_(total))

    def planned(
        self,
        kind: str,
        group: ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
        numels: Sequence[int],
        parameters: Sequence[Tensor],
    ) -> tuple[Exchange, Plan, Sequence[Feedback]] | str:
        """Return what carries gradients, and where they go; or why they should go as they are.

        Args:
            kind: ``"buckets"``, or ``"shards"``.
            group: The ranks.
            device: Where they lie.
            dtype: Theirs.
            numels: How many of each parameter, in a shard where they are those of one.
            parameters: Whose.
        """
        if not (self.format.encodes and self.format.fits(dtype)):
            return f"{dtype} is no wider than {self.format.name}".removeprefix("torch.")
        exchange = self.exchange(group, device)
        if exchange is None:
            return UNEVEN
        fed = self.format.needs_error_feedback
        # Blocks begin where parameters do, where one unit would not do for two of them.
        plan = exchange.plan(kind, self.format, numels if fed else [sum(numels)], dtype.itemsize)
        if plan is None:
            return NO_FEWER
        if not fed:
            return exchange, plan, ()
        where = f"{exchange.levels}, {kind}"
        return exchange, plan, self.feedback(where, parameters, plan.residuals, device)


# States of hooks that were given a process group, or None, where torch's take no more than that.
_states: weakref.WeakKeyDictionary[ProcessGroup, dict[str, CommHook]] = weakref.WeakKeyDictionary()


def state_of(state: CommHook | ProcessGroup | None, wire: str) -> CommHook:
    """Return the state itself, or the one that hooks of this format share for a process group.

    Raises:
        TypeError: ``state`` is something else.
    """
    if isinstance(state, CommHook):
        return state
    group = torch_compat.default_group() if state is None else state
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            "the state of a communication hook must be a ProcessGroup, None (the default group) or "
            f"what distamp.comm_hooks.register_comm_hook returned, not {type(state).__name__}"
        )
    known = _states.setdefault(group, {})
    if wire not in known:
        known[wire] = CommHook(wire, group)
    return known[wire]
