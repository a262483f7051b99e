"""All ranks agree: one message of fixed length a call, and what every rank raises.

One SUM all-reduce, whatever the ranks hold. On the host it is one int64, because gloo wakes a
thread for each further word. Its upper half is a digest, a hash of all that must be the same on
every rank; its lower half says how many flags are set, and where any is, the ranks gather which. On
a device it is eight int32, so that the host need not wait: the digest, and for each of seven
optimizers on how many ranks it overflowed.

The ranks agree if the digests sum up to ``size`` times this rank's. A rank with an error sends
another digest. Where digests differ, all ranks gather what each did and raise. On a device the
flags are set from the reply by kernels, everywhere if digests differ, and the host reads it at the
next call.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distamp import host
from distamp.errors import GradientError, LockstepError, SettingError, StageError
from distamp.groups import Group, GroupLike, reach, resolve

__all__ = ["Call", "Flag", "Found", "Ranks"]

#: Whether some rank overflowed: a bool where the host knows, else 0-d bool on a device.
Flag: TypeAlias = "bool | Tensor"

_WORDS = 8
_HALF = 0xFFFFFFFF
_SUM = dist.AllreduceOptions()
_SUM.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)


class Found(NamedTuple):
    """What all ranks agree on of one optimizer.

    Args:
        flag: Whether any rank overflowed.
        ranks: Those that did, by their global numbers, where the host knows.
    """

    flag: Flag
    ranks: tuple[int, ...] | None = None


class Call(NamedTuple):
    """What one rank does, for all ranks to compare.

    Args:
        name: ``unscale_``, ``step`` and ``step_all`` are one: they send the same message.
        kinds: Class names of its optimizers.
        places: In which order they came first.
        settings: The scaler's, and the call's own, as text.
        begun: Scale and growth tracker as they were last set from outside.
        scaled: Whether this rank ever scaled a loss.
    """

    name: str
    kinds: Sequence[str]
    places: tuple[int, ...]
    settings: str
    begun: tuple[float, int]
    scaled: bool

    def alike(self, iteration: int, steps: int, late_settings: str = "") -> dict[str, Any]:
        """Return what must be the same on every rank; some settings the host learns late."""
        return {
            "call": self.name,
            "iteration": iteration,
            "steps": steps,
            "over": list(zip(self.kinds, self.places, strict=True)),
            "settings": self.settings + late_settings,
            "scale": self.begun[0],
            "growth_tracker": self.begun[1],
        }


class Ranks:
    """The ranks that a scaler agrees with, and how far they have come together.

    Args:
        given: As given by the user; resolved anew at each message, so that a group that was
            destroyed and made again is picked up.
        lost: Why there is no group, where the scaler was pickled with one.
    """

    def __init__(self, given: GroupLike, lost: str | None = None) -> None:
        self.given = given
        self.lost = lost
        # Counted from the first message over a group, so that a rank which joins can follow.
        self.iteration = 0
        # A sum over calls that change a rank and need no message, from there too: a step after
        # unscale_, of this optimizer and no other, or a scale set to what it was set to before.
        # One left out shows at the next message.
        self.steps = 0
        # The most gradients of which a norm over this group has found replicas alike, and how these
        # were declared. A rank that has more, or other declarations, asks all to compare again.
        self.compared: tuple[int, object] = (0, None)
        # Whether no rank asks: then none compares.
        self.clips_agree = False
        # Whether the ranks have told each other that one of them scales its loss.
        self._scales = False
        # In which order optimizers came first, since the first message over the group; those that
        # are gone are counted too.
        self._places: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._next_place = 0
        self._group: Group | None = None
        self._of_mesh: dist.ProcessGroup | None = None
        # Replies and outcomes of steps that are on their way from a device to the host.
        self._arriving: deque[tuple[host.HostCopy, Callable[[list[float]], None]]] = deque()

    def __reduce__(self) -> Any:
        # A group cannot be pickled; the default one is found again.
        lost = (
            "this scaler was pickled with a process group, which cannot be pickled; assign "
            "scaler.process_group (None is the default group) before you use the scaler"
        )
        return Ranks, (None, None if self.given is None else lost)

    def __deepcopy__(self, memo: Any) -> Ranks:
        return Ranks(self.given, self.lost)

    @property
    def rank(self) -> int:
        """This process's rank in the default group; 0 without one."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the group, which speaks for all; so is one alone."""
        return self._group is None or dist.get_rank(self._group.process_group) == 0

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group as it is now; None where there is none.

        Raises:
            StageError: It is gone.
        """
        if self.lost is not None:
            raise StageError(self.lost)
        given = self.given
        # Whether it is a mesh is asked in Python, for which a small step need not wait.
        if given is not None and isinstance(given, DeviceMesh):
            if self._of_mesh is None:
                self._of_mesh = resolve(given)
            given = self._of_mesh
        return resolve(given)

    def group(self, device: torch.device) -> Group | None:
        """Return the ranks to agree with, for a loss scale on ``device``; None if there are none.

        Raises:
            StageError: The group is gone.
        """
        process_group = self.process_group
        if process_group is None or process_group.size() == 1:
            return None
        group = self._group
        if group is None or group.process_group is not process_group:
            self.restart()
            self._scales = self.clips_agree = False
            self.compared = (0, None)
            self._arriving.clear()
            self._places.clear()
            self._next_place = 0
        elif group.preferred == device:
            return group
        self._group = Group(process_group, device)
        return self._group

    def restart(self) -> None:
        """Count anew, as over a new group or with a loaded state."""
        self.iteration = self.steps = 0

    def place(self, optimizer: object) -> int:
        """Return in which order an optimizer came first, of those that are stepped together."""
        place = self._places.get(optimizer)
        if place is None:
            place = self._places[optimizer] = self._next_place
            self._next_place += 1
        return place

    def count_step(self, optimizer: object) -> None:
        """Note that an optimizer steps, or skips."""
        if self._group is not None:
            place = self._places.get(optimizer, 0)
            self.steps += 1 + _checksum(f"step {place}") % 2**16

    # -- what the host learns later ----------------------------------------------------------------

    def later(self, values: Tensor, then: Callable[[list[float]], None]) -> None:
        """Call ``then`` with values that are on a device, when the host reads them.

        Never, where a CUDA graph is captured: its replays run no Python.
        """
        if not host.is_captured():
            self._arriving.append((host.HostCopy(values), then))

    def settle(self, wait: bool = True) -> None:
        """Read what is on its way, and raise what it demands.

        Args:
            wait: If not, a process alone reads what has arrived; others must read together.
        """
        arriving, alone = self._arriving, self._group is None
        if arriving and host.is_captured():
            return
        while arriving and (wait or (alone and arriving[0][0].arrived())):
            copy, then = arriving.popleft()
            then(copy.values())

    # -- one message -------------------------------------------------------------------------------

    def agree(
        self,
        group: Group,
        call: Call,
        found: Sequence[Flag],
        error: Exception | None,
    ) -> list[Found]:
        """Send what this rank found in the gradients of each optimizer; return what all agree on.

        On a device an error is raised on all ranks at their next call, and every flag is set.

        Args:
            group: From `group`.
            call: What this rank does.
            found: Whether each optimizer's gradients overflowed here.
            error: What went wrong on this rank while it looked.

        Raises:
            LockstepError: Ranks differ, or a rank is gone.
            Exception: What went wrong on some rank, on every rank.
        """
        self.settle()
        agreed: list[Found] = []
        most = max(len(found), 1) if group.on_host else _WORDS - 1
        for start in range(0, max(len(found), 1), most):
            agreed += self._exchange(group, call, start, found[start : start + most], error)
        return agreed

    def _exchange(
        self,
        group: Group,
        call: Call,
        start: int,
        found: Sequence[Flag],
        error: Exception | None,
    ) -> list[Found]:
        scales = self._scales or call.scaled
        digest = self._digest(call, start, scales)
        # Of ranks without an error: one that all of them share differs from it on each.
        expected = digest * group.size & _HALF
        digest = digest + (error is not None) & 0x7FFFFFFF
        counted = self.iteration, self.steps
        if group.on_host:
            # The group's own, which nobody else sends while this is waited for.
            words = group.word.fill_(digest << 32 | sum(map(bool, found)))
        else:
            words = _device_words(group, digest, found)
        reach(group, _reduce, group.process_group, words)
        if self._scales and not group.on_host:

            def read(values: list[float]) -> None:
                if int(values[0]) & _HALF != expected or error is not None:
                    self._compare(group, call, counted, error)

            self.later(words[:1], read)
            flags = words[1:].ne(0).logical_or_(words[0].ne(_as_int32(expected)))
            flags = host.moved(flags, group.preferred)
            return [Found(flag) for flag in flags.unbind()[: len(found)]]
        if group.on_host:
            word = int(words.item())
            summed, counts = word >> 32, [word & _HALF]
        else:
            summed, *counts = words.tolist()
        if summed & _HALF != expected or error is not None or not scales:
            self._compare(group, call, counted, error)
        self._scales = True
        if not any(counts):
            return [Found(False, ())] * len(found)
        everyone = self.gather(list(map(bool, found)), group)
        columns = zip(*everyone, strict=True)
        overflowed = [tuple(itertools.compress(group.global_ranks, each)) for each in columns]
        return [Found(bool(ranks), ranks) for ranks in overflowed]

    def agree_on_norm(
        self,
        group: Group,
        call: Call,
        square: float | Tensor,
        limit: Tensor | None,
        asks: bool,
        error: Exception | None,
    ) -> float | Tensor:
        """Return the sum of what each rank adds to the square of a norm, in one message.

        Two float64: the sum decides flag and clip, and the digest whether ranks do the same. On a
        device the limit of the norm and whether a rank asks are two more, and the host reads at the
        next call whether ranks are alike; where they are not, the sum is NaN.

        Args:
            group: From `group`.
            call: What this rank does.
            square: A number, or 0-d float64 on the device of the loss scale; returned alike.
            limit: What the norm must not lie above, where the host does not know it.
            asks: Whether replicas are to be compared, on all ranks.
            error: What went wrong on this rank while it measured.

        Raises:
            LockstepError: Ranks differ, or a rank is gone.
            Exception: What went wrong on some rank, on every rank.
        """
        self.settle()
        scales = self._scales or call.scaled
        digest = self._digest(call, 0, scales)
        expected = float(digest * group.size)
        counted = self.iteration, self.steps
        sent = digest + (error is not None or (asks and group.on_host))
        if group.on_host:
            words = torch.tensor([float(square), sent], dtype=torch.float64, device=group.device)
        else:
            words = torch.zeros(4, dtype=torch.float64, device=group.device)
            words[0] = square
            words[1].fill_(sent)
            if limit is not None:
                words[2].copy_(limit, non_blocking=True)
            words[3].fill_(asks)
        reach(group, _reduce, group.process_group, words)
        total = words[0]
        if self._scales and not group.on_host:
            alike = words[1].eq(expected)
            if limit is not None:  # of equal float32 a float64 holds the very sum
                alike = alike.logical_and(words[2].eq(limit.float() * group.size))

            def read(values: list[float]) -> None:
                if not values[0] or error is not None:
                    above = "" if limit is None else f", skip_above={limit.item()}"
                    self._compare(group, call, counted, error, above)
                self.clips_agree = self.clips_agree and not values[1]

            self.later(torch.stack((alike.double(), words[3])), read)
            total = torch.where(alike, total, math.nan)
        else:
            if words[1].item() != expected or error is not None or not scales:
                self._compare(group, call, counted, error)
                self.clips_agree = False  # a rank asks, or they meet for the first time
            self._scales = True
        return host.moved(total, square.device) if isinstance(square, Tensor) else total.item()

    def _digest(self, call: Call, start: int, scales: bool) -> int:
        kinds = tuple(map(_checksum, call.kinds))
        counted = self.iteration, self.steps, start
        words = (_checksum(call.name), *counted, call.places, kinds, call.begun)
        return hash((*words, _checksum(call.settings), scales)) & 0x7FFFFFFF

    def _compare(
        self,
        group: Group,
        call: Call,
        counted: tuple[int, int],
        error: Exception | None,
        late_settings: str = "",
    ) -> None:
        """Raise on every rank what any rank's message demands; collective."""
        mine = _portable(error), call.alike(*counted, late_settings), call.scaled
        everyone = self.gather(mine, group)
        for rank, (theirs, *_) in zip(group.global_ranks, everyone, strict=True):
            if theirs is not None:
                kind, text = theirs
                raise error or kind(f"{text} (raised on rank {rank}; every rank stops here)")
        _, alike, scaled = zip(*everyone, strict=True)
        _raise_if_differing(group, alike)
        if not any(scaled):
            raise StageError(
                f"Attempted {call.name} but _scale is None on every rank.  This may indicate "
                "your script did not use scaler.scale(loss or outputs) earlier in the iteration."
            )

    def gather(self, value: Any, group: Group | None = None) -> list[Any]:
        """Return every rank's ``value``; for errors and reports, never on the fast path."""
        group = self.group(torch.device("cpu")) if group is None else group
        if group is None:
            return [value]
        values: list[Any] = [None] * group.size
        reach(group, dist.all_gather_object, values, value, group.process_group)
        return values


