"""`Snapshots`: copies of a run's state in host memory, to which all ranks can go back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distamp.error_text import count_text, lines_by_rank, names_with_ranks_text, ranks_text
from distamp.errors import (
    CallOrderError,
    ConfigError,
    NonFiniteWeightsError,
    RankMismatchError,
)
from distamp.grads import found_inf_tensor
from distamp.guard.rank_sync import CallFingerprint, Exchange, MissingGrads, RankSync
from distamp.guard.snapshot_state import (
    ExtraState,
    GeneratorStates,
    HostCopies,
    ModelState,
    OptimizerState,
    SnapshotPart,
    SourceState,
    clear_gradients,
)
from distamp.guard.step_guard import StepGuardBase
from distamp.guard.weights import nonfinite_state_names
from distamp.observers import COMM_HOOK_ATTR, SnapshotSource
from distamp.optim_utils import describe_optimizer, unwrap_optimizer
from distamp.process_group import MessageGroup

__all__ = ["Snapshots"]

_logger = logging.getLogger("distamp.guard")
_RECORD = "snapshots.record()"
_REWIND = "snapshots.rewind()"


@dataclass
class _Snapshot:
    """One snapshot of this rank.

    Attributes:
        iteration: The number of `Snapshots.record` calls until then, without the calls that an
            earlier rewind took back.
        copies: The tensors.
        states: For each part of a snapshot its saved state.
    """

    iteration: int
    copies: HostCopies
    states: list[Any]


class Snapshots:
    """Copies of a run's state in host memory, to which all ranks can go back.

    Each rank copies its part of the model, so any layout works, and nothing is sent or written to a
    disk. A snapshot has weights, buffers, optimizer state, fp32 masters, loss scale, counts of
    steps, rounding errors of communication hooks and random generators. It is checked before it is
    taken, so it never has the fault for which a run goes back.

    The data loader is not rewound, so the run continues with the next batch. A run that went back
    is bit-identical to a run from the snapshot that gets the same next batches. Gradients that
    wait over an ``update`` are no part of a snapshot.

    Args:
        model: The model, or several, wrapped as they are trained.
        optimizers: The optimizer, or several.
        guard: The `StepGuard`, `DistGradScaler` or `GradScaler` that steps them. With an `Amp`,
            call ``amp.snapshots()``.
        every: The number of iterations from one snapshot to the next; >= 1.
        keep: The number of snapshots in memory; >= 1.
        extra: Further objects: learning-rate schedulers, an EMA, a data loader with state. Each
            has ``state_dict`` and ``load_state_dict``, or is a ``torch.Generator``.

    Raises:
        TypeError: An argument has another type.
        ConfigError: ``every`` or ``keep`` is no integer >= 1.

    Example::

        guard = distamp.StepGuard()
        snapshots = distamp.guard.Snapshots(model, optimizer, guard, extra=(schedule,))
        for inputs, targets in batches:
            try:
                optimizer.zero_grad()
                loss_fn(model(inputs), targets).backward()
                guard.step(optimizer)
                guard.update()
                schedule.step()
                snapshots.record()
            except distamp.errors.NonFiniteError:
                snapshots.rewind()

    The first rank logs the bytes of a snapshot before the first one is taken, at INFO, as
    ``distamp.guard``.

    Source: Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
    Checkpoints", 2023, keeps such copies for machines that fail.
    """

    # Private attributes that survive a call:
    # _iteration: calls of `record`, without the calls that a rewind took back.
    # _next_iteration: the value of `_iteration` at which the next snapshot is due.
    # _snapshots: the snapshots, with the oldest first.
    # _has_logged_bytes: whether the bytes of a snapshot were logged.

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        guard: Any,
        every: int = 50,
        keep: int = 2,
        extra: Iterable[Any] = (),
    ) -> None:
        self._models = _check_models(model)
        self._optimizers = _check_optimizers(optimizers)
        self._guard = _check_guard(guard)
        self._interval = _check_count("every", every)
        self._max_snapshots = _check_count("keep", keep)
        self._extra = _check_extra(extra)
        self._iteration = 0
        self._next_iteration = 0
        self._snapshots: list[_Snapshot] = []
        self._has_logged_bytes = False

    def __repr__(self) -> str:
        """Return the iterations of the snapshots; sends nothing."""
        iterations = [snapshot.iteration for snapshot in self._snapshots]
        return f"<Snapshots of iterations {iterations}, now {self._iteration}>"

    # -- record ------------------------------------------------------------------------------------

    @torch.no_grad()
    def record(self) -> None:
        """End an iteration, and take a snapshot at the first call and when one is due.

        Collective: every rank of `process_group` must call this. It sends a message only when a
        snapshot is due.

        Call it once in each iteration, after ``update``. A call before the first iteration takes a
        snapshot of the beginning. If a rank has not enough memory, no rank takes the snapshot, and
        the first rank logs a warning.

        Raises:
            CallOrderError: A step was made, and ``update`` was not called since.
            NonFiniteWeightsError: Weights or optimizer state have inf or NaN on any rank. Older
                snapshots stay.
            ReplicaMismatchError: Replicas differ between ranks, unless the guard only warns.
            RankMismatchError: Another rank makes another call, or has other settings.
        """
        guard = self._guard
        sync = guard.rank_sync
        self._iteration += 1
        if self._iteration < self._next_iteration:
            with sync.errors_sent_later():
                guard.check_between_iterations(_RECORD)
            return
        sync.announcement_group()  # The first rank is known from here on.
        snapshot: _Snapshot | None = None
        error: Exception | None = None
        shortage = ""
        try:
            guard.check_between_iterations(_RECORD)
            # Late reads of a device belong to the counts in the snapshot.
            sync.flush()
            snapshot = self._save()
            shortage = self._allocate(snapshot)
        except Exception as raised:
            error = raised
        ranks_without_memory = self._check_state(error, shortage)
        self._next_iteration = self._iteration + self._interval
        if ranks_without_memory or snapshot is None:
            return
        # The memory of the oldest snapshot is overwritten now.
        if len(self._snapshots) == self._max_snapshots:
            self._snapshots.pop(0)
        snapshot.copies.copy()
        self._snapshots.append(snapshot)

    def _save(self) -> _Snapshot:
        """Return a snapshot without the copies of its tensors."""
        copies = HostCopies()
        states: list[Any] = []
        for part in self._parts():
            states.append(part.save(copies))
        return _Snapshot(self._iteration, copies, states)

    def _parts(self) -> list[SnapshotPart]:
        """Return the parts of a snapshot, in the order in which they are written back."""
        parts: list[SnapshotPart] = []
        for stateful in self._extra:
            is_source = isinstance(stateful, SnapshotSource)
            parts.append(SourceState(stateful) if is_source else ExtraState(stateful))
        # Later than the others, because loading a state may write weights and learning rates.
        for model in self._models:
            parts.append(ModelState(model))
        for optimizer in self._optimizers:
            parts.append(OptimizerState(optimizer))
        parts.append(SourceState(self._guard))
        # Hooks read the loss scale of the guard.
        for hook in self._comm_hooks():
            parts.append(SourceState(hook))
        # Last, because code above may draw random numbers.
        parts.append(GeneratorStates())
        return parts

    def _comm_hooks(self) -> list[SnapshotSource]:
        """Return the communication hooks of the guard and of the models."""
        candidates: list[Any] = list(self._guard.attached_comm_hooks)
        for model in self._models:
            for module in model.modules():
                candidates.append(getattr(module, COMM_HOOK_ATTR, None))
        hooks: dict[int, SnapshotSource] = {}
        for candidate in candidates:
            if isinstance(candidate, SnapshotSource):
                hooks[id(candidate)] = candidate
        return list(hooks.values())

    def _allocate(self, snapshot: _Snapshot) -> str:
        """Allocate the memory of a snapshot; return an error's text if there is not enough."""
        if not self._has_logged_bytes:
            self._has_logged_bytes = True
            if self._guard.rank_sync.is_first_rank:
                _logger.info(
                    "Each snapshot takes %s bytes of host memory on this rank, and %s.",
                    f"{snapshot.copies.nbytes:,}",
                    "1 is kept" if self._max_snapshots == 1 else f"{self._max_snapshots} are kept",
                )
        recycled = None
        if len(self._snapshots) == self._max_snapshots:
            recycled = self._snapshots[0].copies
        try:
            snapshot.copies.allocate(recycled)
        except (MemoryError, RuntimeError) as error:
            first_line = str(error).partition("\n")[0]
            return f"{type(error).__name__}: {first_line:.200}"
        return ""

    def _check_state(self, error: Exception | None, shortage: str) -> list[int]:
        """Check the live state, and agree with all ranks to copy it, in one message.

        Collective: every rank of the guard's group must call this.

        Args:
            error: The error for which this rank cannot take a snapshot; every rank raises it.
            shortage: Text about missing memory on this rank; empty if there is enough.

        Returns:
            The ranks without memory. If there is such a rank, no rank copies.

        Raises:
            NonFiniteWeightsError: Weights or optimizer state of a rank have inf or NaN.
            ReplicaMismatchError: Replicas differ between ranks.
            RankMismatchError: Another rank makes another call, or has other settings.
        """
        sync = self._guard.rank_sync
        bad_names: list[str] = []
        if error is None:
            try:
                bad_names = self._find_nonfinite()
            except Exception as raised:
                error = raised
        group = sync.announcement_group()
        if group is None:
            if error is not None:
                raise error
            rows = [(sync.rank, bad_names, shortage)]
        else:
            flags = [bool(bad_names), bool(shortage)]
            if not self._any_flag(sync, group, flags, error):
                return []
            rows = sync.all_gather((sync.rank, bad_names, shortage), group)
        self._raise_nonfinite(rows)
        return self._log_shortage(rows)

    def _any_flag(
        self, sync: RankSync, group: MessageGroup, flags: Sequence[bool], error: Exception | None
    ) -> bool:
        """Send the message before a copy; return whether any rank has set a flag.

        Collective: every rank of ``group`` must call this.

        Args:
            sync: The messages of the guard.
            group: The group of the message.
            flags: The flags of this rank: whether it has inf or NaN, and whether memory is missing.
            error: The error of this rank, which every rank raises.
        """
        exchange = Exchange(sync, group, lambda text: CallFingerprint(_RECORD, settings=text))
        exchange.settings = f"\nevery={self._interval}\nkeep={self._max_snapshots}"
        exchange.has_read_grads = True
        exchange.error = error
        for flag in flags:
            exchange.missing_grads.append(MissingGrads())
            exchange.found_inf.append(found_inf_tensor(flag, group.device))
        if not flags[0]:
            # Ranks compare replicas only if no rank has inf or NaN, which is the clearer error.
            self._guard.compare_replicas_in_next_message()
        sync.send_outside_step(exchange, group)
        # A flag of this message is no overflow of a step.
        sync.found_inf_on_host = False
        return any(map(_is_flagged, exchange.synced))

    def _find_nonfinite(self) -> list[str]:
        """Return the names of weights and optimizer state with inf or NaN on this rank."""
        names: dict[Tensor, str] = {}
        for model in self._models:
            for name, param in model.named_parameters():
                names.setdefault(param, name)
        return nonfinite_state_names(self._optimizers, names)

    def _raise_nonfinite(self, rows: Sequence[tuple[int, list[str], str]]) -> None:
        """Raise on every rank if weights or optimizer state of a rank have inf or NaN."""
        rank_names: list[tuple[int, str]] = []
        for rank, bad_names, _ in rows:
            for name in bad_names:
                rank_names.append((rank, name))
        if not rank_names:
            return
        last_steps: list[str] = []
        for optimizer in self._optimizers:
            taken = self._guard.steps_taken(optimizer)
            if taken:
                last_steps.append(f"number {taken} of {describe_optimizer(optimizer)}")
        origin = "No step was taken before, so the model came with them."
        if last_steps:
            origin = f"The last step that was taken is {' and '.join(last_steps)}."
        fix = "Load an older checkpoint."
        if self._snapshots:
            fix = "Go back by snapshots.rewind()."
        raise NonFiniteWeightsError(
            f"No snapshot of iteration {self._iteration} was taken, because these tensors have inf "
            f"or NaN: {names_with_ranks_text(rank_names)}. {origin} {fix}"
        )

    def _log_shortage(self, rows: Sequence[tuple[int, list[str], str]]) -> list[int]:
        """Log the ranks without memory on the first rank, and return them."""
        ranks: list[int] = []
        text = ""
        for rank, _, shortage in rows:
            if shortage:
                ranks.append(rank)
                text = text or shortage
        if ranks and self._guard.rank_sync.is_first_rank:
            _logger.warning(
                "No rank took the snapshot of iteration %d, because %s has not enough host memory "
                "(%s). The next one is due after %s.",
                self._iteration,
                ranks_text(ranks),
                text,
                count_text(self._interval, "iteration"),
            )
        return ranks

    # -- rewind ------------------------------------------------------------------------------------

    @torch.no_grad()
    def rewind(self, *, older: int = 0) -> int:
        """Go back to the newest snapshot on all ranks, in place.

        Collective: every rank of `process_group` must call this.

        Works inside of an ``except`` around ``step``, after an error that every rank has raised.
        State that came later is deleted, newer snapshots are dropped, and all gradients and the
        iteration under way are cleared. Tensors are written in place, so captured graphs, compiled
        code and buckets of DDP stay valid.

        Args:
            older: The number of newest snapshots to pass over, for a fault that is older than the
                newest snapshot; equal on all ranks.

        Returns:
            The number of iterations that every rank goes back: the `record` calls since the
            snapshot, including one that raised. An iteration that raised before its `record` is not
            counted.

        Raises:
            CallOrderError: There is no such snapshot on all ranks.
            ConfigError: The model or an optimizer has other parameters than in the snapshot, or
                ``older`` is no integer >= 0.
            RankMismatchError: Another rank makes another call, or has called `record` another
                number of times.
        """
        sync = self._guard.rank_sync
        error: Exception | None = None
        if type(older) is not int or older < 0:
            error = ConfigError(f"older must be an integer >= 0, not {older!r}.")
        # An error that is read late belongs to the steps that are taken back.
        sync.drain()
        self._guard.drop_iteration()
        sync.announce(_REWIND, f"\nolder={older}", error=error)
        if error is not None:  # A single rank sends nothing.
            raise error
        snapshot = self._choose_snapshot(older)
        try:
            self._restore(snapshot)
        except Exception as raised:
            error = raised
        # Every rank raises if one could not go back.
        sync.announce(_REWIND, error=error)
        if error is not None:
            raise error
        while self._snapshots[-1] is not snapshot:
            self._snapshots.pop()
        steps = self._iteration - snapshot.iteration
        self._iteration = snapshot.iteration
        self._next_iteration = snapshot.iteration + self._interval
        if sync.is_first_rank:
            _logger.info(
                "All ranks went back %s, to the snapshot of iteration %d.",
                count_text(steps, "iteration"),
                snapshot.iteration,
            )
        return steps

    def _choose_snapshot(self, older: int) -> _Snapshot:
        """Return the newest snapshot that all ranks have, after passing over some.

        Collective: every rank of the guard's group must call this.

        Raises:
            CallOrderError, ConfigError, RankMismatchError: As `rewind`, on every rank.
        """
        snapshots = {snapshot.iteration: snapshot for snapshot in self._snapshots}
        misfits: dict[int, str] = {}
        for iteration, snapshot in snapshots.items():
            misfits[iteration] = self._find_misfit(snapshot)
        sync = self._guard.rank_sync
        row = sync.rank, self._iteration, misfits
        rows = sync.all_gather(row, sync.announcement_group())
        if len({iteration for _, iteration, _ in rows}) > 1:
            lines = lines_by_rank(
                (rank, f"record() called {count_text(iteration, 'time')}")
                for rank, iteration, _ in rows
            )
            head = "The ranks differ in the number of record() calls, so no rank goes back."
            fix = "Call record() on every rank once in each iteration, after update()."
            raise RankMismatchError("\n".join([head, *lines, fix]))
        common = set(snapshots)
        for _, _, remote_misfits in rows:
            common &= remote_misfits.keys()
        if len(common) <= older:
            raise CallOrderError(self._no_snapshot_text(older, len(common), rows))
        iteration = sorted(common)[-1 - older]
        for rank, _, remote_misfits in rows:
            if remote_misfits[iteration]:
                raise ConfigError(
                    f"No rank went back to the snapshot of iteration {iteration}. "
                    f"{remote_misfits[iteration]} (rank {rank})"
                )
        return snapshots[iteration]

    def _find_misfit(self, snapshot: _Snapshot) -> str:
        """Return why a snapshot cannot be restored; empty if it can."""
        parts = self._parts()
        if len(parts) != len(snapshot.states):
            return (
                "A communication hook was attached or detached since the snapshot. Create new "
                "Snapshots after that."
            )
        try:
            for part, state in zip(parts, snapshot.states, strict=True):
                part.check(state)
        except Exception as error:
            # The other ranks wait for this answer.
            return str(error) if isinstance(error, ConfigError) else repr(error)
        return ""

    def _no_snapshot_text(
        self, older: int, num_common: int, rows: Sequence[tuple[int, int, dict[int, str]]]
    ) -> str:
        if older and num_common:
            return (
                f"rewind(older={older}) was called, and there "
                f"{'is' if num_common == 1 else 'are'} {count_text(num_common, 'snapshot')}. Pass "
                "a smaller number, or keep more snapshots by keep=."
            )
        held_by = [rank for rank, _, misfits in rows if misfits]
        if held_by:
            return (
                f"rewind() was called, and only {ranks_text(held_by)} has a snapshot. Load a "
                "checkpoint on every rank."
            )
        return (
            "rewind() was called before a snapshot was taken. The first call of record() takes "
            "one. Load a checkpoint on every rank."
        )

    def _restore(self, snapshot: _Snapshot) -> None:
        """Write a snapshot back, and clear everything that belongs to the iteration under way."""
        snapshot.copies.wait()
        for part, state in zip(self._parts(), snapshot.states, strict=True):
            part.restore(state)
        clear_gradients(self._models, self._optimizers)
        # Casts of the weights from before.
        torch.clear_autocast_cache()
        # The next snapshot may overwrite the memory from which devices still copy.
        snapshot.copies.wait()


