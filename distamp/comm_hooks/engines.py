"""The engines of one hook, for each group of ranks, dtype and device, and how failures end them."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from typing import TypeVar

import torch
from torch.distributed import ProcessGroup

from distamp.comm_hooks.channel import Channel
from distamp.comm_hooks.engine import Engine
from distamp.comm_hooks.order import InOrder, Staged, in_order
from distamp.comm_hooks.stats import Account
from distamp.comm_hooks.wire import AS_FP16, WireFormat, wire_format
from distamp.errors import LockstepError

__all__ = ["Engines", "named_failures"]

R = TypeVar("R")

# Where blocks would make the wire wider than the gradient itself.
_AS_WIDE = {torch.float16: AS_FP16, torch.bfloat16: wire_format("bf16")}


class Engines:
    """Engines that are made when gradients of their kind first come.

    Args:
        wire: The format on the way, where gradients are not as narrow themselves.
        account: Where bytes and waiting are counted.
    """

    def __init__(self, wire: WireFormat, account: Account) -> None:
        self._wire = wire
        self._account = account
        self._channels: weakref.WeakKeyDictionary[
            ProcessGroup, dict[torch.device, tuple[Channel, InOrder]]
        ] = weakref.WeakKeyDictionary()
        self._engines: dict[tuple[int, torch.dtype, torch.device], Engine] = {}

    def channel(self, group: ProcessGroup, device: torch.device) -> Channel:
        """Return the channel over some ranks; the first call for a device is collective."""
        return self._of(group, device)[0]

    def runner(self, group: ProcessGroup, device: torch.device) -> InOrder:
        """Return what runs exchanges over some ranks beside the caller."""
        return self._of(group, device)[1]

    def channels(self) -> list[Channel]:
        """Return all channels there are."""
        return [each for by in self._channels.values() for each, _ in by.values()]

    def engine(
        self,
        group: ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        *,
        as_narrow: bool = False,
    ) -> Engine:
        """Return the engine for gradients of a kind.

        Args:
            group: The ranks.
            dtype: Of the gradients.
            device: Where they lie.
            as_narrow: Whether gradients that are narrower than the wire go as they are.

        Raises:
            RuntimeError: An exchange over these ranks failed before.
        """
        channel = self.channel(group, device)
        channel.check_open()
        key = (id(channel), dtype, device)
        engine = self._engines.get(key)
        if engine is None:
            wire = self._wire
            if as_narrow and wire.block_bytes > wire.block * dtype.itemsize:
                wire = _AS_WIDE[dtype]
                reason = f"{dtype} gradients sent as {wire.name}".replace("torch.", "")
                self._account.fallbacks[reason] += 1
            engine = self._engines[key] = Engine(wire, channel, self._account)
        return engine

    def _of(self, group: ProcessGroup, device: torch.device) -> tuple[Channel, InOrder]:
        by_device = self._channels.setdefault(group, {})
        if device not in by_device:
            by_device[device] = (Channel(group, device), in_order(device))
        return by_device[device]


def named_failures(staged: Staged[R], channel: Channel, doing: str) -> Generator[None, None, R]:
    """Run an exchange; where it fails, end the channel and say which rank failed, and in what.

    Raises:
        LockstepError: Ranks exchange different things.
        RuntimeError: Anything else, on every rank.
    """
    try:
        channel.check_open()
        return (yield from staged)
    except LockstepError as error:
        channel.fail(error, doing)
        raise
    except Exception as error:
        raise channel.fail(error, doing) from error
