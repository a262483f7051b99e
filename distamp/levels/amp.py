"""Amp: a model, its optimizers and its scaler at one level of precision."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distamp.autocast import autocast
from distamp.clip_grad import LayoutFn
from distamp.comm_hooks import CommHook
from distamp.errors import CallOrderError, ConfigError
from distamp.guard.snapshots import Snapshots
from distamp.guard.step_guard import StepGuard
from distamp.levels.amp_state_dict import (
    VERSION,
    check_is_state,
    load_loss_scale,
    saved_loss_scale,
    saved_masters,
)
from distamp.levels.casting import MASTER_LEVELS
from distamp.levels.checkpoint import load_checkpoint, save_checkpoint
from distamp.levels.flat_state import FlatState
from distamp.levels.gradient_sync import GradientSync
from distamp.levels.validate import check_trained
from distamp.levels.wrappers import SHARDED_DDP, inspect_wrapper, wrapper_name
from distamp.optim_utils import params_of, view_of
from distamp.precision_level import PrecisionLevel
from distamp.process_group import resolve_process_group
from distamp.scaler import DistGradScaler, MasterParameters, master_params, masters_of

if TYPE_CHECKING:
    from distamp.report import ContractReport

__all__ = ["Amp", "StepResult"]

# Answers to the arguments of Apex's ``scale_loss``, by their names.
_SCALE_LOSS_HINTS = {
    "loss_id": "Leave it out, because all losses share one scale",
    "model": "Leave it out, because the guard covers every model of initialize",
    "delay_unscale": "Leave it out, because gradients stay scaled until the clip or the step",
    "delay_overflow_check": "Leave it out, because amp.step() checks all gradients once",
}


@dataclass(frozen=True)
class StepResult:
    """The flags of one step, on the optimizers' device; ``bool(result)`` synchronises with it.

    Args:
        taken: 0-d bool, True if every optimizer that has a gradient on some rank stepped, including
            the optimizers of other ranks if this rank has none.
        optimizers: For each optimizer a 0-d bool, True if it stepped, in the order of the
            arguments. An optimizer that has no gradient on any rank has not stepped.
    """

    taken: Tensor
    optimizers: tuple[Tensor, ...]

    def __bool__(self) -> bool:
        return bool(self.taken.item())


class _OpenPasses:
    """Drops the backward passes of an `Amp` since its last step when a snapshot is restored.

    Args:
        drop: Drops them.
    """

    def __init__(self, drop: Callable[[], None]) -> None:
        self._drop = drop

    def snapshot_state(self) -> None:
        """See `distamp.observers.SnapshotSource`: a snapshot has no open passes."""

    def load_snapshot_state(self, state: None) -> None:
        """See `distamp.observers.SnapshotSource`."""
        self._drop()


class Amp:
    """A model and its optimizers, with the scaler and the autocast region of its level.

    Like ``torch.amp.autocast`` and ``torch.amp.GradScaler``, combined for one level, so that the
    training loop is the same at every level. No function of torch is patched. Use ``scaler`` and
    ``level`` for calls that this class does not have.

    Attributes:
        models: The given models, cast if the level requires it.
        optimizers: The given optimizers.
        level: The `PrecisionLevel`, overrides included.
        scaler: The `DistGradScaler`; a `StepGuard` if the level has no loss scale.
        comm_hooks: The communication hook of each model that has one, with its ``stats()``.

    Example::

        amp = distamp.initialize(model, optimizer, "fp16")
        for inputs, targets in batches:
            amp.zero_grad()
            with amp.autocast():
                loss = loss_fn(amp.model(inputs), targets)
            amp.backward(loss)
            amp.clip_grad_norm_(1.0)
            if amp.step():
                schedule.step()
    """

    # Private attributes that survive a call:
    # _has_scaled_grads: whether a loss was scaled since the last step.

    def __init__(
        self,
        models: tuple[nn.Module, ...],
        optimizers: tuple[torch.optim.Optimizer, ...],
        level: PrecisionLevel,
        scaler: DistGradScaler | StepGuard,
        region: autocast,
        comm_hooks: tuple[CommHook, ...] = (),
        shard_group_fn: LayoutFn | None = None,
        idle: tuple[torch.optim.Optimizer, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> None:
        self.models = models
        self.optimizers = optimizers
        self.level = level
        self.scaler = scaler
        self.comm_hooks = comm_hooks
        self._region = region
        self._shard_group_fn = shard_group_fn
        # A rank that trains nothing steps optimizers without gradients, so that it takes part in
        # the messages of the ranks that train.
        self._stepped_optimizers = optimizers or idle
        self._notes = notes
        # A level that makes no masters, or leaves them to FSDP, refuses to train half precision.
        has_policies = any(inspect_wrapper(model).policies for model in models)
        self._refuses_half = has_policies or not level.casts_model
        self._sync = GradientSync(models)
        self._has_scaled_grads = False

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies and pickles: scaler and masters refer to the original optimizers."""
        raise CallOrderError(
            "an Amp cannot be copied or pickled: copy the model, make its optimizers, and call "
            "initialize on them; amp.state_dict() is what a checkpoint keeps"
        )

    def __repr__(self) -> str:
        """Return level, models and scaler, as far as the host knows them; sends nothing."""
        models = ", ".join(type(model).__name__ for model in self.models)
        return f"<Amp of {models} at {self.level.name}: {self.scaler!r}>"

    @property
    def masters(self) -> list[MasterParameters]:
        """The fp32 master parameters of each optimizer that has masters, as at fp16-O2."""
        all_masters = [masters_of(optimizer) for optimizer in self.optimizers]
        return [masters for masters in all_masters if masters is not None]

    @property
    def model(self) -> nn.Module:
        """The model, which replaces the argument of `initialize` in the training loop.

        Raises:
            ValueError: Several were given.
        """
        if len(self.models) != 1:
            raise ValueError(
                f"amp.model needs exactly one model, and initialize was given {len(self.models)}; "
                "use amp.models"
            )
        return self.models[0]

    # -- forward and backward --------------------------------------------------------------------

    def autocast(self) -> autocast:
        """Return the autocast region for forward passes and losses.

        The region is a ``torch.autocast``: a context manager and a decorator. It casts nothing at
        fp32 and at levels that cast the model.
        """
        return self._region

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients without reducing them over ranks, in a ``with`` block.

        As ``no_sync()`` of DDP and FSDP1 and ``set_requires_gradient_sync(False)`` of FSDP2, for
        every model at once. The block has no effect without such a wrapper. Blocks nest, and the
        end of a block restores the state from before it. DDP with ``static_graph=True`` is not
        paused before it has reduced gradients once.
        """
        return self._sync.pause()

    @contextlib.contextmanager
    def scale_loss(
        self, loss: Tensor, optimizers: object = None, **unknown: object
    ) -> Iterator[Tensor]:
        """Yield the scaled loss for one backward pass in a ``with`` block.

        Apex's ``with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()``. Unlike Apex's,
        the end of the block leaves gradients scaled, so that the next pass can add to them.
        `clip_grad_norm_`, `master_params` and `step` unscale them.

        Args:
            loss: 0-d, preferably computed in float32.
            optimizers: Apex's argument. It has no effect, because all losses share one scale.
            unknown: Raises TypeError. For an argument of Apex, the error gives the replacement.

        Raises:
            CallOrderError: Gradients were unscaled already; or DDP would not reduce this backward
                pass, because its forward pass had one already.
            TypeError: An argument does not exist.
        """
        for name in unknown:
            hint = f". {_SCALE_LOSS_HINTS[name]}" if name in _SCALE_LOSS_HINTS else ""
            raise TypeError(f"scale_loss() got an unexpected keyword argument {name!r}{hint}")
        if any(self.scaler.is_unscaled(optimizer) for optimizer in self._stepped_optimizers):
            raise CallOrderError(
                "A backward pass after clip_grad_norm_() would add scaled gradients to unscaled "
                "ones. Clip after the last backward() of the iteration. After a step that raised, "
                "call zero_grad() and scaler.update()."
            )
        self._has_scaled_grads = True
        with self._sync.backward_pass():
            yield self.scaler.scale(loss)

    def backward(
        self,
        loss: Tensor,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Scale a loss and add its gradients to the existing ones.

        Like ``scaler.scale(loss).backward()``.

        Args:
            loss: 0-d, preferably computed in float32.
            retain_graph: As in ``Tensor.backward``.
            create_graph: As in ``Tensor.backward``.
            inputs: As in ``Tensor.backward``.

        Raises:
            CallOrderError: As `scale_loss`.
        """
        with self.scale_loss(loss) as scaled:
            scaled.backward(
                retain_graph=retain_graph,
                create_graph=create_graph,
                inputs=None if inputs is None else list(inputs),
            )

    def grad(
        self,
        loss: Tensor,
        inputs: Sequence[Tensor],
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> tuple[Tensor, ...]:
        """Return gradients of a loss, for a penalty on them; ``.grad`` does not change.

        Like ``torch.autograd.grad``, but of the scaled loss, so that intermediate gradients do not
        underflow in float16. The returned gradients are unscaled and float32.

        Args:
            loss: 0-d.
            inputs: The tensors to differentiate with respect to.
            retain_graph: As in ``torch.autograd.grad``.
            create_graph: As in ``torch.autograd.grad``; True for a penalty.
        """
        scale = self.scaler.scale(torch.ones((), device=loss.device))
        gradients = torch.autograd.grad(
            loss.float() * scale, inputs, retain_graph=retain_graph, create_graph=create_graph
        )
        inverse = scale.double().reciprocal().float()
        return tuple(gradient.float() * inverse for gradient in gradients)

    # -- clip and step ---------------------------------------------------------------------------

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        is_replicated_fn: LayoutFn | None = None,
        shard_group_fn: LayoutFn | None = None,
    ) -> Tensor:
        """Clip gradients by their norm over all optimizers and over all shards.

        Like ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, with unscaled gradients.

        Collective: every rank of `process_group` must call this.

        Args:
            max_norm: The largest norm after clipping; >= 0.
            norm_type: The order of the norm; > 0, inf for the largest magnitude.
            is_replicated_fn: As in `DistGradScaler.clip_grad_norm_`.
            shard_group_fn: As in `DistGradScaler.clip_grad_norm_`. With ``replicas=``, the ranks
                outside a DTensor's mesh have copies of it.

        Returns:
            The norm before clipping: 0-d float32, the same on every rank.
        """
        layout_fns = self._layout_fns(is_replicated_fn, shard_group_fn)
        params: list[Tensor] = []
        for optimizer in self._stepped_optimizers:
            params.extend(params_of(optimizer))
        with self._naming_calls_of_amp("clip_grad_norm_"):
            return self.scaler.clip_grad_norm_(params, max_norm, norm_type, **layout_fns)

    def master_params(self, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        """Return the parameters or masters that ``optimizer`` steps, and unscale their gradients.

        Collective: every rank of `process_group` must call this. It sends a message only after a
        backward pass.

        Returns:
            The masters at fp16-O2, the parameters at other levels.
        """
        if self._has_scaled_grads and not self.scaler.is_unscaled(optimizer):
            self.scaler.unscale_(optimizer)
        return iter(master_params(optimizer))

    def step(
        self,
        *,
        max_norm: float | None = None,
        skip_norm_above: float | Tensor | None = None,
        skip_if: bool | Tensor | None = None,
        all_or_none: bool = False,
        is_replicated_fn: LayoutFn | None = None,
        shard_group_fn: LayoutFn | None = None,
    ) -> StepResult:
        """Step every optimizer that did not overflow on any rank, and update the loss scale.

        Like ``scaler.step(optimizer)`` for every optimizer and ``scaler.update()``, with one
        message for all. The call does not synchronise with a device, unless the scaler does.

        Collective: every rank of `process_group` must call this.

        Args:
            max_norm: Clip gradients by the norm over all optimizers, in the same message. Then all
                optimizers step or none does.
            skip_norm_above: Skip the step of all optimizers if that norm is larger.
            skip_if: Skip the step of all optimizers if this is true on any rank; see
                `StepGuard.step`.
            all_or_none: All optimizers step or none does, also without a norm.
            is_replicated_fn: As in `clip_grad_norm_`, for the norm.
            shard_group_fn: As in `clip_grad_norm_`, for the norm.

        Returns:
            The flags of the optimizers that stepped.

        Raises:
            CallOrderError: The last backward pass ran under `no_sync`, on this rank or another.
            ConfigError: A parameter that was unfrozen after `initialize` has a dtype that the level
                refuses, on this rank or another.
            CallOrderError, GradientError, RankMismatchError, NonFiniteGradientsError: As
                `StepGuard.step`.
        """
        layout_fns = self._layout_fns(is_replicated_fn, shard_group_fn)
        norm_options: dict[str, Any] = {
            "max_norm": max_norm,
            "skip_norm_above": skip_norm_above,
            "all_or_none": all_or_none,
        }
        error = self._step_error()
        if error is not None:
            self.scaler.raise_on_all_ranks(error, self._stepped_optimizers, **norm_options)
        with self._naming_calls_of_amp("step"):
            self.scaler.step_all(
                self._stepped_optimizers, skip_if=skip_if, **norm_options, **layout_fns
            )
        skipped: list[Tensor] = []
        taken: list[Tensor] = []
        for optimizer in self._stepped_optimizers:
            skipped.append(self.scaler.found_inf(optimizer).bool())
            taken.append(self.scaler.taken_flag(optimizer))
        self.scaler.update()
        self._has_scaled_grads = False
        all_taken = _any(taken).logical_and(_any(skipped).logical_not())
        return StepResult(all_taken, tuple(taken[: len(self.optimizers)]))

    @contextlib.contextmanager
    def _naming_calls_of_amp(self, call: str) -> Iterator[None]:
        """Name the calls of Amp in the scaler's error about a loss that was never scaled."""
        try:
            yield
        except CallOrderError as error:
            if "_scale is None" not in str(error):
                raise
            raise CallOrderError(
                f"amp.{call}() was called at {self.level.name}, which scales the loss, and no "
                "loss was scaled before. Call amp.backward(loss) instead of loss.backward(), or "
                "use amp.scale_loss(loss)."
            ) from error

    def _step_error(self) -> Exception | None:
        """Return the error for which this rank cannot step, which every rank raises, or None."""
        if self._sync.left_unreduced:
            return CallOrderError(
                "amp.step() was called after a backward pass under amp.no_sync(), so the gradients "
                "of this step are not reduced between the ranks: the replicas of DDP would "
                "diverge, and shards would not be stepped. Run the last backward pass before "
                "amp.step() outside of amp.no_sync()."
            )
        if self._trains_refused_half():
            try:
                for model in self.models:
                    check_trained(model, inspect_wrapper(model), self.level)
            except ConfigError as error:
                return error
        return None

    def _trains_refused_half(self) -> bool:
        """Return whether an optimizer steps half precision at a level that may refuse that."""
        if not self._refuses_half:
            return False
        for optimizer in self.optimizers:
            if masters_of(optimizer) is not None:
                continue
            for param in params_of(optimizer):
                if param.requires_grad and param.dtype in MASTER_LEVELS:
                    return True
        return False

    def _layout_fns(
        self, is_replicated_fn: LayoutFn | None, shard_group_fn: LayoutFn | None
    ) -> dict[str, Any]:
        """Return the functions that declare the layout: from the caller, or from `initialize`."""
        if not self._stepped_optimizers:
            raise CallOrderError(
                "initialize was given no optimizer on any rank, so there is nothing to step"
            )
        if is_replicated_fn is None and shard_group_fn is None:
            shard_group_fn = self._shard_group_fn
        return {"is_replicated_fn": is_replicated_fn, "shard_group_fn": shard_group_fn}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of every model and optimizer.

        Unlike ``Optimizer.zero_grad`` it also drops the gradients that FSDP2 accumulated under
        `no_sync` and has not reduced yet.

        Args:
            set_to_none: As in ``Optimizer.zero_grad``; without effect under fairscale's
                ShardedDataParallel, because its buckets hold the gradients.
        """
        self._sync.drop_unreduced(set_to_none)
        if any(wrapper_name(model) == SHARDED_DDP for model in self.models):
            set_to_none = False
        for model in self.models:
            model.zero_grad(set_to_none=set_to_none)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def snapshots(self, every: int = 50, keep: int = 2, extra: Iterable[Any] = ()) -> Snapshots:
        """Return `distamp.guard.Snapshots` of the models, the optimizers and the scaler.

        Args:
            every: As in `distamp.guard.Snapshots`.
            keep: As in `distamp.guard.Snapshots`.
            extra: As in `distamp.guard.Snapshots`, such as learning-rate schedulers.

        Example::

            snapshots = amp.snapshots(every=50, extra=(schedule,))
            for inputs, targets in batches:
                try:
                    amp.zero_grad()
                    with amp.autocast():
                        loss = loss_fn(amp.model(inputs), targets)
                    amp.backward(loss)
                    if amp.step():
                        schedule.step()
                    snapshots.record()
                except distamp.errors.NonFiniteError:
                    snapshots.rewind()
        """
        passes = _OpenPasses(self._drop_open_passes)
        return Snapshots(
            self.models, self._stepped_optimizers, self.scaler, every, keep, (*extra, passes)
        )

    def _drop_open_passes(self) -> None:
        self._sync.drop_unreduced(set_to_none=True)
        self._has_scaled_grads = False

    def check(self, step: Callable[[], Any]) -> ContractReport:
        """Run one step and compare its precisions with the level.

        Collective: every rank of `process_group` must call this.

        Args:
            step: Takes no argument and runs forward, backward and optimizer, as the loop does.

        Returns:
            The differences between the step and the level; see `PrecisionContract.check`, which
            also describes the errors.
        """
        # The import takes long, and most runs check nothing.
        from distamp.report import PrecisionContract

        contract = PrecisionContract(**self._contract_arguments())
        report = contract.check(
            step,
            self.models,
            self.optimizers,
            self.comm_hooks,
            process_group=self.scaler.process_group,
        )
        report.unseen += self._notes
        return report

    def _contract_arguments(self) -> dict[str, Any]:
        """Return the contract of the level, extended for these models, optimizers and hooks."""
        arguments = self.level.contract(*self.models)
        # FSDP's parameters may be gathered now, after a forward pass without a backward pass. The
        # optimizers have the shards.
        param_dtypes: set[torch.dtype] = set()
        for optimizer in self.optimizers:
            param_dtypes.update(param.dtype for param in view_of(optimizer).model_params())
        if param_dtypes and self.level.param not in param_dtypes:
            arguments["parameters"] = "fp32"
        # Only trained parameters must have the level's dtype.
        frozen_dtypes: set[torch.dtype] = set()
        for model in self.models:
            params = model.parameters()
            frozen_dtypes.update(param.dtype for param in params if not param.requires_grad)
        arguments["parameters"] = (arguments["parameters"], *frozen_dtypes)
        arguments["norms"] = (*arguments["norms"], *frozen_dtypes)
        # A hook sends small gradients uncompressed, in the level's dtype.
        reduce_dtypes = [hook.format.payload for hook in self.comm_hooks]
        arguments["grad_reduce"] = (*arguments["grad_reduce"], *reduce_dtypes)
        gather_dtypes = arguments["param_all_gather"]
        if isinstance(gather_dtypes, str):
            gather_dtypes = (gather_dtypes,)
        for hook in self.comm_hooks:
            if hook.param_format is not None:
                gather_dtypes = (*gather_dtypes, hook.param_format.payload)
        arguments["param_all_gather"] = gather_dtypes
        return arguments

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return level, loss scale and masters; save the states of model and optimizers with it."""
        loss_scalers = []
        if self._scaling_scaler is not None:
            loss_scalers.append(self._scaling_scaler.state_dict())
        return {
            "version": VERSION,
            "opt_level": self.level.name,
            "loss_scalers": loss_scalers,
            "masters": [masters.state_dict() for masters in self.masters],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict()` of this class, of Apex's ``amp`` or of a scaler.

        The state may be of another level. The argument of `initialize` decides whether the loss
        scale is dynamic, and a scale is loaded only if it is dynamic both here and in the state.
        Masters that the state does not have are made from their parameters. Of several scales of
        Apex, the smallest is loaded.

        Raises:
            ConfigError: The state has none of the keys of such a state, has masters of another
                number of optimizers, or a value out of range. As in torch's modules, values that
                were loaded before the error stay.
            ValueError: The state has masters of other parameters.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"amp.load_state_dict() takes the dict that amp.state_dict() returned, not "
                f"{state!r:.80}."
            )
        check_is_state(state)
        loss_scale = saved_loss_scale(state)
        masters_states = saved_masters(state)
        all_masters = self.masters
        if masters_states and all_masters and len(masters_states) != len(all_masters):
            raise ConfigError(
                f"The state has the masters of {len(masters_states)} optimizers, and "
                f"{len(all_masters)} optimizers have masters here. Call initialize with the "
                "optimizers of the saved run."
            )
        if self._scaling_scaler is not None and loss_scale is not None:
            load_loss_scale(self._scaling_scaler, loss_scale)
        for masters, masters_state in zip(all_masters, masters_states, strict=False):
            masters.load_state_dict(masters_state)

    def flat_state_dict(self, saved: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return weights and optimizer state by flat names, for ``torch.distributed.checkpoint``.

        `save` and `load` do all of this in one call. Like torch's ``get_state_dict`` with
        ``flatten_optimizer_state_dict``, but the value of a weight is the tensor that its optimizer
        steps, such as the fp32 master, and no step is taken to make empty states. So a run
        continues at any other level, and in any layout that has one tensor for each name. The state
        contains the settings of the optimizers' groups: the learning rate, ``betas``, and the
        counts that schedulefree keeps there. It does not contain the loss scale (`state_dict`).

        Collective: every rank of `process_group` must call this. With ``saved`` it sends
        nothing.

        Args:
            saved: The names in a checkpoint: ``reader.read_metadata().state_dict_metadata``.
                Optimizers then have the states of the checkpoint, empty, for ``dcp.load`` to fill.

        Returns:
            ``model.NAME`` (``model.INDEX.NAME`` with several models) and ``optimizer.NAME.KEY``:
            the live tensors, DTensors included. ``optimizer.NAME`` is a record of the states' keys
            and of the group's settings, a tuple of tuples.

        Raises:
            ConfigError: A layout has no tensor for each name (FSDP1, ZeroRedundancyOptimizer, OSS);
                plain experts, shards or pipeline stages have one name and different values on two
                ranks; or a state of an optimizer is neither a tensor nor a number, or does not fit
                a DTensor's layout. The error is the same on every rank, and names the states to
                save instead.

        Example::

            dcp.save(amp.flat_state_dict(), checkpoint_id=path)

            reader = dcp.FileSystemReader(path)
            state = amp.flat_state_dict(reader.read_metadata().state_dict_metadata)
            dcp.load(state, storage_reader=reader)
            amp.load_flat_state_dict(state)
        """
        flat = FlatState(self.models, self.optimizers, self.scaler.process_group)
        return flat.get() if saved is None else flat.get_empty(saved)

    def load_flat_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `flat_state_dict()` that ``dcp.load`` has filled.

        Weights are copied. Optimizer states are taken over without a copy, and settings replace
        the groups' own, so set a new learning rate afterwards. If ``state`` lacks a state of a
        weight, the weight keeps its optimizer state and settings, with a warning.

        Raises:
            ConfigError: Weights that share a group here were saved with different settings, or a
                state does not fit the layout here.
        """
        FlatState(self.models, self.optimizers).set(state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save all that a run needs to continue, by ``torch.distributed.checkpoint``.

        The checkpoint contains weights, optimizer state, masters, the settings of the optimizers'
        groups such as the learning rate, the loss scale and its counters, and the rounding errors
        of communication hooks. It does not contain learning rate schedulers, data loaders and
        random generators.

        Collective: every rank of `process_group` must call this.

        Args:
            path: A directory that all ranks can write to, equal on every rank. Use a new one for
                each checkpoint, because a save that is interrupted damages an older checkpoint in
                the same directory.

        Raises:
            ConfigError: Ranks have different paths, or a layout has no tensor for each name (FSDP1,
                ZeroRedundancyOptimizer, OSS), or another error of `flat_state_dict`.
            torch.distributed.checkpoint.CheckpointException: A rank could not write.

        Example::

            amp.save(f"checkpoints/{step}")
            ...
            amp = distamp.initialize(model, optimizer, "bf16-O2")   # any level, any layout
            amp.load(f"checkpoints/{step}")
        """
        group = resolve_process_group(self.scaler.process_group)
        flat_state = FlatState(self.models, self.optimizers, group)
        amp_state = self.state_dict()
        # The flat state has the values of the masters.
        del amp_state["masters"]
        save_checkpoint(path, flat_state, amp_state, self.comm_hooks, group)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load a checkpoint of `save`, in another layout, on other ranks or at another level, too.

        Writes the values into the models and optimizers in place. The rounding errors of hooks are
        loaded if the ranks are the same, and dropped with a log line if not. Under DDP, the first
        step after the load uses none, because DDP builds its buckets in that step.

        Collective: every rank of `process_group` must call this.

        Args:
            path: The directory.

        Raises:
            ConfigError: The directory contains no checkpoint of `save`, a layout has no tensor for
                each name, or a state does not fit the layout here.
            torch.distributed.checkpoint.CheckpointException: A rank could not read, or the models
                here have other parameters.
        """
        group = resolve_process_group(self.scaler.process_group)
        flat_state = FlatState(self.models, self.optimizers, group)
        self.load_state_dict(load_checkpoint(path, flat_state, self.comm_hooks, group))

    @property
    def _scaling_scaler(self) -> DistGradScaler | None:
        """The scaler if it scales losses, else None."""
        if isinstance(self.scaler, DistGradScaler) and self.scaler.is_enabled():
            return self.scaler
        return None


def _any(flags: Sequence[Tensor]) -> Tensor:
    """Return the disjunction of several 0-d bools, on the device of the first."""
    return torch.stack([flag.to(flags[0].device) for flag in flags]).any()
