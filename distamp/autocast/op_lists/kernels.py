"""The dispatcher kernels that carry out a thread's op lists.

Torch registers its own lists at ``AutocastCPU``, ``AutocastCUDA`` and so on, for every thread at
once. To change an op for one region of one thread, its kernel stands at a dispatch key above all of
those; the key is part of a thread's dispatch only while that thread is in a region with lists. So a
listed op costs one call into Python there, and nothing in any other thread or region; an op that is
not listed falls through the key in C++, as torch's own unlisted ops do.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import get_autocast_dtype, is_grad_enabled
from torch._C import DispatchKey
from torch._ops import (
    _HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS,
    OpOverload,
    _higher_order_ops,
)

from distamp.autocast.compiler import never_compiled
from distamp.autocast.op_lists.refusal import refuse_torchs_checkpoint
from distamp.autocast.op_lists.rules import (
    CASTABLE,
    Category,
    Rule,
    cast,
    cast_any,
    cast_list,
    stashed,
    widest,
)
from distamp.autocast.tensors import tensors_in
from distamp.autocast.threads.thread_state import local

__all__ = ["Entry", "Key", "entries_of", "is_registered", "key_of_lists", "slots_of"]


class Key(NamedTuple):
    """The dispatch key that kernels of op lists stand at.

    Attributes:
        name: The key's name; Python's enum lacks that of the second one below.
        key: The key.
        is_guarded: Whether torch.compile guards on whether a thread has the key.
        unused_devices: Two device types that nothing computes on, and their autocast dtypes in a
            new thread. torch.compile guards on these, so they can show it which lists are in force.
    """

    name: str
    key: DispatchKey
    is_guarded: bool
    unused_devices: tuple[tuple[str, torch.dtype], ...]


# The uppermost autocast key, of the backend that torch leaves to others.
_PRIVATEUSE1 = Key(
    "AutocastPrivateUse1",
    torch._C._dispatch_key_parse("AutocastPrivateUse1"),
    True,
    (("privateuseone", torch.float16), ("ipu", torch.float16)),
)
# Where there is such a backend: a key above, which was reserved for deferred initialization and
# which torch has no kernels for. It lies above those of torch.func's transforms too, so that ops
# in a transform meet torch's own lists first.
_DEFERRED_INIT = Key(
    "DeferredInit",
    torch._C._dispatch_key_parse("DeferredInit"),
    False,
    (("ipu", torch.float16), ("maia", torch.bfloat16)),
)

_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded

# What a kernel needs of a rule in the usual case of one device type: the device's autocast key;
# whether to exclude it during the op, which pointwise ops that torch lists nowhere need not; and
# the dtype to cast to, where None is the region's own for a device type, or, with no device type
# either, depends on the inputs.
Entry = tuple[DispatchKey, bool, torch.dtype | None, str | None, Rule]


def slots_of(rules: Mapping[OpOverload, Sequence[Rule]]) -> dict[int, tuple[Rule, ...]]:
    """The rules by the numbers of their ops' kernels, which are registered if they are not yet."""
    return {_register(op): tuple(found) for op, found in rules.items()}


def entries_of(rules: Mapping[int, Sequence[Rule]]) -> dict[int, Entry]:
    """The usual cases among the rules, in the form that kernels read."""
    return {
        slot: (
            only.key,
            not (_ops[slot].pointwise and only.device_type not in _ops[slot].autocast_devices),
            torch.float32 if only.category is Category.FP32 else None,
            None if only.category is Category.PROMOTE else only.device_type,
            only,
        )
        for slot, (only, *others) in rules.items()
        if not others and only.category is not Category.UNLISTED
    }


