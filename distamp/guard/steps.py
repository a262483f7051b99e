"""How steps are taken together: look at gradients, agree, step or skip, count, in any precision.

What gradients are divided by is what a subclass says: a loss scale, or nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from distamp import clipping, host
from distamp.callers import stacklevel_of_caller
from distamp.errors import (
    GradientError,
    LossScaleCollapse,
    NonFiniteGradients,
    SettingError,
    StageError,
)
from distamp.gradients import flag_of, local_gradients, multiply
from distamp.groups import Group, GroupLike, check_group, gather_sums
from distamp.guard import overflow
from distamp.guard.optimizer_state import (
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
    names_of_step,
    stepping,
    takes_flags,
    takes_scaler,
)
from distamp.guard.overflow import OverflowReport
from distamp.guard.ranks import Call, Flag, Ranks
from distamp.optimizers import find_closure, innermost, unwrapped
from distamp.protocols import CommHook, Replay
from distamp.sources import GradientSource, source_of

__all__ = [
    "Differ",
    "Guard",
    "Resolved",
    "Steps",
    "checked_limit",
    "outside_the_graph",
]

_F = TypeVar("_F", bound=Callable[..., Any])

_is_compiling = torch.compiler.is_dynamo_compiling
_HOST = torch.device("cpu")
_item = Tensor.item


def outside_the_graph(method: _F) -> _F:
    """Let a method run between two graphs of torch.compile, which would drop its hooks."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return torch._compile._disable_dynamo(method)(*args, **kwargs)
        return method(*args, **kwargs)

    return cast("_F", call)


def checked_limit(limit: Any) -> int | None:
    """Return the limit on skipped steps in a row.

    Raises:
        SettingError: It is no integer >= 1.
    """
    if limit is not None and (type(limit) is not int or limit < 1):
        raise SettingError(f"max_consecutive_skips must be an integer >= 1 or None, not {limit!r}")
    return limit


