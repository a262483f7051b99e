"""All ranks agree: what they compare, per optimizer, and what every rank raises.

A message carries one number made of everything that must be the same on all ranks. Where the
numbers differ, or a rank has something to raise, the ranks gather a `Statement` each and come to
the same conclusion: an error for all of them, or that they rightly hold different parameters.
"""

from __future__ import annotations

import functools
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distamp.errors import LockstepError, StageError
from distamp.gradients import flag_of
from distamp.optimizers import describe
from distamp.scaler import fingerprint, message
from distamp.scaler.groups import Group, GroupLike, resolve
from distamp.scaler.look import Local
from distamp.scaler.message import Reply
from distamp.scaler.norms import Entry
from distamp.scaler.optimizer_state import OptimizerState, OptimizerStates
from distamp.scaler.peer_errors import portable, raised_on

__all__ = ["Agreed", "Question", "Ranks"]


@dataclass(slots=True, eq=False)
class Question:
    """What one rank brings to a message.

    Args:
        call: The method the user called; must be the same on every rank.
        optimizers: At most as many as a message takes.
        states: Theirs.
        locals: What this rank found in their gradients.
        total: How many optimizers the whole call has.
        settings: The scaler's settings, as text.
        scale: 0-d float32, the loss scale.
        live: Scale, growth tracker and what else a schedule remembers, where the host can read it
            without a wait; else what all of it follows from.
        scaled: Whether this rank has ever called ``scale()``.
        refused: An error that was found before gradients were looked at.
        wants_rows: Whether a norm or the largest gradient is asked for.
        row: This rank's words of them, int64 (3,); None where it has an error.
        norms: The number of the norm plan; 0 where no norm is asked for.
        table: What the other ranks need to know to make a plan; asked for where plans differ.
        tail: Words for ranks that have no more inputs, inside ``Join``.
        read_live: Reads scale and tracker; waits where they lie on a device.
    """

    call: str
    optimizers: Sequence[Any]
    states: Sequence[OptimizerState]
    locals: Sequence[Local]
    total: int
    settings: str
    scale: Tensor
    live: tuple[Any, ...]
    scaled: bool
    refused: Exception | None = None
    wants_rows: bool = False
    row: Tensor | None = None
    norms: int = 0
    table: Callable[[], list[Entry]] | None = None
    tail: Sequence[int] = ()
    read_live: Callable[[], tuple[Any, ...]] = tuple

    def error(self) -> Exception | None:
        """Return the first error that this rank found, if any."""
        if self.refused is not None:
            return self.refused
        for local in self.locals:
            if local.error is not None:
                return local.error
        return None


class Agreed(NamedTuple):
    """What all ranks agree on.

    Args:
        flags: For each optimizer, 0-d float32, exactly 0 or 1.
        reply: Who overflowed.
        rows: The rows of all ranks, int64 (ranks, 3), if asked for.
        with_rows: Whether they came in the reply, and not in a collective of their own.
        late: Whether some rank has yet to read the reply; then none may act on what it says.
        tables: What all ranks hold, where their norm plans differ.
        compared: Whether the ranks compared more than the number, and found it the same.
    """

    flags: list[Tensor]
    reply: Reply
    rows: Tensor | None
    with_rows: bool
    late: bool
    tables: list[list[Entry]] | None
    compared: bool


@dataclass(frozen=True)
class Statement:
    """What one rank says of a call, for all ranks to compare."""

    call: str
    iteration: int
    optimizers: int
    settings: str
    live: tuple[Any, ...]
    over: list[str]
    identities: list[int]
    fingerprints: list[int]
    agreed: list[bool]
    seen: frozenset[int]
    scaled: bool
    norms: int
    table: list[Entry] | None
    late: bool
    error: tuple[type[Exception], str] | None
    unsent: tuple[type[Exception], str] | None

    @property
    def shown(self) -> dict[str, Any]:
        """What is shown to people."""
        scale, tracker = (*self.live, None, None)[:2]
        shown = {
            "call": self.call,
            "iteration": self.iteration,
            "optimizers": self.optimizers,
            "settings": self.settings,
            "scale": scale,
            "growth_tracker": tracker,
            "over": self.over,
        }
        hysteresis = self.live[2:]
        return {**shown, "hysteresis": hysteresis} if hysteresis else shown


