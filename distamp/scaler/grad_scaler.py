"""DistGradScaler: torch's surface, and the flow of each call."""

from __future__ import annotations

import functools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig

from distamp import clipping, host
from distamp.callers import stacklevel_of_caller
from distamp.errors import GradientError, LossScaleCollapse, StageError
from distamp.gradients import carry_over, flag_of
from distamp.groups import Group, GroupLike, check_group, gather_sums
from distamp.optimizers import find_closure, innermost, unwrapped
from distamp.protocols import CommHook
from distamp.scaler import overflow, settings
from distamp.scaler.checkpoint import Saved, from_torch, read_schedule, read_state, written_schedule
from distamp.scaler.joining import TakeOver
from distamp.scaler.optimizer_state import (
    OWN,
    Agreed,
    OptimizerState,
    OptimizerStates,
    StepCounts,
    as_tensor,
    check_step,
    check_unscale,
    leaves_garbage,
    merged,
    stepping,
    takes_flags,
    takes_scaler,
)
from distamp.scaler.outputs import map_tensors
from distamp.scaler.overflow import OverflowReport
from distamp.scaler.ranks import Call, Flag, Ranks
from distamp.scaler.schedule import MAX_SCALE, MIN_SCALE, ScaleState, Schedule
from distamp.scaler.settings import Settings
from distamp.sources import source_of

