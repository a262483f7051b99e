"""How steps are taken together: look at gradients, agree, step or skip, count, in any precision.

What gradients are divided by is what a subclass says: a loss scale, or nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from distamp import clipping, host
from distamp.callers import stacklevel_of_caller
from distamp.error_text import count_text
from distamp.errors import (
    CallOrderError,
    ConfigError,
    LossScaleCollapseError,
    NonFiniteGradientsError,
    ReplicaMismatchError,
)
from distamp.gradients import flag_of, local_gradients, multiply, without_grad
from distamp.groups import Group, gather_sums
from distamp.guard import overflow
from distamp.guard.by_norm import NO_VERDICT, ByNorm, Verdict, declared_text
from distamp.guard.kernels import (
    leaves_garbage,
    names_of_step,
    refuse_names,
    refuse_positional,
    step_with,
    stepping,
    takes_flags,
)
from distamp.guard.optimizer_state import (
    OWN,
    OptimizerState,
    Resolved,
    as_tensor,
    check_step,
    check_unscale,
    merged,
)
from distamp.guard.ranks import Absence, Call, Flag, Found, Problem
from distamp.guard.uneven_inputs import Joins
from distamp.guard.unscaled_clip import clip_grad_norm_, measure_unscaled
from distamp.optimizers import describe, find_closure, innermost, parameters_of, unwrapped
from distamp.sources import GradientSource, source_of

__all__ = ["Steps", "checked_limit", "outside_the_graph"]

_F = TypeVar("_F", bound=Callable[..., Any])

_is_compiling = torch.compiler.is_dynamo_compiling
_HOST = torch.device("cpu")
_item = Tensor.item
_dtype = operator.attrgetter("dtype")


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
        ConfigError: It is no integer >= 1.
    """
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ConfigError(f"max_consecutive_skips must be an integer >= 1 or None, not {limit!r}.")
    return limit


def _close(ones: Iterable[Resolved], device: torch.device) -> None:
    """Let no step follow in this iteration: every rank raises what one of them found."""
    for one in ones:
        if one.record["stage"] is OptState.STEPPED:
            continue
        one.record["stage"] = OptState.STEPPED
        one.record["found_inf_per_device"] = {device: flag_of(True, device)}
        if one.state is not None:
            one.state.last_step = True


def _raise_if_absent(optimizer: Any, company: Sequence[Absence]) -> None:
    """Refuse a step of optimizers of which no rank has a gradient, with torch's own words first.

    Args:
        optimizer: The first of them.
        company: Whether gradients are absent, for each optimizer of the call.

    Raises:
        CallOrderError: No rank has a gradient of any of them.
    """
    if not company or not all(absence.everywhere for absence in company):
        return
    others = len(company) - 1
    more = f", nor of the {count_text(others, 'other optimizer')} in this call" if others else ""
    raise CallOrderError(
        "No inf checks were recorded for this optimizer. No rank has a gradient of "
        f"{describe(optimizer)}{more}. Call backward() before step(), and zero_grad() only after "
        "it. An optimizer that steps inside of the backward pass cannot be guarded, so step it "
        "here."
    )


def _either(flag: Flag, spike: Flag) -> Flag:
    """Return whether a step is skipped, for either reason."""
    if isinstance(spike, Tensor):
        return torch.maximum(as_tensor(flag, spike.device), spike)
    return flag or spike if spike else flag


def _unless_found(
    square: float | Tensor, flags: Sequence[Tensor], device: torch.device
) -> float | Tensor:
    """Return the square of a norm, NaN where a flag is set."""
    found = merged(flags, device)
    if isinstance(found, Tensor):
        return torch.where(found > 0, math.nan, square)
    return math.nan if found else square


def _is_inf(norm_type: Any) -> bool:
    """Return whether an order, which may be unchecked, is inf: its power is no sum."""
    try:
        return math.isinf(float(norm_type))
    except (TypeError, ValueError):
        return False


def _number_on(value: float | Tensor, device: torch.device) -> Tensor:
    """Return a number as 0-d float32 on a device, without a wait."""
    if isinstance(value, Tensor):
        return host.moved(value.float(), device)
    return torch.full((), value, dtype=torch.float32, device=device)


def _as_divisor(factor: float | Tensor, device: torch.device) -> Tensor:
    """Return 1 / factor as 0-d float32: what a kernel divides by; a factor of 0 clears."""
    if isinstance(factor, Tensor):
        return host.moved(factor.reciprocal(), device)
    inverse = 1.0 / factor if factor else math.inf
    return torch.full((), inverse, dtype=torch.float32, device=device)


@without_grad
def _multiply(source: GradientSource, factor: float | Tensor, device: torch.device) -> None:
    """Clip an optimizer's gradients in place: what it steps, and what other ranks step of it."""
    if isinstance(factor, float):
        factor = torch.full((), factor, dtype=torch.float32, device=device)
    tensors = source.parameters()
    if source.casts:
        tensors += [stepped for parameter, stepped in source.stepped() if parameter is not stepped]
    multiply(local_gradients(tensors), factor)


