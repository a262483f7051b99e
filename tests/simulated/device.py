"""``torch.sim``: the simulated accelerator registered in this process, and its controls for tests.

A process that has loaded it can never be without it again, so tests run in processes of their own
(`tests.simulated.pools`), and only the functions that run there may import this module.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch._meta_registrations  # kernels that tell shapes, written in Python
import torch.distributed as dist
from torch import Tensor

from tests.simulated import parallel

__all__ = [
    "ALL_SYNCS",
    "BACKEND",
    "counted",
    "default_stream",
    "drain",
    "index_of",
    "load",
    "native",
    "peek",
    "refuse",
    "schedule",
    "seed_all",
    "take_counts",
]

# The kinds of host sync, as the library numbers them; "no_meta" exists in the simulation
# alone. It is an op with a shape that depends on its values.
KINDS = ("item", "d2h", "h2d", "stream", "event", "device", "data_dependent", "no_meta")
ALL_SYNCS = KINDS[:-1]
# For init_process_group: gloo for the host's tensors, the late group for the device's.
BACKEND = "cpu:gloo,sim:simccl"

_native: Any = None


def load(path: str, devices: int = 4, name: str = "sim") -> None:
    """Register the device type in this process, once and for good.

    Args:
        path: the library, of `tests.simulated.build.library`.
        devices: how many.
        name: ``"sim"``; ``"cuda"`` is for `tests.simulated.cuda`, before torch is imported.
    """
    global _native
    if _native is not None:
        return
    os.environ.update(SIM_DEVICES=str(devices), SIM_NAME=name)
    loader = importlib.machinery.ExtensionFileLoader("sim", path)
    _native = importlib.util.module_from_spec(importlib.util.spec_from_loader("sim", loader))
    loader.exec_module(_native)
    if name == "sim":
        torch.utils.rename_privateuse1_backend("sim")
        torch._register_device_module("sim", _module())
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    parallel.supply(name)

    def group(options: Any, _: Any) -> Any:
        gloo = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, options.timeout
        )
        return _native.make_group(gloo)

    dist.Backend.register_backend("simccl", group, extended_api=True, devices=[name])


def native() -> Any:
    """The library itself, for `tests.simulated.cuda`."""
    return _native


# -- controls and counts for tests -----------------------------------------------------------------


def schedule(name: str, seed: int = 0) -> None:
    """Run all pending jobs, then choose when later jobs run.

    Args:
        name: With ``"late"`` a job runs when the host waits for it; the streams that its stream
            waits for run first. With ``"late_others"`` those streams run last. With ``"eager"`` a
            job runs as soon as it is on its stream, if the jobs that it waits for have run. With
            ``"random"`` some jobs of a random stream run now and then.
        seed: The seed of the random schedule.
    """
    _native.set_schedule(name, seed)


def take_counts() -> dict[str, int]:
    """The host syncs of this process by kind since the last call."""
    return _native.take_counts()


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """A dict that holds, after the block, the host syncs within it by kind."""
    take_counts()
    counts: dict[str, int] = {}
    yield counts
    counts.update(take_counts())


@contextlib.contextmanager
def refuse(*kinds: str) -> Iterator[None]:
    """Raise at a host sync of one of these kinds, or of any kind without arguments."""
    _native.refuse(sum(1 << KINDS.index(kind) for kind in kinds or ALL_SYNCS))
    try:
        yield
    finally:
        _native.refuse(0)


def peek(tensor: Tensor) -> Tensor:
    """Return the present values of a device tensor without a sync; pending jobs do not run."""
    return _native.peek(tensor)


def drain() -> None:
    """Run everything; an error of a job comes out here. Counts no sync."""
    for device in range(_native.device_count()):
        _native.run_device(device)


# -- torch.sim ------------------------------------------------------------------------------------


def index_of(device: Any) -> int:
    """The number of a device given as torch takes it; the current one for None."""
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return int(_native.current_device()) if index is None else index


def _module() -> ModuleType:
    """Return the module of the device type, with the names that torch and its wrappers use."""
    module = ModuleType("torch.sim", "The simulated accelerator.")
    vars(module).update(
        {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_is_in_bad_fork": lambda: False,
            "init": lambda: None,
            "_lazy_init": lambda: None,
            "device_count": _native.device_count,
            "current_device": _native.current_device,
            "set_device": lambda device: _native.set_device(index_of(device)),
            "device": lambda device: torch.accelerator.device_index(index_of(device)),
            "current_stream": torch.accelerator.current_stream,
            "default_stream": default_stream,
            "set_stream": torch.accelerator.set_stream,
            "stream": lambda stream: stream or contextlib.nullcontext(),
            "synchronize": torch.accelerator.synchronize,
            "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16, torch.float32],
            "manual_seed": lambda seed: _generator(None).manual_seed(seed),
            "manual_seed_all": seed_all,
            "get_rng_state": lambda device=None: _generator(device).get_state(),
            "set_rng_state": lambda state, device=None: _generator(device).set_state(state),
            "empty_cache": lambda: None,
            "Stream": torch.Stream,
            "Event": torch.Event,
        }
    )
    return module


def default_stream(device: Any = None) -> torch.Stream:
    """The stream that work is on unless it is put elsewhere."""
    # The number of the device type is written nowhere else.
    ours = torch.Stream(torch._C._get_accelerator())
    return torch.Stream(stream_id=0, device_index=index_of(device), device_type=ours.device_type)


def _generator(device: Any) -> torch.Generator:
    return _native.default_generator(index_of(device))


def seed_all(seed: int) -> None:
    """Seed every device's generator."""
    for device in range(_native.device_count()):
        _generator(device).manual_seed(seed)
