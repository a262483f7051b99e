"""The one observer of a step: what runs, of which module, and in backward of which one it is.

Hooks follow modules in every thread, a TorchDispatchMode the kernels below autograd and autocast,
and a TorchFunctionMode the torch functions above them. On each autograd node is written which
function of which module made it, so that backward can be given to modules too. The report, the
contract and find_first_nonfinite are a `Follower` each, and differ in what they do with the events.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from distamp.autocast.op_kernels import schema_of
from distamp.errors import DistampError
from distamp.fsdp_params import sharded_params
from distamp.guard.rank_sync import RankSync
from distamp.module_names import module_names
from distamp.process_group import GroupLike, check_group
from distamp.report.rows import OUTSIDE

__all__ = [
    "Follower",
    "Frame",
    "Kernel",
    "Owner",
    "begin_call",
    "elements_of",
    "every_rank",
    "global_ranks",
    "group_of",
    "held_by",
    "inside_compiled_ones",
    "is_first_rank",
    "local_of",
    "raised_on_every_rank",
    "shape_of",
    "storage_of",
    "tensors_in",
]

_any_autocast = torch._C._is_any_autocast_enabled
_in_backward = torch._C._current_graph_task_id
_NODE_KEY = "distamp.owner"
# Python calls that ask for a dtype by name.
_CONVERSIONS = frozenset(
    ("to", "type", "type_as", "_to_copy", "asarray", "as_tensor", "tensor", "copy_")
    + ("float", "half", "bfloat16", "double", "int", "long", "short", "char", "byte", "bool")
    + ("chalf", "cfloat", "cdouble")
)
# What writes all of a tensor, whatever was in it.
_WRITES = frozenset(
    ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_")
    + ("random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_")
)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_GETTERS = frozenset({"__get__", "__set__", "size", "dim", "stride", "numel", "is_floating_point"})


class Owner(NamedTuple):
    """Whose a kernel or an autograd node is.

    Args:
        module: Its name, without those of wrappers.
        function: The torch function that was called.
        cause: Of casts in it; see `OpRow`.
        line: Of the user's code, where that is asked for.
        micro_batch: At which call of the model, where that is asked for.
    """

    module: str = OUTSIDE
    function: str = ""
    cause: str = ""
    line: str = ""
    micro_batch: int = -1


class Frame(NamedTuple):
    """A module that runs: its name, ``"forward"`` or ``"recompute"``, whether autocast was on."""

    name: str
    phase: str
    autocast: bool
    module: nn.Module


class Kernel(NamedTuple):
    """What its schema tells of a kernel.

    Args:
        name: Without namespace and overload, such as ``"addmm"``.
        namespace: Such as ``"aten"``; ``""`` of flex_attention, cond and the like.
        view: Whether it computes nothing.
        arguments: Their names.
        written: Names of those that it writes.
        overwrites: Whether what was in them does not count.
        meets: Whether ranks meet in it: ``""``, ``"collective"``, ``"send"`` or ``"recv"``.
    """

    name: str
    namespace: str = ""
    view: bool = False
    arguments: tuple[str, ...] = ("inputs",)
    written: frozenset[str] = frozenset()
    overwrites: bool = False
    meets: str = ""


@functools.cache
def _kernel_of(func: Any) -> Kernel:
    if isinstance(func, HigherOrderOperator):
        return Kernel(func.name())
    schema = schema_of(func)
    namespace, _, name = schema.name.partition("::")
    names = tuple(each.name for each in schema.arguments)
    writes = [each for each in schema.arguments if each.alias_info and each.alias_info.is_write]
    written = {each.name for each in writes}
    overwrites = name in _WRITES or any(each.kwarg_only for each in writes)
    meets = ""
    if "c10d" in namespace and {*names} & {"process_group", "group_name"}:
        verb = name.rstrip("_").partition("_")[0]
        meets = verb if verb in ("send", "recv") else "collective"
        # Their schemas do not tell.
        outs = ("out", "output", "output_tensor", "outputs", "output_tensors", "tensors")
        written |= set() if meets == "send" else {*names} & {*outs}
    # record_function, which optimizers and FSDP open around what they do, is the profiler's.
    view = bool(func.is_view) or name == "_unsafe_view" or namespace == "profiler"
    return Kernel(name, namespace, view, names, frozenset(written), overwrites, meets)


class _Thread(threading.local):
    """What one thread is doing."""

    # The torch function that runs, and the cause of casts in it.
    function = cause = ""

    def __init__(self) -> None:
        # The modules that run, innermost last.
        self.frames: list[Frame] = []
        self.modes = ExitStack()


class Follower:
    """Knows which module runs, in any thread that runs the models; subclasses take the events.

    Args:
        models: Whose modules are followed.
    """

    #: Whether compiled code runs eagerly meanwhile, so that its modules and functions are followed.
    #: If not, it stays compiled, what it runs is of the module as a whole, and no functions are.
    eager = True

    def __init__(self, *models: nn.Module) -> None:
        self.closed = True
        #: Whether code that torch.compile had compiled ran eagerly because of `eager`.
        self.ran_compiled = False
        self.names: dict[nn.Module, str] = {}
        #: What runs in compiled modules, and is not followed.
        self.compiled: set[nn.Module] = set()
        for model in models:
            self.names |= module_names(model)
            if not self.eager:
                self.compiled |= inside_compiled_ones(model)
        for module, name in self.names.items():
            if isinstance(module, torch.jit.ScriptModule):
                raise TypeError(
                    f"module {name!r} is scripted or traced by torch.jit, and cannot be followed: "
                    "report on the model as it is before that"
                )
        #: Of each parameter, by id, its name and its module's.
        self.parameters = {
            id(each): (name, self.names[module])
            for kind, name, module, each in held_by(self.names)
            if kind == "parameter"
        }
        self._thread = _Thread()

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave an empty, closed one in a copied or pickled module."""
        return Follower, ()

    # -- events --------------------------------------------------------------------------------

    def entered(self, module: nn.Module) -> None:
        """Note that a module's forward begins; it is the last of `frames`."""

    def opens(self, types: Iterable[type]) -> bool:
        """Return whether to see the kernels inside of these subclasses' instead of theirs."""
        return False

    def run(self, kernel: Kernel, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a kernel, and note what it did."""
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self.record(kernel, args, kwargs, out)
        return out

    def record(self, kernel: Kernel, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Note a kernel that ran."""

    def function(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a torch function, and write on the autograd nodes that it made whose they are."""
        name, thread = getattr(func, "__name__", ""), self._thread
        if name in _GETTERS or self.closed:
            return func(*args, **kwargs)
        if not thread.frames:
            self._note_compiled()
        before = thread.function, thread.cause
        asked = name in _CONVERSIONS or kwargs.get("dtype") is not None
        thread.function = name.strip("_").removesuffix("backward")
        thread.cause = "autocast" if _any_autocast() and not asked else "explicit"
        try:
            out = func(*args, **kwargs)
            # Without grad there is none, and an optimizer's complex views must not be asked.
            if torch.is_grad_enabled() and (nodes := _nodes_of(out)):
                _mark(nodes, (args, kwargs), self.maker(), through=False)
            return out
        finally:
            thread.function, thread.cause = before

    # -- what runs -----------------------------------------------------------------------------

    def frames(self) -> list[Frame]:
        """Return the modules that run in this thread, innermost last."""
        return self._thread.frames

    def running(self) -> tuple[Owner, str, Any]:
        """Return whose the kernel that runs is, its phase, and in backward the autograd node."""
        thread = self._thread
        frame = thread.frames[-1] if thread.frames else None
        if frame is None and _in_backward() != -1:
            node: Any = torch._C._current_autograd_node()
            if hasattr(node, "variable"):
                module = self.parameters.get(id(node.variable), ("", OUTSIDE))[1]
                return Owner(module, "accumulate_grad", "autograd"), "backward", node
            owner = _owner_of(node)
            # The gradient of a cast has its cause; what another's kernel casts is autograd's.
            if type(node).__name__ != "ToCopyBackward0":
                by_hand = isinstance(node, torch.autograd.function.BackwardCFunction)
                cause = (by_hand and thread.cause) or "autograd"
                owner = Owner(owner.module, owner.function, cause, owner.line, owner.micro_batch)
            return owner, "backward", node
        cause = thread.cause or ("autocast" if frame and frame.autocast else "explicit")
        name, phase = (frame.name, frame.phase) if frame else (OUTSIDE, "forward")
        return Owner(name, thread.function, cause), phase, None

    def maker(self) -> Owner:
        """Return what is written on autograd nodes that are made now."""
        return self.running()[0]

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the models in every thread, and watch this one, while the block runs."""
        with ExitStack() as stack:
            if self.eager and "torch._dynamo" in sys.modules:
                # Under a function mode torch.compile gives a function up, for good.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            self.closed = False
            stack.callback(setattr, self, "closed", True)
            for module, name in self.names.items():
                if module not in self.compiled:
                    enter = functools.partial(self._enter, name)
                    stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                    leave = module.register_forward_hook(self._leave, always_call=True)
                    stack.callback(leave.remove)
            self._watch_thread(stack)
            yield

    def _watch_thread(self, stack: ExitStack) -> None:
        """Enter the modes that do not watch this thread; autograd's own threads inherit them."""
        watching = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]
        for kind in (_Kernels, _Functions) if self.eager else (_Kernels,):
            if not any(type(mode) is kind and mode.follower is self for mode in watching):
                stack.enter_context(kind(self))

    def _note_compiled(self) -> None:
        """Note whether the code that runs was compiled, and runs eagerly now."""
        if self.eager and not self.ran_compiled:
            self.ran_compiled = _is_called_by_compile()

    def _enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        """A module's forward begins in this thread."""
        if torch.compiler.is_compiling() or self.closed:
            return
        thread = self._thread
        if not thread.frames:
            # A function mode is off while it is asked, so in what backward runs again too.
            self._watch_thread(thread.modes)
        self._note_compiled()
        phase = "forward" if _in_backward() == -1 else "recompute"
        thread.frames.append(Frame(name, phase, _any_autocast(), module))
        self.entered(module)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A module's forward has ended, by return or by an exception."""
        thread = self._thread
        inside = all(frame.module is not module for frame in thread.frames)
        if torch.compiler.is_compiling() or self.closed or inside:
            return
        while thread.frames[-1].module is not module:
            thread.frames.pop()
        # Nodes that no torch function made, such as those of autograd Functions.
        if nodes := _nodes_of(output):
            _mark(nodes, inputs, self.maker(), through=True)
        thread.frames.pop()
        if not thread.frames:
            thread.modes.close()


class _Kernels(TorchDispatchMode):
    """Shows a follower every kernel call of a thread."""

    # flex_attention, cond and the like are one kernel; what they run inside is not seen.
    supports_higher_order_operators = True

    def __init__(self, follower: Follower) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.follower = follower

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile do as without this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if types and self.follower.opens(types):
            # What it runs on what it holds comes here again.
            return NotImplemented
        return self.follower.run(_kernel_of(func), func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Shows a follower every torch function that Python calls in a thread."""

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self.follower = follower

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.follower.function(func, args, kwargs or {})


def _is_called_by_compile() -> bool:
    """Return whether a function that torch.compile returned is on the stack."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename == dynamo.__file__:
            return True
        frame = frame.f_back
    return False


def _owner_of(node: Any) -> Owner:
    """Return whose an autograd node is; nobody's if it was made before or outside."""
    owner: Owner = Owner() if node is None else node.metadata.get(_NODE_KEY, Owner())
    return owner


def _nodes_of(outputs: Any) -> list[Any]:
    return [each.grad_fn for each in tensors_in(outputs) if each.grad_fn is not None]


def _mark(nodes: list[Any], inputs: Any, owner: Owner, through: bool) -> None:
    """Write on autograd nodes, and on those from there to inputs, whose they are, if nobody's yet.

    Args:
        nodes: The last ones; emptied.
        inputs: Tensors, also nested, where to end.
        owner: Whose the nodes are.
        through: Whether to look behind nodes that have an owner, as those of inner modules have.
    """
    seen = {*_nodes_of(inputs)}
    while nodes:
        node = nodes.pop()
        if node in seen or hasattr(node, "variable"):
            continue
        seen.add(node)
        if _NODE_KEY not in node.metadata:
            node.metadata[_NODE_KEY] = owner
        elif not through:
            continue
        nodes.extend(each for each, _ in node.next_functions if each is not None)


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts; torch's pytrees take five times as long."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for each in values for tensor in tensors_in(each)]


def local_of(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    local = tensor.detach()
    for ask in ("to_local", "wait"):
        local = getattr(local, ask)() if hasattr(local, ask) else local
    return local


def storage_of(tensor: Tensor) -> object:
    """What tells storages apart, also after they are freed; of a subclass, that of its data."""
    while hasattr(tensor, "__tensor_flatten__"):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    tensor = elements_of(tensor)
    if tensor.layout is not torch.strided:
        return object()  # it has none, and is never found again
    return StorageWeakRef(tensor.untyped_storage())


def elements_of(tensor: Tensor) -> Tensor:
    """Return the stored elements of a tensor of any layout, sparse or nested, without copying."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return torch.ops.aten._values.default(tensor)  # type: ignore[no-any-return]
    if tensor.layout in _COMPRESSED or tensor.is_nested:
        return tensor.values()
    return tensor


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor, with -1 for a dimension whose size differs in a nested one."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    shape = []
    for dim in range(tensor.dim()):
        try:
            size = tensor.size(dim)
        except RuntimeError:
            size = -1
        shape.append(size if isinstance(size, int) else -1)
    return tuple(shape)


def held_by(names: dict[nn.Module, str]) -> list[tuple[str, str, nn.Module, Tensor]]:
    """Return the kind, name, module and tensor of each parameter and buffer of modules.

    A forward pass without a backward pass leaves parameters of FSDP2 gathered. Their shards, which
    have the gradients, are returned in their place.
    """
    kinds = (("parameter", nn.Module.named_parameters), ("buffer", nn.Module.named_buffers))
    held = [
        (kind, f"{name}.{leaf}".lstrip("."), module, tensor)
        for module, name in names.items()
        for kind, named in kinds
        for leaf, tensor in named(module, recurse=False)
    ]
    shards = sharded_params(tensor for _, _, _, tensor in held)
    return [
        (kind, name, module, shard)
        for (kind, name, module, _), shard in zip(held, shards, strict=True)
    ]


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


def every_rank(value: Any, process_group: dist.ProcessGroup | None) -> list[Any]:
    """Return the value of every rank, in order; that of a process alone where there is no group.

    Collective: every rank of `process_group` must call this.
    """
    if process_group is None:
        return [value]
    gathered: list[Any] = [None] * process_group.size()
    dist.all_gather_object(gathered, value, group=process_group)
    return gathered


def begin_call(name: str, process_group: GroupLike) -> dist.ProcessGroup | None:
    """Return the process group of a call that every rank makes; None for a process alone.

    Collective: every rank of `process_group` must call this. It begins with the message that all
    calls of a guard or scaler send, so that it raises beside another call too.

    Raises:
        RankMismatchError: RankSync make different calls.
    """
    check_group(process_group)
    group = RankSync(process_group).announce(name)
    return None if group is None else group.process_group


def global_ranks(process_group: dist.ProcessGroup | None) -> list[int]:
    """Return the numbers in the default group of the ranks of a group, in its order."""
    return [0] if process_group is None else dist.get_process_group_ranks(process_group)


def is_first_rank(process_group: dist.ProcessGroup | None) -> bool:
    """Return whether this rank logs for all ranks of a group."""
    return process_group is None or process_group.rank() == 0


@contextmanager
def raised_on_every_rank(what: str, process_group: dist.ProcessGroup | None) -> Iterator[None]:
    """Raise on every rank if the block raises on one rank.

    Collective: every rank of `process_group` must call this.

    Args:
        what: The block, in the message that the other ranks raise.
        process_group: The ranks.
    """
    try:
        yield
    except Exception as error:
        _exchange_errors(f"{type(error).__name__}: {error}", process_group)
        raise
    raised = _exchange_errors("", process_group)
    if raised:
        raise DistampError(f"{what} raised on {', '.join(raised)}")


def _exchange_errors(error: str, process_group: dist.ProcessGroup | None) -> list[str]:
    """Write to the store how a block ended here; return the errors of all ranks, unless it failed.

    A collective would hang: if a step fails on one rank, the others may wait in one of their own.
    """
    if process_group is None:
        return []
    store: Any = dist.distributed_c10d._get_default_store()
    prefix, rank = f"distamp.raised/{process_group.group_name}", dist.get_rank()
    call = store.add(f"{prefix}/{rank}", 1)
    store.set(f"{prefix}/{call}/{rank}", f"{error} ")
    raised = []
    if not error:
        for other in global_ranks(process_group):
            text = store.get(f"{prefix}/{call}/{other}").decode().strip()
            if text:
                raised.append(f"rank {other}: {text}")
    return raised


def group_of(arguments: Iterable[Any]) -> Any:
    """The process group that a collective's kernel was given, by name or boxed; None without."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    for each in arguments:
        if isinstance(each, dist.ProcessGroup):
            return each
        try:
            return resolve(each) if isinstance(each, str) else dist.ProcessGroup.unbox(each)
        except (LookupError, RuntimeError, TypeError, ValueError):
            continue
    return None
