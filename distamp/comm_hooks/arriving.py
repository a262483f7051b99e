"""Flags and counts of exchanges, on their way from devices to the host; nothing waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from distamp.comm_hooks.headers import ReduceResult
from distamp.comm_hooks.stats import Account
from distamp.host import HostCopy

__all__ = ["Flags", "Reports", "any_of", "used_here"]

# More reports than this are not on their way at once.
MOST = 256


def used_here(tensor: Tensor) -> Tensor:
    """Return a tensor that another stream made, of which the current stream now has a use.

    Without this its memory could be given away when it is freed, while this stream still reads it.
    """
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))
    return tensor


def any_of(flags: Sequence[Tensor]) -> Tensor:
    """Return whether one of some 0-d flags is set, on the device of the first."""
    device = flags[0].device
    here = [used_here(flag) for flag in flags if flag.device == device]
    others = [used_here(flag).to(device) for flag in flags if flag.device != device]
    return torch.stack([*here, *others]).any()


class Flags:
    """Whether one of many flags was set since the host last asked."""

    def __init__(self) -> None:
        self._flags: dict[torch.device, Tensor] = {}
        self._arriving: HostCopy | None = None

    def add(self, flag: Tensor) -> None:
        """Add a 0-d bool."""
        before = self._flags.get(flag.device)
        self._flags[flag.device] = flag if before is None else before | used_here(flag)

    def taken(self) -> bool:
        """Return it, and forget; of a device what was so when this was asked for before."""
        flags, self._flags = list(self._flags.values()), {}
        if all(flag.device.type == "cpu" for flag in flags):
            return any(map(bool, flags))
        arrived, self._arriving = self._arriving, HostCopy(any_of(flags).view(1))
        return arrived is not None and any(arrived.values())


class Reports:
    """What exchanges on a device found, for `Account`, as it arrives."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._pending: deque[HostCopy] = deque()
        self.out_of_step = False

    def add(self, result: ReduceResult) -> None:
        """Add what an exchange found."""
        if result.nonfinite.device.type == "cpu":
            self._note([each.item() for each in result])
            return
        values = [each.to(torch.int64) for each in result]
        self._pending.append(HostCopy(torch.stack(values)))
        if len(self._pending) > MOST:
            self._note(self._pending.popleft().values())

    def collect(self, *, wait: bool) -> None:
        """Note what has arrived, or, to ``wait``, everything."""
        while self._pending and (wait or self._pending[0].arrived()):
            self._note(self._pending.popleft().values())

    def _note(self, values: Sequence[float]) -> None:
        nonfinite, exponent, _, out_of_step = map(int, values)
        self._account.nonfinite += bool(nonfinite)
        self._account.saw(exponent)
        self.out_of_step = self.out_of_step or bool(out_of_step)
