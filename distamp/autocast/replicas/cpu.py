"""What DataParallel needs on the CPU, where torch has none of it: replicate, scatter, gather."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["gather", "replicate", "scatter"]

_M = TypeVar("_M", bound=nn.Module)


def replicate(network: _M, count: int, *, detach: bool) -> list[_M]:
    """Copies of a module that share its parameters through autograd.

    As on accelerators, a replica's parameters are no leaves: gradients reach the module's own. The
    first replica has the module's own buffers, so running statistics are kept; the others have
    copies, as threads may not write to one tensor.

    Args:
        network: The module.
        count: How many.
        detach: Share the values without autograd, for calls under ``no_grad``.

    Raises:
        TypeError: A part of the module is a ScriptModule.
    """
    return [_replica(network, own_buffers=number == 0, detach=detach) for number in range(count)]


def _replica(network: _M, *, own_buffers: bool, detach: bool) -> _M:
    modules = list(network.modules())
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        raise TypeError("a ScriptModule cannot be replicated on the CPU; replicate the eager one")
    replicas = {module: module._replicate_for_data_parallel() for module in modules}
    shared: dict[Tensor, Tensor] = {}
    for module in modules:
        replica = replicas[module]
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else replicas[child]
        for name, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
                continue
            if parameter not in shared:
                shared[parameter] = parameter.detach() if detach else parameter.view_as(parameter)
            # No leaf, so no Parameter: an attribute, as torch's replicate has it.
            setattr(replica, name, shared[parameter])
        for name, buffer in module._buffers.items():
            if buffer is not None and not own_buffers and buffer not in shared:
                shared[buffer] = buffer.detach().clone() if detach else buffer.clone()
            replica._buffers[name] = buffer if buffer is None or own_buffers else shared[buffer]
    root = replicas[network]
    assert isinstance(root, type(network))
    return root


def scatter(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], count: int, dim: int
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Divide every tensor of the arguments into up to ``count`` parts along ``dim``.

    Args:
        inputs: Positional arguments; tuples, lists and dicts in them are divided within.
        kwargs: Keyword arguments, likewise.
        count: How many parts at most; fewer where the tensors are shorter.
        dim: The dimension to divide.

    Returns:
        For each part its positional arguments and its keyword arguments.
    """
    if not inputs and not kwargs:
        return [], []
    # Together, so that arguments without a tensor make no more parts than the tensors do.
    parts: list[Any] = _parts((inputs, kwargs), count, dim)
    return [args for args, _ in parts], [dict(each) for _, each in parts]


def _parts(value: Any, count: int, dim: int) -> list[Any]:
    if isinstance(value, Tensor):
        return list(value.chunk(count, dim))
    if isinstance(value, tuple | list) and value:
        rows = zip(*(_parts(each, count, dim) for each in value), strict=False)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return [type(value)(*row) for row in rows]
        return [type(value)(row) for row in rows]
    if isinstance(value, dict) and value:
        rows = zip(*(_parts(each, count, dim) for each in value.values()), strict=False)
        return [type(value)(zip(value, row, strict=True)) for row in rows]
    return [value] * count


def gather(outputs: Sequence[Any], dim: int) -> Any:
    """Concatenate what the replicas returned along ``dim``, within tuples, lists and dicts too.

    Args:
        outputs: One output for each replica, all of the same structure.
        dim: The dimension to concatenate along.

    Raises:
        TypeError: An output holds something other than tensors and None.
        ValueError: The replicas' dicts differ in their keys.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        if dim == 0 and all(each.dim() == 0 for each in outputs):
            warnings.warn(
                "the replicas returned scalars; they are gathered into a vector", stacklevel=2
            )
            return torch.stack(list(outputs))
        return torch.cat(list(outputs), dim)
    if first is None:
        return None
    if isinstance(first, dict):
        if any(each.keys() != first.keys() for each in outputs):
            raise ValueError("all replicas must return dicts with the same keys")
        return type(first)((key, gather([each[key] for each in outputs], dim)) for key in first)
    if isinstance(first, tuple | list):
        parts = (gather(row, dim) for row in zip(*outputs, strict=True))
        named = isinstance(first, tuple) and hasattr(first, "_fields")
        return type(first)(*parts) if named else type(first)(parts)
    raise TypeError(
        f"replicas must return tensors, None, or tuples, lists and dicts of them, got "
        f"{type(first).__name__}"
    )
