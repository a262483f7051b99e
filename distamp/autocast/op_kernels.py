"""Kernels at torch's autocast keys that follow op lists, and the private names of torch for them.

The first part wraps every private name of torch that op lists need. Torch 2.11 to 2.15 have all of
them. The comment at each name says how things are without it.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._C._dynamo import eval_frame
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from distamp.autocast.thread_state import local
from distamp.error_text import similar_names
from distamp.errors import ConfigError

__all__ = [
    "DISABLED_TORCH_FUNCTION",
    "FUNCTION_NAMESPACES",
    "PYTHON_BINDINGS",
    "BelowAutograd",
    "CastPolicy",
    "KernelRegistration",
    "Mark",
    "Rules",
    "all_op_names",
    "allocate_mark",
    "autocast_key",
    "current_mark",
    "find_packet",
    "has_autocast_kernel",
    "has_kernel",
    "is_exporting",
    "make_subclass",
    "packet_overloads",
    "reentrant_checkpoint_id",
    "register_kernel",
    "registered_op_names",
    "schema_of",
    "set_mark",
    "skip_dynamo",
    "supported_device_types",
]

_F = TypeVar("_F", bound=Callable[..., Any])


class CastPolicy(Enum):
    """Casts that autocast makes before an op runs; the name is that of torch's C++ enumeration."""

    LOWER_PRECISION = "lower_precision"
    FP32 = "fp32"
    PROMOTE = "promote"
    UNLISTED = "unlisted"


# -- private names of torch ----------------------------------------------------------------------

#: The namespaces in which torch keeps its functions, each under the name of the function.
# Without one of the private namespaces, functions that only it holds are refused as if they were a
# user's, and the names of these functions still work as strings.
FUNCTION_NAMESPACES: tuple[Any, ...] = (
    torch,
    torch.Tensor,
    torch.nn,
    torch.nn.functional,
    torch.linalg,
    torch._C._nn,
    torch._C._linalg,  # type: ignore[attr-defined]
    torch._C._fft,  # type: ignore[attr-defined]
    torch._C._special,  # type: ignore[attr-defined]
)


def supported_device_types() -> list[str]:
    """Return the device types that this torch has autocast for."""
    # Without it, `torch.amp.is_autocast_available` answers for a list of names.
    device_types: list[str] = torch._C._autocast_supported_devices()
    return device_types


def autocast_key(device_type: str) -> str:
    """Return the name of the dispatch key at which torch registers its lists for a device type.

    Raises:
        ValueError: This torch has no autocast for the device type.
    """
    supported = supported_device_types()
    if device_type not in supported:
        raise ValueError(
            f"This torch has no autocast for {device_type!r}. "
            f"{similar_names(device_type, supported)}"
        )
    # Without it, a table of ten device types does the same.
    return f"Autocast{torch._C._dispatch_key_for_device(device_type)}"


def schema_of(overload: OpOverload) -> torch._C.FunctionSchema:
    """Return the schema of an op overload: its name, arguments and results."""
    name, _, overload_name = overload.name().partition(".")
    # Without it, the overload's private attribute `_schema` is the same object.
    return torch._C._get_schema(name, overload_name)


def all_op_names() -> list[str]:
    """Return the full names of all ops in the dispatcher."""
    # Without it, an error about an unknown op name lists no similar names.
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return names


def has_kernel(overload: OpOverload) -> bool:
    """Return whether the dispatcher has any kernel for an overload; TorchScript's ops have none."""
    # Without it, ops of TorchScript alone could be listed, with no effect.
    return torch._C._dispatch_has_kernel(overload.name())


def has_autocast_kernel(overload: OpOverload, device_type: str) -> bool:
    """Return whether an overload has a kernel at the autocast key of a device type."""
    # Without it, op lists cannot tell which ops torch lists, and must go.
    key = autocast_key(device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key)


