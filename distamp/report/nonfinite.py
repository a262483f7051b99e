"""first_nonfinite: where the first NaN or inf of a training step was born, found by replaying it.

The step runs again under a dispatch mode that looks at what every kernel gives. A kernel that makes
a non-finite number of finite ones is an origin; one that is given one passes it on, by the storage
of its tensors. Only origins that reach the loss or a gradient count, and ranks put together what
they saw: a collective is an origin only where no rank fed it a non-finite number.
"""

from __future__ import annotations

import functools
import linecache
import logging
import math
import operator
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from distamp.autocast.op_names import schema_of
from distamp.report.following import (
    Follower,
    FollowingMode,
    inside_compiled_ones,
    module_names,
    tensors_in,
)
from distamp.report.rows import OUTSIDE

__all__ = ["NonFinite", "StepReplay", "TensorRange", "first_nonfinite"]

_in_backward = torch._C._current_graph_task_id
_version = operator.attrgetter("_version")
_sequence_number = operator.methodcaller("_sequence_nr")
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
# What gives memory as it is found.
_EMPTY = frozenset(
    ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
    + ("resize_", "resize_as_", "set_")
)
# What writes an infinity that it was given: masks do.
_FILLS = frozenset(
    ("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "where")
    + ("scalar_tensor", "constant_pad_nd", "index_fill", "index_fill_")
)
# What writes all of a tensor, whatever was in it.
_WRITES = frozenset(
    ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_")
    + ("random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_")
)
# What turns a -inf into a 0, which is what a mask is for.
_ABSORBS = ("softmax", "attention", "logsumexp", "exp")


@dataclass(frozen=True, slots=True)
class TensorRange:
    """What was in a tensor.

    Attributes:
        name: What the kernel calls it.
        shape: Its shape on this rank.
        dtype: Its dtype.
        low: The smallest element; NaN where any is.
        high: The largest.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    low: float
    high: float

    @property
    def finite(self) -> bool:
        """Whether all elements are."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def is_nan(self) -> bool:
        """Whether any element is NaN."""
        return math.isnan(self.low)

    def __str__(self) -> str:
        found = "NaN" if self.is_nan else f"{self.low:.4g} to {self.high:.4g}"
        return f"{self.name:16} {self.dtype} {list(self.shape)}: {found}"


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Where the first non-finite number of a step was born; ``print`` gives a sentence and a table.

    Attributes:
        kind: ``"op"``; ``"parameter"``, ``"buffer"`` or ``"input"``, which held it before the step;
            ``"collective"``, to which no rank gave one; ``"unseen"``: the step as it ran was not
            finite, and its replay is.
        op: The function that was called, such as ``"linear"``; in backward, the one whose backward
            this is.
        kernel: The kernel that ran in it, such as ``"addmm"``.
        module: The module's name; ``""`` is the model itself, ``"(outside)"`` what is not in it,
            such as the loss.
        parameter: The parameter or buffer that held it, or whose gradient it is first in.
        direction: ``"forward"`` or ``"backward"``.
        ranks: Where it was born.
        micro_batch: At which call of the model, from 0.
        line: ``file:line: code``, the innermost outside of torch; of the forward pass where a
            backward kernel is C++.
        inputs: What the kernel was given; for a collective, by rank.
        output: What it gave.
        reached: What it spoilt: ``"loss"``, and names of parameters whose gradients it is in.
        carried_by: The collectives by which it came to other ranks.
        notes: What the replay could not show, and whether a second one gave the same numbers.
    """

    kind: str
    op: str = ""
    kernel: str = ""
    module: str = OUTSIDE
    parameter: str = ""
    direction: str = "forward"
    ranks: tuple[int, ...] = ()
    micro_batch: int = 0
    line: str = ""
    inputs: tuple[TensorRange, ...] = ()
    output: TensorRange | None = None
    reached: tuple[str, ...] = ()
    carried_by: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def sentence(self) -> str:
        """What happened, in one sentence."""
        if self.kind == "unseen":
            return "The step gave numbers that are not finite, and its replay gave none."
        op = self.op if self.kernel in ("", self.op) else f"{self.op} ({self.kernel})"
        where = f"{op} in {self.module or 'the model'}"
        ranks = ("rank " if len(self.ranks) == 1 else "ranks ") + ", ".join(map(str, self.ranks))
        when = f"{ranks}, {self.direction} pass, micro-batch {self.micro_batch}"
        made = "NaN" if self.output and self.output.is_nan else "inf"
        if self.kind in ("parameter", "buffer", "input"):
            held = f"{self.kind} {self.parameter}".strip()
            return f"The {held} held {made} before the step, and {where} read it: {when}."
        largest = max((max(abs(it.low), abs(it.high)) for it in self.inputs), default=0.0)
        cause = f"of finite inputs up to {largest:.3g}"
        if self.kind == "collective":
            cause = f"though every rank fed it finite numbers, up to {largest:.3g}"
        elif not all(each.finite for each in self.inputs):
            cause = "of the infinities of a mask"
        return f"{where} made {made} {cause}: {when}."

    def __str__(self) -> str:
        rows = [("line", self.line), ("parameter", self.parameter)]
        rows += [("input", str(each)) for each in self.inputs]
        rows += [("output", str(self.output or "")), ("reached", _some(self.reached))]
        rows += [("carried by", each) for each in self.carried_by]
        rows += [("note", each) for each in self.notes]
        return "\n".join([self.sentence(), *(f"  {k:10} {v}" for k, v in rows if v)])

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types."""
        return {"sentence": self.sentence(), **asdict(self)}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


# -- one rank ---------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Origin:
    """Where a non-finite number was born, on one rank.

    Args:
        found: What is known of it.
        order: How many kernels ran before, on its rank.
        weak: A mask's infinity: named only if there is nothing else.
        key: Of a collective: its group, name and number, alike on all ranks.
    """

    found: NonFinite
    order: int
    weak: bool = False
    key: tuple[Any, ...] = ()


_Origins = frozenset[_Origin]


class _Kernel(NamedTuple):
    """What its schema tells of a kernel.

    Args:
        name: Without its namespace.
        view: Whether it computes nothing.
        arguments: Their names.
        written: Names of those that it writes.
        overwrites: Whether what was in them does not count.
        meets: Whether ranks meet in it: ``""``, ``"collective"``, ``"send"`` or ``"recv"``.
    """

    name: str
    view: bool = False
    arguments: tuple[str, ...] = ("inputs",)
    written: frozenset[str] = frozenset()
    overwrites: bool = False
    meets: str = ""


@functools.cache
def _kernel_of(func: Any) -> _Kernel:
    if isinstance(func, HigherOrderOperator):
        return _Kernel(func.name())
    schema = schema_of(func)
    name = schema.name.partition("::")[2]
    names = tuple(each.name for each in schema.arguments)
    infos = [(each.name, each.alias_info, each.kwarg_only) for each in schema.arguments]
    written = {name for name, info, _ in infos if info is not None and info.is_write}
    overwrites = name in _WRITES or any(out for arg, _, out in infos if arg in written)
    meets = ""
    if "c10d" in func.namespace and {*names} & {"process_group", "group_name"}:
        meets = name.rstrip("_").partition("_")[0]
        meets = meets if meets in ("send", "recv") else "collective"
        # Their schemas do not tell.
        outs = ("out", "output", "output_tensor", "outputs", "output_tensors", "tensors")
        written |= set() if meets == "send" else {*names} & {*outs}
    return _Kernel(name, bool(func.is_view), names, frozenset(written), overwrites, meets)


class _Watch(Follower):
    """Sees one step of one rank.

    Args:
        model: Whose names count.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        # By storage, what the model holds.
        self._held: dict[StorageWeakRef, list[tuple[str, str, Tensor]]] = {}
        for kind, name, tensor in _held_by(self.names):
            local = _local(tensor)
            self._held.setdefault(_storage(local), []).append((kind, name, local))
        # By storage, the origins of what is not finite in it. While it is a key, no other has its
        # number.
        self._origins: dict[StorageWeakRef, _Origins] = {}
        # By autograd's sequence number, where a node was made; and functions by line and kernel.
        self._nodes: dict[int, NonFinite] = {}
        self._ops: dict[tuple[str, str], str] = {}
        self._function = ""
        self._first = torch._C._autograd._get_sequence_nr()
        self._order = self._calls = self._backwards = 0
        self._meetings: Counter[tuple[Any, ...]] = Counter()
        #: The sum of the largest numbers that forward made: whether two replays are the same.
        self.total = 0.0
        #: What this rank fed to collectives, and what its losses and gradients are spoilt by.
        self.fed: dict[tuple[Any, ...], _Origins] = {}
        self.reached: dict[_Origin, list[str]] = {}

    # -- where ---------------------------------------------------------------------------------

    def modes(self) -> tuple[Any, ...]:
        """Return the modes that watch a thread."""
        return _Kernels(self), _Functions(self)

    def entered(self, module: nn.Module) -> None:
        """Count the calls of the model."""
        whole = self.names[module] == "" and len(self.frames()) == 1
        self._calls += whole and self.frames()[0].phase == "forward"

    def call(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a torch function, and note which one while it runs."""
        before, name = self._function, getattr(function, "__name__", "").strip("_")
        if name == "backward":
            self.reach(args[0], "loss")
        self._function = name.removesuffix("backward")
        try:
            return function(*args, **kwargs)
        finally:
            self._function = before
            self._backwards += name == "backward"

    def _place(self, kernel: str) -> NonFinite:
        """Where the kernel runs that runs."""
        line, again = _user_line()
        owner, phase, node = self.running()
        here = NonFinite(
            kind="op",
            op=kernel.strip("_"),
            kernel=kernel,
            module=owner.module,
            ranks=(self._rank,),
            micro_batch=self._calls - 1 if self._calls else self._backwards,
            line=line,
        )
        if phase != "backward" or again:
            # Where checkpointing runs a line again, only the first time tells the function.
            op = self._ops.setdefault((line, kernel), self._function or here.op)
            return replace(here, op=self._function or op)
        here = replace(here, direction=phase)
        if hasattr(node, "variable"):
            name = self.parameters.get(id(node.variable), ("", ""))[0]
            return replace(here, op=owner.function, parameter=name)
        # A function that runs no kernel in its forward has the number after that of the one before.
        last = self._first if node is None else _sequence_number(node)
        noted = (self._nodes[i] for i in range(last, self._first - 1, -1) if i in self._nodes)
        made = next(noted, here)
        own = isinstance(node, torch.autograd.function.BackwardCFunction)
        op = type(node).__name__.removesuffix("Backward") if own else made.op
        line = line or made.line
        return replace(made, op=op, kernel=kernel, line=line, direction=phase)

    # -- what ----------------------------------------------------------------------------------

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one kernel, and look at what it gives."""
        kernel = _kernel_of(func)
        self._order += 1
        named = [*zip(kernel.arguments, args, strict=False), *kwargs.items()]
        given = [(name, each) for name, value in named for each in _floats(value)]
        written = [each for name, each in given if name in kernel.written]
        if kernel.meets:
            origin = self._feed(kernel, dict(named), given)
            out = func(*args, **kwargs)
            # It is looked at where it is used: it may come later.
            self._note([*written, *_floats(out)], frozenset({origin}))
            return out
        before = {} if kernel.overwrites else {id(each): _range("", each) for each in written}
        out = func(*args, **kwargs)
        place = self._place(kernel.name)
        if place.direction == "forward":
            # A function of the user's own has its number before its kernels run.
            self._nodes.setdefault(torch._C._autograd._get_sequence_nr() - 1, place)
        if kernel.view:
            return out
        # The other is the whole buffer, of which this rank has filled its part.
        outputs = _floats(out[:1] if kernel.name == "all_gather_copy_in" else out)
        made = [*{id(each): each for each in (*outputs, *written)}.values()]
        if kernel.name in _EMPTY:
            self._note(made, frozenset())
            return out
        ranges = [_range("", each) for each in made]
        if place.direction == "forward":
            self.total += sum(found.high for found in ranges if found.finite)
        bad = [each for each, found in zip(made, ranges, strict=True) if not found.finite]
        if bad:
            place = replace(place, output=next(found for found in ranges if not found.finite))
            scalars = [each for _, each in named if isinstance(each, float)]
            fills = kernel.name in _FILLS and any(map(math.isinf, scalars))
            self._note(bad, self._made_by(kernel, place, given, before, bad, fills))
        elif any(word in kernel.name for word in _ABSORBS):
            self._absorb(given)
        return out

    def _made_by(
        self,
        kernel: _Kernel,
        place: NonFinite,
        given: Iterable[tuple[str, Tensor]],
        before: dict[int, TensorRange],
        bad: Iterable[Tensor],
        fills: bool,
    ) -> _Origins:
        """The origins of what a kernel made that is not finite: of its inputs, or the kernel."""
        inputs, origins, partly = [], frozenset[_Origin](), False
        storages = {*map(_storage, bad)}
        for name, each in given:
            if name in kernel.written and kernel.overwrites:
                continue
            found = replace(before.get(id(each)) or _range("", each), name=name)
            inputs.append(found)
            known = self._known(each)
            # Where a kernel returns what it was given without a word, its input shows what it made.
            own = name in kernel.written or known is not None or _storage(each) not in storages
            if own and not found.finite:
                origins |= self._of(each, found, place)
                # It wrote into a part of what nobody had filled.
                partly |= name in kernel.written and known == frozenset()
        nan = place.output is not None and place.output.is_nan
        new = nan and not any(each.is_nan for each in inputs)
        if (not origins and not partly) or (new and all(each.weak for each in origins)):
            place = replace(place, inputs=tuple(inputs))
            origins |= {_Origin(place, self._order, weak=fills and not nan)}
        return origins

    def _feed(
        self, kernel: _Kernel, named: dict[str, Any], given: Iterable[tuple[str, Tensor]]
    ) -> _Origin:
        """Note what this rank feeds to a collective; return what comes out of it, for all ranks."""
        place = self._place(kernel.name)
        name, me = _group_of(named.get("process_group", named.get("group_name")))
        pair = {"send": (me, named.get("dst")), "recv": (named.get("src"), me)}.get(kernel.meets)
        key = (name, *pair, named.get("tag")) if pair else (name, kernel.name)
        self._meetings[key] += 1
        key = (*key, self._meetings[key])
        source = named.get("root_rank", named.get("src", me)) if "broadcast" in kernel.name else me
        feeds = kernel.meets != "recv" and source == me
        fed = [each for at, each in given if feeds and (at.startswith("input") or at == "tensors")]
        inputs = [_range(f"rank {self._rank}", each) for each in fed]
        for each, found in zip(fed, inputs, strict=True):
            if not found.finite:
                self.fed[key] = self.fed.get(key, frozenset()) | self._of(each, found, place)
        place = replace(place, kind="collective", inputs=tuple(inputs))
        return _Origin(place, self._order, key=key)

    def _known(self, tensor: Tensor) -> _Origins | None:
        """The origins of what is not finite in a tensor's storage, if it was seen."""
        return self._origins.get(_storage(tensor))

    def _note(self, tensors: Iterable[Tensor], origins: _Origins) -> None:
        self._origins |= dict.fromkeys(map(_storage, tensors), origins)

    def _of(self, tensor: Tensor, found: TensorRange, place: NonFinite) -> _Origins:
        """The origins of a tensor that is not finite; what nobody made was there before."""
        known = self._known(tensor)
        if known is not None:
            return known
        held = self._held.get(_storage(tensor), ())
        bad = [(kind, name) for kind, name, each in held if not _range("", each).finite]
        if not bad and self.fed:
            # Threads that are not seen, such as a hook's, pass on what came by a collective.
            return frozenset().union(*self.fed.values())
        kind, name = bad[0] if bad else ("input", "")
        module = name.rpartition(".")[0] if bad else place.module
        mask = found.low == -math.inf and math.isfinite(found.high)
        weak = kind != "parameter" and (mask or (not tensor.dim() and math.isinf(found.low)))
        place = replace(place, kind=kind, parameter=name, module=module)
        origin = _Origin(replace(place, inputs=(found,), output=found), self._order, weak)
        self._note([tensor], frozenset({origin}))
        return frozenset({origin})

    def _absorb(self, given: Iterable[tuple[str, Tensor]]) -> None:
        """A -inf that a softmax turned to 0 did what a mask does."""
        for origin in frozenset().union(*(self._known(each) or () for _, each in given)):
            made = origin.found.output
            origin.weak |= made is not None and made.low == -math.inf < made.high < math.inf

    def reach(self, values: Any, what: str) -> None:
        """Note by what losses or gradients are spoilt, if they are."""
        for each in _floats([_local(it) for it in tensors_in(values)]):
            found = _range(what, each)
            if not found.finite:
                for origin in self._of(each, found, self._place(what)):
                    self.reached.setdefault(origin, []).append(what)


class _Kernels(FollowingMode):
    """Shows every kernel of this thread."""

    follower: _Watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            # A DTensor runs its kernels on what it holds, which come here again.
            return NotImplemented
        with torch._C.DisableTorchFunction():
            return self.follower.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Shows every torch function that Python calls in this thread."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._watch.call(func, args, kwargs or {})


def _held_by(names: dict[nn.Module, str]) -> list[tuple[str, str, Tensor]]:
    """Parameters and buffers of modules: which of the two, name, tensor."""
    kinds = (("parameter", nn.Module.named_parameters), ("buffer", nn.Module.named_buffers))
    return [
        (kind, f"{name}.{leaf}".lstrip("."), tensor)
        for module, name in names.items()
        for kind, named in kinds
        for leaf, tensor in named(module, recurse=False)
    ]


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    local = tensor.detach()
    for ask in ("to_local", "wait"):
        local = getattr(local, ask)() if hasattr(local, ask) else local
    return local


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(
        (torch.ops.aten._values(tensor) if tensor.is_sparse else tensor).untyped_storage()
    )


def _floats(value: Any) -> list[Tensor]:
    """The tensors in nested values that can be other than finite."""
    return [
        each
        for each in tensors_in(value)
        if (each.is_floating_point() or each.is_complex())
        and each.device.type != "meta"
        and not isinstance(each, FakeTensor)
        and not is_traceable_wrapper_subclass_type(type(each))
    ]


def _range(name: str, tensor: Tensor) -> TensorRange:
    about = name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    values = tensor.detach()
    values = values.coalesce().values() if values.is_sparse else values
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values.float() if values.dtype.itemsize == 1 else values
    low, high = torch.stack(torch.aminmax(values)).tolist() if values.numel() else (0.0, 0.0)
    return TensorRange(*about, low, high)


def _group_of(group: Any) -> tuple[tuple[str, str], int]:
    """A group's name and description, the same on all ranks, and this rank in it."""
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(group))
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    return (group.group_name, group.group_desc), group.rank()


