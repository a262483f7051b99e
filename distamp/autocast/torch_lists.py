"""The op lists of torch itself, read from its autocast kernels.

The dispatcher shows that an op has an autocast kernel, and not which casts it makes. So each kernel
is called once, with tensors that have no memory, up to the point where the op would run. No device
is needed.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from distamp.autocast.op_kernels import (
    DISABLED_TORCH_FUNCTION,
    PYTHON_BINDINGS,
    BelowAutograd,
    CastPolicy,
    has_autocast_kernel,
    make_subclass,
    schema_of,
)

__all__ = ["torch_cast_policy"]

# Deprecated ops warn. Their warnings reach Python's filters only through torch's Python bindings.
_DEPRECATED = {"_lu_with_info", "chain_matmul", "cross", "lu_solve", "qr", "stft"}
_VALUES_BY_TYPE: dict[str, Any] = {
    "int": 1,
    "float": 1.0,
    "number": 1,
    "bool": False,
    "str": "ij,jk->ik",
    "List[int]": [1],
    "List[Optional[Tensor]]": [None],
}


class _OpReachedError(Exception):
    """The kernel has made its casts and called the op, which need not run."""


class _ProbeTensor(Tensor):
    """A tensor of any device, present or not, that records its casts and lets no op run."""

    probed_device: torch.device
    cast_dtypes: set[torch.dtype]

    __torch_function__ = DISABLED_TORCH_FUNCTION

    @staticmethod
    def __new__(
        cls, dtype: torch.dtype, device: torch.device, cast_dtypes: set[torch.dtype]
    ) -> _ProbeTensor:
        shape = torch.empty(2, 2, dtype=dtype, device="meta")
        probe: Any = make_subclass(
            cls, shape, False, dispatch_device=True, device_for_backend_keys=device
        )
        probe.probed_device = device
        probe.cast_dtypes = cast_dtypes
        return probe  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        probe = next(leaf for leaf in leaves if isinstance(leaf, _ProbeTensor))
        if func is torch.ops.prim.device.default:
            return probe.probed_device
        dtypes = [leaf for leaf in leaves if isinstance(leaf, torch.dtype)]
        probe.cast_dtypes.update(dtypes)
        if func in (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default):
            return cls(dtypes[0], probe.probed_device, probe.cast_dtypes)
        raise _OpReachedError


class _ProbeArguments:
    """Arguments of the types that a schema declares; shapes need not fit, as the op never runs."""

    def __init__(self, device_type: str, dtypes: Sequence[torch.dtype]) -> None:
        self.cast_dtypes: set[torch.dtype] = set()
        self._device = torch.device(device_type)
        self._dtypes = dtypes
        self._num_tensors = 0

    def value(self, type_name: str) -> Any:
        """Return a value of a type, with tensors of the dtypes in turn."""
        if type_name == "Tensor":
            return self._tensor()
        if type_name == "List[Tensor]":
            return [self._tensor(), self._tensor()]
        return _VALUES_BY_TYPE.get(type_name)

    def _tensor(self) -> Tensor:
        dtype = self._dtypes[self._num_tensors % len(self._dtypes)]
        self._num_tensors += 1
        return _ProbeTensor(dtype, self._device, self.cast_dtypes)


def _probe_casts(overload: OpOverload, device_type: str, *dtypes: torch.dtype) -> set[torch.dtype]:
    """Return the dtypes to which an op's kernel casts inputs of the given dtypes, in turn."""
    schema = schema_of(overload)
    arguments = _ProbeArguments(device_type, dtypes)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in schema.arguments:
        if argument.has_default_value():
            continue
        value = arguments.value(str(argument.type))
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    name = schema.name.removeprefix("aten::")
    function = getattr(PYTHON_BINDINGS, name) if name in _DEPRECATED else overload
    # An op that torch refuses in a region raises another error, and is on no list.
    with contextlib.suppress(_OpReachedError, Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function(*args, **kwargs)
    return arguments.cast_dtypes


def _probe_policy(overload: OpOverload, device_type: str) -> CastPolicy:
    """Return the policy of a kernel. A new thread must call it, because it changes the state."""
    if not has_autocast_kernel(overload, device_type):
        return CastPolicy.UNLISTED
    lower_precision, fp32 = torch.bfloat16, torch.float32
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, lower_precision)
    # Autograd would read the device of the tensor, which may not be present.
    below_autograd = BelowAutograd()
    if lower_precision in _probe_casts(overload, device_type, fp32):
        policy = CastPolicy.LOWER_PRECISION
    elif fp32 in _probe_casts(overload, device_type, lower_precision):
        policy = CastPolicy.FP32
    elif fp32 in _probe_casts(overload, device_type, lower_precision, fp32):
        policy = CastPolicy.PROMOTE
    else:
        policy = CastPolicy.UNLISTED
    del below_autograd
    return policy


@functools.cache
def torch_cast_policy(overload: OpOverload, device_type: str) -> CastPolicy:
    """Return the policy that this torch has for one overload on a device type."""
    # A new thread has no mode and no region of the caller.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_probe_policy, overload, device_type).result()
