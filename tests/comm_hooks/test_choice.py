"""Which way wins, from tables of times."""

from __future__ import annotations

import pytest

from distamp.comm_hooks import HookStats
from distamp.comm_hooks.auto import choose


@pytest.mark.parametrize(
    ("fp32", "fp16", "int8", "wire"),
    [
        (4.0, 2.0, 1.0, "int8"),  # a slow link
        (4.0, 2.0, 2.0, "fp16"),  # a tie goes to the more exact
        (4.0, 2.0, 1.95, "fp16"),
        (4.0, 2.0, 1.9, "int8"),
        (1.0, 1.0, 1.0, "fp32"),
        (1.0, 0.97, 0.98, "fp32"),  # not worth other numbers
        (1.0, 0.95, 0.99, "fp16"),
        (1.0, 1.2, 1.5, "fp32"),  # a slow processor
        (1.0, 1.2, 0.9, "int8"),
        (1e-6, 9e-7, 2e-6, "fp16"),
    ],
)
def test_the_most_exact_way_that_is_not_slower_wins(fp32, fp16, int8, wire):
    seconds = {"fp32": [fp32], "fp16": [fp16], "int8": [int8]}
    choice = choose(seconds, 1)
    assert choice.wire == wire
    assert choice.compressed == (wire != "fp32")
    assert seconds[wire][0] <= 1.05 * min(fp32, fp16, int8)


@pytest.mark.parametrize("outlier", [1e-9, 1e9])
def test_one_odd_time_decides_nothing(outlier):
    choice = choose({"fp32": [1.0, 1.0, outlier], "fp16": [0.5, 0.5, 0.5]}, 1)
    assert choice.wire == "fp16"
    assert dict(choice.seconds) == {"fp32": 1.0, "fp16": 0.5}


def test_a_choice_reads_as_a_line():
    choice = choose({"fp32": [3.61], "fp16": [1.84], "int8": [0.9301]}, 26_214_400)
    assert str(choice) == (
        "auto chose int8: the link is the bottleneck "
        "(26.2 MB in fp32 3610 ms, fp16 1840 ms, int8 930.1 ms)"
    )
    assert str(HookStats(choice=choice)).endswith("ms); no gradient was sent in a wire format")
    choice = choose({"fp32": [0.01], "fp16": [0.02]}, 4_000)
    assert str(choice) == (
        "auto chose fp32 (no hook): the processor is the bottleneck, and no format is 4 % faster "
        "(0.004 MB in fp32 10 ms, fp16 20 ms)"
    )
    assert str(HookStats(choice=choice)) == str(choice)
