"""DataParallel whose replicas compute in their caller's autocast state.

torch's carries over whether CUDA autocast is on, and nothing else: an outer bfloat16 region
computes in float16 in two replicas and in bfloat16 in one, which runs in the caller's own thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import nn

from distamp.autocast.replicas.cpu import gather, replicate, scatter
from distamp.autocast.threads.state import AutocastState, propagate

__all__ = ["DataParallel", "parallel_apply"]

_M = TypeVar("_M", bound=nn.Module)
_Device = int | str | torch.device


def _is_cpu(device: _Device | None) -> bool:
    return not isinstance(device, int | None) and torch.device(device).type == "cpu"


def _all_cpu(devices: Sequence[_Device | None]) -> bool:
    """Whether the devices are CPU devices.

    Raises:
        ValueError: Some are and some are not.
    """
    on_cpu = [_is_cpu(each) for each in devices]
    if any(on_cpu) and not all(on_cpu):
        raise ValueError(f"devices must be all CPU or all accelerators, got {list(devices)}")
    return bool(on_cpu) and all(on_cpu)


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[_Device | None] | None = None,
) -> list[Any]:
    """Call each module with its inputs, in a thread each, all in the caller's autocast state.

    As :func:`torch.nn.parallel.parallel_apply`, which carries over only whether CUDA autocast is on
    and does not run on the CPU. One module runs in the caller's thread.

    Args:
        modules: What to call.
        inputs: For each module its positional arguments, or one argument.
        kwargs_tup: For each module its keyword arguments; None is none.
        devices: For each module its device. ``"cpu"`` for all runs them on the CPU, as None does
            where there is no accelerator.

    Returns:
        What the modules returned, in their order.

    Raises:
        ValueError: The lengths differ, or CPU and accelerator devices are mixed.
        Exception: What the first failing module raised; on the CPU with a note of its number.
    """
    kwargs_tup = [{}] * len(modules) if kwargs_tup is None else kwargs_tup
    for name, values in (("inputs", inputs), ("kwargs_tup", kwargs_tup), ("devices", devices)):
        if values is not None and len(values) != len(modules):
            raise ValueError(
                f"{name} must have one item for each of the {len(modules)} modules, "
                f"got {len(values)}"
            )
    state = AutocastState.capture()
    if not torch.accelerator.is_available() if devices is None else _all_cpu(devices):
        return _apply_on_cpu(modules, inputs, kwargs_tup, state)
    bound: Any = [propagate(module, state) for module in modules]
    given: Any = None if devices is None else [_index(each) for each in devices]
    return nn.parallel.parallel_apply(bound, inputs, kwargs_tup, given)


def _index(device: _Device | None) -> Any:
    return torch.device(device) if isinstance(device, str) else device


def _apply_on_cpu(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]],
    state: AutocastState,
) -> list[Any]:
    calls = [
        (module, args if isinstance(args, list | tuple) else (args,), kwargs)
        for module, args, kwargs in zip(modules, inputs, kwargs_tup, strict=True)
    ]
    if len(calls) <= 1:
        return [module(*args, **kwargs) for module, args, kwargs in calls]
    grad = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()

    def call(number: int) -> Any:
        module, args, kwargs = calls[number]
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad), state.apply():
                return module(*args, **kwargs)
        except Exception as error:
            error.add_note(f"in replica {number} of {len(calls)}, on the CPU")
            raise

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, range(len(calls))))


class DataParallel(nn.DataParallel[_M]):
    """A :class:`torch.nn.DataParallel` whose replicas compute in the caller's autocast state.

    torch's gives replicas whether CUDA autocast is on, and neither the dtype nor the cache flag.
    This one takes CPU devices too (``device_ids=["cpu"] * 4``): the replicas then share the
    parameters through autograd, replica 0 has the module's own buffers and the others copies.

    Args:
        module: The module to run in parallel.
        device_ids: Accelerator indices or devices, default all; or CPU devices.
        output_device: Where the outputs are gathered, default ``device_ids[0]``.
        dim: The dimension of every tensor argument that is divided among the replicas.

    Raises:
        ValueError: CPU and accelerator devices are mixed.
    """

    def __init__(
        self,
        module: _M,
        device_ids: Sequence[_Device] | None = None,
        output_device: _Device | None = None,
        dim: int = 0,
    ) -> None:
        devices = list(device_ids or ())
        if output_device is not None and _is_cpu(output_device) is not _all_cpu(devices):
            raise ValueError(
                f"output_device {output_device!r} and device_ids {devices} must be on the same "
                "kind of device"
            )
        if not _all_cpu(devices):
            ids: Any = None if device_ids is None else [_index(each) for each in device_ids]
            super().__init__(module, ids, _index(output_device), dim)
            return
        nn.Module.__init__(self)
        cpu = torch.device("cpu")
        self.dim = dim
        self.module = module
        self.device_ids: Any = [cpu] * len(devices)
        self.output_device: Any = cpu
        self.src_device_obj = cpu

    @property
    def _on_cpu(self) -> bool:
        return _all_cpu(self.device_ids)

    def replicate(self, module: Any, device_ids: Sequence[Any]) -> list[Any]:
        """Make a copy of the module for each device."""
        if self._on_cpu:
            return replicate(module, len(device_ids), detach=not torch.is_grad_enabled())
        return super().replicate(module, device_ids)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> Any:
        """Divide the tensors among the devices, giving everything else to each."""
        if self._on_cpu:
            return scatter(inputs, kwargs or {}, len(device_ids), self.dim)
        return super().scatter(inputs, kwargs, device_ids)

    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Call the replicas in the caller's autocast state."""
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Concatenate what the replicas returned."""
        if self._on_cpu:
            return gather(outputs, self.dim)
        return super().gather(outputs, output_device)
