"""Bytes that a hook sends: as its stats count them, and never more than gradients have."""

import itertools
import random
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distamp import comm_hooks
from distamp.comm_hooks import COMM_FORMATS, HookStats
from distamp.comm_hooks.collectives import LayoutBuilder
from tests.on_ranks import on_ranks


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
    assert str(HookStats()) == "no gradient was sent in a compressed format"
    line = str(HookStats(left_off="hosts have from 1 to 3 ranks"))
    assert line == "the hook was left off: hosts have from 1 to 3 ranks"
    line = str(HookStats(fallbacks=Counter({"other way": 2})))
    assert line == "no gradient was sent in a compressed format; 2 x other way"


def sent(numel: int, wire: str, ranks_per_host: int) -> HookStats:
    model = DistributedDataParallel(nn.Linear(numel, 1, bias=False), bucket_cap_mb=100)
    state = comm_hooks.register_comm_hook(model, wire, ranks_per_host=ranks_per_host)
    model(torch.ones(1, numel)).sum().backward()
    return state.stats()


# A ring of 4 ranks sends 6 / 4 of the gradients for each, and visits each of 2 hosts once.
@on_ranks(4)
@pytest.mark.parametrize(("ranks_per_host", "share"), [(1, 6 / 4), (2, 6 / 4 / 2)])
def test_bytes_are_counted_beside_those_of_a_ring(ranks_per_host, share):
    stats, numel = sent(1 << 18, "fp16", ranks_per_host), 1 << 18
    compressed = 6 / 4 if ranks_per_host == 1 else 2 / 2 / 2
    assert stats.bytes_uncompressed == share * 4 * numel
    assert stats.total_bytes == pytest.approx(0.502 * compressed * 4 * numel, rel=1e-3)


# -- layouts: never more bytes than gradients are, and far fewer where there are many ------------

by_name = pytest.mark.parametrize("wire", list(COMM_FORMATS.values()), ids=lambda each: each.name)
CPU = torch.device("cpu")
RANKS = [(wide, here) for wide in (2, 3, 16, 128, 1024) for here in (1, 2, 8)]


def slice_bytes(wire, layout):
    """The bytes that a rank sends to another one."""
    return sum(wire.row_bytes(256 * part.num_blocks) for part in layout.slices)


def bucket_share(wire, num_hosts, ranks_per_host, numels):
    """The bytes that leave a host, divided by those of fp32 elements in a ring between hosts."""
    layout = LayoutBuilder(wire, num_hosts, ranks_per_host, numels, 4, CPU).bucket()
    # A bucket without a layout is sent uncompressed.
    if layout is None:
        return 1.0
    sent = num_hosts * ranks_per_host * slice_bytes(wire, layout)
    return (sent + 4 * len(layout.uncompressed_index)) / (4 * sum(numels))


def shard_share(wire, num_hosts, ranks_per_host, numels):
    ranks = range(num_hosts * ranks_per_host)
    layout = LayoutBuilder(wire, num_hosts, ranks_per_host, numels, 4, CPU).shards(ranks)
    if layout is None:
        return 1.0
    # Uncompressed elements are all-reduced, which takes twice the bytes of a reduce-scatter.
    sent = slice_bytes(wire, layout) + 8 * len(layout.uncompressed_index)
    return sent / (4 * sum(numels))


@pytest.mark.parametrize("share", [bucket_share, shard_share])
@by_name
def test_nothing_grows_whatever_the_sizes_and_the_ranks(wire, share):
    draw, worst = random.Random(0), 0.0
    for (wide, here), count in itertools.product(RANKS, (1, 2, 30)):
        for _ in range(4):
            numels = [int(10 ** draw.uniform(0, 6)) for _ in range(count)]
            if sum(numels) > 1_500_000:
                continue
            worst = max(worst, share(wire, wide, here, numels))
        worst = max(worst, share(wire, wide, here, [1] * count))
    assert worst <= 1.0


@pytest.mark.parametrize("share", [bucket_share, shard_share])
@by_name
def test_many_elements_among_which_some_are_few_take_the_formats_bytes(wire, share):
    expected = wire.block_bytes / 1024
    for wide, here in [(2, 1), (16, 1), (2, 8)]:
        # Of a layer: a matrix, its bias, and scalars.
        assert share(wire, wide, here, [1 << 20, 1024, 1, 1, 63]) <= 1.06 * expected