__all__ = ["DistGradScaler"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_S = TypeVar("_S", bound="DistGradScaler")

_is_compiling = torch.compiler.is_dynamo_compiling
_HOST = torch.device("cpu")
_item = Tensor.item

#: An optimizer, and torch's record of it.
_Given: TypeAlias = "tuple[Any, dict[str, Any]]"


def _outside_the_graph(
    method: Callable[Concatenate[_S, _P], _T],
) -> Callable[Concatenate[_S, _P], _T]:
    """Let a method run between two graphs of torch.compile, which would drop its hooks."""

    @functools.wraps(method)
    def call(self: _S, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if _is_compiling():
            outside: Callable[..., _T] = torch._compile._disable_dynamo(method)
            return outside(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return cast("Callable[Concatenate[_S, _P], _T]", call)


def _of_the_schedule(name: str) -> Any:
    """Return a property under torch's private name, which torch's own getters and setters use."""

    def change(self: DistGradScaler, value: float) -> None:
        own = self._distamp
        schedule = own.settings.schedule.replaced(**{name: value})
        own.settings = replace(own.settings, schedule=schedule)

    return property(lambda self: getattr(self._distamp.settings.schedule, name), change)


class _Own:
    """What survives a call on a scaler, beside torch's own attributes."""

    __slots__ = (
        "begun",
        "clips_agree",
        "hooks",
        "hysteresis",
        "kept",
        "names",
        "optimizers",
        "ranks",
        "scaled",
        "settings",
        "skipped_at",
    )

    def __init__(self, given: Settings, begun: tuple[float, int], ranks: Ranks) -> None:
        self.settings = given
        # Of parameters and buffers, for the log and the report.
        self.names: MutableMapping[Tensor, str] = {}
        # Scale and growth tracker as last set from outside; what follows, all ranks do alike.
        self.begun = begun
        self.ranks = ranks
        # The credit of a schedule that forgives overflows; a tensor from the first update on.
        self.hysteresis: int | Tensor = given.schedule.initial_hysteresis
        # Whether a loss was ever scaled here: ranks tell each other.
        self.scaled = False
        # torch's records of what was unscaled before an update() and not stepped, where another
        # optimizer was: trainers unscale all, then step and update one by one.
        self.kept: dict[int, dict[str, Any]] = {}
        # The scale of the last step that was skipped, for a report after update().
        self.skipped_at: float | None = None
        self.optimizers = OptimizerStates()
        self.hooks: list[CommHook] = []
        # Whether a clip has found replicas alike: what differs later is told as a warning.
        self.clips_agree = False


class DistGradScaler(torch.amp.GradScaler, Joinable):
    """A ``torch.amp.GradScaler`` whose ranks always take, or skip, a step together.

    Differs from ``torch.amp.GradScaler`` in that found-inf is reduced over ``process_group``, in
    one message for each ``unscale_`` or ``step``, for plain, fused, sharded and empty gradients.
    Differs from ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`` in that it does so
    for every optimizer and layout, and in the order of ``growth_factor`` and ``backoff_factor``.
    The scale always stays within ``[min_scale, max_scale]``. When it changes, gradients that no
    call looked at in this iteration are multiplied by new / old, so they are divided by what they
    were made with; those that were looked at are yours, and stay as they are.

    Args:
        device: Device type of the loss scale, such as ``"cuda"``. None: the accelerator if there is
            one, else ``"cpu"``. If it is not available, the scaler warns and is disabled.
        init_scale: The first loss scale.
        growth_factor: Multiplies the scale after ``growth_interval`` clean iterations; > 1.
        backoff_factor: Multiplies the scale after an overflow; between 0 and 1.
        growth_interval: Clean iterations in a row before the scale grows.
        enabled: If False, ``step`` only calls ``optimizer.step()``, and the other methods do
            nothing. It must be the same on all ranks of a group.
        process_group: The ranks that have a part of the model: a ProcessGroup, a DeviceMesh (all
            its dimensions as one group), or None for the default group if torch.distributed is
            initialised, else for this process only. Resolved at each message, not here.
        min_scale: The scale never falls below this.
        max_scale: The scale never rises above this.
        schedule: The rule that changes the scale, instead of the five settings above. See
            `distamp.scaler.schedule`.
        fp16_grads: What to do with float16 gradients. ``"error"`` raises exactly where torch
            raises. ``"inplace"`` unscales them in place, as ShardedGradScaler does; values below
            6e-8 times the scale become zero. ``"master"`` unscales them in float32, into the
            optimizer's `MasterParameters`.
        max_consecutive_skips: Raise `LossScaleCollapse` at this many skipped steps of one optimizer
            in a row.
        named_parameters: ``model.named_parameters()``, for names in `overflow_report` and in the
            log of skipped steps; add ``model.named_buffers()``, and that log names those which are
            not finite.

    Raises:
        SettingError: A setting is outside its range (a ValueError, and an AssertionError as in
            torch).
        TypeError: ``device`` or ``process_group`` has another type.

    Example::

        scaler = DistGradScaler("cuda")
        for inputs, targets in batches:
            optimizer.zero_grad()
            with distamp.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    On rank 0, the logger ``distamp.scaler`` reports at INFO which steps were skipped and why.

    Source: torch.amp's documentation; Micikevicius et al., "Mixed Precision Training", 2018.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        process_group: GroupLike = None,
        min_scale: float = MIN_SCALE,
        max_scale: float = MAX_SCALE,
        schedule: Schedule | None = None,
        fp16_grads: Literal["error", "inplace", "master"] = "error",
        max_consecutive_skips: int | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        # torch's __init__ is not called: it warns about CUDA and asserts on what is checked here.
        Joinable.__init__(self)
        self._device, available = settings.resolve_device(device)
        self._enabled = bool(enabled) and available
        if enabled and not available:
            warnings.warn(
                f"DistGradScaler is enabled, but {self._device} is not available.  Disabling.",
                stacklevel=stacklevel_of_caller(),
            )
        rule = settings.schedule_of(
            growth_factor, backoff_factor, growth_interval, min_scale, max_scale, schedule
        )
        names = settings.names_of(named_parameters)
        given = Settings(rule, fp16_grads, max_consecutive_skips)
        check_group(process_group)
        self._start(given, rule.checked_scale(init_scale), 0, Ranks(process_group))
        self._distamp.names = names

    def _start(self, given: Settings, scale: float, tracker: int, ranks: Ranks) -> None:
        self._init_scale, self._init_growth_tracker = scale, tracker
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._distamp = _Own(given, (scale, tracker), ranks)

    # -- scale -----------------------------------------------------------------------------------

    @_outside_the_graph
    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or every tensor of a nested structure, by the loss scale.

        Like ``torch.amp.GradScaler.scale``, which accepts lists, tuples and iterables. Also accepts
        namedtuples and mappings, and keeps their type. Returns float32 for float16 outputs.

        Args:
            outputs: A Tensor or an iterable, mapping or nesting of Tensors, of any shape.

        Raises:
            ValueError: Something in ``outputs`` is not a Tensor.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return self._scaled(outputs)
        return map_tensors(outputs, self._scaled)

    def _scaled(self, output: Tensor) -> Tensor:
        own, scale = self._distamp, self._scale
        if scale is None:
            self._lazy_init_scale_growth_tracker(output.device)
            scale, _ = self._check_scale_growth_tracker("scale")
        own.scaled = True
        own.kept.clear()
        for hook in own.hooks:
            hook.scale_changed(scale)
        if output.dtype is torch.float16:
            output = output.float()  # which 65536 would overflow
        if scale.device != output.device:
            scale = host.moved(scale, output.device)
        return output * scale

    # -- unscale ---------------------------------------------------------------------------------

    @_outside_the_graph
    def unscale_(
        self,
        *optimizers: torch.optim.Optimizer,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Divide the optimizers' gradients by the loss scale and agree on found-inf.

        Like ``torch.amp.GradScaler.unscale_``, for any number of optimizers with one message. It is
        the message that ``step`` would send. So one rank may call it for one optimizer, to log
        a gradient, if it issues no other collective before its ``step``.

        Args:
            optimizers: Those whose gradients you want to clip or read before ``step``.
            optimizer: One more, by torch's name.

        Raises:
            StageError: Called twice for an optimizer, or after its ``step``.
            ValueError: float16 gradients under ``fp16_grads="error"``.
            GradientError: A gradient cannot be read.
            LockstepError: Ranks differ in call, optimizers, scale or settings.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        given = optimizers if optimizer is None else (*optimizers, optimizer)
        if not given:
            raise TypeError("unscale_() needs at least one optimizer")
        records = [self._record(each) for each in given]
        for record in records:
            check_unscale(record)
        pairs = list(zip(given, records, strict=True))
        self._look("step", scale, pairs, [False] * len(pairs))

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        record = self._record(optimizer)
        self._look("step", scale, [(optimizer, record)], [True])
        found: dict[Any, Tensor] = record["found_inf_per_device"]
        return found

    def _record(self, given: Any) -> dict[str, Any]:
        """Return torch's record of this iteration, one for a wrapper and what it wraps."""
        optimizer, records = innermost(given), self._per_optimizer_states
        record = records[id(optimizer)]
        if given is not optimizer:
            records[id(given)] = record
        return record

    def _record_to_step(self, given: Any) -> dict[str, Any]:
        """Return the record that ``step`` goes by: of this iteration, or kept of the last."""
        kept = self._distamp.kept
        if kept and (key := id(innermost(given))) in kept:
            self._per_optimizer_states[key] = kept.pop(key)
        record = self._record(given)
        check_step(record)
        return record

    def _state(self, given: Any) -> OptimizerState:
        optimizers = self._distamp.optimizers
        return optimizers.find(given) or optimizers.add(given)

    def _look(
        self,
        name: str,
        scale: Tensor,
        given: Sequence[_Given],
        only_check: Sequence[bool],
        *,
        error: Exception | None = None,
        arguments: str = "",
        then: Callable[[], None] | None = None,
    ) -> Flag:
        """Look at the gradients of optimizers on this rank; all ranks agree on the flags.

        Args:
            name: What ranks compare of the call.
            scale: The loss scale.
            given: Its optimizers, with torch's records of them.
            only_check: Of each, whether its own kernel unscales.
            error: What is wrong with the call itself; every rank raises it.
            arguments: What else ranks compare.
            then: What else is done on this rank before they agree.

        Returns:
            Whether ranks differ, where the host does not know yet; else False, for that raises.
        """
        group = self._group(scale.device)
        states: list[OptimizerState] = []
        try:
            # First, so that ranks count them alike where one of them cannot look.
            states = [self._state(optimizer) for optimizer, _ in given]
            if error is not None:
                raise error
            if len(given) > 1 and len({id(record) for _, record in given}) < len(given):
                raise StageError("one optimizer was given twice; each is stepped once")
            for (optimizer, record), state, only in zip(given, states, only_check, strict=True):
                self._look_at(optimizer, record, state, scale, only)
            if then is not None:
                then()
        except Exception as raised:
            if group is None:
                raise
            error = raised
        if group is None:
            return False
        return self._agree(group, name, scale, given, states, error, arguments)

    def _look_at(
        self,
        given: Any,
        record: dict[str, Any],
        state: OptimizerState,
        scale: Tensor,
        only_check: bool,
    ) -> None:
        """Write down what torch's own name for it finds in one optimizer's gradients."""
        own = self._distamp
        if own.kept:
            own.kept.pop(id(innermost(given)), None)
        found_inf = flag_of(False, scale.device)
        factor = flag_of(True, scale.device) if only_check else _inverse(scale)
        allow_fp16 = only_check or own.settings.fp16_grads == "inplace"
        flags = self._unscale_grads_(given, factor, found_inf, allow_fp16)
        record["found_inf_per_device"] = flags or {scale.device: found_inf}
        record[OWN] = Agreed(state)
        if not only_check:
            record["stage"] = OptState.UNSCALED

    def _only_checks(self, optimizer: Any) -> bool:
        """Return whether the optimizer's own kernel unscales, or it does so by the scaler."""
        return takes_flags(optimizer) and not source_of(optimizer).casts

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        source = source_of(optimizer)
        self._distamp.settings.check_masters(optimizer, source)
        return source.unscale(inv_scale, found_inf, allow_fp16)

    def _agree(
        self,
        group: Group,
        name: str,
        scale: Tensor,
        given: Sequence[_Given],
        states: Sequence[OptimizerState],
        error: Exception | None = None,
        arguments: str = "",
    ) -> Flag:
        """Replace this rank's flags by what all ranks agree on, in one message; see `_look`."""
        own, records = self._distamp, [record for _, record in given]
        try:
            flags: list[Flag] = [False] * len(given)
            if error is None:
                flags = [
                    merged([*r["found_inf_per_device"].values()], scale.device) for r in records
                ]
            if not own.ranks.iteration:
                # Over a new group, or with a loaded state: the ranks compare how things stand.
                own.begun = (scale.item(), self._get_growth_tracker())
            call = Call(
                name,
                [type(unwrapped(optimizer)).__name__ for optimizer, _ in given[: len(states)]],
                tuple(map(own.ranks.place, states)),
                own.settings.text + arguments,
                own.begun,
                own.scaled,
            )
            # One more, which no rank sets: on a device it is set where ranks differ.
            *agreed, differ = own.ranks.agree(group, call, [*flags, False], error)
        except Exception:
            # Some ranks have unscaled their gradients when another finds that it cannot: a second
            # try would unscale them twice. So this iteration has no step of theirs.
            for record in records:
                record["stage"] = OptState.STEPPED
                record["found_inf_per_device"] = {scale.device: flag_of(True, scale.device)}
            raise
        for record, state, found in zip_longest(records, states, agreed):
            tensor = as_tensor(found.flag, scale.device)
            record["found_inf_per_device"] = {tensor.device: tensor}
            record[OWN] = Agreed(state, found.ranks)
            if error is not None:  # which is raised with the others', later
                record["stage"] = OptState.UNSCALED
        return differ.flag

    # -- step ------------------------------------------------------------------------------------

    @_outside_the_graph
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer if no rank found inf or NaN, else skip on every rank.

        Like ``torch.amp.GradScaler.step``; sends the message if ``unscale_`` has not.

        Args:
            optimizer: The optimizer whose parameters to update.
            args: Passed to ``optimizer.step``; no closure, as in torch.
            kwargs: Passed to ``optimizer.step``; no closure, as in torch.

        Returns:
            The result of ``optimizer.step``; None for a skipped step.

        Raises:
            StageError: A second ``step`` before ``update``, or a closure.
            LossScaleCollapse: ``max_consecutive_skips`` was reached.
            ValueError, GradientError, LockstepError: As for `unscale_`.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        scale, _ = self._check_scale_growth_tracker("step")
        record = self._record_to_step(optimizer)
        is_ready = record["stage"] is OptState.READY
        if (args or kwargs) and find_closure(args, kwargs) is not None:
            error = StageError(
                "Closure use is not currently supported if GradScaler is enabled, as in torch: "
                "take steps with a closure in float32 or bfloat16, without a scaler"
            )
            if is_ready:
                self._look("step", scale, [(optimizer, record)], [True], error=error)
            raise error
        if is_ready:
            if self._only_checks(optimizer):
                self._check_inf_per_device(optimizer)
            else:
                self.unscale_(optimizer)
        return self._apply(optimizer, record, scale, args, kwargs)

    @_outside_the_graph
    def step_all(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[Any]:
        """Step several optimizers with one message for all of them.

        Each optimizer is stepped or skipped by its own gradients.

        Returns:
            The result of each ``optimizer.step()``; None for a skipped step.
        """
        optimizers = list(optimizers)
        if not self._enabled:
            return [optimizer.step() for optimizer in optimizers]
        scale, _ = self._check_scale_growth_tracker("step")
        records = [self._record_to_step(optimizer) for optimizer in optimizers]
        pairs = list(zip(optimizers, records, strict=True))
        ready = [pair for pair in pairs if pair[1]["stage"] is OptState.READY]
        if ready:
            self._look("step", scale, ready, [self._only_checks(each) for each, _ in ready])
        return [self._apply(optimizer, record, scale, (), {}) for optimizer, record in pairs]

    def _apply(
        self,
        optimizer: Any,
        record: dict[str, Any],
        scale: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step by the flag, or skip."""
        own = self._distamp
        flags: list[Tensor] = list(record["found_inf_per_device"].values())
        if not flags:
            raise StageError("No inf checks were recorded for this optimizer.")
        if OWN not in record:  # an override, or a framework itself, wrote the flags down
            record[OWN] = Agreed(state := self._state(optimizer))
            if (group := self._group(scale.device)) is not None:
                self._agree(group, "step", scale, [(optimizer, record)], [state])
                flags = list(record["found_inf_per_device"].values())
        agreed: Agreed = record[OWN]
        state = agreed.state or self._state(optimizer)
        own.ranks.count_step(state)
        flag: Flag
        if fused := takes_flags(optimizer):
            flag = merged(flags, scale.device)
            own.ranks.settle(wait=False)
        else:
            own.ranks.settle_with_others()  # so that they learn first what they differ in
            flag = any(map(_item, flags))
            if not scale.is_cpu:
                # torch's own _maybe_opt_step reads it again.
                record["found_inf_per_device"] = {_HOST: flag_of(flag, _HOST)}
        if not fused:
            result = self._maybe_opt_step(optimizer, record, *args, **kwargs)
        elif takes_scaler(cast("Any", type(stepping(optimizer)))):
            result = self._step_with_scaler(optimizer, flag, args, kwargs)
        else:
            result = self._step_with_flags(optimizer, record, flag, args, kwargs)
        record["stage"] = OptState.STEPPED
        state.last_step = flag
        if own.hooks:
            self._tell_hooks(optimizer, flag)
        if isinstance(flag, Tensor):
            values = torch.stack((flag, scale))
            own.ranks.later(values, lambda v: self._count(optimizer, state, bool(v[0]), v[1], None))
        else:
            self._count(optimizer, state, flag, scale, agreed.ranks)
        return result

    def _step_with_scaler(
        self, optimizer: Any, flag: Flag, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Step by torch's older protocol, whose optimizers unscale and skip with the scaler.

        torch calls them always, and so does a process alone. Where ranks agree, an overflow of
        another rank is not seen by an optimizer that looks at its own gradients.
        """
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument to the passed "
            "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
            "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
            FutureWarning,
            stacklevel=stacklevel_of_caller(),
        )
        if self._distamp.ranks.group(_HOST) is not None and bool(flag):
            return None
        return optimizer.step(*args, **{**kwargs, "grad_scaler": self})

    def _step_with_flags(
        self,
        optimizer: Any,
        record: dict[str, Any],
        flag: Flag,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step by torch's protocol: the kernel divides by the scale, or does nothing."""
        optimizer = stepping(optimizer)
        scale, _ = self._check_scale_growth_tracker("step")
        if isinstance(flag, Tensor):
            # torch's fused optimizers copy flag and scale to where parameters are, and do not wait.
            stepped = source_of(optimizer).stepped()
            on_host = any(host.is_host(tensor.device) for _, tensor in stepped)
            if on_host or leaves_garbage(unwrapped(optimizer)):
                self._distamp.ranks.settle()
                flag = bool(flag)
            scale = host.moved(scale, _HOST) if on_host else scale
        if flag is True and type(optimizer).__module__.startswith("torch.optim."):
            return None  # its kernel would do nothing, or leave garbage
        grad_scale = getattr(optimizer, "grad_scale", None)
        if record["stage"] is not OptState.UNSCALED:
            grad_scale = scale if grad_scale is None else scale * grad_scale
        try:
            optimizer.grad_scale, optimizer.found_inf = grad_scale, as_tensor(flag, scale.device)
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale
            del optimizer.found_inf

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if any(map(_item, optimizer_state["found_inf_per_device"].values())):
            return None
        return optimizer.step(*args, **kwargs)

    # -- what a step leaves ------------------------------------------------------------------------

    def _tell_hooks(self, optimizer: Any, flag: Flag) -> None:
        source = source_of(optimizer)
        parameters = [*source.parameters(), *(stepped for _, stepped in source.stepped())]
        for hook in self._distamp.hooks:
            hook.step_ended(parameters, as_tensor(flag, _HOST))

    def _count(
        self,
        given: Any,
        state: OptimizerState,
        skipped: bool,
        scale: float | Tensor,
        ranks: tuple[int, ...] | None,
    ) -> None:
        """Count a step that the host knows of."""
        taken, before, in_a_row = state.counts
        if not skipped:
            state.counts = (taken + 1, before, 0)
            return
        own, limit = self._distamp, self._distamp.settings.max_consecutive_skips
        own.skipped_at = float(scale)
        state.counts = (taken, before + 1, in_a_row + 1)
        if own.ranks.rank == 0:
            # Where the scale still is a tensor, the gradients still are as they were.
            as_it_was = isinstance(scale, Tensor)
            at = own.skipped_at
            overflow.log_skip(unwrapped(given), taken + before + 1, at, ranks, own.names, as_it_was)
        if limit is not None and in_a_row + 1 == limit:
            state.counts = (taken, before + 1, 0)
            raise LossScaleCollapse(
                f"{limit} steps in a row were skipped, the last at loss scale {own.skipped_at:g}. "
                "Which gradients, and on which rank: catch this, and before zero_grad() call "
                "overflow_report() on every rank"
            )

    # -- update ----------------------------------------------------------------------------------

    @_outside_the_graph
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale by the schedule, or set it, and begin the next iteration.

        Like ``torch.amp.GradScaler.update``, but the scale stays within its bounds, and gradients
        that no call looked at in this iteration are multiplied by new / old.

        Args:
            new_scale: The new scale: a float, an int, or a tensor of one element.

        Raises:
            StageError: No optimizer was checked since the last ``update``.
            SettingError: ``new_scale`` is outside ``[min_scale, max_scale]`` or not one number.
        """
        if not self._enabled:
            return
        own, records = self._distamp, self._per_optimizer_states
        scale, tracker = self._check_scale_growth_tracker("update")
        on_host = scale.is_cpu
        before: float | Tensor = scale.item() if on_host else scale.clone()
        if new_scale is None:
            flags = [f for r in records.values() for f in r["found_inf_per_device"].values()]
            if not flags:
                raise StageError("No inf checks were recorded prior to update.")
            found_inf = flags[0]
            if len(flags) > 1 or found_inf.device != scale.device:
                found_inf = torch.stack([host.moved(flag, scale.device) for flag in flags]).amax()
            if not isinstance(own.hysteresis, Tensor):
                own.hysteresis = torch.full_like(tracker, own.hysteresis)
            own.settings.schedule.advance_(ScaleState(scale, tracker, own.hysteresis), found_inf)
        else:
            value = own.settings.schedule.checked_scale(settings.one_number(new_scale), "new_scale")
            scale.fill_(value)
            own.begun = (value, own.begun[1])
            own.ranks.steps += 1
        if not on_host or scale.item() != before:
            self._carry_over(scale, before)
        stages = {key: record["stage"] for key, record in records.items()}
        if OptState.STEPPED not in stages.values():
            own.kept.clear()
        elif OptState.UNSCALED in stages.values():
            own.kept |= {k: r for k, r in records.items() if stages[k] is OptState.UNSCALED}
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        own.ranks.iteration += 1
        for hook in own.hooks:
            hook.iteration_ended()

    def _carry_over(self, scale: Tensor, before: float | Tensor) -> None:
        """Multiply what no call looked at in this iteration by what the scale was multiplied by."""
        known = [optimizer for optimizer, _ in self._distamp.optimizers.live()]
        waiting = [optimizer for optimizer in known if not self._was_looked_at(optimizer)]
        if waiting:
            looked_at = [o for o in known if self._was_looked_at(o)]
            theirs = {id(p) for o in looked_at for p in source_of(o).parameters()}
            parameters = (p for o in waiting for p in source_of(o).parameters())
            carry_over((p for p in parameters if id(p) not in theirs), scale / before)

    def _was_looked_at(self, optimizer: Any) -> bool:
        key = id(innermost(optimizer))
        record = self._per_optimizer_states.get(key) or self._distamp.kept.get(key)
        return record is not None and bool(record["found_inf_per_device"])

    # -- asking ----------------------------------------------------------------------------------

    def add_optimizer(self, *optimizers: torch.optim.Optimizer) -> None:
        """Make optimizers known before their first ``step``.

        Gradients of an optimizer that is known are carried over when the scale changes before its
        first step. `distamp.initialize` and the integrations do this.

        Raises:
            TypeError: Not an optimizer.
        """
        for optimizer in optimizers if self._enabled else ():
            self._state(optimizer)

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer's gradients are unscaled and wait for their ``step``."""
        if not self._enabled:
            return False
        key = id(innermost(optimizer))
        record = self._per_optimizer_states.get(key) or self._distamp.kept.get(key)
        return record is not None and record["stage"] is OptState.UNSCALED

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the most recent ``step(optimizer)`` was taken; may wait for the device.

        Also works after ``update``. Use it to advance a learning-rate schedule or an EMA only on
        steps that were taken.

        Raises:
            StageError: ``step(optimizer)`` was never called.
        """
        if not self._enabled:
            return True
        last = self._asked("stepped", optimizer, "step()").last_step
        if last is None:
            raise StageError("stepped() was called before step() for this optimizer")
        return not bool(last)

    def found_inf(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return the flag of the last check, the same on all ranks; never waits.

        Returns:
            0-d float32: 1.0 if a rank found inf or NaN, else 0.0.

        Raises:
            StageError: The optimizer was never checked.
        """
        if not self._enabled:
            return flag_of(False, "cpu")
        state = self._asked("found_inf", optimizer)
        scale = self._scale
        device = _HOST if scale is None else scale.device
        key, flag = id(innermost(optimizer)), state.last_step
        record = self._per_optimizer_states.get(key) or self._distamp.kept.get(key)
        if record is not None and OWN in record:
            flag = merged(list(record["found_inf_per_device"].values()), device)
        if flag is None:
            raise StageError(
                "found_inf() was called before unscale_() or step() for this optimizer"
            )
        return as_tensor(flag, device)

    def step_counts(self, optimizer: torch.optim.Optimizer) -> StepCounts:
        """Return how many steps of this optimizer were taken and skipped; may wait.

        Raises:
            StageError: The scaler never saw the optimizer.
        """
        if not self._enabled:
            return StepCounts(0, 0)
        self._distamp.ranks.settle()
        return StepCounts(*self._asked("step_counts", optimizer).counts[:2])

    def _asked(
        self, question: str, optimizer: Any, before: str = "unscale_() or step()"
    ) -> OptimizerState:
        state = self._distamp.optimizers.find(innermost(optimizer))
        if state is None:
            raise StageError(
                f"{question}() was called before {before} for this "
                f"{type(unwrapped(optimizer)).__name__}"
            )
        return state

    # -- the whole model -------------------------------------------------------------------------

    @_outside_the_graph
    def clip_grad_norm_(
        self,
        optimizer_or_parameters: torch.optim.Optimizer | Iterable[Tensor] | Tensor,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        replicated: clipping.Declared | None = None,
        sharded: clipping.Declared | None = None,
    ) -> Tensor:
        """Clip gradients by the norm of the whole model, which may be sharded over the ranks.

        Like ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, under DDP, FSDP, tensor and
        pipeline parallel and their mixtures. Scaled gradients are unscaled first. If the norm is
        inf or NaN, the gradients do not change, and the step is skipped.

        A DTensor counts by its placements, once for each mesh. FSDP's shards, the shares of
        ZeroRedundancyOptimizer and OSS, and Megatron's ``tensor_model_parallel`` are parts, and its
        ``shared`` is a copy that is counted elsewhere. Any other tensor counts as a replica, unless
        it is declared.

        Args:
            optimizer_or_parameters: An optimizer, or parameters of this scaler's optimizers.
            max_norm: The largest norm after clipping; >= 0.
            norm_type: The order of the norm; > 0, inf for the largest magnitude.
            replicated: Takes a parameter of the model; returns whether every rank of the group has
                the same values, even if rounding makes their gradients differ.
            sharded: Takes a parameter of the model; returns whether every rank of the group has a
                different part, or the group or mesh over which it is cut.

        Returns:
            The norm before clipping, unscaled: 0-d float32, the same on every rank, where the
            scaler is disabled, too.

        Raises:
            StageError: The gradients of the given parameters are not unscaled, and the parameters
                belong to no optimizer that this scaler has seen.
            SettingError: ``max_norm`` or ``norm_type`` is out of range, or a parameter is
                declared both.
            GradientError: What counts as a replica differs between ranks; says what to declare.
        """
        given: Any = optimizer_or_parameters
        if not self._enabled:
            return self._clip_unscaled(given, max_norm, norm_type, replicated, sharded)
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        group, own, error = self._group(scale.device), self._distamp, None
        size = 1 if group is None else group.size
        ready: list[_Given] = []
        chosen = clipping.Chosen([], [], [])
        # On a device an error is raised at the next call: until then it is a norm of NaN.
        sums = torch.full((3,), math.nan, dtype=torch.float64, device=scale.device)
        try:
            if not isinstance(given, Tensor) and hasattr(unwrapped(given), "param_groups"):
                self._state(given)
            chosen = clipping.choose(given, [optimizer for optimizer, _ in own.optimizers.live()])
            pairs = [(owner, self._record(owner)) for owner in chosen.owners]
            ready = [pair for pair in pairs if pair[1]["stage"] is not OptState.UNSCALED]
            for _, record in ready:
                check_unscale(record)
            # Last, so that where they are wrong the ranks go on alike after update().
            max_norm = clipping.positive("max_norm", max_norm, or_zero=True)
            norm_type = clipping.positive("norm_type", norm_type)
        except Exception as raised:
            error = raised

        def measure() -> None:
            nonlocal sums
            sums = clipping.local_sums(
                chosen.shares, norm_type, scale.device, size, replicated, sharded
            )

        declared = [replicated is not None, sharded is not None]
        differ = self._look(
            "clip_grad_norm_",
            scale,
            ready,
            [False] * len(ready),
            error=error,
            arguments=f", max_norm={max_norm}, norm_type={norm_type}, declared={declared}",
            then=measure,
        )
        everyone = sums.view(1, 3)
        if group is not None:
            everyone = gather_sums(group, sums)
            self._compare_norms(everyone, norm_type)
        norm = clipping.total(everyone, norm_type)
        self._skip_unless_finite(norm, differ, chosen.owners)
        clipping.clip_(chosen.multiplied, norm, max_norm)
        return norm

    def _skip_unless_finite(self, norm: Tensor, differ: Flag, owners: Iterable[Any]) -> None:
        """Let all skip that a norm was measured over, where it is not finite.

        Not where ranks differ, which may be in what it was measured over: flags of before stay.
        """
        if host.is_host(norm.device) and norm.isfinite():
            return
        not_finite = norm.isfinite().logical_or(as_tensor(differ, norm.device)).logical_not()
        for record in map(self._record, owners):
            flags = [not_finite.float(), *record["found_inf_per_device"].values()]
            record["found_inf_per_device"] = {
                norm.device: as_tensor(merged(flags, norm.device), norm.device)
            }

    def _clip_unscaled(
        self,
        given: Any,
        max_norm: float,
        norm_type: float,
        replicated: clipping.Declared | None,
        sharded: clipping.Declared | None,
    ) -> Tensor:
        """Clip where the scaler is disabled: no message but the norms, and in one process torch."""
        max_norm = clipping.positive("max_norm", max_norm, or_zero=True)
        norm_type = clipping.positive("norm_type", norm_type)
        chosen = clipping.choose_unscaled(given)
        device = chosen.multiplied[0].device if chosen.multiplied else torch.device("cpu")
        group = self._group(device)
        if group is None:
            return torch.nn.utils.clip_grad_norm_(chosen.multiplied, max_norm, norm_type)
        self._distamp.ranks.settle()  # nothing else of a disabled scaler reads the last clip's
        mine = clipping.local_sums(
            chosen.shares, norm_type, device, group.size, replicated, sharded
        )
        everyone = gather_sums(group, mine)
        self._compare_norms(everyone, norm_type)
        norm = clipping.total(everyone, norm_type)
        clipping.clip_(chosen.multiplied, norm, max_norm)
        return norm

    def _compare_norms(self, sums: Tensor, norm_type: float) -> None:
        """Refuse what contradicts the declarations, until a clip has agreed; then warn, late."""
        own = self._distamp

        def read(values: Sequence[float]) -> None:
            found = [values[place : place + 3] for place in range(0, len(values), 3)]
            why = clipping.differing(found, norm_type)
            if why is None:
                own.clips_agree = own.clips_agree or all(map(math.isfinite, values))
            elif own.clips_agree:
                warnings.warn(why, stacklevel=stacklevel_of_caller())
            else:
                own.ranks.settle()  # a rank that could not look at its gradients says why first
                raise GradientError(why)

        if own.clips_agree and not host.is_host(sums.device):
            own.ranks.later(sums.view(-1), read)
        else:
            read(sums.view(-1).tolist())

    def overflow_report(self, model: torch.nn.Module | None = None) -> OverflowReport:
        """Return which gradients have inf or NaN, on which rank; every rank must call it.

        Call it after a skipped step and before ``zero_grad``.

        Args:
            model: Gives names, and includes parameters of no optimizer. Without it, names come
                from ``named_parameters`` or the optimizer, or are group and index.

        Raises:
            StageError: No rank has such a gradient; raised on every rank.
        """
        own = self._distamp
        own.ranks.settle()
        optimizers = [optimizer for optimizer, _ in own.optimizers.live()]
        named = overflow.gradients_by_name(optimizers, own.names, model)
        mine = list(overflow.find_overflows(named, own.ranks.rank))
        overflows = tuple(each for theirs in own.ranks.gather(mine) for each in theirs)
        if not overflows:
            raise StageError(
                "overflow_report() found no inf or NaN in any gradient of any rank: call it after "
                "a skipped step and before zero_grad()"
            )
        scale = None if self._per_optimizer_states else own.skipped_at
        return OverflowReport(self.get_scale() if scale is None else scale, overflows)

    def attach(self, hook_state: object) -> None:
        """Tell a communication hook of the loss scale and of skipped steps, for its error feedback.

        Args:
            hook_state: The result of ``distamp.comm_hooks.register``.

        Raises:
            ValueError: It is the state of torch's PowerSGD, which does not survive loss scaling.
            TypeError: It is not the state of a hook.
        """
        hook = settings.checked_hook(hook_state)
        if not any(each is hook for each in self._distamp.hooks):
            self._distamp.hooks.append(hook)

    def detach(self, hook_state: object) -> None:
        """Undo `attach`; the scaler keeps an attached hook alive, so detach it after its model.

        Args:
            hook_state: The attached state.

        Raises:
            ValueError: It is not attached.
        """
        hook = settings.checked_hook(hook_state)
        left = [each for each in self._distamp.hooks if each is not hook]
        if len(left) == len(self._distamp.hooks):
            raise ValueError(
                f"detach() was given a {type(hook_state).__name__} that is not attached to this "
                "scaler; pass what you passed to attach()"
            )
        self._distamp.hooks = left
        hook.iteration_ended()  # it hears of no update any more

    # -- ranks and uneven inputs -------------------------------------------------------------------

    @property
    def process_group(self) -> GroupLike:
        """The group as given; assign to it after unpickling or after a group was made again."""
        return self._distamp.ranks.given

    @process_group.setter
    def process_group(self, process_group: GroupLike) -> None:
        check_group(process_group)
        self._distamp.ranks.settle()  # what the ranks of the old group differ in is raised by all
        self._distamp.ranks = Ranks(process_group)

    def _group(self, device: torch.device) -> Group | None:
        """Return the ranks to agree with; None inside ``Join``, where replicas need no message."""
        if not self._join_config.enable:
            return self._distamp.ranks.group(device)
        if self._join_config.is_first_joinable:
            raise StageError("the model comes first: Join([model, scaler])")
        return None

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that acts for this scaler on a rank without more inputs.

        See ``torch.distributed.algorithms.Join``: ``with Join([model, scaler])``.
        """
        self._distamp.ranks.settle()  # while no rank is in Join's own collectives yet
        return TakeOver(
            self.join_process_group, self.join_device, self._joined_state, self._take_over
        )

    @property
    def join_device(self) -> torch.device:
        """The device of the loss scale, for ``Join``."""
        return self._tensors()[0].device

    @property
    def join_process_group(self) -> Any:
        """The group of the scaler's ranks, for ``Join``."""
        return self._distamp.ranks.process_group

    def _joined_state(self) -> Tensor:
        scale, tracker = self._tensors()
        own = self._distamp
        counted = own.ranks.iteration, own.ranks.steps
        values = (*counted, scale.item(), tracker.item(), int(own.hysteresis))
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    def _take_over(self, state: Sequence[float] | None) -> None:
        """End ``Join``, and go on as a rank that had inputs to the last, where one did."""
        self._join_config = _JoinConfig.construct_disabled_join_config()
        if state is not None and self._enabled:
            iteration, steps, scale, tracker, hysteresis = state
            rule = self._distamp.settings.schedule
            self._load(Saved(rule, scale, int(tracker), int(hysteresis)))
            self._distamp.ranks.iteration = int(iteration)
            self._distamp.ranks.steps = int(steps)
        if self._enabled:
            # update(new_scale) may have set it where others had no inputs left.
            self._distamp.begun = (self._tensors()[0].item(), self._get_growth_tracker())

    # -- torch's private names ---------------------------------------------------------------------

    def _tensors(self) -> tuple[Tensor, Tensor]:
        if self._scale is None or self._growth_tracker is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        assert self._scale is not None
        assert self._growth_tracker is not None
        return self._scale, self._growth_tracker

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        # The first call may come from validation; the tensors must be fit for training afterwards.
        with torch.inference_mode(False):
            state = ScaleState.initial(self._init_scale, self._init_growth_tracker, 1, dev)
        self._scale, self._growth_tracker = state.scale, state.growth_tracker

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        scale, tracker = self._scale, self._growth_tracker
        if scale is not None and tracker is not None:
            return scale, tracker
        # Where ranks agree, another may hold the loss (the last stage of a pipeline): there the
        # first message says whether any rank called scale().
        if self._group(torch.device(self._device)) is not None:
            return self._tensors()
        raise StageError(
            f"Attempted {funcname} but _scale is None.  This may indicate your script did not "
            "use scaler.scale(loss or outputs) earlier in the iteration."
        )

    _growth_factor = _of_the_schedule("growth_factor")
    _backoff_factor = _of_the_schedule("backoff_factor")
    _growth_interval = _of_the_schedule("growth_interval")

    # -- state -----------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, of this class or of torch's, or Apex's.

        A disabled scaler loads nothing, as in torch.

        Raises:
            StageError: The dict is empty (torch raises RuntimeError).
            SettingError: A value is outside its range; nothing is changed then.
        """
        if self._enabled:
            self._load(read_state(state_dict, self._distamp.settings.schedule))

    def schedule_state_dict(self) -> dict[str, Any]:
        """Return what the schedule is and remembers beyond torch's five keys; empty when disabled.

        Numbers and strings, to be saved beside ``state_dict()``.
        """
        own = self._distamp
        return written_schedule(own.settings.schedule, int(own.hysteresis)) if self._enabled else {}

    def load_schedule_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `schedule_state_dict` returned; best before ``load_state_dict``.

        Sets the kind of schedule, its bounds and what it remembers, and leaves the scale, which
        is moved into the bounds.

        Raises:
            SettingError: A value is missing or outside its range; nothing is changed then.
        """
        if self._enabled:
            self._load(read_schedule(state_dict, self._distamp.settings.schedule))

    def _load(self, saved: Saved) -> None:
        own, rule = self._distamp, saved.schedule
        own.settings = replace(own.settings, schedule=rule)
        scale = self.get_scale() if saved.scale is None else saved.scale
        tracker = self._get_growth_tracker() if saved.tracker is None else saved.tracker
        scale = min(max(scale, rule.min_scale), rule.max_scale)
        self._init_scale, self._init_growth_tracker = scale, tracker
        own.hysteresis = own.hysteresis if saved.hysteresis is None else saved.hysteresis
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(scale)
            self._growth_tracker.fill_(tracker)
        own.ranks.restart()

    def __getstate__(self) -> dict[str, Any]:
        own = self._distamp
        if self._per_optimizer_states:
            raise StageError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        # What a subclass added goes along, as with torch's class.
        state = dict(self.__dict__)
        if self._enabled:
            state["_init_scale"] = self.get_scale()
            state["_init_growth_tracker"] = self._get_growth_tracker()
        state["_distamp"] = own.settings, int(own.hysteresis), own.ranks
        for name in ("_scale", "_growth_tracker", "_per_optimizer_states"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        Joinable.__init__(self)
        if "_distamp" not in state:
            torchs = from_torch(state)
            ours = Settings(torchs.schedule), torchs.hysteresis, Ranks(None)
            tracker = {"_init_scale": torchs.scale, "_init_growth_tracker": torchs.tracker}
            state = {**state, **tracker, "_distamp": ours}
        self.__dict__.update(state)
        given, hysteresis, ranks = state["_distamp"]
        self._start(given, self._init_scale, self._init_growth_tracker, ranks)
        self._distamp.hysteresis = hysteresis


def _inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale as torch computes it: in float64, as float32 can be off by one bit."""
    if scale.is_cpu and (value := scale.item()):
        return torch.full((), 1.0 / value, dtype=torch.float32, device=scale.device)
    return scale.double().reciprocal().float()
