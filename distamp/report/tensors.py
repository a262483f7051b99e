"""Tensors of every layout and nesting: their elements, storages and shapes, and a model's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from distamp.fsdp_params import sharded_params

__all__ = [
    "ModelTensor",
    "flatten_tensors",
    "local_tensor",
    "model_tensors",
    "shape_of",
    "storage_key",
    "stored_elements",
]

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class ModelTensor(NamedTuple):
    """A parameter or buffer with its name and its module's.

    Attributes:
        kind: ``"parameter"`` or ``"buffer"``.
        name: Its name in the model without the names of wrappers.
        module: The name of its module.
        tensor: The tensor; the shard of a parameter that FSDP2 has gathered.
    """

    kind: str
    name: str
    module: str
    tensor: Tensor


def model_tensors(names: Mapping[nn.Module, str]) -> list[ModelTensor]:
    """Return the parameters and buffers of modules, in order.

    A forward pass without a backward pass leaves parameters of FSDP2 gathered. The result has
    their shards, which have the gradients.

    Args:
        names: The modules with their names.
    """
    labels = []
    all_tensors = []
    for module, module_name in names.items():
        named_tensors = (
            ("parameter", module.named_parameters(recurse=False)),
            ("buffer", module.named_buffers(recurse=False)),
        )
        for kind, tensors in named_tensors:
            for leaf, tensor in tensors:
                name = f"{module_name}.{leaf}".lstrip(".")
                labels.append((kind, name, module_name))
                all_tensors.append(tensor)
    rows = []
    for (kind, name, module_name), shard in zip(labels, sharded_params(all_tensors), strict=True):
        rows.append(ModelTensor(kind, name, module_name, shard))
    return rows


def flatten_tensors(values: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts.

    torch's pytree takes five times as long.
    """
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    tensors = []
    for value in values:
        tensors.extend(flatten_tensors(value))
    return tensors


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, after any collective that still computes it."""
    local: Any = tensor.detach()
    if hasattr(local, "to_local"):
        local = local.to_local()
    if hasattr(local, "wait"):
        local = local.wait()
    return local  # type: ignore[no-any-return]


def storage_key(tensor: Tensor) -> object:
    """Return a key for a tensor's storage that no later storage has, even if this one is freed.

    The key of a tensor subclass is the key of its first inner tensor.
    """
    while hasattr(tensor, "__tensor_flatten__"):
        inner_names, _ = tensor.__tensor_flatten__()
        tensor = getattr(tensor, inner_names[0])
    elements = stored_elements(tensor)
    if elements.layout is not torch.strided:
        # An opaque tensor has no storage, so its key equals no other.
        return object()
    return StorageWeakRef(elements.untyped_storage())


def stored_elements(tensor: Tensor) -> Tensor:
    """Return the stored elements of a tensor of any layout, sparse or nested, without a copy."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return torch.ops.aten._values.default(tensor)  # type: ignore[no-any-return]
    if tensor.layout in _COMPRESSED or tensor.is_nested:
        return tensor.values()
    return tensor


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor, with -1 for the ragged dimensions of a nested tensor."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    shape = []
    for dim in range(tensor.dim()):
        try:
            size = tensor.size(dim)
        except RuntimeError:
            size = -1
        shape.append(size if isinstance(size, int) else -1)
    return tuple(shape)
