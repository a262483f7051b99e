"""What a hook needs in memory beyond torch's own reduction, counted in bytes of storages."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distamp import comm_hooks
from tests.ranks import mesh


class Peak(TorchDispatchMode):
    """The most bytes that were there at once of what this thread allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._lock = threading.Lock()
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                self._add(each)
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if key in self._known:
                return
            self._known.add(key)
            nbytes = storage.nbytes()
            self.now += nbytes
            self.most = max(self.most, self.now)

        def gone() -> None:
            with self._lock:
                self._known.discard(key)
                self.now -= nbytes

        weakref.finalize(storage, gone)


def _peak(wrapper: str, hooked: bool, ranks_per_host: int | None = None) -> int:
    torch.manual_seed(0)
    width = 1400
    layer = nn.Linear(width, width)
    model: Any
    if wrapper == "FSDP1":
        model = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
    else:
        model = fully_shard(layer, mesh=mesh((dist.get_world_size(),), ("shard",)))
    if hooked:
        comm_hooks.register(model, "fp16", ranks_per_host=ranks_per_host)
    peak = Peak()
    for _ in range(2):  # with what stays from the first pass on
        loss = model(torch.ones(2, width)).sum()
        with peak:
            loss.backward()
    return peak.most


def _beyond(wrapper: str, ranks_per_host: int | None) -> float:
    """Bytes beyond the default's, beside the group's gradients in fp32."""
    more = _peak(wrapper, True, ranks_per_host) - _peak(wrapper, False)
    return more / (4 * (1400 * 1400 + 1400))


@pytest.mark.parametrize(
    ("wrapper", "ranks_per_host"), [("FSDP1", None), ("FSDP2", None), ("FSDP2", 2)]
)
def test_shards_are_reduced_in_a_quarter_of_their_gradients_memory(ranks4, wrapper, ranks_per_host):
    for beyond in ranks4.run(_beyond, wrapper, ranks_per_host):
        assert beyond <= 0.25
