"""All ranks agree: when the scaler's message is sent, and what is checked by it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from distamp.errors import StageError
from distamp.scaler import found_inf
from distamp.scaler.apart import Call, Held, first_error, raise_apart, swapped
from distamp.scaler.found_inf import Message, Reply, merged
from distamp.scaler.identity import describe, living_fingerprints
from distamp.scaler.known import KnownOptimizers
from distamp.scaler.process_group import Group, GroupLike, resolve

__all__ = ["Agreement", "FlagsOf", "Settled", "settle_alone"]

Optimizers: TypeAlias = Sequence[torch.optim.Optimizer]
FlagsOf: TypeAlias = Callable[[torch.optim.Optimizer], Sequence[Tensor]]

# Messages with room for extras (norms, the largest gradient) after extras were last sent.
_ROOMY = 8


class Settled(NamedTuple):
    """What all ranks agree on.

    Args:
        flags: For each optimizer 0-d float32, exactly 0 or 1.
        norms: The norm words of all ranks, if asked for.
        largest: 0-d float32, the largest scaled gradient of all ranks, if asked for.
    """

    flags: list[Tensor]
    norms: Tensor | None
    largest: Tensor | None


class Agreement:
    """The ranks this scaler agrees with, and how far they have come together.

    Args:
        process_group: As given by the user; resolved anew at each message, so that a group that
            was destroyed and made again is picked up.
    """

    def __init__(self, process_group: GroupLike) -> None:
        self.process_group = process_group
        self._iteration = 0
        self._announced = False
        self._group_missing = False
        self._group: Group | None = None
        self._resolved: dist.ProcessGroup | None = None
        self._pending: deque[_Pending] = deque()

    def require_group(self) -> None:
        """Refuse messages until a group is set again, as after unpickling."""
        self._group_missing = True

    def next_iteration(self) -> None:
        """Count one ``update``."""
        self._iteration += 1

    def restart(self) -> None:
        """Count iterations from zero again, as after loading a checkpoint on every rank."""
        self._iteration = 0

    @property
    def alone(self) -> bool:
        """Whether there is no other rank to agree with."""
        if self._group_missing:
            raise StageError(
                "this scaler was pickled with a process group of its own, which a pickle cannot "
                "carry; set scaler.process_group (None is the default group) before using it"
            )
        process_group = self._current()
        return process_group is None or process_group.size() == 1

    @property
    def size(self) -> int:
        """Ranks that agree, this one among them."""
        return 1 if self.alone else dist.get_world_size(self._current())

    @property
    def ranks(self) -> list[int]:
        """The ranks that agree, by their numbers in the default group."""
        return [self.rank] if self.alone else dist.get_process_group_ranks(self._current())

    @property
    def iteration(self) -> int:
        """How many ``update`` calls there were."""
        return self._iteration

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value``; for reports, never on the fast path."""
        if self.alone:
            return [value]
        return found_inf.gather(self._group_now(torch.device("cpu"), None), value)

    @property
    def rank(self) -> int:
        """This process's rank in the default group; 0 without one."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    @property
    def rank_zero(self) -> bool:
        """Whether this process is the one that speaks to people."""
        return self.rank == 0

    def announce_disabled(self, device_type: str) -> None:
        """Say once to the others that this rank's scaler is disabled; an enabled one objects."""
        if self._announced or self.alone:
            return
        self._announced = True
        group = self._group_now(torch.device("cpu"), None)
        call = Call("disabled", 0, 0, enabled=False, settings="")
        message = Message(call.digest(()), torch.ones(()), ())
        if not found_inf.exchange(group, message, room=_has_room(group)).in_lockstep:
            held = Held(call, 1.0, over=[], identities=[], living=set(), fresh=False)
            raise_apart(group, found_inf.gather(group, held))

    def group_for(self, scale: Tensor, known: KnownOptimizers) -> Group | None:
        """Return the ranks to agree with in this call; None where there is no other."""
        return None if self.alone else self._group_now(scale.device, known)

    def settle(
        self,
        group: Group,
        call: str,
        optimizers: Optimizers,
        total: int,
        flags_of: FlagsOf,
        *,
        known: KnownOptimizers,
        scale: Tensor,
        settings: Callable[[], str],
        scale_called: bool,
        norm_words: Callable[[], Tensor] | None = None,
        largest: Callable[[], Tensor] | None = None,
    ) -> Settled:
        """Look at the gradients of ``optimizers`` and agree on one 0-d flag for each.

        Args:
            group: What `group_for` returned.
            call: The method the user called; must be the same on every rank.
            optimizers: At most ``group.traffic.flag_slots`` of them.
            total: How many the whole call has.
            flags_of: The local pass; returns a 0-d flag for each device.
            known: What the scaler remembers of its optimizers.
            scale: 0-d float32, the loss scale.
            settings: Returns the scaler's settings, in words.
            scale_called: Whether this rank has ever called ``scale()``.
            norm_words: Computes this rank's words for a gradient norm, after the local pass.
            largest: Returns the largest magnitude that the local pass met.

        Raises:
            LockstepError: Ranks differ.
            Exception: What ``flags_of`` raised on some rank, on every rank.
        """
        self.drain()
        flags, error = _looked_at(optimizers, flags_of, scale.device)
        extras = found_inf.joined_extras(
            None if norm_words is None or error is not None else norm_words(),
            None if largest is None else largest(),
        )
        said = Call(call, self._iteration, total, enabled=True, settings=settings())
        digest = said.digest(known.identities(optimizers))
        message = Message(digest, scale, flags, error is not None, scale_called, extras)
        wants_extras = norm_words is not None or largest is not None
        room = _has_room(group)
        reply = found_inf.exchange(group, message, room=room)
        pending = _Pending(group, reply, said, scale, optimizers, known, error, wants_extras)
        self._take(pending, now=wants_extras and not room)
        everyones = None
        if extras is not None:
            everyones = reply.extras() if room else found_inf.gather_extras(group, extras)
        return _settled(
            reply.flags(scale.device),
            everyones,
            scale.device,
            norms_wanted=norm_words is not None,
            largest_wanted=largest is not None,
        )

    def _take(self, pending: _Pending, *, now: bool) -> None:
        """Note a reply, and check it ``now`` or where that costs no wait.

        It is checked at once at first sight of an optimizer, too, and before another collective.
        """
        known = [pending.known[optimizer] for optimizer in pending.optimizers]
        for index, k in enumerate(known):
            k.said = (pending.reply, index, pending.group)
        self._pending.append(pending)
        if now or pending.reply.known or not all(k.agreed for k in known):
            self.drain()

    def drain(self) -> None:
        """Read the replies that are still on the device, and raise what they demand."""
        while self._pending:
            self._pending.popleft().check()

    def _current(self) -> dist.ProcessGroup | None:
        if self.process_group is None or isinstance(self.process_group, dist.ProcessGroup):
            return resolve(self.process_group)
        if self._resolved is None:
            self._resolved = resolve(self.process_group)
        return resolve(self._resolved)

    def _group_now(self, preferred: torch.device, known: KnownOptimizers | None) -> Group:
        process_group = self._current()
        assert process_group is not None
        group = self._group
        if group is None or group.process_group is not process_group:
            if group is not None and known is not None:
                known.forget_agreements()
            self._iteration = 0
            self._pending.clear()
        elif group.preferred == preferred:
            return group
        self._group = Group(process_group, preferred)
        return self._group


