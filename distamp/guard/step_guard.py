"""StepGuard: steps taken together where nothing scales the loss."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import _refresh_per_optimizer_state
from torch.distributed.algorithms.join import Joinable

from distamp import host
from distamp.errors import CallOrderError, ConfigError, NonFiniteGradientsError
from distamp.gradients import flag_of, local_gradients, power_of
from distamp.groups import GroupLike, check_group
from distamp.guard.asked import Guard
from distamp.guard.kernels import refuse_mps
from distamp.guard.overflow import names_of
from distamp.guard.ranks import Flag, Ranks
from distamp.guard.steps import Steps, checked_limit, outside_the_graph
from distamp.optimizers import parameters_of, unwrapped
from distamp.sources import source_of

__all__ = ["GUARD_SETTINGS", "OLD_STATE_KEY", "STATE_KEY", "StepGuard", "read_own_state"]

#: The key of our part of a guard's or scaler's state, and the key that states had before 0.1.0.
STATE_KEY = "distamp"
OLD_STATE_KEY = "distamp_guard"


def read_own_state(state: Mapping[str, Any]) -> Any:
    """Return our part of a guard's or scaler's state, or None if it has none.

    The first development version wrote the settings one level deeper, under ``"schedule"``.
    """
    own_state = state.get(STATE_KEY, state.get(OLD_STATE_KEY))
    if isinstance(own_state, Mapping) and isinstance(own_state.get("schedule"), Mapping):
        return {"version": own_state.get("version"), **own_state["schedule"]}
    return own_state


class StepGuard(Steps):
    """Takes each step on all ranks or on none, in bf16, fp32 and fp8, where no loss is scaled.

    Differs from ``torch.amp.GradScaler`` in that it has no scale, and is none of it: it has all the
    methods of `distamp.DistGradScaler`, so that a training loop is the same in every precision. A
    step is skipped on every rank where any rank has inf or NaN in a gradient; weights, optimizer
    state and step counters then stay as they were. Plain optimizers read the flag on the host once;
    fused ones get it as ``found_inf`` and wait for nothing.

    Args:
        process_group: The ranks that have a part of the model, as for `distamp.DistGradScaler`.
        max_consecutive_skips: Raise `distamp.errors.NonFiniteGradientsError` at this many skipped
            steps of one optimizer in a row.
        named_parameters: ``model.named_parameters()``, for names in `nonfinite_report` and in the
            log of skipped steps; add ``model.named_buffers()``, and that log names those which are
            not finite. They are held: give those of the wrapped model, for FSDP2 replaces them.

    Raises:
        ConfigError: ``max_consecutive_skips`` is no integer >= 1.
        TypeError: ``process_group`` has another type.

    Example::

        guard = StepGuard()
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_fn(model(inputs), targets).backward()
            guard.step(optimizer)
            guard.update()
            if guard.step_was_taken(optimizer):
                schedule.step()

    The first rank of the group logs skipped steps at INFO, as ``distamp.guard``.

    Source: torchtitan's finite check of gradients, which ends the process; OLMo-core's
    SkipStepOptimizer, which skips by the norm.
    """

    _divides = False
    _noun = "guard"
    _logger = "distamp.guard"
    _collapse = NonFiniteGradientsError

    def __init__(
        self,
        process_group: GroupLike = None,
        max_consecutive_skips: int | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        names = names_of(named_parameters)
        check_group(process_group)
        self._start(Ranks(process_group, self._noun), checked_limit(max_consecutive_skips))
        self._guard.names = names

    def _start(self, ranks: Ranks, limit: int | None) -> None:
        Joinable.__init__(self)
        self._enabled = True
        # What trainers read of a scaler: a scale of 1, where the first optimizer's gradients lie.
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._guard = Guard(ranks, limit)

    # -- a scaler's methods ------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs``: nothing is scaled."""
        return outputs

    def get_scale(self) -> float:
        """Return 1.0."""
        return 1.0

    def is_enabled(self) -> bool:
        """Return True: it guards."""
        return True

    @outside_the_graph
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Begin the next iteration.

        Collective: every rank of `process_group` must call this. It sends a
        message only after inf or NaN that all ranks found together on the host, and to replay a
        step.

        Args:
            new_scale: Only for loops that are written for a scaler; 1.0.

        Raises:
            CallOrderError: No optimizer was looked at since the last ``update``.
            ConfigError: Another ``new_scale`` than 1.
        """
        self._announce_update()
        with self._guard.ranks.errors_sent_later():
            if new_scale is not None and float(new_scale) != 1.0:
                raise ConfigError(
                    f"a StepGuard scales nothing: new_scale is 1.0, not {new_scale!r}"
                )
            self._check_flags(new_scale)
        self._flags()
        self._end_iteration()

    @property
    def join_device(self) -> torch.device:
        """Where the first optimizer's gradients lie, or will, for ``Join``."""
        return torch.device(self._device) if self._scale is None else self._scale.device

    # -- what it divides by ------------------------------------------------------------------------

    def _divisor(self, call: str, given: Any) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(_device_of(given))
            assert self._scale is not None
        return self._scale

    def _inverse(self, divisor: Tensor) -> Tensor:
        return divisor

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        source = source_of(optimizer)
        if source.casts or host.is_host(found_inf.device):
            return source.unscale(inv_scale, found_inf, allow_fp16)
        # Nothing is divided: on a device a norm only reads.
        gradients = local_gradients(source.parameters())
        if not gradients:
            return {}
        power = power_of(gradients, 2.0, found_inf.device)
        return {found_inf.device: found_inf.copy_(power.isfinite().logical_not())}

    def _compared(self, divisor: Tensor) -> tuple[str, tuple[float, int], bool]:
        return f"class=StepGuard\nmax_consecutive_skips={self._guard.limit}", (1.0, 0), True

    def _allows_fp16(self, only_check: bool) -> bool:
        return True

    def _step_with_scaler(
        self, optimizer: Any, flag: Flag, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Step an optimizer of torch's older protocol, which has nothing to unscale here."""
        return None if bool(flag) else optimizer.step(*args, **kwargs)

    # -- what trainers read of a scaler ------------------------------------------------------------

    @property
    def _device(self) -> str:
        if self._scale is not None:
            return self._scale.device.type
        there = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if there is None else there.type

    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        refuse_mps(dev)
        with torch.inference_mode(False):
            self._scale = flag_of(True, dev)
            self._growth_tracker = torch.zeros((), dtype=torch.int32, device=dev)

    def get_growth_factor(self) -> float:
        """Return 1.0: nothing grows."""
        return 1.0

    def get_backoff_factor(self) -> float:
        """Return 1.0: nothing backs off."""
        return 1.0

    def get_growth_interval(self) -> int:
        """Return 1."""
        return 1

    def set_growth_factor(self, new_factor: float) -> None:
        """Do nothing, for trainers that set it on any scaler."""

    def set_backoff_factor(self, new_factor: float) -> None:
        """Do nothing, for trainers that set it on any scaler."""

    def set_growth_interval(self, new_interval: int) -> None:
        """Do nothing, for trainers that set it on any scaler."""

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers under one key of ours; a scaler that loads it keeps its scale."""
        return {STATE_KEY: {"version": 1}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; of a scaler's state nothing is taken.

        Raises:
            ConfigError: It is no dict, or was written by another version.
        """
        if not isinstance(state_dict, Mapping):
            raise ConfigError(
                f"a guard's state is the dict that guard.state_dict() returned, not "
                f"{state_dict!r:.80}"
            )
        own = read_own_state(state_dict)
        if own is not None and (not isinstance(own, Mapping) or own.get("version") != 1):
            raise ConfigError(
                f"the guard's state was written by another version of distamp ({own!r:.80}); this "
                "one reads version 1"
            )
        self._guard.ranks.restart()

    def __getstate__(self) -> dict[str, Any]:
        if self._per_optimizer_states:
            raise CallOrderError(
                "A StepGuard instance may only be pickled at the beginning of an iteration, or at "
                "the end after guard.update()."
            )
        # Attributes that a subclass added go along, as with torch's class.
        state = dict(self.__dict__)
        for name in ("_scale", "_growth_tracker", "_per_optimizer_states"):
            del state[name]
        state["_guard"] = copy.deepcopy(self._guard.ranks), self._guard.limit
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        ranks, limit = state["_guard"]
        self.__dict__.update(state)
        self._start(ranks, limit)


def _device_of(given: Any) -> torch.device:
    """Return where the first tensor lies of an optimizer, of several, or of parameters."""
    several = given if isinstance(given, (list, tuple)) else [given]
    for each in several:
        if isinstance(each, Tensor):
            return each.device
        optimizer = unwrapped(each)
        for parameter in parameters_of(optimizer) if hasattr(optimizer, "param_groups") else ():
            if isinstance(parameter, Tensor):
                return parameter.device
    return torch.device("cpu")


#: What a guard can be given, which a scaler takes too.
GUARD_SETTINGS = tuple(inspect.signature(StepGuard).parameters)
