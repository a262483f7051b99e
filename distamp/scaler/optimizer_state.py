"""What a scaler knows of each optimizer: where it is in the iteration, its flag, its counts."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.utils.weak import TensorWeakRef

from distamp import host
from distamp.errors import StageError
from distamp.gradients import merged, refuse_impossible
from distamp.host import HostCopy
from distamp.optimizers import inner_optimizer, parameters_of, unwrapped
from distamp.scaler.leftovers import Leftover
from distamp.scaler.message import Reply
from distamp.scaler.used_gradients import UsedGradients
from distamp.sources import source_of

__all__ = ["OptState", "OptimizerState", "OptimizerStates", "Records", "StepCounts"]


@dataclass(frozen=True)
class StepCounts:
    """How many times ``step()`` let an optimizer step, and how many times it did not."""

    taken: int
    skipped: int


class OptimizerState(dict[str, Any]):
    """One optimizer, as long as it lives.

    A dict with the two keys of torch's record of an iteration: ``"stage"`` is an `OptState`,
    ``"found_inf_per_device"`` maps a device to a 0-d float32 flag that all ranks agree on.

    Attributes:
        optimizer: Returns the optimizer, or None once it is gone.
        index: Its place in the order in which this scaler first saw optimizers.
        fingerprint: What it is made of, as a number; 0 until it is first named in a message.
        identity: The number that names it in messages.
        agreed: Whether the ranks have compared what they call by this number.
        norms: The number of the norm plan that they compared last; 0 if the next clip compares.
        wants_scaler: Whether its ``step`` takes the scaler itself: torch's older protocol.
        in_place: Whether its gradients were unscaled where they lie, in this iteration.
        late: Whether gradients arrived after they had been unscaled.
        closed: Why it is not stepped in this iteration any more.
        refreshed: Parameters that got new gradients after they were stepped.
        shares: The state of another optimizer through which its gradients were unscaled.
        leftovers: Gradients that were made before the scale last changed.
        used: Its gradients when they were last unscaled or stepped.
        looked_at: Whether its gradients were ever looked at.
        made_with: The scale of gradients that were checked and not unscaled.
        flag_agreed: Whether the flag of this iteration is that of all ranks.
        found_inf: The flag of the last check.
        last_step: The flag of the last step.
        steps: How many times it was stepped or skipped.
    """

    def __init__(self, optimizer: Callable[[], Any], index: int) -> None:
        super().__init__(stage=OptState.READY, found_inf_per_device={})
        self.optimizer = optimizer
        self.index = index
        self.fingerprint = 0
        self.identity = 0
        self.agreed = False
        self.norms = 0
        self.wants_scaler = False
        self.in_place = False
        self.late = False
        self.closed: str | None = None
        self.refreshed: list[TensorWeakRef] = []
        self.shares: OptimizerState | None = None
        self.leftovers: list[Leftover] = []
        self.used = UsedGradients()
        self.looked_at = False
        self.made_with: Tensor | None = None
        self.flag_agreed = False
        self.found_inf: Tensor | None = None
        self.last_step: Tensor | None = None
        self.steps = 0
        self._reply: tuple[Reply, int] | None = None
        self._skipped_on_host = 0
        self._skipped_on_device: Tensor | None = None
        self._skips_in_a_row = 0
        self._earlier_flag: HostCopy | None = None

    # -- the iteration ---------------------------------------------------------------------------

    def begin_iteration(self, alone: bool) -> None:
        """Forget what belonged to the iteration that ``update`` ends.

        Args:
            alone: Whether no other optimizer is known.
        """
        if self["stage"] is not OptState.READY:
            self.used.forget()
            if self.used.places and not self.refreshed:
                self.used.note(self._filled(), alone)
            self["stage"] = OptState.READY
        self["found_inf_per_device"] = {}
        self.in_place = self.late = self.flag_agreed = False
        self.closed = self.shares = None
        if self.refreshed:
            self.refreshed = []

    def _filled(self) -> Sequence[Tensor]:
        optimizer = self.optimizer()
        return () if optimizer is None else source_of(optimizer).filled()

    def has_new_gradients(self) -> bool:
        """Return whether there may be gradients that were neither unscaled nor stepped."""
        return self["stage"] is OptState.READY and self.used.may_be_others(self._filled())

    def flag(self) -> Tensor | None:
        """Return the agreed flag as one 0-d tensor, or None before the check."""
        flags = list(self["found_inf_per_device"].values())
        if not flags:
            return None
        only: Tensor = flags[0]
        return only if len(flags) == 1 and only.dim() == 0 else merged(flags, only.device)

    def set_flag(self, flag: Tensor, reply: Reply | None = None, place: int = 0) -> None:
        """Note the flag that all ranks agree on, and where it came from."""
        self["found_inf_per_device"] = {flag.device: flag}
        self.flag_agreed = True
        self.found_inf = flag
        self._reply = None if reply is None else (reply, place)

    def take_over(self, other: OptimizerState) -> None:
        """Share what another optimizer over the same gradients went through in this iteration."""
        self.update(other)
        self.shares = other
        self.closed, self.late, self.in_place = other.closed, other.late, True
        self.flag_agreed = other.flag_agreed
        self.found_inf, self._reply = other.found_inf, other._reply

    def end_step(self) -> None:
        """Note that the step was taken or skipped."""
        self["stage"] = OptState.STEPPED
        if self.shares is not None:
            self.shares["stage"] = OptState.STEPPED

    def close(self, why: str, flag: Tensor) -> None:
        """Skip the optimizer for the rest of the iteration.

        Some ranks have unscaled their gradients when another finds that it cannot: a second try
        would unscale them twice. ``update`` begins anew.
        """
        self["stage"] = OptState.STEPPED
        self.closed = why
        self.set_flag(flag)

    def check_unscale(self) -> None:
        """Refuse ``unscale_`` where it was called already, with torch's own words."""
        if self.closed is not None:
            raise StageError(_CLOSED.format("unscale_", self.closed))
        if self["stage"] is OptState.UNSCALED:
            raise StageError(
                "unscale_() has already been called on this optimizer since the last update()."
                + self._by_way_of()
            )
        if self["stage"] is OptState.STEPPED:
            raise StageError("unscale_() is being called after step()." + self._by_way_of())
        self.late = False  # the caller has set the stage back, as is done to use torch's with SAM

    def check_step(self) -> None:
        """Refuse a second ``step``, and one over gradients that arrived after ``unscale_``."""
        if self.closed is not None:
            raise StageError(_CLOSED.format("step", self.closed))
        if self["stage"] is OptState.STEPPED:
            raise StageError(
                "step() has already been called since the last update()." + self._by_way_of()
            )
        if self.late and self["stage"] is not OptState.READY:
            raise StageError(
                "backward() through a scaled loss added gradients after unscale_(): scaled and "
                "unscaled gradients are now summed. Call unscale_() after the last backward() of "
                "the iteration; nothing was stepped"
            )

    def _by_way_of(self) -> str:
        """Say which other optimizer its gradients went through, if one did."""
        if self.shares is None:
            return ""
        other = type(self.shares.optimizer()).__name__
        return (
            f" Its gradients are those of a {other} with the same parameters: step one of the two"
        )

    # -- what can be asked -----------------------------------------------------------------------

    def overflow_rank(self) -> int | None:
        """Return the lowest rank that overflowed at the last check; None if none did; may wait."""
        if self._reply is not None:
            reply, place = self._reply
            return next(iter(reply.overflowed(place)), None)
        return 0 if self.found_inf is not None and self.found_inf.item() else None

    @property
    def counts(self) -> StepCounts:
        """Steps taken and skipped so far; may wait for the device."""
        skipped = self._skipped_on_host
        if self._skipped_on_device is not None:
            skipped += int(self._skipped_on_device.item())
        return StepCounts(taken=self.steps - skipped, skipped=skipped)

    def count(self, flag: Tensor, *, skipped: bool | None) -> None:
        """Count one call of ``step()``; ``skipped`` is None where the host does not know."""
        self.steps += 1
        self.found_inf = self.last_step = flag
        if skipped is not None:
            self._skipped_on_host += skipped
            return
        if self._skipped_on_device is None:
            self._skipped_on_device = torch.zeros((), dtype=torch.float64, device=flag.device)
        # A model that was moved meanwhile has its flags on another device.
        self._skipped_on_device.add_(host.moved(flag, self._skipped_on_device.device))

    def reaches_skips(self, limit: int, flag: Tensor, *, skipped: bool | None) -> bool:
        """Return whether this step is the ``limit``-th skipped in a row, and begin anew if so.

        Where the flag lies on a device, it is the flag of the step before that counts: its copy has
        arrived by now.
        """
        if skipped is None:
            earlier, self._earlier_flag = self._earlier_flag, HostCopy(flag.view(1))
            if earlier is None:
                return False
            skipped = bool(earlier.values()[0])
        self._skips_in_a_row = self._skips_in_a_row + 1 if skipped else 0
        if self._skips_in_a_row != limit:
            return False
        self._skips_in_a_row = 0
        return True

    # -- what the optimizer takes ------------------------------------------------------------------

    def takes_flags(self, optimizer: Any) -> bool:
        """Return whether the optimizer's own kernel unscales and skips (torch's fused optimizers).

        One that a loaded state has made unfused does not: torch leaves its mark on the optimizer
        and fails in the step. Nor is one asked that steps through another inside.
        """
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            return False
        if self.wants_scaler or inner_optimizer(optimizer) is not None:
            return False
        if not type(optimizer).step.__module__.startswith("torch.optim."):
            return True  # a step of its own, also of a subclass, does what the mark says
        return all(group.get("fused", True) for group in optimizer.param_groups)


