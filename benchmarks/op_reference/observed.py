"""What autocast does with each op, observed by running it."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.op_reference.samples import SAMPLES, Inputs
from distamp import op_reference
from distamp.autocast.devices import autocast_without_device, is_here
from distamp.autocast.op_lists import names
from distamp.autocast.op_lists.registered import BANNED
from distamp.autocast.op_lists.rules import Category

__all__ = ["NATIVE", "LastInputs", "agrees", "observe", "observed"]

# An op on no list whose own type promotion does what a promote op does.
NATIVE = "promote without autocast"
_REAL = {torch.complex64: torch.float32, torch.complex32: torch.float16}


def agrees(says: str, does: str | None) -> bool:
    """Whether what an op does is what a document says of it."""
    return says == does or (says == Category.PROMOTE.value and does == NATIVE)


class LastInputs(TorchDispatchMode):
    """Keeps the floating point dtype of the last op's inputs, for ops that return none."""

    dtype: torch.dtype | None = None

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace != "prim" and func is not torch.ops.aten._to_copy.default:
            found = {it.dtype for it in _floating(args)} - {torch.float64}
            if len(found) == 1:
                (self.dtype,) = found
        return func(*args, **(kwargs or {}))


def _floating(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _floating(item)


def _dtype(
    sample: Callable[[Inputs], Any], device_type: str, dtypes: Sequence[torch.dtype]
) -> torch.dtype | str | None:
    """The dtype one call gives or computes in; BANNED; or None where the call fails."""
    fake = not is_here(device_type)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if fake:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        inputs = stack.enter_context(LastInputs())  # type: ignore[no-untyped-call]
        try:
            found = {
                _REAL.get(it.dtype, it.dtype)
                for it in _floating(sample(Inputs(device_type, dtypes)))
            }
        except Exception as error:
            if "unsafe to autocast" in str(error):
                return BANNED
            # A fake op may stop where it would read a value or a device; its inputs are known.
            seen: torch.dtype | None = inputs.dtype
            return seen if fake else None
    last: torch.dtype | None = inputs.dtype
    return found.pop() if len(found) == 1 else last


def observe(name: str, device_type: str, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """The category one op shows when it runs in an autocast region.

    Args:
        name: The op, one of those this package has a sample call for.
        device_type: ``"cuda"``, ``"cpu"`` and so on; fake tensors stand in for a missing device.
        dtype: The region's lower precision dtype.

    Returns:
        The category; None if there is no sample call, or none that runs here.
    """
    sample = SAMPLES.get(name)
    if sample is None or not names.known(name):
        return None
    fp32 = torch.float32
    with autocast_without_device(device_type, dtype):
        of_fp32 = _dtype(sample, device_type, (fp32,))
        of_lower = _dtype(sample, device_type, (dtype,))
        of_both = _dtype(sample, device_type, (dtype, fp32))
    if of_fp32 is None or isinstance(of_fp32, str):
        return of_fp32
    if of_fp32 is dtype:
        return Category.LOWER_PRECISION.value
    if of_lower is fp32:
        return Category.FP32.value
    if of_both is fp32 and of_lower is dtype:
        alone = _dtype(sample, device_type, (dtype, fp32))
        torchs = _registered(name, device_type) == Category.PROMOTE.value
        return NATIVE if alone is fp32 and not torchs else Category.PROMOTE.value
    return Category.UNLISTED.value


def _registered(name: str, device_type: str) -> str | None:
    row = op_reference(device_type).get(name)
    return None if row is None else row.registered


@functools.cache
def observed(device_type: str) -> Mapping[str, str | None]:
    """What each op does, for the ops of the reference; None where it could not be run.

    Args:
        device_type: ``"cuda"``, ``"cpu"`` and so on. Where the device is missing its ops run on
            fake tensors, in a process of their own, which some of them could abort.

    Raises:
        RuntimeError: The process of its own failed.
    """
    if is_here(device_type):
        return {name: observe(name, device_type) for name in op_reference(device_type)}
    program = (
        f"import json, sys; from {__name__} import observe, op_reference; kind = sys.argv[1]\n"
        "print(json.dumps({name: observe(name, kind) for name in op_reference(kind)}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, device_type], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"observing {device_type} ops failed:\n{done.stderr[-2000:]}")
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found
