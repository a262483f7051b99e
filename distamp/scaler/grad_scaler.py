"""DistGradScaler: torch's surface, and the flow of each call."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.amp.grad_scaler import _refresh_per_optimizer_state
from torch.distributed.algorithms.join import Joinable

from distamp import host
from distamp.callers import stacklevel_of_caller
from distamp.errors import CallOrderError
from distamp.gradients import carry_over
from distamp.groups import GroupLike, check_group
from distamp.guard.asked import Guard
from distamp.guard.overflow import names_of
from distamp.guard.ranks import Ranks
from distamp.guard.step_guard import STATE_KEY
from distamp.guard.steps import Steps, outside_the_graph
from distamp.optimizers import innermost
from distamp.scaler import settings
from distamp.scaler.checkpoint import Saved, from_torch, read_state, write_loss_scale
from distamp.scaler.loss_scale import MAX_SCALE, MIN_SCALE, DynamicLossScale, LossScale, ScaleState
from distamp.scaler.outputs import map_tensors
from distamp.scaler.settings import Settings
from distamp.sources import source_of

__all__ = ["DistGradScaler"]


def _loss_scale_property(name: str) -> Any:
    """Return a property under torch's private name, which torch's own getters and setters use."""

    def change(self: DistGradScaler, value: float) -> None:
        own = self._distamp
        loss_scale = own.settings.loss_scale.replace(**{name: value})
        own.settings = replace(own.settings, loss_scale=loss_scale)

    return property(lambda self: getattr(self._distamp.settings.loss_scale, name), change)


class _Own:
    """State of a scaler between its calls, in addition to its guard and torch's attributes."""

    __slots__ = ("begun", "hysteresis", "inverse", "scale_of_grads", "scaled", "settings")

    def __init__(self, given: Settings, begun: tuple[float, int]) -> None:
        self.settings = given
        # Scale and growth tracker as last set from outside; what follows, all ranks do alike.
        self.begun = begun
        # The credit of a loss scale that forgives overflows; a tensor from the first update on.
        self.hysteresis: int | Tensor = given.loss_scale.initial_hysteresis
        # A scale on the host and its inverse: it moves seldom, and a tensor costs time.
        self.inverse: tuple[float, Tensor] = (0.0, torch.empty((), device="cpu"))
        # Whether a loss was ever scaled here: ranks tell each other.
        self.scaled = False
        # The scale of the last scaled losses, if an update has changed it since. An optimizer that
        # is seen for the first time holds gradients of those losses.
        self.scale_of_grads: float | Tensor | None = None


