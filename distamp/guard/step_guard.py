"""`StepGuardBase`: the flow of a step that all ranks take or skip together; and `StepGuard`.

Read `StepGuardBase.step` first. It checks this rank's gradients, all-reduces found-inf or a norm in
one message (`distamp.guard.rank_sync`), and steps or skips by the decision of all ranks. The
subclass `distamp.DistGradScaler` adds a loss scale; `StepGuard` has none.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig

from distamp import device_utils
from distamp.callers import stacklevel_of_caller
from distamp.clip_grad import (
    ClipTargets,
    GradShare,
    LayoutFn,
    LocalNorm,
    NormLimits,
    StepDecision,
    any_found_inf,
    as_found_inf_tensor,
    check_positive,
    clip_grads_with_norm_,
    is_optimizer,
    layout_text,
    local_norm,
    nan_if_found_inf,
    replica_mismatch,
    select_targets,
    select_unscaled_optimizers,
    total_norm,
    total_norm_of_ranks,
)
from distamp.error_text import count_text, ranks_text
from distamp.errors import (
    CallOrderError,
    ConfigError,
    LossScaleCollapseError,
    NonFiniteGradientsError,
    ReplicaMismatchError,
)
from distamp.grads import found_inf_tensor, norm_power
from distamp.guard import fused, uneven_inputs
from distamp.guard.check_settings import NO_CHECKS, CheckSettings
from distamp.guard.nonfinite_report import (
    GradOverflow,
    NonFiniteReport,
    find_overflows,
    first_bad_name,
    named_grad_tensors,
    tensor_names,
)
from distamp.guard.optimizer_history import (
    OptimizerHistories,
    OptimizerHistory,
    StepCounts,
    clone_if_tensor,
)
from distamp.guard.rank_sync import (
    CallFingerprint,
    Exchange,
    MissingGrads,
    RankSync,
    StateCheck,
    digest_modulus,
)
from distamp.guard.replica_check import ReplicaCheck, ReplicaComparison
from distamp.guard.skip_log import (
    SkipRecord,
    guard_log_level,
    log_norm_skip,
    log_requested_skip,
    log_scale_search,
    log_skip,
    scaler_log_level,
)
from distamp.guard.unscaled_clip import clip_grad_norm_, measure_unscaled
from distamp.guard.update_check import UpdateCheck
from distamp.guard.weights import (
    nonfinite_state_error,
    nonfinite_state_names,
    nonfinite_weight_names,
    nonfinite_weights_error,
)
from distamp.observers import CommHookObserver, ReplayObserver
from distamp.optim_utils import (
    describe_optimizer,
    find_closure,
    params_of,
    unwrap_optimizer,
    view_of,
)
from distamp.process_group import GroupLike, MessageGroup, all_gather_rows, check_group

__all__ = [
    "GUARD_KWARGS",
    "OLD_STATE_KEY",
    "STATE_KEY",
    "UNPICKLED",
    "StepGuard",
    "StepGuardBase",
    "check_skip_limit",
    "dynamo_disable",
    "read_own_state",
]

_F = TypeVar("_F", bound=Callable[..., Any])

#: The key of our part of a guard's or scaler's state, and the key that states had before 0.1.0.
STATE_KEY = "distamp"
OLD_STATE_KEY = "distamp_guard"

#: Attributes that `StepGuardBase._init_state` creates, and that a pickle leaves out.
UNPICKLED = (
    "_scale",
    "_growth_tracker",
    "_per_optimizer_states",
    "_sync",
    "_histories",
    "_tensor_names",
    "_comm_hooks",
    "_replay",
    "_total_norm",
    "_skipped_scale",
    "_update_check",
    "_replica_check",
)
_CPU = torch.device("cpu")
#: The number of ranks that log one skip at most, if ranks know how many overflowed, and not which.
_MAX_LOGGING_RANKS = 8
_is_compiling = torch.compiler.is_dynamo_compiling


def dynamo_disable(method: _F) -> _F:
    """Run a method between two graphs of torch.compile, which would drop its hooks."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return torch._compile._disable_dynamo(method)(*args, **kwargs)
        return method(*args, **kwargs)

    return cast("_F", call)


def check_skip_limit(limit: Any) -> int | None:
    """Return the limit on skipped steps in a row.

    Raises:
        ConfigError: The limit is no integer >= 1.
    """
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ConfigError(f"max_consecutive_skips must be an integer >= 1 or None, not {limit!r}.")
    return limit


class _StepOutcome(NamedTuple):
    """A step that was taken or skipped, until the host can count it.

    Args:
        optimizer: The optimizer that has the parameters.
        history: Its history.
        decision: The decision of all ranks.
        scale: The loss scale.
        grads_unchanged: Whether the gradients still are those of this step, so that a search can
            find the parameter; false if the host counts the step late.
        overflow_ranks: The ranks that found inf or NaN, if the host knows them.
        bad_names: For each such rank the name of its first bad parameter, if known.
        local_found_inf: Whether this rank found inf or NaN, if the host does not know the ranks.
        num_overflow_ranks: The number of ranks that did, if the host does not know the ranks; 0 if
            the number is unknown, too.
        bad_weights: Pairs of a rank and the name of a weight with inf or NaN, if the ranks sent
            them.
    """

    optimizer: Any
    history: OptimizerHistory
    decision: StepDecision
    scale: float | Tensor
    grads_unchanged: bool
    overflow_ranks: tuple[int, ...] | None
    bad_names: tuple[str, ...]
    local_found_inf: bool | Tensor | None
    num_overflow_ranks: float | Tensor
    bad_weights: tuple[tuple[int, str], ...]