class _Op:
    """One op overload: called again below the key, with whatever rule its thread has for it.

    Args:
        overload: The op.
        slot: Its number among the ops that have kernels.
        key: Where its kernel stands.
    """

    def __init__(self, overload: OpOverload, slot: int, key: DispatchKey) -> None:
        self.overload = overload
        self.key = key
        self.slot = slot
        self.call = _binding(overload)
        arguments = overload._schema.arguments
        names = [argument.name for argument in arguments if not argument.kwarg_only]
        self.dtype_position = names.index("dtype") if "dtype" in names else None
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        self.composite = has_kernel(overload.name(), "CompositeImplicitAutograd")
        self.pointwise = torch.Tag.pointwise in overload.tags and not self.composite
        # The device types for which torch lists the op, or a backend has.
        self.autocast_devices: set[str] = set()
        # The dispatcher skips keys at which an op has nothing to do; redispatch does not.
        table = torch._C._dispatch_dump_table(overload.name())
        self.below = torch._C._dispatch_keyset_full_after(key)
        for name, _, what in (line.partition(": ") for line in table.splitlines()):
            if what.startswith("fallthrough") and name in DispatchKey.__members__:
                self.below = self.below.remove(getattr(DispatchKey, name))
            elif name.startswith("Autocast"):
                self.autocast_devices.add(_device_type_of(name.removeprefix("Autocast")))

    def pass_through(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Do what torch does, for an op that only other lists of this process name.

        Torch's own autocast kernels keep autocast out of what they call, and ops that are not
        composite call no others; for those, the key can be excluded from the whole call.
        """
        if self.composite:
            tensors = tensors_in(args, kwargs)
            if not tensors or tensors[0].device.type not in self.autocast_devices:
                return self.redispatch(args, kwargs, None)
        _set_excluded(self.key, True)
        try:
            return self.call(*args, **kwargs)
        finally:
            _set_excluded(self.key, False)

    def redispatch(self, args: Sequence[Any], kwargs: dict[str, Any], rule: Rule | None) -> Any:
        """Go on below the key, and past torch's own list if a rule takes the op off it.

        Nothing is excluded, so ops inside a composite op follow the thread's lists.
        """
        keys = torch._C._dispatch_tls_local_include_set()
        for tensor in tensors_in(args, kwargs):
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
        state = local.state
        lists = stashed() if state.lists is None else state.lists[0]
        rules: Sequence[Rule] = lists.rules.get(self.slot, ())
        if rules:
            devices = {tensor.device.type for tensor in tensors_in(args, kwargs)}
            rules = [it for it in rules if it.device_type in devices and not _excluded(it.key)]
        if not rules:
            return self.pass_through(args, kwargs)
        refuse_torchs_checkpoint(state)
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
        _set_excluded(self.key, True)
        _set_excluded(rule.key, True)
        try:
            return self.call(*args, **kwargs)
        finally:
            _set_excluded(self.key, False)
            _set_excluded(rule.key, False)


def _device_type_of(name: str) -> str:
    if name == "PrivateUse1":
        return torch._C._get_privateuse1_backend_name()
    return name.lower()


# Overloaded ops whose C binding distinguishes the overloads by the types of their arguments.
_BOUND_BY_TYPE = set(
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
    # The dispatcher leaves out arguments that have their default, and these bindings take another
    # one for a reduction: none, where the op's is the mean.
    reduces = any(argument.name == "reduction" for argument in overload._schema.arguments)
    bound = namespace == "aten" and not name.startswith("_") and not reduces
    if bound and (single or name in _BOUND_BY_TYPE):
        for module in ("_VariableFunctions", "_nn", "_linalg", "_fft"):
            found: Callable[..., Any] | None = getattr(getattr(torch._C, module), name, None)
            if found is not None:
                return found
    call: Callable[..., Any] = overload._op
    return call


_KERNEL = """
def kernel({parameters}):
    state = local.state
    entry = state.entries.get({slot})
    if entry is None or excluded(entry[0]){explicit}:
        return run(({passed},), {keywords})
    if not grad_enabled() or top_hooks(True) is not None:
        refuse_torchs_checkpoint(state)
    key, exclude, to, own, rule = entry
    if to is None:
        to = lower(own) if own else widest(({passed},), rule)
    try:
{casts}
    except AttributeError:
        # A number stands where the op takes a tensor, as in x * 2.
{numbers}
    set_excluded(KEY, True)
    if exclude:
        set_excluded(key, True)
    try:
{calls}
    finally:
        set_excluded(KEY, False)
        if exclude:
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
        "KEY": op.key,
        "local": local,
        "excluded": _excluded,
        "set_excluded": _set_excluded,
        "grad_enabled": is_grad_enabled,
        "top_hooks": torch._C._autograd._top_saved_tensors_default_hooks,
        "refuse_torchs_checkpoint": refuse_torchs_checkpoint,
        "castable": CASTABLE,
        "cast": cast,
        "cast_any": cast_any,
        "cast_list": cast_list,
        "widest": widest,
        "lower": get_autocast_dtype,
        "run": op.run,
        "call": op.call,
        **defaults,
    }
    exec(compile(source, f"<op list kernel of {op.overload.name()}>", "exec"), scope)
    # torch 2.11's compiler fails on what the kernel calls.
    kernel: Callable[..., Any] = never_compiled(scope["kernel"])
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
    tensors = [each for each in zip(names, kinds, strict=False) if each[1] in _CAST]
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
        casts="\n".join(f"        {_CAST[kind].format(name)}" for name, kind in tensors),
        numbers="\n".join(f"        {name} = cast_any({name}, to, rule)" for name, _ in tensors),
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
    """Whether an op has its kernel, for these lists or for others."""
    return overload in _slots


def _register(overload: OpOverload) -> int:
    """Put an op's kernel at the key, once for the process; return its slot."""
    with _lock:
        if overload in _slots:
            return _slots[overload]
        key = key_of_lists()
        op = _Op(overload, len(_slots), key.key)
        namespace, name = overload.name().split("::")
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "IMPL")
        _libraries[namespace].impl(name, _kernel(op), key.name)
        _slots[overload] = op.slot
        _ops.append(op)
        return op.slot


def key_of_lists() -> Key:
    """The key of all lists of this process, chosen when it is first needed.

    Raises:
        RuntimeError: A backend has been registered since, which needs the key itself.
    """
    backend = torch._C._get_privateuse1_backend_name()
    key = _choose_key()
    if key is _PRIVATEUSE1 and backend != "privateuseone":
        raise RuntimeError(
            f"the backend {backend!r} was registered after op lists were first used, and needs the "
            f"dispatch key {key.name} that they took; import it before, at the start of the program"
        )
    return key


@functools.cache
def _choose_key() -> Key:
    """Choose a key, and have all ops pass it by that have no kernel there."""
    unnamed = torch._C._get_privateuse1_backend_name() == "privateuseone"
    free = unnamed and not torch._C._dispatch_has_backend_fallback(_PRIVATEUSE1.key)
    chosen = _PRIVATEUSE1 if free else _DEFERRED_INIT
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, chosen.name)
    _libraries["_"] = fallback
    # torch.cond, flex_attention and the like are dispatched in Python, with a list of such keys.
    _HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(chosen.key)
    for op in _higher_order_ops.values():
        op.fallthrough(chosen.key)
    return chosen
