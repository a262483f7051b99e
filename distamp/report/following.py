"""Whose a kernel is: the module that runs, in whatever thread, and in backward the one that ran.

Modules are followed by hooks. On each autograd node that a module made is written whose it is, so
that backward can be given to modules too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from distamp.report.rows import OUTSIDE

__all__ = [
    "Follower",
    "FollowingMode",
    "Frame",
    "Owner",
    "inside_compiled_ones",
    "mark",
    "module_names",
    "owner_of",
    "tensors_in",
]

_any_autocast = torch._C._is_any_autocast_enabled
_in_backward = torch._C._current_graph_task_id
# Components of names that wrappers add: FSDP1 and fairscale, torch.compile, checkpoint wrappers.
_WRAPPERS = ("_fsdp_wrapped_module", "_fpw_module", "_orig_mod", "_checkpoint_wrapped_module")
_NODE_KEY = "distamp.owner"


class Owner(NamedTuple):
    """Whose a kernel or an autograd node is.

    Args:
        module: Its name, without those of wrappers.
        function: The torch function that was called, where that is followed.
        cause: Of casts in it; see `OpRow`.
    """

    module: str = OUTSIDE
    function: str = ""
    cause: str = ""


class Frame(NamedTuple):
    """A module that runs: its name, ``"forward"`` or ``"recompute"``, whether autocast was on."""

    name: str
    phase: str
    autocast: bool
    module: nn.Module


class _Thread(threading.local):
    """What one thread is doing."""

    def __init__(self) -> None:
        # The modules that run, innermost last.
        self.frames: list[Frame] = []
        self.modes: ExitStack | None = None


class Follower:
    """Knows which module runs, in any thread that runs the models; subclasses watch what it does.

    Args:
        models: Whose modules are followed.
        inside_compiled: Whether to follow what is inside compiled modules, which then have to run
            eagerly. If not, they stay compiled, and what they run is theirs as a whole.
    """

    def __init__(self, *models: nn.Module, inside_compiled: bool = True) -> None:
        self.closed = True
        self.names: dict[nn.Module, str] = {}
        #: What runs in compiled modules, and is not followed.
        self.compiled: set[nn.Module] = set()
        for model in models:
            self.names |= module_names(model)
            for module in model.modules():
                if isinstance(module, torch.jit.ScriptModule):
                    raise TypeError(
                        f"module {self.names[module]!r} is scripted or traced by torch.jit, and "
                        "cannot be followed: report on the model as it is before that"
                    )
            if not inside_compiled:
                self.compiled |= inside_compiled_ones(model)
        #: Of each parameter, by id, its name and its module's.
        self.parameters = {
            id(parameter): (f"{name}.{leaf}".lstrip("."), name)
            for module, name in self.names.items()
            for leaf, parameter in module.named_parameters(recurse=False)
        }
        self._thread = _Thread()

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave an empty, closed one in a copied or pickled module."""
        return Follower, ()

    def modes(self) -> tuple[Any, ...]:
        """Return the modes that watch a thread, to be entered; the first is a TorchDispatchMode."""
        return ()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the models in every thread, and watch this one, while the block runs."""
        self.closed = False
        with ExitStack() as stack:
            stack.callback(setattr, self, "closed", True)
            for module, name in self.names.items():
                if module in self.compiled:
                    continue
                enter = functools.partial(self._enter, name)
                for handle in (
                    module.register_forward_pre_hook(enter, prepend=True),
                    module.register_forward_hook(self._leave, always_call=True),
                ):
                    stack.callback(handle.remove)
            for mode in self.modes():
                stack.enter_context(mode)
            yield

    def frames(self) -> list[Frame]:
        """Return the modules that run in this thread, innermost last."""
        return self._thread.frames

    def running(self) -> tuple[Owner, str, Any]:
        """Return whose the kernel that runs is, its phase, and in backward the autograd node."""
        frames = self._thread.frames
        if frames:
            return Owner(frames[-1].name), frames[-1].phase, None
        if _in_backward() == -1:
            return Owner(), "forward", None
        node: Any = torch._C._current_autograd_node()
        if hasattr(node, "variable"):
            module = self.parameters.get(id(node.variable), ("", OUTSIDE))[1]
            return Owner(module, "accumulate_grad", "autograd"), "backward", node
        return owner_of(node), "backward", node

    def _enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        """A module's forward begins in this thread."""
        if torch.compiler.is_compiling() or self.closed:
            return
        thread = self._thread
        # Autograd's own threads inherit the modes.
        stack = _get_current_dispatch_mode_stack() if not thread.frames else ()
        if not thread.frames and all(getattr(mode, "follower", None) is not self for mode in stack):
            thread.modes = ExitStack()
            for mode in self.modes():
                thread.modes.enter_context(mode)
        phase = "forward" if _in_backward() == -1 else "recompute"
        thread.frames.append(Frame(name, phase, _any_autocast(), module))
        self.entered(module)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A module's forward has ended, by return or by an exception."""
        if torch.compiler.is_compiling():
            return
        thread = self._thread
        if self.closed or all(frame.module is not module for frame in thread.frames):
            return
        while (frame := thread.frames.pop()).module is not module:
            pass
        mark(output, inputs, Owner(frame.name), through=True)
        if not thread.frames and thread.modes is not None:
            thread.modes.close()
            thread.modes = None

    def entered(self, module: nn.Module) -> None:
        """Note that a module's forward begins; it is the last of `frames`."""


