"""The state of a communication hook: what a user sees of it, and what a scaler is joined with."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.arriving import Reports
from distamp.comm_hooks.buckets import Bucket, Buckets, reals_in
from distamp.comm_hooks.channel import Channel, check_member, resolve_group
from distamp.comm_hooks.choice import Choice
from distamp.comm_hooks.engine import Engine
from distamp.comm_hooks.engines import Engines, named_failures
from distamp.comm_hooks.headers import ReduceResult, lockstep_words
from distamp.comm_hooks.layout import Layout, Route
from distamp.comm_hooks.order import Staged, through
from distamp.comm_hooks.residuals import Residuals, check_residual
from distamp.comm_hooks.shards import ShardedGroup, alone
from distamp.comm_hooks.stats import Account, HookStats
from distamp.comm_hooks.wire import WireFormat, wire_format
from distamp.errors import LockstepError
from distamp.host import moved

__all__ = ["CommHookState", "state_of"]

# 2: residuals by parameter. 3: the same, and nothing else about the ranks.
_VERSION, _READ = 3, (2, 3)


class CommHookState:
    """The state of a hook that averages gradients through a wire; `register` returns one.

    Unlike the process group that torch's own hooks take for a state, it counts what it sends,
    and a `DistGradScaler` can be joined with it.

    A copy of it, as ``copy.deepcopy`` and ``torch.save`` of a DDP module make one, leaves the ranks
    out: torch registers no hook on a copy of a module, so it says, once, how to.

    Args:
        wire: The format on the way: a name of `WIRE_FORMATS`.
        process_group: The ranks to average over; None is the default group when first used.
        choice: How ``"auto"`` came to the format, for `stats`.

    Raises:
        ValueError: Unknown format, or a group that this rank is no member of.
    """

    def __init__(
        self,
        wire: str | WireFormat = "fp16",
        process_group: ProcessGroup | None = None,
        choice: Choice | None = None,
    ) -> None:
        self.wire = wire if isinstance(wire, WireFormat) else wire_format(wire)
        check_member(process_group)
        self.account = Account(choice=choice)
        self.groups: list[ShardedGroup] = []
        self.buckets = Buckets()
        self._group = None if process_group is None else weakref.ref(process_group)
        self._engines = Engines(self.wire, self.account)
        self._reports = Reports(self.account)
        self._scale: Tensor | None = None
        self._scaled_now = False
        self._names: dict[int, str] = {}
        self._parameters: dict[str, weakref.ref[Tensor]] = {}
        self._loaded: dict[str, Tensor] = {}
        self._copied = False

    def stats(self) -> HookStats:
        """Return what this rank has sent, waited for and found so far.

        On a device it waits for exchanges that are under way.
        """
        self._reports.collect(wait=True)
        return self.account.stats()

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that are averaged over.

        Raises:
            ValueError: torch.distributed is not initialised.
            RuntimeError: The group was destroyed.
        """
        group = None if self._group is None else self._group()
        if self._group is not None and group is None:
            raise RuntimeError(
                "the process group of this communication hook was destroyed; wrap the model and "
                "register the hook again"
            )
        return resolve_group(group)

    def channel(self, device: torch.device, group: ProcessGroup | None = None) -> Channel:
        """Return the channel for gradients on ``device``; the first call for it is collective."""
        return self._engines.channel(group or self.process_group, device)

    # -- copies ----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        warned, self._copied = self._copied, True
        return {**self.state_dict(), "choice": self.account.choice, "warned": warned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CommHookState.__init__(self, state["wire"], choice=state["choice"])
        self._loaded = dict(state["residuals"])
        self.buckets.scaled = state.get("scaled")
        self._copied = True
        if not state["warned"]:
            warnings.warn(
                "a copy of a module with a communication hook sends gradients uncompressed, as "
                "fp32: torch registers no hook on copies. If this one is trained, call "
                f'distamp.comm_hooks.register(model, "{self.wire.name}") on it',
                stacklevel=2,
            )

    # -- exchanges of whole gradients ------------------------------------------------------------

    def average(self, index: int, values: Tensor, parameters: Sequence[Tensor]) -> Future[Tensor]:
        """Average one bucket over all ranks, in place, while the caller goes on.

        Args:
            index: Its number, the same on all ranks.
            values: 1-D, contiguous, dense.
            parameters: Those whose gradients lie in it.

        Raises:
            LockstepError: Ranks exchange buckets of another length, dtype or format; on all ranks.
            RuntimeError: An exchange failed before, on whichever rank.
        """
        group = self.process_group
        if dist.get_world_size(group) == 1 or values.numel() == 0:
            return _completed(values)
        self._check_reports()
        engine = self._engines.engine(group, values.dtype, values.device, as_narrow=True)
        bucket = self.buckets.begin(index, parameters)
        layout = bucket.layout
        if layout is None or layout.numel != values.numel() or bucket.engine is not engine:
            bucket.moves_to(engine)
            edges = bucket.boundaries(values.numel())
            layout = engine.layout(f"bucket {index}", index, values.numel(), values.dtype, edges)
            bucket.layout = layout
        runner = self._engines.runner(group, values.device)
        if not engine.agreed(layout):
            engine.check(layout, runner.submit(partial(engine.facts_of_all, layout)).wait())
        unit = self._unit()
        residuals = self._residuals(bucket, engine, layout, parameters)
        scales = [] if self._scale is None else [self._scale]
        job = partial(self._average, engine, layout, values, bucket, residuals, unit)
        return runner.submit(job, uses=[values, *scales])

    def _average(
        self,
        engine: Engine,
        layout: Layout,
        values: Tensor,
        bucket: Bucket,
        residuals: Residuals | None,
        unit: Tensor | None,
    ) -> Staged[Tensor]:
        words = lockstep_words(0, None, values.device)
        if residuals is not None:
            # The scaler writes the next scale into the same tensor, maybe on another device.
            residuals.begin(None if unit is None else _copied(unit, values.device))
        staged = engine.staged(values, layout, words, feedback=residuals)
        doing = f"the exchange of {layout.name} in step {bucket.step}"
        result = yield from named_failures(staged, engine.channel, doing)
        bucket.note(result)
        self._reports.add(result)
        return values

    def _unit(self) -> Tensor | None:
        """Return the scale of a backward pass that an attached scaler scaled; None of any other.

        Residuals that are in the other of these units, by a factor that nobody knows, are dropped.
        """
        # A rank without more inputs is in no backward pass, and keeps to the scale it heard last.
        known = self._scaled_now or not torch_compat.in_backward_pass()
        unit = self._scale if known else None
        if self.buckets.scaled not in (None, unit is not None):
            self.buckets.forget_residuals()
            self._loaded = {}
        self.buckets.scaled = unit is not None
        return unit

    def _residuals(
        self, bucket: Bucket, engine: Engine, layout: Layout, parameters: Sequence[Tensor]
    ) -> Residuals | None:
        """Return the bucket's residuals, ready for an exchange; None for formats without."""
        if not engine.wire.needs_error_feedback:
            return None
        if bucket.residuals is None:
            bucket.residuals = Residuals(bucket.numels, engine.channel.size)
            adopted, bucket.adopted = bucket.adopted, {}
            for index, parameter in enumerate(parameters):
                loaded = self._loaded.pop(self._names.get(id(parameter), ""), None)
                if loaded is not None:
                    adopted[index] = loaded
            if adopted:
                bucket.residuals.adopt(adopted, engine.channel.device, _stages(layout, engine))
        return bucket.residuals

    # -- exchanges of shards ---------------------------------------------------------------------

    def exchange(
        self,
        values: Tensor,
        group: ProcessGroup,
        layout: Callable[[Engine], Layout],
        *,
        step: int,
        out: Tensor | None = None,
        divisor: float,
        terms: int | None = None,
        before: ReduceResult | None = None,
    ) -> ReduceResult:
        """Reduce-scatter ``values`` to ``out``, or average them, before this returns.

        Args:
            values: 1-D, contiguous, floating.
            group: The ranks.
            layout: Returns that of ``values``.
            step: Which exchange of this layout it is, for messages.
            out: As `Engine.staged` has it.
            divisor: As `Engine.staged` has it.
            terms: As `Engine.staged` has it.
            before: As `Engine.staged` has it.

        Raises:
            LockstepError: Ranks exchange different gradients.
            RuntimeError: An exchange failed, on whichever rank.
        """
        self._check_reports()
        if group.size() == 1:
            return alone(values, out, divisor, before)
        engine = self._engines.engine(group, values.dtype, values.device)
        how = layout(engine)
        if self._scale is not None and self._scale.device.type != "cpu":
            self._scale.record_stream(torch.accelerator.current_stream(self._scale.device))
        with torch.no_grad():
            doing = f"the exchange of {how.name} in step {step}"
            if not engine.agreed(how):
                engine.check(how, engine.facts_of_all(how))
            words = lockstep_words(0, None, values.device)
            staged = engine.staged(
                values, how, words, out=out, divisor=divisor, terms=terms, before=before
            )
            result = through(named_failures(staged, engine.channel, doing))
        self._reports.add(result)
        return result

    def _check_reports(self) -> None:
        """Refuse to go on after ranks were found, on a device, to be in different exchanges."""
        self._reports.collect(wait=False)
        if self._reports.out_of_step:
            raise LockstepError(
                "the ranks exchanged different gradients, or gradients of different iterations: "
                "run the same backward passes of the same model on every rank"
            )

    # -- checkpoints -----------------------------------------------------------------------------

    def name_parameters(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Give parameters the names by which a checkpoint knows them."""
        named = list(named_parameters)
        self._names = {id(parameter): name for name, parameter in named}
        self._parameters = {name: weakref.ref(parameter) for name, parameter in named}

    def state_dict(self) -> dict[str, Any]:
        """Return what rounding took from this rank's gradients; each rank saves its own.

        ``"residuals"`` has, by parameter name, fp32 tensors of shape (2, numel): of this rank's own
        gradient, and of the part of the mean that this rank owns (0 elsewhere). A complex parameter
        has twice as many, as `torch.view_as_real` has them. It is empty for formats without error
        feedback. ``"scaled"`` says whether they are in unscaled units, by an attached scaler, or in
        units of the gradients as they were exchanged; None before the first exchange.
        """
        residuals = {}
        for name, reference in self._parameters.items():
            parameter = reference()
            residual = None if parameter is None else self.buckets.residual_of(parameter)
            if residual is not None:
                residuals[name] = residual
        return {
            "version": _VERSION,
            "wire": self.wire.name,
            "scaled": self.buckets.scaled,
            "residuals": {**self._loaded, **residuals},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank, between any two backward passes.

        Residuals are dropped at the next exchange if a scaler is attached now and was not then, or
        the other way. A state without ``"scaled"`` is taken to be as the next exchange has them.

        Raises:
            TypeError: Not a dict.
            ValueError: A version that this distamp does not read, parameters that the model does
                not have, or residuals of another shape. Nothing is changed then.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                "a hook's state is the dict that hook.state_dict() returned, not "
                f"{state_dict!r:.80}"
            )
        version, residuals = state_dict.get("version"), state_dict.get("residuals")
        if not isinstance(version, int) or version not in _READ:
            raise ValueError(
                f"the hook's state has version {version!r}, and this distamp "
                f"reads {' and '.join(map(str, _READ))}: load what state_dict() returned"
            )
        if not isinstance(residuals, Mapping):
            raise ValueError(
                "the hook's state must have 'residuals', a dict of tensors by parameter, not "
                f"{residuals!r:.80}"
            )
        scaled = state_dict.get("scaled")
        if scaled is not None and not isinstance(scaled, bool):
            raise ValueError(
                f"'scaled' of the hook's state must be True, False or None, not {scaled!r:.80}"
            )
        unknown = sorted(map(str, set(residuals) - set(self._parameters)))
        if unknown:
            raise ValueError(
                f"the hook's state has residuals of {unknown[0]!r} and {len(unknown) - 1} other "
                "parameters that the model does not have: load it for the model it was saved of"
            )
        for name, residual in residuals.items():
            parameter = self._parameters[name]()
            check_residual(name, residual, None if parameter is None else reals_in(parameter))
        self.buckets.forget_residuals()
        self.buckets.scaled = scaled
        self._loaded = dict(residuals)

    # -- other ways ------------------------------------------------------------------------------

    def fell_back(self, reason: str) -> None:
        """Count a bucket that went another way."""
        self.account.fallbacks[reason] += 1

    def all_reduced(self, name: str, sent: Tensor, gradient: Tensor) -> None:
        """Count a bucket that was all-reduced as ``sent``."""
        size = dist.get_world_size(self.process_group)
        self.account.all_reduced(
            name,
            sent.numel() * sent.element_size(),
            gradient.numel() * gradient.element_size(),
            size,
        )

    def leave_out(self, parameters: Sequence[Tensor]) -> None:
        """Note that the gradients of ``parameters`` went another way."""
        self.buckets.leave_out(parameters)

    # -- with a scaler ---------------------------------------------------------------------------

    def scale_changed(self, scale: Tensor) -> None:
        """See `distamp.protocols.CommHook.scale_changed`."""
        self._scale, self._scaled_now = scale, True

    def step_ended(self, parameters: Sequence[Tensor] | None, found_inf: Tensor) -> None:
        """See `distamp.protocols.CommHook.step_ended`."""
        if self.wire.needs_error_feedback:
            self.buckets.step_ended(parameters, found_inf)

    def iteration_ended(self) -> None:
        """See `distamp.protocols.CommHook.iteration_ended`."""
        self._scaled_now = False
        self.buckets.iteration_ended()


def _stages(layout: Layout, engine: Engine) -> list[tuple[str, int, int]]:
    """Return what residuals of a layout are asked for: stage, first element, length."""
    found = [("mine", piece.rows.start, piece.rows.total) for piece in layout.pieces]
    if layout.route is Route.OWNERS:
        owned = [piece.owned_by(engine.channel.rank) for piece in layout.pieces]
        found += [("owned", where.start, where.stop - where.start) for where in owned]
    return found


def _copied(scale: Tensor, device: torch.device) -> Tensor:
    return scale.clone() if scale.device == device else moved(scale, device)


def _completed(value: Tensor) -> Future[Tensor]:
    """Return a future that has its value already."""
    devices: list[int | str | torch.device] = []
    if value.device.type != "cpu":
        devices.append(value.device)
    future: Future[Tensor] = Future(devices=devices)
    future.set_result(value)
    return future


# States of hooks that were given a process group, or None, where torch's take no more than that.
_states: weakref.WeakKeyDictionary[ProcessGroup, dict[str, CommHookState]] = (
    weakref.WeakKeyDictionary()
)


def state_of(state: CommHookState | ProcessGroup | None, wire: str) -> CommHookState:
    """Return the state itself, or the one that hooks of this format share for a process group.

    Raises:
        TypeError: ``state`` is something else.
    """
    if isinstance(state, CommHookState):
        return state
    if state is not None and not isinstance(state, ProcessGroup):
        raise TypeError(
            "the state of a communication hook must be a ProcessGroup, None (the default group) or "
            f"what distamp.comm_hooks.register returned, not {type(state).__name__}"
        )
    group = resolve_group(state)
    known = _states.setdefault(group, {})
    if wire not in known:
        known[wire] = CommHookState(wire, group)
    return known[wire]