class StepGuardBase(Joinable):
    """The methods of `StepGuard` and `distamp.DistGradScaler`.

    The state of an iteration is torch's dict ``_per_optimizer_states``, in which trainers pop,
    replace and write entries. In addition to torch's keys ``"stage"`` and
    ``"found_inf_per_device"`` an entry has these keys. They are read with ``get`` where another
    program may have made the entry:

    ====================  ==========================================================================
    key                   value
    ====================  ==========================================================================
    ``optimizer``         The optimizer as the user passed it last.
    ``view``              Its `OptimizerView`, with the parameters and gradients.
    ``history``           Its `OptimizerHistory`, once a message has been prepared.
    ``synced``            Whether the found-inf flags were all-reduced.
    ``overflow_ranks``    The ranks that found inf or NaN, if the host knows them.
    ``bad_names``         For each such rank the name of its first bad parameter, if known.
    ``local_found_inf``   This rank's flag, if the flags were reduced on a device.
    ``num_overflow_ranks``  The number of ranks with such a flag, in the same case.
    ``bad_weights``       Pairs of a rank and the name of a weight with inf or NaN, if the host
                          learned of inf or NaN in gradients in the message.
    ``missing_grads``     Whether the optimizer has no gradients (`MissingGrads`).
    ``is_fused``          Whether the kernel of its ``step`` takes found-inf; set for a step.
    ``kernel_unscales``   Whether that kernel unscales, too; set for a step.
    ``step_is_silent``    Whether ``step`` sends no message, because an earlier call has sent it.
    ``skip_if``           Whether this rank requests a skip of the step; set for a step.
    ``skip_requested``    Whether a rank requests it, from the last message about the optimizer.
    ``carried_over``      Whether the gradients were unscaled before the last ``update`` and not
                          stepped, while another optimizer was. ``step`` steps them, ``unscale_``
                          unscales them again, and ``scale`` drops the entry.
    ====================  ==========================================================================

    Attributes:
        _sync: The messages to the other ranks.
        _histories: The histories of the optimizers that were seen.
        _max_consecutive_skips: The limit on skipped steps in a row.
        _tensor_names: Names of parameters and buffers, for logs and reports.
        _comm_hooks: Communication hooks that follow the loss scale and skipped steps.
        _replay: A replay of skipped steps, if one is attached.
        _total_norm: The norm that was measured last, over one or several optimizers.
        _skipped_scale: The loss scale of the last skipped step, for a report after ``update``.
        _check_settings: The checks of weights and replicas.
        _update_check: The check of the weights that steps write; None without ``check_update``.
        _replica_check: The comparison of replicas.
    """

    #: Whether gradients are divided by a loss scale.
    _has_loss_scale = True
    #: The noun of this object in messages.
    _noun = "scaler"
    _logger_name = "distamp.scaler"
    _skip_limit_error: type[NonFiniteGradientsError] = LossScaleCollapseError

    _enabled: bool
    _scale: Tensor | None
    get_scale: Callable[[], float]
    _per_optimizer_states: dict[int, dict[str, Any]]

    def _init_state(
        self,
        sync: RankSync,
        max_consecutive_skips: int | None,
        names: dict[Tensor, str],
        check_settings: CheckSettings,
    ) -> None:
        """Create the state between calls, of a new object or one that was unpickled."""
        Joinable.__init__(self)
        self._scale = None
        self._growth_tracker: Tensor | None = None
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._sync = sync
        self._histories = OptimizerHistories()
        self._max_consecutive_skips = max_consecutive_skips
        self._tensor_names = names
        self._comm_hooks: list[CommHookObserver] = []
        self._replay: ReplayObserver | None = None
        self._total_norm: float | Tensor | None = None
        self._skipped_scale: float | None = None
        self._check_settings = check_settings
        self._update_check: UpdateCheck | None = None
        if check_settings.check_update:
            self._update_check = UpdateCheck(names)
        self._replica_check = ReplicaCheck(
            check_settings.check_replicas_every,
            check_settings.on_mismatch == "warn",
            self._logger_name,
            lambda: [optimizer for optimizer, _ in self._histories.live()],
            names,
            lambda value, group: self._sync.all_gather(value, group),
        )
        self._attach_checks()

    def _attach_checks(self) -> None:
        """Let the checks take part in the messages."""
        checks: list[StateCheck] = []
        if self._update_check is not None:
            checks.append(self._update_check)
        checks.append(self._replica_check)
        self._sync.state_checks = checks

    # -- defined by the subclasses -----------------------------------------------------------------

    def _grad_scale(self, call: str, optimizers: Any) -> Tensor:
        """Return the loss scale of the gradients, 0-d float32, on the device of the flags."""
        raise NotImplementedError

    def _inv_scale(self, scale: Tensor) -> Tensor:
        """Return 1 / scale, 0-d float32."""
        raise NotImplementedError

    def _settings_fingerprint(self, scale: Tensor) -> tuple[str, tuple[float, int], bool]:
        """Return ``settings``, ``initial_scale`` and ``loss_was_scaled`` of `CallFingerprint`."""
        raise NotImplementedError

    def _allows_fp16(self, check_only: bool) -> bool:
        """Return whether float16 gradients may be unscaled in place."""
        raise NotImplementedError

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        raise NotImplementedError

    def _rescale_first_grads(self, optimizer: Any) -> None:
        """Rescale the gradients of an optimizer that is seen for the first time."""

    def _scale_text(self) -> str:
        """Return the loss scale for `__repr__`, after a space; empty without one."""
        return ""

    # -- step --------------------------------------------------------------------------------------

    @dynamo_disable
    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        max_norm: float | None = None,
        skip_norm_above: float | Tensor | None = None,
        skip_if: bool | Tensor | None = None,
        is_replicated_fn: LayoutFn | None = None,
        shard_group_fn: LayoutFn | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step the optimizer if no rank found inf or NaN, else skip on every rank.

        Collective: every rank of `process_group` must call this.

        Like ``torch.amp.GradScaler.step``; sends the message if ``unscale_`` has not.

        Args:
            optimizer: The optimizer to step.
            args: Passed to ``optimizer.step``; no closure, as in torch.
            max_norm: Clip to this norm of the whole model first, as `clip_grad_norm_` does; >= 0.
                Norm, flag and clip are one message, and a fused kernel clips as it steps, so its
                gradients are clipped only after the step.
            skip_norm_above: Skip the step on all ranks if the norm is larger: a float or a 0-d
                tensor, the same on every rank. Such skips have a count of their own, and do not
                count towards the limit of skips. Gradients of such a step are not clipped.
            skip_if: A bool or a 0-d tensor of this rank, such as whether its loss is a spike. If it
                is true on any rank, the step is skipped on all. Such skips have a count of their
                own, and do not count towards the limit of skips. It is part of the message of the
                step. After ``unscale_`` or ``clip_grad_norm_`` there is no such message, so all
                ranks pass ``skip_if`` or none does, and one message more is sent.
            is_replicated_fn: As in `clip_grad_norm_`, for the norm of ``max_norm`` and
                ``skip_norm_above``.
            shard_group_fn: As in `clip_grad_norm_`, for the same norm.
            kwargs: Passed to ``optimizer.step``; no closure, as in torch.

        Returns:
            The result of ``optimizer.step``; None for a skipped step.

        Raises:
            CallOrderError: A second ``step`` before ``update``, also after one that raised inside
                of ``optimizer.step``; or a closure.
            TypeError: The optimizer's own ``step`` takes an argument of the same name as one of
                the five above; or ``skip_if`` is no bool or tensor.
            ConfigError: ``max_norm`` or ``skip_norm_above`` is out of range, or ``skip_if`` has
                several elements.
            NonFiniteWeightsError: The step was skipped because weights of the model have inf or
                NaN; or with ``check_update`` the last step wrote them. On a device the error is
                raised at the latest one call later.
            NonFiniteGradientsError: ``max_consecutive_skips`` was reached; a scaler raises its
                subclass `LossScaleCollapseError`.
            ValueError, GradientError, RankMismatchError: As for `unscale_`.
        """
        limits = NormLimits(max_norm, skip_norm_above, is_replicated_fn, shard_group_fn)
        self._note_layout_fns(is_replicated_fn, shard_group_fn)
        has_norm = max_norm is not None or skip_norm_above is not None
        given_names = limits.given_names()
        if skip_if is not None:
            given_names.append("skip_if")
        if not self._enabled:
            fused.check_step_arguments(optimizer, args, given_names)
            norm_limits = limits if has_norm else None
            is_skipped = self._decide_disabled([optimizer], norm_limits, skip_if)
            return None if is_skipped else optimizer.step(*args, **kwargs)
        scale = self._grad_scale("step", optimizer)
        state = self._optimizer_state(optimizer, for_step=True)
        _reset_request(state)
        try:
            check_not_stepped(state)
            if args or given_names:
                fused.check_step_arguments(optimizer, args, given_names)
            state["skip_if"] = check_skip_if(skip_if)
            if (args or kwargs) and find_closure(args, kwargs) is not None:
                raise CallOrderError(self._closure_text())
        except Exception as error:
            norm_limits = limits if has_norm else None
            self._send_step_error([state], scale, norm_limits, error, skip_if is not None)
            raise
        stage = state["stage"]
        is_unscaled = stage is OptState.UNSCALED
        state["step_is_silent"] = is_unscaled and not has_norm and skip_if is None
        decision = StepDecision()
        if has_norm:
            decision = self._sync_norm([state], scale, limits)
        elif is_unscaled and skip_if is not None:
            self._sync_skip_if([state], scale)
        elif stage is OptState.READY:
            # These are the two calls of torch's class, which subclasses override.
            if state["kernel_unscales"]:
                self._check_inf_per_device(optimizer)
            else:
                self.unscale_(optimizer)
        self._check_has_grads([state], [stage])
        return self._step_or_skip([state], 0, scale, decision, args, kwargs)

    @dynamo_disable
    def step_all(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        max_norm: float | None = None,
        skip_norm_above: float | Tensor | None = None,
        skip_if: bool | Tensor | None = None,
        all_or_none: bool = False,
        is_replicated_fn: LayoutFn | None = None,
        shard_group_fn: LayoutFn | None = None,
    ) -> list[Any]:
        """Step several optimizers with one message for all of them.

        Collective: every rank of `process_group` must call this.

        Each optimizer is stepped or skipped by its gradients. With a norm, which is one norm
        over all optimizers, all step or none.

        Args:
            optimizers: Each optimizer once.
            max_norm: As in `step`, of the norm over all.
            skip_norm_above: As in `step`, of the norm over all.
            skip_if: As in `step`; all are skipped.
            all_or_none: All step or none, also without a norm.
            is_replicated_fn: As in `clip_grad_norm_`.
            shard_group_fn: As in `clip_grad_norm_`.

        Returns:
            The result of each ``optimizer.step()``; None for a skipped step.

        Raises:
            CallOrderError: A second step of an optimizer before ``update``.
            TypeError: There is no optimizer.
            ConfigError, NonFiniteGradientsError, ValueError, GradientError, RankMismatchError: As
                for `step`.
        """
        optimizers = list(optimizers)
        limits = None
        self._note_layout_fns(is_replicated_fn, shard_group_fn)
        if all_or_none or max_norm is not None or skip_norm_above is not None:
            limits = NormLimits(max_norm, skip_norm_above, is_replicated_fn, shard_group_fn)
        if not self._enabled:
            is_skipped = self._decide_disabled(optimizers, limits, skip_if)
            return [None if is_skipped else optimizer.step() for optimizer in optimizers]
        scale = self._grad_scale("step", optimizers)
        states = [self._optimizer_state(optimizer, for_step=True) for optimizer in optimizers]
        try:
            if not optimizers:
                raise TypeError(
                    "step_all() needs at least one optimizer, because a call without one sends no "
                    "message, and the other ranks would wait for it. For a rank that trains "
                    "nothing, call initialize(model, [], level), and amp.step() in each iteration."
                )
            for state in states:
                check_not_stepped(state)
            skip_request = check_skip_if(skip_if)
        except Exception as error:
            self._send_step_error(states, scale, limits, error, skip_if is not None)
            raise
        stages = [state["stage"] for state in states]
        ready = [state for state in states if state["stage"] is OptState.READY]
        for state in states:
            state["step_is_silent"] = limits is None and not ready and skip_if is None
            _reset_request(state)
            state["skip_if"] = skip_request
        decision = StepDecision()
        if limits is not None:
            decision = self._sync_norm(states, scale, limits)
        elif ready:
            self._sync_found_inf(ready, scale, [state["kernel_unscales"] for state in ready])
            request = ready[0]["skip_requested"]
            for state in states:
                state["skip_requested"] = _any_request(state["skip_requested"], request)
        elif skip_if is not None:
            self._sync_skip_if(states, scale)
        self._check_has_grads(states, stages)
        return [
            self._step_or_skip(states, index, scale, decision, (), {})
            for index in range(len(states))
        ]

    @dynamo_disable
    def unscale_(
        self,
        *optimizers: torch.optim.Optimizer,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Unscale the optimizers' gradients, and all-reduce found-inf.

        Collective: every rank of `process_group` must call this.

        Like ``torch.amp.GradScaler.unscale_``, for any number of optimizers with one message. A
        `StepGuard` has no loss scale, so it leaves finite gradients unchanged. The message is the
        one that ``step`` would send. So one rank may call this for one optimizer, to log a
        gradient, if it issues no other collective before its ``step``.

        Args:
            optimizers: The optimizers, to clip or read their gradients before ``step``.
            optimizer: One more, by torch's name.

        Raises:
            CallOrderError: Called twice for an optimizer, or after its ``step``.
            ValueError: float16 gradients under ``fp16_grads="error"``.
            GradientError: A gradient cannot be read.
            RankMismatchError: Ranks differ in call, optimizers, settings or loss scale.
        """
        if not self._enabled:
            return
        if optimizer is not None:
            optimizers = (*optimizers, optimizer)
        scale = self._grad_scale("unscale_", optimizers)
        states = [self._optimizer_state(optimizer) for optimizer in optimizers]

        def check_call() -> None:
            if not optimizers:
                raise TypeError("unscale_() needs at least one optimizer")
            for state in states:
                check_not_unscaled(state)

        self._sync_found_inf(states, scale, [False] * len(states), check_call)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        scale = self._grad_scale("_check_inf_per_device", optimizer)
        state = self._optimizer_state(optimizer)
        self._sync_found_inf([state], scale, [True])
        found_inf_per_device: dict[Any, Tensor] = state["found_inf_per_device"]
        return found_inf_per_device

    # -- check gradients, and sync with the other ranks --------------------------------------------

    def _optimizer_state(self, optimizer: Any, for_step: bool = False) -> dict[str, Any]:
        """Return torch's state of an optimizer in this iteration, which all its wrappers share."""
        states = self._per_optimizer_states
        state = states[id(optimizer)]
        if "optimizer" not in state or state["optimizer"] is not optimizer:
            view = view_of(optimizer)
            state = states[id(optimizer)] = states[id(view.base)]
            state["optimizer"], state["view"] = optimizer, view
        if for_step:
            state["carried_over"] = False
            state["is_fused"] = fused.supports_found_inf(optimizer)
            state["kernel_unscales"] = state["is_fused"] and not state["view"].has_masters
        return state

    def _check_grads(
        self,
        state: dict[str, Any],
        scale: Tensor,
        missing: MissingGrads,
        check_only: bool = False,
    ) -> None:
        """Unscale this rank's gradients of an optimizer, and store torch's found-inf flags.

        Args:
            state: torch's state of the optimizer.
            scale: The loss scale.
            missing: Receives whether there are gradients.
            check_only: Whether the gradients stay scaled, because a kernel unscales them.
        """
        found_inf = found_inf_tensor(False, scale.device)
        inv_scale = found_inf_tensor(True, scale.device) if check_only else self._inv_scale(scale)
        found_inf_per_device = self._unscale_grads_(
            state["optimizer"], inv_scale, found_inf, self._allows_fp16(check_only)
        )
        missing.on_this_rank = not found_inf_per_device
        state["found_inf_per_device"] = found_inf_per_device or {scale.device: found_inf}
        state["carried_over"] = False
        if not check_only:
            state["stage"] = OptState.UNSCALED

    @contextmanager
    def _exchange(
        self,
        call: str,
        states: list[dict[str, Any]],
        scale: Tensor,
        compared_states: list[dict[str, Any]] | None = None,
    ) -> Iterator[Exchange]:
        """Send one message at the end of the block, or the error that the block raised.

        After an error of the message, no step can follow in this iteration if a rank has read its
        gradients: they may be unscaled, and a second call would unscale them twice.

        Args:
            call: The name of the call, which ranks compare.
            states: torch's states of the optimizers; the block may append to the list.
            scale: The loss scale.
            compared_states: The states of the optimizers that must be equal on all ranks, if they
                are not ``states``; the block may append to the list.
        """
        group = self._active_group(scale.device)
        compared_states = states if compared_states is None else compared_states
        fingerprint = functools.partial(self._call_fingerprint, call, compared_states, scale)
        exchange = Exchange(self._sync, group, fingerprint)
        exchange.name_bad_param = functools.partial(self._first_bad_name, states)
        exchange.name_bad_weights = functools.partial(self._bad_weight_names, states)
        for _ in states:
            exchange.missing_grads.append(MissingGrads())
        if group is None and self._update_check is not None:
            exchange.bad_update = self._check_update_alone(scale.device)
        try:
            with exchange:
                # First, so that ranks number the optimizers equally if one of them raises.
                for state in states:
                    state["history"] = self._history(state["optimizer"], state["view"].base)
                if len(set(map(id, states))) < len(states):
                    raise CallOrderError(
                        "One optimizer was given twice in one call, and each can be stepped once. "
                        "Pass each optimizer once."
                    )
                yield exchange
                if states:  # One call has one request.
                    exchange.skip_if = states[0].get("skip_if", False)
            for state in states:
                state["skip_requested"] = exchange.skip_requested
        except BaseException as error:
            if exchange.is_sent:
                self._end_failed_call(states, scale.device, error)
            raise

    def _check_update_alone(self, device: torch.device) -> Tensor | None:
        """Raise if the last step of a single process wrote inf or NaN.

        Returns:
            On a device the flag, 0-d float32. Kernels skip the next step by it, and the host reads
            it later, and raises then.
        """
        check, rank = cast("UpdateCheck", self._update_check), self._sync.rank
        flag = check.flag_alone(device, rank)

        def read_flag(values: list[float]) -> None:
            if values[0]:
                check.raise_alone(rank)

        if flag is not None:
            self._sync.defer(flag.reshape(1), read_flag)
        return flag

    def _end_failed_call(
        self, states: Sequence[dict[str, Any]], device: torch.device, error: BaseException
    ) -> None:
        """Mark the optimizers of a call that raised on every rank as stepped."""
        if not isinstance(error, Exception):
            # An interrupt of this rank, while the other ranks go on to step.
            for state in states:
                optimizer = describe_optimizer(state["view"].holder)
                self._sync.report_failed_step(optimizer, error)
        if self._sync.nobody_read_grads:
            return
        for state in states:
            if state["stage"] is OptState.STEPPED:
                continue
            state["stage"] = OptState.STEPPED
            state["found_inf_per_device"] = {device: found_inf_tensor(True, device)}
            history = state.get("history")
            if history is not None:
                history.last_decision = StepDecision(found_inf=True)

    def _call_fingerprint(
        self, call: str, states: Sequence[dict[str, Any]], scale: Tensor, arguments: str
    ) -> CallFingerprint:
        """Return the values of a call that must be equal on all ranks."""
        settings, initial_scale, loss_was_scaled = self._settings_fingerprint(scale)
        types: list[str] = []
        indices: list[int] = []
        for state in states:
            history = state.get("history")
            if history is not None:  # None if another optimizer of the call is none.
                types.append(type(state["view"].holder).__name__)
                indices.append(self._sync.optimizer_index(history))
        return CallFingerprint(
            call, types, tuple(indices), settings + arguments, initial_scale, loss_was_scaled
        )

    def _first_bad_name(self, states: Sequence[dict[str, Any]], index: int) -> str:
        return first_bad_name(states[index]["view"].holder, self._tensor_names)

    def _bad_weight_names(self, states: Sequence[dict[str, Any]], index: int) -> list[str]:
        return nonfinite_weight_names(states[index]["view"].holder, self._tensor_names)

    def _store_found_inf(self, exchange: Exchange, states: Sequence[dict[str, Any]]) -> None:
        """Store the found-inf flags of all ranks in torch's states."""
        for index, state in enumerate(states):
            synced, missing = exchange.synced[index], exchange.missing_grads[index]
            if exchange.error is not None:
                # On a device: the error is raised at the next call, and this step is skipped.
                if state["stage"] is OptState.STEPPED:
                    continue
                state["stage"] = OptState.UNSCALED
            state["synced"], state["missing_grads"] = True, missing
            state["overflow_ranks"], state["bad_names"] = synced.overflow_ranks, synced.bad_names
            state["bad_weights"] = synced.bad_weights
            state["local_found_inf"] = None
            if synced.found_inf is not None:
                state["found_inf_per_device"] = {synced.found_inf.device: synced.found_inf}
            if synced.overflow_ranks is None and exchange.group is not None:
                is_known = index < len(exchange.found_inf) and exchange.error is None
                state["local_found_inf"] = exchange.found_inf[index] if is_known else False
                state["num_overflow_ranks"] = synced.num_overflow_ranks
            if missing.on_all_ranks:
                # torch has no flag either.
                state["found_inf_per_device"] = {}

    def _sync_found_inf(
        self,
        states: list[dict[str, Any]],
        scale: Tensor,
        check_only: Sequence[bool],
        check_call: Callable[[], None] | None = None,
    ) -> None:
        """Check the gradients of optimizers, and all-reduce one flag for each, in one message.

        Args:
            states: torch's states of the optimizers.
            scale: The loss scale.
            check_only: For each optimizer whether its gradients stay scaled, because a kernel
                unscales them.
            check_call: Checks the call before gradients are read. Every rank raises its error.
        """
        with self._exchange("step", states, scale) as exchange:
            if check_call is not None:
                check_call()
            exchange.has_read_grads = True
            for index, state in enumerate(states):
                missing = exchange.missing_grads[index]
                self._check_grads(state, scale, missing, check_only[index])
            exchange.found_inf = [_local_found_inf(state, scale.device) for state in states]
        self._store_found_inf(exchange, states)

    def _sync_norm(
        self,
        states: list[dict[str, Any]],
        scale: Tensor,
        limits: NormLimits,
        check_call: Callable[[], None] | None = None,
    ) -> StepDecision:
        """All-reduce the norm of all gradients in one message, and decide on the step by it.

        Args:
            states: torch's states of the optimizers.
            scale: The loss scale.
            limits: The arguments of the step.
            check_call: Checks the call before gradients are read. Every rank raises its error.

        Returns:
            The decision, which is one for all optimizers.
        """
        device, sync = scale.device, self._sync
        norm = LocalNorm(math.nan)
        with self._exchange("step", states, scale) as exchange:
            exchange.compares_replicas = True
            if check_call is not None:
                check_call()
            exchange.has_read_grads = True
            group = exchange.group
            limits = limits.validated(read_limit=group is not None and group.is_on_host)
            exchange.settings = limits.text()
            if isinstance(limits.skip_norm_above, Tensor):
                exchange.norm_limit = limits.skip_norm_above.float()
            norm = self._local_norm(exchange, states, scale, limits)
            if isinstance(exchange.norm_power, Tensor) and group is not None:
                exchange.norm_found_inf = exchange.norm_power.isfinite().logical_not()
            num_compared, layout_fns = sync.replicas_compared
            has_more_grads = norm.num_grads > num_compared
            has_other_layout = limits.has_layout_fns != layout_fns
            exchange.requests_replica_check = has_more_grads or has_other_layout
        if exchange.group is not None and not sync.replicas_match:
            try:
                self._gather_powers(exchange.group, norm.stack(device), 2.0)
            except BaseException as raised:
                self._end_failed_call(states, device, raised)
                raise
            sync.note_replicas_compared(norm.num_grads, limits.has_layout_fns)
        if exchange.error is not None:
            limits = NormLimits()
        decision = limits.decide(exchange.total_power)
        self._store_found_inf(exchange, states)
        found_inf = as_found_inf_tensor(decision.found_inf, device)
        for state in states:
            if not state["missing_grads"].on_all_ranks:
                state["found_inf_per_device"] = {found_inf.device: found_inf}
            if exchange.norm_found_inf is not None:
                state["local_found_inf"] = exchange.norm_found_inf
                state["num_overflow_ranks"] = exchange.synced[0].num_overflow_ranks
            if state["history"] is not None:
                state["history"].total_norm = decision.total_norm
        self._total_norm = decision.total_norm
        return decision

    def _sync_skip_if(
        self,
        states: list[dict[str, Any]],
        scale: Tensor,
        check_call: Callable[[], None] | None = None,
    ) -> None:
        """Send the requests to skip in a message of their own, after the message of ``unscale_``.

        Args:
            states: torch's states of the optimizers.
            scale: The loss scale.
            check_call: Raises the error of this rank, which every rank raises.
        """
        with self._exchange("step(skip_if=)", states, scale) as exchange:
            exchange.has_read_grads = True
            if check_call is not None:
                check_call()
        if exchange.ranks_differ is not None:
            # On a device the host goes on, so kernels skip where ranks differ.
            waiting = [state for state in states if state["stage"] is not OptState.STEPPED]
            found_inf = exchange.ranks_differ.float()
            _add_found_inf(waiting, found_inf, scale.device)

    def _local_norm(
        self,
        exchange: Exchange,
        states: Sequence[dict[str, Any]],
        scale: Tensor,
        limits: NormLimits,
    ) -> LocalNorm:
        """Unscale the gradients that no kernel unscales, and measure the norm of all on this rank.

        The norm finds inf and NaN, so gradients that are not divided need no other check.
        """
        shares: list[GradShare] = []
        scaled_shares: list[GradShare] = []
        flags: list[Tensor] = []
        for state, missing in zip(states, exchange.missing_grads, strict=True):
            view, is_scaled = state["view"], False
            if state["stage"] is OptState.UNSCALED:
                # Inf or NaN of an earlier check may lie in other gradients than these.
                exchange.earlier_found_inf += state["found_inf_per_device"].values()
                missing.on_this_rank = not view.has_grads()
            elif state["kernel_unscales"]:
                is_scaled = self._has_loss_scale
                missing.on_this_rank = not view.has_grads()
            elif self._has_loss_scale or view.has_masters:
                self._check_grads(state, scale, missing)
                flags += state["found_inf_per_device"].values()
            else:
                state["stage"] = OptState.UNSCALED
                missing.on_this_rank = not view.has_grads()
            share = GradShare(view.measured_grads(), view.is_zero_sharded)
            (scaled_shares if is_scaled else shares).append(share)
        ranks = 1 if exchange.group is None else exchange.group.size
        measure = functools.partial(
            local_norm,
            norm_type=2.0,
            device=scale.device,
            ranks=ranks,
            is_replicated_fn=limits.is_replicated_fn,
            shard_group_fn=limits.shard_group_fn,
        )
        norm = measure(scaled_shares).unscaled(scale) if scaled_shares else measure(shares)
        if scaled_shares and shares:
            norm = norm.plus(measure(shares))
        # An override of `_unscale_grads_` may have set a flag of gradients that are finite now.
        exchange.norm_power = nan_if_found_inf(norm.share(ranks), flags)
        return norm

    def _gather_powers(self, group: MessageGroup, powers: Tensor, norm_type: float) -> Tensor:
        """Return the powers of every rank, of shape (ranks, 3), and compare replicas by them.

        Collective: every rank of `process_group` must call this.

        Raises:
            ReplicaMismatchError: The powers contradict the layout that was assumed. Ranks compare
                until they have found a finite norm equal.
        """
        powers_by_rank = all_gather_rows(group, powers)
        if self._sync.replicas_match:
            return powers_by_rank
        rows: list[list[float]] = powers_by_rank.tolist()
        mismatch = replica_mismatch(rows, norm_type)
        if mismatch is not None:
            # A rank that could not read its gradients raises the reason first.
            self._sync.flush()
            raise ReplicaMismatchError(mismatch)
        self._sync.replicas_match = all(math.isfinite(power) for row in rows for power in row)
        return powers_by_rank

    def _send_step_error(
        self,
        states: list[dict[str, Any]],
        scale: Tensor,
        limits: NormLimits | None,
        error: Exception,
        has_skip_if: bool = False,
    ) -> None:
        """Send an error to the ranks that wait for this step's message; the caller raises it.

        A step after ``unscale_`` sends no message on any rank, so its error goes with the next.

        Args:
            states: torch's states of the optimizers.
            scale: The loss scale.
            limits: The arguments of a step by a norm.
            error: The error of this rank.
            has_skip_if: Whether the step has ``skip_if``.
        """

        def raise_error() -> None:
            raise error

        is_silent = [
            state.get("step_is_silent") or state["stage"] is OptState.UNSCALED for state in states
        ]
        if limits is not None:
            self._sync_norm(states, scale, limits, raise_error)
        elif states and all(is_silent) and has_skip_if:
            self._sync_skip_if(states, scale, raise_error)
        elif states and all(is_silent):
            self._sync.send_later(error)
        else:
            self._sync_found_inf(states, scale, [False] * len(states), raise_error)

    def raise_on_all_ranks(
        self,
        error: Exception,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        max_norm: float | None = None,
        skip_norm_above: float | Tensor | None = None,
        all_or_none: bool = False,
    ) -> NoReturn:
        """Raise an error on every rank in the place of a ``step_all``, for trainers.

        Collective: every rank of `process_group` must call this or ``step_all``.

        A rank that finds an error calls this in the place of the ``step_all`` that the other
        ranks call with the same arguments. Every rank then raises, and none steps.

        Args:
            error: The error.
            optimizers: As in `step_all`.
            max_norm: As in `step_all`.
            skip_norm_above: As in `step_all`.
            all_or_none: As in `step_all`.
        """
        if self._enabled:
            optimizers = list(optimizers)
            limits = None
            if all_or_none or max_norm is not None or skip_norm_above is not None:
                limits = NormLimits(max_norm, skip_norm_above)
            scale = self._grad_scale("step", optimizers)
            states = [self._optimizer_state(optimizer, for_step=True) for optimizer in optimizers]
            self._send_step_error(states, scale, limits, error)
        raise error

    # -- step or skip by the decision --------------------------------------------------------------

    def _check_has_grads(
        self, states: Sequence[dict[str, Any]], stages: Sequence[OptState]
    ) -> None:
        """Refuse a step of optimizers without a gradient on any rank, as torch does.

        Args:
            states: torch's states of the optimizers of the call.
            stages: Their stages before the call, so that they can be stepped in this iteration.

        Raises:
            CallOrderError: No rank has a gradient of any of them, as far as the host knows.
        """
        for state in states:
            missing = state.get("missing_grads")
            if missing is None or not missing.on_all_ranks:
                return
        try:
            _raise_if_no_grads(states)
        except CallOrderError:
            for state, stage in zip(states, stages, strict=True):
                state["stage"] = stage
            if all(state.get("step_is_silent") for state in states):
                # One rank alone may have made this step. The text has no number of parameters,
                # which may differ between ranks.
                error = CallOrderError("No rank has a gradient of what this step was given.")
                self._sync.send_later(error)
            raise

    def _step_or_skip(
        self,
        states: Sequence[dict[str, Any]],
        index: int,
        scale: Tensor,
        decision: StepDecision,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step or skip one optimizer of a call, by the decision of all ranks.

        Args:
            states: torch's states of all optimizers of the call.
            index: The index of the optimizer.
            scale: The loss scale.
            decision: The decision by a norm, to which the found-inf flags are added.
            args: Passed to ``optimizer.step``.
            kwargs: Passed to ``optimizer.step``.
        """
        state = states[index]
        view, sync = state["view"], self._sync
        if "missing_grads" not in state:
            # An override or a trainer has written the flags.
            state["missing_grads"] = MissingGrads()
        missing = state["missing_grads"]
        if not state["found_inf_per_device"]:
            if missing.on_all_ranks:
                return self._pass_over_idle(state)
            raise CallOrderError("No inf checks were recorded for this optimizer.")
        if state.get("history") is None or not state.get("synced"):
            self._sync_written_flags(state, scale)
        history, missing = state["history"], state["missing_grads"]
        sync.note_step(history)
        if not sync.iteration:
            # A rank that joins now counts from here, too.
            history.consecutive_skips = 0
        requested = state.get("skip_requested", False)
        if requested is not False:
            decision = decision.with_request(requested)
        flags = list(state["found_inf_per_device"].values())
        if state["is_fused"]:
            sync.flush(wait=False)
            decision = decision.with_found_inf(flags, scale.device)
            if isinstance(decision.skip, Tensor):
                is_on_host = any(stepped.is_cpu for _, stepped in view.param_pairs())
                if is_on_host:
                    scale = device_utils.to_device(scale, _CPU)
                if is_on_host or fused.skip_corrupts_momentum(view.holder):
                    sync.flush()
                    decision = decision.on_host(flags)
        else:
            # The host waits for the device here, so it reads first whether ranks differ.
            sync.flush()
            decision = decision.on_host(flags)
            if not scale.is_cpu:
                # torch's `_maybe_opt_step` reads the flag again.
                state["found_inf_per_device"] = {
                    _CPU: as_found_inf_tensor(decision.found_inf, _CPU)
                }
        if missing.on_all_ranks:  # A reply from a device shows this only now.
            _raise_if_no_grads(states)
            return self._pass_over_idle(state)
        try:
            result = self._call_optimizer(state, scale, decision, args, kwargs)
        except BaseException as error:
            # A second try could clip, unscale or step twice what this one has begun.
            state["stage"] = OptState.STEPPED
            number = f"step {history.next_step} of {describe_optimizer(view.holder)}"
            sync.report_failed_step(number, error)
            raise
        state["stage"] = OptState.STEPPED
        if self._update_check is not None and decision.skip is not True:
            self._update_check.measure(view, history, scale.device)
        view.release_grads()
        if missing.pending is not None:
            history.record_pending(decision, missing.pending)
        else:
            history.last_decision, history.was_idle = decision, False
        if self._comm_hooks:
            self._notify_comm_hooks(state, decision)
        skip = decision.skip
        if skip is False:
            self._count_taken(view.holder, history, scale)
            return result
        outcome = _StepOutcome(
            view.holder,
            history,
            decision,
            scale,
            True,
            state.get("overflow_ranks"),
            state.get("bad_names", ()),
            state.get("local_found_inf"),
            state.get("num_overflow_ranks", 0.0),
            state.get("bad_weights", ()),
        )
        if isinstance(skip, Tensor):
            self._count_later(outcome, states, index)
        else:
            self._count_skip(outcome)
        return result

    def _call_optimizer(
        self,
        state: dict[str, Any],
        scale: Tensor,
        decision: StepDecision,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Clip and step an optimizer, or skip its step."""
        optimizer, view, is_fused = state["optimizer"], state["view"], state["is_fused"]
        if is_fused and not fused.takes_grad_scaler(optimizer):
            is_scaled = self._has_loss_scale and state["stage"] is not OptState.UNSCALED
            return fused.fused_step(optimizer, view, scale, is_scaled, decision, args, kwargs)
        if isinstance(decision.clip_coef, Tensor) or decision.clip_coef < 1.0:
            clip_coef = decision.clip_coef_tensor(scale.device)
            view.multiply_grads_(clip_coef)
        if is_fused:
            return self._step_with_scaler(optimizer, decision, args, kwargs)
        if decision.above_limit or decision.requested:
            return None
        return self._maybe_opt_step(optimizer, state, *args, **kwargs)

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if any(map(Tensor.item, optimizer_state["found_inf_per_device"].values())):
            return None
        return optimizer.step(*args, **kwargs)

    def _step_with_scaler(
        self, optimizer: Any, decision: StepDecision, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Step by torch's older protocol: the optimizer unscales and skips with the scaler.

        A single process always calls them, as torch does. With other ranks, an optimizer that
        reads its gradients would miss an overflow of another rank.
        """
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument to the passed "
            "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
            "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
            FutureWarning,
            stacklevel=stacklevel_of_caller(),
        )
        if self._sync.group(_CPU) is not None and bool(decision.skip):
            return None
        if bool(decision.requested):
            return None
        return optimizer.step(*args, **{**kwargs, "grad_scaler": self})

    def _sync_written_flags(self, state: dict[str, Any], scale: Tensor) -> None:
        """All-reduce the flags that an override or a trainer has written into torch's state."""
        if self._active_group(scale.device) is None:
            state["history"] = self._history(state["optimizer"], state["view"].base)
            state["skip_requested"] = state.get("skip_if", False)
            return
        with self._exchange("step", [state], scale) as exchange:
            exchange.has_read_grads = True
            exchange.missing_grads = [state["missing_grads"]]
            exchange.found_inf = [_local_found_inf(state, scale.device)]
        self._store_found_inf(exchange, [state])

    def _pass_over_idle(self, state: dict[str, Any]) -> None:
        """Mark an optimizer without gradients as stepped; other optimizers of the call step."""
        state["stage"] = OptState.STEPPED
        state["history"].last_decision = StepDecision()
        state["history"].was_idle = True

    def _closure_text(self) -> str:
        """Return why ``step`` refuses a closure; for a scaler with torch's own words first."""
        reason = "A closure computes other gradients inside of the step than the ranks agreed on."
        if self._has_loss_scale:
            return (
                f"Closure use is not currently supported if GradScaler is enabled. {reason} Train "
                "in float32 or bfloat16 without a scaler, and call optimizer.step(closure)."
            )
        return (
            f"Closure use is not supported by a StepGuard. {reason} Call optimizer.step(closure) "
            "without the guard."
        )

    def _decide_disabled(
        self,
        optimizers: Sequence[Any],
        limits: NormLimits | None,
        skip_if: bool | Tensor | None,
    ) -> bool:
        """Clip for a disabled scaler; return whether the step is skipped.

        Args:
            optimizers: The optimizers of the call.
            limits: The arguments of a step by a norm.
            skip_if: The request of this rank. If it is given, all ranks gather it.
        """
        is_requested = False
        if skip_if is not None:
            is_requested = any(self._sync.all_gather(bool(check_skip_if(skip_if))))
        is_above_limit = False
        if limits is not None:
            limits = limits.validated()
            # A step that is skipped does not clip, so the norm is measured first.
            targets, norm = measure_unscaled(
                "step() of a disabled scaler",
                limits.text().strip("\n"),
                functools.partial(select_unscaled_optimizers, optimizers),
                2.0,
                self._sync.process_group,
                limits.is_replicated_fn,
                limits.shard_group_fn,
            )
            self._total_norm = norm
            limit = limits.skip_norm_above
            is_above_limit = limit is not None and norm.item() > float(limit)
            is_above_limit = is_above_limit and not is_requested
            if limits.max_norm is not None and not is_above_limit and not is_requested:
                clip_grads_with_norm_(targets, norm, limits.max_norm)
            for optimizer in optimizers:
                self._history(optimizer).total_norm = norm
        for optimizer in optimizers:
            # A disabled scaler has no history of an optimizer whose norm it never measured.
            history = self._histories.get(view_of(optimizer).base)
            if history is None and skip_if is not None:
                history = self._history(optimizer)
            if history is not None:
                history.last_decision = StepDecision(
                    above_limit=is_above_limit, requested=is_requested
                )
                history.norm_skips += is_above_limit
                history.requested_skips += is_requested
        return is_above_limit or is_requested

    # -- count steps -------------------------------------------------------------------------------

    def _notify_comm_hooks(self, state: dict[str, Any], decision: StepDecision) -> None:
        view = state["view"]
        params = [*view.model_params(), *(stepped for _, stepped in view.param_pairs())]
        found_inf = as_found_inf_tensor(decision.skip, _CPU)
        for hook in self._comm_hooks:
            hook.on_step(params, found_inf)

    def _count_later(
        self, outcome: _StepOutcome, states: Sequence[dict[str, Any]], index: int
    ) -> None:
        """Count a step when the host has read the decision on it from the device."""
        decision = outcome.decision
        device = cast("Tensor", decision.skip).device
        values = [
            cast("Tensor", decision.skip),
            _float32_on(outcome.scale, device),
            as_found_inf_tensor(decision.found_inf, device),
            as_found_inf_tensor(decision.above_limit, device),
            as_found_inf_tensor(decision.requested, device),
            _float32_on(decision.total_norm, device),
            _float32_on(decision.norm_limit, device),
        ]
        if outcome.local_found_inf is not None:
            values.append(as_found_inf_tensor(outcome.local_found_inf, device))
            values.append(_float32_on(outcome.num_overflow_ranks, device))
        missing_grads = [state.get("missing_grads", MissingGrads()) for state in states]
        missing, first_optimizer = missing_grads[index], states[0]["view"].holder
        history = outcome.history

        def read_outcome(values: list[float]) -> None:
            if missing.on_all_ranks:
                history.was_idle = True
                if index == 0:  # Once for all optimizers of the call.
                    _raise_if_missing_everywhere(first_optimizer, missing_grads)
                return
            skip, scale, found_inf, above_limit, requested, norm, limit, *local = values
            if not skip:
                self._count_taken(outcome.optimizer, history, scale)
                return
            self._count_skip(
                _StepOutcome(
                    outcome.optimizer,
                    history,
                    StepDecision(
                        found_inf=bool(found_inf),
                        above_limit=bool(above_limit),
                        requested=bool(requested),
                        total_norm=norm,
                        norm_limit=limit,
                    ),
                    scale,
                    False,
                    outcome.overflow_ranks,
                    outcome.bad_names,
                    bool(local[0]) if local else None,
                    local[1] if local else 0.0,
                    outcome.bad_weights,
                )
            )

        self._sync.defer(torch.stack(values), read_outcome)

    def _count_taken(
        self, optimizer: Any, history: OptimizerHistory, scale: float | Tensor
    ) -> None:
        """Count a step that the host knows was taken."""
        history.steps_taken += 1
        history.consecutive_skips = 0
        history.consecutive_norm_skips = 0
        if history.steps_taken > 1 or history.first_skipped_scale is None:
            return
        if self._has_loss_scale and self._sync.is_first_rank:
            log_scale_search(
                self._logger_name,
                optimizer,
                history.steps_skipped,
                history.first_skipped_scale,
                float(scale),
            )

    def _count_skip(self, outcome: _StepOutcome) -> None:
        """Count and log a skip that the host knows, and raise at the limit of skips.

        Raises:
            NonFiniteWeightsError: Weights of the model have inf or NaN.
            NonFiniteGradientsError: ``max_consecutive_skips`` was reached.
        """
        decision, history = outcome.decision, outcome.history
        step = history.next_step
        if decision.requested and not decision.found_inf:
            history.requested_skips += 1
            if self._sync.is_first_rank:
                log_requested_skip(self._logger_name, outcome.optimizer, step)
            return
        if decision.above_limit:
            # Such a skip neither continues nor ends a run of skips.
            history.norm_skips += 1
            history.consecutive_norm_skips += 1
            if self._sync.is_first_rank:
                log_norm_skip(
                    self._logger_name,
                    guard_log_level(history.consecutive_norm_skips, history.norm_skips),
                    outcome.optimizer,
                    step,
                    float(decision.total_norm),
                    float(decision.norm_limit),
                    history.consecutive_norm_skips,
                )
            return
        history.steps_skipped += 1
        history.consecutive_skips += 1
        self._skipped_scale = float(outcome.scale)
        if history.first_skipped_scale is None:
            history.first_skipped_scale = self._skipped_scale
        scale_text = f" at loss scale {self._skipped_scale:g}" if self._has_loss_scale else ""
        self._log_skip(outcome, step, scale_text)
        self._check_weights_of_skip(outcome, step)
        limit_of_skips = self._max_consecutive_skips
        if limit_of_skips is None:
            return
        # After an error the count goes on, and the next multiple of the limit raises again.
        if history.consecutive_skips % limit_of_skips == 0:
            count = "1 step was" if limit_of_skips == 1 else f"{limit_of_skips} steps in a row were"
            raise self._skip_limit_error(
                f"{count} skipped{scale_text}. {describe_optimizer(outcome.optimizer)} had inf or "
                f"NaN in its gradients each time, and max_consecutive_skips={limit_of_skips} is "
                "the limit. To find the gradients and their ranks, catch this error and call "
                f"{self._noun}.nonfinite_report() on every rank before zero_grad(). To find the "
                "operation that made the first inf or NaN, call distamp.find_first_nonfinite."
            )

    def _check_weights_of_skip(self, outcome: _StepOutcome, step: int) -> None:
        """Raise on every rank if a step was skipped because of the weights, not the gradients.

        In a message on the host the ranks have sent the names of bad weights. On a device each rank
        looks at its own weights now, and its error goes with the next message.
        """
        sync, weights = self._sync, outcome.bad_weights
        knows_all_ranks = outcome.overflow_ranks is not None or sync.size == 1
        if outcome.overflow_ranks is None:
            names = nonfinite_weight_names(outcome.optimizer, self._tensor_names)
            weights = tuple((sync.rank, name) for name in names)
        if not weights:
            return
        taken = outcome.history.steps_taken
        error = nonfinite_weights_error(outcome.optimizer, weights, step, taken)
        if knows_all_ranks:
            raise error
        sync.send_later(error)

    def _log_skip(self, outcome: _StepOutcome, step: int, scale_text: str) -> None:
        """Log a skip because of inf or NaN, on one rank if the host knows the ranks."""
        history, sync = outcome.history, self._sync
        level = guard_log_level(history.consecutive_skips, history.steps_skipped)
        if self._has_loss_scale:
            level = scaler_log_level(history.consecutive_skips, history.steps_taken)
        ranks, logs_here = outcome.overflow_ranks, sync.is_first_rank
        on_ranks = f" on {ranks_text(ranks)}" if ranks else ""
        if ranks is None and outcome.local_found_inf is not None:
            # On a device the ranks know how many overflowed, and not which.
            num_ranks = int(outcome.num_overflow_ranks)
            if num_ranks == sync.size:
                on_ranks = f" on all {num_ranks} ranks"
            elif num_ranks > _MAX_LOGGING_RANKS:
                on_ranks = f" on {num_ranks} of {sync.size} ranks"
            else:
                logs_here = bool(outcome.local_found_inf)
                ranks = (sync.rank,)
                on_ranks = f" on {ranks_text(ranks)}"
        if logs_here:
            record = SkipRecord(
                self._logger_name,
                level,
                step,
                history.consecutive_skips,
                scale_text,
                on_ranks,
                ranks,
                outcome.grads_unchanged,
                outcome.bad_names,
            )
            log_skip(outcome.optimizer, record, self._tensor_names)

    # -- clip --------------------------------------------------------------------------------------

    @dynamo_disable
    def clip_grad_norm_(
        self,
        optimizer_or_parameters: torch.optim.Optimizer | Iterable[Tensor] | Tensor,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        is_replicated_fn: LayoutFn | None = None,
        shard_group_fn: LayoutFn | None = None,
    ) -> Tensor:
        """Clip gradients by the norm of the whole model, which may be sharded over the ranks.

        Collective: every rank of `process_group` must call this.

        Like ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, under DDP, FSDP, tensor and
        pipeline parallel and their mixtures. Scaled gradients are unscaled first. If the norm is
        inf or NaN, the gradients do not change, and the step is skipped.

        A DTensor counts by its placements, once for each mesh. FSDP's shards, the shares of
        ZeroRedundancyOptimizer and OSS, and Megatron's ``tensor_model_parallel`` are parts, and its
        ``shared`` is a copy that another rank counts. A tensor that spmd_types annotates is a part
        over the axes on which it varies. Any other tensor counts as a replica, unless
        it is declared.

        Args:
            optimizer_or_parameters: An optimizer, or parameters of this scaler's optimizers.
            max_norm: The largest norm after clipping; >= 0.
            norm_type: The order of the norm; > 0, inf for the largest magnitude.
            is_replicated_fn: Takes a parameter of the model; returns whether every rank of the
                group has the same values, even if rounding makes their gradients differ.
            shard_group_fn: Takes a parameter of the model; returns whether every rank of the group
                has a different part, or the group or mesh over which it is sharded.

        Returns:
            The norm before clipping, unscaled: 0-d float32, the same on every rank, also if the
            scaler is disabled.

        Raises:
            CallOrderError: The gradients of the given parameters are not unscaled, and the
                parameters belong to no optimizer that this scaler has seen.
            ConfigError: ``max_norm`` or ``norm_type`` is out of range, or a parameter is
                declared both.
            RankMismatchError: A rank makes another call, clips other optimizers, or has other
                arguments.
            ReplicaMismatchError: A tensor that counts as a replica differs between ranks. The error
                names the declaration to add.
        """
        target: Any = optimizer_or_parameters
        layout_fns = {"is_replicated_fn": is_replicated_fn, "shard_group_fn": shard_group_fn}
        self._note_layout_fns(is_replicated_fn, shard_group_fn)
        if not self._enabled:
            norm = clip_grad_norm_(
                target,
                max_norm,
                norm_type,
                process_group=self._sync.process_group,
                is_replicated_fn=is_replicated_fn,
                shard_group_fn=shard_group_fn,
            )
            self._total_norm = norm
            if is_optimizer(target):
                self._history(target).total_norm = norm
            return norm
        if isinstance(target, Iterator):
            target = list(target)  # It is read twice.
        scale = self._grad_scale("clip_grad_norm_", target)
        device = scale.device
        targets = ClipTargets([], [], [])
        states: list[dict[str, Any]] = []
        scaled_states: list[dict[str, Any]] = []
        norm_parts = LocalNorm(math.nan)
        # The power of a norm of order inf is no sum, so it cannot be all-reduced by addition.
        is_sum = not _is_inf(norm_type)
        # Ranks must clip the same optimizers, also those that were unscaled before.
        with self._exchange("clip_grad_norm_", scaled_states, scale, states) as exchange:
            exchange.compares_replicas = True
            exchange.settings = (
                f"\nmax_norm={max_norm}\nnorm_type={norm_type}"
                f"{layout_text(is_replicated_fn, shard_group_fn)}"
            )
            targets = self._clip_targets(target)
            states += map(self._optimizer_state, targets.optimizers)
            for state in states:
                state["history"] = self._history(state["optimizer"], state["view"].base)
            for state in states:
                if state["stage"] is not OptState.UNSCALED or state.get("carried_over"):
                    check_not_unscaled(state)
                    scaled_states.append(state)
            exchange.missing_grads = [MissingGrads() for _ in scaled_states]
            # Last, so that after update() the ranks go on equally if these are wrong.
            max_norm = check_positive("max_norm", max_norm, or_zero=True)
            norm_type = check_positive("norm_type", norm_type)
            exchange.has_read_grads = True
            for state, missing in zip(scaled_states, exchange.missing_grads, strict=True):
                self._check_grads(state, scale, missing)
            exchange.found_inf = [_local_found_inf(state, device) for state in scaled_states]
            ranks = 1 if exchange.group is None else exchange.group.size
            norm_parts = local_norm(targets.local_grads(), norm_type, device, ranks, **layout_fns)
            if is_sum:
                exchange.norm_power = norm_parts.share(ranks)
        self._store_found_inf(exchange, scaled_states)
        norm = self._clip_norm(exchange, norm_parts, norm_type, device)
        self._total_norm = norm
        for state in states:
            state["history"].total_norm = norm
        if not device_utils.is_cpu(device) or not norm.isfinite():
            # All optimizers that were measured skip. On a device ranks that differ may have
            # measured different optimizers, so the norm sets no flag then.
            is_valid = norm.isfinite()
            if exchange.ranks_differ is not None:
                is_valid = is_valid.logical_or(exchange.ranks_differ)
            nonfinite_norm = is_valid.logical_not().float()
            _add_found_inf(states, nonfinite_norm, device)
        clip_grads_with_norm_(targets, norm, max_norm)
        return norm

    def _clip_targets(self, target: Any) -> ClipTargets:
        """Return the gradients that a clip is about; an optimizer is registered first."""
        if is_optimizer(target):
            view = self._optimizer_state(target)["view"]
            self._history(target, view.base)
            return select_targets(target, [], self._has_loss_scale, view)
        optimizers = [optimizer for optimizer, _ in self._histories.live()]
        return select_targets(target, optimizers, self._has_loss_scale)

    def _clip_norm(
        self, exchange: Exchange, norm: LocalNorm, norm_type: float, device: torch.device
    ) -> Tensor:
        """Return the norm over all ranks as 0-d float32, from the message or from a gather."""
        power, group = exchange.total_power, exchange.group
        if group is None:
            return total_norm_of_ranks(norm.stack(device).view(1, 3), norm_type)
        is_known = isinstance(power, Tensor) or math.isfinite(power)
        if self._sync.replicas_match and exchange.norm_power is not None and is_known:
            # A gather here would meet other collectives if this rank alone clips.
            return total_norm(power, norm_type, device)
        powers_by_rank = self._gather_powers(group, norm.stack(device), norm_type)
        return total_norm_of_ranks(powers_by_rank, norm_type)

    # -- checks of weights and replicas ------------------------------------------------------------

    def check_weights(self) -> None:
        """Raise on every rank if a weight, or floating optimizer state, has inf or NaN.

        Collective: every rank of `process_group` must call this.

        Call it at the end of a run and before a checkpoint is written, because the update of the
        last step has no next message. It looks at the trained weights and the state of all
        optimizers that this object has seen, and waits for the device.

        Raises:
            NonFiniteWeightsError: A rank has such a weight or state.
            RankMismatchError: Another rank makes another call.
        """
        sync = self._sync
        device = None if self._scale is None else self._scale.device
        names: list[str] = []
        error: Exception | None = None
        try:
            optimizers = [optimizer for optimizer, _ in self._histories.live()]
            names = nonfinite_state_names(optimizers, self._tensor_names)
        except Exception as raised:
            error = raised
        group = sync.announce("check_weights()", device=device, error=error)
        if error is not None:
            raise error
        weights: list[tuple[int, str]] = [(sync.rank, name) for name in names]
        if group is not None:
            gathered: list[list[str]] = sync.all_gather(names, group)
            weights = []
            for rank, remote_names in zip(group.global_ranks, gathered, strict=True):
                for name in remote_names:
                    weights.append((rank, name))
        if weights:
            raise nonfinite_state_error(weights)

    def _note_layout_fns(
        self, is_replicated_fn: LayoutFn | None, shard_group_fn: LayoutFn | None
    ) -> None:
        """Remember the declarations of a call, which hold for comparisons of replicas, too."""
        if is_replicated_fn is not None or shard_group_fn is not None:
            self._replica_check.layout_fns = is_replicated_fn, shard_group_fn

    def check_replicas(
        self,
        *,
        is_replicated_fn: LayoutFn | None = None,
        shard_group_fn: LayoutFn | None = None,
    ) -> ReplicaComparison:
        """Compare replicas of parameters, masters and optimizer state, bit by bit.

        Collective: every rank of `process_group` must call this.

        Compared are plain parameters, DTensors along their Replicate dimensions, parameters that
        are declared replicated, and parameters at the same place of declared shard groups; with
        their masters and optimizer state. Frozen parameters are compared if ``named_parameters``
        names them. Under ZeRO the parameters are compared, and no state, because each rank has
        another share of it. Parameters under FSDP1, of FSDP2 on one dimension and with Megatron's
        marks have no known replica. Buffers may differ, and are not compared.

        Args:
            is_replicated_fn: As in `clip_grad_norm_`. None: the declarations of the last step.
            shard_group_fn: As in `clip_grad_norm_`. None: the declarations of the last step.

        Returns:
            The names of the tensors in the comparison, and of parameters without a known replica.

        Raises:
            ReplicaMismatchError: Replicas differ, or plain parameters have other names or shapes;
                with ``on_mismatch="warn"`` a warning is logged instead.
            RankMismatchError: Another rank makes another call.
        """
        self._note_layout_fns(is_replicated_fn, shard_group_fn)
        group = self._announce_replica_call("check_replicas()")
        if group is None:
            return ReplicaComparison((), self._names_without_replica())
        return self._replica_check.compare_now(group, digest_modulus(group.size))

    def repair_replicas(self, from_rank: int | None = None) -> list[str]:
        """Make replicas equal again: copy the values of the majority over different values.

        Collective: every rank of `process_group` must call this.

        Args:
            from_rank: The source of the values, as a rank in the default group. None: the value of
                most ranks; of equally many the value of the lowest rank.

        Returns:
            The names of the parameters, masters and state that some rank has received.

        Raises:
            ConfigError: ``from_rank`` is no rank of the group.
            ReplicaMismatchError: Plain parameters have other names or shapes.
            RankMismatchError: Another rank makes another call.
        """
        error: Exception | None = None
        if from_rank is not None and from_rank not in self._sync.global_ranks():
            error = ConfigError(
                f"from_rank must be one of {ranks_text(self._sync.global_ranks())}, not "
                f"{from_rank!r}."
            )
        settings = f"\nfrom_rank={from_rank}"
        group = self._announce_replica_call("repair_replicas()", settings, error)
        if error is not None:
            raise error
        if group is None:
            return []
        return self._replica_check.repair(group, digest_modulus(group.size), from_rank)

    def _announce_replica_call(
        self, call: str, settings: str = "", error: Exception | None = None
    ) -> MessageGroup | None:
        device = None if self._scale is None else self._scale.device
        self._replica_check.is_paused = True
        try:
            return self._sync.announce(call, settings, device, error)
        finally:
            self._replica_check.is_paused = False

    def _names_without_replica(self) -> tuple[str, ...]:
        """Return the names of all parameters of a single process."""
        names: list[str] = []
        for optimizer, _ in self._histories.live():
            for name, _ in named_grad_tensors([optimizer], self._tensor_names):
                names.append(name)
        return tuple(dict.fromkeys(names))

    # -- the end of an iteration -------------------------------------------------------------------

    def _announce_update(self) -> None:
        """Send a message before an ``update`` that follows inf or NaN.

        One rank alone may have called ``nonfinite_report`` in the place of ``update``, and every
        rank knows that this is such an iteration.
        """
        if self._sync.found_inf_on_host:
            # Cleared after the message, so that ranks that catch its error send the next equally.
            self._sync.announce("update()")
            self._sync.found_inf_on_host = False

    def _states_of_iteration(self) -> list[dict[str, Any]]:
        """Return torch's states of this iteration, without the carried-over ones."""
        states = self._per_optimizer_states.values()
        return [state for state in states if not state.get("carried_over")]

    def _check_flags_recorded(self, new_scale: object) -> None:
        """Refuse an update before any check of gradients, except one that sets the scale.

        Raises:
            CallOrderError: No optimizer was checked in this iteration.
        """
        states = self._states_of_iteration()
        if new_scale is None and not any(state["found_inf_per_device"] for state in states):
            raise CallOrderError(
                "No inf checks were recorded prior to update. Call step(optimizer) or "
                "unscale_(optimizer) before update()."
            )

    def _found_inf_flags(self) -> list[Tensor]:
        """Return this iteration's found-inf tensors; replay a recorded step that was skipped.

        The replay must run before the scale changes.
        """
        flags: list[Tensor] = []
        for state in self._states_of_iteration():
            flags += state["found_inf_per_device"].values()
        if self._replay is not None:
            params: list[Tensor] = []
            for optimizer, _ in self._histories.live():
                params += params_of(optimizer)
            self._replay.on_update(
                lambda: any(map(bool, flags)),
                self._has_loss_scale,
                params,
                self._sync.process_group,
            )
        return flags

    def _end_iteration(self) -> None:
        """Begin the next iteration; carry over states that wait for their step.

        Trainers with several optimizers unscale all of them, and then step and update one by one.
        """
        states = self._per_optimizer_states
        next_states: dict[int, dict[str, Any]] = defaultdict(_refresh_per_optimizer_state)
        stages = [state["stage"] for state in self._states_of_iteration()]
        if OptState.STEPPED in stages:
            for key, state in states.items():
                if state.get("carried_over") or self._waits_for_step(state):
                    state["carried_over"] = True
                    next_states[key] = state
        self._per_optimizer_states = next_states
        self._sync.iteration += 1
        for hook in self._comm_hooks:
            hook.on_update()

    def _waits_for_step(self, state: dict[str, Any]) -> bool:
        """Return whether a later step needs the result of ``unscale_``.

        Without a loss scale a second check costs a pass over the gradients, and no more. But
        masters have taken the gradients.
        """
        if state["stage"] is not OptState.UNSCALED:
            return False
        return self._has_loss_scale or ("view" in state and state["view"].has_masters)

    def _drop_carried_over(self) -> None:
        """Drop the states of gradients that were unscaled before the last ``update``."""
        states = self._per_optimizer_states
        for key in [key for key, state in states.items() if state.get("carried_over")]:
            del states[key]

    # -- optimizers --------------------------------------------------------------------------------

    def _history(self, optimizer: Any, base: Any = None) -> OptimizerHistory:
        """Return the history of an optimizer, which is registered if it is seen first.

        Raises:
            TypeError: The object is no optimizer.
        """
        base = view_of(optimizer).base if base is None else base
        history = self._histories.get(base)
        if history is None:
            history = self._histories.register(optimizer)
            self._rescale_first_grads(optimizer)
        return history

    def _state_or_none(self, optimizer: Any) -> dict[str, Any] | None:
        """Return torch's state of an optimizer, also one that was carried over; None without."""
        return self._per_optimizer_states.get(id(view_of(optimizer).base))

    def register_optimizers(self, *optimizers: torch.optim.Optimizer) -> None:
        """Register optimizers before their first ``step``.

        A rank that never calls ``scale``, such as a pipeline stage without the loss, rescales
        gradients for a changed scale only for optimizers that are registered. `distamp.initialize`
        and the integrations call this.

        Raises:
            TypeError: An object is no optimizer.
        """
        if self._enabled:
            for optimizer in optimizers:
                self._history(optimizer)

    # -- queries -----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """Return loss scale, ranks and steps as far as the host knows them; sends nothing."""
        name = type(self).__name__
        if not self._enabled:
            return f"<{name}, disabled>"
        text = f"<{name} of {count_text(self._sync.size, 'rank')}{self._scale_text()}"
        steps = []
        for optimizer, history in self._histories.live():
            taken = count_text(history.steps_taken, "step")
            steps_text = (
                f"{type(optimizer).__name__} {taken} taken, {history.steps_skipped} skipped"
            )
            if history.norm_skips:
                steps_text += f", {count_text(history.norm_skips, 'norm skip')}"
            if history.requested_skips:
                steps_text += f", {count_text(history.requested_skips, 'requested skip')}"
            steps.append(steps_text)
        if steps:
            text += ": " + " | ".join(steps)
        return text + ">"

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer's gradients are unscaled and wait for their ``step``."""
        if not self._enabled:
            return False
        state = self._state_or_none(optimizer)
        return state is not None and state["stage"] is OptState.UNSCALED

    def step_was_taken(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the most recent ``step(optimizer)`` was taken; may wait for the device.

        Also works after ``update``. Use it to advance a learning-rate schedule or an EMA only on
        steps that were taken. An idle optimizer, without a gradient on any rank, has not stepped.

        Raises:
            CallOrderError: ``step(optimizer)`` was never called.
        """
        if not self._enabled:
            history = self._histories.get(view_of(optimizer).base)
            decision = None if history is None else history.last_decision
            return decision is None or not bool(decision.skip)
        history = self._require_history("step_was_taken", optimizer)
        decision = _require_decision("step_was_taken", history)
        return not bool(history.was_idle) and not bool(decision.skip)

    def taken_flag(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return the value of `step_was_taken` as 0-d bool; never waits.

        Raises:
            CallOrderError: ``step(optimizer)`` was never called.
        """
        if not self._enabled:
            return found_inf_tensor(self.step_was_taken(optimizer), "cpu").bool()
        history = self._require_history("taken_flag", optimizer)
        decision = _require_decision("taken_flag", history)
        device = self._grad_scale("taken_flag", optimizer).device
        skip = as_found_inf_tensor(decision.skip, device)
        return skip.logical_or(as_found_inf_tensor(history.was_idle, device)).logical_not()

    def found_inf(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return the flag of the last check, the same on all ranks; never waits.

        Returns:
            0-d float32: 1.0 if a rank found inf or NaN, else 0.0; after ``step``, whether it was
            skipped. An idle optimizer, without a gradient on any rank, has 0.0.

        Raises:
            CallOrderError: The optimizer was never checked.
        """
        if not self._enabled:
            return found_inf_tensor(not self.step_was_taken(optimizer), "cpu")
        history = self._require_history("found_inf", optimizer, "unscale_() or step()")
        device = self._grad_scale("found_inf", optimizer).device
        state = self._state_or_none(optimizer)
        is_checked = state is not None and "optimizer" in state
        if state is not None and is_checked and state["stage"] is not OptState.STEPPED:
            flags = list(state["found_inf_per_device"].values())
            # Without flags no rank has gradients.
            return as_found_inf_tensor(any_found_inf(flags, device) if flags else False, device)
        if history.last_decision is None:
            raise CallOrderError(
                "found_inf() was called before unscale_() or step() for this optimizer"
            )
        return as_found_inf_tensor(history.last_decision.skip, device)

    def step_counts(self, optimizer: torch.optim.Optimizer) -> StepCounts:
        """Return how many steps of this optimizer were taken and skipped; may wait.

        Raises:
            CallOrderError: The scaler never saw the optimizer.
        """
        if not self._enabled:
            history = self._histories.get(view_of(optimizer).base)
            if history is None:
                return StepCounts(0, 0)
            return StepCounts(0, 0, history.norm_skips, history.requested_skips)
        self._sync.flush()
        return self._require_history("step_counts", optimizer, "unscale_() or step()").counts

    def grad_norm(self, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
        """Return the norm of the last step that measured one, before clipping; never waits.

        Args:
            optimizer: The norm of its last ``step(max_norm=)``. None: the last norm that was
                measured, which is the joint norm after ``step_all(max_norm=)`` or
                ``clip_grad_norm_``.

        Returns:
            0-d float32, the same on all ranks, unscaled.

        Raises:
            CallOrderError: No norm was measured.
        """
        owner, norm = "", self._total_norm
        if optimizer is not None:
            owner = f" of this {type(unwrap_optimizer(optimizer)).__name__}"
            history = self._histories.get(view_of(optimizer).base)
            norm = None if history is None else history.total_norm
        if norm is None:
            raise CallOrderError(
                f"grad_norm() was called before a norm{owner} was measured. Pass max_norm= to "
                "step(), or call clip_grad_norm_()."
            )
        if isinstance(norm, Tensor):
            return norm
        return torch.full((), norm, dtype=torch.float32, device="cpu")

    def _require_history(
        self, query: str, optimizer: Any, before: str = "step()"
    ) -> OptimizerHistory:
        history = self._histories.get(view_of(optimizer).base)
        if history is None:
            optimizer_type = type(unwrap_optimizer(optimizer))
            raise _called_too_early(query, optimizer_type, before)
        return history

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
        sync = self._sync
        if not local:
            device = None if self._scale is None else self._scale.device
            sync.announce("nonfinite_report()", device=device)
        optimizers = [optimizer for optimizer, _ in self._histories.live()]
        named = named_grad_tensors(optimizers, self._tensor_names, model)
        overflows = list(find_overflows(named, sync.rank))
        if not overflows and local:
            raise CallOrderError(
                f"nonfinite_report(local=True) found no inf or NaN in any gradient of rank "
                f"{sync.rank}. Call nonfinite_report() on every rank to see the gradients of "
                "the other ranks."
            )
        if not local:
            gathered: list[list[GradOverflow]] = sync.all_gather(overflows)
            overflows = [overflow for overflows in gathered for overflow in overflows]
        if not overflows:
            raise CallOrderError(
                "nonfinite_report() found no inf or NaN in any gradient of any rank. Call it after "
                "a skipped step and before zero_grad()."
            )
        scale = self._skipped_scale
        if scale is None or self._states_of_iteration():
            scale = self.get_scale()
        return NonFiniteReport(scale, tuple(overflows), is_scaled=self._has_loss_scale)

    # -- observers ---------------------------------------------------------------------------------

    def attach_replay(self, replay: ReplayObserver | None) -> None:
        """Replay skipped steps in ``update``, or stop that with None.

        `distamp.report.StepReplay.attach` and ``detach`` call this.

        Args:
            replay: Records a step before it runs, and replays it.

        Raises:
            TypeError: ``replay`` cannot replay a step.
        """
        if replay is not None and not isinstance(replay, ReplayObserver):
            raise TypeError(
                f"attach_replay() takes a StepReplay or None, not {type(replay).__name__}. Call "
                "distamp.report.StepReplay(model).attach(guard)."
            )
        self._replay = replay

    def attach_comm_hook(self, hook_state: object) -> None:
        """Send loss scale and skipped steps to a communication hook, for its error feedback.

        Args:
            hook_state: The result of ``distamp.comm_hooks.register_comm_hook``.

        Raises:
            ValueError: It is the state of torch's PowerSGD, which does not survive loss scaling.
            TypeError: It is not the state of a hook.
        """
        hook = _check_comm_hook(hook_state)
        if not any(attached is hook for attached in self._comm_hooks):
            self._comm_hooks.append(hook)

    def detach_comm_hook(self, hook_state: object) -> None:
        """Undo `attach_comm_hook`, which keeps the hook alive: call this when its model goes.

        Args:
            hook_state: The attached state.

        Raises:
            ValueError: It is not attached.
        """
        hook = _check_comm_hook(hook_state)
        remaining = [attached for attached in self._comm_hooks if attached is not hook]
        if len(remaining) == len(self._comm_hooks):
            raise ValueError(
                f"detach_comm_hook() was given a {type(hook_state).__name__} that is not attached. "
                "Pass the object that you passed to attach_comm_hook()."
            )
        self._comm_hooks = remaining
        hook.on_update()  # No later update reaches it.

    # -- snapshots ---------------------------------------------------------------------------------

    @property
    def rank_sync(self) -> RankSync:
        """The messages to the other ranks, which `Snapshots` sends, too."""
        return self._sync

    @property
    def attached_comm_hooks(self) -> tuple[CommHookObserver, ...]:
        """The communication hooks of `attach_comm_hook`."""
        return tuple(self._comm_hooks)

    def steps_taken(self, optimizer: torch.optim.Optimizer) -> int:
        """Return how many steps of an optimizer were taken, as far as the host knows."""
        history = self._histories.get(view_of(optimizer).base)
        return 0 if history is None else history.steps_taken

    def compare_replicas_in_next_message(self) -> None:
        """Let the next message compare replicas, also if no comparison is due."""
        self._replica_check.is_requested = True

    def check_between_iterations(self, call: str) -> None:
        """Refuse a call inside of an iteration, or inside of ``Join``.

        Args:
            call: The call, as the user typed it.

        Raises:
            CallOrderError: A step was made, and ``update`` was not called since.
        """
        if self._join_config.enable:
            raise CallOrderError(
                f"{call} was called inside of Join, where ranks may have ended already. Call it "
                "outside of Join."
            )
        if self._states_of_iteration():
            raise CallOrderError(
                f"{call} was called before {self._noun}.update(). Call it once in each iteration, "
                "after update()."
            )

    def drop_iteration(self) -> None:
        """Forget the iteration under way, with counters, errors and late reads of its messages.

        Every rank must call this before the next message, because ranks may differ in them.
        """
        self._per_optimizer_states.clear()
        self._sync.drop_iteration()

    def snapshot_state(self) -> dict[str, Any]:
        """See `distamp.observers.SnapshotSource`."""
        sync = self._sync
        state: dict[str, Any] = {}
        state["scale"] = self._scale
        state["growth_tracker"] = self._growth_tracker
        state["total_norm"] = clone_if_tensor(self._total_norm)
        state["skipped_scale"] = self._skipped_scale
        state["iteration"] = sync.iteration
        state["silent_call_hash"] = sync.silent_call_hash
        histories: dict[int, dict[str, Any]] = {}
        for optimizer, history in self._histories.live():
            key = id(view_of(optimizer).base)
            histories[key] = history.snapshot_state()
        state["histories"] = histories
        return state

    def load_snapshot_state(self, state: dict[str, Any]) -> None:
        """See `distamp.observers.SnapshotSource`; drops the iteration under way."""
        self.drop_iteration()
        sync = self._sync
        sync.iteration = state["iteration"]
        sync.silent_call_hash = state["silent_call_hash"]
        scale = state["scale"]
        if scale is not None:
            self._scale = scale
            self._growth_tracker = state["growth_tracker"]
        self._total_norm = state["total_norm"]
        self._skipped_scale = state["skipped_scale"]
        histories = state["histories"]
        for optimizer, history in self._histories.live():
            key = id(view_of(optimizer).base)
            history.reset()
            # An optimizer that came later has made no step.
            if key in histories:
                history.load_snapshot_state(histories[key])

    # -- the process group, and Join ---------------------------------------------------------------

    @property
    def process_group(self) -> GroupLike:
        """The group as it was passed; assign to it after unpickling or for a group made again."""
        return self._sync.requested_group

    @process_group.setter
    def process_group(self, process_group: GroupLike) -> None:
        check_group(process_group)
        self._sync.flush()  # Every rank of the old group raises if they differ.
        self._sync = RankSync(process_group, self._noun)
        self._attach_checks()

    def _active_group(self, device: torch.device) -> MessageGroup | None:
        """Return the group of messages; None for a single rank, and inside of ``Join``.

        Raises:
            CallOrderError: The guard is the first object of ``Join``.
        """
        if not self._join_config.enable:
            return self._sync.group(device)
        if self._join_config.is_first_joinable:
            raise CallOrderError(
                f"The {self._noun} is the first object of Join, so its messages would meet the "
                f"model's. Pass the model first: Join([model, {self._noun}])."
            )
        return None

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that acts for this object on a rank without more inputs.

        See ``torch.distributed.algorithms.Join``: ``with Join([model, scaler])``.

        Raises:
            CallOrderError: An optimizer has masters, which would differ between ranks afterwards.
        """
        uneven_inputs.check_no_masters(self._histories)
        self._sync.flush()  # No rank is in the collectives of Join yet.
        return uneven_inputs.SyncStateHook(
            self.join_process_group,
            self.join_device,
            self._histories,
            lambda: (self._sync.iteration, self._sync.silent_call_hash, *self._join_state()),
            self._end_join,
        )

    @property
    def join_device(self) -> torch.device:
        """The device of the loss scale, for ``Join``."""
        raise NotImplementedError

    @property
    def join_process_group(self) -> Any:
        """The group of the scaler's ranks, for ``Join``."""
        return self._sync.process_group

    def _join_state(self) -> Sequence[float]:
        """Return the values that ``update`` changes; none without a loss scale."""
        return ()

    def _load_join_state(self, values: Sequence[float]) -> None:
        """Load `_join_state` of another rank; empty on a rank that had inputs to the last."""

    def _end_join(self, state: Sequence[float]) -> None:
        """End ``Join`` with the state of a rank that had inputs to the last.

        Args:
            state: Iterations, the checksum of silent calls, and the `_join_state` of that rank;
                empty on such a rank itself.
        """
        self._join_config = _JoinConfig.construct_disabled_join_config()
        if not self._enabled:
            return
        self._load_join_state(state[2:])
        if state:
            self._sync.iteration, self._sync.silent_call_hash = map(int, state[:2])


def check_skip_if(skip_if: Any) -> bool | Tensor:
    """Return a request to skip as a bool, or as a tensor of one element.

    Raises:
        TypeError: The request is no bool, tensor or None.
        ConfigError: The tensor has several elements.
    """
    if skip_if is None or isinstance(skip_if, bool):
        return bool(skip_if)
    if not isinstance(skip_if, Tensor):
        raise TypeError(
            f"skip_if must be True, False, None or a 0-d tensor, not {type(skip_if).__name__}. "
            "Pass a comparison, such as skip_if=loss > 10."
        )
    if skip_if.numel() != 1:
        raise ConfigError(
            f"skip_if must be one value, not a tensor of shape {tuple(skip_if.shape)}. Call .any() "
            "or .all() of it."
        )
    flag = skip_if.detach().reshape(()).ne(0)
    return bool(flag.item()) if flag.is_cpu else flag


def check_not_unscaled(state: dict[str, Any]) -> None:
    """Refuse ``unscale_`` after an earlier one, with torch's own words.

    Raises:
        CallOrderError: The optimizer was unscaled or stepped in this iteration.
    """
    if state["stage"] is OptState.UNSCALED and not state.get("carried_over"):
        raise CallOrderError(
            "unscale_() has already been called on this optimizer since the last update(). Call it "
            "once in each iteration, and update() at the end."
        )
    if state["stage"] is OptState.STEPPED:
        raise CallOrderError(
            "unscale_() is being called after step(). Call it before step(), or call update() to "
            "begin the next iteration."
        )


def check_not_stepped(state: dict[str, Any]) -> None:
    """Refuse a second ``step``, also after a ``step`` that raised, in torch's words first.

    Raises:
        CallOrderError: The optimizer was stepped in this iteration.
    """
    if state["stage"] is OptState.STEPPED:
        raise CallOrderError(
            "step() has already been called since the last update(). Call update() once at the end "
            "of each iteration. After a step that raised, call zero_grad() and update()."
        )


def _raise_if_no_grads(states: Sequence[dict[str, Any]]) -> None:
    """Refuse a step of optimizers without a gradient on any rank, as far as the host knows."""
    missing_grads = [state["missing_grads"] for state in states]
    if states:
        _raise_if_missing_everywhere(states[0]["view"].holder, missing_grads)


def _raise_if_missing_everywhere(optimizer: Any, missing_grads: Sequence[MissingGrads]) -> None:
    """Refuse a step without gradients, with torch's own words first.

    Args:
        optimizer: The first optimizer of the call.
        missing_grads: Whether gradients are missing, for each optimizer of the call.

    Raises:
        CallOrderError: No rank has a gradient of any of them.
    """
    if not all(missing.on_all_ranks for missing in missing_grads):
        return
    num_others = len(missing_grads) - 1
    others = ""
    if num_others:
        others = f", nor of the {count_text(num_others, 'other optimizer')} in this call"
    raise CallOrderError(
        "No inf checks were recorded for this optimizer. No rank has a gradient of "
        f"{describe_optimizer(optimizer)}{others}. Call backward() before step(), and zero_grad() "
        "only after it. An optimizer that steps inside of the backward pass cannot be guarded, so "
        "step it here."
    )


def _local_found_inf(state: dict[str, Any], device: torch.device) -> Tensor:
    """Return the found-inf flag of this rank, 0-d float32, from the flags of its devices."""
    flags = list(state["found_inf_per_device"].values())
    if len(flags) == 1:
        flag: Tensor = flags[0]
        return flag.reshape(())
    return as_found_inf_tensor(any_found_inf(flags, device), device)


def _float32_on(value: float | Tensor, device: torch.device) -> Tensor:
    """Return a number as 0-d float32 on a device, without a wait."""
    if isinstance(value, Tensor):
        return device_utils.to_device(value.float(), device)
    return torch.full((), value, dtype=torch.float32, device=device)


def _is_inf(norm_type: Any) -> bool:
    """Return whether the order of a norm, which may be unchecked, is inf."""
    try:
        return math.isinf(float(norm_type))
    except (TypeError, ValueError):
        return False


def _require_decision(query: str, history: OptimizerHistory) -> StepDecision:
    if history.last_decision is None:
        raise _called_too_early(query, type(history.optimizer), "step()")
    return history.last_decision


def _called_too_early(query: str, optimizer_type: type, before: str) -> CallOrderError:
    return CallOrderError(
        f"{query}() was called before {before} for this {optimizer_type.__name__}. Call it after "
        "that, and pass the same optimizer."
    )


def _check_comm_hook(state: object) -> CommHookObserver:
    """Return the state of a hook that can follow a loss scale.

    Raises:
        ValueError: It is the state of torch's PowerSGD.
        TypeError: It is not the state of a hook.
    """
    if type(state).__name__ == "PowerSGDState":
        raise ValueError(
            "PowerSGD cannot be joined with a scaler. Its error feedback keeps an inf for ever, "
            "and grows when the loss scale moves. Use distamp.comm_hooks.register_comm_hook(model, "
            "'int8'), whose error feedback follows the scale."
        )
    if not isinstance(state, CommHookObserver):
        raise TypeError(
            "attach_comm_hook() takes what distamp.comm_hooks.register_comm_hook returned, not "
            f"{type(state).__name__}"
        )
    return state


def read_own_state(state: Mapping[str, Any]) -> Any:
    """Return our part of a guard's or scaler's state, or None if it has none.

    The first development version wrote the settings one level deeper, under ``"schedule"``.
    """
    own_state = state.get(STATE_KEY, state.get(OLD_STATE_KEY))
    if isinstance(own_state, Mapping) and isinstance(own_state.get("schedule"), Mapping):
        return {"version": own_state.get("version"), **own_state["schedule"]}
    return own_state


class StepGuard(StepGuardBase):
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
            log of skipped steps. Add ``model.named_buffers()``, and the log names buffers that are
            not finite. The guard holds the tensors. Pass the tensors of the wrapped model, because
            FSDP2 replaces parameters.
        check_update: Check the weights that a step has written for inf and NaN. The result is part
            of the next message, and `distamp.errors.NonFiniteWeightsError` is raised before the
            next step is taken. Costs one pass over the weights. `check_weights` checks the last
            step of a run.
        check_replicas_every: Compare replicas, as `check_replicas` does, after the first update and
            then after this many updates. A checksum is part of the next message.
        on_mismatch: ``"raise"`` `distamp.errors.ReplicaMismatchError` on every rank if replicas
            differ, or ``"warn"`` in the log, because some devices compute with other roundings.

    Raises:
        ConfigError: A setting is outside its range.
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

    _has_loss_scale = False
    _noun = "guard"
    _logger_name = "distamp.guard"
    _skip_limit_error = NonFiniteGradientsError

    def __init__(
        self,
        process_group: GroupLike = None,
        max_consecutive_skips: int | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        check_update: bool = False,
        check_replicas_every: int | None = None,
        on_mismatch: Literal["raise", "warn"] = "raise",
    ) -> None:
        names = tensor_names(named_parameters)
        checks = CheckSettings(check_update, check_replicas_every, on_mismatch)
        check_group(process_group)
        self._enabled = True
        sync = RankSync(process_group, self._noun)
        # `_scale` is a scale of 1 on the device of the first optimizer, which trainers read.
        self._init_state(sync, check_skip_limit(max_consecutive_skips), names, checks)

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

    @dynamo_disable
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
        with self._sync.errors_sent_later():
            if new_scale is not None and float(new_scale) != 1.0:
                raise ConfigError(
                    f"A StepGuard scales nothing, so new_scale must be 1.0, not {new_scale!r}."
                )
            self._check_flags_recorded(new_scale)
        self._found_inf_flags()
        self._end_iteration()

    @property
    def join_device(self) -> torch.device:
        """The device of the first optimizer's gradients, for ``Join``."""
        return torch.device(self._device) if self._scale is None else self._scale.device

    # -- a loss scale of 1 -------------------------------------------------------------------------

    def _grad_scale(self, call: str, optimizers: Any) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(_first_param_device(optimizers))
        return cast("Tensor", self._scale)

    def _inv_scale(self, scale: Tensor) -> Tensor:
        return scale

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        view = self._optimizer_state(optimizer)["view"]
        if view.has_masters or device_utils.is_cpu(found_inf.device):
            flags: dict[torch.device, Tensor] = view.unscale(inv_scale, found_inf, allow_fp16)
            return flags
        # Nothing is divided, so on a device a norm, which only reads, is the faster check.
        values = view.local_grads().values
        if not values:
            return {}
        power = cast("Tensor", norm_power(values, 2.0, found_inf.device))
        return {found_inf.device: found_inf.copy_(power.isfinite().logical_not())}

    def _settings_fingerprint(self, scale: Tensor) -> tuple[str, tuple[float, int], bool]:
        limit = self._max_consecutive_skips
        settings = f"class=StepGuard\nmax_consecutive_skips={limit}{self._check_settings.text()}"
        return settings, (1.0, 0), True

    def _allows_fp16(self, check_only: bool) -> bool:
        return True

    def _step_with_scaler(
        self, optimizer: Any, decision: StepDecision, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Step an optimizer of torch's older protocol, which has nothing to unscale here."""
        return None if bool(decision.skip) else optimizer.step(*args, **kwargs)

    # -- names of a scaler that trainers read --------------------------------------------------

    @property
    def _device(self) -> str:
        if self._scale is not None:
            return self._scale.device.type
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if accelerator is None else accelerator.type

    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        fused.check_device_supported(dev)
        with torch.inference_mode(False):
            self._scale = found_inf_tensor(True, dev)
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
        """Load a ``state_dict``; a scaler's state is accepted, and nothing of it is loaded.

        Raises:
            ConfigError: It is no dict, or was written by another version.
        """
        if not isinstance(state_dict, Mapping):
            raise ConfigError(
                "A guard's state is the dict that guard.state_dict() returned, not "
                f"{state_dict!r:.80}."
            )
        entry = read_own_state(state_dict)
        if entry is not None and (not isinstance(entry, Mapping) or entry.get("version") != 1):
            raise ConfigError(
                f"The guard's state was written by another version of distamp ({entry!r:.80}). "
                "This one reads version 1."
            )
        self._sync.reset_counters()

    def __getstate__(self) -> dict[str, Any]:
        if self._states_of_iteration():
            raise CallOrderError(
                "A StepGuard instance may only be pickled at the beginning of an iteration, or at "
                "the end after guard.update()."
            )
        # Attributes that a subclass added are pickled, as with torch's class.
        state = dict(self.__dict__)
        for name in UNPICKLED:
            del state[name]
        # A copy counts its own iterations.
        state["_sync"] = copy.deepcopy(self._sync)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        checks = state.get("_check_settings", NO_CHECKS)
        self._init_state(state["_sync"], state["_max_consecutive_skips"], {}, checks)


def _reset_request(state: dict[str, Any]) -> None:
    """Forget requests to skip, except a request in the message of ``unscale_``.

    Another rank may have sent that message by ``step(skip_if=)``.
    """
    state["skip_if"] = False
    if state["stage"] is not OptState.UNSCALED:
        state["skip_requested"] = False


def _any_request(first: bool | Tensor, second: bool | Tensor) -> bool | Tensor:
    """Return whether either request skips the step; 0-d bool if a device knows it."""
    if not isinstance(first, Tensor):
        return first or second
    if not isinstance(second, Tensor):
        return second or first
    is_first = first.ne(0)
    is_second = second.ne(0)
    is_second = is_second.to(first.device)
    return is_first.logical_or(is_second)


def _add_found_inf(
    states: Sequence[dict[str, Any]], found_inf: Tensor, device: torch.device
) -> None:
    """Let optimizers skip by one flag more, 0-d float32."""
    for state in states:
        flags = [found_inf, *state["found_inf_per_device"].values()]
        combined = as_found_inf_tensor(any_found_inf(flags, device), device)
        state["found_inf_per_device"] = {device: combined}


def _first_param_device(optimizers: Any) -> torch.device:
    """Return the device of the first tensor of an optimizer, of several, or of parameters."""
    items = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    for item in items:
        if isinstance(item, Tensor):
            return item.device
        optimizer = unwrap_optimizer(item)
        if not hasattr(optimizer, "param_groups"):
            continue
        for param in params_of(optimizer):
            if isinstance(param, Tensor):
                return param.device
    return _CPU


#: The names of the arguments of `StepGuard`, which a scaler takes too.
GUARD_KWARGS = tuple(inspect.signature(StepGuard).parameters)
