"""`DistGradScaler`: torch's ``GradScaler`` on the flow of `StepGuardBase`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Joinable

from distamp import device_utils
from distamp.callers import stacklevel_of_caller
from distamp.errors import CallOrderError, ConfigError
from distamp.grads import rescale_grads_
from distamp.guard.check_settings import CheckSettings
from distamp.guard.nonfinite_report import tensor_names
from distamp.guard.optimizer_history import clone_if_tensor
from distamp.guard.rank_sync import RankSync
from distamp.guard.step_guard import STATE_KEY, UNPICKLED, StepGuardBase, dynamo_disable
from distamp.optim_utils import OptimizerView, view_of
from distamp.process_group import GroupLike, check_group
from distamp.scaler.loss_scale import MAX_SCALE, MIN_SCALE, DynamicLossScale, LossScale, ScaleState
from distamp.scaler.scaler_state_dict import (
    ParsedState,
    loss_scale_state_dict,
    parse_state_dict,
    parse_torch_pickle,
)
from distamp.scaler.settings import ScalerSettings, as_number, make_loss_scale, resolve_device

__all__ = ["DistGradScaler"]


def _loss_scale_property(name: str) -> Any:
    """Return a property under torch's private name, which torch's own getters and setters use."""

    def getter(self: DistGradScaler) -> Any:
        return getattr(self._scaler_settings.loss_scale, name)

    def setter(self: DistGradScaler, value: float) -> None:
        loss_scale = self._scaler_settings.loss_scale.replace(**{name: value})
        self._scaler_settings = replace(self._scaler_settings, loss_scale=loss_scale)

    return property(getter, setter)


class DistGradScaler(StepGuardBase, torch.amp.GradScaler, Joinable):
    """A ``torch.amp.GradScaler`` with which all ranks take or skip each step together.

    Differs from ``torch.amp.GradScaler`` in that found-inf is reduced over ``process_group``, in
    one message for each ``unscale_`` or ``step``, for plain, fused, sharded and empty gradients.
    Differs from ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`` in that it does so
    for every optimizer and layout, and in the order of ``growth_factor`` and ``backoff_factor``.
    The scale always stays within ``[min_scale, max_scale]``. When it changes, gradients that no
    call checked in this iteration are multiplied by new / old, so that they are later divided by
    the scale that made them. Gradients that a call has checked belong to the user and do not
    change.

    Args:
        device: Device type of the loss scale, such as ``"cuda"``. None: the accelerator if there is
            one, else ``"cpu"``. If it is not available, the scaler warns and is disabled.
        init_scale: The first loss scale.
        growth_factor: Multiplies the scale after ``growth_interval`` clean iterations; > 1.
        backoff_factor: Multiplies the scale after an overflow; between 0 and 1.
        growth_interval: Clean iterations in a row before the scale grows.
        enabled: If False, nothing is scaled or guarded: ``step`` clips and skips by the norm, if
            asked to, and calls ``optimizer.step()``. It must be the same on all ranks of a group.
        process_group: The ranks that have a part of the model: a ProcessGroup, a DeviceMesh (all
            its dimensions as one group), or None for the default group if torch.distributed is
            initialised, else for this process only. Resolved at each message, not here.
        min_scale: The scale never falls below this.
        max_scale: The scale never rises above this.
        loss_scale: The rule that changes the scale, instead of the five settings above: a
            `LossScale` such as `DynamicLossScale` or `HysteresisLossScale`. The first value is
            still ``init_scale``.
        fp16_grads: The treatment of float16 gradients. ``"error"`` raises exactly where torch
            raises. ``"inplace"`` unscales them in place, as ShardedGradScaler does; values below
            6e-8 times the scale become zero. ``"master"`` unscales them in float32, into the
            optimizer's `MasterParameters`.
        max_consecutive_skips: Raise `LossScaleCollapseError` at this many skipped steps of one
            optimizer in a row.
        named_parameters: ``model.named_parameters()``, for names in `nonfinite_report` and in the
            log of skipped steps. Add ``model.named_buffers()``, and the log names buffers that are
            not finite. The scaler holds the tensors. Pass the tensors of the wrapped model, because
            FSDP2 replaces parameters.
        check_update: As in `StepGuard`.
        check_replicas_every: As in `StepGuard`.
        on_mismatch: As in `StepGuard`.

    Raises:
        ConfigError: A setting is outside its range (a ValueError, and an AssertionError as in
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

    Attributes:
        _scaler_settings: The rule of the loss scale, and further settings.
        _hysteresis_tracker: Overflows that the loss scale still forgives; a tensor from the first
            update on.
        _initial_scale: Scale and growth tracker as they were last set from outside. Later values
            follow from it equally on all ranks.
        _inv_scale_cache: The last loss scale on the host with its inverse, because a new tensor
            takes longer.
        _loss_was_scaled: Whether a loss was ever scaled on this rank, which the ranks compare.
        _scale_of_grads: The scale of the last scaled losses if an update has changed it since. An
            optimizer that is seen for the first time holds gradients of such losses.

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
        loss_scale: LossScale | None = None,
        fp16_grads: Literal["error", "inplace", "master"] = "error",
        max_consecutive_skips: int | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        check_update: bool = False,
        check_replicas_every: int | None = None,
        on_mismatch: Literal["raise", "warn"] = "raise",
    ) -> None:
        # torch's __init__ is not called: it warns about CUDA, and asserts on values that are
        # checked here.
        self._device, is_available = resolve_device(device)
        self._enabled = bool(enabled) and is_available
        if enabled and not is_available:
            warnings.warn(
                f"DistGradScaler is enabled, but {self._device} is not available.  Disabling.",
                stacklevel=stacklevel_of_caller(),
            )
        settings, scale, names = ScalerSettings(DynamicLossScale()), 1.0, tensor_names(None)
        if self._enabled:  # As in torch, the arguments of a disabled scaler are not checked.
            rule = make_loss_scale(
                growth_factor, backoff_factor, growth_interval, min_scale, max_scale, loss_scale
            )
            names = tensor_names(named_parameters)
            checks = CheckSettings(check_update, check_replicas_every, on_mismatch)
            settings = ScalerSettings(rule, fp16_grads, max_consecutive_skips, checks)
            scale = rule.checked_scale(init_scale)
        check_group(process_group)
        self._init_scaler(settings, scale, 0, RankSync(process_group, self._noun), names)

    def _init_scaler(
        self,
        settings: ScalerSettings,
        scale: float,
        growth_tracker: int,
        sync: RankSync,
        names: dict[Tensor, str],
    ) -> None:
        self._init_state(sync, settings.max_consecutive_skips, names, settings.checks)
        self._init_scale, self._init_growth_tracker = scale, growth_tracker
        self._scaler_settings = settings
        self._hysteresis_tracker: int | Tensor = settings.loss_scale.initial_hysteresis
        self._initial_scale = scale, growth_tracker
        self._inv_scale_cache = 0.0, torch.empty((), device="cpu")
        self._loss_was_scaled = False
        self._scale_of_grads: float | Tensor | None = None

    # -- scale -----------------------------------------------------------------------------------

    @dynamo_disable
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
            return self._scale_tensor(outputs)
        return _map_tensors(outputs, self._scale_tensor)

    def _scale_tensor(self, output: Tensor) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(output.device)
        scale, _ = self._check_scale_growth_tracker("scale")
        self._loss_was_scaled = True
        self._scale_of_grads = None
        if self._per_optimizer_states:
            self._drop_carried_over()
        for hook in self._comm_hooks:
            hook.on_scale(scale)
        if output.dtype is torch.float16:
            output = output.float()  # A scale of 65536 would overflow float16.
        if scale.device != output.device:
            scale = device_utils.to_device(scale, output.device)
        return output * scale

    # -- the loss scale of gradients ---------------------------------------------------------------

    def _grad_scale(self, call: str, optimizers: Any) -> Tensor:
        scale = self._scale
        return self._check_scale_growth_tracker(call)[0] if scale is None else scale

    def _inv_scale(self, scale: Tensor) -> Tensor:
        """Return 1 / scale as torch computes it: in float64, as float32 can be off by one bit."""
        value = scale.item() if scale.is_cpu else 0.0
        if not value:
            return scale.double().reciprocal().float()
        if self._inv_scale_cache[0] != value:
            inv_scale = torch.full((), 1.0 / value, dtype=torch.float32, device=scale.device)
            self._inv_scale_cache = value, inv_scale
        return self._inv_scale_cache[1]

    def _settings_fingerprint(self, scale: Tensor) -> tuple[str, tuple[float, int], bool]:
        if not self._sync.iteration:
            # Over a new group, or after a state was loaded, the ranks compare today's scale.
            self._initial_scale = scale.item(), self._get_growth_tracker()
        return self._scaler_settings.fingerprint, self._initial_scale, self._loss_was_scaled

    def _allows_fp16(self, check_only: bool) -> bool:
        return check_only or self._scaler_settings.fp16_grads == "inplace"

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        view: OptimizerView = self._optimizer_state(optimizer)["view"]
        _check_masters(optimizer, view, self._scaler_settings.fp16_grads)
        return view.unscale(inv_scale, found_inf, allow_fp16)

    # -- update ----------------------------------------------------------------------------------

    @dynamo_disable
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale by its rule, or set it, and begin the next iteration.

        Like ``torch.amp.GradScaler.update``, but the scale stays within its bounds, and gradients
        that no call checked in this iteration are multiplied by new / old.

        Collective: every rank of `process_group` must call this. It sends a
        message only after inf or NaN that all ranks found together on the host, and to replay a
        step.

        Args:
            new_scale: The new scale: a float, an int, or a tensor of one element.

        Raises:
            CallOrderError: No optimizer was checked since the last ``update``.
            ConfigError: ``new_scale`` is outside ``[min_scale, max_scale]`` or not one number.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        is_on_host = scale.is_cpu
        old_scale: float | Tensor = scale.item() if is_on_host else scale.clone()
        self._announce_update()
        with self._sync.errors_sent_later():
            self._check_flags_recorded(new_scale)
            if new_scale is not None:
                new_scale = self._scaler_settings.loss_scale.checked_scale(
                    as_number(new_scale), "new_scale"
                )
        if new_scale is None:
            self._update_scale(scale, growth_tracker, self._found_inf_flags())
        else:
            scale.fill_(new_scale)
            self._initial_scale = new_scale, self._initial_scale[1]
            self._sync.silent_call_hash += 1
        if not is_on_host or scale.item() != old_scale:
            self._rescale_unchecked_grads(scale, old_scale)
            if self._loss_was_scaled and self._scale_of_grads is None:
                self._scale_of_grads = old_scale
        self._end_iteration()

    def _update_scale(self, scale: Tensor, growth_tracker: Tensor, flags: Sequence[Tensor]) -> None:
        """Update the scale by its rule, from the found-inf flags of the iteration."""
        found_inf = flags[0]
        if len(flags) > 1 or found_inf.device != scale.device:
            flags = [device_utils.to_device(flag, scale.device) for flag in flags]
            found_inf = torch.stack(flags).amax()
        if not isinstance(self._hysteresis_tracker, Tensor):
            self._hysteresis_tracker = torch.full_like(growth_tracker, self._hysteresis_tracker)
        state = ScaleState(scale, growth_tracker, self._hysteresis_tracker)
        self._scaler_settings.loss_scale.update_(state, found_inf)

    def _rescale_unchecked_grads(self, scale: Tensor, old_scale: float | Tensor) -> None:
        """Multiply by new / old the gradients that no call of this iteration has checked."""
        checked: set[int] = set()
        unchecked: list[Tensor] = []
        for optimizer, _ in self._histories.live():
            params = view_of(optimizer).model_params()
            if self._was_checked(optimizer):
                checked.update(map(id, params))
            else:
                unchecked += params
        if unchecked:
            params = [param for param in unchecked if id(param) not in checked]
            rescale_grads_(params, scale / old_scale)

    def _rescale_first_grads(self, optimizer: Any) -> None:
        """Rescale the gradients of an optimizer that is seen for the first time.

        The update that changed the scale of its losses did not know the optimizer.
        """
        old_scale = self._scale_of_grads
        if old_scale is None or self._was_checked(optimizer):
            return
        base = view_of(optimizer).base
        # The gradients of other optimizers were rescaled, or belong to the user.
        rescaled: set[int] = set()
        for other, history in self._histories.live():
            if history.base_ref() is not base:
                rescaled.update(map(id, view_of(other).model_params()))
        scale, _ = self._scale_tensors()
        params = view_of(optimizer).model_params()
        rescale_grads_((p for p in params if id(p) not in rescaled), scale / old_scale)

    def _was_checked(self, optimizer: Any) -> bool:
        state = self._state_or_none(optimizer)
        return state is not None and bool(state["found_inf_per_device"])

    # -- uneven inputs ---------------------------------------------------------------------------

    @property
    def join_device(self) -> torch.device:
        """The device of the loss scale, for ``Join``."""
        return self._scale_tensors()[0].device

    def _join_state(self) -> Sequence[float]:
        scale, growth_tracker = self._scale_tensors()
        return scale.item(), growth_tracker.item(), int(self._hysteresis_tracker)

    def _load_join_state(self, values: Sequence[float]) -> None:
        if values:
            scale, growth_tracker, hysteresis = values
            rule = self._scaler_settings.loss_scale
            self._load_parsed(ParsedState(rule, scale, int(growth_tracker), int(hysteresis)))
        # update(new_scale) may have set the scale while other ranks had no inputs left.
        self._initial_scale = self._scale_tensors()[0].item(), self._get_growth_tracker()

    def _scale_text(self) -> str:
        scale = self._scale
        if scale is None:
            return f" at loss scale {self._init_scale:g}"
        if not device_utils.is_cpu(scale.device):  # A read would wait for the device.
            return f" with its loss scale on {scale.device}"
        return f" at loss scale {scale.item():g}"

    # -- torch's private names ---------------------------------------------------------------------

    def _scale_tensors(self) -> tuple[Tensor, Tensor]:
        if self._scale is None or self._growth_tracker is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return cast("Tensor", self._scale), cast("Tensor", self._growth_tracker)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        # The first call may come from validation; the tensors must be fit for training afterwards.
        with torch.inference_mode(False):
            state = ScaleState.initial(self._init_scale, self._init_growth_tracker, 1, dev)
        self._scale, self._growth_tracker = state.scale, state.growth_tracker

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        scale, tracker = self._scale, self._growth_tracker
        if scale is not None and tracker is not None:
            return scale, tracker
        # With other ranks, another one may hold the loss (the last stage of a pipeline). The first
        # message shows whether any rank called scale().
        if self._active_group(torch.device(self._device)) is not None:
            return self._scale_tensors()
        raise CallOrderError(
            f"Attempted {funcname} but _scale is None.  This may indicate your script did not "
            "use scaler.scale(loss or outputs) earlier in the iteration."
        )

    _growth_factor = _loss_scale_property("growth_factor")
    _backoff_factor = _loss_scale_property("backoff_factor")
    _growth_interval = _loss_scale_property("growth_interval")

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five keys, and one of ours: how the loss scale moves, and its memory.

        Numbers and strings. ``torch.amp.GradScaler`` loads it. Empty when disabled.
        """
        if not self._enabled:
            return {}
        rule_state = loss_scale_state_dict(
            self._scaler_settings.loss_scale, int(self._hysteresis_tracker)
        )
        return {**super().state_dict(), STATE_KEY: rule_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict()`` of this class, of torch's scaler or of Apex.

        With our key the kind of loss scale, its bounds and its memory are loaded too. A
        disabled scaler loads nothing, as in torch.

        Raises:
            CallOrderError: The dict is empty (torch raises RuntimeError).
            ConfigError: A value is outside its range; nothing is changed then.
        """
        if self._enabled:
            self._load_parsed(parse_state_dict(state_dict, self._scaler_settings.loss_scale))

    def _load_parsed(self, parsed: ParsedState) -> None:
        rule = parsed.loss_scale
        scale = self.get_scale() if parsed.scale is None else parsed.scale
        growth_tracker = parsed.growth_tracker
        if growth_tracker is None:
            growth_tracker = self._get_growth_tracker()
        if parsed.hysteresis_tracker is not None:
            if isinstance(self._hysteresis_tracker, Tensor):
                # A captured graph may hold this tensor, as it may hold the scale.
                self._hysteresis_tracker.fill_(parsed.hysteresis_tracker)
            else:
                self._hysteresis_tracker = parsed.hysteresis_tracker
        self._scaler_settings = replace(self._scaler_settings, loss_scale=rule)
        scale = min(max(scale, rule.min_scale), rule.max_scale)
        self._init_scale, self._init_growth_tracker = scale, growth_tracker
        self._scale_of_grads = None
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(scale)
            self._growth_tracker.fill_(growth_tracker)
        self._sync.reset_counters()

    def snapshot_state(self) -> dict[str, Any]:
        """See `distamp.observers.SnapshotSource`."""
        state = super().snapshot_state()
        state["hysteresis_tracker"] = self._hysteresis_tracker
        state["settings"] = self._scaler_settings
        state["init_scale"] = self._init_scale
        state["init_growth_tracker"] = self._init_growth_tracker
        state["initial_scale"] = self._initial_scale
        state["loss_was_scaled"] = self._loss_was_scaled
        state["scale_of_grads"] = clone_if_tensor(self._scale_of_grads)
        return state

    def load_snapshot_state(self, state: dict[str, Any]) -> None:
        """See `distamp.observers.SnapshotSource`."""
        super().load_snapshot_state(state)
        self._scaler_settings = state["settings"]
        self._init_scale = state["init_scale"]
        self._init_growth_tracker = state["init_growth_tracker"]
        self._initial_scale = state["initial_scale"]
        self._loss_was_scaled = state["loss_was_scaled"]
        self._scale_of_grads = state["scale_of_grads"]
        tracker = self._hysteresis_tracker
        hysteresis = state["hysteresis_tracker"]
        if isinstance(tracker, Tensor) and not isinstance(hysteresis, Tensor):
            # A captured graph may hold this tensor.
            tracker.fill_(hysteresis)
        else:
            self._hysteresis_tracker = hysteresis
        if state["scale"] is None and self._scale is not None:
            # No loss had been scaled yet.
            scale, growth_tracker = self._scale_tensors()
            scale.fill_(self._init_scale)
            growth_tracker.fill_(self._init_growth_tracker)

    def __getstate__(self) -> dict[str, Any]:
        if self._states_of_iteration():
            raise CallOrderError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        # Attributes that a subclass added are pickled, as with torch's class.
        state = dict(self.__dict__)
        if self._enabled:
            state["_init_scale"] = self.get_scale()
            state["_init_growth_tracker"] = self._get_growth_tracker()
        for name in (*UNPICKLED, *_UNPICKLED):
            del state[name]
        # A copy counts its own iterations.
        state["_sync"] = copy.deepcopy(self._sync)
        state["_hysteresis_tracker"] = int(self._hysteresis_tracker)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_scaler_settings" not in state:
            parsed = parse_torch_pickle(state)
            state = {
                **state,
                "_init_scale": parsed.scale,
                "_init_growth_tracker": parsed.growth_tracker,
                "_scaler_settings": ScalerSettings(parsed.loss_scale),
                "_sync": RankSync(None, self._noun),
                "_hysteresis_tracker": parsed.hysteresis_tracker,
            }
        self.__dict__.update(state)
        scale, growth_tracker = state["_init_scale"], state["_init_growth_tracker"]
        self._init_scaler(state["_scaler_settings"], scale, growth_tracker, state["_sync"], {})
        self._hysteresis_tracker = state["_hysteresis_tracker"]


