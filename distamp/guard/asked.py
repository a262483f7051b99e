"""What survives a call on a guard or scaler, and what can be asked of it and told it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from distamp.errors import CallOrderError
from distamp.gradients import flag_of
from distamp.groups import GroupLike, check_group
from distamp.guard import overflow
from distamp.guard.optimizer_state import (
    OWN,
    OptimizerState,
    OptimizerStates,
    StepCounts,
    as_tensor,
    merged,
)
from distamp.guard.overflow import NonFiniteReport
from distamp.guard.ranks import Flag, Ranks
from distamp.optimizers import innermost, unwrapped
from distamp.protocols import CommHook, Replay

__all__ = ["Asked", "Guard"]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def checked_hook(state: object) -> CommHook:
    """Return the state of a hook that a scaler can tell of its scale.

    Raises:
        ValueError: The state of torch's PowerSGD.
        TypeError: Something else that is none.
    """
    if type(state).__name__ == "PowerSGDState":
        raise ValueError(
            "PowerSGD cannot be joined with a scaler: its error feedback keeps an inf for ever, "
            "and grows when the loss scale moves; use distamp.comm_hooks.register_comm_hook(model, "
            "'int8'), whose error feedback follows the scale"
        )
    if not isinstance(state, CommHook):
        raise TypeError(
            "attach_comm_hook() takes what distamp.comm_hooks.register_comm_hook returned, not "
            f"{type(state).__name__}"
        )
    return state


class Guard:
    """What survives a call, beside torch's records of the iteration.

    Attributes:
        ranks: Whom to agree with, and how far they have come together.
        limit: The limit on skipped steps in a row.
        names: Of parameters and buffers, for the log and the report.
        optimizers: Those that were seen.
        hooks: Communication hooks that are told of skips.
        kept: torch's records of what was unscaled before an ``update`` and not stepped, where
            another optimizer was: trainers unscale all, then step and update one by one.
        skipped_at: What gradients were divided by in the last step that was skipped, for a report
            after ``update``.
        norm: The norm that was measured last, over one optimizer or several.
        replay: What replays a step that was skipped.
    """

    __slots__ = (
        "hooks",
        "kept",
        "limit",
        "names",
        "norm",
        "optimizers",
        "ranks",
        "replay",
        "skipped_at",
    )

    def __init__(self, ranks: Ranks, limit: int | None) -> None:
        self.ranks = ranks
        self.limit = limit
        self.names: dict[Tensor, str] = {}
        self.optimizers = OptimizerStates()
        self.hooks: list[CommHook] = []
        self.kept: dict[int, dict[str, Any]] = {}
        self.skipped_at: float | None = None
        self.norm: float | Tensor | None = None
        self.replay: Replay | None = None


class Asked:
    """The methods of a guard and a scaler that send nothing, and those that every rank calls."""

    _enabled: bool
    _guard: Guard
    _per_optimizer_states: dict[int, dict[str, Any]]
    #: Whether gradients are divided by a loss scale.
    _divides: bool
    #: The noun for this object in messages.
    _noun: str
    #: What gradients are divided by.
    get_scale: Callable[[], float]

    def __repr__(self) -> str:
        """Return loss scale, ranks and steps as far as the host knows them; sends nothing."""
        name = type(self).__name__
        if not self._enabled:
            return f"<{name}, disabled>"
        text = f"<{name} of {_counted(self._guard.ranks.size, 'rank')}{self._scale_text()}"
        steps = []
        for optimizer, state in self._guard.optimizers.live():
            taken, skipped, _, spikes = state.counts
            spiked = f", {_counted(spikes, 'spike')}" if spikes else ""
            kind = type(optimizer).__name__
            steps.append(f"{kind} {_counted(taken, 'step')} taken, {skipped} skipped{spiked}")
        return text + (": " + " | ".join(steps) if steps else "") + ">"

    def _scale_text(self) -> str:
        """Return the loss scale for `__repr__`, after a space; nothing without one."""
        return ""

    def _divisor(self, call: str, given: Any) -> Tensor:
        """Return what gradients are divided by, 0-d float32, on the device of the flags."""
        raise NotImplementedError

    def _device_of_flags(self) -> torch.device | None:
        """Return the device of the last message's flags; None before the first."""
        scale: Tensor | None = getattr(self, "_scale", None)
        return None if scale is None else scale.device

    def _state(self, given: Any) -> OptimizerState:
        optimizers = self._guard.optimizers
        state = optimizers.find(innermost(given))
        if state is None:
            state = optimizers.add(given)
            self._carry_over_first_gradients(given)
        return state

    def _carry_over_first_gradients(self, optimizer: Any) -> None:
        """Bring the gradients of an optimizer that is seen for the first time to today's scale."""

    def _unguarded(self, given: Any) -> OptimizerState:
        """Return what a disabled scaler knows: of an optimizer without a norm, nothing."""
        return self._guard.optimizers.find(innermost(given)) or OptimizerState(given)

    def _record_of(self, optimizer: Any) -> dict[str, Any] | None:
        """Return torch's record of this iteration, or what is kept of the last; None without."""
        key = id(innermost(optimizer))
        return self._per_optimizer_states.get(key) or self._guard.kept.get(key)

    def register_optimizers(self, *optimizers: torch.optim.Optimizer) -> None:
        """Make optimizers known before their first ``step``.

        A rank that never calls ``scale``, such as a pipeline stage without the loss, carries
        gradients over to a changed scale only for optimizers that it knows. `distamp.initialize`
        and the integrations call this.

        Raises:
            TypeError: Not an optimizer.
        """
        for optimizer in optimizers if self._enabled else ():
            self._state(optimizer)

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer's gradients are unscaled and wait for their ``step``."""
        if not self._enabled:
            return False
        record = self._record_of(optimizer)
        return record is not None and record["stage"] is OptState.UNSCALED

    def step_was_taken(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the most recent ``step(optimizer)`` was taken; may wait for the device.

        Also works after ``update``. Use it to advance a learning-rate schedule or an EMA only on
        steps that were taken. An idle optimizer, of which no rank had a gradient, has not stepped.

        Raises:
            CallOrderError: ``step(optimizer)`` was never called.
        """
        if not self._enabled:
            return not self._unguarded(optimizer).last_step
        skipped, was_idle = self._last_step("step_was_taken", optimizer)
        return not bool(was_idle) and not bool(skipped)

    def taken_flag(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return the value of `step_was_taken` as 0-d bool; never waits.

        Raises:
            CallOrderError: ``step(optimizer)`` was never called.
        """
        if not self._enabled:
            return flag_of(self.step_was_taken(optimizer), "cpu").bool()
        last_step = self._last_step("taken_flag", optimizer)
        device = self._divisor("taken_flag", optimizer).device
        skipped, was_idle = (as_tensor(flag, device) for flag in last_step)
        return skipped.logical_or(was_idle).logical_not()

    def found_inf(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return the flag of the last check, the same on all ranks; never waits.

        Returns:
            0-d float32: 1.0 if a rank found inf or NaN, else 0.0; after ``step``, whether it was
            skipped. An idle optimizer, of which no rank had a gradient, has 0.0.

        Raises:
            CallOrderError: The optimizer was never checked.
        """
        if not self._enabled:
            return flag_of(bool(self._unguarded(optimizer).last_step), "cpu")
        flag, record = self._asked("found_inf", optimizer).last_step, self._record_of(optimizer)
        device = self._divisor("found_inf", optimizer).device
        if record is not None and OWN in record and record["stage"] is not OptState.STEPPED:
            flags = list(record["found_inf_per_device"].values())
            flag = merged(flags, device) if flags else False  # no rank has gradients
        if flag is None:
            raise CallOrderError(
                "found_inf() was called before unscale_() or step() for this optimizer"
            )
        return as_tensor(flag, device)

    def step_counts(self, optimizer: torch.optim.Optimizer) -> StepCounts:
        """Return how many steps of this optimizer were taken and skipped; may wait.

        Raises:
            CallOrderError: The scaler never saw the optimizer.
        """
        if not self._enabled:
            return StepCounts(0, 0, self._unguarded(optimizer).counts[3])
        self._guard.ranks.settle()
        taken, skipped, _, spikes = self._asked("step_counts", optimizer).counts
        return StepCounts(taken, skipped, spikes)

    def grad_norm(self, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
        """Return the norm of the last step that measured one, before clipping; never waits.

        Args:
            optimizer: Of its last ``step(max_norm=)``; None: the last that was measured, which is
                the joint one after ``step_all(max_norm=)`` or ``clip_grad_norm_``.

        Returns:
            0-d float32, the same on all ranks, unscaled.

        Raises:
            CallOrderError: No norm was measured.
        """
        state = None if optimizer is None else self._guard.optimizers.find(innermost(optimizer))
        norm = self._guard.norm if optimizer is None else None
        norm = norm if state is None else state.norm
        if norm is None:
            of = ""
            if optimizer is not None:
                kind = type(unwrapped(optimizer))
                of = f" of this {kind.__name__}"
            raise CallOrderError(
                f"grad_norm() was called before a norm{of} was measured. Pass max_norm= to step(), "
                "or call clip_grad_norm_()."
            )
        if isinstance(norm, float):
            norm = torch.full((), norm, dtype=torch.float32, device="cpu")
        return norm

    def _asked(
        self, question: str, optimizer: Any, before: str = "unscale_() or step()"
    ) -> OptimizerState:
        state = self._guard.optimizers.find(innermost(optimizer))
        if state is None:
            raise _called_too_early(question, optimizer, before)
        return state

    def _last_step(self, question: str, optimizer: Any) -> tuple[Flag, Flag]:
        """Return whether the last step was skipped, and whether the optimizer was idle in it."""
        state = self._asked(question, optimizer, "step()")
        if state.last_step is None:
            raise _called_too_early(question, optimizer, "step()")
        return state.last_step, state.was_idle

    def nonfinite_report(
        self, model: torch.nn.Module | None = None, *, local: bool = False
    ) -> NonFiniteReport:
        """Return the gradients that have inf or NaN, and on which rank.

        Collective: every rank of `process_group` must call this. With ``local=True`` it is not:
        then one rank may call it alone.

        If one rank calls it alone without ``local=True``, every rank raises if the others are in
        another call of this object. After ``update()``, and on a device, the others are in the
        collectives of DDP or FSDP, and wait with this rank for the group's timeout.

        Call it after a skipped step and before ``zero_grad``.

        Args:
            model: Gives names, and includes parameters of no optimizer. Without it, names come
                from ``named_parameters`` or the optimizer, or are group and index.
            local: Report the gradients of this rank alone, and send nothing.

        Raises:
            CallOrderError: No rank has such a gradient, or with ``local=True`` this rank has none.
            RankMismatchError: Another rank makes another call.
        """
        own = self._guard
        if not local:
            own.ranks.announce("nonfinite_report()", device=self._device_of_flags())
        optimizers = [optimizer for optimizer, _ in own.optimizers.live()]
        named = overflow.gradients_by_name(optimizers, own.names, model)
        mine = list(overflow.find_overflows(named, own.ranks.rank))
        gathered = [mine] if local else own.ranks.gather(mine)
        overflows = tuple(each for theirs in gathered for each in theirs)
        if not overflows and local:
            raise CallOrderError(
                f"nonfinite_report(local=True) found no inf or NaN in any gradient of rank "
                f"{own.ranks.rank}. Call nonfinite_report() on every rank to see the gradients of "
                "the other ranks."
            )
        if not overflows:
            raise CallOrderError(
                "nonfinite_report() found no inf or NaN in any gradient of any rank. Call it after "
                "a skipped step and before zero_grad()."
            )
        scale = None if self._per_optimizer_states else own.skipped_at
        scale = self.get_scale() if scale is None else scale
        return NonFiniteReport(scale, overflows, is_scaled=self._divides)

    def attach_replay(self, replay: Replay | None) -> None:
        """Have a skipped step replayed in ``update``, or stop that with None.

        `distamp.report.StepReplay.attach` and ``detach`` call this.

        Args:
            replay: Records a step before it runs, and replays it.

        Raises:
            TypeError: ``replay`` cannot replay a step.
        """
        if replay is not None and not isinstance(replay, Replay):
            raise TypeError(
                f"attach_replay() takes a StepReplay or None, not {type(replay).__name__}. Call "
                "distamp.report.StepReplay(model).attach(guard)."
            )
        self._guard.replay = replay

    def attach_comm_hook(self, hook_state: object) -> None:
        """Tell a communication hook of the loss scale and of skipped steps, for its error feedback.

        Args:
            hook_state: The result of ``distamp.comm_hooks.register_comm_hook``.

        Raises:
            ValueError: It is the state of torch's PowerSGD, which does not survive loss scaling.
            TypeError: It is not the state of a hook.
        """
        hook = checked_hook(hook_state)
        if not any(each is hook for each in self._guard.hooks):
            self._guard.hooks.append(hook)

    def detach_comm_hook(self, hook_state: object) -> None:
        """Undo `attach_comm_hook`, which keeps the hook alive: call this when its model goes.

        Args:
            hook_state: The attached state.

        Raises:
            ValueError: It is not attached.
        """
        hook = checked_hook(hook_state)
        left = [each for each in self._guard.hooks if each is not hook]
        if len(left) == len(self._guard.hooks):
            raise ValueError(
                f"detach() was given a {type(hook_state).__name__} that is not attached; "
                "pass what you passed to attach()"
            )
        self._guard.hooks = left
        hook.iteration_ended()  # it hears of no update any more

    @property
    def process_group(self) -> GroupLike:
        """The group as given; assign to it after unpickling or after a group was made again."""
        return self._guard.ranks.given

    @process_group.setter
    def process_group(self, process_group: GroupLike) -> None:
        check_group(process_group)
        self._guard.ranks.settle()  # what the ranks of the old group differ in is raised by all
        self._guard.ranks = Ranks(process_group, self._noun)


def _called_too_early(question: str, optimizer: Any, before: str) -> CallOrderError:
    kind = type(unwrapped(optimizer)).__name__
    return CallOrderError(
        f"{question}() was called before {before} for this {kind}. Call it after that, and pass "
        "the same optimizer."
    )
