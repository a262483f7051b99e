"""What a communication hook remembers from one bucket to the next."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from distamp.comm_hooks.buckets import Bucket, Buckets, Watch
from distamp.comm_hooks.channel import (
    Channel,
    lockstep_words,
    refuse_stranger,
    resolve_group,
)
from distamp.comm_hooks.choice import Choice
from distamp.comm_hooks.error_feedback_state import Residuals
from distamp.comm_hooks.exchange import Exchange, Outcome
from distamp.comm_hooks.order import InOrder, Staged, in_order
from distamp.comm_hooks.stats import Account, HookStats
from distamp.comm_hooks.wire import WIRE_FORMATS, WireFormat, wire_format

__all__ = ["CommHookState", "state_of"]

_VERSION = 2
_LAYOUT_WORDS = 4
# Where blocks would make the wire wider than the gradient itself.
_AS_WIDE: dict[torch.dtype, str] = {torch.float16: "fp16_plain", torch.bfloat16: "bf16"}


class CommHookState:
    """The state of a hook that averages gradients through a wire; `register` returns one.

    Unlike the process group that torch's own hooks take for a state, it counts what it sends,
    and a `DistGradScaler` can be joined with it.

    Args:
        wire: The format on the way: a name of `WIRE_FORMATS`.
        process_group: The ranks to average over; None is the default group when first used.
        choice: How ``"auto"`` came to the format, for `stats`.

    Raises:
        ValueError: Unknown format, or a group that this rank is no member of.
    """

    def __init__(
        self,
        wire: str | WireFormat = "fp16",
        process_group: ProcessGroup | None = None,
        choice: Choice | None = None,
    ) -> None:
        self.wire = wire if isinstance(wire, WireFormat) else wire_format(wire)
        refuse_stranger(process_group)
        self._group = None if process_group is None else weakref.ref(process_group)
        self._channels: dict[torch.device, Channel] = {}
        self._runners: dict[torch.device, InOrder] = {}
        self._exchanges: dict[tuple[torch.dtype, torch.device], Exchange] = {}
        self._agreed: set[tuple[int, ...]] = set()
        self._account = Account(choice=choice)
        self._buckets = Buckets()
        self._word = 0
        self._scale: Tensor | None = None
        self._names: dict[int, str] = {}
        self._parameters: dict[str, weakref.ref[Tensor]] = {}
        self._loaded: dict[str, Tensor] = {}

    def stats(self) -> HookStats:
        """Return what this rank has sent, waited for and met so far."""
        return self._account.stats()

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

    # -- exchanges -------------------------------------------------------------------------------

    def average(self, index: int, values: Tensor, parameters: Sequence[Tensor]) -> Future[Tensor]:
        """Average one bucket over all ranks, in place, while the caller goes on.

        Args:
            index: Its number, the same on all ranks.
            values: 1-D, contiguous, dense.
            parameters: Those whose gradients lie in it.

        Raises:
            ValueError: Ranks hold buckets of another length, dtype or format; raised on all ranks.
        """
        exchange = self._exchange(values)
        if exchange.channel.size == 1:
            return completed(values)
        self._agree(index, values, exchange)
        bucket = self._buckets.begin(parameters)
        # Nothing where a rank without more inputs sends zeros in the others' backward passes.
        scale = self._scale if torch._C._current_graph_task_id() != -1 else None
        words = lockstep_words(self._word, scale, values.device)
        residuals = self._residuals(bucket, exchange, parameters)
        return self._runner(values.device).submit(
            partial(self._job, exchange, values, words, residuals, bucket.note)
        )

    def _job(
        self,
        exchange: Exchange,
        values: Tensor,
        words: Tensor,
        residuals: Residuals | None,
        note: Callable[[Outcome], None],
    ) -> Staged[Tensor]:
        outcome = yield from exchange.averaging(values, words, residuals)
        note(outcome)
        if exchange.channel.on_host:
            self._account.nonfinite += bool(outcome.nonfinite)
            if exchange.wire.block > 1:
                self._account.met(int(outcome.largest_exponent))
        return values

    def _residuals(
        self, bucket: Bucket, exchange: Exchange, parameters: Sequence[Tensor]
    ) -> Residuals | None:
        """Return what this bucket is owed, ready for an exchange; None for formats without."""
        if not exchange.wire.needs_error_feedback:
            return None
        if bucket.residuals is None:
            numels = [parameter.numel() for parameter in parameters]
            bucket.residuals = Residuals(numels, exchange.channel.size)
            owed, bucket.owed = bucket.owed, {}
            for index, parameter in enumerate(parameters):
                loaded = self._loaded.pop(self._names.get(id(parameter), ""), None)
                if loaded is not None:
                    owed[index] = loaded
            if owed:
                segments = exchange.segments(sum(numels))
                bucket.residuals.adopt(owed, exchange.channel.device, segments)
        # The scaler writes the next scale into the same tensor.
        bucket.residuals.begin(None if self._scale is None else self._scale.clone())
        return bucket.residuals

    # -- checkpoints -----------------------------------------------------------------------------

    def name_parameters(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Give parameters the names by which a checkpoint knows them."""
        named = list(named_parameters)
        self._names = {id(parameter): name for name, parameter in named}
        self._parameters = {name: weakref.ref(parameter) for name, parameter in named}

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank's gradients are owed by rounding; each rank saves its own.

        ``"residuals"`` holds, by parameter name, fp32 tensors of shape (2, numel) in unscaled
        units: what is owed to this rank's own gradient, and to the part of the mean that this rank
        owns (0 elsewhere). It is empty for formats without error feedback.
        """
        residuals = {}
        for name, reference in self._parameters.items():
            parameter = reference()
            owed = None if parameter is None else self._buckets.owed(parameter)
            if owed is None:
                owed = self._loaded.get(name)
            if owed is not None:
                residuals[name] = owed
        return {"version": _VERSION, "wire": self.wire.name, "residuals": residuals}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank, before the first backward pass.

        Raises:
            ValueError: Another version, parameters that the model does not have, or a hook that
                has exchanged gradients already.
        """
        if state_dict.get("version") != _VERSION:
            raise ValueError(
                f"the hook's state has version {state_dict.get('version')!r}, and this is "
                f"{_VERSION}: load what state_dict() returned"
            )
        unknown = sorted(set(state_dict["residuals"]) - set(self._parameters))
        if unknown:
            raise ValueError(
                f"the hook's state has residuals of {unknown[0]!r} and {len(unknown) - 1} other "
                "parameters that the model does not have: load it for the model it was saved of"
            )
        if self._account.exchanges:
            raise ValueError(
                "load_state_dict() was called after gradients were exchanged: call it before the "
                "first backward pass"
            )
        self._loaded = dict(state_dict["residuals"])

    # -- other ways ------------------------------------------------------------------------------

    def fell_back(self, reason: str) -> None:
        """Count a bucket that went another way."""
        self._account.fallbacks[reason] += 1

    def all_reduced(self, name: str, sent: Tensor, gradient: Tensor) -> None:
        """Count a bucket that was all-reduced as ``sent``."""
        size = dist.get_world_size(self.process_group)
        self._account.all_reduced(
            name,
            sent.numel() * sent.element_size(),
            gradient.numel() * gradient.element_size(),
            size,
        )

    def leave_out(self, parameters: Sequence[Tensor]) -> None:
        """Note that the gradients of ``parameters`` went another way."""
        self._buckets.leave_out(parameters)

    def _exchange(self, values: Tensor) -> Exchange:
        key = (values.dtype, values.device)
        exchange = self._exchanges.get(key)
        if exchange is None:
            wire = self.wire
            if wire.nbytes(wire.block) > wire.block * values.element_size():
                wire = wire_format(_AS_WIDE[values.dtype])
                self.fell_back(
                    f"{values.dtype} gradients sent as {wire.name}".replace("torch.", "")
                )
            channel = self.channel(values.device)
            exchange = self._exchanges[key] = Exchange(wire, channel, self._account)
        return exchange

    def channel(self, device: torch.device) -> Channel:
        """Return the channel for gradients on ``device``; the first call for it is collective."""
        channel = self._channels.get(device)
        if channel is None:
            channel = self._channels[device] = Channel(self.process_group, device)
        return channel

    def _runner(self, device: torch.device) -> InOrder:
        runner = self._runners.get(device)
        if runner is None:
            runner = self._runners[device] = in_order(device)
        return runner

    def _agree(self, index: int, values: Tensor, exchange: Exchange) -> None:
        """Compare a bucket that is new with the other ranks', once."""
        layout = (index, values.numel(), _code(str(values.dtype)), _code(exchange.wire.name))
        if layout in self._agreed:
            return
        channel = exchange.channel
        row = torch.tensor(layout, dtype=torch.int64, device=values.device)

        def ask() -> Tensor:
            rows = row.new_empty((channel.size, _LAYOUT_WORDS))
            channel.gather(rows.view(torch.uint8).view(-1), row.view(torch.uint8)).wait()
            return rows

        rows: list[list[int]] = self._runner(values.device).submit(ask).wait().tolist()
        if any(each != rows[0] for each in rows):
            raise ValueError(_differing(channel, rows))
        self._agreed.add(layout)

    # -- with a scaler ---------------------------------------------------------------------------

    def watch(self, parameters: Sequence[Tensor], ranks: Sequence[int]) -> Watch | None:
        """See `distamp.protocols.CommHook.watch`."""
        channels = self._channels.values()
        if not channels or not all(set(ranks) <= set(c.global_ranks()) for c in channels):
            return None
        return self._buckets.watch(parameters)

    def scale_changed(self, scale: Tensor, word: int) -> None:
        """See `distamp.protocols.CommHook.scale_changed`."""
        self._scale, self._word = scale, word

    def step_ended(self, parameters: Sequence[Tensor], found_inf: Tensor) -> None:
        """See `distamp.protocols.CommHook.step_ended`."""
        if self.wire.needs_error_feedback:
            self._buckets.step_ended(parameters, found_inf)

    def iteration_ended(self) -> None:
        """See `distamp.protocols.CommHook.iteration_ended`."""
        self._buckets.iteration_ended()

    def ranks_mismatched(self) -> bool:
        """See `distamp.protocols.CommHook.ranks_mismatched`."""
        return self._buckets.ranks_mismatched()


def completed(value: Tensor) -> Future[Tensor]:
    """Return a future that has its value already."""
    devices: list[int | str | torch.device] = []
    if value.device.type != "cpu":
        devices.append(value.device)
    future: Future[Tensor] = Future(devices=devices)
    future.set_result(value)
    return future


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
    held = _states.setdefault(group, {})
    if wire not in held:
        held[wire] = CommHookState(wire, group)
    return held[wire]


def _code(name: str) -> int:
    return zlib.crc32(name.encode())


def _differing(channel: Channel, rows: list[list[int]]) -> str:
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    known: dict[int, Any] = {_code(name): name for name in WIRE_FORMATS}
    known |= {_code(str(dtype)): dtype for dtype in dtypes}
    said: dict[str, list[int]] = {}
    for rank, (index, numel, dtype, wire) in zip(channel.global_ranks(), rows, strict=True):
        text = (
            f"bucket {index} of {numel} {known.get(dtype, 'other')} elements as "
            f"{known.get(wire, 'an unknown format')}"
        )
        said.setdefault(text, []).append(rank)
    parts = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in said.items())
    return (
        f"the ranks exchange different gradients: {parts}. Give every rank the same model, "
        "bucket_cap_mb and wire format"
    )
