"""fp32 master parameters: what an optimizer steps in place of a model's fp16 or bf16 ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from distamp.errors import StageError
from distamp.gradients import local_gradients, local_of, refuse_fp16, unscale
from distamp.masters.checkpoint_view import CheckpointView
from distamp.masters.convert import Transfer, convert
from distamp.masters.mark import mark, refuse_second_master
from distamp.masters.pair import Pair, write_back
from distamp.masters.state import move_state, read_masters, refuse_without_masters
from distamp.masters.zeroing import ZeroGradWitness
from distamp.optimizers import find_closure, inner_optimizer, parameters_of
from distamp.sources import GradientSource, set_source

__all__ = ["MasterParameters"]

_LOW = (torch.float16, torch.bfloat16)


class MasterParameters(GradientSource):
    """fp32 copies of an optimizer's fp16 and bf16 parameters, which it steps instead of these.

    Differs from ``apex.amp`` in that no method of the optimizer is replaced: the masters are in
    its ``param_groups``, and two of torch's hooks around ``step`` convert the gradients and
    write the parameters back. The optimizer's state moves to the masters, in float32. Parameters
    of other dtypes (a batch norm in float32) do not change, and frozen ones get a master in the
    first step after they begin to require gradients.

    Create it once, after you cast and wrap the model and create the optimizer. With
    `DistGradScaler`, ``fp16_grads="master"`` unscales in float32 into the masters;
    without a scaler the gradients are used as they are. In both cases the model's own gradients are
    freed when they are converted, so none is counted twice. Each rank has masters only of the
    parameters that its optimizer steps: of its shard under FSDP, ZeroRedundancyOptimizer and OSS.

    Args:
        optimizer: Has float16 or bfloat16 parameters; may have state already.

    Raises:
        TypeError: Not an optimizer.
        ValueError: No parameter needs a master, the optimizer or one of its parameters has
            masters already, or masters are not possible in its layout.

    Example::

        model = model.half()
        optimizer = torch.optim.AdamW(model.parameters())
        masters = MasterParameters(optimizer)
        scaler = DistGradScaler("cuda", fp16_grads="master")

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.1.
    """

    has_masters = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        refuse_without_masters(optimizer, _LOW)
        inner = inner_optimizer(optimizer) or optimizer
        self._outer = weakref.ref(optimizer)
        self._inner = weakref.ref(inner)
        self._wrapped = inner is not optimizer
        # ShardedDataParallel's gradients are views of buckets, which None would detach for good.
        self._in_buckets = type(optimizer).__module__.startswith("fairscale.")
        self._pairs: dict[int, Pair] = {}
        self._of_master: dict[int, Pair] = {}
        self._taken = False
        me = weakref.ref(self)
        self._witness = ZeroGradWitness(lambda: _drop(me()), lambda: _before_backward(me()))
        self._adopt()
        if not self._wrapped:
            self._witness.lay(self._masters())
        inner.register_step_pre_hook(self._before_step)
        inner.register_step_post_hook(self._after_step)
        if self._wrapped:  # its load_state_dict knows the model's parameters alone
            optimizer.register_load_state_dict_post_hook(lambda _: self._adopt_state())
        set_source(optimizer, self)
        set_source(inner, self)

    # -- who belongs to whom ----------------------------------------------------------------------

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter of the model with its master, in the order they were made."""
        for pair in self._pairs.values():
            yield pair.parameter, pair.master

    def master_of(self, parameter: Tensor) -> Tensor | None:
        """Return the master of a parameter of the model; None if it has none here."""
        pair = self._pairs.get(id(parameter))
        return None if pair is None else pair.master

    def parameter_of(self, master: Tensor) -> Tensor | None:
        """Return the parameter of the model that ``master`` is written back to; None if none."""
        pair = self._of_master.get(id(master))
        return None if pair is None else pair.parameter

    def stepped(self) -> list[Tensor]:
        """Return all that the optimizer steps on this rank: masters, and parameters without one."""
        self._adopt()
        return parameters_of(self._stepping())

    def filled(self) -> list[Tensor]:
        """Return the same, but for each master the parameter whose gradient backward fills."""
        pairs = self._of_master
        return [p if (pair := pairs.get(id(p))) is None else pair.parameter for p in self.stepped()]

    def watched(self) -> list[Tensor]:
        """Return every tensor whose ``.grad`` may be a gradient of this optimizer."""
        outer = self._outer()
        mine = [] if outer is None else parameters_of(outer)
        everyone = [*mine, *self.filled(), *self.stepped()]
        return list({id(tensor): tensor for tensor in everyone}.values())

    def share(self) -> list[Tensor] | None:
        """See `GradientSource.share`."""
        outer = self._outer()
        if not self._wrapped or outer is None:
            return None
        share = parameters_of(self._stepping())
        return share if len(share) < len(parameters_of(outer)) else None

    def in_place_of(self, parameters: list[Tensor]) -> list[Tensor]:
        """Return masters where there are any; leaves out what another rank steps."""
        self._adopt()
        elsewhere = set(map(id, self.elsewhere()))
        found = (
            p if (pair := self._pairs.get(id(p))) is None else pair.master
            for p in parameters
            if id(p) not in elsewhere
        )
        return list(found)

    def stand_in_of(self, parameter: Tensor) -> Tensor | None:
        """Return the master of a parameter of the model; None if it has none here."""
        return self.master_of(parameter)

    def unscale(self, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> list[Tensor]:
        """Take the gradients over, multiplied by ``inv_scale``."""
        return self.take_gradients(inv_scale, found_inf)

    def elsewhere(self) -> list[Tensor]:
        """Return the optimizer's parameters that another rank steps."""
        outer = self._outer()
        if not self._wrapped or outer is None:
            return []
        here = set(map(id, self.filled()))
        return [parameter for parameter in parameters_of(outer) if id(parameter) not in here]

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that was given; None once it is gone."""
        return self._outer()

    @property
    def needs_scaler(self) -> bool:
        """Whether a parameter is float16, whose gradients underflow unless the loss is scaled."""
        return any(pair.parameter.dtype is torch.float16 for pair in self._pairs.values())

    @property
    def nbytes(self) -> int:
        """Bytes that the masters take on this rank; their gradients take as many in a step."""
        with torch.no_grad():
            return sum(local_of(pair.master).nbytes for pair in self._pairs.values())

    # -- gradients --------------------------------------------------------------------------------

    @torch.no_grad()
    def take_gradients(
        self, inv_scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> list[Tensor]:
        """Move the gradients of the iteration to the masters, in float32, and free the model's.

        What the masters had before is overwritten; a master whose parameter has no gradient ends
        with None. Nothing has to call this: the scaler does, and so does ``optimizer.step()``
        where the scaler has not.

        Args:
            inv_scale: 0-d float32, what every gradient is multiplied by.
            found_inf: 0-d float32 flag, set to 1.0 where its own device holds an overflow.

        Returns:
            One 0-d flag for each device that holds gradients; ``found_inf`` itself if none does.

        Raises:
            GradientError: A gradient is a Partial DTensor; nothing is moved then.
        """
        self._catch_up()
        inner = self._stepping()
        moving: list[Transfer] = []
        staying: list[Tensor] = []
        for index, target in enumerate(parameters_of(inner)):
            pair = self._of_master.get(id(target))
            if pair is None:
                staying.append(target)
            elif pair.parameter.grad is not None:
                moving.append(Transfer.of(pair.parameter, target, inner, index))
        others = local_gradients(staying)
        refuse_fp16([gradient.dtype for gradient in others])
        self._witness.lift()
        self._clear_masters(keep={id(t.target) for t in moving})
        try:
            flags = convert(moving, inv_scale, found_inf, self._free)
            if others and inv_scale is not None and found_inf is not None:
                flags += unscale(others, inv_scale, found_inf)
        except Exception:
            # ``optimizer.zero_grad()`` must still reach the gradients that the model has left.
            self._clear_masters(keep=set())
            if not self._wrapped:
                self._witness.lay(self._masters())
            raise
        self._taken = True
        if inv_scale is None or found_inf is None:
            return []
        return flags or [found_inf]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of the model and of the masters.

        ``model.zero_grad()`` and ``optimizer.zero_grad()`` do as well wherever a scaler scales the
        loss. Without one, this is what discards gradients that were never stepped.
        """
        self.drop()
        self._witness.lift()
        self._clear_masters(keep=set())
        self._stepping().zero_grad(set_to_none)

    @torch.no_grad()
    def before_backward(self) -> None:
        """Make sure that an ``optimizer.zero_grad()`` from now on is noticed.

        Called for every loss that is scaled; nothing else has to call it.
        """
        if self._wrapped:  # the wrapper's own zero_grad() reaches the model's gradients
            return
        masters = self._masters()
        if self._taken and any(master.grad is not None for master in masters):
            return  # between unscale_ and step: what lies there is about to be stepped
        self._taken = False
        self._witness.lay(masters)

    def _masters(self) -> list[Tensor]:
        """Return those that the optimizer holds now, which its ``zero_grad()`` reaches."""
        held = [p for p in parameters_of(self._stepping()) if id(p) in self._of_master]
        if len(held) == 1:
            self._witness.follow(self._of_master[id(held[0])].parameter)
        return held

    # -- values -----------------------------------------------------------------------------------

    def write_back(self) -> None:
        """Round every master into its parameter, as happens after each step."""
        write_back(self._pairs.values())

    @torch.no_grad()
    def refresh(self) -> None:
        """Set every master to its parameter's value, forgetting what rounding had cut off.

        Seldom needed: a parameter that was written by anything else (a checkpoint that was loaded,
        weights swapped for evaluation) is noticed before the next step, and each element that is no
        longer its master's rounding is taken over.
        """
        self._adopt()
        for pair in self._pairs.values():
            pair.refresh()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the masters by the number that ``optimizer.state_dict()`` gives each parameter.

        The tensors are the masters themselves, as in ``optimizer.state_dict()``, and DTensors
        where they are. Under ZeroRedundancyOptimizer and OSS a rank returns its own masters alone.
        """
        self._catch_up()
        numbers = self._numbers()
        return {
            "version": 1,
            "masters": {numbers[id(p)]: master.detach() for p, master in self.pairs()},
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, exactly, and write the parameters back.

        May come before or after the model's and the optimizer's own ``load_state_dict``.

        Raises:
            ValueError: It holds masters of other parameters, or of other shapes; nothing is
                changed then.
        """
        self._adopt()
        numbers = self._numbers()
        own = {numbers[id(p)]: master for p, master in self.pairs()}
        for master, value in read_masters(state_dict, own):
            master.copy_(value)
        self.write_back()

    @torch.no_grad()
    def for_checkpoint(self) -> torch.optim.Optimizer:
        """Return the optimizer by the model's parameters, as torch's checkpoint functions want it.

        ``get_optimizer_state_dict`` and its like look parameters up in the model, which has no
        masters. Given this, they save and load masters and state by name, for any number of ranks.

        Raises:
            ValueError: A wrapper (ZeroRedundancyOptimizer, OSS) divides the state among ranks.
        """
        self._catch_up()
        if self._wrapped:
            raise ValueError(
                f"{type(self._outer()).__name__} divides its state among ranks by itself; save "
                "its own state_dict() and masters.state_dict() on each rank"
            )
        return CheckpointView(self, self._stepping())

    # -- around the optimizer's step --------------------------------------------------------------

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = find_closure(args[1:], kwargs)
        if closure is None:
            self.receive()
            return None
        with torch.no_grad():
            self._catch_up()
        evaluate = self._evaluating(closure)
        return (
            tuple(evaluate if argument is closure else argument for argument in args),
            {k: evaluate if value is closure else value for k, value in kwargs.items()},
        )

    def _evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            self.write_back()  # a line search has moved the masters
            loss = closure()
            self.receive()
            self._taken = False
            return loss

        return evaluate

    def _after_step(self, *_: Any) -> None:
        self.finish_step()
        self.write_back()

    def finish_step(self) -> None:
        """Note that the gradients that were taken are used up, by a step or a skipped one."""
        if self._taken and not self._wrapped:
            self._witness.watch_stepped(self._masters())
        self._taken = False

    @torch.no_grad()
    def receive(self) -> None:
        """Take the gradients if the scaler has not; else add what came after it, unscaled.

        What ``optimizer.step()`` begins with; called before it, to clip without a scaler.
        """
        if not self._taken:
            self.take_gradients()
            return
        for pair in self._pairs.values():
            pair.catch_up()
            late = pair.parameter.grad
            if late is not None:
                before, late = pair.master.grad, late.float()
                pair.master.grad = late if before is None else before + late
                self._free(pair.parameter)

    # -- the groups -------------------------------------------------------------------------------

    def _stepping(self) -> torch.optim.Optimizer:
        inner = self._inner()
        if inner is None:
            raise StageError("the optimizer of these master parameters is gone")
        return inner

    def _catch_up(self) -> None:
        """Make masters for parameters that came since, and take over what others wrote."""
        self._adopt()
        for pair in self._pairs.values():
            pair.catch_up()

    @torch.no_grad()
    def _adopt(self) -> None:
        inner = self._stepping()
        for number, group in enumerate(inner.param_groups):
            found = [
                (index, parameter)
                for index, parameter in enumerate(group["params"])
                if parameter.dtype in _LOW and parameter.requires_grad
            ]
            if not found:
                continue
            for index, parameter in found:
                refuse_second_master(parameter, group["params"][:index])
            if self._wrapped:
                # Wrappers keep this very dict to look up which rank has which parameter.
                group = inner.param_groups[number] = {**group, "params": list(group["params"])}
            for index, parameter in found:
                group["params"][index] = self._make(parameter, inner)

    def _make(self, parameter: Tensor, inner: torch.optim.Optimizer) -> Tensor:
        pair = Pair.of(parameter)
        self._pairs[id(parameter)] = self._of_master[id(pair.master)] = pair
        mark(parameter, self)
        move_state(inner, parameter, pair.master)
        return pair.master

    def _adopt_state(self) -> None:
        for pair in self._pairs.values():
            move_state(self._stepping(), pair.parameter, pair.master)

    def _numbers(self) -> dict[int, int]:
        outer = self._outer()
        parameters = parameters_of(outer) if self._wrapped and outer is not None else self.filled()
        return {id(parameter): number for number, parameter in enumerate(parameters)}

    # -- gradients that go ------------------------------------------------------------------------

    def _free(self, parameter: Tensor) -> None:
        if self._in_buckets and parameter.grad is not None:
            parameter.grad.zero_()
        else:
            parameter.grad = None

    def _clear_masters(self, keep: set[int]) -> None:
        for pair in self._pairs.values():
            if id(pair.master) not in keep:
                pair.master.grad = None

    def drop(self) -> None:
        """Free the model's gradients, as after ``optimizer.zero_grad()``."""
        for pair in self._pairs.values():
            self._free(pair.parameter)


def _drop(masters: MasterParameters | None) -> None:
    if masters is not None:
        masters.drop()


def _before_backward(masters: MasterParameters | None) -> None:
    if masters is not None:
        masters.before_backward()
