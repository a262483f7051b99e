"""DistGradScaler: torch's surface, and the flow of each call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Joinable, JoinHook

from distamp import host
from distamp.errors import StageError
from distamp.gradients import flag_of, merged
from distamp.optimizers import find_closure, unwrapped
from distamp.scaler import clipping, groups, joining, local_pass, overflow, settings, stepping
from distamp.scaler.agreement import Ranks
from distamp.scaler.calls import enter
from distamp.scaler.flow import look_and_agree
from distamp.scaler.groups import GroupLike
from distamp.scaler.guard import BackwardWatch
from distamp.scaler.hooks import Hooks, checked_hook
from distamp.scaler.norms import Declared, NormPlans
from distamp.scaler.optimizer_state import (
    OptimizerState,
    OptimizerStates,
    OptState,
    StepCounts,
)
from distamp.scaler.outputs import PerDevice, map_tensors
from distamp.scaler.overflow import OverflowReport, SkipLog
from distamp.scaler.schedule import MAX_SCALE, MIN_SCALE, ScaleState, Schedule
from distamp.scaler.torch_compat import TorchNames, overrides
from distamp.sources import source_of

__all__ = ["DistGradScaler"]

_FP16_MAX = 65504.0


class DistGradScaler(TorchNames):
    """A ``torch.amp.GradScaler`` whose ranks always take, or skip, a step together.

    Differs from ``torch.amp.GradScaler`` in that found-inf is reduced over ``process_group``, in
    one message for each ``unscale_`` or ``step``, for plain, fused, sharded and empty gradients.
    Differs from ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`` in that it does so
    for every optimizer and layout, and in the order of ``growth_factor`` and ``backoff_factor``.
    The scale always stays within ``[min_scale, max_scale]``.

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
                stacklevel=settings.stacklevel_of_caller(),
            )
        self._schedule = settings.schedule_of(
            growth_factor, backoff_factor, growth_interval, min_scale, max_scale, schedule
        )
        settings.check_fp16_grads(fp16_grads)
        settings.check_skips(max_consecutive_skips)
        groups.check_group(process_group)
        self._fp16_grads = fp16_grads
        self._max_consecutive_skips = max_consecutive_skips
        self._names = settings.Names(named_parameters)
        self._init_scale = self._schedule.checked_scale(init_scale)
        self._init_growth_tracker = 0
        self._init_hysteresis = self._schedule.initial_hysteresis
        self._start(process_group)

    def _start(self, process_group: GroupLike) -> None:
        """Set what neither a checkpoint nor a pickle carries."""
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._hysteresis_tracker: Tensor | None = None
        self._state: ScaleState | None = None
        self._scale_called = False
        self._warned_seed = False
        self._known_settings: tuple[Any, ...] = ()
        self._known_live: tuple[Any, ...] = ()
        self._moves = 0
        self._notified_join = False
        self._plans = NormPlans()
        self._states = OptimizerStates()
        self._watch = BackwardWatch(self._states)
        self._ranks = Ranks(process_group)
        self._hooks = Hooks()
        self._skips = SkipLog()

    # -- scale -----------------------------------------------------------------------------------

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
        if torch.compiler.is_dynamo_compiling():
            return _outside_the_graph(DistGradScaler.scale)(self, outputs)
        if isinstance(outputs, Tensor):
            return self._scaled(outputs, self._begin_scaling(outputs.device))
        copies: list[PerDevice] = []

        def apply(output: Tensor) -> Tensor:
            if not copies:
                copies.append(PerDevice(self._begin_scaling(output.device)))
            return self._scaled(output, copies[0].on(output.device))

        return map_tensors(outputs, apply)

    def _scaled(self, output: Tensor, scale: Tensor) -> Tensor:
        if output.dtype is torch.float16:
            if output.requires_grad and not self._warned_seed:
                self._warn_of_seed_gradient()
            output = output.float()  # which 65536 would overflow
        if scale.device != output.device:
            scale = host.moved(scale, output.device)
        result = output * scale
        self._watch.watch(result)
        return result

    def _begin_scaling(self, device: torch.device) -> Tensor:
        """Return the loss scale, made on ``device`` where there is none; prepare for a backward."""
        scale = self._scale
        if scale is None:
            scale = self._scale_on(device)
        self._scale_called = True
        if self._fp16_grads == "master":
            for optimizer, _ in self._states.live():
                source_of(optimizer).before_backward()
        if self._hooks.joined:
            self._hooks.scale_is(scale)
        return scale

    def _warn_of_seed_gradient(self) -> None:
        on_host = host.is_host(self._scale_tensor().device)
        # On an accelerator the scale is not read for this: the one it began with is looked at once.
        scale = self.get_scale() if on_host else self._init_scale
        self._warned_seed = scale > _FP16_MAX or not on_host
        if scale <= _FP16_MAX:
            return
        if self._ranks.rank == 0:
            warnings.warn(
                f"scale() was given a float16 loss at loss scale {scale:g}. The first gradient is "
                f"the loss scale itself, and float16 has no values above {_FP16_MAX:g}. "
                "Compute the loss in float32: loss_fn(output.float(), target)",
                stacklevel=settings.stacklevel_of_caller(),
            )

    # -- unscale ---------------------------------------------------------------------------------

    def add_optimizer(self, *optimizers: torch.optim.Optimizer) -> None:
        """Make optimizers known before their first ``unscale_`` or ``step``.

        Optional: an optimizer is known from its first call on. Give all of them at the start, in
        the same order on every rank, where an ``update`` comes between the first ``scale`` and an
        optimizer's first step. An optimizer that is known already stays as it is.

        Args:
            optimizers: Those that this scaler will step.

        Raises:
            TypeError: Not an optimizer.
        """
        if self._enabled:
            for optimizer in optimizers:
                self._states.add(unwrapped(optimizer))

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
        if torch.compiler.is_dynamo_compiling():
            _outside_the_graph(_UNSCALE)(self, *optimizers)
            return
        subjects = enter(self, "unscale_", optimizers, OptimizerState.check_unscale)
        look_and_agree(self, "step", subjects, local_pass.unscale)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        subjects = enter(self, "_check_inf_per_device", (optimizer,), lambda state: None)
        look_and_agree(self, "step", subjects, local_pass.check)
        found: dict[Any, Tensor] = subjects[0].state["found_inf_per_device"]
        return found

    # -- step ------------------------------------------------------------------------------------

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer if no rank found inf or NaN, else skip on every rank.

        Like ``torch.amp.GradScaler.step``; sends the message if ``unscale_`` has not. Unlike
        torch's, it refuses a closure also by position.

        Args:
            optimizer: The optimizer whose parameters to update.
            args: Passed to ``optimizer.step``.
            kwargs: Passed to ``optimizer.step``.

        Returns:
            The result of ``optimizer.step``; None for a skipped step.

        Raises:
            StageError: A closure, a second ``step`` before ``update``, or gradients added after
                ``unscale_``.
            LossScaleCollapse: ``max_consecutive_skips`` was reached.
            ValueError, GradientError, LockstepError: As for `unscale_`.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return _outside_the_graph(_STEP)(self, optimizer, *args, **kwargs)
        if (args or kwargs) and find_closure(args, kwargs) is not None:
            raise StageError(
                "step() was given a closure, whose backward passes would step scaled gradients: "
                "run such an optimizer (LBFGS) without a scaler, in float32 or bfloat16"
            )
        (subject,) = enter(self, "step", (optimizer,), OptimizerState.check_step)
        state = subject.state
        if state["stage"] is OptState.READY:
            if state.wants_scaler:
                look_and_agree(self, "step", [subject], local_pass.check)
            elif local_pass.only_checks(subject):
                self._check_inf_per_device(optimizer)
            elif overrides(self, _UNSCALE):
                self.unscale_(optimizer)
            else:
                look_and_agree(self, "step", (subject,), local_pass.unscale)
            stepping.agree_on_flags_of_others(self, subject)
        else:
            stepping.agree_on_flags_of_others(self, subject)
        return stepping.apply(self, subject, args, kwargs)

    def step_all(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[Any]:
        """Step several optimizers with one message for all of them.

        Each optimizer is stepped or skipped by its own gradients.

        Returns:
            The result of each ``optimizer.step()``; None for a skipped step.
        """
        optimizers = list(optimizers)
        if not self._enabled:
            return [optimizer.step() for optimizer in optimizers]
        if torch.compiler.is_dynamo_compiling():
            return cast(list[Any], _outside_the_graph(DistGradScaler.step_all)(self, optimizers))
        if any(overrides(self, own) for own in (_STEP, _UNSCALE, _CHECK)):
            return [self.step(optimizer) for optimizer in optimizers]
        subjects = enter(self, "step_all", optimizers, OptimizerState.check_step)
        ready = [s for s in subjects if s.state["stage"] is OptState.READY]
        if ready:
            look_and_agree(self, "step", ready, local_pass.before_step)
        return [stepping.apply(self, subject, (), {}) for subject in subjects]

    # -- what each call begins with --------------------------------------------------------------

    def _require_scale(self, call: str) -> None:
        # Where ranks agree, another rank may hold the loss (the last stage of a pipeline): there
        # the message itself says whether any rank called scale().
        if self._scale is not None or self._ranks.alone:
            self._check_scale_growth_tracker(call)

    def _scale_on(self, device: torch.device) -> Tensor:
        scale = self._scale
        if scale is None:
            self._lazy_init_scale_growth_tracker(device)
            scale, _ = self._check_scale_growth_tracker("scale")
            self._rebase()
            self._watch.scale_is(self._scale_tensor())
        return self._scale_tensor()

    def _scale_tensor(self) -> Tensor:
        if self._scale is not None:
            return self._scale
        given: Any = self._device
        device = given if isinstance(given, (str, torch.device)) else "cpu"
        return self._scale_on(torch.device(device))

    # -- update ----------------------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale by the schedule, or set it, and begin the next iteration.

        Like ``torch.amp.GradScaler.update``, but the scale stays within its bounds.

        Args:
            new_scale: The new scale: a float, an int, or a tensor of one element.

        Raises:
            StageError: No optimizer was checked since the last ``update``.
            SettingError: ``new_scale`` is outside ``[min_scale, max_scale]`` or not one number.
        """
        if not self._enabled:
            return
        if torch.compiler.is_dynamo_compiling():
            _outside_the_graph(DistGradScaler.update)(self, new_scale)
            return
        scale = self._scale
        if scale is None:
            self._require_scale("update")
            scale = self._scale_tensor()
        if new_scale is not None:
            scale.fill_(self._schedule.checked_scale(settings.one_number(new_scale), "new_scale"))
            self._rebase()
        else:
            records = self._states.records.values()
            flags = [flag for state in records if (flag := state.flag()) is not None]
            if not flags:
                raise StageError("No inf checks were recorded prior to update.")
            only = len(flags) == 1 and flags[0].device == scale.device
            self._move_scale(flags[0] if only else merged(flags, scale.device))
        self._begin_iteration()

    def _move_scale(self, found_inf: Tensor) -> None:
        scale, tracker, hysteresis = self._scale, self._growth_tracker, self._hysteresis_tracker
        assert scale is not None
        assert tracker is not None
        assert hysteresis is not None
        self._moves += 1
        state = self._state
        if state is None or state.scale is not scale or state.growth_tracker is not tracker:
            state = self._state = ScaleState(scale, tracker, hysteresis)
        self._schedule.advance_(state, found_inf)

    def _begin_iteration(self, records: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        if self._scale is not None:
            self._watch.scale_is(self._scale)
        if self._join_config.enable:
            joining.end_iteration(self)
        self._ranks.iteration += 1
        if self._hooks.joined:
            self._hooks.iteration_ended()
        self._states.begin_iteration(records)
        self._skips.say()

    # -- asking afterwards -----------------------------------------------------------------------

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer's gradients are unscaled and wait for ``step``.

        torch's class keeps it in ``_per_optimizer_states[id(optimizer)]["stage"]``. False for an
        optimizer that the scaler never saw, and where it is disabled.
        """
        state = self._states.get(optimizer)
        return state is not None and state["stage"] is OptState.UNSCALED

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the most recent ``step(optimizer)`` was taken; may wait for the device.

        Also works after ``update``. Use it to advance a learning-rate schedule or an EMA only on
        steps that were taken.

        Raises:
            StageError: ``step(optimizer)`` was never called.
        """
        if not self._enabled:
            return True
        last = self._states.asked("stepped", optimizer, "step()").last_step
        if last is None:
            raise StageError("stepped() was called before step() for this optimizer")
        return not last.item()

    def found_inf(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return the flag of the last check, the same on all ranks; never waits.

        Returns:
            0-d float32: 1.0 if a rank found inf or NaN, else 0.0.

        Raises:
            StageError: The optimizer was never checked.
        """
        if not self._enabled:
            return flag_of(False, "cpu")
        found = self._states.asked("found_inf", optimizer).found_inf
        if found is None:
            raise StageError(
                "found_inf() was called before unscale_() or step() for this optimizer"
            )
        return found

    def step_counts(self, optimizer: torch.optim.Optimizer) -> StepCounts:
        """Return how many steps of this optimizer were taken and skipped; may wait.

        Raises:
            StageError: The scaler never saw the optimizer.
        """
        if not self._enabled:
            return StepCounts(0, 0)
        return self._states.asked("step_counts", optimizer).counts

    # -- the whole model -------------------------------------------------------------------------

    def clip_grad_norm_(
        self,
        optimizer_or_parameters: torch.optim.Optimizer | Iterable[Tensor] | Tensor,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        replicated: Declared | None = None,
        sharded: Declared | None = None,
    ) -> Tensor:
        """Clip gradients by the norm of the whole model, which may be sharded over the ranks.

        Like ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, under DDP, FSDP, tensor and
        pipeline parallel and their mixtures. Scaled gradients are unscaled first, in the same
        message. If the norm is inf or NaN, the gradients do not change, and the step is skipped.

        Replicas count once. DTensors have placements that show how they are sharded. For plain
        tensors the ranks find this out: a tensor counts as a replica among the ranks where its
        value is equal to the bit and the norm of its gradient agrees, and as a separate part
        elsewhere. Megatron's ``tensor_model_parallel`` (a part) and ``shared`` (a copy of a tied
        weight) are read too.

        Args:
            optimizer_or_parameters: An optimizer, or parameters of this scaler's optimizers.
            max_norm: The largest norm after clipping; > 0.
            norm_type: The order of the norm; > 0, inf for the largest magnitude.
            replicated: Takes a parameter of the model; returns whether every rank of the group has
                the same values, even if rounding makes their gradients differ.
            sharded: Takes a parameter of the model; returns whether every rank of the group has a
                different part, even if the parts look equal.

        Returns:
            The norm before clipping, unscaled: 0-d float32, the same on every rank. A disabled
            scaler returns the norm of this rank's gradients, as torch does.

        Raises:
            StageError: The gradients of the given parameters are not unscaled, and the parameters
                belong to no optimizer that this scaler has seen.
            SettingError: ``max_norm`` or ``norm_type`` is not a positive number, or a parameter is
                declared both.
        """
        given = optimizer_or_parameters
        if not self._enabled:
            return clipping.clip_disabled(given, self._states, max_norm, norm_type)
        if torch.compiler.is_dynamo_compiling():
            clip = _outside_the_graph(DistGradScaler.clip_grad_norm_)
            declared = {"replicated": replicated, "sharded": sharded}
            return cast(Tensor, clip(self, given, max_norm, norm_type, **declared))
        return clipping.clip(self, given, max_norm, norm_type, replicated, sharded)

    def overflow_report(self, model: torch.nn.Module | None = None) -> OverflowReport:
        """Return which gradients have inf or NaN, on which rank; every rank must call it.

        Call it after a skipped step and before ``zero_grad``.

        Args:
            model: Gives names, and includes parameters of no optimizer. Without it, names come
                from ``named_parameters`` or the optimizer, or are group and index.

        Raises:
            StageError: No rank has such a gradient; raised on every rank.
        """
        report = overflow.report(self, model)
        if not report.overflows:
            raise StageError(
                "overflow_report() found no inf or NaN in any gradient of any rank: call it after "
                "a skipped step and before zero_grad()"
            )
        return report

    def attach(self, hook_state: object) -> None:
        """Tell a communication hook the loss scale and which steps were skipped.

        Call it on every rank at the same point. A hook with error feedback keeps what rounding took
        in unscaled units, and drops what a skipped step left.

        Args:
            hook_state: The result of ``distamp.comm_hooks.register``.

        Raises:
            ValueError: It is the state of torch's PowerSGD, which does not survive loss scaling.
            TypeError: It is not the state of a hook.
        """
        self._hooks.add(checked_hook(hook_state))

    def detach(self, hook_state: object) -> None:
        """Undo `attach`, for example before you train another model.

        Call it on every rank at the same point. The scaler keeps an attached hook alive, so detach
        it when its model is no longer used.

        Args:
            hook_state: The attached state.

        Raises:
            ValueError: It is not attached.
        """
        if not self._hooks.remove(checked_hook(hook_state)):
            raise ValueError(
                f"detach() was given a {type(hook_state).__name__} that is not attached to this "
                "scaler; pass what you passed to attach()"
            )

    # -- uneven inputs ---------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that acts for this scaler on a rank without more inputs.

        See ``torch.distributed.algorithms.Join``: ``with Join([model, scaler])``.
        """
        return joining.ShadowScaler(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the loss scale, for ``Join``."""
        return self._scale_tensor().device

    @property
    def join_process_group(self) -> Any:
        """The group of the scaler's ranks, for ``Join``."""
        return self._ranks.join_group()


# As they are before anybody patches the class.
_STEP, _UNSCALE = DistGradScaler.step, DistGradScaler.unscale_
_CHECK = DistGradScaler._check_inf_per_device


def _outside_the_graph(method: Callable[..., Any]) -> Callable[..., Any]:
    # A compiled graph drops hooks, and traces all that they reach: this runs between two graphs.
    return torch._compile._disable_dynamo(method)
