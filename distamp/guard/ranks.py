"""One message of fixed length for every collective call, and the errors that every rank raises.

Every message of a group has the same length and layout, whatever the ranks call. So ranks whose
calls differ still meet in the same SUM all-reduce. Their digests differ, all ranks gather what each
one does, and every rank raises. A digest is a hash of everything that must be equal on all ranks:
the call, its optimizers and arguments, settings, counters, and a failure that a rank has not
reported yet. The ranks agree if the digests sum up to ``size`` times this rank's. A rank with an
error adds 1 to its digest.

On the host a message is two float64 words, which hold integers below 2^53 exactly:

====  ==============================================================================================
word  content
====  ==============================================================================================
0     The square of a norm if the call steps by one; NaN if this rank has another reason to skip.
      In any other call 1 if this rank has a reason to skip (inf or NaN in a gradient), else 0. If
      the sum is not finite, or contains such a 1, the ranks gather the reasons.
1     The digest of at most 31 bits, plus a weight if some optimizer of the call has no gradient
      here. The weight is 2 to the number of bits that a sum of digests has. If all ranks add the
      weight, they add up which optimizers have no gradient.
====  ==============================================================================================

With b the number of bits of the group's size, a digest has min(31, 52 - 2b) bits. The digests are
exact up to 131,071 ranks, and larger groups are refused.

On a device a message is 32 float64 words, and the host does not wait for the reply:

======  ============================================================================================
word    content
======  ============================================================================================
0       The digest.
1       The square of a norm, else 0.
2       A limit of the norm that lies on the device, else 0.
3       1 if this rank requests that replicas are compared.
4 - 31  For each of 28 optimizers: 1 if this rank overflowed, plus 2^26 if the optimizer has no
        gradient here. A call with more optimizers sends several messages.
======  ============================================================================================

Kernels set the flags from the reply, all of them if digests differ, and the host reads the reply at
the next call.
"""

from __future__ import annotations

import functools
import math
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distamp import host
from distamp.error_text import count_text, lines_by_rank
from distamp.errors import (
    CallOrderError,
    ConfigError,
    GradientError,
    RankMismatchError,
    ReplicaMismatchError,
)
from distamp.groups import Group, GroupLike, reach, resolve

__all__ = ["Absence", "Call", "Flag", "Found", "Problem", "Ranks", "mismatch_text"]

#: Whether some rank overflowed: a bool where the host knows, else 0-d bool on a device.
Flag: TypeAlias = "bool | Tensor"

_WORDS = 32
#: Words of a device message that do not belong to one optimizer.
_HEAD = 4
_PER_MESSAGE = _WORDS - _HEAD
#: Added to an optimizer's word on a device by a rank that has no gradient of the optimizer.
_NO_GRADS = float(2**26)
#: The largest group whose digests have enough bits.
_MOST_RANKS = 2**17 - 1
_SUM = dist.AllreduceOptions()
_SUM.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)


class Found(NamedTuple):
    """What all ranks agree on of one optimizer.

    Args:
        flag: Whether any rank overflowed.
        ranks: Those that did, by their global numbers, where the host knows.
        bad_names: For each of them the name of its first bad parameter; empty where not known.
    """

    flag: Flag
    ranks: tuple[int, ...] | None = None
    bad_names: tuple[str, ...] = ()


class Absence:
    """Whether an optimizer has gradients, on this rank and on any rank.

    Attributes:
        here: Whether this rank has no gradient of the optimizer.
        everywhere: Whether no rank has one. On a device the host knows this when it has read the
            reply; until then False.
        late: The same as 0-d bool on the device, until the host has read the reply; else None.
    """

    __slots__ = ("everywhere", "here", "late")

    def __init__(self, here: bool = False) -> None:
        self.here = here
        self.everywhere = False
        self.late: Tensor | None = None

    @property
    def flag(self) -> Flag:
        """Whether no rank has a gradient, without a wait for the device."""
        return self.everywhere if self.late is None else self.late


class Problem(NamedTuple):
    """An error of this rank in a call that every rank makes.

    Args:
        error: The error that every rank raises.
        looked: Whether this rank may have changed a gradient before. If no rank has, all ranks
            keep their records as they were.
    """

    error: Exception
    looked: bool


