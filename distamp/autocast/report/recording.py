"""Counting what a model runs: which module, which function, which kernel, which dtypes."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from distamp.autocast.report.attribution import (
    NOBODY,
    GradOwners,
    NodeOwners,
    Owner,
    mark_nodes,
    module_names,
    parameter_names,
)
from distamp.autocast.report.kernels import (
    Counts,
    Key,
    casts_of,
    kernel_of,
    row_of,
)
from distamp.autocast.report.rows import OUTSIDE, OpRow
from distamp.autocast.report.watching import Call, Functions, Kernels, ModuleHook, any_autocast
from distamp.autocast.tensors import tensors_in
from distamp.errors import RegionError

__all__ = ["Observed", "Recorder"]

_in_backward = torch._C._current_graph_task_id
_CASTS_KEPT = 4096


class Observed(NamedTuple):
    """One kernel call: whose it is, and its arguments as they were."""

    owner: Owner
    phase: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


class _Frame:
    """A module that is running."""

    __slots__ = ("autocast", "module", "name", "phase")

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.phase = "forward" if _in_backward() == -1 else "recompute"
        self.autocast = any_autocast()


class _Thread:
    """What one thread is doing, and what it has counted."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.call: Call | None = None
        self.counts: dict[Key, Counts] = {}
        self.owners = NodeOwners()
        # Casts of weights that autocast may hand out again, and whether one has been used yet.
        self.cached: dict[int, tuple[weakref.ref[torch.Tensor], list[bool]]] = {}
        self.cached_limit = _CASTS_KEPT
        # The node that runs, where something other than torch's engine calls it.
        self.node: Any = None
        # The torch function that the calls seen stand in for, if they do.
        self.function = ""
        self.paused = False
        self.modes: ExitStack | None = None
        self.since = 0
        self.foreign: set[Any] = set()


