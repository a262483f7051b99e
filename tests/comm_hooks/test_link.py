"""The benchmark of a link: it times every way on all ranks, and names the most exact fast one."""

import pytest
import torch

from benchmarks.link import call_for, select_way, time_ways
from tests.on_ranks import on_ranks


@pytest.mark.parametrize(
    ("no_hook", "fp16", "int8", "way"),
    [
        ([4.0], [2.0], [1.0], "int8"),
        ([4.0], [2.0], [2.0], "fp16"),
        ([4.0], [2.0], [1.95], "fp16"),
        ([4.0], [2.0], [1.9], "int8"),
        ([1.0], [0.97], [0.98], "no hook"),
        ([1.0], [1.2], [1.5], "no hook"),
        ([1.0, 1.0, 1e-9], [0.5] * 3, [2.0] * 3, "fp16"),
        ([1.0, 1.0, 1e9], [0.5] * 3, [2.0] * 3, "fp16"),
    ],
)
def test_the_most_exact_way_within_four_percent_of_the_fastest_is_selected(
    no_hook, fp16, int8, way
):
    assert select_way({"no hook": no_hook, "fp16": fp16, "int8": int8}) == way


def test_each_way_has_a_line_for_a_training_script():
    assert call_for("no hook") == "register no hook"
    assert call_for("torch bf16").startswith("model.register_comm_hook(None, ")
    assert call_for("int8") == 'comm_hooks.register_comm_hook(model, "int8")'
    assert (
        call_for("int8 in one level")
        == 'comm_hooks.register_comm_hook(model, "int8", ranks_per_host=1)'
    )


@on_ranks(2)
def test_every_way_is_timed_on_all_ranks():
    seconds = time_ways(5000, 2, torch.device("cpu"))
    assert list(seconds) == ["no hook", "fp16", "torch bf16", "bf16", "int8"]
    assert all(len(times) == 2 and min(times) > 0 for times in seconds.values())