class Call(NamedTuple):
    """The call of one rank, which all ranks compare.

    Args:
        name: ``unscale_``, ``step`` and ``step_all`` are one: they send the same message.
        kinds: Class names of its optimizers.
        places: In which order they came first.
        settings: The settings of the guard or scaler and the arguments of the call, each as a line
            ``name=value``. An argument that was not given has no line.
        begun: Scale and growth tracker as they were last set from outside.
        scaled: Whether this rank ever scaled a loss.
    """

    name: str
    kinds: Sequence[str]
    places: tuple[int, ...]
    settings: str
    begun: tuple[float, int]
    scaled: bool

    def alike(self, counted: _Counted, late_settings: str = "") -> dict[str, Any]:
        """Return the values that must be the same on every rank.

        Args:
            counted: The counters of this rank.
            late_settings: Settings that lie on a device, as lines ``name=value``.
        """
        return {
            "call": self.name,
            "iteration": counted.iteration,
            "steps": counted.steps,
            "optimizers": list(zip(self.kinds, self.places, strict=True)),
            "settings": self.settings + late_settings,
            "scale": self.begun[0],
            "growth_tracker": self.begun[1],
        }


class _Counted(NamedTuple):
    """The state of `Ranks` that a message compares, as it was when the message was sent."""

    iteration: int
    steps: int
    unsent: tuple[type[Exception], str] | None
    failure: tuple[int, str] | None


