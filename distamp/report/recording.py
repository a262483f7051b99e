"""Recording a precision report: which module, which function, which kernel, which dtypes.

A TorchDispatchMode sees every kernel, below autograd and autocast, casts included. It cannot see
who asked for a cast; a TorchFunctionMode, above autocast, can: ``Tensor.to`` passes it by name.
It also sees the autograd nodes that a function made, and writes on them whose they are, so that
backward can be given to modules.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from distamp.autocast.op_names import schema_of
from distamp.report.rows import OUTSIDE, OpRow, PrecisionReport

__all__ = ["module_names", "precision_report"]

_any_autocast = torch._C._is_any_autocast_enabled
_in_backward = torch._C._current_graph_task_id
# Kernels that may give a tensor another dtype; aten::to is whole in inference mode.
_CASTS = frozenset({"_to_copy", "to", "convert_element_type"})
# Those that write into half of what they are given.
_COPIES = frozenset({"copy_", "copy", "_foreach_copy_", "_foreach_copy"})
# Python calls that ask for a dtype by name.
_CONVERSIONS = frozenset(
    ("to", "type", "type_as", "_to_copy", "asarray", "as_tensor", "tensor", "copy_")
    + ("float", "half", "bfloat16", "double", "int", "long", "short", "char", "byte", "bool")
    + ("chalf", "cfloat", "cdouble")
)
_GETTERS = frozenset({"__get__", "__set__", "size", "dim", "stride", "numel", "is_floating_point"})
# Components of names that wrappers add: FSDP1 and fairscale, torch.compile, checkpoint wrappers.
_WRAPPERS = ("_fsdp_wrapped_module", "_fpw_module", "_orig_mod", "_checkpoint_wrapped_module")
_SUMS = frozenset({"sum", "cumsum", "prod", "cumprod", "nansum", "logcumsumexp", "norm", "mean"})
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear"})
_NODE_KEY = "distamp.owner"


# Whose an op or an autograd node is: module, function, and the cause of casts in it.
_Owner = tuple[str, str, str]
_NOBODY: _Owner = (OUTSIDE, "", "")


class _Thread(threading.local):
    """What one thread is doing."""

    def __init__(self) -> None:
        # The modules that run, innermost last: name, phase, whether autocast was on, module.
        self.frames: list[tuple[str, str, bool, nn.Module]] = []
        # The torch function that runs, and the cause of casts in it.
        self.function = ""
        self.cause = ""
        self.modes: ExitStack | None = None


class _Recorder:
    """Counts what a model runs, from entry to exit; any thread that runs it is followed."""

    def __init__(self, model: nn.Module | None = None, closed: bool = True) -> None:
        self.names = {} if model is None else module_names(model)
        self.closed = closed
        self._parameters = {
            id(parameter): name
            for module, name in self.names.items()
            for parameter in module.parameters(recurse=False)
        }
        # Of a wrapper and the module in it, which share a name, the module's class.
        self._kinds = {name: type(module).__name__ for module, name in self.names.items()}
        self._counts: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._lock = threading.Lock()
        self._thread = _Thread()

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave an empty, closed one in a copied or pickled module."""
        return _Recorder, ()

    def close(self) -> None:
        """Count nothing any more, in whatever thread the model runs."""
        self.closed = True

    def modes(self) -> ExitStack:
        """Enter the modes of this thread; closing what is returned leaves them."""
        with ExitStack() as stack:
            stack.enter_context(_Kernels(self))
            stack.enter_context(_Functions(self))
            return stack.pop_all()

    def enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        """A module's forward begins in this thread."""
        if self.closed:
            return
        thread = self._thread
        # Autograd's own threads inherit the modes.
        if not thread.frames and not any(
            isinstance(mode, _Kernels) and mode.recorder is self
            for mode in _get_current_dispatch_mode_stack()
        ):
            thread.modes = self.modes()
        phase = "forward" if _in_backward() == -1 else "recompute"
        thread.frames.append((name, phase, _any_autocast(), module))

    def leave(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """A module's forward has ended, by return or by an exception."""
        thread = self._thread
        if self.closed or all(frame[3] is not module for frame in thread.frames):
            return
        while thread.frames.pop()[3] is not module:
            pass
        _mark(output, inputs, (name, "", ""))
        if not thread.frames and thread.modes is not None:
            thread.modes.close()
            thread.modes = None

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a torch function, and note which one while it runs."""
        name = getattr(func, "__name__", "")
        if name in _GETTERS or self.closed:
            return func(*args, **kwargs)
        thread = self._thread
        found = thread.function, thread.cause
        asked = name in _CONVERSIONS or kwargs.get("dtype") is not None
        thread.function = name.strip("_")
        thread.cause = "autocast" if _any_autocast() and not asked else "explicit"
        try:
            out = func(*args, **kwargs)
            _mark(out, (args, kwargs), self._owner()[0])
            return out
        finally:
            thread.function, thread.cause = found

    def _owner(self) -> tuple[_Owner, str]:
        """Whose the kernel that runs is, and in which phase it does."""
        thread = self._thread
        if thread.frames:
            module, phase, autocast, _ = thread.frames[-1]
            cause = thread.cause or ("autocast" if autocast else "explicit")
            return (module, thread.function, cause), phase
        if _in_backward() == -1:
            return (OUTSIDE, thread.function, thread.cause or "explicit"), "forward"
        node: Any = torch._C._current_autograd_node()
        if hasattr(node, "variable"):
            module = self._parameters.get(id(node.variable), OUTSIDE)
            return (module, "accumulate_grad", "autograd"), "backward"
        module, function, cause = _NOBODY if node is None else node.metadata.get(_NODE_KEY, _NOBODY)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            cause = thread.cause or "autograd"
        elif type(node).__name__ != "ToCopyBackward0":
            # The gradient of a cast has its cause; what another's kernel casts is autograd's.
            cause = "autograd"
        return (module, function, cause), "backward"

    def record(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Count one kernel call."""
        name, view, runs = _kernel_of(func)
        if self.closed or not runs:
            return
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        casts = _casts_of(name, inputs, outputs)
        (module, function, cause), phase = self._owner()
        if not casts or name not in _CASTS:
            cause = "explicit" if casts else ""
        about = module, self._kinds.get(module, ""), phase, function, name
        key = (*about, _dtypes(inputs), _dtypes(outputs), cause, view)
        read = sum(source.numel() * source.element_size() for source, _ in casts)
        written = sum(result.numel() * result.element_size() for _, result in casts)
        length = _length(name, inputs, outputs)
        with self._lock:
            calls, *sums, longest = self._counts.get(key, (0, 0, 0, 0, 0))
            sums = [a + b for a, b in zip(sums, (len(casts), read, written), strict=True)]
            self._counts[key] = (calls + 1, *sums, max(length, longest))

    def rows(self) -> tuple[OpRow, ...]:
        """What was counted so far."""
        with self._lock:
            return tuple([OpRow(*key, *counts) for key, counts in self._counts.items()])


class _Kernels(TorchDispatchMode):
    """Shows a recorder every kernel call of this thread."""

    # flex_attention, cond and the like are one kernel; what they run inside is not seen.
    supports_higher_order_operators = True

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self.recorder.record(func, args, kwargs, out)
        return out


class _Functions(TorchFunctionMode):
    """Shows a recorder every torch function that Python calls in this thread."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.recorder.call(func, args, kwargs or {})


@functools.cache
def _kernel_of(func: Any) -> tuple[str, bool, bool]:
    """A kernel's name, whether it only gives a view, and whether it runs.

    One of ``prim::`` asks a tensor subclass about itself.
    """
    if isinstance(func, HigherOrderOperator):
        return func.name(), False, True
    name = schema_of(func).name
    view = bool(func.is_view) or name == "aten::_unsafe_view"
    return name.removeprefix("aten::"), view, func.namespace != "prim"


def _tensors(values: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts; torch's pytrees take five times as long."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for each in values for tensor in _tensors(each)]


def _dtypes(tensors: list[Tensor]) -> tuple[str, ...]:
    names = [str(dtype) for dtype in dict.fromkeys(each.dtype for each in tensors)]
    return tuple([name.removeprefix("torch.") for name in names])


def _casts_of(
    name: str, inputs: list[Tensor], outputs: list[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """The (source, result) pairs of a kernel call that differ in dtype."""
    half = len(inputs) // 2
    pairs: Iterable[tuple[Tensor, Tensor]] = ()
    if name in _CASTS:
        pairs = zip(inputs[:1], outputs[:1], strict=True)
    elif name in _COPIES:
        pairs = zip(inputs[half:], inputs[:half], strict=True)
    return [(source, result) for source, result in pairs if source.dtype != result.dtype]


def _length(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """How many numbers are added up for one number of the result."""
    if name in _SUMS and outputs:
        first = inputs[0]
        running = first.shape == outputs[0].shape and first.dim()
        return first.shape[-1] if running else first.numel() // max(outputs[0].numel(), 1)
    if name in _PRODUCTS and len(inputs) > 1:
        # Of addmm's three tensors the product's are the last two.
        return inputs[0 if name == "linear" else 1 if name.startswith("add") else 0].shape[-1]
    return 0


def _mark(outputs: Any, inputs: Any, owner: _Owner) -> None:
    """Write on the autograd nodes between inputs and outputs whose they are."""
    todo = [each.grad_fn for each in _tensors(outputs) if each.grad_fn is not None]
    if not todo:
        return
    stop = {each.grad_fn for each in _tensors(inputs)}
    while todo:
        node: Any = todo.pop()
        if node in stop or _NODE_KEY in node.metadata or hasattr(node, "variable"):
            continue
        node.metadata[_NODE_KEY] = owner
        todo.extend(each for each, _ in node.next_functions if each is not None)


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


@contextmanager
def precision_report(model: nn.Module | None = None) -> Iterator[PrecisionReport]:
    """Record which module ran which op in which dtype, and every cast, while the block runs.

    torch.autocast itself shows none of this; ``torch.utils.flop_counter`` is the nearest in form.
    Use it around any number of steps: forward, backward, optimizer. It works with
    ``torch.autocast`` and :class:`distamp.autocast`, with models wrapped for DDP, FSDP or
    DataParallel, with modules run from other threads, and with activation checkpointing. Hooks are
    set on the modules of ``model`` and are gone after the block, however it ends. While it
    records, compiled code runs eagerly. Gradients of gradients are nobody's.

    ::

        with precision_report(model) as report:
            with autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(inputs), targets)
            loss.backward()
        print(report)

    Args:
        model: The model whose module names the rows carry. None records without names.

    Yields:
        The report, a :class:`PrecisionReport`; inside the block, of what has run so far.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"precision_report takes the model, a torch.nn.Module, got {type(model).__name__}"
        )
    recorder = _Recorder(model, closed=False)
    inside = [type(module).__name__ for module, name in recorder.names.items() if not name]
    with ExitStack() as stack:
        stack.callback(recorder.close)
        for module, name in recorder.names.items():
            enter = functools.partial(recorder.enter, name)
            leave = functools.partial(recorder.leave, name)
            for handle in (
                module.register_forward_pre_hook(enter, prepend=True),
                module.register_forward_hook(leave, always_call=True),
            ):
                stack.callback(handle.remove)
        if "torch._dynamo" in sys.modules:
            # Under a dispatch mode torch.compile gives a function up, for good.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(recorder.modes())
        yield PrecisionReport(recorder.rows, "".join(inside[-1:]))
