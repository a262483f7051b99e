"""DistGradScaler: torch's surface, and the flow of each call."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig

from distamp import host
from distamp.callers import stacklevel_of_caller
from distamp.errors import GradientError, LossScaleCollapse, StageError
from distamp.gradients import carry_over, flag_of, version_of
from distamp.optimizers import find_closure, innermost, unwrapped
from distamp.protocols import CommHook
from distamp.scaler import clipping, late, overflow, settings
from distamp.scaler.checkpoint import Saved, from_torch, read_schedule, read_state, written_schedule
from distamp.scaler.groups import Group, GroupLike, check_group
from distamp.scaler.joining import TakeOver
from distamp.scaler.optimizer_state import (
    Agreed,
    OptimizerState,
    OptimizerStates,
    StepCounts,
    leaves_garbage,
    takes_flags,
    takes_scaler,
)
from distamp.scaler.outputs import PerDevice, map_tensors
from distamp.scaler.overflow import OverflowReport
from distamp.scaler.ranks import Call, Flag, Found, Ranks
from distamp.scaler.schedule import MAX_SCALE, MIN_SCALE, ScaleState, Schedule
from distamp.scaler.settings import Settings
from distamp.sources import source_of

__all__ = ["DistGradScaler"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_S = TypeVar("_S", bound="DistGradScaler")

# Where in torch's record of an iteration our own copy of what was agreed on lies.
_AGREED = "distamp"


def _outside_the_graph(
    method: Callable[Concatenate[_S, _P], _T],
) -> Callable[Concatenate[_S, _P], _T]:
    """Let a method run between two graphs of torch.compile, which would drop its hooks."""

    @functools.wraps(method)
    def call(self: _S, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_dynamo_compiling():
            outside: Callable[..., _T] = torch._compile._disable_dynamo(method)
            return outside(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return cast("Callable[Concatenate[_S, _P], _T]", call)


class _Own:
    """What survives a call on a scaler, beside torch's own attributes."""

    __slots__ = (
        "begun",
        "clips_agree",
        "hooks",
        "hysteresis",
        "losses",
        "made_with",
        "optimizers",
        "ranks",
        "settings",
    )

    def __init__(self, given: Settings, begun: tuple[float, int], ranks: Ranks) -> None:
        self.settings = given
        # Scale and growth tracker as last set from outside; what follows, all ranks do alike.
        self.begun = begun
        self.ranks = ranks
        # The credit of a schedule that forgives overflows; a tensor from the first update on.
        self.hysteresis: int | Tensor = given.schedule.initial_hysteresis
        # How many losses were scaled: gradients of an optimizer that was not looked at since the
        # last wait for their step.
        self.losses = 0
        # The scale of the last loss, where update() has moved it since: an optimizer that is seen
        # for the first time may hold gradients of it.
        self.made_with: float | Tensor | None = None
        self.optimizers = OptimizerStates()
        self.hooks: list[CommHook] = []
        # Whether a clip has found replicas alike: what differs later is told as a warning.
        self.clips_agree = False

    @property
    def now(self) -> int:
        """A clock that runs by losses, and by iterations on a rank that scales none."""
        return self.losses or self.ranks.iteration