class Ranks:
    """The ranks that a guard or scaler agrees with, and how far they have come together.

    Args:
        given: As given by the user; resolved anew at each message, so that a group that was
            destroyed and made again is picked up.
        owner: The noun for the object that has the ranks, in errors: "guard" or "scaler". None
            for a call without such an object.
        lost: Whether a pickle has left out the group.
    """

    def __init__(self, given: GroupLike, owner: str | None = None, lost: bool = False) -> None:
        self.given = given
        self.owner = owner
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
        # Whether in the last call that raised on all ranks no rank had looked at a gradient.
        self.nobody_looked = False
        # An error that this rank raised where no message was due; the next message has it.
        self._unsent: tuple[type[Exception], str] | None = None
        # The error of an optimizer's step that raised on this rank, until a state is loaded.
        self._failure: tuple[int, str] | None = None
        # Whether all ranks know of inf or NaN that some rank found in this iteration: on the host.
        self.overflowed = False
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
        return Ranks, (None, self.owner, self.given is not None)

    def __deepcopy__(self, memo: Any) -> Ranks:
        return Ranks(self.given, self.owner, self.lost)

    @property
    def rank(self) -> int:
        """This process's rank in the default group; 0 without one."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    @property
    def size(self) -> int:
        """The number of ranks to agree with; makes no group, unlike `group`."""
        if self.given is not None:
            return self.given.size()
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the group, which speaks for all; so is one alone."""
        return self._group is None or dist.get_rank(self._group.process_group) == 0

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group as it is now; None where there is none.

        Raises:
            CallOrderError: It is gone.
        """
        if self.lost:
            raise CallOrderError(
                f"The process group of this {self.owner} was left out of a pickle, because torch "
                f"cannot pickle one. Set {self.owner}.process_group to a group (None is the "
                "default group)."
            )
        given = self.given
        # Whether it is a mesh is asked in Python, for which a small step need not wait.
        if given is not None and isinstance(given, DeviceMesh):
            if self._of_mesh is None:
                self._of_mesh = resolve(given, self.owner)
            given = self._of_mesh
        return resolve(given, self.owner)

    def group(self, device: torch.device) -> Group | None:
        """Return the ranks to agree with, for a loss scale on ``device``; None if there are none.

        Raises:
            CallOrderError: The group is gone.
        """
        process_group = self.process_group
        if process_group is None or process_group.size() == 1:
            return None
        group = self._group
        if group is None or group.process_group is not process_group:
            _refuse_large(process_group.size())
            self.restart()
            self._scales = self.clips_agree = False
            self.compared = (0, None)
            self._arriving.clear()
            self._places.clear()
            self._next_place = 0
        elif group.preferred == device:
            return group
        self._group = Group(process_group, device, self.owner)
        return self._group

    def restart(self) -> None:
        """Count from 0, as over a new group or with a loaded state; forget failed steps."""
        self.iteration = self.steps = 0
        self._unsent = self._failure = None
        self.overflowed = False

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

    # -- errors of one rank that wait for a message ------------------------------------------------

    def send_later(self, error: Exception) -> None:
        """Store an error of a call that sends no message: the next message of this rank has it.

        Where every rank has the same one, no rank raises it again.
        """
        if self._group is not None:
            self._unsent = _portable(error)

    @contextmanager
    def errors_sent_later(self) -> Iterator[None]:
        """Send an error that is raised inside with the next message, and raise it here."""
        try:
            yield
        except Exception as error:
            self.send_later(error)
            raise

    def report_failed_step(self, optimizer: str, error: BaseException) -> None:
        """Store that an optimizer's step raised on this rank after the ranks had agreed on it.

        From the next message on every rank raises, until a state is loaded. Where every rank's
        step failed with the same error, none does.
        """
        if self._group is not None:
            text = str(error)[:300]
            text = f"{optimizer}: {type(error).__name__}{text and ': '}{text}"
            # Counted, because the same error may come again on one rank alone.
            self._failure = (1 if self._failure is None else self._failure[0] + 1), text

    # -- one message -------------------------------------------------------------------------------

    def agree(
        self,
        group: Group,
        call: Call,
        found: Sequence[Flag],
        absences: Sequence[Absence],
        problem: Problem | None,
        name_bad: Callable[[int], str] | None = None,
        power: Tensor | None = None,
    ) -> tuple[list[Found], Flag, float | Tensor]:
        """Send this rank's flag of each optimizer; return the flags that all ranks agree on.

        On a device an error is raised on all ranks at their next call, and every flag is set.

        Args:
            group: From `group`.
            call: What this rank does.
            found: Whether each optimizer's gradients overflowed here.
            absences: Whether each optimizer has gradients; completed from the reply.
            problem: The error of this rank, if there is one.
            name_bad: Takes the place of an optimizer in ``found`` that overflowed here, and returns
                the name of its first bad parameter. It must not raise, because other ranks wait.
            power: The share of this rank in the power of a norm of the optimizers' gradients, 0-d
                float64, if the message adds that up too.

        Returns:
            The result for each optimizer; whether ranks differ, where the host does not know yet,
            else False, because that raises; and the sum of ``power``, which is NaN on a device if
            ranks differ. On the host a sum that is not finite may stand for a flag.

        Raises:
            RankMismatchError: Ranks differ, or a rank is gone.
            Exception: An error of some rank, on every rank.
        """
        self.settle()
        if not group.on_host:
            return self._agree_on_device(group, call, found, absences, problem, power)
        reasons = list(map(bool, found))
        if power is None:
            total = self._exchange_on_host(group, call, float(any(reasons)), absences, problem)
            is_clean = not total
        else:
            first = math.nan if any(reasons) else float(power)
            total = self._exchange_on_host(group, call, first, absences, problem)
            is_clean = math.isfinite(total)
        if is_clean:
            return [Found(False, ())] * len(found), False, total
        self.overflowed = True
        return self.gather_bad_names(group, reasons, name_bad), False, total

    def gather_bad_names(
        self, group: Group, found: Sequence[bool], name_bad: Callable[[int], str] | None
    ) -> list[Found]:
        """Return for each optimizer the ranks that overflowed, and their first bad parameters.

        Collective: every rank of `process_group` must call this.
        """
        mine = [
            (is_bad, name_bad(place) if is_bad and name_bad is not None else "")
            for place, is_bad in enumerate(found)
        ]
        agreed: list[Found] = []
        for column in zip(*self.gather(mine, group), strict=True):
            bad = [
                (rank, name)
                for rank, (is_bad, name) in zip(group.global_ranks, column, strict=True)
                if is_bad
            ]
            ranks, names = tuple(rank for rank, _ in bad), tuple(name for _, name in bad)
            agreed.append(Found(bool(bad), ranks, names))
        return agreed

    def agree_on_norm(
        self,
        group: Group,
        call: Call,
        square: float | Tensor,
        limit: Tensor | None,
        asks: bool,
        absences: Sequence[Absence],
        problem: Problem | None,
    ) -> float | Tensor:
        """Return the sum of what each rank adds to the square of a norm, in one message.

        The sum decides on the flag and the clip. On a device the host reads at the next call
        whether ranks are alike; where they are not, the sum is NaN.

        Args:
            group: From `group`.
            call: What this rank does.
            square: A number, or 0-d float64 on the device of the loss scale; returned alike.
            limit: What the norm must not lie above, where the host does not know it.
            asks: Whether replicas are to be compared, on all ranks.
            absences: Whether each optimizer has gradients; completed from the reply.
            problem: The error of this rank, if there is one.

        Raises:
            RankMismatchError: Ranks differ, or a rank is gone.
            Exception: An error of some rank, on every rank.
        """
        self.settle()
        total: float | Tensor
        if group.on_host:
            total = self._exchange_on_host(group, call, float(square), absences, problem, asks)
            self.overflowed = self.overflowed or not math.isfinite(total)
            if not isinstance(square, Tensor):
                return total
            return torch.full((), total, dtype=torch.float64, device=square.device)
        some, others = absences[:_PER_MESSAGE], absences[_PER_MESSAGE:]
        norm = square, limit, asks
        words, alike = self._exchange_on_device(group, call, 0, (), some, problem, norm)
        total = torch.where(alike, words[1], math.nan)
        for start in range(_PER_MESSAGE, len(absences), _PER_MESSAGE):
            some, others = others[:_PER_MESSAGE], others[_PER_MESSAGE:]
            self._exchange_on_device(group, call, start, (), some, problem)
        return host.moved(total, square.device) if isinstance(square, Tensor) else total.item()

    def announce(
        self,
        name: str,
        settings: str = "",
        device: torch.device | None = None,
        problem: Problem | None = None,
    ) -> Group | None:
        """Make sure that every rank makes this call now, before it issues collectives of its own.

        Collective: every rank of `process_group` must call this.

        Args:
            name: The call, as the user typed it: "nonfinite_report()".
            settings: Arguments that must be equal on all ranks, each as a line ``name=value``.
            device: Where gradients lie. None: where the last message was, else the host.
            problem: The error of this rank, which every rank raises.

        Returns:
            The group, or None for a process alone.

        Raises:
            RankMismatchError: A rank makes another call, or has other settings; or a rank is gone.
            Exception: An error that another rank sends, on every rank.
        """
        if device is None:
            device = torch.device("cpu") if self._group is None else self._group.preferred
        group = self.group(device)
        if group is None:
            return None
        self.settle()
        call = Call(name, (), (), settings, (0.0, 0), scaled=True)
        # It says nothing of scaled losses, about which a step still has to learn.
        scales, self._scales = self._scales, True
        try:
            if group.on_host:
                self._exchange_on_host(group, call, 0.0, (), problem)
            else:
                self._exchange_on_device(group, call, 0, (), (), problem)
                self.settle()
        finally:
            self._scales = scales
        return group

    def _begin(
        self, group: Group, call: Call, start: int, problem: Problem | None
    ) -> tuple[int, int, _Counted]:
        """Return the digest that this rank sends, what the sum must be, and what it is of."""
        counted = _Counted(self.iteration, self.steps, self._unsent, self._failure)
        self._unsent = None
        self.nobody_looked = False
        bits = _digest_bits(group.size)
        kinds = tuple(map(_checksum, call.kinds))
        waiting = _checksum(repr(counted[2:])) if counted[2:] != (None, None) else 0
        words = (_checksum(call.name), *counted[:2], start, call.places, kinds, call.begun)
        digest = hash((*words, _checksum(call.settings), call.scaled or self._scales, waiting))
        # A rank with an error adds 1, for which there is room.
        digest %= (1 << bits) - 1
        return digest + (problem is not None), digest * group.size, counted

    def _exchange_on_host(
        self,
        group: Group,
        call: Call,
        first: float,
        absences: Sequence[Absence],
        problem: Problem | None,
        asks: bool = False,
    ) -> float:
        """Send two words; return the sum of the first."""
        scales = self._scales or call.scaled
        digest, expected, counted = self._begin(group, call, 0, problem)
        weight = 1 << (_digest_bits(group.size) + group.size.bit_length())
        lacking = any(absence.here for absence in absences)
        sent = digest + (asks and problem is None) + weight * lacking
        words = torch.tensor((first, float(sent)), dtype=torch.float64, device=group.device)
        try:
            reach(group, _reduce, group.process_group, words)
        except RankMismatchError as lost:
            if problem is None:
                raise
            raise problem.error from lost  # which is why the others did not come
        total, summed = words.tolist()
        without, summed = divmod(int(summed), weight)
        if summed != expected or problem is not None or not scales:
            self._compare(group, call, counted, problem)
            self.clips_agree = False  # a rank asks, or they meet for the first time
        self._scales = True
        if without == group.size:
            self._find_absent(group, absences)
        return float(total)

    def _find_absent(self, group: Group, absences: Sequence[Absence]) -> None:
        """Find the optimizers of which no rank has a gradient: each rank lacks those of some."""
        counts = [float(absence.here) for absence in absences]
        if len(counts) > 1:
            words = torch.tensor(counts, dtype=torch.float64, device=group.device)
            reach(group, _reduce, group.process_group, words)
            counts = [count / group.size for count in words.tolist()]
        for absence, count in zip(absences, counts, strict=True):
            absence.everywhere = count == 1.0

    def _agree_on_device(
        self,
        group: Group,
        call: Call,
        found: Sequence[Flag],
        absences: Sequence[Absence],
        problem: Problem | None,
        power: Tensor | None,
    ) -> tuple[list[Found], Flag, float | Tensor]:
        agreed: list[Found] = []
        differ: Flag = False
        total: float | Tensor = 0.0
        norm: tuple[float | Tensor, Tensor | None, bool] = (0.0, None, False)
        if power is not None:
            norm = (power, None, False)
        for start in range(0, max(len(found), 1), _PER_MESSAGE):
            end = start + _PER_MESSAGE
            flags, lacking = found[start:end], absences[start:end]
            words, alike = self._exchange_on_device(
                group, call, start, flags, lacking, problem, norm
            )
            if start == 0:  # The words of the norm are those of the first message.
                total = host.moved(torch.where(alike, words[1], math.nan), group.preferred)
            differ = host.moved(alike.logical_not(), group.preferred)
            counts = words[_HEAD : _HEAD + len(flags)].remainder(_NO_GRADS)
            set_flags = host.moved(counts.ne(0), group.preferred).logical_or(differ)
            agreed += [Found(flag) for flag in set_flags.unbind()]
        return agreed, differ, total

    def _exchange_on_device(
        self,
        group: Group,
        call: Call,
        start: int,
        found: Sequence[Flag],
        absences: Sequence[Absence],
        problem: Problem | None,
        norm: tuple[float | Tensor, Tensor | None, bool] = (0.0, None, False),
    ) -> tuple[Tensor, Tensor]:
        """Send the words of a device; return their sums, and whether ranks are alike, 0-d bool."""
        scales = self._scales or call.scaled
        digest, expected, counted = self._begin(group, call, start, problem)
        square, limit, asks = norm
        words = torch.zeros(_WORDS, dtype=torch.float64, device=group.device)
        words[0].fill_(digest)
        words[1] = square
        if limit is not None:
            words[2].copy_(limit, non_blocking=True)
        if asks:
            words[3].fill_(1.0)
        for place, flag in enumerate(found, _HEAD):
            if isinstance(flag, Tensor):
                words[place].copy_(flag, non_blocking=True)
            elif flag:
                words[place].fill_(1.0)
        for place, absence in enumerate(absences, _HEAD):
            if absence.here:
                words[place].add_(_NO_GRADS)
        try:
            reach(group, _reduce, group.process_group, words)
        except RankMismatchError as lost:
            if problem is None:
                raise
            raise problem.error from lost
        alike = words[0].eq(float(expected))
        if limit is not None:  # of equal float32 a float64 holds the very sum
            alike = alike.logical_and(words[2].eq(limit.float() * group.size))
        for place, absence in enumerate(absences, _HEAD):
            if absence.here:  # else some rank has a gradient, which the host knows
                lacking = words[place].div(_NO_GRADS, rounding_mode="floor")
                absence.late = host.moved(lacking.eq(group.size), group.preferred)

        def read(values: list[float]) -> None:
            if not values[0] or problem is not None or not scales:
                above = "" if limit is None else f"\nskip_norm_above={limit.item()}"
                self._compare(group, call, counted, problem, above, late=True)
            self.clips_agree = self.clips_agree and not values[4]
            for absence, count in zip(absences, values[1 + _HEAD :], strict=False):
                absence.everywhere = count // _NO_GRADS == group.size
                absence.late = None

        self.later(torch.cat((alike.double().view(1), words)), read)
        if not self._scales:  # the first message of a group tells who scales a loss
            self.settle()
        self._scales = True
        return words, alike

    def _compare(
        self,
        group: Group,
        call: Call,
        counted: _Counted,
        problem: Problem | None,
        late_settings: str = "",
        late: bool = False,
    ) -> None:
        """Raise on every rank what any rank's message demands; collective.

        Args:
            group: The group of the message.
            call: The call of this rank.
            counted: The counters and waiting errors in the message.
            problem: The error of this rank.
            late_settings: Settings that lie on a device.
            late: Whether this is read after the call, in which a rank that had not looked at
                gradients has raised its error already.
        """
        mine = {
            "error": None if problem is None else _portable(problem.error),
            "looked": problem is None or problem.looked,
            "alike": call.alike(counted, late_settings),
            "scaled": call.scaled,
            "unsent": counted.unsent,
            "failure": counted.failure,
        }
        everyone = self.gather(mine, group)
        by_rank = list(zip(group.global_ranks, everyone, strict=True))
        self.nobody_looked = not any(theirs["looked"] for theirs in everyone)
        if late and self.nobody_looked:
            return
        _raise_if_diverged(by_rank)
        for rank, theirs in by_rank:
            if theirs["error"] is not None:
                kind, text = theirs["error"]
                if problem is not None:
                    raise problem.error
                raise kind(f"{text} (raised on rank {rank}; every rank stops here)")
        if any(theirs["unsent"] != everyone[0]["unsent"] for theirs in everyone):
            rank, (kind, text) = next((r, t["unsent"]) for r, t in by_rank if t["unsent"])
            raise kind(
                f"{text} (raised on rank {rank} in a call that sends nothing to the other ranks; "
                "every rank stops here, at the next call that does)"
            )
        text = mismatch_text([(rank, theirs["alike"]) for rank, theirs in by_rank])
        if text:
            raise RankMismatchError(text)
        if not any(theirs["scaled"] for theirs in everyone):
            raise CallOrderError(
                f"Attempted {call.name} but _scale is None on every rank.  This may indicate "
                "your script did not use scaler.scale(loss or outputs) earlier in the iteration. "
                "Call scaler.scale(loss).backward() instead of loss.backward()."
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


def _digest_bits(size: int) -> int:
    """Return how many bits a digest has in a group of this size."""
    return min(31, 52 - 2 * size.bit_length())


def _refuse_large(size: int) -> None:
    if size > _MOST_RANKS:
        raise CallOrderError(
            f"A group of {size} ranks is too large, because a message adds up the digests of "
            f"{_MOST_RANKS} ranks at most. Pass a smaller group as process_group=."
        )


def _reduce(group: dist.ProcessGroup, words: Tensor) -> None:
    group.allreduce([words], _SUM).wait()


_KNOWN: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    OSError,
    RuntimeError,
    torch.OutOfMemoryError,
    GradientError,
    ReplicaMismatchError,
    CallOrderError,
    ConfigError,
)


def _portable(error: Exception | None) -> tuple[type[Exception], str] | None:
    """Return an error as another rank can raise it, which may not have its type."""
    if error is None:
        return None
    kind = type(error)
    return (kind, str(error)) if kind in _KNOWN else (RuntimeError, f"{kind.__name__}: {error}")


def _raise_if_diverged(by_rank: Sequence[tuple[int, dict[str, Any]]]) -> None:
    """Raise on every rank if a step raised on some rank, and not alike on all of them."""
    failures = [(rank, theirs["failure"]) for rank, theirs in by_rank]
    if len({failure for _, failure in failures}) == 1:
        return
    lines = lines_by_rank((rank, failure[1]) for rank, failure in failures if failure is not None)
    head = "The replicas have diverged, because a step raised after the ranks had agreed to step:"
    fix = (
        "The other ranks completed this step, so weights and optimizer state now differ between "
        "the ranks. Load a checkpoint on every rank, of the model, the optimizer and any scaler, "
        "or start again."
    )
    raise RankMismatchError("\n".join([head, *lines, fix]))


_CALLS = "the call"
_UPDATES = "the number of update() calls"
_ORDER = "the order of calls"
_OPTIMIZERS = "the optimizers"
_SCALE = "the loss scale"
_CLASS = "the class"
#: The fields that one rank shows if ranks make different calls, whose settings differ anyway.
_FIELDS_OF_CALLS = (_CALLS, _UPDATES, _ORDER, _OPTIMIZERS)


def mismatch_text(compared: Sequence[tuple[int, dict[str, Any]]]) -> str:
    """Return an error message with the fields that differ between ranks, "" if none does.

    Args:
        compared: Pairs of a rank and the result of `Call.alike` on it.
    """
    calls = [call for _, call in compared]
    if all(call == calls[0] for call in calls):
        return ""
    kinds = {tuple(kind for kind, _ in call["optimizers"]) for call in calls}
    steps = sorted({call["steps"] for call in calls})
    fields_of = [
        (rank, _fields_of(call, steps.index(call["steps"]), numbered=len(kinds) == 1))
        for rank, call in compared
    ]
    every_name = dict.fromkeys(name for _, fields in fields_of for name in fields)
    names = [name for name in every_name if len({fields.get(name) for _, fields in fields_of}) > 1]
    if _CALLS in names:
        # A call without optimizers may belong to no guard, which has counters.
        shown = _FIELDS_OF_CALLS if all(call["optimizers"] for call in calls) else (_CALLS,)
        names = [name for name in names if name in shown]
    elif _CLASS in names:
        names = [_CLASS]
    if _UPDATES in names and _ORDER in names:
        names.remove(_ORDER)  # It is counted from the same moment.
    lines = lines_by_rank(
        (rank, ", ".join(fields.get(name, f"no {name}") for name in names))
        for rank, fields in fields_of
    )
    head = f"The ranks differ in {' and '.join(names)}. Nothing was stepped by this call."
    return "\n".join([head, *lines, _fix_of(names)])


def _fields_of(call: dict[str, Any], order: int, numbered: bool) -> dict[str, str]:
    """Return the text of each field that ranks compare, by the name of the field.

    Args:
        call: The result of `Call.alike`.
        order: The index of this rank's order of calls among the different ones.
        numbered: Whether optimizers need their numbers, because their classes are equal.
    """
    optimizers = [
        f"optimizer {place} ({kind})" if numbered else kind for kind, place in call["optimizers"]
    ]
    fields = {
        _CALLS: _call_text(call["call"]),
        _UPDATES: f"update() called {count_text(call['iteration'], 'time')}",
        _ORDER: f"order {chr(ord('A') + order % 26)}",
        _OPTIMIZERS: ", ".join(optimizers) or "no optimizer",
        _SCALE: f"loss scale {call['scale']!r}",
        "growth_tracker=": f"growth_tracker={call['growth_tracker']}",
    }
    name = ""
    for line in call["settings"].split("\n"):
        key, equals, _ = line.partition("=")
        if equals and key.isidentifier():
            name = _CLASS if key == "class" else f"{key}="
            fields[name] = line.removeprefix("class=")
        elif name:  # A value whose text has several lines, such as a matrix.
            fields[name] += f" {line.strip()}"
    return fields


def _call_text(name: str) -> str:
    if name == "step":  # These send the same message.
        return "step(), step_all() or unscale_()"
    return name if name.endswith(")") or " " in name else f"{name}()"


def _fix_of(names: Sequence[str]) -> str:
    """Return sentences on how to make ranks equal in the named fields."""
    if not set(names) & set(_FIELDS_OF_CALLS):
        if names == [_CLASS]:
            return "Use a StepGuard on every rank, or a scaler on every rank."
        fix = "Pass the same value on every rank."
        if _SCALE in names or "growth_tracker=" in names:
            fix += (
                " A scaler gets its scale from init_scale=, update(new_scale) or its loaded state."
            )
        return fix
    fix = (
        "Every rank must make the same calls in the same order, with the same optimizers, "
        "settings and arguments."
    )
    if _ORDER in names:
        fix += (
            " One rank left out a step() after unscale_(), or made it with another optimizer, or "
            "it alone called update(new_scale)."
        )
    if _OPTIMIZERS in names:
        fix += " Optimizers are numbered in the order of their first step."
    if _UPDATES in names:
        fix += (
            " One rank left out an update(), or it alone called load_state_dict(), copy.deepcopy "
            "or pickle, after which the number of update() calls starts at 0 again."
        )
    return fix
