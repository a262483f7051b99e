"""find_first_nonfinite and StepReplay: the origin of a NaN or inf, by a replay of the step."""

from __future__ import annotations

import functools
import inspect
import logging
import operator
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distamp.error_text import count_text
from distamp.errors import CallOrderError
from distamp.fsdp_params import sharded_params
from distamp.module_names import module_names
from distamp.process_group import GroupLike
from distamp.report.nonfinite import NonFiniteOrigin
from distamp.report.nonfinite_tracer import (
    NonFiniteTracer,
    floating_tensors,
    merge_ranks,
    tensor_range,
)
from distamp.report.rank_group import RankGroup
from distamp.report.tensors import flatten_tensors, local_tensor, model_tensors
from distamp.report.tracing import StepTracer

__all__ = ["StepReplay", "StepSnapshot", "find_first_nonfinite"]

_log = logging.getLogger("distamp.report")
# The number of in-place changes of a tensor, which autograd counts.
_version = operator.attrgetter("_version")
_MAX_REPLAYS = 3
# A scaler finds its loss scale by skipping steps, so fewer skips in a row are not replayed.
_SKIPS_BEFORE_REPLAY = 3


class StepSnapshot:
    """The state that a step changes besides gradients: random states and buffers.

    Args:
        model: The model of the step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._random_states = _random_states()
        self._buffers = []
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                self._buffers.append((module, name, buffer, buffer.detach().clone()))
        self._param_syncs = [(ddp, ddp.require_forward_param_sync) for ddp in _ddp_modules(model)]

    def restore(self) -> None:
        """Restore the state."""
        for set_state, state in self._random_states:
            set_state(state)
        with torch.no_grad():
            for module, name, buffer, saved in self._buffers:
                buffer.copy_(saved)
                setattr(module, name, buffer)
        for ddp, param_sync in self._param_syncs:
            ddp.require_forward_param_sync = param_sync


def _random_states() -> list[tuple[Callable[[Any], Any], Any]]:
    """Return the random states of torch, python and numpy, each with its setter."""
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


def _gradients(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the gradients of a model with the names of their parameters."""
    rows = model_tensors(module_names(model))
    return [(row.name, row.tensor.grad) for row in rows if row.tensor.grad is not None]


