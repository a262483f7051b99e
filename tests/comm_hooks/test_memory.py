"""What a hook needs in memory beyond torch's own reduction, counted in bytes of storages."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distamp import comm_hooks
from tests.ranks import mesh

WIDTH = 1400


class Peak(TorchDispatchMode):
    """The most bytes that were there at once of what this thread allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, Tensor)):
            if storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, storage._cdata)
        self.most = max(self.most, sum(self._sizes.values()))
        return out


def _peak(hooked: bool, ranks_per_host: int | None) -> int:
    torch.manual_seed(0)
    over = mesh((dist.get_world_size(),), ("shard",))
    model = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=over)
    if hooked:
        comm_hooks.register(model, "fp16", ranks_per_host=ranks_per_host)
    peak = Peak()
    for _ in range(2):  # With what stays from the first pass on.
        loss = model(torch.ones(2, WIDTH)).sum()
        with peak:
            loss.backward()
    return peak.most


def _beyond(ranks_per_host: int | None) -> float:
    """Bytes beyond the default's, beside the group's gradients in fp32."""
    more = _peak(True, ranks_per_host) - _peak(False, None)
    return more / (4 * (WIDTH * WIDTH + WIDTH))


@pytest.mark.parametrize("ranks_per_host", [None, 2])
def test_shards_are_reduced_in_a_quarter_of_their_gradients_memory(ranks4, ranks_per_host):
    assert max(ranks4.run(_beyond, ranks_per_host)) <= 0.25