class Ranks:
    """The ranks that a scaler agrees with, and how far they have come together.

    Args:
        process_group: As given by the user; resolved anew at each message, so that a group that
            was destroyed and made again is picked up.
    """

    def __init__(self, process_group: GroupLike) -> None:
        self.process_group = process_group
        self.iteration = 0
        self.lost_group: str | None = None
        self._scaled = False
        self._unsent: Exception | None = None
        self._group: Group | None = None
        self._of_mesh: dist.ProcessGroup | None = None
        self._pending: deque[_Pending] = deque()

    @property
    def alone(self) -> bool:
        """Whether there is no other rank to agree with."""
        group = self._now()
        return group is None or group.size() == 1

    @property
    def size(self) -> int:
        """Ranks that agree, this one among them."""
        return 1 if self.alone else dist.get_world_size(self._now())

    @property
    def ranks(self) -> list[int]:
        """The ranks that agree, by their numbers in the default group."""
        return [self.rank] if self.alone else dist.get_process_group_ranks(self._now())

    @property
    def rank(self) -> int:
        """This process's rank in the default group; 0 without one."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value``; for reports, never on the fast path."""
        if self.alone:
            return [value]
        group = self._now()
        assert group is not None
        return message.gather(Group(group, torch.device("cpu")), value)

    def join_group(self) -> Any:
        """Return the group for ``Join``, which must be the same for all that it joins."""
        return self._now()

    def raise_later_elsewhere(self, error: Exception) -> None:
        """Let every rank raise, in the next message, what this one raises now without any."""
        self._unsent = error

    def group_for(self, scale: Tensor, states: OptimizerStates) -> Group | None:
        """Return the ranks to agree with in this call; None where there is no other."""
        process_group = self._now()
        if process_group is None or process_group.size() == 1:
            return None
        group = self._group
        if group is None or group.process_group is not process_group:
            if group is not None:
                states.forget_agreements()
            self.iteration = 0
            self._pending.clear()
        elif group.preferred == scale.device:
            return group
        self._group = Group(process_group, scale.device)
        return self._group

    def _now(self) -> dist.ProcessGroup | None:
        if self.lost_group is not None:
            raise StageError(self.lost_group)
        given = self.process_group
        if given is None or isinstance(given, dist.ProcessGroup):
            return resolve(given)
        if self._of_mesh is None:
            self._of_mesh = resolve(given)
        return None if self._of_mesh is None else resolve(self._of_mesh)

    # -- one message -------------------------------------------------------------------------------

    def agree(self, group: Group, question: Question, states: OptimizerStates) -> Agreed:
        """Send what this rank found and return what all ranks agree on.

        Raises:
            LockstepError: Ranks differ.
            Exception: What some rank found, on every rank.
        """
        self.drain()
        fingerprint.name(question.optimizers, question.states)
        unsent, self._unsent = self._unsent, None
        error = question.error()
        scaled = question.scaled or self._scaled
        usual = scaled and error is None and unsent is None
        marks = () if usual else (error is not None, unsent is not None, scaled)
        flags = [local.flags for local in question.locals]
        row, tail = question.row, question.tail
        takes_rows = bool(tail) or group.length.takes_rows()
        digest = self._digest(question, marks)
        reply = message.exchange(group, digest, flags, row, takes_rows=takes_rows, tail=tail)
        pending = _Pending(
            self, group, reply, question, states, self.iteration, not marks, error, unsent
        )
        # What is the same on all ranks decides whether to wait; norm plans may rightly differ once.
        plans = {state.norms for state in question.states} or {0}
        now = reply.known or tail or (question.wants_rows and not takes_rows)
        now = now or not all(state.agreed for state in question.states)
        first = question.norms and 0 in plans
        # Where ranks agree, a plan that is new on one is new on all: they all wait for this one.
        is_new = question.norms and plans != {question.norms}
        if now or first or (is_new and reply.in_agreement):
            pending.check()
        else:
            pending.late = True
            self._pending.append(pending)
        device = question.scale.device
        rows = None
        if question.wants_rows:
            rows = reply.rows() if takes_rows else message.gather_rows(group, row)
        agreed = reply.flags(device)
        if pending.late and (marks or reply.known):
            agreed = [flag_of(True, device) for _ in agreed]
        late, tables = pending.late, pending.tables
        return Agreed(agreed, reply, rows, takes_rows, late, tables, pending.compared and not late)

    def drain(self) -> None:
        """Read the replies that are still on the device, and raise what they demand."""
        while self._pending:
            self._pending.popleft().check()

    def _digest(self, question: Question, marks: tuple[bool, ...]) -> int:
        words = (
            _checksum(question.call),
            self.iteration,
            question.total,
            _checksum(question.settings),
            question.live,
            question.norms,
            marks,
            tuple([state.identity for state in question.states]),
        )
        return hash(words) & 0xFFFFFFFF

    def note_scaled(self) -> None:
        """Note that some rank has called ``scale()``."""
        self._scaled = True


@functools.lru_cache(maxsize=64)
def _checksum(text: str) -> int:
    # Unlike hash(), which differs between processes for text.
    return zlib.crc32(text.encode())