def _ddp_modules(model: nn.Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def _drop_gradients(model: nn.Module) -> None:
    for param in sharded_params(model.parameters()):
        param.grad = None


def _stateful_hooks(ddp: DistributedDataParallel) -> list[str]:
    """Return the names of communication hooks that keep a state between steps."""
    names = []
    for hook, state in getattr(ddp, "_comm_hooks", ()):
        if not isinstance(state, dist.ProcessGroup | None):
            names.append(getattr(hook, "__name__", "?"))
    return names


def find_first_nonfinite(
    step: Callable[[], Any], model: nn.Module, *, process_group: GroupLike = None
) -> NonFiniteOrigin | None:
    """Find the operation that made the first NaN or inf of a step, by running the step again.

    ``torch.autograd.set_detect_anomaly`` raises in the first backward function that returns a NaN.
    This function names the operation that made the first one, in forward or backward, and its
    rank. It runs the step two to four times, and leaves every gradient None. It restores random
    states and buffers. Compiled code runs once compiled and then eagerly: the result for a compiled
    step that is finite is None, and an overflow of its eager replay is logged. Communication hooks
    of DDP that have a state do not run, because the replay would change the state.

    Collective: every rank of `process_group` must call this. Each passes the same step.

    ::

        def step():
            for batch in batches:
                scaler.scale(loss_fn(model(batch))).backward()

        print(distamp.find_first_nonfinite(step, model))

    Args:
        step: A function that runs forward and backward passes and nothing else, with the same
            batches each time. Tensors that it returns count as losses.
        model: The model of the step, in its wrappers.
        process_group: The ranks that train the model; the default group if None.

    Returns:
        The origin, the same on every rank, or None if all losses and gradients are finite.
        ``kind="unseen"`` if the replay is finite, but gradients were not finite before the call, or
        are not in a run without a trace, as in compiled code.

    Raises:
        TypeError: ``model`` is not a module, or ``step`` cannot be called.
        RankMismatchError: Another rank makes another call.
        DistampError: ``step`` raised on another rank. The rank on which it raised has its own
            error.
    """
    group = RankGroup.begin("find_first_nonfinite()", process_group)
    with group.raise_together("find_first_nonfinite()"):
        if not isinstance(model, nn.Module) or not callable(step):
            raise TypeError(
                "find_first_nonfinite takes a function that runs forward and backward, and the "
                f"model, a torch.nn.Module: got {type(step).__name__} and {type(model).__name__}"
            )
        snapshot = StepSnapshot(model)
    return _Search(step, model, snapshot, group).run()


class _Recorded(NamedTuple):
    """A step that was recorded before it ran, with the versions of its batches."""

    step: Callable[[], Any]
    snapshot: StepSnapshot
    versions: list[tuple[Tensor, int]]


def _bind_batches(step: Callable[..., Any], batches: tuple[Any, ...]) -> Callable[[], Any]:
    """Return a step as a function without arguments.

    Raises:
        TypeError: The step needs other arguments. Without this check the first skipped step would
            raise, because only a replay calls the function.
    """
    try:
        signature = inspect.signature(step)
    except ValueError:  # some functions in C have no signature
        return step
    if not any(map(_is_required, signature.parameters.values())):
        return step
    try:
        signature.bind(*batches)
    except TypeError as error:
        raise TypeError(
            f"record() replays a skipped step by step(*batches), and this step does not take "
            f"{count_text(len(batches), 'positional argument')} ({error}). Pass to record() what "
            "you pass to the step, or a step without arguments."
        ) from error
    return functools.partial(step, *batches)


def _is_required(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter has no default, also for ``*batches``, and not for ``**``."""
    is_mapping = parameter.kind is inspect.Parameter.VAR_KEYWORD
    return parameter.default is inspect.Parameter.empty and not is_mapping


class StepReplay:
    """Replay of a training step that was skipped, which logs the first operation that failed.

    Attached to a `StepGuard` or a `DistGradScaler`::

        replay = distamp.report.StepReplay(model).attach(guard)
        for batches in loader:
            def step(*batches):
                for batch in batches:
                    loss_fn(model(batch)).backward()

            replay.record(step, *batches)  # before the step: random states, and a copy of buffers
            step(*batches)
            guard.step(optimizer)
            guard.update()                 # replays a step that was skipped, and logs why

    A skipped step is replayed if nothing scales the loss, if a gradient has a NaN, or if three
    steps in a row were skipped; of a row of skipped steps one is replayed. The answer is logged as
    ``distamp.report`` at WARNING. After `record`, ``update`` reads the flag on the host, which
    waits for a device. Every rank of the guard or scaler records its step, because the replay runs
    over its ``process_group``.

    Args:
        model: The model of the step, in its wrappers.

    Attributes:
        found: The last answer; None if there was none yet, or if the replay was finite.
    """

    def __init__(self, model: nn.Module) -> None:
        self.found: NonFiniteOrigin | None = None
        self._model = model
        self._guard: Any = None
        self._recorded: _Recorded | None = None
        self._skips = 0
        self._was_replayed = False

    def attach(self, guard: Any) -> Self:
        """Have a guard or a scaler replay its skipped steps by this object.

        Args:
            guard: A `StepGuard` or a `DistGradScaler`, such as ``amp.scaler``. This object
                replaces a `StepReplay` that was attached before.

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
        """Stop the replays that `attach` began, if there was a guard."""
        if self._guard is not None:
            self._guard.attach_replay(None)
        self._guard = None
        self._recorded = None

    def record(self, step: Callable[..., Any], *batches: Any) -> None:
        """Record a step before it runs, so that ``update`` replays it if it is skipped.

        Every rank records its step. The last recorded one counts.

        Args:
            step: As of `find_first_nonfinite`, with the loss scaled by a scaler if there is one. A
                replay calls ``step(*batches)``, or ``step()`` if the step needs no arguments.
            batches: Batches of the step, in any nesting. The answer has a note if they changed in
                place before the replay.

        Raises:
            CallOrderError: `attach` was not called.
            TypeError: ``step`` needs other arguments than the batches.
        """
        if self._guard is None:
            raise CallOrderError(
                "record() was called on a StepReplay that no guard or scaler would call. Attach it "
                "first: replay = StepReplay(model).attach(guard)."
            )
        versions = [(tensor, _version(tensor)) for tensor in flatten_tensors(batches)]
        step = _bind_batches(step, batches)
        self._recorded = _Recorded(step, StepSnapshot(self._model), versions)

    def on_update(
        self,
        skipped: Callable[[], bool],
        scaled: bool,
        stepped: Sequence[Tensor],
        process_group: GroupLike = None,
    ) -> None:
        """Replay the recorded step if it was skipped for another reason than the loss scale.

        Collective: every rank of `process_group` must call this.

        Args:
            skipped: A function that reads whether any optimizer skipped its step, the same on
                every rank.
            scaled: Whether a loss is scaled, so that some steps are skipped for its overflow.
            stepped: The parameters of the optimizers; masters have taken the model's gradients.
            process_group: The ranks of the guard or scaler.
        """
        group = RankGroup.resolve(process_group)
        recorded, self._recorded = self._recorded, None
        if recorded is None:
            return
        if not skipped():
            self._skips = 0
            self._was_replayed = False
            return
        self._skips += 1
        if self._was_replayed:
            return
        must_replay = not scaled or self._skips >= _SKIPS_BEFORE_REPLAY or self._has_nan(stepped)
        if not any(group.gather(must_replay)):
            return
        changed = any(_version(tensor) != version for tensor, version in recorded.versions)
        search = _Search(recorded.step, self._model, recorded.snapshot, group, was_skipped=True)
        if any(group.gather(changed)):
            search.notes.append("a batch was changed in place since the step was recorded")
        self._was_replayed = True
        self.found = search.run()
        if group.is_first:
            _log.warning("a step was skipped: %s", self.found)

    def _has_nan(self, stepped: Sequence[Tensor]) -> bool:
        gradients = [param.grad for param in stepped if param.grad is not None]
        gradients += [gradient for _, gradient in _gradients(self._model)]
        return any(tensor_range("", local_tensor(gradient)).is_nan for gradient in gradients)


@dataclass
class _Replay:
    """One traced replay.

    Attributes:
        origin: The first origin on all ranks; None if the replay was finite.
        totals: The total of each rank, which is equal in two equal replays.
        ran_compiled: Whether compiled code ran eagerly on any rank.
    """

    origin: NonFiniteOrigin | None
    totals: list[float]
    ran_compiled: bool


class _Search:
    """The search for the first non-finite number of one step.

    Args:
        step: The step.
        model: Its model.
        snapshot: The state before the step.
        group: The ranks.
        was_skipped: Whether the step was not finite when it ran.

    Attributes:
        notes: Sentences for the answer.
    """

    def __init__(
        self,
        step: Callable[[], Any],
        model: nn.Module,
        snapshot: StepSnapshot,
        group: RankGroup,
        was_skipped: bool = False,
    ) -> None:
        self.notes: list[str] = []
        self._step = step
        self._model = model
        self._snapshot = snapshot
        self._group = group
        self._was_skipped = was_skipped
        self._untraced_is_finite: bool | None = None

    def run(self) -> NonFiniteOrigin | None:
        """Return the origin, or None if the step is finite.

        Collective: every rank of the group must call this.
        """
        present = StepSnapshot(self._model)
        was_finite = self._had_finite_gradients()
        try:
            replays = self._replay()
            origin = replays[0].origin
            if origin is None and self._untraced_is_finite is None:
                self._untraced_is_finite = self._run_untraced()
            was_finite = all(self._group.gather(was_finite))
        finally:
            present.restore()
            _drop_gradients(self._model)
        is_finite = was_finite and self._untraced_is_finite is True
        for ddp in _ddp_modules(self._model):
            for hook in _stateful_hooks(ddp):
                self.notes.append(f"the communication hook {hook} was left out")
        if any(replay.ran_compiled for replay in replays):
            self.notes.append("compiled code ran eagerly in the replay, which may round otherwise")
            if origin is not None and self._untraced_is_finite:
                self._note_eager_overflow(origin)
                origin = None
        if origin is None and is_finite:
            return None
        if origin is None:
            self.notes.insert(0, self._suspect(replays))
            return NonFiniteOrigin("unseen", notes=tuple(self.notes))
        if not _is_repeated(replays):
            self.notes.append(
                "the step is not deterministic: a second replay computed other numbers"
            )
        return replace(origin, notes=tuple(self.notes))

    def _suspect(self, replays: Sequence[_Replay]) -> str:
        """Return the most likely cause of numbers that no replay has."""
        ran_compiled = any(replay.ran_compiled for replay in replays)
        if ran_compiled and not self._untraced_is_finite:
            return "compiled code is the suspect, because only the compiled step is not finite"
        return (
            "the step may depend on state that the replay does not restore, such as a counter, a "
            "cache or an augmented batch"
        )

    def _had_finite_gradients(self) -> bool:
        if self._was_skipped:
            return False
        for _, gradient in _gradients(self._model):
            if not tensor_range("", local_tensor(gradient)).finite:
                return False
        return True

    def _note_eager_overflow(self, origin: NonFiniteOrigin) -> None:
        """Log and note an overflow of the eager replay, which the compiled step does not have."""
        sentence = f"the compiled step was finite. Its eager replay was not: {origin.sentence()}"
        if self._group.is_first:
            _log.warning("%s", sentence)
        self.notes.append(sentence)

    def _replay(self) -> list[_Replay]:
        """Replay the step under a trace until a replay is finite or equal to an earlier one."""
        if any(self._group.gather("torch._dynamo" in sys.modules)):
            # Under a function mode, torch.compile would never compile a function again.
            self._untraced_is_finite = self._run_untraced()
        replays: list[_Replay] = []
        # Only the first run makes the scale of a new scaler, so a second run may differ from it,
        # and a third one decides.
        while len(replays) < _MAX_REPLAYS:
            replays.append(self._run_traced())
            if replays[-1].origin is None or _is_repeated(replays):
                break
        return replays

    def _run_traced(self) -> _Replay:
        with self._group.raise_together("the step that is replayed"):
            self._snapshot.restore()
            listener = NonFiniteTracer(self._model)
            tracer = StepTracer((self._model,), [listener])
            for name, result in self._run_step(tracer):
                listener.check_result(name, result)
        results = self._group.gather(listener.result)
        totals = [result.total for result in results]
        ran_compiled = any(result.ran_compiled for result in results)
        return _Replay(merge_ranks(results), totals, ran_compiled)

    def _run_untraced(self) -> bool:
        """Run the step without a trace; return whether it is finite on every rank."""
        with self._group.raise_together("the step that is replayed"):
            self._snapshot.restore()
            is_finite = True
            for name, result in self._run_step(None):
                for tensor in floating_tensors(local_tensor(result)):
                    is_finite = is_finite and tensor_range(name, tensor).finite
        return all(self._group.gather(is_finite))

    def _run_step(self, tracer: StepTracer | None) -> list[tuple[str, Tensor]]:
        """Run the step; return its losses and gradients with their names."""
        _drop_gradients(self._model)
        with ExitStack() as stack:
            for ddp in _ddp_modules(self._model):
                # The hook's state would change. The mean of finite gradients is finite.
                if _stateful_hooks(ddp):
                    stack.enter_context(ddp.no_sync())
            if tracer is not None:
                stack.enter_context(tracer)
                # Backward passes of every device then run in this thread, which has the modes.
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            losses = flatten_tensors(self._step())
        return [("loss", loss) for loss in losses] + _gradients(self._model)


def _is_repeated(replays: Sequence[_Replay]) -> bool:
    """Return whether the last replay computed the same numbers as an earlier one."""
    return any(replay.totals == replays[-1].totals for replay in replays[:-1])