class Recorder:
    """Counts of what a model runs, from entry to exit; any thread that runs it is followed.

    Hooks are set on the modules of this model alone and removed at exit. Replicas that
    ``torch.nn.DataParallel`` makes share the hooks of the module they copy.

    Args:
        model: The model whose names the rows carry.
        observe: Called after each kernel with what was counted, for those who look closer.
        parameters: ``id(tensor)`` to module name, where other tensors stand for the parameters.
    """

    def __init__(
        self,
        model: nn.Module | None,
        observe: Callable[[Observed], None] | None = None,
        parameters: dict[int, str] | None = None,
    ) -> None:
        self.model = model
        self._names = module_names(model) if model is not None else {}
        # Of a wrapper and the module in it, which share a name, the module's class.
        self._kinds = {name: type(module).__name__ for module, name in self._names.items()}
        self._local = threading.local()
        self._lock = threading.Lock()
        self._threads: list[_Thread] = []
        self._modes: ExitStack | None = None
        self._handles = ExitStack()
        self._grad_owners = GradOwners(NodeOwners(), {})
        self._observe = observe
        self._parameters = parameters
        self._home = 0
        # Names of the modules whose forward has begun.
        self.entered: set[str] = set()
        self.closed = False

    def __enter__(self) -> Recorder:
        self._home = threading.get_ident()
        if self._modes is not None or self.closed:
            raise RuntimeError("a precision report records once; make another for another block")
        parameters = self._parameters or parameter_names(self._names.items())
        self._grad_owners = GradOwners(self.thread().owners, parameters)
        for module, name in self._names.items():
            enter = module.register_forward_pre_hook(
                ModuleHook(self, name, entering=True), prepend=True
            )
            leave = module.register_forward_hook(
                ModuleHook(self, name, entering=False), always_call=True
            )
            self._handles.callback(enter.remove)
            self._handles.callback(leave.remove)
        if "torch._dynamo" in sys.modules:
            # Under a dispatch mode torch.compile gives a function up, for good.
            self._handles.enter_context(torch.compiler.set_stance("force_eager"))
        self._modes = self._new_modes()
        return self

    def __exit__(self, *exc: object) -> None:
        self.closed = True
        with self._handles:
            if self._home != threading.get_ident():
                # Its modes stay on the other thread's stacks, deaf; no one else can take them off.
                raise RegionError(
                    "a precision report was left in another thread than it was entered"
                )
            if self._modes is not None:
                self._modes.close()

    def rows(self) -> tuple[OpRow, ...]:
        """What has been counted so far, threads added together."""
        with self._lock:
            threads = list(self._threads)
        merged: dict[Key, Counts] = {}
        for thread in threads:
            for key, counts in list(thread.counts.items()):
                sums = merged.setdefault(key, [0] * len(counts))
                sums[:] = [a + b for a, b in zip(sums, counts, strict=True)]
        return tuple(
            row_of(key, self._kinds.get(key[0], ""), counts) for key, counts in merged.items()
        )

    # -- where

    def thread(self) -> _Thread:
        """This thread's state, made at its first call."""
        try:
            return self._local.thread  # type: ignore[no-any-return]
        except AttributeError:
            thread: _Thread = _Thread()
            self._local.thread = thread
            with self._lock:
                self._threads.append(thread)
            return thread

    def _new_modes(self) -> ExitStack:
        with ExitStack() as stack:
            stack.enter_context(Kernels(self))
            stack.enter_context(Functions(self))
            return stack.pop_all()

    def _watched(self) -> bool:
        """Whether this thread is followed already; autograd's own threads inherit the modes."""
        modes = _get_current_dispatch_mode_stack()
        return any(isinstance(mode, Kernels) and mode.recorder is self for mode in modes)

    def enter_module(self, module: nn.Module, name: str, inputs: Any) -> None:
        """A module's forward begins in this thread."""
        self.entered.add(name)
        thread = self.thread()
        if not thread.frames and thread.modes is None and not self._watched():
            thread.modes = self._new_modes()
            thread.since = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
            thread.foreign = {t.grad_fn for t in tensors_in(inputs) if t.grad_fn is not None}
        if thread.modes is not None:
            attributes = (module._parameters, module._buffers, vars(module))
            tensors = (t for of in attributes for t in of.values() if isinstance(t, torch.Tensor))
            thread.foreign.update(t.grad_fn for t in tensors if t.grad_fn is not None)
        self._claim(thread)
        thread.frames.append(_Frame(module, name))

    def leave_module(self, module: nn.Module, output: Any) -> None:
        """A module's forward has ended, by return or by an exception."""
        thread = self.thread()
        self._claim(thread)
        if any(frame.module is module for frame in thread.frames):
            while thread.frames.pop().module is not module:
                pass
        if not thread.frames and thread.modes is not None:
            thread.modes.close()
            thread.modes = None
            mark_nodes(output, thread.owners, thread.since, thread.foreign)
            thread.foreign = set()
            self._grad_owners.marked = True

    def _claim(self, thread: _Thread) -> None:
        thread.owners.claim(Owner(thread.frames[-1].name) if thread.frames else NOBODY)

    def where(self) -> tuple[str, str]:
        """The module that runs in this thread, and the torch function."""
        thread = self.thread()
        owner = self._where(thread)[0]
        return owner.module, owner.function

    def running(self, node: Any) -> None:
        """Say which autograd node runs, where torch's engine does not."""
        self.thread().node = node

    @contextmanager
    def inside(self, function: str) -> Iterator[None]:
        """Count what runs as part of this torch function, where other calls stand in for it."""
        thread = self.thread()
        before, thread.function = thread.function, function
        try:
            yield
        finally:
            thread.function = before

    @contextmanager
    def paused(self, paused: bool = True) -> Iterator[None]:
        """Count nothing in this thread for a while; False counts again inside a pause."""
        thread = self.thread()
        before, thread.paused = thread.paused, paused
        try:
            yield
        finally:
            thread.paused = before

    # -- what

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Count one kernel call."""
        thread = self.thread()
        kernel = kernel_of(func)
        if thread.paused or self.closed or not kernel.runs:
            return
        inputs, outputs = tensors_in(args, kwargs), tensors_in(out)
        owner, phase, asked = self._where(thread)
        cause, weight = "", False
        casts = casts_of(kernel, inputs, outputs)
        if casts:
            source = casts[0][0]
            cause, weight = owner.cause, owner.weight
            if not cause:
                cause = asked if kernel.casts else "explicit"
                weight = source.is_leaf and source.requires_grad
            owner = Owner(owner.module, owner.function, cause, weight)
        if phase != "backward" or torch.is_grad_enabled():
            thread.owners.claim(owner)
        ins = tuple(dict.fromkeys([t.dtype for t in inputs]))
        outs = tuple(dict.fromkeys([t.dtype for t in outputs]))
        key = (owner.module, phase, owner.function, func, ins, outs, cause, weight)
        counts = thread.counts.get(key)
        if counts is None:
            counts = thread.counts[key] = [0, 0, 0, 0, 0, 0, 0]
        counts[0] += 1
        if not kernel.view:
            for tensor in outputs:
                counts[1] += tensor.numel()
        for source, result in casts:
            counts[2] += 1
            counts[3] += source.numel() * source.element_size()
            counts[4] += result.numel() * result.element_size()
        if phase != "backward":
            if thread.cached:
                self._count_hits(thread, inputs, counts)
            if weight and cause == "autocast" and torch.is_autocast_cache_enabled():
                self._keep(thread, casts[0][1])
        if self._observe is not None and isinstance(func, torch._ops.OpOverload):
            self._observe(Observed(owner, phase, func, args, kwargs, inputs, outputs))

    def _where(self, thread: _Thread) -> tuple[Owner, str, str]:
        """The owner of the op that runs now, its phase, and who is asking if it is a cast."""
        call = thread.call
        if thread.frames:
            frame = thread.frames[-1]
            on = call.autocast if call is not None else frame.autocast
            asked = "autocast" if on and not (call and call.explicit) else "explicit"
            function = thread.function or (call.name if call else "")
            return Owner(frame.name, function), frame.phase, asked
        if _in_backward() == -1:
            on = call is not None and call.autocast and not call.explicit
            return Owner(OUTSIDE, call.name if call else ""), "forward", _who(on)
        node: Any = thread.node or torch._C._current_autograd_node()
        owner = self._grad_owners.of(node)
        if call is not None and isinstance(node, torch.autograd.function.BackwardCFunction):
            return owner, "backward", _who(call.autocast and not call.explicit)
        if owner.cause and type(node).__name__ != "ToCopyBackward0":
            owner = Owner(owner.module, owner.function)
        return owner, "backward", "autograd"

    def _keep(self, thread: _Thread, cast: torch.Tensor) -> None:
        """Remember a cast that autocast may hand out again; forget those that are gone."""
        if len(thread.cached) >= thread.cached_limit:
            alive = {key: cast for key, cast in thread.cached.items() if cast[0]() is not None}
            thread.cached = alive
            thread.cached_limit = max(_CASTS_KEPT, 2 * len(alive))
        thread.cached[id(cast)] = (weakref.ref(cast), [False])

    def _count_hits(self, thread: _Thread, inputs: list[torch.Tensor], counts: Counts) -> None:
        for tensor in inputs:
            cast = thread.cached.get(id(tensor))
            if cast is None:
                continue
            reference, used = cast
            if reference() is not tensor:
                del thread.cached[id(tensor)]
            elif used[0]:
                counts[5] += 1
                counts[6] += tensor.numel() * tensor.element_size()
            else:
                used[0] = True


def _who(autocast: bool) -> str:
    return "autocast" if autocast else "explicit"
