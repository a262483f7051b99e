"""The dispatcher kernels that carry out a thread's op lists.

Torch registers its own lists at ``AutocastCPU``, ``AutocastCUDA`` and so on, for every thread at
once. To change an op for one region of one thread, its kernel stands here at a dispatch key that no
device uses, ``AutocastPrivateUse1``, which lies above every other autocast key; the key is part of
a thread's dispatch only while that thread is in a region with lists. So a listed op costs one call
into Python there, and nothing in any other thread or region; an op that is not listed falls
through the key in C++, as torch's own unlisted ops do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import get_autocast_dtype
from torch._C import DispatchKey
from torch._C._dynamo import eval_frame
from torch._ops import OpOverload

from distamp.autocast.op_lists.rules import (
    CASTABLE,
    TLS_KEY,
    Category,
    Rule,
    cast,
    cast_any,
    cast_list,
    stash,
    stashed,
    tensors_in,
    widest,
)

__all__ = ["CARRIER_DEVICE", "RuleTable", "enter", "is_registered"]

_CARRIER: DispatchKey = getattr(DispatchKey, "AutocastPrivateUse1")  # noqa: B009
_BELOW = torch._C._dispatch_keyset_full_after(_CARRIER)
CARRIER_DEVICE = "privateuseone"

_NEVER_COMPILED = eval_frame._FrameExecStrategy(
    eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP
)

_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
_set_included = torch._C._dispatch_tls_set_dispatch_key_included


# What a kernel needs of its rule; RuleTable says what each means.
_Entry = tuple[DispatchKey, bool, torch.dtype | None, str | None, Rule]


class RuleTable:
    """The rules of one region: what the kernels of its thread look up.

    Args:
        rules: For each op, one rule for each device type that lists it.
    """

    def __init__(self, rules: Mapping[OpOverload, Sequence[Rule]]) -> None:
        self.general = {_register(op): tuple(found) for op, found in rules.items()}
        # What a kernel needs for the usual case of one device type: the device's autocast key;
        # whether to exclude it, which pointwise ops that torch lists nowhere need not; and the
        # dtype to cast to, where None is the region's own for a device type, or, with no device
        # type either, depends on the inputs.
        self.fast: dict[int, _Entry] = {
            slot: (
                only.key,
                not (_ops[slot].pointwise and only.device_type not in _ops[slot].closed_devices),
                torch.float32 if only.category is Category.FP32 else None,
                None if only.category is Category.PROMOTE else only.device_type,
                only,
            )
            for slot, (only, *others) in self.general.items()
            if not others and only.category is not Category.UNLISTED
        }


class _Thread(threading.local):
    """The fast rules again, found faster; autograd's own threads have none and use the stash."""

    def __init__(self) -> None:
        self.fast: dict[int, _Entry] = {}


_thread = _Thread()


def enter(table: RuleTable | None) -> None:
    """Make ``table`` what this thread's kernels follow; None takes the kernels out of its way."""
    on = table is not None and bool(table.general)
    _thread.fast = table.fast if table is not None else {}
    # All rules, and the region's casts of weights, which are dropped with it.
    stash((table.general, {}) if table is not None else None)
    _set_included(_CARRIER, on)
    _set_excluded(_CARRIER, not on)


