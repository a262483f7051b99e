"""Amp: one object that trains a model at its level of precision; what `initialize` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distamp.autocast import autocast
from distamp.comm_hooks import CommHookState
from distamp.errors import StageError
from distamp.initialize import amp_state
from distamp.initialize.ddp_passes import OnePassEach
from distamp.initialize.wrappers import Wrapping, no_sync
from distamp.optimizers import parameters_of
from distamp.precision import Precision
from distamp.scaler import DistGradScaler, MasterParameters, masters_of
from distamp.scaler.clipping import clip_unscaled

__all__ = ["Amp", "StepResult"]


@dataclass(frozen=True)
class StepResult:
    """Which optimizers stepped, as tensors on the device; ``bool`` of it waits for the device.

    Args:
        taken: 0-d bool, whether every optimizer stepped.
        optimizers: The same for each optimizer, in the order of the arguments.
    """

    taken: Tensor
    optimizers: tuple[Tensor, ...]

    def __bool__(self) -> bool:
        return bool(self.taken.item())


class Amp:
    """A model, its optimizers, and the scaler and region that its level asks for.

    Like ``torch.amp.autocast`` and ``torch.amp.GradScaler``, combined for one level, so that the
    training loop is the same at every level. Nothing is patched. For what this class does not
    cover, use ``scaler`` and ``precision``.

    Attributes:
        models: The given models, cast if the level requires it.
        optimizers: The given optimizers.
        precision: The level, overrides included.
        scaler: The `DistGradScaler`; disabled if the level needs none.
        comm_hooks: The state of each model's communication hook, with its ``stats()``; empty
            without ``comm_hook``.

    Example::

        amp = distamp.initialize(model, optimizer, "O1")
        for inputs, targets in batches:
            amp.zero_grad()
            with amp.autocast():
                loss = loss_fn(amp.model(inputs), targets)
            amp.backward(loss)
            amp.clip_grad_norm_(1.0)
            if amp.step():
                schedule.step()
    """

    def __init__(
        self,
        models: tuple[nn.Module, ...],
        wrappings: tuple[Wrapping, ...],
        optimizers: tuple[torch.optim.Optimizer, ...],
        precision: Precision,
        scaler: DistGradScaler,
        region: autocast,
        comm_hooks: tuple[CommHookState, ...] = (),
    ) -> None:
        self.models = models
        self.optimizers = optimizers
        self.precision = precision
        self.scaler = scaler
        self.comm_hooks = comm_hooks
        self._wrappings = wrappings
        self._region = region
        self._passes = [OnePassEach(m) for m, w in zip(models, wrappings, strict=True) if w.is_ddp]
        self._syncs = True
        self._unscaled = False

    def __getstate__(self) -> dict[str, Any]:
        """Refuse a copy or a pickle without masters, which would train no model."""
        if self.masters:
            raise StageError(
                "an Amp with master parameters cannot be copied or pickled: an optimizer's copy "
                "has no masters. Copy the model, make its optimizers, and call initialize on them"
            )
        return vars(self)

    @property
    def masters(self) -> list[MasterParameters]:
        """The fp32 master parameters of each optimizer that has some, which is so at O2."""
        found = map(masters_of, self.optimizers)
        return [masters for masters in found if masters is not None]

    @property
    def model(self) -> nn.Module:
        """The model, to be called in place of the one that was given.

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
        """Return the region for forward passes and losses; at O0, O2 and O3 it casts nothing.

        A ``torch.autocast``: a context manager and a decorator.
        """
        return self._region

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate without reducing over ranks in what runs inside, forward and backward.

        As ``no_sync()`` of DDP and FSDP1 and ``set_requires_gradient_sync(False)`` of FSDP2, for
        every model at once; nothing happens where there is no such wrapper.
        """
        return self._pause_sync()

    @contextlib.contextmanager
    def _pause_sync(self) -> Iterator[None]:
        before, self._syncs = self._syncs, False
        try:
            with contextlib.ExitStack() as stack:
                for model in self.models:
                    stack.enter_context(no_sync(model))
                yield
        finally:
            self._syncs = before

    def backward(
        self,
        loss: Tensor,
        loss_id: int = 0,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Scale a loss and add its gradients to the existing ones.

        Like ``scaler.scale(loss).backward()``.

        Args:
            loss: 0-d, preferably computed in float32.
            loss_id: As in Apex; all losses share one scale, so it changes nothing.
            retain_graph: As in ``Tensor.backward``.
            create_graph: As in ``Tensor.backward``.
            inputs: As in ``Tensor.backward``.

        Raises:
            StageError: Gradients were clipped already; or DDP would not reduce this pass, because
                its forward pass had one already.
        """
        if self._unscaled:
            raise StageError(
                "backward() after clip_grad_norm_() would add scaled gradients to unscaled ones; "
                "clip after the last backward() of the iteration"
            )
        if not self.scaler.is_enabled():  # else the scaler does it
            for masters in self.masters:
                masters.before_backward()
        scaled = self.scaler.scale(loss)
        with contextlib.ExitStack() as stack:
            for passes in self._passes if self._syncs else ():
                stack.enter_context(passes.one())
            scaled.backward(
                retain_graph=retain_graph,
                create_graph=create_graph,
                inputs=None if inputs is None else list(inputs),
            )

    def grad(
        self,
        loss: Tensor,
        inputs: Sequence[Tensor],
        loss_id: int = 0,
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
            loss_id: As in `backward`.
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

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients by their norm over all optimizers, which may be sharded over the ranks.

        Like ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, with unscaled gradients.

        Args:
            max_norm: The largest norm after clipping; > 0.
            norm_type: The order of the norm; > 0, inf for the largest magnitude.

        Returns:
            The norm before clipping: 0-d float32, the same on every rank.
        """
        self._require_optimizers()
        given = self.optimizers
        if not self.scaler.is_enabled():
            self._unscaled = True
            return clip_unscaled(self.scaler, given, max_norm, norm_type)
        one = len(given) == 1
        # The scaler tells whose gradients it is given by the optimizers it has seen.
        unseen = None in map(self.scaler._states.get, given)
        if not one and not self._unscaled and unseen:
            self.scaler.unscale_(*given)
        clipped: Any = given[0] if one else [p for o in self.optimizers for p in parameters_of(o)]
        self._unscaled = True
        return self.scaler.clip_grad_norm_(clipped, max_norm, norm_type)

    def step(self) -> StepResult:
        """Step every optimizer that did not overflow on any rank, and update the loss scale.

        Like ``scaler.step(optimizer)`` for each and ``scaler.update()``, with one message for all.
        Never waits by itself; the result says whether the step was taken.

        Raises:
            StageError, GradientError, LockstepError, LossScaleCollapse: As ``DistGradScaler.step``.
        """
        self._require_optimizers()
        try:
            self.scaler.step_all(self.optimizers)
        finally:
            self._unscaled = False
        found = [self.scaler.found_inf(optimizer) for optimizer in self.optimizers]
        anyone = torch.stack([flag.to(found[0].device) for flag in found]).max()
        self.scaler.update()
        return StepResult(anyone == 0, tuple(flag == 0 for flag in found))

    def _require_optimizers(self) -> None:
        if not self.optimizers:
            raise StageError("initialize was given no optimizer, so there is nothing to step")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of every model and optimizer.

        Args:
            set_to_none: As in ``Optimizer.zero_grad``; without effect under fairscale's
                ShardedDataParallel, whose buckets hold the gradients.
        """
        to_none = set_to_none and not any(w.keeps_buckets for w in self._wrappings)
        for model in self.models:
            model.zero_grad(set_to_none=to_none)
        for optimizer in self.optimizers:
            masters = masters_of(optimizer)
            (optimizer if masters is None else masters).zero_grad(set_to_none=to_none)

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return level, loss scale and master weights, to be saved beside model and optimizers.

        Masters are those of this rank where FSDP1, ZeroRedundancyOptimizer or OSS shard them, and
        DTensors under FSDP2.
        """
        return amp_state.saved(self.precision, self.scaler, self.masters)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, or Apex's ``amp.state_dict()``, or a scaler's.

        Raises:
            SettingError: It has masters of another number of optimizers, or a value out of range.
        """
        amp_state.load(state, self.scaler, self.masters)