class DistGradScaler(torch.amp.GradScaler, Joinable):
    """A ``torch.amp.GradScaler`` whose ranks always take, or skip, a step together.

    Differs from ``torch.amp.GradScaler`` in that found-inf is reduced over ``process_group``, in
    one message for each ``unscale_`` or ``step``, for plain, fused, sharded and empty gradients.
    Differs from ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`` in that it does so
    for every optimizer and layout, and in the order of ``growth_factor`` and ``backoff_factor``.
    The scale always stays within ``[min_scale, max_scale]``. When it changes, gradients that wait
    for their step are multiplied by new / old, so they are always divided by what they were made
    with.

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
        named_parameters: ``model.named_parameters()``, for names in `overflow_report`.

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
        names = settings.Names(named_parameters)
        given = Settings(rule, fp16_grads, max_consecutive_skips, names)
        check_group(process_group)
        self._start(given, rule.checked_scale(init_scale), 0, Ranks(process_group))

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
            return self._scaled(outputs, self._begin_loss(outputs.device))
        copies: list[PerDevice] = []

        def apply(output: Tensor) -> Tensor:
            if not copies:
                copies.append(PerDevice(self._begin_loss(output.device)))
            return self._scaled(output, copies[0].on(output.device))

        return map_tensors(outputs, apply)

    def _begin_loss(self, device: torch.device) -> Tensor:
        own, scale = self._distamp, self._scale
        if scale is None:
            self._lazy_init_scale_growth_tracker(device)
            scale, _ = self._check_scale_growth_tracker("scale")
        own.losses += 1
        own.made_with = None
        for hook in own.hooks:
            hook.scale_changed(scale)
        if self._per_optimizer_states:
            self._forget_carried()
        return scale

    def _scaled(self, output: Tensor, scale: Tensor) -> Tensor:
        if output.dtype is torch.float16:
            output = output.float()  # which 65536 would overflow
        if scale.device != output.device:
            scale = host.moved(scale, output.device)
        result = output * scale
        if self._per_optimizer_states:
            late.watch(result, self._unscaled())
        return result

    def _unscaled(self) -> list[tuple[Agreed, Any]]:
        """Return what was agreed on of each optimizer that is unscaled, and its source."""
        records = self._per_optimizer_states
        return [
            (records[id(innermost(optimizer))][_AGREED], source_of(optimizer))
            for optimizer, _ in self._distamp.optimizers.live()
            if self.is_unscaled(optimizer) and _AGREED in records[id(innermost(optimizer))]
        ]

    def _forget_carried(self) -> None:
        """Gradients that were unscaled in an earlier iteration count no more: a loss is scaled."""
        for key, record in list(self._per_optimizer_states.items()):
            if self._is_carried(record):
                del self._per_optimizer_states[key]

    def _is_carried(self, record: dict[str, Any]) -> bool:
        """Return whether gradients were unscaled before an ``update`` and wait for their step."""
        if record["stage"] is not OptState.UNSCALED or _AGREED not in record:
            return False
        agreed: Agreed = record[_AGREED]
        return agreed.iteration != self._distamp.ranks.iteration

    # -- unscale ---------------------------------------------------------------------------------

    @_outside_the_graph
    def unscale_(self, *optimizers: torch.optim.Optimizer) -> None:
        """Divide the optimizers' gradients by the loss scale and agree on found-inf.

        Like ``torch.amp.GradScaler.unscale_``, for any number of optimizers with one message. It is
        the message that ``step`` would send. So one rank may call it for one optimizer, to log
        a gradient, if it issues no other collective before its ``step``.

        Args:
            optimizers: Those whose gradients you want to clip or read before ``step``.

        Raises:
            StageError: Called twice for an optimizer, or after its ``step``.
            ValueError: float16 gradients under ``fp16_grads="error"``.
            GradientError: A gradient cannot be read.
            LockstepError: Ranks differ in call, optimizers, scale or settings.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        none = TypeError("unscale_() needs at least one optimizer") if not optimizers else None
        records = list(map(self._record, optimizers))
        if records and all(map(self._is_carried, records)):
            return  # unscaled before the last update, and no loss was scaled since
        for record in records:
            _check_unscale(record)
        self._look("step", optimizers, [True] * len(optimizers), none)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        self._check_scale_growth_tracker("_check_inf_per_device")
        self._look("step", (optimizer,), (False,), None)
        found: dict[Any, Tensor] = self._record(optimizer)["found_inf_per_device"]
        return found

    def _record(self, given: Any) -> dict[str, Any]:
        """Return torch's record of an optimizer; one record for a wrapper and what is inside."""
        optimizer = innermost(given)
        record = self._per_optimizer_states[id(optimizer)]
        if given is not optimizer:
            self._per_optimizer_states[id(given)] = record
        return record

    def _state(self, given: Any) -> OptimizerState:
        own = self._distamp
        state = own.optimizers.find(innermost(given))
        if state is None:
            state = own.optimizers.add(given)
            if own.made_with is not None and self._scale is not None:
                waiting = source_of(unwrapped(given)).parameters()
                carry_over(waiting, self._scale / own.made_with)
        return state

    def _look(
        self,
        name: str,
        given: Sequence[Any],
        unscales: Sequence[bool],
        refused: Exception | None,
        arguments: str = "",
        then: Callable[[], None] | None = None,
    ) -> None:
        """Look at the gradients of optimizers, agree with all ranks, and note the flags.

        Args:
            name: What ranks compare of the call.
            given: Its optimizers.
            unscales: Of each, whether its gradients are unscaled, too.
            refused: What is wrong with the call itself; every rank raises it.
            arguments: What else they compare.
            then: What else is done on this rank before they agree.
        """
        scale, _ = self._check_scale_growth_tracker(name)
        group, error = self._group(scale), refused
        states: list[OptimizerState] = []
        found: list[tuple[Flag, Tensor | None]] = []
        try:
            if len(given) > 1 and len(set(map(id, map(innermost, given)))) != len(given):
                error = StageError(
                    "one optimizer was given twice; each is unscaled and stepped once"
                )
            for optimizer, unscale in zip(given if error is None else (), unscales, strict=False):
                states.append(self._state(optimizer))
                found.append(self._found(optimizer, states[-1], scale, unscale))
            if then is not None and error is None:
                then()
        except Exception as raised:
            error = raised
        flags = [flag for flag, _ in found]
        if group is None:
            agreed = list(map(Found, flags))
        else:
            try:
                call = self._call(name, given, states, arguments)
                flags += [False] * (len(given) - len(found))  # where there is an error
                agreed = self._distamp.ranks.agree(group, call, flags, error)
            except Exception as raised:
                self._close(given, scale, raised)
                raise
        for optimizer, unscale, mine, agreed_on in itertools.zip_longest(
            given[: len(agreed)], unscales[: len(agreed)], found, agreed
        ):
            is_mine = mine is not None and agreed_on.flag is mine[0]
            record = self._record(optimizer)
            self._note(record, agreed_on, mine[1] if is_mine else None, scale)
            if unscale:
                record["stage"] = OptState.UNSCALED
        if error is not None and group is None:
            raise error

    def _call(
        self,
        name: str,
        given: Sequence[Any],
        states: Sequence[OptimizerState],
        arguments: str,
    ) -> Call:
        own = self._distamp
        if not own.ranks.iteration and self._scale is not None:
            # Over a new group, or with a loaded state: the ranks compare how things stand.
            own.begun = (self._scale.item(), self._get_growth_tracker())
        return Call(
            name,
            [unwrapped(optimizer) for optimizer in given[: len(states)]],
            tuple([state.place for state in states]),
            own.settings.text + arguments,
            own.begun,
            own.losses > 0,
        )

    def _found(
        self, given: Any, state: OptimizerState, scale: Tensor, unscale: bool
    ) -> tuple[Flag, Tensor | None]:
        """Look at the gradients of one optimizer on this rank, by torch's own name for it."""
        own = self._distamp
        own.settings.check_masters(given, source_of(unwrapped(given)))
        state.used = own.now
        found_inf = flag_of(False, scale.device)
        factor = _inverse(scale) if unscale else flag_of(True, scale.device)
        allow_fp16 = not unscale or own.settings.fp16_grads == "inplace"
        flags = self._unscale_grads_(given, factor, found_inf, allow_fp16)
        values = list(flags.values()) or [found_inf]
        only = values[0] if len(values) == 1 and values[0] is found_inf else None
        return _merged(values, scale.device), only

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        return source_of(unwrapped(optimizer)).unscale(inv_scale, found_inf, allow_fp16)

    def _note(
        self, record: dict[str, Any], found: Found, tensor: Tensor | None, scale: Tensor
    ) -> None:
        flag = found.flag
        if tensor is None:
            tensor = _as_tensor(flag, scale.device)
        record["found_inf_per_device"] = {tensor.device: tensor}
        record[_AGREED] = Agreed(flag, found.ranks, tensor, self._distamp.ranks.iteration)

    def _close(self, given: Sequence[Any], scale: Tensor, error: Exception) -> None:
        """Skip optimizers for the rest of the iteration.

        Some ranks have unscaled their gradients when another finds that it cannot: a second try
        would unscale them twice. ``update`` begins anew.
        """
        for optimizer in given:
            record = self._record(optimizer)
            record["stage"] = OptState.STEPPED
            self._note(record, Found(True), None, scale)
            record[_AGREED].closed = f"{type(error).__name__}: {error}"

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
            StageError: A second ``step`` before ``update``, gradients added after ``unscale_``, or
                a closure.
            LossScaleCollapse: ``max_consecutive_skips`` was reached.
            ValueError, GradientError, LockstepError: As for `unscale_`.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        self._check_scale_growth_tracker("step")
        record = self._record(optimizer)
        _check_step(record)
        if (args or kwargs) and find_closure(args, kwargs) is not None:
            self._refuse_closure(optimizer, record)
        if record["stage"] is OptState.READY:
            if self._only_checks(optimizer):
                self._check_inf_per_device(optimizer)
            else:
                self.unscale_(optimizer)
        return self._apply(optimizer, record, args, kwargs)

    def _refuse_closure(self, optimizer: Any, record: dict[str, Any]) -> None:
        error = StageError(
            "Closure use is not currently supported if GradScaler is enabled, as in torch: take "
            "steps with a closure in float32 or bfloat16, without a scaler"
        )
        if record["stage"] is OptState.READY and self._group(None) is not None:
            self._look("step", (optimizer,), (), error)
        raise error

    def _only_checks(self, optimizer: Any) -> bool:
        """Return whether the optimizer's own kernel unscales, or it does so by the scaler."""
        return takes_flags(optimizer) and not source_of(unwrapped(optimizer)).casts

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
        self._check_scale_growth_tracker("step")
        for optimizer in optimizers:
            _check_step(self._record(optimizer))
        ready = [o for o in optimizers if self._record(o)["stage"] is OptState.READY]
        if ready:
            self._look("step", ready, [not self._only_checks(o) for o in ready], None)
        return [self._apply(each, self._record(each), (), {}) for each in optimizers]

    def _apply(
        self,
        optimizer: Any,
        record: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step by the flag, or skip."""
        own, state = self._distamp, self._state(optimizer)
        fused, kind = takes_flags(optimizer), cast("Any", type(optimizer))
        if not record["found_inf_per_device"]:
            raise StageError("No inf checks were recorded for this optimizer.")
        if _AGREED not in record:
            self._agree_on_flags_of_others(optimizer, record, state)
        flag = _current_flag(record)
        own.ranks.settle(wait=False)
        if fused and takes_scaler(kind):
            result = self._step_with_scaler(optimizer, flag, args, kwargs)
        elif fused:
            result = self._step_with_flags(optimizer, record, state, flag, args, kwargs)
        else:
            own.ranks.settle_with_others()  # so that they learn first what they differ in
            result = self._maybe_opt_step(optimizer, record, *args, **kwargs)
        record["stage"] = OptState.STEPPED
        state.last_step = flag
        self._tell_hooks(optimizer, flag)
        self._count(optimizer, state, flag, record[_AGREED].ranks)
        return result

    def _agree_on_flags_of_others(
        self, optimizer: Any, record: dict[str, Any], state: OptimizerState
    ) -> None:
        """Agree on flags that an override, or a framework itself, has written down."""
        scale, _ = self._check_scale_growth_tracker("step")
        flag = _merged(list(record["found_inf_per_device"].values()), scale.device)
        found, group = Found(flag), self._group(scale)
        if group is not None:
            call = self._call("step", (optimizer,), (state,), "")
            found = self._distamp.ranks.agree(group, call, [flag], None)[0]
        self._note(record, found, None, scale)

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
        if self._group(None) is not None and bool(flag):
            return None
        return optimizer.step(*args, **{**kwargs, "grad_scaler": self})

    def _step_with_flags(
        self,
        optimizer: Any,
        record: dict[str, Any],
        state: OptimizerState,
        flag: Flag,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step by torch's protocol: the kernel divides by the scale, or does nothing."""
        scale, _ = self._check_scale_growth_tracker("step")
        if not host.is_host(scale.device):
            # torch's fused optimizers copy flag and scale to where parameters are, and do not wait.
            stepped = source_of(unwrapped(optimizer)).stepped()
            on_host = any(host.is_host(tensor.device) for _, tensor in stepped)
            if on_host or (not state.counts.taken and leaves_garbage(unwrapped(optimizer))):
                self._distamp.ranks.settle()
                flag = bool(flag)
            scale = host.moved(scale, torch.device("cpu")) if on_host else scale
        if flag is True and type(optimizer).__module__.startswith("torch.optim."):
            return None  # its kernel would do nothing, or leave garbage
        agreed: Agreed = record[_AGREED]
        is_as_given = isinstance(flag, Tensor) and flag is agreed.flag
        found_inf = agreed.given if is_as_given else _as_tensor(flag, scale.device)
        grad_scale = getattr(optimizer, "grad_scale", None)
        if record["stage"] is not OptState.UNSCALED:
            grad_scale = scale if grad_scale is None else scale * grad_scale
        try:
            optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
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
        if any(flag.item() for flag in optimizer_state["found_inf_per_device"].values()):
            return None
        return optimizer.step(*args, **kwargs)

    # -- what a step leaves ------------------------------------------------------------------------

    def _tell_hooks(self, optimizer: Any, flag: Flag) -> None:
        if not self._distamp.hooks:
            return
        found_inf = _as_tensor(flag, "cpu")
        source = source_of(unwrapped(optimizer))
        parameters = [*source.parameters(), *(stepped for _, stepped in source.stepped())]
        for hook in self._distamp.hooks:
            hook.step_ended(parameters, found_inf)

    def _count(
        self, given: Any, state: OptimizerState, flag: Flag, ranks: tuple[int, ...] | None
    ) -> None:
        own, scale = self._distamp, self._scale
        if not isinstance(flag, Tensor):
            value = math.nan if scale is None or not flag else scale.item()
            self._counted(given, state, flag, value, ranks, own.settings.names)
        elif scale is not None:

            def read(values: list[float]) -> None:
                self._counted(given, state, bool(values[0]), values[1], None, None)

            own.ranks.later(torch.stack((flag.to(scale.dtype), scale)), read)

    def _counted(
        self,
        given: Any,
        state: OptimizerState,
        skipped: bool,
        scale: float,
        ranks: tuple[int, ...] | None,
        names: settings.Names | None,
    ) -> None:
        state.count(skipped)
        if not skipped:
            return
        own, limit = self._distamp, self._distamp.settings.max_consecutive_skips
        if own.ranks.rank == 0:
            steps = state.counts.taken + state.counts.skipped
            overflow.log_skip(unwrapped(given), steps, scale, ranks, names)
        if limit is not None and state.in_a_row == limit:
            state.in_a_row = 0
            report = self._report(None)
            raise LossScaleCollapse(
                f"{limit} steps in a row were skipped; the loss scale is "
                f"{self.get_scale():g}\n{report}",
                report,
            )

    # -- update ----------------------------------------------------------------------------------

    @_outside_the_graph
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale by the schedule, or set it, and begin the next iteration.

        Like ``torch.amp.GradScaler.update``, but the scale stays within its bounds, and gradients
        that wait for their step are multiplied by new / old.

        Args:
            new_scale: The new scale: a float, an int, or a tensor of one element.

        Raises:
            StageError: No optimizer was checked since the last ``update``.
            SettingError: ``new_scale`` is outside ``[min_scale, max_scale]`` or not one number.
        """
        if not self._enabled:
            return
        own = self._distamp
        scale, tracker = self._check_scale_growth_tracker("update")
        on_host = host.is_host(scale.device)
        before: float | Tensor = scale.item() if on_host else scale.clone()
        if new_scale is not None:
            value = own.settings.schedule.checked_scale(settings.one_number(new_scale), "new_scale")
            scale.fill_(value)
            own.begun = (value, own.begun[1])
        else:
            records = self._per_optimizer_states.values()
            counted = [r for r in records if not self._is_carried(r)]
            flags = [f for record in counted for f in record["found_inf_per_device"].values()]
            if not flags:
                raise StageError("No inf checks were recorded prior to update.")
            found_inf = flags[0]
            if len(flags) > 1 or found_inf.device != scale.device:
                found_inf = torch.stack([host.moved(flag, scale.device) for flag in flags]).max()
            if not isinstance(own.hysteresis, Tensor):
                own.hysteresis = torch.full_like(tracker, own.hysteresis)
            own.settings.schedule.advance_(ScaleState(scale, tracker, own.hysteresis), found_inf)
        if not on_host or scale.item() != before:
            self._carry_over(scale, before)
        self._begin_iteration()

    def _carry_over(self, scale: Tensor, before: float | Tensor) -> None:
        """Multiply gradients that wait for their step by what the scale was multiplied by."""
        own = self._distamp
        if own.losses and own.made_with is None:
            own.made_with = before
        waiting = [o for o, state in own.optimizers.live() if state.used != own.now]
        if waiting:
            parameters = (p for o in waiting for p in source_of(o).parameters())
            carry_over(parameters, scale / before)

    def _begin_iteration(self) -> None:
        own, records = self._distamp, self._per_optimizer_states
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        if own.losses:  # else no loss will tell when unscaled gradients have been replaced
            for key, record in records.items():
                if record["stage"] is OptState.UNSCALED and _AGREED in record:
                    self._per_optimizer_states[key] = record
        own.ranks.iteration += 1
        for hook in own.hooks:
            hook.iteration_ended()

    # -- asking ----------------------------------------------------------------------------------

    def add_optimizer(self, *optimizers: torch.optim.Optimizer) -> None:
        """Make optimizers known before their first ``step``, in the same order on all ranks.

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
        record = self._per_optimizer_states.get(id(innermost(optimizer)))
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
        flag = self._asked("found_inf", optimizer).last_step
        record = self._per_optimizer_states.get(id(innermost(optimizer)))
        if record is not None and _AGREED in record:
            flag = record[_AGREED].flag
        if flag is None:
            raise StageError(
                "found_inf() was called before unscale_() or step() for this optimizer"
            )
        return _as_tensor(flag, "cpu" if self._scale is None else self._scale.device)

    def step_counts(self, optimizer: torch.optim.Optimizer) -> StepCounts:
        """Return how many steps of this optimizer were taken and skipped; may wait.

        Raises:
            StageError: The scaler never saw the optimizer.
        """
        if not self._enabled:
            return StepCounts(0, 0)
        self._distamp.ranks.settle()
        return self._asked("step_counts", optimizer).counts

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
            max_norm: The largest norm after clipping; > 0.
            norm_type: The order of the norm; > 0, inf for the largest magnitude.
            replicated: Takes a parameter of the model; returns whether every rank of the group has
                the same values, even if rounding makes their gradients differ.
            sharded: Takes a parameter of the model; returns whether every rank of the group has a
                different part, or the group or mesh over which it is cut.

        Returns:
            The norm before clipping, unscaled: 0-d float32, the same on every rank. A disabled
            scaler returns the norm of this rank's gradients, as torch does.

        Raises:
            StageError: The gradients of the given parameters are not unscaled, and the parameters
                belong to no optimizer that this scaler has seen.
            SettingError: ``max_norm`` or ``norm_type`` is not a positive number, or a parameter is
                declared both.
            GradientError: What counts as a replica differs between ranks; says what to declare.
        """
        given: Any = optimizer_or_parameters
        if not self._enabled:
            return self._clip_as_torch_does(given, max_norm, norm_type)
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        own, error = self._distamp, None
        group = self._group(scale)
        ready: list[Any] = []
        clipped: list[clipping.Clipped] = []
        others: list[Tensor] = []
        sums, unsure = torch.zeros(2, dtype=torch.float64, device=scale.device), False
        try:
            max_norm = clipping.positive("max_norm", max_norm)
            norm_type = clipping.positive("norm_type", norm_type)
            owners, clipped, others = self._to_clip(given)
            for optimizer in owners:
                if self._record(optimizer)["stage"] is OptState.STEPPED:
                    _check_unscale(self._record(optimizer))
            ready = [o for o in owners if self._record(o)["stage"] is OptState.READY]
        except Exception as raised:
            error = raised
        size = 1 if group is None else group.size

        def measure() -> None:
            nonlocal sums, unsure
            sums, unsure = clipping.local_sums(
                clipped, norm_type, scale.device, size, replicated, sharded
            )

        declared = [replicated is not None, sharded is not None]
        arguments = f", max_norm={max_norm}, norm_type={norm_type}, declared={declared}"
        self._look("clip_grad_norm_", ready, [True] * len(ready), error, arguments, measure)
        if group is None:
            norm = clipping.total(sums.view(1, 2), norm_type)
        else:
            everyone = own.ranks.gather_pairs(group, sums)
            norm = clipping.total(everyone, norm_type)
            self._compare_norms(everyone, norm_type, unsure)
        clipping.clip_([*(each.stepped for each in clipped), *others], norm, max_norm)
        return norm

    def _compare_norms(self, sums: Tensor, norm_type: float, unsure: bool) -> None:
        """Refuse what contradicts the declarations, until a clip has agreed; then warn, late."""
        own = self._distamp

        def read(values: Sequence[float]) -> None:
            found = torch.tensor(values, dtype=torch.float64, device="cpu").view(-1, 2)
            why = clipping.differing(found, norm_type, unsure)
            if why is None:
                own.clips_agree = own.clips_agree or bool(found.isfinite().all())
            elif own.clips_agree:
                warnings.warn(why, stacklevel=stacklevel_of_caller())
            else:
                own.ranks.settle()  # a rank that could not look at its gradients says why first
                raise GradientError(why)

        if own.clips_agree and not host.is_host(sums.device):
            own.ranks.later(sums.view(-1), read)
        else:
            read(sums.view(-1).tolist())

    def _to_clip(self, given: Any) -> tuple[list[Any], list[clipping.Clipped], list[Tensor]]:
        """Return whose gradients are clipped, what is measured, and what is clipped besides."""
        if not isinstance(given, Tensor) and hasattr(unwrapped(given), "param_groups"):
            self._state(given)
            source = source_of(unwrapped(given))
            clipped = clipping.stepped_by(source)
            others = source.parameters() if any(each.part for each in clipped) else []
            mine = {id(each.stepped) for each in clipped}
            return [given], clipped, [p for p in others if id(p) not in mine]
        parameters = [given] if isinstance(given, Tensor) else list(given)
        wanted, owners, clipped = set(map(id, parameters)), [], []
        left = set(wanted)
        for optimizer, _ in self._distamp.optimizers.live():
            source = source_of(optimizer)
            held = {id(p) for p in source.parameters()}
            stepped = clipping.stepped_by(source)
            held.update(id(each.stepped) for each in stepped)
            if held & wanted:
                owners.append(optimizer)
                left -= held
                clipped += [
                    each for each in stepped if {id(each.parameter), id(each.stepped)} & wanted
                ]
        for parameter in parameters:
            if not isinstance(parameter, Tensor):
                raise TypeError(
                    "clip_grad_norm_ takes an optimizer or Tensors, such as model.parameters(), "
                    f"not {type(parameter).__name__}s"
                )
        if left:
            raise StageError(
                f"{len(left)} of {len(wanted)} parameters belong to no optimizer this scaler has "
                "seen yet, so it does not know whether their gradients are still scaled. Give "
                "clip_grad_norm_ the optimizer, or call add_optimizer(optimizer) first"
            )
        return owners, clipped, []

    def _clip_as_torch_does(self, given: Any, max_norm: float, norm_type: float) -> Tensor:
        """Clip what this rank holds: a disabled scaler sends nothing."""
        max_norm = clipping.positive("max_norm", max_norm)
        norm_type = clipping.positive("norm_type", norm_type)
        if not isinstance(given, Tensor) and hasattr(unwrapped(given), "param_groups"):
            source = source_of(unwrapped(given))
            pairs = source.stepped()
            if source.casts and pairs:  # optimizer.step() then takes them from the masters
                one = flag_of(True, pairs[0][1].device)
                source.unscale(one, torch.zeros_like(one), True)
            given = [stepped for _, stepped in pairs]
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type)

    def overflow_report(self, model: torch.nn.Module | None = None) -> OverflowReport:
        """Return which gradients have inf or NaN, on which rank; every rank must call it.

        Call it after a skipped step and before ``zero_grad``.

        Args:
            model: Gives names, and includes parameters of no optimizer. Without it, names come
                from ``named_parameters`` or the optimizer, or are group and index.

        Raises:
            StageError: No rank has such a gradient; raised on every rank.
        """
        report = self._report(model)
        if not report.overflows:
            raise StageError(
                "overflow_report() found no inf or NaN in any gradient of any rank: call it after "
                "a skipped step and before zero_grad()"
            )
        return report

    def _report(self, model: torch.nn.Module | None) -> OverflowReport:
        own = self._distamp
        optimizers = [optimizer for optimizer, _ in own.optimizers.live()]
        named = overflow.gradients_by_name(optimizers, own.settings.names, model)
        mine = list(overflow.find_overflows(named, own.ranks.rank))
        overflows = tuple(each for theirs in own.ranks.gather(mine) for each in theirs)
        return OverflowReport(self.get_scale(), overflows)

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
        self._distamp.ranks = Ranks(process_group)

    def _group(self, scale: Tensor | None) -> Group | None:
        """Return the ranks to agree with; None inside ``Join``, where replicas need no message."""
        if self._join_config.enable:
            if self._join_config.is_first_joinable:
                raise StageError("the model comes first: Join([model, scaler])")
            return None
        scale = self._scale if scale is None else scale
        device = torch.device("cpu") if scale is None else scale.device
        return self._distamp.ranks.group(device)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that acts for this scaler on a rank without more inputs.

        See ``torch.distributed.algorithms.Join``: ``with Join([model, scaler])``.
        """
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
        values = (own.ranks.iteration, scale.item(), tracker.item(), int(own.hysteresis))
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    def _take_over(self, state: Sequence[float] | None) -> None:
        """End ``Join``, and go on as a rank that had inputs to the last, where one did."""
        self._join_config = _JoinConfig.construct_disabled_join_config()
        own = self._distamp
        if state is None or not self._enabled:
            return
        scale, tracker = self._tensors()
        scale.fill_(state[1])
        tracker.fill_(int(state[2]))
        own.ranks.iteration, own.hysteresis = int(state[0]), int(state[3])

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
        if self._group(None) is not None:
            return self._tensors()
        raise StageError(
            f"Attempted {funcname} but _scale is None.  This may indicate your script did not "
            "use scaler.scale(loss or outputs) earlier in the iteration."
        )

    @property
    def _growth_factor(self) -> float:
        return self._distamp.settings.schedule.growth_factor

    @_growth_factor.setter
    def _growth_factor(self, value: float) -> None:
        self._replace(growth_factor=value)

    @property
    def _backoff_factor(self) -> float:
        return self._distamp.settings.schedule.backoff_factor

    @_backoff_factor.setter
    def _backoff_factor(self, value: float) -> None:
        self._replace(backoff_factor=value)

    @property
    def _growth_interval(self) -> int:
        return self._distamp.settings.schedule.growth_interval

    @_growth_interval.setter
    def _growth_interval(self, value: int) -> None:
        self._replace(growth_interval=value)

    def _replace(self, **changed: float) -> None:
        own = self._distamp
        own.settings = own.settings.with_schedule(own.settings.schedule.replaced(**changed))

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor that the scale grows by; > 1, else SettingError."""
        self._growth_factor = new_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor that an overflow multiplies the scale by; in (0, 1), else SettingError."""
        self._backoff_factor = new_factor

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the clean iterations before the scale grows; >= 1, else SettingError."""
        self._growth_interval = new_interval

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
        own.settings = own.settings.with_schedule(rule)
        scale = self.get_scale() if saved.scale is None else saved.scale
        tracker = self._get_growth_tracker() if saved.tracker is None else saved.tracker
        scale = min(max(scale, rule.min_scale), rule.max_scale)
        self._init_scale, self._init_growth_tracker = scale, tracker
        own.hysteresis = own.hysteresis if saved.hysteresis is None else saved.hysteresis
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(scale)
            self._growth_tracker.fill_(tracker)
        own.ranks.iteration = 0

    def __getstate__(self) -> dict[str, Any]:
        own, records = self._distamp, self._per_optimizer_states.values()
        if not all(map(self._is_carried, records)):
            raise StageError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        # What a subclass added goes along, as with torch's class.
        fresh = ("_scale", "_growth_tracker", "_per_optimizer_states", "_join_config")
        state = {name: value for name, value in self.__dict__.items() if name not in fresh}
        tracker = self._get_growth_tracker() if self._enabled else self._init_growth_tracker
        scale = self.get_scale() if self._enabled else self._init_scale
        saved = Saved(own.settings.schedule, scale, tracker, int(own.hysteresis))
        choices = own.settings.fp16_grads, own.settings.max_consecutive_skips
        state.update(_init_scale=scale, _init_growth_tracker=tracker)
        state["_distamp"] = (saved, *choices, own.ranks.given is None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        Joinable.__init__(self)
        state = dict(state)
        ours = state.pop("_distamp", None)
        saved: Any
        saved, fp16_grads, limit, was_default = ours or (from_torch(state), "error", None, True)
        if ours is None:
            left_out = ("_growth_factor", "_backoff_factor", "_growth_interval")
            state = {name: value for name, value in state.items() if name not in left_out}
        lost = None
        if not was_default:
            lost = (
                "this scaler was pickled with a process group, which cannot be pickled; assign "
                "scaler.process_group (None is the default group) before you use the scaler"
            )
        given = Settings(saved.schedule, fp16_grads, limit, settings.Names())
        self.__dict__.update(state)
        self._start(given, saved.scale, saved.tracker, Ranks(None, lost))
        self._distamp.hysteresis = saved.hysteresis

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # As a pickle, but in the same process: the group is the same one, and is no part of it.
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        vars(twin)["_distamp"].ranks = Ranks(self._distamp.ranks.given, self._distamp.ranks.lost)
        return twin


def _inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale as torch computes it: in float64, as float32 can be off by one bit."""
    if host.is_host(scale.device) and (value := scale.item()):
        return torch.full((), 1.0 / value, dtype=torch.float32, device=scale.device)
    return scale.double().reciprocal().float()


def _as_tensor(flag: Flag, device: torch.device | str) -> Tensor:
    """Return a flag as 0-d float32, exactly 0 or 1; on ``device`` where the host knows it."""
    return flag.float() if isinstance(flag, Tensor) else flag_of(flag, device)


def _merged(flags: Sequence[Tensor], device: torch.device) -> Flag:
    """Return whether any flag is set: a bool where the loss scale is on the host."""
    if host.is_host(device):
        return any(flag.item() for flag in flags)
    there = [host.moved(flag, device).ne(0) for flag in flags]
    return there[0] if len(there) == 1 and there[0].dim() == 0 else torch.stack(there).any()


def _current_flag(record: dict[str, Any]) -> Flag:
    """Return the flag as it is now: others may have reduced the record's tensors themselves."""
    agreed: Agreed = record[_AGREED]
    flags = list(record["found_inf_per_device"].values())
    if isinstance(agreed.flag, Tensor):
        if len(flags) == 1 and flags[0] is agreed.given and version_of(flags[0]) == agreed.version:
            return agreed.flag
        return _merged(flags, agreed.flag.device)
    return any(flag.item() for flag in flags)


def _check_unscale(record: dict[str, Any]) -> None:
    """Refuse ``unscale_`` where it was called already, with torch's own words."""
    _check_closed(record, "unscale_")
    if record["stage"] is OptState.UNSCALED:
        raise StageError(
            "unscale_() has already been called on this optimizer since the last update()."
        )
    if record["stage"] is OptState.STEPPED:
        raise StageError("unscale_() is being called after step().")


def _check_closed(record: dict[str, Any], call: str) -> None:
    if _AGREED in record and record[_AGREED].closed:
        raise StageError(
            f"{call}() is called for an optimizer that an error closed for this iteration; call "
            "update() and continue with the next iteration. The error was: "
            f"{record[_AGREED].closed}"
        )


def _check_step(record: dict[str, Any]) -> None:
    """Refuse a second ``step``, and one over gradients that arrived after ``unscale_``."""
    _check_closed(record, "step")
    if record["stage"] is OptState.STEPPED:
        raise StageError("step() has already been called since the last update().")
    if record["stage"] is OptState.UNSCALED and _AGREED in record and record[_AGREED].late:
        raise StageError(
            "backward() through a scaled loss added gradients after unscale_(): scaled and "
            "unscaled gradients are now summed. Call unscale_() after the last backward() of "
            "the iteration; nothing was stepped"
        )