def _is_flagged(synced: Any) -> bool:
    """Return whether any rank has set a flag; the same on all ranks."""
    return bool(synced.overflow_ranks) or bool(synced.num_overflow_ranks)


# -- arguments -------------------------------------------------------------------------------------


def _check_models(model: Any) -> list[nn.Module]:
    models = [model] if isinstance(model, nn.Module) else list(model)
    for candidate in models:
        if not isinstance(candidate, nn.Module):
            raise TypeError(
                f"Snapshots takes a model or several, not {type(candidate).__name__}. Pass the "
                "wrapped model, then the optimizers, then the guard."
            )
    return models


def _check_optimizers(optimizers: Any) -> list[Any]:
    is_single = hasattr(optimizers, "param_groups")
    candidates = [optimizers] if is_single else list(optimizers)
    for candidate in candidates:
        if not hasattr(unwrap_optimizer(candidate), "param_groups"):
            raise TypeError(
                f"Snapshots takes an optimizer or several, not {type(candidate).__name__}. Pass "
                "the model, then the optimizers, then the guard."
            )
    return candidates


def _check_guard(guard: Any) -> StepGuardBase:
    if not isinstance(guard, StepGuardBase):
        raise TypeError(
            f"Snapshots takes a StepGuard or a DistGradScaler, not {type(guard).__name__}. With an "
            "Amp, call amp.snapshots()."
        )
    return guard


def _check_count(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} must be an integer >= 1, not {value!r}.")
    return value


def _check_extra(extra: Any) -> list[Any]:
    if hasattr(extra, "state_dict") or isinstance(extra, torch.Generator):
        raise TypeError(
            f"extra= takes a tuple of objects. Pass extra=({type(extra).__name__.lower()},)."
        )
    stateful: list[Any] = list(extra)
    for candidate in stateful:
        if isinstance(candidate, torch.optim.Optimizer):
            raise TypeError(
                f"extra= contains {describe_optimizer(candidate)}, whose load_state_dict() rounds "
                "float32 state of half-precision parameters. Pass it in optimizers."
            )
        if isinstance(candidate, torch.Generator | SnapshotSource):
            continue
        methods = ("state_dict", "load_state_dict")
        if not all(callable(getattr(candidate, method, None)) for method in methods):
            raise TypeError(
                f"extra= contains {type(candidate).__name__}, which has no state_dict() and "
                "load_state_dict(). Pass objects with both, or a torch.Generator."
            )
    return stateful
