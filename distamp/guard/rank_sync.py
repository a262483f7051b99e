"""`RankSync`: one message of fixed length for every collective call, and errors on every rank.

Every message of a group has the same length and layout, for every call. So ranks with different
calls still meet in the same SUM all-reduce. Their digests differ, all ranks gather the calls, and
every rank raises. A digest is a hash of everything that must be equal on all ranks:
the call, its optimizers and arguments, settings, counters, and a failure that a rank has not
reported yet. The ranks agree if the digests sum up to ``size`` times this rank's, modulo a prime
number. A rank that wants all ranks to gather, because of an error or a skip that the user requests,
adds 1 to its digest. Checks of weights and replicas add a summand, too (`StateCheck`).

On the host a message is two float64 words, which hold integers below 2^53 exactly:

====  ==============================================================================================
word  content
====  ==============================================================================================
0     The square of a norm if the call steps by one; NaN if this rank has another reason to skip.
      In any other call 1 if this rank has a reason to skip (inf or NaN in a gradient), else 0. If
      the sum is not finite, or contains such a 1, the ranks gather the reasons.
1     The digest, below a prime number of at most 31 bits, plus a weight if some optimizer of the
      call has no gradient here. The weight is 2 to the number of bits that a sum of digests has.
      If all ranks add the weight, they add up which optimizers have no gradient.
====  ==============================================================================================

With b the number of bits of the group's size, a digest has min(31, 52 - 2b) bits. The sums are
exact up to 131,071 ranks, and larger groups are refused.

On a device a message is 32 float64 words, and the host does not wait for the reply:

======  ============================================================================================
word    content
======  ============================================================================================
0       The digest.
1       The square of a norm, else 0.
2       A limit of the norm that lies on the device, else 0.
3       1 if this rank requests that replicas are compared by their norm.
4       1 if this rank requests a skip by ``skip_if``.
5       The summand of a check that does not stop the step, modulo the same prime number as digests.
6 - 31  For each of 26 optimizers: 1 if this rank overflowed, plus 2^26 if the optimizer has no
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distamp import device_utils
from distamp.clip_grad import nan_if_found_inf
from distamp.error_text import count_text, lines_by_rank
from distamp.errors import (
    CallOrderError,
    ConfigError,
    GradientError,
    NonFiniteWeightsError,
    RankMismatchError,
    ReplicaMismatchError,
)
from distamp.process_group import (
    GroupLike,
    MessageGroup,
    call_collective,
    resolve_process_group,
)

__all__ = [
    "CallFingerprint",
    "Exchange",
    "MissingGrads",
    "RankSync",
    "StateCheck",
    "SyncedFoundInf",
    "digest_modulus",
    "mismatch_text",
]

#: The number of float64 words of a message on a device.
_DEVICE_WORDS = 32
#: Words of a device message that belong to no optimizer.
_HEADER_WORDS = 6
_OPTIMIZERS_PER_MESSAGE = _DEVICE_WORDS - _HEADER_WORDS
#: Added to an optimizer's word on a device by a rank that has no gradient of the optimizer.
_NO_GRADS = float(2**26)
#: The largest prime number below 2 ** bits, for each number of bits that a digest may have.
_LARGEST_PRIMES = {
    31: 2**31 - 1,
    30: 2**30 - 35,
    28: 2**28 - 57,
    26: 2**26 - 5,
    24: 2**24 - 3,
    22: 2**22 - 3,
    20: 2**20 - 3,
    18: 2**18 - 5,
}
#: The largest group for which a digest has enough bits.
_MAX_RANKS = 2**17 - 1
_SUM = dist.AllreduceOptions()
_SUM.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)


class SyncedFoundInf(NamedTuple):
    """The result of all ranks for one optimizer.

    Args:
        found_inf: 0-d float32: whether a rank found inf or NaN. None if the host knows that no
            rank did, and if a norm decides.
        overflow_ranks: The global numbers of the ranks that did. None if the host does not know.
        bad_names: For each such rank the name of its first bad parameter; empty if unknown.
        num_overflow_ranks: The number of such ranks, 0-d on a device; 0 if the ranks are known.
        bad_weights: Pairs of a rank and the name of a weight with inf or NaN, if a rank overflowed
            and the message is on the host.
    """

    found_inf: Tensor | None = None
    overflow_ranks: tuple[int, ...] | None = None
    bad_names: tuple[str, ...] = ()
    num_overflow_ranks: float | Tensor = 0.0
    bad_weights: tuple[tuple[int, str], ...] = ()


class StateCheck(Protocol):
    """A check of weights or replicas without a separate message.

    Each rank adds a summand to the digest of its next message. If the state is as it should be, the
    summands of all ranks add up to 0. Otherwise the digests differ, and the ranks gather evidence.
    """

    @property
    def stops_step(self) -> bool:
        """The reaction of kernels to a finding: true if they skip the step of this message."""

    def addend(self, group: MessageGroup, modulus: int, iteration: int) -> int | Tensor:
        """Return the summand of this rank, and keep its evidence.

        Args:
            group: The group of the message.
            modulus: The summands are added modulo this prime number.
            iteration: The number of updates over the group.

        Returns:
            A number, or 0-d float64 on the group's device: at least 0 and below ``modulus``.
        """

    def evidence(self) -> Any:
        """Return the evidence for the other ranks if digests differ. It must not raise."""

    def raise_findings(self, evidence_by_rank: Sequence[tuple[int, Any]]) -> None:
        """Raise an error on every rank if the evidence of all ranks shows a fault.

        Collective: every rank of the group must call this.
        """

    def clear(self) -> None:
        """Forget the measurements, because the weights were replaced."""


class MissingGrads:
    """Flags for an optimizer without gradients, on this rank and on every rank.

    Attributes:
        on_this_rank: Whether this rank has no gradient of the optimizer.
        on_all_ranks: Whether no rank has one. On a device the host knows this when it has read the
            reply; until then False.
        pending: The same as 0-d bool on the device until the host has read the reply, else None.
    """

    __slots__ = ("on_all_ranks", "on_this_rank", "pending")

    def __init__(self, on_this_rank: bool = False) -> None:
        self.on_this_rank = on_this_rank
        self.on_all_ranks = False
        self.pending: Tensor | None = None


class CallFingerprint(NamedTuple):
    """The call of one rank, which must be equal on all ranks.

    Args:
        name: ``unscale_``, ``step`` and ``step_all`` have one name, because their message is one.
        optimizer_types: Class names of the optimizers.
        optimizer_indices: Numbers of the optimizers, in the order of their first message.
        settings: The settings of the guard or scaler and the arguments of the call, each as a line
            ``name=value``. An argument that was not given has no line.
        initial_scale: Scale and growth tracker as they were last set from outside.
        loss_was_scaled: Whether this rank ever scaled a loss.
    """

    name: str
    optimizer_types: Sequence[str] = ()
    optimizer_indices: tuple[int, ...] = ()
    settings: str = ""
    initial_scale: tuple[float, int] = (0.0, 0)
    loss_was_scaled: bool = True

    def as_dict(self, counters: _Counters, device_settings: str = "") -> dict[str, Any]:
        """Return the values that must be equal on every rank.

        Args:
            counters: The counters of this rank.
            device_settings: Settings that are on a device, as lines ``name=value``.
        """
        optimizers = zip(self.optimizer_types, self.optimizer_indices, strict=True)
        return {
            "call": self.name,
            "iteration": counters.iteration,
            "silent_calls": counters.silent_call_hash,
            "optimizers": list(optimizers),
            "settings": self.settings + device_settings,
            "scale": self.initial_scale[0],
            "growth_tracker": self.initial_scale[1],
        }


class _Counters(NamedTuple):
    """State of `RankSync` that a message compares, as it was when the message was sent.

    Args:
        iteration: The number of updates.
        silent_call_hash: `RankSync.silent_call_hash`.
        unsent_error: An error in a call that sends no message, as class and text.
        failed_step: The number of steps that raised on this rank, and the last of their errors.
    """

    iteration: int
    silent_call_hash: int
    unsent_error: tuple[type[Exception], str] | None
    failed_step: tuple[int, str] | None


class _Digest(NamedTuple):
    """The digest of a message, and the expected sum over all ranks.

    Args:
        value: The digest of this rank; 0-d float64 if a check has measured on a device.
        expected_sum: The sum over all ranks if they are equal, modulo `digest_modulus`.
        late_addend: The summand of checks that do not stop a step on a device.
        counters: The counters in the digest.
    """

    value: int | Tensor
    expected_sum: int
    late_addend: int | Tensor
    counters: _Counters


class Exchange:
    """One message of this rank, which is sent at the end of a ``with`` block.

    Example::

        with Exchange(sync, group, fingerprint) as exchange:
            ...  # Checks of the call, which leave the gradients unchanged.
            exchange.has_read_grads = True
            ...  # Read gradients, and fill in the message.
        exchange.synced  # The result of all ranks.

    If the block raises, the message contains the error instead, and every rank raises it. On a
    device the other ranks read a message at their next call. So a rank that has read gradients in
    the block goes on after it, with every flag set, and raises at its next call, too. A rank that
    has not read gradients raises at once.

    Without other ranks the block sends nothing, and its errors are raised as usual.

    Collective: every rank of the group must use this.

    Args:
        sync: The counters that are compared.
        group: The group, from `RankSync.group`; None for a single rank.
        fingerprint: Takes ``settings`` after the block, and returns the call of this rank.

    Raises:
        RankMismatchError: Ranks differ, or a rank is gone.
        Exception: The error of a rank, on every rank.

    Attributes:
        found_inf: For each optimizer a found-inf flag of this rank, 0-d float32. Empty in a step
            by a norm, where a norm that is not finite stands for the flags.
        settings: Arguments that must be equal on all ranks, each as a line ``name=value``.
        missing_grads: Whether each optimizer has gradients; completed from the reply.
        norm_found_inf: 0-d bool on the norm's device: whether this rank's norm is not finite. A
            message on a device contains the number of such ranks.
        norm_power: The summand of this rank in the power of a norm, if there is a norm: a number on
            the host, else 0-d float64 on the device of the loss scale.
        earlier_found_inf: Flags of an earlier message, which turn the norm into NaN.
        norm_limit: ``skip_norm_above`` if it is on a device.
        requests_replica_check: Whether this rank requests a comparison of replicas on all ranks.
        skip_if: Whether this rank requests a skip of the step: a bool, or a 0-d tensor.
        bad_update: Without other ranks a flag on a device, 0-d float32: whether the last step wrote
            inf or NaN into weights. Then this step is skipped.
        compares_replicas: Whether the ranks compare replicas after this message, unless they have
            found them equal. They read the reply before.
        name_bad_param: Takes the index of an optimizer, and returns the name of its first bad
            parameter. It must not raise, because other ranks wait.
        name_bad_weights: Takes the index of an optimizer, and returns the names of its weights with
            inf or NaN. It must not raise.
        has_read_grads: Whether the block may have changed a gradient. If no rank has, all ranks can
            repeat the call.
        is_sent: Whether the message was sent, or is being sent.
        error: The error that the block raised.
        synced: The result of all ranks for each optimizer.
        total_power: The sum of ``norm_power`` over the ranks; NaN if a rank found inf or NaN.
        skip_requested: Whether a rank requests a skip, from the reply: a bool, or on a device 0-d
            float32.
        ranks_differ: On a device 0-d bool: whether the ranks made different calls, in which case
            every flag is set. None on the host, which raises then.
    """

    def __init__(
        self,
        sync: RankSync,
        group: MessageGroup | None,
        fingerprint: Callable[[str], CallFingerprint],
    ) -> None:
        self._sync = sync
        self.group = group
        self.fingerprint = fingerprint
        self.settings = ""
        self.found_inf: list[Tensor] = []
        self.missing_grads: list[MissingGrads] = []
        self.norm_power: float | Tensor | None = None
        self.norm_found_inf: Tensor | None = None
        self.earlier_found_inf: list[Tensor] = []
        self.norm_limit: Tensor | None = None
        self.requests_replica_check = False
        self.skip_if: bool | Tensor = False
        self.bad_update: Tensor | None = None
        self.compares_replicas = False
        self.name_bad_param: Callable[[int], str] | None = None
        self.name_bad_weights: Callable[[int], list[str]] | None = None
        self.has_read_grads = False
        self.is_sent = False
        self.error: Exception | None = None
        self.synced: list[SyncedFoundInf] = []
        self.total_power: float | Tensor = math.nan
        self.skip_requested: bool | Tensor = False
        self.ranks_differ: Tensor | None = None

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if self.group is None:
            self._finish_alone()
            return False
        if error is not None and not isinstance(error, Exception):
            return False
        self.error, self.is_sent = error, True
        self._sync.send(self, self.group)
        if self.compares_replicas and not self._sync.replicas_match:
            # Ranks that differ raise here, before one of them gathers alone.
            self._sync.flush()
        # The host raises a sent error inside of `send`.
        return error is not None and self.has_read_grads

    def _finish_alone(self) -> None:
        for missing in self.missing_grads:
            missing.on_all_ranks = missing.on_this_rank
        self.skip_requested = self.skip_if
        self.synced = [SyncedFoundInf()] * len(self.missing_grads)
        if self.norm_power is not None:
            self.total_power = self.power_to_send()
        if self.bad_update is None:
            return
        if self.norm_power is not None:
            self.total_power = nan_if_found_inf(self.total_power, [self.bad_update])
        for index, flag in enumerate(self.found_inf):
            found_inf = torch.maximum(flag, self.bad_update)
            self.synced[index] = SyncedFoundInf(found_inf)

    def power_to_send(self) -> float | Tensor:
        """Return the power of the norm, NaN if the gradients had inf or NaN in an earlier call."""
        power = math.nan if self.norm_power is None else self.norm_power
        if not self.earlier_found_inf:
            return power
        return nan_if_found_inf(power, self.earlier_found_inf)

    def local_overflows(self) -> list[bool]:
        """Return for each optimizer whether this rank found inf or NaN, as the host reads it."""
        if self.error is not None:
            return [False] * len(self.missing_grads)
        if self.found_inf:
            return [bool(flag.item()) for flag in self.found_inf]
        is_finite = self.norm_power is None or math.isfinite(self.norm_power)
        return [not is_finite] * len(self.missing_grads)


class RankSync:
    """Messages of a guard or scaler to other ranks, and the counters that they compare.

    Args:
        requested_group: The group as the user passed it. It is resolved at each message, so that a
            group that was destroyed and made again is used.
        owner: The noun of the object that sends, in errors: "guard" or "scaler". None for a call
            without such an object.
        was_pickled: Whether a pickle has left out the group.

    Attributes:
        iteration: The number of updates since the first message over the group, so that a rank
            that joins can follow.
        silent_call_hash: Order-independent checksum of the calls that send no message: a step after
            ``unscale_``, and ``update(new_scale)``. It is part of the digest, so the next message
            shows a rank that left out such a call.
        replicas_compared: The largest number of gradients for which a norm over this group has
            found equal replicas, and the layout functions of that norm. A rank that has more
            gradients, or other layout functions, requests a comparison on all ranks.
        replicas_match: Whether no rank requests a comparison of replicas.
        nobody_read_grads: Whether in the last call that raised on all ranks no rank had read a
            gradient.
        found_inf_on_host: Whether all ranks know of inf or NaN that a rank found in this iteration.
        state_checks: Checks that take part in every message.
    """

    def __init__(
        self,
        requested_group: GroupLike,
        owner: str | None = None,
        was_pickled: bool = False,
    ) -> None:
        self.requested_group = requested_group
        self.owner = owner
        self.was_pickled = was_pickled
        self.iteration = 0
        self.silent_call_hash = 0
        self.replicas_compared: tuple[int, object] = (0, None)
        self.replicas_match = False
        self.nobody_read_grads = False
        self.found_inf_on_host = False
        self.state_checks: Sequence[StateCheck] = ()
        # Whether the ranks have sent each other that one of them scales its loss.
        self._loss_was_scaled = False
        self._unsent_error: tuple[type[Exception], str] | None = None
        self._failed_step: tuple[int, str] | None = None
        # Optimizers that are gone keep their numbers.
        self._optimizer_index: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._next_index = 0
        self._group: MessageGroup | None = None
        self._mesh_group: dist.ProcessGroup | None = None
        # Replies and outcomes of steps that are on their way from a device to the host.
        self._pending_reads: deque[
            tuple[device_utils.AsyncHostCopy, Callable[[list[float]], None]]
        ] = deque()

    def __reduce__(self) -> Any:
        # torch cannot pickle a group. The default group is found again.
        return RankSync, (None, self.owner, self.requested_group is not None)

    def __deepcopy__(self, memo: Any) -> RankSync:
        return RankSync(self.requested_group, self.owner, self.was_pickled)

    # -- the group ---------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank in the default group; 0 without one."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    @property
    def size(self) -> int:
        """The number of ranks; unlike `group` this creates no group."""
        if self.requested_group is not None:
            return self.requested_group.size()
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    def global_ranks(self) -> list[int]:
        """Return the ranks of the group, as numbers of the default group."""
        group = self.process_group
        return [0] if group is None else dist.get_process_group_ranks(group)

    @property
    def is_first_rank(self) -> bool:
        """True on the first rank of the group, which logs for all ranks, and on a single rank."""
        return self._group is None or dist.get_rank(self._group.process_group) == 0

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group as it is now; None without torch.distributed.

        Raises:
            CallOrderError: The group was destroyed.
        """
        if self.was_pickled:
            raise CallOrderError(
                f"The process group of this {self.owner} was left out of a pickle, because torch "
                f"cannot pickle one. Set {self.owner}.process_group to a group (None is the "
                "default group)."
            )
        group = self.requested_group
        if group is not None and isinstance(group, DeviceMesh):
            if self._mesh_group is None:
                self._mesh_group = resolve_process_group(group, self.owner)
            group = self._mesh_group
        return resolve_process_group(group, self.owner)

    def group(self, scale_device: torch.device) -> MessageGroup | None:
        """Return the group of messages for a loss scale on a device; None for a single rank.

        Raises:
            CallOrderError: The group was destroyed.
        """
        process_group = self.process_group
        if process_group is None or process_group.size() == 1:
            return None
        group = self._group
        if group is None or group.process_group is not process_group:
            _check_group_size(process_group.size())
            self._reset_for_new_group()
        elif group.scale_device == scale_device:
            return group
        self._group = MessageGroup(process_group, scale_device, self.owner)
        return self._group

    def _reset_for_new_group(self) -> None:
        self.reset_counters()
        self._loss_was_scaled = self.replicas_match = False
        self.replicas_compared = (0, None)
        self._pending_reads.clear()
        self._optimizer_index.clear()
        self._next_index = 0

    def reset_counters(self) -> None:
        """Count from 0, as over a new group or after a state was loaded; forget failed steps."""
        self.iteration = self.silent_call_hash = 0
        self._unsent_error = self._failed_step = None
        self.found_inf_on_host = False

    def drop_iteration(self) -> None:
        """Forget all counters, errors and late reads of an iteration that every rank gives up."""
        self.reset_counters()
        self._pending_reads.clear()
        for check in self.state_checks:
            check.clear()

    def note_replicas_compared(self, num_grads: int, layout_fns: object) -> None:
        """Store how many gradients had equal replicas, if the comparison found them equal."""
        if self.replicas_match:
            self.replicas_compared = max(num_grads, self.replicas_compared[0]), layout_fns

    def optimizer_index(self, history: object) -> int:
        """Return the number of an optimizer, in the order of the first messages."""
        index = self._optimizer_index.get(history)
        if index is None:
            index = self._optimizer_index[history] = self._next_index
            self._next_index += 1
        return index

    def note_step(self, history: object) -> None:
        """Add a step, taken or skipped, to the checksum of the calls that send no message."""
        if self._group is not None:
            index = self._optimizer_index.get(history, 0)
            self.silent_call_hash += 1 + _crc32(f"step {index}") % 2**16

    # -- reads that wait for a device --------------------------------------------------------------

    def defer(self, values: Tensor, callback: Callable[[list[float]], None]) -> None:
        """Call ``callback`` with values that are on a device, when the host reads them.

        While a CUDA graph is captured this does nothing, because a replay runs no Python.
        """
        if not device_utils.is_capturing():
            self._pending_reads.append((device_utils.AsyncHostCopy(values), callback))

    def flush(self, wait: bool = True) -> None:
        """Read the pending values, and raise the errors that they demand.

        Args:
            wait: Wait for the device. If False, a single rank reads the values that have arrived.
                Several ranks must read together, so they read nothing.
        """
        pending = self._pending_reads
        if pending and device_utils.is_capturing():
            return
        is_alone = self._group is None
        while pending and (wait or (is_alone and pending[0][0].is_ready())):
            copy, callback = pending.popleft()
            callback(copy.tolist())

    def drain(self) -> None:
        """Read the pending values, and drop the errors that they demand.

        A reply from a device may demand that all ranks gather. A rank that dropped such a reply
        unread would leave the other ranks waiting.

        Collective: every rank of `process_group` must call this or `flush`.
        """
        for _ in range(len(self._pending_reads)):
            with suppress(Exception):
                self.flush()

    # -- errors that wait for a message ------------------------------------------------------------

    def send_later(self, error: Exception) -> None:
        """Store an error of a call that sends no message; the next message contains it.

        If every rank has the same error, no rank raises it again.
        """
        if self._group is not None:
            self._unsent_error = _to_portable(error)

    @contextmanager
    def errors_sent_later(self) -> Iterator[None]:
        """Send an error that the block raises with the next message, and raise it here."""
        try:
            yield
        except Exception as error:
            self.send_later(error)
            raise

    def report_failed_step(self, optimizer: str, error: BaseException) -> None:
        """Store that an optimizer's step raised on this rank after the ranks had decided on it.

        From the next message on every rank raises, until a state is loaded. If every rank's step
        failed with the same error, no rank raises.
        """
        if self._group is not None:
            text = str(error)[:300]
            text = f"{optimizer}: {type(error).__name__}{text and ': '}{text}"
            # Counted, because the same error may come again on one rank alone.
            count = 0 if self._failed_step is None else self._failed_step[0]
            self._failed_step = count + 1, text

    # -- messages ----------------------------------------------------------------------------------

    def announce(
        self,
        call: str,
        settings: str = "",
        device: torch.device | None = None,
        error: Exception | None = None,
    ) -> MessageGroup | None:
        """Check that every rank makes this call now, before it starts other collectives.

        Collective: every rank of `process_group` must call this.

        Args:
            call: The call, as the user typed it: "nonfinite_report()".
            settings: Arguments that must be equal on all ranks, each as a line ``name=value``.
            device: The device of the gradients. None: the device of the last message, else the
                host.
            error: The error of this rank, which every rank raises.

        Returns:
            The group, or None for a single rank.

        Raises:
            RankMismatchError: A rank makes another call, or has other settings; or a rank is gone.
            Exception: The error of a rank, on every rank.
        """
        group = self.announcement_group(device)
        if group is None:
            return None
        exchange = Exchange(self, group, lambda settings: CallFingerprint(call, settings=settings))
        exchange.settings = settings
        exchange.error, exchange.has_read_grads = error, True
        self.send_outside_step(exchange, group)
        return group

    def announcement_group(self, device: torch.device | None = None) -> MessageGroup | None:
        """Return the group of a message that belongs to no step; None for a single rank.

        Args:
            device: As in `announce`.
        """
        if device is None:
            device = torch.device("cpu") if self._group is None else self._group.scale_device
        return self.group(device)

    def send_outside_step(self, exchange: Exchange, group: MessageGroup) -> None:
        """Send a message that belongs to no step, and wait for the reply.

        Raises:
            RankMismatchError: Ranks differ, or a rank is gone.
            Exception: The error of a rank, on every rank.
        """
        # Such a message has no scaled loss, so the first step still has to compare that.
        loss_was_scaled, self._loss_was_scaled = self._loss_was_scaled, True
        try:
            self.send(exchange, group)
            self.flush()
        finally:
            self._loss_was_scaled = loss_was_scaled

    def send(self, exchange: Exchange, group: MessageGroup) -> None:
        """Send a message and store the reply in ``exchange``; `Exchange` calls this.

        Raises:
            RankMismatchError: Ranks differ, or a rank is gone.
            Exception: The error of a rank, on every rank.
        """
        self.flush()
        call = exchange.fingerprint(exchange.settings)
        if group.is_on_host:
            self._send_on_host(exchange, group, call)
        else:
            self._send_on_device(exchange, group, call)

    def _pack_digest(
        self,
        group: MessageGroup,
        call: CallFingerprint,
        first_optimizer: int,
        wants_gather: bool,
    ) -> _Digest:
        """Return this rank's digest, and the sum that shows that all ranks are equal.

        Args:
            group: The group of the message.
            call: The call of this rank.
            first_optimizer: The index of the first optimizer in this part of the message.
            wants_gather: Whether this rank makes all ranks gather after the message.
        """
        counters = _Counters(
            self.iteration, self.silent_call_hash, self._unsent_error, self._failed_step
        )
        self._unsent_error = None
        self.nobody_read_grads = False
        error_hash = 0
        if counters.unsent_error is not None or counters.failed_step is not None:
            error_hash = _crc32(repr((counters.unsent_error, counters.failed_step)))
        type_hashes = tuple(map(_crc32, call.optimizer_types))
        loss_was_scaled = call.loss_was_scaled or self._loss_was_scaled
        values = (
            _crc32(call.name),
            counters.iteration,
            counters.silent_call_hash,
            first_optimizer,
            call.optimizer_indices,
            type_hashes,
            call.initial_scale,
            _crc32(call.settings),
            loss_was_scaled,
            error_hash,
        )
        modulus = digest_modulus(group.size)
        own_digest = hash(values) % modulus
        expected_sum = own_digest * group.size % modulus
        digest: int | Tensor = own_digest
        if wants_gather:
            digest += 1
        late_addend: int | Tensor = 0
        if first_optimizer == 0:
            for check in self.state_checks:
                addend = check.addend(group, modulus, self.iteration)
                if group.is_on_host or check.stops_step:
                    digest += addend
                else:
                    late_addend += addend
        return _Digest(digest % modulus, expected_sum, late_addend, counters)

    # -- on the host -------------------------------------------------------------------------------

    def _send_on_host(self, exchange: Exchange, group: MessageGroup, call: CallFingerprint) -> None:
        overflows = exchange.local_overflows()
        if exchange.norm_power is None:
            first_word = float(any(overflows))
        elif True in overflows:
            first_word = math.nan
        else:
            first_word = float(exchange.power_to_send())
        total = self._reduce_on_host(exchange, group, call, first_word)
        if exchange.norm_power is None:
            is_clean = total == 0.0
        else:
            is_clean = math.isfinite(total)
            exchange.total_power = total
            if isinstance(exchange.norm_power, Tensor):
                device = exchange.norm_power.device
                exchange.total_power = torch.full((), total, dtype=torch.float64, device=device)
        if is_clean:
            exchange.synced = [SyncedFoundInf(None, ())] * len(overflows)
            return
        self.found_inf_on_host = True
        exchange.synced = self._gather_overflows(exchange, group, overflows)

    def _reduce_on_host(
        self, exchange: Exchange, group: MessageGroup, call: CallFingerprint, first_word: float
    ) -> float:
        """Send two words; return the sum of the first."""
        loss_was_scaled = self._loss_was_scaled or call.loss_was_scaled
        wants_gather = exchange.error is not None
        if not wants_gather:
            wants_gather = exchange.requests_replica_check or bool(exchange.skip_if)
        digest = self._pack_digest(group, call, 0, wants_gather)
        missing_weight = 1 << (_digest_bits(group.size) + group.size.bit_length())
        second_word = int(digest.value)
        for missing in exchange.missing_grads:
            if missing.on_this_rank:
                second_word += missing_weight
                break
        words = torch.tensor(
            (first_word, float(second_word)), dtype=torch.float64, device=group.device
        )
        self._all_reduce(exchange, group, words)
        total, sum_of_second = words.tolist()
        num_missing, sum_of_digests = divmod(int(sum_of_second), missing_weight)
        is_equal = sum_of_digests % digest_modulus(group.size) == digest.expected_sum
        if not is_equal or exchange.error is not None or not loss_was_scaled:
            gathered = self._raise_mismatch(exchange, group, call, digest.counters)
            for remote in gathered:
                if remote["requests_replica_check"]:
                    self.replicas_match = False
                if remote["skip_if"]:
                    exchange.skip_requested = True
        self._loss_was_scaled = True
        if num_missing == group.size:
            self._find_missing_on_all_ranks(exchange, group)
        return float(total)

    def _find_missing_on_all_ranks(self, exchange: Exchange, group: MessageGroup) -> None:
        """Find the optimizers without gradients on any rank: each rank lacks some gradients."""
        counts = [float(missing.on_this_rank) for missing in exchange.missing_grads]
        if len(counts) > 1:
            words = torch.tensor(counts, dtype=torch.float64, device=group.device)
            call_collective(group, _all_reduce_sum, group.process_group, words)
            counts = [count / group.size for count in words.tolist()]
        for missing, count in zip(exchange.missing_grads, counts, strict=True):
            missing.on_all_ranks = count == 1.0

    def _gather_overflows(
        self, exchange: Exchange, group: MessageGroup, overflows: Sequence[bool]
    ) -> list[SyncedFoundInf]:
        """Return the result for each optimizer, with ranks and their first bad parameters."""
        local: list[tuple[bool, str, list[str]]] = []
        for index, has_overflow in enumerate(overflows):
            name, weights = "", []
            if has_overflow and exchange.name_bad_param is not None:
                name = exchange.name_bad_param(index)
            if exchange.name_bad_weights is not None:
                weights = exchange.name_bad_weights(index)
            local.append((has_overflow, name, weights))
        synced: list[SyncedFoundInf] = []
        gathered = self.all_gather(local, group)
        for by_rank in zip(*gathered, strict=True):
            ranks: list[int] = []
            names: list[str] = []
            bad_weights: list[tuple[int, str]] = []
            for rank, entry in zip(group.global_ranks, by_rank, strict=True):
                has_overflow, name, weights = entry
                for weight in weights:
                    bad_weights.append((rank, weight))
                if has_overflow:
                    ranks.append(rank)
                    names.append(name)
            found_inf = None
            if ranks:
                found_inf = torch.ones((), dtype=torch.float32, device=group.scale_device)
            overflow_ranks = tuple(ranks)
            bad_names = tuple(names)
            weights_by_rank = tuple(bad_weights)
            result = SyncedFoundInf(found_inf, overflow_ranks, bad_names, 0.0, weights_by_rank)
            synced.append(result)
        return synced

    # -- on a device -------------------------------------------------------------------------------

    def _send_on_device(
        self, exchange: Exchange, group: MessageGroup, call: CallFingerprint
    ) -> None:
        synced: list[SyncedFoundInf] = []
        optimizers = len(exchange.missing_grads)
        for start in range(0, max(optimizers, 1), _OPTIMIZERS_PER_MESSAGE):
            words, is_equal = self._reduce_on_device(exchange, group, call, start)
            if start == 0:  # The norm is in the first message.
                power = torch.where(is_equal, words[1], math.nan)
                exchange.total_power = device_utils.to_device(power, group.scale_device)
                if not isinstance(exchange.norm_power, (Tensor, type(None))):
                    exchange.total_power = power.item()
                # Requests in different calls may be about different steps.
                is_requested = words[4].ne(0).logical_and(is_equal).float()
                exchange.skip_requested = device_utils.to_device(is_requested, group.scale_device)
            ranks_differ = device_utils.to_device(is_equal.logical_not(), group.scale_device)
            exchange.ranks_differ = ranks_differ
            count = min(optimizers - start, _OPTIMIZERS_PER_MESSAGE)
            num_ranks = words[_HEADER_WORDS : _HEADER_WORDS + count].remainder(_NO_GRADS)
            num_ranks = device_utils.to_device(num_ranks, group.scale_device)
            found_inf = num_ranks.ne(0).logical_or(ranks_differ).float()
            flags = found_inf.unbind()
            counts = num_ranks.unbind()
            for flag, num_overflow_ranks in zip(flags, counts, strict=True):
                result = SyncedFoundInf(flag, num_overflow_ranks=num_overflow_ranks)
                synced.append(result)
        exchange.synced = synced

    def _reduce_on_device(
        self, exchange: Exchange, group: MessageGroup, call: CallFingerprint, start: int
    ) -> tuple[Tensor, Tensor]:
        """Send the words of a device; return their sums, and whether ranks are equal, 0-d bool.

        Args:
            exchange: The message.
            group: The group.
            call: The call of this rank.
            start: The index of the first optimizer in this part of the message.
        """
        loss_was_scaled = self._loss_was_scaled or call.loss_was_scaled
        has_error = exchange.error is not None
        digest = self._pack_digest(group, call, start, has_error)
        missing_grads = exchange.missing_grads[start : start + _OPTIMIZERS_PER_MESSAGE]
        limit = exchange.norm_limit if start == 0 and exchange.error is None else None
        words = self._pack_device_words(exchange, group, digest, limit, start)
        self._all_reduce(exchange, group, words)
        modulus = digest_modulus(group.size)
        is_equal = words[0].remainder(modulus).eq(digest.expected_sum)
        if limit is not None:
            # The sum of equal float32 values is exact in float64.
            is_equal = is_equal.logical_and(words[2].eq(limit.float() * group.size))
        for word, missing in enumerate(missing_grads, _HEADER_WORDS):
            if missing.on_this_rank:  # Otherwise the host knows that a rank has a gradient.
                count = words[word].div(_NO_GRADS, rounding_mode="floor")
                missing.pending = device_utils.to_device(count.eq(group.size), group.scale_device)

        def read_reply(values: list[float]) -> None:
            if not values[0] or exchange.error is not None or not loss_was_scaled:
                device_settings = "" if limit is None else f"\nskip_norm_above={limit.item()}"
                self._raise_mismatch(
                    exchange, group, call, digest.counters, device_settings, late=True
                )
            is_check_requested = bool(values[4])
            self.replicas_match = self.replicas_match and not is_check_requested
            if values[6] % modulus:
                self._raise_late_findings(group)
            for missing, value in zip(missing_grads, values[1 + _HEADER_WORDS :], strict=False):
                missing.on_all_ranks = value // _NO_GRADS == group.size
                missing.pending = None

        self.defer(torch.cat((is_equal.double().view(1), words)), read_reply)
        if not self._loss_was_scaled:
            # The first message of a group shows whether a rank scales its loss.
            self.flush()
            if not device_utils.is_capturing():
                # No rank raised, so ranks differ at most in who scales a loss. A pipeline stage
                # without the loss scales none, and steps with the others.
                is_equal = torch.ones_like(is_equal)
        self._loss_was_scaled = True
        return words, is_equal

    def _pack_device_words(
        self,
        exchange: Exchange,
        group: MessageGroup,
        digest: _Digest,
        limit: Tensor | None,
        start: int,
    ) -> Tensor:
        words = torch.zeros(_DEVICE_WORDS, dtype=torch.float64, device=group.device)
        words[0] = digest.value
        words[5] = digest.late_addend
        if start == 0 and exchange.norm_power is not None:
            words[1] = exchange.power_to_send()
            if exchange.norm_found_inf is not None and exchange.error is None:
                # A norm sends no flags, so the word of the first optimizer is free.
                words[_HEADER_WORDS].copy_(exchange.norm_found_inf, non_blocking=True)
        if limit is not None:
            words[2].copy_(limit, non_blocking=True)
        if start == 0 and exchange.requests_replica_check and exchange.error is None:
            words[3].fill_(1.0)
        if start == 0 and exchange.error is None:
            if isinstance(exchange.skip_if, Tensor):
                words[4].copy_(exchange.skip_if.ne(0).reshape(()), non_blocking=True)
            elif exchange.skip_if:
                words[4].fill_(1.0)
        end = start + _OPTIMIZERS_PER_MESSAGE
        if exchange.error is None:
            for word, flag in enumerate(exchange.found_inf[start:end], _HEADER_WORDS):
                words[word].copy_(flag, non_blocking=True)
        for word, missing in enumerate(exchange.missing_grads[start:end], _HEADER_WORDS):
            if missing.on_this_rank:
                words[word].add_(_NO_GRADS)
        return words

    # -- errors of all ranks -----------------------------------------------------------------------

    def _all_reduce(self, exchange: Exchange, group: MessageGroup, words: Tensor) -> None:
        try:
            call_collective(group, _all_reduce_sum, group.process_group, words)
        except RankMismatchError as lost_peers:
            if exchange.error is None:
                raise
            # The error of this rank is the reason why the others did not come.
            raise exchange.error from lost_peers

    def _raise_mismatch(
        self,
        exchange: Exchange,
        group: MessageGroup,
        call: CallFingerprint,
        counters: _Counters,
        device_settings: str = "",
        late: bool = False,
    ) -> Sequence[Mapping[str, Any]]:
        """Raise on every rank the error that a rank's message demands, if there is one.

        Collective: every rank of ``group`` must call this.

        Args:
            exchange: The message of this rank.
            group: The group of the message.
            call: The call of this rank.
            counters: The counters and waiting errors in the message.
            device_settings: Settings that are on a device.
            late: Whether this follows the call, in which a rank that had not read gradients has
                raised its error already.

        Returns:
            The gathered entry of each rank.
        """
        error = exchange.error
        local = {
            "error": None if error is None else _to_portable(error),
            "has_read_grads": error is None or exchange.has_read_grads,
            "call": call.as_dict(counters, device_settings),
            "loss_was_scaled": call.loss_was_scaled,
            "unsent_error": counters.unsent_error,
            "failed_step": counters.failed_step,
            "requests_replica_check": error is None and exchange.requests_replica_check,
            "skip_if": error is None and bool(exchange.skip_if),
            "evidence": [check.evidence() for check in self.state_checks],
        }
        gathered = self.all_gather(local, group)
        by_rank = list(zip(group.global_ranks, gathered, strict=True))
        self.nobody_read_grads = not any(remote["has_read_grads"] for remote in gathered)
        if late and self.nobody_read_grads:
            return gathered
        _raise_if_diverged(by_rank)
        for rank, remote in by_rank:
            if remote["error"] is not None:
                if error is not None:
                    raise error
                error_type, text = remote["error"]
                raise error_type(f"{text} (raised on rank {rank}; every rank stops here)")
        _raise_unsent_errors(by_rank)
        text = mismatch_text([(rank, remote["call"]) for rank, remote in by_rank])
        if text:
            raise RankMismatchError(text)
        for index, check in enumerate(self.state_checks):
            evidence = [(rank, remote["evidence"][index]) for rank, remote in by_rank]
            check.raise_findings(evidence)
        if not any(remote["loss_was_scaled"] for remote in gathered):
            raise CallOrderError(
                f"Attempted {call.name} but _scale is None on every rank.  This may indicate "
                "your script did not use scaler.scale(loss or outputs) earlier in the iteration. "
                "Call scaler.scale(loss).backward() instead of loss.backward()."
            )
        return gathered

    def _raise_late_findings(self, group: MessageGroup) -> None:
        """Gather the evidence of checks that did not stop the step, and raise their errors.

        Collective: every rank of ``group`` must call this.
        """
        for check in self.state_checks:
            if not check.stops_step:
                gathered = self.all_gather(check.evidence(), group)
                check.raise_findings(list(zip(group.global_ranks, gathered, strict=True)))

    def all_gather(self, value: Any, group: MessageGroup | None = None) -> list[Any]:
        """Return the ``value`` of every rank, for errors and reports.

        Collective: every rank of `process_group` must call this.
        """
        group = self.group(torch.device("cpu")) if group is None else group
        if group is None:
            return [value]
        values: list[Any] = [None] * group.size
        call_collective(group, dist.all_gather_object, values, value, group.process_group)
        return values


