"""What a hook says of itself."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distamp import comm_hooks
from distamp.comm_hooks import HookStats


def test_a_value_that_reads_as_a_line():
    stats = HookStats(
        exchanges=12,
        bytes_sent=Counter({"fp16": 51_000_000, "bf16": 500}),
        bytes_uncompressed=100_000_000,
        seconds_waiting=1.234,
        levels="two levels: 2 hosts of 4 ranks",
        fallbacks=Counter({"sparse gradient all-reduced as it is": 4}),
    )
    assert str(stats) == (
        "12 exchanges sent 51 MB as fp16, 0.0005 MB as bf16; 100 MB uncompressed, 49% saved; "
        "waited 1.23 s; two levels: 2 hosts of 4 ranks; "
        "4 x sparse gradient all-reduced as it is"
    )
    assert str(HookStats()) == "no gradient was sent in a wire format"
    line = str(HookStats(fallbacks=Counter({"other way": 2})))
    assert line == "no gradient was sent in a wire format; 2 x other way"


def _uncompressed(numel: int, ranks_per_host: int) -> HookStats:
    model = DistributedDataParallel(nn.Linear(numel, 1, bias=False), bucket_cap_mb=100)
    state = comm_hooks.register(model, "fp16", ranks_per_host=ranks_per_host)
    model(torch.ones(1, numel)).sum().backward()
    return state.stats()


# A ring of 4 ranks sends 6 / 4 of the gradients for each, and visits each of 2 hosts once.
@pytest.mark.parametrize(("ranks_per_host", "share"), [(1, 6 / 4), (2, 6 / 4 / 2)])
def test_bytes_are_counted_beside_those_of_a_ring(ranks4, ranks_per_host, share):
    numel = 1 << 18
    sent = 6 / 4 if ranks_per_host == 1 else 2 / 2 / 2
    for stats in ranks4.run(_uncompressed, numel, ranks_per_host):
        assert stats.bytes_uncompressed == share * 4 * numel
        assert stats.total_bytes == pytest.approx(0.502 * sent * 4 * numel, rel=1e-3)
