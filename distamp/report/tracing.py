"""StepTracer: the ops and modules of a step, for several listeners in one run.

Module hooks follow the modules in every thread. A TorchFunctionMode sees the torch functions above
autograd and autocast, and a TorchDispatchMode the ops below them. Each autograd node is tagged with
the module and function that created it, so that an op of the backward pass has a module too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from distamp.autocast.op_kernels import schema_of
from distamp.module_names import module_names
from distamp.report.collectives import COLLECTIVES, Collective, CollectiveCall, collective_calls
from distamp.report.formatting import NO_MODULE
from distamp.report.tensors import flatten_tensors, model_tensors

__all__ = [
    "ModuleFrame",
    "OpCall",
    "OpContext",
    "OpInfo",
    "StepTracer",
    "TraceListener",
    "in_backward",
    "is_called_by_compile",
]

_NODE_KEY = "distamp.context"
# Python calls that name the dtype of their result.
_CONVERSIONS = frozenset(
    """
    to type type_as _to_copy asarray as_tensor tensor copy_ float half bfloat16 double int long
    short char byte bool chalf cfloat cdouble
    """.split()  # noqa: SIM905
)
# Ops that write a whole tensor and do not read its former contents.
_OVERWRITING = frozenset(
    """
    copy_ fill_ zero_ _foreach_copy_ _foreach_zero_ normal_ uniform_ random_ bernoulli_
    exponential_ log_normal_ cauchy_ geometric_
    """.split()  # noqa: SIM905
)
_GETTERS = frozenset({"__get__", "__set__", "size", "dim", "stride", "numel", "is_floating_point"})
_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTAMP = os.path.dirname(os.path.dirname(__file__)) + os.sep
_NOT_USER_CODE = (_TORCH, _DISTAMP, contextlib.__file__, functools.__file__, "<")


class ModuleFrame(NamedTuple):
    """A module that runs.

    Attributes:
        name: Its name, without the names of wrappers.
        phase: ``"forward"``, or ``"recompute"`` inside a backward pass.
        autocast_enabled: Whether autocast was on when it began.
        module: The module.
    """

    name: str
    phase: str
    autocast_enabled: bool
    module: nn.Module


class OpContext(NamedTuple):
    """The place in the step at which an op runs or an autograd node was created.

    Attributes:
        module: The module's name.
        function: The torch function that was called. In backward, the function of the forward
            pass.
        cast_origin: The cause of a cast at this place; see `OpRow.cause`.
        line: ``file:line`` of the user's code, if a listener needs it.
        micro_batch: The number of the model's call, from 0.
        phase: ``"forward"``, ``"recompute"`` or ``"backward"``.
        node: The autograd node that runs in backward.
    """

    module: str = NO_MODULE
    function: str = ""
    cast_origin: str = ""
    line: str = ""
    micro_batch: int = -1
    phase: str = "forward"
    node: Any = None

    def moved_to(self, module: str, function: str) -> OpContext:
        """Return this context with another module and function."""
        return self._replace(module=module, function=function)

    def as_tag(self) -> OpContext:
        """Return this context without its autograd node, for a tag on other nodes."""
        return self._replace(phase="forward", node=None)


class OpInfo(NamedTuple):
    """Properties of an op that follow from its schema.

    Attributes:
        name: Its name without namespace and overload, such as ``"addmm"``.
        namespace: Its namespace, such as ``"aten"``; ``""`` for flex_attention, cond and the like.
        is_view: Whether it computes nothing.
        argument_names: The names of its arguments.
        mutated: The names of the arguments that it writes.
        overwrites: Whether it ignores the former contents of these arguments.
        collective: Its row of the table of collectives.
    """

    name: str
    namespace: str = ""
    is_view: bool = False
    argument_names: tuple[str, ...] = ("inputs",)
    mutated: frozenset[str] = frozenset()
    overwrites: bool = False
    collective: Collective | None = None

    @classmethod
    @functools.cache
    def of(cls, func: Any) -> OpInfo:
        """Return the properties of an op overload."""
        if isinstance(func, HigherOrderOperator):
            return cls(func.name())
        schema = schema_of(func)
        namespace, _, name = schema.name.partition("::")
        collective = COLLECTIVES.get(schema.name)
        mutated = set()
        overwrites = name in _OVERWRITING
        for argument in schema.arguments:
            if argument.alias_info and argument.alias_info.is_write:
                mutated.add(argument.name)
                overwrites = overwrites or argument.kwarg_only
        if collective is not None and collective.output:
            mutated.add(collective.output)
        # Optimizers and FSDP open blocks of record_function, which compute nothing.
        is_view = bool(func.is_view) or name == "_unsafe_view" or namespace == "profiler"
        names = tuple(argument.name for argument in schema.arguments)
        return cls(name, namespace, is_view, names, frozenset(mutated), overwrites, collective)


@dataclass(slots=True)
class OpCall:
    """One call of an op.

    Attributes:
        op: The op.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        tracer: The tracer that saw it.
        output: Its result, once it has run.
        collectives: The transfers between ranks that the call makes.
    """

    op: OpInfo
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tracer: StepTracer
    output: Any = None
    collectives: Sequence[CollectiveCall] = ()
    # A cached_property takes a lock for each call.
    _context: OpContext | None = None
    _arguments: dict[str, Any] | None = None

    @property
    def context(self) -> OpContext:
        """The place at which it runs."""
        if self._context is None:
            self._context = self.tracer.current_context()
        return self._context

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by their names in the schema."""
        if self._arguments is None:
            self._arguments = dict(zip(self.op.argument_names, self.args, strict=False))
            self._arguments.update(self.kwargs)
        return self._arguments


