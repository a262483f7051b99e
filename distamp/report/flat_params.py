"""FlatParams: the flat parameter of one module of FSDP1, and all private names of FSDP1 in use.

The names were read in torch 2.13. If torch renames one, `compare_gradients` raises RuntimeError
with the name for models under FullyShardedDataParallel, and works for all other layouts.

- ``module._handle`` and ``module._inter_node_pg``;
- ``flat_param._params``, ``_param_infos``, ``_numels``, ``_shard_param_infos``,
  ``_saved_grad_shard``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

__all__ = ["FlatParams", "FlatShard"]


@dataclass(frozen=True)
class FlatShard:
    """This rank's elements of one original parameter in a flat parameter.

    Attributes:
        owner: The module that has the parameter.
        leaf: The name of the parameter in its owner.
        original: The parameter under ``use_orig_params``, or None.
        start: The place of the elements in this rank's flat parameter.
        length: Their number.
        first: The place of the elements in the whole parameter, or None for a parameter that is
            not sharded.
    """

    owner: nn.Module
    leaf: str
    original: Tensor | None
    start: int
    length: int
    first: int | None


class FlatParams:
    """The flat parameter of one ``FullyShardedDataParallel``.

    Args:
        module: The module, for which `find` returns an object if it has a flat parameter.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._handle: Any = _read(module, "_handle")
        self.flat_param: Any = _read(self._handle, "flat_param")

    @classmethod
    def find(cls, module: nn.Module) -> FlatParams | None:
        """Return the flat parameter of a module of FSDP1, or None if it has none."""
        return None if _read(module, "_handle") is None else cls(module)

    @property
    def is_sharded(self) -> bool:
        """True if the ranks hold shards, as under all strategies except NO_SHARD."""
        return bool(self._handle.uses_sharded_strategy)

    @property
    def groups(self) -> dict[str, ProcessGroup]:
        """The groups over which gradients are reduced, by the name of their axis."""
        groups = {"dp": self._handle.process_group}
        replicas = getattr(self._module, "_inter_node_pg", None)
        if replicas is not None:
            groups["dp_replicate"] = replicas
        return groups

    @property
    def has_unreduced_gradient(self) -> bool:
        """True if the gradient is not sharded, as after a backward pass in ``no_sync()``."""
        grad = self.flat_param.grad
        return self.is_sharded and grad is not None and grad.numel() > self.flat_param.numel()

    def shards(self) -> Iterator[FlatShard]:
        """Yield the elements of each original parameter, in order; some have none on this rank."""
        originals = _read(self.flat_param, "_params")
        numels = _read(self.flat_param, "_numels")
        begin = 0
        for index, (leaf, owner, _) in enumerate(_read(self.flat_param, "_param_infos")):
            original = None if originals is None else originals[index]
            start, length, first = begin, numels[index], None
            begin += numels[index]
            if self.is_sharded:
                info = _read(self.flat_param, "_shard_param_infos")[index]
                start, length, first = 0, 0, 0
                if info.in_shard:
                    start, length = info.offset_in_shard, info.numel_in_shard
                    first = info.intra_param_start_idx
            yield FlatShard(owner, leaf, original, start, length, first)

    def drop_gradients(self) -> None:
        """Drop the gradient, with the shard that torch keeps from passes before ``no_sync()``."""
        self.flat_param.grad = None
        if hasattr(self.flat_param, "_saved_grad_shard"):
            delattr(self.flat_param, "_saved_grad_shard")
        for shard in self.shards():
            if shard.original is not None:
                shard.original.grad = None


def _read(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise RuntimeError(
            f"torch {torch.__version__} has no {name} in {type(owner).__name__}, which distamp "
            "reads to compare gradients under FullyShardedDataParallel. Use fully_shard, or one of "
            "the versions of torch that distamp supports."
        ) from None