class FollowingMode(TorchDispatchMode):
    """A dispatch mode of a follower, which tells it of every kernel call of a thread."""

    # flex_attention, cond and the like are one kernel; what they run inside is not seen.
    supports_higher_order_operators = True

    def __init__(self, follower: Follower) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.follower = follower


def owner_of(node: Any) -> Owner:
    """Return whose an autograd node is; nobody's if it was made before or outside."""
    owner: Owner = Owner() if node is None else node.metadata.get(_NODE_KEY, Owner())
    return owner


def mark(outputs: Any, inputs: Any, owner: Owner, through: bool = False) -> None:
    """Write on the autograd nodes between inputs and outputs whose they are, if nobody's yet.

    Args:
        outputs: Tensors, also nested.
        inputs: Where to end.
        owner: Whose the nodes are.
        through: Whether to look behind nodes that have an owner, as those of inner modules have.
    """
    todo = [each.grad_fn for each in tensors_in(outputs) if each.grad_fn is not None]
    if not todo:
        return
    seen = {each.grad_fn for each in tensors_in(inputs)}
    while todo:
        node: Any = todo.pop()
        if node in seen or hasattr(node, "variable"):
            continue
        seen.add(node)
        if _NODE_KEY not in node.metadata:
            node.metadata[_NODE_KEY] = owner
        elif not through:
            continue
        todo.extend(each for each, _ in node.next_functions if each is not None)


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts; torch's pytrees take five times as long."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for each in values for tensor in tensors_in(each)]


def inside_compiled_ones(model: nn.Module) -> set[nn.Module]:
    """Return the modules whose forward is compiled, by ``torch.compile(m)`` or ``m.compile()``."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        if getattr(module, "_compiled_call_impl", None) is not None:
            inside.update(module.modules())
        elif type(module).__name__ == "OptimizedModule":
            # Its own hooks run outside of what is compiled.
            inside.update({*module.modules()} - {module})
    return inside


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """Every module of the model once, with the name it has without wrappers around it."""
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        head, _, leaf = name.rpartition(".")
        parent = model.get_submodule(head)
        above = names.get(parent, "")
        # DataParallel and its like add nothing of their own.
        alone = list(parent.children()) == [module] and not [*parent.parameters(recurse=False)]
        wrapped = leaf in _WRAPPERS or (leaf == "module" and alone)
        names[module] = above if wrapped or not name else f"{above}.{leaf}".lstrip(".")
    return names