class TraceListener:
    """Base class of objects that receive the events of a `StepTracer`.

    Attributes:
        needs_lines: Whether `OpContext.line` is filled, which costs a walk of the stack for each
            torch function.
        needs_inputs: Whether `before_op` is called.
        tracer: The tracer, from its construction on.
    """

    needs_lines = False
    needs_inputs = False
    tracer: StepTracer

    def on_start(self) -> None:
        """Handle the begin of the trace, before the step."""

    def unwraps(self, types: Iterable[type]) -> bool:
        """Return whether to see the ops inside tensor subclasses instead of ops on subclasses."""
        return False

    def on_module(self, frame: ModuleFrame) -> None:
        """Handle the begin of a module's forward."""

    def before_backward(self, loss: Tensor) -> None:
        """Handle a loss before its ``backward()``."""

    def before_op(self, call: OpCall) -> None:
        """Handle an op before it runs, if `needs_inputs`."""

    def after_op(self, call: OpCall) -> None:
        """Handle an op that has run."""

    def on_collective(self, call: OpCall, collective: CollectiveCall) -> None:
        """Handle a transfer between ranks that an op has started, after `after_op`."""


class _ThreadState(threading.local):
    """The state of one thread.

    Attributes:
        function: The name of the torch function that runs.
        cast_origin: The cause of casts in that function.
        is_paused: Whether a listener runs, whose ops are not ops of the step.
        frames: The modules that run, innermost last.
        modes: The modes that were entered for the outermost module.
    """

    function = ""
    cast_origin = ""
    is_paused = False

    def __init__(self) -> None:
        self.frames: list[ModuleFrame] = []
        self.modes = ExitStack()