def _user_line() -> tuple[str, bool]:
    """The innermost line outside of torch, and whether checkpointing runs it again.

    In a backward pass a line of Python that runs in it, if there is one.
    """
    frame: FrameType | None = sys._getframe(2)
    line = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_TORCH):
            if frame.f_code.co_name == "_engine_run_backward":
                break
            if line and path.endswith("checkpoint.py"):
                return line, True
        elif not line and not path.startswith((_OURS, "<")):
            line = f"{path}:{frame.f_lineno}"
            if _in_backward() == -1:
                break
        frame = frame.f_back
    return line, False


# -- all ranks --------------------------------------------------------------------------------


class _Kept:
    """What a step moves besides gradients: states of random numbers, and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._random = _random_states()
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._syncs = [(each, each.require_forward_param_sync) for each in _ddp_in(model)]

    def put_back(self) -> None:
        """Put all of it back as it was."""
        for put, state in self._random:
            put(state)
        with torch.no_grad():
            for module, name, buffer, copy in self._buffers:
                buffer.copy_(copy)
                setattr(module, name, buffer)
        for each, sync in self._syncs:
            each.require_forward_param_sync = sync


def _random_states() -> list[tuple[Callable[[Any], Any], Any]]:
    """The states of torch's, python's and numpy's random numbers, and what puts each back."""
    states: list[tuple[Callable[[Any], Any], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
    ]
    if torch.accelerator.is_available():
        device = torch.get_device_module(torch.accelerator.current_accelerator())
        states.append((device.set_rng_state, device.get_rng_state()))
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        states.append((numpy.set_state, numpy.get_state()))
    return states


def _run(step: Callable[[], Any], model: nn.Module, watch: _Watch | None) -> bool:
    """Run forward and backward; return whether all losses and gradients are finite."""
    _drop_gradients(model)
    with ExitStack() as stack:
        for ddp in _ddp_in(model):
            # What such a hook keeps between steps would move. A mean of finite gradients is finite.
            if _hooks_with_a_state(ddp):
                stack.enter_context(ddp.no_sync())
        if watch is not None:
            stack.enter_context(watch.following())
            # Backward passes of every device in this thread, whose modes see them.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
        losses = tensors_in(step())
    named = [("loss", each) for each in losses] + _gradients(model)
    if watch is not None:
        for name, each in named:
            watch.reach(each, name)
    return all(_range(name, it).finite for name, each in named for it in _floats(_local(each)))


def _gradients(model: nn.Module) -> list[tuple[str, Tensor]]:
    held = _held_by(module_names(model))
    return [(name, tensor.grad) for _, name, tensor in held if tensor.grad is not None]


def _ddp_in(model: nn.Module) -> list[DistributedDataParallel]:
    return [each for each in model.modules() if isinstance(each, DistributedDataParallel)]


def _drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _hooks_with_a_state(model: DistributedDataParallel) -> list[str]:
    """Names of the communication hooks that keep something between steps."""
    hooks = getattr(model, "_comm_hooks", ())
    stateless = dist.ProcessGroup | None
    return [getattr(hook, "__name__", "?") for hook, own in hooks if not isinstance(own, stateless)]


def _everyone(value: Any) -> list[Any]:
    """The values of all ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _resolve(seen: Sequence[tuple[dict[Any, _Origins], dict[_Origin, list[str]]]]) -> list[_Origin]:
    """The origins on all ranks of what reached something: a collective only if nobody fed it."""
    todo: list[tuple[_Origin, tuple[str, ...], tuple[str, ...]]]
    todo = [(origin, (), tuple(names)) for _, each in seen for origin, names in each.items()]
    found: dict[_Origin, tuple[dict[str, None], dict[str, None]]] = {}
    visited = set()
    for origin, path, names in todo:
        if (origin, names) in visited:
            continue
        visited.add((origin, names))
        fed = {each for by_key, _ in seen for each in by_key.get(origin.key, ())}
        step = f"{origin.found.kernel} over {origin.key[0][1]}" if origin.key else ""
        todo += [(each, (*path, step), names) for each in fed]
        if not fed:
            paths, reached = found.setdefault(origin, ({}, {}))
            paths.update(dict.fromkeys(path))
            reached.update(dict.fromkeys(names))
    for origin, (paths, reached) in found.items():
        origin.found = replace(origin.found, carried_by=tuple(paths), reached=tuple(reached))
    return sorted(found, key=lambda it: (it.weak, it.order, it.found.ranks))


def _first(origins: list[_Origin]) -> NonFinite | None:
    """The first of all origins, with every rank where it was born."""
    if not origins:
        return None
    first = origins[0].found

    def place(it: NonFinite) -> tuple[Any, ...]:
        return it.kind, it.kernel, it.module, it.parameter, it.direction, it.micro_batch, it.line

    same = [each.found for each in origins if place(each.found) == place(first)]
    path, _, number = first.line.rpartition(":")
    if code := linecache.getline(path, int(number or 0)).strip():
        first = replace(first, line=f"{first.line}: {code}")
    if first.kind == "collective":
        first = replace(first, inputs=tuple([it for each in same for it in each.inputs]))
    return replace(
        first,
        ranks=tuple(sorted({rank for each in same for rank in each.ranks})),
        reached=tuple(dict.fromkeys([it for each in same for it in each.reached])),
        carried_by=tuple(dict.fromkeys([it for each in same for it in each.carried_by])),
    )


def first_nonfinite(step: Callable[[], Any], model: nn.Module) -> NonFinite | None:
    """Find where the first NaN or inf of a step is born, by running the step again.

    ``torch.autograd.set_detect_anomaly`` raises in the first backward function that returns a NaN;
    this names the operation that made the first one, in forward or backward, on which rank.
    Every rank calls it with the same step. It runs the step twice, and leaves every gradient None.
    States of random numbers and buffers are put back. Compiled code runs eagerly under watch. DDP's
    communication hooks that have a state are left out, as it would move.

    ::

        def step():
            for batch in batches:
                scaler.scale(loss_fn(model(batch))).backward()

        print(distamp.first_nonfinite(step, model))

    Args:
        step: Runs forward and backward passes and nothing else, with the same batches each time.
            What it returns counts as losses.
        model: Whose modules it runs, as it is wrapped.

    Returns:
        Where it was born, the same on every rank; None if all losses and gradients are finite.
        ``kind="unseen"`` if the replay shows nothing, and gradients were not finite before, or are
        not when nobody watches, as of compiled code.

    Raises:
        TypeError: ``model`` is not a module, or ``step`` cannot be called.
    """
    if not isinstance(model, nn.Module) or not callable(step):
        raise TypeError(
            "first_nonfinite takes a function that runs forward and backward, and the model, a "
            f"torch.nn.Module: got {type(step).__name__} and {type(model).__name__}"
        )
    return _search(step, model, _Kept(model), (), False)


class StepReplay:
    """Keeps what the replay of a step needs, and replays it when the step was skipped.

    For the ``replay`` of a guard or a scaler::

        guard.replay = distamp.StepReplay(model)
        for batches in loader:
            def step():
                for batch in batches:
                    loss_fn(model(batch)).backward()

            guard.keep(step, *batches)     # before the step: random states, and a copy of buffers
            step()
            guard.step(optimizer)
            guard.update()                 # replays a step that was skipped, and logs why

    It is replayed where it was skipped and nothing scales the loss, or a gradient has a NaN, or
    three steps in a row were skipped; once in a row of skipped steps. The answer is logged as
    ``distamp.report`` at WARNING. While a step is kept, ``update`` reads the flag on the host,
    which waits for a device. Every rank keeps its step.

    Args:
        model: As it is wrapped.

    Attributes:
        found: The last answer; None if there was none yet, or all was finite.
    """

    def __init__(self, model: nn.Module) -> None:
        self.found: NonFinite | None = None
        self._model = model
        self._kept: tuple[Callable[[], Any], _Kept, list[tuple[Tensor, int]]] | None = None
        # How many steps were skipped in a row; -1 once they were replayed.
        self._skips = 0

    def keep(self, step: Callable[[], Any], *batches: Any) -> None:
        """Keep a step before it runs; the last one counts.

        Args:
            step: As of `first_nonfinite`; with the loss scaled where there is a scale.
            batches: Its batches, in any nesting: it is said if they change before the replay.
        """
        versions = [(each, _version(each)) for each in tensors_in(batches)]
        self._kept = step, _Kept(self._model), versions

    def step_ended(self, skipped: Callable[[], bool], scaled: bool) -> None:
        """Replay what was kept, if it was skipped as it should not be.

        Args:
            skipped: Reads whether any optimizer skipped its step, the same on every rank.
            scaled: Whether a loss is scaled: then some steps are skipped for its overflow.
        """
        if self._kept is None:
            return
        (step, kept, versions), self._kept = self._kept, None
        if not skipped():
            self._skips = 0
        elif self._skips >= 0:
            self._skips += 1
            nan = any(_range("", _local(it)).is_nan for _, it in _gradients(self._model))
            if any(_everyone(nan or not scaled or self._skips >= 3)):
                mine = any(_version(each) != version for each, version in versions)
                changed = any(_everyone(mine))
                notes = ["a batch was changed in place since the step was kept"] * changed
                self._skips = -1
                self.found = _search(step, self._model, kept, notes, True)
                if not dist.is_initialized() or dist.get_rank() == 0:
                    logging.getLogger("distamp.report").warning(
                        "a step was skipped: %s", self.found
                    )


def _search(
    step: Callable[[], Any],
    model: nn.Module,
    kept: _Kept,
    notes: Sequence[str],
    was_skipped: bool,
) -> NonFinite | None:
    """Replay a step from what was kept; say ``notes`` in the answer."""
    now = _Kept(model)
    finite = not was_skipped and all(_range("", _local(it)).finite for _, it in _gradients(model))
    found: list[NonFinite | None] = []
    totals = []
    try:
        while len(found) < 2 and None not in found:
            kept.put_back()
            watch = _Watch(model)
            _run(step, model, watch)
            everyone = _everyone((watch.fed, watch.reached, watch.total))
            found.append(_first(_resolve([each[:2] for each in everyone])))
            totals.append([each[2] for each in everyone])
        kept.put_back()
        if found[0] is None:
            finite = all(_everyone(_run(step, model, None) and finite))
    finally:
        now.put_back()
        _drop_gradients(model)
    hooks = [name for each in _ddp_in(model) for name in _hooks_with_a_state(each)]
    notes = [*notes, *(f"the communication hook {name} was left out" for name in hooks)]
    if inside_compiled_ones(model):
        notes.append("compiled modules ran eagerly")
    if found[0] is None:
        return None if finite else NonFinite("unseen", notes=tuple(notes))
    if totals[0] != totals[1]:
        notes.append("the step is not deterministic: a second replay computed other numbers")
    return replace(found[0], notes=tuple(notes))