def checked_hook(state: object) -> CommHook:
    """Return the state of a hook that a scaler can tell of its scale.

    Raises:
        ValueError: The state of torch's PowerSGD.
        TypeError: Something else that is none.
    """
    if type(state).__name__ == "PowerSGDState":
        raise ValueError(
            "PowerSGD cannot be joined with a scaler: its error feedback keeps an inf for ever, "
            "and grows when the loss scale moves; use distamp.comm_hooks.register(model, 'int8'), "
            "whose error feedback follows the scale"
        )
    if not isinstance(state, CommHook):
        raise TypeError(
            f"attach() takes what distamp.comm_hooks.register returned, not {type(state).__name__}"
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
        clips_agree: Whether a clip has found replicas alike: what differs later is a warning.
        norm: The norm that was measured last, over one optimizer or several.
        replay: What replays a step that was skipped.
    """

    __slots__ = (
        "clips_agree",
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
        self.names: MutableMapping[Tensor, str] = {}
        self.optimizers = OptimizerStates()
        self.hooks: list[CommHook] = []
        self.kept: dict[int, dict[str, Any]] = {}
        self.skipped_at: float | None = None
        self.clips_agree = False
        self.norm: Tensor | None = None
        self.replay: Replay | None = None


@dataclass(slots=True, eq=False)
class Resolved:
    """An optimizer as one call sees it, looked through once.

    Args:
        given: What the user gave: perhaps a wrapper.
        holder: What has the parameters.
        source: Where its gradients are.
        record: torch's record of the iteration.
        only_check: Whether its own kernel unscales, in this call.
        takes_flags: Whether its own kernel skips.
        state: What survives an iteration; None until it is looked at.
    """

    given: Any
    holder: Any
    source: GradientSource
    record: dict[str, Any]
    only_check: bool = False
    takes_flags: bool = False
    state: OptimizerState | None = None


class ByNorm(NamedTuple):
    """What a step does by the norm of all that it is about.

    Args:
        max_norm: Gradients are multiplied so that the norm is at most this.
        skip_above: The step is skipped where the norm is larger.
        replicated: Says of a parameter that every rank holds the same.
        sharded: Says over which ranks a parameter is cut.
    """

    max_norm: float | None
    skip_above: float | Tensor | None
    replicated: clipping.Declared | None = None
    sharded: clipping.Declared | None = None

    def checked(self) -> ByNorm:
        """Return the same with numbers that are within their range."""
        max_norm, limit = self.max_norm, self.skip_above
        if max_norm is not None:
            max_norm = clipping.positive("max_norm", max_norm, or_zero=True)
        if isinstance(limit, Tensor):
            if limit.numel() != 1:
                raise SettingError(f"skip_above must be one number, not of shape {limit.shape}")
            limit = limit.detach().reshape(())
        elif limit is not None:
            limit = clipping.positive("skip_above", limit)
        return self._replace(max_norm=max_norm, skip_above=limit)

    @property
    def text(self) -> str:
        """What ranks compare; a limit that is a tensor may be on its way."""
        limit = "a tensor" if isinstance(self.skip_above, Tensor) else self.skip_above
        declared = [self.replicated is not None, self.sharded is not None]
        return f", max_norm={self.max_norm}, skip_above={limit}, declared={declared}"

    def verdict(self, total: Tensor) -> Verdict:
        """Return what follows from the square of the norm: 0-d float64, the same on all ranks."""
        if host.is_host(total.device):
            norm = math.sqrt(square) if (square := total.item()) >= 0.0 else math.nan
            limit = math.inf if self.skip_above is None else float(self.skip_above)
            factor = 1.0 if self.max_norm is None else min(1.0, self.max_norm / (norm + 1e-6))
            shown = torch.full((), norm, dtype=torch.float32, device="cpu")
            finite = math.isfinite(norm)
            return Verdict(shown, not finite, finite and norm > limit, factor if finite else 1.0)
        exact = total.sqrt()
        is_finite = exact.isfinite()
        clip = torch.ones_like(exact)
        if self.max_norm is not None:
            clip = torch.where(is_finite, (self.max_norm / (exact + 1e-6)).clamp_(max=1.0), 1.0)
        spike: Flag = False
        if self.skip_above is not None:
            above = self.skip_above
            above = host.moved(above, exact.device) if isinstance(above, Tensor) else above
            spike = (exact > above).logical_and_(is_finite).float()
        return Verdict(exact.float(), is_finite.logical_not().float(), spike, clip.float())


class Verdict(NamedTuple):
    """What a norm decided for all that it was measured over; numbers where the host knows.

    Args:
        norm: 0-d float32.
        found: Whether it is not finite.
        spike: Whether it lies above the limit.
        factor: What gradients are multiplied by; at most 1.
    """

    norm: Tensor
    found: Flag
    spike: Flag
    factor: float | Tensor


class Differ(NamedTuple):
    """What ranks compare of a call, beside its optimizers.

    Args:
        settings: What it was made with, as text.
        begun: Scale and growth tracker as last set from outside.
        scaled: Whether this rank ever scaled a loss.
    """

    settings: str
    begun: tuple[float, int]
    scaled: bool


def _close(ones: Iterable[Resolved], device: torch.device) -> None:
    """Let no step follow in this iteration: every rank raises what one of them found."""
    for one in ones:
        one.record["stage"] = OptState.STEPPED
        one.record["found_inf_per_device"] = {device: flag_of(True, device)}


def _refuse_names(optimizer: Any, *names: str) -> None:
    """Refuse a name of ours that the optimizer's own ``step`` takes, too."""
    kind: Any = type(stepping(optimizer))
    taken = [name for name in names if name in names_of_step(kind)]
    if taken:
        raise TypeError(
            f"the step of {kind.__name__} has a {taken[0]} of its own, so whose is meant is not "
            "known: call clip_grad_norm_(optimizer, max_norm) before step, or step_all"
        )


def _either(flag: Flag, spike: Flag) -> Flag:
    """Return whether a step is skipped, for either reason."""
    if isinstance(spike, Tensor):
        return torch.maximum(as_tensor(flag, spike.device), spike)
    return flag or spike


def _as_divisor(factor: float | Tensor, device: torch.device) -> Tensor:
    """Return 1 / factor as 0-d float32: what a kernel divides by; a factor of 0 clears."""
    if isinstance(factor, Tensor):
        return host.moved(factor.reciprocal(), device)
    inverse = 1.0 / factor if factor else math.inf
    return torch.full((), inverse, dtype=torch.float32, device=device)


def _folds(source: GradientSource) -> bool:
    """Return whether a kernel may clip as it steps: not float64, for it divides in float32."""
    return all(stepped.dtype is not torch.float64 for _, stepped in source.stepped())


@torch.no_grad()
def _multiply(source: GradientSource, factor: float | Tensor, device: torch.device) -> None:
    """Clip an optimizer's gradients in place."""
    tensors = {id(p): p for p in source.parameters()}
    tensors.update((id(stepped), stepped) for _, stepped in source.stepped())
    if isinstance(factor, float):
        factor = torch.full((), factor, dtype=torch.float32, device=device)
    multiply(local_gradients(tensors.values()), factor)


class Steps:
    """The methods of a scaler that know of no scale; what divides gradients is in a subclass."""

    #: Whether gradients are divided by anything.
    _divides = True
    _logger = "distamp.scaler"
    _collapse: type[NonFiniteGradients] = LossScaleCollapse
    _enabled: bool
    _guard: Guard
    _per_optimizer_states: dict[int, dict[str, Any]]
    #: What gradients are divided by.
    get_scale: Callable[[], float]

    # -- what a subclass says ----------------------------------------------------------------------

    def _divisor(self, call: str, given: Any) -> Tensor:
        """Return what gradients are divided by, 0-d float32, on the device of the flags."""
        raise NotImplementedError

    def _inverse(self, divisor: Tensor) -> Tensor:
        """Return what gradients are multiplied by, 0-d float32."""
        raise NotImplementedError

    def _compared(self, divisor: Tensor) -> Differ:
        """Return what ranks compare."""
        raise NotImplementedError

    def _allows_fp16(self, only_check: bool) -> bool:
        """Return whether float16 gradients may be unscaled in place."""
        raise NotImplementedError

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        return source_of(optimizer).unscale(inv_scale, found_inf, allow_fp16)

    def _group(self, device: torch.device) -> Group | None:
        """Return the ranks to agree with; None where there are none."""
        return self._guard.ranks.group(device)

    # -- look and agree ----------------------------------------------------------------------------

    @outside_the_graph
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
        given = optimizers if optimizer is None else (*optimizers, optimizer)
        divisor = self._divisor("unscale_", given)
        if not given:
            raise TypeError("unscale_() needs at least one optimizer")
        ones = [self._resolved(each) for each in given]
        for one in ones:
            check_unscale(one.record)
        self._look("step", divisor, ones)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        divisor = self._divisor("_check_inf_per_device", optimizer)
        one = self._resolved(optimizer)
        one.only_check = True
        self._look("step", divisor, [one])
        found: dict[Any, Tensor] = one.record["found_inf_per_device"]
        return found

    def _resolved(self, given: Any, to_step: bool = False) -> Resolved:
        """Look through an optimizer, and at torch's record of it, one for all of its wrappers.

        Args:
            given: What the user gave.
            to_step: Whether a record that was kept of the last iteration is gone by.
        """
        holder, records = unwrapped(given), self._per_optimizer_states
        inside = innermost(holder)
        kept = self._guard.kept
        if to_step and kept and id(inside) in kept:
            records[id(inside)] = kept.pop(id(inside))
        record = records[id(inside)]
        if given is not inside:
            records[id(given)] = record
        if not to_step:
            return Resolved(given, holder, source_of(holder), record)
        check_step(record)
        return Resolved(given, holder, source_of(holder), record, takes_flags=takes_flags(given))

    def _state(self, given: Any) -> OptimizerState:
        optimizers = self._guard.optimizers
        return optimizers.find(given) or optimizers.add(given)

    def _record_of(self, optimizer: Any) -> dict[str, Any] | None:
        """Return torch's record of this iteration, or what is kept of the last; None without."""
        key = id(innermost(optimizer))
        return self._per_optimizer_states.get(key) or self._guard.kept.get(key)

    def _look(
        self,
        name: str,
        divisor: Tensor,
        ones: Sequence[Resolved],
        *,
        error: Exception | None = None,
        arguments: str = "",
        then: Callable[[], None] | None = None,
    ) -> Flag:
        """Look at the gradients of optimizers on this rank; all ranks agree on the flags.

        Args:
            name: What ranks compare of the call.
            divisor: What gradients are divided by.
            ones: Its optimizers.
            error: What is wrong with the call itself; every rank raises it.
            arguments: What else ranks compare.
            then: What else is done on this rank before they agree.

        Returns:
            Whether ranks differ, where the host does not know yet; else False, for that raises.
        """
        group = self._group(divisor.device)
        try:
            for one in ones:  # first, so that ranks count them alike where one of them cannot look
                one.state = self._state(one.given)
            if error is not None:
                raise error
            if len(ones) > 1 and len({id(one.record) for one in ones}) < len(ones):
                raise StageError("one optimizer was given twice; each is stepped once")
            for one in ones:
                self._look_at(one, divisor)
            if then is not None:
                then()
        except Exception as raised:
            if group is None:
                raise
            error = raised
        if group is None:
            return False
        return self._agree(group, name, divisor, ones, error, arguments)

    def _look_at(self, one: Resolved, divisor: Tensor) -> None:
        """Write down what torch's own name for it finds in one optimizer's gradients."""
        if self._guard.kept:
            self._guard.kept.pop(id(innermost(one.holder)), None)
        found_inf = flag_of(False, divisor.device)
        factor = flag_of(True, divisor.device) if one.only_check else self._inverse(divisor)
        allow_fp16 = self._allows_fp16(one.only_check)
        flags = self._unscale_grads_(one.given, factor, found_inf, allow_fp16)
        one.record["found_inf_per_device"] = flags or {divisor.device: found_inf}
        one.record[OWN] = Agreed(one.state)
        if not one.only_check:
            one.record["stage"] = OptState.UNSCALED

    def _agree(
        self,
        group: Group,
        name: str,
        divisor: Tensor,
        ones: Sequence[Resolved],
        error: Exception | None = None,
        arguments: str = "",
    ) -> Flag:
        """Replace this rank's flags by what all ranks agree on, in one message; see `_look`."""
        ranks = self._guard.ranks
        try:
            flags: list[Flag] = [False] * len(ones)
            if error is None:
                found = [[*one.record["found_inf_per_device"].values()] for one in ones]
                flags = [merged(each, divisor.device) for each in found]
            call = self._call(name, divisor, ones, arguments)
            # One more, which no rank sets: on a device it is set where ranks differ.
            *agreed, differ = ranks.agree(group, call, [*flags, False], error)
        except Exception:
            # Some ranks have unscaled their gradients when another finds that it cannot: a second
            # try would unscale them twice. So this iteration has no step of theirs.
            _close(ones, divisor.device)
            raise
        for one, each in zip_longest(ones, agreed):
            if each.flag is False and error is None:  # on the host, and so no flag here is set
                one.record[OWN].ranks = ()
                continue
            tensor = as_tensor(each.flag, divisor.device)
            one.record["found_inf_per_device"] = {tensor.device: tensor}
            one.record[OWN] = Agreed(one.state, each.ranks)
            if error is not None:  # which is raised with the others', later
                one.record["stage"] = OptState.UNSCALED
        return differ.flag

    def _call(self, name: str, divisor: Tensor, ones: Sequence[Resolved], arguments: str) -> Call:
        """Return what ranks compare of a call."""
        states = [one.state for one in ones if one.state is not None]
        compared = self._compared(divisor)
        return Call(
            name,
            [type(one.holder).__name__ for one in ones if one.state is not None],
            tuple(map(self._guard.ranks.place, states)),
            compared.settings + arguments,
            compared.begun,
            compared.scaled,
        )

    # -- step --------------------------------------------------------------------------------------

    @outside_the_graph
    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        max_norm: float | None = None,
        skip_above: float | Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step the optimizer if no rank found inf or NaN, else skip on every rank.

        Like ``torch.amp.GradScaler.step``; sends the message if ``unscale_`` has not.

        Args:
            optimizer: The optimizer whose parameters to update.
            args: Passed to ``optimizer.step``; no closure, as in torch.
            max_norm: Clip to this norm of the whole model first, as `clip_grad_norm_` does; >= 0.
                Norm, flag and clip are one message, and a fused kernel clips as it steps: then the
                gradients are clipped only once it has.
            skip_above: Skip the step on all ranks where the norm is larger: a float or a 0-d
                tensor, the same on every rank. Counted apart, and never towards the limit of skips.
            kwargs: Passed to ``optimizer.step``; no closure, as in torch.

        Returns:
            The result of ``optimizer.step``; None for a skipped step.

        Raises:
            StageError: A second ``step`` before ``update``, or a closure.
            TypeError: The optimizer's own ``step`` takes a ``max_norm`` or ``skip_above``.
            SettingError: ``max_norm`` or ``skip_above`` is out of range.
            LossScaleCollapse: ``max_consecutive_skips`` was reached.
            ValueError, GradientError, LockstepError: As for `unscale_`.
        """
        by_norm = max_norm is not None or skip_above is not None
        if by_norm:
            _refuse_names(optimizer, "max_norm", "skip_above")
        if not self._enabled:
            if by_norm and self._lies_above([optimizer], ByNorm(max_norm, skip_above)):
                return None
            return optimizer.step(*args, **kwargs)
        divisor = self._divisor("step", optimizer)
        one = self._resolved(optimizer, to_step=True)
        is_ready = one.record["stage"] is OptState.READY
        if (args or kwargs) and find_closure(args, kwargs) is not None:
            error = StageError(
                "Closure use is not currently supported if GradScaler is enabled, as in torch: "
                "take steps with a closure in float32 or bfloat16, without a scaler"
            )
            if by_norm:
                self._look_by_norm(divisor, [one], ByNorm(max_norm, skip_above), error)
            elif is_ready:
                one.only_check = True
                self._look("step", divisor, [one], error=error)
            raise error
        if by_norm:
            verdict = self._look_by_norm(divisor, [one], ByNorm(max_norm, skip_above))
            return self._apply(one, divisor, args, kwargs, verdict)
        if is_ready:
            if one.takes_flags and not one.source.casts:
                self._check_inf_per_device(optimizer)
            else:
                self.unscale_(optimizer)
        return self._apply(one, divisor, args, kwargs)

    @outside_the_graph
    def step_all(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        max_norm: float | None = None,
        skip_above: float | Tensor | None = None,
        together: bool = False,
        replicated: clipping.Declared | None = None,
        sharded: clipping.Declared | None = None,
    ) -> list[Any]:
        """Step several optimizers with one message for all of them.

        Each optimizer is stepped or skipped by its own gradients; with a norm, which is one over
        all of them, all step or none.

        Args:
            optimizers: Each once.
            max_norm: As in `step`, of the norm over all.
            skip_above: As in `step`, of the norm over all.
            together: All or none, also without a clip.
            replicated: As in `clip_grad_norm_`.
            sharded: As in `clip_grad_norm_`.

        Returns:
            The result of each ``optimizer.step()``; None for a skipped step.
        """
        optimizers = list(optimizers)
        by_norm = together or max_norm is not None or skip_above is not None
        if not self._enabled:
            by = ByNorm(max_norm, skip_above, replicated, sharded)
            if by_norm and self._lies_above(optimizers, by):
                return [None] * len(optimizers)
            return [optimizer.step() for optimizer in optimizers]
        divisor = self._divisor("step", optimizers)
        ones = [self._resolved(optimizer, to_step=True) for optimizer in optimizers]
        if by_norm:
            given = ByNorm(max_norm, skip_above, replicated, sharded)
            verdict = self._look_by_norm(divisor, ones, given)
            return [self._apply(one, divisor, (), {}, verdict) for one in ones]
        ready = [one for one in ones if one.record["stage"] is OptState.READY]
        for one in ready:
            one.only_check = one.takes_flags and not one.source.casts
        if ready:
            self._look("step", divisor, ready)
        return [self._apply(one, divisor, (), {}) for one in ones]

    def _lies_above(self, optimizers: Sequence[Any], by: ByNorm) -> bool:
        """Clip where nothing is guarded; return whether the step is skipped for its norm."""
        limit, parameters = by.checked().skip_above, list[Tensor]()
        for optimizer in optimizers:
            parameters += [stepped for _, stepped in source_of(optimizer).stepped()]
        norm = self.clip_grad_norm_(
            optimizers[0] if len(optimizers) == 1 else parameters,
            math.inf if by.max_norm is None else by.max_norm,
            replicated=by.replicated,
            sharded=by.sharded,
        )
        return limit is not None and norm.item() > float(limit)

    def _look_by_norm(
        self,
        divisor: Tensor,
        ones: Sequence[Resolved],
        by: ByNorm,
        error: Exception | None = None,
    ) -> Verdict:
        """Look at gradients by their norm, one of all that is given; all ranks agree on it."""
        own, group = self._guard, self._group(divisor.device)
        size = 1 if group is None else group.size
        square = torch.full((), math.nan, dtype=torch.float64, device=divisor.device)
        unscaled = [one for one in ones if one.record["stage"] is OptState.UNSCALED]
        try:
            for one in ones:
                one.state = self._state(one.given)
            if error is not None:
                raise error
            by = by.checked()
            if len({id(one.record) for one in ones}) < len(ones):
                raise StageError("one optimizer was given twice; each is stepped once")
            square = self._square(divisor, ones, by, size)
        except Exception as raised:
            if group is None:
                raise
            error = raised
        total = square
        if group is not None:
            call = self._call("step by norm", divisor, ones, by.text)
            try:
                total = own.ranks.agree_on_norm(group, call, square, error)
                if not own.clips_agree:
                    self._see_replicas(group, divisor.device, ones, by, error)
            except Exception:
                _close(ones, divisor.device)
                raise
        if error is not None:  # on a device it is raised at the next call, and the norm is NaN
            by = ByNorm(None, None)
        verdict = by.verdict(total)
        who: tuple[int, ...] | None = None
        if verdict.found is True and group is not None:
            bad = own.ranks.gather(not math.isfinite(square.item()), group)
            who = tuple(itertools.compress(group.global_ranks, bad))
        # What was found before, as by a clip over more than these, stays found.
        flags = [f for one in unscaled for f in one.record["found_inf_per_device"].values()]
        flags = [as_tensor(verdict.found, divisor.device), *flags]
        found = as_tensor(merged(flags, divisor.device), divisor.device)
        for one in ones:
            one.record["found_inf_per_device"] = {found.device: found}
            one.record[OWN] = Agreed(one.state, who)
            if one.state is not None:
                one.state.norm = verdict.norm
        own.norm = verdict.norm
        return verdict

    def _see_replicas(
        self,
        group: Group,
        device: torch.device,
        ones: Sequence[Resolved],
        by: ByNorm,
        error: Exception | None,
    ) -> None:
        """Compare what counts as replicas and parts, which one sum does not show; at first only."""
        sums = torch.full((3,), math.nan, dtype=torch.float64, device=device)
        if error is None:
            shares = [clipping.share_of(one.holder) for one in ones]
            sums = clipping.local_sums(shares, 2.0, device, group.size, by.replicated, by.sharded)
        self._compare_norms(gather_sums(group, sums), 2.0)

    def _square(self, divisor: Tensor, ones: Sequence[Resolved], by: ByNorm, size: int) -> Tensor:
        """Unscale what no kernel does; return what this rank adds to the square of the norm."""
        kept, set_flags = self._guard.kept, list[Tensor]()
        scaled, unscaled = list[clipping.Share](), list[clipping.Share]()
        for one in ones:
            is_ready = one.record["stage"] is OptState.READY
            one.only_check = is_ready and one.takes_flags and not one.source.casts
            if one.only_check and kept:
                kept.pop(id(innermost(one.holder)), None)
            if is_ready and not one.only_check and self._unscales(one):
                self._look_at(one, divisor)
                set_flags += one.record["found_inf_per_device"].values()
            elif is_ready and not one.only_check:
                one.record["stage"] = OptState.UNSCALED
            (scaled if one.only_check else unscaled).append(clipping.share_of(one.holder))
        declared = by.replicated, by.sharded
        if not scaled or unscaled:
            square = clipping.local_square(unscaled, divisor.device, size, *declared)
        if scaled:
            found = clipping.local_square(scaled, divisor.device, size, *declared)
            found = found / divisor.double().square() if self._divides else found
            square = square + found if unscaled else found
        if set_flags:  # an override may have set one
            flag = as_tensor(merged(set_flags, divisor.device), divisor.device)
            square = torch.where(flag > 0, math.nan, square)
        return square

    def _unscales(self, one: Resolved) -> bool:
        """Return whether gradients change as they are looked at: divided, or given to masters."""
        return self._divides or one.source.casts

    def _apply(
        self,
        one: Resolved,
        divisor: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        verdict: Verdict | None = None,
    ) -> Any:
        """Step by the flag, or skip."""
        ranks, record = self._guard.ranks, one.record
        flags: list[Tensor] = list(record["found_inf_per_device"].values())
        if not flags:
            raise StageError("No inf checks were recorded for this optimizer.")
        if OWN not in record:  # an override, or a framework itself, wrote the flags down
            one.state = self._state(one.given)
            record[OWN] = Agreed(one.state)
            if (group := self._group(divisor.device)) is not None:
                self._agree(group, "step", divisor, [one])
                flags = list(record["found_inf_per_device"].values())
        agreed: Agreed = record[OWN]
        state = agreed.state or self._state(one.given)
        ranks.count_step(state)
        flag: Flag
        spike: Flag = False if verdict is None else verdict.spike
        factor: float | Tensor = 1.0 if verdict is None else verdict.factor
        if fused := one.takes_flags:
            flag = merged(flags, divisor.device)
            ranks.settle(wait=False)
        else:
            ranks.settle_with_others()  # so that they learn first what they differ in
            flag = any(map(_item, flags))
            spike, factor = bool(spike), float(factor)
            if not divisor.is_cpu:
                # torch's own _maybe_opt_step reads it again.
                record["found_inf_per_device"] = {_HOST: flag_of(flag, _HOST)}
        skip = flag if spike is False else _either(flag, spike)
        folds = fused and not takes_scaler(cast("Any", type(stepping(one.given))))
        clips = isinstance(factor, Tensor) or factor < 1.0
        if clips and not (folds and _folds(one.source)):
            _multiply(one.source, factor, divisor.device)
            factor = 1.0
        if not fused:
            result = None if spike else self._maybe_opt_step(one.given, record, *args, **kwargs)
        elif not folds:
            result = self._step_with_scaler(one.given, skip, args, kwargs)
        else:
            result = self._step_with_flags(one, skip, args, kwargs, factor)
        record["stage"] = OptState.STEPPED
        state.last_step = skip
        if self._guard.hooks:
            self._tell_hooks(one, skip)
        if isinstance(skip, Tensor):
            values = (skip, divisor, spike) if isinstance(spike, Tensor) else (skip, divisor)
            holder = one.holder
            ranks.later(
                torch.stack(values),
                lambda v: self._count(holder, state, bool(v[0]), v[1], None, any(v[2:])),
            )
        else:
            self._count(one.holder, state, skip, divisor, agreed.ranks, bool(spike))
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
        if self._guard.ranks.group(_HOST) is not None and bool(flag):
            return None
        return optimizer.step(*args, **{**kwargs, "grad_scaler": self})

    def _step_with_flags(
        self,
        one: Resolved,
        flag: Flag,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        factor: float | Tensor = 1.0,
    ) -> Any:
        """Step by torch's protocol: the kernel divides by the scale, or does nothing."""
        optimizer = stepping(one.given)
        scale = self._divisor("step", optimizer)
        if isinstance(flag, Tensor):
            # torch's fused optimizers copy flag and scale to where parameters are, and do not wait.
            on_host = any(host.is_host(tensor.device) for _, tensor in one.source.stepped())
            if on_host or leaves_garbage(one.holder):
                self._guard.ranks.settle()
                flag = bool(flag)
            scale = host.moved(scale, _HOST) if on_host else scale
        torchs = type(optimizer).__module__.startswith("torch.optim.")
        if flag is True and torchs:
            return None  # its kernel would do nothing, or leave garbage
        # Where the host knows that nothing was found, torch's kernels need not ask.
        found = None if flag is False and torchs else as_tensor(flag, scale.device)
        grad_scale = getattr(optimizer, "grad_scale", None)
        if self._divides and one.record["stage"] is not OptState.UNSCALED:
            grad_scale = scale if grad_scale is None else scale * grad_scale
        if isinstance(factor, Tensor) or factor != 1.0:
            # The kernel divides by it.
            clip = _as_divisor(factor, scale.device)
            grad_scale = clip if grad_scale is None else grad_scale * clip
        try:
            optimizer.grad_scale, optimizer.found_inf = grad_scale, found
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

    def _tell_hooks(self, one: Resolved, flag: Flag) -> None:
        parameters = [*one.source.parameters(), *(stepped for _, stepped in one.source.stepped())]
        for hook in self._guard.hooks:
            hook.step_ended(parameters, as_tensor(flag, _HOST))

    def _count(
        self,
        optimizer: Any,
        state: OptimizerState,
        skipped: bool,
        divisor: float | Tensor,
        ranks: tuple[int, ...] | None,
        spiked: bool = False,
    ) -> None:
        """Count a step that the host knows of."""
        taken, before, in_a_row, spikes = state.counts
        number, own = taken + before + spikes + 1, self._guard
        if not skipped:
            state.counts = (taken + 1, before, 0, spikes)
            return
        if spiked:
            state.counts = (taken, before, in_a_row, spikes + 1)
            if own.ranks.is_first:
                overflow.log_spike(self._logger, optimizer, number)
            return
        own.skipped_at = float(divisor)
        state.counts = (taken, before + 1, in_a_row + 1, spikes)
        at = f", at loss scale {own.skipped_at:g}" if self._divides else ""
        if own.ranks.is_first:
            # Where the divisor still is a tensor, the gradients still are as they were.
            as_it_was = isinstance(divisor, Tensor)
            skip = overflow.Skip(self._logger, number, at, ranks, as_it_was)
            overflow.log_skip(optimizer, skip, own.names)
        if own.limit is not None and in_a_row + 1 == own.limit:
            state.counts = (taken, before + 1, 0, spikes)
            raise self._collapse(
                f"{own.limit} steps in a row were skipped{at}. Which gradients, and on which rank: "
                "catch this, and before zero_grad() call overflow_report() on every rank"
            )

    def _replay(self, flags: Iterable[Tensor]) -> None:
        """Let a step that was kept be replayed, if it is skipped; before the scale moves."""
        if self._guard.replay is not None:
            self._guard.replay.step_ended(lambda: any(map(bool, flags)), self._divides)

    def _end_iteration(self, records: dict[int, dict[str, Any]]) -> None:
        """Begin the next iteration, and keep what ``step`` alone may still go by."""
        own = self._guard
        stages = {key: record["stage"] for key, record in records.items()}
        if OptState.STEPPED not in stages.values():
            own.kept.clear()
        elif OptState.UNSCALED in stages.values():
            own.kept |= {k: r for k, r in records.items() if stages[k] is OptState.UNSCALED}
        own.ranks.iteration += 1
        for hook in own.hooks:
            hook.iteration_ended()

    # -- asking ------------------------------------------------------------------------------------

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
        record = self._record_of(optimizer)
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
            0-d float32: 1.0 if a rank found inf or NaN, else 0.0; after ``step``, whether it was
            skipped.

        Raises:
            StageError: The optimizer was never checked.
        """
        if not self._enabled:
            return flag_of(False, "cpu")
        flag = self._asked("found_inf", optimizer).last_step
        record = self._record_of(optimizer)
        if flag is None and (record is None or OWN not in record):
            raise StageError(
                "found_inf() was called before unscale_() or step() for this optimizer"
            )
        device = self._divisor("found_inf", optimizer).device
        if record is not None and OWN in record:
            flags = list(record["found_inf_per_device"].values())
            if record["stage"] is OptState.STEPPED and flag is not None:
                flags.append(as_tensor(flag, device))
            flag = merged(flags, device)
        return as_tensor(False if flag is None else flag, device)

    def step_counts(self, optimizer: torch.optim.Optimizer) -> StepCounts:
        """Return how many steps of this optimizer were taken and skipped; may wait.

        Raises:
            StageError: The scaler never saw the optimizer.
        """
        if not self._enabled:
            return StepCounts(0, 0)
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
            StageError: No norm was measured.
        """
        state = None if optimizer is None else self._guard.optimizers.find(optimizer)
        norm = self._guard.norm if optimizer is None else None
        norm = norm if state is None else state.norm
        if norm is None:
            raise StageError(
                "grad_norm() was called before a norm was measured: by step(optimizer, max_norm=)"
            )
        return norm

    def _asked(
        self, question: str, optimizer: Any, before: str = "unscale_() or step()"
    ) -> OptimizerState:
        state = self._guard.optimizers.find(optimizer)
        if state is None:
            raise StageError(
                f"{question}() was called before {before} for this "
                f"{type(unwrapped(optimizer)).__name__}"
            )
        return state

    @outside_the_graph
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
        is_optimizer = not isinstance(given, Tensor) and hasattr(unwrapped(given), "param_groups")
        given = list(given) if isinstance(given, Iterator) else given  # it is looked at twice
        divisor = self._divisor("clip_grad_norm_", given)
        group, own, error = self._group(divisor.device), self._guard, None
        size = 1 if group is None else group.size
        ready: list[Resolved] = []
        chosen = clipping.Chosen([], [], [])
        # On a device an error is raised at the next call: until then it is a norm of NaN.
        sums = torch.full((3,), math.nan, dtype=torch.float64, device=divisor.device)
        try:
            if is_optimizer:
                self._state(given)
            chosen = clipping.choose(given, [optimizer for optimizer, _ in own.optimizers.live()])
            ones = [self._resolved(owner) for owner in chosen.owners]
            ready = [one for one in ones if one.record["stage"] is not OptState.UNSCALED]
            for one in ready:
                check_unscale(one.record)
            # Last, so that where they are wrong the ranks go on alike after update().
            max_norm = clipping.positive("max_norm", max_norm, or_zero=True)
            norm_type = clipping.positive("norm_type", norm_type)
        except Exception as raised:
            error = raised

        def measure() -> None:
            nonlocal sums
            sums = clipping.local_sums(
                chosen.shares, norm_type, divisor.device, size, replicated, sharded
            )

        declared = [replicated is not None, sharded is not None]
        differ = self._look(
            "clip_grad_norm_",
            divisor,
            ready,
            error=error,
            arguments=f", max_norm={max_norm}, norm_type={norm_type}, declared={declared}",
            then=measure,
        )
        everyone = sums.view(1, 3)
        if group is not None:
            everyone = gather_sums(group, sums)
            self._compare_norms(everyone, norm_type)
        own.norm = norm = clipping.total(everyone, norm_type)
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
        for owner in owners:
            record = self._resolved(owner).record
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
        self._guard.ranks.settle()  # nothing else of a disabled scaler reads the last clip's
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
        own = self._guard

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
        own = self._guard
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

    @property
    def replay(self) -> Replay | None:
        """What replays a step that was skipped: a `distamp.StepReplay`, or None."""
        return self._guard.replay

    @replay.setter
    def replay(self, replay: Replay | None) -> None:
        if replay is not None and not isinstance(replay, Replay):
            raise TypeError(f"replay is a distamp.StepReplay or None, not {type(replay).__name__}")
        self._guard.replay = replay

    def keep(self, step: Callable[[], Any], *batches: Any) -> None:
        """Keep a step before it runs, so that it is replayed in ``update`` if it is skipped.

        Every rank calls it. ``update`` then reads the flag on the host, once, and where the replay
        finds the first inf or NaN it is logged: see `distamp.StepReplay`.

        Args:
            step: Runs forward and backward, and nothing else.
            batches: Its batches, in any nesting; it is said if they change before the replay.

        Raises:
            StageError: ``replay`` is not set.
        """
        if self._guard.replay is None:
            raise StageError(
                "keep() was called before there is anything to replay steps: set .replay = "
                "distamp.StepReplay(model) first"
            )
        self._guard.replay.keep(step, *batches)

    def attach(self, hook_state: object) -> None:
        """Tell a communication hook of the loss scale and of skipped steps, for its error feedback.

        Args:
            hook_state: The result of ``distamp.comm_hooks.register``.

        Raises:
            ValueError: It is the state of torch's PowerSGD, which does not survive loss scaling.
            TypeError: It is not the state of a hook.
        """
        hook = checked_hook(hook_state)
        if not any(each is hook for each in self._guard.hooks):
            self._guard.hooks.append(hook)

    def detach(self, hook_state: object) -> None:
        """Undo `attach`; the scaler keeps an attached hook alive, so detach it after its model.

        Args:
            hook_state: The attached state.

        Raises:
            ValueError: It is not attached.
        """
        hook = checked_hook(hook_state)
        left = [each for each in self._guard.hooks if each is not hook]
        if len(left) == len(self._guard.hooks):
            raise ValueError(
                f"detach() was given a {type(hook_state).__name__} that is not attached to this "
                "scaler; pass what you passed to attach()"
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
        self._guard.ranks = Ranks(process_group)
