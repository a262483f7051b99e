"""The simulated accelerator under CUDA's name, for code that looks at that name.

The library must be there before torch, so this module imports torch in functions only, and the
processes that use it are spawned. It adds the names of ``torch.cuda`` that are not
in torch's CPU build.
"""

import contextlib
import ctypes
import os
from types import SimpleNamespace
from typing import Any

__all__ = ["serve"]


def serve(path: str, devices: int, *args: Any) -> None:
    """Be a process of a pool in which "cuda" is the simulated accelerator."""
    become(path, devices)
    from tests import ranks

    ranks.serve(*args)


def become(path: str, devices: int) -> None:
    """Let "cuda" be the simulated accelerator in this process, which has not imported torch."""
    os.environ.update(SIM_DEVICES=str(devices), SIM_NAME="cuda")
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)

    import torch

    from tests.simulated import device

    device.load(path, devices, name="cuda")
    native = device.native()
    properties = SimpleNamespace(total_memory=1 << 34, multi_processor_count=1)
    vars(torch.cuda).update(
        {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": native.device_count,
            "current_device": native.current_device,
            "set_device": lambda d: native.set_device(device.index_of(d)),
            "current_stream": torch.accelerator.current_stream,
            "default_stream": device.default_stream,
            "set_stream": torch.accelerator.set_stream,
            "stream": lambda s: contextlib.nullcontext() if s is None else s,
            "synchronize": torch.accelerator.synchronize,
            "is_bf16_supported": lambda *_, **__: True,
            "is_current_stream_capturing": lambda: False,
            "manual_seed_all": device.seed_all,
            "get_device_capability": lambda _=None: (9, 0),
            "get_device_name": lambda _=None: "simulated",
            "get_device_properties": lambda _=None: properties,
            "Stream": torch.Stream,
            "Event": torch.Event,
        }
    )
    torch._C._cuda_getDevice = native.current_device
    torch._C._cuda_setDevice = native.set_device
    _take_groups()


def _take_groups() -> None:
    """Replace groups of NCCL, and groups of gloo on a GPU, by the late group."""
    import torch.distributed as dist

    original = dist.init_process_group

    def init_process_group(backend: str = "", **options: Any) -> None:
        replaced = "simccl" if backend == "nccl" else "cpu:gloo,cuda:simccl"
        original(replaced, **options)

    dist.init_process_group = init_process_group  # type: ignore[assignment]
