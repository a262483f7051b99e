"""What a hook needs in memory beyond torch's own reduction, counted in bytes of storages."""

import weakref
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distamp import comm_hooks
from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.transport import HostTransport, Job
from tests.on_ranks import on_ranks
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


def _peak(wire: str | None, ranks_per_host: int | None, gather: str | None = None) -> int:
    torch.manual_seed(0)
    over = mesh((dist.get_world_size(),), ("shard",))
    model = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=over)
    if wire is not None:
        comm_hooks.register(model, wire, ranks_per_host=ranks_per_host, gather=gather)
    peak = Peak()
    # What lanes allocate is counted in this thread alone.
    here = patch.object(HostTransport, "submit", _at_once)
    for _ in range(2):  # With what stays from the first pass on.
        loss = model(torch.ones(2, WIDTH)).sum()
        with peak, here:
            loss.backward()
    return peak.most


def _at_once(transport: HostTransport, job: Job, uses: Sequence[Tensor] = ()) -> Future[Tensor]:
    with torch.no_grad():
        return torch_compat.completed(job(transport.next()))


@on_ranks(4)
@pytest.mark.parametrize("ranks_per_host", [None, 2])
# Residuals are those gradients that a rank sends: all, or half of them on hosts of two.
@pytest.mark.parametrize(("wire", "gather", "kept"), [("fp16", None, 0.0), ("int8", "int8", 1.0)])
def test_shards_are_reduced_in_a_quarter_of_their_gradients_memory_beyond_residuals(
    wire, gather, kept, ranks_per_host
):
    """Beyond torch's default."""
    more = _peak(wire, ranks_per_host, gather) - _peak(None, None)
    allowed = kept / (ranks_per_host or 1) + 0.25
    assert more <= allowed * 4 * (WIDTH * WIDTH + WIDTH)