class Steps(Joins):
    """The methods of a scaler that know of no scale; what divides gradients is in a subclass."""

    #: Whether gradients are divided by anything.
    _divides = True
    _noun = "scaler"
    _logger = "distamp.scaler"
    _collapse: type[NonFiniteGradientsError] = LossScaleCollapseError

    # -- what a subclass says ----------------------------------------------------------------------

    def _inverse(self, divisor: Tensor) -> Tensor:
        """Return what gradients are multiplied by, 0-d float32."""
        raise NotImplementedError

    def _compared(self, divisor: Tensor) -> tuple[str, tuple[float, int], bool]:
        """Return what ranks compare beside optimizers: the last three of a `Call`."""
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
        raise NotImplementedError

    # -- look and agree ----------------------------------------------------------------------------

    @outside_the_graph
    def unscale_(
        self,
        *optimizers: torch.optim.Optimizer,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Unscale the optimizers' gradients and agree on found-inf.

        Collective: every rank of `process_group` must call this.

        Like ``torch.amp.GradScaler.unscale_``, for any number of optimizers with one message. A
        `StepGuard` has no loss scale, so it leaves finite gradients unchanged. It is
        the message that ``step`` would send. So one rank may call it for one optimizer, to log
        a gradient, if it issues no other collective before its ``step``.

        Args:
            optimizers: Those whose gradients you want to clip or read before ``step``.
            optimizer: One more, by torch's name.

        Raises:
            CallOrderError: Called twice for an optimizer, or after its ``step``.
            ValueError: float16 gradients under ``fp16_grads="error"``.
            GradientError: A gradient cannot be read.
            RankMismatchError: Ranks differ in call, optimizers, settings or loss scale.
        """
        if not self._enabled:
            return
        given = optimizers if optimizer is None else (*optimizers, optimizer)
        divisor = self._divisor("unscale_", given)
        ones = list(map(self._resolved, given))
        error: Exception | None = None
        try:
            if not given:
                raise TypeError("unscale_() needs at least one optimizer")
            for one in ones:
                check_unscale(one.record)
        except Exception as raised:
            error = raised
        self._look("step", divisor, ones, error=error)
        if error is not None:  # on a device the other ranks raise it at their next call
            raise error

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        divisor = self._divisor("_check_inf_per_device", optimizer)
        one = self._resolved(optimizer)
        one.only_check = True
        self._look("step", divisor, [one])
        found: dict[Any, Tensor] = one.record["found_inf_per_device"]
        return found

    def _resolved(self, given: Any, to_step: bool = False) -> Resolved:
        """Look through an optimizer, once in an iteration.

        Args:
            given: What the user gave. All of its wrappers share one of torch's records.
            to_step: Whether a record that was kept of the last iteration is gone by.
        """
        records, kept = self._per_optimizer_states, self._guard.kept
        if to_step and kept and (theirs := kept.pop(id(innermost(given)), None)) is not None:
            records[id(innermost(given))] = theirs
        one: Resolved | None = records[id(given)].get(OWN)
        if one is None or one.given is not given:
            inside = innermost(given)
            holder = given if inside is given else unwrapped(given)
            record = records[id(given)] = records[id(inside)]
            before: Resolved | None = record.get(OWN)
            one = Resolved(given, holder, inside, stepping(given), source_of(holder), record)
            if before is not None:
                one.state, one.agreed = before.state, before.agreed
                one.ranks, one.own = before.ranks, before.own
                one.bad_names = before.bad_names
            record[OWN] = one
        one.only_check = False
        if to_step:
            one.takes_flags = takes_flags(one.stepping)
            one.only_check = one.takes_flags and not one.source.casts
        return one

    def _before_message(
        self,
        group: Group | None,
        ones: Sequence[Resolved],
        look: Callable[[], object],
        error: Exception | None,
    ) -> Problem | None:
        """Do what a rank does by itself; return its error, which every rank raises."""
        looked = False
        try:
            for one in ones:  # first, so that ranks count them alike where one of them cannot look
                one.state = self._guard.optimizers.find(one.inside) or self._state(one.given)
            if error is not None:
                raise error
            if len(ones) > 1 and len({id(one.record) for one in ones}) < len(ones):
                raise CallOrderError(
                    "One optimizer was given twice in one call, and each can be stepped once. Pass "
                    "each optimizer once."
                )
            looked = True
            look()
        except Exception as raised:
            if group is None:
                raise
            return Problem(raised, looked)
        return None

    def _look(
        self,
        name: str,
        divisor: Tensor,
        ones: Sequence[Resolved],
        *,
        error: Exception | None = None,
        arguments: str = "",
        then: Callable[[], None] | None = None,
        power: Callable[[], Tensor] | None = None,
    ) -> tuple[Flag, float | Tensor]:
        """Look at the gradients of optimizers on this rank; all ranks agree on the flags.

        Args:
            name: What ranks compare of the call.
            divisor: What gradients are divided by.
            ones: Its optimizers.
            error: What is wrong with the call itself; every rank raises it.
            arguments: What else ranks compare.
            then: What else is done on this rank before they agree.
            power: Called after that; returns the ``power`` of `Ranks.agree`.

        Returns:
            Whether ranks differ, where the host does not know yet, else False, because that raises;
            and the sum of ``power``.
        """

        def look() -> None:
            for one in ones:
                self._look_at(one, divisor)
            if then is not None:
                then()

        group = self._group(divisor.device)
        problem = self._before_message(group, ones, look, error)
        differ: Flag = False
        total: float | Tensor = 0.0
        if group is not None:
            call = self._call(name, divisor, ones, arguments)
            differ, total = self._agree(group, call, divisor, ones, problem, power)
        self._note_absent(group, ones)
        return differ, total

    def _note_absent(self, group: Group | None, ones: Sequence[Resolved]) -> None:
        """Leave no flag of an optimizer of which no rank has a gradient, as torch leaves none."""
        for one in ones:
            if group is None:
                one.absence.everywhere = one.absence.here
            if one.absence.everywhere:
                one.record["found_inf_per_device"] = {}

    def _look_at(self, one: Resolved, divisor: Tensor) -> None:
        """Write down what torch's own name for it finds in one optimizer's gradients."""
        if self._guard.kept:
            self._guard.kept.pop(id(one.inside), None)
        found_inf = flag_of(False, divisor.device)
        factor = flag_of(True, divisor.device) if one.only_check else self._inverse(divisor)
        allow_fp16 = self._allows_fp16(one.only_check)
        flags = self._unscale_grads_(one.given, factor, found_inf, allow_fp16)
        one.absence = Absence(here=not flags)
        one.record["found_inf_per_device"] = flags or {divisor.device: found_inf}
        one.agreed, one.ranks, one.own, one.bad_names = True, None, None, ()
        if not one.only_check:
            one.record["stage"] = OptState.UNSCALED

    def _agree(
        self,
        group: Group,
        call: Call,
        divisor: Tensor,
        ones: Sequence[Resolved],
        problem: Problem | None = None,
        power: Callable[[], Tensor] | None = None,
    ) -> tuple[Flag, float | Tensor]:
        """Replace this rank's flags by what all ranks agree on, in one message; see `_look`."""
        try:
            flags: list[Flag] = [False] * len(ones)
            if problem is None:
                found = [[*one.record["found_inf_per_device"].values()] for one in ones]
                flags = [merged(each, divisor.device) for each in found]
            absences = [one.absence for one in ones]
            name_bad = functools.partial(self._first_bad_name, ones)
            share = None if power is None else power()
            agreed, differ, total = self._guard.ranks.agree(
                group, call, flags, absences, problem, name_bad, share
            )
        except BaseException as raised:
            self._close(ones, divisor.device, raised)
            raise
        for one, each, own in zip(ones, agreed, flags, strict=True):
            if problem is not None and one.record["stage"] is OptState.STEPPED:
                continue
            one.agreed, one.ranks, one.own = True, each.ranks, own
            one.bad_names = each.bad_names
            if each.flag is not False or problem is not None:  # else no flag here is set
                tensor = as_tensor(each.flag, divisor.device)
                one.record["found_inf_per_device"] = {tensor.device: tensor}
            if problem is not None:  # which is raised with the others', later
                one.record["stage"] = OptState.UNSCALED
        return differ, total

    def _close(self, ones: Sequence[Resolved], device: torch.device, raised: BaseException) -> None:
        """Let no step follow in this iteration if a rank has looked at its gradients.

        Some ranks have unscaled their gradients when another finds that it cannot, and a second
        call would unscale them twice.
        """
        ranks = self._guard.ranks
        if not isinstance(raised, Exception):  # an interrupt, while other ranks go on to step
            for one in ones:
                ranks.report_failed_step(describe(one.holder), raised)
        if not ranks.nobody_looked:
            _close(ones, device)

    def _first_bad_name(self, ones: Sequence[Resolved], place: int) -> str:
        return overflow.first_bad_name(ones[place].holder, self._guard.names)

    def _call(self, name: str, divisor: Tensor, ones: Sequence[Resolved], arguments: str) -> Call:
        """Return what ranks compare of a call."""
        seen = [one for one in ones if one.state is not None]
        settings, begun, scaled = self._compared(divisor)
        return Call(
            name,
            [type(one.holder).__name__ for one in seen],
            tuple(self._guard.ranks.place(one.state) for one in seen),
            settings + arguments,
            begun,
            scaled,
        )

    # -- look by a norm ----------------------------------------------------------------------------

    def _look_by_norm(
        self,
        divisor: Tensor,
        ones: Sequence[Resolved],
        by: ByNorm,
        error: Exception | None = None,
    ) -> Verdict:
        """Look at gradients by their norm, one of all that is given; all ranks agree on it."""
        own, device, count = self._guard, divisor.device, 0
        group = self._group(device)
        square: float | Tensor = math.nan
        before = [
            flag
            for one in ones
            if one.record["stage"] is OptState.UNSCALED
            for flag in one.record["found_inf_per_device"].values()
        ]

        def look() -> None:
            nonlocal by, square, count
            by = by.checked(read_limit=group is not None and group.on_host)
            square, count = self._square(divisor, ones, by, 1 if group is None else group.size)

        problem = self._before_message(group, ones, look, error)
        if problem is not None:  # on a device it is raised at the next call; the norm is NaN
            by, square = ByNorm(None, None), clipping.local_square([], device)[0] * math.nan
        # What was found, as by a clip over more than these, stays found.
        total = _unless_found(square, before, device) if before else square
        if group is not None:
            call = self._call("step", divisor, ones, by.text)
            try:
                known, declared = own.ranks.compared
                asks = count > known or declared != by.declared
                absences = [one.absence for one in ones]
                total = own.ranks.agree_on_norm(
                    group, call, total, by.late_limit, asks, absences, problem
                )
                if not own.ranks.clips_agree:
                    # Ranks that differ raise before one of them gathers, alone, what follows.
                    own.ranks.settle()
                # One sum does not show that replicas differ.
                is_right = problem is None
                if not own.ranks.clips_agree and self._see_replicas(
                    group, device, ones, by, is_right
                ):
                    own.ranks.compared = max(count, known), by.declared
            except BaseException as raised:
                self._close(ones, device, raised)
                raise
        verdict = by.verdict(total)
        own.norm = verdict.norm
        gathered = [Found(verdict.found)] * len(ones)
        bad: Flag | None = None
        if verdict.found is True and group is not None:
            is_bad = [not math.isfinite(square)] * len(ones)
            name_bad = functools.partial(self._first_bad_name, ones)
            gathered = own.ranks.gather_bad_names(group, is_bad, name_bad)
        elif group is not None and isinstance(square, Tensor):
            bad = square.isfinite().logical_not()
        found = as_tensor(verdict.found, device)
        for one, each in zip(ones, gathered, strict=True):
            one.record["found_inf_per_device"] = {found.device: found}
            one.agreed, one.ranks, one.own = True, each.ranks, bad
            one.bad_names = each.bad_names
            if one.state is not None:
                one.state.norm = verdict.norm
        self._note_absent(group, ones)
        return verdict

    def _see_replicas(
        self,
        group: Group,
        device: torch.device,
        ones: Sequence[Resolved],
        by: ByNorm,
        is_right: bool,
    ) -> bool:
        """Compare replicas, on all ranks; return whether that showed that they are alike."""
        sums = torch.full((3,), math.nan, dtype=torch.float64, device=device)
        if is_right:
            shares = [clipping.Share(one.source.stepped(), one.source.part) for one in ones]
            sums = clipping.local_sums(
                shares, 2.0, device, group.size, by.is_replicated_fn, by.shard_group_fn
            )
        self._compare_replicas(gather_sums(group, sums), 2.0)
        return self._guard.ranks.clips_agree

    def _compare_replicas(self, sums: Tensor, norm_type: float) -> None:
        """Refuse what contradicts the declarations, until ranks have agreed on a finite norm."""
        own = self._guard
        if own.ranks.clips_agree:
            return
        rows: list[list[float]] = sums.tolist()
        why = clipping.differing(rows, norm_type)
        if why is not None:
            own.ranks.settle()  # a rank that could not look at its gradients says why first
            raise ReplicaMismatchError(why)
        own.ranks.clips_agree = all(map(math.isfinite, itertools.chain(*rows)))

    def _square(
        self, divisor: Tensor, ones: Sequence[Resolved], by: ByNorm, size: int
    ) -> tuple[float | Tensor, int]:
        """Unscale what no kernel does; return what `clipping.local_square` does of all."""
        device, measure = divisor.device, clipping.local_square
        scaled: list[clipping.Share] = []
        unscaled: list[clipping.Share] = []
        set_flags: list[Tensor] = []
        for one in ones:
            one.absence = Absence(here=not one.source.has_grads())
            if one.record["stage"] is OptState.UNSCALED:
                one.only_check = False
            elif one.only_check:
                self._guard.kept.pop(id(one.inside), None)
            elif self._divides or one.source.casts:
                self._look_at(one, divisor)
                set_flags += one.record["found_inf_per_device"].values()
            else:
                one.record["stage"] = OptState.UNSCALED
            shares = scaled if one.only_check and self._divides else unscaled
            shares.append(clipping.Share(one.source.stepped(), one.source.part))

        square, count = measure(
            scaled or unscaled, device, size, by.is_replicated_fn, by.shard_group_fn
        )
        if scaled:
            scale = divisor.double() if isinstance(square, Tensor) else divisor.item()
            square = square / (scale * scale)
        if scaled and unscaled:
            more, others = measure(unscaled, device, size, by.is_replicated_fn, by.shard_group_fn)
            square, count = square + more, count + others
        if set_flags:  # an override may have set one
            square = _unless_found(square, set_flags, device)
        return square, count

    # -- step --------------------------------------------------------------------------------------

    @outside_the_graph
    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        max_norm: float | None = None,
        skip_norm_above: float | Tensor | None = None,
        is_replicated_fn: clipping.Declared | None = None,
        shard_group_fn: clipping.Declared | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step the optimizer if no rank found inf or NaN, else skip on every rank.

        Collective: every rank of `process_group` must call this.

        Like ``torch.amp.GradScaler.step``; sends the message if ``unscale_`` has not.

        Args:
            optimizer: The optimizer whose parameters to update.
            args: Passed to ``optimizer.step``; no closure, as in torch.
            max_norm: Clip to this norm of the whole model first, as `clip_grad_norm_` does; >= 0.
                Norm, flag and clip are one message, and a fused kernel clips as it steps: then the
                gradients are clipped only once it has.
            skip_norm_above: Skip the step on all ranks where the norm is larger: a float or a 0-d
                tensor, the same on every rank. Counted apart, and never towards the limit of skips.
                Gradients of such a step are not clipped.
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
                the four above.
            ConfigError: ``max_norm`` or ``skip_norm_above`` is out of range.
            NonFiniteGradientsError: ``max_consecutive_skips`` was reached; a scaler raises its
                subclass `LossScaleCollapseError`.
            ValueError, GradientError, RankMismatchError: As for `unscale_`.
        """
        norm_arguments = {
            "max_norm": max_norm,
            "skip_norm_above": skip_norm_above,
            "is_replicated_fn": is_replicated_fn,
            "shard_group_fn": shard_group_fn,
        }
        passed = [name for name, value in norm_arguments.items() if value is not None]
        by = None
        if max_norm is not None or skip_norm_above is not None:
            by = ByNorm(max_norm, skip_norm_above, is_replicated_fn, shard_group_fn)
        if not self._enabled:
            if passed:
                refuse_names(optimizer, *passed)
            refuse_positional(optimizer, args)
            skipped = self._skips_unguarded([optimizer], by)
            return None if skipped else optimizer.step(*args, **kwargs)
        divisor = self._divisor("step", optimizer)
        one = self._resolved(optimizer, to_step=True)
        try:
            if passed:
                refuse_names(optimizer, *passed)
            check_step(one.record)
            refuse_positional(optimizer, args)
            if (args or kwargs) and find_closure(args, kwargs) is not None:
                raise CallOrderError(self._closure_text())
        except Exception as error:
            self._refuse_step(divisor, [one], by, error)
            raise
        verdict, stage = NO_VERDICT, one.record["stage"]
        one.is_silent = by is None and stage is OptState.UNSCALED
        if by is not None:
            verdict = self._look_by_norm(divisor, [one], by)
        elif stage is OptState.READY:
            if one.only_check:
                self._check_inf_per_device(optimizer)
            else:
                self.unscale_(optimizer)
        company = self._refuse_absent([one], [stage])
        return self._apply(one, divisor, args, kwargs, verdict, company)

    @outside_the_graph
    def step_all(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        max_norm: float | None = None,
        skip_norm_above: float | Tensor | None = None,
        all_or_none: bool = False,
        is_replicated_fn: clipping.Declared | None = None,
        shard_group_fn: clipping.Declared | None = None,
    ) -> list[Any]:
        """Step several optimizers with one message for all of them.

        Collective: every rank of `process_group` must call this.

        Each optimizer is stepped or skipped by its own gradients; with a norm, which is one over
        all of them, all step or none.

        Args:
            optimizers: Each once.
            max_norm: As in `step`, of the norm over all.
            skip_norm_above: As in `step`, of the norm over all.
            all_or_none: All or none, also without a clip.
            is_replicated_fn: As in `clip_grad_norm_`.
            shard_group_fn: As in `clip_grad_norm_`.

        Returns:
            The result of each ``optimizer.step()``; None for a skipped step.
        """
        optimizers = list(optimizers)
        by = None
        if all_or_none or max_norm is not None or skip_norm_above is not None:
            by = ByNorm(max_norm, skip_norm_above, is_replicated_fn, shard_group_fn)
        if not self._enabled:
            skipped = self._skips_unguarded(optimizers, by)
            return [None if skipped else optimizer.step() for optimizer in optimizers]
        divisor = self._divisor("step", optimizers)
        ones = [self._resolved(optimizer, to_step=True) for optimizer in optimizers]
        try:
            for one in ones:
                check_step(one.record)
        except Exception as error:
            self._refuse_step(divisor, ones, by, error)
            raise
        verdict, stages = NO_VERDICT, [one.record["stage"] for one in ones]
        ready = [one for one in ones if one.record["stage"] is OptState.READY]
        for one in ones:
            one.is_silent = by is None and not ready
        if by is not None:
            verdict = self._look_by_norm(divisor, ones, by)
        elif ready:
            self._look("step", divisor, ready)
        company = self._refuse_absent(ones, stages)
        return [self._apply(one, divisor, (), {}, verdict, company) for one in ones]

    def raise_on_all_ranks(
        self,
        error: Exception,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        max_norm: float | None = None,
        skip_norm_above: float | Tensor | None = None,
        all_or_none: bool = False,
    ) -> NoReturn:
        """Raise an error on every rank in place of a ``step_all``, for trainers.

        Collective: every rank of `process_group` must call this or ``step_all``.

        A rank that finds a mistake of its own calls it where the other ranks call ``step_all`` with
        the same arguments. Every rank then raises, and none steps.

        Args:
            error: The error.
            optimizers: As in `step_all`.
            max_norm: As in `step_all`.
            skip_norm_above: As in `step_all`.
            all_or_none: As in `step_all`.
        """
        if self._enabled:
            optimizers, by = list(optimizers), None
            if all_or_none or max_norm is not None or skip_norm_above is not None:
                by = ByNorm(max_norm, skip_norm_above)
            divisor = self._divisor("step", optimizers)
            ones = [self._resolved(optimizer, to_step=True) for optimizer in optimizers]
            self._refuse_step(divisor, ones, by, error)
        raise error

    def _refuse_step(
        self,
        divisor: Tensor,
        ones: Sequence[Resolved],
        by: ByNorm | None,
        error: Exception,
    ) -> None:
        """Send an error to the ranks that wait for this step's message; the caller raises it.

        A step after ``unscale_`` sends no message on any rank, so its error goes with the next.
        """
        silent = [one.is_silent or one.record["stage"] is OptState.UNSCALED for one in ones]
        if by is not None:
            self._look_by_norm(divisor, ones, by, error)
        elif ones and all(silent):
            self._guard.ranks.send_later(error)
        else:
            self._look("step", divisor, ones, error=error)

    def _refuse_absent(self, ones: Sequence[Resolved], stages: Sequence[OptState]) -> list[Absence]:
        """Refuse a step of optimizers of which no rank has a gradient; return their absences.

        Args:
            ones: The optimizers of the call.
            stages: Their stages before it, so that they can still be stepped in this iteration.

        Raises:
            CallOrderError: No rank has a gradient of any of them, as far as the host knows.
        """
        company = [one.absence for one in ones]
        try:
            _raise_if_absent(ones[0].holder if ones else None, company)
        except CallOrderError:
            for one, stage in zip(ones, stages, strict=True):
                one.record["stage"] = stage
            if all(one.is_silent for one in ones):
                # One rank alone may have made this step. Numbers of parameters may differ.
                error = CallOrderError("No rank has a gradient of what this step was given.")
                self._guard.ranks.send_later(error)
            raise
        return company

    def _skips_unguarded(self, optimizers: Sequence[Any], by: ByNorm | None) -> bool:
        """Clip where nothing is guarded; return whether the step is skipped for its norm."""
        spike = False
        if by is not None:
            by = by.checked()
            # A step that is skipped does not clip, so the norm is measured first.
            chosen, norm = measure_unscaled(
                "step() of a disabled scaler",
                by.text.strip("\n"),
                functools.partial(clipping.choose_all_unscaled, optimizers),
                2.0,
                self._guard.ranks.process_group,
                by.is_replicated_fn,
                by.shard_group_fn,
            )
            self._guard.norm = norm
            spike = by.skip_norm_above is not None and norm.item() > float(by.skip_norm_above)
            if by.max_norm is not None and not spike:
                clipping.clip_(chosen.multiplied, norm, by.max_norm)
            for optimizer in optimizers:
                self._state(optimizer).norm = norm
        known = map(self._guard.optimizers.find, map(innermost, optimizers))
        for state in filter(None, known):
            state.last_step = spike
            state.counts = (0, 0, 0, state.counts[3] + spike)
        return spike

    def _apply(
        self,
        one: Resolved,
        divisor: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        verdict: Verdict,
        company: Sequence[Absence],
    ) -> Any:
        """Step by the flag, or skip."""
        ranks, record = self._guard.ranks, one.record
        if not record["found_inf_per_device"]:
            if one.absence.everywhere:
                return self._pass_over(one)
            raise CallOrderError("No inf checks were recorded for this optimizer.")
        state = one.state
        if state is None or not one.agreed:  # an override, or a framework, wrote the flags down
            state = one.state = self._state(one.given)
            if (group := self._group(divisor.device)) is not None:
                self._agree(group, self._call("step", divisor, [one], ""), divisor, [one])
        ranks.count_step(state)
        if not ranks.iteration:  # as a rank counts that joins now
            state.counts = (*state.counts[:2], 0, state.counts[3])
        flags = list(record["found_inf_per_device"].values())
        spike, factor = verdict.spike, verdict.factor
        skip: Flag
        on_host = False
        # What waits for the device comes first: ranks learn there in what they differ.
        if one.takes_flags:
            ranks.settle(wait=False)
            skip = _either(merged(flags, divisor.device), spike)
            if isinstance(skip, Tensor):
                # torch's fused optimizers copy flag and scale to the parameters, and do not wait.
                on_host = any(host.is_host(tensor.device) for _, tensor in one.source.stepped())
                if on_host or leaves_garbage(one.holder):
                    ranks.settle()
                    skip = bool(skip)
        else:
            ranks.settle()
            found, spike = any(map(_item, flags)), bool(spike)
            skip = found or spike
            if not divisor.is_cpu:
                # torch's own _maybe_opt_step reads it again.
                record["found_inf_per_device"] = {_HOST: flag_of(found, _HOST)}
        if one.absence.everywhere:  # which a device told only now
            _raise_if_absent(one.holder, company)
            return self._pass_over(one)
        result = None
        try:
            if one.takes_flags:
                result = self._step_fused(one, divisor, skip, factor, args, kwargs, on_host)
            else:
                if (factor := float(factor)) < 1.0:
                    _multiply(one.source, factor, divisor.device)
                if not spike:
                    result = self._maybe_opt_step(one.given, record, *args, **kwargs)
        except BaseException as error:
            # A second try could clip, unscale or step twice what the first one had begun.
            record["stage"] = OptState.STEPPED
            number = sum(state.counts[:2]) + state.counts[3] + 1
            ranks.report_failed_step(f"step {number} of {describe(one.holder)}", error)
            raise
        record["stage"] = OptState.STEPPED
        state.last_step, idle = skip, one.absence.flag
        state.was_idle = idle
        if isinstance(idle, Tensor):
            # An idle optimizer counts as not skipped, even if the norm of the others is inf.
            state.last_step = as_tensor(skip, idle.device) * idle.logical_not()
        if self._guard.hooks:
            self._tell_hooks(one, skip)
        if isinstance(skip, Tensor):
            self._count_later(one, state, skip, divisor, spike, company, verdict)
        else:
            self._count(one, state, skip, divisor, verdict if spike else None)
        return result

    def _step_fused(
        self,
        one: Resolved,
        divisor: Tensor,
        skip: Flag,
        factor: float | Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on_host: bool,
    ) -> Any:
        """Step one whose own kernel unscales, clips and skips.

        Args:
            one: The optimizer.
            divisor: The divisor of its gradients.
            skip: Whether its kernel does nothing.
            factor: The factor of the clip.
            args: Passed to ``optimizer.step``.
            kwargs: Passed to ``optimizer.step``.
            on_host: Whether parameters lie on the host and flags do not.
        """
        optimizer, kind = one.stepping, cast("Any", type(one.stepping))
        asks_the_scaler = "grad_scaler" in names_of_step(kind)  # torch's older protocol
        if isinstance(factor, Tensor) or factor < 1.0:
            dtypes = map(_dtype, parameters_of(one.holder))
            if asks_the_scaler or torch.float64 in dtypes:  # the kernel divides by a float32
                _multiply(one.source, factor, divisor.device)
                factor = 1.0
        if asks_the_scaler:
            return self._step_with_scaler(one.given, skip, args, kwargs)
        scale = host.moved(divisor, _HOST) if on_host else divisor
        torchs = kind.__module__.startswith("torch.optim.")
        if skip is True and torchs:
            return None  # its kernel would do nothing, or leave garbage
        # Where the host knows that nothing was found, torch's kernels need not ask.
        found = None if skip is False and torchs else as_tensor(skip, scale.device)
        grad_scale = getattr(optimizer, "grad_scale", None)
        if self._divides and one.record["stage"] is not OptState.UNSCALED:
            grad_scale = scale if grad_scale is None else scale * grad_scale
        if isinstance(factor, Tensor) or factor < 1.0:
            clip = _as_divisor(factor, scale.device)
            grad_scale = clip if grad_scale is None else grad_scale * clip
        return step_with(optimizer, grad_scale, found, args, kwargs)

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

    def _closure_text(self) -> str:
        """Return why ``step`` refuses a closure, with torch's own words first for a scaler."""
        reason = "A closure computes other gradients inside of the step than the ranks agreed on."
        if self._divides:
            return (
                f"Closure use is not currently supported if GradScaler is enabled. {reason} Train "
                "in float32 or bfloat16 without a scaler, and call optimizer.step(closure)."
            )
        return (
            f"Closure use is not supported by a StepGuard. {reason} Call optimizer.step(closure) "
            "without the guard."
        )

    # -- what a step leaves ------------------------------------------------------------------------

    def _pass_over(self, one: Resolved) -> None:
        """Do nothing for an optimizer that is idle beside others: no rank has its gradients."""
        state = one.state
        assert state is not None
        one.record["stage"] = OptState.STEPPED
        state.last_step, state.was_idle = False, True

    def _tell_hooks(self, one: Resolved, flag: Flag) -> None:
        parameters = [*one.source.parameters(), *(stepped for _, stepped in one.source.stepped())]
        for hook in self._guard.hooks:
            hook.step_ended(parameters, as_tensor(flag, _HOST))

    def _count_later(
        self,
        one: Resolved,
        state: OptimizerState,
        skip: Tensor,
        divisor: Tensor,
        spike: Flag,
        company: Sequence[Absence],
        verdict: Verdict,
    ) -> None:
        """Count a step when the host learns of it."""
        device = skip.device
        values = [skip, divisor, as_tensor(spike, device)]
        values += [_number_on(verdict.norm, device), _number_on(verdict.limit, device)]
        if one.own is not None:
            values.append(as_tensor(one.own, skip.device))
        seen = replace(one, given=None, inside=None, stepping=None, record={})

        def read(v: list[float]) -> None:
            if seen.absence.everywhere:
                state.was_idle = True
                if company[0] is seen.absence:  # once for all optimizers of the call
                    _raise_if_absent(seen.holder, company)
                return
            seen.own = bool(v[5]) if v[5:] else None
            above = Verdict(v[3], found=False, spike=True, factor=1.0, limit=v[4])
            self._count(seen, state, bool(v[0]), v[1], above if v[2] else None)

        self._guard.ranks.later(torch.stack(values), read)

    def _count(
        self,
        one: Resolved,
        state: OptimizerState,
        skipped: bool,
        divisor: float | Tensor,
        above_limit: Verdict | None,
    ) -> None:
        """Count a step that the host knows of.

        Args:
            one: The optimizer.
            state: Its state.
            skipped: Whether its step was skipped.
            divisor: The divisor of its gradients.
            above_limit: The verdict if the step was skipped because its norm lay above the limit.
        """
        taken, before, in_a_row, norm_skips = state.counts
        number, own = taken + before + norm_skips + 1, self._guard
        if not skipped:
            state.counts = (taken + 1, before, 0, norm_skips)
            return
        if above_limit is not None:
            state.counts = (taken, before, in_a_row, norm_skips + 1)
            if own.ranks.is_first:
                norm, limit = float(above_limit.norm), float(above_limit.limit)
                overflow.log_spike(self._logger, one.holder, number, norm, limit)
            return
        own.skipped_at = float(divisor)
        state.counts = (taken, before + 1, in_a_row + 1, norm_skips)
        at = f" at loss scale {own.skipped_at:g}" if self._divides else ""
        ranks, speaks = one.ranks, own.ranks.is_first
        if ranks is None and one.own is not None:  # each rank knows of itself alone
            ranks, speaks = (own.ranks.rank,), bool(one.own)
        if speaks:
            # Where the divisor still is a tensor, the gradients still are as they were.
            as_it_was = isinstance(divisor, Tensor)
            skip = overflow.Skip(self._logger, number, at, ranks, as_it_was, one.bad_names)
            overflow.log_skip(one.holder, skip, own.names)
        if own.limit is not None and in_a_row + 1 == own.limit:
            state.counts = (taken, before + 1, 0, norm_skips)
            head = "1 step was" if own.limit == 1 else f"{own.limit} steps in a row were"
            raise self._collapse(
                f"{head} skipped{at}. {describe(one.holder)} had inf or NaN in its gradients each "
                f"time, and max_consecutive_skips={own.limit} is the limit. To find the gradients "
                f"and their ranks, catch this error and call {self._noun}.nonfinite_report() on "
                "every rank before zero_grad(). To find the operation that made the first inf or "
                "NaN, call distamp.find_first_nonfinite."
            )

    def _announce_update(self) -> None:
        """Send a message before an ``update`` that follows inf or NaN.

        There one rank alone may have called ``nonfinite_report`` in its place, and every rank knows
        that it is such an iteration.
        """
        ranks = self._guard.ranks
        if ranks.overflowed:
            # Cleared after the message, so that ranks that catch its error send the next one alike.
            ranks.announce("update()")
            ranks.overflowed = False

    def _check_flags(self, new_scale: object) -> None:
        """Refuse an update before any flag is there, except one that sets the scale."""
        records = self._per_optimizer_states.values()
        if new_scale is None and not any(record["found_inf_per_device"] for record in records):
            raise CallOrderError(
                "No inf checks were recorded prior to update. Call step(optimizer) or "
                "unscale_(optimizer) before update()."
            )

    def _flags(self) -> list[Tensor]:
        """Return the flags of this iteration.

        By them a step that was kept is replayed, before the scale moves.
        """
        records, replay = self._per_optimizer_states.values(), self._guard.replay
        flags = [flag for r in records for flag in r["found_inf_per_device"].values()]
        if replay is not None:
            stepped = [p for each, _ in self._guard.optimizers.live() for p in parameters_of(each)]
            group = self._guard.ranks.process_group
            replay.step_ended(lambda: any(map(bool, flags)), self._divides, stepped, group)
        return flags

    def _waits(self, record: dict[str, Any]) -> bool:
        """Return whether a step may still go by what was unscaled before an update.

        Where nothing is divided, to look twice costs a pass and no more, but where masters took the
        gradients.
        """
        waits = record["stage"] is OptState.UNSCALED
        return waits and (self._divides or (OWN in record and record[OWN].source.casts))

    def _end_iteration(self) -> None:
        """Begin the next iteration, and keep what ``step`` alone may still go by."""
        own, records = self._guard, self._per_optimizer_states
        stages = [record["stage"] for record in records.values()]
        if OptState.STEPPED not in stages:
            own.kept.clear()
        elif OptState.UNSCALED in stages:
            own.kept |= {key: record for key, record in records.items() if self._waits(record)}
        for key, record in records.items():
            if key not in own.kept:
                record.pop(OWN, None)  # which has the record: nothing waits for a collection
        own.ranks.iteration += 1
        for hook in own.hooks:
            hook.iteration_ended()
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    @outside_the_graph
    def clip_grad_norm_(
        self,
        optimizer_or_parameters: torch.optim.Optimizer | Iterable[Tensor] | Tensor,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        is_replicated_fn: clipping.Declared | None = None,
        shard_group_fn: clipping.Declared | None = None,
    ) -> Tensor:
        """Clip gradients by the norm of the whole model, which may be sharded over the ranks.

        Collective: every rank of `process_group` must call this.

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
            is_replicated_fn: Takes a parameter of the model; returns whether every rank of the
                group has the same values, even if rounding makes their gradients differ.
            shard_group_fn: Takes a parameter of the model; returns whether every rank of the group
                has a different part, or the group or mesh over which it is cut.

        Returns:
            The norm before clipping, unscaled: 0-d float32, the same on every rank, where the
            scaler is disabled, too.

        Raises:
            CallOrderError: The gradients of the given parameters are not unscaled, and the
                parameters belong to no optimizer that this scaler has seen.
            ConfigError: ``max_norm`` or ``norm_type`` is out of range, or a parameter is
                declared both.
            ReplicaMismatchError: A tensor that counts as a replica differs between ranks; says what
                to declare.
        """
        given: Any = optimizer_or_parameters
        own = self._guard
        if not self._enabled:
            own.norm = norm = clip_grad_norm_(
                given,
                max_norm,
                norm_type,
                process_group=own.ranks.process_group,
                is_replicated_fn=is_replicated_fn,
                shard_group_fn=shard_group_fn,
            )
            if clipping.is_optimizer(given):
                self._state(given).norm = norm
            return norm
        given = list(given) if isinstance(given, Iterator) else given  # it is looked at twice
        divisor = self._divisor("clip_grad_norm_", given)
        device, group, error = divisor.device, self._group(divisor.device), None
        ones: list[Resolved] = []
        ready: list[Resolved] = []
        chosen = clipping.Chosen([], [], [])
        # On a device an error is raised at the next call: until then it is a norm of NaN.
        sums = torch.full((3,), math.nan, dtype=torch.float64, device=device)
        try:
            if clipping.is_optimizer(given):
                self._state(given)
            known = [optimizer for optimizer, _ in own.optimizers.live()]
            chosen = clipping.choose(given, known, scaled=self._divides)
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
            size = 1 if group is None else group.size
            sums = clipping.local_sums(
                chosen.shares, norm_type, device, size, is_replicated_fn, shard_group_fn
            )

        def measure_share() -> Tensor:
            return clipping.share_of_power(sums, 1 if group is None else group.size)

        adds_up = not _is_inf(norm_type)
        declared = declared_text(is_replicated_fn, shard_group_fn)
        differ, power = self._look(
            "clip_grad_norm_",
            divisor,
            ready,
            error=error,
            arguments=f"\nmax_norm={max_norm}\nnorm_type={norm_type}{declared}",
            then=measure,
            power=measure_share if adds_up else None,
        )
        is_known = isinstance(power, Tensor) or math.isfinite(power)
        if group is not None and own.ranks.clips_agree and adds_up and is_known:
            # A gather here would meet other collectives if this rank alone clips.
            norm = clipping.norm_of_power(power, norm_type, device)
        else:
            everyone = sums.view(1, 3)
            if group is not None:
                if not own.ranks.clips_agree:
                    own.ranks.settle()  # Ranks that differ raise before they gather.
                everyone = gather_sums(group, sums)
                self._compare_replicas(everyone, norm_type)
            norm = clipping.total(everyone, norm_type)
        own.norm = norm
        for state in (one.state for one in ones if one.state is not None):
            state.norm = norm
        if not (host.is_host(device) and norm.isfinite()):
            # All skip that it was measured over, but not where ranks differ, which may be in that.
            skip = norm.isfinite().logical_or(as_tensor(differ, device)).logical_not().float()
            for one in ones:
                flags = [skip, *one.record["found_inf_per_device"].values()]
                one.record["found_inf_per_device"] = {
                    device: as_tensor(merged(flags, device), device)
                }
        if error is not None:  # on a device the other ranks raise it at their next call
            raise error
        clipping.clip_(chosen.multiplied, norm, max_norm)
        return norm
