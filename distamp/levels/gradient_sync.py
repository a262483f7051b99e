"""GradientSync: pauses in the reduction of gradients, and the backward passes in them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distamp.comm_hooks.torch_private import awaits_first_reduction, unwrap_compiled
from distamp.errors import CallOrderError
from distamp.fsdp_unit import FSDPUnit
from distamp.levels.wrappers import DDP, FSDP1, FSDP2, SHARDED_DDP, wrapper_name

__all__ = ["GradientSync"]


class GradientSync:
    """Pauses the reduction of gradients between ranks, and follows the backward passes.

    Like ``no_sync()`` of DDP and FSDP1 and ``set_requires_gradient_sync(False)`` of FSDP2, for
    several models at once. DDP decides in the forward pass whether gradients are reduced, and the
    other wrappers decide in the backward pass.

    Args:
        models: Wrapped or not.

    Attributes:
        left_unreduced: Whether the last backward pass left gradients unreduced because of `pause`.
    """

    # Private attributes that survive a call:
    # _pauses: the number of regions of `pause` that are open.
    # _accumulates: whether FSDP2 may hold gradients of a paused pass.

    def __init__(self, models: Iterable[nn.Module]) -> None:
        models = tuple(models)
        plain = [unwrap_compiled(model) for model in models]
        self.left_unreduced = False
        self._pauses = 0
        self._accumulates = False
        self._units: list[Any] = [
            module for model in plain for module in model.modules() if wrapper_name(module) == FSDP2
        ]
        self._wrappers: list[Any] = []
        for model in plain:
            self._wrappers.extend(_with_no_sync(model))
        self._decides_in_backward = bool(self._units) or any(
            wrapper_name(wrapper) != DDP for wrapper in self._wrappers
        )
        self._outputs = _DDPOutputs(models)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leave gradients unreduced in forward and backward passes inside of the block.

        The state from before is restored at the end, also after an exception. DDP with
        ``static_graph=True`` is not paused before it has reduced gradients once, because torch
        records the graph in that pass.
        """
        with contextlib.ExitStack() as stack:
            for wrapper in self._wrappers:
                if wrapper_name(wrapper) == DDP and awaits_first_reduction(wrapper):
                    continue
                region = wrapper.no_sync()
                region.__enter__()
                # fairscale's region does not restore anything when an exception passes through it.
                stack.callback(region.__exit__, None, None, None)
            for unit in self._units:
                stack.enter_context(FSDPUnit(unit).paused_gradient_sync())
            self._pauses += 1
            self._outputs.paused = True
            try:
                yield
            finally:
                self._pauses -= 1
                self._outputs.paused = self._pauses > 0

    @contextlib.contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Surround one backward pass.

        Raises:
            CallOrderError: DDP would not reduce this pass, because its forward pass had one
                already.
        """
        paused = self._pauses > 0 and self._decides_in_backward
        self._outputs.begin_pass()
        try:
            with contextlib.ExitStack() as stack:
                if self._accumulates and not paused:
                    for unit in self._units:
                        stack.enter_context(FSDPUnit(unit).accumulating_in_reduce_dtype())
                yield
        finally:
            self._outputs.end_pass()
            self.left_unreduced = paused or self._outputs.left_unreduced
            self._accumulates = self._accumulates or paused

    def drop_unreduced(self, set_to_none: bool) -> None:
        """Drop the gradients of paused passes, which FSDP2 keeps outside of any ``param.grad``.

        Args:
            set_to_none: If False, a parameter of such a gradient that has no ``grad`` gets zeros,
                as if its gradient had been reduced before it was cleared.
        """
        for unit in self._units:
            for param in FSDPUnit(unit).drop_unreduced_gradients():
                if param.grad is None and not set_to_none:
                    param.grad = param.detach().new_zeros(param.shape)
        self.left_unreduced = self._accumulates = False


class _DDPOutputs:
    """Watches the outputs of DistributedDataParallel.

    torch reduces gradients in the first backward pass through an output, and does not reduce the
    gradients of a second pass, so that the ranks diverge silently.

    Args:
        models: Models without DistributedDataParallel are ignored.

    Attributes:
        paused: Whether a forward pass that runs now is not to be reduced.
        left_unreduced: Whether the last backward pass went through an output of a paused forward
            pass.
    """

    # It holds no model, because a deep copy of one model copies the hook and everything it holds.

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.paused = False
        self.left_unreduced = False
        self._pass: object | None = None
        for model in models:
            wrappers = [module for module in model.modules() if wrapper_name(module) == DDP]
            if wrappers:
                model.register_forward_hook(functools.partial(self._watch, wrappers))

    def begin_pass(self) -> None:
        """Begin a backward pass."""
        self._pass = object()
        self.left_unreduced = False

    def end_pass(self) -> None:
        """End the backward pass that `begin_pass` began."""
        self._pass = None

    def _watch(self, wrappers: list[Any], module: nn.Module, args: Any, output: Any) -> None:
        reduces = all(wrapper.require_backward_grad_sync for wrapper in wrappers)
        if not reduces and not self.paused:
            return  # The user called no_sync() of DDP, and nothing is reduced.
        reduced_in: set[object] = set()

        def follow(gradient: Tensor) -> None:
            if not reduces:
                self.left_unreduced = True
                return
            if self._pass is not None:
                reduced_in.add(self._pass)
            if len(reduced_in) > 1:
                raise CallOrderError(
                    "This is a second backward() through one forward pass of "
                    "DistributedDataParallel, which reduces gradients only in the first, so the "
                    "ranks would diverge. Add the losses before backward(), or run the forward "
                    "pass once for each backward()."
                )

        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(follow)


def _with_no_sync(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules with a ``no_sync()``, which pauses the modules inside, too."""
    if wrapper_name(module) in (DDP, FSDP1, SHARDED_DDP) or hasattr(module, "no_sync"):
        yield module
        return
    for child in module.children():
        yield from _with_no_sync(child)