def registered_op_names(device_type: str) -> set[str]:
    """Return the full names of all ops that have a kernel at the autocast key of a device type."""
    # Without it, `OpLists.of_torch` must try every op of the dispatcher.
    key = autocast_key(device_type)
    return set(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def find_packet(namespace: str, name: str) -> OpOverloadPacket | None:
    """Return an op of the dispatcher with all its overloads; None if no library defines the op."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return packet if isinstance(packet, OpOverloadPacket) else None


def packet_overloads(packet: OpOverloadPacket) -> list[OpOverload]:
    """Return the overloads of an op."""
    return [getattr(packet, name) for name in packet.overloads()]


def skip_dynamo(function: _F) -> _F:
    """Keep torch.compile from compiling a function by itself, after a graph break around it.

    `torch.compiler.disable` has the same effect. It imports the compiler, and costs more in each
    call.
    """
    # Without these names, `torch.compiler.disable` takes their place.
    skip = eval_frame._FrameAction.SKIP
    code: Any = function
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(code.__code__, strategy)
    return function


def _is_in_force(overload: OpOverload, device_type: str) -> bool:
    """Return whether the newest kernel at an op's autocast key is one of this file."""
    # Without it, a kernel that a library registers later hides the op's lists.
    dump: str = torch._C._dispatch_dump(overload.name())
    return f"{autocast_key(device_type)}: registered at {__file__}" in dump


# Without these three, a kernel cannot call the op below autocast, and op lists must go.
_parse_key: Callable[[str], DispatchKey] = torch._C._dispatch_key_parse
_keys_below: Callable[[DispatchKey], DispatchKeySet] = torch._C._dispatch_keyset_full_after
_set_key_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded


# Without these four, `torch_lists.py` cannot read torch's lists, and a table of them must be
# written for each version of torch.
DISABLED_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
make_subclass = torch.Tensor._make_subclass
BelowAutograd = torch._C._AutoDispatchBelowAutograd
PYTHON_BINDINGS = torch._C._VariableFunctions


def is_exporting() -> bool:
    """Return whether this thread is in a non-strict `torch.export`, which records regions."""
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    # Without it, a region with lists is exported without its lists, and no error is raised.
    modes = torch.overrides._get_current_function_mode_stack()
    return any(isinstance(mode, PreDispatchTorchFunctionMode) for mode in modes)


# -- the mark of a thread ------------------------------------------------------------------------

Rules = Mapping[tuple[str, str], CastPolicy]
Mark = tuple[torch.dtype, ...]

# The op lists that a thread follows show in torch's own autocast state as a mark: the dtypes of two
# device types that nothing computes on. autograd copies this state to the thread in which it runs a
# backward pass, so kernels there find the lists of the thread that called ``backward()``. A module
# of one of these device types would read the dtypes as settings, so torch knows both by name only.
_MARK_DEVICES = (("ipu", torch.float16), ("maia", torch.bfloat16))
_FIRST, _SECOND = (device_type for device_type, _ in _MARK_DEVICES)

# The guard of compiled code is the same mark. torch.compile guards on the autocast state of every
# device type, so a graph that was traced under one mark never runs under another one. For this a
# mark stands for the same lists as long as the process lives, also when the lists are gone.
_rules_by_mark: dict[Mark | None, Rules] = {None: {}}
_mark_descriptions: list[str] = []
_mark_lock = threading.Lock()
# The names torch.float and torch.float32 are one dtype, which counts once.
_DTYPES = tuple(dict.fromkeys(v for v in vars(torch).values() if isinstance(v, torch.dtype)))


def current_mark() -> Mark | None:
    """Return the mark of the op lists that this thread follows; None without op lists."""
    if not torch.is_autocast_enabled(_FIRST):
        return None
    return torch.get_autocast_dtype(_FIRST), torch.get_autocast_dtype(_SECOND)


def set_mark(mark: Mark | None) -> None:
    """Make this thread follow the op lists of a mark; None means torch's lists."""
    for index, (device_type, default) in enumerate(_MARK_DEVICES):
        torch.set_autocast_enabled(device_type, mark is not None)
        torch.set_autocast_dtype(device_type, default if mark is None else mark[index])


def allocate_mark(rules: Rules, description: str) -> Mark:
    """Return a new mark for rules, which differs from all marks of this process.

    Args:
        rules: The policy of each op that is listed unlike torch lists it.
        description: The lists in words, for the key of the caches of compiled code on disk.
    """
    with _mark_lock:
        first, second = divmod(len(_mark_descriptions), len(_DTYPES))
        if first >= len(_DTYPES):
            raise RuntimeError(
                f"This process has used {len(_DTYPES) ** 2} different op lists, and there is no "
                "room for another one. Make the lists once and use them again."
            )
        mark = _DTYPES[first], _DTYPES[second]
        _rules_by_mark[mark] = rules
        _mark_descriptions.append(description)
        _update_cache_key()
    return mark


def _update_cache_key() -> None:
    """Write the meaning of all marks into the key of torch.compile's caches on disk.

    A graph in these caches was traced under a mark, which means other lists in another process.
    """
    digest = hashlib.sha256(repr(_mark_descriptions).encode()).hexdigest()[:16]
    config = torch.compiler.config
    tags = [tag for tag in config.cache_key_tag.split(",") if tag]
    tags = [tag for tag in tags if "distamp-op-lists" not in tag]
    config.cache_key_tag = ",".join([*tags, f"distamp-op-lists-{digest}"])


# -- torch's reentrant checkpoint ----------------------------------------------------------------


def reentrant_checkpoint_id() -> int | None:
    """Return the call of torch's reentrant checkpoint that this thread runs in; None outside.

    `CheckpointFunction` runs its function without gradients, and later recomputes it under the
    settings of two device types alone. Op lists that were entered outside are missing then, so the
    gradients would be wrong and no error would be raised. So a kernel compares the checkpoint in
    which its lists were entered with the checkpoint in which it runs, by a walk up the stack that
    happens only while gradients are off.
    """
    if torch.is_grad_enabled():
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return None if frame is None else id(frame)


# -- kernels -------------------------------------------------------------------------------------

Slot = tuple[str, str]

# All floating-point dtypes except float64, which autocast does not cast.
_CASTABLE = frozenset(
    dtype for dtype in _DTYPES if dtype.is_floating_point and dtype != torch.float64
)

# A garbage collection inside the lock may run code of a user that enters a region.
_lock = threading.RLock()
_registrations: WeakValueDictionary[Slot, KernelRegistration] = WeakValueDictionary()
_torch_kernels: dict[Slot, Callable[..., Any] | None] = {}
# torch frees a kernel with its registration, also while another thread, which has read the address
# of the kernel, waits for the GIL to enter it. So the last kernels outlive their registrations.
# The wait ends after a few switches of threads, in which fewer kernels are registered.
_recent_kernels: deque[Any] = deque(maxlen=4096)


class KernelRegistration:
    """The registration of one kernel, which is in force as long as this object lives.

    A library of torch removes its kernels when it is collected, and then the kernel of torch that
    they replaced runs again.
    """

    def __init__(self, overload: OpOverload, device_type: str) -> None:
        key = autocast_key(device_type)
        kernel = AutocastKernel(overload, device_type, _torch_kernel(overload, device_type))
        self._library = torch.library.Library(overload.namespace, "IMPL")
        with warnings.catch_warnings():
            # torch warns that its kernel is overridden, but ours calls it.
            warnings.simplefilter("ignore")
            # torch 2.11 refuses an override of a kernel from Python unless it is allowed.
            self._library.impl(overload, kernel.call, key, with_keyset=True, allow_override=True)
        _recent_kernels.append(torch.library.get_kernel(overload, key))


def register_kernel(overload: OpOverload, device_type: str) -> KernelRegistration:
    """Return the registration of a kernel that follows op lists, which the caller must keep.

    A library may have registered a kernel for its op since, which hides the registration. Then a
    new one replaces it.
    """
    slot = overload.name(), device_type
    with _lock:
        registration = _registrations.get(slot)
        is_torchs = overload.namespace == "aten"
        if registration is None or not (is_torchs or _is_in_force(overload, device_type)):
            registration = KernelRegistration(overload, device_type)
            _registrations[slot] = registration
        return registration


def _torch_kernel(overload: OpOverload, device_type: str) -> Callable[..., Any] | None:
    """Return the kernel that ours replaces; None if the op has no autocast kernel.

    The answer for an op of torch is stored, because a kernel of ours may still be there while
    another thread removes its registration.
    """
    slot = overload.name(), device_type
    is_stored = slot in _torch_kernels
    if is_stored and (overload.namespace == "aten" or _is_in_force(overload, device_type)):
        return _torch_kernels[slot]
    kernel = None
    if has_autocast_kernel(overload, device_type):
        kernel = torch.library.get_kernel(overload, autocast_key(device_type)).call_boxed
    _torch_kernels[slot] = kernel
    return kernel


class AutocastKernel:
    """The kernel of one overload on one device type.

    Args:
        overload: The op overload.
        device_type: The device type of the tensors that are cast.
        torch_kernel: The kernel of torch, for calls without a rule; None if torch has none.
    """

    def __init__(
        self,
        overload: OpOverload,
        device_type: str,
        torch_kernel: Callable[..., Any] | None,
    ) -> None:
        self._slot = overload.name(), device_type
        self._overload = overload
        self._device_type = device_type
        self._torch_kernel = torch_kernel
        self._key = _parse_key(autocast_key(device_type))
        self._keys_below = _keys_below(self._key)
        schema = schema_of(overload)
        positional = [argument for argument in schema.arguments if not argument.kwarg_only]
        names = [argument.name for argument in positional]
        self._dtype_index = _index_of("dtype", names)
        self._statistics_index = _index_of("running_mean", names)
        types = [str(argument.type) for argument in positional]
        self._tensor_indices = [index for index, name in enumerate(types) if name == "Tensor"]
        # The function of torch takes a number in the place of a tensor, and the overload does not.
        name = schema.name.split("::")[1]
        self._function: Callable[..., Any] = getattr(torch, name, overload.overloadpacket)

    @skip_dynamo
    def call(self, keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Run the op by the rule of this thread's lists, or by torch's kernel without a rule."""
        policy = _rules_by_mark.get(current_mark(), {}).get(self._slot)
        if policy is None and self._torch_kernel is not None:
            return self._call_torch_kernel(keys, *args, **kwargs)
        if policy is not None:
            self._refuse_reentrant_checkpoint()
        # The number of `x * 2` arrives as a number.
        takes_overload = True
        for index in self._tensor_indices:
            if index < len(args) and not isinstance(args[index], Tensor):
                takes_overload = False
        casts = policy is not None and policy is not CastPolicy.UNLISTED
        if casts and not self._has_explicit_dtype(args, kwargs):
            assert policy is not None
            args, kwargs = self._cast_arguments(policy, args, kwargs)
        elif takes_overload and not casts:
            # Autocast stays on, because a composite op calls ops with rules of their own.
            return self._overload.redispatch(keys & self._keys_below, *args, **kwargs)
        # As in torch's kernels, ops inside run in the dtypes of their inputs.
        _set_key_excluded(self._key, True)
        try:
            function = self._overload if takes_overload else self._function
            return function(*args, **kwargs)
        finally:
            _set_key_excluded(self._key, False)

    def _call_torch_kernel(self, *args: Any, **kwargs: Any) -> Any:
        """Call torch's kernel without the cache of cast weights.

        The kernel holds the GIL here. It takes a lock to fill the cache, and a thread with that
        lock may wait for the GIL, if it has a dispatch mode or its weight is a tensor subclass.
        """
        assert self._torch_kernel is not None
        cache_enabled = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return self._torch_kernel(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(cache_enabled)

    def _refuse_reentrant_checkpoint(self) -> None:
        if reentrant_checkpoint_id() not in (None, local.lists_checkpoint_id):
            raise ConfigError(
                "torch.utils.checkpoint with use_reentrant=True recomputes without the op lists of "
                f"this region, and {self._slot[0]} is on one of them. Call checkpoint of "
                "distamp.autocast instead, or pass use_reentrant=False and its "
                "context_fn=checkpoint_context_fn."
            )

    def _has_explicit_dtype(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if kwargs.get("dtype"):
            return True
        return len(args) > self._dtype_index and bool(args[self._dtype_index])

    def _cast_arguments(
        self, policy: CastPolicy, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = self._target_dtype(policy, args)
        # The op writes running statistics, so statistics of another dtype are not cast. Nor are
        # the weights, because a kernel takes both in one dtype.
        statistics = args[self._statistics_index : self._statistics_index + 2]
        count = len(args)
        if any(self._differs(tensor, dtype) for tensor in statistics):
            count = 1
        cast_args = [self._cast(value, dtype) for value in args[:count]]
        cast_kwargs = {name: self._cast(value, dtype) for name, value in kwargs.items()}
        return (*cast_args, *args[count:]), cast_kwargs

    def _target_dtype(self, policy: CastPolicy, args: tuple[Any, ...]) -> torch.dtype:
        if policy is CastPolicy.FP32:
            return torch.float32
        lower_precision = torch.get_autocast_dtype(self._device_type)
        if policy is CastPolicy.LOWER_PRECISION:
            return lower_precision
        dtypes = {value.dtype for value in tree_leaves(args) if self._is_castable(value)}
        return functools.reduce(torch.promote_types, dtypes, lower_precision)

    def _is_castable(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.dtype in _CASTABLE
            and value.device.type == self._device_type
        )

    def _differs(self, value: Any, dtype: torch.dtype) -> bool:
        return self._is_castable(value) and value.dtype is not dtype

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, list | tuple):
            return [self._cast(item, dtype) for item in value]
        return value.to(dtype) if self._differs(value, dtype) else value


def _index_of(name: str, names: list[str]) -> int:
    """Return the index of a name, or an index after the end."""
    return names.index(name) if name in names else len(names)
