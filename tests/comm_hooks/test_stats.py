"""The bytes that a hook sends: its stats count them, and gradients never have fewer."""

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

# -- the text ------------------------------------------------------------------------------------


def test_stats_read_as_a_line():
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


def test_stats_without_an_exchange():
    assert str(HookStats()) == "no gradient was sent in a compressed format"


def test_stats_of_a_hook_that_was_left_off():
    stats = HookStats(left_off="hosts have from 1 to 3 ranks")
    assert str(stats) == "the hook was left off: hosts have from 1 to 3 ranks"


def test_stats_with_fallbacks_alone():
    stats = HookStats(fallbacks=Counter({"other way": 2}))
    assert str(stats) == "no gradient was sent in a compressed format; 2 x other way"


# -- bytes of an exchange ------------------------------------------------------------------------

NUMEL = 1 << 18
FP32_BYTES = 4 * NUMEL


def stats_of_exchange(ranks_per_host: int) -> HookStats:
    """Average NUMEL gradients in fp16 under DDP, and return the hook's stats."""
    model = DistributedDataParallel(nn.Linear(NUMEL, 1, bias=False), bucket_cap_mb=100)
    hook = comm_hooks.register_comm_hook(model, "fp16", ranks_per_host=ranks_per_host)
    model(torch.ones(1, NUMEL)).sum().backward()
    return hook.stats()


@on_ranks(4)
def test_bytes_in_one_level_are_half_of_a_rings():
    stats = stats_of_exchange(ranks_per_host=1)
    # In a ring of 4 ranks each one sends 6 / 4 of the gradients.
    assert stats.bytes_uncompressed == 6 / 4 * FP32_BYTES
    assert stats.total_bytes == pytest.approx(0.502 * 6 / 4 * FP32_BYTES, rel=1e-3)


@on_ranks(4)
def test_bytes_in_two_levels_are_those_between_the_hosts():
    stats = stats_of_exchange(ranks_per_host=2)
    # The ring visits both hosts once, and between hosts a rank has half of the gradients.
    assert stats.bytes_uncompressed == 6 / 4 / 2 * FP32_BYTES
    assert stats.total_bytes == pytest.approx(0.502 * FP32_BYTES / 2, rel=1e-3)


# -- layouts: never more bytes than gradients have, and far fewer where there are many -----------

CPU = torch.device("cpu")


def slice_bytes(format, layout):
    """Return the bytes that a rank sends to another one."""
    return sum(format.row_bytes(256 * part.num_blocks) for part in layout.slices)


def bucket_share(format, num_hosts, ranks_per_host, numels):
    """Return the bytes that leave a host, divided by the bytes of fp32 in a ring between hosts."""
    builder = LayoutBuilder(format, num_hosts, ranks_per_host, numels, 4, CPU)
    layout = builder.bucket()
    # A bucket without a layout is sent uncompressed.
    if layout is None:
        return 1.0
    compressed = num_hosts * ranks_per_host * slice_bytes(format, layout)
    uncompressed = 4 * len(layout.uncompressed_index)
    return (compressed + uncompressed) / (4 * sum(numels))


def shard_share(format, num_hosts, ranks_per_host, numels):
    builder = LayoutBuilder(format, num_hosts, ranks_per_host, numels, 4, CPU)
    layout = builder.shards(range(num_hosts * ranks_per_host))
    if layout is None:
        return 1.0
    # Uncompressed elements are all-reduced, which takes twice the bytes of a reduce-scatter.
    uncompressed = 8 * len(layout.uncompressed_index)
    return (slice_bytes(format, layout) + uncompressed) / (4 * sum(numels))


def draw_sizes(draw, count):
    """Draw sizes of up to a million elements, 1.5 million in all."""
    while True:
        numels = [int(10 ** draw.uniform(0, 6)) for _ in range(count)]
        if sum(numels) <= 1_500_000:
            return numels


by_format = pytest.mark.parametrize("format", COMM_FORMATS.values(), ids=list(COMM_FORMATS))
by_share = pytest.mark.parametrize("share", [bucket_share, shard_share])


def check_no_growth(format, share, num_hosts, draws):
    """Check buckets of one, two and thirty parameters on hosts of one, two and eight ranks."""
    draw = random.Random(num_hosts)
    for ranks_per_host in (1, 2, 8):
        for count in (1, 2, 30):
            assert share(format, num_hosts, ranks_per_host, [1] * count) <= 1.0
            for _ in range(draws):
                numels = draw_sizes(draw, count)
                assert share(format, num_hosts, ranks_per_host, numels) <= 1.0, numels


@pytest.mark.parametrize("num_hosts", [2, 128])
@by_share
@by_format
def test_a_format_never_sends_more_bytes_than_fp32(format, share, num_hosts):
    check_no_growth(format, share, num_hosts, draws=1)


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [2, 3, 16, 128, 1024])
@by_share
@by_format
def test_a_format_never_sends_more_bytes_than_fp32_in_many_draws(format, share, num_hosts):
    check_no_growth(format, share, num_hosts, draws=4)


@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(2, 1), (16, 1), (2, 8)])
@by_share
@by_format
def test_a_layer_with_scalars_takes_the_bytes_of_the_format(
    format, share, num_hosts, ranks_per_host
):
    """A matrix with its bias and scalars takes at most 6 % more than the matrix alone."""
    expected = format.block_bytes / 1024
    numels = [1 << 20, 1024, 1, 1, 63]
    assert share(format, num_hosts, ranks_per_host, numels) <= 1.06 * expected