@functools.lru_cache(maxsize=256)
def _crc32(text: str) -> int:
    # Unlike hash(), which differs between processes for text.
    return zlib.crc32(text.encode())


@functools.lru_cache
def _digest_bits(size: int) -> int:
    """Return how many bits a digest has in a group of this size."""
    return min(31, 52 - 2 * size.bit_length())


def digest_modulus(size: int) -> int:
    """Return the prime number below which the digests of a group of this size are.

    With a prime number larger than the group, a single different digest changes the result of the
    comparison on every rank, and also on the rank that sent it.
    """
    return _LARGEST_PRIMES[_digest_bits(size)]


def _check_group_size(size: int) -> None:
    if size > _MAX_RANKS:
        raise CallOrderError(
            f"A group of {size} ranks is too large, because a message adds up the digests of "
            f"{_MAX_RANKS} ranks at most. Pass a smaller group as process_group=."
        )


def _all_reduce_sum(group: dist.ProcessGroup, words: Tensor) -> None:
    group.allreduce([words], _SUM).wait()


_PORTABLE_ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    OSError,
    RuntimeError,
    torch.OutOfMemoryError,
    GradientError,
    ReplicaMismatchError,
    NonFiniteWeightsError,
    CallOrderError,
    ConfigError,
)


def _to_portable(error: Exception) -> tuple[type[Exception], str]:
    """Return class and text of an error as another rank can raise it."""
    error_type = type(error)
    if error_type in _PORTABLE_ERRORS:
        return error_type, str(error)
    return RuntimeError, f"{error_type.__name__}: {error}"