@functools.lru_cache(maxsize=256)
def _checksum(text: str) -> int:
    # Unlike hash(), which differs between processes for text.
    return zlib.crc32(text.encode())


def _as_int32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def _device_words(group: Group, digest: int, found: Sequence[Flag]) -> Tensor:
    words = torch.zeros(_WORDS, dtype=torch.int32, device=group.device)
    words[0].fill_(digest)
    for place, flag in enumerate(found, 1):
        if isinstance(flag, Tensor):
            words[place].copy_(flag, non_blocking=True)
        else:
            words[place].fill_(flag)
    return words


def _reduce(group: dist.ProcessGroup, words: Tensor) -> None:
    group.allreduce([words], _SUM).wait()


_KNOWN: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    OSError,
    RuntimeError,
    torch.OutOfMemoryError,
    GradientError,
    StageError,
    SettingError,
)


def _portable(error: Exception | None) -> tuple[type[Exception], str] | None:
    """Return an error as another rank can raise it, which may not have its type."""
    if error is None:
        return None
    kind = type(error)
    return (kind, str(error)) if kind in _KNOWN else (RuntimeError, f"{kind.__name__}: {error}")


def _raise_if_differing(group: Group, alike: Sequence[dict[str, Any]]) -> None:
    keys = [key for key in alike[0] if any(each[key] != alike[0][key] for each in alike)]
    if not keys:
        return
    lines = [
        f"  rank {rank}: " + ", ".join(f"{key}={each[key]!r}" for key in keys)
        for rank, each in zip(group.global_ranks, alike, strict=True)
    ]
    fix = (
        "Every rank must make the same scaler calls, with the same optimizers in the same order "
        "and the same settings."
    )
    if "iteration" in keys:
        fix += (
            " One rank left out an update(), or it alone called load_state_dict(), copy.deepcopy "
            "or pickle, after which iterations count from 0."
        )
    raise LockstepError(
        "the ranks are not in lockstep; nothing was stepped by this call. They have\n"
        + "\n".join([*lines, fix])
    )
