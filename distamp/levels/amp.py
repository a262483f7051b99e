"""Amp: one object that trains a model at its level of precision; what `initialize` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distamp.autocast import autocast
from distamp.clip_grad import LayoutFn
from distamp.comm_hooks import CommHook
from distamp.errors import CallOrderError, ConfigError
from distamp.guard.step_guard import OLD_STATE_KEY, STATE_KEY, StepGuard
from distamp.levels.casting import O2_OF
from distamp.levels.checks import check_trained
from distamp.levels.flat_state import FlatState
from distamp.levels.gradient_sync import GradientSync
from distamp.levels.wrappers import SHARDED_DDP, name_of, recognise
from distamp.optim_utils import params_of, view_of
from distamp.precision_level import PrecisionLevel
from distamp.scaler import (
    DistGradScaler,
    MasterParameters,
    StaticLossScale,
    master_params,
    masters_of,
)

if TYPE_CHECKING:
    from distamp.report import ContractReport

__all__ = ["Amp", "StepResult"]

STATE_KEYS = (STATE_KEY, OLD_STATE_KEY)


@dataclass(frozen=True)
class StepResult:
    """Flags of the optimizers that stepped, on their device; ``bool(result)`` waits for it.

    Args:
        taken: 0-d bool, whether every optimizer that has a gradient on some rank stepped, including
            the optimizers of other ranks if this rank has none.
        optimizers: Whether each optimizer stepped, in the order of the arguments. An optimizer that
            has no gradient on any rank has not stepped, so its entry is False.
    """

    taken: Tensor
    optimizers: tuple[Tensor, ...]

    def __bool__(self) -> bool:
        return bool(self.taken.item())


class Amp:
    """A model, its optimizers, and the scaler and region that its level asks for.

    Like ``torch.amp.autocast`` and ``torch.amp.GradScaler``, combined for one level, so that the
    training loop is the same at every level. Nothing is patched. For what this class does not
    cover, use ``scaler`` and ``level``.

    Attributes:
        models: The given models, cast if the level requires it.
        optimizers: The given optimizers.
        level: The `PrecisionLevel`, overrides included.
        scaler: The `DistGradScaler`; a `StepGuard` if the level has no loss scale.
        comm_hooks: The state of each model's communication hook, with its ``stats()``; empty
            without ``comm_hook``.

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

    # What survives a call, beside the arguments:
    # _waiting: a loss was scaled since the last step, so there are gradients that can be unscaled.

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
        unmatched: tuple[str, ...] = (),
    ) -> None:
        self.models = models
        self.optimizers = optimizers
        self.level = level
        self.scaler = scaler
        self.comm_hooks = comm_hooks
        self._region = region
        self._shard_group_fn = shard_group_fn
        # A rank that trains nothing steps optimizers without gradients, so that it takes part in
        # the messages of those that train.
        self._stepped = optimizers or idle
        self._unmatched = unmatched
        # A level that makes no masters, or leaves them to FSDP, refuses to train half precision.
        self._refuses_half = not level.casts_model or any(
            recognise(model).policies for model in models
        )
        self._sync = GradientSync(models)
        self._waiting = False

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
        """The fp32 master parameters of each optimizer that has some, which is so at fp16-O2."""
        return list(filter(None, map(masters_of, self.optimizers)))

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

        It casts nothing at levels without autocast: fp32, and those that cast the model. A
            ``torch.autocast``: a context manager and a decorator.
        """
        return self._region

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients without reducing them over ranks, in a ``with`` block.

        As ``no_sync()`` of DDP and FSDP1 and ``set_requires_gradient_sync(False)`` of FSDP2, for
        every model at once. It does nothing without such a wrapper. Regions nest: the end of one
        restores the state from before it. DDP with ``static_graph=True`` is not paused before it
        has reduced gradients once.
        """
        return self._sync.pause()

    @contextlib.contextmanager
    def scale_loss(
        self, loss: Tensor, optimizers: object = None, **unknown: object
    ) -> Iterator[Tensor]:
        """Yield the scaled loss for one backward pass in a ``with`` block.

        Apex's ``with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()``. Unlike Apex's
        it leaves gradients scaled, to be added to; `clip_grad_norm_`, `master_params` and `step`
        unscale them.

        Args:
            loss: 0-d, preferably computed in float32.
            optimizers: Apex's argument. It has no effect, because all losses share one scale.
            unknown: Raises TypeError. The error answers arguments of Apex.

        Raises:
            CallOrderError: Gradients were unscaled already; or DDP would not reduce this pass,
                because its forward pass had one already.
            TypeError: An argument does not exist.
        """
        for name in unknown:
            hint = f". {_SCALE_LOSS_HINTS[name]}" if name in _SCALE_LOSS_HINTS else ""
            raise TypeError(f"scale_loss() got an unexpected keyword argument {name!r}{hint}")
        if any(map(self.scaler.is_unscaled, self._stepped)):
            raise CallOrderError(
                "a backward pass after clip_grad_norm_() would add scaled gradients to unscaled "
                "ones; clip after the last backward() of the iteration. After a step that raised, "
                "call zero_grad() and scaler.update()"
            )
        self._waiting = True
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

        Like ``torch.autograd.grad``, but the loss is scaled, so that intermediate gradients do not
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
        """Clip gradients by their norm over all optimizers, which may be sharded over the ranks.

        Collective: every rank of `process_group` must call this.

        Like ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, with unscaled gradients.

        Args:
            max_norm: The largest norm after clipping; >= 0.
            norm_type: The order of the norm; > 0, inf for the largest magnitude.
            is_replicated_fn: As in `DistGradScaler.clip_grad_norm_`.
            shard_group_fn: As in `DistGradScaler.clip_grad_norm_`. With ``replicas=``, the ranks
                outside a DTensor's mesh have copies of it.

        Returns:
            The norm before clipping: 0-d float32, the same on every rank.
        """
        declared = self._declared(is_replicated_fn, shard_group_fn)
        stepped = [p for optimizer in self._stepped for p in params_of(optimizer)]
        with self._names_calls_of_amp("clip_grad_norm_"):
            return self.scaler.clip_grad_norm_(stepped, max_norm, norm_type, **declared)

    def master_params(self, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        """Return the parameters or masters that ``optimizer`` steps, and unscale their gradients.

        Collective: every rank of `process_group` must call this. It sends a
        message only after a backward pass.

        Returns:
            The masters at fp16-O2, the parameters at other levels.
        """
        if self._waiting and not self.scaler.is_unscaled(optimizer):
            self.scaler.unscale_(optimizer)
        return iter(master_params(optimizer))

    def step(
        self,
        *,
        max_norm: float | None = None,
        skip_norm_above: float | Tensor | None = None,
        all_or_none: bool = False,
        is_replicated_fn: LayoutFn | None = None,
        shard_group_fn: LayoutFn | None = None,
    ) -> StepResult:
        """Step every optimizer that did not overflow on any rank, and update the loss scale.

        Collective: every rank of `process_group` must call this.

        Like ``scaler.step(optimizer)`` for each and ``scaler.update()``, with one message for all.
        Never waits by itself; the result says whether the step was taken.

        Args:
            max_norm: Clip by the norm over all optimizers, in the same message; all step or none.
            skip_norm_above: Skip all where that norm is larger.
            all_or_none: All step or none, also without a clip.
            is_replicated_fn: As in `clip_grad_norm_`, of the norm.
            shard_group_fn: As in `clip_grad_norm_`, of the norm.

        Raises:
            CallOrderError: The last backward pass ran under `no_sync`, on this rank or another.
            ConfigError: A parameter that trains since `initialize` has a dtype that the level
                refuses, on this rank or another.
            CallOrderError, GradientError, RankMismatchError, NonFiniteGradientsError: As
                `StepGuard.step`.
        """
        declared = self._declared(is_replicated_fn, shard_group_fn)
        how: dict[str, Any] = {
            "max_norm": max_norm,
            "skip_norm_above": skip_norm_above,
            "all_or_none": all_or_none,
        }
        refused = self._refuse_step()
        if refused is not None:
            self.scaler.raise_on_all_ranks(refused, self._stepped, **how)
        with self._names_calls_of_amp("step"):
            self.scaler.step_all(self._stepped, **how, **declared)
        skipped = [self.scaler.found_inf(optimizer).bool() for optimizer in self._stepped]
        stepped = [self.scaler.taken_flag(optimizer) for optimizer in self._stepped]
        self.scaler.update()
        self._waiting = False
        taken = _any(stepped).logical_and(_any(skipped).logical_not())
        return StepResult(taken, tuple(stepped[: len(self.optimizers)]))

    @contextlib.contextmanager
    def _names_calls_of_amp(self, call: str) -> Iterator[None]:
        """Replace the scaler's error for a loss that was never scaled, which names no Amp call."""
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

    def _refuse_step(self) -> Exception | None:
        """Return why this rank cannot step, which every rank raises; None if it can."""
        if self._sync.left_unreduced:
            return CallOrderError(
                "amp.step() was called after a backward pass under amp.no_sync(), so the gradients "
                "of this step are not reduced between the ranks: the replicas of DDP would "
                "diverge, and shards would not be stepped. Run the last backward pass before "
                "amp.step() outside of amp.no_sync()."
            )
        if self._trains_half():
            try:
                for model in self.models:
                    check_trained(model, recognise(model), self.level)
            except ConfigError as error:
                return error
        return None

    def _trains_half(self) -> bool:
        """Return whether an optimizer steps half precision where the level may refuse that."""
        return self._refuses_half and any(
            param.requires_grad and param.dtype in O2_OF
            for optimizer in self.optimizers
            if masters_of(optimizer) is None
            for param in params_of(optimizer)
        )

    def _declared(
        self, is_replicated_fn: LayoutFn | None, shard_group_fn: LayoutFn | None
    ) -> dict[str, Any]:
        """Return how gradients are cut: as declared, or as `initialize` knows it."""
        if not self._stepped:
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
                ShardedDataParallel, whose buckets hold the gradients.
        """
        self._sync.drop_unreduced(set_to_none)
        to_none = set_to_none and SHARDED_DDP not in map(name_of, self.models)
        owners: tuple[Any, ...] = (*self.models, *self.optimizers)
        for owner in owners:
            owner.zero_grad(set_to_none=to_none)

    def check(self, step: Callable[[], Any]) -> ContractReport:
        """Run one step and compare its precisions with those of the level.

        Collective: every rank of `process_group` must call this. It is the group that `initialize`
        got.

        Args:
            step: Takes nothing; runs forward, backward and optimizer, as the loop does.

        Returns:
            What was not as the level says; see `PrecisionContract.check`, whose errors it has too.
        """
        words = self.level.contract(*self.models)
        # What FSDP has gathered for a forward pass without a backward pass may still be there.
        given = {p.dtype for each in self.optimizers for p in view_of(each).model_params()}
        if given and self.level.param not in given:
            words["parameters"] = "fp32"
        # Only what is trained must have the level's dtype.
        frozen = {p.dtype for m in self.models for p in m.parameters() if not p.requires_grad}
        words["parameters"] = (words["parameters"], *frozen)
        words["norms"] = (*words["norms"], *frozen)
        # Beside its format's dtype a hook has the level's, for what would grow in it.
        words["grad_reduce"] = (
            *words["grad_reduce"],
            *(hook.format.payload for hook in self.comm_hooks),
        )
        gathers = [
            hook.param_format.payload for hook in self.comm_hooks if hook.param_format is not None
        ]
        level_gathers = words["param_all_gather"]
        if isinstance(level_gathers, str):
            level_gathers = (level_gathers,)
        words["param_all_gather"] = (*level_gathers, *gathers)
        # The import takes long, and most runs check nothing.
        from distamp.report import PrecisionContract

        found = PrecisionContract(**words).check(
            step,
            self.models,
            self.optimizers,
            self.comm_hooks,
            process_group=self.scaler.process_group,
        )
        found.unseen += self._unmatched
        return found

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return level, loss scale and masters, to be saved beside model and optimizers."""
        return {
            "version": 1,
            "opt_level": self.level.name,
            "loss_scalers": [scaler.state_dict() for scaler in self._scalers()],
            "masters": [masters.state_dict() for masters in self.masters],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict()` of this class, of Apex's ``amp`` or of a scaler.

        A state of another level is welcome. Whether the scale is static is what `initialize` was
        given: a scale is loaded where it is dynamic here and was dynamic there. Masters that the
        state does not have follow their parameters. Of the scales that Apex had for several losses,
        the smallest is taken.

        Raises:
            ConfigError: The state has none of the keys of such a state, has masters of another
                number of optimizers, or a value out of range. What was loaded before it stays, as
                in torch's modules.
            ValueError: It has masters of other parameters.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"the state is the dict that amp.state_dict() returned, not {state!r:.80}"
            )
        _check_keys(state)
        scale, masters = _scale_of(state), _list_of(state, "masters")
        masters_here = self.masters
        if masters and masters_here and len(masters) != len(masters_here):
            raise ConfigError(
                f"the state has the masters of {len(masters)} optimizers and {len(masters_here)} "
                "have some here; initialize with the same optimizers"
            )
        for scaler in self._scalers() if scale is not None else ():
            _load_scale(scaler, scale)
        for each, saved in zip(masters_here, masters, strict=False):
            each.load_state_dict(saved)

    def flat_state_dict(self, saved: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return weights and optimizer state by flat names, for ``torch.distributed.checkpoint``.

        Like torch's ``get_state_dict`` with ``flatten_optimizer_state_dict``, but a weight is what
        its optimizer steps, the fp32 master where there is one, and no step is taken to make empty
        states. So a run continues at any other level, and in any layout that has one tensor for
        each name. The settings of the optimizer's groups are in it: the learning rate, ``betas``,
        and the counts that schedulefree keeps there. The loss scale is not (`state_dict`).

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
            ConfigError: Something has no name, or one that it shares: FSDP1,
                ZeroRedundancyOptimizer and OSS; plain experts, shards and pipeline stages that
                have one name and different values on two ranks; a state of an optimizer that
                is neither a tensor nor a number, or one that has no place in a DTensor's layout.
                The error is the same on every rank, and names the states to save instead.

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
        those of the groups, so set a new learning rate afterwards. A weight whose states are not
        all in ``state`` keeps its optimizer state and settings, with a warning.

        Raises:
            ConfigError: Weights that share a group here were saved with different settings, or a
                state does not fit the layout here.
        """
        FlatState(self.models, self.optimizers).set(state)

    def _scalers(self) -> list[DistGradScaler]:
        """Return the scaler, where there is one that scales."""
        given = (self.scaler,)
        return [it for it in given if isinstance(it, DistGradScaler) and it.is_enabled()]


def _any(flags: Sequence[Tensor]) -> Tensor:
    """Return whether one of several 0-d bools is set, on the device of the first."""
    return torch.stack([flag.to(flags[0].device) for flag in flags]).any()


def _load_scale(scaler: DistGradScaler, state: Any) -> None:
    """Load a scaler's state, where the scale is dynamic on both sides."""
    saved = DistGradScaler("cpu")
    saved.load_state_dict(scaler.state_dict())
    saved.load_state_dict(state)
    kinds = {each.state_dict()[STATE_KEY]["kind"] for each in (scaler, saved)}
    if len(kinds) > 1:  # which of the two it is, is what `initialize` was given
        state = {key: value for key, value in state.items() if key not in STATE_KEYS}
    if StaticLossScale.kind not in kinds:
        scaler.load_state_dict(state)


def _check_keys(state: Mapping[str, Any]) -> None:
    """Refuse a dict that is no state, at levels without a loss scale too.

    Raises:
        ConfigError: It has none of the keys by which a state is known.
    """
    keys = [str(key) for key in state]
    if any(key in ("scale", *STATE_KEYS) or key.startswith("loss_scale") for key in keys):
        return
    given = "no keys"
    if keys:
        given = f"the keys {', '.join(map(repr, keys[:5]))}" + ", ..." * (len(keys) > 5)
    raise ConfigError(
        f"amp.load_state_dict() was given a dict with {given}, which is no state of an Amp. It "
        "loads what amp.state_dict() returned (keys 'version', 'opt_level', 'loss_scalers', "
        "'masters'), Apex's amp.state_dict() (keys 'loss_scaler0', ...) or a scaler's state (keys "
        "'scale', '_growth_tracker', ...). Pass that part of the checkpoint, as in "
        "amp.load_state_dict(checkpoint['amp'])."
    )


def _scale_of(state: Mapping[str, Any]) -> Any:
    """Return the loss scale in a state of ours, of Apex's or of a scaler's; None without one."""
    if "loss_scalers" in state:
        if not isinstance(state.get("version"), int) or state["version"] != 1:
            raise ConfigError(
                f"the state was written by another version ({state.get('version')!r}) of distamp; "
                f"this one reads version 1"
            )
        return next(iter(_list_of(state, "loss_scalers")), None)
    apex = [state[name] for name in state if str(name).startswith("loss_scaler")]
    return min(apex, key=_scale_in, default=state)


def _scale_in(state: Any) -> Any:
    """Return the scale in one of Apex's states, or 0 for another object, which is read first."""
    return state.get("loss_scale", 0) if isinstance(state, Mapping) else 0


def _list_of(state: Mapping[str, Any], name: str) -> list[Any]:
    found = [] if state.get(name) is None else state[name]
    if not isinstance(found, list | tuple):
        raise ConfigError(f"the state's {name!r} must be a list, not {found!r:.80}")
    return list(found)


#: Answers to the arguments of Apex's ``scale_loss``, by their names.
_SCALE_LOSS_HINTS = {
    "loss_id": "Leave it out, because all losses share one scale",
    "model": "Leave it out, because the guard covers every model of initialize",
    "delay_unscale": "Leave it out, because gradients stay scaled until the clip or the step",
    "delay_overflow_check": "Leave it out, because amp.step() checks all gradients once",
}