@dataclass(slots=True, eq=False)
class _Pending:
    """A reply that may have been used on the device and not yet been read on the host."""

    ranks: Ranks
    group: Group
    reply: Reply
    question: Question
    states: OptimizerStates
    iteration: int
    plain: bool
    error: Exception | None
    unsent: Exception | None
    late: bool = False
    compared: bool = False
    tables: list[list[Entry]] | None = None

    def check(self) -> None:
        """Raise on every rank what any rank's message demands."""
        # Read always: the device's own flags are all set where numbers differ, rightly or not.
        in_agreement = self.reply.in_agreement
        if not (self.plain and in_agreement):
            if self.reply.present < self.group.size:
                raise self.error or LockstepError(
                    "the ranks that still have inputs are not in lockstep, or one of them raised "
                    "an error; inside Join they cannot compare more than that"
                )
            self._compare()
        length = self.group.length
        length.capacity = max(length.capacity, self.question.total)
        # Inside Join not all ranks took part.
        if self.question.wants_rows and not self.question.tail:
            length.without_rows = 0
        norms = self.question.norms
        if norms and (self.tables is not None or (self.late and not self.reply.replicas_agree())):
            norms = 0
        for state in self.question.states:
            state.agreed = True
            state.norms = norms if self.question.norms else state.norms

    def _state(self) -> Statement:
        question, unsent = self.question, self.unsent
        table = None
        if question.table is not None and self.error is None and not self.late:
            table = question.table()
        return Statement(
            question.call,
            self.iteration,
            question.total,
            question.settings,
            question.read_live(),
            [
                f"{describe(o)} [{s.fingerprint:08x}, number {s.index}]"
                for o, s in zip(question.optimizers, question.states, strict=True)
            ],
            [state.identity for state in question.states],
            [state.fingerprint for state in question.states],
            [state.agreed for state in question.states],
            frozenset(state.fingerprint for _, state in self.states.live()),
            question.scaled,
            question.norms,
            table,
            self.late,
            None if self.error is None else portable(self.error),
            None if unsent is None else portable(unsent),
        )

    def _compare(self) -> None:
        """Go on if ranks hold different parts of a model, else raise."""
        everyone: list[Statement] = message.gather(self.group, self._state())
        self._raise_errors(everyone)
        first = everyone[0]
        alike = ("call", "iteration", "optimizers", "settings", "live")
        if any(getattr(s, name) != getattr(first, name) for s in everyone for name in alike):
            _raise_mismatch(self.group, everyone)
        if not any(statement.scaled for statement in everyone):
            raise StageError(
                f"Attempted {first.call} but _scale is None on every rank.  This may indicate "
                "your script did not use scaler.scale(loss or outputs) earlier in the iteration."
            )
        self.ranks.note_scaled()
        self.late = any(statement.late for statement in everyone)
        for place, state in enumerate(self.question.states):
            identities = [statement.identities[place] for statement in everyone]
            if len(set(identities)) == 1:
                continue
            if any(s.agreed[place] for s in everyone) or _swapped(everyone, place):
                _raise_mismatch(self.group, everyone)
            state.identity = hash(tuple(identities))
        if any(statement.norms != first.norms for statement in everyone):
            self.tables = [statement.table or [] for statement in everyone]
        self.compared = True

    def _raise_errors(self, everyone: Sequence[Statement]) -> None:
        ranks = self.group.global_ranks
        for rank, statement in zip(ranks, everyone, strict=True):
            if statement.error is not None:
                raise self.error or raised_on(rank, statement.error)
        if all(statement.unsent is not None for statement in everyone):
            return  # the same mistake everywhere, which every rank has raised
        for rank, statement in zip(ranks, everyone, strict=True):
            if statement.unsent is not None:
                kind, text = statement.unsent
                raise raised_on(rank, (kind, f"an error was raised on rank {rank} alone: {text}"))


def _swapped(everyone: Sequence[Statement], place: int) -> bool:
    """Return whether two ranks use two optimizers, that both of them have, in another order."""
    for a, b in combinations(everyone, 2):
        mine, theirs = a.fingerprints[place], b.fingerprints[place]
        if mine != theirs and mine in b.seen and theirs in a.seen:
            return True
    return False


def _raise_mismatch(group: Group, everyone: Sequence[Statement]) -> None:
    shown = [statement.shown for statement in everyone]
    keys = [key for key in shown[0] if any(each.get(key) != shown[0][key] for each in shown)]
    lines = [
        f"  rank {rank}: " + ", ".join(f"{key}={each.get(key)!r}" for key in keys or each)
        for rank, each in zip(group.global_ranks, shown, strict=True)
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