def _raise_if_diverged(by_rank: Sequence[tuple[int, dict[str, Any]]]) -> None:
    """Raise on every rank if a step raised on some rank, and not equally on all ranks."""
    failed_steps = [(rank, remote["failed_step"]) for rank, remote in by_rank]
    if len({failed_step for _, failed_step in failed_steps}) == 1:
        return
    lines = lines_by_rank(
        (rank, failed_step[1]) for rank, failed_step in failed_steps if failed_step is not None
    )
    head = "The replicas have diverged, because a step raised after the ranks had agreed to step:"
    fix = (
        "The other ranks completed this step, so weights and optimizer state now differ between "
        "the ranks. Load a checkpoint on every rank, of the model, the optimizer and any scaler, "
        "or start again."
    )
    raise RankMismatchError("\n".join([head, *lines, fix]))


def _raise_unsent_errors(by_rank: Sequence[tuple[int, dict[str, Any]]]) -> None:
    """Raise on every rank the error of a call that sends no message, unless all ranks had it."""
    errors = [remote["unsent_error"] for _, remote in by_rank]
    if all(error == errors[0] for error in errors):
        return
    for rank, remote in by_rank:
        if remote["unsent_error"] is not None:
            error_type, text = remote["unsent_error"]
            if error_type is NonFiniteWeightsError:  # found after a step, in no call of its own
                raise error_type(text)
            raise error_type(
                f"{text} (raised on rank {rank} in a call that sends nothing to the other ranks; "
                "every rank stops here, at the next call that does)"
            )