class _Op:
    """One op overload: called again below the carrier, with whatever rule its thread has for it.

    Args:
        overload: The op.
        slot: Its number in every rule table.
    """

    def __init__(self, overload: OpOverload, slot: int) -> None:
        self.overload = overload
        self.slot = slot
        self.call = _binding(overload)
        arguments = overload._schema.arguments
        names = [argument.name for argument in arguments if not argument.kwarg_only]
        self.dtype_position = names.index("dtype") if "dtype" in names else None
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        self.composite = has_kernel(overload.name(), "CompositeImplicitAutograd")
        self.pointwise = torch.Tag.pointwise in overload.tags and not self.composite
        self.closed_devices: set[str] = set()
        # The dispatcher skips keys at which an op has nothing to do; redispatch does not.
        table = torch._C._dispatch_dump_table(overload.name())
        self.below = _BELOW
        for name, _, what in (line.partition(": ") for line in table.splitlines()):
            if what.startswith("fallthrough") and name in DispatchKey.__members__:
                self.below = self.below.remove(getattr(DispatchKey, name))
            elif name.startswith("Autocast"):
                self.closed_devices.add(name.removeprefix("Autocast").lower())

    def aside(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Do what torch does, for an op that only other lists of this process name.

        Torch's own autocast kernels keep autocast out of what they call, and ops that are not
        composite call no others; for those, the carrier can be left out of the whole call.
        """
        if self.composite:
            tensors = tensors_in((*args, *kwargs.values()))
            if not tensors or tensors[0].device.type not in self.closed_devices:
                return self.redispatch(args, kwargs, None)
        _set_excluded(_CARRIER, True)
        try:
            return self.call(*args, **kwargs)
        finally:
            _set_excluded(_CARRIER, False)

    def redispatch(self, args: Sequence[Any], kwargs: dict[str, Any], rule: Rule | None) -> Any:
        """Go on below the carrier, and past torch's own list if a rule takes the op off it.

        Nothing is excluded, so ops inside a composite op follow the thread's lists.
        """
        keys = torch._C._dispatch_tls_local_include_set()
        for tensor in tensors_in((*args, *kwargs.values())):
            keys = keys | torch._C._dispatch_keys(tensor)
        keys = (keys - torch._C._dispatch_tls_local_exclude_set()) & self.below
        if rule is not None:
            keys = keys.remove(rule.key)
        return self.overload.redispatch(keys, *args, **kwargs)

    def explicit_dtype(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the caller gave the output's dtype, which takes a call off every list."""
        at = self.dtype_position
        positional = at is not None and at < len(args) and args[at] is not None
        return positional or kwargs.get("dtype") is not None

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Follow the thread's rules, whatever they are."""
        rules: Sequence[Rule] = stashed(TLS_KEY)[0].get(self.slot, ())
        if rules:
            devices = {tensor.device.type for tensor in tensors_in((*args, *kwargs.values()))}
            rules = [it for it in rules if it.device_type in devices and not _excluded(it.key)]
        if not rules:
            return self.aside(args, kwargs)
        rule = rules[-1]
        unlisted = rule.category is Category.UNLISTED
        if unlisted and self.composite:
            return self.redispatch(args, kwargs, rule)
        if not unlisted and not self.explicit_dtype(args, kwargs):
            to = torch.float32
            if rule.category is Category.LOWER_PRECISION:
                to = get_autocast_dtype(rule.device_type)
            elif rule.category is Category.PROMOTE:
                to = widest((*args, *kwargs.values()), rule)
            args = [cast_any(arg, to, rule) for arg in args]
            kwargs = {name: cast_any(arg, to, rule) for name, arg in kwargs.items()}
        _set_excluded(_CARRIER, True)
        _set_excluded(rule.key, True)
        try:
            return self.call(*args, **kwargs)
        finally:
            _set_excluded(_CARRIER, False)
            _set_excluded(rule.key, False)


# Overloaded ops whose C binding tells the overloads apart by the types of their arguments.
_TOLD_APART = set(
    "addmm baddbmm bmm conv1d conv2d conv3d cumprod cumsum log_softmax mean mm norm pow prod "  # noqa: SIM905
    "softmax sum".split()
)


def _binding(overload: OpOverload) -> Callable[..., Any]:
    """Torch's C binding of an op where it has one: half the price of going through torch.ops."""
    namespace, name = overload._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    schemas = [getattr(packet, it)._schema for it in packet.overloads()]
    of_tensors = [it for it in schemas if any("Tensor" in str(a.type) for a in it.arguments)]
    single = sum(not it.is_mutable for it in of_tensors) == 1
    if namespace == "aten" and not name.startswith("_") and (single or name in _TOLD_APART):
        for home in ("_VariableFunctions", "_nn", "_linalg", "_fft"):
            found: Callable[..., Any] | None = getattr(getattr(torch._C, home), name, None)
            if found is not None:
                return found
    call: Callable[..., Any] = overload._op
    return call


_KERNEL = """
def kernel({parameters}):
    entry = thread.fast.get({slot})
    if entry is None or excluded(entry[0]){explicit}:
        return run(({passed},), {keywords})
    key, shut, to, own, rule = entry
    if to is None:
        to = lower(own) if own else widest(({passed},), rule)
{casts}
    set_excluded(CARRIER, True)
    if shut:
        set_excluded(key, True)
    try:
{calls}
    finally:
        set_excluded(CARRIER, False)
        if shut:
            set_excluded(key, False)
"""
_CAST = {
    "Tensor": "if {0}.dtype is not to and {0}.dtype in castable: {0} = cast({0}, to, rule)",
    "Optional[Tensor]": "if {0} is not None and {0}.dtype is not to and {0}.dtype in castable: "
    "{0} = cast({0}, to, rule)",
    "List[Tensor]": "{0} = cast_list({0}, to, rule)",
}


def _kernel(op: _Op) -> Callable[..., Any]:
    """Write out the kernel of one op.

    Written out, and not a loop over arguments, because the loop alone costs more than all else
    that a listed op does here.
    """
    arguments = op.overload._schema.arguments
    if any("Tensor" in str(argument.type) for argument in arguments if argument.kwarg_only):
        run = op.run
        return lambda *args, **kwargs: run(args, kwargs)
    source, defaults = _source(op)
    scope: dict[str, Any] = {
        "CARRIER": _CARRIER,
        "thread": _thread,
        "excluded": _excluded,
        "set_excluded": _set_excluded,
        "castable": CASTABLE,
        "cast": cast,
        "cast_list": cast_list,
        "widest": widest,
        "lower": get_autocast_dtype,
        "run": op.run,
        "call": op.call,
        **defaults,
    }
    exec(compile(source, f"<op list kernel of {op.overload.name()}>", "exec"), scope)
    kernel: FunctionType = scope["kernel"]
    # Where a function being compiled breaks, ops run with its compiler on: in torch 2.11 it takes
    # the kernel for a function to compile and fails on what the kernel calls.
    eval_frame.set_code_exec_strategy(kernel.__code__, _NEVER_COMPILED)
    return kernel


def _source(op: _Op) -> tuple[str, dict[str, Any]]:
    """The text of one op's kernel, and the default values that it names."""
    arguments = op.overload._schema.arguments
    positional = [argument for argument in arguments if not argument.kwarg_only]
    keyword = [argument for argument in arguments if argument.kwarg_only]
    kinds = [str(argument.type) for argument in positional]
    last = max(i for i, kind in enumerate(kinds) if kind in _CAST or i == op.dtype_position)
    names = [f"a{i}" for i in range(last + 1)]
    defaults = {
        f"d{i}": positional[i].default_value
        for i in range(last + 1)
        if positional[i].has_default_value()
    }
    rest = ["*rest"] if last + 1 < len(positional) else []
    keywords = ["**kwargs"] if keyword else []
    explicit = ""
    if op.dtype_position is not None:
        explicit = f" or a{op.dtype_position} is not None"
    elif any(argument.name == "dtype" for argument in keyword):
        explicit = " or kwargs.get('dtype') is not None"
    source = _KERNEL.format(
        parameters=", ".join(
            [f"{name}=d{i}" if f"d{i}" in defaults else name for i, name in enumerate(names)]
            + rest
            + keywords
        ),
        slot=op.slot,
        explicit=explicit,
        passed=", ".join(names + rest),
        keywords="kwargs" if keyword else "{}",
        casts="\n".join(
            "    " + _CAST[kind].format(name)
            for name, kind in zip(names, kinds, strict=False)
            if kind in _CAST
        ),
        calls=_calls(names, rest, keywords),
    )
    return source, defaults


def _calls(names: list[str], rest: list[str], keywords: list[str]) -> str:
    """The call of the op itself; unpacking what is empty, as it mostly is, would cost a tenth."""
    more = [each.lstrip("*") for each in rest + keywords]
    plain = f"        return call({', '.join(names)})"
    if not more:
        return plain
    full = f"            return call({', '.join(names + rest + keywords)})"
    return f"        if {' or '.join(more)}:\n{full}\n{plain}"


_lock = threading.Lock()
_libraries: dict[str, torch.library.Library] = {}
_slots: dict[OpOverload, int] = {}
_ops: list[_Op] = []


def is_registered(overload: OpOverload) -> bool:
    """Whether an op has its kernel at the carrier key, for these lists or for others."""
    return overload in _slots


def _register(overload: OpOverload) -> int:
    """Put an op's kernel at the carrier key, once for the process; return its slot.

    Raises:
        RuntimeError: A custom backend of this process owns the carrier key.
    """
    with _lock:
        if overload in _slots:
            return _slots[overload]
        if not _libraries:
            _claim_carrier()
        op = _Op(overload, len(_slots))
        namespace, name = overload.name().split("::")
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "IMPL")
        _libraries[namespace].impl(name, _kernel(op), _CARRIER.name)
        _slots[overload] = op.slot
        _ops.append(op)
        return op.slot


def _claim_carrier() -> None:
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone" or torch._C._dispatch_has_backend_fallback(_CARRIER):
        raise RuntimeError(
            f"op lists need the dispatch key {_CARRIER.name}, which the backend {name!r} uses in "
            "this process; run without that backend, or without ops="
        )
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, _CARRIER.name)
    _libraries["_"] = fallback