_CLOSED = (
    "{}() is called for an optimizer that an error closed for this iteration; call update() and "
    "continue with the next iteration. The error was: {}"
)


def leaves_garbage(optimizer: Any) -> bool:
    """Return whether a step skipped inside the kernel would spoil the optimizer's state.

    torch's fused SGD makes its momentum buffers uninitialised and fills them in the first step; if
    the kernel skips that one, the next takes what lies there for momentum. So until every buffer is
    filled, the flag is read on the host and a skipped step is not called.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    state = optimizer.state
    return not all(
        group["momentum"] == 0 or state.get(p, {}).get("momentum_buffer") is not None
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
    )


class Records(dict[int, OptimizerState]):
    """The states of this iteration by ``id(optimizer)``; torch's ``_per_optimizer_states``.

    Asking for a missing one makes it, as torch's dict does.
    """

    states: OptimizerStates

    def __missing__(self, key: int) -> OptimizerState:
        record = self[key] = self.states.by_id(key)
        return record


class OptimizerStates:
    """The states of the optimizers that a scaler has seen, which are held weakly.

    Attributes:
        known: The states by ``id(optimizer)``, as long as the optimizers live.
        records: Those of this iteration.
        changes: How often an optimizer was first seen or has gone.
    """

    def __init__(self) -> None:
        self.known: dict[int, OptimizerState] = {}
        self.changes = 0
        self._seen = 0
        self.begin_records()

    def begin_records(self) -> None:
        """Begin an iteration in which no optimizer has been seen."""
        self.records = Records()
        self.records.states = self

    def by_id(self, key: int) -> OptimizerState:
        """Return the state at an ``id``, or one for an optimizer that is yet to be seen."""
        state = self.known.get(key)
        return OptimizerState(lambda: None, -1) if state is None else state

    def record(self, optimizer: Any, given: Any = None) -> OptimizerState:
        """Return an optimizer's state, as part of this iteration.

        Args:
            optimizer: What `unwrapped` returned.
            given: What it was wrapped in.

        Raises:
            TypeError: Not an optimizer.
        """
        key = id(optimizer)
        state = self.records.get(key)
        if state is None or state.optimizer() is not optimizer:
            # One that frameworks asked for first; or of a wrapper that is gone and had this id.
            made = state if state is not None and state.index < 0 else None
            state = self.records[key] = self._of(optimizer, key, made)
        if given is not None and given is not optimizer:
            self.records[id(given)] = state
        return state

    def add(self, optimizer: Any) -> None:
        """Make an optimizer known, without a record of this iteration."""
        self._of(optimizer, id(optimizer), None)

    def _of(self, optimizer: Any, key: int, made: OptimizerState | None) -> OptimizerState:
        state = self.known.get(key)
        if state is not None:
            return state
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"expected an optimizer, not {type(optimizer).__name__}; several are given as "
                "unscale_(*optimizers) or step_all(optimizers)"
            )
        refuse_impossible(parameters_of(optimizer))
        state = OptimizerState(lambda: None, self._seen) if made is None else made
        state.index = self._seen
        self._seen += 1
        state.optimizer = _reference(optimizer, _forgets(weakref.ref(self), key))
        state.wants_scaler = (
            getattr(optimizer, "_step_supports_amp_scaling", False)
            and "grad_scaler" in inspect.signature(optimizer.step).parameters
        )
        self.known[key] = state
        self.changes += 1
        return state

    def forget(self, key: int) -> None:
        """Forget an optimizer that is gone; its flag counts until the iteration ends."""
        self.changes += 1
        state = self.known.pop(key, None)
        record = self.records.pop(key, None)
        if state is not None and record is state and state["found_inf_per_device"]:
            self.records[-1 - state.index] = state

    def get(self, optimizer: Any) -> OptimizerState | None:
        """Return the state of an optimizer or of the one inside it; None if never seen."""
        state = self.known.get(id(optimizer))
        return self.known.get(id(unwrapped(optimizer))) if state is None else state

    def asked(
        self, question: str, optimizer: Any, before: str = "unscale_() or step()"
    ) -> OptimizerState:
        """Return the state of an optimizer that somebody asks about.

        Raises:
            StageError: The scaler never saw it.
        """
        state = self.get(optimizer)
        if state is None:
            raise StageError(
                f"{question}() was called before {before} for this "
                f"{type(unwrapped(optimizer)).__name__}"
            )
        return state

    def live(self) -> Iterator[tuple[Any, OptimizerState]]:
        """Yield every optimizer seen that is still alive, in the order of first sight."""
        for state in list(self.known.values()):
            optimizer = state.optimizer()
            if optimizer is not None:
                yield optimizer, state

    def begin_iteration(self, records: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Forget what belonged to the iteration, and take over ``records`` of another's making."""
        alone = len(self.known) < 2
        for state in self.records.values():
            state.begin_iteration(alone)
        self.begin_records()
        for key, record in (records or {}).items():
            self.records[key].update(record)

    def forget_agreements(self) -> None:
        """Compare identities anew at the next message, as after a change of group."""
        for state in self.known.values():
            state.agreed = False
            state.fingerprint = state.identity = state.norms = 0


def _reference(optimizer: Any, forget: Callable[[Any], None]) -> Callable[[], Any]:
    try:
        return weakref.ref(optimizer, forget)
    except TypeError:  # __slots__ without __weakref__: held for as long as the scaler lives
        return lambda: optimizer


def _forgets(states: weakref.ref[OptimizerStates], key: int) -> Callable[[Any], None]:
    def forget(_: Any) -> None:
        if (found := states()) is not None:
            found.forget(key)

    return forget