_CALLS = "the call"
_UPDATES = "the number of update() calls"
_ORDER = "the order of calls"
_OPTIMIZERS = "the optimizers"
_SCALE = "the loss scale"
_CLASS = "the class"
#: The fields that one rank shows if ranks make different calls, whose settings differ anyway.
_FIELDS_OF_CALLS = (_CALLS, _UPDATES, _ORDER, _OPTIMIZERS)


def mismatch_text(call_by_rank: Sequence[tuple[int, dict[str, Any]]]) -> str:
    """Return an error message with the fields that differ between ranks, "" if none does.

    Args:
        call_by_rank: Pairs of a rank and the result of `CallFingerprint.as_dict` on it.
    """
    calls = [call for _, call in call_by_rank]
    if all(call == calls[0] for call in calls):
        return ""
    optimizer_types: set[tuple[str, ...]] = set()
    for call in calls:
        optimizer_types.add(tuple(name for name, _ in call["optimizers"]))
    is_numbered = len(optimizer_types) == 1
    orders = sorted({call["silent_calls"] for call in calls})
    fields_by_rank: list[tuple[int, dict[str, str]]] = []
    values_by_name: dict[str, set[str | None]] = {}
    for rank, call in call_by_rank:
        fields = _fields_of(call, orders.index(call["silent_calls"]), is_numbered)
        fields_by_rank.append((rank, fields))
        values_by_name.update({name: set() for name in fields if name not in values_by_name})
    for name, values in values_by_name.items():
        values.update(fields.get(name) for _, fields in fields_by_rank)
    names = [name for name, values in values_by_name.items() if len(values) > 1]
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
        for rank, fields in fields_by_rank
    )
    head = f"The ranks differ in {' and '.join(names)}. Nothing was stepped by this call."
    return "\n".join([head, *lines, _fix_of(names)])


def _fields_of(call: dict[str, Any], order: int, is_numbered: bool) -> dict[str, str]:
    """Return the text of each field that ranks compare, by the name of the field.

    Args:
        call: The result of `CallFingerprint.as_dict`.
        order: The index of this rank's order of calls among the different ones.
        is_numbered: Whether optimizers need their numbers, because their classes are equal.
    """
    optimizers: list[str] = []
    for optimizer_type, index in call["optimizers"]:
        numbered = f"optimizer {index} ({optimizer_type})"
        optimizers.append(numbered if is_numbered else optimizer_type)
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
