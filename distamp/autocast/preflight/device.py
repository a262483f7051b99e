"""A device that is not here: fake tensors, autograd, autocast and attention for CUDA without it.

A CPU-only torch has no device guard for CUDA, and ends the process (no exception: the constructor
that asks is noexcept) when a fake CUDA tensor that requires grad meets an op. A CUDA build
without a GPU has torch's own no-op guard for this (``torch._C._ensureCUDADeviceGuardSet``); here
a CPU-only build is lent the meta device's, which does nothing either, and it is taken back.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from distamp.autocast.preflight.attention import attention_without_device

__all__ = ["SIMULATED", "simulated_device"]

# Places in c10's table of device guards: c10/core/DeviceType.h, whose numbers are never reused.
SIMULATED = {"cuda": 1}
_CPU, _META = 0, 14
_TABLE = "_ZN3c104impl26device_guard_impl_registryE"
# The GPU that is not here is an A100 to those who ask.
_CAPABILITY = (8, 0)
_lock = threading.RLock()


@contextmanager
def simulated_device(device_type: str) -> Iterator[None]:
    """Let fake tensors of ``device_type`` take part in autograd, with or without the device.

    Without it, regions of autocast for it that this thread enters are not disabled, and attention
    is the kernel that a GPU would choose.

    Raises:
        RuntimeError: This build of torch has neither the device nor a table that can be lent to.
    """
    if device_type == "cpu":
        yield
        return
    with _lock, _device_guard(device_type):
        if torch.cuda.is_available():
            yield
            return
        # A CUDA build would ask cuDNN, and so the device, for what kernels of its it can use.
        with (
            torch.backends.cudnn.flags(enabled=False),
            _answers(),
            attention_without_device(),
        ):
            yield


@contextmanager
def _answers() -> Iterator[None]:
    """Answer, in this thread, what torch.autocast and models ask a device before they use it."""
    here = threading.get_ident()
    answers = {
        (torch.cuda.amp.common, "amp_definitely_not_available"): False,
        (torch.cuda, "is_bf16_supported"): True,
        (torch.cuda, "get_device_capability"): _CAPABILITY,
        (torch.cuda, "current_device"): 0,
        (torch.cuda, "synchronize"): None,
    }
    with ExitStack() as stack:
        for (owner, name), answer in answers.items():
            stack.enter_context(patch.object(owner, name, _answer(owner, name, answer, here)))
        yield


def _answer(owner: Any, name: str, answer: Any, thread: int) -> Callable[..., Any]:
    real = getattr(owner, name)

    def asked(*args: Any, **kwargs: Any) -> Any:
        return answer if threading.get_ident() == thread else real(*args, **kwargs)

    return asked


@contextmanager
def _device_guard(device_type: str) -> Iterator[None]:
    torch._C._ensureCUDADeviceGuardSet()
    table = _guard_table(device_type)
    at = SIMULATED[device_type]
    before = table[at]
    if before is None:
        table[at] = table[_META]
    try:
        yield
    finally:
        table[at] = before


def _guard_table(device_type: str) -> ctypes.Array[ctypes.c_void_p]:
    names = {"darwin": "libc10.dylib", "win32": "c10.dll"}
    path = Path(torch.__file__).parent / "lib" / names.get(sys.platform, "libc10.so")
    try:
        table = (ctypes.c_void_p * 21).in_dll(ctypes.CDLL(str(path)), _TABLE)
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"this build of torch cannot simulate {device_type!r} ({error}); "
            "use device_type='cpu', or run preflight where the device is"
        ) from error
    if table[_CPU] is None or table[_META] is None:
        raise RuntimeError(
            f"this torch ({torch.__version__}) keeps its device guards elsewhere than expected, so "
            f"{device_type!r} cannot be simulated; use device_type='cpu'"
        )
    return table