class DistGradScaler(Steps, torch.amp.GradScaler, Joinable):
    """A ``torch.amp.GradScaler`` with which all ranks take or skip each step together.

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
        fp16_grads: What to do with float16 gradients. ``"error"`` raises exactly where torch
            raises. ``"inplace"`` unscales them in place, as ShardedGradScaler does; values below
            6e-8 times the scale become zero. ``"master"`` unscales them in float32, into the
            optimizer's `MasterParameters`.
        max_consecutive_skips: Raise `LossScaleCollapseError` at this many skipped steps of one
            optimizer in a row.
        named_parameters: ``model.named_parameters()``, for names in `nonfinite_report` and in the
            log of skipped steps; add ``model.named_buffers()``, and that log names those which are
            not finite. They are held: give those of the wrapped model, for FSDP2 replaces them.

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
        given, scale, names = Settings(DynamicLossScale()), 1.0, names_of(None)
        if self._enabled:  # what is off need not be right, as in torch
            rule = settings.resolve_loss_scale(
                growth_factor, backoff_factor, growth_interval, min_scale, max_scale, loss_scale
            )
            names = names_of(named_parameters)
            given = Settings(rule, fp16_grads, max_consecutive_skips)
            scale = rule.checked_scale(init_scale)
        check_group(process_group)
        self._start(given, scale, 0, Ranks(process_group, self._noun))
        self._guard.names = names

    def _start(self, given: Settings, scale: float, tracker: int, ranks: Ranks) -> None:
        self._init_scale, self._init_growth_tracker = scale, tracker
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._distamp = _Own(given, (scale, tracker))
        self._guard = Guard(ranks, given.max_consecutive_skips)

    # -- scale -----------------------------------------------------------------------------------

    @outside_the_graph
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
        guard, scale = self._guard, self._scale
        if scale is None:
            self._lazy_init_scale_growth_tracker(output.device)
            scale, _ = self._check_scale_growth_tracker("scale")
        self._distamp.scaled = True
        self._distamp.scale_of_grads = None
        guard.kept.clear()
        for hook in guard.hooks:
            hook.scale_changed(scale)
        if output.dtype is torch.float16:
            output = output.float()  # A scale of 65536 would overflow float16.
        if scale.device != output.device:
            scale = host.moved(scale, output.device)
        return output * scale

    # -- what divides gradients ------------------------------------------------------------------

    def _divisor(self, call: str, given: Any) -> Tensor:
        scale = self._scale
        return self._check_scale_growth_tracker(call)[0] if scale is None else scale

    def _inverse(self, divisor: Tensor) -> Tensor:
        """Return 1 / scale as torch computes it: in float64, as float32 can be off by one bit."""
        if divisor.is_cpu and (value := divisor.item()):
            own = self._distamp
            if own.inverse[0] != value:
                inverse = torch.full((), 1.0 / value, dtype=torch.float32, device=divisor.device)
                own.inverse = (value, inverse)
            return own.inverse[1]
        return divisor.double().reciprocal().float()

    def _compared(self, divisor: Tensor) -> tuple[str, tuple[float, int], bool]:
        own = self._distamp
        if not self._guard.ranks.iteration:
            # Over a new group, or with a loaded state: the ranks compare how things stand.
            own.begun = (divisor.item(), self._get_growth_tracker())
        return own.settings.text, own.begun, own.scaled

    def _allows_fp16(self, only_check: bool) -> bool:
        return only_check or self._distamp.settings.fp16_grads == "inplace"

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

    # -- update ----------------------------------------------------------------------------------

    @outside_the_graph
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale by its rule, or set it, and begin the next iteration.

        Like ``torch.amp.GradScaler.update``, but the scale stays within its bounds, and gradients
        that no call looked at in this iteration are multiplied by new / old.

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
        own = self._distamp
        scale, tracker = self._check_scale_growth_tracker("update")
        on_host = scale.is_cpu
        before: float | Tensor = scale.item() if on_host else scale.clone()
        value = 0.0
        self._announce_update()
        with self._guard.ranks.errors_sent_later():
            self._check_flags(new_scale)
            if new_scale is not None:
                rule, number = own.settings.loss_scale, settings.one_number(new_scale)
                value = rule.checked_scale(number, "new_scale")
        if new_scale is None:
            flags = self._flags()
            found_inf = flags[0]
            if len(flags) > 1 or found_inf.device != scale.device:
                found_inf = torch.stack([host.moved(flag, scale.device) for flag in flags]).amax()
            if not isinstance(own.hysteresis, Tensor):
                own.hysteresis = torch.full_like(tracker, own.hysteresis)
            own.settings.loss_scale.advance_(ScaleState(scale, tracker, own.hysteresis), found_inf)
        else:
            scale.fill_(value)
            own.begun = (value, own.begun[1])
            self._guard.ranks.steps += 1
        if not on_host or scale.item() != before:
            self._carry_over(scale, before)
            if own.scaled and own.scale_of_grads is None:
                own.scale_of_grads = before
        self._end_iteration()

    def _carry_over(self, scale: Tensor, before: float | Tensor) -> None:
        """Multiply gradients that no call of this iteration saw by the change of the scale."""
        known = [optimizer for optimizer, _ in self._guard.optimizers.live()]
        waiting = [optimizer for optimizer in known if not self._was_looked_at(optimizer)]
        if waiting:
            looked_at = [o for o in known if self._was_looked_at(o)]
            theirs = {id(p) for o in looked_at for p in source_of(o).parameters()}
            parameters = (p for o in waiting for p in source_of(o).parameters())
            carry_over((p for p in parameters if id(p) not in theirs), scale / before)

    def _carry_over_first_gradients(self, optimizer: Any) -> None:
        before = self._distamp.scale_of_grads
        if before is None or self._was_looked_at(optimizer):
            return
        # The gradients of other optimizers that were seen are carried over, or the user's, already.
        settled: set[int] = set()
        for other, state in self._guard.optimizers.live():
            if state.inside() is not innermost(optimizer):
                settled.update(map(id, source_of(other).parameters()))
        scale, _ = self._tensors()
        waiting = [p for p in source_of(optimizer).parameters() if id(p) not in settled]
        carry_over(waiting, scale / before)

    def _was_looked_at(self, optimizer: Any) -> bool:
        record = self._record_of(optimizer)
        return record is not None and bool(record["found_inf_per_device"])

    # -- uneven inputs ---------------------------------------------------------------------------

    @property
    def join_device(self) -> torch.device:
        """The device of the loss scale, for ``Join``."""
        return self._tensors()[0].device

    def _remembered(self) -> Sequence[float]:
        scale, tracker = self._tensors()
        return scale.item(), tracker.item(), int(self._distamp.hysteresis)

    def _has_joined(self, remembered: Sequence[float]) -> None:
        if remembered:
            scale, tracker, hysteresis = remembered
            self._load(
                Saved(self._distamp.settings.loss_scale, scale, int(tracker), int(hysteresis))
            )
        # update(new_scale) may have set it where others had no inputs left.
        self._distamp.begun = (self._tensors()[0].item(), self._get_growth_tracker())

    def _scale_text(self) -> str:
        scale = self._scale
        if scale is None:
            return f" at loss scale {self._init_scale:g}"
        if not host.is_host(scale.device):  # a read would synchronise
            return f" with its loss scale on {scale.device}"
        return f" at loss scale {scale.item():g}"

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
        own = self._distamp
        ours = write_loss_scale(own.settings.loss_scale, int(own.hysteresis))
        return {**super().state_dict(), STATE_KEY: ours}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict()`` of this class, of torch's scaler or of Apex.

        With our key the kind of loss scale, its bounds and its memory are loaded too. A
        disabled scaler loads nothing, as in torch.

        Raises:
            CallOrderError: The dict is empty (torch raises RuntimeError).
            ConfigError: A value is outside its range; nothing is changed then.
        """
        if self._enabled:
            self._load(read_state(state_dict, self._distamp.settings.loss_scale))

    def _load(self, saved: Saved) -> None:
        own, rule = self._distamp, saved.loss_scale
        own.scale_of_grads = None
        own.settings = replace(own.settings, loss_scale=rule)
        scale = self.get_scale() if saved.scale is None else saved.scale
        tracker = self._get_growth_tracker() if saved.tracker is None else saved.tracker
        scale = min(max(scale, rule.min_scale), rule.max_scale)
        self._init_scale, self._init_growth_tracker = scale, tracker
        own.hysteresis = own.hysteresis if saved.hysteresis is None else saved.hysteresis
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(scale)
            self._growth_tracker.fill_(tracker)
        self._guard.ranks.restart()

    def __getstate__(self) -> dict[str, Any]:
        own = self._distamp
        if self._per_optimizer_states:
            raise CallOrderError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        # What a subclass added goes along, as with torch's class.
        state = dict(self.__dict__)
        if self._enabled:
            state["_init_scale"] = self.get_scale()
            state["_init_growth_tracker"] = self._get_growth_tracker()
        ranks = copy.deepcopy(self._guard.ranks)  # a copy counts its own iterations
        state["_distamp"] = own.settings, int(own.hysteresis), ranks
        for name in ("_scale", "_growth_tracker", "_per_optimizer_states", "_guard"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        Joinable.__init__(self)
        if "_distamp" not in state:
            torchs = from_torch(state)
            ours = Settings(torchs.loss_scale), torchs.hysteresis, Ranks(None, self._noun)
            tracker = {"_init_scale": torchs.scale, "_init_growth_tracker": torchs.tracker}
            state = {**state, **tracker, "_distamp": ours}
        self.__dict__.update(state)
        given, hysteresis, ranks = state["_distamp"]
        self._start(given, self._init_scale, self._init_growth_tracker, ranks)
        self._distamp.hysteresis = hysteresis
