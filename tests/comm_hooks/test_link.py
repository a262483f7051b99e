"""The benchmark of a link: it times every format on all ranks, and names the best one."""

import pytest
import torch

from benchmarks.link import call_for, select_way, time_ways
from tests.on_ranks import on_ranks


def select(no_hook: float, fp16: float, int8: float) -> str:
    """Return the way that the benchmark names for these seconds."""
    return select_way({"no hook": [no_hook], "fp16": [fp16], "int8": [int8]})


def test_int8_is_selected_if_it_is_clearly_the_fastest():
    assert select(no_hook=4.0, fp16=2.0, int8=1.0) == "int8"
    assert select(no_hook=4.0, fp16=2.0, int8=1.9) == "int8"


def test_the_more_exact_fp16_is_selected_within_four_percent_of_int8():
    assert select(no_hook=4.0, fp16=2.0, int8=2.0) == "fp16"
    assert select(no_hook=4.0, fp16=2.0, int8=1.95) == "fp16"


def test_no_hook_is_selected_within_four_percent_of_the_fastest():
    assert select(no_hook=1.0, fp16=0.97, int8=0.98) == "no hook"


def test_no_hook_is_selected_on_a_fast_link():
    assert select(no_hook=1.0, fp16=1.2, int8=1.5) == "no hook"


@pytest.mark.parametrize("outlier", [1e-9, 1e9])
def test_a_single_outlier_changes_nothing(outlier):
    seconds = {"no hook": [1.0, 1.0, outlier], "fp16": [0.5] * 3, "int8": [2.0] * 3}
    assert select_way(seconds) == "fp16"


def test_each_way_has_a_line_for_a_training_script():
    assert call_for("no hook") == "register no hook"
    assert call_for("torch bf16").startswith("model.register_comm_hook(None, ")
    assert call_for("int8") == 'comm_hooks.register_comm_hook(model, "int8")'
    one_level = 'comm_hooks.register_comm_hook(model, "int8", ranks_per_host=1)'
    assert call_for("int8 in one level") == one_level


@on_ranks(2)
def test_every_way_is_timed_on_all_ranks():
    seconds = time_ways(5000, 2, torch.device("cpu"))
    assert list(seconds) == ["no hook", "fp16", "torch bf16", "bf16", "int8"]
    for times in seconds.values():
        assert len(times) == 2
        assert min(times) > 0
