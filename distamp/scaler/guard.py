"""What backward passes do to gradients that are unscaled, stepped or of an earlier scale."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import TensorWeakRef

from distamp import host
from distamp.errors import StageError
from distamp.optimizers import inner_optimizer
from distamp.scaler.leftovers import (
    Leftover,
    has_values,
    left_behind,
    pass_begins,
    scales_of,
    still_there,
    versions,
)
from distamp.scaler.optimizer_state import OptimizerState, OptimizerStates, OptState
from distamp.sources import GradientSource, source_of

__all__ = ["BackwardWatch", "take_over_shared"]

_MOST_NODES = 100_000
# Each time that an optimizer is first seen or has gone, so many passes are looked through for the
# leaves of optimizers that are yet to be seen: to look through all would take a part of every pass.
_FIRST_PASSES = 16
# After so many the other leaves are forgotten, which may be of no optimizer at all.
_LAST_PASS = 256
# Of a hook among those that users register on the same tensor, whose keys begin at 0.
_KEY = -1


class BackwardWatch:
    """Watches backward passes through scaled losses, by one hook on each, and none on parameters.

    It does nothing unless an optimizer is between ``unscale_`` and ``update``, or gradients were
    left behind by a change of the scale. Gradients that a wrapper writes after the pass has ended
    (none of torch's does) would be missed.

    Args:
        states: Of the scaler's optimizers.
    """

    def __init__(self, states: OptimizerStates) -> None:
        self._states = states
        # How often the scale has changed, and what it was before and is since.
        self._changes = 0
        self._hook = self._new_hook()
        # As of which change the last loss was scaled, and the last pass begun.
        self._scaled_as_of = self._passed_as_of = -1
        self._before: Tensor | None = None
        self._now: float | Tensor | None = None
        # Of no known optimizer: leaves of the graphs, and gradients of an earlier scale.
        self._leaves: dict[int, TensorWeakRef] = {}
        self._orphans: list[Leftover] = []
        # Passes since an optimizer was first seen or has gone, and as of how many such changes.
        self._passes = self._known_as_of = 0
        self._has_read = False
        # In how many threads losses were scaled.
        self._threads = 0
        self._of_thread = threading.local()

    def watch(self, scaled: Tensor) -> None:
        """Watch the backward pass that begins at ``scaled``."""
        node: Any = scaled.grad_fn
        if node is None:
            return
        self._scaled_as_of = self._changes
        hook = self._hook
        if not hasattr(self._of_thread, "is_known"):
            self._of_thread.is_known = True
            self._threads += 1
        if self._known_as_of != self._states.changes:
            self._known_as_of, self._passes = self._states.changes, 0
        if self._threads > 1 or self._passes < _FIRST_PASSES:
            # What the pass goes on to, and not the node itself, which holds this very hook.
            hook = self._new_hook(node.next_functions)
        # As Tensor.register_hook() does it, but for the handle to remove the hook by, which would
        # take half of the time of scale().
        scaled._backward_hooks = OrderedDict(((_KEY, hook),))
        node._register_hook_dict(scaled)

    def _new_hook(self, following: Sequence[tuple[Any, int]] = ()) -> Callable[[Tensor], None]:
        # Who saves a scaled loss need not be warned that this hook is left out.
        hook = unserializable_hook(partial(self._begins, self._changes, following))
        return cast("Callable[[Tensor], None]", hook)

    # -- a pass ----------------------------------------------------------------------------------

    def _begins(self, changes: int, following: Sequence[tuple[Any, int]], _: Any) -> None:
        states = self._states
        self._passed_as_of = changes
        self._passes += 1
        if following and self._passes <= _FIRST_PASSES:
            self._has_read = True
            self._leaves.update((id(p), TensorWeakRef(p)) for p in _leaves_of(following))
        elif self._leaves and self._passes > _LAST_PASS:
            self._leaves, self._orphans = {}, []
        current = changes == self._changes
        used = [state for state in states.records.values() if _is_used(state)]
        live = [state for _, state in states.live()] if self._changes else []
        if not used and current and not self._orphans and not any(s.leftovers for s in live):
            return
        # Another thread's pass may write to its gradients now, which must not be read meanwhile.
        only = set(map(id, _leaves_of(following))) if self._threads > 1 else None
        ended = [_watching(state, only) for state in used]
        if self._before is not None:
            if leftovers := list(self._leftovers(only)):
                scale = self._now if current else self._before
                assert scale is not None
                ended.append(pass_begins(leftovers, scale))
            if not current:
                ended += [_late_pass(state, self._before, only) for state in live]
        if ended:
            _at_end_of_backward(ended)

    def _leftovers(self, only: set[int] | None) -> Iterator[Leftover]:
        states = [state for _, state in self._states.live() if state.leftovers]
        if only is not None:
            for each in chain(self._orphans, *(state.leftovers for state in states)):
                if id(each.parameter()) in only and each.is_there():
                    yield each
            return
        # Those that are not there now are forgotten: DDP's views of its buckets come back.
        self._orphans = still_there(self._orphans)
        yield from self._orphans
        for state in states:
            state.leftovers = still_there(state.leftovers)
            yield from state.leftovers

    # -- a change of the scale -------------------------------------------------------------------

    def scale_is(self, scale: Tensor) -> None:
        """Note the scale that losses are multiplied by from now on.

        Gradients of optimizers that were not looked at since the last change stay as they are, of
        the scale that they were made with.
        """
        on_host = host.is_host(scale.device)
        now: float | Tensor = scale.item() if on_host else scale.clone()
        before, self._now = self._now, now
        if self._leaves and (self._has_read or self._known_as_of != self._states.changes):
            self._forget_leaves()
        if before is None or (on_host and before == now):
            return
        self._changes += 1
        self._hook = self._new_hook()
        old = before if isinstance(before, Tensor) else _scalar(before)
        self._before = old
        for optimizer, state in self._states.live():
            # On a device every update counts as a change, and here it would cost too much.
            if on_host and state["stage"] is OptState.STEPPED and state.refreshed:
                new = [p for reference in state.refreshed if (p := reference()) is not None]
            elif state.has_new_gradients():
                new = source_of(optimizer).filled()
            elif state.leftovers:
                new = []
            else:
                continue
            state.leftovers = _with_new(state.leftovers, new, old)
        if self._leaves:
            self._adopt_leaves(old)

    def _forget_leaves(self) -> None:
        """Forget leaves that are gone or known: torch swaps no tensor with weak references."""
        self._has_read = False
        known = {id(p) for o, _ in self._states.live() for p in source_of(o).watched()}
        self._leaves = {
            key: reference
            for key, reference in self._leaves.items()
            if reference() is not None and key not in known
        }

    def _adopt_leaves(self, scale: Tensor) -> None:
        leaves = [p for reference in self._leaves.values() if (p := reference()) is not None]
        self._orphans = _with_new(self._orphans, leaves, scale)

    def scale_of(
        self, optimizer: Any, state: OptimizerState, source: GradientSource, scale: Tensor
    ) -> Tensor:
        """Return the scale that the gradients of an optimizer were made with.

        Raises:
            StageError: They were made with several.
        """
        first_seen, state.looked_at = not state.looked_at, True
        if not state.used.places:
            state.used.choose(source.filled())
        if self._orphans:
            self._give_orphans(state, source)
        earlier = self._scale_of_new() if first_seen else None
        if not state.leftovers:
            return scale if earlier is None else earlier
        now = scale.clone()  # update() writes to the scale itself
        left, made_with = scales_of(state.leftovers, now)
        state.leftovers = []
        if not left:
            return scale
        places = {id(each.parameter()) for each in left}
        others = [p for p in source.filled() if id(p) not in places]
        if any(map(_is_filled, others)):
            made_with.append(now if earlier is None else earlier)
        scales = {float(one): one for one in made_with}
        if len(scales) < 2:
            only = next(iter(scales.values()), scale)
            return only if isinstance(only, Tensor) else _scalar(only)
        # Refused again, until they are zeroed.
        state.leftovers = left + left_behind(others, now)
        raise StageError(
            f"{type(optimizer).__name__} holds gradients that were made with several loss scales "
            f"({', '.join(f'{value:g}' for value in scales)}): step it before update() changes the "
            "scale, or set its gradients to None before you make or write new ones"
        )

    def _scale_of_new(self) -> Tensor | None:
        """Return the earlier scale where the gradients of an optimizer never seen must be of it.

        The last pass was before the scale changed, and nothing has been scaled since.
        """
        earlier = self._changes - 1
        is_earlier = self._passed_as_of == earlier and self._scaled_as_of == earlier
        return self._before if is_earlier and earlier >= 0 else None

    def _give_orphans(self, state: OptimizerState, source: GradientSource) -> None:
        mine = {id(p) for p in source.filled()}
        alive = still_there(self._orphans)
        state.leftovers += [each for each in alive if id(each.parameter()) in mine]
        self._orphans = [each for each in alive if id(each.parameter()) not in mine]


def _is_filled(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return gradient is not None and has_values(gradient)


def _with_new(known: list[Leftover], parameters: Iterable[Tensor], scale: Tensor) -> list[Leftover]:
    known = still_there(known)
    for each in known:
        each.scale_changes(scale)
    places = {id(each.parameter()) for each in known}
    return known + left_behind([p for p in parameters if id(p) not in places], scale)


def _scalar(value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device="cpu")


def _leaves_of(following: Sequence[tuple[Any, int]]) -> Iterator[Tensor]:
    """Yield the tensors that a pass gives gradients to."""
    stack = [node for node, _ in following]
    seen = set(stack)
    while stack and len(seen) < _MOST_NODES:
        node = stack.pop()
        if node is None:
            continue
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                stack.append(other)


def _among(tensors: list[Tensor], only: set[int] | None) -> list[Tensor]:
    return tensors if only is None else [each for each in tensors if id(each) in only]


def _is_used(state: OptimizerState) -> bool:
    """Return whether an optimizer's gradients were unscaled, or stepped as they are."""
    stage = state["stage"]
    return stage is OptState.UNSCALED or (stage is OptState.STEPPED and state.in_place)


def _watching(state: OptimizerState, only: set[int] | None) -> Callable[[], None]:
    """Note which gradients of an optimizer a pass changes, that was unscaled or stepped before."""
    optimizer = state.optimizer()
    parameters = [] if optimizer is None else _among(source_of(optimizer).watched(), only)
    before = versions(parameters)
    was_unscaled = state["stage"] is OptState.UNSCALED

    def ended() -> None:
        for p, old, new in zip(parameters, before, versions(parameters), strict=True):
            if old != new:
                if was_unscaled:
                    state.late = True
                    return
                state.refreshed.append(TensorWeakRef(p))

    return ended


def _late_pass(state: OptimizerState, scale: Tensor, only: set[int] | None) -> Callable[[], None]:
    """Note what a pass makes, through a loss that was scaled before the scale changed."""
    optimizer = state.optimizer()
    parameters = [] if optimizer is None else _among(source_of(optimizer).filled(), only)
    before = versions(parameters)

    def ended() -> None:
        after = versions(parameters)
        both = zip(parameters, before, after, strict=True)
        new = [p for p, old, now in both if old is None and now is not None]
        state.leftovers += left_behind(new, scale)

    return ended


def _at_end_of_backward(callbacks: list[Callable[[], None]]) -> None:
    # Queued twice: wrappers that queue their own callbacks during the pass come before the second.
    queue = Variable._execution_engine.queue_callback

    def run() -> None:
        for callback in callbacks:
            callback()

    queue(lambda: queue(run))


def take_over_shared(
    states: OptimizerStates, optimizer: Any, state: OptimizerState, source: GradientSource
) -> None:
    """Let an optimizer share what its gradients went through by way of another one.

    A wrapper and the optimizer inside it, for example. Which gradients two optimizers share is
    asked of their live parameters, and only of those that got no new ones since.

    Raises:
        StageError: Only some of its gradients were unscaled or stepped through another optimizer.
    """
    if state["stage"] is not OptState.READY or len(states.records) < 2:
        return
    mine: set[int] | None = None
    for other in list(states.records.values()):
        holder = other.optimizer()
        if other is state or not other.in_place or holder is None:
            continue
        if mine is None:
            mine = set(map(id, source.watched()))
        theirs = set(map(id, source_of(holder).watched()))
        fresh = {id(p) for reference in other.refreshed if (p := reference()) is not None}
        used = (mine & theirs) - fresh
        # Where a new pass reached some, the others count if they still have values. Without one all
        # count, zero on this rank or not: the other ranks have the same, and send no message.
        if mine & fresh:
            used = {id(p) for p in source.watched() if id(p) in used and _is_filled(p)}
        if not used:
            continue
        if mine <= theirs or inner_optimizer(optimizer) is not None:
            state.take_over(other)
            return
        raise StageError(
            f"{type(optimizer).__name__} shares parameters with a {type(holder).__name__} that was "
            "already unscaled or stepped in this iteration; their gradients would be unscaled twice"
        )