class StepTracer(AbstractContextManager["StepTracer"]):
    """Follows the modules and ops of a step in every thread, and calls listeners.

    Args:
        models: The models.
        listeners: The listeners, which are called in this order.
        eager: Whether compiled code runs eagerly meanwhile, so that its modules and functions are
            followed. If not, it stays compiled, its ops belong to the compiled module, and no torch
            functions are followed.

    Attributes:
        names: The followed modules with their names.
        params: Name and module name of each parameter, by the parameter's id.
        compiled_modules: Modules inside compiled ones, which are not followed.
        ran_compiled: Whether compiled code ran eagerly because of `eager`.
        is_active: Whether a step is traced now.

    Raises:
        TypeError: A module is a ScriptModule.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        listeners: Sequence[TraceListener] = (),
        *,
        eager: bool = True,
    ) -> None:
        self.listeners = tuple(listeners)
        self.eager = eager
        self.is_active = False
        self.ran_compiled = False
        self.names: dict[nn.Module, str] = {}
        self.compiled_modules: set[nn.Module] = set()
        for model in models:
            self.names |= module_names(model)
            if not eager:
                self.compiled_modules |= _compiled_submodules(model)
        for module, name in self.names.items():
            if isinstance(module, torch.jit.ScriptModule):
                raise TypeError(
                    f"Module {name!r} is scripted or traced by torch.jit and cannot be followed. "
                    "Report on the model before torch.jit."
                )
        self.params = {
            id(row.tensor): (row.name, row.module)
            for row in model_tensors(self.names)
            if row.kind == "parameter"
        }
        self._needs_lines = any(listener.needs_lines for listener in listeners)
        self._model_calls = 0
        self._backward_calls = 0
        self._thread = _ThreadState()
        self._stack = ExitStack()
        for listener in listeners:
            listener.tracer = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave an inactive tracer in the hooks of a model that is copied or pickled."""
        return StepTracer, ((),)

    def __enter__(self) -> StepTracer:
        with ExitStack() as stack:
            if self.eager and "torch._dynamo" in sys.modules:
                # Under a function mode, torch.compile would never compile a function again.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            self.is_active = True
            stack.callback(setattr, self, "is_active", False)
            for module, name in self.names.items():
                if module not in self.compiled_modules:
                    enter = functools.partial(self._enter_module, name)
                    handle = module.register_forward_pre_hook(enter, prepend=True)
                    stack.callback(handle.remove)
                    handle = module.register_forward_hook(self._leave_module, always_call=True)
                    stack.callback(handle.remove)
            for listener in self.listeners:
                listener.on_start()
            self._enter_modes(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @property
    def frames(self) -> list[ModuleFrame]:
        """The modules that run in this thread, innermost last."""
        return self._thread.frames

    @property
    def micro_batch(self) -> int:
        """The number of the model's call that runs or ran last, or of the backward pass."""
        if self._model_calls:
            return self._model_calls - 1
        return self._backward_calls

    def current_context(self) -> OpContext:
        """Return the place in the step at which this thread is."""
        thread = self._thread
        if not thread.frames and in_backward():
            return self._backward_context(torch._C._current_autograd_node())
        line = _user_line() if self._needs_lines else ""
        if not thread.frames:
            origin = thread.cast_origin or "explicit"
            return OpContext(NO_MODULE, thread.function, origin, line, self.micro_batch)
        frame = thread.frames[-1]
        origin = "autocast" if frame.autocast_enabled else "explicit"
        origin = thread.cast_origin or origin
        return OpContext(frame.name, thread.function, origin, line, self.micro_batch, frame.phase)

    def _backward_context(self, node: Any) -> OpContext:
        """Return the context of an autograd node that runs."""
        line = _user_line() if self._needs_lines else ""
        if hasattr(node, "variable"):
            _, module = self.params.get(id(node.variable), ("", NO_MODULE))
            return OpContext(
                module, "accumulate_grad", "autograd", line, self.micro_batch, "backward", node
            )
        context = OpContext()
        if node is not None:
            context = node.metadata.get(_NODE_KEY, context)
        origin = context.cast_origin
        # The gradient of a cast has the cast's cause. Any other cast in backward is autograd's,
        # except in a backward that is written in Python.
        if type(node).__name__ != "ToCopyBackward0":
            origin = "autograd"
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                origin = self._thread.cast_origin or origin
        micro_batch = context.micro_batch
        if micro_batch < 0:
            micro_batch = self.micro_batch
        line = line or context.line
        return OpContext(
            context.module, context.function, origin, line, micro_batch, "backward", node
        )

    def run_function(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a torch function, and tag the autograd nodes that it creates."""
        name = getattr(func, "__name__", "")
        thread = self._thread
        if name in _GETTERS or not self.is_active or thread.is_paused:
            return func(*args, **kwargs)
        if not thread.frames:
            self._note_compiled()
        is_backward = func is Tensor.backward
        if is_backward:
            with self._pause():
                for listener in self.listeners:
                    listener.before_backward(args[0])
        outer_function, outer_origin = thread.function, thread.cast_origin
        names_dtype = name in _CONVERSIONS or kwargs.get("dtype") is not None
        by_autocast = torch._C._is_any_autocast_enabled() and not names_dtype
        thread.function = name.strip("_").removesuffix("backward")
        thread.cast_origin = "autocast" if by_autocast else "explicit"
        try:
            output = func(*args, **kwargs)
            # Without grad there is no node, and complex views of an optimizer raise if read.
            if torch.is_grad_enabled():
                self._tag_nodes(output, (args, kwargs), passes_tagged=False)
            return output
        finally:
            thread.function, thread.cast_origin = outer_function, outer_origin
            self._backward_calls += is_backward

    def run_op(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        listeners: Sequence[TraceListener],
    ) -> Any:
        """Run an op, and call listeners before and after it."""
        if not self.is_active or self._thread.is_paused:
            return func(*args, **kwargs)
        call = OpCall(OpInfo.of(func), args, kwargs, self)
        returns_received = False
        if call.op.collective is not None:
            # A send returns its input, and a batch has its outputs among its arguments.
            returns_received = call.op.collective.kind not in ("send", "batch")
            call.collectives = collective_calls(call.op.name, call.op.collective, call.arguments)
        # Functions that listeners and ops call are not functions of the step.
        with torch._C.DisableTorchFunction():
            for listener in listeners:
                if listener.needs_inputs:
                    listener.before_op(call)
            call.output = func(*args, **kwargs)
            for listener in listeners:
                listener.after_op(call)
            for collective in call.collectives:
                if returns_received:
                    collective.outputs.extend(flatten_tensors(call.output))
                for listener in listeners:
                    listener.on_collective(call, collective)
        return call.output

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        """Ignore the ops that listeners run outside of the handlers of modes."""
        self._thread.is_paused = True
        try:
            yield
        finally:
            self._thread.is_paused = False

    def _enter_modes(self, stack: ExitStack) -> None:
        """Enter the modes that this thread lacks; threads of autograd inherit modes."""
        modes = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]
        active = {type(mode) for mode in modes if getattr(mode, "tracer", None) is self}
        if _OpMode not in active:
            stack.enter_context(_OpMode(self, self.listeners))
        if self.eager and _FunctionMode not in active:
            stack.enter_context(_FunctionMode(self))

    def _note_compiled(self) -> None:
        """Note whether compiled code runs, and so runs eagerly."""
        if self.eager and not self.ran_compiled:
            self.ran_compiled = is_called_by_compile()

    def _enter_module(self, name: str, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or not self.is_active:
            return
        thread = self._thread
        if not thread.frames:
            # A function mode is off while it handles a function, so also in a recomputed forward.
            self._enter_modes(thread.modes)
        self._note_compiled()
        phase = "recompute" if in_backward() else "forward"
        frame = ModuleFrame(name, phase, torch._C._is_any_autocast_enabled(), module)
        thread.frames.append(frame)
        if name == "" and phase == "forward" and len(thread.frames) == 1:
            self._model_calls += 1
        with self._pause():
            for listener in self.listeners:
                listener.on_module(frame)

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """End a module's forward, which returned or raised."""
        if torch.compiler.is_compiling() or not self.is_active:
            return
        frames = self._thread.frames
        if all(frame.module is not module for frame in frames):
            return
        while frames[-1].module is not module:
            frames.pop()
        # Nodes of autograd Functions are not created by a torch function.
        self._tag_nodes(output, inputs, passes_tagged=True)
        frames.pop()
        if not frames:
            self._thread.modes.close()

    def _tag_nodes(self, outputs: Any, inputs: Any, passes_tagged: bool) -> None:
        """Tag untagged autograd nodes between outputs and inputs with the current context.

        Args:
            outputs: Tensors in any nesting.
            inputs: Tensors in any nesting, at which the walk ends.
            passes_tagged: Whether the walk goes on behind tagged nodes, such as the nodes of inner
                modules.
        """
        nodes = _grad_fns(outputs)
        if not nodes:
            return
        context = self.current_context().as_tag()
        visited = set(_grad_fns(inputs))
        while nodes:
            node = nodes.pop()
            if node in visited or hasattr(node, "variable"):
                continue
            visited.add(node)
            if _NODE_KEY not in node.metadata:
                node.metadata[_NODE_KEY] = context
            elif not passes_tagged:
                continue
            nodes.extend(next_node for next_node, _ in node.next_functions if next_node is not None)


class _OpMode(TorchDispatchMode):
    """Dispatch mode that passes the ops of a thread to a tracer.

    Args:
        tracer: The tracer.
        listeners: The listeners that see the ops.
    """

    # flex_attention, cond and the like are one op, and the ops inside are not seen.
    supports_higher_order_operators = True

    def __init__(self, tracer: StepTracer, listeners: Sequence[TraceListener]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer
        self.listeners = listeners

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile ignore this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inner: list[TraceListener] = []
        if types:
            inner = [listener for listener in self.listeners if listener.unwraps(types)]
        if not inner:
            return self.tracer.run_op(func, args, kwargs, self.listeners)
        outer = [listener for listener in self.listeners if listener not in inner]
        if not outer:
            # The subclass then runs its ops, which come here again.
            return NotImplemented
        with _OpMode(self.tracer, inner):
            return self.tracer.run_op(func, args, kwargs, outer)


class _FunctionMode(TorchFunctionMode):
    """Function mode that passes the torch functions of a thread to a tracer.

    Args:
        tracer: The tracer.
    """

    def __init__(self, tracer: StepTracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.tracer.run_function(func, args, kwargs or {})


def in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def is_called_by_compile() -> bool:
    """Return whether a function that torch.compile returned is on the stack."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    # This runs for every product, so it walks the stack without a generator.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename == dynamo.__file__:
            return True
        frame = frame.f_back
    return False


def _stack() -> Iterator[FrameType]:
    """Yield the Python frames of this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _user_line() -> str:
    """Return the innermost line outside torch; in backward, only a line that autograd calls."""
    for frame in _stack():
        if frame.f_code.co_name == "_engine_run_backward":
            break
        if not frame.f_code.co_filename.startswith(_NOT_USER_CODE):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return ""


def _grad_fns(tensors: Any) -> list[Any]:
    return [tensor.grad_fn for tensor in flatten_tensors(tensors) if tensor.grad_fn is not None]


def _compiled_submodules(model: nn.Module) -> set[nn.Module]:
    """Return the modules inside ``torch.compile(module)`` and ``module.compile()``."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        if getattr(module, "_compiled_call_impl", None) is not None:
            inside.update(module.modules())
        elif type(module).__name__ == "OptimizedModule":
            # The hooks of the wrapper itself run outside of the compiled code.
            inside.update(module.modules())
            inside.discard(module)
    return inside
