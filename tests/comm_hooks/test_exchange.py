"""Where gradients go: never more bytes than they are, and far fewer where there are many."""

import itertools
import random

import pytest

from distamp.comm_hooks import WIRE_FORMATS
from distamp.comm_hooks.plans import bucket_plan, shard_plan

by_name = pytest.mark.parametrize("wire", list(WIRE_FORMATS.values()), ids=lambda each: each.name)
RANKS = [(wide, here) for wide in (2, 3, 16, 128, 1024) for here in (1, 2, 8)]


def bucket_share(wire, wide, here, numels):
    """What leaves a host, beside the same elements as fp32 in a ring between hosts."""
    plan = bucket_plan(wire, wide, here, 0, numels, 4)
    # What has no plan is all-reduced as it is.
    if plan is None:
        return 1.0
    rows = wide * here * plan.parts[0].row_bytes
    return (rows + 4 * len(plan.small)) / (4 * sum(numels))


def shard_share(wire, wide, here, numels):
    plan = shard_plan(wire, wide, here, numels, 4)
    if plan is None:
        return 1.0
    # What is small is all-reduced, which is twice a reduce-scatter.
    rows = sum(part.row_bytes for part in plan.parts)
    return (rows + 8 * len(plan.small)) / (4 * sum(numels))


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


def positions(places):
    """All elements of a tensor that are encoded."""
    return [at for _, flat, n in places.inside(0, places.numel) for at in range(flat, flat + n)]


@pytest.mark.parametrize(("wide", "here"), [(2, 1), (2, 2), (3, 2)])
def test_each_element_is_once_in_the_plan_of_a_bucket(wide, here):
    wire, draw = WIRE_FORMATS["int8"], random.Random(0)
    for _ in range(20):
        numels = [draw.choice([1, 3, 64, 65, 300, 5000]) for _ in range(draw.randint(2, 12))]
        plans = [bucket_plan(wire, wide, here, local, numels, 4) for local in range(here)]
        if plans[0] is None:
            continue
        whole, small = positions(plans[0].parts[0].whole), plans[0].small.tolist()
        assert sorted(whole + small) == list(range(sum(numels)))
        sent, before = [], 0
        for plan, length in zip(plans, plans[0].parts[0].lengths, strict=True):
            mine = positions(plan.parts[0].mine)
            assert all(at < length for at in mine)
            sent += [before + at for at in mine]
            before += length
        assert before == sum(numels)
        assert sent == whole
