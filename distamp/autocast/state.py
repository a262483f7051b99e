"""The whole autocast state of a thread as a value, and what carries it to where it is needed.

Autocast's state is a thread's own: what another thread runs, it runs in fp32, or in a dtype of its
own, whatever region its caller is in. So it is carried to threads (AutocastState.wrap), to replicas
(DataParallel), to recomputation (checkpoint).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, ParamSpec, Self, TypeVar, overload

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils import checkpoint as torchs

from distamp.autocast.compiled_backward import restore_setting, switch_off_autocast
from distamp.autocast.op_lists import Lists, follow, followed
from distamp.autocast.suspension import suspends, wrap
from distamp.autocast.thread_state import local, never_compiled, reentrant_checkpoint

__all__ = [
    "AutocastState",
    "DataParallel",
    "checkpoint",
    "checkpoint_context_fn",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_M = TypeVar("_M", bound=nn.Module)


class _WrapMethod:
    """The method ``wrap``, of the class for the state of the calling thread, or of a state.

    ``AutocastState.wrap(fn)`` would bind ``fn`` to another state than ``state.wrap(fn)``, so it is
    a descriptor, and no class method, which would ignore the state it is called on.
    """

    @overload
    def __get__(
        self, state: None, owner: type[AutocastState]
    ) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...

    @overload
    def __get__(
        self, state: AutocastState, owner: type[AutocastState]
    ) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...

    def __get__(self, state: AutocastState | None, owner: type[AutocastState]) -> Any:
        def wrap(fn: Callable[_P, _R]) -> Callable[_P, _R]:
            """Bind a function to an autocast state, for any thread that runs the function.

            Use it as in ``threading.Thread(target=AutocastState.wrap(fn))``,
            ``executor.submit(AutocastState.wrap(fn), x)`` or
            ``asyncio.to_thread(AutocastState.wrap(fn), x)``. torch has no counterpart: a new thread
            computes in fp32. The thread's own state is restored after each call.

            Args:
                fn: A function, or a generator or coroutine function. Generators and coroutines
                    have the state while they run, and not while they are suspended.

            Returns:
                The bound function. It can be pickled if ``fn`` can, unless ``fn`` is a generator
                or coroutine function.

            Raises:
                TypeError: ``fn`` is not callable.
            """
            return _bind(fn, owner.capture() if state is None else state)

        return wrap


@dataclass(frozen=True)
class AutocastState:
    """The autocast settings of a thread, as a value that another thread can apply.

    torch has no such thing; its DataParallel carries over one device type's on or off.
    Hashable, and can be pickled.

    Attributes:
        devices: For each device type that this torch has autocast for: its name, whether autocast
            is enabled, and the dtype of lower precision ops.
        cache_enabled: Whether casts of weights are kept until the outermost region ends.
        lists: The op lists in force, with the device type of each; () is torch's own.
    """

    devices: tuple[tuple[str, bool, torch.dtype], ...]
    cache_enabled: bool
    lists: Lists = ()

    @classmethod
    @never_compiled
    def capture(cls) -> AutocastState:
        """Take the calling thread's state."""
        lists = followed()
        # What only shows torch.compile the lists is no state of its own.
        follow(())
        devices = tuple(
            (each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
            for each in torch._C._autocast_supported_devices()
        )
        follow(lists)
        return cls(devices, torch.is_autocast_cache_enabled(), lists)

    #: Binds a function to a state; see `_WrapMethod`.
    wrap = _WrapMethod()

    def apply(self) -> Self:
        """Be a context manager that gives a thread this state, and then its own back.

        Its own comes back whatever the block did, regions it left open included. It may be entered
        again, by any thread.
        """
        if is_dynamo_compiling():
            torch._dynamo.graph_break(
                "AutocastState.apply() cannot be used in a compiled function: a state is the "
                "thread's, not the graph's. Apply it around the call of the compiled function, or "
                "open autocast(...) regions inside."
            )
        return self

    @never_compiled
    def __enter__(self) -> Self:
        found, undo = AutocastState.capture(), ExitStack()
        # As torch keeps casts: to the end of the outermost region, where they are of these dtypes.
        dtypes = [[dtype for _, _, dtype in each.devices] for each in (self, found)]
        nesting = torch.autocast_increment_nesting()
        drops = nesting == 1 or dtypes[0] != dtypes[1]
        if drops:
            torch.clear_autocast_cache()
            undo.callback(torch.clear_autocast_cache)
        undo.callback(_leave, nesting)
        undo.callback(_set, found)
        undo.callback(setattr, local, "regions", local.regions)
        undo.callback(setattr, local, "listed_in", local.listed_in)
        # A region of the block's own must end in the block, and none of the caller's can.
        local.regions, local.listed_in = [], reentrant_checkpoint()
        _set(self)
        if any(enabled for _, enabled, _ in self.devices) and switch_off_autocast():
            undo.callback(restore_setting)
        local.applied.append(undo)
        return self

    @never_compiled
    def __exit__(self, *error: Any) -> None:
        local.applied.pop().close()


def _set(state: AutocastState) -> None:
    follow(())
    for name, enabled, dtype in state.devices:
        torch.set_autocast_enabled(name, enabled)
        torch.set_autocast_dtype(name, dtype)
    torch.set_autocast_cache_enabled(state.cache_enabled)
    follow(state.lists)


def _leave(nesting: int) -> None:
    """Leave torch's nesting as it was below this level, whatever a block left open."""
    while torch.autocast_decrement_nesting() >= nesting:
        pass


def _call(fn: Callable[..., Any], state: AutocastState, /, *args: Any, **kwargs: Any) -> Any:
    with state.apply():
        return fn(*args, **kwargs)


def _bind(fn: Callable[_P, _R], state: AutocastState) -> Callable[_P, _R]:
    """Return a function that calls ``fn`` under a state."""
    if not callable(fn):
        raise TypeError(f"AutocastState.wrap() takes a callable, not {type(fn).__name__}.")
    if suspends(fn):
        return wrap(state.apply, fn)
    called = functools.partial(_call, fn, state)
    return functools.update_wrapper(called, fn, updated=())


class DataParallel(nn.DataParallel[_M]):
    """A :class:`torch.nn.DataParallel` whose replicas compute in the caller's autocast state.

    torch's gives replicas whether autocast is on, and neither the dtype nor the cache flag nor op
    lists: an outer bfloat16 region computes in float16 in two replicas and in bfloat16 in one,
    which runs in the caller's own thread. Where there is no accelerator the module itself is
    called, as in torch's.
    """

    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Call the replicas in the caller's autocast state."""
        state = AutocastState.capture()
        bound = [state.wrap(replica) for replica in replicas]
        return super().parallel_apply(bound, inputs, kwargs)  # type: ignore[arg-type]


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **settings: Any
) -> Any:
    """Run ``function`` and keep nothing of it but its inputs; run it again in backward.

    As :func:`torch.utils.checkpoint.checkpoint`, which recomputes with autocast enabled or not, in
    the same dtype, for the CPU and one more device type. This one carries over the whole
    :class:`AutocastState`, op lists included, with either value of ``use_reentrant``.

    Args:
        function: What to run, as for torch's.
        args: Its arguments, as for torch's.
        use_reentrant: Which of torch's two implementations; to be given, and better False.
        settings: As for torch's: ``preserve_rng_state``, ``context_fn``, ``determinism_check`` and
            ``debug``, and keyword arguments of ``function`` where ``use_reentrant`` is False.

    Returns:
        What ``function`` returns.

    Source: https://pytorch.org/docs/stable/checkpoint.html.
    """
    # A compiled graph has the casts of the lists in it, and is not run again through here.
    again = function if is_dynamo_compiling() else AutocastState.wrap(function)
    return torchs.checkpoint(again, *args, use_reentrant=use_reentrant, **settings)


def checkpoint_context_fn() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Have a ``context_fn`` that carries over the whole autocast state of the forward pass.

    For code that calls torch's function itself, with ``use_reentrant=False``:
    ``model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn":
    checkpoint_context_fn})`` of Hugging Face's, or ``checkpoint_wrapper`` of FSDP's.

    Returns:
        The context of the forward pass and that of the recomputation.
    """
    state = AutocastState.capture()
    return state.apply(), state.apply()