#: Attributes beside those of `StepGuardBase` that a pickle leaves out.
_UNPICKLED = ("_initial_scale", "_inv_scale_cache", "_loss_was_scaled", "_scale_of_grads")


def _check_masters(optimizer: Any, view: OptimizerView, fp16_grads: str) -> None:
    """Refuse an optimizer with masters that contradict ``fp16_grads``.

    Raises:
        ConfigError: The optimizer has masters and the setting does not say so, or has float16
            parameters without masters although it does.
    """
    if view.has_masters == (fp16_grads == "master"):
        return
    name = type(optimizer).__name__
    if view.has_masters:
        raise ConfigError(
            f"{name} has master parameters and the scaler has fp16_grads={fp16_grads!r}. Make the "
            "scaler with fp16_grads='master', which unscales gradients into masters."
        )
    has_fp16 = any(param.dtype is torch.float16 for param in view.model_params())
    if has_fp16:
        raise ConfigError(
            f"The scaler has fp16_grads='master', and {name} holds float16 parameters without "
            "masters. Call MasterParameters(optimizer) before the first step."
        )


def _map_tensors(structure: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``function`` to every tensor, keeping lists, tuples, namedtuples and mappings.

    A read-only mapping becomes a dict. Other iterables become iterators, as in
    torch.amp.GradScaler.

    Raises:
        ValueError: A leaf is not a tensor.
    """
    if isinstance(structure, Tensor):
        return function(structure)
    if isinstance(structure, Mapping):
        items = {key: _map_tensors(value, function) for key, value in structure.items()}
        if type(structure) is dict or not isinstance(structure, MutableMapping):
            return items
        result = copy.copy(structure)
        result.update(items)
        return result
    if isinstance(structure, Iterable) and not isinstance(structure, (str, bytes)):
        mapped = (_map_tensors(value, function) for value in structure)
        if isinstance(structure, tuple) and hasattr(structure, "_fields"):
            return type(structure)(*mapped)
        if isinstance(structure, (list, tuple)):
            return type(structure)(mapped)
        return mapped
    raise ValueError(
        "outputs must be a Tensor or an iterable of Tensors, not "
        f"{type(structure).__name__} ({structure!r:.80})"
    )
