"""find_first_nonfinite: where the first NaN or inf of a step was born, found by replaying it."""

from __future__ import annotations

import logging
import operator
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distamp.errors import CallOrderError
from distamp.fsdp_params import sharded_params
from distamp.module_names import module_names
from distamp.process_group import GroupLike, resolve_process_group
from distamp.report.following import (
    begin_call,
    every_rank,
    held_by,
    is_first_rank,
    local_of,
    raised_on_every_rank,
    tensors_in,
)
from distamp.report.nonfinite import NonFiniteOrigin
from distamp.report.origins import Watch, first_of, floats_in, range_of

__all__ = ["StepReplay", "find_first_nonfinite"]

_log = logging.getLogger("distamp.report")
_version = operator.attrgetter("_version")


class _Kept:
    """What a step moves besides gradients: states of random numbers, and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._random = _random_states()
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._syncs = [(each, each.require_forward_param_sync) for each in _ddp_in(model)]

    def put_back(self) -> None:
        """Put all of it back as it was."""
        for put, state in self._random:
            put(state)
        with torch.no_grad():
            for module, name, buffer, copy in self._buffers:
                buffer.copy_(copy)
                setattr(module, name, buffer)
        for each, sync in self._syncs:
            each.require_forward_param_sync = sync


def _random_states() -> list[tuple[Callable[[Any], Any], Any]]:
    """The states of torch's, python's and numpy's random numbers, and what puts each back."""
    states: list[tuple[Callable[[Any], Any], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
    ]
    if torch.accelerator.is_available():
        device = torch.get_device_module(torch.accelerator.current_accelerator())
        states.append((device.set_rng_state, device.get_rng_state()))
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        states.append((numpy.set_state, numpy.get_state()))
    return states


def _run(step: Callable[[], Any], model: nn.Module, watch: Watch | None) -> bool:
    """Run forward and backward; return whether all losses and gradients are finite."""
    _drop_gradients(model)
    with ExitStack() as stack:
        for ddp in _ddp_in(model):
            # What such a hook keeps between steps would move. A mean of finite gradients is finite.
            if _hooks_with_a_state(ddp):
                stack.enter_context(ddp.no_sync())
        if watch is not None:
            stack.enter_context(watch.following())
            # Backward passes of every device in this thread, whose modes see them.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        losses = tensors_in(step())
    named = [("loss", each) for each in losses] + _gradients(model)
    if watch is not None:
        for name, each in named:
            watch.reach(each, name)
    return all(
        range_of(name, it).finite for name, each in named for it in floats_in(local_of(each))
    )


def _gradients(model: nn.Module) -> list[tuple[str, Tensor]]:
    held = held_by(module_names(model))
    return [(name, tensor.grad) for _, name, _, tensor in held if tensor.grad is not None]


def _ddp_in(model: nn.Module) -> list[DistributedDataParallel]:
    return [each for each in model.modules() if isinstance(each, DistributedDataParallel)]


def _drop_gradients(model: nn.Module) -> None:
    for parameter in sharded_params(model.parameters()):
        parameter.grad = None


def _hooks_with_a_state(model: DistributedDataParallel) -> list[str]:
    """Names of the communication hooks that keep something between steps."""
    hooks = getattr(model, "_comm_hooks", ())
    stateless = dist.ProcessGroup | None
    return [getattr(hook, "__name__", "?") for hook, own in hooks if not isinstance(own, stateless)]


def find_first_nonfinite(
    step: Callable[[], Any], model: nn.Module, *, process_group: GroupLike = None
) -> NonFiniteOrigin | None:
    """Find where the first NaN or inf of a step is born, by running the step again.

    ``torch.autograd.set_detect_anomaly`` raises in the first backward function that returns a NaN;
    this names the operation that made the first one, in forward or backward, on which rank.
    It runs the step two to four times, and leaves every gradient None. States of random numbers and
    buffers are put back. Compiled code runs once compiled and then eagerly: a compiled step that is
    finite has no answer, also if its eager replay overflows, which is logged. DDP's communication
    hooks that have a state are left out, as it would move.

    Collective: every rank of `process_group` must call this. Each passes the same step.

    ::

        def step():
            for batch in batches:
                scaler.scale(loss_fn(model(batch))).backward()

        print(distamp.find_first_nonfinite(step, model))

    Args:
        step: Runs forward and backward passes and nothing else, with the same batches each time.
            What it returns counts as losses.
        model: Whose modules it runs, as it is wrapped.
        process_group: The ranks that train the model. None is the default group.

    Returns:
        Where it was born, the same on every rank; None if all losses and gradients are finite.
        ``kind="unseen"`` if the replay shows nothing, and gradients were not finite before, or are
        not when nobody watches, as of compiled code.

    Raises:
        TypeError: ``model`` is not a module, or ``step`` cannot be called.
        RankMismatchError: Another rank makes another call.
        DistampError: ``step`` raised on another rank. Where it raises here, that is raised.
    """
    group = begin_call("find_first_nonfinite()", process_group)
    with raised_on_every_rank("find_first_nonfinite()", group):
        if not isinstance(model, nn.Module) or not callable(step):
            raise TypeError(
                "find_first_nonfinite takes a function that runs forward and backward, and the "
                f"model, a torch.nn.Module: got {type(step).__name__} and {type(model).__name__}"
            )
        kept = _Kept(model)
    return _search(step, model, kept, (), False, group)


class StepReplay:
    """Replay of a training step that was skipped, which logs the first operation that failed.

    Attached to a `StepGuard` or a `DistGradScaler`::

        replay = distamp.report.StepReplay(model).attach(guard)
        for batches in loader:
            def step():
                for batch in batches:
                    loss_fn(model(batch)).backward()

            replay.record(step, *batches)  # before the step: random states, and a copy of buffers
            step()
            guard.step(optimizer)
            guard.update()                 # replays a step that was skipped, and logs why

    It is replayed where it was skipped and nothing scales the loss, or a gradient has a NaN, or
    three steps in a row were skipped; once in a row of skipped steps. The answer is logged as
    ``distamp.report`` at WARNING. While a step is kept, ``update`` reads the flag on the host,
    which waits for a device. Every rank of the guard or scaler keeps its step: the replay
    is over its ``process_group``.

    Args:
        model: As it is wrapped.

    Attributes:
        found: The last answer; None if there was none yet, or all was finite.
    """

    def __init__(self, model: nn.Module) -> None:
        self.found: NonFiniteOrigin | None = None
        self._model = model
        self._guard: Any = None
        self._kept: tuple[Callable[[], Any], _Kept, list[tuple[Tensor, int]]] | None = None
        # How many steps were skipped in a row; -1 once they were replayed.
        self._skips = 0

    def attach(self, guard: Any) -> Self:
        """Have a guard or a scaler replay its skipped steps by this object.

        Args:
            guard: A `StepGuard` or a `DistGradScaler`, such as ``amp.scaler``. It replays by one
                object, so this one takes the place of another.

        Returns:
            This object.

        Raises:
            TypeError: ``guard`` is neither.
        """
        if not callable(getattr(guard, "attach_replay", None)):
            raise TypeError(
                "StepReplay.attach() takes a StepGuard or a DistGradScaler, such as amp.scaler, "
                f"not {type(guard).__name__}."
            )
        guard.attach_replay(self)
        self._guard = guard
        return self

    def detach(self) -> None:
        """Stop what `attach` began; does nothing if there was no guard."""
        if self._guard is not None:
            self._guard.attach_replay(None)
        self._guard = None
        self._kept = None

    def record(self, step: Callable[[], Any], *batches: Any) -> None:
        """Record a step before it runs, so that ``update`` replays it if it is skipped.

        Every rank records its step. The last recorded one counts.

        Args:
            step: As of `find_first_nonfinite`, with the loss scaled by a scaler if there is one.
            batches: Batches of the step, in any nesting. The answer says if they changed in place
                before the replay.

        Raises:
            CallOrderError: `attach` was not called.
        """
        if self._guard is None:
            raise CallOrderError(
                "record() was called on a StepReplay that no guard or scaler would call. Attach it "
                "first: replay = StepReplay(model).attach(guard)."
            )
        versions = [(each, _version(each)) for each in tensors_in(batches)]
        self._kept = step, _Kept(self._model), versions

    def on_update(
        self,
        skipped: Callable[[], bool],
        scaled: bool,
        stepped: Sequence[Tensor],
        process_group: GroupLike = None,
    ) -> None:
        """Replay what was kept, if it was skipped as it should not be.

        Collective: every rank of `process_group` must call this.

        Args:
            skipped: Reads whether any optimizer skipped its step, the same on every rank.
            scaled: Whether a loss is scaled: then some steps are skipped for its overflow.
            stepped: What optimizers step: masters have taken the model's gradients.
            process_group: The ranks of the guard or scaler.
        """
        group = resolve_process_group(process_group)
        if self._kept is None:
            return
        (step, kept, versions), self._kept = self._kept, None
        if not skipped():
            self._skips = 0
        elif self._skips >= 0:
            self._skips += 1
            taken = [each.grad for each in stepped if each.grad is not None]
            gradients = taken + [gradient for _, gradient in _gradients(self._model)]
            nan = any(range_of("", local_of(each)).is_nan for each in gradients)
            if any(every_rank(nan or not scaled or self._skips >= 3, group)):
                mine = any(_version(each) != version for each, version in versions)
                changed = any(every_rank(mine, group))
                notes = ["a batch was changed in place since the step was recorded"] * changed
                self._skips = -1
                self.found = _search(step, self._model, kept, notes, True, group)
                if is_first_rank(group):
                    _log.warning("a step was skipped: %s", self.found)


def _runs_finite(
    step: Callable[[], Any], model: nn.Module, kept: _Kept, group: dist.ProcessGroup | None
) -> bool:
    """Run the step without a watch; return whether it is finite on every rank."""
    with raised_on_every_rank("the step that is replayed", group):
        kept.put_back()
        is_finite = _run(step, model, None)
    return all(every_rank(is_finite, group))


def _search(
    step: Callable[[], Any],
    model: nn.Module,
    kept: _Kept,
    notes: Sequence[str],
    was_skipped: bool,
    group: dist.ProcessGroup | None,
) -> NonFiniteOrigin | None:
    """Replay a step from what was kept; say ``notes`` in the answer.

    Collective: every rank of ``group`` must call this.
    """
    now = _Kept(model)
    finite = not was_skipped and all(
        range_of("", local_of(it)).finite for _, it in _gradients(model)
    )
    found: list[NonFiniteOrigin | None] = []
    totals = []
    ran_compiled = False
    runs_finite: bool | None = None
    try:
        if any(every_rank("torch._dynamo" in sys.modules, group)):
            # Compiled code runs before its eager replay: under a function mode torch.compile would
            # give up a function that it has not compiled yet.
            runs_finite = _runs_finite(step, model, kept, group)
        for _ in range(3):
            with raised_on_every_rank("the step that is replayed", group):
                kept.put_back()
                watch = Watch(model)
                _run(step, model, watch)
            answer = watch.fed, watch.reached, watch.total, watch.ran_compiled
            everyone = every_rank(answer, group)
            found.append(first_of([each[:2] for each in everyone]))
            totals.append([each[2] for each in everyone])
            ran_compiled |= any(each[3] for each in everyone)
            # Where the second differs a third decides: only the first makes a scaler's scale.
            if found[-1] is None or totals[-1] in totals[:-1]:
                break
        if found[0] is None and runs_finite is None:
            runs_finite = _runs_finite(step, model, kept, group)
        if found[0] is None or ran_compiled:
            finite = all(every_rank(finite, group)) and runs_finite is True
    finally:
        now.put_back()
        _drop_gradients(model)
    hooks = [name for each in _ddp_in(model) for name in _hooks_with_a_state(each)]
    notes = [*notes, *(f"the communication hook {name} was left out" for name in hooks)]
    if ran_compiled:
        notes.append("compiled code ran eagerly in the replay, which may round otherwise")
    if found[0] is not None and ran_compiled and runs_finite:
        # The eager run overflowed, and it is not the step that trains.
        sentence = f"the compiled step was finite. Its eager replay was not: {found[0].sentence()}"
        if is_first_rank(group):
            _log.warning("%s", sentence)
        notes.append(sentence)
        return None if finite else NonFiniteOrigin("unseen", notes=tuple(notes))
    if found[0] is None:
        return None if finite else NonFiniteOrigin("unseen", notes=tuple(notes))
    if totals[-1] not in totals[:-1]:
        notes.append("the step is not deterministic: a second replay computed other numbers")
    return replace(found[0], notes=tuple(notes))
