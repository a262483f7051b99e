"""DistGradScaler: torch's surface; puts the rooms around it together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from distamp.errors import LossScaleCollapse, SettingError, StageError
from distamp.scaler import host
from distamp.scaler.callers import stacklevel_of_caller
from distamp.scaler.closure import find_closure, step_or_restore
from distamp.scaler.found_inf import merged
from distamp.scaler.fused import leaves_garbage, step_with_flags, takes_flags
from distamp.scaler.guard import watch_backward
from distamp.scaler.known import Known, StepCounts
from distamp.scaler.master_lookup import masters_of
from distamp.scaler.outputs import PerDevice, map_tensors, scaled
from distamp.scaler.schedule import ScaleState
from distamp.scaler.stages import OptState, Record, Records
from distamp.scaler.whole_model import WholeModel

__all__ = ["DistGradScaler"]

_FP16_MAX = 65504.0


class DistGradScaler(WholeModel):
    """A ``torch.amp.GradScaler`` whose ranks always take, or skip, a step together.

    Differs from ``torch.amp.GradScaler`` in that found-inf is reduced over ``process_group`` in one
    message for each ``unscale_`` or ``step``, for plain, fused, sharded and empty gradients alike;
    from ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`` in that this holds for
    every optimizer and layout, and in the order of ``growth_factor`` and ``backoff_factor``. The
    scale stays within ``[min_scale, max_scale]`` for ever.

    Args:
        device: Device type of the loss scale, such as ``"cuda"``. None: the accelerator if there is
            one, else ``"cpu"``. A device that is not there warns and disables, as in torch.
        init_scale: The first loss scale.
        growth_factor: Multiplies the scale after ``growth_interval`` clean iterations; > 1.
        backoff_factor: Multiplies the scale after an overflow; between 0 and 1.
        growth_interval: Clean iterations in a row before the scale grows.
        enabled: If False, ``step`` only calls ``optimizer.step()`` and the rest does nothing.
        process_group: The ranks that hold a part of the model: a ProcessGroup, a DeviceMesh (all
            its dimensions as one group) or None for the default group when torch.distributed is
            initialised, else this process alone. Resolved at each message, not here.
        min_scale: The scale never falls below this.
        max_scale: The scale never rises above this.
        schedule: How the scale moves, in place of the five settings above. See
            `distamp.scaler.schedule`.
        fp16_grads: What to do with float16 gradients: ``"error"`` refuses them exactly where torch
            does; ``"inplace"`` unscales them in place as ShardedGradScaler does, where values below
            6e-8 times the scale become zero; ``"master"`` unscales them in float32, on the way to
            the optimizer's `MasterParameters`.
        recheck: Check again in ``step`` what was changed after ``unscale_`` (a clip that divides by
            zero, say), with one more message.
        max_consecutive_skips: Raise `LossScaleCollapse` at this many skipped steps of one optimizer
            in a row.
        named_parameters: ``model.named_parameters()``, for names in `overflow_report`.

    Raises:
        SettingError: A setting is outside its range (a ValueError, and an AssertionError as in
            torch).
        TypeError: ``device`` or ``process_group`` is of another kind.

    Example::

        scaler = DistGradScaler("cuda")
        for inputs, targets in batches:
            optimizer.zero_grad()
            with distamp.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    Source: torch.amp's documentation; Micikevicius et al., "Mixed Precision Training", 2018.
    """

    # -- scale -----------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or every tensor of a nested structure, by the loss scale.

        As ``torch.amp.GradScaler.scale``, which knows lists, tuples and iterables; namedtuples and
        mappings keep their type here. float16 outputs of any shape come back as float32.

        Args:
            outputs: A Tensor or an iterable, mapping or nesting of Tensors, of any shape.

        Raises:
            ValueError: Something in ``outputs`` is no Tensor.
        """
        if not self._enabled:
            return outputs
        copies: list[PerDevice] = []

        def apply(output: Tensor) -> Tensor:
            if not copies:
                copies.append(PerDevice(self._scale_on(output.device)))
                self._attached.announce(
                    self._scale_tensor(), self._agreement.iteration, self._settings_in_words
                )
            self._scale_called = True
            if output.dtype is torch.float16 and output.requires_grad and not self._warned_seed:
                self._warn_of_seed_gradient()
            result = scaled(output, copies[0].on(output.device))
            watch_backward(result, self._backward_begins)
            return result

        return map_tensors(outputs, apply)

    def _warn_of_seed_gradient(self) -> None:
        on_host = host.is_host(self._scale_tensor().device)
        # On an accelerator the scale is not read for this: the one it began with is looked at once.
        scale = self.get_scale() if on_host else self._init_scale
        self._warned_seed = scale > _FP16_MAX or not on_host
        if scale <= _FP16_MAX:
            return
        if self._agreement.rank_zero:
            warnings.warn(
                f"scale() was given a float16 loss at loss scale {scale:g}: the "
                "gradient that enters it is the loss scale, which float16 cannot hold above "
                f"{_FP16_MAX:g}. "
                "Take the loss in float32: loss_fn(output.float(), target)",
                stacklevel=stacklevel_of_caller(),
            )

    # -- unscale ---------------------------------------------------------------------------------

    def unscale_(self, *optimizers: torch.optim.Optimizer) -> None:
        """Divide the optimizers' gradients by the loss scale and agree on found-inf.

        As ``torch.amp.GradScaler.unscale_``, for any number of optimizers with one message.

        Args:
            optimizers: Those whose gradients are to be clipped or looked at before ``step``.

        Raises:
            StageError: Called twice for an optimizer, or after its ``step``.
            ValueError: float16 gradients under ``fp16_grads="error"``.
            GradientError: A gradient cannot be read.
            LockstepError: Ranks differ in call, optimizers, scale or settings.
        """
        if not optimizers:
            raise TypeError("unscale_() needs at least one optimizer")
        if not self._enabled:
            self._agreement.announce_disabled(self._device)
            return
        self._require_scale("unscale_")
        _refuse_twice("unscale_", optimizers)
        for optimizer in optimizers:
            self._record(optimizer).check_unscale()
        self._settle("unscale_", optimizers, self._unscaling)

    # -- step ------------------------------------------------------------------------------------

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer if no rank found inf or NaN, else skip on every rank.

        As ``torch.amp.GradScaler.step``; sends the message if ``unscale_`` has not. Unlike there, a
        closure (LBFGS) is welcome, by position or by name: it zeroes the gradients, computes the
        loss, runs ``scaler.scale(loss).backward()`` and returns the unscaled loss. Each evaluation
        is unscaled and agreed on by itself.

        Args:
            optimizer: The optimizer whose parameters are to be updated.
            args: Passed to ``optimizer.step``.
            kwargs: Passed to ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returns; None for a skipped step.

        Raises:
            StageError: A second ``step`` before ``update``, or gradients added after ``unscale_``.
            LossScaleCollapse: ``max_consecutive_skips`` was reached.
            ValueError, GradientError, LockstepError: As for `unscale_`.
        """
        if not self._enabled:
            self._agreement.announce_disabled(self._device)
            return optimizer.step(*args, **kwargs)
        closure = find_closure(args, kwargs)
        if closure is not None:
            return self._step_with_closure(optimizer, closure, args, kwargs)
        self._prepare_step((optimizer,))
        return self._apply(optimizer, *args, **kwargs)

    def step_all(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[Any]:
        """Step several optimizers with one message for all of them.

        Each is skipped or stepped by its own flag, as after a ``step`` of its own.

        Returns:
            What each ``optimizer.step()`` returned; None for a skipped step.
        """
        optimizers = list(optimizers)
        if not self._enabled:
            self._agreement.announce_disabled(self._device)
            return [optimizer.step() for optimizer in optimizers]
        self._prepare_step(optimizers)
        return [self._apply(optimizer) for optimizer in optimizers]

    def _prepare_step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._require_scale("step")
        _refuse_twice("step_all", optimizers)
        pending, again = [], []
        for optimizer in optimizers:
            record = self._record(optimizer)
            record.check_step()
            if record.stage is OptState.READY:
                pending.append(optimizer)
            elif self._recheck:
                again.append(optimizer)
        if pending:
            self._settle("step", pending, self._step_flags)
        if again:
            self._settle("recheck", again, self._rechecked_flags)

    def _step_flags(self, optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
        if takes_flags(optimizer, self._known[optimizer]) and masters_of(optimizer) is None:
            return self._checked_flags(optimizer)
        return self._unscaling(optimizer)

    def _apply(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        record, known = self._per_optimizer_states[id(optimizer)], self._known[optimizer]
        flag = record.found_inf
        if flag is None:
            raise StageError("No inf checks were recorded for this optimizer.")
        result = None
        fused = takes_flags(optimizer, known)
        deferred = fused and not host.is_host(flag.device) and not leaves_garbage(optimizer, known)
        if deferred or self._is_clean(flag):
            if fused:
                unscaled = record.stage is OptState.UNSCALED
                scale = None if unscaled else self._scale_tensor()
                result = step_with_flags(optimizer, scale, flag, args, kwargs)
            else:
                result = optimizer.step(*args, **kwargs)
        self._finish_step(optimizer, known, record, flag)
        return result

    def _finish_step(
        self, optimizer: torch.optim.Optimizer, known: Known, record: Record, flag: Tensor
    ) -> None:
        record.stage = OptState.STEPPED
        known.count(flag)
        self._attached.step_ended(optimizer, flag)
        if (masters := masters_of(optimizer)) is not None:
            masters.finish_step()
        if self._max_consecutive_skips is not None:
            self._watch_for_collapse(optimizer, flag)

    def _step_with_closure(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        record = self._record(optimizer)
        record.check_step()
        if record.stage is OptState.UNSCALED:
            raise StageError(
                "step() was given a closure after unscale_(); a closure computes its own gradients "
                "and each of its evaluations is unscaled, so leave unscale_() out"
            )

        def overflowed(error: Exception | None) -> bool:
            def flags_of(optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
                if error is not None:
                    raise error
                return self._unscaled_flags(optimizer)

            if error is None:
                self._require_scale("step")
            self._settle("closure", (optimizer,), flags_of)
            assert record.found_inf is not None
            return not self._is_clean(record.found_inf)

        try:
            result = step_or_restore(optimizer, closure, overflowed, args, kwargs)
        finally:
            if (masters := masters_of(optimizer)) is not None:
                masters.write_back()
        if record.found_inf is None:
            raise StageError("step() was given a closure that the optimizer never called")
        self._finish_step(optimizer, self._known[optimizer], record, record.found_inf)
        return result

    def _watch_for_collapse(self, optimizer: torch.optim.Optimizer, flag: Tensor) -> None:
        if not self._known[optimizer].reaches_skips(self._max_consecutive_skips, flag):
            return
        report = self._overflows(None)
        raise LossScaleCollapse(
            f"{self._max_consecutive_skips} steps in a row were skipped; the loss scale is "
            f"{self.get_scale():g}\n{report}",
            report,
        )

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the most recent ``step(optimizer)`` was taken; may wait for the device.

        Stays answerable after ``update``, so that a learning-rate schedule or an EMA can be gated.

        Raises:
            StageError: ``step(optimizer)`` was never called.
        """
        if not self._enabled:
            return True
        known = self._known.get(optimizer)
        if known is None or known.last_step is None:
            raise StageError("stepped() is asked before step() was ever called for this optimizer")
        return not known.last_step.item()

    def found_inf(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return the agreed flag of the last check as a 0-d float32 tensor; never waits.

        Raises:
            StageError: Neither ``unscale_`` nor ``step`` was ever called for this optimizer.
        """
        if not self._enabled:
            return torch.zeros(())
        known = self._known.get(optimizer)
        if known is None or known.found_inf is None:
            raise StageError(
                "found_inf() is asked before unscale_() or step() was called for this optimizer"
            )
        return known.found_inf

    def overflow_rank(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Return the lowest rank on which the last check found inf or NaN; may wait.

        The message carries it, so every rank knows. None if no rank overflowed; 0 without a group.
        """
        known = self._known.get(optimizer)
        return None if known is None else known.first_overflow_rank()

    def step_counts(self, optimizer: torch.optim.Optimizer) -> StepCounts:
        """Return how many steps of this optimizer were taken and skipped; may wait."""
        known = self._known.get(optimizer)
        return StepCounts(0, 0) if known is None else known.counts

    # -- update ----------------------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale by the schedule, or set it, and begin the next iteration.

        As ``torch.amp.GradScaler.update``, and the scale stays within its bounds.

        Args:
            new_scale: A float, an int, or a tensor of one element: the scale from now on.

        Raises:
            StageError: No optimizer was checked since the last ``update``.
            SettingError: ``new_scale`` is outside ``[min_scale, max_scale]`` or not one number.
        """
        if not self._enabled:
            return
        if self._scale is None and self._agreement.alone:
            self._require_scale("update")
        scale = self._scale_tensor()
        if new_scale is not None:
            scale.fill_(self._schedule.checked_scale(_one_number(new_scale), "new_scale"))
            self._largest = None
        else:
            records = self._per_optimizer_states.values()
            flags = [flag for record in records if (flag := record.found_inf) is not None]
            if not flags:
                raise StageError("No inf checks were recorded prior to update.")
            self._move_scale(merged(flags, scale.device))
        self._agreement.next_iteration()
        self._attached.iteration_ended()
        self._per_optimizer_states = Records()

    def _move_scale(self, found_inf: Tensor) -> None:
        scale, tracker, hysteresis = self._scale, self._growth_tracker, self._hysteresis_tracker
        assert scale is not None
        assert tracker is not None
        assert hysteresis is not None
        largest, self._largest = self._largest, None
        state = ScaleState(scale, tracker, hysteresis, self._memory)
        self._schedule.advance_(state, found_inf, largest)


def _refuse_twice(call: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if len(optimizers) > 1 and len(set(map(id, optimizers))) != len(optimizers):
        raise StageError(
            f"{call}() was given one optimizer twice; each is unscaled and stepped once"
        )


def _one_number(value: float | Tensor) -> float:
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1 or value.requires_grad:
        raise SettingError(
            "new_scale should be a float or a 1-element tensor with requires_grad=False, not a "
            f"tensor of shape {tuple(value.shape)} with requires_grad={value.requires_grad}"
        )
    return float(value.item())