def settle_alone(
    optimizers: Optimizers,
    flags_of: FlagsOf,
    scale: Tensor,
    norm_words: Callable[[], Tensor] | None,
    largest: Callable[[], Tensor] | None,
) -> Settled:
    """Return what `Agreement.settle` does, where there is no other rank."""
    flags = [merged(flags_of(optimizer), scale.device) for optimizer in optimizers]
    words = None if norm_words is None else norm_words()[None]
    return Settled(flags, words, None if largest is None else largest())


def _settled(
    flags: list[Tensor],
    extras: Tensor | None,
    device: torch.device,
    *,
    norms_wanted: bool,
    largest_wanted: bool,
) -> Settled:
    """Return what the ranks agree on, and of everyone's extras what was asked for."""
    if extras is None:
        return Settled(flags, None, None)
    norms, largest = found_inf.parted_extras(extras, device)
    return Settled(flags, norms if norms_wanted else None, largest if largest_wanted else None)


def _looked_at(
    optimizers: Optimizers, flags_of: FlagsOf, device: torch.device
) -> tuple[list[Sequence[Tensor]], Exception | None]:
    """Return the local flags of each optimizer, and the last error that looking at them raised."""
    flags: list[Sequence[Tensor]] = []
    error: Exception | None = None
    for optimizer in optimizers:
        try:
            flags.append(flags_of(optimizer))
        except Exception as raised:
            # Raised by _Pending.check, on every rank: a rank that left here would leave the
            # others waiting.
            error = raised
            flags.append([torch.zeros((), device=device)])
    return flags, error


class _Pending(NamedTuple):
    """A reply that has been used on the device and not yet read on the host."""

    group: Group
    reply: Reply
    said: Call
    scale: Tensor
    optimizers: Optimizers
    known: KnownOptimizers
    error: Exception | None
    wants_extras: bool

    def check(self) -> None:
        """Raise on every rank what any rank's message demands."""
        reply = self.reply
        if not reply.in_lockstep:
            self._compare()
        traffic = self.group.traffic
        traffic.flag_slots = max(traffic.flag_slots, self.said.optimizers)
        if self.wants_extras:
            traffic.messages_without_extras = 0
        for optimizer in self.optimizers:
            self.known[optimizer].agreed = True
        if reply.any_error:
            raise first_error(self.group, self.error)
        if not reply.any_scaled:
            raise StageError(
                f"Attempted {self.said.call} but _scale is None on every rank.  This may indicate "
                "your script did not use scaler.scale(loss or outputs) earlier in the iteration."
            )

    def named(self) -> list[str]:
        """Return the optimizers of the call for people to read."""
        return [
            f"{describe(o)} [{self.known[o].identity:08x}, number {self.known[o].index}]"
            for o in self.optimizers
        ]

    def _compare(self) -> None:
        """Go on if ranks hold different parts of a model, else raise.

        Pipeline stages hold different parameters behind the same call; there, an optimizer is
        named by the order of first sight instead. Ranks that swapped two optimizers show in that
        each of them also has the optimizer that the other one named.
        """
        known = [self.known[optimizer] for optimizer in self.optimizers]
        held = Held(
            self.said,
            self.scale.item(),
            self.named(),
            [k.identity for k in known],
            living_fingerprints(),
            fresh=not any(k.agreed for k in known),
        )
        everyone = found_inf.gather(self.group, held)
        same_call = all((h.said, h.scale) == (held.said, held.scale) for h in everyone)
        if not same_call or not all(h.fresh for h in everyone) or swapped(everyone):
            raise_apart(self.group, everyone)
        for k in known:
            k.identity = 1 + k.index
        self.reply.reconciled = True


def _has_room(group: Group) -> bool:
    """Return whether the next message has room for extras, and count it."""
    traffic = group.traffic
    traffic.messages_without_extras += 1
    return traffic.messages_without_extras <= _ROOMY
